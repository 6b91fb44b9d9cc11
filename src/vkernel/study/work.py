r"""One block of one condition: train its members, sample them, keep numbers. A pure function of (study, cell, block).

Kept of every member m, from samples :math:`x` that start at the same places for all:

==============  =================================================================================================
``away``        share of samples farther than ``measure.away`` × half the least distance of training points from
                every training point (moved to :math:`\alpha_\epsilon y`)
``gap``         :math:`P(a < |x| < b)` in one dimension, if ``measure.gap = [a, b]``
``nearest``     mean distance to the nearest training point
``share``       share of samples nearest to each training point
``density``     histogram over ±``measure.limit``, one or two dimensions
``sample``      the first ``measure.keep`` samples
``score``       the score at ``measure.places`` places and ``measure.times`` (one dimension)
==============  =================================================================================================

and the share of samples in each of ``measure.regions``. A member that diverged is NaN in all of them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vkernel import kernels
from vkernel.core import rng
from vkernel.core.errors import InputError, require
from vkernel.data import Empirical, toy
from vkernel.data.loaders import load
from vkernel.metrics.neighbours import nearest
from vkernel.process import Process
from vkernel.process import from_spec as make_process
from vkernel.sample import effective_sde, naive, pf_ode, semiclassical
from vkernel.sample.loop import Frame
from vkernel.sample.ode import march
from vkernel.score.empirical import EmpiricalScore
from vkernel.study.spec import Condition, Lookup, Region, Spec
from vkernel.train import features, models
from vkernel.train.ensemble import Ensemble, train_ensemble
from vkernel.train.models.base import Model
from vkernel.train.objectives import J0, JK, Objective

__all__ = ["Quantity", "compute", "layout", "prepare"]

Scores = Callable[[Tensor, float], Tensor]
MANY = 64  # training points whose shares are kept


class Quantity:
    """A labelled array of the store beyond factors and members: dimensions, their coordinates, and what it means."""

    def __init__(self, about: str, unit: str = "", **coordinates: np.ndarray) -> None:
        self.about, self.unit, self.coordinates = about, unit, coordinates

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(c) for c in self.coordinates.values())


def datasets(spec: Spec) -> list[Empirical]:
    """The training sets of a study, each once."""
    tables = {c.data.model_dump_json(): c for c in spec.conditions()}
    return [make_data(c) for c in tables.values()]


def layout(spec: Spec) -> dict[str, Quantity]:
    """Which quantities a study keeps; all its training sets must have events of one shape."""
    sets = datasets(spec)
    shapes = {data.shape for data in sets}
    require(len(shapes) == 1, f"All training sets of a study must have events of one shape; got {sorted(shapes)}.")
    d, most, m = math.prod(shapes.pop()), max(data.n for data in sets), spec.measure
    found: dict[str, Quantity] = {}
    if m.times and m.places:
        require(d == 1, f"measure.times and measure.places keep scores in one dimension; the data have {d}.")
        places = np.linspace(-m.limit, m.limit, m.places)
        found["score"] = Quantity("learned score", "1 / unit of x", time=np.asarray(m.times), place=places)
    if not any(c.sampler.samples for c in spec.conditions()):
        return found
    found["away"] = Quantity("share of samples away from every training point")
    found["nearest"] = Quantity("mean distance to the nearest training point", "unit of x")
    if most <= MANY:
        found["share"] = Quantity("share of samples nearest to each training point", point=np.arange(most))
    if m.gap is not None:
        require(d == 1, f"measure.gap is for one dimension; the data have {d}. measure.away is for any.")
        found["gap"] = Quantity(f"share of samples with {m.gap[0]:g} < |x| < {m.gap[1]:g}")
    for name, region in m.regions.items():
        good = region.around is None or len(region.around) == d
        require(good, f"measure.regions.{name}.around: a place has {d} coordinates here; got {region.around}.")
        found[name] = Quantity(f"share of samples in the region {name}")
    if d <= 2:
        centres = (np.arange(m.bins) + 0.5) * (2 * m.limit / m.bins) - m.limit
        axes = {"x": centres} if d == 1 else {"y": centres, "x": centres}
        found["density"] = Quantity("density of samples", "1 / unit of x" if d == 1 else "1 / unit of x²", **axes)
    if m.keep:
        found["sample"] = Quantity("sample", "unit of x", index=np.arange(m.keep), component=np.arange(d))
    return found


def prepare(spec: Spec) -> None:
    """Make every object of every condition once, so that mistakes show before the first block."""
    for condition in spec.conditions():
        try:
            data, process = make_data(condition), _process(condition)
            make_model(condition, data, process)
            o = condition.objective
            require(
                o.of != "subset" or math.inf == o.K or data.n >= o.K,
                f"objective.K: a subset of {o.K:g} points needs as many; the data have {data.n}.",
            )
            good = condition.sampler.lookup is None or data.d == 1
            require(good, f"sampler.lookup is for one dimension; the data have {data.d}.")
            for t in condition.measure.times:
                process.check(t)
        except InputError as error:
            raise InputError(f"Where {condition!r}: {error}" if spec.grid else str(error)) from None
    numbers = [name for name, quantity in layout(spec).items() if not quantity.shape]
    for table, part in (("figure", spec.figure), ("finding", spec.finding)):
        good = part is None or part.value in numbers
        require(
            good, f"{table}.value: the study keeps {', '.join(numbers)} of each member, not {part and part.value!r}."
        )
    for cell in (spec.finding.of, spec.finding.to) if spec.finding else ():
        for factor in spec.grid:
            good = factor.dim not in cell or cell[factor.dim] in factor.coordinate
            require(good, f"finding: {factor.dim} has no value {cell.get(factor.dim)!r}; it has {factor.coordinate}.")


def compute(spec: Spec, condition: Condition, block: int) -> dict[str, np.ndarray]:
    """The quantities of the members of a block, ``(members, …)``, with ``spec.threads`` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(spec.threads)  # the order of sums, and with it the last bit, depends on it
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # what diverged is NaN in the store
            return _compute(spec, condition, spec.members_of(block))
    finally:
        torch.set_num_threads(before)


