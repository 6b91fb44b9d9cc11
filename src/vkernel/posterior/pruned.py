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

**Opening groups.** To split a subspace :math:`Q_g` into axes is to replace :math:`|Q_g \tilde x| |Q_g \tilde y|` by
:math:`Q_g \tilde x \cdot Q_g \tilde y`: a product of the length of the axes and of one more, negative, for the norms,
which is added to a bound. So bounds are tightened for the points that are left, and for no others, step by step.

**Its rounding.** :math:`|a| = |\tilde x|` and :math:`|b| = |\tilde y|`, components are computed in float64, and in
any order of summation a float32 product of length :math:`m` errs by at most :math:`m u` times the product of the
norms. A step adds two such products, of axes and of norms. With twelve more :math:`u` for rounding the factors, the
threshold, what exceeds it, and float64's own digits,

.. math::

   \delta = (\gamma_{m_0} + 2 \gamma_{m_1} + 2 \gamma_{m_2} + \dots)
   \left( \frac{\alpha |\tilde x| Y + \alpha^2 Y^2 / 2}{\sigma^2} + \max_{w > 0} |\log w| + W \right), \qquad
   \gamma_m = \frac{(m + 12)\, u}{1 - (m + 12)\, u}

with :math:`m_0` the length of the short product, :math:`m_1, m_2, \dots` those of the steps and :math:`W` the window
below :math:`L`, is a proven bound: at every step a logit is at most its computed bound plus :math:`\delta`.

**The certificate.** The points with the best bounds are evaluated; the largest (for covariances the *second* largest)
of their logits is at most that of all points: call it :math:`L`. Points whose bound is below :math:`L - \log n - 16`
hold together less than :math:`e^{-16}` of the weight (of the weight that is not at the top) and are dropped: by short
bounds among all points, then after each step among those that are left, then by their coarse logits, of which the
lightest are dropped as on the dense path's first rung (:mod:`~vkernel.posterior.ladder`, whose constants these are).
The few others are evaluated in float64. Points are stored in the order of a k-d tree, so that most leaves are skipped
by the largest bound in them.

**When.** Queries whose bounds leave too many points go to the dense path, and those at a noise level :math:`\sigma /
\alpha` at which that would happen to typical ones (noisy training points, and places midway between two) are not
even tried. The preparation costs as much as a thousand dense queries, and happens once as many have been answered of
which a few points held all the weight: the total is at most about twice the cheaper of never and always. The two
paths differ by rounding, so the calls before count to the last digits and no further.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.posterior.ladder import TRIM
from vkernel.posterior.pieces import Few, Found, Piece, Queries, padded, sampled, trimmed

if TYPE_CHECKING:
    from vkernel.posterior.engine import Engine
    from vkernel.posterior.ladder import Ladder

__all__ = ["Pruned"]

FEWEST, NARROWEST = 4096, 128  # points and dimensions below which a dense query costs too little to save on
AXES = (64, 8), (128, 4), (256, 3), (384, 2)  # of the bounds, shortest first: at most 1/8, 1/4, … of all dimensions
GROUPS = 3, 2, 1  # of the components by which each is longer than the one before; one more group holds the rest
SAMPLE, GRAM = 4096, 1024  # points whose principal components are taken; fewer where they have more coordinates
SLACK = 2.0**-40  # of |y|²: more than float64 loses where a residual is what components leave of it
LEAF = 64  # points whose largest bound is known; a power of two makes that ten times cheaper
SPLIT = 16  # axes along which the tree is split
CHUNK, BOUNDS = 1 << 17, (1 << 22, 1 << 24)  # points, and queries × points (16 to 64 MB), with bounds held at once
LEAVES, CANDIDATES = 8, 16  # the best leaves, and in them the points with the best bounds: evaluated for a large L
CROWD = 8  # a query that keeps more than 1/CROWD of the points costs no less than one of many dense ones
STRAGGLERS = 16  # so few dense queries cost as much as many, for all points are read: they may keep half the points
TYPICAL = 16  # queries of each kind that are tried at a noise level
VAST = 1e8  # an error of bounds that makes them useless; far below it, float32 does not overflow
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
        return torch.cat([a, *(end[:, None] for end in ends)], 1).float()


@dataclass
class Opened:
    """Right factors of the product that opens the groups between ``edges``: what it adds to a bound is ≤ 0."""

    edges: list[int]
    rows: Tensor

    def left(self, ladder: Ladder, components: Tensor) -> Tensor:
        """The left factors, with the norms of the groups, which are to go, negative."""
        a = opened(components, self.edges)
        a[:, self.edges[-1] - self.edges[0] :].neg_()
        return (a * (ladder.queries.alpha / ladder.queries.var)[:, None]).float()


