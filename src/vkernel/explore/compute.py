r"""The numbers of the page: exact maps at one time, and runs of a sampler (docs/theory.md, §2).

Maps are evaluated on a grid: the share of the target that is noise, the score and, on the line, the density,

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
from vkernel.train.objectives import JK, Objective

CELLS, NODES, ARROWS = 100, 401, 17  # of the map per axis, on the line, of the arrows per axis
QUERIES = 1024  # of the noise fraction
PER_AXIS = {1: 16, 2: 8}  # features per axis, by dimension
SPAN, RIDGE = 1.5, 0.1  # of the features, as in the paper
MEMBERS = {"linear": 48, "ntk": 12, "mlp": 8}  # in the plane; twice as many linear models on the line
EACH = {"linear": 400, "ntk": 64, "mlp": 256}  # samples per member
SHOWN, SHOWN_EACH = 6, {"linear": 1024, "ntk": 64, "mlp": 1024}  # members shown singly, and their samples
ALONE, PARTICLES = 2048, 240  # samples without members, and how many of them are shown as particles
LAZY_DRAWS, SETS = 128, 16
BINS = {1: 120, 2: 48}
COARSE = {"linear": 64, "effective": 50, "ntk": 24, "mlp": 64}  # cells of the map of V per axis of the plane
NETWORK: dict[str, Any] = {
    "width": 48, "depth": 3, "target": "noise", "lr": 3e-3, "batch": 128, "steps": 600, "ema": 0.99,
}  # fmt: skip


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
    """Return the nodes of a grid over the window, ``(count^d, d)``, in the plane with rows along coordinate two."""
    axes = torch.meshgrid(*[axis(count)] * d, indexing="xy") if d == 2 else [axis(count)]
    return torch.stack(list(axes), -1).reshape(-1, d)


def exact(state: State) -> Exact:
    """Evaluate noise fraction, score and boundaries at the state's t."""
    score = EmpiricalScore(empirical(state), state.make_process())
    count = NODES if state.d == 1 else CELLS
    x, shape = grid(state.d, count), (count,) * state.d
    s, C = score.with_covariance(x, state.t)
    trace, var = C.trace(), score.process.S(torch.tensor(state.t, dtype=torch.float64))
    fraction = trace / (trace + s.square().sum(-1)).clamp_min(1e-300)
    level = torch.minimum(trace * var, 2 * fraction)  # above 1 where boundary_mass counts
    arrows = _arrows(score, state, var) if "arrows" in state.layers else np.zeros((4, 0))
    lines = _outline(level.reshape(shape).numpy()) if "boundaries" in state.layers else []
    density = score.posterior(x, state.t).logp.exp().numpy() if state.d == 1 else None
    return Exact(fraction.reshape(shape).float().numpy(), arrows, lines, density)


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
    return share.reshape((count,) * d).detach().float().numpy()


def run_inputs(state: State) -> State:
    """Reset the fields that a run does not depend on: states with equal inputs have the same result."""
    fields = {
        "naive": ["kappa"], "effective": ["features", "ratio", "K"], "linear": ["features", "ratio", "K"],
        "ntk": ["tau", "K"], "mlp": ["K"],
    }  # fmt: skip
    default, used = vars(State()), fields.get(state.sampler, [])
    unused = {name: default[name] for name in ("kappa", "features", "ratio", "tau", "K") if name not in used}
    return replace(state, **unused, t=state.make_process().T, layers=(), dark=False)


def model(state: State) -> models.Linear | models.Lazy | models.MLP:
    """Build the model that is trained."""
    if state.sampler == "ntk":
        return models.Lazy(models.NTK(depth=2, activation="relu"), tau=state.tau)
    if state.sampler == "mlp":
        return models.MLP(**NETWORK)
    basis = features.grid(state.features, PER_AXIS[state.d], state.d, -SPAN, SPAN, state.make_process())
    return models.Linear(basis, "x0", RIDGE)


def draws(state: State) -> int | None:
    """Return P, the noised points that a member is trained on; ``None`` for fresh ones at every step."""
    if state.sampler in ("linear", "effective"):
        return round(PER_AXIS[state.d] ** (state.d + 1) / state.ratio)
    return LAZY_DRAWS if state.sampler == "ntk" else None


def members(state: State) -> int:
    """Return the number of models that are trained."""
    return MEMBERS.get(state.sampler, 0) * (2 if state.sampler == "linear" and state.d == 1 else 1)


def simulate(state: State, report: Report = lambda label, share: None) -> Result:
    """Run the state's sampler; an exception raised by ``report(label, share)`` ends the run."""
    run = _Run(state, report)
    if state.sampler == "exact":
        return run.result(run.x, run.path)
    return {"naive": run.naive, "effective": run.effective}.get(state.sampler, run.ensemble)()


