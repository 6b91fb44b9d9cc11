"""Training sets: :class:`Empirical`, loaders of files, and toy sets."""

from vkernel.data.empirical import TOYS, Empirical, digits, toy
from vkernel.data.loaders import load

__all__ = ["TOYS", "Empirical", "digits", "load", "toy"]
