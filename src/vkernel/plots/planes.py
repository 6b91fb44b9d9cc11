"""Laws in the plane: how often a sampler ends where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from vkernel.core.errors import require
from vkernel.plots.base import array, styled

__all__ = ["plane_laws"]

DOT = "#ff5a36"


@styled
def plane_laws(
    laws: Any,
    points: Any,
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    limit: float,
    top: float,
    notes: Any = None,
) -> Figure:
    """Densities ``laws (row, column, x₁, x₂)`` on the square of half side ``limit``, one colour scale for all.

    The scale goes by the square root of the density, so that thin mass is seen beside peaks, and ends at ``top``; what
    is above is drawn as if it were there. ``points (column, n, 2)`` are marked; ``notes (row, column)`` are words in
    the corners.
    """
    laws, points = array(laws, 4, "laws"), array(points, 3, "sets of points")
    shape = (len(rows), len(columns))
    require(laws.shape[:2] == shape, f"There must be {shape} laws; got {laws.shape[:2]}.")
    require(len(points) == len(columns), f"There must be {len(columns)} sets of points; got {len(points)}.")
    figure = Figure(figsize=(2.45 * len(columns) + 1.5, 2.4 * len(rows) + 0.7))
    axes = figure.subplots(*shape, sharex=True, sharey=True, squeeze=False)
    norm, extent = PowerNorm(0.5, 0, top, clip=True), (-limit, limit, -limit, limit)
    for i, name in enumerate(rows):
        for j, ax in enumerate(axes[i]):
            image = ax.imshow(laws[i, j].T, extent=extent, origin="lower", norm=norm)
            marks = ax.plot(*points[j].T, "o", color="none", mec=DOT, mew=1.4, ms=8, ls="")[0]
            ax.set(xlim=(-limit, limit), ylim=(-limit, limit), xticks=(-1, 0, 1), yticks=(-1, 0, 1))
            ax.grid(visible=False)
            if notes is not None:
                ax.text(0.04, 0.955, notes[i][j], transform=ax.transAxes, va="top", size=9, color="white")
        axes[i, 0].set_ylabel(f"{name}\n\nx₂")
    for ax, title in zip(axes[0], columns, strict=True):
        ax.set_title(title)
    for ax in axes[-1]:
        ax.set_xlabel("x₁")
    ticks = top * np.array([0, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0])
    bar = figure.colorbar(image, ax=axes, shrink=0.6, aspect=32, pad=0.02, ticks=ticks, extend="max")
    bar.ax.set_yticklabels([f"{v:.2g}" for v in ticks])
    bar.ax.minorticks_off()
    bar.set_label("density, mean over members")
    bar.outline.set_visible(False)
    figure.legend([marks], ["training points, at αy"], loc="outside lower center")
    return figure
