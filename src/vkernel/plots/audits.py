"""What an audit of checkpoints found (:mod:`vkernel.reports.audit`): errors, copies, members, blindness, agreement.

Curves run along the noise level σ/α (coordinate ``ratio``); a variable ``name`` comes with the ends ``name_low`` and
``name_high`` of its 95 % interval, drawn as a band, or as a bar where a level stands alone. What has no place on a
logarithmic axis (NaN, zero or less) is left out, and an interval that reaches zero leaves the picture at the bottom.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from vkernel.core.errors import require
from vkernel.plots.base import array, ink, lines, styled

if TYPE_CHECKING:
    import xarray

__all__ = [
    "agreement_curves",
    "copy_curve",
    "denoising_errors",
    "image_moments",
    "membership_losses",
    "neighbour_ratios",
    "responses",
    "score_deviation",
    "several_errors",
]

ERROR, NOISE = "|predicted − true noise|² / d", "noise level σ/α (data unit)"
REFERENCE = "test images"  # the label that is drawn dashed
SHOWN = 2000  # points of a scatter
FAR = 5.0  # spans of the data; a scatter that reaches further gets a symmetric logarithmic axis
DEEP = 1e3  # how far below the model the ideal is followed
DASHED = (0, (4, 2))


@styled
def denoising_errors(ds: xarray.Dataset, linear: tuple[Any, Any] | None = None) -> Figure:
    """Errors of the model (solid) and of the ideal score (dashed) against σ/α, and beside it the gap between sets.

    ``ds`` is of ``auditing.levels`` with one model; without test images there is no gap. ``linear`` is the curve
    ``(ratio, error)`` of the best linear denoiser. The gap and its ends are divided by the error on training images.
    """
    x, held = _levels(ds, "train", "ideal_train"), "test" in ds
    figure = Figure(figsize=(10.2 if held else 6.4, 4.4))
    left, *right = figure.subplots(1, 1 + held, squeeze=False, width_ratios=(1.3, 1)[: 1 + held])[0]
    words = {"train": "training images", "test": "test images"}
    curves = [
        _band(left, x, _curve(ds, start + key), lines()[k], f"{who}, {words[key]}", ls)
        for start, who, ls in (("", "model", "-"), ("ideal_", "ideal", DASHED))
        for k, key in enumerate(words)
        if start + key in ds
    ]
    if linear is not None:
        at, error = (array(v, 1, "the linear denoiser's curve") for v in linear)
        require(len(at) == len(error), f"The linear curve has {len(at)} levels, but {len(error)} errors.")
        curves.append(_band(left, at, (error,) * 3, lines()[2], "best linear denoiser", ":"))
    left.set(ylabel=ERROR, title="Error of predicted noise, 95 % interval")
    _log_y(left, curves)
    model = array(ds["train"])
    if (model > 0).any():  # the ideal error falls to rounding, and would leave the others no room
        left.set_ylim(bottom=max(left.get_ylim()[0], float(model[model > 0].min()) / DEEP))
    _noise_axis(left, x)
    if right:
        train = np.where(array(ds["train"]) > 0, array(ds["train"]), np.nan)
        _band(right[0], x, tuple(100 * v / train for v in _curve(ds, "gap")), lines()[3], log=False)
        right[0].axhline(0, color=ink(), lw=0.9, ls=":")
        right[0].set(ylabel="gap / training error (%)", title="Test less training error, 95 % interval")
        _noise_axis(right[0], x)
    _legend(figure, left, 3)
    return figure


@styled
def score_deviation(ds: xarray.Dataset) -> Figure:
    """How far the learned score is from the training set's own, and whether it errs along C: Rayleigh quotient."""
    x = _levels(ds, "distance", "rayleigh")
    figure = Figure(figsize=(10.2, 3.9))
    left, right = figure.subplots(1, 2)
    for ax, name, colour in ((left, "distance", lines()[0]), (right, "rayleigh", lines()[1])):
        curve = _band(ax, x, _curve(ds, name), colour)
        _log_y(ax, [curve], *((1.0,) if name == "rayleigh" else ()))
        _noise_axis(ax, x)
    left.set(ylabel="σ² |learned − exact score|² / d", title="Distance from the exact score, 95 % interval")
    right.set(ylabel="d eᵀC e / (|e|² tr C)", title="Rayleigh quotient of the deviation e")
    _level(right, 1, "indifferent to C")
    right.legend()
    return figure


