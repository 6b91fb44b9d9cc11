r"""Pruning with a certificate: at low noise a query costs less, since short products exclude most points.

**The bound** (docs/theory.md, §2.5). A logit depends on the query through one inner product, :math:`\tilde x \cdot
\tilde y`, with :math:`\tilde x = x - \alpha c` and :math:`\tilde y = y - c`. Split space into :math:`k` orthonormal
axes :math:`v_j` and into subspaces :math:`Q_1, \dots, Q_G` that fill the rest. By Cauchy and Schwarz in each subspace,

.. math:: \tilde x \cdot \tilde y \le a \cdot b, \qquad a = (v_1 \cdot \tilde x, \dots, v_k \cdot \tilde x, |Q_1
   \tilde x|, \dots, |Q_G \tilde x|), \quad b \text{ alike} .

So a product of length :math:`k + G \ll d` bounds all logits from above. To *open* a group is to add :math:`Q_g \tilde
x \cdot Q_g \tilde y - |Q_g \tilde x| |Q_g \tilde y|`, for the points that are left, step by step. With products of the
lengths :math:`m_0` (short) and :math:`m_1, m_2, \dots` (of the steps) in float32, and with the window :math:`W` below
:math:`L`, a logit is at every step at most its computed bound plus

.. math:: \delta = (\gamma_{m_0} + 2 \gamma_{m_1} + 2 \gamma_{m_2} + \dots) \left( \frac{\alpha |\tilde x| Y + \alpha^2
   Y^2 / 2}{\sigma^2} + \max_{w > 0} |\log w| + W \right), \qquad \gamma_m = \frac{(m + 12)\, u}{1 - (m + 12)\, u} .

**The certificate.** The points with the best bounds are evaluated; the largest (for covariances the *second* largest)
of their logits is at most that of all points: call it :math:`L`. Points whose bound is below :math:`L - \log n - 16`
hold together less than :math:`e^{-16}` of the weight (of the weight that is not at the top) and are dropped: by short
bounds among all points, then after each step among those that are left, then by their coarse logits, of which the
lightest are dropped as in the first stage of the reference path (:mod:`~vkernel.posterior.dense`). The few others, the
candidates, are evaluated in float64. Queries that keep too many points go to the reference path."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.posterior.dense import MARGIN, TRIM, Block, unit_roundoff
from vkernel.posterior.weights import CentredPoints, Queries, SparseWeights, Weights, padded, trimmed

FEWEST, NARROWEST = 4096, 128  # smallest n and d for which pruning is used; a dense query is cheap below
AXES = (64, 8), (128, 4), (256, 3), (384, 2)  # axes of each bound, shortest first: at most 64 and rank / 8, …
GROUPS = 3, 2, 1  # groups Q_g into which the axes between two successive bounds are split
SAMPLE, GRAM = 4096, 1024  # points in the principal component analysis; GRAM points if d is larger than GRAM
SLACK = 2.0**-40  # share of |y|² added to a squared residual norm, larger than its float64 rounding error
LEAF, SPLIT = 64, 16  # points in a leaf of the k-d tree; axes along which the tree is split
CHUNK, BOUNDS = 1 << 17, (1 << 22, 1 << 24)  # points in a chunk; least and largest size B × n of a block of bounds
LEAVES, BEST = 8, 16  # leaves with the largest bounds, and points in them, whose logits are evaluated to find L
CROWD = 8  # a query that keeps more than n/CROWD points is evaluated faster by the reference path
STRAGGLERS = 16  # if at most so many queries exceed n/CROWD points, they are pruned up to n/2 points
TYPICAL = 16  # queries near data, and queries between data, by which the reach is measured
CLOSE = 1e-3  # noise level, in units of the radius of the data, at which logits tell the nearest points
VAST = 1e8  # largest error of a bound for which pruning is tried
LIGHT = -1e29  # logits below this belong to points of weight zero
Admit = Callable[[Tensor], Tensor]  # from the number of candidates of each query to whether the query keeps them


def tree(coordinates: Tensor) -> Tensor:
    """Return an order of the rows in which those of a leaf of a k-d tree, split at medians, follow one another."""
    n, axes = coordinates.shape
    depth = max(0, math.ceil(math.log2(n / LEAF)))
    short = (-n) % (1 << depth)
    key = torch.nn.functional.pad(coordinates, (0, 0, 0, short), value=torch.inf)  # padding sorts last everywhere
    order = torch.arange(n + short, device=key.device)
    for level in range(depth):
        cells = order.view(1 << level, -1)
        order = cells.gather(1, key[cells, level % axes].argsort(1)).flatten()
    return order[:n]


def sampled_product(left: Tensor, right: Tensor, ends: Tensor, i: Tensor, value: Tensor) -> Tensor:
    """Return ``value + left[q] · right[i]``, where ``q`` is b between ``ends[b]`` and ``ends[b + 1]``."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        where = torch.sparse_csr_tensor(ends, i, value, (len(left), len(right)), check_invariants=False)
        return torch.sparse.sampled_addmm(where, left, right.mT).values()


