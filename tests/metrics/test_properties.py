"""Properties of all metrics: metric axioms, coverage of intervals, refusals."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from draws import gen, normal
from hypothesis import given, settings, strategies as st
from scipy import integrate, stats

import vkernel as vk
from vkernel import metrics
from vkernel.core.errors import InputError

Z = 1.959963984540054


def energy_of_normals(delta: float) -> float:
    """2 ∫ (F - G)² dx."""
    cdf = stats.norm.cdf
    return 2 * integrate.quad(lambda x: (cdf(x) - cdf(x - delta)) ** 2, -12, 12 + delta)[0]


def covered(truth: float, estimates: list[vk.Estimate]) -> float:
    return sum(e.low <= truth <= e.high for e in estimates) / len(estimates)


seeds = st.integers(0, 2**31)
sizes = st.integers(3, 12)


@settings(max_examples=40, deadline=None)
@given(seeds, sizes, st.sampled_from([1, 2]), st.sampled_from([1, 2.0, 3]))
def test_wasserstein_is_a_metric(seed, n, d, p):
    a, b, c = torch.randn(3, n, d, generator=gen(seed), dtype=torch.float64)
    for kind in ("exact", "sliced"):
        ab, bc, ac, ba = (
            metrics.wasserstein(x, y, p, kind, projections=8).value for x, y in ((a, b), (b, c), (a, c), (b, a))
        )
        assert ac <= ab + bc + 1e-9
        assert ab == pytest.approx(ba)
        assert metrics.wasserstein(a, a.flip(0), p, kind).value == pytest.approx(0, abs=1e-7)


@settings(max_examples=40, deadline=None)
@given(seeds, sizes, st.sampled_from([1, 2]))
def test_order_does_not_matter(seed, n, d):
    a, b = torch.randn(2, n, d, generator=gen(seed), dtype=torch.float64)
    again = a[torch.randperm(n, generator=gen(seed))]
    for metric in (metrics.energy_distance, metrics.wasserstein, functools.partial(metrics.total_variation, bins=30)):
        one, two = metric(a, b), metric(again, b)
        assert one.value == pytest.approx(two.value)
        assert one.se == pytest.approx(two.se)
    data = vk.data.toy("pair" if d == 1 else "hexagon")
    assert metrics.memorised_fraction(a, data) == metrics.memorised_fraction(again, data)
    assert torch.equal(metrics.mode_weights(a, data).share.value, metrics.mode_weights(again, data).share.value)


REPEATED = {
    "gap mass": (stats.norm.cdf(0.75) * 2 - stats.norm.cdf(0.25) * 2, lambda a, b: metrics.gap_mass(a)),
    "gap mass of members": (
        stats.norm.cdf(0.75) * 2 - stats.norm.cdf(0.25) * 2,
        lambda a, b: metrics.gap_mass(a.reshape(8, -1), members=True),
    ),
    "energy distance": (energy_of_normals(1.0), lambda a, b: metrics.energy_distance(a, b + 1)),
    "energy distance of members": (
        energy_of_normals(1.0),
        lambda a, b: metrics.energy_distance(a.reshape(8, -1, 1), b.reshape(8, -1, 1) + 1),
    ),
    "wasserstein": (2.0, lambda a, b: metrics.wasserstein(a, b + 2)),
    "wasserstein, members": (2.0, lambda a, b: metrics.wasserstein(a.reshape(8, -1, 1), b.reshape(8, -1, 1) + 2)),
}


@pytest.mark.parametrize("name", REPEATED)
def test_intervals_cover(name):
    truth, metric = REPEATED[name]
    rate = covered(truth, [metric(*normal(2, 120, seed=k)) for k in range(200)])
    assert 0.88 <= rate <= 1, rate


x1, x2, image = normal(10), normal(10, 2), normal(4, 10, 3, 3)
hole = torch.tensor([1.0, math.nan, 2.0])
triple = vk.data.toy("triple")
triple_score = vk.EmpiricalScore(triple, vk.VP())

REFUSED = {
    "NaN": (lambda: metrics.gap_mass(hole), "1 of the 3 samples of x hold NaN"),
    "all NaN": (lambda: metrics.gap_mass(hole[1:2], skip_diverged=True), "nothing is left"),
    "empty": (lambda: metrics.gap_mass(torch.zeros(0)), "at least one point"),
    "a number": (lambda: metrics.gap_mass(torch.tensor(1.0)), "shape ()"),
    "words": (lambda: metrics.gap_mass("words"), "not text"),
    "booleans": (lambda: metrics.gap_mass(torch.tensor([True])), "True and False"),
    "ambiguous": (lambda: metrics.energy_distance(image, image), "say members="),
    "members": (lambda: metrics.gap_mass(x1, members="yes"), "members must be"),
    "no members": (lambda: metrics.gap_mass(x1, members=True), "an ensemble"),
    "three answers": (lambda: metrics.wasserstein(x1, x1, members=(True, True, True)), "pair of answers"),
    "gap in the plane": (lambda: metrics.gap_mass(x2), "use boundary_mass"),
    "gap reversed": (lambda: metrics.gap_mass(x1, (0.7, 0.2)), "low < high"),
    "gap is data": (lambda: metrics.gap_mass(x1, triple), "(low, high)"),
    "gap of three": (lambda: metrics.gap_mass(x1, (0.1, 0.2, 0.3)), "(low, high)"),
    "other shape": (lambda: metrics.boundary_mass(x2, triple_score), "training points' (1,)"),
    "no score": (lambda: metrics.boundary_mass(x1, lambda x, t: x), "EmpiricalScore"),
    "threshold": (lambda: metrics.boundary_mass(x1, triple_score, 2.0), "between 0 and 1"),
    "time": (lambda: metrics.boundary_mass(x1, triple_score, t=7.0), "outside"),
    "dimensions": (lambda: metrics.energy_distance(x1, x2), "1 coordinates, those of b 2"),
    "too few": (lambda: metrics.energy_distance(x1[:2], x1), "at least 3 samples of a"),
    "grid in space": (lambda: metrics.total_variation(normal(5, 3), normal(5, 3)), "one or two dimensions"),
    "bins": (lambda: metrics.histogram(x1, bins=0), "bins must be"),
    "range": (lambda: metrics.histogram(x1, range=(1, 0)), "must increase"),
    "range of three": (lambda: metrics.histogram(x1, range=(1, 2, 3)), "(low, high)"),
    "nothing inside": (lambda: metrics.histogram(x1, range=(100, 101)), "nothing in the range"),
    "normalise": (lambda: metrics.histogram(x1, normalise="none"), "'inside' or 'all'"),
    "p": (lambda: metrics.wasserstein(x1, x1, p=0.5), "p must be"),
    "kind": (lambda: metrics.wasserstein(x1, x1, kind="best"), "kind must be"),
    "unequal": (lambda: metrics.wasserstein(x2, x2[:4], kind="exact"), "as many points"),
    "too many": (lambda: metrics.wasserstein(normal(4001, 2), normal(4001, 2), kind="exact"), "'sliced'"),
    "projections": (lambda: metrics.wasserstein(x2, x2, projections=1), "2 or more"),
    "kl shapes": (lambda: metrics.kl([1, 1], [1, 1, 1]), "one grid"),
    "kl negative": (lambda: metrics.kl([1, -1], [1, 1]), "p must hold"),
    "kl empty law": (lambda: metrics.kl([1, 1], [0, 0]), "q must hold"),
    "kl of objects": (lambda: metrics.kl([1, 1], object()), "not object"),
    "kl of data": (lambda: metrics.kl([1, 1], triple), "one grid"),
    "radius": (lambda: metrics.mode_weights(x1, triple, radius=0), "radius"),
    "one point": (lambda: metrics.memorised_fraction(x1, torch.tensor([1.0, 1.0])), "two distinct"),
    "ratio": (lambda: metrics.memorised_fraction(x1, triple, threshold=0), "threshold"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_sentence(name):
    call, words = REFUSED[name]
    with pytest.raises(InputError) as caught:
        call()
    message = str(caught.value)
    assert words in message
    assert message.endswith(".")


def test_diverged_members_are_left_out_with_a_warning():
    x = normal(5, 20, 1)
    broken = x.clone()
    broken[3, 7] = math.inf
    with pytest.raises(InputError, match="1 of the 5 members of x hold NaN or infinite"):
        metrics.gap_mass(broken)
    with pytest.warns(UserWarning, match="1 of the 5 members"):
        got = metrics.gap_mass(broken, skip_diverged=True)
    assert got == metrics.gap_mass(x[[0, 1, 2, 4]])


def test_images_are_events_once_said():
    a, b = image, image[0] + 1
    got = metrics.energy_distance(a, b, members=(True, False))
    assert got.value == pytest.approx(metrics.energy_distance(a.reshape(4, 10, 9), b.reshape(10, 9)).value)
