"""Training points, samples and laws: images in rows and pairs, maps over the plane, curves along the line."""

import base64
import io
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import LogNorm, PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from vkernel.core.errors import require
from vkernel.core.estimate import Estimate
from vkernel.plots import base
from vkernel.plots.base import DOT, Curves, Names, Notes, Several, Size, Values, array, ink, lines, styled

__all__ = ["end_images", "fraction_maps", "image_row", "image_rows", "law_grid", "law_panels", "line_maps"]
__all__ += ["member_laws", "pairs", "path_maps", "plane_laws", "scatter_pairs", "single_laws", "thumbnails"]
__all__ += ["variance_panels"]
Limits = tuple[float, float] | None
Paths = Sequence[np.ndarray]
Laws = Mapping[str, Several]
FLOOR = 3e-3  # densities below this are drawn at the bottom
HATCHES = ("", "/////", r"\\\\\\", "....")  # of bands
Row = tuple[str, np.ndarray, Names]  # label, images, titles


def _pictures(images: Values, limits: Limits = None) -> np.ndarray:
    """Return ``(k, H, W)`` or ``(k, H, W, 3)`` in ``[0, 1]``, grey where not finite. Without ``limits`` the scale is
    that of ``[0, 1]``, ``[-1, 1]`` or ``[0, 255]`` which the values fit, else from the least to the greatest."""
    a = array(images)
    good = a.ndim == 3 or (a.ndim == 4 and a.shape[1] in (1, 3))
    require(good, f"Images must be (k, H, W), (k, 1, H, W) or (k, 3, H, W); got shape {a.shape}.")
    require(len(a) > 0, "There is no image to show.")
    if a.ndim == 4:
        a = a[:, 0] if a.shape[1] == 1 else np.moveaxis(a, 1, -1)
    if limits is None:
        finite = a[np.isfinite(a)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
        limits = next((u for u in ((0.0, 1.0), (-1.0, 1.0), (0.0, 255.0)) if u[0] <= low and high <= u[1]), (low, high))
    return np.where(np.isfinite(a), np.clip((a - limits[0]) / ((limits[1] - limits[0]) or 1.0), 0, 1), 0.5)


def thumbnails(images: Values, limits: Limits = None, side: int = 128) -> list[str]:
    """Return each image as a ``data:`` address of a PNG, scaled down to at most ``side`` pixels."""
    from PIL import Image

    found = []
    for pixels in np.round(255 * _pictures(images, limits)).astype(np.uint8):
        picture, held = Image.fromarray(pixels), io.BytesIO()
        picture.thumbnail((side, side))
        picture.save(held, "PNG")
        found.append("data:image/png;base64," + base64.b64encode(held.getvalue()).decode())
    return found


@styled
def image_row(images: Values, titles: Names = (), per_row: int = 10, limits: Limits = None) -> Figure:
    """Draw images side by side, ``per_row`` in a row, each with its title."""
    return _rows([("", _pictures(images, limits), titles)], per_row)


@styled
def image_rows(rows: Mapping[str, Values], limits: Limits = None) -> Figure:
    """Draw rows of images with their labels, all on one scale: column by column what belongs together."""
    require(rows, "There is no image to show.")
    every = _pictures(np.concatenate([array(images) for images in rows.values()]), limits)
    counts = [len(array(images)) for images in rows.values()]
    parts = np.split(every, np.cumsum(counts)[:-1])
    return _rows([(label, part, ()) for label, part in zip(rows, parts, strict=True)], max(counts))


@styled
def pairs(
    above: Values, below: Values, titles: Names = (), per_row: int = 8, limits: Limits = None, labels: Names = ("", "")
) -> Figure:
    """Draw pairs of images, one above the other, in rows with ``labels``; a title belongs to the pair."""
    a, b = array(above), array(below)
    require(a.shape == b.shape, f"Pairs need as many images on both sides; got shapes {a.shape} and {b.shape}.")
    one, two = np.split(_pictures(np.concatenate([a, b]), limits), 2)
    return _rows([(labels[0], one, titles), (labels[1], two, ())], per_row)


def _rows(given: list[Row], per_row: int) -> Figure:
    """Draw rows of images with a label each, and titles above the images that have some, ``per_row`` at a time. All
    images of a row share one axis, since one axis for each image would be slow."""
    require(per_row > 0, f"per_row must be 1 or more, not {per_row}.")
    count, tall = len(given[0][1]), given[0][1].shape[1] / given[0][1].shape[2]
    parts = [slice(start, start + per_row) for start in range(0, count, per_row)]
    rows = [(label, images[part], titles[part]) for part in parts for label, images, titles in given]
    columns = min(per_row, count)
    size, side = min(1.15, 14 / columns), 0.2 + 0.3 * any(r[0] for r in rows) + 0.085 * max(len(r[0]) for r in rows)
    extra = max((t.count("\n") for _, _, titles in rows for t in titles), default=0)
    heights = [tall + (0.25 + 0.15 * extra if len(titles) else 0.04) for _, _, titles in rows]  # in image widths
    figure = Figure(figsize=(max(1.06 * size * columns, 1.5) + side, 1.06 * size * sum(heights) + 0.15))
    axes = figure.subplots(len(rows), squeeze=False, height_ratios=heights)[:, 0]
    for (label, images, titles), ax, height in zip(rows, axes, heights, strict=True):
        for j, (image, title) in enumerate(zip_longest(images, titles[: len(images)], fillvalue="")):
            ax.imshow(image, cmap="gray", vmin=0, vmax=1, extent=(1.06 * j, 1.06 * j + 1, 0, tall))
            if title:
                ax.text(1.06 * j + 0.5, tall + 0.03, title, size=9, ha="center", va="bottom")
        ax.set(xlim=(0, 1.06 * columns - 0.06), ylim=(0, height), anchor="W", xticks=[], yticks=[])
        _bare(ax)
        ax.set_ylabel(label, rotation=0, ha="right", va="center")
    return figure


def _bare(ax: Axes) -> None:
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)


