"""How exact is exact? float32 data at image size, low noise, and geometries that punish a careless sum."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from draws import gen, normal
from geometries import GEOMETRIES, Truth, queries
from reference import stages
from torch import Tensor

import vkernel as vk

SIGMAS = (0.02, 0.05, 0.1, 0.3, 1.0, 3.0, 10.0)


def check(score: vk.EmpiricalScore, truth: Truth, x: Tensor, sigma: float, few: float = 5e-6) -> tuple[float, Tensor]:
    """The worst error of the mean, in units of the data's spread, and the true means.

    At most ``few`` where fewer than 50 points matter and 5e-5 elsewhere; traces within what theory can see.
    """
    mean, trace, ess = truth(x, sigma)
    spread, d = score.data.spread, x.shape[1]
    posterior = score.posterior(x.double(), sigma)  # the same x; float64 shows more digits of the answer
    denoised = x.double() + sigma**2 * score(x.double(), sigma)
    error = (posterior.mean - mean).norm(dim=1) / spread
    other = (denoised - mean).norm(dim=1) / spread
    slack = 1e-15 * x.double().norm(dim=1) / spread  # the last digit of x, where x is far larger than the spread
    bound = torch.where(ess < 50, few, 5e-5) + slack
    assert (error <= bound).all(), (sigma, error, ess)
    assert (other <= bound + 1e-6).all(), (sigma, other, ess)
    # tr C to 1e-4 of itself, or to 1e-7 of the noise that C is compared with, tr S^-1
    gap = (posterior.cov.trace() - trace).abs()
    assert (gap <= 1e-4 * trace + 1e-7 * d * sigma**2).all(), (sigma, gap, trace, ess)
    # and the answer in float32 is that answer, rounded
    rounded = score.posterior(x, sigma).mean
    assert rounded.dtype == x.dtype
    assert torch.equal(rounded, posterior.mean.to(x.dtype))
    return float(error.max()), mean


def plain_float32(points: Tensor, x: Tensor, sigma: float) -> Tensor:
    """What one writes first: |x|² - 2 x·y + |y|² in float32."""
    square = x.square().sum(-1)[:, None] - 2 * x @ points.mT + points.square().sum(-1)
    return (square / (-2 * sigma**2)).softmax(1) @ points


IMAGES: dict[str, Callable[[], Tensor]] = {
    "random images": lambda: torch.rand(3000, 3072, generator=gen(0)) * 2 - 1,
    "low rank, noise, mean 100": lambda: (
        100
        + 0.1 * (normal(3000, 20, seed=0) @ normal(20, 3072, seed=1)).float()
        + 0.05 * torch.randn(3000, 3072, generator=gen(2))
    ),
}


@pytest.mark.parametrize("kind", IMAGES)
def test_means_of_images_in_float32(kind):
    points = IMAGES[kind]()
    score, truth = vk.EmpiricalScore(points, vk.EDM()), Truth(points)
    errors, naive, seen = {}, {}, set()
    for sigma in SIGMAS:
        x = queries(points, sigma, 3)
        errors[sigma], mean = check(score, truth, x, sigma, few=1e-6)
        naive[sigma] = float(((plain_float32(points, x, sigma).double() - mean).norm(dim=1) / score.data.spread).max())
        seen |= stages(score, x.double(), sigma)
    print(kind, "engine", errors, "plain float32", naive)
    assert naive[0.02] > 1e-3
    assert max(errors.values()) < 1e-4 * naive[0.02]
    assert {"sparse", "float32"} <= seen


def test_float32_queries_and_float64_queries_agree_in_the_score():
    points = IMAGES["random images"]()[:500]
    score = vk.EmpiricalScore(points, vk.EDM())
    for sigma in SIGMAS[::2]:
        x = queries(points, sigma, 4)
        torch.testing.assert_close(score(x, sigma), score(x.double(), sigma).float(), rtol=0, atol=0)


def test_raw_moments_cancel_and_the_engine_does_not():
    """float32, d = 784, S = 2.2e-4, next to a boundary: the example of theory §2."""
    points = (torch.rand(400, 784, generator=gen(0)) * 2 - 1).float()
    sigma = math.sqrt(2.2e-4)
    a, b = points[0].double(), points[1].double()
    square = float((a - b).square().sum())
    share = 19.6 * sigma**4 / square  # r (1 - r) |a - b|² / sigma⁴ = 19.6
    step = 0.5 - sigma**2 * math.log((1 - share) / share) / square
    x = (a + step * (b - a)).float()[None]
    r = ((x.double() - points.double()).square().sum(-1) / (-2 * sigma**2)).softmax(-1)
    mean = r @ points.double()
    want = float(r @ (points.double() - mean).square().sum(-1)) / sigma**4
    assert 5 < want < 80
    got = float(vk.EmpiricalScore(points, vk.EDM()).covariance(x, sigma).trace())
    assert got == pytest.approx(want, rel=1e-5)
    m = r.float() @ points
    raw = float(r.float() @ points.square().sum(-1) - m.square().sum()) / sigma**4
    assert abs(raw - want) > 0.5 * want


# --- geometries ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_hard_geometries(name, stored):
    make, sigmas = GEOMETRIES[name]
    points = make().to(stored)
    score, truth = vk.EmpiricalScore(points, vk.EDM(eps=1e-3)), Truth(points)
    worst = {sigma: check(score, truth, queries(points, sigma, 3), sigma)[0] for sigma in sigmas}
    print(name, stored, worst)


@pytest.mark.parametrize(
    "name", ["near-copies, 1e-4", "one-hot", "twins, 1e-3", "outlier, 1e4", "offset 1e4, spread 1e-2"]
)
def test_hard_geometries_in_chunks(name):
    """The same where the data do not fit into the memory that is allowed, and chunks are merged."""
    make, sigmas = GEOMETRIES[name]
    points = make().float()
    score = vk.EmpiricalScore(points, vk.EDM(eps=1e-3), memory=4 * points.numel())
    assert score.engine.points.kept is None
    assert score.engine.points.chunk < len(points)
    truth = Truth(points)
    for sigma in sigmas:
        check(score, truth, queries(points, sigma, 3), sigma)


@pytest.mark.parametrize("d", [1, 3, 31, 32, 40])
@pytest.mark.parametrize("far", [1e2, 1e3, 1e4, 1e5, 1e6])
def test_a_far_point_does_not_blur_a_close_pair(d, far):
    """Two points 0.01 apart at sigma = .002, and a third far away that moves the centre: C between the two is known."""
    direction = torch.nn.functional.normalize(normal(1, d, seed=0))[0]
    points = torch.stack([-0.005 * direction, 0.005 * direction, far * direction])
    score = vk.EmpiricalScore(points, vk.EDM())
    sigma = 0.002
    for place in (0.0, 1e-3, -4e-3):
        want = 0.005**2 / sigma**4 / math.cosh(0.005 * place / sigma**2) ** 2
        C = score.covariance(place * direction, sigma)
        assert float(C.trace()) == pytest.approx(want, rel=1e-5)
        assert float((C @ direction) @ direction) == pytest.approx(want, rel=1e-5)


def test_one_far_query_does_not_spoil_its_neighbours():
    points = normal(500, 64, seed=0).float()
    score, truth = vk.EmpiricalScore(points, vk.EDM()), Truth(points)
    x = queries(points, 0.5, 3)
    x[1] = 1e5
    mean, _, ess = truth(x, 0.5)
    error = (score.posterior(x.double(), 0.5).mean - mean).norm(dim=1) / score.data.spread
    assert (error <= torch.where(ess < 50, 1e-6, 5e-5)).all()


def test_every_noise_level_in_one_batch():
    points = normal(800, 100, seed=0).float()
    score, truth = vk.EmpiricalScore(points, vk.EDM()), Truth(points)
    t = torch.tensor([0.002, 0.02, 0.2, 0.6, 1.0, 2.0, 5.0, 20.0, 80.0], dtype=torch.float64)
    x = points[:9].double() + t[:, None] * normal(9, 100, seed=1)
    together = score.posterior(x, t)
    assert stages(score, x, t) == {"sparse", "float32"}
    for b, sigma in enumerate(t.tolist()):
        mean, trace, _ = truth(x[b : b + 1], sigma)
        assert (together.mean[b] - mean[0]).norm() <= 1e-5 * score.data.spread
        torch.testing.assert_close(together.cov.trace()[b], trace[0], rtol=1e-4, atol=1e-7 * 100 * sigma**2)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_a_looser_product_is_allowed_for(precision):
    """torch.set_float32_matmul_precision trades digits for speed; the engine's error bound knows."""
    before = torch.get_float32_matmul_precision()
    points = normal(800, 100, seed=0).float()
    score, truth = vk.EmpiricalScore(points, vk.EDM()), Truth(points)
    try:
        torch.set_float32_matmul_precision(precision)
        for sigma in (0.1, 0.6, 1.0, 2.0, 5.0, 20.0):
            x = queries(points, sigma, 3)
            mean, _, _ = truth(x, sigma)
            assert ((score.posterior(x.double(), sigma).mean - mean).norm(dim=1) <= 5e-5 * score.data.spread).all()
    finally:
        torch.set_float32_matmul_precision(before)
