r"""Masses and distances of laws, each an :class:`~vkernel.estimate.Estimate` with a 95 % interval.

A sample is ``(n, *shape)``, or ``(n,)`` for numbers; an ensemble, one sample for each of M members, is
``(M, n, *shape)``. The error is over *units*: the members of an ensemble, the points of a sample. Without ``members``,
three axes mean an ensemble of vectors and fewer mean a sample; functions that know the training set go by its shape.

*Masses* are linear in the law: the mean of the units' shares, with Student's interval for members and, for
:math:`n` points of which a share :math:`p` counts, Wilson's (the :math:`P` with :math:`(p-P)^2 \le z^2 P(1-P)/n`).

*Distances* are between average laws: members are pooled. With units :math:`g` of a (b likewise, the variances add),

.. math::

   \mathrm{TV} &= \tfrac12 \sum_k |p_k - q_k|, \qquad
   \mathcal E = 2E|X-Y| - E|X-X'| - E|Y-Y'|, \qquad
   W_p^p = \min_\pi E_\pi |X-Y|^p, \\
   \mathrm{se}^2 &= \frac{G-1}{G} \sum_g (\theta_{(g)} - \bar\theta)^2 \quad\text{(jackknife)}, \qquad
   \mathrm{se}^2(W_p^p) = \mathrm{Var}_g(\bar\varphi_g) / G.

:math:`\mathcal E` takes :math:`X, X'` from different units (two points of one member share its field), and hence is
unbiased. :math:`\varphi, \psi` are Kantorovich's potentials, :math:`\varphi(x) + \psi(y) \le |x-y|^p` with equality
where mass moves: the derivative of :math:`W_p^p` in the laws, so that nothing is resampled. TV and W of finite samples
are biased upwards, since noise is distance too: for equal laws TV is about :math:`\sqrt{B/\pi n}`, with n samples on
each side and B cells that hold mass. Errors do not contain this bias, and mean little where it is the whole distance.
All is computed in float64, on the device of the (first) sample.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vkernel import rng
from vkernel.data import Empirical
from vkernel.errors import InputError, require
from vkernel.estimate import Estimate, student_quantile
from vkernel.process import Anisotropic, Process
from vkernel.score import EmpiricalScore

__all__ = [
    "ModeWeights",
    "boundary_mass",
    "energy_distance",
    "gap_mass",
    "histogram",
    "kl",
    "memorised_fraction",
    "mode_weights",
    "total_variation",
    "wasserstein",
]

Members = bool | None | tuple[bool | None, bool | None]
Generator = torch.Generator | int | None
CHUNK = 1 << 21  # numbers in a working array: 16 MB
RESAMPLES = 200
MATCHED = 4000  # points that an exact matching may take: its time grows like their cube
SHORTLIST = 8  # candidates for the two nearest points, before distances are computed without cancellation


# --- what a sample is -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Law:
    """Points ``(M, n, d)`` in float64, M = 1 for one sample; the units are members if there are any, else points."""

    x: Tensor
    members: bool

    @property
    def points(self) -> Tensor:
        return self.x.flatten(0, 1)

    @property
    def units(self) -> int:
        return self.x.shape[0 if self.members else 1]

    def share(self, counts: Tensor, n: Any = None, scale: float = 1.0) -> Estimate:
        """``scale`` times the share of what each member counted ``(M, …)`` among its ``n`` points, default all."""
        n = self.x.shape[1] if n is None else n
        if self.members:
            return Estimate.of_mean(counts.double() / n, scale=scale)
        return _wilson(counts[0].double(), float(n), scale)

    def variance(self, influence: Tensor) -> tuple[float, int]:
        """Of the mean of ``influence``, one number for each point: from the spread of units, and their number."""
        per_unit = influence.reshape(self.units, -1).mean(1)
        return (float(per_unit.var()) / self.units if self.units > 1 else math.inf), self.units


def _law(x: Any, members: Any, skip: bool, name: str = "x", shape: tuple[int, ...] | None = None) -> _Law:
    """Refuse what is no sample (of events of ``shape``); drop what diverged if that was asked for."""
    try:
        x = torch.as_tensor(x).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name} must be a tensor or an array of numbers, not {type(x).__name__}.") from error
    require(x.dtype != torch.bool and not x.is_complex(), f"{name} must hold real numbers, not {x.dtype}.")
    require(members in (None, True, False), f"members must be True, False or None, not {members!r}.")
    given = f"{name} has shape {tuple(x.shape)}"
    require(
        members is not None or shape is not None or x.ndim <= 3,
        f"{given}, one sample or an ensemble: say members=False if its first axis counts samples, True if members.",
    )
    ensemble = bool(x.ndim == (3 if shape is None else len(shape) + 2) if members is None else members)
    kind = "an ensemble (M, n, *shape)" if ensemble else "one sample (n, *shape)"
    require(x.ndim > ensemble and x.numel() > 0, f"{given}, but {kind} with at least one point was expected.")
    event = tuple(x.shape[1 + ensemble :]) or (1,)
    require(shape in (None, event), f"{given}, read as {kind}; its last axes must be the training points' {shape}.")
    wide = x.double().reshape(*x.shape[: 1 + ensemble], -1)
    good = wide.isfinite().flatten(1).all(1)
    if not good.all():
        bad, unit = int((~good).sum()), "members" if ensemble else "samples"
        what = f"{bad} of the {len(good)} {unit} of {name} hold NaN or infinite values"
        require(skip, f"{what}: they diverged; skip_diverged=True leaves them out, with a warning.")
        require(bad < len(good), f"{what}: nothing is left to measure.")
        warnings.warn(f"{what} and are left out.", stacklevel=3)
        wide = wide[good]
    return _Law(wide if ensemble else wide[None], ensemble)


def _pair(a: Any, b: Any, members: Members, skip: bool) -> tuple[_Law, _Law]:
    """Two laws of one dimension on one device."""
    each = members if isinstance(members, tuple) else (members, members)
    require(len(each) == 2, f"members must be one answer for both samples or a pair of answers, not {members!r}.")
    first, second = _law(a, each[0], skip, "a"), _law(b, each[1], skip, "b")
    d, e = first.x.shape[-1], second.x.shape[-1]
    require(d == e, f"The points of a have {d} coordinates, those of b {e}; both must have the same.")
    return first, _Law(second.x.to(first.x.device), second.members)


def _wilson(hits: Tensor, n: float, scale: float = 1.0) -> Estimate:
    """``scale`` times a share with Wilson's interval, a float or a tensor."""
    z, p = student_quantile(10**9), hits / n
    middle, half = p + z * z / (2 * n), z * (p * (1 - p) / n + z * z / (4 * n * n)).sqrt()
    low = ((middle - half) / (1 + z * z / n)).masked_fill(hits == 0, 0.0)
    high = ((middle + half) / (1 + z * z / n)).masked_fill(hits == n, 1.0)
    fields = [scale * f for f in (p, (p * (1 - p) / n).sqrt(), low, high)]
    return Estimate(*(fields if p.ndim else map(float, fields)))


