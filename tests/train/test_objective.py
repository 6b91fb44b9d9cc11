"""Objectives: targets whose mean is the score and whose noise is the dial, on inputs that they share."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import reference
import torch
from hypothesis import given, settings, strategies as st
from scipy import stats
from torch import Tensor

import vkernel as vk
from vkernel.core import rng
from vkernel.core.errors import InputError
from vkernel.train import objectives as module
from vkernel.train.objectives import J0, J1, JC, JK, VARIES, Training, parse

PROCESS = vk.VP()
LINE = torch.tensor([[-1.0], [-0.3], [-0.3], [0.4], [1.1]], dtype=torch.float64)  # weighed, one point twice
PLANE = torch.tensor([[-1.0, 0.2], [0.5, 0.5], [0.5, 0.5], [0.3, -0.8], [1.2, 0.1]], dtype=torch.float64)
W = torch.tensor([0.1, 0.3, 0.15, 0.25, 0.2], dtype=torch.float64)
SETS = {"line": LINE, "plane": PLANE}
GOALS = [
    J0(),
    J1(),
    JK(1),
    JK(3),
    JK(1, "subset"),
    JK(3, "subset"),
    JK(5, "subset"),
    JK(1, "efm"),
    JK(3, "efm"),
    JC(0.5),
    JC(2.0, "gaussian"),
    JC(2.0, "white"),
]
NOISY = [goal for goal in GOALS if not isinstance(goal, J0)]
names = repr


def exact(points: Tensor, weights: Tensor, x: Tensor, t: float) -> reference.Answer:
    return reference.answer(points, weights, x, *reference.levels("vp", t))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def uniform(*shape: int, seed: int) -> Tensor:
    return torch.rand(*shape, generator=generator(seed), dtype=torch.float64)


def training(goal=None, draws=8, points=LINE, weights: Tensor | None = W, process=PROCESS, **options) -> Training:
    return Training(vk.Empirical(points, weights), process, goal or J1(), draws, **options)


def targets(goal, points: Tensor, x: Tensor, t: float, count: int, seed: int) -> tuple[Tensor, reference.Answer]:
    """Many targets ``(count, d)`` at one place, their origins drawn by the posterior of the reference."""
    want = exact(points, W, x, t)
    origin = torch.multinomial(want.weight, count, replacement=True, generator=generator(seed))
    score = vk.EmpiricalScore(vk.Empirical(points, W), PROCESS)
    when = torch.full((count,), t, dtype=torch.float64)
    return goal.target(score, x.expand(count, -1), when, origin, uniform(count, goal.uniforms, seed=seed + 1)), want


def pulled(points: Tensor, x: Tensor, t: float, slots: list[int], weights: Tensor) -> Tensor:
    """sum over slots of w p(x|y) y over sum of w p(x|y), by hand."""
    alpha, S = reference.levels("vp", t)
    p = [float(weights[j]) * math.exp(-float((x - alpha * points[j]).square().sum()) / (2 * S)) for j in slots]
    return sum(a * points[j] for a, j in zip(p, slots, strict=True)) / sum(p)


# --- mean and noise of the targets ---------------------------------------------------------------------------------


@pytest.mark.parametrize("goal", NOISY, ids=names)
@pytest.mark.parametrize("space", SETS)
def test_the_mean_of_the_targets_is_the_denoised_point(goal, space):
    points, count = SETS[space], 20000
    for k, (place, t) in enumerate([(0.1, 0.2), (-0.4, 0.12)]):
        x = torch.full((points.shape[1],), place, dtype=torch.float64)
        m, want = targets(goal, points, x, t, count, seed=10 * k)
        score = vk.EmpiricalScore(vk.Empirical(points, W), PROCESS)
        torch.testing.assert_close(score.denoise(x, t), want.mean)
        se = m.std(0) / math.sqrt(count)
        assert ((m.mean(0) - want.mean).abs() <= 4 * se + 1e-12).all()
        proxy = vk.proxy_score(x.expand_as(m), t, m, PROCESS)
        se = proxy.std(0) / math.sqrt(count)
        assert ((proxy.mean(0) - want.score).abs() <= 4 * se + 1e-12).all()


@pytest.mark.parametrize("goal", NOISY, ids=names)
def test_the_mean_over_members_that_share_their_inputs_is_the_denoised_point(goal):
    members, found = 2000, training(goal, points=PLANE, vary=("targets",), seed=3)
    batch = found.batch(range(members), 4)
    assert torch.equal(batch.x, batch.x[:1].expand_as(batch.x))
    want = torch.stack([exact(PLANE, W, x, float(t)).mean for x, t in zip(batch.x[0], batch.t[0], strict=True)])
    se = batch.m.std(0) / math.sqrt(members)
    assert ((batch.m.mean(0) - want).abs() <= 4 * se + 1e-10).all()


@pytest.mark.parametrize(
    "goal", [J1(), JK(3), JK(4, "subset"), JK(3, "efm"), JC(1.0, "gaussian"), JC(1.0, "white")], ids=names
)
def test_targets_are_fresh_for_every_draw(goal):
    """Given the inputs, the targets of two draws are independent: their noise is not correlated over members."""
    members, held = 4000, {"vary": ("targets",), "times": lambda u: torch.full_like(u, 0.2)}
    m = training(goal, seed=2, **held).batch(range(members), 6).m[..., 0]
    assert m.std(0).min() > 0.05
    between = torch.corrcoef(m.mT) - torch.eye(6)
    assert between.abs().max() <= 4 / math.sqrt(members)


@pytest.mark.parametrize("K", [1, 2, 5])
def test_draws_divide_the_covariance_by_K(K):
    x, t, count = torch.tensor([0.1, 0.2], dtype=torch.float64), 0.2, 40000
    m, want = targets(JK(K), PLANE, x, t, count, seed=K)
    products = (m - want.mean)[:, :, None] * (m - want.mean)[:, None, :]
    se = products.std(0) / math.sqrt(count)
    assert ((products.mean(0) - want.cov / K).abs() <= 4 * se).all()
    score = vk.EmpiricalScore(vk.Empirical(PLANE, W), PROCESS)
    for goal in (JK(K), J1()) if K == 1 else (JK(K),):
        got = goal.covariance(score, x[None], torch.tensor([t], dtype=torch.float64))
        torch.testing.assert_close(got, want.cov[None] / K)
    assert J0().covariance(score, x[None], torch.tensor([t])).eq(0).all()


@pytest.mark.parametrize("c", [0.0, 0.5, 1.0, 3.0])
def test_c_scales_the_noise_of_the_target(c):
    x, t, count = torch.tensor([0.1, 0.2], dtype=torch.float64), 0.2, 40000
    m, want = targets(JC(c), PLANE, x, t, count, seed=4)
    products = (m - want.mean)[:, :, None] * (m - want.mean)[:, None, :]
    assert ((products.mean(0) - c**2 * want.cov).abs() <= 4 * products.std(0) / math.sqrt(count) + 1e-12).all()
    score = vk.EmpiricalScore(vk.Empirical(PLANE, W), PROCESS)
    got = JC(c).covariance(score, x[None], torch.tensor([t], dtype=torch.float64))
    torch.testing.assert_close(got, c**2 * want.cov[None])
    end = {0.0: J0(), 1.0: J1()}.get(c)
    if end is not None:
        one, two = (training(goal, points=PLANE, seed=4).batch([0, 1], 50) for goal in (JC(c), end))
        torch.testing.assert_close(one.m, two.m)


@pytest.mark.parametrize("noise", ["gaussian", "white"])
@pytest.mark.parametrize("c", [0.5, 3.0])
def test_placebos_have_the_stated_covariance_and_the_trace_of_the_posterior(noise, c):
    x, t, count = torch.tensor([0.1, 0.2], dtype=torch.float64), 0.2, 40000
    m, want = targets(JC(c, noise), PLANE, x, t, count, seed=5)
    stated = c**2 * (want.cov if noise == "gaussian" else want.cov.trace() / 2 * torch.eye(2, dtype=torch.float64))
    products = (m - want.mean)[:, :, None] * (m - want.mean)[:, None, :]
    assert ((products.mean(0) - stated).abs() <= 4 * products.std(0) / math.sqrt(count)).all()
    squares = products.diagonal(dim1=1, dim2=2).sum(1)
    assert abs(float(squares.mean() - c**2 * want.cov.trace())) <= 4 * float(squares.std()) / math.sqrt(count)
    score = vk.EmpiricalScore(vk.Empirical(PLANE, W), PROCESS)
    got = JC(c, noise).covariance(score, x[None], torch.tensor([t], dtype=torch.float64))
    torch.testing.assert_close(got, stated[None])
    along = (m - want.mean)[:, 0] / stated[0, 0].sqrt()
    assert stats.kstest(along.numpy(), "norm").pvalue > 1e-3  # Gaussian, unlike the noise of the origin


def test_placebos_of_two_points_in_closed_form():
    """With y - m = r' (y - y') the Gaussian placebo is (√r r' z - √r' r z') (y - y'), of variance r r' |y - y'|²."""
    points = torch.tensor([[-1.0, 0.5], [0.4, 0.1]], dtype=torch.float64)
    score, N = vk.EmpiricalScore(points, PROCESS), 6
    x, t = uniform(N, 2, seed=3) - 0.5, torch.linspace(0.1, 0.4, N, dtype=torch.float64)
    u, none = uniform(N, 1, seed=8), torch.zeros(N, dtype=torch.long)
    keys = (u[:, 0] * 2**53).long()
    r, post = torch.stack([score.posterior(x, t).weight(torch.tensor(i)) for i in (0, 1)]), score.denoise(x, t)
    z = torch.stack([rng.normals(keys, torch.tensor(i)) for i in (0, 1)])
    size = r[0].sqrt() * r[1] * z[0] - r[1].sqrt() * r[0] * z[1]
    by_hand = post + 3 * size[:, None] * (points[0] - points[1])
    torch.testing.assert_close(JC(3.0, "gaussian").target(score, x, t, none, u), by_hand)
    trace = r[0] * r[1] * (points[0] - points[1]).square().sum()
    z = torch.stack([rng.normals(keys, torch.tensor(k)) for k in (0, 1)], 1)
    by_hand = post + 3 * (trace / 2).sqrt()[:, None] * z
    torch.testing.assert_close(JC(3.0, "white").target(score, x, t, none, u), by_hand)


@pytest.mark.parametrize("noise", ["gaussian", "white"])
def test_placebos_of_twins_differ_in_size_alone(noise):
    zero, one, three = (
        training(g, points=PLANE, seed=4).batch([0, 5], 50).m for g in (J0(), JC(1, noise), JC(3, noise))
    )
    torch.testing.assert_close(three - zero, 3 * (one - zero))


def law(goal: JK, points: Tensor, weights: Tensor, x: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """Mean and covariance of a subset's or EFM's target, by all subsets or all tuples."""
    n, r = len(points), exact(points, weights, x, t).weight
    cases = []
    for i in range(n):
        if goal.kind == "subset":
            others = list(itertools.combinations([j for j in range(n) if j != i], goal.K - 1))
            cases += [(float(r[i]) / len(others), [i, *b], weights) for b in others]
        else:
            for b in itertools.product(range(n), repeat=goal.K - 1):
                share = math.prod(float(weights[j]) for j in b)
                cases.append((float(r[i]) * share, [i, *b], torch.ones(n, dtype=torch.float64)))
    p = torch.tensor([c[0] for c in cases], dtype=torch.float64)
    y = torch.stack([pulled(points, x, t, slots, w) for _, slots, w in cases])
    torch.testing.assert_close(p.sum(), torch.ones((), dtype=torch.float64))
    mean = p @ y
    return mean, torch.einsum("k,ka,kb->ab", p, y - mean, y - mean)


def measured(goal: JK, score: vk.EmpiricalScore, x: Tensor, t: Tensor, copies: int, seed: int) -> Tensor:
    """Independent estimates ``(copies, d, d)`` of the covariance at one place, each unbiased."""
    return goal.covariance(score, x.expand(copies, -1), t, samples=12, seed=seed)


@pytest.mark.parametrize("kind", ["subset", "efm"])
@pytest.mark.parametrize("K", [2, 3, 4])
def test_the_covariance_of_subsets_and_efm_by_enumeration(kind, K):
    points, w = PLANE[[0, 1, 3, 4]], W[[0, 1, 3, 4]] / W[[0, 1, 3, 4]].sum()
    t, copies = 0.15, 300
    score = vk.EmpiricalScore(vk.Empirical(points, w), PROCESS)
    for q, x in enumerate(torch.tensor([[0.1, 0.2], [0.6, -0.3]], dtype=torch.float64)):
        got = measured(JK(K, kind), score, x, torch.full((copies,), t, dtype=torch.float64), copies, seed=q)
        assert torch.equal(got, measured(JK(K, kind), score, x, torch.tensor(t, dtype=torch.float64), copies, seed=q))
        mean, cov = law(JK(K, kind), points, w, x, t)
        torch.testing.assert_close(mean, exact(points, w, x, t).mean)  # unbiased, exactly
        assert ((got.mean(0) - cov).abs() <= 4 * got.std(0) / math.sqrt(copies) + 1e-12).all()
        size = float(got.mean(0).trace())
        assert size < 1e-20 if kind == "subset" and K == 4 else size > 1e-3


@pytest.mark.parametrize("kind", ["subset", "efm"])
def test_the_noise_falls_with_K(kind):
    score, t = vk.EmpiricalScore(vk.Empirical(LINE, W), PROCESS), torch.tensor(0.15, dtype=torch.float64)
    for x in torch.tensor([[0.1], [-0.5]], dtype=torch.float64):
        sizes = [measured(JK(K, kind), score, x, t, 400, seed=0).flatten() for K in (1, 2, 3, 5)]
        assert abs(float(sizes[0].mean() - exact(LINE, W, x, 0.15).cov)) <= 4 * float(sizes[0].std()) / 20
        for more, less in itertools.pairwise(sizes):
            assert float(more.mean() - less.mean()) > 4 * float((more.var() + less.var()).sqrt()) / 20


def test_the_ends_of_the_dial():
    count = 300
    batches = {repr(goal): training(goal, points=PLANE, seed=4).batch([0, 1], count) for goal in GOALS}
    for kind in module.KINDS:
        assert torch.equal(batches[f"JK(1, {kind!r})"].m, batches["J1"].m)
    torch.testing.assert_close(batches["JK(5, 'subset')"].m, batches["J0"].m, rtol=1e-11, atol=1e-11)
    full = training(JK(5, "efm"), points=PLANE, seed=4).batch([0, 1], count).m
    assert (full - batches["J0"].m).abs().max() > 0.1


# --- subsets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "k"), [(n, k) for n in range(1, 6) for k in range(n + 1)])
def test_every_set_is_drawn_as_often_over_an_even_grid_of_uniforms(n, k):
    """Floyd's algorithm takes its j-th number from n - k + j + 1 equal parts of (0, 1): all combinations of parts."""
    parts = [[(i + 0.5) / (n - k + j + 1) for i in range(n - k + j + 1)] for j in range(k)]
    u = torch.tensor(list(itertools.product(*parts)), dtype=torch.float64).reshape(math.prod(map(len, parts)), k)
    seen = Counter(tuple(sorted(row)) for row in module._without_replacement(u, n).tolist())
    assert set(seen) == set(itertools.combinations(range(n), k))
    assert len(set(seen.values())) == 1


