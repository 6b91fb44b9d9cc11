"""Twins that were trained with different noise of their targets: curves along training, and V beside that noise.

Curves are drawn from numbers with the dimensions ``cell`` (a column for each), ``objective``, ``step``, ``level`` and
``end``: value, low end and high end of the interval over members × images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vkernel.core.errors import require
from vkernel.plots import base
from vkernel.plots.base import DASHED, DOTTED, Curves, LineStyle, Names, Size, Values, array, ink, lines, styled
from vkernel.plots.images import Row, _pictures, _rows

if TYPE_CHECKING:
    import xarray

__all__ = ["twin_curves", "twin_frontiers", "twin_ratios", "twin_samples", "twin_variances"]
Look = tuple[int, LineStyle, str]
LOOKS: dict[str, Look] = {"0": (6, "-", "o"), "0.5": (4, "-", "v"), "1": (0, "-", "s"), "3": (2, "-", "^")}
LOOKS |= {"10": (1, "-", "D")}  # by c: line colour, style and marker
PLACEBOS: dict[str, LineStyle] = {"gaussian": DASHED, "white": DOTTED}
SHADE = 0.12


def _look(label: str) -> tuple[str, LineStyle, str]:
    """Return colour, style and marker of an objective: placebos have those of their c, and another style."""
    kind, _, c = label.rpartition(" ")
    colour, style, marker = LOOKS.get(c.replace("½", "0.5"), (3, "-", "*"))
    return (*lines(), ink())[colour], PLACEBOS.get(kind, style), marker


def _cells(ds: xarray.Dataset) -> list[str]:
    require(ds.sizes.get("cell"), "There is no cell to draw: the numbers need a dimension cell.")
    return [str(c) for c in ds["cell"].values]


def _draw(ax: Axes, x: np.ndarray, ds: xarray.Dataset, name: str, scale: float = 1.0) -> bool:
    """Draw the curves of all objectives that were run; return whether there were any."""
    drawn = False
    for label in (str(o) for o in ds["objective"].values):
        curve = scale * array(ds[name].sel(objective=label).transpose("end", ...))
        if np.isfinite(curve[0]).any():
            colour, style, marker = _look(label)
            base.band(ax, x, curve, colour, label, style, marker)
            drawn = True
    return drawn


def _shares(ax: Axes) -> None:
    """Set the axis of a share in percent, which may be zero everywhere."""
    low, high = ax.get_ylim()
    ax.set_ylim(min(low, -1.0), max(high, 5.0))


def _finish(figure: Figure, panels: np.ndarray) -> Figure:
    """Put one legend of all curves below the panels."""
    shown: dict[str, Artist] = {}
    for ax in panels.flat:
        handles, labels = ax.get_legend_handles_labels()
        shown |= dict(zip(labels, handles, strict=True))
    base.legend_below(figure, list(shown.values()), list(shown))
    return figure


@styled
def twin_curves(ds: xarray.Dataset, level: float) -> Figure:
    """Draw the memorised fraction, and the gap between held-out and training error at the noise level nearest to
    ``level``, against training steps: a column for each cell, bands of 95 % over members, on the same images."""
    titles, x = _cells(ds), array(ds["step"])
    near = float(ds["level"].sel(level=level, method="nearest"))
    rows = [
        "memorised (% of samples,\nless held-out images)",
        f"held-out − training error\nof the denoiser, σ/α = {near:.2g}",
    ]
    figure, panels = base.grid(rows, titles, (3.3, 2.5), (0.8, 0.9), "training steps", "row")
    for k in range(len(titles)):
        one = ds.isel(cell=k)
        _draw(panels[0, k], x, one, "memorised_band", 100.0)
        _draw(panels[1, k], x, one.sel(level=near), "gap_band")
        for ax in panels[:, k]:
            ax.axhline(0, color=ink(), lw=0.8, ls=":")
            ax.set_xscale("log")
            ax.set_xticks(x, [f"{v:,.0f}" for v in x])
            ax.minorticks_off()
    _shares(panels[0, 0])
    return _finish(figure, panels)


@styled
def twin_frontiers(ds: xarray.Dataset) -> Figure:
    """Draw trainings as paths from snapshot to snapshot, the last of which is large: the memorised fraction, and the
    mean over levels of log held-out / training error, against held-out error, its geometric mean over levels."""
    titles = _cells(ds)
    rows = ["memorised (% of samples)", "mean log of held-out /\ntraining error"]
    label = "held-out error, mean over noise levels"
    figure, panels = base.grid(rows, titles, (3.3, 2.5), (0.8, 0.9), label, "row")
    for k in range(len(titles)):
        one = ds.isel(cell=k).sel(end="value")
        for name in (str(o) for o in ds["objective"].values):
            held, own = (np.log(array(one[key].sel(objective=name))) for key in ("held_out", "training"))
            if not np.isfinite(held).any():
                continue
            x, (colour, style, marker) = np.exp(held.mean(-1)), _look(name)
            for ax, y in zip(
                panels[:, k], (100 * array(one["memorised"].sel(objective=name)), (held - own).mean(-1)), strict=True
            ):
                look = {"color": colour, "marker": marker, "mfc": colour if style == "-" else ax.get_facecolor()}
                ax.plot(x, y, ls=style, label=name, **look)
                ax.plot(x[-1:], y[-1:], ms=8, **look)
    every = np.concatenate([line.get_xdata() for ax in panels[0] for line in ax.get_lines()])
    for ax in panels.flat:
        base.log_axis(ax, "x", every)
    _shares(panels[0, 0])
    return _finish(figure, panels)


@styled
def twin_variances(ds: xarray.Dataset, factor: float = 1.5) -> Figure:
    """Draw V by noise level at the last snapshot, its ratio to that of c = 0 with a line at ``factor``, and below them
    ρ and the network's noise share at c = 1, each over its maximum. Levels above half a maximum are shaded."""
    titles, x = _cells(ds), array(ds["level"])
    rows = [
        "V = variance over members\nof D, by pixel",
        "V / V at c = 0",
        "noise of the target\n(share of its maximum)",
    ]
    figure, panels = base.grid(rows, titles, (3.3, 2.3), (0.8, 0.9), "noise level σ/α", "row")
    last = ds.isel(step=-1)
    keep = [str(o) for o in ds["objective"].values if str(o).startswith("c = ")]
    for k in range(len(titles)):
        one = last.isel(cell=k).sel(objective=keep)
        above, ratio, below = panels[:, k]
        for ax in (above, ratio):
            ax.set_yscale("log")
        _draw(above, x, one, "V")
        _draw(ratio, x, one, "V_ratio")
        ratio.axhline(1, color=ink(), lw=0.8, ls=":")
        ratio.axhline(factor, color=ink(), lw=1, ls=DASHED, label=f"{factor:g}, the factor of the rule")
        for colour, name, label, style in (
            (3, "rho", "ρ, in units of the score", "-"),
            (4, "network_share", "noise share, in units of the network (c = 1)", DASHED),
        ):
            given = ds[name].isel(cell=k) if "cell" in ds[name].dims else ds[name]
            values = array(given)
            share = values / np.nanmax(values)
            below.plot(x, share, color=lines()[colour], ls=style, marker="o", label=f"{label}")
            top = int(np.nanargmax(share))
            look = {"color": lines()[colour], "ha": "right", "size": 8}
            below.annotate(f"max {values[top]:.2g}", (x[top], 1.0), (4, 4), "data", "offset points", **look)
            for ax in panels[:, k]:
                _shade(ax, x, share > 0.5, lines()[colour])
        below.set_ylim(0, 1.25)
        for ax in panels[:, k]:
            base.log_axis(ax, "x", x)
    base.log_axis(panels[1, 0], "y", np.array(panels[1, 0].get_ylim()))  # shared by the row
    return _finish(figure, panels)


