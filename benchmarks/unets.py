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
from vkernel.models.unet import UNet
from vkernel.objective import J1, Training


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
        for z, e, y, omega in model._minibatches(training, [m]):
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("members", 16), ("steps", 40), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    training = setting(args.members)
    for precision in (False, True):
        short, long = (UNet(steps=s, ema=None, bf16=precision) for s in (args.steps, 3 * args.steps))
        loop(UNet(steps=3, ema=None), training, 1)
        gap = 0.0
        if not precision:
            a, b = side_by_side(short, training, 2), loop(short, training, 2)
            start = short.initial(training, [0, 1])
            moved = torch.cat([(b[n] - start[n]).flatten() for n in b]).norm()
            gap = float(torch.cat([(a[n] - b[n]).flatten() for n in b]).norm() / moved)
        # recording is paid once: the difference of two lengths is the price of steps
        best = min(
            seconds(lambda long=long: side_by_side(long, training, args.members))
            - seconds(lambda short=short: side_by_side(short, training, args.members))
            for _ in range(args.repeats)
        ) / (2 * args.steps)
        plain = min(seconds(lambda short=short: loop(short, training, args.members)) for _ in range(args.repeats))
        plain /= args.steps
        kind = "bfloat16 against float32" if precision else "float32"
        print(
            f"{args.members} U-Nets, batch 64, {kind}: side by side {1e3 * best:.1f} ms a step of all, one by one "
            f"{1e3 * plain:.1f} ms: {plain / best:.1f} ×" + ("" if precision else f"; apart by {gap:.1e} of the way")
        )


if __name__ == "__main__":
    main()
