"""Posterior and its covariance: the law of draws, stored types, copies of queries, and refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from draws import normal
from geometries import clusters, near, training_set
from hypothesis import assume, given, settings, strategies as st
from reference import answer, answers, levels, stack
from scipy import stats
from torch import Tensor

import vkernel as vk
from vkernel.core.errors import InputError

# --- draws -----------------------------------------------------------------------------------------------------------


def frequencies_fit(index: Tensor, weight: Tensor) -> float:
    """The p value of Pearson's test, rare points taken together."""
    expected = weight * len(index)
    count = torch.bincount(index, minlength=len(weight)).double()
    common = expected >= 5
    f = torch.cat([count[common], count[~common].sum()[None]])
    e = torch.cat([expected[common], expected[~common].sum()[None]])
    if e[-1] < 1:
        assert f[-1] <= 6
        f, e = f[:-1], e[:-1] * (f[:-1].sum() / e[:-1].sum())
    return stats.chisquare(f.numpy(), e.numpy()).pvalue if len(f) > 1 else 1.0


@pytest.mark.parametrize("chunk", [None, 37])
@pytest.mark.parametrize(("d", "sigma"), [(2, 0.3), (2, 2.0), (40, 0.3), (40, 0.7), (40, 1.5), (40, 10.0)])
def test_sample_frequencies_are_the_weights(d, sigma, chunk):
    points, weights = training_set(120, d, 0, weighted=True, zeros=True)
    points = points * math.sqrt(d) if d == 2 else points * 2
    score = vk.EmpiricalScore(vk.Empirical(points, weights), vk.EDM())
    if chunk:
        score.engine.points.chunk = chunk
    x = near(points, sigma, "edm", 3, 1)
    index = score.posterior(x, sigma).sample_indices(20_000, generator=3)
    assert index.shape == (20_000, 3)
    for b, a in enumerate(answers(points, weights, x, "edm", sigma)):
        assert frequencies_fit(index[:, b], a.weight) > 1e-4
        assert (a.weight[index[:, b]] > 0).all()


def test_samples_are_points_in_the_order_of_their_indices():
    points, _ = training_set(20, 6, 0)
    data = vk.Empirical(points.reshape(20, 2, 3))
    posterior = vk.EmpiricalScore(data, vk.VP()).posterior(normal(4, 5, 2, 3, seed=1), 0.3)
    draws, index = posterior.sample(7, 2), posterior.sample_indices(7, 2)
    assert draws.shape == (7, 4, 5, 2, 3)
    assert torch.equal(draws, points.reshape(20, 2, 3)[index])
    assert torch.equal(posterior.sample(7, torch.Generator().manual_seed(2)), draws)


def test_two_draws_of_a_query_are_independent():
    points = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    posterior = vk.EmpiricalScore(points, vk.EDM()).posterior(torch.zeros(20_000, 1, dtype=torch.float64), 1.0)
    a, b = posterior.sample(2, 0)[..., 0]
    assert abs((a * b).mean()) < 5 / math.sqrt(20_000)
    assert abs((a[1:] * a[:-1]).mean()) < 5 / math.sqrt(20_000)


@pytest.mark.parametrize("chunk", [None, 13])
@pytest.mark.parametrize(("d", "sigma"), [(3, 0.7), (36, 0.6), (36, 1.5), (36, 5.0)])
def test_draws_have_the_covariance(d, sigma, chunk):
    """Entry by entry within 5.5 standard errors of a Gaussian's second moments, and Gaussian fourth moments."""
    points = normal(60, d, seed=0)
    score = vk.EmpiricalScore(points, vk.EDM())
    if chunk:
        score.engine.points.chunk = chunk
    x = points[0] + 0.5 * sigma * normal(d, seed=1)
    truth = answer(points, None, x, 1.0, sigma**2)
    count = 6000
    draws = score.covariance(x.expand(count, d), sigma).draw(generator=2)
    C = truth.C
    second = draws.mT @ draws / count
    se = ((C.diagonal()[:, None] * C.diagonal() + C.square()) / count).sqrt()
    assert ((second - C).abs() <= 5.5 * se).all()
    assert (draws.mean(0).abs() <= 5 * (C.diagonal() / count).sqrt()).all()
    along = draws @ torch.linalg.eigh(C).eigenvectors[:, -1]
    z = along / along.square().mean().sqrt()
    assert abs(z.pow(4).mean() - 3) < 5 * math.sqrt(24 / count) + 0.05
    assert stats.kstest(z.numpy(), "norm").pvalue > 1e-4


