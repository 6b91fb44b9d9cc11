"""The exact engine against brute force: every moment, every rung, any chunking (docs/theory.md, section 2)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from draws import gen, normal
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reference import PROCESSES, answer, answers, levels, stack, stages, time_between
from scipy import stats
from torch import Tensor

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.posterior import Moments, merge

DIMS = [1, 2, 3, 31, 32, 33, 40, 70]  # both sides of the engine's narrow limit


def training_set(n: int, d: int, seed: int, weighted: bool = False, zeros: bool = False, twins: bool = False):
    """Points about the origin; some repeated; weights over four decades, some zero."""
    points = normal(n, d, seed=seed) / math.sqrt(d)
    if twins and n > 2:
        points[n // 2] = points[0]
    if not weighted:
        return points, None
    weights = 10 ** (4 * torch.rand(n, generator=gen(seed + 1), dtype=torch.float64) - 4)
    if zeros and n > 2:
        weights[1 : n // 3] = 0.0
    return points, weights


def near(points: Tensor, t: float, name: str, count: int, seed: int) -> Tensor:
    """Queries as training makes them, one on the way between two points, one from nowhere."""
    alpha, S = levels(name, t)
    pick = torch.randint(0, len(points), (count,), generator=gen(seed))
    x = alpha * points[pick] + math.sqrt(S) * normal(count, points.shape[1], seed=seed + 1)
    if count > 1:
        x[0] = alpha * (points[0] + points[-1]) / 2
    if count > 2:
        x[1] = normal(points.shape[1], seed=seed + 2)
    return x


# --- against the reference -----------------------------------------------------------------------------------------

cases = st.fixed_dictionaries(
    {
        "n": st.integers(1, 40),
        "d": st.sampled_from(DIMS),
        "name": st.sampled_from(sorted(PROCESSES)),
        "u": st.lists(st.floats(0, 1), min_size=3, max_size=3),
        "kind": st.sampled_from(["equal", "weighted", "zeros"]),
        "twins": st.booleans(),
        "chunk": st.sampled_from([None, 1, 3, 11]),
        "single": st.booleans(),
        "seed": st.integers(0, 10**6),
    }
)


@settings(max_examples=60, deadline=None)
@given(cases)
def test_every_moment_is_that_of_brute_force(case):
    points, weights = training_set(
        case["n"], case["d"], case["seed"], case["kind"] != "equal", case["kind"] == "zeros", case["twins"]
    )
    process = PROCESSES[case["name"]]
    t = torch.tensor([time_between(process, u) for u in case["u"]], dtype=torch.float64)
    x = torch.cat([near(points, float(u), case["name"], 3, case["seed"] + 5)[k : k + 1] for k, u in enumerate(t)])
    if case["single"]:
        points, x = points.float(), x.float()
    score = vk.EmpiricalScore(vk.Empirical(points, weights), process)
    if case["chunk"]:
        score.engine.points.chunk, score.engine.dense.block = case["chunk"], 2
    truth = answers(points, weights, x, case["name"], t)
    # the answers in float64 whatever x was: the arithmetic is what is under test, rounding to x's type is tested below
    x = x.double()
    posterior, C = score.posterior(x, t), score.covariance(x, t)
    v = normal(3, case["d"], seed=case["seed"] + 9)

    size = score.data.spread + 1e-3  # the points are about 1 in size: 1e-3 of that for rounding
    wide = case["d"] >= 32  # rung 2 is good to 1e-5 of the data's spread
    tol = 1e-5 if wide else 1e-9
    precision = torch.tensor([levels(case["name"], float(u))[1] for u in t], dtype=torch.float64).reciprocal()
    factor = torch.tensor([levels(case["name"], float(u))[0] for u in t], dtype=torch.float64) * precision
    cov_scale = size**2 * tol

    def close(got: Tensor, want: Tensor, atol) -> None:
        assert got.shape == want.shape
        assert got.isfinite().all()
        gap = (got - want).abs()
        bound = torch.as_tensor(atol, dtype=torch.float64)
        bound = bound.reshape(bound.shape + (1,) * (gap.ndim - bound.ndim))
        assert (gap <= bound + 1e-9 * want.abs()).all(), (gap.max(), bound)

    close(posterior.mean, stack(truth, "mean"), size * tol)
    close(score(x, t), stack(truth, "score"), size * tol * factor)
    close(posterior.logp, stack(truth, "logp"), 10 * tol)
    close(posterior.entropy, stack(truth, "entropy"), 10 * tol)
    close(posterior.ess, stack(truth, "ess"), 10 * tol * case["n"])
    close(posterior.cov.trace(), torch.stack([a.cov.trace() for a in truth]), cov_scale)
    close(posterior.cov.diag(), torch.stack([a.cov.diagonal() for a in truth]), cov_scale)
    close(posterior.cov @ v, torch.stack([a.cov @ u for a, u in zip(truth, v, strict=True)]), cov_scale * v.norm())
    close(C.trace(), torch.stack([a.C.trace() for a in truth]), cov_scale * factor**2)
    close(C.diag(), torch.stack([a.C.diagonal() for a in truth]), cov_scale * factor**2)
    close(C @ v, torch.stack([a.C @ u for a, u in zip(truth, v, strict=True)]), cov_scale * factor**2 * v.norm())
    if case["d"] <= 3:
        close(C.dense(), stack(truth, "C"), cov_scale * factor**2)

    k = min(case["n"], 5)
    top, index = posterior.top(k)
    weight = stack(truth, "weight")
    close(top, weight.topk(k).values, 10 * tol)
    close(weight.gather(1, index), top, 10 * tol)
    assert all(len(set(row.tolist())) == k for row in index)
    for i in range(0, case["n"], 7):
        close(posterior.weight(torch.tensor(i)), weight[:, i], 10 * tol)


@pytest.mark.parametrize("d", [2, 40])
@pytest.mark.parametrize("matrix", [False, True])
@pytest.mark.parametrize("name", ["vp", "edm"])
def test_anisotropic_noise_is_brute_force_with_a_matrix(d, matrix, name):
    points, weights = training_set(25, d, 3, weighted=True)
    if matrix:
        a = normal(d, d, seed=4)
        gamma = a @ a.mT / d + 0.3 * torch.eye(d, dtype=torch.float64)
        dense = gamma
    else:
        gamma = 0.2 + torch.rand(d, generator=gen(4), dtype=torch.float64)
        dense = gamma.diag()
    process = vk.Anisotropic(PROCESSES[name], gamma)
    score = vk.EmpiricalScore(vk.Empirical(points, weights), process)
    for u in (0.3, 0.6, 0.9):
        t = time_between(process, u)
        alpha, S = levels(name, t)
        x = near(points, t, name, 3, 8)
        truth = [answer(points, weights, q, alpha, S * dense) for q in x]
        posterior, C = score.posterior(x, t), score.covariance(x, t)
        v = normal(3, d, seed=5)
        scale = stack(truth, "C").abs().amax() + 1e-3 * alpha**2 / S**2
        rtol = 3e-5 if d == 40 else 1e-8
        torch.testing.assert_close(posterior.mean, stack(truth, "mean"), rtol=0, atol=rtol)
        torch.testing.assert_close(posterior.logp, stack(truth, "logp"), rtol=1e-9, atol=10 * rtol)
        torch.testing.assert_close(score(x, t), stack(truth, "score"), rtol=1e-8, atol=rtol * 3 / S)
        torch.testing.assert_close(C.dense(), stack(truth, "C"), rtol=0, atol=float(rtol * scale))
        torch.testing.assert_close(
            C.diag(), stack(truth, "C").diagonal(dim1=1, dim2=2), rtol=0, atol=float(rtol * scale)
        )
        torch.testing.assert_close(
            C.trace(), torch.stack([a.C.trace() for a in truth]), rtol=0, atol=float(d * rtol * scale)
        )
        torch.testing.assert_close(
            C @ v, (stack(truth, "C") @ v[..., None])[..., 0], rtol=0, atol=float(d * rtol * scale)
        )
        torch.testing.assert_close(posterior.cov.dense(), stack(truth, "cov"), rtol=0, atol=rtol)
        draws = posterior.sample(200, generator=1)
        distance = (draws.reshape(-1, 1, d) - points).abs().amax(-1).amin(-1)
        assert distance.max() < 1e-12  # a draw is a training point, in the data's own coordinates


# --- the three rungs -----------------------------------------------------------------------------------------------


def clusters(n: int = 600, d: int = 48, far: float = 30.0, width: float = 0.3, seed: int = 0) -> Tensor:
    """Two far clusters: in each many points are alike, and the coarse product's rounding is large."""
    points = width * normal(n, d, seed=seed) / math.sqrt(d)
    points[: n // 2, 0] += far
    points[n // 2 :, 0] -= far
    return points


# rung: (points, sigma). The last is at low noise for its radius, with many points of about the same weight.
LADDER = {
    "sparse": (lambda: normal(600, 48, seed=1), 0.3),
    "float32": (lambda: normal(600, 48, seed=1), 4.0),
    "float64": (clusters, 0.3),
}


def queries_of(points: Tensor, sigma: float, count: int) -> Tensor:
    """Noisy points, and one midway between two."""
    x = points[1 : count + 1].double() + sigma * normal(count, points.shape[1], seed=2)
    x[0] = (points[1].double() + points[2].double()) / 2
    return x


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("stored", [torch.float32, torch.float64])
@pytest.mark.parametrize("rung", LADDER)
def test_each_rung_agrees_with_brute_force(rung, stored, weighted):
    make, sigma = LADDER[rung]
    points = make().to(stored)
    n, d = points.shape
    weights = None
    if weighted:
        weights = torch.rand(n, generator=gen(7), dtype=torch.float64)
        weights[::5] = 0
    score = vk.EmpiricalScore(vk.Empirical(points, weights), vk.EDM())
    x = queries_of(points, sigma, 4)
    assert stages(score, x, sigma) == {rung}
    truth = answers(points, weights, x, "edm", sigma)
    posterior = score.posterior(x, sigma)
    v = normal(4, d, seed=3)
    spread, tol = score.data.spread, 1e-5 if rung == "float32" else 1e-9
    trace = torch.stack([a.cov.trace() for a in truth])
    assert ((posterior.mean - stack(truth, "mean")).norm(dim=1) < tol * spread).all()
    torch.testing.assert_close(posterior.cov.trace(), trace, rtol=1e-4, atol=0)
    torch.testing.assert_close(posterior.cov.diag().sum(-1), trace, rtol=1e-4, atol=0)
    product = torch.stack([a.cov @ b for a, b in zip(truth, v, strict=True)])
    assert ((posterior.cov @ v - product).norm(dim=1) <= 1e-4 * trace * v.norm(dim=1)).all()
    torch.testing.assert_close(posterior.logp, stack(truth, "logp"), rtol=0, atol=1e-5)
    torch.testing.assert_close(posterior.entropy, stack(truth, "entropy"), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(posterior.ess, stack(truth, "ess"), rtol=1e-5, atol=0)
    weight, _ = posterior.top(10)
    torch.testing.assert_close(weight, stack(truth, "weight").topk(10).values, rtol=1e-5, atol=1e-12)
    third = posterior.third(v, v.flip(0))
    for b, a in enumerate(truth):
        gap = points.double() - a.mean
        want = (a.weight * (gap @ v[b]) * (gap @ v[3 - b])) @ gap
        scale = float(a.weight @ gap.norm(dim=1) ** 3) * v[b].norm() * v[3 - b].norm()
        assert (third[b] - want).norm() < 1e-5 * scale


@pytest.mark.parametrize("rung", LADDER)
@pytest.mark.parametrize("chunk", [9, 100, 599])
@pytest.mark.parametrize("block", [1, 3, 100])
def test_chunks_and_blocks_do_not_change_an_answer(rung, chunk, block):
    make, sigma = LADDER[rung]
    points = make()
    x = queries_of(points, sigma, 7)
    whole = vk.EmpiricalScore(vk.Empirical(points), vk.EDM())
    parts = vk.EmpiricalScore(vk.Empirical(points), vk.EDM())
    parts.engine.points.chunk, parts.engine.dense.block = chunk, block
    a, b = whole.posterior(x, sigma), parts.posterior(x, sigma)
    spread, trace = whole.data.spread, a.cov.trace()
    v = normal(7, points.shape[1], seed=3)
    assert ((a.mean - b.mean).norm(dim=1) < 1e-5 * spread).all()
    torch.testing.assert_close(a.logp, b.logp, rtol=0, atol=1e-5)
    torch.testing.assert_close(a.entropy, b.entropy, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(a.ess, b.ess, rtol=1e-5, atol=0)
    torch.testing.assert_close(a.cov.trace(), b.cov.trace(), rtol=1e-4, atol=0)
    assert ((a.cov.diag() - b.cov.diag()).abs().sum(-1) <= 1e-4 * trace).all()
    assert (((a.cov @ v) - (b.cov @ v)).norm(dim=1) <= 1e-4 * trace * v.norm(dim=1)).all()
    assert torch.equal(a.top(5)[1], b.top(5)[1])
    assert torch.equal(a.sample_indices(50, 4), b.sample_indices(50, 4))
    # A draw is a sum with weights sqrt(r_i): the dropped 1e-7 of the weight is 3e-4 of a draw.
    assert ((a.cov.draw(5) - b.cov.draw(5)).norm(dim=1) <= 1e-3 * trace.sqrt() + 1e-6 * spread).all()


def test_a_small_memory_gives_small_chunks_and_the_same_answer():
    points = normal(300, 40, seed=0)
    big, small = (vk.EmpiricalScore(points, vk.EDM(), memory=m) for m in (None, 90_000))
    assert small.engine.points.chunk < 300
    assert small.engine.points.kept is None
    for sigma in (0.1, 1.0, 5.0):
        x = points[:20] + sigma * normal(20, 40, seed=1)
        assert (big(x, sigma) - small(x, sigma)).norm(dim=1).max() < 1e-5 * big.data.spread / sigma**2
        trace = [s.covariance(x, sigma).trace() for s in (big, small)]
        torch.testing.assert_close(trace[0], trace[1], rtol=1e-4, atol=1e-12)
        posterior = small.posterior(x, sigma)
        assert posterior.cov.diag().sum(-1).allclose(posterior.cov.trace(), rtol=1e-4)


@pytest.mark.parametrize("memory", [1, 1000])
def test_almost_no_memory_still_works(memory):
    points = normal(30, 33, seed=0)
    score = vk.EmpiricalScore(points, vk.EDM(), memory=memory)
    truth = answers(points, None, points[:3], "edm", 1.0)
    torch.testing.assert_close(score(points[:3], 1.0), stack(truth, "score"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("d", [2, 40])
def test_a_chunk_of_points_without_weight_adds_nothing(d):
    """Weights that select a class of sorted data leave whole chunks with weight zero."""
    points = normal(60, d, seed=0) / math.sqrt(d)
    weights = torch.ones(60)
    weights[:20] = 0
    weights[50:] = 0
    for chunk in (5, 7, 60):
        score = vk.EmpiricalScore(vk.Empirical(points, weights), vk.EDM())
        score.engine.points.chunk = chunk
        for sigma in (0.05, 0.5, 5.0):
            x = points[18:24] + sigma * normal(6, d, seed=1) / math.sqrt(d)
            truth = answers(points, weights, x, "edm", sigma)
            posterior = score.posterior(x, sigma)
            torch.testing.assert_close(posterior.mean, stack(truth, "mean"), rtol=0, atol=1e-5)
            torch.testing.assert_close(posterior.logp, stack(truth, "logp"), rtol=1e-9, atol=1e-5)
            torch.testing.assert_close(posterior.ess, stack(truth, "ess"), rtol=1e-4, atol=0)
            assert posterior.cov.draw(0).isfinite().all()
            index = posterior.sample_indices(50, 0)
            assert ((index >= 20) & (index < 50)).all()
            assert (posterior.weight(torch.tensor(3)) == 0).all()
            assert (posterior.top(30)[0] >= 0).all()
            assert posterior.top(60)[0].isfinite().all()


def test_a_far_query_over_offset_data_in_many_chunks():
    """log z is -1.5e6 here: shares of chunks that sum to 1 within its rounding only would move the mean."""
    points = 1e4 + 1e-2 * normal(200, 3, seed=0)
    far, sigma = 1e4, 10.0
    x = points.mean(0, keepdim=True) + far
    centre = points.mean(0)
    y = points - centre
    logits = (y @ (x[0] - centre) - 0.5 * y.square().sum(-1)) / sigma**2
    r = logits.softmax(0)
    mean, ess = centre + r @ y, 1 / r.square().sum()
    assert 5 < ess < 150
    score = vk.EmpiricalScore(points, vk.EDM())
    whole = score.posterior(x, sigma)
    score.engine.points.chunk = 10
    parts = score.posterior(x, sigma)
    for posterior in (whole, parts):
        assert (posterior.mean[0] - mean).norm() < 1e-5 * score.data.spread
        torch.testing.assert_close(posterior.ess[0], ess, rtol=1e-6, atol=0)


# --- draws ---------------------------------------------------------------------------------------------------------


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


# --- storage -------------------------------------------------------------------------------------------------------


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


# --- the monoid ----------------------------------------------------------------------------------------------------


def direct(points: Tensor, logits: Tensor, v: Tensor) -> Moments:
    """Moments of B queries over one set of points, by brute force; ``logits (B, n)``."""
    r = logits.softmax(1)
    mean = r @ points
    gap = points - mean[:, None]
    along = (gap * v[:, None]).sum(-1)
    return Moments(
        log_z=logits.logsumexp(1),
        mean=mean,
        trace=(r * gap.square().sum(-1)).sum(1),
        diag=(r[..., None] * gap.square()).sum(1),
        product=((r * along)[..., None] * gap).sum(1),
        vector=v,
        square=r.square().sum(1),
        entropy=torch.special.entr(r).sum(1),
    )


FIELDS = ("log_z", "mean", "trace", "diag", "product", "square", "entropy")


def same(a: Moments, b: Moments, tol: float = 1e-9) -> None:
    for f in FIELDS:
        torch.testing.assert_close(getattr(a, f), getattr(b, f), rtol=tol, atol=tol)


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, 6)] * 3),
    d=st.integers(1, 4),
    temper=st.sampled_from([0.0, 1.0, 30.0, 3e3]),
    shift=st.sampled_from([0.0, -1e3, 1e5]),
    seed=st.integers(0, 10**6),
)
def test_moments_are_a_commutative_monoid(sizes, d, temper, shift, seed):
    n = sum(sizes)
    points, v = normal(n, d, seed=seed), normal(3, d, seed=seed + 1)
    logits = temper * normal(3, n, seed=seed + 2) + shift
    parts = [direct(p, q, v) for p, q in zip(points.split(sizes), logits.split(sizes, 1), strict=True)]
    a, b, c = parts
    tol = 1e-9
    same(merge(merge(a, b), c), merge(a, merge(b, c)), tol)
    same(merge(a, b), merge(b, a), tol)
    same(merge(merge(a, b), c), direct(points, logits, v), tol)
    nothing = Moments.empty(v, frozenset({"trace", "diag", "weights"}), v)
    same(merge(nothing, a), a, 1e-15)
    same(merge(a, nothing), a, 1e-15)
    same(merge(nothing, nothing), nothing, 0.0)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([-1e6, -1e9, -1e12]))
def test_merging_far_from_the_data_keeps_the_mean_between_the_means(seed, level):
    """Shares p_a + p_b = 1 hold even where log z is so large that its last digit is worth 1e-4."""
    g = gen(seed)
    log_z = level + torch.rand(2, 5, generator=g, dtype=torch.float64)
    one = torch.full((5, 2), 1e4, dtype=torch.float64)
    a, b = (Moments(z, one + k * 1e-3) for k, z in enumerate(log_z))
    mean = merge(a, b).mean
    assert ((mean >= 1e4 - 1e-9) & (mean <= 1e4 + 1e-3 + 1e-9)).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.permutations(range(4)))
def test_absorbing_some_rows_is_merging_those_rows(seed, order):
    v = normal(4, 2, seed=seed)
    a = direct(normal(5, 2, seed=seed + 1), normal(4, 5, seed=seed + 2), v)
    b = direct(normal(3, 2, seed=seed + 3), normal(4, 3, seed=seed + 4), v)
    both = merge(a, b)
    out = a.take(torch.arange(4))
    rows = torch.tensor(order[:2])
    out.absorb(rows, b.take(rows))
    for k in range(4):
        one = torch.tensor([k])
        same(out.take(one), (both if k in order[:2] else a).take(one), 1e-12)


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


# --- refused at the door -------------------------------------------------------------------------------------------


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
