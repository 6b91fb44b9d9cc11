r"""Exhibits of the laws that trained models learn: the paper's Figures 2 and 3, and networks in place of linear models.

Members are trained on the same inputs with noisy targets (J1) and with noiseless ones (J0) and sampled by the PF-ODE
(docs/theory.md, §6, §7 and §9).

**Figure 2.** Data {-1, 0, 1}; a linear denoiser on 16 × 16 Gaussian features, ridge .1, fitted to P draws; 100 models a
panel, five P and three cutoffs. *As published*: 30 uniform Euler steps, the denoiser taken at the right neighbour of
200 grid points. *Converged*: 200 exponential steps, even in log(sigma/alpha), and linear interpolation between 1,001
grid points on ±2.5, beyond which the features vanish. Laws follow from quantiles of the prior instead of random starts,
and are normalised on ±1.5, as published. At F/P = 1 more models are trained, and their samples kept: an average over
models is not the law of one of them.

**Figure 3.** Four points on the unit circle, turned by 0, 22.5 and 45 degrees; P = 500 draws for each member. The
denoiser is linear, :math:`\hat m = W\phi`, in products of 10 × 10 × 10 Gaussian or Fourier functions of
:math:`(x_1, x_2, t)`, or a network. The maps show the average law :math:`\bar q(x_\epsilon) = E_\theta\,
q_\theta(x_\epsilon)` of an ensemble. Four masses summarise it, with the training points at :math:`\alpha y`: *away*,
farther than .25 from all of them; *arcs*, away and near the circle, :math:`.75 < |x| < 1.25`; *sides*, away and within
.15 of the straight line between two neighbours, which overlaps with the arcs; *centre*, :math:`|x| < .5`. Values of J1
and J0 are compared in pairs of models, which differ if they do by more than .01 of the samples:
:func:`vkernel.core.estimate.twins`.

**Atoms.** Of the samples of one model in a region, those in the densest ball of radius :math:`\sigma_\epsilon` around
one of them are a *cluster*. Its width is the median distance of its samples from their median, in units of
:math:`\sigma_\epsilon`; noised data :math:`p(x|\epsilon)` on the line would have .44. A cluster far narrower is an
atom: the model returns one point, as if it were a training point.
"""

import contextlib
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from xarray import Dataset

from vkernel import plots
from vkernel.core.estimate import LEAST, Estimate, Twins, ratio_of_means, stacked, twins
from vkernel.data import toy
from vkernel.process import VP
from vkernel.reproduce.exhibit import Exhibit, Page, Run, Values, one_thread
from vkernel.score import EmpiricalScore

GOALS = {"J1": "J1, noisy targets", "J0": "J0, exact targets"}
LIMIT = 1.5  # of the maps, and of the laws of Figure 2
_pairs = functools.partial(twins, least=LEAST)

# Figure 2
MODES = ("left", "middle", "right")
WORDS = {"published": "as published: 30 Euler steps", "converged": "converged"}
GAP, F = (0.25, 0.75), 256
SHOWN = 1  # eps = 1e-3, that of the finding
FEW, MANY = 10, 40  # samples that a cluster is looked for in, models whose laws are shown
LARGE = 0.1  # a share of a model's samples in the gaps that is large


