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

    def callbacks(self) -> tuple[Any, Any, Any]:
        def done(result: Any) -> None:
            self.done.append(result)
            self.event.set()

        def failed(error: Exception) -> None:
            self.failed.append(error)
            self.event.set()

        return done, failed, lambda label, share: self.reported.append((label, share))


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
    first = desk.submit(busy, *old.callbacks())
    assert first is not None
    while not old.reported:
        time.sleep(0.005)
    second = desk.submit(lambda report: busy(report, 0.02), *new.callbacks())
    assert second is not None
    assert new.event.wait(5)
    assert wait([first], 5).done
    assert old.done == old.failed == []
    desk.submit(busy, *old.callbacks())
    assert desk.busy
    desk.close()
    assert not desk.busy
    assert desk.submit(busy, *old.callbacks()) is None


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
    job = second.submit(busy, *back.callbacks())
    assert job is not None
    second.cancel()
    assert job.cancelled()
    assert back.reported == []
    first.close()
    with pytest.raises(InputError):
        Workers(0)


def test_closing_ends_all_jobs() -> None:
    workers, calls = Workers(1), Calls()
    desks = [Desk(workers) for _ in range(3)]
    jobs = [desk.submit(busy, *calls.callbacks()) for desk in desks]
    workers.close()
    assert Desk(workers).submit(busy, *calls.callbacks()) is None
    assert all(job is not None and job.done() for job in jobs)
    assert calls.done == calls.failed == []


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_stops_soon_after_it_is_cancelled(sampler: str) -> None:
    """In the plane with many points, at its full size, wherever it is: no step takes much of a second."""
    desk, calls = Desk(Workers(1)), Calls()
    points = tuple(map(tuple, np.random.default_rng(1).uniform(-1.9, 1.9, (200, 2)).tolist()))
    job = desk.submit(partial(compute.simulate, State(points=points, sampler=sampler, steps=300)), *calls.callbacks())
    assert job is not None
    work = {"naive": "naive", "effective": "predicting", "linear": "training", "ntk": "training", "mlp": "training"}
    while not any(work.get(sampler, "exact") in label for label, _ in calls.reported):
        time.sleep(0.005)
    time.sleep(0.2)
    start = time.perf_counter()
    desk.cancel()
    assert wait([job], 10).done
    assert time.perf_counter() - start < 3  # a second, on a machine that has other things to do
    assert calls.done == calls.failed == []
