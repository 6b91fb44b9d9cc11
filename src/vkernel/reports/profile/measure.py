r"""Measurements of a profile: statistics along t, neighbours, isolated points, boundary pairs (docs/theory.md, §3).

*Levels* (§3.1). All noise levels use the same training points and the same noise, :math:`x = \alpha y_i + \sigma z`, so
that curves are smooth in t and crossings can be found by bisection. Levels are uniform in :math:`\log(\sigma/\alpha)`
up to ten times the spread of the data, where :math:`\rho < 1/(100 d)` (since mmse ≤ spread²/d), and one more is at T;
around the two ends of the noisy window and around the collapse time they are refined.

*Intrinsic dimension* (§3.2) by maximum likelihood, from the distances :math:`T_j` to the j-th neighbours and the
harmonic numbers H; :math:`J = \lceil K/2 \rceil` leaves out near copies of a point, which are not a dimension:

.. math:: \hat k^{-1} = \frac{\sum_{j=J}^{K-1} \overline{\log(T_K / T_j)}}{\sum_{j=J}^{K-1} (H_{K-1} - H_{j-1})} .

*Near duplicates* (§3.2) are pairs closer than chance explains: within r, with :math:`n K (r/T_K)^k` = 5 % for the
median of :math:`T_K`, and at most a fifth of the median neighbour distance which that implies.

*Isolated points* (§3.3) have the largest own collapse times :math:`t_i = \max\{t : E[r_i | x_0 = y_i] \ge \tfrac12\}`.

*Boundary pairs* (§3.3). The noise of the target is a sum over pairs; each term is an expectation around the midpoint:

.. math:: E\,\mathrm{tr}\,C = \frac{\alpha^2}{2\sigma^4} \sum_{ij} E[r_i r_j]\, |y_i - y_j|^2 , \qquad
          E[r_i r_j] = \sqrt{w_i w_j}\; e^{-\alpha^2 |y_i - y_j|^2 / 8\sigma^2}\;
          E_{x \sim N(\alpha (y_i + y_j)/2,\; \sigma^2)} \sqrt{r_i(x)\, r_j(x)} .
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.estimate import Estimate
from vkernel.core.progress import Reporter
from vkernel.data.empirical import Empirical
from vkernel.metrics import collapse_ratio, nearest
from vkernel.process import Process
from vkernel.score.empirical import EmpiricalScore, noise_fraction

FLOOR = 0.01  # the window is where the noise fraction exceeds this
LEVELS, REFINED = 33, 4  # noise levels, and bisections at each crossing
FLOPS = 8e12  # of products, for all neighbours of all points; beyond it a sample of points is used
BLOCK = 4096  # queries of a neighbour search at once
NEIGHBOURS, SAMPLE, FEWEST = 12, 1024, 48  # for the intrinsic dimension; of fewer points, neighbours are not near
SHORTLIST, HEAVIEST = 96, 32  # points whose own collapse time is computed: farthest from a neighbour, most often given
COST = 2.5e10  # queries × n × d per evaluation, for isolated points and pairs
BISECTIONS = 10  # of an own collapse time, to 1.5 %: finer than the error of its draws
ALL_PAIRS, CANDIDATES = 40, 96  # up to this many points all pairs are measured; beyond, this many pairs
PAIR_LEVELS = 8
WORK = LEVELS + 3 * REFINED + 10 + BISECTIONS + 2 + 2 * PAIR_LEVELS  # units of progress


@dataclass(frozen=True)
class Level:
    """Hold means over the queries at one noise level, each with its standard error."""

    t: float
    sigma_over_alpha: float
    noise_fraction: Estimate
    ess: Estimate
    mmse: Estimate
    entropy: Estimate
    own_weight: Estimate


class Levels:
    """Measure noise levels on shared points and noise; keep them by log(sigma/alpha), with window and collapse time."""

    def __init__(self, score: EmpiricalScore, queries: int, seed: int, step: Reporter) -> None:
        data, process, source = score.data, score.process, rng.stream(seed, "profile/points")
        self.score, self.queries, self.seed, self.step = score, queries, seed, step
        self.known: dict[float, Level] = {}
        shift = torch.rand((), generator=source, dtype=torch.float64)
        u = (torch.arange(queries, dtype=torch.float64) + shift) / queries  # every point, if there are enough
        index = torch.searchsorted(data.weights.cumsum(0).cpu(), u, right=True).clamp_max(data.n - 1)
        self.index = index.to(data.device)
        self.noise = rng.randn((queries, *data.shape), rng.stream(seed, "profile/noise"), data.device, data.dtype)

        low, high = (math.log(max(r, 1e-12)) for r in process.ratios)
        reach = max(min(high, math.log(10 * data.spread)) if data.spread > 0 else high, low + 1e-6)
        grid = [low + (reach - low) * k / (LEVELS - 2) for k in range(LEVELS - 1)]
        grid.append(high if high > grid[-1] + 1e-6 else grid[-1] + 1e-6)

        rho, own = attrgetter("noise_fraction.value"), attrgetter("own_weight.value")
        noisy = [k for k, u in enumerate(grid) if rho(self.at(u)) > FLOOR]
        chosen = [k for k, u in enumerate(grid) if own(self.at(u)) >= 0.5]
        self.window: tuple[float, float] | None = None
        if noisy:
            self.window = (self._crossing(grid, noisy[0] - 1, rho, FLOOR), self._crossing(grid, noisy[-1], rho, FLOOR))
        self.collapse_time = self._crossing(grid, chosen[-1], own, 0.5) if chosen else None
        self.ordered = [self.known[u] for u in sorted(self.known)]  # in ascending t

    def at(self, log_ratio: float) -> Level:
        """Return the level where sigma/alpha = exp(log_ratio)."""
        if log_ratio in self.known:
            return self.known[log_ratio]
        process, data = self.score.process, self.score.data
        t = _time(process, math.exp(log_ratio))
        alpha, sigma = float(process.alpha(t)), float(process.sigma(t))
        posterior = self.score.posterior(alpha * data[self.index] + sigma * self.noise, float(t))
        trace = posterior.cov.trace().double()
        rho, mmse = (Estimate[float].of_mean(trace, scale=s / data.d) for s in ((alpha / sigma) ** 2, 1.0))
        if data.d == 1:  # by quadrature
            exact = noise_fraction(self.score, process, float(t), self.queries, rng.stream(self.seed, "profile/line"))
            rho, mmse = (Estimate(*map(float, exact.scaled(s).fields)) for s in (1.0, (sigma / alpha) ** 2))
        means = (posterior.ess, posterior.entropy, posterior.weight(self.index))
        ess, entropy, own = (Estimate[float].of_mean(v.double()) for v in means)
        self.known[log_ratio] = Level(float(t), sigma / alpha, rho, ess, mmse, entropy, own)
        self.step("noise levels")
        return self.known[log_ratio]

    def _crossing(self, grid: list[float], k: int, value: Callable[[Level], float], threshold: float) -> float:
        """Return the t at which a quantity crosses a threshold after level k, by bisection and then interpolation."""
        if not 0 <= k < len(grid) - 1:
            return self.score.process.eps if k < 0 else self.score.process.T
        below, above = grid[k : k + 2]
        rising = value(self.at(above)) > threshold
        for _ in range(REFINED):
            middle = (below + above) / 2
            below, above = (below, middle) if (value(self.at(middle)) > threshold) == rising else (middle, above)
        a, b = (math.log(max(value(self.at(u)), 1e-300) / threshold) for u in (below, above))
        share = 0.5 if a == b else min(max(a / (a - b), 0.0), 1.0)
        return float(_time(self.score.process, math.exp(below + share * (above - below))))

    def noisy(self, count: int) -> list[tuple[float, float]]:
        """Return ``count`` values (sigma/alpha, ρ) over the window, or where there is none, where ρ ≥ max ρ / 4."""
        rows = [(level.t, math.log(level.sigma_over_alpha), level.noise_fraction.value) for level in self.ordered]
        t, log_ratio, rho = np.array(rows).T
        inside = (rho > 0) & (rho >= rho.max() / 4)
        if self.window is not None:
            inside = (t >= self.window[0]) & (t <= self.window[1])
        if not inside.any():
            return []
        places = np.linspace(log_ratio[inside].min(), log_ratio[inside].max(), count)
        return [(math.exp(u), float(np.interp(u, log_ratio, rho))) for u in places]


def _time(process: Process, ratio: float | Tensor) -> Tensor:
    return process.time(torch.as_tensor(ratio, dtype=torch.float64).clamp(*process.ratios))


@dataclass(frozen=True)
class NearDuplicates:
    """Hold a group of points that are closer to one another than chance explains, and its smallest distance."""

    indices: list[int]
    distance: float


@dataclass(frozen=True)
class Geometry:
    """Hold the nearest neighbours of the points ``index``: ``distance (m,)`` and ``neighbour (m,)``, an index."""

    index: Tensor
    distance: Tensor
    neighbour: Tensor
    intrinsic_dimension: Estimate | None
    near: list[NearDuplicates]

    @classmethod
    def measure(cls, score: EmpiricalScore, seed: int, step: Reporter) -> Geometry:
        """Find the neighbours of all points (of a sample, where there are too many), dimension and near duplicates."""
        data = score.data
        if data.n == 1:
            none = torch.zeros(0)
            return cls(none, none, none, None, [])
        index, found = _choice(data, neighbour_count(data.n, data.d), seed), []
        for part in index.split(BLOCK):
            found.append(_nearest_others(score, part))
            step("neighbours", len(part) / len(index) * 10)
        distance, neighbour = (torch.cat([f[k].cpu() for f in found]) for k in (0, 1))
        dimension, threshold = _dimension_and_threshold(data, seed)
        return cls(index.cpu(), distance, neighbour, dimension, _groups(index.cpu(), distance, neighbour, threshold))


def _nearest_others(score: EmpiricalScore, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distance to the nearest other point and its index, for the points ``index``, which are distinct. The
    bounds of the exact engine exclude most points, where it has any; products with all points do the rest."""
    data, pruned = score.data, score.engine.pruned
    distance, other = torch.full((len(index),), torch.nan, dtype=torch.float64, device=index.device), index.clone()
    if pruned is not None and pruned.ready(len(index)):
        square, near, found = pruned.nearest(data.take(index))
        second = (near[:, 0] == index).long()[:, None]  # the first is the point itself
        distance = square.gather(1, second)[:, 0].sqrt().where(found, distance)
        other = near.gather(1, second)[:, 0]
    rest = distance.isnan().nonzero()[:, 0]
    if len(rest):
        own = index[rest]
        distance[rest], other[rest] = (a[:, 0] for a in nearest(data.take(own), data, 1, exclude=own))
    return distance, other


