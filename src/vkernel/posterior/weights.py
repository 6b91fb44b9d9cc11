r"""Posterior weights over one part of the data, in two forms with the same reductions (docs/theory.md, §2.5).

* :class:`SparseWeights`: pairs (query, point) with exact float64 logits, where few points carry weight; all other
  points lie below a threshold whose total share is bounded.
* :class:`DenseWeights`: a block of logits, queries × points, where many points carry weight.

Every moment is taken about a *pivot*, the heaviest point :math:`y_*` of the part: with :math:`\Delta_i = y_i - y_*`,
:math:`e_i = e^{l_i - l_*}` and :math:`S = 1 + \sum_{i \ne *} e_i`,

.. math::

   a = \frac1S \sum_{i \ne *} e_i \Delta_i, \qquad m = y_* + a, \qquad
   c_2 = \frac1S \sum_{i \ne *} e_i \Delta_i \otimes \Delta_i - a \otimes a .

The pivot itself contributes nothing, so that a covariance that is exponentially small (one point holds almost all the
weight) has full relative accuracy instead of being lost in the rounding of the heavy point.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.posterior.moments import Moments

TIGHT = 0.02  # |y - y*|² / (|y|² + |y*|²), below which float32 would lose more than 1e-5 of a second moment
PAIRS = 1 << 17, 1 << 21  # coordinates (pairs × d) gathered at once, in the caches of a CPU (1 MB), and on a GPU


class Points(Protocol):
    """What the engine needs of a training set (see :class:`vkernel.data.empirical.Empirical`)."""

    n: int
    d: int
    device: torch.device
    weights: Tensor
    center: Tensor
    in_memory: bool
    dtype: torch.dtype

    def rows(self, start: int, stop: int) -> Tensor: ...

    def take(self, indices: Tensor) -> Tensor: ...


@dataclass
class Queries:
    """Queries ``x (B, d)`` with ``alpha (B,)`` and ``var = sigma² (B,)``, all float64 on the data's device."""

    x: Tensor
    alpha: Tensor
    var: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, rows: slice | Tensor) -> Queries:
        return Queries(self.x[rows], self.alpha[rows], self.var[rows])

    def exact_logits(self, data: Points, log_w: Tensor, q: Tensor, i: Tensor) -> Tensor:
        r""":math:`\log w_i - |x_q - \alpha_q y_i|^2 / 2 \sigma_q^2` for pairs (q, i), float64, by differences."""
        out = torch.empty(len(q), dtype=torch.float64, device=self.x.device)
        for s in _blocks(len(q), data):
            y = data.take(i[s]).double()
            gap = self.x[q[s]].addcmul_(self.alpha[q[s], None], y, value=-1)
            out[s] = log_w[i[s]] - gap.square_().sum(-1) / (2 * self.var[q[s]])
        return out


