r"""The data in fp16, and the products with them (docs/theory.md, §2.5).

Tensor cores multiply fp16 numbers sixteen times faster than float32 ones. So the data are kept as

.. math:: y_i = c + u\,(H_i + L_i) + \rho_i, \qquad H_i, L_i \text{ in fp16},

scaled by :math:`u` to the middle of its range; of 8-bit images, with :math:`c` and :math:`u` on their grid, :math:`H`
alone is exact. Queries :math:`x' = (\alpha/\sigma^2)(x - \alpha c)` are split in the same way, :math:`x' \approx x'_H +
x'_L`. One product then gives all logits within a proven

.. math::

   \delta = |x' - x'_H|\, Y + |x'_H|\, R + \epsilon_d\, |x'_H| (Y + R) + 2^{-22} \big(|x'| Y + \tfrac{\alpha^2}{2
   \sigma^2} Y^2\big), \qquad Y = \max_i |y_i - c|, \quad R = \max_i |y_i - c - u H_i| ,

by Cauchy and Schwarz; :math:`\epsilon_d` is the accumulation's error (:func:`accumulation`) and the last term that of
float32 around it. Where products are bound by reading the data (small batches), :math:`x'_L` costs nothing more, and
the first term shrinks to :math:`|x' - x'_H - x'_L|\, Y`.

Where all points carry weight the residuals matter too: :math:`x'_L H^T` is always added, and :math:`x'_H L^T` where
``low`` is set, which is the most accurate.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vkernel.data.empirical import Empirical
from vkernel.posterior.dense import CentredPoints
from vkernel.posterior.gpu.steps import WIDE, Bound, Left, Logits, Stored
from vkernel.posterior.weights import Points

__all__ = ["FP16Points", "accumulation"]

EXACT = 2.0**-20  # a residual of the data, relative to their radius, that needs no second number
SMALL = 96  # batches up to this size wait for the data to be read, not for the tensor cores
SLICE = 8192  # points that one accumulator sums over


class FP16Points:
    """``high`` and ``low (N, D)``, fp16, with rows and columns padded by zeros; ``half`` and ``log_w (N,)`` float32.

    ``low`` is None where ``high`` is exact, or where it does not fit; only in the latter case ``complete`` is False.
    ``radius`` is Y, ``residual`` is R, and ``last`` the residual of both numbers.
    """

    def __init__(self, points: CentredPoints) -> None:
        self.points, self.n, self.d = points, points.n, points.d
        self.stored = stored(points.data, points.log_w)
        self.slices = max(1, math.ceil(self.n / SLICE))
        self.slice = 64 * math.ceil((self.n + 1) / self.slices / 64)  # one row at least is no point
        self.rows, self.width = self.slices * self.slice, 64 * math.ceil(self.d / 64)
        self.center, self.unit = self._grid()
        self.epsilon = accumulation(self.width, points.device)
        self.half = torch.zeros(self.rows, dtype=torch.float32, device=points.device)
        self.log_w = torch.nn.functional.pad(points.log_w.float(), (0, self.rows - self.n)) if points.weighted else None
        self.high, self.radius, self.residual = self._rounded(None)
        self.low, self.last = None, self.residual
        self.complete = self.residual <= EXACT * self.radius
        if not self.complete and 2 * self.nbytes <= points.memory // 2:
            self.low, _, self.last = self._rounded(self.high)
            self.complete = True

    @property
    def nbytes(self) -> int:
        return self.high.nbytes * (1 if self.low is None else 2)

    def _grid(self) -> tuple[Tensor, float]:
        """The centre c and the unit u: of 8-bit integers on their grid, so that H is exact."""
        center, table, radius = self.points.center, self.stored.table, self.points.radius
        if table is None:
            return center, 2.0 ** math.ceil(math.log2(radius) - 14) if radius > 0 else 1.0
        base = float(table[0])
        unit = (float(table[-1]) - base) / 255
        return base + ((center - base) / unit).round() * unit, unit

    def _rounded(self, high: Tensor | None) -> tuple[Tensor, float, float]:
        """H, or beside a given H, L; the largest norm of a point, and of what remains of one."""
        out = torch.zeros((self.rows, self.width), dtype=torch.float16, device=self.points.device)
        radius = residual = torch.zeros((), dtype=WIDE, device=self.points.device)
        step = max(1, min(self.points.chunk, (1 << 26) // self.d))
        for start in range(0, self.n, step):
            here = slice(start, min(start + step, self.n))
            y = self.points.data.rows(here.start, here.stop).to(WIDE).sub(self.center)
            if high is None:
                square = y.square().sum(-1)
                self.half[here] = (square / 2).float()
                radius = torch.maximum(radius, square.max().sqrt())
            else:
                y -= self.unit * high[here, : self.d].to(WIDE)
            out[here, : self.d] = y / self.unit
            y -= self.unit * out[here, : self.d].to(WIDE)
            residual = torch.maximum(residual, y.square().sum(-1).max().sqrt())
        return out, float(radius), float(residual)

    def bound(self, queries: int) -> Bound:
        """The proven error of the first product of so many queries, for ``split``."""
        y, planes = self.radius, 2 if queries <= SMALL else 1
        seen = self.residual + self.epsilon * planes * (
            y + self.residual
        )  # errors in units of |x'_H| ≤ |x'| + |x'-x'_H|
        constant = 1000 * 2.0**-22 if self.log_w is not None else 0.0
        # Of two planes it is |x' - x'_H - x'_L| that is known: then |x' - x'_H| ≤ 2^-10 |x'|, by fp16 itself.
        size = (1 + (2.0**-10 if planes == 2 else 0.0)) * seen + 2.0**-22 * y
        more = 1 + 2.0**-20  # numbers reach a kernel in float32
        return Bound(planes, more * (y + seen), more * size, more * 2.0**-23 * y * y, constant)

    def logits(self, left: Left) -> Logits:
        """All logits without the offset :math:`l_0`, from one product; of a small batch, with :math:`x'_L`."""
        queries = left.factors.shape[1]
        planes = 2 if queries <= SMALL else 1
        raw = product(left.factors[:planes].flatten(0, 1), self.high.mT)
        raw = raw if planes == 1 else raw[:queries].add_(raw[queries:])
        return Logits(raw, left.gain, left.slope, self.half, self.log_w, self.n)

    def refine(self, left: Left, logits: Logits, low: bool) -> None:
        """Add the products with the residuals that were left out; in place."""
        if len(logits.raw) > SMALL:
            add_product(logits.raw, left.factors[1], self.high.mT)
        if low and self.low is not None:
            add_product(logits.raw, left.factors[0], self.low.mT)

    def sums(self, weights: Tensor, low: bool) -> Tensor:
        """Sums of the points, in units of u, with ``weights (2, B, N)``: float64, ``(B, d)``."""

        def over(w: Tensor, y: Tensor) -> Tensor:
            slices = w.reshape(-1, self.slices, self.slice).transpose(0, 1)
            parts = product(slices, y.view(self.slices, self.slice, self.width))
            return parts.reshape(-1, weights.shape[1], self.width)[..., : self.d].sum(0, dtype=WIDE)

        total = over(weights, self.high)
        return total + over(weights[0], self.low) if low and self.low is not None else total


def accumulation(d: int, device: torch.device) -> float:
    r"""A bound on the relative error, :math:`|error| \le \epsilon_d \sum_k |a_k b_k|`, of a product of length ``d``.

    A tensor core adds ``terms`` products to its sum at once, cut off ``bits`` bits below the last bit of the largest,
    and truncates the result to float32: 16 and 2 on Hopper and later, 8 and 1 before (Fasi, Higham, Mikaitis and
    Pranesh 2021). A CPU's float32 sums are better than either.
    """
    new = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    terms, bits = (16, 2) if new else (8, 1)
    return (d / terms + 2) * ((terms + 1) * 2.0 ** -(23 + bits) + 2.0**-23)


def stored(data: Points, log_w: Tensor) -> Stored:
    """The points in storage, if a kernel can read them there."""
    values = data.storage if isinstance(data, Empirical) else None
    if not isinstance(data, Empirical) or values is None or values.stride(1) != 1:
        return Stored(data, log_w)
    if values.dtype in (torch.uint8, torch.int8):
        info = torch.iinfo(values.dtype)
        every = torch.arange(info.min, info.max + 1, device=values.device).to(values.dtype)
        return Stored(data, log_w, values, data.values(every), info.min)
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    return Stored(data, log_w, values if values.dtype in floats else None)


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of fp16 factors, of which there may be a batch, summed and returned in float32."""
    with torch.autocast(a.device.type, enabled=False):
        if a.device.type != "cuda":
            return a.float() @ b.float()
        return (torch.mm if a.ndim == 2 else torch.bmm)(a, b, out_dtype=torch.float32)


def add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a @ b`` of fp16 factors to ``out``, summed in float32."""
    with torch.autocast(a.device.type, enabled=False):
        if a.device.type == "cuda":
            torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
        else:
            out.addmm_(a.float(), b.float())


def supported(device: torch.device) -> bool:
    """Whether torch multiplies fp16 numbers into float32 sums here; before version 2.8 it does not."""
    try:
        square = torch.ones((8, 8), dtype=torch.float16, device=device)
        add_product(product(square, square), square, square)
    except (TypeError, RuntimeError):
        return False
    return True