def figure2(run: Run) -> Exhibit:
    """Train and sample the ensembles of all panels, and compare the shares of samples in the gaps."""
    spec = run.spec("figure2")
    sampler = spec["grid"]["sampler"]
    ensembles = run.study(spec, 0.6)
    with_exact = sampler | {"values": [value | {"law": "exact"} for value in sampler["values"]]}
    factors = {"process.eps": spec["grid"]["process.eps"], "sampler": with_exact}
    exact = run.study(spec, 0.05, members=1, grid=factors).isel(member=0)
    eps, draws, schemes = (ensembles[k].values.tolist() for k in ("eps", "draws", "scheme"))
    found: Values = {"eps": eps, "P": draws, "F": F, "members": spec["members"], "x": ensembles["x"].values}
    found["quantiles"] = sampler["values"][0]["samples"]
    laws: dict[str, dict[str, tuple[Tensor, Tensor, Tensor]]] = {scheme: {} for scheme in schemes}
    gaps: dict[str, dict[str, Estimate[Tensor]]] = {scheme: {} for scheme in schemes}
    bare = {}
    for scheme in schemes:
        part = exact.sel(scheme=scheme)
        part = part / part["inside"]  # shares and densities of the samples on ±1.5, as published
        bare[scheme], found[f"{scheme}_exact_density"] = part["gap"].values, part["density"].values
        found[f"{scheme}_exact_gap"] = bare[scheme]
        for objective in GOALS:
            ds = ensembles.sel(scheme=scheme, objective=objective)
            ds, key = ds / ds["inside"], f"{scheme}_{objective}"
            gap, density, *modes = (torch.from_numpy(ds[k].values) for k in ("gap", "density", *MODES))
            mean, low, high = density.mean(2), *density.quantile(torch.tensor([0.25, 0.75]).double(), 2)
            laws[scheme][objective], gaps[scheme][objective] = (mean, low, high), Estimate.of_mean(gap, dim=-1)
            found |= {f"{key}_gap": gap, f"{key}_modes": torch.stack(modes, -1)}
            found |= {f"{key}_density": mean, f"{key}_quartiles": torch.stack([low, high])}
    ratios = [{0.5: "½", 0.25: "¼"}.get(F / P, f"{F / P:g}") for P in draws]  # as text
    both = torch.stack([found[f"converged_{o}_gap"] for o in GOALS], 2)  # (eps, P, objective, M)
    pairs, single = [[_pairs(*gap) for gap in row] for row in both], _single(run, spec, 0.3)
    found |= {f"single_{key}": value for key, value in single.items()}
    cells, spread = [_pairs(*gap) for gap in single["gap"]], [_spread(gap) for gap in single["gap"]]
    values: Values = {"shares": gaps, "exact_gaps": bare, "pairs": pairs, "cells": cells, "cell": cells[SHOWN]}
    values |= {"spread": spread, "kept": sampler["values"][-1]["samples"]}
    page = Page(run, "figure2", found, seed=run.seed, schemes=schemes, ratios=ratios, shown=SHOWN, **values)
    rows = [f"eps = {e:g}" for e in eps]
    grid = torch.linspace(-LIMIT, LIMIT, 601, dtype=torch.float64)
    noised = torch.stack([EmpiricalScore(toy("triple"), VP(eps=e)).posterior(grid[:, None], e).logp.exp() for e in eps])
    edges = torch.linspace(-LIMIT, LIMIT, len(found["x"]) + 1, dtype=torch.float64)
    labels: Values = {"noised": (grid, noised), "rows": rows, "columns": [f"F/P = {r}" for r in ratios]}
    for scheme, words in WORDS.items():
        means = torch.stack([gaps[scheme][o].value for o in GOALS], -1)  # (eps, P, objective)
        labels["notes"] = [[f"{a:.2f} / {b:.2f}" for a, b in row] for row in means.tolist()]
        labels["exact"] = found[f"{scheme}_exact_density"]
        more = {"scheme": words, "gaps": gaps[scheme]["J1"].value[SHOWN]}
        page.picture(f"figure2-{scheme}", plots.law_grid, edges, laws[scheme], gap=GAP, **labels, key="laws", more=more)
    curves: Values = {words: gaps[s] for s, words in WORDS.items()}
    levels = {words: bare[s] for s, words in WORDS.items()}
    middle = [stacked([pair.medians[k] for row in pairs for pair in row], (len(eps), -1)) for k in range(len(GOALS))]
    medians = dict(zip(GOALS, middle, strict=True))
    page.picture("figure2-gaps", plots.gap_shares, [F / P for P in draws], curves, rows, levels, medians, key="gaps")
    each = single["density"][SHOWN]  # (objective, M, bin)
    shown, count = torch.cat([each[:, :MANY], each.mean(1, keepdim=True)], 1), each.shape[1]
    drawn = [dict(zip(GOALS.values(), v, strict=True)) for v in (shown, single["gap"][SHOWN])]
    page.picture("figure2-models", plots.member_laws, edges, *drawn, GAP, f"mean of {count}", key="models")
    return page.exhibit(0.05)


def _spread(gap: Tensor) -> dict[str, list[Estimate]]:
    """Return shares of models with few and with many samples in the gaps, from ``gap (objective, M)``, by objective."""
    hits = {"few": gap < LEAST, "many": gap > LARGE}
    return {name: [Estimate.of_share(int(h.sum()), len(h)) for h in own] for name, own in hits.items()}


