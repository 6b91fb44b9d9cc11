"""The sentences that describe copies, drift and likeness: what they count, compare and leave open."""

from __future__ import annotations

import math

import pytest
import torch
from draws import normal
from torch import Tensor

import vkernel as vk
from vkernel.metrics import copies, drift, likeness
from vkernel.reports.audit import describe


def digits(seed: int, *sizes: int) -> list[Tensor]:
    """Disjoint sets of digits, (n, 1, 8, 8)."""
    data = vk.data.digits()
    order = torch.randperm(data.n, generator=torch.Generator().manual_seed(seed))
    return [data[part] for part in order[: sum(sizes)].split(list(sizes))]


# --- copies ---------------------------------------------------------------------------------------------------------


def test_copies_are_counted_beside_test_images():
    train, held = normal(200, 8), normal(300, 8, seed=1)
    x = torch.cat([train[:12] + 0.01 * normal(12, 8, seed=2), normal(88, 8, seed=3)])
    x[0] = train[0]
    found = describe(copies(x, vk.Empirical(train), vk.Empirical(held)))
    assert found.startswith("12 of 100 samples (12 %, 95 %: 7 to 20 %) are copies")
    assert "1 equals a training image exactly" in found
    assert "of test images 0 % meet this definition: more than chance allows" in found
    assert "near-duplicates" not in found


def test_copies_that_near_duplicates_hide_are_mentioned():
    base = normal(200, 8)
    twins = torch.cat([base, base + 1e-3 * normal(200, 8, seed=1)])
    x = torch.cat([base[:30] + 5e-3 * normal(30, 8, seed=2), normal(70, 8, seed=3)])
    assert "near-duplicates" in describe(copies(x, vk.Empirical(twins), vk.Empirical(normal(300, 8, seed=4))))


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e300])
def test_diverged_samples_are_no_copies(bad: float):
    x = normal(10, 2, seed=1)
    x[4, 0] = bad
    found = copies(x, vk.Empirical(normal(30, 2)), vk.Empirical(normal(30, 2, seed=2)))
    assert "1 of the 10 samples diverged" in describe(found)


def test_small_sets_say_what_they_cannot_show():
    two = vk.Empirical([0.0, 1.0])
    few = copies(torch.tensor([0.1, 0.5, 0.9]), two, vk.Empirical([0.45, 0.55]))
    assert "could raise the alarm" in describe(few)
    many = copies(0.3 * normal(50, 1), two, vk.Empirical(0.3 * normal(50, 1, seed=1)))
    assert "only 2 distinct" in describe(many)


# --- drift ----------------------------------------------------------------------------------------------------------


def test_drift_names_the_moment_and_how_far_it_lies():
    samples, rest = digits(0, 897, 900)
    data = vk.Empirical(rest)
    assert "average mean lies" in describe(drift(samples + 0.1, data))
    signs = torch.randn(len(samples), 1, 1, 1, generator=torch.Generator().manual_seed(0)).sign()
    assert "outside the data's range" in describe(drift(samples + 2 * signs, data))
    assert describe(drift(samples, data)).startswith("Samples do not leave the data's range")


# --- likeness -------------------------------------------------------------------------------------------------------


def test_likeness_says_how_large_a_distance_is():
    samples, train, test = digits(4, 128, 900, 300)
    found = describe(likeness(samples + 0.3, train, test))
    assert found.startswith("Samples can be distinguished from test images (chance 0.001): Fréchet distance ")
    assert "on 32 principal components, " in found
    assert " of 128 test images; kernel distance " in found
    assert " times the " in found


def test_what_principal_components_leave_out_is_reported():
    samples, train, test = digits(1, 64, 900, 300)
    found = likeness(samples + 0.2 * normal(64, 1, 8, 8).float(), train, test)
    assert found.alarm
    assert "; the norm beyond them is 1." in describe(found)


def test_a_distance_that_is_left_out_has_a_reason():
    samples, train, test = digits(3, 40, 500, 100)
    assert "65 samples on, but a has 40" in describe(likeness(samples, train, test, features=lambda x: x.flatten(1)))


def test_likeness_of_diverged_and_of_few_samples():
    data, test, x = normal(200, 3, seed=1), normal(80, 3, seed=2), normal(60, 3, seed=3)
    spoilt = torch.cat([x, torch.tensor([[math.nan, 0, 0], [math.inf, 0, 0], [0, -math.inf, 0], [1e30, 0, 0]])])
    assert "4 samples diverged" in describe(likeness(spoilt, data, test))
    assert "0 are left, 30 having diverged" in describe(likeness(torch.full((30, 3), math.nan), data, test))
    assert "unknown" in describe(likeness(x[:7], data, test))
