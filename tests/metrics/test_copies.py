"""Copies of the training set: brute force, published values, calibration, power, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from draws import normal
from hypothesis import given, settings, strategies as st
from scipy.stats import binom, fisher_exact
from torch import Tensor

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.data import digits
from vkernel.metrics import nearest
from vkernel.metrics.copies import Copies, copies


def mixture(n: int, seed: int, d: int = 3) -> Tensor:
    return vk.GaussianMixture(2 * normal(3, d, seed=99), variance=0.3).sample(n, seed)


def brute(x: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    square = (x[:, None] - points[None]).square().sum(-1)
    found = square.sort(dim=1, stable=True)
    return found.values.sqrt(), found.indices


# --- neighbours -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
@pytest.mark.parametrize("d", [1, 3, 600])
def test_nearest_is_brute_force(d: int, scale: float, offset: float):
    points, x = scale * (normal(700, d) + offset), scale * (normal(40, d, seed=1) + offset)
    x[:5] = points[:5] + scale * 1e-9
    distance, index = nearest(x, vk.Empirical(points), 3)
    expected, which = brute(x / scale, points / scale)
    torch.testing.assert_close(distance / scale, expected[:, :3], rtol=1e-9, atol=1e-10)
    assert torch.equal(index, which[:, :3])


@pytest.mark.parametrize("offset", [0.0, 1e4, 1e7])
@pytest.mark.parametrize("stored", [torch.float32, torch.uint8])
def test_nearest_is_brute_force_for_points_of_low_precision(stored: torch.dtype, offset: float):
    """Float32 is centred in float32, in which one number cannot hold the centre; many points tie."""
    points = (40 * normal(700, 60) + 128 + offset * (stored == torch.float32)).clamp_min(0).to(stored)
    data = vk.Empirical(points)
    x = torch.cat([data.take(torch.arange(5)).double() + 1e-3, data.take(torch.arange(5, 20)).double() + 30])
    distance, index = nearest(x, data, 3)
    expected, which = brute(x, points.double())
    torch.testing.assert_close(distance, expected[:, :3], rtol=1e-12, atol=0)
    assert torch.equal(index, which[:, :3])


def test_near_ties_are_resolved_in_float64():
    """Points on a far sphere: products in float32 see one distance where there are many."""
    direction = normal(300, 5)
    points = (
        100
        * direction
        / direction.norm(dim=1, keepdim=True)
        * (1 + 1e-7 * torch.arange(300.0).double().flip(0))[:, None]
    )
    distance, index = nearest(torch.zeros(1, 5).double(), vk.Empirical(points), 2)
    assert index.tolist() == [[299, 298]]
    assert distance[0].tolist() == pytest.approx([100.0, 100 * (1 + 1e-7)], rel=1e-12)


def test_queries_leave_themselves_out():
    points = normal(50, 4)
    distance, index = nearest(points, vk.Empirical(points), 2, torch.arange(50))
    expected, which = brute(points, points)
    torch.testing.assert_close(distance, expected[:, 1:3])
    assert torch.equal(index, which[:, 1:3])
    some = torch.arange(50).where(torch.arange(50) % 2 == 0, -1)
    half, _ = nearest(points, vk.Empirical(points), 1, some)
    torch.testing.assert_close(half[:, 0], expected[:, 1].where(some >= 0, 0.0))
    lonely, _ = nearest(points[:1], vk.Empirical(points[:2]), 2, torch.tensor([0]))
    assert lonely[0, 1] == math.inf


# --- one audit ------------------------------------------------------------------------------------------------------


def test_an_audit_by_hand():
    train, held, x = mixture(80, 0), mixture(50, 1), mixture(40, 2)
    x[3], x[4] = train[17], train[18] + 1e-3
    found = copies(x, vk.Empirical(train), vk.Empirical(held), threshold=0.4)
    distance, index = brute(x.double(), train.double())
    torch.testing.assert_close(found.distance, distance[:, :2])
    assert torch.equal(found.index, index[:, :2])
    torch.testing.assert_close(found.ratio, distance[:, 0] / distance[:, 1])
    assert found.fraction == vk.metrics.memorised_fraction(x, train, 0.4)
    assert found.reference == vk.metrics.memorised_fraction(held, train, 0.4)
    a, b = round(40 * found.fraction.value), round(50 * found.reference.value)
    assert found.chance == pytest.approx(fisher_exact([[a, 40 - a], [b, 50 - b]], "greater").pvalue)
    assert found.excess.value == found.fraction.value - found.reference.value
    for thr, share, base in zip(found.thresholds, found.curve.value, found.reference_curve.value, strict=True):
        assert float(share) == float((found.ratio < thr).double().mean())
        assert float(base) == float((found.reference_ratio < thr).double().mean())
    assert found.worst(2).tolist() == [3, 4]
    assert sorted(found.order().tolist()) == list(range(40))
    assert found.reference_kind == "test images"
    own = brute(train.double(), train.double())[0][:, 1]
    assert found.authentic.value == float((distance[:, 0] > own[index[:, 0]]).double().mean())
    least = brute(held.double(), train.double())[0][:, 0].min()  # the first of 50
    assert found.radius == pytest.approx(float(least))
    assert found.closer.value == float((distance[:, 0] < least).double().mean())


def test_authentic_on_a_line():
    """Training points 0, 1, 3, 10: their nearest others are at 1, 1, 2, 7."""
    data = vk.Empirical([0.0, 1.0, 3.0, 10.0])
    x = torch.tensor([-0.5, -2.0, 4.9, 5.1, 16.0, 18.0])  # by 0, by 0, by 3, by 3, by 10, by 10
    found = copies(x, data, vk.Empirical([0.2, 5.2]))
    assert found.authentic.value == pytest.approx(3 / 6)
    assert found.reference_authentic.value == 0.5
    # without test images: 0 is at 1 from 1, whose nearest is then 3; 1 from 0 likewise; 3 at 2 from 1; 10 at 7 from 3
    assert copies(x, data).reference_authentic.value == 0.5


def test_training_images_against_the_others():
    train = mixture(60, 3)
    doubled = vk.Empirical(torch.cat([train, train[:1]]))
    found = copies(mixture(30, 4), doubled)
    assert found.reference_kind == "training images, each against the others"
    expected = brute(train.double(), train.double())[0][:, 1:3]
    ratio = torch.cat([expected[:, 0] / expected[:, 1], torch.zeros(1)])
    ratio[0] = 0  # an image that is there twice would be a copy of its other self
    torch.testing.assert_close(found.reference_ratio.sort().values, ratio.double().sort().values)
    assert found.index.max() < 60  # the first of equal points


def test_features_are_where_distances_are_taken():
    train, held, x = normal(50, 1, 4, 4), normal(30, 1, 4, 4, seed=1), normal(20, 1, 4, 4, seed=2)
    project = normal(16, 3, seed=3)

    def features(images: Tensor) -> np.ndarray:
        return (images.double().flatten(1) @ project).numpy()

    found = copies(x, vk.Empirical(train), vk.Empirical(held), features=features)
    plain = copies(
        *(torch.as_tensor(features(x.float())),), *(vk.Empirical(features(a.float())) for a in (train, held))
    )
    torch.testing.assert_close(found.distance, plain.distance)
    assert torch.equal(found.index, plain.index)
    assert found.reference == plain.reference
    merged = copies(x, vk.Empirical(train), features=lambda a: a.flatten(1)[:, :1].round())
    assert merged.distinct < 10
    assert merged.index.max() < 50


def test_images_without_weight_are_not_in_the_training_set():
    points = normal(6, 2)
    data = vk.Empirical(points, weights=[0, 1, 1, 1, 1, 0])
    found = copies(points, data)
    part = copies(points, vk.Empirical(points[1:5]))
    assert torch.equal(found.index, part.index + 1)
    assert torch.equal(found.distance, part.distance)
    assert len(found.reference_ratio) == 4


def test_integers_and_memory_maps(tmp_path: Any):
    stored = (100 + 30 * normal(40, 1, 3, 3)).clamp(0, 255).to(torch.uint8).numpy()
    path = tmp_path / "images.npy"
    np.save(path, stored)
    mapped = vk.Empirical(np.load(path, mmap_mode="r"), scale=(-1, 1))
    found = copies(mapped[[3, 5]], mapped, vk.Empirical(stored[:10], scale=(-1, 1)))
    assert found.index[:, 0].tolist() == [3, 5]
    assert found.fraction.value == found.reference.value == 1  # a test set out of the training set
    assert found.ratio.tolist() == [0, 0]
    assert not found.alarm


# --- special cases --------------------------------------------------------------------------------------------------


def test_planted_copies_raise_the_alarm():
    train, held = normal(200, 8), normal(300, 8, seed=1)
    x = torch.cat([train[:12] + 0.01 * normal(12, 8, seed=2), normal(88, 8, seed=3)])
    found = copies(x, vk.Empirical(train), vk.Empirical(held))
    assert found.alarm
    assert found.closer_chance < 0.01
    assert found.excess.low > 0


def test_near_duplicates_hide_copies_from_the_ratio_alone():
    base = normal(200, 8)
    twins = torch.cat([base, base + 1e-3 * normal(200, 8, seed=1)])
    x = torch.cat([base[:30] + 5e-3 * normal(30, 8, seed=2), normal(70, 8, seed=3)])
    found = copies(x, vk.Empirical(twins), vk.Empirical(normal(300, 8, seed=4)))
    assert not found.alarm
    assert found.fraction.value == 0
    assert found.closer.value >= 0.3
    assert found.closer_chance < 1e-6


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e300])
def test_diverged_samples_are_counted(bad: float):
    train, x = normal(30, 2), normal(10, 2, seed=1)
    x[4, 0] = bad
    found = copies(x, vk.Empirical(train), vk.Empirical(normal(30, 2, seed=2)))
    assert found.diverged == 1
    assert found.index[4].tolist() == [-1, -1]
    assert found.ratio[4].isnan()
    assert found.order()[-1] == 4
    every = copies(torch.full((5, 2), bad, dtype=torch.float64), vk.Empirical(train), features=lambda a: a.flatten(1))
    assert every.diverged == 5
    assert every.fraction.value == every.closer.value == 0
    assert not every.alarm


def test_small_sets():
    two = vk.Empirical([0.0, 1.0])
    found = copies(torch.tensor([0.1, 0.5, 0.9]), two, vk.Empirical([0.45, 0.55]))
    assert found.fraction.value == pytest.approx(2 / 3)
    assert found.units == 2
    assert copies(0.3 * normal(50, 1), two, vk.Empirical(0.3 * normal(50, 1, seed=1))).distinct == 2
    for data, test in ((vk.Empirical([1.0, 1.0]), vk.Empirical([0.0, 2.0])), (two, None)):
        with pytest.raises(InputError, match="distinct training images"):
            copies(torch.tensor([0.1]), data, test)


def test_what_cannot_be_compared_is_refused():
    data, x = vk.Empirical(normal(9, 2)), normal(4, 2, seed=1)

    def broken(images: Tensor) -> Tensor:
        raise RuntimeError("no such layer")

    calls: list[tuple[str, Callable[[], Copies]]] = [
        ("data must be", lambda: copies(x, normal(9, 2))),  # type: ignore[arg-type]
        ("test must be", lambda: copies(x, data, normal(9, 2))),  # type: ignore[arg-type]
        ("Samples must be a torch tensor", lambda: copies([[0.0, 1.0]], data)),  # type: ignore[arg-type]
        ("n ≥ 1", lambda: copies(x[:0], data)),
        ("Samples have shape", lambda: copies(normal(4, 3), data)),
        ("Test images have shape", lambda: copies(x, data, vk.Empirical(normal(9, 3)))),
        ("one test image", lambda: copies(x, data, vk.Empirical(normal(1, 2)))),
        ("real", lambda: copies(x.to(torch.complex64), data)),
        ("threshold must be", lambda: copies(x, data, threshold=0)),
        ("threshold must be", lambda: copies(x, data, threshold=math.nan)),
        ("reference must be", lambda: copies(x, data, reference=1)),
        ("no such layer", lambda: copies(x, data, features=broken)),
        ("one row for each", lambda: copies(x, data, features=lambda a: a.sum())),
        ("NaN or infinite", lambda: copies(x, data, features=lambda a: a * math.nan)),
    ]
    for words, call in calls:
        with pytest.raises(InputError, match=words):
            call()


# --- calibration and power ------------------------------------------------------------------------------------------

AUDITS = 300


@pytest.mark.parametrize("held_out", [True, False])
@pytest.mark.parametrize("law", ["mixture", "digits"])
def test_fresh_samples_raise_few_alarms(law: str, held_out: bool):
    images = digits().rows(0, 1797) if law == "digits" else torch.zeros(0)
    alarms = torch.zeros(2)
    for seed in range(AUDITS):
        mixed = torch.randperm(1797, generator=torch.Generator().manual_seed(seed))[:200]
        drawn = mixture(200, seed, d=2) if law == "mixture" else images[mixed]
        train, held, x = (drawn[part] for part in (slice(60), slice(60, 120), slice(120, 200)))
        found = copies(x, vk.Empirical(train), vk.Empirical(held) if held_out else None)
        alarms += torch.tensor([found.alarm, found.closer_chance < 0.01])
    assert alarms.max() <= binom.ppf(0.999, AUDITS, 0.01)


def test_planted_copies_are_caught():
    caught = torch.zeros(2)
    for seed in range(40):
        train, held, x = (
            normal(150, 10, seed=seed),
            normal(1000, 10, seed=1000 + seed),
            normal(100, 10, seed=2000 + seed),
        )
        x[:5] = train[:5] + 0.05 * normal(5, 10, seed=seed)
        found = copies(x, vk.Empirical(train), vk.Empirical(held))
        assert set(found.worst(5).tolist()) == set(range(5))
        caught += torch.tensor([found.alarm, found.closer_chance < 0.01])
    assert caught.min() >= 38


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 12),
    points=st.integers(3, 12),
    tests=st.integers(2, 9),
    d=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_whatever_the_numbers(n: int, points: int, tests: int, d: int, seed: int):
    """Rounded coordinates: duplicates, exact copies and ties abound."""
    train, held, x = (normal(k, d, seed=seed + i).mul(2).round() for i, k in enumerate((points, tests, n)))
    if len(train.unique(dim=0)) < 3:
        return
    for test in (vk.Empirical(held), None):
        found = copies(x, vk.Empirical(train), test)
        assert found.fraction == vk.metrics.memorised_fraction(x, train)
        assert 0 <= found.chance <= 1
        assert 0 <= found.closer_chance <= 1
        assert found.excess.low <= found.excess.value <= found.excess.high
        assert torch.equal(train[found.index[:, 0]].sub(x).norm(dim=1), found.distance[:, 0])