@styled
def several_errors(ds: xarray.Dataset, which: str = "train") -> Figure:
    """Errors of several models (axis ``model``) on ``train`` or ``test`` images, and of the ideal score they share."""
    require(which in ("train", "test"), f"which must be train or test, not {which!r}.")
    require("model" in getattr(ds, "dims", ()), "several_errors draws errors of several models, with an axis model.")
    x = _levels(ds, which, f"ideal_{which}")
    names = [str(v) for v in ds["model"].values]
    figure = Figure(figsize=(6.8, 4.4 + 0.2 * (len(names) // 3)))
    ax = figure.subplots()
    curves = []
    for k, name in enumerate(names):
        look = ("-", "-.", (0, (1, 1)))[k // len(lines()) % 3]
        curves.append(_band(ax, x, _curve(ds.isel(model=k), which), lines()[k % len(lines())], name, look))
    curves.append(_band(ax, x, _curve(ds.isel(model=0), f"ideal_{which}"), ink(), "ideal", DASHED))
    images = "training" if which == "train" else "test"
    ax.set(ylabel=ERROR, title=f"Error of predicted noise on {images} images, 95 % interval")
    _log_y(ax, curves)
    _noise_axis(ax, x)
    _legend(figure, ax, 3)
    return figure


@styled
def copy_curve(
    thresholds: Any, curves: Mapping[str, tuple[Any, Any, Any]], threshold: float = 1 / 3, reference: str = REFERENCE
) -> Figure:
    """Share of images whose distances to the nearest and the second nearest training image have a ratio below each
    threshold.

    ``curves`` maps a label to shares and the ends of their intervals; that of ``reference`` is dashed.
    """
    x = array(thresholds, 1, "thresholds")
    require(curves, "There is no curve to draw.")
    figure = Figure(figsize=(6.4, 4.2))
    ax = figure.subplots()
    for k, (label, curve) in enumerate(curves.items()):
        shares = tuple(100 * array(v, 1, "shares") for v in curve)
        good = len(shares) == 3 and all(v.shape == x.shape for v in shares)
        require(good, f"The curve {label!r} needs value, low and high with {len(x)} shares each.")
        look: dict[str, Any] = {"colour": ink(), "ls": DASHED} if label == reference else {"colour": lines()[k % 6]}
        _band(ax, x, shares, label=label, log=False, marker="", **look)
    ax.axvline(threshold, color=ink(), lw=1.1, ls=":", label=f"threshold {threshold:.3g}")
    ax.set(xlim=(0, 1), ylim=(0, 102), xlabel="threshold: nearest / second nearest distance")
    ax.set(ylabel="images below the threshold (%)", title="How many are copies, 95 % interval")
    ax.legend(loc="upper left")
    return figure


@styled
def neighbour_ratios(ratios: Mapping[str, Any], threshold: float = 1 / 3, reference: str = REFERENCE) -> Figure:
    """Histograms of nearest / second nearest distance, one for each label; that of ``reference`` is dashed."""
    require(ratios, "There is no ratio to draw.")
    figure = Figure(figsize=(6.4, 4.2))
    ax = figure.subplots()
    each = {label: _finite(values, f"ratios of {label}") for label, values in ratios.items()}
    least = min(len(kept) for kept, _ in each.values())
    edges = np.linspace(0, 1, int(np.clip(2 * least ** (1 / 3), 10, 50)) + 1)
    for k, (label, (kept, lost)) in enumerate(each.items()):
        inside = bool(((kept >= 0) & (kept <= 1)).all())
        require(inside, f"Ratios of the nearest to the second nearest distance lie in 0 to 1; those of {label} do not.")
        look: dict[str, Any] = {"color": ink(), "ls": DASHED} if label == reference else {"color": lines()[k % 6]}
        _steps(ax, kept, edges, _counted(label, len(kept), lost, "without a ratio"), **look)
    ax.axvline(threshold, color=ink(), lw=1.1, ls=":", label=f"threshold {threshold:.3g}")
    ax.set(xlim=(0, 1), ylim=(0, None), xlabel="nearest / second nearest distance", ylabel="images (% in each step)")
    ax.set_title("Ratios of distances to training images")
    _legend(figure, ax, 2)
    return figure


@styled
def membership_losses(
    train: Any, test: Any, auc_t: Any, auc: Any, auc_low: Any, auc_high: Any, ratio: Any = None
) -> Figure:
    """Losses of training and of test images, and how well a lower loss tells them apart at each noise level.

    Losses are ``(images,)``, or ``(levels, images)`` and then averaged over levels. ``ratio`` is σ/α at the times
    ``auc_t``; without it the picture runs along ``auc_t``.
    """
    t, value, low, high = (array(v, 1, "AUCs along the noise levels") for v in (auc_t, auc, auc_low, auc_high))
    x = t if ratio is None else array(ratio, 1, "noise levels")
    require(len({len(v) for v in (x, t, value, low, high)}) == 1, "Every noise level needs an AUC with its interval.")
    figure = Figure(figsize=(10.2, 4.0))
    left, right = figure.subplots(1, 2)
    given = {"training images": train, "test images": test}
    losses = {k: _finite(array(v).mean(0) if array(v).ndim == 2 else v, f"losses of {k}") for k, v in given.items()}
    both = np.concatenate([kept for kept, _ in losses.values()])
    require(bool((both > 0).any()), "No loss is larger than zero; there is nothing to draw on a logarithmic axis.")
    ends = both[both > 0].min() * 0.999, both.max() * 1.001
    edges = np.geomspace(*ends, int(np.clip(2 * (len(both) / 2) ** (1 / 3), 8, 50)) + 1)
    for (label, (kept, lost)), colour, ls in zip(losses.items(), lines(), ("-", DASHED), strict=False):
        shown = kept[kept > 0]
        words = _counted(label, len(shown), lost + len(kept) - len(shown), "without a place here")
        _steps(left, shown, edges, words, len(kept), color=colour, ls=ls)
    left.set(xscale="log", xlabel="loss: " + ERROR, ylabel="images (% in each step)", title="Loss of each image")
    left.set_xticks(*_ticks(edges))
    left.minorticks_off()
    left.set_ylim(0, 1.3 * left.get_ylim()[1])
    left.legend(loc="upper right")
    _band(right, x, (value, low, high), lines()[3], log=False)
    _level(right, 0.5, "cannot be told apart")
    right.legend()
    bottom, top = np.nanmin([low.min(), 0.4]), np.nanmax([high.max(), 0.6])
    right.set(ylim=(max(0, bottom - 0.05), min(1.02, top + 0.05)), title="Told apart by a lower loss, 95 % interval")
    right.set_ylabel("AUC = P(training loss < test loss)")
    _noise_axis(right, x, NOISE if ratio is not None else "noise level t")
    return figure


@styled
def responses(ds: xarray.Dataset, threshold: float = 0.05) -> Figure:
    """The response R to each change of an image (of ``auditing.blind(…).to_dataset()``) against r = σ/(α s)."""
    known = "response" in ds and "change" in ds and "r" in ds
    require(known, "responses draws what vkernel.reports.audit.blind(…).to_dataset() returns.")
    x = array(ds["r"], 1, "noise levels")
    figure = Figure(figsize=(6.6, 4.4))
    ax = figure.subplots()
    curves = []
    for k, change in enumerate(ds["change"].values):
        curve = _curve(ds.isel(change=k), "response")
        curves.append(_band(ax, x, curve, lines()[k % 6], str(change), marker="osD^v*"[k % 6]))
    _log_y(ax, curves, threshold, 1.0)
    _level(ax, 1, "best linear denoiser")
    _level(ax, threshold, f"blind below {threshold:g}", DASHED)
    ax.set(ylabel="response R, in units of a linear denoiser's", title="What the network sees, 95 % interval")
    _noise_axis(ax, x, "noise level r = σ/(α s), s the data's spread per coordinate")
    _legend(figure, ax, 3)
    return figure


@styled
def image_moments(samples: Mapping[str, tuple[Any, Any]], data: tuple[Any, Any]) -> Figure:
    """Mean and variance of each image, of the data and of samples; at most 2,000 of each are shown."""
    own = _moments("data", data)[0]
    require(own.size, "There are no data to compare samples with.")
    figure = Figure(figsize=(6.4, 4.8))
    ax = figure.subplots()
    x, y = own[:: math.ceil(len(own) / SHOWN)].T
    ax.scatter(x, y, 7, ink(), alpha=0.28, lw=0, label=f"data ({len(own):,})", zorder=1)
    every = [own]
    for k, (label, pair) in enumerate(samples.items()):
        theirs, lost = _moments(label, pair)
        every.append(theirs)
        words = _counted(label, len(theirs), lost, "not finite")
        marker, x, y = "o^sDv*"[k % 6], *theirs[:: math.ceil(len(theirs) / SHOWN) or 1].T
        ax.scatter(x, y, 16, lines()[k % 6], marker=marker, alpha=0.75, lw=0, label=words, zorder=2)
    ax.set(xlabel="mean of the image (data unit)", ylabel="variance over its coordinates (data unit²)")
    far = [_reach(ax, axis, own[:, axis], np.concatenate(every)[:, axis]) for axis in (0, 1)]
    ax.set_title("Mean and variance of each image" + (", logarithmic far out" if any(far) else ""))
    _legend(figure, ax, min(3, len(every)))
    return figure


@styled
def agreement_curves(ds: xarray.Dataset) -> Figure:
    """How much members disagree (solid) and err together (dashed) at each kind of place, and whether they disagree
    where C is large.

    ``ds`` has the axes ``place`` and ``t``, and ``variance``, ``bias`` and ``rank`` with their ends; where it has
    ``rank_coordinates`` there is a third panel.
    """
    x = _levels(ds, "variance", "bias", "rank", "place")
    ranks = {"rank": "over places", "rank_coordinates": "over coordinates of an image"}
    ranks = {name: words for name, words in ranks.items() if name in ds}
    figure = Figure(figsize=(5.0 + 4.0 * len(ranks), 4.4))
    left, *right = figure.subplots(1, 1 + len(ranks), width_ratios=(1.25, *(1,) * len(ranks)))
    curves, handles = [], []
    for k, place in enumerate(ds["place"].values):
        here, colour, marker = ds.isel(place=k), lines()[k % 6], "osD^v*"[k % 6]
        for name, ls in (("variance", "-"), ("bias", DASHED)):
            curves.append(_band(left, x, _curve(here, name), colour, ls=ls, marker=marker))
        for ax, name in zip(right, ranks, strict=True):
            _band(ax, x, _curve(here, name), colour, log=False, marker=marker)
        handles.append(Line2D([], [], color=colour, marker=marker, ls="", label=str(place)))
    left.set(ylabel="squared, per coordinate of predicted noise", title="Disagreement and common error")
    _log_y(left, curves)
    for ax, words in zip(right, ranks.values(), strict=True):
        ax.axhline(0, color=ink(), lw=0.9, ls=":")
        ax.set(ylim=(-1, 1), ylabel="rank correlation", title=f"V with C {words}")
    for ax in (left, *right):
        _noise_axis(ax, x)
    for words, ls in (("variance between members", "-"), ("common error", DASHED)):
        handles.append(Line2D([], [], color=ink(), ls=ls, label=words))
    figure.legend(handles=handles, loc="outside lower center", ncols=6, handlelength=2.9)
    return figure


def _levels(ds: Any, *names: str) -> np.ndarray:
    """σ/α along t; refuses what does not hold these names."""
    lacking = [name for name in names if name not in ds]
    require(not lacking, f"The picture needs {', '.join(names)}; the data set has no {', '.join(lacking)}.")
    require("ratio" in ds.coords, "The data set has no coordinate ratio, the noise levels sigma/alpha along t.")
    return array(ds.coords["ratio"], 1, "noise levels")


def _curve(ds: Any, name: str) -> tuple[np.ndarray, ...]:
    """Value, low and high; without ends there is no band."""
    return tuple(array(ds[key if key in ds else name], 1, name) for key in (name, f"{name}_low", f"{name}_high"))


def _band(
    ax: Axes,
    x: np.ndarray,
    curve: Any,
    colour: str,
    label: str = "",
    ls: Any = "-",
    log: bool = True,
    marker: str = "o",
) -> np.ndarray:
    """A curve with its interval, (value, low, high) by x; returned as it was drawn, ``(3, points)``."""
    require(all(v.shape == x.shape for v in curve), f"There are {len(x)} noise levels, but a curve has another length.")
    order = np.argsort(x)
    x, (value, low, high) = x[order], (np.where(np.isfinite(v), v, np.nan)[order] for v in curve)
    if log:
        value = np.where(value > 0, value, np.nan)
        low = np.fmax(low, 1e-6 * value)  # below the picture
    there = np.isfinite(value) & np.isfinite(low) & np.isfinite(high)
    near = np.append(False, there[:-1]) | np.append(there[1:], False)
    ax.fill_between(x, low, high, where=there, color=colour, alpha=0.2, lw=0)
    ax.vlines(x[there & ~near], low[there & ~near], high[there & ~near], color=colour, lw=1.4)
    inside = colour if ls == "-" else ax.get_facecolor()
    ax.plot(x, value, color=colour, ls=ls, marker=marker, label=label, mfc=inside)
    return np.stack([value, low, high])


def _log_y(ax: Axes, curves: list[np.ndarray], *also: float) -> None:
    """A logarithmic axis that holds all values, and the intervals up to a factor ten beyond."""
    ax.set_yscale("log")
    values = np.concatenate([curve[0] for curve in curves])
    if not np.isfinite(values).any():
        ax.text(0.5, 0.5, "no value above zero", transform=ax.transAxes, ha="center", va="center")
        return
    least, most = float(np.nanmin(values)), float(np.nanmax(values))
    bottom = max(min(float(np.nanmin(curve[:2])) for curve in curves if np.isfinite(curve[0]).any()), least / 10)
    top = min(max(float(np.nanmax(curve)) for curve in curves if np.isfinite(curve[0]).any()), most * 10)
    ax.set_ylim(min(bottom, *also, top) / 1.4, max(top, *also, bottom) * 1.4)


def _noise_axis(ax: Axes, x: np.ndarray, label: str = NOISE) -> None:
    x = x[np.isfinite(x) & (x > 0)]
    require(x.size, "No noise level is a finite number above zero.")
    ax.set(xscale="log", xlabel=label, xlim=(x.min() / 1.25, x.max() * 1.25))
    ax.set_xticks(*_ticks(x))
    ax.minorticks_off()


def _ticks(x: np.ndarray) -> tuple[list[float], list[str]]:
    """Four plain numbers or a few more; the ends where there are none between."""
    exponents = range(math.floor(math.log10(x.min())), math.ceil(math.log10(x.max())) + 1)
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.4, 1.6, 1.8, *range(2, 10))):
        ticks = [v for v in (k * 10.0**e for e in exponents for k in steps) if x.min() <= v * 1.01 <= x.max() * 1.02]
        if len(ticks) >= 4:
            break
    ticks = ticks[:: math.ceil(len(ticks) / 8)] if len(ticks) > 1 else sorted({float(x.min()), float(x.max())})
    return ticks, [f"{v:.3g}" for v in ticks]


def _level(ax: Axes, value: float, label: str, ls: Any = ":") -> None:
    ax.axhline(value, color=ink(), lw=1.1, ls=ls, label=label)


def _legend(figure: Figure, ax: Axes, columns: int) -> None:
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=columns, handlelength=2.9)


def _finite(values: Any, what: str) -> tuple[np.ndarray, int]:
    """What is finite, and how many are not."""
    values = array(values, 1, what)
    kept = values[np.isfinite(values)]
    require(kept.size, f"There are no finite {what}.")
    return kept, len(values) - len(kept)


def _counted(label: str, count: int, lost: int, why: str) -> str:
    return f"{label} ({count:,}" + (f", and {lost:,} {why})" if lost else ")")


def _steps(ax: Axes, values: np.ndarray, edges: np.ndarray, label: str, of: int | None = None, **look: Any) -> None:
    """A histogram in per cent of all."""
    ax.stairs(100 * np.histogram(values, edges)[0] / (of or len(values)), edges, lw=1.7, label=label, **look)


def _reach(ax: Axes, axis: int, own: np.ndarray, every: np.ndarray) -> bool:
    """Make an axis logarithmic beyond the data where samples are far from them; whether they are."""
    if np.abs(every - np.median(own)).max() <= FAR * max(np.ptp(own), 1e-12):
        return False
    most = float(np.abs(own).max()) or float(np.abs(every).max()) / FAR
    unit = 10.0 ** math.floor(math.log10(most))
    edge = math.ceil(most / unit) * unit
    powers = 10.0 ** np.arange(math.ceil(math.log10(2 * edge)), math.log10(np.abs(every).max()) + 1)
    ticks = np.concatenate([-powers[::-1], edge * np.linspace(-1, 1, 5), powers])
    ticks = ticks[(ticks >= min(1.5 * every.min(), 0)) & (ticks <= 1.5 * every.max())]
    (ax.set_xscale, ax.set_yscale)[axis]("symlog", linthresh=edge, linscale=2.5)
    (ax.set_xticks, ax.set_yticks)[axis](list(ticks), [f"{v:g}" for v in ticks])
    if every.min() >= 0:
        (ax.set_xlim, ax.set_ylim)[axis](0, None)
    return True


def _moments(label: str, pair: tuple[Any, Any]) -> tuple[np.ndarray, int]:
    """``(images, 2)`` where both are finite, and how many are not."""
    mean, variance = (array(v, 1, f"moments of {label}") for v in pair)
    alike = len(mean) == len(variance)
    require(alike, f"Each image has a mean and a variance; {label} has {len(mean)} and {len(variance)}.")
    both = np.stack([mean, variance], 1)
    kept = np.isfinite(both).all(1)
    return both[kept], int((~kept).sum())
