r"""Memorisation, and the discretisation error that passes for generalization (docs/theory.md, §4.1).

The probability-flow ODE of the exact score returns training points, each as often as its weight says. Euler's method
with few steps does not. In one dimension nothing about this need be random: an Euler step is an increasing map (its
slope is :math:`1 - \Delta(D/\sigma^2 - \beta) + \ldots > 0` on a uniform grid), hence so is the whole sampler, and the
mass in a gap is the Gaussian mass between two preimages. These are found by repeated section.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from vkernel import plots
from vkernel.core import rng
from vkernel.data import Empirical, toy
from vkernel.process import VP
from vkernel.reproduce.page import Exhibit, Finding, Run, Table, number
from vkernel.sample import pf_ode
from vkernel.score.empirical import EmpiricalScore

__all__ = ["chi_square", "gap_mass", "make", "one_thread", "wilson"]

ORDER, TITLE, SECONDS = 40, "Memorisation, and the error that fakes generalization", 20.0
GAP = (0.25, 0.75)
EPSILONS, STEPS = (1e-4, 1e-3, 1e-2), (30, 100, 1000)
SHOWN = 1  # the eps of the picture
WEIGHTS = (0.3, 0.25, 0.2, 0.13, 0.08, 0.04)


def one_thread(make: Callable[[Run], Exhibit]) -> Callable[[Run], Exhibit]:
    """Many steps on small arrays: threads would wait for each other longer than they work."""

    @functools.wraps(make)
    def alone(run: Run) -> Exhibit:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return make(run)
        finally:
            torch.set_num_threads(threads)

    return alone


def wilson(hits: int, n: int) -> tuple[float, float, float]:
    """A share with Wilson's 95 % interval."""
    z, p = 1.959963984540054, hits / n
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low = 0.0 if hits == 0 else (middle - half) / scale
    return p, low, 1.0 if hits == n else (middle + half) / scale


def chi_square(counts: Tensor, weights: Tensor) -> tuple[float, float]:
    """Pearson's statistic of counts against weights, and its p value."""
    expected = weights.double() * counts.sum()
    statistic = float(((counts - expected).square() / expected).sum())
    half = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return statistic, float(torch.special.gammaincc(half, torch.tensor(statistic / 2, dtype=torch.float64)))


def in_gap(x: Tensor) -> int:
    size = x.abs()
    return int(((size > GAP[0]) & (size < GAP[1])).sum())


def gap_mass(score: EmpiricalScore, steps: int, rounds: int = 3, points: int = 129) -> float:
    """P(.25 < |x| < .75) of Euler's PF-ODE from N(0, S_T), by sections of the increasing map; no random numbers."""
    process = score.process
    sigma = float(process.sigma(torch.tensor(process.T, dtype=torch.float64)))
    levels = torch.tensor([-GAP[1], -GAP[0], *GAP], dtype=torch.float64)
    low, high = torch.full((4,), -2.0, dtype=torch.float64), torch.full((4,), 2.0, dtype=torch.float64)
    share = torch.linspace(0, 1, points, dtype=torch.float64)
    for _ in range(rounds):
        z = low[:, None] + (high - low)[:, None] * share
        x = pf_ode(score, process, sigma * z.reshape(-1, 1), steps=steps)
        assert isinstance(x, Tensor)
        above = (x.reshape(z.shape) >= levels[:, None]).double().argmax(1).clamp_min(1)
        rows = torch.arange(4)
        low, high = z[rows, above - 1], z[rows, above]
    mass = torch.special.ndtr((low + high) / 2)
    return max(0.0, float(mass[1] - mass[0] + mass[3] - mass[2]))