@dataclass
class Candidates:
    """Candidates are points that are left to queries: ``ends[b]`` to ``ends[b + 1]`` are those of query ``b``."""

    ends: Tensor
    p: Tensor  # places in the order of the tree
    excess: Tensor  # by how much bounds exceed the thresholds

    @classmethod
    def among(cls, bounds: Tensor, peaks: Tensor, least: Tensor, start: int, admit: Admit) -> Candidates:
        """Select those of the points from ``start`` on whose bounds exceed ``least``, and only read leaves with any.
        ``bounds`` are ``(B, leaves, size)``, ``peaks (B, leaves)`` the largest of each leaf."""
        queries, size = torch.arange(len(least) + 1, device=least.device), bounds.shape[2]
        q, leaf = (peaks > least[:, None]).nonzero().mT.contiguous()
        inside, least = bounds.flatten(0, 1).index_select(0, q * bounds.shape[1] + leaf), least[q]
        above = inside > least[:, None]
        above &= admit(torch.zeros_like(queries[1:]).index_add_(0, q, above.sum(1)))[q, None]
        place = above.flatten().nonzero().squeeze(1)
        row, shift = place // size, start + size * (leaf - torch.arange(len(leaf), device=leaf.device))
        ends = torch.searchsorted(place, torch.searchsorted(q, queries) * size, out_int32=True)
        excess = inside.flatten().index_select(0, place) - least.index_select(0, row)
        return cls(ends, (place + shift.index_select(0, row)).int(), excess)

    @property
    def q(self) -> Tensor:
        """Return the queries, ascending."""
        return torch.arange(len(self.ends) - 1, device=self.ends.device).repeat_interleave(self.ends.diff())

    def above(self, excess: Tensor) -> Candidates:
        """Keep the candidates whose new ``excess`` is positive."""
        keep = (excess > 0).nonzero().squeeze(1)
        ends = torch.searchsorted(keep, self.ends, out_int32=True)
        return Candidates(ends, self.p.index_select(0, keep), excess.index_select(0, keep))


