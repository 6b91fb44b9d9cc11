"""Trimming: what is dropped one by one is within its budget, and no more could be; and how answers profit."""

from __future__ import annotations

import math

import pytest
import torch
from draws import gen, normal
from hypothesis import given, settings
from hypothesis import strategies as st

import vkernel as vk
from vkernel.posterior.dense import TRIM, Block
from vkernel.posterior.engine import Engine
from vkernel.posterior.pruned import Candidates, sampled_product
from vkernel.posterior.weights import Queries, SparseWeights, trimmed

MARGIN = 16.0


# --- the function -----------------------------------------------------------------------------------------------------

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
    less = found.lowered(lower)
    keep = found.excess + lower[q] > 0
    assert torch.equal(less.q, q[keep])
    assert torch.equal(less.p.long(), p[keep] + 100)
    value = torch.arange(len(p)).float()
    torch.testing.assert_close(
        sampled_product(left, right, found.ends, p.int(), value), value + (left[q] * right[p]).sum(1)
    )


# --- the dense path ---------------------------------------------------------------------------------------------------

cases = st.fixed_dictionaries(
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
@given(cases)
def test_what_the_first_rung_drops_weighs_nothing(case):
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
def test_moments_do_not_depend_on_the_order_of_questions(device):
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
