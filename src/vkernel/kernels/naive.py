"""The V-kernel of the naive score estimator: white in time (docs/theory.md, §5)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vkernel.core.covariance import Covariance, Scaled
from vkernel.core.errors import InputError, require
from vkernel.core.rng import Generator
from vkernel.kernels.base import Field, Kernel, Time
from vkernel.score.empirical import EmpiricalScore

__all__ = ["Naive"]


class Naive(Kernel):
    r"""The naive score estimator: :math:`V = \kappa\, D\, C\, D\, \delta(t - t')`, with κ in the unit of t (5.9)."""

    white = True

    def __init__(self, score: EmpiricalScore, kappa: float) -> None:
        require(isinstance(score, EmpiricalScore), "The naive kernel belongs to an EmpiricalScore: it knows C.")
        require(
            isinstance(kappa, int | float) and math.isfinite(kappa) and kappa >= 0,
            f"kappa must be a number ≥ 0, in the unit of t; got {kappa!r}.",
        )
        self.score, self.kappa, self.process, self.mean_of = score, float(kappa), score.process, score

    def cov(self, x: Tensor, t: Time, x2: Tensor | None = None, t2: Time | None = None) -> Covariance:
        require(x2 is None and t2 is None, "A white kernel has no covariance between two times: give x and t alone.")
        return Scaled(self.score.covariance(x, t), torch.tensor(math.sqrt(self.kappa), dtype=torch.float64))

    def __call__(self, x: Tensor, t: Time, x2: Tensor | None = None, t2: Time | None = None) -> Covariance:
        d = self.process.base.D(torch.as_tensor(t, dtype=torch.float64, device=x.device))
        return self._between(Scaled(self.cov(x, t, x2, t2), d))

    def mean_and_noise(self, x: Tensor, t: Time, generator: Generator = None) -> tuple[Tensor, Tensor]:
        r"""The score and a Gaussian draw of covariance :math:`\kappa C`, from one posterior."""
        s, cov = self.score.with_covariance(x, t)
        return s, math.sqrt(self.kappa) * cov.draw(generator)

    def draw(self, members: int, generator: Generator = None) -> Field:
        raise InputError("A white kernel is fresh noise at every step, not a field: use sample.effective_sde.")
