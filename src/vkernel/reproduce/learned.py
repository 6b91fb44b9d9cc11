r"""Exhibits of the laws that trained models learn: the paper's Figures 2 and 3, and networks in place of linear models.

Members are trained on the same inputs with noisy targets (J1) and with noiseless ones (J0) and sampled by the PF-ODE
(docs/theory.md, §6, §7 and §9).

**Figure 2.** Data {-1, 0, 1}; a linear denoiser on 16 × 16 Gaussian features, ridge .1, fitted to P draws; 100 models a
panel, five P and three cutoffs. *As published*: 30 uniform Euler steps, the denoiser taken at the right neighbour of
200 grid points. *Converged*: 200 exponential steps, even in log(sigma/alpha), and linear interpolation between 2,001
grid points. Laws follow from quantiles of the prior instead of random starts, and are normalised on ±1.5, as published.

**Figure 3.** Four points on the unit circle, turned by 0, 22.5 and 45 degrees; P = 500 draws for each member. The
denoiser is linear, :math:`\hat m = W\phi`, in products of 10 × 10 × 10 Gaussian or Fourier functions of
:math:`(x_1, x_2, t)`, or a network. The maps show the average law :math:`\bar q(x_\epsilon) = E_\theta\,
q_\theta(x_\epsilon)` of an ensemble. Four masses summarise it, with the training points at :math:`\alpha y`: *away*,
farther than .25 from all of them; *arcs*, away and near the circle, :math:`.75 < |x| < 1.25`; *sides*, away and within
.15 of the straight line between two neighbours, which overlaps with the arcs; *centre*, :math:`|x| < .5`. Values of J1
and J0 are compared in pairs of members: :func:`vkernel.core.estimate.ratio_of_means`."""

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from xarray import Dataset

from vkernel import plots
from vkernel.core.estimate import Estimate, ratio_of_means
from vkernel.data import toy
from vkernel.process import VP
from vkernel.reproduce.exhibit import Exhibit, Page, Run, Values, one_thread
from vkernel.score import EmpiricalScore

GOALS = {"J1": "J1, noisy targets", "J0": "J0, exact targets"}
LIMIT = 1.5  # of the maps, and of the laws of Figure 2

# Figure 2
MODES = ("left", "middle", "right")
WORDS = {"published": "as published: 30 Euler steps", "converged": "converged"}
GAP, F = (0.25, 0.75), 256
SHOWN, SQUARE = 1, 2  # eps = 1e-3 and F/P = 1, those of the finding


def figure2(run: Run) -> Exhibit:
    """Train and sample the ensembles of all panels, and compare the shares of samples in the gaps."""
    spec = run.spec("figure2")
    sampler = spec["grid"]["sampler"]
    ensembles = run.study(spec, 0.9)
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
    one, zero = (found[f"converged_{o}_gap"][SHOWN, SQUARE] for o in GOALS)
    values: Values = {"one": one.mean(), "zero": zero.mean(), "difference": Estimate.of_mean(one - zero)}
    values |= {"ratio": ratio_of_means(one, zero, paired=True), "shares": gaps, "exact_gaps": bare}
    page = Page(run, "figure2", found, seed=run.seed, schemes=schemes, ratios=ratios, **values)
    rows = [f"eps = {e:g}" for e in eps]
    grid = torch.linspace(-LIMIT, LIMIT, 601, dtype=torch.float64)
    noised = torch.stack([EmpiricalScore(toy("triple"), VP(eps=e)).posterior(grid[:, None], e).logp.exp() for e in eps])
    edges = torch.linspace(-LIMIT, LIMIT, len(found["x"]) + 1, dtype=torch.float64)
    labels: Values = {"noised": (grid, noised), "rows": rows, "columns": [f"F/P = {r}" for r in ratios]}
    for scheme, words in WORDS.items():
        pairs = torch.stack([gaps[scheme][o].value for o in GOALS], -1)  # (eps, P, objective)
        labels["notes"] = [[f"{a:.2f} / {b:.2f}" for a, b in row] for row in pairs.tolist()]
        labels["exact"] = found[f"{scheme}_exact_density"]
        more = {"scheme": words, "gaps": gaps[scheme]["J1"].value[SHOWN]}
        page.picture(f"figure2-{scheme}", plots.law_grid, edges, laws[scheme], gap=GAP, **labels, key="laws", more=more)
    curves: Values = {words: gaps[s] for s, words in WORDS.items()}
    dotted = {words: bare[s] for s, words in WORDS.items()}
    page.picture("figure2-gaps", plots.gap_shares, [F / P for P in draws], curves, rows, dotted, key="gaps")
    return page.exhibit(0.05)


