r"""What samplers make of the exact score: memorisation, errors of integration, and the effect of white noise.

**Memorisation** (docs/theory.md, §4.1). The PF-ODE of the exact score returns training points, each as often as its
weight. Euler's method with few steps does not. In one dimension this can be computed without random numbers: an Euler
step is an increasing map (its slope is :math:`1 - \Delta(D/\sigma^2 - \beta) + \ldots > 0` on a uniform grid), hence so
is the whole sampler, and the mass in a gap is the Gaussian mass between two preimages, found by repeated section.

**Laws of the effective SDE** (§4.3, §4.4). The naive kernel has noise where the target is noisy, on the boundaries
between training points. It leaves fewer samples there, not more: noise in Itô's sense has no drift, so a sample leaves
places of strong noise quickly and places of weak noise slowly.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from vkernel import kernels, metrics, plots, sample
from vkernel.core.estimate import Estimate
from vkernel.data import Empirical, toy
from vkernel.process import VP
from vkernel.reproduce.exhibit import Exhibit, Page, Run, number, one_thread, read, tensor
from vkernel.score import EmpiricalScore

GAP = (0.25, 0.75)
EPSILONS, STEPS = (1e-4, 1e-3, 1e-2), (30, 100, 1000)
SHOWN = 1  # the eps of the picture
WEIGHTS = (0.3, 0.25, 0.2, 0.13, 0.08, 0.04)


def gap_mass(score: EmpiricalScore, steps: int, rounds: int = 3, points: int = 129) -> float:
    """Return P(.25 < |x| < .75) of Euler's PF-ODE from N(0, S_T), by sections of the increasing map."""
    process = score.process
    sigma = float(process.sigma(torch.tensor(process.T, dtype=torch.float64)))
    levels = torch.tensor([-GAP[1], -GAP[0], *GAP], dtype=torch.float64)
    low, high = (torch.full((4,), end, dtype=torch.float64) for end in (-2.0, 2.0))
    share, rows = torch.linspace(0, 1, points, dtype=torch.float64), torch.arange(4)
    for _ in range(rounds):
        z = low[:, None] + (high - low)[:, None] * share
        x = sample.pf_ode(score, sigma * z.reshape(-1, 1), steps=steps, method="euler", spacing="uniform")
        above = (tensor(x).reshape(z.shape) >= levels[:, None]).double().argmax(1).clamp_min(1)
        low, high = z[rows, above - 1], z[rows, above]
    mass = torch.special.ndtr((low + high) / 2)
    return max(0.0, float(mass[1] - mass[0] + mass[3] - mass[2]))


@one_thread()
def memorise(run: Run) -> Exhibit:
    """Sample the exact score with several integrators, and compare frequencies with weights."""
    from scipy.stats import chisquare

    data, steps = toy("triple"), (30, 100) if run.quick else STEPS
    scores = [EmpiricalScore(data, VP(eps=eps)) for eps in EPSILONS]
    masses = []
    for score in scores:
        masses.append([gap_mass(score, count, *((2, 33) if run.quick else (3, 129))) for count in steps])
        run.step(0.45 / len(scores))
    samples = _samples(run, scores[SHOWN], steps)
    shares = [metrics.gap_mass(x, GAP) for x in samples.values()]
    run.step(0.25)
    points, weights = toy("random")[:], torch.tensor(WEIGHTS, dtype=torch.float64)
    counts = _counts(run, Empirical(points, weights=weights))
    statistic, p = chisquare(counts, weights * counts.sum())
    run.step(0.2)
    found = {
        "eps": EPSILONS,
        "steps": steps,
        "gap_mass": masses,
        "weights": weights,
        "counts": counts,
        "chi_square": statistic,
        "p_value": p,
        "gap_share": [share.stack() for share in shares],
        **{f"sample_{name.split()[0]}": x for name, x in samples.items()},
    }
    frequency = Estimate.of_share(counts, float(counts.sum())).stack(1)
    shown: dict[str, Any] = {"shown": masses[SHOWN], "shown_eps": EPSILONS[SHOWN]}
    page = Page(run, "memorise", found, samples=samples, points=points, frequency=frequency, **shown)
    notes = [f"in the gaps: {number(share.value, 2)}" for share in shares]
    page.picture("memorise", lambda: plots.law_panels(samples, data[:][:, 0], GAP, notes=notes))
    return page.exhibit(0.1)


