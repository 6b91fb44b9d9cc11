r"""The numbers of the page: exact maps at one time, and runs of a sampler (docs/theory.md, §2).

Maps are evaluated on a grid from :class:`~vkernel.score.empirical.EmpiricalScore`: the share of the target that is
noise, the score and, on the line, the density,

.. math:: \frac{\mathrm{tr}\,C}{\mathrm{tr}\,C + |s|^2}, \qquad s(x,t), \qquad p(x|t) .

*Boundary lines* outline the region that :func:`vkernel.metrics.boundary_mass` counts: the target is mostly noise and
the score pushes samples apart, :math:`\mathrm{tr}\,C > |s|^2` and :math:`\mathrm{tr}\,C > 1/\sigma^2`.

All samplers step through the same times, even in :math:`\log(\sigma/\alpha)`. Beside each ensemble a *twin* ensemble
is trained on the same inputs with noiseless targets: the ratio of their gap masses is the effect of the target noise.
The twin of the naive estimator is :math:`\kappa = 0`; that of the effective SDE is V without its target-noise term.

The *gap mass* is the share of samples that copy no training point, :math:`1 -`
:func:`~vkernel.metrics.memorised_fraction`: the nearest point is more than a third as far as the second nearest. On
{-1, 0, 1} that is P(.25 < ``|x|`` < .75) plus the mass beyond 1.5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vkernel import kernels, sample
from vkernel.core.errors import InputError, require
from vkernel.core.estimate import Estimate
from vkernel.data.empirical import Empirical
from vkernel.explore.jobs import Report
from vkernel.explore.state import LIMIT, State
from vkernel.metrics import histogram, memorised_fraction
from vkernel.score import EmpiricalScore, as_score, noise_fraction
from vkernel.train import features, models
from vkernel.train.ensemble import Ensemble, train_ensemble
from vkernel.train.models.base import Model
from vkernel.train.objectives import JK, Objective, parse

__all__ = ["Exact", "Result", "exact", "noise_share", "run_inputs", "simulate", "variance"]

CELLS, NODES, ARROWS = 100, 401, 17  # of the map per axis, on the line, of the arrows per axis
QUERIES = 1024  # of the noise fraction
PER_AXIS = {1: 16, 2: 8}  # features per axis, by dimension
SPAN, RIDGE = 1.5, 0.1  # of the features, as in the paper
MEMBERS = {"linear": 48, "ntk": 12, "mlp": 8}  # in the plane; twice as many linear models on the line
EACH = {"linear": 400, "ntk": 64, "mlp": 256}  # samples per member
SHOWN, SHOWN_EACH = 6, {"linear": 1024, "ntk": 64, "mlp": 1024}  # members shown singly, and their samples
ALONE = 2048  # samples without members
LAZY_DRAWS, SETS, PARTICLES = 128, 16, 240
BINS = {1: 120, 2: 48}
COARSE = {"linear": 64, "effective": 50, "ntk": 24, "mlp": 64}  # cells of the map of V per axis of the plane
NETWORK: dict[str, Any] = {
    "width": 48,
    "depth": 3,
    "target": "noise",
    "lr": 3e-3,
    "batch": 128,
    "steps": 600,
    "ema": 0.99,
}


@dataclass(frozen=True)
class Exact:
    """The exact quantities at one time, as arrays to be drawn.

    ``fraction`` is ``(CELLS, CELLS)``, rows along the second coordinate, or ``(NODES,)`` on the line; ``arrows``
    ``(4, k)`` holds x, y of the tails and of the heads; ``lines`` are polygons ``(2, m)``, on the line single places;
    ``density`` is p(x|t) on the line, ``None`` in the plane.
    """

    fraction: np.ndarray
    arrows: np.ndarray
    lines: list[np.ndarray]
    density: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Result:
    """The outcome of one run.

    ``times (S + 1,)`` and ``frames (S + 1, N, d)`` are the particles' paths; ``law``, ``exact`` and ``members`` are
    densities on the window, ``(bins,)`` or ``(bins, bins)`` with rows along the second coordinate; ``band`` is the
    standard error of ``law``. ``gap``, ``twin`` and ``exact_gap`` are gap masses of the samples, of the twin and of the
    exact score, or ``None``. ``learned`` is the ensemble or the kernel from which V is evaluated.
    """

    state: State
    times: np.ndarray
    frames: np.ndarray
    law: np.ndarray
    band: np.ndarray
    exact: np.ndarray
    members: tuple[np.ndarray, ...]
    gap: Estimate | None
    twin: Estimate | None
    exact_gap: Estimate | None
    note: str = ""
    learned: Ensemble | kernels.Linear | None = None


def empirical(state: State) -> Empirical:
    """Build the training set."""
    return Empirical(np.array(state.points, dtype=np.float64), state.weights)


def axis(count: int) -> Tensor:
    """Return evenly spaced coordinates over the window."""
    return torch.linspace(-LIMIT, LIMIT, count, dtype=torch.float64)


def grid(d: int, count: int) -> Tensor:
    """Return the nodes of a grid over the window, ``(count, 1)`` or ``(count², 2)`` with rows along coordinate two."""
    line = axis(count)
    if d == 1:
        return line[:, None]
    second, first = torch.meshgrid(line, line, indexing="ij")
    return torch.stack([first, second], -1).reshape(-1, 2)


def exact(state: State) -> Exact:
    """Evaluate noise fraction, score and boundaries at the state's t."""
    score = EmpiricalScore(empirical(state), state.make_process())
    count = NODES if state.d == 1 else CELLS
    x, shape = grid(state.d, count), (count,) * state.d
    s, C = score.with_covariance(x, state.t)
    trace = C.trace()
    fraction = trace / (trace + s.square().sum(-1)).clamp_min(1e-300)
    var = score.process.S(torch.tensor(state.t, dtype=torch.float64))
    level = torch.minimum(trace * var, 2 * fraction)  # above 1 where boundary_mass counts
    arrows = _arrows(score, state, var) if "arrows" in state.layers else np.zeros((4, 0))
    lines = _outline(level.reshape(shape).numpy()) if "boundaries" in state.layers else []
    density = score.posterior(x, state.t).logp.exp().numpy() if state.d == 1 else None
    return Exact(fraction.reshape(shape).numpy().astype(np.float32), arrows, lines, density)


