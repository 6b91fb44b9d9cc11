"""Monitors of training runs; see :class:`~vkernel.reports.monitor.monitor.Monitor`."""

from vkernel.reports.monitor.alarm import Gap, Verdict, gaps, verdict
from vkernel.reports.monitor.log import Run, read
from vkernel.reports.monitor.monitor import Monitor
from vkernel.reports.monitor.onset import Forecast
from vkernel.reports.monitor.probe import Errors
from vkernel.reports.monitor.record import Drawn, Evaluation, Setting

__all__ = [
    "Drawn",
    "Errors",
    "Evaluation",
    "Forecast",
    "Gap",
    "Monitor",
    "Run",
    "Setting",
    "Verdict",
    "gaps",
    "read",
    "verdict",
]
