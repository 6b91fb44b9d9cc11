"""The pruned path against the dense one, in one run, as ratios, with the accuracy of both beside them.

``python -m benchmarks.pruning [--repeats 5] [--batch 64 256] [--sigma .05 …] [--clock wall|cpu]``. Queries of two
kinds, near a training point (with noise) and midway between two; ``score(x, t)`` needs the mean, and
``score.with_covariance(x, t)``, of which the trace is read, what also covariances need. The two paths take turns, and
the ratio is that of their medians. Where others use the machine, the processor's clock, with one thread, is the fairer.
The error is that of the worst query, |m - m_ref| / rms|y - ȳ|, against float64, of the dense path and of the pruned
one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import vkernel as vk
from benchmarks.common import images, reference
from vkernel.posterior.dense import Block

SIGMAS = (0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 3.0, 10.0)


def near(y: Tensor, count: int, sigma: float) -> Tensor:
    """Training points with noise."""
    g = torch.Generator().manual_seed(1)
    return y[torch.randint(0, len(y), (count,), generator=g)] + sigma * torch.randn(count, y.shape[1], generator=g)


def midway(y: Tensor, count: int, sigma: float) -> Tensor:
    """Places midway between two training points; the same at every noise level."""
    i, j = torch.randint(0, len(y), (2, count), generator=torch.Generator().manual_seed(2))
    return (y[i] + y[j]) / 2


def medians(runs: list[Callable[[], object]], repeats: int, clock: Callable[[], float]) -> list[float]:
    """Median seconds of each, by turns, after one turn to warm up."""
    times: list[list[float]] = [[] for _ in runs]
    for repeat in range(repeats + 1):
        for run, seconds in zip(runs, times, strict=True):
            start = clock()
            run()
            if repeat:
                seconds.append(clock() - start)
    return [statistics.median(seconds) for seconds in times]


def prepared(score: vk.EmpiricalScore) -> tuple[float, float]:
    """Prepare the bounds now; seconds for them, and for the noise levels up to which they are tried."""
    pruned = score.engine.pruned
    assert pruned is not None
    start = time.perf_counter()
    pruned.prepare()
    middle = time.perf_counter()
    pruned.reach = {covariance: pruned.measured_reach(covariance) for covariance in (False, True)}
    return middle - start, time.perf_counter() - middle


def traced(score: vk.EmpiricalScore, x: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """The score and the trace of its covariance."""
    s, covariance = score.with_covariance(x, t)
    return s, covariance.trace()


def compare(
    scores: list[vk.EmpiricalScore],
    y: Tensor,
    batch: int,
    sigmas: Sequence[float],
    repeats: int,
    clock: Callable[[], float],
) -> Any:
    """One table: both kinds of query, all noise levels; ``scores`` are the dense one and the pruned one."""
    pruned = scores[1]
    engine = pruned.engine
    assert engine.pruned is not None
    from rich.table import Table

    table = Table(title=f"{batch} queries, median of {repeats}", title_justify="left")
    for column in ("queries", "sigma", "call", "served", "dense", "pruned", "dense/pruned", "error", "error"):
        table.add_column(column, justify="right")
    for kind in (near, midway):
        for sigma in sigmas:
            x = kind(y, batch, sigma)
            truth = reference(y, x, sigma)
            errors = [
                float((score.posterior(x, sigma).mean.double() - truth).norm(dim=1).max() / score.data.spread)
                for score in scores
            ]
            for name, covariance in (("score", False), ("with_covariance", True)):
                typical = pruned.queries(x, torch.tensor(sigma))
                tried = sigma <= engine.pruned.reach[covariance]
                served = engine.pruned.candidates(Block(engine.points, typical, covariance))[2].sum() if tried else 0
                runs: list[Callable[[], object]] = [
                    lambda s=score, covariance=covariance, x=x, t=sigma: traced(s, x, t) if covariance else s(x, t)
                    for score in scores
                ]
                a, b = medians(runs, repeats, clock)
                row = [kind.__name__, f"{sigma:g}", name, f"{int(served)}", f"{1e3 * a:.0f} ms", f"{1e3 * b:.0f} ms"]
                table.add_row(*row, f"{a / b:.2f}", *(f"{e:.0e}" for e in errors))
    return table


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--sigma", type=float, nargs="+", default=SIGMAS)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    options = parser.parse_args()
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    name, y = images("fashion")
    dense, pruned = (vk.EmpiricalScore(vk.Empirical(y), vk.EDM(), method=method) for method in ("dense", "auto"))
    seconds = prepared(pruned)
    bounds = pruned.engine.pruned
    assert bounds is not None
    from rich.console import Console

    console = Console(width=120)
    console.print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}")
    console.print(f"{name}, {len(y):,} × {y.shape[1]:,}: prepared in {seconds[0]:.1f} s, tried in {seconds[1]:.1f} s,")
    console.print(f"after {bounds.price:.0f} dense queries at low noise; tried up to sigma = ", end="")
    console.print(f"{bounds.reach[False]:.2g} for means and {bounds.reach[True]:.2g} for covariances")
    for batch in options.batch:
        console.print(compare([dense, pruned], y, batch, options.sigma, options.repeats, clock))
    console.print(f"load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