def _with_error(
    value: float, parts: Sequence[tuple[float, int]], low: float, high: float, slope: float = 1
) -> Estimate:
    """Independent variances, each from so many units, added; Student's interval (Welch) cut to [low, high].

    The variances are of a quantity of which the value is a function with this ``slope``.
    """
    total = sum(v for v, _ in parts)
    if not math.isfinite(total):
        return Estimate(value, math.inf, low, high)
    freedom = total**2 / s if (s := sum(v**2 / (units - 1) for v, units in parts)) > 0 else 1e9
    se = slope * math.sqrt(total)
    half = student_quantile(max(1, int(min(freedom, 1e9)))) * se
    return Estimate(value, se, max(low, value - half), min(high, value + half))


# --- masses ---------------------------------------------------------------------------------------------------------


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
    law, (low, high) = _law(x, members, skip_diverged), gap
    d = law.x.shape[-1]
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
    law, shape = _law(x, members, skip_diverged, shape=score.data.shape), score.data.shape
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
    points = _distinct(data)
    require(points.n >= 2, "A ratio of distances needs two distinct training points; these are all equal.")
    require(0 < threshold <= 1, f"threshold must be a ratio in (0, 1], not {threshold!r}.")
    law = _law(x, members, skip_diverged, shape=points.shape)
    distance, _ = _nearest(law.points, points, 2)
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
    points = _distinct(data)
    law = _law(x, members, skip_diverged, shape=points.shape)
    distance, index = _nearest(law.points, points, 1)
    far = distance[:, 0] > (math.inf if radius is None else radius)
    counts = _counts(law, torch.where(far, points.n, index[:, 0]), points.n + 1)
    weights = points.weights.to(counts.device)
    target = torch.cat([weights, weights.new_zeros(1)])
    value, part = _variation(law, counts, target, rng.as_generator(generator))
    return ModeWeights(
        law.share(counts[:, :-1]), weights, law.share(counts[:, -1]), _with_error(value, [part], 0.0, 1.0)
    )


