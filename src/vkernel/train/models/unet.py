"""U-Nets."""

from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vkernel.core.checks import check_whole, is_whole
from vkernel.core.errors import require
from vkernel.process import Process
from vkernel.train.models.base import PRECONDITIONED, Weight
from vkernel.train.models.network import Network, Shape
from vkernel.train.objectives import Times

GROUPS = 8  # of a group normalisation


@dataclass(eq=False)
class UNet(Network):
    """A U-Net of three levels of ``channels``, with ``blocks`` residual blocks a level, for H and W divisible by 4."""

    channels: tuple[int, int, int] = (32, 64, 64)
    blocks: int = 1
    _: KW_ONLY
    target: str = "edm"
    lr: float = 5e-4
    steps: int = 5000
    ema: float | None = 0.999
    time_features: int = 8
    spread: float = 0.5  # with sigma_data of "edm" that is EDM's scaling of the input
    chunk: int | None = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        good = isinstance(self.channels, tuple | list) and len(self.channels) == 3
        good = good and all(is_whole(c) and c >= GROUPS and c % GROUPS == 0 for c in self.channels)
        require(good, f"channels must be three multiples of {GROUPS}, one for each level; got {self.channels!r}.")
        a, b, c = self.channels
        self.channels, self.blocks = (a, b, c), check_whole(self.blocks, "blocks")

    def defaults(self, process: Process) -> tuple[Weight, Times]:
        return PRECONDITIONED

    def module(self, shape: Shape) -> nn.Module:
        good = len(shape) == 2 or (len(shape) == 3 and 1 <= shape[0] <= 4)
        require(good, f"A U-Net takes images, (H, W) or (1 to 4, H, W); an event of the data has shape {shape}.")
        good = all(side >= 4 and side % 4 == 0 for side in shape[-2:])
        require(good, f"A U-Net halves the image twice, so H and W must be divisible by 4; got {shape[-2:]}.")
        return _Levels(shape[0] if len(shape) == 3 else 1, self.channels, self.blocks, 1 + 2 * self.time_features)

    def largest(self, shape: Shape) -> int:
        return (self.channels[0] + self.channels[1]) * shape[-2] * shape[-1]

    def gain(self, name: str) -> float:
        return 0.0 if name.endswith("second.weight") or name == "last.weight" else 1.0


class _Levels(nn.Module):
    def __init__(self, colours: int, channels: tuple[int, int, int], blocks: int, time: int) -> None:
        super().__init__()
        a, b, c = channels
        width = 2 * b  # of the time embedding; time is the length of e
        self.time = nn.ModuleList([nn.Linear(time, width), nn.Linear(width, width)])
        self.first = nn.Conv2d(colours, a, 3, padding=1)
        self.down = nn.ModuleList([_Blocks(a, a, blocks, width), _Blocks(a, b, blocks, width)])
        self.halve = nn.ModuleList(nn.Conv2d(n, n, 3, stride=2, padding=1) for n in (a, b))
        self.bottom = _Blocks(b, c, blocks + 1, width)
        self.up = nn.ModuleList([_Blocks(c + b, b, blocks, width), _Blocks(b + a, a, blocks, width)])
        self.norm = nn.GroupNorm(GROUPS, a)
        self.last = nn.Conv2d(a, colours, 3, padding=1)

    def forward(self, z: Tensor, e: Tensor) -> Tensor:
        tau, kept = e, []
        for layer in self.time:
            tau = F.silu(layer(tau))
        h = self.first(z.reshape(len(z), -1, *z.shape[-2:]))
        for level, halve in zip(self.down, self.halve, strict=True):
            kept.append(level(h, tau))
            h = halve(kept[-1])
        h = self.bottom(h, tau)
        for level in self.up:
            h = level(torch.cat([F.interpolate(h, scale_factor=2.0, mode="nearest"), kept.pop()], 1), tau)
        return self.last(F.silu(self.norm(h))).reshape(z.shape)


class _Blocks(nn.ModuleList):
    """``count`` residual blocks in sequence, from ``i`` to ``o`` channels."""

    def __init__(self, i: int, o: int, count: int, width: int) -> None:
        super().__init__(_Block(i if k == 0 else o, o, width) for k in range(count))

    def forward(self, h: Tensor, tau: Tensor) -> Tensor:
        for block in self:
            h = block(h, tau)
        return h


class _Block(nn.Module):
    """The residual block of (6.7), from ``i`` to ``o`` channels, with a time embedding of ``width`` numbers."""

    def __init__(self, i: int, o: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(GROUPS, i), nn.GroupNorm(GROUPS, o)])
        self.first = nn.Conv2d(i, o, 3, padding=1)
        self.second = nn.Conv2d(o, o, 3, padding=1)
        self.embed = nn.Linear(width, o)
        self.skip = nn.Conv2d(i, o, 1) if i != o else nn.Identity()

    def forward(self, h: Tensor, tau: Tensor) -> Tensor:
        g = self.first(F.silu(self.norms[0](h))) + self.embed(tau)[..., None, None]
        return self.skip(h) + self.second(F.silu(self.norms[1](g)))
