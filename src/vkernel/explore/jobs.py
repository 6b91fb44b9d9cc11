"""Long work beside the page: one job per tab, where a new one replaces the old, and few at once on a server.

A job runs in a thread of the server's pool. It calls ``report(label, share)`` after each step of sampling or training;
once it is cancelled that call raises :class:`Cancelled`, and whatever the job returns is dropped.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from vkernel.core.errors import require

Report = Callable[[str, float], None]  # what is being done, and which share of the whole is done
Result = TypeVar("Result")


class Cancelled(Exception):
    """The job was cancelled."""


class Workers(ThreadPoolExecutor):
    """The threads of a server: at most ``at_once`` jobs run, the others wait."""

    def __init__(self, at_once: int = 2) -> None:
        require(at_once >= 1, f"At least one job must be able to run; got {at_once}.")
        super().__init__(at_once, thread_name_prefix="vkernel explore")
        self.desks: weakref.WeakSet[Desk] = weakref.WeakSet()
        self.closed = False

    def close(self) -> None:
        """Cancel all jobs and wait for their threads, since a process must not exit during a torch operation."""
        self.closed = True
        for desk in list(self.desks):
            desk.close()
        self.shutdown()


class Desk:
    """The current job of a tab."""

    def __init__(self, workers: Workers) -> None:
        self._workers, self._closed, self._stop = workers, workers.closed, threading.Event()
        self._future: Future[None] | None = None
        workers.desks.add(self)

    @property
    def busy(self) -> bool:
        """Whether a job is waiting or running."""
        return self._future is not None and not self._stop.is_set() and not self._future.done()

    def submit(
        self,
        work: Callable[[Report], Result],
        done: Callable[[Result], None],
        failed: Callable[[Exception], None],
        progress: Report,
    ) -> Future[None] | None:
        """Cancel the current job and start ``work(report)``; the other calls come from its thread, until cancelled."""
        self.cancel()
        if self._closed:
            return None
        stop = self._stop = threading.Event()

        def report(label: str, share: float) -> None:
            if stop.is_set():
                raise Cancelled
            progress(label, share)

        def run() -> None:
            try:
                result = work(report)
            except Exception as error:  # every error of the thread must reach the page
                if not stop.is_set():
                    failed(error)
            else:
                if not stop.is_set():
                    done(result)

        self._future = self._workers.submit(run)
        return self._future

    def cancel(self) -> None:
        """Stop the current job at its next report; a job that waits never starts."""
        self._stop.set()
        if self._future is not None:
            self._future.cancel()

    def close(self) -> None:
        """Cancel the current job and accept no other."""
        self._closed = True
        self.cancel()
