r"""Samplers with noise: reverse SDE, ancestral steps, naive estimator, effective SDE (docs/theory.md, §4.2–4.5).

With :math:`\Delta > 0` the length of a step down in t, each is a Markov chain, Euler–Maruyama's at the pre-step point
but for ancestral steps:

* reverse SDE, for reference: :math:`x' = x + \Delta(\beta x + 2 D s) + \sqrt{2 D \Delta}\, z`;
* naive estimator: the PF-ODE step with :math:`\hat s = s + \sqrt{\kappa/\Delta}\,(\tilde s(x_0) - s)`, where
  :math:`x_0` is drawn from the posterior afresh at every step;
* ancestral sampling: :math:`x' = \alpha' m + \sigma' [c\,(x - \alpha m)/\sigma + \sqrt{1 - c^2}\, z]` with
  :math:`c = (\sigma'/\alpha')/(\sigma/\alpha)`: the law of :math:`x'` given x and :math:`x_0 = m` under the forward
  process (Ho et al. 2020, with their smaller variance);
* effective SDE: :math:`x' = x + \Delta(\beta x + D s_{avg}) + \xi`, where :math:`\xi` has the covariance V. A *white* V
  means fresh Gaussian noise of covariance :math:`\Delta D\,\mathrm{Cov}\,D`, in Itô's sense. A *quenched* V means one
  random field per trained model, drawn once: the chain is then an ODE, the PF-ODE of :math:`s_{avg} + \delta\hat s`.

Noise is drawn for all of ``x_T`` at every step. ``options`` are :class:`~vkernel.sample.loop.Options`, and results are
like ``x_T``, or a :class:`~vkernel.sample.loop.Solution` with ``save``.

**Semiclassical law.** Along the PF-ODE path of the mean score, a small deviation obeys the chain

.. math:: \delta_{k+1} = A_k \delta_k + \xi_k, \qquad A_k = 1 + \Delta_k (\beta_k + D_k \nabla s_{avg}(x_k, t_k)),

so that :math:`x_\epsilon | x_T \approx N(x_{det}, \Sigma)` to leading order in V. With a white V,
:math:`\Sigma_{k+1} = A_k \Sigma_k A_k^T + \Delta_k D_k \mathrm{Cov}_k D_k`; with a quenched V of finite rank the
factors themselves obey it, :math:`g_{k+1} = A_k g_k + \Delta_k D_k \phi_f(x_k, t_k)`, :math:`\Sigma = \sum_f g g^T`;
with any other quenched V, :math:`\Sigma = \sum_{kl} \Phi_k \Delta_k D_k \mathrm{Cov}_{kl} D_l \Delta_l \Phi_l^T`,
:math:`\Phi_k = A_{N-1} \cdots A_{k+1}`. It is the leading order: the mean shifts at the same order, and near a boundary
between training points the path itself is unstable and the approximation fails.

In high dimension :math:`\Sigma v` costs two passes along the path (one transposed), and :math:`\Sigma` is returned as a
Nyström approximation of the given ``rank``: :math:`\Sigma \Omega (\Omega^T \Sigma \Omega)^{-1} (\Sigma \Omega)^T`.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import pairwise
from typing import Unpack

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.checks import check_choice, check_number, check_whole, takes
from vkernel.core.covariance import Covariance, Factored, Matrix, flat
from vkernel.core.errors import require
from vkernel.core.rng import Generator
from vkernel.process import Process
from vkernel.sample.loop import METHODS, Level, Options, Problem, Solution, pf_ode, walk
from vkernel.score.base import Score, Time, check_score
from vkernel.score.empirical import EmpiricalScore

Field = Callable[[Tensor, Time], Tensor]
DENSE = 64  # up to this dimension the covariance of the semiclassical law is a matrix


class VKernel(ABC):
    """What the effective dynamics needs of a V-kernel; the kernels are in :mod:`vkernel.kernels`."""

    process: Process
    white: bool = False

    @property
    @abstractmethod
    def mean(self) -> Score:
        """The mean score that belongs to the kernel."""

    @abstractmethod
    def cov(self, x: Tensor, t: Time, x2: Tensor | None = None, t2: Time | None = None) -> Covariance:
        r"""Return :math:`\mathrm{Cov}_\theta[\hat s(x,t), \hat s(x',t')]`, paired over the broadcast batch."""

    @abstractmethod
    def draw(self, members: int, generator: Generator = None) -> Field:
        """Draw one field for each member: a function of ``x (members, *batch, *shape)`` and t that is like x."""

    def factors(self, x: Tensor, t: Time) -> Tensor | None:
        """Return factors of the covariance, ``(F, *batch, *shape)``, or ``None`` if it is not of finite rank."""
        return None

    def mean_and_noise(self, x: Tensor, t: Time, generator: Generator = None) -> tuple[Tensor, Tensor]:
        """Return the mean score and a Gaussian draw with covariance ``cov(x, t)``, both like x."""
        return self.mean(x, t), gaussian_noise(self, x, t, generator)


@takes(Problem)
def reverse_sde(score: Score, x_T: Tensor, **options: Unpack[Options]) -> Tensor | Solution:
    """Sample the reverse SDE of ``score`` from ``x_T``."""
    problem = Problem(score, x_T, **options)

    def step(x: Tensor, here: Level, there: Level) -> Tensor:
        dt, z = here.t - there.t, problem.noise(x)
        return x + dt * (here.beta * x + 2 * here.D * problem.s(x, here)) + math.sqrt(2 * here.D * dt) * z

    return problem.solve(step)


@takes(Problem)
def ancestral(
    score: Score, x_T: Tensor, *, noise: Callable[[int], Tensor] | None = None, **options: Unpack[Options]
) -> Tensor | Solution:
    """Sample ``score`` by ancestral steps from ``x_T``.
    ``noise(k)`` returns the standard normals of step k = 0, 1, …, like ``x_T``; by default they come from
    ``generator``."""
    problem, count = Problem(score, x_T, **options), itertools.count()

    def step(x: Tensor, here: Level, there: Level) -> Tensor:
        m = problem.m(x, here)
        c = there.sigma * here.alpha / (there.alpha * here.sigma)
        z = problem.noise(x) if noise is None else noise(next(count)).to(x)
        mean = there.alpha * m + (c * there.sigma / here.sigma) * (x - here.alpha * m)
        return mean + there.sigma * math.sqrt((1 - c) * (1 + c)) * z

    return problem.solve(step)


@takes(Problem)
def naive(score: EmpiricalScore, x_T: Tensor, *, kappa: float, **options: Unpack[Options]) -> Tensor | Solution:
    """Sample with the naive score estimator of strength ``kappa`` (unit of t): x0 is drawn afresh at every step.
    ``kappa = 0`` is the PF-ODE by Euler's method; at a step of length ``kappa`` the estimate is the raw proxy score."""
    require(isinstance(score, EmpiricalScore), "The naive estimator draws training points: it needs an EmpiricalScore.")
    check_number(kappa, "kappa, in the unit of t,", least=0)
    problem = Problem(score, x_T, **options)
    process = problem.process

    def step(x: Tensor, here: Level, there: Level) -> Tensor:
        dt = here.t - there.t
        posterior = score.posterior(process.unwhiten(x), here.t)
        target = m = process.whiten(posterior.mean)
        if kappa > 0:
            target = m + math.sqrt(kappa / dt) * (process.whiten(posterior.sample(1, problem.generator)[0]) - m)
        rate, gain = here.D / here.sigma**2 - here.beta, here.alpha * here.D / here.sigma**2
        return x - dt * (rate * x - gain * target)

    return problem.solve(step)


