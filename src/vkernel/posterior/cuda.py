r"""The engine's path on a GPU: half-precision products screen, exact values decide (docs/theory.md, §2.5).

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
   :math:`(\mathrm{tol}/\delta_{rms})^2`, where what is left of the error would show, and in any case than one in a
   thousand, are taken out and evaluated in float64; the weights of all others, as two half-precision numbers, are
   multiplied by :math:`H` and :math:`L`, in slices of 8,192 points. The two parts are merged. What remains is an
   estimate, not a bound: sums that tensor cores truncate at every step are about 1e-5 too small, and the mean with
   them by less than that (measured: 4e-6 of the spread in 3,072 dimensions, 1e-5 in 12,288).
3. What has too many heavy points goes the engine's own way: float32 and float64 products.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vkernel.posterior import kernels_torch
from vkernel.posterior.kernels_torch import FULL, TINY, WIDE, Left, Light, Logits, Stored
from vkernel.posterior.moments import Moments
from vkernel.posterior.pieces import Few, Piece, Points, Queries
from vkernel.posterior.recorded import Places

if TYPE_CHECKING:
    from vkernel.posterior.engine import Engine

__all__ = ["Fast", "accumulation"]

MARGIN = 16.0  # dropped points hold less than exp(-MARGIN) of the weight
TOLERANCE = 2e-5  # of the mean, in units of the data's spread, for what the dense rung leaves in the logits
EXACT = 2.0**-20  # a residue of the data, relative to their radius, that needs no second half
FLAT = 96  # batches up to this size wait for the data to be read, not for the tensor cores
SLICE = 8192  # points that one accumulator sums over
MOST = 8192  # points of one query that are ever listed
LISTED = 1024  # places for heavy points of one query in rung 2, at least; a share above 1 / places is always heavy
BALANCE = 190.0  # half-precision operations in the time that one byte is read
NARROW = 32  # below this dimension the engine's own way, in float64, is as fast
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


@dataclass
class Screened:
    """Split queries, their logits, and lists of points; ``near``: who is within reach of half precision.

    Others have no list.
    """

    left: Left
    logits: Logits
    count: Tensor
    index: Tensor
    near: Tensor


@dataclass
class Short:
    """What rung 1 leaves: its answers, who goes on to rung 2 (``many``) or 3 (``wide``), and whether any does."""

    left: Left
    logits: Logits
    log_z: Tensor
    mean: Tensor
    many: Tensor
    wide: Tensor
    more: Tensor
    some: Tensor


class Fast:
    """The data of ``engine`` in half precision, and the rungs above.

    ``high`` and ``low (N, D)``, float16 (``low`` is None where ``high`` is exact, or where it does not fit: then rung 2
    is left out), with rows and columns padded by zeros; ``half`` and ``log_w (N,)`` float32.
    """

    def __init__(self, engine: Engine, kernels: ModuleType = kernels_torch) -> None:
        self.engine, self.way, data = engine, kernels.__name__, engine.data
        self.points = stored(data, engine.log_w)
        self.lasting = kernels is not kernels_torch and data.device.type == "cuda" and self.points.values is not None
        self.places, self.went_on = Places(), False
        self.slices = max(1, math.ceil(data.n / SLICE))
        self.slice = 64 * math.ceil(data.n / self.slices / 64)
        self.rows, self.width = self.slices * self.slice, 64 * math.ceil(data.d / 64)
        self.center, self.unit = self._grid()
        self.epsilon = accumulation(self.width, data.device)
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
        if data.device.type != "cuda" or data.n == 0 or data.d < NARROW or not data.in_memory or not room:
            return None
        try:
            square = torch.ones((8, 8), dtype=torch.float16, device=data.device)
            add_product(product(square, square), square, square)
        except (TypeError, RuntimeError):  # a torch before 2.8 has no such product
            return None
        try:
            from vkernel.posterior import kernels_triton

            return cls(engine, kernels_triton)
        except ImportError:
            return cls(engine)

    @property
    def kernels(self) -> ModuleType:
        """The steps, in Triton or in torch; by name, since engines are copied and sent elsewhere."""
        return importlib.import_module(self.way)

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

    def _each(self) -> int:
        """Bytes that one query takes: logits, weights and sums."""
        return 16 * self.rows + (8 if self.low is None else 12) * self.slices * self.width + 32 * self.width

    def _blocks(self, count: int) -> Iterator[slice]:
        """Blocks of queries that fit into an eighth of the memory."""
        step = max(1, self.engine.memory // 8 // self._each())
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
        out = self.half.new_empty((planes, len(queries), self.rows))
        product(left.factors[:planes].flatten(0, 1), self.high.mT, out=out.flatten(0, 1))
        slope = (queries.alpha.square() / queries.var).float()
        log_w = self.log_w if self.engine.has_weights else None
        return Logits(out, left.gain, slope, self.half, log_w, self.engine.data.n)

    def screen(self, queries: Queries, thorough: bool) -> Screened:
        """The logits of all points from one product, and lists of those that may matter."""
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
        return Screened(left, logits, count.masked_fill(~near, cap + 1), index, near)

    def moments(self, queries: Queries) -> Moments:
        """log z and the mean of every query."""
        with torch.inference_mode(False), torch.no_grad():  # what is kept between calls must serve all of them
            out = Moments.empty(len(queries), self.engine.data.d, frozenset(), None, queries.x.device)
            for rows in self._blocks(len(queries)):
                log_z, mean = self._block(queries[rows])
                if len(log_z) == len(queries):
                    return Moments(log_z, mean)
                out.log_z[rows], out.mean[rows] = log_z, mean
            return out

    def _block(self, queries: Queries) -> tuple[Tensor, Tensor]:
        if not self.lasting or self._each() * len(queries) > self.engine.memory // 12:
            return self._climb(queries, lambda name, step: step())
        with self.places.lock, torch.cuda.device(queries.x.device):
            place = self.places(queries)
            log_z, mean = self._climb(place.fill(queries), place.take)
            log_z, mean = log_z.clone(), mean.clone()
            place.free.record()
        return log_z, mean

    def _climb(self, queries: Queries, take: Callable[[str, Callable[[], Any]], Any]) -> tuple[Tensor, Tensor]:
        """log z and the mean of every query; ``take`` takes a step, or repeats it from a record."""
        short = take("few", lambda: self._few(queries))
        log_z, mean, wide, some = short.log_z, short.mean, short.wide, short.some
        # Whoever went on last time will go on: the answer is right in any case, and the device need not wait for us.
        if self.went_on or bool(short.more):
            log_z, mean, wide, some = take("many", lambda: self._many(queries, short))
        self.went_on, far = torch.stack([short.more, some]).tolist()
        if far:
            rows = wide.nonzero().squeeze(-1)
            again = self._own(queries[rows])
            log_z[rows], mean[rows] = again.log_z, again.mean
        return log_z, mean

    def _few(self, queries: Queries) -> Short:
        """Rung 1."""
        seen = self.screen(queries, False)
        exact = self.kernels.exact(queries, self.points, seen.count, seen.index)
        log_z, mean = self.kernels.mean(self.points, seen.count, seen.index, exact)
        long = seen.count > seen.index.shape[1]
        many = long & seen.near if self.dense else torch.zeros_like(long)
        wide = long & ~many
        return Short(seen.left, seen.logits, log_z, mean, many, wide, many.any(), wide.any())

    def _own(self, queries: Queries) -> Moments:
        """The engine's own way."""
        out = Moments.empty(len(queries), self.engine.data.d, frozenset(), None, queries.x.device)
        for block, piece in self.engine._dense(queries, False):
            out.absorb(block.start + piece.rows, piece.moments(frozenset(), None))
        return out

    def pieces(self, queries: Queries, thorough: bool) -> Generator[tuple[slice, Piece], None, Tensor]:
        """All weights of the queries whose lists are short; returns which are not."""
        rest = [torch.zeros(0, dtype=torch.long, device=queries.x.device)]
        for block in self._blocks(len(queries)):
            seen = self.screen(queries[block], thorough)
            count, index = seen.count, seen.index
            q, k = kernels_torch.listed(count, index.shape[1]).nonzero().unbind(1)
            if len(q):
                exact = self.kernels.exact(queries[block], self.points, count, index)
                yield slice(0, len(queries)), Few(self.engine.data, q + block.start, index[q, k].long(), exact[q, k])
            rest.append((count > index.shape[1]).nonzero().squeeze(-1) + block.start)
        return torch.cat(rest)

    # --- rung 2 ---------------------------------------------------------------------------------------------------

    def typical(self, queries: Queries, left: Left) -> Tensor:
        """The root mean square error of a logit from all products, an estimate as the engine's ``rounding`` is."""
        y, factor = self.radius, queries.alpha / queries.var
        split = (left.rest_low * y + left.norm * self.last + left.rest * self.residue) / 8
        sums = 2.0**-24 * (8 + self.width / 512) * left.norm * y
        return factor * (split + sums) + 2.0**-26 * queries.alpha.square() / queries.var * y * y

    def _many(self, queries: Queries, short: Short) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rung 2 for all, since most of its cost is shared: log z, the mean, who needs rung 3, and whether anybody."""
        left, logits = short.left, short.logits
        self._refine(left, logits)
        share = 2 * (math.log(TOLERANCE) - self.typical(queries, left).log())
        cap = min(MOST, max(LISTED, self.cap(len(queries))))
        heavy = (self.kernels.log_sum(logits) + share.clamp_max(-math.log(cap))).float()
        count, index = self.kernels.select(logits, heavy, cap)
        exact = self.kernels.exact(queries, self.points, count, index)
        log_z, mean = self.kernels.mean(self.points, count, index, exact)
        self.kernels.strike(logits, count, index)
        weights, total = self.kernels.weights(logits, heavy)
        rest = -left.norm.square() / (2 * queries.var) + heavy.to(WIDE) + (total / FULL).log()
        if not self.engine.has_weights:
            rest += self.engine.log_w[0]
        light = Light(self.center, self.unit / total.clamp_min(TINY), torch.sigmoid(rest - log_z), short.many)
        mean = self.kernels.finish(self._sums(weights), light, mean, short.mean)
        wide = short.wide | (short.many & (count > cap))
        return torch.where(short.many, torch.logaddexp(log_z, rest), short.log_z), mean, wide, wide.any()

    def _refine(self, left: Left, logits: Logits) -> None:
        """Add the products that the screen did without."""
        if len(logits.planes) == 1:
            add_product(logits.planes[0], left.factors[1], self.high.mT)
        if self.low is not None:
            add_product(logits.planes[0], left.factors[0], self.low.mT)

    def _sums(self, weights: Tensor) -> list[Tensor]:
        """Sums of H and of L with the weights ``(2, B, N)``, ``(slices, 2 B or B, D)``."""

        def over(w: Tensor, y: Tensor) -> Tensor:
            slices = w.reshape(-1, self.slices, self.slice).transpose(0, 1)
            return product(slices, y.view(self.slices, self.slice, self.width))

        return [over(weights, self.high)] + ([] if self.low is None else [over(weights[0], self.low)])


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


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """``a @ b`` of half-precision factors, of which there may be a batch, summed and returned in float32."""
    multiply = torch.mm if a.ndim == 2 else torch.bmm
    with torch.autocast(a.device.type, enabled=False):
        if a.device.type == "cuda":
            return multiply(a, b, out_dtype=torch.float32, out=out)
        return multiply(a.float(), b.float(), out=out)


def add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a @ b`` to ``out``, likewise."""
    with torch.autocast(a.device.type, enabled=False):
        if a.device.type == "cuda":
            torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
        else:
            out.addmm_(a.float(), b.float())
