"""Noise, x0, v and flow predictions: there and back, closed forms, and what a network would learn."""

from __future__ import annotations

import math

import pytest
import torch
from draws import normal
from hypothesis import given, settings, strategies as st
from reference import PROCESSES, answers, levels, stack, time_between
from torch.func import jvp

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.score import conversions as pr

KINDS = {"noise": pr.to_noise, "x0": pr.to_x0, "v": pr.to_v, "flow": pr.to_flow}


def to(kind: str, score, process: vk.Process):
    """The prediction of a score, or of a function read as one."""
    return KINDS[kind](score if isinstance(score, vk.Score) else vk.as_score(score, process))


def of(kind: str, net, process: vk.Process) -> vk.Score:
    """The score of a network that makes this prediction."""
    return vk.as_score(net, process, predicts=kind)


def drift(name: str, t: float) -> tuple[float, float]:
    """beta = -alpha'/alpha and D = S'/2 + beta S by central differences of the reference's formulas."""
    h = 1e-5 * max(t, 1e-3)
    (a0, s0), (a1, s1), (alpha, S) = levels(name, t - h), levels(name, t + h), levels(name, t)
    beta = -(a1 - a0) / (2 * h) / alpha
    return beta, (s1 - s0) / (4 * h) + beta * S


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(name=st.sampled_from(sorted(PROCESSES)), u=st.floats(0.1, 1), seed=st.integers(0, 10**6))
def test_there_and_back(kind, name, u, seed):
    """from(to(s)) = s and to(from(net)) = net, for any function at all."""
    process = PROCESSES[name]
    t = time_between(process, u)
    x, w = normal(4, 3, seed=seed), normal(3, 3, seed=seed + 1)

    def anything(q, _):
        return torch.tanh(q @ w) + 0.1 * q

    there = of(kind, to(kind, anything, process), process)
    back = to(kind, of(kind, anything, process), process)
    alpha, S = levels(name, t)
    loss = 1e-13 * (1 + 1 / S + 1 / alpha**2 + S)
    for f in (there, back):
        torch.testing.assert_close(f(x, t), anything(x, t), rtol=1e-8, atol=loss + 1e-9)


@pytest.mark.parametrize("name", sorted(PROCESSES))
def test_predictions_of_the_exact_score_are_conditional_means(name):
    """E[noise|x], E[x0|x], E[alpha noise - sigma x0|x], E[dx/dt|x]: sums over the posterior of brute force."""
    process = PROCESSES[name]
    points = normal(9, 3, seed=0)
    score = vk.EmpiricalScore(points, process)
    for u in (0.35, 0.6, 0.85):
        t = time_between(process, u)
        if name == "ddpm":
            t = math.floor(t) + 0.4  # off the knots, where beta jumps
        alpha, S = levels(name, t)
        sigma = math.sqrt(S)
        x = alpha * points[:4] + sigma * normal(4, 3, seed=1)
        truth = answers(points, None, x, name, t)
        r = stack(truth, "weight")
        noise = (x[:, None] - alpha * points) / sigma  # (B, n, d): what the noise was, had point i made x
        mean = {
            "noise": (r[..., None] * noise).sum(1),
            "x0": r @ points,
            "v": (r[..., None] * (alpha * noise - sigma * points)).sum(1),
        }
        beta, D = drift(name, t)
        slope_alpha, slope_sigma = -beta * alpha, (D - beta * S) / sigma
        mean["flow"] = (r[..., None] * (slope_alpha * points + slope_sigma * noise)).sum(
            1
        )  # dx/dt = a' x0 + sigma' noise
        for kind, want in mean.items():
            scale = float(want.abs().max())
            torch.testing.assert_close(to(kind, score, process)(x, t), want, rtol=1e-5, atol=1e-5 * scale + 1e-9)
            torch.testing.assert_close(
                of(kind, lambda q, _, a=want: a, process)(x, t), stack(truth, "score"), rtol=1e-5, atol=1e-5 / sigma
            )


@pytest.mark.parametrize("name", sorted(PROCESSES))
def test_tweedie(name):
    """(x + S s)/alpha is the posterior mean."""
    process = PROCESSES[name]
    score = vk.EmpiricalScore(normal(9, 3, seed=0), process)
    t = torch.tensor([time_between(process, u) for u in (0.2, 0.5, 0.8)], dtype=torch.float64)
    x = normal(3, 3, seed=1)
    torch.testing.assert_close(pr.to_x0(score)(x, t), score.posterior(x, t).mean, rtol=1e-6, atol=1e-6)


