r"""A small U-Net for images of 28×28 and 32×32, or any ``(H, W)`` or ``(1…4, H, W)`` with H and W divisible by 4.

The image is z, the time is e (both of :mod:`vkernel.train.models.network`). With the time's embedding
:math:`\tau = \varphi(A_2\, \varphi(A_1 e))`, φ = SiLU, everything is made of residual blocks

.. math:: R(h) = \mathrm{skip}(h) + C_2\, \varphi\, G_2\, \big(C_1\, \varphi\, G_1\, h + A \tau\big),

C a 3×3 convolution, G a group normalisation (8 groups), skip the identity or a 1×1 convolution. Three levels have
``channels`` and sides H, H/2, H/4; the way down is ``blocks`` blocks and a convolution of stride 2 at each of the first
two, the bottom is ``blocks`` + 1 blocks, and the way up doubles the pixels, joins what the way down had there, and
takes ``blocks`` blocks again. There is no attention. Initially every :math:`C_2` and the last convolution are 0, so
that f = 0. By default there are 491 169 parameters for one channel.

``bf16=True`` runs convolutions and products in bfloat16 (``torch.autocast``); parameters, gradients, the optimiser and
the loss stay in ``dtype``. ``chunk=1`` trains one member after another, ``chunk=k`` k at a time as grouped
convolutions, ``chunk=None`` all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vkernel.core.errors import require
from vkernel.train.models.network import Network, Shape, whole
from vkernel.train.models.parametrisation import Weight

__all__ = ["UNet"]

GROUPS = 8


class UNet(Network):
    """Three levels of ``channels``, ``blocks`` blocks a level; other arguments: :mod:`vkernel.train.models.network`."""

    def __init__(
        self,
        channels: tuple[int, int, int] = (32, 64, 64),
        blocks: int = 1,
        target: str = "noise",
        lr: float = 5e-4,
        batch: int | None = 64,
        steps: int = 5000,
        ema: float | None = 0.999,
        bf16: bool = False,
        time_features: int = 8,
        weight: str | Weight | None = None,
        optimiser: str = "adam",
        decay: str | None = None,
        spread: float = 1.0,
        dtype: str | torch.dtype = "float32",
        chunk: int | None = 1,
    ) -> None:
        super().__init__(
            target,
            weight,
            lr=lr,
            batch=batch,
            steps=steps,
            ema=ema,
            optimiser=optimiser,
            decay=decay,
            time_features=time_features,
            spread=spread,
            dtype=dtype,
            chunk=chunk,
            bf16=bf16,
        )
        good = isinstance(channels, tuple | list) and len(channels) == 3
        good = good and all(whole(c, GROUPS) and c % GROUPS == 0 for c in channels)
        require(good, f"channels must be three multiples of {GROUPS}, one for each level; got {channels!r}.")
        require(whole(blocks, 1), f"blocks must be a whole number ≥ 1; got {blocks!r}.")
        self.channels, self.blocks = tuple(channels), blocks

    def module(self, shape: Shape) -> nn.Module:
        good = len(shape) == 2 or (len(shape) == 3 and 1 <= shape[0] <= 4)
        require(good, f"A U-Net takes images, (H, W) or (1 to 4, H, W); an event of the data has shape {shape}.")
        good = all(side >= 4 and side % 4 == 0 for side in shape[-2:])
        require(good, f"A U-Net halves the image twice, so H and W must be divisible by 4; got {shape[-2:]}.")
        colours = shape[0] if len(shape) == 3 else 1
        return Levels(colours, self.channels, self.blocks, 1 + 2 * self.time_features)

    def held(self, shape: Shape) -> int:
        return (self.channels[0] + self.channels[1]) * shape[-2] * shape[-1]

    def fill(self, name: str, p: Tensor, generator: torch.Generator) -> None:
        super().fill(name, p, generator)
        if name.endswith("second.weight") or name == "last.weight":
            nn.init.zeros_(p)

    @property
    def spec(self) -> dict[str, Any]:
        own = {"channels": list(self.channels), "blocks": self.blocks, "bf16": self.bf16}
        return {"kind": "unet", **own, **self._common()}


class Levels(nn.Module):
    """The whole network: down, bottom, up."""

    def __init__(self, colours: int, channels: tuple[int, ...], blocks: int, time: int) -> None:
        super().__init__()
        a, b, c = channels
        told = 2 * b
        self.time = nn.ModuleList([nn.Linear(time, told), nn.Linear(told, told)])
        self.first = nn.Conv2d(colours, a, 3, padding=1)
        self.down = nn.ModuleList([_blocks(a, a, blocks, told), _blocks(a, b, blocks, told)])
        self.halve = nn.ModuleList(nn.Conv2d(n, n, 3, stride=2, padding=1) for n in (a, b))
        self.bottom = _blocks(b, c, blocks + 1, told)
        self.up = nn.ModuleList([_blocks(c + b, b, blocks, told), _blocks(b + a, a, blocks, told)])
        self.norm = nn.GroupNorm(GROUPS, a)
        self.last = nn.Conv2d(a, colours, 3, padding=1)

    def forward(self, z: Tensor, e: Tensor) -> Tensor:
        tau = e
        for layer in self.time:
            tau = F.silu(layer(tau))
        h = self.first(z.reshape(len(z), -1, *z.shape[-2:]))
        kept = []
        for level, halve in zip(self.down, self.halve, strict=True):
            h = _through(level, h, tau)
            kept.append(h)
            h = halve(h)
        h = _through(self.bottom, h, tau)
        for level in self.up:
            h = _through(level, torch.cat([_doubled(h), kept.pop()], 1), tau)
        return self.last(F.silu(self.norm(h))).reshape(z.shape)


class Block(nn.Module):
    """R, from ``i`` to ``o`` channels, told the time by ``told`` numbers."""

    def __init__(self, i: int, o: int, told: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(GROUPS, i), nn.GroupNorm(GROUPS, o)])
        self.first = nn.Conv2d(i, o, 3, padding=1)
        self.second = nn.Conv2d(o, o, 3, padding=1)
        self.told = nn.Linear(told, o)
        self.skip = nn.Conv2d(i, o, 1) if i != o else nn.Identity()

    def forward(self, h: Tensor, tau: Tensor) -> Tensor:
        g = self.first(F.silu(self.norms[0](h))) + self.told(tau)[..., None, None]
        return self.skip(h) + self.second(F.silu(self.norms[1](g)))


def _blocks(i: int, o: int, count: int, told: int) -> nn.ModuleList:
    return nn.ModuleList(Block(i if k == 0 else o, o, told) for k in range(count))


def _through(blocks: nn.Module, h: Tensor, tau: Tensor) -> Tensor:
    for block in blocks:  # type: ignore[attr-defined]
        h = block(h, tau)
    return h


def _doubled(h: Tensor) -> Tensor:
    """Every pixel four times."""
    return F.interpolate(h, scale_factor=2.0, mode="nearest")
