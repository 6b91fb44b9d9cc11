r"""Covariance operators: one type for everything that is a covariance.

A :class:`Covariance` :math:`\Sigma` acts on samples of one event shape, one operator for every element of a batch.
It never forms a :math:`d \times d` matrix unless :meth:`Covariance.dense` is called:

======================  =====================================================  =========================
``Σ @ v``               :math:`\Sigma v`                                       ``(*batch, *shape)``
``Σ.trace()``           :math:`\operatorname{tr} \Sigma`                       ``(*batch,)``
``Σ.diag()``            :math:`\Sigma_{jj}`                                    ``(*batch, *shape)``
``Σ.dense()``           the matrix, event flattened                            ``(*batch, d, d)``
``Σ.draw(generator)``   a Gaussian draw of mean 0 and covariance Σ             ``(*batch, *shape)``
======================  =====================================================  =========================

The class is abstract; final kinds are here (:class:`Isotropic`, :class:`Diagonal`, :class:`Matrix`, :class:`Factored`,
:class:`Scaled`, :class:`Congruent`, :class:`Rounded`, :class:`Cross`) and, for the posterior over training points, in
:mod:`vkernel.posterior`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Self

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.errors import InputError, require
from vkernel.core.rng import Generator


class Covariance(ABC):
    """A positive semidefinite operator on samples of ``shape``, for each element of ``batch``."""

    batch: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def __init__(self, batch: tuple[int, ...], shape: tuple[int, ...], like: Tensor | Covariance) -> None:
        self.batch, self.shape = tuple(batch), tuple(shape)
        self.dtype, self.device = like.dtype, like.device

    @property
    def dim(self) -> int:
        """The number of coordinates of an event."""
        return math.prod(self.shape)

    @abstractmethod
    def __matmul__(self, v: Tensor) -> Tensor:
        """Return the product with ``v``, which broadcasts to ``(*batch, *shape)``."""

    @abstractmethod
    def diag(self) -> Tensor:
        """Return the variances of the coordinates, ``(*batch, *shape)``."""

    def trace(self) -> Tensor:
        """Return the sum of the variances, ``(*batch,)``."""
        return flat(self.diag(), self.shape).sum(-1)

    @abstractmethod
    def draw(self, generator: Generator = None) -> Tensor:
        """Draw a Gaussian with mean zero and this covariance, ``(*batch, *shape)``."""

    def dense(self) -> Tensor:
        """Return the matrices, ``(*batch, d, d)``, by d products with unit vectors."""
        eye = torch.eye(self.dim, dtype=self.dtype, device=self.device)
        columns = [flat(self @ e.reshape(self.shape).expand(self.batch + self.shape), self.shape) for e in eye]
        return torch.stack(columns, dim=-1)

    def _check(self, v: Tensor) -> None:
        k = len(self.shape)
        good = v.ndim == 0 or (v.ndim >= k and tuple(v.shape[v.ndim - k :]) == self.shape)
        try:
            torch.broadcast_shapes(self.batch, v.shape[: max(v.ndim - k, 0)])
        except RuntimeError:
            good = False
        require(good, f"v has shape {tuple(v.shape)}; the operator acts on shape {self.batch + self.shape}.")

    def _noise(self, generator: Generator) -> Tensor:
        return rng.randn(self.batch + self.shape, rng.as_generator(generator), self.device, self.dtype)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(batch={self.batch}, shape={self.shape}, dtype={self.dtype})"


class Isotropic(Covariance):
    """``variance`` times the identity; ``variance`` has the shape of the batch."""

    def __init__(self, variance: Tensor, shape: tuple[int, ...]) -> None:
        super().__init__(tuple(variance.shape), shape, variance)
        self.variance = variance

    def __matmul__(self, v: Tensor) -> Tensor:
        self._check(v)
        return over_event(self.variance, self.shape) * v

    def diag(self) -> Tensor:
        return over_event(self.variance, self.shape).expand(self.batch + self.shape)

    def draw(self, generator: Generator = None) -> Tensor:
        return over_event(self.variance.sqrt(), self.shape) * self._noise(generator)


class _Entries(Covariance):
    """An operator that is given by the tensor ``entries``; equality is number for number."""

    entries: Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        """Return the same operator on another device, in another precision."""
        return type(self)(self.entries.to(device, dtype), self.shape)  # type: ignore[call-arg, arg-type]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Entries) or type(self) is not type(other) or self.shape != other.shape:
            return False
        a, b = self.entries, other.entries
        return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)

    def __hash__(self) -> int:
        return hash((type(self), self.shape))


class Diagonal(_Entries):
    """Independent coordinates with the variances ``entries``, ``(*batch, *shape)``."""

    def __init__(self, entries: Tensor, shape: tuple[int, ...]) -> None:
        super().__init__(tuple(entries.shape[: entries.ndim - len(shape)]), shape, entries)
        self.entries = entries

    def __matmul__(self, v: Tensor) -> Tensor:
        self._check(v)
        return self.entries * v

    def diag(self) -> Tensor:
        return self.entries

    def draw(self, generator: Generator = None) -> Tensor:
        return self.entries.sqrt() * self._noise(generator)

    def power(self, exponent: float) -> Diagonal:
        """Return the operator's power; coordinates stay independent."""
        return Diagonal(self.entries**exponent, self.shape)


