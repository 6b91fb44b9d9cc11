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
from vkernel.core.covariance import Covariance, Generator
from vkernel.core.errors import require
from vkernel.kernels.base import Field, Kernel, Time, own
from vkernel.train.ensemble import Ensemble

__all__ = ["Measured"]

FEW = 20  # members below which a covariance says little: its relative error is sqrt(2 / (M - 1))


class Measured(Kernel):
    """The covariance measured over the finite members of ``ensemble``; its relative error is sqrt(2/(M-1))."""

    def __init__(self, ensemble: Ensemble) -> None:
        require(isinstance(ensemble, Ensemble), f"A measured kernel needs an Ensemble, not {ensemble!r}.")
        self.ensemble, self.process = ensemble, ensemble.process
        self.members = len(ensemble) - len(ensemble.diverged)
        require(self.members >= 2, f"A covariance over members needs two finite ones. {ensemble.report}")
        error = math.sqrt(2 / (self.members - 1))
        words = f"measured over {self.members} members: variances are known to {100 * error:.0f} %"
        enough = self.members >= FEW
        self._judge(enough, words if enough else f"{words}. Train at least {FEW} members.")

    def cov(self, x: Tensor, t: Time, x2: Tensor | None = None, t2: Time | None = None) -> Covariance:
        return self.ensemble.cov(x, t, x2, t2)

    def factors(self, x: Tensor, t: Time) -> Tensor:
        """Factors of the covariance, ``(M, *batch, *shape)``."""
        return self.ensemble.deviations(x, t)

    def s_avg(self, x: Tensor, t: Time) -> Tensor:
        """The members' mean score, like x."""
        return self.ensemble.mean(x, t)

    def draw(self, members: int, generator: Generator = None) -> Field:
        require(members >= 1, f"A field is drawn for at least one member; got {members}.")
        source = rng.as_generator(generator)
        z = rng.randn((members, self.members), source, self.ensemble.device, torch.float64)
        z = (z - z.mean(1, keepdim=True)) / math.sqrt(self.members - 1)  # the mean score drops out
        state = self.ensemble._healthy
        if self.ensemble.model.linear:  # a member of its own for each field
            mixed = {k: torch.tensordot(z.to(a), a, dims=1) for k, a in state.items()}
            model = self.ensemble.model

            def linear(x: Tensor, t: Time) -> Tensor:
                own(x, members)
                when = self.ensemble._time(t, tuple(x.shape[1:-1]) if _scalar(t) else tuple(x.shape[:-1])).to(x)
                when = when.reshape(1, 1) if _scalar(t) else when.reshape(members, -1)
                f = model.output(mixed, x.reshape(members, -1, x.shape[-1]), when, self.process)
                return (model.parametrisation.slope(when, self.process)[..., None] * f).reshape(x.shape)

            return linear

        def field(x: Tensor, t: Time) -> Tensor:
            own(x, members)
            s = self.ensemble._shared(state, x, t)  # (M, members, *batch, *shape)
            return (z.mT.to(s).reshape(self.members, members, *(1,) * (x.ndim - 1)) * s).sum(0)

        return field


def _scalar(t: Time) -> bool:
    return not isinstance(t, Tensor) or t.ndim == 0
