r"""Exhibits of paths: ends of a fixed start over trainings, and the weights of the path integral.

**A fixed start** (docs/theory.md, §5.1). Given the randomness of training the PF-ODE maps :math:`x_T` to one end. Over
trainings the end has the law :math:`\bar q(x_\epsilon \mid x_T)`, the object that the path integral describes. Starts
are quantiles of the prior, data {-1, 0, 1}. An end is *off* if it is .25 or farther from every training point; it is
*same* if the nearest one is that where the exact score's PF-ODE ends, and *other* if it is another one.

**Weights of paths** (§5.3, §5.4). With a white V the density of a path is exp(-action) times a determinant that depends
on V alone. Paths are drawn with another mean score, that of the same points with unequal weights, and the same V. The
determinants cancel,

.. math:: P[x] / P'[x] = \exp\{\mathrm{action}'[x] - \mathrm{action}[x]\} ,

and the weighted share of these paths that end at a training point must be the share of paths of the effective SDE.
"""

import warnings
from types import SimpleNamespace

import torch
from torch import Tensor

from vkernel import kernels, plots, sample
from vkernel.core.estimate import LEAST, Estimate, jackknife, median, ratio_of_means, twins
from vkernel.data import Empirical, toy
from vkernel.process import VP, Toy
from vkernel.reproduce.exact import path_of
from vkernel.reproduce.exhibit import Exhibit, Page, Run, Values, one_thread
from vkernel.sample import Scores, path
from vkernel.score import EmpiricalScore, Score
from vkernel.train import features
from vkernel.train.ensemble import train_ensemble
from vkernel.train.models import MLP, Linear

# A fixed start

CUTOFFS, SHOWN, RADIUS = (1e-4, 1e-3, 1e-2), 1, 0.25
GOALS, KINDS = ("J1", "J0"), ("same", "other", "off")
LIMIT, BINS = 1.5, 75
SINGLE = (0.5, 0.6, 0.68, 0.76)  # quantiles of the starts that have pictures of their own


def kinds_of(x: Tensor, points: Tensor, exact: Tensor) -> Tensor:
    """Return whether ends ``x (…, start)`` are same, other or off, ``(3, …, start)``; ``exact (start,)`` are ends."""
    distance, index = (x[..., None] - points).abs().min(-1)
    at, same = distance < RADIUS, index == (exact[:, None] - points).abs().argmin(-1)
    return torch.stack([at & same, at & ~same, ~at]).double()


class Starts:
    """Starts ``x_T (start, 1)`` at quantiles ``u`` of the prior, and their ends with the exact score."""

    def __init__(self, eps: float, count: int, steps: int) -> None:
        self.process, self.data, self.steps = VP(eps=eps), toy("triple"), steps
        T, end = torch.tensor([self.process.T, eps], dtype=torch.float64)
        self.u = (torch.arange(count, dtype=torch.float64) + 0.5) / count
        self.x_T = self.process.sigma(T) * torch.special.ndtri(self.u)[:, None]
        self.points = self.process.alpha(end) * self.data[:][:, 0]
        self.exact = self.flow(EmpiricalScore(self.data, self.process))

    def flow(self, score: Score) -> Tensor:
        """Return the end of each start under one score."""
        return sample.pf_ode(score, self.x_T, steps=self.steps)[:, 0]

    def ends(self, scores: Scores) -> Tensor:
        """Return the ends ``(M, start)`` of the members that do not diverge."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            x = scores.sample(x_T=self.x_T.to(scores.dtype), steps=self.steps)[..., 0].double()
        return x[x.isfinite().all(1)]

    def shares(self, x: Tensor, mean: Score) -> SimpleNamespace:
        """Return shares of the kinds of ends ``x (M, start)``: ``members (3, M)`` of starts, ``starts (3, start)`` of
        members, their means and medians, the share of members with ``none`` off, and ``bias``, the flow of ``mean``."""
        found = kinds_of(x, self.points, self.exact)
        out = SimpleNamespace(x=x, members=found.mean(-1), starts=found.mean(1), M=len(x), flow=self.flow(mean))
        out.mean = dict(zip(KINDS, map(Estimate[float].of_mean, out.members), strict=True))
        out.median = dict(zip(KINDS, map(median, out.members), strict=True))
        out.none = Estimate[float].of_share(int((out.members[2] == 0).sum()), len(x))
        out.bias = dict(zip(KINDS, kinds_of(out.flow, self.points, self.exact).mean(-1).tolist(), strict=True))
        return out


def still(at: Starts, scores: Scores, groups: int = 8) -> dict[str, Estimate]:
    """Return the shares of the flow of the mean score with the jackknife's error, by leaving out groups of members."""
    parts, every = torch.arange(len(scores)).chunk(groups), range(len(scores))
    some = [scores, *(scores.select([m for m in every if m not in part]) for part in parts)]
    value, *without = (kinds_of(at.flow(each.mean_score), at.points, at.exact).mean(-1) for each in some)
    columns = zip(KINDS, value, torch.stack(without, 1), strict=True)
    return {kind: jackknife(share, rest, low=0.0, high=1.0) for kind, share, rest in columns}