def _compute(spec: Spec, condition: Condition, members: range) -> dict[str, np.ndarray]:
    device, s, m = _device(spec), condition.sampler, condition.measure
    data, process = make_data(condition).to(device), _process(condition)
    wanted, found = _layout(spec.to_json()), {}
    if s.law in ("exact", "naive", "resampled"):
        x, scores = _exact(spec, condition, data, process, members)
    elif s.law in ("field", "semiclassical"):
        x, scores = _theory(spec, condition, data, process, members)
    else:
        x, scores = _trained(spec, condition, make_model(condition, data, process), data, process, members)
    if s.samples:
        found = _measured(x.double(), data, process, condition, wanted)
    if "score" in wanted:
        places = torch.linspace(-m.limit, m.limit, m.places, dtype=torch.float64, device=device)[:, None]
        found["score"] = torch.stack([scores(places, t)[..., 0] for t in m.times], 1).double()
    return {name: value.cpu().numpy().astype(np.float64) for name, value in found.items()}


@functools.lru_cache(maxsize=2)
def _layout(study: str) -> dict[str, Quantity]:
    """The layout of a study, kept for its next block."""
    return layout(Spec(**json.loads(study)))


def _trained(
    spec: Spec, condition: Condition, model: Model, data: Empirical, process: Process, members: range
) -> tuple[Tensor, Scores]:
    """Samples of trained members or of their mean score, and these scores."""
    s, mean = condition.sampler, condition.sampler.law == "mean"
    ensemble = _ensemble(spec, condition, model, data, process, range(s.sets) if mean else members)
    start = _start(process, data, s.samples, spec.seed).to(ensemble.dtype)

    def scores(places: Tensor, t: float) -> Tensor:
        places = places.to(ensemble.dtype)
        return ensemble.mean(places, t).expand(len(members), *places.shape) if mean else ensemble(places, t)

    if s.samples == 0:
        return start, scores
    if mean:
        x = _flow(lambda y, t: ensemble.mean(y[0], t)[None], scores, process, start[None], condition)
        return x.expand(len(members), *start.shape), scores
    if len(ensemble.diverged) == len(ensemble):
        return start.expand(len(ensemble), *start.shape) * torch.nan, scores
    if s.lookup is None:
        return ensemble.sample(x_T=start, steps=s.steps, method=s.method, spacing=s.spacing, show=False), scores
    return _flow(None, scores, process, start.expand(len(ensemble), *start.shape), condition), scores


_LAST: dict[str, Ensemble] = {}


