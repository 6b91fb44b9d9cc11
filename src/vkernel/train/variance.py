r"""Where the variance of a trained model comes from (docs/theory.md, §7.3).

Training is random in four ways, which nest: initialisation, inputs (t and x), the noise of their targets, the order of
batches. By the law of total variance

.. math:: \mathrm{Var}\,\hat s = \mathrm{Var}\,E[\hat s|\text{init}] + E\,\mathrm{Var}\,E[\hat s|\text{init, inputs}]
          + E\,\mathrm{Var}\,E[\hat s|\text{init, inputs, targets}] + E\,\mathrm{Var}[\hat s|\text{all but order}] ,

where each inner Var is over the next factor alone. A balanced nested design with sizes :math:`n_1, n_2, \ldots`
measures the terms without bias: with :math:`U_l` the mean sample variance, over the l-th index, of means over all
deeper indices, :math:`\sigma_l^2 = U_l - U_{l+1}/n_{l+1}`. Errors are jackknifed over the outermost groups. The term
of the inputs contains the misfit: it is what training on noiseless targets (J0) leaves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vkernel.core.errors import require
from vkernel.core.estimate import Estimate, student_quantile
from vkernel.core.progress import Progress
from vkernel.core.progress import progress as show_progress
from vkernel.data.empirical import Empirical
from vkernel.process import Process
from vkernel.score.base import wide_time
from vkernel.train import objectives as objectives
from vkernel.train.ensemble import Ensemble
from vkernel.train.models.base import Model
from vkernel.train.objectives import VARIES, Objective, Quantile, Training

__all__ = ["VarianceSplit", "variance_split"]


@dataclass(frozen=True)
class VarianceSplit:
    """Variances of the score, summed over coordinates, by source: ``names``, outermost first.

    ``variance`` and ``share`` are estimates of shape ``(names, *batch)``; ``pooled`` shares, ``(names,)``, are of the
    variance summed over all queries. A variance can come out negative by chance where it is near zero.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    variance: Estimate
    share: Estimate
    pooled: Estimate

    def __str__(self) -> str:
        rows = [
            f"{name:8} {100 * float(self.pooled.value[k]):6.1f} % ± {100 * float(self.pooled.se[k]):.1f}"
            for k, name in enumerate(self.names)
        ]
        return "\n".join(["shares of the variance of the learned score", *rows])


def variance_split(
    model: Model,
    data: Empirical | Tensor,
    process: Process,
    x: Tensor,
    t: float | Tensor,
    members: Sequence[int] = (8, 8),
    seed: int = 0,
    *,
    draws: int | None = None,
    objective: str | Objective = "J1",
    times: str | Quantile = "uniform",
    progress: Progress = False,
) -> VarianceSplit:
    """Split the variance of the score at ``x (*batch, *shape)``, ``t`` into its sources.

    ``members`` are the sizes of the nested design from the outermost factor that the model has (``model.randomness``)
    inwards; factors beyond them get 2. The number of trainings is the product.
    """
    data = data if isinstance(data, Empirical) else Empirical(data)
    require(isinstance(model, Model), f"variance_split needs a model such as vk.models.Linear(…), not {model!r}.")
    good = isinstance(x, Tensor) and tuple(x.shape[x.ndim - len(data.shape) :]) == data.shape
    require(good, f"x must be a tensor that ends in the event shape {data.shape} of the data.")
    process.check(wide_time(t, data.device))
    require(isinstance(members, Sequence), f"members gives one size for each source; got {members!r}.")
    names = tuple(n for n in model.randomness if not (n == "order" and draws is None))
    sizes = (tuple(int(n) for n in members) + (2,) * len(names))[: len(names)]
    good = len(members) <= len(names) and min(sizes) >= 2 and sizes[0] >= 3
    require(
        good,
        f"members gives the sizes of {', '.join(names)}, outermost first: the first at least 3, the others at least 2; "
        f"got {tuple(members)}.",
    )
    places = list(itertools.product(*(range(n) for n in sizes)))
    # a factor's stream is its index together with those outside it: nested, not crossed
    design = {name: [_flat(place[: k + 1], sizes[: k + 1]) for place in places] for k, name in enumerate(names)}
    training = Training(data, process, objectives.parse(objective), draws, VARIES, seed, times, model.dtype, design)
    with show_progress(1.0, progress) as tell:
        state = model.fit(training, range(len(places)), lambda share: tell("nested design", share))
    ensemble = Ensemble(model, state, process, data.shape)
    require(not ensemble.diverged, f"A nested design must be whole. {ensemble.report}")
    s = ensemble(x, t).double()
    event = len(data.shape)
    values = s.reshape(*sizes, -1, math.prod(data.shape))
    batch = tuple(s.shape[1 : s.ndim - event])
    full = _components(values)
    without = torch.stack([_components(_drop(values, k)) for k in range(sizes[0])])
    pooled, pooled_without = full.sum(-1), without.sum(-1)

    def estimate(value: Tensor, others: Tensor, shape: tuple[int, ...]) -> Estimate:
        n = len(others)
        se = ((n - 1) / n * (others - others.mean(0)).square().sum(0)).sqrt().reshape(shape)
        value, half = value.reshape(shape), student_quantile(n - 1) * se
        return Estimate(value, se, value - half, value + half)

    k = len(names)
    return VarianceSplit(
        names,
        sizes,
        estimate(full, without, (k, *batch)),
        estimate(_shares(full, 0), _shares(without, 1), (k, *batch)),
        estimate(_shares(pooled, 0), _shares(pooled_without, 1), (k,)),
    )


def _components(values: Tensor) -> Tensor:
    """Variance components ``(L, N)``, summed over coordinates, of ``values (n_1, …, n_L, N, d)``."""
    levels = values.ndim - 2
    spread = []
    for level in range(levels):
        means = values.mean(tuple(range(level + 1, levels))) if level + 1 < levels else values
        u = means.var(level)
        spread.append((u.mean(tuple(range(level))) if level else u).sum(-1))
    found = [spread[k] - spread[k + 1] / values.shape[k + 1] if k + 1 < levels else spread[k] for k in range(levels)]
    return torch.stack(found)


def _drop(values: Tensor, k: int) -> Tensor:
    return torch.cat([values[:k], values[k + 1 :]])


def _shares(components: Tensor, dim: int) -> Tensor:
    return components / components.sum(dim, keepdim=True)


def _flat(place: Sequence[int], sizes: Sequence[int]) -> int:
    out = 0
    for index, size in zip(place, sizes, strict=True):
        out = out * size + index
    return out
