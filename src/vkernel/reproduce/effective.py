r"""Exhibits of the effective SDE: its law against that of trained models, and what becomes of each training point.

**The law** (docs/theory.md, §4.4 and §5). A model is a draw of a random field, :math:`\hat s = s_{avg} + \delta\hat s`.
Keeping two cumulants, the effective SDE

.. math:: \dot x = -\beta x - D\,(s_{avg} + \delta\hat s), \qquad \delta\hat s \sim N(0, \mathrm{Cov}_\theta),

has a Gaussian field of the same mean and covariance in place of the models. It is sampled here with V as measured over
half of the members (for a linear model V is the covariance of its weights) and as predicted
(:class:`vkernel.kernels.Linear`), and compared with the *other* half. V = 0 is the PF-ODE of the mean score, which J1
and J0 share: the mean of all J0 members is used for both. Noise floors are the distances between the two halves.

**Mode weights.** The share of samples within :math:`.25` of each training point, of every member. A member has *lost* a
point if fewer than 1 % of its samples are there.
"""

import math
from types import SimpleNamespace

import torch
from torch import Tensor

from vkernel import kernels, metrics, plots
from vkernel.core import rng
from vkernel.core.estimate import (
    Estimate,
    difference_of_means,
    jackknife,
    leave_one_out,
    median,
    ratio_of_means,
    stacked,
)
from vkernel.data import toy
from vkernel.process import VP, Process
from vkernel.reproduce.exhibit import Exhibit, Page, Run, Values, one_thread
from vkernel.reproduce.learned import GOALS
from vkernel.reproduce.variances import PROCESS, TIMES, places, squares
from vkernel.sample import Scores, pf_ode
from vkernel.score import EmpiricalScore
from vkernel.study.spec import Lookup
from vkernel.study.work import LookedUp
from vkernel.train import features
from vkernel.train.ensemble import Ensemble, train_ensemble
from vkernel.train.models import Linear

DATA, OBJECTIVES = toy("triple"), ("J1", "J0")
LAWS = {"members": "trained models", "measured": "effective SDE, measured V", "predicted": "effective SDE, predicted V"}
LAWS["mean"] = "V = 0: mean score"
GAP, NEAR, BINS, LIMIT = (0.25, 0.75), 0.25, 75, 1.5
GROUPS = 10  # of members, for the error of the mean score's law
TABLE, FINE = Lookup(nodes=661, limit=3.3), Lookup(nodes=1321, limit=3.3)  # starts are within 3.2
COUNTED = 0.01  # gap mass of trained models in a cell that is counted
EPS = 1e-3  # cutoff of the pictures and of the finding
FRACTIONS = {4.0: "4", 2.0: "2", 1.0: "1", 0.5: "½", 0.25: "¼"}
GAPS: Values = {"xlabel": "features / draws, F/P", "ylabel": "share of samples in the gaps", "log": "x"}
GAPS |= {"colours": (0, 1, 3, 2)}