@styled
def twin_ratios(rows: Names, columns: Mapping[str, Curves], nulls: Mapping[str, Sequence[float]]) -> Figure:
    """Draw numbers with intervals, ``(3, rows)`` by their labels: a line for each row, a panel for each column, whose
    dotted lines are its ``nulls``."""
    figure, (axes,) = base.axes((4.6 * len(columns) + 1.6, 0.5 * len(rows) + 1.7), 1, len(columns), sharey=True)
    places = np.arange(len(rows), dtype=float)
    for ax, (title, of) in zip(axes, columns.items(), strict=True):
        for k, (label, given) in enumerate(of.items()):
            value, low, high = array(given, 2, "value, low, high")
            look = {"color": lines()[k], "marker": base.MARKERS[k], "ms": 5, "ls": "", "lw": 1.3, "capsize": 2}
            aside = places + 0.2 * (k - (len(of) - 1) / 2)
            ax.errorbar(value, aside, xerr=np.abs([value - low, high - value]), label=label, **look)
        for null in nulls[title]:
            ax.axvline(null, color=ink(), lw=1, ls=":")
        ax.set_xlabel(title)
    axes[0].set_yticks(places, rows)
    axes[0].set_ylim(len(rows) - 0.5, -0.5)
    base.legend_below(figure, axes[0])
    return figure


@styled
def twin_samples(
    rows: Mapping[str, tuple[Values, Values]], ratios: Mapping[str, Values], limits: Size = (-1, 1)
) -> Figure:
    """Draw samples of twins from the same noise, a row for each objective, each above its nearest training images.
    ``ratios`` of the nearest to the second nearest distance are the titles of the samples."""
    require(rows, "There is no sample to show.")
    shown: list[Row] = []
    for label, pair in rows.items():
        samples, nearest = (_pictures(images, limits) for images in pair)
        shown.append((label, samples, [f"{r:.2f}" for r in array(ratios[label], 1, "ratios")]))
        shown.append(("nearest in training", nearest, ()))
    return _rows(shown, len(shown[0][1]))


def _shade(ax: Axes, x: np.ndarray, inside: np.ndarray, colour: str) -> None:
    """Shade the levels inside, each up to the middle to its neighbours."""
    middle = np.sqrt(x[1:] * x[:-1])
    edges = np.concatenate([x[:1], middle, x[-1:]])
    for k in np.flatnonzero(inside):
        ax.axvspan(edges[k], edges[k + 1], color=colour, alpha=SHADE, lw=0)