@styled
def end_images(
    nearest: Values, rows: Values, labels: Names, groups: Sequence[tuple[str, int]], other: Values, notes: Notes
) -> Figure:
    """Draw the ends of runs ``rows (row, column, *image)`` beside the nearest training images ``(row, *image)``, in
    ``groups`` of columns with names and sizes; a frame marks runs that end at an ``other`` training image."""
    images, marked = array(rows), array(other) > 0
    count, columns = images.shape[:2]
    require(marked.shape == (count, columns), "There must be one mark per image.")
    require(sum(size for _, size in groups) == columns, "The groups must cover the columns.")
    both = np.concatenate([array(nearest)[:, None], images], 1)
    shown = iter(_pictures(both.reshape(-1, *images.shape[2:]), (-1, 1)))
    figure, ((ax,),) = base.axes((1.06 * columns + 1.6, 1.25 * count + 0.3))
    places: list[float] = []
    for name, size in (("training", 1), *groups):
        start = places[-1] + 1.3 if places else 0.0  # groups are further apart than images
        places += [start + 1.1 * k for k in range(size)]
        ax.text(start, 1.08, name, va="bottom", size=10)
    for row, column in np.ndindex(count, columns + 1):
        x, y = places[column], -1.35 * row
        ax.imshow(next(shown), cmap="gray", vmin=0, vmax=1, extent=(x, x + 1, y, y + 1))
        ax.text(x + 0.5, y - 0.06, notes[row][column - 1] if column else labels[row], ha="center", va="top", size=8.5)
        if column and marked[row, column - 1]:
            ax.add_patch(Rectangle((x, y), 1, 1, fill=False, color=lines()[1], lw=2.6))
    ax.set(xlim=(-0.05, places[-1] + 1.05), ylim=(-1.35 * (count - 1) - 0.3, 1.35), xticks=[], yticks=[])
    _bare(ax)
    return figure


