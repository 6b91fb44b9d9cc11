r"""Compare predicted with measured: the covariance of learned scores, and the laws that follow (docs/theory.md, §5–7).

*Scores.* At places x and times t, with the scores :math:`\hat s_m` of M members and
:math:`q_m = |\hat s_m - s_{avg}|^2`,

.. math:: \mathrm{tr\,Cov} = \frac{\sum_m q_m}{M-1} \quad\text{and without member } m \quad
          \mathrm{tr\,Cov}_{(m)} = \frac{\sum_k q_k - \frac{M}{M-1} q_m}{M-2} \quad\text{(jackknife)},

against :math:`\mathrm{tr}\,V.\mathrm{cov}`; so too between a time and the next. Places whose noised density
:math:`p(x|t)` is above 1e-3 of the greatest (all, if no ``score`` is given) are the *bulk*. There the ratio is pooled,

.. math:: R = \frac1T \sum_t \frac{\sum_x \text{measured}(x,t)}{\sum_x \text{predicted}(x,t)} ,

linear in :math:`q_m`, so that the same jackknife gives its error (places share members). The error of V is added: its
independent estimates, pooled likewise, have a spread. Intervals are even in the logarithm, with Welch's degrees of
freedom. Theory agrees if R is at every time within 15 % of 1 or not beyond chance, p ≥ .01 divided by the number of
times: a theory that is true is rejected in 1 % of comparisons (2 % with 30 members). A theory that is a score s
predicts the mean alone. Its squared distance from the mean of M members is unbiased as

.. math:: |s_{avg} - s|^2 - \mathrm{tr\,Cov}\,s_{avg} , \qquad
          \text{relative error} = \frac1T \sum_t \frac{\sum_x \text{distance}(x,t)}{\sum_x |s(x,t)|^2} ,

and the sum is over the bulk.

*Laws* of :math:`x_\epsilon`, all from the same starts :math:`x_T`: that of the ensemble; of the Gaussian *field* with
the ensemble's mean score and V; of the *closure*, the Gaussian field with the ensemble's own covariance, which leaves
out only the cumulants beyond the second; and the *semiclassical* law, Gaussian around the path of the mean score. A
theory that is a score has the law of its own probability flow instead. Total variations are between average laws.
Finite ensembles of one law differ too: the *floor* is the mean total variation of random halves,
:math:`\times \sqrt{(1/M + 1/M')\,M/4}` for M members against M' fields.
"""

from __future__ import annotations

import contextlib
import functools
import math
import tomllib
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vkernel import metrics
from vkernel.core import rng
from vkernel.core.checks import as_tensor
from vkernel.core.covariance import Factored
from vkernel.core.errors import InputError, require
from vkernel.core.estimate import Estimate, jackknife_se, leave_one_out, ratio_test, relative_se, stacked
from vkernel.core.progress import Progress, Reporter, part, progress as show_progress
from vkernel.core.variance import Groups, kurtosis, skewness
from vkernel.kernels import Kernel, Linear, Measured
from vkernel.reports.html import aligned, read, render
from vkernel.sample import Options, pf_ode, semiclassical
from vkernel.sample.scores import Scores
from vkernel.sample.sde import Learned
from vkernel.score.base import Score, wide_time
from vkernel.score.empirical import EmpiricalScore

if TYPE_CHECKING:
    import xarray

