r"""Features of linear models: functions :math:`\phi_f(x, t)` (docs/theory.md, §6.3).

A *grid* is the set of products of one-dimensional functions, one for each coordinate of x and one for t, as in the
paper. On an axis from ``low`` to ``high``, of length L, the m functions are

==============  =====================================================================================================
gaussian        normal densities centred at m evenly spaced points from low to high; width half their spacing
fourier         :math:`1,\ \cos(2\pi k x/L)\ (1 \le k \le m/2),\ \sin(2\pi k x/L)\ (1 \le k \le (m-1)/2)`
polynomial      Legendre's :math:`P_k`, k from 0 to m - 1, of x mapped to [-1, 1]
==============  =====================================================================================================

:class:`RandomFourier` has :math:`\sqrt{2/F} \cos(\omega_f \cdot u + b_f)`, :math:`\omega \sim N(0, \ell^{-2})`, of
:math:`u = (x, t)` with t scaled to [-1, 1] (Rahimi and Recht 2007); its kernel is Gaussian of length :math:`\ell`."""

import functools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.checks import check_choice, check_number, check_positive, check_whole, is_number
from vkernel.core.errors import InputError, require
from vkernel.process import Process

KINDS = ("gaussian", "fourier", "polynomial")
CHUNK = 1 << 23  # numbers of one product held at once
LARGEST = 1 << 20  # features of a grid


