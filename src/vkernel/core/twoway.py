r"""Intervals over members × images: the paired bootstrap of twins, with Student's quantiles, and curves along training
(theory, §10.8).

Trained members m are evaluated on images i. Members and images are both random, so that a mean over the table
:math:`X_{mi}` has three parts of variance,

.. math:: X_{mi} = \mu + a_m + b_i + e_{mi}, \qquad
          \mathrm{Var}\,\bar X = \frac{\sigma_a^2}{M} + \frac{\sigma_b^2}{I} + \frac{\sigma_e^2}{MI} .

The bootstrap draws members and images independently, with replacement (McCullagh 2000; Owen 2007). Twins, the members
of two objectives with the same index, share the draw, and so do all quantities of one comparison.

A mean over pairs of different members (V, distances between laws) needs a value for a member that is drawn twice, since
its distance from itself is not that of two members. In the decomposition :math:`b_{mm'} = \bar b + r_m + r_{m'} +
g_{mm'}` of a symmetric table, with row effects :math:`r_m = \frac{M-1}{M-2} (\bar b_m - \bar b)` from means over the
other members, it is :math:`\bar b + 2 r_m`. Every member then has its weight, so that row effects cancel in 2 a - b as
they do in the sample, and the error agrees with that of the jackknife.

The variance over draws is, up to terms of higher order,

.. math:: \Big(1 - \frac1M\Big) \frac{\sigma_a^2}{M} + \Big(1 - \frac1I\Big) \frac{\sigma_b^2}{I}
          + 3\, \frac{\sigma_e^2}{MI} ,

too large in the last part, which is small, and too small in the first by 1/M. With few members that part is the
largest, and the normal quantiles that percentiles amount to are too short as well. Therefore

.. math:: \mathrm{se}^2 = \frac{M}{M-1}\, \mathrm{Var}^*, \qquad \hat\theta \pm q(M-1)\, \mathrm{se} ,

with Student's quantile q: for a mean over members alone this is the paired t interval. In a simulation of correlated
twins whose members and images differ in size (tests/core/test_twoway.py), the 95 % interval of a ratio of errors covers
0.96, 0.95 and 0.94 with M = 4, 8 and 16 members, where percentiles of the same draws cover 0.82, 0.88 and 0.91; that of
a ratio of V covers 0.99, 0.95 and 0.95, and percentiles 0.89, 0.91 and 0.93 (errors of these numbers: 0.01).

Row 0 of all replicates is the sample itself, with equal weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.errors import require
from vkernel.core.estimate import Estimate, holm

DRAWS = 2000
KNOWN = 0.8  # the least share of draws in which a statistic must be known


@dataclass(frozen=True)
class Contrast:
    """A number with its standard error and degrees of freedom: intervals of any level, and one-sided p values."""

    value: float
    se: float
    dof: int

    @property
    def known(self) -> bool:
        """Whether there is a value with an error."""
        return math.isfinite(self.value) and math.isfinite(self.se)

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Return the ends of Student's interval."""
        from scipy.special import stdtrit

        half = float(stdtrit(self.dof, (1 + level) / 2)) * self.se
        return self.value - half, self.value + half

    @property
    def estimate(self) -> Estimate:
        """The number with its 95 % interval."""
        return Estimate(self.value, self.se, *self.interval())

    def p_above(self, null: float) -> float:
        """Return the p value of "at most ``null``": small if the number is shown to be larger; 1 if it is unknown."""
        from scipy.special import stdtr

        if not self.known:
            return 1.0
        away = self.value - null
        if self.se == 0:
            return 0.0 if away > 0 else 1.0
        return float(stdtr(self.dof, -away / self.se))

    def p_below(self, null: float) -> float:
        """Return the p value of "at least ``null``"."""
        return Contrast(-self.value, self.se, self.dof).p_above(-null)

    def p_inside(self, margin: float) -> float:
        """Return the p value of "``margin`` or more away from 0": two one-sided tests. It is at most .05 if the 90 %
        interval lies inside ±``margin``."""
        return max(self.p_above(-margin), self.p_below(margin))

    def p_outside(self, margin: float) -> float:
        """Return the p value of "within ±``margin``": it is at most .05 if the 90 % interval lies outside."""
        return min(self.p_above(margin), self.p_below(-margin))


