"""The reference path: brute force on small sets, its stages, chunks and blocks, trimming, and stored types."""

from __future__ import annotations

import math

import pytest
import torch
from draws import gen, normal
from geometries import STAGES, near, training_set
from hypothesis import given, settings, strategies as st
from reference import PROCESSES, answer, answers, levels, stack, time_between
from torch import Tensor

import vkernel as vk
from vkernel.posterior import Engine, Queries
from vkernel.posterior.dense import TRIM, Block, above
from vkernel.posterior.weights import SparseWeights, trimmed

MARGIN = 16.0

DIMS = [1, 2, 3, 31, 32, 33, 40, 70]  # both sides of the engine's narrow limit


# --- against the reference, on small sets ---------------------------------------------------------------------------


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


# --- chunks, blocks and memory --------------------------------------------------------------------------------------


def queries_of(points: Tensor, sigma: float, count: int) -> Tensor:
    """Noisy points, and one midway between two."""
    x = points[1 : count + 1].double() + sigma * normal(count, points.shape[1], seed=2)
    x[0] = (points[1].double() + points[2].double()) / 2
    return x


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("chunk", [9, 100, 599])
@pytest.mark.parametrize("block", [1, 3, 100])
def test_chunks_and_blocks_do_not_change_a_result(stage, chunk, block):
    make, sigma = STAGES[stage]
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


# --- trimming: what is dropped one by one is within its budget, and no more could be --------------------------------


number = st.floats(-60, 60) | st.sampled_from([0.0, -1.0, 1e6, -1e6, -1e30])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(number, max_size=30), min_size=1, max_size=6), st.floats(-50, 50))
def test_the_longest_prefix_within_the_budget(rows, budget):
    """Against the definition, one query and one pair at a time."""
    q = torch.tensor([b for b, row in enumerate(rows) for _ in row], dtype=torch.long)
    upper = torch.tensor([u for row in rows for u in row], dtype=torch.float64)
    keep = trimmed(upper, q, torch.full((len(rows),), budget, dtype=torch.float64))
    for b, row in enumerate(rows):
        kept = keep[q == b].tolist()
        dropped = sorted(u for u, k in zip(row, kept, strict=True) if not k)
        held = sorted(u for u, k in zip(row, kept, strict=True) if k)
        assert not dropped or not held or dropped[-1] < held[0]
        total = math.fsum(math.exp(min(u - budget, 700)) for u in dropped)
        assert total <= 1 + 1e-12
        if held:  # the lightest that are kept, all equal ones together, would not fit
            more = math.fsum(math.exp(min(u - budget, 700)) for u in held if u <= held[0] + 1e-9)
            assert total + more > 1 - 1e-12


def test_nothing_to_trim():
    nothing = torch.empty(0, dtype=torch.long)
    assert trimmed(nothing.double(), nothing, torch.zeros(3).double()).shape == (0,)
    one = trimmed(torch.zeros(1).double(), torch.zeros(1).long(), torch.tensor([-TRIM]).double())
    assert one.tolist() == [True]
    assert trimmed(torch.zeros(3).double(), torch.tensor([0, 0, 2]), torch.full((3,), 9.0).double()).sum() == 0


trims = st.fixed_dictionaries(
    {
        "n": st.sampled_from([1, 2, 3, 50, 400]),
        "d": st.sampled_from([32, 50, 200]),
        "copies": st.sampled_from([1, 2]),
        "level": st.floats(-3, 0),
        "weighted": st.booleans(),
        "thorough": st.booleans(),
        "chunk": st.sampled_from([1, 7, 64, 1000]),
        "seed": st.integers(0, 10**6),
    }
)


@settings(max_examples=120, deadline=None)
@given(trims)
def test_what_the_first_stage_drops_weighs_nothing(case):
    n, d, sigma = case["n"], case["d"], 10 ** case["level"]
    points = (3 * normal(n, d, seed=case["seed"]) / torch.arange(1, d + 1)).repeat(case["copies"], 1)
    n = len(points)
    weights = 10 ** (16 * torch.rand(n, generator=gen(case["seed"]), dtype=torch.float64) - 8)
    engine = Engine(vk.Empirical(points, weights if case["weighted"] else None))
    engine.points.chunk = min(n, case["chunk"])
    x = points[: min(n, 6)] + sigma * normal(min(n, 6), d, seed=case["seed"] + 1)
    x = torch.cat([x, (points[:1] + points[-1:]) / 2])
    one = torch.ones(len(x), dtype=torch.float64)
    asked = Queries(x, one, sigma**2 * one)
    gap = x[:, None] - points
    logit = engine.points.log_w - gap.square().sum(-1) / (2 * sigma**2)
    kept, few = torch.zeros_like(logit, dtype=torch.bool), torch.ones(len(x), dtype=torch.bool)
    for weights in engine.dense.weights(asked, case["thorough"]):
        if isinstance(weights, SparseWeights):
            assert len(weights.i)
            kept[weights.rows[weights.segment], weights.i] = True
        else:
            few[weights.rows] = False
    dropped = logit.masked_fill(kept, -torch.inf).logsumexp(1)
    rest = logit.scatter(1, logit.argmax(1, keepdim=True), -torch.inf) if case["thorough"] and n > 1 else logit
    slack = 1e-12 * logit.abs().amax(1)
    assert (dropped <= rest.logsumexp(1) - MARGIN + slack)[few].all()


