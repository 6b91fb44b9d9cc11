"""Identities of the exact score: balance, divergence, proxy scores, the noise fraction (docs/theory.md, §2)."""

from __future__ import annotations

import math

import pytest
import torch
from draws import gen, normal
from reference import PROCESSES, levels, time_between
from torch import Tensor
from torch.func import jacrev

import vkernel as vk


def weights_of(n: int, seed: int) -> Tensor:
    return 0.1 + torch.rand(n, generator=gen(seed), dtype=torch.float64)


def trapezoid(low: float, high: float, steps: int) -> tuple[Tensor, float]:
    return torch.linspace(low, high, steps + 1, dtype=torch.float64), (high - low) / steps


@pytest.mark.parametrize("name", sorted(PROCESSES))
@pytest.mark.parametrize("u", [0.3, 0.5, 0.8])
def test_E_C_plus_E_ss_is_inverse_S_by_quadrature(name, u):
    points, weights = torch.tensor([-1.0, 0.2, 1.0], dtype=torch.float64), torch.tensor([0.5, 0.2, 0.3])
    process = PROCESSES[name]
    t = time_between(process, u)
    alpha, S = levels(name, t)
    sigma = math.sqrt(S)
    steps = int(min(max(64 * (2 * alpha + 20 * sigma) / sigma, 2000), 400_000))
    x, h = trapezoid(-alpha - 10 * sigma, alpha + 10 * sigma, steps)
    score = vk.EmpiricalScore(vk.Empirical(points, weights), process)
    p = score.posterior(x[:, None], t).logp.exp()
    torch.testing.assert_close(p.sum() * h, torch.ones((), dtype=torch.float64), rtol=1e-9, atol=0)
    C, s = score.covariance(x[:, None], t).trace(), score(x[:, None], t)[:, 0]
    total = ((C + s.square()) * p).sum() * h
    assert abs(float(total) * S - 1) < 1e-9
    rho = vk.noise_fraction(score, process, t)
    assert rho.se == 0
    assert float(rho) == pytest.approx(float((C * p).sum() * h * S), rel=1e-7, abs=1e-12)


@pytest.mark.parametrize(("d", "t"), [(2, 0.05), (2, 0.15), (2, 0.4), (34, 0.3)])
def test_E_C_plus_E_ss_is_inverse_S_by_monte_carlo(d, t):
    points = vk.data.hexagon().rows(0, 6) if d == 2 else normal(12, d, seed=0) / 3
    score = vk.EmpiricalScore(points, vk.VP())
    alpha, S = levels("vp", t)
    count = 20_000 if d == 2 else 4000
    pick = torch.randint(0, len(points), (count,), generator=gen(1))
    x = alpha * points[pick] + math.sqrt(S) * normal(count, d, seed=2)
    s = score(x, t)
    C = score.covariance(x, t)
    if d == 2:
        matrix = C.dense() + s[:, :, None] * s[:, None, :]
        error = matrix.mean(0) - torch.eye(2) / S
        assert (error.abs() <= 4.5 * matrix.std(0) / math.sqrt(count)).all()
    total = C.trace() + s.square().sum(-1)
    assert abs(total.mean() - d / S) <= 4.5 * total.std() / math.sqrt(count)


def test_the_divergence_is_tr_C_minus_tr_inverse_S():
    d = 4
    points = normal(9, d, seed=0)
    gamma = 0.3 + normal(d, seed=1).square()
    for process, trace in ((vk.VP(), float(d)), (vk.Anisotropic(vk.VP(), gamma), float(gamma.reciprocal().sum()))):
        score = vk.EmpiricalScore(points, process)
        x, t = normal(5, d, seed=2), 0.2
        divergence = torch.stack([jacrev(score)(q, t).trace() for q in x])
        torch.testing.assert_close(divergence, score.covariance(x, t).trace() - trace / levels("vp", t)[1])


@pytest.mark.parametrize("anisotropic", [False, True])
def test_the_mean_of_the_proxy_score_is_the_score_and_its_covariance_is_C(anisotropic):
    points, weights = normal(7, 3, seed=0), weights_of(7, 1)
    process = vk.Anisotropic(vk.EDM(), 0.5 + normal(3, seed=3).square()) if anisotropic else vk.EDM()
    score = vk.EmpiricalScore(vk.Empirical(points, weights), process)
    x, t = normal(4, 3, seed=2), torch.tensor([0.4, 0.7, 1.0, 3.0], dtype=torch.float64)
    posterior = score.posterior(x, t)
    r = torch.stack([posterior.weight(torch.tensor(i)) for i in range(7)])
    proxy = torch.stack([vk.proxy_score(x, t, y.expand(4, 3), process) for y in points])
    mean = (r[..., None] * proxy).sum(0)
    torch.testing.assert_close(mean, score(x, t))
    gap = proxy - mean
    C = (r[..., None, None] * gap[..., :, None] * gap[..., None, :]).sum(0)
    torch.testing.assert_close(score.covariance(x, t).dense(), C)


PAPER = {0.02: 2.22e-4, 0.05: 0.358, 0.1: 0.634, 0.2: 0.333, 0.4: 0.0258}


