"""What a sampler does: paths over a map, final laws, images at the ends of paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from vkernel.core.errors import require
from vkernel.plots.base import array, ink, lines, plain_ticks, styled
from vkernel.plots.images import as_pictures

__all__ = ["end_images", "final_laws", "gap_curves", "law_panels", "path_maps", "share_curve"]

DOT = "#ff5a36"


@styled
def law_panels(
    laws: Mapping[str, Any], points: Any, gap: tuple[float, float], limit: float = 1.5, notes: Sequence[str] = ()
) -> Figure:
    """Histograms of several samples in one dimension, side by side, on one logarithmic axis.

    Bars stand for shares of all samples per bin; the two gaps, ``gap`` and its mirror image, are shaded, and training
    ``points`` marked below.
    """
    require(len(laws) > 0, "There is no law to draw.")
    points = array(points, 1, "points")
    figure = Figure(figsize=(2.65 * len(laws) + 0.6, 3.5))
    axes = figure.subplots(1, len(laws), sharex=True, sharey=True, squeeze=False)[0]
    edges = np.linspace(-limit, limit, 121)
    least = min(array(x).size for x in laws.values())
    for k, (ax, (name, sample)) in enumerate(zip(axes, laws.items(), strict=True)):
        x = array(sample).ravel()
        count = np.histogram(x, edges)[0] / x.size
        for low, high in (gap, (-gap[1], -gap[0])):
            ax.axvspan(low, high, color=lines()[4], alpha=0.16, lw=0)
        ax.stairs(count, edges, fill=True, baseline=1e-9, color=lines()[0], alpha=0.9, lw=0)
        ax.plot(points, np.full(points.shape, 0.5 / least), "o", color=DOT, ms=5, mec="white", mew=0.7, ls="")
        ax.set(yscale="log", ylim=(0.3 / least, 1), xlim=(-limit, limit), xticks=(-1, 0, 1), title=name, xlabel="x")
        ax.grid(visible=False, axis="x")
        ax.minorticks_off()
        if k < len(notes):
            ax.text(0.5, 0.965, notes[k], transform=ax.transAxes, ha="center", va="top", size=9.5)
    axes[0].set_ylabel("share of samples in a bin")
    return figure


@styled
def path_maps(
    names: Sequence[str],
    x: Any,
    fraction: Any,
    points: Any,
    alpha: float,
    rows: Mapping[str, Any],
) -> Figure:
    """Paths in the plane over maps ``fraction (set, y, x)`` in [0, 1]; sets are columns.

    ``rows`` maps a name to paths ``(set, step, path, 2)``. ``points (set, n, 2)`` are dots; their places at the map's
    time, ``alpha`` times the points, crosses. A path begins where its line is thin and ends in a small ring.
    """
    axis, fraction, points = array(x, 1, "axes"), array(fraction, 3, "maps"), array(points, 3, "sets of points")
    require(fraction.shape == (len(names), len(axis), len(axis)), f"The maps have shape {fraction.shape}.")
    figure = Figure(figsize=(2.75 * len(names) + 1.2, 2.75 * len(rows) + 0.8))
    axes = figure.subplots(len(rows), len(names), sharex=True, sharey=True, squeeze=False)
    half, image = (axis[1] - axis[0]) / 2, None
    extent = (axis[0] - half, axis[-1] + half, axis[0] - half, axis[-1] + half)
    for row, (label, paths) in enumerate(rows.items()):
        paths = array(paths, 4, "paths")
        for column, ax in enumerate(axes[row]):
            image = ax.imshow(fraction[column], extent=extent, origin="lower", vmin=0, vmax=1, alpha=0.82)
            for path in paths[column].transpose(1, 0, 2):
                pieces = np.stack([path[:-1], path[1:]], 1)
                wide = np.linspace(0.35, 1.25, len(pieces))
                ax.add_collection(LineCollection(list(pieces), colors="white", linewidths=wide, alpha=0.75))
            crosses = ax.plot(*(alpha * points[column]).T, "x", color="white", ms=4, mew=1.1, ls="")[0]
            dots = ax.plot(*points[column].T, "o", color=DOT, mec="white", mew=0.8, ms=6, ls="", zorder=3)[0]
            ends = ax.plot(*paths[column, -1].T, "o", mfc="none", mec="black", ms=3.6, mew=0.9, ls="", zorder=4)[0]
            ax.set(xlim=extent[:2], ylim=extent[2:], xticks=(-2, 0, 2), yticks=(-2, 0, 2))
            ax.grid(visible=False)
            if row == 0:
                ax.set_title(names[column])
        axes[row, 0].set_ylabel(f"{label}\n\nx₂")
    for ax in axes[-1]:
        ax.set_xlabel("x₁")
    assert image is not None
    bar = figure.colorbar(image, ax=axes, shrink=0.8, aspect=32, pad=0.015, ticks=(0, 0.25, 0.5, 0.75, 1))
    bar.set_label("tr C / (tr C + |s|²)")
    bar.outline.set_visible(False)
    labels = ["training points y", "αy at the time of the map", "where paths end"]
    entry = figure.legend([dots, crosses, ends], labels, loc="outside lower center", ncols=3)
    for handle in entry.legend_handles[1:]:
        handle.set_markeredgecolor(ink())  # type: ignore[union-attr]
    return figure


def _bars(ax: Axes, x: Any, curve: Any, colour: str, label: str, marker: str = "o", ls: str = "-") -> None:
    """Value and interval ``(3, len(x))`` on a log axis; where the value is 0, an arrow down from the upper end."""
    x, (value, low, high) = array(x, 1, "places"), array(curve, 2, "value, low, high")
    seen = value > 0
    shown = np.where(seen, value, np.nan)
    error = np.abs(np.stack([value - low, high - value]))[:, seen]
    ax.plot(x, shown, color=colour, lw=1.4, ls=ls)
    ax.errorbar(x[seen], value[seen], error, color=colour, marker=marker, ms=5, ls="", lw=1.3, capsize=3, label=label)
    for place, top in zip(x[~seen], high[~seen], strict=True):
        arrow = {"arrowstyle": "-|>", "color": colour, "lw": 1.2, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", (place, top / 3), (place, top), arrowprops=arrow)
        ax.plot([place], [top], marker="_", ms=9, color=colour)


@styled
def final_laws(sets: Mapping[str, Any], kappas: Sequence[float], edges: Any, points: Mapping[str, Any]) -> Figure:
    """Final laws of several sets (rows) at several κ (columns): ``sets[name]`` is ``(κ, bin)``, shares of all."""
    edges = array(edges, 1, "edges")
    figure = Figure(figsize=(2.5 * len(kappas) + 0.8, 2.2 * len(sets) + 0.6))
    axes = figure.subplots(len(sets), len(kappas), sharex=True, sharey=True, squeeze=False)
    floor = min(float(v[v > 0].min()) for v in (array(s) for s in sets.values()))
    for row, (name, shares) in enumerate(sets.items()):
        for column, (ax, share) in enumerate(zip(axes[row], array(shares, 2, "laws"), strict=True)):
            colour = lines()[column % len(lines())]
            ax.stairs(share, edges, fill=True, baseline=floor / 10, color=colour, alpha=0.88, lw=0)
            place = array(points[name], 1, "points")
            ax.plot(place, np.full(place.shape, floor * 0.75), "o", color=DOT, mec="white", mew=0.7, ms=5, ls="")
            ax.set(yscale="log", ylim=(floor / 2, 1), xlim=(edges[0], edges[-1]), xticks=(-1, 0, 1))
            ax.minorticks_off()
            ax.grid(visible=False, axis="x")
            if row == 0:
                ax.set_title(f"κ = {kappas[column]:g}")
        axes[row, 0].set_ylabel(f"{name}\n\nshare in a bin")
    for ax in axes[-1]:
        ax.set_xlabel("x")
    return figure


@styled
def gap_curves(
    kappas: Any, gaps: Mapping[str, Any], steps: Any, coarse: Mapping[str, Any], distance: Any, floor: float
) -> Figure:
    """Left: mass in the gap against κ. Middle: against the number of steps. Right: two kinds of noise compared.

    ``gaps`` and ``coarse`` map a label to ``(3, k)``: value, low and high end; an arrow stands where none was seen.
    ``distance (3, steps)`` is a total variation with its interval and ``floor`` what two samples of one law show.
    """
    kappas, steps, distance = array(kappas, 1, "κ"), array(steps, 1, "steps"), array(distance, 2, "distances")
    figure = Figure(figsize=(11.4, 3.9))
    left, middle, right = figure.subplots(1, 3)
    place = np.arange(len(kappas), dtype=float)
    for k, (label, curve) in enumerate(gaps.items()):
        _bars(left, place + 0.08 * (k - (len(gaps) - 1) / 2), curve, lines()[k], label, "os^D"[k % 4])
    left.set(xlabel="strength κ of the noise", ylabel="P(in the gap)", title="The gap empties", yscale="log")
    left.set_xticks(place, [f"{k:g}" for k in kappas])
    for k, (label, curve) in enumerate(coarse.items()):
        shift = 1 + 0.03 * (k - (len(coarse) - 1) / 2)
        _bars(middle, steps * shift, curve, lines()[k % len(lines())], label, "os^D"[k % 4])
    middle.set(xlabel="uniform steps", ylabel="P(in the gap)", title="Few steps fill it", yscale="log", xscale="log")
    value, low, high = distance
    colour = lines()[3]
    right.fill_between(steps, low, high, color=colour, alpha=0.25, lw=0)
    right.plot(steps, value, "o-", color=colour, label="resampled against Gaussian")
    right.axhline(floor, color=ink(), lw=1, ls=":", label="two samples of one law")
    right.set(xlabel="uniform steps", ylabel="total variation", title="Two kinds of noise, one limit")
    right.set(xscale="log", ylim=(0, None))
    for ax in (middle, right):
        ax.set_xticks(steps, [f"{s:g}" for s in steps])
        ax.minorticks_off()
    for ax in (left, middle):
        ax.set_ylim(top=ax.get_ylim()[1] * 6)
    for ax in (left, middle, right):
        ax.legend(loc="upper right")
    return figure


@styled
def end_images(
    nearest: Any, rows: Any, labels: Sequence[str], groups: Sequence[tuple[str, int]], other: Any, notes: Any
) -> Figure:
    """Ends of runs as images: one row per start; after the nearest training image, one column per run.

    ``nearest (row, *image)``, ``rows (row, column, *image)``; ``groups`` are the names and sizes of runs of columns;
    ``other (row, column)`` marks with a frame those that end at another training image; ``notes`` are below each.
    """
    rows, other = array(rows), np.asarray(other, dtype=bool)
    count, columns = rows.shape[:2]
    require(other.shape == (count, columns), "There must be one mark per image.")
    first = as_pictures(nearest, (-1, 1))
    sizes = [1, *(size for _, size in groups)]
    require(sum(sizes) == columns + 1, "The groups must cover the columns.")
    gap = 0.16
    widths = [w for size in sizes for w in (*(1.0 for _ in range(size)), gap)][:-1]
    figure = Figure(figsize=(0.86 * sum(widths) + 0.3, 1.08 * count + 0.5))
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - 0.22 / (1.08 * count + 0.5)))  # type: ignore[union-attr,call-arg]
    axes = figure.subplots(count, len(widths), width_ratios=widths, squeeze=False)
    column, begin = 0, 0
    for g, size in enumerate(sizes):
        name = groups[g - 1][0] if g else "training"
        title = axes[0, column].text(0, 1.09, name, transform=axes[0, column].transAxes, size=10)
        title.set_in_layout(False)  # it may reach over the images beside
        for k in range(size):
            for row in range(count):
                shown = first[row] if g == 0 else as_pictures(rows[row, begin + k][None], (-1, 1))[0]
                ax = axes[row, column + k]
                ax.imshow(shown, cmap="gray", vmin=0, vmax=1)
                ax.set(xticks=[], yticks=[])
                ax.grid(visible=False)
                mark = g > 0 and bool(other[row, begin + k])
                ax.spines[:].set(visible=True, color=lines()[1] if mark else "none", linewidth=2.6)
                ax.set_xlabel(labels[row] if g == 0 else str(notes[row][begin + k]), size=8.5, labelpad=2)
        begin += size if g else 0
        column += size
        if g + 1 < len(sizes):
            for row in range(count):
                axes[row, column].set_axis_off()
            column += 1
    return figure


@styled
def share_curve(kappas: Any, shares: Any, distances: Mapping[str, Any]) -> Figure:
    """Left: the share of runs that end elsewhere against κ, ``(3, κ)``. Right: distances, ``(3, κ)``: quartiles."""
    kappas, (value, low, high) = array(kappas, 1, "κ"), array(shares, 2, "value, low, high")
    figure = Figure(figsize=(9.2, 3.7))
    left, right = figure.subplots(1, 2)
    place = np.arange(len(kappas))
    blue = lines()[0]
    left.errorbar(place, value, np.abs([value - low, high - value]), color=blue, marker="o", capsize=3, lw=1.6)
    left.set(ylim=(0, 1.02), ylabel="share of runs", title="Ends at another image than the PF-ODE")
    for k, (label, curve) in enumerate(distances.items()):
        bottom, middle, top = array(curve, 2, "quartiles")
        right.fill_between(place, bottom, top, color=lines()[k], alpha=0.22, lw=0)
        right.plot(place, middle, "o-", color=lines()[k], label=label)
    right.set(yscale="log", ylabel="distance (data unit)", title="Distance to training images, quartiles")
    span = np.concatenate([array(c).ravel() for c in distances.values()])
    right.set_yticks(*plain_ticks(span))
    right.minorticks_off()
    right.legend(loc="center right")
    for ax in (left, right):
        ax.set_xticks(place, [f"{k:g}" for k in kappas])
        ax.set_xlabel("strength κ of the noise")
    return figure
