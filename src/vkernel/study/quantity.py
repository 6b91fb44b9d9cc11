"""A labelled array of a store: its dimensions beyond the factors of the grid, and what it means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Quantity:
    """An array of the store: ``coordinates`` are its own dimensions, after those of the grid and ``member``. With
    ``per_member=False`` it has no ``member``: it is the same for all members of a condition."""

    about: str
    unit: str = ""
    coordinates: Mapping[str, np.ndarray] = field(default_factory=dict)
    dtype: str = "float64"
    per_member: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """The lengths of its own dimensions."""
        return tuple(len(c) for c in self.coordinates.values())
