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
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from vkernel.core.checks import check_choice, check_positive, check_whole
from vkernel.core.errors import require
from vkernel.core.estimate import relative_se
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
from vkernel.train.objectives import VARIES, Batch, Objective, Times, Training

CHUNK = 1 << 24  # numbers of a table of features held at once
LARGEST = 6000  # weights whose covariance is a matrix
RATIO = 0.05  # largest F_eff / P at which the leading order is accurate; at .11 it is off by a factor of 2
GROUPS, ROOM = 8, 1 << 26  # groups of draws for the error of the prediction, and numbers kept for them
FIRST, MOST = 256, 1024  # sets of inputs, doubled until the error is small
ACCURATE, PLACES, LEVELS = 0.05, 1024, 8  # that error, and the noised points and ranges of t at which it is taken
FEWEST = 8  # sets of inputs from which a covariance over inputs is measured
STEP = 0.2  # lr * rho above which a step of SGD is not small
Variances = Callable[[Tensor, Tensor], Tensor | None]  # at x (N, d) and t (N,): (units, N), or none if exact


def target_noise(model: models.Model, training: Training, batch: Batch) -> Tensor | None:
    """Return N = Cov[y|x] of a batch, ``(M, P, d, d)``, or ``None`` where it vanishes or targets are held fixed."""
    if "targets" not in training.vary or training.objective.ratio == 0:
        return None
    cov = training.objective.covariance(training.score, batch.x.flatten(0, 1), batch.t.flatten())
    slope = model.target_slope(batch.t, training.process)
    return slope.square()[..., None, None] * cov.reshape(*batch.t.shape, *cov.shape[1:])


