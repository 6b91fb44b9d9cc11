r"""The exact engine: chunks of the data in, posterior weights out (docs/theory.md, §2.5).

For each chunk of points one coarse product in float32 gives all logits at once,

.. math::

   l_i - l_0 = \frac{\alpha}{\sigma^2} (x - \alpha c) \cdot (y_i - c) - \frac{\alpha^2}{2\sigma^2} |y_i - c|^2
               + \log w_i, \qquad l_0 = -\frac{|x - \alpha c|^2}{2 \sigma^2},

with :math:`c` the data's centre (the product carries the last two terms as extra columns; equal weights join
:math:`l_0`). Its rounding error,
estimated as :math:`\delta = u\,(4 + \sqrt d / 4)\,(\alpha |x - \alpha c| Y + \alpha^2 Y^2 / 2) / \sigma^2` with
:math:`Y = \max |y_i - c|`, is harmless at high noise and ruinous at low noise. So each query goes, chunk by chunk, to
the cheapest of three rungs that is accurate:

1. **few** points within :math:`\log n + 16 + 2\delta` of the largest logit so far (for covariances: of the *second*
   largest): those are evaluated again in float64 from the stored points; all others together hold less than
   :math:`e^{-16} \approx 10^{-7}` of the weight (of the weight that is not at the top), and the second product is
   skipped altogether;
2. **many** points, float32: points whose weight exceeds :math:`(\mathrm{tol}/\delta_{rms})^2` get exact logits in
   place; what is left, independent errors on small weights, sums to less than tol;
3. **many** points, float64: where even that would not do, both products are made in float64.

Low dimension (d < 32) always takes rung 3: there the products cost less than the exponentials. On a CPU, once there
have been enough queries of the first kind, later ones find their few points without the product: see ``pruned``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from vkernel import rng
from vkernel.posterior.cuda import Fast
from vkernel.posterior.moments import Moments
from vkernel.posterior.pieces import Few, Many, Part, Piece, Points, Queries, product
from vkernel.posterior.pruned import Pruned

__all__ = ["Alone", "Engine", "free_memory"]

# One block of queries × one chunk of points on a CPU: few enough logits (32 MB) to stay near its caches, enough of
# them that the barriers between threads do not count. On a GPU both follow from the memory alone.
LOGITS, CHUNK = 1 << 23, 1 << 15
COORDINATES = 1 << 25  # of one chunk: 128 MB
NARROW = 32  # below this dimension everything is float64
MARGIN = 16.0  # dropped points hold less than exp(-MARGIN) of the weight outside the heaviest point
FAR = 10.0  # a coarse error beyond which float64's, 2^-29 of it, exceeds 1e-8
LIGHT = -1e30  # log of weight zero: products with -inf are nan where a factor is 0, and exp(-1e30) is 0 too
AGREE = 5e-5  # of the data's radius, between the GPU path and the engine's own way
TOLERANCE = 1e-5  # of the mean, in units of the data's spread, for what rung 2 leaves in float32


def free_memory(device: torch.device) -> int:
    """Bytes that are free on ``device`` now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 4 << 30


