"""Formulas of forward processes, each by a second route (docs/theory.md, section 1)."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st
from processes import at, each, f64
from scipy.integrate import quad
from torch import Tensor

from vkernel.core.errors import InputError
from vkernel.process import DDPM, EDM, VE, VP, Cosine, FlowMatching, Process, Toy, VPSong


def slope(f, t: Tensor) -> Tensor:
    t = t.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(t).sum() + 0 * t.sum(), t)
    return g


@each
@settings(max_examples=20, deadline=None)
@given(u=st.floats(0.0, 1.0))
def test_drift_and_diffusion_are_derivatives_of_alpha_and_S(process, u):
    """beta = -alpha'/alpha, D = S'/2 + beta S."""
    t = at(process, u)
    beta = -slope(process.alpha, t) / process.alpha(t)
    D = slope(process.S, t) / 2 + beta * process.S(t)
    torch.testing.assert_close(process.beta(t), beta, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(process.D(t), D, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(process.sigma(t) ** 2, process.S(t), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        process.log_snr(t), torch.log(process.alpha(t) ** 2 / process.S(t)), rtol=1e-9, atol=1e-12
    )


@each
def test_S_is_the_integral_of_the_diffusion(process):
    """S_t = alpha_t² [S_eps/alpha_eps² + ∫ 2 D_u alpha_u^-2 du]; the first term is not zero for VE and DDPM."""
    eps, t = f64(process.eps), at(process, 0.37)
    knots = range(math.ceil(process.eps), math.ceil(float(t))) if isinstance(process, DDPM) else []
    pieces = [float(eps), *[k for k in knots if k > process.eps], float(t)]
    integral = sum(
        quad(lambda u: float(2 * process.D(f64(u)) / process.alpha(f64(u)) ** 2), a, b, epsabs=0, epsrel=1e-9)[0]
        for a, b in pairwise(pieces)
    )
    start = process.S(eps) / process.alpha(eps) ** 2
    torch.testing.assert_close(process.S(t), process.alpha(t) ** 2 * (start + integral), rtol=1e-7, atol=0)


def test_the_form_without_the_inverse_is_wrong_beyond_VP_and_VE():
    """∫ 2 D_u alpha_u² du, which one also meets, is not S_t of flow matching."""
    p, t = FlowMatching(), 0.5
    wrong = quad(lambda u: float(2 * p.D(f64(u)) * p.alpha(f64(u)) ** 2), 0, t)[0]
    assert abs(wrong - float(p.S(f64(t)))) > 0.05


@each
def test_simulated_forward_process_has_the_stated_mean_and_variance(process):
    """Euler–Maruyama, 4,000 paths from N(alpha x0, S) at eps; both moments within 4 standard errors (and O(dt))."""
    g, n, x0, steps = torch.Generator().manual_seed(3), 4000, 1.5, 400
    end = float(process.time(f64(min(1.0, process.ratios[1] / 2))))
    grid = torch.linspace(process.eps, end, steps + 1, dtype=torch.float64)
    x = process.alpha(grid[0]) * x0 + process.sigma(grid[0]) * torch.randn(n, generator=g, dtype=torch.float64)
    for t, dt in zip(grid, grid.diff(), strict=False):
        t = t + dt / 2  # coefficients at the middle of the step
        x = x * torch.exp(-process.beta(t) * dt)
        x = x + (2 * process.D(t) * dt).sqrt() * torch.randn(n, generator=g, dtype=torch.float64)
    mean, var = process.alpha(grid[-1]) * x0, process.S(grid[-1])
    assert abs(x.mean() - mean) < 4 * (var / n).sqrt() + 1e-2 * mean
    assert abs(x.var() / var - 1) < 4 * (2 / n) ** 0.5 + 1e-2


@pytest.mark.parametrize(
    ("process", "t", "alpha", "S", "beta", "D"),
    [
        (VP(), 1.0, math.exp(-10.05), -math.expm1(-20.1), 20.0, 20.0),
        (VP(), 0.5, math.exp(-(0.05 + 9.95 / 4)), 1 - math.exp(-2 * (0.05 + 9.95 / 4)), 10.05, 10.05),
        (VPSong(), 1.0, math.exp(-5.025), -math.expm1(-10.05), 10.0, 10.0),
        (DDPM([0.1, 0.2, 0.3]), 1.0, math.sqrt(0.9 * 0.8), 1 - 0.72, -math.log(0.7) / 2, -math.log(0.7) / 2),
        (DDPM([0.1, 0.2, 0.3]), 2.0, math.sqrt(0.9 * 0.8 * 0.7), 1 - 0.504, -math.log(0.7) / 2, -math.log(0.7) / 2),
        (DDPM([0.1, 0.2, 0.3]), 0.5, 0.9**0.5 * 0.8**0.25, 1 - 0.9 * 0.8**0.5, -math.log(0.8) / 2, -math.log(0.8) / 2),
        (VE(), 0.5, 1.0, 0.5, 0.0, 0.5 * math.log(5000)),
        (EDM(), 3.0, 1.0, 9.0, 0.0, 3.0),
        (FlowMatching(), 0.25, 0.75, 0.0625, 4 / 3, 1 / 3),
        (Toy(), 0.75, 0.5, 0.75, 2.0, 2.0),
        (Cosine(s=0.5), 0.25, math.cos(math.pi / 4) / math.cos(math.pi / 6), 1 / 3, math.pi / 3, math.pi / 3),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, Process) else "",
)
def test_values_by_hand(process, t, alpha, S, beta, D):
    got = torch.stack([f(f64(t)) for f in (process.alpha, process.S, process.beta, process.D)])
    torch.testing.assert_close(got, f64(alpha, S, beta, D), rtol=1e-12, atol=1e-15)


@each
def test_float32_does_not_cancel(process):
    """float32 at the smallest times agrees with float64 at the same (rounded) times, and nearly so late."""
    span = process.T - process.eps
    early = torch.tensor([process.eps + span * f for f in (0.0, 1e-6, 1e-4, 1e-2)], dtype=torch.float32)
    late = torch.tensor([process.T - span * f for f in (0.0, 1e-3, 1e-1)], dtype=torch.float32)
    for f in (process.S, process.sigma, process.beta, process.D, process.alpha):
        torch.testing.assert_close(f(early).double(), f(early.double()), rtol=1e-6, atol=0)
        torch.testing.assert_close(f(late).double(), f(late.double()), rtol=3e-6, atol=0)


def test_cosine_variance_by_the_half_angle_in_high_precision():
    """1 - cos²θ/cos²θ0 through 40-digit arithmetic, where the subtraction is harmless."""
    mpmath = pytest.importorskip("mpmath")
    mpmath.mp.dps = 40
    for t in (1e-9, 1e-3, 0.5, 0.999):
        s = mpmath.mpf(0.008)
        theta, theta0 = ((mpmath.mpf(v) + s) / (1 + s) * mpmath.pi / 2 for v in (t, 0))
        S = float(1 - (mpmath.cos(theta) / mpmath.cos(theta0)) ** 2)
        assert float(Cosine().S(f64(t))) == pytest.approx(S, rel=1e-13)


@each
def test_results_take_the_dtype_and_shape_of_t(process):
    t = at(process, 0.3)
    for f in (process.alpha, process.sigma, process.S, process.beta, process.D, process.log_snr):
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            value = f(t.to(dtype).expand(2, 3))
            assert value.dtype == dtype
            assert value.shape == (2, 3)
            exact = f(t.to(dtype).double()).expand(2, 3)
            torch.testing.assert_close(value.double(), exact, rtol=2 * torch.finfo(dtype).eps + 1e-12, atol=1e-5)
        assert f(float(t)).dtype == torch.get_default_dtype()
        assert f(1).dtype == f(torch.tensor([1, 1])).dtype == torch.get_default_dtype()
    kept = t.clone()
    process.sigma(t).zero_(), process.S(t).zero_(), process.D(t).zero_()
    assert t == kept


@each
def test_NaN_goes_through_formulas_but_not_the_door(process):
    nan = f64(math.nan)
    assert process.S(nan).isnan()
    with pytest.raises(InputError, match="nan"):
        process.check(nan)
    with pytest.raises(InputError, match="nan"):
        process.time(nan)


def test_half_the_betas_of_VP_is_VPSong():
    paper, song = VP(beta_min=0.05, beta_max=10.0), VPSong(beta_min=0.1, beta_max=20.0)
    t = torch.linspace(0.001, 1, 50, dtype=torch.float64)
    for name in ("alpha", "S", "beta", "D"):
        torch.testing.assert_close(getattr(paper, name)(t), getattr(song, name)(t), rtol=1e-13, atol=0)
    assert paper != song


def test_VPSong_solves_its_ordinary_differential_equation():
    """alpha' = -½ b alpha with b linear: score_sde's marginal_prob."""
    t = f64(0.4)
    coefficient = -0.25 * t**2 * (20 - 0.1) - 0.5 * t * 0.1
    torch.testing.assert_close(VPSong().alpha(t), torch.exp(coefficient))
    torch.testing.assert_close(VPSong().sigma(t), torch.sqrt(1 - torch.exp(2 * coefficient)))


def test_DDPM_tends_to_VPSong():
    """log alpha at index i is that of VPSong at (i+1)/N, to O(1/N)."""
    errors = []
    for n in (1000, 2000):
        i = torch.arange(n // 10, n, n // 10, dtype=torch.float64)
        discrete = DDPM.linear(0.1 / n, 20 / n, n).alpha(i).log()
        errors.append((discrete / VPSong().alpha((i + 1) / n).log() - 1).abs().max())
    assert errors[0] < 0.015
    assert errors[1] / errors[0] == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("schedule", ["linear", "scaled_linear", "squaredcos_cap_v2"])
def test_DDPM_is_the_scheduler_of_diffusers(schedule):
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.DDPMScheduler(num_train_timesteps=1000, beta_schedule=schedule)
    abar, index = scheduler.alphas_cumprod.double(), torch.arange(1000)
    made = [DDPM(scheduler.betas), DDPM(scheduler.betas.numpy()), DDPM.from_alphas_cumprod(scheduler.alphas_cumprod)]
    if schedule != "squaredcos_cap_v2":
        made.append(getattr(DDPM, schedule)(1e-4, 0.02, 1000))
    for process in made:
        torch.testing.assert_close(process.alpha(index.double()) ** 2, abar, rtol=1e-4, atol=1e-9)
    x, noise = torch.randn(2, 3), torch.zeros(2, 3)
    there = scheduler.add_noise(x, noise, torch.tensor([7, 500]))
    torch.testing.assert_close(made[0].alpha(torch.tensor([7, 500]))[:, None] * x, there)


def test_DDPM_jumps_at_knots_to_the_right():
    p = DDPM([0.1, 0.2, 0.3, 0.4])
    rates = [-math.log1p(-b) / 2 for b in (0.2, 0.3, 0.4)]
    t = f64(0, 0.99, 1.0, 1.5, 2.0, 3.0)
    torch.testing.assert_close(p.beta(t), f64(*[rates[k] for k in (0, 0, 1, 1, 2, 2)]))
    assert p == DDPM(torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64))
    assert hash(p) == hash(DDPM((0.1, 0.2, 0.3, 0.4)))
    assert (p.eps, p.T) == (0.0, 3.0)
