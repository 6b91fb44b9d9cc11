r"""The numbers of the page, by the public API: exact maps at one time, and runs of a sampler (docs/theory.md, §2).

Maps show the share of the target that is noise, :math:`\mathrm{tr}\,C / (\mathrm{tr}\,C + |s|^2)`, the score
:math:`s(x,t)` and, on the line, the density :math:`p(x|t)`. *Boundary lines* outline the region that
:func:`vkernel.metrics.boundary_mass` counts: the target is mostly noise and the score pushes samples apart,
:math:`\mathrm{tr}\,C > |s|^2` and :math:`\mathrm{tr}\,C > 1/\sigma^2`.

All samplers step through the same times, even in :math:`\log(\sigma/\alpha)`. Beside each ensemble a *twin* ensemble
is trained on the same inputs with noiseless targets: the ratio of their gap masses is the effect of the target noise.
The twin of the naive estimator is :math:`\kappa = 0`; that of the effective SDE is V without its target-noise term.
The *gap mass* is the share of samples that copy no training point, :math:`1 -`
:func:`~vkernel.metrics.memorised_fraction`: the nearest point is more than a third as far as the second nearest. On
{-1, 0, 1} that is P(.25 < ``|x|`` < .75) plus the mass beyond 1.5."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import vkernel as vk
from vkernel.core.errors import require
from vkernel.explore.state import CONTENT, CONTROLS, LIMIT, SAMPLERS, State

Report = Callable[[str, float], None]  # what is being done, and which share of the whole is done
CELLS, NODES, ARROWS = 100, 401, 17  # of the map per axis, on the line, of the arrows per axis
QUERIES, SETS, LAZY_DRAWS = 1024, 16, 128  # of the noise fraction, of the prediction of V, of wide networks
PER_AXIS = {1: 16, 2: 8}  # features per axis, by dimension
SPAN, RIDGE = 1.5, 0.1  # of the features, as in the paper
ALONE, PARTICLES, SHOWN = 2048, 240, 6  # samples without members, those shown as particles, members shown singly
BINS = {1: 120, 2: 48}
MEMBERS, EACH, SHOWN_EACH, COARSE = (CONTENT["sizes"][k] for k in ("members", "each", "shown_each", "coarse"))
NETWORK: dict[str, Any] = CONTENT["sizes"]["network"]


@dataclass(frozen=True)
class Exact:
    """The exact quantities at one time, as arrays to be drawn."""

    fraction: np.ndarray  # (CELLS, CELLS), rows along the second coordinate; on the line (NODES,)
    arrows: np.ndarray  # (4, k): x, y of the tails and of the heads
    lines: list[np.ndarray]  # polygons (2, m); on the line single places
    density: np.ndarray | None = None  # p(x|t) on the line


@dataclass(frozen=True, eq=False)
class Result:
    """The outcome of one run. Laws are densities on the window, ``(bins,)`` or ``(bins, bins)`` like a map."""

    state: State
    times: np.ndarray  # (S + 1,)
    frames: np.ndarray  # (S + 1, N, d), the paths of the particles
    law: np.ndarray
    band: np.ndarray  # the standard error of the law
    exact: np.ndarray  # the law of the exact score
    members: tuple[np.ndarray, ...]  # laws of single members
    gap: vk.Estimate | None  # the gap mass of the samples; None for one training point
    twin: vk.Estimate | None
    exact_gap: vk.Estimate | None
    note: str = ""
    learned: vk.Ensemble | vk.kernels.Linear | None = None  # from which V is evaluated


def empirical(state: State) -> vk.Empirical:
    """Build the training set."""
    return vk.Empirical(np.array(state.points, dtype=np.float64), state.weights)


def grid(d: int, count: int) -> Tensor:
    """Return the nodes of a grid over the window, ``(count^d, d)``, in the plane with rows along coordinate two."""
    line = torch.linspace(-LIMIT, LIMIT, count, dtype=torch.float64)
    return torch.stack(torch.meshgrid(*[line] * d, indexing="xy"), -1).reshape(-1, d)


def exact(state: State) -> Exact:
    """Evaluate noise fraction, score and boundaries at the state's t."""
    score = vk.EmpiricalScore(empirical(state), state.make_process())
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


def _arrows(score: vk.EmpiricalScore, state: State, var: Tensor) -> np.ndarray:
    """Return arrows along the score; their length, sigma² |s|, is shortened to fit the grid."""
    count = ARROWS if state.d == 2 else 2 * ARROWS - 1
    x, room = grid(state.d, count), 0.8 * 2 * LIMIT / (count - 1)
    step = var * score(x, state.t)
    size = step.norm(dim=-1, keepdim=True)
    half = step / size.clamp_min(1e-12) * room * torch.tanh(size / 0.5) / 2
    return torch.cat([torch.nn.functional.pad(end, (0, 2 - state.d)) for end in (x - half, x + half)], 1).mT.numpy()


