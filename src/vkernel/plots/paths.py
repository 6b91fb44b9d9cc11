"""Paths of samplers and where they end: by their start on the line, in bundles in the plane; maps of V over C."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vkernel.core.errors import require
from vkernel.plots import base
from vkernel.plots.base import DOT, Curves, Names, Notes, Values, array, ink, lines, styled
from vkernel.plots.curves import panel

__all__ = ["kernel_maps", "path_bundles", "start_maps"]
MARKED: Sequence[base.LineStyle] = ("-", base.DASHED, base.DOTTED)


@styled
def start_maps(starts: Values, edges: Values, laws: Curves, flows: Mapping[str, Curves], xlabel: str) -> Figure:
    """Draw the law of the end of a path given its start: ``laws[name] (start, bin)``, shares in the bins between
    ``edges``, and over it the ends of single ``flows[name][label] (start,)`` as lines."""
    x, edges = array(starts, 1, "starts"), array(edges, 1, "edges")
    shares = [array(law, 2, "laws") for law in laws.values()]
    shape = (len(x), len(edges) - 1)
    require(all(v.shape == shape for v in shares), f"Each law must have shape {shape}.")
    low = min(float(v[v > 0].min()) for v in shares)
    sides = np.concatenate([[1.5 * x[0] - 0.5 * x[1]], (x[1:] + x[:-1]) / 2, [1.5 * x[-1] - 0.5 * x[-2]]])
    figure, (axes,) = base.grid(["end x"], list(laws), (3.5, 3.5), (1.3, 0.8), xlabel)
    look: dict[str, Any] = {"norm": LogNorm(low, 1), "rasterized": True}
    for ax, (name, _), share in zip(axes, laws.items(), shares, strict=True):
        image = ax.pcolormesh(sides, edges, np.where(share > 0, share, np.nan).T, **look)
        for k, (label, end) in enumerate(flows[name].items()):
            style = {"color": (DOT, ink())[k % 2], "ls": "", "marker": "o_"[k % 2], "ms": (2.4, 6)[k % 2], "zorder": 3}
            ax.plot(x, array(end, 1, "ends"), label=label, **style)
        ax.set(xlim=(sides[0], sides[-1]), ylim=(edges[0], edges[-1]))
        ax.grid(visible=False)
    base.colour_bar(figure, image, axes, "share of members in a bin", aspect=28)
    base.legend_below(figure, axes[0])
    return figure


@styled
def path_bundles(
    points: Values, paths: Values, ends: Values, marked: Curves, actions: Values, shares: Curves
) -> Figure:
    """Draw ``paths (step, path, 2)`` in the plane, each in the colour of the point, one of ``points (n, 2)``, whose
    index is in ``ends (path,)``, and single ``marked`` paths ``(step, 2)`` over them. Beside it are ``actions
    (step, path + 1)`` so far, that of the most probable path last, and ``shares[name] (3, n)`` of paths by ends."""
    points, paths, actions = array(points, 2, "points"), array(paths, 3, "paths"), array(actions, 2, "actions")
    colours = [lines()[int(k) % len(lines())] for k in array(ends, 1, "ends")]
    require(len(colours) == paths.shape[1], f"There are {paths.shape[1]} paths and {len(colours)} ends.")
    figure, ((ax, *beside),) = base.axes((13.4, 5.2), 1, 3, width_ratios=(1.25, 1, 1))
    for place, colour in zip(paths.swapaxes(0, 1), colours, strict=True):
        ax.plot(*place.T, color=colour, lw=0.6, alpha=0.45)
    for k, place in enumerate(points):
        ax.plot(*place, "o", color=lines()[k % len(lines())], mec=ink(), mew=1.2, ms=9, zorder=5)
        ax.annotate(str(k + 1), place, (7, 7), textcoords="offset points", zorder=6, weight="bold")
    for k, (label, path) in enumerate(marked.items()):
        place, look = array(path, 2, "paths"), {"ls": MARKED[k % len(MARKED)], "zorder": 4 - k / 4}
        ax.plot(*place.T, color=ax.get_facecolor(), lw=4.2, zorder=3)
        ax.plot(*place.T, color=ink(), lw=2.4 - 0.5 * (k > 0), label=label, **look)
        ax.plot(*place[-1], "o", color=ink(), mec=ax.get_facecolor(), ms=6, zorder=5)
    ax.plot(*paths[0, 0], "*", color=ink(), mec=ax.get_facecolor(), ms=14, zorder=6, label="start")
    ax.set(xlabel="x₁ (data unit)", ylabel="x₂ (data unit)", title="Paths from one start")
    ax.set_aspect("equal", adjustable="datalim")
    step = np.arange(1, len(actions) + 1)
    curves = {"sampled paths, median and 95 %": np.quantile(actions[:, :-1], (0.5, 0.025, 0.975), axis=1)}
    curves["most probable path"] = np.stack([actions[:, -1]] * 3)
    curves["expected mean, d/2 for each step"] = np.stack([step * points.shape[1] / 2] * 3)
    by_step, by_end = panel("action_along", step, curves), panel("path_ends", np.arange(1, len(points) + 1), shares)
    for each, other in zip((by_step, by_end), beside, strict=True):
        each.draw(other)
    beside[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    for each in (ax, *beside):
        each.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13))
    return figure


@styled
def kernel_maps(
    x: Values, kernels: Curves, noise: Values, points: Values, rows: Names, notes: Notes, label: str, decades: float = 4
) -> Figure:
    """Draw variances ``kernels[name] (row, x₂, x₁)`` on one logarithmic scale of so many ``decades``. Contours, equal
    in all columns, hold the upper quarter and the upper tenth of the ``noise (row, x₂, x₁)`` of the target in a row;
    ``points (row, n, 2)`` are dots."""
    x, noise, points = array(x, 1, "axes"), array(noise, 3, "maps"), array(points, 3, "sets of points")
    maps = [array(v, 3, "maps") for v in kernels.values()]
    require(all(v.shape == noise.shape for v in maps), f"Each map must have the shape of the noise, {noise.shape}.")
    top = max(float(v.max()) for v in maps)
    norm, ends = LogNorm(top / 10**decades, top, clip=True), (float(x[0]), float(x[-1]))
    figure, axes = base.grid([f"{name}\n\nx₂" for name in rows], list(kernels), (2.5, 2.5), (1.4, 0.8))
    for (i, j), ax in np.ndenumerate(axes):
        image = ax.imshow(maps[j][i], extent=ends * 2, origin="lower", norm=norm)
        ax.contour(x, x, noise[i], list(np.quantile(noise[i], (0.75, 0.9))), colors=DOT, linewidths=(0.9, 1.6))
        ax.plot(*points[i].T, "o", color="white", mec="black", mew=1.0, ms=5.5, ls="")
        if notes[i][j]:
            box = {"facecolor": "black", "alpha": 0.45, "lw": 0, "pad": 2}
            ax.text(0.05, 0.945, notes[i][j], transform=ax.transAxes, va="top", size=9, color="white", bbox=box)
        ax.set(xlim=ends, ylim=ends, xticks=(-1, 0, 1), yticks=(-1, 0, 1))
        ax.grid(visible=False)
    base.colour_bar(figure, image, axes, label, shrink=0.8, aspect=30, extend="min")
    contours = [LineCollection([], colors=DOT, linewidths=width) for width in (0.9, 1.6)]
    names = ["upper quarter of C", "upper tenth of C", "training points, at αy"]
    base.legend_below(figure, [*contours, axes[0, 0].lines[0]], names)
    return figure
