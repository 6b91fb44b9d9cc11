r"""What a model is: something that can be fitted to draws, for many members at once, and asked for its output.

A model holds no weights. :meth:`Model.fit` returns them as a *state*: named tensors whose first axis is the member.
:meth:`Model.output` is the function :math:`f(x, t)` of a state, and the score follows by the model's
:class:`~vkernel.train.models.parametrisation.Parametrisation`. So an ensemble is a model, a state, and nothing else.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vkernel.process import Process
from vkernel.train.models.parametrisation import Parametrisation, Weight
from vkernel.train.objectives import Training

__all__ = ["Model", "State", "time_input"]

State = dict[str, Tensor]
Tell = Callable[[float], None]


class Model(ABC):
    """An architecture with its way of being fitted; final kinds are Linear, Lazy, MLP and UNet."""

    dtype: torch.dtype = torch.float64  # of the state, unless told
    linear: bool = False  # whether the output is linear in the state
    randomness: tuple[str, ...] = ("inputs", "targets")  # what of training the result depends on, outermost first

    def __init__(self, target: str, weight: str | Weight | None = None) -> None:
        self.parametrisation = Parametrisation(target, weight)

    @property
    def target(self) -> str:
        """What the model predicts, "score", "x0" or "noise"."""
        return self.parametrisation.target

    @abstractmethod
    def fit(self, training: Training, members: Sequence[int], tell: Tell) -> State:
        """The states of ``members``; ``tell(share)`` reports progress, shares adding up to 1."""

    @abstractmethod
    def output(self, state: State, x: Tensor, t: Tensor, process: Process) -> Tensor:
        """f, ``(M, N, *shape)``, for ``x (M or 1, N, *shape)`` and ``t (M or 1, N or 1)``."""

    def score(self, state: State, x: Tensor, t: Tensor, process: Process) -> Tensor:
        """The learned score, shapes as in :meth:`output`."""
        return self.parametrisation.score(self.output(state, x, t, process), x, t, process)

    @property
    @abstractmethod
    def spec(self) -> dict[str, Any]:
        """The model in JSON, ``kind`` and what its constructor takes; a weighting function is named, not kept."""

    def _common(self) -> dict[str, Any]:
        weight = self.parametrisation.weight
        return {"target": self.target, "weight": weight if isinstance(weight, str) else "function"}


@functools.lru_cache(maxsize=64)
def _range(process: Process) -> tuple[float, float]:
    low, high = (float(torch.tensor(r, dtype=torch.float64).log()) for r in process._ratios())
    return (low + high) / 2, (high - low) / 2


def time_input(t: Tensor, process: Process) -> Tensor:
    """log(sigma/alpha), moved and scaled to [-1, 1] between eps and T: how networks are told the time."""
    middle, half = _range(process)
    wide = t.double()
    return (((process.sigma(wide) / process.alpha(wide)).log() - middle) / half).to(t.dtype)
