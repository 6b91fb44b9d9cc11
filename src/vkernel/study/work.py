r"""One block of one condition: train its members, sample them, keep numbers. A pure function of (study, cell, block).

Samples start at the same places for all members. :func:`layout` lists what is kept of each, in words; distances are to
the training points at :math:`\alpha_\epsilon y`, and ``away`` counts samples farther than ``measure.away`` × half the
least distance of two of them from all. A member that diverged is NaN in every quantity.

Studies of images (:mod:`vkernel.study.images`) train the conditions of a part that differ in ``[objective]`` alone
together (:func:`compute_twins`): inputs and exact targets are computed once for all."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor

from vkernel import kernels
from vkernel.core import rng
from vkernel.core.covariance import Factored
from vkernel.core.errors import InputError, require
from vkernel.core.files import write
from vkernel.core.memory import check_memory
from vkernel.core.progress import Progress
from vkernel.data import Empirical, fingerprint, images as named_images, load, population, toy
from vkernel.metrics import nearest
from vkernel.process import Process, from_spec as make_process
from vkernel.sample import Scores, effective_sde, naive, pf_ode, semiclassical
from vkernel.score import EmpiricalScore, Score, Time
from vkernel.study import images
from vkernel.study.quantity import Quantity
from vkernel.study.spec import (
    MODEL_KEYS,
    NOISY,
    THEORY_KEYS,
    WITHOUT_MODEL,
    Condition,
    Lookup,
    Model,
    ObjectiveTable,
    Region,
    Spec,
)
from vkernel.theories import NAMES, Switch
from vkernel.train import features, models
from vkernel.train.ensemble import Ensemble, train_ensemble, train_ensembles
from vkernel.train.objectives import J0, JC, JK, Objective

T = TypeVar("T")
TWINS = "objectives.json"  # of networks that are trained together
MOST_POINTS = 64  # training points whose shares are kept
_LAST = threading.local()


def layout(spec: Spec) -> dict[str, Quantity]:
    """Return the quantities that a study keeps; without images, its training sets must have events of one shape."""
    sets, m, found = datasets(spec), spec.measure, dict[str, Quantity]()
    shapes = {data.shape for data in sets}
    if spec.is_images:
        return images.layout(spec, sorted(shapes))
    require(len(shapes) == 1, f"All training sets of a study must have events of one shape; got {sorted(shapes)}.")
    d, most = math.prod(shapes.pop()), max(data.n for data in sets)
    require(d == 1 or not m.places, f"measure.times and places keep scores in one dimension; the data have {d}.")
    require(d == 1 or m.gap is None, f"measure.gap is for one dimension; the data have {d}. measure.away is for any.")
    for name, region in m.regions.items():
        good = region.around is None or len(region.around) == d
        require(good, f"measure.regions.{name}.around: a place has {d} coordinates here; got {region.around}.")
    if m.places:
        places = np.linspace(-m.limit, m.limit, m.places)
        found["score"] = Quantity("score", "1 / unit of x", {"time": np.asarray(m.times), "place": places})
    if not any(c.sampler.samples for c in spec.conditions()):
        return found
    found["away"] = Quantity("share of samples away from every training point")
    found["nearest"] = Quantity("mean distance to the nearest training point", "unit of x")
    if most <= MOST_POINTS:
        found["share"] = Quantity("share of samples nearest to each training point", "", {"point": np.arange(most)})
    if m.gap is not None:
        found["gap"] = Quantity(f"share of samples with {m.gap[0]:g} < |x| < {m.gap[1]:g}")
    found |= {name: Quantity(f"share of samples in the region {name}") for name in m.regions}
    if d <= 2:
        centres = (np.arange(m.bins) + 0.5) * (2 * m.limit / m.bins) - m.limit
        axes = {"x": centres} if d == 1 else {"y": centres, "x": centres}
        found["density"] = Quantity("density of samples", "1 / unit of x" if d == 1 else "1 / unit of x²", axes)
    if m.keep:
        found["sample"] = Quantity("sample", "unit of x", {"index": np.arange(m.keep), "component": np.arange(d)})
    return found


def prepare(spec: Spec) -> None:
    """Make every object of every condition once, so that mistakes show before the first block."""
    for condition in spec.conditions():
        try:
            experiment = Experiment(spec, condition)
            o, d, n = condition.objective, experiment.data.d, experiment.data.n
            made = experiment.theory if condition.model.is_theory else experiment.model
            assert isinstance(made, Score | models.Model)  # for the first time here
            good = o.of != "subset" or math.inf == o.K or n >= o.K
            require(good, f"objective.K: a subset of {o.K:g} points needs as many; the data have {n}.")
            good = condition.sampler.lookup is None or d == 1
            require(good, f"sampler.lookup is for one dimension; the data have {d}.")
            for t in condition.measure.times:
                experiment.process.check(t)
            experiment.process.time(torch.tensor(condition.measure.levels, dtype=torch.float64))
            if condition.model.kind == "unet":
                experiment.model.module(experiment.data.shape)  # type: ignore[attr-defined]  # its sides divide
        except InputError as error:
            raise InputError(f"Where {condition}: {error}" if spec.grid else str(error)) from None
    kept = layout(spec)
    each = 8 * sum(math.prod(quantity.shape) for quantity in kept.values())
    each += 8 * max(c.sampler.samples for c in spec.conditions()) * datasets(spec)[0].d
    many = min(spec.block, spec.members)
    check_memory(many * each, f"block: a block of {many:,} members")
    own = {"step"} if spec.is_images else set[str]()
    numbers = [name for name, q in kept.items() if q.per_member and set(q.coordinates) <= own]
    for table, part in (("figure", spec.figure), ("finding", spec.finding)):
        if part is not None and part.value not in numbers:
            raise InputError(f"{table}.value: the study keeps {', '.join(numbers)} of each member, not {part.value!r}.")


def compute(spec: Spec, condition: Condition, block: int) -> dict[str, np.ndarray]:
    """Return the quantities of the members of a block, ``(members, …)``, computed with ``spec.threads`` threads."""
    where = device(spec)
    experiment, members, m = Experiment(spec, condition, where), spec.members_of(block), condition.measure
    wanted = _last("layout", spec.to_json(), lambda: layout(spec))
    found: dict[str, Tensor] = {}
    with torch_threads(spec.threads), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # members that diverged are NaN in the store
        scores, sample = _law(experiment, members)
        dtype = scores.dtype if isinstance(scores, Scores) else torch.float64
        if condition.sampler.samples:
            given = {"float32": torch.float32, "float64": torch.float64}.get(condition.sampler.dtype or "", dtype)
            x = sample(experiment.start(condition.sampler.samples).to(given)).double()
            found = _measure(x.expand(len(members), *x.shape[1:]).flatten(2), experiment, wanted)
        if "score" in wanted:
            places = torch.linspace(-m.limit, m.limit, m.places, dtype=torch.float64, device=where)[:, None]
            values = [scores(places.to(dtype), t)[..., 0].double() for t in m.times]
            found["score"] = torch.stack(values, -2).expand(len(members), -1, -1)
    return {name: value.cpu().numpy().astype(np.float64) for name, value in found.items()}


def compute_twins(
    spec: Spec, conditions: list[Condition], folder: Path | None, progress: Progress = False
) -> Iterator[tuple[Condition, dict[str, np.ndarray]]]:
    """Yield the quantities of all members for each of the ``conditions``, which differ in their objective alone.
    Training keeps its state in a subfolder of ``folder``, and goes on from the state that a killed run left there."""
    experiments = {c.objective.model_dump_json(): Experiment(spec, c, device(spec)) for c in conditions}
    one, wanted = next(iter(experiments.values())), layout(spec)
    names, kept = list(experiments), None if folder is None else _kept(folder, one, list(experiments))
    if kept is not None:
        names = json.loads((kept / TWINS).read_text())
    tables = [ObjectiveTable.model_validate_json(name) for name in names]
    how: dict[str, Any] = {key: value for key, value in one.training.items() if key != "objective"}
    how |= {"seed": one.seed, "progress": progress}
    t = one.condition.training
    how |= {"members": list(range(spec.members)), "snapshots": tuple(t.snapshots), "flips": t.flips}
    if kept is not None:
        how["checkpoint"] = kept / "training"
    with torch_threads(spec.threads), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # members that diverged are NaN in the store
        goals = {name: _objective(table) for name, table in zip(names, tables, strict=True)}
        trained = train_ensembles(one.model, one.data, one.process, list(goals.values()), **how)
        found, probe = dict(zip(names, trained, strict=True)), one.probe
        with torch.no_grad():
            for name, experiment in experiments.items():
                yield experiment.condition, images.measure(probe, found[name], goals[name], wanted)
    if kept is not None:
        shutil.rmtree(kept)


def _kept(folder: Path, one: Experiment, names: list[str]) -> Path:
    """Return the folder of a training that was begun with these objectives, among others, or make one."""
    key = hashlib.sha256(one.twins.encode()).hexdigest()[:16]
    for found in sorted(folder.glob(f"{key}-*/{TWINS}")):
        if set(names) <= set(json.loads(found.read_text())):
            return found.parent
    own = hashlib.sha256(json.dumps(names).encode()).hexdigest()[:16]
    return write(folder / f"{key}-{own}" / TWINS, json.dumps(names)).parent


def device(spec: Spec) -> str:
    """Return the device on which blocks are computed."""
    good = spec.device != "cuda" or torch.cuda.is_available()
    require(good, "device: there is no CUDA device where the blocks are computed; give device = 'cpu' or 'auto'.")
    return "cuda" if spec.device != "cpu" and torch.cuda.is_available() else "cpu"


def _objective(o: ObjectiveTable) -> Objective:
    if o.c is not None:
        return JC(o.c, o.noise)
    return J0() if math.inf == o.K else JK(int(o.K), o.of)


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use so many threads: the order of sums, and with it the last bit, depends on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Experiment:
    """What the tables of a condition stand for: a training set, a process, a model, and how it is trained."""

    spec: Spec
    condition: Condition
    device: str = "cpu"

    @functools.cached_property
    def data(self) -> Empirical:
        d = self.condition.data
        if d.path is not None:
            found = load(d.path)
        elif d.is_images:
            found = self.pair[0]
        elif d.name is not None:
            found = toy(d.name, d.rotation)
        elif d.population is not None:
            found = Empirical(population(d.population, d.n or 1, rng.stream(self.spec.seed, "study/set", d.set)))
        else:
            try:
                even = torch.linspace(-1, 1, d.even or 2, dtype=torch.float64)
                found = Empirical(even if d.even else torch.tensor(d.points, dtype=torch.float64))
            except ValueError as error:
                raise InputError(f"data.points: {error}") from None
        if d.weights is not None:
            found = Empirical(found[:], weights=d.weights)
        return found.to(self.device)

    @functools.cached_property
    def pair(self) -> tuple[Empirical, Empirical]:
        """Training and held-out images of a set by name, on the CPU."""
        d = self.condition.data
        how = {"size": d.size, "grey": d.grey, "seed": self.spec.seed, "set": d.set}
        return named_images(d.name or "", d.n or 1, d.test or 3, **how)  # type: ignore[arg-type]

    @property
    def probe(self) -> images.Probe:
        """What is measured of networks on images."""
        held_out, x_T = self.pair[1].to(self.device), self.start(self.condition.sampler.samples)
        return images.Probe(self.condition, self.data, held_out, self.process, x_T, self.seed)

    @property
    def seed(self) -> int:
        """The seed of all training. Sets of one population are independent, and so are the models trained on them."""
        seed, d = self.spec.seed, self.condition.data
        drawn = d.population is not None or (d.is_images and d.set > 0)
        return rng.key(seed, "study/models", d.set) if drawn else seed

    @functools.cached_property
    def process(self) -> Process:
        return make_process(self.condition.process.model_dump())

    @functools.cached_property
    def model(self) -> models.Model:
        m, d, process = self.condition.model, self.data.d, self.process
        if m.kind == "linear" and m.features == "random":
            waves = features.random_fourier(m.per_axis ** (d + 1), d, process, length=m.length, generator=0)
            return models.Linear(waves, m.target, m.ridge, m.weight)
        if m.kind == "linear":
            products = features.grid(m.features, m.per_axis, d, m.low, m.high, process)
            return models.Linear(products, m.target, m.ridge, m.weight)
        if m.kind == "lazy":
            how: dict[str, Any] = {"depth": m.depth, "activation": m.activation or "relu", "init_width": m.init_width}
            deep = models.NTK if m.kernel == "ntk" else models.NNGP
            kernel = models.RBF(m.length) if m.kernel == "rbf" else deep(**how)
            return models.Lazy(kernel, m.tau, m.target, m.weight, m.init)
        how = m.model_dump(include=MODEL_KEYS[m.kind] - {"kind", "activation"}, exclude_none=True) | {"batch": m.batch}
        if m.kind == "unet":
            return models.UNet(**how)
        return models.MLP(**how, activation=m.activation or "silu")

    @property
    def theory(self) -> Score:
        """The score of a model that is not trained, the same for all members."""
        seed = rng.key(self.seed, "study/theory")
        return _last("theory", self.key, lambda: make_theory(self.condition.model, self.data, self.process, seed))

    @property
    def training(self) -> Mapping[str, object]:
        """Arguments of ``train_ensemble``, and of the V-kernel that predicts the ensemble."""
        table, draws = self.condition.training, self.condition.training.draws
        if table.F_over_P is not None:
            assert isinstance(self.model, models.Linear)
            draws = max(1, round(self.model.features.count / table.F_over_P))
        objective = _objective(self.condition.objective)
        return {"draws": draws, "objective": objective, "vary": table.vary, "times": table.times}

    @functools.cached_property
    def key(self) -> str:
        """A line that is the same for conditions that train the same models on the same device."""
        return self._key(self.condition.trained)

    @functools.cached_property
    def twins(self) -> str:
        """A line that is the same for conditions that train on the same inputs on the same device."""
        return self._key(self.condition.twins)

    def _key(self, tables: tuple[BaseModel, ...]) -> str:
        about = [self.spec.seed, self.spec.threads, self.device, fingerprint([self.data])]
        return json.dumps([*about, *(t.model_dump_json() for t in tables)])

    def start(self, n: int) -> Tensor:
        """Return x_T, the same for all members: evenly spread in up to 8 dimensions, random beyond."""
        z = rng.quasi_normals(n, self.data.d, rng.key(self.spec.seed, "study/x_T") % 2**31)
        sigma = self.process.sigma(torch.tensor(self.process.T, dtype=torch.float64))
        return (sigma * z).reshape(n, *self.data.shape).to(self.device)


def make_theory(m: Model, data: Empirical, process: Process, seed: int) -> Score:
    """Return the score of a theory; ``seed`` is that of the draws that a score is averaged over."""
    if m.above is not None and m.below is not None and m.at is not None:
        above, below = (make_theory(part, data, process, seed) for part in (m.above, m.below))
        return Switch(above, below, m.at, m.log_width)
    given = m.model_dump(include=THEORY_KEYS[m.kind] - {"kind", "smoothing"}, exclude_none=True)
    given |= {"kind": m.smoothing, "generator": seed} if m.kind == "smoothed" else {}
    return NAMES[m.kind](data, process, **given)


def datasets(spec: Spec) -> list[Empirical]:
    """Return the training sets of a study, each once, and the held-out images that belong to them."""
    each = [Experiment(spec, c) for c in {c.data.model_dump_json(): c for c in spec.conditions()}.values()]
    return [e.data for e in each] + [e.pair[1] for e in each if e.condition.data.is_images]


def _last(kind: str, key: str, make: Callable[[], T]) -> T:
    """Return what the block before, in this thread, made under the same key, or make it anew."""
    held: dict[str, tuple[str, Any]] = vars(_LAST)
    if held.get(kind, ("", None))[0] != key:
        held[kind] = (key, make())
    found: T = held[kind][1]
    return found


def _law(experiment: Experiment, members: range) -> tuple[Scores | Score, Callable[[Tensor], Tensor]]:
    """Return the scores of the members, and the function that samples them from x_T; one score is for all members."""
    s, seed, data, process = experiment.condition.sampler, experiment.seed, experiment.data, experiment.process
    steps: dict[str, Any] = {"steps": s.steps, "spacing": s.spacing}
    if s.law in WITHOUT_MODEL:
        exact, kappa = EmpiricalScore(data, process), s.kappa or 0.0

        def noisy(x_T: Tensor) -> Tensor:
            V, streams = kernels.Naive(exact, kappa), [rng.stream(seed, "study/noise", m) for m in members]
            if s.law == "naive":
                return torch.stack([effective_sde(V, x_T, generator=g, **steps) for g in streams])
            return torch.stack([naive(exact, x_T, kappa=kappa, generator=g, **steps) for g in streams])

        return exact, noisy if s.law in NOISY else functools.partial(_flow, experiment, exact)
    if experiment.condition.model.is_theory:
        return experiment.theory, functools.partial(_flow, experiment, experiment.theory)
    if s.law in ("members", "mean"):
        which = range(s.sets) if s.law == "mean" else members
        how: dict[str, Any] = {"members": list(which), "seed": seed, **experiment.training}
        train = functools.partial(train_ensemble, experiment.model, data, process, **how)
        trained = _last("ensemble", f"{which} {experiment.key}", train)
        score = trained.mean_score if s.law == "mean" else trained
        return score, functools.partial(_flow, experiment, score, start=members.start)
    assert isinstance(experiment.model, models.Linear)
    how = {"seed": seed + 1, "sets": s.sets, **experiment.training}  # inputs that the models have not seen
    predict = functools.partial(kernels.Linear, experiment.model, data, process, **how)
    theory = _last("kernel", f"{s.sets} {experiment.key}", predict)
    size, streams = (len(theory.root),), [rng.stream(seed, "study/field", m) for m in members]
    z = torch.stack([rng.randn(size, stream, theory.root.device, torch.float64) for stream in streams])
    # mean plus field is a linear model again, with random weights
    weights = theory.mean_weights + (z @ theory.root).reshape(len(z), *theory.mean_weights.shape)
    fields = Ensemble(experiment.model, {"weights": weights}, process, data.shape)

    def linearised(x_T: Tensor) -> Tensor:
        mean, cov = semiclassical(theory, x_T, **steps)
        assert isinstance(cov, Factored)
        return mean + torch.einsum("mf,f...->m...", z, cov.factors)

    return fields, linearised if s.law == "semiclassical" else functools.partial(_flow, experiment, fields)


def _flow(experiment: Experiment, scores: Scores | Score, x_T: Tensor, start: int = 0) -> Tensor:
    """Return samples ``(M, n, *shape)`` by the PF-ODE; members that diverged, or beyond ``sampler.first``, are NaN."""
    s = experiment.condition.sampler
    how: dict[str, Any] = {"steps": s.steps, "method": s.method, "spacing": s.spacing}
    if isinstance(scores, Score):
        return pf_ode(LookedUp(scores, s.lookup) if s.lookup else scores, x_T[None], **how)
    x, count = x_T.new_full((len(scores), *x_T.shape), torch.nan), len(scores) if s.first is None else s.first - start
    alive = [m for m in range(min(len(scores), count)) if m not in set(scores.diverged)]
    if alive and s.lookup:
        x[alive] = pf_ode(LookedUp(scores.select(alive), s.lookup), x_T.expand(len(alive), *x_T.shape), **how)
    elif alive:
        x[alive] = scores.select(alive).sample(x_T=x_T, **how)
    return x


class LookedUp(Score):
    """Scores of numbers whose denoisers are read from a table; ``x (M, n, 1)`` are the places of each member."""

    def __init__(self, scores: Scores | Score, lookup: Lookup) -> None:
        self.scores, self.lookup, self.process, self.shape = scores, lookup, scores.process, (1,)
        self.jumps = scores.jumps if isinstance(scores, Score) else ()

    def denoise(self, x: Tensor, t: Time) -> Tensor:
        # in place: temporary arrays of this size would double the time
        limit, last = self.lookup.limit, self.lookup.nodes - 1
        nodes = torch.linspace(-limit, limit, last + 1, dtype=x.dtype, device=x.device)
        alpha, var = (a.to(x) for a in self.levels(torch.as_tensor(t)))
        table = self.scores(nodes[:, None], t).reshape(-1, last + 1).mul_(var).add_(nodes).div_(alpha)
        place = (x[..., 0] + limit).mul_(last / (2 * limit))
        if self.lookup.read == "right":
            return table.gather(1, place.ceil_().clamp_(0, last).long())[..., None]
        below = place.clamp_(0, last).floor().clamp_(max=last - 1)
        index = below.long()
        left = table.gather(1, index)
        return left.add_(table.gather(1, index.add_(1)).sub_(left).mul_(place.sub_(below)))[..., None]

    def __call__(self, x: Tensor, t: Time) -> Tensor:
        alpha, var = (a.to(x) for a in self.levels(torch.as_tensor(t)))
        return (alpha * self.denoise(x, t) - x) / var


def _measure(x: Tensor, experiment: Experiment, wanted: dict[str, Quantity]) -> dict[str, Tensor]:
    """Return the quantities of samples ``x (M, n, d)``."""
    data, m = experiment.data, experiment.condition.measure
    alpha = float(experiment.process.alpha(torch.tensor(experiment.process.eps, dtype=torch.float64)))
    near = nearest(x.nan_to_num(posinf=0, neginf=0).reshape(-1, data.d) / alpha, data, 1)
    distance, index = (part.reshape(x.shape[:2]) for part in (alpha * near[0], near[1]))
    radius = m.away * alpha * _last("least", experiment.key, lambda: _least(data)) / 2
    found = {"away": (distance > radius).double().mean(1), "nearest": distance.mean(1)}
    if "share" in wanted:
        counts = x.new_zeros(len(x), wanted["share"].shape[0])
        found["share"] = counts.scatter_add_(1, index, torch.ones_like(distance)) / x.shape[1]
        found["share"][:, data.n :] = torch.nan
    for name, region in (m.regions if m.gap is None else {"gap": Region(norm=m.gap), **m.regions}).items():
        found[name] = _inside(x, distance, region, data, alpha).double().mean(1)
    if "density" in wanted:
        cell = ((x + m.limit) * (m.bins / (2 * m.limit))).floor()
        inside = ((cell >= 0) & (cell < m.bins)).all(-1)
        where = cell.nan_to_num().clamp(0, m.bins - 1).long()
        where = where[..., 0] if data.d == 1 else where[..., 1] * m.bins + where[..., 0]
        counts = x.new_zeros(len(x), m.bins**data.d).scatter_add_(1, where, inside.double())
        density = counts / x.shape[1] * (m.bins / (2 * m.limit)) ** data.d
        found["density"] = density.reshape(len(x), *wanted["density"].shape)
    if "sample" in wanted:
        found["sample"] = x[:, : m.keep].clone()
    lost = ~x.isfinite().flatten(1).all(1)
    for value in found.values():
        value[lost] = torch.nan
    return found


def _inside(x: Tensor, nearest: Tensor, region: Region, data: Empirical, alpha: float) -> Tensor:
    """Return whether each of ``x (M, n, d)`` is in a region; ``nearest (M, n)`` are distances to training points."""
    inside, size = torch.ones_like(nearest, dtype=torch.bool), x.norm(dim=-1)
    if region.norm is not None:
        inside &= (size > region.norm[0]) & (size < region.norm[1])
    if region.away is not None:
        inside &= nearest > region.away
    if region.beside is not None:
        points = alpha * data.rows(0, data.n).reshape(data.n, data.d).to(x)
        along, away = points.roll(-1, 0) - points, x[..., None, :] - points
        share = (away * along).sum(-1) / along.square().sum(-1)
        inside &= (away - share.clamp(0, 1)[..., None] * along).norm(dim=-1).amin(-1) < region.beside
    if region.around is not None and region.within is not None:
        inside &= (x - torch.tensor(region.around).to(x)).norm(dim=-1) < region.within
    return inside


def _least(data: Empirical) -> float:
    """Return the least distance of distinct training points, or 1 where there is only one."""
    points = data.merged()[0]
    rows = points.rows(0, points.n).double().reshape(points.n, data.d)
    return float(nearest(rows, points, 2)[0][:, 1].min()) if points.n > 1 else 1.0
