r"""The GPU path: fp16 products screen the points, exact values decide (docs/theory.md, §2.5).

One product of :mod:`~vkernel.posterior.gpu.fp16` gives all logits within a proven :math:`\delta`. Each query takes the
first stage that is accurate for it:

1. **sparse**: few points may matter; these *candidates* are evaluated in float64 from the stored values. They are all
   points within a window of the largest logit :math:`L` (for covariances: of the second largest). A narrow window is
   tried; it is certified where the others sum up to :math:`\sum e^{\hat l_i} \le e^{\hat L - 16 - 2 \delta}` by
   computed logits: less than :math:`e^{-16}` of the weight is missing. Else it is :math:`\log n + 16 + 2\delta`.
2. **light**: many points, none of which matters by itself. The products with the fp16 residuals are added, and the
   weights, as sums of two fp16 numbers, are multiplied by the points in slices of 8,192. With independent errors of
   logits :math:`\eta`, of shares :math:`\nu` and of points :math:`R` (relative to their spread), :math:`\epsilon^2 =
   \eta^2 + \nu^2 + R^2`, and a floor :math:`f`, all measured on the data, the error of the mean is
   :math:`\sqrt{\epsilon^2 / n_\mathrm{eff} + f^2}`: this stage is taken where that is below ``TOLERANCE``.
3. **full**: otherwise both residuals of the data are used. If that is accurate for all queries, stage 2 is taken with
   them; else points heavier than :math:`(\mathrm{tol}^2 - f^2) / \epsilon^2` are taken out and evaluated in float64,
   all others are as before, and the two parts are merged.
4. What has too many heavy points, or a large :math:`\delta`, takes the reference path: float32 and float64 products.

Where at most half of a batch is left for a stage, those queries continue as a batch of their own. The steps are Triton
kernels (:mod:`~vkernel.posterior.gpu.triton_steps`); for batches of one size they are recorded as CUDA graphs."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import threading
import warnings
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.graphs import Recorder
from vkernel.posterior.dense import MARGIN, Block, Dense
from vkernel.posterior.gpu import fp16
from vkernel.posterior.gpu.fp16 import FULL, TINY, WIDE, FP16Points, Logits, Loss
from vkernel.posterior.weights import NARROW, CentredPoints, Moments, Queries, SparseWeights, Weights, blocks, reduce

__all__ = ["GPUPath", "trusted_path"]
Take = Callable[[str, Callable[[], Any]], Any]  # takes a step of this name, or replays it
Staged = tuple[Moments, Tensor, Tensor]  # moments, scores, and which queries need the reference path
Level = Tensor | float  # α or σ², one for each query or one for all
AGREE = 5e-5  # of the data's radius, between the GPU path and the reference path
NARROWER = 4.0  # the narrow window is MARGIN + NARROWER; it is tried before MARGIN + log n
TOLERANCE, FINE = 1.5e-5, 7e-7  # largest error of the mean / spread of the data, for n_eff above and below SOME
SOME = 64.0  # n_eff above which the error may be TOLERANCE
CLOSE = 4.0  # largest δ of stage 2 and 3: fp16 weights might overflow beyond it
MOST, LONG = 8192, 2048  # most candidates of a query; LONG if their mean over the batch is within the cap
HEAVY = 1024  # places for heavy points of one query in stage 3, at least
BALANCE = 190.0  # fp16 operations in the time that one byte is read
FAR = 1e30  # logits beyond this are left to float64
OUTSIDE = 1e15  # |x - αc| / σ beyond which float64 cannot distinguish points
FEWEST = 16  # queries of the smallest batch that continues by itself
SIZES = 6  # sizes of batches whose graphs are kept
LAUNCHED = 65_535  # queries of one launch: the most blocks that CUDA allows along the second axis of a grid
TRIED = 64, 256  # queries of the batches, a small and a large one, by which errors are measured


@dataclass
class Screened:
    """A screened batch has logits and candidates, ``count (B,)`` and ``index (B, cap)``."""

    logits: Logits
    count: Tensor
    index: Tensor
    first: Tensor  # the largest logit, (B,)
    total: Tensor  # the weight relative to it
    ess: Tensor  # n_eff


@dataclass
class Sparse:
    """Stage 1 has moments and scores, and which queries continue to which stage, ``(B,)``."""

    seen: Screened
    moments: Moments
    score: Tensor
    light: Tensor
    full: Tensor
    reference: Tensor
    numbers: Tensor  # of queries: invalid; of each later stage; of the third with heavy points despite both residuals


class Recording(Recorder):
    """A batch of queries stays at one place in memory for CUDA graphs."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        wide = torch.empty_like(x, dtype=WIDE, memory_format=torch.contiguous_format)
        self.queries = Queries(wide, wide.new_empty(len(x)), wide.new_empty(len(x)))


