r"""The runs of the page, by the public API: what a score samples, and how much of that is copied (theory, §4–9).

All samplers step through the same times, even in :math:`\log(\sigma/\alpha)`. Beside each run with noisy targets a
*twin* has the same inputs and exact targets: the ratio of their gap masses is the effect of the target noise. The
twin of the effective SDE is V without its target-noise term, that of the naive estimator is :math:`\kappa = 0`.
The *average* is one deterministic flow along :math:`\bar s`, the mean of the scores of all linear models: what it
puts between training points is bias, and what the models add to that is variance.
The *gap mass* is the share of samples that copy no training point, :math:`1 -`
:func:`~vkernel.metrics.memorised_fraction`: the nearest point is more than a third as far as the second nearest. On
{-1, 0, 1} that is P(.25 < ``|x|`` < .75) plus the mass beyond 1.5."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

import vkernel as vk
from vkernel.core.errors import require
from vkernel.explore.state import CONTENT, CONTROLS, LIMIT, SAMPLERS, State
from vkernel.sample import Solution

Report = Callable[[str, float], None]  # what is being done, and which share of the whole is done
QUERIES, SETS, LAZY_DRAWS = 1024, 16, 128  # of the noise fraction, of the prediction of V, of wide networks
PER_AXIS = {1: 16, 2: 8}  # features per axis, by dimension
SPAN, RIDGE = 1.5, 0.1  # of the features, as in the paper
ALONE, PARTICLES, SHOWN = 2048, 240, 6  # samples without members, those shown as particles, members shown singly
BINS = {1: 120, 2: 48}
MEMBERS, EACH, SHOWN_EACH = (CONTENT["sizes"][k] for k in ("members", "each", "shown_each"))
LINEAR = ("linear", "average", "effective")  # samplers that rest on linear models
NETWORK: dict[str, Any] = CONTENT["sizes"]["network"]
VIEW: dict[str, Any] = {"map": "none", "layers": (), "compare": False, "outcome": False, "dark": False}


@dataclass(frozen=True, eq=False)
class Result:
    """The outcome of one run. Laws are densities on the window, ``(bins,)`` or ``(bins, bins)`` like a map."""

    state: State
    times: np.ndarray  # (S + 1,)
    frames: np.ndarray  # (S + 1, N, d), the paths of the particles
    law: np.ndarray
    band: np.ndarray  # the standard error of the law
    exact: np.ndarray  # the law of the exact score
    members: np.ndarray  # laws of single models, (k, …)
    gap: vk.Estimate | None  # the gap mass of the samples; None for one training point
    twin: vk.Estimate | None
    exact_gap: vk.Estimate | None
    twin_law: np.ndarray | None = None
    twin_frames: np.ndarray | None = None
    member_gaps: np.ndarray | None = None  # the gap mass of each model, (M,)
    note: str = ""
    learned: vk.Ensemble | vk.kernels.Linear | None = None  # from which V is evaluated
    precomputed: bool = False


def models(state: State, result: Result | None) -> vk.Ensemble | vk.kernels.Linear | None:
    """Return the models of a run, if they can be evaluated at the places and times of a state."""
    if result is None or result.learned is None:
        return None
    own = result.state
    return result.learned if (own.d, own.process, own.eps) == (state.d, state.process, state.eps) else None


def empirical(state: State) -> vk.Empirical:
    """Build the training set."""
    return vk.Empirical(np.array(state.points, dtype=np.float64), state.weights)


def grid(d: int, count: int) -> Tensor:
    """Return the nodes of a grid over the window, ``(count^d, d)``, in the plane with rows along coordinate two."""
    line = torch.linspace(-LIMIT, LIMIT, count, dtype=torch.float64)
    return torch.stack(torch.meshgrid(*[line] * d, indexing="xy"), -1).reshape(-1, d)


def noise_share(state: State) -> vk.Estimate:
    """Estimate which share of the training target is noise at the state's t."""
    found = vk.noise_fraction(empirical(state), state.make_process(), state.t, queries=QUERIES, generator=state.seed)
    return vk.Estimate(*map(float, found.fields))


