r"""U-Nets: convolutions on several resolutions, with attention, dropout and classes (docs/theory.md, §6.6).

With L ``channels`` the image is halved L - 1 times. Level :math:`l` has :math:`c_l` channels and sides
:math:`H/2^l, W/2^l`. Every level is a sequence of residual blocks

.. math:: R(h) = \mathrm{skip}(h) + C_2\, \Delta\, \varphi\, G_2\, (C_1\, \varphi\, G_1\, h + A\tau), \qquad
          \tau = \varphi(A_2\, \varphi(A_1 e + \sqrt K A_3 \mathbb{1}_{label})),

C a 3×3 convolution, G a group normalisation, :math:`\varphi` = SiLU, :math:`\Delta` dropout, K ``classes`` (without
them, no :math:`A_3`). On the levels ``attention``, every block is followed by self-attention over the pixels,

.. math:: h + W_o \sum_j \mathrm{softmax}_j(q_i \cdot k_j / \sqrt{c}) v_j, \qquad (q, k, v) = W G h ,

in ``heads`` heads of c channels each. It has no notion of position: a permutation of the pixels permutes its output.

**Dropout** sets numbers to 0 with probability p and divides the others by 1 - p; p is rounded to a multiple of
:math:`2^{-16}`. Masks are counter-based random numbers of (seed, member, step, layer, number): they do not depend on
chunk, order or device, and belong to the source "order" of the randomness of training. Scores have no dropout."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import count, pairwise
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vkernel.core import rng
from vkernel.core.checks import check_number, check_positive, check_whole, is_whole
from vkernel.core.errors import InputError, require
from vkernel.process import Process
from vkernel.train.models.base import PRECONDITIONED, Weight
from vkernel.train.models.network import Network, Shape
from vkernel.train.models.step import Draws
from vkernel.train.objectives import Objective, Times, Training

GROUPS = 8  # of a group normalisation
ZERO = ("second.weight", "attention.out.weight")  # at first, so that every block is the identity or skip


@dataclass(eq=False)
class UNet(Network):
    """A U-Net with one level for each of ``channels`` (2 or more, multiples of 8) and ``blocks`` residual blocks a
    level, for images whose sides are divisible by 2 to the power of the number of levels less 1. Levels are counted
    from 0, the full image; those in ``attention`` have self-attention with ``heads`` heads. ``classes`` is the number
    of labels of a class-conditional network; ``label`` is the one at which it is evaluated (``Ensemble.given``).
    ``init_scale`` multiplies initial filters. They stand before normalisations, so that their size leaves the output as
    it is and makes Adam's steps smaller in proportion: with 1 instead of .4, errors at low noise were 10 to 25 % larger
    after 1,000 steps of 64.

    >>> import vkernel as vk
    >>> model = vk.models.UNet((8, 16))
    >>> sum(p.numel() for p in model.module((1, 8, 8)).parameters())
    16137
    """

    channels: tuple[int, ...] = (32, 64, 64)
    blocks: int = 1
    _: KW_ONLY
    attention: tuple[int, ...] = ()
    heads: int = 1
    dropout: float = 0.0
    classes: int | None = None
    label: int | None = None
    target: str = "edm"
    steps: int = 5000
    ema: float | None = 0.999
    time_features: int = 8
    spread: float = 0.5  # with sigma_data of "edm" that is EDM's scaling of the input
    init_scale: float = 0.4  # of filters: then they have the variance of PyTorch's
    chunk: int | None = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        good = isinstance(self.channels, tuple | list) and len(self.channels) >= 2
        good = good and all(is_whole(c) and c >= GROUPS and c % GROUPS == 0 for c in self.channels)
        wanted = f"channels must be two or more multiples of {GROUPS}, one for each level"
        require(good, f"{wanted}; got {self.channels!r}.")
        self.channels, self.blocks = tuple(self.channels), check_whole(self.blocks, "blocks")
        levels = len(self.channels)
        good = isinstance(self.attention, tuple | list) and all(is_whole(k) for k in self.attention)
        good = good and len(set(self.attention)) == len(self.attention) and set(self.attention) <= set(range(levels))
        wanted = f"attention must hold levels, 0 (the full image) to {levels - 1} (the lowest resolution)"
        require(good, f"{wanted}; got {self.attention!r}.")
        self.attention, self.heads = tuple(sorted(self.attention)), check_whole(self.heads, "heads")
        for k in self.attention:
            good, c = self.channels[k] % self.heads == 0, self.channels[k]
            require(good, f"{self.heads} heads cannot share the {c} channels of level {k}: it is no multiple of them.")
        self.init_scale = check_positive(self.init_scale, "init_scale, the factor of initial filters,")
        self.dropout = check_number(self.dropout, "dropout", 0.0)
        require(self.dropout < 1, f"dropout is a probability below 1; got {self.dropout:g}.")
        check_whole(1 if self.classes is None else self.classes, "classes, the number of labels,")
        good = self.label is None or (is_whole(self.label) and 0 <= self.label < (self.classes or 0))
        known = f"labels 0 to {self.classes - 1}" if self.classes else "no labels: give classes=K"
        require(good, f"There is no label {self.label!r}: this U-Net has {known}.")
        if self.dropout:
            self.randomness = ("init", "inputs", "targets", "order")

    def defaults(self, process: Process) -> tuple[Weight, Times]:
        return PRECONDITIONED

    def given(self, label: int) -> Self:
        if self.classes is None:
            return super().given(label)
        found = dataclasses.replace(self, label=check_whole(label, "label", 0))
        found._modules = self._modules  # the architecture is the same
        return found

    def module(self, shape: Shape) -> nn.Module:
        good = len(shape) == 2 or (len(shape) == 3 and 1 <= shape[0] <= 4)
        require(good, f"A U-Net takes images, (H, W) or (1 to 4, H, W); an event of the data has shape {shape}.")
        low = len(self.channels) - 1
        good = all(side % 2**low == 0 for side in shape[-2:])
        what = f"A U-Net of {low + 1} levels takes images whose sides are divisible by {2**low}"
        require(good, f"{what}; got {shape[-2:]}. Pad the images, or give fewer channels, one for each level.")
        one = self._area(shape, low) * self.channels[-1] == GROUPS
        what = "A U-Net needs more than one number in a group of channels at its lowest level"
        require(not one, f"{what}; images {shape[-2:]} there have one pixel: give fewer levels or more channels.")
        return _Levels(shape[0] if len(shape) == 3 else 1, self)

    def largest(self, shape: Shape) -> int:
        sizes = [(a + b) * self._area(shape, k) for k, (a, b) in enumerate(pairwise(self.channels))]
        for k in self.attention:
            area = self._area(shape, k)
            sizes += [3 * self.channels[k] * area, self.heads * area**2]
        return max(sizes)

    def gain(self, name: str) -> float:
        if name.endswith(ZERO) or name == "last.weight":
            return 0.0
        filters = not name.startswith(("time", "label")) and "embed" not in name
        linear = name == "label.weight" or name.endswith("qkv.weight")  # no ReLU before or after
        return (self.init_scale if filters else 1.0) * (0.5**0.5 if linear else 1.0)

    def inputs(
        self, x: Tensor, t: Tensor, process: Process, label: Tensor | int | None = None
    ) -> tuple[Tensor, Tensor]:
        z, e = super().inputs(x, t, process)
        if self.classes is None:
            return z, e
        if label is None:
            raise InputError(
                f"This U-Net is class-conditional: choose one of its {self.classes} labels, ensemble.given(label)."
            )
        one = F.one_hot(torch.as_tensor(label, device=e.device), self.classes).to(e.dtype) * self.classes**0.5
        return z, torch.cat([e, one.expand(*e.shape[:-1], -1)], -1)

    def minibatches(
        self, training: Training, members: Sequence[int], objectives: Sequence[Objective] = (), done: int = 0
    ) -> Iterator[Draws]:
        draws = super().minibatches(training, members, objectives, done)
        if not self.dropout:
            return draws
        keys = training.keys("order/dropout", members)[:, None]
        keys = rng.hashed(keys, torch.arange(self.steps, device=keys.device))
        return ((*drawn, keys[:, step : step + 1]) for step, drawn in enumerate(draws, done))

    def _area(self, shape: Shape, level: int) -> int:
        """Return the number of pixels at a level."""
        return (shape[-2] >> level) * (shape[-1] >> level)


class _Levels(nn.Module):
    """The network of one member; ``key (1,)`` is the root of the dropout masks of a step, ``None`` for no dropout."""

    def __init__(self, colours: int, unet: UNet) -> None:
        super().__init__()
        channels, length = unet.channels, 1 + 2 * unet.time_features  # of e without the label
        width, layers = 2 * channels[1], count()  # of τ; of dropout

        def blocks(i: int, level: int, number: int) -> _Blocks:
            attends, o = unet.heads if level in unet.attention else 0, channels[level]
            return _Blocks(
                _Block(i if k == 0 else o, o, width, attends, unet.dropout, next(layers)) for k in range(number)
            )

        self.time = nn.ModuleList([nn.Linear(length, width), nn.Linear(width, width)])
        self.label = nn.Linear(unet.classes, width, bias=False) if unet.classes else None
        self.first = nn.Conv2d(colours, channels[0], 3, padding=1)
        *upper, bottom = range(len(channels))
        self.down = nn.ModuleList(blocks(channels[max(0, k - 1)], k, unet.blocks) for k in upper)
        self.halve = nn.ModuleList(nn.Conv2d(channels[k], channels[k], 3, stride=2, padding=1) for k in upper)
        self.bottom = blocks(channels[bottom - 1], bottom, unet.blocks + 1)
        self.up = nn.ModuleList(blocks(channels[k + 1] + channels[k], k, unet.blocks) for k in reversed(upper))
        self.norm = nn.GroupNorm(GROUPS, channels[0])
        self.last = nn.Conv2d(channels[0], colours, 3, padding=1)

    def forward(self, z: Tensor, e: Tensor, key: Tensor | None = None) -> Tensor:
        first, second = self.time
        tau = first(e[:, : first.in_features])
        if self.label is not None:
            tau = tau + self.label(e[:, first.in_features :])
        tau, kept = F.silu(second(F.silu(tau))), []
        h = self.first(z.reshape(len(z), -1, *z.shape[-2:]))
        for level, halve in zip(self.down, self.halve, strict=True):
            kept.append(level(h, tau, key))
            h = halve(kept[-1])
        h = self.bottom(h, tau, key)
        for level in self.up:
            h = level(torch.cat([F.interpolate(h, scale_factor=2.0, mode="nearest"), kept.pop()], 1), tau, key)
        return self.last(F.silu(self.norm(h))).reshape(z.shape)


class _Blocks(nn.ModuleList):
    """Residual blocks in sequence."""

    def forward(self, h: Tensor, tau: Tensor, key: Tensor | None) -> Tensor:
        for block in self:
            h = block(h, tau, key)
        return h


class _Block(nn.Module):
    """A residual block from ``i`` to ``o`` channels, with a time embedding of ``width`` numbers; then attention with
    ``heads`` heads, 0 for none. ``layer`` is its number among the blocks, from which its dropout masks are derived."""

    def __init__(self, i: int, o: int, width: int, heads: int, dropout: float, layer: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(GROUPS, i), nn.GroupNorm(GROUPS, o)])
        self.first = nn.Conv2d(i, o, 3, padding=1)
        self.second = nn.Conv2d(o, o, 3, padding=1)
        self.embed = nn.Linear(width, o)
        self.skip = nn.Conv2d(i, o, 1) if i != o else nn.Identity()
        self.attention = _Attention(o, heads) if heads else nn.Identity()
        self.dropout, self.layer = dropout, layer

    def forward(self, h: Tensor, tau: Tensor, key: Tensor | None) -> Tensor:
        g = self.first(F.silu(self.norms[0](h))) + self.embed(tau)[..., None, None]
        g = F.silu(self.norms[1](g))
        if key is not None:
            g = dropped(g, self.dropout, rng.hashed(key, torch.full_like(key, self.layer)))
        out: Tensor = self.attention(self.skip(h) + self.second(g))
        return out


class _Attention(nn.Module):
    """Self-attention over the pixels. Products and softmax stand here by themselves: the fused kernel of torch has
    neither forward derivatives, which divergences take, nor a batching rule for ``vmap``."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(GROUPS, channels), heads
        self.qkv, self.out = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, h: Tensor) -> Tensor:
        n, c, *sides = h.shape
        q, k, v = self.qkv(self.norm(h)).reshape(n, 3, self.heads, c // self.heads, math.prod(sides)).unbind(1)
        weights = ((q * (self.heads / c) ** 0.5).mT @ k).softmax(-1)  # (n, heads, query, key)
        return h + self.out((v @ weights.mT.to(v.dtype)).reshape(h.shape))


def dropped(h: Tensor, p: float, key: Tensor) -> Tensor:
    """Return ``h`` with numbers set to 0 by dropout, from the stream of ``key (1,)``."""
    lost = min(round(p * 2**16), 2**16 - 1)  # of 2^16: each 64-bit hash decides about four numbers
    counter, places = torch.arange((h.numel() + 3) // 4, device=h.device), 16 * torch.arange(4, device=h.device)
    parts = (rng.hashed(key, counter)[:, None] >> places) & 0xFFFF  # not a view as int16, which vmap does not take
    bits = parts.flatten()[: h.numel()].reshape(h.shape)
    return h * (bits >= lost) * (2**16 / (2**16 - lost))
