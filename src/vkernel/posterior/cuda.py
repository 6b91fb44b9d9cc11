r"""The engine's path on a GPU: half-precision products that screen, exact values where they matter (docs/theory.md, §2.5).

Tensor cores multiply half-precision numbers sixteen times faster than float32 ones. So the data are kept as

.. math:: y_i = c + u\,(H_i + L_i) + \rho_i, \qquad H_i, L_i \text{ in half precision},

scaled by :math:`u` to the middle of its range; of 8-bit images, with :math:`c` and :math:`u` on their grid, :math:`H`
alone is exact. Queries :math:`x' = (\alpha/\sigma^2)(x - \alpha c)` are split in the same way, :math:`x' \approx x'_H +
x'_L`. One product then gives all logits within a proven

.. math::

   \delta = |x' - x'_H|\, Y + |x'_H|\, R + \epsilon_d\, |x'_H| (Y + R) + 2^{-22} \big(|x'| Y + \tfrac{\alpha^2}{2
   \sigma^2} Y^2\big), \qquad Y = \max_i |y_i - c|, \quad R = \max_i |y_i - c - u H_i| ,

by Cauchy and Schwarz; :math:`\epsilon_d` is the accumulation's error (:func:`accumulation`) and the last term that of
float32 around it. Where products are bound by reading the data (small batches), :math:`x'_L` comes along for nothing,
and the first term shrinks to :math:`|x' - x'_H - x'_L|\, Y`. Each query takes the first rung that is good for it:

1. **few** points lie within :math:`2\delta + \log n + 16` of the largest logit (for covariances: of the second
   largest): they are evaluated in float64 from the stored values, and all others together hold less than
   :math:`e^{-16}`. The data were read once.
2. **many** points: the missing products :math:`x'_L H^T + x'_H L^T` are added; points heavier than
   :math:`(\mathrm{tol}/\delta_{rms})^2`, where what is left of the error would show, are taken out and evaluated in
   float64; the weights of all others, as two half-precision numbers, are multiplied by :math:`H` and :math:`L`, in
   slices of at most 8,192 points, since a tensor core truncates its sum with every step. The two parts are merged.
3. What has too many heavy points goes the engine's own way: float32 and float64 products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vkernel.posterior import kernels_torch
from vkernel.posterior.kernels_torch import FULL, WIDE, Left, Logits, Stored
from vkernel.posterior.moments import Moments, merge
from vkernel.posterior.pieces import Few, Piece, Points, Queries

if TYPE_CHECKING:
    from vkernel.posterior.engine import Engine

__all__ = ["Fast", "accumulation"]

MARGIN = 16.0  # dropped points hold less than exp(-MARGIN) of the weight
TOLERANCE = 1e-5  # of the mean, in units of the data's spread, for what the dense rung leaves in the logits
HEAVY = 2.0**-9  # points with a larger share are always evaluated exactly
EXACT = 2.0**-20  # a residue of the data, relative to their radius, that needs no second half
FLAT = 96  # batches up to this size wait for the data to be read, not for the tensor cores
SLICE = 8192  # points that one accumulator sums over
MOST = 8192  # points of one query that are ever listed
BALANCE = 190.0  # half-precision operations in the time that one byte is read
FAR = 1e30  # logits beyond this are left to float64


def accumulation(d: int, device: torch.device) -> float:
    r"""A bound on the relative error, :math:`|error| \le \epsilon_d \sum_k |a_k b_k|`, of a product of length ``d``.

    A tensor core adds ``terms`` products to its sum at once, cut off ``bits`` bits below the last bit of the largest,
    and truncates the result to float32: 16 and 2 on Hopper and later, 8 and 1 before (Fasi, Higham, Mikaitis and
    Pranesh 2021). A CPU's float32 sums are better than either.
    """
    new = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    terms, bits = (16, 2) if new else (8, 1)
    return (d / terms + 2) * ((terms + 1) * 2.0 ** -(23 + bits) + 2.0**-23)


class Fast:
    """The data of ``engine`` in half precision, and the rungs above.

    ``high`` and ``low (N, D)``, float16 (``low`` is None where ``high`` is exact, or where it does not fit: then rung 2
    is left out), with rows and columns padded by zeros; ``half`` and ``log_w (N,)`` float32.
    """

    def __init__(self, engine: Engine, kernels: ModuleType = kernels_torch) -> None:
        self.engine, self.kernels, data = engine, kernels, engine.data
        self.points = stored(data, engine.log_w)
        self.slices = max(1, math.ceil(data.n / SLICE))
        self.slice = 64 * math.ceil(data.n / self.slices / 64)
        self.rows, self.width = self.slices * self.slice, 64 * math.ceil(data.d / 64)
        self.center, self.unit = self._grid()
        self.half = torch.zeros(self.rows, dtype=torch.float32, device=data.device)
        self.log_w = torch.nn.functional.pad(engine.log_w.float(), (0, self.rows - data.n))
        self.high, self.radius, self.residue = self._halves(None)
        self.low, self.last = None, self.residue
        self.dense = self.residue <= EXACT * self.radius
        if not self.dense and 2 * self.nbytes <= engine.memory // 2:
            self.low, _, self.last = self._halves(self.high)
            self.dense = True

    @classmethod
    def over(cls, engine: Engine) -> Fast | None:
        """For an engine on a GPU with room for the data; ``None`` where its own way is the only one."""
        data = engine.data
        room = 2 * (data.n + SLICE) * (data.d + 64) <= engine.memory // 2
        if data.device.type != "cuda" or data.n == 0 or not data.in_memory or not room:
            return None
        try:
            square = torch.ones((8, 8), dtype=torch.float16, device=data.device)
            torch.mm(square, square, out_dtype=torch.float32)
        except (TypeError, RuntimeError):  # a torch before 2.8 has no such product
            return None
        try:
            from vkernel.posterior import kernels_triton

            return cls(engine, kernels_triton)
        except ImportError:
            return cls(engine)

    @property
    def nbytes(self) -> int:
        return self.high.nbytes * (1 if self.low is None else 2)

    @property
    def usable(self) -> bool:
        """Whether nobody has switched this process to half-precision accumulation, of which the bound knows nothing."""
        return not getattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", False)

    def _grid(self) -> tuple[Tensor, float]:
        """The centre c and the unit u: of 8-bit integers on their grid, so that H is exact."""
        center, table = self.engine.center, self.points.table
        if table is None:
            radius = self.engine.radius
            return center, 2.0 ** math.ceil(math.log2(radius) - 14) if radius > 0 else 1.0
        base, top = float(table[0]), float(table[-1])
        unit = (top - base) / 255
        return base + ((center - base) / unit).round() * unit, unit

    def _halves(self, high: Tensor | None) -> tuple[Tensor, float, float]:
        """H, or beside a given H, L; the largest norm of a point, and of what remains of one."""
        data, device = self.engine.data, self.engine.data.device
        out = torch.zeros((self.rows, self.width), dtype=torch.float16, device=device)
        radius = residue = torch.zeros((), dtype=WIDE, device=device)
        step = max(1, min(self.engine.chunk, (1 << 26) // data.d))
        for start in range(0, data.n, step):
            here = slice(start, min(start + step, data.n))
            y = data.rows(here.start, here.stop).to(WIDE).sub(self.center)
            square = y.square().sum(-1)
            if high is None:
                self.half[here] = (square / 2).float()
                radius = torch.maximum(radius, square.max().sqrt())
            else:
                y -= self.unit * high[here, : data.d].to(WIDE)
            out[here, : data.d] = y / self.unit
            y -= self.unit * out[here, : data.d].to(WIDE)
            residue = torch.maximum(residue, y.square().sum(-1).max().sqrt())
        return out, float(radius), float(residue)

    def cap(self, queries: int) -> int:
        """The length of a list beyond which the dense rung is cheaper than reading the listed points twice."""
        n, d, values = self.engine.data.n, self.width, self.points.values
        copies = 1 if self.low is None else 1.5
        dense = max(4 * n * d, 8 * queries * n * d / BALANCE) * copies
        few = 2 * queries * d * (8 if values is None else values.itemsize)
        return int(2 ** math.floor(math.log2(min(max(dense / few / 2, 64), MOST))))

    def _blocks(self, count: int) -> Iterator[slice]:
        """Blocks of queries whose logits, weights and sums fit into an eighth of the memory."""
        each = 16 * self.rows + 16 * self.slices * self.width
        step = max(1, self.engine.memory // 8 // each)
        return (slice(s, min(s + step, count)) for s in range(0, count, step))

    # --- rung 1 ---------------------------------------------------------------------------------------------------

    def bound(self, queries: Queries, left: Left, planes: int) -> Tensor:
        """The proven error of a logit from the first ``planes`` products with H, ``(B,)``."""
        y, factor = self.radius, queries.alpha / queries.var
        rest = left.rest if planes == 1 else left.rest_low
        seen = left.norm + left.rest
        error = rest * y + seen * (self.residue + self.epsilon * planes * (y + self.residue))
        scale = factor * left.norm * y + queries.alpha.square() / queries.var * y * y / 2
        return factor * error + 2.0**-22 * (scale + (1000 if self.engine.has_weights else 0))

    def logits(self, queries: Queries, left: Left) -> Logits:
        """All logits but for the centre's, from one product."""
        planes = 2 if len(queries) <= FLAT else 1
        factors = left.factors[:planes].reshape(-1, self.width)
        out = product(factors, self.high.mT).reshape(planes, len(queries), self.rows)
        slope = (queries.alpha.square() / queries.var).float()
        return Logits(
            out, left.gain, slope, self.half, self.log_w if self.engine.has_weights else None, self.engine.data.n
        )

    def _screen(self, queries: Queries, thorough: bool) -> tuple[Left, Logits, Tensor, Tensor, Tensor]:
        """The split queries, their logits, and the points that may matter: a table of ``count`` and ``index``.

        Also which queries are within reach of half precision; others have no list.
        """
        left = self.kernels.split(queries, self.center, self.unit, self.width)
        logits = self.logits(queries, left)
        delta = self.bound(queries, left, len(logits.planes))
        first, second = self.kernels.peaks(logits, thorough)
        # A single point has no second: then nothing can be dropped, and nothing need be.
        reference = torch.where(second.isfinite(), second, first) if thorough else first
        near = delta < FAR
        threshold = reference.to(WIDE) - math.log(self.engine.data.n) - MARGIN - 2 * delta
        cap = self.cap(len(queries))
        count, index = self.kernels.select(logits, threshold.float(), cap)
        return left, logits, count.masked_fill(~near, cap + 1), index, near

    def moments(self, queries: Queries) -> Moments:
        """log z and the mean of every query."""
        parts = [self._block(queries[rows]) for rows in self._blocks(len(queries))]
        return Moments(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _block(self, queries: Queries) -> tuple[Tensor, Tensor]:
        left, logits, count, index, near = self._screen(queries, False)
        exact = self.kernels.exact(queries, self.points, count, index)
        log_z, mean = self.kernels.mean(self.points, count, index, exact)
        long = count > index.shape[1]
        wide = (long if not self.dense else long & ~near).nonzero().squeeze(-1)  # the first to wait for the device
        rows = (long & near if self.dense else torch.zeros_like(long)).nonzero().squeeze(-1)
        if len(rows):
            part, missed = self._dense(queries, left, logits, rows)
            log_z[rows], mean[rows] = part.log_z, part.mean
            wide = torch.cat([wide, rows[missed]])
        if len(wide):
            again = self._own(queries[wide])
            log_z[wide], mean[wide] = again.log_z, again.mean
        return log_z, mean

    def _own(self, queries: Queries) -> Moments:
        """The engine's own way."""
        out = Moments.empty(len(queries), self.engine.data.d, frozenset(), None, queries.x.device)
        for block, piece in self.engine.ladders(queries, False):
            out.absorb(block.start + piece.rows, piece.moments(frozenset(), None))
        return out

    def pieces(self, queries: Queries, thorough: bool) -> Iterator[tuple[slice, Piece]]:
        """All weights of all queries: lists where they are short, else pieces of the engine's own."""
        everyone, rest = slice(0, len(queries)), []
        for block in self._blocks(len(queries)):
            _, _, count, index, _ = self._screen(queries[block], thorough)
            q, k = kernels_torch.listed(count, index.shape[1]).nonzero().unbind(1)
            if len(q):
                i = index[q, k].long()
                exact = self.kernels.exact(queries[block], self.points, count, index)
                yield everyone, Few(self.engine.data, q + block.start, i, exact[q, k])
            rest.append((count > index.shape[1]).nonzero().squeeze(-1) + block.start)
        rows = torch.cat(rest)
        if len(rows):
            for block, piece in self.engine.ladders(queries[rows], thorough):
                piece.rows = rows[block][piece.rows]
                yield everyone, piece

    # --- rung 2 ---------------------------------------------------------------------------------------------------

    def typical(self, queries: Queries, left: Left) -> Tensor:
        """The root mean square error of a logit from all products, an estimate as the engine's ``rounding`` is."""
        y, factor = self.radius, queries.alpha / queries.var
        split = (left.rest_low * y + left.norm * self.last + left.rest * self.residue) / 8
        sums = 2.0**-25 * (8 + self.width / 64) * left.norm * y
        return factor * (split + sums) + 2.0**-26 * queries.alpha.square() / queries.var * y * y

    def _dense(self, queries: Queries, left: Left, logits: Logits, rows: Tensor) -> tuple[Moments, Tensor]:
        """The moments of the queries ``rows``, and which of them have too many heavy points for that."""
        if len(rows) < len(queries):
            queries = queries[rows]
            left = Left(left.factors[:, rows], *(a[rows] for a in (left.gain, left.norm, left.rest, left.rest_low)))
            logits = Logits(
                logits.planes[:, rows], left.gain, logits.slope[rows], logits.half, logits.log_w, logits.n
            )
        logits = self._refined(left, logits)
        log_sum = self.kernels.combine(logits)
        logits = logits.combined()
        share = 2 * (math.log(TOLERANCE) - self.typical(queries, left).log())
        heavy = (log_sum + share.clamp_max(math.log(HEAVY))).float()
        cap = self.cap(len(queries))
        count, index = self.kernels.select(logits, heavy, cap)
        exact = self.kernels.exact(queries, self.points, count, index)
        some = Moments(*self.kernels.mean(self.points, count, index, exact))
        self.kernels.strike(logits, count, index)
        weights, total = self.kernels.weights(logits, heavy)
        offset = -left.norm.square() / (2 * queries.var)
        if not self.engine.has_weights:
            offset += self.engine.log_w[0]
        log_z = offset + heavy.to(WIDE) + (total / FULL).log()
        mean = self.center + self._sums(weights) * (self.unit / total.clamp_min(1e-300))[:, None]
        return merge(some, Moments(log_z, mean)), count > cap

    def _refined(self, left: Left, logits: Logits) -> Logits:
        """The products that the screen did without."""
        planes = [logits.planes]
        if len(logits.planes) == 1:
            planes.append(product(left.factors[1], self.high.mT)[None])
        if self.low is not None:
            planes.append(product(left.factors[0], self.low.mT)[None])
        return Logits(torch.cat(planes), *(getattr(logits, a) for a in ("gain", "slope", "half", "log_w", "n")))

    def _sums(self, weights: Tensor) -> Tensor:
        """Sums of H + L with the weights ``(2, B, N)``, in float64."""
        queries = weights.shape[1]

        def over(w: Tensor, y: Tensor) -> Tensor:
            slices = w.reshape(-1, self.slices, self.slice).transpose(0, 1)
            return product(slices, y.view(self.slices, self.slice, self.width)).sum(0, dtype=WIDE)

        out = over(weights, self.high).view(2, queries, self.width).sum(0)
        if self.low is not None:
            out += over(weights[0], self.low)
        return out[:, : self.engine.data.d]


def stored(data: Points, log_w: Tensor) -> Stored:
    """The points where they lie, if a kernel can read them there."""
    values = getattr(data, "_store", None)
    if not isinstance(values, Tensor) or values.stride(1) != 1:
        return Stored(data, log_w)
    if values.dtype in (torch.uint8, torch.int8):
        info = torch.iinfo(values.dtype)
        every = torch.arange(info.min, info.max + 1, device=values.device).to(values.dtype)
        return Stored(data, log_w, values, data._values(every), info.min)  # type: ignore[attr-defined]
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    return Stored(data, log_w, values if values.dtype in floats else None)



def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of half-precision factors, of which there may be a batch, summed and returned in float32."""
    with torch.autocast(a.device.type, enabled=False):
        if a.device.type != "cuda":
            return a.float() @ b.float()
        return (torch.mm if a.ndim == 2 else torch.bmm)(a, b, out_dtype=torch.float32)
