"""The maps are the exact functions at places of their cells, also where boundaries are thinner than a cell."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

import vkernel as vk
from vkernel.explore import answers, compute, maps, probe
from vkernel.explore.captions import POINTS
from vkernel.explore.state import HEXAGON, LAYERS, State

CLUSTERS, PAIR = POINTS["clusters"], ((-1.0,), (1.0,))


def level(state: State) -> tuple[float, float]:
    """Return alpha and sigma² at the state's t."""
    process, t = state.make_process(), torch.tensor(state.t, dtype=torch.float64)
    return float(process.alpha(t)), float(process.S(t))


@pytest.mark.parametrize("t", [0.001, 0.02, 0.1, 0.5])
def test_map_of_two_points_is_the_closed_form(t: float) -> None:
    """C = (α/σ²)² sech²(αx/σ² + ½ log(w₊/w₋)), and s = (α tanh(…) - x)/σ²; the nodes contain the maximum."""
    state = State(points=PAIR, weights=(3, 1), t=t)
    found, (alpha, var) = maps.evaluate(state), level(state)
    assert found.x is not None
    x = found.x.astype(float)
    lean = np.clip(alpha * x / var + 0.5 * np.log(1 / 3), -300, 300)
    C = (alpha / var) ** 2 / np.cosh(lean) ** 2
    s = (alpha * np.tanh(lean) - x) / var
    assert found.values == pytest.approx(np.maximum(var * C, maps.TINY), rel=1e-5, abs=1e-9 * alpha**2 / var)
    if var / (2 * alpha) * np.log(3) < 2:  # the boundary is in the window, and sech is 1 there
        assert found.values.max() == pytest.approx(alpha**2 / var, rel=1e-5)
    share = maps.evaluate(state.replace(map="share")).values
    assert share == pytest.approx(C / (C + s**2), abs=2e-5)
    assert found.density is not None
    assert np.trapezoid(found.density, x) == pytest.approx(1, abs=0.01 if t < 0.5 else 0.05)
    assert found.field is not None
    assert found.field_t is not None
    a, v = (f(torch.tensor(found.field_t)).numpy() for f in (state.make_process().alpha, state.make_process().S))
    shift = v / (2 * a) * np.log(3)  # the boundary is in the window while its shift is
    assert found.field.max(1)[shift < 1.9] == pytest.approx((a**2 / v)[shift < 1.9], rel=1e-4)


@pytest.mark.parametrize("t", [0.001, 0.02])
def test_thin_boundaries_are_drawn_whole(t: float) -> None:
    """On the bisector of two neighbours of the hexagon, away from its centre, these two alone have weight: σ² tr C =
    α² Δ²/(4 σ²). Cells on the way, or next to it, show that within 1 %; and between the two points, where s
    vanishes, the share exceeds .99."""
    state = State(points=HEXAGON, t=t)
    values, (alpha, var) = maps.evaluate(state).values, level(state)
    count, want = len(values), alpha**2 / (4 * var)
    for angle in np.deg2rad(30 + 60 * np.arange(6)):
        along = np.arange(0.5, 1.7, 0.5 / count)
        j, i = (((f(angle) * along + 2) * count / 4).astype(int) for f in (np.cos, np.sin))
        steps = [(a, b) for a in (-1, 0, 1) for b in (-1, 0, 1)]
        near = np.stack([values[(i + a).clip(0, count - 1), (j + b).clip(0, count - 1)] for a, b in steps])
        assert np.abs(near.max(0) / want - 1).max() < 0.01
    share, centres = maps.evaluate(state.replace(map="share")).values, maps.centres(2, count).reshape(count, count, 2)
    between = np.abs(centres.norm(dim=-1).numpy() - alpha * np.sqrt(3) / 2) < 1.5 / count
    assert share[between & (values > 0.99 * want)].min() > 0.99
    assert (between & (values > 0.99 * want)).sum() >= 6


def test_values_are_exact_at_places_of_their_cells() -> None:
    state = State(points=CLUSTERS, t=0.03)
    score = vk.EmpiricalScore(compute.empirical(state), state.make_process())
    count = maps.cells(state)
    centres, t = maps.centres(2, count), torch.tensor(state.t, dtype=torch.float64)
    at = maps.places(score, centres, t, 2 / count)
    assert (at.x - centres).abs().max() <= 2 / count + 1e-12
    weights, _ = score.posterior(at.x[at.on], t).top(2)
    heavy = weights[:, 1] > 0.45  # others have weight where three boundaries meet
    assert float((weights[heavy, 0] - weights[heavy, 1]).abs().max()) < 1e-9
    assert float(heavy.double().mean()) > 0.6
    values = maps.evaluate(state).values.flatten()
    assert values == pytest.approx(score.noise_trace(at.x, t).numpy(), rel=1e-5, abs=1e-12)
    middle = score.noise_trace(centres, t).numpy()
    assert (values[at.on.numpy()] > 0.99 * middle[at.on.numpy()]).mean() > 0.9
    assert float(maps.centres(1, 161).abs().min()) < 1e-12
    assert np.abs(np.asarray(maps.evaluate(State()).x)).min() < 1e-12


