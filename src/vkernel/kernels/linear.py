r"""V-kernels of linear models, fitted or trained by SGD (docs/theory.md, §8).

**Linear models** :math:`\hat s = a_t + B_t W\phi` have :math:`\mathrm{Cov}[\hat s, \hat s'] = B_t\,\phi^T
\mathrm{Cov}[W]\,\phi' B_{t'}`. With :math:`\Sigma = E\,\omega\phi\phi^T`, the noise :math:`N = \mathrm{Cov}[y|x]` of
the target and the misfit :math:`b = E[y|x] - W\phi`, the covariance of one draw's gradient is

.. math:: M(W) = E[\omega^2 (N + b b^T)\,\phi\phi^T] - E[\omega b\phi]\,E[\omega b\phi]^T .

:class:`Linear`, least squares with ridge :math:`\gamma`, has two forms: the **leading** order in 1/P (8.1),
:math:`\frac1P (\Sigma+\gamma)^{-1} M(W_\gamma) (\Sigma+\gamma)^{-1}` at :math:`W_\gamma = E[\omega y\phi^T]
(\Sigma+\gamma)^{-1}`, and **given inputs**, exact given the inputs X and averaged over sets of them (8.2):

.. math:: \mathrm{Cov}[W] = E_X\Big[\sum_i \frac{\omega_i}{P} N_i\, H_i H_i^T\Big] + \mathrm{Cov}_X\big[E(W|X)\big],
          \quad H = (A^T A + \gamma)^{-1} A^T, \quad A = \sqrt{\omega/P}\,\phi .

The terms with N are the *target noise*, and vanish for J0; the rest, the misfit, is exactly the covariance of the J0
ensemble on the same inputs. :class:`SGD` takes fresh draws at every step, as real models are trained (8.4): M is
evaluated at nodes in training time and interpolated linearly, and the exponential is integrated exactly. A ridge is
then weight decay, added to every eigenvalue :math:`\rho` of :math:`\Sigma`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from vkernel.core.checks import check_choice, check_positive, check_whole
from vkernel.core.errors import require
from vkernel.core.progress import Progress, Reporter, progress as show_progress
from vkernel.core.rng import Generator
from vkernel.data.empirical import Empirical
from vkernel.kernels.base import FiniteRank, times_of
from vkernel.process import Process
from vkernel.sample.sde import Field
from vkernel.score.base import Time, wide_time
from vkernel.train import models
from vkernel.train.ensemble import Ensemble
from vkernel.train.models.linear import factor
from vkernel.train.objectives import VARIES, Batch, Objective, Quantile, Training

CHUNK = 1 << 24  # numbers of a table of features held at once
LARGEST = 6000  # weights whose covariance is a matrix
RATIO = 0.05  # largest F_eff / P at which the leading order is accurate; at .11 it is off by a factor of 2
GROUPS, ROOM = 8, 1 << 26  # groups of sets for the error of the prediction, and numbers kept for them
FEWEST = 8  # sets of inputs from which a covariance over inputs is measured
STEP = 0.2  # lr * rho above which a step of SGD is not small


def target_noise(model: models.Model, training: Training, batch: Batch) -> Tensor | None:
    """Return N = Cov[y|x] of a batch, ``(M, P, d, d)``, or ``None`` where it vanishes or targets are held fixed."""
    if "targets" not in training.vary or training.objective.ratio == 0:
        return None
    cov = training.objective.covariance(training.score, batch.x.flatten(0, 1), batch.t.flatten())
    slope = model.target_slope(batch.t, training.process)
    return slope.square()[..., None, None] * cov.reshape(*batch.t.shape, *cov.shape[1:])


class LinearField(FiniteRank):
    """A kernel whose basis is a linear model's: ``weights`` is Cov[W], (F o, F o), ``mean_weights`` is E[W], (F, o).
    ``groups (G, F, F)`` are independent estimates of Cov[W], traced over outputs, from which ``error`` follows."""

    def __init__(
        self, model: models.Linear, process: Process, weights: Tensor, mean: Tensor, groups: Tensor | None = None
    ) -> None:
        self.model, self.mean_weights, self.groups = model, mean, groups
        self._ensemble = Ensemble(model, {"weights": mean[None]}, process, (mean.shape[-1],))
        super().__init__(self._basis, (weights + weights.mT) / 2, process, self._ensemble.member(0))

    def _basis(self, x: Tensor, t: Time) -> Tensor:
        self.process.check(wide_time(t, x.device))
        when = times_of(t, x)
        slope = self.model.slope(when.double(), self.process).to(x.dtype)
        phi = (slope[..., None] * self.model.features(x, when)).movedim(-1, 0)
        eye = torch.eye(self.mean_weights.shape[-1], dtype=x.dtype, device=x.device)
        return torch.einsum("f...,ab->fa...b", phi, eye).flatten(0, 1)

    def error(self, x: Tensor, t: Time) -> Tensor:
        if self.groups is None:
            return x.new_zeros(x.shape[:-1])
        phi = self.model.features(x, times_of(t, x)).double()
        v = torch.einsum("...f,gfh,...h->g...", phi, self.groups, phi)
        return (v.std(0) / (v.mean(0) * math.sqrt(len(v)))).to(x.dtype)

    def _changes(self, members: int, generator: Generator) -> Tensor:
        z = self._normals(members, len(self.root), generator)
        return (z @ self.root).reshape(members, *self.mean_weights.shape)

    def draw(self, members: int, generator: Generator = None) -> Field:
        return self._ensemble.field({"weights": self._changes(members, generator)})

    def models(self, members: int, generator: Generator = None) -> Ensemble:
        """Draw models of this kernel: linear models with Gaussian weights."""
        weights = self.mean_weights + self._changes(members, generator)
        return Ensemble(self.model, {"weights": weights}, self.process, self._ensemble.shape)


class Linear(LinearField):
    """The covariance that training gives a linear ``model`` fitted to ``draws`` noised points.
    ``form`` is "given-inputs" (averaged over ``sets`` sets of inputs) or "leading" (expectations over ``quadrature``
    draws); the other arguments are those of ``vk.train_ensemble``. With the seed of an ensemble the kernel uses that
    ensemble's inputs; give another one for an independent prediction. ``target_noise`` and ``misfit`` are its terms."""

    def __init__(
        self,
        model: models.Linear,
        data: Empirical | Tensor,
        process: Process,
        draws: int,
        *,
        form: str = "given-inputs",
        objective: str | Objective = "J1",
        vary: Sequence[str] = VARIES,
        seed: int = 0,
        times: str | Quantile = "uniform",
        sets: int = 512,
        quadrature: int = 1 << 17,
        progress: Progress = False,
    ) -> None:
        training = Training(data, process, objective, draws, vary, seed, times)
        self.model, self.features, self.draws = _check_linear(model, training), model.features.count, draws
        P, held = training.finite_draws("A linear model"), "inputs" not in training.vary
        self.form, sets = check_choice(form, "form", ("given-inputs", "leading")), check_whole(sets, "sets")
        if form == "leading":
            good = "targets" in training.vary
            require(good, "The leading order averages over targets; where they are held, use form='given-inputs'.")
            mean, groups = self._leading(_Gradients(model, training, quadrature), P, held), None
            valid, advice = self.effective <= RATIO * P, "Use form='given-inputs'."
            why = f"effective features / draws = {{:.2g}}; the leading order in 1/P is for ratios up to {RATIO}"
        else:
            with show_progress(sets, progress) as report:
                mean, groups = self._given_inputs(training, P, 1 if held else sets, report)
            valid, advice = held or sets >= FEWEST, f"Give sets ≥ {FEWEST}: the misfit is hardly measured."
            inputs = "which are held" if held else f"averaged over {sets} sets of them"
            why = f"exact given the inputs, {inputs}; effective F/P = {{:.2g}}"
        super().__init__(model, process, self.target_noise + self.misfit, mean, groups)
        self._assess(valid, why.format(self.effective / P), advice)

    def only(self, part: str) -> LinearField:
        """Return the kernel of one term alone, "target_noise" or "misfit"."""
        parts = {"target_noise": self.target_noise, "misfit": self.misfit}
        require(part in parts, f"The terms are target_noise and misfit, not {part!r}.")
        return LinearField(self.model, self.process, parts[part], self.mean_weights)

    def _given_inputs(self, training: Training, P: int, sets: int, report: Reporter) -> tuple[Tensor, Tensor | None]:
        """Compute the two terms of Cov[W] given sets of inputs; return E[W], and estimates of Cov[W] by groups."""
        model, exact, F, o = self.model, training.without_noise(), self.features, training.data.d
        parts = torch.arange(sets).chunk(max(2, min(GROUPS, ROOM // F**2)))
        found, by_group, self.effective = [], [], 0.0
        for part in parts:
            noise = torch.zeros((F * o, F * o), dtype=torch.float64, device=training.data.device)
            for block in part.split(max(1, CHUNK // (P * F))):
                batch = exact.batch(block.tolist(), P)
                A, Y = model.system(batch, training.process)
                if F <= P:
                    H = torch.cholesky_solve(A.mT, factor(A.mT @ A, model.ridge, F, P))
                else:
                    H = torch.cholesky_solve(A, factor(A @ A.mT, model.ridge, F, P)).mT
                found.append(H @ Y)
                self.effective += float(torch.einsum("mfp,mpf->", H, A)) / sets
                N = target_noise(model, training, batch)
                if N is not None:
                    noise += _outer(H, (model.omega(batch.t, training.process) / P)[..., None, None] * N)
                report("sets of inputs", len(block))
            by_group.append(noise)
        W = torch.cat(found)
        away = W - W.mean(0)
        self.target_noise = sum(by_group, torch.zeros_like(by_group[0])) / sets
        self.misfit = away.reshape(sets, -1).mT @ away.reshape(sets, -1) / max(sets - 1, 1)
        if sets == 1:
            return W.mean(0), None
        spread = [torch.einsum("sfa,sga->fg", a, a) * sets / (sets - 1) for a in (away[p] for p in parts)]
        traced = [torch.einsum("faga->fg", n.reshape(F, o, F, o)) for n in by_group]
        return W.mean(0), torch.stack([(n + s) / len(p) for n, s, p in zip(traced, spread, parts, strict=True)])

    def _leading(self, gradients: _Gradients, P: int, held: bool) -> Tensor:
        """Compute the two terms of Cov[W] to leading order in 1/P; return E[W]."""
        F, ridge = self.features, self.model.ridge
        root = factor(gradients.gram, ridge, F, gradients.total)
        W, inverse = torch.cholesky_solve(gradients.cross, root), torch.cholesky_inverse(root)

        def sandwich(middle: Tensor) -> Tensor:  # (Σ+γ)^-1 on both sides, on the index of features
            full = torch.einsum("ef,fagb,gh->eahb", inverse, middle.reshape(*W.shape, *W.shape), inverse)
            return full.reshape(middle.shape) / P

        self.target_noise, misfit = map(sandwich, gradients.covariance(W))
        self.misfit = torch.zeros_like(misfit) if held else misfit
        self.effective = F - ridge * float(inverse.trace())
        return W


class SGD(LinearField):
    """The covariance that ``steps`` of SGD with rate ``lr`` and batches of ``batch`` give a linear ``model``.
    Expectations are over ``quadrature`` draws; M is evaluated at ``nodes`` times, or, if ``stationary``, at the end
    alone, which is accurate once the residual no longer changes."""

    def __init__(
        self,
        model: models.Linear,
        data: Empirical | Tensor,
        process: Process,
        *,
        lr: float,
        batch: int,
        steps: int,
        objective: str | Objective = "J1",
        stationary: bool = False,
        seed: int = 0,
        times: str | Quantile = "uniform",
        quadrature: int = 1 << 16,
        nodes: int = 24,
        progress: Progress = False,
    ) -> None:
        self.lr, self.batch = check_positive(lr, "lr"), check_whole(batch, "batch")
        self.tau = lr * check_whole(steps, "steps")
        check_whole(nodes, "nodes, the times at which the noise is evaluated,", 2)
        training = Training(data, process, objective, None, VARIES, seed, times)
        gradients = _Gradients(_check_linear(model, training), training, quadrature)
        rho, Q = torch.linalg.eigh(gradients.gram)
        rho, pull = rho.clamp_min(0) + model.ridge, Q.mT @ gradients.cross
        rates = (rho[:, None] + rho)[:, None, :, None]

        def mean(u: float) -> Tensor:  # E[W] at time u, (F, o)
            return Q @ (_relaxed(rho, u)[:, None] * pull)

        def noise(u: float) -> Tensor:  # M at time u in the eigenbasis, (F, o, F, o)
            target, misfit = gradients.covariance(mean(u))
            return torch.einsum("fk,fagb,gl->kalb", Q, (target + misfit).reshape(*pull.shape, *pull.shape), Q)

        with show_progress(nodes - 1, progress) as report:
            if stationary:
                cov = noise(self.tau) * _relaxed(rates, self.tau)
            else:
                u = self.tau * torch.linspace(0, 1, nodes, dtype=torch.float64).square()  # it moves fast at first
                before = noise(0.0)
                cov = torch.zeros_like(before)
                for left, right in pairwise(u.tolist()):
                    h, after = right - left, noise(right)
                    whole, tilted = _relaxed(rates, h), _tilted(rates, h)  # ∫ e^{-r(h-v)} dv and ∫ e^{-r(h-v)} v/h dv
                    cov = cov * (-rates * h).exp() + before * (whole - tilted) + after * tilted
                    before = after
                    report("training time")
        weights = torch.einsum("fk,kalb,gl->fagb", Q, cov, Q).reshape(pull.numel(), pull.numel())
        super().__init__(model, process, lr / batch * weights, mean(self.tau))
        self.largest = lr * float(rho.max())
        why = f"lr × largest eigenvalue = {self.largest:.2g}; the closed form is for small steps, up to {STEP}"
        self._assess(self.largest <= STEP, why, "Lower the learning rate.")


def _relaxed(rate: Tensor, h: float) -> Tensor:
    """Return (1 - e^{-rate h})/rate, which is h at rate 0."""
    z = rate * h
    return h * torch.where(z > 1e-8, -torch.expm1(-z) / z.clamp_min(1e-300), 1 - z / 2)


def _tilted(rate: Tensor, h: float) -> Tensor:
    """Return (1/h) ∫_0^h v e^{-rate (h - v)} dv = (1 - (1 - e^{-z})/z)/rate with z = rate h; h/2 at rate 0."""
    z = rate * h
    near = h * (0.5 - z / 6 + z.square() / 24)
    return torch.where(z > 1e-3, h * (1 + torch.expm1(-z) / z.clamp_min(1e-300)) / z.clamp_min(1e-300), near)


class _Gradients:
    """Moments over ``count`` draws of the gradient of a linear model's loss: ``gram`` is Σ, ``cross`` E[ω φ y^T]."""

    def __init__(self, model: models.Linear, training: Training, count: int) -> None:
        check_whole(count, "quadrature")
        self.model, self.process, self.training = model, training.process, training
        self.noise: Tensor | None = None
        self.size = min(count, max(1, CHUNK // model.features.count))
        self.blocks, self.gram, self.cross = count // self.size, torch.zeros(()), torch.zeros(())
        self.total = self.blocks * self.size
        for batch in self._batches():
            A, Y = (a[0] / math.sqrt(self.blocks) for a in model.system(batch, training.process))
            self.gram, self.cross = self.gram + A.mT @ A, self.cross + A.mT @ Y

    def _batches(self) -> Iterator[Batch]:
        exact = self.training.without_noise()
        return (exact.batch([0], self.size, k * self.size) for k in range(self.blocks))

    def covariance(self, W: Tensor) -> tuple[Tensor, Tensor]:
        """Return the part of M(W) with N, which does not depend on W and is computed once, and the rest: (F o, F o)."""
        model, mean = self.model, (self.cross - self.gram @ W).reshape(-1)  # E[ω b φ]
        misfit = -mean[:, None] * mean
        noise = torch.zeros_like(misfit) if self.noise is None else self.noise
        for batch in self._batches():
            phi, scale = model.features(batch.x, batch.t), model.omega(batch.t, self.process).square() / self.total
            b = model.training_target(batch.m, batch.x, batch.t, self.process) - phi @ W
            misfit += _outer(phi.mT, scale[..., None, None] * b[..., :, None] * b[..., None, :])
            N = target_noise(model, self.training, batch) if self.noise is None else None
            if N is not None:
                noise += _outer(phi.mT, scale[..., None, None] * N)
        self.noise = noise
        return noise, misfit


def _check_linear(model: models.Linear, training: Training) -> models.Linear:
    """Return a linear model; refuse others, and too many weights for a matrix Cov[W]."""
    require(isinstance(model, models.Linear), f"This kernel belongs to a linear model, not {model!r}.")
    size = model.features.count * training.data.d
    require(size <= LARGEST, f"Cov[W] would be {size} × {size}; this kernel takes up to F d = {LARGEST}.")
    return model


def _outer(H: Tensor, N: Tensor) -> Tensor:
    """Return sum_i N_i,ab h_i h_i^T, ``(F o, F o)``, summed over members, of ``H (M, F, P)`` and ``N (M, P, o, o)``."""
    F, o = H.shape[1], N.shape[-1]
    out = torch.empty((F, o, F, o), dtype=H.dtype, device=H.device)
    for a in range(o):
        for b in range(a + 1):
            block = ((H * N[:, None, :, a, b]) @ H.mT).sum(0)
            out[:, a, :, b], out[:, b, :, a] = block, block.mT
    return out.reshape(F * o, F * o)
