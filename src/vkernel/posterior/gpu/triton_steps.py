"""The steps of the GPU path, which start Triton kernels (:mod:`vkernel.posterior.gpu.triton_kernels`).

The candidates of queries are tables ``index (B, cap)``, ascending, of which the first ``count (B,)`` entries of a row
hold; a row with ``count > cap`` has no candidates."""

# mypy: disable-error-code="no-untyped-call,import-not-found,import-untyped"

import contextlib
import math
from typing import Any

import torch
import triton
from torch import Tensor

from vkernel.posterior.dense import MARGIN
from vkernel.posterior.gpu import triton_kernels as kernels
from vkernel.posterior.gpu.fp16 import WIDE, FP16Points, Logits
from vkernel.posterior.gpu.tables import NARROWER, Assigned, Listed, Rules
from vkernel.posterior.weights import Moments, Queries

ROWS, PROGRAMS = 4, 8192  # the latter are enough to fill a card, and to share the many candidates of a few queries


def _run(kernel: Any, grid: tuple[int, ...], *arguments: Any, num_warps: int = 4, **constants: Any) -> None:
    """Start a kernel on the device of its tensors; those that are views are copied."""
    device = arguments[0].device
    given = (a.contiguous() if isinstance(a, Tensor) else a for a in arguments)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[grid](*given, num_warps=num_warps, **constants)