def test_sets_are_uniform_for_random_numbers():
    seen = Counter(tuple(sorted(row)) for row in module._without_replacement(uniform(21000, 3, seed=5), 7).tolist())
    assert len(seen) == 35
    assert stats.chisquare(list(seen.values())).pvalue > 1e-3


@pytest.mark.parametrize("kind", ["subset", "efm"])
def test_a_subset_holds_the_point_that_made_x_and_fresh_others(kind, monkeypatch):
    points = torch.arange(5.0, dtype=torch.float64)[:, None]
    made = training(J1(), points=points, seed=6).batch([0, 1], 4000).m.flatten().long()
    slots = []
    plain = module._conditional_mean
    monkeypatch.setattr(module, "_conditional_mean", lambda *a: slots.append(a[3]) or plain(*a))
    training(JK(3, kind), points=points, seed=6).batch([0, 1], 4000)
    (found,) = slots
    assert torch.equal(found[:, 0], made)
    others = found[:, 1:]
    if kind == "subset":
        assert all(len(set(row)) == 3 for row in found.tolist())
        for i in range(5):  # given the origin, every pair of the other four
            pairs = Counter(tuple(sorted(row)) for row in others[made == i].tolist())
            assert set(pairs) == set(itertools.combinations([j for j in range(5) if j != i], 2))
            assert stats.chisquare(list(pairs.values())).pvalue > 1e-4
    else:
        for column in others.mT:
            counts = torch.bincount(column, minlength=5)
            assert stats.chisquare(counts, W.numpy() * len(column)).pvalue > 1e-4
        assert stats.chi2_contingency(_crossed(others[:, 0], others[:, 1])).pvalue > 1e-4
    assert stats.chi2_contingency(_crossed(found[:4000, -1], found[4000:, -1])).pvalue > 1e-4  # members: independent