def _ensemble(
    spec: Spec, condition: Condition, model: Model, data: Empirical, process: Process, members: range
) -> Ensemble:
    """Train the members, or return those of the block before, if its condition differs in its sampler alone."""
    tables = (condition.process, condition.model, condition.training, condition.objective)
    settings = [spec.seed, spec.threads, str(data.device), [*members], fingerprint([data])]
    key = json.dumps([*settings, *(t.model_dump_json() for t in tables)])
    if key not in _LAST:
        made = train_ensemble(
            model,
            data,
            process,
            members=list(members),
            draws=_draws(condition, model),
            objective=_objective(condition),
            vary=condition.training.vary,
            seed=spec.seed,
            times=condition.training.times,
            show=False,
        )
        _LAST.clear()
        _LAST[key] = made
    return _LAST[key]


def _exact(
    spec: Spec, condition: Condition, data: Empirical, process: Process, members: range
) -> tuple[Tensor, Scores]:
    """Samples of the exact score, without noise or with that of the naive estimator, and the score."""
    score, s = EmpiricalScore(data, process), condition.sampler
    start, kappa = _start(process, data, s.samples, spec.seed), s.kappa or 0.0

    def scores(places: Tensor, t: float) -> Tensor:
        return score(places, t).expand(len(members), *places.shape)

    if s.samples == 0:
        return start, scores
    if s.law == "exact":
        x = _flow(score, lambda places, t: score(places, t)[None], process, start[None], condition)
        return x.expand(len(members), *start.shape), scores
    found = []
    for source in (rng.stream(spec.seed, "study/noise", m) for m in members):
        how: dict[str, Any] = {"steps": s.steps, "spacing": s.spacing, "generator": source}
        if s.law == "naive":
            found.append(effective_sde(score, kernels.Naive(score, kappa), process, start, **how))
        else:
            found.append(naive(score, process, start, kappa=kappa, **how))
    return torch.stack(found), scores


def _flow(paired: Any, shared: Scores, process: Process, start: Tensor, condition: Condition) -> Tensor:
    """The probability flow of scores from ``start (M, n, *shape)``, through a look-up table where one is wanted."""
    s = condition.sampler
    score = paired if s.lookup is None else _looked_up(shared, process, s.lookup)
    x = pf_ode(score, process, start, steps=s.steps, method=s.method, spacing=s.spacing)
    assert isinstance(x, Tensor)
    return x


def _looked_up(scores: Scores, process: Process, lookup: Lookup) -> Scores:
    """Scores ``(M, n, 1)`` at ``x (M, n, 1)`` whose denoiser is read from a table over even nodes."""
    last, gap = lookup.nodes - 1, 2 * lookup.limit / (lookup.nodes - 1)

    def looked_up(x: Tensor, t: float) -> Tensor:
        nodes = torch.linspace(-lookup.limit, lookup.limit, lookup.nodes, dtype=x.dtype, device=x.device)[:, None]
        when = torch.as_tensor(t, dtype=torch.float64)
        alpha, var = float(process.alpha(when)), float(process.S(when))
        table = ((nodes + var * scores(nodes, t)) / alpha)[..., 0]
        place = (x[..., 0] + lookup.limit) / gap
        if lookup.read == "right":
            m = table.gather(1, place.ceil().clamp(0, last).long())
        else:
            place = place.clamp(0, last)
            below = place.floor().clamp(max=last - 1)
            left, right = (table.gather(1, below.long() + k) for k in (0, 1))
            m = left + (right - left) * (place - below)
        return (alpha * m[..., None] - x) / var

    return looked_up


