r"""Are samples copies of the training set?

A sample at distance :math:`d_1` from the nearest training image and :math:`d_2` from the second nearest is called a
**copy** if :math:`d_1 < d_2/3` (Yoon et al. 2023, Bonnaire et al. 2025); equal training images count as one. Fresh
images are called so too, now and then: hence the same is asked of **reference** images, test images or, where there
are none, training images, each against the others. Were samples as good as fresh images, a of n samples and b of m
reference images being copies would be a draw of a + b from n + m, and

.. math:: \mathrm{chance} = P(A \ge a), \qquad A \sim \mathrm{Hypergeometric}(n + m,\, a + b,\, n)

(Fisher's exact test, one-sided); the alarm is raised below .01. The excess :math:`a/n - b/m` has Newcombe's (1998)
interval from the Wilson intervals :math:`(l, u)` of the two shares, :math:`p_1 - p_2 - [(p_1-l_1)^2 +
(u_2-p_2)^2]^{1/2}` to :math:`p_1 - p_2 + [(u_1-p_1)^2 + (p_2-l_2)^2]^{1/2}`.

A copy of an image that has a near-duplicate in the training set has :math:`d_1 \approx d_2` and escapes. So it is also
counted how many samples are **closer** to the training set than its k-th closest reference image, :math:`k =
\lceil m/100 \rceil`. Of samples as good as fresh images, x or more are with the chance

.. math:: P(H \le k - 1), \qquad H \sim \mathrm{Hypergeometric}(n + m,\, m,\, x + k - 1) :

among the x + k - 1 closest of all, at most k - 1 are reference images. It is exact whatever the law of distances, for
the quantile is not estimated but a rank. But images with less detail than the data's are closer to everything, copies
or not: this one is said, and raises no alarm.

A sample is **authentic** (Alaa et al. 2022) if it is farther from its nearest training image than that image is from
its own nearest other; of fresh images more than half are.

Test images are independent given the training set, and chances are exact. Training images are each other's neighbours:
where one is near to another, the other is near to it, and they count as copies both or not at all. They are taken as
m/2 pairs, b/2 of them copies, of which the closest has both its images ahead of the next; chances are approximate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.errors import InputError, require
from vkernel.core.estimate import Estimate
from vkernel.data.empirical import Empirical
from vkernel.metrics.neighbours import nearest
from vkernel.metrics.samples import CHUNK
from vkernel.reports.audit.levels import chosen, whole

__all__ = ["Copies", "Reference", "copies", "difference"]

CHANCE = 0.01  # below it, an alarm
CLOSEST = 0.01  # the share of reference images that are called close
KINDS = ("test images", "training images, each against the others")
Features = Callable[[Tensor], Any]


@dataclass(frozen=True)
class Copies:
    """What :func:`copies` found; n samples, m reference images.

    ``distance``, ``index (n, 2)``: to the two nearest training images, and which these are (the first of equal ones);
    ``ratio (n,)`` of the distances. A sample that diverged has infinite distances, index -1 and ratio NaN; it is no
    copy, and one of n. ``fraction`` and ``curve``: the share of copies, at ``threshold`` and along ``thresholds``;
    ``reference…``: of the reference images, ``reference_kind`` says which; ``excess``: the one less the other.
    ``closer``: the share of samples within ``radius`` of the training set.
    """

    distance: Tensor = field(repr=False)
    index: Tensor = field(repr=False)
    ratio: Tensor = field(repr=False)
    threshold: float
    fraction: Estimate
    thresholds: Tensor = field(repr=False)
    curve: Estimate = field(repr=False)
    reference: Estimate
    reference_curve: Estimate = field(repr=False)
    reference_ratio: Tensor = field(repr=False)
    reference_distance: Tensor = field(repr=False)
    reference_kind: str
    excess: Estimate
    chance: float
    authentic: Estimate
    reference_authentic: Estimate
    closer: Estimate
    radius: float
    closer_chance: float
    diverged: int
    distinct: int

    @property
    def alarm(self) -> bool:
        """Whether there are more copies than chance allows."""
        return self.chance < CHANCE

    @property
    def words(self) -> str:
        """What was found, in sentences."""
        return _words(self)

    def order(self) -> Tensor:
        """The samples from the smallest ratio to the largest, ``(n,)``; what diverged comes last."""
        return self.ratio.nan_to_num(nan=math.inf).argsort(stable=True)

    def worst(self, k: int) -> Tensor:
        """The ``k`` samples that are most like copies, or all if there are fewer."""
        return self.order()[:k]


def copies(
    samples: Tensor,
    data: Empirical,
    test: Empirical | None = None,
    *,
    features: Features | None = None,
    threshold: float = 1 / 3,
    reference: int = 1024,
    seed: int = 0,
) -> Copies:
    """Compare ``samples (n, *shape)`` with the training set ``data``, in its units.

    ``test`` are images of the same law that were not trained on. ``features`` maps images ``(k, *shape)`` to vectors
    ``(k, F)``, in which distances are taken; the default is pixels. At most ``reference`` reference images are used.
    """
    return Reference.of(data, test, features=features, images=reference, seed=seed).copies(samples, threshold)


@dataclass(frozen=True)
class Reference:
    """The training set and the reference images, compared once: ``copies(samples)`` then costs no more than samples."""

    data: Empirical
    features: Features | None
    space: _Space
    own: _Compared
    size: int  # reference images depend on each other in groups of this size

    @classmethod
    def of(
        cls,
        data: Empirical,
        test: Empirical | None = None,
        *,
        features: Features | None = None,
        images: int = 1024,
        seed: int = 0,
    ) -> Reference:
        _opened(data, test)
        whole(reference=(images, 2))
        space = _Space.of(data, features)
        require(
            test is not None or space.points.n >= 3,
            f"Without test images, copies need 3 distinct training images; these are {space.points.n}. Give test=.",
        )
        picked = chosen(test or data, images, rng.stream(seed, "reference images for copies"), distinct=True)
        own = torch.full((len(picked),), -1) if test else space.merge[picked]
        fresh = _described(test.images(picked), features) if test else space.points.take(own).double().cpu()
        require(bool(fresh.isfinite().all()), "The features of some test images are not finite.")
        return cls(data, features, space, space.compare(fresh, own), 1 if test else 2)

    def copies(self, samples: Tensor, threshold: float = 1 / 3) -> Copies:
        """What these samples are, compared with the training set."""
        require(0 < threshold <= 1, f"threshold must be a ratio in (0, 1], not {threshold!r}.")
        samples = _samples(samples, self.data)
        rows = torch.full((len(samples), self.space.points.d), math.nan, dtype=torch.float64)
        good = samples.flatten(1).isfinite().all(1)
        if good.any():
            rows[good] = _described(samples[good], self.features)
        theirs = self.space.compare(rows, torch.full((len(rows),), -1))
        return _judged(theirs, self.own, threshold, self.size, self.space.points.n)


@dataclass(frozen=True)
class _Compared:
    """Two distances and indices, and whether each query is authentic; ``bad`` queries have none."""

    distance: Tensor
    index: Tensor
    authentic: Tensor

    def __getitem__(self, part: slice) -> _Compared:
        return _Compared(self.distance[part], self.index[part], self.authentic[part])

    @property
    def bad(self) -> Tensor:
        return ~self.distance.isfinite().all(1)

    @property
    def ratio(self) -> Tensor:
        return (self.distance[:, 0] / self.distance[:, 1]).masked_fill(self.bad, math.nan)

    def copies(self, threshold: Tensor) -> Tensor:
        """Their number at each threshold."""
        return ((self.distance[:, :1] < threshold * self.distance[:, 1:]) & ~self.bad[:, None]).sum(0).double()


@dataclass(frozen=True)
class _Space:
    """The distinct training points, the first index and the number of each, and which of them each index is.

    Images without weight are no part of the training set; they are none of the points.
    """

    points: Empirical
    first: Tensor
    count: Tensor
    merge: Tensor

    @classmethod
    def of(cls, data: Empirical, features: Features | None) -> _Space:
        kept = data.weights.cpu().nonzero()[:, 0]
        part = data if len(kept) == data.n else data.subset(kept)
        if features is not None:
            blocks = torch.arange(part.n).split(max(1, CHUNK // data.d))
            part = Empirical(torch.cat([_described(part.images(block), features) for block in blocks]))
        points, merge = part.merged()
        require(points.n >= 2, "A ratio of distances needs two distinct training images; these are all equal.")
        merged = torch.full((data.n,), -1)
        merged[kept] = merge.cpu()
        first = torch.full((points.n,), data.n).scatter_reduce(0, merge.cpu(), kept, "amin")
        return cls(points, first, merge.cpu().bincount(), merged)

    def compare(self, rows: Tensor, own: Tensor) -> _Compared:
        """Of queries ``(q, d)``; ``own (q,)`` says which of the points they are, or -1, and these are left out.

        An image that is there twice is left out but once: its other self is its nearest.
        """
        n = len(rows)
        distance, index = torch.full((n, 2), math.inf, dtype=torch.float64), torch.full((n, 2), -1)
        authentic = torch.ones(n, dtype=torch.bool)
        good = rows.isfinite().all(1).nonzero()[:, 0]
        out = own.where((own >= 0) & (self.count[own] == 1), -1)[good]
        near, found = (a.cpu() for a in nearest(rows[good], self.points, 2, out))
        seen, back = found[:, 0].unique(return_inverse=True)
        away, whose = (a.cpu()[back] for a in nearest(self.points.take(seen).double(), self.points, 2, seen))
        other = torch.where(whose[:, 0] == out, away[:, 1], away[:, 0])  # what is left out is nobody's neighbour
        distance[good], index[good], authentic[good] = near, self.first[found], near[:, 0] > other
        index[~distance.isfinite().all(1)] = -1  # too far for its square
        return _Compared(distance, index, authentic)


def _judged(theirs: _Compared, own: _Compared, threshold: float, size: int, distinct: int) -> Copies:
    """The verdict; reference images depend on each other in groups of ``size``."""
    from scipy.stats import hypergeom

    n, m, grid = len(theirs.distance), len(own.distance), torch.linspace(0, 1, 41, dtype=torch.float64)[1:]
    at = torch.tensor([threshold], dtype=torch.float64)
    a, b = (c.copies(at)[0] for c in (theirs, own))
    fraction, reference = Estimate.of_share(a, n), Estimate.of_share(b, m)
    units, called = m // size, math.ceil(int(b) / size)
    chance = float(hypergeom.sf(int(a) - 1, n + units, int(a) + called, n))
    k = math.ceil(CLOSEST * units)
    radius = float(own.distance[:, 0].kthvalue(size * k).values)
    x = (theirs.distance[:, 0] < radius).sum().double()
    closer_chance = float(hypergeom.cdf(k - 1, n + units, units, int(x) + k - 1)) if x else 1.0
    return Copies(
        theirs.distance,
        theirs.index,
        theirs.ratio,
        threshold,
        fraction,
        grid,
        Estimate.of_share(theirs.copies(grid), n),
        reference,
        Estimate.of_share(own.copies(grid), m),
        own.ratio,
        own.distance,
        KINDS[size - 1],
        difference(fraction, reference),
        chance,
        Estimate.of_share(theirs.authentic.sum().double(), n),
        Estimate.of_share(own.authentic.sum().double(), m),
        Estimate.of_share(x, n),
        radius,
        closer_chance,
        int(theirs.bad.sum()),
        distinct,
    )


def difference(one: Estimate, two: Estimate) -> Estimate:
    """One share less another, independent, with Newcombe's interval (1998, method 10)."""
    value = one.value - two.value
    below, above = (
        math.hypot(one.value - one.low, two.high - two.value),
        math.hypot(one.high - one.value, two.value - two.low),
    )
    return Estimate(value, math.hypot(one.se, two.se), value - below, value + above)


