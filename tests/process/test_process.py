"""Forward processes: every formula by a second route (docs/theory.md, section 1)."""

from __future__ import annotations

import math
import pickle
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from torch import Tensor

from vkernel.core.covariance import Congruent, Diagonal, Isotropic, Matrix
from vkernel.core.errors import InputError
from vkernel.process import DDPM, EDM, PROCESSES, VE, VP, Anisotropic, Cosine, FlowMatching, Process, Toy, VPSong, parse

ALL: list[Process] = [
    VP(),
    VP(beta_min=2.0, beta_max=2.0, eps=0.01, T=2.0),
    VPSong(),
    DDPM.linear(),
    DDPM.scaled_linear(steps=50, eps=0.5, T=40.0),
    Cosine(),
    VE(),
    EDM(),
    FlowMatching(),
    Toy(),
]
each = pytest.mark.parametrize("process", ALL, ids=lambda p: f"{type(p).__name__}-T{p.T:g}")


def f64(*values: float) -> Tensor:
    return torch.tensor(values[0] if len(values) == 1 else values, dtype=torch.float64)


def at(process: Process, u: float) -> Tensor:
    """A time at the fraction u of the range, kept off DDPM's knots."""
    t = process.eps + u * (process.T - process.eps)
    if isinstance(process, DDPM):
        t = min(math.floor(t), len(process.betas) - 2) + min(max(t - math.floor(t), 0.1), 0.9)
    return f64(t)


def slope(f, t: Tensor) -> Tensor:
    t = t.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(t).sum() + 0 * t.sum(), t)
    return g


# ---------------------------------------------------------------- the formulas


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
    end = float(process.time(f64(min(1.0, process._ratios()[1] / 2))))
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


# ---------------------------------------------------------------- which VP is which


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


# ---------------------------------------------------------------- times


@each
@settings(max_examples=20, deadline=None)
@given(u=st.floats(0.0, 1.0))
def test_time_inverts_sigma_over_alpha(process, u):
    t = f64(process.eps + u * (process.T - process.eps))
    back = process.time(process.sigma(t) / process.alpha(t))
    torch.testing.assert_close(back, t, rtol=1e-9, atol=1e-12)


@each
def test_time_in_lower_precision(process):
    """The ends come back although sigma/alpha there is rounded, and the middle to the precision of its condition."""
    for dtype, rtol in ((torch.float32, 1e-4), (torch.float16, 0.1), (torch.bfloat16, 0.3)):
        t = torch.tensor([process.eps, float(at(process, 0.4)), process.T], dtype=torch.float64)
        ratio = (process.sigma(t) / process.alpha(t)).to(dtype)
        if not ratio.isfinite().all() or (ratio == 0).any():
            ratio, t = ratio[:2], t[:2]
        back = process.time(ratio)
        assert back.dtype == dtype
        torch.testing.assert_close(back.double(), t, rtol=rtol, atol=rtol * 0.1)
    low, _ = process._ratios()
    assert process.time(low) == pytest.approx(process.eps, rel=1e-5, abs=1e-6)


@each
def test_time_refuses_what_is_not_reached(process):
    low, high = process._ratios()
    for ratio in (0.9 * low - 1e-9, 1.1 * high, -high, math.inf):
        with pytest.raises(InputError, match=r"sigma/alpha = .* is outside \["):
            process.time(f64(low, ratio))


@each
@pytest.mark.parametrize("spacing", [None, "uniform", "log", "edm"])
@pytest.mark.parametrize("steps", [1, 2, 30, 1000])
def test_times_descend_from_exactly_T_to_exactly_eps(process, spacing, steps):
    t = process.times(steps, spacing)
    assert t.dtype == torch.float64
    assert t.shape == (steps + 1,)
    assert float(t[0]) == process.T
    assert float(t[-1]) == process.eps
    assert (t.diff() < 0).all()
    r = process.sigma(t) / process.alpha(t)
    even = {"uniform": t, "log": r.log(), "edm": r ** (1 / 7)}[spacing or process.spacing]
    torch.testing.assert_close(even.diff(), ((even[-1] - even[0]) / steps).expand(steps), rtol=1e-6, atol=1e-10)


