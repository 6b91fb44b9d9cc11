"""The paper's figures, correct, with their numbers, and one page that says in words what is seen.

Every module of this package with a function ``make(run) -> Exhibit`` is an exhibit: to add one, add a module. It has a
``TITLE``, its place in the ``ORDER`` of the page, and the ``SECONDS`` it takes, roughly, for the progress bar. ``make``
calls ``run.step(share)`` as work is done, and may raise :class:`~vkernel.reproduce.page.Skip` with a sentence, which
the page then shows in its place.
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

from vkernel.progress import Reporter, progress

__all__ = ["exhibits", "run"]


def exhibits() -> list[ModuleType]:
    """The modules that make an exhibit, in the order of the page."""
    found = (importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__))
    return sorted((module for module in found if hasattr(module, "make")), key=lambda module: module.ORDER)


def _step(tell: Reporter, module: ModuleType, share: float) -> None:
    tell(module.TITLE, share * module.SECONDS)


def run(out: Path, *, seed: int = 0, quick: bool = False) -> Path:
    """Make every figure into the folder ``out`` and return its ``index.html``.

    The same ``seed`` gives the same numbers. ``quick`` makes the figures coarser and the intervals wider, for tests.
    Progress goes to standard error; the last line, on standard output, says where the page is.
    """
    import numpy
    import torch

    from vkernel.reproduce import page
    from vkernel.version import __version__

    start = time.perf_counter()
    out = page.open_folder(Path(out).expanduser())
    modules = exhibits()
    made, skipped = [], []
    with progress(sum(module.SECONDS for module in modules)) as tell:
        for module in modules:
            began = time.perf_counter()
            step = functools.partial(_step, tell, module)
            step(0.0)
            try:
                exhibit = module.make(page.Run(out, seed, quick, step))
            except page.Skip as reason:
                skipped.append({"title": module.TITLE, "reason": str(reason)})
                step(1.0)
                continue
            made.append(dataclasses.replace(exhibit, seconds=time.perf_counter() - began))
    seconds = time.perf_counter() - start
    index = page.render(
        out / "index.html",
        exhibits=made,
        skipped=skipped,
        command=f"vkernel reproduce --out {shlex.quote(str(out))} --seed {seed}" + (" (quick)" if quick else ""),
        seed=seed,
        version=__version__,
        versions=f"vkernel {__version__}, torch {torch.__version__}, numpy {numpy.__version__}, "
        f"Python {platform.python_version()}",
        machine=f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads, no GPU used",
        seconds=seconds,
    ).resolve()
    for item in skipped:
        print(f"{item['title']} was not made. {item['reason']}", file=sys.stderr)
    print(f"{len(made)} figures, made in {seconds:.0f} s: {index}")
    return index
