"""Long work beside the page: one job per desk, where a new one replaces the old, and few at once on a server.

A job calls ``report(label, share)`` after each step of sampling or training; once it is cancelled that call raises
``CancelledError``, and whatever the job returns is dropped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import torch

from vkernel.core.errors import require
from vkernel.explore.compute import Report


class Workers(ThreadPoolExecutor):
    """The threads of a server: at most ``at_once`` jobs run, the others wait. Each computes on one core: for arrays
    of the size of a map the exchange between the threads of one operation costs more than the operation."""

    def __init__(self, at_once: int = 2) -> None:
        require(at_once >= 1, f"At least one job must be able to run; got {at_once}.")
        super().__init__(at_once, "vkernel explore", torch.set_num_threads, (1,))
        self.closed = False

    def close(self) -> None:
        """Cancel all jobs and wait for their threads, since a process must not exit during a torch operation."""
        self.closed = True
        self.shutdown(cancel_futures=True)


class Desk:
    """The job of a tab: the latest one, until it is cancelled."""

    def __init__(self, workers: Workers) -> None:
        self._workers, self._stop = workers, threading.Event()
        self.future: Future[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether a job is waiting or running."""
        return self.future is not None and not self._stop.is_set() and not self.future.done()

    def submit(self, work: Callable[[Report], object], ended: Callable[[object], None], progress: Report) -> None:
        """Start ``work(report)`` instead of the current job; its thread calls ``ended`` with the result or an error."""
        self.cancel()
        if self._workers.closed:
            return
        stop = self._stop = threading.Event()

        def report(label: str, share: float) -> None:
            if stop.is_set() or self._workers.closed:
                raise CancelledError
            progress(label, share)

        def run() -> None:
            try:
                found = work(report)
            except Exception as error:  # every error of the thread must reach the page
                found = error
            if not stop.is_set() and not self._workers.closed:
                ended(found)

        self.future = self._workers.submit(run)

    def cancel(self) -> None:
        """Stop the current job at its next report; a job that waits never starts."""
        self._stop.set()
        if self.future is not None:
            self.future.cancel()
