"""The example with diffusers and accelerate: equal weights, gradient accumulation, resumption, two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from loops import EXAMPLES, TINY, Nothing, equal, kinds_of, run_example, steps_of

import vkernel as vk
from vkernel.reports.monitor import read

NAME = "diffusers_accelerate.py"
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(autouse=True)
def accelerate(diffusers: object) -> Iterator[object]:
    library = pytest.importorskip("accelerate", reason="accelerate is installed by the extra loops")
    yield library
    library.state.AcceleratorState._reset_state(True)  # one for each process


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_weights_are_equal_bit_for_bit(precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    args = ["--steps", "15", "--accumulate", "2", "--prediction", "v_prediction"]
    watched = run_example(NAME, tmp_path / "a", *args, patch=monkeypatch)
    alone = run_example(NAME, tmp_path / "b", *args, patch=monkeypatch, monitor=Nothing)
    assert watched["accelerator"].mixed_precision == precision
    assert equal(watched["unet"], alone["unet"])  # the averaged weights
    last = [torch.load(tmp_path / run / "checkpoint-15" / "optimizer.bin") for run in ("a", "b")]
    states = [run["state"].values() for run in last]
    assert all(torch.equal(a["exp_avg"], b["exp_avg"]) for a, b in zip(*states, strict=True))
    assert steps_of(tmp_path / "a") == [0, 5, 10, 15]
    assert read(tmp_path / "a").records[-1].weights == "ema"
    assert read(tmp_path / "a").setting.predicts == "v"
    network = vk.Checkpoint.from_diffusers(tmp_path / "a" / "pipeline")
    assert network.predicts == "v"


def test_a_resumed_run_continues_its_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_example(NAME, tmp_path, "--steps", "10", patch=monkeypatch)
    before = steps_of(tmp_path)
    run_example(NAME, tmp_path, "--steps", "20", "--resume", str(tmp_path / "checkpoint-10"), patch=monkeypatch)
    assert steps_of(tmp_path) == [*before, 15, 20]
    assert kinds_of(tmp_path).count("start") == 2


def test_the_monitor_adds_few_lines() -> None:
    assert sum("monitor" in line for line in _code()) < 10


def test_two_processes(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    script = [str(EXAMPLES / NAME), *TINY, "--log", str(tmp_path), "--steps", "6"]
    done = subprocess.run(
        [*launch, *script], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert steps_of(tmp_path)[0] == 0
    assert steps_of(tmp_path)[-1] == 6
    assert kinds_of(tmp_path).count("start") == kinds_of(tmp_path).count("end") == 1  # rank 0 alone


def _code() -> list[str]:
    """Return the lines of the example after its arguments."""
    lines = (EXAMPLES / NAME).read_text().splitlines()
    return lines[lines.index("args = parser.parse_args()") :]
