"""What a study found, its pictures, exports and commands."""

from __future__ import annotations

import csv
import io
import json
import math
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from scipy import stats
from studies import SMALL, grid, inf

from vkernel import InputError, study
from vkernel.study import report, work
from vkernel.study.spec import read
from vkernel.study.store import Store


def filled(tmp_path: Path, values: np.ndarray, **extra: Any) -> xr.Dataset:
    """A store of K = 1, inf and eps = 1e-3, 1e-2 with given numbers, ``(2, 2, members)``."""
    spec = read(
        SMALL
        | {"members": values.shape[-1], "block": values.shape[-1]}
        | {"grid": {"objective.K": [1, inf], "process.eps": [1e-3, 1e-2]}}
        | extra
    )
    with Store.open(tmp_path / "filled", spec) as store:
        for condition in spec.conditions():
            row = values[condition.index]
            rest = {n: np.zeros((len(row), *q.shape)) for n, q in work.layout(spec).items()}
            store.write(condition, 0, rest | {"away": row})
        return study.load(store.path)


RATIO = {"value": "away", "of": {"K": 1, "eps": 1e-3}, "to": {"K": inf, "eps": 1e-3}, "words": "more"}


def test_the_finding_by_hand(tmp_path: Path) -> None:
    source = np.random.default_rng(0)
    shared = source.uniform(0.3, 0.5, 12)
    values = source.uniform(0.1, 0.9, (2, 2, 12))
    values[0, 0], values[1, 0] = shared + source.normal(0.2, 0.01, 12), shared
    values[0, 0, 3] = values[1, 0, 5] = np.nan  # neither counts
    whole = np.isfinite(values[0, 0]) & np.isfinite(values[1, 0])
    a, b = values[0, 0, whole], values[1, 0, whole]
    q = stats.t.ppf(0.975, 9)
    found = report.finding(filled(tmp_path / "ratio", values, finding=RATIO))
    assert found is not None
    terms = a / a.mean() - b / b.mean()
    se = terms.std(ddof=1) / math.sqrt(10)
    assert math.isclose(found.value, a.mean() / b.mean())
    assert math.isclose(found.se, found.value * se)
    assert np.allclose([found.low, found.high], found.value * np.exp([-q * se, q * se]), rtol=1e-3)
    ds = filled(tmp_path / "difference", values, finding=RATIO | {"kind": "difference"})
    found = report.finding(ds)
    assert found is not None
    test = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert math.isclose(found.value, (a - b).mean())
    assert np.allclose([found.low, found.high], [test.low, test.high], rtol=1e-3)
    assert "the interval lies above 0" in report.sentence(ds)
    assert report.sentence(ds).startswith("more: 0.2")
    assert "of the pairs of models; the interval" in report.sentence(ds)


def test_a_finding_averages_over_factors_it_does_not_name(tmp_path: Path) -> None:
    values = np.random.default_rng(1).uniform(0.1, 0.9, (2, 2, 6))
    values[0, 1, 2] = np.nan  # a member that is not there in one cell is not half there
    named = RATIO | {"of": {"K": 1}, "to": {"K": inf}, "kind": "difference"}
    ds = filled(tmp_path, values, finding=named)
    found = report.finding(ds)
    assert found is not None
    pairs = np.delete(values, 2, axis=2).mean(1)
    assert math.isclose(found.value, float((pairs[0] - pairs[1]).mean()))
    test = stats.ttest_rel(*pairs).confidence_interval(0.95)
    assert np.allclose([found.low, found.high], [test.low, test.high], rtol=3e-3)


def test_findings_that_are_not_known(tmp_path: Path) -> None:
    assert report.finding(filled(tmp_path / "a", np.ones((2, 2, 3)))) is None
    assert report.sentence(filled(tmp_path / "a", np.ones((2, 2, 3)))) == ""
    zero = filled(tmp_path / "b", np.zeros((2, 2, 3)), finding=RATIO)
    assert "not known yet, or a share is zero" in report.sentence(zero)
    nothing = filled(tmp_path / "c", np.full((2, 2, 3), np.nan), finding=RATIO)
    assert report.finding(nothing) is None
    equal = filled(tmp_path / "d", np.full((2, 2, 3), 0.5), finding=RATIO)
    assert "holds 1: no difference is shown" in report.sentence(equal)


