"""Examples of training loops, run as scripts in this process with a monitor that evaluates often, or with none."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import vkernel as vk
from vkernel.reports.monitor import Monitor, read

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TINY = ["--n", "64", "--width", "8", "--every", "5", "--budget", ".9"]


def often(*args: object, **options: object) -> Monitor:
    """Return a small monitor with a clock on which evaluations cost little: their steps depend on ``every`` alone."""
    small = {"images": 16, "samples": 8, "sampler_steps": 4, "progress": False, "budget": 0.9}
    monitor = Monitor(*args, **{**options, **small})
    monitor.budget.clock = iter(range(10**6)).__next__
    return monitor


class Nothing:
    """A monitor that does nothing."""

    def __init__(self, *_: object, log: str, **__: object) -> None:
        Path(log).mkdir(parents=True, exist_ok=True)

    def __call__(self, step: int, network: object, ema: object = None) -> None: ...

    def evaluate(self, step: int, network: object, ema: object = None) -> None: ...

    def close(self) -> None: ...


class Careless(Nothing):
    """A monitor that draws a random number, which changes the training."""

    def __call__(self, step: int, network: object, ema: object = None) -> None:
        torch.rand(())


def run_example(
    name: str, log: Path, *args: str, patch: pytest.MonkeyPatch, monitor: Callable[..., object] = often
) -> dict[str, object]:
    """Run an example in its tiny form; return its names."""
    with patch.context() as inside:
        inside.setattr(vk, "Monitor", monitor)
        inside.setattr(sys, "argv", [name, *TINY, "--log", str(log), *args])
        return runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def steps_of(log: Path) -> list[int]:
    """Return the steps of the evaluations in a log."""
    return [record.step for record in read(log).records]


def kinds_of(log: Path) -> list[str]:
    """Return the kinds of all lines of a log after its header."""
    lines = (log / "monitor.jsonl").read_text().splitlines()[1:]
    return [json.loads(line)["kind"] for line in lines]


def equal(a: nn.Module | dict[str, Tensor], b: nn.Module | dict[str, Tensor]) -> bool:
    """Whether all weights and buffers are equal, bit for bit."""
    one, two = (m.state_dict() if isinstance(m, nn.Module) else m for m in (a, b))
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


class Loss(nn.Module):
    """A network with batch normalisation and dropout, inside a model that returns a loss, as trainers want it."""

    def __init__(self, process: vk.Process) -> None:
        super().__init__()
        self.process = process
        self.net = Net()

    def forward(self, x0: Tensor) -> dict[str, Tensor]:
        t = self.process.eps + (self.process.T - self.process.eps) * torch.rand(len(x0))
        x = self.process.perturb(x0, t, generator=int(torch.randint(1 << 30, ())))
        return {"loss": (self.net(x, t) - x0).square().mean()}


class Net(nn.Module):
    """Predicts x0 from 8×8 images."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(65, width), nn.BatchNorm1d(width), nn.Dropout(0.1)
        self.last = nn.Linear(width, 64)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.first(torch.cat([x.flatten(1), t[:, None].to(x)], 1))
        return self.last(self.drop(nn.functional.silu(self.norm(h)))).reshape(x.shape)
