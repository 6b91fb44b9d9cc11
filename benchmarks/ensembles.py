"""Members fitted at once against the same members one by one, in one run, as ratios; and the cost of many members.

``python -m benchmarks.ensembles [--device cpu|cuda] [--quick]``.

*Linear models*: the plain loop makes for each member the same draws, the same features and the normal equations, and
solves them by ``torch.linalg.solve``; the results are the same but for rounding, and how far they are apart is said.

*MLPs*: one by one is what anyone would write: ``nn.Sequential``, ``loss.backward()``, ``torch.optim.Adam`` as it comes,
fresh draws of the same law from torch's own generator. Both sides make every draw they use.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import vkernel as vk
from benchmarks.common import medians
from benchmarks.limits import limits
from benchmarks.report import table
from benchmarks.results import HERE, QUICK, into, record
from vkernel.train.models.linear import Linear
from vkernel.train.models.mlp import MLP
from vkernel.train.objectives import J1, Training

__all__ = ["linear", "members", "mlps"]

Report = Callable[[str], None]
WIDTH, DEPTH, BATCH, FEATURES, LR = 64, 3, 64, 4, 1e-3
PROCESS = vk.VP()
SHARED = {"everything varies": ("inputs", "targets"), "targets alone vary": ("targets",)}


def quiet(what: object) -> None:
    """Report nothing."""


def points(device: str) -> Tensor:
    """Thirty-two training points in the plane."""
    return torch.randn(32, 2, generator=torch.Generator().manual_seed(0)).to(device)


# Linear models


def model(per_axis: int) -> Linear:
    """Ridge regression on ``per_axis``² products of Gaussians, of a point on the line and of t."""
    return Linear(vk.features.grid("gaussian", per_axis, 1, -1.5, 1.5, PROCESS))


def line(draws: int, vary: tuple[str, ...], device: str) -> Training:
    """Three training points on the line."""
    y = torch.tensor([[-1.0], [0.1], [1.0]], dtype=torch.float64, device=device)
    return Training(vk.Empirical(y), PROCESS, J1(), draws, vary)


def fitted(model: Linear, training: Training, members: int) -> Tensor:
    """Fit all members at once with the library."""
    return model.fit(training, range(members), quiet)["weights"]


def solved(model: Linear, training: Training, members: int) -> Tensor:
    """The plain loop over members."""
    found = []
    for m in range(members):
        assert training.draws is not None
        batch = training.batch([m], training.draws)
        A, Y = (a[0] for a in model.system(batch, training.process))
        gram = A.mT @ A + model.ridge * torch.eye(A.shape[1], dtype=A.dtype, device=A.device)
        found.append(torch.linalg.solve(gram, A.mT @ Y))
    return torch.stack(found)


def linear(device: str = "cpu", quick: bool = False, report: Report = print) -> list[dict[str, Any]]:
    """Linear models of several sizes, with and without shared inputs."""
    rows = []
    for per_axis, draws, count in ((4, 64, 256), (8, 256, 256), (16, 256, 64), (16, 1024, 32)):
        m = model(per_axis)
        for what, vary in SHARED.items():
            report(f"linear, {m.features.count} features")
            training = line(draws, vary, device)
            runs = [lambda m=m, t=training, c=count, method=method: method(m, t, c) for method in (solved, fitted)]
            loop, once = medians(runs, 1 if quick else 3, device)
            a, b = (run() for run in runs)
            rows.append(
                {
                    "features": m.features.count,
                    "draws": draws,
                    "members": count,
                    "": what,
                    "one by one (ms)": 1e3 * loop,
                    "at once (ms)": 1e3 * once,
                    "ratio": loop / once,
                    "error": float((a - b).abs().max() / a.abs().max()),
                }
            )
    title = "Linear ensembles at once against a plain loop"
    note = (
        "Weighted ridge regression in float64 on the same draws, the making of the draws included. Where everything "
        "varies, Cholesky's factorisations are made in batches; where inputs are shared, there is one. With 256 "
        "features a single system fills a CPU by itself: batches then gain nothing, sharing still does. The error is "
        "the largest difference of the two, relative to the largest weight."
    )
    record("gpu" if device == "cuda" else "cpu", "linear", rows, title=title, note=note)
    return rows


# Multilayer perceptrons


def at_once(members: int, steps: int, device: str, draws: int | None = None) -> None:
    """Train all members at once by vmap, with the library."""
    training = Training(vk.Empirical(points(device)), PROCESS, J1(), draws)
    MLP(WIDTH, DEPTH, lr=LR, batch=BATCH, steps=steps).fit(training, range(members), quiet)


def one_by_one(members: int, steps: int, device: str) -> None:
    """Train with plain code: a loop over members, and a loop over steps in it."""
    y, low, high = points(device), PROCESS.eps, PROCESS.T
    ends = [float((PROCESS.sigma(t) / PROCESS.alpha(t)).log()) for t in (low, high)]
    k = math.pi * torch.arange(1, FEATURES + 1, device=device)
    for _ in range(members):
        layers = [nn.Sequential(nn.Linear(a, b), nn.SiLU()) for a, b in pairwise(sizes()[:-1])]
        net = nn.Sequential(*layers, nn.Linear(WIDTH, 2)).to(device)
        optimiser = torch.optim.Adam(net.parameters(), lr=LR)
        for _ in range(steps):
            x0 = y[torch.randint(len(y), (BATCH,), device=device)]
            t = low + (high - low) * torch.rand(BATCH, 1, device=device)
            noise = torch.randn(BATCH, 2, device=device)
            alpha, sigma = PROCESS.alpha(t), PROCESS.sigma(t)
            z = (alpha * x0 + sigma * noise) / (alpha.square() + sigma.square()).sqrt()
            u = ((sigma / alpha).log() - sum(ends) / 2) * 2 / (ends[1] - ends[0])
            loss = (net(torch.cat([z, u, (k * u).sin(), (k * u).cos()], 1)) - noise).square().sum(1).mean() / 2
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()


def sizes() -> list[int]:
    """The widths of the layers: point and time in, hidden ones, a noise out."""
    return [2 + 1 + 2 * FEATURES, *[WIDTH] * DEPTH, 2]


def mlps(
    device: str = "cpu", quick: bool = False, report: Report = print, members: int = 64, steps: int = 50
) -> list[dict[str, Any]]:
    """MLPs in the plane by vmap, with fresh draws and with a finite number of them, against the plain loop."""
    steps = 10 if quick else steps
    methods: dict[str, Callable[[], None]] = {
        "one by one, fresh draws": lambda: one_by_one(members, steps, device),
        "at once, fresh draws": lambda: at_once(members, steps, device),
        "at once, 1024 draws": lambda: at_once(members, steps, device, 1024),
    }
    report("MLPs")
    times = medians(list(methods.values()), 1 if quick else 3, device)
    rows = [
        {"method": method, "a step of all (ms)": 1e3 * taken / steps, "ratio": times[0] / taken}
        for method, taken in zip(methods, times, strict=True)
    ]
    title = f"{members} MLPs in the plane at once against a plain loop"
    note = f"Width {WIDTH}, {DEPTH} hidden layers, batches of {BATCH}, Adam, float32, {steps} steps."
    record("gpu" if device == "cuda" else "cpu", "mlps", rows, title=title, note=note)
    return rows


# The cost of many members


def members(device: str = "cpu", quick: bool = False, report: Report = print) -> list[dict[str, Any]]:
    """Time against the number of members: linear models with and without shared inputs, and MLPs a step."""
    known, rows = limits(device, quick), []
    m, draws, steps = model(8), 256, 10
    F, hidden = m.features.count, sum(a * b for a, b in pairwise(sizes()))
    for what, vary in SHARED.items():
        training = line(draws, vary, device)
        for count in (1, 8, 64) if quick else (1, 4, 16, 64, 256, 1000):
            report(f"{count} linear members")
            (taken,) = medians([lambda t=training, c=count: fitted(m, t, c)], 1 if quick else 3, device)
            systems = count if "inputs" in vary else 1
            # a Gram matrix, by symmetry half a product, its factor, and the right-hand sides
            work = systems * (draws * F**2 + F**3 / 3) + count * (2 * draws * F + 2 * F**2)
            rows.append(
                {"members": count, "kind": f"linear, {what}", "time (s)": taken, "limit (s)": work / known.wide}
            )
    for count in (1, 4, 16) if quick else (1, 2, 4, 8, 16, 32, 64):
        report(f"{count} MLPs")
        (taken,) = medians([lambda c=count: at_once(c, steps, device)], 1 if quick else 3, device)
        least = 6 * hidden * BATCH * count * steps / known.operations  # forward once, backward twice
        rows.append({"members": count, "kind": f"MLP by vmap, {steps} steps", "time (s)": taken, "limit (s)": least})
    title = f"Time against members: linear models ({F} features, {draws} draws), MLPs (width {WIDTH}, batch {BATCH})"
    note = (
        f"The limit: the operations of the systems at {known.wide / 1e9:,.0f} GFLOP/s in float64, and of the networks' "
        f"products at {known.operations / 1e9:,.0f} GFLOP/s. Draws, features and what a call costs are not in it."
    )
    plot = {
        "x": "members",
        "y": "time (s)",
        "limit": "limit (s)",
        "by": "kind",
        "fit": True,
        "above": 1 if quick else 16,
    }
    record("gpu" if device == "cuda" else "cpu", "curve-members", rows, title=title, note=note, plot=plot)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    with into(QUICK if args.quick else HERE):
        for work in (linear, mlps, members):
            print(table(work(args.device, args.quick, quiet)))


if __name__ == "__main__":
    main()