def test_means_with_members_that_are_nan(tmp_path: Path) -> None:
    values = np.random.default_rng(2).uniform(size=(2, 2, 7))
    values[0, 1, 2:4] = np.nan
    values[1, 0, 1:] = np.nan  # one is left
    values[1, 1] = np.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = report.means(filled(tmp_path, values))
    assert found["away_members"].values.tolist() == [[7, 5], [1, 0]]
    for i, j in ((0, 0), (0, 1)):
        row = values[i, j][np.isfinite(values[i, j])]
        test = stats.ttest_1samp(row, 0).confidence_interval(0.95)
        assert math.isclose(float(found["away"][i, j]), row.mean())
        assert math.isclose(float(found["away_se"][i, j]), stats.sem(row))
        ends = [float(found["away_low"][i, j]), float(found["away_high"][i, j])]
        assert np.allclose(ends, [test.low, test.high], atol=1e-3), "its own number of members, not the least"
    assert math.isclose(float(found["away"][1, 0]), values[1, 0, 0])
    assert np.isnan(found["away_se"][1, 0])
    assert np.isnan(found["away"][1, 1])
    assert found["away"].attrs["long_name"]
    assert found["density"].dims == ("K", "eps", "x")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small") / "store"
    spec = SMALL | {
        "grid": {"objective.K": [1, 4, inf], "process.eps": [1e-3, 1e-2]},
        "measure": {"gap": [0.25, 0.75]},
        "figure": {"x": "K", "lines": "eps", "value": "gap"},
        "finding": RATIO | {"value": "nearest"},
    }
    study.run(spec, path, progress=False)
    return path


@pytest.mark.parametrize(
    "wanted",
    [
        None,
        {"x": "K"},
        {"x": "eps", "lines": "K", "log": True, "title": "the title"},
        {"x": "K", "y": "eps"},
        {"x": "eps", "y": "K", "value": "gap"},
    ],
)
def test_figures(small: Path, wanted: dict[str, Any] | None) -> None:
    ds = study.load(small).load()
    spec = json.loads(ds.attrs["vkernel_study"])
    figure = report.figure(ds.assign_attrs(vkernel_study=json.dumps(spec | {"figure": wanted})))
    out = io.BytesIO()
    figure.savefig(out)
    assert len(out.getvalue()) > 5000
    if wanted and "title" in wanted:
        assert figure.axes[0].get_title() == "the title"
    if wanted and "y" in wanted:
        assert len(figure.axes) == 2, "a map with its bar"


