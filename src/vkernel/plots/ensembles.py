"""Trained ensembles: their laws, the variance of their scores, and theory against measurement."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from vkernel.core.errors import require
from vkernel.plots import base
from vkernel.plots.base import Names, Notes, Size, Values, array, ink, lines, styled
from vkernel.plots.curves import panel

if TYPE_CHECKING:
    import xarray

Several: TypeAlias = Sequence[Values]
Laws: TypeAlias = Mapping[str, Several]
FLOOR = 3e-3  # densities below this are drawn at the bottom
SHOWN = 4  # times or conditions in one picture
LAWS = {"ensemble": "trained ensemble", "field": "Gaussian field of V", "semiclassical": "semiclassical"}


@styled
def law_grid(
    edges: Values, laws: Laws, *, exact: Values, noised: Several, rows: Names, columns: Names, notes: Notes, gap: Size
) -> Figure:
    """Draw densities of several laws, each with quartiles, ``(row, column, bin)``, that of the ``exact`` score
    ``(row, bin)``, and that of ``noised`` data, a grid and densities ``(row, point)``."""
    x, fine = array(edges, 1, "edges"), array(noised[0], 1, "grid")
    smooth, bare = (np.maximum(array(v, 2, "densities"), FLOOR / 2) for v in (noised[1], exact))
    figure, axes = base.grid([f"{row}\ndensity" for row in rows], columns, (2.2, 2.0), (0.9, 1.0), "x")
    for (i, j), ax in np.ndenumerate(axes):
        for low, high in (gap, (-gap[1], -gap[0])):
            ax.axvspan(low, high, color=lines()[4], alpha=0.12, lw=0)
        for colour, (name, law) in zip(lines(), laws.items(), strict=False):
            mean, lower, upper = (np.maximum(array(v)[i, j], FLOOR / 2) for v in law)
            ends = np.append(lower, lower[-1]), np.append(upper, upper[-1])
            ax.fill_between(x, *ends, step="post", color=colour, alpha=0.25, lw=0)
            ax.stairs(mean, x, color=colour, lw=1.5, baseline=None, label=name)
        ax.plot(fine, smooth[i], color=ink(), lw=1, ls=":", label="noised data p(x|eps)")
        ax.stairs(bare[i], x, color=ink(), alpha=0.45, lw=1.0, baseline=None, label="exact score, same steps")
        ax.set(yscale="log", ylim=(FLOOR, 150), xlim=(x[0], x[-1]), xticks=(-1, 0, 1))
        ax.minorticks_off()
        ax.grid(visible=False, axis="x")
        ax.text(0.5, 0.97, notes[i][j], transform=ax.transAxes, ha="center", va="top", size=9)
    base.legend_below(figure, axes[0, 0])
    return figure


@styled
def variance_panels(
    ratios: Values, times: Values, x: Values, names: Names, theory: Several, measured: Values, density: Values
) -> Figure:
    """Draw variances along x: P/F as columns, times as rows, a colour for each of ``names``. ``theory`` is a prediction
    ``(name, ratio, time, x)`` and its leading order, ``measured (name, ratio, 3, time, x)`` a band with its value, and
    ``density (time, x)`` the grey area."""
    x, (predicted, second) = array(x, 1, "places"), (array(v, 4, "predictions") for v in theory)
    measured, density = array(measured, 5, "measurements"), array(density, 2, "densities")
    rows = [f"t = {t:g}\n\nσ² tr Cov" for t in array(times)]
    columns = [f"P/F = {base.number(r)}" for r in array(ratios)]
    figure, axes = base.grid(rows, columns, (2.55, 2.15), (0.9, 0.75), "x", sharey="row")
    for (row, column), ax in np.ndenumerate(axes):
        every = np.concatenate([predicted[:, :, row].ravel(), measured[:, :, 0, row].ravel()])
        ends = float(every.min()) / 2.5, 2.5 * float(max(every.max(), second[:, :, row].max()))
        ax.set(yscale="log", ylim=ends, xlim=(x[0], x[-1]), xticks=(-1, 0, 1))
        hill, look = 0.3 * density[row] / density[row].max(), {"alpha": 0.1, "lw": 0, "label": "p(x|t)"}
        ax.fill_between(x, 0, hill, color=ink(), transform=ax.get_xaxis_transform(), **look)
        for k, (name, colour) in enumerate(zip(names, lines(), strict=False)):
            low, high = measured[k, column, 1:, row]
            ax.plot(x, predicted[k, column, row], color=colour, lw=1.5, label=f"{name} predicted")
            ax.plot(x, second[k, column, row], color=colour, lw=1.1, ls=base.DOTTED, label=f"{name} leading order")
            ax.fill_between(x, low, high, color=colour, alpha=0.3, lw=0, label=f"{name} measured")
        ax.minorticks_off()
    base.legend_below(figure, axes[0, 0], ncols=min(1 + 3 * len(names), len(columns) + 1))
    return figure


@styled
def comparison(ds: xarray.Dataset) -> Figure:
    """Draw the result of :func:`vkernel.compare`, up to four conditions as rows, and four times: variance of the score,
    its ratio to the prediction, cumulants over members, and laws; error bars are one standard error."""
    require("predicted" in ds and "measured" in ds, "comparison draws what vkernel.compare returns for a V-kernel.")
    several, line = "condition" in ds.dims, ds.sizes["axis"] == 1
    conditions = _few(ds.sizes["condition"]) if several else [0]
    panels = (_variance, _ratio_along) if line else (_ratio,)
    laws = 0 if "density" not in ds else 1 if line else len(LAWS)
    count = len(panels) + 1 + laws
    figure = Figure(figsize=(3.1 * count + 0.6, 2.9 * len(conditions) + 0.7))
    axes = figure.subplots(len(conditions), count, squeeze=False)
    for row, k in zip(axes, conditions, strict=True):
        one = ds.isel(condition=k) if several else ds
        for draw, ax in zip((*panels, _cumulants), row, strict=False):
            draw(ax, one)
        if laws:
            (_densities if line else _density_maps)(figure, row[-laws:], one)
        if several:
            label = ds.condition.values[k]
            name = f"{label:.3g}" if isinstance(label, float) else str(label)
            row[0].set_ylabel(f"{ds.condition.attrs['long_name']} = {name}\n\n{row[0].get_ylabel()}")
    for column in axes.T[: len(panels)]:  # conditions are compared on the same scale
        ends = np.array([ax.get_ylim() for ax in column])
        for ax in column:
            ax.set_ylim(ends.min(), ends.max())
    for above, below in zip(axes[:-1].flat, axes[1:].flat, strict=True):
        above.set_xlabel("")
        below.set_title("")
    handles = [h for ax in (axes[0, 0], axes[0, len(panels)]) for h in ax.get_legend_handles_labels()[0]]
    base.legend_below(figure, handles, [str(h.get_label()).replace("predicted", "predicted by V") for h in handles])
    return figure


def _few(count: int) -> list[int]:
    return sorted({round(k) for k in np.linspace(0, count - 1, min(SHOWN, count))})


def _times(one: xarray.Dataset, *names: str) -> Iterator[tuple[str, str, list[np.ndarray]]]:
    """Yield up to four times: colour, label, and the named variables at that time, NaN outside the bulk."""
    for n, k in enumerate(_few(one.sizes["t"])):
        at = one.isel(t=k)
        yield lines()[n], f"t = {float(at.t):.3g}", [array(at[name].where(at.bulk)) for name in names]


def _variance(ax: Axes, one: xarray.Dataset) -> None:
    one = one.sortby("x").assign(bulk=one.bulk | True)  # variances are drawn outside the bulk too
    some = slice(None, None, max(1, one.sizes["x"] // 15))
    found = {label: v for _, label, v in _times(one, "measured", "measured_se", "predicted")}
    curves = {label: np.stack([v, v - se, v + se])[:, some] for label, (v, se, _) in found.items()}
    theory = {label: (one.x.values, predicted) for label, (_, _, predicted) in found.items()}
    panel("score_variance", one.x.values[some], curves, expected=theory).draw(ax)


def _ratio_along(ax: Axes, one: xarray.Dataset) -> None:
    curves = {label: np.stack([v, v - se, v + se]) for _, label, (v, se) in _times(one, "ratio", "ratio_se")}
    panel("score_ratio", one.x.values, curves).draw(ax)
    inside = array(one.ratio)[array(one.bulk) > 0]
    ends = min(max(0.2, 0.85 * inside.min()), 0.7), max(min(5, 1.15 * inside.max()), 1.4)
    base.log_axis(ax, "y", np.array(ends))
    ax.set_ylim(*ends)


def _ratio(ax: Axes, one: xarray.Dataset) -> None:
    """Draw measured / predicted against predicted, since variances in many dimensions span decades."""
    base.level(ax, 1, "equal")
    for colour, label, (predicted, ratio, se) in _times(one, "predicted", "ratio", "ratio_se"):
        ax.errorbar(predicted, ratio, se, color=colour, ls="", marker="o", ms=3, lw=0.8, alpha=0.75, label=label)
    ax.set(xscale="log", xlabel="predicted tr Cov (1 / data unit²)", ylabel="measured / predicted", ylim=(0, None))
    ax.set_title("Variance of the score")
    ax.minorticks_off()


def _cumulants(ax: Axes, one: xarray.Dataset) -> None:
    """Draw skewness and excess kurtosis at every place, with the rectangle that holds 95 % of each for a Gaussian."""
    wide, tall = (1.96 * math.sqrt(v / int(one.members)) for v in (6, 24))
    box = Rectangle((-wide, -tall), 2 * wide, 2 * tall, color=ink(), alpha=0.16, lw=0, label="95 % if Gaussian")
    ax.add_patch(box)
    for colour, _, (skewness, kurtosis) in _times(one, "skewness", "kurtosis"):
        ax.plot(skewness.ravel(), kurtosis.ravel(), "o", color=colour, ms=3, ls="", alpha=0.65, mew=0)
    ax.set_yscale("symlog", linthresh=max(2 * tall, 1))
    ax.yaxis.set_major_formatter("{x:.3g}")
    ax.yaxis.set_minor_formatter("")
    ax.set(xlabel="skewness", ylabel="excess kurtosis", title="Cumulants over members")


def _laws(one: xarray.Dataset) -> Iterator[tuple[str, np.ndarray, str]]:
    """Yield the label of each law, its density, and its total variation from that of the ensemble."""
    for name, label in LAWS.items():
        tv = "" if name == "ensemble" else f"TV {float(one[f'tv_{name}']):.2f}"
        yield label, array(one.density.sel(law=name)), tv


def _edges(places: np.ndarray) -> np.ndarray:
    half = (places[1] - places[0]) / 2 if len(places) > 1 else 0.5
    return np.append(places - half, places[-1] + half)


def _densities(_: Figure, axes: np.ndarray, one: xarray.Dataset) -> None:
    (ax,), top = axes, float(np.nanmax(array(one.density)))
    looks: list[dict[str, Any]] = [
        {"color": lines()[5], "fill": True, "alpha": 0.35, "lw": 0},
        {"color": lines()[0], "lw": 1.5},
        {"color": lines()[1], "lw": 1.5, "ls": base.DASHED},
    ]
    for (label, density, tv), look in zip(_laws(one), looks, strict=True):
        if np.isfinite(density).all():
            ax.stairs(density, _edges(array(one.bin)), label=f"{label}, {tv}" if tv else label, **look)
    ax.set(xlabel="x at eps (data unit)", ylabel="density", yscale="log", ylim=(top / 3e4, top * 300), title="Laws")
    ax.set_yticks([10.0**k for k in range(-9, 6) if top / 3e4 <= 10.0**k <= top])
    ax.minorticks_off()
    ax.legend(loc="upper center", fontsize=8.5)
    ax.grid(visible=False, axis="x")


def _density_maps(figure: Figure, axes: np.ndarray, one: xarray.Dataset) -> None:
    extent = tuple(end for places in (one.bin, one.bin2) for end in _edges(array(places))[[0, -1]])
    top = float(np.nanmax(array(one.density)))
    for ax, (label, density, tv) in zip(axes, _laws(one), strict=True):
        image = ax.imshow(density.T, extent=extent, origin="lower", norm=LogNorm(top / 1e3, top, clip=True))
        ax.text(0.04, 0.96, tv, transform=ax.transAxes, va="top", color="white", size=9.5)
        ax.set(xlabel="x₁", ylabel="x₂" if ax is axes[0] else "", title=label)
        ax.grid(visible=False)
    base.colour_bar(figure, image, axes, "density (1 / data unit²)", shrink=0.85, aspect=28)