def test_EDM_times_are_those_of_Karras():
    i = torch.arange(18, dtype=torch.float64)
    karras = (80 ** (1 / 7) + i / 17 * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7
    torch.testing.assert_close(EDM().times(17), karras)
    assert torch.equal(Anisotropic(EDM(), torch.ones(2)).times(17), EDM().times(17))


@pytest.mark.parametrize("steps", [0, -1, 2.0, True, "3", None])
def test_times_refuses_steps(steps):
    with pytest.raises(InputError, match="steps must be a whole number"):
        VP().times(steps)


def test_times_refuses_spacings():
    with pytest.raises(InputError, match='"uniform", "log" or "edm", not \'karras\''):
        VP().times(3, "karras")
    with pytest.raises(InputError, match="needs noise at eps"):
        VP(eps=0.0).times(3, "log")
    assert float(VP(eps=0.0).times(3, "edm")[-1]) == 0.0


@each
def test_check_is_the_door(process):
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        t = torch.tensor([process.eps, process.T], dtype=torch.float64).to(dtype)
        for moved in (t, torch.nextafter(t, t.flip(0))) if dtype.itemsize > 2 else (t,):
            checked = process.check(moved)
            assert checked.dtype == dtype
            torch.testing.assert_close(checked, moved)
    assert process.check(process.eps).ndim == 0
    assert process.check(1).dtype == torch.get_default_dtype() if process.T >= 1 else True
    for bad in (process.T * 1.01, process.eps - 1e-3, math.nan, math.inf, torch.tensor([process.T, -1.0])):
        with pytest.raises(InputError, match=r"t = .* is outside \[.*range \[eps, T\].*choose t inside"):
            process.check(bad)
    with pytest.raises(InputError, match="number or a tensor"):
        process.check("soon")


def test_check_clamps_rounding_and_keeps_the_gradient():
    t = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)).requires_grad_()
    assert VP().check(t) == 1.0
    inner = torch.tensor(0.5, requires_grad=True)
    VP().check(inner).backward()
    assert inner.grad == 1.0


# ---------------------------------------------------------------- points


@each
def test_perturb_has_the_moments_of_the_kernel(process):
    n, t = 40_000, at(process, 0.2)
    x0 = torch.tensor([1.0, -2.0], dtype=torch.float64).expand(n, 2)
    x = process.perturb(x0, t, generator=0)
    mean, var = process.alpha(t) * x0[0], process.S(t)
    assert ((x.mean(0) - mean).abs() < 4 * (var / n).sqrt()).all()
    assert ((x.var(0) / var - 1).abs() < 4 * (2 / n) ** 0.5).all()
    assert torch.equal(x, process.perturb(x0, float(t), generator=torch.Generator().manual_seed(0)))


