"""The study of profiles against trained networks: its counts, orders and control by their definitions."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch

import vkernel as vk

sys.path.insert(0, str(Path(__file__).parents[1]))

from experiments import profile_check, profile_report


@pytest.fixture(scope="module")
def given() -> profile_check.Planted:
    return profile_check.planted("plane", 3, None)[1]


def test_a_planted_set_has_its_duplicates_and_isolated_points(given: profile_check.Planted) -> None:
    profile = vk.profile(given.data, queries=16)
    assert [len(group) for group in profile.duplicates] == [k for k in given.copies.tolist() if k > 1]
    away = torch.cdist(given.points, given.points).fill_diagonal_(math.inf).min(1).values
    assert away[given.isolated].min() > 2 * away[~given.isolated].median()


def test_samples_at_points_are_copies_and_at_midpoints_between(given: profile_check.Planted) -> None:
    points, n = given.points, len(given.points)
    counts, between = profile_check.count(points.repeat(2, 1, 1), given)
    assert torch.equal(counts, torch.ones(3, 2, n, dtype=torch.long))
    assert len(between) == 0
    i, j = divmod(int(torch.cdist(points, points).fill_diagonal_(math.inf).argmin()), n)  # no third point is nearer
    counts, between = profile_check.count((0.6 * points[i] + 0.4 * points[j])[None, None], given)
    assert counts[:2].sum(2).tolist() == [[1], [0]]
    assert between.tolist() == [[0, *sorted((i, j)), 1]]


def test_diverged_samples_count_for_nothing(given: profile_check.Planted) -> None:
    counts, between = profile_check.count(torch.full((1, 4, 2), math.nan), given)
    assert int(counts.sum()) == len(between) == 0


def test_the_control_has_the_share_it_is_given_and_the_weights_of_the_set(given: profile_check.Planted) -> None:
    orders = profile_report.Orders(given)
    for row, share in ((1, 0.3), (2, 0.8)):
        counts, _ = orders.smoothed(share, row, 0)
        assert float(counts[row].sum()) / profile_report.SMOOTHED == pytest.approx(share, abs=0.02)
    visits = counts[0, 0] / profile_report.SMOOTHED  # of a narrow kernel
    weights = given.copies / given.copies.sum()
    assert float((visits - weights).abs().max()) < 0.03


def test_a_perfect_order_has_area_one_and_a_reversed_one_zero() -> None:
    order, hit = torch.arange(6.0), torch.arange(6) > 2
    assert profile_report.area(order, hit) == 1.0
    assert profile_report.area(-order, hit) == 0.0
    assert profile_report.area(torch.zeros(6), hit) == 0.5
    assert math.isnan(profile_report.area(order, torch.ones(6, dtype=torch.bool)))


def test_a_network_that_draws_from_the_training_set_reproduces_all(given: profile_check.Planted) -> None:
    design = profile_check.DESIGNS["plane"]
    which = torch.randint(given.data.n, (design.members, design.samples), generator=torch.Generator().manual_seed(0))
    samples = given.data[which.flatten()].reshape(*which.shape, 2)
    found = profile_report.compare(profile_report.Orders(given), design, *profile_check.count(samples, given), 0)
    assert found["copied", "samples"] == 1.0
    assert found["copied", "reproduced", "all", "pooled"] == 1.0
    assert math.isnan(found["copied", "auc", "all", "profile", "pooled"])


def test_training_continues_where_it_was_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"device": "cpu", "workers": 1, "seconds": math.inf, "pool": None, "small": True}
    profile_check.train("plane", tmp_path, sets=1, **options)
    first = profile_check.read(tmp_path / "plane.npz")
    capsys.readouterr()
    profile_check.train("plane", tmp_path, sets=2, **options)
    assert "set 0" not in capsys.readouterr().out
    second = profile_check.read(tmp_path / "plane.npz")
    assert len(second) == 2 * len(first)
    assert all((second[name] == first[name]).all() for name in first)


def test_the_page_has_the_numbers_of_the_stored_results() -> None:
    stored = profile_report.RESULTS / "profile_check.json"
    if not stored.exists():
        pytest.skip("the results are not stored yet: python -m experiments.profile_check report")
    shown = profile_report.PAGE.read_text().partition(profile_report.BEGIN)[2].partition(profile_report.END)[0]
    assert shown == profile_report.tables(json.loads(stored.read_text()))
