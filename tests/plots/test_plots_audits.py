"""Pictures of an audit hold the numbers they were given, in both themes, whatever is missing, zero or not a number."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
import torch
import xarray
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from vkernel import plots
from vkernel.core.errors import InputError

rng = np.random.default_rng(0)
RATIO, T = np.geomspace(0.05, 5, 6), np.linspace(0.1, 0.9, 6)
SHARE = np.linspace(0, 1, 11)


def ends(name: str, value: Any, half: Any = 0.1) -> dict[str, np.ndarray]:
    value = np.asarray(value, dtype=float)
    return {
        name: value,
        f"{name}_se": value * half / 2,
        f"{name}_low": value * (1 - half),
        f"{name}_high": value * (1 + half),
    }


def levels(test: bool = True, **changes: Any) -> xarray.Dataset:
    base = 1 / (1 + RATIO)
    curves = (
        ends("train", base) | ends("ideal_train", base / 2) | ends("distance", base / 3) | ends("rayleigh", 3 * base)
    )
    if test:
        curves |= ends("test", 1.2 * base) | ends("ideal_test", 2 * base) | ends("gap", 0.2 * base, 2)
    labelled = {k: ("t", v) for k, v in (curves | changes).items()}
    return xarray.Dataset(labelled, {"t": T, "ratio": ("t", RATIO)})


def several(count: int = 3) -> xarray.Dataset:
    names = xarray.Variable("model", [f"net {k}" for k in range(count)])
    return xarray.concat([(1 + k) * levels() for k in range(count)], names)


def blind() -> xarray.Dataset:
    r, value = np.array([0.1, 0.4, 1, 3]), np.array([[0.01, 0.02, 0.03, 0.02], [1, 1.1, 0.9, 1], [0.8, 0.7, 0.9, 1]])
    curves = {k: (("change", "t"), v) for k, v in ends("response", value).items()}
    coords = {"t": r, "change": ["brightness", "contrast", "translation"]}
    return xarray.Dataset({"r": ("t", r), **curves}, coords)


def agreement(**changes: Any) -> xarray.Dataset:
    value = np.array([[1.0], [2], [3]]) / (1 + RATIO)
    curves = ends("variance", value) | ends("bias", value * 5)
    curves |= ends("rank", value / 4) | ends("rank_coordinates", -value / 4)
    labelled = {k: (("place", "t"), v) for k, v in (curves | changes).items()}
    return xarray.Dataset(labelled, {"t": T, "ratio": ("t", RATIO), "place": ["data", "between", "path"]})


def shares(power: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return SHARE**power, np.clip(SHARE**power - 0.1, 0, 1), np.clip(SHARE**power + 0.1, 0, 1)


def membership(**changes: Any) -> Figure:
    given = {"train": rng.lognormal(size=(6, 50)), "test": rng.lognormal(size=(6, 40)), "auc_t": T, "ratio": RATIO}
    given["auc"] = np.stack([0.5 + T / 4, 0.4 + T / 4, 0.6 + T / 4])
    return plots.membership_losses(**(given | changes))


DATA = (rng.normal(size=3000), rng.gamma(3, 1, 3000))
GREY = rng.uniform(size=(9, 1, 4, 4))
DRAW = {
    "agreement_curves": lambda: plots.agreement_curves(agreement()),
    "copy_curve": lambda: plots.copy_curve(SHARE, {"samples": shares(2), "test images": shares(5)}),
    "denoising_errors": lambda: plots.denoising_errors(levels(), (RATIO, 1 / RATIO)),
    "image_moments": lambda: plots.image_moments({"a": (rng.normal(size=9), rng.gamma(3, 1, 9))}, DATA),
    "membership_losses": membership,
    "neighbour_ratios": lambda: plots.neighbour_ratios(
        {"samples": rng.beta(2, 3, 50), "test images": [0.9, 0.8]}, 1 / 3
    ),
    "responses": lambda: plots.responses(blind()),
    "score_deviation": lambda: plots.score_deviation(levels()),
    "pairs": lambda: plots.pairs(GREY, GREY, ["x"] * 9, labels=("sample", "training image")),
}


def curve(ax: Axes, k: int) -> np.ndarray:
    return np.stack([np.asarray(v, dtype=float) for v in ax.lines[k].get_data()])


def band(ax: Axes, k: int) -> np.ndarray:
    return np.concatenate([path.vertices for path in ax.collections[k].get_paths()])


def words(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].texts]


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", DRAW)
def test_every_picture_is_drawn_in_both_themes(name: str, dark: bool) -> None:
    with plots.style(dark=dark):
        figure = DRAW[name]()
    assert (np.mean(figure.get_facecolor()[:3]) < 0.5) == dark
    assert plots.to_bytes(figure, "png", dpi=40).startswith(b"\x89PNG")
    for ax in figure.axes:
        assert ax.images or not ax.has_data() or (ax.get_xlabel() and ax.get_ylabel() and ax.get_title())


def test_denoising_errors_hold_their_numbers() -> None:
    ds = levels()
    figure = plots.denoising_errors(ds, ([0.1, 1], [0.5, 0.25]))
    left, right = figure.axes
    for k, name in enumerate(("train", "test", "ideal_train", "ideal_test")):
        np.testing.assert_allclose(curve(left, k), [RATIO, ds[name]])
    np.testing.assert_allclose(curve(left, 4), [[0.1, 1], [0.5, 0.25]])
    np.testing.assert_allclose(band(left, 0)[:, 1].max(), ds.train_high.max())
    np.testing.assert_allclose(curve(right, 0), [RATIO, np.full(6, 20.0)])
    assert np.isclose(band(right, 0)[:, 1].min(), -20)
    assert np.isclose(band(right, 0)[:, 1].max(), 60)
    assert (left.get_xscale(), left.get_yscale(), right.get_yscale()) == ("log", "log", "linear")
    assert "σ/α" in left.get_xlabel()
    assert "%" in right.get_ylabel()
    assert words(figure) == [
        "model, training images", "model, test images", "ideal, training images", "ideal, test images",
        "best linear denoiser",
    ]  # fmt: skip


def test_without_test_images_there_is_no_gap() -> None:
    figure = plots.denoising_errors(levels(test=False))
    assert len(figure.axes) == 1
    assert words(figure) == ["model, training images", "ideal, training images"]


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_what_has_no_place_on_a_log_axis_is_a_gap(value: float) -> None:
    train = np.array([1, value, 0.5, 0.3, 0.2, 0.1])
    figure = plots.denoising_errors(levels(train=train, train_low=train - 5))
    shown = curve(figure.axes[0], 0)[1]
    assert np.isnan(shown[1])
    np.testing.assert_allclose(shown[2:], train[2:])
    assert (band(figure.axes[0], 0)[:, 1] > 0).all()
    assert figure.axes[0].get_ylim()[0] > 1e-3  # an interval that reaches zero does not stretch the axis
    plots.to_bytes(figure, dpi=40)


def test_one_level_and_lonely_levels_have_bars() -> None:
    figure = plots.denoising_errors(levels().isel(t=[2]))
    bars = [c for c in figure.axes[0].collections if type(c).__name__ == "LineCollection" and len(c.get_segments())]
    np.testing.assert_allclose(bars[0].get_segments()[0][:, 1], [levels()[f"train_{e}"][2] for e in ("low", "high")])
    assert [t.get_text() for t in figure.axes[0].get_xticklabels()] == [f"{RATIO[2]:.3g}"]
    ray = np.array([np.nan, 5, np.nan, 3, 2, 1])
    ax = plots.score_deviation(levels(**ends("rayleigh", ray))).axes[1]
    lonely = next(c for c in ax.collections if type(c).__name__ == "LineCollection").get_segments()
    assert len(lonely) == 1
    np.testing.assert_allclose(lonely[0], [[RATIO[1], 4.5], [RATIO[1], 5.5]])
    plots.to_bytes(figure, dpi=40)


def test_score_deviation_marks_indifference_even_where_nothing_is_known() -> None:
    figure = plots.score_deviation(levels())
    left, right = figure.axes
    np.testing.assert_allclose(curve(left, 0)[1], levels().distance)
    np.testing.assert_allclose(curve(right, 0)[1], levels().rayleigh)
    assert set(right.lines[1].get_ydata()) == {1}
    assert right.get_ylim()[0] < 1 < right.get_ylim()[1]
    none = plots.score_deviation(levels(**ends("rayleigh", np.full(6, np.nan))))
    assert "no value" in none.axes[1].texts[0].get_text()
    plots.to_bytes(none, dpi=40)


def test_copy_curve_is_in_per_cent_with_a_dashed_reference() -> None:
    ax = plots.copy_curve(SHARE, {"samples": shares(2), "test images": shares(5)}).axes[0]
    np.testing.assert_allclose(curve(ax, 0), [SHARE, 100 * SHARE**2])
    assert [ax.lines[k].get_linestyle() for k in (0, 1)] == ["-", "--"]
    assert np.allclose(ax.lines[2].get_xdata(), 1 / 3)
    assert ax.get_xlim() == (0, 1)
    assert "%" in ax.get_ylabel()


def test_neighbour_ratios_are_shares_of_those_that_have_one() -> None:
    figure = plots.neighbour_ratios({"samples": [0.1, 0.2, 1.0, np.nan], "test images": torch.tensor([0.9, 0.0])}, 0.25)
    for patch in figure.axes[0].patches:
        assert np.isclose(patch.get_data().values.sum(), 100)
    assert words(figure) == ["samples (3, and 1 without a ratio)", "test images (2)", "threshold 0.25"]


def test_membership_losses_average_levels_and_count_zeros() -> None:
    figure = membership(train=np.array([[1.0, 0, 3], [3, 0, 5]]), test=[2.0, 2, 9, np.nan])
    left, right = figure.axes
    first, second = (patch.get_data() for patch in left.patches)
    assert np.isclose(first.values.sum(), 200 / 3)
    assert np.isclose(second.values.sum(), 100)
    assert first.edges[0] <= 2 <= 9 <= first.edges[-1]
    labels = [text.get_text() for text in left.get_legend().texts]
    assert labels == ["training images (2, and 1 not shown)", "test images (3, and 1 not shown)"]
    np.testing.assert_allclose(curve(right, 0), [RATIO, 0.5 + T / 4])
    assert set(right.lines[1].get_ydata()) == {0.5}
    assert "noise level t" in membership(ratio=()).axes[1].get_xlabel()
    plots.to_bytes(membership(train=[1.0, 1], test=[1.0], auc=np.full((3, len(T)), np.nan)), dpi=40)


def test_responses_are_sorted_and_have_their_threshold() -> None:
    ax = plots.responses(blind().isel(t=[2, 0, 3, 1])).axes[0]
    for k in range(3):
        np.testing.assert_allclose(curve(ax, k), [blind().r, blind().response[k]])
    assert [line.get_ydata()[0] for line in ax.lines[3:]] == [1, 0.05]
    assert "r = σ/(α s)" in ax.get_xlabel()


def test_image_moments_reach_far_samples_and_count_lost_ones() -> None:
    near = plots.image_moments({"a": ([0.1, np.nan], [1.0, 1])}, DATA)
    assert (near.axes[0].get_xscale(), near.axes[0].get_yscale()) == ("linear", "linear")
    assert words(near) == ["data (3,000)", "a (1, and 1 not finite)"]
    data, sample = (c.get_offsets() for c in near.axes[0].collections)
    assert 1000 <= len(data) <= 2000
    np.testing.assert_allclose(sample, [[0.1, 1]])
    far = plots.image_moments({"a": ([-500.0, 2], [1.0, 1])}, DATA).axes[0]
    assert (far.get_xscale(), far.get_yscale()) == ("symlog", "linear")
    low, high = far.get_xlim()
    assert low < -500
    assert high > 2
    for constant in (0.0, 3.0):
        odd = plots.image_moments({"a": ([1.0], [1e6]), "none": ([np.nan], [1.0])}, ([constant] * 4, [0.0] * 4))
        plots.to_bytes(odd, dpi=40)


@pytest.mark.parametrize("shape", [(4, 4), (1, 4, 4), (3, 4, 4)])
def test_sources_stand_below_their_samples(shape: tuple[int, ...]) -> None:
    a, b = rng.uniform(size=(2, 5, *shape))
    figure = plots.pairs(a, b, list("vwxyz"), per_row=3, labels=("sample", "training image"))
    axes = figure.axes
    assert [row.get_ylabel() for row in axes] == ["sample", "training image"] * 2
    assert [text.get_text() for row in axes for text in row.texts] == ["v", "w", "x", "y", "z"]
    assert [len(row.images) for row in axes] == [3, 3, 2, 2]
    want = b[4] if len(shape) == 2 else b[4, 0] if shape[0] == 1 else np.moveaxis(b[4], 0, -1)
    np.testing.assert_allclose(axes[3].images[1].get_array(), want)


@pytest.mark.parametrize("shape", [(3, 5), (1, 3, 5), (3, 3, 5)])
def test_thumbnails_hold_their_pixels_and_grey_what_is_not_finite(shape: tuple[int, ...]) -> None:
    images = rng.integers(0, 256, (2, *shape)).astype(float)
    images[1] = np.nan
    one, lost = (Image.open(io.BytesIO(base64.b64decode(t.split(",")[1]))) for t in plots.thumbnails(images, (0, 255)))
    want = images[0] if len(shape) == 2 else images[0, 0] if shape[0] == 1 else np.moveaxis(images[0], 0, -1)
    np.testing.assert_array_equal(np.asarray(one), want)
    assert (np.asarray(lost) == 128).all()
    (small,) = plots.thumbnails(np.zeros((1, 300, 200)))
    assert Image.open(io.BytesIO(base64.b64decode(small.split(",")[1]))).size == (85, 128)


def test_agreement_curves_hold_their_numbers() -> None:
    ds = agreement()
    figure = plots.agreement_curves(ds)
    left, *right = figure.axes
    for k in range(3):
        np.testing.assert_allclose(curve(left, 2 * k)[1], ds.variance[k])
        np.testing.assert_allclose(curve(left, 2 * k + 1)[1], ds.bias[k])
        for ax, name in zip(right, ("rank", "rank_coordinates"), strict=True):
            np.testing.assert_allclose(curve(ax, k)[1], ds[name][k])
            assert ax.get_ylim() == (-1, 1)
    assert words(figure) == ["data", "between", "path", "variance between members", "common error"]
    assert len(plots.agreement_curves(ds.drop_vars("rank_coordinates")).axes) == 2
    lost = agreement(**{k: -np.ones((3, 6)) for k in ("bias", "bias_low", "bias_high")})
    plots.to_bytes(plots.agreement_curves(lost.isel(t=[0])), dpi=40)


@pytest.mark.parametrize(
    "call",
    [
        lambda: plots.denoising_errors(levels().drop_vars("train")),
        lambda: plots.denoising_errors(levels().drop_vars("ratio")),
        lambda: plots.denoising_errors(several()),
        lambda: plots.denoising_errors(levels(), ([1, 2], [1])),
        lambda: plots.denoising_errors(levels().assign_coords(ratio=("t", np.zeros(6)))),
        lambda: plots.copy_curve(SHARE, {}),
        lambda: plots.copy_curve(SHARE, {"a": (SHARE, SHARE, SHARE[:-1])}),
        lambda: plots.copy_curve(SHARE, {"a": (SHARE, SHARE)}),
        lambda: plots.neighbour_ratios({}, 0.3),
        lambda: plots.neighbour_ratios({"a": []}, 0.3),
        lambda: plots.neighbour_ratios({"a": [1.5]}, 0.3),
        lambda: membership(auc=[[0.5]] * 3),
        lambda: membership(train=[np.nan]),
        lambda: membership(train=[0.0], test=[0.0]),
        lambda: plots.responses(levels()),
        lambda: plots.image_moments({}, ([], [])),
        lambda: plots.image_moments({"a": ([1.0], [1.0, 2])}, DATA),
        lambda: plots.pairs(GREY, GREY[:2]),
        lambda: plots.pairs(GREY[:0], GREY[:0]),
        lambda: plots.pairs(GREY[:, 0, 0], GREY[:, 0, 0]),
        lambda: plots.pairs(GREY, GREY, per_row=0),
        lambda: plots.thumbnails(np.zeros((2, 5, 4, 4))),
        lambda: plots.agreement_curves(levels()),
    ],
)
def test_what_makes_no_picture_is_refused_with_a_sentence(call) -> None:
    with pytest.raises(InputError, match=r"[.]$"):
        call()
