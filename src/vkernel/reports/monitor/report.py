"""Verdicts of a monitor in sentences, and its live table. All sentences stand in ``templates/monitor.txt``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

from vkernel.core.estimate import Estimate
from vkernel.core.progress import Progress
from vkernel.reports import html
from vkernel.reports.html import significant
from vkernel.reports.monitor.alarm import DELTA, FALL, Verdict
from vkernel.reports.monitor.record import Evaluation, Setting, plain

COLUMNS = ("step", "training", "held-out", "gap (bound)", "copies", "expected", "cost", "verdict")
WIDTHS = (9, 8, 8, 11, 7, 17, 6)
EVIDENCE = ("gap", "fall", "copies", "forecast")
BLANK = "–"


def text(block: str, **values: object) -> str:
    """Return the sentences of one block of ``templates/monitor.txt``."""
    known = {"delta": DELTA, "fall": FALL, "steps": lambda n: f"{int(n):,}", "digits": significant, "percent": _percent}
    return html.sentences("monitor.txt", block, **known, **values)


concerns = text


def gist(verdict: Verdict | None, setting: Setting) -> str:
    """Return the verdict in a few words."""
    return text("gist", v=verdict, setting=setting)


def evidence(verdict: Verdict, setting: Setting) -> list[str]:
    """Return the evidence for a verdict, in sentences."""
    found = [text(block, v=verdict, setting=setting) for block in EVIDENCE]
    return [sentence for sentence in found if sentence]


def cells(record: Evaluation, verdict: Verdict, setting: Setting) -> list[str]:
    """Return the cells of a table for one evaluation, with the verdict at that time."""
    gap, drawn, due = verdict.gap, record.drawn, verdict.forecast
    bound = "" if gap is None else f"{100 * gap.value:.0f} ({max(100 * gap.low, -999):.0f}) %"
    return [
        f"{record.step:,}",
        f"{record.train.value:.3f}",
        f"{record.test.value:.3f}",
        bound or BLANK,
        BLANK if drawn is None else f"{100 * drawn.copies(setting.threshold).value:.1f} %",
        BLANK if due.value is None else f"{significant(due.value)} ({significant(due.low)}–{significant(due.high)})",
        f"{100 * record.spent / record.wall:.1f} %" if record.wall > 0 else BLANK,
        text("word", v=verdict),
    ]


class Table:
    """A live table on standard error: one line for each evaluation. With a function instead of ``True``, the lines go
    there, with the share of the wall time that was spent."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.begun = progress, False

    def add(self, record: Evaluation, verdict: Verdict, setting: Setting) -> None:
        """Print the line of an evaluation, after the head of the table if it is the first."""
        if self.progress is False:
            return
        line = _line(cells(record, verdict, setting))
        if callable(self.progress):
            with contextlib.suppress(Exception):  # it must not stop the training
                self.progress(line, record.spent / record.wall if record.wall > 0 else 0.0)
            return
        if not self.begun:
            self.begun = True
            _print(_line(COLUMNS))
        alarm = verdict.state == "memorising" and sys.stderr is not None and sys.stderr.isatty()
        _print(f"\x1b[1;31m{line}\x1b[0m" if alarm else line)

    def note(self, sentence: str) -> None:
        """Print a sentence."""
        if self.progress is True:
            _print(f"vk.Monitor: {sentence}")


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share > -10 else "less than -1,000 %"


def _line(cells: tuple[str, ...] | list[str]) -> str:
    *numbers, last = cells
    return "  ".join([cell.rjust(width) for cell, width in zip(numbers, WIDTHS, strict=True)] + [last])


def _print(line: str) -> None:
    """Print to standard error, above a progress bar of tqdm if there is one."""
    with contextlib.suppress(Exception):  # closed, or a pipe that nobody reads
        tqdm: Any = sys.modules.get("tqdm")
        if tqdm is not None and hasattr(tqdm, "tqdm"):
            tqdm.tqdm.write(line, file=sys.stderr)
        else:
            print(line, file=sys.stderr, flush=True)


def numbers(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as plain numbers, for files."""

    def fields(value: object) -> object:
        if isinstance(value, Estimate):
            return dict(zip(("value", "se", "low", "high"), value.fields, strict=True))
        held = getattr(value, "__dataclass_fields__", None)
        return value if held is None else {name: fields(getattr(value, name)) for name in held}

    found = fields(verdict)
    assert isinstance(found, Mapping)
    return dict(plain(found))
