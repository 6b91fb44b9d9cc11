"""The figures of the paper, corrected, with their numbers, and a page that describes them: ``vkernel reproduce``.

An exhibit is a function ``make(run) -> Exhibit`` and a text, ``texts/NAME.toml`` (:mod:`vkernel.reproduce.exhibit`).
To add one, write both and name it in :func:`exhibits`. ``make`` calls ``run.step(share)`` as work is done, and may
raise :class:`~vkernel.reproduce.exhibit.Skip` with a sentence, which the page then shows instead.
"""

from __future__ import annotations

import dataclasses
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from vkernel.core.files import write
from vkernel.core.progress import progress

if TYPE_CHECKING:
    from vkernel.reproduce.exhibit import Part

__all__ = ["exhibits", "run"]


def exhibits() -> list[Part]:
    """Return the exhibits, in the order of the page, with the seconds that each takes on two cores."""
    from vkernel.reproduce import exact, images, learned, variances
    from vkernel.reproduce.exhibit import Part

    return [
        Part("Figure 1: where the target is noisy", 6.0, exact.figure1),
        Part("C along the line between two digits", 20.0, images.digits_line),
        Part("C along the line between two CIFAR images", 30.0, images.cifar_line),
        Part("Memorisation, and the error that fakes generalization", 20.0, exact.memorise),
        Part("Trajectories over the C map", 9.0, exact.paths2d),
        Part("Final laws against κ and step count", 32.0, exact.laws),
        Part("Figure 2: linear models between three points", 18.0, learned.figure2),
        Part("Figure 3: features decide where the gaps fill", 35.0, learned.figure3),
        Part("V, predicted and measured", 20.0, variances.v_linear),
        Part("Where the variance comes from", 20.0, variances.shares),
        Part("Training time: a lazy network's variance against τ", 24.0, variances.v_lazy),
        Part("Networks on the plane of Figure 3", 40.0, learned.mlp_plane),
        Part("Between two images", 14.0, images.between_images),
    ]


def run(out: Path, *, seed: int = 0, quick: bool = False, everything: bool = False) -> Path:
    """Make every figure into the folder ``out`` and return its ``index.html``.

    The same ``seed`` gives the same numbers. ``quick`` makes the figures coarser and the intervals wider, for tests.
    ``everything`` adds the shipped studies, whose results are kept in ``out/studies``: a run that was stopped goes on.
    Progress is written to standard error; the last line, on standard output, says where the page is.
    """
    import numpy
    import torch

    from vkernel.reports import html
    from vkernel.reproduce import exhibit, shipped
    from vkernel.version import __version__

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
