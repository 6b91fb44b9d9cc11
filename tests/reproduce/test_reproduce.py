"""The figures' numbers against brute force, symmetries and closed forms; the page, its links, and its refusals."""

from __future__ import annotations

import errno
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import vkernel as vk
from vkernel import reproduce
from vkernel.core.errors import InputError
from vkernel.reproduce import between, cifar_line, figure1, page
from vkernel.reproduce.page import number, percent


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One quick run without CIFAR."""
    folder = tmp_path_factory.mktemp("figures") / "new" / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VKERNEL_DATA", raising=False)
        index = reproduce.run(folder, seed=3, quick=True)
    assert index == (folder / "index.html").resolve()
    return folder


@pytest.fixture(scope="module")
def first(out: Path) -> dict[str, np.ndarray]:
    return dict(np.load(out / "figure1.npz"))


@pytest.fixture(scope="module")
def line(out: Path) -> dict[str, np.ndarray]:
    return dict(np.load(out / "digits_line.npz"))


def brute_force(y: np.ndarray, x: np.ndarray, alpha: float, var: float) -> tuple[float, float]:
    """tr C and |s|² at one place from the definition: every proxy score, its weight, their mean and covariance."""
    proxy = (alpha * y - x) / var
    logit = -0.5 * var * (proxy**2).sum(-1)
    weight = np.exp(logit - logit.max())
    weight /= weight.sum()
    mean = weight @ proxy
    return float(np.trace((weight[:, None] * (proxy - mean)).T @ (proxy - mean))), float(mean @ mean)


def no_picture(run: page.Run, stem: str, draw: object, alt: str, caption: object) -> page.Picture:
    """For tests of numbers alone."""
    return page.Picture(stem, alt, (), 1, 1)


# --- Figure 1 ------------------------------------------------------------------------------------------------------


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
    for t in figure1.TIMES:
        for before, after in zip(
            figure1.noise_and_score(score, x, t), figure1.noise_and_score(score, turned, t), strict=True
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


# --- the line between two images -----------------------------------------------------------------------------------


def digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    return load_digits().images.reshape(-1, 64) / 8 - 1, load_digits().target


def test_the_pair_is_the_nearest_of_different_class(line: dict[str, np.ndarray]) -> None:
    y, labels = digits()
    square = (y**2).sum(1)[:, None] + (y**2).sum(1) - 2 * y @ y.T
    square[labels[:, None] == labels] = np.inf
    a, b = line["pair"]
    assert labels[a] != labels[b]
    assert line["pair_distance"] ** 2 == pytest.approx(square.min())
    assert line["pair_distance"] == pytest.approx(np.linalg.norm(y[a] - y[b]))


def test_the_line_against_brute_force(line: dict[str, np.ndarray]) -> None:
    y, _ = digits()
    a, b = y[line["pair"]]
    for i, t in enumerate(line["t"]):
        alpha, var = (float(f(torch.tensor(t))) for f in (vk.VP().alpha, vk.VP().S))
        for j in range(0, len(line["lam_clean"]), 5):
            lam = line["lam_clean"][j]
            trace, _ = brute_force(y, alpha * ((1 - lam) * a + lam * b), alpha, var)
            assert line["clean"][i, j] == pytest.approx(trace * var / 64, rel=1e-4, abs=1e-12)


def test_with_noise_the_ends_are_as_noisy_as_the_set(line: dict[str, np.ndarray]) -> None:
    """At t where all points compete, what a draw shows and what the set shows on average agree."""
    assert np.isfinite(line["noisy"]).all()
    assert (line["noisy"] >= 0).all()
    k = int(np.argmin(abs(line["t"] - 0.5)))
    assert line["noisy"][k].mean() == pytest.approx(line["rho"][k], rel=0.3)
    assert line["chosen_t"] == line["t"][line["rho"].argmax()]


def test_the_number_is_what_its_words_say(line: dict[str, np.ndarray]) -> None:
    _, labels = digits()
    pairs, ratios = line["ratio_pairs"], line["ratio_at_chosen"]
    assert len(np.unique(pairs)) == pairs.size  # no image twice
    assert (labels[pairs[:, 0]] != labels[pairs[:, 1]]).all()
    logs = np.log(ratios)
    value, low, high = line["ratio"]
    assert value == pytest.approx(math.exp(logs.mean()))
    se = logs.std(ddof=1) / math.sqrt(len(logs))
    assert math.log(high / value) == pytest.approx(2.093 * se, rel=1e-3)  # Student's quantile for 20 pairs
    assert math.log(value / low) == pytest.approx(2.093 * se, rel=1e-3)
    k = list(line["ratio_t"]).index(line["chosen_t"])
    np.testing.assert_allclose(line["ratio_noisy"][:, k], line["ratio"])


def test_the_bare_ratio_against_brute_force(line: dict[str, np.ndarray]) -> None:
    y, _ = digits()
    k = list(line["ratio_t"]).index(line["chosen_t"])
    alpha, var = (float(f(torch.tensor(float(line["chosen_t"])))) for f in (vk.VP().alpha, vk.VP().S))
    logs = []
    for a, b in line["ratio_pairs"]:
        ends = [brute_force(y, alpha * y[i], alpha, var)[0] for i in (a, b)]
        logs.append(math.log(brute_force(y, alpha * (y[a] + y[b]) / 2, alpha, var)[0] / np.mean(ends)))
    assert line["ratio_clean"][0, k] == pytest.approx(math.exp(np.mean(logs)), rel=1e-4)


def test_the_jackknife_takes_out_the_bias_of_the_logarithm() -> None:
    g = torch.Generator().manual_seed(0)
    draws = -torch.rand((4, 3, 40_000), generator=g, dtype=torch.float64).log()  # exponential, mean 1: log ratio 0
    plain = between._log_ratio(draws.mean(0, keepdim=True)).mean()
    assert abs(plain) > 0.05
    assert abs(between._log_ratio(draws).mean()) < abs(plain) / 3
    assert between._log_ratio(torch.zeros(1, 3, 2)).isnan().all()


@pytest.mark.parametrize(
    ("ratio", "words"), [([2, 1.5, 2.5], "above 1"), ([0.5, 0.4, 0.6], "below 1"), ([1, 0.9, 1.1], "holds 1")]
)
def test_the_verdict_follows_the_interval(ratio: list[float], words: str) -> None:
    rho = vk.Estimate(torch.tensor([0.1]), torch.tensor([0.01]), None, None)
    finding = between._finding("digits", ratio, ratio, 20, 0.2, rho, 0)
    assert f"The interval {'lies ' if words != 'holds 1' else ''}{words}" in finding.words[1]


def test_cifar_is_made_where_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = os.environ.get("VKERNEL_DATA", "")
    if not (root and (Path(root) / "cifar10").is_dir()):
        pytest.skip("VKERNEL_DATA names no folder with cifar10/")
    monkeypatch.setattr(page.Run, "picture", no_picture)
    exhibit = cifar_line.make(page.Run(tmp_path, 0, True, lambda share: None))
    saved = np.load(tmp_path / exhibit.data)
    assert saved["clean"].shape == (7, 13)
    assert np.isfinite(saved["ratio"]).all()


@pytest.mark.parametrize("labels", [None, "[1, 2]", '{"0": [1, 2]}', '{"zero": [1]}'])
def test_cifar_is_skipped_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, labels: str | None) -> None:
    from PIL import Image

    (tmp_path / "cifar10").mkdir()
    Image.new("RGB", (1024, 3)).save(tmp_path / "cifar10" / "cifar10_batch_0.png")
    if labels is not None:
        (tmp_path / "cifar10" / "labels.json").write_text(labels)
    monkeypatch.setenv("VKERNEL_DATA", str(tmp_path))
    with pytest.raises(page.Skip, match=r"labels\.json .*[.]$"):
        cifar_line.make(page.Run(tmp_path, 0, True, lambda share: None))


# --- the page ------------------------------------------------------------------------------------------------------


class Links(HTMLParser):
    """Every address on a page, every image, every id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.images: list[dict[str, str]] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attrs}
        self.addresses += [given[key] for key in ("href", "src", "srcset") if key in given]
        self.ids.add(given.get("id", ""))
        if tag == "img":
            self.images.append(given)


