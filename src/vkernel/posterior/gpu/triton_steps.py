"""The steps of the GPU path as Triton kernels, each of which reads its block once.

A block of :class:`~vkernel.posterior.gpu.fp16.Logits` is never stored as such. It is cut into tiles of ROWS queries ×
COLS points; a tile leaves one number for each of its queries (its largest logit, a count, a sum), and the few numbers
of a query are then reduced by torch: no atomics, so that equal inputs give equal outputs, bit for bit. The candidates
of queries are tables ``index (B, cap)``, ascending, of which the first ``count (B,)`` entries of a row hold; a row with
``count > cap`` has no candidates."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,import-not-found,import-untyped,untyped-decorator"

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vkernel.posterior.gpu import fp16
from vkernel.posterior.gpu.fp16 import WIDE, FP16Points, Logits
from vkernel.posterior.weights import Queries

ROWS, PROGRAMS = 4, 32768  # the latter are enough to fill a card, and to share the many candidates of a few queries
COLS = tl.constexpr(2048)
SLOTS, SLICES, LOT = tl.constexpr(2), tl.constexpr(8), tl.constexpr(128)  # of candidates, sums and logits at once
SOME, MANY, MOST = tl.constexpr(256), tl.constexpr(512), tl.constexpr(1024)  # coordinates that are read at once
FULL, TINY = tl.constexpr(fp16.FULL), tl.constexpr(fp16.TINY)
NONE = tl.constexpr(-1e38)  # where there is no largest logit, one that may be subtracted
LIGHTEST = tl.constexpr(-40.0)  # weights below exp(LIGHTEST) of the heaviest are not added to a mean in float64


@triton.jit
def _tile(raw, gain, slope, half, log_w, n, queries, columns, WEIGHTED: tl.constexpr, ROWS: tl.constexpr):
    """Read one tile of logits, -inf outside; return its rows and columns too."""
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
           WEIGHTED: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    logit, row, col = _tile(raw, gain, slope, half, log_w, n, queries, columns, WEIGHTED, ROWS)
    to = row * tiles + tl.program_id(0)
    top = tl.max(logit, 1)
    tl.store(first + to, top, mask=row < queries)
    if SECOND:
        at = tl.min(tl.where(logit == top[:, None], col[None, :], 2147483647), 1)
        rest = tl.where(col[None, :] == at[:, None], -float("inf"), logit)
        tl.store(second + to, tl.max(rest, 1), mask=row < queries)


@triton.jit
def _survey(raw, gain, slope, half, log_w, n, queries, columns, first, thresholds, counts, sums, tiles,
            SUMS: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    logit, row, col = _tile(raw, gain, slope, half, log_w, n, queries, columns, WEIGHTED, ROWS)
    narrow = tl.load(thresholds + row, mask=row < queries, other=float("inf"))
    wide = tl.load(thresholds + queries + row, mask=row < queries, other=float("inf"))
    inside = (col < n)[None, :]
    near = (logit >= narrow[:, None]) & inside
    both = tl.sum(near.to(tl.int32) + 65536 * ((logit >= wide[:, None]) & inside).to(tl.int32), 1)
    to, last = row * tiles + tl.program_id(0), queries * tiles
    tl.store(counts + to, both % 65536, mask=row < queries)
    tl.store(counts + last + to, both // 65536, mask=row < queries)
    if SUMS:
        top = tl.load(first + row, mask=row < queries, other=0.0)
        e = tl.exp(logit - tl.maximum(top, NONE)[:, None])
        tl.store(sums + to, tl.sum(tl.where(near, 0.0, e), 1), mask=row < queries)
        tl.store(sums + last + to, tl.sum(e, 1), mask=row < queries)
        tl.store(sums + 2 * last + to, tl.sum(e * e, 1), mask=row < queries)


@triton.jit
def _select(raw, gain, slope, half, log_w, n, queries, columns, threshold, counts, starts, totals, index, tiles, cap,
            WEIGHTED: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    fits = (row < queries) & (tl.load(totals + row, mask=row < queries, other=0) <= cap)
    here = tl.load(counts + row * tiles + tl.program_id(0), mask=fits, other=0)
    if tl.max(here, 0) > 0:  # most tiles hold nothing, and are not read again
        logit, row, col = _tile(raw, gain, slope, half, log_w, n, queries, columns, WEIGHTED, ROWS)
        least = tl.load(threshold + row, mask=row < queries, other=float("inf"))
        chosen = (logit >= least[:, None]) & (col < n)[None, :] & fits[:, None]
        start = tl.load(starts + row * tiles + tl.program_id(0), mask=fits, other=0)
        slot = start[:, None] + tl.cumsum(chosen.to(tl.int32), 1) - 1
        to = index + row.to(tl.int64)[:, None] * cap + slot
        tl.store(to, tl.broadcast_to(col[None, :], (ROWS, COLS)), mask=chosen & (slot < cap))


@triton.jit
def _weights(raw, gain, slope, half, log_w, n, queries, columns, shift, out, total, tiles, WEIGHTED: tl.constexpr,
             ROWS: tl.constexpr):  # fmt: skip
    logit, row, col = _tile(raw, gain, slope, half, log_w, n, queries, columns, WEIGHTED, ROWS)
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
           PLANES: tl.constexpr):  # fmt: skip
    q = tl.program_id(0).to(tl.int64)
    alpha = tl.load(alphas + q)
    var = tl.load(variances + q)
    square = tl.zeros((MOST,), tl.float64)
    for k in range(0, d, MOST):
        col = k + tl.arange(0, MOST)
        gap = tl.load(x + q * d + col, mask=col < d, other=0.0) - alpha * tl.load(center + col, mask=col < d, other=0.0)
        square += gap * gap
    norm = tl.sqrt(tl.sum(square, 0))
    scale = tl.maximum(norm, TINY) / FULL
    rest = tl.zeros((MOST,), tl.float64)
    for k in range(0, width, MOST):
        col = k + tl.arange(0, MOST)
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
    """Read stored values in float64."""
    v = tl.load(values + place, mask=good, other=0)
    if TABLE:
        v = tl.load(table + (v.to(tl.int32) - first), mask=good, other=0.0)
    return v.to(tl.float64)


@triton.jit
def _exact(values, table, first, d, counts, index, cap, x, alpha, var, log_w, out, raw, columns,
           TAKE: tl.constexpr, TABLE: tl.constexpr):  # fmt: skip
    q = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + q)
    count = tl.where(count <= cap, count, 0)
    a = tl.load(alpha + q)
    twice = 2 * tl.load(var + q)
    for s in range(tl.program_id(1) * SLOTS, count, tl.num_programs(1) * SLOTS):
        slot = s + tl.arange(0, SLOTS)
        held = slot < count
        i = tl.load(index + q * cap + slot, mask=held, other=0).to(tl.int64)
        square = tl.zeros((SLOTS, MANY), tl.float64)
        for k in range(0, d, MANY):
            col = k + tl.arange(0, MANY)
            good = held[:, None] & (col < d)[None, :]
            y = _values(values, table, first, i[:, None] * d + col[None, :], good, TABLE)
            gap = tl.load(x + q * d + col, mask=col < d, other=0.0)[None, :] - a * y
            square += tl.where(good, gap * gap, 0.0)
        logit = tl.load(log_w + i, mask=held, other=0.0) - tl.sum(square, 1) / twice
        tl.store(out + q * cap + slot, logit, mask=held)
        if TAKE:
            tl.store(raw + q * columns + i, tl.full((SLOTS,), -float("inf"), tl.float32), mask=held)


@triton.jit
def _mean(values, table, first, d, counts, index, cap, logit, log_z, out, TABLE: tl.constexpr):
    q = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + q)
    count = tl.where(count <= cap, count, 0)
    col = tl.program_id(1) * MANY + tl.arange(0, MANY)
    if count == 0:
        tl.store(out + q * d + col, tl.zeros((MANY,), tl.float64), mask=col < d)
        tl.store(log_z + q, -float("inf"))
    else:
        top = tl.load(logit + q * cap)
        total = top - top
        for s in range(0, count, LOT):
            slot = s + tl.arange(0, LOT)
            lot = tl.load(logit + q * cap + slot, mask=slot < count, other=-1e300)
            new = tl.maximum(top, tl.max(lot, 0))
            total = total * tl.exp(top - new) + tl.sum(tl.exp(lot - new), 0)
            top = new
        sums = tl.zeros((SLOTS, MANY), tl.float64)
        for s in range(0, count, SLOTS):
            slot = s + tl.arange(0, SLOTS)
            some = tl.load(logit + q * cap + slot, mask=slot < count, other=-float("inf")) - top
            if tl.max(some, 0) > LIGHTEST:
                heavy = some > LIGHTEST
                i = tl.load(index + q * cap + slot, mask=heavy, other=0).to(tl.int64)
                good = heavy[:, None] & (col < d)[None, :]
                y = _values(values, table, first, i[:, None] * d + col[None, :], good, TABLE)
                sums += tl.where(good, tl.exp(some)[:, None] * y, 0.0)
        tl.store(out + q * d + col, tl.sum(sums, 0) / total, mask=col < d)
        tl.store(log_z + q, top + tl.log(total))


@triton.jit
def _total(parts, slices, q, queries, col, d, width):
    """Add the parts of one query up to ``(SLICES, SOME)``."""
    sums = tl.zeros((SLICES, SOME), tl.float64)
    for s in range(0, slices, SLICES):
        k = s + tl.arange(0, SLICES)
        good = (k < slices)[:, None] & (col < d)[None, :]
        place = (k.to(tl.int64) * queries + q)[:, None] * width + col[None, :]
        sums += tl.load(parts + place, mask=good, other=0.0).to(tl.float64)
    return sums


@triton.jit
def _finish(parts, others, slices, more, center, scale, share, wanted, heavy, sparse, out, queries, d, width):
    q = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * SOME + tl.arange(0, SOME)
    if tl.load(wanted + q):
        sums = _total(parts, slices, q, queries, col, d, width) + _total(others, more, q, queries, col, d, width)
        mean = tl.load(center + col, mask=col < d, other=0.0) + tl.load(scale + q) * tl.sum(sums, 0)
        p = tl.load(share + q)
        mean = (1 - p) * tl.load(heavy + q * d + col, mask=col < d, other=0.0) + p * mean
        tl.store(out + q * d + col, mean, mask=col < d)
    else:
        tl.store(out + q * d + col, tl.load(sparse + q * d + col, mask=col < d, other=0.0), mask=col < d)


@triton.jit
def _score(x, alpha, var, mean, out, d):
    q = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * MOST + tl.arange(0, MOST)
    m = tl.load(mean + q * d + col, mask=col < d, other=0.0)
    s = (tl.load(alpha + q) * m - tl.load(x + q * d + col, mask=col < d, other=0.0)) / tl.load(var + q)
    tl.store(out + q * d + col, s.to(out.dtype.element_ty), mask=col < d)


def _run(kernel: Any, grid: tuple[int, ...], *arguments: Any, num_warps: int = 4, **constants: Any) -> None:
    """Start a kernel on the device of its tensors; those that are views are copied."""
    device = arguments[0].device
    given = (a.contiguous() if isinstance(a, Tensor) else a for a in arguments)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[grid](*given, num_warps=num_warps, **constants)


def _over_tiles(kernel: Any, logits: Logits, tiles: int, *arguments: Any, rows: int = ROWS, **constants: Any) -> None:
    """Start a kernel over so many tiles of points, and all queries."""
    points, queries = logits.points, len(logits.raw)
    log_w = points.half if points.log_w is None else points.log_w
    block = (logits.raw, logits.gain, logits.slope, points.half, log_w, points.n, queries, points.rows)
    constants |= {"WEIGHTED": points.log_w is not None, "ROWS": rows, "num_warps": 8 if rows > 1 else 4}
    _run(kernel, (tiles, triton.cdiv(queries, rows)), *block, *arguments, **constants)


def split(queries: Queries, points: FP16Points) -> Logits:
    """Split queries into two fp16 numbers for each coordinate; multiply them by the points; bound the error."""
    x, alpha, var = queries.x, queries.alpha, queries.var
    factors = torch.empty((2, len(x), points.width), dtype=torch.float16, device=x.device)
    (norm, delta), (gain, slope) = x.new_empty((2, len(x))), x.new_empty((2, len(x)), dtype=torch.float32)
    planes, *bound = points.bound(len(x))
    out, sizes = (factors, gain, slope, norm, delta), (points.d, points.width, len(x))
    _run(_split, (len(x),), x, alpha, var, points.center, *out, *sizes, points.unit, *bound, PLANES=planes)
    return Logits(points, factors, gain, slope, norm, alpha / var * norm, delta, points.multiply(factors))


def peaks(logits: Logits, second: bool) -> tuple[Tensor, Tensor]:
    """Return the largest and, where it is wanted, the second largest logit of every query (-inf: there is none)."""
    tiles = triton.cdiv(logits.points.n, COLS.value)
    found = logits.raw.new_full((2, len(logits.raw), tiles), -torch.inf)
    _over_tiles(_peaks, logits, tiles, found[0], found[1], tiles, SECOND=second)
    if not second:
        return found[0].amax(1), found[1, :, 0]
    two = found.movedim(0, 1).flatten(1).topk(2, dim=1).values
    return two[:, 0], two[:, 1]


def survey(logits: Logits, thresholds: Tensor, first: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Count the points at or above each of ``thresholds (2, B)``, by parts of the data: ``(2, B, ·)``. With ``first
    (B,)``, the largest logit, also sum the weights relative to it, ``(3, B)``: of the points below the first threshold,
    of all, and the squares of all."""
    size, tiles = len(logits.raw), triton.cdiv(logits.points.n, COLS.value)
    counts = torch.empty((2, size, tiles), dtype=torch.int32, device=logits.raw.device)
    sums = logits.raw.new_empty((0 if first is None else 3, size, tiles))
    top = logits.gain if first is None else first
    _over_tiles(_survey, logits, tiles, top, thresholds, counts, sums, tiles, SUMS=first is not None)
    return counts, sums.sum(2)


