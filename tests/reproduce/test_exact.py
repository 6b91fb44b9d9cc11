"""The exact score: maps against brute force and closed forms, numbers against direct sampling, texts, pictures."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from exhibits import Made, brute_force, says, without_pictures

import vkernel as vk
from vkernel import kernels, metrics, plots, sample
from vkernel.core.errors import InputError
from vkernel.reproduce import exact
from vkernel.reproduce.exhibit import Run


@pytest.fixture
def first(made: Made) -> dict[str, np.ndarray]:
    return made.arrays["figure1"]


def test_figure1_has_the_papers_parameters(first: dict[str, np.ndarray]) -> None:
    assert list(first["sets"]) == ["hexagon", "line", "L", "random"]
    np.testing.assert_array_equal(first["t"], [0.05, 0.1, 0.2, 0.5, 0.75])
    for axis in ("x", "y"):
        np.testing.assert_allclose(first[axis], np.linspace(-2, 2, 100))
    assert first["fraction"].shape == (4, 5, 100, 100)
    np.testing.assert_allclose(first["points"][1], np.repeat(np.linspace(-1, 1, 6)[:, None], 2, 1))
    np.testing.assert_allclose(first["points"][2].T, [[-1, -1, -1, 0, 0.5, 1], [-1, 0, 1, -1, -1, -1]])
    np.testing.assert_allclose(first["points"][3].T, [[-1, -0.9, -0.3, 0.1, 0.2, 0.9], [-1, 1, 0.2, -0.1, -0.1, 0.7]])
    np.testing.assert_allclose(np.linalg.norm(first["points"][0], axis=-1), 1)


def test_figure1_against_brute_force(first: dict[str, np.ndarray]) -> None:
    pick = np.random.default_rng(0)
    for i, points in enumerate(first["points"]):
        for j, t in enumerate(first["t"]):
            for row, column in pick.integers(0, 100, (10, 2)):
                x = np.array([first["x"][column], first["y"][row]])  # the map's rows are y
                trace, square = brute_force(points, x, math.sqrt(1 - t), t)
                assert first["fraction"][i, j, row, column] == pytest.approx(trace / (trace + square), rel=1e-9)


def test_figure1_is_a_fraction_and_uses_its_range(first: dict[str, np.ndarray]) -> None:
    fraction = first["fraction"]
    assert np.isfinite(fraction).all()
    assert fraction.min() >= 0
    assert fraction.max() <= 1
    assert fraction.max() > 0.99
    np.testing.assert_allclose(first["share_above_half"], (fraction > 0.5).mean((2, 3)))


def test_the_hexagon_turns_into_itself() -> None:
    score = vk.EmpiricalScore(vk.data.toy("hexagon"), vk.Toy())
    x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    c, s = math.cos(math.pi / 3), math.sin(math.pi / 3)
    turned = x @ torch.tensor([[c, s], [-s, c]], dtype=torch.float64)
    for t in exact.TIMES:
        for before, after in zip(
            exact.noise_and_score(score, x, t), exact.noise_and_score(score, turned, t), strict=True
        ):
            torch.testing.assert_close(before, after, rtol=1e-9, atol=1e-12)


def test_the_maps_have_the_symmetries_of_their_points(first: dict[str, np.ndarray]) -> None:
    hexagon, diagonal, *_ = first["fraction"]
    same = {"rtol": 1e-8, "atol": 1e-12}
    np.testing.assert_allclose(hexagon, hexagon[:, ::-1, :], **same)
    np.testing.assert_allclose(hexagon, hexagon[:, :, ::-1], **same)
    np.testing.assert_allclose(diagonal, diagonal.transpose(0, 2, 1), **same)
    np.testing.assert_allclose(diagonal, diagonal[:, ::-1, ::-1], **same)


def test_small_at_the_points_large_on_the_boundaries(first: dict[str, np.ndarray]) -> None:
    """At small t a point of the hexagon sees its two neighbours, at distance 1; the centre sees all six."""
    for k, t in enumerate(first["small_t"]):
        unit = (1 - t) / (2 * t)
        exact = unit * 2 * math.exp(-(1 - t) / (2 * t))
        np.testing.assert_allclose(first["noise_at_points"][0, k], exact, rtol=2e-3 if t < 0.02 else 0.2)
        np.testing.assert_allclose(first["noise_at_boundary"][0, k], unit, rtol=1e-6)
    least = first["noise_at_points"].min(-1)
    assert (least[:, 1] < least[:, 0]).all()
    assert (first["noise_at_boundary"][:, 1] > first["noise_at_boundary"][:, 0]).all()


def test_the_mean_of_targets_is_the_score_and_their_noise_is_on_boundaries(first: dict[str, np.ndarray]) -> None:
    assert (first["proxy_error"] < 1e-12).all()
    # between two points ∫ C is that of sech²(αΔ x/2σ²), of which a share tanh(5/2) lies within 5 σ²/(αΔ) of the middle
    np.testing.assert_allclose(first["boundary_share"], math.tanh(2.5), atol=2e-3)


def test_paths_are_those_of_the_samplers(made: Made) -> None:
    saved = made.arrays["paths2d"]
    process = vk.Toy(eps=1e-3)
    score = vk.EmpiricalScore(vk.data.toy("L"), process)
    i = list(saved["sets"]).index("L")
    x_T = process.prior((40, 2), dtype=torch.float64, generator=vk.core.rng.stream(3, "reproduce/paths2d/start"))
    np.testing.assert_allclose(saved["flow"][i, 0], x_T[:6])
    flow = sample.pf_ode(score, x_T, steps=30, method="euler", spacing="log")
    stream = vk.core.rng.stream(3, "reproduce/paths2d/L")
    noisy = sample.effective_sde(kernels.Naive(score, 0.1), x_T, steps=30, spacing="log", generator=stream)
    assert saved["flow"].shape == (4, 31, 6, 2)
    np.testing.assert_allclose(saved["flow"][i, -1], flow[:6], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(saved["noisy"][i, -1], noisy[:6], rtol=1e-9, atol=1e-12)
    points = vk.data.toy("L").rows(0, 6)
    moved = (torch.cdist(flow, points).argmin(1) != torch.cdist(noisy, points).argmin(1)).double().mean()
    assert saved["ends_elsewhere"][i, 0] == pytest.approx(float(moved))


def test_the_same_seed_gives_the_same_numbers(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_pictures(monkeypatch)
    found = [made.arrays["memorise"]]
    for seed in (3, 4):
        exact.memorise(Run(tmp_path, seed, True, lambda share: None))
        found.append(dict(np.load(tmp_path / "memorise.npz")))
    np.testing.assert_array_equal(found[0]["sample_30"], found[1]["sample_30"])
    assert not np.array_equal(found[0]["sample_30"], found[2]["sample_30"])
    np.testing.assert_array_equal(found[0]["gap_mass"], found[2]["gap_mass"])  # not random


@pytest.mark.parametrize(("eps", "known"), [(1e-4, 0.029), (1e-3, 0.032), (1e-2, 0.073)])
def test_gap_mass_at_30_steps(eps: float, known: float) -> None:
    score = vk.EmpiricalScore(vk.data.toy("triple"), vk.VP(eps=eps))
    mass = exact.gap_mass(score, 30)
    assert mass == pytest.approx(known, abs=6e-4)
    x_T = score.process.prior((20_000, 1), generator=1)
    share = metrics.gap_mass(sample.pf_ode(score, x_T, steps=30, method="euler", spacing="uniform"))
    assert abs(share.value - mass) < 2 * (share.high - share.low)


def test_frequencies_are_compared_with_weights(made: Made) -> None:
    saved = made.arrays["memorise"]
    expected = saved["weights"] * saved["counts"].sum()
    assert saved["counts"].sum() == 500
    assert saved["chi_square"] == pytest.approx(((saved["counts"] - expected) ** 2 / expected).sum())
    assert saved["p_value"] == pytest.approx(
        float(torch.special.gammaincc(*torch.tensor([2.5, saved["chi_square"] / 2])))
    )
    values = {"weights": torch.ones(6) / 6, "counts": torch.ones(6), "chi_square": 1.0}
    assert "as often as its weight" in says("memorise", "finding.words", **values, p_value=0.5)
    assert "more than chance" in says("memorise", "finding.words", **values, p_value=0.001)


def test_two_noises_differ_by_more_than_their_floor(made: Made) -> None:
    saved = made.arrays["laws"]
    value, low, high = saved["variation"]
    assert ((low <= value) & (value <= high)).all()
    assert value[0] > saved["variation_floor"] > 0  # ten steps: resampled noise is far from Gaussian


def test_the_verdict_follows_the_intervals() -> None:
    below, above = torch.tensor([0.1, 0.09, 0.11]), torch.tensor([0.2, 0.19, 0.21])
    search = torch.stack([torch.stack([below, above])] * len(exact.CANDIDATES))
    for found, filled, emptied in ((search, 3, 0), (search.flip(1), 0, 3)):
        values = {"search": found, "search_last": search, "search_kappa": (0, 0.3), "candidates": exact.CANDIDATES}
        said = says("laws", "closing", **values)
        assert ("It fills here" in said) == (filled > 0)
        assert ("No such gap was found" in said) == (filled == 0)
        assert f"{emptied} of 3 have" in said


def test_noise_empties_the_gap() -> None:
    """P(|x| < .75) on {-1, 1} at eps .05, where differences are large."""
    process = vk.VP(eps=0.05)
    score = vk.EmpiricalScore(vk.data.toy("pair"), process)
    x_T = process.prior((1500, 1), generator=0)
    shares = []
    for kappa in (0.0, 0.3):
        x = sample.effective_sde(kernels.Naive(score, kappa), x_T, steps=60, generator=1, spacing="log")
        shares.append(metrics.gap_mass(x, (0, 0.75)))
    assert shares[1].high < shares[0].low


def test_pictures_refuse_what_they_cannot_draw() -> None:
    with pytest.raises(InputError, match="no law"):
        plots.law_panels({}, [], [0.0, 1.0], {})
    with pytest.raises(InputError, match="shape"):
        plots.path_maps(
            ["a"], np.arange(3), np.zeros((1, 2, 3)), np.zeros((1, 2, 2)), 1.0, {"ode": np.zeros((1, 2, 1, 2))}
        )


def test_an_arrow_stands_where_nothing_was_seen() -> None:
    curve = np.array([[0.1, 0.0], [0.05, 0.0], [0.2, 0.01]])
    figure = plots.gap_curves([0, 1], {"a": curve}, [10, 30], {"b": curve}, curve, 0.01)
    assert len(figure.axes) == 3
    assert len([t for t in figure.axes[0].texts if t.arrow_patch is not None]) == 1  # type: ignore[attr-defined]
