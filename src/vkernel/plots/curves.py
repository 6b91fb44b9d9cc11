"""Curves with intervals, ``(3, …)``: value, low end and high end, against a noise level or a setting; histograms."""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import torch
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vkernel.core.errors import require
from vkernel.core.estimate import Estimate
from vkernel.plots import base
from vkernel.plots.base import Curves, Names, Values, array, ink, lines, styled

__all__ = ["Panel", "curve_panels", "difference_rows", "distances", "gap_curves", "gap_shares", "noise_factors"]
__all__ += ["noise_profile", "panel_grid", "part_curves", "phase_diagram", "ratio_curve", "ratio_panels"]
__all__ += ["share_curve", "share_curves", "value_curves"]
Range: TypeAlias = tuple[float, float]
Factor: TypeAlias = Sequence[float | str]
_LOOKS = tomllib.loads(Path(__file__).with_name("panels.toml").read_text("utf-8"))


@dataclass(frozen=True)
class Panel:
    """Hold curves with intervals against one quantity, and the labels of their axes. ``curves`` maps a label to
    ``(3, len(x))``: value, low end and high end. ``expected`` maps labels of curves to positions and values of a line
    in the same colour; values ``(3, k)`` are drawn with a band. ``levels`` are dotted horizontal and ``marks`` dashed
    vertical lines or, for pairs, shaded ranges. ``log`` names the logarithmic axes; ``even`` spaces the positions
    equally, and ``ticks`` are their labels in place of numbers. In the order of the curves, ``colours`` are indices of
    line colours (6 is the colour of text), ``styles`` line styles, and ``markers`` those of bands (default: circles, if
    there are few places). ``top`` is the end of a linear y axis."""

    x: Values
    curves: Curves
    xlabel: str
    ylabel: str
    title: str = ""
    log: str = ""
    even: bool = False
    ticks: Names = ()
    kind: Literal["bars", "band"] = "bars"
    expected: Mapping[str, tuple[Values, Values]] = field(default_factory=dict)
    levels: Mapping[str, float | Range] = field(default_factory=dict)
    marks: Mapping[str, float | Range] = field(default_factory=dict)
    top: float | None = None
    colours: Sequence[int] = range(6)
    styles: Sequence[base.LineStyle] = ("-",)
    markers: str = ""

    def draw(self, ax: Axes) -> None:
        """Draw the panel on an axis."""
        x = array(self.x, 1, "positions")
        places = np.arange(len(x), dtype=float) if self.even else x
        few, palette = len(x) <= 8, (*lines(), ink())
        bands, marks = self.markers or ("o" if few else " "), self.markers or base.MARKERS
        ax.set(xlabel=self.xlabel, ylabel=self.ylabel, title=self.title, yscale="log" if "y" in self.log else "linear")
        for k, (label, curve) in enumerate(self.curves.items()):
            colour, ls = palette[self.colours[k % len(self.colours)]], self.styles[k % len(self.styles)]
            if label in self.expected:
                at, value = (array(v) for v in self.expected[label])
                base.band(ax, at, value if value.ndim == 2 else [value] * 3, colour)
            if self.kind == "band":
                base.band(ax, places, curve, colour, label, ls, bands[k % len(bands)])
                continue
            aside = few * (k - (len(self.curves) - 1) / 2)  # error bars must not cover each other
            shifted = places * (1 + 0.03 * aside) if "x" in self.log else places + 0.015 * aside * (np.ptp(places) or 1)
            base.error_bars(ax, shifted, curve, colour, label, marks[k % len(marks)], ls)
        if self.expected:
            ax.plot([], [], color=ink(), label="predicted")
        for references, line, span in ((self.levels, ax.axhline, ax.axhspan), (self.marks, ax.axvline, ax.axvspan)):
            for k, (label, place) in enumerate(references.items()):
                if isinstance(place, tuple):
                    span(*place, color=lines()[4], alpha=0.2, lw=0, label=label)
                else:
                    ls = (":", "-.")[k % 2] if references is self.levels else (base.DASHED, "-.")[k % 2]
                    line(place, color=ink(), lw=1, ls=ls, label=label)
        if "x" in self.log:
            base.log_axis(ax, "x", x)
        if self.even or (few and self.kind == "bars"):
            ax.set_xticks(places, self.ticks or [base.number(v) for v in x])
            ax.minorticks_off()
        if self.ticks:
            ax.set_xlim(places[0] - 0.5, places[-1] + 0.5)
        self._limit(ax)

    def _limit(self, ax: Axes) -> None:
        """Set the y axis so that it holds every value and level, and intervals up to a factor ten beyond."""
        every = np.concatenate([array(curve).reshape(3, -1) for curve in self.curves.values()], 1)
        values = every[0][np.isfinite(every[0]) & (every[0] > 0)]
        if "y" not in self.log:
            low = float(np.fmin.reduce(every[0], initial=0.0))  # a curve may be all NaN
            top = self.top or ax.get_ylim()[1]
            near = np.append(every[0], [height for height in self.levels.values() if height == low])
            on_axis = bool((near < low + 0.03 * (top - low)).any())  # the axis must not hide a level or a marker
            ax.set_ylim(low - 0.03 * (top - low) * on_axis, self.top)
        elif not values.size:
            ax.text(0.5, 0.5, "no value above zero", transform=ax.transAxes, ha="center", va="center")
        else:
            levels = [end for height in self.levels.values() for end in np.atleast_1d(height)]
            arrows = every[2][(every[0] == 0) & (every[2] > 0)] / 3  # from the high end of a zero
            low = min(max(np.nanmin(every[:2]), values.min() / 10), *levels, *arrows, math.inf) / 1.5
            high = max(min(np.nanmax(every), values.max() * 10), *levels, 0) * 1.5
            ax.set_ylim(low, high)
            if high < 50 * low:  # fewer than two powers of ten would be ticks
                base.log_axis(ax, "y", np.array([low, high]))


