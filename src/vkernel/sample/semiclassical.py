r"""The effective SDE for small V: a Gaussian around the deterministic path (docs/theory.md, §4.5).

Along the PF-ODE path of the mean score, a small deviation obeys the chain

.. math:: \delta_{k+1} = A_k \delta_k + \xi_k, \qquad A_k = 1 + \Delta_k (\beta_k + D_k \nabla s_{avg}(x_k, t_k)),

so that :math:`x_\epsilon | x_T \approx N(x_{det}, \Sigma)` to leading order in V. With a white V,
:math:`\Sigma_{k+1} = A_k \Sigma_k A_k^T + \Delta_k D_k \mathrm{Cov}_k D_k`; with a quenched V of finite rank the
factors themselves obey the chain, :math:`g_{k+1} = A_k g_k + \Delta_k D_k \phi_f(x_k, t_k)`, and
:math:`\Sigma = \sum_f g g^T`;
with any other quenched V, :math:`\Sigma = \sum_{kl} \Phi_k \Delta_k D_k \mathrm{Cov}_{kl} D_l \Delta_l \Phi_l^T`,
:math:`\Phi_k = A_{N-1} \cdots A_{k+1}`. It is the leading order: the mean shifts at the same order, and near a boundary
between training points the path itself is unstable and the approximation fails.

In high dimension :math:`\Sigma v` costs two passes along the path (one transposed), and :math:`\Sigma` is returned as a
Nyström approximation of the given ``rank``: :math:`\Sigma \Omega (\Omega^T \Sigma \Omega)^{-1} (\Sigma \Omega)^T`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.covariance import Covariance, Factored, Matrix
from vkernel.core.errors import require
from vkernel.core.progress import Progress
from vkernel.core.rng import Generator
from vkernel.sample.loop import Callback, Level, Problem, Solution, check_save, integrate
from vkernel.sample.sde import VKernel, check_kernel
from vkernel.score.base import Score

DENSE = 64  # up to this dimension the covariance is a matrix


def semiclassical(
    V: VKernel,
    x_T: Tensor,
    *,
    mean: Score | None = None,
    steps: int | Tensor = 100,
    spacing: str | None = "log",
    rank: int = 16,
    save: Iterable[str] = (),
    callback: Callback | None = None,
    generator: Generator = None,
    progress: Progress = False,
) -> tuple[Tensor | Solution, Covariance]:
    """Return mean and covariance of x at eps given ``x_T (*batch, *shape)``, to leading order in V.

    ``mean`` is the mean score (default ``V.mean``); ``rank`` and ``generator`` are those of the Nyström approximation
    in more than 64 dimensions; ``callback(step, t, x)`` receives the deterministic path. With ``save="path"`` the mean
    is a :class:`~vkernel.sample.loop.Solution` that holds this path.
    """
    save = check_save(save, ("path",))
    mean = check_kernel(V, mean)
    require(
        mean.process.base is mean.process, "The semiclassical law is for isotropic processes; whiten the data first."
    )
    require(rank >= 1, f"rank must be at least 1; got {rank}.")
    dtype = Problem(mean, x_T, steps, spacing).dtype
    problem = Problem(mean, x_T.double(), steps, spacing)

    def step(x: Tensor, here: Level, there: Level) -> Tensor:
        return x + (here.t - there.t) * (here.beta * x + here.D * problem.s(x, here))

    _, path = integrate(problem.x_T, problem.levels, step, keep=True, callback=callback, progress=progress)
    chain = _Chain(problem, path)
    d = math.prod(problem.shape)
    if V.factors(problem.x_T, problem.levels[0].t) is not None:
        cov: Covariance = chain.factored(V)
    elif not V.white:
        require(d <= DENSE, f"A quenched V without factors needs d ≤ {DENSE}; here d = {d}.")
        cov = chain.quenched(V)
    elif d <= DENSE:
        cov = chain.white(V)
    else:
        cov = chain.nystrom(V, min(rank, d), rng.as_generator(generator))
    states = [problem.out(x).to(dtype) for x in path]
    return (Solution(states[-1], problem.times, torch.stack(states)) if save else states[-1]), cov


class _Chain:
    """The linearised chain along one path."""

    def __init__(self, problem: Problem, path: list[Tensor]) -> None:
        self.problem, self.levels, self.path = problem, problem.levels, path
        self.batch, self.shape = problem.batch, problem.shape

    def steps(self) -> range:
        return range(len(self.levels) - 1)

    def dt(self, k: int) -> float:
        return self.levels[k].t - self.levels[k + 1].t

    def push(self, k: int, v: Tensor, transposed: bool = False) -> Tensor:
        """A_k v, or its transpose."""
        level, x, score = self.levels[k], self.path[k], self.problem.score
        change = (score.vjp if transposed else score.jvp)(x, level.t, v)
        return v + self.dt(k) * (level.beta * v + level.D * change)

    def matrix(self, k: int) -> Tensor:
        """A_k as matrices, ``(*batch, d, d)``."""
        shape = self.shape
        eye = torch.eye(math.prod(shape), dtype=torch.float64, device=self.path[0].device)
        columns = [self.push(k, e.reshape(shape).expand_as(self.path[k])).reshape(*self.batch, -1) for e in eye]
        return torch.stack(columns, -1)

    def white(self, V: VKernel) -> Covariance:
        d = math.prod(self.shape)
        sigma = torch.zeros((*self.batch, d, d), dtype=torch.float64, device=self.path[0].device)
        for k in self.steps():
            a, level = self.matrix(k), self.levels[k]
            noise = V.cov(self.path[k], level.t).dense()
            sigma = a @ sigma @ a.mT + self.dt(k) * level.D**2 * noise
        return Matrix(sigma, self.shape)

    def factored(self, V: VKernel) -> Covariance:
        g: Tensor | None = None
        for k in self.steps():
            level = self.levels[k]
            factors = V.factors(self.path[k], level.t)
            assert factors is not None
            fresh = self.dt(k) * level.D * factors
            g = fresh if g is None else self._pushed(k, g) + fresh
        assert g is not None
        return Factored(g, self.shape)

    def _pushed(self, k: int, g: Tensor) -> Tensor:
        """A_k on each of many vectors: by its matrix where there are more of them than dimensions."""
        d = math.prod(self.shape)
        if len(g) <= d or d > DENSE:
            return torch.stack([self.push(k, row) for row in g])
        rows = g.reshape(len(g), *self.batch, d)
        return torch.einsum("...ij,f...j->f...i", self.matrix(k), rows).reshape(g.shape)

    def quenched(self, V: VKernel) -> Covariance:
        """The double sum, through the cross-covariance of the deviation with the noise at each step."""
        d = math.prod(self.shape)
        zero = torch.zeros((*self.batch, d, d), dtype=torch.float64, device=self.path[0].device)
        sigma, with_noise = zero, [zero for _ in self.steps()]  # Cov[delta_k, xi_l] for all l
        for k in self.steps():
            a = self.matrix(k)
            noise = [self._cross(V, k, j) for j in self.steps()]
            mixed = a @ with_noise[k]
            sigma = a @ sigma @ a.mT + mixed + mixed.mT + noise[k]
            with_noise = [a @ c + n for c, n in zip(with_noise, noise, strict=True)]
        return Matrix((sigma + sigma.mT) / 2, self.shape)

    def _cross(self, V: VKernel, k: int, j: int) -> Tensor:
        one, two = self.levels[k], self.levels[j]
        cov = V.cov(self.path[k], one.t, self.path[j], two.t).dense()
        return self.dt(k) * one.D * self.dt(j) * two.D * cov

    def product(self, V: VKernel, v: Tensor) -> Tensor:
        """Sigma v: back along the path with transposed steps, then forward, with the noise added on the way."""
        back = [v]
        for k in reversed(self.steps()):
            back.append(self.push(k, back[-1], transposed=True))
        back.reverse()  # back[k] is what v is at step k
        out = torch.zeros_like(v)
        for k in self.steps():
            level = self.levels[k]
            out = self.push(k, out) + self.dt(k) * level.D**2 * (V.cov(self.path[k], level.t) @ back[k + 1])
        return out

    def nystrom(self, V: VKernel, rank: int, source: torch.Generator) -> Covariance:
        x = self.path[0]
        probes = rng.randn((rank, *x.shape), source, x.device, torch.float64)
        image = torch.stack([self.product(V, p) for p in probes])
        flat_p, flat_i = (a.reshape(rank, *self.batch, -1).movedim(0, -1) for a in (probes, image))
        values, vectors = torch.linalg.eigh((flat_p.mT @ flat_i + flat_i.mT @ flat_p) / 2)
        keep = values > 1e-10 * values.amax(-1, keepdim=True).clamp_min(1e-300)
        inverse = torch.where(keep, values.clamp_min(1e-300).rsqrt(), torch.zeros_like(values))
        factors = flat_i @ (vectors * inverse[..., None, :])
        return Factored(factors.movedim(-1, 0).reshape(rank, *self.batch, *self.shape), self.shape)
