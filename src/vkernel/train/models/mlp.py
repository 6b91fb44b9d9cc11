r"""The multilayer perceptron, for events of any shape, flattened.

.. math:: h_1 = \varphi(W_1 (z, e) + b_1), \qquad h_{l+1} = \varphi(W_{l+1} h_l + b_{l+1}), \qquad
          f = W_{L+1} h_L + b_{L+1},

with L = ``depth`` hidden layers of ``width`` units, and z and e (the scaled point and the time) as in
:mod:`vkernel.train.models.network`. Initially the entries of the hidden W are :math:`N(0, 2/\text{fan-in})`, those
of the
last one :math:`N(0, 1/\text{fan-in})`, and biases are 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from vkernel.core.errors import require
from vkernel.train.models.network import Network, Shape, whole
from vkernel.train.models.parametrisation import Weight

__all__ = ["MLP"]

Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Activation] = {
    "silu": nn.functional.silu,
    "relu": torch.relu,
    "gelu": nn.functional.gelu,
    "tanh": torch.tanh,
    "erf": torch.erf,
}


class MLP(Network):
    """``depth`` hidden layers of ``width`` units; the other arguments are those of ``Network``."""

    def __init__(
        self,
        width: int = 64,
        depth: int = 3,
        target: str = "noise",
        lr: float = 1e-3,
        batch: int | None = 64,
        steps: int = 2000,
        ema: float | None = None,
        activation: str = "silu",
        time_features: int = 4,
        weight: str | Weight | None = None,
        optimiser: str = "adam",
        decay: str | None = None,
        spread: float = 1.0,
        dtype: str | torch.dtype = "float32",
        chunk: int | None = None,
    ) -> None:
        super().__init__(
            target,
            weight,
            lr=lr,
            batch=batch,
            steps=steps,
            ema=ema,
            optimiser=optimiser,
            decay=decay,
            time_features=time_features,
            spread=spread,
            dtype=dtype,
            chunk=chunk,
        )
        for name, value in (("width", width), ("depth", depth)):
            require(whole(value, 1), f"{name} must be a whole number ≥ 1; got {value!r}.")
        known = ", ".join(ACTIVATIONS)
        require(activation in ACTIVATIONS, f"There is no activation {activation!r}; give one of {known}.")
        self.width, self.depth, self.activation = width, depth, activation

    def module(self, shape: Shape) -> nn.Module:
        d = math.prod(shape)
        sizes = [d + 1 + 2 * self.time_features, *[self.width] * self.depth, d]
        return Perceptron(sizes, ACTIVATIONS[self.activation])

    def held(self, shape: Shape) -> int:
        return max(self.width, math.prod(shape) + 1 + 2 * self.time_features)

    def fill(self, name: str, p: Tensor, generator: torch.Generator) -> None:
        super().fill(name, p, generator)
        if name == f"layers.{self.depth}.weight":
            p.mul_(0.5**0.5)

    @property
    def spec(self) -> dict[str, Any]:
        own = {"width": self.width, "depth": self.depth, "activation": self.activation}
        return {"kind": "mlp", **own, **self._common()}


class Perceptron(nn.Module):
    """Linear layers of the given sizes with an activation between any two."""

    def __init__(self, sizes: list[int], activation: Activation) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.activation = activation

    def forward(self, z: Tensor, e: Tensor) -> Tensor:
        h = torch.cat([z.flatten(1), e], 1)
        for layer in self.layers[:-1]:
            h = self.activation(layer(h))
        return self.layers[-1](h).reshape(z.shape)
