"""The images of an explanation; those of the verdict, of fits and of theories on held-out images are different."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.data import Empirical


@dataclass(frozen=True, eq=False)
class Split:
    """Images in the units of a network: ``verdict["training"]``, ``verdict["held-out"]``, ``fit`` (of both sets) and
    ``rest``, held-out images for theories without the training set.

    ``order`` is a random order of the training images ``data``. A theory of N images is built from the first N,
    among them those of the verdict: "training" images belong to the training sets of network and theory."""

    data: Empirical
    order: Tensor
    verdict: dict[str, Tensor]
    fit: Tensor
    rest: Empirical | None

    @classmethod
    def of(cls, data: Empirical, test: Empirical | None, images: int, fit: int, seed: int) -> Split:
        """Draw ``images`` of each set for the verdict and ``fit`` for fits. Of small sets at most a third of the
        training images and a quarter of the held-out ones are for fits, and half of the latter for the verdict."""
        order = data.choose(data.n, rng.stream(seed, "training images of an explanation"), distinct=True)
        parts = order.split([k := min(fit, len(order) // 3), len(order) - k])
        chosen, fits, rest = {"training": data[parts[1][:images]]}, [data[parts[0]]], None
        if test is not None:
            other = test.choose(test.n, rng.stream(seed, "held-out images of an explanation"), distinct=True)
            k = min(fit, len(other) // 4)
            last = k + min(images, max(2, len(other) // 2))
            chosen["held-out"] = test[other[k:last]]
            fits.append(test[other[:k]])
            rest = test.subset(other[last:]) if last < len(other) else None
        shown = {kind: x.to(data.dtype) for kind, x in chosen.items()}
        return cls(data, order, shown, torch.cat(fits).to(data.dtype), rest)

    def first(self, count: int) -> Empirical:
        """Return ``count`` training images, or as many as verdict and fits need."""
        count = max(count, len(self.verdict["training"]) + len(self.fit))
        return self.data if count >= len(self.order) else self.data.subset(self.order[:count])

    def elsewhere(self, count: int) -> Empirical | None:
        """Return ``count`` held-out images, or all that are in no other set."""
        rest = self.rest
        return rest if rest is None or count >= rest.n else rest.subset(torch.arange(count))
