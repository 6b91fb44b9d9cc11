"""Stores of vkernel 0.1 are read, shown, plotted and exported, but not continued.

``data/store-0.1.zip`` was written by vkernel 0.1.0 (revision 9ae15e8) from ``STUDY``.
"""

from __future__ import annotations

import csv
import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from studies import inf
from typer.testing import CliRunner

from vkernel import InputError, study
from vkernel.cli.commands import app
from vkernel.study import report

STUDY = {
    "title": "A store of vkernel 0.1",
    "question": "Can it still be read?",
    "seed": 0,
    "members": 4,
    "block": 2,
    "data": {"name": "pair"},
    "model": {"per_axis": 4},
    "training": {"draws": 64},
    "sampler": {"samples": 32, "steps": 8},
    "measure": {"gap": [0.25, 0.75], "bins": 12, "times": [0.1], "places": 3},
    "grid": {"objective.K": [1, inf]},
    "figure": {"x": "K", "value": "gap"},
    "finding": {"value": "nearest", "of": {"K": 1}, "to": {"K": inf}, "words": "Distance, J1 over J0"},
}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    with zipfile.ZipFile(Path(__file__).parent / "data" / "store-0.1.zip") as archive:
        archive.extractall(tmp_path)
    return tmp_path / "store"


def contents(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def test_it_is_read_shown_plotted_and_exported(old: Path, tmp_path: Path) -> None:
    before = contents(old)
    ds = study.load(old)
    assert ds.attrs["vkernel"] == "0.1.0"
    assert "results" not in ds.attrs
    assert bool(ds["done"].all())
    assert report.sentence(ds).startswith("Distance, J1 over J0: ")
    calls = [("status",), ("show",), ("plot", "--out", tmp_path / "a.png"), ("export", "--out", tmp_path / "a.csv")]
    for command, *options in calls:
        done = CliRunner().invoke(app, ["study", command, str(old), *map(str, options)])
        assert done.exit_code == 0, done.output
    assert (tmp_path / "a.png").stat().st_size > 5000
    rows = list(csv.DictReader(io.StringIO((tmp_path / "a.csv").read_text())))
    assert len(rows) == 8
    for row in rows:
        assert float(row["gap"]) == float(ds["gap"].sel(K=float(row["K"]), member=int(row["member"])))
    assert contents(old) == before


def test_it_is_not_continued(old: Path) -> None:
    before = contents(old)
    with pytest.raises(InputError) as error:
        study.run(STUDY, old, progress=False)
    for words in (
        "version 1",
        "vkernel 0.1.0",
        "shown, plotted and exported",
        "nothing was changed",
        "another --store",
    ):
        assert words in str(error.value)
    assert contents(old) == before


def test_its_study_gives_the_same_numbers_today(old: Path, tmp_path: Path) -> None:
    """The study file of 0.1, and the study that the store of 0.1 recorded, are the same study today."""
    ds = study.load(old).load()
    assert report.spec_of(ds) == study.read(STUDY)
    again = study.run(json.loads(ds.attrs["vkernel_study"]), tmp_path / "new", progress=False)
    assert again.attrs["results"] == 2
    for name in ("away", "nearest", "gap", "share", "density", "score"):
        assert np.allclose(again[name].values, ds[name].values, rtol=1e-6, atol=1e-9), name