class Cell:
    """Samples ``(models, n, 1)`` of every law in one cell: F/P, a cutoff, an objective."""

    def __init__(self, run: Run, case: SimpleNamespace, steps: int, n: int) -> None:
        self.case, self.process, self.steps, self.run = case, VP(eps=case.eps), steps, run
        self.model = Linear(features.grid("gaussian", 16, process=self.process), target="x0", ridge=0.1)
        self.draws = round(self.model.features.count / case.ratio)
        sigma = self.process.sigma(torch.tensor(self.process.T, dtype=torch.float64))
        self.start = sigma * rng.quasi_normals(n, 1, 0)
        self.spread: dict[str, dict[str, float]] = {}

    def flow(self, scores: Scores, fine: bool = False) -> Tensor:
        """Sample every member by the PF-ODE from the same starts; ``fine`` checks the steps and the table of scores."""
        x_T = self.start.expand(len(scores), *self.start.shape)
        return pf_ode(LookedUp(scores, FINE if fine else TABLE), x_T, steps=self.steps * (1 + fine))

    def exact(self) -> Tensor:
        """Sample the exact score."""
        return pf_ode(EmpiricalScore(DATA, self.process), self.start, steps=self.steps)[None]

    def with_weights(self, weights: Tensor) -> Ensemble:
        """Return linear models with these weights, ``(M, F, 1)``."""
        return Ensemble(self.model, {"weights": weights}, self.process, (1,))

    def laws(self) -> dict[str, dict[str, Tensor]]:
        """Train, and sample every law, for each objective."""
        case, half, name = self.case, self.case.members, f"effective/{self.case.ratio:g}/{self.case.eps:g}"
        how: Values = {"draws": self.draws, "seed": self.run.key(f"{name}/members")}
        every = {}
        for goal in OBJECTIVES:
            how |= {"members": 2 * half, "objective": goal, "progress": False}
            trained = train_ensemble(self.model, DATA, self.process, **how)
            every[goal] = trained.state["weights"]
        parts = every["J0"].chunk(GROUPS)
        left = [torch.cat([*parts[:k], *parts[k + 1 :]]).mean(0) for k in range(GROUPS)]
        mean = self.flow(self.with_weights(torch.stack([every["J0"].mean(0), *left])))
        V: kernels.Linear | None = None
        if case.sets:
            seed = self.run.key(f"{name}/kernel")
            V = kernels.Linear(self.model, DATA, self.process, draws=self.draws, sets=case.sets, seed=seed)
        found: dict[str, dict[str, Tensor]] = {}
        for goal in OBJECTIVES if V else OBJECTIVES[:1]:
            weights = every[goal]
            own, others = weights[:half, :, 0], self.with_weights(weights[half:])
            measured = kernels.LinearField(self.model, self.process, torch.cov(own.mT), own.mean(0)[:, None])
            fields = {"measured": measured}
            if V:
                fields["predicted"] = V if goal == "J1" else V.only("misfit")
            drawn = {k: field.models(half, self.run.stream(f"{name}/{goal}/{k}")) for k, field in fields.items()}
            found[goal] = {"members": self.flow(others), "mean": mean}
            found[goal] |= {key: self.flow(models) for key, models in drawn.items()}
            if V:
                found[goal]["half"] = self.flow(self.with_weights(weights[:half]))
                self.spread[goal] = {"members": largest(others), "measured": largest(drawn["measured"])}
            if (case.ratio, case.eps, goal) == (1.0, EPS, "J1"):
                found[goal]["fine"] = self.flow(others, fine=True)
        self.error = V.relative_error if V else None
        return found


def given_inputs(run: Run, sets: int, models: int, steps: int, n: int) -> Values:
    """Compare gap masses of models that share their inputs with those of fields of the exact V given these inputs."""
    cell = Cell(run, SimpleNamespace(ratio=1.0, eps=EPS), steps, n)
    own, field = [], []
    for k in range(sets):
        how: Values = {"draws": cell.draws, "seed": run.key("effective/given", k), "vary": ("targets",)}
        trained = train_ensemble(cell.model, DATA, cell.process, members=models, progress=False, **how)
        V = kernels.Linear(cell.model, DATA, cell.process, **how)
        own.append(in_gap(cell.flow(trained)).mean())
        field.append(in_gap(cell.flow(V.models(models, run.stream("effective/fields", k)))).mean())
    a, b = torch.stack(own), torch.stack(field)
    found: Values = {"members": Estimate.of_mean(a), "field": Estimate.of_mean(b), "gaps": torch.stack([a, b])}
    return found | {"difference": Estimate.of_mean(b - a), "ratio": ratio_of_means(b, a, paired=True)}


def largest(scores: Scores) -> float:
    """Return the share of the variance, σ² p(x|t) |δs|² summed over x and t, that the largest tenth of models holds."""
    q = torch.zeros(len(scores), dtype=torch.float64)
    for t in TIMES:
        x, weight = places(t)
        q += float(PROCESS.S(torch.tensor(t, dtype=torch.float64))) * (squares(scores(x, t)[..., 0]) * weight).sum(-1)
    return float(q.sort(descending=True).values[: math.ceil(len(q) / 10)].sum() / q.sum())


def in_gap(x: Tensor) -> Tensor:
    """Return the share of samples of every model in the gaps, ``(M,)``."""
    size = x[..., 0].abs()
    return ((size > GAP[0]) & (size < GAP[1])).double().mean(1)


def at_points(x: Tensor, process: Process) -> Tensor:
    """Return the share of samples of every model within 3 σ of a training point at eps, ``(M,)``."""
    eps = torch.tensor(process.eps, dtype=torch.float64)
    away = (x - process.alpha(eps) * DATA.rows(0, DATA.n)[:, 0].double()).abs().amin(-1)
    return (away < 3 * process.sigma(eps)).double().mean(1)


