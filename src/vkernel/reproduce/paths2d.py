r"""Paths of the PF-ODE and of the effective SDE over the map of Figure 1 (docs/theory.md, §4.4).

Both start from the same places. The deterministic path is that of the exact score; the other adds, at every step,
Gaussian noise with the covariance of the naive kernel, so that it trembles where :math:`C` is large and nowhere else.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from vkernel import plots
from vkernel.core import rng
from vkernel.data import toy
from vkernel.kernels import Naive
from vkernel.process import Toy
from vkernel.reproduce.figure1 import SETS, noise_and_score
from vkernel.reproduce.memorise import one_thread, wilson
from vkernel.reproduce.page import Exhibit, Run, Table, number, percent
from vkernel.score.empirical import EmpiricalScore

__all__ = ["chain", "make"]

ORDER, TITLE, SECONDS = 50, "Trajectories over the C map", 9.0
MAP_TIME, KAPPA, LIMIT = 0.2, 0.1, 2.0


def chain(kernel: Naive, x_T: Tensor, steps: int, generator: torch.Generator) -> Tensor:
    """The path of ``sample.effective_sde`` with a naive kernel and log spacing: ``(steps + 1, *x_T.shape)``."""
    process, path = kernel.process, [x_T]
    for here, there in pairwise(process.times(steps, "log")):
        x, dt = path[-1], float(here - there)
        s, noise = kernel.score_and_draw(x, float(here), generator)
        beta, d = float(process.beta(here)), float(process.D(here))
        path.append(x + dt * (beta * x + d * s) + math.sqrt(dt) * d * noise)
    return torch.stack(path)


@one_thread
def make(run: Run) -> Exhibit:
    process = Toy(eps=1e-3)
    side, steps, shown, many = (40, 30, 6, 40) if run.quick else (160, 300, 18, 1500)
    axis = torch.linspace(-LIMIT, LIMIT, side, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), dim=-1)
    points, maps, flows, noisy, moved = [], [], [], [], []
    for name in SETS:
        score = EmpiricalScore(toy(name), process)
        y = score.data.rows(0, score.data.n)
        trace, square = noise_and_score(score, grid, MAP_TIME)
        start = process.prior((many, 2), dtype=torch.float64, generator=_stream(run, "start"))
        flow = chain(Naive(score, 0.0), start, steps, _stream(run, "none"))
        other = chain(Naive(score, KAPPA), start, steps, _stream(run, name))
        ends = [torch.cdist(p[-1], y).argmin(1) for p in (flow, other)]
        moved.append(wilson(int((ends[0] != ends[1]).sum()), many))
        points.append(y)
        maps.append(trace / (trace + square))
        flows.append(flow[:, :shown])
        noisy.append(other[:, :shown])
        run.step(0.8 / len(SETS))
    rows = {"PF-ODE": torch.stack(flows), f"effective SDE, κ = {KAPPA:g}": torch.stack(noisy)}
    alpha = float(process.alpha(torch.tensor(MAP_TIME, dtype=torch.float64)))
    saved = run.arrays(
        "paths2d",
        sets=list(SETS),
        map_time=MAP_TIME,
        kappa=KAPPA,
        x=axis,
        fraction=torch.stack(maps),
        points=torch.stack(points),
        times=process.times(steps, "log"),
        flow=rows["PF-ODE"],
        noisy=torch.stack(noisy),
        ends_elsewhere=moved,
    )
    shares = ", ".join(f"{percent(m[0])} ({name})" for name, m in zip(SETS, moved, strict=True))
    picture = run.picture(
        "paths2d",
        lambda: plots.path_maps(SETS, axis, torch.stack(maps), torch.stack(points), alpha, rows),
        alt="Eight maps of the plane, four training sets as columns. Above, smooth paths of the PF-ODE run from noise "
        "to the training points; below, paths of the effective SDE from the same starts tremble where the map is "
        f"bright. Shares of paths that end at another point: {shares}.",
        caption=(
            f"The map is tr C / (tr C + |s|²) at t = {MAP_TIME:g} (process Toy, α = √(1-t)); paths run from "
            f"T = {process.T:g} down to eps = {process.eps:g}, thin at first, to the rings. Above, the exact score "
            f"alone: every path ends at a training point. Below, the same starts with the naive kernel, κ = {KAPPA:g}: "
            "noise acts only where the target is noisy, that is while a path has not yet chosen, and it points along "
            "the differences between the points that compete.",
            f"Both rows end at training points. What noise changes is which: of {many:,} starts, another training "
            f"point than the PF-ODE's was reached by {shares}.",
        ),
    )
    run.step(0.2)
    return Exhibit(
        name="paths2d",
        title=TITLE,
        pictures=(picture,),
        data=saved,
        sizes=f"{steps} steps spaced evenly in log(σ/α); {shown} paths drawn, {many:,} counted for each set.",
        tables=(
            Table(
                caption=f"Paths of the effective SDE, κ = {KAPPA:g}, that end at another training point than the "
                "PF-ODE from the same start.",
                head=("training set", "share", "95 % interval"),
                rows=tuple(
                    (name, number(m[0]), f"{number(m[1])} to {number(m[2])}")
                    for name, m in zip(SETS, moved, strict=True)
                ),
            ),
        ),
    )


def _stream(run: Run, purpose: str) -> torch.Generator:
    return rng.stream(run.seed, f"reproduce/paths2d/{purpose}")
