r"""Compare the counts of :mod:`experiments.profile_check` with profiles: ``profile_check.json``, and tables.

The numbers of the stored counts go into the package, ``vkernel/reports/profile/tested.json``, and the tables into
docs/howto/profile.md.

A member *reproduces* a training point if at least 1/(2W) of its samples count for it, W the number of training items: a
model that draws from the training set does so at the rate 1/W for every item. Samples count by one of two rules:
*copied*, :math:`d_1 < d_2/3`, which isolated points satisfy in a wider ball, and *close*, :math:`d_1 < r`, with one
radius for all points. *Pooled* are the samples of all members of a set. *Rate* is the number of samples that count for
a point over the number that a model which draws from the training set would make: 1 if each item is copied as often as
it is given, so that points given k times are compared with k times the copies.

Each order of the points predicts what is reproduced with :math:`\mathrm{AUC} = P(a < b)`, a a point of the set that is
not reproduced and b one that is. AUCs are taken within a set and a member, then averaged over members; the interval is
Student's over sets, cut at 0 and 1; fewer than three sets give none. Sets or members in which all points are
reproduced, or none, have no AUC and are left out. Orders are the profile's, by own collapse time, and two simpler ones,
the number of copies and the distance to the nearest neighbour. *Scopes*: all points; those given once; those given once
that were not planted as isolated.

The *control* is the training set smoothed by :math:`N(0, h^2)`, h such that the same share of samples counts. It has
the duplicates and the distances of the set but nothing was trained. What its AUC explains is geometry of the rule.

*Pairs*: the label is a sample between the two points; the orders are the share of the target noise (zero for pairs that
the profile does not list) and the smallness of the distance. Scopes: pairs of which one is among the five nearest
neighbours of the other; pairs that the profile lists.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections import defaultdict
from pathlib import Path

import jinja2
import torch
from torch import Tensor

import vkernel as vk
from experiments.profile_check import DESIGNS, PROCESS, SMOKE, Arrays, Design, Planted, count, planted, read
from vkernel.core import rng
from vkernel.core.estimate import Estimate, auc
from vkernel.core.files import write as write_file
from vkernel.metrics import nearest
from vkernel.reports import html
from vkernel.reports.profile import tested

RULES = {"copied": 1, "close": 2}  # rows of the counts
SMOOTHED = 8192  # samples of the control
NEIGHBOURS = 5
TOP = 10  # points that a profile lists by default
RESULTS = Path(__file__).resolve().parent / "results"
PAGE = RESULTS.parents[1] / "docs" / "howto" / "profile.md"
Found = dict[tuple[str, ...], float]


def area(order: Tensor, hit: Tensor) -> float:
    """Return the AUC of an order of points for marked ones, NaN without both kinds."""
    if hit.all() or not hit.any():
        return math.nan
    with warnings.catch_warnings():  # one point of a kind has no variance; the error is not used
        warnings.simplefilter("ignore")
        return float(auc(order[~hit].double(), order[hit].double()).value)


def mean(values: list[float]) -> float:
    """Return the mean of numbers that are known."""
    known = [v for v in values if not math.isnan(v)]
    return sum(known) / len(known) if known else math.nan


class Orders:
    """What is known of a set before training: orders of its points and pairs."""

    def __init__(self, given: Planted) -> None:
        self.given, self.n, self.items = given, len(given.points), int(given.copies.sum())
        self.fair = given.copies / given.copies.sum()  # rates of a model that draws from the training set
        first = (given.copies.cumsum(0) - given.copies).tolist()  # places of the distinct points among the items
        place = {item: point for point, item in enumerate(first)}
        profile = vk.profile(given.data, PROCESS, top=self.n, queries=64)
        collapse = torch.zeros(self.n, dtype=torch.float64)
        for one in profile.isolated:
            collapse[place[one.index]] = one.t
        gap, near = nearest(given.points.flatten(1), vk.Empirical(given.points), NEIGHBOURS, torch.arange(self.n))
        self.points = {"profile": collapse, "multiplicity": given.copies.double(), "distance": gap[:, 0]}
        once = given.copies == 1
        self.scopes = {"all": torch.ones(self.n, dtype=torch.bool), "once": once, "ordinary": once & ~given.isolated}
        self.groups = {f"x{k}": given.copies == k for k in given.copies.unique().tolist() if k > 1}
        self.groups = {"ordinary": self.scopes["ordinary"]} | self.groups | {"isolated": given.isolated}
        share = torch.zeros(self.n, self.n, dtype=torch.float64)
        for pair in profile.boundary_pairs:
            i, j = sorted((place[pair.i], place[pair.j]))
            share[i, j] = pair.share
        adjacent = torch.zeros(self.n, self.n, dtype=torch.bool)
        adjacent[torch.arange(self.n)[:, None], near] = True
        flat = given.points.flatten(1).double()
        self.pairs = {"share": share, "closeness": -torch.cdist(flat, flat)}
        self.pair_scopes = {"neighbours": (adjacent | adjacent.T).triu(1), "listed": share > 0}

    def smoothed(self, share: float, row: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return the counts of the control with this share of samples that count by the rule ``row``."""
        data, source = self.given.data, rng.stream(seed, "control")
        which = torch.randint(data.n, (SMOOTHED,), generator=source)
        noise = torch.randn(SMOOTHED, *data.shape, generator=source)
        low, high = math.log(1e-3), math.log(10.0)
        for _ in range(12):
            h = math.exp((low + high) / 2)
            found = count((data[which] + h * noise)[None], self.given)
            low, high = (math.log(h), high) if float(found[0][row].sum()) / SMOOTHED > share else (low, math.log(h))
        return found


