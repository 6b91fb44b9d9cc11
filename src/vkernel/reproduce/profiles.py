"""Profiles against trained networks: which training points are reproduced, and what predicts them.

Nothing is trained here. The numbers are those of experiments/profile_check.py, which the package stores.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from vkernel import plots
from vkernel.core.estimate import stacked
from vkernel.reports.profile.tested import RULES, Cell, results
from vkernel.reproduce.exhibit import Exhibit, Page, Run, Values, one_thread

ORDERS = {
    "own collapse time": "profile single",
    "number of copies": "multiplicity single",
    "distance to the nearest point": "distance single",
    "collapse time, untrained control": "profile control",
}
GROUPS = {"ordinary": "ordinary", "given twice": "x2", "4 times": "x4", "8 times": "x8", "isolated": "isolated"}
STYLES = ("-", "-", "-", "--")
KINDS = {"plane": "MLPs in the plane", "digits": "U-Nets on digits"}


def curves(cells: Sequence[Cell], names: dict[str, str]) -> dict[str, Tensor]:
    """Return value, low end and high end along the cells for each label."""
    return {label: stacked([cell(name) for cell in cells]).stack() for label, name in names.items()}


@one_thread()
def profiles(run: Run) -> Exhibit:
    """Show how well the order of a profile, and simpler ones, predicted what trained networks reproduced."""
    found = results()
    cells = found.copying
    kept = [(cell, name, cell(name)) for cell in cells for name in cell.numbers if " auc " in name or "reprod" in name]
    arrays: Values = {"name": [f"{cell.kind} {cell.steps} {name}" for cell, name, _ in kept]}
    arrays["number"] = torch.tensor([e.fields for _, _, e in kept], dtype=torch.float64)
    values: Values = {"found": found, "cells": cells, "decided": found.decided, "kinds": KINDS, "rules": RULES}
    values["bare"] = [cell for cell in found.cells if cell not in cells]
    networks = (int(cell.numbers["copied samples"][4]) * found.sizes[cell.kind]["members"] for cell in cells)
    values["counted"] = sum(networks)
    last = {kind: [cell for cell in cells if cell.kind == kind][-1] for kind in KINDS}
    first = {kind: next(cell for cell in cells if cell.kind == kind) for kind in KINDS}
    page = Page(run, "profiles", arrays, **values, last=last, first=first, groups=GROUPS)
    by_order, by_group = [], []
    for kind, title in KINDS.items():
        some = [cell for cell in cells if cell.kind == kind]
        steps = [cell.steps for cell in some]
        looks: Values = {"xlabel": "training steps", "log": "x", "top": 1.03}
        lines: Values = looks | {"ylabel": "AUC", "levels": {"chance": 0.5}, "styles": STYLES}
        for rule, words in RULES.items():
            names = {label: f"{rule} auc all {name}" for label, name in ORDERS.items()}
            by_order.append(plots.Panel(steps, curves(some, names), title=f"{title}:\n{words}", **lines))
        names = {label: f"copied reproduced {group} single" for label, group in GROUPS.items()}
        by_group.append(plots.Panel(steps, curves(some, names), ylabel="share reproduced", title=title, **looks))
    page.picture("profiles", plots.curve_panels, *by_order, share=True)
    page.picture("profiles-groups", plots.curve_panels, *by_group, share=True, key="groups")
    return page.exhibit(1.0)