def test_fewer_pairs_are_evaluated():
    """Many of the points within the window weigh nothing."""
    d, sigma = 200, 0.12
    points = 2 * normal(4000, d, seed=0) / torch.arange(1, d + 1)
    score = vk.EmpiricalScore(vk.Empirical(points), vk.EDM())
    x = points[:20] + sigma * normal(20, d, seed=1)
    queries = score.queries(*score.check(x, sigma))
    engine = score.engine
    logit = engine.points.log_w - (x[:, None] - points).square().sum(-1) / (2 * sigma**2)
    block = Block(engine.points, queries, False)
    inside = int((logit > logit.amax(1, keepdim=True) - block.margin).sum())
    kept = sum(len(weights.i) for weights in engine.dense.weights(queries, False))
    assert 0 < kept < 0.9 * inside


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_moments_do_not_depend_on_the_order_of_calls(device):
    points = normal(300, 40, seed=0).to(device)
    engine = Engine(vk.Empirical(points))
    x = points[:9].double() + 0.3 * normal(9, 40, seed=1).to(device)
    one = torch.ones(9, dtype=torch.float64, device=device)
    q = torch.arange(9, device=device).repeat_interleave(300)
    i = torch.arange(300, device=device).repeat(9)
    logit = Queries(x, one, 0.3 * one).exact_logits(engine.data, engine.points.log_w, q, i)
    v = normal(9, 40, seed=2).to(device)
    want = frozenset({"trace", "diag", "weights"})
    a, b = SparseWeights(engine.data, q, i, logit), SparseWeights(engine.data, q, i, logit)
    b.moments(frozenset(), None)
    first, second = a.moments(want, v), b.moments(want, v)
    r = logit.view(9, 300).softmax(1)
    mean = r @ points
    gap = points - mean[:, None]
    torch.testing.assert_close(first.mean, mean)
    torch.testing.assert_close(first.diag, (r[:, :, None] * gap.square()).sum(1))
    torch.testing.assert_close(first.trace, (r[:, :, None] * gap.square()).sum((1, 2)))
    torch.testing.assert_close(first.product, torch.einsum("bn,bni,bnj,bj->bi", r, gap, gap, v))
    for name in ("mean", "trace", "diag", "product", "square", "entropy", "log_z"):
        assert torch.equal(getattr(first, name), getattr(second, name))


@pytest.mark.parametrize("least", [-3.0, 0.0, 2.5])
def test_pairs_above_are_those_of_a_mask(least):
    """Rows with none, few and many pairs, many at the end alone, in all rows and in some of them."""
    logit = normal(40, 64, seed=3).float()
    logit[::4] -= 4.0
    logit[1::4, 32:] += 6.0
    bound, cap = torch.full((40,), least), 5
    for rows in (torch.arange(40), torch.arange(1, 40, 3), torch.arange(0)):
        q, i, few = above(logit, bound, rows, cap)
        mask = torch.zeros_like(logit, dtype=torch.bool)
        mask[rows] = logit[rows] > least
        good = mask.sum(1) <= cap
        assert torch.equal(few, rows[good[rows]])
        assert torch.equal(torch.stack([q, i]), (mask & good[:, None]).nonzero().mT)


@pytest.mark.parametrize("level", [0.02, 0.5, 3.0, 30.0])
@pytest.mark.parametrize("d", [5, 40])
def test_log_z_by_itself_is_that_of_the_moments(d, level):
    """Also where logits are lent: a mean whose weights were overwritten is that of weights that were kept."""
    points, weights = training_set(300, d, 1, True, False, False)
    score = vk.EmpiricalScore(vk.Empirical(points.float(), weights), vk.EDM())
    score.engine.points.chunk = 97
    x = (points[:9] + level * normal(9, d, seed=2)).float()
    alone, whole = score.posterior(x, level), score.posterior(x, level)
    assert torch.allclose(alone.log_z, whole.first.log_z, rtol=1e-6, atol=1e-6)
    assert torch.equal(whole.log_z, whole.first.log_z)
    queries = score.queries(x, torch.tensor(level))
    for lent in (score.engine.moments(queries), score.engine.dense.moments(queries)):
        assert torch.allclose(lent.mean, whole.first.mean, rtol=1e-6, atol=1e-6)
