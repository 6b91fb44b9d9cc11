r"""Nearest training points, exactly, at the price of a matrix product.

A product finds candidates for each query q, the points where :math:`|y|^2 - 2 q \cdot y` is smallest; differences then
measure their distances, since a product alone cannot tell a distance of 1e-9 from 0. The product is in float32, with

.. math:: \delta \le (d + 4)\, u\, (2 |q| R + R^2), \qquad R = |q| + D, \qquad u = 2^{-23},

the error of its sums for every point as near as the k-th candidate, at distance D (then :math:`|y| \le R`). No other
point is among the k nearest if the product of the last candidate is beyond :math:`D^2 - |q|^2 + \delta`; the product is
repeated in float64 for queries where it is not. Products are of coordinates relative to the centre of the data.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vkernel.data import Empirical
from vkernel.metrics.samples import CHUNK, Array

CANDIDATES = 8  # for each query, of which up to k are wanted


def distinct(data: Empirical | Array) -> Empirical:
    """Return the data with equal points merged."""
    return (data if isinstance(data, Empirical) else Empirical(data)).merged()[0]


def nearest(x: Tensor, data: Empirical, k: int, exclude: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return distances of ``x (q, d)`` to the k nearest points and their indices, ``(q, k)``, or fewer if n < k.

    ``exclude (q,)`` holds for each query the index of a point to leave out, or -1: for queries that are training points
    it is the point itself. Where no other point is left the distance is infinite.
    """
    queries = x.to(data.device, torch.float64)
    excluded = queries.new_full((len(x),), -1, dtype=torch.long) if exclude is None else exclude.to(data.device)
    quick = torch.float32 if torch.get_float32_matmul_precision() == "highest" else torch.float64
    distance, index, certain = _search(queries, data, k, excluded, quick)
    again = (~certain).nonzero()[:, 0]
    if len(again):
        distance[again], index[again], _ = _search(queries[again], data, k, excluded[again], torch.float64)
    return distance.to(x.device), index.to(x.device)


def _search(queries: Tensor, data: Empirical, k: int, excluded: Tensor, kind: torch.dtype) -> tuple[Tensor, ...]:
    """Return distances, indices, and whether the product was precise enough to be certain of them."""
    centred = queries - data.center
    last, candidates = _candidates(centred.to(kind), data, excluded, max(k, CANDIDATES))
    found = []
    for part in torch.arange(len(queries), device=data.device).split(max(1, CHUNK // (candidates.shape[1] * data.d))):
        index = candidates[part]
        rows = data.take(index.flatten()).double().reshape(*index.shape, data.d)
        away = (rows - queries[part, None]).norm(dim=2).masked_fill(index == excluded[part, None], torch.inf)
        exact, order = away.sort(dim=1, stable=True)
        found.append((exact[:, :k], index.gather(1, order)[:, :k]))
    distance, index = (torch.cat(columns) for columns in zip(*found, strict=True))
    size, reach = centred.norm(dim=1), distance[:, -1]
    limits, radius = torch.finfo(kind), size + reach
    slack = (data.d + 4) * (limits.eps * (2 * size * radius + radius.square()) + limits.tiny)
    safe = last.isfinite() & (4 * radius.square() < limits.max)  # no product has overflowed
    certain = safe & (last.double() > reach.square() - size.square() + slack)
    return distance, index, certain | (candidates.shape[1] == data.n)  # or every point is a candidate


def _candidates(queries: Tensor, data: Empirical, excluded: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest product and the indices of each query's candidates, ``(q,)`` and ``(q, count)``."""
    step = max(1, CHUNK // max(data.d, 512))
    parts = list(torch.arange(len(queries), device=data.device).split(max(1, CHUNK // step)))
    best = [queries.new_zeros(len(part), 0) for part in parts]
    index = [excluded.new_zeros(len(part), 0) for part in parts]
    for start in range(0, data.n, step):
        rows = (data.rows(start, min(start + step, data.n)).double() - data.center).to(queries)
        lengths, places = rows.square().sum(1), torch.arange(start, start + len(rows), device=data.device)
        for i, part in enumerate(parts):
            square = torch.addmm(lengths, queries[part], rows.mT, alpha=-2)
            own = excluded[part] - start
            inside = ((own >= 0) & (own < len(rows))).nonzero()[:, 0]
            square[inside, own[inside]] = torch.inf
            known = torch.cat([best[i], square], 1)
            best[i], order = known.topk(min(count, known.shape[1]), largest=False)
            index[i] = torch.cat([index[i], places.expand(len(part), -1)], 1).gather(1, order)
    return torch.cat([b[:, -1] for b in best]), torch.cat(index)