def of_mean(x: Tensor) -> Estimate:
    """Return the gap mass of the mean score, whose samples come first; the others leave groups of members out."""
    gap = in_gap(x)
    return jackknife(float(gap[0]), gap[1:], low=0.0)


def compare(laws: dict[str, Tensor], process: Process) -> Values:
    """Return what is known of one cell: gap masses, their differences from trained models, distances of laws."""
    gaps = {name: in_gap(x) for name, x in laws.items()}
    own, mean = gaps["members"], of_mean(laws["mean"])
    found: Values = {"gaps": gaps, "mass": {name: Estimate.of_mean(g) for name, g in gaps.items()} | {"mean": mean}}
    found["median"] = {name: median(g) for name, g in gaps.items()}
    found["none"] = {name: Estimate[float].of_share(int((g == 0).sum()), len(g)) for name, g in gaps.items()}
    found["at_points"] = {name: float(at_points(x, process).mean()) for name, x in laws.items()}
    found["at_points"]["mean"] = float(at_points(laws["mean"], process)[0])
    fields = [name for name in ("measured", "predicted") if name in laws]
    found["difference"] = {name: difference_of_means(gaps[name], own) for name in fields}
    found["ratio"] = {name: ratio_of_means(gaps[name], own, paired=False) for name in fields}
    variances = [(float(own.var()) / len(own), len(own)), (mean.se**2, GROUPS)]
    found["variance"] = Estimate[float].of_variances(float(own.mean()) - mean.value, variances)
    one = {name: x[:1] if name == "mean" else x for name, x in laws.items()}
    found["middle"] = float((one["mean"].abs() < NEAR).double().mean())
    found["places"] = {name: float(places_of(x).median()) for name, x in one.items()}
    for key, distance in (("tv", _variation), ("w1", _wasserstein)):
        found[key] = {name: distance(one["members"], one[name]) for name in (*fields, "mean", "half") if name in one}
    return found


def places_of(x: Tensor) -> Tensor:
    """Return how many bins hold nine tenths of the samples of every model, ``(M,)``."""
    return (shares(x).sort(descending=True).values.cumsum(-1) < 0.9).sum(-1) + 1


def _variation(a: Tensor, b: Tensor) -> Estimate:
    return metrics.total_variation(a, b, BINS, (-LIMIT, LIMIT), members=True)


def _wasserstein(a: Tensor, b: Tensor) -> Estimate:
    return metrics.wasserstein(a, b, members=True)


def density(x: Tensor) -> Estimate[Tensor]:
    """Return the average density of the models ``x (M, n, 1)`` in every bin; samples beyond the bins count."""
    return metrics.histogram(x, BINS, (-LIMIT, LIMIT), normalise="all", members=True)[0]


