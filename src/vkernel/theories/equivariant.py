r"""The equivariant local theory (ELS): the output of a network at a pixel depends on a patch around it alone.

At pixel p the posterior is over all patches of all training images, places p' included,

.. math:: m_p = \sum_{i,p'} r_{p,ip'}\, y_{ip'}, \qquad r_{p,ip'} \propto w_i \exp\Big(-\sum_{\delta}
   \frac{|x_{p+\delta} - \alpha y_{i,p'+\delta}|^2}{2\sigma^2}\Big)

(Kamb and Ganguli 2025). Near the borders the padding of a convolutional network makes its output depend on the place:
with ``borders="zeros"`` only patches with equal distances, clipped at k // 2, to all four borders are compared; from
k = max(H, W) on every pixel has distances of its own, and the theory is :class:`~vkernel.theories.Local`. With
``"circular"`` borders all places are alike, and for odd k = H = W it is the exact denoiser of all shifts of the
training images.

Patches are averaged separately for each class of places with equal distances; a class of a single place, near two
borders, is that of ``Local``. Patches are points for the exact engine, which evaluates derivatives. Without derivatives
there are faster methods: :mod:`vkernel.theories.streamed` on a GPU; on a CPU products in float64 and, for queries in
float32 and a few thousand patches or more, :mod:`vkernel.theories.blocked`. Methods in float32 estimate their errors;
the pixels of float32 queries for which these exceed a tolerance, and all pixels of float64 queries, are evaluated in
float64."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vkernel.core.errors import require
from vkernel.posterior import Engine
from vkernel.process import Process
from vkernel.score.base import differentiated
from vkernel.theories.base import Data, posterior_mean
from vkernel.theories.blocked import Blocked
from vkernel.theories.local import Local, Patched
from vkernel.theories.patches import Patches, Span
from vkernel.theories.scale import Scale

if TYPE_CHECKING:
    from vkernel.theories.streamed import Streamed

TOLERANCE = 5e-5  # the error of a pixel that may remain for queries in float32, of the data's spread per coordinate
KEPT = 2  # patch sizes whose engines, which hold copies of the data, are kept
MANY = 1 << 12  # places of all training images, from which on float32 blocks are faster on a CPU


class PlaceClass:
    """All patches around places of one class, and the methods that average over them. An engine holds copies of its
    points, so that it gets a ``share`` of the memory."""

    def __init__(self, patches: Patches, memory: int, share: float = 1.0) -> None:
        self.patches, self.memory, self.share = patches, memory, share

    @functools.cached_property
    def engine(self) -> Engine:
        return Engine(self.patches, max(1 << 24, int(self.share * self.memory)))

    @functools.cached_property
    def streamed(self) -> Streamed | None:
        """The faster method, where there is a GPU that can use it."""
        if self.patches.device.type != "cuda" or not importlib.util.find_spec("triton"):
            return None
        from vkernel.theories.streamed import CHANNELS, Streamed

        return Streamed(self.patches, self.memory) if self.patches.image[0] <= CHANNELS else None

    def mean(self, x: Tensor, alpha: Tensor, var: Tensor, tolerance: float) -> Tensor:
        """Return the estimates of the middle pixels of patches ``x (B, d)``, ``(B, C)``; ``tolerance`` is the error
        that may remain, 0 for float64."""
        if self.streamed is not None and not differentiated(x):
            return self.streamed(x, alpha, var, tolerance)
        if x.device.type == "cpu" and not differentiated(x):
            return self.patches.mean(x, alpha, var)
        return posterior_mean(self.engine, x, alpha, var)[:, self.patches.middle]


class EquivariantLocal(Patched):
    """The denoiser whose pixels are estimated from k×k patches at every place of every training image.

    Args:
        k: the patch size, odd: a number, a function of t, or a table {σ/α: k}.
        borders: ``"zeros"`` for patches that end at the borders and are compared at equal distances from them, k up to
            2 max(H, W) - 1, or ``"circular"``, k up to min(H, W).

    >>> import torch, vkernel as vk
    >>> theory = vk.theories.EquivariantLocal(torch.rand(20, 8, 8), vk.VP(), k=3)
    >>> theory.denoise(torch.randn(5, 8, 8), 0.5).shape
    torch.Size([5, 8, 8])
    """

    narrow = True

    def __init__(
        self, data: Data, process: Process, k: Scale, borders: str = "zeros", memory: int | None = None
    ) -> None:
        super().__init__(data, process, k, borders, memory)
        self._made: dict[int, list[PlaceClass]] = {}
        if process.gamma is not None:
            noise = process.gamma.diag().reshape(self.image)
            even = bool((noise == noise[:, :1, :1]).all())
            require(even, "EquivariantLocal compares different places, which needs the same noise at all; Γ varies.")

    def patch_mean(self, x: Tensor, alpha: Tensor, var: Tensor, k: int) -> Tensor:
        _, height, width = self.image
        if self.borders == "zeros" and k >= max(height, width):
            return self.same_place.patch_mean(x, alpha, var, k)
        if self.device.type == "cpu" and self.data.n * height * width >= MANY and x.dtype != torch.float64:
            return self._blocked_mean(x, alpha, var, k)
        tolerance = 0.0 if x.dtype == torch.float64 else self.tolerance
        zeros = self.borders == "zeros"
        found = (self.same_place.patch_mean(x, alpha, var, k) if zeros else torch.empty_like(x)).double()
        x = x.double()
        for kind in self._classes(k):
            patches = kind.patches
            a, v = (level.repeat_interleave(patches.places) for level in (alpha, var))
            mean = kind.mean(patches.windows(x), a, v, tolerance)
            found[:, :, *patches.area] = mean.reshape(len(x), patches.y.count, patches.x.count, -1).permute(0, 3, 1, 2)
        return found

    def _blocked_mean(self, x: Tensor, alpha: Tensor, var: Tensor, k: int) -> Tensor:
        """Return the denoiser from blocks of logits in float32, and in float64 where these are too inaccurate."""
        given, x = x, x.double()
        mean, error = Blocked(self.white, self.image, k, self.borders)(x, alpha, var)
        if self.borders == "zeros" and k > 1:
            turned, bound = Blocked(self.white, self.image, k, self.borders, turned=True)(x, alpha, var)
            mean, error = torch.where(error.isnan()[:, None], turned, mean), torch.where(error.isnan(), bound, error)
            same = self.same_place.patch_mean(given, alpha, var, k)
            mean, error = torch.where(error.isnan()[:, None], same, mean), error.nan_to_num(0.0, torch.inf)
        for kind in self._classes(k) if bool((error > self.tolerance).any()) else ():
            patches, places = kind.patches, kind.patches.area
            again = (error[:, *places] > self.tolerance).flatten().nonzero().flatten()
            if len(again):
                image = again // patches.places
                found = patches.mean(patches.windows(x)[again], alpha[image], var[image])
                part = mean[:, :, *places].permute(0, 2, 3, 1)
                part[image, again % patches.places // patches.x.count, again % patches.x.count] = found
        return mean

    @property
    def tolerance(self) -> float:
        """The error of a pixel that may remain for queries in float32."""
        return TOLERANCE * self.data.spread / math.sqrt(self.data.d)

    @functools.cached_property
    def same_place(self) -> Local:
        """The theory that this one is for large patches."""
        return Local(self.data, self.process, 1, self.borders, self.memory)

    def _classes(self, k: int) -> list[PlaceClass]:
        """Return the patches of all classes of several places (of a single one this theory is :class:`Local`); those
        of a few k are kept."""
        if k not in self._made:
            if len(self._made) == KEPT:
                del self._made[next(iter(self._made))]
            self._made[k] = self._make(k)
        return self._made[k]

    def _make(self, k: int) -> list[PlaceClass]:
        (_, height, width), half = self.image, k // 2
        if self.borders == "circular":
            rows, columns = (Span(half, size, half, half) for size in (height, width))
            sets = [Patches(self.white, self.image, rows, columns, half)]
        else:
            kinds = itertools.product(Span.of(height, half), Span.of(width, half))
            sets = [Patches(self.white, self.image, *kind, 0) for kind in kinds if kind[0].count * kind[1].count > 1]
        total = sum(s.n * s.d for s in sets)
        return [PlaceClass(s, self.memory, s.n * s.d / total) for s in sets]
