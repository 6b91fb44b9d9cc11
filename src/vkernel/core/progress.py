"""Progress of long work: a bar on a terminal, plain lines elsewhere, a callback, or nothing."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from vkernel.core.errors import require

Progress = bool | Callable[[str, float], None]
EVERY = 10.0  # seconds between plain lines


class Reporter(Protocol):
    """``step(label, done)`` reports that ``done`` more units of work, under the given label, are finished."""

    def __call__(self, label: str, done: float = 1.0) -> None: ...


@contextmanager
def progress(total: float, progress: Progress = True) -> Iterator[Reporter]:
    """Yield a reporter, whose calls add up to ``total`` units of work. ``True`` writes to standard error, ``False``
    nowhere; a callable receives the label and the finished share."""
    good = progress in (True, False) or callable(progress)
    require(good, f"progress must be True, False or a function of a label and a share; got {progress!r}.")
    if progress is True and sys.stderr is not None and sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        label = TextColumn("{task.description:<28}", markup=False)
        columns = (label, BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        bar = Progress(*columns, console=Console(stderr=True), transient=True)
        task = bar.add_task("starting", total=total)
        try:
            with contextlib.suppress(OSError):  # the terminal may be gone; the work goes on
                bar.start()
            yield lambda label, done=1.0: bar.update(task, advance=done, description=label)
        finally:
            with contextlib.suppress(OSError):
                bar.stop()
        return
    passed, start = 0.0, time.monotonic()
    last = start

    def step(label: str, done: float = 1.0) -> None:
        nonlocal passed, last
        passed, now = passed + done, time.monotonic()
        share = min(passed / total, 1.0)
        if callable(progress):
            progress(label, share)
        elif progress and sys.stderr is not None and now - last >= EVERY:
            last = now
            with contextlib.suppress(OSError, ValueError):  # closed, or a pipe that nobody reads
                print(f"{label}: {100 * share:.0f} % after {now - start:.0f} s", file=sys.stderr, flush=True)

    yield step


def part(step: Reporter, label: str, units: float) -> Callable[[str, float], None]:
    """Return a callback for the progress, from 0 to 1, of work that is ``units`` of a larger whole."""
    done = 0.0

    def report(_: str, share: float) -> None:
        nonlocal done
        step(label, units * (share - done))
        done = share

    return report