def _outline(values: np.ndarray) -> list[np.ndarray]:
    """Return the places where the values cross 1: polygons in the plane, single places on the line."""
    import contourpy

    line = np.linspace(-LIMIT, LIMIT, len(values))
    if values.ndim == 2:
        return [np.asarray(part).T for part in contourpy.contour_generator(line, line, values).lines(1.0)]
    over = values - 1
    k = np.flatnonzero(over[:-1] * over[1:] < 0)
    places = line[k] + (line[k + 1] - line[k]) * over[k] / (over[k] - over[k + 1])
    return [np.array([[p, p], [0.0, 1.0]]) for p in places]


def noise_share(state: State) -> vk.Estimate:
    """Estimate which share of the training target is noise at the state's t."""
    found = vk.noise_fraction(empirical(state), state.make_process(), state.t, queries=QUERIES, generator=state.seed)
    return vk.Estimate(*map(float, found.fields))


def variance(result: Result, t: float) -> np.ndarray | None:
    """Evaluate tr Cov / (tr Cov + ``|mean|²``) of the learned score on a grid; ``None`` if nothing was learned."""
    learned, d = result.learned, result.state.d
    if learned is None:
        return None
    count = COARSE[result.state.sampler] if d == 2 else 4 * COARSE[result.state.sampler] + 1
    x = grid(d, count)
    trace = learned.cov(x, t).trace()
    share = trace / (trace + learned.mean(x, t).square().sum(-1)).clamp_min(1e-300)
    return share.reshape((count,) * d).detach().float().numpy()


def run_inputs(state: State) -> State:
    """Reset the fields that a run does not depend on: states with equal inputs have the same result."""
    default = vars(State())
    unused = {name: default[name] for name, c in CONTROLS.items() if state.sampler not in c.get("samplers", SAMPLERS)}
    return replace(state, **unused, t=state.make_process().T, layers=(), dark=False)


def model(state: State) -> vk.models.Linear | vk.models.Lazy | vk.models.MLP:
    """Build the model that is trained."""
    if state.sampler == "ntk":
        return vk.models.Lazy(vk.models.NTK(depth=2, activation="relu"), tau=state.tau)
    if state.sampler == "mlp":
        return vk.models.MLP(**NETWORK)
    basis = vk.features.grid(state.features, PER_AXIS[state.d], state.d, -SPAN, SPAN, state.make_process())
    return vk.models.Linear(basis, "x0", RIDGE)


def draws(state: State) -> int | None:
    """Return P, the noised points that a member is trained on; ``None`` for fresh ones at every step."""
    return {"ntk": LAZY_DRAWS, "mlp": None}.get(state.sampler, round(PER_AXIS[state.d] ** (state.d + 1) / state.ratio))


def members(state: State) -> int:
    """Return the number of models that are trained."""
    return MEMBERS.get(state.sampler, 0) * (2 if state.sampler == "linear" and state.d == 1 else 1)


def simulate(state: State, report: Report = lambda label, share: None) -> Result:
    """Run the state's sampler; an exception raised by ``report(label, share)`` ends the run."""
    run = _Run(state, report)
    return run.effective() if state.sampler == "effective" else run.ensemble() if members(state) else run.alone()


