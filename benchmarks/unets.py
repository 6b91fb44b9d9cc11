"""Members of a U-Net ensemble on a GPU, side by side from a CUDA graph, against the plain loop over them; as a ratio.

``python -m benchmarks.unets [--members 16] [--steps 40] [--repeats 3]``. Both sides train the same architecture
(491,169 parameters, 28×28) by Adam on the same batches; the plain loop is what anyone would write: a module,
``loss.backward()``, ``optimiser.step()``. Beside the times stands how far the two trainings are apart.
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


def setting(members: int) -> Training:
    """Two thousand random images, fresh draws."""
    g = torch.Generator().manual_seed(0)
    data = vk.Empirical(torch.rand(2000, 1, 28, 28, generator=g).mul(2).sub(1).cuda())
    return Training(data, vk.VP(), J1(), None)


def side_by_side(model: UNet, training: Training, members: int) -> dict[str, torch.Tensor]:
    return model.fit(training, range(members), lambda share: None)


def loop(model: UNet, training: Training, members: int) -> dict[str, torch.Tensor]:
    """Member after member, step after step."""
    found = []
    for m in range(members):
        net = model.module(training.data.shape).cuda()
        start = model.initial(training, [m])
        net.load_state_dict({name: p[0] for name, p in start.items()})
        optimiser = torch.optim.Adam(net.parameters(), lr=model.lr)
        for z, e, y, omega in model.minibatches(training, [m]):
            off = net(z[0], e[0]) - y[0]
            loss = (omega[0] * off.square().flatten(1).sum(1)).mean() / 2
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        found.append({name: p.detach() for name, p in net.named_parameters()})
    return {name: torch.stack([state[name] for state in found]) for name in found[0]}


def seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def measure(members: int, steps: int, repeats: int, bf16: bool) -> Row:
    """One row: the time of a step of all members, side by side and one by one."""
    training = setting(members)
    short, long = (UNet(steps=s, ema=None, bf16=bf16) for s in (steps, 3 * steps))
    loop(UNet(steps=3, ema=None), training, 1)
    gap = None
    if not bf16:
        a, b = side_by_side(short, training, 2), loop(short, training, 2)
        start = short.initial(training, [0, 1])
        moved = torch.cat([(b[n] - start[n]).flatten() for n in b]).norm()
        gap = float(torch.cat([(a[n] - b[n]).flatten() for n in b]).norm() / moved)
    # recording is paid once: the difference of two lengths is the price of steps
    best = min(
        seconds(lambda: side_by_side(long, training, members)) - seconds(lambda: side_by_side(short, training, members))
        for _ in range(repeats)
    ) / (2 * steps)
    plain = min(seconds(lambda: loop(short, training, members)) for _ in range(repeats)) / steps
    return {
        "members": members,
        "precision": "bfloat16 against float32" if bf16 else "float32",
        "side by side (ms)": 1e3 * best,
        "one by one (ms)": 1e3 * plain,
        "ratio": plain / best,
        "apart / distance trained": gap,
    }


def run(quick: bool = False, members: int = 16, steps: int = 40, repeats: int = 3) -> None:
    """Measure and record."""
    rows = []
    for bf16 in (False,) if quick else (False, True):
        rows.append(measure(members, 10 if quick else steps, 1 if quick else repeats, bf16))
        print(rows[-1], flush=True)
    record(
        "gpu",
        "unets",
        rows,
        title=f"{members} U-Nets of 491,169 parameters, 28 × 28, batch 64: a step of all members",
        note="One by one is a module, loss.backward() and optimiser.step(); the same batches on both sides. How far "
        "the two trainings are apart is relative to the distance between initial and trained parameters.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("members", 16), ("steps", 40), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    run(False, args.members, args.steps, args.repeats)


if __name__ == "__main__":
    main()
