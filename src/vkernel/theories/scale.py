r"""Parameters of theories that may depend on the noise level: the patch size k, the width h, the threshold.

Each is a number, a function of t that returns one, or a table {σ/α: value}, of which the entry nearest in :math:`\log
\sigma/\alpha` counts. :mod:`vkernel.theories.fit` chooses tables for a network."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from vkernel.core.checks import is_number
from vkernel.core.errors import require
from vkernel.process import Process

Scale = float | Callable[[float], float] | Mapping[float, float]


class ByLevel:
    """A parameter ``name`` by noise level; ``check`` returns a valid value or raises. Numbers and tables are checked at
    once, functions where they are evaluated. ``given`` is the parameter, a table as a dictionary."""

    def __init__(self, given: Scale, name: str, process: Process, check: Callable[[object], float]) -> None:
        self.process, self.check = process, check
        if isinstance(given, Mapping):
            good = len(given) > 0 and all(is_number(ratio) and ratio > 0 for ratio in given)
            require(good, f"A table of {name} needs positive σ/α as keys; got {given!r}.")
            given = {float(ratio): check(value) for ratio, value in given.items()}
        self.given: Scale = given if isinstance(given, Mapping) or callable(given) else check(given)

    def at(self, ratio: float) -> float:
        """Return the value at one σ/α."""
        if isinstance(self.given, Mapping):
            return self.given[min(self.given, key=lambda r: abs(math.log(r / ratio)))]
        if callable(self.given):
            t = self.process.base.time(torch.tensor(ratio, dtype=torch.float64))
            return self.check(self.given(float(f"{t:.12g}")))  # a time that was given, such as 500, is found again
        return self.given

    def __call__(self, ratios: Tensor) -> Tensor:
        """Return the value at each of ``ratios``, like them."""
        level, inverse = ratios.unique(return_inverse=True)
        return level.new_tensor([self.at(r) for r in level.tolist()])[inverse]
