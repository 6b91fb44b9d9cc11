r"""Final laws of the effective SDE against κ and the number of steps (docs/theory.md, §4.3 and §4.4).

With the naive kernel the sampler has noise where the target has, on the boundaries between training points, and one
might expect it to leave samples there. It does the reverse: Itô's noise carries no drift, so a walker leaves places of
large noise quickly and places of small noise slowly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vkernel import plots
from vkernel.core import rng
from vkernel.data import Empirical, toy
from vkernel.kernels import Naive
from vkernel.process import VP
from vkernel.reproduce.memorise import GAP, in_gap, one_thread, wilson
from vkernel.reproduce.page import Exhibit, Finding, Picture, Run, Table, number
from vkernel.sample import effective_sde, naive
from vkernel.score.empirical import EmpiricalScore

__all__ = ["make", "variation"]

ORDER, TITLE, SECONDS = 60, "Final laws against κ and step count", 32.0
KAPPAS = (0.0, 0.01, 0.1, 1.0)
EPS, COARSE_EPS, COMPARED = 0.02, 0.01, 0.1
NAMES = ("{-1, +1}", "{-1, 0, +1}")
TOYS = ("pair", "triple")
EDGES = torch.linspace(-1.5, 1.5, 121, dtype=torch.float64)
FILL_KAPPA = 0.3


@dataclass(frozen=True)
class Candidate:
    """A set whose gap noise might fill: its points and weights, a cutoff, and the gap as distances from a centre."""

    name: str
    points: tuple[tuple[float, ...], ...]
    weights: tuple[float, ...] | None
    eps: float
    centre: tuple[float, ...]
    radius: float


HEXAGON = tuple(map(tuple, toy("hexagon").rows(0, 6).tolist()))
CANDIDATES = (
    Candidate("weights .9 at -1 and .1 at +1: |x| < .75", ((-1.0,), (1.0,)), (0.9, 0.1), 0.02, (0.0,), 0.75),
    Candidate(
        "weight .96 at -2, a rare pair at .85 and 1.15: middle third of the pair",
        ((-2.0,), (0.85,), (1.15,)),
        (0.96, 0.02, 0.02),
        0.02,
        (1.0,),
        0.05,
    ),
    Candidate("hexagon, eps = 0.1: within .4 of the centre", HEXAGON, None, 0.1, (0.0, 0.0), 0.4),
)


def variation(a: Tensor, b: Tensor, generator: torch.Generator, draws: int = 200) -> tuple[float, float, float, float]:
    """Total variation of two histograms of equally large samples, a bootstrap's 95 % interval, and its floor: the mean
    distance between two samples of their common law."""
    n = float(a.sum())
    pools = [a / n, b / n, (a + b) / (2 * n)]

    def again(law: Tensor) -> Tensor:
        picks = torch.multinomial(law.expand(draws, -1), int(n), True, generator=generator)
        return torch.zeros(draws, len(law), dtype=torch.float64).scatter_add_(1, picks, torch.ones_like(picks).double())

    first, second, one, two = (again(p) / n for p in (*pools, pools[2]))
    spread = (first - second).abs().sum(1) / 2
    value = float((pools[0] - pools[1]).abs().sum() / 2)
    half = 1.96 * float(spread.std())
    return value, max(0.0, value - half), value + half, float((one - two).abs().sum(1).mean() / 2)


class Study:
    """Samples of the three chains, with streams that depend on the seed and their purpose alone."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.n = 300 if run.quick else 10_000
        self.steps = 20 if run.quick else 320
        self.grid = (10, 30) if run.quick else (30, 100, 300)

    def stream(self, purpose: str) -> torch.Generator:
        return rng.stream(self.run.seed, f"reproduce/laws/{purpose}")

    def start(self, process: VP, n: int, d: int = 1) -> Tensor:
        return process.prior((n, d), generator=self.stream("start"), dtype=torch.float64)

    def fine(self, data: Empirical, kappa: float, name: str, eps: float = EPS) -> Tensor:
        """The law with many steps, even in log(sigma/alpha); the same integrator for every κ, so that they compare."""
        process = VP(eps=eps)
        score = EmpiricalScore(data, process)
        start = self.start(process, self.n, data.d)
        kernel, stream = Naive(score, kappa), self.stream(f"{name}/{kappa:g}")
        return effective_sde(score, kernel, process, start, steps=self.steps, generator=stream, spacing="log")

    def coarse(self, kappa: float, steps: int, resampled: bool = False) -> Tensor:
        """Uniform steps on {-1, 0, 1}, with Gaussian or with resampled noise."""
        process = VP(eps=COARSE_EPS)
        score = EmpiricalScore(toy("triple"), process)
        start, stream = self.start(process, self.n), self.stream(f"{'re' if resampled else ''}coarse/{kappa:g}/{steps}")
        if resampled:
            return naive(score, process, start, kappa=kappa, steps=steps, generator=stream)[:, 0]
        return effective_sde(score, Naive(score, kappa), process, start, steps=steps, generator=stream)[:, 0]