@one_thread()
def conditional(run: Run) -> Exhibit:
    """Sample fixed starts with the members of ensembles, and compare their ends with one flow and with theory."""
    s, cases = run.sizes("conditional"), dict[str, SimpleNamespace]()
    every = [Starts(eps, s.starts, s.steps) for eps in CUTOFFS]
    for k, at in enumerate(run.each(every, 0.5)):
        model = Linear(features.grid("gaussian", 16, process=at.process), target="x0", ridge=0.1)
        how: Values = {"draws": s.draws, "seed": run.key("conditional/linear")}
        for goal in GOALS:
            members = s.members if k == SHOWN else s.few
            ensemble = train_ensemble(model, at.data, at.process, members=members, objective=goal, **how)
            cases[f"linear, {goal}, eps = {at.process.eps:g}"] = at.shares(at.ends(ensemble), ensemble.mean_score)
            if k == SHOWN and goal == "J1":
                bias = still(at, ensemble)
        if k == SHOWN:
            V = kernels.Linear(model, at.data, at.process, draws=s.draws, sets=s.sets, seed=run.key("conditional/V"))
    at, eps = every[SHOWN], f", eps = {CUTOFFS[SHOWN]:g}"
    stream: Values = {"members": s.members, "steps": s.steps, "generator": run.stream("conditional/field")}
    theory = at.shares(sample.effective_sde(V, at.x_T, **stream)[..., 0], V.mean)
    run.step(0.2)
    network = MLP(target="x0", **s.network)
    for goal in run.each(GOALS, 0.2):
        how = {"draws": s.draws, "objective": goal, "seed": run.key("conditional/network")}
        ensemble = train_ensemble(network, at.data, at.process, members=s.networks, **how)
        cases[f"network, {goal}{eps}"] = at.shares(at.ends(ensemble), ensemble.mean_score)
    cases[f"effective SDE, V of J1{eps}"] = theory
    one, zero, net = (cases[f"{name}{eps}"] for name in ("linear, J1", "linear, J0", "network, J1"))
    drawn = {"trained linear models, J1": one, "trained linear models, J0": zero, "effective SDE, predicted V": theory}
    edges = torch.linspace(-LIMIT, LIMIT, BINS + 1, dtype=torch.float64)
    laws = {name: torch.stack([_histogram(x, edges) for x in case.x.mT]) for name, case in drawn.items()}
    flows = {name: {"exact score": at.exact, "mean score (V = 0)": case.flow} for name, case in drawn.items()}
    arrays: Values = {"u": at.u, "x_T": at.x_T[:, 0], "exact": at.exact, "points": at.points, "edges": edges}
    means = torch.stack([torch.stack([c.mean[k].stack() for k in KINDS]) for c in cases.values()])
    arrays |= {"cases": list(cases), "kinds": KINDS, "mean": means}
    arrays |= {"by_start": torch.stack([c.starts for c in cases.values()]), "law": torch.stack(list(laws.values()))}
    single = [int(k) for k in (torch.tensor(SINGLE, dtype=torch.float64) * s.starts).long()]
    values: Values = {"one": one, "zero": zero, "net": net, "theory": theory, "table": cases, "bias": bias}
    pairs = {e: [cases[f"linear, {goal}, eps = {e:g}"].members[2] for goal in GOALS] for e in CUTOFFS}
    values["twins"] = {e: twins(first, second, LEAST) for e, (first, second) in pairs.items()}
    values["closure"] = ratio_of_means(theory.members[2], one.members[2], paired=False)
    values["kept"] = float((one.starts[0] > 0.5).double().mean())  # starts of which most models keep the exact end
    values |= {"single": single, "radius": RADIUS, "eps": CUTOFFS[SHOWN], "seed": run.seed}
    page = Page(run, "conditional", arrays, **values, **vars(s))
    label = "quantile of the start x_T under the prior"
    page.picture("conditional", plots.start_maps, at.u, edges, laws, flows, label, key="maps")
    columns = [f"x_T = {float(at.x_T[k, 0]):.2f}\nexact score: x = {float(at.exact[k]):.2f}" for k in single]
    notes = [[_note(case.starts[:, k]) for k in single] for case in drawn.values()]
    rows = {name: law[single] for name, law in laws.items()}
    points = dict.fromkeys(rows, at.points)
    page.picture("conditional_starts", plots.law_panels, rows, columns, edges, points, None, notes, key="starts")
    return page.exhibit(0.1)


