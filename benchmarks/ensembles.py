"""An ensemble of small networks trained at once against the same networks trained one by one, in one run, as a ratio.

``python -m benchmarks.ensembles [--device cpu|cuda] [--members 100] [--steps 50] [--repeats 3] [--threads 2]``. One by
one is what anyone would write: ``nn.Sequential``, ``loss.backward()``, ``torch.optim.Adam`` as it comes, fresh draws of
the same law from torch's own generator. Both sides make every draw they use. The fastest of the repeats counts, and the
two sides take turns.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

import vkernel as vk
from vkernel.models.mlp import MLP
from vkernel.objective import J1, Training

WIDTH, DEPTH, BATCH, FEATURES, LR = 64, 3, 64, 4, 1e-3
PROCESS = vk.VP()


def points(device: str) -> Tensor:
    """Thirty-two training points in the plane."""
    return torch.randn(32, 2, generator=torch.Generator().manual_seed(0)).to(device)


def at_once(members: int, steps: int, device: str, draws: int | None = None) -> None:
    """The library's way: all members by vmap."""
    training = Training(vk.Empirical(points(device)), PROCESS, J1(), draws)
    MLP(WIDTH, DEPTH, lr=LR, batch=BATCH, steps=steps).fit(training, range(members), lambda share: None)


def one_by_one(members: int, steps: int, device: str) -> None:
    """The plain way: a loop over members, and a loop over steps in it."""
    y, low, high = points(device), PROCESS.eps, PROCESS.T
    ends = [float((PROCESS.sigma(t) / PROCESS.alpha(t)).log()) for t in (low, high)]
    k = math.pi * torch.arange(1, FEATURES + 1, device=device)
    for _ in range(members):
        sizes = [2 + 1 + 2 * FEATURES, *[WIDTH] * DEPTH, 2]
        layers = [nn.Sequential(nn.Linear(a, b), nn.SiLU()) for a, b in pairwise(sizes[:-1])]
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


def seconds(work: Callable[[], None], device: str) -> float:
    """How long ``work`` takes, the device's queue included."""
    started = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    for name, value in (("members", 100), ("steps", 50), ("repeats", 3), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ways: dict[str, Callable[[], None]] = {
        "one by one, fresh draws": lambda: one_by_one(args.members, args.steps, args.device),
        "at once, fresh draws": lambda: at_once(args.members, args.steps, args.device),
        "at once, 1024 draws": lambda: at_once(args.members, args.steps, args.device, 1024),
    }
    at_once(2, 5, args.device)  # what is only slow the first time
    one_by_one(2, 5, args.device)
    best = dict.fromkeys(ways, math.inf)
    for _ in range(args.repeats):
        for name, work in ways.items():
            best[name] = min(best[name], seconds(work, args.device))
    plain = best["one by one, fresh draws"]
    print(f"{args.members} MLPs in the plane, width {WIDTH}, depth {DEPTH}, batch {BATCH}, float32, on {args.device}")
    for name, taken in best.items():
        print(f"{name:<24} {1e3 * taken / args.steps:8.2f} ms a step of all   {plain / taken:6.1f} ×")


if __name__ == "__main__":
    main()
