r"""The local theory (LS): at every pixel a network sees a patch only, and knows where the patch is.

At pixel p the posterior is over training images, given the k×k patch :math:`\Omega_p` around p, all channels,

.. math:: m_p = \sum_i r_{pi}\, y_{ip}, \qquad r_{pi} \propto w_i \exp\Big(-\sum_{q \in \Omega_p} \frac{|x_q - \alpha
   y_{iq}|^2}{2\sigma^2}\Big),

and only its centre is estimated: pixels combine parts of different training images (Kamb and Ganguli 2025, "An
analytic theory of creativity in convolutional diffusion models"). ``borders="zeros"``: what lies outside of the image
contributes nothing, so that k = 2 max(H, W) - 1 is the exact denoiser; ``"circular"``: patches wrap around.

The sums over patches are differences of cumulative sums of :math:`|x_q - \alpha y_{iq}|^2`, whatever k is.

**The scale k** is a number, a function of t, or a table {σ/α: k} (:mod:`vkernel.theories.scale`). :meth:`Local.fit`
chooses a table for a network."""

from __future__ import annotations

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
from vkernel.theories.base import Average, Data, Theory, check_images
from vkernel.theories.fit import Levels, fit
from vkernel.theories.scale import ByLevel, Scale

BORDERS = ("zeros", "circular")
IMAGES = 64  # training images at once


class Patched(Theory):
    """A theory of k×k patches of images; :meth:`patch_mean` estimates the pixels for one k."""

    def __init__(
        self, data: Data, process: Process, k: Scale, borders: str = "zeros", memory: int | None = None
    ) -> None:
        super().__init__(data, process, memory)
        self.image = check_images(self.data, process, type(self).__name__)
        self.borders = check_choice(borders, "borders", BORDERS)
        self.scales = ByLevel(k, "k", process, self._check)

    @property
    def k(self) -> Scale:
        """The patch size: a number, a function of t, or a table {σ/α: k}."""
        return self.scales.given

    def _check(self, k: object) -> int:
        name, most = type(self).__name__, self.most
        k = int(k) if isinstance(k, np.integer) else k
        require(is_whole(k) and k >= 1 and k % 2 == 1, f"{name} needs an odd patch size k, 1 or more; got {k!r}.")
        size = "×".join(str(side) for side in self.image[1:])
        limit = f"k = {k} is too large for {size} images with borders={self.borders!r}: at most {most}"
        exact = "" if self.borders == "circular" else ", where it is the exact denoiser"
        require(k <= most, f"{limit}{exact}.")  # type: ignore[operator]
        return k  # type: ignore[return-value]

    @property
    def most(self) -> int:
        """The largest patch size."""
        _, height, width = self.image
        return min(height, width) if self.borders == "circular" else 2 * max(height, width) - 1

    def scale(self, ratio: float) -> int:
        """Return the patch size at one σ/α."""
        return int(self.scales.at(ratio))

    def mean(self, x: Tensor, alpha: Tensor, var: Tensor) -> Tensor:
        scales = self.scales(var.sqrt() / alpha).int()
        images, out = x.reshape(-1, *self.image), torch.empty_like(x.detach().reshape(-1, *self.image))
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
        ladder = {1, 3, 5, *(2 * round(theory.most ** (j / 8) / 2) + 1 for j in range(3, 9))}
        tried = sorted(scales or (k for k in ladder if k <= theory.most))
        return fit(theory, theory.scales, network, images, tried, levels, seed)


class Local(Patched):
    """The denoiser whose pixels are estimated from k×k patches at the same place in every training image.

    >>> import torch, vkernel as vk
    >>> theory = vk.theories.Local(torch.rand(20, 8, 8), vk.VP(), k=3)
    >>> theory.denoise(torch.randn(5, 8, 8), 0.5).shape
    torch.Size([5, 8, 8])
    """

    def patch_mean(self, x: Tensor, alpha: Tensor, var: Tensor, k: int) -> Tensor:
        step = max(1, self.memory // (64 * IMAGES * x[0].numel()))
        return torch.cat([self._block(x[part], alpha[part], var[part], k) for part in blocks(len(x), step)])

    def _block(self, x: Tensor, alpha: Tensor, var: Tensor, k: int) -> Tensor:
        found = Average()
        for y, log_w in self.points(IMAGES):
            y = y.reshape(-1, *self.image)
            gap = (x[:, None] - alpha[:, None, None, None, None] * y).square().sum(2)
            logit = log_w[:, None, None] - box(gap, k, self.borders) / (2 * var[:, None, None, None])
            found.add(logit[:, :, None], y)
        return found.value


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