def test_flow_matching_by_its_own_formula():
    """s = -(x + (1-t) v)/t with v = E[noise - x0|x]."""
    process = vk.FlowMatching()
    points = normal(6, 2, seed=0)
    score = vk.EmpiricalScore(points, process)
    x = normal(5, 2, seed=1)
    for t in (0.1, 0.5, 0.9, 0.999):
        r = stack(answers(points, None, x, "flow", t), "weight")
        noise = (x[:, None] - (1 - t) * points) / t
        v = (r[..., None] * (noise - points)).sum(1)
        torch.testing.assert_close(pr.to_flow(score)(x, t), v, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(score(x, t), -(x + (1 - t) * v) / t, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(of("flow", lambda q, u, v=v: v, process)(x, t), score(x, t), rtol=1e-6, atol=1e-6)
        # the regular form of the flow: dx/dt = (x - m)/t
        torch.testing.assert_close(v, (x - score.posterior(x, t).mean) / t, rtol=1e-6, atol=1e-6)


def test_v_of_a_variance_preserving_process_is_a_rotation():
    """With alpha = cos φ, sigma = sin φ: x0 = cos φ x - sin φ v and noise = sin φ x + cos φ v."""
    process = vk.VP()
    score = vk.EmpiricalScore(normal(9, 3, seed=0), process)
    x, t = normal(4, 3, seed=1), 0.15
    alpha, S = levels("vp", t)
    v = pr.to_v(score)(x, t)
    torch.testing.assert_close(pr.to_x0(score)(x, t), alpha * x - math.sqrt(S) * v)
    torch.testing.assert_close(pr.to_noise(score)(x, t), math.sqrt(S) * x + alpha * v)


@pytest.mark.parametrize("name", sorted(PROCESSES))
def test_the_proxy_score_is_the_gradient_of_log_p_given_x0(name):
    process = PROCESSES[name]
    x, x0 = normal(4, 3, seed=0), normal(4, 3, seed=1)
    t = torch.tensor([time_between(process, u) for u in (0.2, 0.4, 0.6, 0.9)], dtype=torch.float64)
    got = vk.proxy_score(x, t, x0, process)
    for b in range(4):
        alpha, S = levels(name, float(t[b]))
        torch.testing.assert_close(got[b], (alpha * x0[b] - x[b]) / S)


def test_the_proxy_score_of_anisotropic_noise():
    a = normal(3, 3, seed=2)
    gamma = a @ a.mT + torch.eye(3, dtype=torch.float64)
    x, x0, t = normal(4, 3, seed=0), normal(4, 3, seed=1), 0.3
    alpha, S = levels("vp", t)
    want = torch.linalg.solve(S * gamma, (alpha * x0 - x).mT).mT
    torch.testing.assert_close(vk.proxy_score(x, t, x0, vk.Anisotropic(vk.VP(), gamma)), want)


@pytest.mark.parametrize("kind", KINDS)
def test_images_times_for_each_and_gradients(kind):
    process = vk.VP()
    points = normal(5, 1, 2, 2, seed=0)
    score = vk.EmpiricalScore(vk.Empirical(points), process)
    x, t = normal(3, 1, 2, 2, seed=1), torch.tensor([0.1, 0.3, 0.6], dtype=torch.float64)
    net = to(kind, score, process)
    for b in range(3):
        torch.testing.assert_close(net(x, t)[b], net(x[b], float(t[b])))
    torch.testing.assert_close(of(kind, net, process)(x, t), score(x, t))
    v = normal(3, 1, 2, 2, seed=2)
    h = 1e-6
    numeric = (net(x + h * v, t) - net(x - h * v, t)) / (2 * h)
    torch.testing.assert_close(jvp(lambda q: net(q, t), (x,), (v,))[1], numeric, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("t", [0.002, 0.3])
def test_predictions_keep_the_type_of_x_and_their_digits(dtype, t):
    """Half inputs accumulate in float32: the answer is that of float64 at the same numbers, rounded."""
    process = vk.VP()
    x0 = normal(5, 3, seed=1).to(dtype)
    alpha, S = levels("vp", t)
    x = (alpha * x0.double() + math.sqrt(S) * normal(5, 3, seed=0)).to(dtype)  # at low noise alpha x0 - x cancels
    got, want = vk.proxy_score(x, t, x0, process), vk.proxy_score(x.double(), t, x0.double(), process)
    assert got.dtype == dtype
    unit = torch.finfo(dtype).eps
    working = 2**-23 * float(x.abs().max()) / S  # of float32, in which alpha x0 - x is formed
    assert (got.double() - want).abs().max() <= 2 * unit * want.abs().max() + working
    for kind in KINDS:

        def net(q, _):
            return torch.tanh(q)

        for make in (to, of):
            a, b = (
                make(kind, net, process)(x, t),
                make(kind, lambda q, _: torch.tanh(q.to(dtype)).double(), process)(x.double(), t),
            )
            assert a.dtype == dtype
            assert (a.double() - b).abs().max() <= 8 * unit * b.abs().max() + working, (kind, make)


def test_integers_are_numbers_too():
    x, x0 = torch.tensor([[2, 1]]), torch.tensor([[1, 0]])
    want = vk.proxy_score(x.float(), 0.3, x0.float(), vk.VP())
    torch.testing.assert_close(vk.proxy_score(x, 0.3, x0, vk.VP()), want)
    torch.testing.assert_close(vk.proxy_score(x.float(), 0.3, x0, vk.VP()), want)


def test_anisotropic_noise_has_no_such_predictions():
    process = vk.Anisotropic(vk.VP(), torch.ones(3) * 2)
    for kind in ("noise", "v", "flow"):
        for make in (to, of):
            with pytest.raises(InputError, match="isotropic"):
                make(kind, lambda x, t: x, process)
    with pytest.raises(InputError, match="isotropic"):
        pr.to_x0(vk.as_score(lambda x, t: x, process))


@pytest.mark.parametrize("t", [-0.1, 1.5, math.nan])
def test_times_outside_the_process_are_refused(t):
    x = torch.zeros(2, 3)
    with pytest.raises(InputError, match="outside"):
        vk.proxy_score(x, t, x, vk.FlowMatching())
    for kind in KINDS:
        with pytest.raises(InputError, match="outside"):
            of(kind, lambda q, _: q, vk.FlowMatching())(x, t)


@pytest.mark.parametrize("t", [torch.full((3,), 0.1), torch.full((2, 3, 4), 0.1)], ids=["other batch", "too deep"])
def test_times_of_another_shape_are_refused(t):
    x = torch.zeros(2, 5)
    with pytest.raises(InputError, match="shape"):
        vk.proxy_score(x, t, x, vk.VP())
