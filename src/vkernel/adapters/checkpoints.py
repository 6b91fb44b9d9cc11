r"""Several trainings of one network: an ensemble of checkpoints (docs/theory.md, §7).

Checkpoints that differ in the randomness of training alone are an ensemble, whoever trained them:

.. math:: s_{avg} = \frac1M \sum_m \hat s_m, \qquad
          V = \frac{1}{M-1} \sum_m (\hat s_m - s_{avg})(\hat s_m - s_{avg})^T ,

and V is unbiased. Members that share something, an initialisation say, are not independent. Told their ``groups``
:math:`g = 1 \ldots G` of :math:`n_g` members, V is split by a random-effects analysis of variance (Henderson 1953),
:math:`\hat s = s_{avg} + \mathrm{group} + \mathrm{rest}`. With :math:`\bar s_g` the mean of a group,

.. math::

   B = \frac{1}{G-1} \sum_g n_g (\bar s_g - s_{avg})(\bar s_g - s_{avg})^T, \quad
   W = \frac{1}{M-G} \sum_{g,\,m \in g} (\hat s_m - \bar s_g)(\hat s_m - \bar s_g)^T, \quad
   n_0 = \frac{M - \sum_g n_g^2/M}{G-1},

.. math:: V_{between} = (B - W)/n_0, \qquad V_{within} = W, \qquad V = V_{between} + V_{within},

all unbiased for groups of any sizes; the part between groups can come out negative where it is near zero, V cannot:
:math:`V = B/n_0 + (1 - 1/n_0)\,W`. It is the covariance of one member of a fresh group. The mean score varies by

.. math:: \mathrm{Cov}\,s_{avg} = V_{between} \sum_g n_g^2/M^2 + V_{within}/M ,

which falls with the number of groups, not of members.

Samples of different members from the same :math:`x_T` show the same in the end (Kadkhodaie et al. 2024, Zhang et al.
2024). With :math:`x^a_i` that of member a from the i-th of n starts, ``same_noise`` measures for each pair a, b

.. math:: \mathrm{ratio} = \frac{\mathrm{mean}_i\, |x^a_i - x^b_i|}{\mathrm{mean}_{i \ne j}\, |x^a_i - x^b_j|} ,

0 for members that make the same of every noise, 1 for members that share nothing but the law of their samples.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vkernel.core.covariance import Covariance, Cross, Factored
from vkernel.core.errors import InputError, require
from vkernel.core.estimate import Estimate, student_quantile
from vkernel.data.empirical import Empirical
from vkernel.metrics.neighbours import distinct, nearest
from vkernel.metrics.samples import wilson
from vkernel.process import Process
from vkernel.score.conversions import Score, Time
from vkernel.train.ensemble import Cumulants, cumulants

__all__ = ["Checkpoints", "Design", "SameNoise", "same_noise"]

GRID = 65  # times at which processes are compared
CLOSE = 1e-4  # of alpha and sigma: tables of betas are often stored in float32
STRIDE = 0.3  # the longest step of a path in log(sigma/alpha)
ROWS = 256  # samples compared at once


@dataclass(frozen=True)
class Design:
    """Which members belong together: ``labels[m]`` is the number of m's group, 0 … G-1; all different: no groups."""

    labels: tuple[int, ...]

    @classmethod
    def of(cls, groups: Sequence[Any] | None, members: int) -> Design:
        if groups is None:
            return cls(tuple(range(members)))
        names = [groups] if isinstance(groups, str) else list(groups)
        require(len(names) == members, f"There are {len(names)} groups for {members} members; give one for each.")
        known = list(dict.fromkeys(names))
        require(len(known) >= 2, f"All members are in the group {names[0]!r}; a split needs two groups or more.")
        good = len(known) < members
        require(good, "Every member is alone in its group: nothing is shared, and groups is to be left out.")
        return cls(tuple(known.index(name) for name in names))

    @property
    def units(self) -> int:
        """How many trainings are independent, groups or else members."""
        return len(set(self.labels))

    @property
    def grouped(self) -> bool:
        return self.units < len(self.labels)

    @property
    def sizes(self) -> list[int]:
        return [self.labels.count(g) for g in dict.fromkeys(self.labels)]

    @property
    def typical(self) -> float:
        """n_0, the typical size of a group."""
        m = len(self.labels)
        return (m - sum(n * n for n in self.sizes) / m) / (self.units - 1)

    def squares(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """Factors of B and of W, each ``(K, …)``, of scores ``s (M, …)``; W's are empty without groups."""
        label = torch.tensor(self.labels, device=s.device)
        sizes = torch.bincount(label).to(s.dtype)
        mean = s.new_zeros(len(sizes), *s.shape[1:]).index_add_(0, label, s)
        mean = mean / sizes.reshape(-1, *(1,) * (s.ndim - 1))
        weight = (sizes / (self.units - 1)).sqrt().reshape(-1, *(1,) * (s.ndim - 1))
        rest = len(s) - self.units
        return weight * (mean - s.mean(0)), (s - mean[label])[: len(s) * bool(rest)] / math.sqrt(max(rest, 1))

    def factors(self, s: Tensor) -> Tensor:
        """Factors ``(K, …)`` of V: the sum of their outer products."""
        between, within = self.squares(s)
        return torch.cat([between / math.sqrt(self.typical), within * math.sqrt(max(1 - 1 / self.typical, 0))])

    def split(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """The variances between and within groups of each coordinate of ``s (M, …)``, like one score."""
        require(self.grouped, "Without groups there is nothing to split; give groups=, one label for each member.")
        b, w = (a.square().sum(0) for a in self.squares(s))
        return (b - w) / self.typical, w

    def of_mean(self, s: Tensor) -> Tensor:
        """The variance of s_avg in each coordinate, like one score."""
        m = len(s)
        if not self.grouped:
            return s.var(0) / m
        between, within = self.split(s)
        return between * (sum(n * n for n in self.sizes) / m**2) + within / m

    def without(self) -> list[list[int]]:
        """The members that remain when each unit is left out in turn; empty if what remains has no V of this kind."""
        kept = [[m for m, label in enumerate(self.labels) if label != unit] for unit in dict.fromkeys(self.labels)]
        left = self.units - 1
        return kept if left >= 2 and all(len(k) > left or not self.grouped for k in kept) else []

    def keep(self, members: Sequence[int]) -> Design:
        """The design of some of the members."""
        some = [self.labels[m] for m in members]
        known = list(dict.fromkeys(some))
        return Design(tuple(known.index(label) for label in some))


class Checkpoints:
    """M scores of one process, pixel range and shape, trained alike: the verbs are those of an Ensemble.

    ``members`` are Checkpoints, or other scores with a ``process``; ``groups`` holds one label for each, equal for
    members that share something. ``nets(x, t)`` is ``(M, *batch, *shape)``; ``nets[m]`` is a member, a slice several.
    """

    def __init__(self, members: Sequence[Score], groups: Sequence[str | int] | None = None) -> None:
        held: list[Any] = list(members) if isinstance(members, Sequence) else []
        require(len(held) >= 2, f"An ensemble needs two checkpoints or more, in a list; got {len(held)}.")
        for k, member in enumerate(held):
            process = getattr(member, "process", None)
            good = callable(member) and isinstance(process, Process)
            require(good, f"Member {k} is {member!r}; it must be a Checkpoint, or a score with its process.")
        self.members = held
        self.names = [str(getattr(member, "name", f"member {k}")) for k, member in enumerate(held)]
        self.process: Process = held[0].process
        self.design = Design.of(groups, len(held))
        for k, member in enumerate(held[1:], 1):
            self._alike(member, self.names[k])
        self.range = next((r for r in map(_range, held) if r is not None), None)
        self.shape = next((s for s in map(_shape, held) if s is not None), None)

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, m: int | slice) -> Any:
        if not isinstance(m, slice):
            require(hasattr(m, "__index__"), f"Checkpoints take a member's number or a slice, not {m!r}.")
            return self.members[operator.index(m)]
        which = range(len(self))[m]
        part = Checkpoints([self.members[k] for k in which])
        part.design = self.design.keep(which)
        require(part.design.units >= 2, "These members are all of one group; V needs two groups or more.")
        return part

    def __repr__(self) -> str:
        groups = f" in {self.design.units} groups" if self.design.grouped else ""
        return f"Checkpoints({len(self)} members{groups}: {', '.join(self.names)}; {self.process!r})"

    # Scores

    def __call__(self, x: Tensor, t: Time) -> Tensor:
        """The scores of all members at the same places, ``(M, *batch, *shape)`` for ``x (*batch, *shape)``."""
        return torch.stack([_score(m, x, t, name) for m, name in zip(self.members, self.names, strict=True)])

    def paired(self, x: Tensor, t: Time) -> Tensor:
        """Each member's score at its own places: ``x (M, *batch, *shape)``, t a scalar or one per place."""
        good = isinstance(x, Tensor) and x.ndim >= 1 and len(x) == len(self)
        given = tuple(getattr(x, "shape", ()))
        require(good, f"paired needs x ({len(self)}, *batch, *shape), one set of places per member; got {given}.")
        own = isinstance(t, Tensor) and t.ndim >= len(x.shape) - len(self._event(x[0]))
        times = list(t) if own and isinstance(t, Tensor) else [t] * len(self)
        rows = zip(self.members, x, times, self.names, strict=True)
        return torch.stack([_score(member, *rest) for member, *rest in rows])

    def at(self, t: Time) -> Tensor:
        """The times that are meant by ``t``: for networks told an index the nearest index."""
        return _times(self.members[0], torch.as_tensor(t, dtype=torch.float64))

    def scaled(self, data: Empirical) -> Empirical:
        """The data in the members' pixel units."""
        return self.members[0].scaled(data) if hasattr(self.members[0], "scaled") else data

    def path(self, x_T: Tensor, times: Tensor) -> Iterator[Tensor]:
        """States of the PF-ODE of s_avg at ``times``, latest first, each like ``x_T``: exponential steps (DDIM)."""
        x, here = x_T, self.at(self.process.T)
        for stop in times.sort(descending=True).values:
            first, last = (self.process.sigma(u) / self.process.alpha(u) for u in (here, stop))
            count = max(1, math.ceil(float((first / last).log()) / STRIDE))
            between = torch.linspace(float(first.log()), float(last.log()), count + 1, dtype=torch.float64)[1:-1].exp()
            for there in (*self.at(self.process.time(between)), stop):
                x, here = self._exponential(x, here, there), there
            require(bool(x.isfinite().all()), f"The path of the mean score diverged before t = {float(stop):g}.")
            yield x

    def _exponential(self, x: Tensor, here: Tensor, there: Tensor) -> Tensor:
        """Exact while the mean score's denoised image stands still."""
        (a, b), (c, d) = ((float(self.process.alpha(u)), float(self.process.sigma(u))) for u in (here, there))
        with torch.no_grad():
            s = self.mean(x, here).to(x)
        return (c / a) * (x + b * b * s) - (b * d) * s

    # Moments over members

    def mean(self, x: Tensor, t: Time) -> Tensor:
        """s_avg, like x."""
        return self(x, t).mean(0)

    def deviations(self, x: Tensor, t: Time) -> Tensor:
        """Factors of V, ``(K, *batch, *shape)``; without groups the members' deviations from s_avg, over √(M-1)."""
        return self.design.factors(self(x, t))

    def cov(self, x: Tensor, t: Time, x2: Tensor | None = None, t2: Time | None = None) -> Covariance:
        """V over members of the score at (x, t), or between there and (x2, t2), paired over the batch."""
        left, shape = self.deviations(x, t), self._event(x)
        if x2 is None:
            require(t2 is None, "Give x2 with t2: the covariance is between two places and times.")
            return Factored(left, shape)
        right = self.deviations(x2, t if t2 is None else t2)
        flat = [a.flatten(a.ndim - len(shape)).movedim(0, -1) for a in (left, right)]
        return Cross(flat[0] @ flat[1].mT, shape)

    def split(self, x: Tensor, t: Time) -> tuple[Tensor, Tensor]:
        """The variances of each coordinate between and within groups, both like x."""
        return self.design.split(self(x, t))

    def cumulants(self, x: Tensor, t: Time, components: int = 3) -> Cumulants:
        """Is the law of the score over members Gaussian here? Third and fourth cumulants, as of an Ensemble."""
        return cumulants(self(x, t), components)

    def _event(self, x: Tensor) -> tuple[int, ...]:
        return tuple(x.shape[1:]) if self.shape is None else self.shape

    def _alike(self, other: Any, name: str) -> None:
        """Refuse a member that is of another kind than the first; the sentence names what differs first."""
        first, process = self.members[0], other.process
        ends = [(p.eps, p.T) for p in (self.process, process)]
        found = f"{name} differs from {self.names[0]}: "
        require(ends[0] == ends[1], f"{found}its times run over {ends[1]}, not {ends[0]}.")
        t = torch.linspace(*ends[0], GRID, dtype=torch.float64).clamp(*ends[0])
        told = "an index is a whole number for one of them, and not for the other."
        require(torch.equal(_times(first, t), _times(other, t)), found + told)
        for letter in ("alpha", "sigma"):
            a, b = (_curve(p, letter, t) for p in (self.process, process))
            far = (a - b).abs() > CLOSE * (a.abs() + b.abs()) + 1e-12
            k = int(far.long().argmax())
            at = f"{letter} at t = {float(t[k]):g} is {float(b[k]):.4g}, not {float(a[k]):.4g}"
            require(not bool(far.any()), f"{found}{at}. Runs of one training have one process.")
        for word, read in (("pixel range", _range), ("shape", _shape)):
            one, two = read(first), read(other)
            require(None in (one, two) or one == two, f"{found}its {word} is {two}, not {one}.")


def _curve(process: Process, letter: str, t: Tensor) -> Tensor:
    values = getattr(process, letter)(t)
    require(isinstance(values, Tensor), "Checkpoints are compared under isotropic noise alone.")
    return values.double().cpu()


def _times(member: Any, t: Tensor) -> Tensor:
    meant: Callable[[Tensor], Tensor] | None = getattr(member, "at", None)
    return meant(t) if callable(meant) else t


def _range(member: Any) -> tuple[float, float] | None:
    return getattr(member, "range", None)


def _shape(member: Any) -> tuple[int, ...] | None:
    shape = getattr(member, "shape", None) or getattr(getattr(member, "data", None), "shape", None)
    return None if shape is None else tuple(shape)


def _score(member: Any, x: Tensor, t: Time, name: str) -> Tensor:
    require(isinstance(x, Tensor), f"x must be a torch tensor, not {type(x).__name__}.")
    out = member(x, t)
    if not isinstance(out, Tensor) or out.shape != x.shape:
        given = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise InputError(f"{name} must return a tensor like x, {tuple(x.shape)}, not {given}.")
    return out.detach() if not x.requires_grad else out


@dataclass(frozen=True)
class SameNoise:
    """What ``same_noise`` found: ``ratio`` and ``correlation`` over all pairs of members, ``by_pair`` the ratios.

    ``nearest`` is the share of starts for which all members' samples have the same nearest training image.
    """

    ratio: Estimate
    correlation: Estimate
    nearest: Estimate
    by_pair: dict[tuple[int, int], Estimate]
    words: str


def same_noise(samples: Tensor, data: Empirical) -> SameNoise:
    """Whether members make the same of the same noise: ``samples (M, n, *shape)``, ``[:, i]`` from the i-th start.

    ``data`` is the training set in the same units. Correlations are over pixels, less each member's mean sample.
    Errors are over starts: jackknifed for ratios, Student's for correlations, Wilson's for the share.
    """
    require(isinstance(samples, Tensor), f"samples must be a tensor (M, n, *shape), not {type(samples).__name__}.")
    shape = tuple(samples.shape[2:]) or (1,)
    require(samples.ndim >= 2 and shape == data.shape, f"Samples are of shape {shape}, the data of {data.shape}.")
    m, n = samples.shape[:2]
    require(m >= 2 and n >= 3, f"Two members and three starts are needed; got {m} and {n}.")
    x = samples.detach().to(data.device, torch.float64).reshape(m, n, -1)
    require(bool(x.isfinite().all()), "Samples hold NaN or infinite values: a member diverged; leave it out.")
    pairs = list(itertools.combinations(range(m), 2))
    ratios = {pair: _ratios(x[pair[0]], x[pair[1]]) for pair in pairs}  # whole, then without each start
    centred = x - x.mean(1, keepdim=True)
    unit = centred / centred.norm(dim=2, keepdim=True)
    correlation = Estimate.of_mean(torch.stack([(unit[a] * unit[b]).sum(1) for a, b in pairs]).mean(0))
    points = distinct(data)
    index = torch.stack([nearest(member, points, 1)[1][:, 0] for member in x])
    share = wilson((index == index[0]).all(0).sum().double(), float(n))
    ratio = _jackknifed(torch.stack(list(ratios.values())).mean(0))
    words = (
        f"From the same noise, samples of two of the {m} members are {ratio.value:.2g} [{ratio.low:.2g}, "
        f"{ratio.high:.2g}] times as far apart as from different noise, and correlate by {correlation.value:.2g} "
        f"[{correlation.low:.2g}, {correlation.high:.2g}]; for {share.value:.0%} [{share.low:.0%}, {share.high:.0%}] "
        f"of {n} noises all have the same nearest training image."
    )
    return SameNoise(ratio, correlation, share, {pair: _jackknifed(r) for pair, r in ratios.items()}, words)


def _ratios(a: Tensor, b: Tensor) -> Tensor:
    """The ratio of distances for samples ``(n, d)``, and n more, each without one start."""
    n, own = len(a), (a - b).norm(dim=1)
    across, along = torch.zeros_like(own), torch.zeros_like(own)
    for rows in torch.arange(n, device=a.device).split(ROWS):
        distance = torch.cdist(a[rows], b)
        distance[torch.arange(len(rows)), rows] = 0
        across[rows] += distance.sum(1)
        along += distance.sum(0)
    whole = (own.mean() / (across.sum() / (n * (n - 1)))).reshape(1)
    less = (own.sum() - own) / (n - 1), (across.sum() - across - along) / ((n - 1) * (n - 2))
    return torch.cat([whole, less[0] / less[1]])


def _jackknifed(values: Tensor) -> Estimate:
    """The first, with the error of the others, each of which leaves one start out."""
    value, others = float(values[0]), values[1:]
    n = len(others)
    se = float(((n - 1) / n * (others - others.mean()).square().sum()).sqrt())
    half = student_quantile(n - 1) * se
    return Estimate(value, se, max(0.0, value - half), value + half)