@styled
def scatter_pairs(points2d: Values, isolated: Values = (), pairs: Values = ()) -> Figure:
    """Draw points in the plane: boundary ``pairs (k, 2)`` of indices joined by lines, ``isolated`` points (a mask or
    indices) ringed."""
    points = array(points2d, 2, "points in the plane")
    require(points.shape[1] == 2, f"Points in the plane are (n, 2); got shape {points.shape}.")
    rings, edges = _indices(isolated, len(points)).reshape(-1), _indices(pairs, len(points)).reshape(-1, 2)
    (figure, ((ax,),)), size = base.axes((5.6, 5.4)), float(np.clip(3000 / max(len(points), 1), 4, 36))
    if len(edges):
        look: dict[str, Any] = {"colors": lines()[1], "lw": 1.4, "alpha": 0.8, "zorder": 1, "label": "boundary pairs"}
        ax.add_collection(LineCollection(list(points[edges]), **look))
    ax.scatter(points[:, 0], points[:, 1], size, color=lines()[0], lw=0, zorder=2, label="training points")
    if len(rings):
        look = {"s": size + 70, "facecolor": "none", "edgecolor": ink(), "lw": 1.3, "zorder": 3}
        ax.scatter(points[rings, 0], points[rings, 1], label="isolated points", **look)
    ax.set(xlabel="x₁ (data unit)", ylabel="x₂ (data unit)")
    ax.set_aspect("equal", adjustable="datalim")
    ax.margins(0.08)
    figure.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def _indices(which: Values, n: int) -> np.ndarray:
    """Convert a mask or a list of indices to indices."""
    chosen = np.asarray(which.detach().cpu() if isinstance(which, Tensor) else which)
    chosen = np.flatnonzero(chosen) if chosen.dtype == bool else chosen.astype(np.int64)
    require(not chosen.size or (chosen.min() >= -n and chosen.max() < n), f"There are {n} points; an index is beyond.")
    return chosen


@styled
def fraction_maps(names: Names, t: Values, x: Values, fraction: Values, points: Values, alpha: Values) -> Figure:
    """Draw maps ``fraction (set, t, x, x)`` in [0, 1] (Figure 1), with ``points (set, n, 2)`` as dots, and
    ``alpha (t,)`` times the points, where the process moves them, as crosses."""
    columns, points = [f"t = {v:g}" for v in array(t, 1, "axes")], array(points, 3, "sets of points")
    return _maps(names, columns, x, fraction, np.stack([points] * len(columns), 1), array(alpha, 1, "axes"))


@styled
def path_maps(names: Names, x: Values, fraction: Values, points: Values, alpha: float, rows: Curves) -> Figure:
    """Draw paths ``(set, step, path, 2)`` in the plane, a row for each name, over maps ``fraction (set, x, x)`` as in
    :func:`fraction_maps`; lines become wider towards the end, a small ring."""
    paths, count = [array(v, 4, "paths") for v in rows.values()], len(rows)
    points = np.stack([array(points, 3, "sets of points")] * count)
    return _maps(list(rows), names, x, [array(fraction)] * count, points, np.full(len(names), alpha), paths)