def _arrows(score: EmpiricalScore, state: State, var: Tensor) -> np.ndarray:
    """Arrows along the score; their length, sigma² |s|, is shortened to fit the grid."""
    count = ARROWS if state.d == 2 else 2 * ARROWS - 1
    x, room = grid(state.d, count), 0.8 * 2 * LIMIT / (count - 1)
    step = var * score(x, state.t)
    size = step.norm(dim=-1, keepdim=True)
    half = step / size.clamp_min(1e-12) * room * torch.tanh(size / 0.5) / 2
    ends = [torch.nn.functional.pad(end, (0, 2 - state.d)) for end in (x - half, x + half)]
    return torch.cat(ends, 1).mT.numpy()


def _outline(values: np.ndarray) -> list[np.ndarray]:
    """The places where the values cross 1: polygons in the plane, single places on the line."""
    import contourpy

    line = axis(len(values)).numpy()
    if values.ndim == 2:
        return [np.asarray(part).T for part in contourpy.contour_generator(line, line, values).lines(1.0)]
    over = values - 1
    k = np.flatnonzero(over[:-1] * over[1:] < 0)
    places = line[k] + (line[k + 1] - line[k]) * over[k] / (over[k] - over[k + 1])
    return [np.array([[p, p], [0.0, 1.0]]) for p in places]


def noise_share(state: State) -> Estimate:
    """Estimate which share of the training target is noise at the state's t."""
    found = noise_fraction(empirical(state), state.make_process(), state.t, queries=QUERIES, generator=state.seed)
    return Estimate(*map(float, found.fields))


def run_inputs(state: State) -> State:
    """Reset the fields that a run does not depend on: states with equal inputs have the same result."""
    linear = state.sampler in ("linear", "effective")
    used = {
        "kappa": state.sampler == "naive",
        "features": linear,
        "ratio": linear,
        "tau": state.sampler == "ntk",
        "K": state.sampler not in ("exact", "naive"),
    }
    default = vars(State())
    unused = {name: default[name] for name, needed in used.items() if not needed}
    return replace(state, **unused, t=state.make_process().T, layers=(), dark=False)


