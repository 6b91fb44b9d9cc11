r"""The data in fp16, the products with them, and the errors of tensor cores (docs/theory.md, §2.5).

Tensor cores multiply fp16 numbers sixteen times faster than float32 ones. So the data are kept as :math:`y_i = c +
u\,(H_i + L_i) + \rho_i` with :math:`H_i` and :math:`L_i` in fp16, scaled by :math:`u` to the middle of its range; of
8-bit images, with :math:`c` and :math:`u` on their grid, :math:`H` alone is exact. Queries :math:`x' = \alpha (x -
\alpha c) / \sigma^2` are split alike, :math:`x' \approx x'_H + x'_L`. One product gives all logits, by Cauchy and
Schwarz, within

.. math:: \delta = |x' - x'_H|\, Y + |x'_H|\, R + \epsilon_d\, |x'_H| (Y + R) + 2^{-22} \big(|x'| Y +
   \tfrac{\alpha^2}{2 \sigma^2} Y^2\big), \qquad Y = \max_i |y_i - c|, \quad R = \max_i |y_i - c - u H_i| ,

where :math:`\epsilon_d` is the accumulation's error (:func:`accumulation`) and the last term that of float32 around it.
Where products are bound by reading the data (small batches), :math:`x'_L` costs nothing more, and the first term
shrinks to :math:`|x' - x'_H - x'_L|\, Y`.

Where all points carry weight the residuals matter too: :math:`x'_L H^T` is always added. A ``Stage`` may add
:math:`x'_H L^T` to the logits, and may sum the points with weights that are sums of two fp16 numbers, and with L; else
weights are one number, and only H is summed. The errors are measured on the data: with exact sums :math:`s` the
computed ones are :math:`(1 - \lambda)\, s` plus a rest, where :math:`\lambda` is divided out, and the rms
:math:`\eta` of the rest is the error of a logit. The share of a heavy point is wrong by :math:`\nu`, and that of any
point, where it is one fp16 number, by 2.1e-4 (rms of a rounding to 11 bits). What these do not explain of errors of
means is a floor."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.data import Empirical
from vkernel.posterior.weights import WIDE, CentredPoints, Points, Queries, blocks

FULL = 2.0**14  # fp16 numbers reach 2^16: vectors are scaled to this norm, weights to at most this
TINY = 1e-200  # a norm that may be divided by
EXACT = 2.0**-20  # a residual of the data, relative to their radius, that needs no second number
SMALL = 96  # batches up to this size wait for the data to be read, not for the tensor cores
SLICE = 8192  # points that one accumulator sums over
ROUNDED = 2.1e-4  # rms of the relative rounding of a weight to fp16: 2^-11/√3, times rms 1/m = .74 of a mantissa
POINTS, MEANS = 2048, 16  # points whose logits, and queries whose means, are compared when errors are measured


@dataclass(frozen=True)
class Stage:
    """A dense stage has logits with the residuals of the data, or sums with them and with weights of two numbers."""

    logits: bool
    sums: bool

    @property
    def planes(self) -> int:
        """Return of how many fp16 numbers a weight is the sum."""
        return 2 if self.sums else 1


STAGES = Stage(False, False), Stage(True, False), Stage(True, True)  # light, middle, full


@dataclass
class Logits:
    r"""The logits of a batch over all points are :math:`l_0 + g P - \tfrac12 a |y_i - c|^2 + \log w_i`."""

    points: FP16Points
    factors: Tensor  # (2, B, width): the queries as fp16 numbers, u x' = g (X_0 + X_1) + …
    gain: Tensor  # (B,): g, float32
    slope: Tensor  # (B,): a = α²/σ², float32
    norm: Tensor  # (B,): |x - αc|, float64
    size: Tensor  # (B,): |x'|, float64
    delta: Tensor  # (B,): a bound on the error of the first product, float64
    raw: Tensor  # (B, N): P, where -inf marks a point that was taken out


class FP16Points:
    """The points are kept as ``high`` and ``low (N, D)``, fp16, with rows and columns padded by zeros. ``low`` is None
    where ``high`` is exact, or where it does not fit: then ``complete`` is False. ``radius`` is Y, ``residual`` R,
    ``last`` what both leave. ``values (n, d)`` are as stored, of 8-bit integers places in ``table``."""

    def __init__(self, points: CentredPoints) -> None:
        self.points, self.n, self.d = points, points.n, points.d
        self.center, self.table, self.first = points.center, None, 0
        stored = in_place(points.data)
        self.values = points.data.rows(0, self.n).contiguous() if stored is None else stored
        self.unit = 2.0 ** math.ceil(math.log2(points.radius) - 14) if points.radius > 0 else 1.0
        if isinstance(points.data, Empirical) and self.values.dtype in (torch.uint8, torch.int8):
            info = torch.iinfo(self.values.dtype)
            every = torch.arange(info.min, info.max + 1, device=points.device).to(self.values.dtype)
            self.table, self.first = points.data.values(every), info.min
            base, last = float(self.table[0]), float(self.table[-1])
            self.unit = (last - base) / 255
            self.center = base + ((self.center - base) / self.unit).round() * self.unit
        self.slices = max(1, math.ceil(self.n / SLICE))
        self.slice = 64 * math.ceil((self.n + 1) / self.slices / 64)  # one row at least is no point
        self.rows, self.width = self.slices * self.slice, 64 * math.ceil(self.d / 64)
        self.epsilon = accumulation(self.width, points.device)
        self.half = torch.zeros(self.rows, dtype=torch.float32, device=points.device)
        self.log_w = torch.nn.functional.pad(points.log_w.float(), (0, self.rows - self.n)) if points.weighted else None
        self.high, self.radius, self.residual = self._rounded(None)
        self.low, self.last, self.nbytes = None, self.residual, self.high.nbytes
        self.complete = self.residual <= EXACT * self.radius
        if not self.complete and 2 * self.nbytes <= points.memory // 2:
            self.low, _, self.last = self._rounded(self.high)
            self.nbytes, self.complete = 2 * self.nbytes, True
        self.spread = max(float((2 * self.half[: self.n].to(WIDE).mean()).sqrt()), TINY)

    def _rounded(self, high: Tensor | None) -> tuple[Tensor, float, float]:
        """Return H, or beside a given H, L; and the largest norms of a point and of what remains of one."""
        out = torch.zeros((self.rows, self.width), dtype=torch.float16, device=self.points.device)
        radius = residual = torch.zeros((), dtype=WIDE, device=self.points.device)
        for here in blocks(self.n, min(self.points.chunk, (1 << 26) // self.d)):
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

    def bound(self, queries: int) -> tuple[int, float, float, float, float]:
        r"""Return the number of factors (planes) of a query that the first product of a batch uses, with the sum
        :math:`\hat x`, and a, b, c, e of its error :math:`a |x' - \hat x| + b |x'| + c \alpha^2/\sigma^2 + e`."""
        y, planes = self.radius, 2 if queries <= SMALL else 1
        seen = self.residual + self.epsilon * planes * (y + self.residual)  # in units of |x'_H| ≤ |x'| + |x' - x'_H|
        # Of two planes it is |x' - x'_H - x'_L| that is known: then |x' - x'_H| ≤ 2^-10 |x'|, by fp16 itself.
        size = (1 + (2.0**-10 if planes == 2 else 0.0)) * seen + 2.0**-22 * y
        more = 1 + 2.0**-20  # numbers reach a kernel in float32
        constant = 0.0 if self.log_w is None else 1000 * 2.0**-22
        return planes, more * (y + seen), more * size, more * 2.0**-23 * y * y, constant

    def multiply(self, factors: Tensor) -> Tensor:
        """Multiply the queries by all points, ``(B, N)``; a small batch with :math:`x'_L` too."""
        queries = factors.shape[1]
        if queries > SMALL:
            return product(factors[0], self.high.mT)
        both = product(factors.flatten(0, 1), self.high.mT)
        return both[:queries].add_(both[queries:])

    def refine(self, logits: Logits, stage: Stage) -> None:
        """Add the products with the residuals that were left out; in place."""
        if len(logits.raw) > SMALL:
            add_product(logits.raw, logits.factors[1], self.high.mT)
        if stage.logits and self.low is not None:
            add_product(logits.raw, logits.factors[0], self.low.mT)

    def sums(self, weights: Tensor, stage: Stage) -> list[Tensor]:
        """Sum the points, in units of u, with ``weights (planes, B, N)``: parts ``(·, B, D)``, yet to be added."""

        def over(w: Tensor, y: Tensor) -> Tensor:
            slices = w.reshape(-1, self.slices, self.slice).transpose(0, 1)
            parts = product(slices, y.view(self.slices, self.slice, self.width))
            return parts.reshape(-1, weights.shape[1], self.width)

        return [over(weights, self.high)] + (
            [over(weights[0], self.low)] if stage.sums and self.low is not None else []
        )


def in_place(data: Points) -> Tensor | None:
    """Return the stored points ``(n, d)``, if kernels can read them as they are."""
    stored = data.storage if isinstance(data, Empirical) else None
    kinds = torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.float64
    return stored if stored is not None and stored.is_contiguous() and stored.dtype in kinds else None


def accumulation(d: int, device: torch.device) -> float:
    r"""Return :math:`\epsilon_d`: a product of length ``d`` has an error of at most :math:`\epsilon_d \sum |a_k b_k|`.
    A tensor core adds ``terms`` products to its sum at once, cut off ``bits`` bits below the last bit of the largest,
    and truncates the result to float32: 16 and 2 on Hopper and later, 8 and 1 before. A CPU's sums are better."""
    terms, bits = (16, 2) if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9 else (8, 1)
    return (d / terms + 2) * ((terms + 1) * 2.0 ** -(23 + bits) + 2.0**-23)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` of fp16 factors, of which there may be a batch, summed and returned in float32."""
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


@dataclass(frozen=True)
class Loss:
    """The errors of one kind of product are measured."""

    logits: float = 0.0  # λ
    noise: float = 0.0  # η of noise, in units of |x'| Y
    pattern: float = 0.0  # η of what has the pattern of data
    share: float = 0.0  # ν
    means: float = 0.0  # λ
    floor: float = 0.0  # of means, what does not follow from η and ν, in units of the data's spread


def typical(points: FP16Points, size: int) -> Queries:
    """Return queries at a level where all points count: noise about the centre, or places midway between two points."""
    data, stream = points.points.data, rng.stream(0, "what tensor cores lose")
    i = torch.randint(0, data.n, (2, size), generator=stream, device=stream.device).to(data.device)
    sigma, one = max(points.radius, 1e-100) / 2, torch.ones(size, dtype=WIDE, device=data.device)
    x = points.center + sigma * rng.randn((size, data.d), stream, data.device, WIDE)
    x[1::2] = (data.take(i[0]).to(WIDE) + data.take(i[1]).to(WIDE))[1::2] / 2
    return Queries(x, one, sigma**2 * one)


def measured(logits: Logits, queries: Queries, stage: Stage) -> Loss:
    """Measure λ and η of the logits of some points, and ν; of means nothing yet."""
    points, data = logits.points, logits.points.points.data
    points.refine(logits, stage)
    some = torch.linspace(0, data.n - 1, min(POINTS, data.n), dtype=torch.float64, device=data.device).long()
    y = (data.take(some).to(WIDE) - points.center) / points.unit
    size = logits.size.clamp_min(TINY)[:, None]  # sums are compared in units of |x'|
    gap = (queries.alpha / queries.var)[:, None] * (queries.x - queries.alpha[:, None] * points.center) / size
    lost, rest = fit(logits.gain.to(WIDE)[:, None] / points.unit / size * logits.raw[:, some].to(WIDE), gap @ y.mT)
    unit = points.unit / max(points.radius, TINY)
    noise, pattern = (float(a.square().mean().sqrt()) * unit if len(a) else 0.0 for a in (rest[::2], rest[1::2]))
    return Loss(lost, noise, pattern, _loss_of_share(points, len(queries), stage))


def _loss_of_share(points: FP16Points, size: int, stage: Stage) -> float:
    """Measure ν by sums that one point dominates; the rounding of weights is no part of it."""
    n, stream, device = points.n, rng.stream(0, "heavy points"), points.points.device
    light = 2e-6 * torch.rand(n, generator=stream, device=stream.device).to(device)
    heavy = torch.randint(0, n, (size, 1), generator=stream, device=stream.device).to(device)
    e = torch.nn.functional.pad(FULL * light.expand(size, n).scatter(1, heavy, 1.0), (0, points.rows - n))
    high, some = e.half(), min(MEANS, size)
    planes = torch.stack([high, (e - high.float()).half()][: stage.planes])
    got = torch.cat(points.sums(planes, stage))[:, :some].sum(0, dtype=WIDE)
    exact = torch.zeros_like(got)
    for here in blocks(points.rows, points.slice):
        for y in [points.high] if points.low is None or not stage.sums else [points.high, points.low]:
            exact += planes[:, :some, here].sum(0, dtype=WIDE) @ y[here].to(WIDE)
    error = (got - exact).norm(dim=1) / exact.norm(dim=1).clamp_min(TINY)
    return float(error.square().mean().sqrt())


def fit(got: Tensor, exact: Tensor, lost: float | None = None) -> tuple[float, Tensor]:
    """Return λ, unless it is known, and the rest."""
    error, square = got - exact, exact.square().sum()
    if lost is None:
        lost = float(-(error * exact).sum() / square) if bool(square > 0) else 0.0
    return lost, error + lost * exact
