"""Shares of a law: in the gaps, on boundaries, at training points, near copies of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.errors import InputError, require
from vkernel.core.estimate import Estimate
from vkernel.data.empirical import Empirical
from vkernel.metrics.grids import counted, variation
from vkernel.metrics.neighbours import distinct, nearest
from vkernel.metrics.samples import CHUNK, Generator, read, with_error
from vkernel.process import Anisotropic, Process
from vkernel.score.empirical import EmpiricalScore

__all__ = ["ModeWeights", "boundary_mass", "gap_mass", "memorised_fraction", "mode_weights"]


def gap_mass(
    x: Any,
    gap: tuple[float, float] = (0.25, 0.75),
    *,
    score: EmpiricalScore | None = None,
    threshold: float = 0.5,
    t: float | None = None,
    members: bool | None = None,
    skip_diverged: bool = False,
) -> Estimate:
    """The mass between training points: P(low < ``|x|`` < high) of numbers, :func:`boundary_mass` with a ``score``."""
    if score is not None:
        return boundary_mass(x, score, threshold, t, members=members, skip_diverged=skip_diverged)
    law = read(x, members, skip_diverged)
    d = law.x.shape[-1]
    try:
        low, high = (float(g) for g in gap)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"gap must be (low, high), two numbers, not {type(gap).__name__}.") from None
    require(d == 1, f"The gap {gap} is of numbers, but x has {d} coordinates; give score= to use its boundaries.")
    require(0 <= low < high, f"gap must be (low, high) with 0 ≤ low < high, not {gap}.")
    size = law.x[..., 0].abs()
    return law.share(((size > low) & (size < high)).sum(1))


def boundary_mass(
    x: Any,
    score: EmpiricalScore,
    threshold: float = 0.5,
    t: float | None = None,
    *,
    members: bool | None = None,
    skip_diverged: bool = False,
) -> Estimate:
    r"""The mass where the training target is mostly noise at ``t`` (default: the process's eps) and the score divides.

    A point counts if

    .. math:: \mathrm{tr}\,C > \tfrac1d \mathrm{tr}\,S^{-1} \qquad\text{and}\qquad
              \frac{\mathrm{tr}\,C}{\mathrm{tr}\,C + |s|^2} > \mathrm{threshold}.

    The second alone also holds at a training point, where C is tiny but :math:`|s|^2` is tinier. The first says that
    the score pushes apart: its Jacobian :math:`C - S^{-1}` has a positive eigenvalue only if tr C exceeds
    :math:`1/\sigma^2`, and certainly then if two points carry the posterior. At one of two equal points at any distance
    :math:`\sigma\sqrt u`, :math:`\sigma^2 \mathrm{tr}\,C = u e^{-u/2}/(1+e^{-u/2})^2 < 1`: copies do not count. (The
    effective number of points in the posterior would say less: duplicates mislead it.) Between points at distance
    :math:`\Delta` the layer is about :math:`\sigma^2/\Delta` wide: thin at eps, wider at a larger ``t``.
    """
    require(isinstance(score, EmpiricalScore), f"score must be an EmpiricalScore, not {type(score).__name__}.")
    require(0 < threshold < 1, f"threshold must be a share between 0 and 1, not {threshold!r}.")
    law, shape = read(x, members, skip_diverged, shape=score.data.shape), score.data.shape
    time = score.process.eps if t is None else t
    floor = _mean_precision(score.process, time, score.data.d)
    hits = []
    for block in law.points.split(max(1, CHUNK // score.data.d)):
        s, c = score.with_covariance(block.reshape(-1, *shape), time)
        trace, drift = c.trace(), s.flatten(1).square().sum(1)
        hits.append((trace > floor) & (trace > threshold * (trace + drift)))
    return law.share(torch.cat(hits).reshape(law.x.shape[:2]).sum(1))


def _mean_precision(process: Process, t: float, d: int) -> float:
    """tr S^-1 / d."""
    var = float(process.base.S(process.check(torch.tensor(float(t), dtype=torch.float64))))
    require(var > 0, f"There is no noise at t = {t:g} (S = 0), hence no boundary; choose a larger t.")
    return (process.inverse_trace / d if isinstance(process, Anisotropic) else 1.0) / var


def memorised_fraction(
    x: Any, data: Empirical | Any, threshold: float = 1 / 3, *, members: bool | None = None, skip_diverged: bool = False
) -> Estimate:
    """The share of samples that are nearer to one training point than ``threshold`` times the second nearest.

    Euclidean distances, and the usual 1/3 (Bonnaire et al. 2025); equal training points count as one, else a copy
    would hide behind a copy.
    """
    points = distinct(data)
    require(points.n >= 2, "A ratio of distances needs two distinct training points; these are all equal.")
    require(0 < threshold <= 1, f"threshold must be a ratio in (0, 1], not {threshold!r}.")
    law = read(x, members, skip_diverged, shape=points.shape)
    distance, _ = nearest(law.points, points, 2)
    return law.share((distance[:, 0] < threshold * distance[:, 1]).reshape(law.x.shape[:2]).sum(1))


@dataclass(frozen=True)
class ModeWeights:
    """How a law divides among the distinct training points, in their order (``share`` and ``weights``, ``(points,)``).

    ``outside`` is the share beyond the radius of all, ``distance`` the total variation between share and weights.
    """

    share: Estimate
    weights: Tensor
    outside: Estimate
    distance: Estimate


def mode_weights(
    x: Any,
    data: Empirical | Any,
    radius: float | None = None,
    *,
    members: bool | None = None,
    skip_diverged: bool = False,
    generator: Generator = 0,
) -> ModeWeights:
    """The share of samples nearest to each training point, and within ``radius`` if given, against the weights.

    Equal training points count as one. ``distance`` counts what is outside as a point of weight zero.
    """
    require(radius is None or radius > 0, f"radius must be a positive distance or None, not {radius!r}.")
    points = distinct(data)
    law = read(x, members, skip_diverged, shape=points.shape)
    distance, index = nearest(law.points, points, 1)
    far = distance[:, 0] > (math.inf if radius is None else radius)
    counts = counted(law, torch.where(far, points.n, index[:, 0]), points.n + 1)
    weights = points.weights.to(counts.device)
    target = torch.cat([weights, weights.new_zeros(1)])
    value, part = variation(law, counts, target, rng.as_generator(generator))
    return ModeWeights(
        law.share(counts[:, :-1]), weights, law.share(counts[:, -1]), with_error(value, [part], 0.0, 1.0)
    )
