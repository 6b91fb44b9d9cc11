"""Laws of trained models: Figure 2 against other implementations, masses against brute force, texts against arrays."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from exhibits import Made, says, words
from xarray import Dataset

import vkernel as vk
from vkernel import plots, study
from vkernel.core.errors import InputError
from vkernel.core.estimate import Estimate, twins
from vkernel.reproduce import learned
from vkernel.reproduce.exhibit import Run, number, percent
from vkernel.reproduce.learned import ratio

LINE = vk.VP(eps=1e-3)
GRID = vk.features.grid("gaussian", 16, 1, -1.5, 1.5, LINE)
MODEL = vk.models.Linear(GRID, "x0", 0.1)


def results(tmp_path: Path, scheme: int, members: int, draws: list[int], **changes: object) -> Dataset:
    """The exhibit's own study at eps = 1e-3 with one integrator."""
    spec = Run(tmp_path, 0, False, print).spec("figure2")
    sampler = spec["grid"]["sampler"]["values"][scheme] | changes  # published, converged
    grid = {"training.draws": draws, "objective.K": spec["grid"]["objective.K"]}
    spec |= {"members": members, "block": members, "process": {"eps": 1e-3}, "sampler": sampler, "grid": grid}
    return study.run(spec, tmp_path / "store", progress=False).load()


def test_the_published_look_up_by_a_plain_loop(tmp_path: Path) -> None:
    ens = vk.train_ensemble(MODEL, vk.data.toy("triple"), LINE, members=2, draws=128, seed=0, progress=False)
    nodes = torch.linspace(-1.5, 1.5, 200, dtype=torch.float64)
    x = vk.core.rng.quasi_normals(50, 1, 0)[:, 0].expand(2, -1) * LINE.sigma(torch.tensor(1.0, dtype=torch.float64))
    for t, t2 in pairwise(LINE.times(30, "uniform")):
        m = MODEL.output(ens.state, nodes[None, :, None], t.reshape(1, 1), LINE)[..., 0]
        j = torch.searchsorted(nodes, x).clamp_max(199)
        s = (LINE.alpha(t) * m.gather(1, j) - x) / LINE.S(t)
        x = x + (t - t2) * (LINE.beta(t) * x + LINE.D(t) * s)
    found = results(tmp_path, 0, 2, [128], samples=50).sel(objective="J1", draws=128)
    size = x.abs()
    np.testing.assert_allclose(found["gap"], ((size > 0.25) & (size < 0.75)).double().mean(1))
    np.testing.assert_allclose(found["inside"], (size < 1.5).double().mean(1))
    counts = torch.stack([torch.histc(row, 75, -1.5, 1.5) for row in x])
    np.testing.assert_allclose(found["density"], counts / 50 * 25)


def test_the_exact_score_with_thirty_euler_steps_leaves_mass_in_the_gaps(made: Made) -> None:
    saved = made.arrays["figure2"]
    assert saved["published_exact_gap"][1] == pytest.approx(0.032, abs=0.006)
    assert (saved["converged_exact_gap"][:2] < 1e-3).all()


# P: gap mass with J1 and J0, each with its standard error, by two other implementations (100 Euler steps, eps 1e-3)
KNOWN = {64: (0.18, 0.01, 0.09, 0.01), 256: (0.12, 0.02, 0.064, 0.004), 1024: (0.011, 0.003, 0.018, 0.002)}


def test_gap_mass_is_what_others_found(tmp_path: Path) -> None:
    found = results(tmp_path, 1, 100, list(KNOWN), steps=100, method="euler", spacing="uniform")
    shares = found["gap"] / found["inside"]
    for P, known in KNOWN.items():
        for objective, (value, se) in zip(("J1", "J0"), (known[:2], known[2:]), strict=True):
            gap = shares.sel(draws=P, objective=objective).values
            own = float(gap.std(ddof=1)) / 10
            assert abs(float(gap.mean()) - value) < 3 * (own**2 + se**2) ** 0.5


