"""The numbers of the page are those of the library: maps, samples, gap masses."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

import vkernel as vk
from vkernel.explore import captions, compute
from vkernel.explore.captions import POINTS
from vkernel.explore.state import LAYERS, State

TRIPLE, CLUSTERS = POINTS["triple"], POINTS["clusters"]


def test_map_is_the_noise_of_the_target() -> None:
    """Two points on the line: C and s in closed form."""
    state = State(points=((-1.0,), (1.0,)), weights=(3, 1), t=0.1, layers=LAYERS)
    found = compute.exact(state)
    process = state.make_process()
    t = torch.tensor(0.1, dtype=torch.float64)
    alpha, var = float(process.alpha(t)), float(process.S(t))
    x = np.linspace(-2, 2, compute.NODES)
    lean = alpha * x / var + 0.5 * np.log(1 / 3)
    C = (alpha / var) ** 2 / np.cosh(lean) ** 2
    s = (alpha * np.tanh(lean) - x) / var
    assert found.fraction == pytest.approx(C / (C + s**2), abs=1e-6)
    assert found.density is not None
    assert np.trapezoid(found.density, x) == pytest.approx(1, abs=0.01)


def test_boundary_lines_enclose_the_region_of_the_metric() -> None:
    state = State(points=CLUSTERS, t=0.1, layers=("boundaries",))
    score = vk.EmpiricalScore(compute.empirical(state), state.make_process())
    lines = compute.exact(state).lines
    assert lines
    along = torch.tensor(np.concatenate(lines, 1).T)
    s, C = score.with_covariance(along, state.t)
    fraction = C.trace() / (C.trace() + s.square().sum(-1))
    level = torch.minimum(C.trace() * score.process.S(torch.tensor(state.t, dtype=torch.float64)), 2 * fraction)
    assert float((level - 1).abs().median()) < 0.02
    inside = vk.metrics.boundary_mass(along, score, t=state.t).value
    assert 0.2 < inside < 0.8  # places on an outline are in and out by rounding


def test_arrows_point_along_the_score() -> None:
    state = State(points=CLUSTERS, t=0.2, layers=("arrows",))
    x0, y0, x1, y1 = compute.exact(state).arrows
    middle = torch.tensor(np.stack([(x0 + x1) / 2, (y0 + y1) / 2], 1))
    s = vk.EmpiricalScore(compute.empirical(state), state.make_process())(middle, state.t).numpy()
    cross = (x1 - x0) * s[:, 1] - (y1 - y0) * s[:, 0]
    assert np.abs(cross).max() < 1e-6 * np.abs(s).max()
    assert ((x1 - x0) * s[:, 0] + (y1 - y0) * s[:, 1] >= 0).all()


def test_drag_is_answered_in_time() -> None:
    """64 points on the grid of 100 × 100: under 300 ms with every layer and the panel; the best of five."""
    rng = np.random.default_rng(0)
    took = []
    for k in range(5):
        state = State(points=tuple(map(tuple, rng.uniform(-1.5, 1.5, (64, 2)))), t=0.05 + 0.05 * k, layers=LAYERS)
        start = time.perf_counter()
        found = compute.exact(state)
        compute.noise_share(state)
        took.append(time.perf_counter() - start)
        assert found.fraction.shape == (100, 100)
    assert min(took) < 0.25


@pytest.mark.parametrize("n", [1, 1000])
def test_one_point_and_a_thousand(n: int, small: None) -> None:
    points = tuple(map(tuple, np.random.default_rng(1).uniform(-1.9, 1.9, (n, 2)).tolist()))
    state = State(points=points, t=0.1, layers=LAYERS)
    assert np.isfinite(compute.exact(state).fraction).all()
    found = compute.simulate(state)
    assert (found.gap is None) == (n == 1)
    assert "One training point" in captions.panel(state, compute.noise_share(state), found)["sentences"][0] or n > 1


@pytest.mark.parametrize("process", ["vp", "vpsong", "cosine", "flow", "toy", "edm"])
def test_every_process_flows_to_the_training_points(process: str, small: None) -> None:
    state = State(points=TRIPLE, process=process, eps=0.001, steps=100)
    found = compute.simulate(state)
    end = found.frames[-1, :, 0]
    assert np.abs(end[:, None] - np.array([-1, 0, 1])).min(1).max() < 0.15
    assert found.gap is not None
    assert found.gap.value < 0.05


def test_particles_of_the_naive_estimator_follow_the_sampler(small: None) -> None:
    state = State(points=CLUSTERS, sampler="naive", kappa=0.03, steps=15, seed=5)
    process = state.make_process()
    score = vk.EmpiricalScore(compute.empirical(state), process)
    x_T = process.prior((compute.ALONE, 2), dtype=torch.float64, generator=5)
    x = vk.sample.naive(score, x_T, kappa=0.03, steps=15, generator=5)
    found = compute.simulate(state)
    assert found.frames[0] == pytest.approx(x_T[: compute.PARTICLES].numpy(), abs=1e-6)
    assert found.frames[-1] == pytest.approx(x[: compute.PARTICLES].numpy(), abs=1e-6)


def test_runs_depend_on_their_inputs_alone() -> None:
    a = State(sampler="exact", kappa=0.1, K=4, t=0.5, dark=True)
    assert compute.run_inputs(a) == compute.run_inputs(State())
    assert compute.run_inputs(a.replace(sampler="naive")) != compute.run_inputs(State(sampler="naive"))
    assert compute.run_inputs(a.replace(sampler="linear")) != compute.run_inputs(State(sampler="linear"))
    assert compute.run_inputs(State(seed=1)) != compute.run_inputs(State())
