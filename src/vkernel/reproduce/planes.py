r"""Laws in the plane: the paper's Figure 3, and networks in place of its linear models (docs/theory.md, §6.4 and §7).

Four points on the unit circle, turned by 0, 22.5 and 45 degrees; P = 500 draws for each member; J1 and J0 on the same
inputs. In Figure 3 the denoiser is linear, :math:`\hat m = W\phi`, in products of 10 × 10 × 10 Gaussian or Fourier
functions of :math:`(x_1, x_2, t)`. The maps show the average law :math:`\bar q(x_\epsilon) = E_\theta\,
q_\theta(x_\epsilon)` of an ensemble, sampled by the PF-ODE. Four masses summarise it, with the training points at
:math:`\alpha y`:

======  ============================================================================================================
away    :math:`P(\min_i |x - \alpha y_i| > .25)`
arcs    away, and near the circle: :math:`.75 < |x| < 1.25`
sides   away, and within .15 of the straight line between two neighbours; this overlaps with the arcs
centre  :math:`|x| < .5`
======  ============================================================================================================

Masses of J1 and J0 are compared in pairs of members: :func:`vkernel.core.estimate.ratio_of_means`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
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
from vkernel.reproduce.exhibit import Exhibit, Page, Run, one_thread

GOALS = {"J1": "J1, noisy targets", "J0": "J0, exact targets"}
REGIONS = {"far": "away", "arcs": "arcs", "sides": "sides", "centre": "centre"}  # names in the study and on the page
ROTATIONS, KINDS = (0.0, 22.5, 45.0), ("Gaussian", "Fourier")
EPS, NEAR, LIMIT = 0.01, 0.25, 1.5
CHECKED = (5, 4)  # members of linear models and of networks for which steps are halved

Spec = dict[str, Any]


def masses(ds: Dataset, *dims: str) -> Tensor:
    """Return the masses ``(*dims, region, member)`` of the members that did not diverge."""
    found = torch.from_numpy(ds[list(REGIONS)].to_array("region").transpose(*dims, "region", "member").values)
    return found[..., found.isfinite().flatten(0, -2).all(0)]


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
    spec, dims = run.spec("figure3"), ("scheme", "features", "objective", "rotation")
    ds = run.study(spec, 0.75)
    whole = masses(ds, *dims)
    mass, mean_score = whole[:2], whole[2, :, 1, :, :, 0]  # the mean score is that of J0, which J1 shares
    law = _laws(ds, *dims)[:2]
    change, shift = _halving(run, spec, CHECKED[0], "features", "rotation", "objective")
    n = 4 * _sampler(spec)["samples"]
    exact = [_sampler(spec, label) | {"law": "exact", "samples": n} for label in ("published", "converged")]
    arrays = {
        **_common(law, mass),
        "seed": run.seed,
        "quick": run.quick,
        "integrators": ["published", "converged"],
        "features": [kind.lower() for kind in KINDS],
        "exact_score_mass": masses(run.study(_few(spec, 1, exact), 0.02), "scheme")[..., 0],
        "mean_score_mass": mean_score,
        "halving_change": change,
        "halving_moved": shift,
    }
    away = mass.mean(3)[..., 0, :]  # mean over rotations: (integrator, features, objective, M)
    kinds = [
        {
            "name": name,
            "ratio": ratio(away[1, k]),
            "regions": regions(mass[1, k]),
            "away": away[:, k].mean(-1),
            "mean_score": mean_score[k, :, 0].mean(),
            "turn": Estimate.of_mean(mass[1, k, 0, 2, 0] - mass[1, k, 0, 0, 0]),
            "change": Estimate.of_mean(away[0, k, 0] - away[1, k, 0]),
        }
        for k, name in enumerate(KINDS)
    ]
    column = law[0, 0, 0, 2, law.shape[-2] // 6 : -law.shape[-2] // 6].sum(1)  # |x₁| < 1, Gaussian features at 45°
    tail = math.exp(-(NEAR**2) / (2 * float(VP().S(torch.tensor(EPS, dtype=torch.float64)))))
    about = {"near": NEAR, "checked": CHECKED[0], "tail": tail, "exact_samples": n, "sampler": _sampler(spec)}
    page = Page(
        run, "figure3", arrays, spec=spec, kinds=kinds, ratio=ratio, contrast=column.max() / column.min(), **about
    )
    rows = [f"{kind} features\n{words}" for kind in KINDS for words in GOALS.values()]
    for i, (stem, key) in enumerate({"figure3": "published", "figure3_converged": "converged"}.items()):
        draw = _draw(law[i].flatten(0, 1), mass[i].flatten(0, 1), rows, law)
        page.picture(stem, draw, how=page(f"how.{key}"), i=i)
    return page.exhibit(0.13)


@one_thread()
def mlp_plane(run: Run) -> Exhibit:
    """Map the average laws of small networks, and compare them with the linear models of Figure 3."""
    spec, dims = run.spec("mlp_plane"), ("scheme", "objective", "rotation")
    ds = run.study(spec, 0.65)
    (mass, mean_score), law = masses(ds, *dims), _laws(ds, *dims)[0]
    steps, own = spec["model"]["steps"], _sampler(spec)
    change, _ = _halving(run, spec, CHECKED[1], "objective", "rotation")
    factors = {"model.steps": [steps // 3, 2 * steps], "objective.K": spec["grid"]["objective.K"]}
    other = _few(spec, spec["members"] // 2, [own | {"samples": own["samples"] // 2}], **factors)
    other["data"] = spec["data"] | {"rotation": ROTATIONS[1]}
    length = masses(run.study(other, 0.2).isel(scheme=0), "steps", "objective")
    arrays = {
        **_common(law, mass),
        "mean_score_mass": mean_score[..., 0],
        "halving_change": change,
        "lengths": factors["model.steps"],
        "length_mass": length,
    }
    by_length = {steps // 3: length[0, :, 0], steps: mass[:, 1, 0], 2 * steps: length[1, :, 0]}
    linear = _linear(run)
    columns = {"networks": regions(mass), **{f"linear, {kind}": regions(m) for kind, m in linear.items()}}
    page = Page(
        run,
        "mlp_plane",
        arrays,
        spec=spec,
        sampler=own,
        near=NEAR,
        checked=CHECKED[1],
        whole=mass.mean(1)[:, 0],
        ratio=ratio,
        regions=columns["networks"],
        columns=columns,
        by_length=by_length,
        apart=apart([ratio(m) for m in by_length.values()]),
        linear=linear,
        unlike=[
            f"{region} ({kind.removeprefix('linear, ')})"
            for kind, found in columns.items()
            for region in found
            if apart([found[region], columns["networks"][region]])
        ],
    )
    page.picture("mlp_plane", _draw(law, mass, [f"networks\n{words}" for words in GOALS.values()], law))
    return page.exhibit(0.05)


def _linear(run: Run) -> dict[str, Tensor]:
    """Return the converged masses of Figure 3, if this folder has it for this seed and size."""
    path = run.out / "figure3.npz"
    with np.load(path) if path.exists() else contextlib.nullcontext({}) as saved:
        if "quick" not in saved or (saved["seed"], saved["quick"]) != (run.seed, run.quick):
            return {}
        return dict(zip(KINDS, torch.from_numpy(saved["mass"])[1], strict=True))


def _few(spec: Spec, members: int, samplers: Sequence[Spec], **grid: Any) -> Spec:
    """Return the study with fewer members, other samplers, and no other factors than the given ones."""
    sampler = {"name": "scheme", "values": list(samplers), "labels": [str(k) for k in range(len(samplers))]}
    return spec | {"members": members, "grid": grid | {"sampler": sampler}}


def _sampler(spec: Spec, label: str = "converged") -> Spec:
    sampler = spec["grid"]["sampler"]
    return sampler["values"][sampler["labels"].index(label)]


def _halving(run: Run, spec: Spec, members: int, *dims: str) -> tuple[Tensor, Tensor]:
    """Halve the step of the converged sampler: return the change of the mass away from the points, ``(*dims,)``, and
    the distance within which 95 % of the samples stay."""
    own = _sampler(spec)
    finer = _few(spec, members, [own, own | {"steps": 2 * own["steps"]}], **spec["grid"])
    ds = run.study(finer, 0.1, measure=spec["measure"] | {"keep": own["samples"]})
    found = ds[["far", "sample"]].diff("scheme").isel(scheme=0)
    distance = ((found["sample"] ** 2).sum("component") ** 0.5).quantile(0.95, ("member", "index"))
    change, moved = (v.transpose(*dims).values for v in (-found["far"].mean("member"), distance))
    return torch.from_numpy(change), torch.from_numpy(moved)


def _laws(ds: Dataset, *dims: str) -> Tensor:
    """Return average densities ``(*dims, x₁, x₂)``."""
    return torch.from_numpy(ds["density"].mean("member").transpose(*dims, "x", "y").values)


def _common(law: Tensor, mass: Tensor) -> dict[str, Any]:
    axes = {"objectives": list(GOALS), "rotations": ROTATIONS, "regions": list(REGIONS.values()), "limit": LIMIT}
    return {**axes, "law": law, "mass": mass, "points": _points()}


def _points() -> Tensor:
    """Return the training points at eps for each rotation, ``(rotation, 4, 2)``."""
    alpha = VP().alpha(torch.tensor(EPS, dtype=torch.float64))
    return torch.stack([alpha * toy("square", rotation=r)[:] for r in ROTATIONS])


def _draw(law: Tensor, mass: Tensor, rows: Sequence[str], every: Tensor) -> Callable[[], Figure]:
    """Return a function that draws laws ``(row, rotation, …)`` with the masses away from the points as notes."""
    # one bin in a hundred of ``every`` law exceeds the end of the colour scale
    top = float(f"{float(every.flatten().quantile(0.99)):.1g}")
    columns = [f"turned by {r:g}°" for r in ROTATIONS]
    notes = [[f"away {v:.2f}" for v in row] for row in mass[:, :, 0].mean(-1).tolist()]
    return lambda: plots.plane_laws(law, _points(), rows=rows, columns=columns, limit=LIMIT, top=top, notes=notes)
