"""Samplers against exact solutions, orders of convergence and brute force (docs/theory.md, §4 and §8)."""

from __future__ import annotations

import math
import os
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.sample import naive, pf_ode, reverse_sde

MIXTURE = vk.GaussianMixture(torch.tensor([[-1.0, 0.5], [1.0, 0.0]]), [0.3, 0.7], 0.2)
LINE = vk.VP(eps=0.01)


def points(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def quantiles(n: int, process: vk.Process) -> Tensor:
    """The prior in one dimension, one point for each of n equal shares."""
    z = torch.as_tensor(stats.norm.ppf((np.arange(n) + 0.5) / n))
    return float(process.sigma(torch.tensor(process.T, dtype=torch.float64))) * z[:, None]


def slope(errors: list[float]) -> float:
    """The order, from errors at step counts that double."""
    return math.log2(errors[0] / errors[-1]) / (len(errors) - 1)


def total_variation(a: Tensor, b: Tensor) -> float:
    one, two = (torch.histc(v.double(), 120, -1.5, 1.5) / len(v) for v in (a, b))
    return 0.5 * float((one - two).abs().sum())


# --- orders of convergence -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "order"), [("euler", 1), ("heun", 2), ("exponential", 1), ("multistep", 2)])
@pytest.mark.parametrize("process", [vk.VPSong(), vk.EDM(), vk.Cosine()], ids=["song", "edm", "cosine"])
def test_each_method_has_its_order(method, order, process):
    score, spacing = MIXTURE.score(process), "log" if isinstance(process, vk.Cosine) else None
    x = process.prior((6, 2), generator=0, dtype=torch.float64)
    best = pf_ode(score, x, method="dopri5", tolerance=1e-9)
    errors = [float((pf_ode(score, x, steps=n, method=method, spacing=spacing) - best).norm())
              for n in (100, 200, 400)]  # fmt: skip
    assert abs(slope(errors) - order) < 0.25


def test_dopri5_reaches_its_tolerance_and_does_not_mind_small_t():
    process = vk.VP(eps=1e-5)
    score = MIXTURE.score(process)
    x = process.prior((8, 2), generator=1, dtype=torch.float64)
    best = pf_ode(score, x, method="dopri5", tolerance=1e-10)
    for tolerance in (1e-3, 1e-5, 1e-7):
        assert (pf_ode(score, x, method="dopri5", tolerance=tolerance) - best).abs().max() < 100 * tolerance
    single = pf_ode(score, x.float(), method="dopri5")
    assert single.dtype == torch.float32
    assert (single - best).abs().max() < 1e-4


def exact_point(process: vk.Process, x: Tensor, y: Tensor) -> Tensor:
    ends = torch.tensor([process.eps, process.T], dtype=torch.float64)
    (a0, a1), (s0, s1) = process.alpha(ends), process.sigma(ends)
    return a0 * y + s0 / s1 * (x - a1 * y)


@pytest.mark.parametrize("spacing", ["uniform", "log", "edm"])
@pytest.mark.parametrize(
    "process", [vk.VP(), vk.VE(), vk.FlowMatching(), vk.DDPM.linear()], ids=lambda p: type(p).__name__
)
def test_exponential_steps_are_exact_for_one_point(process, spacing):
    y = torch.tensor([[0.3, -2.0, 1.0]], dtype=torch.float64)
    x = process.prior((5, 3), generator=2, dtype=torch.float64)
    score = vk.EmpiricalScore(y, process)
    for steps in (1, 2, 17):
        got = pf_ode(score, x, steps=steps, method="exponential", spacing=spacing)
        torch.testing.assert_close(got, exact_point(process, x, y), rtol=1e-12, atol=1e-12)


def test_one_gaussian_reverse_sde_has_the_exact_moments_of_its_chain_and_weak_order_one():
    """For a Gaussian population the chain is linear: mean and variance obey a recursion, whose error halves."""
    process, mu, v = vk.VPSong(eps=0.01), 1.5, 0.25
    score = vk.GaussianMixture(points(mu), None, v).score(process)

    def recursion(steps: int) -> tuple[float, float]:
        t = process.times(steps)
        alpha, var, beta, D = (getattr(process, n)(t).tolist() for n in ("alpha", "S", "beta", "D"))
        m, s = 0.0, float(var[0])
        for k, dt in enumerate((t[:-1] - t[1:]).tolist()):
            tau = alpha[k] ** 2 * v + var[k]
            a = 1 + dt * (beta[k] - 2 * D[k] / tau)
            m, s = a * m + dt * 2 * D[k] * alpha[k] * mu / tau, a * a * s + 2 * D[k] * dt
        return m, s

    e = torch.tensor(process.eps, dtype=torch.float64)
    want = float(process.alpha(e)) * mu, float(process.alpha(e)) ** 2 * v + float(process.S(e))
    errors = [[abs(g - w) for g, w in zip(recursion(n), want, strict=True)] for n in (200, 400, 800)]
    assert abs(slope([e[1] for e in errors]) - 1) < 0.2
    x = reverse_sde(
        score, process.prior((40000, 1), generator=3, dtype=torch.float64), spacing="uniform", steps=60, generator=4
    )
    m, s = recursion(60)
    assert abs(float(x.mean()) - m) < 4 * math.sqrt(s / len(x))
    assert abs(float(x.var()) / s - 1) < 4 * math.sqrt(2 / len(x))


# --- grids, and what is saved --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["euler", "heun", "exponential", "multistep", "dopri5"])
@pytest.mark.parametrize("spacing", ["uniform", "log", "edm"])
def test_what_is_saved(method, spacing):
    process = vk.VPSong()
    score = vk.EmpiricalScore(points(-1.0, 1.0).reshape(2, 1, 1).expand(2, 1, 2), process)
    x = process.prior((3, 2, 1, 2), generator=5)
    got = pf_ode(score, x, steps=40, method=method, spacing=spacing, save=("path", "error", "logp"))
    assert got.x.shape == x.shape
    assert got.x.dtype == x.dtype
    torch.testing.assert_close(got.times, process.times(40, spacing), rtol=0, atol=0)
    assert got.path.shape == (41, *x.shape)
    assert torch.allclose(got.path[0], x, rtol=1e-6)
    assert torch.equal(got.path[-1], got.x)
    assert got.error.shape == got.logp.shape == (3, 2)
    bare = pf_ode(score, x, steps=40, method=method, spacing=spacing)
    assert torch.allclose(bare, got.x, rtol=1e-3, atol=1e-4 if method == "dopri5" else 1e-6)
    if method != "dopri5":
        other = pf_ode(score, x, steps=80, method=method, spacing=spacing)
        torch.testing.assert_close(got.error, (got.x - other).double().flatten(2).norm(dim=-1), rtol=1e-5, atol=1e-6)
    only = pf_ode(score, x, steps=4, method=method, spacing=spacing, save="error")
    assert only.path is None
    assert only.logp is None


@pytest.mark.parametrize("method", ["euler", "heun", "exponential"])
def test_twice_the_step_halving_error_bounds_the_true_error(method):
    """Order p: the error is error_reported / (1 - 2^-p), at most twice as large."""
    process = vk.VPSong()
    score = MIXTURE.score(process)
    x = process.prior((20, 2), generator=6, dtype=torch.float64)
    got = pf_ode(score, x, spacing="uniform", steps=400, method=method, save="error")
    true = (got.x - pf_ode(score, x, method="dopri5", tolerance=1e-9)).norm(dim=-1)
    assert (true <= 2.6 * got.error + 1e-9).all()
    assert (got.error <= 2 * true + 1e-9).all()


def test_the_likelihood_along_the_flow_is_log_p():
    process = vk.VP(eps=0.02)
    data = torch.tensor([[-1.0, 0.0], [1.0, 0.5], [0.2, 1.0]], dtype=torch.float64)
    score = vk.EmpiricalScore(vk.Empirical(data, [0.2, 0.5, 0.3]), process)
    x = process.prior((12, 2), generator=7, dtype=torch.float64)
    for method, steps, bound in (("dopri5", 1, 2e-3), ("heun", 600, 2e-2)):
        got = pf_ode(score, x, steps=steps, method=method, spacing="log", save="logp", tolerance=1e-8)
        torch.testing.assert_close(got.logp, score.posterior(got.x, process.eps).logp, rtol=0, atol=bound)


def test_the_likelihood_of_an_anisotropic_process_and_its_flow_in_the_whitened_frame():
    gamma = torch.tensor([[1.0, 0.4], [0.4, 0.5]], dtype=torch.float64)
    process = vk.Anisotropic(vk.VP(eps=0.05), gamma)
    data = torch.tensor([[-1.0, 0.0], [1.0, 0.5]], dtype=torch.float64)
    score = vk.EmpiricalScore(data, process)
    x = process.prior((9, 2), generator=8, dtype=torch.float64)
    got = pf_ode(score, x, method="dopri5", save="logp", tolerance=1e-8)
    torch.testing.assert_close(got.logp, score.posterior(got.x, process.eps).logp, rtol=0, atol=2e-3)
    values, vectors = torch.linalg.eigh(gamma)
    root = (vectors * values.sqrt()) @ vectors.mT
    white = vk.EmpiricalScore(torch.linalg.solve(root, data.mT).mT, process.base)
    for method in ("euler", "heun", "exponential"):
        want = pf_ode(white, torch.linalg.solve(root, x.mT).mT, spacing="uniform", steps=30, method=method) @ root
        torch.testing.assert_close(
            pf_ode(score, x, spacing="uniform", steps=30, method=method), want, rtol=1e-8, atol=1e-9
        )
    y, t, by_hand = x, process.times(30), process.base
    for here, there in pairwise(t):  # x' = -beta x - D s with the operator D
        y = y + (there - here) * (-by_hand.beta(here) * y - (process.D(here) @ score(y, here)))
    torch.testing.assert_close(pf_ode(score, x, method="euler", spacing="uniform", steps=30), y, rtol=1e-8, atol=1e-9)


def test_hutchinson_for_a_score_that_is_not_exact():
    process = vk.VP(eps=0.02)
    score = MIXTURE.score(process)
    x = process.prior((96, 2), generator=9, dtype=torch.float64)
    got = pf_ode(score, x, steps=50, method="heun", spacing="log", save="logp", probes=8, generator=1)
    gap = got.logp - MIXTURE.logp(got.x, process.eps, process)
    assert gap.abs().mean() < 0.15
    assert abs(float(gap.mean())) < 4 * float(gap.std()) / math.sqrt(96) + 0.01
    line = vk.GaussianMixture(points(-1.0, 1.0), None, 0.1)  # in one dimension ±1 probes are exact
    z = quantiles(9, process)
    one = pf_ode(line.score(process), z, steps=300, method="heun", spacing="log", save="logp", probes=1)
    torch.testing.assert_close(one.logp, line.logp(one.x, process.eps, process), rtol=0, atol=2e-3)
    again = pf_ode(line.score(process), z[0], steps=300, method="heun", spacing="log", save="logp", probes=1)
    torch.testing.assert_close(again.logp, one.logp[0])  # one sample without a batch is one sample


def test_the_pushed_density_integrates_to_one():
    process = vk.VP(eps=0.05)
    score = vk.EmpiricalScore(vk.Empirical(points(-1.0, 0.3, 1.0), [0.5, 0.2, 0.3]), process)
    x = torch.linspace(-6, 6, 1201, dtype=torch.float64)[:, None]
    got = pf_ode(score, x, method="dopri5", tolerance=1e-7, save="logp")
    assert abs(float(torch.trapezoid(got.logp.exp(), got.x[:, 0])) - 1) < 2e-3


# --- memorisation, and the discretisation error that looks like generalization -------------------------------------


@pytest.mark.parametrize(("method", "spacing"), [("exponential", "log"), ("dopri5", None)])
def test_with_V_zero_every_sample_is_a_training_point_as_often_as_its_weight_says(method, spacing):
    process = vk.VP(eps=1e-4)
    data = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 0.0], [-2.0, -1.0]], dtype=torch.float64)
    weights = torch.tensor([0.1, 0.15, 0.3, 0.2, 0.25], dtype=torch.float64)  # points 1 and 3 are the same
    score = vk.EmpiricalScore(vk.Empirical(data, weights), process)
    n = 10000
    x = pf_ode(
        score,
        process.prior((n, 2), generator=10, dtype=torch.float64),
        steps=1000,
        method=method,
        spacing=spacing,
        tolerance=1e-4,
    )
    distance, nearest = torch.cdist(x, data[[0, 1, 2, 4]]).min(1)
    sigma = float(process.sigma(torch.tensor(process.eps, dtype=torch.float64)))
    assert distance.max() < 6 * sigma
    counts = torch.bincount(nearest, minlength=4).numpy()
    assert stats.chisquare(counts, n * np.array([0.1, 0.35, 0.3, 0.25])).pvalue > 1e-3
    assert stats.chisquare(counts, n * np.array([0.25, 0.25, 0.25, 0.25])).pvalue < 1e-6  # it can tell


