r"""Least squares between a network's denoiser and a theory's, by noise level.

At each level the parameter minimises :math:`\sum |D - m|^2` between the network's denoiser D and the theory's m, on
noised images that must not be those of a later verdict; a few images suffice. Of candidates whose errors differ by
rounding the first counts. The network is evaluated once at each level, all candidates on the same noisy images.

Candidates are halved (Jamieson and Talwalkar 2016): at each level all of them are evaluated on an eighth of the images,
the better half on a quarter, and so on; the last two on all images."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

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
FIRST, FEWEST = 1 / 8, 4  # of the images in the first round, and at least


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
    source = rng.stream(seed, "noise for the fit of a theory")
    x0 = images[torch.randperm(images.n, generator=source)]  # any first few of them are like all
    with torch.no_grad():
        x = torch.stack([process.perturb(x0, t, generator=source) for t in times])
        target = torch.stack([check_like(network.denoise(y, t), y, "denoiser") for y, t in zip(x, times, strict=True)])
        size = target.double().square().flatten(2).sum(2).mean(1).cpu()

        def errors(candidate: float, at: Tensor, part: slice) -> Tensor:
            parameter.given, here, there = candidate, x[at, part], target[at, part]
            each = times[at, None].expand(here.shape[:2]).to(x.device)
            return (theory.denoise(here, each) - there).double().square().flatten(2).sum(2).cpu()

        best = _halving(errors, tried, len(x0), ROUNDING * size)
    parameter.given = {ratio: tried[j] for ratio, j in zip(ratios, best, strict=True)}
    return theory


def _halving(
    errors: Callable[[float, Tensor, slice], Tensor], tried: Sequence[float], images: int, rounding: Tensor
) -> list[int]:
    """Return the index of the best candidate at each level; ``errors(candidate, levels, part)`` are ``(L, part)``."""
    rounds, stop = max(1, math.ceil(math.log2(len(tried)))), 0
    known = torch.full((len(tried), len(rounding), images), math.inf, dtype=torch.float64)
    order = torch.arange(len(tried))[:, None].expand(-1, len(rounding))
    for r in range(rounds):
        share = 1 if r == rounds - 1 else FIRST * 2**r
        part = slice(stop, max(stop, min(images, max(FEWEST, math.ceil(share * images)))))
        for j, candidate in enumerate(tried):
            at = (order == j).any(0).nonzero().flatten()
            if len(at) and part.start < part.stop:
                known[j, at, part] = errors(candidate, at, part)
        stop = part.stop
        mean = known[..., :stop].mean(2)
        least = mean.amin(0)
        ranked = torch.where(mean <= least + rounding, least, mean).argsort(dim=0, stable=True)
        order = ranked[: math.ceil(len(order) / 2)]
    return order[0].tolist()


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