def norms(components: Tensor, edges: list[int]) -> list[Tensor]:
    """Of the groups between edges."""
    return [components[:, i:j].norm(dim=1, keepdim=True) for i, j in pairwise(edges)]


def shorten(components: Tensor, square: Tensor, edges: list[int]) -> Tensor:
    """Axes before ``edges[0]``, the norms of the groups between edges, and the norm of what is beyond all axes."""
    rest = (square - components.square().sum(1)).clamp_min(0.0) + SLACK * square
    return torch.cat([components[:, : edges[0]], *norms(components, edges), rest.sqrt()[:, None]], 1)


def opened(components: Tensor, edges: list[int]) -> Tensor:
    """The axes between the first edge and the last, and the norms of the groups between edges."""
    return torch.cat([components[:, edges[0] : edges[-1]], *norms(components, edges)], 1)


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
        axes = [min(most, max(1, rank // part)) for most, part in AXES]
        self.axes = axes[-1]
        self.steps = [  # edges of the groups that are opened, one step after another
            sorted({round(i * (j / i) ** (g / groups)) for g in range(groups + 1)})
            for (i, j), groups in zip(pairwise(axes), GROUPS, strict=True)
            if i < j
        ]
        self.edges = sorted({axes[0]}.union(*self.steps))
        work = 2 * n * d * self.axes + 2 * self.sample * d * rank + 20 * rank**3
        self.price, self.paid = work / (n * d) if price is None else price, 0
        self.tables: list[Short | Opened] = []
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
        """The columns of a table: the short bounds, or a step."""
        if table == 0:
            return self.edges[0] + len(self.edges) + 1 + engine.has_weights
        edges = self.steps[table - 1]
        return edges[-1] - edges[0] + len(edges) - 1

    def bytes(self, engine: Engine, tables: int) -> int:
        """What is held, with so many tables: they, the tree with its coordinates, and a small block of bounds."""
        width = sum(self.width(engine, table) for table in range(tables))
        return engine.data.n * (4 * width + 8 * SPLIT) + 4 * BOUNDS[0]

    def ready(self, engine: Engine) -> bool:
        """Whether there are bounds; they are prepared as soon as they have been paid for."""
        if not self.tables and self.paid >= self.price:
            self._prepare(engine)
        return bool(self.tables)

    def _prepare(self, engine: Engine) -> None:
        n, room = engine.data.n, engine.memory // 4
        count = max(k for k in range(1, len(self.steps) + 2) if k == 1 or self.bytes(engine, k) <= room)
        self.bounds = max(BOUNDS[0], min(BOUNDS[1], BOUNDS[0] + (room - self.bytes(engine, count)) // 4))
        live = engine.log_w[engine.data.weights > 0]
        self.log_weight = float(live.abs().max()) if engine.has_weights and len(live) else 0.0
        self.basis = self._principal(engine)
        split = torch.empty(n, min(SPLIT, self.axes), dtype=torch.float64, device=self.device)
        for part, y in self._points(engine):
            split[part] = y @ self.basis[:, :SPLIT]
        self.order = tree(split)
        place = torch.empty_like(self.order)
        place[self.order] = torch.arange(n, device=self.device)
        rows = [torch.empty(n, self.width(engine, k), device=self.device, dtype=torch.float32) for k in range(count)]
        for part, y in self._points(engine):
            components, half_square = y @ self.basis, engine.half_square[part]
            b = shorten(components, 2 * half_square, self.edges)
            ends = [half_square[:, None], engine.log_w[part, None]][: rows[0].shape[1] - b.shape[1]]
            rows[0][place[part]] = torch.cat([b, *ends], 1).float()
            for edges, table in zip(self.steps, rows[1:], strict=False):
                table[place[part]] = opened(components, edges).float()
        self.tables = [Short(self.edges, rows[0]), *map(Opened, self.steps, rows[1:])]

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
        for rows in near.split(max(1, self.bounds // min(engine.data.n, CHUNK))) if len(near) else ():
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

    def error(self, ladder: Ladder) -> Tensor:
        r""":math:`\delta`, ``(B,)``: of the bounds before and after any of the steps."""
        gammas = [(table.rows.shape[1] + 12) * ladder.unit for table in self.tables]
        shares = [gamma / (1 - gamma) if gamma < 1 else math.inf for gamma in gammas]
        return (ladder.size + self.log_weight + ladder.window) * (shares[0] + 2 * sum(shares[1:]))

    @torch.autocast("cpu", enabled=False)
    def survivors(self, ladder: Ladder, stragglers: int = STRAGGLERS) -> tuple[Tensor, Tensor, Tensor]:
        """Pairs (query, point) that may matter, both ascending, and which queries are served; the others have none."""
        n, count = ladder.engine.data.n, len(ladder.x)
        components = ladder.x @ self.basis
        lefts, error = [table.left(ladder, components) for table in self.tables], self.error(ladder)
        served = error < VAST
        top = torch.full((count, 2), -torch.inf, dtype=torch.float64, device=self.device)
        buffer = self._buffer(count * (min(n, CHUNK) + LEAF))
        pairs = []

        def admit(size: Tensor) -> Tensor:
            crowded, most = size > min(n, CHUNK) // CROWD, min(n, CHUNK) // 2
            return served.logical_and_(~crowded if int(crowded.sum()) > stragglers else size <= most)

        for start in range(0, n, CHUNK):
            bounds, peaks = self._bounds(lefts[0], slice(start, start + CHUNK), buffer)
            here = self._two_largest(ladder, *self._candidates(bounds, peaks, start))
            least = self._least(ladder, top, here)
            found = Found.among(bounds, peaks, (least - error).float(), start, admit)
            for left, table in zip(lefts[1:], self.tables[1:], strict=True):
                found = found.refined(left, table.rows)
            best = _leading(found.excess, found.q, count)
            here = torch.maximum(here, self._two_largest(ladder, found.q[best], found.p[best]))
            found = found.lowered((least - self._least(ladder, top, here)).float())
            top = torch.cat([top, here], 1).topk(2, dim=1).values
            pairs.append(found.q * n + self.order[found.p])
        self.spare.append(buffer)
        served &= self._least(ladder, top) > LIGHT
        pair = torch.cat(pairs).sort().values
        q, i = pair // n, pair % n
        q, i = q[served[q]], i[served[q]]
        logit, rounding = self._logits(ladder, q, i)
        upper = logit + rounding
        keep = upper > self._least(ladder, top)[q]
        q, i = q[keep], i[keep]
        keep = trimmed(upper[keep], q, self._reference(ladder, top) - TRIM)
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
        flat = bound.flatten(1)
        torch.mm(left, right.mT, out=flat[:, : len(right)])  # at once: threads that meet often wait for the slower one
        flat[:, len(right) :] = -torch.inf
        return bound, bound.amax(2)

    def _candidates(self, bound: Tensor, peaks: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Pairs of every query and the places of the points with the best bounds in the best leaves."""
        leaf = peaks.topk(min(LEAVES, peaks.shape[1]), dim=1).indices
        q = torch.arange(len(leaf), device=self.device)[:, None]
        inside = bound.flatten(0, 1).index_select(0, (q * bound.shape[1] + leaf).flatten()).view(len(leaf), -1)
        value, place = inside.topk(min(CANDIDATES, inside.shape[1]), dim=1)
        p = start + leaf.gather(1, place // LEAF) * LEAF + place % LEAF
        real = value > -torch.inf
        return q.expand_as(p)[real], p[real]

    def _logits(self, ladder: Ladder, q: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        """Logits less the ladder's offset, and their errors: coarse where the points are kept, else exact."""
        engine = ladder.engine
        if engine.kept is not None:
            ends = torch.searchsorted(q, torch.arange(len(ladder.x) + 1, device=q.device))
            zero = ladder.left.new_zeros(len(q))
            return sampled(ladder.left, engine.kept, ends, i, zero).double(), ladder.delta[q]
        exact = ladder.queries.exact_logits(engine.data, engine.log_w, q, i)
        return exact - ladder.offset[q], torch.zeros_like(exact)

    def _two_largest(self, ladder: Ladder, q: Tensor, p: Tensor) -> Tensor:
        """Lower bounds of the two largest logits of every query, ``(B, 2)``, from points at the places ``p``."""
        logit, error = self._logits(ladder, q, self.order[p])
        table, _ = padded(logit - error, q, len(ladder.x))
        return torch.nn.functional.pad(table, (0, 2), value=-torch.inf).topk(2, dim=1).values

    def _reference(self, ladder: Ladder, *tops: Tensor) -> Tensor:
        """The logit L, given the two largest of disjoint sets of points."""
        return torch.cat(tops, 1).topk(2, dim=1).values[:, int(ladder.thorough)]

    def _least(self, ladder: Ladder, *tops: Tensor) -> Tensor:
        """The logits below which points may be dropped."""
        return self._reference(ladder, *tops) - ladder.window


def _leading(value: Tensor, q: Tensor, count: int) -> Tensor:
    """Where the largest values of each query are, at most ``CANDIDATES``, in the order of queries."""
    table, first = padded(value, q, count)
    value, place = table.topk(min(CANDIDATES, table.shape[1]), dim=1)
    return (first[:, None] + place)[value > -torch.inf]
