"""Toy sets: the points of the paper, and digits."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch

from vkernel.core.errors import InputError
from vkernel.data import TOYS, digits, toy


def test_toy_sets_are_the_papers():
    assert {name: (toy(name).n, toy(name).shape) for name in TOYS if name != "digits"} == {
        **dict.fromkeys(["hexagon", "line", "L", "random"], (6, (2,))),
        **{"triple": (3, (1,)), "pair": (2, (1,)), "square": (4, (2,))},
    }
    hexagon = toy("hexagon").rows(0, 6)
    np.testing.assert_allclose(hexagon[1], [0.5, math.sqrt(3) / 2], atol=1e-15)
    np.testing.assert_allclose(hexagon.norm(dim=1), np.ones(6), atol=1e-15)
    np.testing.assert_allclose((hexagon - hexagon.roll(1, 0)).norm(dim=1), np.ones(6), atol=1e-15)
    np.testing.assert_allclose(toy("line").rows(0, 6), np.linspace([-1, -1], [1, 1], 6))
    assert toy("L").rows(3, 5).tolist() == [[0.0, -1.0], [0.5, -1.0]]
    assert toy("random").rows(1, 3).tolist() == [[-0.9, 1.0], [-0.3, 0.2]]
    assert toy("triple").rows(0, 3).tolist() == [[-1.0], [0.0], [1.0]]
    assert toy("pair").rows(0, 2).tolist() == [[-1.0], [1.0]]
    np.testing.assert_allclose(toy("square", rotation=45).rows(0, 1)[0], [math.sqrt(0.5)] * 2, atol=1e-15)


def test_toy_refuses_unknown_names_and_needless_rotation():
    with pytest.raises(InputError, match="hexagon, line, L"):
        toy("circle")
    with pytest.raises(InputError, match="alone"):
        toy("line", rotation=5)


def test_digits_are_scaled_to_one():
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    data = digits()
    values = data.rows(0, data.n)
    assert (data.n, data.shape, data.dtype) == (1797, (1, 8, 8), torch.float32)
    assert (values.min(), values.max()) == (-1, 1)


def test_digits_without_scikit_learn_say_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(InputError, match="scikit-learn"):
        digits()
