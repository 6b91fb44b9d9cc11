r"""The base class of models, the quantities that a model may predict, and linear models (docs/theory.md, §6.2, §6.4).

A model holds settings and no weights. :meth:`Model.fit` returns the weights of many members at once as a *state*:
named tensors whose first axis is the member. :meth:`Model.output` evaluates :math:`f(x, t)` for a state, and the score
is :math:`\hat s = a_t(x) + B_t f(x,t)`, by the table of :mod:`vkernel.score.base`. The training target of f is
the inverse of this map, applied to the proxy score of :math:`\tilde m` (:mod:`vkernel.train.objectives`). Its weight is
:math:`\omega_t = \lambda_t B_t^2`, so that models with equal :math:`\lambda_t` minimise the same loss.

:class:`Linear` is :math:`f = W\phi`, weighted least squares with the ridge :math:`\gamma` added to the *mean* Gram
matrix (6.3). With :math:`A = \sqrt{\omega/P}\,\phi` (P × F) and :math:`Y = \sqrt{\omega/P}\, y`,

.. math:: W^T = (A^T A + \gamma)^{-1} A^T Y = A^T (A A^T + \gamma)^{-1} Y .

The smaller of the two systems is solved, for many members at once. A depends on the inputs alone, so members that
differ only in their targets share one factorisation, and their :math:`Y` are concatenated.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from vkernel.core.checks import check_number
from vkernel.core.covariance import fits
from vkernel.core.errors import require
from vkernel.process import Process
from vkernel.score.base import convert
from vkernel.train.features import Features
from vkernel.train.objectives import Batch, Training

State = dict[str, Tensor]
Report = Callable[[float], None]
Weight = str | Callable[[Tensor], Tensor]

CHUNK = {"cpu": 1 << 19, "cuda": 1 << 24}  # numbers of A and Y held at once: 4 MB stay in the caches of a CPU
TARGETS = ("score", "x0", "noise")
WEIGHTS = ("sigma2", "one")


class Model(ABC):
    """An architecture and the method that fits it; final kinds are dataclasses, whose fields are the settings.
    ``target`` is what f predicts; ``weight`` is the weighting λ: "sigma2" for σ², "one" for 1, or a function of t."""

    linear: ClassVar[bool] = False  # whether the output is linear in the state
    state_dtype = torch.float64  # in which the model is trained by default
    randomness: tuple[str, ...] = ("inputs", "targets")  # the sources on which the result depends, outermost first
    target: str
    weight: Weight

    def __post_init__(self) -> None:
        require(self.target in TARGETS, f"A model's target is one of {', '.join(TARGETS)}; not {self.target!r}.")
        good = callable(self.weight) or self.weight in WEIGHTS
        require(good, f"weight must be one of {', '.join(WEIGHTS)}, or a function λ(t); got {self.weight!r}.")

    @abstractmethod
    def fit(self, training: Training, members: Sequence[int], report: Report) -> State:
        """Return the states of ``members``; ``report`` receives shares of the work done, which add up to 1."""

    @abstractmethod
    def output(self, state: State, x: Tensor, t: Tensor, process: Process) -> Tensor:
        """Return f, ``(M, N, *shape)``, for ``x (M or 1, N, *shape)`` and ``t (M or 1, N or 1)``."""

    def score(self, state: State, x: Tensor, t: Tensor, process: Process, affine: bool = True) -> Tensor:
        """Return the learned score a + B f, or B f without ``affine``; shapes as in :meth:`output`."""
        return self.to_score(self.output(state, x, t, process), x if affine else torch.zeros_like(x), t, process)

    def to_score(self, f: Tensor, x: Tensor, t: Tensor, process: Process) -> Tensor:
        """Return a + B f; ``t`` has the shape of the batch, or axes of length 1."""
        return convert(f, self.target, "score", x, t, process)

    def training_target(self, m: Tensor, x: Tensor, t: Tensor, process: Process) -> Tensor:
        """Return the training target of f for draws ``x`` whose denoised target is ``m``."""
        return convert(m, "x0", self.target, x, t, process)

    def slope(self, t: Tensor, process: Process) -> Tensor:
        """Return B, like t."""
        return self.to_score(torch.ones_like(t), torch.zeros_like(t), t, process)

    def target_slope(self, t: Tensor, process: Process) -> Tensor:
        """Return the derivative of the training target with respect to ``m``, like t."""
        return self.training_target(torch.ones_like(t), torch.zeros_like(t), t, process)

    def omega(self, t: Tensor, process: Process) -> Tensor:
        """Return ω, the weight of the squared error of f, like t."""
        if callable(self.weight):
            lam = torch.as_tensor(self.weight(t)).to(t)
            good = fits(tuple(lam.shape), tuple(t.shape))
            require(good, f"The weighting λ(t) must be like t, {tuple(t.shape)}; it is {tuple(lam.shape)}.")
            good = bool((lam.isfinite() & (lam >= 0)).all())
            require(good, "The weighting λ(t) must be finite and not negative everywhere on [eps, T].")
        else:
            lam = torch.ones_like(t) if self.weight == "one" else process.S(t)
        return lam * self.slope(t, process).square()

    @property
    def spec(self) -> dict[str, Any]:
        """The settings in JSON, read by :func:`vkernel.train.models.from_spec`; a weighting function is not kept."""
        settings = {f.name: vars(self)[f.name] for f in fields(self)}  # type: ignore[arg-type]
        settings["weight"] = "function" if callable(self.weight) else self.weight
        return {"kind": type(self).__name__.lower(), **settings}


def time_input(t: Tensor, process: Process) -> Tensor:
    """Return log(sigma/alpha), shifted and scaled to [-1, 1] between eps and T: the time input of all networks."""
    wide, (low, high) = t.double(), (math.log(r) for r in process.ratios)
    return (((process.sigma(wide) / process.alpha(wide)).log() - (low + high) / 2) / ((high - low) / 2)).to(t.dtype)


@dataclass(eq=False)
class Linear(Model):
    """Ridge regression of ``target`` ("score", "x0" or "noise") on ``features``."""

    features: Features
    target: str = "score"
    ridge: float = 0.1
    weight: Weight = "sigma2"
    linear: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(isinstance(self.features, Features), f"A linear model needs features, not {self.features!r}.")
        self.ridge = check_number(self.ridge, "ridge", 0)

    def fit(self, training: Training, members: Sequence[int], report: Report) -> State:
        P, shape, dim, found = training.finite_draws("A linear model"), training.data.shape, self.features.dim, []
        require(shape == (dim,), f"The features take vectors of {dim} numbers, but an event of the data is {shape}.")
        for block, sharing in self._blocks(training, members, P):
            found.append(self.solve(training.batch(block, P), training.process, sharing))
            report(len(block) / len(members))
        return {"weights": torch.cat(found)}

    def _blocks(self, training: Training, members: Sequence[int], P: int) -> Iterator[tuple[Sequence[int], int]]:
        """Yield members to fit at once, and how many consecutive ones share inputs; long runs are cut."""
        room = max(1, CHUNK.get(training.data.device.type, CHUNK["cpu"]) // P)
        runs = [len(list(run)) for _, run in groupby(training.keys("inputs", members).tolist())]
        sharing = runs[0] if len(set(runs)) == 1 else 1
        if sharing * training.data.d > room:
            size = max(1, room // training.data.d)
            cuts = [k for run in range(0, len(members), sharing) for k in range(run, run + sharing, size)]
        else:
            size = sharing * max(1, room // (self.features.count + sharing * training.data.d))
            cuts = list(range(0, len(members), size))
        for start, stop in pairwise([*cuts, len(members)]):
            yield members[start:stop], min(sharing, stop - start)

    def solve(self, batch: Batch, process: Process, sharing: int = 1) -> Tensor:
        """Return the weights ``(M, F, o)`` that fit a batch, of which ``sharing`` consecutive members share inputs."""
        A, Y = self.system(batch, process, sharing)
        P, F = A.shape[-2:]
        if F <= P:
            W = torch.cholesky_solve(A.mT @ Y, factor(A.mT @ A, self.ridge, F, P))
        else:
            W = A.mT @ torch.cholesky_solve(Y, factor(A @ A.mT, self.ridge, F, P))
        return W.unflatten(-1, (sharing, -1)).movedim(2, 1).flatten(0, 1)

    def system(self, batch: Batch, process: Process, sharing: int = 1) -> tuple[Tensor, Tensor]:
        """Return A ``(M/sharing, P, F)`` and Y ``(M/sharing, P, sharing·o)``."""
        root = (self.omega(batch.t, process) / batch.t.shape[-1]).sqrt()[..., None]
        Y = root * self.training_target(batch.m, batch.x, batch.t, process)
        Y = Y.unflatten(0, (-1, sharing)).movedim(1, 2).flatten(2)
        return root[::sharing] * self.features(batch.x[::sharing], batch.t[::sharing]), Y

    def output(self, state: State, x: Tensor, t: Tensor, process: Process) -> Tensor:
        return self.features.apply(state["weights"].to(x), x, t)

    @property
    def spec(self) -> dict[str, Any]:
        return super().spec | {"features": self.features.spec}


def factor(gram: Tensor, ridge: float, F: int, P: int) -> Tensor:
    """Return Cholesky's factor of Gram matrices with the ridge added; refuse singular ones."""
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    root, info = torch.linalg.cholesky_ex(gram + ridge * eye)
    pivots = root.diagonal(dim1=-2, dim2=-1)
    least = (pivots.amin(-1) / pivots.amax(-1)).square()
    singular = (info > 0) | ~(least > 4 * gram.shape[-1] * torch.finfo(gram.dtype).eps)
    where = f"{int(singular.sum())} of {singular.numel()} members (F = {F} features, P = {P} draws, ridge = {ridge:g})"
    advice = "give a larger ridge, such as 0.1, more draws, or fewer features"
    require(not singular.any(), f"The least-squares system is singular for {where}: {advice}.")
    return root
