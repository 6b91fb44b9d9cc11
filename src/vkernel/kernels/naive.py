r"""The naive V-kernel: κ C, white, of training points drawn afresh at every step (docs/theory.md, §5)."""

import math

import torch
from torch import Tensor

from vkernel.core.checks import is_number
from vkernel.core.covariance import Covariance, Transformed
from vkernel.core.errors import InputError, require
from vkernel.core.rng import Generator
from vkernel.kernels.base import Kernel
from vkernel.sample.sde import Field
from vkernel.score import EmpiricalScore, Time


class Naive(Kernel):
    """The naive score estimator: V = κ D C D δ(t - t'), with κ in the unit of t (5.9).

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> score = vk.EmpiricalScore(data, process)
    >>> V = vk.kernels.Naive(score, kappa=0.1)
    >>> x = torch.full((1, 1), 0.3)
    >>> bool(torch.isclose(V.cov(x, 0.1).trace(), 0.1 * score.covariance(x, 0.1).trace()))
    True
    """

    white = True

    def __init__(self, score: EmpiricalScore, kappa: float) -> None:
        require(isinstance(score, EmpiricalScore), "The naive kernel needs an EmpiricalScore, from which C follows.")
        require(is_number(kappa) and kappa >= 0, f"kappa must be a number ≥ 0, in the unit of t; got {kappa!r}.")
        self.score, self.kappa, self.process, self._mean = score, float(kappa), score.process, score

    def cov(self, x: Tensor, t: Time, x2: Tensor | None = None, t2: Time | None = None) -> Covariance:
        require(x2 is None and t2 is None, "A white kernel has no covariance between two times: give x and t alone.")
        return Transformed(self.score.covariance(x, t), torch.tensor(math.sqrt(self.kappa), dtype=torch.float64))

    def mean_and_noise(self, x: Tensor, t: Time, generator: Generator = None) -> tuple[Tensor, Tensor]:
        """Return the score and a Gaussian draw of covariance κ C, from one posterior."""
        s, cov = self.score.with_covariance(x, t)
        return s, math.sqrt(self.kappa) * cov.draw(generator)

    def draw(self, members: int, generator: Generator = None) -> Field:
        raise InputError("A white kernel is fresh noise at every step, not a field: use sample.effective_sde.")