def _maps(
    rows: Names, columns: Names, x: Values, maps: Values, points: np.ndarray, alpha: np.ndarray, paths: Paths = ()
) -> Figure:
    """Draw ``maps (row, column, x, x)`` and the points of each, perhaps with ``paths (row, column, step, path, 2)``."""
    x, maps, size = array(x, 1, "axes"), array(maps, 4, "maps"), 2.75 if paths else 2.15
    shape = (len(rows), len(columns), len(x), len(x))
    require(maps.shape == shape, f"The maps must have shape {shape}; got {maps.shape}.")
    figure, axes = base.grid([f"{name}\n\nx₂" for name in rows], columns, (size, size), (1.3, 0.8))
    ends = float(1.5 * x[0] - 0.5 * x[1]), float(1.5 * x[-1] - 0.5 * x[-2])
    for (i, j), ax in np.ndenumerate(axes):
        ax.imshow(maps[i, j], extent=ends * 2, origin="lower", vmin=0, vmax=1, alpha=0.82 if paths else 1)
        ax.plot(*points[i, j].T, "o", color=DOT, mec="white", mew=0.8, ms=5, ls="", zorder=3)
        ax.plot(*(alpha[j] * points[i, j]).T, "x", color="white", ms=5, mew=1.2, ls="", path_effects=base.DARK_EDGE)
        if paths:
            for path in paths[i][j].swapaxes(0, 1):
                widths = np.linspace(0.35, 1.25, len(path) - 1)
                segments = list(np.stack([path[:-1], path[1:]], 1))
                for colour, more in (("#14181f", 0.9), ("white", 0.0)):  # white alone is lost on a bright map
                    ax.add_collection(LineCollection(segments, colors=colour, linewidths=widths + more))
            ax.plot(*paths[i][j, -1].T, "o", mfc="none", mec="black", ms=3.6, mew=0.9, ls="", zorder=4)
        ax.set(xlim=ends, ylim=ends, xticks=(-2, 0, 2), yticks=(-2, 0, 2))
        ax.grid(visible=False)
    look: dict[str, Any] = {"shrink": 0.7, "aspect": 30, "ticks": (0, 0.25, 0.5, 0.75, 1)}
    base.colour_bar(figure, axes[0, 0].images[0], axes, "noise share of the target,  tr C / (tr C + |s|²)", **look)
    moved = ["moved points αy", "ends of paths"] if paths else ["moved points αy at t"]
    base.legend_below(figure, axes[0, 0].lines, ["training points y", *moved])
    return figure


@styled
def line_maps(
    maps: Curves, *, at: Values, strips: Sequence[Values], profiles: Sequence[int], titles: Names, floor: float = 1e-6
) -> Figure:
    """Draw sigma² tr C / d over (λ, t) on the line between two images, without noise (``clean`` at ``lam_clean``) and
    with it (``noisy`` and ``noisy_se`` at ``lam``). Above are the images ``strips`` at the positions ``at``, below the
    ``profiles`` along λ at times of these indices, with 95 % bands. The colour scale ends at ``floor``."""
    t, at, *places = (array(v, 1, "axes") for v in (maps["t"], at, maps["lam_clean"], maps["lam"]))
    values, error = [array(v, 2, "maps") for v in (maps["clean"], maps["noisy"])], array(maps["noisy_se"], 2, "maps")
    shapes = [(len(t), len(p)) for p in (*places, places[1])]
    require([v.shape for v in (*values, error)] == shapes, "The maps must have shape (t, λ).")
    top, width = 10.0 ** np.ceil(np.log10(max(float(v.max()) for v in values))), 0.82 * float(np.diff(at).min())
    figure, axes = base.axes((10.6, 8.2), 3, 2, sharex=True, sharey="row", height_ratios=(0.3, 1, 0.72))
    for side, (where, value, strip) in enumerate(zip(places, values, strips, strict=True)):
        above, ax, below = axes[:, side]
        for place, picture in zip(at, _pictures(strip, (-1, 1)), strict=True):
            extent = (place - width / 2, place + width / 2, 0, 1)
            above.imshow(picture, extent=extent, aspect="auto", cmap="gray", vmin=0, vmax=1)
        above.set(xlim=(where[0], where[-1]), ylim=(0, 1), yticks=[], title=titles[side])
        above.set_aspect(width, adjustable="box", anchor="S")
        above.tick_params(length=0, labelbottom=False)
        _bare(above)
        look: dict[str, Any] = {"norm": LogNorm(floor, top, clip=False), "shading": "nearest", "rasterized": True}
        mesh = ax.pcolormesh(where, t, np.maximum(value, floor / 2), **look)
        base.log_axis(ax, "y", t)
        ax.set_ylim(t.min(), t.max())
        ax.grid(visible=False)
        for index, colour in zip(profiles, (lines()[k] for k in (0, 2, 3, 1)), strict=False):
            ax.axhline(t[index], color="white", lw=0.7, ls=(0, (2, 3)))
            ends = {"color": colour, "mec": ax.get_facecolor(), "ms": 7, "clip_on": False, "zorder": 5}
            ax.plot([where[0], where[-1]], [t[index]] * 2, "o", ls="", **ends)
            se = torch.tensor(error[index] if side else np.zeros(len(where)))
            curve = Estimate[Tensor].of_error(torch.tensor(value[index]), se).stack().clamp_min(floor / 1e3).numpy()
            base.band(below, where, curve, colour, f"t = {t[index]:.2g}")
        below.set(yscale="log", ylim=(floor, top), xlim=(where[0], where[-1]), xlabel="position λ on the line")
        for panel, end in ((ax, 0), (ax, 1), (below, 0), (below, 1)):
            panel.axvline(end, color="white" if panel is ax else ink(), lw=0.9, ls=":")
    axes[1, 0].set_ylabel("noise level t")
    axes[2, 0].set_ylabel("σ² tr C / d")
    base.legend_below(figure, axes[2, 0])
    base.colour_bar(figure, mesh, axes[1, :], "σ² tr C / d", extend="min", aspect=28)
    return figure


