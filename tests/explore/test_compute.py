"""The runs of the page are those of the library: samples, gap masses, and results that are shipped."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import vkernel as vk
from vkernel.explore import captions, compute, shipped
from vkernel.explore.captions import POINTS
from vkernel.explore.state import State

TRIPLE, CLUSTERS = POINTS["triple"], POINTS["clusters"]


@pytest.mark.parametrize("n", [1, 1000])
def test_one_point_and_a_thousand(n: int, small: None) -> None:
    points = tuple(map(tuple, np.random.default_rng(1).uniform(-1.9, 1.9, (n, 2)).tolist()))
    found = compute.simulate(State(points=points, sampler="exact"))
    assert (found.gap is None) == (n == 1)
    if n == 1:
        assert captions.headline(found) == "one training point"
        assert captions.bars(found.state, found) == []


@pytest.mark.parametrize("process", ["vp", "vpsong", "cosine", "flow", "toy", "edm"])
def test_every_process_flows_to_the_training_points(process: str, small: None) -> None:
    state = State(points=TRIPLE, sampler="exact", process=process, eps=0.001, steps=100)
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


def test_average_follows_the_mean_of_the_scores(small: None) -> None:
    """The flow along (1/M) Σ ŝ_m, step by step as the sampler of the library takes it."""
    state = State(sampler="average", steps=15, K=2, seed=4)
    process, data = state.make_process(), compute.empirical(state)
    models = vk.train_ensemble(
        compute.model(state), data, process, members=12, draws=compute.draws(state), objective=vk.JK(2), seed=4
    )
    mean = vk.as_score(lambda x, t: torch.stack([models[m](x, t) for m in range(12)]).mean(0), process, (1,))
    x_T = process.prior((compute.ALONE, 1), dtype=torch.float64, generator=4)
    x = vk.sample.pf_ode(mean, x_T, steps=15)
    found = compute.simulate(state)
    assert found.frames[-1] == pytest.approx(x[: compute.PARTICLES].numpy(), abs=1e-5)
    assert found.member_gaps is None
    assert found.twin_law is not None


def test_theories_in_closed_form(small: None) -> None:
    """Widened points and one Gaussian have the variance of their law at the cutoff: α²(var + h²) + σ²."""
    for sampler, extra in (("gaussian", 0.0), ("smoothed", 0.3**2)):
        state = State(points=((-0.5,), (0.1,), (0.6,)), sampler=sampler, h=0.3, steps=200)
        found, process = compute.simulate(state), state.make_process()
        alpha, var = (float(f(torch.tensor(state.eps, dtype=torch.float64))) for f in (process.alpha, process.S))
        spread = float(np.var([-0.5, 0.1, 0.6])) + extra
        assert found.frames[-1].var() == pytest.approx(alpha**2 * spread + var, rel=0.25)  # 240 particles
    one = State(points=TRIPLE, sampler="nearest", k=50)
    assert compute.neighbours(one) == 3
    assert compute.simulate(one).law == pytest.approx(compute.simulate(one.replace(sampler="exact")).law, abs=0.02)
    switch = compute.simulate(State(points=TRIPLE, sampler="switch", steps=10))
    assert len(switch.times) == len(switch.frames)


def test_single_models_are_those_of_the_ensemble(small: None) -> None:
    found = compute.simulate(State(steps=10))
    law, gap = compute.member(found, 1)
    assert law == pytest.approx(found.members[1], abs=1e-6)
    assert gap is not None
    assert found.member_gaps is not None
    assert found.gap is not None
    assert found.member_gaps.mean() == pytest.approx(found.gap.value, abs=1e-9)
    learned = compute.learn(found.state, lambda label, share: None)
    x = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None]
    assert found.learned is not None
    assert torch.equal(learned(x, 0.1), found.learned(x, 0.1))  # type: ignore[misc, operator]


def test_runs_depend_on_their_inputs_alone() -> None:
    a, exact = (
        State(sampler="exact", kappa=0.1, K=4, t=0.5, map="share", compare=True, dark=True),
        State(sampler="exact"),
    )
    assert compute.key(a) == compute.key(exact)
    for sampler in ("naive", "linear", "average"):
        assert compute.key(a.replace(sampler=sampler)) != compute.key(State(sampler=sampler))
    assert compute.key(State(seed=1)) != compute.key(State())
    assert compute.key(State(h=0.3)) == compute.key(State())
    assert compute.key(State(sampler="smoothed", h=0.3)) != compute.key(State(sampler="smoothed"))


def test_key_covers_the_sizes_of_the_page(small: None) -> None:
    assert compute.key(State()) not in shipped._entries()["about"]
    assert shipped.find(State()) is None


def test_shipped_results_are_those_of_a_run() -> None:
    """All states of the tour and of the factors are there; one is computed again."""
    assert shipped.FILE.stat().st_size < 1.5e6
    assert all(shipped.find(state) is not None for state in shipped.states())
    state = State(sampler="average")
    old, new = shipped.find(state), compute.simulate(state)
    assert old is not None
    for a, b in ((old.gap, new.gap), (old.twin, new.twin)):
        assert a is not None
        assert b is not None
        assert a.value == pytest.approx(b.value, abs=0.002)  # another processor may round a sample across a threshold
        assert a.se == pytest.approx(b.se, abs=0.002)
    assert old.law == pytest.approx(new.law, abs=0.02)
    assert np.abs(old.frames - new.frames).mean() < 2e-3
