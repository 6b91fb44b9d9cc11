r"""The variance of the learned score: predicted and measured, its sources, and its growth during training.

All models are trained on {-1, 0, 1}. Variances are in the unit of the loss, :math:`\sigma_t^2\,\mathrm{tr\,Cov}_\theta
[\hat s]`, on ±1.5, and averages over x are weighted by the density :math:`p(x|t)` of noised data.

**Linear models** (docs/theory.md, §8.1). The paper's denoiser, 16 × 16 Gaussian features, ridge .1, fitted to P draws;

.. math:: R = \frac{\sum_t \sigma_t^2 \int p(x|t)\, \mathrm{Var}_{measured}\, dx}
                   {\sum_t \sigma_t^2 \int p(x|t)\, \mathrm{Var}_{predicted}\, dx} .

A measured variance is the mean over members of :math:`q_m = \frac{M}{M-1} |\hat s_m - s_{avg}|^2`. The prediction is a
mean over sets of inputs, of other seeds than the ensemble, in groups whose spread gives its error. J0 has the inputs of
J1 with noiseless targets: its variance is the misfit alone.

**Sources** (§7.3). :math:`\mathrm{Var}\,\hat s = \mathrm{Var}_X\,E[\hat s|X] + E_X\,\mathrm{Var}[\hat s|X]`, inputs and
misfit plus target noise, by a nested design (:func:`vkernel.variance_split`) that is repeated with other seeds; the
jackknife over repetitions gives the error of a share. The V-kernel given inputs predicts the same shares.

**Training time** (§9). An infinitely wide network, trained by gradient flow for time :math:`\tau`, is linear in its
initial function :math:`f_0` and in its targets. Three parts of its variance, each in closed form given the inputs, are
measured by networks on the same inputs that differ in one thing:

.. math:: \text{target noise:}\quad & \mathrm{Var}[\hat s^{J_1} - \hat s^{J_0}], \\
          \text{initialisation:}\quad & \mathrm{Var}[\hat s^{J_0} - \hat s^{J_0,\,f_0 = 0}], \\
          \text{inputs:}\quad & \mathrm{Var}[\hat s^{J_0,\,f_0 = 0}] .

The first two differences have mean zero given the inputs, so the three are uncorrelated and add up to the whole."""

import functools
import math
import warnings
from types import SimpleNamespace

import torch
from torch import Tensor

from vkernel import kernels, plots
from vkernel.core.estimate import LEAST, Estimate, jackknife, leave_one_out, ratio_of_means, relative_se, stacked, twins
from vkernel.data import toy
from vkernel.process import VP
from vkernel.reproduce.exhibit import Exhibit, Page, Run, Values, one_thread
from vkernel.score import EmpiricalScore
from vkernel.train import features
from vkernel.train.ensemble import variance_split
from vkernel.train.models import NTK, Lazy, Linear

PROCESS, DATA = VP(eps=1e-3), toy("triple")
TIMES = (0.05, 0.2, 0.5)
OBJECTIVES, FORMS = ("J1", "J0"), ("given inputs", "leading order")
TOGETHER = "t = " + ", ".join(f"{t:g}" for t in TIMES)  # all of them


def denoiser(per_axis: int = 16) -> Linear:
    """Return the paper's linear denoiser."""
    return Linear(features.grid("gaussian", per_axis, process=PROCESS), target="x0", ridge=0.1)


def places(t: float, count: int = 121, limit: float = 1.5) -> tuple[Tensor, Tensor]:
    """Return places ``(count, 1)`` on an even grid and weights proportional to p(x|t) there, of sum 1."""
    x = torch.linspace(-limit, limit, count, dtype=torch.float64)[:, None]
    return x, torch.softmax(EmpiricalScore(DATA, PROCESS).posterior(x, t).logp, 0)


def squares(s: Tensor) -> Tensor:
    """Return q, like the scores ``s (M, …)``: its mean over members is their variance."""
    return (s - s.mean(0)).square() * (len(s) / (len(s) - 1))


def _pooled(curves: Tensor, weights: Tensor) -> Tensor:
    """Return means over p(x|t), summed over times and then for each time: ``(…, 1 + T)`` from ``(…, T, n)``."""
    each = (weights * curves).sum(-1)
    return torch.cat([each.sum(-1, keepdim=True), each], -1)


