r"""Generalization: how far single models and their average are from the population that the training set came from.

M models, trained on one data set, sample the laws :math:`q_m`; their average is the pooled law :math:`\bar q`. The
energy distance and MMD² are of the form :math:`D(q, p) = 2E f(X,Y) - E f(X,X') - E f(Y,Y')` with f of negative type, so
that D is a squared norm of q - p and splits into bias and variance,

.. math:: \underbrace{\mathrm{mean}_m D(q_m, p)}_{\text{single}} = \underbrace{D(\bar q, p)}_{\text{pooled}}
          + \underbrace{\tfrac12\, \mathrm{mean}_{m \ne m'} D(q_m, q_{m'})}_{\text{spread}} .

:math:`\bar q` is the average over all trainings: with :math:`a_m = E f(X_m, Y)`, :math:`b_{mm'} = E f(X_m, X_{m'})` and
:math:`c = E f(Y, Y')`, the estimates

.. math:: \mathrm{single} = 2 \bar a - \overline{b_{mm}} - c, \qquad
          \mathrm{pooled} = 2 \bar a - \overline{b_{mm'}} - c, \qquad
          \mathrm{spread} = \overline{b_{mm'}} - \overline{b_{mm}}

take :math:`b_{mm'}` from pairs of different members, and every b from pairs of different starts: members share their N
starts. With independent starts they are unbiased whatever M and N. With ``even`` starts (quantiles, Sobol points) all
pairs count instead: the error of such a sample is itself a distance, of order 1/N² on the line, where leaving out equal
starts would leave 1/N. Since the spread is never negative, the pooled law is never farther than the mean single model.
That it is nearer is no finding; how both change with the training is.

Wasserstein's distance has no unbiased estimate. Both sides get N points: a single model all N starts, the pooled law
the same N starts in M disjoint random blocks, one for each member (the mean over the M cyclic assignments of blocks to
members), and the population its N quantiles, along each line. ``fresh`` is the distance of N further draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vkernel.core import rng
from vkernel.core.checks import check_choice
from vkernel.core.errors import require
from vkernel.core.estimate import Estimate, jackknife, leave_one_out, median
from vkernel.core.rng import Generator
from vkernel.metrics.distances import kernel
from vkernel.metrics.samples import CHUNK, Array, read

KINDS = ("energy", "mmd", "wasserstein")
LINES = 128  # directions of sliced distances
FRESH = 16  # samples of N fresh draws


@dataclass(frozen=True)
class Generalization:
    """The distance to the population of single models, of their pooled law, of the training set and of fresh draws.

    ``spread`` is ``single`` less ``pooled``. Errors are over members, or over training sets where there are several.
    For each of S sets, ``each (S, M)`` holds the distances of its models (NaN where one diverged), ``pools (S,)`` that
    of their pooled law and ``trains (S,)`` that of the set itself: objectives are compared in pairs of equal sets.

    >>> import torch, vkernel as vk
    >>> source = torch.Generator().manual_seed(0)
    >>> a, b = torch.randn(200, 2, generator=source), torch.randn(200, 2, generator=source) + 1
    >>> found = vk.metrics.generalization(torch.stack([a, a + 0.1, a - 0.1])[:, :100], b)
    >>> found.single.value > 0
    True
    """

    single: Estimate
    median: Estimate
    pooled: Estimate
    spread: Estimate
    train: Estimate | None
    fresh: Estimate
    each: Tensor
    pools: Tensor
    trains: Tensor | None


def generalization(
    samples: Array | Sequence[Array],
    population: Array,
    train: Array | Sequence[Array] | None = None,
    *,
    kind: str = "energy",
    even: bool = False,
    skip_diverged: bool = False,
    generator: Generator = 0,
) -> Generalization:
    """Estimate the distances of ``samples (M, N, *shape)`` to the law that ``population (R, *shape)`` was drawn from.

    A list of ensembles, one for each training set, and of training sets ``train`` pools within each set and averages
    over sets. ``kind`` is ``"energy"``, ``"mmd"`` (polynomial kernel of degree 3) or ``"wasserstein"`` (W₁; sliced in
    more than one dimension). Members start from the same N points in the same order: independent draws, or ``even``
    ones, as those of studies are in up to 8 dimensions.

    >>> import torch, vkernel as vk
    >>> source = torch.Generator().manual_seed(0)
    >>> a, b = torch.randn(200, 2, generator=source), torch.randn(200, 2, generator=source) + 1
    >>> found = vk.metrics.generalization(torch.stack([a, b + 0.1, b - 0.1])[:, :100], b, kind="energy")
    >>> found.each.shape
    torch.Size([1, 3])
    """
    check_choice(kind, "kind", KINDS)
    sets, trains = _listed(samples), [] if train is None else _listed(train)
    require(not trains or len(trains) == len(sets), f"There are {len(sets)} ensembles but {len(trains)} training sets.")
    laws = [read(x, None, "samples", True, skip_diverged).x for x in sets]
    truth = read(population, None, "population", False, skip_diverged).points.to(laws[0].device)
    N, d = laws[0].shape[1], truth.shape[1]
    for x in laws:
        require(len(x) >= 3, f"The spread between models needs 3 members or more; got {len(x)}.")
        same = x.shape[1:] == (N, d)
        require(same, f"Each member needs {N} samples of {d} coordinates; got {x.shape[1]} of {x.shape[2]}.")
    require(len(truth) >= 2 * N, f"The population needs 2 × {N} draws or more; got {len(truth)}.")
    count = min(FRESH, len(truth) // (2 * N))
    fresh, others = truth[: count * N].reshape(count, N, d), truth[count * N :]
    D = _Lines(others, N, generator) if kind == "wasserstein" else _Pairs(others, kind == "energy")
    each = pad_sequence([D.single(x, even) for x in laws], batch_first=True, padding_value=torch.nan).cpu()
    pools = torch.tensor([D.pooled(x, even) for x in laws], dtype=torch.float64)
    own = [D.law(read(y, None, "train", False, skip_diverged).points.to(truth)) for y in trains]
    trains_own = torch.tensor(own, dtype=torch.float64)
    floor = Estimate[float].of_mean(D.single(fresh, False))
    if len(laws) == 1:
        without = D.without(laws[0], even).cpu()
        spread = jackknife(each.mean() - pools[0], leave_one_out(torch.mean, each[0]) - without)
        over = Estimate.of_mean(each[0]), median(each[0]), jackknife(pools[0], without), spread
    else:
        mean, typical = each.nanmean(1), each.nanquantile(0.5, 1)
        over = (
            Estimate.of_mean(mean),
            Estimate.of_mean(typical),
            Estimate.of_mean(pools),
            Estimate.of_mean(mean - pools),
        )
    at = None if not own else Estimate.exact(own[0]) if len(own) == 1 else Estimate.of_mean(trains_own)
    return Generalization(*over, at, floor, each, pools, trains_own if own else None)


def _listed(given: Array | Sequence[Array]) -> list[Array]:
    return list(given) if isinstance(given, list | tuple) else [given]  # type: ignore[list-item]


class _Pairs:
    """Energy distance or MMD² to the law of ``y (R, d)``, from sums of f over pairs of points."""

    def __init__(self, y: Tensor, energy: bool) -> None:
        self.y, self.energy = y, energy
        self.c = self._within(y[None], False)[0][0]

    def single(self, x: Tensor, even: bool) -> Tensor:
        """Return the distance of each member, ``(M,)``."""
        return self._to_y(x) - self._within(x, even)[0] - self.c

    def pooled(self, x: Tensor, even: bool) -> float:
        """Return the distance of the average law, from pairs of different members."""
        rows, M = self._between(x, even), len(x)
        return float(self._to_y(x).mean() - rows.sum() / (M * (M - 1)) - self.c)

    def without(self, x: Tensor, even: bool) -> Tensor:
        """Return the distance of the average law without each member, ``(M,)``."""
        a, rows, M = self._to_y(x), self._between(x, even), len(x)
        return (a.sum() - a) / (M - 1) - (rows.sum() - 2 * rows) / ((M - 1) * (M - 2)) - self.c

    def law(self, y: Tensor) -> float:
        """Return the distance of the law with an atom of equal weight at each of ``y (n, d)``."""
        return float(self.single(y[None], True))

    def _to_y(self, x: Tensor) -> Tensor:
        """Return 2a, ``(M,)``."""
        return 2 * self._sums(x.flatten(0, 1), self.y).reshape(x.shape[:2]).mean(1) / len(self.y)

    def _within(self, x: Tensor, even: bool) -> tuple[Tensor, Tensor]:
        """Return b of each member with itself, and the sum of f over all pairs of its points, ``(M,)``."""
        N, total = x.shape[1], torch.stack([self._sums(own, own).sum() for own in x])
        if even:
            return total / N**2, total
        alone = self._same(x.flatten(0, 1)[None]).reshape(x.shape[:2]).sum(1)  # a start with itself
        return (total - alone) / (N * (N - 1)), total

    def _between(self, x: Tensor, even: bool) -> Tensor:
        """Return the sum of b over the other members, for each member, ``(M,)``."""
        M, N, _ = x.shape
        points = x.flatten(0, 1)
        rows = self._sums(points, points).reshape(M, N).sum(1) - self._within(x, True)[1]
        if even:
            return rows / N**2
        same = self._same(x).sum(1) - self._same(points[None]).reshape(M, N).sum(1)
        return (rows - same) / (N * (N - 1))

    def _same(self, x: Tensor) -> Tensor:
        """Return the sums of f over members at the same start, ``(M, N)``."""
        starts = x.movedim(1, 0).split(max(1, CHUNK // len(x) ** 2))
        return torch.cat([self._f(at, at).sum(2) for at in starts]).mT

    def _sums(self, x: Tensor, y: Tensor) -> Tensor:
        """Return Σ_j f(x_i, y_j), ``(n,)``; in one dimension distances are summed by sorting."""
        if self.energy and x.shape[1] == 1:
            ordered = y[:, 0].sort().values
            before = torch.cat([ordered.new_zeros(1), ordered.cumsum(0)])
            k = torch.searchsorted(ordered, x[:, 0].contiguous())
            return x[:, 0] * (2 * k - len(y)) + before[-1] - 2 * before[k]
        return torch.cat([self._f(block, y).sum(1) for block in x.split(max(1, CHUNK // len(y)))])

    def _f(self, x: Tensor, y: Tensor) -> Tensor:
        if not self.energy:
            return -kernel(x, y)
        # by differences in few dimensions, by the faster product in many
        return torch.cdist(x, y, compute_mode=f"{'donot_use' if x.shape[-1] <= 16 else 'use'}_mm_for_euclid_dist")


class _Lines:
    """W₁ of N points to the law of ``y (R, d)``: by quantiles on the line, by the mean over lines in the plane."""

    def __init__(self, y: Tensor, N: int, generator: Generator) -> None:
        source, cpu = rng.as_generator(generator), torch.device("cpu")
        u = rng.randn((LINES if y.shape[1] > 1 else 1, y.shape[1]), source, cpu, torch.float64)
        self.u = (u / u.norm(dim=1, keepdim=True)).to(y)
        self.block = rng.randn((N,), source, cpu, torch.float64).argsort().to(y.device)  # a random order of the starts
        self.levels = (torch.arange(N, dtype=y.dtype, device=y.device) + 0.5) / N
        self.quantiles = self._along(y)

    def single(self, x: Tensor, even: bool) -> Tensor:
        """Return the distance of each member, ``(M,)``."""
        return torch.stack([self._distance(own) for own in x])

    def pooled(self, x: Tensor, even: bool) -> float:
        """Return the distance of N points, each start from one member: the mean over assignments."""
        return float(torch.stack([self._distance(x[who, torch.arange(len(who))]) for who in self._who(len(x))]).mean())

    def without(self, x: Tensor, even: bool) -> Tensor:
        """Return the same without the block of each member, ``(M,)``."""
        starts, M = torch.arange(x.shape[1]), len(x)
        found = [self._distance(x[who, starts][who != m]) for m in range(M) for who in self._who(M)]
        return torch.stack(found).reshape(M, M).mean(1)

    def law(self, y: Tensor) -> float:
        """Return the distance of the law with an atom of equal weight at each of ``y (n, d)``."""
        return float(self._distance(y))

    def _who(self, M: int) -> Tensor:
        """Return which member takes each start, ``(M, N)``: one row for each cyclic assignment."""
        return (self.block + torch.arange(M, device=self.block.device)[:, None]) % M

    def _distance(self, x: Tensor) -> Tensor:
        return (self._along(x) - self.quantiles).abs().mean()

    def _along(self, x: Tensor) -> Tensor:
        """Return N quantiles along each line, ``(lines, N)``: order statistics, of as many points as there are."""
        ordered = (self.u @ x.mT).sort(1).values
        return ordered[:, (self.levels * x.shape[0]).long()]
