"""Reports of an explanation say what its numbers are: for one network and several, with and without held-out images."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from coarse import draw_coarsely
from explained import RATIOS, explanation
from rich.table import Table

from vkernel.core.errors import InputError
from vkernel.reports.explain.report import Level, answers, by_level, compared, details, tables, verdict

# at σ/α = 8, 2, .5, .1: local explains the middle, pca is best but weak at low noise, none gains at high noise
GAINS = {"local": [0.02, 0.7, 0.6, 0.1], "pca": [0.01, 0.5, 0.7, 0.3]}
NOTHING = {"local": [-0.1, 0.02, -3, -40.0], "pca": [-1, -2, -3, -4.0]}


@pytest.fixture(autouse=True)
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_coarsely(monkeypatch)


def test_the_verdict_names_theories_by_range_of_noise_levels():
    words = verdict(explanation(GAINS), "net")
    assert re.search(r"at σ/α = 0.5 the PCA-local theory explains it best, R²_G = 0.70 \(0.65 to 0.75\)", words)
    assert "at σ/α = 2 the local theory (LS) does, R²_G = 0.70 (0.65 to 0.75)." in words
    assert "At σ/α = 0.1 none does well: the best there, the PCA-local theory, has only R²_G = 0.30" in words
    assert "at σ/α = 8 none is clearly better than the Gaussian theory, whose own R² is 0.90 there." in words
    assert "samples of the PCA-local theory are most like its own: median r² 0.60 (0.50 to 0.70)" in words
    assert "held-out images" in words
    assert "ceiling" not in words
    assert "another network" not in words


def test_two_networks_have_a_ceiling_and_half_of_it_is_enough():
    low = explanation({"local": [0.4] * 4}, ("a", "b"), ceiling=0.7)
    assert "at σ/α = 0.1 … 8 the local theory (LS) explains it best" in verdict(low, "a")
    assert "the ceiling is 0.70" in verdict(low, "a")
    assert "another network (b) has 0.70" in verdict(low, "a")
    assert "none does well" not in verdict(low, "b")
    high = explanation({"local": [0.4] * 4}, ("a", "b"), ceiling=0.9)
    assert verdict(high, "a").startswith("a: no theory explains it well at any of the 4 noise levels")
    assert "has only R²_G = 0.40" in verdict(high, "a")


def test_without_held_out_images_the_verdict_is_on_training_images():
    e = explanation(GAINS, held=False)
    assert "on training images" in verdict(e, "net")
    assert not any("held-out" in line or line.startswith("On training") for line in details(e, "net"))
    assert [grid.title for grid in tables(e, "net")] == [
        "net: gain over the Gaussian theory, R²_G, on training images",
        "net: samples from the same noise",
    ]


def test_where_no_theory_does_well_the_text_says_so():
    e = explanation(NOTHING)
    assert "no theory explains it well at any of the 4 noise levels" in verdict(e, "net")
    assert "At σ/α = 0.1 … 8 none is clearly better than the Gaussian theory" in verdict(e, "net")
    assert not any(cell.startswith("*") for grid in tables(e, "net") for row in grid.rows for cell in row)
    alone = verdict(explanation({}), "net")
    assert "with the Gaussian theory alone, whose R² is 0.90 on held-out images" in alone


def test_floors_and_training_images_qualify_the_verdict():
    e = explanation(GAINS)  # theories of other images gain .1 less: beyond the intervals
    assert any("explains less at σ/α = 0.5 … 2: there the network depends" in line for line in details(e, "net"))
    same = e.denoising.assign(elsewhere=e.denoising.gain, elsewhere_high=e.denoising.gain_high)
    assert any("explains as much at σ/α = 0.5 … 2" in line for line in details(replace(e, denoising=same), "net"))
    assert "On training images the answer is the same." in details(e, "net")
    other = e.denoising.copy(deep=True)
    for name in ("gain", "gain_low"):
        other[name].loc[{"images": "training", "theory": "local"}] = 0.9
    lines = details(replace(e, denoising=other), "net")
    assert "On training images it is explained best at σ/α = 0.1 … 8 by the local theory (LS)." in lines


def test_theories_within_the_interval_of_the_best_are_named():
    close = {"local": [0.7, 0.7, 0.7, 0.7], "pca": [0.1, 0.66, 0.64, 0.67], "Wiener": [-1.0, 0.1, 0.2, 0.3]}
    line = "Not distinguished from the best, within its interval: the PCA-local theory at σ/α = 0.1 and 2."
    assert line in details(explanation(close), "net")  # ± .05
    assert not any("distinguished" in words for words in details(explanation(close, half=0.01), "net"))


def test_r2_of_the_gaussian_theory_follows_from_any_other():
    """R² is .9 of the Gaussian theory and 1 - .1 (1 - gain) of the others, one of which is the network itself."""
    perfect = explanation({"local": [1.0] * 4, "pca": [0.5, -1.0, -30.0, 0.99]})
    for e in (explanation(GAINS), perfect, replace(perfect, denoising=perfect.denoising.isel(theory=[1, 2]))):
        np.testing.assert_allclose([level.gaussian for level in by_level(e, "net", "held-out")], 0.9)


def test_the_text_says_how_many_training_images_each_theory_saw():
    line = compared(explanation(GAINS))[0]
    assert "all 600 (Gaussian); 100 (local (LS), PCA-local), of 600: with all of them" in line
    e = explanation(GAINS, ("class 0", "class 1"))  # of a conditional network: theories of all images of a class
    own = e.denoising.assign_coords(available=("network", [100, 600]))
    own.points[0] = 100
    assert (
        "all 100 … 600 (Gaussian); 100 (local (LS), PCA-local), of 100 … 600:" in compared(replace(e, denoising=own))[0]
    )
    own = own.isel(theory=[0])
    assert compared(replace(e, denoising=own))[0].endswith("was built from: all 100 … 600 (Gaussian).")


def test_a_floor_of_fewer_images_may_be_low_for_want_of_images():
    e = explanation(GAINS)
    assert not any("too few" in line for line in details(e, "net"))
    few = e.denoising.assign_coords(points_elsewhere=e.denoising.points - 40)
    lines = details(replace(e, denoising=few), "net")
    assert any(line.endswith("or the held-out images are too few (60 in place of 100).") for line in lines)


def test_levels_without_a_number_are_left_out():
    e = explanation(GAINS)
    ratio = e.denoising.ratio.copy(data=e.denoising.ratio.where(e.denoising.ratio != 8.0).values)
    part = replace(e, denoising=e.denoising.assign_coords(ratio=ratio))
    assert [level.ratio for level in by_level(part, "net", "held-out")] == sorted(RATIOS)[:3]
    assert tables(part, "net")[0].rows[0] == ("σ/α", "0.1", "0.5", "2")


def test_neighbouring_levels_are_ranges():
    levels = by_level(explanation({"local": [0.9] * 4}), "net", "held-out")

    def where(*marked: int) -> dict[str, str]:
        some = [replace(one, grade="weak") if k in marked else one for k, one in enumerate(levels)]
        return {answer.grade: answer.where for answer in answers(some)}

    assert where() == {"explains": "0.1 … 8"}
    assert where(1) == {"explains": "0.1 and 2 … 8", "weak": "0.5"}
    assert where(0, 2) == {"explains": "0.5 and 8", "weak": "0.1 and 2"}
    assert isinstance(levels[0], Level)


def test_the_table_holds_the_numbers_of_the_data_set():
    e = explanation(GAINS, ("a", "b"))
    rows = {row[0].split("\n")[0]: row[1:] for row in tables(e, "b")[0].rows}
    gain = e.denoising.gain.sel(network="b", images="held-out", theory="local").sortby("ratio").values
    np.testing.assert_allclose([float(cell.lstrip("*").split("\n")[0]) for cell in rows["local (LS)"]], gain)
    assert rows["local (LS)"][2] == "*0.70\n0.65…0.75"  # σ/α = 2
    assert rows["floor: of held-out images"][2].startswith("0.60")
    assert {cell.split("\n")[0] for cell in rows["ceiling"]} == {"0.80"}
    assert set(rows["R² of the Gaussian theory"]) == {"0.90"}
    lines = e.table.splitlines()
    assert sum("*0.70" in line for line in lines) == 8  # two theories, two sets, two networks
    samples = {row[0]: row[1:] for row in tables(e, "a")[-1].rows}
    assert samples["PCA-local"][:2] == ("100", "0.60\n0.50…0.70")
    assert samples["a"][1] == "0.80\n0.75…0.85"  # the ceiling


def test_wide_tables_are_divided_for_the_screen():
    levels = 9
    e = explanation(GAINS)
    wide = e.denoising.isel(level=np.arange(levels) % 4).assign_coords(
        ratio=(("network", "level"), 2.0 ** np.arange(levels)[None])
    )
    shown = [table for table in replace(e, denoising=wide).screen() if isinstance(table, Table)]
    assert [len(table.columns) for table in shown] == [6, 5, 7]  # gains in two parts, samples
    assert all(next(iter(table.columns[0].cells)).plain.startswith("local (LS)") for table in shown[:2])


class Page(HTMLParser):
    """Tags that are open, texts, and addresses outside of the page."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.texts: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.stack += [] if tag in ("meta", "img", "source", "br") else [tag]
        self.outside += [v for k, v in attrs if k in ("src", "href", "srcset") and not (v or "").startswith("data:")]

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.mark.parametrize(("networks", "held"), [(("<b>a & b</b>", "c"), True), (("net",), False)])
def test_the_page_is_whole_and_needs_no_other_file(networks: tuple[str, ...], held: bool, tmp_path: Path):
    e = explanation(GAINS, networks, held)
    page = Page()
    text = e.to_html(tmp_path / "e.html").read_text()
    page.feed(text)
    assert not page.stack
    assert not page.outside
    shown = " ".join(" ".join(page.texts).split()).replace("R² G ", "R²_G ").replace("\u2060", "")
    for name in networks:
        assert verdict(e, name) in shown
    count = 2 + 8 * (len(GAINS) + 2)  # of each network: a figure in two themes, rows of pictures
    assert text.count("data:image/png") == count * len(networks)