class _Run:
    """One run of a state's sampler; ``report`` is called after each step and raises to cancel."""

    def __init__(self, state: State, report: Report) -> None:
        self.state, self.report, self.steps, self.seed = state, report, state.steps, state.seed
        self.data, self.process = empirical(state), state.make_process()
        self.objective = JK(state.K) if state.K > 1 else f"J{state.K}"
        self.score = EmpiricalScore(self.data, self.process)
        self.x_T = self.process.prior((ALONE, state.d), dtype=torch.float64, generator=self.seed)
        part = self.part("the exact score", 0.0, 0.1)
        self.x, self.path = _saved(sample.pf_ode(self.score, self.x_T, steps=self.steps, save="path", progress=part))

    def part(self, label: str, start: float, stop: float) -> Report:
        """Return a report for a part of the run, from the share ``start`` to the share ``stop`` of the whole."""
        self.report(label, start)
        return lambda _, share: self.report(label, start + (stop - start) * share)

    def naive(self) -> Result:
        given: dict[str, Any] = {"kappa": self.state.kappa, "steps": self.steps, "generator": self.seed, "save": "path"}
        part = self.part("the naive estimator", 0.1, 0.95)
        return self.result(*_saved(sample.naive(self.score, self.x_T, progress=part, **given)), twin=self.x)

    def effective(self) -> Result:
        learner, P = model(self.state), draws(self.state) or 0
        assert isinstance(learner, models.Linear)
        given: dict[str, Any] = {"objective": self.objective, "seed": self.seed, "sets": SETS}
        part = self.part("predicting V", 0.1, 0.7)
        V = kernels.Linear(learner, self.data, self.process, draws=P, progress=part, **given)
        given = {"steps": self.steps, "generator": self.seed, "save": "path"}
        part = self.part("the effective SDE", 0.7, 0.85)
        x, path = _saved(sample.effective_sde(V, self.x_T, progress=part, **given))
        twin = None
        if self.state.K != 0:
            part = self.part("the same without noise of the target", 0.85, 0.95)
            twin = _saved(sample.effective_sde(V.only("misfit"), self.x_T, progress=part, **given))[0]
        note = "" if V.valid else f"The prediction of V warns: {V.why}."
        return self.result(x, path, twin=twin, note=note, learned=V)

    def ensemble(self) -> Result:
        half = 0.95 if self.state.K == 0 else 0.5
        found, x = self.train(self.objective, "models", 0.1, half - 0.1)
        good = _finite(x)
        require(good.any(), "Every model diverged while sampling: take more steps, a larger eps, or another process.")
        few, part = found.select(range(min(SHOWN, len(found)))), self.part("sampling single models", half - 0.1, half)
        single = few.sample(SHOWN_EACH[self.state.sampler], steps=self.steps, seed=self.seed + 1, progress=part)
        path, note = self.paths(found, half)
        if not good.all():
            note = f"{int((~good).sum())} of {len(x)} models diverged and are left out. {note}".strip()
        twin = None
        if self.state.K != 0:
            _, twin = self.train("J0", "twins with noiseless targets", half, 0.95)
            twin = twin[_finite(twin)]
        return self.result(x[good], path, single[_finite(single)], twin=twin, note=note, learned=found)

    def train(self, objective: str | Objective, name: str, start: float, stop: float) -> tuple[Ensemble, Tensor]:
        """Train the members and sample them."""
        count, middle = members(self.state), start + 0.9 * (stop - start)
        given: dict[str, Any] = {"members": count, "draws": draws(self.state), "seed": self.seed}
        part = self.part(f"training {count} {name}", start, middle)
        found = train_ensemble(model(self.state), self.data, self.process, objective=objective, progress=part, **given)
        part = self.part(f"sampling {count} {name}", middle, stop)
        return found, found.sample(EACH[self.state.sampler], steps=self.steps, seed=self.seed, progress=part)

    def paths(self, of: Ensemble, share: float) -> tuple[Tensor, str]:
        """Integrate a few particles of every model, each from a start of its own."""
        M, n = len(of), math.ceil(PARTICLES / len(of))

        def paired(x: Tensor, t: Tensor) -> Tensor:
            return of.paired(x.unflatten(0, (M, n)), t[0]).flatten(0, 1)

        score, part = as_score(paired, self.process, of.shape, batch=M * n), self.part("particles", share, share)
        x_T = of.start(n, self.seed, shared=False).flatten(0, 1)
        try:
            return _saved(sample.pf_ode(score, x_T, steps=self.steps, save="path", progress=part))[1], ""
        except InputError:
            return x_T.expand(self.steps + 1, -1, -1), "The particles of some models diverged."

    def result(
        self, x: Tensor, path: Tensor, single: Tensor | None = None, *, twin: Tensor | None = None, **rest: Any
    ) -> Result:
        """Measure samples ``(n, d)`` or ``(M, n, d)``, those of single members and those of the twin."""
        self.report("laws", 0.97)
        gap, twin_gap, exact_gap = (None if a is None else self.gap(a) for a in (x, twin, self.x))
        laws = () if single is None else tuple(self.law(member)[0] for member in single)
        path = path[:, :PARTICLES] if x.ndim == 2 else path
        times, frames = self.process.times(self.steps, "log").numpy(), path.float().numpy()
        both = (*self.law(x), self.law(self.x)[0])
        return Result(self.state, times, frames, *both, laws, gap, twin_gap, exact_gap, **rest)

    def law(self, x: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """The average density on the window and its standard error, rows along the second coordinate."""
        density, _ = histogram(x, BINS[self.state.d], (-LIMIT, LIMIT), normalise="all")
        value, error = (torch.as_tensor(f).float().numpy().T for f in (density.value, density.se))
        return value, error

    def gap(self, x: Tensor) -> Estimate | None:
        """The gap mass; ``None`` if there is only one training point."""
        return None if self.data.merged()[0].n < 2 else memorised_fraction(x, self.data).complement()


def _saved(found: Tensor | sample.Solution) -> tuple[Tensor, Tensor]:
    assert isinstance(found, sample.Solution)
    assert found.path is not None
    return found.x, found.path


def _finite(x: Tensor) -> Tensor:
    """Whether all samples of a member are finite, ``(M,)``."""
    return x.isfinite().flatten(1).all(1)
