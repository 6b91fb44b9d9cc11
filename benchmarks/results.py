"""What the benchmarks measured, on disk: one file for each kind of machine, one section for each table or curve.

A benchmark hands its rows over, and the report (:mod:`benchmarks.report`) is rendered from the files alone, so that
parts may come from different machines and different days::

    from benchmarks.results import record

    record(
        "gpu",                                    # part: "cpu" or "gpu"
        "cifar-uint8",                            # section: a short name, its key; recorded again, it is replaced
        [{"sigma": 0.1, "engine (ms)": 1.9, "error": 3e-7, "plain (ms)": 40.2, "plain error": 2e-2, "ratio": 21.2}],
        title="CIFAR's size in 8 bits: 50,000 × 3,072, 1,024 queries",
        note="Prepared in 1.2 s; fp16 takes 0.6 GB.",
    )

A row is a flat dict of column to value: a number, a string, a bool, or ``None`` (shown as –). Columns stand in the
order of their first appearance, names carry the unit ("engine (ms)"), and a column whose name holds the word "error"
is shown as a power of ten. ``plot`` makes a picture of the same rows::

    plot={"x": "n", "y": "time (s)", "limit": "limit (s)", "by": "noise", "xlabel": "points n", "fit": True}

one line for each value of column ``by`` (left out: one line), ``limit`` a dashed line, both axes logarithmic, and with
``fit`` the exponent of each line, by least squares, in legend and table. ``"above": 4096`` fits only from there on.
Each section remembers the machine it was measured on and when. Files are in ``benchmarks/results``, or below the
folder that :func:`into` names.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from vkernel.core.errors import InputError, require
from vkernel.core.files import write

__all__ = ["HERE", "PARTS", "QUICK", "Row", "folder", "into", "machine", "record", "recorded"]

PARTS = ("cpu", "gpu")
HERE = Path(__file__).parent
QUICK = HERE.parent / "out" / "benchmarks"  # a quick look does not replace a full run
_FOLDER: ContextVar[Path] = ContextVar("folder", default=HERE)

Value = float | int | str | bool | None
Row = Mapping[str, Value]


@contextlib.contextmanager
def into(path: Path | str) -> Iterator[Path]:
    """Inside, results, plots and report are below ``path``."""
    token = _FOLDER.set(Path(path))
    try:
        yield Path(path)
    finally:
        _FOLDER.reset(token)


def folder() -> Path:
    """Where results, plots and report are."""
    return _FOLDER.get()


def record(
    part: str,
    section: str,
    rows: Sequence[Row],
    *,
    title: str = "",
    note: str = "",
    plot: Mapping[str, Any] | None = None,
    threads: int | None = None,
) -> list[Row]:
    """Keep the rows of one section of ``part``, and return them; ``threads`` if other than torch's now."""
    require(part in PARTS, f"A part of the report is one of {', '.join(PARTS)}; got {part!r}.")
    rows = [dict(row) for row in rows]
    bad = [(k, v) for row in rows for k, v in row.items() if not isinstance(v, Value)]
    require(not bad, f"A result is a number, a string, a bool or None; got {bad[:1]}.")
    held = recorded(part)
    held[section] = {
        "title": title or section,
        "note": note,
        "machine": machine(part, threads),
        "plot": dict(plot) if plot else None,
        "rows": rows,
    }
    write(_path(part), json.dumps(held, indent=1, ensure_ascii=False) + "\n")
    return rows


def recorded(part: str) -> dict[str, dict[str, Any]]:
    """The sections of a part, in the order in which they were first recorded; none if there is no file."""
    path = _path(part)
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}. Remove it and run the benchmarks again.") from None


def _path(part: str) -> Path:
    return folder() / "results" / f"{part}.json"


def machine(part: str, threads: int | None = None) -> dict[str, Value]:
    """What it was measured on, and when."""
    about: dict[str, Value] = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": threads or torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if part == "gpu" and torch.cuda.is_available():
        about["gpu"] = torch.cuda.get_device_name()
        about["gpu memory (GiB)"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30)
        about["cuda"] = torch.version.cuda
    return about


def _processor() -> str:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()
