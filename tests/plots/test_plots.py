"""Pictures hold the numbers they were given, in both themes, and reach files whole or not at all."""

from __future__ import annotations

import base64
import errno
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
import torch
import xarray
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.figure import Figure

from vkernel import plots
from vkernel.core.errors import InputError
from vkernel.core.estimate import Estimate

rng = np.random.default_rng(0)
T = np.geomspace(1e-3, 1, 20)
RHO = np.sin(np.linspace(0, np.pi, 20)) ** 2
CURVES = {"t": T, "noise_fraction": RHO, "noise_fraction_se": 0.01 + 0 * T, "ess": 1 + 99 * T, "mmse": T}
CURVES["entropy"] = np.log(CURVES["ess"])


def line_figure(**changes: object) -> Figure:
    fine, places, times = np.linspace(-0.25, 1.25, 31), np.linspace(-0.25, 1.25, 13), np.geomspace(0.02, 1, 7)
    maps = {
        "t": times,
        "lam_clean": fine,
        "clean": np.exp(-50 * (fine - 0.5) ** 2) * times[:, None],
        "lam": places,
        "noisy": np.exp(-5 * (places - 0.5) ** 2) * times[:, None],
        "noisy_se": np.full((7, 13), 0.01),
    }
    strips = rng.uniform(-1, 1, (3, 1, 4, 4)), rng.normal(size=(3, 1, 4, 4))
    return plots.line_maps(maps | changes, at=(0, 0.5, 1), strips=strips, profiles=[1, 3, 5], titles=("left", "right"))


def fraction_figure(**changes: object) -> Figure:
    axis = np.linspace(-2, 2, 5)
    given: dict = {
        "names": ("a", "b"),
        "t": (0.1, 0.5, 0.9),
        "x": axis,
        "fraction": np.linspace(0, 1, 2 * 3 * 25).reshape(2, 3, 5, 5),
        "points": rng.uniform(-1, 1, (2, 6, 2)),
        "alpha": np.sqrt(1 - np.array([0.1, 0.5, 0.9])),
    }
    return plots.fraction_maps(**(given | changes))


def ratio_figure() -> Figure:
    curve = np.array([[3.0, 2.0, np.nan], [2.5, 1.8, np.nan], [3.5, 2.2, np.nan]])
    return plots.ratio_curve([0.1, 0.2, 0.4], {"a": curve, "b": 10 * curve}, [0.9, 1.1, 1.5], 1.0, 1.4, 0.2)


