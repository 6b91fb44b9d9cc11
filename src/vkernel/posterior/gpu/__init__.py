r"""The GPU path: fp16 products screen the points, exact values decide (docs/theory.md, §2.5).

One product of :mod:`~vkernel.posterior.gpu.fp16` gives all logits within a proven :math:`\delta`. Each query takes the
first stage that is accurate for it:

1. **sparse**: few points may matter; these *candidates* are evaluated in float64 from the stored values. They are all
   points within a window of the largest logit :math:`L` (for covariances: of the second largest). A narrow window is
   tried; it is certified where the others sum up to :math:`\sum e^{\hat l_i} \le e^{\hat L - 16 - 2 \delta}` by
   computed logits: less than :math:`e^{-16}` of the weight is missing. Else it is :math:`\log n + 16 + 2\delta`.
2. **light**: many points. The logits are refined, and the weights, as fp16 numbers, are multiplied by the points in
   slices of 8,192. With independent errors of logits :math:`\eta`, of shares :math:`\nu`, of points :math:`R` (relative
   to their spread) and of the rounding of weights :math:`\tau`, :math:`\epsilon^2 = \eta^2 + \nu^2 + R^2 + \tau^2`,
   and a floor :math:`f`, all measured on the data, the error of the mean is :math:`\sqrt{\epsilon^2 / n_\mathrm{eff} +
   f^2}`. Where that is above the tolerance, points heavier than :math:`(\mathrm{tol}^2 - f^2) / \epsilon^2` are taken
   out and evaluated in float64, all others are as before, and the two parts are merged.
3. **middle**: where too many points would be so heavy, the same with the residuals of the data in the logits.
4. **full**: the same with these residuals in the sums too, and with weights that are sums of two fp16 numbers.
5. What has too many heavy points even so, or a large :math:`\delta`, takes the reference path: float32 and float64.

Second moments (:mod:`~vkernel.posterior.gpu.second`) take the same stages. A batch takes one dense stage; where that
would be for few of its queries, they continue as a batch of their own. The steps are Triton kernels
(:mod:`~vkernel.posterior.gpu.triton_steps`); for batches of one size they are recorded as CUDA graphs
(:mod:`~vkernel.posterior.gpu.batches`)."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import TypeVar

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.posterior.dense import Block, Dense
from vkernel.posterior.gpu import fp16
from vkernel.posterior.gpu.batches import Batch, How, Level, Recordings
from vkernel.posterior.gpu.fp16 import ROUNDED, STAGES, TINY, WIDE, FP16Points, Logits, Loss
from vkernel.posterior.gpu.tables import Assigned, Listed, Rules
from vkernel.posterior.weights import (
    NARROW,
    CentredPoints,
    Moments,
    Queries,
    SparseWeights,
    Want,
    Weights,
    blocks,
    reduce,
)

__all__ = ["GPUPath", "trusted_path"]
Result = TypeVar("Result")
TRACE: Want = frozenset({"trace"})
AGREE = 5e-5  # of the data's radius, or its square, between the GPU path and the reference path
TOLERANCE, FINE = 1e-5, 7e-7  # largest error of the mean / spread of the data, for n_eff above and below 64
CLOSE = 4.0  # largest δ of the dense stages: fp16 weights might overflow beyond it
MOST, LONG = 8192, 2048  # most candidates of a query; LONG if their mean over the batch is within the cap
HEAVY = 1024  # places for heavy points of one query, at least
BALANCE = 190.0  # fp16 operations in the time that one byte is read
FEWEST = 16  # queries of the smallest batch that continues by itself
FEW = 8  # of so many queries, one may continue in a finer stage by itself
LAUNCHED = 65_535  # queries of one launch: the most blocks that CUDA allows along the second axis of a grid
TRIED = 64, 256  # queries of the batches, a small and a large one, by which errors are measured


@dataclass
class Screened:
    """A screened batch has logits and candidates, ``index (B, cap)``, and each query a stage."""

    logits: Logits
    index: Tensor
    first: Tensor  # the largest logit, (B,)
    ess: Tensor  # n_eff, of covariances that of all points but the heaviest
    stage: Assigned


@dataclass
class Sparse:
    """The first step has the moments of the sparse stage, their scores, and the stage of all queries."""

    seen: Screened
    moments: Moments
    score: Tensor

    @property
    def numbers(self) -> Tensor:
        return self.seen.stage.numbers


@dataclass
class Summed:
    """The second step has the moments of the queries up to its stage, their scores, and which queries, of how many,
    are left to the reference path."""

    moments: Moments
    score: Tensor
    reference: Tensor
    left: Tensor


class GPUPath:
    """The GPU path holds the points of the reference path in fp16, and takes the stages above."""

    graphs = True  # steps can be recorded

    def __init__(self, dense: Dense) -> None:
        self.dense, self.points = dense, dense.points
        self.fp16, self.recordings = FP16Points(self.points), Recordings()
        self.losses: dict[tuple[bool, int], Loss] = {}  # of a small batch, and a stage
        self.tables: dict[bool, Tensor] = {}
        sums = (8 if self.fp16.low is None else 12) * self.fp16.slices + 32
        self.bytes_per_query = 16 * self.fp16.rows + sums * self.fp16.width
        self.most = min(LAUNCHED, max(1, self.points.memory // 8 // self.bytes_per_query))  # queries at once
        measurable = self.fp16.complete and self.fp16.radius > 0  # of equal points there is no error to measure
        for size in {max(1, min(a, self.most)) for a in TRIED} if measurable else ():
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

    def rules(self, queries: int, second: bool) -> Rules:
        """Return the rules by which a batch of so many queries is assigned to stages."""
        small, usual = queries <= fp16.SMALL, self.cap(queries)
        if small not in self.tables:
            self.tables[small] = torch.stack([self._limits(self.loss(queries, k), k) for k in range(len(STAGES))])
        return Rules(
            self.tables[small], max(usual, min(LONG, MOST)), usual, second, CLOSE if self.fp16.complete else -1.0
        )

    def _limits(self, loss: Loss, stage: int) -> Tensor:
        """Return a row of the table of :class:`~vkernel.posterior.gpu.tables.Rules`."""
        y, spread = self.fp16.radius, self.fp16.spread
        residual, rounded = (self.fp16.last, 0.0) if STAGES[stage].sums else (self.fp16.residual, ROUNDED)
        others = loss.share**2 + (residual / spread) ** 2 + rounded**2
        fine, coarse = (max(tolerance**2 - loss.floor**2, TINY) for tolerance in (FINE, TOLERANCE))
        if loss.floor < 2 * FINE:  # if the floor is the error, single points should not add to it
            fine = max(fine, FINE**2 / 4)
        row = [loss.noise * y, loss.pattern * y, 2 * y, 2.0**-25 * y * y, others, fine, coarse, 0.0]
        return torch.tensor(row, dtype=WIDE, device=self.points.device)

    def evaluate(self, x: Tensor, alpha: Level, var: Level, mean: bool) -> Tensor | None:
        r"""Return scores :math:`(\alpha m - x) / \sigma^2` for ``x (B, d)``, or with ``mean`` the means m, like x;
        ``None`` if a query is NaN or too far away."""

        def work(batch: Batch) -> Tensor | None:
            moments, score, invalid = self._stages(batch, x.dtype, True)
            return None if invalid else (moments.mean if mean else score).to(x.dtype, copy=True)

        parts = []
        with ordinary():
            for rows in blocks(len(x), self.most):
                one, two = (a if isinstance(a, float) else a[rows] for a in (alpha, var))
                part = self._placed(x[rows], one, two, None, work)
                if part is None:
                    return None
                parts.append(part)
            return parts[0] if len(parts) == 1 else torch.cat([x[:0], *parts])

    def moments(self, queries: Queries, want: Want = frozenset(), vector: Tensor | None = None) -> Moments:
        """Return log z and the mean of every query, and what is wanted but the diagonal."""
        from vkernel.posterior.gpu.second import second_moments  # which imports this module

        second = bool(want) or vector is not None
        with ordinary():
            out = Moments.empty(queries.x, want, vector)
            for rows in blocks(len(queries), max(1, self.most // 3) if second else self.most):

                def work(batch: Batch, rows: slice = rows) -> None:
                    if second:
                        out.put(rows, second_moments(self, batch, want, vector is not None))
                    else:
                        out.put(rows, self._stages(batch, WIDE, False)[0])

                some, along = queries[rows], None if vector is None else vector[rows]
                self._placed(some.x, some.alpha, some.var, along, work, 3 if second else 1)
        return out

    def _placed(
        self,
        x: Tensor,
        alpha: Level,
        var: Level,
        vector: Tensor | None,
        work: Callable[[Batch], Result],
        times: int = 1,
    ) -> Result:
        """Return ``work(batch)``, where sizes that fit are recorded; a query takes ``times`` the memory of a mean."""
        if not self.graphs or not x.is_cuda or times * self.bytes_per_query * len(x) > self.points.memory // 12:
            wide = [x.new_full((len(x),), a, dtype=WIDE) if isinstance(a, float) else a for a in (alpha, var)]
            return work(Batch(Queries(x.to(WIDE), *wide), vector))
        here = torch.cuda.current_device() == x.device.index
        with self.recordings.lock, contextlib.nullcontext() if here else torch.cuda.device(x.device):
            return work(self.recordings.at(x, alpha, var, vector))

    def _stages(self, batch: Batch, dtype: torch.dtype, refuse: bool) -> tuple[Moments, Tensor, bool]:
        """Return the moments and scores of all queries, or with ``refuse`` whether one is NaN or too far away."""
        queries = batch.queries
        steps = partial(self.sparse, queries, dtype), partial(self._dense, queries, dtype)
        sparse, dense, how, numbers = batch.take("mean", *steps, partial(chosen, len(queries)))
        found = sparse if dense is None else dense
        out, score, stage = found.moments, found.score, sparse.seen.stage
        if numbers[0] and refuse:
            return out, score, True
        for mask, evaluate in rest(stage, how, numbers, None if dense is None else dense.reference):
            rows = mask.nonzero().squeeze(-1)
            out.put(rows, (self._apart if evaluate else self.dense.moments)(queries[rows]))
            score = self.steps.score(queries, out.mean, dtype)
        return out, score, False

    def _apart(self, queries: Queries) -> Moments:
        """Return the moments of some queries as a batch of their own, filled up to one of few sizes."""
        return self.moments(queries[filled(len(queries), queries.x.device)]).take(slice(len(queries)))

    def screen(self, queries: Queries, second: bool) -> Screened:
        """Return the logits of all points from one product, certified candidates, and the stages of the queries."""
        steps, rules = self.steps, self.rules(len(queries), second)
        logits: Logits = steps.split(queries, self.fp16)
        first, pivot, thresholds = steps.levels(logits, second)
        counts, sums = steps.survey(logits, thresholds, pivot)
        listed, total, ess = steps.choose(logits, counts, sums, thresholds, second)
        index = steps.select(logits, listed, rules.cap)
        return Screened(
            logits, index, first, ess, steps.assign(queries, logits, listed.count, pivot, total, ess, rules)
        )

    def sparse(self, queries: Queries, dtype: torch.dtype = WIDE) -> Sparse:
        """Take stage 1 for all queries."""
        seen, steps = self.screen(queries, False), self.steps
        exact = steps.exact(queries, self.fp16, seen.stage.count, seen.index)
        moments = Moments(*steps.mean(self.fp16, seen.stage.count, seen.index, exact))
        return Sparse(seen, moments, steps.score(queries, moments.mean, dtype))

    def weights(self, queries: Queries, covariance: bool) -> Generator[Weights, None, Tensor]:
        """Yield all weights of the queries that have few candidates; return the numbers of the others."""
        rest = [torch.zeros(0, dtype=torch.long, device=queries.x.device)]
        for block in blocks(len(queries), self.most):
            seen = self.screen(queries[block], covariance)
            count, index = seen.stage.count, seen.index
            long = count > index.shape[1]
            held = torch.arange(index.shape[1], device=index.device) < count.masked_fill(long, 0)[:, None]
            q, k = held.nonzero().unbind(1)
            if len(q):
                exact = self.steps.exact(queries[block], self.fp16, count, index)
                yield SparseWeights(self.points.data, q + block.start, index[q, k].long(), exact[q, k])
            rest.append(long.nonzero().squeeze(-1) + block.start)
        return torch.cat(rest)

    def _calibrate(self, queries: Queries) -> None:
        """Measure the losses for batches of this size; of means for some of the queries."""
        points, some, small = self.fp16, slice(min(fp16.MEANS, len(queries))), len(queries) <= fp16.SMALL
        block, every = Block(self.points, queries[some], False), torch.arange(some.stop, device=queries.x.device)
        weights = (block.float64(every, span) for span in self.points.spans())
        exact = reduce(weights, queries.x[some]).mean - points.center
        lost: float | None = None  # of means; all stages lose as much, but the rounding of the others hides that
        for k in reversed(range(len(STAGES))):
            loss = self.losses[small, k] = fp16.measured(self.steps.split(queries, points), queries, STAGES[k])
            self.tables.pop(small, None)
            sparse = self.sparse(queries)
            sparse.seen.stage.stage.fill_(1)
            mean = self._dense(queries, WIDE, sparse, (k, False)).moments.mean[some]
            lost, more = fp16.fit(mean - points.center, exact, lost)
            expected = (self.error(sparse.seen.logits, k) / sparse.seen.ess)[some]
            floor = (more.norm(dim=1) / points.spread).square() - expected
            self.losses[small, k] = replace(loss, means=lost, floor=float(floor.clamp_min(0.0).max().sqrt()))
        self.tables.pop(small, None)

    def loss(self, queries: int, stage: int) -> Loss:
        """Return the measured errors of a dense stage for so many queries."""
        return self.losses.get((queries <= fp16.SMALL, stage), Loss())

    def error(self, logits: Logits, stage: int) -> Tensor:
        """Return ε², the mean square of the error of one point's part in a mean, relative to it, ``(B,)``."""
        a, b, c, e, f, *_ = self.rules(len(logits.raw), False).table[stage].tolist()
        slope = logits.slope.to(WIDE)
        return (a * logits.size + b * torch.minimum(logits.size, c * slope) + e * slope).square() + f

    def heavy(self, seen: Screened, stage: int) -> tuple[Listed, Tensor]:
        """Return the points that are too heavy for a dense stage, once logits are refined, and places for them."""
        listed: Listed = self.steps.above(seen.logits, seen.stage.least[stage])
        return listed, self.steps.select(seen.logits, listed, min(MOST, max(HEAVY, self.cap(len(seen.first)))))

    def _dense(self, queries: Queries, dtype: torch.dtype, sparse: Sparse, how: How) -> Summed:
        """Take a dense stage for all queries, since most of its cost is shared."""
        (k, heavy), seen, steps, points = how, sparse.seen, self.steps, self.fp16
        stage, loss = STAGES[k], self.loss(len(queries), k)
        points.refine(seen.logits, stage)
        logits = replace(seen.logits, gain=seen.logits.gain * (1 + loss.logits))
        seen, wanted, reference = replace(seen, logits=logits), seen.stage.between(1, k + 1), seen.stage.between(4, 4)
        shift = seen.first + logits.delta.float()  # no weight is larger than this
        apart = Moments(torch.full_like(sparse.moments.log_z, -torch.inf), sparse.moments.mean)
        if heavy:
            listed, index = self.heavy(seen, k)
            exact = steps.exact(queries, points, listed.count, index, logits)
            apart = Moments(*steps.mean(points, listed.count, index, exact))
            shift = torch.minimum(shift, listed.threshold)
            reference = reference | (wanted & (listed.count > index.shape[1]))
        weights, sums = steps.weights(logits, shift, stage.planes)
        each, share, log_z = steps.shares(queries, logits, shift, sums, apart.log_z, sparse.moments.log_z, wanted)
        scale, parts = points.unit * (1 + loss.means) * each, points.sums(weights, stage)
        mean = steps.finish(points, parts, scale, share, wanted, apart.mean, sparse.moments.mean)
        return Summed(Moments(log_z, mean), steps.score(queries, mean, dtype), reference, reference.sum())