def objective(state: State) -> Objective:
    """Return J0, J1 or J_K."""
    return parse(f"J{state.K}") if state.K < 2 else JK(state.K)


def model(state: State) -> Model:
    """Build the model that is trained."""
    if state.sampler in ("linear", "effective"):
        basis = features.grid(state.features, PER_AXIS[state.d], state.d, -SPAN, SPAN, state.make_process())
        return models.Linear(basis, "x0", RIDGE)
    if state.sampler == "ntk":
        return models.Lazy(models.NTK(depth=2, activation="relu"), tau=state.tau)
    require(state.sampler == "mlp", f"No model is trained for {state.sampler!r}.")
    return models.MLP(**NETWORK)


def draws(state: State) -> int | None:
    """Return P, the noised points that a member is trained on; ``None`` for fresh ones at every step."""
    if state.sampler in ("linear", "effective"):
        return round(PER_AXIS[state.d] ** (state.d + 1) / state.ratio)
    return LAZY_DRAWS if state.sampler == "ntk" else None


def members(state: State) -> int:
    """Return the number of models that are trained."""
    return MEMBERS[state.sampler] * (2 if state.sampler == "linear" and state.d == 1 else 1)


class _Run:
    """One run of a state's sampler; ``report`` is called after each step and raises to cancel."""

    def __init__(self, state: State, report: Report) -> None:
        self.state, self.report, self.steps, self.seed = state, report, state.steps, state.seed
        self.data, self.process = empirical(state), state.make_process()
        self.score = EmpiricalScore(self.data, self.process)
        self.x_T = self.process.prior((ALONE, state.d), dtype=torch.float64, generator=self.seed)
        report = self.part("the exact score", 0.0, 0.1)
        found = sample.pf_ode(self.score, self.x_T, steps=self.steps, save="path", progress=report)
        self.x, self.path = _saved(found, PARTICLES)

    def part(self, label: str, start: float, stop: float) -> Report:
        """Return a report for a part of the run, from the share ``start`` to the share ``stop`` of the whole."""
        self.report(label, start)
        return lambda _, share: self.report(label, start + (stop - start) * share)

    def exact(self) -> Result:
        return self.result(self.x, self.path)

    def naive(self) -> Result:
        given: dict[str, Any] = {"kappa": self.state.kappa, "steps": self.steps, "generator": self.seed}
        report = self.part("the naive estimator", 0.1, 0.95)
        found = sample.naive(self.score, self.x_T, save="path", progress=report, **given)
        return self.result(*_saved(found, PARTICLES), twin=self.x)

    def effective(self) -> Result:
        learner = model(self.state)
        assert isinstance(learner, models.Linear)
        report = self.part("predicting V", 0.1, 0.7)
        V = kernels.Linear(learner, self.data, self.process, sets=SETS, progress=report, **self.training())
        given: dict[str, Any] = {"steps": self.steps, "generator": self.seed, "save": "path"}
        report = self.part("the effective SDE", 0.7, 0.85)
        found = sample.effective_sde(V, self.x_T, progress=report, **given)
        twin = None
        if self.state.K != 0:
            report = self.part("the same without noise of the target", 0.85, 0.95)
            twin = _saved(sample.effective_sde(V.only("misfit"), self.x_T, progress=report, **given))[0]
        note = "" if V.valid else f"The prediction of V warns: {V.why}."
        return self.result(*_saved(found, PARTICLES), twin=twin, note=note, learned=V)

    def ensemble(self) -> Result:
        half = 0.95 if self.state.K == 0 else 0.5
        found, x = self.train(objective(self.state), "models", 0.1, half - 0.1)
        good = _finite(x)
        require(good.any(), "Every model diverged while sampling: take more steps, a larger eps, or another process.")
        few, report = found.select(range(min(SHOWN, len(found)))), self.part("sampling single models", half - 0.1, half)
        single = few.sample(SHOWN_EACH[self.state.sampler], steps=self.steps, seed=self.seed + 1, progress=report)
        path, note = self.paths(found, half)
        if not good.all():
            note = f"{int((~good).sum())} of {len(x)} models diverged and are left out. {note}".strip()
        twin = None
        if self.state.K != 0:
            _, twin = self.train(parse("J0"), "twins with noiseless targets", half, 0.95)
            twin = twin[_finite(twin)]
        return self.result(x[good], path, single[_finite(single)], twin=twin, note=note, learned=found)

    def train(self, goal: Objective, name: str, start: float, stop: float) -> tuple[Ensemble, Tensor]:
        """Train the members and sample them."""
        count, middle = members(self.state), start + 0.9 * (stop - start)
        report = self.part(f"training {count} {name}", start, middle)
        given = self.training() | {"objective": goal}
        found = train_ensemble(model(self.state), self.data, self.process, members=count, progress=report, **given)
        report = self.part(f"sampling {count} {name}", middle, stop)
        return found, found.sample(EACH[self.state.sampler], steps=self.steps, seed=self.seed, progress=report)

    def training(self) -> dict[str, Any]:
        return {"draws": draws(self.state), "objective": objective(self.state), "seed": self.seed}

    def paths(self, of: Ensemble, share: float) -> tuple[Tensor, str]:
        """Integrate a few particles of every model, each from a start of its own."""
        M, n = len(of), math.ceil(PARTICLES / len(of))
        x_T = of.start(n, self.seed, shared=False).flatten(0, 1)
        score = as_score(
            lambda x, t: of.paired(x.unflatten(0, (M, n)), t[0]).flatten(0, 1), self.process, of.shape, batch=M * n
        )
        report = self.part("sampling particles", share, share)
        try:
            return _saved(sample.pf_ode(score, x_T, steps=self.steps, save="path", progress=report))[1], ""
        except InputError:
            return x_T.expand(self.steps + 1, -1, -1), "The particles of some models diverged."

    def result(
        self, x: Tensor, path: Tensor, single: Tensor | None = None, *, twin: Tensor | None = None, **rest: Any
    ) -> Result:
        """Measure samples ``(n, d)`` or ``(M, n, d)``, those of the twin and those of single members."""
        self.report("laws", 0.97)
        return Result(
            self.state,
            self.process.times(self.steps, "log").numpy(),
            path.to(torch.float32).numpy(),
            *_law(x, self.state),
            _law(self.x, self.state)[0],
            () if single is None else tuple(_law(member, self.state)[0] for member in single),
            _gap(x, self.data),
            None if twin is None else _gap(twin, self.data),
            _gap(self.x, self.data),
            **rest,
        )


