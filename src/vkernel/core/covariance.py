r"""Covariance operators: one type for everything that is a covariance.

A :class:`Covariance` :math:`\Sigma` acts on samples of one event shape, one operator for every element of a batch.
It never forms a :math:`d \times d` matrix unless :meth:`Covariance.dense` is called. The class is abstract; final kinds
are here and, for the posterior over training points, in :mod:`vkernel.posterior`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Self

import numpy as np
import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.checks import check_real
from vkernel.core.errors import InputError, require
from vkernel.core.rng import Generator


class Covariance(ABC):
    """A positive semidefinite operator on samples of ``shape``, for each element of ``batch``."""

    batch: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def __init__(self, batch: tuple[int, ...], shape: tuple[int, ...], like: Tensor | Covariance) -> None:
        self.batch, self.shape, self.dtype, self.device = tuple(batch), tuple(shape), like.dtype, like.device

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
        eye = torch.eye(self.dim, dtype=self.dtype, device=self.device).reshape(-1, *self.shape)
        return torch.stack([flat(self @ e.expand(self.batch + self.shape), self.shape) for e in eye], dim=-1)

    def _checked(self, v: Tensor) -> Tensor:
        """Return ``v`` if its shape broadcasts with ``(*batch, *shape)``."""
        lead = check_real(v, "v").shape[: max(v.ndim - len(self.shape), 0)]
        good = v.ndim == 0 or tuple(v.shape[len(lead) :]) == self.shape
        try:
            np.broadcast_shapes(self.batch, lead)
        except ValueError:
            good = False
        require(good, f"v has shape {tuple(v.shape)}; the operator acts on shape {self.batch + self.shape}.")
        return v

    def _noise(self, generator: Generator) -> Tensor:
        return rng.randn(self.batch + self.shape, rng.as_generator(generator), self.device, self.dtype)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(batch={self.batch}, shape={self.shape}, dtype={self.dtype})"


class _Entries(Covariance):
    """An operator that is given by the tensor ``entries``; equality is number for number."""

    entries: Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        """Return the same operator on another device, in another precision."""
        return type(self)(self.entries.to(device, dtype), self.shape)  # type: ignore[call-arg, arg-type]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Entries) or type(self) is not type(other):
            return False
        alike = (self.shape, self.dtype, self.device) == (other.shape, other.dtype, other.device)
        return alike and torch.equal(self.entries, other.entries)

    def __hash__(self) -> int:
        return hash((type(self), self.shape))


class Diagonal(_Entries):
    """Independent coordinates with the variances ``entries``, ``(*batch, *shape)``."""

    def __init__(self, entries: Tensor, shape: tuple[int, ...]) -> None:
        super().__init__(tuple(entries.shape[: entries.ndim - len(shape)]), shape, entries)
        self.entries = entries

    def __matmul__(self, v: Tensor) -> Tensor:
        return self.entries * self._checked(v)

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
        good, given = tuple(entries.shape[-2:]) == (self.dim, self.dim), tuple(entries.shape)
        require(good, f"A matrix for events of shape {self.shape} must end in ({self.dim}, {self.dim}), not {given}.")
        self.entries = entries

    def __matmul__(self, v: Tensor) -> Tensor:
        product = (self.entries @ flat(self._checked(v), self.shape).unsqueeze(-1)).squeeze(-1)
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
        least, good = float(values.min()), bool((values >= -16 * floor).all())
        require(good, f"A covariance must be positive semidefinite; this one has the eigenvalue {least:.3g}.")
        powered = torch.where(values > floor, values.clamp_min(floor) ** exponent, torch.zeros_like(values))
        return Matrix((vectors * powered.unsqueeze(-2)) @ vectors.mT, self.shape)


Map = Diagonal | Matrix


class Factored(Covariance):
    r""":math:`\sum_k a_k a_k^T` from its factors ``(K, *batch, *shape)``: ensemble members, or weights of a model."""

    def __init__(self, factors: Tensor, shape: tuple[int, ...]) -> None:
        super().__init__(tuple(factors.shape[1 : factors.ndim - len(shape)]), shape, factors)
        self.factors = factors

    def __matmul__(self, v: Tensor) -> Tensor:
        along = flat(self.factors * self._checked(v), self.shape).sum(-1)
        return (over_event(along, self.shape) * self.factors).sum(0)

    def diag(self) -> Tensor:
        return self.factors.square().sum(0)

    def dense(self) -> Tensor:
        rows = flat(self.factors, self.shape).movedim(0, -1)
        return rows @ rows.mT

    def draw(self, generator: Generator = None) -> Tensor:
        z = rng.randn((len(self.factors), *self.batch), rng.as_generator(generator), self.device, self.dtype)
        return (over_event(z, self.shape) * self.factors).sum(0)


class Transformed(Covariance):
    r""":math:`a A\, \Sigma A a`, the covariance of :math:`a A z`; results are rounded to ``dtype`` at the end.
    ``factor`` holds a number a for each element of the batch; ``map`` is a symmetric operator A without batch."""

    def __init__(
        self, base: Covariance, factor: Tensor | None = None, map: Map | None = None, dtype: torch.dtype | None = None
    ) -> None:
        factor = torch.ones(()) if factor is None else factor
        super().__init__(tuple(np.broadcast_shapes(base.batch, factor.shape)), base.shape, base)
        self.base, self.factor = base, factor.to(base.device, base.dtype)
        self._square = over_event(self.factor**2, self.shape)
        self.map = None if map is None else map.to(base.device, base.dtype)
        self.dtype = dtype or base.dtype

    def __matmul__(self, v: Tensor) -> Tensor:
        inner = self._mapped(self._checked(v).to(self.base.dtype))
        return self._mapped(self._square * (self.base @ inner)).to(self.dtype)

    def diag(self) -> Tensor:
        return self._variances().to(self.dtype)

    def trace(self) -> Tensor:
        wide = self.factor**2 * self.base.trace() if self.map is None else flat(self._variances(), self.shape).sum(-1)
        return wide.to(self.dtype)

    def draw(self, generator: Generator = None) -> Tensor:
        z, source = self.base.draw, rng.as_generator(generator)
        if self.base.batch == self.batch:
            draws = z(source)
        else:  # one operator for many factors: a draw for each
            many = [z(source) for _ in range(math.prod(self.batch) // max(1, math.prod(self.base.batch)))]
            lead = self.batch[: len(self.batch) - len(self.base.batch)]
            draws = torch.stack(many).reshape(*lead, *self.base.batch, *self.shape)
        return self._mapped(over_event(self.factor, self.shape) * draws).to(self.dtype)

    def _mapped(self, v: Tensor) -> Tensor:
        return v if self.map is None else self.map @ v

    def _variances(self) -> Tensor:
        """Return the diagonal before it is rounded; for a matrix A with columns a, the products a·Σa."""
        if isinstance(self.map, Matrix):
            columns = (a.expand(self.batch + self.shape) for a in self.map.entries.mT.reshape(-1, *self.shape))
            variances = [flat(a * self._square * (self.base @ a), self.shape).sum(-1) for a in columns]
            return torch.stack(variances, -1).reshape(self.batch + self.shape)
        scaled = self._square * self.base.diag()
        return scaled if self.map is None else self.map.entries**2 * scaled


def fits(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether ``shape`` broadcasts to ``target``."""
    try:
        return tuple(np.broadcast_shapes(shape, target)) == tuple(target)
    except ValueError:
        return False


def over_event(a: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return ``a`` of the batch's shape with one axis of length 1 for each axis of an event."""
    return a.reshape(a.shape + (1,) * len(shape))


def flat(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return ``x`` with its event axes joined into one."""
    return x.reshape((*x.shape[: x.ndim - len(shape)], math.prod(shape)))
