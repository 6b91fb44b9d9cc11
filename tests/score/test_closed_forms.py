"""Closed forms of the exact score: two points, tiny covariances, duplicates, boundaries."""

from __future__ import annotations

import math

import pytest
import torch
from draws import gen, normal
from hypothesis import given, settings, strategies as st
from reference import PROCESSES, levels, time_between
from torch import Tensor

import vkernel as vk


def weights_of(n: int, seed: int) -> Tensor:
    return 0.1 + torch.rand(n, generator=gen(seed), dtype=torch.float64)


@settings(max_examples=60, deadline=None)
@given(
    mu=st.floats(0.2, 3),
    plus=st.floats(0.01, 0.99),
    u=st.floats(0.15, 1),
    z=st.floats(-1.5, 1.5),
    name=st.sampled_from(sorted(PROCESSES)),
)
def test_two_points_have_a_sech_squared(mu, plus, u, z, name):
    """C = (alpha² mu²/sigma⁴) sech²(alpha mu x/sigma² + ½ log(w+/w-)), with relative accuracy where it is tiny."""
    process = PROCESSES[name]
    t = time_between(process, u)
    alpha, S = levels(name, t)
    x = z * alpha * mu
    argument = alpha * mu * x / S + 0.5 * math.log(plus / (1 - plus))
    data = vk.Empirical(torch.tensor([-mu, mu], dtype=torch.float64), [1 - plus, plus])
    score = vk.EmpiricalScore(data, process)
    q = torch.tensor([x], dtype=torch.float64)
    got = float(score.covariance(q, t).trace())
    if abs(argument) > 300:
        assert 0 <= got < 1e-200 / S**2
        return
    want = alpha**2 * mu**2 / S**2 / math.cosh(argument) ** 2
    rel = 1e-11 * (1 + abs(argument) + mu**2 * alpha**2 / S)
    assert got == pytest.approx(want, rel=rel)
    assert float(score.covariance(q, t).diag()) == pytest.approx(want, rel=rel)
    assert float(score.covariance(q, t) @ torch.ones(1, dtype=torch.float64)) == pytest.approx(want, rel=rel)
    assert float(score(q, t)) == pytest.approx((alpha * mu * math.tanh(argument) - x) / S, rel=1e-9, abs=1e-9 / S)


@pytest.mark.parametrize("d", [1, 2, 784])
@pytest.mark.parametrize("weights", [None, [0.9, 0.1]])
def test_tiny_covariances_at_a_training_point(d, weights):
    """C is exponentially small at a training point: 1e-2 … 1e-60, each to nine digits."""
    direction = normal(d, seed=0)
    direction /= direction.norm()
    points = torch.stack([-direction, direction])
    score = vk.EmpiricalScore(vk.Empirical(points, weights), vk.EDM())
    ratio = 1.0 if weights is None else weights[1] / weights[0]
    sizes = []
    for sigma in (0.45, 0.3, 0.25, 0.2, 0.15, 0.12):
        for x in (1.0, -1.0, 0.8):
            argument = x / sigma**2 + 0.5 * math.log(ratio)
            want = math.cosh(argument) ** -2 / sigma**4
            sizes.append(want)
            C = score.covariance(x * direction, sigma)
            assert float(C.trace()) == pytest.approx(want, rel=1e-9)
            assert float((C @ direction) @ direction) == pytest.approx(want, rel=1e-9)
            assert float(C.diag().sum()) == pytest.approx(want, rel=1e-9)
    assert min(sizes) < 1e-50


def test_tiny_covariances_in_float32():
    """A float32 query of float32 data: 1e-25 is no less exact."""
    points = torch.zeros(2, 784)
    points[0, 0], points[1, 0] = -1.0, 1.0
    x = torch.zeros(784)
    x[0] = 1.0
    got = vk.EmpiricalScore(points, vk.EDM()).covariance(x, 0.17).trace()
    assert got.dtype == torch.float32
    want = math.cosh(1 / 0.17**2) ** -2 / 0.17**4
    assert want < 1e-25
    assert float(got) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("d", [1, 40])
def test_duplicates_are_weights(d):
    """Twice the point -y is the weight 2 on it; what C may lack is e^-16 of the weight, times |2y|²/sigma⁴."""
    direction = normal(d, seed=0)
    direction /= direction.norm()
    twice = vk.EmpiricalScore(torch.stack([-direction, -direction, direction]), vk.EDM())
    heavy = vk.EmpiricalScore(vk.Empirical(torch.stack([-direction, direction]), [2, 1]), vk.EDM())
    for sigma in (0.1, 0.3, 0.5, 1.0, 3.0):
        x = torch.linspace(-1.2, 1.2, 13, dtype=torch.float64)[:, None] * direction
        torch.testing.assert_close(twice(x, sigma), heavy(x, sigma), rtol=1e-7, atol=1e-6 / sigma**2)
        a, b = (s.covariance(x, sigma).trace() for s in (twice, heavy))
        torch.testing.assert_close(a, b, rtol=1e-6, atol=4 * math.exp(-16) / sigma**4)
        torch.testing.assert_close(twice.posterior(x, sigma).logp, heavy.posterior(x, sigma).logp, rtol=1e-9, atol=1e-6)


@pytest.mark.parametrize("d", [1, 3, 784])
@pytest.mark.parametrize("name", ["vp", "edm", "toy"])
def test_the_boundary_moves_towards_the_rare_point(d, name):
    """By sigma²/(alpha |Δ|) log(w1/w2) from the middle; there both points weigh one half."""
    y = normal(2, d, seed=0)
    w = [0.97, 0.03]
    process = PROCESSES[name]
    score = vk.EmpiricalScore(vk.Empirical(y, w), process)
    gap = (y[1] - y[0]).norm()
    toward = (y[1] - y[0]) / gap
    for u in (0.3, 0.5):
        t = time_between(process, u)
        alpha, S = levels(name, t)
        x = alpha * y.mean(0) + S / (alpha * gap) * math.log(w[0] / w[1]) * toward
        posterior = score.posterior(x, t)
        for i in (0, 1):
            assert float(posterior.weight(torch.tensor(i))) == pytest.approx(0.5, abs=1e-6)
        assert float(score.covariance(x, t).trace()) == pytest.approx(alpha**2 * float(gap) ** 2 / 4 / S**2, rel=1e-6)
        step = 3 * S / (alpha * gap) * toward
        assert int(score.posterior(x + step, t).top(1)[1]) == 1
        assert int(score.posterior(x - step, t).top(1)[1]) == 0


def test_C_peaks_on_boundaries_and_vanishes_at_points():
    score = vk.EmpiricalScore(vk.data.triple(), vk.VP(eps=1e-4))
    at_points, between = torch.tensor([[-1.0], [0.0], [1.0]]).double(), torch.tensor([[-0.5], [0.5]]).double()
    ratios = []
    for t in (0.03, 0.02, 0.01):
        alpha, S = levels("vp", t)
        at, gap = (score.covariance(alpha * x, t).trace() for x in (at_points, between))
        assert float(gap.min()) == pytest.approx(alpha**2 / 4 / S**2, rel=1e-3)
        ratios.append(float(at.max() / gap.min()))
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[-1] < 1e-20
