r"""The maps of the page at one time t: noise of the target, disagreement of models, score, boundaries (theory, §2).

A map shows :math:`\sigma^2\,\mathrm{tr}\,C`, the noise of a single training target in units of the noising process,
or the share :math:`\mathrm{tr}\,C/(\mathrm{tr}\,C + |s|^2)`. Both are thin where the noise is small: between two
points at distance :math:`\Delta` C falls by e within :math:`\sigma^2/(\alpha\Delta)` of the boundary. A value in the
centre of a cell would miss it. So a cell that a boundary crosses is evaluated on the boundary. Let i and j be the
most likely training points at the centre x, and

.. math:: g(x) = \log\frac{r_i}{r_j} = \log\frac{w_i}{w_j} + \frac{|x - \alpha y_j|^2 - |x - \alpha y_i|^2}{2\sigma^2},
          \qquad \nabla g = \frac{\alpha (y_i - y_j)}{\sigma^2}.

g is linear, so the boundary g = 0 is nearest to x at the *foot* :math:`x - g\,\nabla g/|\nabla g|^2`. If the foot is
in the cell it is the cell's place, else the centre is. Every value is the exact function at the cell's place."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

import vkernel as vk
from vkernel.explore.compute import Result, empirical, grid, models
from vkernel.explore.state import CONTENT, LIMIT, State

NODES, ARROWS = 401, 17  # of a curve on the line before it is refined, of the arrows per axis
FIELD = {"noise": (64, 161), "share": (64, 161)}  # times and places of the picture of the line over time
COARSE_FIELD = (32, 81)  # that of models, which are many and smooth
STEPS = (-7, -4, -2, -1, -0.5, 0, 0.5, 1, 2, 4, 7)  # nodes beside a boundary on the line, in units of its width
CELLS = ((12, 161), (100, 101), (1000, 61))  # cells per axis of the plane, by the number of training points
COARSE: dict[str, int] = CONTENT["sizes"]["coarse"]
TINY = 1e-30  # smallest value that is sent, so that it has a logarithm


@dataclass(frozen=True)
class Places:
    """The places at which a grid is evaluated: ``x (N, d)``, and which of them lie on a boundary, ``on (N,)``, between
    the heaviest and the second heaviest training point, with ``gradient (N, d)`` of the log ratio of their weights."""

    x: Tensor
    on: Tensor
    gradient: Tensor


def places(score: vk.EmpiricalScore, centres: Tensor, t: Tensor, half: float) -> Places:
    """Move the centres of cells, of half width ``half``, to the boundary if that crosses them; ``t`` is ``()`` or
    ``(N,)``."""
    data, _ = score.data.merged()
    if data.n < 2:
        return Places(centres, torch.zeros(len(centres), dtype=torch.bool), torch.zeros_like(centres))
    y, log_w = data.rows(0, data.n).double().reshape(data.n, -1), data.weights.double().log()
    alpha, var = (a.double().expand(len(centres)) for a in (score.process.alpha(t), score.process.S(t)))
    scaled = (alpha / var)[:, None]
    logit = torch.addmm(log_w, scaled * centres, y.mT) - (alpha**2 / (2 * var))[:, None] * y.square().sum(1)
    first, i = logit.max(1)
    second, j = logit.scatter(1, i[:, None], -math.inf).max(1)
    gradient = scaled * (y[i] - y[j])
    foot = centres - ((first - second) / gradient.square().sum(1))[:, None] * gradient
    on = ((foot - centres).abs() <= half).all(1)
    return Places(torch.where(on[:, None], foot, centres), on, gradient)


def noise_at(state: State, *place: float) -> float:
    r"""Return :math:`\sigma^2\,\mathrm{tr}\,C` at a place and the state's t."""
    score = vk.EmpiricalScore(empirical(state), state.make_process())
    return float(score.noise_trace(torch.tensor(place, dtype=torch.float64)[None], state.t))


