"""The studies that ship: valid, runnable at a tiny size, drawn, and on the page of ``vkernel reproduce --all``."""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
from exhibits import without_pictures
from typer.testing import CliRunner

from vkernel import plots, reproduce, study as vk_study
from vkernel.cli.commands import app
from vkernel.core.errors import InputError
from vkernel.reproduce.exhibit import Part
from vkernel.study import report, spec as specs

SHIPPED = Path(specs.__file__).parent / "shipped"
FILES = sorted(SHIPPED.glob("*.toml"))
each = pytest.mark.parametrize("name", specs.SHIPPED)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``reproduce --all`` of studies alone, at a size that says nothing."""
    folder = tmp_path_factory.mktemp("all")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reproduce, "exhibits", lambda: [])
        reproduce.run(folder, seed=2, quick=True, everything=True)
    return folder


def test_all_files_are_known_by_name() -> None:
    assert {path.stem for path in FILES} == {*specs.SHIPPED, *specs.SHIPPED_IMAGES}
    assert list(specs.shipped()) == [*specs.SHIPPED, *specs.SHIPPED_IMAGES]
    found = vk_study.read(SHIPPED / "capacity.toml")
    assert vk_study.read("capacity") == found
    assert vk_study.read("examples/studies/capacity.toml") == found, "as in vkernel 0.1"
    for name in ("no such", "elsewhere/capacity.toml"):
        with pytest.raises(InputError, match=f"The study {name} cannot be read"):
            vk_study.read(name)


@each
def test_each_states_its_question_and_has_two_sizes(name: str) -> None:
    path = specs.shipped()[name]
    spec, large = vk_study.read(path), vk_study.read(name, large=True)
    assert spec.question.endswith("?")
    assert spec.title
    assert spec.figure is not None
    assert spec.finding is not None
    assert spec.figure.value == spec.finding.value
    assert spec.sampler.spacing == "log"
    assert large.members > spec.members
    assert large.sampler.samples > spec.sampler.samples
    assert large.sampler.steps > spec.sampler.steps
    assert path.read_text().count("#") >= 5  # it explains itself


@each
def test_each_runs_and_its_number_is_computable(out: Path, name: str) -> None:
    found = vk_study.load(out / "studies" / f"{name}.zarr")
    spec = report.spec_of(found)
    assert found["done"].values.all()
    assert spec.seed == 2
    assert spec.finding is not None
    for where in (spec.finding.of, spec.finding.to):
        values = found[spec.finding.value].sel(where).values
        assert np.isfinite(values).all()
        assert ((values >= 0) & (values <= 1)).all()
    found[spec.finding.value].load()[:] = np.random.default_rng(0).random(found[spec.finding.value].shape) + 0.1
    number = report.finding(found)
    assert number is not None
    assert number.low < number.value < number.high
    assert report.sentence(found).startswith(spec.finding.words)


@each
def test_each_figure_draws_with_readable_axes(out: Path, name: str) -> None:
    found = vk_study.load(out / "studies" / f"{name}.zarr")
    figure = report.figure(found)
    axes = figure.axes[0]
    shown = [axes.get_xlabel(), axes.get_ylabel(), *(t.get_text() for t in axes.get_xticklabels())]
    assert not any("_" in text or "inf" in text for text in shown)
    assert plots.to_bytes(figure, "png", 40).startswith(b"\x89PNG")


def test_the_page_has_them_all(out: Path) -> None:
    text = (out / "index.html").read_text().replace("\u00a0", " ")
    for name in specs.SHIPPED:
        spec = vk_study.read(name)
        assert f'id="study-{name}"' in text
        assert spec.title in text
        assert spec.question.replace("'", "&#39;") in text
        for file in (f"study-{name}.png", f"study-{name}-dark.png", f"study-{name}.svg", f"studies/{name}.csv"):
            assert f'"{file}"' in text
            assert (out / file).stat().st_size > 0
    assert "reproduce --out" in text
    assert "--seed 2 --all" in text
    assert "run the same command with --all" not in text


def test_without_all_the_page_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduce, "exhibits", lambda: [])
    text = reproduce.run(tmp_path, quick=True).read_text()
    assert "run the same command with --all" in text
    assert not (tmp_path / "studies").exists()


def test_again_computes_nothing_and_finds_the_same(out: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = (out / "studies" / "capacity.csv").read_bytes()
    (out / "studies" / "capacity.csv").unlink()
    monkeypatch.setattr("vkernel.study.runners.compute", lambda *a: pytest.fail("a block was computed again"))
    without_pictures(monkeypatch)
    monkeypatch.setattr(reproduce, "exhibits", lambda: [])
    reproduce.run(out, seed=2, quick=True, everything=True)
    assert (out / "studies" / "capacity.csv").read_bytes() == before
    assert "100 % of the models had been computed before." in (out / "index.html").read_text().replace("\u00a0", " ")


def test_another_seed_in_the_same_folder_is_refused_before_any_work(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part("A", 1.0, lambda run: pytest.fail("work was done first"))
    monkeypatch.setattr(reproduce, "exhibits", lambda: [part])
    with pytest.raises(InputError, match=r"another study .* Give another --out\."):
        reproduce.run(out, seed=3, quick=True, everything=True)


def test_a_run_that_is_stopped_leaves_its_page_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second study is interrupted after one block: the first is on the page, and the block is kept."""
    two = dict(list(specs.shipped().items())[:2])
    monkeypatch.setattr(reproduce, "shipped", lambda: two)
    monkeypatch.setattr(reproduce, "exhibits", lambda: [])
    without_pictures(monkeypatch)
    from vkernel.study import runners, work

    seen = {"blocks": 0}

    def compute(spec, condition, block):
        if spec.title == "Forward process and cutoff":
            seen["blocks"] += 1
            if seen["blocks"] == 2:
                raise KeyboardInterrupt
        return work.compute(spec, condition, block)

    with monkeypatch.context() as patch:
        patch.setattr(runners, "compute", compute)
        with pytest.raises(KeyboardInterrupt):
            reproduce.run(tmp_path, quick=True, everything=True)
    text = (tmp_path / "index.html").read_text()
    assert 'id="study-target_noise"' in text
    assert 'id="study-process_and_cutoff"' not in text
    assert int(vk_study.load(tmp_path / "studies" / "process_and_cutoff.zarr")["done"].sum()) == 1
    reproduce.run(tmp_path, quick=True, everything=True)
    assert 'id="study-process_and_cutoff"' in (tmp_path / "index.html").read_text()


