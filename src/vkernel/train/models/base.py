r"""The base class of models, and the quantities that a model may predict (docs/theory.md, §6.2).

A model holds settings and no weights. :meth:`Model.fit` returns the weights of many members at once as a *state*:
named tensors whose first axis is the member. :meth:`Model.output` evaluates :math:`f(x, t)` for a state, and the score
is :math:`\hat s = a_t(x) + B_t f(x,t)`. The training target of f is the inverse of this map, applied to the proxy score
of :math:`\tilde m` (:mod:`vkernel.train.objectives`). Its weight is :math:`\omega_t = \lambda_t B_t^2`, so that models
with equal :math:`\lambda_t` minimise the same loss:

=========  ==================  ===================  ========================================  ====================
target     :math:`a_t(x)`      :math:`B_t`          training target                           weight
=========  ==================  ===================  ========================================  ====================
score      0                   1                    :math:`(\alpha\tilde m - x)/\sigma^2`     λ
x0         -x/σ²               α/σ²                 :math:`\tilde m`                          λ α²/σ⁴
noise      0                   -1/σ                 :math:`(x - \alpha\tilde m)/\sigma`       λ/σ²
=========  ==================  ===================  ========================================  ====================
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from vkernel.core.covariance import fits, over_event
from vkernel.core.errors import require
from vkernel.process import Process
from vkernel.train.objectives import Training

State = dict[str, Tensor]
Report = Callable[[float], None]
Weight = str | Callable[[Tensor], Tensor]

TARGETS = ("score", "x0", "noise")
WEIGHTS = ("sigma2", "one")


@dataclass(frozen=True)
class Parametrisation:
    """The maps of the table for one ``target`` and one weighting λ: "sigma2" is σ², "one" is 1, or a function of t."""

    target: str
    weight: Weight = "sigma2"

    def __post_init__(self) -> None:
        require(self.target in TARGETS, f"A model's target is one of {', '.join(TARGETS)}; not {self.target!r}.")
        good = callable(self.weight) or self.weight in WEIGHTS
        require(good, f"weight must be one of {', '.join(WEIGHTS)}, or a function λ(t); got {self.weight!r}.")

    def slope(self, t: Tensor, process: Process) -> Tensor:
        """Return B, like t."""
        if self.target == "score":
            return torch.ones_like(t)
        sigma = process.sigma(t)
        return process.alpha(t) / sigma.square() if self.target == "x0" else -1 / sigma

    def score(self, f: Tensor, x: Tensor, t: Tensor, process: Process, affine: bool = True) -> Tensor:
        """Return a + B f, or B f without ``affine``; ``t`` has the shape of the batch, or leading axes of length 1."""
        shape = tuple(x.shape[t.ndim :])
        s = over_event(self.slope(t, process), shape) * f
        return s - x / over_event(process.S(t), shape) if affine and self.target == "x0" else s

    def training_target(self, m: Tensor, x: Tensor, t: Tensor, process: Process) -> Tensor:
        """Return the training target of f for draws ``x`` whose denoised target is ``m``."""
        if self.target == "x0":
            return m
        shape = tuple(x.shape[t.ndim :])
        alpha, sigma = (over_event(f(t), shape) for f in (process.alpha, process.sigma))
        noise = (x - alpha * m) / sigma
        return noise if self.target == "noise" else -noise / sigma

    def target_slope(self, t: Tensor, process: Process) -> Tensor:
        r"""Return the derivative :math:`\alpha/(\sigma^2 B)` of the training target with respect to ``m``, like t."""
        return process.alpha(t) / (process.S(t) * self.slope(t, process))

    def omega(self, t: Tensor, process: Process) -> Tensor:
        """Return ω, the weight of the squared error of f, like t."""
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


class Model(ABC):
    """An architecture and the method that fits it; final kinds are dataclasses, whose fields are the settings."""

    linear: ClassVar[bool] = False  # whether the output is linear in the state
    target: str
    weight: Weight

    def __post_init__(self) -> None:
        self.parametrisation = Parametrisation(self.target, self.weight)

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype in which the model is trained by default."""
        return torch.float64

    @property
    def randomness(self) -> tuple[str, ...]:
        """The sources of randomness in training that the result depends on, outermost first."""
        return ("inputs", "targets")

    @abstractmethod
    def fit(self, training: Training, members: Sequence[int], report: Report) -> State:
        """Return the states of ``members``; ``report`` receives shares of the work done, which add up to 1."""

    @abstractmethod
    def output(self, state: State, x: Tensor, t: Tensor, process: Process) -> Tensor:
        """Return f, ``(M, N, *shape)``, for ``x (M or 1, N, *shape)`` and ``t (M or 1, N or 1)``."""

    def score(self, state: State, x: Tensor, t: Tensor, process: Process, affine: bool = True) -> Tensor:
        """Return the learned score a + B f, or B f without ``affine``; shapes as in :meth:`output`."""
        return self.parametrisation.score(self.output(state, x, t, process), x, t, process, affine)

    @property
    def spec(self) -> dict[str, Any]:
        """The settings in JSON, read by :func:`vkernel.train.models.from_spec`; a weighting function is not kept."""
        settings = {f.name: vars(self)[f.name] for f in fields(self)}  # type: ignore[arg-type]
        if callable(self.weight):
            settings["weight"] = "function"
        return {"kind": type(self).__name__.lower(), **settings}


@functools.lru_cache(maxsize=64)
def _time_range(process: Process) -> tuple[float, float]:
    """Return the middle and half the length of the range of log(sigma/alpha)."""
    ends = torch.tensor([process.eps, process.T], dtype=torch.float64)
    low, high = (process.sigma(ends) / process.alpha(ends)).log().tolist()
    return (low + high) / 2, (high - low) / 2


def time_input(t: Tensor, process: Process) -> Tensor:
    """Return log(sigma/alpha), shifted and scaled to [-1, 1] between eps and T: the time input of all networks."""
    middle, half = _time_range(process)
    wide = t.double()
    return (((process.sigma(wide) / process.alpha(wide)).log() - middle) / half).to(t.dtype)
