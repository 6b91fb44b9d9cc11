"""Blocks in threads: the same bits as one after the other, models trained once, warnings as before."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import xarray

from vkernel import study
from vkernel.study import work

SPEC = {
    "title": "a",
    "members": 4,
    "block": 2,
    "data": {"name": "triple"},
    "model": {"kind": "linear", "per_axis": 6},
    "training": {"draws": 30},
    "grid": {
        "objective.K": [1, float("inf")],
        "sampler": {"name": "scheme", "labels": ["a", "b"], "values": [{"steps": 5}, {"steps": 9, "samples": 20}]},
    },
}


def test_threads_are_inline_bit_for_bit(tmp_path: Path) -> None:
    filters = list(warnings.filters)
    found = [study.run(SPEC, tmp_path / runner, runner, progress=False).load() for runner in ("inline", "threads")]
    xarray.testing.assert_identical(*(ds.drop_attrs() for ds in found))
    assert warnings.filters == filters


def test_conditions_with_equal_models_share_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[int]] = []
    train = work.train_ensemble

    def counted(*given: object, members: list[int], **options: object) -> object:
        made.append(members)
        return train(*given, members=members, **options)

    monkeypatch.setattr(work, "train_ensemble", counted)
    study.run(SPEC | {"block": 4}, tmp_path / "a", "threads", progress=False)
    assert made == [[0, 1, 2, 3]] * 2  # J1 and J0, each for both samplers


def test_a_mistake_in_a_thread_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(work, "train_ensemble", fails)
    with pytest.raises(KeyboardInterrupt):
        study.run(SPEC, tmp_path / "a", "threads", progress=False)
