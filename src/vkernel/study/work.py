r"""One block of one condition: train its members, sample them, keep numbers. A pure function of (study, cell, block).

Kept of every member, from samples :math:`x` that start at the same places for all:

==============  =================================================================================================
``away``        share of samples farther than ``measure.away`` × half the least distance of training points from
                every training point (at :math:`\alpha_\epsilon y`)
``gap``         :math:`P(a < |x| < b)` in one dimension, if ``measure.gap = [a, b]``
``nearest``     mean distance to the nearest training point
``share``       share of samples nearest to each training point
``density``     histogram over ± ``measure.limit``, in one or two dimensions
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
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from vkernel import kernels
from vkernel.core import rng
from vkernel.core.covariance import Factored
from vkernel.core.errors import InputError, require
from vkernel.data.empirical import Empirical
from vkernel.data.loaders import load
from vkernel.data.toys import toy
from vkernel.metrics import nearest
from vkernel.process import Process
from vkernel.process import from_spec as make_process
from vkernel.sample import effective_sde, naive, pf_ode, semiclassical
from vkernel.sample.scores import Scores
from vkernel.score.base import Score, Time
from vkernel.score.empirical import EmpiricalScore
from vkernel.study.spec import WITHOUT_MODEL, Condition, Lookup, Region, Spec
from vkernel.train import features, models
from vkernel.train.ensemble import Ensemble, train_ensemble
from vkernel.train.models.base import Model
from vkernel.train.objectives import J0, JC, JK

T = TypeVar("T")
MOST_POINTS = 64  # training points whose shares are kept


class Quantity:
    """A labelled array of the store beyond factors and members: dimensions, their coordinates, and what it means."""

    def __init__(self, about: str, unit: str = "", **coordinates: np.ndarray) -> None:
        self.about, self.unit, self.coordinates = about, unit, coordinates

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(c) for c in self.coordinates.values())


def layout(spec: Spec) -> dict[str, Quantity]:
    """Return the quantities that a study keeps; all its training sets must have events of one shape."""
    sets = datasets(spec)
    shapes = {data.shape for data in sets}
    require(len(shapes) == 1, f"All training sets of a study must have events of one shape; got {sorted(shapes)}.")
    d, most, m = math.prod(shapes.pop()), max(data.n for data in sets), spec.measure
    found: dict[str, Quantity] = {}
    if m.times and m.places:
        require(d == 1, f"measure.times and measure.places keep scores in one dimension; the data have {d}.")
        places = np.linspace(-m.limit, m.limit, m.places)
        found["score"] = Quantity("score", "1 / unit of x", time=np.asarray(m.times), place=places)
    if not any(c.sampler.samples for c in spec.conditions()):
        return found
    found["away"] = Quantity("share of samples away from every training point")
    found["nearest"] = Quantity("mean distance to the nearest training point", "unit of x")
    if most <= MOST_POINTS:
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
            problem = Problem(spec, condition)
            o, d, n = condition.objective, problem.data.d, problem.data.n
            assert isinstance(problem.model, Model)  # made here for the first time
            good = o.of != "subset" or math.inf == o.K or n >= o.K
            require(good, f"objective.K: a subset of {o.K:g} points needs as many; the data have {n}.")
            require(
                condition.sampler.lookup is None or d == 1, f"sampler.lookup is for one dimension; the data have {d}."
            )
            for t in condition.measure.times:
                problem.process.check(t)
        except InputError as error:
            raise InputError(f"Where {condition}: {error}" if spec.grid else str(error)) from None
    numbers = [name for name, quantity in layout(spec).items() if not quantity.shape]
    for table, part in (("figure", spec.figure), ("finding", spec.finding)):
        if part is not None and part.value not in numbers:
            raise InputError(f"{table}.value: the study keeps {', '.join(numbers)} of each member, not {part.value!r}.")
    for cell in (spec.finding.of, spec.finding.to) if spec.finding else ():
        for factor in spec.grid:
            good = factor.dim not in cell or cell[factor.dim] in factor.coordinate
            require(good, f"finding: {factor.dim} has no value {cell.get(factor.dim)!r}; it has {factor.coordinate}.")


def compute(spec: Spec, condition: Condition, block: int) -> dict[str, np.ndarray]:
    """Return the quantities of the members of a block, ``(members, …)``, computed with ``spec.threads`` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(spec.threads)  # the order of sums, and with it the last bit, depends on it
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # members that diverged are NaN in the store
            found = _compute(Problem(spec, condition, _device(spec)), spec.members_of(block))
    finally:
        torch.set_num_threads(before)
    return {name: value.cpu().numpy().astype(np.float64) for name, value in found.items()}


