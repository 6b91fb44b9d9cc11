"""The steps of the GPU path in torch: the reference of the Triton kernels, and a GPU path that needs no GPU.

The names, arguments and results are those of :mod:`vkernel.posterior.gpu.triton_steps`.
"""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor

from vkernel.posterior import Moments, Queries
from vkernel.posterior.dense import MARGIN
from vkernel.posterior.gpu import GPUPath
from vkernel.posterior.gpu.fp16 import FULL, TINY, WIDE, FP16Points, Logits
from vkernel.posterior.gpu.tables import NARROWER, Assigned, Listed, Rules

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


def levels(logits: Logits, second: bool) -> tuple[Tensor, Tensor, Tensor]:
    two = torch.nn.functional.pad(values(logits), (0, 1), value=-torch.inf).topk(2, dim=1).values
    first = two[:, 0]
    pivot = torch.where(two[:, 1].isfinite(), two[:, 1], first) if second else first
    base = pivot.to(WIDE) - 2 * logits.delta - MARGIN
    return first, pivot, torch.stack([base - NARROWER, base - math.log(logits.points.n)]).float()


def survey(logits: Logits, thresholds: Tensor, pivot: Tensor) -> tuple[Tensor, Tensor]:
    value = values(logits)
    above = value >= thresholds[:, :, None]
    e = (value - pivot.clamp_min(LEAST)[:, None]).clamp_max(0.0).exp()
    sums = torch.stack([torch.where(above[0], 0.0, e).sum(1), e.sum(1), e.square().sum(1)])
    return above.sum(2, keepdim=True, dtype=torch.int32), sums[:, :, None]


def choose(
    logits: Logits, counts: Tensor, sums: Tensor, thresholds: Tensor, second: bool
) -> tuple[Listed, Tensor, Tensor]:
    below, total, square = sums.sum(2).to(WIDE)
    if second:
        total, square = (total - 1).clamp_min(0.0), (square - 1).clamp_min(0.0)
    certified = below.log() <= -2 * logits.delta - MARGIN
    chosen = torch.where(certified[:, None], *counts)
    listed = Listed(torch.where(certified, *thresholds), chosen.sum(1).int(), chosen, torch.zeros_like(chosen))
    return listed, total, torch.where(square > 0, total.square() / square, 0.0)


def above(logits: Logits, threshold: Tensor) -> Listed:
    count = (values(logits) >= threshold[:, None]).sum(1, dtype=torch.int32)
    return Listed(threshold, count, count[:, None], torch.zeros_like(count[:, None]))


def select(logits: Logits, listed: Listed, cap: int) -> Tensor:
    mask, count = values(logits) >= listed.threshold[:, None], listed.count
    i = (mask & (count <= cap)[:, None]).nonzero()[:, 1]
    index = torch.zeros((len(count), cap), dtype=torch.int32, device=mask.device)
    index[held(count, cap)] = i.int()
    return index


def assign(
    queries: Queries, logits: Logits, count: Tensor, pivot: Tensor, total: Tensor, ess: Tensor, rules: Rules
) -> Assigned:
    # a few queries may have many candidates, if not all have
    fits = count.clamp_max(rules.cap).sum() <= len(count) * rules.usual
    long = ~((count <= (rules.cap if fits else rules.usual)) & (logits.delta < rules.far))
    dense = long & (logits.delta < rules.close)
    slope, size, bounds, averages, found = logits.slope.to(WIDE), logits.size, [], [], []
    for a, b, c, e, f, fine, coarse, _ in rules.table.tolist():
        error = (a * size + b * torch.minimum(size, c * slope) + e * slope).square() + f
        allowed = torch.where(ess < rules.some, torch.full_like(ess, fine), coarse)
        averages.append(error <= allowed * ess)
        share = (allowed / error).clamp_max(1.0)
        found.append(averages[-1] | (share * rules.heaviest >= 1))
        bound = pivot + (total * share).log()
        bounds.append(torch.where(dense if rules.second else dense & ~averages[-1], bound, torch.inf).float())
    stage = torch.where(found[0], 1, torch.where(found[1], 2, 3))
    stage = torch.where(dense, stage, torch.where(long, 4, 0)).int()
    invalid = ~(logits.norm < rules.outside * queries.var.sqrt())
    flags = [invalid, *(stage == k for k in range(1, 5))]
    flags += [dense & (stage <= k + 1) & ~averaged for k, averaged in enumerate(averages)]
    held = torch.where(long, rules.cap + 1, count)
    return Assigned(stage, held, torch.stack(bounds), torch.stack(flags).sum(1))


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


