"""What every V-kernel has: the covariance, the factor D on both sides, a field, and whether its assumptions hold."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from vkernel.core.covariance import Congruent, Covariance, Generator, Scaled
from vkernel.core.errors import require
from vkernel.process import Anisotropic, Process

__all__ = ["Field", "Kernel", "ValidityWarning", "own", "times"]

Time = float | Tensor
Field = Callable[[Tensor, Time], Tensor]


class ValidityWarning(UserWarning):
    """A theory kernel is used outside the range in which it was derived."""


class Kernel(ABC):
    """The covariance of the learned score; ``valid`` and ``why`` say whether its assumptions hold."""

    white: bool = False
    valid: bool = True
    why: str = "exact"
    process: Process

    @abstractmethod
    def cov(self, x: Tensor, t: Time, x2: Tensor | None = None, t2: Time | None = None) -> Covariance:
        """:math:`\\mathrm{Cov}_\\theta[\\hat s(x,t), \\hat s(x',t')]`, paired over the broadcast batch."""

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

    @abstractmethod
    def draw(self, members: int, generator: Generator = None) -> Field:
        """One field per member: ``field(x, t)`` with x ``(members, *batch, *shape)`` is :math:`\\delta\\hat s`."""

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__} kernel ({'valid' if self.valid else 'not valid'}: {self.why}) of {self.process!r}"
        )

    def _judge(self, valid: bool, why: str) -> None:
        """Say whether the assumptions hold, and warn if they do not."""
        self.valid, self.why = valid, why
        if not valid:
            warnings.warn(f"{type(self).__name__} kernel: {why}", ValidityWarning, stacklevel=3)


def own(x: Tensor, members: int) -> None:
    """Refuse places that are not one set for each member of a field."""
    good = isinstance(x, Tensor) and x.ndim >= 2 and len(x) == members
    require(good, f"A field of {members} members takes x ({members}, *batch, *shape); got {tuple(x.shape)}.")


def times(t: Time, x: Tensor) -> Tensor:
    """t over the batch of vectors x."""
    return torch.as_tensor(t, dtype=x.dtype, device=x.device).expand(x.shape[:-1])