def _blocks(count: int, data: Points) -> Iterator[slice]:
    """Slices of ``range(count)``: so many points have about ``PAIRS`` coordinates."""
    step = max(1, PAIRS[data.device.type != "cpu"] // max(data.d, 1))
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def padded(value: Tensor, q: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The values of each query as a row, padded with -inf, and the place of each row's first; ``q`` is ascending."""
    size = torch.bincount(q, minlength=count)
    first = size.cumsum(0) - size
    table = value.new_full((count, int(size.max()) if count else 0), -torch.inf)
    table[q, torch.arange(len(q), device=q.device) - first[q]] = value
    return table, first


def trimmed(upper: Tensor, q: Tensor, budget: Tensor) -> Tensor:
    r"""Which of the pairs of each query to keep, so that the others together weigh at most :math:`e^{budget}`.

    ``upper`` are upper bounds of the logits of the pairs, ``q`` their queries, ascending, ``budget (B,)`` a logit for
    each query. Sort the bounds of a query, :math:`u_1 \le u_2 \le \dots`; the pairs before the first :math:`k` with
    :math:`\sum_{j \le k} e^{u_j} > e^{budget}` are dropped, but none that is as heavy as the k-th: the sum of what is
    dropped is within the budget, and to drop any more in this order would exceed it.
    """
    if len(q) == 0:
        return torch.ones_like(q, dtype=torch.bool)
    upper = (upper - budget[q]).clamp_max(1.0)  # no exponential of a large number
    table = padded(upper, q, len(budget))[0].sort(dim=1).values
    k = (table.exp().cumsum(1) <= 1.0).sum(1, keepdim=True)
    least = torch.nn.functional.pad(table, (0, 1), value=torch.inf).gather(1, k).squeeze(1)
    return upper >= least[q]


class SparseWeights:
    """Pairs (query ``q``, point ``i``) with float64 ``logit``; ``q`` is ascending, ``rows`` are the queries in it."""

    def __init__(self, data: Points, q: Tensor, i: Tensor, logit: Tensor) -> None:
        self.data, self.i, self.logit = data, i, logit
        self.rows, self.segment = torch.unique_consecutive(q, return_inverse=True)
        top = torch.full((len(self.rows),), -torch.inf, dtype=torch.float64, device=q.device)
        self.top = top.scatter_reduce_(0, self.segment, logit, "amax")

    @property
    def nbytes(self) -> int:
        return 32 * len(self.i) + 16 * len(self.rows) * self.data.d

    def _sum(self, values: Tensor) -> Tensor:
        """The sums over the pairs of each query."""
        out = torch.zeros((len(self.rows), *values.shape[1:]), dtype=torch.float64, device=values.device)
        return out.index_add_(0, self.segment, values)

    def _gaps(self, e: Tensor, pivot: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        r"""By blocks, the queries of pairs with weight, their :math:`e_i` and :math:`\Delta_i`."""
        live = e.nonzero().squeeze(-1)
        for s in _blocks(len(live), self.data):
            k = live[s]
            seg = self.segment[k]
            yield seg, e[k], pivot[seg].neg_().add_(self.data.take(self.i[k]))

    @functools.cached_property
    def _about_pivot(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        r""":math:`e_i`, :math:`y_*`, :math:`\sum e_i \Delta_i` and :math:`\sum e_i |\Delta_i|^2`: means and traces."""
        e, place = (self.logit - self.top[self.segment]).exp(), torch.arange(len(self.i), device=self.i.device)
        place = torch.where(self.logit == self.top[self.segment], place, len(self.i))  # the first of the heaviest
        heaviest = torch.full_like(self.rows, len(self.i)).scatter_reduce_(0, self.segment, place, "amin")
        e[heaviest] = 0.0
        pivot = self.data.take(self.i[heaviest]).double()
        first, spread = torch.zeros_like(pivot), torch.zeros_like(self.top)
        for seg, w, delta in self._gaps(e, pivot):
            spread.index_add_(0, seg, w * torch.linalg.vector_norm(delta, dim=1).square_())
            first.index_add_(0, seg, delta.mul_(w[:, None]))
        return e, pivot, first, spread

    def moments(self, want: frozenset[str], vector: Tensor | None) -> Moments:
        """The moments of the queries ``rows``; ``vector (B, d)`` is indexed by them."""
        e, pivot, first, spread = self._about_pivot
        total = 1.0 + self._sum(e)
        v = None if vector is None else vector[self.rows]
        product, diag = (torch.zeros_like(pivot) if wanted else None for wanted in (v is not None, "diag" in want))
        for seg, w, delta in self._gaps(e, pivot) if v is not None or diag is not None else ():
            if diag is not None:
                diag.index_add_(0, seg, w[:, None] * delta.square())
            if v is not None and product is not None:
                product.index_add_(0, seg, (w * (delta * v[seg]).sum(-1))[:, None] * delta)
        a = first / total[:, None]
        out = Moments(self.top + total.log(), pivot + a, vector=v)
        if "trace" in want:
            out.trace = (spread / total - a.square().sum(-1)).clamp_min(0.0)
        if diag is not None:
            out.diag = (diag / total[:, None] - a.square()).clamp_min(0.0)
        if v is not None and product is not None:
            out.product = product / total[:, None] - a * (a * v).sum(-1, keepdim=True)
        if "weights" in want:
            out.square = (1.0 + self._sum(e.square())) / total.square()
            out.entropy = total.log() + self._sum(torch.special.entr(e)) / total
        return out

    def normalised(self, log_z: Tensor) -> Tensor:
        """The weights :math:`r_i`, one for each pair."""
        return (self.logit - log_z[self.rows][self.segment]).exp()

    def combine(self, mean: Tensor, coefficient: Tensor, vectors: tuple[Tensor, ...]) -> Tensor:
        r""":math:`\sum_i k_i (y_i - m) \prod_v (y_i - m) \cdot v` for one coefficient per pair, ``(rows, d)``."""
        out = torch.zeros((len(self.rows), self.data.d), dtype=torch.float64, device=mean.device)
        mean, vectors = mean[self.rows], tuple(v[self.rows] for v in vectors)
        for s in _blocks(len(self.i), self.data):
            seg = self.segment[s]
            gap = self.data.take(self.i[s]).double() - mean[seg]
            k = coefficient[s]
            for v in vectors:
                k = k * (gap * v[seg]).sum(-1)
            out.index_add_(0, seg, k[:, None] * gap)
        return out

    def normals(self, keys: Tensor, first: int = 0) -> Tensor:
        """The normals that belong to the pairs (query, point), where ``first`` is the data's first point."""
        return rng.normals(keys[self.rows][self.segment], first + self.i)

    def table(self) -> tuple[Tensor, Tensor]:
        """Logits and indices as ``(rows, most pairs)``, padded with -inf and 0: small, for sorting and sums."""
        logit, first = padded(self.logit, self.segment, len(self.rows))
        index = torch.zeros(logit.shape, dtype=torch.long, device=self.i.device)
        index[self.segment, torch.arange(len(self.i), device=self.i.device) - first[self.segment]] = self.i
        return logit, index


@dataclass
class Chunk:
    """Points of the data from ``start`` on, centred; the points of a :class:`DenseWeights`."""

    start: int
    centred: Tensor  # (k, d) y - center, in the working precision
    half_square: Tensor  # (k,) |y - center|² / 2, float64
    data: Points
    center: Tensor  # (d,) float64


class DenseWeights:
    """Logits ``logit + offset`` of the queries ``rows`` over all points of a chunk, in the chunk's precision."""

    def __init__(self, chunk: Chunk, rows: Tensor, logit: Tensor, offset: Tensor) -> None:
        self.chunk, self.rows, self.logit, self.offset = chunk, rows, logit, offset

    @property
    def nbytes(self) -> int:
        return self.logit.nbytes + (0 if self.chunk.data.in_memory else self.chunk.centred.nbytes)

    def moments(self, want: frozenset[str], vector: Tensor | None) -> Moments:
        """The moments of the queries ``rows``; ``vector (B, d)`` is indexed by them."""
        if "diag" in want and self.logit.dtype != torch.float64:
            return self._widened(slice(None)).moments(want, vector)
        y, wide = self.chunk.centred, torch.float64
        top, heaviest = self.logit.max(dim=1)
        e = _exp(self.logit - top[:, None])
        e.scatter_(1, heaviest[:, None], 0.0)
        light = e.sum(1).to(wide)
        total = 1.0 + light
        pivot, centred = self.chunk.data.take(self.chunk.start + heaviest).double(), y[heaviest].to(wide)
        raw = product(e, y).to(wide)
        a = (raw - light[:, None] * centred) / total[:, None]
        out = Moments(top.to(wide) + total.log() + self.offset, pivot + a)
        tight = None
        if "trace" in want or vector is not None:
            square = 2 * product(e, self.chunk.half_square.to(e.dtype)).to(wide)
            size = light * centred.square().sum(-1)
            spread = square - 2 * (centred * raw).sum(-1) + size
            if "trace" in want:
                out.trace = (spread / total - a.square().sum(-1)).clamp_min(0.0)
            if e.dtype != wide:  # a tight cluster far from the centre: float32 sums would cancel
                tight = spread < TIGHT * (square + size)
        if "diag" in want:
            square = product(e, y.square()).to(wide)
            spread = square - 2 * centred * raw + light[:, None] * centred.square()
            out.diag = (spread / total[:, None] - a.square()).clamp_min(0.0)
        if vector is not None:
            v = out.vector = vector[self.rows]
            along = product(v.to(y.dtype), y.mT)
            along -= (v * centred).sum(-1, keepdim=True)
            along *= e
            spread = product(along, y).to(wide) - along.sum(1, keepdim=True).to(wide) * centred
            out.product = spread / total[:, None] - a * (a * v).sum(-1, keepdim=True)
        if "weights" in want:
            out.square = (1.0 + e.square().sum(1).to(wide)) / total.square()
            out.entropy = total.log() + torch.special.entr(e).sum(1).to(wide) / total
        if tight is not None and bool(tight.any()):
            out.put(tight, self._widened(tight).moments(want, vector))
        return out

    def _widened(self, keep: slice | Tensor) -> DenseWeights:
        """The same weights for some of the rows, with sums in float64."""
        stop = self.chunk.start + len(self.chunk.centred)
        exact = self.chunk.data.rows(self.chunk.start, stop).double() - self.chunk.center  # not the rounded ones
        chunk = replace(self.chunk, centred=exact)
        return DenseWeights(chunk, self.rows[keep], self.logit[keep].double(), self.offset[keep])

    def normalised(self, log_z: Tensor) -> Tensor:
        """The weights :math:`r_i`, ``(rows, points)``."""
        shift = (log_z[self.rows] - self.offset).to(self.logit.dtype)
        return _exp(self.logit - shift[:, None])

    def combine(self, mean: Tensor, coefficient: Tensor, vectors: tuple[Tensor, ...]) -> Tensor:
        r""":math:`\sum_i k_i (y_i - m) \prod_v (y_i - m) \cdot v` for coefficients ``(rows, points)``."""
        y = self.chunk.centred
        centre = mean[self.rows] - self.chunk.center
        k = coefficient.to(y.dtype)
        for v in (v[self.rows] for v in vectors):
            k = k * (product(v.to(y.dtype), y.mT) - (v * centre).sum(-1, keepdim=True).to(y.dtype))
        return product(k, y).double() - k.sum(1, keepdim=True).double() * centre

    def normals(self, keys: Tensor, first: int = 0) -> Tensor:
        """The normals that belong to the pairs (query, point), where ``first`` is the data's first point."""
        first += self.chunk.start
        return rng.normals(keys[self.rows, None], torch.arange(first, first + self.logit.shape[1], device=keys.device))

    def table(self) -> tuple[Tensor, Tensor]:
        """Logits and indices of all pairs, both ``(rows, points)``."""
        start, device = self.chunk.start, self.logit.device
        index = torch.arange(start, start + self.logit.shape[1], device=device).expand(self.logit.shape)
        return self.logit.double() + self.offset[:, None], index


Weights = SparseWeights | DenseWeights


def reduce(
    parts: Iterable[Weights], queries: Queries, want: frozenset[str] = frozenset(), vector: Tensor | None = None
) -> Moments:
    """Merge the moments of all parts; ``want`` ⊂ {"trace", "diag", "weights"}, ``vector (B, d)`` for a product."""
    out = Moments.empty(queries.x, want, vector)
    for part in parts:
        out.absorb(part.rows, part.moments(want, vector))
    return out


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in the precision of its factors, also inside a user's autocast region."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


def _exp(logit: Tensor) -> Tensor:
    """The exponential in place, exactly zero before it would be subnormal: those make products 10 times slower."""
    floor = math.log(torch.finfo(logit.dtype).tiny)
    return torch.nn.functional.threshold(logit, floor, -torch.inf, inplace=True).exp_()