def test_every_link_leads_somewhere_and_every_image_is_told(out: Path) -> None:
    from PIL import Image

    links = Links((out / "index.html").read_text())
    assert len(links.images) == len(list(out.glob("*-dark.png"))) >= 3
    for address in links.addresses:
        if address.startswith("#"):
            assert address[1:] in links.ids
        elif address.startswith("http"):
            assert address == "https://arxiv.org/abs/2504.12532"
        else:
            assert (out / address).stat().st_size > 0, address
    for image in links.images:
        assert len(image["alt"]) > 80
        assert Image.open(out / image["src"]).size == (int(image["width"]), int(image["height"]))
    linked = set(links.addresses) | {"index.html"}
    assert {file.name for file in out.iterdir()} <= linked  # nothing is left that no one finds, no temporary file


def test_the_page_tells_what_was_computed(out: Path, first: dict, line: dict) -> None:
    text = (out / "index.html").read_text().replace("\u00a0", " ")
    assert "<!doctype html>" in text
    assert "prefers-color-scheme: dark" in text
    assert "Vastola" in text
    assert "ICLR 2025" in text
    assert not re.search(r"\bnan\b|\binf\b|\{\{|None", text)
    assert f"{number(float(line['ratio'][0]))} times" in text
    assert f"95 % interval {number(float(line['ratio'][1]))} to {number(float(line['ratio'][2]))}" in text
    for share in first["share_above_half"].flat:
        assert f"<td>{percent(share)}</td>" in text
    assert number(float(first["noise_at_points"][0, 1].max())) in text
    assert "--seed 3" in text
    assert vk.__version__ in text
    assert "CIFAR images</b> was not made. Set the environment variable VKERNEL_DATA" in text