def chosen(size: int, numbers: list[int]) -> How | None:
    """Return the dense stage that a batch takes, and whether points are taken out, if it takes one."""
    dense = numbers[1:4]
    if sum(dense) == 0 or (size > fp16.SMALL and sum(dense) <= size // 2):
        return None
    few = size // FEW if size > fp16.SMALL else 0
    k = next(k for k in range(len(dense)) if sum(dense[k + 1 :]) <= few)
    return k, numbers[5 + k] > 0


def rest(
    stage: Assigned, how: How | None, numbers: list[int], reference: Tensor | None
) -> Generator[tuple[Tensor, bool]]:
    """Yield which queries are left to others: to the reference path, or (True) to a batch of their own."""
    if numbers[4] if reference is None else numbers[8]:
        yield stage.between(4, 4) if reference is None else reference, False
    first = 1 if how is None else how[0] + 2
    if sum(numbers[first:4]):
        yield stage.between(first, 3), True


@contextlib.contextmanager
def ordinary() -> Generator[None]:
    """Leave inference mode, since what is kept between calls must serve calls in any mode, and record no derivative.
    Entering a mode takes time: it is done where it must be."""
    inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()
    with inference, torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext():
        yield


def filled(count: int, device: torch.device) -> Tensor:
    """Return the numbers of so many queries, again from the first on up to one of few sizes of batches."""
    return torch.arange(max(FEWEST, 1 << (count - 1).bit_length()), device=device) % count


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
            ours = path.moments(queries, TRACE, noise).present()
            own = reduce(dense.weights(queries, lent=True), queries.x, TRACE, noise).present()
            off.append(float((path.moments(queries).mean - own["mean"]).norm(dim=1).max()) / radius)
            along = (ours["product"] - own["product"]).norm(dim=1) / noise.norm(dim=1)
            off += [float(gap.abs().max()) / radius / radius for gap in (ours["trace"] - own["trace"], along)]
    except Exception as error:  # a compiler's, a driver's, or no memory left: of many kinds, and none is the user's
        warnings.warn(f"The GPU path cannot be used here, {type(error).__name__}: {error}", stacklevel=3)
        return None
    if all(a < AGREE for a in off):
        return path
    warnings.warn(f"The GPU path is off by {max(off):.1g} here and is not used.", stacklevel=3)
    return None
