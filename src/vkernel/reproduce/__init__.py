"""The figures of the paper, corrected, with their numbers, and a page that describes them: ``vkernel reproduce``.

An exhibit is a function ``make(run) -> Exhibit``, a text ``texts/NAME.toml`` (:mod:`vkernel.reproduce.exhibit`) and a
title in ``texts/page.toml``; :func:`exhibits` lists the functions. ``make`` calls ``run.step(share)`` as work is done,
and may raise :class:`~vkernel.reproduce.exhibit.Skip` with a sentence, which the page then shows instead.
"""

from __future__ import annotations

import dataclasses
import platform
import shlex
import sys
import time
from pathlib import Path

import numpy
import torch

from vkernel.core.files import write
from vkernel.core.progress import progress
from vkernel.reports import html
from vkernel.reproduce import exact, exhibit, images, learned, shipped, variances
from vkernel.reproduce.exhibit import Part
from vkernel.version import __version__

__all__ = ["exhibits", "run"]


def exhibits() -> list[Part]:
    """Return the exhibits, in the order of the page; ``texts/page.toml`` has titles and seconds on two cores."""
    makes = [exact.figure1, images.digits_line, images.cifar_line, exact.memorise, exact.paths2d, exact.laws]
    makes += [learned.figure2, learned.figure3, variances.v_linear, variances.shares, variances.v_lazy]
    makes += [learned.mlp_plane, images.between_images]
    return [Part(make=make, **exhibit.read("page")[make.__name__]) for make in makes]


def run(out: Path, *, seed: int = 0, quick: bool = False, everything: bool = False) -> Path:
    """Make every figure into the folder ``out`` and return its ``index.html``.

    The same ``seed`` gives the same numbers. ``quick`` makes the figures coarser and the intervals wider, for tests.
    ``everything`` adds the shipped studies, whose results are kept in ``out/studies``: a run that was stopped goes on.
    Progress is written to standard error; the last line, on standard output, says where the page is.
    """
    start, out = time.perf_counter(), exhibit.open_folder(Path(out).expanduser())
    studies = shipped.parts(out, seed, quick=quick) if everything else []
    parts = [*exhibits(), *studies]
    command = shlex.join(("vkernel", "reproduce", "--out", str(out), "--seed", str(seed), *["--all"] * everything))
    versions = f"torch {torch.__version__}, numpy {numpy.__version__}, Python {platform.python_version()}"
    about = {"command": command + " (quick)" * quick, "seed": seed, "versions": f"vkernel {__version__}, {versions}"}
    about["machine"] = f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads, no GPU used"
    made: list[exhibit.Exhibit] = []
    skipped: list[dict[str, str]] = []

    def write_page(complete: bool) -> Path:
        seconds, hint = time.perf_counter() - start, complete and not everything
        text = html.page("index.html", exhibits=made, skipped=skipped, hint=hint, seconds=seconds, **about)
        return write(out / "index.html", text).resolve()

    with progress(sum(part.seconds for part in parts)) as report:
        for part in parts:
            began = time.perf_counter()

            def step(share: float, part: Part = part) -> None:
                report(part.title, share * part.seconds)

            step(0.0)
            try:
                found = part.make(exhibit.Run(out, seed, quick, step))
            except exhibit.Skip as reason:
                skipped.append({"title": part.title, "reason": str(reason)})
                step(1.0)
                continue
            made.append(dataclasses.replace(found, title=part.title, seconds=time.perf_counter() - began))
            if part in studies:  # a run that is stopped leaves the page with what it has
                write_page(False)
    index = write_page(True)
    for item in skipped:
        print(f"{item['title']} was not made. {item['reason']}", file=sys.stderr)
    print(f"{len(made)} figures, made in {time.perf_counter() - start:.0f} s: {index}")
    return index
