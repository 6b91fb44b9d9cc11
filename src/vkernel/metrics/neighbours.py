r"""Nearest training points, exactly, at the price of a product.

A product finds a short list of each query q, :math:`|y|^2 - 2 q \cdot y` being smallest there; differences then measure
it, since a product alone cannot tell a distance of 1e-9 from 0. The product is in float32, whose sums are wrong by

.. math:: \delta \le (d + 4)\, u\, (2 |q| R + R^2), \qquad R = |q| + D, \qquad u = 2^{-23},

for every point as near as the k-th of the list, at distance D (then :math:`|y| \le R`). Points off the list are not
among the k nearest if the last of the list is beyond :math:`D^2 - |q|^2 + \delta`; queries for which that is not so
are asked again in float64. Products are of what is relative to the centre of the data.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vkernel.data.empirical import Empirical
from vkernel.metrics.samples import CHUNK

__all__ = ["distinct", "nearest"]

SHORTLIST = 8  # candidates, of which up to k are wanted


def distinct(data: Empirical | Any) -> Empirical:
    """The data with equal points merged."""
    return (data if isinstance(data, Empirical) else Empirical(data)).merged()[0]


def nearest(x: Tensor, data: Empirical, k: int, exclude: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Distances of ``x (q, d)`` to the k nearest points and their indices, ``(q, k)``, or fewer if there are not k.

    ``exclude (q,)`` holds for each query a point that is not to be found, or -1: queries that are training points leave
    themselves out. Where nothing else is left the distance is infinite.
    """
    queries = x.to(data.device, torch.float64)
    barred = queries.new_full((len(x),), -1, dtype=torch.long) if exclude is None else exclude.to(data.device)
    quick = torch.float32 if torch.get_float32_matmul_precision() == "highest" else torch.float64
    distance, index, sure = _found(queries, data, k, barred, quick)
    again = (~sure).nonzero()[:, 0]
    if len(again):
        distance[again], index[again], _ = _found(queries[again], data, k, barred[again], torch.float64)
    return distance.to(x.device), index.to(x.device)


def _found(queries: Tensor, data: Empirical, k: int, barred: Tensor, kind: torch.dtype) -> tuple[Tensor, ...]:
    """Distances, indices, and whether the product was precise enough to be sure of them."""
    centred = queries - data.center
    last, listed = _shortlists(centred.to(kind), data, barred, max(k, SHORTLIST))
    found = []
    for part in torch.arange(len(queries), device=data.device).split(max(1, CHUNK // (listed.shape[1] * data.d))):
        index = listed[part]
        rows = data.take(index.flatten()).double().reshape(*index.shape, data.d)
        away = (rows - queries[part, None]).norm(dim=2).masked_fill(index == barred[part, None], torch.inf)
        exact, order = away.sort(dim=1, stable=True)
        found.append((exact[:, :k], index.gather(1, order)[:, :k]))
    distance, index = (torch.cat(columns) for columns in zip(*found, strict=True))
    size, reach = centred.norm(dim=1), distance[:, -1]
    kept, radius = torch.finfo(kind), size + reach
    slack = (data.d + 4) * (kept.eps * (2 * size * radius + radius.square()) + kept.tiny)
    safe = last.isfinite() & (4 * radius.square() < kept.max)  # no product has overflowed
    sure = safe & (last.double() > reach.square() - size.square() + slack)
    return distance, index, sure | (listed.shape[1] == data.n)  # or nothing is off the list


def _shortlists(queries: Tensor, data: Empirical, barred: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The last product and the indices of each query's short list, ``(q,)`` and ``(q, count)``, in their precision."""
    step = max(1, CHUNK // max(data.d, 512))
    parts = list(torch.arange(len(queries), device=data.device).split(max(1, CHUNK // step)))
    best = [queries.new_zeros(len(part), 0) for part in parts]
    index = [barred.new_zeros(len(part), 0) for part in parts]
    for start in range(0, data.n, step):
        rows = (data.rows(start, min(start + step, data.n)).double() - data.center).to(queries)
        lengths, places = rows.square().sum(1), torch.arange(start, start + len(rows), device=data.device)
        for i, part in enumerate(parts):
            square = torch.addmm(lengths, queries[part], rows.mT, alpha=-2)
            own = barred[part] - start
            inside = ((own >= 0) & (own < len(rows))).nonzero()[:, 0]
            square[inside, own[inside]] = torch.inf
            known = torch.cat([best[i], square], 1)
            best[i], order = known.topk(min(count, known.shape[1]), largest=False)
            index[i] = torch.cat([index[i], places.expand(len(part), -1)], 1).gather(1, order)
    return torch.cat([b[:, -1] for b in best]), torch.cat(index)