class _Dense(_Entries):
    """A matrix, ``(*batch, d, d)``."""

    def __init__(self, entries: Tensor, shape: tuple[int, ...]) -> None:
        super().__init__(tuple(entries.shape[:-2]), shape, entries)
        require(
            entries.ndim >= 2 and entries.shape[-1] == entries.shape[-2] == self.dim,
            f"A covariance matrix for events of shape {self.shape} must end in ({self.dim}, {self.dim}); "
            f"got {tuple(entries.shape)}.",
        )
        self.entries = entries

    def __matmul__(self, v: Tensor) -> Tensor:
        self._check(v)
        product = (self.entries @ flat(v, self.shape).unsqueeze(-1)).squeeze(-1)
        return product.reshape(product.shape[:-1] + self.shape)

    def diag(self) -> Tensor:
        return self.entries.diagonal(dim1=-2, dim2=-1).reshape(self.batch + self.shape)

    def dense(self) -> Tensor:
        return self.entries


class Cross(_Dense):
    """A covariance between two places: a matrix that need not be symmetric, and cannot be drawn from."""

    def draw(self, generator: Generator = None) -> Tensor:
        raise InputError("A covariance between two different places cannot be drawn from; draw a field instead.")


class Matrix(_Dense):
    """A covariance that is given as a matrix, ``(*batch, d, d)``, symmetric and positive semidefinite."""

    def draw(self, generator: Generator = None) -> Tensor:
        return self.power(0.5) @ self._noise(generator)

    def power(self, exponent: float) -> Matrix:
        """Return the symmetric power by eigendecomposition; eigenvalues below rounding count as zero."""
        values, vectors = torch.linalg.eigh(self.entries)
        floor = values.abs().amax(-1, keepdim=True) * self.dim * torch.finfo(self.dtype).eps
        require(
            bool((values >= -16 * floor).all()),
            f"A covariance must be positive semidefinite; this one has the eigenvalue {float(values.min()):.3g}.",
        )
        powered = torch.where(values > floor, values.clamp_min(floor) ** exponent, torch.zeros_like(values))
        return Matrix((vectors * powered.unsqueeze(-2)) @ vectors.mT, self.shape)