@pytest.mark.parametrize(
    ("eps", "steps", "mass", "slack"),
    [(1e-4, 30, 0.029, 0.002), (1e-3, 30, 0.032, 0.002), (1e-2, 30, 0.073, 0.003), (1e-2, 100, 4.5e-3, 5e-4),
     (1e-3, 100, 6.5e-5, 6e-5), (1e-3, 1000, 0.0, 5e-5)],
)  # fmt: skip
def test_few_uniform_steps_fill_the_gaps_of_the_exact_score(eps, steps, mass, slack):
    process = vk.VP(eps=eps)
    score = vk.EmpiricalScore(points(-1.0, 0.0, 1.0), process)
    x = pf_ode(
        score, quantiles(2000 if steps == 1000 else 20000, process), method="euler", spacing="uniform", steps=steps
    ).abs()
    assert abs(float(((x > 0.25) & (x < 0.75)).double().mean()) - mass) <= slack


# --- the naive estimator -------------------------------------------------------------------------------------------


def brute(values: list[float], kappa: float, n: int, steps: int, seed: int, resample: bool) -> np.ndarray:
    """Euler with the naive estimator (or Gaussian noise of its covariance) on the paper's VP, in numpy."""
    rng, y = np.random.default_rng(seed), np.array(values)
    t = np.linspace(1.0, 0.01, steps + 1)
    x = rng.standard_normal(n)
    for here, dt in zip(t[:-1], t[:-1] - t[1:], strict=True):
        beta, alpha = 0.1 + 19.9 * here, math.exp(-(0.1 * here + 9.95 * here**2))
        var = 1 - alpha**2
        logit = -0.5 * (x - alpha * y[:, None]) ** 2 / var  # (values, n): long rows are fast
        r = np.exp(logit - logit.max(0))
        r /= r.sum(0)
        m = y @ r
        if resample:
            x0 = y[np.minimum((r.cumsum(0) < rng.random(n)).sum(0), len(y) - 1)]
            noise = x0 - m
        else:
            noise = np.sqrt(np.maximum(y**2 @ r - m**2, 0)) * rng.standard_normal(n)
        s = (alpha * (m + math.sqrt(kappa / dt) * noise) - x) / var
        x = x + dt * beta * (x + s)
    return x