class _Run:
    """One run of a state's sampler; ``report`` is called after each step and raises to cancel."""

    def __init__(self, state: State, report: Report) -> None:
        self.state, self.report, self.seed = state, report, state.seed
        self.data, self.process = empirical(state), state.make_process()
        self.objective = vk.JK(state.K) if state.K > 1 else f"J{state.K}"
        self.score = vk.EmpiricalScore(self.data, self.process)
        self.x_T = self.process.prior((ALONE, state.d), dtype=torch.float64, generator=self.seed)
        self.x, self.path = self.solve(self.part("the exact score", 0.0, 0.1), vk.sample.pf_ode, self.score, self.x_T)

    def part(self, label: str, start: float, stop: float) -> Report:
        """Return a report for a part of the run, from the share ``start`` to the share ``stop`` of the whole."""
        self.report(label, start)
        return lambda _, share: self.report(label, start + (stop - start) * share)

    def solve(self, part: Report, solver: Callable[..., Any], *args: Any, **given: Any) -> tuple[Tensor, Tensor]:
        """Return the end points and the paths of one of the samplers of the library."""
        found = solver(*args, steps=self.state.steps, save="path", progress=part, **given)
        return found.x, found.path

    def alone(self) -> Result:
        if self.state.sampler == "exact":
            return self.result(self.x, self.path, None)
        part, kappa = self.part("the naive estimator", 0.1, 0.95), self.state.kappa
        found = self.solve(part, vk.sample.naive, self.score, self.x_T, kappa=kappa, generator=self.seed)
        return self.result(*found, self.x)

    def effective(self) -> Result:
        learner, P = model(self.state), draws(self.state) or 0
        assert isinstance(learner, vk.models.Linear)
        given: dict[str, Any] = {"objective": self.objective, "draws": P, "seed": self.seed, "sets": SETS}
        V = vk.kernels.Linear(learner, self.data, self.process, progress=self.part("predicting V", 0.1, 0.7), **given)
        part, twin = self.part("the effective SDE", 0.7, 0.85), None
        x, path = self.solve(part, vk.sample.effective_sde, V, self.x_T, generator=self.seed)
        if self.state.K != 0:
            part = self.part("the same without noise of the target", 0.85, 0.95)
            twin, _ = self.solve(part, vk.sample.effective_sde, V.only("misfit"), self.x_T, generator=self.seed)
        return self.result(x, path, twin, note="" if V.valid else f"The prediction of V warns: {V.why}.", learned=V)

    def ensemble(self) -> Result:
        half = 0.95 if self.state.K == 0 else 0.5
        found, x = self.train(self.objective, "models", 0.1, half - 0.1)
        good = x.isfinite().flatten(1).all(1)
        require(good.any(), "Every model diverged while sampling: take more steps, a larger eps, or another process.")
        part, few = self.part("sampling single models", half - 0.1, half), found.select(range(len(found))[:SHOWN])
        single = few.sample(SHOWN_EACH[self.state.sampler], steps=self.state.steps, seed=self.seed + 1, progress=part)
        single = single[single.isfinite().flatten(1).all(1)]
        path, note = self.paths(found, half)
        if not good.all():
            note = f"{int((~good).sum())} of {len(x)} models diverged and are left out. {note}".strip()
        twin = None
        if self.state.K != 0:
            _, twin = self.train("J0", "twins with noiseless targets", half, 0.95)
            twin = twin[twin.isfinite().flatten(1).all(1)]
        return self.result(x[good], path, twin, single, note=note, learned=found)

    def train(self, objective: str | vk.JK, name: str, start: float, stop: float) -> tuple[vk.Ensemble, Tensor]:
        """Train the members and sample them."""
        count, middle = members(self.state), start + 0.9 * (stop - start)
        given: dict[str, Any] = {"members": count, "draws": draws(self.state), "seed": self.seed}
        learner, part = model(self.state), self.part(f"training {count} {name}", start, middle)
        found = vk.train_ensemble(learner, self.data, self.process, objective=objective, progress=part, **given)
        part = self.part(f"sampling {count} {name}", middle, stop)
        return found, found.sample(EACH[self.state.sampler], steps=self.state.steps, seed=self.seed, progress=part)

    def paths(self, of: vk.Ensemble, share: float) -> tuple[Tensor, str]:
        """Integrate a few particles of every model, each from a start of its own."""
        part, n = self.part("particles", share, share), math.ceil(PARTICLES / len(of))
        path = self.solve(part, of.sample, n, seed=self.seed, shared=False)[1].flatten(1, 2)
        good = path.isfinite().all(-1).all(0)
        return path[:, good], "" if good.all() else "The particles of some models diverged."

    def result(
        self, x: Tensor, path: Tensor, twin: Tensor | None, single: Iterable[Tensor] = (), **rest: Any
    ) -> Result:
        """Measure samples ``(n, d)`` or ``(M, n, d)``, those of the twin and those of single members."""
        self.report("laws", 0.97)
        gap, twin_gap, exact_gap = (None if a is None else self.gap(a) for a in (x, twin, self.x))
        times = self.process.times(self.state.steps, "log").numpy()
        frames = (path[:, :PARTICLES] if x.ndim == 2 else path).float().numpy()
        laws = (*self.law(x), self.law(self.x)[0], tuple(self.law(member)[0] for member in single))
        return Result(self.state, times, frames, *laws, gap, twin_gap, exact_gap, **rest)

    def gap(self, x: Tensor) -> vk.Estimate | None:
        return None if self.data.merged()[0].n < 2 else vk.metrics.memorised_fraction(x, self.data).complement()

    def law(self, x: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return the average density on the window and its standard error, rows along the second coordinate."""
        density, _ = vk.metrics.histogram(x, BINS[self.state.d], (-LIMIT, LIMIT), normalise="all")
        value, error = (torch.as_tensor(f).float().numpy().T for f in (density.value, density.se))
        return value, error
