r"""What is sampled: by the exact score, the naive estimator, the effective SDE, or an ensemble of trained models.

Every sampler integrates the PF-ODE on the same times, evenly spaced in :math:`\log(\sigma/\alpha)`. An ensemble is
trained as :func:`vkernel.train.ensemble.train_ensemble` does it, and beside it a twin on the same inputs with noiseless
targets: the ratio of their gap masses is what the noise of the target does. For the naive estimator the twin is
:math:`\kappa = 0`; for the effective SDE it is V without its target-noise term.

The *gap mass* is the share of samples that copy no training point, :math:`1 -`
:func:`~vkernel.metrics.memorised_fraction`: the nearest point is more than a third as far as the second nearest. On
{-1, 0, 1} that is P(.25 < ``|x|`` < .75), and what lies beyond 1.5.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vkernel import kernels, sample
from vkernel.core import rng
from vkernel.core.errors import InputError, require
from vkernel.core.estimate import Estimate
from vkernel.data.empirical import Empirical
from vkernel.explore.compute import empirical, grid
from vkernel.explore.state import LIMIT, State
from vkernel.metrics import histogram, memorised_fraction
from vkernel.metrics.neighbours import distinct
from vkernel.process import Process
from vkernel.sample.ode import Solution
from vkernel.score.empirical import EmpiricalScore
from vkernel.train import models
from vkernel.train.ensemble import Ensemble
from vkernel.train.features import grid as feature_grid
from vkernel.train.models.base import Model
from vkernel.train.objectives import JK, VARIES, Objective, Training, parse

__all__ = ["Result", "Tell", "concerns", "draws", "members", "model", "objective", "simulate", "variance"]

Tell = Callable[[str, float], None]  # what is being done, and which share of the whole is done
PER_AXIS = {1: 16, 2: 8}  # features along each axis, by dimension
SPAN, RIDGE = 1.5, 0.1  # of the features, as in the paper
MEMBERS = {"linear": 48, "ntk": 12, "mlp": 8}
ON_LINE = 2  # times as many linear models on the line, where they are cheap
EACH = {"linear": 400, "ntk": 64, "mlp": 256}  # samples of each member
LAZY_DRAWS, SETS = 128, 16
ALONE = 2048  # samples where there are no members
PARTICLES = 240
SHOWN, SHOWN_EACH = 6, {"linear": 1024, "ntk": 64, "mlp": 1024}  # members shown singly, and their samples
BINS = {1: 120, 2: 48}
COARSE = {"linear": 64, "effective": 50, "ntk": 24, "mlp": 64}  # cells of the map of V, along each axis of the plane
NETWORK: dict[str, Any] = {
    "width": 48,
    "depth": 3,
    "target": "noise",
    "lr": 3e-3,
    "batch": 128,
    "steps": 600,
    "ema": 0.99,
}
FLOW: dict[str, Any] = {"method": "exponential", "spacing": "log"}


@dataclass(frozen=True, eq=False)
class Result:
    """What one run found.

    ``times (S + 1,)`` and ``frames (S + 1, N, d)`` are the particles' paths; ``law``, ``exact`` and ``members`` are
    densities on the window, ``(bins,)`` or ``(bins, bins)`` with rows along the second coordinate; ``band`` is the
    standard error of ``law``. ``gap`` and ``twin`` are gap masses, ``exact_gap`` that of the exact score; ``None``
    where there is none. ``learned`` is what V can be asked of.
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
    learned: Ensemble | kernels.Kernel | None = None


def concerns(state: State) -> State:
    """The state with what a run does not depend on set to the same: two equal ones have the same result."""
    own = {
        "kappa": "naive",
        "features": ("linear", "effective"),
        "ratio": ("linear", "effective"),
        "tau": "ntk",
        "K": ("linear", "effective", "ntk", "mlp"),
    }
    default = State()
    same = {name: getattr(default, name) for name, where in own.items() if state.sampler not in where}
    return replace(state, **same, t=state.make_process().T, layers=(), dark=False)


