"""Runners compute the blocks of a study, here, in threads or on a Ray cluster; a live table shows how far they are.

A runner takes the missing blocks and yields their results as they come; only the caller writes to the store. Ray
schedules, retries when a worker or a node is lost, and assigns GPUs. At most ``AHEAD`` blocks per processor are in
flight, so that results do not pile up.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from vkernel.core.errors import InputError, require
from vkernel.core.progress import Progress
from vkernel.study.spec import Condition, Spec, short
from vkernel.study.work import compute

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live

Work = list[tuple[Condition, int]]
Results = Generator[tuple[Condition, int, dict[str, np.ndarray]], None, None]
AHEAD = 2
RETRIES = -1  # the block of a lost worker is tried again for as long as there is a cluster
EVERY = 10.0  # seconds between plain lines
ROWS = 16  # conditions shown at once


def inline(spec: Spec, missing: Work, address: str | None = None) -> Results:
    """Compute one block after the other in this process."""
    for condition, block in missing:
        yield condition, block, compute(spec, condition, block)


def threads(spec: Spec, missing: Work, address: str | None = None) -> Results:
    """Compute blocks in as many threads of this process as there are processors; one thread has those of equal models.

    torch releases Python's lock, so that threads gain where its operations are large.
    """
    groups = [list(group) for _, group in itertools.groupby(missing, lambda work: (work[0].trained, work[1]))]
    workers = max(1, min(len(groups), (os.cpu_count() or 1) // spec.threads))
    with warnings.catch_warnings(), ThreadPoolExecutor(workers) as pool:  # each block changes the filters of warnings
        try:
            for group in pool.map(lambda group: [(*work, compute(spec, *work)) for work in group], groups):
                yield from group
        finally:
            pool.shutdown(cancel_futures=True)


def ray(spec: Spec, missing: Work, address: str | None = None) -> Results:
    """Compute one task per block on a Ray cluster; results come in the order in which tasks finish."""
    try:
        import ray as cluster
    except ImportError:
        raise InputError("The runner 'ray' needs Ray: pip install 'vkernel[ray]'.") from None

    ours = not cluster.is_initialized()
    if ours:
        _connect(address)
        try:
            cluster.init(address=address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise _no_cluster(address, str(error)) from None
    flying: dict[Any, tuple[Condition, int]] = {}
    try:
        resources = cluster.cluster_resources()
        most = max((node["Resources"].get("CPU", 0) for node in cluster.nodes() if node["Alive"]), default=0)
        require(most >= spec.threads, f"threads: no node of the Ray cluster has {spec.threads} CPUs; it has {most:g}.")
        gpus = 1 if spec.device != "cpu" and resources.get("GPU", 0) >= 1 else 0
        needs: dict[str, Any] = {
            "num_cpus": spec.threads,
            "num_gpus": gpus,
            "max_retries": RETRIES,
            "scheduling_strategy": "SPREAD",
        }
        task, whole = cluster.remote(**needs)(compute), cluster.put(spec)
        limit = AHEAD * max(1, int(resources.get("CPU", 1)) // spec.threads)
        waiting = list(reversed(missing))
        while waiting or flying:
            while waiting and len(flying) < limit:
                condition, block = waiting.pop()
                flying[task.remote(whole, condition, block)] = (condition, block)
            ready, _ = cluster.wait(list(flying), num_returns=1)
            for reference in ready:
                condition, block = flying.pop(reference)
                yield condition, block, _get(cluster, reference)
    finally:
        if ours:
            cluster.shutdown()
        else:  # the cluster stays: cancel what an early stop left on it
            for reference in flying:
                cluster.cancel(reference, force=True)


def _connect(address: str | None) -> None:
    """Refuse an address without a server: Ray would wait minutes for it, a plain connection fails at once."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except OSError as error:
            raise _no_cluster(address, error.strerror or str(error)) from None
        except OverflowError as error:
            raise _no_cluster(address, str(error)) from None


def _no_cluster(address: str | None, why: str) -> InputError:
    first = (why.splitlines() or ["no answer"])[0].rstrip(".")
    return InputError(f"There is no Ray cluster at {address!r}: {first}. Start one with 'ray start --head'.")


def _get(cluster: Any, reference: Any) -> dict[str, np.ndarray]:
    try:
        return cluster.get(reference)
    except cluster.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, InputError) else error from None
    except cluster.exceptions.RayError as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"The Ray cluster failed: {first} Finished blocks are safe; run again to go on.") from None


RUNNERS: dict[str, Callable[[Spec, Work, str | None], Results]] = {
    "inline": inline,
    "threads": threads,
    "ray": ray,
}


class LiveTable:
    """Show the blocks that are done: a table on a terminal, plain lines elsewhere, or calls of ``progress``.

    ``advance(condition, block)`` reports one more block. A callable ``progress`` receives the condition and the share
    of all blocks that are done, at first with those that were done before.
    """

    def __init__(self, spec: Spec, done: np.ndarray, progress: Progress = True) -> None:
        self.spec, self.progress = spec, progress
        self.conditions = list(spec.conditions())
        sizes = np.array([len(spec.members_of(b)) for b in range(spec.blocks)])
        self.counts = {c.index: int(sizes[done[c.index]].sum()) for c in self.conditions}
        self.total, self.before = done.size, int(done.sum())
        self.now, self.start, self.printed = self.before, time.monotonic(), time.monotonic()
        self.last: tuple[int, ...] | None = None
        self.live: Live | None = None

    def __enter__(self) -> LiveTable:
        if callable(self.progress):
            self.progress(self.spec.title, self.before / self.total)
        elif self.progress and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self.live = Live(self.render(), console=Console(stderr=True), transient=True, refresh_per_second=4)
            self.live.__enter__()
        elif self.progress and 0 < self.before < self.total:
            print(f"{self.before} of {self.total} blocks are there already.", file=sys.stderr)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live is not None:
            self.live.__exit__(kind, error, trace)

    def advance(self, condition: Condition, block: int) -> None:
        """Report that one more block is in the store."""
        self.now += 1
        self.counts[condition.index] += len(self.spec.members_of(block))
        self.last = condition.index
        if callable(self.progress):
            self.progress(str(condition), self.now / self.total)
        elif self.live is not None:
            self.live.update(self.render())
        elif self.progress and time.monotonic() - self.printed >= EVERY:
            self.printed = time.monotonic()
            print(f"{condition}: {self.summary()}", file=sys.stderr)

    def summary(self) -> str:
        """Return the blocks done, the rate, and the time left."""
        spent, made = time.monotonic() - self.start, self.now - self.before
        if made == 0 or spent <= 0:
            return f"{self.now} of {self.total} blocks"
        left = duration((self.total - self.now) * spent / made)
        return f"{self.now} of {self.total} blocks, {made * self.spec.block / spent:.3g} members a second, {left} left"

    def render(self) -> Group:
        """Return the table for a terminal: conditions around the last one, with bars."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table(*(f.dim for f in self.spec.grid), expand=False)
        table.add_column("members", min_width=24)
        table.add_column("", justify="right")
        at = next((i for i, c in enumerate(self.conditions) if c.index == self.last), 0)
        first = max(0, min(at - ROWS // 2, len(self.conditions) - ROWS))
        for condition in self.conditions[first : first + ROWS]:
            made, all_members = self.counts[condition.index], self.spec.members
            cells = [short(v) for v in condition.labels.values()]
            table.add_row(*cells, ProgressBar(all_members, made, width=24), f"{made}/{all_members}")
        return Group(Text(f"{self.spec.title}: {self.summary()}"), table)


def duration(seconds: float) -> str:
    """Return a time in its natural unit."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
