"""Maps of the plane: Figure 1 against brute force, symmetries and closed forms; paths against the samplers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from exhibits import Made, brute_force, check, make

import vkernel as vk
from vkernel import kernels, sample
from vkernel.reproduce import maps


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("maps"), 5, maps.figure1, maps.paths2d)


@pytest.fixture(scope="module")
def first(made: Made) -> dict[str, np.ndarray]:
    return made.arrays["figure1"]


def test_every_exhibit_is_complete(made: Made) -> None:
    assert set(made.exhibits) == {"figure1", "paths2d"}
    check(made)


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
    for t in maps.TIMES:
        for before, after in zip(
            maps.noise_and_score(score, x, t), maps.noise_and_score(score, turned, t), strict=True
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


def test_paths_are_those_of_the_samplers(made: Made) -> None:
    saved = made.arrays["paths2d"]
    process = vk.Toy(eps=1e-3)
    score = vk.EmpiricalScore(vk.data.toy("L"), process)
    i = list(saved["sets"]).index("L")
    x_T = process.prior((40, 2), dtype=torch.float64, generator=vk.core.rng.stream(5, "reproduce/paths2d/start"))
    np.testing.assert_allclose(saved["flow"][i, 0], x_T[:6])
    flow = sample.pf_ode(score, x_T, steps=30, method="euler", spacing="log")
    stream = vk.core.rng.stream(5, "reproduce/paths2d/L")
    noisy = sample.effective_sde(kernels.Naive(score, 0.1), x_T, steps=30, spacing="log", generator=stream)
    assert saved["flow"].shape == (4, 31, 6, 2)
    np.testing.assert_allclose(saved["flow"][i, -1], flow[:6], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(saved["noisy"][i, -1], noisy[:6], rtol=1e-9, atol=1e-12)
    points = vk.data.toy("L").rows(0, 6)
    moved = (torch.cdist(flow, points).argmin(1) != torch.cdist(noisy, points).argmin(1)).double().mean()
    assert saved["ends_elsewhere"][i, 0] == pytest.approx(float(moved))