class Recordings:
    """Keep one recording for each size and precision of batch that was used lately; a copy is empty."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a batch may hold back some of its queries, which continue as another
        self.kept: dict[tuple[int, torch.dtype], Recording] = {}

    def __reduce__(self) -> tuple[type[Recordings], tuple[()]]:
        return Recordings, ()

    @contextlib.contextmanager
    def at(self, x: Tensor, alpha: Level, var: Level) -> Iterator[tuple[Queries, Take]]:
        """Fill the recording for batches like ``x`` with these queries; other streams wait until it is free."""
        with self.lock, torch.cuda.device(x.device):
            key = len(x), x.dtype
            recording = self.kept.pop(key) if key in self.kept else Recording(x)
            self.kept[key] = recording  # the last in the order of use
            if len(self.kept) > SIZES:
                del self.kept[next(iter(self.kept))]
            torch.cuda.current_stream().wait_event(recording.free)
            recording.queries.x.copy_(x)
            for place, level in ((recording.queries.alpha, alpha), (recording.queries.var, var)):
                place.fill_(level) if isinstance(level, float) else place.copy_(level)
            yield recording.queries, recording.take
            recording.free.record()


class GPUPath:
    """The GPU path holds the points of the reference path in fp16, and takes the stages above."""

    graphs = True  # steps can be recorded

    def __init__(self, dense: Dense) -> None:
        self.dense, self.points = dense, dense.points
        self.fp16, self.recordings = FP16Points(self.points), Recordings()
        self.losses: dict[tuple[bool, bool], Loss] = {}
        sums = (8 if self.fp16.low is None else 12) * self.fp16.slices + 32
        self.bytes_per_query = 16 * self.fp16.rows + sums * self.fp16.width
        self.most = min(LAUNCHED, max(1, self.points.memory // 8 // self.bytes_per_query))  # queries at once
        for size in {max(1, min(a, self.most)) for a in TRIED} if self.fp16.complete else ():
            self._calibrate(fp16.typical(self.fp16, size))

    @property
    def steps(self) -> ModuleType:
        """Import the kernels where Triton is; not held, since engines are copied and pickled."""
        from vkernel.posterior.gpu import triton_steps

        return triton_steps

    @property
    def usable(self) -> bool:
        """Return whether this process sums fp16 products in float32, as the bound assumes."""
        return not torch.backends.cuda.matmul.allow_fp16_accumulation

    def cap(self, queries: int) -> int:
        """Return the number of candidates beyond which the dense stages are cheaper than reading these twice."""
        n, d = self.points.n, self.fp16.width
        dense = max(4 * n * d, 8 * queries * n * d / BALANCE)
        each = max(4, self.fp16.values.itemsize)  # of bytes, looking them up takes longer than reading
        return int(2 ** math.floor(math.log2(min(max(dense / (2 * queries * d * each) / 2, 64), MOST))))

    @torch.inference_mode(False)
    @torch.no_grad()
    def score(self, x: Tensor, alpha: Level, var: Level) -> Tensor | None:
        r"""Return :math:`(\alpha m - x) / \sigma^2` for ``x (B, d)``; ``None`` if a query is NaN or too far away."""
        out = torch.empty_like(x)
        for rows in blocks(len(x), self.most):
            levels = [a if isinstance(a, float) else a[rows] for a in (alpha, var)]
            with self._placed(x[rows], levels[0], levels[1]) as (queries, take):
                _, score, invalid = self._stages(queries, x.dtype, take)
                if invalid:
                    return None
                out[rows] = score
        return out

    @torch.inference_mode(False)  # what is kept between calls must serve calls in any mode
    @torch.no_grad()
    def moments(self, queries: Queries) -> Moments:
        """Return log z and the mean of every query."""
        out = Moments.empty(queries.x)
        for rows in blocks(len(queries), self.most):
            with self._placed(queries.x[rows], queries.alpha[rows], queries.var[rows]) as (block, take):
                moments, _, _ = self._stages(block, WIDE, take)
                out.log_z[rows], out.mean[rows] = moments.log_z, moments.mean
        return out

    def _placed(self, x: Tensor, alpha: Level, var: Level) -> contextlib.AbstractContextManager[tuple[Queries, Take]]:
        """Return queries and how to take a step with them: directly, or from the recordings of this size of batch."""
        if self.graphs and x.is_cuda and self.bytes_per_query * len(x) <= self.points.memory // 12:
            return self.recordings.at(x, alpha, var)
        wide = [x.new_full((len(x),), a, dtype=WIDE) if isinstance(a, float) else a for a in (alpha, var)]
        return contextlib.nullcontext((Queries(x.to(WIDE), *wide), lambda name, step: step()))

    def _stages(self, queries: Queries, dtype: torch.dtype, take: Take) -> tuple[Moments, Tensor, bool]:
        """Return the moments and scores of all queries, and whether some query is NaN or too far away."""
        sparse: Sparse = take("sparse", lambda: self.sparse(queries, dtype))
        invalid, light, full, others, heavy = sparse.numbers.tolist()
        out, score, reference, size = sparse.moments, sparse.score, sparse.reference, len(queries)
        if invalid or light + full + others == 0:
            return out, score, bool(invalid)
        apart = torch.zeros_like(reference)
        if size > fp16.SMALL and light + full <= size // 2:
            apart = sparse.light | sparse.full
        elif light or full:
            low = full > 0 and self.fp16.low is not None  # both residuals leave the fewest heavy points, often none
            third = full > 0 and (heavy > 0 or not low)  # the stage; the second otherwise
            name = f"dense, {third}, {low}"
            out, score, reference = take(name, lambda: self._dense(queries, sparse, dtype, third, low))
        for mask, evaluate in ((reference, self.dense.moments), (apart, self._apart)):
            rows = mask.nonzero().squeeze(-1)
            if len(rows):
                out.put(rows, evaluate(queries[rows]))
                score = self.steps.score(queries, out.mean, dtype)
        return out, score, False

    def _apart(self, queries: Queries) -> Moments:
        """Return the moments of some queries as a batch of their own, filled up to one of few sizes."""
        count = len(queries)
        filled = torch.arange(max(FEWEST, 1 << (count - 1).bit_length()), device=queries.x.device) % count
        return self.moments(queries[filled]).take(slice(count))

    def screen(self, queries: Queries, covariance: bool) -> Screened:
        """Return the logits of all points from one product, and certified candidates."""
        steps, size = self.steps, len(queries)
        logits: Logits = steps.split(queries, self.fp16)
        first, second = steps.peaks(logits, covariance)
        # A single point has no second: then nothing can be dropped, and nothing need be.
        reference = torch.where(second.isfinite(), second, first) if covariance else first
        base = reference - 2 * logits.delta - MARGIN
        thresholds = torch.stack([base - NARROWER, base - math.log(self.points.n)]).float()
        counts, (below, total, square) = steps.survey(logits, thresholds, first)
        certified = below.to(WIDE).log() <= base - first - 1e-3  # which is more than float32 sums lose
        usual = self.cap(size)
        cap = max(usual, min(LONG, MOST))
        counts = torch.where(certified[:, None], *counts)
        count, index = steps.select(logits, torch.where(certified, *thresholds), cap, counts)
        # A few queries may have many candidates, if not all have.
        fits = count.clamp_max(cap).sum() <= size * usual
        short = (count <= torch.where(fits, cap, usual)) & (logits.delta < FAR)
        return Screened(logits, torch.where(short, count, cap + 1), index, first, total, total.square() / square)

    def sparse(self, queries: Queries, dtype: torch.dtype = WIDE) -> Sparse:
        """Take stage 1 for all queries."""
        seen, steps = self.screen(queries, False), self.steps

        def averages_out(low: bool) -> Tensor:  # which means stage 2 would make accurately enough
            return self.error(seen, low) <= self.allowed(seen, low) * seen.ess

        exact = steps.exact(queries, self.fp16, seen.count, seen.index)
        moments = Moments(*steps.mean(self.fp16, seen.count, seen.index, exact))
        long = seen.count > seen.index.shape[1]
        many = long & (seen.logits.delta < CLOSE) if self.fp16.complete else torch.zeros_like(long)
        light = many & averages_out(False)
        averaged = light if self.fp16.low is None else many & averages_out(True)
        full, invalid = many ^ light, ~(seen.logits.norm < OUTSIDE * queries.var.sqrt())
        numbers = torch.stack([invalid, light, full, long ^ many, full & ~averaged]).sum(1)
        return Sparse(seen, moments, steps.score(queries, moments.mean, dtype), light, full, long ^ many, numbers)

    def weights(self, queries: Queries, covariance: bool) -> Generator[Weights, None, Tensor]:
        """Yield all weights of the queries that have few candidates; return the numbers of the others."""
        rest = [torch.zeros(0, dtype=torch.long, device=queries.x.device)]
        for block in blocks(len(queries), self.most):
            seen = self.screen(queries[block], covariance)
            index, long = seen.index, seen.count > seen.index.shape[1]
            held = torch.arange(index.shape[1], device=index.device) < seen.count.masked_fill(long, 0)[:, None]
            q, k = held.nonzero().unbind(1)
            if len(q):
                exact = self.steps.exact(queries[block], self.fp16, seen.count, index)
                yield SparseWeights(self.points.data, q + block.start, index[q, k].long(), exact[q, k])
            rest.append(long.nonzero().squeeze(-1) + block.start)
        return torch.cat(rest)

    def _calibrate(self, queries: Queries) -> None:
        """Measure the losses for batches of this size; of means, which stage 2 takes, for some of the queries."""
        points, some = self.fp16, slice(min(fp16.MEANS, len(queries)))
        block, every = Block(self.points, queries[some], False), torch.arange(some.stop, device=queries.x.device)
        weights = (block.float64(every, span) for span in self.points.spans())
        exact = reduce(weights, queries.x[some]).mean - points.center
        for low in {False, points.low is not None}:
            key = len(queries) <= fp16.SMALL, low
            loss = self.losses[key] = fp16.measured(self.steps.split(queries, points), queries, low)
            sparse = self.sparse(queries)
            mean = self._dense(queries, replace(sparse, light=sparse.light | True), WIDE, False, low)[0].mean[some]
            lost, rest = fp16.fit(mean - points.center, exact)
            expected = (self.error(sparse.seen, low) / sparse.seen.ess)[some]
            more = (rest.norm(dim=1) / points.spread).square() - expected
            self.losses[key] = replace(loss, means=lost, floor=float(more.clamp_min(0.0).max().sqrt()))

    def loss(self, queries: int, low: bool) -> Loss:
        """Return the measured errors for so many queries."""
        return self.losses.get((queries <= fp16.SMALL, low), Loss())

    def allowed(self, seen: Screened, low: bool) -> Tensor:
        """Return the square of the mean's error, in units of the spread, that single points may make, ``(B,)``."""
        floor = self.loss(len(seen.count), low).floor
        fine, coarse = (max(tolerance**2 - floor**2, TINY) for tolerance in (FINE, TOLERANCE))
        if floor < 2 * FINE:  # if the floor is the error, single points should not add to it
            fine = max(fine, FINE**2 / 4)
        one = torch.ones_like(seen.logits.norm)  # float64: in float32 the smallest allowance is zero
        return torch.where(seen.ess < SOME, fine * one, coarse * one)

    def error(self, seen: Screened, low: bool) -> Tensor:
        """Return ε², the mean square of the error of one point's part in a mean, relative to it, ``(B,)``."""
        loss, y = self.loss(len(seen.count), low), self.fp16.radius
        size, slope = seen.logits.size, seen.logits.slope
        eta = loss.noise * y * size + loss.pattern * y * torch.minimum(size, 2 * y * slope) + 2.0**-25 * y * y * slope
        residual = self.fp16.last if low else self.fp16.residual
        return eta.square() + (loss.share**2 + (residual / self.fp16.spread) ** 2)

    def _dense(self, queries: Queries, sparse: Sparse, dtype: torch.dtype, full: bool, low: bool) -> Staged:
        """Take stage 2 or 3 for all queries, since most of its cost is shared."""
        seen, steps, points, loss = sparse.seen, self.steps, self.fp16, self.loss(len(queries), low)
        points.refine(seen.logits, low)
        logits = replace(seen.logits, gain=seen.logits.gain * (1 + loss.logits))
        shift = seen.first + logits.delta.float()  # no weight is larger than this
        wanted, reference = sparse.light | sparse.full, sparse.reference
        heavy = Moments(torch.full_like(sparse.moments.log_z, -torch.inf), sparse.moments.mean)
        if full:
            share = self.allowed(seen, low) / self.error(seen, low)
            least = seen.first + (seen.total * share.clamp_max(1.0)).log()
            least = torch.where(sparse.full, least, torch.inf).float()
            cap = min(MOST, max(HEAVY, self.cap(len(queries))))
            count, index = steps.select(logits, least, cap, steps.survey(logits, least.expand(2, -1))[0][0])
            heavy = Moments(*steps.mean(points, count, index, steps.exact(queries, points, count, index, logits)))
            shift, reference = torch.minimum(shift, least), reference | (wanted & (count > cap))
        weights, total = steps.weights(logits, shift)
        log_z = shift - logits.norm.square() / (2 * queries.var) + (total / FULL).log()
        if not self.points.weighted:
            log_z += self.points.log_w[0]
        scale = points.unit * (1 + loss.means) / total.clamp_min(TINY)
        parts, share = points.sums(weights, low), torch.sigmoid(log_z - heavy.log_z)
        mean = steps.finish(points, parts, scale, share, wanted, heavy.mean, sparse.moments.mean)
        log_z = torch.where(wanted, torch.logaddexp(heavy.log_z, log_z), sparse.moments.log_z)
        return Moments(log_z, mean), steps.score(queries, mean, dtype), reference