class Pruned:
    """Prepare short and long bounds of the logits of ``points`` once as many queries as ``price`` have been dense.
    ``price`` is by default what the preparation costs, in dense queries. ``reach`` is the noise level σ/α up to which
    queries are tried, for means (``False``) and for covariances (``True``); by default it is measured when needed."""

    def __init__(self, points: CentredPoints, price: float | None = None, reach: float | None = None) -> None:
        n, d = points.n, points.d
        self.points, self.device = points, points.device
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
        self.price = work / (n * d) if price is None else price
        self.reach = {} if reach is None else {False: reach, True: reach}
        self.tables: list[Tensor] = []  # right factors in the order of the tree: of the short bounds, and of each step
        self.spare: list[Tensor] = []

    @classmethod
    def where_it_pays(cls, points: CentredPoints) -> Pruned | None:
        """Return the method for sets on a CPU that are large enough, if the memory holds their short bounds."""
        if points.device.type != "cpu" or points.n < FEWEST or points.d < NARROWEST:
            return None
        pruned = cls(points)
        return pruned if pruned.nbytes(1) <= points.memory // 4 else None

    @property
    def widths(self) -> list[int]:
        """Return the numbers of columns of the tables: of the short bounds, then of each step."""
        short = self.edges[0] + len(self.edges) + 1 + self.points.weighted
        return [short] + [edges[-1] - edges[0] + len(edges) - 1 for edges in self.steps]

    def nbytes(self, tables: int) -> int:
        """Return the bytes of so many tables, of the tree with its coordinates, and of a small block of bounds."""
        return self.points.n * (4 * sum(self.widths[:tables]) + 8 * SPLIT) + 4 * BOUNDS[0]

    def ready(self, sparse: int) -> bool:
        """Return whether there are bounds; they are prepared after ``price`` dense queries that had sparse weights."""
        if not self.tables and sparse >= self.price:
            self.prepare()
        return bool(self.tables)

    def prepare(self) -> None:
        """Compute the axes, the tree and as many tables as fit into a quarter of the memory."""
        points, n, room = self.points, self.points.n, self.points.memory // 4
        count = max(k for k in range(1, len(self.steps) + 2) if k == 1 or self.nbytes(k) <= room)
        self.bounds = max(BOUNDS[0], min(BOUNDS[1], BOUNDS[0] + (room - self.nbytes(count)) // 4))
        live = points.log_w[points.data.weights > 0]
        self.log_weight = float(live.abs().max()) if points.weighted and len(live) else 0.0
        # The leading principal components of a sample, (d, axes), orthonormal in float64.
        y = points.data.take(torch.linspace(0, n - 1, self.sample, dtype=torch.float64).long()).double() - points.center
        narrow = points.d <= self.sample
        leading = torch.linalg.eigh(y.mT @ y if narrow else y @ y.mT).eigenvectors[:, -self.axes :]
        self.basis = torch.linalg.qr((leading if narrow else y.mT @ leading).flip(1)).Q
        self.order = tree(torch.cat([span.float64 @ self.basis[:, :SPLIT] for span in points.spans()]))
        place = torch.empty_like(self.order)
        place[self.order] = torch.arange(n, device=self.device)
        tables = [torch.empty(n, width, device=self.device, dtype=torch.float32) for width in self.widths[:count]]
        for span in points.spans():
            half, here = points.half_square[span.part], place[span.part]
            ends = half[:, None], points.log_w[span.part, None]
            factors = self.factors(span.float64 @ self.basis, 2 * half, ends, 1.0)
            for table, factor in zip(tables, factors, strict=False):
                table[here] = factor
        self.tables = tables

    def weights(self, queries: Queries, covariance: bool) -> Generator[Weights, None, Tensor]:
        """Yield the weights of the queries for which few points matter; return the numbers of the others."""
        left, points = torch.ones(len(queries), dtype=torch.bool, device=self.device), self.points
        if covariance not in self.reach:
            self.reach[covariance] = self.measured_reach(covariance)
            if self.reach == {False: 0.0, True: 0.0}:  # few axes do not separate these points: never try again
                self.tables, self.spare, self.price = [], [], math.inf
        near = (queries.var.sqrt() <= self.reach[covariance] * queries.alpha).nonzero().squeeze(-1)
        for rows in near.split(max(1, self.bounds // min(points.n, CHUNK))) if len(near) else ():
            q, i, served = self.candidates(Block(points, queries[rows], covariance))
            left[rows[served]], q = False, rows[q]
            if len(q):
                yield SparseWeights(points.data, q, i, queries.exact_logits(points.data, points.log_w, q, i))
        return left.nonzero().squeeze(-1)

    def nearest(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return squared distances and indices of the two nearest points of ``x (B, d)``, float64, whatever their
        weights, ascending, ``(B, 2)``, and whether they were found, ``(B,)``.

        They are the heaviest points at a noise level far below all distances. The candidates for a covariance hold
        every point whose logit is within 16 of the second largest one; so points whose log weights differ by less may
        have logits in another order than distances, but no nearest point is missing."""
        points, count, live = self.points, len(x), self.points.log_w
        square = torch.full((count, 2), torch.inf, dtype=torch.float64, device=self.device)
        index, found = square.new_zeros((count, 2), dtype=torch.long), square.new_zeros(count, dtype=torch.bool)
        if points.n < 2 or float(live.max() - live.min()) > MARGIN:
            return square, index, found
        one = x.new_ones(count, dtype=torch.float64)
        queries = Queries(x.double(), one, (CLOSE * points.radius) ** 2 * one)
        apart = Queries(queries.x, one, one / 2)  # logits without weights are then squared distances
        for part in torch.arange(count, device=self.device).split(max(1, self.bounds // min(points.n, CHUNK))):
            q, i, served = self.candidates(Block(points, queries[part]))
            found[part] = served
            if len(q):
                near = padded(apart.exact_logits(points.data, torch.zeros_like(live), part[q], i), q, len(part))
                near, order = torch.nn.functional.pad(near, (0, 2), value=-torch.inf).topk(2, dim=1)
                place = padded(i.double(), q, len(part)).clamp_min(0).long()
                square[part], index[part] = -near, place.gather(1, order.clamp_max(place.shape[1] - 1))
        return square, index, found

    def measured_reach(self, covariance: bool) -> float:
        """Find the noise level up to which three quarters of typical queries are served, by bisection; 0 for none."""
        stream, data = rng.stream(0, "typical queries"), self.points.data
        index = torch.randint(0, data.n, (3 * TYPICAL,), generator=stream, device=stream.device)
        a, b, c = data.take(index).double().chunk(3)
        noise = rng.randn(tuple(a.shape), stream, self.device, torch.float64)
        one = a.new_ones(2 * TYPICAL)

        def served(level: float) -> bool:
            queries = Queries(torch.cat([a + level * noise, (b + c) / 2]), one, level**2 * one)
            ok = self.candidates(Block(self.points, queries, covariance), stragglers=0)[2]
            return all(4 * int(kind.sum()) >= 3 * TYPICAL for kind in ok.chunk(2))

        low, high = (self.points.radius * factor / math.sqrt(data.d) for factor in (1e-4, 10.0))
        if not low > 0 or not served(low):
            return 0.0
        while high > 1.1 * low:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if served(middle) else (low, middle)
        return low

    def factors(self, components: Tensor, square: Tensor, ends: tuple[Tensor, Tensor], sign: float) -> list[Tensor]:
        """Return the factors of the short product and of each step, from the components and squared norms of vectors. A
        short factor consists of axes, the norms of the groups, the norm of what is beyond all axes, and ``ends``, of
        which the last is for weights; the factor of a step of the axes it opens, and ``sign`` times their norms."""

        def norms(edges: list[int]) -> list[Tensor]:
            return [components[:, i:j].norm(dim=1, keepdim=True) for i, j in pairwise(edges)]

        rest = (square - components.square().sum(1)).clamp_min(0.0) + SLACK * square
        tail = rest.sqrt()[:, None], *ends[: 1 + self.points.weighted]
        out = [[components[:, : self.edges[0]], *norms(self.edges), *tail]]
        out += [[components[:, e[0] : e[-1]], *(sign * a for a in norms(e))] for e in self.steps]
        return [torch.cat(columns, 1).float() for columns in out]

    def left_factors(self, block: Block) -> list[Tensor]:
        """Return the left factors of the products with the tables; norms that a step replaces are negative."""
        alpha, var = block.queries.alpha[:, None], block.queries.var[:, None]
        x, ends = block.x * (alpha / var), (-alpha.square() / var, torch.ones_like(var))
        return self.factors(x @ self.basis, x.square().sum(-1), ends, -1.0)[: len(self.tables)]

    def error(self, block: Block) -> Tensor:
        r"""Return :math:`\delta`, ``(B,)``, of the bounds before and after any of the steps."""
        gammas = [(table.shape[1] + 12) * unit_roundoff(self.device) for table in self.tables]
        shares = [gamma / (1 - gamma) if gamma < 1 else math.inf for gamma in gammas]
        return (block.size + self.log_weight + block.window) * (shares[0] + 2 * sum(shares[1:]))

    @torch.autocast("cpu", enabled=False)
    def candidates(self, block: Block, stragglers: int = STRAGGLERS) -> tuple[Tensor, Tensor, Tensor]:
        """Return pairs (query, point) that may matter, ascending, and which queries are served; others have none."""
        n, count, which = self.points.n, len(block.x), int(block.covariance)
        lefts, error = self.left_factors(block), self.error(block)
        served = error < VAST
        top = torch.full((count, 2), -torch.inf, dtype=torch.float64, device=self.device)
        buffer, pairs = self._buffer(count * (min(n, CHUNK) + LEAF)), []

        def admit(size: Tensor) -> Tensor:
            crowded, most = size > min(n, CHUNK) // CROWD, min(n, CHUNK) // 2
            return served.logical_and_(~crowded if int(crowded.sum()) > stragglers else size <= most)

        for start in range(0, n, CHUNK):
            right = self.tables[0][start : start + CHUNK]
            leaves = math.ceil(len(right) / LEAF)
            bounds = buffer[: count * leaves * LEAF].view(count, leaves, LEAF)
            flat = bounds.flatten(1)
            torch.mm(lefts[0], right.mT, out=flat[:, : len(right)])  # one product: threads synchronise after each
            flat[:, len(right) :] = -torch.inf
            peaks = bounds.amax(2)
            top = torch.cat([top, self._two_largest(block, bounds, peaks, start)], 1).topk(2, dim=1).values
            least = (top[:, which] - block.window - error).float()
            found = Candidates.among(bounds, peaks, least, start, admit)
            for left, table in zip(lefts[1:], self.tables[1:], strict=True):
                found = found.above(sampled_product(left, table, found.ends, found.p, found.excess))
            pairs.append(found.q * n + self.order[found.p])
        self.spare.append(buffer)
        least = top[:, which] - block.window
        served &= least > LIGHT
        pair = torch.cat(pairs).sort().values
        q, i = pair // n, pair % n
        q, i = q[served[q]], i[served[q]]
        upper = torch.add(*self._logits(block, q, i))
        keep = upper > least[q]
        q, i = q[keep], i[keep]
        keep = trimmed(upper[keep], q, top[:, which] - TRIM)
        return q[keep], i[keep], served

    def _buffer(self, size: int) -> Tensor:
        """Reuse room for bounds, one for each thread: fresh memory would cost as much as the product that fills it."""
        buffer = self.spare.pop() if self.spare else None
        if buffer is None or len(buffer) < size:
            with torch.inference_mode(False):  # to be written to in later calls, of whatever mode
                buffer = torch.empty(size, dtype=torch.float32, device=self.device)
        return buffer

    def _two_largest(self, block: Block, bounds: Tensor, peaks: Tensor, start: int) -> Tensor:
        """Bound each query's two largest logits from below, ``(B, 2)``, by the best points of the best leaves."""
        leaf = peaks.topk(min(LEAVES, peaks.shape[1]), dim=1).indices
        q = torch.arange(len(leaf), device=self.device)[:, None]
        inside = bounds.flatten(0, 1).index_select(0, (q * bounds.shape[1] + leaf).flatten()).view(len(leaf), -1)
        value, place = inside.topk(min(BEST, inside.shape[1]), dim=1)
        p, real = start + leaf.gather(1, place // LEAF) * LEAF + place % LEAF, value > -torch.inf
        q = q.expand_as(p)[real]
        logit, error = self._logits(block, q, self.order[p[real]])
        table = padded(logit - error, q, len(block.x))
        return torch.nn.functional.pad(table, (0, 2), value=-torch.inf).topk(2, dim=1).values

    def _logits(self, block: Block, q: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits less the block's offset, and their errors: coarse where the points are kept, else exact."""
        if self.points.kept is None:
            exact = block.exact_logits(q, i)
            return exact - block.offset[q], torch.zeros_like(exact)
        ends = torch.searchsorted(q, torch.arange(len(block.x) + 1, device=q.device))
        coarse = sampled_product(block.left, self.points.kept, ends, i, block.left.new_zeros(len(q)))
        return coarse.double(), block.delta[q]
