"""Seeded random tensors for tests, and the spread of estimates made from them."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

import vkernel as vk

__all__ = ["gen", "normal", "spread"]


def gen(seed: int = 0) -> torch.Generator:
    """Return a generator with this seed."""
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return standard normal numbers of this shape."""
    return torch.randn(shape, generator=gen(seed), dtype=dtype)


def spread(estimates: list[vk.Estimate]) -> tuple[float, float]:
    """The standard deviation of the values, and the root mean square of the errors they claimed."""
    return float(np.std([e.value for e in estimates])), math.sqrt(np.mean([e.se**2 for e in estimates]))