def test_a_figure_of_nothing_yet_and_of_no_factors(tmp_path: Path) -> None:
    with Store.open(tmp_path / "a", read(grid(objective__K=[1, 2]))) as opened:
        ds = study.load(opened.path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        report.figure(ds).savefig(io.BytesIO())
        report.table(ds)
    with pytest.raises(InputError, match="without factors"):
        report.figure(study.run(SMALL, tmp_path / "b", progress=False))


def test_a_store_whose_study_cannot_be_read(small: Path) -> None:
    ds = study.load(small)
    for text in ("what?", "{}", json.dumps(json.loads(ds.attrs["vkernel_study"]) | {"nope": 1})):
        with pytest.raises(InputError, match="cannot be read"):
            report.spec_of(ds.assign_attrs(vkernel_study=text))


def test_exports_are_read_back_equal(small: Path, tmp_path: Path) -> None:
    ds = study.load(small).load()
    rows = list(csv.DictReader(io.StringIO(report.export(small, tmp_path / "s.csv").read_text())))
    assert len(rows) == 30
    assert set(rows[0]) == {"K", "eps", "member", "away", "nearest", "gap"}
    for row in rows:
        cell = ds.sel(K=float(row["K"]), eps=float(row["eps"]), member=int(row["member"]))
        for name in ("away", "nearest", "gap"):
            assert float(row[name]) == float(cell[name])
    with pytest.raises(InputError, match=r"\.nc, \.csv or \.npz"):
        report.export(small, tmp_path / "s.xls")
    with pytest.raises(InputError, match="no store"):
        report.export(tmp_path / "nothing", tmp_path / "s.csv")
    pytest.importorskip("h5netcdf", reason="NetCDF needs h5netcdf: pip install 'vkernel[study]'")
    found = xr.open_dataset(report.export(small, tmp_path / "deep" / "s.nc"), engine="h5netcdf").load()
    assert set(found.variables) == set(ds.variables)
    for name in ds.variables:
        assert np.array_equal(found[name].values, ds[name].values, equal_nan=ds[name].dtype.kind == "f"), name
        assert found[name].attrs == ds[name].attrs
    assert found.attrs["vkernel_study"] == ds.attrs["vkernel_study"]


# How far it is


def test_progress(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("vkernel.core.progress.EVERY", 0.0)
    spec, seen = grid(objective__K=[1, inf]), []
    with Store.open(tmp_path / "s", read(spec)) as store:
        first = next(iter(store.spec.conditions()))
        store.write(first, 0, work.compute(store.spec, first, 0))
    study.run(spec, tmp_path / "s")
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[0] == "1 of 6 blocks are there already."
    assert lines[1].startswith("small: 17 % after")
    assert lines[2].startswith("K = 1: 33 % after")
    assert lines[-1].startswith("K = inf: 100 % after")
    study.run(spec, tmp_path / "quiet", progress=False)
    study.run(spec, tmp_path / "called", progress=lambda label, share: seen.append((label, round(6 * share))))
    assert seen == [("small", 0), *(("K = 1", k) for k in (1, 2, 3)), *(("K = inf", k) for k in (4, 5, 6))]
    assert capsys.readouterr().err == ""


def test_wrong_runners(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="inline, threads, ray"):
        study.run(SMALL, tmp_path / "s", "nope")
    with pytest.raises(InputError, match="address is for the runner 'ray'"):
        study.run(SMALL, tmp_path / "s", address="auto")
    assert not (tmp_path / "s").exists()


# The command line


def vkernel(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vkernel.cli", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    file, path = tmp_path / "study.toml", tmp_path / "store"
    file.write_text("""
title = "Noise of the target"
members = 4
block = 3
data.name = "pair"
model.per_axis = 4
training.draws = 64
sampler = { samples = 16, steps = 8 }
grid.objective.K = [1, inf]
figure = { x = "K" }
finding = { value = "nearest", of = { K = 1 }, to = { K = inf }, words = "farther" }
""")
    got = vkernel("study", "run", file, "--store", path)
    assert got.returncode == 0, got.stderr
    assert "Noise of the target" in got.stdout
    assert "farther: " in got.stdout
    assert got.stdout.endswith(f"results are in {path}\n") or "results are in" in got.stdout
    assert got.stderr == ""
    code, out, err = called(capsys, monkeypatch, "study", "run", file, "--store", path, "--quiet")
    assert (code, out.split(), err) == (0, f"results are in {path}".split(), "")


def called(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: object) -> tuple[int, str, str]:
    """The command line, in this process."""
    from vkernel import cli

    monkeypatch.setattr(sys, "argv", ["vkernel", *map(str, args)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    got = capsys.readouterr()
    return int(left.value.code or 0), got.out, got.err


def test_status_show_plot_export(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(*args: object) -> str:
        code, out, err = called(capsys, monkeypatch, "study", *args)
        assert (code, err) == (0, "")
        return out

    status = call("status", small)
    assert "small: 18 of 18 blocks of 2 members" in status
    assert "K = inf, eps = 0.01: 5 of 5 members" in status
    shown = call("show", small)
    assert "±" in shown
    assert "more: " in shown
    for name in ("a.png", "b.svg", "deep/c.pdf"):
        assert "wrote" in call("plot", small, "--out", tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    assert "wrote" in call("export", small, "--out", tmp_path / "s.csv")
    with Store.open(tmp_path / "part", read(SMALL)) as store:
        only = next(iter(store.spec.conditions()))
        store.write(only, 2, work.compute(store.spec, only, 2))  # the short one first, as a cluster may
    assert "1 of 3 blocks" in call("status", tmp_path / "part")
    assert "the one condition: 1 of 5 members" in call("status", tmp_path / "part")
    call("show", tmp_path / "part")


def test_the_command_line_refuses_in_one_sentence(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*args: object) -> str:
        code, out, err = called(capsys, monkeypatch, "study", *args)
        assert code == 2, err
        assert out == ""
        assert len(err.strip().splitlines()) == 1, err
        assert err.startswith("vkernel: ")
        return err

    bad = tmp_path / "bad.toml"
    bad.write_text('title = "t"\nmembers = 3\nblock = 2\n[data]\nnmae = "pair"')
    assert "data.nmae" in refuses("run", bad, "--store", tmp_path / "s")
    assert "missing.toml" in refuses("run", tmp_path / "missing.toml", "--store", tmp_path / "s")
    bad.write_text('title = "t"\nmembers = 3\nblock = 2\n[data]\nname = "pair"\n[training]\ndraws = 9')
    assert "inline, threads, ray" in refuses("run", bad, "--store", tmp_path / "s", "--runner", "nope")
    assert "another study" in refuses("run", bad, "--store", small)
    assert "store" in refuses("run", bad)
    assert "no [large] table" in refuses("run", bad, "--store", tmp_path / "s", "--large")
    for command in ("status", "show"):
        assert "no store at" in refuses(command, tmp_path / "nothing")
        assert "not a store" in refuses(command, bad)
    refuses("plot", small, "--out", tmp_path / "a.xyz")
    refuses("plot", tmp_path / "nothing")
    assert ".csv" in refuses("export", small, "--out", tmp_path / "a.xyz")
    assert not (tmp_path / "s").exists()
