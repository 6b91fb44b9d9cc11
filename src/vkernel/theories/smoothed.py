r"""Smoothed scores: a network cannot resolve details of the exact score below a bandwidth h.

``kind="kde"``: every training point is a Gaussian of width h. With :math:`S = \sigma^2 + \alpha^2 h^2` in the logits
*and* in the score, and :math:`m_h = \sum_i r_i y_i`, :math:`r_i \propto w_i e^{-|x - \alpha y_i|^2/2S}`,

.. math:: s = \frac{\alpha m_h - x}{S}, \qquad m = \frac{\sigma^2 m_h + \alpha h^2 x}{S} .

``kind="draws"``: the exact denoiser is averaged over fixed draws, :math:`m(x) = \frac1K \sum_k m_0(x + h u_k)`,
:math:`u_k \sim N(0, I)` (Scarvelis, Borde and Solomon 2023, "Closed-form diffusion models"). Both are the exact
denoiser at h = 0. Under an anisotropic process h is a width in whitened coordinates."""

from __future__ import annotations

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.checks import check_choice, check_number, check_whole
from vkernel.core.covariance import over_event
from vkernel.core.rng import Generator
from vkernel.posterior import Engine
from vkernel.process import Process
from vkernel.theories.base import Data, Theory, posterior_mean


class Smoothed(Theory):
    """The exact score smoothed over a width ``h``, in units of the data ("kde") or of x ("draws", of which there are
    ``draws``, fixed by ``generator``)."""

    def __init__(
        self,
        data: Data,
        process: Process,
        h: float,
        kind: str = "kde",
        draws: int = 64,
        generator: Generator = 0,
        memory: int | None = None,
    ) -> None:
        super().__init__(data, process, memory)
        self.h, self.kind = check_number(h, "h", 0.0), check_choice(kind, "kind", ("kde", "draws"))
        self.engine = Engine(self.white, self.memory)
        if kind == "draws":
            size = (check_whole(draws, "draws"), self.data.d)
            self.draws = rng.randn(size, rng.as_generator(generator), self.device, torch.float64)

    def mean(self, x: Tensor, alpha: Tensor, var: Tensor) -> Tensor:
        if self.kind == "kde":
            a, v, total = (over_event(c, self.shape) for c in (alpha, var, self._widened(alpha, var)))
            return (v * self._mean(x, alpha, var) + a * self.h**2 * x) / total
        found = (posterior_mean(self.engine, x.flatten(1) + self.h * u, alpha, var) for u in self.draws)
        return torch.stack(list(found)).mean(0).reshape(x.shape)

    def residual(self, x: Tensor, alpha: Tensor, var: Tensor) -> Tensor:
        if self.kind == "draws":
            return super().residual(x, alpha, var)
        a, v, total = (over_event(c, self.shape) for c in (alpha, var, self._widened(alpha, var)))
        return (a * self._mean(x, alpha, var) - x) * (v / total)

    def _widened(self, alpha: Tensor, var: Tensor) -> Tensor:
        return var + (alpha * self.h).square()

    def _mean(self, x: Tensor, alpha: Tensor, var: Tensor) -> Tensor:
        return posterior_mean(self.engine, x.flatten(1), alpha, self._widened(alpha, var)).reshape(x.shape)
