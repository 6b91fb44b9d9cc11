r"""Maps of the plane: where the training target is noisy (the paper's Figure 1), and paths of samplers over these maps.

Six points in the plane, in four arrangements; :math:`\alpha = \sqrt{1-t}`, :math:`\sigma = \sqrt t`. The map shows
:math:`\mathrm{tr}\,C / (\mathrm{tr}\,C + |s|^2)`, exactly (docs/theory.md, §3.4). The paths are those of the PF-ODE of
the exact score and, from the same starts, of the effective SDE with the naive kernel, whose noise has the covariance
:math:`\kappa D C D` (§4.4).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vkernel import kernels, plots, sample
from vkernel.core.estimate import Estimate
from vkernel.data import toy
from vkernel.process import Process, Toy
from vkernel.reproduce.exhibit import MEMORY, Exhibit, Page, Run, one_thread
from vkernel.score import EmpiricalScore

SETS = ("hexagon", "line", "L", "random")
TIMES = (0.05, 0.1, 0.2, 0.5, 0.75)
SMALL = (0.05, 0.01)  # times at which C at the points is compared with C on the boundaries
SIDE, LIMIT = 100, 2.0
MAP_TIME, KAPPA = 0.2, 0.1


def noise_and_score(score: EmpiricalScore, x: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """Return tr C and |s|² at each query in the plane."""
    s, C = score.with_covariance(x, t)
    return C.trace(), s.square().sum(-1)


def figure1(run: Run) -> Exhibit:
    """Map the noise of the target around four sets of points at five times."""
    process, (axis, grid) = Toy(), _grid(SIDE)
    scores = [EmpiricalScore(toy(name), process, memory=MEMORY) for name in SETS]
    points = torch.stack([score.data[:] for score in scores])
    maps = []
    for score in scores:
        maps.append(torch.stack([_fraction(score, grid, t) for t in TIMES]))
        run.step(0.5 / len(SETS))
    fraction = torch.stack(maps)
    share = (fraction > 0.5).double().mean((2, 3))
    at_points, at_boundary, gaps = (torch.stack(v) for v in zip(*(_limits(s) for s in scores), strict=True))
    alpha, mean = _alpha(process, torch.tensor(TIMES, dtype=torch.float64)), share.mean(0)
    centre, pixel = alpha[0] * points[0], float(axis[1] - axis[0])
    beside = centre[:, None] + pixel * torch.tensor([[1, 0], [-1, 0], [0, 1], [0, -1]])
    found = {
        "sets": SETS,
        "t": TIMES,
        "x": axis,
        "y": axis,
        "fraction": fraction,
        "points": points,
        "alpha": alpha,
        "share_above_half": share,
        "small_t": SMALL,
        "noise_at_points": at_points,
        "noise_at_boundary": at_boundary,
    }
    spot, near = (float(_fraction(scores[0], x, TIMES[0]).mean()) for x in (centre, beside))
    widest = TIMES[int(mean.argmax())]
    page = Page(run, "figure1", found, mean=mean, widest=widest, spot=spot, beside=near, pixel=pixel, gaps=gaps)
    page.picture("figure1", lambda: plots.fraction_maps(SETS, TIMES, axis, axis, fraction, points, alpha))
    return page.exhibit(0.5)


def _grid(side: int) -> tuple[Tensor, Tensor]:
    """Return the axis ``(side,)`` of the map and its places ``(y, x, 2)``."""
    axis = torch.linspace(-LIMIT, LIMIT, side, dtype=torch.float64)
    return axis, torch.stack(torch.meshgrid(axis, axis, indexing="xy"), dim=-1)


def _fraction(score: EmpiricalScore, x: Tensor, t: float) -> Tensor:
    trace, square = noise_and_score(score, x, t)
    return trace / (trace + square)


def _alpha(process: Process, t: Tensor | float) -> Tensor:
    return process.alpha(torch.as_tensor(t, dtype=torch.float64))


def _limits(score: EmpiricalScore) -> tuple[Tensor, Tensor, Tensor]:
    """At the SMALL times: σ² tr C / d at each point, its maximum over midpoints, and the least distance in σ/α."""
    y = score.data[:]
    i, j = torch.triu_indices(len(y), len(y), 1)
    found = []
    for t in SMALL:
        alpha, unit = _alpha(score.process, t), t / score.data.d
        at, between = (unit * noise_and_score(score, alpha * x, t)[0] for x in (y, (y[i] + y[j]) / 2))
        found.append((at, between.max(), (y[i] - y[j]).norm(dim=-1).min() * alpha / t**0.5))
    at_points, at_boundary, gaps = (torch.stack(v) for v in zip(*found, strict=True))
    return at_points, at_boundary, gaps


@one_thread()
def paths2d(run: Run) -> Exhibit:
    """Draw paths of the PF-ODE and of the effective SDE over the map, and count where they end."""
    process = Toy(eps=1e-3)
    side, steps, shown, starts = (40, 30, 6, 40) if run.quick else (160, 300, 18, 1500)
    axis, grid = _grid(side)
    points, maps, flows, noisy, moved = [], [], [], [], []
    for name in SETS:
        score = EmpiricalScore(toy(name), process)
        points.append(score.data[:])
        maps.append(_fraction(score, grid, MAP_TIME))
        x_T = process.prior((starts, 2), dtype=torch.float64, generator=run.stream("paths2d/start"))
        flow = _path(sample.pf_ode(score, x_T, steps=steps, method="euler", save="path"))
        V = kernels.Naive(score, KAPPA)
        stream = run.stream(f"paths2d/{name}")
        other = _path(sample.effective_sde(V, x_T, steps=steps, save="path", generator=stream))
        ends = [torch.cdist(path[-1], points[-1]).argmin(1) for path in (flow, other)]
        moved.append(Estimate.of_share(int((ends[0] != ends[1]).sum()), starts))
        flows.append(flow[:, :shown])
        noisy.append(other[:, :shown])
        run.step(0.8 / len(SETS))
    found: dict[str, Any] = {
        "sets": SETS,
        "map_time": MAP_TIME,
        "kappa": KAPPA,
        "x": axis,
        "fraction": torch.stack(maps),
        "points": torch.stack(points),
        "times": process.times(steps, "log"),
        "flow": torch.stack(flows),
        "noisy": torch.stack(noisy),
        "ends_elsewhere": torch.stack([m.stack() for m in moved]),
    }
    page = Page(run, "paths2d", found, process=process, steps=steps, shown=shown, starts=starts)
    rows = {"PF-ODE": found["flow"], f"effective SDE, κ = {KAPPA:g}": found["noisy"]}
    alpha = float(_alpha(process, MAP_TIME))
    page.picture("paths2d", lambda: plots.path_maps(SETS, axis, found["fraction"], found["points"], alpha, rows))
    return page.exhibit(0.2)


def _path(found: object) -> Tensor:
    assert isinstance(found, sample.Solution)
    assert found.path is not None
    return found.path
