"""Small ensembles of every kind of model, for the tests of ensembles."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import vkernel as vk
from vkernel.train.ensemble import Ensemble
from vkernel.train.features import RandomFourier

PROCESS = vk.VP(eps=0.05)
POINTS = torch.tensor([[-1.0], [0.0], [1.0]], dtype=torch.float64)
PLANE = torch.tensor([[-1.0, 0.2], [0.4, 1.0], [0.8, -0.6]], dtype=torch.float64)
X = torch.linspace(-1.5, 1.5, 7, dtype=torch.float64)[:, None]


def grid(dim: int = 1, per_axis: int = 4) -> vk.features.Grid:
    return vk.features.grid("gaussian", per_axis, dim, process=PROCESS, per_time=3)


def train(model=None, points: Tensor = POINTS, **options) -> Ensemble:
    options = {"members": 6, "draws": 80} | options
    return vk.train_ensemble(model or vk.models.Linear(grid()), points, PROCESS, **options)


MODELS = {
    "grid": (vk.models.Linear(grid(2), "x0"), PLANE),
    "fourier": (vk.models.Linear(vk.features.random_fourier(12, 2, PROCESS), "noise"), PLANE),
    "mlp": (vk.models.MLP(width=6, depth=2, steps=5, batch=8, ema=0.9), PLANE),
    "images": (vk.models.MLP(width=6, depth=1, steps=3, batch=8, target="x0"), PLANE.reshape(3, 1, 1, 2)),
    "lazy": (vk.models.Lazy(vk.models.NTK(2, "relu"), tau=5.0), PLANE),
}


def constant(values: Tensor, **info) -> Ensemble:
    """An ensemble whose score is ``values (M, d)`` at every place: one feature, which is sqrt(2) everywhere."""
    d = values.shape[1]
    features = RandomFourier(torch.zeros(1, d + 1, dtype=torch.float64), torch.zeros(1), PROCESS.eps, PROCESS.T)
    state = {"weights": values[:, None, :] / math.sqrt(2)}
    return Ensemble(vk.models.Linear(features, "score"), state, PROCESS, (d,), info)


def broken(ens: Ensemble, rows: dict[int, float]) -> Ensemble:
    name, first = next(iter(ens.state.items()))
    first = first.clone()
    for m, value in rows.items():
        first[m].view(-1)[0] = value
    return Ensemble(ens.model, {**ens.state, name: first}, ens.process, ens.shape, ens.info)


def places(ens: Ensemble, *batch: int) -> Tensor:
    return torch.randn(*batch, *ens.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