def select(logits: Logits, threshold: Tensor, cap: int, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``count`` and ``index`` of points with logits of at least ``threshold (B,)``; ``counts``: a survey's."""
    index = torch.empty((len(threshold), cap), dtype=torch.int32, device=threshold.device)
    through, tiles = counts.cumsum(1, dtype=torch.int32), counts.shape[1]
    total = through[:, -1].contiguous()
    table = (threshold, counts, through - counts, total, index, tiles, cap)
    _over_tiles(_select, logits, tiles, *table, rows=1)  # few tiles hold something of four queries
    return total, index


def weights(logits: Logits, shift: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return weights :math:`2^{14} e^{l - \mathrm{shift}}` as sums of two fp16 numbers, ``(2, B, N)``, and totals."""
    tiles = triton.cdiv(logits.points.rows, COLS.value)
    out = torch.empty((2, *logits.raw.shape), dtype=torch.float16, device=shift.device)
    total = logits.raw.new_empty((len(logits.raw), tiles))
    _over_tiles(_weights, logits, tiles, shift, out, total, tiles)
    return out, total.to(WIDE).sum(1)


def _candidates(points: FP16Points, count: Tensor, index: Tensor) -> tuple[Any, ...]:
    """Return the first arguments of a kernel that reads the values of candidates."""
    table = points.center if points.table is None else points.table
    return points.values, table, points.first, points.d, count, index, index.shape[1]


def exact(queries: Queries, points: FP16Points, count: Tensor, index: Tensor, logits: Logits | None = None) -> Tensor:
    """Return the candidates' logits in float64, by differences, ``(B, cap)``; given ``logits`` lose the candidates."""
    out = torch.empty(index.shape, dtype=WIDE, device=index.device)
    raw = out if logits is None else logits.raw
    programs = min(triton.cdiv(index.shape[1], SLOTS.value), PROGRAMS // len(count))
    given = (queries.x, queries.alpha, queries.var, points.points.log_w, out, raw, raw.shape[1])
    constants = {"TAKE": logits is not None, "TABLE": points.table is not None}
    _run(_exact, (len(count), max(1, programs)), *_candidates(points, count, index), *given, **constants)
    return out


def mean(points: FP16Points, count: Tensor, index: Tensor, logit: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``log z (B,)`` and the mean ``(B, d)`` over the candidates; -inf and 0 where there are none."""
    out, log_z = logit.new_empty((len(count), points.d)), logit.new_empty(len(count))
    grid, constants = (len(count), triton.cdiv(points.d, MANY.value)), {"TABLE": points.table is not None}
    _run(_mean, grid, *_candidates(points, count, index), logit, log_z, out, **constants)
    return log_z, out


def finish(
    points: FP16Points, parts: list[Tensor], scale: Tensor, share: Tensor, wanted: Tensor, heavy: Tensor, sparse: Tensor
) -> Tensor:
    r"""Return :math:`(1 - p)\, heavy + p\, (c + scale \sum parts)`, ``(B, d)``, where ``wanted``, else ``sparse``."""
    out, (count, d) = torch.empty_like(sparse), sparse.shape
    sizes = len(parts[0]), sum(len(part) for part in parts[1:])
    means = (points.center, scale, share, wanted, heavy, sparse, out)
    _run(_finish, (count, triton.cdiv(d, SOME.value)), parts[0], parts[-1], *sizes, *means, count, d, points.width)
    return out


def score(queries: Queries, mean: Tensor, dtype: torch.dtype) -> Tensor:
    r"""Return :math:`(\alpha m - x) / \sigma^2`, ``(B, d)``."""
    out, (count, d) = torch.empty_like(mean, dtype=dtype), mean.shape
    _run(_score, (count, triton.cdiv(d, MOST.value)), queries.x, queries.alpha, queries.var, mean, out, d)
    return out
