r"""Averages over patches on a GPU: logits are made in tiles by tensor cores, and used at once.

For queries x and points y, written in units of a step :math:`h` from a zero point :math:`o` of all pixels,

.. math:: l_i - l_0 = \frac{\alpha}{\sigma^2} (x - \alpha o) \cdot (y_i - o) - \frac{\alpha^2}{2\sigma^2} |y_i - o|^2 +
   \log w_i, \qquad l_0 = -\frac{|x - \alpha o|^2}{2\sigma^2} .

A query is the sum of two fp16 numbers, 22 bits together. Stored bytes less 128 are exact in fp16, with h the step of
one grey value; other data are sums of two fp16 numbers as well, and the product of the two small parts is left out. The
products are summed in float32. Per tile a kernel keeps, for each query, the largest logit so far, :math:`z = \sum
e^{l_i - L}`, :math:`\sum e^{l_i - L} v_i` and :math:`\sum e^{l_i - L} |v_i|^2` of the middle pixels v; no logit is
stored (as in FlashAttention, Dao et al. 2022). Parts of the points are merged as everywhere.

**Error.** The error of a logit is about :math:`\delta = 2^{-22} \frac{\alpha}{\sigma^2} \big(|x - \alpha o|\, |y_i - o|
/ \sqrt d + \sqrt d\, |(x - \alpha o) \cdot (y_i - o)| / 64\big)`, independent between points: the first term rounds
queries, the second sums. The mean is then off by :math:`\sum_i r_i \epsilon_i (v_i - m)`, of standard deviation at most
:math:`\delta \sqrt{\max r \operatorname{tr} \mathrm{Cov}(v|x)}` with :math:`\max r = 1/z` and the posterior's own
:math:`E|y_i - o|^2`. Where four of these exceed the tolerance by a factor :math:`\rho`, the shares of the points whose
largest weight is above :math:`\max r / 2\rho^2` are evaluated again in float64; the others have an error within the
tolerance. Where :math:`\delta` itself is large, at very low noise, weights are unknown, and all shares whose largest
logit could be within 45 powers of 2 of the largest are evaluated again; so they are if the tolerance is 0."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,import-not-found,import-untyped,untyped-decorator"

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vkernel.data import Empirical
from vkernel.posterior.weights import LIGHT, blocks
from vkernel.theories.patches import Patches

MIDDLE, TOP = 128, 1024.0  # the stored byte that is 0; the largest number of a query, far from fp16's smallest
CHUNK = 1 << 29  # fp16 numbers of patches at once, if the memory allows
PROGRAMS, LEAST, SHARE = 528, 4096, 1 << 16  # programs that fill a GPU; points for each, at least and at most
LOG2E = 1 / math.log(2)
LOGITS, SUMS = 1 << 27, 1 << 29  # in float64, and sums over shares, at once, if the memory allows
BYTES = 32  # for each of these numbers, intermediate results included
CHANNELS = 4  # at most
ROUGH = 0.5  # the error of logits from which on weights are unknown
ERRORS, REST = 12.0, 45.0  # errors between two logits, and powers of 2, beyond which a point has no weight


@triton.jit
def _logits(q_high, q_low, y_high, y_low, half, log_w, row, live, g, a, col, inside,
            K: tl.constexpr, SPLIT: tl.constexpr, WEIGHTED: tl.constexpr,
            BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Return the logits of one tile in units of log 2, ``(BM, BN)``, and half the squared norms of its points."""
    k = tl.arange(0, BK)
    product = tl.zeros([BM, BN], tl.float32)
    for at in range(0, K, BK):
        there = col[:, None].to(tl.int64) * K + (at + k)[None, :]
        here = row[:, None].to(tl.int64) * K + (at + k)[None, :]
        y = tl.load(y_high + there, mask=inside[:, None], other=0.0)
        q = tl.load(q_high + here, mask=live[:, None], other=0.0)
        product = tl.dot(q, tl.trans(y), product)
        if SPLIT:
            rest = tl.load(y_low + there, mask=inside[:, None], other=0.0)
            product = tl.dot(q, tl.trans(rest), product)
        q = tl.load(q_low + here, mask=live[:, None], other=0.0)
        product = tl.dot(q, tl.trans(y), product)
    h = tl.load(half + col, mask=inside, other=0.0)
    logit = product * g[:, None] - a[:, None] * h[None, :]
    if WEIGHTED:
        logit += tl.load(log_w + col, mask=inside, other=0.0)[None, :]
    return tl.where(inside[None, :], logit, -1e30), h