def _whole(tiles: int) -> dict[str, int]:
    """Return the constants of a kernel that reads all tiles of a query at once."""
    size = int(triton.next_power_of_2(tiles))
    return {"TILES": size, "num_warps": min(16, max(4, size // 512))}


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
    _run(kernels.split, (len(x),), x, alpha, var, points.center, *out, *sizes, points.unit, *bound, PLANES=planes)
    return Logits(points, factors, gain, slope, norm, alpha / var * norm, delta, points.multiply(factors))


def levels(logits: Logits, second: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest logit of every query, its pivot, the largest or with ``second`` the second largest if there is
    one, ``(B,)``, and the thresholds of a narrow and a wide window below the pivot, ``(2, B)``."""
    size, tiles = len(logits.raw), triton.cdiv(logits.points.n, kernels.COLS.value)
    found = logits.raw.new_empty((2, size, tiles))
    _over_tiles(kernels.peaks, logits, tiles, found[0], found[1], tiles, SECOND=second)
    first, pivot = logits.raw.new_empty((2, size))
    thresholds = logits.raw.new_empty((2, size))
    given = (found[0], found[1], logits.delta, first, pivot, thresholds, size, tiles, math.log(logits.points.n))
    _run(kernels.levels, (size,), *given, MARGIN, NARROWER, SECOND=second, **_whole(tiles))
    return first, pivot, thresholds


def survey(logits: Logits, thresholds: Tensor, pivot: Tensor) -> tuple[Tensor, Tensor]:
    r"""Count the points at or above each of ``thresholds (2, B)``, by parts of the data, ``(2, B, ·)``; sum the weights
    :math:`\min(e^{l - \mathrm{pivot}}, 1)`, ``(3, B, ·)``: of points below the first threshold, of all, and squares."""
    size, tiles = len(logits.raw), triton.cdiv(logits.points.n, kernels.COLS.value)
    counts = torch.empty((2, size, tiles), dtype=torch.int32, device=logits.raw.device)
    sums = logits.raw.new_empty((3, size, tiles))
    _over_tiles(kernels.survey, logits, tiles, pivot, thresholds, counts, sums, tiles, SUMS=True)
    return counts, sums


def choose(
    logits: Logits, counts: Tensor, sums: Tensor, thresholds: Tensor, second: bool
) -> tuple[Listed, Tensor, Tensor]:
    """Choose the narrow window where it is certified; return the points in it, the weight of all points relative to the
    pivot (with ``second`` without the heaviest one) and the effective number of these points."""
    _, size, tiles = counts.shape
    chosen, starts = counts.new_empty((2, size, tiles))
    threshold, count = sums.new_empty(size), counts.new_empty(size)
    total, ess = logits.delta.new_empty((2, size))
    given = (counts, sums, thresholds, logits.delta, chosen, starts, threshold, count, total, ess)
    _run(kernels.choose, (size,), *given, size, tiles, MARGIN, SECOND=second, **_whole(tiles))
    return Listed(threshold, count, chosen, starts), total, ess


def above(logits: Logits, threshold: Tensor) -> Listed:
    """Count the points with logits of at least ``threshold (B,)``."""
    size, tiles = len(logits.raw), triton.cdiv(logits.points.n, kernels.COLS.value)
    counts = torch.empty((size, tiles), dtype=torch.int32, device=logits.raw.device)
    _over_tiles(kernels.survey, logits, tiles, threshold, threshold, counts, logits.gain, tiles, SUMS=False)
    through = counts.cumsum(1, dtype=torch.int32)
    return Listed(threshold, through[:, -1].contiguous(), counts, through - counts)


def select(logits: Logits, listed: Listed, cap: int) -> Tensor:
    """Return the numbers of the listed points of queries that have at most ``cap`` of them, ``(B, cap)``."""
    size, tiles = listed.counts.shape
    index = torch.empty((size, cap), dtype=torch.int32, device=listed.counts.device)
    table = (listed.threshold, listed.counts, listed.starts, listed.count, index, tiles, cap)
    _over_tiles(kernels.select, logits, tiles, *table, rows=1)  # few tiles hold something of four queries
    return index


def assign(
    queries: Queries, logits: Logits, count: Tensor, pivot: Tensor, total: Tensor, ess: Tensor, rules: Rules
) -> Assigned:
    """Assign every query to a stage, by the rules."""
    size = len(queries)
    stage, held = torch.empty((2, size), dtype=torch.int32, device=count.device)
    least, numbers = pivot.new_empty((3, size)), torch.empty(8, dtype=torch.int64, device=count.device)
    given = (count, logits.delta, logits.size, logits.slope, logits.norm, queries.var, pivot, total, ess, rules.table)
    limits = (rules.cap, rules.usual, rules.far, rules.close, rules.outside, rules.some, rules.heaviest)
    _run(kernels.assign, (1,), *given, stage, held, least, numbers, size, *limits, SECOND=rules.second)
    return Assigned(stage, held, least, numbers)


def weights(
    logits: Logits, shift: Tensor, planes: int, second: bool = False, along: Logits | None = None
) -> tuple[Tensor, Tensor]:
    r"""Return weights :math:`e = 2^{14} e^{l - \mathrm{shift}}` as sums of ``planes`` fp16 numbers, ``(planes, B, N)``;
    behind them those of :math:`e p` where ``along`` has p in [-1, 1]. Return also sums, ``(·, B, parts)``: of e; with
    ``second`` of e|y - c|²/2, of :math:`(e / 2^{14})^2` and of :math:`(e / 2^{14}) (l - \mathrm{shift})`; of e p."""
    size, tiles = len(logits.raw), triton.cdiv(logits.points.rows, kernels.COLS.value)
    count = planes if along is None else 2 * planes
    out = torch.empty((count, *logits.raw.shape), dtype=torch.float16, device=shift.device)
    sums = logits.raw.new_empty((1 if not second else 4 if along is None else 5, size, tiles))
    p = logits if along is None else along
    constants = {"PLANES": planes, "SECOND": second, "PRODUCT": along is not None}
    _over_tiles(kernels.weights, logits, tiles, shift, out, sums, tiles, p.raw, p.gain, **constants)
    return out, sums


def shares(
    queries: Queries, logits: Logits, shift: Tensor, sums: Tensor, heavy: Tensor, sparse: Tensor, wanted: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Return :math:`1 / \sum e`, the share p of the weights e in all weight, and its log, where ``wanted``: the log of
    the weight of the heavy points and that of the sparse stage are given. All are ``(B,)``, ``sums (1, B, ·)``."""
    out, log_w = torch.empty((3, len(heavy)), dtype=WIDE, device=heavy.device), logits.points.points.log_w
    given = (sums, shift, logits.norm, queries.var, log_w, heavy, sparse, wanted, out, len(heavy), sums.shape[2])
    _run(kernels.shares, (len(heavy),), *given, WEIGHTED=logits.points.points.weighted, **_whole(sums.shape[2]))
    return out[0], out[1], out[2]


def _candidates(points: FP16Points, count: Tensor, index: Tensor) -> tuple[Any, ...]:
    """Return the first arguments of a kernel that reads the values of candidates."""
    table = points.center if points.table is None else points.table
    return points.values, table, points.first, points.d, count, index, index.shape[1]


def exact(queries: Queries, points: FP16Points, count: Tensor, index: Tensor, logits: Logits | None = None) -> Tensor:
    """Return the candidates' logits in float64, by differences, ``(B, cap)``; given ``logits`` lose the candidates."""
    out = torch.empty(index.shape, dtype=WIDE, device=index.device)
    raw = out if logits is None else logits.raw
    programs = min(triton.cdiv(index.shape[1], kernels.SLOTS.value), PROGRAMS // len(count))
    given = (queries.x, queries.alpha, queries.var, points.points.log_w, out, raw, raw.shape[1])
    constants = {"TAKE": logits is not None, "TABLE": points.table is not None}
    _run(kernels.exact, (len(count), max(1, programs)), *_candidates(points, count, index), *given, **constants)
    return out


def mean(points: FP16Points, count: Tensor, index: Tensor, logit: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``log z (B,)`` and the mean ``(B, d)`` over the candidates; -inf and 0 where there are none."""
    out, log_z = logit.new_empty((len(count), points.d)), logit.new_empty(len(count))
    grid, constants = (len(count), triton.cdiv(points.d, kernels.MANY.value)), {"TABLE": points.table is not None}
    _run(kernels.mean, grid, *_candidates(points, count, index), logit, log_z, out, **constants)
    return log_z, out


def moments(points: FP16Points, count: Tensor, index: Tensor, logit: Tensor, vector: Tensor | None) -> Moments:
    """Return the moments over the candidates about the heaviest one (theory, 2.12), with trace, sum of squares and
    entropy of the weights, and with ``vector (B, d)`` the product; those of no points where there are none."""
    size, blocks = len(count), triton.cdiv(points.d, kernels.MANY.value)
    given, constants = _candidates(points, count, index), {"TABLE": points.table is not None}
    mean, along = logit.new_empty((size, points.d)), logit
    product = mean
    if vector is not None:
        along, product = torch.empty_like(logit), torch.empty_like(mean)
        programs = min(triton.cdiv(index.shape[1], kernels.SLOTS.value), PROGRAMS // size)
        _run(kernels.along, (size, max(1, programs)), *given, vector, along, **constants)
    log_z, square, entropy = logit.new_empty((3, size))
    trace = logit.new_empty((size, blocks))
    out = (log_z, mean, trace, square, entropy, product, blocks)
    _run(kernels.second, (size, blocks), *given, logit, along, *out, PRODUCT=vector is not None, **constants)
    found = Moments(log_z, mean, trace.sum(1).clamp_min(0.0), square=square, entropy=entropy)
    found.vector, found.product = vector, None if vector is None else product
    return found


def finish(
    points: FP16Points, parts: list[Tensor], scale: Tensor, share: Tensor, wanted: Tensor, heavy: Tensor, sparse: Tensor
) -> Tensor:
    r"""Return :math:`(1 - p)\, heavy + p\, (c + scale \sum parts)`, ``(B, d)``, where ``wanted``, else ``sparse``."""
    out, (count, d) = torch.empty_like(sparse), sparse.shape
    sizes = len(parts[0]), sum(len(part) for part in parts[1:])
    means = (points.center, scale, share, wanted, heavy, sparse, out)
    _run(
        kernels.finish,
        (count, triton.cdiv(d, kernels.SOME.value)),
        parts[0],
        parts[-1],
        *sizes,
        *means,
        count,
        d,
        points.width,
    )
    return out


def score(queries: Queries, mean: Tensor, dtype: torch.dtype) -> Tensor:
    r"""Return :math:`(\alpha m - x) / \sigma^2`, ``(B, d)``."""
    out, (count, d) = torch.empty_like(mean, dtype=dtype), mean.shape
    _run(
        kernels.score, (count, triton.cdiv(d, kernels.MOST.value)), queries.x, queries.alpha, queries.var, mean, out, d
    )
    return out
