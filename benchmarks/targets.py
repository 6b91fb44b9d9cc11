"""A training step with the exact target against the same step with the usual one; as a ratio.

``python -m benchmarks.targets [--batch 128] [--steps 60] [--quick]``. A plain loop trains the U-Net of ``vk.models``:
draw images and times, add noise, ``torch.autocast`` in bfloat16, ``loss.backward()``, Adam. The target is the noise
that was added (J1), or that of ``vk.Targets``. Loops of all kinds run by turns on the same network; a step is timed
from its beginning to that of the next, by CUDA events on a GPU, and the first steps of a turn are not counted. With
``--quick`` sizes are small, also for a CPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import vkernel as vk
from benchmarks.common import images
from benchmarks.results import QUICK, Row, into, record

Target = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of x_t, t, index and the noise that was added
TURN, WARM = 12, 4  # steps of a turn, and how many of them are not counted


def kinds(data: vk.Empirical, process: vk.Process, quick: bool) -> dict[str, Target]:
    """The targets by name, the usual one first."""
    labels = torch.arange(data.n, device=data.device) % 10
    made = {"J0": vk.Targets(data, process)}
    if not quick:
        made["JK(8)"] = vk.Targets(data, process, vk.JK(8), generator=0)
        made["J0, flips"] = vk.Targets(data, process, flips=True)
        made["J0, 10 labels"] = vk.Targets(data, process, labels=labels)
    return {"J1": lambda x, t, index, noise: noise} | {
        name: lambda x, t, index, noise, own=own: own(x, t, index) for name, own in made.items()
    }


def loop(data: vk.Empirical, process: vk.Process, batch: int, model: vk.models.UNet) -> Callable[[Target], None]:
    """A function that takes one training step with a given target."""
    net, device = model.module(data.shape).to(data.device), data.device.type
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-4)
    (low, high), g = (torch.tensor(process.ratios).log().tolist()), torch.Generator(data.device).manual_seed(0)

    def step(target: Target) -> None:
        index = torch.randint(data.n, (batch,), generator=g, device=data.device)
        log_sigma = torch.randn(batch, generator=g, device=data.device).mul(1.2).sub(1.2).clamp(low, high)  # EDM's
        t, noise = process.time(log_sigma.exp()), torch.randn(batch, *data.shape, generator=g, device=data.device)
        alpha, sigma = (f(t).reshape(-1, *(1,) * len(data.shape)) for f in (process.alpha, process.sigma))
        x = alpha * data[index] + sigma * noise
        y, (z, e) = target(x, t, index, noise), model.inputs(x[None], t[None], process)
        with torch.autocast(device, torch.bfloat16):
            out = net(z[0], e[0])
        loss = (out.float() - y).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    return step


def milliseconds(steps: Iterator[None], cuda: bool) -> list[float]:
    """The times between the beginnings of steps, after those of the warm-up."""
    if not cuda:
        marks = [time.perf_counter() for _ in steps]
        return [1e3 * (b - a) for a, b in zip(marks[WARM:], marks[WARM + 1 :], strict=False)]
    events = []
    for _ in steps:
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(events[WARM:], events[WARM + 1 :], strict=False)]


def measure(data: vk.Empirical, batch: int, steps: int, model: vk.models.UNet, quick: bool) -> list[Row]:
    """One row for each kind of target: the median time of a step, and its ratio to that of J1."""
    process, cuda = vk.VP(), data.device.type == "cuda"
    step, targets = loop(data, process, batch, model), kinds(data, process, quick)
    taken: dict[str, list[float]] = {name: [] for name in targets}

    def turn(target: Target) -> Iterator[None]:
        for _ in range(TURN):
            yield
            step(target)
        yield

    for target in targets.values():  # prepare the engine, compile kernels, check the first batches
        for _ in turn(target):
            pass
    while min(map(len, taken.values())) < steps:
        for name, target in targets.items():
            taken[name] += milliseconds(turn(target), cuda)
    usual = statistics.median(taken["J1"])
    return [
        {
            "target": name,
            "batch": batch,
            "steps": len(times),
            "step (ms)": statistics.median(times),
            "ratio": statistics.median(times) / usual,
        }
        for name, times in taken.items()
    ]


def run(quick: bool = False, batch: int = 128, steps: int = 60) -> list[Row]:
    """Measure and record, on a GPU where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name, flat = images("fashion", 500 if quick else 60_000)
    data = vk.Empirical(flat.reshape(-1, 1, 28, 28)).to(device)
    model = vk.models.UNet((8, 16)) if quick else vk.models.UNet()
    rows = measure(data, 16 if quick else batch, 10 if quick else steps, model, quick)
    return record(
        "gpu" if device == "cuda" else "cpu",
        "targets",
        rows,
        title=f"A training step with exact targets: {name}, {data.n:,} × {data.d}, a U-Net in bfloat16",
        note="Medians over steps of loops that run by turns on one network. J1 is the noise that was added.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("batch", 128), ("steps", 60)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--quick", action="store_true", help="small sizes; does not replace a full run")
    args = parser.parse_args()
    if args.quick:
        with into(QUICK):
            rows = run(True)
    else:
        rows = run(False, args.batch, args.steps)
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
