"""Training sets: :class:`Empirical`, :func:`load` for files, toy sets, and known populations."""

from vkernel.data.empirical import Empirical, fingerprint
from vkernel.data.loaders import load
from vkernel.data.toys import TOYS, digits, ell, hexagon, line, pair, population, random_six, square, toy, triple

__all__ = ["TOYS", "Empirical", "digits", "ell", "fingerprint", "hexagon", "line", "load", "pair", "population"]
__all__ += ["random_six", "square", "toy", "triple"]
