r"""How well theories predict the denoisers of networks on noisy images, by noise level.

Each quantity is one less a ratio of sums over images, with the jackknife's interval
(:func:`vkernel.core.estimate.ratio_of_sums`). Images on which a network is not finite are left out. A sum that is
rounding is zero, and nothing is known where it is the denominator. Of ``Scores`` squared errors are averaged over
members. All networks of a group are evaluated on the same noisy images."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vkernel.core.estimate import Estimate, ratio_of_sums, stacked
from vkernel.core.progress import Reporter
from vkernel.reports.audit.levels import NoisyImages, variables
from vkernel.reports.explain.candidates import Candidate, coordinates
from vkernel.reports.explain.report import TEXTS
from vkernel.score import Score, Wrapped

if TYPE_CHECKING:
    import xarray

BATCH = 64  # images at once
ROUNDING = 4.0  # units in the last place of x/α
ABOUT: dict[str, str] = TEXTS["variables"]["denoising"]


class Denoised:
    """Denoised images at one noise level, each score evaluated once on each of them."""

    def __init__(self, noisy: NoisyImages, level: int) -> None:
        self.t = noisy.times[level]
        self.parts = [x for _, _, x, _ in noisy.parts(level, BATCH)]
        size = sum(float(x.double().square().sum()) for x in self.parts) / float(noisy.process.alpha(self.t)) ** 2
        self.rounding = (ROUNDING * torch.finfo(self.parts[0].dtype).eps) ** 2 * size
        self.known: dict[int, Tensor] = {}

    def __call__(self, score: Score) -> Tensor:
        """Return the denoised images ``(k, d)`` in float64 on the CPU."""
        if id(score) not in self.known:
            with torch.no_grad():
                found = [score.denoise(x, self.t).flatten(1).cpu() for x in self.parts]
            self.known[id(score)] = torch.cat(found)
        return self.known[id(score)].double()

    def share(self, error: Tensor, reference: Tensor) -> Estimate:
        """Return the explained share, 1 - Σ error / Σ reference, over the images on which both are finite."""
        good = error.isfinite() & reference.isfinite()
        if not float(reference[good].sum()) > self.rounding:
            return Estimate.unknown()
        if not float(error[good].sum()) > self.rounding:
            error = torch.zeros_like(error)
        return ratio_of_sums(error[good], reference[good]).complement()


def squared(a: Tensor, b: Tensor) -> Tensor:
    """Return |a - b|² of each row."""
    return (a - b).square().sum(1)


def denoising(
    nets: Sequence[Wrapped],
    theories: Mapping[str, Mapping[str, Candidate]],
    gaussian: Score,
    sets: Mapping[str, NoisyImages],
    step: Reporter,
) -> dict[str, xarray.Dataset]:
    """Return :attr:`Explanation.denoising` of each network by name, without the dimension ``network``. ``theories`` are
    by network and name, ``sets`` noisy images at the same noise levels, all of one process."""
    cells: dict[tuple[str, ...], list[Estimate]] = {}  # along the sets, and along the levels
    for noisy in sets.values():
        for level in range(len(noisy.times)):
            at = Denoised(noisy, level)
            for net in nets:
                step(f"{net.name}: denoising")
                for key, found in _level(at, net, nets, theories[net.name], gaussian):
                    cells.setdefault((net.name, *key), []).append(found)
    return {net.name: _dataset(net, nets, theories[net.name], sets, cells) for net in nets}


def _level(
    at: Denoised, net: Wrapped, nets: Sequence[Wrapped], theories: Mapping[str, Candidate], gaussian: Score
) -> Iterator[tuple[tuple[str, str], Estimate]]:
    """Yield the estimates of one network at one level, by variable and theory (or other network)."""
    own, kept = at(net), at(net).isfinite().all(1)
    linear, spread = squared(own, at(gaussian)), squared(own, own[kept].mean(0))
    for name, theory in theories.items():
        members = [at(member) for member in theory.members]
        error = torch.stack([squared(own, member) for member in members]).mean(0)
        other = torch.stack([squared(own, member.roll(1, 0)) for member in members]).mean(0)
        yield ("r2", name), at.share(error, spread)
        yield ("gain", name), at.share(error, linear)
        yield ("permuted", name), at.share(other, linear)
        rest = theory.elsewhere
        yield ("elsewhere", name), Estimate.unknown() if rest is None else at.share(squared(own, at(rest)), linear)
    for other_net in nets:
        if other_net is not net:
            yield ("ceiling", other_net.name), at.share(squared(own, at(other_net)) / 2, linear)


def _dataset(
    net: Wrapped,
    nets: Sequence[Wrapped],
    theories: Mapping[str, Candidate],
    sets: Mapping[str, NoisyImages],
    cells: Mapping[tuple[str, ...], list[Estimate]],
) -> xarray.Dataset:
    import xarray

    times, process = next(iter(sets.values())).times, net.process
    shape = (len(sets), len(times))
    others = {one.name: stacked(cells[net.name, "ceiling", one.name], shape) for one in nets if one is not net}
    partner = max(others, key=lambda name: float(others[name].value.nanmean().nan_to_num(-math.inf)), default="")
    empty = stacked([Estimate.unknown()] * math.prod(shape), shape)
    columns = variables({"ceiling": others.get(partner, empty)}, "images", "level", texts=ABOUT)
    found = {
        name: stacked([cell for theory in theories for cell in cells[net.name, name, theory]], (len(theories), *shape))
        for name in ("r2", "gain", "permuted", "elsewhere")
    }
    columns |= variables(found, "theory", "images", "level", texts=ABOUT)
    ratio = (process.sigma(times) / process.alpha(times)).tolist()
    coords = {"images": list(sets), "level": range(len(times)), "partner": partner, "ratio": ("level", ratio)}
    return xarray.Dataset(columns, coords | {"t": ("level", times.tolist())} | coordinates(theories))