def at_points(state: State) -> float:
    r"""Return the largest :math:`\sigma^2\,\mathrm{tr}\,C` at a training point, shrunk by alpha."""
    score, t = vk.EmpiricalScore(empirical(state), state.make_process()), torch.tensor(state.t, dtype=torch.float64)
    points = torch.tensor(state.points, dtype=torch.float64)
    return float(score.noise_trace(score.process.alpha(t) * points, t).max())


def largest(state: State) -> float:
    """Return the largest value on the map of the noise of the target."""
    return float(evaluate(state.replace(map="noise", layers=())).values.max())


def cells(state: State) -> int:
    """Return the number of cells per axis of the plane; it is odd, so that a centre is at 0."""
    return next(count for most, count in CELLS if len(state.points) <= most)


def centres(d: int, count: int) -> Tensor:
    """Return the centres of ``count`` cells per axis of the window, ``(count^d, d)``."""
    return (1 - 1 / count) * grid(d, count)


@dataclass(frozen=True)
class Map:
    """What is drawn at one time. In the plane values are ``(cells, cells)`` with rows along coordinate two; on the
    line a curve over ``x`` beside a field ``(R, X)`` over times ``field_t`` and places."""

    values: np.ndarray
    arrows: np.ndarray  # (4, k): x, y of the tails and of the heads
    lines: np.ndarray  # (m, 2, 2): segments of boundaries, each a row of x and a row of y
    exact_arrows: np.ndarray | None = None  # those of the exact score, if ``arrows`` are those of a model
    x: np.ndarray | None = None
    density: np.ndarray | None = None  # p(x|t) on the line
    field: np.ndarray | None = None
    field_t: np.ndarray | None = None


def evaluate(state: State, result: Result | None = None, member: int | None = None) -> Map:
    """Evaluate the map of the state at its t; ``member`` has its arrows drawn, -1 the mean of the models."""
    score, t = vk.EmpiricalScore(empirical(state), state.make_process()), torch.tensor(state.t, dtype=torch.float64)
    learned = state.map in ("variance", "variance_share")
    values = _learned(state, result) if learned else _exact(state.map, score)
    arrows = _arrows(score, state, score) if "arrows" in state.layers or member is not None else np.zeros((4, 0))
    given: dict[str, np.ndarray | None] = {}
    ensemble = models(state, result)
    if member is not None and isinstance(ensemble, vk.Ensemble):
        own = ensemble[member] if member >= 0 else ensemble.mean_score
        given["exact_arrows"], arrows = arrows, _arrows(own, state, score)
    if state.d == 2:
        count = cells(state)
        at = places(score, centres(2, count), t, LIMIT / count)
        lines = _segments(at, LIMIT / count) if "boundaries" in state.layers else np.zeros((0, 2, 2))
        if values is None:
            return Map(np.zeros((0, 0)), arrows, lines, **given)
        x, side = (centres(2, coarse(state)), coarse(state)) if learned else (at.x, count)
        return Map(values(x, t).reshape(side, side).clamp_min(TINY).float().numpy(), arrows, lines, **given)
    x, at = _nodes(score, t)
    spots = at.x[at.on, 0].numpy() if "boundaries" in state.layers else np.zeros(0)
    lines = np.stack([np.stack([spots, spots], 1), np.broadcast_to([0.0, 1.0], (len(spots), 2))], 1)
    given |= {"x": x[:, 0].numpy(), "density": score.posterior(x, t).logp.exp().numpy()}
    if values is None:
        return Map(np.zeros(0), arrows, lines, **given)
    curve = values(x, t).clamp_min(TINY).float().numpy()
    if not learned or (
        result is not None and result.state.sampler != "ntk"
    ):  # a wide network takes a second for the whole field
        view = state.replace(t=state.make_process().T, layers=(), compare=False, outcome=False, dark=False)
        given["field"], given["field_t"] = _field(view, result if learned else None)
    return Map(curve, arrows, lines, **given)


