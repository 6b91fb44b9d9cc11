r"""The errors of tensor cores, measured on the data.

Tensor cores truncate every partial sum instead of rounding it, so that long sums come out too small, by a share that is
much the same for all sums of one length, with an error like noise beside it (Fasi, Higham, Mikaitis and Pranesh 2021).
:func:`~vkernel.posterior.gpu.fp16.accumulation` bounds both, for screening. Where all points carry weight that bound is
far too large, and the errors themselves matter: with computed sums :math:`\hat s` and exact ones :math:`s` in float64,

.. math::

   \hat s = (1 - \lambda)\, s + \text{rest}, \qquad \lambda = -\frac{\sum (\hat s - s)\, s}{\sum s^2}, \qquad
   \eta = \mathrm{rms}(\text{rest}) ,

:math:`\lambda` is divided out, and :math:`\eta` is the error of a logit. It is larger for queries that look like data,
whose products have a common sign over long stretches, than for noise: a query is treated as noise plus something no
larger than twice the data. From :math:`\eta` and the number of points that count follows the error of a mean, if errors
are independent; where rounding has a pattern they are not. So means are compared with exact ones too: the error that
does not follow from :math:`\eta` is a floor that no number of points averages out. All of it is measured with queries
of both kinds: noise, and places midway between two points.

Sums over points lose the more of a heavy point the earlier it comes, since the sum is truncated at every step after it.
That is measured on sums in which one point, anywhere, outweighs every other a million times: its share is wrong by
:math:`\nu`, independently for several heavy points.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.posterior.dense import Block
from vkernel.posterior.gpu import fp16
from vkernel.posterior.gpu.fp16 import FULL, TINY, WIDE, FP16Points
from vkernel.posterior.weights import Queries, reduce

POINTS = 2048  # points whose logits are compared
LARGE = 256  # queries of a batch that is not bound by reading the data
MEANS = 16  # queries whose means are compared


@dataclass(frozen=True)
class Loss:
    """The errors of one kind of product.

    Of ``logits`` λ; η in units of |x'| Y, for ``noise`` and for what has the ``pattern`` of data; ν of a ``share``; of
    ``means`` λ, and a ``floor`` that does not follow from η and ν, in units of the data's ``spread``.
    """

    logits: float = 0.0
    noise: float = 0.0
    pattern: float = 0.0
    share: float = 0.0
    means: float = 0.0
    floor: float = 0.0


def calibrate(
    points: FP16Points,
    steps: ModuleType,
    spread: float,
    most: int,
    means: Callable[[Queries, bool, Loss], tuple[Tensor, Tensor]],
) -> dict[tuple[bool, bool], Loss]:
    """The losses by (small batch, ``low``), from batches of at most ``most`` queries.

    ``means`` maps queries, ``low`` and a loss to posterior means and the squares of their expected errors.
    """
    losses = {}
    for size in (min(64, fp16.SMALL, most) or 1, min(LARGE, most)):
        queries = _typical(points, size)
        some = queries[: min(MEANS, size)]
        block, every = Block(points.points, some, False), torch.arange(len(some), device=some.x.device)
        exact = reduce((block.float64(every, span) for span in points.points.spans()), some).mean - points.center
        for low in {False, points.low is not None}:
            loss = replace(_logits(points, steps, queries, low), share=_share(points, size, low))
            got, _ = means(queries, low, loss)
            loss = replace(loss, means=_fit(got[: len(some)] - points.center, exact)[0])
            got, expected = means(queries, low, loss)
            error = (got[: len(some)] - points.center - exact).norm(dim=1) / spread
            floor = (error.square() - expected[: len(some)]).clamp_min(0.0).max().sqrt()
            losses[size <= fp16.SMALL, low] = replace(loss, floor=float(floor))
    return losses


def _typical(points: FP16Points, size: int) -> Queries:
    """Half of the queries noise about the centre, half midway between two points, at a level where all points count."""
    data, stream = points.points.data, rng.stream(0, "what tensor cores lose")
    i = torch.randint(0, data.n, (2, size), generator=stream, device=stream.device).to(data.device)
    sigma = max(points.radius, 1e-100) / 2
    x = points.center + sigma * rng.randn((size, data.d), stream, data.device, WIDE)
    x[1::2] = ((data.take(i[0]).to(WIDE) + data.take(i[1]).to(WIDE)) / 2)[1::2]
    one = torch.ones(size, dtype=WIDE, device=data.device)
    return Queries(x, one, sigma**2 * one)


def _logits(points: FP16Points, steps: ModuleType, queries: Queries, low: bool) -> Loss:
    """λ and η of the logits of some points."""
    data = points.points.data
    logits = steps.split(queries, points)
    points.refine(logits, low)
    some = torch.linspace(0, data.n - 1, min(POINTS, data.n), dtype=torch.float64, device=data.device).long()
    y = (data.take(some).to(WIDE) - points.center) / points.unit
    size = logits.size.clamp_min(TINY)[:, None]  # sums are compared in units of |x'|
    gap = (queries.alpha / queries.var)[:, None] * (queries.x - queries.alpha[:, None] * points.center) / size
    got = logits.gain.to(WIDE)[:, None] / points.unit / size * logits.raw[:, some].to(WIDE)
    lost, rest = _fit(got, gap @ y.mT)
    noise, pattern = (
        float(kind.square().mean().sqrt()) * points.unit / max(points.radius, TINY) if len(kind) else 0.0
        for kind in (rest[::2], rest[1::2])
    )
    return Loss(lost, noise, pattern)


def _share(points: FP16Points, size: int, low: bool) -> float:
    """ν, from sums that one point dominates."""
    n, stream, device = points.n, rng.stream(0, "heavy points"), points.points.device
    light = 2e-6 * torch.rand(n, generator=stream, device=stream.device).to(device)
    heavy = torch.randint(0, n, (size, 1), generator=stream, device=stream.device).to(device)
    e = torch.nn.functional.pad(FULL * light.expand(size, n).scatter(1, heavy, 1.0), (0, points.rows - n))
    high = e.half()
    some = min(MEANS, size)
    got = points.sums(torch.stack([high, (e - high.float()).half()]), low)[:some]
    exact = torch.zeros_like(got)
    for start in range(0, points.rows, points.slice):
        here = slice(start, start + points.slice)
        for y in (points.high, points.low if low else None):
            if y is not None:
                exact += e[:some, here].to(WIDE) @ y[here, : points.d].to(WIDE)
    error = (got - exact).norm(dim=1) / exact.norm(dim=1).clamp_min(TINY)
    return float(error.square().mean().sqrt())


def _fit(got: Tensor, exact: Tensor) -> tuple[float, Tensor]:
    """λ, and the rest."""
    error, square = got - exact, exact.square().sum()
    lost = -(error * exact).sum() / square if bool(square > 0) else square
    return float(lost), error + lost * exact
