r"""Linear models: weighted least squares in closed form (docs/theory.md, §6.4).

.. math:: f = W\phi, \qquad W = \Big[\frac1P \sum_i \omega_i\, y_i \phi_i^T\Big]
          \Big[\frac1P \sum_i \omega_i\, \phi_i \phi_i^T + \gamma\Big]^{-1},

with the ridge :math:`\gamma` added to the *mean* Gram matrix. With :math:`A = \sqrt{\omega/P}\,\phi` (P × F) and
:math:`Y = \sqrt{\omega/P}\, y` this is :math:`W^T = (A^T A + \gamma)^{-1} A^T Y = A^T (A A^T + \gamma)^{-1} Y`: the
smaller of the two systems is solved, for all members at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vkernel.errors import require
from vkernel.features import Features
from vkernel.models.base import Model, State, Tell
from vkernel.models.parametrisation import Weight
from vkernel.objective import Batch, Training
from vkernel.process import Process

__all__ = ["Linear", "factor"]

CHUNK = 1 << 24  # numbers of A held at once


class Linear(Model):
    """Ridge regression on ``features``; ``target`` is what f is, "score", "x0" or "noise"."""

    linear = True

    def __init__(
        self, features: Features, target: str = "score", ridge: float = 0.1, weight: str | Weight | None = None
    ) -> None:
        super().__init__(target, weight)
        require(isinstance(features, Features), f"A linear model needs features, not {features!r}.")
        good = isinstance(ridge, int | float) and 0 <= ridge < float("inf")
        require(good, f"ridge must be a number ≥ 0; got {ridge!r}.")
        self.features, self.ridge = features, float(ridge)

    def fit(self, training: Training, members: Sequence[int], tell: Tell) -> State:
        P = training.draws
        require(P is not None, "A linear model is fitted to a finite number of draws: give draws=P.")
        assert P is not None
        require(training.data.shape == (self.features.dim,), self._wrong_shape(training.data.shape))
        at_once = max(1, CHUNK // (P * self.features.count))
        blocks = [members[i : i + at_once] for i in range(0, len(members), at_once)]
        found = []
        for block in blocks:
            found.append(self.solve(training.batch(block, P), training.process))
            tell(len(block) / len(members))
        return {"weights": torch.cat(found)}

    def solve(self, batch: Batch, process: Process) -> Tensor:
        """The weights ``(M, F, o)`` that fit a batch of draws."""
        A, Y = self.system(batch, process)
        P, F = A.shape[-2:]
        if F <= P:
            root = factor(A.mT @ A, self.ridge, F, P)
            return torch.cholesky_solve(A.mT @ Y, root)
        root = factor(A @ A.mT, self.ridge, F, P)
        return A.mT @ torch.cholesky_solve(Y, root)

    def system(self, batch: Batch, process: Process) -> tuple[Tensor, Tensor]:
        """A ``(M, P, F)`` and Y ``(M, P, o)``: features and targets, weighed by sqrt(ω/P)."""
        root = (self.parametrisation.omega(batch.t, process) / batch.t.shape[-1]).sqrt()[..., None]
        wanted = self.parametrisation.wanted(batch.m, batch.x, batch.t, process)
        return root * self.features(batch.x, batch.t), root * wanted

    def output(self, state: State, x: Tensor, t: Tensor, process: Process) -> Tensor:
        return self.features.apply(state["weights"].to(x), x, t)

    @property
    def spec(self) -> dict[str, Any]:
        return {"kind": "linear", "features": self.features.spec, "ridge": self.ridge, **self._common()}

    def _wrong_shape(self, shape: tuple[int, ...]) -> str:
        return f"The features take vectors of {self.features.dim} numbers, but an event of the data has shape {shape}."

    def __repr__(self) -> str:
        return f"Linear({self.features!r}, target={self.target!r}, ridge={self.ridge:g})"


def factor(gram: Tensor, ridge: float, F: int, P: int) -> Tensor:
    """Cholesky's factor of Gram matrices with the ridge added; refused where they are singular."""
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    root, info = torch.linalg.cholesky_ex(gram + ridge * eye)
    pivots = root.diagonal(dim1=-2, dim2=-1)
    least = (pivots.amin(-1) / pivots.amax(-1)).square()
    singular = (info > 0) | ~(least > 4 * gram.shape[-1] * torch.finfo(gram.dtype).eps)
    count = int(singular.sum())
    require(
        count == 0,
        f"The least-squares system is singular for {count} of {singular.numel()} members (F = {F} features, P = {P} "
        f"draws, ridge = {ridge:g}): give a larger ridge, such as 0.1, more draws, or fewer features.",
    )
    return root
