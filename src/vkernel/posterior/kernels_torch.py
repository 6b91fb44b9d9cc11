r"""The steps of the GPU path in plain torch; :mod:`~vkernel.posterior.kernels_triton` has the same, each in one kernel.

A block of logits is never stored as such: it is what the products left, with a factor for each query and a term for
each point,

.. math:: l_{qi} = g_q \sum_p P_{p,qi} - a_q\, \tfrac12 |y_i - c|^2 + \log w_i ,

and every step reads it once, on the fly. Points that are chosen are listed in tables ``index (B, cap)``, ascending, of
which the first ``count (B,)`` entries of a row hold; a row with ``count > cap`` has no list, and is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vkernel.posterior.eighths import eighths
from vkernel.posterior.pieces import Points, Queries

__all__ = [
    "Bound",
    "Left",
    "Light",
    "Logits",
    "Stored",
    "Survey",
    "exact",
    "finish",
    "mean",
    "peaks",
    "score",
    "select",
    "split",
    "strike",
    "survey",
    "weights",
]

WIDE = torch.float64
FULL = 2.0**14  # half-precision numbers reach 2^16: vectors are scaled to this norm, weights to at most this
TINY = 1e-200  # a norm that may be divided by
LEAST = -1e38  # where there is no largest logit, one that may be subtracted
LIGHTEST = 40.0  # weights below exp(-LIGHTEST) of the heaviest are not added to a mean in float64


@dataclass
class Left:
    r"""Queries as half-precision numbers: :math:`u x'_q = g_q (X_{0,q} + X_{1,q}) + \ldots`, ``factors (2, B, width)``.

    :math:`x' = (\alpha/\sigma^2)(x - \alpha c)`. ``gain`` :math:`g` and ``slope`` :math:`\alpha^2/\sigma^2`, float32,
    make logits of products. In float64, ``norm`` is :math:`|x - \alpha c|`, ``size`` is :math:`|x'|`, which vanishes
    with alpha, and ``delta`` bounds the logits' error. All ``(B,)``.
    """

    factors: Tensor
    gain: Tensor
    slope: Tensor
    norm: Tensor
    size: Tensor
    delta: Tensor


@dataclass(frozen=True)
class Bound:
    r"""Numbers in a bound :math:`a\, |x' - \hat x| + b\, |x'| + c\, \alpha^2/\sigma^2 + e` of a logit's error.

    :math:`\hat x` is the first factor of the query, or both (``planes``).
    """

    planes: int
    rest: float
    size: float
    slope: float
    constant: float


@dataclass
class Logits:
    """A block of logits as above: ``planes (P, B, N)``, ``gain`` and ``slope (B,)``, ``half`` and ``log_w (N,)``.

    All float32; the first ``n`` of N columns are points. A product of -inf marks a point that was taken out. ``room (2,
    B, N)``, where there is any, begins with the one plane, and has space for a second.
    """

    planes: Tensor
    gain: Tensor
    slope: Tensor
    half: Tensor
    log_w: Tensor | None
    n: int
    room: Tensor | None = None

    def whole(self) -> Tensor:
        """The logits themselves, ``(B, n)``."""
        raw = self.planes[:, :, : self.n].sum(0)
        out = raw * self.gain[:, None] - self.slope[:, None] * self.half[: self.n]
        return (out if self.log_w is None else out + self.log_w[: self.n]).masked_fill(raw == -torch.inf, -torch.inf)


@dataclass
class Light:
    """What makes a mean of sums over light points: ``center + scale * sums``; its ``share``, and who asked for it."""

    center: Tensor
    scale: Tensor
    share: Tensor
    asked: Tensor


@dataclass
class Survey:
    """Weights relative to the largest one, and two thresholds, in one look.

    ``count (2, B, ·)`` points at or above a threshold, by parts of the data; ``below (B,)`` the weight of all that are
    below the first; ``total`` and ``square (B,)`` the sums of all weights and of their squares.
    """

    count: Tensor
    below: Tensor
    total: Tensor
    square: Tensor


@dataclass
class Stored:
    """Points as they are stored: ``values (n, d)``, of 8-bit integers the numbers in ``table (256,)``, from ``first``.

    ``values`` is ``None`` where they cannot be read in place; ``data`` gives them in any case.
    """

    data: Points
    log_w: Tensor
    values: Tensor | None = None
    table: Tensor | None = None
    first: int = 0


def split(queries: Queries, center: Tensor, unit: float, width: int, bound: Bound) -> Left:
    """Queries as two half-precision numbers for each coordinate, and what that leaves."""
    gap = queries.x - queries.alpha[:, None] * center
    factor, slope = queries.alpha / queries.var, queries.alpha.square() / queries.var
    norm = gap.square().sum(-1).sqrt()
    scale = norm.clamp_min(TINY) / FULL
    rest = gap / scale[:, None]
    factors = torch.zeros((2, len(gap), width), dtype=torch.float16, device=gap.device)
    for plane in range(2):
        factors[plane, :, : gap.shape[1]] = rest
        rest = rest - factors[plane, :, : gap.shape[1]].to(WIDE)
        if plane + 1 == bound.planes:
            left = factor * scale * rest.square().sum(-1).sqrt()
    size = factor * norm
    delta = bound.rest * left + bound.size * size + bound.slope * slope + bound.constant
    return Left(factors, (factor * scale * unit).float(), slope.float(), norm, size, delta)


def peaks(logits: Logits, second: bool) -> tuple[Tensor, Tensor]:
    """The largest and, where it is asked for, the second largest logit of every query (-inf: there is none)."""
    two = logits.whole().topk(min(2, logits.n), dim=1).values
    last = two[:, 1] if logits.n > 1 else torch.full_like(two[:, 0], -torch.inf)
    return two[:, 0], last if second else torch.full_like(last, -torch.inf)


def survey(logits: Logits, first: Tensor, thresholds: Tensor) -> Survey:
    """The survey of every query, given its largest logit ``(B,)`` and thresholds ``(2, B)``, all float32."""
    whole = logits.whole()
    e = (whole - first.clamp_min(LEAST)[:, None]).exp()
    above = whole >= thresholds[:, :, None]
    count = above.sum(2, keepdim=True, dtype=torch.int32)
    return Survey(count, torch.where(above[0], 0.0, e).sum(1), e.sum(1), e.square().sum(1))


def select(logits: Logits, threshold: Tensor, cap: int, parts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Points whose logit is at least ``threshold (B,)``: ``count (B,)`` of them, and ``index (B, cap)``.

    ``parts (B, ·)``, a survey's counts, save the counting.
    """
    mask = logits.whole() >= threshold[:, None]
    count = mask.sum(1, dtype=torch.int32)
    q, i = (mask & (count <= cap)[:, None]).nonzero().unbind(1)
    first = torch.where(count <= cap, count, 0).cumsum(0) - torch.where(count <= cap, count, 0)
    index = torch.zeros((len(count), cap), dtype=torch.int32, device=mask.device)
    index[q, torch.arange(len(q), device=q.device) - first[q]] = i.int()
    return count, index


