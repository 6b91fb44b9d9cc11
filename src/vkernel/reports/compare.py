r"""Compare predicted with measured: the covariance of learned scores, and the laws that follow (docs/theory.md, §5–7).

At places x and times t, with the scores :math:`\hat s_m` of M members and :math:`q_m = |\hat s_m - s_{avg}|^2`,

.. math:: \mathrm{tr\,Cov} = \frac{\sum_m q_m}{M-1} \quad\text{and without member } m \quad
          \mathrm{tr\,Cov}_{(m)} = \frac{\sum_k q_k - \frac{M}{M-1} q_m}{M-2} \quad\text{(jackknife)},

against :math:`\mathrm{tr}\,V.\mathrm{cov}`; so too between a time and the next. Places whose noised density
:math:`p(x|t)` is above 1e-3 of the greatest (all, if no ``score`` is given) are the *bulk*. There the ratio is pooled,

.. math:: R = \frac1T \sum_t \frac{\sum_x \text{measured}(x,t)}{\sum_x \text{predicted}(x,t)} ,

linear in :math:`q_m`, so that the same jackknife gives its error (places share members); V counts as exact.

A theory that is a score s predicts the mean alone. Its squared distance from the mean of M members is unbiased as

.. math:: |s_{avg} - s|^2 - \mathrm{tr\,Cov}\,s_{avg} , \qquad
          \text{relative error} = \frac1T \sum_t \frac{\sum_x \text{distance}(x,t)}{\sum_x |s(x,t)|^2} ,

and the sum is over the bulk. The laws are those of :mod:`vkernel.reports.compare_laws`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vkernel.core.errors import InputError, require
from vkernel.core.estimate import Estimate, jackknife_se
from vkernel.kernels import Kernel, Linear
from vkernel.reports.compare_laws import Columns, Theory, columns, compare_laws, draw_laws, range_of
from vkernel.reports.compare_text import attributes, summary, table
from vkernel.sample.scores import Groups, Scores, cumulants
from vkernel.score.base import Score, wide_time
from vkernel.score.empirical import EmpiricalScore

if TYPE_CHECKING:
    import xarray

BULK = 1e-3  # of the greatest density


def compare(
    scores: Scores | Sequence[Scores],
    theory: Theory | Sequence[Theory],
    x: Tensor,
    t: float | Sequence[float] | Tensor,
    *,
    score: EmpiricalScore | None = None,
    samples: int = 1000,
    fields: int | None = None,
    steps: int = 100,
    method: str = "exponential",
    spacing: str | None = "log",
    bins: int | None = None,
    range: Tensor | Sequence[float] | Sequence[Sequence[float]] | None = None,
    laws: bool | None = None,
    labels: Sequence[float | str] | None = None,
    by: str | None = None,
    seed: int = 0,
) -> xarray.Dataset:
    """Compare scores with a theory; return numbers with labels, units and errors.

    ``attrs["summary"]`` is a sentence, ``attrs["table"]`` a table; :func:`vkernel.plots.comparison` draws the result.

    Args:
        scores: an Ensemble or Checkpoints of three members or more (cumulants need five); a list, with one theory
            each, adds the dimension
            "condition".
        theory: a V-kernel, which predicts the covariance over members, or a score, which predicts their mean.
        x: places ``(N, *shape)``, the dimension "x".
        t: a time or several, the dimension "t".
        score: the exact score of the training set, whose density defines the bulk; without it all places count.
        samples, fields: starts for each member, and Gaussian fields (default: as many as members), for the laws.
        steps, method, spacing: as for samplers; the semiclassical chain is Euler's.
        bins, range: the grid of the laws (default: 120, or 40 a side, over nearly all samples of the members).
        laws: whether to compare laws (default: in one or two dimensions, for kernels with factors; others need a field
            for every start, which is slow, and have no semiclassical law).
        labels, by: the values of the conditions and the name of their quantity (default: F/P, for Linear kernels).
    """
    import xarray

    pairs = _pairs(scores, theory)
    x, times = _places(pairs[0][0], x, t)
    shape, process = tuple(x.shape[1:]), pairs[0][0].process
    d = math.prod(shape)
    if laws is None:
        laws = d <= 2 and all(len(s.finite) >= 4 for s, _ in pairs)
        laws &= all(isinstance(V, Score) or V.factors(x[:1], times[0]) is not None for _, V in pairs)
    require(not laws or d <= 2, f"Laws are compared on a grid, in one or two dimensions, not {d}; give laws=False.")
    require(fields is None or fields >= 2, f"Laws need at least two fields; got {fields}.")
    bulk = _bulk(score, x, times)
    found = [_moments(s, V, x, times, bulk) for s, V in pairs]
    coords = _coordinates(x.reshape(len(x), d), times)
    if laws:
        drawn = [draw_laws(s, V, samples, fields, seed, steps, method, spacing) for s, V in pairs]
        bins = (120 if d == 1 else 40) if bins is None else bins
        span = range_of(drawn, d) if range is None else torch.as_tensor(range, dtype=torch.float64).expand(d, 2)
        for one, sets in zip(found, drawn, strict=True):
            one |= compare_laws(sets, bins, span, seed)
        for name, (low, high) in zip(("bin", "bin2")[:d], span.tolist(), strict=True):
            coords[name] = low + (high - low) * (np.arange(bins) + 0.5) / bins
        coords["law"] = list(drawn[0])
    known = [name for name in found[0] if all(name in one for one in found)]
    several = isinstance(scores, list | tuple)
    if several:
        by, names = _labels([V for _, V in pairs], labels, by)
        coords["condition"] = ("condition", names, {"long_name": by})
    dims = {n: ("condition",) * several + found[0][n][0] for n in known}
    values = {n: [one[n][1] for one in found] for n in known}
    ds = xarray.Dataset({n: (dims[n], values[n] if several else values[n][0], attributes(n)) for n in known}, coords)
    ds.attrs = {"process": repr(process), "dimension": d, "bulk": "p(x|t)" if score else "all places"}
    ds.attrs |= {"samples": samples, "steps": steps, "method": method, "seed": seed} if laws else {}
    ds.attrs |= {"summary": summary(ds), "table": table(ds)}
    return ds


# --- arguments ------------------------------------------------------------------------------------------------------


def _pairs(scores: Scores | Sequence[Scores], theory: Theory | Sequence[Theory]) -> list[tuple[Scores, Theory]]:
    every = list(scores) if isinstance(scores, Sequence) else [scores]
    theories = list(theory) if isinstance(theory, Sequence) and not isinstance(theory, str) else [theory]
    same = len(every) == len(theories) >= 1
    require(same, f"Give one kernel for each ensemble; got {len(every)} ensembles and {len(theories)} kernels.")
    pairs = list(zip(every, theories, strict=True))
    for s, V in pairs:
        require(isinstance(s, Scores), f"compare needs an Ensemble or Checkpoints, or a list of them; got {s!r}.")
        good = isinstance(V, Kernel | Score)
        require(good, f"The theory must be a V-kernel such as vk.kernels.Linear(…), or a Score; got {V!r}.")
        why = "this kernel is white: its cov is the coefficient of δ(t-t'), which no ensemble of models has"
        require(isinstance(V, Score) or not V.white, f"compare needs the covariance of a learned score, but {why}.")
        require(V.process == s.process, f"The theory's process is {V.process!r}, the ensemble's {s.process!r}.")
        good = s.process == every[0].process and s.shape == every[0].shape
        require(good, "All ensembles must have the same process and the same event shape.")
        finite = len(s) - len(s.diverged)
        require(finite >= 3, f"A comparison needs at least three finite members; there are {finite}.")
    return pairs


def _places(scores: Scores, x: Tensor, t: float | Sequence[float] | Tensor) -> tuple[Tensor, list[float]]:
    x = torch.as_tensor(x, dtype=scores.dtype, device=scores.device)
    x = x[:, None] if x.ndim == 1 and scores.shape == (1,) else x
    good = x.ndim >= 1 and len(x) >= 1 and bool(x.isfinite().all()) and scores.shape in (None, tuple(x.shape[1:]))
    require(good, f"x must be finite and (N, *shape) with the event shape {scores.shape}; got {tuple(x.shape)}.")
    times = [float(u) for u in wide_time(t, scores.device).reshape(-1)]  # type: ignore[arg-type]
    require(0 < len(times) == len(set(times)), f"t must be a time or several different ones; got {t!r}.")
    scores.process.check(torch.tensor(times, dtype=torch.float64))
    return x, times


def _coordinates(x: Tensor, times: list[float]) -> dict[str, object]:
    """Label places by index, in one dimension by their coordinate; ``place`` holds all coordinates."""
    values, n = x.detach().cpu().double().numpy(), len(x)
    unit, line = {"units": "data unit"}, x.shape[1] == 1
    label = ("x", values[:, 0], unit) if line else ("x", list(range(n)))
    coords: dict[str, object] = {"x": label, "index": ("x", list(range(n))), "place": (("x", "axis"), values, unit)}
    coords["t"] = ("t", times, {"long_name": "noise level"})
    return coords | ({"t1": ("pair", times[:-1]), "t2": ("pair", times[1:])} if len(times) > 1 else {})


def _labels(
    theories: list[Theory], labels: Sequence[float | str] | None, by: str | None
) -> tuple[str, Sequence[float | str]]:
    linear = [V for V in theories if isinstance(V, Linear)]
    if labels is None and len(linear) == len(theories):
        return by or "F/P", [V.features / V.draws for V in linear]
    names = range(len(theories)) if labels is None else labels
    require(len(names) == len(theories), f"There are {len(names)} labels for {len(theories)} conditions.")
    return by or "condition", list(names)


def _bulk(score: EmpiricalScore | None, x: Tensor, times: list[float]) -> Tensor:
    if score is None:
        return torch.ones(len(times), len(x), dtype=torch.bool, device=x.device)
    require(isinstance(score, EmpiricalScore), f"score must be an EmpiricalScore, not {score!r}.")
    logp = torch.stack([score.posterior(x, u).logp.double() for u in times])
    return (logp > logp.amax(1, keepdim=True) + math.log(BULK)).to(x.device)


# --- moments --------------------------------------------------------------------------------------------------------


def _moments(scores: Scores, theory: Theory, x: Tensor, times: list[float], bulk: Tensor) -> Columns:
    """Return every quantity that is known place by place, and its summaries over the bulk."""
    scores, n, place = scores.finite, len(times), ("t", "x")
    s = torch.stack([scores(x, u).double().flatten(2) for u in times], 1)  # (M, t, x, axis)
    mean = _mean(theory)
    target = None if mean is None else torch.stack([mean(x, u).double().flatten(1) for u in times])
    value, without = _statistics(s, scores.groups, target), _left_out(s, scores.groups, target)
    se = jackknife_se(without)
    found = columns((*place, "axis"), mean_measured=s.mean(0), mean_measured_se=scores.groups.of_mean(s).sqrt())
    found |= columns(place, measured=value[:n], measured_se=se[:n], bulk=bulk) | columns((), members=len(s))
    if target is not None:
        found |= columns((*place, "axis"), mean_predicted=target)
        found |= columns(place, distance=value[-n:], distance_se=se[-n:])
        found |= _pooled("mean_error", value[-n:], without[:, -n:], target.square().sum(-1), bulk)
    if isinstance(theory, Kernel):
        predicted = torch.stack([theory.cov(x, u).trace().double() for u in times]).to(s.device)
        good = bool(predicted.isfinite().all()) and bool(((predicted * bulk).sum(1) > 0).all())
        require(good, "V predicts no variance in the bulk, or one that is not finite: there is nothing to compare.")
        ratio = value[:n] / predicted
        low, middle, high = ratio[bulk & ratio.isfinite()].quantile(s.new_tensor([0.05, 0.5, 0.95]))
        found |= columns(place, predicted=predicted, ratio=ratio, ratio_se=se[:n] / predicted)
        found |= columns((), ratio_median=middle, ratio_low=low, ratio_high=high)
        found |= columns((), valid=bool(theory.valid), why=str(theory.why))
        found |= _pooled("ratio", value[:n], without[:, :n], predicted, bulk)
        pooled, pooled_se = (float(found[name][1]) for name in ("ratio_pooled", "ratio_pooled_se"))  # type: ignore[arg-type]
        found |= columns((), relative_error=abs(pooled - 1), relative_error_se=pooled_se)
    if isinstance(theory, Kernel) and n > 1:
        cross = torch.stack([theory.cov(x, u, x, v).trace().double() for u, v in pairwise(times)])
        found |= columns(("pair", "x"), cross_measured=value[n:-n], cross_measured_se=se[n:-n], cross_predicted=cross)
    return found | _gaussianity(s, bulk)


def _mean(theory: Theory) -> Score | None:
    try:
        return theory if isinstance(theory, Score) else theory.mean
    except InputError:  # the kernel was made without a mean
        return None


def _statistics(s: Tensor, groups: Groups, target: Tensor | None) -> Tensor:
    """Return tr Cov at every t, between every t and the next, and the distance of the mean from ``target``, stacked."""
    f, away = groups.factors(s), s.mean(0) - (0 if target is None else target)
    distance = (away.square() - groups.of_mean(s)).sum(-1)
    return torch.cat([f.square().sum((0, -1)), (f[:, :-1] * f[:, 1:]).sum((0, -1)), distance])


def _left_out(s: Tensor, groups: Groups, target: Tensor | None) -> Tensor:
    """Return :func:`_statistics` without each unit, ``(units, …)``: in closed form where members are independent."""
    if groups.grouped:
        return torch.stack([_statistics(s[k], groups.keep(k), target) for k in groups.without()])
    m, c = len(s), s - s.mean(0)
    q = torch.cat([c.square().sum(-1), (c[:, :-1] * c[:, 1:]).sum(-1)], 1)
    cov = (q.sum(0) - m / (m - 1) * q) / (m - 2)
    away = s.mean(0) - c / (m - 1) - (0 if target is None else target)
    return torch.cat([cov, away.square().sum(-1) - cov[:, : s.shape[1]] / (m - 1)], 1)


def _pooled(name: str, value: Tensor, without: Tensor, scale: Tensor, bulk: Tensor) -> Columns:
    """Return Σ value / Σ scale over the bulk, at each time and averaged over times, with jackknife errors."""
    weights = bulk / (bulk * scale).sum(1, keepdim=True)
    by_time, left = ((v * weights).sum(-1) for v in (value, without))
    found = columns(("t",), **{f"{name}_by_time": by_time, f"{name}_by_time_se": jackknife_se(left)})
    return found | columns((), **{f"{name}_pooled": by_time.mean(), f"{name}_pooled_se": jackknife_se(left.mean(-1))})


def _gaussianity(s: Tensor, bulk: Tensor) -> Columns:
    unknown = Estimate(*[s[0, 0] * math.nan] * 4)  # fourth cumulants with errors need five members
    enough, times = len(s) >= 5, range(s.shape[1])
    each = [cumulants(s[:, k], components=1) for k in times] if enough else []
    found: Columns = {}
    for name, share in (("skewness", "skewed_share"), ("kurtosis", "kurtotic_share")):
        rows = [(c.skewness if name == "skewness" else c.kurtosis) for c in each] or [unknown for _ in times]
        value, se = torch.stack([e.value for e in rows]), torch.stack([e.se for e in rows])
        found |= columns(("t", "x", "axis"), **{name: value, f"{name}_se": se})
        found |= columns((), **{share: (value.abs() > 2 * se)[bulk].double().mean() if enough else math.nan})
    return found
