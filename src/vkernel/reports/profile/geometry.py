r"""The geometry of a training set: nearest neighbours, duplicates, intrinsic dimension (docs/theory.md, §3.2).

*Intrinsic dimension* by maximum likelihood (Levina and Bickel 2004), with the average over points taken of the
inverse (MacKay and Ghahramani 2005). With :math:`T_j` the distance to the j-th neighbour and :math:`H` the harmonic
numbers, :math:`E \log(T_K/T_j) = (H_{K-1} - H_{j-1})/k`, so that

.. math:: \hat k^{-1} = \frac{\sum_{j=J}^{K-1} \overline{\log(T_K / T_j)}}{\sum_{j=J}^{K-1} (H_{K-1} - H_{j-1})},

where :math:`J = \lceil K/2 \rceil` keeps a few near copies of a point, which are no dimension, out of it.

*Near duplicates* are pairs closer than chance would explain: were the points locally uniform in k dimensions, one of n
would have a neighbour within r with probability about :math:`n K (r/T_K)^k`. The threshold makes that 5 %, with the
median of :math:`T_K`, and is never above a fifth of the median neighbour distance which that implies.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.estimate import Estimate
from vkernel.core.progress import Reporter
from vkernel.data.empirical import Empirical
from vkernel.posterior import Engine, Queries
from vkernel.score.empirical import EmpiricalScore

__all__ = ["Geometry", "measure"]

FLOPS = 8e12  # of products, for all neighbours of all points; beyond it a sample of points is used
NEIGHBOURS = 12  # for the intrinsic dimension
SAMPLE = 1024


@dataclass
class Geometry:
    """Neighbours of the points ``index``: ``distance (m,)`` to, and ``neighbour (m,)`` the index of, the nearest."""

    index: Tensor
    distance: Tensor
    neighbour: Tensor
    intrinsic_dimension: Estimate | None
    threshold: float
    near: list[tuple[list[int], float]]


def count(n: int, d: int) -> int:
    """For how many points the nearest neighbour is found."""
    return n if 2.0 * n * n * d <= FLOPS else max(256, min(n, int(FLOPS / (8.0 * n * d))))


def measure(score: EmpiricalScore, seed: int, step: Reporter) -> Geometry:
    """Neighbour distances of all points (of a sample, where there are too many), dimension and near duplicates."""
    data, engine = score.data, _unweighted(score)
    n, d = data.n, data.d
    m = count(n, d)
    index = torch.arange(n) if m == n else _choice(n, m, seed)
    distances, neighbours = [], []
    for start in range(0, m, engine.block):
        part = index[start : start + engine.block].to(data.device)
        distance, neighbour = _nearest(engine, data, part, 1)
        distances.append(distance[:, 0].cpu())
        neighbours.append(neighbour[:, 0].cpu())
        step("neighbours", len(part) / m * 10)
    distance, neighbour = torch.cat(distances), torch.cat(neighbours)
    dimension, threshold = _dimension_and_threshold(engine, data, seed)
    return Geometry(index, distance, neighbour, dimension, threshold, _groups(index, distance, neighbour, threshold))


def _unweighted(score: EmpiricalScore) -> Engine:
    if not score.engine.weighted:
        return score.engine
    plain = copy.copy(score.data)
    plain.weights = torch.full_like(score.data.weights, 1 / score.data.n)
    return Engine(plain, score.engine.memory)


def _choice(n: int, m: int, seed: int) -> Tensor:
    return torch.randperm(n, generator=rng.stream(seed, "profile/neighbours"))[:m].sort().values


def _nearest(engine: Engine, data: Empirical, index: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Distances to the ``k`` nearest *other* points, ascending, and their indices."""
    x = data.take(index).double()
    one = torch.ones(len(x), dtype=torch.float64, device=x.device)
    logit, found = engine.nearest(Queries(x, one, one), k + 1)
    other = found != index[:, None]
    # the point itself is the nearest, at distance 0; should rounding hide it, drop the last instead
    other[:, -1] &= ~other.all(1)
    gap = (2 * (engine.points.log_w[0] - logit)).clamp_min(0.0).sqrt()
    return gap[other].reshape(-1, k), found[other].reshape(-1, k)


def _dimension_and_threshold(engine: Engine, data: Empirical, seed: int) -> tuple[Estimate | None, float]:
    k = min(NEIGHBOURS, data.n - 1)
    if k < 3:
        return None, 0.0
    index = _choice(data.n, min(SAMPLE, data.n), seed).to(data.device)
    gaps = torch.cat([_nearest(engine, data, part, k)[0] for part in index.split(engine.block)]).cpu()
    start = (k + 1) // 2
    harmonic = (1 / torch.arange(1, k, dtype=torch.float64)).cumsum(0)  # H_1 … H_{k-1}
    expected = float((harmonic[-1] - harmonic[start - 2 : k - 2]).sum())
    usable = gaps[gaps[:, start - 1] > 0]
    if not len(usable):
        return None, 0.0
    inverse = Estimate.of_mean((usable[:, -1:] / usable[:, start - 1 : -1]).log().sum(1) / expected)
    if not inverse.value > 1e-6:
        return None, 0.0
    low = 1 / inverse.low if inverse.low > 0 else math.inf
    dimension = Estimate(1 / inverse.value, inverse.se / inverse.value**2, 1 / inverse.high, low)
    typical = float(gaps[:, -1].quantile(0.5))
    power = 1 / max(float(dimension), 1.0)
    chance = (0.05 / (data.n * k)) ** power
    return dimension, typical * min(chance, 0.2 * (math.log(2) / k) ** power)


def _groups(index: Tensor, distance: Tensor, neighbour: Tensor, threshold: float) -> list[tuple[list[int], float]]:
    """Connected groups of near neighbours, the closest first, each with its smallest distance."""
    close = (distance < threshold).nonzero().squeeze(-1)
    root: dict[int, int] = {}

    def find(i: int) -> int:
        while root.setdefault(i, i) != i:
            root[i] = root[root[i]]
            i = root[i]
        return i

    best: dict[int, float] = {}
    edges = [(int(index[k]), int(neighbour[k]), float(distance[k])) for k in close]
    for i, j, _ in edges:
        root[find(i)] = find(j)
    members: dict[int, set[int]] = {}
    for i, j, gap in edges:
        key = find(i)
        members.setdefault(key, set()).update((i, j))
        best[key] = min(best.get(key, math.inf), gap)
    return sorted(((sorted(members[key]), best[key]) for key in members), key=lambda group: group[1])
