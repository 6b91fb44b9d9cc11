r"""The local theory (LS): the output of a network at a pixel depends on a patch around it, and on its place.

At pixel p the posterior is over training images, given the k×k patch :math:`\Omega_p` around p, all channels,

.. math:: m_p = \sum_i r_{pi}\, y_{ip}, \qquad r_{pi} \propto w_i \exp\Big(-\sum_{q \in \Omega_p} \frac{|x_q - \alpha
   y_{iq}|^2}{2\sigma^2}\Big),

and only its centre is estimated: pixels combine parts of different training images (Kamb and Ganguli 2025, "An
analytic theory of creativity in convolutional diffusion models"). ``borders="zeros"``: what lies outside of the image
contributes nothing, so that k = 2 max(H, W) - 1 is the exact denoiser; ``"circular"``: patches wrap around.

The sum of :math:`\frac{\alpha}{\sigma^2} x_q y_{iq} - \frac{\alpha^2}{2\sigma^2} |y_{iq}|^2` over a patch is taken for
a row of pixels at a time: over the patch's rows and channels by a product of matrices for each column of the image,
and over its columns by sums of 2, 4, 8, … neighbours (sums without differences, which would lose digits).

**The scale k** is a number, a function of t, or a table {σ/α: k} (:mod:`vkernel.theories.scale`). :meth:`Local.fit`
chooses a table for a network."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor

from vkernel.core.checks import check_choice, is_whole
from vkernel.core.errors import require
from vkernel.posterior.weights import blocks
from vkernel.process import Process
from vkernel.score.base import Score, check_score
from vkernel.theories.base import TOLERANCE, Average, Data, Theory, check_images, doubt, rounding
from vkernel.theories.fit import Levels, fit
from vkernel.theories.scale import ByLevel, Scale

BORDERS = ("zeros", "circular")
TILE = 1 << 19, 1 << 27  # logits of a row of pixels at once, in the caches of a CPU, and on a GPU
POINTS = 1 << 10, 1 << 14  # training images at once


class Patched(Theory):
    """A theory of k×k patches of images; :meth:`patch_mean` estimates the pixels for one k."""

    def __init__(
        self, data: Data, process: Process, k: Scale, borders: str = "zeros", memory: int | None = None
    ) -> None:
        super().__init__(data, process, memory)
        self.image = check_images(self.data, process, type(self).__name__)
        self.borders = check_choice(borders, "borders", BORDERS)
        # a method of self would keep the theory, and its copies of the data, until the next garbage collection
        check = functools.partial(check_patch_size, self.image, self.borders, type(self).__name__)
        self.scales = ByLevel(k, "k", process, check)

    @property
    def k(self) -> Scale:
        """The patch size: a number, a function of t, or a table {σ/α: k}."""
        return self.scales.given

    def scale(self, ratio: float) -> int:
        """Return the patch size at one σ/α."""
        return int(self.scales.at(ratio))

    def mean(self, x: Tensor, alpha: Tensor, var: Tensor) -> Tensor:
        scales = self.scales(var.sqrt() / alpha).int()
        images, out = x.reshape(-1, *self.image), torch.empty(len(x), *self.image, dtype=torch.float64, device=x.device)
        for k in scales.unique().tolist():
            rows = (scales == k).nonzero().flatten()
            out = out.index_copy(0, rows, self.patch_mean(images[rows], alpha[rows], var[rows], k))
        return out.reshape(x.shape)

    @abstractmethod
    def patch_mean(self, x: Tensor, alpha: Tensor, var: Tensor, k: int) -> Tensor:
        """Return the denoiser at images ``x (B, C, H, W)``."""

    @property
    def options(self) -> dict[str, object]:
        return {"k": self.k, "borders": self.borders}

    @classmethod
    def fit(
        cls,
        network: Score,
        data: Data,
        images: Data,
        *,
        scales: Sequence[int] | None = None,
        levels: Levels = 6,
        borders: str = "zeros",
        seed: int = 0,
        memory: int | None = None,
    ) -> Self:
        r"""Return the theory whose table of k explains ``network`` best, on ``images`` apart from those of a verdict.

        ``scales`` are the candidates (default: about eight, from 1 to the largest), of which the smaller counts at a
        tie; ``levels`` are noise levels σ/α, or how many (:mod:`vkernel.theories.fit`)."""
        theory = cls(data, check_score(network, "A fit").process, 1, borders, memory)
        most = largest_patch_size(theory.image, borders)
        ladder = {1, 3, 5, *(2 * round(most ** (j / 8) / 2) + 1 for j in range(3, 9))}
        tried = sorted(scales or (k for k in ladder if k <= most))
        return fit(theory, theory.scales, network, images, tried, levels, seed)


class Local(Patched):
    """The denoiser whose pixels are estimated from k×k patches at the same place in every training image.

    Args:
        k: the patch size, odd: a number, a function of t, or a table {σ/α: k}.
        borders: ``"zeros"`` for patches that end at the borders, k up to 2 max(H, W) - 1, or ``"circular"``, k up to
            min(H, W).

    >>> import torch, vkernel as vk
    >>> theory = vk.theories.Local(torch.rand(20, 8, 8), vk.VP(), k=3)
    >>> theory.denoise(torch.randn(5, 8, 8), 0.5).shape
    torch.Size([5, 8, 8])
    """

    narrow = True

    def patch_mean(self, x: Tensor, alpha: Tensor, var: Tensor, k: int) -> Tensor:
        width, gpu = self.image[2], x.device.type != "cpu"
        pairs = max(1, self.memory // (96 * (width + k)))  # of a query and a training image: six arrays of a row
        step = min(self.data.n, POINTS[gpu], pairs)
        images = max(1, min(TILE[gpu] // (step * width), pairs // step))
        parts = blocks(len(x), images)
        return torch.cat([self._block(x[part], alpha[part], var[part], k, step) for part in parts])

    def _block(self, x: Tensor, alpha: Tensor, var: Tensor, k: int, step: int) -> Tensor:
        everything = torch.arange(len(x), device=x.device)
        found = self._averages(x, alpha, var, k, step, dict.fromkeys(range(self.image[1]), everything))
        value = torch.stack([row.value for row in found.values()])
        mean, square = value[..., :-2], value[..., -1]
        if x.dtype != torch.float64:
            peak, log_z = (torch.stack(part) for part in zip(*((r.peak, r.log_z) for r in found.values()), strict=True))
            off = doubt(value[..., :-1], peak, self._error(x, alpha, var, k, log_z, square)).sum(1)  # (H, B)
            budget = (TOLERANCE * self.data.spread) ** 2
            bad = ((off.sum(0) > budget) & (off > budget / len(off))).cpu()
            rows = {h: bad[h].nonzero().flatten().to(x.device) for h in range(len(bad)) if bad[h].any()}
            again = self._averages(x.double(), alpha, var, k, step, rows) if rows else {}
            for h, row in again.items():
                mean[h, :, rows[h]] = row.value[..., :-2]
        return mean.permute(2, 3, 0, 1) + self.center.reshape(self.image)

    def _averages(
        self, x: Tensor, alpha: Tensor, var: Tensor, k: int, step: int, rows: dict[int, Tensor]
    ) -> dict[int, Average]:
        """Return the averages ``(W, B, C + 2)`` of pixels less their mean, of their square and of the patch's square,
        for queries of each of some rows of pixels."""
        (_, height, width), half = self.image, k // 2
        alpha, var = alpha[:, None, None, None], var[:, None, None, None]
        linear = (x - alpha * self.center.reshape(self.image)) * (alpha / var)
        slope = (-alpha.square() / (2 * var)).expand(-1, 1, height, width)
        left = torch.cat([linear, slope], 1).permute(3, 0, 2, 1).to(x.dtype)  # (W, B, H, C + 1)
        found = {h: Average() for h in rows}
        for y, log_w in self.columns(step, x.dtype, self._arranged):
            for h, which in rows.items():
                near = torch.arange(h - half, h + half + 1, device=x.device) % height
                window = near if self.borders == "circular" else slice(max(0, h - half), h + half + 1)
                logit = left[:, which][:, :, window].flatten(2) @ y[:, window].flatten(1, 2)  # (W, B, n)
                logit = sliding(logit, half, self.borders)
                square = sliding(y[:, window, -1].sum(1), half, self.borders)
                found[h].add(logit + log_w if self.weighted else logit, torch.cat([y[:, h], square[:, None]], 1).mT)
        return found

    def _arranged(self, y: Tensor) -> Tensor:
        """Return the columns of images ``y (n, d)`` with the square of each pixel, ``(W, H, C + 1, n)``."""
        y = y.reshape(-1, *self.image)
        return torch.cat([y, y.square().sum(1, keepdim=True)], 1).permute(3, 2, 1, 0)

    def _error(self, x: Tensor, alpha: Tensor, var: Tensor, k: int, log_z: Tensor, square: Tensor) -> Tensor:
        """Return the rounding errors of logits in float32, ``(H, W, B)``, given the ``square`` of heavy patches."""
        centred = x - alpha[:, None, None, None] * self.center.reshape(self.image)
        there = box(centred.square().sum(1), k, self.borders).permute(1, 2, 0).clamp_min(0).sqrt()
        area = self.image[0] * box(torch.ones_like(x[0, 0]), k, self.borders)[..., None]
        return rounding(alpha, var, there, square.sqrt(), area, (self.image[0] + 2) * k, log_z)


def largest_patch_size(image: tuple[int, int, int], borders: str) -> int:
    """Return the largest k for images ``(C, H, W)``."""
    _, height, width = image
    return min(height, width) if borders == "circular" else 2 * max(height, width) - 1


def check_patch_size(image: tuple[int, int, int], borders: str, theory: str, k: object) -> int:
    """Return ``k`` if it is odd and not too large."""
    most, k = largest_patch_size(image, borders), int(k) if isinstance(k, np.integer) else k
    require(is_whole(k) and k >= 1 and k % 2 == 1, f"{theory} needs an odd patch size k, 1 or more; got {k!r}.")
    size = "×".join(str(side) for side in image[1:])
    limit = f"k = {k} is too large for {size} images with borders={borders!r}: at most {most}"
    exact = "" if borders == "circular" else ", where it is the exact denoiser"
    require(k <= most, f"{limit}{exact}.")  # type: ignore[operator]
    return k  # type: ignore[return-value]


def sliding(a: Tensor, half: int, borders: str) -> Tensor:
    """Return the sums over windows of 2 half + 1 of ``a (W, …)``, which continues with zeros or circularly."""
    width = len(a)
    half = min(half, width - 1)
    if borders == "circular":
        a = torch.cat([a[width - half :], a, a[:half]])
    elif half:
        edge = a.new_zeros(half, *a.shape[1:])
        a = torch.cat([edge, a, edge])
    total, start, size = a[:width], 1, 1
    while 2 * size <= 2 * half + 1:  # ``a`` holds sums of ``size`` neighbours: for each binary digit of the window one
        a, size = a[:-size] + a[size:], 2 * size
        if (2 * half + 1) & size:
            total, start = total + a[start : start + width], start + size
    return total


def box(a: Tensor, k: int, borders: str) -> Tensor:
    """Return the sum over the k×k window around each pixel of ``a (…, H, W)``; outside of it there is nothing, or its
    continuation if ``borders`` are circular."""
    for dim in (-2, -1):
        size, half = a.shape[dim], k // 2
        place = torch.arange(size, device=a.device)
        if borders == "circular":
            a = torch.cat([a.narrow(dim, size - half, half), a, a.narrow(dim, 0, half)], dim)
            first, last = place, place + k
        else:
            first, last = (place - half).clamp_min(0), (place + half + 1).clamp_max(size)
        total = torch.cat([torch.zeros_like(a.narrow(dim, 0, 1)), a.cumsum(dim)], dim)
        a = total.index_select(dim, last) - total.index_select(dim, first)
    return a