@dataclass(frozen=True)
class Resamples:
    """Draws of members and images: weights ``members (1 + draws, M)``, each row of sum 1, of which the first are equal.

    The weights of images are drawn for a named set of images: sets of different names are independent, and the same
    name gives the same draws in every comparison."""

    count: int
    draws: int = DRAWS
    seed: int = 0
    members: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        require(self.count >= 2, f"A bootstrap over members needs 2 of them or more; got {self.count}.")
        object.__setattr__(self, "members", self._weights("members", self.count))

    def _weights(self, name: str, count: int) -> Tensor:
        source = rng.stream(self.seed, f"twoway/{name}")
        drawn = torch.randint(count, (self.draws, count), generator=source)
        weights = torch.zeros(1 + self.draws, count, dtype=torch.float64)
        weights[1:].scatter_add_(1, drawn, torch.ones(drawn.shape, dtype=torch.float64))
        weights[0] = 1.0
        return weights / count

    def each(self, values: Tensor, images: str) -> Tensor:
        """Return means over images of each member: ``values (M, *rest, I)`` become ``(1 + draws, M, *rest)``."""
        return torch.einsum("bi,...i->b...", self._weights(images, values.shape[-1]), values.double())

    def mean(self, values: Tensor, images: str | None = None) -> Tensor:
        """Return means over members, and over images of ``values (M, *rest, I)`` where these are named."""
        weighted = (self.members @ values.double().reshape(self.count, -1)).reshape(-1, *values.shape[1:])
        return weighted if images is None else self._over(weighted, images)

    def pairs(self, values: Tensor, images: str | None = None) -> Tensor:
        """Return means over pairs of different members, of symmetric ``values (M, M, *rest)``, or ``(M, M, *rest, I)``;
        the diagonal is not read."""
        M, off = self.count, ~torch.eye(self.count, dtype=torch.bool)
        require(M >= 3, f"The error of a mean over pairs of members needs 3 of them or more; got {M}.")
        flat = values.double().reshape(M, M, -1)
        flat = torch.where(off[..., None], flat, 0.0)
        rows = flat.sum(1) / (M - 1)
        twice = rows.mean(0) + 2 * (M - 1) / (M - 2) * (rows - rows.mean(0))
        flat = torch.where(off[..., None], flat, twice[:, None]).reshape(M * M, -1)
        pairs = (self.members[:, :, None] * self.members[:, None, :]).flatten(1)
        weighted = (pairs @ flat).reshape(-1, *values.shape[2:])
        return weighted if images is None else self._over(weighted, images)

    def average(self, each: Tensor) -> Tensor:
        """Return means over members of ``each (1 + draws, M)``; members of unknown value are left out."""
        known = each.isfinite()
        weights = self.members * known
        return (weights * each.nan_to_num(0.0)).sum(1) / weights.sum(1).where(known.any(1), torch.nan)

    def estimate(self, replicates: Tensor, low: float = -math.inf, high: float = math.inf) -> Estimate[Tensor]:
        """Return the estimates of ``replicates (1 + draws, …)``, within the range of the quantity."""
        drawn = replicates[1:]
        known = drawn.isfinite()
        count = known.sum(0)
        mean = drawn.nan_to_num(0.0).where(known, 0.0).sum(0) / count.clamp_min(1)
        square = torch.where(known, drawn - mean, 0.0).square().sum(0) / (count - 1).clamp_min(1)
        se = (square * self.count / (self.count - 1)).sqrt().where(count >= max(2, KNOWN * self.draws), torch.nan)
        return Estimate.of_error(replicates[0], se, self.count - 1, low, high)

    def contrast(self, replicates: Tensor, least: float = 0.0) -> Contrast:
        """Return the contrast of ``replicates (1 + draws,)``, whose error is at least ``least``."""
        found = self.estimate(replicates)
        return Contrast(float(found.value), max(float(found.se), least), self.count - 1)

    def _over(self, weighted: Tensor, images: str) -> Tensor:
        weights = self._weights(images, weighted.shape[-1])
        return (weighted * weights.reshape(len(weights), *(1,) * (weighted.ndim - 2), -1)).sum(-1)


def decide(holds: Sequence[float], fails: Sequence[float], level: float = 0.05) -> list[int]:
    """Return 1 (holds), -1 (fails) or 0 (undecided) for each member of a family, from p values of both claims.

    Each pair is one two-sided hypothesis with p = 2 min(holds, fails), which is at most ``level`` if an interval of
    1 - ``level`` lies on one side: .05, or .1 for 90 % intervals. Holm's method rejects some of the family; these go to
    the side of the smaller p value. NaN are no hypotheses."""
    both = torch.tensor([2 * min(a, b) if a == a and b == b else math.nan for a, b in zip(holds, fails, strict=True)])
    rejected = holm(both.double(), level)
    return [(1 if a < b else -1) if r else 0 for a, b, r in zip(holds, fails, rejected.tolist(), strict=True)]


def interpolate(y: Tensor, x: Tensor, at: Tensor) -> Tensor:
    """Return piecewise linear ``y (…, S, *rest)`` over ascending ``x (S,)`` at ``at (G,)``: ``(…, G, *rest)`` with S
    the axis -2, or NaN outside: nothing is extrapolated."""
    k = torch.searchsorted(x, at.contiguous()).clamp(1, len(x) - 1)
    share = ((at - x[k - 1]) / (x[k] - x[k - 1]))[:, None]
    found = y[..., k - 1, :] * (1 - share) + y[..., k, :] * share
    return found.where(((at >= x[0]) & (at <= x[-1]))[:, None], torch.nan)