@styled
def plane_laws(
    laws: Values,
    points: Values,
    *,
    rows: Names,
    columns: Names,
    limit: float,
    top: float,
    notes: Notes = (),
    what: str = "density, mean over members",
) -> Figure:
    """Draw densities ``laws (row, column, x₁, x₂)`` on the square of half side ``limit``; ``points (column, n, 2)`` are
    rings. The colour, that of ``what``, is the square root of the density, to show small ones beside peaks, and
    saturates at ``top``."""
    laws, points = array(laws, 4, "laws"), array(points, 3, "sets of points")
    shape = (len(rows), len(columns))
    require(laws.shape[:2] == shape, f"There must be {shape} laws; got {laws.shape[:2]}.")
    require(len(points) == len(columns), f"There must be {len(columns)} sets of points; got {len(points)}.")
    figure, axes = base.grid([f"{name}\n\nx₂" for name in rows], columns, (2.45, 2.4), (1.5, 0.7))
    norm, extent = PowerNorm(0.5, 0, top, clip=True), (-limit, limit, -limit, limit)
    for (i, j), ax in np.ndenumerate(axes):
        image = ax.imshow(laws[i, j].T, extent=extent, origin="lower", norm=norm)
        rings = ax.plot(*points[j].T, "o", color="none", mec=DOT, mew=1.4, ms=8, ls="")
        ax.set(xlim=(-limit, limit), ylim=(-limit, limit), xticks=(-1, 0, 1), yticks=(-1, 0, 1))
        ax.grid(visible=False)
        if notes:
            ax.text(0.04, 0.955, notes[i][j], transform=ax.transAxes, va="top", size=9, color="white")
    ticks = top * np.array([0, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0])
    look: dict[str, Any] = {"shrink": 0.6, "aspect": 32, "extend": "max", "ticks": ticks}
    bar = base.colour_bar(figure, image, axes, what, **look)
    bar.ax.set_yticklabels([f"{v:.2g}" for v in ticks])
    bar.ax.minorticks_off()
    base.legend_below(figure, rings, ["training points, at αy"])
    return figure


