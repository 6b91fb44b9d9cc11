"""Figures of a monitored run: curves with intervals against the steps of training.

Curves are ``(3, len(steps))``: value, low end and high end. The axis of steps is logarithmic, without step 0, as soon
as three evaluations are later."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from vkernel.core.errors import require
from vkernel.plots.base import DASHED, Curves, Values, array
from vkernel.plots.curves import Panel, Range, curve_panels, panel, panel_grid

__all__ = ["training_curves", "training_levels"]
LATER = 3  # evaluations after step 0 from which on the axis is logarithmic
SETS = {"train": "training images", "test": "held-out images"}


def training_curves(
    name: str,
    steps: Values,
    curves: Curves,
    levels: Mapping[str, float | Range] | None = None,
    marks: Mapping[str, float | Range] | None = None,
) -> Figure:
    """Draw curves of a run in the panel ``name`` of ``panels.toml``; ``levels`` and ``marks`` are reference lines."""
    x, kept, log = _axis(steps)
    shown = {label: array(curve, 2, label)[:, kept] for label, curve in curves.items()}
    styles = ["-" if label in ("", *SETS.values()) or len(shown) < 3 else DASHED for label in shown]
    looks = {"log": log + ("y" if name == "training_error" else ""), "styles": styles}
    return curve_panels(panel(name, x, shown, levels=levels or {}, marks=marks or {}, **looks))


def training_levels(
    ratio: Values, steps: Values, curves: Mapping[str, Values], references: Mapping[str, Values]
) -> Figure:
    """Draw errors by noise level, one panel each: ``curves`` are ``(3, L, len(steps))``, ``references (L,)`` lines."""
    (x, kept, log), at = _axis(steps), array(ratio, 1, "noise levels")
    panels: list[Panel] = []
    for k, value in enumerate(at):
        shown = {label: array(curve, 3, label)[:, k][:, kept] for label, curve in curves.items()}
        lines = {label: float(array(v)[k]) for label, v in references.items() if array(v)[k] > 0}
        panels.append(panel("training_level", x, shown, title=f"σ/α = {value:.3g}", levels=lines, log=log + "y"))
    return panel_grid(panels)


def _axis(steps: Values) -> tuple[np.ndarray, np.ndarray, str]:
    """Return the steps that are drawn, which these are, and the logarithmic axis."""
    x = array(steps, 1, "steps")
    require(x.size, "There is no evaluation to draw.")
    log = int((x > 0).sum()) >= LATER
    kept = x > 0 if log else np.full(x.shape, True)
    return x[kept], kept, "x" if log else ""