def _histogram(x: Tensor, edges: Tensor) -> Tensor:
    """Return shares in bins; what is beyond the last edge is in the last bin."""
    return torch.histogram(x.clamp(edges[0], edges[-1]), edges).hist / len(x)


def _note(share: Tensor) -> str:
    same, other, off = (f"{100 * v:.0f} %" for v in share.tolist())
    return f"same {same}, other {other}\noff {off}"


# Weights of paths

KAPPA = 0.3  # of the picture


@one_thread()
def path_integral(run: Run) -> Exhibit:
    """Weigh paths of another law by their actions, and compare typical paths with the most probable ones."""
    s, process, data = run.sizes("path_integral"), Toy(eps=0.1), toy("square")
    score, start = EmpiricalScore(data, process), torch.tensor(s.start, dtype=torch.float64)
    points = process.alpha(torch.tensor(process.eps, dtype=torch.float64)) * data[:]
    found, kept = list[SimpleNamespace](), dict[float, Tensor]()
    tilt = torch.tensor([s.tilt if far else 1.0 for far in s.far], dtype=torch.float64)
    other = EmpiricalScore(Empirical(data[:], weights=tilt / tilt.sum()), process)
    for kappa in run.each(s.kappas, 0.3):
        V, V2 = (kernels.Naive(each, kappa) for each in (score, other))  # they differ in mean and covariance
        x_T, x_U = (start.expand(n, 2) for n in (s.paths, s.weighed))
        how: Values = {"steps": s.steps, "save": "path"}
        kept[kappa] = path_of(sample.effective_sde(V, x_T, generator=run.stream(f"path_integral/own/{kappa:g}"), **how))
        biased = path_of(sample.effective_sde(V2, x_U, generator=run.stream(f"path_integral/other/{kappa:g}"), **how))
        weight = (path.log_prob(biased, V) - path.log_prob(biased, V2)).exp()
        bare = (path.action(biased, V2) - path.action(biased, V)).exp()  # without determinants
        own, ends = ends_at(kept[kappa], points), ends_at(biased, points)
        found.append(compare(own, ends, weight))
        found[-1].bare = compare(own, ends, bare / bare.mean()).left
    V, drawn, sharp = kernels.Naive(score, KAPPA), kept[KAPPA], found[s.kappas.index(KAPPA)]
    zero, (single, finer) = path.zero_action(score, start[None], s.steps)[:, 0], modes(V, start, points, s.steps)
    run.step(0.5)
    best = path.log_prob(single[:, 1:], V).softmax(0)  # the most probable path to each point, if it stood for all
    few, times = torch.cat([drawn[:, : s.shown], single[:, :1]], 1), process.times(s.steps, "log")
    parts = range(2, s.steps + 2)
    along = torch.stack([path.action(few[:k], V, times=times[:k]) for k in parts])  # (step, path), the mode last
    actions = path.action(drawn[:, : s.typical], V)
    arrays: Values = {"kappa": s.kappas, "points": points, "start": start, "paths": few[:, :-1], "zero_action": zero}
    arrays |= {"most_probable": single, "finer": finer, "best_share": best, "action_along": along, "action": actions}
    for name in ("own", "other", "weighted", "difference"):
        arrays[name] = torch.stack([vars(f)[name].stack() for f in found])  # (κ, 3, point)
    home = int(torch.cdist(zero[-1:], points).argmin())
    values: Values = {"found": dict(zip(s.kappas, found, strict=True)), "sharp": sharp, "shown_kappa": KAPPA}
    values |= {"worst": max(f.worst for f in found), "action_ratio": Estimate[float].of_mean(actions / s.steps)}
    values |= {"home": home, "away": sharp.own[home].complement(), "process": process, "eps": process.eps}
    page = Page(run, "path_integral", arrays, seed=run.seed, **values, **vars(s))
    marked = {"zero action (PF-ODE)": zero, f"most probable, {s.steps} steps": single[:, 0]}
    marked[f"most probable, {2 * s.steps} steps"] = finer
    shares = {"paths of the effective SDE": sharp.own.stack(), "another law, weighted": sharp.weighted.stack()}
    shares |= {"another law": sharp.other.stack(), "most probable path alone": best.expand(3, -1)}
    at = ends_at(few[:, :-1], points).long().argmax(-1)
    page.picture("path_integral", plots.path_bundles, points, few[:, :-1], at, marked, along, shares)
    return page.exhibit(0.2)


