"""Jobs report, replace one another, and stop soon after they are cancelled."""

from __future__ import annotations

import threading
import time
from concurrent.futures import wait
from functools import partial
from typing import Any

import numpy as np
import pytest

from vkernel.core.errors import InputError
from vkernel.explore import compute
from vkernel.explore.jobs import Desk, Workers
from vkernel.explore.state import SAMPLERS, State


class Calls:
    """Records what a job calls."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.failed: list[Exception] = []
        self.reported: list[tuple[str, float]] = []
        self.event = threading.Event()

    def callbacks(self) -> tuple[Any, Any]:
        def ended(found: Any) -> None:
            (self.failed if isinstance(found, Exception) else self.done).append(found)
            self.event.set()

        return ended, lambda label, share: self.reported.append((label, share))


def busy(report: Any, seconds: float = 5.0) -> str:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        report("working", 0.5)
        time.sleep(0.005)
    return "finished"


def test_job_reports_and_ends() -> None:
    desk, calls = Desk(Workers(1)), Calls()
    desk.submit(lambda report: busy(report, 0.05), *calls.callbacks())
    assert calls.event.wait(5)
    assert calls.done == ["finished"]
    assert calls.reported
    bad = Calls()
    desk.submit(lambda report: 1 / 0, *bad.callbacks())
    assert bad.event.wait(5)
    assert isinstance(bad.failed[0], ZeroDivisionError)


def test_latest_job_wins_and_a_cancelled_one_is_silent() -> None:
    desk, old, new = Desk(Workers(1)), Calls(), Calls()
    desk.submit(busy, *old.callbacks())
    first = desk.future
    assert first is not None
    while not old.reported:
        time.sleep(0.005)
    desk.submit(lambda report: busy(report, 0.02), *new.callbacks())
    assert new.event.wait(5)
    assert wait([first], 5).done
    assert old.done == old.failed == []
    desk.submit(busy, *old.callbacks())
    assert desk.busy
    desk.cancel()
    assert not desk.busy


def test_few_jobs_run_at_once_over_all_tabs() -> None:
    workers, running, most, lock = Workers(2), 0, 0, threading.Lock()

    def work(report: Any) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.03)
        with lock:
            running -= 1

    desks, calls = [Desk(workers) for _ in range(10)], [Calls() for _ in range(10)]
    for desk, c in zip(desks, calls, strict=True):
        desk.submit(work, *c.callbacks())
    assert all(c.event.wait(5) for c in calls)
    assert most == 2


def test_waiting_job_leaves_when_cancelled() -> None:
    workers, front, back = Workers(1), Calls(), Calls()
    first, second = Desk(workers), Desk(workers)
    first.submit(busy, *front.callbacks())
    second.submit(busy, *back.callbacks())
    job = second.future
    assert job is not None
    second.cancel()
    assert job.cancelled()
    assert back.reported == []
    first.cancel()
    with pytest.raises(InputError):
        Workers(0)


def test_closing_ends_all_jobs() -> None:
    workers, calls = Workers(1), Calls()
    desks = [Desk(workers) for _ in range(3)]
    for desk in desks:
        desk.submit(busy, *calls.callbacks())
    workers.close()
    late = Desk(workers)
    late.submit(busy, *calls.callbacks())
    assert late.future is None
    assert all(desk.future is not None and desk.future.done() for desk in desks)
    assert calls.done == calls.failed == []


@pytest.mark.parametrize("sampler", [s for s in SAMPLERS if s not in ("gaussian", "nearest", "switch")])
def test_every_sampler_stops_soon_after_it_is_cancelled(sampler: str) -> None:
    """In the plane with many points, at its full size, wherever it is: no step takes much of a second."""
    desk, calls = Desk(Workers(1)), Calls()
    points = tuple(map(tuple, np.random.default_rng(1).uniform(-1.9, 1.9, (200, 2)).tolist()))
    desk.submit(partial(compute.simulate, State(points=points, sampler=sampler, steps=100)), *calls.callbacks())
    job = desk.future
    assert job is not None
    work = {"exact": "exact", "effective": "predicting"} | dict.fromkeys(
        ("linear", "average", "ntk", "mlp"), "training"
    )
    under_way = 3 if sampler == "mlp" else 1  # reports; what torch loads at the first training of a network is no step
    while sum(work.get(sampler, "sampling") in label for label, _ in calls.reported) < under_way:
        time.sleep(0.005)
    time.sleep(0.1)
    start = time.perf_counter()
    desk.cancel()
    assert wait([job], 10).done
    assert time.perf_counter() - start < 3  # a second, on a machine that has other things to do
    assert calls.done == calls.failed == []
