"""Training points and samples: images in rows, in pairs and at the ends of runs; points in the plane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from vkernel.core.errors import require
from vkernel.plots.base import Values, array, ink, lines, styled

Limits = tuple[float, float] | None
Row = tuple[str, np.ndarray, Sequence[str]]  # label, images, titles


def as_pictures(images: Values, limits: Limits = None) -> np.ndarray:
    """Return ``(k, H, W)`` or ``(k, H, W, 3)`` in [0, 1]; values that are not finite become grey.

    Without ``limits`` the scale is [0, 1], [-1, 1] or [0, 255] if the values fit, else from the least to the greatest.
    """
    a = array(images)
    good = a.ndim == 3 or (a.ndim == 4 and a.shape[1] in (1, 3))
    require(good, f"Images must be (k, H, W), (k, 1, H, W) or (k, 3, H, W); got shape {a.shape}.")
    require(len(a) > 0, "There is no image to show.")
    if a.ndim == 4:
        a = a[:, 0] if a.shape[1] == 1 else np.moveaxis(a, 1, -1)
    if limits is None:
        finite = a[np.isfinite(a)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
        usual = ((0.0, 1.0), (-1.0, 1.0), (0.0, 255.0))
        limits = next((u for u in usual if u[0] <= low and high <= u[1]), (low, high))
    scaled = np.clip((a - limits[0]) / ((limits[1] - limits[0]) or 1.0), 0, 1)
    return np.where(np.isfinite(a), scaled, 0.5)


@styled
def image_row(images: Values, titles: Sequence[str] = (), per_row: int = 10, limits: Limits = None) -> Figure:
    """Draw images side by side, ``per_row`` in a row, each with its title."""
    shown = as_pictures(images, limits)
    return _rows([("", shown[part], titles[part]) for part in _parts(len(shown), per_row)], min(per_row, len(shown)))


@styled
def pairs(
    images_a: Values, images_b: Values, titles: Sequence[str] = (), per_row: int = 8, limits: Limits = None
) -> Figure:
    """Draw pairs of images, one above the other; a title belongs to the pair."""
    return _pairs(images_a, images_b, titles, per_row, limits, ("", ""))


@styled
def sources(
    samples: Values, sources: Values, titles: Sequence[str] = (), limits: Limits = None, per_row: int = 8
) -> Figure:
    """Draw samples, each above the training image that it copies; a title belongs to the pair."""
    return _pairs(samples, sources, titles, per_row, limits, ("sample", "training image"))


@styled
def sample_rows(rows: Mapping[str, Values], limits: Limits = None) -> Figure:
    """Draw a row of images ``(k, *shape)`` for each label; a column is one start of the sampler, equal for all rows."""
    images = [array(v) for v in rows.values()]
    require(images, "There is no row of images to show.")
    shapes = {v.shape for v in images}
    require(len(shapes) == 1, f"Rows of images need one shape, as columns belong together; got {sorted(shapes)}.")
    parts = np.split(as_pictures(np.concatenate(images), limits), len(images))
    return _rows([(str(label), part, ()) for label, part in zip(rows, parts, strict=True)], len(images[0]))


def _parts(count: int, per_row: int) -> list[slice]:
    require(per_row > 0, f"per_row must be 1 or more, not {per_row}.")
    return [slice(start, start + per_row) for start in range(0, count, per_row)]


def _pairs(above: Values, below: Values, titles: Sequence[str], per_row: int, limits: Limits, labels: tuple[str, str]
           ) -> Figure:  # fmt: skip
    a, b = array(above), array(below)
    require(a.shape == b.shape, f"Pairs need as many images on both sides; got shapes {a.shape} and {b.shape}.")
    tops, bottoms = np.split(as_pictures(np.concatenate([a, b]), limits), 2)
    rows: list[Row] = []
    for part in _parts(len(a), per_row):
        rows += [(labels[0], tops[part], titles[part]), (labels[1], bottoms[part], ())]
    return _rows(rows, min(per_row, len(a)))


def _rows(rows: list[Row], columns: int) -> Figure:
    """Draw rows of images with a label each, and titles above the images that have some.

    All images of a row share one axis, since one axis for each image would be slow.
    """
    size, side = min(1.15, 14 / columns), 0.2 + 0.3 * any(r[0] for r in rows) + 0.085 * max(len(r[0]) for r in rows)
    tall = rows[0][1].shape[1] / rows[0][1].shape[2]
    extra = max((t.count("\n") for _, _, titles in rows for t in titles), default=0)
    heights = [tall + (0.25 + 0.15 * extra if len(titles) else 0.04) for _, _, titles in rows]  # in image widths
    figure = Figure(figsize=(max(1.06 * size * columns, 1.5) + side, 1.06 * size * sum(heights) + 0.15))
    axes = figure.subplots(len(rows), squeeze=False, height_ratios=heights)[:, 0]
    for (label, images, titles), ax, height in zip(rows, axes, heights, strict=True):
        for j, (image, title) in enumerate(zip_longest(images, titles[: len(images)], fillvalue="")):
            ax.imshow(image, cmap="gray", vmin=0, vmax=1, extent=(1.06 * j, 1.06 * j + 1, 0, tall))
            if title:
                ax.text(1.06 * j + 0.5, tall + 0.03, title, size=9, ha="center", va="bottom")
        ax.set(xlim=(0, 1.06 * columns - 0.06), ylim=(0, height), anchor="W")
        _bare(ax)
        ax.set_ylabel(label, rotation=0, ha="right", va="center")
    return figure


def _bare(ax: Axes) -> None:
    ax.set(xticks=[], yticks=[])
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)


@styled
def end_images(
    nearest: Values,
    rows: Values,
    labels: Sequence[str],
    groups: Sequence[tuple[str, int]],
    other: Values,
    notes: Sequence[Sequence[str]],
) -> Figure:
    """Draw the ends of runs as images: one row per start, one column per run after the nearest training image.

    ``nearest (row, *image)``, ``rows (row, column, *image)``; ``groups`` are names and sizes of groups of columns;
    ``other (row, column)`` marks with a frame runs that end at another training image; ``notes`` are below each image.
    """
    images, marked = array(rows), array(other) > 0
    count, columns = images.shape[:2]
    require(marked.shape == (count, columns), "There must be one mark per image.")
    require(sum(size for _, size in groups) == columns, "The groups must cover the columns.")
    both = np.concatenate([array(nearest)[:, None], images], 1)
    shown = iter(as_pictures(both.reshape(-1, *images.shape[2:]), (-1, 1)))
    figure, step = Figure(figsize=(1.06 * columns + 1.6, 1.25 * count + 0.3)), 1.35
    ax = figure.subplots()
    places: list[float] = []
    for name, size in (("training", 1), *groups):
        start = places[-1] + 1.3 if places else 0.0  # groups are further apart than images
        places += [start + 1.1 * k for k in range(size)]
        ax.text(start, 1.08, name, va="bottom", size=10)
    for row in range(count):
        for column, x in enumerate(places):
            extent = (x, x + 1, -step * row, 1 - step * row)
            ax.imshow(next(shown), cmap="gray", vmin=0, vmax=1, extent=extent)
            label = notes[row][column - 1] if column else labels[row]
            ax.text(x + 0.5, extent[2] - 0.06, label, ha="center", va="top", size=8.5)
            if column and marked[row, column - 1]:
                look: dict[str, Any] = {"fill": False, "color": lines()[1], "lw": 2.6}
                ax.add_patch(Rectangle((extent[0], extent[2]), 1, 1, **look))
    ax.set(xlim=(-0.05, places[-1] + 1.05), ylim=(-step * (count - 1) - 0.3, 1.35))
    _bare(ax)
    return figure


@styled
def scatter_pairs(points2d: Values, isolated: Values = (), pairs: Values = ()) -> Figure:
    """Draw points in the plane: boundary pairs joined by lines, isolated points ringed.

    ``isolated`` is a mask or holds indices; ``pairs (k, 2)`` holds indices.
    """
    points = array(points2d, 2, "points in the plane")
    require(points.shape[1] == 2, f"Points in the plane are (n, 2); got shape {points.shape}.")
    rings, edges = _indices(isolated, len(points)).reshape(-1), _indices(pairs, len(points)).reshape(-1, 2)
    blue, orange, *_ = lines()
    figure = Figure(figsize=(5.6, 5.4))
    ax = figure.subplots()
    if len(edges):
        segments = LineCollection(list(points[edges]), colors=orange, lw=1.4, alpha=0.8, zorder=1)
        segments.set_label("boundary pairs")
        ax.add_collection(segments)
    size = float(np.clip(3000 / max(len(points), 1), 4, 36))
    ax.scatter(points[:, 0], points[:, 1], size, color=blue, lw=0, zorder=2, label="training points")
    if len(rings):
        look: dict[str, Any] = {"s": size + 70, "facecolor": "none", "edgecolor": ink(), "lw": 1.3, "zorder": 3}
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