def _crossed(a: Tensor, b: Tensor) -> list[list[int]]:
    return torch.bincount(5 * a + b, minlength=25).reshape(5, 5).tolist()


def test_points_of_weight_zero_are_never_origins_and_carry_nothing():
    w = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0], dtype=torch.float64)
    for goal in GOALS:
        m = training(goal, points=LINE, weights=w, seed=7).batch([0], 500).m
        assert m.isfinite().all()
        if "noise" in goal.settings:  # a placebo leaves the range of the points
            continue
        assert m.min() >= -0.3 - 1e-12
        assert m.max() <= 0.4 + 1e-12


def test_small_chunks_change_nothing(monkeypatch):
    for kind in ("subset", "efm"):
        whole = training(JK(3, kind), points=PLANE).batch([0, 1], 50).m
        with monkeypatch.context() as patch:
            patch.setattr(module, "CHUNK", 40)
            assert torch.equal(training(JK(3, kind), points=PLANE).batch([0, 1], 50).m, whole)


# --- inputs --------------------------------------------------------------------------------------------------------


def test_all_objectives_see_the_same_inputs():
    for vary in (VARIES, ("inputs",), ("targets",), ()):
        batches = [training(goal, points=PLANE, vary=vary, seed=8).batch([0, 4], 40, 3) for goal in GOALS]
        for batch in batches[1:]:
            assert torch.equal(batch.x, batches[0].x)
            assert torch.equal(batch.t, batches[0].t)
        different = {tuple(b.m.flatten().tolist()) for b in batches}
        assert len(different) >= len(GOALS) - 3  # the three K = 1 are J1; K = n differs from J0 by rounding at most


