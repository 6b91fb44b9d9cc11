"""What every V-kernel has: the covariance, the factor D on both sides, a field, and whether its assumptions hold."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from vkernel.core.covariance import Congruent, Covariance, Scaled
from vkernel.core.errors import InputError, require
from vkernel.process import Anisotropic, Process
from vkernel.sample.sde import Field, VKernel
from vkernel.score.base import Score, Time

__all__ = ["Field", "Kernel", "PredictedMean", "Time", "ValidityWarning", "own", "times"]


class ValidityWarning(UserWarning):
    """A theory kernel is used outside the range in which it was derived."""


class Kernel(VKernel):
    """The covariance of the learned score; ``valid`` and ``why`` say whether its assumptions hold."""

    valid: bool = True
    why: str = "exact"
    mean_of: Score | None = None

    @property
    def mean(self) -> Score:
        """The mean score that belongs to the kernel."""
        if self.mean_of is None:
            raise InputError(f"This {type(self).__name__} kernel was made without a mean score: give mean=…")
        return self.mean_of

    def __call__(self, x: Tensor, t: Time, x2: Tensor | None = None, t2: Time | None = None) -> Covariance:
        """:math:`V = D\\, \\mathrm{Cov}\\, D'`."""
        here, there = (
            self.process.base.D(torch.as_tensor(u, dtype=torch.float64, device=x.device))
            for u in (t, t if t2 is None else t2)
        )
        return self._between(Scaled(self.cov(x, t, x2, t2), (here * there).sqrt()))

    def _between(self, cov: Covariance) -> Covariance:
        """Γ on both sides where the noise has a shape."""
        return Congruent(cov, self.process.gamma) if isinstance(self.process, Anisotropic) else cov

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__} kernel ({'valid' if self.valid else 'not valid'}: {self.why}) of {self.process!r}"
        )

    def _judge(self, valid: bool, why: str) -> None:
        """Say whether the assumptions hold, and warn if they do not."""
        self.valid, self.why = valid, why
        if not valid:
            warnings.warn(f"{type(self).__name__} kernel: {why}", ValidityWarning, stacklevel=3)


class PredictedMean(Score):
    """The mean score that a kernel predicts, as a score on vectors of length d."""

    def __init__(self, function: Callable[[Tensor, Time], Tensor], process: Process, d: int) -> None:
        self.function, self.process, self.shape = function, process, (d,)

    def __call__(self, x: Tensor, t: Time) -> Tensor:
        return self.function(x, t)


def own(x: Tensor, members: int) -> None:
    """Refuse places that are not one set for each member of a field."""
    good = isinstance(x, Tensor) and x.ndim >= 2 and len(x) == members
    require(good, f"A field of {members} members takes x ({members}, *batch, *shape); got {tuple(x.shape)}.")


def times(t: Time, x: Tensor) -> Tensor:
    """t over the batch of vectors x."""
    return torch.as_tensor(t, dtype=x.dtype, device=x.device).expand(x.shape[:-1])