@pytest.mark.parametrize("kappa", [0.0, 0.01, 0.1])
@pytest.mark.parametrize("values", [[-1.0, 1.0], [-1.0, 0.0, 1.0]])
def test_naive_and_its_gaussian_twin_against_brute_force(values, kappa):
    n, steps = 8000, 60
    score = vk.EmpiricalScore(points(*values), LINE)
    x = LINE.prior((n, 1), generator=11, dtype=torch.float64)
    got = naive(score, x, spacing="uniform", kappa=kappa, steps=steps, generator=12)[:, 0].numpy()
    assert stats.ks_2samp(got, brute(values, kappa, 40000, steps, 13, True)).pvalue > 1e-3
    white = vk.sample.effective_sde(
        vk.kernels.Naive(score, kappa), x, method="euler", spacing="uniform", steps=steps, generator=14
    )
    assert stats.ks_2samp(white[:, 0].numpy(), brute(values, kappa, 40000, steps, 15, False)).pvalue > 1e-3


def test_kappa_zero_is_the_flow_by_eulers_method():
    for process in (LINE, vk.Anisotropic(LINE, torch.tensor([2.0, 0.5]))):
        score = vk.EmpiricalScore(torch.tensor([[-1.0, 0.0], [1.0, 0.3]]), process)
        x = process.prior((50, 2), generator=16)
        a, b = (
            naive(score, x, spacing="uniform", kappa=0.0, steps=50, generator=1),
            pf_ode(score, x, method="euler", spacing="uniform", steps=50),
        )
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        white = vk.sample.effective_sde(
            vk.kernels.Naive(score, 0), x, method="euler", spacing="uniform", steps=50, generator=1
        )
        torch.testing.assert_close(white, b, rtol=1e-4, atol=1e-5)