def panel(name: str, x: Values, curves: Curves, **more: object) -> Panel:
    """Return a panel with the labels and the look that ``panels.toml`` holds under ``name``, and ``more`` fields."""
    return Panel(x, curves, **(_LOOKS[name] | more))


@styled
def curve_panels(*panels: Panel, share: bool = False) -> Figure:
    """Draw panels side by side, with a legend below each; ``share`` makes one y axis and one legend for all."""
    size = {1: 6.6, 2: 9.6}.get(len(panels), 3.8 * len(panels)), 4.2
    figure, (axes,) = base.axes(size, 1, len(panels), sharey=share)
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
def panel_grid(panels: Sequence[Panel], columns: int = 3) -> Figure:
    """Draw panels row by row, with one legend of all their curves below."""
    rows = -(-len(panels) // columns)
    figure, axes = base.axes((4.2 * columns, 3.1 * rows + 0.5), rows, columns, squeeze=False)
    shown: dict[str, Artist] = {}
    for ax, panel in zip(axes.flat, panels, strict=False):
        panel.draw(ax)
        handles, labels = ax.get_legend_handles_labels()
        shown |= dict(zip(labels, handles, strict=True))
    for ax in axes.flat[len(panels) :]:
        ax.set_axis_off()
    base.legend_below(figure, list(shown.values()), list(shown), -(-len(shown) // 2))
    return figure


@styled
def noise_profile(
    curves: Curves, collapse_time: float | None = None, window: Range | None = None, points: int | None = None
) -> Figure:
    """Draw the curves of a :class:`~vkernel.reports.profile.Profile`: noise fraction, effective number of points (at
    most ``points``), MMSE and entropy; the noisy ``window`` is shaded and the ``collapse_time`` marked."""
    names = ("noise_fraction", "ess", "mmse", "entropy")
    t, se, *values = every = [array(curves[name], 1, "curves") for name in ("t", "noise_fraction_se", *names)]
    require(len({len(v) for v in every}) == 1, "Every curve needs one value per time.")
    rho = Estimate[torch.Tensor].of_error(torch.tensor(values[0]), torch.tensor(se)).stack().numpy()
    figure, axes = base.axes((9.6, 6.4), 2, 2, sharex=True)
    references = {"noisy window": window, "collapse time": collapse_time}
    marks = {label: place for label, place in references.items() if place is not None}
    most: dict[str, dict[str, float]] = {}
    if points:
        most = {"ess": {f"n = {points}": points}, "entropy": {"log n": math.log(points)}}
    for ax, name, curve in zip(axes.flat, names, [rho, *(np.stack([v] * 3) for v in values[1:])], strict=True):
        label, levels = "ρ(t)" if name == "noise_fraction" else "", most.get(name, {})
        panel(name, t, {label: curve}, marks=marks, levels=levels).draw(ax)
        ax.set_xlim(t.min(), t.max())
        for bound, height in levels.items():
            ax.annotate(bound, (0, height), (6, -3), ("axes fraction", "data"), "offset points", va="top", size=9)
    axes[0, 0].set_ylim(0, 1.05 * max(0.05, float(np.nanmax(rho))))
    axes[0, 0].collections[0].set_label("95 % interval")
    base.legend_below(figure, axes[0, 0])
    return figure


@styled
def distances(nn: Values, unit: str = "data unit") -> Figure:
    """Draw a histogram of the distances to the nearest neighbour; copies (distance 0) are counted in the title."""
    nn = array(nn).ravel()
    require(nn.size > 0 and bool(np.isfinite(nn).all()), "A histogram of distances needs finite numbers, at least one.")
    apart = nn[nn > 0]
    figure, ((ax,),) = base.axes((6.4, 3.6))
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
def ratio_curve(t: Values, curves: Curves, ratios: Values, low: float, high: float, chosen: float) -> Figure:
    """Draw a ratio against t, and every single one of the ``ratios`` at the ``chosen`` time, where the interval of
    their mean is from ``low`` to ``high``."""
    t, ratios = array(t, 1, "times"), array(ratios, 1, "ratios")
    figure, ((left, right),) = base.axes((9.6, 3.9), 1, 2, width_ratios=(1.25, 1))
    panel("midpoint_ratio", t, curves, marks={f"t = {chosen:.3g}, where ρ is greatest": chosen}).draw(left)
    left.set_ylim(0.5, min(1e4, left.get_ylim()[1]))
    left.legend()
    logs = np.log([min(float(ratios.min()), 0.97), max(float(ratios.max()), 1.03)])
    step = float(np.ptp(logs)) / 30
    first, last = (
        math.floor(logs[0] / step),
        math.ceil(logs[1] / step),
    )  # one of the edges is 1: no bar is on both sides
    ends = math.exp(first * step), math.exp(last * step)
    _histogram(right, ratios, last - first, *ends, log=True)
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
    x: Factor, curves: Values, *, names: Names, labels: Names = ("",), title: str = "", log: bool = False
) -> Figure:
    """Draw ``curves (3, line, x)``, value, low end and high end, against a factor; ``labels`` are those of the lines.
    ``names`` are the labels of the axes and the title of the legend. Values of the factor that are not finite numbers
    are equally spaced; strings, which have no order, are not joined by lines."""
    curves = array(curves).reshape(3, -1, len(x)).swapaxes(0, 1)
    numeric = all(isinstance(v, int | float) and np.isfinite(v) for v in x)
    at = np.asarray([float(v) for v in x]) if numeric else np.arange(len(x), dtype=float)
    order = np.argsort(at)
    wide = numeric and len(at) > 2 and bool((at > 0).all() and at.max() >= 8 * at.min())
    keyed = {label: curve[:, order] for label, curve in zip(labels, curves, strict=True)}
    (figure, ((ax,),)), style = base.axes((6.6, 4.6)), "" if any(isinstance(v, str) for v in x) else "-"
    Panel(at[order], keyed, names[0], names[1], title, "x" * wide + "y" * log, styles=[style]).draw(ax)
    if not numeric:
        ax.set_xticks(at, [_tick(v) for v in x])
        ax.set_xlim(-0.4, len(at) - 0.6)
    if len(keyed) > 1:
        figure.legend(title="".join(names[2:]) or None, loc="outside lower center", ncols=min(len(keyed), 4))
    return figure


@styled
def phase_diagram(x: Factor, y: Factor, mean: Values, se: Values, *, names: Names, title: str = "") -> Figure:
    """Draw a mean over two factors, ``(y, x)``, as a map with its numbers; ``names`` label x, y and the value."""
    mean, se, shape = array(mean, 2, "means"), array(se, 2, "standard errors"), (len(y), len(x))
    require(mean.shape == shape, f"The map has shape {mean.shape}; its axes have {len(y)} and {len(x)} values.")
    figure, ((ax,),) = base.axes((1.1 * len(x) + 2.4, 0.72 * len(y) + 1.6))
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


def gap_curves(kappas: Values, gaps: Curves, steps: Values, coarse: Curves, distance: Values, floor: float) -> Figure:
    """Draw the mass in the gap against κ and the number of steps, and the total variation between resampled and
    Gaussian noise, with the ``floor`` of two samples of one law."""
    pair, levels = {"resampled against Gaussian": distance}, {"two samples of one law": floor}
    by_steps = panel("gap_by_steps", steps, coarse), panel("kinds_of_noise", steps, pair, levels=levels)
    return curve_panels(panel("gap_by_kappa", kappas, gaps), *by_steps)


def share_curve(kappas: Values, shares: Values, distances: Curves) -> Figure:
    """Draw the share of runs that end at another image against κ, and quartiles of distances to training images,
    ``(3, κ)``: lower, median, upper."""
    median = {label: array(curve, 2, "quartiles")[[1, 0, 2]] for label, curve in distances.items()}
    return curve_panels(panel("other_image", kappas, {"": shares}), panel("image_distance", kappas, median))


@styled
def gap_shares(
    ratio: Values,
    groups: dict[str, Mapping[str, Estimate]],
    columns: Names,
    exact: Curves,
    medians: Mapping[str, Estimate],
) -> Figure:
    """Draw shares in the gaps against F/P: means over models above, ``medians`` over models, of the last group, below.
    Estimates are ``(column, ratio)``; a group has a line style, an objective a colour, and the ``exact`` score of each
    group a horizontal line."""
    every = {f"{name}, {group}": e.stack().clamp_min(0) for group, of in groups.items() for name, e in of.items()}
    last, top = list(groups)[-1], 1.04 * max(float(v.max()) for v in every.values())
    half = {f"{name}, {last}": e.stack() for name, e in medians.items()}
    figure, axes = base.axes((11.4, 7.0), 2, len(columns), sharex=True, sharey=True)
    for i, title in enumerate(columns):
        levels = {f"exact score, {group}": float(array(exact[group])[i]) for group in reversed(groups)}
        above = {label: curve[:, i] for label, curve in every.items()}
        panel("gap_by_features", ratio, above, title=title, xlabel="", levels=levels, top=top).draw(axes[0, i])
        levels = {f"exact score, {last}": levels[f"exact score, {last}"]}
        panel("median_by_features", ratio, {k: v[:, i] for k, v in half.items()}, levels=levels, top=top).draw(
            axes[1, i]
        )
    for ax in axes[:, 1:].flat:
        ax.set_ylabel("")
    base.legend_below(figure, axes[0, 0], ncols=3)
    return figure


def ratio_panels(ratios: Values, curves: Mapping[str, Curves]) -> Figure:
    """Draw measured / predicted variance over P/F; panels by objective, curves by form."""
    panels = (panel("variance_ratio", ratios, forms, title=name) for name, forms in curves.items())
    return curve_panels(*panels, share=True)


def share_curves(ratios: Sequence[float], names: Names, shares: Values, predicted: Values) -> Figure:
    """Draw shares of target noise ``(name, ratio, 3)`` against F/P: the first name left, the others right with the
    ``predicted`` ones as lines."""
    first, *others = np.clip(array(shares, 3, "shares"), 0, 1).swapaxes(1, 2)
    theory = np.clip(array(predicted, 3, "predictions"), 0, 1).swapaxes(1, 2)[1:]
    expected = {name: (range(len(ratios)), line) for name, line in zip(names[1:], theory, strict=True)}
    by_time = panel("target_noise_by_time", ratios, dict(zip(expected, others, strict=True)), expected=expected)
    return curve_panels(panel("target_noise", ratios, {names[0]: first}), by_time)


def part_curves(taus: Values, theory: Curves, at: Values, measured: Curves, gaps: Curves, crossing: float) -> Figure:
    """Draw parts of a variance, those of the ``theory`` along ``taus`` and ``measured`` ones, and the mass in the gaps
    ``at`` a few training times τ; a finite ``crossing`` is marked."""
    expected = {name: (taus, line) for name, line in theory.items()}
    marks = {f"crossing, τ = {crossing:.2g}": crossing} if math.isfinite(crossing) else {}
    parts = panel("variance_parts", at, measured, expected=expected, marks=marks)
    return curve_panels(parts, panel("gap_by_training", at, gaps))


@styled
def noise_factors(
    c: Values, groups: Mapping[str, Mapping[str, tuple[Estimate, Estimate]]], levels: Mapping[str, float], what: str
) -> Figure:
    """Draw distances to a population against the factor c of the target's noise, a column for each group: estimates
    ``(c,)`` with reference ``levels`` above, and their changes from c = 0, in pairs, below."""
    figure, axes = base.axes((3.8 * len(groups), 7.0), 2, len(groups), sharex=True, sharey="row")
    for row, name in zip(axes, ("noise_factor", "noise_change"), strict=True):
        below = name == "noise_change"
        ends = [0.0, *levels.values()][: 1 if below else None]
        for ax, (title, of) in zip(row, groups.items(), strict=True):
            curves = {label: found[below].stack() for label, found in of.items()}
            panel(name, c, curves, title="" if below else title).draw(ax)
            ends += [float(end) for curve in curves.values() for end in (curve.min(), curve.max())]
            for k, (label, level) in enumerate({"": 0.0}.items() if below else levels.items()):
                ax.axhline(level, color=ink(), lw=1, ls=(":", base.DASHED)[k], label=label)
            ax.label_outer()
        edge = 0.05 * (max(ends) - min(ends))
        row[0].set_ylim(min(ends) - edge, max(ends) + edge)
        row[0].set_ylabel(row[0].get_ylabel().format(what))
    base.legend_below(figure, axes[0, 0])
    return figure


@styled
def difference_rows(rows: Names, columns: Mapping[str, Mapping[str, Estimate]], linear: float = 0.01) -> Figure:
    """Draw differences J1 - J0 of distances, estimates ``(row,)`` by their labels: a line for each row, a panel for
    each column. The axis is linear up to ± ``linear`` and logarithmic beyond."""
    size = 5.0 * len(columns) + 1.2, 0.42 * len(rows) + 1.8
    figure, (axes,) = base.axes(size, 1, len(columns), sharey=True, sharex=True)
    places, ends = np.arange(len(rows), dtype=float), [-linear, linear]
    for ax, (title, of) in zip(axes, columns.items(), strict=True):
        for k, (label, found) in enumerate(of.items()):
            value, low, high = (array(v) for v in found.stack())
            ends += [low.min(), high.max()]
            look = {"color": lines()[k], "marker": base.MARKERS[k], "ms": 5, "ls": "", "lw": 1.3, "capsize": 2}
            aside = places + 0.22 * (k - (len(of) - 1) / 2)
            ax.errorbar(value, aside, xerr=np.abs([value - low, high - value]), label=label, **look)
        ax.axvline(0, color=ink(), lw=1, ls=":")
        ax.set(xlabel="J1 - J0: nearer to the population (below 0) or farther", title=title)
    axes[0].set_xscale("symlog", linthresh=linear)
    steps = np.array([k * 10.0**e for e in range(-6, 7) for k in ((1, 3) if max(map(abs, ends)) < 0.3 else (1,))])
    ticks = [v for v in (*-steps[::-1], 0.0, *steps) if min(ends) <= v <= max(ends) and (v == 0 or abs(v) >= linear)]
    axes[0].set_xticks([-linear / 2, linear / 2], minor=True)
    axes[0].set_xticks(ticks, [f"{v:g}" for v in ticks])
    axes[0].set_xlim(1.1 * min(ends), 1.1 * max(ends))
    axes[0].set_yticks(places, rows)
    axes[0].set_ylim(len(rows) - 0.5, -0.5)
    base.legend_below(figure, axes[0])
    return figure
