r"""Theory against trained ensembles: the predicted covariance, and the laws that follow from it (docs/theory.md, §5–7).

At places x and times t, with the scores :math:`\hat s_m` of M members, :math:`\delta_m = \hat s_m - s_{avg}` and
:math:`q_m = |\delta_m|^2`,

.. math:: \mathrm{tr\,Cov} = \frac{\sum_m q_m}{M-1}, \qquad
          \mathrm{se}^2 = \frac{M}{(M-1)(M-2)^2} \sum_m (q_m - \bar q)^2 \quad\text{(jackknife over members)},

against :math:`\mathrm{tr}\,V.\mathrm{cov}`; so too between a time and the next. Places whose noised density
:math:`p(x|t)` is above 1e-3 of the greatest (all, if no ``score`` is given) are the *bulk*. There the ratio is pooled,

.. math:: R = \frac1T \sum_t \frac{\sum_x \text{measured}(x,t)}{\sum_x \text{predicted}(x,t)} ,

linear in :math:`q_m`, so that the same jackknife gives its error (places share members); V counts as exact.

*Laws* of :math:`x_\epsilon`, all from the same starts :math:`x_T`: of the ensemble; of the Gaussian *field* with the
ensemble's mean score and V; of the *closure*, the Gaussian field with the ensemble's own covariance, which leaves out
only the cumulants beyond the second; and the *semiclassical* one, Gaussian around the path of the mean score. Total
variations are of average laws. Finite ensembles of one law differ too: the *floor* is the mean total variation of
random halves, :math:`\times \sqrt{(1/M + 1/M')\,M/4}` for M members against M' fields.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vkernel import metrics
from vkernel.core import rng
from vkernel.core.covariance import Factored
from vkernel.core.errors import InputError, require
from vkernel.core.estimate import Estimate
from vkernel.kernels import Kernel, Measured
from vkernel.reports.compare_text import attributes, summary, table
from vkernel.sample.loop import Frame
from vkernel.sample.ode import march
from vkernel.sample.semiclassical import semiclassical
from vkernel.score.base import wide_time
from vkernel.score.empirical import EmpiricalScore
from vkernel.train.ensemble import Ensemble

if TYPE_CHECKING:
    import xarray

__all__ = ["compare", "table"]

BULK = 1e-3  # of the greatest density
SPLITS = 16  # random halves that the floor is a mean over
CHUNK = 1 << 22  # scores of members at once

Columns = dict[str, tuple[tuple[str, ...], Any]]


def compare(
    ens: Ensemble | Sequence[Ensemble],
    V: Kernel | Sequence[Kernel],
    x: Tensor,
    t: float | Sequence[float] | Tensor,
    *,
    score: EmpiricalScore | None = None,
    samples: int = 1000,
    fields: int | None = None,
    steps: int = 100,
    method: str = "euler",
    spacing: str | None = None,
    bins: int | None = None,
    range: Any = None,
    laws: bool | None = None,
    labels: Sequence[float | str] | None = None,
    by: str | None = None,
    seed: int = 0,
) -> xarray.Dataset:
    """Predicted against measured, as a labelled data set; ``attrs["summary"]`` is a sentence, ``"table"`` a table.

    ``x (N, *shape)`` are places, ``t`` a time or several: dimensions "x" and "t". Lists of ensembles and kernels, a
    pair per condition, add the dimension "condition", labelled by ``labels`` of the quantity ``by`` (default: F/P where
    the kernels know it). ``samples`` starts for each of the members and ``fields`` Gaussian fields (default: as many),
    with ``steps``, ``method`` and ``spacing`` as for samplers (the semiclassical chain is Euler's), make the laws, in
    ``bins`` (default 120, or 40 a side) over ``range`` (default: nearly all of the ensemble). ``laws`` is by default
    true up to two dimensions, for kernels with factors; others (``Lazy``) get, if asked, a field for every start, which
    is slow, and no semiclassical law.
    """
    import xarray

    pairs = _pairs(ens, V)
    x, times = _places(pairs[0][0], x, t)
    d = math.prod(pairs[0][0].shape)
    if laws is None:
        laws = d <= 2 and all(hasattr(k, "factors") for _, k in pairs)
    require(not laws or d <= 2, f"Laws are compared on a grid, in one or two dimensions, not {d}; give laws=False.")
    require(fields is None or fields >= 2, f"Laws need at least two fields; got {fields}.")
    found = [_moments(e, k, x, times, score) for e, k in pairs]
    coords = _coordinates(x.reshape(len(x), d), times)
    if laws:
        grid = {"steps": steps, "method": method, "spacing": spacing}
        drawn = [_Draws(e, k, samples, fields, seed, **grid).laws for e, k in pairs]
        bins = (120 if d == 1 else 40) if bins is None else bins
        span = _span(drawn, d) if range is None else torch.as_tensor(range, dtype=torch.float64).expand(d, 2)
        for columns, sets in zip(found, drawn, strict=True):
            columns |= _laws(sets, bins, span, seed)
        for name, (low, high) in zip(("bin", "bin2")[:d], span.tolist(), strict=True):
            coords[name] = low + (high - low) * (np.arange(bins) + 0.5) / bins
        coords["law"] = list(drawn[0])
    known = [name for name in found[0] if all(name in columns for columns in found)]
    several = isinstance(ens, list | tuple)
    if several:
        by, names = _labels([k for _, k in pairs], labels, by)
        coords["condition"] = ("condition", names, {"long_name": by})
    dims = {n: ("condition",) * several + found[0][n][0] for n in known}
    values = {n: [columns[n][1] for columns in found] for n in known}
    ds = xarray.Dataset({n: (dims[n], values[n] if several else values[n][0], attributes(n)) for n in known}, coords)
    facts = {"process": repr(pairs[0][0].process), "dimension": d, "bulk": "p(x|t)" if score else "all places"}
    facts |= {"samples": samples, "steps": steps, "method": method, "seed": seed} if laws else {}
    ds.attrs = facts | {"summary": summary(ds)}
    ds.attrs["table"] = table(ds)
    return ds


# --- at the door ----------------------------------------------------------------------------------------------------


def _pairs(ens: Any, V: Any) -> list[tuple[Ensemble, Kernel]]:
    ensembles, kernels = (list(a) if isinstance(a, list | tuple) else [a] for a in (ens, V))
    same = len(ensembles) == len(kernels) >= 1
    require(same, f"Give one kernel for each ensemble; got {len(ensembles)} ensembles and {len(kernels)} kernels.")
    for e, k in zip(ensembles, kernels, strict=True):
        require(isinstance(e, Ensemble), f"compare needs an Ensemble, or a list of them; got {e!r}.")
        require(isinstance(k, Kernel), f"V must be a V-kernel such as vk.kernels.Linear(…), not {k!r}.")
        words = "this kernel is white: its cov is the coefficient of δ(t-t'), which no ensemble of models has"
        require(not k.white, f"compare needs the covariance of a learned score, but {words}.")
        require(k.process == e.process, f"The kernel's process is {k.process!r}, the ensemble's {e.process!r}.")
        good = e.process == ensembles[0].process and e.shape == ensembles[0].shape
        require(good, "All ensembles must have the same process and the same event shape.")
        finite = len(e) - len(e.diverged)
        require(finite >= 5, f"A comparison needs at least five finite members; there are {finite}.")
    return list(zip(ensembles, kernels, strict=True))


def _places(ens: Ensemble, x: Any, t: Any) -> tuple[Tensor, list[float]]:
    x = torch.as_tensor(x, dtype=ens.dtype, device=ens.device)
    x = x[:, None] if x.ndim == 1 and ens.shape == (1,) else x
    good = x.ndim == 1 + len(ens.shape) and tuple(x.shape[1:]) == ens.shape and len(x) >= 1 and x.isfinite().all()
    require(good, f"x must be finite and (N, *shape) with the event shape {ens.shape}; got {tuple(x.shape)}.")
    times = [float(u) for u in wide_time(t, ens.device).reshape(-1)]
    require(0 < len(times) == len(set(times)), f"t must be a time or several different ones; got {t!r}.")
    ens.process.check(torch.tensor(times, dtype=torch.float64))
    return x, times


def _coordinates(x: Tensor, times: list[float]) -> dict[str, Any]:
    """Places by index, in one dimension by their coordinate; all coordinates as ``place``."""
    values, n = x.detach().cpu().double().numpy(), len(x)
    label = values[:, 0] if x.shape[1] == 1 else list(range(n))
    unit = {"units": "data unit"}
    coords: dict[str, Any] = {"x": ("x", label, unit if x.shape[1] == 1 else {}), "index": ("x", list(range(n)))}
    coords |= {"place": (("x", "axis"), values, unit), "t": ("t", times, {"long_name": "noise level"})}
    return coords | {"t1": ("pair", times[:-1]), "t2": ("pair", times[1:])} if len(times) > 1 else coords


def _labels(kernels: list[Kernel], labels: Sequence[float | str] | None, by: str | None) -> tuple[str, list[Any]]:
    if labels is None and all(isinstance(getattr(k, "draws", None), int) and hasattr(k, "features") for k in kernels):
        return by or "F/P", [k.features / k.draws for k in kernels]  # type: ignore[attr-defined]
    names: list[Any] = list(labels) if labels is not None else [k for k, _ in enumerate(kernels)]
    require(len(names) == len(kernels), f"There are {len(names)} labels for {len(kernels)} conditions.")
    return by or "condition", names


# --- covariances ----------------------------------------------------------------------------------------------------


def _moments(ens: Ensemble, V: Kernel, x: Tensor, times: list[float], score: EmpiricalScore | None) -> Columns:
    """Everything that is known place by place, and its summaries over the bulk."""
    s = torch.stack([ens._scores(x, u).double().flatten(2) for u in times], 1)
    members, centred = len(s), s - s.mean(0)
    q = centred.square().sum(-1)
    measured, se = q.sum(0) / (members - 1), _jackknife(q)
    predicted = torch.stack([V.cov(x, u).trace().double() for u in times]).to(s.device)
    bulk = _bulk(score, x, times).to(s.device)
    ratio, place = measured / predicted, ("t", "x")
    good = bool(predicted.isfinite().all()) and bool(((predicted * bulk).sum(1) > 0).all())
    require(good, "V predicts no variance in the bulk, or one that is not finite: there is nothing to compare.")
    weights = bulk / (bulk * predicted).sum(1, keepdim=True)
    by_time, by_time_se = (q * weights).sum(-1).sum(0) / (members - 1), _jackknife((q * weights).sum(-1))
    pooled, pooled_se = by_time.mean(), _jackknife((q * weights).sum(-1).mean(-1))
    low, middle, high = ratio[bulk & ratio.isfinite()].quantile(s.new_tensor([0.05, 0.5, 0.95]))
    found = _columns(place, measured=measured, measured_se=se, predicted=predicted)
    found |= _columns(place, ratio=ratio, ratio_se=se / predicted, bulk=bulk)
    found |= _columns(("t",), ratio_by_time=by_time, ratio_by_time_se=by_time_se)
    found |= _columns((), ratio_pooled=pooled, ratio_pooled_se=pooled_se, relative_error=(pooled - 1).abs())
    found |= _columns((), relative_error_se=pooled_se, ratio_median=middle, ratio_low=low, ratio_high=high)
    found |= _columns((*place, "axis"), mean_measured=s.mean(0), mean_measured_se=s.std(0) / math.sqrt(members))
    if hasattr(V, "s_avg"):
        mean = torch.stack([V.s_avg(x, u).double().flatten(1) for u in times])
        found |= _columns((*place, "axis"), mean_predicted=mean)
    if len(times) > 1:
        q = (centred[:, :-1] * centred[:, 1:]).sum(-1)
        cross, cross_se = q.sum(0) / (members - 1), _jackknife(q)
        between = torch.stack([V.cov(x, u, x, v).trace().double() for u, v in pairwise(times)])
        found |= _columns(("pair", "x"), cross_measured=cross, cross_measured_se=cross_se, cross_predicted=between)
    found |= _columns((), members=members, valid=bool(V.valid), why=str(V.why))
    return found | _gaussianity(ens, x, times, bulk)


def _columns(dims: tuple[str, ...], **values: Any) -> Columns:
    return {n: (dims, v.detach().cpu().numpy() if isinstance(v, Tensor) else v) for n, v in values.items()}


def _jackknife(q: Tensor) -> Tensor:
    """The error of Σ q/(M-1), when a member left out also moves the mean."""
    m = len(q)
    return (q - q.mean(0)).square().sum(0).sqrt() * math.sqrt(m / (m - 1)) / (m - 2)


def _bulk(score: EmpiricalScore | None, x: Tensor, times: list[float]) -> Tensor:
    if score is None:
        return torch.ones(len(times), len(x), dtype=torch.bool)
    require(isinstance(score, EmpiricalScore), f"score must be an EmpiricalScore, not {score!r}.")
    logp = torch.stack([score.posterior(x, u).logp.double() for u in times])
    return logp > logp.amax(1, keepdim=True) + math.log(BULK)


def _gaussianity(ens: Ensemble, x: Tensor, times: list[float], bulk: Tensor) -> Columns:
    found: Columns = {}
    cumulants = [ens.cumulants(x, u, components=1) for u in times]
    for name, share in (("skewness", "skewed_share"), ("kurtosis", "kurtotic_share")):
        estimates = [getattr(c, name) for c in cumulants]
        value, se = (torch.stack([getattr(e, a).reshape(len(x), -1) for e in estimates]) for a in ("value", "se"))
        found |= _columns(("t", "x", "axis"), **{name: value, f"{name}_se": se})
        found |= _columns((), **{share: (value.abs() > 2 * se)[bulk.to(value.device)].double().mean()})
    return found


# --- laws -----------------------------------------------------------------------------------------------------------


class _Draws:
    """Samples ``(members, starts, *shape)`` of the four laws, NaN where they diverged; starts are the same for all."""

    def __init__(self, ens: Ensemble, V: Kernel, samples: int, fields: int | None, seed: int, **grid: Any) -> None:
        self.ens, self.method, self.grid = ens, grid["method"], (grid["steps"], grid["spacing"])
        self.x_T, self.s_avg = ens.start(samples, seed), ens.mean
        self.fields, self.source = fields or len(ens), rng.stream(seed, "compare/fields")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what diverged is counted in the result
            own = ens.sample(x_T=self.x_T, show=False, **grid)
            same = isinstance(V, Measured) and V.ensemble is ens
            closure = self.quenched(V if same else Measured(ens))
        field = closure if same else self.quenched(V)
        self.laws = {"ensemble": own, "field": field, "closure": closure, "semiclassical": self.semiclassical(V)}

    def quenched(self, V: Kernel) -> Tensor:
        """The effective SDE (:func:`vkernel.sample.effective_sde`), kept where it diverged."""
        each = not hasattr(V, "factors")  # a field that is conditioned on all it has said: one for every start
        start = self.x_T[:, None] if each else self.x_T.expand(self.fields, *self.x_T.shape)
        field = V.draw(len(start), self.source)
        parts = start.split(max(1, CHUNK // (self.fields * len(self.ens))), 1)
        score, process = lambda x, t: self.s_avg(x, t) + field(x, t), self.ens.process
        return torch.cat([march(Frame(score, process, x.contiguous(), *self.grid), self.method) for x in parts], 1)

    def semiclassical(self, V: Kernel) -> Tensor:
        """Draws of the Gaussian around the deterministic path of each start; NaN if a path diverges."""
        try:
            mean, factors = self._around(V)
        except InputError:
            return torch.full((self.fields, *self.x_T.shape), torch.nan)
        z = rng.randn((self.fields, *factors.shape[:2]), self.source, mean.device, torch.float64)
        return mean + torch.einsum("mfn,fnj->mnj", z, factors)

    def _around(self, V: Kernel) -> tuple[Tensor, Tensor]:
        """Mean ``(n, d)`` and factors ``(F, n, d)`` of the law around each deterministic path."""
        require(hasattr(V, "factors"), "Without factors this costs steps² covariances.")
        steps, spacing = self.grid
        mean, cov = semiclassical(self.s_avg, V, self.ens.process, self.x_T.double(), steps=steps, spacing=spacing)
        assert isinstance(cov, Factored)
        return mean, cov.factors


def _span(drawn: list[dict[str, Tensor]], d: int) -> Tensor:
    """The range of a grid that holds nearly all of the ensembles, ``(d, 2)``."""
    points = torch.cat([_finite(sets["ensemble"]).double().reshape(-1, d) for sets in drawn])
    require(len(points) > 0, "Every member diverged while sampling: take more steps, or log spacing.")
    points = points[:: max(1, len(points) // 1_000_000)].cpu()
    low, high = points.quantile(torch.tensor([0.001, 0.999], dtype=torch.float64), 0)
    pad = 0.08 * (high - low).clamp_min(1e-6)
    return torch.stack([low - pad, high + pad], 1)


def _finite(x: Tensor) -> Tensor:
    """The members whose samples are all finite."""
    return x[x.flatten(1).isfinite().all(1)]


def _laws(drawn: Mapping[str, Tensor], bins: int, span: Tensor, seed: int) -> Columns:
    """Densities, total variations with their floors, and how many members of each law diverged."""
    kept = {name: _finite(x) for name, x in drawn.items()}
    own, found, densities = kept["ensemble"], Columns(), []
    require(len(own) >= 4, f"{len(drawn['ensemble']) - len(own)} members diverged while sampling: take more steps.")
    for name, law in kept.items():
        found[f"lost_{name}"] = ((), len(drawn[name]) - len(law))
        some = len(law) >= 2
        blank = torch.full((bins,) * len(span), torch.nan, dtype=torch.float64)
        densities.append(metrics.histogram(law, bins, span, normalise="all", members=True)[0].value if some else blank)
        if name != "ensemble":
            tv = metrics.total_variation(own, law, bins, span, members=True) if some else Estimate(*[math.nan] * 4)
            floor = _floor(own, law, bins, span, rng.stream(seed, "compare/floor")) if some else math.nan
            rows = {"": tv.value, "_low": tv.low, "_high": tv.high, "_floor": floor}
            found |= _columns((), **{f"tv_{name}{ending}": value for ending, value in rows.items()})
    cells = ("law", "bin", "bin2")[: 1 + len(span)]
    return found | {"tv_floor": found["tv_closure_floor"], "density": (cells, torch.stack(densities).cpu().numpy())}


def _floor(own: Tensor, law: Tensor, bins: int, span: Tensor, source: torch.Generator) -> float:
    """What is seen if ``law`` is the ensemble's own: from halves, or from one member for each start."""
    (m, n), seen = own.shape[:2], 0.0
    for _ in range(SPLITS):
        if law.shape[1] > 1 or n == 1:
            one, two = (own[half] for half in torch.randperm(m, generator=source).tensor_split(2))
            scale = math.sqrt((1 / m + 1 / len(law)) * m / 4)
        else:
            one, two, scale = own, own[torch.randint(m, (n,), generator=source), torch.arange(n)][:, None], 1.0
        seen += scale * float(metrics.total_variation(one, two, bins, span, members=True)) / SPLITS
    return seen
