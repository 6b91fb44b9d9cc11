"""A training set under a process, with labels and mirror images, and its exact scores (docs/theory.md, §6.6).

**Labels.** A class-conditional model learns one law for each label: a draw has the label of its origin, and m, the
posterior and its covariance are those of the points of this label, with weights in proportion.

**Flips.** The training set is the images and their mirror images, m and the posterior included: image i is i + n
mirrored, and the two share its weight.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from vkernel.core.checks import as_tensor
from vkernel.core.errors import require
from vkernel.data.empirical import Array, Empirical
from vkernel.process import Process
from vkernel.process.base import check_process
from vkernel.score.empirical import EmpiricalScore


class TrainingSet:
    """What models are trained on: ``data`` and ``labels`` hold the mirror images too if ``flips``."""

    def __init__(
        self, data: Empirical | Array, process: Process, labels: Array | None = None, flips: bool = False
    ) -> None:
        check_process(process, "Training")
        require(process.base is process, "Models are trained with isotropic noise; whiten the data first.")
        sigma = float(process.sigma(torch.tensor(process.eps, dtype=torch.float64)))
        require(sigma > 0, f"There is no noise at eps in {process!r}, so the score has no value there; raise eps.")
        require(isinstance(flips, bool), f"flips is True, for images and their mirror images, or False; got {flips!r}.")
        self.process, self.flips = process, flips
        self.data = data if isinstance(data, Empirical) else Empirical(data)
        self.labels = None if labels is None else _check_labels(labels, self.data)
        if flips:
            self.data, self.labels = self.data.mirrored(), None if self.labels is None else self.labels.repeat(2)

    @functools.cached_property
    def score(self) -> EmpiricalScore:
        """The exact score of the data."""
        return EmpiricalScore(self.data, self.process)

    @functools.cached_property
    def classes(self) -> dict[int, tuple[EmpiricalScore, Tensor]]:
        """For each label with points of positive weight: the exact score of its points, and their indices."""
        if self.labels is None:
            return {}
        index = {
            k: (self.labels == k).nonzero().flatten() for k in self.labels[self.data.weights > 0].unique().tolist()
        }
        return {k: (EmpiricalScore(self.data.subset(own), self.process), own) for k, own in index.items()}

    def by_class(
        self, origin: Tensor, label: Tensor | None = None
    ) -> Iterator[tuple[EmpiricalScore, slice | Tensor, Tensor]]:
        """Yield for each label the exact score of its points, the rows of its draws, and their origins among these.
        ``label (N,)`` is that of the origins by default; draws with a label of no class have the score of all data."""
        if self.labels is None:
            yield self.score, slice(None), origin
            return
        label = self.labels[origin] if label is None else label
        for k in label.unique().tolist():
            rows = (label == k).nonzero().flatten()
            if k in self.classes:
                score, own = self.classes[k]
                yield score, rows, torch.searchsorted(own, origin[rows])
            else:
                yield self.score, rows, origin[rows]


def _check_labels(labels: Array, data: Empirical) -> Tensor:
    """Return one label for each point of the data, whole numbers from 0 on."""
    found = as_tensor(labels, "labels").detach()
    good = found.shape == (data.n,) and "int" in str(found.dtype)
    what = f"labels must be ({data.n},), one whole number for each point"
    require(good, f"{what}; got {str(found.dtype).removeprefix('torch.')}, shape {tuple(found.shape)}.")
    require(int(found.min()) >= 0, f"Labels are whole numbers from 0 on; got {int(found.min())}.")
    return found.long().to(data.device)
