r"""The data in half precision, and the products with them (docs/theory.md, §2.5).

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
and the first term shrinks to :math:`|x' - x'_H - x'_L|\, Y`.

Where all points carry weight the products with :math:`x'_L` and :math:`L` matter too. There are three ways:

* **one**: :math:`x'_L H^T`, and :math:`L` is left out;
* **both**: :math:`x'_L H^T + x'_H L^T`, in half precision;
* **eighths**: the same for half the price, with fewer digits (:mod:`~vkernel.posterior.eighths`): for large batches, on
  devices that can, if there is room.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from vkernel.posterior.eighths import Eighths, eighths, supported
from vkernel.posterior.kernels_torch import WIDE, Bound, Left, Logits, Stored
from vkernel.posterior.pieces import Points

if TYPE_CHECKING:
    from vkernel.posterior.engine import Engine

__all__ = ["Halves", "Way", "accumulation", "stored"]

Way = Literal["one", "both", "eighths"]

EXACT = 2.0**-20  # a residue of the data, relative to their radius, that needs no second half
FLAT = 96  # batches up to this size wait for the data to be read, not for the tensor cores
SLICE = 8192  # points that one accumulator sums over


def accumulation(d: int, device: torch.device) -> float:
    r"""A bound on the relative error, :math:`|error| \le \epsilon_d \sum_k |a_k b_k|`, of a product of length ``d``.

    A tensor core adds ``terms`` products to its sum at once, cut off ``bits`` bits below the last bit of the largest,
    and truncates the result to float32: 16 and 2 on Hopper and later, 8 and 1 before (Fasi, Higham, Mikaitis and
    Pranesh 2021). A CPU's float32 sums are better than either.
    """
    new = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    terms, bits = (16, 2) if new else (8, 1)
    return (d / terms + 2) * ((terms + 1) * 2.0 ** -(23 + bits) + 2.0**-23)


class Halves:
    """``high`` and ``low (N, D)``, float16, with rows and columns padded by zeros; ``half`` and ``log_w (N,)`` float32.

    ``low`` is None where ``high`` is exact, or where it does not fit; only in the latter case ``whole`` is False.
    """

    def __init__(self, engine: Engine) -> None:
        data = engine.data
        self.n, self.d, self.device, self.weighted = data.n, data.d, data.device, engine.has_weights
        self.points = stored(data, engine.log_w)
        self.slices = max(1, math.ceil(data.n / SLICE))
        self.slice = 64 * math.ceil(data.n / self.slices / 64)
        self.rows, self.width = self.slices * self.slice, 64 * math.ceil(data.d / 64)
        self.center, self.unit = self._grid(engine)
        self.epsilon = accumulation(self.width, data.device)
        self.half = torch.zeros(self.rows, dtype=torch.float32, device=data.device)
        self.log_w = torch.nn.functional.pad(engine.log_w.float(), (0, self.rows - data.n))
        self.high, self.radius, self.residue = self._half(engine, None)
        self.low, self.last = None, self.residue
        self.whole = self.residue <= EXACT * self.radius
        if not self.whole and 2 * self.nbytes <= engine.memory // 2:
            self.low, _, self.last = self._half(engine, self.high)
            self.whole = True
        self.small: Eighths | None = None
        if self.whole and supported(data.device) and 2 * self.nbytes <= engine.memory // 2:
            self.small = Eighths(self.high, self.low)

    @property
    def nbytes(self) -> int:
        return self.high.nbytes * (1 if self.low is None else 2)

    def quick(self, queries: int) -> Way:
        """The cheapest way for so many queries."""
        return "one" if queries <= FLAT or self.small is None else "eighths"

    @property
    def best(self) -> Way:
        """The most accurate way."""
        return "one" if self.low is None else "both"

    def _grid(self, engine: Engine) -> tuple[Tensor, float]:
        """The centre c and the unit u: of 8-bit integers on their grid, so that H is exact."""
        center, table = engine.center, self.points.table
        if table is None:
            radius = engine.radius
            return center, 2.0 ** math.ceil(math.log2(radius) - 14) if radius > 0 else 1.0
        base, top = float(table[0]), float(table[-1])
        unit = (top - base) / 255
        return base + ((center - base) / unit).round() * unit, unit

    def _half(self, engine: Engine, high: Tensor | None) -> tuple[Tensor, float, float]:
        """H, or beside a given H, L; the largest norm of a point, and of what remains of one."""
        out = torch.zeros((self.rows, self.width), dtype=torch.float16, device=self.device)
        radius = residue = torch.zeros((), dtype=WIDE, device=self.device)
        step = max(1, min(engine.chunk, (1 << 26) // self.d))
        for start in range(0, self.n, step):
            here = slice(start, min(start + step, self.n))
            y = engine.data.rows(here.start, here.stop).to(WIDE).sub(self.center)
            square = y.square().sum(-1)
            if high is None:
                self.half[here] = (square / 2).float()
                radius = torch.maximum(radius, square.max().sqrt())
            else:
                y -= self.unit * high[here, : self.d].to(WIDE)
            out[here, : self.d] = y / self.unit
            y -= self.unit * out[here, : self.d].to(WIDE)
            residue = torch.maximum(residue, y.square().sum(-1).max().sqrt())
        return out, float(radius), float(residue)

    def bound(self, queries: int) -> Bound:
        """The proven error of the first product of so many queries, for ``split``."""
        y, planes = self.radius, 2 if queries <= FLAT else 1
        seen = self.residue + self.epsilon * planes * (y + self.residue)  # by what |x'_H| ≤ |x'| + |x' - x'_H| errs
        constant = 1000 * 2.0**-22 if self.weighted else 0.0
        # Of two planes it is |x' - x'_H - x'_L| that is known: then |x' - x'_H| ≤ 2^-10 |x'|, by half precision itself.
        size = (1 + (2.0**-10 if planes == 2 else 0.0)) * seen + 2.0**-22 * y
        more = 1 + 2.0**-20  # numbers reach a kernel in float32
        return Bound(planes, more * (y + seen), more * size, more * 2.0**-23 * y * y, constant)

    def logits(self, left: Left) -> Logits:
        """All logits but for the centre's, from one product."""
        queries = left.factors.shape[1]
        planes = 2 if queries <= FLAT else 1
        room = self.half.new_empty((2, queries, self.rows)) if planes == 1 and self.small is not None else None
        out = self.half.new_empty((planes, queries, self.rows)) if room is None else room[:1]
        product(left.factors[:planes].flatten(0, 1), self.high.mT, out=out.flatten(0, 1))
        return Logits(out, left.gain, left.slope, self.half, self.log_w if self.weighted else None, self.n, room)

    def refine(self, left: Left, logits: Logits, way: Way) -> Logits:
        """Logits with the products that were left out; in place."""
        if way == "eighths" and self.small is not None and logits.room is not None:
            self.small.logits(eighths(left.factors[0], left.factors[1], self.small.both), logits.room[1])
            return replace(logits, planes=logits.room)
        if len(logits.planes) == 1:
            add_product(logits.planes[0], left.factors[1], self.high.mT)
        if way == "both" and self.low is not None:
            add_product(logits.planes[0], left.factors[0], self.low.mT)
        return logits

    def parts(self, way: Way) -> int:
        """Of weights: how many of numbers and rests are wanted as eighths."""
        return 0 if way != "eighths" or self.small is None else 1 + self.small.both

    def sums(self, weights: Tensor, tail: Tensor | None, way: Way) -> list[Tensor]:
        """Sums of points with the weights, in parts ``(slices, k B, D)`` that are still to be added."""

        def over(w: Tensor, y: Tensor) -> Tensor:
            slices = w.reshape(-1, self.slices, self.slice).transpose(0, 1)
            return product(slices, y.view(self.slices, self.slice, self.width))

        if tail is not None and self.small is not None:
            return [over(weights, self.high), self.small.sums(tail)[None]]
        return [over(weights, self.high)] + (
            [over(weights[0], self.low)] if way == "both" and self.low is not None else []
        )


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
