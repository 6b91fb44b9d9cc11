"""Studies with stored results: profiles against trained networks, and generalization, by their definitions."""

from __future__ import annotations

import json
import math
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

import vkernel as vk

sys.path.insert(0, str(Path(__file__).parents[1]))

from experiments import generalization, images, profile_check, profile_report
from vkernel.core.estimate import Estimate
from vkernel.reports.profile import tested


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
    shown = profile_report.PAGE.read_text().partition(profile_report.BEGIN)[2].partition(profile_report.END)[0]
    assert shown == profile_report.section(json.loads(tested.PATH.read_text()))


@pytest.mark.parametrize("kind", profile_check.DESIGNS)
def test_the_package_has_the_numbers_of_the_stored_counts(kind: str) -> None:
    """Shares of copies and of reproduced points, from the counts by their definition."""
    design, counts = profile_check.DESIGNS[kind], profile_check.read(profile_report.RESULTS / f"{kind}.npz")
    copies = design.plant(torch.zeros(design.drawn, 2), torch.zeros(profile_check.ISOLATED, 2)).copies
    found = tested.results()
    assert found.sizes[kind]["networks"] == design.members * sum("counts" in name for name in counts)
    for cell in found.of(kind):
        each = torch.stack(
            [torch.from_numpy(v.astype(int)).double() for k, v in counts.items() if f"_{cell.steps}_counts" in k]
        )
        for row, rule in enumerate(("copied", "close"), 1):
            share = each[:, row].sum((1, 2)) / (design.members * design.samples)
            often = (each[:, row][..., copies == 8] >= design.samples / (2 * int(copies.sum()))).double().mean((1, 2))
            for name, values in (("samples", share), ("reproduced x8 single", often)):
                known, e = cell(f"{rule} {name}"), Estimate[float].of_mean(values)
                assert known.value == pytest.approx(e.value, abs=6e-4)
                assert known.low == pytest.approx(max(0.0, e.low), abs=6e-4)


def test_an_area_of_the_package_is_that_of_the_stored_counts() -> None:
    """The order by number of copies needs no profile: its AUC by counting pairs."""
    design, counts = profile_check.DESIGNS["digits"], profile_check.read(profile_report.RESULTS / "digits.npz")
    copies = design.plant(torch.zeros(design.drawn, 2), torch.zeros(profile_check.ISOLATED, 2)).copies
    cell, areas = tested.results().of("digits")[2], []
    for name, value in counts.items():
        if f"_{cell.steps}_counts" in name:
            hits = torch.from_numpy(value[1].astype(int)) >= design.samples / (2 * int(copies.sum()))
            wins = [(copies[hit][:, None] - copies[~hit]).sign().double().mean() for hit in hits]
            areas.append(float(torch.stack(wins).mean() / 2 + 0.5))
    assert cell("copied auc all multiplicity single").value == pytest.approx(sum(areas) / len(areas), abs=6e-4)


CASE = generalization.Case("mlp", "line", 5, draws=16).small()


def test_a_network_of_many_sets_is_the_one_that_is_trained_alone() -> None:
    sets = [vk.Empirical(vk.data.population("uniform", CASE.n, s)) for s in range(2)]
    training = generalization.Sets(sets, CASE.draws, CASE.models)
    model = vk.models.MLP(8, 2, steps=5, batch=8)
    together = model.fit(training, range(len(training)), lambda share: None)
    how = {"members": CASE.models, "draws": CASE.draws, "objective": vk.JC(2), "seed": 2, "dtype": torch.float32}
    alone = vk.train_ensemble(model, sets[1], generalization.PROCESS, **how).state
    first = CASE.models * (len(generalization.FACTORS) + generalization.FACTORS.index(2.0))  # of set 1 and c = 2
    for name, weights in alone.items():
        own = together[name][first : first + CASE.models]
        torch.testing.assert_close(own, weights, atol=1e-4, rtol=1e-3)


def test_distances_are_merged_from_folders_and_archives(tmp_path: Path) -> None:
    names = [case.name for case in generalization.cases()]
    assert len(set(names)) == len(names)
    only = ["mlp line n=8 draws=512", "linear line n=8 F/P=1"]
    generalization.train(tmp_path / "raw", "cpu", only, small=True)
    with tarfile.open(tmp_path / "all.tar", "w") as archive:
        archive.add(tmp_path / "raw", ".")
    for source in ("raw", "all.tar"):
        generalization.merge([tmp_path / source], tmp_path / f"{source}.npz")
    merged = profile_check.read(tmp_path / "all.tar.npz")
    assert [json.loads(about)["name"] for about in merged["about"]] == only
    raw = profile_check.read(tmp_path / "raw" / f"{names.index(only[0]):02d}.npz")
    np.testing.assert_allclose(merged["w1_single"][0], raw["w1_single"].mean(2), rtol=1e-6)
    np.testing.assert_array_equal(merged["w1_better"][:, 0], 0)  # no distance is less than itself
    again = profile_check.read(tmp_path / "raw.npz")
    assert all(np.array_equal(merged[key], again[key]) for key in merged)


def test_a_study_of_images_is_run_within_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are in the file after every unit of work; files with parts of the grid are joined."""
    given = {"data.name": '"digits"', "data.test": 9, "process.kind": '"edm"', "model.kind": '"mlp"', "model.steps": 2}
    given |= {"model.target": '"edm"', "model.weight": '"edm"', "model.width": 4, "model.batch": 4, "members": 3}
    given |= {"block": 3, "title": '"a"', "training.snapshots": [2], "sampler.samples": 4, "sampler.steps": 2}
    given |= {"measure.levels": [1.0], "measure.images": 4, "grid.data.n": [6, 8], "grid.objective.c": [0.0, 1.0]}
    (tmp_path / "a.toml").write_text("\n".join(f"{key} = {value}" for key, value in given.items()))

    def run(*options: object) -> np.ndarray:
        words = ["images", "--spec", tmp_path / "a.toml", "--out", tmp_path / "out.npz", *options]
        monkeypatch.setattr(sys, "argv", list(map(str, words)))
        images.main()
        return vk.study.load(tmp_path / "out.npz")["done"].values[..., 0]

    for n in (6, 8):
        done = run("--store", tmp_path / f"{n}", "--only", f"n={n}")
        assert done.tolist() == [[n == 6] * 2, [n == 8] * 2]
        (tmp_path / "out.npz").rename(tmp_path / f"{n}.npz")
    assert run("--join", tmp_path / "6.npz", tmp_path / "8.npz").all()
    assert run("--store", tmp_path / "none", "--seconds", 0).all(), "no time, no work: the file stays"
    assert not (tmp_path / "none").exists()