Values = Callable[[Tensor, Tensor], Tensor]


def _exact(name: str, score: vk.EmpiricalScore) -> Values | None:
    """Return the function of (x, t) that a map of the target's noise shows."""

    def share(x: Tensor, t: Tensor) -> Tensor:
        s, C = score.with_covariance(x, t)
        trace = C.trace()
        return trace / (trace + s.square().sum(-1)).clamp_min(1e-300)

    return {"noise": score.noise_trace, "share": share}.get(name)


def _learned(state: State, result: Result | None) -> Values | None:
    """Return the function of (x, t) that a map of the disagreement of models shows; ``None`` without models."""
    learned = models(state, result)
    if learned is None:
        return None

    @torch.no_grad()
    def shown(x: Tensor, t: Tensor) -> Tensor:
        trace = learned.cov(x, t).trace()
        if state.map == "variance":
            return trace * learned.process.S(t)
        return trace / (trace + learned.mean(x, t).square().sum(-1)).clamp_min(1e-300)

    return shown


def coarse(state: State) -> int:
    """Return the number of cells per axis of a map of models, which are smooth."""
    return COARSE.get(state.sampler, COARSE["linear"]) | 1


def _nodes(score: vk.EmpiricalScore, t: Tensor) -> tuple[Tensor, Places]:
    """Return sorted nodes on the line: an even grid, the boundaries, and nodes beside each at multiples of its width
    :math:`1/|g'|`."""
    even = grid(1, NODES)
    at = places(score, even, t, LIMIT / (NODES - 1))
    width = 1 / at.gradient[at.on].abs()
    beside = torch.cat([at.x[at.on] + step * width for step in STEPS])
    return torch.cat([even, beside[beside.abs()[:, 0] <= LIMIT]]).sort(0)[0], at


@lru_cache(maxsize=8)
def _field(state: State, result: Result | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the quantity of a map over times, from T to eps, and places; it does not depend on the state's t."""
    process = state.make_process()
    rows, columns = FIELD.get(state.map, COARSE_FIELD)
    times, line = torch.logspace(math.log10(process.T), math.log10(process.eps), rows).double(), centres(1, columns)
    times = times.clamp(process.eps, process.T)
    t, x = times.repeat_interleave(columns), line.repeat(rows, 1)
    if result is None:
        score = vk.EmpiricalScore(empirical(state), process)
        values, x = _exact(state.map, score), places(score, x, t, LIMIT / columns).x
    else:
        values = _learned(state, result)
    assert values is not None
    return values(x, t).clamp_min(TINY).reshape(rows, columns).float().numpy(), times.numpy()


def _arrows(shown: vk.Score, state: State, score: vk.EmpiricalScore) -> np.ndarray:
    """Return arrows along a score; their length, sigma² |s|, is shortened to fit the grid."""
    count = ARROWS if state.d == 2 else 2 * ARROWS - 1
    x, room = grid(state.d, count), 0.8 * 2 * LIMIT / (count - 1)
    step = score.process.S(torch.tensor(state.t, dtype=torch.float64)) * shown(x, state.t).detach()
    size = step.norm(dim=-1, keepdim=True)
    half = step / size.clamp_min(1e-12) * room * torch.tanh(size / 0.5) / 2
    return torch.cat([torch.nn.functional.pad(end, (0, 2 - state.d)) for end in (x - half, x + half)], 1).mT.numpy()


def _segments(at: Places, half: float) -> np.ndarray:
    """Return the part of the boundary in each cell that it crosses, as segments ``(m, 2, 2)``."""
    foot, normal = at.x[at.on], at.gradient[at.on]
    along = torch.stack([-normal[:, 1], normal[:, 0]], 1) / normal.norm(dim=1, keepdim=True)
    reach = 1.2 * half  # a little over the cell, so that segments of neighbours touch
    return torch.stack([foot - reach * along, foot + reach * along], 2).numpy()
