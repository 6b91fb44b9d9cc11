r"""V-kernels of trained models: linear models, fitted or trained by SGD, and infinitely wide networks (theory, §8).

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

**Wide networks** (:class:`Lazy`) are linear in both :math:`f_0` and y: :math:`f(x) = f_0(x) + w(x)^T (y - f_0(X))` with
:math:`w(x)^T = K(u,U)\, G` and the smoother G (:mod:`vkernel.train.models.lazy`). The covariance of f is a sum of three
parts, exact given X (8.3):

.. math:: \text{targets:}\quad & E_X\Big[\sum_i w_i(x)\, w_i(x')\, N_i\Big], \\
          \text{init:}\quad & E_X\big[K_0(x,x') - w^T K_0(X,x') - K_0(x,X)\, w' + w^T K_0(X,X)\, w'\big] \otimes 1, \\
          \text{inputs:}\quad & \mathrm{Cov}_X\big[E(f|X)\big], \qquad E(f|X) = w(x)^T E[y|X] .

What does not vary is fixed at its value for member 0: the inputs (then there is one set), the random numbers of the
targets, :math:`f_0`; the last two then belong to :math:`E(f|X)`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vkernel.core.checks import check_choice, check_positive, check_whole
from vkernel.core.errors import require
from vkernel.core.progress import Progress, Reporter, progress as show_progress
from vkernel.core.rng import Generator
from vkernel.data.empirical import Empirical
from vkernel.kernels.base import FiniteRank, Function, times_of
from vkernel.process import Process
from vkernel.sample.sde import Field
from vkernel.score.base import Time, wide_time
from vkernel.train import models
from vkernel.train.ensemble import Ensemble
from vkernel.train.models.base import factor
from vkernel.train.objectives import VARIES, Batch, Objective, Quantile, Training

CHUNK = 1 << 24  # numbers of a table of features held at once
LARGEST = 6000  # weights whose covariance is a matrix
RATIO = 0.05  # largest F_eff / P at which the leading order is accurate; at .11 it is off by a factor of 2
GROUPS, ROOM = 8, 1 << 26  # groups of sets for the error of the prediction, and numbers kept for them
FEWEST = 8  # sets of inputs from which a covariance over inputs is measured
PAIRS, WIDEST, FEW = 1 << 21, 64, 4  # of Lazy: pairs held at once, the largest dimension, the fewest sets
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


class _Points(NamedTuple):
    """The functions of N points in m groups that the parts need; sums over inputs and sets are over one axis S P."""

    u: Tensor  # (m, N, p)
    slope: Tensor  # B, (m, N, 1)
    w: Tensor  # (m, N, S P)
    prior: Tensor  # K0(x, X), (m, N, S P), or w where f0 does not vary
    rest: Tensor  # w^T K0(X, X) - K0(x, X), (m, N, S P), likewise
    mean: Tensor  # E(f|X), centred, (d, m, N, S)


class Lazy(Function):
    """The covariance that training gives a lazy ``model`` fitted to ``draws`` noised points.
    The mean is over ``sets`` sets of inputs, those of the first members of an ensemble of this ``seed``; the other
    arguments are those of ``vk.train_ensemble``. ``effective`` is F_eff, the mean number of learned directions."""

    def __init__(
        self,
        model: models.Lazy,
        data: Empirical | Tensor,
        process: Process,
        *,
        draws: int,
        objective: str | Objective = "J1",
        vary: Sequence[str] = VARIES,
        sets: int = 16,
        seed: int = 0,
        times: str | Quantile = "uniform",
        progress: Progress = False,
    ) -> None:
        require(isinstance(model, models.Lazy), f"This kernel belongs to a lazy model, not {model!r}.")
        training = Training(data, process, objective, draws, vary, seed, times)
        P, shape, self.d = training.finite_draws("A lazy model"), training.data.shape, training.data.d
        check_whole(sets, "sets, the number of sets of inputs,")
        good = shape == (self.d,) and self.d <= WIDEST
        require(good, f"This kernel takes vectors of up to {WIDEST} numbers; an event of the data is {shape}.")
        super().__init__(self._sum, process)
        held = "inputs" not in training.vary
        self.model, self.draws, self.sets, self.device = model, P, 1 if held else sets, training.data.device
        self.varies_init = model.init and "init" in training.vary
        # the model of E(f|X): from f0 = 0 where f0 varies
        centre = replace(model, init=model.init and not self.varies_init)
        self._states = self._learn(centre, training, progress)
        self._mean = Ensemble(centre, self._states, process, shape).mean_score
        inputs = "for one set of inputs" if held else f"averaged over {sets} sets of inputs"
        why = f"exact in the lazy limit, {inputs}; F_eff/P = {self.effective / P:.2g}"
        self._assess(held or sets >= FEW, why, f"Give sets ≥ {FEW}: the covariance over inputs is hardly measured.")

    def _learn(self, centre: models.Lazy, training: Training, progress: Progress) -> dict[str, Tensor]:
        """Compute G, G K0(X,X) and the noise N of the targets ``(d, d, S P)``; return the states of E(f|X)."""
        exact = training.without_noise()
        smoothers, mixed, noise, states, self.effective = [], [], [], [], 0.0
        with show_progress(self.sets, progress) as report:
            for block in torch.arange(self.sets).split(max(1, PAIRS // self.draws**2)):
                batch = exact.batch(block.tolist(), self.draws)
                G, effective = self.model.smoother(batch.x, batch.t, self.process)
                states.append(centre.learn(batch, G, centre.initial(training, block.tolist()), self.process))
                smoothers.append(G)
                self.effective += float(effective.sum()) / self.sets
                if self.varies_init:
                    U = states[-1]["inputs"]
                    mixed.append(G @ self.model.kernel.prior(U, U))
                N = target_noise(self.model, training, batch)
                if N is not None:
                    noise.append(N)
                report("sets of inputs", len(block))
        self._G, self._mixed = torch.cat(smoothers), torch.cat(mixed) if mixed else None
        self._N = torch.cat(noise).movedim((-2, -1), (0, 1)).flatten(2).contiguous() if noise else None
        return {name: torch.cat([s[name] for s in states]) for name in states[0]}

    def parts(self, x: Tensor, t: Time, x2: Tensor | None = None, t2: Time | None = None) -> dict[str, Tensor]:
        """Return the terms of the covariance, "targets", "inputs" and "init", each ``(*batch, d, d)``."""
        there = x if x2 is None else x2
        for name, a in (("x", x), ("x2", there)):
            require(a.shape[-1] == self.d, f"{name} must be vectors of {self.d} numbers; got {tuple(a.shape)}.")
        batch = np.broadcast_shapes(x.shape[:-1], there.shape[:-1])
        when = times_of(t, x), times_of(t if t2 is None else t2, there)
        same = there is x and torch.equal(*when)
        flat = [a.expand(*batch, self.d).reshape(-1, 1, self.d) for a in (x, there)]
        flat += [a.expand(batch).reshape(-1, 1) for a in when]
        found = []
        for a, b, s, s2 in zip(*(f.split(self._width(1)) for f in flat), strict=True):
            one = self._points(a, s)
            found.append(self._terms(one, one if same else self._points(b, s2)))
        shape = (*batch, self.d, self.d)
        return {name: torch.cat([f[name] for f in found]).reshape(shape).to(x.dtype) for name in found[0]}

    def _sum(self, x: Tensor, t: Tensor, x2: Tensor, t2: Tensor) -> Tensor:
        return sum(self.parts(x, t, x2, t2).values(), torch.zeros(()).to(x))

    def pairs(self, x: Tensor, t: Tensor, x2: Tensor, t2: Tensor) -> Tensor:
        one, width, columns = self._points(x, t), self._width(len(x)), []
        for some, when in zip(x2.split(width, 1), t2.split(width, 1), strict=True):
            total = sum(self._terms(one, self._points(some, when)).values(), x.new_zeros(()).double())
            columns.append(total.movedim(3, 2).flatten(3, 4).flatten(1, 2))
        return torch.cat(columns, -1)

    def error(self, x: Tensor, t: Time) -> Tensor:
        if self.sets == 1:
            return x.new_zeros(x.shape[:-1])
        points, S = self._points(x.reshape(-1, 1, self.d), times_of(t, x).reshape(-1, 1)), self.sets
        v = points.mean.square().sum(0)[:, 0] * S / (S - 1)
        if self._N is not None:
            v = v + (points.w.square() * self._N.diagonal().sum(-1)).reshape(-1, S, self.draws).sum(-1)
        if self.varies_init:
            change = ((points.rest - points.prior) * points.w).reshape(-1, S, self.draws).sum(-1)
            v = v + self.d * (self.model.kernel.prior(points.u, points.u)[:, 0] + change)
        return (v.std(-1) / (v.mean(-1) * math.sqrt(S))).reshape(x.shape[:-1]).to(x.dtype)

    def _width(self, groups: int) -> int:
        """Return how many points of each of several groups are evaluated at once."""
        return max(1, PAIRS // (groups * self.sets * self.draws))

    def _points(self, x: Tensor, t: Tensor) -> _Points:
        """Return w and its like at ``x (m, N, d)`` and ``t (m, N)``."""
        (m, n, d), kernel, U = x.shape, self.model.kernel, self._states["inputs"]
        u = self.model.inputs(x.double().reshape(1, -1, d), t.double().reshape(1, -1), self.process)
        slope = self.model.slope(t.double(), self.process)[..., None]
        k = kernel.ntk(u, U)  # (S, m N, P)
        mean = k @ self._states["coefficients"]  # an f0 that does not vary is the same for all sets
        mean = (mean - mean.mean(0)).movedim((2, 1), (0, 1)).reshape(d, m, n, -1)
        w = prior = rest = k @ self._G
        if self._mixed is not None:
            prior = kernel.prior(u, U)
            rest = k @ self._mixed - prior
        w, prior, rest = (a.movedim(0, 1).reshape(m, n, -1) for a in (w, prior, rest))
        return _Points(u.reshape(m, n, -1), slope, w, prior, rest, mean)

    def _terms(self, one: _Points, two: _Points) -> dict[str, Tensor]:
        """Return the parts for all pairs within each group, ``(m, N, N', d, d)``."""
        slopes, d = (one.slope @ two.slope.mT)[..., None, None], range(self.d)
        inputs = torch.einsum("amns,bmks->mnkab", one.mean, two.mean) / max(self.sets - 1, 1)
        targets, init = torch.zeros_like(inputs), torch.zeros_like(inputs)
        if self._N is not None:
            rows = [torch.stack([(one.w * self._N[a, b]) @ two.w.mT for b in d], -1) for a in d]
            targets = torch.stack(rows, -2) / self.sets
        if self.varies_init:
            change = (one.rest @ two.w.mT - one.w @ two.prior.mT) / self.sets
            eye = torch.eye(self.d, dtype=slopes.dtype, device=slopes.device)
            init = (self.model.kernel.prior(one.u, two.u) + change)[..., None, None] * eye
        return {"targets": slopes * targets, "inputs": slopes * inputs, "init": slopes * init}
