"""How far a study is: a live table of conditions and members on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

import numpy as np

from vkernel.study.spec import Condition, Spec

__all__ = ["Table"]

EVERY = 10.0  # seconds between plain lines
ROWS = 16  # conditions shown at once


class Table:
    """``advance(condition, block)`` says that a block is safe."""

    def __init__(self, spec: Spec, done: np.ndarray, *, show: bool = True) -> None:
        self.spec, self.show = spec, show
        self.conditions = list(spec.conditions())
        sizes = np.array([len(spec.members_of(b)) for b in range(spec.blocks)])
        self.counts = {c.index: int(sizes[done[c.index]].sum()) for c in self.conditions}
        self.total, self.before = len(self.conditions) * spec.blocks, int(done.sum())
        self.now, self.start, self.said = self.before, time.monotonic(), time.monotonic()
        self.last: tuple[int, ...] | None = None
        self.live: Any = None

    def __enter__(self) -> Table:
        if self.show and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self.live = Live(self.render(), console=Console(stderr=True), transient=True, refresh_per_second=4)
            self.live.__enter__()
        elif self.show and self.before and self.before < self.total:
            print(f"{self.before} of {self.total} blocks are there already.", file=sys.stderr)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live is not None:
            self.live.__exit__(kind, error, trace)

    def advance(self, condition: Condition, block: int) -> None:
        """One more block is in the store."""
        self.now += 1
        self.counts[condition.index] += len(self.spec.members_of(block))
        self.last = condition.index
        if self.live is not None:
            self.live.update(self.render())
        elif self.show and time.monotonic() - self.said >= EVERY:
            self.said = time.monotonic()
            print(f"{condition}: {self.words()}", file=sys.stderr)

    def words(self) -> str:
        """Blocks done, the rate, and the time left."""
        spent, made = time.monotonic() - self.start, self.now - self.before
        if made == 0 or spent <= 0:
            return f"{self.now} of {self.total} blocks"
        rate = made * self.spec.block / spent
        left = (self.total - self.now) * spent / made
        return f"{self.now} of {self.total} blocks, {rate:.3g} members a second, {_duration(left)} left"

    def render(self) -> Any:
        """The table for a terminal: conditions around the last one, with bars."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table as Rich
        from rich.text import Text

        table = Rich(expand=False)
        for factor in self.spec.grid:
            table.add_column(factor.dim)
        table.add_column("members", min_width=24)
        table.add_column("", justify="right")
        at = next((i for i, c in enumerate(self.conditions) if c.index == self.last), 0)
        first = max(0, min(at - ROWS // 2, len(self.conditions) - ROWS))
        for condition in self.conditions[first : first + ROWS]:
            made = self.counts[condition.index]
            cells = [f"{v:g}" if isinstance(v, float) else str(v) for v in condition.labels.values()]
            table.add_row(*cells, ProgressBar(self.spec.members, made, width=24), f"{made}/{self.spec.members}")
        return Group(Text(f"{self.spec.title}: {self.words()}"), table)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