def _tail() -> float:
    """P(|x| < .75) of p(x|eps) on {-1, 1}."""
    eps = torch.tensor(EPS, dtype=torch.float64)
    alpha, sigma = VP().alpha(eps), VP().sigma(eps)
    return float(torch.special.ndtr((GAP[1] - alpha) / sigma) - torch.special.ndtr((-GAP[1] - alpha) / sigma))


def _between(x: Tensor) -> int:
    """In the gap of {-1, 1}."""
    return int((x.abs() < GAP[1]).sum())


@one_thread
def make(run: Run) -> Exhibit:
    study = Study(run)
    laws = torch.zeros(2, len(KAPPAS), len(EDGES) - 1, dtype=torch.float64)
    gaps = torch.zeros(2, 3, len(KAPPAS), dtype=torch.float64)
    for i, name in enumerate(TOYS):
        for k, kappa in enumerate(KAPPAS):
            x = study.fine(toy(name), kappa, name)[:, 0]
            laws[i, k] = torch.histogram(x, EDGES).hist / study.n
            gaps[i, :, k] = torch.tensor(wilson((_between, in_gap)[i](x), study.n))
            run.step(0.5 / (2 * len(KAPPAS)))
    coarse, distance, floor = _coarse(study)
    found, last = _search(study)
    saved = run.arrays(
        "laws",
        kappa=KAPPAS,
        eps=EPS,
        edges=EDGES,
        law=laws,
        gap=gaps,
        steps=study.grid,
        coarse_kappa=(0.0, COMPARED, 1.0),
        coarse_gap=coarse,
        variation=distance,
        variation_floor=floor,
        search=found,
        search_last=last,
        search_kappa=(0.0, FILL_KAPPA),
    )
    pictures = (_laws_picture(run, study, laws, gaps), _curves_picture(run, study, gaps, coarse, distance, floor))
    run.step(0.1)
    return Exhibit(
        name="laws",
        title=TITLE,
        pictures=pictures,
        data=saved,
        sizes=f"The paper's VP; {study.n:,} samples for every law. Against κ: eps = {EPS:g}, "
        f"{study.steps} Euler steps even in log(σ/α). Against steps: eps = {COARSE_EPS:g}, uniform steps, κ = "
        f"{COMPARED:g} for the comparison of noises, 120 bins on [-1.5, 1.5].",
        opening=(
            "Add to the exact score the noise of the naive estimator, V = κ D C D δ(t - t'), and ask where samples "
            "end. This noise is strong between training points. Does it leave samples between them?",
        ),
        finding=Finding(
            number=f"{number(float(gaps[0, 0, 0]))} → {number(float(gaps[0, 0, 1]))} → {number(float(gaps[0, 0, 2]))}",
            interval=f"P(|x| < .75) on {{-1, +1}} at κ = 0, {KAPPAS[1]:g}, {KAPPAS[2]:g}",
            words=(
                f"It empties the gap, from {_range(gaps[0, :, 0])} without noise to {_range(gaps[0, :, 1])} at "
                f"κ = {KAPPAS[1]:g} and {_range(gaps[0, :, 2])} at κ = {KAPPAS[2]:g} (95 % intervals). "
                f"The tail of p(x|eps) itself is {number(_tail())}, exactly; what exceeds it at κ = 0 is error of "
                "integration. The steps share it at every κ, so the contrast with the weakest noise depends on it.",
                "The reason is a convention with consequences. Noise that depends on the place, taken in Itô's sense "
                "as the estimator demands (it is drawn at the place from which the step starts), has no drift: it "
                "stirs, and stirring moves walkers out of regions of strong noise faster than back in. In "
                "Stratonovich's notation the same process has the extra velocity -(κ/4) D² dC/dx per unit of sampling "
                "time, which points away from large C, that is off the boundary and towards one training point or the "
                "other.",
            ),
        ),
        tables=(_gap_table(gaps), _search_table(found)),
        closing=(_verdict(found, last),),
    )


