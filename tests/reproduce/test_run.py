"""The page of ``vkernel reproduce``: what it says, its links, its files, and what it refuses."""

from __future__ import annotations

import errno
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from exhibits import Made, check, without_pictures

import vkernel as vk
from vkernel import reproduce
from vkernel.core.errors import InputError
from vkernel.core.estimate import Estimate
from vkernel.reproduce import exhibit
from vkernel.reproduce.exhibit import Exhibit, Page, Part, Run, Skip, number, one_thread, percent


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


def test_every_exhibit_is_complete(made: Made) -> None:
    names = [part.make.__name__ for part in reproduce.exhibits()]
    assert list(made.exhibits) == [name for name in names if name != "cifar_line"]
    check(made)


def test_every_link_has_a_target_and_every_image_a_text(made: Made) -> None:
    from PIL import Image

    out = made.out
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


def test_the_page_states_what_was_computed(made: Made) -> None:
    first, line = made.arrays["figure1"], made.arrays["digits_line"]
    text = (made.out / "index.html").read_text().replace("\u00a0", " ")
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
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("VKERNEL_DATA", raising=False)
    few = reproduce.exhibits()[:3]
    with monkeypatch.context() as patch:
        without_pictures(patch)
        patch.setattr(reproduce, "exhibits", lambda: few)
        reproduce.run(tmp_path / "same", seed=3, quick=True)
        reproduce.run(tmp_path / "other", seed=4, quick=True)
    for name in ("figure1.npz", "digits_line.npz"):
        assert (tmp_path / "same" / name).read_bytes() == (made.out / name).read_bytes()
    a, b = (np.load(tmp_path / folder / "digits_line.npz") for folder in ("same", "other"))
    np.testing.assert_array_equal(a["clean"], b["clean"])
    assert not np.array_equal(a["noisy"], b["noisy"])
    assert not np.array_equal(a["ratio_pairs"], b["ratio_pairs"])
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1].endswith(str((tmp_path / "other" / "index.html").resolve()))
    assert "CIFAR" in printed.err


def test_exhibits_are_found_and_in_order() -> None:
    parts = reproduce.exhibits()
    assert [part.make.__name__ for part in parts[:3]] == ["figure1", "digits_line", "cifar_line"]
    assert len({part.name for part in parts}) == len(parts)
    for part in parts:
        assert part.title
        assert part.seconds > 0


def only(monkeypatch: pytest.MonkeyPatch, make) -> None:
    monkeypatch.setattr(reproduce, "exhibits", lambda: [Part("A <b>", 1.0, make)])
    monkeypatch.setattr(exhibit, "read", lambda name: {"sizes": "One number.", "scorecard": []})


def small(run: Run) -> Exhibit:
    return Page(run, "a", {"x": [1.0]}).exhibit(1.0)


def test_a_function_and_a_text_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, small)
    text = reproduce.run(tmp_path).read_text()
    assert "A &lt;b&gt;" in text
    assert 'href="a.npz"' in text


@pytest.mark.parametrize("below", ["", "sub"])
def test_a_file_in_the_way_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str) -> None:
    only(monkeypatch, lambda run: pytest.fail("work was done before the folder was tried"))
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(InputError, match="is a file, not a folder"):
        reproduce.run(tmp_path / "taken" / below)
    assert (tmp_path / "taken").read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, lambda run: pytest.fail("work was done before the folder was tried"))
    with monkeypatch.context() as patch:

        def denied(*args: object, **kwargs: object) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

        patch.setattr(Path, "mkdir", denied)
        with pytest.raises(InputError, match=r"Cannot write .*: Permission denied\."):
            reproduce.run(tmp_path / "new")
        patch.undo()
        patch.setattr(Path, "touch", denied)
        with pytest.raises(InputError, match=r"Cannot write .*: Permission denied\."):
            reproduce.run(tmp_path)


def test_a_read_only_folder_and_another_page_are_refused(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("mine")
    with pytest.raises(InputError, match="did not write"):
        reproduce.run(tmp_path)
    assert (tmp_path / "index.html").read_text() == "mine"
    (tmp_path / "index.html").unlink()
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="is read-only"):
        reproduce.run(tmp_path)


def test_a_full_disk_is_one_sentence_and_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, small)
    for name in ("a.npz", "scorecard.json"):
        (tmp_path / name).write_bytes(b"old")
    replace = Path.replace

    def full(path: Path, target: Path) -> Path:
        if path.stat().st_size:
            raise OSError(errno.ENOSPC, "No space left on device")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(InputError, match=r"Cannot write .*a\.npz: No space left on device\."):
        reproduce.run(tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"a.npz": b"old", "scorecard.json": b"old"}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (30, "30"),
        (1500, "1,500"),
        (1.3949, "1.39"),
        (0.0123456, "0.0123"),
        (9.5, "9.50"),
        (12345.6, "12,346"),
        (3.14e-20, "3.1 · 10⁻²⁰"),
    ],
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


def test_estimates_for_sentences() -> None:
    found = Estimate(0.5, 0.1, 0.25, 0.75)
    assert exhibit.interval(found) == "0.250 to 0.750"
    assert exhibit.estimate(found, "%") == "50 % (25 % to 75 %)"
    assert exhibit.estimate((0.5, 0.25, 0.75), "+.1f", 2) == "+0.5 (0.25 to 0.75)"
    assert exhibit.mean(torch.tensor([1.0, 1.0])) == "1.000 ± 0.000"


def test_texts_are_templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = {"sizes": "{{ x }} %", "opening": ["{% if x > 1 %}large{% endif %}", "P = {{ text('sizes') }}"]}
    text["tables"] = {
        "a": {"caption": "A", "cells": "\nname | value\n{% for v in (1, 2) %}\n{{ v }} | {{ v * x }}\n{% endfor %}"}
    }
    monkeypatch.setattr(exhibit, "read", lambda name: text)
    found = Page(Run(tmp_path, 0, True, print), "a", {"x": 1}).exhibit()
    assert found.opening == ("P\u00a0=\u00a01\u00a0%",)  # an empty paragraph is left out
    assert found.tables[0].head == ("name", "value")
    assert found.tables[0].rows == (("1", "1"), ("2", "2"))


def test_a_quick_run_replaces_values_of_the_study(tmp_path: Path) -> None:
    full, quick = (Run(tmp_path, 7, flag, print).spec("v_lazy") for flag in (False, True))
    assert full["seed"] == quick["seed"] == 7
    assert (full["members"], quick["members"]) == (72, 16)
    assert quick["sampler"] == full["sampler"] | {"samples": 12, "first": 8, "steps": 6}
    assert quick["grid"]["model.tau"] == [1.0, 1e2, 1e4]


def test_threads_are_given_back(tmp_path: Path) -> None:
    before = torch.get_num_threads()

    @one_thread()
    def fails(run: Run) -> Exhibit:
        assert torch.get_num_threads() == 1
        raise Skip("no")

    with pytest.raises(Skip):
        fails(Run(tmp_path, 0, True, lambda share: None))
    assert torch.get_num_threads() == before
