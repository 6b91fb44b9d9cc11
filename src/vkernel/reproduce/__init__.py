"""The figures of the paper, corrected, with their numbers, and a page that describes them: ``vkernel reproduce``.

An exhibit is a function ``make(run) -> Exhibit``, a text ``texts/NAME.toml`` (:mod:`vkernel.reproduce.exhibit`) and a
title in ``texts/page.toml``; :func:`exhibits` lists the functions. ``make`` calls ``run.step(share)`` as work is done,
and may raise :class:`~vkernel.reproduce.exhibit.Skip` with a sentence, which the page then shows instead. With
``--all`` the shipped studies are exhibits too (``studies``); their stores are kept, so that a run can go on.
"""

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
from vkernel.core.checks import check_whole
from vkernel.core.errors import InputError
from vkernel.core.files import write
from vkernel.core.progress import Progress, progress as report_progress
from vkernel.reports import html
from vkernel.reproduce import (
    effective,
    exact,
    exhibit,
    factors,
    generalization,
    images,
    learned,
    paths,
    plane,
    pool,
    profiles,
    scorecard,
    twins,
    variances,
)
from vkernel.reproduce.exhibit import Exhibit, Page, Part, Run, Skip, Values
from vkernel.study import Spec, report, shipped
from vkernel.study.store import Store
from vkernel.version import __version__

__all__ = ["exhibits", "run"]

FOLDER = "studies"
SECONDS = 47.0  # of one study on one core, in the mean


def exhibits() -> list[Part]:
    """Return the exhibits, in the order of the page; ``texts/page.toml`` has titles and seconds on one core.

    >>> import vkernel as vk
    >>> [part.name for part in vk.reproduce.exhibits()][:2]
    ['figure1', 'digits_line']
    """
    makes = [exact.figure1, images.digits_line, images.cifar_line, exact.memorise, exact.paths2d, exact.laws]
    makes += [learned.figure2, effective.effective, effective.weights, learned.figure3]
    makes += [variances.v_linear, variances.shares, variances.v_lazy]
    makes += [learned.mlp_plane, paths.conditional, paths.path_integral, plane.v_over_c, images.between_images]
    makes += [factors.factors, generalization.generalization, twins.twins, profiles.profiles]
    return [Part(make=make, name=make.__name__, **exhibit.read("page")[make.__name__]) for make in makes]


def run(
    out: Path,
    *,
    seed: int = 0,
    quick: bool = False,
    everything: bool = False,
    workers: int = 1,
    progress: Progress = True,
) -> Path:
    """Make every figure and the scorecard into the folder ``out`` and return its ``index.html``.

    The same ``seed`` gives the same numbers. ``quick`` makes the figures coarser and the intervals wider, for tests.
    ``everything`` adds the shipped studies, whose results are kept in ``out/studies``: a run that was stopped goes on.
    With more than one of ``workers`` exhibits are made side by side, in processes; a script that asks for them must be
    importable (``if __name__ == "__main__":``).

    >>> import vkernel as vk
    >>> from pathlib import Path
    >>> vk.reproduce.run(Path("out"), quick=True)  # doctest: +SKIP
    """
    workers = check_whole(workers, "workers", 1)
    start, out = time.perf_counter(), exhibit.open_folder(Path(out))
    command = shlex.join(("vkernel", "reproduce", "--out", str(out), "--seed", str(seed), *["--all"] * everything))
    versions = f"torch {torch.__version__}, numpy {numpy.__version__}, Python {platform.python_version()}"
    about = {"command": command + " (quick)" * quick, "seed": seed, "versions": f"vkernel {__version__}, {versions}"}
    about["machine"] = f"{platform.system()} {platform.machine()}, {workers} processes, no GPU used"
    parts = exhibits()
    if not (out / "scorecard.json").exists():
        scorecard.save(out, [], parts, about)  # by which a run that was stopped is known as ours
    more = studies(out, seed, quick=quick) if everything else []
    parts += more
    made: dict[int, Exhibit] = {}
    reasons: dict[int, dict[str, str]] = {}
    counts: dict[str, int] = {}

    def write_page(complete: bool) -> Path:
        nonlocal counts
        seconds, hint = time.perf_counter() - start, complete and not everything
        shown, left_out = [made[i] for i in sorted(made)], [reasons[i] for i in sorted(reasons)]
        counts = scorecard.save(out, shown, parts, about)
        topics: dict[str, list[Exhibit]] = {}
        for item in shown:
            topics.setdefault(item.topic, []).append(item)
        values = {
            "exhibits": shown,
            "topics": topics,
            "skipped": left_out,
            "hint": hint,
            "counts": counts,
            "seconds": seconds,
        }
        return write(out / "index.html", html.page("index.html", **values, **about)).resolve()

    with report_progress(sum(part.seconds for part in parts), progress) as show:
        begin = Run(out, seed, quick, pool.silent)
        alone = workers == 1
        finished = pool.one_by_one(parts, begin, show) if alone else pool.side_by_side(parts, begin, show, workers)
        for at, found in finished:
            if isinstance(found, Skip):
                reasons[at] = {"title": parts[at].title, "reason": str(found)}
                continue
            made[at] = found
            if parts[at] in more:  # a run that is stopped leaves the page with what it has
                write_page(False)
    index = write_page(True)
    for item in reasons.values():
        print(f"{item['title']} was not made. {item['reason']}", file=sys.stderr)
    print(*(f"{verdict}: {count}" for verdict, count in sorted(counts.items())), sep=", ")
    print(f"{len(made)} figures and the scorecard, made in {time.perf_counter() - start:.0f} s: {index}")
    return index


def studies(out: Path, seed: int, *, quick: bool) -> list[Part]:
    """Return every shipped study but those of networks on images, which have a page of their own, with the seed of this
    page; refuse it if a store is in use or another study's."""
    found = []
    for name, path in shipped().items():
        raw = tomllib.loads(path.read_text(encoding="utf8")) | {"seed": seed}
        if "levels" in raw.get("measure", {}):
            continue
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
    drawn = spec.figure
    assert drawn is not None
    held = {f.dim: 0 for f in spec.grid if f.dim not in (drawn.x, drawn.y, drawn.lines)}  # as in the figure
    means = report.means(found).isel(held)
    values: Values = {"spec": spec, "conditions": math.prod(spec.shape), "store": f"{FOLDER}/{store.name}"}
    values |= {
        "before": before,
        "value": report.finding(found),
        "pairs": report.pairs(found),
        "verdict": report.sentence(found).rpartition("; ")[2],
    }
    values |= {"short": report.text, "means": means[drawn.value], "se": means[f"{drawn.value}_se"]}
    values |= {"axes": {f.dim: f.axis for f in spec.grid}, "what": found[drawn.value].attrs["long_name"]}
    values["held"] = {f.axis: f.coordinate[0] for f in spec.grid if f.dim in held}
    page = Page(run, f"study-{name}", {}, text="study", across=drawn.y or drawn.lines, **values)
    page.picture(f"study-{name}", report.figure, found)
    data = report.export(store, run.out / FOLDER / f"{name}.csv")
    return page.exhibit(data=f"{FOLDER}/{data.name}")