def twins(n: int, steps: int) -> float:
    score = vk.EmpiricalScore(points(-1.0, 0.0, 1.0), LINE)
    x = LINE.prior((n, 1), generator=17, dtype=torch.float64)
    a = naive(score, x, spacing="uniform", kappa=0.1, steps=steps, generator=18)
    return total_variation(
        a,
        vk.sample.effective_sde(
            vk.kernels.Naive(score, 0.1), x, method="euler", spacing="uniform", steps=steps, generator=19
        ),
    )


def test_resampled_and_gaussian_noise_differ_at_few_steps_and_meet_at_many():
    assert abs(twins(20000, 30) - 0.27) < 0.03
    few, many = (total_variation(*(torch.as_tensor(brute([-1, 0, 1], 0.1, 40000, k, 20 + r, r)) for r in (True, False)))
                 for k in (30, 1000))  # fmt: skip
    assert abs(few - 0.27) < 0.03
    assert many < 0.05


@pytest.mark.slow
def test_resampled_and_gaussian_noise_meet_at_3000_steps():
    assert twins(100000, 3000) <= 0.03


def gap_by_bisection(steps: int) -> float:
    """P(|x_eps| < .8) on {-1, 1}: the flow is odd and increasing, so it is the prior mass below one x_T."""
    score, (low, high) = vk.EmpiricalScore(points(-1.0, 1.0), LINE), (0.0, 0.1)
    for _ in range(2):
        x = torch.linspace(low, high, 513, dtype=torch.float64)[:, None]
        inside = int((pf_ode(score, x, method="euler", spacing="uniform", steps=steps)[:, 0] < 0.8).sum())
        low, high = float(x[inside - 1]), float(x[inside])
    return 2 * stats.norm.cdf(high) - 1


