r"""Averages over the patches of all places on a CPU: logits of neighbouring rows differ by one row of pixels.

The logit of the patch around row r of a query with the patch around row r' of a training image is a sum over rows of
pixels. With the columns fixed and a zero point :math:`o` of all pixels,

.. math:: l_{rr'} = \frac{\alpha}{\sigma^2} \sum_{|\delta| \le k/2} g_{r+\delta,\, r'+\delta} - \frac{\alpha^2}
   {2\sigma^2} |y_{r'} - o|^2 + \log w, \qquad g_{ss'} = (x_s - \alpha o) \cdot (y_{s'} - o),

and the next one on the diagonal needs two rows of pixels, whatever k is: :math:`l_{r+1,r'+1} = l_{rr'} +
\frac{\alpha}{\sigma^2} (g_{r+1+k/2,\, r'+1+k/2} - g_{r-k/2,\, r'-k/2}) - \dots`. One float32 product with an inner
length of 2kC + 1 adds this to the logits of all columns, images and diagonals :math:`r' - r` in a block, in place;
only where a diagonal begins are all k²C + 2 numbers multiplied. Pixels outside of an image are zero points, so that
places near the upper and lower borders are on the main diagonal, and those near the other borders are evaluated in the
transposed images. (Places near two borders are compared with themselves alone, as in :class:`~vkernel.theories.Local`.)
A block is small enough for the cache; its largest logit :math:`L`, :math:`z = \sum e^{l - L}` and the sums of values
are merged with those of other blocks.

**Error.** The error of a logit is about :math:`\delta = 2^{-24} \big(\frac{\alpha}{\sigma^2} |x - \alpha o|\, |y - o| /
\sqrt d + \frac{\sqrt d + 8}{16} (\frac{\alpha}{\sigma^2} |(x - \alpha o) \cdot (y - o)| + \frac{\alpha^2}{2\sigma^2}
|y - o|^2) \big)`, which moves the mean by at most :math:`\delta \sqrt{\max r \operatorname{tr} \mathrm{Cov}(v|x)}`, as
in :mod:`vkernel.theories.streamed`; four of these are returned with the mean."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vkernel.posterior import Points
from vkernel.posterior.weights import LIGHT, blocks
from vkernel.theories.patches import Span

LOG2E = 1 / math.log(2)
QUERIES, LOGITS = 256, 1 << 20  # at once: what a processor's cache holds
LEAST = -100.0  # the smallest exponent of 2 that is evaluated: denormal numbers are slow
FEW = 0.7  # of the rows of a block: then the others are copied
SUM = 512  # numbers in a float32 sum
UNKNOWN = 0.25  # the error of a logit from which on the weights, and the error that follows from them, are unknown
NEGLIGIBLE = 60.0  # rows of a block that lie so many powers of 2 below their largest logit are left out


class Blocked:
    """Averages over k×k patches of images ``(C, H, W)``: for the columns that are of one class, in all rows; ``turned``
    for the rows that are of one class, in all other columns."""

    def __init__(self, images: Points, image: tuple[int, int, int], k: int, borders: str, turned: bool = False) -> None:
        self.images, self.image, self.k, self.circular, self.turned = images, image, k, borders == "circular", turned
        self.zero = float(images.center.mean())
        sizes = image[:0:-1] if turned else image[1:]
        whole = [[Span(0, size, 0, 0)] if self.circular else Span.of(size, k // 2) for size in sizes]
        self.rows, self.columns = whole[0], max(whole[1], key=lambda span: span.count)
        self.places = 1 if turned else max(span.count for span in self.rows)

    def __call__(self, x: Tensor, alpha: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean of ``x (B, C, H, W)`` and the error ``(B, H, W)`` that it may have; NaN for other pixels."""
        turned = x.mT if self.turned else x
        mean, error = torch.full_like(turned, torch.nan), torch.full_like(turned[:, 0], torch.nan)
        columns = slice(self.columns.start, self.columns.start + self.columns.count)
        found = self._mean(turned - alpha[:, None, None, None] * self.zero, alpha, var)
        for span in self.rows if not self.turned else (span for span in self.rows if span.count == 1):
            rows = slice(span.start, span.start + span.count)
            mean[:, :, rows, columns] = found[0][:, :, rows]
            error[:, rows, columns] = found[1][:, rows].nan_to_num(torch.inf, torch.inf)  # NaN: no weight was left
        return (mean.mT, error.mT) if self.turned else (mean, error)

    def _mean(self, x: Tensor, alpha: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean ``(B, C, H, count)`` and error of the columns."""
        x, k, count, channels = self._segments(x), self.k, self.columns.count, self.image[0]
        alpha, var = alpha.repeat(count), var.repeat(count)
        gain, slope = LOG2E * alpha / var, LOG2E * alpha.square() / var
        total, height = len(x), x.shape[1] - k
        group = -(-total // -(-total // QUERIES))
        parts = list(blocks(total, group))
        queries = [Queries((x[q] * gain[q, None, None]).float(), slope[q].float(), k) for q in parts]
        top = torch.full((height, total), -torch.inf)
        sums = torch.zeros(height, total, channels + 3, dtype=torch.float64)
        step = min(SUM // count, LOGITS // (group * self.places * count), self.images.n) or 1
        buffer = torch.empty(2, group * (2 * self.places - 1) * step * count)
        for some in blocks(self.images.n, step):
            y = self.images.rows(some.start, some.stop).double().reshape(-1, *self.image) - self.zero
            log_w = (self.images.weights[some].log().clamp_min(LIGHT) * LOG2E).repeat(count)
            training = Training(self._segments(y.mT.float() if self.turned else y.float()), log_w.float(), k)
            for q, part in zip(queries, parts, strict=True):
                self._add(q, training, top[:, part], sums[:, part], buffer)
        z, values, square, norm = sums.split([1, channels, 1, 1], 2)
        mean = values / z
        trace = (square / z - mean.square().sum(2, True)).clamp_min(0)
        size = x.square().sum(2).unfold(1, k, 1)[:, 1:].sum(2).mT[..., None]  # |x|² of the patch around every row
        alpha, var, d = alpha[:, None], var[:, None], channels * k**2
        own = alpha.square() * norm / z / var  # α²|y|²/2σ²
        product = (top[..., None].double() / LOG2E + own).abs()  # (α/σ²) x·y of the heaviest point
        scale = (2 * size * own / var / d).sqrt() + (math.sqrt(d) + 8) / 16 * (product + own)
        if k > 1:  # a diagonal carries the errors of its earlier rows, whose heavy points are near the query
            near = size / var * (1 / math.sqrt(d) + 1.5 * (math.sqrt(d) + 8) / 16)
            scale = torch.maximum(scale.nan_to_num(0.0, 0.0), near).cummax(0).values
        delta = 2.0**-24 * scale
        error = (4 * delta * (trace / z).sqrt()).masked_fill(delta > UNKNOWN, torch.inf)
        mean, error = (a.reshape(height, count, -1, a.shape[2]) for a in (mean + self.zero, error))
        return mean.permute(2, 3, 0, 1), error[..., 0].permute(2, 0, 1)

    def _segments(self, images: Tensor) -> Tensor:
        """Return the rows of pixels around the columns, ``(count · B, H + k, C k)``; the patch around the row r has the
        rows r + 1 … r + k, and the row 0 is empty."""
        half = self.k // 2
        wide = torch.nn.functional.pad(images, (half,) * 4, mode="circular" if self.circular else "constant")
        wide = torch.nn.functional.pad(wide, (0, 0, 1, 0)).unfold(3, self.k, 1).permute(3, 0, 2, 1, 4)
        return wide[self.columns.start : self.columns.start + self.columns.count].flatten(3).flatten(0, 1)

    def _add(self, x: Queries, y: Training, top: Tensor, sums: Tensor, buffer: Tensor) -> None:
        """Add the patches y to the averages of the queries x, row by row."""
        width = len(y.rows)
        shape = len(x.rows), (2 * self.places - 1) * width  # diagonals r' - r, from 1 - places on
        logits = buffer[0, : math.prod(shape)].reshape(shape)

        def of(diagonals: range) -> Tensor:
            first, last = ((d + self.places - 1) * width for d in (diagonals.start, diagonals.stop))
            return logits[:, first:last]

        before = range(0)
        for span in self.rows:
            left_out = self.turned and span.count > 1
            for row in range(span.start, span.start + span.count):
                now = range(1) if left_out else range(span.start - row, span.start - row + span.count)
                kept = range(max(now.start, before.start), min(now.stop, before.stop))
                same = kept if self.k > 1 else range(0)  # a single row of pixels is no longer than a difference
                for diagonal in now:
                    if diagonal not in same:
                        out = of(range(diagonal, diagonal + 1))
                        torch.mm(x.patch(row), y.patch(row + diagonal).mT, out=out)
                        out.addmm_(x.rest, y.rest[row + diagonal])
                if same:
                    change = y.change[row + same.start : row + same.stop].flatten(0, 1)
                    of(same).addmm_(x.change[row], change.mT)
                if not left_out:
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
    """Queries times α/σ²; ``slope (M,)`` is α²/σ²."""

    def __init__(self, rows: Tensor, slope: Tensor, k: int) -> None:
        super().__init__(rows, k)
        self.rest = torch.stack([-slope, torch.ones_like(slope)], 1)
        self.change = self.differences(-1, -slope.expand(self.height, -1))


class Training(Rows):
    """Training patches, their |y|²/2 and log weights, and the values to be averaged: 1, v, |v|² and |y|²/2."""

    def __init__(self, rows: Tensor, log_w: Tensor, k: int) -> None:
        super().__init__(rows, k)
        half = rows.square().sum(2).unfold(1, k, 1)[:, 1:].sum(2).mT / 2  # (H, M)
        self.rest = torch.stack([half, log_w.expand_as(half)], 1)
        self.change = self.differences(1, torch.diff(half, dim=0, prepend=half[:1]))
        middle = rows[:, 1 + k // 2 : 1 + k // 2 + self.height, k // 2 :: k].permute(2, 1, 0)  # (C, H, M)
        self.values = torch.cat([torch.ones_like(half)[None], middle, middle.square().sum(0)[None], half[None]])


def _merge(logits: Tensor, values: Tensor, top: Tensor, sums: Tensor, buffer: Tensor) -> None:
    """Add points with ``logits (M, R N)``, in powers of 2, and ``values (V, R, N)`` to the sums of M queries."""
    high = logits.amax(1)
    new = torch.maximum(top, high)
    sums *= (top - new).exp2()[:, None]
    top.copy_(new)
    heavy = high > new - NEGLIGIBLE
    few = int(heavy.sum()) < FEW * len(heavy)
    live = heavy.nonzero().flatten() if few else slice(None)
    logits = logits[live]
    e = torch.sub(logits, new[live, None], out=buffer[: logits.numel()].reshape(logits.shape))
    e = e.clamp_min_(LEAST).exp2_().unflatten(1, values.shape[1:]).transpose(0, 1)
    sums[live] += torch.bmm(e, values.permute(1, 2, 0)).sum(0)  # one long float32 sum is inaccurate