def test_the_file_holds_every_number(tmp_path: Path):
    e = explanation(GAINS)
    held = json.loads(e.to_json(tmp_path / "e.json").read_text())
    gain = held["denoising"]["gain"]
    np.testing.assert_array_equal(gain["values"], e.denoising.gain.values)
    assert gain["dimensions"] == list(e.denoising.gain.dims)
    assert np.array(held["denoising"]["ceiling"]["values"]).tolist() == [[[None] * 4] * 2]  # one network has none
    assert held["best"] == {"net": [None, "local", "pca", "pca"]}
    assert held["well"] == {"net": [False, True, True, False]}
    assert held["verdicts"]["net"] == verdict(e, "net")
    assert e.summary.splitlines()[0] == verdict(e, "net")


def test_the_figure_holds_the_curves():
    e = explanation(GAINS, ("a", "b"))
    figure = e.figure()
    assert len(figure.axes) == 4
    found = {line.get_label(): line for line in figure.axes[3].lines}
    np.testing.assert_allclose(found["local (LS)"].get_ydata(), GAINS["local"][::-1])
    np.testing.assert_allclose(found["local (LS)"].get_xdata(), RATIOS[::-1])
    np.testing.assert_allclose(found["ceiling"].get_ydata(), 0.8)
    np.testing.assert_allclose(
        found["floor: theories of held-out images"].get_ydata(), np.max(list(GAINS.values()), 0)[::-1] - 0.1
    )
    assert len(e.figure("b").axes) == 2
    shown = [text.get_text() for text in explanation(GAINS, held=False).figure().legends[0].get_texts()]
    assert shown == ["local (LS)", "PCA-local", "Gaussian theory", "floor: images permuted"]
    assert [ax.get_ylabel() for ax in e.gallery("b").axes] == ["b", "Gaussian", "local (LS)", "PCA-local"]
    with pytest.raises(InputError, match="There is no network 'c'; there are a, b"):
        e.figure("c")
