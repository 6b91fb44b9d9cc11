"""Gaussian mixtures against autograd and Monte Carlo."""

from __future__ import annotations

import math

import pytest
import torch

from vkernel.core.errors import InputError
from vkernel.score.mixture import GaussianMixture


class FigureOne:
    """The process of the paper's first figure, as a duck."""

    def alpha(self, t):
        return torch.sqrt(1 - torch.as_tensor(t))

    def S(self, t):
        return torch.as_tensor(t)


@pytest.fixture
def mixture() -> GaussianMixture:
    means = torch.tensor([[[0.0, 1.0]], [[2.0, -1.0]], [[-1.0, -1.0]]])
    return GaussianMixture(means, weights=[1, 2, 3], variance=[0.1, 0.5, 0.0])


def test_population_score_is_the_gradient_of_logp(mixture):
    x = torch.randn(5, 4, 1, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    t = torch.tensor([0.05, 0.2, 0.5, 0.9], dtype=torch.float64)
    logp = mixture.logp(x, t, FigureOne())
    (gradient,) = torch.autograd.grad(logp.sum(), x)
    assert logp.shape == (5, 4)
    torch.testing.assert_close(mixture.score(FigureOne())(x, t), gradient, rtol=1e-10, atol=1e-10)


def test_population_score_and_posterior_mean_obey_tweedie(mixture):
    x = torch.randn(6, 1, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for t in (0.1, 0.6):
        s, m = mixture.score(FigureOne())(x, t), mixture.score(FigureOne()).denoise(x, t)
        torch.testing.assert_close(s, (math.sqrt(1 - t) * m - x) / t, rtol=1e-10, atol=1e-10)


def test_posterior_mean_agrees_with_monte_carlo(mixture):
    x0 = mixture.sample(200_000, generator=0).double()
    assert x0.shape == (200_000, 1, 2)
    for t in (0.3, 0.8):
        alpha = math.sqrt(1 - t)
        for x in (torch.tensor([[0.5, -0.5]]), torch.tensor([[-0.4, 0.2]])):
            logits = -((x - alpha * x0) ** 2).sum((-1, -2)) / (2 * t)
            r = logits.softmax(0)
            mean = torch.einsum("n,nij->ij", r, x0)
            error = torch.einsum("n,nij->ij", r**2, (x0 - mean) ** 2).sqrt()
            exact = mixture.score(FigureOne()).denoise(x.double(), t)
            assert ((mean - exact).abs() < 5 * error).all()
            logp = (logits.logsumexp(0) - math.log(len(x0)) - math.log(2 * math.pi * t)).item()
            assert mixture.logp(x.double(), t, FigureOne()).item() == pytest.approx(logp, abs=0.02)


def test_population_samples_have_the_moments_of_the_mixture(mixture):
    x0 = mixture.sample(100_000, generator=3).double().reshape(-1, 2)
    w, mu, v = mixture.weights, mixture.means, mixture.variance
    mean = w @ mu
    variance = w @ (v[:, None] + (mu - mean) ** 2)
    assert ((x0.mean(0) - mean).abs() < 5 * (variance / 1e5).sqrt()).all()
    torch.testing.assert_close(x0.var(0), variance, rtol=0.03, atol=0)
    assert torch.equal(mixture.sample(5, generator=7), mixture.sample(5, generator=7))


def test_population_without_variance_is_the_empirical_posterior():
    population = GaussianMixture([-1.0, 1.0], [1, 3], variance=0.0)
    x, t = torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None], 0.2
    alpha = math.sqrt(1 - t)
    expected = torch.tanh(alpha * x / t + 0.5 * math.log(3))
    torch.testing.assert_close(population.score(FigureOne()).denoise(x, t), expected)


def test_population_results_have_the_type_of_x(mixture):
    for dtype in (torch.float16, torch.float32, torch.float64):
        x = torch.zeros(3, 1, 2, dtype=dtype)
        assert mixture.score(FigureOne())(x, 0.5).dtype == mixture.logp(x, 0.5, FigureOne()).dtype == dtype
    assert mixture.score(FigureOne())(torch.zeros(1, 2, dtype=torch.long), 0.5).dtype == torch.float32


def test_population_refusals(mixture):
    with pytest.raises(InputError, match=r"must end in the event shape \(1, 2\)"):
        mixture.logp(torch.zeros(3, 2, 2), 0.5, FigureOne())
    for t in (float("nan"), float("inf"), -0.1):
        with pytest.raises(InputError, match="t must be finite and not negative"):
            mixture.score(FigureOne())(torch.zeros(3, 1, 2), t)
    with pytest.raises(InputError, match="one for each of 2 components"):
        GaussianMixture([0.0, 1.0], variance=[1.0, 1.0, 1.0])
    with pytest.raises(InputError, match="not negative"):
        GaussianMixture([0.0, 1.0], variance=-1.0)
