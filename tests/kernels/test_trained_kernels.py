"""Kernels of trained models refuse what they cannot use, in sentences."""

from __future__ import annotations

import pytest
import torch
from trained import PLANE, POINTS, PROCESS, X, fitted, model, quietly

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.kernels import SGD, Linear, Measured

# -------------------- refusals


LINE = model(3)
GOOD = {"lr": 0.1, "batch": 4, "steps": 3}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Linear(vk.models.MLP(), POINTS, PROCESS, draws=9), "linear model"),
        (lambda: Linear(LINE, POINTS, PROCESS, draws=9, form="exact"), "form"),
        (lambda: Linear(LINE, POINTS, PROCESS, draws=0), "draws"),
        (lambda: Linear(LINE, POINTS, PROCESS, draws=None), "draws"),
        (lambda: Linear(LINE, POINTS, PROCESS, draws=9, objective="J2"), "objective"),
        (lambda: Linear(LINE, POINTS, PROCESS, draws=9, vary=("noise",)), "vary"),
        (lambda: Linear(LINE, POINTS, PROCESS, draws=9, sets=0), "sets"),
        (lambda: Linear(LINE, POINTS, PROCESS, draws=9, form="leading", quadrature=0), "quadrature"),
        (lambda: Linear(LINE, PLANE, PROCESS, draws=9), "vectors of 1"),
        (lambda: Linear(model(80), POINTS, PROCESS, draws=9), "6400 × 6400"),
        (lambda: Linear(LINE, POINTS, PROCESS, draws=40, sets=8).only("noise"), "target_noise"),
        (lambda: Linear(LINE, POINTS, PROCESS, draws=40, sets=8).draw(0), "at least one"),
        (lambda: Linear(LINE, POINTS, PROCESS, draws=40, sets=8).draw(3)(torch.zeros(6, 2, 1), 0.2), "3 members"),
        (lambda: SGD(vk.models.MLP(), POINTS, PROCESS, **GOOD), "linear model"),
        (lambda: SGD(LINE, POINTS, PROCESS, **GOOD | {"lr": 0}), "lr"),
        (lambda: SGD(LINE, POINTS, PROCESS, **GOOD | {"lr": "fast"}), "lr"),
        (lambda: SGD(LINE, POINTS, PROCESS, **GOOD | {"batch": 0}), "batch"),
        (lambda: SGD(LINE, POINTS, PROCESS, **GOOD | {"steps": 2.5}), "steps"),
        (lambda: SGD(LINE, POINTS, PROCESS, **GOOD, nodes=1), "nodes"),
        (lambda: SGD(LINE, POINTS, PROCESS, **GOOD, quadrature=0), "quadrature"),
        (lambda: SGD(LINE, PLANE, PROCESS, **GOOD), "vectors of 1"),
        (lambda: SGD(LINE, POINTS, PROCESS, **GOOD, objective="J2"), "objective"),
        (lambda: Measured(LINE), "Ensemble"),
        (lambda: Measured(fitted(LINE, members=1, draws=30)), "two finite"),
        (lambda: Measured(fitted(LINE, members=20, draws=30)).draw(0), "at least one"),
        (lambda: Measured(fitted(LINE, members=20, draws=30)).draw(3)(torch.zeros(6, 2, 1), 0.2), "3 members"),
        (lambda: Measured(fitted(LINE, members=20, draws=30)).cov(X, 0.2, None, 0.3), "x2 with t2"),
    ],
)
def test_bad_input_is_refused(call, says):
    with pytest.raises(InputError, match=says):
        quietly(call)
