r"""Networks on the plane of Figure 3, and what is measured of laws in the plane (docs/theory.md, §6 and §7).

Multilayer perceptrons take the place of the linear models: the same four points, turned by 0, 22.5 and 45 degrees, the
same P = 500 draws for a member, J1 and J0 on the same inputs; a member's twin also has its initial weights and its
order of minibatches. Four numbers sum a law up, with the training points where eps puts them, at :math:`\alpha y`:

======  ============================================================================================================
away    :math:`P(\min_i |x - \alpha y_i| > .25)`
arcs    away, and near the circle: :math:`.75 < |x| < 1.25`
sides   away, and within .15 of the straight line between two neighbours; this overlaps with the arcs
centre  :math:`|x| < .5`
======  ============================================================================================================

Masses :math:`a_m, b_m` of twins compare in pairs: :math:`r = \bar a/\bar b`, with the standard error of
:math:`\log r` from the M values :math:`a_m/\bar a - b_m/\bar b` (the infinitesimal jackknife).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vkernel import metrics, plots
from vkernel.core import rng
from vkernel.core.estimate import Estimate, student_quantile
from vkernel.data import Empirical, toy
from vkernel.process import VP
from vkernel.reproduce.memorise import one_thread
from vkernel.reproduce.page import Exhibit, Finding, Picture, Run, Table, number
from vkernel.sample import pf_ode
from vkernel.train.ensemble import Ensemble, train_ensemble
from vkernel.train.models.architectures import MLP

__all__ = ["make", "masses", "ratio", "start"]

ORDER, TITLE, SECONDS = 66, "Networks on the plane of Figure 3", 40.0
ROTATIONS = (0.0, 22.5, 45.0)
GOALS = ("J1", "J0")
WORDS = {"J1": "J1, noisy targets", "J0": "J0, exact targets"}
REGIONS = ("away", "arcs", "sides", "centre")
EPS, DRAWS = 0.01, 500
NEAR, RING, BESIDE, CENTRE = 0.25, (0.75, 1.25), 0.15, 0.5
LIMIT, BINS = 1.5, 60
WIDTH, DEPTH, RATE, BATCH = 64, 3, 1e-2, 32
CHECKED, FEW = 4, 256  # members on which steps are halved; places of x_T where many are not needed
LINEAR = ("Gaussian", "Fourier")  # the rows of figure3.npz

Panel = dict[str, Tensor]


def start(process: VP, n: int, seed: int) -> Tensor:
    """n places from N(0, S_T), even in probability: a scrambled Sobol sequence through the normal quantile."""
    engine = torch.quasirandom.SobolEngine(2, scramble=True, seed=rng.key(seed, "reproduce/planes/x_T"))
    u = engine.draw(n, dtype=torch.float64) + 2.0**-31  # the engine's numbers are multiples of 2^-30, from 0
    sigma = process.sigma(torch.tensor(process.T, dtype=torch.float64))
    return (sigma * torch.special.ndtri(u)).float()


def anchors(data: Empirical, process: VP) -> Tensor:
    """Where the noise level eps puts the training points."""
    return process.alpha(torch.tensor(process.eps, dtype=torch.float64)) * data.rows(0, data.n).double()


def masses(x: Tensor, points: Tensor) -> Tensor:
    """``(4, M)``: the regions' masses of each member of ``x (M, n, 2)``, NaN if it diverged; points by their angles."""
    x = x.double()
    size, away = x.norm(dim=-1), torch.cdist(x, points).amin(-1) > NEAR
    along = points.roll(-1, 0) - points
    share = ((x[..., None, :] - points) * along).sum(-1) / along.square().sum(-1)
    beside = (x[..., None, :] - points - share.clamp(0, 1)[..., None] * along).norm(dim=-1).amin(-1) < BESIDE
    regions = (away, away & (size > RING[0]) & (size < RING[1]), away & beside, size < CENTRE)
    found = torch.stack([region.double().mean(-1) for region in regions])
    return found.where(size.isfinite().all(-1), torch.nan)


def density(x: Tensor) -> Tensor:
    """The average density on the map, ``(BINS, BINS)``: its integral is the share of samples on the map."""
    found, _ = metrics.histogram(x, BINS, (-LIMIT, LIMIT), normalise="all", members=True, skip_diverged=True)
    return found.value