def _compute(problem: Problem, members: range) -> dict[str, Tensor]:
    spec, m, n = problem.spec, problem.condition.measure, problem.condition.sampler.samples
    wanted = _last("layout", spec.to_json(), lambda: layout(spec))
    scores, sample = _law(problem, members)
    dtype = scores.dtype if isinstance(scores, Scores) else torch.float64
    found: dict[str, Tensor] = {}
    if n:
        x = sample(problem.start(n).to(dtype)).double()
        found = _measure(x.expand(len(members), *x.shape[1:]).flatten(2), problem, wanted)
    if "score" in wanted:
        places = torch.linspace(-m.limit, m.limit, m.places, dtype=torch.float64, device=problem.device)[:, None]
        values = [scores(places.to(dtype), t)[..., 0].double() for t in m.times]
        found["score"] = torch.stack(values, -2).expand(len(members), -1, -1)
    return found


# The objects of a condition


@dataclass(frozen=True)
class Problem:
    """What the tables of a condition stand for: a training set, a process, a model, and how it is trained."""

    spec: Spec
    condition: Condition
    device: str = "cpu"

    @functools.cached_property
    def data(self) -> Empirical:
        return make_data(self.condition).to(self.device)

    @functools.cached_property
    def process(self) -> Process:
        try:
            return make_process(self.condition.process.model_dump())
        except InputError as error:
            raise InputError(f"process: {error}") from None

    @functools.cached_property
    def model(self) -> Model:
        m, d, process = self.condition.model, self.data.d, self.process
        if m.kind == "linear":
            if m.features != "random":
                found: features.Features = features.grid(m.features, m.per_axis, d, m.low, m.high, process)
            else:
                found = features.random_fourier(m.per_axis ** (d + 1), d, process, length=m.length, generator=0)
            return models.Linear(found, m.target, m.ridge)
        if m.kind == "lazy":
            deep: dict[str, Any] = {"depth": m.depth, "activation": m.activation or "relu", "init_width": m.init_width}
            kinds = {"ntk": models.NTK, "nngp": models.NNGP}
            kernel = models.RBF(m.length) if m.kernel == "rbf" else kinds[m.kernel](**deep)
            return models.Lazy(kernel, m.tau, m.target, init=m.init)
        how: dict[str, Any] = {"lr": m.lr, "batch": m.batch, "steps": m.steps, "decay": m.decay}
        return models.MLP(m.width, m.depth, target=m.target, activation=m.activation or "silu", **how)

    @property
    def training(self) -> dict[str, Any]:
        """Arguments of ``train_ensemble``, and of the V-kernel that predicts the ensemble."""
        table, o, draws = self.condition.training, self.condition.objective, self.condition.training.draws
        if table.F_over_P is not None:
            assert isinstance(self.model, models.Linear)
            draws = max(1, round(self.model.features.count / table.F_over_P))
        objective = JC(o.c) if o.c is not None else J0() if math.inf == o.K else JK(int(o.K), o.of)
        return {"draws": draws, "objective": objective, "vary": table.vary, "times": table.times}

    @functools.cached_property
    def sha256(self) -> str:
        return fingerprint([self.data])

    @property
    def key(self) -> str:
        """A line that is the same for conditions that train the same models on the same device."""
        tables = [t.model_dump_json() for t in self.condition.trained]
        return json.dumps([self.spec.seed, self.spec.threads, self.device, self.sha256, *tables])

    def start(self, n: int) -> Tensor:
        """Return x_T, the same for all members: evenly spread in up to 8 dimensions, random beyond."""
        z = rng.quasi_normals(n, self.data.d, rng.key(self.spec.seed, "study/x_T") % 2**31)
        sigma = self.process.sigma(torch.tensor(self.process.T, dtype=torch.float64))
        return (sigma * z).reshape(n, *self.data.shape).to(self.device)


def make_data(condition: Condition) -> Empirical:
    """Return the training set of a condition."""
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


def datasets(spec: Spec) -> list[Empirical]:
    """Return the training sets of a study, each once."""
    tables = {c.data.model_dump_json(): c for c in spec.conditions()}
    return [make_data(c) for c in tables.values()]


