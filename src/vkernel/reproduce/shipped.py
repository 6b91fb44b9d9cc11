"""The shipped studies as exhibits: ``vkernel reproduce --all``. Stores are kept: a run that was stopped goes on."""

from __future__ import annotations

import functools
import math
import tomllib
from pathlib import Path

from xarray import DataArray

from vkernel import study
from vkernel.core.errors import InputError
from vkernel.reproduce.exhibit import Exhibit, Page, Part, Run, Values
from vkernel.study import Spec, report
from vkernel.study.spec import shipped
from vkernel.study.store import Store

FOLDER = "studies"
SECONDS = 47.0  # of one study on one core, in the mean


def parts(out: Path, seed: int, *, quick: bool) -> list[Part]:
    """Return every shipped study, with the seed of the page; refuse it if a store is in use or another study's."""
    found = []
    for name, path in shipped().items():
        raw = tomllib.loads(path.read_text()) | {"seed": seed}
        spec, store = study.read(tiny(raw) if quick else raw), out / FOLDER / f"{name}.zarr"
        try:
            with Store.open(store, spec):
                pass
        except InputError as error:
            raise InputError(str(error).replace("--store", "--out")) from None
        found.append(Part(f"Study: {spec.title}", SECONDS, functools.partial(_exhibit, name, spec, store)))
    return found


def tiny(raw: Values) -> Values:
    """Return the study at a size for tests, too small for conclusions."""
    model, training = raw.get("model", {}), raw.get("training", {})
    small = raw | {"members": 2, "block": 2, "model": model, "training": training}
    small["sampler"] = raw.get("sampler", {}) | {"samples": 8, "steps": 6, "sets": 8}
    if model.get("kind", "linear") == "linear":
        small["model"] = model | {"per_axis": 4}
    if "draws" in training:
        small["training"] = training | {"draws": 24}
    return small


def _exhibit(name: str, spec: Spec, store: Path, run: Run) -> Exhibit:
    """Compute what is missing of a study, and draw it."""
    before = float(study.load(store)["done"].mean())
    found = study.run(spec, store, progress=run.progress(1.0)).load()
    drawn, means = spec.figure, report.means(found)
    assert drawn is not None
    values: Values = {"spec": spec, "conditions": math.prod(spec.shape), "store": f"{FOLDER}/{store.name}"}
    values |= {"before": before, "value": report.finding(found), "verdict": report.sentence(found).rpartition("; ")[2]}
    values |= {"label": _label, "means": means[drawn.value], "se": means[f"{drawn.value}_se"]}
    values |= {"axes": {f.dim: f.axis for f in spec.grid}, "across": drawn.y or drawn.lines}
    values["what"] = found[drawn.value].attrs["long_name"]
    page = Page(run, f"study-{name}", {}, text="study", **values)
    page.picture(f"study-{name}", report.figure, found)
    data = report.export(store, run.out / FOLDER / f"{name}.csv")
    return page.exhibit(data=f"{FOLDER}/{data.name}")


def _label(array: DataArray, dim: str, k: int) -> str:
    value = array[dim].values[k]
    return str(value) if isinstance(value, str) else f"{dim.replace('_over_', '/')} = {report.text(value)}"