def test_the_same_seed_gives_the_same_numbers(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("VKERNEL_DATA", raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(page.Run, "picture", no_picture)
        reproduce.run(tmp_path / "same", seed=3, quick=True)
        reproduce.run(tmp_path / "other", seed=4, quick=True)
    for name in ("figure1.npz", "digits_line.npz"):
        assert (tmp_path / "same" / name).read_bytes() == (out / name).read_bytes()
    a, b = (np.load(tmp_path / folder / "digits_line.npz") for folder in ("same", "other"))
    np.testing.assert_array_equal(a["clean"], b["clean"])
    assert not np.array_equal(a["noisy"], b["noisy"])
    assert not np.array_equal(a["ratio_pairs"], b["ratio_pairs"])
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1].endswith(str((tmp_path / "other" / "index.html").resolve()))
    assert "CIFAR" in printed.err


def test_exhibits_are_found_and_in_order() -> None:
    modules = reproduce.exhibits()
    assert [module.__name__.rpartition(".")[2] for module in modules[:3]] == ["figure1", "digits_line", "cifar_line"]
    for module in modules:
        assert module.TITLE
        assert module.SECONDS > 0


def only(monkeypatch: pytest.MonkeyPatch, make) -> None:
    monkeypatch.setattr(reproduce, "exhibits", lambda: [SimpleNamespace(TITLE="A <b>", SECONDS=1.0, make=make)])


def small(run: page.Run) -> page.Exhibit:
    return page.Exhibit("a", "A <b>", (), run.arrays("a", x=[1.0]), "One number.")


def test_a_new_module_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, small)
    text = reproduce.run(tmp_path).read_text()
    assert "A &lt;b&gt;" in text
    assert 'href="a.npz"' in text


@pytest.mark.parametrize("below", ["", "sub"])
def test_a_file_in_the_way_is_refused_at_the_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str) -> None:
    only(monkeypatch, lambda run: pytest.fail("work was done before the folder was tried"))
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(InputError, match="a file is in its place"):
        reproduce.run(tmp_path / "taken" / below)
    assert (tmp_path / "taken").read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_refused_at_the_door(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, lambda run: pytest.fail("work was done before the folder was tried"))
    with monkeypatch.context() as patch:

        def denied(*args: object, **kwargs: object) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

        patch.setattr(Path, "mkdir", denied)
        with pytest.raises(InputError, match="cannot be made: Permission denied"):
            reproduce.run(tmp_path / "new")
        patch.undo()
        patch.setattr("vkernel.core.files.tempfile.mkstemp", denied)
        with pytest.raises(InputError, match=r"Cannot write .*: Permission denied\."):
            reproduce.run(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="Cannot write"):
        reproduce.run(tmp_path)


def test_a_full_disk_is_one_sentence_and_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, small)
    (tmp_path / "a.npz").write_bytes(b"old")
    replace = Path.replace

    def full(path: Path, target: Path) -> Path:
        if path.stat().st_size:
            raise OSError(errno.ENOSPC, "No space left on device")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(InputError, match=r"Cannot write .*a\.npz: No space left on device\."):
        reproduce.run(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["a.npz"]
    assert (tmp_path / "a.npz").read_bytes() == b"old"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1.3949, "1.39"), (0.0123456, "0.0123"), (9.5, "9.50"), (12345.6, "12,346"), (3.14e-20, "3.1 · 10⁻²⁰")],
)
def test_numbers_for_sentences(value: float, text: str) -> None:
    assert number(value) == text
    assert [percent(v) for v in (0.0643, 0.0996, 0.27)] == ["6.4 %", "10 %", "27 %"]


@pytest.mark.slow
def test_the_full_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VKERNEL_DATA", raising=False)
    reproduce.run(tmp_path)
    value, low, high = np.load(tmp_path / "digits_line.npz")["ratio"]
    assert 1.2 < low < value < high < 1.6