@settings(max_examples=40, deadline=None)
@given(
    goal=st.sampled_from(GOALS),
    members=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    start=st.integers(0, 9),
    count=st.integers(1, 5),
    vary=st.sets(st.sampled_from(VARIES)),
    times=st.sampled_from(["uniform", "log"]),
    seed=st.integers(0, 3),
)
def test_a_draw_depends_on_seed_member_and_index_alone(goal, members, start, count, vary, times, seed):
    made = training(goal, points=PLANE, vary=tuple(vary), times=times, seed=seed)
    whole, part = made.batch(range(6), 14), made.batch(members, count, start)
    for a, b in ((whole.x, part.x), (whole.t, part.t)):
        assert torch.equal(a[members, start : start + count], b)
    torch.testing.assert_close(whole.m[members, start : start + count], part.m, rtol=1e-9, atol=1e-9)
    other = training(goal, points=PLANE, vary=tuple(vary), times=times, seed=seed + 10).batch(members, count, start)
    assert not torch.equal(other.x, part.x)


def test_the_targets_of_several_objectives_are_those_of_each_and_their_mean_is_computed_once(monkeypatch):
    made, count = training(points=PLANE, vary=("inputs",), seed=4), []
    true = vk.EmpiricalScore.denoise
    monkeypatch.setattr(vk.EmpiricalScore, "denoise", lambda *given: count.append(0) or true(*given))
    together = made.batches(GOALS, [0, 3], 20, 5)
    assert len(count) == 1
    for goal, found in zip(GOALS, together, strict=True):
        for a, b in zip(
            found, training(goal, points=PLANE, vary=("inputs",), seed=4).batch([0, 3], 20, 5), strict=True
        ):
            assert torch.equal(a, b)


