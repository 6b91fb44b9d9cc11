"""Laws on a grid (histograms, total variation, Kullback and Leibler's divergence) and shares of a law: in the gaps, on
boundaries, at training points, near copies of them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.checks import as_tensor, check_share, check_type, check_whole, takes
from vkernel.core.errors import InputError, require
from vkernel.core.estimate import Estimate, bootstrap, jackknife_se
from vkernel.core.rng import Generator
from vkernel.data import Empirical
from vkernel.metrics.samples import CHUNK, Array, Reading, Samples, distinct, nearest, read, read_pair
from vkernel.process import Anisotropic
from vkernel.score.empirical import EmpiricalScore

__all__ = ["ModeWeights", "boundary_mass", "collapse_ratio", "gap_mass", "histogram", "kl", "memorised_fraction"]
__all__ += ["mode_weights", "total_variation"]
Data = Empirical | Array
Range = tuple[float, float] | Sequence[tuple[float, float]] | Tensor | None


@takes(read_pair)
def histogram(
    x: Array, bins: int = 120, range: Range = None, *, normalise: str = "inside", **reading: Unpack[Reading]
) -> tuple[Estimate[Tensor], Tensor]:
    """Estimate the average density on a grid, ``(bins,)`` or ``(bins, bins)``, and return the edges too. ``range`` is
    ``(low, high)``, or a pair of these in the plane; the default covers all. Edges are ``(bins + 1,)`` or ``(2, bins +
    1)``. ``normalise="inside"`` divides each member's counts by those inside the range, ``"all"`` by all.

    >>> import torch, vkernel as vk
    >>> law, edges = vk.metrics.histogram(torch.randn(100, 1), bins=20, range=(-3.0, 3.0))
    >>> law.value.shape, edges.shape
    (torch.Size([20]), torch.Size([21]))
    """
    require(normalise in ("inside", "all"), f"normalise must be 'inside' or 'all', not {normalise!r}.")
    sample = read(x, **reading)
    edges = _edges([sample], bins, range)
    counts = _cell_counts(sample, edges)[:, :-1].reshape(-1, *(bins,) * len(edges))
    inside = counts.flatten(1).sum(1).reshape(-1, *(1,) * len(edges))
    empty = int((inside == 0).sum())
    require(normalise == "all" or empty == 0, f"{empty} members have nothing in the range; widen it, or take 'all'.")
    width = float((edges[:, 1] - edges[:, 0]).prod())
    density = sample.share(counts, inside if normalise == "inside" else None, 1 / width)
    return density, edges if len(edges) > 1 else edges[0]


@takes(read_pair)
def total_variation(
    a: Array, b: Array, bins: int = 120, range: Range = None, *, generator: Generator = 0, **reading: Unpack[Reading]
) -> Estimate:
    """Estimate half the sum of absolute differences on a grid as in :func:`histogram`, with one more cell for the rest.
    The error is the jackknife's over members, or of 200 resamples of a sample's counts by ``generator``.

    >>> import torch, vkernel as vk
    >>> a = torch.zeros(50, 1)
    >>> round(float(vk.metrics.total_variation(a, a + 0.5, bins=10, range=(-1.0, 1.0)).value), 3)
    1.0
    """
    pair = read_pair(a, b, **reading)
    edges, source = _edges(pair, bins, range), rng.as_generator(generator)
    counts = [_cell_counts(sample, edges) for sample in pair]
    p, q = (c.sum(0) / c.sum() for c in counts)
    value, first = _variation(pair[0], counts[0], q, source)
    return Estimate.of_variances(value, [first, _variation(pair[1], counts[1], p, source)[1]], 0.0, 1.0)


def _edges(samples: Sequence[Samples], bins: int, span: Range) -> Tensor:
    """Return the edges along each axis, ``(d, bins + 1)``."""
    d = samples[0].x.shape[-1]
    require(d <= 2, f"A grid has one or two dimensions, not {d}; energy_distance and wasserstein take any.")
    check_whole(bins, "bins")
    if span is None:
        low, high = torch.cat([sample.points for sample in samples]).aminmax(dim=0)
        pad = 0.5 * (low == high)  # all in one place: a cell needs a width
        ends = torch.stack([low - pad, high + pad], 1)
    else:
        ends = as_tensor(span, "range").to(samples[0].x.device, torch.float64)
        require(ends.shape in ((2,), (d, 2)), f"range must be (low, high), or one such pair per axis, not {span!r}.")
        ends = ends.expand(d, 2)
        require(bool((ends[:, 0] < ends[:, 1]).all() and ends.isfinite().all()), f"range {span!r} must increase.")
    return torch.stack([torch.linspace(float(u), float(v), bins + 1, dtype=ends.dtype) for u, v in ends]).to(ends)


def _cell_counts(sample: Samples, edges: Tensor) -> Tensor:
    """Return how many points of each member are in each cell, rows first, closed on the left; the last are outside."""
    points, bins = sample.points.mT, edges.shape[1] - 1
    place = torch.searchsorted(edges, points.contiguous(), right=True) - 1
    place = torch.where(points == edges[:, -1:], bins - 1, place)
    inside, cells = ((place >= 0) & (place < bins)).all(0), bins ** len(edges)
    cell = place[0] if len(edges) == 1 else place[0] * bins + place[1]
    return _counts(sample, torch.where(inside, cell, cells), cells + 1)


def _counts(sample: Samples, cell: Tensor, cells: int) -> Tensor:
    """Return how many points of each member are in each cell, ``(M, cells)``."""
    m, n = sample.x.shape[:2]
    member = torch.arange(m, device=cell.device).repeat_interleave(n)
    return torch.bincount(member * cells + cell, minlength=m * cells).reshape(m, cells).double()


def _variation(sample: Samples, counts: Tensor, q: Tensor, source: torch.Generator) -> tuple[float, tuple[float, int]]:
    """Return ½ Σ |p - q| with the pooled p, and its variance for a fixed q with the number of units."""

    def distance(counts: Tensor) -> Tensor:
        return (counts / counts.sum(-1, keepdim=True) - q.to(counts)).abs().sum(-1) / 2

    total, units = counts.sum(0), sample.units
    if units < 2:
        variance = math.inf
    elif sample.members:
        variance = float(jackknife_se(distance(total - counts))) ** 2
    else:
        variance = float(bootstrap(distance, total, generator=source).var())
    return float(distance(total)), (variance, units)


def kl(p: Array, q: Array) -> Estimate:
    """Compute Σ p log(p/q) in nats of two laws on one grid, normalised here; infinite where q alone vanishes.

    >>> import torch, vkernel as vk
    >>> p = torch.tensor([0.5, 0.5])
    >>> round(float(vk.metrics.kl(p, torch.tensor([0.25, 0.75]))), 4)
    0.1438
    """
    p, q = as_tensor(p, "p").double(), as_tensor(q, "q").double()
    require(p.shape == q.shape, f"p has shape {tuple(p.shape)}, q {tuple(q.shape)}; both must be on one grid.")
    for name, law in (("p", p), ("q", q)):
        good = law.isfinite().all() and (law >= 0).all() and law.sum() > 0
        require(good, f"{name} must hold finite probabilities, none negative and not all zero.")
    held = p > 0
    p, q = p[held] / p.sum(), q.to(p.device)[held] / q.sum()
    return Estimate.exact(max(0.0, float((p * (p.log() - q.log())).sum())))


@takes(read_pair)
def gap_mass(x: Array, gap: tuple[float, float] = (0.25, 0.75), **reading: Unpack[Reading]) -> Estimate:
    """Estimate P(low < ``|x|`` < high), the mass between training points on the line; see :func:`boundary_mass`.

    >>> import torch, vkernel as vk
    >>> x = torch.tensor([[-1.0], [0.5], [0.0], [1.0]])
    >>> vk.metrics.gap_mass(x).value
    0.25
    """
    sample = read(x, **reading)
    try:
        low, high = (float(g) for g in gap)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"gap must be (low, high), two numbers, not {type(gap).__name__}.") from None
    size = sample.points.abs()
    d = size.shape[1]
    require(d == 1, f"The gap {gap} is of numbers, but x has {d} coordinates; use boundary_mass.")
    require(0 <= low < high, f"gap must be (low, high) with 0 ≤ low < high, not {gap}.")
    return sample.share_of((size > low) & (size < high))


@takes(read_pair)
def boundary_mass(
    x: Array, score: EmpiricalScore, threshold: float = 0.5, t: float | None = None, **reading: Unpack[Reading]
) -> Estimate:
    r"""Estimate the mass where the training target is mostly noise at ``t`` (default: eps) and the score pushes apart.
    A point counts if tr C > tr S⁻¹/d, so that the score pushes apart, and tr C > threshold (tr C + \|s\|²), which alone
    also holds at training points (theory, §10.3). Between points at distance Δ the layer is about σ²/Δ wide: thin at
    eps, wider at a larger ``t``.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> score = vk.EmpiricalScore(data, process)
    >>> x = torch.tensor([[0.5], [1.0]])
    >>> float(vk.metrics.boundary_mass(process.alpha(0.05) * x, score, t=0.05).value)
    0.5
    """
    check_type(score, "score", EmpiricalScore)
    check_share(threshold, "threshold")
    data, process, sample = score.data, score.process, read(x, score.data.shape, **reading)
    t = process.eps if t is None else float(t)
    var = float(process.base.S(process.check(torch.tensor(t, dtype=torch.float64))))
    require(var > 0, f"There is no noise at t = {t:g} (S = 0), hence no boundary; choose a larger t.")
    floor = (process.inverse_trace / data.d if isinstance(process, Anisotropic) else 1.0) / var
    hits = []
    for block in sample.points.split(max(1, CHUNK // data.d)):
        s, c = score.with_covariance(block.reshape(-1, *data.shape), t)
        trace, drift = c.trace(), s.flatten(1).square().sum(1)
        hits.append((trace > floor) & (trace > threshold * (trace + drift)))
    return sample.share_of(torch.cat(hits))


@takes(read_pair)
def memorised_fraction(x: Array, data: Data, threshold: float = 1 / 3, **reading: Unpack[Reading]) -> Estimate:
    """Estimate the share of samples nearer to a distinct training point than ``threshold`` times the second nearest.

    >>> import torch, vkernel as vk
    >>> x = torch.tensor([[0.01], [0.5]])  # near a point, and between two
    >>> vk.metrics.memorised_fraction(x, vk.data.toy("triple")).value
    0.5
    """
    points = distinct(data)
    require(points.n >= 2, "A ratio of distances needs two distinct training points; these are all equal.")
    require(0 < threshold <= 1, f"threshold must be a ratio in (0, 1], not {threshold!r}.")
    sample = read(x, points.shape, **reading)
    distance, _ = nearest(sample.points, points, 2)
    return sample.share_of(distance[:, 0] < threshold * distance[:, 1])


def collapse_ratio(
    score: EmpiricalScore,
    index: Tensor,
    noise: Tensor,
    *,
    pooled: bool = False,
    bisections: int = 12,
    step: Callable[[], None] = lambda: None,
) -> Tensor:
    r"""Return the largest sigma/alpha at which the exact score has collapsed onto training points, NaN where at none.
    It has where the posterior at :math:`x = \alpha y_i + \sigma z` holds :math:`y_i` with mean weight ½ or more: the
    mean over draws z, ``noise (draws, k or 1, *shape)``, for each of the points ``index (k,)``, or over all if
    ``pooled``. The ratio is found by bisection of its logarithm; ``step()`` is called after each evaluation.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> score = vk.EmpiricalScore(data, process)
    >>> noise = torch.randn(64, 1, 1, generator=torch.Generator().manual_seed(0))
    >>> vk.metrics.collapse_ratio(score, torch.tensor([0, 1, 2]), noise).shape
    torch.Size([3])
    """
    data, process = score.data, score.process
    y, (low, high) = data[index], process.ratios

    def collapsed(log_ratio: Tensor) -> Tensor:
        t = process.time(log_ratio.exp().clamp(low, high)).to(data.device)
        alpha, sigma = (f(t).reshape(-1, *(1,) * len(data.shape)) for f in (process.alpha, process.sigma))
        x = (alpha * y + sigma * noise).to(data.dtype)
        weight = score.posterior(x, t.expand(x.shape[:2])).weight(index.expand(x.shape[:2])).double()
        step()
        return (weight.mean() if pooled else weight.mean(0)).cpu() >= 0.5

    count = () if pooled else (len(index),)
    below, above = (torch.full(count, math.log(max(end, 1e-12)), dtype=torch.float64) for end in (low, high))
    never, always = ~collapsed(below), collapsed(above)
    for _ in range(bisections):
        middle = (below + above) / 2
        yes = collapsed(middle)
        below, above = torch.where(yes, middle, below), torch.where(yes, above, middle)
    return ((below + above) / 2).exp().clamp(low, high).masked_fill(always, high).masked_fill(never, math.nan)


@dataclass(frozen=True)
class ModeWeights:
    """How a law divides among the distinct training points, in their order.

    >>> import torch, vkernel as vk
    >>> x = torch.tensor([[-1.0], [-0.9], [0.1], [1.0]])
    >>> vk.metrics.mode_weights(x, vk.data.toy("triple")).share.value
    tensor([0.5000, 0.2500, 0.2500], dtype=torch.float64)
    """

    share: Estimate[Tensor]  # (points,)
    weights: Tensor  # (points,)
    outside: Estimate  # beyond the radius of all
    distance: Estimate  # total variation between share and weights; what is outside counts as a point of weight zero


@takes(read_pair)
def mode_weights(
    x: Array, data: Data, radius: float | None = None, *, generator: Generator = 0, **reading: Unpack[Reading]
) -> ModeWeights:
    """Estimate the share of samples nearest to each distinct training point, and within ``radius`` if given.

    >>> import torch, vkernel as vk
    >>> x = torch.tensor([[-1.0], [-0.9], [0.1], [1.0]])
    >>> vk.metrics.mode_weights(x, vk.data.toy("triple"), radius=0.05).outside.value
    0.5
    """
    require(radius is None or radius > 0, f"radius must be a positive distance or None, not {radius!r}.")
    points = distinct(data)
    sample = read(x, points.shape, **reading)
    distance, index = nearest(sample.points, points, 1)
    outside = distance[:, 0] > (math.inf if radius is None else radius)
    counts = _counts(sample, torch.where(outside, points.n, index[:, 0]), points.n + 1)
    weights = points.weights.to(counts.device)
    value, part = _variation(sample, counts, torch.cat([weights, weights.new_zeros(1)]), rng.as_generator(generator))
    variation = Estimate.of_variances(value, [part], 0.0, 1.0)
    return ModeWeights(sample.share(counts[:, :-1]), weights, sample.share_of(outside), variation)
