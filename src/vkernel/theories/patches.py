"""Patches of training images as points for the exact engine."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from vkernel.posterior import Points
from vkernel.posterior.weights import blocks
from vkernel.theories.base import Average

COORDINATES = 1 << 17  # of patches in float64, which a processor's cache holds
QUERIES = 1 << 10  # at once


@dataclass(frozen=True)
class Span:
    """Places along one axis with equal clipped distances ``before`` and ``after``, from ``start`` on."""

    start: int
    count: int
    before: int
    after: int

    @property
    def width(self) -> int:
        """The length of a patch."""
        return self.before + 1 + self.after

    @classmethod
    def of(cls, size: int, half: int) -> list[Span]:
        """Return all classes of places along an axis of ``size`` pixels, for patches of 2 half + 1."""
        kinds = [(min(p, half), min(size - 1 - p, half)) for p in range(size)]
        return [cls(kinds.index(kind), kinds.count(kind), *kind) for kind in dict.fromkeys(kinds)]


class Patches:
    """Patches of all images around the places of one class, as points for an engine: image by image, row by row.
    ``margin`` pixels are added on each side of an image, which continues circularly."""

    def __init__(self, images: Points, image: tuple[int, int, int], rows: Span, columns: Span, margin: int) -> None:
        self.images, self.image, self.margin = images, image, margin
        self.y, self.x, self.places = rows, columns, rows.count * columns.count
        self.n, self.d = images.n * self.places, image[0] * rows.width * columns.width
        self.device, self.in_memory = images.device, images.in_memory
        self.center = self.windows(images.center.reshape(1, *image)).mean(0)

    @functools.cached_property
    def weights(self) -> Tensor:
        """The weights of the patches."""
        return (self.images.weights / self.places).repeat_interleave(self.places)

    @property
    def area(self) -> tuple[slice, slice]:
        """The rows and columns of the places."""
        return tuple(slice(s.start - self.margin, s.start - self.margin + s.count) for s in (self.y, self.x))  # type: ignore[return-value]

    @property
    def middle(self) -> Tensor:
        """The coordinates of the pixel that is estimated, one for each channel."""
        area = self.y.width * self.x.width
        return self.y.before * self.x.width + self.x.before + area * torch.arange(self.image[0], device=self.device)

    def windows(self, images: Tensor) -> Tensor:
        """Return the patches of ``images (B, C, H, W)``, ``(B · places, d)``."""
        if self.margin:
            images = torch.nn.functional.pad(images, (self.margin,) * 4, mode="circular")
        top, left = self.y.start - self.y.before, self.x.start - self.x.before
        part = images[:, :, top : top + self.y.count + self.y.width - 1, left : left + self.x.count + self.x.width - 1]
        cut = part.unfold(2, self.y.width, 1).unfold(3, self.x.width, 1)  # (B, C, rows, columns, height, width)
        return cut.permute(0, 2, 3, 1, 4, 5).reshape(-1, self.d)

    def rows(self, start: int, stop: int) -> Tensor:
        first, last = start // self.places, -(-stop // self.places)
        found = self.windows(self.images.rows(first, last).reshape(-1, *self.image))
        return found[start - first * self.places : stop - first * self.places]

    def mean(self, x: Tensor, alpha: Tensor, var: Tensor) -> Tensor:
        """Return the mean of the middle pixels for queries ``x (B, d)``, ``(B, C)``, directly in float64."""
        return torch.cat([self._mean(x[some], alpha[some], var[some]) for some in blocks(len(x), QUERIES)])

    def _mean(self, x: Tensor, alpha: Tensor, var: Tensor) -> Tensor:
        found, x = Average(), x - alpha[:, None] * self.center
        scaled, slope = x * (alpha / var)[:, None], (alpha.square() / (2 * var))[:, None]
        images = COORDINATES // (self.places * max(self.d, len(x))) or 1
        for part in blocks(self.n, images * self.places):
            y = self.rows(part.start, part.stop).double() - self.center
            logit = torch.addmm(self.weights[part].log(), scaled, y.mT)
            logit -= slope * torch.linalg.vector_norm(y, dim=1).square()
            found.add(logit, y[:, self.middle])
        return found.value + self.center[self.middle]

    def take(self, indices: Tensor) -> Tensor:
        image, place = indices // self.places, indices % self.places
        which, inverse = image.unique(return_inverse=True)  # many patches are of one image
        y = self.images.take(which).reshape(-1, *self.image)
        (channels, height, width), m = self.image, self.margin

        def along(span: Span, at: Tensor, size: int) -> Tensor:
            offsets = torch.arange(-span.before, span.after + 1, device=at.device)
            return (span.start - m + at[:, None] + offsets) % size

        rows, columns = along(self.y, place // self.x.count, height), along(self.x, place % self.x.count, width)
        channel = torch.arange(channels, device=y.device)[:, None, None]
        return y[inverse[:, None, None, None], channel, rows[:, None, :, None], columns[:, None, None, :]].flatten(1)
