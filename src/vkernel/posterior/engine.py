r"""The exact engine: chunks of the data in, posterior weights out (docs/theory.md, §2.5).

The engine holds the data, or a part of them, cuts them and the queries into what fits into its memory, and sends each
block of queries over all chunks of points the way that is cheapest for it:

* on a GPU with room for the data in half precision: :mod:`~vkernel.posterior.cuda`;
* on a CPU, at low noise, once there have been enough queries of which few points hold all the weight: without looking
  at most points, :mod:`~vkernel.posterior.pruned`;
* everywhere else, and for whatever those two leave: the :mod:`~vkernel.posterior.ladder`.

What comes back are pieces, weights over some of the points, whose moments are merged.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.posterior.cuda import Fast
from vkernel.posterior.ladder import Ladder
from vkernel.posterior.moments import Moments
from vkernel.posterior.pieces import Part, Piece, Points, Queries, product
from vkernel.posterior.pruned import Pruned

__all__ = ["Alone", "Engine", "free_memory"]

# One block of queries × one chunk of points on a CPU: few enough logits (32 MB) to stay near its caches, enough of
# them that the barriers between threads do not count. On a GPU both follow from the memory alone.
LOGITS, CHUNK = 1 << 23, 1 << 15
COORDINATES = 1 << 25  # of one chunk: 128 MB
NARROW = 32  # below this dimension everything is float64
MARGIN = 16.0  # dropped points hold less than exp(-MARGIN) of the weight outside the heaviest point
LIGHT = -1e30  # log of weight zero: products with -inf are nan where a factor is 0, and exp(-1e30) is 0 too
AGREE = 5e-5  # of the data's radius, between the GPU path and the engine's own way


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

    @property
    def direct(self) -> Fast | None:
        """The GPU's way where it holds all the data, can be used now, and may so answer by itself."""
        alone = self.fast is not None and self.fast.usable and type(self.ranks) is Alone
        return self.fast if alone else None

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
    data = engine.data
    radius = max(engine.radius, 1e-9 * float(engine.center.norm()), 1e-30)  # all points may be one
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