def test_the_naive_estimator_empties_the_gap():
    """{-1, 1}, 3,000 steps: 8e-4 at kappa 0, 1.7e-4 at .01, none at .1."""
    flow = gap_by_bisection(3000)
    assert abs(flow / 8.4e-4 - 1) < 0.2
    n = 20000
    some, none = (int((np.abs(brute([-1.0, 1.0], k, n, 1500, 23, True)) < 0.8).sum()) for k in (0.01, 0.1))
    assert some < n * flow / 2
    assert none == 0


@pytest.mark.slow
@pytest.mark.parametrize(("kappa", "mass"), [(0.0, 8.4e-4), (0.01, 1.6e-4), (0.1, 0.0)])
def test_the_gap_at_3000_steps(kappa, mass):
    n = 200000
    score = vk.EmpiricalScore(points(-1.0, 1.0), LINE)
    x = naive(score, LINE.prior((n, 1), generator=24), spacing="uniform", kappa=kappa, steps=3000, generator=25)
    assert abs(float((x.abs() < 0.8).double().mean()) - mass) <= 0.2 * mass + 4 * math.sqrt(mass / n)


# --- refusals, precision, derivatives ------------------------------------------------------------------------------

TWO = vk.EmpiricalScore(points(-1.0, 1.0), LINE)
X = torch.zeros(3, 1, dtype=torch.float64)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: naive(TWO, X, spacing="uniform", kappa=-1.0), "kappa"),
        (lambda: naive(TWO, X, spacing="uniform", kappa=math.nan), "kappa"),
        (lambda: naive(MIXTURE.score(LINE), X, spacing="uniform", kappa=0.1), "EmpiricalScore"),
        (lambda: pf_ode(TWO, X, method="euler", spacing="uniform", steps=0), "steps"),
        (lambda: pf_ode(TWO, X, method="euler", spacing="uniform", steps=2.5), "steps"),
        (lambda: reverse_sde(TWO, X, spacing="uniform", steps=-1), "steps"),
        (lambda: pf_ode(TWO, X, spacing="uniform", method="rk4"), "method"),
        (lambda: pf_ode(TWO, X, method="euler", spacing="uniform", save=("paths",)), "save"),
        (lambda: pf_ode(TWO, X, method="euler", spacing="linear"), "spacing"),
        (lambda: pf_ode(TWO, X, method="dopri5", tolerance=0.0), "tolerance"),
        (lambda: pf_ode(3, X), "needs a Score"),
        (lambda: pf_ode(lambda x, t: x, X), "vk.as_score"),
        (lambda: vk.as_score(lambda x, t: x, "VP"), "process"),
        (lambda: pf_ode(TWO, [0.0], method="euler", spacing="uniform"), "x_T"),
        (lambda: pf_ode(TWO, X / 0, method="euler", spacing="uniform"), "NaN"),
        (lambda: pf_ode(TWO, torch.zeros(3, 2), method="euler", spacing="uniform"), "shape"),
        (lambda: pf_ode(vk.as_score(lambda x, t: x[..., :0], LINE), X), "same shape"),
        (lambda: pf_ode(vk.as_score(lambda x, t: None, LINE), X), "must return a tensor"),
        (lambda: pf_ode(vk.as_score(lambda x, t: x / 0, LINE), X + 1, method="euler", spacing="uniform"), "diverged"),
        (lambda: reverse_sde(vk.as_score(lambda x, t: x * 1e200, LINE), X + 1, spacing="uniform"), "diverged"),
        (
            lambda: pf_ode(
                vk.as_score(lambda x, t: -x, LINE), X, method="euler", spacing="uniform", save="logp", probes=0
            ),
            "probe",
        ),
        (
            lambda: pf_ode(vk.EmpiricalScore(points(-1.0, 1.0), vk.VP(eps=0)), X, spacing="uniform", method="heun"),
            "no noise",
        ),
        (lambda: naive(TWO, X, spacing="uniform", kappa="a"), "kappa"),
        (lambda: reverse_sde(TWO, X, spacing="uniform", generator="a"), "generator"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(call, says):
    with pytest.raises(InputError, match=says) as caught:
        call()
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize("method", ["euler", "heun", "exponential", "multistep", "dopri5"])
def test_a_score_of_nan_is_never_a_silent_nan(method):
    nowhere = vk.as_score(lambda x, t: x * math.nan, LINE)
    with pytest.raises((InputError, AssertionError)):
        pf_ode(nowhere, X + 1, spacing="uniform", steps=10, method=method, save=("path", "logp"))


def test_a_process_without_noise_at_eps_can_be_sampled_by_the_steps_that_arrive():
    process = vk.VP(eps=0)
    score = vk.EmpiricalScore(points(-1.0, 1.0), process)
    for method in ("euler", "exponential", "multistep"):
        x = pf_ode(
            score, process.prior((20, 1), generator=1, dtype=torch.float64), spacing="uniform", steps=300, method=method
        )
        assert ((x.abs() - 1).abs() < 0.05).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_half_precision_and_integers(dtype):
    x = torch.tensor([[-2], [1], [3]]).to(dtype)
    want = pf_ode(TWO, x.double(), spacing="uniform", steps=50, method="heun")
    for got in (
        pf_ode(TWO, x, spacing="uniform", steps=50, method="heun"),
        naive(TWO, x, spacing="uniform", kappa=0.0, steps=50),
    ):
        assert got.dtype == (dtype if dtype.is_floating_point else torch.float32)
        assert torch.allclose(got.double(), want, atol=0.1)


def test_the_flow_can_be_differentiated_in_its_start():
    def end(x: Tensor) -> Tensor:
        return pf_ode(TWO, x, method="euler", spacing="uniform", steps=30)

    x = torch.tensor([[0.02], [-0.3]], dtype=torch.float64)
    step = 1e-6
    want = (end(x + step) - end(x - step)) / (2 * step)
    y = x.clone().requires_grad_()
    got = torch.autograd.grad(end(y).sum(), y)[0]
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-8)
    tangent = torch.func.jvp(end, (x,), (torch.ones_like(x),))[1]
    torch.testing.assert_close(tangent, want, rtol=1e-6, atol=1e-8)


