r"""The hardware's limit: how fast it multiplies and how fast it reads, measured where everything else is measured.

A computation that must do :math:`w` operations and read :math:`b` bytes takes no less than

.. math:: \max(w / R_w,\; b / R_b),

with :math:`R_w` the rate of a large product of matrices (float32 on a CPU; on a GPU half precision, summed in float32)
and :math:`R_b` the rate of a sum over an array far larger than the caches. The best of several runs counts: a limit is
what the machine *can* do.

A posterior over n points in d dimensions for B queries needs one product with the data for the logits, and one for the
mean of those queries whose weight is not on few points (a share s): :math:`w = 2ndB\,(1 + s)`. Each product reads the
data once. Where short bounds replace the first product, it is theirs that counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.common import once

__all__ = ["Limits", "limits"]


@dataclass(frozen=True)
class Limits:
    """Rates of one device: operations and bytes in a second."""

    operations: float
    wide: float  # the same in float64
    bytes: float
    size: int  # bytes of a number in a product

    def seconds(self, operations: float, numbers: float) -> float:
        """The least time for so many operations on so many numbers that are read."""
        return max(operations / self.operations, numbers * self.size / self.bytes)

    def posterior(self, n: int, d: int, batch: int, share: float) -> float:
        """The least time for the posterior means of ``batch`` queries, a ``share`` of them with many points."""
        return self.seconds(2 * n * d * batch * (1 + share), n * d * (1 + (share > 0)))


@functools.cache
def limits(kind: str, quick: bool = False) -> Limits:
    """Of "cpu" or "cuda", measured once in a process."""
    device = torch.device(kind)
    gpu = device.type == "cuda"
    side, count = (8192, 1 << 30) if gpu else (1536 if quick else 3072, 1 << 26)
    a = torch.randn(side, side, device=device, dtype=torch.float16 if gpu else torch.float32)
    product = (lambda: torch.mm(a, a.mT, out_dtype=torch.float32)) if gpu else (lambda: a @ a.mT)
    w = torch.randn(side // 2, side // 2, device=device, dtype=torch.float64)
    long = torch.ones(count, device=device)
    return Limits(
        2 * side**3 / _best(product, device),
        2 * (side // 2) ** 3 / _best(lambda: w @ w.mT, device),
        long.nbytes / _best(long.sum, device),
        2 if gpu else 4,
    )


def _best(run: Callable[[], object], device: torch.device, repeats: int = 6) -> float:
    return min(once(run, device)[0] for _ in range(repeats))
