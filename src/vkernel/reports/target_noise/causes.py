r"""Which randomness of training makes networks differ: V with one cause at a time over V with all (docs/theory.md, §7).

A study such as ``images_causes.toml`` has a factor ``cause``: what varies between members, *all* of it or one source,
while the others are those of member 0. The share of a source is

.. math:: \frac{V_{\text{source}}}{V_{\text{all}}}, \qquad V = E\,\tfrac12 |D_m - D_{m'}|^2/d ,

by objective, step and noise level, on noised training images. Members of equal index share the randomness that both
ensembles have, and are drawn together in the bootstrap. Shares of single sources need not add up to 1: each is taken
at one realisation of the others. A nested design without this remainder is :func:`vkernel.variance_split`."""

from __future__ import annotations

import numpy as np
import xarray
from rich.table import Table

from vkernel.core.errors import require
from vkernel.core.twoway import DRAWS
from vkernel.reports.html import significant
from vkernel.reports.target_noise.cells import FEWEST, Cell, cells
from vkernel.reports.target_noise.numbers import ENDS
from vkernel.reports.target_noise.report import name
from vkernel.reports.target_noise.rules import log_ratio

ALL = "all"


def causes(ds: xarray.Dataset, *, draws: int = DRAWS, seed: int = 0) -> xarray.Dataset:
    """Return ``share``, V of each cause over V of all, and ``V_all``, with 95 % intervals over members × images, by
    cell, cause, objective, step, level and ``end``. What was not run is NaN."""
    have = [str(c) for c in ds["cause"].values] if "cause" in ds.dims else []
    require(ALL in have, f"Shares of causes need a study with a factor cause that has the value {ALL!r}; got {have}.")
    sources, labels = [c for c in have if c != ALL], [str(o) for o in ds["objective"].values]
    rest: dict[str, dict[str, Cell]] = {}
    for cell in cells(ds, draws, seed):
        own = name({d: v for d, v in cell.at.items() if d != "cause"})
        rest.setdefault(own, {})[cell.at["cause"]] = cell
    size = len(labels), ds.sizes["step"], ds.sizes["level"], len(ENDS)
    share, total = np.full((len(rest), len(sources), *size), np.nan), np.full((len(rest), *size), np.nan)
    for i, held in enumerate(rest.values()):
        for j, label in enumerate(labels):
            for k, source in ((k, s) for k, s in enumerate(sources) if s in held and ALL in held):
                one, whole = held[source], held[ALL]
                members = tuple(m for m in one.common(label) if m in whole.common(label))
                if len(members) < FEWEST:
                    continue
                draw = one.resamples(len(members))
                a, b = (cell.measured(label, members).V[..., 0] for cell in (one, whole))
                share[i, k, j] = draw.estimate(log_ratio(a, b)).stack(-1).exp().numpy()
                total[i, j] = draw.estimate(b.log()).stack(-1).exp().numpy()
    dims = ("objective", "step", "level", "end")
    return xarray.Dataset(
        {"share": (("cell", "cause", *dims), share), "V_all": (("cell", *dims), total)},
        {"cell": list(rest), "cause": sources, "end": list(ENDS)}
        | {d: ds[d].values for d in ("objective", "step", "level")},
    )


def causes_table(found: xarray.Dataset) -> Table:
    """Return the shares at the last step for a terminal."""
    last = found.isel(step=-1)
    out = Table(title=f"V of one cause over V of all, after {int(last['step']):,} steps", title_justify="left")
    sources = last["cause"].values.tolist()
    for title in ("objective", "σ/α", *sources):
        out.add_column(title)
    for cell in last["cell"].values.tolist():
        for label in last["objective"].values.tolist():
            ends = last["share"].sel(cell=cell, objective=label).transpose("level", "cause", "end").values
            for level, row in zip(last["level"].values.tolist(), ends, strict=True):
                if np.isfinite(row).any():
                    shares = [f"{v:.2f} ({low:.2f} to {high:.2f})" for v, low, high in row.tolist()]
                    out.add_row(f"{cell} {label}".strip(), significant(level), *shares)
    return out