def test_boundary_lines_have_equal_weights() -> None:
    state = State(points=CLUSTERS, weights=(3,) + (1,) * 14, t=0.05, layers=("boundaries",))
    lines = maps.evaluate(state).lines
    assert len(lines) > 50
    ends = torch.tensor(lines.transpose(0, 2, 1).reshape(-1, 2))
    score = vk.EmpiricalScore(compute.empirical(state), state.make_process())
    weights, _ = score.posterior(ends, state.t).top(2)
    assert float((weights[:, 0] - weights[:, 1]).abs().median()) < 1e-6
    line = maps.evaluate(State(points=PAIR, weights=(3, 1), t=0.05, layers=("boundaries",)))
    alpha, var = level(State(t=0.05))
    assert line.lines[:, 0] == pytest.approx(np.full((1, 2), var / (2 * alpha) * np.log(3)), abs=1e-6)


def test_arrows_point_along_the_score() -> None:
    state = State(points=CLUSTERS, t=0.2, layers=("arrows",))
    x0, y0, x1, y1 = maps.evaluate(state).arrows
    middle = torch.tensor(np.stack([(x0 + x1) / 2, (y0 + y1) / 2], 1))
    s = vk.EmpiricalScore(compute.empirical(state), state.make_process())(middle, state.t).numpy()
    cross = (x1 - x0) * s[:, 1] - (y1 - y0) * s[:, 0]
    assert np.abs(cross).max() < 1e-6 * np.abs(s).max()
    assert ((x1 - x0) * s[:, 0] + (y1 - y0) * s[:, 1] >= 0).all()


def test_drag_is_answered_in_time() -> None:
    """64 points with every layer and the share of noise, on one thread: under 100 ms; the best of five."""
    rng = np.random.default_rng(0)
    took = []
    for k in range(5):
        state = State(points=tuple(map(tuple, rng.uniform(-1.5, 1.5, (64, 2)))), t=0.05 + 0.05 * k, layers=LAYERS)
        start = time.perf_counter()
        maps.evaluate(state)
        compute.noise_share(state)
        took.append(time.perf_counter() - start)
    assert min(took) < 0.1


@pytest.mark.parametrize("n", [1, 2, 1000])
def test_one_point_and_a_thousand(n: int) -> None:
    points = tuple(map(tuple, np.random.default_rng(1).uniform(-1.9, 1.9, (n, 2)).tolist()))
    for name in ("noise", "share"):
        found = maps.evaluate(State(points=points, t=0.1, map=name, layers=LAYERS))
        assert np.isfinite(found.values).all()
        assert (found.values.max() <= maps.TINY) == (n == 1)
        assert (len(found.lines) == 0) == (n == 1)
    same = maps.evaluate(State(points=points[:1] * 3, t=0.1))
    assert same.values.max() < 1e-9  # three copies of one point


def test_models_are_mapped_over_their_members(small: None) -> None:
    """σ² tr V is σ² times the sum of the variances of the members' scores."""
    for points in (PAIR, CLUSTERS):
        state = State(points=points, steps=6, map="variance", t=0.2)
        result = compute.simulate(state)
        found, (_, var) = maps.evaluate(state, result, member=2), level(state)
        assert result.learned is not None
        x = maps.centres(2, maps.coarse(state)) if state.d == 2 else torch.tensor(np.asarray(found.x, float))[:, None]
        scores = result.learned(x, state.t)
        assert found.values.flatten() == pytest.approx(var * scores.var(0).sum(-1).numpy(), rel=1e-4, abs=1e-8)
        assert found.exact_arrows is not None
        assert not np.allclose(found.exact_arrows, found.arrows)
        assert maps.evaluate(state, None).values.size == 0
        later = state.replace(eps=0.01, t=0.01)  # models of another cutoff are not evaluated beyond it
        assert maps.evaluate(later, result).values.size == 0
        assert probe.evaluate(later, [0.1] * state.d, result).learned.size == 0
        assert "exact_arrows" not in answers.map(later, result, {"member": 1})[1]
