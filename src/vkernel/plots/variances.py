"""The variance of the learned score: predicted and measured, its sources, and how it grows as training goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from vkernel.plots.base import array, ink, lines, plain_ticks, styled

__all__ = ["part_curves", "ratio_panels", "share_curves", "variance_panels"]

DOTTED = (0, (1, 1.6))


@styled
def variance_panels(
    ratios: Sequence[float],
    times: Sequence[float],
    x: Any,
    names: Sequence[str],
    predicted: Any,
    second: Any,
    measured: Any,
    density: Any,
) -> Figure:
    """Variance along x: P/F as columns, times as rows, one colour for each objective of ``names``.

    ``predicted`` and ``second`` are ``(name, ratio, time, x)``: a line and a dotted line. ``measured`` is
    ``(name, ratio, 3, time, x)``: value, low and high end. ``density (time, x)`` is the grey hill.
    """
    x, predicted, second = array(x, 1, "places"), array(predicted, 4, "predictions"), array(second, 4, "predictions")
    measured, density = array(measured, 5, "measurements"), array(density, 2, "densities")
    figure = Figure(figsize=(2.55 * len(ratios) + 0.9, 2.15 * len(times) + 0.75))
    axes = figure.subplots(len(times), len(ratios), sharex=True, sharey="row", squeeze=False)
    for row, t in enumerate(times):
        seen = np.concatenate([predicted[:, :, row].ravel(), measured[:, :, 0, row].ravel()])
        low, high = float(seen.min()) / 2.5, 2.5 * float(max(seen.max(), second[:, :, row].max()))
        for column, ax in enumerate(axes[row]):
            ax.set(yscale="log", ylim=(low, high), xlim=(x[0], x[-1]), xticks=(-1, 0, 1))
            hill = density[row] / density[row].max()
            ax.fill_between(x, 0, 0.3 * hill, color=ink(), alpha=0.1, lw=0, transform=ax.get_xaxis_transform())
            for k in range(len(names)):
                _, bottom, top = measured[k, column, :, row]
                ax.fill_between(x, bottom, top, color=lines()[k], alpha=0.3, lw=0)
                ax.plot(x, second[k, column, row], color=lines()[k], lw=1.1, ls=DOTTED)
                ax.plot(x, predicted[k, column, row], color=lines()[k], lw=1.5)
            ax.minorticks_off()
            if row == 0:
                ax.set_title(f"P/F = {_fraction(ratios[column])}")
        axes[row, 0].set_ylabel(f"t = {t:g}\n\nσ² tr Cov")
    for ax in axes[-1]:
        ax.set_xlabel("x")
    _variance_legend(figure, names)
    return figure


def _variance_legend(figure: Figure, names: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    handles: list[Any] = []
    for k, name in enumerate(names):
        handles.append(Line2D([], [], color=lines()[k], lw=1.8, label=f"{name} predicted"))
        handles.append(Patch(color=lines()[k], alpha=0.3, lw=0, label=f"{name} measured"))
    handles.append(Line2D([], [], color=ink(), lw=1.1, ls=DOTTED, label="leading order"))
    handles.append(Patch(color=ink(), alpha=0.12, lw=0, label="p(x|t)"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def _fraction(value: float) -> str:
    return {0.125: "⅛", 0.25: "¼", 0.5: "½"}.get(value, f"{value:g}")


@styled
def ratio_panels(
    ratios: Sequence[float], curves: Mapping[str, Mapping[str, Any]], expected: tuple[float, float]
) -> Figure:
    """Measured over predicted against P/F: a panel for each objective, a curve ``(3, ratio)`` for each form."""
    figure = Figure(figsize=(9.4, 3.8))
    axes = figure.subplots(1, len(curves), sharex=True, sharey=True, squeeze=False)[0]
    place = array(ratios, 1, "P/F")
    for ax, (name, forms) in zip(axes, curves.items(), strict=True):
        ax.axhspan(
            *expected,
            color=lines()[4],
            alpha=0.2,
            lw=0,
            label=f"expected at P/F ≥ 10: {expected[0]:g} to {expected[1]:g}",
        )
        ax.axhline(1, color=ink(), lw=0.9, ls=":")
        for k, (form, curve) in enumerate(forms.items()):
            _points(ax, place * 1.07 ** (2 * k - 1), curve, lines()[(0, 3)[k % 2]], form, "os"[k % 2], joined=True)
        ax.set(xscale="log", yscale="log", xlabel="draws per feature, P/F", title=name)
        ax.set_xticks(place, [_fraction(r) for r in ratios])
        ax.minorticks_off()
    span = np.concatenate([array(c).ravel() for forms in curves.values() for c in forms.values()])
    axes[0].set_yticks(*plain_ticks(np.array([min(span.min(), 0.5), max(span.max(), 2.0)])))
    axes[0].set_ylabel("measured / predicted variance")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(handles))
    return figure


def _points(
    ax: Axes, x: Any, curve: Any, colour: str, label: str | None, marker: str = "o", *, joined: bool = False
) -> None:
    """Values with intervals, ``(3, len(x))``."""
    x, (value, low, high) = array(x, 1, "places"), array(curve, 2, "value, low, high")
    error = np.abs(np.stack([value - low, high - value]))
    style = "-" if joined else ""
    ax.errorbar(x, value, error, color=colour, marker=marker, ms=5, ls=style, lw=1.3, capsize=3, label=label)


@styled
def share_curves(ratios: Sequence[float], names: Sequence[str], shares: Any, predicted: Any) -> Figure:
    """Shares of target noise, ``(name, ratio, 3)``, and predictions of the same shape, against F/P.

    Left: the first name as bars that are split in two. Right: the others as points over predicted lines.
    """
    shares, predicted = array(shares, 3, "shares"), array(predicted, 3, "predictions")
    figure = Figure(figsize=(10.4, 4.0))
    left, right = figure.subplots(1, 2)
    place = np.arange(len(ratios), dtype=float)
    value, low, high = np.clip(shares[0].T, 0, 1)
    left.bar(place, value, 0.68, color=lines()[0], alpha=0.85, lw=0)
    left.bar(place, 1 - value, 0.68, value, color=lines()[1], alpha=0.75, lw=0)
    left.errorbar(place, value, np.abs([value - low, high - value]), color=ink(), ls="", lw=1.4, capsize=4)
    for k, v in enumerate(value):
        left.text(place[k], 0.025, f"{100 * v:.0f} %", ha="center", color=left.get_facecolor(), size=10, weight="bold")
    left.axhline(0.5, color=ink(), lw=0.9, ls=":")
    left.set(title=f"Two sources, {names[0]}", ylabel="share of the variance", ylim=(0, 1.0))
    left.grid(visible=False, axis="x")
    for k in range(1, len(names)):
        colour = lines()[(2, 3, 4)[(k - 1) % 3]]
        shift = 0.08 * (k - len(names) / 2)
        curve, (middle, bottom, top) = np.clip(shares[k].T, 0, 1), np.clip(predicted[k].T, 0, 1)
        right.fill_between(place, bottom, top, color=colour, alpha=0.18, lw=0)
        right.plot(place, middle, color=colour, lw=1.6)
        _points(right, place + shift, curve, colour, names[k], "os^"[(k - 1) % 3])
    right.axhline(0.5, color=ink(), lw=0.9, ls=":")
    right.set(title="Target noise, by time", ylabel="share of target noise", ylim=(0, 1.03))
    for ax in (left, right):
        ax.set_xticks(place, [_fraction(r) for r in ratios])
        ax.set_xlabel("features per draw, F/P")
    handles = [Patch(color=lines()[1], alpha=0.75, lw=0), Patch(color=lines()[0], alpha=0.85, lw=0)]
    left.legend(
        handles, ["inputs and misfit", "target noise"], loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2
    )
    right.plot([], [], color=ink(), lw=1.6, label="predicted")
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=len(names))
    return figure


@styled
def part_curves(
    taus: Any,
    predicted: Mapping[str, Any],
    places: Any,
    measured: Mapping[str, Any],
    gaps: Mapping[str, Any],
    crossing: float,
) -> Figure:
    """Left: parts of a variance against training time, lines ``(τ,)`` and points ``(3, place)``; the last is the whole.

    Right: ``gaps``, the mass in the gaps ``(3, place)`` of each objective. ``crossing`` is marked where it is finite.
    """
    taus, places = array(taus, 1, "times"), array(places, 1, "times")
    figure = Figure(figsize=(10.8, 4.3))
    left, right = figure.subplots(1, 2, width_ratios=(1.35, 1))
    colours = (lines()[0], lines()[3], lines()[2], ink())
    for k, (name, line) in enumerate(predicted.items()):
        whole = k == len(predicted) - 1
        left.plot(
            taus, array(line, 1, "predictions"), color=colours[k], lw=1.2 if whole else 1.8, ls="--" if whole else "-"
        )
        _points(left, places, measured[name], colours[k], name, "os^D"[k % 4])
    top = max(float(array(line).max()) for line in predicted.values())
    low = min(float(array(curve)[1].min()) for curve in measured.values())
    left.set(xscale="log", yscale="log", ylim=(low / 3, 4 * top), xlim=(taus[0] / 1.3, taus[-1] * 1.3))
    left.set(title="What two trainings disagree about", ylabel="σ² tr Cov")
    if np.isfinite(crossing):
        left.axvline(crossing, color=ink(), lw=1, ls=":")
        note = f"target noise\novertakes at τ = {crossing:.2g}"
        left.annotate(note, (crossing, 0.97), (7, 0), ("data", "axes fraction"), "offset points", va="top", size=9.5)
    left.plot([], [], color=ink(), lw=1.8, label="predicted")
    for k, (name, curve) in enumerate(gaps.items()):
        _points(right, places * 1.1 ** (2 * k - 1), curve, lines()[k], name, "os"[k % 2], joined=True)
    right.set(xscale="log", title="Samples between the training points", ylabel="P(.25 < |x| < .75)", ylim=(0, None))
    for ax in (left, right):
        ax.set_xlabel("training time τ")
        ax.minorticks_off()
    left.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=len(predicted) + 1, columnspacing=1.0, handlelength=1.3
    )
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=len(gaps))
    return figure