GAPS = np.array([[0.1, 0.0], [0.05, 0.0], [0.2, 0.01]])  # (value, low, high) at two places; the second value is zero
LAW = rng.dirichlet(np.ones(20), (2, 3))
EDGES = np.linspace(-1.5, 1.5, 21)
FOUND = Estimate(*torch.from_numpy(GAPS)[[0, 1, 1, 2], None])
DRAW = {
    "training_curves": lambda: plots.training_curves(
        "training_gap", [0, 10, 20, 40], {"a": np.ones((3, 4)), "b": np.zeros((3, 4))}, {"limit": 0.5}, {"here": 15.0}
    ),
    "training_levels": lambda: plots.training_levels(
        [0.1, 1.0], [0, 10], {"a": np.ones((3, 2, 2))}, {"ideal": [0.5, 0.0]}
    ),
    "curve_panels": lambda: plots.curve_panels(plots.Panel([1, 2], {"a": GAPS}, "x", "y"), share=True),
    "difference_rows": lambda: plots.difference_rows(
        ["first", "second"], {"W₁": {"one model": Estimate(*torch.tensor(GAPS)[[0, 0, 1, 2]])}}
    ),
    "end_images": lambda: plots.end_images(
        np.zeros((2, 4, 4)), np.zeros((2, 3, 4, 4)), "ab", [("g", 1), ("h", 2)], np.eye(2, 3), [["n"] * 3] * 2
    ),
    "gap_curves": lambda: plots.gap_curves([0, 1], {"a": GAPS}, [10, 30], {"b": GAPS}, GAPS, 0.01),
    "gap_shares": lambda: plots.gap_shares(
        [0.5, 1.0],
        {"euler": {"J1": FOUND}, "heun": {"J1": FOUND}},
        ["eps = 1"],
        {"euler": [0.03], "heun": [0]},
        {"J1": FOUND},
    ),
    "kernel_maps": lambda: plots.kernel_maps(
        np.linspace(-1, 1, 5),
        {"V": rng.uniform(1, 2, (2, 5, 5))},
        rng.uniform(size=(2, 5, 5)),
        np.zeros((2, 3, 2)),
        "ab",
        [["n"], [""]],
        "tr V",
    ),
    "single_laws": lambda: plots.single_laws({"a": np.eye(3, 20), "b": np.eye(2, 20)}, EDGES, [-1, 1], (0.25, 0.75)),
    "law_grid": lambda: plots.law_grid(
        EDGES,
        {"J1": (LAW, LAW / 2, 2 * LAW)},
        exact=LAW[:, 0],
        noised=(EDGES, np.ones((2, 21))),
        rows="ab",
        columns="cde",
        notes=[["n"] * 3] * 2,
        gap=(0.25, 0.75),
    ),
    "law_panels": lambda: plots.law_panels(
        {"a": LAW[0], "b": LAW[1]}, list("cde"), EDGES, {"a": [-1, 1], "b": [0]}, (0.25, 0.75), [["n"] * 3] * 2
    ),
    "panel_grid": lambda: plots.panel_grid([plots.Panel([0, 1], {"a": GAPS}, "x", "y", even=True, ticks="pq")] * 4),
    "member_laws": lambda: plots.member_laws(
        EDGES,
        {"J1, a": LAW[0], "J0, b": LAW[1]},
        {"J1, a": [0.2, 0.1, 0], "J0, b": [0.1, 0, 0]},
        (0.25, 0.75),
        "mean of 3",
    ),
    "part_curves": lambda: plots.part_curves([1, 2], {"a": [1.0, 2.0]}, [1, 2], {"a": 1 + GAPS}, {"J1": GAPS}, 1.5),
    "path_bundles": lambda: plots.path_bundles(
        np.eye(2),
        rng.normal(size=(6, 4, 2)),
        [0, 1, 1, 0],
        {"mode": rng.normal(size=(6, 2))},
        rng.uniform(size=(5, 5)),
        {"own": GAPS},
    ),
    "path_maps": lambda: plots.path_maps(
        ["a"],
        np.arange(3.0),
        rng.uniform(size=(1, 3, 3)),
        rng.normal(size=(1, 4, 2)),
        0.5,
        {"ode": rng.normal(size=(1, 6, 2, 2))},
    ),
    "phase_diagram": lambda: plots.phase_diagram([1, 2.5], ["a"], [[1, 2]], [[0.1, 0.2]], names=("x", "y", "z")),
    "plane_laws": lambda: plots.plane_laws(
        rng.uniform(size=(1, 2, 5, 5)), np.zeros((2, 3, 2)), rows="a", columns="bc", limit=1.5, top=1.0
    ),
    "ratio_panels": lambda: plots.ratio_panels([0.5, 10], {"J1": {"a": 1 + GAPS, "b": 2 + GAPS}}),
    "share_curve": lambda: plots.share_curve([0, 1], GAPS, {"nearest": 1 + GAPS[[1, 0, 2]]}),
    "share_curves": lambda: plots.share_curves([0.5, 1], ["all", "t = 1"], *2 * [np.stack([GAPS.T] * 2)]),
    "start_maps": lambda: plots.start_maps(
        [0.1, 0.5, 0.9], EDGES, {"J1": LAW[0]}, {"J1": {"exact": [-1, 0, 1]}}, "start"
    ),
    "value_curves": lambda: plots.value_curves([1, 2], GAPS, names=("x", "y")),
    "variance_panels": lambda: plots.variance_panels(
        [0.5, 1], [0.1], EDGES, ["J1"], np.ones((2, 1, 2, 1, 21)), np.ones((1, 2, 3, 1, 21)), np.ones((1, 21))
    ),
    "noise_factors": lambda: plots.noise_factors(
        [0, 1], {"a": {"one model": 2 * (Estimate(*torch.tensor(GAPS)[[0, 0, 1, 2]]),)}}, {"fresh": 0.02}, "W₁"
    ),
    "noise_profile": lambda: plots.noise_profile(CURVES, collapse_time=0.01, window=(0.02, 0.3), points=100),
    "distances": lambda: plots.distances([0, 1, 1.5, 2]),
    "image_rows": lambda: plots.image_rows({"one": rng.uniform(size=(3, 4, 4)), "two": rng.uniform(size=(3, 4, 4))}),
    "image_row": lambda: plots.image_row(rng.uniform(size=(13, 4, 4)), [str(k) for k in range(13)]),
    "pairs": lambda: plots.pairs(rng.uniform(size=(9, 3, 4, 4)), rng.uniform(size=(9, 3, 4, 4)), ["a"] * 9),
    "scatter_pairs": lambda: plots.scatter_pairs(rng.normal(size=(8, 2)), [1], [[0, 2], [3, 4]]),
    "fraction_maps": fraction_figure,
    "line_maps": line_figure,
    "ratio_curve": ratio_figure,
}


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", DRAW)
def test_every_picture_is_drawn_in_both_themes(name: str, dark: bool) -> None:
    with plots.style(dark=dark):
        figure = DRAW[name]()
    assert isinstance(figure, Figure)
    assert (np.mean(figure.get_facecolor()[:3]) < 0.5) == dark
    assert plots.to_bytes(figure, "png", dpi=40).startswith(b"\x89PNG")


