"""The empirical score: derivatives, identities, closed forms, conventions, refusals (docs/theory.md, section 2)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from draws import gen, normal
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import PROCESSES, answer, answers, levels, log_density, stack, time_between
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import vkernel as vk
from vkernel.core.errors import InputError


def weights_of(n: int, seed: int) -> Tensor:
    return 0.1 + torch.rand(n, generator=gen(seed), dtype=torch.float64)


# --- derivatives ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(PROCESSES))
@pytest.mark.parametrize("d", [1, 3, 36])
def test_the_jacobian_is_the_hessian_of_log_p_and_C_minus_inverse_S(name, d):
    points, weights = normal(15, d, seed=0), weights_of(15, 1)
    process = PROCESSES[name]
    score = vk.EmpiricalScore(vk.Empirical(points, weights), process)
    for u in (0.4, 0.6, 0.9):
        t = time_between(process, u)
        alpha, S = levels(name, t)
        x = alpha * points[:2].mean(0) + 0.3 * math.sqrt(S) * normal(d, seed=2)
        want = hessian(log_density)(x, points, weights / weights.sum(), alpha, S)
        torch.testing.assert_close(
            score(x, t), grad(log_density)(x, points, weights / weights.sum(), alpha, S), rtol=1e-5, atol=1e-5 / S
        )
        C = score.covariance(x, t).dense()
        scale = 1e-4 * (1 / S + float(C.diagonal().max())) if d == 36 else 1e-9 * (1 / S + float(C.diagonal().max()))
        eye = torch.eye(d, dtype=torch.float64)
        for got in (C - eye / S, jacrev(score)(x, t), jacfwd(score)(x, t)):
            assert (got - want).abs().max() <= scale
        v = normal(d, seed=3)
        torch.testing.assert_close(vjp(lambda q, t=t: score(q, t), x)[1](v)[0], want @ v, rtol=0, atol=scale * d)
        torch.testing.assert_close(jvp(lambda q, t=t: score(q, t), (x,), (v,))[1], want @ v, rtol=0, atol=scale * d)


@pytest.mark.parametrize("matrix", [False, True])
def test_derivatives_through_anisotropic_noise(matrix):
    d = 3
    a = normal(d, d, seed=5)
    gamma = a @ a.mT + 0.2 * torch.eye(d, dtype=torch.float64) if matrix else 0.2 + normal(d, seed=5).square()
    dense = gamma if matrix else gamma.diag()
    points, weights = normal(10, d, seed=0), weights_of(10, 1)
    process = vk.Anisotropic(vk.VP(), gamma)
    score = vk.EmpiricalScore(vk.Empirical(points, weights), process)
    x, t = 0.5 * normal(d, seed=2), 0.2
    alpha, S = levels("vp", t)
    args = points, weights / weights.sum(), alpha, S * dense
    torch.testing.assert_close(score(x, t), grad(log_density)(x, *args))
    want = hessian(log_density)(x, *args)
    precision = torch.linalg.inv(S * dense)
    for got in (score.covariance(x, t).dense() - precision, jacrev(score)(x, t), jacfwd(score)(x, t)):
        torch.testing.assert_close(got, want)
    torch.testing.assert_close(jacrev(jacrev(score))(x, t), jacrev(hessian(log_density))(x, *args))
    batch = normal(3, d, seed=6).requires_grad_()
    assert gradcheck(lambda q: score(q, t), (batch,))
    assert gradgradcheck(lambda q: score(q, t), (batch,))


@pytest.mark.parametrize("name", ["vp", "edm", "flow"])
def test_gradcheck_and_gradgradcheck(name):
    points = normal(8, 2, seed=0)
    process = PROCESSES[name]
    score = vk.EmpiricalScore(vk.Empirical(points, weights_of(8, 1)), process)
    t = torch.tensor([0.4, 0.5, 0.7], dtype=torch.float64)
    x = normal(3, 2, seed=2).requires_grad_()
    assert gradcheck(lambda q: score(q, t), (x,), check_forward_ad=True)
    assert gradgradcheck(lambda q: score(q, t), (x,))


@pytest.mark.parametrize("d", [2, 34])
def test_third_derivatives_of_log_p(d):
    points, weights = normal(12, d, seed=0) / math.sqrt(d), weights_of(12, 1)
    score = vk.EmpiricalScore(vk.Empirical(points, weights), vk.VP())
    t = 0.15
    alpha, S = levels("vp", t)
    x = 0.2 * normal(d, seed=2)
    if d == 2:
        want = jacrev(hessian(log_density))(x, points, weights / weights.sum(), alpha, S)
        for second in (jacrev(jacrev(score)), jacfwd(jacrev(score)), jacrev(jacfwd(score)), jacfwd(jacfwd(score))):
            torch.testing.assert_close(second(x, t), want)
    # along three directions, by nested products, in any dimension
    u, v, w = normal(3, d, seed=3)

    def along(f, q, direction):
        return jvp(f, (q,), (direction,))[1]

    def reference(q):
        return log_density(q, points, weights / weights.sum(), alpha, S)

    want = along(lambda q: along(lambda r: along(reference, r, w), q, v), x, u)
    got = along(lambda q: along(lambda r: score(r, t), q, v), x, u) @ w
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * abs(float(want)))


def test_beyond_the_last_derivative_there_is_a_sentence():
    score = vk.EmpiricalScore(normal(5, 2, seed=0), vk.VP())
    x = normal(2, seed=1).requires_grad_()
    s = score(x, 0.3)
    (first,) = torch.autograd.grad(s.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    assert second.isfinite().all()
    with pytest.raises((InputError, RuntimeError), match="third is not provided"):
        torch.autograd.grad(second.sum(), x)
    for beyond in (jacfwd(jacfwd(jacfwd(score))), jacfwd(jacrev(jacrev(score))), jacrev(jacfwd(jacrev(score)))):
        with pytest.raises((InputError, RuntimeError), match="third is not provided"):
            beyond(x.detach(), 0.3)


def test_vmap_is_a_batch():
    points = normal(9, 3, seed=0)
    score = vk.EmpiricalScore(points, vk.VP())
    x, t = normal(6, 3, seed=1), torch.linspace(0.05, 0.9, 6, dtype=torch.float64)
    torch.testing.assert_close(vmap(lambda q: score(q, 0.3))(x), score(x, 0.3))
    torch.testing.assert_close(vmap(score)(x, t), score(x, t))
    torch.testing.assert_close(vmap(lambda u: score(x[0], u))(t), score(x[:1].expand(6, 3), t))
    torch.testing.assert_close(vmap(lambda u: score(x, u))(t)[2], score(x, t[2]))
    torch.testing.assert_close(vmap(score, in_dims=(1, 0))(x.mT.reshape(3, 6), t), score(x, t))
    torch.testing.assert_close(vmap(lambda q: score(q, t))(x.expand(4, 6, 3)), score(x, t).expand(4, 6, 3))
    nested = vmap(vmap(score))(x.reshape(2, 3, 3), t.reshape(2, 3))
    torch.testing.assert_close(nested, score(x, t).reshape(2, 3, 3))
    jacobians = vmap(jacrev(score))(x, t)
    for b in range(6):
        torch.testing.assert_close(jacobians[b], jacrev(score)(x[b], t[b]))
    second = vmap(jacfwd(jacrev(score)))(x, t)
    torch.testing.assert_close(second[4], jacrev(jacrev(score))(x[4], t[4]))
    divergence = vmap(lambda q, u: jacrev(score)(q, u).trace())(x, t)
    torch.testing.assert_close(
        divergence, score.covariance(x, t).trace() - 3 / torch.tensor([levels("vp", u)[1] for u in t.tolist()])
    )


def test_vmap_over_images_and_anisotropic_noise():
    points = normal(7, 2, 3, seed=0)
    frame = vk.covariance.Diagonal(0.5 + normal(2, 3, seed=1).square(), (2, 3))
    for process in (vk.EDM(), vk.Anisotropic(vk.EDM(), frame)):
        score = vk.EmpiricalScore(vk.Empirical(points), process)
        x, t = normal(4, 2, 3, seed=2), torch.tensor([0.3, 0.5, 1.0, 2.0], dtype=torch.float64)
        torch.testing.assert_close(vmap(score)(x, t), score(x, t))
        torch.testing.assert_close(vmap(jacrev(score))(x, t)[1], jacrev(score)(x[1], t[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("d", [2, 40])
def test_autograd_in_every_precision(dtype, d):
    points = normal(20, d, seed=0) / math.sqrt(d)
    score = vk.EmpiricalScore(points, vk.VP())
    x = (0.3 * normal(3, d, seed=1)).to(dtype).requires_grad_()
    v = normal(3, d, seed=2).to(dtype)
    s = score(x, 0.2)
    (got,) = torch.autograd.grad(s, x, v)
    assert s.dtype == got.dtype == dtype
    alpha, S = levels("vp", 0.2)
    truth = [answer(points, None, q, alpha, S) for q in x.detach()]
    want = torch.stack([a.C @ u - u / S for a, u in zip(truth, v.double(), strict=True)])
    assert (got.double() - want).abs().max() <= (torch.finfo(dtype).eps * 2 + 1e-5) * want.abs().max()
    assert (s.double() - stack(truth, "score")).abs().max() <= (torch.finfo(dtype).eps * 2 + 1e-5) * s.abs().max()


@pytest.mark.parametrize("mode", ["reverse", "requires_grad", "forward", "both"])
def test_derivatives_in_t_are_refused_not_zero(mode):
    score = vk.EmpiricalScore(normal(5, 2, seed=0), vk.VP())
    x, t = normal(3, 2, seed=1), torch.tensor(0.3, dtype=torch.float64)
    derivative = {
        "reverse": lambda: grad(lambda u: score(x, u).sum())(t),
        "requires_grad": lambda: score(x, t.requires_grad_()),
        "forward": lambda: jvp(lambda u: score(x, u), (t,), (torch.ones_like(t),)),
        "both": lambda: jvp(score, (x, t), (torch.ones_like(x), torch.ones_like(t))),
    }
    with pytest.raises(InputError, match="not in t"):
        derivative[mode]()


# --- identities ----------------------------------------------------------------------------------------------------


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
        torch.testing.assert_close(population.posterior_mean(x, t_in, process), score.posterior(x, t_in).mean)


# --- closed forms --------------------------------------------------------------------------------------------------


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


# --- conventions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("d", [2, 40])
@pytest.mark.parametrize("t", [1e-3, 0.02, 0.1, 0.5])
def test_results_take_the_type_of_x_and_lose_nothing_before(dtype, d, t):
    """A result is the float64 answer at the same x, rounded once."""
    points = normal(30, d, seed=0) / math.sqrt(d)
    score = vk.EmpiricalScore(points, vk.VP())
    alpha, S = levels("vp", t)
    x = torch.cat([alpha * (points[:3] + math.sqrt(S) * normal(3, d, seed=1)), alpha * points[2:4].mean(0)[None]])
    x = x.to(dtype)
    wide = x.double()
    v = torch.ones_like(x)
    p, q, C, D = score.posterior(x, t), score.posterior(wide, t), score.covariance(x, t), score.covariance(wide, t)
    pairs = {
        "score": (score(x, t), score(wide, t)),
        "mean": (p.mean, q.mean),
        "logp": (p.logp, q.logp),
        "entropy": (p.entropy, q.entropy),
        "ess": (p.ess, q.ess),
        "cov trace": (p.cov.trace(), q.cov.trace()),
        "cov diag": (p.cov.diag(), q.cov.diag()),
        "trace": (C.trace(), D.trace()),
        "diag": (C.diag(), D.diag()),
        "product": (C @ v, D @ v.double()),
        "draw": (C.draw(3), D.draw(3)),
        "top": (p.top(2)[0], q.top(2)[0]),
    }
    unit = torch.finfo(dtype).eps
    for name, (got, want) in pairs.items():
        assert got.dtype == dtype, name
        assert not got.isnan().any(), name
        rounded = want.to(dtype)
        fits = rounded.isfinite()
        gap = (got.double() - want).abs()[fits]
        assert (gap <= 2 * unit * want.abs()[fits] + 4 * torch.finfo(dtype).smallest_normal).all(), name


@pytest.mark.parametrize("d", [2, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_anisotropic_results_lose_nothing_before_rounding(dtype, d):
    """x is whitened in working precision, not in that of x: a half-precision x is a point like any other."""
    points = normal(30, d, seed=0) / math.sqrt(d)
    score = vk.EmpiricalScore(
        points, vk.Anisotropic(vk.EDM(), 0.3 + torch.rand(d, generator=gen(2), dtype=torch.float64))
    )
    x = (points[:4] + 0.05 * normal(4, d, seed=1)).to(dtype)
    for t in (0.01, 0.5):
        want = score(x.double(), t)
        assert (score(x, t).double() - want).abs().max() <= 4 * torch.finfo(dtype).eps * want.abs().max()
        mean = score.posterior(x.double(), t).mean
        assert (score.posterior(x, t).mean.double() - mean).abs().max() <= 4 * torch.finfo(dtype).eps * mean.abs().max()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_integers_become_the_default_float(dtype):
    score = vk.EmpiricalScore(normal(5, 3, seed=0), vk.EDM())
    x = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    assert torch.equal(score(x, 1), score(x.float(), 1.0))
    assert score(x, 1).dtype == torch.float32
    assert score.covariance(x, 1).trace().dtype == score.posterior(x, 1).mean.dtype == torch.float32


@pytest.fixture
def default_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("default_float64")
@pytest.mark.parametrize("d", [2, 40])
def test_the_default_type_does_not_matter(d):
    points = normal(300, d, seed=0)
    score = vk.EmpiricalScore(vk.Empirical(points, weights_of(300, 1)), vk.EDM())
    for sigma in (0.1, 1.0, 6.0):
        x = points[:3] + sigma * normal(3, d, seed=2)
        truth = answers(points, weights_of(300, 1), x, "edm", sigma)
        torch.testing.assert_close(score.posterior(x, sigma).mean, stack(truth, "mean"), rtol=0, atol=1e-4)
        assert score(x.float(), sigma).dtype == torch.float32
        assert score.posterior(x, sigma).top(3)[1].shape == (3, 3)
    assert score(torch.ones(1, d, dtype=torch.long), 1.0).dtype == torch.float64


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_autocast_does_not_reach_the_engine(half):
    """A score that is called inside a network's autocast region keeps its own arithmetic."""
    points = normal(600, 48, seed=0)
    score = vk.EmpiricalScore(points, vk.EDM())
    for sigma in (0.3, 1.0, 4.0, 20.0):
        x = points[:4] + sigma * normal(4, 48, seed=1)
        s, C = score(x, sigma), score.covariance(x, sigma).trace()
        with torch.autocast("cpu", dtype=half):
            assert torch.equal(score(x, sigma), s)
            assert torch.equal(score.covariance(x, sigma).trace(), C)
            assert score.posterior(x, sigma).top(2)[1].shape == (4, 2)


