"""Several networks: shared initialisations, samples across schedules, and what is said where nothing is compared."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from audited import PROCESS, TINY, marks
from torch import Tensor, nn

import vkernel as vk
from vkernel.reports.audit.runs import shared_starts, weight_cosine

SIZES = dataclasses.replace(TINY, members=16, reference=32)


class Deep(nn.Module):
    """A network with all that independent ones have in common: norms over images, a table of times, a frozen map."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.table, self.norm = nn.Embedding(100, 8), nn.LayerNorm((4, 4, 4))
        self.convs = nn.ModuleList([nn.Conv2d(a, b, 3, padding=1) for a, b in ((1, 16), (16, 16), (16, 4), (4, 1))])
        self.out = nn.Linear(16, 16)
        for p in self.parameters():
            nn.init.normal_(p, std=0.1, generator=g)
        self.table.weight.data = torch.arange(800.0).sin().reshape(100, 8)
        self.norm.weight.data = 1 + torch.arange(64.0).sin().reshape(4, 4, 4)


def moved(net: nn.Module, size: float, seed: int) -> nn.Module:
    """A training: weights move at random by ``size`` of theirs."""
    g, net = torch.Generator().manual_seed(seed), copy.deepcopy(net)
    for p in (p for p in net.parameters() if p.numel() > 1):
        p.data += size * p.data.std() * torch.randn(p.shape, generator=g)
    return net


def test_a_shared_initialisation_is_told_from_independent_ones() -> None:
    alone = [weight_cosine(Deep(k), Deep(k + 100)) for k in range(30)]
    assert all(found is not None and found[0] < max(0.05, 4 * found[1]) for found in alone)
    for size in (0.5, 1.0):
        cosine, noise = weight_cosine(moved(Deep(0), size, 1), moved(Deep(0), size, 2)) or (0.0, 1.0)
        assert cosine == pytest.approx(1 / (1 + size**2), abs=4 * noise)
        assert cosine > 4 * noise
    assert weight_cosine(Deep(0), Deep(0)) == (1.0, 0.0)
    assert weight_cosine(Deep(0), nn.Linear(16, 16)) is None
    assert weight_cosine(nn.Linear(16, 16), nn.Linear(16, 16)) is None  # no hidden units: one optimum for all
    assert weight_cosine(torch.sin, Deep(0)) is None


class Known(nn.Module):
    """The exact noise of a law, in pixels of another range, beside weights that are not used."""

    def __init__(self, process: vk.Process, seed: int, low: float = -1.0) -> None:
        super().__init__()
        self.body, self.score, self.low = Deep(seed), marks().score(process), low

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.score.process.sigma(t.double()).reshape(-1, 1, 1, 1).to(x) * -self.score(x, t.double())


def net(process: vk.Process, name: str, seed: int, **more: Any) -> vk.Score:
    return vk.as_score(Known(process, seed), process, (1, 4, 4), "noise", "index", (-1, 1), name=name, **more)


def test_networks_of_different_schedules_are_compared_by_their_samples() -> None:
    other = vk.DDPM.linear(5e-4, 0.3, 80)
    nets = [net(PROCESS, "a", 1), net(PROCESS, "b", 2), net(other, "c", 1)]
    found = vk.audit(nets, marks().sample(60, 1), test=marks().sample(60, 2), sizes=SIZES)
    assert found.agreement is not None
    assert [n.name for n in found.members] == ["a", "b"]
    assert found.across is not None
    assert found.across.members == 3
    assert found.across.ratio.value < 0.35  # all are the law's own score, at 20 steps of two schedules
    (starts,) = [note for note in found.notes if "initialisation" in note]
    assert starts.startswith("a, c seem to share an initialisation")
    assert "--group A,B,A" in starts
    (across,) = [note for note in found.notes if "differ in schedule" in note]
    assert "variance of scores is that of a, b alone" in across
    assert "From the same noise, samples of two of the 3 members" in across
    assert across in found.summary()
    assert shared_starts(found.networks, {"a": 0, "b": 1, "c": 0}) == []
    assert len(shared_starts(found.networks, {"a": 0, "b": 1, "c": 1})) == 1


def test_networks_that_cannot_be_compared_are_named() -> None:
    idle = vk.as_score(lambda x, t: torch.zeros_like(x), PROCESS, (1, 4, 4), "noise", "index", (-1, 1), name="idle")
    found = vk.audit([net(PROCESS, "a", 1), idle], marks().sample(60, 1), sizes=SIZES)
    assert found.agreement is None
    assert "a alone was sampled" in " ".join(found.notes)
