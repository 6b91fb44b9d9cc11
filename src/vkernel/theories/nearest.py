r"""The nearest training points alone: posterior weights restricted to the k nearest, a baseline.

.. math:: m = \sum_{i \in N_k(x)} r_i y_i, \qquad r_i \propto w_i\, e^{-|x - \alpha y_i|^2 / 2 \sigma^2},

with :math:`N_k(x)` the k points whose :math:`\alpha y_i` is nearest to x. k = n is the exact denoiser; k = 1 returns
one training point at every noise level. The denoiser jumps where the k nearest points change, and its derivative is
that between the jumps."""

from __future__ import annotations

import torch
from torch import Tensor

from vkernel.core.checks import check_whole
from vkernel.core.errors import require
from vkernel.data import Empirical
from vkernel.posterior import Engine, Queries
from vkernel.posterior.weights import blocks
from vkernel.process import Process
from vkernel.score.empirical import whitened
from vkernel.theories.base import Data, Theory, posterior_mean


class Nearest(Theory):
    """The denoiser of the k training points nearest to ``x / alpha``, which is exact for k = n.

    Args:
        k: the number of training points that have weight.

    >>> import torch, vkernel as vk
    >>> theory = vk.theories.Nearest(torch.randn(100, 3), vk.VP(), k=5)
    >>> theory.denoise(torch.randn(5, 3), 0.5).shape
    torch.Size([5, 3])
    """

    def __init__(self, data: Data, process: Process, k: int = 1, memory: int | None = None) -> None:
        data = data if isinstance(data, Empirical) else Empirical(data)
        super().__init__(data, process, memory)
        self.k = check_whole(k, "k")
        require(self.k <= data.n, f"k must be a number of training points, 1 to {data.n}; got {k!r}.")
        weights, self.exact = self.data.weights, self.k >= self.data.n
        # of unequal weights the engine would find the heaviest points, not the nearest
        even = self.data.segment(0, self.data.n, torch.full_like(weights, 1 / self.data.n))
        kept = self.data if self.exact or bool((weights == weights[0]).all()) else even
        self.kept = whitened(kept, process)
        self.engine = Engine(self.kept, self.memory)

    @property
    def options(self) -> dict[str, object]:
        return {"k": self.k}

    def mean(self, x: Tensor, alpha: Tensor, var: Tensor) -> Tensor:
        rows, log_w, out = x.flatten(1), self.data.weights.log(), []
        if self.exact:
            return posterior_mean(self.engine, rows, alpha, var).reshape(x.shape)
        for part in blocks(len(rows), self.memory // (32 * self.k * rows.shape[1])):
            a, v, here = alpha[part], var[part], rows[part]
            index = self.engine.nearest(Queries(here.detach(), a, v), self.k)[1]
            y = self.kept.take(index.flatten()).double().reshape(*index.shape, -1)
            gap = here[:, None] - a[:, None, None] * y
            r = (log_w[index] - gap.square().sum(-1) / (2 * v[:, None])).softmax(1)
            out.append((r[:, None] @ y)[:, 0])
        return torch.cat(out).reshape(x.shape) if out else x
