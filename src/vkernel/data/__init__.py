"""Training sets: :class:`Empirical`, :func:`load` for files, image sets by name, toy sets, and known populations."""

from vkernel.data.empirical import Empirical, fingerprint
from vkernel.data.images import IMAGES, images
from vkernel.data.loaders import load
from vkernel.data.toys import TOYS, digits, ell, hexagon, line, pair, population, random_six, square, toy, triple

__all__ = ["IMAGES", "TOYS", "Empirical", "digits", "ell", "fingerprint", "hexagon", "images", "line", "load"]
__all__ += ["pair", "population", "random_six", "square", "toy", "triple"]
