r"""Do the samples follow the law of the data?

Features of n samples (:mod:`~vkernel.reports.audit.extractors`) are compared with those of training images, at most
10,000
drawn at random, by two distances of :mod:`vkernel.metrics`: Fréchet's, of means and covariances, and the kernel
distance, of all moments up to the third. Noise is distance too, and so each comes with its **floor**: the distance
that n real images have from the same training images, fresh ones (``test``) or, without these, training images that
were left out of everything else. A distance is large or small in units of the floor.

**The features.** Covariances of k features want many more than k samples. Where :math:`k \ge n/2` pixels are reduced
to principal components (fitted on the training images alone), as many of 64, 32, … 1 as there are samples for, four
each. What these leave out is not lost: its length, one number for each image, is the **remainder**; samples' are
compared with those of real images, for noise on the pixels shows there. The user's own features are never reduced;
Fréchet's distance is left out where there are k samples or fewer.

**The test.** If the samples follow the law of the data, they and the real images could be exchanged for each other.
Statistics are followed through 999 random exchanges, all of the form :math:`E\,\kappa(X,X') + E\,\kappa(Y,Y') - 2E
\,\kappa(X,Y)`: the kernel distance, and Fréchet's distance to second order about the training images, whose features
have mean c and covariance :math:`\sum_j \lambda_j e_j e_j^T`: with :math:`w_j = e_j \cdot (x - c)`,

.. math:: |\delta m|^2 + \sum_{ij} \frac{(\delta A_{ij})^2}{2(\lambda_i + \lambda_j)} \approx \text{(geometric means)}
          \quad \kappa(w, w') = w \cdot w' + \frac14 \Big(\sum_j \frac{w_j w'_j}{\sqrt{\lambda_j}}\Big)^2 .

[The first sees strong components and third moments, the second weak components. :math:`\lambda` is taken as 1 % of its
mean at least, and beyond 2,048 features they are not turned to principal axes.] Of principal components there is a
third, the kernel distance of the remainders, standardised by those of training images. Each less its mean over the
exchanges and over its spread, :math:`\theta` is the largest, and

.. math:: \mathrm{chance} = \frac{1 + \#\{i: \theta_i \ge \theta_0\}}{1 + 999}

is at most p with a probability of at most p, whatever the law and the number of samples: features depend on the other
training images alone. The alarm is raised where chance < .01, or where more than 1 % of the samples diverged: are not
finite, or lie a million spreads from the data. (Left-out training images can be exchanged with samples of a model that
does not remember them; of one that copies all alike, nearly. Where images have different weights they are drawn by
these, with replacement, and the chance is approximate.) No model is perfect, and with enough samples the test finds any
fault: the size of the distance matters, the alarm says only that it is no accident. Fréchet's distance being biased,
its interval is for the distance at this n, floor included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.errors import InputError, require
from vkernel.core.estimate import Estimate
from vkernel.data.empirical import Empirical
from vkernel.metrics import frechet_distance, kernel_distance
from vkernel.metrics.distances import kernel
from vkernel.reports.audit.extractors import Extractor, extractor
from vkernel.reports.audit.levels import chosen

__all__ = ["Likeness", "likeness"]

MOMENTS = 4096  # training images
PAIRS = 1024  # samples, and real images, in the test
PERMUTATIONS = 999
CHANCE = 0.01  # of an alarm by accident; and the share of diverged samples that raises it
LEAST = 8  # samples, and real images
FAR = 1e6  # spreads of the data: beyond, a sample has diverged
SIZES = (64, 32, 16, 8, 4, 2, 1)  # numbers of principal components
EACH = 4  # samples for each
TURNED, WEAKEST = 2048, 0.01  # features turned to principal axes; their least variance, in units of the mean
_ROUNDING = 1e-9  # of numbers of order one
_UNKNOWN = Estimate(math.nan, math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class Likeness:
    """What :func:`likeness` found.

    ``frechet`` and ``kernel`` are the distances of n samples from the training images, ``frechet_floor`` and
    ``kernel_floor`` those of n real images (``real``: test, or left out of training); Fréchet's are ``None`` where
    there are too few samples for the ``k`` features. ``remainder`` is the mean length of what principal components
    leave out of samples, as a multiple of that of real images; ``None`` where nothing is left out. ``features`` are
    those used, ``reduced`` says that they are fewer than were asked for. ``chance`` is that of distances from real
    images as large as these by accident; ``diverged`` counts the samples left out.
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
    words: str