def test_arrays_are_laws(made: Made) -> None:
    saved = made.arrays["figure2"]
    for scheme in ("published", "converged"):
        for objective in ("J1", "J0"):
            gap, modes = saved[f"{scheme}_{objective}_gap"], saved[f"{scheme}_{objective}_modes"]
            assert gap.shape == (3, 3, 12)
            assert modes.shape == (3, 3, 12, 3)
            assert bool((gap + modes.sum(-1) <= 1 + 1e-9).all())
            density = saved[f"{scheme}_{objective}_density"]
            np.testing.assert_allclose(density.sum(-1) * 3 / 75, 1, rtol=1e-9)


def test_page_says_what_the_arrays_say(made: Made) -> None:
    exhibit, saved = made.exhibits["figure2"], made.arrays["figure2"]
    one, zero = saved["single_gap"][1]
    np.testing.assert_allclose(saved["single_gap"][1], [saved[f"converged_{o}_gap"][1, 2] for o in ("J1", "J0")])
    assert exhibit.finding is not None
    mean, medians = one.mean() / zero.mean(), [number(float(np.median(v)), 2) for v in (one, zero)]
    assert exhibit.finding.number == f"mean × {number(mean)}, median {medians[0]} against {medians[1]}"
    said = exhibit.finding.interval.replace("\u00a0", " ")
    assert f"J1 > J0 by more than .01 of the samples in {percent((one - zero > 0.01).mean())}" in said
    row = [cell.split(" (")[0].replace("\u00a0", " ") for cell in exhibit.tables[0].rows[1]]
    assert row[4:8] == [percent(hits.mean()) for hits in (one < 0.01, zero < 0.01, one > 0.1, zero > 0.1)]
    assert [len(table.rows) for table in exhibit.tables] == [3, 9, 6, 6]
    share = [float(v) for v in saved["converged_J1_gap"][0, 0]]
    row = exhibit.tables[1].rows[0]
    assert row[2] == number(float(np.median(share)), 2)


def test_clusters_of_a_normal_law_and_of_atoms() -> None:
    z = vk.core.rng.quasi_normals(2000, 1, 0)
    (found,) = learned.clusters(z[None, None], torch.ones(1, 1, 2000, dtype=torch.bool))
    assert found.tolist() == [1, pytest.approx(0.6827, abs=0.01), pytest.approx(0.441, abs=0.02)]
    atom = torch.cat([torch.full((60, 1), 5.0), torch.full((40, 1), 9.0)]).double() + 1e-9 * torch.randn(100, 1)
    every, none = torch.ones(1, 1, 100, dtype=torch.bool), torch.zeros(1, 1, 100, dtype=torch.bool)
    for x in (atom, torch.cat([atom, -atom], 1)):  # any dimension
        (found,) = learned.clusters(torch.stack([x, x])[None], torch.cat([every, none], 1))
        assert found[:2].tolist() == [1, pytest.approx(0.6)]
        assert found[2] < 1e-8
    assert learned.clusters(atom[None, None], none).tolist() == [[0, 0, 0]]


def mostly(share: float, many: float, few: float) -> torch.Tensor:
    """100 pairs ``(2, 100)``: the first is ``many`` in a ``share`` of them, else ``few``; the second is about 1."""
    n = round(100 * share)
    first = torch.tensor([many] * n + [few] * (100 - n), dtype=torch.float64)
    return torch.stack([first + 1e-3 * torch.arange(100), torch.linspace(0.9, 1.1, 100, dtype=torch.float64)])


