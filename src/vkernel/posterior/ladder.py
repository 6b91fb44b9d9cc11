r"""The ladder: one block of queries climbs from the coarse logits to the rung that is accurate (docs/theory.md, §2.5).

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
   largest), less the lightest of them: those are evaluated again in float64 from the stored points; all others together
   hold less than :math:`e^{-16} \approx 10^{-7}` of the weight (of the weight that is not at the top), and the second
   product is skipped altogether;
2. **many** points, float32: points whose weight exceeds :math:`(\mathrm{tol}/\delta_{rms})^2` get exact logits in
   place; what is left, independent errors on small weights, sums to less than tol;
3. **many** points, float64: where even that would not do, both products are made in float64.

**What rung 1 drops.** The true largest (or second largest) logit is at least :math:`L`, the coarse one less
:math:`\delta`. Below the window there are at most :math:`n` points, each counted as if it were at its edge; that is far
too many, so that most points inside weigh nothing either. These are known one by one, and are counted at what they may
weigh: of the :math:`k` points of a chunk the lightest are dropped while the sum of :math:`e^{l + \delta}`, with
:math:`l` the coarse logit, is within :math:`e^{L - 20}\, k / n`. Over all chunks that is :math:`e^{L - 20}`, and the
window is wider by :math:`-\log(1 - e^{16 - 20})`, which leaves :math:`e^{L - 16} (1 - e^{-4})` to what is below it:
together :math:`e^{L - 16}`.

Low dimension (d < 32) always takes rung 3: there the products cost less than the exponentials.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vkernel.posterior.pieces import Few, Many, Part, Piece, Queries, product, trimmed

if TYPE_CHECKING:
    from vkernel.posterior.engine import Engine

__all__ = ["Ladder"]

FAR = 10.0  # a coarse error beyond which float64's, 2^-29 of it, exceeds 1e-8
TRIM = 20.0  # points that are dropped one by one hold less than exp(-TRIM) of the weight outside the heaviest point
TOLERANCE = 1e-5  # of the mean, in units of the data's spread, for what rung 2 leaves in float32


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
        margin = engine.window - math.log(max(engine.data.n, 1))
        self.window = engine.window - math.log1p(-math.exp(margin - TRIM))
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
        significant = (reference - self.window - 2 * self.delta).float()
        mask = logit > significant[:, None]
        count = mask.sum(1, dtype=torch.int32)
        cap = max(8, (stop - start) // 128)
        finite = first.isfinite() & self.delta.isfinite()
        few = (count <= cap) & finite
        self.sparse &= few
        if bool((few & (count > 0)).any()):
            piece = self._few(logit, mask & few[:, None], reference - self.delta, start)
            if len(piece.i):
                yield piece
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

    def _few(self, logit: Tensor, mask: Tensor, reference: Tensor, start: int) -> Few:
        """The points of ``mask``, less the lightest, where ``reference`` is L."""
        q, i = mask.nonzero().unbind(1)
        share = math.log(logit.shape[1] / self.engine.data.n)
        keep = trimmed(logit[q, i].double() + self.delta[q], q, reference - TRIM + share)
        q, i = q[keep], i[keep] + start
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
