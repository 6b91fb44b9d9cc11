"""``vkernel reproduce``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["reproduce"]


def reproduce(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the figures and index.html go.")] = Path("out"),
    seed: Annotated[int, typer.Option(help="Seed of all draws.")] = 0,
    everything: Annotated[
        bool, typer.Option("--all", help="Add the shipped studies; stop it whenever you like, run again to go on.")
    ] = False,
) -> None:
    """Make the figures of the paper, and what the paper could not draw, with a page that says what each shows."""
    from vkernel.reproduce import run

    run(out, seed=seed, everything=everything)