class Factored(Covariance):
    r""":math:`\sum_k a_k a_k^T` from its factors ``(K, *batch, *shape)``: ensemble members, or weights of a model."""

    def __init__(self, factors: Tensor, shape: tuple[int, ...]) -> None:
        super().__init__(tuple(factors.shape[1 : factors.ndim - len(shape)]), shape, factors)
        self.factors = factors

    def __matmul__(self, v: Tensor) -> Tensor:
        self._check(v)
        along = flat(self.factors * v, self.shape).sum(-1)
        return (over_event(along, self.shape) * self.factors).sum(0)

    def diag(self) -> Tensor:
        return self.factors.square().sum(0)

    def dense(self) -> Tensor:
        rows = flat(self.factors, self.shape).movedim(0, -1)
        return rows @ rows.mT

    def draw(self, generator: Generator = None) -> Tensor:
        source = rng.as_generator(generator)
        z = rng.randn((len(self.factors), *self.batch), source, self.device, self.dtype)
        return (over_event(z, self.shape) * self.factors).sum(0)


class Scaled(Covariance):
    r""":math:`a^2 \Sigma` for one number :math:`a` per element of the batch: the covariance of :math:`a\,z`."""

    def __init__(self, base: Covariance, factor: Tensor) -> None:
        super().__init__(tuple(torch.broadcast_shapes(base.batch, factor.shape)), base.shape, base)
        self.base, self.factor = base, factor.to(base.device, base.dtype)

    def __matmul__(self, v: Tensor) -> Tensor:
        self._check(v)
        return over_event(self.factor**2, self.shape) * (self.base @ v)

    def diag(self) -> Tensor:
        return over_event(self.factor**2, self.shape) * self.base.diag()

    def trace(self) -> Tensor:
        return self.factor**2 * self.base.trace()

    def draw(self, generator: Generator = None) -> Tensor:
        if self.base.batch == self.batch:
            return over_event(self.factor, self.shape) * self.base.draw(generator)
        source = rng.as_generator(generator)  # one operator for many factors: a draw for each
        many = [self.base.draw(source) for _ in range(math.prod(self.batch) // max(1, math.prod(self.base.batch)))]
        lead = self.batch[: len(self.batch) - len(self.base.batch)]
        draws = torch.stack(many).reshape(*lead, *self.base.batch, *self.shape)
        return over_event(self.factor, self.shape) * draws


class Congruent(Covariance):
    r""":math:`A \Sigma A^T` for a symmetric :math:`A` that is itself a covariance operator without batch."""

    def __init__(self, base: Covariance, map: Diagonal | Matrix) -> None:
        super().__init__(base.batch, base.shape, base)
        self.base, self.map = base, map.to(self.device, self.dtype)

    def __matmul__(self, v: Tensor) -> Tensor:
        self._check(v)
        return self.map @ (self.base @ (self.map @ v))

    def diag(self) -> Tensor:
        if isinstance(self.map, Diagonal):
            return self.map.entries**2 * self.base.diag()
        return self.dense().diagonal(dim1=-2, dim2=-1).reshape(self.batch + self.shape)

    def draw(self, generator: Generator = None) -> Tensor:
        return self.map @ self.base.draw(generator)


class Rounded(Covariance):
    """The same operator with results rounded to another precision at the end."""

    def __init__(self, base: Covariance, dtype: torch.dtype) -> None:
        super().__init__(base.batch, base.shape, base)
        self.base, self.dtype = base, dtype

    def __matmul__(self, v: Tensor) -> Tensor:
        return (self.base @ v.to(self.base.dtype)).to(self.dtype)

    def diag(self) -> Tensor:
        return self.base.diag().to(self.dtype)

    def trace(self) -> Tensor:
        return self.base.trace().to(self.dtype)

    def draw(self, generator: Generator = None) -> Tensor:
        return self.base.draw(generator).to(self.dtype)

    def dense(self) -> Tensor:
        return self.base.dense().to(self.dtype)


def fits(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether ``shape`` broadcasts to ``target``."""
    try:
        return tuple(torch.broadcast_shapes(shape, target)) == tuple(target)
    except RuntimeError:
        return False


def over_event(a: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return ``a`` of the batch's shape with one axis of length 1 for each axis of an event."""
    return a.reshape(a.shape + (1,) * len(shape))


def flat(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return ``x`` with its event axes joined into one."""
    return x.reshape((*x.shape[: x.ndim - len(shape)], math.prod(shape)))