def _measured(
    x: Tensor, data: Empirical, process: Process, condition: Condition, wanted: dict[str, Quantity]
) -> dict[str, Tensor]:
    d, m = data.d, condition.measure
    alpha = float(process.alpha(torch.tensor(process.eps, dtype=torch.float64)))
    flat = x.reshape(*x.shape[:2], d)
    bad = ~flat.isfinite().flatten(1).all(1)
    near = nearest(flat.nan_to_num(posinf=0, neginf=0).reshape(-1, d) / alpha, data, 1)
    distance, index = (part.reshape(x.shape[:2]) for part in (alpha * near[0], near[1]))
    radius = m.away * alpha * _least(data) / 2
    found = {"away": (distance > radius).double().mean(1), "nearest": distance.mean(1)}
    if "share" in wanted:
        counts = torch.zeros(len(x), wanted["share"].shape[0], dtype=torch.float64, device=x.device)
        found["share"] = counts.scatter_add_(1, index, torch.ones_like(distance)) / x.shape[1]
        found["share"][:, data.n :] = torch.nan
    if m.gap is not None:
        size = flat[..., 0].abs()
        found["gap"] = ((size > m.gap[0]) & (size < m.gap[1])).double().mean(1)
    for name, region in m.regions.items():
        found[name] = _inside(flat, alpha * data.rows(0, data.n).reshape(data.n, d), region, distance).double().mean(1)
    if "sample" in wanted:
        found["sample"] = flat[:, : m.keep].clone()
    if "density" in wanted:
        cell = ((flat + m.limit) * (m.bins / (2 * m.limit))).floor()
        inside = ((cell >= 0) & (cell < m.bins)).all(-1)
        where = cell.nan_to_num().clamp(0, m.bins - 1).long()
        where = where[..., 0] if d == 1 else where[..., 1] * m.bins + where[..., 0]
        counts = torch.zeros(len(x), m.bins**d, dtype=torch.float64, device=x.device)
        counts.scatter_add_(1, where, inside.double())
        density = counts / x.shape[1] * (m.bins / (2 * m.limit)) ** d
        found["density"] = density.reshape(len(x), *wanted["density"].shape)
    for value in found.values():
        value[bad] = torch.nan
    return found


def _inside(x: Tensor, points: Tensor, region: Region, nearest: Tensor) -> Tensor:
    """Whether each of ``x (M, n, d)`` lies in a region; ``nearest (M, n)`` is its distance from the nearest point."""
    inside, size = torch.ones_like(nearest, dtype=torch.bool), x.norm(dim=-1)
    if region.norm is not None:
        inside = inside & (size > region.norm[0]) & (size < region.norm[1])
    if region.away is not None:
        inside = inside & (nearest > region.away)
    if region.beside is not None:
        points = points.to(x)
        along = points.roll(-1, 0) - points
        share = ((x[..., None, :] - points) * along).sum(-1) / along.square().sum(-1)
        from_line = (x[..., None, :] - points - share.clamp(0, 1)[..., None] * along).norm(dim=-1)
        inside = inside & (from_line.amin(-1) < region.beside)
    if region.around is not None and region.within is not None:
        inside = inside & ((x - torch.tensor(region.around).to(x)).norm(dim=-1) < region.within)
    return inside


_LEAST: dict[str, float] = {}


def _least(data: Empirical) -> float:
    """The least distance of distinct training points (1 where there is one alone), kept for the next block."""
    key = fingerprint([data])
    if key not in _LEAST:
        points = data.merged()[0]
        rows = points.rows(0, points.n).double().reshape(points.n, data.d)
        _LEAST[key] = float(nearest(rows, points, 2)[0][:, 1].min()) if points.n > 1 else 1.0
    return _LEAST[key]


