"""The steps of the GPU path in torch; :mod:`~vkernel.posterior.gpu.triton_steps` has most of them as one kernel each.

A block of :class:`~vkernel.posterior.gpu.fp16.Logits` is never stored as such: every step reads it once, on the fly.
The candidates of queries are tables ``index (B, cap)``, ascending, of which the first ``count (B,)`` entries of a row
hold; a row with ``count > cap`` has no candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vkernel.posterior.gpu.fp16 import FULL, TINY, WIDE, FP16Points, Logits
from vkernel.posterior.weights import Queries

LEAST = -1e38  # where there is no largest logit, one that may be subtracted
LIGHTEST = 40.0  # weights below exp(-LIGHTEST) of the heaviest are not added to a mean in float64


def split(queries: Queries, points: FP16Points) -> Logits:
    """Queries as two fp16 numbers for each coordinate, their product with the points, and a bound on its error."""
    planes, a, b, c, e = points.bound(len(queries))
    gap = queries.x - queries.alpha[:, None] * points.center
    factor, slope = queries.alpha / queries.var, queries.alpha.square() / queries.var
    norm = gap.square().sum(-1).sqrt()
    scale = norm.clamp_min(TINY) / FULL
    rest = gap / scale[:, None]
    factors = torch.zeros((2, len(gap), points.width), dtype=torch.float16, device=gap.device)
    for plane in range(2):
        factors[plane, :, : points.d] = rest
        rest = rest - factors[plane, :, : points.d].to(WIDE)
        if plane + 1 == planes:
            left = factor * scale * rest.square().sum(-1).sqrt()
    size, gain = factor * norm, (factor * scale * points.unit).float()
    delta = a * left + b * size + c * slope + e
    return Logits(points, factors, gain, slope.float(), norm, size, delta, points.multiply(factors))


def peaks(logits: Logits, second: bool) -> tuple[Tensor, Tensor]:
    """The largest and, where it is wanted, the second largest logit of every query (-inf: there is none)."""
    two = torch.nn.functional.pad(logits.values(), (0, 1), value=-torch.inf).topk(2, dim=1).values
    return two[:, 0], two[:, 1] if second else torch.full_like(two[:, 1], -torch.inf)


def survey(logits: Logits, first: Tensor, thresholds: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights relative to the largest one, ``first (B,)``, and two ``thresholds (2, B)``, in one pass.

    Returns the number of points at or above a threshold, ``(2, B, ·)`` by parts of the data; the weight of all that are
    below the first, and the sums of all weights and of their squares, ``(B,)``.
    """
    values = logits.values()
    e = (values - first.clamp_min(LEAST)[:, None]).exp()
    above = values >= thresholds[:, :, None]
    count = above.sum(2, keepdim=True, dtype=torch.int32)
    return count, torch.where(above[0], 0.0, e).sum(1), e.sum(1), e.square().sum(1)


def select(logits: Logits, threshold: Tensor, cap: int, counts: Tensor) -> tuple[Tensor, Tensor]:
    """``count`` and ``index`` of the points whose logit is at least ``threshold (B,)``; ``counts`` are a survey's."""
    mask = logits.values() >= threshold[:, None]
    count = mask.sum(1, dtype=torch.int32)
    i = (mask & (count <= cap)[:, None]).nonzero()[:, 1]
    index = torch.zeros((len(count), cap), dtype=torch.int32, device=mask.device)
    index[held(count, cap)] = i.int()
    return count, index


def held(count: Tensor, cap: int) -> Tensor:
    """Which entries of a table of candidates hold, ``(B, cap)``."""
    return torch.arange(cap, device=count.device) < torch.where(count <= cap, count, 0)[:, None]


def exact(queries: Queries, points: FP16Points, count: Tensor, index: Tensor) -> Tensor:
    """Logits of the candidates in float64, by differences, ``(B, cap)``; -inf where there is none."""
    q, k = held(count, index.shape[1]).nonzero().unbind(1)
    out = torch.full(index.shape, -torch.inf, dtype=WIDE, device=index.device)
    out[q, k] = queries.exact_logits(points.points.data, points.points.log_w, q, index[q, k].long())
    return out


def mean(points: FP16Points, count: Tensor, index: Tensor, logit: Tensor) -> tuple[Tensor, Tensor]:
    """``log z (B,)`` and the mean ``(B, d)`` over the candidates; -inf and 0 where there are none."""
    log_z = logit.logsumexp(1)
    out = torch.zeros((len(count), points.d), dtype=WIDE, device=logit.device)
    heavy = logit > logit.amax(1, keepdim=True) - LIGHTEST
    q, k = (held(count, index.shape[1]) & heavy).nonzero().unbind(1)
    share = (logit[q, k] - log_z[q]).exp()
    for s in torch.arange(len(q), device=q.device).split(max(1, (1 << 24) // points.d)):
        out.index_add_(0, q[s], share[s, None] * points.points.data.take(index[q[s], k[s]].long()).to(WIDE))
    return log_z, out


def weights(logits: Logits, shift: Tensor) -> tuple[Tensor, Tensor]:
    r"""The weights :math:`2^{14} e^{l - \mathrm{shift}}` as sums of two fp16 numbers, ``(2, B, N)``, and their sums."""
    e = FULL * (logits.values() - shift[:, None]).exp()
    e = torch.nn.functional.pad(e, (0, logits.points.rows - logits.points.n))
    high = e.half()
    out = torch.stack([high, (e - high.float()).half()])
    return out, out.to(WIDE).sum((0, 2))


def strike(logits: Logits, count: Tensor, index: Tensor) -> None:
    """Take the candidates out, in place; without synchronisation, so that it can be part of a CUDA graph."""
    place = torch.where(held(count, index.shape[1]), index, logits.points.rows - 1)  # the last row is no point
    logits.raw.scatter_(1, place.long(), -torch.inf)
