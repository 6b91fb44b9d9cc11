"""Maps over the plane and densities along the line: target noise, paths of samplers, laws of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import LogNorm, PowerNorm
from matplotlib.figure import Figure

from vkernel.core.errors import require
from vkernel.plots import base
from vkernel.plots.base import DOT, Values, array, ink, lines, styled
from vkernel.plots.images import as_pictures

FRACTION = "noise share of the target,  tr C / (tr C + |s|²)"


@styled
def fraction_maps(
    names: Sequence[str], t: Values, x: Values, y: Values, fraction: Values, points: Values, alpha: Values
) -> Figure:
    """Draw maps ``fraction (set, t, y, x)`` in [0, 1] (Figure 1): sets are rows, times are columns.

    ``points (set, n, 2)`` are dots; ``alpha (t,)`` times the points, where the process moves them, are crosses.
    """
    t, x, y, alpha = (array(v, 1, "axes") for v in (t, x, y, alpha))
    fraction, points = array(fraction, 4, "maps"), array(points, 3, "sets of points")
    shape = (len(names), len(t), len(y), len(x))
    require(fraction.shape == shape, f"The maps must have shape {shape}; got {fraction.shape}.")
    figure = Figure(figsize=(2.15 * len(t) + 1.3, 2.15 * len(names) + 0.7))
    axes = figure.subplots(*shape[:2], sharex=True, sharey=True, squeeze=False)
    for (i, j), ax in np.ndenumerate(axes):
        _fraction_map(ax, x, y, fraction[i, j], points[i], float(alpha[j]))
    base.map_axes(axes, [f"{name}\n\nx₂" for name in names], [f"t = {v:g}" for v in t])
    _fraction_legend(figure, axes, ["training points y", "moved points αy at t"])
    return figure


@styled
def path_maps(
    names: Sequence[str], x: Values, fraction: Values, points: Values, alpha: float, rows: Mapping[str, Values]
) -> Figure:
    """Draw paths in the plane over maps ``fraction (set, y, x)`` in [0, 1]; sets are columns.

    ``rows`` maps a name to paths ``(set, step, path, 2)``, whose lines become wider towards the end, a small ring.
    ``points (set, n, 2)`` are dots; ``alpha`` times the points, where the process moves them, are crosses.
    """
    x, fraction, points = array(x, 1, "axes"), array(fraction, 3, "maps"), array(points, 3, "sets of points")
    require(fraction.shape == (len(names), len(x), len(x)), f"The maps have shape {fraction.shape}.")
    figure = Figure(figsize=(2.75 * len(names) + 1.2, 2.75 * len(rows) + 0.8))
    axes = figure.subplots(len(rows), len(names), sharex=True, sharey=True, squeeze=False)
    each = [array(paths, 4, "paths") for paths in rows.values()]
    for (i, j), ax in np.ndenumerate(axes):
        for path in each[i][j].swapaxes(0, 1):
            segments = list(np.stack([path[:-1], path[1:]], 1))
            widths = np.linspace(0.35, 1.25, len(segments))
            ax.add_collection(LineCollection(segments, colors="white", linewidths=widths, alpha=0.75))
        _fraction_map(ax, x, x, fraction[j], points[j], alpha, opacity=0.82)
        ax.plot(*each[i][j, -1].T, "o", mfc="none", mec="black", ms=3.6, mew=0.9, ls="", zorder=4)
    base.map_axes(axes, [f"{name}\n\nx₂" for name in rows], names)
    _fraction_legend(figure, axes, ["training points y", "moved points αy", "ends of paths"])
    return figure


def _fraction_map(ax: Axes, x: np.ndarray, y: np.ndarray, fraction: np.ndarray, points: np.ndarray, alpha: float,
                  opacity: float = 1.0) -> None:  # fmt: skip
    dx, dy = (x[1] - x[0]) / 2, (y[1] - y[0]) / 2
    extent = (x[0] - dx, x[-1] + dx, y[0] - dy, y[-1] + dy)
    ax.imshow(fraction, extent=extent, origin="lower", vmin=0, vmax=1, alpha=opacity)
    ax.plot(*points.T, "o", color=DOT, mec="white", mew=0.8, ms=5, ls="", zorder=3)
    ax.plot(*(alpha * points).T, "x", color="white", ms=4, mew=1.1, ls="")
    ax.set(xlim=extent[:2], ylim=extent[2:], xticks=(-2, 0, 2), yticks=(-2, 0, 2))
    ax.grid(visible=False)


def _fraction_legend(figure: Figure, axes: np.ndarray, labels: list[str]) -> None:
    first = axes[0, 0]
    base.colour_bar(figure, first.images[0], axes, FRACTION, shrink=0.7, aspect=30, ticks=(0, 0.25, 0.5, 0.75, 1))
    base.legend_below(figure, first.lines, labels)


@styled
def line_maps(
    t: Values,
    lam_clean: Values,
    clean: Values,
    lam: Values,
    noisy: Values,
    noisy_se: Values,
    *,
    at: Values,
    strip_clean: Values,
    strip_noisy: Values,
    profiles: Sequence[int],
    titles: tuple[str, str],
    floor: float = 1e-6,
) -> Figure:
    """Draw sigma² tr C / d over (λ, t) on the line between two images, without noise (left) and with it (right).

    ``clean (t, λ)`` has its own, finer positions ``lam_clean``; ``noisy`` and ``noisy_se`` are at ``lam``. Above each
    map stand the images at the positions ``at``; below it are profiles along λ at the times with the indices
    ``profiles``, on the right with 95 % bands. The colour scale is logarithmic, shared, and ends at ``floor``.
    """
    t, at, *places = (array(v, 1, "axes") for v in (t, at, lam_clean, lam))
    values, error = [array(v, 2, "maps") for v in (clean, noisy)], array(noisy_se, 2, "maps")
    shapes = [(len(t), len(p)) for p in (*places, places[1])]
    require([v.shape for v in (*values, error)] == shapes, "The maps must have shape (t, λ).")
    top = 10.0 ** np.ceil(np.log10(max(float(v.max()) for v in values)))
    figure = Figure(figsize=(10.6, 8.2))
    axes = figure.subplots(3, 2, sharex=True, sharey="row", height_ratios=(0.3, 1, 0.72))
    colours = [lines()[k] for k in (0, 2, 3, 1)]
    for side, (where, value, strip) in enumerate(zip(places, values, (strip_clean, strip_noisy), strict=True)):
        above, ax, below = axes[:, side]
        _strip(above, where, at, as_pictures(strip, (-1, 1)))
        above.set_title(titles[side])
        norm = LogNorm(floor, top, clip=False)
        mesh = ax.pcolormesh(where, t, np.maximum(value, floor / 2), norm=norm, shading="nearest", rasterized=True)
        base.log_axis(ax, "y", t)
        ax.set_ylim(t.min(), t.max())
        ax.grid(visible=False)
        for index, colour in zip(profiles, colours, strict=False):
            ax.axhline(t[index], color="white", lw=0.7, ls=(0, (2, 3)))
            ends = {"color": colour, "mec": ax.get_facecolor(), "ms": 7, "clip_on": False, "zorder": 5}
            ax.plot([where[0], where[-1]], [t[index]] * 2, "o", ls="", **ends)
            half = 1.96 * error[index] if side else np.zeros(len(where))
            curve = np.maximum([value[index], value[index] - half, value[index] + half], floor / 1e3)
            base.band(below, where, curve, colour, f"t = {t[index]:.2g}", alpha=0.2)
        below.set(yscale="log", ylim=(floor, top), xlim=(where[0], where[-1]), xlabel="position λ on the line")
        for panel, colour in ((ax, "white"), (below, ink())):
            for end in (0, 1):
                panel.axvline(end, color=colour, lw=0.9, ls=":")
    axes[1, 0].set_ylabel("noise level t")
    axes[2, 0].set_ylabel("σ² tr C / d")
    base.legend_below(figure, *axes[2, 0].get_legend_handles_labels())
    base.colour_bar(figure, mesh, axes[1, :], "σ² tr C / d", extend="min", aspect=28)
    return figure


def _strip(ax: Axes, lam: np.ndarray, at: np.ndarray, pictures: np.ndarray) -> None:
    """Draw square images at their positions λ along the axis."""
    width = 0.82 * float(np.diff(at).min())
    for place, picture in zip(at, pictures, strict=True):
        extent = (place - width / 2, place + width / 2, 0, 1)
        ax.imshow(picture, extent=extent, aspect="auto", cmap="gray", vmin=0, vmax=1)
    ax.set(xlim=(lam[0], lam[-1]), ylim=(0, 1), yticks=[])
    ax.set_aspect(width, adjustable="box", anchor="S")
    ax.tick_params(length=0, labelbottom=False)
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)


@styled
def plane_laws(
    laws: Values,
    points: Values,
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    limit: float,
    top: float,
    notes: Sequence[Sequence[str]] | None = None,
) -> Figure:
    """Draw densities ``laws (row, column, x₁, x₂)`` on the square of half side ``limit``, with one colour scale.

    The scale is the square root of the density, so that small densities are visible beside peaks, and saturates at
    ``top``. ``points (column, n, 2)`` are rings; ``notes (row, column)`` are labels in the corners.
    """
    laws, points = array(laws, 4, "laws"), array(points, 3, "sets of points")
    shape = (len(rows), len(columns))
    require(laws.shape[:2] == shape, f"There must be {shape} laws; got {laws.shape[:2]}.")
    require(len(points) == len(columns), f"There must be {len(columns)} sets of points; got {len(points)}.")
    figure = Figure(figsize=(2.45 * len(columns) + 1.5, 2.4 * len(rows) + 0.7))
    axes = figure.subplots(*shape, sharex=True, sharey=True, squeeze=False)
    norm, extent = PowerNorm(0.5, 0, top, clip=True), (-limit, limit, -limit, limit)
    for (i, j), ax in np.ndenumerate(axes):
        image = ax.imshow(laws[i, j].T, extent=extent, origin="lower", norm=norm)
        rings = ax.plot(*points[j].T, "o", color="none", mec=DOT, mew=1.4, ms=8, ls="")
        ax.set(xlim=(-limit, limit), ylim=(-limit, limit), xticks=(-1, 0, 1), yticks=(-1, 0, 1))
        ax.grid(visible=False)
        if notes is not None:
            ax.text(0.04, 0.955, notes[i][j], transform=ax.transAxes, va="top", size=9, color="white")
    base.map_axes(axes, [f"{name}\n\nx₂" for name in rows], columns)
    ticks = top * np.array([0, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0])
    label, look = "density, mean over members", {"shrink": 0.6, "aspect": 32, "extend": "max"}
    bar = base.colour_bar(figure, image, axes, label, ticks=ticks, **look)
    bar.ax.set_yticklabels([f"{v:.2g}" for v in ticks])
    bar.ax.minorticks_off()
    base.legend_below(figure, rings, ["training points, at αy"])
    return figure


@styled
def law_panels(
    laws: Mapping[str, Values],
    points: Values,
    gap: tuple[float, float],
    limit: float = 1.5,
    notes: Sequence[str] = (),
) -> Figure:
    """Draw histograms of several samples in one dimension side by side, on one logarithmic axis.

    Bars are shares of all samples; ``gap`` and its mirror image are shaded, and training ``points`` marked below.
    """
    require(len(laws) > 0, "There is no law to draw.")
    edges, samples = np.linspace(-limit, limit, 121), [array(x).ravel() for x in laws.values()]
    floor = 0.5 / min(x.size for x in samples)
    figure = Figure(figsize=(2.65 * len(laws) + 0.6, 3.5))
    axes = figure.subplots(1, len(laws), sharex=True, sharey=True, squeeze=False)
    for k, (ax, x) in enumerate(zip(axes[0], samples, strict=True)):
        for low, high in (gap, (-gap[1], -gap[0])):
            ax.axvspan(low, high, color=lines()[4], alpha=0.16, lw=0)
        _law(ax, np.histogram(x, edges)[0] / x.size, edges, points, lines()[0], floor)
        if k < len(notes):
            ax.text(0.5, 0.965, notes[k], transform=ax.transAxes, ha="center", va="top", size=9.5)
    base.map_axes(axes, ["share of samples in a bin"], list(laws), "x")
    return figure


@styled
def final_laws(
    sets: Mapping[str, Values], kappas: Sequence[float], edges: Values, points: Mapping[str, Values]
) -> Figure:
    """Draw the final laws of several sets (rows) at several κ (columns); ``sets[name] (κ, bin)`` are shares."""
    edges, shares = array(edges, 1, "edges"), [array(s, 2, "laws") for s in sets.values()]
    figure = Figure(figsize=(2.5 * len(kappas) + 0.8, 2.2 * len(sets) + 0.6))
    axes = figure.subplots(len(sets), len(kappas), sharex=True, sharey=True, squeeze=False)
    floor = 0.75 * min(float(v[v > 0].min()) for v in shares)
    for (i, j), ax in np.ndenumerate(axes):
        _law(ax, shares[i][j], edges, points[list(sets)[i]], lines()[j % len(lines())], floor)
    base.map_axes(axes, [f"{name}\n\nshare in a bin" for name in sets], [f"κ = {kappa:g}" for kappa in kappas], "x")
    return figure


def _law(ax: Axes, share: np.ndarray, edges: np.ndarray, points: Values, colour: str, floor: float) -> None:
    """Draw shares as bars on a logarithmic axis, with the training points at the height ``floor``."""
    ax.stairs(share, edges, fill=True, baseline=floor / 10, color=colour, alpha=0.88, lw=0)
    place = array(points, 1, "points")
    ax.plot(place, np.full(place.shape, floor), "o", color=DOT, mec="white", mew=0.7, ms=5, ls="")
    ax.set(yscale="log", ylim=(0.6 * floor, 1), xlim=(edges[0], edges[-1]), xticks=(-1, 0, 1))
    ax.minorticks_off()
    ax.grid(visible=False, axis="x")
