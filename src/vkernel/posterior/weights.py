r"""Points, queries, posterior weights over one part of the data, and their moments (docs/theory.md, §2.4 and §2.5).

**Moments form a monoid.** A part :math:`A` of the training set, with logits :math:`l_i = \log w_i - |x - \alpha y_i|^2
/ 2\sigma^2`, has the moments

.. math:: z = \sum_{i \in A} e^{l_i}, \qquad r_i = e^{l_i} / z, \qquad m = \sum r_i y_i, \qquad
   c_2 = \sum r_i\, (y_i - m) \otimes (y_i - m)

and two parts with the shares :math:`p_a = z_a / (z_a + z_b)` and :math:`p_b = 1 - p_a` merge by

.. math:: m = p_a m_a + p_b m_b, \qquad c_2 = p_a c_a + p_b c_b + p_a p_b\, \delta \otimes \delta, \qquad
   \delta = m_a - m_b

(Chan, Golub and LeVeque 1979). Of :math:`c_2` one keeps a contraction: its trace, its diagonal, or its product with a
vector. Chunks, devices and machines are merged alike; the neutral element is the empty part, :math:`\log z = -\infty`.

**Weights** have two forms: :class:`SparseWeights`, pairs (query, point) with exact float64 logits, where few points
carry weight and the total share of all others is bounded; :class:`DenseWeights`, a block of logits, queries × points.
Their moments are taken about a *pivot*, the heaviest point :math:`y_*` of the part, so that an exponentially small
covariance keeps its relative accuracy: with :math:`\Delta_i = y_i - y_*`, :math:`e_i = e^{l_i - l_*}` and :math:`S = 1
+ \sum_{i \ne *} e_i`,

.. math:: a = \frac1S \sum_{i \ne *} e_i \Delta_i, \qquad m = y_* + a, \qquad
   c_2 = \frac1S \sum_{i \ne *} e_i \Delta_i \otimes \Delta_i - a \otimes a ."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vkernel.core import rng

WIDE = torch.float64
TIGHT = 0.02  # |y - y*|² / (|y|² + |y*|²), below which float32 would lose more than 1e-5 of a second moment
PAIRS = 1 << 17, 1 << 21  # coordinates (pairs × d) gathered at once, in the caches of a CPU (1 MB), and on a GPU
CHUNK, COORDINATES = 1 << 15, 1 << 25  # points, and coordinates (128 MB), of a chunk on a CPU
LINE = 16  # float32 numbers of a cache line
NARROW = 32  # below this dimension everything is float64
Want = frozenset[str]  # of the moments that may be requested: "trace", "diag", "weights" (square and entropy)
NORMALS = 1 << 24  # random numbers made at once, for which several arrays of 8 bytes are held
DOT = 1024  # products of a row that are summed in the working precision
LIGHT = -1e30  # log of weight zero: products with -inf are nan where a factor is 0, and exp(-1e30) is 0 too


def blocks(count: int, step: int) -> Iterator[slice]:
    """Cut ``range(count)`` into slices of at most ``step``."""
    step = max(1, step)
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


class Points(Protocol):
    """A training set has what the engine needs (see :class:`vkernel.data.empirical.Empirical`).

    >>> import vkernel as vk
    >>> data = vk.data.toy("triple")
    >>> data.n, data.d, data.weights.shape
    (3, 1, torch.Size([3]))
    """

    n: int
    d: int
    device: torch.device
    center: Tensor
    in_memory: bool

    @property
    def weights(self) -> Tensor: ...

    def rows(self, start: int, stop: int) -> Tensor: ...

    def take(self, indices: Tensor) -> Tensor: ...


class CentredPoints:
    """The data are read less their centre, by chunks, within ``memory`` bytes; ``weighted``: their weights differ.
    ``log_w`` and ``half_square`` :math:`= |y - c|^2 / 2` are ``(n,)``, float64, ``radius`` is :math:`\\max |y - c|`.
    ``kept`` holds all columns (:meth:`fill`) if they fit."""

    def __init__(self, data: Points, memory: int, weighted: bool) -> None:
        self.data, self.memory, self.weighted = data, memory, weighted
        self.n, self.d, self.device, self.center = data.n, data.d, data.device, data.center
        self.log_w = data.weights.log().clamp_min(LIGHT)
        gpu = self.device.type == "cuda"
        coordinates = memory // 64 if gpu else min(COORDINATES, memory // 96)
        self.chunk = max(1, min(self.n, coordinates // self.d, 1 << 16 if gpu else CHUNK))
        self.width = self.d + 1 + weighted
        if not gpu:  # rows of whole cache lines, padded by zeros: products on a CPU take a tenth less
            self.width += -self.width % LINE if self.d >= NARROW else 0
        self.half_square = torch.empty(self.n, dtype=WIDE, device=self.device)
        keep = self.d >= NARROW and data.in_memory and 4 * self.n * self.width <= memory // 2
        self.kept = torch.empty(self.n, self.width, dtype=torch.float32, device=self.device) if keep else None
        for span in self.spans():
            self.half_square[span.part] = span.float64.square().sum(-1) / 2
            if self.kept is not None:
                self.fill(self.kept[span.part], span.float64, span.part)
        self.radius = float((2 * self.half_square.max()).sqrt()) if self.n else 0.0

    def spans(self) -> Iterator[Span]:
        """Iterate over all points, as many at a time as fit into the memory."""
        return (Span(self, part) for part in blocks(self.n, self.chunk))

    def fill(self, out: Tensor, y: Tensor, part: slice) -> Tensor:
        """Fill ``out`` with ``[y - c, |y - c|²/2, log w, 0, …]``: the right factor of the coarse product."""
        out[:, : self.d] = y
        out[:, self.d] = self.half_square[part]
        if self.weighted:
            out[:, self.d + 1] = self.log_w[part]
        out[:, self.d + 1 + self.weighted :] = 0.0
        return out


class Span:
    """The points of ``part`` are read at most once in each precision."""

    def __init__(self, points: CentredPoints, part: slice) -> None:
        self.points, self.part = points, part

    @functools.cached_property
    def float64(self) -> Tensor:
        """Read the centred points in float64, ``(k, d)``."""
        return self.points.data.rows(self.part.start, self.part.stop).double() - self.points.center

    @functools.cached_property
    def columns(self) -> Tensor:
        """Return the right factor of the coarse product, float32; its first d columns are the centred points."""
        if self.points.kept is not None:
            return self.points.kept[self.part]
        y, center = self.points.data.rows(self.part.start, self.part.stop), self.points.center
        # In float32 the centre is two numbers: one alone is off by more than the spread of data with a large offset.
        high = center.to(y.dtype)
        y = (y - high).sub_((center - high).to(y.dtype))
        out = torch.empty(len(y), self.points.width, dtype=torch.float32, device=y.device)
        return self.points.fill(out, y, self.part)


@dataclass
class Queries:
    """Queries are points ``x (B, d)`` with ``alpha (B,)`` and ``var = σ² (B,)``, float64 on the data's device.

    >>> import torch, vkernel as vk
    >>> from vkernel.posterior import Queries
    >>> one = torch.ones(4, dtype=torch.float64)
    >>> len(Queries(torch.zeros(4, 2, dtype=torch.float64), one, one).x)
    4
    """

    x: Tensor
    alpha: Tensor
    var: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, rows: slice | Tensor) -> Queries:
        return Queries(self.x[rows], self.alpha[rows], self.var[rows])

    def exact_logits(self, data: Points, log_w: Tensor, q: Tensor, i: Tensor) -> Tensor:
        r"""Return :math:`\log w_i - |x_q - \alpha_q y_i|^2 / 2 \sigma_q^2` of pairs (q, i), float64, by differences."""
        out = torch.empty(len(q), dtype=WIDE, device=self.x.device)
        for s in blocks(len(q), _pairs(data)):
            gap = self.x[q[s]].addcmul_(self.alpha[q[s], None], data.take(i[s]).double(), value=-1)
            out[s] = log_w[i[s]] - gap.square_().sum(-1) / (2 * self.var[q[s]])
        return out


def _pairs(data: Points) -> int:
    """Return the number of points that have about ``PAIRS`` coordinates."""
    return PAIRS[data.device.type != "cpu"] // max(data.d, 1)


@dataclass
class Moments:
    """Moments of ``B`` queries over one part of the data are float64; ``None`` marks what was not requested.

    >>> import torch, vkernel as vk
    >>> from vkernel.posterior import Engine, Queries
    >>> engine = Engine(vk.data.toy("triple"))
    >>> one = torch.ones(1, dtype=torch.float64)
    >>> moments = engine.moments(Queries(0.9 * one[:, None], one, 0.1 * one))
    >>> moments.mean.shape, moments.log_z.shape
    (torch.Size([1, 1]), torch.Size([1]))
    """

    log_z: Tensor  # (B,)
    mean: Tensor  # (B, d)
    trace: Tensor | None = None  # (B,)
    diag: Tensor | None = None  # (B, d)
    product: Tensor | None = None  # (B, d): the covariance times ``vector``
    vector: Tensor | None = None  # (B, d)
    square: Tensor | None = None  # (B,): the sum of r²
    entropy: Tensor | None = None  # (B,): the sum of -r log r

    @classmethod
    def empty(cls, x: Tensor, want: Want = frozenset(), vector: Tensor | None = None) -> Moments:
        """Return the neutral element, the moments over no points, for queries ``x (B, d)``."""
        flat, names = x[:, 0], ["trace"] * ("trace" in want) + ["square", "entropy"] * ("weights" in want)
        wide = ["diag"] * ("diag" in want) + ["product"] * (vector is not None)
        zeros = {name: torch.zeros_like(x if name in wide else flat) for name in names + wide}
        return cls(torch.full_like(flat, -torch.inf), torch.zeros_like(x), vector=vector, **zeros)

    def present(self) -> dict[str, Tensor]:
        """Return the fields that were requested, by name."""
        return {name: a for name, a in vars(self).items() if a is not None}

    def take(self, rows: Tensor | slice) -> Moments:
        """Return the moments of some of the queries."""
        return Moments(**{name: a[rows] for name, a in self.present().items()})

    def put(self, rows: Tensor | slice, other: Moments) -> None:
        """Overwrite the moments of the queries ``rows``."""
        given = other.present()
        for name, a in self.present().items():
            if name != "vector":
                a[rows] = given[name]


def about_pivot(sums: Moments, light: Tensor, pivot: Tensor) -> Moments:
    r"""Return the moments, given the logit of the pivot, ``sums.log_z``, and sums over all other points. These are of
    :math:`e_i` (``light``), :math:`e_i \Delta_i` (mean), :math:`e_i |\Delta_i|^2` (trace), :math:`e_i \Delta_i^2`
    (diag), :math:`e_i \Delta_i (\Delta_i \cdot v)` (product), :math:`e_i^2` and :math:`-e_i \log e_i`."""
    total = 1.0 + light
    wide, a = total[:, None], sums.mean / total[:, None]
    out = Moments(sums.log_z + total.log(), pivot + a, vector=sums.vector)
    if sums.trace is not None:
        out.trace = (sums.trace / total - a.square().sum(-1)).clamp_min(0.0)
    if sums.diag is not None:
        out.diag = (sums.diag / wide - a.square()).clamp_min(0.0)
    if sums.product is not None and sums.vector is not None:
        out.product = sums.product / wide - a * (a * sums.vector).sum(-1, keepdim=True)
    if sums.square is not None and sums.entropy is not None:
        out.square, out.entropy = (1.0 + sums.square) / total.square(), total.log() + sums.entropy / total
    return out


def merge(a: Moments, b: Moments) -> Moments:
    """Return the moments of the union of two disjoint parts of the data."""
    # Two empty parts have the shares exp(-inf + inf) = nan: nothing is shared, so zero is right.
    # From the difference, not from log z: far from the data its last digit is worth more than a share.
    pa, pb = (torch.sigmoid(z).nan_to_num(0.0) for z in (a.log_z - b.log_z, b.log_z - a.log_z))
    wide_a, wide_b, delta = pa[:, None], pb[:, None], a.mean - b.mean
    out = Moments(torch.logaddexp(a.log_z, b.log_z), wide_a * a.mean + wide_b * b.mean, vector=a.vector)
    if a.trace is not None and b.trace is not None:
        out.trace = pa * a.trace + pb * b.trace + pa * pb * delta.square().sum(-1)
    if a.diag is not None and b.diag is not None:
        out.diag = wide_a * a.diag + wide_b * b.diag + wide_a * wide_b * delta.square()
    if a.product is not None and b.product is not None and a.vector is not None:
        along = (delta * a.vector).sum(-1, keepdim=True)
        out.product = wide_a * a.product + wide_b * b.product + wide_a * wide_b * along * delta
    if a.square is not None and b.square is not None:
        out.square = pa.square() * a.square + pb.square() * b.square
    if a.entropy is not None and b.entropy is not None:
        out.entropy = pa * a.entropy + pb * b.entropy + torch.special.entr(pa) + torch.special.entr(pb)
    return out


class SparseWeights:
    """Pairs (query ``q``, point ``i``) have float64 logits; ``q`` is ascending, ``rows`` are the queries in it."""

    def __init__(self, data: Points, q: Tensor, i: Tensor, logit: Tensor) -> None:
        self.data, self.i, self.logit = data, i, logit
        self.rows, self.segment = torch.unique_consecutive(q, return_inverse=True)
        top = torch.full((len(self.rows),), -torch.inf, dtype=WIDE, device=q.device)
        self.top = top.scatter_reduce_(0, self.segment, logit, "amax")

    @property
    def nbytes(self) -> int:
        return 32 * len(self.i) + 16 * len(self.rows) * self.data.d

    def _gaps(self, e: Tensor, pivot: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        r"""Yield, by blocks, the queries of pairs with weight, their :math:`e_i` and :math:`\Delta_i`."""
        live = e.nonzero().squeeze(-1)
        for k in (live[s] for s in blocks(len(live), _pairs(self.data))):
            yield self.segment[k], e[k], pivot[self.segment[k]].neg_().add_(self.data.take(self.i[k]))

    @functools.cached_property
    def _about_pivot(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        r"""Return :math:`e_i`, :math:`y_*`, :math:`\sum e_i \Delta_i` and :math:`\sum e_i |\Delta_i|^2`."""
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

    def moments(self, want: Want, vector: Tensor | None) -> Moments:
        """Return the moments of the queries ``rows``; ``vector (B, d)`` is indexed by them."""
        e, pivot, first, spread = self._about_pivot
        sums = Moments.empty(pivot, want, None if vector is None else vector[self.rows])
        sums.log_z, sums.mean, sums.trace = self.top, first, spread if "trace" in want else None
        for seg, w, delta in self._gaps(e, pivot) if sums.vector is not None or sums.diag is not None else ():
            if sums.diag is not None:
                sums.diag.index_add_(0, seg, w[:, None] * delta.square())
            if sums.vector is not None and sums.product is not None:
                sums.product.index_add_(0, seg, (w * (delta * sums.vector[seg]).sum(-1))[:, None] * delta)
        if sums.square is not None and sums.entropy is not None:
            sums.square.index_add_(0, self.segment, e.square())
            sums.entropy.index_add_(0, self.segment, torch.special.entr(e))
        return about_pivot(sums, torch.zeros_like(self.top).index_add_(0, self.segment, e), pivot)

    def log_mass(self) -> Tensor:
        r"""Return :math:`\log \sum_i e^{l_i}` of the queries ``rows``, float64: log z of :meth:`moments`, by itself."""
        e = (self.logit - self.top[self.segment]).exp()
        return self.top + torch.zeros_like(self.top).index_add_(0, self.segment, e).log()

    def combine(self, about: Moments, vectors: tuple[Tensor, ...], keys: Tensor | None, start: int) -> Tensor:
        r"""Return :math:`\sum_i k_i (y_i - m) \prod_v (y_i - m) \cdot v` for the queries ``rows``, ``(rows, d)``. m and
        log z are those of ``about``; :math:`k_i` is the weight :math:`r_i`, or with ``keys (B,)`` of the queries
        :math:`\sqrt{r_i}` times the normal of the pair (query, point), where ``start`` is the data's first point."""
        k = (self.logit - about.log_z[self.rows][self.segment]).exp()
        if keys is not None:
            k = k.sqrt() * rng.normals(keys[self.rows][self.segment], start + self.i)
        out = torch.zeros((len(self.rows), self.data.d), dtype=WIDE, device=k.device)
        mean, vectors = about.mean[self.rows], tuple(v[self.rows] for v in vectors)
        for s in blocks(len(self.i), _pairs(self.data)):
            seg = self.segment[s]
            gap = self.data.take(self.i[s]).double() - mean[seg]
            factor = math.prod(((gap * v[seg]).sum(-1) for v in vectors), start=k[s])
            out.index_add_(0, seg, factor[:, None] * gap)
        return out

    def table(self) -> tuple[Tensor, Tensor]:
        """Return logits and indices as ``(rows, most pairs)``, padded with -inf and 0."""
        logit, index = (padded(a, self.segment, len(self.rows)) for a in (self.logit, self.i.double()))
        return logit, index.clamp_min(0).long()


