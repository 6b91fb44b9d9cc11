r"""Linear models: weighted least squares in closed form (docs/theory.md, §6.4).

.. math:: f = W\phi, \qquad W = \Big[\frac1P \sum_i \omega_i\, y_i \phi_i^T\Big]
          \Big[\frac1P \sum_i \omega_i\, \phi_i \phi_i^T + \gamma\Big]^{-1},

with the ridge :math:`\gamma` added to the *mean* Gram matrix. With :math:`A = \sqrt{\omega/P}\,\phi` (P × F) and
:math:`Y = \sqrt{\omega/P}\, y` this is :math:`W^T = (A^T A + \gamma)^{-1} A^T Y = A^T (A A^T + \gamma)^{-1} Y`: the
smaller of the two systems is solved, for many members at once. A depends on the inputs of the draws alone: members that
differ in nothing but their targets share one factorisation, and their :math:`Y` stand side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor

from vkernel.core.errors import require
from vkernel.process import Process
from vkernel.train.features import Features
from vkernel.train.models.base import Model, State, Tell
from vkernel.train.models.parametrisation import Weight
from vkernel.train.objectives import Batch, Training

__all__ = ["Linear", "factor"]

CHUNK = {"cpu": 1 << 19, "cuda": 1 << 24}  # numbers of A and Y held at once: 4 MB stay in the caches of a CPU


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
        found = []
        for block, sharing in self._blocks(training, members, P):
            found.append(self.solve(training.batch(block, P), training.process, sharing))
            tell(len(block) / len(members))
        return {"weights": torch.cat(found)}

    def _blocks(self, training: Training, members: Sequence[int], P: int) -> Iterator[tuple[Sequence[int], int]]:
        """Members to fit at once, and how many of them in a row share their inputs; a row too long is cut."""
        room = max(1, CHUNK.get(training.data.device.type, CHUNK["cpu"]) // P)
        rows = [len(list(row)) for _, row in groupby(training.keys("inputs", members).tolist())]
        sharing = rows[0] if len(set(rows)) == 1 else 1
        if sharing * training.data.d > room:
            size = max(1, room // training.data.d)
            cuts = [k for row in range(0, len(members), sharing) for k in range(row, row + sharing, size)]
        else:
            size = sharing * max(1, room // (self.features.count + sharing * training.data.d))
            cuts = list(range(0, len(members), size))
        for start, stop in pairwise([*cuts, len(members)]):
            yield members[start:stop], min(sharing, stop - start)

    def solve(self, batch: Batch, process: Process, sharing: int = 1) -> Tensor:
        """The weights ``(M, F, o)`` that fit a batch of draws, of which ``sharing`` in a row have the same inputs."""
        A, Y = self.system(batch, process, sharing)
        P, F = A.shape[-2:]
        if F <= P:
            root = factor(A.mT @ A, self.ridge, F, P)
            W = torch.cholesky_solve(A.mT @ Y, root)
        else:
            root = factor(A @ A.mT, self.ridge, F, P)
            W = A.mT @ torch.cholesky_solve(Y, root)
        return W.unflatten(-1, (sharing, -1)).movedim(2, 1).flatten(0, 1)

    def system(self, batch: Batch, process: Process, sharing: int = 1) -> tuple[Tensor, Tensor]:
        """A ``(M/sharing, P, F)``, Y ``(M/sharing, P, sharing·o)``: features and targets, weighed by sqrt(ω/P)."""
        root = (self.parametrisation.omega(batch.t, process) / batch.t.shape[-1]).sqrt()[..., None]
        Y = root * self.parametrisation.wanted(batch.m, batch.x, batch.t, process)
        Y = Y.unflatten(0, (-1, sharing)).movedim(1, 2).flatten(2)
        return root[::sharing] * self.features(batch.x[::sharing], batch.t[::sharing]), Y

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