class LinearField(FiniteRank):
    """A kernel whose basis is a linear model's: ``weights`` is Cov[W], (F o, F o), ``mean_weights`` is E[W], (F, o).
    ``groups (G, F, F)`` are independent estimates of Cov[W], traced over outputs, from which ``error`` follows.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> model = vk.models.Linear(vk.features.grid("gaussian", 4, process=process), target="x0")
    >>> F = model.features.count
    >>> V = vk.kernels.LinearField(model, process, torch.eye(F), torch.zeros(F, 1))
    >>> V.cov(torch.zeros(3, 1), 0.5).trace().shape
    torch.Size([3])
    """

    relative_error: float = 0.0

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

    def estimates(self, x: Tensor, t: Time) -> Tensor | None:
        if self.groups is None:
            return None
        when = times_of(t, x).double()
        return _variances(self.model, self.groups, x.double(), when) * self.model.slope(when, self.process).square()

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
    ``form`` is "given-inputs" (averaged over ``sets`` sets of inputs; by default as many as an error of 5 % needs, 256
    to 1,024) or "leading" (expectations over ``quadrature`` draws); the other arguments are those of
    ``vk.train_ensemble``. With the seed of an ensemble the kernel uses that ensemble's inputs; give another one for an
    independent prediction. ``target_noise`` and ``misfit`` are its terms. ``relative_error`` is the error of the
    variance averaged over noised points with t in each eighth of the training times, at its largest.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> model = vk.models.Linear(vk.features.grid("gaussian", 4, process=process), target="x0")
    >>> V = vk.kernels.Linear(model, data, process, draws=64, seed=1)
    >>> x = torch.linspace(-1, 1, 5)[:, None]
    >>> V.cov(x, 0.2).trace().shape, V.error(x, 0.2).shape
    (torch.Size([5]), torch.Size([5]))
    """

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
        times: Times = "uniform",
        sets: int | None = None,
        quadrature: int = 1 << 17,
        progress: Progress = False,
    ) -> None:
        training = Training(data, process, objective, draws, vary, seed, times)
        self.process, self.draws = process, draws
        self.model, self.features = _check_linear(model, training), model.features.count
        P, self.held = training.finite_draws("A linear model"), "inputs" not in training.vary
        self.form = check_choice(form, "form", ("given-inputs", "leading"))
        given = 1 if self.held else None if sets is None else check_whole(sets, "sets")
        if form == "leading":
            good = "targets" in training.vary
            require(good, "The leading order averages over targets; where they are held, use form='given-inputs'.")
            mean = self._leading(training, quadrature, P)
            valid, advice = self.effective <= RATIO * P, "Use form='given-inputs'."
            why = f"effective features / draws = {{:.2g}}; the leading order in 1/P is for ratios up to {RATIO}"
        else:
            with show_progress(given or MOST, progress) as report:
                mean = self._given_inputs(training, P, given, report)
            valid, advice = self.held or self.sets >= FEWEST, f"Give sets ≥ {FEWEST}: the misfit is hardly measured."
            inputs = "which are held" if self.held else f"averaged over {self.sets} sets of them"
            why = f"exact given the inputs, {inputs}; effective F/P = {{:.2g}}"
        super().__init__(model, process, self.target_noise + self.misfit, mean, self.groups)
        self.relative_error = largest_error(training, self.estimates)
        self._assess(valid, f"{why.format(self.effective / P)}; {known(self.relative_error)}", advice)
        if form != "leading" and sets is None and self.relative_error > ACCURATE:
            warnings.warn(f"Linear kernel: {known(self.relative_error)}; a larger sets=… lowers this.", stacklevel=2)

    def only(self, part: str) -> LinearField:
        """Return the kernel of one term alone, "target_noise" or "misfit"."""
        parts = {"target_noise": self.target_noise, "misfit": self.misfit}
        require(part in parts, f"The terms are target_noise and misfit, not {part!r}.")
        groups = self.groups_of[part] if self.groups_of else None
        return LinearField(self.model, self.process, parts[part], self.mean_weights, groups)

    def _given_inputs(self, training: Training, P: int, sets: int | None, report: Reporter) -> Tensor:
        """Compute the two terms of Cov[W] given sets of inputs, and of groups of sets; return E[W]."""
        count, self.effective = max(2, min(GROUPS, ROOM // self.features**2)), 0.0
        sums: list[tuple[list[Tensor], Tensor]] = []  # of each group: E(W|X) of its sets, and the sum of their noise
        self.sets, more = 0, sets or FIRST
        while True:
            parts = torch.arange(self.sets, self.sets + more).chunk(count)
            new = [self._sets(training, P, part, report) for part in parts]
            sums = [([*a, *b], n + m) for (a, n), (b, m) in zip(sums, new, strict=True)] if sums else new
            self.sets += more
            mean = self._average([torch.cat(found) for found, _ in sums], [noise for _, noise in sums])
            if sets or self.sets >= MOST or largest_error(training, self.estimates) <= ACCURATE:
                break
            more = self.sets
        self.effective /= self.sets
        if self.sets < (sets or MOST):
            report("sets of inputs", MOST - self.sets)
        return mean

    def _sets(self, training: Training, P: int, part: Tensor, report: Reporter) -> tuple[list[Tensor], Tensor]:
        """Return E(W|X) of some sets of inputs, and the sum over them of the covariance that noise of targets gives."""
        model, exact, F = self.model, training.without_noise(), self.features
        size, found = F * training.data.d, []
        noise = torch.zeros((size, size), dtype=torch.float64, device=training.data.device)
        for block in part.split(max(1, CHUNK // (P * F))):
            batch = exact.batch(block.tolist(), P)
            A, Y = model.system(batch, training.process)
            if F <= P:
                H = torch.cholesky_solve(A.mT, factor(A.mT @ A, model.ridge, F, P))
            else:
                H = torch.cholesky_solve(A, factor(model.gram(batch, training.process), model.ridge, F, P)).mT
            found.append(H @ Y)
            self.effective += float(torch.einsum("mfp,mpf->", H, A))
            N = target_noise(model, training, batch)
            if N is not None:
                noise += _outer(H, (model.omega(batch.t, training.process) / P)[..., None, None] * N)
            report("sets of inputs", len(block))
        return found, noise

    def _average(self, weights: list[Tensor], noise: list[Tensor]) -> Tensor:
        """Compute both terms of Cov[W] from E(W|X) and the noise of groups of sets; return E[W]."""
        W, n = torch.cat(weights), sum(map(len, weights))
        mean = W.mean(0)
        away = (W - mean).reshape(n, -1)
        self.target_noise = sum(noise, torch.zeros_like(noise[0])) / n
        self.misfit = away.mT @ away / max(n - 1, 1)
        spread = [torch.einsum("sfa,sga->fg", w - mean, w - mean) * (n / max(n - 1, 1) / len(w)) for w in weights]
        traced = [_traced(v, mean) / len(w) for v, w in zip(noise, weights, strict=True)]
        groups = {"target_noise": torch.stack(traced), "misfit": torch.stack(spread)}
        self.groups_of = {} if self.held else groups
        self.groups = sum(self.groups_of.values(), torch.zeros(())) if self.groups_of else None
        return mean

    def _leading(self, training: Training, count: int, P: int) -> Tensor:
        """Compute the two terms of Cov[W] to leading order in 1/P, and those of parts of the draws; return E[W]."""
        F, model, ridge = self.features, self.model, self.model.ridge

        def terms(gradients: _Gradients) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            root = factor(gradients.gram, ridge, F, gradients.total)
            W, inverse = torch.cholesky_solve(gradients.cross, root), torch.cholesky_inverse(root)

            def sandwich(middle: Tensor) -> Tensor:  # (Σ+γ)^-1 on both sides, on the index of features
                full = torch.einsum("ef,fagb,gh->eahb", inverse, middle.reshape(*W.shape, *W.shape), inverse)
                return full.reshape(middle.shape) / P

            noise, misfit = map(sandwich, gradients.covariance(W))
            return noise, misfit * (not self.held), W, inverse

        self.target_noise, self.misfit, W, inverse = terms(_Gradients(model, training, count))
        parts = zip(*(terms(part)[:2] for part in _parts(model, training, count)), strict=True)
        noise, misfit = (torch.stack([_traced(v, W) for v in term]) for term in parts)
        self.groups_of, self.groups = {"target_noise": noise, "misfit": misfit}, noise + misfit
        self.effective = F - ridge * float(inverse.trace())
        return W


class SGD(LinearField):
    """The covariance that ``steps`` of SGD with rate ``lr`` and batches of ``batch`` give a linear ``model``.
    Expectations are over ``quadrature`` draws; M is evaluated at ``nodes`` times, or, if ``stationary``, at the end
    alone, which is accurate once the residual no longer changes.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> model = vk.models.Linear(vk.features.grid("gaussian", 4, process=process), target="x0")
    >>> V = vk.kernels.SGD(model, data, process, lr=0.01, batch=16, steps=100, quadrature=1024, nodes=4)
    >>> V.cov(torch.zeros(5, 1), 0.5).trace().shape
    torch.Size([5])
    """

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
        times: Times = "uniform",
        quadrature: int = 1 << 16,
        nodes: int = 24,
        progress: Progress = False,
    ) -> None:
        self.lr, self.batch = check_positive(lr, "lr"), check_whole(batch, "batch")
        self.tau = lr * check_whole(steps, "steps")
        check_whole(nodes, "nodes, the times at which the noise is evaluated,", 2)
        training = Training(data, process, objective, None, VARIES, seed, times)
        gradients = _Gradients(_check_linear(model, training), training, quadrature)
        parts = _parts(model, training, quadrature)
        u = self.tau * torch.linspace(0, 1, nodes, dtype=torch.float64).square()  # the residual moves fast at first
        at = [self.tau] if stationary else u.tolist()
        with show_progress((1 + len(parts)) * len(at), progress) as report:
            weights, mean, rho = self._descend(gradients, at, report)
            groups = torch.stack([_traced(self._descend(part, at, report)[0], mean) for part in parts])
        super().__init__(model, process, weights, mean, groups)
        self.largest, self.relative_error = lr * rho, largest_error(training, self.estimates)
        why = f"lr × largest eigenvalue = {self.largest:.2g}; the closed form is for small steps, up to {STEP}"
        self._assess(self.largest <= STEP, f"{why}; {known(self.relative_error)}", "Lower the learning rate.")

    def _descend(self, gradients: _Gradients, at: list[float], report: Reporter) -> tuple[Tensor, Tensor, float]:
        """Return Cov[W] and E[W] after training, with M evaluated at some times, and the largest eigenvalue."""
        rho, Q = torch.linalg.eigh(gradients.gram)
        rho, pull = rho.clamp_min(0) + gradients.model.ridge, Q.mT @ gradients.cross
        rates = (rho[:, None] + rho)[:, None, :, None]

        def mean(u: float) -> Tensor:  # E[W] at time u, (F, o)
            return Q @ (_relaxed(rho, u)[:, None] * pull)

        def noise(u: float) -> Tensor:  # M at time u in the eigenbasis, (F, o, F, o)
            target, misfit = gradients.covariance(mean(u))
            report("training time")
            return torch.einsum("fk,fagb,gl->kalb", Q, (target + misfit).reshape(*pull.shape, *pull.shape), Q)

        before = noise(at[0])
        cov = before * _relaxed(rates, self.tau) if len(at) == 1 else torch.zeros_like(before)
        for left, right in pairwise(at):
            h, after = right - left, noise(right)
            whole, tilted = _relaxed(rates, h), _tilted(rates, h)  # ∫ e^{-r(h-v)} dv and ∫ e^{-r(h-v)} v/h dv
            cov = cov * (-rates * h).exp() + before * (whole - tilted) + after * tilted
            before = after
        weights = torch.einsum("fk,kalb,gl->fagb", Q, cov, Q).reshape(pull.numel(), pull.numel())
        return self.lr / self.batch * weights, mean(self.tau), float(rho.max())


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
    """Moments over ``count`` draws, from the ``first`` on, of the gradient of a linear model's loss: ``gram`` is Σ and
    ``cross`` is E[ω φ y^T]."""

    def __init__(self, model: models.Linear, training: Training, count: int, first: int = 0) -> None:
        check_whole(count, "quadrature")
        self.model, self.process, self.training, self.first = model, training.process, training, first
        self.noise: Tensor | None = None
        self.size = min(count, max(1, CHUNK // model.features.count))
        self.blocks, self.gram, self.cross = count // self.size, torch.zeros(()), torch.zeros(())
        self.total = self.blocks * self.size
        for batch in self._batches():
            A, Y = (a[0] / math.sqrt(self.blocks) for a in model.system(batch, training.process))
            self.gram, self.cross = self.gram + A.mT @ A, self.cross + A.mT @ Y

    def _batches(self) -> Iterator[Batch]:
        exact = self.training.without_noise()
        return (exact.batch([0], self.size, self.first + k * self.size) for k in range(self.blocks))

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


def _parts(model: models.Linear, training: Training, count: int) -> list[_Gradients]:
    """Return the gradients over equal parts of ``count`` draws, of a few F draws each where there are as many."""
    parts = max(2, min(GROUPS, count // (4 * model.features.count)))
    size = max(1, count // parts)
    return [_Gradients(model, training, size, k * size) for k in range(parts)]


def _traced(weights: Tensor, like: Tensor) -> Tensor:
    """Return Cov[W] ``(F o, F o)`` traced over outputs, ``(F, F)``, for W ``like (F, o)``."""
    return torch.einsum("faga->fg", weights.reshape(*like.shape, *like.shape))


def _variances(model: models.Linear, groups: Tensor, x: Tensor, t: Tensor) -> Tensor:
    """Return φ^T G φ at ``x (*batch, d)`` for each of ``groups (G, F, F)``."""
    phi = model.features(x, t).double()
    return torch.stack([((phi @ group) * phi).sum(-1) for group in groups])


def largest_error(training: Training, estimates: Variances, places: int = PLACES) -> float:
    """Return the largest relative error, over ranges of t, of ``estimates(x, t)`` at noised points, in the unit of the
    loss (small t would dominate otherwise); 0 if they are exact."""
    batch = training.without_noise().batch([0], places)
    x, t = batch.x[0], batch.t[0]
    v = estimates(x, t)
    if v is None:
        return 0.0
    v = v * training.process.base.S(t.double())
    return max(float(relative_se(v[:, some].mean(1))) for some in t.argsort().chunk(LEVELS))


def known(error: float) -> str:
    """State how well variances are known."""
    return f"variances are known to {100 * error:.2g} %" if error else "without sampling error"


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