def test_processes_are_compared_at_the_same_noise() -> None:
    import torch

    from vkernel.process import from_spec

    for condition in vk_study.read("process_and_cutoff").conditions():
        process = from_spec(condition.process.model_dump())
        eps = torch.tensor(process.eps, dtype=torch.float64)
        ratio = float(process.sigma(eps) / process.alpha(eps))
        assert ratio == pytest.approx(condition.labels["cutoff"], rel=1e-5)


@pytest.mark.parametrize(
    ("process", "said"),
    [
        ({"kind": "vp", "eps": 1e-3, "cutoff": 0.1}, "eps or cutoff, not both"),
        ({"kind": "vp", "cutoff": -1}, "positive number"),
        ({"kind": "vp", "cutoff": "low"}, "positive number"),
        ({"kind": "ve", "cutoff": 1e-6}, "is outside"),
    ],
)
def test_a_cutoff_that_cannot_be_is_refused(process: dict, said: str) -> None:
    raw = tomllib.loads(specs.shipped()["capacity"].read_text())
    raw["process"] = process
    with pytest.raises(InputError, match=said):
        vk_study.read(raw)


def test_the_command_line_lists_them_and_runs_them_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = CliRunner().invoke(app, ["study", "list"])
    assert done.exit_code == 0
    for name in specs.SHIPPED:
        assert f"{name}: " in done.output
    given = {}
    monkeypatch.setattr(reproduce, "run", lambda out, **words: given.update(words))
    assert CliRunner().invoke(app, ["reproduce", "--all", "--workers", "3", "--out", str(tmp_path)]).exit_code == 0
    assert given == {"seed": 0, "everything": True, "workers": 3}


def test_the_study_that_the_how_to_explains_is_one() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "howto" / "studies.md").read_text()
    fence = re.search(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert fence is not None
    raw = tomllib.loads(fence[1])
    assert vk_study.read(raw).shape == (3, 3)
    assert vk_study.read(raw, large=True).members == 1000
    for name in specs.SHIPPED:
        assert f"`{name}`" in page


def test_tiny_changes_sizes_alone() -> None:
    for path in (specs.shipped()[name] for name in specs.SHIPPED):
        raw = tomllib.loads(path.read_text())
        small = reproduce._tiny(raw)
        assert small["grid"] == raw["grid"]
        assert vk_study.read(small).members == 2
        assert math.prod(vk_study.read(small).shape) == math.prod(vk_study.read(raw).shape)
