"""Laws in the plane: measures against brute force, twins against plain training, and words against the arrays."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from vkernel.reproduce.mlp_plane import answer, density, masses, moved, ratio, start
from vkernel.reproduce.page import Exhibit, number
from vkernel.reproduce.twins import twins

import vkernel as vk
from vkernel import plots
from vkernel.core.errors import InputError
from vkernel.core.estimate import Estimate
from vkernel.data import toy
from vkernel.reproduce import figure3, mlp_plane, page
from vkernel.train.ensemble import train_ensemble
from vkernel.train.features import grid
from vkernel.train.models.linear import Linear
from vkernel.train.objectives import Training, parse

PROCESS = vk.VP(eps=0.01)
Made = tuple[Path, dict[str, Exhibit], dict[str, dict[str, np.ndarray]], dict[str, float]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Both exhibits, quick, into one folder, with their arrays and the progress they told of."""
    out = tmp_path_factory.mktemp("planes")
    exhibits, arrays, told = {}, {}, {}
    for module in (figure3, mlp_plane):
        shares: list[float] = []
        exhibit = module.make(page.Run(out, 3, True, shares.append))
        exhibits[exhibit.name] = exhibit
        arrays[exhibit.name] = dict(np.load(out / exhibit.data))
        told[exhibit.name] = sum(shares)
    return out, exhibits, arrays, told


def words(exhibit: Exhibit) -> str:
    assert exhibit.finding is not None
    return " ".join((*exhibit.opening, *exhibit.finding.words, *exhibit.closing))


# --- the exhibits ---------------------------------------------------------------------------------------------------


def test_files_and_progress(made: Made) -> None:
    out, exhibits, _, told = made
    for exhibit in exhibits.values():
        assert told[exhibit.name] == pytest.approx(1)
        for picture in exhibit.pictures:
            assert all((out / f"{picture.stem}{end}").stat().st_size > 1000 for end in (".png", "-dark.png", ".svg"))
            assert picture.alt
            assert picture.caption
        for table in exhibit.tables:
            assert all(len(row) == len(table.head) for row in table.rows)


def test_the_papers_parameters(made: Made) -> None:
    arrays = made[2]["figure3"]
    assert figure3.PUBLISHED == {"steps": 30, "method": "euler", "spacing": "uniform"}
    assert (mlp_plane.DRAWS, mlp_plane.EPS, figure3.PER_AXIS, figure3.RIDGE) == (500, 0.01, 10, 0.1)
    np.testing.assert_array_equal(arrays["rotations"], [0, 22.5, 45])
    alpha = math.exp(-(0.1 * 0.01 + 9.95 * 0.01**2))
    for angle, points in zip(arrays["rotations"], arrays["points"], strict=True):
        turn = np.deg2rad(angle + 90 * np.arange(4))
        np.testing.assert_allclose(points, alpha * np.stack([np.cos(turn), np.sin(turn)], 1), atol=1e-12)


def test_laws_are_densities_over_the_plane_and_masses_are_shares(made: Made) -> None:
    for name, shape in (("figure3", (2, 2, 2, 3)), ("mlp_plane", (2, 3))):
        arrays = made[2][name]
        assert arrays["law"].shape == (*shape, mlp_plane.BINS, mlp_plane.BINS)
        assert arrays["mass"].shape[:-1] == (*shape, len(mlp_plane.REGIONS))
        area = (2 * arrays["limit"] / mlp_plane.BINS) ** 2
        total = arrays["law"].sum((-1, -2)) * area
        assert (arrays["law"] >= 0).all()
        assert (total <= 1 + 1e-9).all()
        assert (total > 0.8).all()
        away, arcs, sides, centre = np.moveaxis(arrays["mass"], -2, 0)
        assert ((arrays["mass"] >= 0) & (arrays["mass"] <= 1)).all()
        assert (arcs <= away).all()
        assert (sides <= away).all()
        assert (arcs + centre <= away + 1e-12).all()
    exact = made[2]["figure3"]["exact_score_mass"]
    assert exact[1, 0] < exact[0, 0] < 0.2  # Euler's error alone puts mass between the points


def test_the_words_hold_the_numbers_of_the_arrays(made: Made) -> None:
    _, exhibits, arrays, _ = made
    mass = torch.from_numpy(arrays["figure3"]["mass"])
    whole = mass.mean(3)[..., 0, :]
    found = ratio(whole[1, 0, 0], whole[1, 0, 1])
    finding = exhibits["figure3"].finding
    assert finding is not None
    assert finding.number == number(found.value)
    assert f"{number(found.low)} to {number(found.high)}" in finding.interval
    said = words(exhibits["figure3"])
    for k in (0, 1):
        for v in (*whole[1, k].mean(-1), whole[0, k, 0].mean(), arrays["figure3"]["mean_score_mass"][k, :, 0].mean()):
            assert f"{float(v):.3f}" in said
    assert "normalised by itself" in said
    first = exhibits["figure3"].tables[0].rows[0]
    mean = Estimate.of_mean(mass[0, 0, 0, 0, 0])
    assert first[:2] == ("Gaussian, 0°", f"{mean.value:.3f} ± {mean.high - mean.value:.3f}")

    own = torch.from_numpy(arrays["mlp_plane"]["mass"]).mean(1)
    finding = exhibits["mlp_plane"].finding
    assert finding is not None
    assert finding.number == number(ratio(own[0, 0], own[1, 0]).value)
    beside = exhibits["mlp_plane"].tables[2]  # the linear models of the same page
    for q, row in enumerate(beside.rows):
        pairs = [own[:, q], *mass[1].mean(2)[:, :, q]]
        assert [cell.split()[0] for cell in row[1:]] == [f"{ratio(a, b).value:.2f}" for a, b in pairs]


