r"""Figure 1 of the paper: where in the plane the training target is noisy (docs/theory.md, §3.4).

Six points in the plane, in four arrangements; :math:`\alpha = \sqrt{1-t}`, :math:`\sigma = \sqrt t`. On a
100 × 100 grid of :math:`[-2, 2]^2` the map shows :math:`\mathrm{tr}\,C / (\mathrm{tr}\,C + |s|^2)`, exactly: nothing
here is random.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vkernel import plots
from vkernel.data import toy
from vkernel.process import Toy
from vkernel.reproduce.page import Exhibit, Run, Table, number, percent
from vkernel.score.empirical import EmpiricalScore

__all__ = ["make", "noise_and_score"]

ORDER, TITLE, SECONDS = 10, "Figure 1: where the target is noisy", 6.0
SETS = ("hexagon", "line", "L", "random")
TIMES = (0.05, 0.1, 0.2, 0.5, 0.75)
SMALL = (0.05, 0.01)  # times at which C at the points is compared with C on the boundaries
SIDE, LIMIT = 100, 2.0
MEMORY = 1 << 28  # fixed, so that blocks, and with them the rounding, are the same everywhere


def noise_and_score(score: EmpiricalScore, x: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """tr C and |s|² at each query in the plane."""
    return score.covariance(x, t).trace(), score(x, t).square().sum(-1)


def make(run: Run) -> Exhibit:
    process = Toy()
    axis = torch.linspace(-LIMIT, LIMIT, SIDE, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), dim=-1)  # (y, x, 2)
    scores = [EmpiricalScore(toy(name), process, memory=MEMORY) for name in SETS]
    points = torch.stack([score.data.rows(0, score.data.n) for score in scores])
    maps = torch.empty(len(SETS), len(TIMES), SIDE, SIDE, dtype=torch.float64)
    for i, score in enumerate(scores):
        for j, t in enumerate(TIMES):
            trace, square = noise_and_score(score, grid, t)
            maps[i, j] = trace / (trace + square)
        run.step(0.5 / len(SETS))
    share = (maps > 0.5).double().mean((2, 3))
    at_points, at_boundary, gaps = (torch.stack(v) for v in zip(*(_limits(s) for s in scores), strict=True))
    alpha = process.alpha(torch.tensor(TIMES, dtype=torch.float64))
    data = run.arrays(
        "figure1",
        sets=list(SETS),
        t=TIMES,
        x=axis,
        y=axis,
        fraction=maps,
        points=points,
        alpha=alpha,
        share_above_half=share,
        small_t=SMALL,
        noise_at_points=at_points,
        noise_at_boundary=at_boundary,
    )
    spot, beside = _spot(scores[0], TIMES[0])
    picture = run.picture(
        "figure1",
        lambda: plots.fraction_maps(SETS, TIMES, axis, axis, maps, points, alpha),
        alt=f"Twenty heat maps of the plane: four sets of six points as rows, noise levels t from {TIMES[0]:g} to "
        f"{TIMES[-1]:g} as columns. At small t thin bright bands lie between the points; they widen and merge as t "
        f"grows. On {_span(share[:, 0])} of a map most of the target is noise at t = {TIMES[0]:g}, on "
        f"{_span(share[:, -1])} at t = {TIMES[-1]:g}.",
        caption=_caption(share, at_points, at_boundary, spot, beside, float(axis[1] - axis[0])),
    )
    run.step(0.5)
    return Exhibit(
        name="figure1",
        title=TITLE,
        pictures=(picture,),
        data=data,
        sizes=f"{len(SETS)} sets of {points.shape[1]} points, {len(TIMES)} times, {SIDE} × {SIDE} grid points; exact, "
        "without random numbers.",
        tables=(_shares(share), _extremes(at_points, at_boundary, gaps)),
    )


def _limits(score: EmpiricalScore) -> tuple[Tensor, Tensor, Tensor]:
    """At the SMALL times: sigma² tr C / d at each training point, the greatest on a midpoint of two; and the least
    distance of two points in units of sigma/alpha."""
    y = score.data.rows(0, score.data.n)
    i, j = torch.triu_indices(len(y), len(y), 1)
    at_points, at_boundary, gaps = [], [], []
    for t in SMALL:
        time = torch.tensor(t, dtype=torch.float64)
        alpha, var = float(score.process.alpha(time)), t
        unit = var / score.data.d
        at_points.append(unit * noise_and_score(score, alpha * y, t)[0])
        at_boundary.append(unit * noise_and_score(score, alpha * (y[i] + y[j]) / 2, t)[0].max())
        gaps.append((y[i] - y[j]).norm(dim=-1).min() * alpha / var**0.5)
    return torch.stack(at_points), torch.stack(at_boundary), torch.stack(gaps)


def _spot(score: EmpiricalScore, t: float) -> tuple[float, float]:
    """The fraction exactly at a (moved) training point, and one grid step beside it; means over the points."""
    alpha = float(score.process.alpha(torch.tensor(t, dtype=torch.float64)))
    centre = alpha * score.data.rows(0, score.data.n)
    step = 2 * LIMIT / (SIDE - 1) * torch.tensor([[1, 0], [-1, 0], [0, 1], [0, -1]], dtype=torch.float64)
    values = []
    for x in (centre, centre[:, None] + step):
        trace, square = noise_and_score(score, x, t)
        values.append(float((trace / (trace + square)).mean()))
    return values[0], values[1]


def _caption(
    share: Tensor, at_points: Tensor, at_boundary: Tensor, spot: float, beside: float, pixel: float
) -> tuple[str, ...]:
    mean = share.mean(0)
    widest = TIMES[int(mean.argmax())]
    return (
        "Bright is where most of the target is noise. Averaged over the four sets, that is "
        f"{percent(float(mean[0]))} of the map at t = {TIMES[0]:g}, {percent(float(mean.max()))} at t = {widest:g}, "
        f"where it is widest, and {percent(float(mean[-1]))} at t = {TIMES[-1]:g}. At small t the bright bands are the "
        "boundaries: places that two or more training points explain about equally well.",
        "As t → 0, C becomes exponentially small at a training point that stands apart, and large on the boundaries "
        "between points. In units of the target's mean square (that is, σ² tr C / d), at the hexagon's points it is "
        f"{number(float(at_points[0, 0].max()))} at t = {SMALL[0]:g} and {number(float(at_points[0, 1].max()))} at "
        f"t = {SMALL[1]:g}; on its strongest boundary {number(float(at_boundary[0, 0]))} and "
        f"{number(float(at_boundary[0, 1]))}. The second table has the other sets.",
        "The map by itself cannot show this: exactly at a training point |s|² vanishes even faster than tr C, and "
        f"their fraction there is {spot:.2f} (hexagon, t = {TIMES[0]:g}); one grid step of {pixel:.2f} beside it, "
        f"{beside:.2f}. Read the map for where boundaries are, and the table for how large C is.",
    )


def _span(share: Tensor) -> str:
    return f"{percent(float(share.min()))} to {percent(float(share.max()))}"


def _shares(share: Tensor) -> Table:
    return Table(
        caption="Part of the map on which more than half of the target is noise, tr C > |s|².",
        head=("training set", *(f"t = {t:g}" for t in TIMES)),
        rows=tuple((name, *(percent(float(v)) for v in row)) for name, row in zip(SETS, share, strict=True)),
    )


def _extremes(at_points: Tensor, at_boundary: Tensor, gaps: Tensor) -> Table:
    head = ["training set"]
    for t in SMALL:
        head += [f"at the points, t = {t:g}", f"strongest boundary, t = {t:g}", f"closest two points, t = {t:g}"]
    rows = []
    for name, points, boundary, gap in zip(SETS, at_points, at_boundary, gaps, strict=True):
        cells = [name]
        for k in range(len(SMALL)):
            low, high = float(points[k].min()), float(points[k].max())
            span = number(high, 2) if high < 1.005 * low else f"{number(low, 2)} to {number(high, 2)}"
            cells += [span, number(float(boundary[k]), 2), f"{float(gap[k]):.1f} σ/α"]
        rows.append(tuple(cells))
    return Table(
        caption="σ² tr C / d at the six training points (moved to αy), least to greatest, and the greatest at a "
        "midpoint between two of them. Two points within a few σ/α of each other still explain the same inputs: "
        "there C at the points is not small yet.",
        head=tuple(head),
        rows=tuple(rows),
    )
