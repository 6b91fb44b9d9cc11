"""Exhibits side by side: each is made in a process of its own, with one thread, so that numbers do not depend on it.

Processes are spawned, since torch does not survive a fork. Shares of work that are done come back through a queue.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import queue
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Protocol

import torch

from vkernel.core.errors import InputError
from vkernel.reproduce.exhibit import Exhibit, Part, Run, Skip

Result = tuple[int, Exhibit | Skip]
Show = Callable[[str, float], None]
POLL = 0.2  # seconds between looks at the queue


class Shares(Protocol):
    """The queue of shares: pairs of the index of an exhibit and the share of its work that was done."""

    def put(self, obj: tuple[int, float]) -> None: ...
    def get_nowait(self) -> tuple[int, float]: ...


def make(part: Part, run: Run) -> Exhibit | Skip:
    """Return the exhibit with its title and seconds, or the reason why it cannot be made here."""
    start = time.perf_counter()
    try:
        found = part.make(run)
    except Skip as reason:
        run.step(1.0)
        return reason
    return dataclasses.replace(found, title=part.title, topic=part.topic, seconds=time.perf_counter() - start)


def one_by_one(parts: Sequence[Part], run: Run, show: Show) -> Iterator[Result]:
    """Make exhibits in this process, in their order; ``show(title, seconds)`` reports progress."""
    for index, part in enumerate(parts):

        def step(share: float, part: Part = part) -> None:
            show(part.title, share * part.seconds)

        step(0.0)
        yield index, make(part, dataclasses.replace(run, step=step))


def side_by_side(parts: Sequence[Part], run: Run, show: Show, workers: int) -> Iterator[Result]:
    """Make exhibits in ``workers`` processes and yield them as they are finished; the longest begin first."""
    context = multiprocessing.get_context("spawn")
    shares = context.Queue()
    needed = {part.after for part in parts}
    waiting = sorted(range(len(parts)), key=lambda i: (parts[i].name not in needed, -parts[i].seconds))
    unmade, flying = {part.name for part in parts}, dict[Future[Exhibit | Skip], int]()
    reported = [0.0] * len(parts)

    def report(index: int, share: float) -> None:
        share = min(share, 1 - reported[index])  # a share that comes after its exhibit was counted then
        reported[index] += share
        show(parts[index].title, share * parts[index].seconds)

    with ProcessPoolExecutor(workers, context, _begin, (shares,)) as pool:
        try:
            while waiting or flying:
                ready = [i for i in waiting if parts[i].after not in unmade][: workers - len(flying)]
                for i in ready:
                    waiting.remove(i)
                    task = dataclasses.replace(run, step=silent, runner="inline")
                    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited by the process that begins
                    try:
                        flying[pool.submit(_work, i, parts[i], task)] = i
                    finally:
                        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
                done, _ = wait(flying, POLL, FIRST_COMPLETED)
                for index, share in _waiting(shares):
                    report(index, share)
                for future in done:
                    index = flying.pop(future)
                    report(index, 1.0)
                    unmade.discard(parts[index].name)
                    yield index, future.result()
        except (KeyboardInterrupt, GeneratorExit):
            for worker in multiprocessing.active_children():  # one that still imports would do that first
                worker.terminate()
            raise
        except BrokenProcessPool:
            raise InputError("A process ended early, perhaps for lack of memory. Run again with --workers 1.") from None
        finally:
            pool.shutdown(cancel_futures=True)


def _waiting(shares: Shares) -> Iterator[tuple[int, float]]:
    """Yield what stands in the queue now."""
    while True:
        try:
            yield shares.get_nowait()
        except queue.Empty:
            return


def silent(share: float) -> None:
    """Report no progress."""


_shares: Shares  # of this worker


def _begin(shares: Shares) -> None:
    global _shares
    _shares = shares
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends this process too, without a traceback of its own
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _work(index: int, part: Part, run: Run) -> Exhibit | Skip:
    def step(share: float) -> None:
        _shares.put((index, share))

    return make(part, dataclasses.replace(run, step=step))
