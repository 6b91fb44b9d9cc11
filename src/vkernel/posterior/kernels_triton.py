r"""The steps of :mod:`~vkernel.posterior.kernels_torch`, each in one kernel that reads its block once.

Blocks of logits are cut into tiles of ROWS queries × COLS points. A tile leaves one number for each of its queries (its
largest logit, a count, a sum), and the few numbers of a query are then reduced by torch: no atomics, so that equal
inputs give equal outputs, bit for bit.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,import-not-found,import-untyped,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vkernel.posterior.eighths import EIGHT, NUMBER, REST
from vkernel.posterior.kernels_torch import (
    FULL,
    LEAST,
    TINY,
    WIDE,
    Bound,
    Left,
    Light,
    Logits,
    Survey,
)
from vkernel.posterior.kernels_triton_lists import exact, mean, on, strike
from vkernel.posterior.pieces import Queries

__all__ = ["exact", "finish", "mean", "peaks", "score", "select", "split", "strike", "survey", "weights"]

ROWS, COLS = 4, 2048


@triton.jit
def _tile(planes, gain, slope, half, log_w, n, queries, columns, PLANES: tl.constexpr, WEIGHTED: tl.constexpr,
          ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """One tile of logits, -inf outside; its rows and columns."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    good = (row < queries)[:, None] & (col < n)[None, :]
    place = row.to(tl.int64)[:, None] * columns + col[None, :]
    raw = tl.load(planes + place, mask=good, other=0.0)
    for p in tl.static_range(1, PLANES):
        other = (row + p * queries).to(tl.int64)[:, None] * columns + col[None, :]
        raw += tl.load(planes + other, mask=good, other=0.0)
    good = good & (raw > -float("inf"))
    g = tl.load(gain + row, mask=row < queries, other=0.0)
    a = tl.load(slope + row, mask=row < queries, other=0.0)
    h = tl.load(half + col, mask=col < n, other=0.0)
    term = -a[:, None] * h[None, :]
    if WEIGHTED:
        term += tl.load(log_w + col, mask=col < n, other=0.0)[None, :]
    # fma by name: two kernels that see the same tile must see the same bits
    logit = tl.where(good, tl.fma(raw, tl.broadcast_to(g[:, None], (ROWS, COLS)), term), -float("inf"))
    return logit, row, col