def test_the_noise_fraction_of_three_points():
    times = torch.tensor(list(PAPER), dtype=torch.float64)
    rho = vk.noise_fraction(vk.data.triple(), vk.VP(), times)
    for value, want in zip(rho.value.tolist(), PAPER.values(), strict=True):
        assert value == pytest.approx(want, rel=5e-3)
    assert (rho.se == 0).all()
    # and from the formulas alone
    points = torch.tensor([[-1.0], [0.0], [1.0]], dtype=torch.float64)
    for t, value in zip(PAPER, rho.value.tolist(), strict=True):
        alpha, S = levels("vp", t)
        x, h = trapezoid(-alpha - 10 * math.sqrt(S), alpha + 10 * math.sqrt(S), 20_000)
        logits = -(x[:, None] - alpha * points[:, 0]).square() / (2 * S)
        r = logits.softmax(1)
        mean = r @ points[:, 0]
        cov = (r * (points[:, 0] - mean[:, None]).square()).sum(1)
        p = logits.exp().mean(1) / math.sqrt(2 * math.pi * S)
        assert value == pytest.approx(float((p * cov).sum() * h * alpha**2 / S), rel=1e-8)


@pytest.mark.parametrize("t", [0.05, 0.1, 0.25])
def test_the_noise_fraction_by_monte_carlo_is_that_of_quadrature(t):
    """Six points in the plane; the integral over the plane on a grid."""
    data, process = vk.data.random_six(), vk.Toy()
    points = data.rows(0, 6)
    alpha, S = levels("toy", t)
    axis, h = trapezoid(-alpha - 8 * math.sqrt(S), alpha + 8 * math.sqrt(S), 400)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    logits = -(grid[:, None] - alpha * points).square().sum(-1) / (2 * S)
    r = logits.softmax(1)
    mean = r @ points
    trace = (r * (points - mean[:, None]).square().sum(-1)).sum(1)
    p = logits.exp().mean(1) / (2 * math.pi * S)
    assert float(p.sum() * h * h) == pytest.approx(1, abs=1e-9)
    want = float((p * trace).sum() * h * h * alpha**2 / S / 2)
    estimate = vk.noise_fraction(data, process, t, queries=20_000, generator=0)
    assert 0 < estimate.se < 0.02 * want
    assert abs(estimate.value - want) < 4 * estimate.se
    assert vk.noise_fraction(data, process, t, queries=64, generator=3) == vk.noise_fraction(
        data, process, t, queries=64, generator=3
    )


@pytest.mark.parametrize("name", ["vp", "edm", "flow"])
def test_the_noise_fraction_is_the_mean_squared_error_of_denoising(name):
    """rho = alpha² mmse / (d sigma²), the error of the best denoiser measured on draws."""
    d, count = 5, 20_000
    points, weights = normal(30, d, seed=0), weights_of(30, 1)
    data, process = vk.Empirical(points, weights), PROCESSES[name]
    t = {"vp": 0.15, "edm": 0.8, "flow": 0.4}[name]
    alpha, S = levels(name, t)
    pick = torch.multinomial(weights, count, replacement=True, generator=gen(2))
    x = alpha * points[pick] + math.sqrt(S) * normal(count, d, seed=3)
    error = (points[pick] - vk.EmpiricalScore(data, process).posterior(x, t).mean).square().sum(-1) * alpha**2 / (d * S)
    rho = vk.noise_fraction(data, process, t, queries=count, generator=4)
    se = math.hypot(float(error.std()) / math.sqrt(count), rho.se)
    assert abs(float(error.mean()) - rho.value) < 4.5 * se


def test_the_noise_fraction_of_anisotropic_noise():
    gamma = torch.tensor([0.3, 2.0], dtype=torch.float64)
    points = normal(10, 2, seed=0)
    process = vk.Anisotropic(vk.EDM(), gamma)
    t, count = 0.6, 20_000
    x = points[torch.randint(0, 10, (count,), generator=gen(1))] + t * gamma.sqrt() * normal(count, 2, seed=2)
    score = vk.EmpiricalScore(points, process)
    s2, trace = score(x, t).square().sum(-1), score.covariance(x, t).trace()
    ratio = float(trace.mean() / (trace.mean() + s2.mean()))
    rho = vk.noise_fraction(points, process, t, queries=count, generator=3)
    assert abs(ratio - rho.value) < 8 * rho.se


@pytest.mark.parametrize(("k", "d"), [(2, 2), (2, 4), (4, 4)])
@pytest.mark.parametrize("snr", [0.1, 0.5, 1.0])
def test_gaussian_data_before_collapse(k, d, snr):
    """rho = (k/d) snr/(1+snr) while snr is far below n^(2/k)."""
    points = torch.zeros(4000, d, dtype=torch.float64)
    points[:, :k] = normal(4000, k, seed=0)
    rho = vk.noise_fraction(points, vk.EDM(), 1 / math.sqrt(snr), queries=1000, generator=1)
    want = k / d * snr / (1 + snr)
    assert abs(rho.value - want) < 0.03 * want + 4 * rho.se


def test_points_as_a_mixture_of_variance_zero():
    points, weights = normal(8, 3, seed=0), weights_of(8, 1)
    population = vk.GaussianMixture(points, weights, variance=0.0)
    x, t = normal(5, 3, seed=2), torch.tensor([0.05, 0.1, 0.3, 0.6, 1.0], dtype=torch.float64)
    for process in (vk.VP(), vk.FlowMatching(T=0.9999999), vk.EDM()):
        t_in = t.clamp_max(process.T)
        score = vk.EmpiricalScore(vk.Empirical(points, weights), process)
        torch.testing.assert_close(population.score(process)(x, t_in), score(x, t_in), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(
            population.logp(x, t_in, process), score.posterior(x, t_in).logp, rtol=1e-9, atol=1e-9
        )
        torch.testing.assert_close(population.score(process).denoise(x, t_in), score.posterior(x, t_in).mean)