def _samples(run: Run, score: EmpiricalScore, steps: tuple[int, ...]) -> dict[str, Tensor]:
    """Return samples ``(n,)`` from equal starts, by Euler's method and by an adaptive one."""

    def start(n: int, dtype: torch.dtype | None = torch.float64) -> Tensor:
        return score.process.prior((n, 1), generator=run.stream("memorise/start"), dtype=dtype)

    found = {}
    for count in steps:
        x_T = start(2000 if run.quick else min(30_000, 6_000_000 // count))
        x = sample.pf_ode(score, x_T, steps=count, method="euler", spacing="uniform")
        found[f"{count} Euler steps"] = tensor(x)[:, 0]
    x_T = start(500 if run.quick else 10_000, None).double()
    found["dopri5"] = tensor(sample.pf_ode(score, x_T, method="dopri5", tolerance=1e-5))[:, 0]
    return found


def _counts(run: Run, data: Empirical) -> Tensor:
    """Return how often the PF-ODE returns each training point."""
    score = EmpiricalScore(data, VP(eps=1e-3))
    n, process = 500 if run.quick else 10_000, score.process
    x_T = process.prior((n, data.d), generator=run.stream("memorise/weights"), dtype=torch.float64)
    x = tensor(sample.pf_ode(score, x_T, method="dopri5", tolerance=1e-5))
    share = metrics.mode_weights(x / process.alpha(torch.tensor(process.eps, dtype=torch.float64)), data).share.value
    return (share * n).round().long()


# Laws of the effective SDE

KAPPAS, COARSE_KAPPAS = (0.0, 0.01, 0.1, 1.0), (0.0, 0.1, 1.0)
EPS, COARSE_EPS, COMPARED, FILL = 0.02, 0.01, 0.1, 0.3
SETS = {"{-1, +1}": "pair", "{-1, 0, +1}": "triple"}
GAPS = ((0.0, GAP[1]), GAP)
RANGE, BINS = (-1.5, 1.5), 120
PERMUTATIONS = 8
CANDIDATES = [SimpleNamespace(**table) for table in read("laws")["candidates"]]  # gaps that noise might fill


def _law(run: Run, purpose: str, score: EmpiricalScore, kappa: float, *, resample: bool = False, **how: Any) -> Tensor:
    """Return samples of the effective SDE with Gaussian noise or, if ``resample``, with resampled training points."""
    start, n = run.stream("laws/start"), 300 if run.quick else 10_000
    x_T = score.process.prior((n, score.data.d), generator=start, dtype=torch.float64)
    how["generator"] = run.stream(f"laws/{purpose}")
    if resample:
        return tensor(sample.naive(score, x_T, kappa=kappa, **how))
    return tensor(sample.effective_sde(kernels.Naive(score, kappa), x_T, **how))


@one_thread()
def laws(run: Run) -> Exhibit:
    """Sample the effective SDE at several strengths of noise and numbers of steps."""
    n, fine, grid = (300, 20, (10, 30)) if run.quick else (10_000, 320, (30, 100, 300))
    edges = torch.linspace(*RANGE, BINS + 1, dtype=torch.float64)
    histograms, gaps = [], []
    for gap, name in zip(GAPS, SETS.values(), strict=True):
        score = EmpiricalScore(toy(name), VP(eps=EPS))
        for kappa in KAPPAS:
            x = _law(run, f"{name}/{kappa:g}", score, kappa, steps=fine)
            histograms.append(torch.histogram(x[:, 0], edges).hist / n)
            gaps.append(metrics.gap_mass(x, gap).stack())
            run.step(0.5 / (len(SETS) * len(KAPPAS)))
    law = torch.stack(histograms).unflatten(0, (len(SETS), -1))
    gap = torch.stack(gaps).unflatten(0, (len(SETS), -1)).mT  # (set, 3, κ)
    coarse, distance, floor = _coarse(run, grid)
    search, last = _search(run, fine)
    found = {
        "kappa": KAPPAS,
        "eps": EPS,
        "edges": edges,
        "law": law,
        "gap": gap,
        "steps": grid,
        "coarse_kappa": COARSE_KAPPAS,
        "coarse_gap": coarse,
        "variation": distance,
        "variation_floor": floor,
        "search": search,
        "search_last": last,
        "search_kappa": (0.0, FILL),
    }
    eps = torch.tensor(EPS, dtype=torch.float64)
    ends = torch.stack([(end - VP().alpha(eps)) / VP().sigma(eps) for end in (GAP[1], -GAP[1])])
    near = (edges[1:] + edges[:-1]).abs() / 2 < 0.5
    page = Page(
        run,
        "laws",
        found,
        n=n,
        fine_steps=fine,
        coarse_eps=COARSE_EPS,
        sets=SETS,
        candidates=CANDIDATES,
        tail=torch.special.ndtr(ends).diff().abs().item(),
        middle=law[1][:, near].sum(1),
    )
    points = {name: toy(key)[:][:, 0] for name, key in SETS.items()}
    lines = {f"κ = {k:g}": c for k, c in zip(COARSE_KAPPAS, coarse, strict=True)}
    by_set = dict(zip(SETS, gap, strict=True))
    page.picture("laws", lambda: plots.final_laws(dict(zip(SETS, law, strict=True)), KAPPAS, edges, points), "laws")
    page.picture("laws_curves", lambda: plots.gap_curves(KAPPAS, by_set, grid, lines, distance, floor), "curves")
    return page.exhibit(0.1)


def _coarse(run: Run, grid: tuple[int, ...]) -> tuple[Tensor, Tensor, float]:
    """Return gap masses ``(κ, 3, steps)``, and the total variation of two noises ``(3, steps)`` with its floor."""
    score, source = EmpiricalScore(toy("triple"), VP(eps=COARSE_EPS)), run.stream("laws/permutations")
    gaps, distances, floors = [], [], []
    for steps in grid:
        for kappa in COARSE_KAPPAS:
            purpose, how = f"coarse/{kappa:g}/{steps}", dict[str, Any](steps=steps, spacing="uniform")
            x = _law(run, purpose, score, kappa, **how)
            gaps.append(metrics.gap_mass(x, GAP).stack())
            if kappa == COMPARED:
                other = _law(run, f"re{purpose}", score, kappa, resample=True, **how)
                distances.append(metrics.total_variation(x, other, BINS, RANGE).stack())
                pool = torch.cat([x, other])
                for _ in range(PERMUTATIONS):
                    one, two = pool[torch.randperm(len(pool), generator=source)].chunk(2)
                    floors.append(metrics.total_variation(one, two, BINS, RANGE).value)
        run.step(0.3 / len(grid))
    masses = torch.stack(gaps).unflatten(0, (len(grid), -1)).permute(1, 2, 0)
    return masses, torch.stack(distances, 1), sum(floors) / len(floors)


def _search(run: Run, steps: int) -> tuple[Tensor, Tensor]:
    """Return the mass in the gap of every candidate and at its last point, ``(candidate, κ, 3)`` each."""
    gaps, last = [], []
    for i, c in enumerate(CANDIDATES):
        eps, centre = (torch.tensor(v, dtype=torch.float64) for v in (c.eps, c.centre))
        data = Empirical(torch.tensor(c.points, dtype=torch.float64), weights=c.weights) if c.points else toy("hexagon")
        score = EmpiricalScore(data, VP(eps=c.eps))
        for kappa in (0.0, FILL):
            x = _law(run, f"candidate {i}/{kappa:g}", score, kappa, steps=steps) / VP().alpha(eps)
            gaps.append(Estimate.of_share(int(((x - centre).norm(dim=1) < c.radius).sum()), len(x)).stack())
            last.append(metrics.mode_weights(x, data).share[-1].stack())
    run.step(0.1)
    inside, at_last = (torch.stack(v).unflatten(0, (len(CANDIDATES), 2)) for v in (gaps, last))
    return inside, at_last