def test_what_varies_and_what_is_held():
    def differ(a: Tensor) -> bool:
        return not torch.equal(a[0], a[1])

    for goal in (J1(), JK(3), JK(3, "efm")):
        both = training(goal, seed=9).batch([2, 5], 30)
        assert differ(both.x)
        assert differ(both.t)
        assert differ(both.m)
        none = training(goal, vary=(), seed=9).batch([2, 5], 30)
        first = training(goal, seed=9).batch([0], 30)
        for name in ("x", "t", "m"):  # nothing varies: all are member 0
            assert torch.equal(getattr(none, name), getattr(first, name).expand(2, *getattr(first, name).shape[1:]))
        noise = training(goal, vary=("targets",), seed=9).batch([2, 5], 30)
        assert not differ(noise.x)
        assert not differ(noise.t)
        assert differ(noise.m)
        assert torch.equal(noise.x[:1], first.x)
        inputs = training(goal, vary=("inputs",), seed=9).batch([2, 5], 30)
        assert differ(inputs.x)
        assert torch.equal(inputs.x, both.x)
    held = training(J0(), vary=("targets",), seed=9).batch([2, 5], 30)
    assert not differ(held.m)


def test_targets_that_are_held_are_the_same_quantiles_of_the_posterior():
    """Members of one time that come to the same place with targets held get the same target."""
    made = training(JK(3), vary=("inputs",), seed=10)
    keys = {p: made.keys(p, [0, 7]) for p in ("targets/origin", "targets/noise", "inputs/noise", "inputs/time")}
    assert all(bool(k[0] == k[1]) == p.startswith("targets") for p, k in keys.items())
    design = {"inputs": [0, 0, 1, 1], "targets": [0, 1, 2, 2]}
    nested = training(J1(), design=design, seed=10).batch([0, 1, 2, 3], 60)
    assert torch.equal(nested.x[0], nested.x[1])
    assert not torch.equal(nested.m[0], nested.m[1])
    assert torch.equal(nested.m[2], nested.m[3])
    assert not torch.equal(nested.x[1], nested.x[2])


