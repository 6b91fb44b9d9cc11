r"""V-kernels: the covariance of the learned score over training randomness (docs/theory.md, §5).

.. math:: V(x,t;x',t') = D_t\, \mathrm{Cov}_\theta[\hat s(x,t), \hat s(x',t')]\, D_{t'} .

A kernel says :math:`\mathrm{Cov}_\theta`; :math:`D` comes from the process. Two kinds behave differently:

* **white** kernels contain :math:`\delta(t - t')`: fresh noise at every step. ``cov(x, t)`` is then the coefficient of
  the delta function, and a second argument is refused. :class:`Naive` is the one of the paper.
* **quenched** kernels do not: one trained model is one draw of a random *field*, the same at every step.
  :meth:`Kernel.draw` returns that field. A kernel of finite rank draws its weights once (:class:`FiniteRank`); a kernel
  that is only known as a function draws the field where it is asked for, conditioned on all it has said before
  (:class:`Function`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vkernel import rng
from vkernel.covariance import Congruent, Covariance, Factored, Generator, Matrix, Scaled
from vkernel.errors import InputError, require
from vkernel.process import Anisotropic, Process
from vkernel.score import EmpiricalScore

__all__ = ["FiniteRank", "Function", "Kernel", "Naive"]

Time = float | Tensor
Field = Callable[[Tensor, Time], Tensor]

JITTER = 1e-10  # of the largest variance seen, added to the diagonal of a conditioned field's covariance


class Kernel(ABC):
    """The covariance of the learned score; ``valid`` and ``why`` say whether its assumptions hold."""

    white: bool = False
    valid: bool = True
    why: str = "exact"
    process: Process

    @abstractmethod
    def cov(self, x: Tensor, t: Time, x2: Tensor | None = None, t2: Time | None = None) -> Covariance:
        """:math:`\\mathrm{Cov}_\\theta[\\hat s(x,t), \\hat s(x',t')]`, paired over the broadcast batch."""

    def __call__(self, x: Tensor, t: Time, x2: Tensor | None = None, t2: Time | None = None) -> Covariance:
        """:math:`V = D\\, \\mathrm{Cov}\\, D'`."""
        here = self.process.base.D(_times(t, x).double())
        there = here if x2 is None else self.process.base.D(_times(t if t2 is None else t2, x2).double())
        return self._between(Scaled(self.cov(x, t, x2, t2), (here * there).sqrt()))

    def _between(self, cov: Covariance) -> Covariance:
        """Γ on both sides where the noise has a shape."""
        return Congruent(cov, self.process.gamma) if isinstance(self.process, Anisotropic) else cov

    @abstractmethod
    def draw(self, members: int, generator: Generator = None) -> Field:
        """One field per member: ``field(x, t)`` with x ``(members, *batch, *shape)`` is :math:`\\delta\\hat s`."""


class Naive(Kernel):
    r"""The naive score estimator: :math:`V = \kappa\, D\, C\, D\, \delta(t - t')`, with κ in the unit of t (5.9)."""

    white = True

    def __init__(self, score: EmpiricalScore, kappa: float) -> None:
        require(isinstance(score, EmpiricalScore), "The naive kernel belongs to an EmpiricalScore: it knows C.")
        require(
            isinstance(kappa, int | float) and math.isfinite(kappa) and kappa >= 0,
            f"kappa must be a number ≥ 0, in the unit of t; got {kappa!r}.",
        )
        self.score, self.kappa, self.process = score, float(kappa), score.process

    def cov(self, x: Tensor, t: Time, x2: Tensor | None = None, t2: Time | None = None) -> Covariance:
        require(x2 is None and t2 is None, "A white kernel has no covariance between two times: give x and t alone.")
        return Scaled(self.score.covariance(x, t), torch.tensor(math.sqrt(self.kappa), dtype=torch.float64))

    def __call__(self, x: Tensor, t: Time, x2: Tensor | None = None, t2: Time | None = None) -> Covariance:
        d = self.process.base.D(torch.as_tensor(t, dtype=torch.float64, device=x.device))
        return self._between(Scaled(self.cov(x, t, x2, t2), d))

    def score_and_draw(self, x: Tensor, t: Time, generator: Generator = None) -> tuple[Tensor, Tensor]:
        r"""The score and a Gaussian draw of covariance :math:`\kappa C`, from one posterior."""
        s, cov = self.score.with_covariance(x, t)
        return s, math.sqrt(self.kappa) * cov.draw(generator)

    def draw(self, members: int, generator: Generator = None) -> Field:
        raise InputError("A white kernel is fresh noise at every step, not a field: use sample.effective_sde.")


class FiniteRank(Kernel):
    r"""Linear in random weights: :math:`\delta\hat s = \sum_f w_f\, \phi_f(x,t)`, :math:`w \sim N(0, W)`.

    ``basis(x, t)`` takes ``x (*batch, d)`` and returns ``(F, *batch, d)``; ``weights`` is the covariance ``(F, F)``.
    """

    def __init__(self, basis: Callable[[Tensor, Time], Tensor], weights: Tensor, process: Process) -> None:
        w = torch.as_tensor(weights, dtype=torch.float64)
        require(w.ndim == 2 and w.shape[0] == w.shape[1], f"weights must be (F, F); got {tuple(w.shape)}.")
        require(bool(w.isfinite().all()) and torch.allclose(w, w.mT), "weights must be finite and symmetric.")
        self.basis, self.process = basis, process
        self.root = Matrix(w, (len(w),)).power(0.5).matrix  # refuses what is not a covariance

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


class Cross(Covariance):
    """A covariance between two different places: a matrix that need not be symmetric, and cannot be drawn from."""

    def __init__(self, matrix: Tensor, shape: tuple[int, ...]) -> None:
        self.matrix, self.shape, self.batch = matrix, shape, tuple(matrix.shape[:-2])
        self.dtype, self.device = matrix.dtype, matrix.device

    def __matmul__(self, v: Tensor) -> Tensor:
        return (self.matrix @ v.reshape(*v.shape[: v.ndim - len(self.shape)], -1, 1)).reshape(v.shape)

    def diag(self) -> Tensor:
        return self.matrix.diagonal(dim1=-2, dim2=-1).reshape(self.batch + self.shape)

    def dense(self) -> Tensor:
        return self.matrix

    def draw(self, generator: Generator = None) -> Tensor:
        raise InputError("A covariance between two different places cannot be drawn from; draw a field instead.")


class Function(Kernel):
    r"""A quenched kernel that is known as a function, :math:`\mathrm{Cov}[\hat s_a(x,t), \hat s_b(x',t')]`.

    ``function(x, t, x2, t2)`` takes broadcast batches of vectors ``(*batch, d)`` and times ``(*batch,)`` and returns
    either ``(*batch,)``, a scalar kernel times the identity, or ``(*batch, d, d)``.
    """

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], process: Process) -> None:
        self.function, self.process = function, process

    def cov(self, x: Tensor, t: Time, x2: Tensor | None = None, t2: Time | None = None) -> Covariance:
        there = x if x2 is None else x2
        matrix = self._matrix(x, _times(t, x), there, _times(t if t2 is None else t2, there))
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
        when = _times(t, x).double().expand(x.shape[:-1]).reshape(self.members, -1)
        block = self._gram(new, when, new, when)
        require(torch.allclose(block, block.mT), "The kernel is not symmetric under exchange of its arguments.")
        self.scale = max(self.scale, float(block.diagonal(dim1=-2, dim2=-1).amax()))
        jitter = JITTER * self.scale * torch.eye(block.shape[-1], dtype=torch.float64, device=x.device)
        fresh = rng.randn((self.members, block.shape[-1]), self.generator, x.device, torch.float64)
        if self.root is None:
            rest, value = block, torch.zeros_like(fresh)
            cross = block.new_zeros(self.members, block.shape[-1], 0)
        else:
            k = self._gram(new, when, self.x, self.t)
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

    def _gram(self, x: Tensor, t: Tensor, x2: Tensor, t2: Tensor) -> Tensor:
        """All pairs: ``(members, N d, N' d)``."""
        k = self.kernel._matrix(x[:, :, None], t[:, :, None], x2[:, None], t2[:, None]).double()
        m, n, n2, d, _ = k.shape
        return k.movedim(3, 2).reshape(m, n * d, n2 * d)

    def _remember(self, x: Tensor, t: Tensor, cross: Tensor, root: Tensor, z: Tensor) -> None:
        if self.root is None:
            self.x, self.t, self.root, self.z = x, t, root, z
            return
        top = torch.cat([self.root, self.root.new_zeros(*self.root.shape[:-1], root.shape[-1])], -1)
        self.root = torch.cat([top, torch.cat([cross, root], -1)], -2)
        self.x, self.t = torch.cat([self.x, x], 1), torch.cat([self.t, t], 1)
        self.z = torch.cat([self.z, z], 1)


def _times(t: Time, x: Tensor) -> Tensor:
    return torch.as_tensor(t, dtype=x.dtype, device=x.device).expand(x.shape[:-1])
