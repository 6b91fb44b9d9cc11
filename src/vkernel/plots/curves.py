"""Curves and histograms: noise against t, distances, ratios."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vkernel.core.errors import require
from vkernel.plots.base import array, ink, lines, plain_ticks, styled

__all__ = ["distances", "noise_profile", "ratio_curve"]


@styled
def noise_profile(
    t: Any,
    rho: Any,
    rho_se: Any,
    ess: Any,
    mmse: Any,
    entropy: Any,
    collapse_time: float | None = None,
    window: tuple[float, float] | None = None,
    points: int | None = None,
) -> Figure:
    """What a training set does to its target at each noise level: four panels over t, on a log axis.

    ``rho`` with 95 % band from ``rho_se``; the effective number of points; the mean squared error of the best
    denoiser; the posterior's entropy. ``window`` shades the times where the target is noisy, ``collapse_time`` marks
    where one training point takes over, and ``points`` is n, the most that can compete.
    """
    t, rho, rho_se, ess, mmse, entropy = (array(v, 1, "curves") for v in (t, rho, rho_se, ess, mmse, entropy))
    require(len({len(v) for v in (t, rho, rho_se, ess, mmse, entropy)}) == 1, "Every curve needs one value per time.")
    figure = Figure(figsize=(9.6, 6.4))
    axes = figure.subplots(2, 2, sharex=True)
    blue, orange, green, purple = lines()[:4]
    half = 1.96 * rho_se
    axes[0, 0].fill_between(t, rho - half, rho + half, color=blue, alpha=0.25, lw=0, label="95 % interval")
    axes[0, 0].plot(t, rho, color=blue, label="ρ(t)")
    axes[0, 0].set(title="Share of the target that is noise", ylabel="ρ = E tr C / (E tr C + E|s|²)")
    axes[0, 0].set_ylim(0, 1.05 * max(0.05, float(np.nanmax(rho + half))))
    axes[0, 1].plot(t, ess, color=green)
    axes[0, 1].set(title="Training points that compete", ylabel="effective number 1/Σ rᵢ²", yscale="log")
    axes[1, 0].plot(t, mmse, color=orange)
    axes[1, 0].set(title="Error of the best denoiser", ylabel="E|x₀ − m|²/d  (data unit²)", ylim=(0, None))
    axes[1, 1].plot(t, entropy, color=purple)
    axes[1, 1].set(title="Doubt about the training point", ylabel="entropy (nats)", ylim=(0, None))
    if points is not None:
        _level(axes[0, 1], points, f"n = {points}")
        _level(axes[1, 1], math.log(points), "log n")
    for ax in axes.flat:
        ax.set_xscale("log")
        ax.set_xlim(t.min(), t.max())
        if window is not None:
            ax.axvspan(*window, color=lines()[4], alpha=0.14, lw=0, label="noisy window")
        if collapse_time is not None:
            ax.axvline(collapse_time, color=ink(), lw=1.2, ls=(0, (4, 3)), label="collapse time")
    for ax in axes[1]:
        ax.set_xlabel("noise level t")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return figure


def _level(ax: Axes, value: float, label: str) -> None:
    ax.axhline(value, color=ink(), lw=0.9, ls=":")
    ax.annotate(label, (0, value), (6, -3), ("axes fraction", "data"), "offset points", va="top", size=9)


@styled
def distances(nn: Any, unit: str = "data unit") -> Figure:
    """How far each training point is from its nearest neighbour; copies (distance 0) are counted in the title."""
    nn = array(nn).ravel()
    require(nn.size > 0 and bool(np.isfinite(nn).all()), "A histogram of distances needs finite numbers, at least one.")
    apart = nn[nn > 0]
    figure = Figure(figsize=(6.4, 3.6))
    ax = figure.subplots()
    title = f"{nn.size:,} points" + (f", of which {nn.size - apart.size:,} are copies" if apart.size < nn.size else "")
    if apart.size:
        low, high, middle = apart.min(), apart.max(), float(np.median(apart))
        count = int(np.clip(2 * apart.size ** (1 / 3), 8, 60))
        log = high > 30 * low
        low, high = (low, high) if high > low * (1 + 1e-9) else (0.9 * low, 1.1 * high)
        edges = np.geomspace(low, high, count + 1) if log else np.linspace(low, high, count + 1)
        edges[0], edges[-1] = min(edges[0], apart.min()), max(edges[-1], apart.max())
        ax.hist(apart, list(edges), color=lines()[0], alpha=0.85, edgecolor=ax.get_facecolor(), lw=0.5)
        ax.axvline(middle, color=lines()[1], lw=1.6, label=f"median {middle:.3g}")
        ax.set_xscale("log" if log else "linear")
        ax.legend()
    ax.grid(visible=False, axis="x")
    ax.set(xlabel=f"distance to the nearest other point ({unit})", ylabel="training points", title=title)
    return figure


@styled
def ratio_curve(t: Any, curves: dict[str, Any], ratios: Any, low: float, high: float, chosen: float) -> Figure:
    """A ratio against t with its 95 % interval, and at the ``chosen`` time every ratio that the interval rests on.

    ``curves`` maps a label to ``(3, len(t))``: value, low end and high end of the interval; values that are not
    finite are left out. ``ratios`` are the single ratios at ``chosen``; ``low`` and ``high`` the interval there.
    """
    t, ratios = array(t, 1, "times"), array(ratios, 1, "ratios")
    figure = Figure(figsize=(9.6, 3.9))
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    for (label, curve), colour in zip(curves.items(), (lines()[0], lines()[1]), strict=False):
        middle, bottom, top = array(curve, 2, "value, low, high")
        left.fill_between(t, bottom, top, color=colour, alpha=0.25, lw=0)
        left.plot(t, middle, marker="o", color=colour, label=label)
    left.axhline(1, color=ink(), lw=0.9, ls=":")
    left.axvline(chosen, color=ink(), lw=1.1, ls=(0, (4, 3)), label=f"t = {chosen:.3g}, where ρ is greatest")
    left.set(xscale="log", yscale="log", xlabel="noise level t", ylabel="tr C at the midpoint / tr C at the ends")
    left.set(ylim=(0.5, min(1e4, left.get_ylim()[1])), title="Mean ratio over pairs, 95 % interval")
    left.set_xticks(*plain_ticks(t))
    left.minorticks_off()
    left.legend()
    edges = np.geomspace(min(ratios.min(), 0.97), max(ratios.max(), 1.03), 31)
    right.hist(ratios, list(edges), color=lines()[0], alpha=0.85, edgecolor=right.get_facecolor(), lw=0.5)
    right.axvline(1, color=ink(), lw=0.9, ls=":")
    right.axvspan(low, high, color=lines()[4], alpha=0.45, lw=0, label="95 % interval of the mean")
    right.set(xscale="log", xlabel=f"ratio at t = {chosen:.3g}, with noise", ylabel="pairs")
    right.set_title(f"Each of the {len(ratios)} pairs")
    right.set_xticks(*plain_ticks(edges))
    right.minorticks_off()
    right.grid(visible=False, axis="x")
    right.yaxis.set_major_locator(MaxNLocator(integer=True))
    right.set_ylim(top=1.25 * right.get_ylim()[1])
    right.legend(loc="upper right")
    return figure