def at_equal(e: Tensor, y: Tensor, levels: Tensor, last: bool = False) -> Tensor:
    """Return y where the piecewise linear curve e first (or last) takes each level; NaN where it never does.

    ``e`` and ``y (…, S)`` are curves along training, ``levels (…, G)``; both are linear in the same variable, log step,
    between snapshots, so that the crossing divides both segments in the same ratio. NaN snapshots are left out."""
    left, right = e[..., None, :-1], e[..., None, 1:]
    share = (levels[..., None] - left) / torch.where(right == left, torch.nan, right - left)
    inside = (share >= 0) & (share <= 1)
    order = torch.arange(1, e.shape[-1], dtype=torch.float64)
    rank = torch.where(inside, order if last else -order, -math.inf)
    best = rank.max(-1, keepdim=True)
    values = y[..., None, :-1] * (1 - share) + y[..., None, 1:] * share
    found = values.nan_to_num(0.0).gather(-1, best.indices)[..., 0]
    return found.where(best.values[..., 0] > -math.inf, torch.nan)


def frontier(e: Tensor, y: Tensor, e0: Tensor, y0: Tensor, points: int = 17) -> Tensor:
    """Return how much lower or higher the frontier y(e) of one training lies than that of its twin, y0(e0): ``(…,)``.

    Curves ``(…, S)``, each pair with its own snapshots, are along training, and e is log error on held-out images. It
    falls and, in a training that overfits, rises again; both branches, up to the least e and from there, are compared
    with the same branch of the twin. On the common range of e of each, y - y0 at equal e is averaged; the two are then
    averaged with the lengths of their ranges as weights. NaN where no range is common: nothing is extrapolated."""
    total, length = torch.zeros_like(e[..., 0]), torch.zeros_like(e[..., 0])
    share = torch.linspace(0, 1, points, dtype=torch.float64)
    for last in (False, True):
        parts = []
        for curve in (e, e0):
            least, steps = curve.nan_to_num(math.inf).argmin(-1, keepdim=True), torch.arange(curve.shape[-1])
            parts.append(torch.where(steps >= least if last else steps <= least, curve, torch.nan))
        low = torch.maximum(*(p.nan_to_num(math.inf).amin(-1) for p in parts))
        high = torch.minimum(*(p.nan_to_num(-math.inf).amax(-1) for p in parts))
        common = (high - low).clamp_min(0.0)
        levels = low[..., None] + common[..., None] * share
        one, other = (at_equal(p, v, levels, last) for p, v in zip(parts, (y, y0), strict=True))
        difference = one - other
        known = difference.isfinite()
        mean = difference.nan_to_num(0.0).sum(-1) / known.sum(-1).clamp_min(1)
        weight = common * (known.any(-1) & (common > 0))
        total, length = total + weight * mean, length + weight
    return total / length.where(length > 0, torch.nan)


def frontier_tolerance(e: Tensor, y: Tensor) -> float:
    """Return the error of interpolating a frontier between snapshots, from curves ``(M, S)``: a quarter of what half of
    the snapshots change, since the error of a line is of second order in the spacing; 0 with fewer than 4 snapshots."""
    if e.shape[-1] < 4:
        return 0.0
    thin = sorted({*range(0, e.shape[-1], 2), e.shape[-1] - 1})
    changed = frontier(e[..., thin], y[..., thin], e, y).abs()
    return float(changed.nan_to_num(0.0).mean() / 4)


def bends(reference: Tensor, x: Tensor, at: Tensor) -> Tensor:
    """Return the error of linear interpolation of ``reference (S, K)`` over evenly spaced ``x (S,)`` at ``at (G,)``: u
    (1 - u)/2 times the larger of the second differences beside it, with u the place in the segment, ``(G, K)``."""
    second = torch.zeros_like(reference)
    if len(x) > 2:
        second[1:-1] = (reference[2:] - 2 * reference[1:-1] + reference[:-2]).abs()
    k = torch.searchsorted(x, at.contiguous()).clamp(1, len(x) - 1)
    u = ((at - x[k - 1]) / (x[k] - x[k - 1]))[:, None]
    return u * (1 - u) / 2 * torch.maximum(second[k - 1], second[k])


def change_of_time(curves: Tensor, reference: Tensor, x: Tensor, points: int = 129) -> tuple[Tensor, Tensor]:
    """Fit one change of time that maps ``curves (B, S, K)`` onto ``reference (B, S, K)``, curves over ``x (S,)``.

    For each snapshot s the time τ(s) on the range of x is found at which the sum over all K curves of the squared
    distance is least. Return ``tau (B, S)`` and the distances that are left, ``(B, S, K)``: zero if the K curves are
    those of the reference at another time. Where τ is an end of the range the time may lie beyond: look at ``tau``. NaN
    where one of the curves is."""
    grid = torch.linspace(float(x[0]), float(x[-1]), points, dtype=torch.float64)
    known = interpolate(reference, x, grid)
    tau, left = [], []
    for s in range(len(x)):
        away = curves[:, s, None] - known
        best = away.square().sum(-1).argmin(1)
        left.append(away[torch.arange(len(away)), best])
        tau.append(grid[best].where(left[-1].isfinite().all(-1), torch.nan))
    return torch.stack(tau, 1), torch.stack(left, 1)