def test_all_names_are_tested() -> None:
    helpers = {"Panel", "save", "style", "to_bytes", "to_data_uri"}
    elsewhere = {
        "agreement_curves",
        "comparison",
        "copy_curve",
        "denoising_errors",
        "explanation",
        "image_moments",
        "membership_losses",
        "neighbour_ratios",
        "responses",
        "thumbnails",
        "score_deviation",
        "twin_curves",
        "twin_frontiers",
        "twin_ratios",
        "twin_samples",
        "twin_variances",
    }  # in test_plots_audits.py, test_compare.py, test_explain_report.py, test_target_noise.py and test_twins.py
    assert set(plots.__all__) == set(DRAW) | helpers | elsewhere


def test_style_leaves_no_trace_and_ignores_what_holds_outside() -> None:
    before = dict(mpl.rcParams)
    with mpl.rc_context({"axes.facecolor": "red", "font.size": 40}):
        figure = plots.distances([1, 2, 3])
    assert figure.axes[0].get_facecolor() == (1, 1, 1, 1)
    assert figure.axes[0].xaxis.label.get_size() < 12
    assert dict(mpl.rcParams) == before
    with pytest.raises(ZeroDivisionError), plots.style(dark=True):
        _ = 1 / 0
    assert plots.distances([1, 2]).get_facecolor() == (1, 1, 1, 1)


def test_the_theme_outside_holds_inside() -> None:
    with plots.style(dark=True), plots.style():
        assert np.mean(plots.distances([1, 2]).get_facecolor()[:3]) < 0.5


def test_noise_profile_holds_its_numbers() -> None:
    figure = plots.noise_profile(CURVES, collapse_time=0.01, window=(0.02, 0.3), points=100)
    axes = figure.axes
    assert len(axes) == 4
    for ax, key in zip(axes, ("noise_fraction", "ess", "mmse", "entropy"), strict=True):
        curve = ax.lines[0]
        np.testing.assert_allclose(curve.get_xdata(), T)
        np.testing.assert_allclose(curve.get_ydata(), CURVES[key])
        assert ax.get_xscale() == "log"
        assert ax.get_ylabel()
        assert any(np.allclose(line.get_xdata(), 0.01) for line in ax.lines)
        assert np.allclose(ax.patches[0].get_extents().x0, ax.transData.transform((0.02, 0))[0])
    assert axes[1].get_yscale() == "log"
    band = axes[0].collections[0].get_paths()[0].vertices
    assert np.isclose(band[:, 1].max(), (RHO + 0.0196).max())
    assert {text.get_text() for text in figure.legends[0].texts} == {
        "ρ(t)",
        "95 % interval",
        "noisy window",
        "collapse time",
    }


def test_noise_profile_without_marks_and_with_unequal_curves() -> None:
    figure = plots.noise_profile(CURVES)
    assert not any(ax.patches for ax in figure.axes)
    with pytest.raises(InputError, match="one value per time"):
        plots.noise_profile(CURVES | {"t": T[:-1]})


@pytest.mark.parametrize(
    "wrap", [list, np.asarray, torch.as_tensor, lambda v: torch.as_tensor(v).requires_grad_(), xarray.DataArray]
)
def test_labelled_arrays_of_every_kind(wrap) -> None:
    figure = plots.noise_profile({key: wrap(value) for key, value in CURVES.items()})
    np.testing.assert_allclose(figure.axes[0].lines[0].get_ydata(), RHO)