def test_origins_drawn_anew_follow_the_posterior_at_a_place():
    members, points = 4000, torch.tensor([[-1.0], [-0.3], [0.1], [0.4], [1.1]], dtype=torch.float64)
    batch = training(J1(), points=points, vary=("targets",), seed=11).batch(range(members), 6)
    for p in range(6):
        r = exact(points, W, batch.x[0, p], float(batch.t[0, p])).weight
        counts = torch.tensor([(batch.m[:, p, 0] == y).sum() for y in points[:, 0]])
        likely = r * members > 5
        seen = torch.cat([counts[likely], counts[~likely].sum()[None]]).double() + 1e-9
        want = torch.cat([r[likely], r[~likely].sum()[None]]) * members + 1e-9
        assert stats.chisquare(seen, want * (seen.sum() / want.sum())).pvalue > 1e-4


@pytest.mark.parametrize("vary", [VARIES, ("targets",), ("inputs",), ()])
def test_origins_follow_the_posterior_over_all_inputs(vary):
    """E[(x0 - m) g(x, t)] = 0 and E[((x0 - m)² - var) g(x, t)] = 0, for every g."""
    count = 20000
    batch = training(J1(), vary=vary, seed=12).batch([1], count)
    x, t, x0 = batch.x[0, :, 0], batch.t[0], batch.m[0, :, 0]
    alpha = torch.tensor([reference.levels("vp", u)[0] for u in t.tolist()], dtype=torch.float64)
    logit = W.log() - (x[:, None] - alpha[:, None] * LINE[:, 0]).square() / (2 * (1 - alpha[:, None].square()))
    r = logit.softmax(1)
    m = r @ LINE[:, 0]
    var = (r * (LINE[:, 0] - m[:, None]).square()).sum(1)
    for rest in (x0 - m, (x0 - m).square() - var):
        for g in (torch.ones_like(x), x, t, x * t, torch.cos(3 * x)):
            found = rest * g
            assert abs(float(found.mean())) <= 4 * float(found.std()) / math.sqrt(count)


