"""Quenched kernels: one random field per trained model, of finite rank or known as a function (docs/theory.md, §5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.covariance import Covariance, Cross, Factored, Matrix
from vkernel.core.errors import require
from vkernel.core.rng import Generator
from vkernel.kernels.base import Field, Kernel, Time, times
from vkernel.process import Process
from vkernel.score.base import Score

__all__ = ["FiniteRank", "Function"]

JITTER = 1e-10  # of the largest variance seen, added to the diagonal of a conditioned field's covariance


class FiniteRank(Kernel):
    r"""Linear in random weights: :math:`\delta\hat s = \sum_f w_f\, \phi_f(x,t)`, :math:`w \sim N(0, W)`.

    ``basis(x, t)`` takes ``x (*batch, d)`` and returns ``(F, *batch, d)``; ``weights`` is the covariance ``(F, F)``.
    """

    def __init__(
        self,
        basis: Callable[[Tensor, Time], Tensor],
        weights: Tensor,
        process: Process,
        mean: Score | None = None,
    ) -> None:
        w = torch.as_tensor(weights, dtype=torch.float64)
        require(w.ndim == 2 and w.shape[0] == w.shape[1], f"weights must be (F, F); got {tuple(w.shape)}.")
        require(bool(w.isfinite().all()) and torch.allclose(w, w.mT), "weights must be finite and symmetric.")
        self.basis, self.process, self.mean_of = basis, process, mean
        self.root = Matrix(w, (len(w),)).power(0.5).dense()  # refuses what is not a covariance

    def factors(self, x: Tensor, t: Time) -> Tensor:
        """Factors of the covariance, ``(F, *batch, *shape)``: unit weights for independent modes."""
        phi = self.basis(x, t)
        require(isinstance(phi, Tensor), f"basis(x, t) must be a tensor, not {type(phi).__name__}.")
        good = phi.shape == (len(self.root), *x.shape)
        require(good, f"basis(x, t) has shape {tuple(phi.shape)}; it must be ({len(self.root)}, *x.shape).")
        return torch.tensordot(self.root.to(phi), phi, dims=1)

    def cov(self, x: Tensor, t: Time, x2: Tensor | None = None, t2: Time | None = None) -> Covariance:
        left = self.factors(x, t)
        shape = tuple(x.shape[-1:])
        if x2 is None:
            return Factored(left, shape)
        right = self.factors(x2, t if t2 is None else t2)
        return Cross(left.movedim(0, -1) @ right.movedim(0, -1).mT, shape)

    def draw(self, members: int, generator: Generator = None) -> Field:
        require(members >= 1, f"A field is drawn for at least one member; got {members}.")
        z = rng.randn((members, len(self.root)), rng.as_generator(generator), self.root.device, torch.float64)

        def field(x: Tensor, t: Time) -> Tensor:
            modes = self.factors(x, t)  # (F, members, *batch, *shape)
            w = z.mT.to(modes).reshape(len(self.root), members, *(1,) * (x.ndim - 1))
            return (w * modes).sum(0)

        return field


class Function(Kernel):
    r"""A quenched kernel that is known as a function, :math:`\mathrm{Cov}[\hat s_a(x,t), \hat s_b(x',t')]`.

    ``function(x, t, x2, t2)`` takes broadcast batches of vectors ``(*batch, d)`` and times ``(*batch,)`` and returns
    either ``(*batch,)``, a scalar kernel times the identity, or ``(*batch, d, d)``.
    """

    def __init__(
        self,
        function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
        process: Process,
        mean: Score | None = None,
    ) -> None:
        self.function, self.process, self.mean_of = function, process, mean

    def cov(self, x: Tensor, t: Time, x2: Tensor | None = None, t2: Time | None = None) -> Covariance:
        there = x if x2 is None else x2
        matrix = self._matrix(x, times(t, x), there, times(t if t2 is None else t2, there))
        shape = tuple(x.shape[-1:])
        return Matrix(matrix, shape) if x2 is None else Cross(matrix, shape)

    def _matrix(self, x: Tensor, t: Tensor, x2: Tensor, t2: Tensor) -> Tensor:
        k, d = self.function(x, t, x2, t2), x.shape[-1]
        good = isinstance(k, Tensor) and bool(k.isfinite().all())
        require(good, "The kernel function must return a tensor of finite numbers.")
        batch = torch.broadcast_shapes(x.shape[:-1], x2.shape[:-1])
        if k.shape == batch:
            return k[..., None, None] * torch.eye(d, dtype=k.dtype, device=k.device)
        good = k.shape == (*batch, d, d)
        require(good, f"The kernel function returned shape {tuple(k.shape)}; it must be {batch} or {(*batch, d, d)}.")
        return k

    def pairs(self, x: Tensor, t: Tensor, x2: Tensor, t2: Tensor) -> Tensor:
        """All pairs of ``x (m, N, d)`` and ``x2 (m, N', d)`` with their times: ``(m, N d, N' d)``."""
        k = self._matrix(x[:, :, None], t[:, :, None], x2[:, None], t2[:, None])
        m, n, n2, d, _ = k.shape
        return k.movedim(3, 2).reshape(m, n * d, n2 * d)

    def draw(self, members: int, generator: Generator = None) -> Field:
        require(members >= 1, f"A field is drawn for at least one member; got {members}.")
        return _Conditioned(self, members, rng.as_generator(generator))


class _Conditioned:
    r"""A Gaussian field that remembers: what it says is conditioned on all that it has said.

    With :math:`L L^T` the covariance of all values so far and :math:`z` the normals behind them, the next block has the
    factors :math:`B = K_{new,old} L^{-T}`, :math:`R R^T = K_{new,new} - B B^T` and the values :math:`B z + R z_{new}`.
    Where places repeat, :math:`R` is zero up to a jitter of ``JITTER`` times the largest variance.
    """

    def __init__(self, kernel: Function, members: int, generator: torch.Generator) -> None:
        self.kernel, self.members, self.generator = kernel, members, generator
        self.x: Any = None  # all places so far, their times, the factor L and the normals z
        self.t: Any = None
        self.root: Any = None
        self.z: Any = None
        self.scale = 0.0

    def __call__(self, x: Tensor, t: Time) -> Tensor:
        good = x.ndim >= 2 and x.shape[0] == self.members
        require(good, f"A field of {self.members} members takes x ({self.members}, *batch, d); got {tuple(x.shape)}.")
        new = x.detach().double().reshape(self.members, -1, x.shape[-1])
        when = times(t, x).double().expand(x.shape[:-1]).reshape(self.members, -1)
        block = self.kernel.pairs(new, when, new, when).double()
        require(torch.allclose(block, block.mT), "The kernel is not symmetric under exchange of its arguments.")
        self.scale = max(self.scale, float(block.diagonal(dim1=-2, dim2=-1).amax()))
        jitter = JITTER * self.scale * torch.eye(block.shape[-1], dtype=torch.float64, device=x.device)
        fresh = rng.randn((self.members, block.shape[-1]), self.generator, x.device, torch.float64)
        if self.root is None:
            rest, value = block, torch.zeros_like(fresh)
            cross = block.new_zeros(self.members, block.shape[-1], 0)
        else:
            k = self.kernel.pairs(new, when, self.x, self.t).double()
            cross = torch.linalg.solve_triangular(self.root, k.mT, upper=False).mT
            rest, value = block - cross @ cross.mT, (cross @ self.z[..., None]).squeeze(-1)
        root, info = torch.linalg.cholesky_ex(rest + jitter)
        # rounding leaves up to about 1e-12 of the scale; more is a kernel that is no covariance
        if bool((info > 0).any()):
            low = float(torch.linalg.eigvalsh(rest).min())
            require(low > -1e-7 * max(self.scale, 1e-300), f"The kernel is not positive semidefinite: {low:.3g}.")
            values, vectors = torch.linalg.eigh(rest)
            square = (vectors * values.clamp_min(0).sqrt()[..., None, :]) @ vectors.mT
            root = torch.linalg.cholesky(square @ square.mT + 1e3 * jitter)
        value = value + (root @ fresh[..., None]).squeeze(-1)
        self._remember(new, when, cross, root, fresh)
        return value.reshape(x.shape).to(x.dtype)

    def _remember(self, x: Tensor, t: Tensor, cross: Tensor, root: Tensor, z: Tensor) -> None:
        if self.root is None:
            self.x, self.t, self.root, self.z = x, t, root, z
            return
        top = torch.cat([self.root, self.root.new_zeros(*self.root.shape[:-1], root.shape[-1])], -1)
        self.root = torch.cat([top, torch.cat([cross, root], -1)], -2)
        self.x, self.t = torch.cat([self.x, x], 1), torch.cat([self.t, t], 1)
        self.z = torch.cat([self.z, z], 1)
