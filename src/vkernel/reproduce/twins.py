"""Networks on images that were trained with different noise of their targets: the rows of the scorecard on networks.

They take a GPU. ``python docs/target_noise/page.py`` decides the rules (:mod:`vkernel.reports.target_noise.rules`) from
the results of the study and writes them, with the numbers that decided them, to ``STORED``, which this exhibit reads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from types import SimpleNamespace
from typing import Any

import numpy as np

from vkernel import plots
from vkernel.reports.target_noise.report import words
from vkernel.reproduce.exhibit import Exhibit, Page, Run

STORED = resources.files("vkernel.reproduce") / "results" / "target_noise.json"
RATIO, GAP = "V", "frontier_gap"  # the quantities that are drawn
UNKNOWN = (math.nan,) * 3


def twins(run: Run) -> Exhibit:
    """Count in how many cells each rule holds, and draw V and the frontier of c = 1 against c = 0."""
    held = read()
    found = [o for o in held["outcomes"] if o["verdict"] != "not run"]
    first = [o for o in found if o["of"] == "c = 1"]
    cells = list(dict.fromkeys(o["cell"] for o in first))
    drawn = {
        key: {variant: _curve(first, cells, variant, key) for variant in ("rho", "network")} for key in (RATIO, GAP)
    }
    numbers = np.stack([*drawn[RATIO].values(), drawn[GAP]["rho"]])
    arrays = {"cells": cells, "numbers": np.nan_to_num(numbers, nan=0.0), "known": np.isfinite(numbers)}
    page = Page(run, "twins", arrays, held=held, first=first, others=[o for o in found if o not in first])
    page.values |= {"t": {rule: tally([o for o in first if o["rule"] == rule]) for rule in words()["rules"]}}
    page.values["shape"] = tally([o for o in found if o["rule"] == "shape" and o["variant"] == "white"])
    alike = [dict(o["groups"])["held_out"] for o in first if o["rule"] == "bertrand" and o["groups"]]
    page.values["held_out"] = tally([{"verdict": verdict, "numbers": ""} for verdict in alike])
    page.values |= {"rules": words()["rules"], "variants": words()["variants"], "count": len(cells)}
    ratio = {words()["variants"][name]: curve for name, curve in drawn[RATIO].items()}
    titles = "V at c = 1 / V at c = 0", "log train–test gap, c = 1 less c = 0"
    columns = dict(zip(titles, (ratio, {"c = 1 less c = 0": drawn[GAP]["rho"]}), strict=True))
    page.picture("twins", plots.twin_ratios, cells, columns, dict(zip(titles, ((1, 1.5), (0,)), strict=True)))
    return page.exhibit(1.0)


def read() -> dict[str, Any]:
    """Return the stored outcomes and numbers."""
    found: dict[str, Any] = json.loads(STORED.read_text(encoding="utf-8"))
    return found


def tally(outcomes: Sequence[dict[str, Any]]) -> SimpleNamespace:
    """Count the verdicts of some outcomes."""
    counts = {v: sum(o["verdict"] == v for o in outcomes) for v in ("holds", "fails", "undecided")}
    return SimpleNamespace(**counts, total=len(outcomes), rows=[o | {"short": _short(o)} for o in outcomes])


def _short(outcome: Mapping[str, Any]) -> str:
    """Return the quantity that decides an outcome, or V where it is one of several."""
    parts = str(outcome["numbers"]).split("; ")
    return next((p for p in parts if p.startswith("V ×")), parts[0])


def _curve(outcomes: Sequence[dict[str, Any]], cells: Sequence[str], variant: str, name: str) -> np.ndarray:
    """Return a quantity of the rule ``vastola`` with its interval in every cell, ``(3, cells)``."""
    found = {}
    for o in outcomes:
        if (o["rule"], o["variant"]) == ("vastola", variant):
            parts = (p for p in o["parts"] if p["name"] == name and p["low"] is not None)
            found[o["cell"]] = next(((p["value"], p["low"], p["high"]) for p in parts), UNKNOWN)
    return np.array([found.get(cell, UNKNOWN) for cell in cells], dtype=float).T
