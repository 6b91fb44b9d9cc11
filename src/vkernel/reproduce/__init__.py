"""The figures of the paper, corrected, with their numbers, and a page that describes them: ``vkernel reproduce``.

An exhibit is a function ``make(run) -> Exhibit``, a text ``texts/NAME.toml`` (:mod:`vkernel.reproduce.exhibit`) and a
title in ``texts/page.toml``; :func:`exhibits` lists the functions. ``make`` calls ``run.step(share)`` as work is done,
and may raise :class:`~vkernel.reproduce.exhibit.Skip` with a sentence, which the page then shows instead. With
``--all`` the shipped studies are exhibits too (``studies``); their stores are kept, so that a run can go on.
"""

import dataclasses
import functools
import math
import platform
import shlex
import sys
import time
import tomllib
from pathlib import Path

import numpy
import torch

from vkernel import study
from vkernel.core.errors import InputError
from vkernel.core.files import write
from vkernel.core.progress import progress
from vkernel.reports import html
from vkernel.reproduce import exact, exhibit, images, learned, variances
from vkernel.reproduce.exhibit import Exhibit, Page, Part, Run, Values
from vkernel.study import Spec, report, shipped
from vkernel.study.store import Store
from vkernel.version import __version__

__all__ = ["exhibits", "run"]

FOLDER = "studies"
SECONDS = 47.0  # of one study on one core, in the mean


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
    """
    start, out = time.perf_counter(), exhibit.open_folder(Path(out).expanduser())
    more = studies(out, seed, quick=quick) if everything else []
    parts = [*exhibits(), *more]
    command = shlex.join(("vkernel", "reproduce", "--out", str(out), "--seed", str(seed), *["--all"] * everything))
    versions = f"torch {torch.__version__}, numpy {numpy.__version__}, Python {platform.python_version()}"
    about = {"command": command + " (quick)" * quick, "seed": seed, "versions": f"vkernel {__version__}, {versions}"}
    about["machine"] = f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads, no GPU used"
    made: list[Exhibit] = []
    skipped: list[dict[str, str]] = []

    def write_page(complete: bool) -> Path:
        seconds, hint = time.perf_counter() - start, complete and not everything
        text = html.page("index.html", exhibits=made, skipped=skipped, hint=hint, seconds=seconds, **about)
        return write(out / "index.html", text).resolve()

    with progress(sum(part.seconds for part in parts)) as show:
        for part in parts:
            began = time.perf_counter()

            def step(share: float, part: Part = part) -> None:
                show(part.title, share * part.seconds)

            step(0.0)
            try:
                found = part.make(Run(out, seed, quick, step))
            except exhibit.Skip as reason:
                skipped.append({"title": part.title, "reason": str(reason)})
                step(1.0)
                continue
            made.append(dataclasses.replace(found, title=part.title, seconds=time.perf_counter() - began))
            if part in more:  # a run that is stopped leaves the page with what it has
                write_page(False)
    index = write_page(True)
    for item in skipped:
        print(f"{item['title']} was not made. {item['reason']}", file=sys.stderr)
    print(f"{len(made)} figures, made in {time.perf_counter() - start:.0f} s: {index}")
    return index


def studies(out: Path, seed: int, *, quick: bool) -> list[Part]:
    """Return every shipped study, with the seed of the page; refuse it if a store is in use or another study's."""
    found = []
    for name, path in shipped().items():
        raw = tomllib.loads(path.read_text()) | {"seed": seed}
        spec, store = study.read(_tiny(raw) if quick else raw), out / FOLDER / f"{name}.zarr"
        try:
            with Store.open(store, spec):
                pass
        except InputError as error:
            raise InputError(str(error).replace("--store", "--out")) from None
        found.append(Part(f"Study: {spec.title}", SECONDS, functools.partial(_exhibit, name, spec, store)))
    return found


def _tiny(raw: Values) -> Values:
    """Return the study at a size for tests, too small for conclusions."""
    tables = {"sampler": {"samples": 8, "steps": 6, "sets": 8}}
    if raw.get("model", {}).get("kind", "linear") == "linear":
        tables["model"] = {"per_axis": 4}
    if "draws" in raw.get("training", {}):
        tables["training"] = {"draws": 24}
    return raw | {"members": 2, "block": 2} | {key: raw.get(key, {}) | table for key, table in tables.items()}


def _exhibit(name: str, spec: Spec, store: Path, run: Run) -> Exhibit:
    """Compute what is missing of a study, and draw it."""
    before = float(study.load(store)["done"].mean())
    found = study.run(spec, store, progress=run.progress(1.0)).load()
    drawn, means = spec.figure, report.means(found)
    assert drawn is not None
    values: Values = {"spec": spec, "conditions": math.prod(spec.shape), "store": f"{FOLDER}/{store.name}"}
    values |= {"before": before, "value": report.finding(found), "verdict": report.sentence(found).rpartition("; ")[2]}
    values |= {"short": report.text, "means": means[drawn.value], "se": means[f"{drawn.value}_se"]}
    values |= {"axes": {f.dim: f.axis for f in spec.grid}, "what": found[drawn.value].attrs["long_name"]}
    page = Page(run, f"study-{name}", {}, text="study", across=drawn.y or drawn.lines, **values)
    page.picture(f"study-{name}", report.figure, found)
    data = report.export(store, run.out / FOLDER / f"{name}.csv")
    return page.exhibit(data=f"{FOLDER}/{data.name}")
