"""The Triton kernels of the GPU path, each of which reads its block once; the steps that start them are in
:mod:`vkernel.posterior.gpu.triton_steps`.

A block of :class:`~vkernel.posterior.gpu.fp16.Logits` is never stored as such. It is cut into tiles of ROWS queries ×
COLS points; a tile leaves one number for each of its queries (its largest logit, a count, a sum), and another kernel
reduces the few numbers of a query: no atomics, so that equal inputs give equal outputs, bit for bit."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,import-not-found,import-untyped,untyped-decorator"

import triton
import triton.language as tl

from vkernel.posterior.gpu import fp16

COLS = tl.constexpr(2048)
SLOTS, SLICES, LOT = tl.constexpr(2), tl.constexpr(8), tl.constexpr(128)  # of candidates, sums and logits at once
SOME, MANY, MOST = tl.constexpr(256), tl.constexpr(512), tl.constexpr(1024)  # coordinates that are read at once
FULL, TINY = tl.constexpr(fp16.FULL), tl.constexpr(fp16.TINY)
NONE = tl.constexpr(-1e38)  # where there is no largest logit, one that may be subtracted
LIGHTEST = tl.constexpr(-40.0)  # weights below exp(LIGHTEST) of the heaviest are not added to a mean in float64
AT_ONCE = tl.constexpr(256)  # queries


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
def peaks(raw, gain, slope, half, log_w, n, queries, columns, first, second, tiles, SECOND: tl.constexpr,
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
def levels(first, second, deltas, firsts, pivots, thresholds, queries, tiles, log_n, margin, narrower,
            SECOND: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    q = tl.program_id(0)
    k = tl.arange(0, TILES)
    f = tl.load(first + q * tiles + k, mask=k < tiles, other=-float("inf"))
    top = tl.max(f, 0)
    pivot = top
    if SECOND:
        at = tl.min(tl.where(f == top, k, TILES), 0)
        rest = tl.max(tl.where(k == at, -float("inf"), f), 0)
        two = tl.maximum(rest, tl.max(tl.load(second + q * tiles + k, mask=k < tiles, other=-float("inf")), 0))
        pivot = tl.where(two > -float("inf"), two, top)
    base = pivot.to(tl.float64) - 2 * tl.load(deltas + q) - margin
    tl.store(firsts + q, top)
    tl.store(pivots + q, pivot)
    tl.store(thresholds + q, (base - narrower).to(tl.float32))
    tl.store(thresholds + queries + q, (base - log_n).to(tl.float32))


@triton.jit
def survey(raw, gain, slope, half, log_w, n, queries, columns, pivot, thresholds, counts, sums, tiles,
            SUMS: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    logit, row, col = _tile(raw, gain, slope, half, log_w, n, queries, columns, WEIGHTED, ROWS)
    narrow = tl.load(thresholds + row, mask=row < queries, other=float("inf"))
    inside = (col < n)[None, :]
    near = (logit >= narrow[:, None]) & inside
    to, last = row * tiles + tl.program_id(0), queries * tiles
    if SUMS:
        wide = tl.load(thresholds + queries + row, mask=row < queries, other=float("inf"))
        both = tl.sum(near.to(tl.int32) + 65536 * ((logit >= wide[:, None]) & inside).to(tl.int32), 1)
        tl.store(counts + to, both % 65536, mask=row < queries)
        tl.store(counts + last + to, both // 65536, mask=row < queries)
        top = tl.load(pivot + row, mask=row < queries, other=0.0)
        e = tl.exp(tl.minimum(logit - tl.maximum(top, NONE)[:, None], 0.0))
        tl.store(sums + to, tl.sum(tl.where(near, 0.0, e), 1), mask=row < queries)
        tl.store(sums + last + to, tl.sum(e, 1), mask=row < queries)
        tl.store(sums + 2 * last + to, tl.sum(e * e, 1), mask=row < queries)
    else:
        tl.store(counts + to, tl.sum(near.to(tl.int32), 1), mask=row < queries)


@triton.jit
def choose(counts, sums, thresholds, deltas, chosen, starts, threshold, count, total, ess, queries, tiles, margin,
            SECOND: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    q = tl.program_id(0)
    last = queries * tiles
    k = tl.arange(0, TILES)
    place = q * tiles + k
    below = tl.sum(tl.load(sums + place, mask=k < tiles, other=0.0).to(tl.float64), 0)
    every = tl.sum(tl.load(sums + last + place, mask=k < tiles, other=0.0).to(tl.float64), 0)
    square = tl.sum(tl.load(sums + 2 * last + place, mask=k < tiles, other=0.0).to(tl.float64), 0)
    if SECOND:  # the heaviest point was counted as 1
        every = tl.maximum(every - 1.0, 0.0)
        square = tl.maximum(square - 1.0, 0.0)
    allowed = -2 * tl.load(deltas + q) - margin
    certified = tl.log(tl.maximum(below, TINY)) <= allowed
    which = tl.where(certified | (below == 0.0), 0, 1)
    here = tl.load(counts + which * last + place, mask=k < tiles, other=0)
    tl.store(chosen + place, here, mask=k < tiles)
    tl.store(starts + place, tl.cumsum(here, 0) - here, mask=k < tiles)
    tl.store(threshold + q, tl.load(thresholds + which * queries + q))
    tl.store(count + q, tl.sum(here, 0))
    tl.store(total + q, every)
    tl.store(ess + q, tl.where(square > 0.0, every * every / tl.maximum(square, TINY), 0.0))


@triton.jit
def assign(counts, deltas, sizes, slopes, norms, variances, pivots, totals, ess, table, stages, count, least,
            numbers, queries, cap, usual, far, close, outside, some, many, SECOND: tl.constexpr):  # fmt: skip
    listed = tl.zeros((AT_ONCE,), tl.int64)
    for start in range(0, queries, AT_ONCE):
        q = start + tl.arange(0, AT_ONCE)
        listed += tl.minimum(tl.load(counts + q, mask=q < queries, other=0), cap).to(tl.int64)
    room = tl.where(tl.sum(listed, 0) <= usual * queries, cap, usual)
    sums = tl.zeros((AT_ONCE, 8), tl.int64)
    column = tl.arange(0, 8)[None, :]
    for start in range(0, queries, AT_ONCE):
        q = start + tl.arange(0, AT_ONCE)
        here = q < queries
        held = tl.load(counts + q, mask=here, other=0)
        delta = tl.load(deltas + q, mask=here, other=0.0)
        size = tl.load(sizes + q, mask=here, other=0.0)
        slope = tl.load(slopes + q, mask=here, other=0.0).to(tl.float64)
        norm = tl.load(norms + q, mask=here, other=0.0)
        var = tl.load(variances + q, mask=here, other=1.0)
        n_eff = tl.load(ess + q, mask=here, other=1.0)
        pivot = tl.load(pivots + q, mask=here, other=0.0).to(tl.float64)
        total = tl.load(totals + q, mask=here, other=1.0)
        long = here & ~((held <= room) & (delta < far))
        tl.store(count + q, tl.where(long, cap + 1, held), mask=here)
        dense = long & (delta < close)
        stage = tl.where(dense, 3, tl.where(long, 4, 0))
        averages = tl.zeros((AT_ONCE,), tl.int32)  # a bit for each stage in which errors average out
        for j in tl.static_range(3):
            k = 2 - j
            to = table + 8 * k
            eta = tl.load(to) * size + tl.load(to + 1) * tl.minimum(size, tl.load(to + 2) * slope)
            eta += tl.load(to + 3) * slope
            error = eta * eta + tl.load(to + 4)
            allowed = tl.where(n_eff < some, tl.load(to + 5), tl.load(to + 6))
            averaged = error <= allowed * n_eff
            share = tl.minimum(allowed / error, 1.0)
            bound = pivot + tl.log(tl.maximum(total * share, TINY))
            if not SECOND:
                bound = tl.where(averaged, float("inf"), bound)
            tl.store(least + k * queries + q, tl.where(dense, bound, float("inf")).to(tl.float32), mask=here)
            stage = tl.where(dense & (averaged | (share * many >= 1.0)), k + 1, stage)
            averages += tl.where(averaged, 1 << k, 0)
        tl.store(stages + q, stage, mask=here)
        invalid = here & ~(norm < outside * tl.sqrt(var))
        sums += tl.where(column == 0, invalid.to(tl.int64)[:, None], 0)
        for k in tl.static_range(1, 5):
            sums += tl.where(column == k, (stage == k).to(tl.int64)[:, None], 0)
        for k in tl.static_range(3):
            heavy = dense & (stage <= k + 1) & ((averages >> k) % 2 == 0)
            sums += tl.where(column == 5 + k, heavy.to(tl.int64)[:, None], 0)
    tl.store(numbers + tl.arange(0, 8), tl.sum(sums, 0))


@triton.jit
def select(raw, gain, slope, half, log_w, n, queries, columns, threshold, counts, starts, totals, index, tiles, cap,
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
def weights(raw, gain, slope, half, log_w, n, queries, columns, shift, out, sums, tiles, along, along_gain,
             PLANES: tl.constexpr, SECOND: tl.constexpr, PRODUCT: tl.constexpr, WEIGHTED: tl.constexpr,
             ROWS: tl.constexpr):  # fmt: skip
    logit, row, col = _tile(raw, gain, slope, half, log_w, n, queries, columns, WEIGHTED, ROWS)
    logit -= tl.load(shift + row, mask=row < queries, other=0.0)[:, None]
    e = FULL * tl.exp(logit)
    inside = (row < queries)[:, None] & (col < columns)[None, :]
    here = row.to(tl.int64)[:, None] * columns + col[None, :]  # in the first plane; there is one row for each query
    high = e.to(tl.float16)
    tl.store(out + here, high, mask=inside)
    rounded = high.to(tl.float32)
    if PLANES == 2:
        low = (e - rounded).to(tl.float16)
        tl.store(out + (row + queries).to(tl.int64)[:, None] * columns + col[None, :], low, mask=inside)
        rounded += low.to(tl.float32)
    to, last = row * tiles + tl.program_id(0), queries * tiles
    tl.store(sums + to, tl.sum(rounded, 1), mask=row < queries)
    if SECOND:
        h = tl.load(half + col, mask=col < n, other=0.0)[None, :]
        tl.store(sums + last + to, tl.sum(rounded * h, 1), mask=row < queries)
        share = rounded / FULL
        tl.store(sums + 2 * last + to, tl.sum(share * share, 1), mask=row < queries)
        tl.store(sums + 3 * last + to, tl.sum(tl.where(share > 0.0, share * logit, 0.0), 1), mask=row < queries)
    if PRODUCT:
        p = tl.load(along + here, mask=inside & (col < n)[None, :], other=0.0)
        e = rounded * (p * tl.load(along_gain + row, mask=row < queries, other=0.0)[:, None])
        high = e.to(tl.float16)
        tl.store(out + (row + PLANES * queries).to(tl.int64)[:, None] * columns + col[None, :], high, mask=inside)
        rounded = high.to(tl.float32)
        if PLANES == 2:
            low = (e - rounded).to(tl.float16)
            tl.store(
                out + (row + (PLANES + 1) * queries).to(tl.int64)[:, None] * columns + col[None, :], low, mask=inside
            )
            rounded += low.to(tl.float32)
        tl.store(sums + 4 * last + to, tl.sum(rounded, 1), mask=row < queries)


@triton.jit
def shares(sums, shift, norms, variances, log_w, heavy, sparse, wanted, out, queries, tiles,
            WEIGHTED: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    q = tl.program_id(0)
    k = tl.arange(0, TILES)
    total = tl.sum(tl.load(sums + q * tiles + k, mask=k < tiles, other=0.0).to(tl.float64), 0)
    norm = tl.load(norms + q)
    z = tl.load(shift + q).to(tl.float64) - norm * norm / (2 * tl.load(variances + q)) + tl.log(total / FULL)
    if not WEIGHTED:
        z += tl.load(log_w)
    other = tl.load(heavy + q)
    top = tl.maximum(z, other)
    both = top + tl.log(tl.exp(z - top) + tl.exp(other - top))
    tl.store(out + q, 1.0 / tl.maximum(total, TINY))
    tl.store(out + queries + q, 1.0 / (1.0 + tl.exp(other - z)))
    tl.store(out + 2 * queries + q, tl.where(tl.load(wanted + q), both, tl.load(sparse + q)))


@triton.jit
def split(x, alphas, variances, center, factors, gains, slopes, norms, deltas, d, width, queries, unit, a, b, c, e,
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
def exact(values, table, first, d, counts, index, cap, x, alpha, var, log_w, out, raw, columns,
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
def mean(values, table, first, d, counts, index, cap, logit, log_z, out, TABLE: tl.constexpr):
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
def along(values, table, first, d, counts, index, cap, vector, out, TABLE: tl.constexpr):
    q = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + q)
    count = tl.where(count <= cap, count, 0)
    for s in range(tl.program_id(1) * SLOTS, count, tl.num_programs(1) * SLOTS):
        slot = s + tl.arange(0, SLOTS)
        held = slot < count
        i = tl.load(index + q * cap + slot, mask=held, other=0).to(tl.int64)
        sums = tl.zeros((SLOTS, MANY), tl.float64)
        for k in range(0, d, MANY):
            col = k + tl.arange(0, MANY)
            good = held[:, None] & (col < d)[None, :]
            y = _values(values, table, first, i[:, None] * d + col[None, :], good, TABLE)
            v = tl.load(vector + q * d + col, mask=col < d, other=0.0)
            sums += tl.where(good, y * v[None, :], 0.0)
        tl.store(out + q * cap + slot, tl.sum(sums, 1), mask=held)


@triton.jit
def second(values, table, first, d, counts, index, cap, logit, along, log_z, mean, trace, square, entropy, product,
            blocks, PRODUCT: tl.constexpr, TABLE: tl.constexpr):  # fmt: skip
    q = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + q)
    count = tl.where(count <= cap, count, 0)
    col = tl.program_id(1) * MANY + tl.arange(0, MANY)
    zeros = tl.zeros((MANY,), tl.float64)
    if count == 0:
        tl.store(mean + q * d + col, zeros, mask=col < d)
        tl.store(trace + q * blocks + tl.program_id(1), 0.0)
        tl.store(log_z + q, -float("inf"))
        tl.store(square + q, 0.0)
        tl.store(entropy + q, 0.0)
        if PRODUCT:
            tl.store(product + q * d + col, zeros, mask=col < d)
    else:
        top = tl.load(logit + q * cap)
        for s in range(0, count, LOT):
            slot = s + tl.arange(0, LOT)
            top = tl.maximum(top, tl.max(tl.load(logit + q * cap + slot, mask=slot < count, other=-1e300), 0))
        best = count
        for s in range(0, count, LOT):
            slot = s + tl.arange(0, LOT)
            lot = tl.load(logit + q * cap + slot, mask=slot < count, other=-1e300)
            best = tl.minimum(best, tl.min(tl.where(lot == top, slot, count), 0))
        next_one, light, squares, logs = top - top - 1e300, top - top, top - top, top - top
        for s in range(0, count, LOT):
            slot = s + tl.arange(0, LOT)
            lot = tl.load(logit + q * cap + slot, mask=slot < count, other=-1e300)
            lot = tl.where(slot == best, -1e300, lot)
            next_one = tl.maximum(next_one, tl.max(lot, 0))
            w = tl.exp(lot - top)
            light += tl.sum(w, 0)
            squares += tl.sum(w * w, 0)
            logs += tl.sum(tl.where(w > 0.0, w * (top - lot), 0.0), 0)
        total = 1.0 + light
        to = tl.load(index + q * cap + best).to(tl.int64) * d + col
        pivot = _values(values, table, first, to, col < d, TABLE)
        p = top
        if PRODUCT:
            p = tl.load(along + q * cap + best)
        sums = tl.zeros((SLOTS, MANY), tl.float64)
        spread = tl.zeros((SLOTS, MANY), tl.float64)
        moved = tl.zeros((SLOTS, MANY), tl.float64)
        mid = tl.zeros((SLOTS,), tl.float64)
        for s in range(0, count, SLOTS):
            slot = s + tl.arange(0, SLOTS)
            some = tl.load(logit + q * cap + slot, mask=slot < count, other=-float("inf"))
            heavy = (some - next_one > LIGHTEST) & (slot != best)
            if tl.max(heavy.to(tl.int32), 0) > 0:
                i = tl.load(index + q * cap + slot, mask=heavy, other=0).to(tl.int64)
                good = heavy[:, None] & (col < d)[None, :]
                gap = _values(values, table, first, i[:, None] * d + col[None, :], good, TABLE) - pivot[None, :]
                w = tl.where(heavy, tl.exp(some - top), 0.0)[:, None]
                sums += tl.where(good, w * gap, 0.0)
                spread += tl.where(good, w * gap * gap, 0.0)
                if PRODUCT:
                    step = tl.load(along + q * cap + slot, mask=heavy, other=0.0) - p
                    mid += tl.where(heavy, tl.exp(some - top) * step, 0.0)
                    moved += tl.where(good, w * step[:, None] * gap, 0.0)
        a = tl.sum(sums, 0) / total
        tl.store(mean + q * d + col, pivot + a, mask=col < d)
        inside = tl.where(col < d, tl.sum(spread, 0) / total - a * a, 0.0)
        tl.store(trace + q * blocks + tl.program_id(1), tl.sum(inside, 0))
        tl.store(log_z + q, top + tl.log(total))
        tl.store(square + q, (1.0 + squares) / (total * total))
        tl.store(entropy + q, tl.log(total) + logs / total)
        if PRODUCT:
            c = tl.sum(moved, 0) / total - a * (tl.sum(mid, 0) / total)
            tl.store(product + q * d + col, c, mask=col < d)


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
def finish(parts, others, slices, more, center, scale, share, wanted, heavy, sparse, out, queries, d, width):
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
def score(x, alpha, var, mean, out, d):
    q = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * MOST + tl.arange(0, MOST)
    m = tl.load(mean + q * d + col, mask=col < d, other=0.0)
    s = (tl.load(alpha + q) * m - tl.load(x + q * d + col, mask=col < d, other=0.0)) / tl.load(var + q)
    tl.store(out + q * d + col, s.to(out.dtype.element_ty), mask=col < d)