def moments(points: FP16Points, count: Tensor, index: Tensor, logit: Tensor, vector: Tensor | None) -> Moments:
    out = Moments.empty(logit.new_zeros((len(count), points.d)), frozenset({"trace", "weights"}), vector)
    for q, k in enumerate(torch.where(count <= index.shape[1], count, 0).tolist()):
        if k == 0:
            continue
        logits, y = logit[q, :k], points.points.data.take(index[q, :k].long()).to(WIDE)
        best = logits.argmax()
        r, gap = logits.softmax(0), y - y[best]
        light = r.clone()
        light[best] = 0.0
        a = light @ gap
        out.log_z[q], out.mean[q] = logits.logsumexp(0), y[best] + a
        out.trace[q] = light @ gap.square().sum(1) - a.square().sum()
        out.square[q], out.entropy[q] = r.square().sum(), torch.special.entr(r).sum()
        if vector is not None:
            out.product[q] = (light * (gap @ vector[q])) @ gap - a * (a @ vector[q])
    return out


def weights(
    logits: Logits, shift: Tensor, planes: int, second: bool = False, along: Logits | None = None
) -> tuple[Tensor, Tensor]:
    def split(e: Tensor) -> Tensor:
        high = e.half()
        return torch.stack([high, (e - high.float()).half()][:planes])

    rows, n = logits.points.rows, logits.points.n
    logit = torch.nn.functional.pad(values(logits) - shift[:, None], (0, rows - n), value=-torch.inf)
    out = split(FULL * logit.exp())
    e = out.to(WIDE).sum(0)
    sums = [e.sum(1)]
    if second:
        share, log = e / FULL, logit.to(WIDE).clamp_min(-1e9)
        sums += [(e[:, :n] * logits.points.half[:n]).sum(1), share.square().sum(1), (share * log).sum(1)]
    if along is not None:
        more = split(e.float() * along.raw * along.gain[:, None])
        out = torch.cat([out, more])
        sums.append(more.to(WIDE).sum((0, 2)))
    return out, torch.stack(sums)[:, :, None]


def shares(
    queries: Queries, logits: Logits, shift: Tensor, sums: Tensor, heavy: Tensor, sparse: Tensor, wanted: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    total, points = sums[0].to(WIDE).sum(1), logits.points.points
    log_z = shift - logits.norm.square() / (2 * queries.var) + (total / FULL).log()
    log_z = log_z if points.weighted else log_z + points.log_w[0]
    whole = torch.where(wanted, torch.logaddexp(heavy, log_z), sparse)
    return 1 / total.clamp_min(TINY), torch.sigmoid(log_z - heavy), whole


def finish(
    points: FP16Points, parts: list[Tensor], scale: Tensor, share: Tensor, wanted: Tensor, heavy: Tensor, sparse: Tensor
) -> Tensor:
    total = torch.cat(parts)[..., : points.d].sum(0, dtype=WIDE)
    light = points.center + scale[:, None] * total
    return torch.where(wanted[:, None], (1 - share)[:, None] * heavy + share[:, None] * light, sparse)


def score(queries: Queries, mean: Tensor, dtype: torch.dtype) -> Tensor:
    return ((queries.alpha[:, None] * mean - queries.x) / queries.var[:, None]).to(dtype)