# Laws in the plane
REGIONS = {"far": "away", "arcs": "arcs", "sides": "sides", "centre": "centre"}  # names in the study and on the page
ROTATIONS, KINDS = (0.0, 22.5, 45.0), ("Gaussian", "Fourier")
EPS, NEAR = 0.01, 0.25


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


def regions(mass: Tensor) -> dict[str, Estimate]:
    """Return J1 / J0 in each region over all rotations, of ``mass (objective, rotation, region, M)``."""
    return {name: ratio(mass.mean(1)[:, q]) for q, name in enumerate(REGIONS.values())}


def apart(found: Sequence[Estimate]) -> bool:
    """Whether the intervals have no common point."""
    return max(f.low for f in found) > min(f.high for f in found)


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
    kinds: list[Values] = []
    for k, name in enumerate(KINDS):
        turn, change = mass[1, k, 0, 2, 0] - mass[1, k, 0, 0, 0], away[0, k, 0] - away[1, k, 0]
        kinds.append({"name": name, "turn": Estimate.of_mean(turn), "change": Estimate.of_mean(change)})
        kinds[k] |= {"away": away[:, k].mean(-1), "mean_score": mean_score[k, :, 0].mean()}
        kinds[k] |= {"ratio": ratio(away[1, k]), "regions": regions(mass[1, k])}
    column = law[0, 0, 0, 2, law.shape[-2] // 6 : -law.shape[-2] // 6].sum(1)  # |x₁| < 1, Gaussian features at 45°
    tail = math.exp(-(NEAR**2) / (2 * float(VP().S(torch.tensor(EPS, dtype=torch.float64)))))
    values: Values = {"kinds": kinds, "ratio": ratio, "contrast": column.max() / column.min(), "tail": tail}
    page = Page(run, "figure3", arrays, **_about(spec), **values, exact_samples=n)
    rows = [f"{kind} features\n{words}" for kind in KINDS for words in GOALS.values()]
    for i, (stem, key) in enumerate({"figure3": "published", "figure3_converged": "converged"}.items()):
        more = {"how": page(f"how.{key}"), "i": i}
        page.picture(stem, _draw, law[i].flatten(0, 1), mass[i].flatten(0, 1), rows, law, more=more)
    return page.exhibit(0.13)


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
    own_ratios, every = columns["networks"], [(k, region) for k in columns for region in REGIONS.values()]
    different = [(k, region) for k, region in every if apart([columns[k][region], own_ratios[region]])]
    unlike = [f"{region} ({kind.removeprefix('linear, ')})" for kind, region in different]
    values: Values = {"ratio": ratio, "whole": mass.mean(1)[:, 0], "regions": columns["networks"], "columns": columns}
    values |= {"by_length": by_length, "apart": apart([ratio(m) for m in by_length.values()])}
    page = Page(run, "mlp_plane", arrays, **_about(spec), **values, linear=linear, unlike=unlike)
    page.picture("mlp_plane", _draw, law, mass, [f"networks\n{words}" for words in GOALS.values()], law)
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


def _draw(law: Tensor, mass: Tensor, rows: Sequence[str], every: Tensor) -> Figure:
    """Draw laws ``(row, rotation, …)`` with the masses away from the points as notes."""
    # one bin in a hundred of ``every`` law exceeds the end of the colour scale
    top = float(f"{float(every.flatten().quantile(0.99)):.1g}")
    columns = [f"turned by {r:g}°" for r in ROTATIONS]
    notes = [[f"away {v:.2f}" for v in row] for row in mass[:, :, 0].mean(-1).tolist()]
    return plots.plane_laws(law, _points(), rows=rows, columns=columns, limit=LIMIT, top=top, notes=notes)
