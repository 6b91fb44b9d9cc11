"""The answer in words and pictures: a table of the rules, numbers for JSON, and three figures.

Names of rules and quantities stand in ``templates/target_noise.toml``."""

from __future__ import annotations

import functools
import itertools
import math
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray
from rich.table import Table

from vkernel.core.errors import require
from vkernel.core.twoway import DRAWS
from vkernel.reports.html import read, significant
from vkernel.reports.target_noise.cells import OWN, factors_of, text
from vkernel.reports.target_noise.numbers import ENDS, singles, summary, trends
from vkernel.reports.target_noise.rules import FAILS, NOT_RUN, UNDECIDED, Outcome, Part, rules
from vkernel.version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 8  # samples of each objective
GROUPS = {FAILS: "outside the margins", UNDECIDED: "undecided", NOT_RUN: "not measured"}
PICTURES = ("sample", "nearest")


@functools.cache
def words() -> dict[str, dict[str, str]]:
    """Return the names of rules, variants and quantities."""
    return tomllib.loads(read("target_noise.toml"))


def name(cell: dict[str, str]) -> str:
    """Return the name of a cell, such as "fashion, n = 1,024, unet"."""
    return ", ".join(f"n = {int(value):,}" if key == "n" else value for key, value in cell.items())


def value(part: Part) -> str:
    """Return a quantity with its 95 % interval; of a ratio with the sign ×."""
    if math.isnan(part.low):
        return "unknown"
    width = max(part.high - part.low, 1e-9)
    digits = 2 if part.ratio else min(max(1 - math.floor(math.log10(width)), 1), 5)  # two of the interval's width
    numbers = [f"{v:{'' if part.ratio else '+'}.{digits}f}" for v in (part.value, part.low, part.high)]
    return f"{'×' if part.ratio else ''}{numbers[0]} ({numbers[1]} to {numbers[2]})"


def place(part: Part) -> str:
    """Return the quantity's name, with its noise level and snapshot where it has some."""
    level = "" if math.isnan(part.level) else f", σ/α = {significant(part.level)}"
    return f"{words()['quantities'][part.name]}{level}"


def decisive(found: Outcome) -> tuple[Part, ...]:
    """Return the quantities that a reader of the verdict has to know: all, or the one that is farthest outside its
    margins, or whose interval reaches farthest."""
    if found.rule in ("vastola", "average") or not found.parts:
        return found.parts
    tested = [p for p in found.parts if not math.isnan(p.margin) and not math.isnan(p.low)]
    if not tested:
        return ()
    if found.rule == "shape" and found.verdict != FAILS:
        return (max(tested, key=_sure),)
    worst = max(tested, key=_outside if found.verdict == FAILS else lambda p: p.away)
    times = [p for p in found.parts if p.name == "time"]
    return (worst, *times[-1:])


def _outside(part: Part) -> float:
    """Return how far the 90 % interval lies outside the margins, in margins; negative if it does not."""
    low, high = (math.log(v) if part.ratio else v for v in (part.low90, part.high90))
    margin = math.log1p(part.margin) if part.ratio else part.margin
    return max(low, -high) / margin - 1


def _sure(part: Part) -> float:
    """Return the distance from "equal" over the half width of the interval."""
    low, middle, high = (math.log(v) if part.ratio else v for v in (part.low, part.value, part.high))
    return abs(middle) / max(high - low, 1e-12)


def numbers(found: Outcome) -> str:
    """Return the decisive quantities as a phrase."""
    units = " margins" if found.rule == "regularisation" else ""
    own = {k: f": {v}" for k, v in found.groups if found.rule == "vastola"}
    shown = [f"{place(p)} {value(p)}{units if not p.ratio else ''}{own.get(p.name, '')}" for p in decisive(found)]
    by = {v: [words()["quantities"][k] for k, w in found.groups if w == v] for v in GROUPS}
    if found.rule == "bertrand":
        shown += [f"{where}: {', '.join(by[v])}" for v, where in GROUPS.items() if by[v]]
    if found.rule == "regularisation" and found.verdict == UNDECIDED and not shown:
        shown = ["no snapshot of it has its time inside the measured range of the other"]
    lost = [f"{found.diverged} of {found.members + found.diverged} members diverged"] if found.diverged else []
    return "; ".join([*shown, *(lost if found.verdict != NOT_RUN else [])])


def table(found: Sequence[Outcome]) -> Table:
    """Return the outcomes for a terminal, a row for each rule, contrast and cell that was run."""
    run = [o for o in found if o.verdict != NOT_RUN]
    left = f"{len(found) - len(run)} of {len(found)} comparisons were not run." if len(run) < len(found) else ""
    out = Table(title="Rules on target noise", caption=left or None, title_justify="left", caption_justify="left")
    out.add_column("rule, comparison, cell", max_width=32)
    out.add_column("verdict", max_width=11)
    out.add_column("decided by (95 % intervals)")
    for o in run:
        rule = words()["rules"][o.rule] + (f", {words()['variants'][o.variant]}" if o.variant else "")
        alone = f" ({o.alone} alone)" if o.alone != o.verdict else ""
        out.add_row(f"{rule}\n{o.of} against {o.to}\n{name(o.cell)}", o.verdict + alone, numbers(o))
    return out


