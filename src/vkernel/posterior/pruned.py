r"""Pruning with a certificate: at low noise the cost of a query falls with the number of points that matter.

With :math:`\tilde x = x - \alpha c` and :math:`\tilde y = y - c` as in the dense product (docs/theory.md, §2.5), the
logit of a point depends on the query through one inner product,

.. math::

   l - l_0 = \frac{\alpha}{\sigma^2}\, \tilde x \cdot \tilde y - \frac{\alpha^2}{2 \sigma^2} |\tilde y|^2 + \log w .

**The bound.** Split space into :math:`k` orthonormal axes :math:`v_j` and into subspaces :math:`Q_1, \dots, Q_G` that
fill the rest. By the inequality of Cauchy and Schwarz in each subspace,

.. math::

   \tilde x \cdot \tilde y \le a \cdot b, \qquad
   a = (v_1 \cdot \tilde x, \dots, v_k \cdot \tilde x, |Q_1 \tilde x|, \dots, |Q_G \tilde x|), \quad b \text{ alike} .

In terms of distances: :math:`|x - \alpha y|^2 \ge |P (x - \alpha y)|^2 + \sum_g (|Q_g \tilde x| - \alpha |Q_g
\tilde y|)^2`, the distance of the prefixes plus the gaps of the residual norms. So a product of length :math:`k + G
\ll d`, of the form of the dense one, bounds all logits from above. The axes are principal components of a sample; the
:math:`Q_g` hold the next ones, in groups that widen geometrically, and the last holds what no component was computed
for. Noise lies almost all where data have almost nothing: a single residual norm would let it stand for data there,
several do not.

**Its rounding.** :math:`|a| = |\tilde x|` and :math:`|b| = |\tilde y|`, components are computed in float64, and in
any order of summation a float32 product of length :math:`m` errs by at most :math:`m u` times the product of the
norms. With four more :math:`u` for rounding the factors, the threshold and float64's own digits,

.. math::

   \delta_m = \frac{(m + 4)\, u}{1 - (m + 4)\, u}
   \left( \frac{\alpha |\tilde x| Y + \alpha^2 Y^2 / 2}{\sigma^2} + \max_{w > 0} |\log w| \right)

is a proven bound, and every logit is at most its computed bound plus :math:`\delta_m`.

**The certificate.** The points with the best bounds are evaluated; the largest (for covariances the *second* largest)
of their logits is at most that of all points: call it :math:`L`. Points whose bound is below :math:`L - \log n - 16`
hold together less than :math:`e^{-16}` of the weight (of the weight that is not at the top) and are dropped. This is
done twice, with short bounds for all points and with longer ones for those that are left; then the coarse logits, by
the threshold of the dense path's first rung, leave the few that are evaluated in float64. Points are stored in the
order of a k-d tree, so that most leaves are skipped by the largest bound in them.

**When.** Queries whose bounds leave too many points go to the dense path, and those at a noise level :math:`\sigma /
\alpha` at which that would happen to typical ones (noisy training points, and places midway between two) are not
even tried. The preparation costs as much as a thousand dense queries, and happens once as many have been answered of
which a few points held all the weight: the total is at most about twice the cheaper of never and always. The two
paths differ by rounding, so the calls before count to the last digits and no further.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vkernel import rng
from vkernel.posterior.pieces import Few, Piece, Queries

if TYPE_CHECKING:
    from vkernel.posterior.engine import Engine
    from vkernel.posterior.ladder import Ladder

__all__ = ["Pruned"]

FEWEST, NARROWEST = 4096, 128  # points and dimensions below which a dense query costs too little to save on
AXES = 64, 256, 384  # of the short bounds, of the long ones, and in all: at most 1/8, 1/3 and 1/2 of all dimensions
GROUPS = 7, 3  # of principal components beyond those axes; one more holds the rest
SAMPLE, GRAM = 4096, 1024  # points whose principal components are taken; fewer where they have more coordinates
SLACK = 2.0**-40  # of |y|²: more than float64 loses where a residual is what components leave of it
LEAF = 64  # points whose largest bound is known; a power of two makes that ten times cheaper
SPLIT = 16  # axes along which the tree is split
CHUNK, BOUNDS = 1 << 17, 1 << 22  # points, and queries × points (16 MB), whose bounds are held at once
TILE = 64  # leaves whose bounds are computed at once: they stay in the caches until the largest is known
CANDIDATES = 16  # points with the best bounds, which are evaluated for a large L
CROWD = 8  # a query that keeps more than 1/CROWD of the points costs no less than one of many dense ones
STRAGGLERS = 16  # so few dense queries cost as much as many, for all points are read: they may keep half the points
TYPICAL = 16  # queries of each kind that are tried at a noise level
VAST = 1e6  # an error of bounds that makes them useless; far below it, float32 does not overflow
LIGHT = -1e29  # a logit that is no point's with weight


@dataclass
class Short:
    """Right factors ``[b, |y|²/2, log w]`` of a short product, where ``b`` is ``shorten``'s."""

    edges: list[int]
    rows: Tensor

    def left(self, ladder: Ladder, components: Tensor) -> Tensor:
        """The left factors of the same product, ``(B, width)``."""
        alpha, var = ladder.queries.alpha, ladder.queries.var
        a = shorten(components, ladder.x.square().sum(-1), self.edges) * (alpha / var)[:, None]
        ends = [-alpha.square() / var, torch.ones_like(var)][: self.rows.shape[1] - a.shape[1]]
        return torch.cat([a, torch.stack(ends, 1)], 1).float()