@takes(Problem)
def effective_sde(
    V: VKernel,
    x_T: Tensor,
    mean: Score | None = None,
    members: int | None = None,
    *,
    method: str = "exponential",
    **options: Unpack[Options],
) -> Tensor | Solution:
    """Sample what a typical trained model samples: mean score ``mean`` (default ``V.mean``), covariance ``V``.

    ``members=None`` draws one model for each sample, and the result is like ``x_T``; ``members=M`` draws M models that
    all start from ``x_T``, and the result is ``(M, *x_T.shape)``. For a white V every sample has independent noise, so
    M members are M repetitions. ``method`` is the ODE method for a quenched V, for which ``save`` is that of
    :func:`~vkernel.sample.pf_ode`; a white V is integrated by Euler–Maruyama, in Itô's sense.
    """
    own, mean = mean is None, check_kernel(V, mean)
    check_choice(method, "method", METHODS)
    if members is not None:
        check_whole(members, "members")
    problem = Problem(mean, x_T, ("path", "error", "logp"), **options)
    start = x_T if members is None else x_T.expand(members, *x_T.shape).contiguous()
    process, generator, shape = problem.process, problem.generator, problem.shape
    options["generator"] = generator

    if not V.white:
        require(problem.base is process, "Quenched kernels are for isotropic processes; whiten the data first.")
        field = V.draw(math.prod(problem.batch) if members is None else members, generator)

        def alone(x: Tensor, t: Time) -> Tensor:
            return field(x.reshape(-1, 1, *shape), t).reshape(x.shape)

        return pf_ode(Learned(mean, alone if members is None else field), start, method=method, **options)
    problem = Problem(mean, start, **options)

    def step(x: Tensor, here: Level, there: Level) -> Tensor:
        dt, data = here.t - there.t, process.unwhiten(x)
        if own:  # score and noise share one evaluation
            s, noise = (process.unwhiten(a) for a in V.mean_and_noise(data, here.t, generator))
        else:
            s, noise = problem.s(x, here), process.unwhiten(gaussian_noise(V, data, here.t, generator))
        return x + dt * (here.beta * x + here.D * s) + math.sqrt(dt) * here.D * noise

    return problem.solve(step)