BULK = 1e-3  # of the greatest density
AGREE, CHANCE = 0.15, 0.01  # ratios agree with 1 if they are so close, or if all differences have such a chance
SPLITS = 16  # random halves that the floor is a mean over
CHUNK = 1 << 22  # scores of members at once
Theory = Kernel | Score
Columns = dict[str, tuple[tuple[str, ...], object]]  # dimensions and values of variables


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
    progress: Progress = False,
) -> xarray.Dataset:
    """Compare scores with a theory; return numbers with labels, units and errors.

    ``attrs["summary"]`` is a sentence, ``attrs["table"]`` a table; :func:`vkernel.plots.comparison` draws the result.

    Args:
        scores: an Ensemble or Checkpoints of three members or more (cumulants need five); a list, with one theory
            each, adds the dimension "condition".
        theory: a V-kernel, which predicts the covariance over members, or a score, which predicts their mean.
        x, t: places ``(N, *shape)``, and a time or several: the dimensions "x" and "t".
        score: the exact score of the training set, whose density defines the bulk; without it all places count.
        samples, fields: starts for each member, and Gaussian fields (default: as many as members), for the laws.
        steps, method, spacing: as for samplers; the semiclassical chain is Euler's.
        bins, range: the grid of the laws (default: 120, or 40 a side, over nearly all samples of the members).
        laws: whether to compare laws (default: in one or two dimensions, for kernels with factors; others need a field
            for every start, which is slow, and have no semiclassical law).
        labels, by: the values of the conditions and the name of their quantity (default: F/P, for Linear kernels).

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> model = vk.models.Linear(vk.features.grid("gaussian", 4, process=process), target="x0")
    >>> ens = vk.train_ensemble(model, data, process, members=6, draws=32)
    >>> x = torch.linspace(-1, 1, 5)[:, None]
    >>> found = vk.compare(ens, vk.EmpiricalScore(data, process), x, 0.2)  # a score predicts the mean
    >>> dict(found.sizes)
    {'t': 1, 'x': 5, 'axis': 1, 'law': 2, 'bin': 120}
    """
    import xarray

    pairs = _pairs(scores, theory)
    x, times = _places(pairs[0][0], x, t)
    d, several = math.prod(x.shape[1:]), isinstance(scores, list | tuple)
    if laws is None:
        laws = d <= 2 and all(len(s.finite) >= 4 for s, _ in pairs)
        laws &= all(isinstance(V, Score) or V.factors(x[:1], times[0]) is not None for _, V in pairs)
    require(not laws or d <= 2, f"Laws are compared on a grid, in one or two dimensions, not {d}; give laws=False.")
    require(fields is None or fields >= 2, f"Laws need at least two fields; got {fields}.")
    require(score is None or isinstance(score, EmpiricalScore), f"score must be an EmpiricalScore, not {score!r}.")
    bulk = torch.ones(len(times), len(x), dtype=torch.bool, device=x.device)
    if score is not None:
        logp = torch.stack([score.posterior(x, u).logp.double() for u in times])
        bulk = (logp > logp.amax(1, keepdim=True) + math.log(BULK)).to(x.device)
    grid: Options = {"steps": steps, "spacing": spacing}
    found, drawn = list[Columns](), list[dict[str, Tensor]]()
    with show_progress(sum(1 + laws * (2 if isinstance(V, Score) else 4) for _, V in pairs), progress) as report:
        for s, V in pairs:
            found.append(_moments(s, V, x, times, bulk))
            report("scores")
            if laws:
                drawn.append(draw_laws(s, V, samples, fields or len(s), seed, method, grid, report))
    places, rows, unit = x.detach().reshape(len(x), d).cpu().double().numpy(), np.arange(len(x)), {"units": "data unit"}
    coords: dict[str, object] = {
        "x": ("x", places[:, 0], unit) if d == 1 else ("x", rows),
        "index": ("x", rows),
        "place": (("x", "axis"), places, unit),
        "t": ("t", times, {"long_name": "noise level"}),
        **({"t1": ("pair", times[:-1]), "t2": ("pair", times[1:])} if len(times) > 1 else {}),
    }
    if several:
        linear = [V.features / V.draws for _, V in pairs if isinstance(V, Linear)]
        known_by = "F/P" if labels is None and len(linear) == len(pairs) else "condition"
        names = linear if known_by == "F/P" else list(np.arange(len(pairs)) if labels is None else labels)
        require(len(names) == len(pairs), f"There are {len(names)} labels for {len(pairs)} conditions.")
        coords["condition"] = ("condition", names, {"long_name": by or known_by})
    if laws:
        bins = (120 if d == 1 else 40) if bins is None else bins
        span = _range(drawn, d) if range is None else torch.as_tensor(range, dtype=torch.float64).expand(d, 2)
        for one, sets in zip(found, drawn, strict=True):
            one |= _compare_laws(sets, bins, span, seed)
        for name, (low, high) in zip(("bin", "bin2")[:d], span.tolist(), strict=True):
            coords[name] = (name, low + (high - low) * (np.arange(bins) + 0.5) / bins)
        coords["law"] = ("law", list(drawn[0]))
    known = [name for name in found[0] if all(name in one for one in found)]
    dims = {n: ("condition",) * several + found[0][n][0] for n in known}
    values = {n: [one[n][1] for one in found] for n in known}
    ds = xarray.Dataset({n: (dims[n], values[n] if several else values[n][0], attributes(n)) for n in known}, coords)
    ds.attrs = {"process": repr(pairs[0][0].process), "dimension": d, "bulk": "p(x|t)" if score else "all places"}
    ds.attrs |= {"samples": samples, "steps": steps, "method": method, "seed": seed} if laws else {}
    ds.attrs |= {"summary": summary(ds), "table": table(ds)}
    return ds


