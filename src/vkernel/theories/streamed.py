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
:math:`E|y_i - o|^2`. Queries for which four of these exceed a tolerance are evaluated again in float64."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,import-not-found,import-untyped,untyped-decorator"

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from vkernel.data import Empirical
from vkernel.posterior.weights import LIGHT
from vkernel.theories.base import Average
from vkernel.theories.patches import Patches

MIDDLE, TOP = 128, 1024.0  # the stored byte that is 0; the largest number of a query, far from fp16's smallest
CHUNK = 1 << 29  # fp16 numbers of patches at once
PROGRAMS, LEAST = 528, 4096  # programs that fill a GPU; points for each
LOG2E = 1 / math.log(2)
LOGITS = 1 << 27  # in float64, at once
CHANNELS = 4  # at most


@triton.jit
def _kernel(q_high, q_low, y_high, y_low, half, log_w, value, gain, slope, out, B, N, share,
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
    k = tl.arange(0, BK)
    for start in range(first, last, BN):
        col = start + tl.arange(0, BN)
        inside = col < last
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
        logit = tl.where(inside[None, :], logit, -1e30)
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
    """The average of the middle pixels of all patches of one class of places."""

    def __init__(self, patches: Patches) -> None:
        self.patches, data = patches, patches.images
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
        step = max(1, CHUNK // (self.patches.places * self.width))
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
        """Return the mean of the middle pixels for queries ``x (B, d)``, ``(B, C)`` in float64."""
        x = (x - alpha[:, None] * self.zero) / self.step
        mean, error = self._fast(x, alpha, var / self.step**2)
        rest = (error * self.step > tolerance).nonzero().flatten()
        if len(rest):
            mean[rest] = self._float64(x[rest], alpha[rest], var[rest] / self.step**2)
        return mean * self.step + self.zero

    def _float64(self, x: Tensor, alpha: Tensor, var: Tensor) -> Tensor:
        found, first = Average(), 0
        for part in self._cut():
            for y in part.split(max(1, LOGITS // len(x))):
                wide = y.double()
                logit = (x * (alpha / var)[:, None]) @ wide.mT
                logit -= (alpha.square() / (2 * var))[:, None] * wide.square().sum(1)
                logit += self.patches.weights[first : first + len(y)].log().clamp_min(LIGHT)
                found.add(logit[..., None], wide[:, self.patches.middle])
                first += len(y)
        return found.value

    def _fast(self, x: Tensor, alpha: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and the error that it may have."""
        count, d, channels = len(x), self.patches.d, self.patches.image[0]
        largest = x.abs().amax(1).clamp_min(1e-300)
        q_high = (x * (TOP / largest)[:, None]).half()
        q_low = self._padded((x * (TOP / largest)[:, None]) - q_high.double())
        q_high = self._padded(q_high)
        gain, slope = (alpha / var * largest / TOP * LOG2E).float(), (alpha.square() / var * LOG2E).float()
        small, split = self.width <= 64 or count <= 64, self.bytes is None
        blocks = {"BM": 64, "BN": 128} if small else {"BM": 128, "BN": 128 if split else 256}
        done, first = torch.empty(0, 4 + channels, count, device=x.device), 0
        for cut in self._cut():
            high = self._padded(cut)
            low = self._padded(cut - cut.half().double()) if split else high
            half = (cut if split else cut.float()).square().sum(1).float() / 2
            share = max(LEAST, len(cut) * -(-count // blocks["BM"]) // PROGRAMS)
            share = blocks["BN"] * -(-share // blocks["BN"])
            out = torch.empty(-(-len(cut) // share), 4 + channels, count, device=x.device)
            weights = self.patches.weights[first : first + len(cut)]
            log_w = weights.log().clamp_min(LIGHT).float() * LOG2E if self.weighted else half
            value = cut[:, self.patches.middle].float().mT.contiguous()
            _kernel[(-(-count // blocks["BM"]), len(out))](
                q_high, q_low, high, low, half, log_w, value, gain, slope, out, count, len(cut), share,
                K=self.width, C=channels, SPLIT=split, WEIGHTED=self.weighted, BK=64 if self.width % 64 == 0 else 32,
                **blocks, num_warps=4 if small else 8, num_stages=3,
            )  # fmt: skip
            done, first = _merged(torch.cat([done, out]))[None], first + len(cut)
        top, z, square, norm, *sums = done[0].double()
        mean = torch.stack(sums, 1) / z[:, None]
        trace, norm = (square / z - mean.square().sum(1)).clamp_min(0), (2 * norm / z).sqrt()
        along = (top / LOG2E * var + (alpha * norm).square() / 2).abs()  # α x·y of the heaviest point
        delta = 2.0**-22 / var * (alpha * x.norm(dim=1) * norm / math.sqrt(d) + math.sqrt(d) / 64 * along)
        return mean, 4 * delta * (trace / z).sqrt()

    def _padded(self, rows: Tensor) -> Tensor:
        """Return ``rows (N, d)`` in fp16, with zeros up to the width."""
        out = torch.zeros(len(rows), self.width, dtype=torch.float16, device=rows.device)
        out[:, : rows.shape[1]] = rows
        return out


def _merged(parts: Tensor) -> Tensor:
    """Merge the sums of parts of the points, ``(parts, 4 + C, B)``, to ``(4 + C, B)``."""
    top = parts[:, 0].amax(0)
    total = (parts[:, 1:] * torch.exp2(parts[:, :1] - top)).sum(0)
    return torch.cat([top[None], total])
