r"""Do samples follow the law of the data, and do their brightness and contrast?

**Likeness** (theory, §10.5). Features of samples are compared with those of training images by Fréchet's and the kernel
distance, each beside its **floor**, that of as many real images: test images or, without these, training images that
were left out. Pixels are reduced to K principal components, and the norm of the rest, the **remainder**, is compared
too. K depends on the training set alone, so that audits of one data set can be compared whatever their number of
samples: 32, or as many of 16, 8, … 1 as there are training images for, four each. Fréchet's distance is left out where
there are K samples or fewer. 999 random exchanges of samples and real images give the chance of distances as large as
these, from the largest of these statistics: the kernel distance, that of the remainders, and Fréchet's distance to
second order, which has the kernel

.. math:: \kappa(w, w') = w \cdot w' + \frac14 \Big(\sum_j \frac{w_j w'_j}{\sqrt{\lambda_j}}\Big)^2

of centred features w along principal axes of variance :math:`\lambda_j`. The alarm is raised where chance < .01, or
where more than 1 % of the samples diverged: are not finite, or lie a million spreads from the data.

**Drift** compares per-image means and variances of samples with the data's: the share of samples of which one lies
outside the data's range (Wilson's interval), and the ratio of the spread over samples to that over the data, for the
means and for the variances (:func:`vkernel.core.estimate.ratio_of_spreads`). ``mean`` and ``variance`` are the shifts z
of the averages in units of the data's spread, with Welch's test; samples that scatter widely have a z that is noise.
The alarm is raised where one of four chances, of both z and of both shares outside
(:func:`vkernel.core.estimate.fisher_exact`), is below .01 *and* the drift is large: \|z\| > 1, or a share > .05. (Good
networks at 50 steps are often off by half a spread.)"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.checks import check_type
from vkernel.core.errors import require
from vkernel.core.estimate import Estimate, exact_share, fisher_exact, permutation_p, ratio_of_spreads
from vkernel.data.empirical import Empirical
from vkernel.metrics.augment import Augment
from vkernel.metrics.copies import check_samples
from vkernel.metrics.distances import frechet_distance, kernel, kernel_distance
from vkernel.metrics.features import Extractor, Features, Images, extractor

MOMENTS, PAIRS, PERMUTATIONS = 4096, 1024, 999  # training images; samples, and real images, in the test; exchanges
CHANCE = 0.01  # of a false alarm; and the share of diverged samples that raises it
LEAST = 8  # samples, and real images
DIVERGED = 1e6  # spreads of the data: beyond, a sample has diverged
SIZES, EACH = (32, 16, 8, 4, 2, 1), 4  # numbers of principal components; training images for each
TURNED, WEAKEST = 2048, 0.01  # features turned to principal axes; their least variance, in units of the mean
WORSE, ROUGHER = 3.0, 2.0  # times the distance, and the remainder, of real images: samples beyond are clearly worse
ROUNDING = 1e-9  # of numbers of order one
FAR, OUTSIDE = 1.0, 0.05  # the least z and the least share outside for an alarm of drift
Pair = tuple[float, float]


@dataclass(frozen=True)
class Likeness:
    """Distances of n samples from the training images, beside those of n ``real`` images (the floors). Fréchet's are
    ``None`` where there are too few samples for the ``k`` features, for the reason ``why``. ``remainder`` is the mean
    norm of the rest beyond principal components, as a multiple of that of real images; ``None`` where there is no rest.
    ``reduced`` is true if the ``features`` are fewer than requested. ``chance`` is that of distances as large as these
    by accident; ``diverged`` counts the samples left out.

    >>> import torch, vkernel as vk
    >>> train, held_out = vk.data.images("digits", 200, 100)
    >>> samples = train[:32]  # of a network that copies
    >>> found = vk.metrics.likeness(samples, train, held_out)
    >>> found.kernel.value < 3 * found.kernel_floor.high
    True
    """

    frechet: Estimate | None
    frechet_floor: Estimate | None
    kernel: Estimate
    kernel_floor: Estimate
    remainder: Estimate | None
    features: str
    k: int
    n: int
    reduced: bool
    real: str
    chance: float
    diverged: int
    alarm: bool
    why: str = ""

    @property
    def worse(self) -> bool:
        """Whether the samples are clearly farther from the training images than real images are: beyond chance, and
        farther than three times the upper end of the floor, or with a remainder twice that of real images."""
        far, floor = (self.kernel, self.kernel_floor) if self.frechet is None else (self.frechet, self.frechet_floor)
        worse = floor is not None and far.value > WORSE * max(floor.high, 0.0)
        return self.alarm and (worse or (self.remainder is not None and self.remainder.low > ROUGHER))


def likeness(
    samples: Tensor,
    data: Images,
    test: Images | None = None,
    *,
    features: Features = "pixels",
    seed: int = 0,
    augment: str | Augment | None = None,
) -> Likeness:
    """Measure how far the law of ``samples (n, *shape)`` is from that of training images; ``test`` were not seen. With
    ``augment`` (:mod:`~vkernel.metrics.augment`) both are shown in versions drawn at random, as in training.

    >>> import torch, vkernel as vk
    >>> train, held_out = vk.data.images("digits", 200, 100)
    >>> samples = train[:32]  # of a network that copies
    >>> vk.metrics.likeness(samples, train, held_out).alarm
    False
    """
    return RealImages(data, test, features, seed, augment).likeness(samples)


class RealImages:
    """Training images and other real images, of which features are prepared once; :meth:`likeness` compares samples
    with them. Arguments are those of :func:`likeness`."""

    def __init__(
        self, data: Images, test: Images | None, features: Features, seed: int, augment: str | Augment | None = None
    ) -> None:
        data = data if isinstance(data, Empirical) else Empirical(data)
        held = test if test is None or isinstance(test, Empirical) else Empirical(test)
        for name, images, least in (("training", data, LEAST if held else 2 * LEAST), ("test", held, LEAST)):
            count = least if images is None else int((images.weights > 0).sum())
            require(count >= least, f"Likeness needs {least} {name} images or more; there are {count}.")
        require(data.spread > 0, "All points of the data are equal; there is no law to compare with.")
        shape = data.shape if held is None else held.shape
        require(shape == data.shape, f"Training images have shape {data.shape} and test images {shape}.")
        self.data, self.test, self.extract, self.seed = data, held, extractor(features), seed
        self.augment = Augment.parse(augment, data.shape)
        self._prepared: dict[int, tuple[Empirical, Empirical, Extractor, bool, Tensor]] = {}

    def likeness(self, samples: Tensor) -> Likeness:
        """Measure how far the law of ``samples (n, *shape)`` is from that of training images."""
        data, real = self.data, "left-out training" if self.test is None else "test"
        x = check_samples(samples, data, least=0).to(data.device)
        near = (x.flatten(1) - data.center).norm(dim=1) <= DIVERGED * data.spread  # false of NaN
        good, diverged = x[near].to(data.dtype), int((~near).sum())
        if len(good) < LEAST:
            none = Estimate[float].unknown()
            few = (self.extract.name, 0, len(good), False, real)
            return Likeness(none, none, none, none, None, *few, math.nan, diverged, diverged > 0)
        held, train, extract, reduced, state = self._real(good)
        g = torch.Generator()
        g.set_state(state)  # each set of samples continues the stream where the real images left it
        n = min(len(good), held.n)
        shuffled = good[torch.randperm(len(good), generator=g).to(good.device)]
        sets = (shuffled, None), (held, held.choose(held.n, g)), (train, train.choose(train.n, g))
        a, b, c = (extract.over(*images) for images in sets)
        rest = [extract.remainder().over(*images) for images in sets] if extract.components else []
        k, far, floor = a.shape[1], None, None
        if enough := min(n, len(c)) > k:
            far, floor = frechet_distance(a[:n], c), frechet_distance(b[:n], c)
        lacking = f"{n} samples and {len(c):,} training images" if len(c) <= k else f"{n} samples"
        why = "" if enough else f"covariances of {k} features need {k + 1} images or more; there are {lacking}."
        mmd, mmd_floor = kernel_distance(a[:n], c), kernel_distance(b[:n], c)
        remainder = _ratio(rest[0][:n], rest[1][:n]) if rest else None
        chance = _chance((a, b, c), rest, rng.stream(self.seed, "exchanges for likeness"))
        alarm, about = chance < CHANCE or diverged > CHANCE * len(x), (extract.name, k, n, reduced, real)
        return Likeness(far, floor, mmd, mmd_floor, remainder, *about, chance, diverged, alarm, why)

    def _real(self, good: Tensor) -> tuple[Empirical, Empirical, Extractor, bool, Tensor]:
        """Return real images for so many samples, training images, the extractor fitted on these, whether it has fewer
        features than requested, and the state of the random stream after these choices."""
        wanted = max(len(good), PAIRS)
        if wanted not in self._prepared:
            data, extract, g = self.data, self.extract, rng.stream(self.seed, "images for likeness")
            held, train = (self.augment.drawn(images, g) for images in _chosen(data, self.test, wanted, g))
            state = g.get_state()
            size = next(size for size in SIZES if EACH * size <= int((data.weights > 0).sum()))
            reduced = not extract.custom and extract.components is None and extract(good[:1]).shape[1] > size
            extract = (extract.reduced(size) if reduced else extract).fit(train, self.seed)
            self._prepared[wanted] = held, train, extract, reduced, state
        return self._prepared[wanted]


def _chosen(data: Empirical, test: Empirical | None, wanted: int, g: torch.Generator) -> tuple[Empirical, Empirical]:
    """Return at most ``wanted`` real images, of the test set or left out of the training set, and training images."""
    order = data.choose(data.n, g, distinct=True)
    if test is not None:
        return test.to(data.device).subset(test.choose(wanted, g, distinct=True)), data.subset(order[:MOMENTS])
    count = min(wanted, len(order) // 2)
    return data.subset(order[:count]), data.subset(order[count:][:MOMENTS])


def _ratio(x: Tensor, y: Tensor) -> Estimate | None:
    """Return the mean of x as a multiple of that of y, if this is more than rounding."""
    over, under = float(x.mean()), float(y.mean())
    if under < ROUNDING:
        return None
    parts = [(float(x.var()) / (len(x) * under**2), len(x)), (float(y.var()) * over**2 / (len(y) * under**4), len(y))]
    return Estimate.of_variances(over / under, parts, 0.0)


def _chance(features: Sequence[Tensor], rest: Sequence[Tensor], g: torch.Generator) -> float:
    """Return the chance of distances as large as these, from features and remainders of samples, real and training."""
    n, m = (len(f[:PAIRS]) for f in features[:2])
    sets = ([part.double().cpu() for part in parts] for parts in (features, rest) if parts)
    (pool, train), *others = ((torch.cat([x[:PAIRS], y[:PAIRS]]), z) for x, y, z in sets)
    standard = [(r - own.mean()) / own.std().clamp_min(ROUNDING) for r, own in others]
    orders = torch.rand(PERMUTATIONS, n + m, generator=g, dtype=torch.float64).argsort(1)
    places = torch.cat([torch.arange(n + m)[None], orders]).lt(n).double()
    statistics = (kernel(pool, pool), _second_order(pool, train), *(kernel(r, r) for r in standard))
    theta = torch.stack([_exchanged(pairs, places) for pairs in statistics]).amax(0)
    return permutation_p(float(theta[0]), theta[1:], ROUNDING)


def _exchanged(pairs: Tensor, places: Tensor) -> Tensor:
    """Return the statistic for each row of ``places`` (1 in the place of a sample, 0 else), standardised over rows."""
    pairs = pairs.fill_diagonal_(0)
    pairs = pairs / pairs.abs().mean().clamp_min(1e-300)
    n, m, rows = places[0].sum(), (1 - places[0]).sum(), pairs.sum(1)
    inside, touching = ((places @ pairs) * places).sum(1), places @ rows  # p·K p and p·K 1
    value = inside / (n * (n - 1)) - 2 * (touching - inside) / (n * m)
    value += (rows.sum() - 2 * touching + inside) / (m * (m - 1))
    return (value - value.mean()) / value.std().clamp_min(ROUNDING)


def _second_order(pool: Tensor, train: Tensor) -> Tensor:
    """Return pairs of the kernel that Fréchet's distance has near the law of the training images."""
    center = train.mean(0)
    pool, train = pool - center, train - center
    if train.shape[1] <= TURNED:
        axes = torch.linalg.eigh(train.mT @ train).eigenvectors
        pool, train = pool @ axes, train @ axes
    variances = train.square().mean(0)
    weak = pool / variances.clamp_min(WEAKEST * float(variances.mean()) + 1e-300) ** 0.25
    return pool @ pool.mT + (weak @ weak.mT).square() / 4


