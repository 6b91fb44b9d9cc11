r"""Laws of one-dimensional denoisers by transport, without random numbers.

In one dimension a law is carried by its quantiles: :math:`x_T = \sigma_T\,\Phi^{-1}((i - \tfrac12)/N)` in place of N
random draws. Averages over them are off by O(1/N) and not :math:`O(N^{-1/2})`: 4,096 resolve more than :math:`10^5`
draws do. At every time the denoisers of all members are tabulated once, on a grid in x, and looked up:

* ``right``: the value at the grid's next point to the right, the index clamped to the grid (as the paper's notebook);
* ``linear``: interpolated between the two neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from vkernel.process import Process

__all__ = ["carry", "quantiles"]

Tables = Callable[[Tensor, float], Tensor]
BLOCK = 1 << 16  # numbers moved at once: they stay in the cache


def quantiles(process: Process, n: int) -> Tensor:
    """The ``n`` mid-quantiles of the prior, ascending."""
    share = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    return process.sigma(torch.tensor(process.T, dtype=torch.float64)) * torch.special.ndtri(share)


def carry(
    denoisers: Tables, process: Process, start: Tensor, times: Tensor, nodes: Tensor, *, lookup: str, exponential: bool
) -> Tensor:
    """``(M, n)``: where the probability flow takes ``start (n,)`` for each member.

    ``denoisers(nodes, t)`` is the table ``(M, nodes)`` of the members at time t; ``nodes`` are evenly spaced. Steps are
    Euler's, or exponential ones (exact while the denoised point stands still).
    """
    numbers = [[float(getattr(process, f)(t)) for f in ("alpha", "sigma", "beta", "D")] for t in times]
    low, gap, last = float(nodes[0]), float(nodes[1] - nodes[0]), len(nodes) - 1
    out: Tensor | None = None
    for k, (t, t2) in enumerate(pairwise(times.tolist())):
        (alpha, sigma, beta, D), (alpha2, sigma2, *_) = numbers[k], numbers[k + 1]
        table = denoisers(nodes, t)
        out = start.expand(len(table), -1).clone() if out is None else out
        width = max(1, BLOCK // len(start))
        for x, row in zip(out.split(width), table.split(width), strict=True):
            m = _look_up(row, (x - low).div_(gap), last, lookup)
            if exponential:
                ratio = sigma2 / sigma
                x.mul_(ratio).add_(m, alpha=alpha2 - ratio * alpha)
            else:
                dt, rate = t - t2, D / sigma**2
                x.mul_(1 + dt * (beta - rate)).add_(m, alpha=dt * rate * alpha)
    assert out is not None
    return out


def _look_up(table: Tensor, place: Tensor, last: int, lookup: str) -> Tensor:
    """The table's value at real-valued indices ``place``, which it may overwrite."""
    if lookup == "right":
        return table.gather(1, place.ceil_().clamp_(0, last).long())
    place.clamp_(0, last)
    below = place.floor().clamp_(max=last - 1)
    index = below.long()
    left = table.gather(1, index)
    return left.add_(table.gather(1, index.add_(1)).sub_(left).mul_(place.sub_(below)))