@pytest.mark.parametrize("t", [0.05, 0.3])
def test_the_law_of_x_is_the_noised_training_set(t):
    count = 20000
    for name, points in SETS.items():
        made = training(J1(), points=points, times=lambda u: torch.full_like(u, t), seed=13)
        x = made.batch([0], count).x[0]
        alpha, S = reference.levels("vp", t)
        mean = W @ points
        cov = alpha**2 * (points - mean).mT @ (W[:, None] * (points - mean)) + S * torch.eye(points.shape[1])
        assert ((x.mean(0) - alpha * mean).abs() <= 4 * (cov.diagonal() / count).sqrt()).all()
        products = (x - alpha * mean)[:, :, None] * (x - alpha * mean)[:, None, :]
        assert ((products.mean(0) - cov).abs() <= 4 * products.std(0) / math.sqrt(count)).all()
        if name == "line":

            def cdf(v, points: Tensor = points, alpha: float = alpha, S: float = S):
                return sum(
                    w * stats.norm.cdf((v - alpha * y) / math.sqrt(S))
                    for w, y in zip(W.tolist(), points[:, 0].tolist(), strict=True)
                )

            assert stats.kstest(x[:, 0].numpy(), cdf).pvalue > 1e-3


@pytest.mark.parametrize("name", reference.PROCESSES)
def test_time_densities(name):
    process = reference.PROCESSES[name]
    low, high = process.eps, process.T
    options = {"process": process, "seed": 14}
    t = training(times="uniform", **options).batch([0], 4000).t[0]
    assert stats.kstest(t.numpy(), stats.uniform(low, high - low).cdf).pvalue > 1e-3
    t = training(times="log", **options).batch([0], 4000).t[0].tolist()
    ratio = [math.log(S) / 2 - math.log(alpha) for alpha, S in (reference.levels(name, u) for u in t)]
    ends = [math.log(S) / 2 - math.log(alpha) for alpha, S in (reference.levels(name, u) for u in (low, high))]
    assert stats.kstest(ratio, stats.uniform(ends[0], ends[1] - ends[0]).cdf).pvalue > 1e-3
    t = training(times=lambda u: low + (high - low) * u.square(), **options).batch([0], 4000).t[0]
    assert stats.kstest(((t - low) / (high - low)).numpy(), stats.beta(0.5, 1).cdf).pvalue > 1e-3
    t = training(times=("lognormal", -1.2, 1.2), **options).batch([0], 4000).t[0].tolist()
    ratio = [math.log(S) / 2 - math.log(alpha) for alpha, S in (reference.levels(name, u) for u in t)]
    kept = [r for r in ratio if ends[0] + 1e-9 < r < ends[1] - 1e-9]
    below, above = stats.norm(-1.2, 1.2).cdf(ends)
    assert stats.kstest(kept, lambda r: (stats.norm(-1.2, 1.2).cdf(r) - below) / (above - below)).pvalue > 1e-3
    clipped = stats.binomtest(len(ratio) - len(kept), len(ratio), 1 - (above - below))  # they lie at eps and T
    assert clipped.pvalue > 1e-3


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(reference.PROCESSES)),
    times=st.sampled_from(["uniform", "log", ("lognormal", 0.0, 9.0)]),
    u=st.one_of(st.floats(0, 1, exclude_min=True), st.sampled_from([2.0**-54, 1 - 2.0**-53, 1.0])),
)
def test_times_never_leave_the_range_of_the_process(name, times, u):
    process = reference.PROCESSES[name]
    t = training(process=process, times=times).time(torch.tensor([u], dtype=torch.float64))
    assert process.eps <= float(t) <= process.T


def test_a_quantile_function_in_single_precision_does_not_leave_the_range():
    process = vk.VP(eps=0.01)
    assert float(torch.tensor(0.01)) < 0.01
    t = training(process=process, times=lambda u: torch.full(u.shape, 0.01)).batch([0], 3).t
    assert t.dtype == torch.float64
    assert (t == process.eps).all()