def test_the_length_of_training_has_its_words(made: Made) -> None:
    study = mlp_plane.Study(page.Run(made[0], 3, True, print))
    noise = 0.01 * torch.rand(3, 2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    level = torch.tensor([0.5, 2.0, 3.0])
    for scale, says in ((level[[1, 1, 1]], "No dependence"), (level, "ratio depends")):
        mass = torch.stack([scale, torch.ones(3)], 1)[..., None] + noise
        said, table = mlp_plane._lengths(study, mass[1], mass[[0, 2]])
        assert says in said
        assert [row[0] for row in table.rows] == ["20", "60", "120"]
    assert made[2]["mlp_plane"]["length_mass"].shape == (2, 2, 4, 2)


def test_networks_are_compared_with_their_own_page_alone(made: Made, tmp_path: Path) -> None:
    mass = torch.from_numpy(made[2]["mlp_plane"]["mass"])
    for run, says in (
        (page.Run(tmp_path, 3, True, print), "were not made"),
        (page.Run(made[0], 4, True, print), "another run"),
        (page.Run(made[0], 3, False, print), "another run"),
    ):
        said, tables = mlp_plane._beside(run, mass)
        assert says in said
        assert tables == ()


# --- twins ----------------------------------------------------------------------------------------------------------


def test_twins_share_inputs_and_are_what_plain_training_gives() -> None:
    data, model = toy("square", rotation=22.5), Linear(grid("fourier", 4, 2, process=PROCESS), "x0", 0.1)
    found = twins(model, data, PROCESS, draws=500, members=3, seed=7)
    batches = []
    for goal, twin in zip(mlp_plane.GOALS, found, strict=True):
        plain = train_ensemble(model, data, PROCESS, members=3, draws=500, objective=goal, seed=7, show=False)
        torch.testing.assert_close(twin.state["weights"], plain.state["weights"], rtol=1e-9, atol=1e-12)
        batches.append(Training(data, PROCESS, parse(goal), 500, seed=7).batch([0, 1, 2], 500))
    assert torch.equal(batches[0].x, batches[1].x)
    assert torch.equal(batches[0].t, batches[1].t)
    assert not torch.equal(batches[0].m, batches[1].m)


# --- measures -------------------------------------------------------------------------------------------------------


def test_start_is_even_and_normal() -> None:
    x = start(PROCESS, 1024, 5)
    assert torch.equal(x, start(PROCESS, 1024, 5))
    assert not torch.equal(x, start(PROCESS, 1024, 6))
    assert x.isfinite().all()
    u = torch.special.ndtr(x.double())
    cells = torch.bincount((u * 16).long().clamp(0, 15) @ torch.tensor([16, 1]), minlength=256)
    assert (cells == 4).all()  # a (t, 2)-net has the same number in every such square


def test_masses_against_brute_force() -> None:
    points = mlp_plane.anchors(toy("square", rotation=22.5), PROCESS)
    x = 0.8 * torch.randn(3, 200, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = masses(x, points)
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
    x[1, 0] = torch.nan
    assert masses(x, points)[:, 1].isnan().all()
    assert torch.equal(masses(x, points)[:, [0, 2]], found[:, [0, 2]])


def test_density_is_over_the_whole_map_with_x1_first() -> None:
    x = torch.tensor([[[1.01, 0.01], [1.01, 0.01], [0.01, -1.01], [9.0, 0.0]]])
    law = density(x)
    area = (3 / mlp_plane.BINS) ** 2
    assert float(law.sum()) * area == pytest.approx(0.75)
    assert float(law[50, 30]) * area == pytest.approx(0.5)
    assert float(law[30, 9]) * area == pytest.approx(0.25)


def test_ratio_against_the_jackknife() -> None:
    source = torch.Generator().manual_seed(1)
    b = 0.3 + 0.1 * torch.rand(60, generator=source, dtype=torch.float64)
    a = 1.2 * b + 0.05 * torch.rand(60, generator=source, dtype=torch.float64)
    found = ratio(a, b)
    keep = ~torch.eye(60, dtype=torch.bool)
    left = torch.stack([(a[k].mean() / b[k].mean()).log() for k in keep])
    se = float((59 / 60 * (left - left.mean()).square().sum()).sqrt())
    assert found.value == pytest.approx(float(a.mean() / b.mean()))
    assert found.se / found.value == pytest.approx(se, rel=0.05)
    assert found.low * found.high == pytest.approx(found.value**2)
    assert math.isnan(ratio(a, 0 * b).value)


def test_every_way_a_ratio_can_come_out_has_its_words() -> None:
    for (low, high), says in (((1.1, 2), "more mass"), ((0.2, 0.9), "less mass"), ((0.9, 1.1), "no effect")):
        assert says in answer(Estimate((low * high) ** 0.5, 0.1, low, high), "They")
    assert "no ratio" in answer(ratio(torch.ones(3), torch.zeros(3)), "They")
    mass = torch.rand(2, 3, 4, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 4
    mass[0, :, 1] *= 2
    mass[0, :, 3] /= 2
    said = moved(mass, "They")
    assert "fills the arcs" in said
    assert "no visible effect on the sides" in said
    assert "empties the centre" in said


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