def compare(orders: Orders, design: Design, counts: Tensor, between: Tensor, seed: int) -> Found:
    """Return the numbers of one set and one length by their names."""
    M, total, found = design.members, design.members * design.samples, Found()
    for rule, row in RULES.items():
        share = float(counts[row].sum()) / total
        control, pairs = orders.smoothed(share, row, seed)
        views = {"single": counts[row] / design.samples, "pooled": counts[row].sum(0, keepdim=True) / total}
        views["control"] = control[row] / SMOOTHED
        found[rule, "samples"] = share
        least = 0.5 / orders.items
        hits = {view: rate >= least for view, rate in views.items()}
        for view, hit in hits.items():
            for group, inside in orders.groups.items():
                found[rule, "reproduced", group, view] = float(hit[:, inside].double().mean())
                if view != "pooled":  # equal to the mean of single networks
                    found[rule, "rate", group, view] = float((views[view] / orders.fair)[:, inside].mean())
            found[rule, "reproduced", "all", view] = float(hit.double().mean())
            top = orders.points["profile"].argsort(descending=True)[:TOP]
            found[rule, "reproduced", "listed", view] = float(hit[:, top].double().mean())
            for scope, inside in orders.scopes.items():
                for name, order in orders.points.items():
                    if name == "multiplicity" and scope != "all":
                        continue  # all are given once
                    area_of = [area(order[inside], one[inside]) for one in hit]
                    found[rule, "auc", scope, name, view] = mean(area_of)
        if rule == "copied":
            found |= _pairs(orders, between, pairs, M)
    return found


def _pairs(orders: Orders, between: Tensor, control: Tensor, members: int) -> Found:
    def marked(rows: Tensor, member: int | None = None) -> Tensor:
        rows = rows if member is None else rows[rows[:, 0] == member]
        hit = torch.zeros(orders.n, orders.n, dtype=torch.bool)
        hit[rows[:, 1].long(), rows[:, 2].long()] = True
        return hit

    single = [marked(between, m) for m in range(members)]
    found = Found()
    for view, hits in {"single": single, "pooled": [marked(between)], "control": [marked(control)]}.items():
        for scope, inside in orders.pair_scopes.items():
            found["pairs", "mixed", scope, view] = mean([float(hit[inside].double().mean()) for hit in hits])
            for name, order in orders.pairs.items():
                found["pairs", "auc", scope, name, view] = mean([area(order[inside], hit[inside]) for hit in hits])
    return found


def _differences(found: Found) -> Found:
    """Return AUCs of the profile less those of each other order, AUCs of trained networks less those of the control,
    and what duplicates and isolated points have more than ordinary points."""
    out = Found()
    for (*head, name, view), value in list(found.items()):
        if "auc" in head and name in ("profile", "share") and view != "control":
            for other in ("multiplicity", "distance", "closeness"):
                if (*head, other, view) in found:
                    out[(*head, f"{name} - {other}", view)] = value - found[(*head, other, view)]
        if "auc" in head and name in ("profile", "multiplicity", "share") and view == "pooled":
            out[(*head, name, "pooled - control")] = value - found[(*head, name, "control")]
        if {"reproduced", "rate"} & set(head) and name in ("x2", "x4", "x8", "isolated") and view == "single":
            out[(*head, f"{name} - ordinary", view)] = value - found[(*head, "ordinary", view)]
    return out


