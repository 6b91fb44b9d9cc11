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
from itertools import pairwise

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.covariance import Covariance, Factored, Generator, Matrix
from vkernel.core.errors import require
from vkernel.process import Process
from vkernel.sample.loop import Frame, Level
from vkernel.sample.sde import VKernel, check
from vkernel.score.conversions import Score
from vkernel.score.empirical import EmpiricalScore

__all__ = ["semiclassical"]

DENSE = 64  # up to this dimension the covariance is a matrix


def semiclassical(
    s_avg: Score,
    V: VKernel,
    process: Process,
    x_T: Tensor,
    *,
    steps: int = 100,
    spacing: str | None = None,
    rank: int = 16,
    generator: Generator = 0,
) -> tuple[Tensor, Covariance]:
    """Mean and covariance of x at eps given ``x_T (*batch, *shape)``, to leading order in V."""
    require(process.base is process, "The semiclassical law is for isotropic processes; whiten the data first.")
    require(rank >= 1, f"rank must be at least 1; got {rank}.")
    kind = check(s_avg, V, process, x_T, steps, spacing).dtype
    frame = Frame(s_avg, process, x_T.double(), steps, spacing)
    levels, path = frame.levels(), [frame.x_T]
    for here, there in pairwise(levels):
        x = path[-1]
        path.append(x + (here.t - there.t) * (here.beta * x + here.D * frame.s(x, here)))
    chain = _Chain(frame, levels, path)
    d = math.prod(frame.shape)
    if hasattr(V, "factors"):
        cov: Covariance = chain.factored(V)
    elif not V.white:
        require(d <= DENSE, f"A quenched V without factors needs d ≤ {DENSE}; here d = {d}.")
        cov = chain.quenched(V)
    elif d <= DENSE:
        cov = chain.white(V)
    else:
        cov = chain.nystrom(V, min(rank, d), rng.as_generator(generator))
    return frame.out(path[-1]).to(kind), cov


class _Chain:
    """The linearised chain along one path."""

    def __init__(self, frame: Frame, levels: list[Level], path: list[Tensor]) -> None:
        self.frame, self.levels, self.path = frame, levels, path
        self.batch = tuple(frame.x_T.shape[: frame.x_T.ndim - frame.event])

    def steps(self) -> range:
        return range(len(self.levels) - 1)

    def dt(self, k: int) -> float:
        return self.levels[k].t - self.levels[k + 1].t

    def push(self, k: int, v: Tensor, transposed: bool = False) -> Tensor:
        """A_k v, or its transpose."""
        level, x, score = self.levels[k], self.path[k], self.frame.score
        if isinstance(score, EmpiricalScore):  # symmetric
            t = torch.tensor(level.t, dtype=torch.float64, device=x.device)
            change = score._jacobian(x, t, v)
        elif transposed:
            change = torch.func.vjp(lambda y: self.frame.s(y, level), x)[1](v)[0]
        else:
            change = torch.func.jvp(lambda y: self.frame.s(y, level), (x,), (v,))[1]
        return v + self.dt(k) * (level.beta * v + level.D * change)

    def matrix(self, k: int) -> Tensor:
        """A_k as matrices, ``(*batch, d, d)``."""
        shape = self.frame.shape
        eye = torch.eye(math.prod(shape), dtype=torch.float64, device=self.path[0].device)
        columns = [self.push(k, e.reshape(shape).expand_as(self.path[k])).reshape(*self.batch, -1) for e in eye]
        return torch.stack(columns, -1)

    def white(self, V: VKernel) -> Covariance:
        d = math.prod(self.frame.shape)
        sigma = torch.zeros((*self.batch, d, d), dtype=torch.float64, device=self.path[0].device)
        for k in self.steps():
            a, level = self.matrix(k), self.levels[k]
            noise = V.cov(self.path[k], level.t).dense()
            sigma = a @ sigma @ a.mT + self.dt(k) * level.D**2 * noise
        return Matrix(sigma, self.frame.shape)

    def factored(self, V: VKernel) -> Covariance:
        g: Tensor | None = None
        for k in self.steps():
            level = self.levels[k]
            fresh = self.dt(k) * level.D * V.factors(self.path[k], level.t)  # type: ignore[attr-defined]
            g = fresh if g is None else self._pushed(k, g) + fresh
        assert g is not None
        return Factored(g, self.frame.shape)

    def _pushed(self, k: int, g: Tensor) -> Tensor:
        """A_k on each of many vectors: by its matrix where there are more of them than dimensions."""
        d = math.prod(self.frame.shape)
        if len(g) <= d or d > DENSE:
            return torch.stack([self.push(k, row) for row in g])
        rows = g.reshape(len(g), *self.batch, d)
        return torch.einsum("...ij,f...j->f...i", self.matrix(k), rows).reshape(g.shape)

    def quenched(self, V: VKernel) -> Covariance:
        """The double sum, through the cross-covariance of the deviation with the noise at each step."""
        d = math.prod(self.frame.shape)
        zero = torch.zeros((*self.batch, d, d), dtype=torch.float64, device=self.path[0].device)
        sigma, with_noise = zero, [zero for _ in self.steps()]  # Cov[delta_k, xi_l] for all l
        for k in self.steps():
            a = self.matrix(k)
            noise = [self._cross(V, k, j) for j in self.steps()]
            mixed = a @ with_noise[k]
            sigma = a @ sigma @ a.mT + mixed + mixed.mT + noise[k]
            with_noise = [a @ c + n for c, n in zip(with_noise, noise, strict=True)]
        return Matrix((sigma + sigma.mT) / 2, self.frame.shape)

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
        return Factored(factors.movedim(-1, 0).reshape(rank, *self.batch, *self.frame.shape), self.frame.shape)
