r"""Do samples repeat one another?

Of n samples and n real images the distance of each to its nearest other is measured. Let ``radius`` be the distance
within which 1 % of the real images have another. A sample **repeats** another if it has one within ``radius``; where a
generator has collapsed to few images most samples do. With a such samples and b such real images, counted as pairs,

.. math:: \mathrm{chance} = P(A \ge a/2), \qquad A \sim \mathrm{Hypergeometric}(n,\, (a + b)/2,\, n/2) ;

the alarm is raised below .01 if more than a tenth of the samples repeat another: samples with less detail than the
data are closer to one another too. Nearest distances fall with the number of images: both sets have the same."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.checks import check_type
from vkernel.core.errors import require
from vkernel.core.estimate import Estimate, fisher_exact
from vkernel.data.empirical import Empirical
from vkernel.metrics.copies import CHANCE, CLOSEST, check_samples
from vkernel.metrics.features import Extractor, Features, extractor
from vkernel.metrics.samples import nearest

MOST, LEAST = 4096, 16  # samples that are compared with one another; the fewest
MANY = 0.1  # of the samples: fewer that repeat another raise no alarm


@dataclass(frozen=True)
class Repeats:
    """The shares of n samples and of n ``real`` images that repeat another. ``distance (n,)`` of each sample to its
    nearest other, whose index is ``other``; ``which`` are the samples compared. ``equal`` counts samples that equal
    another exactly.

    >>> import torch, vkernel as vk
    >>> train, held_out = vk.data.images("digits", 200, 100)
    >>> found = vk.metrics.repeats(torch.cat([train[:20], train[:1]]), train, held_out)
    >>> found.equal
    2
    """

    fraction: Estimate
    reference: Estimate
    radius: float
    chance: float
    equal: int
    n: int
    real: str
    which: Tensor = field(repr=False)
    other: Tensor = field(repr=False)
    distance: Tensor = field(repr=False)

    @property
    def alarm(self) -> bool:
        """Whether many samples repeat one another, and more than chance allows."""
        return self.chance < CHANCE and bool(self.fraction.value > MANY)


def repeats(
    samples: Tensor, data: Empirical, test: Empirical | None = None, *, features: Features = "pixels", seed: int = 0
) -> Repeats | None:
    """Compare ``samples (n, *shape)`` with one another, and as many real images: test images if there are enough, else
    training images. ``None`` if fewer than 16 samples are finite, or fewer than 16 images real.

    >>> import torch, vkernel as vk
    >>> train, held_out = vk.data.images("digits", 200, 100)
    >>> vk.metrics.repeats(held_out[:32], train, held_out).equal
    0
    """
    x = check_samples(samples, check_type(data, "data", Empirical), least=0)
    require(test is None or test.shape == data.shape, f"Test images do not have the data's shape {data.shape}.")
    good, extract = x.flatten(1).isfinite().all(1).nonzero()[:, 0], extractor(features).fit(data, seed)
    order, wanted = rng.stream(seed, "samples that are compared with one another"), min(len(good), MOST)
    enough = test is not None and int((test.weights > 0).sum()) >= wanted
    held = test if test is not None and enough else data
    picked = held.choose(wanted, order, distinct=True)
    n = len(picked)
    if n < LEAST:
        return None
    which = good[torch.randperm(len(good), generator=order)[:n]].sort().values
    theirs, near = _to_others(extract, x[which].to(torch.get_default_dtype()))
    own, _ = _to_others(extract, held, picked)
    radius = float(own.kthvalue(max(1, round(CLOSEST * n))).values)
    a, b = int((theirs <= radius).sum()), int((own <= radius).sum())
    chance = fisher_exact(math.ceil(a / 2), n // 2, math.ceil(b / 2), n // 2)
    shares = Estimate[float].of_share(a, n), Estimate[float].of_share(b, n)
    real = "test" if enough else "training"
    return Repeats(*shares, radius, chance, int((theirs == 0).sum()), n, real, which, which[near], theirs)


def _to_others(extract: Extractor, images: Empirical | Tensor, picked: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the distance of each image to its nearest other, and the index of that one."""
    points = Empirical(extract.over(images, picked).double().cpu())
    rows = torch.arange(points.n)
    distance, index = nearest(points.take(rows), points, 1, rows)
    return distance[:, 0], index[:, 0]