def fingerprint(sets: list[Empirical]) -> str:
    """What training sets hold, in one line."""
    found = hashlib.sha256()
    for data in sets:
        found.update(repr((data.n, data.shape)).encode())
        for start in range(0, data.n, 4096):
            found.update(data.rows(start, min(start + 4096, data.n)).double().cpu().contiguous().numpy().tobytes())
        found.update(data.weights.double().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def _theory(
    spec: Spec, condition: Condition, data: Empirical, process: Process, members: range
) -> tuple[Tensor, Scores]:
    """Samples of Gaussian fields with the predicted mean and V, or of the semiclassical law, one for each member."""
    start = _start(process, data, condition.sampler.samples, spec.seed)
    V = _kernel(spec.to_json(), condition.index, condition.sampler.sets)
    normals = [rng.stream(spec.seed, "study/field", m) for m in members]
    z = torch.stack([rng.randn((len(V.root),), source, data.device, torch.float64) for source in normals])
    s = condition.sampler

    def own(z: Tensor) -> Scores:
        field = V.field(z)
        return lambda x, t: V.s_avg(x, t) + field(x, t)

    def scores(places: Tensor, t: float) -> Tensor:
        return own(z)(places.expand(len(z), *places.shape), t)

    if s.law == "semiclassical":
        mean, cov = semiclassical(V.s_avg, V, process, start, steps=s.steps, spacing=s.spacing)
        return mean + torch.einsum("mf,f...->m...", z, cov.factors), scores  # type: ignore[attr-defined]
    # an adaptive method shares its steps within a block: one member each, as in Ensemble.sample
    parts = z.split(1) if s.method == "dopri5" else [z]
    frames = [Frame(own(p), process, start.expand(len(p), *start.shape), s.steps, s.spacing) for p in parts]
    return torch.cat([_marched(frame, s.method) for frame in frames]), scores


def _marched(frame: Frame, method: str) -> Tensor:
    try:
        return march(frame, method)
    except AssertionError:  # torchdiffeq's way to say that the adaptive step went to zero
        return torch.full_like(frame.x_T, torch.nan)


@functools.lru_cache(maxsize=2)
def _kernel(study: str, index: tuple[int, ...], sets: int) -> kernels.Linear:
    """The predicted V of a condition, kept for its next block."""
    spec = Spec(**json.loads(study))
    condition = next(c for c in spec.conditions() if c.index == index)
    data, process = make_data(condition).to(_device(spec)), _process(condition)
    model = make_model(condition, data, process)
    assert isinstance(model, models.Linear)
    draws = _draws(condition, model)
    assert draws is not None
    return kernels.Linear(
        model,
        data,
        process,
        draws=draws,
        objective=_objective(condition),
        vary=condition.training.vary,
        seed=spec.seed + 1,
        times=condition.training.times,
        sets=sets,
    )


def _start(process: Process, data: Empirical, n: int, seed: int) -> Tensor:
    """x_T, the same for all members: quantiles in one dimension, Sobol's points in a few, random beyond."""
    if data.d <= 8:
        if data.d == 1:
            u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
        else:
            engine = torch.quasirandom.SobolEngine(data.d, scramble=True, seed=rng.key(seed, "study/x_T") % 2**31)
            u = engine.draw(n, dtype=torch.float64).clamp(1e-9, 1 - 1e-9)
        sigma = process.sigma(torch.tensor(process.T, dtype=torch.float64))
        return (sigma * torch.special.ndtri(u)).reshape(n, *data.shape).to(data.device)
    source = rng.stream(seed, "study/x_T")
    return process.prior((n, *data.shape), device=data.device, dtype=torch.float64, generator=source)


# What the tables of a study mean


def make_data(condition: Condition) -> Empirical:
    """The training set of a condition."""
    d = condition.data
    if d.path is not None:
        found = load(d.path)
    elif d.name is not None:
        found = toy(d.name, d.rotation)
    else:
        try:
            even = torch.linspace(-1, 1, d.even or 2, dtype=torch.float64)
            found = Empirical(even if d.even else torch.tensor(d.points, dtype=torch.float64))
        except ValueError as error:
            raise InputError(f"data.points: {error}") from None
    if d.weights is None:
        return found
    return Empirical(found.rows(0, found.n).reshape(found.n, *found.shape), weights=d.weights)


def _process(condition: Condition) -> Process:
    try:
        return make_process(condition.process.model_dump())
    except InputError as error:
        raise InputError(f"process: {error}") from None


def make_model(condition: Condition, data: Empirical, process: Process) -> Model:
    """The model of a condition."""
    m: Any = condition.model
    if m.kind == "linear":
        if m.features == "random":
            count = m.per_axis ** (data.d + 1)
            found: features.Features = features.random_fourier(count, data.d, process, length=m.length, generator=0)
        else:
            found = features.grid(m.features, m.per_axis, data.d, m.low, m.high, process)
        return models.Linear(found, m.target, m.ridge)
    if m.kind == "lazy":
        if m.kernel == "rbf":
            return models.Lazy(models.RBF(m.length), m.tau, m.target, init=m.init)
        kind = models.NTK if m.kernel == "ntk" else models.NNGP
        kernel = kind(m.depth, m.activation or "relu", init_width=m.init_width)
        return models.Lazy(kernel, m.tau, m.target, init=m.init)
    activation = m.activation or "silu"
    how = {"lr": m.lr, "batch": m.batch, "steps": m.steps, "decay": m.decay}
    return models.MLP(m.width, m.depth, m.target, activation=activation, **how)


def _objective(condition: Condition) -> Objective:
    o = condition.objective
    return J0() if math.inf == o.K else JK(int(o.K), o.of)


def _draws(condition: Condition, model: Model) -> int | None:
    t = condition.training
    if t.F_over_P is None:
        return t.draws
    assert isinstance(model, models.Linear)
    return max(1, round(model.features.count / t.F_over_P))


def _device(spec: Spec) -> torch.device:
    if spec.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    good = spec.device == "cpu" or torch.cuda.is_available()
    require(good, "device: there is no CUDA device where the blocks are computed; give device = 'cpu' or 'auto'.")
    return torch.device(spec.device)