def _pairs(scores: Scores | Sequence[Scores], theory: Theory | Sequence[Theory]) -> list[tuple[Scores, Theory]]:
    every = list(scores) if isinstance(scores, Sequence) else [scores]
    theories = list(theory) if isinstance(theory, Sequence) and not isinstance(theory, str) else [theory]
    same = len(every) == len(theories) >= 1
    require(same, f"Give one kernel for each ensemble; got {len(every)} ensembles and {len(theories)} kernels.")
    pairs = list(zip(every, theories, strict=True))
    for s, V in pairs:
        require(isinstance(s, Scores), f"compare needs an Ensemble or Checkpoints, or a list of them; got {s!r}.")
        require(not isinstance(V, Scores), "The theory is Scores; give their kernel, or their mean, scores.mean_score.")
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
    x = as_tensor(x, "x").to(scores.device, scores.dtype)
    x = x[:, None] if x.ndim == 1 and scores.shape == (1,) else x
    good = x.ndim >= 1 and len(x) >= 1 and bool(x.isfinite().all()) and scores.shape in (None, tuple(x.shape[1:]))
    require(good, f"x must be finite and (N, *shape) with the event shape {scores.shape}; got {tuple(x.shape)}.")
    times = [float(u) for u in wide_time(t, scores.device).reshape(-1)]  # type: ignore[arg-type]
    require(0 < len(times) == len(set(times)), f"t must be a time or several different ones; got {t!r}.")
    scores.process.check(torch.tensor(times, dtype=torch.float64))
    return x, times


def _columns(*dims: str, **values: object) -> Columns:
    """Return variables with these dimensions; tensors become arrays."""
    return {n: (dims, v.detach().cpu().numpy() if isinstance(v, Tensor) else v) for n, v in values.items()}


def _moments(scores: Scores, theory: Theory, x: Tensor, times: list[float], bulk: Tensor) -> Columns:
    """Return every quantity that is known place by place, and its summaries over the bulk."""
    scores, n, mean = scores.finite, len(times), None
    s = torch.stack([scores(x, u).double().flatten(2) for u in times], 1)  # (M, t, x, axis)
    with contextlib.suppress(InputError):  # a kernel may be made without a mean
        mean = theory if isinstance(theory, Score) else theory.mean
    target = torch.zeros_like(s[0]) if mean is None else torch.stack([mean(x, u).double().flatten(1) for u in times])
    value, without = _statistics(s, scores.groups, target), _left_out(s, scores.groups, target)
    se = jackknife_se(without)
    found = _columns("t", "x", "axis", mean_measured=s.mean(0), mean_measured_se=scores.groups.of_mean(s).sqrt())
    found |= _columns("t", "x", measured=value[:n], measured_se=se[:n], bulk=bulk) | _columns(members=len(s))
    if mean is not None:
        found |= _columns("t", "x", "axis", mean_predicted=target)
        found |= _columns("t", "x", distance=value[-n:], distance_se=se[-n:])
        found |= _pooled("mean_error", value[-n:], without[:, -n:], target.square().sum(-1), bulk)
    if isinstance(theory, Kernel):
        predicted = torch.stack([theory.cov(x, u).trace().double() for u in times]).to(s.device)
        good = bool(predicted.isfinite().all()) and bool(((predicted * bulk).sum(1) > 0).all())
        require(good, "V predicts no variance in the bulk, or one that is not finite: there is nothing to compare.")
        ratio = value[:n] / predicted
        low, middle, high = ratio[bulk & ratio.isfinite()].quantile(s.new_tensor([0.05, 0.5, 0.95]))
        units = [v for u in times if (v := theory.estimates(x, u)) is not None]
        known = torch.stack(units, 1).to(s) if units else predicted.expand(2, -1, -1)  # (U, t, x); all equal if exact
        ratio_se = ((se[:n] / predicted).square() + (ratio * relative_se(known)).square()).sqrt()
        found |= _columns("t", "x", predicted=predicted, predicted_se=predicted * relative_se(known))
        found |= _columns("t", "x", ratio=ratio, ratio_se=ratio_se)
        found |= _columns(ratio_median=middle, ratio_low=low, ratio_high=high)
        found |= _columns(valid=bool(theory.valid), why=str(theory.why))
        found |= _ratios(value[:n], without[:, :n], predicted, known, bulk)
        found["relative_error"] = (), abs(np.asarray(found["ratio_pooled"][1]) - 1)
        found["relative_error_se"] = found["ratio_pooled_se"]
    if isinstance(theory, Kernel) and n > 1:
        cross = torch.stack([theory.cov(x, u, x, v).trace().double() for u, v in pairwise(times)])
        found |= _columns("pair", "x", cross_measured=value[n:-n], cross_measured_se=se[n:-n], cross_predicted=cross)
    for name, share, statistic in (("skewness", "skewed_share", skewness), ("kurtosis", "kurtotic_share", kurtosis)):
        value = se = torch.full_like(s[0], math.nan)
        if len(s) >= 5:  # fourth cumulants with errors need five members
            value, se = statistic(s), jackknife_se(leave_one_out(statistic, s))
        found |= _columns("t", "x", "axis", **{name: value, f"{name}_se": se})
        found |= _columns(**{share: (value.abs() > 2 * se)[bulk].double().mean() if len(s) >= 5 else math.nan})
    return found


