"""Budget and log: evaluations cost a share of the wall time, and a run that is killed continues its curves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from coarse import draw_coarsely
from monitored import PROCESS, Denoiser, digits
from torch import Tensor

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.reports.monitor import board
from vkernel.reports.monitor.budget import Budget
from vkernel.reports.monitor.log import NAME, read
from vkernel.reports.monitor.result import RunReport, table

SUPPORT = Path(__file__).resolve().parents[2] / "support"


@pytest.fixture(scope="module")
def images() -> tuple[Tensor, Tensor]:
    return digits(48, 32)


def monitor(sets: tuple[Tensor, Tensor], /, **options: object) -> vk.Monitor:
    given = {"predicts": "x0", "images": 8, "samples": 8, "sampler_steps": 3, "progress": False} | options
    return vk.Monitor(sets[0], PROCESS, test=sets[1], **given)


# -------------------- budget


@pytest.mark.parametrize(("cost", "drawn"), [(1.0, 0.5), (1.0, 5.0), (3.0, 3.0), (0.1, 20.0)])
def test_evaluations_take_their_share_and_samples_a_part_of_it(cost: float, drawn: float) -> None:
    now, account = 0.0, Budget(0.02, 100)
    account.clock, account.guess = lambda: now, (1.0, 0.0)
    last, steps, sampled = None, [], 0
    for step in range(60_000):
        now += 0.5  # seconds of training
        due = account.due(step, last, samples=True)
        if due.errors:
            account.spend(cost, drawn if due.samples else 0.0)
            now += cost + (drawn if due.samples else 0.0)
            sampled += due.samples
            slack = cost if step == 0 else drawn if sampled <= 1 else 1e-6  # the first samples cost more than expected
            assert sum(account.spent) <= 0.02 * account.wall() + slack
            assert step == 0 or step - last >= 100
            last = step
            steps.append(step)
    assert steps[0] == 0
    assert len(steps) >= 10
    assert sampled >= 5
    assert sum(account.spent) >= 0.5 * 0.02 * now or steps[-1] - steps[-2] == 100


def test_every_is_a_least_distance_and_costs_nothing_between() -> None:
    account = Budget(0.5, 10, clock=iter(range(1000)).__next__)
    assert account.due(0, None, True) == (True, False)
    account.spend(0.001, 0.0)
    assert [k for k in range(1, 25) if account.due(k, 0, False).errors][:2] == [10, 11]


def test_calls_between_evaluations_are_fast(images: tuple[Tensor, Tensor]) -> None:
    watch, network = monitor(images), Denoiser()
    watch(0, network)
    start = time.perf_counter()
    for step in range(1, 1001):
        assert watch(step, network) is None or step == 1000
    assert time.perf_counter() - start < 0.5


def test_the_cost_of_a_run_is_within_its_budget(images: tuple[Tensor, Tensor]) -> None:
    watch, network = monitor(images, every=1, budget=0.1), Denoiser()
    start, step = time.perf_counter(), 0
    while len(watch.records) < 3 and time.perf_counter() - start < 60:  # the slower the first, the longer it takes
        watch(step, network)
        time.sleep(0.002)
        step += 1
    first = watch.records[0].cost[0]
    assert len(watch.records) == 3
    assert sum(watch.budget.spent) <= 0.1 * (time.perf_counter() - start) + first + 0.05


# -------------------- log


def test_a_run_continues_where_it_was_stopped(images: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = Denoiser()
    watch = monitor(images, log=tmp_path)
    kept = [watch.evaluate(step, network) for step in (0, 100, 200)]
    again = monitor(images, log=tmp_path)  # the first was killed: no close()
    assert [r.step for r in again.records] == [0, 100, 200]
    assert torch.allclose(again.records[1].images["test"], kept[1].images["test"], rtol=1e-5)
    assert again.budget.wall() >= 0.999 * watch.records[-1].wall
    assert sum(again.budget.spent) == pytest.approx(watch.records[-1].spent, rel=1e-4)
    assert again.verdict.gap.k == 3
    again.evaluate(300, network)
    assert read(tmp_path).running
    again.close()
    run = read(tmp_path)
    assert [r.step for r in run.records] == [0, 100, 200, 300]
    assert run.ended
    assert not run.running
    again.evaluate(400, network)  # a second training with the same monitor
    assert not read(tmp_path).ended
    with monitor(images, log=tmp_path) as older:  # continues from an older checkpoint
        older.evaluate(150, network)
    assert [r.step for r in read(tmp_path).records] == [0, 100, 150]


def test_torn_and_damaged_lines_are_left_out(images: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    watch, file = monitor(images, log=tmp_path), tmp_path / NAME
    for step in (0, 10, 20):
        watch.evaluate(step, Denoiser())
    whole = file.read_bytes()
    lines = whole.split(b"\n")
    for cut in (1, 40, len(lines[-2]) - 1):
        file.write_bytes(whole[:-cut])
        assert [r.step for r in read(tmp_path).records] == [0, 10]
    again = monitor(images, log=tmp_path)
    again.evaluate(30, Denoiser())
    assert [r.step for r in read(tmp_path).records] == [0, 10, 30]
    assert all(json.loads(line) for line in file.read_bytes().splitlines())
    lines[3] = b'{"kind":"evaluation","step":'
    file.write_bytes(b"\n".join(lines))
    assert [r.step for r in read(tmp_path).records] == [0, 20]
    file.write_bytes(lines[0][:30])  # a torn header: the run had not begun
    assert monitor(images, log=tmp_path).records == ()


def test_the_log_of_another_run_is_refused(images: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    monitor(images, log=tmp_path)
    for options in ({"predicts": "noise"}, {"images": 9}, {"seed": 1}):
        with pytest.raises(InputError, match="holds the log of another run"):
            monitor(images, log=tmp_path, **options)
    with pytest.raises(InputError, match="data differ"):
        monitor((images[0] * 0.9, images[1]), log=tmp_path)
    monitor(images, log=tmp_path, every=7, budget=0.5)  # may change
    (tmp_path / NAME).write_text("not a log\n")
    with pytest.raises(InputError, match="no log of a monitor"):
        monitor(images, log=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError):
        monitor(images, log=tmp_path / "file")


def test_a_log_that_cannot_be_written_warns_once(images: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    watch = monitor(images, log=tmp_path / "run")
    full = OSError(28, "No space left on device")

    def refuse(*_: object) -> None:
        raise full

    watch._log._append = refuse
    with pytest.warns(UserWarning, match="No space left on device"):
        assert watch.evaluate(0, Denoiser()) is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert watch.evaluate(1, Denoiser()) is not None
    assert len(watch.records) == 2


LOOP = """
import sys, torch, vkernel as vk
sys.path.insert(0, {support!r})
sys.modules["tensorboard"] = None  # its import takes seconds
from monitored import PROCESS, Denoiser, digits
torch.set_num_threads(1)
images, held = digits(48, 32)
torch.manual_seed(0)
network = Denoiser()
watch = vk.Monitor(images, PROCESS, test=held, predicts="x0", log={log!r}, images=8, samples=4,
                   sampler_steps=3, progress=False)
