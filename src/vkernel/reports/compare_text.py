"""The result of :func:`vkernel.compare` in words: names and units of its variables, a sentence, and a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import xarray

AGREE = 0.15  # a pooled ratio this close to 1, or within three standard errors, counts as agreement
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
    "mean_predicted": ("mean score that the theory predicts", SCORE),
    "distance": ("squared distance of the mean score from the theory, unbiased", VARIANCE),
    "mean_error_by_time": ("distance / squared norm of the theory's score, pooled over the bulk", "1"),
    "mean_error_pooled": ("distance / squared norm, pooled over the bulk and averaged over times", "1"),
    "skewness": ("skewness of the score over members", "1"),
    "kurtosis": ("excess kurtosis of the score over members", "1"),
    "skewed_share": ("share of the bulk with |skewness| > 2 se", "1"),
    "kurtotic_share": ("share of the bulk with |excess kurtosis| > 2 se", "1"),
    "density": ("density of x at eps, all samples counted", "1/(data unit)^d"),
    "tv_field": ("total variation, ensemble against Gaussian field of V", "1"),
    "tv_closure": ("total variation, ensemble against Gaussian field of its own covariance", "1"),
    "tv_semiclassical": ("total variation, ensemble against semiclassical law of V", "1"),
    "tv_theory": ("total variation, ensemble against the theory's probability flow", "1"),
    "tv_floor": ("total variation that finite numbers of members alone give", "1"),
    "members": ("finite members", "1"),
    "valid": ("whether the kernel's assumptions hold, as it declares", ""),
    "why": ("the kernel's statement on its validity", ""),
}
ENDINGS = {"_se": "standard error", "_low": "low end, 95 %", "_high": "high end, 95 %"}


def attributes(name: str) -> dict[str, str]:
    """Return the long name and the units of a variable."""
    if name.startswith("lost_"):
        long, units = f"{name.removeprefix('lost_')}: members whose samples diverged", "1"
    elif name.endswith("_floor"):
        long, units = ABOUT["tv_floor"]
    elif name in ABOUT:
        long, units = ABOUT[name]
    else:
        stem, _, ending = name.rpartition("_")
        long, units = ABOUT[stem]
        long = f"{long}: {ENDINGS[f'_{ending}']}"
    return {"long_name": long, "units": units}


def _conditions(ds: xarray.Dataset) -> Iterator[tuple[str, xarray.Dataset]]:
    """Yield each condition with its label, which is empty if there is only one."""
    if "condition" not in ds.dims:
        yield "", ds
        return
    for k, label in enumerate(ds.condition.values):
        yield f"{label:.3g}" if isinstance(label, float) else str(label), ds.isel(condition=k)


def _quantity(ds: xarray.Dataset) -> str:
    return str(ds.condition.attrs["long_name"]) if "condition" in ds.dims else ""


def summary(ds: xarray.Dataset) -> str:
    """Return one sentence: whether theory and Gaussian closure agree with the ensemble, and what was left out."""
    parts = _variance(ds) if "ratio" in ds else _mean(ds)
    return "; ".join([*parts, *(_closure(ds) if "tv_closure" in ds else []), *_warnings(ds)]) + "."


def _mean(ds: xarray.Dataset) -> list[str]:
    """State how far the mean score is from the theory, and the distance between the laws."""
    out = []
    for label, one in _conditions(ds):
        where = f"at {_quantity(ds)} = {label} " if label else ""
        error, se = (100 * float(one[f"mean_error_pooled{end}"]) for end in ("", "_se"))
        law = (
            f", and its law by TV {float(one.tv_theory):.2f} (floor {float(one.tv_floor):.2f})"
            if "tv_theory" in one
            else ""
        )
        out.append(f"{where}the mean score differs from the theory by {error:.2g} ± {se:.1g} % of its square{law}")
    return out


def _variance(ds: xarray.Dataset) -> list[str]:
    """State the largest deviation where V agrees at every time, and the ratio where it does not."""
    agree: dict[str, tuple[float, float]] = {}
    wrong = []
    for label, one in _conditions(ds):
        ratio, error = one.ratio_by_time.values, one.ratio_by_time_se.values
        worst = int(np.argmax(abs(ratio - 1)))
        if bool((abs(ratio - 1) <= np.maximum(AGREE, 3 * error)).all()):
            agree[label] = abs(ratio[worst] - 1), error[worst]
            continue
        value, se, when = float(one.ratio_pooled), float(one.ratio_pooled_se), ""
        if abs(value - 1) <= max(AGREE, 3 * se):
            value, se, when = ratio[worst], error[worst], f" at t = {float(one.t[worst]):.3g}"
        where = f"at {_quantity(ds)} = {label} " if label else ""
        wrong.append(f"{where}the measured variance is {value:.2g} ± {se:.1g} times the predicted{when}")
    if not agree:
        return wrong
    most, se = (100 * max(column) for column in zip(*agree.values(), strict=True))
    return [f"theory within {most:.0f} % (± {se:.0f} %) of the measured variance{_where(ds, list(agree))}", *wrong]


def _where(ds: xarray.Dataset, labels: list[str]) -> str:
    """Name the conditions that agree, as a range if they are at one end of an order."""
    by = _quantity(ds)
    if not by:
        return f" (ratio {float(ds.ratio_low):.2g} to {float(ds.ratio_high):.2g} over 5–95 % of places)"
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


def _closure(ds: xarray.Dataset) -> list[str]:
    names = {"closure": "", "floor": "", "field": "the field of this kernel", "semiclassical": "the semiclassical law"}
    tv = {n: [float(one[f"tv_{n}"]) for _, one in _conditions(ds)] for n in names}
    shown = {n: ", ".join(f"{v:.2f}" for v in values) for n, values in tv.items()}
    labels = ", ".join(label for label, _ in _conditions(ds))
    where = f" at {_quantity(ds)} = {labels}" if labels else ""
    chance = all(v <= 1.25 * floor for v, floor in zip(tv["closure"], tv["floor"], strict=True))
    verdict = ": no more than so few members show by chance" if chance else ""
    closure = f"the Gaussian closure is off by TV {shown['closure']}{where} (floor {shown['floor']}{verdict})"
    known = [f"{name} by TV {shown[n]}" for n, name in names.items() if name and np.isfinite(tv[n]).all()]
    return [closure, ", ".join(known)] if known else [closure]


def _warnings(ds: xarray.Dataset) -> list[str]:
    out = []
    for label, one in _conditions(ds):
        where = f" at {_quantity(ds)} = {label}" if label else ""
        if "valid" in one and not bool(one.valid):
            out.append(f"the kernel declares itself invalid{where} ({str(one.why.item()).rstrip('.')})")
        lost = {n: int(one[f"lost_{n}"]) for n in ("ensemble", "field", "closure", "theory") if f"lost_{n}" in one}
        counted = ", ".join(f"{count} of the {n}" for n, count in lost.items() if count)
        if counted:
            out.append(f"left out because they diverged{where}: {counted}")
    return out


def table(ds: xarray.Dataset) -> str:
    """Return the numbers in aligned columns: a row for each condition, then one for each time."""
    by, conditions = _quantity(ds), list(_conditions(ds))
    name, head = ("ratio", "measured/predicted") if "ratio" in ds else ("mean_error", "error of the mean")
    rows: list[list[str]] = []
    for label, one in conditions:
        row = {by: label, "members": str(int(one.members)), head: _cell(one, f"{name}_pooled")}
        if "ratio" in ds:
            row["median"] = f"{float(one.ratio_median):.3f}"
            row["5–95 % of places"] = f"{float(one.ratio_low):.2f}–{float(one.ratio_high):.2f}"
        shares = {n: float(one[f"{n}_share"]) for n in ("skewed", "kurtotic")}
        row |= {n: "–" if share != share else f"{100 * share:.0f} %" for n, share in shares.items()}
        laws = [n for n in ("field", "closure", "semiclassical", "theory", "floor") if f"tv_{n}" in ds]
        row |= {f"TV {n}": f"{float(one[f'tv_{n}']):.3f}" for n in laws}
        columns = list(row)[not by :]
        rows += [columns] * (not rows) + [[row[c] for c in columns]]
    each = [["t", *(f"{by} = {label}" if label else head for label, _ in conditions)]]
    for k, t in enumerate(ds.t.values):
        each.append([f"{t:.3g}", *(_cell(one.isel(t=k), f"{name}_by_time") for _, one in conditions)])
    return f"{_aligned(rows)}\n\n{_aligned(each)}"


def _cell(one: xarray.Dataset, name: str) -> str:
    return f"{float(one[name]):.3f} ± {float(one[f'{name}_se']):.3f}"


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)