@dataclass(frozen=True)
class Drift:
    """Per-image means and variances of samples beside the data's. ``share`` of the samples have one of them outside the
    data's range, ``outside_mean`` and ``outside_variance`` of them this one; ``spread_mean`` and ``spread_variance``
    are ratios of the spread over samples to that over the data, ``mean`` and ``variance`` the shifts z. ``data_mean``
    and ``sample_mean`` hold the average and the spread over images of the per-image means; ``chances`` those of z and
    of the share outside, for ``mean`` and ``variance``.

    >>> import torch, vkernel as vk
    >>> train, held_out = vk.data.images("digits", 200, 100)
    >>> found = vk.metrics.drift(train[:50] + 1, train)  # brighter by half of the range
    >>> found.share.value > 0.5
    True
    """

    share: Estimate
    spread_mean: Estimate
    spread_variance: Estimate
    mean: Estimate
    variance: Estimate
    outside_mean: Estimate
    outside_variance: Estimate
    data_mean: Pair
    sample_mean: Pair
    chances: dict[str, Pair]

    @property
    def shifted(self) -> dict[str, Estimate]:
        """The moments whose average is shifted, with z."""
        moments = {"mean": self.mean, "variance": self.variance}
        return {name: z for name, z in moments.items() if self.chances[name][0] < CHANCE}

    @property
    def far(self) -> dict[str, Estimate]:
        """The moments whose average is shifted by more than a spread, with z."""
        return {name: z for name, z in self.shifted.items() if abs(z.value) > FAR}

    @property
    def outside(self) -> dict[str, float]:
        """The moments of which too many lie outside the data's range, with their share."""
        share = {"mean": self.outside_mean.value, "variance": self.outside_variance.value}
        return {name: p for name, p in share.items() if self.chances[name][1] < CHANCE and p > OUTSIDE}

    @property
    def alarm(self) -> bool:
        """Whether a moment is shifted far, or too often outside the data's range."""
        return bool(self.far or self.outside)