def listed(count: Tensor, cap: int) -> Tensor:
    """Which entries of a table hold, ``(B, cap)``."""
    return torch.arange(cap, device=count.device) < torch.where(count <= cap, count, 0)[:, None]


def exact(queries: Queries, points: Stored, count: Tensor, index: Tensor) -> Tensor:
    """Logits of the chosen points in float64, by differences, ``(B, cap)``; -inf where there is none."""
    q, k = listed(count, index.shape[1]).nonzero().unbind(1)
    out = torch.full(index.shape, -torch.inf, dtype=WIDE, device=index.device)
    out[q, k] = queries.exact_logits(points.data, points.log_w, q, index[q, k].long())
    return out


def mean(points: Stored, count: Tensor, index: Tensor, logit: Tensor) -> tuple[Tensor, Tensor]:
    """``log z (B,)`` and the mean ``(B, d)`` over the chosen points; -inf and 0 where there are none."""
    log_z = logit.logsumexp(1)
    top = logit.amax(1, keepdim=True)
    out = torch.zeros((len(count), points.data.d), dtype=WIDE, device=logit.device)
    q, k = (listed(count, index.shape[1]) & (logit > top - LIGHTEST)).nonzero().unbind(1)
    share = (logit[q, k] - log_z[q]).exp()
    for s in torch.arange(len(q), device=q.device).split(max(1, (1 << 24) // points.data.d)):
        out.index_add_(0, q[s], share[s, None] * points.data.take(index[q[s], k[s]].long()).to(WIDE))
    return log_z, out


def strike(logits: Logits, count: Tensor, index: Tensor) -> None:
    """Take the chosen points out."""
    q, k = listed(count, index.shape[1]).nonzero().unbind(1)
    logits.planes[0][q, index[q, k].long()] = -torch.inf


def weights(logits: Logits, shift: Tensor, parts: int = 0) -> tuple[Tensor, Tensor | None, Tensor]:
    r"""The weights :math:`2^{14} e^{l - \mathrm{shift}}` as numbers and rests, and their sums, ``(B,)`` float64.

    Both in half precision, ``(2, B, N)``; or, if ``parts`` is 1 or 2, only the numbers, ``(1, B, N)``, and beside them
    eighths of rests, or of rests and numbers, ``(B, parts N)``.
    """
    e = FULL * (logits.whole() - shift[:, None]).exp()
    e = torch.nn.functional.pad(e, (0, logits.planes.shape[2] - logits.n))
    high = e.half()
    rest = e - high.float()
    if parts:
        return high[None], eighths(high.float(), rest, parts == 2), e.sum(1, dtype=WIDE)
    out = torch.stack([high, rest.half()])
    return out, None, out.to(WIDE).sum((0, 2))


def finish(parts: list[Tensor], light: Light, heavy: Tensor, few: Tensor) -> Tensor:
    """The mean of both parts for the queries that ask for it, else ``few``; ``parts`` are sums (slices, k B, D)."""
    count, d = heavy.shape
    sums = torch.zeros((count, parts[0].shape[2]), dtype=WIDE, device=heavy.device)
    for part in parts:
        sums += part.reshape(-1, count, part.shape[2]).sum(0, dtype=WIDE)
    mean = light.center + light.scale[:, None] * sums[:, :d]
    share = light.share[:, None]
    return torch.where(light.asked[:, None], (1 - share) * heavy + share * mean, few)


def score(queries: Queries, mean: Tensor, dtype: torch.dtype) -> Tensor:
    r""":math:`(\alpha m - x) / \sigma^2`, ``(B, d)``, in float64 until the end."""
    return ((queries.alpha[:, None] * mean - queries.x) / queries.var[:, None]).to(dtype)