def test_draws_of_a_tight_cluster_far_from_the_centre():
    """E|draw|² is the trace that the same operator reports, and both are brute force's."""
    points = clusters(1000, 64, 10.0, width=1e-4, seed=0)
    score = vk.EmpiricalScore(points, vk.EDM())
    x = points[:1]
    posterior = score.posterior(x, 1.0)
    truth = answer(points, None, x[0], 1.0, 1.0)
    draws = score.posterior(x.expand(400, 64), 1.0).cov.draw(0)
    assert truth.ess > 400
    got = draws.square().sum(-1)
    assert abs(got.mean() - truth.cov.trace()) < 5 * got.std() / 20
    torch.testing.assert_close(posterior.cov.trace()[0], truth.cov.trace(), rtol=1e-3, atol=0)


# --- storage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [3, 48])
@pytest.mark.parametrize("stored", ["float32", "float64", "float16", "uint8"])
def test_a_memory_map_gives_the_answers_of_memory(tmp_path, d, stored):
    array = (normal(200, d, seed=0).numpy() * 40 + 100).astype(stored)
    np.save(tmp_path / "a.npy", array)
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    scale = (-1, 1) if stored == "uint8" else None
    inside, outside = vk.Empirical(array, scale=scale), vk.Empirical(mapped, scale=scale)
    assert not outside.in_memory
    a, b = (vk.EmpiricalScore(s, vk.EDM()) for s in (inside, outside))
    b.engine.points.chunk = 23
    values = inside.rows(0, 200).double()
    for sigma in (0.05, 0.3, 1.0, 30.0):
        x = values[:5] + sigma * normal(5, d, seed=1)
        truth = answers(values, None, x, "edm", sigma)
        for score in (a, b):
            posterior = score.posterior(x, sigma)
            assert (posterior.mean - stack(truth, "mean")).norm(dim=1).max() < 1e-5 * inside.spread
            trace = torch.stack([u.cov.trace() for u in truth])
            torch.testing.assert_close(posterior.cov.trace(), trace, rtol=1e-4, atol=1e-9 * inside.spread**2)
        assert torch.equal(a.posterior(x, sigma).sample_indices(20, 1), b.posterior(x, sigma).sample_indices(20, 1))