def neighbour_count(n: int, d: int) -> int:
    """Return for how many points the nearest neighbour is found."""
    return n if 2.0 * n * n * d <= FLOPS else max(256, min(n, int(FLOPS / (8.0 * n * d))))


def _choice(data: Empirical, m: int, seed: int) -> Tensor:
    if m == data.n:
        return torch.arange(data.n, device=data.device)
    return torch.randperm(data.n, generator=rng.stream(seed, "profile/neighbours"))[:m].sort().values.to(data.device)


def _dimension_and_threshold(data: Empirical, seed: int) -> tuple[Estimate | None, float]:
    k = min(NEIGHBOURS, data.n - 1)
    if k < 3:
        return None, 0.0
    index = _choice(data, min(SAMPLE, data.n), seed)
    gaps = nearest(data.take(index), data, k, exclude=index)[0].cpu()
    start = (k + 1) // 2
    harmonic = (1 / torch.arange(1, k, dtype=torch.float64)).cumsum(0)  # H_1 … H_{k-1}
    expected = float((harmonic[-1] - harmonic[start - 2 : k - 2]).sum())
    usable = gaps[gaps[:, start - 1] > 0]
    logs = (usable[:, -1:] / usable[:, start - 1 : -1]).log().sum(1) / expected
    if not logs.mean() > 1e-6:  # or there are none
        return None, 0.0
    inverse = Estimate[float].of_mean(logs)
    high = 1 / inverse.low if inverse.low > 0 else math.inf
    dimension = Estimate(1 / inverse.value, inverse.se / inverse.value**2, 1 / inverse.high, high)
    power = 1 / max(dimension.value, 1.0)
    chance = (0.05 / (data.n * k)) ** power
    known = dimension if data.n >= FEWEST else None
    return known, float(gaps[:, -1].quantile(0.5)) * min(chance, 0.2 * (math.log(2) / k) ** power)