def simulate(state: State, tell: Tell = lambda label, share: None) -> Result:
    """Run the state's sampler; ``tell`` is called between pieces of work."""
    data, process = empirical(state), state.make_process()
    score = EmpiricalScore(data, process)
    tell("the exact score", 0.0)
    bare, paths = _exact(score, state)
    exact_law, exact_gap = _law(bare, state), _gap(bare, data)
    made = _Made(bare, paths)
    if state.sampler == "naive":
        tell("the naive estimator", 0.3)
        made = _Made(*_naive(score, state), twin=bare)
    elif state.sampler == "effective":
        made = _effective(data, process, state, tell)
    elif state.sampler != "exact":
        made = _ensemble(data, process, state, tell)
    tell("laws", 0.97)
    law = _law(made.x, state)
    shown = () if made.shown is None else tuple(_law(x, state)[0] for x in made.shown if x.isfinite().all())
    return Result(
        state,
        process.times(state.steps, "log").numpy(),
        made.paths.to(torch.float32).numpy(),
        *law,
        exact_law[0],
        shown,
        _gap(made.x, data),
        None if made.twin is None else _gap(made.twin, data),
        exact_gap,
        made.note,
        made.learned,
    )


@dataclass(frozen=True)
class _Made:
    """Samples ``(n, d)`` or ``(M, n, d)``, paths, the twin's samples, some members' samples, and a remark."""

    x: Tensor
    paths: Tensor
    twin: Tensor | None = None
    shown: Tensor | None = None
    note: str = ""
    learned: Ensemble | kernels.Kernel | None = None


def start(process: Process, d: int, seed: int) -> Tensor:
    """x_T of samplers that have no members."""
    return process.prior((ALONE, d), dtype=torch.float64, generator=seed)


def _exact(score: EmpiricalScore, state: State) -> tuple[Tensor, Tensor]:
    found = sample.pf_ode(
        score, score.process, start(score.process, state.d, state.seed), steps=state.steps, save="path", **FLOW
    )
    assert isinstance(found, Solution)
    assert found.path is not None
    return found.x, found.path[:, :PARTICLES]


def _naive(score: EmpiricalScore, state: State) -> tuple[Tensor, Tensor]:
    """One step at a time, from one time to the next: the same chain, and its path."""
    process, data = score.process, score.data
    source = rng.as_generator(state.seed)
    x = start(process, state.d, state.seed)
    path = [x]
    for here, there in pairwise(process.times(state.steps, "log").tolist()):
        leg = replace(process, T=here, eps=there)  # type: ignore[type-var]
        x = sample.naive(EmpiricalScore(data, leg), leg, x, kappa=state.kappa, steps=1, generator=source)
        path.append(x)
    return x, torch.stack([p[:PARTICLES] for p in path])


def objective(state: State) -> Objective:
    """J0, J_K or J1."""
    return parse("J0") if state.K == 0 else parse("J1") if state.K == 1 else JK(state.K)


def model(state: State) -> Model:
    """The model that is trained."""
    if state.sampler in ("linear", "effective"):
        features = feature_grid(state.features, PER_AXIS[state.d], state.d, -SPAN, SPAN, state.make_process())
        return models.Linear(features, "x0", RIDGE)
    if state.sampler == "ntk":
        return models.Lazy(models.NTK(depth=2, activation="relu"), tau=state.tau)
    require(state.sampler == "mlp", f"No model is trained for {state.sampler!r}.")
    return models.MLP(**NETWORK)


def draws(state: State) -> int | None:
    """P, the number of noised points that a member is trained on; ``None`` for fresh ones at every step."""
    if state.sampler in ("linear", "effective"):
        return round(PER_AXIS[state.d] ** (state.d + 1) / state.ratio)
    return LAZY_DRAWS if state.sampler == "ntk" else None


def members(state: State) -> int:
    """How many models are trained."""
    return MEMBERS[state.sampler] * (ON_LINE if state.sampler == "linear" and state.d == 1 else 1)


def _effective(data: Empirical, process: Process, state: State, tell: Tell) -> _Made:
    tell("predicting V", 0.05)
    learner, P = model(state), draws(state)
    assert isinstance(learner, models.Linear)
    assert P is not None
    V = kernels.Linear(learner, data, process, draws=P, objective=objective(state), seed=state.seed, sets=SETS)
    tell("the effective SDE", 0.75)
    x_T = start(process, state.d, state.seed)
    how = {"steps": state.steps, "generator": state.seed, **FLOW}
    x = sample.effective_sde(V.s_avg, V, process, x_T, **how)
    tell("the same without noise of the target", 0.85)
    twin = None if state.K == 0 else sample.effective_sde(V.s_avg, V.only("misfit"), process, x_T, **how)
    field = V.draw(PARTICLES, rng.as_generator(state.seed))

    def learned(x: Tensor, t: Any) -> Tensor:
        return V.s_avg(x, t) + field(x, t)

    found = sample.pf_ode(learned, process, x_T[:PARTICLES, None], steps=state.steps, save="path", **FLOW)
    assert isinstance(found, Solution)
    assert found.path is not None
    return _Made(
        x, found.path[:, :, 0], twin, note="" if V.valid else f"The prediction of V warns: {V.why}.", learned=V
    )