def fingerprint(sets: list[Empirical]) -> str:
    """Return a hash of all points and weights."""
    found = hashlib.sha256()
    for data in sets:
        found.update(repr((data.n, data.shape)).encode())
        for start in range(0, data.n, 4096):
            found.update(data.rows(start, min(start + 4096, data.n)).double().cpu().contiguous().numpy().tobytes())
        found.update(data.weights.double().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def _device(spec: Spec) -> str:
    good = spec.device != "cuda" or torch.cuda.is_available()
    require(good, "device: there is no CUDA device where the blocks are computed; give device = 'cpu' or 'auto'.")
    return "cuda" if spec.device != "cpu" and torch.cuda.is_available() else "cpu"


_LAST = threading.local()


def _last(kind: str, key: str, make: Callable[[], T]) -> T:
    """Return what the block before, in this thread, made under the same key, or make it anew."""
    held: dict[str, tuple[str, Any]] = vars(_LAST)
    if held.get(kind, ("", None))[0] != key:
        held[kind] = (key, make())
    found: T = held[kind][1]
    return found


# Laws


def _law(problem: Problem, members: range) -> tuple[Scores | Score, Callable[[Tensor], Tensor]]:
    """Return the scores of the members, and the function that samples them from x_T; one score is for all members."""
    s, seed = problem.condition.sampler, problem.spec.seed
    steps: dict[str, Any] = {"steps": s.steps, "spacing": s.spacing}
    if s.law in WITHOUT_MODEL:
        exact = EmpiricalScore(problem.data, problem.process)
        if s.law == "exact":
            return exact, lambda x_T: _flow(problem, exact, x_T)
        kappa, V = s.kappa or 0.0, kernels.Naive(exact, s.kappa or 0.0)

        def noisy(x_T: Tensor) -> Tensor:
            streams = [rng.stream(seed, "study/noise", m) for m in members]
            if s.law == "naive":
                return torch.stack([_tensor(effective_sde(V, x_T, generator=g, **steps)) for g in streams])
            return torch.stack([_tensor(naive(exact, x_T, kappa=kappa, generator=g, **steps)) for g in streams])

        return exact, noisy
    if s.law in ("members", "mean"):
        trained = _trained(problem, range(s.sets) if s.law == "mean" else members)
        score = trained.mean_score if s.law == "mean" else trained
        return score, lambda x_T: _flow(problem, score, x_T)
    theory = _last("kernel", f"{s.sets} {problem.key}", lambda: _kernel(problem))
    z = torch.stack(
        [
            rng.randn((len(theory.root),), rng.stream(seed, "study/field", m), theory.root.device, torch.float64)
            for m in members
        ]
    )
    # mean plus field is a linear model again, with random weights
    weights = theory.mean_weights + (z @ theory.root).reshape(len(z), *theory.mean_weights.shape)
    fields = Ensemble(problem.model, {"weights": weights}, problem.process, problem.data.shape)
    if s.law == "field":
        return fields, lambda x_T: _flow(problem, fields, x_T)

    def linearised(x_T: Tensor) -> Tensor:
        mean, cov = semiclassical(theory, x_T, **steps)
        assert isinstance(cov, Factored)
        return _tensor(mean) + torch.einsum("mf,f...->m...", z, cov.factors)

    return fields, linearised


def _trained(problem: Problem, members: range) -> Ensemble:
    """Train the members, or return those of the block before where only sampler and measures differ."""
    how = {"members": list(members), "seed": problem.spec.seed, **problem.training}
    return _last(
        "ensemble",
        f"{members} {problem.key}",
        lambda: train_ensemble(problem.model, problem.data, problem.process, **how),
    )


def _kernel(problem: Problem) -> kernels.Linear:
    """The V-kernel that theory predicts for the models of a condition, from inputs that they have not seen."""
    assert isinstance(problem.model, models.Linear)
    how = problem.training | {"seed": problem.spec.seed + 1, "sets": problem.condition.sampler.sets}
    return kernels.Linear(problem.model, problem.data, problem.process, **how)


def _flow(problem: Problem, scores: Scores | Score, x_T: Tensor) -> Tensor:
    """The probability-flow ODE of each score from ``x_T (n, *shape)``: ``(M, n, *shape)``, M = 1 for one score."""
    s = problem.condition.sampler
    how: dict[str, Any] = {"steps": s.steps, "method": s.method, "spacing": s.spacing}
    if isinstance(scores, Score):
        if s.lookup is not None:
            return _tensor(pf_ode(LookedUp(scores, s.lookup), x_T[None], **how))
        return _tensor(pf_ode(scores, x_T, **how))[None]
    x = x_T.new_full((len(scores), *x_T.shape), torch.nan)
    if len(scores.diverged) == len(scores):
        return x
    if s.lookup is None:
        return scores.sample(x_T=x_T, **how)
    alive = [m for m in range(len(scores)) if m not in set(scores.diverged)]
    x[alive] = _tensor(pf_ode(LookedUp(scores.finite, s.lookup), x_T.expand(len(alive), *x_T.shape), **how))
    return x


def _tensor(x: object) -> Tensor:
    assert isinstance(x, Tensor)
    return x


class LookedUp(Score):
    """Scores of numbers whose denoisers are read from a table; ``x (M, n, 1)`` are the places of each member."""

    def __init__(self, scores: Scores | Score, lookup: Lookup) -> None:
        self.scores, self.lookup, self.process, self.shape = scores, lookup, scores.process, (1,)

    def denoise(self, x: Tensor, t: Time) -> Tensor:
        limit, last = self.lookup.limit, self.lookup.nodes - 1
        nodes = torch.linspace(-limit, limit, last + 1, dtype=x.dtype, device=x.device)[:, None]
        alpha, var = (a.to(x) for a in self.levels(torch.as_tensor(t)))
        table = ((nodes + var * self.scores(nodes, t)) / alpha).reshape(-1, last + 1)
        place = (x[..., 0] + limit) * (last / (2 * limit))
        if self.lookup.read == "right":
            return table.gather(1, place.ceil().clamp(0, last).long())[..., None]
        place = place.clamp(0, last)
        below = place.floor().clamp(max=last - 1).long()
        left, right = (table.gather(1, below + k) for k in (0, 1))
        return (left + (right - left) * (place - below))[..., None]

    def __call__(self, x: Tensor, t: Time) -> Tensor:
        alpha, var = (a.to(x) for a in self.levels(torch.as_tensor(t)))
        return (alpha * self.denoise(x, t) - x) / var


# Measures


def _measure(x: Tensor, problem: Problem, wanted: dict[str, Quantity]) -> dict[str, Tensor]:
    """Return the quantities of samples ``x (M, n, d)``."""
    data, m = problem.data, problem.condition.measure
    alpha = float(problem.process.alpha(torch.tensor(problem.process.eps, dtype=torch.float64)))
    near = nearest(x.nan_to_num(posinf=0, neginf=0).reshape(-1, data.d) / alpha, data, 1)
    distance, index = (part.reshape(x.shape[:2]) for part in (alpha * near[0], near[1]))
    radius = m.away * alpha * _last("least", problem.sha256, lambda: _least(data)) / 2
    found = {"away": (distance > radius).double().mean(1), "nearest": distance.mean(1)}
    if "share" in wanted:
        counts = torch.zeros(len(x), wanted["share"].shape[0], dtype=torch.float64, device=x.device)
        found["share"] = counts.scatter_add_(1, index, torch.ones_like(distance)) / x.shape[1]
        found["share"][:, data.n :] = torch.nan
    regions = dict(m.regions) if m.gap is None else {"gap": Region(norm=m.gap), **m.regions}
    for name, region in regions.items():
        found[name] = _inside(x, distance, region, data, alpha).double().mean(1)
    if "density" in wanted:
        cell = ((x + m.limit) * (m.bins / (2 * m.limit))).floor()
        inside = ((cell >= 0) & (cell < m.bins)).all(-1)
        where = cell.nan_to_num().clamp(0, m.bins - 1).long()
        where = where[..., 0] if data.d == 1 else where[..., 1] * m.bins + where[..., 0]
        counts = torch.zeros(len(x), m.bins**data.d, dtype=torch.float64, device=x.device)
        density = counts.scatter_add_(1, where, inside.double()) / x.shape[1] * (m.bins / (2 * m.limit)) ** data.d
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
        along = points.roll(-1, 0) - points
        share = ((x[..., None, :] - points) * along).sum(-1) / along.square().sum(-1)
        off = (x[..., None, :] - points - share.clamp(0, 1)[..., None] * along).norm(dim=-1)
        inside &= off.amin(-1) < region.beside
    if region.around is not None and region.within is not None:
        inside &= (x - torch.tensor(region.around).to(x)).norm(dim=-1) < region.within
    return inside


def _least(data: Empirical) -> float:
    """Return the least distance of distinct training points, or 1 where there is only one."""
    points = data.merged()[0]
    rows = points.rows(0, points.n).double().reshape(points.n, data.d)
    return float(nearest(rows, points, 2)[0][:, 1].min()) if points.n > 1 else 1.0