def _words(found: Copies) -> str:
    n, m = len(found.ratio), len(found.reference_ratio)
    part, base = found.fraction, found.reference
    number = round(part.value * n)
    exact = int((found.distance[:, 0] == 0).sum())
    said = (
        f"{number} of {n} samples ({_percent(part.value)}, 95 %: {_percent(part.low)[:-2]} to {_percent(part.high)}) "
        f"are copies, less than {found.threshold:.2g} times as far from one training image as from the second nearest"
    )
    same = f", and {exact} {'equals' if exact == 1 else 'equal'} a training image exactly" if exact else ""
    who = found.reference_kind.replace(", each", "")
    verdict = "more than chance allows" if found.alarm else "no more than chance allows"
    sentences = [f"{said}{same}; of {who} {_percent(base.value)} are called so: {verdict} (chance {found.chance:.2g})."]
    near = round(found.closer.value * n)
    if found.closer_chance < CHANCE and not found.alarm:
        sentences.append(
            f"But {near} of them ({_percent(found.closer.value)}) are closer to the training set than all but 1 % of "
            f"{who} (chance {found.closer_chance:.2g}): copies of images that have near-duplicates, which the ratio "
            "misses, or images of less detail than the data's; look at them."
        )
    if found.diverged:
        sentences.append(f"{found.diverged} of the {n} samples diverged and are no copies.")
    units = m if found.reference_kind == KINDS[0] else m // 2
    if math.comb(n + units, n) <= 1 / CHANCE:
        sentences.append(f"With {n} samples and {m} reference images no number of copies could raise the alarm.")
    elif found.distinct < 10:
        sentences.append(f"The training set has only {found.distinct} distinct images: most of space is near to one.")
    return " ".join(sentences)


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if 0 < share < 0.995 else f"{100 * share:.0f} %"


