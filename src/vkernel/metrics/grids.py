"""Laws on a grid: histograms, total variation, Kullback and Leibler's divergence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.errors import InputError, require
from vkernel.core.estimate import Estimate
from vkernel.metrics.samples import Generator, Law, Members, read, read_two, with_error

__all__ = ["counted", "histogram", "kl", "total_variation", "variation"]

RESAMPLES = 200


def histogram(
    x: Any,
    bins: int = 120,
    range: Any = None,
    *,
    normalise: str = "inside",
    members: bool | None = None,
    skip_diverged: bool = False,
) -> tuple[Estimate, Tensor]:
    """The average density on a grid in one or two dimensions, ``(bins,)`` or ``(bins, bins)``, and the edges.

    ``range`` is ``(low, high)``, or a pair of these in the plane; the default covers all. Edges are ``(bins + 1,)`` or
    ``(2, bins + 1)``. ``normalise="inside"`` makes each member's density one of what is inside the range, ``"all"``
    leaves out what is outside without making up for it.
    """
    require(normalise in ("inside", "all"), f"normalise must be 'inside' or 'all', not {normalise!r}.")
    law = read(x, members, skip_diverged)
    edges = _edges([law], bins, range)
    counts = counted(law, _cells(law.points, edges), bins ** len(edges) + 1)[:, :-1]
    inside = counts.sum(1)
    empty = int((inside == 0).sum())
    require(normalise == "all" or empty == 0, f"{empty} members have nothing in the range; widen it, or take 'all'.")
    shaped = counts.reshape(len(counts), *(bins,) * len(edges))
    total = inside.reshape(-1, *(1,) * len(edges)) if normalise == "inside" else law.x.shape[1]
    density = law.share(shaped, total, 1 / float((edges[:, 1] - edges[:, 0]).prod()))
    return density, edges if len(edges) > 1 else edges[0]


def total_variation(
    a: Any,
    b: Any,
    bins: int = 120,
    range: Any = None,
    *,
    members: Members = None,
    skip_diverged: bool = False,
    generator: Generator = 0,
) -> Estimate:
    """Half the sum of absolute differences on a grid as in :func:`histogram`, with one more cell for what is outside.

    It is not corrected for bias (see the head of this package).

    The jackknife over members, or 200 resamples of a sample's counts drawn from ``generator``, gives the error.
    """
    laws = read_two(a, b, members, skip_diverged)
    edges, source = _edges(laws, bins, range), rng.as_generator(generator)
    counts = [counted(law, _cells(law.points, edges), bins ** len(edges) + 1) for law in laws]
    p, q = (c.sum(0) / c.sum() for c in counts)
    value, first = variation(laws[0], counts[0], q, source)
    return with_error(value, [first, variation(laws[1], counts[1], p, source)[1]], 0.0, 1.0)


def _edges(laws: Sequence[Law], bins: int, span: Any) -> Tensor:
    """The edges along each axis, ``(d, bins + 1)``."""
    d = laws[0].x.shape[-1]
    require(d <= 2, f"A grid has one or two dimensions, not {d}; energy_distance and wasserstein take any.")
    whole = isinstance(bins, int) and not isinstance(bins, bool) and bins >= 1
    require(whole, f"bins must be a whole number, 1 or more, not {bins!r}.")
    if span is None:
        low = torch.stack([law.points.amin(0) for law in laws]).amin(0)
        high = torch.stack([law.points.amax(0) for law in laws]).amax(0)
        pad = 0.5 * (low == high)  # all in one place: a cell needs a width
        ends = torch.stack([low - pad, high + pad], 1)
    else:
        ends = torch.as_tensor(span, dtype=torch.float64, device=laws[0].x.device)
        require(ends.shape in ((2,), (d, 2)), f"range must be (low, high), or one such pair per axis, not {span!r}.")
        ends = ends.expand(d, 2)
        require(bool((ends[:, 0] < ends[:, 1]).all() and ends.isfinite().all()), f"range {span!r} must increase.")
    return torch.stack([torch.linspace(float(u), float(v), bins + 1, dtype=ends.dtype) for u, v in ends]).to(ends)


def _cells(points: Tensor, edges: Tensor) -> Tensor:
    """The cell of each point, rows first; the number of cells where it is outside. Cells are closed on the left."""
    bins = edges.shape[1] - 1
    place = torch.searchsorted(edges, points.mT.contiguous(), right=True) - 1
    place = torch.where(points.mT == edges[:, -1:], bins - 1, place)
    inside = ((place >= 0) & (place < bins)).all(0)
    cell = place[0] if len(edges) == 1 else place[0] * bins + place[1]
    return torch.where(inside, cell, bins ** len(edges))


def counted(law: Law, cell: Tensor, cells: int) -> Tensor:
    """What each member counted in each cell, ``(M, cells)``."""
    m, n = law.x.shape[:2]
    member = torch.arange(m, device=cell.device).repeat_interleave(n)
    return torch.bincount(member * cells + cell, minlength=m * cells).reshape(m, cells).double()


def variation(law: Law, counts: Tensor, q: Tensor, source: torch.Generator) -> tuple[float, tuple[float, int]]:
    """½ Σ |p - q| with the pooled p, and its variance for a fixed q with the number of units."""
    total, units = counts.sum(0), law.units
    value = float((total / total.sum() - q).abs().sum()) / 2
    if units < 2:
        return value, (math.inf, units)
    if law.members:
        left = torch.stack([((total - c) / (total - c).sum() - q).abs().sum() / 2 for c in counts])
        return value, (float(left.var()) * (units - 1) ** 2 / units, units)
    seed = int(torch.randint(1 << 62, (), generator=source, device=source.device))
    draw, p, target = np.random.default_rng(seed), (total / total.sum()).cpu().numpy(), q.cpu().numpy()
    again = [np.abs(draw.multinomial(units, p) / units - target).sum() / 2 for _ in range(RESAMPLES)]
    return value, (float(np.var(again, ddof=1)), units)


def kl(p: Any, q: Any) -> Estimate:
    """Σ p log(p/q) in nats of two laws on one grid, normalised here; infinite where q vanishes and p does not."""
    try:
        p, q = torch.as_tensor(p).detach().double(), torch.as_tensor(q).detach().double()
    except (TypeError, ValueError, RuntimeError):
        names = f"{type(p).__name__} and {type(q).__name__}"
        raise InputError(f"p and q must be tensors or arrays of probabilities on one grid, not {names}.") from None
    require(p.shape == q.shape, f"p has shape {tuple(p.shape)}, q {tuple(q.shape)}; both must be on one grid.")
    for name, law in (("p", p), ("q", q)):
        good = law.isfinite().all() and (law >= 0).all() and law.sum() > 0
        require(good, f"{name} must hold finite probabilities, none negative and not all zero.")
    held = p > 0
    p, q = p[held] / p.sum(), q.to(p.device)[held] / q.sum()
    return Estimate.exact(max(0.0, float((p * (p.log() - q.log())).sum())))