@styled
def law_grid(
    edges: Values,
    laws: Laws,
    *,
    exact: Values,
    noised: Several,
    rows: Names,
    columns: Names,
    notes: Notes,
    gap: Size,
    band: str = "quartiles",
) -> Figure:
    """Draw densities of several laws, each with the ends of a ``band``, ``(row, column, bin)``, that of the ``exact``
    score ``(row, bin)``, and that of ``noised`` data, a grid and densities ``(row, point)``."""
    x, fine = array(edges, 1, "edges"), array(noised[0], 1, "grid")
    smooth, bare = (np.maximum(array(v, 2, "densities"), FLOOR / 2) for v in (noised[1], exact))
    figure, axes = base.grid([f"{row}\ndensity" for row in rows], columns, (2.2, 2.0), (0.9, 1.0), "x")
    for (i, j), ax in np.ndenumerate(axes):
        for low, high in (gap, (-gap[1], -gap[0])):
            ax.axvspan(low, high, color=lines()[4], alpha=0.12, lw=0)
        for k, (colour, (name, law)) in enumerate(zip(lines(), laws.items(), strict=False)):
            mean, lower, upper = (np.maximum(array(v)[i, j], FLOOR / 2) for v in law)
            ends = np.append(lower, lower[-1]), np.append(upper, upper[-1])
            # the first band is filled, others are hatched: two filled ones would make a third colour where they overlap
            look: dict[str, Any] = {"edgecolor": colour, "facecolor": "none", "hatch": HATCHES[k % len(HATCHES)]}
            look = look if k else {"color": colour, "alpha": 0.28}
            wide = any((array(law[2]) > array(law[1])).flat)
            if wide:
                ax.fill_between(x, *ends, step="post", lw=0, label=f"{name}, {band}", **look)
            ax.stairs(mean, x, color=colour, lw=1.5, baseline=None, label=f"{name}, mean" if wide else name)
        ax.plot(fine, smooth[i], color=ink(), lw=1, ls=":", label="noised data p(x|eps)")
        ax.stairs(bare[i], x, color=ink(), alpha=0.45, lw=1.0, baseline=None, label="exact score, same steps")
        ax.set(yscale="log", ylim=(FLOOR, 150), xlim=(x[0], x[-1]), xticks=(-1, 0, 1))
        ax.minorticks_off()
        ax.grid(visible=False, axis="x")
        ax.text(0.5, 0.97, notes[i][j], transform=ax.transAxes, ha="center", va="top", size=9)
    base.legend_below(figure, axes[0, 0], ncols=min(2 * len(laws) + 2, len(columns) + 1))
    return figure


