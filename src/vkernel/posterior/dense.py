r"""The reference path: every query with every point, in three stages of accuracy (docs/theory.md, §2.5).

For each chunk of points one coarse product in float32 gives all logits of a block of queries at once,

.. math:: l_i - l_0 = \frac{\alpha}{\sigma^2} (x - \alpha c) \cdot (y_i - c) - \frac{\alpha^2}{2\sigma^2} |y_i - c|^2
   + \log w_i, \qquad l_0 = -\frac{|x - \alpha c|^2}{2 \sigma^2},

with :math:`c` the data's centre (the last two terms are extra columns; equal weights join :math:`l_0`). Its rounding
error is about :math:`\delta = u\,(4 + \sqrt d / 4)\,(\alpha |x - \alpha c| Y + \alpha^2 Y^2 / 2) / \sigma^2` with
:math:`Y = \max |y_i - c|`. Each query takes, chunk by chunk, the cheapest of three stages that is accurate:

1. **sparse**: few points lie within :math:`\log n + 16 + 2\delta` of the largest logit so far (for covariances: of the
   *second* largest). These *candidates*, less the lightest of them, are evaluated again in float64 from the stored
   points; all others together hold less than :math:`e^{-16} \approx 10^{-7}` of the weight (of the weight outside the
   heaviest point);
2. **float32**: points whose weight exceeds :math:`(\mathrm{tol}/\delta_{rms})^2` get exact logits in place; the
   independent errors of the small weights that remain sum to less than tol;
3. **float64**: where even that would not do, both products are made in float64; always in low dimension (d < 32).

Of a chunk's :math:`k` candidates the lightest are dropped while :math:`\sum e^{l + \delta} \le e^{L - \delta - 20}\, k
/ n`, with :math:`L` the largest (or second largest) logit; for this the window is wider by :math:`-\log(1 - e^{-4})`.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from vkernel.posterior import weights as base
from vkernel.posterior.weights import CentredPoints, DenseWeights, Moments, Queries, Span, SparseWeights, Weights

# One block of queries × one chunk of points on a CPU: few enough logits (32 MB) to stay near its caches, enough of
# them that the barriers between threads do not count. On a GPU both follow from the memory alone.
LOGITS = 1 << 23
MARGIN = 16.0  # dropped points hold less than exp(-MARGIN) of the weight outside the heaviest point
TRIM = 20.0  # those that are dropped one by one hold less than exp(-TRIM) of it
FAR = 10.0  # a coarse error beyond which float64's, 2^-29 of it, exceeds 1e-8
TOLERANCE = 1e-5  # of the mean, in units of the data's spread, for what stage 2 leaves in float32
PART = 16  # a row is counted in one of so many parts of its columns first
SPARE = 16  # points proposed beyond the nearest ones


class Block:
    """A block of queries has left factors of the coarse product, its error, and the two largest logits so far."""

    def __init__(self, points: CentredPoints, queries: Queries, covariance: bool = True) -> None:
        self.points, self.queries, self.covariance = points, queries, covariance
        alpha, var, y = queries.alpha, queries.var, points.radius
        self.x = queries.x - alpha[:, None] * points.center
        norm = self.x.square().sum(-1).sqrt()
        self.offset = -norm.square() / (2 * var)
        self.left = torch.cat([self.x * (alpha / var)[:, None], -(alpha.square() / var)[:, None]], 1).float()
        if points.weighted:
            self.left = torch.cat([self.left, torch.ones_like(self.left[:, :1])], 1)
        else:
            self.offset += points.log_w[0]
        self.left = torch.nn.functional.pad(self.left, (0, points.width - self.left.shape[1]))
        self.top = torch.full((len(queries), 2), -torch.inf, dtype=torch.float32, device=norm.device)
        self.size = (alpha * norm * y + (alpha * y).square() / 2) / var
        # An estimate: of 1.5·10⁷ products of 256 noisy images with all 60,000 of Fashion-MNIST none exceeded 1/3 of it.
        self.delta = unit_roundoff(norm.device) * (4 + math.sqrt(points.d) / 4) * self.size
        self.margin = math.log(max(points.n, 1)) + MARGIN
        self.window = self.margin - math.log1p(-math.exp(MARGIN - TRIM))
        self.sparse = torch.ones_like(norm, dtype=torch.bool)  # stage 1 in all chunks so far

    def weights(self, span: Span, room: Tensor | None = None) -> Iterator[Weights]:
        """Yield the weights over some of the points; ``rows`` count from the first query of the block. With ``room``
        for logits, twice, they are stored there and valid until the next are requested."""
        if self.points.d < base.NARROW:
            yield from self._exact(self.float64(torch.arange(len(self.x), device=self.x.device), span))
            return
        half = 0 if room is None else len(room) // 2
        logit = base.product(self.left, span.columns.mT, room)
        peak = logit.max(dim=1)
        first, second = self._two_largest(logit, *peak)
        # A single point has no second: then nothing can be dropped, and nothing need be.
        reference = torch.where(second.isfinite(), second, first) if self.covariance else first
        finite, cap = first.isfinite() & self.delta.isfinite(), max(8, logit.shape[1] // 128)
        least = (reference - self.window - 2 * self.delta).float()
        q, i, few = above(logit, least, finite.nonzero().squeeze(-1), cap)
        sparse = torch.zeros_like(finite)
        sparse[few] = True
        self.sparse &= sparse
        if len(q):  # the candidates, less the lightest
            share = math.log(logit.shape[1] / self.points.n)
            keep = base.trimmed(logit[q, i].double() + self.delta[q], q, reference - self.delta - TRIM + share)
            yield from self._pairs(q[keep], i[keep] + span.part.start)
        if len(few) == len(logit):
            return
        # Which weights, bounded by exp(logit - first), matter enough to need their exact logit? None, where the error
        # is so small that the bound exceeds 1.
        heavy = 2 * (math.log(TOLERANCE) - (self.delta / 8).log())
        tested = (~sparse & finite & (heavy < 0)).nonzero().squeeze(-1)
        q, i, few = above(logit, (first + heavy).float(), tested, cap)
        narrow = ~sparse & finite & (heavy >= 0)
        narrow[few] = True
        doubt = tested[~narrow[tested]]
        if len(doubt):  # the bound on the weights was loose where many share them: normalise by this chunk
            total = first.index_copy(0, doubt, logit[doubt].logsumexp(1).double())
            more, which, few = above(logit, (total + heavy).float(), doubt, cap)
            q, i = torch.cat([q, more]), torch.cat([i, which])
            narrow[few] = True
        if bool(narrow.any()):
            weights = self._float32(logit, (q, i), narrow.nonzero().squeeze(-1), span)
            if len(q) == 0:
                top = peak.values - self.top[:, 0]
                weights.peak = top[weights.rows], peak.indices[weights.rows]
            weights.room = None if room is None else room[half:]
            yield weights
        rest = (~sparse & ~narrow).nonzero().squeeze(-1)
        if len(rest):
            yield from self._exact(self.float64(rest, span))

    def _two_largest(self, logit: Tensor, peak: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two largest logits so far, float64, given those of this chunk that are the largest of their query,
        and their places; the second is needed, and found, for covariances alone."""
        found, place = [self.top, peak[:, None]], place[:, None]
        if self.covariance:  # faster than topk
            found.append(logit.scatter_(1, place, -torch.inf).amax(1, keepdim=True))
            logit.scatter_(1, place, peak[:, None])
        self.top = torch.cat(found, 1).topk(2, dim=1).values
        one, two = self.top.double().unbind(1)
        return one, two

    def exact_logits(self, q: Tensor, i: Tensor) -> Tensor:
        """Return the logits of pairs (query, point) in float64, by differences."""
        return self.queries.exact_logits(self.points.data, self.points.log_w, q, i)

    def _pairs(self, q: Tensor, i: Tensor) -> Iterator[Weights]:
        if len(q):
            yield SparseWeights(self.points.data, q, i, self.exact_logits(q, i))

    def _float32(self, logit: Tensor, heavy: tuple[Tensor, Tensor], rows: Tensor, span: Span) -> DenseWeights:
        """Return float32 weights of the queries ``rows``; those of the pairs ``heavy`` have exact logits."""
        shift = self.top[:, 0]  # measured from it, float32 holds the logits that matter to 1e-7 and better
        offset = self.offset + shift.double()
        logit -= shift[:, None]
        q, i = heavy
        if len(q):
            logit[q, i] = (self.exact_logits(q, i + span.part.start) - offset[q]).float()
        keep = slice(None) if len(rows) == len(logit) else rows  # all of them are not copied
        return DenseWeights(self.points, span.part, span.columns[:, : self.points.d], rows, logit[keep], offset[keep])

    def float64(self, rows: Tensor, span: Span) -> DenseWeights:
        """Return the weights of some of the queries over some of the points, with products in float64."""
        alpha, var = self.queries.alpha[rows], self.queries.var[rows]
        logit = (self.x[rows] * (alpha / var)[:, None]) @ span.float64.mT
        logit -= (alpha.square() / var)[:, None] * self.points.half_square[span.part]
        if self.points.weighted:
            logit += self.points.log_w[span.part]
        return DenseWeights(self.points, span.part, span.float64, rows, logit, self.offset[rows])

    def _exact(self, weights: DenseWeights) -> Iterator[Weights]:
        """Yield the weights as they are, but queries too far away even for float64 as pairs, by differences."""
        far = self.delta[weights.rows] > FAR
        if not bool(far.any()):
            yield weights
            return
        logit, rows = weights.logit[far], weights.rows[far]
        two = logit.topk(min(2, logit.shape[1]), dim=1).values
        q, i = (logit > (two[:, -1] - self.margin - 2.0**-28 * self.delta[rows])[:, None]).nonzero().unbind(1)
        yield from self._pairs(rows[q], i + weights.part.start)
        if not bool(far.all()):
            yield weights.some(~far)


