"""Moments form a commutative monoid (docs/theory.md, section 2.4)."""

from __future__ import annotations

import torch
from draws import gen, normal
from hypothesis import given, settings, strategies as st
from torch import Tensor

from vkernel.posterior.weights import Moments, merge


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
def test_merging_some_rows_leaves_the_others(seed, order):
    v = normal(4, 2, seed=seed)
    a = direct(normal(5, 2, seed=seed + 1), normal(4, 5, seed=seed + 2), v)
    b = direct(normal(3, 2, seed=seed + 3), normal(4, 3, seed=seed + 4), v)
    both = merge(a, b)
    out = a.take(torch.arange(4))
    rows = torch.tensor(order[:2])
    out.put(rows, merge(out.take(rows), b.take(rows)))
    for k in range(4):
        one = torch.tensor([k])
        same(out.take(one), (both if k in order[:2] else a).take(one), 1e-12)
