"""The steps of :mod:`~vkernel.posterior.gpu.steps` as Triton kernels, each of which reads its block once.

Blocks of logits are cut into tiles of ROWS queries × COLS points. A tile leaves one number for each of its queries (its
largest logit, a count, a sum), and the few numbers of a query are then reduced by torch: no atomics, so that equal
inputs give equal outputs, bit for bit.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,import-not-found,import-untyped,untyped-decorator"

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vkernel.posterior.gpu import steps
from vkernel.posterior.gpu.fp16 import FULL, TINY, WIDE, FP16Points, Logits
from vkernel.posterior.gpu.steps import LEAST, LIGHTEST
from vkernel.posterior.weights import Queries

ROWS, COLS = 4, 2048
SLOTS, COORDINATES = 2, 512  # candidates and coordinates that are read at once
PROGRAMS = 32768  # enough to fill a card, and to share the many candidates of a few queries


@triton.jit
def _tile(raw, gain, slope, half, log_w, n, queries, columns, WEIGHTED: tl.constexpr, ROWS: tl.constexpr,
          COLS: tl.constexpr):  # fmt: skip
    """One tile of logits, -inf outside; its rows and columns."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    good = (row < queries)[:, None] & (col < n)[None, :]
    value = tl.load(raw + row.to(tl.int64)[:, None] * columns + col[None, :], mask=good, other=0.0)
    good = good & (value > -float("inf"))
    g = tl.load(gain + row, mask=row < queries, other=0.0)
    a = tl.load(slope + row, mask=row < queries, other=0.0)
    h = tl.load(half + col, mask=col < n, other=0.0)
    term = -a[:, None] * h[None, :]
    if WEIGHTED:
        term += tl.load(log_w + col, mask=col < n, other=0.0)[None, :]
    # fma by name: two kernels that see the same tile must see the same bits
    logit = tl.where(good, tl.fma(value, tl.broadcast_to(g[:, None], (ROWS, COLS)), term), -float("inf"))
    return logit, row, col