class Alone:
    """One process that holds all the data: there is nobody to merge with. ``sharded.Ranks`` are many of them."""

    sharing = 1  # processes that share the device's memory

    def same(self, what: str, *tensors: Tensor) -> None:
        """Refuse what differs between processes."""

    def common(self, a: Tensor) -> Tensor:
        """The first process's ``a``, for all."""
        return a

    def before(self, share: Callable[[], Tensor]) -> Tensor | float:
        """The sum of the shares of the processes before this one."""
        return 0.0

    def fold(self, table: Tensor, join: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The tables of all processes, joined in their order; one row for each query."""
        return table

    def merge(self, moments: Moments) -> Moments:
        """The moments of all processes, merged in their order."""
        return moments


class Engine:
    """Posterior weights over ``data`` within ``memory`` bytes (default: a quarter of what is free, of a GPU three).

    ``data`` is what this process holds: all of it, or the part of ``whole`` that begins at its point ``first``, and
    then ``ranks`` are those that hold the rest. Everything below is about the part; what leaves the engine, by
    ``moments`` and ``nearest``, is about the whole.
    """

    def __init__(
        self,
        data: Points,
        memory: int | None = None,
        whole: Points | None = None,
        first: int = 0,
        ranks: Alone | None = None,
    ) -> None:
        self.data, self.whole, self.first = data, data if whole is None else whole, first
        self.ranks = Alone() if ranks is None else ranks
        free = free_memory(data.device) // (4 * self.ranks.sharing) * (3 if data.device.type == "cuda" else 1)
        self.memory = free if memory is None else int(memory)
        self.center = data.center
        self.log_w = data.weights.log().clamp_min(LIGHT)
        self.has_weights = bool((self.whole.weights != self.whole.weights[0]).any())
        big = data.device.type == "cuda"
        logits = self.memory // 64 if big else min(LOGITS, self.memory // 96)
        coordinates = self.memory // 64 if big else min(COORDINATES, self.memory // 96)
        self.chunk = max(1, min(data.n, coordinates // data.d, 1 << 16 if big else CHUNK))
        self.block = max(1, logits // self.chunk)
        self.width = data.d + 1 + self.has_weights
        self.window = math.log(max(data.n, 1)) + MARGIN
        self._prepare()
        self.pruned = Pruned.where_it_pays(self)  # on a CPU; None: never
        self.fast: Fast | None = None  # on a GPU
        self.fast = trusted(self)

    def _prepare(self) -> None:
        """One pass for the norms; centred float32 data is kept where it fits into half the budget."""
        n, d, device = self.data.n, self.data.d, self.data.device
        self.half_square = torch.empty(n, dtype=torch.float64, device=device)
        keep = d >= NARROW and self.data.in_memory and 4 * n * self.width <= self.memory // 2
        self.kept = torch.empty(n, self.width, dtype=torch.float32, device=device) if keep else None
        for start in range(0, n, self.chunk):
            stop = min(start + self.chunk, n)
            y = self.data.rows(start, stop).double() - self.center
            self.half_square[start:stop] = y.square().sum(-1) / 2
            if self.kept is not None:
                self._columns(self.kept[start:stop], y, start)
        self.radius = float((2 * self.half_square.max()).sqrt()) if n else 0.0

    def _columns(self, out: Tensor, y: Tensor, start: int) -> Tensor:
        """Fill ``out`` with ``[y - c, |y - c|²/2, log w]``: the right factor of the coarse product."""
        stop = start + len(y)
        out[:, : self.data.d] = y
        out[:, self.data.d] = self.half_square[start:stop]
        if self.has_weights:
            out[:, self.data.d + 1] = self.log_w[start:stop]
        return out

    def _wide(self, start: int, stop: int) -> Part:
        """Points in float64."""
        y = self.data.rows(start, stop).double() - self.center
        return Part(start, y, self.half_square[start:stop], self.data, self.center)

    def _coarse_columns(self, start: int, stop: int) -> Tensor:
        if self.kept is not None:
            return self.kept[start:stop]
        y = self.data.rows(start, stop)
        if y.dtype == torch.float64:
            y = y - self.center
        else:  # the centre in two float32s: one alone is off by more than the spread of data with a large offset
            high = self.center.float()
            y = (y - high).sub_((self.center - high).float())
        return self._columns(torch.empty(len(y), self.width, dtype=torch.float32, device=y.device), y, start)

    def pieces(self, queries: Queries, thorough: bool = True) -> Iterator[tuple[slice, Piece]]:
        """All weights of all queries over what is held here: ``(block of queries, piece)``, the data read once.

        ``thorough`` counts the dropped weight against what is *not* in the heaviest point, as covariances need;
        otherwise against all of it, which is enough for means, and cheaper.
        """
        if self.data.n == 0:
            return
        if self.fast is not None and self.fast.usable:
            rest = yield from self.fast.pieces(queries, thorough)
        elif self.pruned is not None and self.pruned.ready(self):
            rest = yield from self.pruned.pieces(self, queries, thorough)
        else:
            yield from self._dense(queries, thorough)
            return
        for block, piece in self._dense(queries[rest], thorough):
            piece.rows = rest[block][piece.rows]
            yield slice(0, len(queries)), piece

    def _dense(self, queries: Queries, thorough: bool) -> Iterator[tuple[slice, Piece]]:
        blocks = [slice(s, min(s + self.block, len(queries))) for s in range(0, len(queries), self.block)]
        ladders = [self.ladder(queries[block], thorough) for block in blocks]
        for start in range(0, self.data.n if blocks else 0, self.chunk):
            stop = min(start + self.chunk, self.data.n)
            narrow = self.data.d < NARROW
            columns = None if narrow else self._coarse_columns(start, stop)
            wide: list[Part] = [self._wide(start, stop)] if narrow else []
            for block, ladder in zip(blocks, ladders, strict=True):
                for piece in ladder.climb(start, stop, columns, wide):
                    yield block, piece
        if self.pruned is not None:
            self.pruned.paid += sum(int(ladder.sparse.sum()) for ladder in ladders)

    def ladder(self, queries: Queries, thorough: bool = True) -> Ladder:
        """One block of queries, at the foot."""
        return Ladder(self, queries, thorough)

    def nearest(self, queries: Queries, k: int) -> tuple[Tensor, Tensor]:
        """The ``k`` heaviest points of every query: float64 logits, descending, and indices, both ``(B, k)``.

        The coarse products propose ``k + 16`` points, which are then evaluated exactly. A query whose last proposal
        is not clearly below its k-th answer, by the rounding of the coarse product, is done again in float64.
        """
        held = min(k, self.data.n)  # fewer than k where the whole is spread over many
        table = queries.x.new_full((len(queries), 2 * k), -torch.inf)
        for start in range(0, len(queries) if held else 0, self.block):
            rows = slice(start, start + self.block)
            logit, index = self._nearest(queries[rows], held)
            table[rows, :held], table[rows, k : k + held] = logit, (self.first + index).double()
        logits, indices = self.ranks.fold(table, heaviest).chunk(2, 1)
        return logits.contiguous(), indices.long()

    def _nearest(self, block: Queries, k: int) -> tuple[Tensor, Tensor]:
        """The same for one block of queries and the points that are held here."""
        ladder = self.ladder(block)
        coarse, index = self._propose(ladder, min(k + 16, self.data.n), exact=self.data.d < NARROW)
        logit, index = self._settle(block, index, k)
        if self.data.d >= NARROW and k + 16 < self.data.n:
            missed = ~(coarse[:, -1] + 2 * ladder.delta < logit[:, -1] - ladder.offset)
            if bool(missed.any()):
                again = block[missed]
                _, wide = self._propose(self.ladder(again), k, exact=True)
                logit[missed], index[missed] = self._settle(again, wide, k)
        return logit, index

    def _propose(self, ladder: Ladder, k: int, exact: bool) -> tuple[Tensor, Tensor]:
        best = torch.full((len(ladder.x), 0), -torch.inf, dtype=torch.float64, device=ladder.x.device)
        index = torch.zeros((len(ladder.x), 0), dtype=torch.long, device=ladder.x.device)
        everyone = torch.arange(len(ladder.x), device=ladder.x.device)
        for start in range(0, self.data.n, self.chunk):
            stop = min(start + self.chunk, self.data.n)
            if exact:
                logit = ladder._float64(everyone, start, stop, []).logit
            else:
                logit = product(ladder.left, self._coarse_columns(start, stop).mT)
            value, place = logit.topk(min(k, stop - start), dim=1)
            best, index = torch.cat([best, value.double()], 1), torch.cat([index, start + place], 1)
            best, keep = best.topk(min(k, best.shape[1]), dim=1)
            index = index.gather(1, keep)
        return best, index

    def _settle(self, queries: Queries, index: Tensor, k: int) -> tuple[Tensor, Tensor]:
        q = torch.arange(len(index), device=index.device).repeat_interleave(index.shape[1])
        exact = queries.exact_logits(self.data, self.log_w, q, index.flatten()).reshape(index.shape)
        logit, order = exact.topk(k, dim=1)
        return logit, index.gather(1, order)

    def moments(self, queries: Queries, want: frozenset[str] = frozenset(), vector: Tensor | None = None) -> Moments:
        """The moments of the posterior of every query; ``want`` ⊂ {"trace", "diag", "weights"}."""
        thorough = bool(want) or vector is not None
        if self.fast is not None and self.fast.usable and not thorough:
            return self.ranks.merge(self.fast.moments(queries))
        return self.ranks.merge(reduce_moments(self.pieces(queries, thorough), len(queries), self.data, want, vector))


def trusted(engine: Engine) -> Fast | None:
    """The GPU path, if it agrees with the engine's own way on a few points of these data.

    Its kernels are compiled where they run, for GPUs and versions that nobody has tried: what fails or errs is left.
    """
    try:
        fast = Fast.over(engine)
        off = 0.0 if fast is None else _apart(fast, engine)
    except Exception as error:  # a compiler's, a driver's, or no memory left: of many kinds, and none is the user's
        warnings.warn(f"The GPU path cannot be used here, {type(error).__name__}: {error}", stacklevel=2)
        return None
    if off < AGREE:
        return fast
    warnings.warn(f"The GPU path is off by {off:.1g} here and is not used.", stacklevel=2)
    return None


def _apart(fast: Fast, engine: Engine) -> float:
    """How far the two ways lie apart, at little and at much noise, in units of the data's radius."""
    data, radius = engine.data, max(engine.radius, 1e-30)
    some = torch.linspace(0, data.n - 1, 4, device=data.device).long()
    y, one = data.take(some).double(), torch.ones(4, dtype=torch.float64, device=data.device)
    noise = rng.normals(some[:, None], torch.arange(data.d, device=data.device))
    off = 0.0
    for sigma in (0.1 * radius / math.sqrt(data.d), 3 * radius / math.sqrt(data.d)):
        queries = Queries(y + sigma * noise, one, one * sigma**2)
        known = reduce_moments(engine._dense(queries, False), 4, data, frozenset(), None).mean
        gap = float((fast.moments(queries).mean - known).norm(dim=-1).max()) / radius
        off = max(off, gap) if gap == gap else math.inf
    return off


def heaviest(a: Tensor, b: Tensor) -> Tensor:
    """Of two tables of logits and indices, ``(B, 2k)``, the k heaviest points; of equals those of ``a``."""
    logit, index = (torch.cat(pair, 1) for pair in zip(a.chunk(2, 1), b.chunk(2, 1), strict=True))
    logit, order = logit.sort(dim=1, descending=True, stable=True)
    k = a.shape[1] // 2
    return torch.cat([logit[:, :k], index.gather(1, order)[:, :k]], 1)


def reduce_moments(
    pieces: Iterator[tuple[slice, Piece]], count: int, data: Points, want: frozenset[str], vector: Tensor | None
) -> Moments:
    """Merge the moments of all pieces: the monoid at work."""
    out = Moments.empty(count, data.d, want, vector, data.device)
    for block, piece in pieces:
        part = piece.moments(want, None if vector is None else vector[block])
        out.absorb(block.start + piece.rows, part)
    return out


class Ladder:
    """One block of queries on its way through the chunks: remembers the two largest logits seen."""

    def __init__(self, engine: Engine, queries: Queries, thorough: bool = True) -> None:
        self.engine, self.queries, self.thorough = engine, queries, thorough
        d, alpha, var = engine.data.d, queries.alpha, queries.var
        self.unit = unit_roundoff(queries.x.device)
        self.x = queries.x - alpha[:, None] * engine.center
        norm = self.x.square().sum(-1).sqrt()
        self.offset = -norm.square() / (2 * var)
        if not engine.has_weights:
            self.offset += engine.log_w[0]
        self.top = torch.full((len(queries), 2), -torch.inf, dtype=torch.float32, device=norm.device)
        self.left = torch.cat([self.x * (alpha / var)[:, None], -(alpha.square() / var)[:, None]], 1).float()
        if engine.has_weights:
            self.left = torch.cat([self.left, torch.ones_like(self.left[:, :1])], 1)
        y = engine.radius
        self.size = (alpha * norm * y + (alpha * y).square() / 2) / var
        self.delta = rounding(d, norm.device) * self.size
        self.sparse = torch.ones_like(norm, dtype=torch.bool)  # few points so far

    def climb(self, start: int, stop: int, columns: Tensor | None, wide: list[Part]) -> Iterator[Piece]:
        """The pieces of one chunk. ``wide`` holds the chunk in float64 once somebody has needed it."""
        if columns is None:
            everyone = torch.arange(len(self.x), device=self.x.device)
            yield from self._exact(self._float64(everyone, start, stop, wide))
            return
        logit = product(self.left, columns.mT)
        self.top = torch.cat([self.top, logit.topk(min(2, logit.shape[1]), dim=1).values], 1).topk(2, dim=1).values
        first, second = self.top.double().unbind(1)
        # A single point has no second: then nothing can be dropped, and nothing need be.
        reference = torch.where(second.isfinite(), second, first) if self.thorough else first
        significant = (reference - self.engine.window - 2 * self.delta).float()
        mask = logit > significant[:, None]
        count = mask.sum(1, dtype=torch.int32)
        cap = max(8, (stop - start) // 128)
        finite = first.isfinite() & self.delta.isfinite()
        few = (count <= cap) & finite
        self.sparse &= few
        if bool((few & (count > 0)).any()):
            yield self._few(mask, few, start)
        many = ~few
        if not bool(many.any()):
            return
        # Rung 2 or 3: which weights, bounded by exp(logit - first), matter enough to need their exact logit?
        heavy = 2 * (math.log(TOLERANCE) - (self.delta / 8).log())
        torch.gt(logit, (first + heavy).float()[:, None], out=mask)
        narrow = many & (mask.sum(1, dtype=torch.int32) <= cap) & finite
        doubt = (many & ~narrow & finite).nonzero().squeeze(-1)
        if len(doubt):  # the bound on the weights was loose where many share them: normalise by this chunk
            rows = logit[doubt]
            mask[doubt] = rows > (rows.logsumexp(1) + heavy[doubt])[:, None]
            narrow[doubt] = mask[doubt].sum(1, dtype=torch.int32) <= cap
        if bool(narrow.any()):
            yield self._float32(logit, mask, narrow, start, columns)
        rest = (many & ~narrow).nonzero().squeeze(-1)
        if len(rest):
            yield from self._exact(self._float64(rest, start, stop, wide))

    def _exact(self, many: Many) -> Iterator[Piece]:
        """``many`` as it is, but for rows that are too far out even for float64: those as pairs, by differences."""
        far = self.delta[many.rows] > FAR
        if not bool(far.any()):
            yield many
            return
        logit = many.logit[far]
        two = logit.topk(min(2, logit.shape[1]), dim=1).values
        margin = self.engine.window + 2.0**-28 * self.delta[many.rows[far]]
        q, i = (logit > (two[:, -1] - margin)[:, None]).nonzero().unbind(1)
        if len(q):
            q, i = many.rows[far][q], i + many.part.start
            yield Few(self.engine.data, q, i, self.queries.exact_logits(self.engine.data, self.engine.log_w, q, i))
        if not bool(far.all()):
            yield Many(many.part, many.rows[~far], many.logit[~far], many.offset[~far])

    def _few(self, mask: Tensor, rows: Tensor, start: int) -> Few:
        q, i = (mask & rows[:, None]).nonzero().unbind(1)
        i = i + start
        exact = self.queries.exact_logits(self.engine.data, self.engine.log_w, q, i)
        return Few(self.engine.data, q, i, exact)

    def _float32(self, logit: Tensor, heavy: Tensor, rows: Tensor, start: int, columns: Tensor) -> Many:
        # Measured from the largest logit, float32 holds the logits that matter to 1e-7 and better.
        shift = self.top[:, 0]
        offset = self.offset + shift.double()
        logit -= shift[:, None]
        q, i = heavy.logical_and_(rows[:, None]).nonzero().unbind(1)
        exact = self.queries.exact_logits(self.engine.data, self.engine.log_w, q, i + start)
        logit[q, i] = (exact - offset[q]).float()
        index = rows.nonzero().squeeze(-1)
        part = Part(
            start,
            columns[:, : self.engine.data.d],
            self.engine.half_square[start : start + len(columns)],
            self.engine.data,
            self.engine.center,
        )
        return Many(part, index, logit if len(index) == len(logit) else logit[index], offset[index])

    def _float64(self, rows: Tensor, start: int, stop: int, wide: list[Part]) -> Many:
        if not wide:
            wide.append(self.engine._wide(start, stop))
        part, alpha, var = wide[0], self.queries.alpha[rows], self.queries.var[rows]
        logit = (self.x[rows] * (alpha / var)[:, None]) @ part.centred.mT
        logit -= (alpha.square() / var)[:, None] * part.half_square
        if self.engine.has_weights:
            logit += self.engine.log_w[start:stop]
        return Many(part, rows, logit, self.offset[rows])


def rounding(d: int, device: torch.device) -> float:
    """The relative error of one coarse product of length ``d``: an estimate, not a proven bound.

    Of the 1.5·10⁷ products of 256 noisy Fashion-MNIST images with all 60,000 (d = 784) none erred by a third of it.
    """
    return unit_roundoff(device) * (4 + math.sqrt(d) / 4)


def unit_roundoff(device: torch.device) -> float:
    """The relative error of one float32 number in a product."""
    if torch.get_float32_matmul_precision() != "highest":
        # The user has let the whole process trade accuracy for speed: tf32 on a GPU, bf16 at "medium".
        return 2.0**-9 if torch.get_float32_matmul_precision() == "medium" else 2.0**-11
    return 2.0**-11 if device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32 else 2.0**-24