class Learned(Score):
    """Mean score plus a field: the scores of several trained models, each at its own ``x[m]``."""

    def __init__(self, mean: Score, field: Field) -> None:
        self.base, self.field, self.process, self.shape = mean, field, mean.process, mean.shape

    def __call__(self, x: Tensor, t: Time) -> Tensor:
        change = self.field(x, t)
        good = isinstance(change, Tensor) and change.shape == x.shape
        require(good, f"The field of V returned the wrong shape for x of shape {tuple(x.shape)}.")
        return self.base(x, t) + change


def check_kernel(V: VKernel, mean: Score | None) -> Score:
    """Return the mean score to use with ``V``; refuse what is not a V-kernel, or belongs to another process."""
    known = "vk.kernels.Naive or a subclass of vk.sample.VKernel"
    require(isinstance(V, VKernel), f"V must be a V-kernel, such as {known}, not {V!r}.")
    mean = check_score(V.mean if mean is None else mean, "The effective dynamics")
    processes = f"another process ({V.process!r}) than the mean score ({mean.process!r})"
    require(V.process == mean.process, f"The V-kernel belongs to {processes}.")
    return mean


def covariance(V: VKernel, x: Tensor, t: Time) -> Covariance:
    """Return ``V.cov(x, t)``; refuse what is not a covariance operator on ``x``."""
    cov = V.cov(x, t)
    good = isinstance(cov, Covariance) and cov.batch + cov.shape == tuple(x.shape)
    require(good, f"V.cov(x, t) must be a Covariance on shape {tuple(x.shape)}; got {cov!r}.")
    return cov


def gaussian_noise(V: VKernel, x: Tensor, t: Time, generator: Generator) -> Tensor:
    """Draw a Gaussian with covariance ``V.cov(x, t)``, like x."""
    noise = covariance(V, x, t).draw(generator)
    require(bool(noise.isfinite().all()), "V is not a covariance here: its draw is not finite.")
    return noise


@takes(Problem)
def semiclassical(
    V: VKernel, x_T: Tensor, mean: Score | None = None, *, rank: int = 16, **options: Unpack[Options]
) -> tuple[Tensor | Solution, Covariance]:
    """Return mean and covariance of x at eps given ``x_T (*batch, *shape)``, to leading order in V.
    ``mean`` is the mean score (default ``V.mean``); ``rank`` and ``generator`` are those of the Nyström approximation
    in more than 64 dimensions. The callback receives, and ``save="path"`` keeps, the deterministic path; the mean is
    then a :class:`~vkernel.sample.loop.Solution`."""
    mean = check_kernel(V, mean)
    isotropic = mean.process.base is mean.process
    require(isotropic, "The semiclassical law is for isotropic processes; whiten the data first.")
    check_whole(rank, "rank")
    problem = Problem(mean, x_T, **options)
    path = problem.follow(walk(problem.x_T.double(), problem.levels, problem.euler, problem.progress), keep=True)
    chain, d = _Chain(problem, path), math.prod(problem.shape)
    if V.factors(path[0], problem.levels[0].t) is not None:
        return problem.solution(path), chain.factored(V)
    require(V.white or d <= DENSE, f"A quenched V without factors needs d ≤ {DENSE}; here d = {d}.")
    return problem.solution(path), chain.dense(V) if d <= DENSE else chain.nystrom(V, min(rank, d))


