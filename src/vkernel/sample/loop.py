r"""What every sampler needs: a score in isotropic coordinates, a time grid, and the formulas along it.

An anisotropic process is sampled in whitened coordinates, where :math:`s_w = \Gamma^{1/2} s`; so each sampler is
written once, for an isotropic process, and :class:`Frame` does the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from vkernel.core.covariance import Congruent
from vkernel.core.errors import require
from vkernel.process import Process
from vkernel.score.conversions import Score
from vkernel.score.empirical import EmpiricalScore

__all__ = ["Frame", "Level"]


@dataclass(frozen=True)
class Level:
    """The numbers of the process at one time."""

    t: float
    alpha: float
    sigma: float
    beta: float
    D: float

    @property
    def log_ratio(self) -> float:
        """log(sigma/alpha): half the negative log signal-to-noise ratio."""
        return math.log(self.sigma / self.alpha)


class Frame:
    """A score, a process and a start, checked at the door; whitened inside, told in data coordinates outside."""

    def __init__(self, score: Score, process: Process, x_T: Tensor, steps: int, spacing: str | None) -> None:
        require(isinstance(process, Process), f"A sampler needs a forward process such as vk.VP(), not {process!r}.")
        require(callable(score), f"A sampler needs a score, any callable (x, t) -> tensor; got {score!r}.")
        own = getattr(score, "process", process)
        require(own == process, f"The score belongs to another process ({own!r}) than the sampler's ({process!r}).")
        require(isinstance(x_T, Tensor), f"x_T must be a torch tensor, not {type(x_T).__name__}.")
        require(x_T.ndim >= 1 and not x_T.is_complex(), "x_T must be real, (*batch, *shape).")
        require(bool(x_T.isfinite().all()), "x_T holds NaN or infinite values.")
        self.score, self.process, self.base = score, process, process.base
        x_T = x_T if x_T.is_floating_point() else x_T.to(torch.get_default_dtype())
        self.dtype = x_T.dtype
        wide = x_T if x_T.dtype in (torch.float32, torch.float64) else x_T.float()
        self.x_T = process.whiten(wide)
        self.event = len(score.data.shape) if isinstance(score, EmpiricalScore) else max(x_T.ndim - 1, 1)
        self.shape = tuple(x_T.shape[x_T.ndim - self.event :])
        self.times = process.times(steps, spacing)
        self.spacing = spacing

    def levels(self) -> list[Level]:
        """alpha, sigma, beta and D along the grid, in float64."""
        columns = [getattr(self.base, name)(self.times).tolist() for name in ("alpha", "sigma", "beta", "D")]
        return [Level(*row) for row in zip(self.times.tolist(), *columns, strict=True)]

    def s(self, x: Tensor, level: Level) -> Tensor:
        """The score in whitened coordinates."""
        out = self.score(self.process.unwhiten(x), level.t)
        require(
            isinstance(out, Tensor) and out.shape == x.shape,
            f"The score returned {_describe(out)} for x of shape {tuple(x.shape)}; it must return a tensor like x.",
        )
        return self.process.unwhiten(out)

    def m(self, x: Tensor, level: Level) -> Tensor:
        """The denoiser: exact where the score knows it, else (and under a derivative) by Tweedie's formula."""
        if isinstance(self.score, EmpiricalScore) and not _differentiated(x):
            return self.process.whiten(self.score.denoise(self.process.unwhiten(x), level.t))
        return (x + level.sigma**2 * self.s(x, level)) / level.alpha

    def out(self, x: Tensor) -> Tensor:
        """Back to the coordinates and the precision of the start."""
        told = self.process.unwhiten(x).to(self.dtype)
        good = bool(told.isfinite().all())
        require(good, "The sampler diverged: NaN or infinite values. Take more steps, or log spacing.")
        return told

    def norm(self, x: Tensor) -> Tensor:
        """The norm over an event, one number per sample."""
        return x.double().reshape(*x.shape[: x.ndim - self.event], -1).square().sum(-1).sqrt()

    def noise_trace(self, x: Tensor, level: Level, probes: Tensor | None) -> Tensor:
        r""":math:`\sigma^2 \nabla \cdot s + d`, which is :math:`\sigma^2 \mathrm{tr}\,C` for an exact score."""
        d = math.prod(self.shape)
        if isinstance(self.score, EmpiricalScore):
            cov = self.score.covariance(self.process.unwhiten(x.double()), level.t)
            return level.sigma**2 * (cov.base if isinstance(cov, Congruent) else cov).trace()  # in whitened coordinates
        assert probes is not None

        def along(v: Tensor) -> Tensor:
            tangent: Tensor = torch.func.jvp(lambda y: self.s(y, level), (x,), (v,))[1]
            return (tangent * v).reshape(*x.shape[: x.ndim - self.event], -1).sum(-1)

        divergence = torch.stack([along(v.to(x)) for v in probes]).double().mean(0)
        return level.sigma**2 * divergence + d


def _differentiated(x: Tensor) -> bool:
    return x.requires_grad or forward_ad.unpack_dual(x).tangent is not None


def _describe(out: Any) -> str:
    return f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__


Step = Callable[[Frame, Tensor, Level, Level], Tensor]
