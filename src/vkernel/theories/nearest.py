r"""The nearest training points alone: posterior weights restricted to the k nearest, a baseline.

.. math:: m = \sum_{i \in N_k(x)} r_i y_i, \qquad r_i \propto w_i\, e^{-|x - \alpha y_i|^2 / 2 \sigma^2},

with :math:`N_k(x)` the k points whose :math:`\alpha y_i` is nearest to x. k = n is the exact denoiser; k = 1 returns
one training point at every noise level. The denoiser jumps where the k nearest points change, and its derivative is
that between the jumps."""

from __future__ import annotations

import torch
from torch import Tensor

from vkernel.core.checks import is_whole
from vkernel.core.errors import require
from vkernel.posterior import Engine, Queries
from vkernel.posterior.weights import blocks
from vkernel.process import Anisotropic, Process
from vkernel.score.empirical import Whitened
from vkernel.theories.base import Data, Theory


class Nearest(Theory):
    """The denoiser of the ``k`` training points nearest to ``x / alpha``."""

    def __init__(self, data: Data, process: Process, k: int = 1, memory: int | None = None) -> None:
        super().__init__(data, process, memory)
        good = is_whole(k) and 1 <= k <= self.data.n
        require(good, f"k must be a number of training points, 1 to {self.data.n}; got {k!r}.")
        self.k, weights = k, self.data.weights
        # of unequal weights the engine would find the heaviest points, not the nearest
        equal = bool((weights == weights[0]).all())
        even = self.data if equal else self.data.segment(0, self.data.n, torch.full_like(weights, 1 / self.data.n))
        self.even = Whitened(even, process) if isinstance(process, Anisotropic) else even
        self.engine = Engine(self.even, self.memory)

    @property
    def options(self) -> dict[str, object]:
        return {"k": self.k}

    def mean(self, x: Tensor, alpha: Tensor, var: Tensor) -> Tensor:
        rows, log_w, out = x.flatten(1), self.data.weights.log(), []
        for part in blocks(len(rows), self.memory // (32 * self.k * rows.shape[1])):
            a, v, here = alpha[part], var[part], rows[part]
            index = self.engine.nearest(Queries(here.detach(), a, v), self.k)[1]
            y = self.even.take(index.flatten()).double().reshape(*index.shape, -1)
            gap = here[:, None] - a[:, None, None] * y
            r = (log_w[index] - gap.square().sum(-1) / (2 * v[:, None])).softmax(1)
            out.append((r[:, None] @ y)[:, 0])
        return torch.cat(out).reshape(x.shape) if out else x