def suitable(points: CentredPoints) -> bool:
    """Return whether the points lie on a GPU that torch (2.8 or later) and Triton support, with room for fp16."""
    copied = 8 * points.n * points.d if fp16.in_place(points.data) is None else 0
    room = 2 * (points.n + 8192) * (points.d + 64) + copied <= points.memory // 2
    if points.device.type != "cuda" or points.n == 0 or points.d < NARROW or not points.data.in_memory or not room:
        return False
    try:
        square = torch.ones((8, 8), dtype=torch.float16, device=points.device)
        fp16.add_product(fp16.product(square, square), square, square)
    except (TypeError, RuntimeError):
        return False
    return importlib.util.find_spec("triton") is not None


def trusted_path(dense: Dense) -> GPUPath | None:
    """Return the GPU path where it is suitable; warn instead where it fails or disagrees with the reference path."""
    points = dense.points  # kernels are compiled where they run, for GPUs and versions that were never tested
    if not suitable(points):
        return None
    radius = max(points.radius, 1e-9 * float(points.center.norm()), 1e-30)  # all points may be one
    some = torch.linspace(0, points.n - 1, 4, device=points.device).long()
    y, one = points.data.take(some).double(), torch.ones(4, dtype=WIDE, device=points.device)
    noise, off = rng.normals(some[:, None], torch.arange(points.d, device=points.device)), []
    try:
        path = GPUPath(dense)
        for sigma in (0.1 * radius / math.sqrt(points.d), 3 * radius / math.sqrt(points.d)):
            queries = Queries(y + sigma * noise, one, one * sigma**2)
            off.append(float((path.moments(queries).mean - dense.moments(queries).mean).norm(dim=-1).max()) / radius)
    except Exception as error:  # a compiler's, a driver's, or no memory left: of many kinds, and none is the user's
        warnings.warn(f"The GPU path cannot be used here, {type(error).__name__}: {error}", stacklevel=3)
        return None
    if all(a < AGREE for a in off):
        return path
    warnings.warn(f"The GPU path is off by {max(off):.1g} here and is not used.", stacklevel=3)
    return None