def test_gradient_modes_and_layouts_do_not_matter():
    points = normal(50, 6, seed=0)
    score = vk.EmpiricalScore(points, vk.VP())
    x = normal(6, 4, seed=1).mT
    want = score(x.contiguous(), 0.2)
    assert not x.is_contiguous()
    assert torch.equal(score(x, 0.2), want)
    with torch.no_grad():
        assert torch.equal(score(x.clone().requires_grad_(), 0.2), want)
    with torch.inference_mode():
        assert torch.equal(score(x, 0.2), want)
        assert score.covariance(x, 0.2).draw(0).shape == (4, 6)
    posterior = score.posterior(x.clone().requires_grad_(), 0.2)
    assert not posterior.mean.requires_grad
    before = x.clone()
    score(x, 0.2)
    score.covariance(x, 0.2).trace()
    assert torch.equal(x, before)


@pytest.mark.parametrize("batch", [(), (1,), (5,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("shape", [(1,), (3,), (2, 4, 5)])
def test_shapes(batch, shape):
    data = vk.Empirical(normal(9, *shape, seed=0))
    score = vk.EmpiricalScore(data, vk.VP())
    x = normal(*batch, *shape, seed=1) if batch + shape else normal(1, seed=1)
    d = math.prod(shape)
    flat = vk.EmpiricalScore(data.rows(0, 9), vk.VP())(x.reshape(-1, d), 0.3)
    posterior, C = score.posterior(x, 0.3), score.covariance(x, 0.3)
    assert torch.equal(score(x, 0.3), flat.reshape(x.shape))
    for a in (posterior.mean, C.diag(), C @ x, C.draw(0), posterior.cov.diag(), posterior.cov @ x):
        assert a.shape == x.shape
    for a in (posterior.logp, posterior.entropy, posterior.ess, C.trace(), posterior.weight(torch.tensor(2))):
        assert a.shape == batch
    assert C.dense().shape == (*batch, d, d)
    assert posterior.sample(3, 0).shape == (3, *batch, *shape)
    assert [a.shape for a in posterior.top(2)] == [(*batch, 2)] * 2
    assert (C.batch, C.shape, C.dim) == (batch, shape, d)


def test_a_time_may_be_a_number_a_scalar_or_one_for_each_query():
    points = normal(9, 3, seed=0)
    score = vk.EmpiricalScore(points, vk.EDM())
    x = normal(2, 4, 3, seed=1)
    times = torch.tensor([[0.5, 1.0, 2.0, 4.0], [1.0, 1.0, 3.0, 0.1]], dtype=torch.float64)
    each = score(x, times)
    for i in range(2):
        for j in range(4):
            torch.testing.assert_close(each[i, j], score(x[i, j], float(times[i, j])))
    want = score(x, 1.0)
    for t in (
        1,
        torch.tensor(1),
        torch.tensor(1.0),
        torch.tensor([1.0]),
        torch.ones(4),
        torch.ones(2, 1),
        np.float64(1.0),
    ):
        torch.testing.assert_close(score(x, t), want)
    torch.testing.assert_close(score(x, times[0]), torch.stack([score(x[i], times[0]) for i in range(2)]))
    torch.testing.assert_close(score(x, times[:, :1])[1], score(x[1], times[1, 0]))
    C = score.covariance(x, times)
    torch.testing.assert_close(C.trace()[1, 2], score.covariance(x[1, 2], 3.0).trace())


@pytest.mark.parametrize("name", sorted(PROCESSES))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("d", [2, 40])
def test_the_ends_of_the_time_range_belong_to_it(name, dtype, d):
    """eps and T as a tensor of any precision: what rounding moved out of the range is in it."""
    process = PROCESSES[name]
    score = vk.EmpiricalScore(normal(9, d, seed=0), process)
    x = normal(3, d, seed=1).to(dtype)
    for end in (process.eps, process.T):
        for t in (torch.tensor(end, dtype=dtype), torch.full((3,), end, dtype=dtype), end):
            assert score(x.double(), t).isfinite().all()
            assert score.covariance(x.double(), t).trace().isfinite().all()


def test_scores_print_what_they_are():
    text = repr(vk.EmpiricalScore(vk.data.triple(), vk.VP()))
    assert "triple" in text
    assert "VP" in text


# --- refused at the door -------------------------------------------------------------------------------------------

BAD_X = {
    "nan": torch.tensor([[0.0, math.nan, 0.0]]),
    "inf": torch.tensor([[0.0, math.inf, 0.0]]),
    "float16 inf": torch.tensor([[0.0, 1e6, 0.0]]).half(),
    "short": torch.zeros(4, 2),
    "scalar": torch.tensor(0.0),
    "transposed": torch.zeros(3, 4),
    "complex": torch.zeros(4, 3, dtype=torch.complex64),
    "numpy": np.zeros((4, 3)),
    "list": [[0.0, 0.0, 0.0]],
    "none": None,
}
BAD_T = {
    "below": 1e-5,
    "above": 1.5,
    "negative": -0.1,
    "nan": math.nan,
    "inf": math.inf,
    "one outside": torch.tensor([0.1, 0.2, 0.3, 2.0]),
    "too many": torch.full((5,), 0.1),
    "too deep": torch.full((4, 1), 0.1),
    "over coordinates": torch.full((4, 3), 0.1),
    "text": "soon",
    "none": None,
    "complex": 0.1 + 0j,
    "complex tensor": torch.tensor(0.1 + 0j),
    "requires grad": torch.tensor(0.1, requires_grad=True),
}


def calls(score):
    return {
        "score": score,
        "posterior": score.posterior,
        "covariance": score.covariance,
    }


@pytest.mark.filterwarnings("ignore:Casting complex")
@pytest.mark.parametrize("call", ["score", "posterior", "covariance"])
@pytest.mark.parametrize("bad", BAD_X)
def test_bad_x_is_refused_with_a_sentence(bad, call):
    score = vk.EmpiricalScore(normal(5, 3, seed=0), vk.VP())
    with pytest.raises(InputError, match=r"x .*\."):
        calls(score)[call](BAD_X[bad], 0.1)


@pytest.mark.filterwarnings("ignore:Casting complex")
@pytest.mark.parametrize("call", ["score", "posterior", "covariance"])
@pytest.mark.parametrize("bad", BAD_T)
def test_bad_t_is_refused_with_a_sentence(bad, call):
    score = vk.EmpiricalScore(normal(5, 3, seed=0), vk.VP())
    with pytest.raises(InputError, match=r"\bt\b|[Tt]ime"):
        calls(score)[call](torch.zeros(4, 3), BAD_T[bad])


def test_many_times_for_one_query_are_refused():
    score = vk.EmpiricalScore(normal(5, 3, seed=0), vk.VP())
    for x in (torch.zeros(1, 3), torch.zeros(1, 4, 3)):
        with pytest.raises(InputError, match="broadcast"):
            score(x, torch.full((5,) if x.ndim == 2 else (5, 4), 0.1))


@pytest.mark.parametrize("process", [None, "vp", vk.VP, 3, lambda t: t])
def test_what_is_no_process_is_refused(process):
    with pytest.raises(InputError, match="process"):
        vk.EmpiricalScore(torch.zeros(3, 2), process)


def test_a_frame_of_another_shape_is_refused():
    with pytest.raises(InputError, match="shape"):
        vk.EmpiricalScore(torch.zeros(3, 2), vk.Anisotropic(vk.VP(), torch.ones(3)))


def test_nan_under_transforms_is_refused_too():
    score = vk.EmpiricalScore(normal(5, 3, seed=0), vk.VP())
    x = torch.full((2, 3), math.nan)
    for f in (lambda: vmap(lambda q: score(q, 0.1))(x), lambda: jacrev(score)(x, 0.1), lambda: jacfwd(score)(x, 0.1)):
        with pytest.raises(InputError, match="NaN"):
            f()


@pytest.mark.parametrize(
    "process", [vk.VP(eps=0.0), vk.EDM(eps=0.0), vk.FlowMatching(eps=0.0)], ids=["vp", "edm", "flow"]
)
@pytest.mark.parametrize("d", [2, 40])
def test_no_noise_at_all_is_refused(process, d):
    """At t = 0 with S = 0 there is no density, no score: not NaN."""
    score = vk.EmpiricalScore(normal(5, d, seed=0), process)
    with pytest.raises(InputError, match="noise"):
        score(torch.zeros(2, d), 0.0)


@pytest.mark.parametrize("d", [2, 40])
@pytest.mark.parametrize(
    ("size", "dtype"), [(1e6, torch.float32), (1e12, torch.float32), (1e20, torch.float32), (1e200, torch.float64)]
)
def test_an_extreme_x_has_the_right_answer_or_a_sentence(size, dtype, d):
    """Far out one point holds all the weight, the one farthest in the direction of x."""
    points = normal(50, d, seed=0)
    score = vk.EmpiricalScore(points, vk.VP())
    x = torch.full((1, d), size, dtype=dtype)
    first = points.sum(-1).argmax()
    try:
        s, posterior = score(x, 0.1), score.posterior(x, 0.1)
    except InputError:
        return
    assert s.isfinite().all()
    torch.testing.assert_close(posterior.mean[0], points[first].to(dtype), rtol=1e-4, atol=1e-4)
    assert int(posterior.top(1)[1]) == int(first)
    assert float(posterior.cov.trace()) <= 1e-6


def test_noise_fraction_refuses():
    data = vk.data.hexagon()
    for bad in (0, 1, -5):
        with pytest.raises(InputError, match="queries"):
            vk.noise_fraction(data, vk.VP(), 0.1, queries=bad)
    with pytest.raises(InputError, match="process"):
        vk.noise_fraction(vk.EmpiricalScore(data, vk.VP()), vk.EDM(), 0.1)
    with pytest.raises(InputError, match="outside"):
        vk.noise_fraction(data, vk.VP(), 7.0)


def test_the_noise_fraction_of_a_set_with_a_far_outlier_is_not_an_artefact():
    """A grid too coarse for the noise must not be called exact: the outlier is one point of four, and far."""
    near = vk.Empirical(torch.tensor([0.0, 0.01, 1.0], dtype=torch.float64))
    for far in (-1e2, -3e3, 1e5):
        data = vk.Empirical(torch.tensor([far, 0.0, 0.01, 1.0], dtype=torch.float64))
        for sigma in (0.002, 0.004, 0.01):
            want = float(vk.noise_fraction(near, vk.EDM(), sigma)) * 3 / 4
            got = vk.noise_fraction(data, vk.EDM(), sigma, generator=0)
            assert abs(got.value - want) <= 4.5 * got.se + 1e-4 * want
