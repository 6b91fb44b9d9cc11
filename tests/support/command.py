"""What a run of the command line left."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Left:
    """The exit code, and what was printed."""

    code: int
    out: str
    err: str
