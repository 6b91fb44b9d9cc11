"""Pruning: its bounds are bounds, what it drops weighs nothing, and its answers are those of the dense path."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from draws import gen, normal
from geometries import CASES, mixed_queries, spectrum, unequal
from hypothesis import given, settings, strategies as st
from torch import Tensor

import vkernel as vk
from vkernel.posterior import pruned as module
from vkernel.posterior.dense import Block
from vkernel.posterior.engine import Engine
from vkernel.posterior.pruned import Candidates, Pruned, sampled_product, tree
from vkernel.posterior.weights import Queries, SparseWeights, merge

FASHION = Path("/usr/share/datasets/fashion-mnist/t10k-images-idx3-ubyte.gz")


def force(score: vk.EmpiricalScore, level: float = math.inf) -> Pruned:
    """Prepare at once, and try every query up to the noise level."""
    pruned = Pruned(score.engine.points, price=0, reach=level)
    score.engine.pruned = pruned
    assert pruned.ready(0)
    return pruned


def two(points: Tensor | vk.Empirical, weights: Tensor | None = None) -> tuple[vk.EmpiricalScore, vk.EmpiricalScore]:
    """The same score, never pruned and pruned wherever it can be."""
    data = points if isinstance(points, vk.Empirical) else vk.Empirical(points, weights)
    dense, pruned = (vk.EmpiricalScore(data, vk.EDM(eps=1e-4)) for _ in range(2))
    dense.engine.pruned = None
    force(pruned)
    return dense, pruned


def share(score: vk.EmpiricalScore, x: Tensor, t: float | Tensor, covariance: bool = True) -> float:
    """The share of the queries that are served without the dense path."""
    x, t = score.check(x, t)
    queries = score.queries(x, t)
    assert score.engine.pruned is not None
    return float(score.engine.pruned.candidates(Block(score.engine.points, queries, covariance), 0)[2].double().mean())


def right(pruned: vk.EmpiricalScore, x: Tensor, t: float) -> None:
    """Queries that were served, against float64 by brute force: better than the dense path promises."""
    engine = pruned.engine
    asked = pruned.queries(*pruned.check(x, t))
    assert engine.pruned is not None
    served = engine.pruned.candidates(Block(engine.points, asked))[2]
    y, posterior = engine.data.rows(0, engine.data.n).double(), pruned.posterior(x, t)
    for b in served.nonzero().flatten().tolist():
        logit = exact(engine, asked[b : b + 1])[0]
        delta = y - y[logit.argmax()]
        r = logit.softmax(0)
        first = r @ delta
        trace = r @ delta.square().sum(-1) - first.square().sum()
        assert (posterior.mean[b] - y[logit.argmax()] - first).norm() <= 1e-6 * pruned.data.spread
        assert abs(posterior.cov.trace()[b] - trace) <= 1e-5 * trace + 1e-9 * len(x[b]) * t**2
        entropy = torch.special.entr(r).sum()
        assert abs(posterior.entropy[b] - entropy) <= 1e-5 * entropy + 1e-9


@pytest.mark.parametrize("sigma", [0.05, 0.3])
def test_fashion(sigma):
    if not FASHION.exists():
        pytest.skip("the Debian package dataset-fashion-mnist is not installed")
    data = vk.load(FASHION).subset(torch.arange(5000))
    dense, pruned = two(data)
    y = data.rows(0, data.n).double()
    x = torch.cat([y[:20] + sigma * normal(20, 784, seed=0), (y[100:120] + y[200:220]) / 2])
    images = x.reshape(-1, *data.shape)
    assert share(pruned, images, sigma) > 0.9
    a, b = (score.posterior(images, sigma) for score in (dense, pruned))
    torch.testing.assert_close(a.cov.trace(), b.cov.trace(), rtol=1e-6, atol=1e-280)
    mean = torch.stack([((q - y).square().sum(-1) / (-2 * sigma**2)).softmax(0) @ y for q in x])
    for posterior in (a, b):
        assert (posterior.mean.flatten(1) - mean).norm(dim=1).max() < 1e-6 * data.spread


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_queries_that_are_served_are_more_accurate_than_the_reference_path_promises(name, weighted):
    make, sigma = CASES[name]
    points = make()
    _, pruned = two(points, unequal(len(points)) if weighted else None)
    x = mixed_queries(points, sigma)
    assert share(pruned, x, sigma) > 0.4 or name == "one-hot"  # which has no few axes along which it is wide
    right(pruned, x, sigma)


# --- the certificate --------------------------------------------------------------------------------------------------

cases = st.fixed_dictionaries(
    {
        "n": st.integers(2, 300),
        "d": st.sampled_from([1, 2, 7, 33, 64, 150]),
        "decay": st.floats(0, 2),
        "scale": st.sampled_from([1e-3, 1.0, 1e3]),
        "offset": st.sampled_from([0.0, 1.0, 1e4]),
        "level": st.floats(-3, 1),
        "alpha": st.floats(0.01, 1),
        "weighted": st.booleans(),
        "single": st.booleans(),
        "seed": st.integers(0, 10**6),
    }
)


def posed(case: dict) -> tuple[Engine, Queries]:
    n, d, scale = case["n"], case["d"], case["scale"]
    points = scale * (case["offset"] + spectrum(n, d, case["seed"]) * torch.arange(1, d + 1) ** (0.5 - case["decay"]))
    points = points.float() if case["single"] else points
    data = vk.Empirical(points, unequal(n) if case["weighted"] else None)
    sigma = scale * 10 ** case["level"]
    noise = sigma * normal(8, d, seed=case["seed"] + 1)
    pick = torch.randint(0, n, (2, 8), generator=gen(case["seed"]))
    y = points.double()
    x = case["alpha"] * torch.cat([y[pick[0]], (y[pick[0, :4]] + y[pick[1, :4]]) / 2])
    x[:8] += noise
    one = torch.ones(12, dtype=torch.float64)
    engine = Engine(data)
    engine.pruned = Pruned(engine.points, price=0)
    assert engine.pruned.ready(0)
    return engine, Queries(x, case["alpha"] * one, sigma**2 * one)


def exact(engine: Engine, queries: Queries) -> Tensor:
    """All logits in float64, by differences."""
    gap = queries.x[:, None] - queries.alpha[:, None, None] * engine.data.rows(0, engine.data.n).double()
    return engine.points.log_w - gap.square().sum(-1) / (2 * queries.var[:, None])


@settings(max_examples=150, deadline=None)
@given(cases)
def test_bounds_are_bounds(case):
    engine, queries = posed(case)
    block, pruned = Block(engine.points, queries), engine.pruned
    live = engine.data.weights[pruned.order] > 0
    truth = (exact(engine, queries)[:, pruned.order] - block.offset[:, None])[:, live]
    bound, error = torch.zeros(len(queries), case["n"]), pruned.error(block)
    for k, (left, table) in enumerate(zip(pruned.left_factors(block), pruned.tables, strict=True)):
        before = bound.double()
        bound = bound + left @ table.mT
        assert bound.isfinite().all()
        rounding = 1e-13 * (truth.abs() + block.offset.abs()[:, None])  # of the truth itself
        assert (bound[:, live].double() + error[:, None] + rounding >= truth).all()
        assert k == 0 or (bound <= before + error[:, None]).all()  # a step tightens
    assert torch.equal(pruned.order.sort().values, torch.arange(case["n"]))


@settings(max_examples=150, deadline=None)
@given(cases, st.booleans(), st.sampled_from([64, 100, 1 << 17]))
def test_what_is_dropped_weighs_nothing(case, covariance, chunk):
    before, module.CHUNK = module.CHUNK, chunk
    try:
        engine, queries = posed(case)
        q, i, served = engine.pruned.candidates(Block(engine.points, queries, covariance))
    finally:
        module.CHUNK = before
    logit = exact(engine, queries)
    kept = torch.zeros_like(logit, dtype=torch.bool)
    kept[q, i] = True
    assert not kept[~served].any()
    assert len(torch.unique(q * case["n"] + i)) == len(q)
    assert (q.diff() >= 0).all()
    dropped = logit.masked_fill(kept, -torch.inf).logsumexp(1)
    rest = logit.scatter(1, logit.argmax(1, keepdim=True), -torch.inf) if covariance else logit
    slack = 1e-12 * logit.abs().amax(1).clamp_max(1e28)
    assert (dropped <= rest.logsumexp(1) - 16 + slack)[served].all()


def test_noise_is_distinguished_from_data_by_several_residual_norms():
    """With one residual norm, noise stands for data beyond the axes; with several, fewer points are left."""
    points = spectrum(4000, 400).float()
    engine = Engine(vk.Empirical(points))
    x = points[:30].double() + 0.2 * normal(30, 400, seed=1)
    asked = Queries(x, torch.ones(30).double(), torch.full((30,), 0.04, dtype=torch.float64))
    block = Block(engine.points, asked)
    least = (exact(engine, asked) - block.offset[:, None]).amax(1) - block.margin
    several, one = Pruned(engine.points, price=0), Pruned(engine.points, price=0)
    one.axes, one.steps = several.edges[0], []
    one.edges = [one.axes]
    left = []
    for pruned in (several, one):
        pruned.prepare()
        bound = pruned.left_factors(block)[0] @ pruned.tables[0].mT
        left.append(float((bound > least[:, None]).sum()))
    assert left[0] < 0.7 * left[1]


def test_opening_groups_leaves_fewer_points():
    """Each step is the bound with more axes: the fewer points are left, the more is opened."""
    points = spectrum(4000, 400).float()
    engine = Engine(vk.Empirical(points))
    x = points[:30].double() + 0.2 * normal(30, 400, seed=1)
    asked = Queries(x, torch.ones(30).double(), torch.full((30,), 0.04, dtype=torch.float64))
    block, pruned = Block(engine.points, asked), Pruned(engine.points, price=0)
    assert pruned.ready(0)
    assert len(pruned.tables) == 4
    bound, left = torch.zeros(30, 4000), []
    least = (exact(engine, asked) - block.offset[:, None]).amax(1) - block.margin
    for k, (left_factor, table) in enumerate(zip(pruned.left_factors(block), pruned.tables, strict=True)):
        bound = bound + left_factor @ table.mT
        left.append(int((bound > least[:, None]).sum()))
        axes = pruned.edges[0] if k == 0 else pruned.steps[k - 1][-1]
        again = Pruned(engine.points, price=0)
        again.edges, again.steps = [edge for edge in pruned.edges if edge >= axes], []
        again.prepare()
        assert torch.equal(again.order, pruned.order)
        want = again.left_factors(block)[0].double() @ again.tables[0].double().mT
        assert (want - bound).abs().max() < pruned.error(block).max()
    assert left == sorted(left, reverse=True)
    assert left[-1] < 0.2 * left[0]


def test_tree_keeps_neighbours_together():
    points = normal(5000, 2, seed=0)
    order = tree(points)
    assert torch.equal(order.sort().values, torch.arange(5000))
    inside = torch.stack([leaf.var(0).sum() for leaf in points[order].split(module.LEAF)]).mean()
    assert inside < 0.1 * points.var(0).sum()


def test_pairs_of_a_product():
    left, right = torch.randn(5, 40, generator=gen(0)), torch.randn(64, 40, generator=gen(1))
    bounds = (left @ right.mT).view(5, 8, 8)
    least = torch.tensor([0.0, 5.0, 1e9, -1e9, 2.0])
    mask = bounds.flatten(1) > least[:, None]
    few = Candidates.among(bounds, bounds.amax(2), least, 0, lambda size: size < 60)
    assert torch.equal(few.ends.diff().long(), torch.where(mask.sum(1) < 60, mask.sum(1), 0))
    found = Candidates.among(bounds, bounds.amax(2), least, 100, lambda size: size >= 0)
    q, p = mask.nonzero().unbind(1)
    assert torch.equal(found.q, q)
    assert torch.equal(found.p.long(), p + 100)
    assert torch.equal(found.ends.diff().long(), mask.sum(1))
    lower = torch.tensor([0.0, 0.0, 0.0, -1e9, -torch.inf])
    less = found.above(found.excess + lower[found.q])
    keep = found.excess + lower[q] > 0
    assert torch.equal(less.q, q[keep])
    assert torch.equal(less.p.long(), p[keep] + 100)
    value = torch.arange(len(p)).float()
    torch.testing.assert_close(
        sampled_product(left, right, found.ends, p.int(), value), value + (left[q] * right[p]).sum(1)
    )


# --- when -------------------------------------------------------------------------------------------------------------


def test_only_what_pays_is_prepared():
    points = spectrum(5000, 128).float()
    score = vk.EmpiricalScore(points, vk.EDM())
    pruned = score.engine.pruned
    assert pruned is not None
    assert 100 < pruned.price < 2000
    pruned.price = 50
    high, low = points[:30] + 5 * torch.randn(30, 128, generator=gen(0)), points[:30] + 0.01
    for _ in range(3):
        score(high, 5.0)
    assert score.engine.dense.sparse == 0
    first = score(low, 0.05)
    assert score.engine.dense.sparse == 30
    score(low, 0.05)
    assert not pruned.tables
    again = score(low, 0.05)
    assert pruned.tables
    assert 0.01 < pruned.reach[False] < 5
    torch.testing.assert_close(again, first, rtol=0, atol=1e-6 * score.data.spread / 0.05**2)
    # at high noise nothing is even tried
    pruned.candidates = None  # type: ignore[method-assign,assignment]
    score(high, 5.0)


def test_small_and_narrow_sets_and_little_memory_stay_dense():
    assert vk.EmpiricalScore(normal(4000, 200, seed=0), vk.EDM()).engine.pruned is None
    assert vk.EmpiricalScore(normal(5000, 100, seed=0), vk.EDM()).engine.pruned is None
    points = normal(5000, 200, seed=0).float()
    full = vk.EmpiricalScore(points, vk.EDM()).engine
    assert full.pruned is not None
    one, both = (full.pruned.nbytes(k) for k in (1, 2))
    assert vk.EmpiricalScore(points, vk.EDM(), memory=4 * one - 4).engine.pruned is None
    for memory, tables in ((4 * one, 1), (4 * both, 2)):
        score = vk.EmpiricalScore(points, vk.EDM(), memory=memory)
        pruned = score.engine.pruned
        assert pruned is not None
        pruned.price = 0
        x = points[:20] + 0.1
        want = vk.EmpiricalScore(points, vk.EDM()).posterior(x.double(), 0.1)
        got = score.posterior(x.double(), 0.1)
        assert (want.mean - got.mean).norm(dim=1).max() < 1e-6 * score.data.spread
        torch.testing.assert_close(want.cov.trace(), got.cov.trace(), rtol=1e-5, atol=1e-280)
        assert len(pruned.tables) == tables
        held = sum(table.nbytes for table in pruned.tables) + pruned.order.nbytes
        held += sum(buffer.nbytes for buffer in pruned.spare)
        assert held <= memory // 4


def test_no_noise_level_pays_for_equal_points():
    points = torch.ones(5000, 128)
    score = vk.EmpiricalScore(points, vk.EDM())
    assert score.engine.pruned is not None
    score.engine.pruned.price = 0
    x = points[:3].double() + 0.5
    assert torch.equal(score.posterior(x, 0.1).mean, points[:3].double())
    assert score.engine.pruned.reach == {True: 0.0}
    score(x, 0.1)
    assert not score.engine.pruned.tables  # and none are held in vain
    assert torch.equal(score.denoise(x, 0.1), points[:3].double())


@pytest.mark.parametrize("sigma", [0.1, 3.0])
def test_queries_that_do_not_pay_are_dense_unchanged(sigma):
    points = spectrum()
    dense, pruned = two(points)
    pruned.engine.pruned.reach = {False: 0.0, True: 0.0}
    x = mixed_queries(points, sigma)
    assert torch.equal(dense(x, sigma), pruned(x, sigma))
    assert torch.equal(dense.covariance(x, sigma).trace(), pruned.covariance(x, sigma).trace())


def test_a_looser_product_goes_dense():
    points = spectrum().float()
    before = torch.get_float32_matmul_precision()
    _, pruned = two(points)
    x = mixed_queries(points, 0.2)
    want = pruned.posterior(x, 0.2).mean
    try:
        torch.set_float32_matmul_precision("medium")
        assert share(pruned, x, 0.002) == 0
        got = pruned.posterior(x, 0.2).mean
    finally:
        torch.set_float32_matmul_precision(before)
    assert (got - want).norm(dim=1).max() < 5e-5 * pruned.data.spread


# --- surroundings -----------------------------------------------------------------------------------------------------


def test_company_does_not_change_an_answer():
    points = spectrum().float()
    _, pruned = two(points)
    x = mixed_queries(points, 0.2).double()
    together, trace = pruned.posterior(x, 0.2).mean, pruned.covariance(x, 0.2).trace()
    for b in range(len(x)):
        alone = pruned.posterior(x[b : b + 1], 0.2).mean
        assert (alone - together[b]).norm() < 1e-7 * pruned.data.spread
        torch.testing.assert_close(pruned.covariance(x[b : b + 1], 0.2).trace()[0], trace[b], rtol=1e-5, atol=1e-280)


def test_memory_map(tmp_path):
    points = spectrum(5000, 128).float()
    points.numpy().tofile(tmp_path / "points")
    disk = np.memmap(tmp_path / "points", dtype=np.float32, mode="r", shape=(5000, 128))
    dense, pruned = two(vk.Empirical(disk))
    assert pruned.engine.points.kept is None
    x = mixed_queries(points, 0.1)
    assert share(pruned, x, 0.1) > 0.5
    right(pruned, x, 0.1)
    assert (dense.posterior(x, 0.1).mean - pruned.posterior(x, 0.1).mean).norm(dim=1).max() <= 1e-5 * dense.data.spread


@pytest.mark.parametrize("weighted", [False, True])
def test_parts_of_a_whole(weighted):
    """Each process prunes what it holds; the moments merge."""
    points = spectrum(2000)
    whole = vk.Empirical(points, unequal(2000) if weighted else None)
    x = mixed_queries(points, 0.2)
    asked = Queries(x, torch.ones(len(x)).double(), torch.full((len(x),), 0.04, dtype=torch.float64))
    want = Engine(whole).moments(asked, frozenset({"trace"}))
    parts = []
    for first, stop in ((0, 700), (700, 2000)):
        own = whole.segment(first, stop, whole.weights[first:stop])
        own.center = whole.center
        engine = Engine(own, None, whole, first)
        engine.pruned = Pruned(engine.points, price=0, reach=math.inf)
        parts.append(engine.moments(asked, frozenset({"trace"})))
        assert engine.pruned.tables
    got = merge(*parts)
    assert (got.mean - want.mean).norm(dim=1).max() < 1e-5 * whole.spread
    torch.testing.assert_close(got.trace, want.trace, rtol=1e-4, atol=1e-7 * 160 * 0.04)
    torch.testing.assert_close(got.log_z, want.log_z, rtol=1e-9, atol=1e-5)


def test_under_autocast_inference_mode_and_other_defaults():
    points = spectrum(5000, 128).float()
    x = mixed_queries(points, 0.1).float()
    want = vk.EmpiricalScore(points, vk.EDM())(x, 0.1)
    close = 1e-6 * float(vk.Empirical(points).spread) / 0.01
    score = vk.EmpiricalScore(points, vk.EDM())
    with torch.inference_mode():
        force(score)
        torch.testing.assert_close(score(x, 0.1), want, rtol=1e-6, atol=close)
    torch.testing.assert_close(score(x, 0.1), want, rtol=1e-6, atol=close)
    x.requires_grad_()
    (score(x, 0.1).sum()).backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(score(x.detach(), 0.1), want, rtol=1e-6, atol=close)
    torch.set_default_dtype(torch.float64)
    try:
        score = vk.EmpiricalScore(vk.Empirical(points), vk.EDM())
        force(score)
        torch.testing.assert_close(score(x.detach(), 0.1), want, rtol=1e-6, atol=close)
    finally:
        torch.set_default_dtype(torch.float32)


def test_threads_do_not_meet():
    points = spectrum(3000).float()
    _, pruned = two(points)
    x = [mixed_queries(points, s).float() for s in (0.05, 0.1, 0.15, 0.2)]
    want = [pruned(a, 0.1) for a in x]
    got: dict[tuple[int, int], Tensor] = {}

    def work(k: int) -> None:
        for repeat in range(5):
            got[k, repeat] = pruned(x[k], 0.1)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 20
    assert all(torch.equal(answer, want[k]) for (k, _), answer in got.items())


def test_one_point_two_points_and_one_with_weight():
    for n in (1, 2, 100):
        points = spectrum(n)
        weights = torch.zeros(n)
        weights[0] = 1
        for w in (None, weights):
            dense, pruned = two(points, w)
            x = points[:1] + 0.05
            assert torch.equal(dense(x, 0.1), pruned(x, 0.1))
    points, weights = spectrum(1000), torch.zeros(1000)
    weights[0] = 1
    dense, pruned = two(points, weights)
    assert torch.equal(pruned.posterior(points[:3], 0.1).mean, points[:1].expand(3, -1))
    assert (pruned.covariance(points[:3], 0.1).trace() == 0).all()


def test_pieces_are_few():
    points = spectrum()
    _, pruned = two(points)
    x, t = pruned.check(points[:10] + 0.01, 0.05)
    found = list(pruned.engine.weights(pruned.queries(x, t)))
    assert all(isinstance(weights, SparseWeights) for weights in found)
    assert sum(len(weights.i) for weights in found) < 100
