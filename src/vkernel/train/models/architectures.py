r"""The two architectures of networks: a multilayer perceptron and a small U-Net.

Both are functions of the scaled point z and the time embedding e of :mod:`vkernel.train.models.network`, whose
arguments they take too.

**MLP**, for events of any shape, flattened:

.. math:: h_1 = \varphi(W_1 (z, e) + b_1), \qquad h_{l+1} = \varphi(W_{l+1} h_l + b_{l+1}), \qquad
          f = W_{L+1} h_L + b_{L+1},

with L = ``depth`` hidden layers of ``width`` units. Initially the entries of the hidden W are
:math:`N(0, 2/\text{fan-in})`, those of the last one :math:`N(0, 1/\text{fan-in})`, and biases are 0.

**UNet**, for images ``(H, W)`` or ``(1…4, H, W)`` with H and W divisible by 4. With
:math:`\tau = \varphi(A_2\, \varphi(A_1 e))`, φ = SiLU, it is made of residual blocks

.. math:: R(h) = \mathrm{skip}(h) + C_2\, \varphi\, G_2\, \big(C_1\, \varphi\, G_1\, h + A \tau\big),

C a 3×3 convolution, G a group normalisation (8 groups), skip the identity or a 1×1 convolution. Three levels have
``channels`` and sides H, H/2, H/4: two downsampling levels of ``blocks`` blocks and a convolution of stride 2, a bottom
of ``blocks`` + 1 blocks, and two upsampling levels that double the pixels, concatenate the output of the downsampling
level, and apply ``blocks`` blocks. There is no attention. Initially every :math:`C_2` and the last convolution are 0,
so that f = 0. By default there are 491 169 parameters for one channel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vkernel.core.checks import check_choice, check_whole, is_whole
from vkernel.core.errors import require
from vkernel.train.models.network import Network, Shape

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": torch.relu,
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "erf": torch.erf,
}
GROUPS = 8


@dataclass(eq=False)
class MLP(Network):
    """A multilayer perceptron with ``depth`` hidden layers of ``width`` units."""

    width: int = 64
    depth: int = 3
    _: KW_ONLY
    activation: str = "silu"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self.width, "width")
        check_whole(self.depth, "depth")
        check_choice(self.activation, "activation", ACTIVATIONS)

    def module(self, shape: Shape) -> nn.Module:
        d, hidden = math.prod(shape), [self.width] * self.depth
        return _Perceptron([d + 1 + 2 * self.time_features, *hidden, d], ACTIVATIONS[self.activation])

    def largest(self, shape: Shape) -> int:
        return max(self.width, math.prod(shape) + 1 + 2 * self.time_features)

    def fill(self, name: str, p: Tensor, generator: torch.Generator) -> None:
        super().fill(name, p, generator)
        if name == f"layers.{self.depth}.weight":
            p.mul_(0.5**0.5)


class _Perceptron(nn.Module):
    """Linear layers of the given sizes with an activation between any two."""

    def __init__(self, sizes: list[int], activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.activation = activation

    def forward(self, z: Tensor, e: Tensor) -> Tensor:
        h = torch.cat([z.flatten(1), e], 1)
        for layer in self.layers[:-1]:
            h = self.activation(layer(h))
        return self.layers[-1](h).reshape(z.shape)


@dataclass(eq=False)
class UNet(Network):
    """A U-Net of three levels of ``channels``, with ``blocks`` residual blocks a level."""

    channels: tuple[int, int, int] = (32, 64, 64)
    blocks: int = 1
    _: KW_ONLY
    lr: float = 5e-4
    steps: int = 5000
    ema: float | None = 0.999
    time_features: int = 8
    chunk: int | None = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        good = isinstance(self.channels, tuple | list) and len(self.channels) == 3
        good = good and all(is_whole(c) and c >= GROUPS and c % GROUPS == 0 for c in self.channels)
        require(good, f"channels must be three multiples of {GROUPS}, one for each level; got {self.channels!r}.")
        a, b, c = self.channels
        self.channels, self.blocks = (a, b, c), check_whole(self.blocks, "blocks")

    def module(self, shape: Shape) -> nn.Module:
        good = len(shape) == 2 or (len(shape) == 3 and 1 <= shape[0] <= 4)
        require(good, f"A U-Net takes images, (H, W) or (1 to 4, H, W); an event of the data has shape {shape}.")
        good = all(side >= 4 and side % 4 == 0 for side in shape[-2:])
        require(good, f"A U-Net halves the image twice, so H and W must be divisible by 4; got {shape[-2:]}.")
        colours = shape[0] if len(shape) == 3 else 1
        return _Levels(colours, self.channels, self.blocks, 1 + 2 * self.time_features)

    def largest(self, shape: Shape) -> int:
        return (self.channels[0] + self.channels[1]) * shape[-2] * shape[-1]

    def fill(self, name: str, p: Tensor, generator: torch.Generator) -> None:
        super().fill(name, p, generator)
        if name.endswith("second.weight") or name == "last.weight":
            nn.init.zeros_(p)


class _Levels(nn.Module):
    """The layers of a U-Net; ``time`` is the length of e."""

    def __init__(self, colours: int, channels: tuple[int, int, int], blocks: int, time: int) -> None:
        super().__init__()
        a, b, c = channels
        width = 2 * b  # of the time embedding τ
        self.time = nn.ModuleList([nn.Linear(time, width), nn.Linear(width, width)])
        self.first = nn.Conv2d(colours, a, 3, padding=1)
        self.down = nn.ModuleList([_blocks(a, a, blocks, width), _blocks(a, b, blocks, width)])
        self.halve = nn.ModuleList(nn.Conv2d(n, n, 3, stride=2, padding=1) for n in (a, b))
        self.bottom = _blocks(b, c, blocks + 1, width)
        self.up = nn.ModuleList([_blocks(c + b, b, blocks, width), _blocks(b + a, a, blocks, width)])
        self.norm = nn.GroupNorm(GROUPS, a)
        self.last = nn.Conv2d(a, colours, 3, padding=1)

    def forward(self, z: Tensor, e: Tensor) -> Tensor:
        tau = e
        for layer in self.time:
            tau = F.silu(layer(tau))
        h = self.first(z.reshape(len(z), -1, *z.shape[-2:]))
        kept = []
        for level, halve in zip(self.down, self.halve, strict=True):
            h = _apply(level, h, tau)
            kept.append(h)
            h = halve(h)
        h = _apply(self.bottom, h, tau)
        for level in self.up:
            doubled = F.interpolate(h, scale_factor=2.0, mode="nearest")
            h = _apply(level, torch.cat([doubled, kept.pop()], 1), tau)
        return self.last(F.silu(self.norm(h))).reshape(z.shape)


class _Block(nn.Module):
    """The residual block R, from ``i`` to ``o`` channels, with a time embedding of ``width`` numbers."""

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


def _blocks(i: int, o: int, count: int, width: int) -> nn.ModuleList:
    return nn.ModuleList(_Block(i if k == 0 else o, o, width) for k in range(count))


def _apply(blocks: nn.Module, h: Tensor, tau: Tensor) -> Tensor:
    for block in blocks.children():
        h = block(h, tau)
    return h
