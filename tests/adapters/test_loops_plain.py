"""Loops in plain PyTorch: the same weights with and without a monitor, and a killed run continues its curves."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from loops import EXAMPLES, Careless, Nothing, equal, kinds_of, run_example, steps_of

NAME = "train_with_monitor.py"
SCRIPT = Path(__file__).resolve().parents[1] / "support" / "killed_training.py"


@pytest.mark.usefixtures("one_thread")
def test_the_example_runs_and_changes_no_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = ["--steps", "20", "--device", "cpu"]
    watched = run_example(NAME, tmp_path / "a", *args, patch=monkeypatch)
    alone = run_example(NAME, tmp_path / "b", *args, patch=monkeypatch, monitor=Nothing)
    assert equal(watched["network"], alone["network"])
    assert equal(watched["ema"], alone["ema"])
    other = run_example(NAME, tmp_path / "c", *args, patch=monkeypatch, monitor=Careless)
    assert not equal(other["network"], alone["network"])
    assert steps_of(tmp_path / "a") == [0, 5, 10, 15, 20]
    assert kinds_of(tmp_path / "a")[-1] == "end"
    assert len((EXAMPLES / NAME).read_text().splitlines()) <= 80


@pytest.mark.slow
def test_a_killed_run_continues_its_curves(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path)]
    one = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*command, "10000000"], env=one) as run:
        end = time.monotonic() + 120
        while time.monotonic() < end and len(_steps(tmp_path)) < 3:
            time.sleep(0.1)
        run.kill()
    before = _steps(tmp_path)
    assert len(before) >= 3
    subprocess.run([*command, str(before[-1] + 200)], env=one, check=True)
    after = steps_of(tmp_path)
    assert after[: len(before)] == before
    assert after[-1] == before[-1] + 200
    assert [kind for kind in kinds_of(tmp_path) if kind != "evaluation"] == ["start", "start", "end"]


def _steps(log: Path) -> list[int]:
    return steps_of(log) if (log / "monitor.jsonl").exists() and (log / "monitor.jsonl").stat().st_size else []
