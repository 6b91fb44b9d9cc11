"""Long work beside the page: one job for each tab, the latest wins, and few at once for all tabs together.

A job is a thread. It stops before its next operation of torch, or where the work next calls ``tell``: either raises
:class:`Stopped` once the job has been cancelled; what it found after that is dropped. :class:`Workers` belongs to a
server and bounds how many jobs run at once; a :class:`Desk` belongs to a tab.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode

from vkernel.core.errors import require

__all__ = ["Desk", "Job", "Stopped", "Workers"]

PATIENCE = 0.05  # seconds between two looks at whether a waiting job is still wanted

Tell = Callable[[str, float], None]
Work = Callable[[Tell], Any]


class Stopped(Exception):
    """The job was cancelled."""


class _Watch(TorchFunctionMode):
    """Calls ``check`` before every operation of torch in this thread: no piece of work is long enough to wait for."""

    def __init__(self, check: Callable[[], None]) -> None:
        super().__init__()
        self._check = check

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._check()
        return func(*args, **(kwargs or {}))


class Workers:
    """How many jobs may run at once."""

    def __init__(self, at_once: int = 2) -> None:
        require(at_once >= 1, f"At least one job must be able to run; got {at_once}.")
        self._free = threading.BoundedSemaphore(at_once)
        self._jobs: weakref.WeakSet[Job] = weakref.WeakSet()
        self._closed = False

    def take(self, job: Job) -> None:
        """Remember a job that has been started; none is wanted any more once closed."""
        self._jobs.add(job)
        if self._closed:
            job.cancel()

    def close(self, patience: float = 30.0) -> None:
        """Cancel all jobs, and wait for their threads: a process must not end while one is in the middle of a sum."""
        self._closed = True
        end = time.monotonic() + patience
        for job in list(self._jobs):
            job.cancel()
        for job in list(self._jobs):
            if job.thread is not None:
                job.thread.join(max(0.0, end - time.monotonic()))

    def enter(self, job: Job) -> None:
        """Wait for a place; a job that is cancelled while it waits takes none."""
        while not self._free.acquire(timeout=PATIENCE):
            job.check()
        if job.cancelled:
            self._free.release()
            raise Stopped

    def leave(self) -> None:
        """Give the place back."""
        self._free.release()


class Job:
    """One piece of work; ``progress(label, share)``, ``done(result)`` and ``failed(error)`` are told from its thread.

    Nothing is told any more once the job is cancelled.
    """

    def __init__(
        self,
        work: Work,
        done: Callable[[Any], None],
        failed: Callable[[Exception], None],
        progress: Tell,
    ) -> None:
        self._work, self._done, self._failed, self._progress = work, done, failed, progress
        self._stop = threading.Event()
        self.thread: threading.Thread | None = None

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the result."""
        return self._stop.is_set()

    def cancel(self) -> None:
        """Stop at the next opportunity."""
        self._stop.set()

    def check(self) -> None:
        """Raise :class:`Stopped` once cancelled."""
        if self.cancelled:
            raise Stopped

    def start(self, workers: Workers) -> None:
        """Run as soon as there is a place."""
        self.thread = threading.Thread(target=self._run, args=(workers,), daemon=True, name="vkernel explore")
        workers.take(self)
        self.thread.start()

    def _run(self, workers: Workers) -> None:
        try:
            workers.enter(self)
        except Stopped:
            return
        try:
            with _Watch(self.check):
                result = self._work(self._tell)
            self.check()
        except Stopped:
            return
        except Exception as error:  # a thread's error must reach the page, whatever it is
            if not self.cancelled:
                self._failed(error)
            return
        finally:
            workers.leave()
        self._done(result)

    def _tell(self, label: str, share: float) -> None:
        self.check()
        self._progress(label, share)


class Desk:
    """The one job of a tab."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._job: Job | None = None
        self._closed = False

    @property
    def busy(self) -> bool:
        """Whether a job that is still wanted is under way."""
        job = self._job
        return job is not None and not job.cancelled and job.thread is not None and job.thread.is_alive()

    def submit(
        self, work: Work, done: Callable[[Any], None], failed: Callable[[Exception], None], progress: Tell
    ) -> Job | None:
        """Cancel what runs, and start this; a closed desk takes no work."""
        self.cancel()
        if self._closed:
            return None
        self._job = Job(work, done, failed, progress)
        self._job.start(self._workers)
        return self._job

    def cancel(self) -> None:
        """Cancel what runs."""
        if self._job is not None:
            self._job.cancel()

    def close(self) -> None:
        """The tab is gone."""
        self._closed = True
        self.cancel()
