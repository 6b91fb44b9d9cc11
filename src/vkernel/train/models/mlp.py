"""Multilayer perceptrons."""

import itertools
import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vkernel.core.checks import check_choice, check_whole
from vkernel.process import EDM, VE, Process
from vkernel.train.models.base import PRECONDITIONED, Weight
from vkernel.train.models.network import Network, Shape
from vkernel.train.objectives import Times

Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Activation] = {"silu": F.silu, "relu": torch.relu, "gelu": F.gelu}
ACTIVATIONS |= {"tanh": torch.tanh, "erf": torch.erf}


@dataclass(eq=False)
class MLP(Network):
    """A multilayer perceptron with ``depth`` hidden layers of ``width`` units. Where the target is "edm", or noise
    levels span orders of magnitude (EDM, VE), weight and times are by default EDM's; else "sigma2" and "uniform".

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> model = vk.models.MLP(width=8, depth=2, steps=5, batch=16)
    >>> vk.train_ensemble(model, data, process, members=2)(torch.zeros(5, 1), 0.5).shape
    torch.Size([2, 5, 1])
    """

    width: int = 64
    depth: int = 3
    _: KW_ONLY
    activation: str = "silu"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self.width, "width")
        check_whole(self.depth, "depth")
        check_choice(self.activation, "activation", ACTIVATIONS)

    def defaults(self, process: Process) -> tuple[Weight, Times]:
        wide = self.target == "edm" or isinstance(process, EDM | VE)
        return PRECONDITIONED if wide else super().defaults(process)

    def module(self, shape: Shape) -> nn.Module:
        d, hidden = math.prod(shape), [self.width] * self.depth
        return _Perceptron([d + 1 + 2 * self.time_features, *hidden, d], ACTIVATIONS[self.activation])

    def largest(self, shape: Shape) -> int:
        return max(self.width, math.prod(shape) + 1 + 2 * self.time_features)

    def gain(self, name: str) -> float:
        return 0.5**0.5 if name == f"layers.{self.depth}.weight" else 1.0


class _Perceptron(nn.Module):
    def __init__(self, sizes: list[int], activation: Activation) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.activation = activation

    def forward(self, z: Tensor, e: Tensor) -> Tensor:
        h = torch.cat([z.flatten(1), e], 1)
        for layer in self.layers[:-1]:
            h = self.activation(layer(h))
        return self.layers[-1](h).reshape(z.shape)
