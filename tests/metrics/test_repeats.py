"""Samples that repeat one another: counts by hand, collapse, and false alarms."""

from __future__ import annotations

import math

import pytest
import torch
from draws import normal

import vkernel as vk
from vkernel.metrics import repeats


def points(n: int, seed: int = 0) -> torch.Tensor:
    return normal(n, 12, seed=seed)


def test_counts_and_distances_are_those_of_all_pairs() -> None:
    x, real = points(80), vk.Empirical(points(80, 1))
    x[40:50] = x[:10] + 1e-3  # ten pairs
    found = repeats(x, vk.Empirical(points(200, 2)), real)
    assert found is not None
    away = torch.cdist(x, x).fill_diagonal_(math.inf)
    torch.testing.assert_close(found.distance, away.amin(1).double(), rtol=1e-4, atol=1e-4)
    assert torch.equal(found.other, away.argmin(1))
    own = torch.cdist(real[:], real[:]).fill_diagonal_(math.inf).amin(1)
    assert found.radius == pytest.approx(float(own.min()), rel=1e-5)
    assert round(found.fraction.value * 80) == int((away.amin(1) <= found.radius * (1 + 1e-9)).sum()) >= 20
    assert (found.real, found.n, found.equal) == ("test", 80, 0)
    assert found.alarm


def test_a_collapsed_sampler_and_a_fair_one() -> None:
    train = vk.Empirical(points(600, 3))
    few = points(5, 4)[torch.arange(200) % 5]
    collapsed = repeats(few, train)
    assert collapsed is not None
    assert collapsed.alarm
    assert (collapsed.equal, collapsed.fraction.value, collapsed.real) == (200, 1, "training")
    false = [found for seed in range(40) if (found := repeats(points(200, 10 + seed), train, seed=seed)) is not None]
    assert sum(found.chance < 0.01 for found in false) <= 2
    assert not any(found.alarm for found in false)


def test_what_is_not_finite_is_left_out_and_few_are_not_compared() -> None:
    x, train = points(60), vk.Empirical(points(100, 1))
    x[::3] = math.nan
    found = repeats(x, train)
    assert found is not None
    assert found.n == 40
    assert torch.equal(found.which, torch.tensor([k for k in range(60) if k % 3]))
    x[1:50] = math.nan
    assert repeats(x, train) is None