def drift(samples: Tensor, data: Empirical, moments: Tensor | None = None) -> Drift:
    """Compare per-image means and variances of ``samples (n, *shape)`` with the data's; NaN are outside its range.
    ``moments`` are what ``data_moments(data)`` returned before; they are measured if they are not given.

    >>> import torch, vkernel as vk
    >>> train, held_out = vk.data.images("digits", 200, 100)
    >>> vk.metrics.drift(held_out[:50], train).share.value < 0.2
    True
    """
    x = check_samples(samples, check_type(data, "data", Empirical), least=0)
    require(len(x) >= 4 and data.n >= 4, f"Drift needs 4 samples and 4 data; got {len(x)} and {data.n}.")
    weights = data.weights.cpu()
    own, theirs, weights = data_moments(data) if moments is None else moments, image_moments(x), weights[weights > 0]
    floor = 1e-6 * max(data.spread / math.sqrt(data.d), 1e-30)
    mean, variance = (_shift(theirs[:, i], own[:, i], weights, floor ** (i + 1)) for i in (0, 1))
    chances = {"mean": mean[2], "variance": variance[2]}
    outside = ~((theirs <= own.amax(0)) & (theirs >= own.amin(0))).all(1)  # NaN are outside
    share: Estimate = Estimate.of_share(outside.sum(), len(x))
    finite = theirs[theirs.isfinite().all(1)]
    wide = [ratio_of_spreads(finite[:, i], own[:, i], weights, floor ** (i + 1)) for i in (0, 1)]
    return Drift(share, wide[0], wide[1], mean[0], variance[0], mean[1], variance[1], mean[3], mean[4], chances)