@one_thread()
def effective(run: Run) -> Exhibit:
    """Compare the law of the effective SDE, for V measured, predicted and 0, with that of trained models."""
    sizes = run.sizes("effective")
    cases = [SimpleNamespace(**case) for case in sizes.cases]
    cells: list[Values] = []
    laws, bare, arrays = {}, {}, Values()
    for case in run.each(cases, 0.75):
        cell = Cell(run, case, sizes.steps, sizes.samples)
        samples, bare[case.eps] = cell.laws(), cell.exact()
        for goal in samples:
            cells.append({"capacity": case.ratio, "eps": case.eps, "goal": goal, "models": case.members})
            cells[-1] |= {"error": cell.error, "largest": cell.spread.get(goal)}
            cells[-1] |= {"label": f"{goal}, F/P = {FRACTIONS[case.ratio]}", **compare(samples[goal], cell.process)}
            laws[goal, case.ratio, case.eps] = samples[goal]
            name = f"{goal}_{case.ratio:g}_{case.eps:g}"
            arrays |= {f"{name}_{law}_gap": gap for law, gap in cells[-1]["gaps"].items()}
    fixed = given_inputs(run, **sizes.given, steps=sizes.steps, n=sizes.samples)
    arrays["given_inputs_gap"] = fixed["gaps"]
    run.step(0.15)
    main = {(c["goal"], c["capacity"]): c for c in cells if c["eps"] == EPS}
    ratios, known = sorted({ratio for _, ratio in main}, reverse=True), bare[EPS]
    single = {LAWS[k]: shares(laws["J1", 1.0, EPS][k][: sizes.shown]) for k in ("members", "measured")}
    pictures: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    for key, label in ((k, v) for k, v in LAWS.items() if k != "predicted"):
        x = [[laws[goal, r, EPS][key][: 1 if key == "mean" else None] for r in ratios] for goal in OBJECTIVES]
        found = [torch.stack([torch.stack(density(law).fields) for law in row]) for row in x]
        mean, _, low, high = torch.stack(found).movedim(2, 0)  # (objective, F/P, bin)
        pictures[label] = (mean, mean, mean) if key == "mean" else (mean, low.clamp_min(0), high)
        arrays[f"{key}_density"] = torch.stack(pictures[label])
    arrays |= {"ratios": ratios, "exact_density": density(known).value, "single": torch.stack(list(single.values()))}
    one, zero = (main[goal, 1.0] for goal in OBJECTIVES)
    cutoffs = sorted((c for c in cells if (c["goal"], c["capacity"]) == ("J1", 1.0)), key=lambda c: float(c["eps"]))
    values: Values = {
        "cells": list(main.values()),
        "first": main["J1", ratios[0]],
        "one": one,
        "zero": zero,
        "quiet": main["J0", ratios[0]],
        "cutoffs": cutoffs,
        "laws": LAWS,
    }
    values["fixed"] = fixed
    values["apart"] = [c["label"] for c in main.values() if not _holds_zero(c["difference"]["measured"])]
    counted = [c for c in main.values() if c["mass"]["members"].value >= COUNTED]
    values["counted"] = counted
    values["close"] = [c for c in counted if _small(c["difference"]["measured"], c["mass"]["members"])]
    values["differ"] = [c for c in counted if c["label"] in values["apart"]]
    noisy = [c for c in main.values() if c["goal"] == "J1"]
    values |= {"total": len(noisy), "varied": [c["capacity"] for c in noisy if c["variance"].low > 0]}
    values["most"] = [c["capacity"] for c in noisy if c["variance"].low > c["mass"]["members"].value / 2]
    values["exact"] = {"gap": float(in_gap(known)), "at_points": float(at_points(known, VP(eps=EPS)))}
    values |= {"finer": one["mass"]["fine"].value - one["mass"]["members"].value, "seed": run.seed}
    page = Page(run, "effective", arrays, **values, **vars(sizes))
    panels = []
    for goal in OBJECTIVES:
        curves = {name: stacked([main[goal, r]["mass"][k] for r in ratios]).stack() for k, name in LAWS.items()}
        panels.append(plots.Panel(ratios, curves, **GAPS, title=GOALS[goal]))
    page.picture("effective", plots.curve_panels, *panels, share=True, key="gaps")
    edges, grid = (torch.linspace(-LIMIT, LIMIT, k, dtype=torch.float64) for k in (BINS + 1, 601))
    noised = EmpiricalScore(DATA, VP(eps=EPS)).posterior(grid[:, None], EPS).logp.exp().expand(2, -1)
    both = [[main[goal, r]["mass"] for r in ratios] for goal in OBJECTIVES]
    notes = [[f"{m['members'].value:.3f} / {m['measured'].value:.3f}" for m in row] for row in both]
    labels: Values = {"rows": list(OBJECTIVES), "columns": [f"F/P = {FRACTIONS[r]}" for r in ratios], "notes": notes}
    labels |= {
        "exact": density(known).value.expand(2, -1),
        "noised": (grid, noised),
        "gap": GAP,
        "band": "95 % interval",
    }
    page.picture("effective-laws", plots.law_grid, edges, pictures, **labels, key="laws")
    page.picture("effective-single", plots.single_laws, single, edges, DATA.rows(0, DATA.n)[:, 0], GAP, key="single")
    return page.exhibit(0.1)


def shares(x: Tensor) -> Tensor:
    """Return the share of samples in every bin for each model of ``x (M, n, 1)``."""
    return torch.stack([torch.histc(row, BINS, -LIMIT, LIMIT) for row in x]) / x.shape[1]


def _holds_zero(found: Estimate) -> bool:
    return found.low <= 0 <= found.high


def _small(difference: Estimate, mass: Estimate) -> bool:
    """Whether the whole interval of a difference is within a quarter of the mass."""
    return max(-difference.low, difference.high) < mass.value / 4


# Mode weights

POINTS, EXACT = ("left", "middle", "right"), ("near_left", "near_middle", "near_right")  # regions of the study
LOST = 0.01  # of the samples of a model


