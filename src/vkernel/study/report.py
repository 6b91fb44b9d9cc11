r"""What a study found: means over members with intervals, one number, a table, a figure, and files for other programs.

The number compares one value between two conditions whose members share their inputs. For member values :math:`a_m` and
:math:`b_m`, the difference is the mean of :math:`a_m - b_m` with Student's interval; the ratio is :math:`\bar a/\bar b`
with the interval of its logarithm (:func:`vkernel.core.estimate.ratio_of_means`, paired). A few members can move both:
:func:`pairs` counts those in which :math:`a_m` is larger, or smaller, by more than .01.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import xarray

from vkernel.core.errors import needs, require
from vkernel.core.estimate import LEAST, Estimate, Twins, twins
from vkernel.core.files import write
from vkernel.study.packed import pack
from vkernel.study.spec import Figure, short
from vkernel.study.store import load, spec_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MatplotlibFigure
    from rich.table import Table

__all__ = ["export", "figure", "finding", "means", "pairs", "scalars", "sentence", "spec_of", "table", "text"]


def scalars(ds: xarray.Dataset) -> list[str]:
    """Return the names of the quantities that are one number per member, in a study of images at each step."""
    spec = spec_of(ds)
    dims = {f.dim for f in spec.grid} | {"member"} | ({"step"} if spec.is_images else set())
    return [str(n) for n in ds.data_vars if set(map(str, ds[n].dims)) == dims]


def means(ds: xarray.Dataset) -> xarray.Dataset:
    """Return means over members (those NaN where others are not left out), with errors, intervals and counts."""
    out: dict[str, xarray.DataArray] = {}
    for name in (str(n) for n in ds.data_vars if "member" in ds[n].dims):
        values, axis = ds[name].values, int(ds[name].get_axis_num("member"))
        found = np.full((5, *values.shape[:axis], *values.shape[axis + 1 :]), np.nan)
        for cell in np.ndindex(values.shape[:axis]):
            there = np.isfinite(values[cell])
            flat = there.reshape(len(there), -1)
            whole = (flat | ~flat.any(0)).all(1) & flat.any(1)
            found[(4, *cell)] = there[whole].sum(0)
            if whole.any():
                estimate = Estimate.of_mean(torch.from_numpy(values[cell][whole]))
                found[(slice(0, 4), *cell)] = np.stack([np.asarray(part) for part in estimate.fields])
        found[np.isinf(found)] = np.nan  # one member has no error
        like = ds[name].isel(member=0, drop=True)
        for suffix, part in zip(("", "_se", "_low", "_high", "_members"), found, strict=True):
            out[name + suffix] = like.copy(data=part).assign_attrs(like.attrs if suffix == "" else {})
    return xarray.Dataset(out, attrs=ds.attrs)


def pairs(ds: xarray.Dataset) -> Twins | None:
    """Compare the two conditions of the finding, averaged over unnamed factors; ``None`` without one, or members."""
    found = spec_of(ds).finding
    if found is None:
        return None
    require(found.value in ds, f"The store has no {found.value!r}, which its finding is about.")
    cells = [ds[found.value].sel(where) for where in (found.of, found.to)]
    cells = [cell.isel(step=-1) if "step" in cell.dims else cell for cell in cells]
    values = np.stack([c.mean([d for d in c.dims if d != "member"], skipna=False).values for c in cells])
    a, b = torch.from_numpy(values[:, np.isfinite(values).all(0)]).double()
    return twins(a, b, LEAST) if len(a) > 1 else None


def finding(ds: xarray.Dataset) -> Estimate | None:
    """Return the number the study ends in; ``None`` without one, without members, or where a mean is zero."""
    both, found = pairs(ds), spec_of(ds).finding
    if both is None or found is None:
        return None
    return both.difference if found.kind == "difference" else None if math.isnan(both.ratio.value) else both.ratio


def sentence(ds: xarray.Dataset) -> str:
    """Return the number as a sentence, with the pairs of members in which the first value is larger or smaller, and the
    side of the null value on which the interval lies."""
    spec, found, both = spec_of(ds), finding(ds), pairs(ds)
    if spec.finding is None:
        return ""
    if found is None or both is None:
        return f"{spec.finding.words}: not known yet, or a share is zero."
    null = 1.0 if spec.finding.kind == "ratio" else 0.0
    side = "above" if found.low > null else "below" if found.high < null else None
    verdict = f"the interval lies {side} {null:g}" if side else f"the interval holds {null:g}: no difference is shown"
    more, less = (f"{100 * share.value:.0f} %" for share in (both.more, both.less))
    models = f"larger by more than {LEAST:g} in {more} and smaller in {less} of the pairs of models"
    return f"{spec.finding.words}: {found.value:.3g} [{found.low:.3g}, {found.high:.3g}]; {models}; {verdict}."


def table(ds: xarray.Dataset) -> Table:
    """Return means ± standard errors of every scalar quantity for a terminal, one row for each condition; in a study of
    images at the last step. Factors of one value are left out."""
    from rich.table import Table

    spec, names = spec_of(ds), scalars(ds)
    found = means(ds[names].isel(step=-1) if "step" in ds[names].dims else ds[names])
    out = Table(title=spec.title, caption=sentence(ds) or None, title_justify="left", caption_justify="left")
    factors = [factor.dim for factor in spec.grid if len(factor.values) > 1]
    for head in (*factors, *names):
        out.add_column(head.replace("_", " "), justify="right" if head in names else "left")
    for c in spec.conditions():
        pairs = [[float(found[n].values[c.index]) for n in (name, f"{name}_se")] for name in names]
        cells = ("–" if math.isnan(value) else f"{value:.3g} ± {se:.1g}" for value, se in pairs)
        out.add_row(*(short(c.labels[dim]) for dim in factors), *cells)
    return out


def figure(ds: xarray.Dataset) -> MatplotlibFigure:
    """Draw what the study's ``[figure]`` names; without one, the first quantity against the first factor."""
    from vkernel import plots

    spec, names = spec_of(ds), scalars(ds)
    require(spec.grid, "A study without factors has nothing to draw against; use study export.")
    require(names, "The study keeps no number of each member to draw; use study export.")
    drawn = spec.figure or Figure(x=spec.grid[0].dim, value=names[0])
    good = drawn.value in names
    require(good, f"figure: {drawn.value!r} is not one number per member; there are {', '.join(names)}.")
    keep = [d for d in (drawn.y, drawn.lines, drawn.x) if d]
    held = [f.dim for f in spec.grid if f.dim not in keep]  # factors that are not drawn stay at their first value
    values = ds[[drawn.value]].isel(dict.fromkeys(held, 0))
    found = means(values if "step" in keep or not spec.is_images else values.isel(step=-1)).transpose(*keep)
    mean, se, low, high = (found[f"{drawn.value}{part}"].values for part in ("", "_se", "_low", "_high"))
    at = ", ".join(f"{d} = {text(ds[d].values[0])}" for d in held if len(ds[d]) > 1)
    title = (drawn.title or spec.title) + (f" ({at})" if at else "")
    about = str(ds[drawn.value].attrs.get("long_name", drawn.value))
    axis = {f.dim: f.axis for f in spec.grid} | {"step": "training steps"}
    x = ds[drawn.x].values.tolist()
    if drawn.y:
        across = (axis[drawn.x], axis[drawn.y], about)
        return plots.phase_diagram(x, ds[drawn.y].values.tolist(), mean, se, names=across, title=title)
    labels = [text(v) for v in ds[drawn.lines].values] if drawn.lines else [""]
    across = (axis[drawn.x], about, axis.get(drawn.lines or "", ""))
    return plots.value_curves(x, np.stack([mean, low, high]), names=across, labels=labels, title=title, log=drawn.log)