def test_perturb_takes_one_time_per_element():
    p, x0, t = (
        VP(),
        torch.randn(4, 3, 2, 2, dtype=torch.float64),
        torch.tensor([0.01, 0.1, 0.5, 1.0], dtype=torch.float64),
    )
    x = p.perturb(x0, t, generator=5)
    noise = (x - p.alpha(t)[:, None, None, None] * x0) / p.sigma(t)[:, None, None, None]
    torch.testing.assert_close(noise, torch.randn(x0.shape, generator=torch.Generator().manual_seed(5), dtype=x0.dtype))
    assert torch.equal(x, p.perturb(x0, t[:, None, None, None], generator=5))
    grid = t.reshape(2, 2)
    assert torch.equal(x.reshape(2, 2, 3, 2, 2), p.perturb(x0.reshape(2, 2, 3, 2, 2), grid, generator=5))
    for bad in (t[:3], t.reshape(2, 2), torch.full((4, 3, 2, 2, 1), 0.5)):
        with pytest.raises(InputError, match="one for each element of the batch"):
            p.perturb(x0, bad)
    with pytest.raises(InputError, match="outside"):
        p.perturb(x0, 0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_perturb_in_half_is_float32_rounded_once(dtype):
    x0 = torch.randn(64, 3).to(dtype)
    half = Toy().perturb(x0, 0.3, generator=1)
    assert half.dtype == dtype
    assert torch.equal(half, Toy().perturb(x0.float(), 0.3, generator=1).to(dtype))
    assert Toy().perturb(torch.arange(4), 0.3, generator=1).dtype == torch.get_default_dtype()
    exact = DDPM.linear().perturb(x0.float(), torch.full((64,), 500), generator=1)  # indices, as networks take them
    torch.testing.assert_close(exact, DDPM.linear().perturb(x0.float(), 500.0, generator=1))


@each
def test_prior_is_the_noise_at_T(process):
    x = process.prior((30_000, 2), dtype=torch.float64, generator=2)
    assert (x.var(0) / process.S(f64(process.T)) - 1).abs().max() < 4 * (2 / 30_000) ** 0.5
    assert x.mean(0).abs().max() < 4 * process.sigma(f64(process.T)) / 30_000**0.5
    assert torch.equal(x, process.prior((30_000, 2), dtype=torch.float64, generator=2))
    assert process.prior((3,)).dtype == torch.get_default_dtype()
    assert process.prior((3,), dtype=torch.bfloat16, device="cpu").dtype == torch.bfloat16


@each
@pytest.mark.parametrize(
    "other", [VP(eps=1e-9, T=1.2), EDM(eps=1e-6, T=1e5), FlowMatching(eps=1e-9, T=1 - 1e-7)], ids=repr
)
def test_convert_goes_there_and_back(process, other):
    t = torch.stack([at(process, u) for u in (0.01, 0.3, 0.9)])
    x = process.perturb(torch.randn(3, 4, dtype=torch.float64), t, generator=0)
    moved, there = process.convert(x, t, other)
    torch.testing.assert_close(other.log_snr(there), process.log_snr(t), rtol=1e-8, atol=1e-8)
    back, again = other.convert(moved, there, process)
    torch.testing.assert_close(back, x, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(again, t, rtol=1e-7, atol=1e-9)


def test_convert_keeps_densities():
    """p'(x'|t') |dx'/dx| = p(x|t) for a mixture of two points in one dimension; also the posterior weights."""

    def logits(process: Process, x: Tensor, t: Tensor) -> Tensor:
        y = f64(-1.0, 0.5)
        z = (x[:, None] - process.alpha(t)[:, None] * y) / process.sigma(t)[:, None]
        return -(z**2) / 2 - process.sigma(t)[:, None].log()

    p, q, t = VP(), EDM(), f64(0.05, 0.3, 0.6)
    x = f64(-0.3, 0.2, 1.0)
    moved, there = p.convert(x, t, q)
    a, b = logits(p, x, t), logits(q, moved, there)
    torch.testing.assert_close(a.softmax(1), b.softmax(1))
    torch.testing.assert_close(a.logsumexp(1), b.logsumexp(1) + torch.log(moved / x))


def test_convert_keeps_dtypes_and_refuses_what_is_out_of_reach():
    x, t = VP().convert(torch.ones(2, 3, dtype=torch.float16), 0.5, FlowMatching())
    assert (x.dtype, t.dtype, t.shape) == (torch.float16, torch.float32, ())
    with pytest.raises(InputError, match=r"sigma/alpha = 0.002 .*VP"):
        EDM().convert(torch.ones(2), 0.002, VP())


# ---------------------------------------------------------------- anisotropic noise

ROOT = torch.tensor([[1.0, 0.2, 0.0], [0.0, 0.7, -0.4], [0.0, 0.0, 1.3]], dtype=torch.float64)
GAMMA = ROOT @ ROOT.T
VARIANCES = f64(0.5, 1.0, 3.0)
kinds = pytest.mark.parametrize(
    ("gamma", "dense"),
    [
        (GAMMA, GAMMA),
        (VARIANCES, VARIANCES.diag()),
        (Matrix(GAMMA, (3,)), GAMMA),
        (Diagonal(VARIANCES, (3,)), VARIANCES.diag()),
    ],
    ids=["matrix", "diagonal", "Matrix", "Diagonal"],
)


@kinds
@each
def test_anisotropic_S_and_D_against_dense_matrices(process, gamma, dense):
    """S = sigma² Γ; and D = S'/2 + beta S as matrices, S' by autodiff."""
    p = Anisotropic(process, gamma)
    t = torch.stack([at(process, u) for u in (0.2, 0.5)])
    torch.testing.assert_close(p.S(t).dense(), process.S(t)[:, None, None] * dense)
    for k in range(2):
        slopes = torch.autograd.functional.jacobian(lambda u: p.S(u).dense(), t[k])
        D = slopes / 2 + p.beta(t[k]) * p.S(t[k]).dense()
        torch.testing.assert_close(p.D(t).dense()[k], D, rtol=1e-8, atol=1e-12)
    v = torch.randn(2, 3, dtype=torch.float64)
    torch.testing.assert_close(p.S(t) @ v, process.S(t)[:, None] * (v @ dense))
    assert torch.equal(p.sigma(t), process.sigma(t))
    assert torch.equal(p.alpha(t), process.alpha(t))
    assert (p.eps, p.T, p.base, p.shape) == (process.eps, process.T, process, (3,))


@kinds
def test_whitening(gamma, dense):
    p, x = Anisotropic(VP(), gamma), torch.randn(5, 2, 3, dtype=torch.float64)
    torch.testing.assert_close(p.unwhiten(p.whiten(x)), x)
    torch.testing.assert_close(p.whiten(p.whiten(x)), x @ torch.linalg.inv(dense))
    torch.testing.assert_close(p.unwhiten(p.unwhiten(x)), x @ dense)
    torch.testing.assert_close(p.root.dense() @ p.root.dense(), dense)
    white = Congruent(p.S(0.5), p.inverse_root).dense()  # the noise is white in these coordinates
    torch.testing.assert_close(white, VP().S(f64(0.5)) * torch.eye(3, dtype=torch.float64))
    back = Congruent(Isotropic(VP().S(f64(0.5)), (3,)), p.root).dense()
    torch.testing.assert_close(back, p.S(0.5).dense())
    assert p.half_log_det == pytest.approx(float(torch.logdet(dense)) / 2, rel=1e-12)
    assert p.inverse_trace == pytest.approx(float(torch.linalg.inv(dense).trace()), rel=1e-12)
    assert p.whiten(x.half()).dtype == torch.float16
    assert p.whiten(x.float()).dtype == torch.float32
    with pytest.raises(InputError, match=r"events of shape \(3,\)"):
        p.whiten(x[..., :2])


@kinds
def test_anisotropic_draws_have_covariance_gamma(gamma, dense):
    p, n, t = Anisotropic(Toy(), gamma), 40_000, f64(0.4)
    x = p.perturb(f64(1.0, 2.0, 3.0).expand(n, 3), t, generator=0)
    error = (dense**2 + dense.diag().outer(dense.diag())).div(n).sqrt()
    assert ((x.T.cov() - 0.4 * dense).abs() < 4 * 0.4 * error).all()
    assert ((x.mean(0) - 0.6**0.5 * f64(1.0, 2.0, 3.0)).abs() < 4 * (0.4 * dense.diag() / n).sqrt()).all()
    prior = p.prior((n, 3), dtype=torch.float64, generator=1)
    assert ((prior.T.cov() - 0.999 * dense).abs() < 4 * error).all()
    whitened = p.whiten(p.perturb(p.unwhiten(torch.ones(4, 3)), 0.4, generator=7))
    torch.testing.assert_close(whitened, p.base.perturb(torch.ones(4, 3), 0.4, generator=7))
    with pytest.raises(InputError, match="one for each element of the batch"):
        p.perturb(torch.ones(4, 3), torch.full((4, 3), 0.4))


def test_anisotropic_for_images():
    images = Anisotropic(EDM(), torch.rand(2, 4, 4) + 0.5)
    assert images.S(torch.ones(5)).batch == (5,)
    assert images.S(torch.ones(5)).diag().shape == (5, 2, 4, 4)
    assert images.perturb(torch.zeros(5, 2, 4, 4), torch.ones(5)).shape == (5, 2, 4, 4)
    square = Anisotropic(EDM(), Diagonal(torch.rand(4, 4) + 0.5, (4, 4)))
    assert square.shape == (4, 4)
    flat = Anisotropic(EDM(), Matrix(torch.eye(16), (4, 4)))
    torch.testing.assert_close(flat.whiten(torch.ones(3, 4, 4)), torch.ones(3, 4, 4))


def test_anisotropic_operators_follow_t():
    p = Anisotropic(VP(), GAMMA)
    assert p.S(0.5).dtype == torch.float64
    assert p.S(torch.tensor(0.5)).dtype == torch.float32
    assert (p.S(torch.tensor([0.5, 0.6])) @ torch.ones(2, 3)).dtype == torch.float32


@pytest.mark.parametrize(
    ("gamma", "sentence"),
    [
        (f64(1.0, 0.0), "must be positive; the smallest is 0"),
        (f64(1.0, -2.0), "must be positive; the smallest is -2"),
        (f64(1.0, math.nan), "finite"),
        (torch.tensor([[1.0, 0.3], [0.0, 1.0]]), "not symmetric: .* differ by 0.3.*Diagonal"),
        (torch.ones(3, 3), "not positive definite: eigenvalues"),
        (torch.tensor([[1.0, 2.0], [2.0, 1.0]]), "not positive definite: eigenvalues from -1 to 3"),
        (Isotropic(torch.tensor(1.0), (3,)), "Diagonal or Matrix"),
        (Diagonal(torch.ones(2, 3), (3,)), "without batch"),
    ],
    ids=str,
)
def test_gamma_must_be_positive_definite(gamma, sentence):
    with pytest.raises(InputError, match=sentence):
        Anisotropic(VP(), gamma)


def test_anisotropic_equality_and_conversion():
    a, b = Anisotropic(VP(), GAMMA), Anisotropic(VP(), Matrix(GAMMA.clone(), (3,)))
    assert a == b
    assert hash(a) == hash(b)
    assert a not in (Anisotropic(VP(), VARIANCES), Anisotropic(Toy(), GAMMA), Anisotropic(VP(), 2 * GAMMA), VP())
    assert "alpha = exp(" in repr(a)
    with pytest.raises(AttributeError):
        a.eps = 0.1
    with pytest.raises(InputError, match="isotropic process"):
        Anisotropic(a, GAMMA)
    x = torch.randn(4, 3, dtype=torch.float64)
    moved, there = a.convert(x, 0.3, Anisotropic(FlowMatching(), GAMMA))
    expected, time = VP().convert(x, 0.3, FlowMatching())
    assert torch.equal(moved, expected)
    assert torch.equal(there, time)
    for p, q in ((a, VP()), (VP(), a), (a, Anisotropic(VP(), VARIANCES))):
        with pytest.raises(InputError, match="different covariances"):
            p.convert(x, 0.3, q)


# ---------------------------------------------------------------- names and constructors


def test_repr_prints_the_formula():
    assert repr(VP()) == "VP: alpha = exp(-(0.1 t + 9.95 t²)), S = 1 - alpha², eps=0.001, T=1"
    assert "1000 betas 0.0001 … 0.02" in repr(DDPM.linear())
    assert VP.beta.__qualname__ == "VP.beta"


@each
def test_processes_are_values(process):
    twin = pickle.loads(pickle.dumps(process))
    assert twin == process
    assert hash(twin) == hash(process)
    assert process.base is process
    assert process.whiten(x := torch.ones(2)) is x
    with pytest.raises(AttributeError):
        process.T = 3.0


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: VP(eps=-1e-3), "eps must be positive"),
        (lambda: VP(eps=1.0), "eps must be less than T"),
        (lambda: VP(eps=2.0, T=1.0), "eps must be less than T; got eps=2 and T=1"),
        (lambda: VP(T=math.inf), "T must be finite"),
        (lambda: VP(T=math.nan), "T must be finite"),
        (lambda: VP(T="late"), "T must be numeric"),
        (lambda: VP(beta_min=0.0), "beta_min must be positive"),
        (lambda: VP(beta_min=3.0, beta_max=2.0), "beta_min must not exceed beta_max"),
        (lambda: VPSong(beta_min=-1.0), "beta_min must be positive"),
        (lambda: VP(T=100.0), "sigma/alpha must grow from eps to T"),
        (lambda: VE(sigma_min=0.0), "sigma_min must be positive"),
        (lambda: VE(sigma_min=2.0, sigma_max=2.0), "sigma/alpha must grow"),
        (lambda: EDM(T=0.0), "T must be positive"),
        (lambda: Cosine(s=0.0), "s must be positive"),
        (lambda: Cosine(T=1.0), "T must be less than 1"),
        (lambda: FlowMatching(T=1.0), "T must be less than 1, where beta and D diverge"),
        (lambda: Toy(T=1.5), "T must be less than 1"),
        (lambda: DDPM([0.1]), "at least two betas"),
        (lambda: DDPM([0.1, 1.0]), "strictly between 0 and 1"),
        (lambda: DDPM([0.1, 0.0]), "strictly between 0 and 1"),
        (lambda: DDPM([0.1, math.nan]), "finite"),
        (lambda: DDPM([0.1, "b"]), "betas must be numeric"),
        (lambda: DDPM(torch.full((2, 2), 0.1)), "betas must be numeric"),
        (lambda: DDPM(0.1), "betas must be numeric"),
        (lambda: DDPM([0.1, 0.2, 0.3], T=3.0), "at most 2"),
        (lambda: DDPM.linear(steps=1), "2 or more"),
        (lambda: DDPM.scaled_linear(beta_start=-0.1), "positive"),
        (lambda: DDPM.from_alphas_cumprod([0.9, 0.5, 0.0]), "alphas_cumprod must be positive"),
        (lambda: DDPM.from_alphas_cumprod([0.9, 0.95]), "strictly between"),
    ],
)
def test_bad_arguments_are_refused_with_a_sentence(make, sentence):
    with pytest.raises(InputError, match=sentence) as caught:
        make()
    assert str(caught.value).endswith(".")


