"""The exhibits of the dynamics: their numbers against direct sampling and closed forms, their words, their pictures."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import vkernel as vk
from vkernel import kernels, plots, sample
from vkernel.core.errors import InputError
from vkernel.reproduce import between_images, laws, memorise, page, paths2d

MODULES = (memorise, paths2d, laws, between_images)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, page.Exhibit], dict[str, float]]:
    out, shares = tmp_path_factory.mktemp("dynamics"), {}
    exhibits = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VKERNEL_DATA", raising=False)
        for module in MODULES:
            steps: list[float] = []
            exhibit = module.make(page.Run(out, 5, True, steps.append))
            exhibits[exhibit.name], shares[exhibit.name] = exhibit, sum(steps)
    return out, exhibits, shares


def test_every_exhibit_is_whole(made: tuple[Path, dict[str, page.Exhibit], dict[str, float]]) -> None:
    out, exhibits, shares = made
    assert set(exhibits) == {"memorise", "paths2d", "laws", "between_images"}
    for exhibit in exhibits.values():
        assert shares[exhibit.name] == pytest.approx(1)
        arrays = np.load(out / exhibit.data)
        for key in arrays.files:
            assert arrays[key].dtype.kind in "US" or np.isfinite(arrays[key]).all(), (exhibit.name, key)
        for picture in exhibit.pictures:
            assert len(picture.alt) > 80
            assert picture.caption
            for suffix in (".png", "-dark.png", ".svg"):
                assert (out / f"{picture.stem}{suffix}").stat().st_size > 1000
        for table in exhibit.tables:
            assert all(len(row) == len(table.head) for row in table.rows)
        words = " ".join([*exhibit.opening, *exhibit.closing, *(c for p in exhibit.pictures for c in p.caption)])
        assert "nan" not in words.lower().split()


def test_the_same_seed_gives_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page.Run, "picture", lambda run, stem, draw, alt, caption: page.Picture(stem, alt, (), 1, 1))
    found = []
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / folder).mkdir()
        exhibit = memorise.make(page.Run(tmp_path / folder, seed, True, lambda share: None))
        found.append(np.load(tmp_path / folder / exhibit.data))
    np.testing.assert_array_equal(found[0]["sample_30"], found[1]["sample_30"])
    assert not np.array_equal(found[0]["sample_30"], found[2]["sample_30"])
    np.testing.assert_array_equal(found[0]["gap_mass"], found[2]["gap_mass"])  # not random


def test_threads_are_given_back(tmp_path: Path) -> None:
    before = torch.get_num_threads()

    @memorise.one_thread
    def fails(run: page.Run) -> page.Exhibit:
        assert torch.get_num_threads() == 1
        raise page.Skip("no")

    with pytest.raises(page.Skip):
        fails(page.Run(tmp_path, 0, True, lambda share: None))
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("eps", "known"), [(1e-4, 0.029), (1e-3, 0.032), (1e-2, 0.073)])
def test_gap_mass_at_30_steps(eps: float, known: float) -> None:
    score = vk.EmpiricalScore(vk.data.toy("triple"), vk.VP(eps=eps))
    exact = memorise.gap_mass(score, 30)
    assert exact == pytest.approx(known, abs=6e-4)
    x = sample.pf_ode(score, score.process, score.process.prior((20_000, 1), generator=1), steps=30)
    p, low, high = memorise.wilson(memorise.in_gap(x), len(x))
    assert abs(p - exact) < 2 * (high - low)


def test_wilson_and_chi_square() -> None:
    p, low, high = memorise.wilson(10, 100)
    assert (p, low, high) == pytest.approx((0.1, 0.0552, 0.1744), abs=1e-4)
    assert memorise.wilson(0, 50)[:2] == (0.0, 0.0)
    assert memorise.wilson(50, 50)[2] == 1.0
    statistic, tail = memorise.chi_square(torch.tensor([60, 40]), torch.tensor([0.5, 0.5]))
    assert statistic == pytest.approx(4)
    assert tail == pytest.approx(math.erfc(math.sqrt(2)), rel=1e-9)  # one degree of freedom


def test_paths_are_those_of_the_sampler() -> None:
    process = vk.Toy(eps=1e-3)
    score = vk.EmpiricalScore(vk.data.toy("L"), process)
    x_T = process.prior((7, 2), generator=0, dtype=torch.float64)
    kernel = kernels.Naive(score, 0.1)
    path = paths2d.chain(kernel, x_T, 25, torch.Generator().manual_seed(3))
    end = sample.effective_sde(
        score, kernel, process, x_T, steps=25, generator=torch.Generator().manual_seed(3), spacing="log"
    )
    assert path.shape == (26, 7, 2)
    torch.testing.assert_close(path[-1], end, rtol=1e-9, atol=1e-12)


def test_total_variation_and_its_floor() -> None:
    g = torch.Generator().manual_seed(0)
    a, b = torch.tensor([500.0, 500.0, 0.0]).double(), torch.tensor([0.0, 500.0, 500.0]).double()
    value, low, high, floor = laws.variation(a, b, g)
    assert value == pytest.approx(0.5)
    assert low < 0.5 < high
    assert floor < 0.05
    assert laws.variation(a, a, g)[0] == 0


def test_the_verdict_follows_the_intervals() -> None:
    below, above = torch.tensor([0.1, 0.09, 0.11]), torch.tensor([0.2, 0.19, 0.21])
    last = torch.stack([torch.stack([below, above])] * len(laws.CANDIDATES))
    assert "No such gap was found" in laws._verdict(last.flip(1), last)
    assert f"{len(last)} of {len(last)} have" in laws._verdict(last.flip(1), last)
    assert "It fills here" in laws._verdict(last, last)


def test_noise_empties_the_gap() -> None:
    """P(|x| < .75) on {-1, 1} at eps .05, where differences are large."""
    process = vk.VP(eps=0.05)
    score = vk.EmpiricalScore(vk.data.toy("pair"), process)
    x_T = process.prior((1500, 1), generator=0)
    shares = []
    for kappa in (0.0, 0.3):
        x = sample.effective_sde(score, kernels.Naive(score, kappa), process, x_T, steps=60, generator=1, spacing="log")
        shares.append(memorise.wilson(int((x.abs() < 0.75).sum()), len(x)))
    assert shares[1][2] < shares[0][1]


def test_ends_of_images_against_brute_force() -> None:
    data = vk.data.digits()
    sizes = between_images.Sizes(starts=2, runs=2, kappas=(0.1,), steps=25, rows=1, columns=1)
    end = between_images.ends(data, sizes, 0, "digits")
    assert end.x.shape == (1, 2, 2, *data.shape)
    rows = data.rows(0, data.n).reshape(data.n, -1).double()
    distance = (rows - end.x[0, 1, 0].double().reshape(-1)).norm(dim=1)
    assert int(end.at[0, 1, 0]) == int(distance.argmin())
    assert float(end.distance[0, 1, 0]) == pytest.approx(float(distance.min()), rel=1e-3)
    assert (end.second >= end.distance).all()
    assert (end.elsewhere == (end.at != end.flow_at)).all()


def test_pictures_refuse_what_they_cannot_draw() -> None:
    with pytest.raises(InputError, match="no law"):
        plots.law_panels({}, [0.0], (0.25, 0.75))
    with pytest.raises(InputError, match="shape"):
        plots.path_maps(["a"], np.arange(3), np.zeros((1, 2, 3)), np.zeros((1, 2, 2)), 1.0, {})
    images = np.zeros((2, 3, 4, 4))
    with pytest.raises(InputError, match="one mark"):
        plots.end_images(images[:, 0], images, ["a", "b"], [("g", 3)], np.zeros((1, 3)), [[""] * 3] * 2)
    with pytest.raises(InputError, match="groups"):
        plots.end_images(images[:, 0], images, ["a", "b"], [("g", 2)], np.zeros((2, 3)), [[""] * 3] * 2)


def test_an_arrow_stands_where_nothing_was_seen() -> None:
    curve = np.array([[0.1, 0.0], [0.05, 0.0], [0.2, 0.01]])
    figure = plots.gap_curves([0, 1], {"a": curve}, [10, 30], {"b": curve}, curve, 0.01)
    assert len(figure.axes) == 3
    assert len([t for t in figure.axes[0].texts if t.arrow_patch is not None]) == 1  # type: ignore[attr-defined]
