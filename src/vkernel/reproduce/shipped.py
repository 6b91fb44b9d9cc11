"""The shipped studies as exhibits: ``vkernel reproduce --all``. Stores are kept: a run that was stopped goes on."""

from __future__ import annotations

import copy
import functools
import math
import tomllib
from pathlib import Path
from typing import Any

from xarray import DataArray

from vkernel import study
from vkernel.core.errors import InputError, require
from vkernel.reproduce.exhibit import Exhibit, Page, Part, Run
from vkernel.study import Spec, report
from vkernel.study.shipped import studies
from vkernel.study.store import Store

FOLDER = "studies"
SECONDS = 47.0  # of one study on one core, in the mean


def parts(out: Path, seed: int, *, quick: bool) -> list[Part]:
    """Return every shipped study, with the seed of the page; refuse it if a store is in use or another study's."""
    found = []
    for name, path in studies().items():
        raw = tomllib.loads(path.read_text()) | {"seed": seed}
        spec, store = study.read(tiny(raw) if quick else raw), out / FOLDER / f"{name}.zarr"
        try:
            with Store.open(store, spec):
                pass
        except InputError as error:
            raise InputError(str(error).replace("--store", "--out")) from None
        found.append(Part(f"Study: {spec.title}", SECONDS, functools.partial(_exhibit, name, spec, store)))
    require(found, "The shipped studies are not in this installation; clone the repository, or install its wheel.")
    return found


def tiny(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the study at a size for tests, too small for conclusions."""
    small = copy.deepcopy(raw) | {"members": 2, "block": 2}
    small["sampler"] = small.get("sampler", {}) | {"samples": 8, "steps": 6, "sets": 8}
    if small.setdefault("model", {}).get("kind", "linear") == "linear":
        small["model"]["per_axis"] = 4
    if "draws" in small.get("training", {}):
        small["training"]["draws"] = 24
    return small


def _exhibit(name: str, spec: Spec, store: Path, run: Run) -> Exhibit:
    """Compute what is missing of a study, and draw it."""
    before = float(study.load(store)["done"].mean())
    found = study.run(spec, store, progress=run.progress(1.0)).load()
    drawn = spec.figure
    assert drawn is not None
    about, means = str(found[drawn.value].attrs["long_name"]), report.means(found)
    axes = {f.dim: f.about or f.dim.replace("_over_", "/") for f in spec.grid}
    by = f", one line for each value of {axes[drawn.lines]}" if drawn.lines else ""
    against = (
        f"over {axes[drawn.x]} (columns) and {axes[drawn.y]} (rows)" if drawn.y else f"against {axes[drawn.x]}{by}"
    )
    page = Page(
        run,
        f"study-{name}",
        {},
        text="study",
        spec=spec,
        conditions=math.prod(spec.shape),
        store=f"{FOLDER}/{store.name}",
        before=before,
        value=report.finding(found),
        verdict=report.sentence(found).rpartition("; ")[2],
        about=f"{about[0].upper()}{about[1:]}",
        against=against,
        means=means[drawn.value],
        se=means[f"{drawn.value}_se"],
        across=drawn.y or drawn.lines,
        label=_label,
    )
    page.picture(f"study-{name}", functools.partial(report.figure, found))
    data = report.export(store, run.out / FOLDER / f"{name}.csv")
    return page.exhibit(data=f"{FOLDER}/{data.name}")


def _label(array: DataArray, dim: str, k: int) -> str:
    value = array[dim].values[k]
    return str(value) if isinstance(value, str) else f"{dim.replace('_over_', '/')} = {report.text(value)}"