def above(logit: Tensor, least: Tensor, rows: Tensor, cap: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pairs (row, column) of ``logit (B, k)`` that exceed ``least (B,)``, in those of ``rows`` that have at
    most ``cap`` of them, and these rows. All are ascending."""
    start = logit[:, : max(1, logit.shape[1] // PART)]  # rows that exceed cap here need not be read to their end
    crowd = (start > least[:, None]).sum(1, dtype=torch.int32) > cap
    rows = rows[~crowd[rows]]
    if len(rows) == 0:
        return rows, rows, rows
    mask = (logit if len(rows) == len(logit) else logit[rows]) > least[rows, None]
    if int(mask.count_nonzero()) > cap * len(rows):
        few = mask.sum(1, dtype=torch.int32) <= cap
        mask &= few[:, None]  # pairs of crowded rows are not listed
        q, i = mask.nonzero().unbind(1)
    else:  # counting the pairs is faster than summing the mask
        q, i = mask.nonzero().unbind(1)
        few = torch.bincount(q, minlength=len(rows)) <= cap
    keep = few[q]
    return rows[q[keep]], i[keep], rows[few]


class Dense:
    """The reference path serves any query over any data, ``block`` queries and one chunk of points at a time."""

    def __init__(self, points: CentredPoints) -> None:
        self.points = points
        self.spare: list[Tensor] = []  # memory for logits
        self.sparse = 0  # queries so far for which few points held all the weight: a cheaper method may serve those
        logits = points.memory // 64 if points.device.type == "cuda" else min(LOGITS, points.memory // 96)
        self.block = max(1, logits // points.chunk)

    def weights(
        self, queries: Queries, covariance: bool = True, rows: Tensor | None = None, lent: bool = False
    ) -> Iterator[Weights]:
        """Yield all weights of all queries, or of the queries ``rows``; the data are read once. ``lent`` weights are
        valid until the next are requested: their memory is used again."""
        rows = torch.arange(len(queries), device=queries.x.device) if rows is None else rows
        parts = rows.split(self.block) if len(rows) else ()
        blocks = [Block(self.points, queries[part], covariance) for part in parts]
        lent &= bool(blocks) and self.points.device.type == "cpu"  # on a GPU torch itself reuses memory
        room = self._room(2 * len(blocks[0].x) * self.points.chunk) if lent else None
        for span in self.points.spans() if blocks else ():
            for part, block in zip(parts, blocks, strict=True):
                for weights in block.weights(span, room):
                    weights.rows = part[weights.rows]
                    yield weights
        if room is not None:
            self.spare.append(room)
        self.sparse += sum(int(block.sparse.sum()) for block in blocks)

    def _room(self, size: int) -> Tensor:
        """Return memory for logits, one for each thread that is at work."""
        room = self.spare.pop() if self.spare else None
        if room is None or len(room) < size:
            with torch.inference_mode(False):  # to be written to in later calls, of whatever mode
                room = torch.empty(size, dtype=torch.float32, device=self.points.device)
        return room

    def moments(self, queries: Queries) -> Moments:
        """Return log z and the mean of every query."""
        return base.reduce(self.weights(queries, covariance=False, lent=True), queries.x)

    def nearest(self, queries: Queries, k: int) -> tuple[Tensor, Tensor]:
        """Return float64 logits, descending, and indices of each query's ``k ≤ n`` heaviest points, ``(B, k)``."""
        wide, parts = self.points.d < base.NARROW, base.blocks(len(queries), self.block)
        found = [self._nearest(queries[part], k, wide) for part in parts]
        logits, indices = zip(*found, strict=True) if found else ([queries.x.new_empty(0, k)],) * 2
        return torch.cat(logits), torch.cat(indices).long()

    def _nearest(self, queries: Queries, k: int, wide: bool) -> tuple[Tensor, Tensor]:
        """Do so for one block: products, in float32 or ``wide`` in float64, propose points to evaluate exactly."""
        block, n = Block(self.points, queries), self.points.n
        most, every = min(k + SPARE, n), torch.arange(len(queries), device=queries.x.device)
        best, index = queries.x.new_empty((len(every), 0)), every.new_empty((len(every), 0))
        for span in self.points.spans():
            logit = block.float64(every, span).logit if wide else base.product(block.left, span.columns.mT)
            value, place = logit.topk(min(most, logit.shape[1]), dim=1)
            best, index = torch.cat([best, value.double()], 1), torch.cat([index, span.part.start + place], 1)
            best, keep = best.topk(min(most, best.shape[1]), dim=1)
            index = index.gather(1, keep)
        exact = block.exact_logits(every.repeat_interleave(most), index.flatten()).reshape(index.shape)
        logit, order = exact.topk(k, dim=1)
        index = index.gather(1, order)
        # Queries whose last proposal is not below the k-th result, by the rounding of the product, are repeated.
        missed = ~(best[:, -1] + 2 * block.delta < logit[:, -1] - block.offset)
        if not wide and most < n and bool(missed.any()):
            logit[missed], index[missed] = self._nearest(queries[missed], k, wide=True)
        return logit, index


def unit_roundoff(device: torch.device) -> float:
    """Return the relative error of one float32 number in a product; a user may choose tf32, or bf16 at "medium"."""
    if torch.get_float32_matmul_precision() != "highest":
        return 2.0**-9 if torch.get_float32_matmul_precision() == "medium" else 2.0**-11
    return 2.0**-11 if device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32 else 2.0**-24