def _single(run: Run, spec: Values, share: float) -> Values:
    """Return, at F/P = 1 and converged, ``gap (eps, objective, M)`` and ``density (eps, objective, M, bin)`` of single
    models, and the :func:`clusters` of their samples in the gaps and at 0, ``(eps, objective, 3)``."""
    grid, sampler = dict(spec["grid"]), spec["grid"]["sampler"]["values"][-1]
    del grid["sampler"], grid["training.draws"]
    measure = spec["measure"] | {"keep": sampler["samples"]}
    how: Values = {"sampler": sampler, "measure": measure, "training": {"draws": F}, "grid": grid}
    ds = run.study(spec, share, members=run.sizes("figure2").models, **how).transpose("eps", "objective", "member", ...)
    gap, density, inside, x = (torch.from_numpy(ds[k].values) for k in ("gap", "density", "inside", "sample"))
    sigma, size = VP().sigma(torch.tensor(ds["eps"].values)), x[..., 0].abs()
    found: Values = {"gap": gap / inside, "density": density / inside[..., None], "sigma": sigma}
    scaled, between = x / sigma.reshape(-1, 1, 1, 1, 1), (size > GAP[0]) & (size < GAP[1])
    return found | {"clusters": clusters(scaled, between), "clusters_at_0": clusters(scaled, size < GAP[0])}


def clusters(x: Tensor, where: Tensor) -> Tensor:
    """Return what the samples ``x (*cells, M, n, d)`` in a region, ``where (*cells, M, n)``, have in common: the number
    of models with ``FEW`` or more there, and medians over these models of the share of such samples in the densest ball
    of radius 1 and of its width. The result is ``(*cells, 3)``."""
    found = []
    for models, masks in zip(x.flatten(0, -4), where.flatten(0, -3), strict=True):
        rows = [_densest(own[mask]) for own, mask in zip(models, masks, strict=True) if mask.sum() >= FEW]
        share, width = torch.tensor(rows or [(0.0, 0.0)], dtype=torch.float64).quantile(0.5, 0).tolist()
        found.append((len(rows), share, width))
    return torch.tensor(found, dtype=torch.float64).reshape(*x.shape[:-3], 3)


def _densest(x: Tensor) -> tuple[float, float]:
    """Return the share of ``x (n, d)`` in the densest ball of radius 1 around one of them, and the ball's width."""
    near = torch.cdist(x, x) <= 1
    ball = x[near[near.sum(1).argmax()]]
    return len(ball) / len(x), float((ball - ball.median(0).values).norm(dim=1).median())


# Laws in the plane
REGIONS = {"far": "away", "arcs": "arcs", "sides": "sides", "centre": "centre"}  # names in the study and on the page
ROTATIONS, KINDS = (0.0, 22.5, 45.0), ("Gaussian", "Fourier")
EPS, NEAR, EACH = 0.01, 0.25, 4  # the last: models whose laws are shown


def masses(ds: Dataset, *dims: str) -> Tensor:
    """Return the masses ``(*dims, region, member)`` of the members that did not diverge."""
    found = torch.from_numpy(ds[list(REGIONS)].to_array("region").transpose(*dims, "region", "member").values)
    return found[..., found.isfinite().flatten(0, -2).all(0)]


def laws(ds: Dataset, *dims: str) -> Tensor:
    """Return average densities ``(*dims, x₁, x₂)``."""
    return torch.from_numpy(ds["density"].mean("member").transpose(*dims, "x", "y").values)


def ratio(mass: Tensor) -> Estimate:
    """Return J1 / J0 of ``mass (objective, M)``."""
    return ratio_of_means(mass[0], mass[1], paired=True)


def regions(mass: Tensor) -> dict[str, Twins]:
    """Compare J1 with J0 in each region over all rotations, of ``mass (objective, rotation, region, M)``."""
    return {name: _pairs(*mass[:, :, q].mT) for q, name in enumerate(REGIONS.values())}


def apart(found: Sequence[Estimate]) -> bool:
    """Whether the intervals have no common point."""
    return max(f.low for f in found) > min(f.high for f in found)


def like_linear(*ratios: Sequence[Estimate]) -> tuple[list[str], list[str]]:
    """Divide the regions with an effect, where an interval of ``ratios[region]`` (networks first, then the kinds of
    linear models) excludes 1: into those where the networks' interval meets one of the others, and the rest."""
    found: tuple[list[str], list[str]] = ([], [])
    for name, (own, *linear) in zip(REGIONS.values(), ratios, strict=True):
        if any(r.low > 1 or r.high < 1 for r in (own, *linear)):
            found[all(apart([own, r]) for r in linear)].append(name)
    return found


