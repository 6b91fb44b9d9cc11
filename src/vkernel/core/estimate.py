r"""A number with its error.

An :class:`Estimate` is a value, its standard error, and a 95 % interval. For a mean of :math:`n` independent
values :math:`z_k`,

.. math:: \hat\mu = \frac1n \sum_k z_k, \qquad \mathrm{se} = \sqrt{\frac{1}{n(n-1)} \sum_k (z_k - \hat\mu)^2},
          \qquad \hat\mu \pm q_{.975}(n-1)\, \mathrm{se}

with :math:`q` the quantile of Student's law. A value that is exact (a quadrature, a closed form) has ``se = 0``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Estimate"]


@dataclass(frozen=True)
class Estimate:
    """A value with standard error and 95 % interval; all four are floats, or tensors of one shape."""

    value: Any
    se: Any
    low: Any
    high: Any

    @classmethod
    def exact(cls, value: Any) -> Estimate:
        """An estimate without error."""
        zero = torch.zeros_like(value) if isinstance(value, Tensor) else 0.0
        return cls(value, zero, value, value)

    @classmethod
    def of_mean(cls, samples: Tensor, dim: int = 0, scale: Any = 1.0) -> Estimate:
        """``scale`` times the mean of ``samples`` over ``dim``, which holds independent draws."""
        n = samples.shape[dim]
        mean = samples.mean(dim)
        se = samples.std(dim) / n**0.5 if n > 1 else torch.full_like(mean, float("inf"))
        value, se = mean * scale, se * abs(scale)
        half = student_quantile(n - 1) * se
        low, high = value - half, value + half
        if value.ndim == 0:
            return cls(float(value), float(se), float(low), float(high))
        return cls(value, se, low, high)

    def __float__(self) -> float:
        return float(self.value)

    def __str__(self) -> str:
        if isinstance(self.value, Tensor):
            return f"Estimate(value={self.value}, se={self.se})"
        return f"{self.value:.4g} ± {self.se:.1g} [{self.low:.4g}, {self.high:.4g}]"


def student_quantile(dof: int) -> float:
    """The .975 quantile of Student's law, by the expansion of Fisher and Cornish (error < 2e-3 for dof ≥ 3)."""
    z = 1.959963984540054
    if dof < 1:
        return float("inf")
    if dof == 1:
        return 12.706204736432095
    if dof == 2:
        return 4.302652729911275
    if dof == 3:
        return 3.182446305284263
    g1 = (z**3 + z) / 4
    g2 = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    g3 = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    g4 = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    return z + g1 / dof + g2 / dof**2 + g3 / dof**3 + g4 / dof**4
