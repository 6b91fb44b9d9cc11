r"""Are samples copies of the training set? (theory, §10.4)

A sample is a **copy** if it is nearer to one training image than a third of the distance to the second nearest; equal
training images count as one. With ``augment`` training images are compared in all versions that training may have
shown, and the second nearest is another *image* (:mod:`~vkernel.metrics.augment`). **Reference** images are compared in
the same way: test images or, without these, training images, each against the others, counted as pairs. With a copies
among n samples and b among m reference images,

.. math:: \mathrm{chance} = P(A \ge a), \qquad A \sim \mathrm{Hypergeometric}(n + m,\, a + b,\, n) ;

the alarm is raised below .01. Samples **closer** to the training set than all but 1 % of the reference images are
counted too, since a copy of an image that has a near-duplicate is not found otherwise; this raises no alarm. A sample
is **authentic** (Alaa et al. 2022) if it is farther from its nearest training image than that image is from the others.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.checks import check_real, check_type, check_whole
from vkernel.core.errors import require
from vkernel.core.estimate import Estimate, difference_of_shares, fisher_exact
from vkernel.data.empirical import Empirical
from vkernel.metrics.augment import Augment, Augmented
from vkernel.metrics.features import Features, extractor
from vkernel.metrics.samples import nearest

CHANCE = 0.01  # below it, an alarm
CLOSEST = 0.01  # the share of reference images that are called close
Described = tuple[Tensor, Tensor, Estimate, Estimate[Tensor], Estimate]
KINDS = ("test images", "training images, each against the others")


@dataclass(frozen=True)
class Copies:
    """The comparison of n samples with the training set, and of m reference images with it (``reference…``). ``distance
    (n, 2)`` to the two nearest training images, their ``index`` (the first of equal ones) and the ``ratio`` of
    distances. A diverged sample has infinite distances, index -1 and ratio NaN; it is no copy, and one of n.
    ``fraction``, ``curve``: the share of copies, at ``threshold`` and along ``thresholds``; ``closer``: the share of
    samples within ``radius`` of the training set. ``distinct``: the number of different training images;
    ``augment``: the versions in which they were compared.

    >>> import torch, vkernel as vk
    >>> train, held_out = vk.data.images("digits", 200, 100)
    >>> samples = train[:32]  # of a network that copies
    >>> found = vk.metrics.copies(samples, train, held_out)
    >>> found.ratio.shape, found.distance.shape, found.fraction.value
    (torch.Size([32]), torch.Size([32, 2]), 1.0)
    """

    index: Tensor = field(repr=False)
    thresholds: Tensor = field(repr=False)
    reference_kind: str
    distance: Tensor = field(repr=False)
    ratio: Tensor = field(repr=False)
    fraction: Estimate
    curve: Estimate[Tensor] = field(repr=False)
    authentic: Estimate
    reference_distance: Tensor = field(repr=False)
    reference_ratio: Tensor = field(repr=False)
    reference: Estimate
    reference_curve: Estimate[Tensor] = field(repr=False)
    reference_authentic: Estimate
    threshold: float
    excess: Estimate
    chance: float
    closer: Estimate
    radius: float
    closer_chance: float
    diverged: int
    distinct: int
    augment: str = ""

    @property
    def alarm(self) -> bool:
        """Whether there are more copies than chance allows."""
        return self.chance < CHANCE

    @property
    def units(self) -> int:
        """The number of independent reference images, or of pairs."""
        return len(self.reference_ratio) // (1 if self.reference_kind == KINDS[0] else 2)

    def order(self) -> Tensor:
        """Return the samples from the smallest ratio to the largest, ``(n,)``; diverged ones come last."""
        return self.ratio.nan_to_num(nan=math.inf).argsort(stable=True)

    def worst(self, k: int) -> Tensor:
        """Return the ``k`` samples with the smallest ratios, or all if there are fewer."""
        return self.order()[:k]

    def renumbered(self, rows: Tensor) -> Copies:
        """Return the comparison with a part of a set, with indices in the whole set, ``rows`` of which are the part."""
        return replace(self, index=torch.where(self.index < 0, -1, rows[self.index.clamp_min(0)]))


def pooled(parts: Sequence[Copies]) -> Estimate:
    """Estimate the share of copies among all samples of several comparisons."""
    copied = sum(round(part.fraction.value * len(part.ratio)) for part in parts)
    return Estimate.of_share(copied, sum(len(part.ratio) for part in parts))


def copies(
    samples: Tensor,
    data: Empirical,
    test: Empirical | None = None,
    *,
    features: Features = "pixels",
    threshold: float = 1 / 3,
    reference: int = 1024,
    seed: int = 0,
    augment: str | Augment | None = None,
) -> Copies:
    """Compare ``samples (n, *shape)`` with the training set ``data``, in its units. ``test`` are images of the same law
    that were not trained on. Distances are taken between ``features`` (:func:`~vkernel.metrics.features.extractor`). At
    most ``reference`` reference images are used. ``augment`` names the versions in which training images were shown,
    ``"flip,shift:2"``.

    >>> import torch, vkernel as vk
    >>> train, held_out = vk.data.images("digits", 200, 100)
    >>> samples = train[:32]  # of a network that copies
    >>> vk.metrics.copies(samples, train, held_out).fraction.value
    1.0
    """
    return Reference(data, test, features, reference, seed, augment).copies(samples, threshold)


class Reference:
    """The training set and at most ``images`` reference images, compared once; :meth:`copies` then compares samples.
    ``points`` are the features of the distinct training images that have weight, ``first`` the first index of each,
    ``own`` the neighbours of the reference images, which depend on each other in groups of ``group``."""

    points: Empirical | Augmented

    def __init__(
        self,
        data: Empirical,
        test: Empirical | None,
        features: Features,
        images: int,
        seed: int,
        augment: str | Augment | None = None,
    ) -> None:
        self.data, self.group = check_type(data, "data", Empirical), 2 if test is None else 1
        check_whole(images, "reference", 2)
        if test is not None:
            check_type(test, "test", Empirical)
            require(test.shape == data.shape, f"Test images have shape {test.shape}, the data {data.shape}.")
            require(int((test.weights > 0).sum()) >= 2, "There is one test image; give two or more, or none.")
        self.extract, kept = extractor(features).fit(data, seed), data.weights.cpu().nonzero()[:, 0]
        part = data if len(kept) == data.n else data.subset(kept)
        self.augment = Augment.parse(augment, data.shape)
        if self.augment.name:
            self.points, merge = Augmented.merged(part, self.augment, self.extract)
        else:
            # in the precision of the features: in float64, sets of images in memory would be twice as large
            points = part if self.extract.plain else Empirical(self.extract.over(part).cpu())
            self.points, merge = points.merged()
        n, merge = self.points.n, merge.cpu()
        require(n >= 2, "A ratio of distances needs two distinct training images; these are all equal.")
        good = n >= 3 or test is not None
        require(good, f"Without test images, copies need 3 distinct training images; these are {n}. Give test=.")
        self.first = torch.full((n,), data.n).scatter_reduce(0, merge, kept, "amin")
        picked = (test or data).choose(images, rng.stream(seed, "reference images for copies"), distinct=True)
        if test is not None:
            self.own = self._neighbours(self._rows(test, picked))
        else:
            which = merge[torch.searchsorted(kept, picked)]
            alone = which.where(merge.bincount()[which] == 1, -1)  # a point that is there twice is not left out
            self.own = self._neighbours(self.points.take(which).double().cpu(), alone)

    def to(self, device: torch.device | str) -> Reference:
        """Return the same comparison with the training images on ``device``, where neighbours are searched."""
        if isinstance(self.points, Augmented) or self.points.device == torch.device(device):
            return self
        moved = copy.copy(self)
        moved.points = self.points.to(device)
        return moved

    def nearest(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distances of samples to the two nearest training images, ``(n, 2)``, and the indices of these;
        those of diverged samples are infinite and -1. This is the part of :meth:`copies` that ratios need."""
        rows = self._queries(samples)
        distance, index = torch.full((len(rows), 2), math.inf, dtype=torch.float64), torch.full((len(rows), 2), -1)
        good = rows.isfinite().all(1)
        if good.any():
            near, found = (a.cpu() for a in nearest(rows[good], self.points, 2))
            distance[good], index[good] = near, self.first[found]
        index[~distance.isfinite().all(1)] = -1  # the square of the distance overflows
        return distance, index

    def _queries(self, samples: Tensor) -> Tensor:
        """Return the features of samples, ``(n, F)``; NaN for diverged ones."""
        images = check_samples(samples, self.data)
        images = images if self.extract.plain else images.to(torch.get_default_dtype())
        rows = torch.full((len(images), self.points.d), math.nan, dtype=torch.float64)
        good = images.flatten(1).isfinite().all(1)
        if good.any():
            rows[good] = self._rows(images[good])
        return rows

    def copies(self, samples: Tensor, threshold: float = 1 / 3) -> Copies:
        """Compare samples with the training set."""
        require(0 < threshold <= 1, f"threshold must be a ratio in (0, 1], not {threshold!r}.")
        rows = self._queries(samples)
        n, units, grid = len(rows), len(self.own[0]) // self.group, torch.linspace(0, 1, 41, dtype=torch.float64)[1:]
        (distance, index, authentic), (near, _, real) = self._neighbours(rows), self.own

        def described(distance: Tensor, authentic: Tensor) -> tuple[int, Described]:
            """Return the number of copies; distances, ratios, shares of copies (along the grid too) and authentic."""
            finite = distance.isfinite().all(1, keepdim=True)
            ratio = torch.where(finite, distance[:, :1] / distance[:, 1:], math.nan)
            found, along = (((distance[:, :1] < a * distance[:, 1:]) & finite).sum(0) for a in (threshold, grid))
            counts = (found[0], along, authentic.sum())
            fraction, curve, rest = (Estimate[Any].of_share(count, len(ratio)) for count in counts)
            return int(found), (distance, ratio[:, 0], fraction, curve, rest)

        (a, theirs), (b, reference) = described(distance, authentic), described(near, real)
        k = math.ceil(CLOSEST * units)
        radius = float(near[:, 0].kthvalue(self.group * k).values)
        close = int((distance[:, 0] < radius).sum())
        excess = difference_of_shares(theirs[2], reference[2])
        chance = fisher_exact(a, n, math.ceil(b / self.group), units)
        closer = Estimate[float].of_share(close, n), radius, fisher_exact(close, n, k - 1, units)
        compared = (*theirs, *reference, threshold, excess, chance, *closer)
        diverged = int((~distance.isfinite().all(1)).sum())
        return Copies(index, grid, KINDS[self.group - 1], *compared, diverged, self.points.n, self.augment.name)

    def _rows(self, images: Empirical | Tensor, indices: Tensor | None = None) -> Tensor:
        return self.extract.over(images, indices).double().cpu()

    def _neighbours(self, rows: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return two distances and indices ``(q, 2)`` for queries ``(q, F)``, and whether each is authentic.
        ``out (q,)`` are points to leave out, or -1. Diverged queries have infinite distances."""
        n, points = len(rows), self.points
        distance, index = torch.full((n, 2), math.inf, dtype=torch.float64), torch.full((n, 2), -1)
        authentic, good = torch.ones(n, dtype=torch.bool), rows.isfinite().all(1).nonzero()[:, 0]
        out = torch.full((len(good),), -1) if out is None else out[good]
        near, found = (a.cpu() for a in nearest(rows[good], points, 2, out))
        seen, back = found[:, 0].unique(return_inverse=True)
        away, whose = (a.cpu()[back] for a in nearest(points.take(seen).double(), points, 2, seen))
        other = torch.where(whose[:, 0] == out, away[:, 1], away[:, 0])  # a point that is left out is no neighbour
        distance[good], index[good], authentic[good] = near, self.first[found], near[:, 0] > other
        index[~distance.isfinite().all(1)] = -1  # the square of the distance overflows
        return distance, index, authentic


def check_samples(samples: Tensor, data: Empirical, least: int = 1) -> Tensor:
    """Return samples ``(n, *shape)`` of the data's shape in float64 on the CPU."""
    check_real(samples, "Samples")
    shape = tuple(samples.shape[1:]) or (1,)
    require(samples.ndim and shape == data.shape, f"Samples have shape {shape}, the data {data.shape}.")
    require(len(samples) >= least, f"Samples must be (n, *shape) with n ≥ {least}, not {tuple(samples.shape)}.")
    return samples.detach().cpu().double().reshape(-1, *shape)