def text(value: str | float) -> str:
    """Return a value of a factor as a reader sees it."""
    return "∞" if value == math.inf else short(value)


def export(store: str | Path | xarray.Dataset, out: str | Path) -> Path:
    """Write the results in a store, or results that were loaded, to one file, whole or not at all: NetCDF (.nc) with
    everything, CSV with the scalars, or a small .npz (:mod:`vkernel.study.packed`), which ``vk.study.load`` reads.

    >>> import vkernel as vk
    >>> import tempfile
    >>> spec = {"title": "t", "members": 1, "block": 1, "data": {"name": "triple"}, "model": {"kind": "smoothed"}}
    >>> spec |= {"sampler": {"samples": 8, "steps": 5}, "grid": {"model.h": [0.0, 0.3]}}
    >>> folder = tempfile.mkdtemp()
    >>> found = vk.study.run(spec, folder + "/store", progress=False)
    >>> vk.study.export(found, folder + "/scalars.csv").name
    'scalars.csv'
    """
    out = Path(out)
    good = out.suffix in (".nc", ".csv", ".npz")
    require(good, f"A study is exported to a .nc, .csv or .npz file, not {out.name!r}.")
    found = store if isinstance(store, xarray.Dataset) else load(store)
    if out.suffix == ".npz":
        return write(out, pack(found.load()))
    if out.suffix == ".csv":
        return write(out, found[scalars(found)].to_dataframe().reset_index().to_csv(index=False))
    needs("NetCDF", "netcdf", "h5netcdf")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "study.nc"
        found.load().to_netcdf(made, engine="h5netcdf", invalid_netcdf=False)
        return write(out, made.read_bytes())
