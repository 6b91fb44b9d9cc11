"""Two networks for 28×28 grey images that other people trained, written from the facts in models/README.md.

``U`` is a small U-Net that takes an index and normalises whole images; ``C`` a chain of convolutions that takes
t/1000. Attribute names are those of the keys in the files.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, side: int, c_in: int, c_out: int, normalise: bool = True) -> None:
        super().__init__()
        self.ln = nn.LayerNorm((c_in, side, side))
        self.conv1 = nn.Conv2d(c_in, c_out, 3, padding=1)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1)
        self.normalise = normalise

    def forward(self, x: Tensor) -> Tensor:
        x = self.ln(x) if self.normalise else x
        return nn.functional.silu(self.conv2(nn.functional.silu(self.conv1(x))))


def blocks(side: int, *channels: int, last_normalises: bool = True) -> nn.Sequential:
    pairs = list(itertools.pairwise(channels))
    return nn.Sequential(*(Block(side, a, b, last_normalises or i < len(pairs) - 1) for i, (a, b) in enumerate(pairs)))


def time_layer(out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(100, out), nn.SiLU(), nn.Linear(out, out))


class U(nn.Module):
    """606,852 numbers; keys in the files begin with ``network.``."""

    def __init__(self, steps: int = 1000) -> None:
        super().__init__()
        self.time_embed = nn.Embedding(steps, 100)
        self.te1, self.te2, self.te3, self.te_mid = (time_layer(c) for c in (1, 10, 20, 40))
        self.te4, self.te5, self.te_out = (time_layer(c) for c in (80, 40, 20))
        self.b1, self.b2, self.b3 = blocks(28, 1, 10, 10, 10), blocks(14, 10, 20, 20, 20), blocks(7, 20, 40, 40, 40)
        self.down1, self.down2 = nn.Conv2d(10, 10, 4, 2, 1), nn.Conv2d(20, 20, 4, 2, 1)
        self.down3 = nn.Sequential(nn.Conv2d(40, 40, 2), nn.SiLU(), nn.Conv2d(40, 40, 4, 2, 1))
        self.b_mid = blocks(3, 40, 20, 20, 40)
        up = nn.ConvTranspose2d
        self.up1 = nn.Sequential(up(40, 40, 4, 2, 1), nn.SiLU(), up(40, 40, 2))
        self.b4, self.up2 = blocks(7, 80, 40, 20, 20), up(20, 20, 4, 2, 1)
        self.b5, self.up3 = blocks(14, 40, 20, 10, 10), up(10, 10, 4, 2, 1)
        self.b_out = blocks(28, 20, 10, 10, 10, last_normalises=False)
        self.conv_out = nn.Conv2d(10, 1, 3, padding=1)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        embedded = self.time_embed(index)

        def shift(layer: nn.Module) -> Tensor:
            return layer(embedded)[:, :, None, None]

        one = self.b1(x + shift(self.te1))
        two = self.b2(self.down1(one) + shift(self.te2))
        three = self.b3(self.down2(two) + shift(self.te3))
        middle = self.b_mid(self.down3(three) + shift(self.te_mid))
        four = self.b4(torch.cat([three, self.up1(middle)], 1) + shift(self.te4))
        five = self.b5(torch.cat([two, self.up2(four)], 1) + shift(self.te5))
        out = self.b_out(torch.cat([one, self.up3(five)], 1) + shift(self.te_out))
        return self.conv_out(out)


class Layer(nn.Module):
    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(c_in, c_out, 7, padding=3), nn.LayerNorm((c_out, 28, 28)), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class C(nn.Module):
    """293,235 numbers; keys in the files begin with ``gt.``; buffers beta_t and alpha_t lie beside them."""

    def __init__(self) -> None:
        super().__init__()
        pairs = [(1, 16), (16, 32), (32, 32), (32, 16)]
        self.blocks = nn.ModuleList([*(Layer(a, b) for a, b in pairs), nn.Conv2d(16, 1, 3, padding=1)])
        wide = [layer for c in (32, 128, 128) for layer in (nn.Linear(c, 128), nn.GELU())]
        self.time_embed = nn.Sequential(*wide, nn.Linear(128, 16))
        self.register_buffer("frequencies", torch.zeros(16))

    def forward(self, x: Tensor, fraction: Tensor) -> Tensor:
        angle = fraction[:, None] * self.frequencies
        embedded = self.time_embed(torch.cat([angle.sin(), angle.cos() - 1], -1))
        x = self.blocks[0](x) + embedded[:, :, None, None]
        for layer in self.blocks[1:]:
            x = layer(x)
        return x