def _groups(index: Tensor, distance: Tensor, neighbour: Tensor, threshold: float) -> list[NearDuplicates]:
    """Return connected groups of near neighbours, the closest first."""
    groups: dict[int, tuple[set[int], float]] = {}  # by each of their members
    for k in (distance < threshold).nonzero()[:, 0].tolist():
        i, j = int(index[k]), int(neighbour[k])
        joined = [groups.get(v, ({v}, math.inf)) for v in (i, j)]
        members = joined[0][0] | joined[1][0]
        group = members, min(float(distance[k]), *(gap for _, gap in joined))
        groups.update(dict.fromkeys(members, group))
    unique = {min(members): (sorted(members), gap) for members, gap in groups.values()}
    return sorted((NearDuplicates(*group) for group in unique.values()), key=lambda g: g.distance)


@dataclass(frozen=True)
class IsolatedPoint:
    """Hold a point and its own collapse time t: up to t it holds half of the posterior of its noisy versions."""

    index: int
    t: float


@dataclass(frozen=True)
class BoundaryPair:
    """Hold a pair of points, its share of the target noise over the window with standard error, and its distance."""

    i: int
    j: int
    share: float
    share_se: float
    distance: float


def _draws(score: EmpiricalScore, items: int) -> int:
    """Return how many draws each of ``items`` points or pairs gets: an even number, at least 8."""
    return max(8, 2 * int(min(max(COST / (score.data.n * score.data.d), 768), 6144) / items / 2))


