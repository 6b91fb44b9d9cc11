r"""The paper's Figure 2: what linear models learn from three points, and how much of it is noise of the target.

Data {-1, 0, 1}; a linear denoiser on 16 × 16 Gaussian features, ridge .1, fitted to P draws; 100 models a panel, five P
and three cutoffs, each with noisy targets (J1) and with noiseless ones on the same inputs (J0) (docs/theory.md, §6 and
§9). *As published*: 30 uniform Euler steps, the denoiser taken at the right neighbour of 200 grid points. *Converged*:
200 exponential steps, even in log(sigma/alpha), and linear interpolation between 2,001 grid points. Laws follow from
quantiles of the prior instead of random starts, and are normalised on ±1.5, as published.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from xarray import Dataset

from vkernel import plots
from vkernel.core.estimate import Estimate, ratio_of_means
from vkernel.data import toy
from vkernel.process import VP
from vkernel.reproduce.exhibit import Exhibit, Page, Run
from vkernel.score import EmpiricalScore

OBJECTIVES, MODES = ("J1", "J0"), ("left", "middle", "right")
WORDS = {"published": "as published: 30 Euler steps", "euler100": "100 Euler steps", "converged": "converged"}
LIMIT, GAP, F = 1.5, (0.25, 0.75), 256
SHOWN, SQUARE = 1, 2  # eps = 1e-3 and F/P = 1, those of the finding


def figure2(run: Run) -> Exhibit:
    """Train and sample the ensembles of all panels, and compare the shares of samples in the gaps."""
    spec = run.spec("figure2")
    ensembles = run.study(spec, 0.9)
    eps, draws, schemes = (ensembles[k].values.tolist() for k in ("eps", "draws", "scheme"))
    exact = _exact(run, spec)
    found = {"eps": eps, "P": draws, "F": F, "members": spec["members"], "x": ensembles["x"].values}
    found["quantiles"] = spec["grid"]["sampler"]["values"][0]["samples"]
    laws: dict[str, dict[str, tuple[Tensor, Tensor, Tensor]]] = {scheme: {} for scheme in schemes}
    gaps: dict[str, dict[str, Estimate[Tensor]]] = {scheme: {} for scheme in schemes}
    for scheme in schemes:
        part = exact.sel(scheme=scheme)
        found[f"{scheme}_exact_gap"] = part["gap"].values
        found[f"{scheme}_exact_density"] = part["density"].values
        for objective in OBJECTIVES:
            ds = ensembles.sel(scheme=scheme, objective=objective)
            ds = ds / ds["inside"]  # shares and densities of the samples on ±1.5, as published
            gap, density, *modes = (torch.from_numpy(ds[k].values) for k in ("gap", "density", *MODES))
            mean, low, high = density.mean(2), *density.quantile(torch.tensor([0.25, 0.75]).double(), 2)
            laws[scheme][objective], gaps[scheme][objective] = (mean, low, high), Estimate.of_mean(gap, dim=-1)
            key = f"{scheme}_{objective}"
            found |= {f"{key}_gap": gap, f"{key}_modes": torch.stack(modes, -1)}
            found |= {f"{key}_density": mean, f"{key}_quartiles": torch.stack([low, high])}
    ratios = [{0.5: "½", 0.25: "¼"}.get(F / P, f"{F / P:g}") for P in draws]
    one, zero = (found[f"converged_{o}_gap"][SHOWN, SQUARE] for o in OBJECTIVES)
    page = Page(
        run,
        "figure2",
        found,
        schemes=schemes,
        shares=gaps,
        exact_gaps={s: found[f"{s}_exact_gap"] for s in schemes},
        seed=run.seed,
        ratios=ratios,
        one=one.mean(),
        zero=zero.mean(),
        ratio=ratio_of_means(one, zero, paired=True),
        difference=Estimate.of_mean(one - zero),
    )
    rows, columns = [f"eps = {e:g}" for e in eps], [f"F/P = {r}" for r in ratios]
    grid = torch.linspace(-LIMIT, LIMIT, 601, dtype=torch.float64)
    noised = torch.stack([EmpiricalScore(toy("triple"), VP(eps=e)).posterior(grid[:, None], e).logp.exp() for e in eps])
    edges = torch.linspace(-LIMIT, LIMIT, len(found["x"]) + 1, dtype=torch.float64)
    labels: dict[str, Any] = {"noised": (grid, noised), "rows": rows, "columns": columns, "gap": GAP}
    shown = ("published", "converged")
    for scheme in shown:
        pairs = torch.stack([gaps[scheme][o].value for o in OBJECTIVES], -1)  # (eps, P, objective)
        labels["notes"] = [[f"{a:.2f} / {b:.2f}" for a, b in row] for row in pairs.tolist()]
        labels["exact"] = found[f"{scheme}_exact_density"]
        draw = functools.partial(plots.law_grid, edges, laws[scheme], **labels)
        between = gaps[scheme]["J1"].value[SHOWN]
        page.picture(f"figure2-{scheme}", draw, "laws", scheme=WORDS[scheme], gaps=between)
    curves: dict[str, Any] = {WORDS[s]: gaps[s] for s in shown}
    bare = {WORDS[s]: found[f"{s}_exact_gap"] for s in shown}
    page.picture("figure2-gaps", lambda: plots.gap_shares([F / P for P in draws], curves, rows, bare), "gaps")
    return page.exhibit(0.05)


def _exact(run: Run, spec: dict[str, Any]) -> Dataset:
    """Sample the exact score with the same integrators."""
    grid, sampler = spec["grid"], spec["grid"]["sampler"]
    schemes = sampler | {"values": [value | {"law": "exact"} for value in sampler["values"]]}
    factors = {"process.eps": grid["process.eps"], "sampler": schemes}
    found = run.study(spec, 0.05, members=1, grid=factors).isel(member=0)
    return found / found["inside"]
