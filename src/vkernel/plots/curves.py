"""Curves with intervals against a noise level, a factor of a study or a setting of a sampler; histograms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vkernel.core.errors import require
from vkernel.plots import base
from vkernel.plots.base import Values, array, ink, lines, styled

KAPPA = "strength κ of the noise"


@dataclass(frozen=True)
class Panel:
    """Hold curves with intervals against one quantity, and the labels of their axes.

    ``curves`` maps a label to ``(3, len(x))``: value, low end and high end. ``expected`` maps labels of curves to
    positions and values of a line in the same colour; values ``(3, k)`` are drawn with a band. ``levels`` are dotted
    horizontal lines or, for pairs, shaded ranges; ``marks`` are dotted vertical lines. ``log`` names the logarithmic
    axes. With ``even`` the positions are equally spaced and labelled by their values. In the order of the curves,
    ``colours`` are indices of line colours (6 is the colour of text), ``styles`` line styles, and ``markers`` those of
    bands (default: circles, if there are few places). ``top`` is the end of a linear y axis.
    """

    x: Values
    curves: Mapping[str, Values]
    xlabel: str
    ylabel: str
    title: str = ""
    log: Literal["", "x", "y", "xy"] = ""
    even: bool = False
    kind: Literal["bars", "band"] = "bars"
    expected: Mapping[str, tuple[Values, Values]] = field(default_factory=dict)
    levels: Mapping[str, float | tuple[float, float]] = field(default_factory=dict)
    marks: Mapping[str, float] = field(default_factory=dict)
    top: float | None = None
    colours: Sequence[int] = range(6)
    styles: Sequence[base.LineStyle] = ("-",)
    markers: str = ""

    def draw(self, ax: Axes) -> None:
        """Draw the panel on an axis."""
        x = array(self.x, 1, "positions")
        places = np.arange(len(x), dtype=float) if self.even else x
        few, palette = len(x) <= 8, (*lines(), ink())
        bands = self.markers or ("o" if few else " ")
        ax.set(xlabel=self.xlabel, ylabel=self.ylabel, title=self.title, yscale="log" if "y" in self.log else "linear")
        for k, (label, curve) in enumerate(self.curves.items()):
            colour, ls = palette[self.colours[k % len(self.colours)]], self.styles[k % len(self.styles)]
            if label in self.expected:
                at, value = (array(v) for v in self.expected[label])
                base.band(ax, at, value if value.ndim == 2 else [value] * 3, colour, alpha=0.18)
            if self.kind == "band":
                base.band(ax, places, curve, colour, label, ls, bands[k % len(bands)])
                continue
            aside = few * (k - (len(self.curves) - 1) / 2)  # error bars must not cover each other
            shifted = places * (1 + 0.03 * aside) if "x" in self.log else places + 0.015 * aside * (np.ptp(places) or 1)
            base.error_bars(ax, shifted, curve, colour, label, base.MARKERS[k % 6], ls)
        if self.expected:
            ax.plot([], [], color=ink(), label="predicted")
        for label, height in self.levels.items():
            if isinstance(height, tuple):
                ax.axhspan(*height, color=lines()[4], alpha=0.2, lw=0, label=label)
            else:
                base.level(ax, height, label)
        for label, place in self.marks.items():
            ax.axvline(place, color=ink(), lw=1, ls=":", label=label)
        if "x" in self.log:
            base.log_axis(ax, "x", x)
        if self.even or (few and self.kind == "bars"):
            ax.set_xticks(places, [base.number(v) for v in x])
            ax.minorticks_off()
        self._limit(ax)

    def _limit(self, ax: Axes) -> None:
        """Set the y axis so that it holds every value and level, and intervals up to a factor ten beyond."""
        every = np.concatenate([array(curve).reshape(3, -1) for curve in self.curves.values()], 1)
        values = every[0][np.isfinite(every[0]) & (every[0] > 0)]
        if "y" not in self.log:
            ax.set_ylim(np.fmin.reduce(every[0], initial=0.0), self.top)  # a curve may be all NaN
        elif not values.size:
            ax.text(0.5, 0.5, "no value above zero", transform=ax.transAxes, ha="center", va="center")
        else:
            levels = [end for height in self.levels.values() for end in np.atleast_1d(height)]
            low = min(max(np.nanmin(every[:2]), values.min() / 10), *levels, math.inf) / 1.5
            high = max(min(np.nanmax(every), values.max() * 10), *levels, 0) * 1.5
            ax.set_ylim(low, high)
            if high < 50 * low:  # fewer than two powers of ten would be ticks
                base.log_axis(ax, "y", np.array([low, high]))


@styled
def curve_panels(*panels: Panel, share: bool = False) -> Figure:
    """Draw panels side by side, with a legend below each; ``share`` makes one y axis and one legend for all."""
    figure = Figure(figsize=({1: 6.6, 2: 9.6}.get(len(panels), 3.8 * len(panels)), 4.2))
    axes = figure.subplots(1, len(panels), sharey=share, squeeze=False)[0]
    for ax, panel in zip(axes, panels, strict=True):
        panel.draw(ax)
        handles, labels = ax.get_legend_handles_labels()
        if share and ax is not axes[0]:
            ax.set_ylabel("")
        elif share:
            base.legend_below(figure, handles, labels, min(4, len(handles)))
        elif labels:
            ncols = 1 if max(map(len, labels)) > 25 else min(len(labels), 3)
            ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=ncols)
    return figure


@styled
def noise_profile(
    curves: Mapping[str, Values],
    collapse_time: float | None = None,
    window: tuple[float, float] | None = None,
    points: int | None = None,
) -> Figure:
    """Draw the statistics of the training target against t: noise fraction, effective points, MMSE, entropy.

    ``curves`` are those of a :class:`~vkernel.reports.profile.Profile`, of which t, noise_fraction, noise_fraction_se
    (drawn as a 95 % band), ess, mmse and entropy are used. ``window`` shades the times at which the target is noisy,
    ``collapse_time`` is marked, and ``points``, the number n of training points, bounds the effective number.
    """
    names = ("t", "noise_fraction", "noise_fraction_se", "ess", "mmse", "entropy")
    t, rho, rho_se, ess, mmse, entropy = every = [array(curves[name], 1, "curves") for name in names]
    require(len({len(v) for v in every}) == 1, "Every curve needs one value per time.")
    figure = Figure(figsize=(9.6, 6.4))
    axes = figure.subplots(2, 2, sharex=True)
    (a, b), (c, d) = axes
    panels = (
        (a, rho, "linear", "Noise fraction of the target", "ρ = E tr C / (E tr C + E|s|²)"),
        (c, mmse, "linear", "Error of the ideal denoiser", "E|x₀ − m|²/d  (data unit²)"),
        (b, ess, "log", "Effective number of training points", "1/Σ rᵢ²"),
        (d, entropy, "linear", "Entropy of the posterior", "entropy (nats)"),
    )
    for (ax, curve, scale, title, ylabel), colour in zip(panels, lines(), strict=False):
        ax.plot(t, curve, color=colour, label="ρ(t)" if ax is a else "")
        ax.set(title=title, ylabel=ylabel, yscale=scale)
        ax.set_ylim(bottom=0 if scale == "linear" else None)
    half = 1.96 * rho_se
    a.fill_between(t, rho - half, rho + half, color=lines()[0], alpha=0.25, lw=0, label="95 % interval")
    a.set_ylim(0, 1.05 * max(0.05, float(np.nanmax(rho + half))))
    for ax, value, label in ((b, points, f"n = {points}"), (d, math.log(points or 1), "log n")) if points else ():
        base.level(ax, value)
        ax.annotate(label, (0, value), (6, -3), ("axes fraction", "data"), "offset points", va="top", size=9)
    for ax in axes.flat:
        ax.set(xscale="log", xlim=(t.min(), t.max()))
        if window is not None:
            ax.axvspan(*window, color=lines()[4], alpha=0.14, lw=0, label="noisy window")
        if collapse_time is not None:
            ax.axvline(collapse_time, color=ink(), lw=1.2, ls=base.DASHED, label="collapse time")
    for ax in axes[1]:
        ax.set_xlabel("noise level t")
    base.legend_below(figure, *a.get_legend_handles_labels())
    return figure


@styled
def distances(nn: Values, unit: str = "data unit") -> Figure:
    """Draw a histogram of the distances to the nearest neighbour; copies (distance 0) are counted in the title."""
    nn = array(nn).ravel()
    require(nn.size > 0 and bool(np.isfinite(nn).all()), "A histogram of distances needs finite numbers, at least one.")
    apart = nn[nn > 0]
    figure = Figure(figsize=(6.4, 3.6))
    ax = figure.subplots()
    title = f"{nn.size:,} points" + (f", of which {nn.size - apart.size:,} are copies" if apart.size < nn.size else "")
    ax.set(xlabel=f"distance to the nearest other point ({unit})", ylabel="training points", title=title)
    if apart.size:
        low, high = float(apart.min()), float(apart.max())
        _histogram(ax, apart, int(np.clip(2 * apart.size ** (1 / 3), 8, 60)), low, high, log=high > 30 * low)
        ax.axvline(float(np.median(apart)), color=lines()[1], lw=1.6, label=f"median {np.median(apart):.3g}")
        ax.legend()
    return figure


def _histogram(ax: Axes, values: np.ndarray, bins: int, low: float, high: float, log: bool) -> None:
    low, high = (low, high) if high > low * (1 + 1e-9) else (0.9 * low, 1.1 * high)
    edges = np.geomspace(low, high, bins + 1) if log else np.linspace(low, high, bins + 1)
    edges[0], edges[-1] = min(edges[0], values.min()), max(edges[-1], values.max())  # rounding must lose none
    ax.hist(values, list(edges), color=lines()[0], alpha=0.85, edgecolor=ax.get_facecolor(), lw=0.5)
    ax.set_xscale("log" if log else "linear")
    ax.grid(visible=False, axis="x")


@styled
def ratio_curve(
    t: Values, curves: Mapping[str, Values], ratios: Values, low: float, high: float, chosen: float
) -> Figure:
    """Draw a ratio against t with its 95 % interval, and every single ratio at the ``chosen`` time.

    ``curves`` maps a label to ``(3, len(t))``: value, low end and high end; NaN is left out. ``ratios`` are the single
    ratios at ``chosen``, and ``low`` and ``high`` the ends of the interval there.
    """
    t, ratios = array(t, 1, "times"), array(ratios, 1, "ratios")
    figure = Figure(figsize=(9.6, 3.9))
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    title, ylabel = "Mean ratio over pairs, 95 % interval", "tr C at the midpoint / tr C at the ends"
    Panel(t, curves, "noise level t", ylabel, title, "xy", kind="band").draw(left)
    left.axvline(chosen, color=ink(), lw=1.1, ls=base.DASHED, label=f"t = {chosen:.3g}, where ρ is greatest")
    base.level(left, 1)
    left.set_ylim(0.5, min(1e4, left.get_ylim()[1]))
    left.legend()
    ends = min(float(ratios.min()), 0.97), max(float(ratios.max()), 1.03)
    _histogram(right, ratios, 30, *ends, log=True)
    right.axvline(1, color=ink(), lw=0.9, ls=":")
    right.axvspan(low, high, color=lines()[4], alpha=0.45, lw=0, label="95 % interval of the mean")
    base.log_axis(right, "x", np.array(ends))
    right.set(xlabel=f"ratio at t = {chosen:.3g}, with noise", ylabel="pairs", title=f"Each of the {len(ratios)} pairs")
    right.yaxis.set_major_locator(MaxNLocator(integer=True))
    right.set_ylim(top=1.25 * right.get_ylim()[1])
    right.legend(loc="upper right")
    return figure


@styled
def value_curves(
    x: Sequence[float | str],
    mean: Values,
    low: Values,
    high: Values,
    *,
    names: tuple[str, str],
    lines_by: str = "",
    labels: Sequence[str] | None = None,
    title: str = "",
    log: bool = False,
) -> Figure:
    """Draw a mean with its interval against a factor, ``(line, x)``; ``names`` are the labels of the axes.

    Values that are not finite numbers are equally spaced; strings, which have no order, are not joined by lines.
    """
    curves = np.stack([np.atleast_2d(array(v)) for v in (mean, low, high)], 1)
    numeric = all(isinstance(v, int | float) and np.isfinite(v) for v in x)
    at = np.asarray([float(v) for v in x]) if numeric else np.arange(len(x), dtype=float)
    order = np.argsort(at)
    wide = numeric and len(at) > 2 and bool((at > 0).all()) and at.max() >= 8 * at.min()
    scale: Literal["", "x", "y", "xy"] = ("xy" if log else "x") if wide else "y" if log else ""
    keyed = {label: curve[:, order] for label, curve in zip(labels or [""], curves, strict=True)}
    style = "" if any(isinstance(v, str) for v in x) else "-"
    figure = Figure(figsize=(6.6, 4.6))
    ax = figure.subplots()
    Panel(at[order], keyed, *names, title, scale, styles=[style]).draw(ax)
    if not numeric:
        ax.set_xticks(at, [_tick(v) for v in x])
        ax.set_xlim(-0.4, len(at) - 0.6)
    elif wide and len(at) > 8:
        base.log_axis(ax, "x", at)
    if len(keyed) > 1:
        figure.legend(title=lines_by or None, loc="outside lower center", ncols=min(len(keyed), 4))
    return figure


@styled
def phase_diagram(
    x: Sequence[float | str],
    y: Sequence[float | str],
    mean: Values,
    se: Values,
    *,
    names: tuple[str, str, str],
    title: str = "",
) -> Figure:
    """Draw a mean over two factors, ``(y, x)``, as a map with its numbers; ``names`` label x, y and the value."""
    mean, se = array(mean, 2, "means"), array(se, 2, "standard errors")
    shape = (len(y), len(x))
    require(mean.shape == shape, f"The map has shape {mean.shape}; its axes have {len(y)} and {len(x)} values.")
    figure = Figure(figsize=(1.1 * len(x) + 2.4, 0.72 * len(y) + 1.6))
    ax = figure.subplots()
    image = ax.imshow(mean, origin="lower", aspect="auto", vmin=0)
    top = np.nanmax(mean) if np.isfinite(mean).any() else 1.0
    for (i, j), value in np.ndenumerate(mean):
        if np.isfinite(value):
            colour = "#14181f" if value > 0.6 * top else "white"
            ax.text(j, i, f"{value:.2g}\n± {se[i, j]:.1g}", ha="center", va="center", size=8.5, color=colour)
    ax.set_xticks(range(len(x)), [_tick(v) for v in x])
    ax.set_yticks(range(len(y)), [_tick(v) for v in y])
    ax.grid(visible=False)
    ax.set(xlabel=names[0], ylabel=names[1], title=title)
    base.colour_bar(figure, image, ax, names[2])
    return figure


def _tick(value: float | str) -> str:
    return "∞" if value == math.inf else f"{value:g}" if isinstance(value, float) else str(value)


def gap_curves(
    kappas: Values,
    gaps: Mapping[str, Values],
    steps: Values,
    coarse: Mapping[str, Values],
    distance: Values,
    floor: float,
) -> Figure:
    """Draw the mass in the gap against κ (left) and the number of steps (middle), and a total variation (right).

    ``gaps`` and ``coarse`` map a label to ``(3, k)``: value, low end and high end. ``distance (3, steps)`` compares
    resampled with Gaussian noise; ``floor`` is the value for two samples of one law.
    """
    mass, count, pair = "P(in the gap)", "uniform steps", {"resampled against Gaussian": distance}
    return curve_panels(
        Panel(kappas, gaps, KAPPA, mass, "Mass in the gap", "y", even=True),
        Panel(steps, coarse, count, mass, "Mass in the gap, by number of steps", "xy"),
        Panel(steps, pair, count, "total variation", "Two kinds of noise", "x", colours=[3], kind="band",
              levels={"two samples of one law": floor}),
    )  # fmt: skip


def share_curve(kappas: Values, shares: Values, distances: Mapping[str, Values]) -> Figure:
    """Draw the share of runs that end at another image against κ, ``(3, κ)``, and distances to training images.

    ``distances`` maps a label to ``(3, κ)``: lower quartile, median, upper quartile.
    """
    median = {label: array(curve, 2, "quartiles")[[1, 0, 2]] for label, curve in distances.items()}
    title, unit = "Distance to training images, quartiles", "distance (data unit)"
    return curve_panels(
        Panel(kappas, {"": shares}, KAPPA, "share of runs", "Runs that end at another image", even=True, top=1.02),
        Panel(kappas, median, KAPPA, unit, title, "y", even=True, kind="band"),
    )
