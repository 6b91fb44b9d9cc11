"""A comparison of theory and ensemble (:func:`vkernel.compare`) in words, as a table, and as a picture."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from vkernel.core.errors import require
from vkernel.plots.base import array, ink, lines, plain_ticks, styled

if TYPE_CHECKING:
    import xarray

__all__ = ["about", "comparison", "summary", "table"]

AGREE = 0.15  # a pooled ratio this close to 1, or within two standard errors, counts as agreement
NAMES = {"ensemble": "trained ensemble", "field": "Gaussian field of V", "semiclassical": "semiclassical"}
MOST = 4  # times or conditions in one picture


VARIANCE, SCORE = "1/(data unit)²", "1/(data unit)"
ABOUT = {
    "measured": ("tr Cov of the score over members", VARIANCE),
    "predicted": ("tr Cov of the score by the kernel V", VARIANCE),
    "ratio": ("measured / predicted", "1"),
    "bulk": ("whether p(x|t) is not negligible", ""),
    "ratio_by_time": ("measured / predicted, pooled over the bulk", "1"),
    "ratio_pooled": ("measured / predicted, pooled over the bulk and averaged over times", "1"),
    "ratio_median": ("median over the bulk of measured / predicted", "1"),
    "ratio_low": ("5 % quantile over the bulk of measured / predicted", "1"),
    "ratio_high": ("95 % quantile over the bulk of measured / predicted", "1"),
    "relative_error": ("|pooled ratio - 1|", "1"),
    "cross_measured": ("tr Cov of the score between t1 and t2 over members", VARIANCE),
    "cross_predicted": ("tr Cov of the score between t1 and t2 by V", VARIANCE),
    "mean_measured": ("mean score over members", SCORE),
    "mean_predicted": ("mean score that the kernel predicts", SCORE),
    "skewness": ("skewness of the score over members", "1"),
    "kurtosis": ("excess kurtosis of the score over members", "1"),
    "skewed_share": ("share of the bulk with |skewness| > 2 se", "1"),
    "kurtotic_share": ("share of the bulk with |excess kurtosis| > 2 se", "1"),
    "density": ("density of x at eps, all samples counted", "1/(data unit)^d"),
    "tv_field": ("total variation, ensemble against Gaussian field of V", "1"),
    "tv_closure": ("total variation, ensemble against Gaussian field of its own covariance", "1"),
    "tv_semiclassical": ("total variation, ensemble against semiclassical law of V", "1"),
    "tv_floor": ("total variation that finite numbers of members alone give", "1"),
    "members": ("finite members", "1"),
    **{f"lost_{n}": (f"{n}: members whose samples diverged", "1") for n in (*NAMES, "closure")},
    "valid": ("whether the kernel's assumptions hold, as it declares", ""),
    "why": ("the kernel's words on its validity", ""),
}


def about(name: str) -> dict[str, str]:
    for ending, words in (("_se", "standard error"), ("_low", "low end, 95 %"), ("_high", "high end, 95 %")):
        if name not in ABOUT and name.endswith(ending):
            long, units = ABOUT.get(name.removesuffix(ending), (name, "1"))
            return {"long_name": f"{long}: {words}", "units": units}
    long, units = ABOUT.get(name, ABOUT["tv_floor"])
    return {"long_name": long, "units": units}


# --- in words -------------------------------------------------------------------------------------------------------


def _conditions(ds: xarray.Dataset) -> Iterator[tuple[str, xarray.Dataset]]:
    """Each condition with its label, "" if there is but one."""
    if "condition" not in ds.dims:
        yield "", ds
    for k, label in enumerate(ds.condition.values if "condition" in ds.dims else ()):
        yield f"{label:.3g}" if isinstance(label, float) else str(label), ds.isel(condition=k)


def summary(ds: xarray.Dataset) -> str:
    """One line of plain words: is the predicted variance right, is the Gaussian closure, what was left out?"""
    by = ds.condition.attrs["long_name"] if "condition" in ds.dims else ""
    words = [*_variance(ds, by), *(_closure(ds, by) if "tv_closure" in ds else []), *_doubts(ds, by)]
    return "; ".join(words) + "."


def _variance(ds: xarray.Dataset, by: str) -> list[str]:
    """How well theory does where it is right at every time; where it is not, by how much it is off."""
    agree: dict[str, tuple[float, float]] = {}
    words = []
    for label, one in _conditions(ds):
        ratio, error = array(one.ratio_by_time), array(one.ratio_by_time_se)
        pooled, se, worst, when = float(one.ratio_pooled), float(one.ratio_pooled_se), np.argmax(abs(ratio - 1)), ""
        if bool((abs(ratio - 1) <= np.maximum(AGREE, 3 * error)).all()):
            agree[label] = abs(ratio - 1).max(), error[worst]
            continue
        if abs(pooled - 1) <= max(AGREE, 3 * se):
            pooled, se, when = ratio[worst], error[worst], f" at t = {float(one.t[worst]):.3g}"
        off = f"the measured variance is {pooled:.2g} ± {se:.1g} times the predicted{when}"
        words.append(f"at {by} = {label} {off}" if label else off)
    if not agree:
        return words
    most, se = (100 * max(column) for column in zip(*agree.values(), strict=True))
    return [f"theory within {most:.0f} % (± {se:.0f} %) of the measured variance{_where(ds, list(agree), by)}", *words]


def _where(ds: xarray.Dataset, labels: list[str], by: str) -> str:
    """For which conditions, as a range if they are one end of an order."""
    if not by:
        low, high = float(ds.ratio_low), float(ds.ratio_high)
        return f" (ratio {low:.2g} to {high:.2g} over 5–95 % of places)"
    every = dict(zip([label for label, _ in _conditions(ds)], ds.condition.values, strict=True))
    if len(labels) == len(every):
        return f" at every {by}"
    if ds.condition.dtype.kind == "f":
        inside, outside = [every[k] for k in labels], [v for k, v in every.items() if k not in labels]
        if max(inside) < min(outside):
            return f" for {by} ≤ {max(inside):.3g}"
        if min(inside) > max(outside):
            return f" for {by} ≥ {min(inside):.3g}"
    return f" for {by} = {', '.join(labels)}"


def _closure(ds: xarray.Dataset, by: str) -> list[str]:
    tv = {
        n: [float(one[f"tv_{n}"]) for _, one in _conditions(ds)] for n in ("closure", "floor", "field", "semiclassical")
    }
    told = {n: ", ".join(f"{v:.2f}" for v in values) for n, values in tv.items()}
    where = f" at {by} = {', '.join(label for label, _ in _conditions(ds))}" if by else ""
    chance = all(v <= 1.25 * floor for v, floor in zip(tv["closure"], tv["floor"], strict=True))
    verdict = ": no more than so few members show by chance" if chance else ""
    words = [f"the Gaussian closure is off by TV {told['closure']}{where} (floor {told['floor']}{verdict})"]
    others = {"field": "the field of this kernel", "semiclassical": "the semiclassical law"}
    known = [f"{name} by TV {told[n]}" for n, name in others.items() if np.isfinite(tv[n]).all()]
    return words + ([", ".join(known)] if known else [])


def _doubts(ds: xarray.Dataset, by: str) -> list[str]:
    words = []
    for label, one in _conditions(ds):
        where = f" at {by} = {label}" if label else ""
        if not bool(one.valid):
            words.append(f"the kernel declares itself invalid{where} ({str(one.why.item()).rstrip('.')})")
        lost = {n: int(one[f"lost_{n}"]) for n in ("ensemble", "field", "closure") if f"lost_{n}" in one}
        if any(lost.values()):
            counted = ", ".join(f"{count} of the {n}" for n, count in lost.items() if count)
            words.append(f"left out because they diverged{where}: {counted}")
    return words


def table(ds: xarray.Dataset) -> str:
    """The numbers of a comparison in aligned columns: a row for each condition, then one for each time."""
    by = ds.condition.attrs["long_name"] if "condition" in ds.dims else ""
    law = [f"tv_{n}" for n in ("field", "closure", "semiclassical", "floor")] if "tv_closure" in ds else []
    head = [by, "members", "measured/predicted", "median", "5–95 % of places", "skewed", "kurtotic"]
    rows = [head + [n.removeprefix("tv_").join(("TV ", "")) for n in law]]
    for label, one in _conditions(ds):
        numbers = [label, str(int(one.members)), f"{float(one.ratio_pooled):.3f} ± {float(one.ratio_pooled_se):.3f}"]
        numbers += [f"{float(one.ratio_median):.3f}", f"{float(one.ratio_low):.2f}–{float(one.ratio_high):.2f}"]
        numbers += [f"{100 * float(one[n]):.0f} %" for n in ("skewed_share", "kurtotic_share")]
        rows.append(numbers + [f"{float(one[n]):.3f}" for n in law])
    each = [["t", *(f"{by} = {label}" if label else "measured/predicted" for label, _ in _conditions(ds))]]
    for k, t in enumerate(ds.t.values):
        cells = [one.isel(t=k) for _, one in _conditions(ds)]
        each.append([f"{t:.3g}", *(f"{float(c.ratio_by_time):.3f} ± {float(c.ratio_by_time_se):.3f}" for c in cells)])
    return "\n\n".join(_aligned([r[not by :] if block is rows else r for r in block]) for block in (rows, each))


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


# --- as a picture ---------------------------------------------------------------------------------------------------


@styled
def comparison(ds: xarray.Dataset) -> Figure:
    """Predicted and measured variance, laws, and Gaussianity; a column (in the plane a row) for each condition.

    Up to four conditions and four times are shown. Error bars are one standard error.
    """
    require("predicted" in ds and "measured" in ds, "comparison draws what vkernel.compare returns.")
    by = ds.condition.attrs["long_name"] if "condition" in ds.dims else ""
    chosen = [one for k, one in enumerate(_conditions(ds)) if k in _few(ds.sizes.get("condition", 1))]
    return (_lines if ds.sizes["axis"] == 1 else _rows)(Figure(), chosen, by)


def _few(count: int) -> list[int]:
    return sorted({round(k) for k in np.linspace(0, count - 1, min(MOST, count))})


def _lines(figure: Figure, chosen: list[tuple[str, Any]], by: str) -> Figure:
    """One dimension: variance and ratio against x, laws and Gaussianity below, or beside if there is one condition."""
    single, laws = len(chosen) == 1, "density" in chosen[0][1]
    panels = ["variance", "ratio", *(["laws"] if laws else []), "gauss"]
    if single:
        figure.set_size_inches(10.6, 6.2)
        right = ["laws", "laws", "gauss"] if laws else ["gauss"] * 3
        left = ["variance", "variance", "ratio"]
        columns: list[Any] = [figure.subplot_mosaic([list(row) for row in zip(left, right, strict=True)])]
    else:
        heights = [{"variance": 2.6, "ratio": 1.5, "laws": 2.4, "gauss": 2.2}[p] for p in panels]
        figure.set_size_inches(3.5 * len(chosen) + 0.6, sum(heights) + 1.2)
        axes = figure.subplots(len(panels), len(chosen), squeeze=False, height_ratios=heights, sharey="row")
        columns = [dict(zip(panels, column, strict=True)) for column in axes.T]
    for k, ((label, one), column) in enumerate(zip(chosen, columns, strict=True)):
        _variances(column["variance"], column["ratio"], one, k > 0)
        _gaussianity(column["gauss"], one)
        if laws:
            _curves(column["laws"], one)
        column["variance"].set_title(f"{by} = {label}" if label else "Variance of the learned score")
        for name in panels if k else ():
            column[name].set_ylabel("")
    for name, title in (("gauss", "Law of the score over members"), ("laws", "What is sampled")):
        if single and name in panels:
            columns[0][name].set_title(title)
    _legend(figure, columns[0]["variance"], columns[0]["gauss"], ["predicted by V", "measured ± se"])
    return figure


def _rows(figure: Figure, chosen: list[tuple[str, Any]], by: str) -> Figure:
    """Two dimensions or more: a row for each condition."""
    plane = "density" in chosen[0][1]
    count = 2 + (len(NAMES) if plane else 0)
    figure.set_size_inches(2.95 * count + 0.9, 2.9 * len(chosen) + 0.9)
    axes = figure.subplots(len(chosen), count, squeeze=False)
    for k, ((label, one), row) in enumerate(zip(chosen, axes, strict=True)):
        _scatter(row[0], one)
        _gaussianity(row[1], one)
        if plane:
            _maps(figure, row[2:], one, titled=k == 0)
        row[0].set_ylabel((f"{by} = {label}\n\n" if label else "") + "measured / predicted")
        if k == 0:
            row[0].set_title("Variance of the score")
            row[1].set_title("Law over members")
        for ax in row if k + 1 < len(chosen) else ():
            ax.set_xlabel("")
    _legend(figure, axes[0, 0], axes[0, 1], ["measured = predicted", "measured ± se"])
    return figure


def _times(one: Any) -> list[tuple[int, str, str]]:
    """Up to four times: index, colour, label."""
    return [(k, lines()[n], f"t = {float(one.t[k]):.3g}") for n, k in enumerate(_few(one.sizes["t"]))]


def _variances(above: Axes, below: Axes, one: Any, shared: bool) -> None:
    x = array(one.x)
    order, thin = np.argsort(x), max(1, len(x) // 30)
    x = x[order]
    for k, colour, label in _times(one):
        names = ("predicted", "measured", "measured_se", "ratio", "ratio_se", "bulk")
        predicted, measured, se, ratio, ratio_se, bulk = (array(one[n][k])[order] for n in names)
        above.plot(x, predicted, color=colour, lw=1.6)
        some = slice(thin // 2, None, thin)
        above.errorbar(x[some], measured[some], se[some], color=colour, ls="", marker="o", ms=3.2, lw=1, label=label)
        inside = np.where(bulk > 0, ratio, np.nan)
        below.fill_between(x, inside - ratio_se, inside + ratio_se, color=colour, alpha=0.2, lw=0)
        below.plot(x, inside, color=colour, lw=1.4)
    below.axhline(1, color=ink(), lw=0.9, ls=":")
    above.set(yscale="log", ylabel="tr Cov of the score\n(1 / data unit²)", xlim=(x[0], x[-1]), xticklabels=[])
    below.set(xlabel="x (data unit)", ylabel="measured /\npredicted", xlim=(x[0], x[-1]), yscale="log")
    low, high = below.get_ylim() if shared else (1.0, 1.0)
    ratio = array(one.ratio)[array(one.bulk) > 0]
    low, high = min(low, max(0.2, 0.85 * ratio.min()), 0.7), max(high, min(5, 1.15 * ratio.max()), 1.4)
    below.set_ylim(low, high)
    below.set_yticks(*plain_ticks(np.array([low, high])))
    for ax in (above, below):
        ax.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        ax.minorticks_off()


def _scatter(ax: Axes, one: Any) -> None:
    """measured / predicted against predicted: variances span decades, beside which a ratio of 2 would not be seen."""
    for k, colour, label in _times(one):
        keep = array(one.bulk[k]) > 0
        predicted, ratio, se = (array(one[n][k])[keep] for n in ("predicted", "ratio", "ratio_se"))
        ax.errorbar(predicted, ratio, se, color=colour, ls="", marker="o", ms=3, lw=0.8, alpha=0.75, label=label)
    ax.axhline(1, color=ink(), lw=1, ls=":")
    ax.set(xscale="log", xlabel="predicted tr Cov (1 / data unit²)", ylim=(0, None))
    ax.minorticks_off()


def _curves(ax: Axes, one: Any) -> None:
    places = array(one.bin)
    half = (places[1] - places[0]) / 2 if len(places) > 1 else 0.5
    edges = np.append(places - half, places[-1] + half)
    styles = {"ensemble": (lines()[5], "-"), "field": (lines()[0], "-"), "semiclassical": (lines()[1], (0, (4, 2)))}
    for name, (colour, ls) in styles.items():
        density = array(one.density.sel(law=name))
        if np.isfinite(density).all():
            fill = name == "ensemble"
            label = NAMES[name] + ("" if fill else f", TV {float(one[f'tv_{name}']):.2f}")
            look: dict[str, Any] = {"alpha": 0.35, "lw": 0} if fill else {"lw": 1.5, "ls": ls}
            ax.stairs(density, edges, fill=fill, color=colour, label=label, **look)
    ax.set(xlabel="x at eps (data unit)", ylabel="density", yscale="log", xlim=(edges[0], edges[-1]))
    top = float(np.nanmax(array(one.density)))
    ax.set_ylim(top / 3e4, top * 300)
    ax.set_yticks([10.0**k for k in range(-9, 6) if top / 3e4 <= 10.0**k <= top])
    ax.minorticks_off()
    ax.legend(loc="upper center", fontsize=8.5)
    ax.grid(visible=False, axis="x")


def _maps(figure: Figure, axes: Any, one: Any, titled: bool) -> None:
    places = [array(one.bin), array(one.bin2)]
    halves = [(p[1] - p[0]) / 2 if len(p) > 1 else 0.5 for p in places]
    extent = tuple(v for p, h in zip(places, halves, strict=True) for v in (p[0] - h, p[-1] + h))
    top = float(np.nanmax(array(one.density)))
    for ax, (name, words) in zip(axes, NAMES.items(), strict=True):
        shown = array(one.density.sel(law=name)).T
        image = ax.imshow(shown, extent=extent, origin="lower", aspect="equal", norm=LogNorm(top / 1e3, top, clip=True))
        ax.grid(visible=False)
        ax.set(xlabel="x₁", ylabel="x₂" if ax is axes[0] else "")
        tv = "" if name == "ensemble" else f"TV {float(one[f'tv_{name}']):.2f}"
        ax.text(0.04, 0.96, tv, transform=ax.transAxes, va="top", color="white", size=9.5)
        if titled:
            ax.set_title(words)
    bar = figure.colorbar(image, ax=list(axes), shrink=0.85, aspect=28, pad=0.015)
    bar.set_label("density (1 / data unit²)")
    bar.outline.set_visible(False)


def _gaussianity(ax: Axes, one: Any) -> None:
    """Skewness and excess kurtosis place by place, with the rectangle that holds 95 % of each for a Gaussian."""
    m = int(one.members)
    wide, tall = 1.96 * math.sqrt(6 / m), 1.96 * math.sqrt(24 / m)
    box = Rectangle((-wide, -tall), 2 * wide, 2 * tall, color=ink(), alpha=0.16, lw=0, zorder=0)
    box.set_label("95 % if Gaussian")
    ax.add_patch(box)
    for k, colour, _ in _times(one):
        keep = array(one.bulk[k]) > 0
        skewness, kurtosis = (array(one[n][k])[keep].ravel() for n in ("skewness", "kurtosis"))
        ax.plot(skewness, kurtosis, "o", color=colour, ms=3, ls="", alpha=0.65, mew=0)
    ax.set_yscale("symlog", linthresh=max(2 * tall, 1))
    ax.set(xlabel="skewness", ylabel="excess kurtosis")


def _legend(figure: Figure, left: Axes, right: Axes, words: list[str]) -> None:
    """What lines and points are, the times, and the rectangle, once for the whole picture."""
    line = Line2D([], [], color=ink(), lw=1.6, ls=":" if "=" in words[0] else "-")
    dot = Line2D([], [], color=ink(), ls="", marker="o", ms=3.5)
    (handles, labels), (box, told) = left.get_legend_handles_labels(), right.get_legend_handles_labels()
    figure.legend([line, dot, *handles, *box], [*words, *labels, *told], loc="outside lower center", ncols=7)