def likeness(
    samples: Tensor,
    data: Empirical | Tensor,
    test: Empirical | Tensor | None = None,
    *,
    features: Any = "pixels",
    seed: int = 0,
) -> Likeness:
    """How far the law of ``samples (n, *shape)`` is from that of the training images ``data``, in the same units.

    ``test`` are images of the same law that the model did not see; ``features`` is what
    :func:`~vkernel.reports.audit.extractor` takes.
    """
    data = _opened(data, "training", LEAST if test is not None else 2 * LEAST)
    held = None if test is None else _opened(test, "test", LEAST).to(data.device)
    require(data.spread > 0, "All points of the data are equal; there is no law to compare with.")
    if held is not None:
        require(held.shape == data.shape, f"Training images have shape {data.shape} and test images {held.shape}.")
    extract, real = extractor(features), "left-out training" if held is None else "test"
    good, diverged = _good(samples, data)
    if len(good) < LEAST:
        lost = f", {diverged} having diverged" if diverged else ""
        words = f"Whether samples follow the law of the data is unknown: {len(good)} are left{lost}; {LEAST} will do."
        few = (_UNKNOWN, _UNKNOWN, _UNKNOWN, _UNKNOWN, None, extract.name, 0, len(good), False)
        return Likeness(*few, real, math.nan, diverged, diverged > 0, words)
    g = rng.stream(seed, "images for likeness")
    train, held = _split(data, held, max(len(good), PAIRS), g)
    n = min(len(good), held.n)
    shuffled = good[torch.randperm(len(good), generator=g).to(good.device)]
    extract, reduced = _affordable(extract, shuffled[:1], min(n, train.n))
    extract = extract.fit(train, seed)
    sets = (shuffled, None), (held, chosen(held, held.n, g)), (train, chosen(train, train.n, g))
    x, y, z = (extract.over(*images) for images in sets)
    rest = [extract.remainder().over(*images) for images in sets] if extract.components else []
    distance, why = _frechet(x[:n], y[:n], z)
    mmd = kernel_distance(x[:n], z), kernel_distance(y[:n], z)
    left = _ratio(rest[0][:n], rest[1][:n]) if rest else None
    chance = _chance((x, y, z), rest, rng.stream(seed, "exchanges for likeness"))
    alarm = chance < CHANCE or diverged > CHANCE * (len(good) + diverged)
    k = x.shape[1]
    words = (
        f"Samples {'can' if chance < CHANCE else 'cannot'} be told from {real} images (chance {chance:.3f}): "
        f"{_told(distance, mmd, left, _on(extract, k), n, real)}.{why}"
        + (f" {diverged} samples diverged and are left out." if diverged else "")
    )
    return Likeness(*distance, *mmd, left, extract.name, k, n, reduced, real, chance, diverged, alarm, words)


def _opened(points: Any, name: str, least: int) -> Empirical:
    points = points if isinstance(points, Empirical) else Empirical(points)
    count = int((points.weights > 0).sum())
    require(count >= least, f"Likeness needs {least} {name} images or more; there are {count}.")
    return points


def _good(samples: Any, data: Empirical) -> tuple[Tensor, int]:
    """The samples that did not diverge, in the type of the data, and how many did."""
    require(isinstance(samples, Tensor), f"Samples must be a tensor (n, *shape), not {type(samples).__name__}.")
    shape = tuple(samples.shape[1:]) or (1,)
    require(samples.ndim and shape == data.shape, f"Samples have shape {shape}, the data {data.shape}.")
    rows = samples.detach().to(data.device).double().reshape(len(samples), data.d)
    near = (rows - data.center).norm(dim=1) <= FAR * data.spread  # false of what is not a number
    return rows[near].reshape(-1, *data.shape).to(data.dtype), int((~near).sum())