@pytest.mark.parametrize("kind", ["memory map", "small memory"])
@pytest.mark.parametrize("sigma", [0.003, 0.01, 0.02, 0.05, 0.3])
def test_a_large_offset_costs_nothing_where_the_data_are_not_kept(tmp_path, kind, sigma):
    """float32 points near 1e4, a hundredth apart: their centre has no float32 that would do."""
    points = (1e4 + 1e-2 * normal(500, 64, seed=0)).float()
    if kind == "memory map":
        np.save(tmp_path / "a.npy", points.numpy())
        score = vk.EmpiricalScore(vk.Empirical(np.load(tmp_path / "a.npy", mmap_mode="r")), vk.EDM(eps=1e-3))
    else:
        score = vk.EmpiricalScore(points, vk.EDM(eps=1e-3), memory=4 * 500 * 65)
    assert score.engine.points.kept is None
    x = points[:4].double() + sigma * normal(4, 64, seed=1)
    truth = answers(points, None, x, "edm", sigma)
    posterior = score.posterior(x, sigma)
    trace = torch.stack([a.cov.trace() for a in truth])
    assert (posterior.mean - stack(truth, "mean")).norm(dim=1).max() < 1e-5 * score.data.spread
    torch.testing.assert_close(posterior.logp, stack(truth, "logp"), rtol=0, atol=1e-3)
    torch.testing.assert_close(posterior.cov.trace(), trace, rtol=1e-4, atol=1e-12 * score.data.spread**2)
    draws = score.posterior(x[:1].expand(300, 64), sigma).cov.draw(0).square().sum(-1)
    assert abs(draws.mean() - trace[0]) < 5 * draws.std() / math.sqrt(300) + 1e-12 * score.data.spread**2


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("d", [2, 40])
def test_half_precision_points_are_their_values(stored, d):
    points = normal(50, d, seed=0).to(stored)
    score = vk.EmpiricalScore(points, vk.VP())
    x = normal(3, d, seed=1)
    torch.testing.assert_close(score(x, 0.3), stack(answers(points, None, x, "vp", 0.3), "score"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "process", [vk.VP(), vk.Anisotropic(vk.VP(), torch.full((40,), 0.7))], ids=["vp", "anisotropic"]
)
def test_a_posterior_does_not_follow_an_x_that_is_changed_in_place(process):
    """A sampler that writes into x after it has asked keeps the answers to its question."""
    points, _ = training_set(30, 40, 0)
    score = vk.EmpiricalScore(points, process)
    x, t, v = normal(4, 40, seed=1), torch.full((4,), 0.3, dtype=torch.float64), normal(4, 40, seed=2)
    want_p, want_C = score.posterior(x.clone(), t.clone()), score.covariance(x.clone(), t.clone())
    p, C = score.posterior(x, t), score.covariance(x, t)
    want = want_p.mean, want_p.logp, want_p.cov.draw(0), want_p.sample(2, 0), want_C @ v, want_C.trace(), want_C.draw(1)
    x.add_(3.0)
    t.mul_(0.5)
    got = p.mean, p.logp, p.cov.draw(0), p.sample(2, 0), C @ v, C.trace(), C.draw(1)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


# --- refusals and edges ----------------------------------------------------------------------------------------------


@pytest.fixture
def posterior():
    points, _ = training_set(10, 3, 0)
    return vk.EmpiricalScore(points, vk.VP()).posterior(normal(4, 3, seed=1), 0.3)


@pytest.mark.parametrize("k", [0, -1, 11, 1.5, "two", None])
def test_top_refuses_what_is_no_number_of_points(posterior, k):
    with pytest.raises(InputError, match="k"):
        posterior.top(k)


@pytest.mark.parametrize("k", [0, -3, 1.5, None])
def test_sample_refuses_what_is_no_number_of_draws(posterior, k):
    with pytest.raises(InputError, match="k"):
        posterior.sample(k)


@pytest.mark.parametrize(
    "indices",
    [torch.tensor(10), torch.tensor(-11), torch.tensor(0.5), torch.tensor([1, 2, 3]), torch.zeros(4, 2).long()],
)
def test_weight_refuses_what_is_no_index(posterior, indices):
    with pytest.raises(InputError):
        posterior.weight(indices)


def test_weight_takes_one_index_or_one_for_each_query(posterior):
    each = torch.tensor([0, 3, 9, -1])
    per_query = posterior.weight(each)
    for b, i in enumerate(each):
        assert per_query[b] == posterior.weight(i)[b]
    assert torch.equal(posterior.weight(3), posterior.weight(torch.tensor(3)))
    total = sum(posterior.weight(torch.tensor(i)) for i in range(10))
    torch.testing.assert_close(total, torch.ones(4, dtype=torch.float64))


def test_draws_refuse_what_is_no_generator(posterior):
    for bad in ("seed", 1.5, True):
        with pytest.raises(InputError, match="generator"):
            posterior.sample(1, bad)
        with pytest.raises(InputError, match="generator"):
            posterior.cov.draw(bad)


@pytest.mark.parametrize("d", [3, 40])
def test_an_empty_batch_has_empty_answers(d):
    points, _ = training_set(30, d, 0)
    score = vk.EmpiricalScore(points, vk.VP())
    x = torch.zeros(0, d)
    posterior, C = score.posterior(x, 0.3), score.covariance(x, 0.3)
    assert score(x, 0.3).shape == posterior.mean.shape == C.diag().shape == C.draw(0).shape == (C @ x).shape == (0, d)
    assert posterior.logp.shape == C.trace().shape == posterior.ess.shape == (0,)
    assert posterior.sample(2, 0).shape == (2, 0, d)
    assert [a.shape for a in posterior.top(3)] == [(0, 3), (0, 3)]


def test_one_point_has_no_variance():
    for d in (1, 5, 40):
        score = vk.EmpiricalScore(normal(1, d, seed=0), vk.VP())
        x = normal(6, d, seed=1)
        for t in (1e-3, 0.1, 1.0):
            C, posterior = score.covariance(x, t), score.posterior(x, t)
            for a in (C.trace(), C.diag(), C @ x, C.draw(0), posterior.entropy):
                assert (a == 0).all()
            assert (posterior.ess == 1).all()


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 12), st.sampled_from([1, 3, 40]), st.integers(0, 1000))
def test_copies_of_one_point_have_no_variance(n, d, seed):
    assume(n > 0)
    point = normal(1, d, seed=seed)
    score = vk.EmpiricalScore(point.expand(n, d).clone(), vk.VP())
    x = normal(3, d, seed=seed + 1)
    for t in (1e-3, 0.1, 1.0):
        C = score.covariance(x, t)
        _, S = levels("vp", t)
        assert (C.trace() <= 1e-14 * d / S**2).all()
        torch.testing.assert_close(score.posterior(x, t).ess, torch.full((3,), float(n), dtype=torch.float64))