@pytest.mark.parametrize(
    ("share", "many", "few", "words"),
    [
        (0.9, 3.0, 0.5, "in most pairs"),
        (0.2, 30.0, 0.5, "a typical model does not"),
        (0.5, 30.0, 0.5, "undecided"),
        (0.1, 1.2, 0.5, "empties"),
        (0.5, 1.5, 0.4, "no difference of the means"),
    ],
)
def test_the_verdict_follows_mean_and_pairs(share: float, many: float, few: float, words: str) -> None:
    cell = twins(*mostly(share, many, few))
    values = {
        "cells": [cell] * 3,
        "cell": cell,
        "eps": (1e-4, 1e-3, 1e-2),
        "shown": 1,
        "single_gap": torch.ones(3, 2, 100),
    }
    values |= {"pairs": [[cell] * 5] * 3, "members": 100, "kept": 8, "spread": [learned._spread(torch.ones(2, 9))] * 3}
    values |= {"single_sigma": torch.ones(3)} | dict.fromkeys(
        ("single_clusters", "single_clusters_at_0"), torch.ones(3, 2, 3)
    )
    assert words in says("figure2", "finding.words", **values)


# --- the exhibits ---------------------------------------------------------------------------------------------------


def test_the_papers_parameters(made: Made, tmp_path: Path) -> None:
    arrays, spec = made.arrays["figure3"], Run(tmp_path, 0, False, print).spec("figure3")
    published = spec["grid"]["sampler"]["values"][0]
    assert published == {"samples": 1024, "steps": 30, "method": "euler", "spacing": "uniform", "dtype": "float32"}
    assert (spec["training"]["draws"], spec["process"]["eps"]) == (500, 0.01)
    assert (spec["model"]["per_axis"], spec["model"]["ridge"]) == (10, 0.1)
    np.testing.assert_array_equal(arrays["rotations"], [0, 22.5, 45])
    alpha = math.exp(-(0.1 * 0.01 + 9.95 * 0.01**2))
    for angle, points in zip(arrays["rotations"], arrays["points"], strict=True):
        turn = np.deg2rad(angle + 90 * np.arange(4))
        np.testing.assert_allclose(points, alpha * np.stack([np.cos(turn), np.sin(turn)], 1), atol=1e-12)


def test_laws_are_densities_over_the_plane_and_masses_are_shares(made: Made) -> None:
    for name, shape in (("figure3", (2, 2, 2, 3)), ("mlp_plane", (2, 3))):
        arrays = made.arrays[name]
        assert arrays["law"].shape == (*shape, 60, 60)
        assert arrays["mass"].shape[:-1] == (*shape, 4)
        area = (2 * arrays["limit"] / 60) ** 2
        total = arrays["law"].sum((-1, -2)) * area
        assert (arrays["law"] >= 0).all()
        assert (total <= 1 + 1e-9).all()
        assert (total > 0.8).all()
        away, arcs, sides, centre = np.moveaxis(arrays["mass"], -2, 0)
        assert ((arrays["mass"] >= 0) & (arrays["mass"] <= 1)).all()
        assert (arcs <= away).all()
        assert (sides <= away).all()
        assert (arcs + centre <= away + 1e-12).all()
    exact = made.arrays["figure3"]["exact_score_mass"]
    assert exact[1, 0] < exact[0, 0] < 0.2  # Euler's error alone puts mass between the points


def test_the_words_hold_the_numbers_of_the_arrays(made: Made) -> None:
    mass = torch.from_numpy(made.arrays["figure3"]["mass"])
    whole = mass.mean(3)[..., 0, :]
    found, finding = ratio(whole[1, 0]), made.exhibits["figure3"].finding  # means over rotations
    assert finding is not None
    assert finding.number == number(found.value)
    assert f"{number(found.low)} to {number(found.high)}" in finding.interval
    said = words(made.exhibits["figure3"])
    mean_score = made.arrays["figure3"]["mean_score_mass"]
    for k in (0, 1):
        for v in (*whole[1, k].mean(-1), whole[0, k, 0].mean(), mean_score[k, :, 0].mean()):
            assert f"{float(v):.3f}" in said
    assert "normalised by itself" in said
    first = made.exhibits["figure3"].tables[0].rows[0]
    mean = Estimate.of_mean(mass[0, 0, 0, 0, 0])
    assert first[:2] == ("Gaussian, 0°", f"{mean.value:.3f}\u00a0±\u00a0{mean.high - mean.value:.3f}")

    own = torch.from_numpy(made.arrays["mlp_plane"]["mass"]).mean(1)
    finding = made.exhibits["mlp_plane"].finding
    assert finding is not None
    assert finding.number == number(ratio(own[:, 0]).value)
    beside = made.exhibits["mlp_plane"].tables[2]  # the linear models of the same page
    for q, row in enumerate(beside.rows):
        pairs = [own[:, q], *mass[1].mean(2)[:, :, q]]
        assert [cell.split()[0] for cell in row[1:]] == [f"{ratio(pair).value:.2f}" for pair in pairs]


