r"""Least squares between a network's denoiser and a theory's, by noise level.

At each level the parameter minimises :math:`\sum |D - m|^2` between the network's denoiser D and the theory's m, on
noised images that must not be those of a later verdict; a few images suffice. Of candidates whose errors differ by
rounding the first counts. The network is evaluated once at each level, and all candidates see the same noisy images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import torch

from vkernel.core import rng
from vkernel.core.checks import check_whole, is_number
from vkernel.core.errors import require
from vkernel.data import Empirical
from vkernel.score.base import Score, check_like
from vkernel.theories.base import Data, Theory
from vkernel.theories.scale import ByLevel

T = TypeVar("T", bound=Theory)
Levels = int | Sequence[float]
LOWEST, HIGHEST = 0.05, 50.0  # of the images' standard deviation: beyond, all candidates agree
ROUNDING = 1e-7  # of Σ |D|²


def fit(
    theory: T,
    parameter: ByLevel,
    network: Score,
    images: Data,
    candidates: Sequence[float],
    levels: Levels = 6,
    seed: int = 0,
) -> T:
    """Return ``theory`` with its ``parameter`` set to the table of the best of ``candidates`` at each level.
    ``levels`` are numbers σ/α, or how many, even in log σ/α where the images are neither noise alone nor free of it."""
    process, images = network.process, images if isinstance(images, Empirical) else Empirical(images)
    good = images.shape == theory.shape
    require(good, f"The images of a fit must have the shape {theory.shape} of the data; they have {images.shape}.")
    require(len(candidates) > 0, "A fit needs at least one candidate.")
    tried, ratios = [parameter.check(c) for c in candidates], _ratios(network, images, levels)
    times = process.time(torch.tensor(ratios, dtype=torch.float64))
    source, x0 = rng.stream(seed, "noise for the fit of a theory"), images[:]
    errors = torch.zeros(len(tried), len(ratios), dtype=torch.float64)
    with torch.no_grad():
        noisy = [process.perturb(x0, t, generator=source) for t in times]
        found = [check_like(network.denoise(x, t), x, "denoiser") for x, t in zip(noisy, times, strict=True)]
        x, target = torch.cat(noisy), torch.stack(found).double()
        each = times.repeat_interleave(len(x0)).to(x.device)
        for error, candidate in zip(errors, tried, strict=True):
            parameter.given = candidate
            gap = theory.denoise(x, each).reshape_as(target) - target
            error.copy_(gap.square().flatten(1).sum(1))
    least = errors.amin(0) + ROUNDING * target.square().flatten(1).sum(1).cpu()
    first = (errors <= least).int().argmax(0).tolist()
    parameter.given = {ratio: tried[j] for ratio, j in zip(ratios, first, strict=True)}
    return theory


def _ratios(network: Score, images: Empirical, levels: Levels) -> list[float]:
    """Return the levels σ/α, ascending, within those of the network's process."""
    low, high = network.process.ratios
    if isinstance(levels, Sequence):
        good = len(levels) > 0 and all(is_number(r) and low <= r <= high for r in levels)
        require(good, f"levels must be σ/α of the process, {low:.3g} to {high:.3g}, or how many; got {levels!r}.")
        return sorted({float(r) for r in levels})
    count, scale = check_whole(levels, "levels"), images.spread / math.sqrt(images.d)
    first, last = (min(max(c * scale, low), high) for c in (LOWEST, HIGHEST))
    even = torch.logspace(math.log10(first), math.log10(last), count, dtype=torch.float64)
    return even.clamp(low, high).tolist()
