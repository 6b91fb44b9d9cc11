r"""What tensor cores lose, measured where they are.

They cut every partial sum off instead of rounding it, so that long sums come out too small, by a share that is much the
same for all sums of one length, and err besides by something like noise (Fasi, Higham, Mikaitis and Pranesh 2021).
:func:`~vkernel.posterior.halves.accumulation` bounds both, for screening. Where all points carry weight the bound would
ask for too much, and the errors themselves matter: with computed sums :math:`\hat s` of which the exact ones,
:math:`s`, are known in float64,

.. math::

   \hat s = (1 - \lambda)\, s + \text{rest}, \qquad \lambda = -\frac{\sum (\hat s - s)\, s}{\sum s^2}, \qquad
   \eta = \mathrm{rms}(\text{rest}) ,

:math:`\lambda` is divided out and :math:`\eta` tells how far logits can be trusted. It is larger for queries that look
like data, whose products have a common sign over long stretches, than for noise: a query is taken for noise plus
something no larger than twice the data. From :math:`\eta` and the number of
points that count follows how far a mean can, if errors are independent of one another; where rounding has a pattern
they are not. So means are compared with exact ones too: what does not follow from :math:`\eta` is what no number of
points averages out. All of it is done on the data, with queries of both kinds: noise, and places midway between two
points.

Sums over points lose the more of a heavy point the earlier it comes, for the sum is cut off at every step from then on.
That is measured on sums in which one point, anywhere, outweighs every other a million times: its share is wrong by
:math:`\nu`, which for several heavy points is independent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.posterior.eighths import eighths
from vkernel.posterior.halves import Way
from vkernel.posterior.kernels_torch import FULL, TINY, WIDE
from vkernel.posterior.pieces import Points, Queries

if TYPE_CHECKING:
    from vkernel.posterior.cuda import Fast

__all__ = ["Loss", "calibrate"]

POINTS = 2048  # points whose logits are compared
SMALL, LARGE = 64, 256  # queries of a batch that is bound by reading the data, and of one that is not
MEANS = 16  # queries whose means are compared


@dataclass(frozen=True)
class Loss:
    """What is lost of one kind of product.

    Of ``logits`` λ; η in units of |x'| Y, for ``noise`` and for what has the ``pattern`` of data; ν of a ``share``; of
    ``means`` λ, and a ``floor`` that does not follow from η and ν, in units of the data's spread.
    """

    logits: float = 0.0
    noise: float = 0.0
    pattern: float = 0.0
    share: float = 0.0
    means: float = 0.0
    floor: float = 0.0


def calibrate(fast: Fast, most: int) -> None:
    """Fill ``fast.losses`` for small batches and large ones, of at most ``most`` queries, for each way."""
    for size in (min(SMALL, most), min(LARGE, most)):
        queries = _typical(fast, size)
        some = queries[: min(MEANS, size)]
        exact = _exact(fast.engine.data, some) - fast.halves.center
        for way in sorted({fast.halves.quick(size), fast.halves.best}):
            key = fast.kind(size, way)
            loss = fast.losses[key] = replace(_logits(fast, queries, way), share=_share(fast, size, way))
            got, _ = _means(fast, queries, way)
            lost, _ = _fit(got[: len(some)] - fast.halves.center, exact)
            loss = fast.losses[key] = replace(loss, means=lost)
            got, expected = _means(fast, queries, way)
            error = (got[: len(some)] - fast.halves.center - exact).norm(dim=1) / fast.spread
            beyond = (error.square() - expected[: len(some)]).clamp_min(0.0).max().sqrt()
            fast.losses[key] = replace(loss, floor=float(beyond))


def _typical(fast: Fast, size: int) -> Queries:
    """Half of the queries noise about the centre, half midway between two points, at a level where all points count."""
    data, halves, stream = fast.engine.data, fast.halves, rng.stream(0, "what tensor cores lose")
    i = torch.randint(0, data.n, (2, size), generator=stream, device=stream.device).to(data.device)
    sigma = max(halves.radius, 1e-100) / 2
    x = halves.center + sigma * rng.randn((size, data.d), stream, data.device, WIDE)
    x[1::2] = ((data.take(i[0]).to(WIDE) + data.take(i[1]).to(WIDE)) / 2)[1::2]
    one = torch.ones(size, dtype=WIDE, device=data.device)
    return Queries(x, one, sigma**2 * one)


def _logits(fast: Fast, queries: Queries, way: Way) -> Loss:
    """λ and η of the logits of some points."""
    halves, data = fast.halves, fast.engine.data
    left = fast.kernels.split(queries, halves.center, halves.unit, halves.width, halves.bound(len(queries)))
    logits = halves.refine(left, halves.logits(left), way)
    some = torch.linspace(0, data.n - 1, min(POINTS, data.n), dtype=torch.float64, device=data.device).long()
    y = (data.take(some).to(WIDE) - halves.center) / halves.unit
    size = left.size.clamp_min(TINY)[:, None]  # sums are compared in units of |x'|
    gap = (queries.alpha / queries.var)[:, None] * (queries.x - queries.alpha[:, None] * halves.center) / size
    got = left.gain.to(WIDE)[:, None] / halves.unit / size * logits.planes[:, :, some].sum(0).to(WIDE)
    lost, rest = _fit(got, gap @ y.mT)
    noise, pattern = (
        float(kind.square().mean().sqrt()) * halves.unit / max(halves.radius, TINY) if len(kind) else 0.0
        for kind in (rest[::2], rest[1::2])
    )
    return Loss(lost, noise, pattern)


def _share(fast: Fast, size: int, way: Way) -> float:
    """ν, from sums that one point dominates."""
    h, stream = fast.halves, rng.stream(0, "heavy points")
    light = 2e-6 * torch.rand(h.n, generator=stream, device=stream.device).to(h.device)
    heavy = torch.randint(0, h.n, (size, 1), generator=stream, device=stream.device).to(h.device)
    e = FULL * light.expand(size, h.n).scatter(1, heavy, 1.0)
    e = torch.nn.functional.pad(e, (0, h.rows - h.n))
    high = e.half()
    rest = e - high.float()
    tail = eighths(high, rest, h.parts(way) == 2) if h.parts(way) else None
    weights = high[None] if tail is not None else torch.stack([high, rest.half()])
    parts = h.sums(weights, tail, way)
    got = torch.stack([part.reshape(-1, size, h.width).sum(0, dtype=WIDE) for part in parts]).sum(0)
    some = min(MEANS, size)
    exact = torch.zeros((some, h.width), dtype=WIDE, device=h.device)
    for start in range(0, h.rows, h.slice):
        here = slice(start, start + h.slice)
        exact += e[:some, here].to(WIDE) @ h.high[here].to(WIDE)
        if way != "one" and h.low is not None:
            exact += e[:some, here].to(WIDE) @ h.low[here].to(WIDE)
    error = (got[:some] - exact).norm(dim=1) / exact.norm(dim=1).clamp_min(TINY)
    return float(error.square().mean().sqrt())


def _chunks(data: Points, center: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """All points in float64, centred."""
    step = max(1, (1 << 24) // data.d)
    for start in range(0, data.n, step):
        here = slice(start, min(start + step, data.n))
        yield here, data.rows(here.start, here.stop).to(WIDE) - center


def _means(fast: Fast, queries: Queries, way: Way) -> tuple[Tensor, Tensor]:
    """Means by the dense rungs, whoever would take them, and the square of the error that is expected."""
    short = fast._few(queries, WIDE)
    everyone = torch.ones_like(short.light)
    answer, _ = fast._many(queries, replace(short, light=everyone, full=everyone), False, way, WIDE)
    return answer.mean, fast.error(short.seen, way) / short.seen.ess


def _exact(data: Points, queries: Queries) -> Tensor:
    """Posterior means in float64, by way of sums relative to the largest weight so far."""
    top = torch.full((len(queries), 1), -torch.inf, dtype=WIDE, device=data.device)
    total, sums = torch.zeros_like(top), torch.zeros_like(queries.x)
    center = data.center.to(WIDE)
    x = (queries.x - queries.alpha[:, None] * center) * (queries.alpha / queries.var)[:, None]
    slope = (queries.alpha.square() / queries.var)[:, None]
    for here, y in _chunks(data, center):
        logit = x @ y.mT - slope * (y.square().sum(1) / 2) + data.weights[here].to(WIDE).log()
        new = torch.maximum(top, logit.amax(1, keepdim=True))
        keep, e = (top - new).nan_to_num(0.0).exp(), (logit - new).nan_to_num(-torch.inf).exp()
        total, sums, top = total * keep + e.sum(1, keepdim=True), sums * keep + e @ y, new
    return center + sums / total


def _fit(got: Tensor, exact: Tensor) -> tuple[float, Tensor]:
    """λ, and the rest."""
    error, square = got - exact, exact.square().sum()
    lost = -(error * exact).sum() / square if bool(square > 0) else square
    return float(lost), error + lost * exact