def test_one_seed_one_answer_and_the_engines_blocks_do_not_matter():
    process, data = vk.VP(), torch.randn(300, 6, generator=torch.Generator().manual_seed(1))
    x = process.prior((40, 6), generator=2)
    whole, small = vk.EmpiricalScore(data, process), vk.EmpiricalScore(data, process, memory=1 << 16)
    for run in (
        lambda s: naive(s, x, spacing="uniform", kappa=0.05, steps=20, generator=3),
        lambda s: reverse_sde(s, x, spacing="uniform", steps=20, generator=3),
        lambda s: vk.sample.effective_sde(
            vk.kernels.Naive(s, 0.05), x, method="euler", spacing="uniform", steps=20, generator=3
        ),
    ):
        assert torch.equal(run(whole), run(whole))
        torch.testing.assert_close(run(small), run(whole), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("VKERNEL_DATA"), reason="VKERNEL_DATA does not name the folder with CIFAR")
def test_the_effective_sde_on_4000_cifar_images_in_three_minutes():
    data = vk.load(Path(os.environ["VKERNEL_DATA"]) / "cifar10")
    data = vk.Empirical(data[:4000])
    process = vk.VP()
    score = vk.EmpiricalScore(data, process)
    start = time.perf_counter()
    x = vk.sample.effective_sde(
        vk.kernels.Naive(score, 0.01),
        process.prior((64, *data.shape), generator=0),
        method="euler",
        spacing="uniform",
        generator=1,
    )
    assert time.perf_counter() - start < 180
    assert x.shape == (64, *data.shape)