def run_inputs(state: State) -> State:
    """Reset the fields that a run does not depend on: states with equal inputs have the same result."""
    default = vars(State())
    unused = {name: default[name] for name, c in CONTROLS.items() if state.sampler not in c.get("samplers", SAMPLERS)}
    return replace(state, **unused, **VIEW, t=state.make_process().T)


def key(state: State) -> str:
    """Return a hash of the inputs of a run and of the sizes of the page: equal keys have equal results."""
    sizes = (PER_AXIS, SETS, LAZY_DRAWS, ALONE, PARTICLES, SHOWN, BINS, MEMBERS, EACH, SHOWN_EACH, NETWORK)
    inputs = {name: v for name, v in run_inputs(state).to_dict().items() if name not in (*VIEW, "t", "version")}
    text = json.dumps([inputs, sizes], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def model(state: State) -> vk.models.Linear | vk.models.Lazy | vk.models.MLP:
    """Build the model that is trained."""
    if state.sampler == "ntk":
        return vk.models.Lazy(vk.models.NTK(depth=2, activation="relu"), tau=state.tau)
    if state.sampler == "mlp":
        return vk.models.MLP(**NETWORK)
    basis = vk.features.grid(state.features, PER_AXIS[state.d], state.d, -SPAN, SPAN, state.make_process())
    return vk.models.Linear(basis, "x0", RIDGE)


def theory(state: State) -> vk.Score:
    """Build a score in closed form: the exact one, or that of a theory of what models learn."""
    data, process = empirical(state), state.make_process()
    match state.sampler:
        case "gaussian":
            return vk.theories.Gaussian(data, process)
        case "smoothed":
            return vk.theories.Smoothed(data, process, h=state.h)
        case "nearest":
            return vk.theories.Nearest(data, process, k=neighbours(state))
        case "switch":
            return vk.theories.Switch(
                vk.theories.Gaussian(data, process), vk.EmpiricalScore(data, process), at=state.at
            )
    return vk.EmpiricalScore(data, process)


def neighbours(state: State) -> int:
    """Return k, at most the number of training points."""
    return min(state.k, len(state.points))


def draws(state: State) -> int | None:
    """Return P, the noised points that a member is trained on; ``None`` for fresh ones at every step."""
    return {"ntk": LAZY_DRAWS, "mlp": None}.get(state.sampler, round(PER_AXIS[state.d] ** (state.d + 1) / state.ratio))


def members(state: State) -> int:
    """Return the number of models that are trained."""
    kind = "linear" if state.sampler == "average" else state.sampler
    return MEMBERS.get(kind, 0) * (2 if kind == "linear" and state.d == 1 else 1)


def member(result: Result, k: int) -> tuple[np.ndarray, float | None]:
    """Return the law of one model of a run and its gap mass."""
    state, learned = result.state, result.learned
    assert isinstance(learned, vk.Ensemble)
    each = SHOWN_EACH["linear" if state.sampler == "average" else state.sampler]
    x = learned.select([k]).sample(each, steps=state.steps, seed=state.seed + 1)[0]
    run = _Run(state, lambda label, share: None)
    gap = run.gap(x)
    return run.law(x)[0], None if gap is None else gap.value


def learn(state: State, report: Report) -> vk.Ensemble | vk.kernels.Linear | None:
    """Train the models of a run, or predict V, without sampling."""
    return _Run(state, report).learned()


def simulate(state: State, report: Report = lambda label, share: None) -> Result:
    """Run the state's sampler; an exception raised by ``report(label, share)`` ends the run."""
    run = _Run(state, report)
    run.exact  # noqa: B018  # first, since it is quick
    if state.sampler == "effective":
        return run.effective()
    if state.sampler == "average":
        return run.average()
    return run.ensemble() if members(state) else run.alone()


def as_path(of: Solution) -> Tensor:
    """Return the paths, which were saved."""
    assert of.path is not None
    return of.path


def frames(of: Solution) -> np.ndarray:
    """Return the paths that are drawn, ``(S + 1, PARTICLES, d)``."""
    return as_path(of)[:, :PARTICLES].float().numpy()


class _Run:
    """One run of a state's sampler; ``report`` is called after each step and raises to cancel."""

    def __init__(self, state: State, report: Report) -> None:
        self.state, self.report, self.seed = state, report, state.seed
        self.data, self.process = empirical(state), state.make_process()
        self.objective = vk.JK(state.K) if state.K > 1 else f"J{state.K}"
        self.score = vk.EmpiricalScore(self.data, self.process)
        self.x_T = self.process.prior((ALONE, state.d), dtype=torch.float64, generator=self.seed)

    def part(self, label: str, start: float, stop: float) -> Report:
        """Return a report for a part of the run, from the share ``start`` to the share ``stop`` of the whole."""
        self.report(label, start)
        return lambda _, share: self.report(label, start + (stop - start) * share)

    def solve(self, part: Report, solver: Callable[..., Any], *args: Any, **given: Any) -> Solution:
        """Return the end points and the paths of one of the samplers of the library."""
        return cast(Solution, solver(*args, steps=self.state.steps, save="path", progress=part, **given))

    @cached_property
    def exact(self) -> Solution:
        """What the exact score samples."""
        return self.solve(self.part("the exact score", 0.0, 0.1), vk.sample.pf_ode, self.score, self.x_T)

    def alone(self) -> Result:
        if self.state.sampler == "exact":
            return self.result(self.exact)
        part = self.part("sampling", 0.1, 0.95)
        if self.state.sampler != "naive":
            return self.result(self.solve(part, vk.sample.pf_ode, theory(self.state), self.x_T))
        kappa = self.state.kappa
        found = self.solve(part, vk.sample.naive, self.score, self.x_T, kappa=kappa, generator=self.seed)
        return self.result(found, self.exact if kappa > 0 else None)

    def learned(self) -> vk.Ensemble | vk.kernels.Linear | None:
        if self.state.sampler == "effective":
            return self.kernel()
        return self.train(self.objective, "models", 0.1, 0.95) if members(self.state) else None

    def kernel(self) -> vk.kernels.Linear:
        """Predict V."""
        learner, P, part = model(self.state), draws(self.state) or 0, self.part("predicting V", 0.1, 0.7)
        assert isinstance(learner, vk.models.Linear)
        given: dict[str, Any] = {"objective": self.objective, "draws": P, "seed": self.seed, "sets": SETS}
        return vk.kernels.Linear(learner, self.data, self.process, progress=part, **given)

    def effective(self) -> Result:
        V = self.kernel()
        part, twin = self.part("the effective SDE", 0.7, 0.85), None
        found = self.solve(part, vk.sample.effective_sde, V, self.x_T, generator=self.seed)
        if self.state.K != 0:
            part = self.part("the same without noise of the target", 0.85, 0.95)
            twin = self.solve(part, vk.sample.effective_sde, V.only("misfit"), self.x_T, generator=self.seed)
        return self.result(found, twin, note="" if V.valid else f"The prediction of V warns: {V.why}.", learned=V)

    def average(self) -> Result:
        half, twin = 0.95 if self.state.K == 0 else 0.5, None
        found = self.train(self.objective, "models", 0.1, half - 0.1)
        own = self.flow(found, half - 0.1, half)
        if self.state.K != 0:
            twin = self.flow(self.train("J0", "twins with exact targets", half, 0.85), 0.85, 0.95)
        return self.result(own, twin, learned=found)

    def flow(self, of: vk.Ensemble, start: float, stop: float) -> Solution:
        """Sample along the mean score of the models."""
        part = self.part("sampling the average", start, stop)
        return self.solve(part, vk.sample.pf_ode, of.mean_score, self.x_T)

    def ensemble(self) -> Result:
        half = 0.95 if self.state.K == 0 else 0.5
        found = self.train(self.objective, "models", 0.1, half - 0.15)
        own, note = self.sample(found, "models", half - 0.15, half - 0.05)
        part, few = self.part("sampling single models", half - 0.05, half), found.select(range(len(found))[:SHOWN])
        single = few.sample(SHOWN_EACH[self.state.sampler], steps=self.state.steps, seed=self.seed + 1, progress=part)
        single, twin = single[single.isfinite().flatten(1).all(1)], None
        if self.state.K != 0:
            name = "twins with exact targets"
            twin, _ = self.sample(self.train("J0", name, half, 0.85), name, 0.85, 0.95)
        return self.result(own, twin, single, note=note, learned=found)

    def train(self, objective: str | vk.JK, name: str, start: float, stop: float) -> vk.Ensemble:
        """Train the members."""
        count, part = members(self.state), self.part(f"training {members(self.state)} {name}", start, stop)
        given: dict[str, Any] = {"members": count, "draws": draws(self.state), "seed": self.seed}
        return vk.train_ensemble(
            model(self.state), self.data, self.process, objective=objective, progress=part, **given
        )

    def sample(self, of: vk.Ensemble, name: str, start: float, stop: float) -> tuple[Solution, str]:
        """Sample every model, and integrate a few particles of each from a start of their own; leave out models that
        diverge, and say so."""
        part = self.part(f"sampling {len(of)} {name}", start, stop)
        x = of.sample(EACH[self.state.sampler], steps=self.state.steps, seed=self.seed, progress=part)
        good = x.isfinite().flatten(1).all(1)
        require(good.any(), "Every model diverged while sampling: take more steps, a larger eps, or another process.")
        note = "" if good.all() else f"{int((~good).sum())} of {len(x)} models diverged and are left out."
        part, n = self.part("particles", stop, stop), math.ceil(PARTICLES / len(of))
        found = self.solve(part, of.sample, n, seed=self.seed, shared=False)
        path = as_path(found).transpose(1, 2).flatten(1, 2)
        return Solution(x[good], found.times, path[:, path.isfinite().all(-1).all(0)]), note

    def result(self, own: Solution, twin: Solution | None = None, single: Iterable[Tensor] = (), **rest: Any) -> Result:
        """Measure samples ``(n, d)`` or ``(M, n, d)`` and paths, those of the twin, and samples of single models."""
        self.report("laws", 0.97)
        laws = (*self.law(own.x), self.law(self.exact.x)[0], np.array([self.law(member)[0] for member in single]))
        gap, exact_gap = self.gap(own.x), self.gap(self.exact.x)
        if twin is not None:
            rest |= {"twin_law": self.law(twin.x)[0], "twin_frames": frames(twin)}
        if own.x.ndim == 3 and gap is not None:
            rest["member_gaps"] = np.array([1 - vk.metrics.memorised_fraction(one, self.data).value for one in own.x])
        gaps = (gap, None if twin is None else self.gap(twin.x), exact_gap)
        return Result(self.state, own.times.numpy(), frames(own), *laws, *gaps, **rest)

    def gap(self, x: Tensor) -> vk.Estimate | None:
        return None if self.data.merged()[0].n < 2 else vk.metrics.memorised_fraction(x, self.data).complement()

    def law(self, x: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return the average density on the window and its standard error, rows along the second coordinate."""
        density, _ = vk.metrics.histogram(x, BINS[self.state.d], (-LIMIT, LIMIT), normalise="all")
        value, error = (torch.as_tensor(f).float().numpy().T for f in (density.value, density.se))
        return value, error
