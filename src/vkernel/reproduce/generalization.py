r"""Generalization against the truth: distances to the population of one model and of the average over trainings.

Many training sets of n points are drawn from a known population. On each, M linear models are trained with the targets
:math:`m + c\,(x_0 - m)` of :class:`vkernel.JC`, on the same inputs for every c, and sampled.
:func:`vkernel.metrics.generalization` estimates the distance to the population of one model (the mean over models of a
set, and their median), of the pooled law of a set, and of the set itself. All are averaged over sets, and objectives
are compared in pairs of equal sets, whose intervals are over sets.

Networks, and linear models in the plane, take too long for the page. Their distances are read from ``STORED``, which
``experiments/generalization.py`` writes.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from vkernel import metrics, plots
from vkernel.core import rng
from vkernel.core.estimate import Estimate, Twins, stacked, twins
from vkernel.data import population
from vkernel.process import VP
from vkernel.reproduce.exhibit import Exhibit, Page, Run, Values, one_thread
from vkernel.sample import pf_ode
from vkernel.study.spec import Lookup
from vkernel.study.work import LookedUp
from vkernel.train import features, models
from vkernel.train.ensemble import Ensemble, train_ensemble

STORED = resources.files("vkernel.reproduce") / "results" / "generalization.npz"
KINDS = {"w1": "W₁", "energy": "energy distance"}
PARTS = {"single": "one model, mean", "median": "one model, median", "pooled": "average over trainings"}
GROUPS = ("fresh", "fixed", "linear")  # of the stored conditions: networks by their draws, linear models
Parts = Mapping[str, Tensor]  # distances (c, set) of one condition, by the keys of PARTS, and "better"


@dataclass(frozen=True)
class Compared:
    """J1 against J0 in pairs of equal training sets, by one distance. ``levels`` are means over sets ``(c,)`` and
    ``spread`` that of one model less the average; ``better`` is the share of models that are nearer with J1."""

    levels: dict[str, Tensor]
    single: Twins
    median: Twins
    pooled: Twins
    spread: Twins
    better: Estimate


@dataclass(frozen=True)
class Cell:
    """One condition: its label, its kind of model and training, and what was found for it."""

    label: str
    group: str
    w1: Compared
    energy: Compared

    @classmethod
    def of(cls, label: str, group: str, given: Mapping[str, Parts], factors: Sequence[float]) -> Cell:
        """Compare J1 with J0 in every distance."""
        one, zero = (factors.index(c) for c in (1.0, 0.0))
        found = {}
        for kind in KINDS:
            parts: dict[str, Tensor] = {key: given[kind][key] for key in PARTS}
            every = parts | {"spread": parts["single"] - parts["pooled"]}
            pairs = {key: twins(value[one], value[zero]) for key, value in every.items()}
            better = Estimate[float].of_mean(given[kind]["better"][one])
            found[kind] = Compared({key: value.mean(1) for key, value in every.items()}, better=better, **pairs)
        return cls(label, group, **found)


@one_thread()
def generalization(run: Run) -> Exhibit:
    """Measure the distances for every factor of the noise and every F/P, and compare J1 with J0."""
    sizes = run.sizes("generalization")
    ratios, factors = sizes.ratios, sizes.factors
    sets = [population("uniform", sizes.n, run.stream("generalization/set", s)) for s in range(sizes.sets)]
    truth = population("uniform", sizes.population, run.stream("generalization/population"))
    laws = [
        torch.stack([sample(run, sizes, ratio, s, points) for s, points in enumerate(sets)], 1)
        for ratio in run.each(ratios, 0.8)
    ]
    arrays: Values = {"c": factors, "features_over_draws": ratios, "sets": torch.stack(sets)}
    for kind in run.each(KINDS, 0.1):
        for name, value in _distances(kind, laws, truth, sets).items():
            arrays[f"{kind}_{name}"] = value
    stored = {f"stored_{key}": value for key, value in read().items()}
    page = Page(run, "generalization", arrays | stored, seed=run.seed, kinds=KINDS, parts=PARTS, size=sizes)
    held = [json.loads(str(about)) for about in stored["stored_about"]]
    order = sorted(range(len(held)), key=lambda i: (GROUPS.index(_group(held[i])), held[i]["n"]))
    about = [held[i] for i in order]
    page.values |= {"about": about, "usual": min(a["steps"] for a in about if a["model"] == "mlp")}
    own = [{kind: _parts(arrays, kind, i) for kind in KINDS} for i in range(len(ratios))]
    labels = [str(page("label", ratio=ratio)) for ratio in ratios]
    cells = [Cell.of(label, "run", given, factors) for label, given in zip(labels, own, strict=True)]
    others = [
        Cell.of(str(page("stored_label", about=a)), _group(a), _stored(stored, i), a["factors"])
        for i, a in zip(order, about, strict=True)
    ]
    page.values |= {"cells": cells, "stored": others, "tally": _tally([*cells, *others])}
    page.values["one"] = cells[ratios.index(1.0)]
    for kind, words in KINDS.items():
        groups = {}
        for cell, given in zip(cells, own, strict=True):
            found = {name: given[kind][key] for key, name in PARTS.items()}
            groups[cell.label] = {name: (_over_sets(x), _over_sets(x - x[:1])) for name, x in found.items()}
        levels = {"training set": arrays[f"{kind}_train"].mean(), "fresh draws": arrays[f"{kind}_fresh"][0]}
        page.picture(f"generalization_{kind}", plots.noise_factors, factors, groups, levels, words, key=kind)
    columns = {
        words: {
            name: stacked([vars(vars(cell)[kind])[key].difference for cell in others]) for key, name in PARTS.items()
        }
        for kind, words in KINDS.items()
    }
    page.picture("generalization_stored", plots.difference_rows, [c.label for c in others], columns, key="stored")
    return page.exhibit(0.1)


def sample(run: Run, sizes: SimpleNamespace, ratio: float, index: int, points: Tensor) -> Tensor:
    """Return samples ``(c, M, N, 1)`` of the models of one training set."""
    process = VP(eps=sizes.eps)
    model = models.Linear(features.grid("gaussian", sizes.per_axis, 1, process=process), "x0", sizes.ridge)
    how: Values = {"members": sizes.models, "draws": round(model.features.count / ratio)}
    how["seed"] = run.key("generalization/models", index)
    zero, one = (train_ensemble(model, points, process, objective=J, **how).state["weights"] for J in ("J0", "J1"))
    # weights are linear in the targets: those of c lie on the line through those of J0 and J1
    weights = torch.cat([zero + c * (one - zero) for c in sizes.factors])
    x_T = rng.quasi_normals(sizes.samples, 1, 0).expand(len(weights), -1, 1)
    scores = LookedUp(Ensemble(model, {"weights": weights}, process, (1,)), Lookup(**sizes.lookup))
    x = pf_ode(scores, x_T, steps=sizes.steps, allow_nan=True)
    return x.reshape(len(sizes.factors), sizes.models, sizes.samples, 1)


def read() -> dict[str, np.ndarray]:
    """Return the stored distances of networks, and of linear models in the plane, ``(condition, …)``."""
    with np.load(io.BytesIO(STORED.read_bytes())) as held:
        return dict(held)


def _distances(kind: str, laws: Sequence[Tensor], truth: Tensor, sets: Sequence[Tensor]) -> Values:
    """Return the distances of ``laws (c, set, M, N, 1)``, one tensor for each F/P, to the population ``truth``."""
    how: Values = {"kind": {"w1": "wasserstein"}.get(kind, kind), "even": True, "skip_diverged": True}
    found = [[metrics.generalization(list(x), truth, sets, **how) for x in law] for law in laws]
    M = laws[0].shape[2]
    each = [[pad(g.each, (0, M - g.each.shape[1]), value=torch.nan) for g in row] for row in found]
    return {
        "single": torch.stack([torch.stack(row) for row in each]),  # (F/P, c, set, M)
        "pooled": torch.stack([torch.stack([g.pools for g in row]) for row in found]),
        "train": found[0][0].trains,
        "fresh": torch.tensor(found[0][0].fresh.fields),
    }


def _parts(arrays: Mapping[str, Tensor], kind: str, ratio: int) -> Parts:
    """Return the distances of this run at one F/P."""
    single = arrays[f"{kind}_single"][ratio]
    found = {"single": single.nanmean(-1), "median": single.nanquantile(0.5, -1)}
    return found | {"pooled": arrays[f"{kind}_pooled"][ratio], "better": (single < single[:1]).double().mean(-1)}


def _stored(held: Mapping[str, np.ndarray], row: int) -> dict[str, Parts]:
    """Return the stored distances of one condition."""
    keys = (*PARTS, "better")
    return {k: {key: torch.from_numpy(held[f"stored_{k}_{key}"][row]).double() for key in keys} for k in KINDS}


def _group(about: Mapping[str, object]) -> str:
    return "linear" if about["model"] == "linear" else "fixed" if about["draws"] else "fresh"


def _tally(cells: Sequence[Cell]) -> dict[str, SimpleNamespace]:
    """Count, for one model and for the average, in how many conditions the interval of J1 - J0 is below 0 (``better``)
    and above (``worse``): in each group and distance, and in all. ``apart`` counts conditions with fixed draws in which
    the average comes nearer while one model moves away, ``alike`` those with fresh draws in which both move alike."""
    rows = [
        (key, cell.group, kind, vars(vars(cell)[kind])[key].difference)
        for key in PARTS
        for cell in cells
        for kind in KINDS
    ]
    found = {}
    for key in PARTS:
        for group in ("all", *dict.fromkeys(cell.group for cell in cells)):
            for kind in ("", *KINDS):
                own = [d for k, g, on, d in rows if k == key and group in ("all", g) and kind in ("", on)]
                counts = {"better": sum(d.high < 0 for d in own), "worse": sum(d.low > 0 for d in own)}
                found["_".join(filter(None, (key, group, kind)))] = SimpleNamespace(**counts, total=len(own))
    for kind in KINDS:
        fresh = [vars(cell)[kind] for cell in cells if cell.group == "fresh"]
        fixed = [vars(cell)[kind] for cell in cells if cell.group != "fresh"]
        apart = sum(on.pooled.difference.high < 0 < on.single.difference.low for on in fixed)
        alike = sum(on.pooled.difference.value * on.single.difference.value > 0 for on in fresh)
        found[f"apart_{kind}"] = SimpleNamespace(both=apart, total=len(fixed))
        found[f"alike_{kind}"] = SimpleNamespace(both=alike, total=len(fresh))
    return found


def _over_sets(values: Tensor) -> Estimate[Tensor]:
    return Estimate[Tensor].of_mean(values, 1)
