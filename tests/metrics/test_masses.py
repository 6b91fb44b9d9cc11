"""Masses and laws on a grid: each by a second route."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from draws import gen, normal, spread
from scipy import stats

import vkernel as vk
from vkernel import metrics
from vkernel.metrics import masses

Z = 1.959963984540054


@pytest.mark.parametrize(("hits", "n"), [(0, 7), (3, 10), (10, 10), (1, 1), (40, 1000)])
def test_the_interval_of_one_sample_solves_wilsons_quadratic(hits, n):
    got = metrics.gap_mass(torch.cat([torch.full((hits,), -0.5), torch.zeros(n - hits)]))
    p = hits / n
    roots = np.sort(np.roots([1 + Z**2 / n, -2 * p - Z**2 / n, p**2]).real)
    assert got.value == p
    assert got.se == pytest.approx(math.sqrt(p * (1 - p) / n))
    np.testing.assert_allclose([got.low, got.high], roots, atol=1e-7)


def test_the_gap_mass_of_an_ensemble_is_over_members():
    x = normal(9, 50, 1)
    share = np.array([np.mean((abs(m) > 0.25) & (abs(m) < 0.75)) for m in x.numpy()])
    got, half = metrics.gap_mass(x), stats.t.ppf(0.975, 8) * share.std(ddof=1) / 3
    want = [share.mean(), share.mean() - half, share.mean() + half]
    np.testing.assert_allclose([got.value, got.low, got.high], want, rtol=1e-5)
    assert metrics.gap_mass(x[..., 0], members=True) == got
    assert metrics.gap_mass(x.reshape(-1)).value == pytest.approx(got.value)
    assert metrics.gap_mass(x[:1]).se == math.inf  # one member tells nothing of the spread of members


@pytest.mark.parametrize("name", ["triple", "hexagon", "random", "doubled"])
@pytest.mark.parametrize("t", [1e-3, 1e-2, 0.03])
def test_training_points_are_on_no_boundary_and_middles_are(name, t):
    data = vk.Empirical(torch.tensor([-1.0, -1.0, 0.0, 0.0, 1.0])) if name == "doubled" else vk.data.toy(name)
    score = vk.EmpiricalScore(data, vk.VP(eps=1e-3))
    points = data.rows(0, data.n).double()
    alpha = score.process.alpha(torch.tensor(t, dtype=torch.float64))
    if name != "random":  # two of its points are nearer to each other than this noise
        assert metrics.boundary_mass(alpha * points, score, t=t).value == 0
    middle = (points[-2] + points[-1]) / 2
    if name != "random" or t < 0.03:
        assert metrics.boundary_mass((alpha * middle)[None], score, t=t).value == 1
    assert metrics.boundary_mass(points, score).value == 0  # at eps, and where alpha is taken as 1
    near = points + 1e-3 * normal(*points.shape)
    assert metrics.boundary_mass(near, score).value == 0


def test_boundary_mass_is_the_share_of_its_own_definition():
    """In one dimension and with two points everything is a closed form."""
    t, y = 0.02, torch.tensor([-1.0, 1.0], dtype=torch.float64)
    score = vk.EmpiricalScore(vk.Empirical(y), vk.VP(eps=1e-3))
    x = torch.linspace(-0.2, 0.2, 4001, dtype=torch.float64)
    alpha, var = (float(f(torch.tensor(t, dtype=torch.float64))) for f in (score.process.alpha, score.process.S))
    m = torch.tanh(alpha * x / var)
    c, s = (alpha / var) ** 2 * (1 - m**2), (alpha * m - x) / var
    for threshold in (0.2, 0.5, 0.9):
        want = ((c > 1 / var) & (c / (c + s**2) > threshold)).double().mean()
        got = metrics.boundary_mass(x, score, threshold, t)
        assert got.value == pytest.approx(float(want), abs=1e-9)
        assert 0 < got.value < 1


def test_boundary_mass_in_an_anisotropic_frame_and_of_members():
    data = vk.data.toy("hexagon")
    score = vk.EmpiricalScore(data, vk.Anisotropic(vk.VP(eps=1e-3), torch.tensor([1.0, 2.0])))
    points = data.rows(0, 6).double()
    middles = 0.9999 * (points + points.roll(1, 0)) / 2
    x = torch.stack([points, torch.zeros_like(points), points])
    got = metrics.boundary_mass(x, score)
    assert got == vk.Estimate.of_mean(torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64))
    assert metrics.boundary_mass(middles[[0, 3]], score, t=0.01).value == 1


def test_total_variation_of_two_normals():
    a, b = normal(200_000, seed=1), normal(200_000, seed=2) + 1
    got = metrics.total_variation(a, b, bins=60, range=(-4, 5), generator=1)
    want = 2 * stats.norm.cdf(0.5) - 1
    assert got.value == pytest.approx(want, abs=4 * got.se + 2e-3)
    assert 5e-4 < got.se < 3e-3
    assert metrics.total_variation(b, a, bins=60, range=(-4, 5)).value == pytest.approx(got.value)
    assert metrics.total_variation(a, b, bins=60, range=(-4, 5), generator=1) == got


def test_total_variation_of_equal_laws_is_its_bias():
    n, bins = 2000, 50
    values = [
        metrics.total_variation(*torch.rand(2, n, generator=gen(k)), bins=bins, range=(0, 1)).value for k in range(20)
    ]
    assert np.mean(values) == pytest.approx(math.sqrt(bins / (math.pi * n)), rel=0.07)


def test_total_variation_by_hand():
    same, other = torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    assert metrics.total_variation(same, same).value == 0
    assert metrics.total_variation(same, other, bins=2).value == 1
    assert metrics.total_variation(same, other, bins=1).value == 0
    # what is outside the range is one cell
    got = metrics.total_variation(torch.tensor([0.5, 5.0]), torch.tensor([0.5, 0.5, -7.0, 0.5]), bins=1, range=(0, 1))
    assert got.value == 0.25
    assert metrics.total_variation(torch.zeros(5), torch.zeros(5)).value == 0


def test_the_errors_of_total_variation_are_its_spread():
    samples, ensembles = [], []
    for k in range(100):
        a, b = normal(400, seed=k), normal(300, seed=1000 + k) + 1
        samples.append(metrics.total_variation(a, b, bins=12, range=(-4, 5)))
        field = normal(10, 1, 1, seed=2000 + k) * 0.5  # members differ: the error is much larger than that of samples
        member = normal(10, 40, 1, seed=k) + field
        ensembles.append(metrics.total_variation(member, b + 2, bins=12, range=(-4, 8), members=(True, False)))
    for estimates in (samples, ensembles):
        sd, claimed = spread(estimates)
        assert claimed == pytest.approx(sd, rel=0.3)


@pytest.mark.parametrize("normalise", ["inside", "all"])
def test_histograms_are_numpys(normalise):
    x = normal(6, 300, 1)
    x[0, 0], x[0, 1] = 2.0, -2.0  # the ends belong to it
    got, edges = metrics.histogram(x, bins=16, range=(-2, 2), normalise=normalise)
    each = np.stack([np.histogram(m, bins=16, range=(-2, 2))[0] for m in x[..., 0].numpy()]) / 0.25
    total = each.sum(1, keepdims=True) * 0.25 if normalise == "inside" else 300
    np.testing.assert_allclose(got.value, (each / total).mean(0))
    np.testing.assert_allclose(got.se, (each / total).std(0, ddof=1) / math.sqrt(6))
    np.testing.assert_allclose(edges, np.linspace(-2, 2, 17))
    flat = x[0].float()
    one, _ = metrics.histogram(flat, bins=16, range=(-2, 2), normalise=normalise)
    np.testing.assert_allclose(one.value, each[0] / (total if normalise == "all" else total[0]))
    assert (one.low <= one.value).all()
    assert (one.value <= one.high).all()


def test_histograms_of_the_plane():
    x = normal(500, 2)
    got, edges = metrics.histogram(x, bins=7, range=((-1, 1), (-2, 3)))
    want, first, second = np.histogram2d(*x.T.numpy(), bins=7, range=((-1, 1), (-2, 3)), density=True)
    np.testing.assert_allclose(got.value, want)
    np.testing.assert_allclose(edges, np.stack([first, second]))


def test_kl_of_normals_on_a_grid():
    x = torch.linspace(-12, 12, 4001, dtype=torch.float64)
    p, q = (-0.5 * x**2).exp(), (-0.5 * ((x - 1) / 1.5) ** 2).exp()
    got = metrics.kl(p, q)
    assert got.value == pytest.approx(math.log(1.5) + (1 + 1) / (2 * 1.5**2) - 0.5, rel=1e-9)
    assert got.se == 0
    assert metrics.kl(p, p).value == 0
    assert metrics.kl([1, 1], [1, 0]).value == math.inf
    assert metrics.kl([1, 0], [1, 1]).value == pytest.approx(math.log(2))


def test_mode_weights_by_hand():
    data = vk.Empirical(torch.tensor([-1.0, 0.0, -1.0, 1.0]), weights=[0.25, 0.25, 0.25, 0.25])
    got = metrics.mode_weights(torch.tensor([-1.1, -0.9, 0.1, 0.4, 5.0]), data, radius=0.3)
    np.testing.assert_allclose(got.share.value, [0.4, 0.2, 0.0])
    np.testing.assert_allclose(got.weights, [0.5, 0.25, 0.25])
    assert got.outside.value == 0.4
    assert got.distance.value == pytest.approx((0.1 + 0.05 + 0.25 + 0.4) / 2)
    everyone = metrics.mode_weights(torch.tensor([-1.1, -0.9, 0.1, 0.4, 5.0]), data)
    np.testing.assert_allclose(everyone.share.value, [0.4, 0.4, 0.2])
    assert everyone.outside.value == 0


def test_mode_weights_of_members():
    data, x = vk.data.toy("hexagon"), normal(7, 40, 2)
    got = metrics.mode_weights(x, data)
    nearest = torch.cdist(x, data.rows(0, 6).double()).argmin(-1)
    each = torch.stack([torch.bincount(m, minlength=6) for m in nearest]).double() / 40
    want = vk.Estimate.of_mean(each)
    np.testing.assert_allclose(got.share.value, want.value)
    np.testing.assert_allclose(got.share.high, want.high)
    assert got.distance.value == pytest.approx(float((want.value - 1 / 6).abs().sum()) / 2)


def test_memorised_fraction_by_a_plain_loop(monkeypatch):
    data = vk.Empirical(normal(37, 4, 5, seed=1))
    points = data.rows(0, 37)
    x = torch.cat([points[:30] + 0.3 * normal(30, 20, seed=2), 2 * normal(30, 20, seed=3)]).reshape(-1, 4, 5)
    ratio = [np.divide(*np.sort(np.linalg.norm(points.numpy() - v.ravel(), axis=1))[:2]) for v in x.numpy()]
    want = np.mean(np.array(ratio) < 1 / 3)
    assert 0.1 < want < 0.9
    assert metrics.memorised_fraction(x, data).value == pytest.approx(want)
    monkeypatch.setattr(masses, "CHUNK", 2048)  # four points and twelve queries at once
    assert metrics.memorised_fraction(x, data).value == pytest.approx(want)
    assert metrics.memorised_fraction(x.reshape(6, 10, 4, 5), data).value == pytest.approx(want)


def test_memorised_fraction_sees_copies_of_copies_and_tiny_distances():
    far = 1000.0
    points = torch.tensor([far, far, far + 1e-9, 0.0], dtype=torch.float64)
    data = vk.Empirical(points)
    # the second copy is no second point, and 1e-10 of 1e-9 is near though both vanish beside 1000²
    assert metrics.memorised_fraction(torch.tensor([far], dtype=torch.float64), data).value == 1
    assert metrics.memorised_fraction(torch.tensor([far + 5e-10], dtype=torch.float64), data).value == 0


def test_the_exact_score_collapses_where_its_posterior_says():
    score = vk.EmpiricalScore(vk.Empirical([-1.0, 1.0, 1.2]), vk.EDM())
    index, noise = torch.arange(3), vk.core.rng.quasi_normals(400, 1, 0).reshape(400, 1, 1)
    ratio = metrics.collapse_ratio(score, index, noise, bisections=30)
    assert float(ratio[0]) > 3 * float(ratio[1])  # the lone point is recognised earlier than one of a pair
    for i, r in enumerate(ratio.tolist()):
        for factor, inside in ((0.99, True), (1.01, False)):
            x = score.data[[i]].double() + factor * r * noise[:, 0]
            weight = score.posterior(x, factor * r).weight(torch.full((400,), i)).mean()
            assert bool(weight >= 0.5) is inside
    pooled = metrics.collapse_ratio(score, index, noise, pooled=True)
    assert pooled.shape == ()
    assert ratio.min() < pooled < ratio.max()
    twins = vk.EmpiricalScore(vk.Empirical([0.0, 0.0, 0.0]), vk.EDM())
    assert metrics.collapse_ratio(twins, index, noise).isnan().all()
    alone = vk.EmpiricalScore(vk.Empirical([0.0]), vk.EDM())
    assert metrics.collapse_ratio(alone, index[:1], noise).tolist() == [pytest.approx(80.0)]
