"""What trained ensembles sample in one dimension: average laws with bands, and shares in the gaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from vkernel.plots.base import array, ink, lines, styled

__all__ = ["gap_curves", "law_grid"]

FLOOR = 3e-3  # densities below this are drawn at the bottom


@styled
def law_grid(
    edges: Any,
    laws: Mapping[str, tuple[Any, Any, Any]],
    *,
    exact: Any,
    noised: tuple[Any, Any],
    rows: Sequence[str],
    columns: Sequence[str],
    notes: Sequence[Sequence[str]],
    gap: tuple[float, float],
) -> Figure:
    """Densities ``(row, column, bin)`` of each law with lower and upper quartiles, on one logarithmic axis.

    ``exact (row, bin)`` is the exact score's sample, ``noised`` a grid and the densities ``(row, point)`` on it.
    """
    x = array(edges, 1, "edges")
    figure = Figure(figsize=(2.2 * len(columns) + 0.9, 2.0 * len(rows) + 1.0))
    axes = figure.subplots(len(rows), len(columns), sharex=True, sharey=True, squeeze=False)
    fine, smooth, bare = array(noised[0]), array(noised[1]), array(exact, 2)
    handles: dict[str, Any] = {}
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            ax = axes[i][j]
            for low, high in (gap, (-gap[1], -gap[0])):
                ax.axvspan(low, high, color=lines()[4], alpha=0.12, lw=0)
            handles["exact score, same steps"] = ax.stairs(
                np.maximum(bare[i], FLOOR / 2), x, color=ink(), alpha=0.45, lw=1.0, baseline=None
            )
            (line,) = ax.plot(fine, np.maximum(smooth[i], FLOOR / 2), color=ink(), lw=1, ls=":")
            handles["noised data p(x|eps)"] = line
            for k, (name, (mean, lower, upper)) in enumerate(laws.items()):
                a, b = (np.maximum(array(v)[i, j], FLOOR / 2) for v in (lower, upper))
                ax.fill_between(
                    x, np.append(a, a[-1]), np.append(b, b[-1]), step="post", color=lines()[k], alpha=0.25, lw=0
                )
                handles[name] = ax.stairs(
                    np.maximum(array(mean)[i, j], FLOOR / 2), x, color=lines()[k], lw=1.5, baseline=None
                )
            ax.set(yscale="log", ylim=(FLOOR, 150), xlim=(x[0], x[-1]), xticks=(-1, 0, 1))
            ax.minorticks_off()
            ax.grid(visible=False, axis="x")
            ax.text(0.5, 0.97, notes[i][j], transform=ax.transAxes, ha="center", va="top", size=9)
            if i == 0:
                ax.set_title(column)
            if j == 0:
                ax.set_ylabel(f"{row}\ndensity")
            if i == len(rows) - 1:
                ax.set_xlabel("x")
    order = [*laws, "noised data p(x|eps)", "exact score, same steps"]
    words = {"J1": "J1: noisy targets", "J0": "J0: noiseless targets"}
    figure.legend(
        [handles[k] for k in order], [words.get(k, k) for k in order], loc="outside lower center", ncols=len(order)
    )
    return figure


@styled
def gap_curves(
    ratio: Sequence[float], groups: Mapping[str, Any], rows: Sequence[str], exact: Mapping[str, Any]
) -> Figure:
    """Shares in the gaps against F/P: one panel for each row of the estimates, one line style for each group.

    ``groups`` maps words to objectives, each an estimate ``(row, ratio)``; ``exact`` maps the same words to the exact
    score's share in each row.
    """
    figure = Figure(figsize=(3.3 * len(rows) + 0.6, 3.9))
    axes = figure.subplots(1, len(rows), sharey=True, squeeze=False)[0]
    styles = ("--", "-", "-.")
    for i, (ax, row) in enumerate(zip(axes, rows, strict=True)):
        for g, (words, objectives) in enumerate(groups.items()):
            for k, (name, e) in enumerate(objectives.items()):
                value, low, high = (array(v)[i] for v in (e.value, e.low, e.high))
                shift = 1 + 0.03 * (2 * k - 1)
                ax.errorbar(
                    np.asarray(ratio) * shift,
                    value,
                    [value - np.maximum(low, 0), high - value],
                    color=lines()[k],
                    ls=styles[g],
                    marker="os"[k],
                    mfc="none" if g == 0 else lines()[k],
                    capsize=2,
                    lw=1.4,
                    label=f"{name}, {words}",
                )
            ax.axhline(
                array(exact[words])[i], color=ink(), ls=":", lw=1.2 if g == 0 else 0.8, alpha=0.7 if g == 0 else 0.4
            )
        ax.set(xscale="log", xlabel="features / draws, F/P", title=row, ylim=(0, None), xticks=ratio)
        ax.set_xticklabels([{0.25: "¼", 0.5: "½"}.get(r, f"{r:g}") for r in ratio])
        ax.minorticks_off()
    axes[0].set_ylabel("share of samples in the gaps")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return figure