def ratio(a: Tensor, b: Tensor) -> Estimate:
    """The mean of a over the mean of b, paired over members; the interval is even in the logarithm."""
    if not float(a.mean()) > 0 or not float(b.mean()) > 0:
        return Estimate(math.nan, math.nan, 0.0, math.inf)
    value = float(a.mean() / b.mean())
    se = float((a / a.mean() - b / b.mean()).std()) / math.sqrt(len(a)) if len(a) > 1 else math.inf
    half = min(student_quantile(len(a) - 1) * se, 700.0)
    return Estimate(value, value * se, value * math.exp(-half), value * math.exp(half))


def at_once(work: Callable[[Any], Panel], jobs: Sequence[Any]) -> Iterator[Panel]:
    """The results of independent jobs, in their order; each job is one thread's, whatever the machine."""
    with ThreadPoolExecutor(max(1, min(len(jobs), os.cpu_count() or 1, 4))) as pool:
        yield from pool.map(work, jobs)


def top(*laws: Tensor) -> float:
    """Where a colour scale ends: a round number that one bin in a hundred exceeds."""
    return float(f"{float(torch.cat([law.flatten() for law in laws]).quantile(0.99)):.1g}")


def cell(values: Tensor) -> str:
    """A mean over members with its 95 % interval."""
    mean = Estimate.of_mean(values)
    return f"{mean.value:.3f} ± {mean.high - mean.value:.3f}"


def span(found: Estimate) -> str:
    return f"× {found.value:.2f} (95 % interval {found.low:.2f} to {found.high:.2f})"


def brief(found: Estimate) -> str:
    return f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})"


def legend() -> str:
    """The regions in words."""
    return (
        f"away: further than {NEAR:g} from every training point; arcs: away and {RING[0]:g} < |x| < {RING[1]:g}; "
        f"sides: away and within {BESIDE:g} of the straight line between neighbours; centre: |x| < {CENTRE:g}"
    )


def answer(found: Estimate, who: str) -> str:
    """What a ratio J1/J0 of masses away from the points says, in words that follow its interval."""
    if not math.isfinite(found.value):
        return f"{who} left no sample away from the training points with one of the objectives: there is no ratio."
    if found.low > 1 or found.high < 1:
        side = "more" if found.low > 1 else "less"
        return f"{who} put {side} mass away from the training points when their targets are noisy: {span(found)}."
    return f"{who} show no effect of the targets' noise on the mass away from the training points: {span(found)}."


def moved(mass: Tensor, who: str) -> str:
    """What noise does to each region; ``mass (objective, rotation, region, M)``."""
    pooled, said = mass.mean(1), []
    for q, region in enumerate(REGIONS[1:], 1):
        found = ratio(pooled[0, q], pooled[1, q])
        verb = "fills" if found.low > 1 else "empties" if found.high < 1 else "has no visible effect on"
        said.append(f"{verb} the {region}, {span(found)}")
    return f"{who}, J1 against J0 over all rotations: noise {'; '.join(said)}."


