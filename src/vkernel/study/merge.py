"""Results of one question from several stores or files, which need not have the same specification.

A specification grows while a study goes on: values of factors are added, and conditions that nobody computed yet are
changed. What has to agree is what the numbers depend on: the seed, the members, the noise levels and other dimensions
of a measurement, and of each condition that two of the results hold, all of its tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import xarray

from vkernel.core.errors import require
from vkernel.study.spec import TABLES, Condition, Factor, Spec
from vkernel.study.store import spec_of

Labels = tuple[tuple[str, str | float], ...]
MERGED = "vkernel_merged"
FILL = {"done": False}


def merge(*parts: xarray.Dataset) -> xarray.Dataset:
    """Return the results of several stores or files, each of which holds a part of the conditions; where two hold the
    same condition, those of the first.

    Factors and their values are united: a factor that only some of them have gets, in the others, the value with which
    those were computed. Refused are results that differ in the seed, the number of members, what is measured, or in a
    table of a condition that both hold. Attributes are those of the first.

    >>> import vkernel as vk
    >>> import tempfile
    >>> spec = {"title": "t", "members": 1, "block": 1, "data": {"name": "triple"}, "model": {"kind": "smoothed"}}
    >>> spec |= {"sampler": {"samples": 8, "steps": 5}, "grid": {"model.h": [0.0, 0.3]}}
    >>> folder = tempfile.mkdtemp()
    >>> parts = [vk.study.run(spec, f"{folder}/{h}", only={"h": h}, progress=False) for h in (0.0, 0.3)]
    >>> vk.study.merge(*parts).sizes["h"]
    2
    """
    require(len(parts) > 0, "There is nothing to merge.")
    again = "Merge the stores or files themselves: results that were merged have no specification of their own."
    require(not any(MERGED in part.attrs for part in parts), again)
    specs = [spec_of(part) for part in parts]
    for name, values in {"seed": [s.seed for s in specs], "members": [s.members for s in specs]}.items():
        require(len(set(values)) == 1, f"Results that differ in {name} cannot be merged: {values}.")
    require(all(s.measure == specs[0].measure for s in specs), "Results that differ in [measure] cannot be merged.")
    factors = {f.dim: f for spec in specs for f in spec.grid}
    given = [_with_factors(part, spec, factors) for part, spec in zip(parts, specs, strict=True)]
    held: dict[Labels, dict[str, Any]] = {}
    for part, spec in zip(given, specs, strict=True):
        for labels, tables in _finished(part, spec, factors).items():
            differ = [t for t in TABLES if held.setdefault(labels, tables)[t] != tables[t]]
            what = f"the condition {', '.join(f'{k} = {v}' for k, v in labels)} was computed with another"
            require(not differ, f"Results of different studies cannot be merged: {what} {', '.join(differ)}.")
    _check_axes(given, factors)
    axes = {dim: _united(part[dim].values for part in given) for dim in (*factors, *_pixels(given))}
    whole = given[0].reindex(axes, fill_value=FILL).load()
    for part in given[1:]:
        one = part.reindex(axes, fill_value=FILL).load()
        done = whole["done"] | one["done"]
        whole = whole.drop_vars("done").combine_first(one.drop_vars("done")).reindex(axes).assign(done=done)
    return whole.assign_attrs(parts[0].attrs | {MERGED: len(parts)})


def _with_factors(part: xarray.Dataset, spec: Spec, factors: dict[str, Factor]) -> xarray.Dataset:
    """Return the results with all factors as dimensions, in one order."""
    own = {f.dim for f in spec.grid}
    for dim, factor in factors.items():
        if dim not in own:
            cells = [name for name, array in part.data_vars.items() if own <= set(array.dims)]
            more = part[cells].expand_dims({dim: [_label(spec, factor)]})
            part = part.drop_vars(cells).assign(more.data_vars).assign_coords({dim: more[dim]})
    return part.transpose(*factors, ...)


def _label(spec: Spec, factor: Factor) -> str | float:
    """Return the label of a factor that a study does not have: that of the value with which it was computed."""
    value = _value(next(iter(spec.conditions())), factor.field)
    if value in factor.values:
        return factor.coordinate[factor.values.index(value)]
    plain = factor.labels is None and isinstance(value, type(factor.values[0]))
    advice = f"Give it a label among the values of the factor {factor.dim!r}"
    require(plain, f"One of the results was computed with {factor.field} = {value!r:.60}. {advice}.")
    return float(value) if isinstance(factor.coordinate[0], float) else str(value)


def _value(condition: Condition, field: str) -> Any:
    """Return a field of a condition, or a table as a dictionary of what was given."""
    table, _, name = field.partition(".")
    found: dict[str, Any] = condition.model_dump(include={table}, exclude_unset=not name)[table]
    return found[name] if name else found


def _finished(part: xarray.Dataset, spec: Spec, factors: dict[str, Factor]) -> dict[Labels, dict[str, Any]]:
    """Return the tables of the conditions of which a block or more is computed, by the labels of all factors."""
    fixed = {dim: part[dim].values.tolist()[0] for dim in factors if dim not in {f.dim for f in spec.grid}}
    found = {}
    for condition in spec.conditions():
        labels = condition.labels | fixed
        there = all(labels[dim] in part.indexes[dim] for dim in factors)  # results may be a selection
        if there and part["done"].sel(labels).any():
            found[tuple((dim, labels[dim]) for dim in factors)] = condition.model_dump(include=set(TABLES))
    return found


def _check_axes(parts: list[xarray.Dataset], factors: dict[str, Factor]) -> None:
    """Refuse results whose other dimensions differ, such as the steps of snapshots; images may differ in pixels."""
    for dim in (d for d in parts[0].dims if d not in factors and d != "pixel"):
        same = all(dim in part.dims and part.indexes[dim].equals(parts[0].indexes[dim]) for part in parts)
        require(same, f"Results that differ in {dim!r} cannot be merged.")


def _pixels(parts: list[xarray.Dataset]) -> list[str]:
    return ["pixel"] if all("pixel" in part.dims for part in parts) else []


def _united(values: Iterable[np.ndarray]) -> np.ndarray:
    """Return all labels of an axis, numbers ascending and others in the order in which they come."""
    every = list(dict.fromkeys(label for axis in values for label in axis.tolist()))
    return np.array(sorted(every) if all(isinstance(v, float | int) for v in every) else every)
