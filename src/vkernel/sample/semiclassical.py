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
Nyström approximation of the given ``rank``: :math:`\Sigma \Omega (\Omega^T \Sigma \Omega)^{-1} (\Sigma \Omega)^T`."""

import math
from itertools import pairwise
from typing import Unpack, overload

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.checks import check_whole, takes
from vkernel.core.covariance import Covariance, Factored, Matrix, flat
from vkernel.core.errors import require
from vkernel.sample.loop import Options, Problem, Save, Solution, walk
from vkernel.sample.sde import VKernel, check_kernel
from vkernel.score.base import Score

DENSE = 64  # up to this dimension the covariance of the semiclassical law is a matrix


@overload
def semiclassical(
    V: VKernel, x_T: Tensor, mean: Score | None = None, *, rank: int = 16, **options: Unpack[Options]
) -> tuple[Tensor, Covariance]: ...
@overload
def semiclassical(
    V: VKernel, x_T: Tensor, mean: Score | None = None, *, rank: int = 16, save: Save, **options: Unpack[Options]
) -> tuple[Solution, Covariance]: ...
@takes(Problem)
def semiclassical(
    V: VKernel, x_T: Tensor, mean: Score | None = None, *, rank: int = 16, save: Save = (), **options: Unpack[Options]
) -> tuple[Tensor | Solution, Covariance]:
    """Return mean and covariance of x at eps given ``x_T (*batch, *shape)``, to leading order in V.
    ``mean`` is the mean score (default ``V.mean``); ``rank`` and ``generator`` are those of the Nyström approximation
    in more than 64 dimensions. The callback receives, and ``save="path"`` keeps, the deterministic path; the mean is
    then a :class:`~vkernel.sample.loop.Solution`.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> score = vk.EmpiricalScore(data, process)
    >>> x_T = process.prior((5, 1), generator=0)
    >>> def basis(x, t):
    ...     return torch.stack([torch.ones_like(x), x])
    >>> V = vk.kernels.FiniteRank(basis, 0.01 * torch.eye(2), process, mean=score)
    >>> mean, cov = vk.sample.semiclassical(V, x_T, steps=20)
    >>> mean.shape, cov.diag().shape
    (torch.Size([5, 1]), torch.Size([5, 1]))
    """
    mean = check_kernel(V, mean)
    isotropic = mean.process.base is mean.process
    require(isotropic, "The semiclassical law is for isotropic processes; whiten the data first.")
    check_whole(rank, "rank")
    problem = Problem(mean, x_T, save=save, **options)
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