@pytest.mark.parametrize("spread", [1.0, 1e4])
def test_distances_counts_every_point(spread: float) -> None:
    nn = np.concatenate([np.zeros(7), np.geomspace(1, spread, 93)])
    ax = plots.distances(nn).axes[0]
    assert sum(patch.get_height() for patch in ax.patches) == 93
    assert "100 points" in ax.get_title()
    assert "7 are copies" in ax.get_title()
    assert ax.get_xscale() == ("log" if spread > 30 else "linear")


def test_distances_refuses_what_is_no_distance() -> None:
    assert plots.distances(np.zeros(3)).axes[0].get_title() == "3 points, of which 3 are copies"
    for bad in ([], [np.nan, 1.0]):
        with pytest.raises(InputError, match="finite"):
            plots.distances(bad)


@pytest.mark.parametrize(
    ("low", "high", "scale"), [(-1, 1, (-1, 1)), (0, 1, (0, 1)), (0, 255, (0, 255)), (-3, 5, (-3, 5))]
)
def test_images_are_scaled_by_the_usual_range(low: float, high: float, scale: tuple[float, float]) -> None:
    images = rng.uniform(low, high, (2, 3, 3))
    images[0, 0, 0], images[0, 0, 1] = low, high
    shown = plots.image_row(images).axes[0].images[0].get_array()
    np.testing.assert_allclose(shown, (images[0] - scale[0]) / (scale[1] - scale[0]))


def test_image_row_wraps_and_keeps_titles() -> None:
    above, below = plots.image_row(rng.uniform(size=(5, 3, 4, 4)), ["a", "b"], per_row=3).axes
    assert (len(above.images), len(below.images)) == (3, 2)
    assert [text.get_text() for ax in (above, below) for text in ax.texts] == ["a", "b"]
    assert above.images[0].get_array().shape == (4, 4, 3)


def test_pairs_stand_one_above_the_other() -> None:
    a, b = rng.uniform(size=(2, 3, 1, 4, 4))
    above, below = plots.pairs(a, b, ["x", "y", "z"]).axes
    np.testing.assert_allclose(above.images[0].get_array(), a[0, 0])
    np.testing.assert_allclose(below.images[2].get_array(), b[2, 0])
    assert [text.get_text() for text in above.texts] == ["x", "y", "z"]


@pytest.mark.parametrize(
    "call",
    [
        lambda: plots.image_row(np.zeros((0, 4, 4))),
        lambda: plots.image_row(np.zeros((2, 5, 4, 4))),
        lambda: plots.image_row(np.zeros((4, 4))),
        lambda: plots.pairs(np.zeros((2, 4, 4)), np.zeros((3, 4, 4))),
        lambda: plots.scatter_pairs(np.zeros((3, 3))),
        lambda: plots.scatter_pairs(np.zeros((3, 2)), [3]),
        lambda: fraction_figure(fraction=np.zeros((2, 3, 5, 4))),
        lambda: line_figure(noisy=np.ones((7, 31))),
        lambda: plots.to_bytes(plots.distances([1]), "gif"),
        lambda: plots.to_data_uri(plots.distances([1]), "pdf"),
    ],
)
def test_what_makes_no_picture_is_refused_with_a_sentence(call) -> None:
    with pytest.raises(InputError, match=r"[.]$"):
        call()


@pytest.mark.parametrize("log", ["", "y"])
def test_panels_hold_their_numbers(log) -> None:
    panel = plots.Panel([0.5, 2], {"a": GAPS}, "x", "y", "title", log, expected={"a": ([1, 2], [3, 4])})
    ax = plots.curve_panels(panel).axes[0]
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [3, 4])
    found = ax.containers[0].lines[0].get_ydata()
    np.testing.assert_allclose(found[np.isfinite(found)], GAPS[0][: 1 if log else 2])  # zero has no place on a log axis
    assert len([text for text in ax.texts if text.arrow_patch is not None]) == bool(log)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["½", "2"]
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title()) == ("x", "y", "title")


