"""``vkernel monitor``: verdict, table, page and refusals, from a log."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from coarse import draw_coarsely
from command import Left
from monitored import PROCESS, Denoiser, digits

import vkernel as vk
from vkernel.cli import monitor as command


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    draw_coarsely(monkeypatch)
    torch.manual_seed(0)
    images, held = digits(32, 32)
    given = {
        "predicts": "x0",
        "log": tmp_path / "run",
        "images": 8,
        "samples": 8,
        "sampler_steps": 3,
        "progress": False,
    }
    with vk.Monitor(images, PROCESS, test=held, **given) as watch:
        for step in (0, 10):
            watch.evaluate(step, Denoiser())
    return tmp_path / "run"


def test_verdict_table_page_and_numbers(vkernel: Callable[..., Left], run: Path, tmp_path: Path) -> None:
    page, numbers = tmp_path / "page.html", tmp_path / "run.json"
    left = vkernel("monitor", run, "--html", page, "--json", numbers)
    assert left.code == 0, left
    assert "settled" in left.out or "learning" in left.out
    assert "held-out" in left.out
    assert "<h2>Verdict</h2>" in page.read_text()
    assert [e["step"] for e in json.loads(numbers.read_text())["evaluations"]] == [0, 10]
    assert vkernel("monitor", run / "monitor.jsonl", "--quiet").code == 0


def test_watching_ends_with_the_run(
    vkernel: Callable[..., Left], run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vkernel.reports.monitor.page._figures", lambda *_: {})  # they take seconds
    file = run / "monitor.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-2]))  # as it was before the last evaluation
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        file.write_text("".join(lines[: len(lines) - 2 + len(slept)]))

    monkeypatch.setattr(command.time, "sleep", sleep)
    left = vkernel("monitor", run, "--html", tmp_path / "page.html", "--watch", "--refresh", 3)
    assert left.code == 0, left
    assert slept == [3, 3]
    assert "the run has ended" in left.out
    assert "ended, or stopped" in (tmp_path / "page.html").read_text()


def test_refusals(refused: Callable[..., str], run: Path, tmp_path: Path) -> None:
    assert "holds no log of a monitor" in refused("monitor", tmp_path)
    assert "--refresh must be" in refused("monitor", run, "--refresh", 0)
    (tmp_path / "monitor.jsonl").write_text("[1, 2]\n")
    assert "no log of a monitor" in refused("monitor", tmp_path)
    assert "would overwrite what is read" in refused("monitor", run, "--json", run / "monitor.jsonl")