@triton.jit
def _average(q_high, q_low, y_high, y_low, half, log_w, gain, slope, value, out, B, N, share,
             K: tl.constexpr, C: tl.constexpr, SPLIT: tl.constexpr, WEIGHTED: tl.constexpr,
             BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """One block of queries with one share of the points: write (largest logit, z, Σ |v|², Σ |y|²/2, Σ v) of each."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    live = row < B
    g = tl.load(gain + row, mask=live, other=0.0)
    a = tl.load(slope + row, mask=live, other=0.0)
    top = tl.full([BM], -1e30, tl.float32)
    z = tl.zeros([BM], tl.float32)
    square = tl.zeros([BM], tl.float32)
    norm = tl.zeros([BM], tl.float32)
    u0 = tl.zeros([BM], tl.float32)
    u1 = tl.zeros([BM], tl.float32)
    u2 = tl.zeros([BM], tl.float32)
    u3 = tl.zeros([BM], tl.float32)
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, N)
    for start in range(first, last, BN):
        col = start + tl.arange(0, BN)
        inside = col < last
        logit, h = _logits(q_high, q_low, y_high, y_low, half, log_w, row, live, g, a, col, inside,
                           K, SPLIT, WEIGHTED, BM, BN, BK)  # fmt: skip
        new = tl.maximum(top, tl.max(logit, 1))
        e = tl.exp2(logit - new[:, None])
        old = tl.exp2(top - new)
        top = new
        z = z * old + tl.sum(e, 1)
        norm = norm * old + tl.sum(e * h[None, :], 1)
        v = tl.load(value + col, mask=inside, other=0.0)
        size = v * v
        u0 = u0 * old + tl.sum(e * v[None, :], 1)
        if C > 1:
            v = tl.load(value + N + col, mask=inside, other=0.0)
            size += v * v
            u1 = u1 * old + tl.sum(e * v[None, :], 1)
        if C > 2:
            v = tl.load(value + 2 * N + col, mask=inside, other=0.0)
            size += v * v
            u2 = u2 * old + tl.sum(e * v[None, :], 1)
        if C > 3:
            v = tl.load(value + 3 * N + col, mask=inside, other=0.0)
            size += v * v
            u3 = u3 * old + tl.sum(e * v[None, :], 1)
        square = square * old + tl.sum(e * size[None, :], 1)
    to = out + (tl.program_id(1) * (4 + C)).to(tl.int64) * B + row
    tl.store(to, top, mask=live)
    tl.store(to + B, z, mask=live)
    tl.store(to + 2 * B, square, mask=live)
    tl.store(to + 3 * B, norm, mask=live)
    tl.store(to + 4 * B, u0, mask=live)
    if C > 1:
        tl.store(to + 5 * B, u1, mask=live)
    if C > 2:
        tl.store(to + 6 * B, u2, mask=live)
    if C > 3:
        tl.store(to + 7 * B, u3, mask=live)


class Streamed:
    """The average of the middle pixels of all patches of one class of places, within about ``memory`` bytes."""

    def __init__(self, patches: Patches, memory: int) -> None:
        self.patches, data = patches, patches.images
        self.chunk, self.logits, self.sums = (min(most, memory // BYTES) for most in (CHUNK, LOGITS, SUMS))
        self.width = 32 * -(-patches.d // 32) if patches.d <= 64 else 64 * -(-patches.d // 64)
        self.weighted = bool((data.weights != data.weights[0]).any())
        self.bytes = data.storage if isinstance(data, Empirical) and data.stored == "uint8" else None
        if self.bytes is not None and isinstance(data, Empirical):
            low, high = data.scale or (0.0, 255.0)
            self.step = (high - low) / 255
            self.zero = low + MIDDLE * self.step
        else:
            self.zero = float(data.center.mean())
            far = max(float((y - self.zero).abs().max()) for y in self._images())
            self.step = max(far, 1e-30) / TOP

    def _images(self) -> Iterator[Tensor]:
        """Yield parts of the images, ``(k, C, H, W)``: bytes as they are stored, or values."""
        data, (channels, height, width) = self.patches.images, self.patches.image
        step = max(1, self.chunk // (self.patches.places * self.width))
        for start in range(0, data.n, step):
            stop = min(start + step, data.n)
            rows = data.rows(start, stop) if self.bytes is None else self.bytes[start:stop]
            yield rows.reshape(-1, channels, height, width)

    def _cut(self) -> Iterator[Tensor]:
        """Yield parts of the patches in steps from the zero point, ``(N, d)``: whole numbers in fp16, or float64."""
        for images in self._images():
            exact = self.bytes is not None
            yield self.patches.windows(images.half() - MIDDLE if exact else (images.double() - self.zero) / self.step)

    def __call__(self, x: Tensor, alpha: Tensor, var: Tensor, tolerance: float) -> Tensor:
        """Return the mean of the middle pixels for queries ``x (B, d)``, ``(B, C)`` in float64, with errors within the
        ``tolerance``."""
        x, var = (x - alpha[:, None] * self.zero) / self.step, var / self.step**2
        found = []
        for some in blocks(len(x), self.sums * SHARE // (8 * self.patches.n)):
            queries = SplitQueries.of(x[some], alpha[some], var[some], self.width)
            found.append(self._mean(queries, tolerance / self.step))
        return torch.cat(found, 1).mT * self.step + self.zero

    def _mean(self, q: SplitQueries, tolerance: float) -> Tensor:
        """Return the mean, ``(C, B)``, with shares of the points in float64 where that is needed."""
        share, tile = self._tile(len(q.x))
        shares = self._sums(q, share, tile)
        sums = merged(shares)
        delta, error = self._error(q, sums)
        mean, excess, rough = sums[4:] / sums[1], error / tolerance, (delta > ROUGH) | (tolerance == 0)
        margin = torch.where(rough, ERRORS * LOG2E * delta + REST, 2 * excess.log2() + 1)
        coarse = (rough | (excess > 1)).nonzero().flatten()
        if len(coarse):
            mean[:, coarse] = self._refined(q[coarse], shares[:, :, coarse], margin[coarse], share)
        return mean

    def _error(self, q: SplitQueries, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Return the error of logits, and four standard deviations of the error of the mean, ``(B,)``."""
        top, z, square, norm = sums[:4]
        trace, norm = (square / z - (sums[4:] / z).square().sum(0)).clamp_min(0), (2 * norm / z).sqrt()
        along = (top / LOG2E * q.var + (q.alpha * norm).square() / 2).abs()  # α x·y of the heaviest point
        d = self.patches.d
        delta = 2.0**-22 / q.var * (q.alpha * q.x.norm(dim=1) * norm / math.sqrt(d) + math.sqrt(d) / 64 * along)
        return delta, 4 * delta * (trace / z).sqrt()

    def _parts(self) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
        """Yield parts of the patches, ``(N, d)``, and as a kernel reads them: two fp16 parts, norms, weights."""
        first, split = 0, self.bytes is None
        for cut in self._cut():
            high = padded(cut, self.width)
            low = padded(cut - cut.half().double(), self.width) if split else high
            half = (cut if split else cut.float()).square().sum(1).float() / 2
            log_w = self._log_weights(first, len(cut)).float() * LOG2E if self.weighted else half
            yield cut, (high, low, half, log_w)
            first += len(cut)

    def _log_weights(self, first: int, count: int) -> Tensor:
        return self.patches.weights[first : first + count].log().clamp_min(LIGHT)

    def _tile(self, queries: int) -> tuple[int, dict[str, Any]]:
        """Return the points of each program, and the constants of the kernel."""
        small, split = self.width <= 64 or queries <= 64, self.bytes is None
        tile = {"BM": 64, "BN": 128} if small else {"BM": 128, "BN": 128 if split else 256}
        share = self.patches.n * -(-queries // tile["BM"]) // PROGRAMS
        share = tile["BN"] * -(-min(max(LEAST, share), SHARE) // tile["BN"])
        constants = {"K": self.width, "SPLIT": split, "WEIGHTED": self.weighted, "num_stages": 3}
        constants |= {"BK": 64 if self.width % 64 == 0 else 32, "num_warps": 4 if small else 8}
        return share, constants | tile

    def _sums(self, q: SplitQueries, share: int, tile: dict[str, Any]) -> Tensor:
        """Return (largest logit, z, Σ |v|², Σ |y|²/2, Σ v) over each share of the points, ``(shares, 4 + C, B)``."""
        channels, count, found = self.patches.image[0], len(q.x), []
        for cut, points in self._parts():
            grid = -(-count // tile["BM"]), -(-len(cut) // share)
            out = torch.empty(grid[1], 4 + channels, count, device=q.x.device)
            value = cut[:, self.patches.middle].float().mT.contiguous()
            _average[grid](q.high, q.low, *points, q.gain, q.slope, value, out, count, len(cut), share,
                           C=channels, **tile)  # fmt: skip
            found.append(out)
        return torch.cat(found)

    def _refined(self, q: SplitQueries, shares: Tensor, margin: Tensor, share: int) -> Tensor:
        """Return the mean, ``(C, B)``, with the shares whose largest logit is within ``margin`` of all in float64."""
        heavy = shares[:, 0] > shares[:, 0].amax(0) - margin
        shares, at, first = torch.cat([shares[:, :2], shares[:, 4:]], 1).double(), 0, 0
        for cut in self._cut():
            for y in cut.split(share):
                which = heavy[at].nonzero().flatten()
                for some in which.split(max(1, self.logits // len(y))) if len(which) else ():
                    shares[at, :, some] = self._exact(q.x[some], q.alpha[some], q.var[some], y.double(), first)
                at, first = at + 1, first + len(y)
        sums = merged(shares)
        return sums[2:] / sums[1]

    def _exact(self, x: Tensor, alpha: Tensor, var: Tensor, y: Tensor, first: int) -> Tensor:
        """Return (largest logit, z, Σ v) over points ``y (N, d)``, of which the first is the patch ``first``."""
        logit = (x * (alpha / var)[:, None]) @ y.mT
        logit -= (alpha.square() / (2 * var))[:, None] * y.square().sum(1)
        logit += self._log_weights(first, len(y)) if self.weighted else 0.0
        top = logit.amax(1)
        e = (logit - top[:, None]).exp_()
        return torch.cat([(top * LOG2E)[None], e.sum(1)[None], (e @ y[:, self.patches.middle]).mT])


@dataclass(frozen=True)
class SplitQueries:
    """Queries in steps from the zero point, in float64 and as a kernel reads them: a sum of two fp16 numbers."""

    x: Tensor
    alpha: Tensor
    var: Tensor
    high: Tensor
    low: Tensor
    gain: Tensor  # of products in logits, in units of log 2
    slope: Tensor  # of half squared norms

    @classmethod
    def of(cls, x: Tensor, alpha: Tensor, var: Tensor, width: int) -> SplitQueries:
        largest = x.abs().amax(1).clamp_min(1e-300)
        scaled = x * (TOP / largest)[:, None]
        gain, slope = (alpha / var * largest / TOP * LOG2E).float(), (alpha.square() / var * LOG2E).float()
        return cls(x, alpha, var, padded(scaled, width), padded(scaled - scaled.half().double(), width), gain, slope)

    def __getitem__(self, rows: Tensor) -> SplitQueries:
        return SplitQueries(
            *(a[rows] for a in (self.x, self.alpha, self.var, self.high, self.low, self.gain, self.slope))
        )


def padded(rows: Tensor, width: int) -> Tensor:
    """Return ``rows (N, d)`` in fp16, with zeros up to the width."""
    out = torch.zeros(len(rows), width, dtype=torch.float16, device=rows.device)
    out[:, : rows.shape[1]] = rows
    return out


def merged(shares: Tensor) -> Tensor:
    """Merge sums over shares of the points, ``(shares, 2 + …, B)``, to ``(2 + …, B)`` in float64."""
    top = shares[:, 0].amax(0)
    total = (shares[:, 1:] * torch.exp2(shares[:, :1] - top)).sum(0)
    return torch.cat([top[None], total]).double()