@triton.jit
def _peaks(planes, gain, slope, half, log_w, n, queries, columns, first, second, tiles, PLANES: tl.constexpr,
           WEIGHTED: tl.constexpr, SECOND: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    logit, row, col = _tile(planes, gain, slope, half, log_w, n, queries, columns, PLANES, WEIGHTED, ROWS, COLS)
    to = row * tiles + tl.program_id(0)
    top = tl.max(logit, 1)
    tl.store(first + to, top, mask=row < queries)
    if SECOND:
        at = tl.min(tl.where(logit == top[:, None], col[None, :], 2147483647), 1)
        rest = tl.where(col[None, :] == at[:, None], -float("inf"), logit)
        tl.store(second + to, tl.max(rest, 1), mask=row < queries)


@triton.jit
def _count(planes, gain, slope, half, log_w, n, queries, columns, threshold, counts, tiles, PLANES: tl.constexpr,
           WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    logit, row, col = _tile(planes, gain, slope, half, log_w, n, queries, columns, PLANES, WEIGHTED, ROWS, COLS)
    least = tl.load(threshold + row, mask=row < queries, other=float("inf"))
    chosen = (logit >= least[:, None]) & (col < n)[None, :]
    tl.store(counts + row * tiles + tl.program_id(0), tl.sum(chosen.to(tl.int32), 1), mask=row < queries)


@triton.jit
def _list(planes, gain, slope, half, log_w, n, queries, columns, threshold, counts, starts, totals, index, tiles, cap,
          PLANES: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    fits = (row < queries) & (tl.load(totals + row, mask=row < queries, other=0) <= cap)
    here = tl.load(counts + row * tiles + tl.program_id(0), mask=fits, other=0)
    if tl.max(here, 0) > 0:  # most tiles hold nothing, and are not read again
        logit, row, col = _tile(planes, gain, slope, half, log_w, n, queries, columns, PLANES, WEIGHTED, ROWS, COLS)
        least = tl.load(threshold + row, mask=row < queries, other=float("inf"))
        chosen = (logit >= least[:, None]) & (col < n)[None, :] & fits[:, None]
        start = tl.load(starts + row * tiles + tl.program_id(0), mask=fits, other=0)
        slot = start[:, None] + tl.cumsum(chosen.to(tl.int32), 1) - 1
        to = index + row.to(tl.int64)[:, None] * cap + slot
        tl.store(to, tl.broadcast_to(col[None, :], (ROWS, COLS)), mask=chosen & (slot < cap))


@triton.jit
def _survey(planes, gain, slope, half, log_w, n, queries, columns, first, thresholds, counts, sums, tiles,
            LEAST: tl.constexpr, PLANES: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr,
            COLS: tl.constexpr):  # fmt: skip
    logit, row, col = _tile(planes, gain, slope, half, log_w, n, queries, columns, PLANES, WEIGHTED, ROWS, COLS)
    top = tl.load(first + row, mask=row < queries, other=0.0)
    e = tl.exp(logit - tl.maximum(top, LEAST)[:, None])
    narrow = tl.load(thresholds + row, mask=row < queries, other=float("inf"))
    wide = tl.load(thresholds + queries + row, mask=row < queries, other=float("inf"))
    inside = (col < n)[None, :]
    near = (logit >= narrow[:, None]) & inside
    both = tl.sum(near.to(tl.int32) + 65536 * ((logit >= wide[:, None]) & inside).to(tl.int32), 1)
    to, last = row * tiles + tl.program_id(0), queries * tiles
    tl.store(counts + to, both % 65536, mask=row < queries)
    tl.store(counts + last + to, both // 65536, mask=row < queries)
    tl.store(sums + to, tl.sum(tl.where(near, 0.0, e), 1), mask=row < queries)
    tl.store(sums + last + to, tl.sum(e, 1), mask=row < queries)
    tl.store(sums + 2 * last + to, tl.sum(e * e, 1), mask=row < queries)


@triton.jit
def _weights(planes, gain, slope, half, log_w, n, queries, columns, shift, out, tail, total, tiles, FULL: tl.constexpr,
             PARTS: tl.constexpr, NUMBER: tl.constexpr, REST: tl.constexpr, PLANES: tl.constexpr,
             WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    logit, row, col = _tile(planes, gain, slope, half, log_w, n, queries, columns, PLANES, WEIGHTED, ROWS, COLS)
    e = FULL * tl.exp(logit - tl.load(shift + row, mask=row < queries, other=0.0)[:, None])
    high = e.to(tl.float16)
    rest = e - high.to(tl.float32)
    inside = (row < queries)[:, None] & (col < columns)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * columns + col[None, :], high, mask=inside)
    if PARTS == 0:
        low = rest.to(tl.float16)
        tl.store(out + (row + queries).to(tl.int64)[:, None] * columns + col[None, :], low, mask=inside)
        e = high.to(tl.float32) + low.to(tl.float32)
    else:
        to = tail + row.to(tl.int64)[:, None] * (PARTS * columns) + col[None, :]
        tl.store(to, (rest * REST).to(tail.dtype.element_ty), mask=inside)
        if PARTS == 2:
            tl.store(to + columns, (high.to(tl.float32) * NUMBER).to(tail.dtype.element_ty), mask=inside)
    tl.store(total + row * tiles + tl.program_id(0), tl.sum(e, 1), mask=row < queries)


@triton.jit
def _finish(parts, others, center, scale, share, asked, heavy, few, out, queries, d, width, slices, more,
            SLICES: tl.constexpr, COORDINATES: tl.constexpr):  # fmt: skip
    q = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * COORDINATES + tl.arange(0, COORDINATES)
    if tl.load(asked + q):
        sums = tl.zeros((SLICES, COORDINATES), tl.float64)
        for s in range(0, slices, SLICES):
            k = s + tl.arange(0, SLICES)
            good = (k < slices)[:, None] & (col < d)[None, :]
            place = (k.to(tl.int64) * queries + q)[:, None] * width + col[None, :]
            sums += tl.load(parts + place, mask=good, other=0.0).to(tl.float64)
        for s in range(0, more, SLICES):
            k = s + tl.arange(0, SLICES)
            good = (k < more)[:, None] & (col < d)[None, :]
            place = (k.to(tl.int64) * queries + q)[:, None] * width + col[None, :]
            sums += tl.load(others + place, mask=good, other=0.0).to(tl.float64)
        mean = tl.load(center + col, mask=col < d, other=0.0) + tl.load(scale + q) * tl.sum(sums, 0)
        p = tl.load(share + q)
        mean = (1 - p) * tl.load(heavy + q * d + col, mask=col < d, other=0.0) + p * mean
        tl.store(out + q * d + col, mean, mask=col < d)
    else:
        tl.store(out + q * d + col, tl.load(few + q * d + col, mask=col < d, other=0.0), mask=col < d)


@triton.jit
def _split(x, alphas, variances, center, factors, gains, slopes, norms, deltas, d, width, queries, unit, a, b, c, e,
           PLANES: tl.constexpr, FULL: tl.constexpr, TINY: tl.constexpr, COORDINATES: tl.constexpr):  # fmt: skip
    q = tl.program_id(0).to(tl.int64)
    alpha = tl.load(alphas + q)
    var = tl.load(variances + q)
    square = tl.zeros((COORDINATES,), tl.float64)
    for k in range(0, d, COORDINATES):
        col = k + tl.arange(0, COORDINATES)
        gap = tl.load(x + q * d + col, mask=col < d, other=0.0) - alpha * tl.load(center + col, mask=col < d, other=0.0)
        square += gap * gap
    norm = tl.sqrt(tl.sum(square, 0))
    scale = tl.maximum(norm, TINY) / FULL
    rest = tl.zeros((COORDINATES,), tl.float64)
    for k in range(0, width, COORDINATES):
        col = k + tl.arange(0, COORDINATES)
        gap = tl.load(x + q * d + col, mask=col < d, other=0.0) - alpha * tl.load(center + col, mask=col < d, other=0.0)
        scaled = gap / scale
        high = scaled.to(tl.float16)
        left = scaled - high.to(tl.float64)
        low = left.to(tl.float16)
        if PLANES == 2:
            left -= low.to(tl.float64)
        rest += left * left
        tl.store(factors + q * width + col, high, mask=col < width)
        tl.store(factors + (q + queries) * width + col, low, mask=col < width)
    slope = alpha * alpha / var
    size = alpha / var * norm
    bound = a * (alpha / var * scale * tl.sqrt(tl.sum(rest, 0))) + b * size + c * slope + e
    tl.store(gains + q, (alpha / var * scale * unit).to(tl.float32))
    tl.store(slopes + q, slope.to(tl.float32))
    tl.store(norms + q, norm)
    tl.store(deltas + q, bound)


@triton.jit
def _score(x, alpha, var, mean, out, d, COORDINATES: tl.constexpr):
    q = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * COORDINATES + tl.arange(0, COORDINATES)
    m = tl.load(mean + q * d + col, mask=col < d, other=0.0)
    at = tl.load(x + q * d + col, mask=col < d, other=0.0)
    s = (tl.load(alpha + q) * m - at) / tl.load(var + q)
    tl.store(out + q * d + col, s.to(out.dtype.element_ty), mask=col < d)


def _block(logits: Logits) -> tuple[tuple[int, int], tuple[Any, ...], dict[str, Any]]:
    """Grid, first arguments and constants of a kernel over all tiles."""
    _, queries, columns = logits.planes.shape
    tiles = triton.cdiv(logits.n, COLS), triton.cdiv(queries, ROWS)
    log_w = logits.half if logits.log_w is None else logits.log_w
    first = (logits.planes, logits.gain, logits.slope, logits.half, log_w, logits.n, queries, columns)
    constants = {"PLANES": len(logits.planes), "WEIGHTED": logits.log_w is not None, "ROWS": ROWS, "COLS": COLS}
    return tiles, first, {**constants, "num_warps": 8}


def split(queries: Queries, center: Tensor, unit: float, width: int, bound: Bound) -> Left:
    x, count = queries.x.contiguous(), len(queries)
    factors = torch.empty((2, count, width), dtype=torch.float16, device=x.device)
    (norm, delta), (gain, slope) = x.new_empty((2, count)), x.new_empty((2, count), dtype=torch.float32)
    with on(x):
        _split[(count,)](
            x, queries.alpha.contiguous(), queries.var.contiguous(), center, factors, gain, slope, norm, delta,
            x.shape[1], width, count, unit, bound.rest, bound.size, bound.slope, bound.constant, PLANES=bound.planes,
            FULL=FULL, TINY=TINY, COORDINATES=1024, num_warps=4,
        )  # fmt: skip
    return Left(factors, gain, slope, norm, queries.alpha / queries.var * norm, delta)


def peaks(logits: Logits, second: bool) -> tuple[Tensor, Tensor]:
    grid, first, constants = _block(logits)
    found = logits.planes.new_full((2, logits.planes.shape[1], grid[0]), -torch.inf)
    with on(found):
        _peaks[grid](*first, found[0], found[1], grid[0], SECOND=second, **constants)
    if not second:
        return found[0].amax(1), found[1, :, 0]
    two = found.movedim(0, 1).flatten(1).topk(2, dim=1).values
    return two[:, 0], two[:, 1]


def survey(logits: Logits, first: Tensor, thresholds: Tensor) -> Survey:
    grid, arguments, constants = _block(logits)
    counts = torch.empty((2, len(first), grid[0]), dtype=torch.int32, device=first.device)
    sums = first.new_empty((3, len(first), grid[0]))
    with on(first):
        _survey[grid](
            *arguments, first.contiguous(), thresholds.contiguous(), counts, sums, grid[0], LEAST=LEAST, **constants
        )
    return Survey(counts, *sums.sum(2).unbind())


def select(logits: Logits, threshold: Tensor, cap: int, parts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    grid, first, constants = _block(logits)
    threshold = threshold.contiguous()
    index = torch.empty((len(threshold), cap), dtype=torch.int32, device=threshold.device)
    with on(index):
        if parts is None:
            parts = torch.empty((len(threshold), grid[0]), dtype=torch.int32, device=threshold.device)
            _count[grid](*first, threshold, parts, grid[0], **constants)
        through = parts.cumsum(1, dtype=torch.int32)
        total = through[:, -1].contiguous()
        # one row at a time: few tiles hold anything, and fewer hold something of four queries
        constants.update(ROWS=1, num_warps=4)
        _list[(grid[0], len(threshold))](
            *first, threshold, parts.contiguous(), through - parts, total, index, grid[0], cap, **constants
        )
    return total, index


def weights(logits: Logits, shift: Tensor, parts: int = 0) -> tuple[Tensor, Tensor | None, Tensor]:
    _, first, constants = _block(logits)
    _, queries, columns = logits.planes.shape
    grid = triton.cdiv(columns, COLS), triton.cdiv(queries, ROWS)
    out = torch.empty((1 if parts else 2, queries, columns), dtype=torch.float16, device=shift.device)
    tail = torch.empty((queries, parts * columns), dtype=EIGHT, device=shift.device) if parts else None
    total = logits.planes.new_empty((queries, grid[0]))
    with on(out):
        _weights[grid](
            *first, shift.contiguous(), out, out if tail is None else tail, total, grid[0], FULL=FULL, PARTS=parts,
            NUMBER=NUMBER, REST=REST, **constants,
        )  # fmt: skip
    return out, tail, total.to(WIDE).sum(1)


def finish(parts: list[Tensor], light: Light, heavy: Tensor, few: Tensor) -> Tensor:
    out = torch.empty_like(heavy)
    count, d = heavy.shape
    slices = [part.shape[0] * part.shape[1] // count for part in parts] + [0]
    with on(out):
        _finish[(count, triton.cdiv(d, 256))](
            parts[0], parts[-1], light.center, light.scale, light.share, light.asked, heavy, few, out, count, d,
            parts[0].shape[2], slices[0], slices[1], SLICES=8, COORDINATES=256, num_warps=4,
        )  # fmt: skip
    return out


def score(queries: Queries, mean: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(mean.shape, dtype=dtype, device=mean.device)
    d = mean.shape[1]
    with on(out):
        _score[(len(mean), triton.cdiv(d, 1024))](
            queries.x.contiguous(), queries.alpha.contiguous(), queries.var.contiguous(), mean, out, d,
            COORDINATES=1024, num_warps=4,
        )  # fmt: skip
    return out
