r"""When will copies appear? An estimate from the closest samples, or none (docs/theory.md, §10.9).

Let j be the least number of copies among N samples whose Wilson interval lies above that of held-out images, and
:math:`r_j` the j-th smallest ratio of a sample's distances to its two nearest training images: copying begins where
:math:`r_j` falls below the threshold 1/3. Below .8 it falls about linearly in the logarithm of the step. Means of
:math:`r_j` over quarter octaves of steps, since it was last above .8 and up to four octaves back, are fitted by a line,
and the step at which it reaches 1/3 has an interval by inverse regression (:func:`~vkernel.core.estimate.crossing`).
There is no estimate

* of fewer than four quarter octaves, or while :math:`r_j` is above .8;
* if the slope is not significantly negative, or the ends of the interval differ by more than a factor 10;
* beyond twice the present step: an estimate that is made before copies appear, and is at most twice the present step,
  cannot be more than twice too late, and lines through earlier parts of runs did not hold farther."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vkernel.core.estimate import Estimate, crossing
from vkernel.reports.monitor.record import Evaluation, Setting

QUARTER, OCTAVES, FEWEST = 0.25, 4.0, 4  # of a mean, in octaves of steps; those used; the means that are needed
BEGUN = 0.8  # above it the fall of r_j has not begun
COVERAGE = 0.9  # of the interval
WIDEST, FARTHEST = 10.0, 2.0  # the largest ratio of its ends, and of the estimate to the present step


@dataclass(frozen=True)
class Forecast:
    """The step at which copies are expected to appear, with an interval of coverage 90 %; ``None`` and ``why`` without
    an estimate. ``ratio`` is r_j at the last evaluation with samples."""

    value: float | None
    low: float
    high: float
    why: str = ""
    ratio: float = math.nan


def needed(setting: Setting) -> int | None:
    """Return j, the number of copies among the samples that is more than held-out images explain."""
    high, n = setting.held_share.high, setting.samples
    return next((j for j in range(1, n + 1) if Estimate.of_share(j, n).low > high), None)


def ratios(records: Sequence[Evaluation], j: int) -> tuple[Tensor, Tensor]:
    """Return steps and r_j of the evaluations with samples."""
    held = [(r.step, r.drawn.quantile(j)) for r in records if r.drawn is not None and r.step > 0]
    steps, found = zip(*held, strict=True) if held else ((), ())
    return torch.tensor(steps, dtype=torch.float64), torch.tensor(found, dtype=torch.float64)


def forecast(records: Sequence[Evaluation], setting: Setting, copied: int | None) -> Forecast:
    """Estimate when copies appear; ``copied`` is the step at which they did, if they did."""
    if setting.samples == 0:
        return Forecast(None, math.nan, math.nan, "no samples are drawn")
    j = needed(setting)
    if j is None:
        return Forecast(None, math.nan, math.nan, "there are too few samples, or held-out images, to count copies")
    steps, r = ratios(records, j)
    if copied is not None:
        return Forecast(None, math.nan, math.nan, "copies have appeared", float(r[-1]) if len(r) else math.nan)
    return arrival(steps, r, setting.threshold)


def arrival(steps: Tensor, r: Tensor, threshold: float) -> Forecast:
    """Estimate the step at which ``r (m,)``, measured at ``steps (m,)``, reaches ``threshold``."""
    last = float(r[-1]) if len(r) else math.nan

    def none(why: str) -> Forecast:
        return Forecast(None, math.nan, math.nan, why, last)

    if not last <= BEGUN:
        return none("samples are not yet close to training images" if len(r) else "no samples have been drawn")
    now = float(steps[-1])
    x, y = _means(steps, r)
    if len(x) < FEWEST:
        return none("samples were drawn over too few steps")
    found = crossing(x, y, threshold, COVERAGE)
    if math.isnan(found.value) or not found.value > float(x.mean()):  # the line falls, from above the threshold
        return none("samples do not come steadily closer to training images")
    value, low, high = (max(now, math.exp(min(end, 100.0))) for end in (found.value, found.low, found.high))
    if high > WIDEST * low or value > FARTHEST * now:
        return none("it would be too uncertain so far ahead")
    return Forecast(value, low, high, "", last)


def _means(steps: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Return means of log(step) and of r over quarter octaves of steps, since r was last above ``BEGUN``."""
    above = (r > BEGUN).nonzero().flatten()
    first = int(above[-1]) + 1 if len(above) else 0
    age = (steps[-1] / steps).log2()
    kept = (age <= OCTAVES) & (torch.arange(len(r)) >= first)
    part = (age[kept] / QUARTER).floor().long()
    count = part.bincount()
    sums = (torch.zeros(len(count), dtype=torch.float64).index_add_(0, part, v[kept]) for v in (steps.log(), r))
    x, y = (total[count > 0] / count[count > 0] for total in sums)
    return x, y