def _statistics(s: Tensor, groups: Groups, target: Tensor) -> Tensor:
    """Return tr Cov at every t, between every t and the next, and the distance of the mean from ``target``, stacked."""
    f, distance = groups.factors(s), ((s.mean(0) - target).square() - groups.of_mean(s)).sum(-1)
    return torch.cat([f.square().sum((0, -1)), (f[:, :-1] * f[:, 1:]).sum((0, -1)), distance])


def _left_out(s: Tensor, groups: Groups, target: Tensor) -> Tensor:
    """Return :func:`_statistics` without each unit, ``(units, …)``: in closed form where members are independent."""
    if groups.grouped:
        return torch.stack([_statistics(s[k], groups.keep(k), target) for k in groups.without()])
    m, c = len(s), s - s.mean(0)
    q = torch.cat([c.square().sum(-1), (c[:, :-1] * c[:, 1:]).sum(-1)], 1)
    cov = (q.sum(0) - m / (m - 1) * q) / (m - 2)
    return torch.cat([cov, (s.mean(0) - c / (m - 1) - target).square().sum(-1) - cov[:, : s.shape[1]] / (m - 1)], 1)


def _pooled(name: str, value: Tensor, without: Tensor, scale: Tensor, bulk: Tensor) -> Columns:
    """Return Σ value / Σ scale over the bulk, at each time and averaged over times, with jackknife errors."""
    weights = bulk / (bulk * scale).sum(1, keepdim=True)
    by_time, left = ((v * weights).sum(-1) for v in (value, without))
    found = _columns("t", **{f"{name}_by_time": by_time, f"{name}_by_time_se": jackknife_se(left)})
    return found | _columns(**{f"{name}_pooled": by_time.mean(), f"{name}_pooled_se": jackknife_se(left.mean(-1))})


def _ratios(value: Tensor, without: Tensor, predicted: Tensor, known: Tensor, bulk: Tensor) -> Columns:
    """Return measured over predicted at each time and averaged over times, with intervals, and whether it may be 1;
    ``known (U, t, x)`` are independent predictions."""
    by_time, left = ((v * bulk).sum(-1) / (predicted * bulk).sum(-1) for v in (value, without))  # (t,) and (units, t)
    parts = (known * bulk).sum(-1)
    with_each = by_time * parts / parts.mean(0)  # the ratio moves as much as its inverse, to first order
    pairs = [*zip(by_time, left.mT, with_each.mT, strict=True), (by_time.mean(), left.mean(-1), with_each.mean(-1))]
    tests = [ratio_test(*pair) for pair in pairs]
    agree = [abs(e.value - 1) <= AGREE or p >= CHANCE / len(by_time) for e, p in tests]
    found = _columns(agrees=all(agree[:-1]), agrees_pooled=agree[-1])
    for ending, v in zip(("", "_se", "_low", "_high"), stacked([e for e, _ in tests]).fields, strict=True):
        found |= _columns("t", **{f"ratio_by_time{ending}": v[:-1]}) | _columns(**{f"ratio_pooled{ending}": v[-1]})
    return found


