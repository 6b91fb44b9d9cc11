r"""Exhibits of the exact score: where the target is noisy, what samplers make of it, and the effect of white noise.

**Maps of the plane** (docs/theory.md, §3.4, §4.4). Six points in four arrangements; :math:`\alpha = \sqrt{1-t}`,
:math:`\sigma = \sqrt t`. The map shows :math:`\mathrm{tr}\,C / (\mathrm{tr}\,C + |s|^2)` (the paper's Figure 1), and
the paths over it are those of the PF-ODE and, from the same starts, of the effective SDE with the naive kernel, whose
noise has the covariance :math:`\kappa D C D`.

**Memorisation** (§4.1). The PF-ODE of the exact score returns training points, each as often as its weight. Euler's
method with few steps does not. In one dimension this can be computed without random numbers: an Euler step is an
increasing map (its slope is :math:`1 - \Delta(D/\sigma^2 - \beta) + \ldots > 0` on a uniform grid), hence so is the
whole sampler, and the mass in a gap is the Gaussian mass between two preimages, found by repeated section.

**Laws of the effective SDE** (§4.3, §4.4). The naive kernel has noise where the target is noisy, on the boundaries
between training points. It leaves fewer samples there, not more: noise in Itô's sense has no drift, so a sample leaves
places of strong noise quickly and places of weak noise slowly."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from vkernel import kernels, metrics, plots, sample
from vkernel.core.estimate import Estimate
from vkernel.data import Empirical, toy
from vkernel.process import VP, Toy
from vkernel.reproduce.exhibit import MEMORY, Exhibit, Page, Run, Values, number, one_thread, read
from vkernel.score import EmpiricalScore

# Maps of the plane
SETS = ("hexagon", "line", "L", "random")
TIMES = (0.05, 0.1, 0.2, 0.5, 0.75)
SMALL = (0.05, 0.01)  # times at which C at the points is compared with C on the boundaries
SIDE, LIMIT = 100, 2.0
ISOLATED = 5.0  # distance of the closest two points, in units of σ/α
MAP_TIME, KAPPA = 0.2, 0.1


def noise_and_score(score: EmpiricalScore, x: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """Return tr C and |s|² at each query in the plane."""
    s, C = score.with_covariance(x, t)
    return C.trace(), s.square().sum(-1)


def _fraction(score: EmpiricalScore, x: Tensor, t: float) -> Tensor:
    trace, square = noise_and_score(score, x, t)
    return trace / (trace + square)


def _grid(side: int) -> tuple[Tensor, Tensor]:
    """Return the axis ``(side,)`` of the map and its places ``(y, x, 2)``."""
    axis = torch.linspace(-LIMIT, LIMIT, side, dtype=torch.float64)
    return axis, torch.stack(torch.meshgrid(axis, axis, indexing="xy"), dim=-1)


def figure1(run: Run) -> Exhibit:
    """Map the noise of the target around four sets of points at five times."""
    process, (axis, grid) = Toy(), _grid(SIDE)
    scores = [EmpiricalScore(toy(name), process, memory=MEMORY) for name in SETS]
    points = torch.stack([score.data[:] for score in scores])
    fraction = torch.stack([torch.stack([_fraction(s, grid, t) for t in TIMES]) for s in run.each(scores, 0.5)])
    share = (fraction > 0.5).double().mean((2, 3))
    at_points, at_boundary, gaps = (torch.stack(v) for v in zip(*(_limits(s) for s in scores), strict=True))
    alpha, mean = process.alpha(torch.tensor(TIMES, dtype=torch.float64)), share.mean(0)
    centre, pixel = alpha[0] * points[0], float(axis[1] - axis[0])
    beside = centre[:, None] + pixel * torch.tensor([[1, 0], [-1, 0], [0, 1], [0, -1]])
    found: Values = {"sets": SETS, "t": TIMES, "x": axis, "y": axis, "fraction": fraction, "points": points}
    found |= {"alpha": alpha, "share_above_half": share, "noise_at_points": at_points, "noise_at_boundary": at_boundary}
    found |= {"proxy_error": [_proxy_error(s, grid[::4, ::4]) for s in scores], "boundary_share": boundary_share(SMALL)}
    spot, near = (float(_fraction(scores[0], x, TIMES[0]).mean()) for x in (centre, beside))
    values: Values = {"mean": mean, "widest": TIMES[int(mean.argmax())], "spot": spot, "beside": near}
    small = (at_points.amax(-1) / at_boundary)[:, -1]  # at the least t: largest C at a point over that on a boundary
    far = gaps[:, -1] >= ISOLATED
    named = [[name for name, own in zip(SETS, far.tolist(), strict=True) if own == which] for which in (True, False)]
    values |= {"isolated": named[0], "crowded": named[1], "apart": ISOLATED}
    values["small"] = [small[own].max() for own in (far, ~far)]
    page = Page(run, "figure1", found | {"small_t": SMALL}, pixel=pixel, gaps=gaps, **values)
    page.picture("figure1", plots.fraction_maps, SETS, TIMES, axis, fraction, points, alpha)
    return page.exhibit(0.5)


def _proxy_error(score: EmpiricalScore, x: Tensor) -> float:
    """Return the largest difference between the score, the mean of proxy scores, and the gradient of log p, in units of
    the largest |s|, over places ``x`` and the times of the map."""
    worst, y = 0.0, score.data[:]
    for t in TIMES:
        place = x.clone().requires_grad_()
        alpha = score.process.alpha(torch.tensor(t, dtype=torch.float64))
        log_p = torch.logsumexp(-(place[..., None, :] - alpha * y).square().sum(-1) / (2 * t), -1)
        (slope,) = torch.autograd.grad(log_p.sum(), place)
        worst = max(worst, float((score(x, t) - slope).norm(dim=-1).max() / slope.norm(dim=-1).max()))
    return worst


def boundary_share(times: Sequence[float]) -> Tensor:
    """Return the share of ∫ tr C dx, between the points -1, 0 and 1, that lies within five widths of the boundaries at
    ±α/2, at each time; between two points at distance Δ, C is a sech² of width σ²/(αΔ) on the line."""
    score, found = EmpiricalScore(toy("triple"), Toy()), []
    for t in times:
        alpha = float(score.process.alpha(torch.tensor(t, dtype=torch.float64)))
        x = torch.linspace(-alpha, alpha, 20_001, dtype=torch.float64)
        C = score.covariance(x[:, None], t).trace()
        found.append(C[(x.abs() - alpha / 2).abs() < 5 * t / alpha].sum() / C.sum())
    return torch.stack(found)


def _limits(score: EmpiricalScore) -> tuple[Tensor, ...]:
    """At the SMALL times: σ² tr C / d at each point, its maximum over midpoints, and the least distance in σ/α."""
    y = score.data[:]
    i, j = torch.triu_indices(len(y), len(y), 1)
    found = []
    for t in SMALL:
        alpha, unit = score.process.alpha(torch.tensor(t, dtype=torch.float64)), t / score.data.d
        at, between = (unit * noise_and_score(score, alpha * x, t)[0] for x in (y, (y[i] + y[j]) / 2))
        found.append((at, between.max(), (y[i] - y[j]).norm(dim=-1).min() * alpha / t**0.5))
    return tuple(torch.stack(v) for v in zip(*found, strict=True))


@one_thread()
def paths2d(run: Run) -> Exhibit:
    """Draw paths of the PF-ODE and of the effective SDE over the map, and count where they end."""
    process, s = Toy(eps=1e-3), run.sizes("paths2d")
    axis, grid = _grid(s.side)
    points, maps, flows, noisy, moved = [], [], [], [], []
    for name in run.each(SETS, 0.8):
        score = EmpiricalScore(toy(name), process)
        points.append(score.data[:])
        maps.append(_fraction(score, grid, MAP_TIME))
        x_T = process.prior((s.starts, 2), dtype=torch.float64, generator=run.stream("paths2d/start"))
        V, stream = kernels.Naive(score, KAPPA), run.stream(f"paths2d/{name}")
        flow = path_of(sample.pf_ode(score, x_T, steps=s.steps, method="euler", save="path"))
        other = path_of(sample.effective_sde(V, x_T, steps=s.steps, save="path", generator=stream))
        ends = [torch.cdist(path[-1], points[-1]).argmin(1) for path in (flow, other)]
        moved.append(Estimate.of_share(int((ends[0] != ends[1]).sum()), s.starts).stack())
        flows.append(flow[:, : s.shown])
        noisy.append(other[:, : s.shown])
    found: Values = {"sets": SETS, "map_time": MAP_TIME, "kappa": KAPPA, "x": axis}
    found |= {"times": process.times(s.steps, "log"), "fraction": torch.stack(maps), "points": torch.stack(points)}
    found |= {"flow": torch.stack(flows), "noisy": torch.stack(noisy), "ends_elsewhere": torch.stack(moved)}
    page = Page(run, "paths2d", found, process=process, **vars(s))
    rows = {"PF-ODE": found["flow"], f"effective SDE, κ = {KAPPA:g}": found["noisy"]}
    alpha = float(process.alpha(torch.tensor(MAP_TIME, dtype=torch.float64)))
    page.picture("paths2d", plots.path_maps, SETS, axis, found["fraction"], found["points"], alpha, rows)
    return page.exhibit(0.2)


def path_of(found: sample.Solution) -> Tensor:
    """Return the path of a solution that has saved it."""
    assert found.path is not None
    return found.path


# Memorisation
GAP = (0.25, 0.75)
EPSILONS = (1e-4, 1e-3, 1e-2)
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
        above = (x.reshape(z.shape) >= levels[:, None]).double().argmax(1).clamp_min(1)
        low, high = z[rows, above - 1], z[rows, above]
    mass = torch.special.ndtr((low + high) / 2)
    return max(0.0, float(mass[1] - mass[0] + mass[3] - mass[2]))


@one_thread()
def memorise(run: Run) -> Exhibit:
    """Sample the exact score with several integrators, and compare frequencies with weights."""
    from scipy.stats import chisquare

    data, s = toy("triple"), run.sizes("memorise")
    scores = [EmpiricalScore(data, VP(eps=eps)) for eps in EPSILONS]
    masses = [[gap_mass(score, count, s.rounds, s.points) for count in s.steps] for score in run.each(scores, 0.45)]
    samples = _samples(run, scores[SHOWN], s)
    shares = [metrics.gap_mass(x, GAP) for x in samples.values()]
    run.step(0.25)
    points, weights = toy("random")[:], torch.tensor(WEIGHTS, dtype=torch.float64)
    process = VP(eps=1e-3)
    weighted = EmpiricalScore(Empirical(points, weights=weights), process)
    x_T = process.prior((s.adaptive, 2), generator=run.stream("memorise/weights"), dtype=torch.float64)
    x = sample.pf_ode(weighted, x_T, method="dopri5", tolerance=1e-5)
    x = x / process.alpha(torch.tensor(process.eps, dtype=torch.float64))
    counts = (metrics.mode_weights(x, weighted.data).share.value * s.adaptive).round().long()  # of each point
    statistic, p = chisquare(counts, weights * counts.sum())
    run.step(0.2)
    found: Values = {f"sample_{name.split()[0]}": x for name, x in samples.items()}
    found |= {"eps": EPSILONS, "steps": s.steps, "gap_mass": masses, "gap_share": [share.stack() for share in shares]}
    found |= {"weights": weights, "counts": counts, "chi_square": statistic, "p_value": p}
    values: Values = {"frequency": Estimate.of_share(counts, float(counts.sum())).stack(1), "points": points}
    values |= {"shown": masses[SHOWN], "shown_eps": EPSILONS[SHOWN], "samples": samples}
    page = Page(run, "memorise", found, **values)
    notes = [f"in the gaps: {number(share.value, 2)}" for share in shares]
    edges = torch.linspace(-1.5, 1.5, 121, dtype=torch.float64)
    law = torch.stack([torch.histogram(x, edges).hist / len(x) for x in samples.values()])
    page.picture("memorise", plots.law_panels, {"": law}, list(samples), edges, {"": data[:][:, 0]}, GAP, [notes])
    return page.exhibit(0.1)


def _samples(run: Run, score: EmpiricalScore, s: SimpleNamespace) -> dict[str, Tensor]:
    """Return samples ``(n,)`` from equal starts, by Euler's method and by an adaptive one."""

    def start(n: int, dtype: torch.dtype | None = torch.float64) -> Tensor:
        return score.process.prior((n, 1), generator=run.stream("memorise/start"), dtype=dtype)

    found = {}
    for count in s.steps:
        x_T = start(min(s.samples, 6_000_000 // count))
        x = sample.pf_ode(score, x_T, steps=count, method="euler", spacing="uniform")
        found[f"{count} Euler steps"] = x[:, 0]
    x_T = start(s.adaptive, None).double()
    return found | {"dopri5": sample.pf_ode(score, x_T, method="dopri5", tolerance=1e-5)[:, 0]}


# Laws of the effective SDE
KAPPAS, COARSE_KAPPAS = (0.0, 0.01, 0.1, 1.0), (0.0, 0.1, 1.0)
EPS, COARSE_EPS, COMPARED, FILL = 0.02, 0.01, 0.1, 0.3
LINES = {"{-1, +1}": "pair", "{-1, 0, +1}": "triple"}
GAPS = ((0.0, GAP[1]), GAP)
RANGE, BINS, PERMUTATIONS = (-1.5, 1.5), 120, 8
CANDIDATES = [SimpleNamespace(**table) for table in read("laws")["candidates"]]  # gaps that noise might fill


def _law(run: Run, purpose: str, score: EmpiricalScore, kappa: float, *, resample: bool = False, **how: Any) -> Tensor:
    """Return samples of the effective SDE with Gaussian noise or, if ``resample``, with resampled training points."""
    shape, start = (run.sizes("laws").n, score.data.d), run.stream("laws/start")
    x_T = score.process.prior(shape, generator=start, dtype=torch.float64)
    how["generator"] = run.stream(f"laws/{purpose}")
    if resample:
        return sample.naive(score, x_T, kappa=kappa, **how)
    return sample.effective_sde(kernels.Naive(score, kappa), x_T, **how)


@one_thread()
def laws(run: Run) -> Exhibit:
    """Sample the effective SDE at several strengths of noise and numbers of steps."""
    s, edges = run.sizes("laws"), torch.linspace(*RANGE, BINS + 1, dtype=torch.float64)
    histograms, gaps = [], []
    for gap, name in zip(GAPS, LINES.values(), strict=True):
        score = EmpiricalScore(toy(name), VP(eps=EPS))
        for kappa in run.each(KAPPAS, 0.5 / len(LINES)):
            x = _law(run, f"{name}/{kappa:g}", score, kappa, steps=s.fine)
            histograms.append(torch.histogram(x[:, 0], edges).hist / s.n)
            gaps.append(metrics.gap_mass(x, gap).stack())
    law, gap = (torch.stack(v).unflatten(0, (len(LINES), -1)) for v in (histograms, gaps))
    gap = gap.mT  # (set, 3, κ)
    coarse, distance, floor = _coarse(run, s.steps)
    search, last = _search(run, s.fine)
    found: Values = {"kappa": KAPPAS, "eps": EPS, "edges": edges, "law": law, "gap": gap, "steps": s.steps}
    found |= {"coarse_kappa": COARSE_KAPPAS, "coarse_gap": coarse, "variation": distance, "variation_floor": floor}
    found |= {"search": search, "search_last": last, "search_kappa": (0.0, FILL)}
    eps = torch.tensor(EPS, dtype=torch.float64)
    ends = torch.stack([(end - VP().alpha(eps)) / VP().sigma(eps) for end in (GAP[1], -GAP[1])])
    middle = law[1][:, (edges[1:] + edges[:-1]).abs() / 2 < 0.5].sum(1)
    values: Values = {"tail": torch.special.ndtr(ends).diff().abs().item(), "middle": middle}
    values |= {"n": s.n, "fine_steps": s.fine, "coarse_eps": COARSE_EPS, "sets": LINES, "candidates": CANDIDATES}
    page = Page(run, "laws", found, **values)
    points = {name: toy(key)[:][:, 0] for name, key in LINES.items()}
    lines = {f"κ = {k:g}": c for k, c in zip(COARSE_KAPPAS, coarse, strict=True)}
    by_set, gap_by_set = (dict(zip(LINES, v, strict=True)) for v in (law, gap))
    page.picture("laws", plots.law_panels, by_set, [f"κ = {kappa:g}" for kappa in KAPPAS], edges, points, key="laws")
    page.picture("laws_curves", plots.gap_curves, KAPPAS, gap_by_set, s.steps, lines, distance, floor, key="curves")
    return page.exhibit(0.1)


def _coarse(run: Run, grid: list[int]) -> tuple[Tensor, Tensor, float]:
    """Return gap masses ``(κ, 3, steps)``, and the total variation of two noises ``(3, steps)`` with its floor."""
    score, source = EmpiricalScore(toy("triple"), VP(eps=COARSE_EPS)), run.stream("laws/permutations")
    gaps, distances, floors = [], [], []
    for steps in run.each(grid, 0.3):
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
    masses = torch.stack(gaps).unflatten(0, (len(grid), -1)).permute(1, 2, 0)
    return masses, torch.stack(distances, 1), sum(floors) / len(floors)


def _search(run: Run, steps: int) -> tuple[Tensor, ...]:
    """Return the mass in the gap of every candidate and at its last point, ``(candidate, κ, 3)`` each."""
    gaps, last = [], []
    for i, c in enumerate(run.each(CANDIDATES, 0.1)):
        eps, centre = (torch.tensor(v, dtype=torch.float64) for v in (c.eps, c.centre))
        data = Empirical(torch.tensor(c.points, dtype=torch.float64), weights=c.weights) if c.points else toy("hexagon")
        score = EmpiricalScore(data, VP(eps=c.eps))
        for kappa in (0.0, FILL):
            x = _law(run, f"candidate {i}/{kappa:g}", score, kappa, steps=steps) / VP().alpha(eps)
            gaps.append(Estimate.of_share(int(((x - centre).norm(dim=1) < c.radius).sum()), len(x)).stack())
            last.append(metrics.mode_weights(x, data).share[-1].stack())
    return tuple(torch.stack(v).unflatten(0, (len(CANDIDATES), 2)) for v in (gaps, last))
