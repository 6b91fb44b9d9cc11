"""Training sets: :class:`Empirical`, :func:`load` for files, and toy sets."""

from vkernel.data.empirical import Empirical
from vkernel.data.loaders import load
from vkernel.data.toys import TOYS, digits, ell, hexagon, line, pair, random_six, square, toy, triple

__all__ = ["TOYS", "Empirical", "digits", "ell", "hexagon", "line", "load", "pair", "random_six", "square", "toy"]
__all__ += ["triple"]
