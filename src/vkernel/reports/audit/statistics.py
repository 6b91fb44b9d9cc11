r"""What the advice needs to know of the training set: its duplicates, and where the ideal score begins to copy.

The ideal score has chosen one training image where the posterior holds the image that made x with mean weight ½ or
more,

.. math:: E\,r_i(\alpha y_i + \sigma z) \ge \tfrac12 ,

below some :math:`\sigma/\alpha`, found here by bisection on shared images and noise. ``vk.profile`` finds it
with its curves, near-duplicates besides; give its result to the audit where there is one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from vkernel.core import rng
from vkernel.data.empirical import Empirical
from vkernel.process import Process
from vkernel.reports.audit.levels import chosen
from vkernel.reports.profile import Profile
from vkernel.score.empirical import EmpiricalScore

__all__ = ["Ground"]

BISECTIONS = 8


@dataclass(frozen=True)
class Ground:
    """``cutoff``: σ/α at the end of sampling; ``collapse``: σ/α below which one image is chosen, or ``None``.

    ``repeated`` are the training images that have an exact copy, or near copies where a profile knows them (``near``).
    """

    cutoff: float
    collapse: float | None
    repeated: frozenset[int]
    near: bool

    @classmethod
    def of(cls, data: Empirical, process: Process, queries: int, seed: int) -> Ground:
        """Measured on so many images."""
        merged, merge = data.merged()
        counts = merge.cpu().bincount()
        repeated = frozenset((counts[merge.cpu()] > 1).nonzero().flatten().tolist())
        low, high = process._ratios()
        return cls(low, _collapse(merged, process, queries, seed, max(low, 1e-12), high), repeated, False)

    @classmethod
    def of_profile(cls, profile: Profile) -> Ground:
        """From what a profile has measured."""
        groups = [*profile.duplicates, *(group.indices for group in profile.near_duplicates)]
        process, t = profile.process, profile.collapse_time
        at = None if t is None else torch.tensor(t, dtype=torch.float64)
        collapse = None if at is None else float(process.sigma(at) / process.alpha(at))
        return cls(process._ratios()[0], collapse, frozenset(i for group in groups for i in group), True)


def _collapse(data: Empirical, process: Process, queries: int, seed: int, low: float, high: float) -> float | None:
    score, source = EmpiricalScore(data, process), rng.stream(seed, "images for the ground")
    index = chosen(data, queries, source).to(data.device)
    y = data.images(index)
    noise = rng.randn(tuple(y.shape), source, y.device, y.dtype)

    def copies(log_ratio: float) -> bool:
        ratio = torch.tensor(log_ratio, dtype=torch.float64).exp().clamp(*process._ratios())
        t = process.time(ratio)
        x = (float(process.alpha(t)) * y + float(process.sigma(t)) * noise).to(data.dtype)
        return float(score.posterior(x, t).weight(index).double().mean()) >= 0.5

    below, above = math.log(low), math.log(high)
    if not copies(below):
        return None
    if copies(above):
        return high
    for _ in range(BISECTIONS):
        middle = (below + above) / 2
        below, above = (middle, above) if copies(middle) else (below, middle)
    return math.exp((below + above) / 2)
