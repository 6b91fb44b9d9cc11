r"""What happens along t: noise fraction, effective number of points, error and entropy (docs/theory.md, §3.1).

At each level the same training points and the same noise are used, :math:`x = \alpha y_i + \sigma z`, so that curves
are smooth in t and a crossing can be found by bisection. Levels are uniform in :math:`\log(\sigma/\alpha)` up to ten
times the data's spread, where :math:`\rho < 1/(100 d)` (since mmse ≤ spread²/d), and one more is at T; around each
crossing that is asked for (the two ends of the window and the collapse) they are refined.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.estimate import Estimate
from vkernel.core.progress import Reporter
from vkernel.score.empirical import EmpiricalScore
from vkernel.score.noise import noise_fraction

__all__ = ["FLOOR", "Curves", "Level", "measure"]

FLOOR = 0.01  # the window is where the noise fraction exceeds this
LEVELS = 33
BISECTIONS = 4


@dataclass
class Level:
    """Means over the queries at one time, each with its standard error."""

    t: float
    sigma_over_alpha: float
    noise_fraction: Estimate
    ess: Estimate
    mmse: Estimate
    entropy: Estimate
    own_weight: Estimate


@dataclass
class Curves:
    """Levels in ascending t, and what was found between them."""

    levels: list[Level]
    collapse_time: float | None
    window: tuple[float, float] | None
    queries: int
    index: Tensor = field(repr=False)

    def column(self, name: str) -> list[float]:
        """One quantity along t."""
        return [float(getattr(level, name)) for level in self.levels]

    def errors(self, name: str) -> list[float]:
        """The standard errors of that quantity."""
        return [float(getattr(level, name).se) for level in self.levels]

    def noisy(self, count: int) -> list[tuple[float, float]]:
        """``count`` values (sigma/alpha, noise fraction) evenly spaced in log(sigma/alpha) where the target is noisy.

        That is the window; where there is none, where ρ is at least a quarter of its largest value.
        """
        log_ratio, rho = (torch.tensor(self.column(name)) for name in ("sigma_over_alpha", "noise_fraction"))
        log_ratio, t = log_ratio.log(), torch.tensor(self.column("t"))
        if self.window is not None:
            inside = (t >= self.window[0]) & (t <= self.window[1])
        else:
            inside = (rho > 0) & (rho >= rho.max() / 4)
        if not bool(inside.any()):
            return []
        at = torch.linspace(float(log_ratio[inside].min()), float(log_ratio[inside].max()), count)
        return [(math.exp(u), float(np.interp(u, log_ratio, rho))) for u in at.tolist()]


class _Probe:
    """Evaluates levels on shared points and noise, and remembers them."""

    def __init__(self, score: EmpiricalScore, queries: int, seed: int, step: Reporter) -> None:
        self.score, self.step, self.levels = score, step, dict[float, Level]()
        self.seed, self.queries, data = seed, queries, score.data
        source = rng.stream(seed, "profile/points")
        # Every point in turn where there are more queries than points, else a weighted draw.
        u = (
            torch.arange(queries, dtype=torch.float64) + torch.rand((), generator=source, dtype=torch.float64)
        ) / queries
        self.index = (
            torch.searchsorted(data.weights.cumsum(0).cpu(), u, right=True).clamp_max(data.n - 1).to(data.device)
        )
        noise = rng.stream(seed, "profile/noise")
        self.noise = rng.randn((queries, *data.shape), noise, data.device, data.dtype)

    def at(self, log_ratio: float) -> Level:
        """The level where sigma/alpha = exp(log_ratio)."""
        if log_ratio in self.levels:
            return self.levels[log_ratio]
        process, data = self.score.process, self.score.data
        ratio = torch.tensor(log_ratio, dtype=torch.float64).exp()
        low, high = process._ratios()
        t = float(process.time(ratio.clamp(low, high)))
        wide = torch.tensor(t, dtype=torch.float64)
        alpha, sigma = float(process.alpha(wide)), float(process.sigma(wide))
        x = alpha * data.images(self.index) + sigma * self.noise
        posterior = self.score.posterior(x, t)
        trace = posterior.cov.trace().double()
        rho = Estimate.of_mean(trace, scale=(alpha / sigma) ** 2 / data.d)
        mmse = Estimate.of_mean(trace, scale=1 / data.d)
        if data.d == 1:  # by quadrature
            rho = noise_fraction(self.score, process, t, self.queries, rng.stream(self.seed, "profile/line"))
            mmse = Estimate(*((sigma / alpha) ** 2 * float(getattr(rho, f)) for f in ("value", "se", "low", "high")))
        level = Level(
            t,
            sigma / alpha,
            rho,
            Estimate.of_mean(posterior.ess.double()),
            mmse,
            Estimate.of_mean(posterior.entropy.double()),
            Estimate.of_mean(posterior.weight(self.index).double()),
        )
        self.levels[log_ratio] = level
        self.step("noise levels")
        return level

    def crossing(self, name: str, threshold: float, below: float, above: float) -> float:
        """Bisect between two log ratios; then interpolate. Returns t."""
        rising = float(getattr(self.at(above), name)) > threshold
        for _ in range(BISECTIONS):
            middle = (below + above) / 2
            if (float(getattr(self.at(middle), name)) > threshold) == rising:
                above = middle
            else:
                below = middle
        a, b = (math.log(max(float(getattr(self.at(u), name)), 1e-300) / threshold) for u in (below, above))
        share = 0.5 if a == b else min(max(a / (a - b), 0.0), 1.0)
        low, high = self.score.process._ratios()
        ratio = min(max(math.exp(below + share * (above - below)), low), high)
        return float(self.score.process.time(torch.tensor(ratio, dtype=torch.float64)))


def work() -> int:
    """How many levels are measured at the most."""
    return LEVELS + 3 * BISECTIONS


def measure(score: EmpiricalScore, queries: int, seed: int, step: Reporter) -> Curves:
    """All levels, the collapse time and the window."""
    probe = _Probe(score, queries, seed, step)
    low, high = (math.log(max(r, 1e-12)) for r in score.process._ratios())
    reach = max(min(high, math.log(10 * score.data.spread)) if score.data.spread > 0 else high, low + 1e-6)
    grid = [low + (reach - low) * k / (LEVELS - 2) for k in range(LEVELS - 1)]
    grid.append(high if high > grid[-1] + 1e-6 else grid[-1] + 1e-6)
    rho = [float(probe.at(u).noise_fraction) for u in grid]
    own = [float(probe.at(u).own_weight) for u in grid]

    window = None
    inside = [k for k, r in enumerate(rho) if r > FLOOR]
    if inside:
        first, last = inside[0], inside[-1]
        start, end = score.process.eps, score.process.T
        if first > 0:
            start = probe.crossing("noise_fraction", FLOOR, grid[first - 1], grid[first])
        if last < LEVELS - 1:
            end = probe.crossing("noise_fraction", FLOOR, grid[last], grid[last + 1])
        window = (start, end)

    collapse: float | None = None
    kept = [k for k, w in enumerate(own) if w >= 0.5]
    if kept:
        last = kept[-1]
        collapse = score.process.T
        if last < LEVELS - 1:
            collapse = probe.crossing("own_weight", 0.5, grid[last], grid[last + 1])
    levels = [probe.levels[u] for u in sorted(probe.levels)]
    return Curves(levels, collapse, window, queries, probe.index)