def test_parse():
    assert [type(parse(name)) for name in PROCESSES] == list(PROCESSES.values())
    assert parse("vp") == VP()
    assert parse(" VP : beta_max = 10, eps=1e-4 ") == VP(beta_max=10.0, eps=1e-4)
    assert parse("flow:T=0.9") == FlowMatching(T=0.9)
    assert parse("ddpm") == DDPM.linear()
    assert parse("ddpm:steps=100,beta_end=.1,T=50") == DDPM.linear(1e-4, 0.1, 100, T=50.0)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "no process ''; give one of vp, vpsong, ddpm, cosine, ve, edm, flow, toy"),
        ("vpp", "no process 'vpp'"),
        ("vp:sigma=1", "vp takes beta_min, beta_max, eps, T, each once; 'sigma=1' is amiss"),
        ("vp:eps=1e-3,eps=1e-4", "each once"),
        ("vp:eps", "'eps' does not give eps a number; write for example vp:eps="),
        ("vp:eps=small", "'eps=small' does not give eps a number"),
        ("ddpm:steps=10.5", "does not give steps a number"),
        ("ddpm:betas=1", "ddpm takes beta_start"),
        ("toy:T=1", "T must be less than 1"),
    ],
)
def test_parse_refuses(text, sentence):
    with pytest.raises(InputError, match=sentence):
        parse(text)


def test_prior_can_be_quasi_random():
    p = VP()
    x = p.prior((512, 1, 2), dtype=torch.float64, generator=3, quasi=True)
    assert x.shape == (512, 1, 2)
    assert torch.equal(x, p.prior((512, 1, 2), dtype=torch.float64, generator=3, quasi=True))
    assert not torch.equal(x, p.prior((512, 1, 2), dtype=torch.float64, generator=4, quasi=True))
    assert (x.mean(0).abs() < 0.02).all()
    line = p.prior((5, 1), generator=torch.Generator().manual_seed(0), quasi=True)
    assert line.dtype == torch.get_default_dtype()
    assert float(line[2]) == 0.0