def summarise(kind: str, arrays: Arrays, pool: Tensor | None, small: bool = False) -> dict[str, object]:
    """Return the numbers of one kind of set: its sizes and, by length, estimates over sets."""
    design = (SMOKE if small else DESIGNS)[kind]
    numbers = sorted({int(name.split("_")[0]) for name in arrays})
    by_length: dict[int, dict[tuple[str, ...], list[float]]] = {n: defaultdict(list) for n in design.lengths}
    for number in numbers:
        orders = Orders(planted(kind, number, pool, small)[1])
        for length, held in by_length.items():
            name = f"{number}_{length}"
            if f"{name}_counts" in arrays:
                counts, between = (
                    torch.from_numpy(arrays[f"{name}_{part}"].astype(int)) for part in ("counts", "between")
                )
                found = compare(orders, design, counts.double(), between, number)
                for key, value in (found | _differences(found)).items():
                    held[key].append(value)
    sizes = {"points": orders.n, "items": orders.items, "members": design.members, "samples": design.samples}
    cells = sum(name.endswith("_counts") for name in arrays)
    sizes |= {"sets": len(numbers), "networks": cells * design.members, "times": "log", "process": repr(PROCESS)}
    sizes |= {"model": design.model.spec}
    lengths = {
        str(n): {" ".join(k): e for k, e in ((k, _estimate(k, v)) for k, v in held.items()) if e is not None}
        for n, held in by_length.items()
        if held
    }
    return {"sizes": sizes, "lengths": lengths}


def _estimate(key: tuple[str, ...], values: list[float]) -> list[float | int] | None:
    """Return value, standard error, low end, high end and the number of sets; None for fewer than three."""
    known = torch.tensor([v for v in values if not math.isnan(v)], dtype=torch.float64)
    if len(known) < 3:
        return None
    low = -math.inf if any(" - " in part for part in key) else 0.0
    high = math.inf if low or "rate" in key else 1.0
    found = Estimate[float].of_mean(known)
    e = Estimate[float].of_error(found.value, found.se, len(known) - 1, low, high)
    return [*(round(v, 3) for v in e.fields), len(known)]


COLUMNS = {  # of the tables in docs/howto/profile.md, below the sizes: names of numbers
    "Points reproduced": {
        "samples that are copies": "copied samples",
        **{
            f"reproduced: {name}": f"copied reproduced {name} single"
            for name in ("ordinary", "x2", "x4", "x8", "isolated")
        },
        "the ten listed": "copied reproduced listed single",
    },
    "AUC over all points": {
        "collapse time": "copied auc all profile single",
        "copies alone": "copied auc all multiplicity single",
        "distance alone": "copied auc all distance single",
        "collapse time, pooled": "copied auc all profile pooled",
        "control": "copied auc all profile control",
    },
    "AUC over points given once": {
        "collapse time": "copied auc once profile single",
        "distance alone": "copied auc once distance single",
        "control": "copied auc once profile control",
        "not isolated": "copied auc ordinary profile single",
        "by radius": "close auc once profile single",
        "control, by radius": "close auc once profile control",
    },
    "Pairs of neighbours with a sample between them": {
        "of pairs": "pairs mixed neighbours single",
        "AUC, share": "pairs auc neighbours share single",
        "AUC, closeness": "pairs auc neighbours closeness single",
        "AUC, share, control": "pairs auc neighbours share control",
        "AUC, share, listed pairs": "pairs auc listed share single",
    },
}
BEGIN, END = "<!-- experiments/profile_report.py writes what follows -->\n", "<!-- to here -->\n"


def tables(found: dict[str, dict[str, dict]]) -> str:
    """Return the numbers as Markdown."""

    def cell(e: list[float] | None) -> str:
        return "–" if e is None else f"{e[0]:.2f} ({e[2]:.2f} to {e[3]:.2f})"

    out = []
    for title, columns in COLUMNS.items():
        out += [
            f"\n*{title}*\n",
            "| set | steps | sets | " + " | ".join(columns) + " |",
            "|---" * (3 + len(columns)) + "|",
        ]
        for kind, held in found.items():
            for length, numbers in held["lengths"].items():
                row = [
                    kind,
                    length,
                    str(numbers["copied samples"][4]),
                    *(cell(numbers.get(c)) for c in columns.values()),
                ]
                out.append("| " + " | ".join(row) + " |")
    return "\n".join(out) + "\n\n"


def section(found: dict[str, dict[str, dict]]) -> str:
    """Return what the page states of the numbers: findings.md filled in, and the tables."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= html.FILTERS
    template = environment.from_string((RESULTS.parent / "findings.md").read_text())
    return template.render(tested=tested.parse(found)) + tables(found)


def write(folder: Path, small: bool = False) -> Path:
    """Write ``profile_check.json`` from the counts in a folder; of the stored counts, the file of the package."""
    found = {}
    for kind in DESIGNS:
        arrays = read(folder / f"{kind}.npz")
        if arrays:
            found[kind] = summarise(kind, arrays, vk.data.digits()[:] if kind == "digits" else None, small)
    if folder.resolve() == RESULTS:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        write_file(PAGE, before + BEGIN + section(found) + END + rest.partition(END)[2])
    path = tested.PATH if folder.resolve() == RESULTS else folder / "profile_check.json"
    return write_file(path, to_json(found))


def to_json(found: dict[str, dict[str, dict]]) -> str:
    """Return the numbers as JSON, with one line for each."""
    return (
        re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", json.dumps(found, indent=0)) + "\n"
    )