@one_thread()
def v_linear(run: Run) -> Exhibit:
    """Compare the predicted variance of linear models with that of ensembles."""
    spec, sizes, model = run.spec("v_linear"), run.sizes("v_linear"), denoiser()
    x, cases = places(0.2, spec["measure"]["places"])[0], sizes.cases
    weights = torch.stack([places(t, len(x))[1] for t in TIMES])
    S = PROCESS.S(torch.tensor(TIMES, dtype=torch.float64))[:, None]
    seed, F = run.key("v_linear/ensemble"), model.features.count

    def curves(kernel: kernels.Linear) -> Tensor:  # (objective, T, n): without target noise, the misfit is that of J0
        both = (kernel, kernel.only("misfit"))
        return torch.stack([S * torch.stack([k.cov(x, t).trace() for t in TIMES]) for k in both])

    common = (1 << 20) * curves(_leading(run, model, 1 << 20, sizes.quadrature))
    run.step(0.1)
    cost = [(2 * members + 2 * groups * sets) * max(r * F, 200) for r, members, groups, sets in cases]
    results = []
    for (r, members, groups, sets), share in zip(cases, (0.4 * c / sum(cost) for c in cost), strict=True):
        P = round(r * F)
        kernel = functools.partial(kernels.Linear, model, DATA, PROCESS, draws=P, sets=sets)
        seeds = [run.key("v_linear/kernel", group) for group in range(groups)]
        predicted, leading = torch.stack([curves(kernel(seed=s)) for s in seeds]), common / P
        run.step(share)
        ds = run.study(spec, share, members=members, seed=seed, training={"draws": P})["score"]
        bands, ratios = [], []
        for k, objective in enumerate(OBJECTIVES):
            q = S * squares(torch.from_numpy(ds.sel(objective=objective).values))  # (M, T, n)
            top, order = _pooled(q, weights), _pooled(leading[k], weights)
            given = ratio_of_means(top, _pooled(predicted[:, k], weights), paired=False)
            first = Estimate.of_log(top.mean(0) / order, relative_se(top), members - 1)
            ratios.append(torch.stack([given.stack(), first.stack()]))
            bands.append(Estimate.of_log(q.mean(0), relative_se(q), members - 1).stack())
        results.append((torch.stack(bands), predicted.mean(0), leading, torch.stack(ratios)))
    band, line, order, table = (torch.stack(v, 1) for v in zip(*results, strict=True))
    table = table.movedim(1, 0)  # (P/F, objective, form, 3, 1 + T)
    held = (band[:, :, 1] <= line) & (line <= band[:, :, 2])  # (objective, P/F, T, n)
    judged, r = [_leading(run, model, round(case[0] * F), 1 << 12) for case in cases], [case[0] for case in cases]
    arrays: Values = {"draws_over_features": r, "times": TIMES, "x": x[:, 0], "objectives": OBJECTIVES, "forms": FORMS}
    arrays |= {"weights": weights, "measured": band, "given_inputs": line, "leading": order, "ratio": table}
    arrays |= {"leading_warned": [not V.valid for V in judged], "leading_why": [V.why for V in judged]}
    covered, ends = (held * weights).sum(-1).mean((0, 2)), table[..., 0]  # the three times together
    one = ends[:, 0, 0]  # J1, given inputs: (P/F, 3)
    values: Values = {"covered": covered, "first": ends[0], "last": ends[-1], "together": TOGETHER}
    values |= {
        "held": int(((one[:, 1] <= 1) & (one[:, 2] >= 1)).sum()),
        "farthest": float(one[:, 0].log().abs().max().exp()),
    }
    page = Page(run, "v_linear", arrays, cases=cases, F=F, **values)
    drawn = (r, TIMES, x[:, 0], OBJECTIVES, (line, order), band, weights)
    page.picture("v_linear", plots.variance_panels, *drawn, key="curves")
    titles = ("J1, noisy targets", "J0, noiseless targets")
    panels = {title: {f: table[:, k, i, :, 0].mT for i, f in enumerate(FORMS)} for k, title in enumerate(titles)}
    page.picture("v_linear_ratio", plots.ratio_panels, r, panels, key="ratio")
    return page.exhibit(0.1)


