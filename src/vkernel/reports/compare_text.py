"""The result of :func:`vkernel.compare` in words: names and units of its variables, a sentence, and a table.

The words stand in ``templates/compare.toml``, ``compare.txt`` and ``compare_table.txt``.
"""

from __future__ import annotations

import functools
import tomllib
from typing import TYPE_CHECKING, Any

import numpy as np

from vkernel.reports.html import read, render

if TYPE_CHECKING:
    import xarray

AGREE = 0.15  # a pooled ratio this close to 1, or within three standard errors, counts as agreement


@functools.cache
def attributes(name: str) -> dict[str, str]:
    """Return the long name and the units of a variable."""
    texts = tomllib.loads(read("compare.toml"))
    stem, _, ending = (name, "", "") if name in texts["variables"] else name.rpartition("_")
    long, units = texts["variables"][stem]
    return {"long_name": f"{long}: {texts['endings'][ending]}" if ending else long, "units": units}


def summary(ds: xarray.Dataset) -> str:
    """Return one sentence: whether theory and Gaussian closure agree with the ensemble, and what was left out."""
    known = [n for n in ("field", "semiclassical") if f"tv_{n}" in ds and np.isfinite(ds[f"tv_{n}"]).all()]
    ordered = "condition" in ds.dims and ds.condition.dtype.kind == "f"
    clauses = render("compare.txt", known=known, ordered=ordered, **_values(ds)).splitlines()
    return "; ".join(clause for clause in clauses if clause) + "."


def table(ds: xarray.Dataset) -> str:
    """Return the numbers in aligned columns: a row for each condition, then one for each time."""
    laws = [n for n in ("field", "closure", "semiclassical", "theory", "floor") if f"tv_{n}" in ds]
    text = render("compare_table.txt", laws=laws, times=ds.t.values, **_values(ds))
    return "\n\n".join(_aligned([line.split("‖") for line in part.splitlines()]) for part in text.split("\n\n"))


def _values(ds: xarray.Dataset) -> dict[str, Any]:
    """Return the values of both templates: the quantity of the conditions, and the numbers of each."""
    if "condition" not in ds.dims:
        return {"by": "", "variance": "ratio" in ds, "rows": [_row("", ds)]}
    rows = [_row(label, ds.isel(condition=k)) for k, label in enumerate(ds.condition.values)]
    return {"by": ds.condition.attrs["long_name"], "variance": "ratio" in ds, "rows": rows}


def _row(label: float | str, one: xarray.Dataset) -> dict[str, Any]:
    """Return the numbers of a condition; ``shown`` is its ratio, at its worst time if only some times disagree."""
    row = {str(name): v.item() for name, v in one.data_vars.items() if v.ndim == 0}
    row |= {"at": label, "label": f"{label:.3g}" if isinstance(label, float) else str(label), "agrees": False}
    value, se = (one[f"{'ratio' if 'ratio' in one else 'mean_error'}_by_time{end}"].values for end in ("", "_se"))
    lost = {n: row.get(f"lost_{n}", 0) for n in ("ensemble", "field", "closure", "theory")}
    row |= {"by_time": value, "by_time_se": se, "lost": {n: count for n, count in lost.items() if count}}
    row["chance"] = "tv_closure" in row and row["tv_closure"] <= 1.25 * row["tv_floor"]
    if "ratio" in one:
        away, k = abs(value - 1), int(np.argmax(abs(value - 1)))
        row |= {"agrees": bool((away <= np.maximum(AGREE, 3 * se)).all()), "worst": away[k], "worst_se": se[k]}
        pooled, pooled_se = row["ratio_pooled"], row["ratio_pooled_se"]
        some = abs(pooled - 1) <= max(AGREE, 3 * pooled_se)
        shown = (value[k], se[k], float(one.t[k])) if some else (pooled, pooled_se, None)
        row |= dict(zip(("shown", "shown_se", "when"), shown, strict=True))
    return row


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)
