"""What a study shows: a value against a factor with intervals, or a phase diagram over two."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from vkernel.core.errors import require
from vkernel.plots.base import array, ink, lines, plain_ticks, styled

__all__ = ["phase_diagram", "value_curves"]


@styled
def value_curves(
    x: Any,
    mean: Any,
    low: Any,
    high: Any,
    *,
    names: tuple[str, str],
    lines_by: str = "",
    labels: list[str] | None = None,
    title: str = "",
    log: bool = False,
) -> Figure:
    """A mean with its interval against a factor, ``(lines, x)``; ``names`` are those of the axes."""
    mean, low, high = (np.atleast_2d(array(v)) for v in (mean, low, high))
    values = list(x)
    numeric = all(isinstance(v, int | float) and np.isfinite(v) for v in values)
    at = np.asarray(values, dtype=float) if numeric else np.arange(len(values), dtype=float)
    order = np.argsort(at)
    figure = Figure(figsize=(6.6, 4.6))
    ax = figure.subplots()
    words = any(isinstance(v, str) for v in values)  # what has no order is not joined by lines
    far = numeric and len(at) > 2 and (at > 0).all() and at.max() >= 8 * at.min()
    for k in range(len(mean)):
        shade = lines()[k % len(lines())]
        aside = k - (len(mean) - 1) / 2  # so that error bars do not lie on each other
        places = at[order] * (1 + 0.03 * aside) if far else at[order] + 0.015 * aside * (np.ptp(at) or 1.0)
        error = [mean[k, order] - low[k, order], high[k, order] - mean[k, order]]
        ax.errorbar(
            places,
            mean[k, order],
            error,
            color=shade,
            marker="osD^v*"[k % 6],
            linestyle="none" if words else "-",
            capsize=2.5,
            label=labels[k] if labels else None,
        )
    if far:
        ax.set_xscale("log")
    if not numeric:
        ax.set_xticks(at, [_tick(v) for v in values])
        ax.set_xlim(-0.4, len(at) - 0.6)
    elif far:
        ax.set_xticks(*(plain_ticks(at) if len(at) > 8 else (sorted(at), [f"{v:g}" for v in sorted(at)])))
        ax.minorticks_off()
    if log:
        ax.set_yscale("log")
    elif (low >= 0).all() or mean.min() >= 0:
        ax.set_ylim(0, None)
    ax.set(xlabel=names[0], ylabel=names[1], title=title)
    if labels and len(mean) > 1:
        figure.legend(title=lines_by or None, loc="outside lower center", ncols=min(len(mean), 4))
    return figure


@styled
def phase_diagram(x: Any, y: Any, mean: Any, se: Any, *, names: tuple[str, str, str], title: str = "") -> Figure:
    """A mean over two factors, ``(y, x)``, as a map with its numbers; ``names`` are those of x, y and the value."""
    mean, se = array(mean, 2, "means"), array(se, 2, "standard errors")
    require(
        mean.shape == (len(y), len(x)), f"The map has shape {mean.shape}; its axes have {len(y)} and {len(x)} values."
    )
    figure = Figure(figsize=(1.1 * len(x) + 2.4, 0.72 * len(y) + 1.6))
    ax = figure.subplots()
    image = ax.imshow(mean, origin="lower", aspect="auto", vmin=0)
    top = np.nanmax(mean) if np.isfinite(mean).any() else 1.0
    for i in range(len(y)):
        for j in range(len(x)):
            if np.isfinite(mean[i, j]):
                dark = mean[i, j] > 0.6 * top
                ax.text(
                    j, i, f"{mean[i, j]:.2g}\n± {se[i, j]:.1g}", ha="center", va="center", size=8.5,
                    color="#14181f" if dark else "white",
                )  # fmt: skip
    ax.set_xticks(range(len(x)), [_tick(v) for v in x])
    ax.set_yticks(range(len(y)), [_tick(v) for v in y])
    ax.grid(visible=False)
    ax.set(xlabel=names[0], ylabel=names[1], title=title)
    bar = figure.colorbar(image, ax=ax, label=names[2])
    bar.outline.set_edgecolor(ink())
    return figure


def _tick(value: Any) -> str:
    return "∞" if value == np.inf else f"{value:g}" if isinstance(value, float) else str(value)