def _leading(run: Run, model: Linear, P: int, count: int) -> kernels.Linear:
    """Return the V-kernel to leading order in 1/P; it may be used beyond its validity here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kernels.ValidityWarning)
        how: Values = {"draws": P, "form": "leading", "quadrature": count}
        return kernels.Linear(model, DATA, PROCESS, seed=run.key("v_linear/leading"), **how)


def share_of(found: Tensor) -> Estimate[Tensor]:
    """Return shares ``(source, where)`` of variances ``(repetition, source, where)``, by leaving one repetition out."""

    def share(some: Tensor) -> Tensor:
        return some.sum(0) / some.sum((0, 1))

    return jackknife(share(found), leave_one_out(share, found))


@one_thread()
def shares(run: Run) -> Exhibit:
    """Split the variance of linear models into target noise and inputs, measured and predicted."""
    model, sizes = denoiser(), run.sizes("shares")
    cases, found = [SimpleNamespace(**case) for case in sizes.cases], [places(t, sizes.places) for t in TIMES]
    x, t = torch.stack([x for x, _ in found]), torch.tensor(TIMES, dtype=torch.float64)[:, None]
    weights, F = PROCESS.S(t) * torch.stack([w for _, w in found]), model.features.count

    def split(case: SimpleNamespace, repetition: int, goal: str = "J1") -> Tensor:  # (source, where)
        seed, counts = run.key("shares/trainings", repetition), (case.inputs, case.targets)
        how: Values = {"draws": round(F / case.ratio), "objective": goal, "progress": False}
        return _pooled(variance_split(model, DATA, PROCESS, x, t, counts, seed, **how).variance.value, weights)

    def predict(case: SimpleNamespace, group: int) -> Tensor:  # the same by the V-kernel
        how: Values = {"draws": round(F / case.ratio), "sets": case.sets}
        kernel = kernels.Linear(model, DATA, PROCESS, seed=run.key("shares/kernel", group), **how)
        return _pooled(torch.stack([kernel.only(p).cov(x, t).trace() for p in ("misfit", "target_noise")]), weights)

    cost = [case.repetitions * case.inputs * case.targets / case.ratio for case in cases]
    measured, predicted = [], []
    for case, share in zip(cases, (0.4 * c / sum(cost) for c in cost), strict=True):
        measured.append(share_of(torch.stack([split(case, k) for k in range(case.repetitions)])).stack(-1))
        run.step(share)
        predicted.append(share_of(torch.stack([predict(case, k) for k in range(case.groups)])).stack(-1))
        run.step(share)
    ratios, twin = [case.ratio for case in cases], split(cases[0], 0, "J0")
    run.step(0.05)
    table, theory = torch.stack(measured), torch.stack(predicted)  # (ratio, source, where, 3)
    noise, line, names = table[:, 1], theory[:, 1], (TOGETHER, *(f"t = {t:g}" for t in TIMES))
    arrays: Values = {"features_over_draws": ratios, "where": names, "sources": ("inputs", "targets")}
    arrays |= {"share": table, "predicted": theory, "variance_of_J0": twin}
    rows: Values = {"few": noise[0, 0], "one": noise[ratios.index(1.0), 0], "many": noise[-1, 0]}
    met = (noise[..., 1] <= line[..., 2]) & (line[..., 1] <= noise[..., 2])
    rows |= {"least": noise[:, 0, 1].min(), "together": TOGETHER}
    page = Page(run, "shares", arrays, noise=noise, line=line, met=met, F=F, cases=cases, times=TIMES, **rows)
    page.picture("shares", plots.share_curves, ratios, names, noise.movedim(1, 0), line.movedim(1, 0))
    return page.exhibit(0.15)


# Training time
PARTS = {"targets": "target noise", "inputs": "inputs", "init": "initialisation"}
TIME, EULER = 0.2, 30  # uniform Euler steps, as in the paper
TAUS, QUICK_TAUS = tuple(10 ** (k / 2) for k in range(-4, 11)), (0.1, 1.0, 1e2, 1e4)


def lazy(tau: float) -> Lazy:
    """Return the network of infinite width, trained for time ``tau``."""
    return Lazy(NTK(2, "relu", init_width=256), tau, target="x0")


def crossing(taus: Tensor, up: Tensor, down: Tensor) -> float:
    """Return the first τ at which ``up`` overtakes ``down``, linear between points on log axes; NaN where never."""
    gap = (up.clamp_min(1e-300) / down.clamp_min(1e-300)).log()
    over = ((gap[:-1] < 0) & (gap[1:] >= 0)).nonzero().flatten().tolist()
    if not over:
        return math.nan
    k, x = over[0], taus.log()
    return float((x[k] - gap[k] * (x[k + 1] - x[k]) / (gap[k + 1] - gap[k])).exp())


def _crossing(taus: Tensor, parts: Tensor, groups: int) -> Tensor:
    """Return when target noise overtakes initialisation ``(3,)`` in ``parts (τ, repetition, part)``."""

    def at(some: Tensor) -> float:
        mean = some.mean(1)
        return math.log(crossing(taus, mean[:, 0], mean[:, 2]))

    return jackknife(at(parts), leave_one_out(at, parts, groups, dim=1)).exp().stack()


def paired_squares(s: Tensor, s0: Tensor, still: Tensor, weights: Tensor) -> Tensor:
    """Return q ``(M, part + 1)``, the whole last, from scores ``(M, n)`` of J1, of J0, and of J0 with f₀ = 0."""
    S = PROCESS.S(torch.tensor(TIME, dtype=torch.float64))
    return torch.stack([S * (weights * squares(d)).sum(-1) for d in (s - s0, still, s0 - still, s)], -1)


@one_thread()
def v_lazy(run: Run) -> Exhibit:
    """Follow the parts of the variance of a lazy network against its training time."""
    spec, sizes, taus = run.spec("v_lazy"), run.sizes("v_lazy"), QUICK_TAUS if run.quick else TAUS
    spec["seed"], measured = run.key("v_lazy/ensemble"), spec["grid"]["model.tau"]
    x, weights = places(TIME, spec["measure"]["places"])
    how: Values = {"draws": spec["training"]["draws"], "sets": sizes.sets}
    seeds = [run.key("v_lazy/kernel", group) for group in range(sizes.groups)]
    lines, directions = [], []
    for tau in run.each(taus, 0.3):
        found = [kernels.Lazy(lazy(tau), DATA, PROCESS, seed=seed, **how) for seed in seeds]
        parts = [V.parts(x, TIME) for V in found]
        lines.append(torch.stack([torch.stack([weights @ p[name][:, 0, 0] for name in PARTS]) for p in parts]))
        directions.append(sum(V.effective for V in found) / sizes.groups)
    ds = run.study(spec, 0.45)
    quiet: Values = {"model": spec["model"] | {"init": False}, "objective": {"K": math.inf}}
    still = run.study(spec, 0.1, sampler={"samples": 0}, grid={"model.tau": measured}, **quiet)["score"]
    both = [ds["score"].sel(objective=o) for o in OBJECTIVES]
    scores = [torch.from_numpy(v.isel(time=0).transpose("tau", "member", "place").values) for v in (*both, still)]
    q = torch.stack([paired_squares(a, b, c, weights) for a, b, c in zip(*scores, strict=True)])
    line = torch.stack(lines) * PROCESS.S(torch.tensor(TIME, dtype=torch.float64))  # (τ, group, part)
    value = torch.stack([Estimate.of_log(v.mean(0), relative_se(v), len(v) - 1).stack() for v in q], 1)
    gaps = torch.from_numpy(ds["gap"].transpose("tau", "objective", "member").values)[..., : spec["sampler"]["first"]]
    pairs = [twins(one, zero, LEAST) for one, zero in gaps]
    gaps = torch.cat([gaps, gaps[:, :1] - gaps[:, 1:]], 1)  # J1, J0 and their difference
    same, times = [taus.index(tau) for tau in measured], torch.tensor(measured, dtype=torch.float64)
    cross = torch.stack([_crossing(times, line[same], sizes.groups), _crossing(times, q, 8)])  # predicted and measured
    whole = torch.cat([line, line.sum(-1, keepdim=True)], -1)  # (τ, group, part + 1)
    both_totals = zip(q, whole[same], strict=True)
    ratio = torch.stack([ratio_of_means(a, b, paired=False).stack() for a, b in both_totals])  # (τ, 3, part + 1)
    mass, predicted = Estimate.of_mean(gaps, dim=-1).stack(-1), whole.mean(1)
    arrays: Values = {"tau": taus, "parts": [*PARTS, "total"], "predicted": predicted, "measured_tau": measured}
    arrays |= {"learned_directions": directions, "measured": value, "ratio": ratio, "gap_mass": mass}
    arrays |= {"gap_mass_of_few": _integrators(run, spec, sizes.few), "crossing": torch.nan_to_num(cross, nan=-1.0)}
    outside = [f"{tau:g}" for tau, (_, low, high) in zip(measured, ratio[..., -1], strict=True) if not low <= 1 <= high]
    names = [*PARTS.values(), "all together"]
    values: Values = {"cross": cross, "outside": outside, "names": names, "euler": EULER, "time": TIME, "pairs": pairs}
    page = Page(run, "v_lazy", arrays, spec=spec, **values, **vars(sizes))
    curves = dict(zip(names, predicted.mT, strict=True))
    points = dict(zip(names, value.movedim((2, 0), (0, 1)), strict=True))
    masses = {f"{goal}, mean": mass[:, k].mT for k, goal in enumerate(OBJECTIVES)}
    masses |= {f"{goal}, median": stacked([r.medians[k] for r in pairs]).stack() for k, goal in enumerate(OBJECTIVES)}
    page.picture("v_lazy", plots.part_curves, taus, curves, measured, points, masses, float(cross[0, 0]))
    return page.exhibit(0.1)


def _integrators(run: Run, spec: Values, members: int) -> Tensor:
    """Return mean gap masses ``(integrator, objective)`` at the last τ: as used, finer, and the paper's."""
    own, paper = spec["sampler"], {"steps": EULER, "method": "euler", "spacing": "uniform"}
    schemes = {"name": "scheme", "values": [own, own | {"steps": 2 * own["steps"]}, own | paper], "labels": [*"abc"]}
    grid = {"objective.K": spec["grid"]["objective.K"], "sampler": schemes}
    model = spec["model"] | {"tau": spec["grid"]["model.tau"][-1]}
    found = run.study(spec, 0.05, members=members, model=model, measure={"gap": spec["measure"]["gap"]}, grid=grid)
    return torch.from_numpy(found["gap"].mean("member").transpose("scheme", "objective").values)