def _coarse(study: Study) -> tuple[Tensor, Tensor, float]:
    kappas = (0.0, COMPARED, 1.0)
    gaps = torch.zeros(len(kappas), 3, len(study.grid), dtype=torch.float64)
    distance, floors = torch.zeros(3, len(study.grid), dtype=torch.float64), []
    for j, steps in enumerate(study.grid):
        for k, kappa in enumerate(kappas):
            x = study.coarse(kappa, steps)
            gaps[k, :, j] = torch.tensor(wilson(in_gap(x), study.n))
            if kappa == COMPARED:
                other = study.coarse(kappa, steps, resampled=True)
                counts = [torch.histogram(v.clamp(-1.5, 1.5), EDGES).hist for v in (x, other)]
                *found, floor = variation(counts[0], counts[1], study.stream(f"variation/{steps}"))
                distance[:, j] = torch.tensor(found)
                floors.append(floor)
        study.run.step(0.3 / len(study.grid))
    return gaps, distance, sum(floors) / len(floors)


def _search(study: Study) -> tuple[Tensor, Tensor]:
    """In the gap of every candidate, and at its last point, without and with noise: ``(candidate, κ, 3)`` each."""
    gaps, last = (torch.zeros(len(CANDIDATES), 2, 3, dtype=torch.float64) for _ in range(2))
    for i, c in enumerate(CANDIDATES):
        points = torch.tensor(c.points, dtype=torch.float64)
        data = Empirical(points, weights=None if c.weights is None else torch.tensor(c.weights, dtype=torch.float64))
        alpha = float(VP().alpha(torch.tensor(c.eps, dtype=torch.float64)))
        for k, kappa in enumerate((0.0, FILL_KAPPA)):
            x = study.fine(data, kappa, f"candidate {i}", c.eps) / alpha
            inside = (x - torch.tensor(c.centre, dtype=torch.float64)).norm(dim=1) < c.radius
            gaps[i, k] = torch.tensor(wilson(int(inside.sum()), study.n))
            at = torch.cdist(x, points).argmin(1)
            last[i, k] = torch.tensor(wilson(int((at == len(points) - 1).sum()), study.n))
    study.run.step(0.1)
    return gaps, last


def _range(v: Tensor | tuple[float, float, float]) -> str:
    value, low, high = (float(a) for a in v)
    return f"{number(value)} ({number(low, 2)} to {number(high, 2)})"


def _laws_picture(run: Run, study: Study, laws: Tensor, gaps: Tensor) -> Picture:
    points = {NAMES[0]: (-1, 1), NAMES[1]: (-1, 0, 1)}
    near = (EDGES[1:] + EDGES[:-1]).abs() / 2 < 0.5
    shares = zip(KAPPAS, laws[1][:, near].sum(1).tolist(), strict=True)
    middle = ", ".join(f"{number(share)} at κ = {kappa:g}" for kappa, share in shares)
    return run.picture(
        "laws",
        lambda: plots.final_laws(dict(zip(NAMES, laws, strict=True)), KAPPAS, EDGES, points),
        alt="Histograms on a logarithmic scale: two training sets as rows, four strengths of noise as columns. With "
        f"growing κ the mass between the points vanishes: on {NAMES[0]} from {number(float(gaps[0, 0, 0]))} to "
        f"{number(float(gaps[0, 0, 3]))}.",
        caption=(
            f"Final laws at eps = {EPS:g}, {study.n:,} samples each, on a logarithmic scale; dots are training points. "
            "At κ = 0 each peak has the width σ that p(x|eps) gives it. With noise the flanks towards the neighbours "
            "go first, then the peaks themselves move apart, and a point between two others starves: of all samples on "
            f"{NAMES[1]}, the share with |x| < .5 is {middle}.",
        ),
    )


