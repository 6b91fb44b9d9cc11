"""Training points themselves: images in rows and pairs, points in the plane."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from vkernel.core.errors import require
from vkernel.plots.base import array, ink, lines, styled

__all__ = ["as_pictures", "image_row", "pairs", "sample_rows", "scatter_pairs", "sources"]


def as_pictures(images: Any, limits: tuple[float, float] | None) -> np.ndarray:
    """``(k, H, W)`` or ``(k, H, W, 3)`` in [0, 1]. Without limits: [-1, 1], [0, 1] or [0, 255] if values fit, else
    from least to greatest."""
    a = array(images)
    require(
        a.ndim == 3 or (a.ndim == 4 and a.shape[1] in (1, 3)),
        f"Images must be (k, H, W), (k, 1, H, W) or (k, 3, H, W); got shape {a.shape}.",
    )
    if a.ndim == 4:
        a = a[:, 0] if a.shape[1] == 1 else np.moveaxis(a, 1, -1)
    if limits is None:
        low, high = (float(np.nanmin(a)), float(np.nanmax(a))) if a.size else (0.0, 1.0)
        usual = ((0.0, 1.0), (-1.0, 1.0), (0.0, 255.0))
        limits = next((u for u in usual if u[0] <= low and high <= u[1]), (low, high))
    return np.clip((a - limits[0]) / ((limits[1] - limits[0]) or 1.0), 0, 1)


def _picture(ax: Axes, image: np.ndarray | None, title: str = "") -> None:
    ax.set_axis_off()
    if image is None:
        return
    ax.imshow(image, cmap="gray", vmin=0, vmax=1)
    ax.set_title(title, size=9)


@styled
def image_row(
    images: Any, titles: Sequence[str] = (), per_row: int = 10, limits: tuple[float, float] | None = None
) -> Figure:
    """Images side by side, ``per_row`` in a row, each with its title."""
    shown = as_pictures(images, limits)
    k = len(shown)
    require(k > 0, "There is no image to show.")
    columns = min(k, per_row)
    rows = math.ceil(k / columns)
    figure = Figure(figsize=(max(1.15 * columns, 2.0), (1.2 + 0.3 * bool(titles)) * rows))
    axes = figure.subplots(rows, columns, squeeze=False)
    for j, ax in enumerate(axes.flat):
        _picture(ax, shown[j] if j < k else None, titles[j] if j < min(k, len(titles)) else "")
    return figure


@styled
def pairs(
    images_a: Any,
    images_b: Any,
    titles: Sequence[str] = (),
    per_row: int = 8,
    limits: tuple[float, float] | None = None,
) -> Figure:
    """Pairs of images, one above the other; a title belongs to the pair."""
    a, b = array(images_a), array(images_b)
    require(a.shape == b.shape, f"Pairs need as many images on both sides; got shapes {a.shape} and {b.shape}.")
    both = as_pictures(np.concatenate([a, b]), limits)
    k = len(a)
    require(k > 0, "There is no pair to show.")
    columns = min(k, per_row)
    bands = math.ceil(k / columns)
    figure = Figure(figsize=(max(1.25 * columns, 2.0), (2.4 + 0.35 * bool(titles)) * bands))
    for band, part in enumerate(figure.subfigures(bands, 1, squeeze=False).flat):
        axes = part.subplots(2, columns, squeeze=False)
        for column in range(columns):
            j = band * columns + column
            _picture(axes[0, column], both[j] if j < k else None, titles[j] if j < min(k, len(titles)) else "")
            _picture(axes[1, column], both[k + j] if j < k else None)
    return figure


@styled
def scatter_pairs(points2d: Any, isolated: Any = (), pairs: Any = ()) -> Figure:
    """Points in the plane: pairs that share a boundary as lines, isolated points ringed."""
    points = array(points2d, 2, "points in the plane")
    require(points.shape[1] == 2, f"Points in the plane are (n, 2); got shape {points.shape}.")
    ring = _chosen(isolated, len(points)).reshape(-1)
    edges = _chosen(pairs, len(points)).reshape(-1, 2)
    blue, orange, *_ = lines()
    figure = Figure(figsize=(5.6, 5.4))
    ax = figure.subplots()
    if len(edges):
        ax.add_collection(LineCollection(list(points[edges]), colors=orange, lw=1.4, alpha=0.8, zorder=1))
        ax.plot([], [], color=orange, lw=1.4, label="boundary pairs")
    size = float(np.clip(3000 / max(len(points), 1), 4, 36))
    ax.scatter(points[:, 0], points[:, 1], s=size, color=blue, lw=0, zorder=2, label="training points")
    if len(ring):
        ax.scatter(
            points[ring, 0],
            points[ring, 1],
            s=size + 70,
            facecolor="none",
            edgecolor=ink(),
            lw=1.3,
            zorder=3,
            label="isolated points",
        )
    ax.set(xlabel="x₁ (data unit)", ylabel="x₂ (data unit)")
    ax.set_aspect("equal", adjustable="datalim")
    ax.margins(0.08)
    figure.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def _chosen(which: Any, n: int) -> np.ndarray:
    """Indices from a mask or a list of indices."""
    which = np.asarray(which.detach().cpu() if hasattr(which, "detach") else which)
    which = np.flatnonzero(which) if which.dtype == bool else which.astype(np.int64)
    require(not which.size or (which.min() >= -n and which.max() < n), f"There are {n} points; an index is beyond.")
    return which


@styled
def sources(
    samples: Any, sources: Any, titles: Sequence[str] = (), limits: tuple[float, float] | None = None, per_row: int = 8
) -> Figure:
    """Samples, each above the training image that it copies; a title belongs to the pair."""
    a, b = array(samples), array(sources)
    require(a.shape == b.shape, f"Each sample needs its source; got shapes {a.shape} and {b.shape}.")
    require(per_row > 0, f"per_row must be 1 or more, not {per_row}.")
    above, below = np.split(_pictures([a, b], limits), 2)
    rows: list[tuple[str, np.ndarray, Sequence[str]]] = []
    for start in range(0, len(a), per_row):
        part = slice(start, start + per_row)
        rows += [("sample", above[part], titles[part]), ("training image", below[part], ())]
    return _rows(rows, min(per_row, len(a)))


@styled
def sample_rows(rows: Mapping[str, Any], limits: tuple[float, float] | None = None) -> Figure:
    """A row of images ``(k, *shape)`` for each label; a column is one start of the sampler, the same for all rows."""
    images = [array(v) for v in rows.values()]
    require(images, "There is no row of images to show.")
    shapes = {v.shape for v in images}
    require(len(shapes) == 1, f"Rows of images need one shape, as columns belong together; got {sorted(shapes)}.")
    parts = np.split(_pictures(images, limits), len(images))
    return _rows([(str(label), part, ()) for label, part in zip(rows, parts, strict=True)], len(images[0]))


def _pictures(images: list[np.ndarray], limits: tuple[float, float] | None) -> np.ndarray:
    """All in [0, 1] on one scale; a value that is not finite is grey."""
    whole = np.concatenate(images)
    require(whole.shape[0] > 0, "There is no image to show.")
    finite = np.isfinite(whole)
    shown = as_pictures(np.where(finite, whole, np.nan), limits if finite.any() or limits else (0.0, 1.0))
    return np.nan_to_num(shown, nan=0.5)


def _rows(rows: list[tuple[str, np.ndarray, Sequence[str]]], columns: int) -> Figure:
    """Rows of pictures with a label each, and titles above the pictures that have some."""
    size, wide = min(1.15, 14 / columns), 0.5 + 0.085 * max(len(label) for label, _, _ in rows)
    tall = rows[0][1].shape[1] / rows[0][1].shape[2]
    room = [tall + (0.25 if len(titles) else 0.04) for _, _, titles in rows]  # in widths of a picture
    figure = Figure(figsize=(max(1.06 * size * columns, 1.5) + wide, 1.06 * size * sum(room) + 0.15))
    axes = figure.subplots(len(rows), squeeze=False, height_ratios=room).flat
    for (label, images, titles), ax, height in zip(rows, axes, room, strict=True):  # an axis a picture would take long
        for j, image in enumerate(images):
            ax.imshow(image, cmap="gray", vmin=0, vmax=1, extent=(1.06 * j, 1.06 * j + 1, 0, tall))
            if j < len(titles):
                ax.text(1.06 * j + 0.5, tall + 0.03, titles[j], size=9, ha="center", va="bottom")
        ax.set(xticks=[], yticks=[], xlim=(0, 1.06 * columns - 0.06), ylim=(0, height), anchor="W")
        ax.grid(visible=False)
        ax.spines[:].set_visible(False)
        ax.set_ylabel(label, rotation=0, ha="right", va="center")
    return figure