class Features(ABC):
    """F functions of x and t, for events that are vectors of ``dim`` numbers.

    >>> import vkernel as vk
    >>> features = vk.features.grid("gaussian", 4, process=vk.VP())
    >>> isinstance(features, vk.features.Features), features.dim, features.count
    (True, 1, 16)
    """

    dim: int
    count: int

    @abstractmethod
    def __call__(self, x: Tensor, t: float | Tensor) -> Tensor:
        """Return ``(*batch, F)`` for ``x (*batch, dim)``; t broadcasts to the batch."""

    def apply(self, weights: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """Return features at ``x (M or 1, N, dim)``, ``t (M or 1, N or 1)`` times ``weights (M, F, o)``: (M, N, o)."""
        blocks = _blocks(x, t, self.count)
        if len(x) < len(weights) and len(t) == 1:  # shared inputs: one product for all members
            return torch.cat([torch.einsum("nf,mfo->mno", self(*block)[0], weights) for block in blocks], 1)
        return torch.cat([self(*block) @ weights for block in blocks], 1)

    def gram(self, x: Tensor, t: Tensor) -> Tensor:
        """Return the products of features at pairs of points, ``(M, P, P)``, for ``x (M, P, dim)`` and ``t (M, P)``."""
        phi = self(x, t)
        return phi @ phi.mT

    @property
    @abstractmethod
    def spec(self) -> dict[str, object]:
        """The features in JSON, read by :func:`vkernel.train.models.from_spec`."""

    def _time(self, x: Tensor, t: float | Tensor) -> Tensor:
        """Return t like x; refuse vectors of another length."""
        require(x.shape[-1:] == (self.dim,), f"Features take vectors of {self.dim} numbers; x is {tuple(x.shape)}.")
        return torch.as_tensor(t, dtype=x.dtype, device=x.device)


@dataclass(frozen=True)
class Axis:
    """One-dimensional functions of a kind, ``count`` of them, on ``low`` to ``high``.

    >>> import torch, vkernel as vk
    >>> vk.features.Axis("fourier", 5, -1.0, 1.0)(torch.zeros(3)).shape
    torch.Size([3, 5])
    """

    kind: str
    count: int
    low: float
    high: float

    def __post_init__(self) -> None:
        check_choice(self.kind, "kind of features", KINDS)
        check_whole(self.count, "count, the number of functions of an axis,")
        good = is_number(self.low) and is_number(self.high) and self.low < self.high
        require(good, f"An axis runs from low to high > low, both finite; got {self.low!r} and {self.high!r}.")
        require(self.kind != "gaussian" or self.count > 1, "Gaussian features need two or more centres.")

    def __call__(self, v: Tensor) -> Tensor:
        """Return ``(*batch, count)`` for ``v (*batch)``."""
        if self.kind == "gaussian":
            centres = torch.linspace(self.low, self.high, self.count, dtype=v.dtype, device=v.device)
            width = (self.high - self.low) / (self.count - 1) / 2
            return (((v[..., None] - centres) / width).square() * -0.5).exp() / (width * math.sqrt(2 * math.pi))
        if self.kind == "fourier":
            k = torch.arange(1, self.count // 2 + 1, dtype=v.dtype, device=v.device)
            angle = (2 * math.pi / (self.high - self.low)) * v[..., None] * k
            sines = angle.sin()[..., : (self.count - 1) // 2]  # of a part of the angles it would not be vectorised
            return torch.cat([torch.ones_like(v[..., None]), angle.cos(), sines], -1)
        z = (2 * v - (self.low + self.high)) / (self.high - self.low)
        found = [torch.ones_like(z), z][: self.count]
        for n in range(1, self.count - 1):  # Bonnet's recursion
            found.append(((2 * n + 1) * z * found[n] - n * found[n - 1]) / (n + 1))
        return torch.stack(found, -1)


class Grid(Features):
    """All products of functions, one from each axis; the last axis is that of t, and its index runs fastest.

    >>> import torch, vkernel as vk
    >>> grid = vk.features.grid("gaussian", 4, dim=2, process=vk.VP())
    >>> grid
    Grid(4 × 4 × 4 = 64 gaussian features)
    >>> grid(torch.zeros(3, 2), 0.5).shape
    torch.Size([3, 64])
    """

    def __init__(self, axes: tuple[Axis, ...], time: Axis) -> None:
        require(len(axes) >= 1, "A grid needs an axis for each coordinate of x; got none.")
        self.axes, self.time, self.dim = axes, time, len(axes)
        self.count = math.prod(a.count for a in (*axes, time))
        require(self.count <= LARGEST, f"This grid has {self.count:,} features; a grid is for few dimensions.")

    def parts(self, x: Tensor, t: float | Tensor) -> list[Tensor]:
        """Return the functions of every axis, those of t last."""
        when = self._time(x, t)  # refuses an x of another shape
        return [*(axis(x[..., j]) for j, axis in enumerate(self.axes)), self.time(when)]

    def __call__(self, x: Tensor, t: float | Tensor) -> Tensor:
        parts = self.parts(x, t)
        batch = np.broadcast_shapes(x.shape[:-1], parts[-1].shape[:-1])
        return functools.reduce(_product, parts).expand(*batch, self.count)

    def gram(self, x: Tensor, t: Tensor) -> Tensor:
        return functools.reduce(torch.mul, (part @ part.mT for part in self.parts(x, t)))  # a product of kernels

    def apply(self, weights: Tensor, x: Tensor, t: Tensor) -> Tensor:
        (M, _, o), one_time = weights.shape, t.shape[1] == 1
        if len(x) < M and not one_time:
            return super().apply(weights, x, t)
        # contract one axis after the other, that of one time first, so that no sample ever holds all F products
        if one_time:
            weights = weights.reshape(M, -1, self.time.count, o) * self.time(t.to(x.dtype))[:, 0][:, None, :, None]
            weights = weights.sum(2)
        found, height = [], self.axes[0].count
        for block in _blocks(x, t, max(height, weights.shape[1] * o // height)):
            first, *rest = self.parts(*block)[: -1 if one_time else None]
            if len(x) < M:  # shared inputs: one product for all members
                found.append(torch.einsum("nf,mfo->mno", functools.reduce(_product, rest, first)[0], weights))
                continue
            out = first @ weights.reshape(M, first.shape[-1], -1)
            for part in rest:
                out = torch.einsum("mnf,mnfr->mnr", part, out.unflatten(-1, (part.shape[-1], -1)))
            found.append(out)
        return torch.cat(found, 1)

    @property
    def spec(self) -> dict[str, object]:
        return {"kind": "grid", "axes": [[a.kind, a.count, a.low, a.high] for a in (*self.axes, self.time)]}

    def __repr__(self) -> str:
        sizes = " × ".join(str(a.count) for a in (*self.axes, self.time))
        return f"Grid({sizes} = {self.count} {self.axes[0].kind} features)"


def _product(a: Tensor, b: Tensor) -> Tensor:
    return (a[..., :, None] * b[..., None, :]).flatten(-2)  # the functions of b fastest


def grid_of(axes: list[tuple[str, int, float, float]]) -> Grid:
    """Return the grid with the axes of a ``spec``.

    >>> import vkernel as vk
    >>> vk.features.grid_of([("gaussian", 4, -1.5, 1.5), ("gaussian", 4, 0.001, 1.0)])
    Grid(4 × 4 = 16 gaussian features)
    """
    require(len(axes) >= 2, f"A grid has an axis for each coordinate of x and one for t; got {len(axes)}.")
    return Grid(tuple(Axis(*row) for row in axes[:-1]), Axis(*axes[-1]))


def grid(
    kind: str = "gaussian",
    per_axis: int = 16,
    dim: int = 1,
    low: float = -1.5,
    high: float = 1.5,
    process: Process | None = None,
    *,
    per_time: int | None = None,
) -> Grid:
    """Return the paper's products of ``per_axis`` functions of each coordinate and ``per_time`` (as many) of t.

    >>> import vkernel as vk
    >>> vk.features.grid("gaussian", 16, process=vk.VP())
    Grid(16 × 16 = 256 gaussian features)
    """
    if not isinstance(process, Process):
        raise InputError("A grid of features needs process=…: t runs from its eps to its T.")
    axis = Axis(kind, per_axis, check_number(low, "low"), check_number(high, "high"))
    time = Axis(kind, per_axis if per_time is None else per_time, process.eps, process.T)
    return Grid((axis,) * check_whole(dim, "dim"), time)


class RandomFourier(Features):
    """Cosines in random directions; ``frequencies (F, dim + 1)``, the last for t, and ``phases (F,)``.

    >>> import torch, vkernel as vk
    >>> features = vk.features.random_fourier(8, 2, vk.VP())
    >>> features
    RandomFourier(8 features of 2 coordinates and t)
    >>> features(torch.zeros(3, 2), 0.5).shape
    torch.Size([3, 8])
    """

    def __init__(self, frequencies: Tensor, phases: Tensor, eps: float, T: float) -> None:
        frequencies, phases = (torch.as_tensor(a, dtype=torch.float64) for a in (frequencies, phases))
        good = frequencies.ndim == 2 and len(frequencies) >= 1 and frequencies.shape[1] >= 2
        require(good, f"frequencies must be (F, dim + 1) with F ≥ 1; got {tuple(frequencies.shape)}.")
        require(phases.shape == frequencies.shape[:1], f"phases must be (F,); got {tuple(phases.shape)}.")
        self.frequencies, self.phases, self.eps, self.T = frequencies, phases, eps, T
        self.count, self.dim = len(frequencies), frequencies.shape[1] - 1

    def __call__(self, x: Tensor, t: float | Tensor) -> Tensor:
        scaled, omega = (2 * self._time(x, t) - (self.eps + self.T)) / (self.T - self.eps), self.frequencies.to(x)
        angle = x @ omega[:, :-1].mT + scaled[..., None] * omega[:, -1] + self.phases.to(x)
        return math.sqrt(2 / self.count) * angle.cos()

    @property
    def spec(self) -> dict[str, object]:
        spec = {"kind": "random_fourier", "eps": self.eps, "T": self.T}
        return spec | {"frequencies": self.frequencies.tolist(), "phases": self.phases.tolist()}

    def __repr__(self) -> str:
        return f"RandomFourier({self.count} features of {self.dim} coordinates and t)"


def random_fourier(
    count: int, dim: int, process: Process, *, length: float = 0.5, generator: torch.Generator | int | None = 0
) -> RandomFourier:
    """Return ``count`` random cosines whose kernel is Gaussian of the given ``length``, in units of x.

    >>> import torch, vkernel as vk
    >>> vk.features.random_fourier(8, 2, vk.VP(), generator=0)(torch.zeros(3, 2), 0.5).shape
    torch.Size([3, 8])
    """
    require(isinstance(process, Process), f"Random features need a process such as vk.VP(), not {process!r}.")
    size, source = check_whole(count, "count, the number of features,"), rng.as_generator(generator)
    shape, length = (size, check_whole(dim, "dim") + 1), check_positive(length, "length")
    omega = torch.randn(shape, generator=source, dtype=torch.float64, device=source.device) / length
    phase = torch.rand(size, generator=source, dtype=torch.float64, device=source.device) * 2 * math.pi
    return RandomFourier(omega, phase, process.eps, process.T)


def _blocks(x: Tensor, t: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    """Split ``x (M, N, dim)`` and ``t (M, N or 1)`` along N into blocks, when ``size`` numbers are held per point."""
    parts = x.split(max(1, CHUNK // (len(x) * size)), 1)
    return list(zip(parts, [t] * len(parts) if t.shape[1] == 1 else t.split(len(parts[0][0]), 1), strict=True))
