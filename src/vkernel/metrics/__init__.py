r"""Masses and distances of laws, each an :class:`~vkernel.core.estimate.Estimate` with a 95 % interval.

A sample is ``(n, *shape)``, or ``(n,)`` for numbers; an ensemble, one sample for each of M members, is ``(M, n,
*shape)``. The error is over *units*: the members of an ensemble, the points of a sample. Without ``members``, three
axes mean an ensemble of vectors and fewer mean a sample; functions that know the training set go by its shape. All is
computed in float64, on the device of the (first) sample.

*Masses* (:mod:`~vkernel.metrics.masses`) are linear in the law: the mean of the units' shares, with Student's interval
for members and Wilson's for the points of one sample. *Distances* (:mod:`~vkernel.metrics.distances`) are between
average laws: members are pooled. Energy and kernel distance are unbiased. Total variation, Wasserstein's and Fréchet's
distance of finite samples are biased upwards, since noise is distance too; errors do not contain this bias (theory,
§10). *Samples of images against their training set*: copies (:mod:`~vkernel.metrics.copies`), drift and likeness of
laws (:mod:`~vkernel.metrics.likeness`), texture (:mod:`~vkernel.metrics.texture`), repeats
(:mod:`~vkernel.metrics.repeats`), in features (:mod:`~vkernel.metrics.features`)."""

from vkernel.metrics import masses
from vkernel.metrics.augment import Augment, Augmented
from vkernel.metrics.copies import Copies, copies
from vkernel.metrics.distances import (
    PairMeans,
    energy_distance,
    frechet_distance,
    kernel_distance,
    pair_means,
    wasserstein,
)
from vkernel.metrics.features import Extractor, extractor
from vkernel.metrics.likeness import Drift, Likeness, drift, likeness
from vkernel.metrics.masses import *
from vkernel.metrics.population import Generalization, generalization
from vkernel.metrics.repeats import Repeats, repeats
from vkernel.metrics.samples import Reading, distinct, nearest
from vkernel.metrics.texture import Texture, texture

__all__ = ["Augment", "Augmented", "Copies", "Drift", "Extractor", "Generalization", "Likeness", "PairMeans"]
__all__ += [
    "Reading",
    "Repeats",
    "Texture",
    "copies",
    "distinct",
    "drift",
    "energy_distance",
    "extractor",
    "frechet_distance",
    "generalization",
    "kernel_distance",
    "likeness",
    "nearest",
    "pair_means",
    "repeats",
    "texture",
    "wasserstein",
    *masses.__all__,
]
