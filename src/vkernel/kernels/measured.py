r"""The V-kernel measured on an ensemble: the sample covariance of its members' scores (docs/theory.md, §8.4).

.. math:: \mathrm{Cov}[\hat s, \hat s'] = \frac{1}{M-1} \sum_m (\hat s_m - s_{avg})(\hat s_m' - s_{avg}')^T ,
          \qquad \delta\hat s = \frac{1}{\sqrt{M-1}} \sum_m z_m\,(\hat s_m - s_{avg}), \quad z \sim N(0, 1) .

The field on the right is Gaussian with exactly this covariance. The difference between its samples and those of the
members is the effect of the cumulants beyond the second. With groups, factors of the covariance of
:class:`~vkernel.sample.scores.Scores` replace the deviations.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.checks import check_whole
from vkernel.core.covariance import Covariance
from vkernel.core.errors import require
from vkernel.core.rng import Generator
from vkernel.kernels.base import Kernel
from vkernel.sample.scores import Scores
from vkernel.sample.sde import Field
from vkernel.score.base import Time

ENOUGH = 20  # units below which the relative error sqrt(2 / (units - 1)) is too large for a prediction


class Measured(Kernel):
    """The covariance measured over the finite members of ``scores``, for events of any shape.

    ``scores`` are a trained :class:`~vkernel.train.ensemble.Ensemble`, loaded
    :class:`~vkernel.adapters.checkpoints.Checkpoints` or other :class:`~vkernel.sample.scores.Scores`.
    """

    def __init__(self, scores: Scores) -> None:
        require(isinstance(scores, Scores), f"A measured kernel needs an Ensemble or Checkpoints, not {scores!r}.")
        self.members = len(scores) - len(scores.diverged)
        require(self.members >= 2, f"A covariance over members needs two finite ones. {scores.report}")
        self.scores, self.process, self._mean, self.device = (
            scores.finite,
            scores.process,
            scores.mean_score,
            scores.device,
        )
        units = self.scores.groups.units
        self.relative_error = math.sqrt(2 / (units - 1))
        why = f"measured over {self.members} members: variances are known to {100 * self.relative_error:.0f} %"
        self._assess(units >= ENOUGH, why, f"Train at least {ENOUGH} members.")

    def cov(self, x: Tensor, t: Time, x2: Tensor | None = None, t2: Time | None = None) -> Covariance:
        return self.scores.cov(x, t, x2, t2)

    def factors(self, x: Tensor, t: Time) -> Tensor:
        return self.scores.deviations(x, t)

    def error(self, x: Tensor, t: Time) -> Tensor:
        batch = self.mean.split(x)[0]
        return torch.full(batch, self.relative_error, dtype=torch.float64, device=x.device)

    def draw(self, members: int, generator: Generator = None) -> Field:
        check_whole(members, "the number of members of a field")
        # factors are linear in the scores: those of the identity turn normals into weights of the members
        factors = self.scores.groups.factors(torch.eye(self.members, dtype=torch.float64, device=self.device))
        z = rng.randn((members, len(factors)), rng.as_generator(generator), self.device, torch.float64)
        return self.scores.combine(z @ factors)
