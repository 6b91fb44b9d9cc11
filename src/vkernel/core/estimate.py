r"""Numbers with errors: the one place where standard errors, intervals and p values are computed.

An :class:`Estimate` is a value, its standard error and a 95 % interval. For a mean of :math:`n` independent values
:math:`z_k`,

.. math:: \hat\mu = \frac1n \sum_k z_k, \qquad \mathrm{se} = \sqrt{\frac{1}{n(n-1)} \sum_k (z_k - \hat\mu)^2},
          \qquad \hat\mu \pm q_{.975}(n-1)\, \mathrm{se}

with :math:`q` the quantile of Student's law. A value that is exact (a quadrature, a closed form) has ``se = 0``. Below:
constructors; resampling; comparisons of samples; correlations of ranks; p values. :mod:`vkernel.core.variance` splits
the variance over members.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, cast

import numpy as np
import torch
from torch import Tensor
from typing_extensions import TypeVar

from vkernel.core import rng

INF = math.inf
Z95 = 1.959963984540054  # the .975 quantile of the normal law
TINY = 1e-280  # numbers below have lost digits to underflow
LEAST = 0.01  # of the samples of a model: the difference of shares above which a pair of models is said to differ
Number = Tensor | float
Statistic = Callable[[Tensor], Number]
N = TypeVar("N", bound="float | Tensor", default=float)


@dataclass(frozen=True)
class Estimate(Generic[N]):
    """A value with standard error and 95 % interval: floats, or tensors where there are axes (``Estimate[Tensor]``).

    >>> import torch, vkernel as vk
    >>> found = vk.Estimate.of_mean(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    >>> round(float(found.value), 3), round(float(found.se), 3)
    (2.5, 0.645)
    >>> share = vk.Estimate.of_share(3, 100)
    >>> round(share.low, 3), round(share.high, 3)
    (0.01, 0.085)
    """

    value: N
    se: N
    low: N
    high: N

    @classmethod
    def exact(cls, value: N) -> Estimate[N]:
        """Return an estimate without error."""
        zero = torch.zeros_like(value) if isinstance(value, Tensor) else 0.0
        return cls(value, cast(N, zero), value, value)

    @classmethod
    def unknown(cls) -> Estimate[N]:
        """Return an estimate of which nothing is known: four NaN."""
        return _estimate(math.nan, math.nan, math.nan, math.nan)

    @classmethod
    def of_mean(cls, samples: Tensor, dim: int = 0, scale: float = 1.0) -> Estimate[N]:
        """Estimate ``scale`` times the mean of ``samples`` over ``dim``, which holds independent draws."""
        n, mean = samples.shape[dim], samples.mean(dim)
        se = samples.std(dim) / n**0.5 if n > 1 else torch.full_like(mean, INF)
        return cls.of_error(mean * scale, se * abs(scale), n - 1)

    @classmethod
    def of_share(cls, hits: Tensor | int, n: float, scale: float = 1.0) -> Estimate[N]:
        """Estimate ``scale`` times the share p = ``hits / n``, with Wilson's interval: (p-P)² ≤ z² P(1-P)/n."""
        hits = torch.as_tensor(hits, dtype=torch.float64)
        z2, p = Z95**2, hits / n
        middle, half = p + z2 / (2 * n), (z2 * (p * (1 - p) / n + z2 / (4 * n * n))).sqrt()
        low = ((middle - half) / (1 + z2 / n)).masked_fill(hits == 0, 0.0)
        high = ((middle + half) / (1 + z2 / n)).masked_fill(hits == n, 1.0)
        return _estimate(scale * p, scale * (p * (1 - p) / n).sqrt(), scale * low, scale * high)

    @classmethod
    def of_error(cls, value: Number, se: Number, dof: float = INF, low: float = -INF, high: float = INF) -> Estimate[N]:
        """Return ``value`` ± q(dof) ``se``; the interval is cut to the range [``low``, ``high``] of the quantity."""
        value, se = _tensor(value), _tensor(se)
        half = student_quantile(dof) * se
        return _estimate(value, se, (value - half).clamp_min(low), (value + half).clamp_max(high))

    @classmethod
    def of_variances(
        cls, value: float, parts: Sequence[tuple[float, int]], low: float = -INF, high: float = INF, slope: float = 1.0
    ) -> Estimate:
        """Add independent variances v_k, each with the number n_k of units it was measured from. The variances belong
        to a quantity of which ``value`` is a function with derivative ``slope``. The degrees of freedom are Welch and
        Satterthwaite's, v² / Σ v_k²/(n_k - 1)."""
        total = sum(variance for variance, _ in parts)
        if not math.isfinite(total):
            return Estimate(value, INF, low, high)
        spread = sum(variance**2 / (units - 1) for variance, units in parts)
        dof = max(1, int(min(total**2 / spread, 1e9))) if spread > 0 else 10**9
        return Estimate.of_error(value, slope * math.sqrt(total), dof, low, high)

    @classmethod
    def of_log(cls, value: Number, relative_se: Number, dof: float = INF) -> Estimate[N]:
        """Estimate a positive number from its relative standard error; the interval is even in the logarithm."""
        value, relative = _tensor(value), _tensor(relative_se)
        factor = torch.exp((student_quantile(dof) * relative).clamp_max(700.0))
        return _estimate(value, value * relative, value / factor, value * factor)

    def mapped(self, f: Callable[[Tensor], Tensor]) -> Estimate[N]:
        """Return the estimate of an increasing function of this: its interval is the image of this one, and its
        standard error is multiplied by the derivative."""
        value, se, low, high = map(_tensor, self.fields)
        slope = torch.func.vjp(f, value)[1](torch.ones_like(value))[0]  # not jvp, which threads would share
        return _estimate(f(value), slope * se, f(low), f(high))

    def exp(self) -> Estimate[N]:
        """Return the estimate of the exponential."""
        return self.mapped(torch.exp)

    def scaled(self, factor: float) -> Estimate[N]:
        """Return ``factor`` ≥ 0 times this."""
        return _estimate(*(cast(Any, v) * factor for v in self.fields))

    def complement(self) -> Estimate[N]:
        """Return one less this, such as the share that does not count."""
        return _estimate(1 - self.value, self.se, 1 - self.high, 1 - self.low)

    @property
    def fields(self) -> tuple[N, N, N, N]:
        """Value, standard error, low end and high end."""
        return self.value, self.se, self.low, self.high

    def stack(self, dim: int = 0) -> Tensor:
        """Return value, low end and high end in one float64 tensor, along a new axis ``dim``."""
        return torch.stack([torch.as_tensor(v, dtype=torch.float64) for v in (self.value, self.low, self.high)], dim)

    def __getitem__(self, index: int | slice | Tensor | tuple[int | slice | Tensor, ...]) -> Estimate[N]:
        """Return the estimate of one element, or of a slice, of tensors."""
        return _estimate(*(cast(Tensor, v)[index] for v in self.fields))

    def __float__(self) -> float:
        return float(self.value)

    def __str__(self) -> str:
        if isinstance(self.value, Tensor):
            return f"Estimate(value={self.value}, se={self.se})"
        return f"{self.value:.4g} ± {self.se:.1g} [{self.low:.4g}, {self.high:.4g}]"


def stacked(estimates: Sequence[Estimate], shape: tuple[int, ...] = (-1,)) -> Estimate[Tensor]:
    """Return several estimates of numbers as one of tensors of this shape."""
    columns = zip(*(e.fields for e in estimates), strict=True)
    value, se, low, high = (torch.tensor(column, dtype=torch.float64).reshape(shape) for column in columns)
    return Estimate(value, se, low, high)


def _estimate(*fields: Number) -> Estimate[Any]:
    """Return an estimate of four fields, as floats where they have no axes."""
    return Estimate(*(v if isinstance(v, Tensor) and v.ndim else float(v) for v in fields))


def _tensor(value: Number) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def leave_one_out(statistic: Statistic, samples: Tensor, groups: int | None = None, dim: int = 0) -> Tensor:
    """Return ``statistic`` without each unit of axis ``dim`` (or without each of ``groups`` runs of units), stacked."""
    parts = samples.chunk(groups or samples.shape[dim], dim)
    rest = (torch.cat(parts[:k] + parts[k + 1 :], dim) for k in range(len(parts)))
    return torch.stack([torch.as_tensor(statistic(r), dtype=torch.float64, device=samples.device) for r in rest])


def jackknife_se(without: Tensor, dim: int = 0) -> Tensor:
    """Return se, se² = (n-1)/n Σ_k (θ_k - mean θ)², from values θ_k that each leave one unit out, along ``dim``."""
    n = without.shape[dim]
    return ((n - 1) / n * (without - without.mean(dim, keepdim=True)).square().sum(dim)).sqrt()


def jackknife(value: Number, without: Tensor, *, low: float = -INF, high: float = INF) -> Estimate[N]:
    """Return ``value`` with the jackknife's error; ``without (n, …)`` are the values that each leave one unit out."""
    return Estimate.of_error(value, jackknife_se(without), len(without) - 1, low, high)


def bootstrap(
    statistic: Callable[[Tensor], Tensor], counts: Tensor, draws: int = 200, generator: rng.Generator = None
) -> Tensor:
    """Return ``statistic`` of ``draws`` multinomial resamples ``(draws, cells)`` of a histogram ``counts (cells,)``."""
    source = rng.as_generator(generator)
    seed = int(torch.randint(1 << 62, (), generator=source, device=source.device))
    n, shares = int(counts.sum()), (counts.double() / counts.sum()).cpu().numpy()
    return statistic(torch.from_numpy(np.random.default_rng(seed).multinomial(n, shares, draws)).double())


def relative_se(samples: Tensor) -> Tensor:
    """Return the relative standard error of the mean over the first axis; NaN of one sample."""
    if len(samples) < 2:
        return torch.full_like(samples.mean(0), math.nan)
    return samples.std(0) / math.sqrt(len(samples)) / samples.mean(0)


def ratio_of_means(a: Tensor, b: Tensor, *, paired: bool) -> Estimate[N]:
    """Estimate mean a / mean b, over first axes, of positive numbers; the interval is even in the logarithm. Paired
    samples (one pair for each member) have the delta method's error, the spread of a_m/ā - b_m/b̄; independent ones add
    their relative variances, with Welch's degrees of freedom (the least over elements)."""
    value = a.mean(0) / b.mean(0)
    if not bool((a.mean(0) > 0).all() and (b.mean(0) > 0).all()):
        return _estimate(*(torch.full_like(value, v) for v in (math.nan, math.nan, 0.0, INF)))
    if paired:
        spread = (a / a.mean(0) - b / b.mean(0)).std(0) if len(a) > 1 else torch.full_like(value, INF)
        return Estimate.of_log(value, spread / math.sqrt(len(a)), len(a) - 1)
    va, vb = relative_se(a).square(), relative_se(b).square()
    dof = (va + vb).square() / (va.square() / (len(a) - 1) + vb.square() / (len(b) - 1)).clamp_min(1e-300)
    return Estimate.of_log(value, (va + vb).sqrt(), max(1, int(dof.min())))


def ratio_of_sums(a: Tensor, b: Tensor) -> Estimate:
    """Estimate Σa / Σb of paired ``a, b (n,)``, not negative; the error is the jackknife's of the logarithm, whose
    interval covers skewed numbers better than those of the delta method and of Fieller. Nothing is known of one pair or
    where b underflows."""
    n, over, under = len(a), float(a.sum()), float(b.sum())
    if n < 2 or not under > TINY:
        return Estimate.unknown()
    if not over > 0:
        return Estimate.exact(0.0)
    least = torch.finfo(a.dtype).eps  # of the sum: where one pair holds it all, the rest is rounding
    without = (1 - a / over).clamp_min(least).log() - (1 - b / under).clamp_min(least).log()
    return Estimate.of_log(over / under, jackknife_se(without), n - 1)


def ratio_test(value: Number, without: Tensor, other: Tensor) -> tuple[Estimate, float]:
    """Estimate a positive ratio, and return the p value of its being 1 by Student's test of the logarithm. Of its two
    independent errors one is the jackknife's, of values ``without (n,)`` each unit, and one that of the mean of
    ``other (m,)``, values that each use one of m units. The degrees of freedom are Welch's."""
    from scipy.special import stdtr

    value, n, m = float(value), len(without), len(other)
    a, b = (float(jackknife_se(without)) / value) ** 2, float(other.var()) / m / value**2
    dof = max(1, int(min((a + b) ** 2 / max(a**2 / (n - 1) + b**2 / (m - 1), TINY), 1e9)))
    p = 2 * float(stdtr(dof, -abs(math.log(value)) / math.sqrt(max(a + b, TINY))))
    return Estimate[float].of_log(value, math.sqrt(a + b), dof), p


@dataclass(frozen=True)
class Twins:
    """Averages of paired numbers a_m, b_m, and what holds of a typical pair; the result of :func:`twins`.

    ``ratio`` and ``difference`` compare means. ``medians`` and ``none``, the shares of numbers that are zero, are given
    for a and for b. ``more`` and ``less`` are the shares of pairs in which a is larger and smaller than b by more than
    the least difference that counts; ``p`` is that of the two-sided sign test over these pairs. ``top`` is the share of
    the sum of a that its largest tenth holds.
    """

    ratio: Estimate
    difference: Estimate
    medians: tuple[Estimate, Estimate]
    none: tuple[Estimate, Estimate]
    more: Estimate
    less: Estimate
    p: float
    top: float


def twins(a: Tensor, b: Tensor, least: float = 0.0) -> Twins:
    """Compare paired numbers ``a, b (M,)``, one pair for each training: a mean may be moved by a few of them.

    Trainings with the same random numbers may give k pairs each, ``(M, k)``, which are not independent: means are taken
    over k first, intervals of shares are over the M, and the sign test counts the sign of most of the k.

    A pair counts as more or less if it differs by more than ``least``. Shares of n samples need it: with 0, a few of n
    samples decide, and the larger n is, the fewer pairs are equal.
    """
    n, several, (first, second) = len(a), a.ndim > 1, (v.flatten() for v in (a, b))
    difference = (a - b).reshape(n, -1)
    signs = difference.sign() * (difference.abs() > least)

    def share(hits: Tensor) -> Estimate:
        if not several:
            return Estimate.of_share(int(hits.sum()), n)
        found: Estimate = Estimate.of_mean(hits.double().mean(1))
        return Estimate.of_error(found.value, found.se, n - 1, 0.0, 1.0)

    more, less = (int((sign * signs.sum(1) > 0).sum()) for sign in (1, -1))
    largest = first.double().sort(descending=True).values
    means = (a.mean(1), b.mean(1)) if several else (a, b)
    return Twins(
        ratio_of_means(*means, paired=True),
        Estimate.of_mean(means[0] - means[1]),
        (median(first), median(second)),
        (share(a.reshape(n, -1) == 0), share(b.reshape(n, -1) == 0)),
        share(signs > 0),
        share(signs < 0),
        min(1.0, 2 * sign_test(max(more, less), more + less)),
        float(largest[: math.ceil(len(largest) / 10)].sum() / largest.sum().clamp_min(TINY)),
    )


def ratio_values(a: Tensor, b: Tensor) -> Tensor:
    """Return values with mean q = mean a / mean b over the last axis, of pairs; its error is the delta method's."""
    mean = b.mean(-1, keepdim=True).clamp_min(1e-300)
    q = a.mean(-1, keepdim=True) / mean
    return q + (a - q * b) / mean


def ratio_of_spreads(a: Tensor, b: Tensor, weights: Tensor | None = None, floor: float = 0.0) -> Estimate:
    """Estimate the standard deviation of ``a (n,)`` over that of ``b (m,)``, independent, b with ``weights`` of sum 1.

    The interval is even in the logarithm: the error of log std a is the jackknife's, that of log std b the delta
    method's, with the influence ((b - mean)²/variance - 1)/2 of each point. ``floor`` is the least std of b that is
    more than rounding. Nothing is known from fewer than three a or if both spreads vanish."""
    weights = torch.full_like(b, 1 / len(b)) if weights is None else weights
    size, n = float(1 / weights.square().sum()), len(a)
    away, squares = (b - weights @ b).square(), (a - a.mean()).square() if n else a
    below = float(weights @ away) * size / max(size - 1, 1e-9)
    unit = max(math.sqrt(below), floor)
    if n < 3 or not unit > 0:
        return Estimate.unknown()
    if not float(squares.sum()) > 0:
        return Estimate.exact(0.0)
    without = (squares.sum() - squares * n / (n - 1)) / (n - 2)  # the variance without each
    error = float(jackknife_se(without.clamp_min(TINY).log() / 2)), 0.0
    if below > floor**2:
        error = error[0], float((weights * (away / below - 1) / 2).norm())
    value, total = math.sqrt(float(squares.sum()) / (n - 1)) / unit, error[0] ** 2 + error[1] ** 2
    dof = total**2 / max(error[0] ** 4 / (n - 1) + error[1] ** 4 / max(size - 1, 1), TINY)
    return Estimate.of_log(value, math.sqrt(total), max(1, int(min(dof, 1e9))))


def difference_of_means(a: Tensor, b: Tensor) -> Estimate:
    """Estimate the mean of ``a (n,)`` less that of ``b (m,)``, independent, with Welch's interval."""
    parts = [(float(x.var()) / len(x), len(x)) for x in (a, b)]
    return Estimate.of_variances(float(a.mean() - b.mean()), parts)


def welch_p(a: Tensor, b: Tensor) -> float:
    """Return the one-sided p value of mean a ≤ mean b, independent ``a (n,)`` and ``b (m,)``, by Welch's test."""
    parts = [(float(x.var()) / len(x), len(x)) for x in (a, b)]
    return _welch_p(float(a.mean() - b.mean()), parts)


def _welch_p(difference: float, parts: Sequence[tuple[float, int]]) -> float:
    """Return the p value of a difference of means, from the variance of each and the number of its units."""
    from scipy.special import stdtr

    total = sum(variance for variance, _ in parts)
    if not total > 0:  # no spread at all
        return 0.5 if difference == 0 else float(difference < 0)
    dof = total**2 / max(sum(variance**2 / (n - 1) for variance, n in parts), TINY)
    return float(stdtr(dof, -difference / math.sqrt(total)))


def _student_p(difference: float, parts: Sequence[tuple[float, int]]) -> float:
    """Return the p value of a difference of means of two samples with one variance."""
    from scipy.special import stdtr

    dof = sum(n - 1 for _, n in parts)
    pooled = sum(variance * n * (n - 1) for variance, n in parts) / dof * sum(1 / n for _, n in parts)
    if not pooled > 0:
        return 0.5 if difference == 0 else float(difference < 0)
    return float(stdtr(dof, -difference / math.sqrt(pooled)))


def relative_change(a: Tensor, b: Tensor, size: Tensor, level: float) -> Estimate:
    r"""Estimate (mean a - mean b) / mean size with a lower bound; ``a`` and ``size (n,)`` are pairs, ``b (m,)`` is
    independent of them. The interval [low, ∞) holds the :math:`\delta` that a one-sided test of
    :math:`E[a - \delta\,\mathrm{size}] > E[b]` does not reject at ``level`` (Fieller's form). Its p value is the larger
    of Welch's and of Student's with the variance of all: of a skewed law, a small sample with a low mean has a low
    variance too, which Welch's test alone takes for precision."""
    n, m, mean, difference = len(a), len(b), float(size.mean()), float(a.mean() - b.mean())
    value = difference / mean if mean > 0 else math.nan
    if not math.isfinite(value):
        return Estimate.unknown()
    ((aa, ab), (_, bb)), other = torch.cov(torch.stack([a, size]).double()).div(n).tolist(), float(b.var()) / m

    def variance(delta: float) -> float:
        return max(float(aa - 2 * delta * ab + delta**2 * bb), 0.0)

    def rejected(delta: float) -> bool:
        away, parts = difference - delta * mean, [(variance(delta), n), (other, m)]
        return max(_welch_p(away, parts), _student_p(away, parts)) < level

    se = math.sqrt(variance(value) + other) / mean
    outside, inside = value - max(se, 1e-12), value
    while not rejected(outside):
        inside, outside = outside, value - 2 * (value - outside)
        if value - outside > 1e6 * max(se, 1e-12):  # the mean of size cannot be distinguished from zero
            return Estimate(value, se, -INF, INF)
    for _ in range(40):
        middle = (inside + outside) / 2
        inside, outside = (inside, middle) if rejected(middle) else (middle, outside)
    return Estimate(value, se, outside, INF)


def difference_of_shares(one: Estimate, two: Estimate) -> Estimate:
    """Estimate one share less another, independent, from their Wilson intervals (Newcombe 1998, method 10)."""
    value, se = one.value - two.value, math.hypot(one.se, two.se)
    below = math.hypot(one.value - one.low, two.high - two.value)
    above = math.hypot(one.high - one.value, two.value - two.low)
    return Estimate(value, se, value - below, value + above)


def crossing(x: Tensor, y: Tensor, height: float, chance: float = 0.95) -> Estimate:
    r"""Estimate where a line through ``x, y (m,)`` reaches ``height``, for a new observation (inverse regression).

    With slope b, residual variance s² and :math:`S = \sum (x_i - \bar x)^2`, the interval of coverage ``chance`` holds
    the :math:`x_0` with :math:`(\bar y + b (x_0 - \bar x) - h)^2 \le q^2 s^2 (1 + 1/m + (x_0 - \bar x)^2 / S)`, q
    Student's quantile with m - 2 degrees of freedom. Nothing is known where the slope is not significant."""
    m, u, v = len(x), x - x.mean(), y - y.mean()
    spread = float(u.square().sum())
    if m < 3 or not spread > 0:
        return Estimate.unknown()
    b = float((u * v).sum()) / spread
    s2 = float((v - b * u).square().sum()) / (m - 2)
    q2, away = student_quantile(m - 2, (1 + chance) / 2) ** 2, height - float(y.mean())
    square = b * b - q2 * s2 / spread
    if not square > 0:
        return Estimate.unknown()
    root = math.sqrt(max(q2 * s2 * ((1 + 1 / m) * square + away**2 / spread), 0.0))
    middle, value = float(x.mean()), away / b
    se = math.sqrt(s2 * (1 + 1 / m + value**2 / spread)) / abs(b)
    return Estimate(middle + value, se, middle + (b * away - root) / square, middle + (b * away + root) / square)


def median(samples: Tensor) -> Estimate:
    """Estimate the median of ``samples (n,)``; the interval of order statistics covers it with 95 % or more."""
    from scipy.stats import binom

    ordered, n = samples.double().sort().values, len(samples)
    k = int(binom.ppf(0.025, n, 0.5))  # P(fewer than k below the median) < .025
    low, high = (float(ordered[k - 1]), float(ordered[n - k])) if k > 0 else (-math.inf, math.inf)
    return Estimate(float(ordered.quantile(0.5)), (high - low) / (2 * Z95), low, high)


def exact_share(hits: int, n: int) -> Estimate:
    """Estimate a share with Clopper and Pearson's interval, which never covers less than it states."""
    from scipy.special import betaincinv

    low = float(betaincinv(hits, n - hits + 1, 0.025)) if hits else 0.0
    high = float(betaincinv(hits + 1, n - hits, 0.975)) if hits < n else 1.0
    return Estimate(hits / n, math.sqrt(hits * (n - hits) / n**3), low, high)


def fieller_ratio(a: Tensor, b: Tensor, least: float = 0.0) -> Estimate:
    """Estimate mean a / mean b of paired ``a, b (n,)`` with Fieller's interval, cut at ``least``. Where the mean of b
    cannot be distinguished from zero the interval has no upper end; where b underflows nothing is known."""
    size, other = float(b.abs().max()), float(a.abs().max())
    if not size > TINY or not other > 0:
        return Estimate.exact(0.0) if size > TINY else Estimate.unknown()
    a, b, n = a / other, b / size, len(a)
    ((aa, ab), (_, bb)), unit = torch.cov(torch.stack([a, b])).div(n).tolist(), other / size
    top, bottom, square = float(a.mean()), float(b.mean()), student_quantile(n - 1) ** 2
    value = top / bottom if bottom > 0 else INF
    p, q, r = bottom**2 - square * bb, top * bottom - square * ab, top**2 - square * aa
    root = math.sqrt(max(q * q - p * r, 0.0))
    if p > 0 and bottom > 0:
        low, high = (q - root) / p, (q + root) / p
        se = math.sqrt(max(aa - 2 * value * ab + value**2 * bb, 0.0)) / bottom
    else:
        ends = sorted(((q - root) / p, (q + root) / p)) if p < 0 else (0.0, 0.0)
        low, high, se = (ends[1] if ends[0] < 0 < ends[1] else least), INF, INF
    return Estimate(value * unit, se * unit, max(low * unit, least), high * unit)


def auc(a: Tensor, b: Tensor) -> Estimate[N]:
    """Estimate P(a < b), ties counting ½, from ``a (*levels, n)`` and ``b (*levels, m)`` (theory, §10.6). The error is
    DeLong's (1988), the interval Newcombe's (2006, method 5), which agrees with Mann and Whitney's test on whether .5
    is inside, and does not shrink to a point at AUC = 1."""
    n, m = a.shape[-1], b.shape[-1]

    def share_above(a: Tensor, b: Tensor) -> Tensor:
        """Return the share of ``b`` that is larger, for each of ``a``; ties count half."""
        b, a = b.sort(-1).values, a.contiguous()
        below = torch.searchsorted(b, a) + torch.searchsorted(b, a, right=True)
        return 1 - below.double() / (2 * b.shape[-1])

    def least(value: Tensor) -> Tensor:
        """Return the low end of the interval, by bisection on [0, value]."""
        inside, outside = value, torch.zeros_like(value)
        for _ in range(60):
            theta = (inside + outside) / 2
            spread = 1 + ((n + m) / 2 - 1) * ((1 - theta) / (2 - theta) + theta / (1 + theta))
            far = (value - theta).square() > Z95**2 * theta * (1 - theta) * spread / (n * m)
            inside, outside = torch.where(far, inside, theta), torch.where(far, theta, outside)
        return inside

    v, u = share_above(a, b), 1 - share_above(b, a)
    value, se = v.mean(-1), (v.var(-1) / n + u.var(-1) / m).sqrt()
    low, rest = least(torch.stack([value, 1 - value]))
    return _estimate(value, se, low, 1 - rest)


def auc_p(value: float, n: int, m: int) -> float:
    """Return the chance of an AUC as large as this if both samples have one law (Mann and Whitney, normal limit)."""
    return 0.5 * math.erfc((value - 0.5) / math.sqrt((n + m + 1) / (6 * n * m)))


def centred_ranks(a: Tensor) -> Tensor:
    """Return ranks along the last axis (ties share theirs), centred and of norm 1, in float32; NaN if all are equal."""
    from scipy.stats import rankdata

    ranks: Tensor = torch.from_numpy(rankdata(a.detach().cpu().numpy(), axis=-1)).to(a.device)
    centred = ranks - ranks.mean(-1, keepdim=True)
    unit: Tensor = centred / centred.norm(dim=-1, keepdim=True)
    return unit.float()


def spearman(a: Tensor, b: Tensor, fewest: int = 10) -> Estimate:
    """Estimate Spearman's correlation of ``a`` with ``b (n,)`` where b has not underflowed. The interval is Fisher's z
    with the variance (1 + ρ²/2)/(n - 3) of Bonett and Wright (2000)."""
    kept = b > TINY
    n = int(kept.sum())
    rho = float((centred_ranks(a[kept]).double() * centred_ranks(b[kept]).double()).sum()) if n >= fewest else math.nan
    if math.isnan(rho):
        return Estimate.unknown()
    most = 1 - 6 / (n**3 - n)  # half of what one exchange of neighbours would change: ρ = 1 is not certain
    middle, spread = math.atanh(max(-most, min(most, rho))), math.sqrt((1 + rho**2 / 2) / (n - 3))
    low, high = math.tanh(middle - Z95 * spread), math.tanh(middle + Z95 * spread)
    return Estimate(rho, (1 - math.tanh(middle) ** 2) * spread, low, high)


def matched_correlation(a: Tensor, b: Tensor) -> tuple[Estimate, Estimate]:
    r"""Estimate the mean correlation of matched rows, and its excess over mismatched ones.

    ``a, b (draws, n, d)`` hold :func:`centred_ranks` of n rows. With :math:`\rho_{ij}` the correlation of row i of a
    with row j of b, these are :math:`\mathrm{mean}\,\rho_{ii}` and :math:`\mathrm{mean}\,\rho_{ii} - \mathrm{mean}_{i
    \ne j}\,\rho_{ij}`, the latter with the error of Hájek's projection of this U-statistic."""
    known = ~(a.isnan().any(-1) | b.isnan().any(-1)).any(0)
    n = int(known.sum())
    if n < 3:
        return Estimate.unknown(), Estimate.unknown()
    rho = torch.einsum("kid,kjd->ij", a[:, known].double(), b[:, known].double()) / len(a)
    own = rho.diagonal()
    across, along = ((rho.sum(axis) - own) / (n - 1) for axis in (0, 1))
    return Estimate.of_mean(own), Estimate.of_mean(own - across - along + across.mean())


def fisher_exact(a: int, n: int, b: int, m: float) -> float:
    r"""Return the chance of ``a`` or more of ``n`` if these are as likely as ``b`` of ``m`` (Fisher, one-sided).

    P(A ≥ a) with A hypergeometric: n of n + m, a + b of which count. Ranks of alike points are a case of it, exact
    whatever their law: a or more of n lie beyond the k-th of m with b = k - 1. ``m`` need not be whole; with b > 0 it
    is rounded down, which makes the chance larger.
    """
    from scipy.stats import hypergeom

    if b == 0:
        return math.exp(sum(math.log((n - i) / (n + m - i)) for i in range(a)))
    m = math.floor(m)
    return float(hypergeom.sf(a - 1, n + m, a + min(b, m), n))


def holm(p: Tensor, level: float = 0.05) -> Tensor:
    """Return which hypotheses Holm's method rejects at a family-wise ``level``; NaN are no hypotheses."""
    ascending, order = p.flatten().double().sort()  # NaN come last, and are not rejected
    steps = (~p.isnan()).sum() - torch.arange(p.numel(), device=p.device)
    rejected = (ascending * steps <= level).long().cumprod(0).bool()
    return torch.empty_like(rejected).scatter(0, order, rejected).reshape(p.shape)


def sign_test(wins: int, n: int) -> float:
    """Return the chance of ``wins`` or more of ``n`` fair coins."""
    return sum(math.comb(n, k) for k in range(wins, n + 1)) / (1 << n)


def permutation_p(observed: float, permuted: Tensor, slack: float = 0.0) -> float:
    """Return the share of statistics as large as the observed one, itself included; ``slack`` allows for rounding."""
    return (1 + int((permuted >= observed - slack).sum())) / (1 + len(permuted))


@functools.cache
def student_quantile(dof: float, level: float = 0.975) -> float:
    """Return the quantile of Student's law at ``level``, above ½; infinite without degrees of freedom."""
    from scipy.special import stdtrit

    return math.inf if dof < 1 else float(stdtrit(dof, level))
