r"""The engine's path on a GPU: half-precision products screen, exact values decide (docs/theory.md, §2.5).

One product of :mod:`~vkernel.posterior.halves` gives all logits within a proven :math:`\delta`. Each query takes the
first rung that is good for it:

1. **few** points may matter: they are listed and evaluated in float64 from the stored values. A list holds what is
   within a window of the largest logit (for covariances: of the second largest), call it :math:`L`, and is complete by
   a certificate: what is not on it sums up to

   .. math:: \sum_{i \notin \mathrm{list}} e^{\hat l_i} \le e^{-16 - 2 \delta}\, e^{\hat L} ,

   so that, with true logits within :math:`\delta` of the computed :math:`\hat l`, less than :math:`e^{-16}` of the
   weight is missing. A narrow window is tried; a wide one, :math:`\log n + 16 + 2\delta`, always has it. The data were
   read once.
2. **light**: many points, none of which matters by itself. The products that were left out are added the cheapest way,
   and the weights, as numbers and rests, are multiplied by the points in slices of 8,192. With errors of single logits
   of size :math:`\eta`, of single shares of size :math:`\nu` and of single points of size :math:`R` (relative to their
   spread), together :math:`\epsilon^2 = \eta^2 + \nu^2 + R^2`, all independent, and a floor :math:`f` that nothing
   averages out (:mod:`~vkernel.posterior.calibration`), the mean errs by :math:`\sqrt{\epsilon^2 / n_\mathrm{eff} +
   f^2}`: this rung is taken where that is below ``TOLERANCE``.
3. **full**: otherwise points heavier than :math:`(\mathrm{tol}^2 - f^2) / \epsilon^2` are taken out and evaluated in
   float64, all others are as before, and the two parts are merged. If this is for many queries of which few points
   count, the most accurate way is taken, for it leaves the fewest heavy points.
4. What has too many heavy points, or a large :math:`\delta`, goes the engine's own way: float32 and float64 products.

Rung 1 is proven; 2 and 3 rest on an estimate, which is measured on these data when the engine is made. Where at most
half of a batch is left for a rung, those queries go on as a batch of their own.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vkernel.posterior import kernels_torch
from vkernel.posterior.calibration import Loss, calibrate
from vkernel.posterior.halves import FLAT, Halves, Way, add_product, product
from vkernel.posterior.kernels_torch import FULL, TINY, WIDE, Left, Light, Logits
from vkernel.posterior.moments import Moments
from vkernel.posterior.pieces import Few, Piece, Queries
from vkernel.posterior.recorded import Places

if TYPE_CHECKING:
    from vkernel.posterior.engine import Engine

__all__ = ["Fast"]

MARGIN = 16.0  # dropped points hold less than exp(-MARGIN) of the weight
NARROWER = 4.0  # beyond MARGIN, the window that is tried before log n
TOLERANCE, FINE = 1.5e-5, 7e-7  # of the mean, in units of the spread of the data; the latter where few points count
SOME = 64.0  # points are not few any more
CLOSE = 4.0  # an error of the screen beyond which half-precision weights might overflow
MOST = 8192  # points of one query that are ever listed
LONG = 2048  # points that one query may list where the average is shorter than what is worth while
LISTED = 1024  # places for heavy points of one query in rung 3, at least
BALANCE = 190.0  # half-precision operations in the time that one byte is read
NARROW = 32  # below this dimension the engine's own way, in float64, is as fast
FAR = 1e30  # logits beyond this are left to float64
OUTSIDE = 1e15  # |x - αc| / σ beyond which float64 cannot tell points apart
CROWD = 16  # one query in so many, of which few points count, is enough for the most accurate way
FEWEST = 16  # queries of the smallest batch that goes on by itself


@dataclass
class Screened:
    """Split queries, their logits, lists of points; the largest logit, the weight relative to it, n_eff, ``(B,)``."""

    left: Left
    logits: Logits
    count: Tensor
    index: Tensor
    first: Tensor
    total: Tensor
    ess: Tensor


@dataclass
class Short:
    """Rung 1's answers, and who goes on to which rung.

    ``numbers`` are those of queries that are no queries, of those for each rung, and of those for the third of which
    few points count.
    """

    seen: Screened
    log_z: Tensor
    mean: Tensor
    score: Tensor
    light: Tensor
    full: Tensor
    wide: Tensor
    numbers: Tensor


@dataclass
class Answer:
    """``log z (B,)``, the mean and the score ``(B, d)``; whether some query is NaN or out of reach."""

    log_z: Tensor
    mean: Tensor
    score: Tensor
    unfit: bool = False


class Fast:
    """The data of ``engine`` in half precision, and the rungs above."""

    def __init__(self, engine: Engine, kernels: ModuleType = kernels_torch) -> None:
        self.engine, self.way = engine, kernels.__name__
        self.halves = Halves(engine)
        self.points = self.halves.points
        cuda = engine.data.device.type == "cuda"
        self.lasting = kernels is not kernels_torch and cuda and self.points.values is not None
        self.places = Places()
        self.spread = max(float((2 * self.halves.half[: engine.data.n].to(WIDE).mean()).sqrt()), TINY)
        self.losses: dict[tuple[bool, Way], Loss] = {}
        if self.halves.whole:
            calibrate(self, max(1, engine.memory // 8 // self._each()))

    @classmethod
    def over(cls, engine: Engine) -> Fast | None:
        """For an engine on a GPU with room for the data; ``None`` where its own way is the only one."""
        data = engine.data
        room = 2 * (data.n + 8192) * (data.d + 64) <= engine.memory // 2
        if data.device.type != "cuda" or data.n == 0 or data.d < NARROW or not data.in_memory or not room:
            return None
        try:
            square = torch.ones((8, 8), dtype=torch.float16, device=data.device)
            add_product(product(square, square), square, square)
        except (TypeError, RuntimeError):  # a torch before 2.8 has no such product
            return None
        try:
            from vkernel.posterior import kernels_triton

            return cls(engine, kernels_triton)
        except ImportError:
            return cls(engine)

    @property
    def kernels(self) -> ModuleType:
        """The steps, in Triton or in torch; by name, since engines are copied and sent elsewhere."""
        return importlib.import_module(self.way)

    @property
    def usable(self) -> bool:
        """Whether nobody has switched this process to half-precision accumulation, of which the bound knows nothing."""
        return not getattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", False)

    def cap(self, queries: int) -> int:
        """The length of lists beyond which the dense rungs are cheaper than reading the listed points twice."""
        n, d, values = self.engine.data.n, self.halves.width, self.points.values
        dense = max(4 * n * d, 8 * queries * n * d / BALANCE)
        each = 8 if values is None else max(4, values.itemsize)  # of bytes, looking them up takes longer than reading
        few = 2 * queries * d * each
        return int(2 ** math.floor(math.log2(min(max(dense / few / 2, 64), MOST))))

    def _each(self) -> int:
        """Bytes that one query takes: logits, weights and sums."""
        h = self.halves
        return 16 * h.rows + (8 if h.low is None else 12) * h.slices * h.width + 32 * h.width

    def _blocks(self, count: int) -> Iterator[slice]:
        """Blocks of queries that fit into an eighth of the memory."""
        step = max(1, self.engine.memory // 8 // self._each())
        return (slice(s, min(s + step, count)) for s in range(0, count, step))

    # --- whole batches ------------------------------------------------------------------------------------------------

    def score(self, x: Tensor, alpha: Tensor | float, var: Tensor | float) -> Tensor | None:
        r""":math:`(\alpha m - x) / \sigma^2` for ``x (B, d)``, like x; ``None`` if some query is not one."""
        out = torch.empty_like(x)
        with torch.inference_mode(False), torch.no_grad():  # what is kept between calls must serve all of them
            for rows in self._blocks(len(x)):
                levels = [a if isinstance(a, float) else a[rows] for a in (alpha, var)]
                answer = self._block(x[rows], levels[0], levels[1])
                if answer.unfit:
                    return None
                if len(answer.score) == len(x):
                    return answer.score
                out[rows] = answer.score
        return out

    def moments(self, queries: Queries) -> Moments:
        """log z and the mean of every query."""
        out = Moments.empty(len(queries), self.engine.data.d, frozenset(), None, queries.x.device)
        with torch.inference_mode(False), torch.no_grad():
            for rows in self._blocks(len(queries)):
                answer = self._block(queries.x[rows], queries.alpha[rows], queries.var[rows])
                if len(answer.mean) == len(queries):
                    return Moments(answer.log_z, answer.mean)
                out.log_z[rows], out.mean[rows] = answer.log_z, answer.mean
        return out

    def _block(self, x: Tensor, alpha: Tensor | float, var: Tensor | float) -> Answer:
        if not self.lasting or self._each() * len(x) > self.engine.memory // 12:
            levels = [x.new_full((len(x),), a, dtype=WIDE) if isinstance(a, float) else a for a in (alpha, var)]
            return self._climb(Queries(x.to(WIDE), *levels), x.dtype, lambda name, step: step())
        with self.places.lock, torch.cuda.device(x.device):
            place = self.places(x)
            answer = self._climb(place.fill(x, alpha, var), x.dtype, place.take)
            answer = Answer(answer.log_z.clone(), answer.mean.clone(), answer.score.clone(), answer.unfit)
            place.free.record()
        return answer

    def _climb(self, queries: Queries, dtype: torch.dtype, take: Callable[[str, Callable[[], Any]], Any]) -> Answer:
        """``take`` takes a step, or repeats it from a record."""
        size = len(queries)
        short: Short = take("few", lambda: self._few(queries, dtype))
        unfit, light, full, wide, fine = short.numbers.tolist()
        out = Answer(short.log_z, short.mean, short.score, bool(unfit))
        if unfit or light + full + wide == 0:
            return out
        again = short.wide  # the engine's own way, and a batch of their own
        rest = torch.zeros_like(again)
        if size > FLAT and light + full <= size // 2:
            rest = short.light | short.full
        elif full:
            way = self.halves.quick(size) if CROWD * fine < size else self.halves.best
            out, again = take(f"full, {way}", lambda: self._many(queries, short, True, way, dtype))
        elif light:
            out, _ = take("light", lambda: self._many(queries, short, False, self.halves.quick(size), dtype))
        for rows, answer in ((again, self._own), (rest, self._apart)):
            some = rows.nonzero().squeeze(-1)
            if len(some):
                out.log_z[some], out.mean[some] = answer(queries[some])
                out.score = self.kernels.score(queries, out.mean, dtype)
        return out

    def _own(self, queries: Queries) -> tuple[Tensor, Tensor]:
        """The engine's own way."""
        out = Moments.empty(len(queries), self.engine.data.d, frozenset(), None, queries.x.device)
        for block, piece in self.engine._dense(queries, False):
            out.absorb(block.start + piece.rows, piece.moments(frozenset(), None))
        return out.log_z, out.mean

    def _apart(self, queries: Queries) -> tuple[Tensor, Tensor]:
        """A batch of their own, filled up to one of few sizes."""
        count = len(queries)
        size = max(FEWEST, 1 << (count - 1).bit_length())
        filled = queries[torch.arange(size, device=queries.x.device) % count]
        answer = self._block(filled.x, filled.alpha, filled.var)
        return answer.log_z[:count], answer.mean[:count]

    # --- rung 1 -------------------------------------------------------------------------------------------------------

    def screen(self, queries: Queries, thorough: bool) -> Screened:
        """The logits of all points from one product, and certified lists of those that may matter."""
        h, kernels = self.halves, self.kernels
        left = kernels.split(queries, h.center, h.unit, h.width, h.bound(len(queries)))
        logits = h.logits(left)
        first, second = kernels.peaks(logits, thorough)
        # A single point has no second: then nothing can be dropped, and nothing need be.
        reference = torch.where(second.isfinite(), second, first) if thorough else first
        base = reference - 2 * left.delta - MARGIN
        thresholds = torch.stack([base - NARROWER, base - math.log(self.engine.data.n)]).float()
        survey = kernels.survey(logits, first, thresholds)
        certified = survey.below.to(WIDE).log() <= base - first - 1e-3  # which is more than float32 sums err by
        threshold = torch.where(certified, *thresholds)
        cap = max(self.cap(len(queries)), min(LONG, MOST))
        count, index = kernels.select(logits, threshold, cap, torch.where(certified[:, None], *survey.count))
        # A few lists may be long, if not all are.
        fits = count.clamp_max(cap).sum() <= len(queries) * self.cap(len(queries))
        short = (count <= torch.where(fits, cap, self.cap(len(queries)))) & (left.delta < FAR)
        count = torch.where(short, count, cap + 1)
        return Screened(left, logits, count, index, first, survey.total, survey.total.square() / survey.square)

    def _few(self, queries: Queries, dtype: torch.dtype) -> Short:
        seen = self.screen(queries, False)
        exact = self.kernels.exact(queries, self.points, seen.count, seen.index)
        log_z, mean = self.kernels.mean(self.points, seen.count, seen.index, exact)
        long = seen.count > seen.index.shape[1]
        many = long & (seen.left.delta < CLOSE) if self.halves.whole else torch.zeros_like(long)
        way = self.halves.quick(len(queries))
        light = many & (self.error(seen, way) <= self.allowed(seen, way) * seen.ess)
        unfit = ~(seen.left.norm < OUTSIDE * queries.var.sqrt())
        numbers = torch.stack([unfit, light, many ^ light, long ^ many, (many ^ light) & (seen.ess < SOME)]).sum(1)
        score = self.kernels.score(queries, mean, dtype)
        return Short(seen, log_z, mean, score, light, many ^ light, long ^ many, numbers)

    def pieces(self, queries: Queries, thorough: bool) -> Generator[tuple[slice, Piece], None, Tensor]:
        """All weights of the queries whose lists are short; returns which are not."""
        rest = [torch.zeros(0, dtype=torch.long, device=queries.x.device)]
        for block in self._blocks(len(queries)):
            seen = self.screen(queries[block], thorough)
            count, index = seen.count, seen.index
            q, k = kernels_torch.listed(count, index.shape[1]).nonzero().unbind(1)
            if len(q):
                exact = self.kernels.exact(queries[block], self.points, count, index)
                yield slice(0, len(queries)), Few(self.engine.data, q + block.start, index[q, k].long(), exact[q, k])
            rest.append((count > index.shape[1]).nonzero().squeeze(-1) + block.start)
        return torch.cat(rest)

    # --- rungs 2 and 3 ------------------------------------------------------------------------------------------------

    def allowed(self, seen: Screened, way: Way) -> Tensor:
        """The square of the mean's error that may follow from those of single points, ``(B,)``; where few count, less.

        In units of the data's spread.
        """
        floor = self._loss(len(seen.count), way).floor
        fine, coarse = (max(tolerance**2 - floor**2, TINY) for tolerance in (FINE, TOLERANCE))
        if floor < 2 * FINE:  # if it is the floor that errs, single points should not add to it
            fine = max(fine, FINE**2 / 4)
        return torch.where(seen.ess < SOME, fine, coarse)

    def error(self, seen: Screened, way: Way) -> Tensor:
        """The mean square ε² of what is wrong with one point's part in a mean, relative to it, ``(B,)``."""
        h, y, loss = self.halves, self.halves.radius, self._loss(len(seen.count), way)
        size, slope = seen.left.size, seen.left.slope
        eta = loss.noise * y * size + loss.pattern * y * torch.minimum(size, 2 * y * slope) + 2.0**-25 * y * y * slope
        rest = {"one": h.residue, "both": h.last, "eighths": h.last if h.low is None else h.residue / 16}[way]
        return eta.square() + (loss.share**2 + (rest / self.spread) ** 2)

    def kind(self, queries: int, way: Way) -> tuple[bool, Way]:
        """What losses depend on."""
        return queries <= FLAT, way

    def _loss(self, queries: int, way: Way) -> Loss:
        return self.losses.get(self.kind(queries, way), Loss())

    def _many(self, queries: Queries, short: Short, full: bool, way: Way, dtype: torch.dtype) -> tuple[Answer, Tensor]:
        """Rung 2 or 3 for all, since most of its cost is shared; and who needs rung 4."""
        seen, halves, kernels = short.seen, self.halves, self.kernels
        loss = self._loss(len(queries), way)
        logits = halves.refine(seen.left, seen.logits, way)
        logits = replace(logits, gain=logits.gain * (1 + loss.logits))
        shift = seen.first + seen.left.delta.float()  # no weight is larger than this
        log_z, mean, wide, asked = torch.full_like(short.log_z, -torch.inf), short.mean, short.wide, short.light
        if full:
            asked = short.light | short.full
            share = self.allowed(seen, way) / self.error(seen, way)
            heavy = seen.first + (seen.total * share.clamp_max(1.0)).log()
            heavy = torch.where(short.full, heavy, torch.inf).float()
            cap = min(MOST, max(LISTED, self.cap(len(queries))))
            count, index = kernels.select(logits, heavy, cap)
            exact = kernels.exact(queries, self.points, count, index)
            log_z, mean = kernels.mean(self.points, count, index, exact)
            kernels.strike(logits, count, index)
            shift, wide = torch.minimum(shift, heavy), wide | (asked & (count > cap))
        weights, tail, total = kernels.weights(logits, shift, halves.parts(way))
        rest = shift - seen.left.norm.square() / (2 * queries.var) + (total / FULL).log()
        if not self.engine.has_weights:
            rest += self.engine.log_w[0]
        scale = halves.unit * (1 + loss.means) / total.clamp_min(TINY)
        light = Light(halves.center, scale, torch.sigmoid(rest - log_z), asked)
        mean = kernels.finish(halves.sums(weights, tail, way), light, mean, short.mean)
        log_z = torch.where(asked, torch.logaddexp(log_z, rest), short.log_z)
        return Answer(log_z, mean, kernels.score(queries, mean, dtype)), wide