for step in range({first}, 10**9):
    watch.evaluate(step, network)
    print(step, flush=True)
"""


def test_kill_and_resume(tmp_path: Path) -> None:
    steps = []
    for first in (0, 20):
        code = LOOP.format(support=str(SUPPORT), log=str(tmp_path / "run"), first=first)
        process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], stdout=subprocess.PIPE, text=True)
        for line in process.stdout:
            if int(line) >= first + 12:
                break
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        steps.append([r.step for r in read(tmp_path / "run").records])
    assert len(steps[0]) >= 3
    assert [s for s in steps[1] if s < 20] == [s for s in steps[0] if s < 20]
    assert steps[1] == sorted(set(steps[1]))
    assert max(steps[1]) >= 30
    run = read(tmp_path / "run")
    assert not run.running
    walls = [r.wall for r in run.records]
    assert walls == sorted(walls)


def test_the_log_has_no_numbers_that_json_lacks(images: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    watch = monitor(images, log=tmp_path)
    with pytest.warns(UserWarning, match="NaN"):
        watch.evaluate(0, lambda x, t: x * torch.nan)
    text = (tmp_path / NAME).read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert not read(tmp_path).records[0].finite


# -------------------- TensorBoard, table, page


def test_tensorboard_files_hold_the_curves(images: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with monitor(images, log=tmp_path) as watch:
        for step in (0, 10):
            watch.evaluate(step, Denoiser())
    time.sleep(1.1)  # TensorBoard reads files by name, which holds the second and then a count without leading zeros
    with monitor(images, log=tmp_path) as watch:
        watch.evaluate(20, Denoiser())
    held = events.EventAccumulator(str(tmp_path)).Reload()
    assert [e.step for e in held.Scalars("monitor/error/held-out")] == [0, 10, 20]
    assert held.Images("monitor/closest samples")[0].width > 100


def test_without_tensorboard_there_is_one_sentence(
    images: tuple[Tensor, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(board, "load", lambda: None)
    watch = monitor(images, log=tmp_path, progress=True)
    assert watch.evaluate(0, Denoiser()) is not None
    printed = capsys.readouterr().err
    assert printed.count("pip install 'vkernel[monitor]'") == 1
    assert "held-out" in printed
    assert "the next is due after" in printed
    assert len(printed.splitlines()) == 4


def test_a_function_receives_the_lines(images: tuple[Tensor, Tensor]) -> None:
    seen: list[tuple[str, float]] = []
    watch = monitor(images, progress=lambda line, share: seen.append((line, share)))
    watch(0, Denoiser())
    assert "learning" in seen[0][0]
    broken = monitor(images, progress=lambda line, share: 1 / 0)
    assert broken(0, Denoiser()) is not None


def test_the_page_holds_verdict_curves_and_pictures(
    images: tuple[Tensor, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_coarsely(monkeypatch)
    ideal = vk.EmpiricalScore(vk.Empirical(images[0]), PROCESS)
    watch = monitor(images, log=tmp_path / "run", samples=16, sampler_steps=12)
    torch.manual_seed(0)
    for step in (0, 10):
        watch.evaluate(step, Denoiser())
    with pytest.warns(UserWarning, match="memorising since step 20"):
        watch.evaluate(20, ideal.denoise)
    watch.evaluate(40, ideal.denoise)
    report = RunReport.read(tmp_path / "run", 7)
    page = report.to_html(tmp_path / "page.html").read_text()
    assert "Memorising since step 20" in page
    assert 'http-equiv="refresh" content="7"' in page
    assert page.count("data:image/png") >= 12 + 3
    assert "still going on" in page
    for name in ("errors", "gap", "copies", "ratio", "levels", "distance", "settings"):
        assert f'<section id="{name}">' in page
    watch.close()
    ended = RunReport.read(tmp_path / "run", 7).to_html(tmp_path / "page.html").read_text()
    assert "http-equiv" not in ended
    found = json.loads(report.to_json(tmp_path / "run.json").read_text())
    assert found["verdict"]["state"] == "memorising"
    assert len(found["evaluations"]) == 4
    assert len(table(report).renderables) == 2
    empty = monitor(images, log=tmp_path / "empty")
    assert "Not evaluated yet" in RunReport.read(empty._log.folder).to_html(tmp_path / "page.html").read_text()
