r"""What a model predicts, and the score it means (docs/theory.md, §6.2).

A model's output f is tied to the score by :math:`\hat s = a_t(x) + B_t f(x,t)`. Its training target is the same map
backwards, applied to the proxy score of :math:`\tilde m` (see :mod:`vkernel.train.objectives`), and its weight is
:math:`\omega_t = \lambda_t B_t^2`, so that the same :math:`\lambda_t` means the same loss:

=========  ==================  ===================  ========================================  ====================
target     :math:`a_t(x)`      :math:`B_t`          training target                           weight
=========  ==================  ===================  ========================================  ====================
score      0                   1                    :math:`(\alpha\tilde m - x)/\sigma^2`     λ
x0         -x/σ²               α/σ²                 :math:`\tilde m`                          λ α²/σ⁴
noise      0                   -1/σ                 :math:`(x - \alpha\tilde m)/\sigma`       λ/σ²
=========  ==================  ===================  ========================================  ====================
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vkernel.core.covariance import fits, over_event
from vkernel.core.errors import require
from vkernel.process import Process

__all__ = ["Parametrisation", "Weight"]

Weight = Callable[[Tensor], Tensor]
TARGETS = ("score", "x0", "noise")
WEIGHTS = ("sigma2", "one")


class Parametrisation:
    """The maps of the table, for one ``target`` and one weighting λ: ``None`` or "sigma2" is σ², "one" is 1."""

    def __init__(self, target: str, weight: str | Weight | None = None) -> None:
        require(target in TARGETS, f"A model's target is one of {', '.join(TARGETS)}; not {target!r}.")
        good = weight is None or callable(weight) or weight in WEIGHTS
        require(good, f"weight must be None, one of {', '.join(WEIGHTS)}, or a function λ(t); got {weight!r}.")
        self.target, self.weight = target, "sigma2" if weight is None else weight

    def slope(self, t: Tensor, process: Process) -> Tensor:
        """B, of t's shape."""
        if self.target == "score":
            return torch.ones_like(t)
        sigma = process.sigma(t)
        return process.alpha(t) / sigma.square() if self.target == "x0" else -1 / sigma

    def score(self, f: Tensor, x: Tensor, t: Tensor, process: Process) -> Tensor:
        """The score of an output ``f``; ``t`` has the shape of the batch, or leading axes of length 1."""
        shape = tuple(x.shape[t.ndim :])
        s = over_event(self.slope(t, process), shape) * f
        return s - x / over_event(process.S(t), shape) if self.target == "x0" else s

    def wanted(self, m: Tensor, x: Tensor, t: Tensor, process: Process) -> Tensor:
        """The training target for a draw whose denoised target is ``m``."""
        if self.target == "x0":
            return m
        shape = tuple(x.shape[t.ndim :])
        alpha, sigma = (over_event(f(t), shape) for f in (process.alpha, process.sigma))
        noise = (x - alpha * m) / sigma
        return noise if self.target == "noise" else -noise / sigma

    def unit(self, t: Tensor, process: Process) -> Tensor:
        """The derivative of the training target by ``m``: what turns Cov of m into Cov of the target."""
        if self.target == "x0":
            return torch.ones_like(t)
        sigma = process.sigma(t)
        ratio = process.alpha(t) / sigma
        return -ratio if self.target == "noise" else ratio / sigma

    def omega(self, t: Tensor, process: Process) -> Tensor:
        """The weight of a draw's squared error in units of the output."""
        if callable(self.weight):
            lam = torch.as_tensor(self.weight(t)).to(t)
            good = fits(tuple(lam.shape), tuple(t.shape))
            require(good, f"The weighting λ(t) must be like t, {tuple(t.shape)}; it is {tuple(lam.shape)}.")
            lam = lam.expand(t.shape)
            good = bool(lam.isfinite().all()) and bool((lam >= 0).all())
            require(good, "The weighting λ(t) must be finite and not negative everywhere on [eps, T].")
        else:
            lam = torch.ones_like(t) if self.weight == "one" else process.S(t)
        return lam * self.slope(t, process).square()