def to_json(found: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return the outcomes for a JSON file, with their decisive quantities alone; NaN is ``None``."""
    short = [
        asdict(replace(o, parts=decisive(o))) | {"cell": name(o.cell), "at": o.cell, "numbers": numbers(o)}
        for o in found
    ]
    clean: list[dict[str, Any]] = [_without_nan(one) for one in short]
    return clean


def answer(ds: xarray.Dataset, *, draws: int = DRAWS, seed: int = 0) -> dict[str, Any]:
    """Return everything that a page says of a study, for a JSON file: ``outcomes``, ``trends`` and ``singles``, and
    ``numbers`` with their 95 % intervals by cell, objective, quantity, step and level, at the last step but for those
    without levels. ``cells`` has what is the same for all objectives."""
    held = in_cells(summary(ds, draws=draws, seed=seed))
    numbers: list[dict[str, Any]] = []
    for cell, label in itertools.product(held["cell"].values.tolist(), held["objective"].values.tolist()):
        one = held.sel(cell=cell, objective=label)
        where = {"cell": cell, "objective": label, "members": int(one["members"])}
        for key in (str(n) for n in one.data_vars if "end" in one[n].dims and not str(n).endswith("_band")):
            curve = one[key] if "level" not in one[key].dims else one[key].isel(step=[-1])
            for at, ends in _rows(curve):
                numbers += [{**where, "name": key, **at, **ends}] if ends["value"] is not None else []
    about = [
        {"cell": cell, "levels": held["level"].values, "rho": one["rho"].values, "share": one["network_share"].values}
        for cell, one in ((c, held.sel(cell=c)) for c in held["cell"].values.tolist())
    ]
    found: dict[str, Any] = {"version": __version__, "draws": draws, "seed": seed, "steps": held["step"].values}
    found |= {"cells": about, "numbers": numbers, "outcomes": to_json(rules(ds, draws=draws, seed=seed))}
    found["trends"] = [asdict(t) | {"cell": name(t.cell)} for t in trends(ds, draws=draws, seed=seed)]
    found["singles"] = [asdict(s) | {"cell": name(s.cell), "median": s.median, "below": s.below} for s in singles(ds)]
    clean: dict[str, Any] = _without_nan(found)
    return clean


def _rows(curve: xarray.DataArray) -> Iterator[tuple[dict[str, float], dict[str, float | None]]]:
    """Yield the places of a quantity, by step and level, and its value with the ends of the interval."""
    dims = [str(d) for d in curve.dims if d != "end"]
    values, labels = curve.transpose(*dims, "end").values, [curve[d].values.tolist() for d in dims]
    for at in np.ndindex(*values.shape[:-1]):
        ends: dict[str, float | None] = dict(zip(ENDS, _without_nan(values[at].tolist()), strict=True))
        yield {d: own[i] for d, own, i in zip(dims, labels, at, strict=True)}, ends


def _without_nan(given: Any) -> Any:
    if isinstance(given, dict):
        return {key: _without_nan(v) for key, v in given.items()}
    if isinstance(given, np.ndarray):
        given = given.tolist()
    if isinstance(given, list | tuple):
        return [_without_nan(v) for v in given]
    if isinstance(given, float):
        return float(f"{given:.6g}") if math.isfinite(given) else None
    return given


def in_cells(ds: xarray.Dataset) -> xarray.Dataset:
    """Return a summary with one dimension ``cell`` in place of its factors, without cells that were not run."""
    factors = [str(d) for d in ds["members"].dims if d not in OWN]
    places = [at for at in np.ndindex(*(ds.sizes[d] for d in factors)) if (ds["members"].values[at] > 0).any()]
    require(places, "No cell of the study was run yet.")
    each = [ds.isel(dict(zip(factors, at, strict=True)), drop=True) for at in places]
    names = [name({d: text(ds[d].values[i]) for d, i in zip(factors, at, strict=True)}) for at in places]
    return xarray.concat(each, xarray.IndexVariable("cell", names))


def sample_figure(ds: xarray.Dataset, cell: dict[str, str], shown: int = SHOWN) -> Figure:
    """Draw samples of twins from the same noise, c = 0, 1 and 10 where they were run, above their nearest training
    images: those that are kept of the first member, then of the next. Titles are d1/d2."""
    from vkernel import plots

    where = {d: _same(ds[d].values, label) for d, label in cell.items()}
    one = ds[[*PICTURES, "ratio", "image_shape"]].sel(where).isel(step=-1, missing_dims="ignore")
    labels = [o for o in factors_of([str(o) for o in ds["objective"].values]) if o in ("c = 0", "c = 1", "c = 10")]
    rows, ratios = {}, {}
    for label in labels:
        own = one.sel(objective=label)
        kept = own["ratio"].transpose("member", ...).values[:, : own.sizes["index"]].reshape(-1)[:shown]
        images = [own[key].transpose("member", "index", "pixel").values for key in PICTURES]
        samples, nearest = (_images(v.reshape(-1, v.shape[-1])[:shown], own["image_shape"].values) for v in images)
        if np.isfinite(samples).all():
            rows[label], ratios[label] = (samples, nearest), kept
    return plots.twin_samples(rows, ratios)


def _images(pixels: np.ndarray, shape: np.ndarray) -> np.ndarray:
    """Return images ``(k, *shape)`` of pixels ``(k, d)``, of which smaller images fill the first ones."""
    if not np.isfinite(shape).all():  # was not run
        return pixels
    size = tuple(int(s) for s in shape)
    return pixels[:, : math.prod(size)].reshape(-1, *size).astype(float)


def _same(values: np.ndarray, label: str) -> object:
    return next(v for v in values.tolist() if text(v) == label)
