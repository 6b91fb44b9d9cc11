r"""Linear models (docs/theory.md, §6.4).

:class:`Linear` is :math:`f = W\phi`, weighted least squares with the ridge :math:`\gamma` added to the *mean* Gram
matrix (6.3). With :math:`A = \sqrt{\omega/P}\,\phi` (P × F) and :math:`Y = \sqrt{\omega/P}\, y`,

.. math:: W^T = (A^T A + \gamma)^{-1} A^T Y = A^T (A A^T + \gamma)^{-1} Y .

The smaller of the two systems is solved, for many members at once. A depends on the inputs alone, so members that
differ only in their targets share one factorisation, and their :math:`Y` are concatenated."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import ClassVar

import torch
from torch import Tensor

from vkernel.core.checks import check_number
from vkernel.core.errors import require
from vkernel.process import Process
from vkernel.train.features import Features
from vkernel.train.models.base import Model, Report, State, Weight
from vkernel.train.objectives import Batch, Training

CHUNK = {"cpu": 1 << 19, "cuda": 1 << 24}  # numbers of A and Y held at once: 4 MB stay in the caches of a CPU


@dataclass(eq=False)
class Linear(Model):
    """Ridge regression of ``target`` ("score", "x0" or "noise") on ``features``.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> model = vk.models.Linear(vk.features.grid("gaussian", 4, process=process), target="x0")
    >>> vk.train_ensemble(model, data, process, members=2, draws=32)(torch.zeros(5, 1), 0.5).shape
    torch.Size([2, 5, 1])
    """

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
            W = A.mT @ torch.cholesky_solve(Y, factor(self.gram(batch, process, sharing), self.ridge, F, P))
        return W.unflatten(-1, (sharing, -1)).movedim(2, 1).flatten(0, 1)

    def system(self, batch: Batch, process: Process, sharing: int = 1) -> tuple[Tensor, Tensor]:
        """Return A ``(M/sharing, P, F)`` and Y ``(M/sharing, P, sharing·o)``."""
        root = self._root(batch, process)
        Y = root * self.training_target(batch.m, batch.x, batch.t, process)
        Y = Y.unflatten(0, (-1, sharing)).movedim(1, 2).flatten(2)
        return root[::sharing] * self.features(batch.x[::sharing], batch.t[::sharing]), Y

    def gram(self, batch: Batch, process: Process, sharing: int = 1) -> Tensor:
        """Return A Aᵀ ``(M/sharing, P, P)`` without A, which has many more columns."""
        root = self._root(batch, process)[::sharing]
        return root * self.features.gram(batch.x[::sharing], batch.t[::sharing]) * root.mT

    def _root(self, batch: Batch, process: Process) -> Tensor:
        return (self.omega(batch.t, process) / batch.t.shape[-1]).sqrt()[..., None]

    def output(self, state: State, x: Tensor, t: Tensor, process: Process) -> Tensor:
        return self.features.apply(state["weights"].to(x), x, t)

    @property
    def spec(self) -> dict[str, object]:
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