# --- shapes and types ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("goal", GOALS, ids=names)
def test_one_point_images_and_single_precision(goal):
    n = 1 if goal.uniforms == 0 or getattr(goal, "kind", "") != "subset" else goal.K
    lone = torch.full((n, 1), 0.7, dtype=torch.float64)
    m = training(goal, points=lone, weights=None).batch([0, 1], 5).m
    torch.testing.assert_close(m, torch.full((2, 5, 1), 0.7, dtype=torch.float64))
    images = torch.randint(0, 9, (6, 4, 4), generator=generator(15)).double()
    batch = training(goal, points=images, weights=None).batch([0, 1, 2], 5)
    assert batch.x.shape == batch.m.shape == (3, 5, 4, 4)
    flat = training(goal, points=images.flatten(1), weights=None).batch([0, 1, 2], 5)
    assert torch.equal(batch.x.flatten(2), flat.x)
    torch.testing.assert_close(batch.m.flatten(2), flat.m)
    single = training(goal, points=images.float(), weights=None, dtype=torch.float32).batch([0, 1, 2], 5)
    for one, two in ((single.x, batch.x), (single.t, batch.t), (single.m, batch.m)):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, two.float())
    score = vk.EmpiricalScore(images, PROCESS)
    assert goal.covariance(score, batch.x[0], batch.t[0], samples=4).shape == (5, 16, 16)


def test_names_and_specs():
    for goal in GOALS:
        again = parse(goal.spec)
        assert repr(again) == repr(goal)
        assert parse(goal) is goal
    assert isinstance(parse("J0"), J0)
    assert isinstance(parse("J1"), J1)


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: parse("J2"), "no objective 'J2'"),
        (lambda: parse(None), "no objective"),
        (lambda: parse(["J0"]), "no objective"),
        (lambda: parse({"kind": "JK"}), "K must be"),
        (lambda: JK(0), "K must be a whole number"),
        (lambda: JC(math.nan), "c, the factor"),
        (lambda: JC("much"), "c, the factor"),
        (lambda: JC(1.0, "pink"), "noise of JC must be one of posterior, gaussian, white"),
        (lambda: parse({"kind": "JC"}), "c, the factor"),
        (lambda: JK(-1), "K must be"),
        (lambda: JK(2.5), "K must be"),
        (lambda: JK(True), "K must be"),
        (lambda: JK(2, "means"), "one of draws, subset, efm, not 'means'"),
        (lambda: training(draws=0), "draws"),
        (lambda: training(draws=-1), "draws"),
        (lambda: training(draws=1.5), "draws"),
        (lambda: training(draws=True), "draws"),
        (lambda: training(vary=("inputs", "weather")), "'weather'"),
        (lambda: training(times="cosine"), "times must be"),
        (lambda: training(times=0.5), "times must be"),
        (lambda: training(times=("lognormal", 0.0)), "times must be"),
        (lambda: training(times=("lognormal", 0.0, 0.0)), "standard deviation of log.* must be positive"),
        (lambda: training(3), "no objective 3"),
        (lambda: training(process="vp"), "process"),
        (lambda: training(JK(6, "subset")).batch([0], 2), "subset of 6 points.*have 5"),
        (lambda: training(process=vk.Anisotropic(PROCESS, torch.eye(1))), "isotropic noise"),
        (lambda: training(process=vk.FlowMatching(eps=0.0)), "no noise at eps"),
        (lambda: training(times=lambda u: u * 0).batch([0], 2), "outside"),
        (lambda: training(times=lambda u: u + 1).batch([0], 2), "outside"),
        (lambda: training(times=lambda u: u * math.nan).batch([0], 2), "outside"),
        (lambda: training(times=lambda u: 0.5).batch([0], 2), "one t for each u"),
        (lambda: JK(2, "efm").covariance(training().score, LINE, torch.full((5,), 0.5), samples=1), "two targets"),
    ],
)
def test_bad_input_is_refused(call, says):
    with pytest.raises(InputError, match=says):
        call()
