r"""How cost grows: the exponent of a power law, by least squares on logarithms, with its standard error.

.. math:: \log y_i = a + b \log x_i + e_i, \qquad \hat b = \frac{\sum_i (u_i - \bar u)\, v_i}{\sum_i (u_i - \bar u)^2},
          \qquad \mathrm{se}^2 = \frac{\sum_i \hat e_i^2}{(m - 2) \sum_i (u_i - \bar u)^2},

with :math:`u = \log x`, :math:`v = \log y` and m points. What is not a power law has residuals that are no noise, and
then the error says how far from one it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vkernel.core.errors import require
from vkernel.core.estimate import Estimate, student_quantile

__all__ = ["exponent"]


def exponent(x: Sequence[float], y: Sequence[float]) -> tuple[Estimate, float]:
    r""":math:`\hat b`, with a 95 % interval, and the prefactor :math:`e^a`."""
    u, v = (torch.tensor(list(a), dtype=torch.float64) for a in (x, y))
    good = len(u) == len(v) >= 3 and bool((u > 0).all() & (v > 0).all()) and len(u.unique()) >= 2
    require(
        good, f"An exponent takes three points or more, positive and not all at one place; got {list(x)}, {list(y)}."
    )
    u, v = u.log(), v.log()
    away = u - u.mean()
    scatter = away.square().sum()
    b = (away * v).sum() / scatter
    a = v.mean() - b * u.mean()
    free = len(u) - 2
    se = ((v - a - b * u).square().sum() / free / scatter).sqrt()
    half = student_quantile(free) * se
    return Estimate(*(float(v) for v in (b, se, b - half, b + half))), float(a.exp())
