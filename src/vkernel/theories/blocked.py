r"""Averages over the patches of all places on a CPU: logits of neighbouring rows differ by one row of pixels.

The logit of the patch around row r of a query with the patch around row r' of a training image is a sum over rows of
pixels. With the columns fixed and a zero point :math:`o` of all pixels,

.. math:: l_{rr'} = \frac{\alpha}{\sigma^2} \sum_{|\delta| \le k/2} g_{r+\delta,\, r'+\delta} - \frac{\alpha^2}
   {2\sigma^2} |y_{r'} - o|^2 + \log w, \qquad g_{ss'} = (x_s - \alpha o) \cdot (y_{s'} - o),

and the next one on the diagonal needs two rows of pixels, whatever k is: :math:`l_{r+1,r'+1} = l_{rr'} +
\frac{\alpha}{\sigma^2} (g_{r+1+k/2,\, r'+1+k/2} - g_{r-k/2,\, r'-k/2}) - \dots`. One float32 product with an inner
length of 2kC + 1 adds this to the logits of all columns, images and diagonals :math:`r' - r` in a block, in place;
only where a diagonal begins are all k²C + 2 numbers multiplied. Pixels outside of an image are zero points, so that the
classes of places at the borders are the same sums over fewer pairs. A block is small enough for the cache; its largest
logit :math:`L`, :math:`z = \sum e^{l - L}` and the sums of the values are merged with those of other blocks.

**Error.** The error of a logit is about :math:`\delta = 2^{-24} \big(\frac{\alpha}{\sigma^2} |x - \alpha o|\, |y - o| /
\sqrt d + \frac{\sqrt d + 4}{8} (\frac{\alpha}{\sigma^2} |(x - \alpha o) \cdot (y - o)| + \frac{\alpha^2}{2\sigma^2}|y -
o|^2) \big)`, which moves the mean by at most :math:`\delta \sqrt{\max r \operatorname{tr} \mathrm{Cov}(v|x)}`, as in
:mod:`vkernel.theories.streamed`; four of these are returned with the mean."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vkernel.posterior import Points
from vkernel.posterior.weights import LIGHT, blocks
from vkernel.theories.patches import Span

LOG2E = 1 / math.log(2)
QUERIES, LOGITS = 256, 1 << 19  # at once: what a processor's cache holds
LEAST = -100.0  # the smallest exponent of 2 that is evaluated: denormal numbers are slow
FEW = 0.7  # of the rows of a block: then the others are copied
SUM = 512  # numbers in a float32 sum
UNKNOWN = 0.25  # the error of a logit from which on the weights, and the error that follows from them, are unknown
NEGLIGIBLE = 60.0  # rows of a block that lie so many powers of 2 below their largest logit are left out


class Blocked:
    """The averages of the pixels of images ``(C, H, W)`` over the k×k patches of all places of one class."""

    def __init__(self, images: Points, image: tuple[int, int, int], k: int, borders: str) -> None:
        self.images, self.image, self.k, self.circular = images, image, k, borders == "circular"
        self.zero = float(images.center.mean())
        whole = ([Span(0, size, 0, 0)] for size in image[1:])
        self.rows, self.columns = whole if self.circular else (Span.of(size, k // 2) for size in image[1:])
        self.places = max(span.count for span in self.rows)

    def __call__(self, x: Tensor, alpha: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean of ``x (B, C, H, W)`` and the error ``(B, H, W)`` that it may have, in float64."""
        x = x - alpha[:, None, None, None] * self.zero
        found = [self._mean(x, alpha, var, columns) for columns in self.columns]
        mean, error = (torch.cat(parts, -1) for parts in zip(*found, strict=True))
        return mean + self.zero, error

    def _mean(self, x: Tensor, alpha: Tensor, var: Tensor, columns: Span) -> tuple[Tensor, Tensor]:
        """Return mean ``(B, C, H, count)`` and error of the columns of one class."""
        (channels, height, _), k = self.image, self.k
        x, alpha, var = self._segments(x, columns), *(a.repeat_interleave(columns.count) for a in (alpha, var))
        gain, slope = LOG2E * alpha / var, LOG2E * alpha.square() / var
        group = -(-len(x) // -(-len(x) // QUERIES))
        queries = [
            Queries((gain[some, None, None] * x[some]).float(), slope[some, None].float(), k)
            for some in blocks(len(x), group)
        ]
        top = torch.full((height, len(x)), -torch.inf)
        sums = torch.zeros(height, len(x), channels + 3, dtype=torch.float64)
        step = min(SUM // columns.count, LOGITS // (group * self.places * columns.count), self.images.n) or 1
        buffer = torch.empty(2, group * (2 * self.places - 1) * step * columns.count)
        for part in blocks(self.images.n, step):
            training = self._training(part, columns)
            for some, q in zip(blocks(len(x), group), queries, strict=True):
                self._add(q, training, top[:, some], sums[:, some], buffer)
        z, total, square, norm = sums.split([1, channels, 1, 1], 2)
        mean = total / z
        trace = (square / z - mean.square().sum(2, True)).clamp_min(0)
        size = x.square().sum(2).unfold(1, k, 1)[:, 1:].sum(2).mT[..., None]  # |x|² of the patch at every row
        alpha, var, d = alpha[:, None], var[:, None], channels * k**2
        own = alpha.square() * norm / z / var  # α²|y|²/2σ²
        product = (top[..., None].double() / LOG2E + own).abs()  # (α/σ²) x·y of the heaviest point
        delta = 2.0**-24 * ((2 * size * own / var / d).sqrt() + (math.sqrt(d) + 4) / 8 * (product + own))
        error = (4 * delta * (trace / z).sqrt()).masked_fill(delta > UNKNOWN, torch.inf)
        shape = (height, -1, columns.count)
        return mean.reshape(*shape, channels).permute(1, 3, 0, 2), error.reshape(shape).transpose(0, 1)

    def _segments(self, images: Tensor, columns: Span) -> Tensor:
        """Return the rows of pixels around some columns, ``(B · count, H + k, C k)``; the patch around the row r has
        the rows r + 1 … r + k, and the row 0 is empty."""
        half, width = self.k // 2, images.shape[3]
        if self.circular:
            images = torch.nn.functional.pad(images, (half,) * 4, mode="circular")
            images = torch.nn.functional.pad(images, (0, 0, 1, 0))
        else:
            left, right = columns.start - half, columns.start + columns.count + half
            images = images[..., max(left, 0) : min(right, width)]
            images = torch.nn.functional.pad(images, (max(-left, 0), max(right - width, 0), half + 1, half))
        return images.unfold(3, self.k, 1).permute(0, 3, 2, 1, 4).flatten(3).flatten(0, 1)

    def _training(self, part: slice, columns: Span) -> Training:
        """Return the patches around some columns of some images."""
        y = self.images.rows(part.start, part.stop).double().reshape(-1, *self.image) - self.zero
        log_w = self.images.weights[part].log().clamp_min(LIGHT) * LOG2E
        return Training(self._segments(y.float(), columns), log_w.float().repeat_interleave(columns.count), self.k)

    def _add(self, x: Queries, y: Training, top: Tensor, sums: Tensor, buffer: Tensor) -> None:
        """Add the patches y to the averages of the queries x, row by row."""
        width = len(y.log_w)
        shape = len(x.rows), (2 * self.places - 1) * width  # diagonals r' - r, from 1 - places on
        logits = buffer[0, : shape[0] * shape[1]].reshape(shape)

        def of(diagonals: range) -> Tensor:
            return logits[:, (diagonals.start + self.places - 1) * width : (diagonals.stop + self.places - 1) * width]

        before = range(0)
        for span in self.rows:
            for row in range(span.start, span.start + span.count):
                now = range(span.start - row, span.start - row + span.count)
                same = range(max(now.start, before.start), min(now.stop, before.stop))
                for diagonal in now:
                    if diagonal not in same:
                        out = torch.mm(x.patch(row), y.patch(row + diagonal).mT, out=of(range(diagonal, diagonal + 1)))
                        out.addmm_(x.rest, y.rest[row + diagonal])
                if same:
                    change = y.change[row + same.start : row + same.stop].flatten(0, 1)
                    of(same).addmm_(x.change[row], change.mT)
                values = y.values[:, row + now.start : row + now.stop]
                _merge(of(now), values, top[row], sums[row], buffer[1])
                before = now


class Rows:
    """Rows of pixels of patches, ``(M, H + k, k C)``."""

    def __init__(self, rows: Tensor, k: int) -> None:
        self.rows, self.k, self.height = rows, k, rows.shape[1] - k

    def patch(self, row: int) -> Tensor:
        """Return the patches around a row, ``(M, k² C)``."""
        return self.rows[:, row + 1 : row + 1 + self.k].flatten(1)

    def differences(self, sign: float, half: Tensor) -> Tensor:
        """Return what distinguishes the patches around each row from those around the row before."""
        new, old = self.rows[:, self.k :], sign * self.rows[:, : self.height]
        return torch.cat([new.transpose(0, 1), old.transpose(0, 1), half[..., None]], 2)


class Queries(Rows):
    """Queries times α/σ²; ``slope (M, 1)`` is α²/σ²."""

    def __init__(self, rows: Tensor, slope: Tensor, k: int) -> None:
        super().__init__(rows, k)
        self.rest = torch.cat([-slope, torch.ones_like(slope)], 1)
        self.change = self.differences(-1, -slope[:, 0].expand(self.height, -1))


class Training(Rows):
    """Training patches, their |y|²/2 and the values whose averages are required: 1, v, |v|² and |y|²/2."""

    def __init__(self, rows: Tensor, log_w: Tensor, k: int) -> None:
        super().__init__(rows, k)
        self.log_w = log_w
        half = rows.square().sum(2).unfold(1, k, 1)[:, 1:].sum(2).mT / 2  # (H, N)
        self.rest = torch.stack([half, log_w.expand_as(half)], 1)
        self.change = self.differences(1, torch.diff(half, dim=0, prepend=half[:1]))
        middle = rows[:, 1 + k // 2 : 1 + k // 2 + self.height, k // 2 :: k].permute(2, 1, 0)  # (C, H, N)
        self.values = torch.cat([torch.ones_like(half)[None], middle, middle.square().sum(0)[None], half[None]])


def _merge(logits: Tensor, values: Tensor, top: Tensor, sums: Tensor, buffer: Tensor) -> None:
    """Add points with ``logits (M, R N)``, in powers of 2, and ``values (V, R, N)`` to the sums of M queries."""
    high = logits.amax(1)
    new = torch.maximum(top, high)
    heavy = high > new - NEGLIGIBLE
    few = int(heavy.sum()) < FEW * len(high)
    live = heavy.nonzero().flatten() if few else slice(None)
    logits = logits[live] if few else logits
    shift = new[live]
    e = torch.sub(logits, shift[:, None], out=buffer[: logits.numel()].reshape(logits.shape))
    e = e.clamp_min_(LEAST).exp2_().reshape(-1, *values.shape[1:])
    found = torch.bmm(e.transpose(0, 1), values.permute(1, 2, 0)).sum(0, dtype=sums.dtype)  # long float32 sums drift
    sums[live] = sums[live] * (top[live] - shift).exp2()[:, None] + found
    top.copy_(new)