class _Chain:
    """The linearised chain along one path."""

    def __init__(self, problem: Problem, path: list[Tensor]) -> None:
        self.problem, self.levels, self.path, self.shape = problem, problem.levels, path, problem.shape
        self.dt = [here.t - there.t for here, there in pairwise(self.levels)]
        self.steps = range(len(self.dt))

    def push(self, k: int, v: Tensor, transposed: bool = False) -> Tensor:
        """Return A_k v, or its transpose."""
        level, x, score = self.levels[k], self.path[k], self.problem.score
        return v + self.dt[k] * (level.beta * v + level.D * (score.vjp if transposed else score.jvp)(x, level.t, v))

    def matrix(self, k: int) -> Tensor:
        """Return A_k as matrices, ``(*batch, d, d)``."""
        x, shape = self.path[k], self.shape
        eye = torch.eye(math.prod(shape), dtype=torch.float64, device=x.device)
        return torch.stack([flat(self.push(k, e.reshape(shape).expand_as(x)), shape) for e in eye], -1)

    def cov(self, V: VKernel, k: int, j: int) -> Tensor:
        """Return Cov[xi_k, xi_j] as matrices, for a white V with j = k."""
        one, two = self.levels[k], self.levels[j]
        if V.white:
            return self.dt[k] * one.D**2 * V.cov(self.path[k], one.t).dense()
        return self.dt[k] * one.D * self.dt[j] * two.D * V.cov(self.path[k], one.t, self.path[j], two.t).dense()

    def dense(self, V: VKernel) -> Covariance:
        """Return Sigma as a matrix, for a quenched V through Cov[delta_k, xi_j], j ≥ k."""
        d = math.prod(self.shape)
        sigma = self.path[0].new_zeros(*self.problem.batch, d, d)
        mixed = [] if V.white else [sigma for _ in self.steps]
        for k in self.steps:
            a = self.matrix(k)
            sigma = a @ sigma @ a.mT + self.cov(V, k, k)
            if not V.white:
                first, *rest = (a @ c for c in mixed)
                sigma = sigma + first + first.mT
                mixed = [c + self.cov(V, k, j) for j, c in enumerate(rest, k + 1)]
        return Matrix((sigma + sigma.mT) / 2, self.shape)

    def factored(self, V: VKernel) -> Covariance:
        """Return Sigma by its factors; A_k is a matrix where there are more factors than dimensions."""
        g, d = torch.zeros(()), math.prod(self.shape)
        for k in self.steps:
            level, factors = self.levels[k], V.factors(self.path[k], self.levels[k].t)
            assert factors is not None
            if k and (len(g) <= d or d > DENSE):
                g = torch.stack([self.push(k, row) for row in g])
            elif k:
                g = torch.einsum("...ij,f...j->f...i", self.matrix(k), flat(g, self.shape)).reshape(g.shape)
            g = self.dt[k] * level.D * factors + g
        return Factored(g, self.shape)

    def product(self, V: VKernel, v: Tensor) -> Tensor:
        """Return Sigma v: back along the path with transposed steps, then forward, with the noise added."""
        back = [v]
        for k in reversed(self.steps):
            back.append(self.push(k, back[-1], transposed=True))
        out = torch.zeros_like(v)
        for k, after in zip(self.steps, back[-2::-1], strict=True):  # v as it is after step k
            level = self.levels[k]
            out = self.push(k, out) + self.dt[k] * level.D**2 * (V.cov(self.path[k], level.t) @ after)
        return out

    def nystrom(self, V: VKernel, rank: int) -> Covariance:
        x = self.path[0]
        probes = rng.randn((rank, *x.shape), self.problem.generator, x.device, torch.float64)
        image = torch.stack([self.product(V, p) for p in probes])
        flat_p, flat_i = (flat(a, self.shape).movedim(0, -1) for a in (probes, image))
        values, vectors = torch.linalg.eigh((flat_p.mT @ flat_i + flat_i.mT @ flat_p) / 2)
        keep = values > 1e-10 * values.amax(-1, keepdim=True).clamp_min(1e-300)
        inverse = torch.where(keep, values.clamp_min(1e-300).rsqrt(), torch.zeros_like(values))
        factors = flat_i @ (vectors * inverse[..., None, :])
        return Factored(factors.movedim(-1, 0).reshape(probes.shape), self.shape)
