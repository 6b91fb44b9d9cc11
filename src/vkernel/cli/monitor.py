"""``vkernel monitor``: the verdict and the page of a training run, from its log."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from vkernel.cli.common import Html, Json, Quiet, argument, option, show, write
from vkernel.cli.streams import say
from vkernel.core.errors import require


def monitor(
    run: Annotated[Path, argument("monitor.run")],
    html: Html = None,
    json: Json = None,
    refresh: Annotated[int, option("monitor.refresh")] = 10,
    watch: Annotated[bool, option("monitor.watch")] = False,
    quiet: Quiet = False,
) -> None:
    """Show whether a training run that vk.Monitor watches is learning, settled or memorising."""
    from vkernel.reports.monitor.log import find
    from vkernel.reports.monitor.result import RunReport, table

    require(refresh >= 1, f"--refresh must be a number of seconds, 1 or more; got {refresh}.")
    report = RunReport.read(run, refresh)
    write(report, None if quiet else table(report), json, html)
    if not watch:
        return
    say(f"watching {find(run)}; Ctrl-C ends this")
    changed = find(run).stat().st_mtime_ns
    while report.run.running:
        time.sleep(refresh)
        seen = find(run).stat().st_mtime_ns
        before, report = len(report.run.records), RunReport.read(run, refresh)
        if seen != changed or not report.run.running:
            changed = seen
            write(report, None, json, html)
            if not quiet and len(report.run.records) != before:
                show(table(report, last=True))
    say("the run has ended")