def _opened(data: Any, test: Any) -> None:
    """Refuse sets that cannot be compared with."""
    for name, given in (("data", data), ("test", test)):
        known = isinstance(given, Empirical) or (given is None and name == "test")
        require(known, f"{name} must be an Empirical data set, not {type(given).__name__}.")
    if test is not None:
        require(test.shape == data.shape, f"Test images have shape {test.shape}, the data {data.shape}.")
        require(int((test.weights > 0).sum()) >= 2, "There is one test image; give two or more, or none.")


def _samples(samples: Any, data: Empirical) -> Tensor:
    """The samples ``(n, *shape)`` in float64; refuses what cannot be compared."""
    require(isinstance(samples, Tensor), f"Samples must be a tensor (n, *shape), not {type(samples).__name__}.")
    require(samples.ndim and len(samples), f"Samples must be (n, *shape) with n ≥ 1, not {tuple(samples.shape)}.")
    require(not samples.is_complex(), "Samples must be real.")
    shape = tuple(samples.shape[1:]) or (1,)
    require(shape == data.shape, f"Samples have shape {shape}, the data {data.shape}.")
    return samples.detach().cpu().double().reshape(-1, *shape)


def _described(images: Tensor, features: Features | None) -> Tensor:
    """Images ``(k, *shape)`` in the space where distances are taken, ``(k, F)`` in float64, chunk by chunk."""
    if features is None:
        return images.flatten(1).double().cpu()
    out = []
    for part in images.split(max(1, CHUNK // images[0].numel())):
        try:
            found = torch.as_tensor(features(part.to(torch.get_default_dtype()))).detach()
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"features failed on images of shape {tuple(part.shape)}: {error}") from error
        good = found.ndim == 2 and len(found) == len(part) and found.shape[1] > 0 and not found.is_complex()
        wanted = f"features must map {len(part)} images to a real matrix ({len(part)}, F)"
        require(good, f"{wanted}, not to {found.dtype} of shape {tuple(found.shape)}.")
        out.append(found.double().cpu())
    return torch.cat(out)
