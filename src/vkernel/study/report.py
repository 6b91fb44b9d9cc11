r"""What a study found: means over members with intervals, one number that could have come out otherwise, a table.

The number compares one value between two conditions whose members share their inputs. For member values :math:`a_m` and
:math:`b_m`, the difference is the mean of :math:`a_m - b_m` with Student's interval; the ratio is
:math:`\bar a/\bar b` with the interval of its logarithm, whose standard error is that of the mean of
:math:`a_m/\bar a - b_m/\bar b` (the delta method, paired).
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vkernel.core.errors import InputError, require
from vkernel.core.estimate import Estimate, student_quantile
from vkernel.study.spec import Spec

if TYPE_CHECKING:
    import xarray

__all__ = ["figure", "finding", "means", "sentence", "spec_of", "table", "text"]


def spec_of(ds: xarray.Dataset) -> Spec:
    """The study that made the results."""
    try:
        return Spec(**json.loads(ds.attrs["vkernel_study"]))
    except ValueError as error:  # ValidationError is one
        version = ds.attrs.get("vkernel")
        said = str(error).splitlines()[0]
        raise InputError(f"The store holds a study that cannot be read ({said}); vkernel {version} made it.") from None


def scalars(ds: xarray.Dataset) -> list[str]:
    """The quantities that are one number per member."""
    dims = {f.dim for f in spec_of(ds).grid} | {"member"}
    return [str(n) for n in ds.data_vars if set(map(str, ds[n].dims)) == dims]


def means(ds: xarray.Dataset) -> xarray.Dataset:
    """Mean over members, standard error and 95 % interval of every quantity; members that are NaN are counted."""
    import xarray

    out: dict[str, Any] = {}
    for name in ds.data_vars:
        if "member" not in ds[name].dims:
            continue
        values = ds[name].load()
        count = values.notnull().sum("member")
        mean = values.mean("member")
        variance = ((values - mean) ** 2).sum("member") / (count - 1).where(count > 1)
        se = np.sqrt(variance / count.where(count > 0))
        half = xarray.apply_ufunc(np.vectorize(lambda n: student_quantile(max(int(n) - 1, 1))), count) * se
        about = ds[name].attrs
        out |= {str(name): mean.assign_attrs(about), f"{name}_se": se, f"{name}_low": mean - half}
        out |= {f"{name}_high": mean + half, f"{name}_members": count}
    return xarray.Dataset(out, attrs=ds.attrs)


def finding(ds: xarray.Dataset) -> Estimate | None:
    """The number the study ends in, or ``None`` where it names none or members are missing."""
    spec = spec_of(ds)
    if spec.finding is None:
        return None
    a, b = (_cell(ds, spec.finding.value, where) for where in (spec.finding.of, spec.finding.to))
    whole = np.isfinite(a) & np.isfinite(b)
    a, b = a[whole], b[whole]
    if len(a) < 2:
        return None
    if spec.finding.kind == "difference":
        return Estimate.of_mean(torch.from_numpy(a - b))
    if not (a.mean() > 0 and b.mean() > 0):
        return None
    ratio = float(a.mean() / b.mean())
    se = float((a / a.mean() - b / b.mean()).std(ddof=1) / math.sqrt(len(a)))
    half = student_quantile(len(a) - 1) * se
    return Estimate(ratio, ratio * se, ratio * math.exp(-half), ratio * math.exp(half))


def _cell(ds: xarray.Dataset, name: str, where: dict[str, Any]) -> np.ndarray:
    """The members' values in one condition; factors that are not named are averaged over."""
    require(name in ds, f"The study keeps no quantity {name!r}; it keeps {', '.join(map(str, ds.data_vars))}.")
    for dim, label in where.items():
        known = ds[dim].values.tolist()
        require(label in known, f"finding: {dim} has no value {label!r}; it has {known}.")
    chosen = ds[name].sel(where)
    others = [d for d in chosen.dims if d != "member"]
    return np.asarray(chosen.mean(others, skipna=False).values, dtype=np.float64)  # a member counts whole


def sentence(ds: xarray.Dataset) -> str:
    """The number in words, with what it says."""
    spec, found = spec_of(ds), finding(ds)
    if spec.finding is None:
        return ""
    if found is None:
        return f"{spec.finding.words}: not known yet, or a share is zero."
    null = 1.0 if spec.finding.kind == "ratio" else 0.0
    side = "above" if found.low > null else "below" if found.high < null else None
    verdict = f"the interval lies {side} {null:g}" if side else f"the interval holds {null:g}: no difference is shown"
    return f"{spec.finding.words}: {found.value:.3g} [{found.low:.3g}, {found.high:.3g}]; {verdict}."


def table(ds: xarray.Dataset) -> Any:
    """Means ± standard errors of every scalar quantity, one row for each condition, for a terminal."""
    from rich.table import Table

    spec, found = spec_of(ds), means(ds)
    names = scalars(ds)
    out = Table(title=spec.title, caption=sentence(ds) or None, title_justify="left", caption_justify="left")
    for factor in spec.grid:
        out.add_column(factor.dim)
    for name in names:
        out.add_column(name, justify="right")
    for condition in spec.conditions():
        cells = [f"{v:g}" if isinstance(v, float) else str(v) for v in condition.labels.values()]
        for name in names:
            value, se = (float(found[n].values[condition.index]) for n in (name, f"{name}_se"))
            cells.append("–" if math.isnan(value) else f"{value:.3g} ± {se:.1g}")
        out.add_row(*cells)
    return out


def figure(ds: xarray.Dataset) -> Any:
    """The picture that the study's ``[figure]`` asks for; without one, the first quantity against the first factor."""
    from vkernel.plots import studies

    spec = spec_of(ds)
    require(spec.grid, "A study without factors has nothing to draw against; use study export.")
    wanted = spec.figure
    x = wanted.x if wanted else spec.grid[0].dim
    name = wanted.value if wanted else scalars(ds)[0]
    require(name in scalars(ds), f"figure: {name!r} is not one number per member; there are {', '.join(scalars(ds))}.")
    found = means(ds)
    keep = [d for d in (wanted.y if wanted else None, wanted.lines if wanted else None, x) if d]
    others = [f.dim for f in spec.grid if f.dim not in keep]
    pick = dict.fromkeys(others, 0)  # factors that are not drawn: their first value
    parts = {k: found[f"{name}{k}"].isel(pick).transpose(*keep) for k in ("", "_se", "_low", "_high")}
    held = ", ".join(f"{d} = {text(ds[d].values[0])}" for d in others)
    title = (wanted.title if wanted and wanted.title else spec.title) + (f" ({held})" if held else "")
    about = str(ds[name].attrs.get("long_name", name))
    axis = {f.dim: f.about or f.dim.replace("_over_", "/") for f in spec.grid}
    if wanted and wanted.y:
        return studies.phase_diagram(
            ds[x].values.tolist(),
            ds[wanted.y].values.tolist(),
            parts[""].values,
            parts["_se"].values,
            names=(axis[x], axis[wanted.y], about),
            title=title,
        )
    labels = [text(v) for v in ds[wanted.lines].values] if wanted and wanted.lines else None
    return studies.value_curves(
        ds[x].values.tolist(),
        *(parts[k].values for k in ("", "_low", "_high")),
        names=(axis[x], about),
        lines_by=axis.get(wanted.lines or "", "") if wanted else "",
        labels=labels,
        title=title,
        log=bool(wanted and wanted.log),
    )


def text(value: Any) -> str:
    """A value of a factor as a reader sees it."""
    if isinstance(value, float | np.floating):
        return "∞" if value == math.inf else f"{value:g}"
    return str(value)