@one_thread
def make(run: Run) -> Exhibit:
    data = toy("triple")
    rounds, points = (2, 33) if run.quick else (3, 129)
    steps = (30, 100) if run.quick else STEPS
    scores = [EmpiricalScore(data, VP(eps=eps)) for eps in EPSILONS]
    masses = torch.zeros(len(EPSILONS), len(steps), dtype=torch.float64)
    for i, score in enumerate(scores):
        for j, count in enumerate(steps):
            masses[i, j] = gap_mass(score, count, rounds, points)
        run.step(0.45 / len(scores))
    laws, shares = _laws(run, scores[SHOWN], steps)
    run.step(0.25)
    names, counts, weights = _weights(run)
    statistic, p = chi_square(counts, weights)
    run.step(0.2)
    saved = run.arrays(
        "memorise",
        eps=EPSILONS,
        steps=steps,
        gap_mass=masses,
        weights=weights,
        counts=counts,
        chi_square=statistic,
        p_value=p,
        gap_share=list(shares.values()),
        **{f"sample_{key.split()[0]}": x for key, x in laws.items()},
    )
    eps = EPSILONS[SHOWN]
    best = next(reversed(shares.values()))
    first = masses[SHOWN]
    picture = run.picture(
        "memorise",
        lambda: plots.law_panels(
            laws, data.rows(0, data.n)[:, 0], GAP, notes=[f"in the gaps: {number(s[0], 2)}" for s in shares.values()]
        ),
        alt=f"Histograms of samples of the exact score of -1, 0, 1 with {', '.join(laws)}. With {steps[0]} Euler steps "
        f"a share {number(float(first[0]))} of all samples lies in the gaps; with an adaptive integrator the three "
        "training points alone remain.",
        caption=(
            f"One score, one start, and only the integrator changes; the paper's VP, eps = {eps:g}. With {steps[0]} "
            f"uniform Euler steps the exact score leaves {number(float(first[0]))} of its samples in the gaps "
            f"(.25 < |x| < .75), with {steps[1]} steps {number(float(first[1]), 2)}. The adaptive integrator dopri5 "
            f"put {number(best[0])} of its {len(next(reversed(laws.values()))):,} samples there (95 % interval 0 to "
            f"{number(best[2], 2)}). Nothing has been learned and nothing generalizes here: the haze between the "
            "points is an error of integration.",
            "The vertical axis is logarithmic, and shaded bands are the gaps. Dots are training points.",
        ),
    )
    run.step(0.1)
    return Exhibit(
        name="memorise",
        title=TITLE,
        pictures=(picture,),
        data=saved,
        sizes=f"Samples: {', '.join(f'{len(x):,} ({name})' for name, x in laws.items())}; weights: "
        f"{int(counts.sum()):,} samples by dopri5.",
        opening=(
            "A sampler that follows the exact score of a training set can only give the training set back. People who "
            "try it with few steps find something else, and are tempted to call it generalization.",
        ),
        finding=Finding(
            number=f"p = {p:.2g}",
            interval=f"χ² = {statistic:.1f}, {len(counts) - 1} degrees of freedom",
            words=(
                f"Six points in the plane with weights from {max(WEIGHTS):g} to {min(WEIGHTS):g}: of "
                f"{int(counts.sum()):,} samples of the PF-ODE of the exact score, each counted at the training point "
                "nearest to it, every point came back as often as its weight says, as far as this sample can tell."
                if p > 0.01
                else f"Six weighted points in the plane, {int(counts.sum()):,} samples: the frequencies differ from "
                "the weights by more than chance explains at the 1 % level.",
            ),
        ),
        tables=(_masses(masses, steps), _frequencies(names, counts, weights)),
        closing=(
            "The masses in the first table are not estimates. In one dimension an Euler step is an increasing map, so "
            "the samples in a gap are those that start between two places, which can be found to any accuracy.",
        ),
    )


def _laws(
    run: Run, score: EmpiricalScore, steps: tuple[int, ...]
) -> tuple[dict[str, Tensor], dict[str, tuple[float, float, float]]]:
    process, laws = score.process, {}
    for count in steps:
        n = 2000 if run.quick else min(30_000, 6_000_000 // count)
        start = process.prior((n, 1), generator=rng.stream(run.seed, "reproduce/memorise/start"), dtype=torch.float64)
        laws[f"{count} Euler steps"] = pf_ode(score, process, start, steps=count)
    start = process.prior((500 if run.quick else 10_000, 1), generator=rng.stream(run.seed, "reproduce/memorise/start"))
    laws["dopri5"] = pf_ode(score, process, start.double(), method="dopri5", tolerance=1e-5)
    plain = {name: x[:, 0] for name, x in laws.items() if isinstance(x, Tensor)}
    return plain, {name: wilson(in_gap(x), len(x)) for name, x in plain.items()}


def _weights(run: Run) -> tuple[list[str], Tensor, Tensor]:
    """Six points of the random set with weights: how often each comes back."""
    points, weights = toy("random").rows(0, 6), torch.tensor(WEIGHTS, dtype=torch.float64)
    score = EmpiricalScore(Empirical(points, weights=weights), VP(eps=1e-3))
    stream = rng.stream(run.seed, "reproduce/memorise/weights")
    start = score.process.prior((500 if run.quick else 10_000, 2), generator=stream, dtype=torch.float64)
    ends = pf_ode(score, score.process, start, method="dopri5", tolerance=1e-5)
    assert isinstance(ends, Tensor)
    alpha = score.process.alpha(torch.tensor(score.process.eps, dtype=torch.float64))
    counts = torch.bincount(torch.cdist(ends, alpha * points).argmin(1), minlength=6)
    return [f"({a:g}, {b:g})" for a, b in points.tolist()], counts, weights


def _masses(masses: Tensor, steps: tuple[int, ...]) -> Table:
    cells = (tuple("below 10⁻⁶" if v < 1e-6 else number(float(v)) for v in row) for row in masses)
    return Table(
        caption="Mass in the gaps, P(.25 < |x| < .75), of the exact score on {-1, 0, 1} with uniform Euler steps: "
        "exact, by sections of the sampler's map.",
        head=("cutoff", *(f"{count:,} steps" for count in steps)),
        rows=tuple((f"eps = {eps:g}", *row) for eps, row in zip(EPSILONS, cells, strict=True)),
    )


def _frequencies(names: list[str], counts: Tensor, weights: Tensor) -> Table:
    n = int(counts.sum())
    rows = []
    for name, hits, weight in zip(names, counts.tolist(), weights.tolist(), strict=True):
        share, low, high = wilson(hits, n)
        rows.append((name, f"{weight:g}", f"{share:.4f}", f"{low:.4f} to {high:.4f}"))
    return Table(
        caption="How often each training point of a weighted set comes back.",
        head=("training point", "weight", "frequency", "95 % interval"),
        rows=tuple(rows),
    )
