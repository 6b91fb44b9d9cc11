"""Time grids, checks, draws and conversions of forward processes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from processes import at, each, f64
from torch import Tensor

from vkernel.core.errors import InputError
from vkernel.process import DDPM, EDM, VP, Anisotropic, FlowMatching, Process, Toy


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
    low, _ = process.ratios
    assert process.time(low) == pytest.approx(process.eps, rel=1e-5, abs=1e-6)


@each
def test_time_refuses_what_is_not_reached(process):
    low, high = process.ratios
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
    with pytest.raises(InputError, match="one of uniform, log, edm, not 'karras'"):
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
    with pytest.raises(InputError, match="must be real numbers"):
        process.check("soon")


def test_check_clamps_rounding_and_keeps_the_gradient():
    t = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)).requires_grad_()
    assert VP().check(t) == 1.0
    inner = torch.tensor(0.5, requires_grad=True)
    VP().check(inner).backward()
    assert inner.grad == 1.0


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