def _split(data: Empirical, held: Empirical | None, wanted: int, g: torch.Generator) -> tuple[Empirical, Empirical]:
    """Training images for moments, and real images to compare with: test images, or training images left out."""
    order = chosen(data, data.n, g, distinct=True)
    if held is None:
        count = min(wanted, len(order) // 2)
        held, order = data.subset(order[:count]), order[count:]
    else:
        held = held.subset(chosen(held, wanted, g, distinct=True))
    return data.subset(order[:MOMENTS]), held


def _affordable(extract: Extractor, one: Tensor, n: int) -> tuple[Extractor, bool]:
    """The features, reduced if they are pixels and too many for n samples; and whether they were."""
    if extract.theirs or extract.components is not None or 2 * extract(one).shape[1] < n:
        return extract, False
    return extract.reduced(next(size for size in SIZES if EACH * size <= n)), True


def _frechet(x: Tensor, y: Tensor, z: Tensor) -> tuple[tuple[Estimate | None, Estimate | None], str]:
    """The distance and its floor, or why there are none."""
    try:
        return (frechet_distance(x, z), frechet_distance(y, z)), ""
    except InputError as error:
        return (None, None), f" Fréchet's distance is left out: {error}"


def _ratio(x: Tensor, y: Tensor) -> Estimate | None:
    """The mean of x as a multiple of that of y, if this is more than rounding."""
    over, under = float(x.mean()), float(y.mean())
    if under < _ROUNDING:
        return None
    parts = [(float(x.var()) / (len(x) * under**2), len(x)), (float(y.var()) * over**2 / (len(y) * under**4), len(y))]
    return Estimate.of_variances(over / under, parts, 0.0, math.inf)


def _chance(features: Sequence[Tensor], rest: Sequence[Tensor], g: torch.Generator) -> float:
    """Of distances as large as these if samples and real images are exchanged at random.

    ``features`` are of samples, real images and training images, and so are the remainders ``rest``, if there are any.
    """
    n, m = (len(f[:PAIRS]) for f in features[:2])
    (pool, train), *others = (
        (torch.cat([x[:PAIRS], y[:PAIRS]]).double().cpu(), z.double().cpu())
        for x, y, z in ([features, rest] if rest else [features])
    )
    standard = [(r - own.mean()) / own.std().clamp_min(_ROUNDING) for r, own in others]
    orders = torch.rand(PERMUTATIONS, n + m, generator=g, dtype=torch.float64).argsort(1)
    places = torch.cat([torch.arange(n + m)[None], orders]).lt(n).double()
    statistics = (kernel(pool, pool), _second_order(pool, train), *(kernel(r, r) for r in standard))
    theta = torch.stack([_exchanged(pairs, places) for pairs in statistics]).amax(0)
    return (1 + int((theta[1:] >= theta[0] - _ROUNDING).sum())) / (1 + PERMUTATIONS)


def _exchanged(pairs: Tensor, places: Tensor) -> Tensor:
    """The statistic of each row of ``places`` (1 in the place of a sample, 0 else), standardised over rows.

    Sums over pairs K within and between the two sets are made of p·K p and p·K 1.
    """
    pairs = pairs.fill_diagonal_(0)
    pairs = pairs / pairs.abs().mean().clamp_min(1e-300)
    n, m, rows = places[0].sum(), (1 - places[0]).sum(), pairs.sum(1)
    inside, touching = ((places @ pairs) * places).sum(1), places @ rows
    value = inside / (n * (n - 1)) - 2 * (touching - inside) / (n * m)
    value += (rows.sum() - 2 * touching + inside) / (m * (m - 1))
    return (value - value.mean()) / value.std().clamp_min(_ROUNDING)


def _second_order(pool: Tensor, train: Tensor) -> Tensor:
    """Pairs of the kernel that Fréchet's distance has near the law of the training images."""
    center = train.mean(0)
    pool, train = pool - center, train - center
    if train.shape[1] <= TURNED:
        axes = torch.linalg.eigh(train.mT @ train).eigenvectors
        pool, train = pool @ axes, train @ axes
    variances = train.square().mean(0)
    weak = pool / variances.clamp_min(WEAKEST * float(variances.mean()) + 1e-300) ** 0.25
    return pool @ pool.mT + (weak @ weak.mT).square() / 4


def _on(extract: Extractor, k: int) -> str:
    if extract.components is not None:
        of = extract.name.partition(" of ")[2]
        return f"{k} principal component{'s' if k > 1 else ''}" + (f" of {of}" if of else "")
    return f"{k} {'features ' if extract.theirs else ''}{extract.name}"


def _told(
    frechet: tuple[Any, Any], mmd: tuple[Estimate, Estimate], left: Estimate | None, on: str, n: int, real: str
) -> str:
    far, floor = frechet
    what = f"; what is left out is {_interval(left)} times theirs" if left else ""
    if far is None:
        return f"kernel distance {_interval(mmd[0])} on {on}, where {n} {real} images have {_interval(mmd[1])}{what}"
    times = f"{far.value / floor.value:.2g} times " if floor.value > 0 else ""
    return (
        f"Fréchet distance {_interval(far)} on {on}, {times}the {floor.value:.3g} of {n} {real} images; "
        f"kernel distance {_interval(mmd[0])}, theirs {_interval(mmd[1])}{what}"
    )


def _interval(e: Estimate) -> str:
    return f"{e.value:.3g} ({e.low:.3g} to {e.high:.3g})"