@dataclass
class DenseWeights:
    """The queries ``rows`` have the logits ``logit + offset (rows,)`` over the points ``part``. ``centred (k, d)`` are
    these points less the centre, in the working precision, which is that of ``logit``."""

    points: CentredPoints
    part: slice
    centred: Tensor
    rows: Tensor
    logit: Tensor
    offset: Tensor
    peak: tuple[Tensor, Tensor] | None = None  # the largest logit of each row and its place, if they are known
    room: Tensor | None = None  # memory for as many numbers as there are logits

    @property
    def nbytes(self) -> int:
        return self.logit.nbytes + (0 if self.points.data.in_memory else self.centred.nbytes)

    def some(self, keep: Tensor | slice, widened: bool = False) -> DenseWeights:
        """Return the weights of some of the rows; ``widened`` with sums in float64."""
        centred = Span(self.points, self.part).float64 if widened else self.centred  # not the rounded ones
        logit = self.logit[keep].to(centred.dtype)
        return DenseWeights(self.points, self.part, centred, self.rows[keep], logit, self.offset[keep])

    def moments(self, want: Want, vector: Tensor | None) -> Moments:
        """Return the moments of the queries ``rows``; ``vector (B, d)`` is indexed by them."""
        if "diag" in want and self.logit.dtype != WIDE:
            return self.some(slice(None), widened=True).moments(want, vector)
        y, tight = self.centred, None
        top, heaviest = self.logit.max(dim=1) if self.peak is None else self.peak
        e = self._relative(top)
        e.scatter_(1, heaviest[:, None], 0.0)
        light, pivot, raw = e.sum(1).to(WIDE), y[heaviest].to(WIDE), product(e, y).to(WIDE)
        sums = Moments(top.to(WIDE) + self.offset, raw - light[:, None] * pivot)
        if "trace" in want or vector is not None:
            square = 2 * product(e, self.points.half_square[self.part].to(e.dtype)).to(WIDE)
            size = light * pivot.square().sum(-1)
            spread = square - 2 * (pivot * raw).sum(-1) + size
            sums.trace = spread if "trace" in want else None
            if e.dtype != WIDE:  # a tight cluster far from the centre: float32 sums would cancel
                tight = spread < TIGHT * (square + size)
        if "diag" in want:
            sums.diag = product(e, y.square()) - 2 * pivot * raw + light[:, None] * pivot.square()
        if vector is not None:
            v = sums.vector = vector[self.rows]
            along = product(v.to(y.dtype), y.mT)
            along -= (v * pivot).sum(-1, keepdim=True)
            along *= e
            sums.product = product(along, y).to(WIDE) - along.sum(1, keepdim=True).to(WIDE) * pivot
        if "weights" in want:
            sums.square = torch.linalg.vector_norm(e, dim=1).to(WIDE).square()
            sums.entropy = top.to(WIDE) * light - dot(e, self.logit)  # log e = l - top
        out = about_pivot(sums, light, self.points.data.take(self.part.start + heaviest).double())
        if tight is not None and bool(tight.any()):
            out.put(tight, self.some(tight, widened=True).moments(want, vector))
        return out

    def log_mass(self) -> Tensor:
        """Return log z of :meth:`moments` by itself."""
        top = self.logit.amax(1)
        return top.to(WIDE) + self._relative(top).sum(1).to(WIDE).log() + self.offset

    def _relative(self, top: Tensor) -> Tensor:
        """Return the exponentials of the logits less ``top (rows,)``."""
        # fresh memory for 32 MB takes as long as a tenth of a product
        room = None if self.room is None else self.room[: self.logit.numel()].view_as(self.logit)
        return _exp(torch.sub(self.logit, top[:, None], out=room))

    def combine(self, about: Moments, vectors: tuple[Tensor, ...], keys: Tensor | None, start: int) -> Tensor:
        """Return the sums of :meth:`SparseWeights.combine`."""
        y, shift = self.centred, (about.log_z[self.rows] - self.offset).to(self.logit.dtype)
        k = _exp(self.logit - shift[:, None])
        if keys is not None:
            index = torch.arange(start + self.part.start, start + self.part.stop, device=k.device)
            for s in blocks(len(k), NORMALS // k.shape[1]):
                k[s] = k[s].sqrt() * rng.normals(keys[self.rows[s], None], index)
        centre = about.mean[self.rows] - self.points.center
        for v in (v[self.rows] for v in vectors):
            k = k * (product(v.to(y.dtype), y.mT) - (v * centre).sum(-1, keepdim=True).to(y.dtype))
        return product(k, y).double() - k.sum(1, keepdim=True).double() * centre

    def table(self) -> tuple[Tensor, Tensor]:
        """Return logits and indices of all pairs, both ``(rows, points)``."""
        index = torch.arange(self.part.start, self.part.stop, device=self.logit.device).expand(self.logit.shape)
        return self.logit.double() + self.offset[:, None], index


Weights = SparseWeights | DenseWeights


def reduce(parts: Iterable[Weights], x: Tensor, want: Want = frozenset(), vector: Tensor | None = None) -> Moments:
    """Merge the moments of all parts for queries ``x (B, d)``; ``vector (B, d)`` is for a product."""
    out = Moments.empty(x, want, vector)
    for part in parts:
        out.put(part.rows, merge(out.take(part.rows), part.moments(want, vector)))
    return out


def log_mass(parts: Iterable[Weights], x: Tensor) -> Tensor:
    r"""Return :math:`\log \sum_i e^{l_i}` over all parts for queries ``x (B, d)``, without the product of a mean."""
    out = torch.full_like(x[:, 0], -torch.inf)
    for part in parts:
        out[part.rows] = torch.logaddexp(out[part.rows], part.log_mass())
    return out


def padded(value: Tensor, q: Tensor, count: int) -> Tensor:
    """Return the values of each query as a row, padded with -inf; ``q`` is ascending."""
    size = torch.bincount(q, minlength=count)
    first = size.cumsum(0) - size
    table = value.new_full((count, int(size.max()) if count else 0), -torch.inf)
    table[q, torch.arange(len(q), device=q.device) - first[q]] = value
    return table


def trimmed(upper: Tensor, q: Tensor, budget: Tensor) -> Tensor:
    r"""Return which pairs to keep: the others of each query together weigh at most :math:`e^{budget}`, ``(B,)``.
    ``upper`` bounds the logits of the pairs, ``q`` are their queries, ascending. Of the bounds :math:`u_1 \le u_2 \le
    \dots` those before the first :math:`k` with :math:`\sum_{j \le k} e^{u_j} > e^{budget}` are dropped, less any equal
    to :math:`u_k`."""
    if len(q) == 0:
        return torch.ones_like(q, dtype=torch.bool)
    upper = (upper - budget[q]).clamp_max(1.0)  # no exponential of a large number
    table = padded(upper, q, len(budget)).sort(dim=1).values
    k = (table.exp().cumsum(1) <= 1.0).sum(1, keepdim=True)
    least = torch.nn.functional.pad(table, (0, 1), value=torch.inf).gather(1, k).squeeze(1)
    return upper >= least[q]


def product(a: Tensor, b: Tensor, room: Tensor | None = None) -> Tensor:
    """Return ``a @ b`` in the precision of its factors, also inside a user's autocast region; in ``room`` if given."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b if room is None else torch.mm(a, b, out=room[: len(a) * b.shape[1]].view(len(a), b.shape[1]))


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner products of the rows of ``a, b (B, k)`` without an array of their products, summed in float64
    over parts that are short enough for float32."""
    parts = zip(a.split(DOT, 1), b.split(DOT, 1), strict=True)
    return torch.stack([torch.bmm(u[:, None], v[:, :, None])[:, 0, 0].to(WIDE) for u, v in parts]).sum(0)


def _exp(logit: Tensor) -> Tensor:
    """Take the exponential in place, with zero for subnormal results: those make products 10 times slower."""
    floor = math.log(torch.finfo(logit.dtype).tiny)
    return torch.nn.functional.threshold(logit, floor, -torch.inf, inplace=True).exp_()
