"""Long work shows a bar on a terminal, plain lines elsewhere, and nothing when told to be quiet."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

__all__ = ["Reporter", "progress"]

EVERY = 10.0  # seconds between plain lines


class Reporter(Protocol):
    """``step(label)`` says that one more unit of work, under the given label, is done."""

    def __call__(self, label: str, done: float = 1.0) -> None: ...


@contextmanager
def progress(total: float, *, show: bool = True) -> Iterator[Reporter]:
    """A reporter for ``total`` units of work, on standard error."""
    if not show:
        yield lambda label, done=1.0: None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description:<28}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("starting", total=total)
            yield lambda label, done=1.0: bar.update(task, advance=done, description=label)
    else:
        yield _lines(total)


def _lines(total: float) -> Reporter:
    start = said = time.monotonic()
    passed = 0.0

    def step(label: str, done: float = 1.0) -> None:
        nonlocal passed, said
        passed += done
        now = time.monotonic()
        if now - said >= EVERY:
            said = now
            print(f"{label}: {min(100 * passed / total, 100):.0f} % after {now - start:.0f} s", file=sys.stderr)

    return step
