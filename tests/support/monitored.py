"""Small training loops for tests of monitors: plain PyTorch, with everything random that training may hold."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

import vkernel as vk

PROCESS = vk.VPSong()
Called = Callable[..., object]


def digits(n: int, test: int = 64, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return training and held-out digits, in [-1, 1]."""
    train, held = vk.data.images("digits", n, test, seed=seed)
    return train[:], held[:]


class Denoiser(nn.Module):
    """A small network with dropout and batch normalisation that predicts x0."""

    def __init__(self, width: int = 32, dropout: float = 0.0, norm: bool = False, classes: int = 0) -> None:
        super().__init__()
        self.first = nn.Linear(65, width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.drop = nn.Dropout(dropout)
        self.second, self.last = nn.Linear(width, width), nn.Linear(width, 64)
        self.embed = nn.Embedding(classes, width) if classes else None

    def forward(self, x: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        h = self.first(torch.cat([x.flatten(1), t[:, None].to(x.dtype)], 1))
        if self.embed is not None:
            h = h + self.embed(labels)
        h = self.drop(nn.functional.silu(self.norm(h)))
        return self.last(nn.functional.silu(self.second(h))).reshape(x.shape)


def train(
    network: nn.Module,
    images: Tensor,
    steps: int,
    monitor: Called | None = None,
    *,
    call: Called | None = None,
    autocast: bool = False,
    ema: nn.Module | None = None,
    first: int = 0,
    lr: float = 2e-3,
    labels: Tensor | None = None,
) -> list[Tensor]:
    """Train in place with the global random state; return the weights at the end. ``call`` is what the loss calls (a
    compiled network, say), and the monitor is called inside the region of autocast, as loops may do."""
    optimiser, call = torch.optim.Adam(network.parameters(), lr), network if call is None else call
    for step in range(first, first + steps):
        index, t = torch.randint(len(images), (32,)), 0.99 * torch.rand(32) + 0.005
        x0 = images[index]
        alpha, sigma = (f(t)[:, None, None, None] for f in (PROCESS.alpha, PROCESS.sigma))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if monitor is not None:
                monitor(step, call, ema)
            x = alpha * x0 + sigma * torch.randn_like(x0)
            out = call(x, t) if labels is None else call(x, t, labels[index])
            loss = (out.float() - x0).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if ema is not None:
            with torch.no_grad():
                for a, b in zip(ema.parameters(), network.parameters(), strict=True):
                    a.lerp_(b, 0.1)
    return [*network.state_dict().values(), *(ema.state_dict().values() if ema is not None else ())]


def average(network: nn.Module) -> nn.Module:
    """Return a copy for averaged weights."""
    return copy.deepcopy(network)