def _curves_picture(run: Run, study: Study, gaps: Tensor, coarse: Tensor, distance: Tensor, floor: float) -> Picture:
    first, last = study.grid[0], study.grid[-1]
    return run.picture(
        "laws_curves",
        lambda: plots.gap_curves(
            KAPPAS,
            dict(zip(NAMES, gaps, strict=True)),
            study.grid,
            {f"κ = {k:g}": c for k, c in zip((0.0, COMPARED, 1.0), coarse, strict=True)},
            distance,
            floor,
        ),
        alt="Three panels. The mass in the gap falls with κ; it falls with the number of steps; and the total "
        f"variation between resampled and Gaussian noise falls from {number(float(distance[0, 0]), 2)} at {first} "
        f"steps to {number(float(distance[0, -1]), 2)} at {last}.",
        caption=(
            "Left: mass in the gap (|x| < .75 for two points, .25 < |x| < .75 for three) against κ, with Wilson's 95 % "
            "intervals; an arrow points down from the upper end where no sample was seen. Middle: with few uniform "
            f"steps the gap of {NAMES[1]} has mass at every κ: {number(float(coarse[0, 0, 0]), 2)} without noise and "
            f"{number(float(coarse[2, 0, 0]), 2)} at κ = 1 with {first} steps, "
            f"{number(float(coarse[0, 0, -1]), 2)} and {number(float(coarse[2, 0, -1]), 2)} with {last}.",
            f"Right: resampling a training point at every step and drawing Gaussian noise of the same covariance agree "
            f"only as the step shrinks. Their total variation is {_range(distance[:, 0])} with {first} steps and "
            f"{_range(distance[:, -1])} with {last}; two samples of one law would show {number(floor, 2)}.",
        ),
    )


def _gap_table(gaps: Tensor) -> Table:
    return Table(
        caption=f"Mass in the gap at eps = {EPS:g}, with 95 % intervals.",
        head=("training set", *(f"κ = {k:g}" for k in KAPPAS)),
        rows=tuple(
            (name, *(_range(gap[:, k]) for k in range(len(KAPPAS)))) for name, gap in zip(NAMES, gaps, strict=True)
        ),
    )


def _search_table(found: Tensor) -> Table:
    return Table(
        caption="Where one might hope for a gap that fills: mass in it without and with noise, 95 % intervals. Unless "
        f"said, eps = {EPS:g}.",
        head=("training set and gap", "κ = 0", f"κ = {FILL_KAPPA:g}"),
        rows=tuple((c.name, _range(row[0]), _range(row[1])) for c, row in zip(CANDIDATES, found, strict=True)),
    )


def _verdict(found: Tensor, last: Tensor) -> str:
    """What the search found, in words that follow the intervals."""
    filled = [c.name for c, row in zip(CANDIDATES, found, strict=True) if row[1, 1] > row[0, 2]]
    emptied = sum(bool(row[1, 2] < row[0, 1]) for row in found)
    answer = f"It fills here: {'; '.join(filled)}." if filled else "No such gap was found here."
    return (
        f"Is there a set where this noise fills a gap? {answer} Unequal weights, a narrow gap beside a wide one and "
        f"the centre of the hexagon were tried; {emptied} of {len(found)} have an interval below that without noise. "
        "What noise does change is how often a point comes back: being pushed off a boundary helps the smaller side. "
        f"With weights .9 and .1 the rare point's share goes from {_range(last[0, 0])} to {_range(last[0, 1])} at "
        f"κ = {FILL_KAPPA:g}. Coarse steps fill gaps, but they do so at every κ, and noise lessens it: that is an "
        "error of integration. On these sets white noise of this covariance does not generalize into gaps; the "
        "quenched noise of a real model (theory, section 4.4) is another matter."
    )
