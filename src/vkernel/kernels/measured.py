"""The V-kernel that is measured over the members of an ensemble, or over checkpoints (docs/theory.md, §8.4)."""

import math

import torch
from torch import Tensor

from vkernel.core.covariance import Covariance
from vkernel.core.errors import require
from vkernel.core.rng import Generator
from vkernel.core.variance import Groups
from vkernel.kernels.base import Kernel
from vkernel.sample.scores import Scores
from vkernel.sample.sde import Field
from vkernel.score.base import Time

ENOUGH = 20  # units below which the relative error sqrt(2 / (units - 1)) is too large for a prediction


class Measured(Kernel):
    r"""The covariance over the finite members of ``scores`` (an Ensemble, Checkpoints), for events of any shape.

    Its field :math:`\sum_m z_m\,(\hat s_m - s_{avg})/\sqrt{M-1}`, z standard normal, is Gaussian: samples differ from
    those of the members by the cumulants beyond the second. With groups, factors of the covariance replace deviations.
    The error is that of the jackknife, or, with too few units for it, that of Gaussian scores, sqrt(2 / (units - 1)).

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> model = vk.models.Linear(vk.features.grid("gaussian", 4, process=process), target="x0")
    >>> V = vk.kernels.Measured(vk.train_ensemble(model, data, process, members=20, draws=32))
    >>> V.valid, V.why
    (True, 'measured over 20 members: variances are known to 32 %')
    >>> V.draw(2, generator=0)(torch.zeros(2, 5, 1), 0.5).shape
    torch.Size([2, 5, 1])
    """

    def __init__(self, scores: Scores) -> None:
        require(isinstance(scores, Scores), f"A measured kernel needs an Ensemble or Checkpoints, not {scores!r}.")
        self.members = len(scores) - len(scores.diverged)
        require(self.members >= 2, f"A covariance over members needs two finite ones. {scores.report}")
        self.scores, self.process = scores.finite, scores.process
        self._mean, self.device = scores.mean_score, scores.device
        units = self.scores.groups.units
        self.relative_error = math.sqrt(2 / (units - 1))
        why = f"measured over {self.members} members: variances are known to {100 * self.relative_error:.0f} %"
        self._assess(units >= ENOUGH, why, f"Train at least {ENOUGH} members.")

    def cov(self, x: Tensor, t: Time, x2: Tensor | None = None, t2: Time | None = None) -> Covariance:
        return self.scores.cov(x, t, x2, t2)

    def factors(self, x: Tensor, t: Time) -> Tensor:
        return self.scores.deviations(x, t)

    def estimates(self, x: Tensor, t: Time) -> Tensor | None:
        s, groups = self.scores(x, t).double(), self.scores.groups
        event = len(self.mean.split(x)[0])

        def variance(some: Tensor, groups: Groups) -> Tensor:
            return groups.factors(some).flatten(1 + event).square().sum((0, -1))

        if not groups.grouped:
            return (s - s.mean(0)).flatten(1 + event).square().sum(-1) * (len(s) / (len(s) - 1))
        whole, kept, n = variance(s, groups), groups.without(), groups.units  # the jackknife's pseudo-values
        return torch.stack([n * whole - (n - 1) * variance(s[k], groups.keep(k)) for k in kept]) if kept else None

    def error(self, x: Tensor, t: Time) -> Tensor:
        if self.valid:
            return super().error(x, t)
        return torch.full(self.mean.split(x)[0], self.relative_error, dtype=x.dtype, device=x.device)

    def draw(self, members: int, generator: Generator = None) -> Field:
        # factors are linear in the scores: those of the identity turn normals into weights of the members
        factors = self.scores.groups.factors(torch.eye(self.members, dtype=torch.float64, device=self.device))
        return self.scores.combine(self._normals(members, len(factors), generator) @ factors)
