"""Figures of reports: an audit of checkpoints (errors, copies, membership, responses, agreement) and a comparison.

Curves of an audit are along the noise level σ/α, the coordinate ``ratio`` of a data set in which every variable
``name`` has the ends ``name_low`` and ``name_high`` of its 95 % interval."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from vkernel.core.errors import require
from vkernel.core.estimate import Estimate
from vkernel.plots import base
from vkernel.plots.base import DASHED, DOTTED, MARKERS, LineStyle, Several, Values, array, ink, lines, styled
from vkernel.plots.curves import curve_panels, panel

if TYPE_CHECKING:
    import xarray

__all__ = ["agreement_curves", "comparison", "copy_curve", "denoising_errors", "explanation", "image_moments"]
__all__ += ["membership_losses", "neighbour_ratios", "responses", "score_deviation"]
REFERENCE = "test images"  # the label that is drawn dashed
FLOORS = "floor: theories of held-out images", "floor: images permuted"
GREY = "#8a929c"  # seen on both themes
SHOWN = 2000  # points of a scatter
FAR = 5.0  # spans of the data; a scatter that reaches further gets a symmetric logarithmic axis
CONDITIONS = 4  # conditions, or times, in one picture
LAWS = {"ensemble": "trained ensemble", "field": "Gaussian field of V", "semiclassical": "semiclassical"}
BOTTOM = -0.5  # of the axis of gains: what is lower leaves the picture
DEEP = 1e3  # the axis ends this factor below the model's errors, as the ideal error falls to rounding


@styled
def denoising_errors(ds: xarray.Dataset, linear: tuple[Values, Values] | None = None) -> Figure:
    """Draw the errors of model (solid) and ideal score (dashed), with ``linear`` (ratios, errors) that of the best
    linear denoiser, and with test images the gap between the sets over the training error."""
    x, sets = _levels(ds, "train", "ideal_train"), {"train": "training images", "test": "test images"}
    sets = {key: images for key, images in sets.items() if key in ds}
    curves = {f"model, {images}": _curve(ds, key) for key, images in sets.items()}
    curves |= {f"ideal, {images}": _curve(ds, f"ideal_{key}") for key, images in sets.items()}
    figure, styles = Figure(figsize=(3 + 3.6 * len(sets), 4.4)), ["-"] * len(sets) + [DASHED] * len(sets)
    left, *right = figure.subplots(1, len(sets), squeeze=False, width_ratios=(1.3, 1)[: len(sets)])[0]
    panel("errors", x, curves, colours=range(len(sets)), styles=styles).draw(left)
    bottom, top = left.get_ylim()
    if linear is not None:
        at, error = (array(v, 1, "the linear denoiser's curve") for v in linear)
        require(len(at) == len(error), f"The linear curve has {len(at)} levels, but {len(error)} errors.")
        base.band(left, at, [error] * 3, lines()[2], "best linear denoiser", ":", "o")
        top = max(top, 1.5 * error.max())
    train = np.where(array(ds["train"]) > 0, array(ds["train"]), np.nan)
    left.set_ylim(np.fmax(bottom, np.fmin.reduce(train) / DEEP), top)
    for ax in right:
        panel("error_gap", x, {"": 100 * _curve(ds, "gap") / train}).draw(ax)
        ax.autoscale(axis="y")
    base.legend_below(figure, left, ncols=3)
    return figure


def score_deviation(ds: xarray.Dataset) -> Figure:
    """Draw the distance of the learned score from the exact one, and the Rayleigh quotient of C in their difference."""
    x = _levels(ds, "distance", "rayleigh")
    return curve_panels(*(panel(name, x, {"": _curve(ds, name)}) for name in ("distance", "rayleigh")))


def copy_curve(
    thresholds: Values, curves: Mapping[str, Several], threshold: float = 1 / 3, reference: str = REFERENCE
) -> Figure:
    """Draw the shares, with the ends of their intervals, of images whose nearest / second nearest distance to training
    images is below each threshold; that of ``reference`` is dashed."""
    x, shares = array(thresholds, 1, "thresholds"), {}
    require(curves, "There is no curve to draw.")
    for label, curve in curves.items():
        good = len(curve) == 3 and all(array(v).shape == x.shape for v in curve)
        require(good, f"The curve {label!r} needs value, low and high with {len(x)} shares each.")
        shares[label] = 100 * np.stack([array(v) for v in curve])
    colours = [6 if label == reference else k % 6 for k, label in enumerate(curves)]
    styles, marks = [DASHED if k == 6 else "-" for k in colours], {f"threshold {threshold:.3g}": threshold}
    figure = curve_panels(panel("copies", x, shares, colours=colours, styles=styles, marks=marks))
    figure.axes[0].set_xlim(0, 1)
    return figure


@styled
def neighbour_ratios(ratios: Mapping[str, Values], threshold: float = 1 / 3, reference: str = REFERENCE) -> Figure:
    """Draw histograms of nearest / second nearest distance, one for each label; that of ``reference`` is dashed."""
    require(ratios, "There is no ratio to draw.")
    each = {label: _finite(values, f"ratios of {label}") for label, values in ratios.items()}
    least = min(np.isfinite(v).sum() for v in each.values())
    edges = np.linspace(0, 1, int(np.clip(2 * least ** (1 / 3), 10, 50)) + 1)
    figure, ((ax,),) = base.axes((6.4, 4.2))
    for k, (label, values) in enumerate(each.items()):
        inside = not ((values < 0) | (values > 1)).any()
        require(inside, f"Ratios of the nearest to the second nearest distance lie in 0 to 1; those of {label} do not.")
        colour, ls = (ink(), DASHED) if label == reference else (lines()[k % 6], "-")
        _steps(ax, values, edges, label, "without a ratio", colour, ls)
    ax.axvline(threshold, color=ink(), lw=1.1, ls=":", label=f"threshold {threshold:.3g}")
    ax.set(xlim=(0, 1), ylim=(0, None), xlabel="nearest / second nearest distance", ylabel="images (% in each step)")
    ax.set_title("Ratios of distances to training images")
    base.legend_below(figure, ax, ncols=2)
    return figure


@styled
def membership_losses(train: Values, test: Values, auc_t: Values, auc: Values, ratio: Values = ()) -> Figure:
    """Draw losses of training and test images, ``(images,)`` or ``(levels, images)`` and then averaged, and the AUC of
    a membership test by the loss, ``(3, levels)``, along σ/α, or along ``auc_t`` without ``ratio``."""
    t, ratio = (array(v, 1, "noise levels") for v in (auc_t, ratio))
    curve, given = array(auc, 2, "AUCs"), {"training images": array(train), "test images": array(test)}
    x, label = (ratio, {}) if ratio.size else (t, {"xlabel": "noise level t"})
    require(curve.shape == (3, len(t)) == (3, len(x)), "Every noise level needs an AUC with its interval.")
    losses = {k: _finite(v.mean(0) if v.ndim == 2 else v, f"losses of {k}") for k, v in given.items()}
    both = np.concatenate([v[np.isfinite(v)] for v in losses.values()])
    require(bool((both > 0).any()), "No loss is larger than zero; there is nothing to draw on a logarithmic axis.")
    ends = both[both > 0].min() * 0.999, both.max() * 1.001
    edges = np.geomspace(*ends, int(np.clip(2 * (len(both) / 2) ** (1 / 3), 8, 50)) + 1)
    figure, ((left, right),) = base.axes((10.2, 4.0), 1, 2)
    for (name, values), colour, ls in zip(losses.items(), lines(), ("-", DASHED), strict=False):
        _steps(left, values, edges, name, "not shown", colour, ls)
    left.set(xlabel="loss: |predicted − true noise|² / d", ylabel="images (% in each step)", title="Loss of each image")
    base.log_axis(left, "x", edges)
    left.set_ylim(0, 1.3 * left.get_ylim()[1])
    left.legend(loc="upper right")
    panel("membership", x, {"": curve}, **label).draw(right)
    bottom, top = np.fmin(curve[1].min(), 0.4), np.fmax(curve[2].max(), 0.6)
    right.set_ylim(max(0, bottom - 0.05), min(1.02, top + 0.05))
    right.legend()
    return figure


@styled
def responses(ds: xarray.Dataset, threshold: float = 0.05) -> Figure:
    """Draw the response R to each change of an image (``reports.audit.blind(…).to_dataset()``) against r = σ/(α s)."""
    known = "response" in ds and "change" in ds and "r" in ds
    require(known, "responses draws what vkernel.reports.audit.blind(…).to_dataset() returns.")
    curves = {str(change): _curve(ds.isel(change=k), "response") for k, change in enumerate(ds["change"].values)}
    figure, ((ax,),) = base.axes((6.6, 4.4))
    panel("responses", array(ds["r"]), curves).draw(ax)
    ax.axhline(threshold, color=ink(), lw=1, ls=DASHED, label=f"blind below {threshold:g}")
    ax.set_ylim(min(ax.get_ylim()[0], threshold / 1.5))
    base.legend_below(figure, ax, ncols=3)
    return figure


@styled
def image_moments(samples: Mapping[str, tuple[Values, Values]], data: tuple[Values, Values]) -> Figure:
    """Draw mean and variance of each image, of the data and of samples; at most 2,000 of each are shown."""
    every, (figure, ((ax,),)) = [], base.axes((6.4, 4.8))
    for k, (label, pair) in enumerate([("data", data), *samples.items()]):
        mean, variance = (array(v, 1, f"moments of {label}") for v in pair)
        same = len(mean) == len(variance)
        require(same, f"Each image has a mean and a variance; {label} has {len(mean)} and {len(variance)}.")
        both = np.stack([mean, variance], 1)
        every.append(both[np.isfinite(both).all(1)])
        require(every[0].size, "There are no data to compare samples with.")
        name = _counted(label, len(every[k]), len(both) - len(every[k]), "not finite")
        shown = every[k][:: math.ceil(len(every[k]) / SHOWN) or 1].T
        size, colour, marker, alpha = (16, lines()[(k - 1) % 6], "*o^sDv"[k % 6], 0.75) if k else (7, ink(), "o", 0.28)
        ax.scatter(shown[0], shown[1], size, colour, marker=marker, alpha=alpha, lw=0, label=name)
    ax.set(xlabel="mean of the image (data unit)", ylabel="variance over its coordinates (data unit²)")
    far = [_reach(ax, axis, every[0][:, axis], np.concatenate(every)[:, axis]) for axis in (0, 1)]
    ax.set_title("Mean and variance of each image" + (", logarithmic beyond the data" if any(far) else ""))
    base.legend_below(figure, ax, ncols=min(3, len(every)))
    return figure


@styled
def agreement_curves(ds: xarray.Dataset) -> Figure:
    """Draw variance between members (solid), common error (dashed) and rank correlations of V with C, by place: the
    variables ``variance``, ``bias``, ``rank`` and perhaps ``rank_coordinates``, over ``place`` and ``t``."""
    x, places = _levels(ds, "variance", "bias", "rank", "place"), [str(place) for place in ds["place"].values]
    ranks = [name for name in ("rank", "rank_coordinates") if name in ds]
    size, widths = (5.0 + 4.0 * len(ranks), 4.4), (1.25, *(1,) * len(ranks))
    figure, ((left, *right),) = base.axes(size, 1, len(widths), width_ratios=widths)
    pairs = [(k, name) for k in range(len(places)) for name in ("variance", "bias")]
    curves = {f"_{places[k]} {name}": _curve(ds.isel(place=k), name) for k, name in pairs}
    colours, markers = [k % 6 for k, _ in pairs], "".join(MARKERS[k % 6] for k, _ in pairs)
    panel("agreement", x, curves, colours=colours, styles=("-", DASHED), markers=markers).draw(left)
    for ax, name in zip(right, ranks, strict=True):
        curves = {place: _curve(ds.isel(place=k), name) for k, place in enumerate(places)}
        panel(name, x, curves).draw(ax)
        ax.set_ylim(-1, 1)
    looks = list(zip(places, 2 * lines(), 2 * MARKERS, strict=False))
    handles = [Line2D([], [], color=colour, marker=marker, ls="", label=place) for place, colour, marker in looks]
    for label, ls in (("variance between members", "-"), ("common error", DASHED)):
        handles.append(Line2D([], [], color=ink(), ls=ls, label=label))
    base.legend_below(figure, handles)
    return figure


@styled
def explanation(ds: xarray.Dataset, titles: Mapping[str, str] | None = None) -> Figure:
    """Draw gains over the Gaussian theory against σ/α (``vkernel.explain(…).denoising``), a line with its band for each
    theory, beside the ceiling (dashed) and the largest floors (grey). Rows are networks, columns sets of images. The
    theory "gaussian" is the line at 0; ``titles`` are labels of theories."""
    lacking = [name for name in ("gain", "ceiling", "elsewhere", "permuted") if name not in ds]
    require(not lacking, f"explanation draws what vkernel.explain returns; the data set has no {', '.join(lacking)}.")
    networks, sets = [str(name) for name in ds["network"].values], [str(name) for name in ds["images"].values]
    names = [str(name) for name in ds["theory"].values if name != "gaussian"]
    size = (4.6 * len(sets) + 1.0, 3.5 * len(networks) + 1.0)
    figure, axes = base.axes(size, len(networks), len(sets), sharey=True)
    for (row, column), ax in np.ndenumerate(axes):
        one = ds.isel(network=row, images=column)
        x = array(one["ratio"], 1, "noise levels")
        own = {(titles or {}).get(name, name): _curve(one.sel(theory=name), "gain") for name in names}
        for k, (label, curve) in enumerate(own.items()):
            base.band(ax, x, curve, lines()[k % 6], label, "-" if k < 6 else DASHED, MARKERS[k % 6])
        base.band(ax, x, _curve(one, "ceiling"), ink(), "ceiling", DASHED)
        ax.axhline(0, color=ink(), lw=1, label="Gaussian theory")
        for name, label, ls in (("elsewhere", FLOORS[0], DOTTED), ("permuted", FLOORS[1], "-.")):
            floor = np.fmax.reduce(array(one[name].sel(theory=names)), 0) if names else np.full(len(x), np.nan)
            order = np.argsort(x)
            ax.plot(x[order], floor[order], color=GREY, ls=ls, lw=1.5, label=label, zorder=1)
        base.log_axis(ax, "x", x)
        ax.set(ylim=(BOTTOM, 1.05), xlabel="noise level σ/α" if row == len(networks) - 1 else "")
        ax.set_title(f"{sets[column]} images" if row == 0 else "")
        if column == 0:
            ax.set_ylabel(
                f"{networks[row]}\n\ngain $R^2_G$" if len(networks) > 1 else "gain over the Gaussian theory, $R^2_G$"
            )
    handles, labels = axes[0, 0].get_legend_handles_labels()
    known = [k for k, handle in enumerate(handles) if _drawn(axes, labels[k])]
    base.legend_below(figure, [handles[k] for k in known], [labels[k] for k in known], 4)
    return figure


def _drawn(axes: np.ndarray, label: str) -> bool:
    """Whether a line of this label has a value anywhere."""
    lines = (line for ax in axes.flat for line in ax.lines if line.get_label() == label)
    return any(np.isfinite(np.asarray(line.get_ydata(), float)).any() for line in lines)


@styled
def comparison(ds: xarray.Dataset) -> Figure:
    """Draw the result of :func:`vkernel.compare`, up to four conditions as rows, and four times: variance of the score,
    its ratio to the prediction, cumulants over members, and laws; error bars are one standard error."""
    require("predicted" in ds and "measured" in ds, "comparison draws what vkernel.compare returns for a V-kernel.")
    several, line = "condition" in ds.dims, ds.sizes["axis"] == 1
    conditions = _few(ds.sizes["condition"]) if several else [0]
    panels = (_variance, _ratio_along) if line else (_ratio,)
    laws = 0 if "density" not in ds else 1 if line else len(LAWS)
    count = len(panels) + 1 + laws
    figure, axes = base.axes((3.1 * count + 0.6, 2.9 * len(conditions) + 0.7), len(conditions), count)
    for row, k in zip(axes, conditions, strict=True):
        one = ds.isel(condition=k) if several else ds
        for draw, ax in zip((*panels, _cumulants), row, strict=False):
            draw(ax, one)
        if laws:
            (_densities if line else _density_maps)(figure, row[-laws:], one)
        if several:
            label = ds.condition.values[k]
            name = f"{label:.3g}" if isinstance(label, float) else str(label)
            row[0].set_ylabel(f"{ds.condition.attrs['long_name']} = {name}\n\n{row[0].get_ylabel()}")
    for column in axes.T[: len(panels)]:  # conditions are compared on the same scale
        ends = np.array([ax.get_ylim() for ax in column])
        for ax in column:
            ax.set_ylim(ends.min(), ends.max())
    for above, below in zip(axes[:-1].flat, axes[1:].flat, strict=True):
        above.set_xlabel("")
        below.set_title("")
    handles = [h for ax in (axes[0, 0], axes[0, len(panels)]) for h in ax.get_legend_handles_labels()[0]]
    base.legend_below(figure, handles, [str(h.get_label()).replace("predicted", "predicted by V") for h in handles])
    return figure


def _few(count: int) -> list[int]:
    return sorted({round(k) for k in np.linspace(0, count - 1, min(CONDITIONS, count))})


def _times(one: xarray.Dataset, *names: str) -> Iterator[tuple[str, str, list[np.ndarray]]]:
    """Yield up to four times: colour, label, and the named variables at that time, NaN outside the bulk."""
    for n, k in enumerate(_few(one.sizes["t"])):
        at = one.isel(t=k)
        yield lines()[n], f"t = {float(at.t):.3g}", [array(at[name].where(at.bulk)) for name in names]


def _variance(ax: Axes, one: xarray.Dataset) -> None:
    one = one.sortby("x").assign(bulk=one.bulk | True)  # variances are drawn outside the bulk too
    some = slice(None, None, max(1, one.sizes["x"] // 15))
    found = {label: v for _, label, v in _times(one, "measured", "measured_se", "predicted")}
    curves = {label: np.stack([v, v - se, v + se])[:, some] for label, (v, se, _) in found.items()}
    theory = {label: (one.x.values, predicted) for label, (_, _, predicted) in found.items()}
    panel("score_variance", one.x.values[some], curves, expected=theory).draw(ax)


def _ratio_along(ax: Axes, one: xarray.Dataset) -> None:
    curves = {label: np.stack([v, v - se, v + se]) for _, label, (v, se) in _times(one, "ratio", "ratio_se")}
    panel("score_ratio", one.x.values, curves).draw(ax)
    inside = array(one.ratio)[array(one.bulk) > 0]
    ends = min(max(0.2, 0.85 * inside.min()), 0.7), max(min(5, 1.15 * inside.max()), 1.4)
    base.log_axis(ax, "y", np.array(ends))
    ax.set_ylim(*ends)


def _ratio(ax: Axes, one: xarray.Dataset) -> None:
    """Draw measured / predicted against predicted, since variances in many dimensions span decades."""
    ax.axhline(1, color=ink(), lw=1, ls=":", label="equal")
    for colour, label, (predicted, ratio, se) in _times(one, "predicted", "ratio", "ratio_se"):
        ax.errorbar(predicted, ratio, se, color=colour, ls="", marker="o", ms=3, lw=0.8, alpha=0.75, label=label)
    ax.set(xscale="log", xlabel="predicted tr Cov (1 / data unit²)", ylabel="measured / predicted", ylim=(0, None))
    ax.set_title("Variance of the score")
    ax.minorticks_off()


def _cumulants(ax: Axes, one: xarray.Dataset) -> None:
    """Draw skewness and excess kurtosis at every place, with the rectangle that holds 95 % of each for a Gaussian."""
    wide, tall = (Estimate[float].of_error(0.0, math.sqrt(v / int(one.members))).high for v in (6, 24))
    ax.add_patch(Rectangle((-wide, -tall), 2 * wide, 2 * tall, color=ink(), alpha=0.16, lw=0, label="95 % if Gaussian"))
    for colour, _, (skewness, kurtosis) in _times(one, "skewness", "kurtosis"):
        ax.plot(skewness.ravel(), kurtosis.ravel(), "o", color=colour, ms=3, ls="", alpha=0.65, mew=0)
    ax.set_yscale("symlog", linthresh=max(2 * tall, 1))
    ax.yaxis.set_major_formatter("{x:.3g}")
    ax.yaxis.set_minor_formatter("")
    ax.set(xlabel="skewness", ylabel="excess kurtosis", title="Cumulants over members")


def _laws(one: xarray.Dataset) -> Iterator[tuple[str, np.ndarray, str]]:
    """Yield the label of each law, its density, and its total variation from that of the ensemble."""
    for name, label in LAWS.items():
        tv = "" if name == "ensemble" else f"TV {float(one[f'tv_{name}']):.2f}"
        yield label, array(one.density.sel(law=name)), tv


def _edges(places: np.ndarray) -> np.ndarray:
    half = (places[1] - places[0]) / 2 if len(places) > 1 else 0.5
    return np.append(places - half, places[-1] + half)


def _densities(_: Figure, axes: np.ndarray, one: xarray.Dataset) -> None:
    (ax,), top = axes, float(np.nanmax(array(one.density)))
    looks: list[dict[str, Any]] = [{"color": lines()[5], "fill": True, "alpha": 0.35, "lw": 0}]
    looks += [{"color": lines()[0], "lw": 1.5}, {"color": lines()[1], "lw": 1.5, "ls": DASHED}]
    for (label, density, tv), look in zip(_laws(one), looks, strict=True):
        if np.isfinite(density).all():
            ax.stairs(density, _edges(array(one.bin)), label=f"{label}, {tv}" if tv else label, **look)
    ax.set(xlabel="x at eps (data unit)", ylabel="density", yscale="log", ylim=(top / 3e4, top * 300), title="Laws")
    ax.set_yticks([10.0**k for k in range(-9, 6) if top / 3e4 <= 10.0**k <= top])
    ax.minorticks_off()
    ax.legend(loc="upper center", fontsize=8.5)
    ax.grid(visible=False, axis="x")


def _density_maps(figure: Figure, axes: np.ndarray, one: xarray.Dataset) -> None:
    extent = tuple(end for places in (one.bin, one.bin2) for end in _edges(array(places))[[0, -1]])
    top = float(np.nanmax(array(one.density)))
    for ax, (label, density, tv) in zip(axes, _laws(one), strict=True):
        image = ax.imshow(density.T, extent=extent, origin="lower", norm=LogNorm(top / 1e3, top, clip=True))
        ax.text(0.04, 0.96, tv, transform=ax.transAxes, va="top", color="white", size=9.5)
        ax.set(xlabel="x₁", ylabel="x₂" if ax is axes[0] else "", title=label)
        ax.grid(visible=False)
    base.colour_bar(figure, image, axes, "density (1 / data unit²)", shrink=0.85, aspect=28)


def _levels(ds: xarray.Dataset, *names: str) -> np.ndarray:
    """Return σ/α along t; the data set must hold these names."""
    lacking = [name for name in names if name not in ds]
    require(not lacking, f"The picture needs {', '.join(names)}; the data set has no {', '.join(lacking)}.")
    require("ratio" in ds.coords, "The data set has no coordinate ratio, the noise levels sigma/alpha along t.")
    return array(ds.coords["ratio"], 1, "noise levels")


def _curve(ds: xarray.Dataset, name: str) -> np.ndarray:
    """Return value, low end and high end; without ends there is no band."""
    return np.stack([array(ds[key if key in ds else name], 1, name) for key in (name, f"{name}_low", f"{name}_high")])


def _finite(values: Values, what: str) -> np.ndarray:
    values = array(values, 1, what)
    require(np.isfinite(values).any(), f"There are no finite {what}.")
    return values


def _counted(label: str, count: int, lost: int, why: str) -> str:
    return f"{label} ({count:,}" + (f", and {lost:,} {why})" if lost else ")")


def _steps(ax: Axes, values: np.ndarray, edges: np.ndarray, label: str, why: str, colour: str, ls: LineStyle) -> None:
    """Draw a histogram in per cent of the finite values; the label counts those that are left out."""
    shown = values[(values >= edges[0]) & (values <= edges[-1])]
    heights = 100 * np.histogram(shown, edges)[0] / np.isfinite(values).sum()
    name = _counted(label, len(shown), len(values) - len(shown), why)
    ax.stairs(heights, edges, lw=1.7, label=name, color=colour, ls=ls)


def _reach(ax: Axes, axis: int, own: np.ndarray, every: np.ndarray) -> bool:
    """Make an axis logarithmic beyond the data where samples are far from them; return whether they are."""
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
