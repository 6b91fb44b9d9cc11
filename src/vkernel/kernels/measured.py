r"""The V-kernel that an ensemble shows: the sample covariance of its members' scores (docs/theory.md, §8.4).

.. math:: \mathrm{Cov}[\hat s, \hat s'] = \frac{1}{M-1} \sum_m (\hat s_m - s_{avg})(\hat s_m' - s_{avg}')^T ,
          \qquad \delta\hat s = \frac{1}{\sqrt{M-1}} \sum_m z_m\,(\hat s_m - s_{avg}), \quad z \sim N(0, 1) .

The field on the right is Gaussian with exactly this covariance: what the effective SDE makes of the ensemble. Comparing
its samples with the members' own says what the cumulants beyond the second do.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.covariance import Covariance
from vkernel.core.errors import require
from vkernel.core.rng import Generator
from vkernel.kernels.base import Field, Kernel, Time, own
from vkernel.sample.scores import Scores

__all__ = ["Measured"]

FEW = 20  # members below which a covariance says little: its relative error is sqrt(2 / (M - 1))


class Measured(Kernel):
    """The covariance measured over the finite members of ``scores``; its relative error is sqrt(2/(units-1)).

    ``scores`` are a trained :class:`~vkernel.train.ensemble.Ensemble` or loaded
    :class:`~vkernel.adapters.checkpoints.Checkpoints`; units are independent groups, or members without groups.
    """

    def __init__(self, scores: Scores) -> None:
        require(isinstance(scores, Scores), f"A measured kernel needs an Ensemble or Checkpoints, not {scores!r}.")
        self.members = len(scores) - len(scores.diverged)
        require(self.members >= 2, f"A covariance over members needs two finite ones. {scores.report}")
        self.scores, self.process = scores.finite, scores.process
        self.mean_of, self.units = scores.mean_score, self.scores.groups.units
        words = f"measured over {self.members} members: variances are known to {100 * self.relative_error:.0f} %"
        enough = self.units >= FEW
        self._judge(enough, words if enough else f"{words}. Train at least {FEW} members.")

    @property
    def relative_error(self) -> float:
        """The relative standard error of a variance."""
        return math.sqrt(2 / (self.units - 1))

    def cov(self, x: Tensor, t: Time, x2: Tensor | None = None, t2: Time | None = None) -> Covariance:
        return self.scores.cov(x, t, x2, t2)

    def factors(self, x: Tensor, t: Time) -> Tensor:
        """Return factors of the covariance, ``(K, *batch, *shape)``."""
        return self.scores.deviations(x, t)

    def draw(self, members: int, generator: Generator = None) -> Field:
        require(members >= 1, f"A field is drawn for at least one member; got {members}.")
        source = rng.as_generator(generator)
        groups, device = self.scores.groups, self.scores.device
        if not groups.grouped:
            z = rng.randn((members, self.members), source, device, torch.float64)
            return self.scores.combine((z - z.mean(1, keepdim=True)) / math.sqrt(self.members - 1))
        z = rng.randn((members, groups.units + self.members), source, device, torch.float64)

        def field(x: Tensor, t: Time) -> Tensor:
            own(x, members)
            modes = self.factors(x, t)  # (K, members, *batch, *shape)
            return (z.mT.to(modes).reshape(len(modes), members, *(1,) * (x.ndim - 1)) * modes).sum(0)

        return field
