r"""Samples of networks and of theories from the same noise, by the same sampler.

For final images a of a theory and b of a network, :math:`r^2` is the squared correlation of their pixels, one number
for each start; its median over starts has an interval of order statistics. Copies of training images
(:mod:`vkernel.metrics.copies`) and the distances to held-out images (:mod:`vkernel.metrics.likeness`) state what a
theory gets wrong. The i-th sample of ``Scores`` is that of the member i mod M."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vkernel.core.errors import InputError
from vkernel.core.estimate import Estimate, median, stacked
from vkernel.core.progress import Reporter
from vkernel.data import Empirical
from vkernel.metrics import likeness
from vkernel.metrics.copies import Reference
from vkernel.reports.audit.draw import draw, sampling_times, start
from vkernel.reports.audit.levels import variables
from vkernel.reports.explain.candidates import Candidate, coordinates
from vkernel.reports.explain.report import TEXTS
from vkernel.score import Score, Wrapped

if TYPE_CHECKING:
    import xarray

SAMPLES = 8  # the work of one theory, in units of one noise level
REFERENCE = 512  # real images that are compared with the training set
ABOUT: dict[str, str] = TEXTS["variables"]["samples"]


@dataclass(frozen=True)
class Drawn:
    """Final images ``(n, *shape)`` on the CPU, and the seconds that one of them took."""

    images: Tensor
    seconds: float


class Sampler:
    """Draws samples of several scores from the same noise at the times of a network; each score once."""

    def __init__(self, net: Wrapped, data: Empirical, count: int, steps: int, seed: int) -> None:
        self.x_T, self.seed = start(net, count, seed, data.shape).to(data.device), seed
        self.times, self.known = sampling_times(net, "ode", steps), dict[tuple[int, ...], Drawn]()

    def __call__(self, *members: Score) -> Drawn:
        key = tuple(id(member) for member in members)
        if key not in self.known:
            began, x = time.perf_counter(), torch.empty_like(self.x_T, device="cpu")
            for m, member in enumerate(members[: len(x)]):
                x[m :: len(members)] = draw(member, self.x_T[m :: len(members)], steps=self.times, seed=self.seed).cpu()
            self.known[key] = Drawn(x, (time.perf_counter() - began) / len(x))
        return self.known[key]


def squared_correlation(a: Tensor, b: Tensor) -> Tensor:
    """Return r² of the pixels of each pair of images, 0 if one is constant, NaN if one is not finite."""
    a, b = (x.double().flatten(1) for x in (a, b))
    a, b = (x - x.mean(1, keepdim=True) for x in (a, b))
    return (a * b).sum(1).square() / (a.square().sum(1) * b.square().sum(1)).clamp_min(1e-300)


def agreement(a: Tensor, b: Tensor) -> Estimate:
    """Return the median of r² over pairs that are finite."""
    values = squared_correlation(a, b)
    values = values[values.isfinite()]
    if len(values) == 0:
        return Estimate.unknown()
    found = median(values)
    return Estimate(found.value, found.se, max(found.low, 0.0), min(found.high, 1.0))


class Quality:
    """Compares samples with the training set and with held-out images, which are read once."""

    def __init__(self, data: Empirical, test: Empirical | None, seed: int) -> None:
        self.test, self.seed, self.reference = test, seed, None
        with contextlib.suppress(InputError):  # too few different images
            self.reference = Reference(data, test, "pixels", REFERENCE, seed)

    def __call__(self, drawn: Drawn) -> dict[str, Estimate]:
        """Return copies, Fréchet's and the kernel distance, and seconds; what cannot be measured is unknown."""
        found: dict[str, Estimate] = dict.fromkeys(("copies", "frechet", "kernel"), Estimate.unknown())
        if self.reference is not None:
            found["copies"] = self.reference.copies(drawn.images).fraction
        with contextlib.suppress(InputError):  # too few held-out images
            if self.test is not None:
                like = likeness(drawn.images, self.test, seed=self.seed)
                found |= {"frechet": like.frechet or Estimate.unknown(), "kernel": like.kernel}
        return found | {"seconds": Estimate.exact(drawn.seconds)}


def samples(
    net: Wrapped, theories: Mapping[str, Candidate], sampler: Sampler, quality: Quality, step: Reporter
) -> tuple[xarray.Dataset, dict[str, Tensor]]:
    """Return :attr:`Explanation.samples` of one network, without its ceiling, and final images by name."""
    import xarray

    own, found, images = sampler(net), dict[str, list[Estimate]](), {net.name: sampler(net).images}
    for name, theory in theories.items():
        drawn, rest = sampler(*theory.members), theory.elsewhere
        images[name] = drawn.images
        cells = {"r2": agreement(drawn.images, own.images), "permuted": agreement(drawn.images.roll(1, 0), own.images)}
        cells["elsewhere"] = Estimate.unknown() if rest is None else agreement(sampler(rest).images, own.images)
        for key, cell in (cells | quality(drawn)).items():
            found.setdefault(key, []).append(cell)
        step(f"{net.name}: samples of {name}", SAMPLES)
    columns = variables({key: stacked(row) for key, row in found.items()}, "theory", texts=ABOUT)
    alone = variables(quality(own), texts=ABOUT)
    columns |= {f"own_{key}": value for key, value in alone.items()}
    return xarray.Dataset(columns, coordinates(theories)), images


def ceiling(net: Wrapped, images: Mapping[str, Tensor], others: Sequence[Wrapped]) -> xarray.Dataset:
    """Return the agreement with the most similar of ``others``, unknown without any; ``images`` are by network."""
    import xarray

    pairs = {other.name: agreement(images[other.name], images[net.name]) for other in others}
    pairs = {name: found for name, found in pairs.items() if not math.isnan(found.value)}
    partner = max(pairs, key=lambda name: pairs[name].value, default="")
    columns = variables({"ceiling": pairs.get(partner, Estimate.unknown())}, texts=ABOUT)
    return xarray.Dataset(columns, {"partner": partner})
