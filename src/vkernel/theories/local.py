r"""The local theory (LS): at every pixel a network sees a patch only, and knows where the patch is.

At pixel p the posterior is over training images, given the k×k patch :math:`\Omega_p` around p, all channels,

.. math:: m_p = \sum_i r_{pi}\, y_{ip}, \qquad r_{pi} \propto w_i \exp\Big(-\sum_{q \in \Omega_p} \frac{|x_q - \alpha
   y_{iq}|^2}{2\sigma^2}\Big),

and only its centre is estimated: pixels combine parts of different training images (Kamb and Ganguli 2025, "An
analytic theory of creativity in convolutional diffusion models"). ``borders="zeros"``: what lies outside of the image
contributes nothing, so that k = 2 max(H, W) - 1 is the exact denoiser; ``"circular"``: patches wrap around.

The sums over patches are differences of cumulative sums of :math:`|x_q - \alpha y_{iq}|^2`, whatever k is.

**The scale k** is a number, a function of t that returns one, or a table {σ/α: k}, of which the
entry nearest in :math:`\log \sigma/\alpha` counts. :meth:`Local.fit` chooses a table for a network."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.checks import check_choice, is_number, is_whole
from vkernel.core.errors import require
from vkernel.data import Empirical
from vkernel.posterior.weights import blocks
from vkernel.process import Process
from vkernel.score.base import Score
from vkernel.theories.base import Average, Data, Theory, check_images

Scale = int | Callable[[float], int] | Mapping[float, int]
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
        self.k: Scale = dict(k) if isinstance(k, Mapping) else k
        if isinstance(self.k, dict):
            good = len(self.k) > 0 and all(is_number(ratio) and ratio > 0 for ratio in self.k)
            require(good, f"A table of k needs positive σ/α as keys; got {self.k!r}.")
        for one in self.k.values() if isinstance(self.k, dict) else [] if callable(self.k) else [self.k]:
            self._check(one)

    def _check(self, k: object) -> int:
        name, (_, height, width) = type(self).__name__, self.image
        require(is_whole(k) and k >= 1 and k % 2 == 1, f"{name} needs an odd patch size k, 1 or more; got {k!r}.")
        circular = self.borders == "circular"
        most = min(height, width) if circular else 2 * max(height, width) - 1
        limit = f"k = {k} is too large for {height}×{width} images with borders={self.borders!r}: at most {most}"
        require(k <= most, f"{limit}{'' if circular else ', where it is the exact denoiser'}.")  # type: ignore[operator]
        return k  # type: ignore[return-value]

    def scale(self, ratio: float) -> int:
        """Return the patch size at one σ/α."""
        if isinstance(self.k, dict):
            return self.k[min(self.k, key=lambda r: abs(math.log(r / ratio)))]
        if callable(self.k):
            return self._check(self.k(float(self.process.base.time(torch.tensor(ratio, dtype=torch.float64)))))
        return self.k  # type: ignore[return-value]

    def mean(self, x: Tensor, alpha: Tensor, var: Tensor) -> Tensor:
        scales = torch.tensor([self.scale(float(r)) for r in var.sqrt() / alpha])
        images, out = x.reshape(-1, *self.image), torch.empty_like(x.detach().reshape(-1, *self.image))
        for k in scales.unique().tolist():
            rows = (scales == k).nonzero().flatten().to(x.device)
            out = out.index_copy(0, rows, self.patch_mean(images[rows], alpha[rows], var[rows], k))
        return out.reshape(x.shape)

    @abstractmethod
    def patch_mean(self, x: Tensor, alpha: Tensor, var: Tensor, k: int) -> Tensor:
        """Return the denoiser at images ``x (B, C, H, W)``."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.data!r}, {self.process!r}, k={self.k!r}, borders={self.borders!r})"


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

    @classmethod
    def fit(
        cls,
        network: Score,
        data: Data,
        images: Data,
        *,
        scales: Sequence[int] | None = None,
        levels: int = 6,
        borders: str = "zeros",
        seed: int = 0,
        memory: int | None = None,
    ) -> Self:
        r"""Return the theory whose table of k explains ``network`` best.

        At ``levels`` noise levels, even in log σ/α, k minimises :math:`\sum |D - m_k|^2` between the network's
        denoiser D and the theory's on noised ``images``, which must not be those of a later verdict. ``scales`` are the
        candidates (default: about eight, from 1 to the largest)."""
        process, data = network.process, data if isinstance(data, Empirical) else Empirical(data)
        theory = cls(data, process, 1, borders, memory)
        x0 = images[:] if isinstance(images, Empirical) else images
        _, height, width = theory.image
        most = theory.image[1] if borders == "circular" else 2 * max(height, width) - 1
        ladder = {1, 3, 5, *(2 * round(most ** (j / 8) / 2) + 1 for j in range(3, 9))}
        tried = [theory._check(k) for k in scales or sorted(k for k in ladder if k <= most)]
        low, high = process.ratios
        ratios = torch.logspace(math.log10(max(low, 1e-3 * high)), math.log10(high), levels, dtype=torch.float64)
        table, source = {}, rng.stream(seed, "noise for the scale of locality")
        for ratio in ratios.tolist():
            t = process.time(torch.tensor(ratio, dtype=torch.float64).clamp(low, high))
            x = process.perturb(x0, t, generator=source)
            with torch.no_grad():
                target = network.denoise(x, t)
                errors = {
                    k: float((cls(data, process, k, borders, memory).denoise(x, t) - target).square().sum())
                    for k in tried
                }
            table[ratio] = min(errors, key=errors.__getitem__)
        return cls(data, process, table, borders, memory)


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