def draw_laws(
    scores: Scores, theory: Theory, samples: int, count: int, seed: int, method: str, grid: Options, report: Reporter
) -> dict[str, Tensor]:
    """Draw samples ``(members, starts, *shape)`` of each law, with ``count`` fields; NaN where they diverge."""
    x_T, source, mean = scores.start(samples, seed), rng.stream(seed, "compare/fields"), scores.mean_score

    def flow(score: Score, start: Tensor) -> Tensor:
        blocks, ends = start.split(max(1, CHUNK // (count * len(scores))), 1), list[Tensor]()
        for block in blocks:
            how: Options = {**grid, "allow_nan": True, "progress": part(report, "laws", 1 / len(blocks))}
            ends.append(pf_ode(score, block.contiguous(), method=method, **how))
        return torch.cat(ends, 1)

    def quenched(V: Kernel) -> Tensor:
        """Sample the effective SDE; a V without factors needs a field for every start."""
        start = x_T[:, None] if V.factors(x_T[:1], scores.process.T) is None else x_T.expand(count, *x_T.shape)
        return flow(Learned(mean, V.draw(len(start), source)), start)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what diverges is counted in the result
        closure, members = Measured(scores), part(report, "members", 1.0)
        own = scores.sample(x_T=x_T, steps=grid["steps"], method=method, spacing=grid["spacing"], progress=members)
    if isinstance(theory, Score):
        return {"ensemble": own, "theory": flow(theory, x_T[None])}
    close = quenched(closure)
    field = close if isinstance(theory, Measured) and theory.scores is closure.scores else quenched(theory)
    around = torch.full((count, *x_T.shape), torch.nan)
    if theory.factors(x_T[:1], scores.process.T) is not None:  # without factors it would cost steps² covariances
        with contextlib.suppress(InputError):  # a path diverged
            how: Options = {**grid, "progress": part(report, "laws", 1.0)}
            middle, cov = semiclassical(theory, x_T.double(), mean=mean, **how)
            assert isinstance(cov, Factored)
            z = rng.randn((count, *cov.factors.shape[:2]), source, middle.device, torch.float64)
            around = middle + torch.einsum("mfn,fn...->mn...", z, cov.factors)
    return {"ensemble": own, "field": field, "closure": close, "semiclassical": around}


def _finite(x: Tensor) -> Tensor:
    """Return the members whose samples are all finite."""
    return x[x.flatten(1).isfinite().all(1)]


def _range(drawn: list[dict[str, Tensor]], d: int) -> Tensor:
    """Return the range of a grid that holds nearly all samples of the ensembles, ``(d, 2)``."""
    points = torch.cat([_finite(sets["ensemble"]).double().reshape(-1, d) for sets in drawn])
    require(len(points) > 0, "Every member diverged while sampling: take more steps, or log spacing.")
    points = points[:: max(1, len(points) // 1_000_000)].cpu()
    low, high = points.quantile(torch.tensor([0.001, 0.999], dtype=torch.float64), 0)
    pad = 0.08 * (high - low).clamp_min(1e-6)
    return torch.stack([low - pad, high + pad], 1)


def _compare_laws(drawn: Mapping[str, Tensor], bins: int, span: Tensor, seed: int) -> Columns:
    """Return densities, total variations with their floors, and how many members of each law diverged."""
    kept = {name: _finite(x) for name, x in drawn.items()}
    own, found, densities = kept["ensemble"], Columns(), []
    require(len(own) >= 4, f"{len(drawn['ensemble']) - len(own)} members diverged while sampling: take more steps.")
    for name, law in kept.items():
        found |= _columns(**{f"lost_{name}": len(drawn[name]) - len(law)})
        density = torch.full((bins,) * len(span), torch.nan, dtype=torch.float64)
        tv, floor, enough = Estimate[float].unknown(), math.nan, len(law) >= (1 if name == "theory" else 2)
        if enough:
            density = torch.as_tensor(metrics.histogram(law, bins, span, normalise="all", members=True)[0].value)
        densities.append(density.cpu())
        if name == "ensemble":
            continue
        if enough:
            tv = metrics.total_variation(own, law, bins, span, members=True)
            floor = _floor(own, law, bins, span, rng.stream(seed, "compare/floor"))
        rows = {"": tv.value, "_low": tv.low, "_high": tv.high, "_floor": floor}
        found |= _columns(**{f"tv_{name}{ending}": value for ending, value in rows.items()})
    found["tv_floor"] = found[f"tv_{'theory' if 'theory' in kept else 'closure'}_floor"]
    return found | _columns(*("law", "bin", "bin2")[: 1 + len(span)], density=torch.stack(densities))


def _floor(own: Tensor, law: Tensor, bins: int, span: Tensor, source: torch.Generator) -> float:
    """Return the total variation if ``law`` is the ensemble's own: of halves, or with one member for each start."""
    (m, n), total = own.shape[:2], 0.0
    for _ in range(SPLITS):
        if law.shape[1] > 1 or n == 1:
            one, two = (own[half] for half in torch.randperm(m, generator=source).tensor_split(2))
            scale = math.sqrt((1 / m + 1 / len(law)) * m / 4)
        else:
            one, two, scale = own, own[torch.randint(m, (n,), generator=source), torch.arange(n)][:, None], 1.0
        total += scale * float(metrics.total_variation(one, two, bins, span, members=True)) / SPLITS
    return total


@functools.cache
def attributes(name: str) -> dict[str, str]:
    """Return the long name and the units of a variable; all words of a comparison stand in ``templates/compare*``."""
    texts = tomllib.loads(read("compare.toml"))
    stem, _, ending = (name, "", "") if name in texts["variables"] else name.rpartition("_")
    long, units = texts["variables"][stem]
    return {"long_name": f"{long}: {texts['endings'][ending]}" if ending else long, "units": units}


def summary(ds: xarray.Dataset) -> str:
    """Return one sentence: whether theory and Gaussian closure agree with the ensemble, and what was left out."""
    known = [n for n in ("field", "semiclassical") if f"tv_{n}" in ds and np.isfinite(ds[f"tv_{n}"]).all()]
    ordered = "condition" in ds.dims and ds.condition.dtype.kind == "f"
    clauses = render("compare.txt", known=known, ordered=ordered, **_values(ds)).splitlines()
    return "; ".join(clause for clause in clauses if clause) + "."


def table(ds: xarray.Dataset) -> str:
    """Return the numbers in aligned columns: a row for each condition, then one for each time."""
    laws = [n for n in ("field", "closure", "semiclassical", "theory", "floor") if f"tv_{n}" in ds]
    text = render("compare_table.txt", laws=laws, times=ds.t.values, **_values(ds))
    return "\n\n".join(aligned([line.split("‖") for line in block.splitlines()]) for block in text.split("\n\n"))


def _values(ds: xarray.Dataset) -> dict[str, Any]:
    """Return the values of both templates: the quantity of the conditions, and the numbers of each."""
    if "condition" not in ds.dims:
        return {"by": "", "variance": "ratio" in ds, "rows": [_row("", ds)]}
    rows = [_row(label, ds.isel(condition=k)) for k, label in enumerate(ds.condition.values)]
    return {"by": ds.condition.attrs["long_name"], "variance": "ratio" in ds, "rows": rows}


def _row(label: float | str, one: xarray.Dataset) -> dict[str, Any]:
    """Return the numbers of a condition; ``shown`` is its ratio, at its worst time if only some times disagree."""
    row: dict[str, Any] = {"agrees": False}
    row |= {str(name): v.item() for name, v in one.data_vars.items() if v.ndim == 0}
    row |= {"at": label, "label": f"{label:.3g}" if isinstance(label, float) else str(label)}
    value, se = (one[f"{'ratio' if 'ratio' in one else 'mean_error'}_by_time{end}"].values for end in ("", "_se"))
    lost = {n: row.get(f"lost_{n}", 0) for n in ("ensemble", "field", "closure", "theory")}
    row |= {"by_time": value, "by_time_se": se, "lost": {n: count for n, count in lost.items() if count}}
    row["chance"] = "tv_closure" in row and row["tv_closure"] <= 1.25 * row["tv_floor"]
    if "ratio" in one:
        away, k = abs(value - 1), int(np.argmax(abs(value - 1)))
        row |= {"worst": away[k], "worst_se": se[k]}
        whole = row["ratio_pooled"], row["ratio_pooled_se"], None
        shown = (value[k], se[k], float(one.t[k])) if row["agrees_pooled"] else whole
        row |= dict(zip(("shown", "shown_se", "when"), shown, strict=True))
    return row
