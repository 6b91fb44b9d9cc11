"""Linear ensembles of J1 and J0 on the same inputs, with one factorisation for both."""

from __future__ import annotations

import torch

from vkernel.data.empirical import Empirical
from vkernel.process import Process
from vkernel.train.ensemble import Ensemble
from vkernel.train.models import Linear
from vkernel.train.objectives import J0, J1, Batch, Training

__all__ = ["twins"]

BLOCK = 1 << 24  # numbers of a table of features held at once


def twins(
    model: Linear, data: Empirical, process: Process, *, draws: int, members: int, seed: int
) -> tuple[Ensemble, Ensemble]:
    """The ensembles of J1 and J0, as ``train_ensemble`` makes them: inputs, and with them the system, are the same."""
    plans = [Training(data, process, goal, draws, seed=seed) for goal in (J1(), J0())]
    found, width = [], max(1, BLOCK // (draws * model.features.count))
    for first in range(0, members, width):
        one, other = (plan.batch(range(first, min(first + width, members)), draws) for plan in plans)
        found.append(model.solve(Batch(one.x, one.t, torch.cat([one.m, other.m], -1)), process))
    noisy, exact = torch.cat(found).chunk(2, -1)
    return (
        Ensemble(model, {"weights": noisy.contiguous()}, process, data.shape),
        Ensemble(model, {"weights": exact.contiguous()}, process, data.shape),
    )
