r"""Generalization: how far single models and their average are from the population that the training set came from.

M models, trained on one data set, sample the laws :math:`q_m`; their average is the pooled law :math:`\bar q`. The
energy distance and MMD² are of the form :math:`D(q, p) = 2E f(X,Y) - E f(X,X') - E f(Y,Y')` with f of negative type, so
that D is a squared norm of q - p and splits into bias and variance,

.. math:: \underbrace{\mathrm{mean}_m D(q_m, p)}_{\text{single}} = \underbrace{D(\bar q, p)}_{\text{pooled}}
          + \underbrace{\tfrac12\, \mathrm{mean}_{m \ne m'} D(q_m, q_{m'})}_{\text{spread}} .

:math:`\bar q` is the average over all trainings: with :math:`a_m = E f(X_m, Y)`, :math:`b_{mm'} = E f(X_m, X_{m'})` and
:math:`c = E f(Y, Y')`, the estimates

.. math:: \mathrm{single} = \bar a_2 - \overline{b_{mm}} - c, \qquad
          \mathrm{pooled} = \bar a_2 - \overline{b_{mm'}} - c, \qquad
          \mathrm{spread} = \overline{b_{mm'}} - \overline{b_{mm}}, \qquad \bar a_2 = 2 \bar a

use pairs of different members (and of different points) only: they are unbiased whatever M and the number N of samples.
Since the spread is never negative, the pooled law is never farther than the mean single model. That it is nearer is no
finding; how both change with the training is.

Wasserstein's distance has no unbiased estimate. Both sides get N points: a single model all N starts, the pooled law
the same N starts in M disjoint blocks, one for each member, and the population its N quantiles (in one dimension) or N
draws. ``fresh`` is the distance of N further draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.checks import check_choice
from vkernel.core.errors import require
from vkernel.core.estimate import Estimate, jackknife, leave_one_out, median, stacked
from vkernel.core.rng import Generator
from vkernel.metrics.distances import kernel
from vkernel.metrics.samples import CHUNK, Array, read

KINDS = ("energy", "mmd", "wasserstein")
LINES = 128  # directions of sliced distances


@dataclass(frozen=True)
class Generalization:
    """The distance to the population of single models, of their pooled law, of the training set and of fresh draws.

    ``each (M,)`` or ``(S, M)`` holds the distance of every model; ``spread`` is ``single`` less ``pooled``. Errors are
    over members, or over training sets where there are several.
    """

    single: Estimate
    median: Estimate
    pooled: Estimate
    spread: Estimate
    train: Estimate | None
    fresh: Estimate
    each: Tensor


def generalization(
    samples: Array | Sequence[Array],
    population: Array,
    train: Array | Sequence[Array] | None = None,
    *,
    kind: str = "energy",
    skip_diverged: bool = False,
    generator: Generator = 0,
) -> Generalization:
    """Estimate the distances of ``samples (M, N, *shape)`` to the law that ``population (R, *shape)`` was drawn from.

    A list of ensembles, one for each training set, and of training sets ``train`` pools within each set and averages
    over sets. ``kind`` is ``"energy"``, ``"mmd"`` (polynomial kernel of degree 3) or ``"wasserstein"`` (W₁; sliced in
    more than one dimension). Members start from the same N points in the same order.
    """
    check_choice(kind, "kind", KINDS)
    sets, trains = _listed(samples), [] if train is None else _listed(train)
    require(not trains or len(trains) == len(sets), f"There are {len(sets)} ensembles but {len(trains)} training sets.")
    laws = [read(x, None, "samples", True, skip_diverged).x for x in sets]
    truth = read(population, None, "population", False, skip_diverged).points
    N, d = laws[0].shape[1], truth.shape[1]
    for x in laws:
        require(len(x) >= 3, f"The spread between models needs 3 members or more; got {len(x)}.")
        same = x.shape[1:] == (N, d)
        require(same, f"Each member needs {N} samples of {d} coordinates; got {x.shape[1]} of {x.shape[2]}.")
    require(len(truth) >= 2 * N, f"The population needs 2 × {N} draws or more; got {len(truth)}.")
    others, fresh = truth[N:], truth[:N]
    D = _Lines(others, N, generator) if kind == "wasserstein" else _Pairs(others, kind)
    single = torch.stack([D.single(x) for x in laws])  # (S, M)
    pooled = [D.pooled(x) for x in laws]
    own = [Estimate.exact(D.law(read(y, None, "train", False, skip_diverged).points)) for y in trains]
    floor = Estimate.exact(float(D.single(fresh[None])))
    if len(laws) == 1:
        (value, without), each = pooled[0], single[0]
        spread = jackknife(each.mean() - value, leave_one_out(torch.mean, each) - without)
        both = Estimate.of_mean(each), median(each), jackknife(value, without)
        return Generalization(*both, spread, own[0] if own else None, floor, each)
    columns = single.mean(1), single.median(1).values, torch.tensor([v for v, _ in pooled], dtype=torch.float64)
    over = [Estimate.of_mean(v) for v in (*columns, columns[0] - columns[2])]
    mean = Estimate.of_mean(stacked(own).value) if own else None
    return Generalization(*over, mean, floor, single)


def _listed(given: Array | Sequence[Array]) -> list[Array]:
    return list(given) if isinstance(given, list | tuple) else [given]


class _Pairs:
    """Energy distance or MMD² to the law of ``y (R, d)``, from sums of f over pairs of different points."""

    def __init__(self, y: Tensor, kind: str) -> None:
        self.y, self.energy = y, kind == "energy"
        self.c = self._pairs(y) / (len(y) * (len(y) - 1))

    def single(self, x: Tensor) -> Tensor:
        """Return the distance of each member, ``(M,)``."""
        return self._to_y(x) - torch.stack([self._pairs(own) for own in x]) / (x.shape[1] * (x.shape[1] - 1)) - self.c

    def pooled(self, x: Tensor) -> tuple[float, Tensor]:
        """Return the distance of the average law, from pairs of different members, and that without each member."""
        M, N, _ = x.shape
        a, points = self._to_y(x), x.flatten(0, 1)
        rows = self._sums(points, points).reshape(M, N).sum(1) - torch.stack([self._sums(own, own).sum() for own in x])
        rows /= N**2
        value = a.mean() - rows.sum() / (M * (M - 1)) - self.c
        without = (a.sum() - a) / (M - 1) - (rows.sum() - 2 * rows) / ((M - 1) * (M - 2)) - self.c
        return float(value), without

    def law(self, y: Tensor) -> float:
        """Return the distance of the law with an atom of equal weight at each of ``y (n, d)``."""
        return float(self._to_y(y[None]) - self._sums(y, y).sum() / len(y) ** 2 - self.c)

    def _to_y(self, x: Tensor) -> Tensor:
        return 2 * self._sums(x.flatten(0, 1), self.y).reshape(x.shape[:2]).mean(1) / len(self.y)

    def _pairs(self, x: Tensor) -> Tensor:
        """Return the sum of f over pairs of different points."""
        alone = 0.0 if self.energy else sum(self._sums(p, p).sum() for p in x[:, None])
        return self._sums(x, x).sum() - alone

    def _sums(self, x: Tensor, y: Tensor) -> Tensor:
        """Return Σ_j f(x_i, y_j), ``(n,)``; in one dimension distances are summed by sorting."""
        if self.energy and x.shape[1] == 1:
            ordered = y[:, 0].sort().values
            before = torch.cat([ordered.new_zeros(1), ordered.cumsum(0)])
            k = torch.searchsorted(ordered, x[:, 0].contiguous())
            return x[:, 0] * (2 * k - len(y)) + before[-1] - 2 * before[k]
        blocks = x.split(max(1, CHUNK // len(y)))
        f = torch.cdist if self.energy else lambda a, b: -kernel(a, b)
        return torch.cat([f(block, y).sum(1) for block in blocks])


class _Lines:
    """W₁ of N points to the law of ``y (R, d)``: by quantiles on the line, by the mean over lines in the plane."""

    def __init__(self, y: Tensor, N: int, generator: Generator) -> None:
        d = y.shape[1]
        u = rng.randn((LINES, d), rng.as_generator(generator), torch.device("cpu"), torch.float64) if d > 1 else None
        self.u = torch.ones(1, 1, dtype=y.dtype) if u is None else u / u.norm(dim=1, keepdim=True)
        self.levels = (torch.arange(N, dtype=y.dtype) + 0.5) / N
        self.quantiles = self._along(y)

    def single(self, x: Tensor) -> Tensor:
        """Return the distance of each member, ``(M,)``."""
        return torch.stack([(self._along(own) - self.quantiles).abs().mean() for own in x])

    def pooled(self, x: Tensor) -> tuple[float, Tensor]:
        """Return the distance of N points, each start from one member, and that without each member."""

        def blocks(some: Tensor) -> Tensor:
            return self.single(torch.cat([own[m :: len(some)] for m, own in enumerate(some)])[None])[0]

        return float(blocks(x)), leave_one_out(blocks, x)

    def law(self, y: Tensor) -> float:
        """Return the distance of the law with an atom of equal weight at each of ``y (n, d)``."""
        return float(self.single(y[None]))

    def _along(self, x: Tensor) -> Tensor:
        """Return N quantiles along each line, ``(lines, N)``: order statistics, of as many points as there are."""
        ordered = (self.u @ x.mT).sort(1).values
        return ordered[:, (self.levels * x.shape[0]).long()]