@styled
def single_laws(laws: Curves, edges: Values, points: Values, gap: Size) -> Figure:
    """Draw laws of single models, ``laws[title] (model, bin)``, each as a line of discs whose area is the share of
    samples in a bin. Training ``points`` are dashed lines; ``gap`` and its mirror image are shaded."""
    x = array(edges, 1, "edges")
    centres, models = (x[1:] + x[:-1]) / 2, max(len(array(law, 2, "laws")) for law in laws.values())
    figure, (axes,) = base.axes((9.6, 0.9 + 0.15 * models), 1, len(laws), sharex=True, sharey=True, squeeze=False)
    for ax, colour, (title, law) in zip(axes, lines(), laws.items(), strict=False):
        for low, high in (gap, (-gap[1], -gap[0])):
            ax.axvspan(low, high, color=lines()[4], alpha=0.12, lw=0)
        for place in array(points, 1, "points"):
            ax.axvline(place, color=ink(), lw=0.8, ls=base.DASHED)
        row, column = np.nonzero(array(law))
        ax.scatter(centres[column], row + 1, 90 * array(law)[row, column], colour, lw=0)
        ax.set(title=title, xlabel="x", xlim=(x[0], x[-1]), ylim=(models + 0.8, 0.2), xticks=(-1, 0, 1))
        ax.grid(visible=False)
    axes[0].set(ylabel="model", yticks=range(1, models + 1, max(1, models // 6)))
    return figure


@styled
def member_laws(edges: Values, laws: Curves, shares: Curves, gap: Size, average: str) -> Figure:
    """Draw the laws of single models ``laws[name] (model, bin)``, a row of a map for each, with their ``average`` over
    all models in the last row; and the ``shares[name] (M,)`` in the gaps of all models, from largest to smallest."""
    x, shown = array(edges, 1, "edges"), {name: array(law, 2, "laws") for name, law in laws.items()}
    figure, (axes,) = base.axes((11.4, 5.4), 1, len(shown) + 1, width_ratios=[1.0] * len(shown) + [1.25])
    norm = LogNorm(1e-2, max(float(law.max()) for law in shown.values()), clip=False)
    for ax, (name, law) in zip(axes, shown.items(), strict=False):
        count = len(law) - 1
        for rows, low in ((law[:-1], 1.5), (law[-1:], 0.0)):
            mesh = ax.pcolormesh(x, low + np.arange(len(rows) + 1), np.maximum(rows, 1e-3), norm=norm, rasterized=True)
        for end in (-gap[1], -gap[0], *gap):
            ax.axvline(end, color="white", lw=0.8, ls=":")
        ticks = [k for k in range(1, count + 1) if k == 1 or k % 10 == 0]
        ax.set(title=name, xlabel="x", xticks=(-1, 0, 1), xlim=(x[0], x[-1]), ylim=(count + 1.5, 0))
        ax.set_yticks([0.5, *(k + 1.0 for k in ticks)], [average, *map(str, ticks)])
        ax.grid(visible=False)
    axes[0].set_ylabel("model")
    base.colour_bar(figure, mesh, axes[:-1], "density", extend="min", location="bottom", aspect=45, shrink=0.7)
    for k, (name, values) in enumerate(shares.items()):
        ordered = np.sort(array(values, 1, "shares"))[::-1]
        seen = ordered[ordered > 0]
        at, none = (np.arange(len(seen)) + 0.5) / len(ordered), 1 - len(seen) / len(ordered)
        axes[-1].plot(at, seen, color=lines()[k], label=f"{name.split(',')[0]}: none in {100 * none:.0f} % of models")
    axes[-1].axvline(0.5, color=ink(), lw=1, ls=base.DASHED, label="median model")
    axes[-1].set(yscale="log", ylim=(None, 1), xlim=(0, 1), title="Each model")
    axes[-1].set(xlabel="share of models, in falling order", ylabel="share of samples in the gaps")
    axes[-1].legend(loc="upper right")
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
def law_panels(
    laws: Curves, columns: Names, edges: Values, points: Curves, gap: Limits = None, notes: Notes = ()
) -> Figure:
    """Draw shares of samples in bins along the line, ``laws[row] (column, bin)``, on one logarithmic axis. Training
    ``points[row]`` are marked below; ``gap`` and its mirror image are shaded."""
    require(len(laws) > 0, "There is no law to draw.")
    edges, shares = array(edges, 1, "edges"), [array(law, 2, "laws") for law in laws.values()]
    floor = 0.75 * min(float(v[v > 0].min()) for v in shares)
    top = 2.0 ** max((note.count("\n") + 1 for row in notes for note in row), default=0)  # room for the notes
    rows = [f"{name}\n\nshare in a bin".lstrip() for name in laws]
    figure, axes = base.grid(rows, columns, (2.6, 2.4), (0.8, 0.6), "x")
    for (i, j), ax in np.ndenumerate(axes):
        for low, high in (gap, (-gap[1], -gap[0])) if gap else ():
            ax.axvspan(low, high, color=lines()[4], alpha=0.16, lw=0)
        look = {"baseline": floor / 10, "color": lines()[j % len(lines())], "alpha": 0.88, "lw": 0}
        ax.stairs(shares[i][j], edges, fill=True, **look)
        place = array(points[list(laws)[i]], 1, "points")
        ax.plot(place, np.full(place.shape, floor), "o", color=DOT, mec="white", mew=0.7, ms=5, ls="")
        ax.set(yscale="log", ylim=(0.6 * floor, top), xlim=(edges[0], edges[-1]), xticks=(-1, 0, 1))
        ax.minorticks_off()
        ax.grid(visible=False, axis="x")
        if notes:
            ax.text(0.5, 0.965, notes[i][j], transform=ax.transAxes, ha="center", va="top", size=9.5)
    return figure