def data_moments(data: Empirical) -> Tensor:
    """Return the mean and the variance of each image of the data that has weight, ``(n, 2)``, in float64."""
    kept = data.weights.cpu().nonzero()[:, 0]
    return torch.cat([image_moments(data.take(some)) for some in kept.split(2048)])


def image_moments(images: Tensor) -> Tensor:
    """Return the mean and the variance over coordinates of each image, ``(n, 2)``, in float64."""
    rows = images.detach().double().flatten(1).cpu()
    mean = rows.mean(1, keepdim=True)
    return torch.cat([mean, (rows - mean).square().mean(1, keepdim=True)], 1)


def _shift(theirs: Tensor, own: Tensor, weights: Tensor, floor: float) -> tuple[Estimate, Estimate, Pair, Pair, Pair]:
    """Return z, the share outside, the chances of both, and averages with spreads of the data and of the samples."""
    from scipy import stats

    n, size = len(theirs), float(1 / weights.square().sum())
    good, center = theirs[theirs.isfinite()], float(weights @ own)
    spread = math.sqrt(float(weights @ (own - center).square()) * size / max(size - 1, 1e-9))
    there, width = (float(good.mean()), float(good.std())) if len(good) > 1 else (math.inf, 0.0)
    unit, dof = max(spread, floor), max(1, int(min(n, size)) - 1)
    z, se = (there - center) / unit, math.hypot(width / math.sqrt(max(len(good), 1)), spread / math.sqrt(size)) / unit
    chance = 2 * float(stats.t.sf(abs(z) / max(se, 1e-12), dof))
    above, below = int((~(theirs <= own.max())).sum()), int((theirs < own.min()).sum())
    rare = 2 * min(fisher_exact(above, n, 0, size), fisher_exact(below, n, 0, size))
    z_value, outside = Estimate[float].of_error(z, se, dof), exact_share(above + below, n)
    return z_value, outside, (chance, rare), (center, spread), (there, width)