def isolated_points(score: EmpiricalScore, near: Geometry, top: int, seed: int, step: Reporter) -> list[IsolatedPoint]:
    """Return the points with the largest own collapse times, descending."""
    data, process = score.data, score.process
    if data.n == 1:
        return [IsolatedPoint(0, process.T)]
    far = near.index[near.distance.argsort(descending=True)[: max(SHORTLIST, top)]].to(data.device)
    weight, heaviest = data.weights.topk(min(HEAVIEST, data.n))
    heaviest = heaviest[(weight > data.weights.median()) & ~torch.isin(heaviest, far)]
    index = torch.cat([far, heaviest])
    count = _draws(score, len(index))  # of noise that all points share: quantiles in one dimension, or pairs ±z
    if data.d == 1:
        noise = rng.quasi_normals(count, 1, seed).reshape(count, 1, *data.shape).to(data.device, data.dtype)
    else:
        half = rng.randn((count // 2, 1, *data.shape), rng.stream(seed, "profile/isolated"), data.device, data.dtype)
        noise = torch.cat([half, -half])
    ratios = collapse_ratio(score, index, noise, bisections=BISECTIONS, step=lambda: step("isolated points"))
    known = [(i, ratio) for i, ratio in zip(index.tolist(), ratios, strict=True) if not ratio.isnan()]
    found = [IsolatedPoint(i, process.T if r >= process.ratios[1] else float(process.time(r))) for i, r in known]
    return sorted(found, key=lambda p: -p.t)[:top]


def boundary_pairs(score: EmpiricalScore, levels: Levels, top: int, seed: int, step: Reporter) -> list[BoundaryPair]:
    """Return the pairs with the largest share of the target noise, averaged over the levels where there is noise."""
    noisy, data = levels.noisy(PAIR_LEVELS), score.data
    if not noisy or data.n < 2:
        return []
    ratios, every = [ratio for ratio, _ in noisy], data.n <= ALL_PAIRS
    if every:
        i, j = torch.triu_indices(data.n, data.n, 1, device=data.device)
    else:
        i, j = _candidates(score, levels.index, ratios, seed, step)
    noise = pair_noise(score, i, j, ratios, seed, step)
    total = float(noise.mean(0).sum()) if every else sum(rho for _, rho in noisy) / len(noisy)
    if not total > 0:
        return []
    share = Estimate[Tensor].of_mean(noise / total)
    gap = (data.take(i) - data.take(j)).double().norm(dim=-1)
    columns = zip(*(v.tolist() for v in (i, j, share.value, share.se, gap)), strict=True)
    return sorted((BoundaryPair(*row) for row in columns if row[2] > 0), key=lambda pair: -pair.share)[:top]


def _candidates(score: EmpiricalScore, index: Tensor, ratios: list[float], seed: int, step: Reporter) -> list[Tensor]:
    """Return pairs that share the posterior of queries, those with the largest r_i r_j |y_i - y_j|² first."""
    data, process, source = score.data, score.process, rng.stream(seed, "profile/candidates")
    codes, masses = [], []  # a pair is the number i n + j
    for ratio in ratios:
        t = _time(process, ratio)
        rows = torch.randperm(len(index), generator=source)[:256].to(data.device)
        weight, top = score.posterior(process.perturb(data[index[rows]], t, generator=source), t).top(min(4, data.n))
        points = data.take(top.flatten()).reshape(*top.shape, data.d).double()
        a, b = torch.combinations(torch.arange(top.shape[1], device=data.device)).T
        gap = (points[:, a] - points[:, b]).square().sum(-1)
        masses.append((weight[:, a].double() * weight[:, b].double() * gap / ratio**2).flatten())
        codes.append((torch.minimum(top[:, a], top[:, b]) * data.n + torch.maximum(top[:, a], top[:, b])).flatten())
        step("boundary pairs")
    code, inverse = torch.cat(codes).unique(return_inverse=True)
    mass = torch.zeros(len(code), dtype=torch.float64, device=data.device).index_add_(0, inverse, torch.cat(masses))
    best = code[mass.argsort(descending=True)[:CANDIDATES]]
    return [best // data.n, best % data.n]


def pair_noise(score: EmpiricalScore, i: Tensor, j: Tensor, ratios: list[float], seed: int, step: Reporter) -> Tensor:
    """Return what each pair adds to the noise fraction, averaged over levels: ``(draws, pairs)`` independent values."""
    data, process, count, source = score.data, score.process, _draws(score, len(i)), rng.stream(seed, "profile/pairs")
    total = torch.zeros((count, len(i)), dtype=torch.float64)
    middle = (data[i].double() + data[j].double()) / 2
    square = (data.take(i).double() - data.take(j).double()).square().sum(-1)
    for ratio in ratios:
        t = _time(process, ratio)
        alpha, sigma = float(process.alpha(t)), float(process.sigma(t))
        z = rng.randn((count, len(i), *data.shape), source, data.device, data.dtype)
        posterior = score.posterior((alpha * middle + sigma * z).to(data.dtype), t)
        r_i, r_j = (posterior.weight(k.expand(count, -1)).double() for k in (i, j))
        snr = square / ratio**2
        scale = (data.weights[i] * data.weights[j]).sqrt() * (-snr / 8).exp() * snr / data.d
        total += (scale * (r_i * r_j).sqrt()).cpu() / len(ratios)
        step("boundary pairs")
    return total