def simulate(state: State, report: Report = lambda label, share: None) -> Result:
    """Run the state's sampler; an exception raised by ``report(label, share)`` ends the run."""
    run = _Run(state, report)
    return {"exact": run.exact, "naive": run.naive, "effective": run.effective}.get(state.sampler, run.ensemble)()


def _saved(found: Tensor | sample.Solution, count: int | None = None) -> tuple[Tensor, Tensor]:
    """Return samples, and the paths of the first ``count`` of them."""
    assert isinstance(found, sample.Solution)
    assert found.path is not None
    return found.x, found.path[:, :count]


def _finite(x: Tensor) -> Tensor:
    """Whether all samples of a member are finite, ``(M,)``."""
    return x.isfinite().flatten(1).all(1)


def _law(x: Tensor, state: State) -> tuple[np.ndarray, np.ndarray]:
    """The average density on the window and its standard error, rows along the second coordinate."""
    density, _ = histogram(x, BINS[state.d], (-LIMIT, LIMIT), normalise="all")
    value, error = (torch.as_tensor(f).float().numpy().T for f in (density.value, density.se))
    return value, error


def _gap(x: Tensor, data: Empirical) -> Estimate | None:
    """1 - the memorised fraction; ``None`` if there is only one training point."""
    if data.merged()[0].n < 2:
        return None
    return memorised_fraction(x, data).complement()


def variance(result: Result, t: float) -> np.ndarray | None:
    """Evaluate tr Cov / (tr Cov + ``|mean|²``) of the learned score on a grid; ``None`` if nothing was learned."""
    learned, d = result.learned, result.state.d
    if learned is None:
        return None
    coarse = COARSE[result.state.sampler]
    count = coarse if d == 2 else 4 * coarse + 1
    x = grid(d, count)
    trace, mean = learned.cov(x, t).trace(), learned.mean(x, t)
    share = trace / (trace + mean.square().sum(-1)).clamp_min(1e-300)
    return share.reshape((count,) * d).detach().to(torch.float32).numpy()
