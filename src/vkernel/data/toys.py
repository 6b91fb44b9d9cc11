"""Toy training sets of the paper (theory, §3.4), as functions; :func:`toy` returns one by its name.

:func:`population` draws a training set from a known population."""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.checks import check_choice, check_whole
from vkernel.core.errors import InputError, require
from vkernel.core.rng import Generator
from vkernel.data.empirical import Empirical


def _circle(degrees: np.ndarray) -> np.ndarray:
    return np.stack([np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))], axis=1)


def _fixed(name: str, points: np.ndarray, about: str) -> Callable[[], Empirical]:
    """Return the function of a set without parameters."""

    def make() -> Empirical:
        return Empirical(points, name=name)

    size = [len(points), 1 if points.ndim == 1 else points.shape[1]]
    example = f">>> import vkernel as vk\n    >>> vk.data.toy({name!r})[:].shape\n    torch.Size({size})"
    make.__doc__ = f"{about}\n\n    {example}"
    return make


_L = np.array([[-1, -1, -1, 0, 0.5, 1], [-1, 0, 1, -1, -1, -1.0]]).T
_RANDOM = np.array([[-1, -0.9, -0.3, 0.1, 0.2, 0.9], [-1, 1, 0.2, -0.1, -0.1, 0.7]]).T
_LINE = np.repeat(np.linspace(-1, 1, 6)[:, None], 2, axis=1)
hexagon = _fixed("hexagon", _circle(60.0 * np.arange(6)), "Six points on the unit circle, at multiples of 60°.")
line = _fixed("line", _LINE, "Six points at equal distances on the diagonal from (-1, -1) to (1, 1).")
ell = _fixed("L", _L, "Six points in the shape of the letter L.")
random_six = _fixed("random", _RANDOM, "The paper's six points without pattern.")
triple = _fixed("triple", np.array([-1.0, 0.0, 1.0]), "{-1, 0, 1} in one dimension.")
pair = _fixed("pair", np.array([-1.0, 1.0]), "{-1, 1} in one dimension.")


def square(rotation: float = 0.0) -> Empirical:
    """Return four points on the unit circle, at multiples of 90°, turned by ``rotation`` degrees.

    >>> import vkernel as vk
    >>> vk.data.square(45)[:].shape
    torch.Size([4, 2])
    """
    return Empirical(_circle(90.0 * np.arange(4) + rotation), name=f"square turned by {rotation:g}°")


def digits() -> Empirical:
    """Return scikit-learn's 1,797 images of digits, ``(1, 8, 8)``; grey levels 0 … 16 become [-1, 1].

    >>> import vkernel as vk
    >>> vk.data.digits()[:].shape
    torch.Size([1797, 1, 8, 8])
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise InputError("The digits ship with scikit-learn; install it: pip install 'vkernel[digits]'.") from error
    return Empirical((load_digits().images[:, None] / 8 - 1).astype(np.float32), name="digits")


POPULATIONS = ("uniform", "normal", "square", "circle", "two_moons")


def population(name: str, n: int, generator: Generator = None) -> Tensor:
    """Return ``n`` independent points of a known law, ``(n, d)`` in float64. On the line: "uniform" on [-1, 1], or
    "normal" with variance 1. In the plane: "square", uniform on [-1, 1]²; "circle", uniform on the unit circle;
    "two_moons", the upper half of a unit circle around (-½, -¼) and the lower half of one around (½, ¼), times ⅔.

    >>> import vkernel as vk
    >>> vk.data.population("circle", 5, generator=0).shape
    torch.Size([5, 2])
    """
    check_choice(name, "population", POPULATIONS)
    check_whole(n, "n, the number of points,")
    source = rng.as_generator(generator)
    if name == "normal":
        return rng.randn((n, 1), source, torch.device("cpu"), torch.float64)
    u = rng.rand((n, 2), source)
    if name in ("uniform", "square"):
        return 2 * u[:, : 2 if name == "square" else 1] - 1
    angle, side = math.pi * u[:, 0], (u[:, 1] < 0.5).double() * 2 - 1
    if name == "circle":
        angle = 2 * angle
        return torch.stack([angle.cos(), angle.sin()], 1)
    return torch.stack([side * angle.cos() - side / 2, side * angle.sin() - side / 4], 1) * 2 / 3


TOYS: dict[str, Callable[..., Empirical]] = {"hexagon": hexagon, "line": line, "L": ell, "random": random_six}
TOYS |= {"triple": triple, "pair": pair, "square": square, "digits": digits}


def toy(name: str, rotation: float | None = None) -> Empirical:
    """Return a toy set by its name in :data:`TOYS`; ``rotation``, in degrees, is for ``"square"`` alone.

    >>> import vkernel as vk
    >>> vk.data.toy("triple")[:]
    tensor([[-1.],
            [ 0.],
            [ 1.]], dtype=torch.float64)
    """
    require(name in TOYS, f"There is no toy set {name!r}; there are {', '.join(TOYS)}.")
    require(rotation is None or name == "square", f"rotation turns the toy set 'square' alone, not {name!r}.")
    return TOYS[name]() if rotation is None else square(rotation)