def shorten(components: Tensor, square: Tensor, edges: list[int]) -> Tensor:
    """Axes before ``edges[0]``, the norms of the groups between edges, and the norm of what is beyond all axes."""
    groups = [components[:, i:j].norm(dim=1, keepdim=True) for i, j in pairwise(edges)]
    rest = (square - components.square().sum(1)).clamp_min(0.0) + SLACK * square
    return torch.cat([components[:, : edges[0]], *groups, rest.sqrt()[:, None]], 1)


def tree(coordinates: Tensor) -> Tensor:
    """An order of the rows in which those of a leaf of a k-d tree, split at medians, follow one another."""
    n, axes = coordinates.shape
    depth = max(0, math.ceil(math.log2(n / LEAF)))
    short = (-n) % (1 << depth)
    key = torch.nn.functional.pad(coordinates, (0, 0, 0, short), value=torch.inf)  # padding sorts last everywhere
    order = torch.arange(n + short, device=key.device)
    for level in range(depth):
        cells = order.view(1 << level, -1)
        order = cells.gather(1, key[cells, level % axes].argsort(1)).flatten()
    return order[:n]


class Pruned:
    """The short and long bounds of an engine's points; ``price`` is that of the preparation, in dense queries."""

    def __init__(self, engine: Engine, price: float | None = None) -> None:
        n, d = engine.data.n, engine.data.d
        self.device = engine.data.device
        self.sample = min(n, SAMPLE if d <= GRAM else GRAM)
        rank = min(d, self.sample)
        short, long, self.axes = (min(a, max(1, rank // part)) for a, part in zip(AXES, (8, 3, 2), strict=True))
        self.edges = [
            sorted({round(k * (self.axes / k) ** (g / groups)) for g in range(groups + 1)})
            for k, groups in zip((short, long), GROUPS, strict=True)
        ]
        work = 2 * n * d * self.axes + 2 * self.sample * d * rank + 20 * rank**3
        self.price, self.paid = work / (n * d) if price is None else price, 0
        self.tables: list[Short] = []
        self.reach: dict[bool, float] = {}
        self.spare: list[Tensor] = []

    @classmethod
    def where_it_pays(cls, engine: Engine) -> Pruned | None:
        """For sets on a CPU that are large enough, in a memory that holds their short bounds."""
        if engine.data.device.type != "cpu" or engine.data.n < FEWEST or engine.data.d < NARROWEST:
            return None
        pruned = cls(engine)
        return pruned if pruned.bytes(engine, 1) <= engine.memory // 4 else None

    def width(self, engine: Engine, table: int) -> int:
        edges = self.edges[table]
        return edges[0] + len(edges) + 1 + engine.has_weights

    def bytes(self, engine: Engine, tables: int) -> int:
        """What is held, with one table or with two: they, the tree with its coordinates, and a block of bounds."""
        return (
            engine.data.n * (4 * sum(self.width(engine, k) for k in range(len(self.edges[:tables]))) + 8 * SPLIT)
            + 4 * BOUNDS
        )

    def ready(self, engine: Engine) -> bool:
        """Whether there are bounds; they are prepared as soon as they have been paid for."""
        if not self.tables and self.paid >= self.price:
            self._prepare(engine)
        return bool(self.tables)

    def _prepare(self, engine: Engine) -> None:
        n, count = engine.data.n, 2 if self.bytes(engine, 2) <= engine.memory // 4 else 1
        live = engine.log_w[engine.data.weights > 0]
        self.log_weight = float(live.abs().max()) if engine.has_weights and len(live) else 0.0
        self.basis = self._principal(engine)
        split = torch.empty(n, min(SPLIT, self.axes), dtype=torch.float64, device=self.device)
        for part, y in self._points(engine):
            split[part] = y @ self.basis[:, :SPLIT]
        self.order = tree(split)
        place = torch.empty_like(self.order)
        place[self.order] = torch.arange(n, device=self.device)
        tables = []
        for k, edges in enumerate(self.edges[:count]):
            tables.append(Short(edges, torch.empty(n, self.width(engine, k), dtype=torch.float32, device=self.device)))
        for part, y in self._points(engine):
            components, half_square = y @ self.basis, engine.half_square[part]
            for table in tables:
                b = shorten(components, 2 * half_square, table.edges)
                ends = [half_square[:, None], engine.log_w[part, None]][: table.rows.shape[1] - b.shape[1]]
                table.rows[place[part]] = torch.cat([b, *ends], 1).float()
        self.tables = tables

    def _points(self, engine: Engine) -> Iterator[tuple[slice, Tensor]]:
        """All points, centred, in float64, by chunks."""
        for start in range(0, engine.data.n, engine.chunk):
            part = slice(start, min(start + engine.chunk, engine.data.n))
            yield part, engine.data.rows(part.start, part.stop).double() - engine.center

    def _principal(self, engine: Engine) -> Tensor:
        """The leading principal components of a sample, ``(d, axes)``, orthonormal in float64."""
        index = torch.linspace(0, engine.data.n - 1, self.sample, dtype=torch.float64).long()
        y = engine.data.take(index).double() - engine.center
        if engine.data.d <= self.sample:
            leading = torch.linalg.eigh(y.mT @ y).eigenvectors[:, -self.axes :]
        else:
            leading = y.mT @ torch.linalg.eigh(y @ y.mT).eigenvectors[:, -self.axes :]
        return torch.linalg.qr(leading.flip(1)).Q

    # --- queries -----------------------------------------------------------------------------------------------------

    def pieces(self, engine: Engine, queries: Queries, thorough: bool) -> Generator[tuple[slice, Piece], None, Tensor]:
        """The weights of the queries for which few points matter; returns the numbers of the others."""
        everyone, left = slice(0, len(queries)), torch.ones(len(queries), dtype=torch.bool, device=self.device)
        if thorough not in self.reach:
            self.reach[thorough] = self._reach(engine, thorough)
            if self.reach == {False: 0.0, True: 0.0}:  # these points cannot be told apart along few axes
                self.tables, self.spare, self.price = [], [], math.inf
        near = (queries.var.sqrt() <= self.reach[thorough] * queries.alpha).nonzero().squeeze(-1)
        for rows in near.split(max(1, BOUNDS // min(engine.data.n, CHUNK))) if len(near) else ():
            q, i, served = self.survivors(engine.ladder(queries[rows], thorough))
            left[rows[served]], q = False, rows[q]
            if len(q):
                yield everyone, Few(engine.data, q, i, queries.exact_logits(engine.data, engine.log_w, q, i))
        return left.nonzero().squeeze(-1)

    def _reach(self, engine: Engine, thorough: bool) -> float:
        """The noise level up to which three quarters of typical queries are served, by bisection; 0 for none."""
        stream = rng.stream(0, "typical queries")
        index = torch.randint(0, engine.data.n, (3 * TYPICAL,), generator=stream, device=stream.device)
        a, b, c = engine.data.take(index).double().chunk(3)
        noise = rng.randn(tuple(a.shape), stream, self.device, torch.float64)
        one = a.new_ones(2 * TYPICAL)

        def served(level: float) -> bool:
            x = torch.cat([a + level * noise, (b + c) / 2])
            ok = self.survivors(engine.ladder(Queries(x, one, level**2 * one), thorough), stragglers=0)[2]
            return all(4 * int(kind.sum()) >= 3 * TYPICAL for kind in ok.chunk(2))

        low, high = (engine.radius * factor / math.sqrt(engine.data.d) for factor in (1e-4, 10.0))
        if not low > 0 or not served(low):
            return 0.0
        while high > 1.1 * low:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if served(middle) else (low, middle)
        return low

    def errors(self, ladder: Ladder) -> list[Tensor]:
        r""":math:`\delta_m` of each table, ``(B,)``."""
        size = ladder.size + self.log_weight
        gammas = [(table.rows.shape[1] + 4) * ladder.unit for table in self.tables]
        return [size * (gamma / (1 - gamma) if gamma < 1 else torch.inf) for gamma in gammas]

    @torch.autocast("cpu", enabled=False)
    def survivors(self, ladder: Ladder, stragglers: int = STRAGGLERS) -> tuple[Tensor, Tensor, Tensor]:
        """Pairs (query, point) that may matter, both ascending, and which queries are served; the others have none."""
        n, count = ladder.engine.data.n, len(ladder.x)
        components = ladder.x @ self.basis
        lefts, errors = [table.left(ladder, components) for table in self.tables], self.errors(ladder)
        served = errors[0] < VAST
        top = torch.full((count, 2), -torch.inf, dtype=torch.float64, device=self.device)
        buffer = self._buffer(count * (min(n, CHUNK) + LEAF))
        pairs = []
        for start in range(0, n, CHUNK):
            bound, peaks = self._bounds(lefts[0], slice(start, start + CHUNK), buffer)
            here = self._two_largest(ladder, *self._candidates(bound, peaks, start))
            least = (self._least(ladder, top, here) - errors[0]).float()
            q, leaf = (peaks > least[:, None]).nonzero().unbind(1)
            above = bound.flatten(0, 1).index_select(0, q * bound.shape[1] + leaf) > least[q, None]
            size = torch.zeros_like(served, dtype=torch.long).index_add_(0, q, above.sum(1))
            crowded = size > min(n, CHUNK) // CROWD
            served &= ~crowded if int(crowded.sum()) > stragglers else size <= min(n, CHUNK) // 2
            if not bool(served.all()):
                q, leaf, above = (a[served[q]] for a in (q, leaf, above))
            row, inside = above.nonzero().unbind(1)
            q, p = q[row], start + leaf[row] * LEAF + inside
            if len(self.tables) > 1:
                long = _sampled(lefts[1], self.tables[1].rows, q, p)
                best = _leading(long, q, count)
                here = torch.maximum(here, self._two_largest(ladder, q[best], p[best]))
                keep = long > (self._least(ladder, top, here) - errors[1]).float()[q]
                q, p = q[keep], p[keep]
            top = torch.cat([top, here], 1).topk(2, dim=1).values
            pairs.append(q * n + self.order[p])
        self.spare.append(buffer)
        served &= self._least(ladder, top) > LIGHT
        pair = torch.cat(pairs).sort().values
        q, i = pair // n, pair % n
        q, i = q[served[q]], i[served[q]]
        logit, error = self._logits(ladder, q, i)
        keep = logit + error > self._least(ladder, top)[q]
        return q[keep], i[keep], served

    def _buffer(self, size: int) -> Tensor:
        """Room for bounds: fresh memory would cost as much as the product that fills it. Threads get one each."""
        buffer = self.spare.pop() if self.spare else None
        if buffer is None or len(buffer) < size:
            with torch.inference_mode(False):  # to be written to in later calls, of whatever mode
                buffer = torch.empty(size, dtype=torch.float32, device=self.device)
        return buffer

    def _bounds(self, left: Tensor, part: slice, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """Short bounds of the points at ``part``, ``(B, leaves, LEAF)``, -inf for none, and the largest of a leaf."""
        right = self.tables[0].rows[part]
        leaves = math.ceil(len(right) / LEAF)
        size = len(left) * leaves * LEAF
        bound = buffer[:size].view(len(left), leaves, LEAF)
        flat, peaks = bound.flatten(1), bound.new_empty(len(left), leaves)
        for first in range(0, leaves, TILE):
            start, stop = first * LEAF, min((first + TILE) * LEAF, len(right))
            torch.mm(left, right[start:stop].mT, out=flat[:, start:stop])
            flat[:, stop : (first + TILE) * LEAF] = -torch.inf
            peaks[:, first : first + TILE] = bound[:, first : first + TILE].amax(2)
        return bound, peaks

    def _candidates(self, bound: Tensor, peaks: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Pairs of every query and the places of the points with the best bounds in the best leaves."""
        leaf = peaks.topk(min(CANDIDATES, peaks.shape[1]), dim=1).indices
        q = torch.arange(len(leaf), device=self.device)[:, None].expand_as(leaf)
        return q.flatten(), (start + leaf * LEAF + bound[q, leaf].argmax(2)).flatten()

    def _logits(self, ladder: Ladder, q: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        """Logits less the ladder's offset, and their errors: coarse where the points are kept, else exact."""
        engine = ladder.engine
        if engine.kept is not None:
            return _sampled(ladder.left, engine.kept, q, i).double(), ladder.delta[q]
        exact = ladder.queries.exact_logits(engine.data, engine.log_w, q, i)
        return exact - ladder.offset[q], torch.zeros_like(exact)

    def _two_largest(self, ladder: Ladder, q: Tensor, p: Tensor) -> Tensor:
        """Lower bounds of the two largest logits of every query, ``(B, 2)``, from points at the places ``p``."""
        logit, error = self._logits(ladder, q, self.order[p])
        table, _ = _padded(logit - error, q, len(ladder.x))
        return torch.nn.functional.pad(table, (0, 2), value=-torch.inf).topk(2, dim=1).values

    def _least(self, ladder: Ladder, *tops: Tensor) -> Tensor:
        """The logits below which points may be dropped, given the two largest of disjoint sets of points."""
        reference = torch.cat(tops, 1).topk(2, dim=1).values[:, int(ladder.thorough)]
        return reference - ladder.engine.window


def _sampled(left: Tensor, right: Tensor, q: Tensor, i: Tensor) -> Tensor:
    """``left[q] · right[i]`` for ascending ``q``: those entries alone of a product of matrices."""
    ends = torch.nn.functional.pad(torch.bincount(q, minlength=len(left)).cumsum(0), (1, 0))
    shape, zero = (len(left), len(right)), left.new_zeros(len(q))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        where = torch.sparse_csr_tensor(ends, i, zero, shape, check_invariants=False)
        return torch.sparse.sampled_addmm(where, left, right.mT, beta=0.0).values()


def _padded(value: Tensor, q: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The values of each query as a row, padded with -inf, and the place of each row's first; ``q`` is ascending."""
    size = torch.bincount(q, minlength=count)
    first = size.cumsum(0) - size
    table = torch.full((count, int(size.max())), -torch.inf, dtype=value.dtype, device=value.device)
    table[q, torch.arange(len(q), device=q.device) - first[q]] = value
    return table, first


def _leading(value: Tensor, q: Tensor, count: int) -> Tensor:
    """Where the largest values of each query are, at most ``CANDIDATES``, in the order of queries."""
    table, first = _padded(value, q, count)
    value, place = table.topk(min(CANDIDATES, table.shape[1]), dim=1)
    return (first[:, None] + place)[value > -torch.inf]
