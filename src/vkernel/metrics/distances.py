"""Distances without a grid: energy distance, and Wasserstein's by quantiles, slices or an exact matching."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.errors import require
from vkernel.core.estimate import Estimate
from vkernel.metrics.samples import CHUNK, Generator, Members, read_two, with_error

__all__ = ["energy_distance", "wasserstein"]

MATCHED = 4000  # points that an exact matching may take: its time grows like their cube


def energy_distance(a: Any, b: Any, *, members: Members = None, skip_diverged: bool = False) -> Estimate:
    """2 E|X - Y| - E|X - X'| - E|Y - Y'| in any dimension: unbiased, hence negative at times; jackknife error.

    Needs three units of each. Where the laws are equal the jackknife is too wide rather than too narrow.
    """
    laws = read_two(a, b, members, skip_diverged)
    points = [law.points - laws[0].points.mean(0) for law in laws]  # centred: cdist's products should not cancel
    value, parts = 0.0, []
    for name, law, x, y in zip("ab", laws, points, points[::-1], strict=True):
        g, unit = law.units, "members" if law.members else "samples"
        require(g >= 3, f"energy_distance needs at least 3 {unit} of {name} for its error; got {g}.")
        blocks = x.reshape(g, -1, x.shape[1])
        own = torch.zeros(g) if len(x) == g else torch.stack([_distance_sums(u, u).sum() for u in blocks])
        cross = _distance_sums(x, y).reshape(g, -1).mean(1) / len(y)  # of each unit: its mean distance to the other law
        among = (_distance_sums(x, x).reshape(g, -1).sum(1) - own.to(x)) * (g / len(x)) ** 2  # … to other units, summed
        left = 2 * (cross.sum() - cross) / (g - 1) - (among.sum() - 2 * among) / ((g - 1) * (g - 2))
        value += float(cross.mean() - among.sum() / (g * (g - 1)))
        parts.append((float(left.var()) * (g - 1) ** 2 / g, g))
    return with_error(value, parts, -math.inf, math.inf)


def _distance_sums(x: Tensor, y: Tensor) -> Tensor:
    """For each x the sum of its distances to all y: by differences in few dimensions, by the faster product in many."""
    mode = f"{'donot_use' if x.shape[1] <= 16 else 'use'}_mm_for_euclid_dist"
    blocks = x.split(max(1, CHUNK // len(y)))
    return torch.cat([torch.cdist(block, y, compute_mode=mode).sum(1) for block in blocks])


def wasserstein(
    a: Any,
    b: Any,
    p: float = 1,
    kind: str = "auto",
    projections: int = 128,
    *,
    members: Members = None,
    skip_diverged: bool = False,
    generator: Generator = 0,
) -> Estimate:
    r"""The distance :math:`W_p` of average laws: of numbers by their quantiles, of vectors ``"sliced"`` or ``"exact"``.

    ``"sliced"`` is :math:`(E_u W_p^p(u\cdot X, u\cdot Y))^{1/p}` over ``projections`` directions u drawn from
    ``generator`` (by default the same each time); their spread is part of the error. ``"exact"`` matches points: up to
    4,000, as many of a as of b. ``"auto"`` is exact for numbers and sliced for vectors.
    """
    require(p >= 1 and math.isfinite(p), f"p must be a finite number, 1 or more, not {p!r}.")
    require(kind in ("auto", "sliced", "exact"), f"kind must be 'auto', 'sliced' or 'exact', not {kind!r}.")
    laws = read_two(a, b, members, skip_diverged)
    x, y = (law.points for law in laws)
    if kind == "exact" and x.shape[1] > 1:
        costs, phi, psi = _matching(x, y, p)
    else:
        directions = _directions(x.shape[1], projections, generator).to(x.device)
        blocks = directions.split(max(1, CHUNK // (len(x) + len(y))))
        lines = [_along_lines(u @ x.mT, u @ y.mT, p) for u in blocks]
        costs = torch.cat([c for c, _, _ in lines])
        phi, psi = (torch.stack([line[k] for line in lines]).sum(0) for k in (1, 2))
    k, cost = len(costs), float(costs.mean())
    value = cost ** (1 / p)
    parts = [
        laws[0].variance(phi / k),
        laws[1].variance(psi / k),
        (float(costs.var()) / k if k > 1 else 0.0, max(k, 2)),
    ]
    return with_error(value, parts, 0.0, math.inf, slope=value ** (1 - p) / p if value > 0 else 0.0)


def _directions(d: int, count: int, generator: Generator) -> Tensor:
    """Unit vectors ``(count, d)``; in one dimension all directions are one."""
    if d == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    require(isinstance(count, int) and count >= 2, f"projections must be a whole number, 2 or more, not {count!r}.")
    u = rng.randn((count, d), rng.as_generator(generator), torch.device("cpu"), torch.float64)
    return u / u.norm(dim=1, keepdim=True)


def _along_lines(x: Tensor, y: Tensor, p: float) -> tuple[Tensor, Tensor, Tensor]:
    """W_p^p on each of K lines, x ``(K, n)``, y ``(K, m)``; the potentials' sums over lines, ``(n,)``, ``(m,)``.

    The monotone coupling walks through pairs (i, j) of sorted points. A step changes i or j or both, and the potentials
    by as much as the cost; where both change, by the mean of the two orders in which they can.
    """
    (x, to_x), (y, to_y) = x.sort(1), y.sort(1)
    n, m = x.shape[1], y.shape[1]
    ticks = torch.cat([torch.arange(n, device=x.device) * m, torch.arange(m, device=x.device) * n]).unique()
    i, j = ticks // m, ticks // n
    mass = torch.cat([ticks, ticks.new_tensor([n * m])]).diff().double() / (n * m)
    here, over_i, over_j, both = (
        (x[:, r] - y[:, c]).abs() ** p for r, c in ((i, j), (i[1:], j[:-1]), (i[:-1], j[1:]), (i[1:], j[1:]))
    )
    before = here[:, :-1]
    sums = []
    for order, step, alone, other in ((to_x, i.diff() > 0, over_i, over_j), (to_y, j.diff() > 0, over_j, over_i)):
        climb = ((alone - before + both - other) / 2)[:, step].cumsum(1)
        sums.append(torch.zeros_like(order, dtype=x.dtype).scatter(1, order[:, 1:], climb).sum(0))
    return here @ mass, sums[0], sums[1]


def _matching(x: Tensor, y: Tensor, p: float) -> tuple[Tensor, Tensor, Tensor]:
    """W_p^p, ``(1,)``, of as many x as y by an optimal matching, and the potentials of both.

    With x_i matched to y_i, potentials are shortest paths: φ_i ≤ φ_k + c(i, k) - c(k, k), which has no negative cycle.
    """
    from scipy.optimize import linear_sum_assignment

    n, m = len(x), len(y)
    require(n == m, f"An exact matching needs as many points of a as of b, not {n} and {m}; kind='sliced' takes any.")
    require(n <= MATCHED, f"An exact matching of {n:,} points takes too long (limit {MATCHED:,}); take kind='sliced'.")
    cost = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist") ** p
    match = torch.from_numpy(linear_sum_assignment(cost.cpu().numpy())[1]).to(x.device)
    cost = cost[:, match]
    paid = cost.diagonal()
    phi, excess = torch.zeros_like(paid), cost - paid
    for _ in range(n):
        shorter = (phi + excess).amin(1)
        done = float((phi - shorter).max()) <= 1e-12 * float(cost.max())
        phi = shorter
        if done:
            break
    return paid.mean()[None], phi, torch.empty_like(phi).scatter(0, match, paid - phi)
