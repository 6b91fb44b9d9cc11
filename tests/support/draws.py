"""Seeded random tensors for tests."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["gen", "normal"]


def gen(seed: int = 0) -> torch.Generator:
    """Return a generator with this seed."""
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Return standard normal numbers of this shape in float64."""
    return torch.randn(shape, generator=gen(seed), dtype=torch.float64)
