r"""The steps of the GPU path in torch; :mod:`~vkernel.posterior.gpu.triton_steps` has most of them as one kernel each.

A block of logits is never stored as such: it is what the products left, with a factor for each query and a term for
each point,

.. math:: l_{qi} = g_q P_{qi} - a_q\, \tfrac12 |y_i - c|^2 + \log w_i ,

and every step reads it once, on the fly. The candidates of queries are tables ``index (B, cap)``, ascending, of which
the first ``count (B,)`` entries of a row hold; a row with ``count > cap`` has no candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vkernel.posterior.weights import Points, Queries

__all__ = ["Bound", "Left", "Logits", "Stored", "Survey"]

WIDE = torch.float64
FULL = 2.0**14  # fp16 numbers reach 2^16: vectors are scaled to this norm, weights to at most this
TINY = 1e-200  # a norm that may be divided by
LEAST = -1e38  # where there is no largest logit, one that may be subtracted
LIGHTEST = 40.0  # weights below exp(-LIGHTEST) of the heaviest are not added to a mean in float64


@dataclass
class Left:
    r"""Queries as fp16 numbers: :math:`u x'_q = g_q (X_{0,q} + X_{1,q}) + \ldots`, ``factors (2, B, width)``.

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
    """A block of logits as above: ``raw (B, N)``, ``gain`` and ``slope (B,)``, ``half`` and ``log_w (N,)``, float32.

    The first ``n < N`` columns are points. A product of -inf marks a point that was taken out.
    """

    raw: Tensor
    gain: Tensor
    slope: Tensor
    half: Tensor
    log_w: Tensor | None
    n: int

    def values(self) -> Tensor:
        """The logits themselves, ``(B, n)``."""
        raw = self.raw[:, : self.n]
        out = raw * self.gain[:, None] - self.slope[:, None] * self.half[: self.n]
        return (out if self.log_w is None else out + self.log_w[: self.n]).masked_fill(raw == -torch.inf, -torch.inf)


@dataclass
class Survey:
    """Weights relative to the largest one, and two thresholds, in one pass.

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

    ``values`` is ``None`` where kernels cannot read the points in place; ``data`` returns them in any case.
    """

    data: Points
    log_w: Tensor
    values: Tensor | None = None
    table: Tensor | None = None
    first: int = 0


def split(queries: Queries, center: Tensor, unit: float, width: int, bound: Bound) -> Left:
    """Queries as two fp16 numbers for each coordinate, and a bound on the error of their logits."""
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
    """The largest and, where it is wanted, the second largest logit of every query (-inf: there is none)."""
    two = logits.values().topk(min(2, logits.n), dim=1).values
    last = two[:, 1] if logits.n > 1 else torch.full_like(two[:, 0], -torch.inf)
    return two[:, 0], last if second else torch.full_like(last, -torch.inf)


def survey(logits: Logits, first: Tensor, thresholds: Tensor) -> Survey:
    """The survey of every query, given its largest logit ``(B,)`` and thresholds ``(2, B)``, all float32."""
    values = logits.values()
    e = (values - first.clamp_min(LEAST)[:, None]).exp()
    above = values >= thresholds[:, :, None]
    count = above.sum(2, keepdim=True, dtype=torch.int32)
    return Survey(count, torch.where(above[0], 0.0, e).sum(1), e.sum(1), e.square().sum(1))


def select(logits: Logits, threshold: Tensor, cap: int, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Points whose logit is at least ``threshold (B,)``: ``count (B,)``, ``index (B, cap)``; ``counts`` of a survey."""
    mask = logits.values() >= threshold[:, None]
    count = mask.sum(1, dtype=torch.int32)
    q, i = (mask & (count <= cap)[:, None]).nonzero().unbind(1)
    held = torch.where(count <= cap, count, 0)
    index = torch.zeros((len(count), cap), dtype=torch.int32, device=mask.device)
    index[q, torch.arange(len(q), device=q.device) - (held.cumsum(0) - held)[q]] = i.int()
    return count, index


def held(count: Tensor, cap: int) -> Tensor:
    """Which entries of a table of candidates hold, ``(B, cap)``."""
    return torch.arange(cap, device=count.device) < torch.where(count <= cap, count, 0)[:, None]


def exact(queries: Queries, points: Stored, count: Tensor, index: Tensor) -> Tensor:
    """Logits of the candidates in float64, by differences, ``(B, cap)``; -inf where there is none."""
    q, k = held(count, index.shape[1]).nonzero().unbind(1)
    out = torch.full(index.shape, -torch.inf, dtype=WIDE, device=index.device)
    out[q, k] = queries.exact_logits(points.data, points.log_w, q, index[q, k].long())
    return out


def mean(points: Stored, count: Tensor, index: Tensor, logit: Tensor) -> tuple[Tensor, Tensor]:
    """``log z (B,)`` and the mean ``(B, d)`` over the candidates; -inf and 0 where there are none."""
    log_z = logit.logsumexp(1)
    out = torch.zeros((len(count), points.data.d), dtype=WIDE, device=logit.device)
    heavy = logit > logit.amax(1, keepdim=True) - LIGHTEST
    q, k = (held(count, index.shape[1]) & heavy).nonzero().unbind(1)
    share = (logit[q, k] - log_z[q]).exp()
    for s in torch.arange(len(q), device=q.device).split(max(1, (1 << 24) // points.data.d)):
        out.index_add_(0, q[s], share[s, None] * points.data.take(index[q[s], k[s]].long()).to(WIDE))
    return log_z, out


def weights(logits: Logits, shift: Tensor) -> tuple[Tensor, Tensor]:
    r"""The weights :math:`2^{14} e^{l - \mathrm{shift}}` as sums of two fp16 numbers, ``(2, B, N)``, and their sums."""
    e = FULL * (logits.values() - shift[:, None]).exp()
    e = torch.nn.functional.pad(e, (0, logits.raw.shape[1] - logits.n))
    high = e.half()
    out = torch.stack([high, (e - high.float()).half()])
    return out, out.to(WIDE).sum((0, 2))


def strike(logits: Logits, count: Tensor, index: Tensor) -> None:
    """Take the candidates out, in place; without synchronisation, so that it can be part of a CUDA graph."""
    place = torch.where(held(count, index.shape[1]), index, logits.raw.shape[1] - 1)  # the last column is no point
    logits.raw.scatter_(1, place.long(), -torch.inf)
