"""The paper's figures, correct, with their numbers, and one page that says in words what is seen.

Every module of this package with a function ``make(run) -> Exhibit`` is an exhibit: to add one, add a module. It has a
``TITLE``, its place in the ``ORDER`` of the page, and the ``SECONDS`` it takes, roughly, for the progress bar. ``make``
calls ``run.step(share)`` as work is done, and may raise :class:`~vkernel.reproduce.page.Skip` with a sentence, which
the page then shows in its place. The shipped studies (:mod:`vkernel.reproduce.studies`) follow if everything is wanted.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
import platform
import shlex
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vkernel.core.progress import Reporter, progress

if TYPE_CHECKING:
    from vkernel.reproduce.page import Exhibit

__all__ = ["exhibits", "run"]


def exhibits() -> list[ModuleType]:
    """The modules that make an exhibit, in the order of the page."""
    found = (importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__))
    return sorted((module for module in found if hasattr(module, "make")), key=lambda module: module.ORDER)


def _step(tell: Reporter, module: Any, share: float) -> None:
    tell(module.TITLE, share * module.SECONDS)


def run(out: Path, *, seed: int = 0, quick: bool = False, everything: bool = False) -> Path:
    """Make every figure into the folder ``out`` and return its ``index.html``.

    The same ``seed`` gives the same numbers. ``quick`` makes the figures coarser and the intervals wider, for tests.
    ``everything`` adds the shipped studies, whose results are kept in ``out/studies``: stopped, they go on where they
    were. Progress goes to standard error; the last line, on standard output, says where the page is.
    """
    from vkernel.reproduce import page, studies

    start = time.perf_counter()
    out = page.open_folder(Path(out).expanduser())
    wanted = studies.all_of(out, seed, quick=quick) if everything else []
    parts: list[Any] = [*exhibits(), *wanted]
    made: list[page.Exhibit] = []
    skipped: list[dict[str, str]] = []
    words = ("--all",) if everything else ()
    command = shlex.join(("vkernel", "reproduce", "--out", str(out), "--seed", str(seed), *words))
    write = functools.partial(_write, out, made, skipped, command + " (quick)" * quick, seed)
    with progress(sum(part.SECONDS for part in parts)) as tell:
        for part in parts:
            began = time.perf_counter()
            step = functools.partial(_step, tell, part)
            step(0.0)
            try:
                exhibit = part.make(page.Run(out, seed, quick, step))
            except page.Skip as reason:
                skipped.append({"title": part.TITLE, "reason": str(reason)})
                step(1.0)
                continue
            made.append(dataclasses.replace(exhibit, seconds=time.perf_counter() - began))
            if part in wanted:  # a run that is stopped leaves the page as far as it came
                write(time.perf_counter() - start, "")
    seconds = time.perf_counter() - start
    index = write(seconds, "" if everything else studies.HINT)
    for item in skipped:
        print(f"{item['title']} was not made. {item['reason']}", file=sys.stderr)
    print(f"{len(made)} figures, made in {seconds:.0f} s: {index}")
    return index


def _write(
    out: Path,
    made: list[Exhibit],
    skipped: list[dict[str, str]],
    command: str,
    seed: int,
    seconds: float,
    hint: str,
) -> Path:
    import numpy
    import torch

    from vkernel.reproduce import page
    from vkernel.version import __version__

    return page.render(
        out / "index.html",
        exhibits=made,
        skipped=skipped,
        hint=hint,
        command=command,
        seed=seed,
        version=__version__,
        versions=f"vkernel {__version__}, torch {torch.__version__}, numpy {numpy.__version__}, "
        f"Python {platform.python_version()}",
        machine=f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads, no GPU used",
        seconds=seconds,
    ).resolve()