def _distinct(data: Empirical | Any) -> Empirical:
    return (data if isinstance(data, Empirical) else Empirical(data)).merged()[0]


def _nearest(x: Tensor, data: Empirical, k: int) -> tuple[Tensor, Tensor]:
    """Distances to the k nearest points and their indices, ``(len(x), k)``.

    A product finds a short list, differences then measure it: a product alone cannot tell a distance of 1e-9 from 0.
    """
    step = max(1, CHUNK // max(data.d, 512))
    distances, indices = [], []
    for queries in (x.to(data.device) - data.center).split(max(1, CHUNK // max(step, SHORTLIST * data.d))):
        best = queries.new_full((len(queries), 0), torch.inf)
        index = torch.zeros(len(queries), 0, dtype=torch.long, device=data.device)
        for start in range(0, data.n, step):
            rows = data.rows(start, min(start + step, data.n)).double() - data.center
            square = rows.square().sum(1) - 2 * queries @ rows.mT
            places = torch.arange(start, start + len(rows), device=data.device).expand(len(queries), -1)
            known = torch.cat([best, square], 1)
            best, order = known.topk(min(SHORTLIST, known.shape[1]), largest=False)
            index = torch.cat([index, places], 1).gather(1, order)
        rows = data.take(index.flatten()).double().reshape(*index.shape, -1) - data.center
        exact, order = (rows - queries[:, None]).norm(dim=2).sort(dim=1, stable=True)
        distances.append(exact[:, :k])
        indices.append(index.gather(1, order)[:, :k])
    return torch.cat(distances).to(x.device), torch.cat(indices).to(x.device)


# --- laws on a grid -------------------------------------------------------------------------------------------------


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
    law = _law(x, members, skip_diverged)
    edges = _edges([law], bins, range)
    counts = _counts(law, _cells(law.points, edges), bins ** len(edges) + 1)[:, :-1]
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
    """½ Σ |p - q| on a grid as in :func:`histogram`, with one more cell for what is outside; not corrected for bias.

    The jackknife over members, or 200 resamples of a sample's counts drawn from ``generator``, gives the error.
    """
    laws = _pair(a, b, members, skip_diverged)
    edges, source = _edges(laws, bins, range), rng.as_generator(generator)
    counts = [_counts(law, _cells(law.points, edges), bins ** len(edges) + 1) for law in laws]
    p, q = (c.sum(0) / c.sum() for c in counts)
    value, first = _variation(laws[0], counts[0], q, source)
    return _with_error(value, [first, _variation(laws[1], counts[1], p, source)[1]], 0.0, 1.0)


def _edges(laws: Sequence[_Law], bins: int, span: Any) -> Tensor:
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


def _counts(law: _Law, cell: Tensor, cells: int) -> Tensor:
    """What each member counted in each cell, ``(M, cells)``."""
    m, n = law.x.shape[:2]
    member = torch.arange(m, device=cell.device).repeat_interleave(n)
    return torch.bincount(member * cells + cell, minlength=m * cells).reshape(m, cells).double()


def _variation(law: _Law, counts: Tensor, q: Tensor, source: torch.Generator) -> tuple[float, tuple[float, int]]:
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
    p, q = torch.as_tensor(p).detach().double(), torch.as_tensor(q).detach().double()
    require(p.shape == q.shape, f"p has shape {tuple(p.shape)}, q {tuple(q.shape)}; both must be on one grid.")
    for name, law in (("p", p), ("q", q)):
        good = law.isfinite().all() and (law >= 0).all() and law.sum() > 0
        require(good, f"{name} must hold finite probabilities, none negative and not all zero.")
    held = p > 0
    p, q = p[held] / p.sum(), q.to(p.device)[held] / q.sum()
    return Estimate.exact(max(0.0, float((p * (p.log() - q.log())).sum())))


# --- distances without a grid ---------------------------------------------------------------------------------------


def energy_distance(a: Any, b: Any, *, members: Members = None, skip_diverged: bool = False) -> Estimate:
    """2 E|X - Y| - E|X - X'| - E|Y - Y'| in any dimension: unbiased, hence negative at times; jackknife error.

    Needs three units of each. Where the laws are equal the jackknife is too wide rather than too narrow.
    """
    laws = _pair(a, b, members, skip_diverged)
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
    return _with_error(value, parts, -math.inf, math.inf)


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
    laws = _pair(a, b, members, skip_diverged)
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
    return _with_error(value, parts, 0.0, math.inf, slope=value ** (1 - p) / p if value > 0 else 0.0)


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
    from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]

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