class Study:
    """Sizes of the run, and one panel of it."""

    def __init__(self, run: Run) -> None:
        self.seed, self.process = run.seed, VP(eps=EPS)
        self.members, self.n, self.training, steps = (4, 128, 60, 10) if run.quick else (32, 1024, 1200, 48)
        self.lengths = (self.training // 3, 2 * self.training)
        self.converged: dict[str, Any] = {"steps": steps, "method": "heun", "spacing": "log"}
        self.x_T = start(self.process, self.n, run.seed)

    def train(self, goal: str, data: Empirical, steps: int, members: int) -> Ensemble:
        # its own model: torch puts weights into a module while it runs, so threads must not share one
        model = MLP(WIDTH, DEPTH, target="x0", lr=RATE, batch=BATCH, steps=steps, decay="cosine")
        how: dict[str, Any] = {"members": members, "draws": DRAWS, "objective": goal, "seed": self.seed}
        return train_ensemble(model, data, self.process, show=False, **how)

    def panel(self, job: tuple[str, float]) -> Panel:
        """The law and the masses of one objective at one rotation."""
        goal, rotation = job
        data = toy("square", rotation=rotation)
        points, found = anchors(data, self.process), self.train(goal, data, self.training, self.members)
        x = found.sample(x_T=self.x_T, show=False, **self.converged)
        some = found[:CHECKED]
        assert isinstance(some, Ensemble)
        again = some.sample(x_T=self.x_T, show=False, **self.converged | {"steps": 2 * self.converged["steps"]})
        mean = pf_ode(found.mean, self.process, self.x_T[:FEW], **self.converged)
        assert isinstance(mean, Tensor)
        return {
            "law": density(x),
            "mass": masses(x, points),
            "mean_score": masses(mean[None], points)[:, 0],
            "halving": masses(x[:CHECKED], points)[0].mean() - masses(again, points)[0].mean(),
        }

    def other(self, job: tuple[int, str]) -> Panel:
        """The masses of half as many members at the middle rotation, after other lengths of training."""
        steps, goal = job
        data = toy("square", rotation=ROTATIONS[1])
        found = self.train(goal, data, steps, self.members // 2)
        x = found.sample(x_T=self.x_T[: 2 * FEW], show=False, **self.converged)
        return {"mass": masses(x, anchors(data, self.process))}


@one_thread
def make(run: Run) -> Exhibit:
    study = Study(run)
    jobs = [(goal, rotation) for goal in GOALS for rotation in ROTATIONS]
    panels = []
    for panel in at_once(study.panel, jobs):
        panels.append(panel)
        run.step(0.7 / len(jobs))
    made = {k: torch.stack([p[k] for p in panels]).unflatten(0, (len(GOALS), len(ROTATIONS))) for k in panels[0]}
    law, mass = made["law"], _alive(made["mass"])  # (objective, rotation, region, M)
    others = list(at_once(study.other, [(steps, goal) for steps in reversed(study.lengths) for goal in GOALS]))
    length = torch.stack([o["mass"] for o in others]).unflatten(0, (len(study.lengths), len(GOALS))).flip(0)
    run.step(0.2)
    points = torch.stack([anchors(toy("square", rotation=r), study.process) for r in ROTATIONS])
    saved = run.arrays(
        "mlp_plane",
        objectives=list(GOALS),
        rotations=ROTATIONS,
        regions=list(REGIONS),
        limit=LIMIT,
        law=law,
        mass=mass,
        points=points,
        mean_score_mass=made["mean_score"],
        halving_change=made["halving"],
        lengths=study.lengths,
        length_mass=length,
        x_T=study.x_T,
    )
    picture = _picture(run, law, mass, points)
    run.step(0.1)
    whole = mass.mean(1)[:, 0]  # away, mean over rotations: (objective, M)
    found = ratio(whole[0], whole[1])
    likeness, comparison = _beside(run, mass)
    lasting, lengths = _lengths(study, mass[:, 1, 0], _alive(length)[:, :, 0])
    flat = made["mean_score"][:, :, 0].mean(1)
    return Exhibit(
        name="mlp_plane",
        title=TITLE,
        pictures=(picture,),
        data=saved,
        sizes=f"{mass.shape[-1]} members for each objective ({study.members - mass.shape[-1]} diverged), {study.n:,} "
        f"Sobol points x_T for each, the same for all; {DEPTH} hidden layers of {WIDTH}, denoiser form, Adam with rate "
        f"{RATE:g} falling as a cosine, {study.training:,} steps of {BATCH} out of P = {DRAWS} draws; sampled with "
        f"{study.converged['steps']} Heun steps even in log(σ/α), eps = {EPS:g}.",
        opening=(
            "Linear models with fixed features are where the theory is exact. Do small networks, which learn their "
            "features, behave the same way on the same four points, with as many draws?",
        ),
        finding=Finding(
            number=number(found.value),
            interval=f"95 % interval {number(found.low)} to {number(found.high)}: mass away from the training points, "
            "J1 / J0, members paired",
            words=(f"{answer(found, 'Networks')} {lasting}", moved(mass, "By region"), likeness),
        ),
        tables=(_table(mass), lengths, *comparison),
        closing=(
            f"Mass away from the points, mean over rotations: {cell(whole[0])} with J1, {cell(whole[1])} with J0; the "
            f"PF-ODE of the members' mean score (V = 0) leaves {float(flat[0]):.3f} and {float(flat[1]):.3f} there. "
            f"Halving the sampler's step ({CHECKED} members of every panel) changes no panel's mass away from "
            f"the points by more than {number(float(made['halving'].abs().max()), 2)}.",
        ),
    )


def _alive(mass: Tensor) -> Tensor:
    """The members, on the last axis, of whom nothing diverged."""
    return mass[..., mass.isfinite().flatten(0, -2).all(0)]


def _lengths(study: Study, own: Tensor, other: Tensor) -> tuple[str, Table]:
    """Whether the ratio is the same after shorter and longer training; ``own (2, M)``, ``other (length, 2, M)``."""
    runs = {study.lengths[0]: other[0], study.training: own, study.lengths[1]: other[1]}
    found = {steps: ratio(m[0], m[1]) for steps, m in runs.items()}
    apart = max(f.low for f in found.values()) > min(f.high for f in found.values())
    said = ", ".join(f"{span(f)} after {steps:,} steps" for steps, f in found.items())
    words = "The ratio depends on" if apart else "No dependence is measurable on"
    return f"{words} how long they are trained (at {ROTATIONS[1]:g}° alone: {said}).", Table(
        caption=f"Mass away from the points at {ROTATIONS[1]:g}° after other lengths of training, with 95 % intervals; "
        f"{other.shape[-1]} members where the length is not {study.training:,}.",
        head=("steps of training", "J1", "J0", "J1 / J0"),
        rows=tuple((f"{k:,}", cell(m[0]), cell(m[1]), brief(found[k])) for k, m in runs.items()),
    )


def _picture(run: Run, law: Tensor, mass: Tensor, points: Tensor) -> Picture:
    away, mean = mass[:, :, 0].mean(-1), mass[:, :, 0].mean((1, 2))
    return run.picture(
        "mlp_plane",
        lambda: plots.plane_laws(
            law,
            points,
            rows=[f"networks\n{WORDS[goal]}" for goal in GOALS],
            columns=[f"turned by {r:g}°" for r in ROTATIONS],
            limit=LIMIT,
            top=top(law),
            notes=[[f"away {v:.2f}" for v in row] for row in away.tolist()],
        ),
        alt="Six heat maps of the average law of small networks in the plane: noisy and exact targets as rows, three "
        f"rotations as columns. Mass away from the four training points, mean over rotations: {mean[0]:.2f} with "
        f"noisy targets, {mean[1]:.2f} with exact ones.",
        caption=(
            "The average law of networks, drawn like Figure 3: one colour scale that goes by the square root of the "
            f"density, rings at the training points, in a corner the mass further than {NEAR:g} from all of them.",
        ),
    )


def _beside(run: Run, mass: Tensor) -> tuple[str, tuple[Table, ...]]:
    """How alike the linear models of the same page are, if they were made with the same seed and size."""
    path = run.out / "figure3.npz"
    if not path.exists():
        return "The linear models of Figure 3 were not made in this run, so there is nothing to compare with.", ()
    with np.load(path) as saved:
        known = {"seed", "quick", "mass"} <= set(saved.files)
        if not known or int(saved["seed"]) != run.seed or bool(saved["quick"]) != run.quick:
            return "The linear models of Figure 3 were made in another run, so they are not compared here.", ()
        linear = torch.from_numpy(saved["mass"])[1].mean(2)  # converged; (features, objective, region, M)
    laws = [mass.mean(1), *linear]
    found = [[ratio(law[0, q], law[1, q]) for law in laws] for q in range(len(REGIONS))]
    unlike = [
        f"{region} ({kind})"
        for region, (own, *others) in zip(REGIONS, found, strict=True)
        for kind, other in zip(LINEAR, others, strict=True)
        if own.low > other.high or own.high < other.low
    ]
    words = (
        "Networks do not behave like the linear models of Figure 3: the intervals of J1 / J0 do not meet for "
        f"{', '.join(unlike)}."
        if unlike
        else "No ratio J1 / J0 of the networks differs measurably from those of the linear models of Figure 3."
    )
    table = Table(
        caption="J1 / J0 over all rotations, with 95 % intervals: networks beside the linear models of Figure 3.",
        head=("region", "networks", *(f"linear, {kind}" for kind in LINEAR)),
        rows=tuple((region, *(brief(f) for f in row)) for region, row in zip(REGIONS, found, strict=True)),
    )
    return words, (table,)


def _table(mass: Tensor) -> Table:
    def cells(r: int, q: int) -> list[str]:
        found = ratio(mass[0, r, q], mass[1, r, q])
        return [*(cell(mass[g, r, q]) for g in (0, 1)), brief(found)]

    return Table(
        caption=f"Masses of the networks' laws, mean over members with 95 % intervals ({legend()}).",
        head=("region, rotation", "J1", "J0", "J1 / J0"),
        rows=tuple(
            (f"{region}, {rotation:g}°", *cells(r, q))
            for q, region in enumerate(REGIONS)
            for r, rotation in enumerate(ROTATIONS)
        ),
    )
