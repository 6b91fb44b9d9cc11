"""The steps of the GPU path in torch: the reference of the Triton kernels, and a GPU path that needs no GPU.

The names, arguments and results are those of :mod:`vkernel.posterior.gpu.triton_steps`.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from vkernel.posterior import Queries
from vkernel.posterior.gpu import GPUPath
from vkernel.posterior.gpu.fp16 import FULL, TINY, WIDE, FP16Points, Logits

LEAST = -1e38  # where there is no largest logit, one that may be subtracted
LIGHTEST = 40.0  # weights below exp(-LIGHTEST) of the heaviest are not added to a mean in float64


class TorchPath(GPUPath):
    """The GPU path with these steps, on any device."""

    graphs = False
    steps = sys.modules[__name__]


def values(logits: Logits) -> Tensor:
    """The logits themselves, ``(B, n)``."""
    n, half, log_w = logits.points.n, logits.points.half, logits.points.log_w
    raw = logits.raw[:, :n]
    out = raw * logits.gain[:, None] - logits.slope[:, None] * half[:n]
    return (out if log_w is None else out + log_w[:n]).masked_fill(raw == -torch.inf, -torch.inf)


def split(queries: Queries, points: FP16Points) -> Logits:
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
    two = torch.nn.functional.pad(values(logits), (0, 1), value=-torch.inf).topk(2, dim=1).values
    return two[:, 0], two[:, 1] if second else torch.full_like(two[:, 1], -torch.inf)


def survey(logits: Logits, thresholds: Tensor, first: Tensor | None = None) -> tuple[Tensor, Tensor]:
    value = values(logits)
    above = value >= thresholds[:, :, None]
    count = above.sum(2, keepdim=True, dtype=torch.int32)
    if first is None:
        return count, value.new_empty((0, len(value)))
    e = (value - first.clamp_min(LEAST)[:, None]).exp()
    return count, torch.stack([torch.where(above[0], 0.0, e).sum(1), e.sum(1), e.square().sum(1)])


def select(logits: Logits, threshold: Tensor, cap: int, counts: Tensor) -> tuple[Tensor, Tensor]:
    mask = values(logits) >= threshold[:, None]
    count = mask.sum(1, dtype=torch.int32)
    i = (mask & (count <= cap)[:, None]).nonzero()[:, 1]
    index = torch.zeros((len(count), cap), dtype=torch.int32, device=mask.device)
    index[held(count, cap)] = i.int()
    return count, index


def held(count: Tensor, cap: int) -> Tensor:
    """Which entries of a table of candidates hold, ``(B, cap)``."""
    return torch.arange(cap, device=count.device) < torch.where(count <= cap, count, 0)[:, None]


def exact(queries: Queries, points: FP16Points, count: Tensor, index: Tensor, logits: Logits | None = None) -> Tensor:
    q, k = held(count, index.shape[1]).nonzero().unbind(1)
    i = index[q, k].long()
    out = torch.full(index.shape, -torch.inf, dtype=WIDE, device=index.device)
    out[q, k] = queries.exact_logits(points.points.data, points.points.log_w, q, i)
    if logits is not None:
        logits.raw[q, i] = -torch.inf
    return out


def mean(points: FP16Points, count: Tensor, index: Tensor, logit: Tensor) -> tuple[Tensor, Tensor]:
    log_z = logit.logsumexp(1)
    out = torch.zeros((len(count), points.d), dtype=WIDE, device=logit.device)
    heavy = logit > logit.amax(1, keepdim=True) - LIGHTEST
    q, k = (held(count, index.shape[1]) & heavy).nonzero().unbind(1)
    share = (logit[q, k] - log_z[q]).exp()
    for s in torch.arange(len(q), device=q.device).split(max(1, (1 << 24) // points.d)):
        out.index_add_(0, q[s], share[s, None] * points.points.data.take(index[q[s], k[s]].long()).to(WIDE))
    return log_z, out


def weights(logits: Logits, shift: Tensor) -> tuple[Tensor, Tensor]:
    e = FULL * (values(logits) - shift[:, None]).exp()
    e = torch.nn.functional.pad(e, (0, logits.points.rows - logits.points.n))
    high = e.half()
    out = torch.stack([high, (e - high.float()).half()])
    return out, out.to(WIDE).sum((0, 2))


def finish(
    points: FP16Points, parts: list[Tensor], scale: Tensor, share: Tensor, wanted: Tensor, heavy: Tensor, sparse: Tensor
) -> Tensor:
    total = torch.cat(parts)[..., : points.d].sum(0, dtype=WIDE)
    light = points.center + scale[:, None] * total
    return torch.where(wanted[:, None], (1 - share)[:, None] * heavy + share[:, None] * light, sparse)


def score(queries: Queries, mean: Tensor, dtype: torch.dtype) -> Tensor:
    return ((queries.alpha[:, None] * mean - queries.x) / queries.var[:, None]).to(dtype)
