"""Small networks, laws and sizes for tests of audits."""

from __future__ import annotations

import copy
from typing import Any

import torch
from checkpoints import wrap
from torch import Tensor, nn

import vkernel as vk
from vkernel.reports.audit import Audit, Sizes

SMALL = Sizes(24, 32, 1, 2, 96, 8, 0, 48, 20, 256, 12, 0)
TINY = Sizes(8, 8, 1, 4, 48, 4, 0, 32, 20, 64, 10, 0)
STEPS = 100
PROCESS = vk.DDPM.linear(1e-3, 0.2, STEPS)
INDEX = torch.arange(STEPS, dtype=torch.float64)
RATIO = (PROCESS.sigma(INDEX) / PROCESS.alpha(INDEX)).float()  # r = sigma/alpha
QUESTIONS_OF_ONE = ["conventions", "training", "images", "copies", "membership", "blindness", "drift", "likeness"]
QUESTIONS_OF_ONE += ["deviation"]


class Denoiser(nn.Module):
    """Predicts noise from an image and an index, by ``out``: the noise itself, the image, or a blend of the two."""

    def __init__(self, d: int, width: int, out: str, depth: int = 2, blind: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.out, self.blind = out, blind
        self.register_buffer("ratio", RATIO)
        hidden = [m for _ in range(depth - 1) for m in (nn.Linear(width, width), nn.ReLU())]
        self.body = nn.Sequential(nn.Linear(d + 8, width), nn.ReLU(), *hidden, nn.Linear(width, d))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        r, rows = self.ratio[t.long()][:, None], x.flatten(1)
        if self.blind:
            rows = nn.functional.layer_norm(rows, rows.shape[1:])
        phase = r.log() * torch.tensor([0.25, 0.5, 1, 2]).to(r)
        out = self.body(torch.cat([rows, phase.sin(), phase.cos()], 1))
        root = (1 + r * r).sqrt()
        if self.out == "image":
            out = (rows * root - out) / r
        elif self.out == "blend":
            out = (r * rows + out) / root
        return out.reshape(x.shape)


def train(net: Denoiser, images: Tensor, steps: int, rate: float, keep: tuple[int, ...] = ()) -> list[Denoiser]:
    """Adam on the noise error, weighted so that the network's own output has an even one; copies along the way."""
    g, kept = torch.Generator().manual_seed(0), []
    optimiser = torch.optim.Adam(net.parameters(), rate, betas=(0.9, 0.99), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps)
    middle = ((RATIO > 0.1) & (RATIO < 4)).nonzero()[:, 0]  # where images can be distinguished
    for k in range(steps):
        x0 = images[torch.randint(len(images), (64,), generator=g)] if len(images) > 64 else images
        among = middle if k % 4 else torch.arange(STEPS)
        t = among[torch.randint(len(among), (len(x0),), generator=g)]
        r, noise = RATIO[t].reshape(-1, 1, 1, 1), torch.randn(x0.shape, generator=g)
        weight = {"noise": 1.0, "image": r * r, "blend": 1 + r * r}[net.out]
        x = (x0 + r * noise) / (1 + r * r).sqrt()
        loss = ((net(x, t) - noise).square() * weight).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if k + 1 in keep:
            kept.append(copy.deepcopy(net))
    return kept


def checkpoint(net: Any, shape: tuple[int, ...], name: str, **more: Any) -> vk.Score:
    """Return a network that predicts noise from an index by default."""
    return wrap(net, PROCESS, shape=shape, name=name, **more)


def digits() -> Tensor:
    held = vk.data.digits()
    return held[torch.randperm(held.n, generator=torch.Generator().manual_seed(1))].float()


def marks() -> vk.GaussianMixture:
    """A law on 4×4 images: eight marks of black and white, with grain."""
    signs = torch.randint(0, 2, (8, 1, 4, 4), generator=torch.Generator().manual_seed(3)) * 2 - 1
    return vk.GaussianMixture(0.7 * signs, variance=0.02)


def verdicts_of(found: Audit, network: str | None = None) -> dict[str, Any]:
    """Return the verdicts of one network by question, and those of all."""
    name = found.networks[0].name if network is None else network
    return {v.question: v for v in found.verdicts if v.network in (name, "")}


def alarms(found: Audit) -> set[str]:
    return {v.question for v in found.verdicts if v.level == "alarm"}
