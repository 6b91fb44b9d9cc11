"""Samples beside the data: copies, drift and distances of one set of samples, whoever drew them.

:class:`Comparison` holds the training set, its test set and the reference images; it compares any number of sets of
samples with them: those that an audit draws from networks, and those that were saved by another program."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from vkernel.core.errors import InputError, require
from vkernel.data import Empirical, load
from vkernel.metrics import Drift, Likeness, Texture, drift, texture
from vkernel.metrics.augment import Augment
from vkernel.metrics.copies import Copies, Reference
from vkernel.metrics.features import Extractor, extractor
from vkernel.metrics.likeness import RealImages, data_moments
from vkernel.metrics.repeats import Repeats
from vkernel.reports.audit.report import LOST

Data = Empirical | Tensor | str | Path
FEWEST = 16  # training images, and saved samples
IN_MEMORY = 1 << 28  # numbers of a memory map that is read at once


@dataclass(frozen=True)
class SampleAudit:
    """Samples ``(n, *shape)`` of one sampler in the network's pixel units, compared with the data."""

    kind: str
    steps: int
    images: Tensor = field(repr=False, metadata={"files": False})
    copies: Copies
    standardised: Copies | None
    drift: Drift
    likeness: Likeness
    texture: Texture | None = None  # of images whose neighbouring pixels are alike
    coarse: bool = False  # whether the sampler took too few of its steps to show copies

    @property
    def are_images(self) -> bool:
        """Whether samples can be compared with images: most are finite, and most are no noise."""
        lost = self.copies.diverged > LOST * len(self.images)
        return not (lost or (self.texture is not None and self.texture.noisy))

    @property
    def remoteness(self) -> float:
        """The median distance of samples from their nearest training images, in units of that of real images."""
        found = self.comparison
        real = float(found.reference_distance[:, 0].median())
        return float(found.distance[:, 0].median()) / real if real > 0 else 0.0

    @property
    def comparison(self) -> Copies:
        """The comparison that decides: without brightness and contrast where these have drifted."""
        return self.standardised or self.copies


@dataclass(frozen=True)
class SavedAudit:
    """The results of saved samples, in the units of the data; ``repeats`` compares them with one another, ``range`` are
    the values of black and white, if known."""

    name: str
    samples: dict[str, SampleAudit] = field(repr=False)
    repeats: Repeats | None
    range: tuple[float, float] | None = None


@dataclass(eq=False)
class Comparison:
    """Data in the units of the samples; at most ``reference`` real images are compared with them. What is measured on
    real images alone is measured once, for the first set of samples."""

    data: Empirical
    test: Empirical | None
    extract: Extractor
    threshold: float
    reference: int
    seed: int
    augment: Augment = field(default_factory=Augment)

    def __post_init__(self) -> None:
        self.references: dict[str, Reference] = {}

    @functools.cached_property
    def moments(self) -> Tensor:
        """The mean and the variance of each training image."""
        return data_moments(self.data)

    @functools.cached_property
    def real(self) -> RealImages:
        """The training images and the real images beside which laws of samples are measured."""
        return RealImages(self.data, self.test, self.extract, self.seed, self.augment)

    def of(self, x: Tensor, kind: str, steps: int, coarse: bool = False) -> SampleAudit:
        """Compare the samples ``x (n, *shape)`` that a sampler ``kind`` drew in so many steps."""
        moved, near, plain = drift(x, self.data, self.moments), self._copies(x, self.extract), None
        if moved.alarm and self.extract.plain and len(self.data.shape) > 1:
            plain = self._copies(x, extractor("standardised"))
        return SampleAudit(kind, steps, x, near, plain, moved, self.real.likeness(x), texture(x, self.data), coarse)

    def _copies(self, x: Tensor, extract: Extractor) -> Copies:
        if extract.name not in self.references:
            given = (self.data, self.test, extract, self.reference, self.seed, self.augment)
            self.references[extract.name] = Reference(*given)
        return self.references[extract.name].copies(x, self.threshold)


def as_data(data: Data, kind: str) -> Empirical:
    """Return data of any form; ``kind`` names them in errors."""
    if isinstance(data, str | Path):
        return load(data)
    try:
        return data if isinstance(data, Empirical) else Empirical(data)
    except InputError as error:
        raise InputError(f"The {kind} data cannot be used: {error}") from error


def check_count(data: Empirical) -> None:
    """Refuse a training set of too few images."""
    require((data.weights > 0).sum() >= FEWEST, f"An audit needs {FEWEST} training images or more; got {data.n}.")


def in_memory(data: Empirical) -> Empirical:
    """Return data that are read many times: a small memory map is loaded."""
    return data.loaded() if data.n * data.d <= IN_MEMORY else data
