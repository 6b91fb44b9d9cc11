"""A run as it stands in its log, with its verdict: for the command line, as a table, JSON and a page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vkernel.core.files import write, write_json
from vkernel.reports.monitor import log
from vkernel.reports.monitor.alarm import Verdict, verdicts
from vkernel.reports.monitor.log import Run
from vkernel.reports.monitor.page import page
from vkernel.reports.monitor.report import COLUMNS, cells, evidence, gist, numbers

if TYPE_CHECKING:
    from rich.console import Group

SHOWN = 20  # evaluations in a table


@dataclass(frozen=True)
class RunReport:
    """A run, the folder of its log, and the seconds after which a browser reads its page again while it goes on."""

    run: Run
    folder: Path
    refresh: int = 0

    @classmethod
    def read(cls, path: str | Path, refresh: int = 0) -> RunReport:
        """Read the log in a folder."""
        return cls(log.read(path), log.find(path).parent, refresh)

    @property
    def verdicts(self) -> list[Verdict]:
        """What was known after each evaluation."""
        return verdicts(self.run.records, self.run.setting)

    def to_html(self, path: str | Path) -> Path:
        """Write a self-contained page."""
        return write(path, page(self.run, self.folder, self.refresh))

    def to_json(self, path: str | Path) -> Path:
        """Write all numbers."""
        found, run = self.verdicts, self.run
        values = {"setting": run.setting.to_json(), "verdict": numbers(found[-1]) if found else None}
        return write_json(path, {**values, "evaluations": [r.to_json() for r in run.records]})


def table(report: RunReport, last: bool = False) -> Group:
    """Return the verdict, its evidence and the evaluations for the terminal; with ``last`` one evaluation alone."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    found, run = report.verdicts, report.run
    final = found[-1] if found else None
    lines = [gist(final, run.setting), *(evidence(final, run.setting) if final is not None and not last else ())]
    shown = list(zip(run.records, found, strict=True))[-1 if last else -SHOWN :]
    body = [cells(record, known, run.setting) for record, known in shown]
    rows = Table(box=None, pad_edge=False)
    for name, *column in zip(COLUMNS, *body, strict=True):
        widest = max(map(len, (name, *column)))
        rows.add_column(name, justify="left" if name == COLUMNS[-1] else "right", no_wrap=True, min_width=widest)
    for row in body:
        rows.add_row(*row)
    return Group(Text("\n".join(lines)), *([rows] if found else []))