@triton.jit
def _peaks(raw, gain, slope, half, log_w, n, queries, columns, first, second, tiles, SECOND: tl.constexpr,
           WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    logit, row, col = _tile(raw, gain, slope, half, log_w, n, queries, columns, WEIGHTED, ROWS, COLS)
    to = row * tiles + tl.program_id(0)
    top = tl.max(logit, 1)
    tl.store(first + to, top, mask=row < queries)
    if SECOND:
        at = tl.min(tl.where(logit == top[:, None], col[None, :], 2147483647), 1)
        rest = tl.where(col[None, :] == at[:, None], -float("inf"), logit)
        tl.store(second + to, tl.max(rest, 1), mask=row < queries)


@triton.jit
def _survey(raw, gain, slope, half, log_w, n, queries, columns, first, thresholds, counts, sums, tiles,
            LEAST: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    logit, row, col = _tile(raw, gain, slope, half, log_w, n, queries, columns, WEIGHTED, ROWS, COLS)
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
def _select(raw, gain, slope, half, log_w, n, queries, columns, threshold, counts, starts, totals, index, tiles, cap,
            WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    fits = (row < queries) & (tl.load(totals + row, mask=row < queries, other=0) <= cap)
    here = tl.load(counts + row * tiles + tl.program_id(0), mask=fits, other=0)
    if tl.max(here, 0) > 0:  # most tiles hold nothing, and are not read again
        logit, row, col = _tile(raw, gain, slope, half, log_w, n, queries, columns, WEIGHTED, ROWS, COLS)
        least = tl.load(threshold + row, mask=row < queries, other=float("inf"))
        chosen = (logit >= least[:, None]) & (col < n)[None, :] & fits[:, None]
        start = tl.load(starts + row * tiles + tl.program_id(0), mask=fits, other=0)
        slot = start[:, None] + tl.cumsum(chosen.to(tl.int32), 1) - 1
        to = index + row.to(tl.int64)[:, None] * cap + slot
        tl.store(to, tl.broadcast_to(col[None, :], (ROWS, COLS)), mask=chosen & (slot < cap))


@triton.jit
def _weights(raw, gain, slope, half, log_w, n, queries, columns, shift, out, total, tiles, FULL: tl.constexpr,
             WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    logit, row, col = _tile(raw, gain, slope, half, log_w, n, queries, columns, WEIGHTED, ROWS, COLS)
    e = FULL * tl.exp(logit - tl.load(shift + row, mask=row < queries, other=0.0)[:, None])
    high = e.to(tl.float16)
    low = (e - high.to(tl.float32)).to(tl.float16)
    inside = (row < queries)[:, None] & (col < columns)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * columns + col[None, :], high, mask=inside)
    tl.store(out + (row + queries).to(tl.int64)[:, None] * columns + col[None, :], low, mask=inside)
    e = high.to(tl.float32) + low.to(tl.float32)
    tl.store(total + row * tiles + tl.program_id(0), tl.sum(e, 1), mask=row < queries)


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
def _values(values, table, first, place, good, TABLE: tl.constexpr):
    """Stored values in float64."""
    v = tl.load(values + place, mask=good, other=0)
    if TABLE:
        v = tl.load(table + (v.to(tl.int32) - first), mask=good, other=0.0)
    return v.to(tl.float64)


@triton.jit
def _exact(x, alpha, var, log_w, values, table, first, stride, d, counts, index, out, cap, TABLE: tl.constexpr,
           SLOTS: tl.constexpr, COORDINATES: tl.constexpr):  # fmt: skip
    q = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + q)
    count = tl.where(count <= cap, count, 0)
    a = tl.load(alpha + q)
    twice = 2 * tl.load(var + q)
    for s in range(tl.program_id(1) * SLOTS, count, tl.num_programs(1) * SLOTS):
        slot = s + tl.arange(0, SLOTS)
        held = slot < count
        i = tl.load(index + q * cap + slot, mask=held, other=0).to(tl.int64)
        square = tl.zeros((SLOTS, COORDINATES), tl.float64)
        for k in range(0, d, COORDINATES):
            col = k + tl.arange(0, COORDINATES)
            good = held[:, None] & (col < d)[None, :]
            y = _values(values, table, first, i[:, None] * stride + col[None, :], good, TABLE)
            gap = tl.load(x + q * d + col, mask=col < d, other=0.0)[None, :] - a * y
            square += tl.where(good, gap * gap, 0.0)
        logit = tl.load(log_w + i, mask=held, other=0.0) - tl.sum(square, 1) / twice
        tl.store(out + q * cap + slot, logit, mask=held)


@triton.jit
def _mean(values, table, first, stride, d, counts, index, logit, log_z, out, cap, TABLE: tl.constexpr,
          LOT: tl.constexpr, SLOTS: tl.constexpr, COORDINATES: tl.constexpr, LIGHTEST: tl.constexpr,
          NONE: tl.constexpr):  # fmt: skip
    q = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + q)
    count = tl.where(count <= cap, count, 0)
    col = tl.program_id(1) * COORDINATES + tl.arange(0, COORDINATES)
    if count == 0:
        tl.store(out + q * d + col, tl.zeros((COORDINATES,), tl.float64), mask=col < d)
        tl.store(log_z + q, -float("inf"))
    else:
        top = tl.max(tl.load(logit + q * cap + tl.arange(0, SLOTS), mask=tl.arange(0, SLOTS) < count, other=NONE), 0)
        total = top - top
        for s in range(0, count, LOT):
            slot = s + tl.arange(0, LOT)
            lot = tl.load(logit + q * cap + slot, mask=slot < count, other=NONE)
            new = tl.maximum(top, tl.max(lot, 0))
            total = total * tl.exp(top - new) + tl.sum(tl.exp(lot - new), 0)
            top = new
        sums = tl.zeros((SLOTS, COORDINATES), tl.float64)
        for s in range(0, count, SLOTS):
            slot = s + tl.arange(0, SLOTS)
            some = tl.load(logit + q * cap + slot, mask=slot < count, other=-float("inf")) - top
            if tl.max(some, 0) > -LIGHTEST:
                heavy = some > -LIGHTEST
                i = tl.load(index + q * cap + slot, mask=heavy, other=0).to(tl.int64)
                good = heavy[:, None] & (col < d)[None, :]
                y = _values(values, table, first, i[:, None] * stride + col[None, :], good, TABLE)
                sums += tl.where(good, tl.exp(some)[:, None] * y, 0.0)
        tl.store(out + q * d + col, tl.sum(sums, 0) / total, mask=col < d)
        tl.store(log_z + q, top + tl.log(total))


def _on(a: Tensor) -> Any:
    """Kernels start on the current device: make it that of ``a``."""
    return torch.cuda.device(a.device) if a.is_cuda else contextlib.nullcontext()


def _block(logits: Logits, columns: int | None = None) -> tuple[tuple[int, int], tuple[Any, ...], dict[str, Any]]:
    """Grid, first arguments and constants of a kernel over all tiles of points, or of so many columns."""
    queries, points = len(logits.raw), logits.points
    grid = triton.cdiv(columns or points.n, COLS), triton.cdiv(queries, ROWS)
    log_w = points.half if points.log_w is None else points.log_w
    first = (logits.raw, logits.gain, logits.slope, points.half, log_w, points.n, queries, points.rows)
    return grid, first, {"WEIGHTED": points.log_w is not None, "ROWS": ROWS, "COLS": COLS, "num_warps": 8}


def split(queries: Queries, points: FP16Points) -> Logits:
    x, count = queries.x.contiguous(), len(queries)
    factors = torch.empty((2, count, points.width), dtype=torch.float16, device=x.device)
    (norm, delta), (gain, slope) = x.new_empty((2, count)), x.new_empty((2, count), dtype=torch.float32)
    planes, *bound = points.bound(count)
    with _on(x):
        _split[(count,)](
            x, queries.alpha.contiguous(), queries.var.contiguous(), points.center, factors, gain, slope, norm, delta,
            x.shape[1], points.width, count, points.unit, *bound, PLANES=planes, FULL=FULL, TINY=TINY, COORDINATES=1024,
            num_warps=4,
        )  # fmt: skip
    size = queries.alpha / queries.var * norm
    return Logits(points, factors, gain, slope, norm, size, delta, points.multiply(factors))


def peaks(logits: Logits, second: bool) -> tuple[Tensor, Tensor]:
    grid, first, constants = _block(logits)
    found = logits.raw.new_full((2, len(logits.raw), grid[0]), -torch.inf)
    with _on(found):
        _peaks[grid](*first, found[0], found[1], grid[0], SECOND=second, **constants)
    if not second:
        return found[0].amax(1), found[1, :, 0]
    two = found.movedim(0, 1).flatten(1).topk(2, dim=1).values
    return two[:, 0], two[:, 1]


def survey(logits: Logits, first: Tensor, thresholds: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grid, arguments, constants = _block(logits)
    counts = torch.empty((2, len(first), grid[0]), dtype=torch.int32, device=first.device)
    sums = first.new_empty((3, len(first), grid[0]))
    with _on(first):
        _survey[grid](
            *arguments, first.contiguous(), thresholds.contiguous(), counts, sums, grid[0], LEAST=LEAST, **constants
        )
    below, total, square = sums.sum(2).unbind()
    return counts, below, total, square


def select(logits: Logits, threshold: Tensor, cap: int, counts: Tensor) -> tuple[Tensor, Tensor]:
    grid, first, constants = _block(logits)
    index = torch.empty((len(threshold), cap), dtype=torch.int32, device=threshold.device)
    through = counts.cumsum(1, dtype=torch.int32)
    total = through[:, -1].contiguous()
    constants |= {"ROWS": 1, "num_warps": 4}  # few tiles hold anything, and fewer hold something of four queries
    with _on(index):
        _select[(grid[0], len(threshold))](
            *first, threshold.contiguous(), counts.contiguous(), through - counts, total, index, grid[0], cap,
            **constants,
        )  # fmt: skip
    return total, index


def weights(logits: Logits, shift: Tensor) -> tuple[Tensor, Tensor]:
    grid, first, constants = _block(logits, logits.points.rows)
    out = torch.empty((2, *logits.raw.shape), dtype=torch.float16, device=shift.device)
    total = logits.raw.new_empty((len(logits.raw), grid[0]))
    with _on(out):
        _weights[grid](*first, shift.contiguous(), out, total, grid[0], FULL=FULL, **constants)
    return out, total.to(WIDE).sum(1)


def exact(queries: Queries, points: FP16Points, count: Tensor, index: Tensor) -> Tensor:
    if points.values is None:
        return steps.exact(queries, points, count, index)
    x, cap = queries.x.contiguous(), index.shape[1]
    out = torch.empty(index.shape, dtype=WIDE, device=x.device)
    grid = len(x), max(1, min(triton.cdiv(cap, SLOTS), PROGRAMS // len(x)))
    table = x if points.table is None else points.table
    with _on(x):
        _exact[grid](
            x, queries.alpha.contiguous(), queries.var.contiguous(), points.points.log_w, points.values, table,
            points.first, points.values.stride(0), points.d, count, index, out, cap, TABLE=points.table is not None,
            SLOTS=SLOTS, COORDINATES=COORDINATES, num_warps=4,
        )  # fmt: skip
    return out


def mean(points: FP16Points, count: Tensor, index: Tensor, logit: Tensor) -> tuple[Tensor, Tensor]:
    if points.values is None:
        return steps.mean(points, count, index, logit)
    out, log_z = logit.new_empty((len(count), points.d)), logit.new_empty(len(count))
    table = logit if points.table is None else points.table
    with _on(out):
        _mean[(len(count), triton.cdiv(points.d, COORDINATES))](
            points.values, table, points.first, points.values.stride(0), points.d, count, index, logit, log_z, out,
            index.shape[1], TABLE=points.table is not None, LOT=128, SLOTS=SLOTS, COORDINATES=COORDINATES,
            LIGHTEST=LIGHTEST, NONE=-1e300, num_warps=4,
        )  # fmt: skip
    return log_z, out