def _ensemble(data: Empirical, process: Process, state: State, tell: Tell) -> _Made:
    half = 0.85 if state.K == 0 else 0.42
    found = _train(
        data, process, state, objective(state), lambda s: tell(f"training {members(state)} models", half * s)
    )
    tell("sampling", half)
    how = {"steps": state.steps, **FLOW}
    x = found.sample(EACH[state.sampler], seed=state.seed, show=False, **how)
    good = x.isfinite().flatten(1).all(1)
    require(good.any(), "Every model diverged while sampling: take more steps, a larger eps, or another process.")
    first = found[:SHOWN]
    assert isinstance(first, Ensemble)
    shown = first.sample(SHOWN_EACH[state.sampler], seed=state.seed + 1, show=False, **how)
    paths, note = _paths(found, process, state, how)
    if not good.all():
        note = f"{int((~good).sum())} of {len(x)} models diverged and are left out. {note}".strip()
    twin = None
    if state.K != 0:
        label = f"training {members(state)} twins with noiseless targets"
        other = _train(data, process, state, parse("J0"), lambda s: tell(label, 0.5 + half * s))
        tell("sampling the twins", 0.5 + half)
        twin = other.sample(EACH[state.sampler], seed=state.seed, show=False, **how)
    return _Made(x, paths, twin, shown, note, found)


def _train(data: Empirical, process: Process, state: State, goal: Objective, tell: Callable[[float], None]) -> Ensemble:
    """As :func:`~vkernel.train.ensemble.train_ensemble`, told of every step on the way."""
    learner = model(state)
    training = Training(data, process, goal, draws(state), VARIES, state.seed, "uniform", learner.dtype)
    done = 0.0

    def add(share: float) -> None:
        nonlocal done
        done += share
        tell(done)

    which = tuple(range(members(state)))
    return Ensemble(learner, learner.fit(training, which, add), process, data.shape, {"members": list(which)})


def _paths(found: Ensemble, process: Process, state: State, how: dict[str, Any]) -> tuple[Tensor, str]:
    """Paths of a few particles of every model, each from a place of its own."""
    x_T = found.start(math.ceil(PARTICLES / len(found)), state.seed, shared=False)
    try:
        solved = sample.pf_ode(found.paired, process, x_T, save="path", **how)
    except InputError:
        return x_T.flatten(0, 1).expand(state.steps + 1, -1, -1), "The particles of some models diverged."
    assert isinstance(solved, Solution)
    assert solved.path is not None
    return solved.path.flatten(1, 2), ""


def _law(x: Tensor, state: State) -> tuple[np.ndarray, np.ndarray]:
    """The average density on the window, with its standard error, rows along the second coordinate."""
    x = _healthy(x)
    density, _ = histogram(x, BINS[state.d], (-LIMIT, LIMIT), normalise="all")
    fields = (density.value, density.se)
    value, error = (f.mT if state.d == 2 else f for f in fields)
    return value.to(torch.float32).numpy(), error.to(torch.float32).numpy()


def _gap(x: Tensor, data: Empirical) -> Estimate | None:
    """1 - the memorised fraction; ``None`` where there is one training point only."""
    if distinct(data).n < 2:
        return None
    copied = memorised_fraction(_healthy(x), data)
    return Estimate(1 - copied.value, copied.se, 1 - copied.high, 1 - copied.low)


def _healthy(x: Tensor) -> Tensor:
    return x if x.ndim == 2 else x[x.isfinite().flatten(1).all(1)]


def variance(result: Result, t: float) -> np.ndarray | None:
    """tr Cov / (tr Cov + ``|s_avg|²``) of the learned score over trainings, on a grid; ``None`` if nothing learned."""
    learned = result.learned
    if learned is None:
        return None
    coarse = COARSE[result.state.sampler]
    count = coarse if result.state.d == 2 else 4 * coarse + 1
    x = grid(result.state.d, count)
    mean = learned.mean(x, t) if isinstance(learned, Ensemble) else learned.s_avg(x, t)  # type: ignore[attr-defined]
    trace = learned.cov(x, t).trace()
    share = trace / (trace + mean.square().sum(-1)).clamp_min(1e-300)
    return share.reshape((count,) * result.state.d).detach().to(torch.float32).numpy()
