"""One process of each kind, and helpers to evaluate them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from vkernel.process import DDPM, EDM, VE, VP, Cosine, FlowMatching, Process, Toy, VPSong

ALL: list[Process] = [
    VP(),
    VP(beta_min=2.0, beta_max=2.0, eps=0.01, T=2.0),
    VPSong(),
    DDPM.linear(),
    DDPM.scaled_linear(steps=50, eps=0.5, T=40.0),
    Cosine(),
    VE(),
    EDM(),
    FlowMatching(),
    Toy(),
]
each = pytest.mark.parametrize("process", ALL, ids=lambda p: f"{type(p).__name__}-T{p.T:g}")


def f64(*values: float) -> Tensor:
    return torch.tensor(values[0] if len(values) == 1 else values, dtype=torch.float64)


def at(process: Process, u: float) -> Tensor:
    """A time at the fraction u of the range, kept off DDPM's knots."""
    t = process.eps + u * (process.T - process.eps)
    if isinstance(process, DDPM):
        t = min(math.floor(t), len(process.betas) - 2) + min(max(t - math.floor(t), 0.1), 0.9)
    return f64(t)
