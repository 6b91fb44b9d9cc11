r"""The V-kernel of linear models (docs/theory.md, §8.1).

A linear model :math:`\hat s = a_t + B_t W\phi`, fitted to P draws with weights :math:`\omega = \lambda B^2` and ridge
:math:`\gamma`, has :math:`\mathrm{Cov}[\hat s, \hat s'] = B_t\,\phi^T\,\mathrm{Cov}[W]\,\phi' B_{t'}`. Two forms:

* **leading** order in 1/P. With :math:`\Sigma = E\,\omega\phi\phi^T`,
  :math:`W_\gamma = E[\omega y\phi^T](\Sigma+\gamma)^{-1}`, the misfit :math:`b = E[y|x] - W_\gamma\phi` and the noise
  of the target :math:`N = \mathrm{Cov}[y|x]`,

  .. math:: \mathrm{Cov}[W] = \frac1P (\Sigma+\gamma)^{-1} \big\{ E[\omega^2 (N + b b^T)\,\phi\phi^T]
            - \gamma^2\, W_\gamma^T W_\gamma \big\} (\Sigma+\gamma)^{-1} .

* **given inputs**, the default: exact given the inputs X, then averaged over sets of them. With
  :math:`H = (A^T A + \gamma)^{-1} A^T`, :math:`A = \sqrt{\omega/P}\,\phi`,

  .. math:: \mathrm{Cov}[W] = E_X\Big[\sum_i \frac{\omega_i}{P} N_i\, H_i H_i^T\Big] + \mathrm{Cov}_X\big[E(W|X)\big] .

The terms with N are *target noise*, and vanish for J0; what is left, the misfit or the covariance over inputs, is
exactly the covariance of the J0 ensemble on the same inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.errors import require
from vkernel.core.progress import Progress
from vkernel.core.progress import progress as show_progress
from vkernel.core.rng import Generator
from vkernel.data.empirical import Empirical
from vkernel.kernels.base import Field, PredictedMean, Time, own, times
from vkernel.kernels.fields import FiniteRank
from vkernel.process import Process
from vkernel.score.base import Score, wide_time
from vkernel.train.models.linear import Linear as Model
from vkernel.train.models.linear import factor
from vkernel.train.objectives import J0, VARIES, Batch, Objective, Quantile, Training, parse

__all__ = ["Linear", "LinearField"]

FORMS = ("given-inputs", "leading")
CHUNK = 1 << 24  # numbers of a table of features held at once
SETS_CHUNK = 1 << 20  # the same for sets of inputs, few enough that progress is reported often
LARGEST = 6000  # weights whose covariance is a matrix
RATIO = 0.05  # the leading order is taken for good up to this F_eff / P; at .11 it is off by a factor of 2


class LinearField(FiniteRank):
    """A kernel of finite rank whose basis is a linear model's: what :class:`Linear` and ``SGD`` share.

    ``weights`` is Cov[W], ``(F o, F o)`` with the output's index fastest; ``mean`` is E[W], ``(F, o)``.
    """

    def __init__(self, model: Model, process: Process, weights: Tensor, mean: Tensor) -> None:
        self.model, self.mean_weights = model, mean
        super().__init__(self._basis, (weights + weights.mT) / 2, process)

    def _basis(self, x: Tensor, t: Time) -> Tensor:
        self.process.check(wide_time(t, x.device))
        when = times(t, x)
        slope = self.model.parametrisation.slope(when.double(), self.process).to(x.dtype)
        phi = (slope[..., None] * self.model.features(x, when)).movedim(-1, 0)
        o = self.mean_weights.shape[-1]
        return torch.einsum("f...,ab->fa...b", phi, torch.eye(o, dtype=x.dtype, device=x.device)).flatten(0, 1)

    @property
    def mean(self) -> Score:
        """The predicted mean score."""
        return PredictedMean(self.mean_at, self.process, self.mean_weights.shape[-1])

    def mean_at(self, x: Tensor, t: Time) -> Tensor:
        """The mean of the learned score, like x."""
        when = times(t, x).reshape(1, -1)
        out = self.model.score({"weights": self.mean_weights[None]}, x.reshape(1, -1, x.shape[-1]), when, self.process)
        return out.reshape(x.shape)

    def draw(self, members: int, generator: Generator = None) -> Field:
        require(members >= 1, f"A field is drawn for at least one member; got {members}.")
        return self.field(
            rng.randn((members, len(self.root)), rng.as_generator(generator), self.root.device, torch.float64)
        )

    def field(self, z: Tensor) -> Field:
        """The fields of given standard normals ``z (members, F o)``."""
        members = len(z)
        delta = (z @ self.root).reshape(members, *self.mean_weights.shape)

        def field(x: Tensor, t: Time) -> Tensor:
            own(x, members)
            flat = x.reshape(members, -1, x.shape[-1])
            when = torch.as_tensor(t, dtype=x.dtype, device=x.device)
            when = when.reshape(1, 1) if when.ndim == 0 else when.expand(x.shape[:-1]).reshape(members, -1)
            out = self.model.features.apply(delta.to(x), flat, when)
            return (self.model.parametrisation.slope(when, self.process)[..., None] * out).reshape(x.shape)

        return field


class Linear(LinearField):
    """The covariance that training gives a linear ``model`` fitted to ``draws`` noised points.

    ``form`` is "given-inputs" (averaged over ``sets`` sets of inputs) or "leading" (expectations over ``quadrature``
    draws). ``objective``, ``vary``, ``seed`` and ``times`` as for ``vk.train_ensemble``. The two
    terms are ``target_noise`` and ``misfit``, covariances of W. With the seed of an ensemble the kernel sees that
    ensemble's inputs; give another one for a prediction that owes it nothing.
    """

    def __init__(
        self,
        model: Model,
        data: Empirical | Tensor,
        process: Process,
        *,
        draws: int,
        form: str = "given-inputs",
        objective: str | Objective = "J1",
        vary: Sequence[str] = VARIES,
        seed: int = 0,
        times: str | Quantile = "uniform",
        sets: int = 512,
        quadrature: int = 1 << 17,
        progress: Progress = False,
    ) -> None:
        require(isinstance(model, Model), f"This kernel belongs to a linear model, not {model!r}.")
        require(form in FORMS, f"form must be one of {', '.join(FORMS)}; got {form!r}.")
        require(draws is not None, "A linear model is fitted to a finite number of draws: give draws=P.")
        for name, count in (("sets", sets), ("quadrature", quadrature)):
            require(isinstance(count, int) and count >= 1, f"{name} must be a whole number ≥ 1; got {count!r}.")
        vary = (vary,) if isinstance(vary, str) else tuple(vary)
        data = data if isinstance(data, Empirical) else Empirical(data)
        size = model.features.count * data.d
        require(size <= LARGEST, f"Cov[W] would be {size} × {size}; this kernel takes up to F d = {LARGEST}.")
        goal = parse(objective)
        self.draws, self.form, self.features = draws, form, model.features.count
        # E[y|x] is what J0 asks for: with its targets the misfit, with the objective's covariance the noise. Targets
        # that are held are part of what is given, noise and all.
        held = "targets" not in vary
        good = form != "leading" or not held
        require(good, "The leading order averages over targets; where they are held, use form='given-inputs'.")
        training = Training(data, process, goal if held else J0(), draws, vary, seed, times)
        parts = _Parts(model, training, J0() if held else goal)
        if form == "leading":
            self.target_noise, self.misfit, mean, self.effective = parts.leading(quadrature)
            if "inputs" not in vary:
                self.misfit = torch.zeros_like(self.misfit)
        else:
            self.target_noise, self.misfit, mean, self.effective = parts.given_inputs(
                sets if "inputs" in vary else 1, progress
            )
        super().__init__(model, process, self.target_noise + self.misfit, mean)
        self._state_validity(sets if "inputs" in vary else None)

    def only(self, part: str) -> LinearField:
        """The kernel of one term alone, "target_noise" or "misfit"."""
        require(part in ("target_noise", "misfit"), f"The terms are target_noise and misfit, not {part!r}.")
        return LinearField(self.model, self.process, getattr(self, part), self.mean_weights)

    def _state_validity(self, sets: int | None) -> None:
        ratio = self.effective / self.draws
        if self.form == "leading":
            words = f"effective features / draws = {ratio:.2g}; the leading order in 1/P is for ratios up to {RATIO}"
            self._judge(ratio <= RATIO, words if ratio <= RATIO else f"{words}. Use form='given-inputs'.")
        elif sets is None:
            self._judge(True, f"exact given the inputs, which are held; effective F/P = {ratio:.2g}")
        else:
            words = f"exact given the inputs, averaged over {sets} sets of them; effective F/P = {ratio:.2g}"
            few = sets < 8
            self._judge(not few, words if not few else f"{words}. Give sets ≥ 8: the misfit is hardly measured.")


class _Parts:
    """The terms of Cov[W], from draws with noiseless targets and the objective's target noise."""

    def __init__(self, model: Model, training: Training, goal: Objective) -> None:
        self.model, self.training, self.goal, self.process = model, training, goal, training.process
        self.F, self.o = model.features.count, training.data.d

    def noise(self, batch: Batch) -> Tensor:
        """N = Cov[y|x], ``(M, P, o, o)``."""
        x = batch.x.reshape(-1, *batch.x.shape[2:])
        cov = self.goal.covariance(self.training.score, x, batch.t.flatten())
        unit = self.model.parametrisation.target_slope(batch.t, self.process).square()
        return unit[..., None, None] * cov.reshape(*batch.t.shape, self.o, self.o)

    def outer(self, H: Tensor, N: Tensor) -> Tensor:
        """sum_i N_i,ab h_i h_i^T as ``(F o, F o)``, summed over members, for ``H (M, F, P)`` and ``N (M, P, o, o)``."""
        out = torch.empty((self.F, self.o, self.F, self.o), dtype=H.dtype, device=H.device)
        for a in range(self.o):
            for b in range(a + 1):
                block = ((H * N[:, None, :, a, b]) @ H.mT).sum(0)
                out[:, a, :, b], out[:, b, :, a] = block, block.mT
        return out.reshape(self.F * self.o, -1)

    def given_inputs(self, sets: int, progress: Progress) -> tuple[Tensor, Tensor, Tensor, float]:
        """Target noise and misfit, the mean of W, and the effective number of features."""
        P, model = self.training.draws, self.model
        assert P is not None
        at_once = max(1, SETS_CHUNK // (P * self.F))
        noise: Tensor | float = 0.0
        found, effective = [], 0.0
        with show_progress(sets, progress) as report:
            for start in range(0, sets, at_once):
                batch = self.training.batch(range(start, min(start + at_once, sets)), P)
                A, Y = model.system(batch, self.process)
                if self.F <= P:
                    H = torch.cholesky_solve(A.mT, factor(A.mT @ A, model.ridge, self.F, P))
                else:
                    H = torch.cholesky_solve(A, factor(A @ A.mT, model.ridge, self.F, P)).mT
                found.append(H @ Y)
                effective += float(torch.einsum("mfp,mpf->", H, A))
                if not isinstance(self.goal, J0):
                    scale = model.parametrisation.omega(batch.t, self.process) / P
                    noise = noise + self.outer(H, scale[..., None, None] * self.noise(batch)) / sets
                report("predicting V", len(found[-1]))
        W = torch.cat(found)
        flat = (W - W.mean(0)).reshape(sets, -1)
        misfit = flat.mT @ flat / max(sets - 1, 1)
        return noise + torch.zeros_like(misfit), misfit, W.mean(0), effective / sets

    def leading(self, count: int) -> tuple[Tensor, Tensor, Tensor, float]:
        """The same to leading order in 1/P, with expectations over ``count`` draws."""
        P, model = self.training.draws, self.model
        assert P is not None
        step = min(count, max(1, CHUNK // self.F))
        starts = range(0, count - count % step, step)
        total = len(starts) * step
        gram, cross = torch.zeros(()), torch.zeros(())
        for start in starts:
            A, Y = model.system(self._batch(start, step), self.process)
            gram, cross = gram + A[0].mT @ A[0] / len(starts), cross + A[0].mT @ Y[0] / len(starts)
        root = factor(gram, model.ridge, self.F, total)
        W = torch.cholesky_solve(cross, root)
        noise, misfit = torch.zeros(()), torch.zeros(())
        for start in starts:
            batch = self._batch(start, step)
            phi = model.features(batch.x, batch.t)
            omega = model.parametrisation.omega(batch.t, self.process).square()[..., None, None] / total
            b = model.parametrisation.training_target(batch.m, batch.x, batch.t, self.process) - phi @ W
            misfit = misfit + self.outer(phi.mT, omega * b[..., :, None] * b[..., None, :])
            if not isinstance(self.goal, J0):
                noise = noise + self.outer(phi.mT, omega * self.noise(batch))
        mean = model.ridge * W.reshape(-1)  # E[ω b φ]
        misfit = misfit - mean[:, None] * mean
        effective = self.F - model.ridge * float(torch.cholesky_inverse(root).trace())
        both = (self._sandwich(root, a + torch.zeros_like(misfit)) / P for a in (noise, misfit))
        return (*both, W, effective)  # type: ignore[return-value]

    def _batch(self, start: int, count: int) -> Batch:
        return self.training.batch([0], count, start)

    def _sandwich(self, root: Tensor, middle: Tensor) -> Tensor:
        """(Σ+γ)^-1 on both sides, on the index of features."""
        half = torch.cholesky_solve(middle.reshape(self.F, -1), root).reshape(self.F, self.o, self.F, self.o)
        half = torch.cholesky_solve(half.movedim(2, 0).reshape(self.F, -1), root)
        return half.reshape(self.F, self.F, self.o, self.o).permute(1, 2, 0, 3).reshape(self.F * self.o, -1)
