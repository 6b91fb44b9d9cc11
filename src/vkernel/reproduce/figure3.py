r"""Figure 3 of the paper: which gaps a linear model fills depends on its features (docs/theory.md, §6.4 and §7).

Four points on the unit circle, turned by 0, 22.5 and 45 degrees. The denoiser is linear, :math:`\hat m = W\phi`, in
products of 10 × 10 × 10 Gaussian or Fourier functions of :math:`(x_1, x_2, t)`, fitted with ridge .1 to P = 500 draws.
The maps show the average law :math:`\bar q(x_\epsilon) = E_\theta\, q_\theta(x_\epsilon)` of an ensemble, sampled by
the PF-ODE; the numbers that sum it up are those of :mod:`vkernel.reproduce.mlp_plane`.

J1 and J0 are trained on the same inputs, so that every member has a twin. The inputs give one Gram matrix, factored
once for both. The weights are linear in the targets, so J1 and J0 also have the same mean score; what differs is V.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vkernel import plots
from vkernel.core.estimate import Estimate
from vkernel.data import toy
from vkernel.process import VP
from vkernel.reproduce.memorise import one_thread
from vkernel.reproduce.mlp_plane import (
    BINS,
    DRAWS,
    EPS,
    GOALS,
    LIMIT,
    NEAR,
    REGIONS,
    ROTATIONS,
    WORDS,
    Panel,
    anchors,
    answer,
    at_once,
    brief,
    cell,
    density,
    legend,
    masses,
    moved,
    ratio,
    start,
    top,
)
from vkernel.reproduce.page import Exhibit, Finding, Picture, Run, Table, number
from vkernel.reproduce.twins import twins
from vkernel.sample import pf_ode
from vkernel.score.empirical import EmpiricalScore
from vkernel.train.ensemble import Ensemble
from vkernel.train.features import grid
from vkernel.train.models.linear import Linear

__all__ = ["make"]

ORDER, TITLE, SECONDS = 62, "Figure 3: features decide where the gaps fill", 35.0
KINDS = ("gaussian", "fourier")
PER_AXIS, RIDGE = 10, 0.1
PUBLISHED: dict[str, Any] = {"steps": 30, "method": "euler", "spacing": "uniform"}
CHECKED = 5  # members on which steps are halved


class Study:
    """Sizes of the run, and one panel of it."""

    def __init__(self, run: Run) -> None:
        self.seed, self.process = run.seed, VP(eps=EPS)
        self.members, self.n, steps = (6, 128, 12) if run.quick else (100, 1024, 64)
        self.converged: dict[str, Any] = {"steps": steps, "method": "heun", "spacing": "log"}
        self.finer = self.converged | {"steps": 2 * steps}
        self.x_T = start(self.process, self.n, run.seed)

    def panel(self, job: tuple[str, float]) -> Panel:
        """Laws and masses of one kind of features at one rotation; axes are integrator, objective, then the rest."""
        kind, rotation = job
        data = toy("square", rotation=rotation)
        points = anchors(data, self.process)
        model = Linear(grid(kind, PER_AXIS, 2, -LIMIT, LIMIT, self.process), "x0", RIDGE)
        ensembles = twins(model, data, self.process, draws=DRAWS, members=self.members, seed=self.seed)
        x = [[e.sample(x_T=self.x_T, show=False, **way) for e in ensembles] for way in (PUBLISHED, self.converged)]
        mean = Ensemble(model, {"weights": ensembles[1].state["weights"].mean(0, keepdim=True)}, self.process, (2,))
        again = torch.stack([e[:CHECKED].sample(x_T=self.x_T, show=False, **self.finer) for e in ensembles])  # type: ignore[union-attr]
        before = torch.stack([y[:CHECKED] for y in x[1]])
        change = [masses(a, points)[0].mean() - masses(b, points)[0].mean() for a, b in zip(before, again, strict=True)]
        return {
            "law": torch.stack([torch.stack([density(y) for y in row]) for row in x]),
            "mass": torch.stack([torch.stack([masses(y, points) for y in row]) for row in x]),
            "mean_score": masses(mean.sample(x_T=self.x_T, show=False, **self.converged), points)[:, 0],
            "halving": torch.stack(change),
            "moved": (before - again).norm(dim=-1).flatten(1).double().quantile(0.95, dim=1),
        }

    def exact(self) -> Tensor:
        """``(integrator, 3)``: masses of the exact score, which knows no rotation."""
        data = toy("square")
        score, points = EmpiricalScore(data, self.process), anchors(data, self.process)
        found = []
        for way in (PUBLISHED, self.converged):
            x = pf_ode(score, self.process, start(self.process, 4 * self.n, self.seed).double(), **way)
            assert isinstance(x, Tensor)
            found.append(masses(x[None], points)[:, 0])
        return torch.stack(found)


@one_thread
def make(run: Run) -> Exhibit:
    study = Study(run)
    jobs = [(kind, rotation) for kind in KINDS for rotation in ROTATIONS]
    panels = []
    for panel in at_once(study.panel, jobs):
        panels.append(panel)
        run.step(0.85 / len(jobs))
    made = {k: torch.stack([p[k] for p in panels]).unflatten(0, (len(KINDS), len(ROTATIONS))) for k in panels[0]}
    law, mass = (made[k].permute(2, 0, 3, 1, *range(4, made[k].ndim)) for k in ("law", "mass"))
    mass = mass[..., mass.isfinite().flatten(0, -2).all(0)]  # (integrator, features, objective, rotation, region, M)
    exact = study.exact()
    points = torch.stack([anchors(toy("square", rotation=r), study.process) for r in ROTATIONS])
    saved = run.arrays(
        "figure3",
        seed=run.seed,
        quick=run.quick,
        integrators=["published", "converged"],
        features=list(KINDS),
        objectives=list(GOALS),
        rotations=ROTATIONS,
        regions=list(REGIONS),
        limit=LIMIT,
        law=law,
        mass=mass,
        points=points,
        exact_score_mass=exact,
        mean_score_mass=made["mean_score"],
        halving_change=made["halving"],
        halving_moved=made["moved"],
        x_T=study.x_T,
    )
    scale = top(law)
    pictures = tuple(_picture(run, study, law, mass, points, scale, i) for i in (0, 1))
    run.step(0.15)
    whole = mass.mean(3)[..., 0, :]  # away, mean over rotations: (integrator, features, objective, M)
    found = [ratio(whole[1, k, 0], whole[1, k, 1]) for k in range(len(KINDS))]
    return Exhibit(
        name="figure3",
        title=TITLE,
        pictures=pictures,
        data=saved,
        sizes=f"{mass.shape[-1]} members for each objective, {study.n:,} Sobol points x_T for each member, the same "
        f"for all; P = {DRAWS}, F = {PER_AXIS**3}, ridge {RIDGE:g}, the paper's VP, eps = {EPS:g}. Converged means "
        f"{study.converged['steps']} Heun steps even in log(σ/α).",
        opening=(
            "Four points on a circle, and models that know them only through their features. Which of the places "
            "between the points do the models fill, and is it the noise of the target that fills them? Each model "
            "trained on noisy targets (J1) has a twin that saw the same inputs with the exact targets (J0).",
        ),
        finding=Finding(
            number=number(found[0].value),
            interval=f"95 % interval {number(found[0].low)} to {number(found[0].high)}: mass away from the training "
            "points, J1 / J0, Gaussian features, converged",
            words=(
                " ".join(
                    answer(f, f"Models with {kind.title()} features") for f, kind in zip(found, KINDS, strict=True)
                ),
                "The sum hides where the mass is. "
                + " ".join(moved(mass[1, k], f"{kind.title()} features") for k, kind in enumerate(KINDS)),
                _source(whole, exact, made["mean_score"], 4 * study.n),
            ),
        ),
        tables=(_away(mass), _where(mass), _ratios(mass)),
        closing=(_turns(mass), _slips(law, whole, exact), _check(made)),
    )


def _picture(run: Run, study: Study, law: Tensor, mass: Tensor, points: Tensor, scale: float, i: int) -> Picture:
    how = ("30 uniform Euler steps, as published", f"converged: {study.converged['steps']} Heun steps")[i]
    away = mass[i, :, :, :, 0].mean(-1)
    low, high = away[0].mean(-1), away[1].mean(-1)
    return run.picture(
        ("figure3", "figure3_converged")[i],
        lambda: plots.plane_laws(
            law[i].flatten(0, 1),
            points,
            rows=[f"{kind.title()} features\n{WORDS[goal]}" for kind in KINDS for goal in GOALS],
            columns=[f"turned by {r:g}°" for r in ROTATIONS],
            limit=LIMIT,
            top=scale,
            notes=[[f"away {v:.2f}" for v in row] for row in away.flatten(0, 1).tolist()],
        ),
        alt=f"Twelve heat maps of average laws in the plane, {how}: Gaussian and Fourier features with noisy and exact "
        f"targets as rows, three rotations as columns. Mass away from the four training points: {low[0]:.2f} and "
        f"{low[1]:.2f} with Gaussian features (J1, J0; mean over rotations), {high[0]:.2f} and {high[1]:.2f} with "
        "Fourier features.",
        caption=(
            f"The average learned law, {how}. Every map is a density over the plane, on one colour scale, which goes "
            "by the square root so that thin mass is seen; rings are the training points. The number in a corner is "
            f"the mass further than {NEAR:g} from all of them.",
        ),
    )


def _source(whole: Tensor, exact: Tensor, mean_score: Tensor, n: int) -> str:
    """How much of the mass needs no noise of the target."""
    tail = math.exp(-(NEAR**2) / (2 * float(VP().S(torch.tensor(EPS, dtype=torch.float64)))))
    parts = []
    for k, kind in enumerate(KINDS):
        j1, j0 = (float(v) for v in whole[1, k].mean(-1))
        parts.append(f"{kind.title()}, {j1:.3f} with J1, {j0:.3f} with J0, {float(mean_score[k, :, 0].mean()):.3f}")
    return (
        f"Of {n:,} samples of the exact score a share {number(float(exact[1, 0]), 2)} ends away from the points (of "
        f"p(x|eps) itself, {number(tail, 2)}). What a model leaves there without any noise in its targets comes from "
        "features that cannot express the score, and from too few inputs. The last number of each of these is the "
        "PF-ODE of the ensemble's mean score, that is "
        f"V = 0, which the misfit alone moves: {'; '.join(parts)} (mass away, means over rotations)."
    )


def _turns(mass: Tensor) -> str:
    said = []
    for k, kind in enumerate(KINDS):
        change = Estimate.of_mean(mass[1, k, 0, 2, 0] - mass[1, k, 0, 0, 0])
        what = f"{change.value:+.3f} (95 % interval {change.low:+.3f} to {change.high:+.3f})"
        seen = "notice direction" if change.low > 0 or change.high < 0 else "show no effect of direction"
        said.append(f"{kind.title()} features {seen}, {what}")
    return (
        "When the points turn, the exact score turns with them and no mass changes; features on a square grid do not "
        "turn. Mass away from the points at 45° less that at 0°, J1, converged, members paired over "
        f"rotations: {'; '.join(said)}."
    )


def _slips(law: Tensor, whole: Tensor, exact: Tensor) -> str:
    change = [Estimate.of_mean(whole[0, k, 0] - whole[1, k, 0]) for k in range(len(KINDS))]
    parts = [
        f"{kind.title()} {float(whole[0, k, 0].mean()):.3f} with 30 Euler steps against "
        f"{float(whole[1, k, 0].mean()):.3f} converged (change {c.value:+.3f}, 95 % interval {c.low:+.3f} to "
        f"{c.high:+.3f})"
        for k, (kind, c) in enumerate(zip(KINDS, change, strict=True))
    ]
    blurred = [kind.title() for kind, c in zip(KINDS, change, strict=True) if c.low > 0]
    verdict = (
        f"Part of the published blur is thus Euler's error ({' and '.join(blurred)})."
        if blurred
        else "At this size no part of the blur can be laid to Euler's error."
    )
    column = law[0, 0, 0, 2].sum(1)[BINS // 6 : -BINS // 6]  # |x₁| < 1
    contrast = number(float(column.max() / column.min())) if column.min() > 0 else "infinitely many"
    return (
        "Two slips of the published notebooks concern this figure. Each column of their histogram is normalised by "
        "itself, so that columns far from any training point look as full as those that hold two; with Gaussian "
        f"features at 45° the fullest column between x₁ = -1 and 1 holds {contrast} "
        f"times the mass of the emptiest. And {PUBLISHED['steps']} uniform Euler steps are not the flow. Mass away "
        f"from the points with J1, mean over rotations: {'; '.join(parts)}. {verdict} The exact score itself shows "
        f"{number(float(exact[0, 0]), 2)} with those steps and {number(float(exact[1, 0]), 2)} converged."
    )


def _check(made: dict[str, Tensor]) -> str:
    return (
        f"Halving the step of the converged sampler ({CHECKED} members of every panel) moves 95 % of the samples by "
        "less than "
        f"{number(float(made['moved'].max()), 2)} in the worst panel and changes no panel's mass away from the points "
        f"by more than {number(float(made['halving'].abs().max()), 2)}."
    )


def _rows(cells: Callable[[int, int], Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (f"{kind.title()}, {rotation:g}°", *cells(k, r))
        for k, kind in enumerate(KINDS)
        for r, rotation in enumerate(ROTATIONS)
    )


def _away(mass: Tensor) -> Table:
    return Table(
        caption=f"Mass away from the training points (further than {NEAR:g} from all), mean over members with 95 % "
        "intervals.",
        head=("features, rotation", "30 Euler steps, J1", "30 Euler steps, J0", "converged, J1", "converged, J0"),
        rows=_rows(lambda k, r: [cell(mass[i, k, g, r, 0]) for i in (0, 1) for g in (0, 1)]),
    )


def _where(mass: Tensor) -> Table:
    return Table(
        caption=f"Where mass is, converged, mean over members with 95 % intervals ({legend()}).",
        head=("features, rotation", *(f"{region}, {goal}" for region in REGIONS[1:] for goal in GOALS)),
        rows=_rows(lambda k, r: [cell(mass[1, k, g, r, q]) for q in range(1, len(REGIONS)) for g in (0, 1)]),
    )


def _ratios(mass: Tensor) -> Table:
    chosen = ((0, 0), *((1, q) for q in range(len(REGIONS))))  # integrator and region
    return Table(
        caption="J1 / J0, members paired with their twins, with 95 % intervals.",
        head=("features, rotation", "away, 30 Euler steps", *(f"{region}, converged" for region in REGIONS)),
        rows=_rows(lambda k, r: [brief(ratio(mass[i, k, 0, r, q], mass[i, k, 1, r, q])) for i, q in chosen]),
    )
