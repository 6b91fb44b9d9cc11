"""The example in plain PyTorch: the same weights with and without a monitor, and a killed run continues its curves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from loops import EXAMPLES, TINY, Careless, Nothing, equal, kinds_of, run_example, steps_of

NAME = "train_with_monitor.py"


@pytest.mark.usefixtures("one_thread")
def test_the_example_runs_and_changes_no_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = run_example(NAME, tmp_path / "a", "--steps", "20", patch=monkeypatch)
    alone = run_example(NAME, tmp_path / "b", "--steps", "20", patch=monkeypatch, monitor=Nothing)
    assert equal(watched["network"], alone["network"])
    other = run_example(NAME, tmp_path / "c", "--steps", "20", patch=monkeypatch, monitor=Careless)
    assert not equal(other["network"], alone["network"])
    assert steps_of(tmp_path / "a") == [0, 5, 10, 15, 20]
    assert kinds_of(tmp_path / "a") == ["start", *["evaluation"] * 5, "end"]
    assert len((EXAMPLES / NAME).read_text().splitlines()) <= 80


@pytest.mark.slow
def test_a_killed_run_continues_its_curves(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / NAME), *TINY, "--log", str(tmp_path), "--steps"]
    one = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*command, "100000"], env=one, stdout=subprocess.DEVNULL) as run:
        end = time.monotonic() + 120
        while time.monotonic() < end and len(_steps(tmp_path)) < 3:
            time.sleep(0.1)
        run.send_signal(signal.SIGKILL)
    before = _steps(tmp_path)
    assert len(before) >= 3
    subprocess.run([*command, str(before[-1] + 60)], env=one, check=True, stdout=subprocess.DEVNULL)
    after = steps_of(tmp_path)
    assert after[: len(before)] == before
    assert after[-1] == before[-1] + 60
    assert kinds_of(tmp_path).count("start") == 2


def _steps(log: Path) -> list[int]:
    return steps_of(log) if (log / "monitor.jsonl").exists() and (log / "monitor.jsonl").stat().st_size else []