def test_references_and_arrows_are_inside_the_picture() -> None:
    zero = np.array([[0.1, 0.0], [0.05, 0.0], [0.2, 1e-6]])
    ax = plots.curve_panels(plots.Panel([0.5, 2], {"a": zero}, "x", "y", log="y")).axes[0]
    assert ax.get_ylim()[0] < 1e-6 / 3  # where the arrow of the zero ends
    figure = DRAW["gap_shares"]()
    for ax in figure.axes[:2]:
        assert ax.get_ylim()[0] < 0  # the axis does not hide the exact score, which is zero
    labels = {text.get_text() for text in figure.legends[0].texts}
    assert labels == {"J1, euler", "J1, heun", "exact score, euler", "exact score, heun"}


def test_no_bar_of_ratios_is_on_both_sides_of_one() -> None:
    bars = ratio_figure().axes[1].patches[:-1]  # the last is the interval
    assert min(abs(bar.get_x() - 1) for bar in bars) < 1e-9
    assert sum(bar.get_height() for bar in bars) == 3


@pytest.mark.parametrize("isolated", [[0, 4], torch.tensor([True, False, False, False, True])])
def test_scatter_pairs_joins_and_rings_the_right_points(isolated) -> None:
    points = rng.normal(size=(5, 2))
    ax = plots.scatter_pairs(points, isolated, [[1, 2], [2, 3]]).axes[0]
    segments = next(c for c in ax.collections if isinstance(c, LineCollection)).get_segments()
    np.testing.assert_allclose(segments, points[[[1, 2], [2, 3]]])
    dots, rings = (c for c in ax.collections if isinstance(c, PathCollection))
    np.testing.assert_allclose(dots.get_offsets(), points)
    np.testing.assert_allclose(rings.get_offsets(), points[[0, 4]])


def test_fraction_maps_share_one_scale() -> None:
    figure = fraction_figure()
    images = [ax.images[0] for ax in figure.axes if ax.images]
    assert len(images) == 6
    assert {image.get_clim() for image in images} == {(0, 1)}
    np.testing.assert_allclose(images[4].get_array(), np.linspace(0, 1, 150).reshape(2, 3, 5, 5)[1, 1])
    assert images[0].get_extent() == [-2.5, 2.5, -2.5, 2.5]
    assert [ax.get_title() for ax in figure.axes[:3]] == ["t = 0.1", "t = 0.5", "t = 0.9"]
    assert "tr C" in figure.axes[-1].get_ylabel()


def test_line_maps_share_one_scale_and_hide_nothing_above_it() -> None:
    figure = line_figure()
    meshes = [c for ax in figure.axes for c in ax.collections if type(c).__name__ == "QuadMesh"]
    left, right = meshes[:2]
    assert left.norm.vmin == right.norm.vmin == 1e-6
    assert left.norm.vmax == right.norm.vmax >= 1
    assert {text.get_text() for text in figure.legends[0].texts} == {"t = 0.038", "t = 0.14", "t = 0.52"}


def test_a_picture_becomes_an_address() -> None:
    figure = plots.distances([1, 2, 3])
    head, _, body = plots.to_data_uri(figure).partition(",")
    assert head == "data:image/png;base64"
    assert base64.b64decode(body).startswith(b"\x89PNG")
    head, _, body = plots.to_data_uri(figure, format="svg").partition(",")
    assert head == "data:image/svg+xml;base64"
    assert b"<svg" in base64.b64decode(body)


@pytest.mark.parametrize("format", ["png", "svg", "pdf"])
def test_the_same_picture_is_the_same_file(format: str) -> None:
    assert plots.to_bytes(plots.distances([1, 2, 3]), format) == plots.to_bytes(plots.distances([1, 2, 3]), format)


def test_save_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = plots.distances([1, 2, 3])
    assert plots.save(figure, tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be made"):
        plots.save(figure, tmp_path / "file" / "a.png")

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("vkernel.core.files.Path.replace", full)
    with pytest.raises(InputError, match="No space left"):
        plots.save(figure, tmp_path / "b.png")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.png", "file"]


def test_discs_have_the_area_of_shares() -> None:
    figure = plots.single_laws(
        {"a": np.array([[0.5, 0.25, 0.0], [0.0, 0.0, 1.0]])}, [-1.5, -0.5, 0.5, 1.5], [0], (0, 1)
    )
    discs = figure.axes[0].collections[0]
    np.testing.assert_allclose(discs.get_offsets(), [[-1, 1], [0, 1], [1, 2]])
    np.testing.assert_allclose(discs.get_sizes() / discs.get_sizes()[-1], [0.5, 0.25, 1])