def test_the_length_of_training_has_its_words(made: Made) -> None:
    noise = 0.01 * torch.rand(3, 2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    level = torch.tensor([0.5, 2.0, 3.0])
    for scale, said in ((level[[1, 1, 1]], "No dependence"), (level, "ratio depends")):
        mass = torch.stack([scale, torch.ones(3)], 1)[..., None] + noise
        apart = learned.apart([ratio(m) for m in mass])
        assert said in says("mlp_plane", "lasting", by_length={20: mass[0]}, twins=twins, apart=apart)
    assert made.arrays["mlp_plane"]["length_mass"].shape == (2, 2, 4, 2)
    assert [row[0] for row in made.exhibits["mlp_plane"].tables[1].rows] == ["20", "60", "120"]


def test_networks_are_compared_with_their_own_page_alone(made: Made, tmp_path: Path) -> None:
    assert list(learned._linear(Run(made.out, 3, True, print))) == ["Gaussian", "Fourier"]
    for run in (Run(tmp_path, 3, True, print), Run(made.out, 4, True, print), Run(made.out, 3, False, print)):
        assert learned._linear(run) == {}


# --- measures -------------------------------------------------------------------------------------------------------


def test_masses_against_brute_force(tmp_path: Path) -> None:
    spec = Run(tmp_path, 0, True, print).spec("mlp_plane")
    spec |= {"members": 3, "block": 3, "grid": {}, "data": {"name": "square", "rotation": 22.5}}
    spec |= {"sampler": {"samples": 200, "steps": 5}, "measure": spec["measure"] | {"keep": 200}}
    ds = study.run(spec, tmp_path / "store", progress=False).load()
    x, found = torch.from_numpy(ds["sample"].values), learned.masses(ds)
    points = learned._points()[1]
    line = torch.linspace(0, 1, 2001, dtype=torch.float64)[:, None]
    for m in range(3):
        counts = np.zeros(4)
        for place in x[m]:
            near = min(float((place - p).norm()) for p in points)
            side = min(
                float((place - (1 - line) * points[i] - line * points[(i + 1) % 4]).norm(dim=-1).min())
                for i in range(4)
            )
            size, away = float(place.norm()), near > 0.25
            counts += [away, away and 0.75 < size < 1.25, away and side < 0.15, size < 0.5]
        np.testing.assert_allclose(found[:, m], counts / 200, atol=1e-12)
    law = learned.laws(ds)
    cells = ((x.flatten(0, 1) + 1.5) * 20).floor()
    where = cells[((cells >= 0) & (cells < 60)).all(1)].long()
    counts = torch.zeros(60, 60, dtype=torch.float64).index_put_(tuple(where.mT), torch.tensor(1.0).double(), True)
    torch.testing.assert_close(law * (3 / 60) ** 2, counts / 600)  # x₁ first
    ds["far"][1] = np.nan
    assert torch.equal(learned.masses(ds), found[:, [0, 2]])


def test_ratio_against_the_jackknife() -> None:
    source = torch.Generator().manual_seed(1)
    b = 0.3 + 0.1 * torch.rand(60, generator=source, dtype=torch.float64)
    a = 1.2 * b + 0.05 * torch.rand(60, generator=source, dtype=torch.float64)
    found = ratio(torch.stack([a, b]))
    keep = ~torch.eye(60, dtype=torch.bool)
    left = torch.stack([(a[k].mean() / b[k].mean()).log() for k in keep])
    se = float((59 / 60 * (left - left.mean()).square().sum()).sqrt())
    assert found.value == pytest.approx(float(a.mean() / b.mean()))
    assert found.se / found.value == pytest.approx(se, rel=0.05)
    assert found.low * found.high == pytest.approx(found.value**2)
    assert math.isnan(ratio(torch.stack([a, 0 * b])).value)


def test_every_way_a_ratio_can_come_out_has_its_words() -> None:
    for share, many, few, said in (
        (
            0.9,
            3.0,
            0.5,
            "is larger, × 2.80 (95 % interval 2.64 to 2.97); larger in most pairs (J1 > J0 by more than .01",
        ),
        (0.2, 30.0, 0.5, "smaller in most pairs (J1 > J0 by more than .01 of the samples in 20 %"),
        (0.5, 1.5, 0.4, "is not measurably different"),
        (0.5, 1.2, 0.4, "no certain majority of pairs"),
        (0.1, 1.2, 0.5, "is smaller"),
    ):
        assert said in says("figure3", "answer", r=twins(*mostly(share, many, few)), who="They", mass=torch.ones(100))
    assert "no ratio" in says("figure3", "answer", r=twins(*torch.tensor([[1.0] * 3, [0.0] * 3])), who="They")
    mass = torch.rand(2, 3, 4, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 4
    mass[0, :, 1] *= 2
    mass[0, :, 3] /= 2
    said = says("mlp_plane", "moved", regions=learned.regions(mass), who="They")
    assert "arcs, mean larger, × 1.99" in said
    assert "larger in most pairs (100 % above, 0.0 % below; p" in said
    assert "sides, mean not measurably different" in said
    assert "centre, mean smaller" in said


def test_pairs_of_one_training_are_not_independent() -> None:
    mass = torch.rand(2, 3, 4, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = learned.regions(mass)["away"]
    one, zero = mass[0, :, 0], mass[1, :, 0]  # (rotation, M)
    assert found.more.value == pytest.approx(float((one > zero + 0.01).double().mean()))
    assert found.ratio.value == pytest.approx(float(one.mean() / zero.mean()))
    same = learned.regions(mass[:, :1].expand(-1, 3, -1, -1))["away"]  # three equal rotations say no more than one
    alone = twins(one[0], zero[0], 0.01)
    assert (same.more.value, same.p) == (pytest.approx(alone.more.value), pytest.approx(alone.p))
    assert same.more.high - same.more.low == pytest.approx(alone.more.high - alone.more.low, rel=0.2)


@pytest.mark.parametrize(
    ("own", "linear", "alike"),
    [((0.8, 0.9), (1.2, 1.3), False), ((0.8, 0.9), (0.85, 1.3), True), ((0.9, 1.1), (0.95, 1.2), None)],
)
def test_regions_without_an_effect_do_not_count(
    own: tuple[float, float], linear: tuple[float, float], alike: bool | None
) -> None:
    a, b, far = (Estimate(low, 0.1, low, high) for low, high in (own, linear, (5.0, 6.0)))
    none = [Estimate(1.0, 0.1, 0.9, 1.1)] * 3
    found = learned.like_linear([a, b, far] if alike is not None else [a, b, b], none, none, none)
    assert found == ([] if not alike else ["away"], ["away"] if alike is False else [])


# --- the picture ----------------------------------------------------------------------------------------------------


def test_maps_have_x1_to_the_right_and_one_scale() -> None:
    laws = np.zeros((2, 3, 10, 10))
    laws[0, 1, 9, 2] = 1
    points = np.zeros((3, 4, 2))
    figure = plots.plane_laws(laws, points, rows="ab", columns="cde", limit=1.5, top=0.5)
    images = [ax.images[0] for ax in figure.axes[:6]]
    assert images[1].get_array()[2, 9] == 1  # rows of an image are x₂
    assert {image.get_clim() for image in images} == {(0, 0.5)}
    with pytest.raises(InputError, match="There must be"):
        plots.plane_laws(laws, points, rows="a", columns="cde", limit=1.5, top=0.5)