def prominence(density: Tensor, x: Tensor) -> Estimate:
    """Return the lowest peak at a training point over the highest in a gap, of the average of ``density (M, bin)``."""
    at = [(x - y).abs() < 0.1 for y in DATA.rows(0, DATA.n)[:, 0]]
    gap = (x.abs() > GAP[0]) & (x.abs() < GAP[1])

    def log_ratio(some: Tensor) -> float:
        mean = some.mean(0).clamp_min(1e-3)
        return float((torch.stack([mean[k].max() for k in at]).min() / mean[gap].max()).log())

    return jackknife(log_ratio(density), leave_one_out(log_ratio, density)).exp()


@one_thread()
def weights(run: Run) -> Exhibit:
    """Follow the share of samples at each training point against F/P, of the average model and of single ones."""
    spec = run.spec("weights")
    ds = run.study(spec, 0.9)
    ratios, x = ds["F_over_P"].values.tolist(), torch.tensor(ds["x"].values)
    every = ds.transpose("objective", "F_over_P", "member", ...)
    share, at = (torch.stack([torch.from_numpy(every[k].values) for k in names], -1) for names in (POINTS, EXACT))
    density = torch.from_numpy(every["density"].values)
    away = (x[density.argmax(-1)][..., None] - DATA.rows(0, DATA.n)[:, 0]).abs().amin(-1)
    lost, top, M = (share < LOST).any(-1), away < NEAR, spec["members"]
    cells: list[Values] = []
    for k, goal in enumerate(OBJECTIVES):
        for i, ratio in enumerate(ratios):
            cells.append({"goal": goal, "capacity": ratio, "label": f"{goal}, F/P = {FRACTIONS[ratio]}"})
            cells[-1] |= {"share": [Estimate.of_mean(share[k, i, :, p]) for p in range(len(POINTS))]}
            cells[-1] |= {"median": [median(share[k, i, :, p]) for p in range(len(POINTS))]}
            cells[-1] |= {"lost": Estimate[float].of_share(int(lost[k, i].sum()), M), "at": at[k, i].sum(-1).mean()}
            cells[-1] |= {"two": float(((share[k, i] < LOST).sum(-1) >= 2).double().mean())}
            cells[-1] |= {
                "top": Estimate[float].of_share(int(top[k, i].sum()), M),
                "peaks": prominence(density[k, i], x),
            }
    noisy = cells[: len(ratios)]
    values: Values = {"cells": cells, "first": cells[0], "last": noisy[-1], "noisy": noisy, "total": len(ratios)}
    values["least"] = min(noisy, key=lambda c: float(c["top"].value))
    values["high"] = [c["label"] for c in noisy if c["peaks"].low > 1]
    values["typical"] = [c["label"] for c in noisy if c["top"].low > 0.5]
    values["kept"], values["forgot"] = ([c["label"] for c in noisy if test(c["lost"])] for test in (_seldom, _mostly))
    arrays: Values = {"ratios": ratios, "objectives": OBJECTIVES, "share": share, "at": at, "density": density.mean(2)}
    page = Page(run, "weights", arrays | {"top": away}, spec=spec, seed=run.seed, **values)

    def curves(key: str) -> dict[str, Tensor]:
        found = {goal: [c[key] for c in cells if c["goal"] == goal] for goal in OBJECTIVES}
        return {goal: stacked(e).stack().clamp(0, 1) for goal, e in found.items()}

    by_point = {}
    for goal in OBJECTIVES:
        for p, place in enumerate(("−1", "0", "+1")):
            e = [c["share"][p] for c in cells if c["goal"] == goal]
            by_point[f"{place}, {goal}"] = stacked(e).stack().clamp(0, 1)
    looks: Values = {"xlabel": GAPS["xlabel"], "log": "x", "top": 1.03}
    styles: Values = {"colours": (0, 2, 3), "styles": ("-",) * 3 + ("--",) * 3}
    panels = [
        plots.Panel(ratios, by_point, ylabel="share of samples", title="Near each training point", **looks, **styles)
    ]
    for key, label in (
        ("lost", "Models that lost a training point"),
        ("top", "Most likely output at a training point"),
    ):
        panels.append(plots.Panel(ratios, curves(key), ylabel="share of models", title=label, colours=(0, 1), **looks))
    page.picture("weights", plots.curve_panels, *panels)
    return page.exhibit(0.1)


def _seldom(lost: Estimate) -> bool:
    return lost.high < 0.1


def _mostly(lost: Estimate) -> bool:
    return lost.low > 0.5
