r"""The kernel distance: the maximum mean discrepancy of two laws for a polynomial kernel (Bińkowski et al. 2018).

.. math:: \mathrm{MMD}^2 = E\,\kappa(X, X') + E\,\kappa(Y, Y') - 2 E\,\kappa(X, Y), \qquad
          \kappa(x, y) = \Big(\frac{x \cdot y}{k} + 1\Big)^p

for points of k features. Expanding the power, :math:`\kappa(x, y) = \sum_{q \le p} \binom pq k^{-q}\, x^{\otimes q}
\cdot y^{\otimes q}`, and

.. math:: \mathrm{MMD}^2 = \sum_{q=1}^{p} \binom pq k^{-q}\, \big| E X^{\otimes q} - E Y^{\otimes q} \big|^2 :

it is zero if and only if the first p moments agree. The 1 sets the scale of features: they should be of order one.

Each mean is over all pairs of different units (two points of one member share its field), which makes the estimate
unbiased: no floor grows with k, and values below zero occur. With :math:`c_g` the mean kernel of unit g with the other
law and :math:`a_g` its sum with the other units of its own, leaving out unit g of G gives

.. math:: \theta_{(g)} = \frac{\sum_h a_h - 2 a_g}{(G-1)(G-2)} - 2\, \frac{\sum_h c_h - c_g}{G-1} + \text{const} ,

and the jackknife's error follows from sums over rows alone. Where the laws are equal it is too wide rather than too
narrow.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from vkernel.core.errors import require
from vkernel.core.estimate import Estimate
from vkernel.metrics.samples import CHUNK, Members, read_two, with_error

__all__ = ["kernel", "kernel_distance"]


def kernel_distance(
    a: Any, b: Any, degree: int = 3, *, members: Members = None, skip_diverged: bool = False
) -> Estimate:
    """MMD² for the kernel (x·y/k + 1)^degree: unbiased, hence negative at times; jackknife error.

    Needs three units of each; all pairs are used, in time n² k and memory of one chunk.
    """
    whole = isinstance(degree, int) and not isinstance(degree, bool) and degree >= 1
    require(whole, f"degree must be a whole number, 1 or more, not {degree!r}.")
    laws = read_two(a, b, members, skip_diverged)
    points = [law.points for law in laws]
    value, parts = 0.0, []
    for name, law, x, y in zip("ab", laws, points, points[::-1], strict=True):
        g, unit = law.units, "members" if law.members else "samples"
        require(g >= 3, f"kernel_distance needs at least 3 {unit} of {name} for its error; got {g}.")
        blocks = x.reshape(g, -1, x.shape[1])
        own = _itself(x, degree) if len(x) == g else torch.stack([_sums(u, u, degree).sum() for u in blocks])
        cross = _sums(x, y, degree).reshape(g, -1).mean(1) / len(y)  # of each unit: its mean kernel with the other law
        among = (_sums(x, x, degree).reshape(g, -1).sum(1) - own) * (g / len(x)) ** 2  # … with other units, summed
        left = (among.sum() - 2 * among) / ((g - 1) * (g - 2)) - 2 * (cross.sum() - cross) / (g - 1)
        value += float(among.sum() / (g * (g - 1)) - cross.mean())
        parts.append((float(left.var()) * (g - 1) ** 2 / g, g))
    require(math.isfinite(value), f"Kernels of degree {degree} overflow: the features are too large; rescale them.")
    return with_error(value, parts, -math.inf, math.inf)


def kernel(x: Tensor, y: Tensor, degree: int = 3) -> Tensor:
    """κ of each x ``(n, k)`` with each y ``(m, k)``: ``(n, m)``."""
    return (x @ y.mT).div_(x.shape[1]).add_(1).pow_(degree)


def _itself(x: Tensor, degree: int) -> Tensor:
    """κ of each x with itself."""
    return x.square().sum(1).div_(x.shape[1]).add_(1).pow_(degree)


def _sums(x: Tensor, y: Tensor, degree: int) -> Tensor:
    """For each x the sum of its kernels with all y."""
    blocks = x.split(max(1, CHUNK // len(y)))
    return torch.cat([kernel(block, y, degree).sum(1) for block in blocks])
