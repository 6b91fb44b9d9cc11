r"""Which points are copied, and between which points probability moves (docs/theory.md, §3.3).

*Isolated points.* Point i is recognised at noise level t if the posterior at :math:`x = \alpha y_i + \sigma z` holds it
with mean weight at least one half. Its own collapse time is

.. math:: t_i = \max\{t : E[r_i | x_0 = y_i] \ge \tfrac12\};

the largest of them belong to the points that a sampler is committed to earliest on its way down from T.

*Boundary pairs.* The noise of the target is a sum over pairs,

.. math:: E\,\mathrm{tr}\,C = \frac{\alpha^2}{2\sigma^4} \sum_{ij} E[r_i r_j]\, |y_i - y_j|^2 ,

and each term is an expectation over draws around the midpoint of the pair, where both matter. Since
:math:`\sqrt{N_i N_j}` is a Gaussian around it,

.. math:: E[r_i r_j] = \sqrt{w_i w_j}\; e^{-\alpha^2 |y_i - y_j|^2 / 8\sigma^2}\;
          E_{x \sim N(\alpha (y_i + y_j)/2,\; \sigma^2)} \sqrt{r_i(x)\, r_j(x)} :

a bounded integrand, so that pairs whose boundary is reached once in a million draws are measured as well as others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.estimate import Estimate
from vkernel.core.progress import Reporter
from vkernel.data.empirical import Empirical
from vkernel.process import Process
from vkernel.reports.profile.curves import Curves
from vkernel.reports.profile.geometry import Geometry
from vkernel.score.empirical import EmpiricalScore

__all__ = ["Isolated", "Pair", "boundary_pairs", "isolated_points"]

SHORTLIST = 96  # points whose own collapse time is computed: those farthest from their nearest neighbour
COST = 2.5e10  # queries × n × d per evaluation
BISECTIONS = 12
ALL_PAIRS = 40  # up to this many points every pair is weighed
CANDIDATES = 96
WINDOW_LEVELS = 8


@dataclass(frozen=True)
class Isolated:
    """A point and its own collapse time."""

    index: int
    t: float


@dataclass(frozen=True)
class Pair:
    """A pair of points, their distance, and their share of the target noise over the window."""

    i: int
    j: int
    distance: float
    share: Estimate


def isolated_points(score: EmpiricalScore, geometry: Geometry, top: int, seed: int, step: Reporter) -> list[Isolated]:
    """The points with the largest own collapse times, descending."""
    data, process = score.data, score.process
    order = geometry.distance.argsort(descending=True)[:SHORTLIST]
    index = geometry.index[order].to(data.device)
    y = data.images(index)
    z = _noise(draws(score, len(index)), data, seed)
    ends = [math.log(max(r, 1e-12)) for r in process._ratios()]

    def recognised(log_ratio: Tensor) -> Tensor:
        low, high = process._ratios()
        t = process.time(log_ratio.exp().clamp(low, high)).to(data.device)
        shape = (-1,) + (1,) * len(data.shape)
        alpha, sigma = process.alpha(t).reshape(shape), process.sigma(t).reshape(shape)
        x = (alpha * y + sigma * z).to(data.dtype)
        weight = score.posterior(x, t.expand(x.shape[:2])).weight(index.expand(x.shape[:2]))
        step("isolated points")
        return weight.double().mean(0).cpu() >= 0.5

    low, high = (torch.full((len(index),), end, dtype=torch.float64) for end in ends)
    always, never = recognised(high), ~recognised(low)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        yes = recognised(middle)
        low, high = torch.where(yes, middle, low), torch.where(yes, high, middle)
    t = process.time(((low + high) / 2).exp().clamp(*process._ratios()))
    t[always] = process.T
    found = [Isolated(int(i), float(u)) for i, u, no in zip(index, t, never, strict=True) if not no]
    return sorted(found, key=lambda p: -p.t)[:top]


def draws(score: EmpiricalScore, items: int) -> int:
    """How many draws each of ``items`` points or pairs gets: an even number, at least 8."""
    queries = min(max(COST / (score.data.n * score.data.d), 768), 6144)
    return max(8, 2 * int(queries / items / 2))


def _time(process: Process, ratio: float) -> Tensor:
    return process.time(torch.tensor(ratio, dtype=torch.float64).clamp(*process._ratios()))


def _noise(count: int, data: Empirical, seed: int) -> Tensor:
    """Noise shared by all points, ``(count, 1, *shape)``: ± pairs, and in one dimension the quantiles themselves."""
    if data.d == 1:
        z = torch.special.ndtri((torch.arange(count, dtype=torch.float64) + 0.5) / count)
        return z.reshape(count, 1, *data.shape).to(data.device, data.dtype)
    half = rng.randn((count // 2, 1, *data.shape), rng.stream(seed, "profile/isolated"), data.device, data.dtype)
    return torch.cat([half, -half])


def boundary_pairs(score: EmpiricalScore, curves: Curves, top: int, seed: int, step: Reporter) -> list[Pair]:
    """The pairs with the largest share of the target noise, averaged over the levels where there is noise."""
    noisy = curves.noisy(WINDOW_LEVELS)
    if not noisy or score.data.n < 2:
        return []
    levels = [ratio for ratio, _ in noisy]
    n = score.data.n
    if n <= ALL_PAIRS:
        i, j = torch.triu_indices(n, n, 1, device=score.data.device)
    else:
        i, j = _candidates(score, curves, levels, seed, step)
    noise = _pair_noise(score, i, j, levels, seed, step)
    total = sum(rho for _, rho in noisy) / len(noisy)
    if n <= ALL_PAIRS:  # all of the noise is in these pairs
        total = float(noise.mean(0).sum())
    if not total > 0:
        return []
    share = Estimate.of_mean(noise / total)
    order = share.value.argsort(descending=True)[:top]
    gap = (score.data.take(i) - score.data.take(j)).double().norm(dim=-1)
    return [
        Pair(
            int(i[k]),
            int(j[k]),
            float(gap[k]),
            Estimate(*(float(getattr(share, f)[k]) for f in ("value", "se", "low", "high"))),
        )
        for k in order
        if float(share.value[k]) > 0
    ]


def _candidates(
    score: EmpiricalScore, curves: Curves, levels: list[float], seed: int, step: Reporter
) -> tuple[Tensor, Tensor]:
    """Pairs that share the posterior of queries in the window, those with the largest r_i r_j |y_i - y_j|² first."""
    data, process = score.data, score.process
    mass: dict[tuple[int, int], float] = {}
    source = rng.stream(seed, "profile/candidates")
    for ratio in levels:
        t = _time(process, ratio)
        rows = torch.randperm(len(curves.index), generator=source)[:256].to(data.device)
        x = process.perturb(data.images(curves.index[rows]), t, generator=source)
        weight, index = score.posterior(x, t).top(min(4, data.n))
        points = data.take(index.flatten()).reshape(*index.shape, data.d).double()
        for a in range(index.shape[1]):
            for b in range(a):
                gap = (points[:, a] - points[:, b]).square().sum(-1)
                noise = weight[:, a].double() * weight[:, b].double() * gap / ratio**2
                first, second = torch.minimum(index[:, a], index[:, b]), torch.maximum(index[:, a], index[:, b])
                for i, j, m in zip(first.tolist(), second.tolist(), noise.tolist(), strict=True):
                    mass[i, j] = mass.get((i, j), 0.0) + m
        step("boundary pairs")
    best = sorted(mass, key=lambda pair: -mass[pair])[:CANDIDATES]
    i, j = torch.tensor(best, device=data.device).T
    return i, j


def _pair_noise(score: EmpiricalScore, i: Tensor, j: Tensor, levels: list[float], seed: int, step: Reporter) -> Tensor:
    """What each pair adds to the noise fraction, averaged over ``levels``: ``(draws, pairs)`` independent values."""
    data, process, count = score.data, score.process, draws(score, len(i))
    source = rng.stream(seed, "profile/pairs")
    total = torch.zeros((count, len(i)), dtype=torch.float64)
    middle = (data.images(i).double() + data.images(j).double()) / 2
    square = (data.take(i).double() - data.take(j).double()).square().sum(-1)
    for ratio in levels:
        t = _time(process, ratio)
        alpha, sigma = float(process.alpha(t)), float(process.sigma(t))
        z = rng.randn((count, len(i), *data.shape), source, data.device, data.dtype)
        posterior = score.posterior((alpha * middle + sigma * z).to(data.dtype), t)
        r_i, r_j = (posterior.weight(k.expand(count, -1)).double() for k in (i, j))
        snr_distance = square / ratio**2
        scale = (data.weights[i] * data.weights[j]).sqrt() * (-snr_distance / 8).exp() * snr_distance / data.d
        total += (scale * (r_i * r_j).sqrt()).cpu() / len(levels)
        step("boundary pairs")
    return total
