"""The log of a run: a folder with ``monitor.jsonl``, a small picture for each evaluation, and TensorBoard's files.

The first line of ``monitor.jsonl`` is the header (version, :class:`~vkernel.reports.monitor.record.Setting`); then come
lines of three kinds, in the order of time: ``start`` (a process began or resumed the run), ``evaluation`` and ``end``.
Every line is on disk before the next step of training. A line that was torn by a kill is ignored, and overwritten when
the run continues. An evaluation supersedes all earlier lines of the same or a later step: those of a run that was
stopped and continued from an older checkpoint."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vkernel.core.errors import InputError, require
from vkernel.core.files import expand, make_folder
from vkernel.reports.monitor.record import Evaluation, Setting
from vkernel.version import __version__

NAME, FORMAT = "monitor.jsonl", 1


@dataclass(frozen=True)
class Run:
    """What a log holds: evaluations that are not superseded, the wall time and the cost of all, and whether the run
    has ended. ``process`` is the machine and the process that wrote last."""

    setting: Setting
    records: tuple[Evaluation, ...]
    wall: float = 0.0
    spent: tuple[float, float] = (0.0, 0.0)
    ended: bool = False
    process: tuple[str, int] = ("", 0)

    @property
    def running(self) -> bool:
        """Whether the process that writes the log may still run; of another machine nothing is known but its end."""
        host, number = self.process
        if self.ended or host != socket.gethostname():
            return not self.ended
        try:
            os.kill(number, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


def kept(records: list[Evaluation], new: Evaluation) -> list[Evaluation]:
    """Return the records with a new one, which supersedes those of the same or a later step."""
    return [r for r in records if r.step < new.step] + [new]


def find(path: str | Path) -> Path:
    """Return the file of a log, given its folder or itself."""
    place = expand(path)
    file = place / NAME if place.is_dir() else place
    require(file.is_file(), f"{path} holds no log of a monitor ({NAME}).")
    return file


def read(path: str | Path) -> Run:
    """Read the log in a folder."""
    file = find(path)
    lines = file.read_bytes().split(b"\n")
    header: dict[str, Any] | None = None
    records, wall, spent, ended, process, drawn = list[Evaluation](), 0.0, (0.0, 0.0), False, ("", 0), 0.0
    for line in lines[:-1]:  # what follows the last line end is torn, or nothing
        try:
            values = json.loads(line)
            if header is None:
                header = values
                known = isinstance(values, dict) and values.get("format") == FORMAT and "setting" in values
                require(known, f"{file} is no log of a monitor, or of another version of it.")
            elif values["kind"] == "evaluation":
                new = Evaluation.from_json(values)
                records, wall, ended = kept(records, new), max(wall, new.wall), False
                drawn += new.cost[1]
                spent = (new.spent - drawn, drawn)
            elif values["kind"] == "start":
                ended, process = False, (str(values["host"]), int(values["pid"]))
            elif values["kind"] == "end":
                ended, wall = True, max(wall, float(values["wall"]))
        except InputError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if header is None:
                raise InputError(f"{file} is no log of a monitor: its first line cannot be read.") from error
            continue  # a line that was damaged; the others stand
    require(header is not None, f"{file} is empty, or its first line was torn; remove it to start again.")
    assert header is not None
    try:
        setting = Setting.from_json(header["setting"])
    except (KeyError, TypeError) as error:
        raise InputError(f"{file} is a log of another version of vkernel, {header.get('vkernel')}.") from error
    return Run(setting, tuple(records), wall, spent, ended, process)


class Log:
    """The log of a run that goes on: made or continued in the folder ``path``."""

    def __init__(self, path: str | Path, setting: Setting) -> None:
        self.folder = make_folder(path)
        self.file = self.folder / NAME
        self.run = Run(setting, ())
        whole = self.file.exists() and b"\n" in self.file.read_bytes()  # a torn header is that of no run
        if whole:
            self.run = read(self.folder)
            other = self.run.setting.differences(setting)
            what = f"{self.folder} holds the log of another run: {', '.join(other)} differ"
            require(not other, f"{what}. Give another folder as log=, or remove this one.")
            self._truncate(self.file.read_bytes().rfind(b"\n") + 1)
        else:
            self._truncate(0)
            self._append({"vkernel": __version__, "format": FORMAT, "setting": setting.to_json()})
        self._append({"kind": "start", "time": time.time(), "host": socket.gethostname(), "pid": os.getpid()})

    def add(self, record: Evaluation, verdict: dict[str, Any]) -> None:
        """Write an evaluation; ``verdict`` is for readers of the file, and computed again by :func:`read`'s users."""
        self._append({"kind": "evaluation", "time": time.time(), **record.to_json(), "verdict": verdict})

    def end(self, wall: float) -> None:
        """Write that the run has ended."""
        self._append({"kind": "end", "time": time.time(), "wall": wall})

    def _truncate(self, size: int) -> None:
        try:
            with self.file.open("ab") as file:
                file.truncate(size)
        except OSError as error:
            raise InputError(f"Cannot write {self.file}: {error.strerror}.") from None

    def _append(self, values: dict[str, Any]) -> None:
        """Append a line and wait until it is on disk; a line that could not be written whole is taken back."""
        raw = json.dumps(values, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        with self.file.open("ab", buffering=0) as file:
            start = file.tell()
            try:
                rest = memoryview(raw)
                while rest:
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(start)
                raise
