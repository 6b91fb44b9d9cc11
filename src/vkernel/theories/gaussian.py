r"""The Gaussian theory: what a network learns depends on the mean and the covariance of the training set alone.

With :math:`\mu = \sum_i w_i y_i` and :math:`\Sigma = \sum_i w_i (y_i-\mu)(y_i-\mu)^T = U \operatorname{diag}(\lambda)
U^T` the best denoiser is Wiener's filter,

.. math:: m = \mu + U \operatorname{diag}\Big(\frac{\alpha\lambda}{\alpha^2\lambda + \sigma^2}\Big) U^T (x -
   \alpha\mu), \qquad \alpha m - x = -(I - UU^T)\,\delta - U \operatorname{diag}\Big(\frac{\sigma^2}{\alpha^2\lambda +
   \sigma^2}\Big) U^T \delta, \quad \delta = x - \alpha\mu ,

the second without cancellation at low noise. Off the rank of :math:`\Sigma` the variance is 0. At high noise trained
networks are close to it (Wang and Vastola 2024, "The unreasonable effectiveness of Gaussian score approximation for
diffusion models and its applications")."""

from __future__ import annotations

import torch
from torch import Tensor

from vkernel.core.checks import check_whole
from vkernel.process import Process
from vkernel.theories.base import Data, Theory


class Gaussian(Theory):
    """The score of a Gaussian with the mean and the covariance of the data.

    Args:
        rank: the number of principal variances that are kept, the largest ones; all by default, and from n - 1 on.

    Attributes: ``axes (k, d)`` and ``variances (k,)``, in whitened coordinates.

    >>> import torch, vkernel as vk
    >>> theory = vk.theories.Gaussian(torch.randn(100, 3), vk.VP())
    >>> theory.denoise(torch.randn(5, 3), 0.5).shape
    torch.Size([5, 3])
    """

    def __init__(self, data: Data, process: Process, rank: int | None = None, memory: int | None = None) -> None:
        super().__init__(data, process, memory)
        self.rank = rank if rank is None else check_whole(rank, "rank")
        n, d = self.data.n, self.data.d
        step = max(1, self.memory // (64 * d))
        if n < d:  # the n × n product has the same variances
            parts = [log_w.exp().sqrt()[:, None] * (y.flatten(1) - self.center) for y, log_w in self.points(step)]
            rows = torch.cat(parts)
            variances, vectors = torch.linalg.eigh(rows @ rows.mT)
        else:
            product = torch.zeros(d, d, dtype=torch.float64, device=self.device)
            for y, log_w in self.points(step):
                rows = log_w.exp().sqrt()[:, None] * (y.flatten(1) - self.center)
                product += rows.mT @ rows
            variances, vectors = torch.linalg.eigh(product)
        most = min(n - 1, d) if rank is None else min(rank, n - 1, d)
        kept = variances > 1e-14 * variances[-1]
        kept[: len(kept) - most] = False
        self.variances, axes = variances[kept], vectors[:, kept].mT
        self.axes = (axes @ rows) / self.variances.sqrt()[:, None] if n < d else axes

    @property
    def options(self) -> dict[str, object]:
        return {"rank": self.rank}

    def mean(self, x: Tensor, alpha: Tensor, var: Tensor) -> Tensor:
        delta = x.flatten(1) - alpha[:, None] * self.center
        gain = alpha[:, None] * self.variances / self._variance(alpha, var)
        return (self.center + (delta @ self.axes.mT * gain) @ self.axes).reshape(x.shape)

    def residual(self, x: Tensor, alpha: Tensor, var: Tensor) -> Tensor:
        delta = x.flatten(1) - alpha[:, None] * self.center
        along = delta @ self.axes.mT
        left = along * (var[:, None] / self._variance(alpha, var))
        return -(delta - (along - left) @ self.axes).reshape(x.shape)

    def _variance(self, alpha: Tensor, var: Tensor) -> Tensor:
        return alpha.square()[:, None] * self.variances + var[:, None]