def ends_at(paths: Tensor, points: Tensor) -> Tensor:
    """Return whether each path ``(step, path, d)`` ends nearest to each point, ``(path, point)``."""
    return torch.cdist(paths[-1], points).argmin(-1)[:, None] == torch.arange(len(points))


def compare(own: Tensor, other: Tensor, weight: Tensor) -> SimpleNamespace:
    """Compare the shares of ends ``(path, point)`` of one law with those of another whose paths have weights.
    ``worst`` is the largest difference in units of its error, under the hypothesis that the weighted shares are right;
    ``left`` and ``moved`` are the total variation between the laws with and without weights."""
    out = SimpleNamespace(total=Estimate[float].of_mean(weight))
    out.effective = float(weight.sum().square() / weight.square().sum())
    out.own, out.other = (Estimate[Tensor].of_share(v.sum(0), len(v)) for v in (own, other))
    out.weighted = Estimate[Tensor].of_mean(weight[:, None] * other)
    p = out.weighted.value.clamp(1 / len(own), 1)
    error = torch.hypot((p * (1 - p) / len(own)).sqrt(), out.weighted.se)
    out.difference = Estimate[Tensor].of_error(out.weighted.value - out.own.value, error)
    out.worst = float((out.difference.value / error).abs().max())
    out.left, out.moved = (float((v.value - out.own.value).abs().sum() / 2) for v in (out.weighted, out.other))
    return out


def modes(V: kernels.Naive, start: Tensor, points: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Return the most probable paths with a free end and to each point, ``(step, 1 + point, d)``, and the one with a
    free end in twice as many steps: modes of a white V belong to their step, and that is shown."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        free, finer = (path.most_probable(V, start[None], steps=k * steps) for k in (1, 2))
        to = path.most_probable(V, start.expand(len(points), 2), steps=steps, x_end=points)
    return torch.cat([free, to], 1), finer[:, 0]
