"""Members of a U-Net ensemble on a GPU, side by side from a CUDA graph, against the plain loop over them; as a ratio.

``python -m benchmarks.unets [--members 16] [--steps 300] [--repeats 3]``. Both sides train the same architecture in the
same precision by Adam on the same batches; the plain loop is what anyone would write: a module, ``torch.autocast`` for
bfloat16, ``loss.backward()``, ``optimiser.step()``. Side by side the loss is compiled, which takes some 20 s once and
is not part of the price of a step, or not. Beside the times stands how far the trainings are apart.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

import vkernel as vk
from benchmarks.results import Row, record
from vkernel.train.models.unet import UNet
from vkernel.train.objectives import J1, Training

SIZES = {  # settings, the shape of an image, members (of --members)
    "491,169": ({}, (1, 28, 28), 1.0),
    "10,045,603": ({"channels": (96, 192, 256), "blocks": 2, "attention": (1, 2)}, (3, 32, 32), 0.25),
}


def setting(shape: tuple[int, ...]) -> Training:
    """Two thousand random images, fresh draws."""
    g = torch.Generator().manual_seed(0)
    data = vk.Empirical(torch.rand(2000, *shape, generator=g).mul(2).sub(1).cuda())
    return Training(data, vk.VP(), J1(), None)


class Stopwatch:
    """The time at which each share of a training is done; what precedes the steps, compiling and recording, is not part
    of their price, so that the first third of a training is left out."""

    def __init__(self) -> None:
        self.done, self.times = [0.0], [0.0]

    def __call__(self, share: float) -> None:
        torch.cuda.synchronize()
        self.done.append(self.done[-1] + share)
        self.times.append(time.perf_counter())

    def price(self, steps: int) -> float:
        """Return seconds for each of the ``steps`` of the training."""
        first = next(k for k, done in enumerate(self.done) if done >= self.done[-1] / 3)
        return (self.times[-1] - self.times[first]) / (steps * (1 - self.done[first] / self.done[-1]))


def side_by_side(
    model: UNet, training: Training, members: int, watch: Callable[[float], None] = lambda share: None
) -> dict[str, torch.Tensor]:
    return model.fit(training, range(members), watch)


def loop(
    model: UNet, training: Training, members: int, watch: Callable[[float], None] = lambda share: None
) -> dict[str, torch.Tensor]:
    """Member after member, step after step; launches run ahead of the GPU between two calls of ``watch``."""
    found, every = [], max(1, model.steps // 12)
    for m in range(members):
        net = model.module(training.data.shape).cuda()
        start = model.initial(training, [m])
        net.load_state_dict({name: p[0] for name, p in start.items()})
        optimiser = torch.optim.Adam(net.parameters(), lr=model.lr)
        for k, (z, e, y, omega) in enumerate(model.minibatches(training, [m]), 1):
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=model.bf16):
                out = net(z[0], e[0])
            loss = (omega[0] * (out.float() - y[0]).square().flatten(1).sum(1)).mean() / 2
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            if k % every == 0:
                watch(every / (members * model.steps))
        found.append({name: p.detach() for name, p in net.named_parameters()})
    return {name: torch.stack([state[name] for state in found]) for name in found[0]}


def seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def measure(size: str, members: int, steps: int, repeats: int, bf16: bool) -> Row:
    """One row: the time of a step of all members, side by side and one by one."""
    settings, shape, share = SIZES[size]
    training, members = setting(shape), max(1, round(members * share))

    def model(count: int, compile: bool) -> UNet:
        return UNet(steps=count, ema=None, bf16=bf16, compile=compile, **settings)

    def price(work: Callable[..., object], made: UNet, count: int) -> float:
        """Return seconds for a step of ``count`` members, the least of the repeats."""
        watches = [Stopwatch() for _ in range(repeats)]
        for watch in watches:
            work(made, training, count, watch)
        return min(watch.price(made.steps) for watch in watches)

    compiling = seconds(lambda: side_by_side(model(1, True), training, 1))
    prices = {compile: price(side_by_side, model(steps, compile), members) for compile in (True, False)}
    plain = price(loop, model(max(4, steps // 4), False), 1) * members
    start, known = model(1, False).initial(training, [0, 1]), loop(model(20, False), training, 2)
    a, b = (
        torch.cat([(s[n] - start[n]).flatten() for n in s]) for s in (side_by_side(model(20, True), training, 2), known)
    )
    return {
        "parameters": size,
        "members": members,
        "precision": "bfloat16" if bf16 else "float32",
        "side by side (ms)": 1e3 * prices[True],
        "not compiled (ms)": 1e3 * prices[False],
        "one by one (ms)": 1e3 * plain,
        "ratio": plain / prices[True],
        "compiling (s)": compiling,
        "apart / distance trained": float((a - b).norm() / b.norm()),
    }


def run(quick: bool = False, members: int = 16, steps: int = 300, repeats: int = 3) -> None:
    """Measure and record."""
    rows = []
    for size in list(SIZES)[: 1 if quick else None]:
        for bf16 in (True,) if quick else (False, True):
            rows.append(measure(size, members, 60 if quick else steps, 1 if quick else repeats, bf16))
            print(rows[-1], flush=True)
    record(
        "gpu",
        "unets",
        rows,
        title="U-Nets of 491,169 parameters for 28 × 28 and of 10,045,603 for 3 × 32 × 32: a step of all, batch 64",
        note="One by one is a module, loss.backward() and optimiser.step() in the same precision; the same batches on "
        "both sides. How far trainings of 20 steps are apart is relative to the distance between initial and trained "
        "parameters: Adam divides by the size of gradients, so that rounding shows where they are small.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("members", 16), ("steps", 300), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    run(False, args.members, args.steps, args.repeats)


if __name__ == "__main__":
    main()