@one_thread()
def figure3(run: Run) -> Exhibit:
    """Map the average laws of linear models with two kinds of features, and compare masses of J1 and J0."""
    spec, dims = run.spec("figure3"), ("features", "objective", "rotation")
    ds, schemes, order = run.study(spec, 0.85), _schemes(spec), ("features", "rotation", "objective")
    shown = ds.sel(scheme=["published", "converged"])
    mass, law = masses(shown, "scheme", *dims), laws(shown, "scheme", *dims)
    mean_score = masses(ds.sel(scheme="mean"), *dims)[:, 1, :, :, 0]  # that of J0, which J1 shares
    n = 4 * schemes["converged"]["samples"]
    exact = [schemes[name] | {"law": "exact", "samples": n} for name in ("published", "converged")]
    exact_mass = masses(run.study(_few(spec, 1, exact), 0.02), "scheme")[..., 0]
    finer = ds.sel(scheme="finer")["sample"] - ds.sel(scheme="converged")["sample"]
    moved = ((finer**2).sum("component", skipna=False) ** 0.5).quantile(0.95, ("member", "index")).transpose(*order)
    arrays: Values = {**_common(ds, law, mass, *order), "seed": run.seed, "quick": run.quick}
    arrays |= {"integrators": ["published", "converged"], "features": [kind.lower() for kind in KINDS]}
    arrays |= {"mean_score_mass": mean_score, "exact_score_mass": exact_mass, "halving_moved": moved.values}
    away = mass.mean(3)[..., 0, :]  # mean over rotations: (integrator, features, objective, M)
    single = ds.sel(scheme="converged").transpose(*dims, "member", "index", "component", "x", "y", ...)
    x, sigma = torch.from_numpy(single["sample"].values), VP().sigma(torch.tensor(EPS, dtype=torch.float64))
    arrays["clusters"] = atoms = clusters(x / sigma, _away(x))
    kinds: list[Values] = []
    for k, name in enumerate(KINDS):
        turn, change = mass[1, k, 0, 2, 0] - mass[1, k, 0, 0, 0], away[0, k, 0] - away[1, k, 0]
        kinds.append({"name": name, "turn": Estimate.of_mean(turn), "change": Estimate.of_mean(change)})
        kinds[k] |= {"away": away[:, k].mean(-1), "mean_score": mean_score[k, :, 0].mean()}
        kinds[k] |= {"regions": regions(mass[1, k]), "clusters": atoms[k].mean(1)}  # means over rotations
        kinds[k]["centre"] = [Estimate.of_mean(own) for own in mass[1, k, :, :, 3].mean(1)]  # by objective
    overlap = [not apart([kind["centre"][k] for kind in kinds]) for k in range(len(GOALS))]
    column = law[0, 0, 0, 2, law.shape[-2] // 6 : -law.shape[-2] // 6].sum(1)  # |x₁| < 1, Gaussian features at 45°
    tail = math.exp(-(NEAR**2) / (2 * float(VP().S(torch.tensor(EPS, dtype=torch.float64)))))
    values: Values = {"kinds": kinds, "twins": _pairs, "contrast": column.max() / column.min(), "tail": tail}
    values["overlap"] = overlap
    page = Page(run, "figure3", arrays, **_about(spec), **values, exact_samples=n)
    rows = [f"{kind} features\n{words}" for kind in KINDS for words in GOALS.values()]
    for i, (stem, key) in enumerate({"figure3": "published", "figure3_converged": "converged"}.items()):
        more = {"how": page(f"how.{key}"), "i": i}
        page.picture(stem, _draw, *(v[i].flatten(0, 1) for v in (law, mass[..., 0, :].mean(-1))), rows, law, more=more)
    each = torch.from_numpy(single["density"].isel(rotation=0, member=slice(EACH)).values), mass[1, :, :, 0, 0, :EACH]
    page.picture("figure3_models", _draw, *(v.flatten(0, 1) for v in each), rows, law, models=True, key="models")
    return page.exhibit(0.13)


def _away(x: Tensor) -> Tensor:
    """Return whether samples ``(features, objective, rotation, …, 2)`` are away from the training points."""
    return torch.stack([torch.cdist(own, p).amin(-1) > NEAR for own, p in zip(x.unbind(2), _points(), strict=True)], 2)


@one_thread()
def mlp_plane(run: Run) -> Exhibit:
    """Map the average laws of small networks, and compare them with the linear models of Figure 3."""
    spec, dims = run.spec("mlp_plane"), ("objective", "rotation")
    ds, own = run.study(spec, 0.75), _schemes(spec)["converged"]
    shown, steps = ds.sel(scheme="converged"), spec["model"]["steps"]
    mass, law, mean_score = masses(shown, *dims), laws(shown, *dims), masses(ds.sel(scheme="mean"), *dims)[..., 0]
    factors = {"model.steps": [steps // 3, 2 * steps], "objective.K": spec["grid"]["objective.K"]}
    other = _few(spec, spec["members"] // 2, [own | {"samples": own["samples"] // 2}], **factors)
    other["data"] = spec["data"] | {"rotation": ROTATIONS[1]}
    length = masses(run.study(other, 0.2).isel(scheme=0), "steps", "objective")
    arrays: Values = {**_common(ds, law, mass, *dims), "mean_score_mass": mean_score}
    arrays |= {"lengths": factors["model.steps"], "length_mass": length}
    by_length = {steps // 3: length[0, :, 0], steps: mass[:, 1, 0], 2 * steps: length[1, :, 0]}
    linear = _linear(run)
    columns = {"networks": regions(mass), **{f"linear, {kind}": regions(m) for kind, m in linear.items()}}
    alike, unlike = like_linear(*([r[q].ratio for r in columns.values()] for q in REGIONS.values()))
    values: Values = {"twins": _pairs, "whole": mass.mean(1)[:, 0], "regions": columns["networks"], "columns": columns}
    values |= {"by_length": by_length, "apart": apart([ratio(m) for m in by_length.values()])}
    page = Page(run, "mlp_plane", arrays, **_about(spec), **values, linear=linear, alike=alike, unlike=unlike)
    rows = [f"networks\n{words}" for words in GOALS.values()]
    page.picture("mlp_plane", _draw, law, mass[:, :, 0].mean(-1), rows, law)
    return page.exhibit(0.05)


def _linear(run: Run) -> dict[str, Tensor]:
    """Return the converged masses of Figure 3, if this folder has it for this seed and size."""
    path = run.out / "figure3.npz"
    with np.load(path) if path.exists() else contextlib.nullcontext({}) as saved:
        if "quick" not in saved or (saved["seed"], saved["quick"]) != (run.seed, run.quick):
            return {}
        return dict(zip(KINDS, torch.from_numpy(saved["mass"])[1], strict=True))


def _few(spec: Values, members: int, samplers: Sequence[Values], **grid: Any) -> Values:
    """Return the study with fewer members, other samplers, and no other factors than the given ones."""
    sampler = {"name": "scheme", "values": list(samplers), "labels": [str(k) for k in range(len(samplers))]}
    return spec | {"members": members, "grid": grid | {"sampler": sampler}}


def _schemes(spec: Values) -> dict[str, Values]:
    return dict(zip(*(spec["grid"]["sampler"][key] for key in ("labels", "values")), strict=True))


def _about(spec: Values) -> Values:
    schemes = _schemes(spec)
    return {"spec": spec, "sampler": schemes["converged"], "checked": schemes["finer"]["first"], "near": NEAR}


def _common(ds: Dataset, law: Tensor, mass: Tensor, *dims: str) -> Values:
    """Return the arrays of both exhibits, with the change of the mass away from the points when steps are halved."""
    change = ds["far"].sel(scheme="converged") - ds["far"].sel(scheme="finer")
    axes = {"objectives": list(GOALS), "rotations": ROTATIONS, "regions": list(REGIONS.values()), "limit": LIMIT}
    axes["halving_change"] = torch.from_numpy(change.mean("member").transpose(*dims).values)
    return {**axes, "law": law, "mass": mass, "points": _points()}


def _points() -> Tensor:
    """Return the training points at eps for each rotation, ``(rotation, 4, 2)``."""
    alpha = VP().alpha(torch.tensor(EPS, dtype=torch.float64))
    return torch.stack([alpha * toy("square", rotation=r)[:] for r in ROTATIONS])


def _draw(law: Tensor, away: Tensor, rows: Sequence[str], every: Tensor, models: bool = False) -> Figure:
    """Draw laws ``(row, rotation, …)``, or of single ``models (row, model, …)`` at the first rotation, with the masses
    ``away`` from the points, ``(row, column)``, as notes."""
    # one bin in a hundred of ``every`` law exceeds the end of the colour scale
    how: Values = {"top": float(f"{float(every.flatten().quantile(0.99)):.1g}"), "limit": LIMIT, "rows": rows}
    how["notes"] = [[f"away {v:.2f}" for v in row] for row in away.tolist()]
    if models:
        columns = [f"model {k + 1}" for k in range(away.shape[1])]
        return plots.plane_laws(law, _points()[[0] * len(columns)], columns=columns, what="density, one model", **how)
    return plots.plane_laws(law, _points(), columns=[f"turned by {r:g}°" for r in ROTATIONS], **how)
