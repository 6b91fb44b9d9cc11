r"""Several scores that differ in the randomness of training alone: their moments and samples (docs/theory.md, §7).

For members :math:`\hat s_m`, :math:`m = 1 \ldots M`,

.. math:: s_{avg} = \frac1M \sum_m \hat s_m, \qquad
          \mathrm{Cov}_\theta[\hat s, \hat s'] = \frac{1}{M-1} \sum_m (\hat s_m - s_{avg})(\hat s_m' - s_{avg}')^T ,
          \qquad \bar q(x_\epsilon) = E_\theta\,q_\theta(x_\epsilon) ,

and the covariance is unbiased. Members that share something, an initialisation say, are not independent. With their
``groups`` :math:`g = 1 \ldots G` of :math:`n_g` members and means :math:`\bar s_g`, the covariance is split by a
random-effects analysis of variance (Henderson 1953), :math:`\hat s = s_{avg} + \mathrm{group} + \mathrm{rest}`:

.. math::

   B = \frac{1}{G-1} \sum_g n_g (\bar s_g - s_{avg})(\bar s_g - s_{avg})^T, \quad
   W = \frac{1}{M-G} \sum_{g,\,m \in g} (\hat s_m - \bar s_g)(\hat s_m - \bar s_g)^T, \quad
   n_0 = \frac{M - \sum_g n_g^2/M}{G-1}, \\
   V_{between} = (B - W)/n_0, \quad V_{within} = W, \quad V = V_{between} + V_{within} = B/n_0 + (1 - 1/n_0)\,W, \quad
   \mathrm{Cov}\,s_{avg} = V_{between} \sum_g n_g^2/M^2 + V_{within}/M ,

all unbiased for groups of any sizes; the part between groups can be negative where it is near zero, V, the covariance
of one member of a fresh group, cannot. The covariance of the mean falls with the number of groups, not of members.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.checks import check_shape, check_whole, is_whole
from vkernel.core.covariance import Covariance, Cross, Factored, flat
from vkernel.core.errors import InputError, require
from vkernel.core.estimate import Estimate, jackknife, leave_one_out
from vkernel.core.progress import Progress, progress as show_progress
from vkernel.process import Process
from vkernel.sample.loop import end, grid
from vkernel.sample.ode import pf_ode
from vkernel.score.base import Score, Time

CHUNK = 1 << 22  # numbers of a sample taken at once


class Scores(ABC):
    """M scores of one process and one event shape that differ in the randomness of training alone.
    ``scores[m]`` is the :class:`~vkernel.score.base.Score` of one member, ``scores[a:b]`` several. A member that
    diverged in training stays in its place, is listed in ``diverged``, and takes part in no moment."""

    process: Process
    shape: tuple[int, ...] | None
    groups: Groups
    device: torch.device  # on which samples start
    dtype: torch.dtype
    diverged: Sequence[int] = ()

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of members."""

    @abstractmethod
    def member(self, index: int) -> Score:
        """Return the score of one member."""

    @abstractmethod
    def select(self, indices: Sequence[int]) -> Self:
        """Return some of the members, in the given order."""

    @abstractmethod
    def __call__(self, x: Tensor, t: Time) -> Tensor:
        """Return the scores of all members at the same points, ``(M, *batch, *shape)`` for ``x (*batch, *shape)``."""

    @abstractmethod
    def paired(self, x: Tensor, t: Time) -> Tensor:
        """Return each member's score at its own points: ``x (M, *batch, *shape)``, t a scalar or one per point."""

    def __getitem__(self, m: int | slice) -> Score | Self:
        if isinstance(m, slice):
            return self.select(range(len(self))[m])
        require(is_whole(m), f"Scores take a member's index or a slice, not {m!r}.")
        if not -len(self) <= m < len(self):
            raise IndexError(f"There are {len(self)} members; {m} is not among them.")
        return self.member(m % len(self))

    @property
    def report(self) -> str:
        """How many members diverged, as a sentence."""
        if not self.diverged:
            return f"All {len(self)} members are finite."
        which = f"indices {list(self.diverged[:8])}{', …' if len(self.diverged) > 8 else ''}"
        lost = f"{len(self.diverged)} of {len(self)} members diverged ({which})"
        return f"{lost}: they take part in no mean. Try a smaller learning rate."

    @property
    def finite(self) -> Self:
        """The members that did not diverge."""
        return self.select(self._alive) if self.diverged else self

    @property
    def _alive(self) -> list[int]:
        require(len(self.diverged) < len(self), self.report)
        return [m for m in range(len(self)) if m not in set(self.diverged)]

    def mean(self, x: Tensor, t: Time) -> Tensor:
        """Return s_avg, the mean score of the finite members, like x."""
        return self.finite(x, t).mean(0)

    @property
    def mean_score(self) -> Score:
        """s_avg as a score."""
        return Mean(self, self.shape)

    def deviations(self, x: Tensor, t: Time) -> Tensor:
        r"""Return factors of V, ``(K, *batch, *shape)``: :math:`(\hat s_m - s_{avg})/\sqrt{M - 1}` without groups."""
        finite = self.finite
        require(len(finite) >= 2, f"A covariance over members needs two finite members; there are {len(finite)}.")
        return finite.groups.factors(finite(x, t))

    def cov(self, x: Tensor, t: Time, x2: Tensor | None = None, t2: Time | None = None) -> Covariance:
        """Return Cov over members of the score at (x, t), or between (x, t) and (x2, t2), paired over the batch."""
        left = self.deviations(x, t)
        shape = tuple(x.shape[1:]) if self.shape is None else self.shape
        if x2 is None:
            require(t2 is None, "Give x2 with t2: the covariance is between two points and times.")
            return Factored(left, shape)
        one, two = (flat(a, shape).movedim(0, -1) for a in (left, self.deviations(x2, t if t2 is None else t2)))
        return Cross(one @ two.mT, shape)

    def split(self, x: Tensor, t: Time) -> tuple[Tensor, Tensor]:
        """Return the variances of each coordinate between and within groups, both like x."""
        return self.finite.groups.split(self.finite(x, t))

    def cumulants(self, x: Tensor, t: Time, components: int = 3) -> Cumulants:
        """Return third and fourth cumulants of the score over members, with errors: zero for a Gaussian law."""
        return cumulants(self.finite(x, t), components)

    def combine(self, weights: Tensor) -> Callable[[Tensor, Time], Tensor]:
        r"""Return the field :math:`\sum_m w_{km} \hat s_m(x_k, t)` of ``weights (K, M)``; ``len(x)`` is K."""

        def field(x: Tensor, t: Time) -> Tensor:
            good = isinstance(x, Tensor) and x.ndim >= 2 and len(x) == len(weights)
            require(good, f"A field of {len(weights)} members takes x ({len(weights)}, *batch, *shape).")
            s = self(x, t)  # (M, K, *batch, *shape)
            return (weights.mT.to(s).reshape(*weights.mT.shape, *(1,) * (x.ndim - 1)) * s).sum(0)

        return field

    def start(self, n: int, seed: int = 0, *, shared: bool = True) -> Tensor:
        """Draw x_T from the prior: ``(n, *shape)``, the same for all members, or ``(M, n, *shape)``."""
        if self.shape is None:
            raise InputError("The event shape is not known yet: give shape= when the scores are read, or x_T.")
        event = (check_whole(n, "The number of samples"), *self.shape)
        sources = (rng.stream(seed, "ensemble/x_T", m) for m in ([0] if shared else self.indices))
        draws = [self.process.prior(event, device=self.device, dtype=self.dtype, generator=g) for g in sources]
        return draws[0] if shared else torch.stack(draws)

    @property
    def indices(self) -> Sequence[int]:
        """The index of each member, from which its random streams are derived."""
        return range(len(self))

    def sample(
        self,
        n: int | None = None,
        *,
        x_T: Tensor | None = None,
        steps: int | Tensor = 100,
        method: str = "exponential",
        spacing: str | None = "log",
        seed: int = 0,
        shared: bool = True,
        progress: Progress = False,
    ) -> Tensor:
        """Sample every member by the PF-ODE, from ``x_T`` or from :meth:`start`; ``(M, n, *shape)``.
        Members that diverged, in training or while sampling, are NaN, with a warning that counts them."""
        require((n is None) != (x_T is None), "Give either n, the number of samples of each member, or x_T.")
        alive, times = self._alive, grid(self.process, steps, spacing)
        if x_T is None:
            assert n is not None
            x_T = self.start(n, seed, shared=shared)
        require(isinstance(x_T, Tensor), f"x_T must be a torch tensor, not {type(x_T).__name__}.")
        x_T = x_T if x_T.is_floating_point() else x_T.to(torch.get_default_dtype())
        shape = tuple(x_T.shape[1:]) if self.shape is None else self.shape
        lead = check_shape(x_T, "x_T", shape).ndim - len(shape)
        require(1 <= lead <= 2, f"x_T must be (n, *shape) or (M, n, *shape); got {tuple(x_T.shape)}.")
        require(lead == 1 or len(x_T) == len(self), f"x_T has {len(x_T)} members; there are {len(self)}.")
        out = torch.full((len(self), *x_T.shape[lead - 1 :]), torch.nan, dtype=x_T.dtype, device=x_T.device)
        # an adaptive method shares its steps within a block: one member each, or members would depend on each other
        at_once = 1 if method == "dopri5" else max(1, CHUNK // max(1, math.prod(out.shape[1:])))
        with show_progress(len(alive), progress) as report:
            for k in range(0, len(alive), at_once):
                which = alive[k : k + at_once]
                x = x_T[which] if lead == 2 else x_T.expand(len(which), *x_T.shape)

                def part(label: str, _: float, done: float = len(which) / (len(times) - 1)) -> None:
                    report(label, done)

                score = _Paired(self.select(which), shape)
                out[which] = end(pf_ode(score, x, steps=times, method=method, allow_nan=True, progress=part))
                if method == "dopri5":  # it reports no steps
                    report("sampling", len(which))
        whole = out.flatten(1).isfinite().all(1)
        out[~whole] = torch.nan
        if not bool(whole.all()):
            lost = f"{len(self.diverged)} of {len(self)} members diverged in training, {len(alive) - int(whole.sum())}"
            text = f"{lost} while sampling: their samples are NaN. More steps may help the latter."
            warnings.warn(text, stacklevel=2)
        return out


class Mean(Score):
    """The mean score of several members, as a score."""

    def __init__(self, scores: Scores, shape: tuple[int, ...] | None) -> None:
        self.scores, self.process, self.shape = scores, scores.process, shape

    def __call__(self, x: Tensor, t: Time) -> Tensor:
        return self.scores.mean(x, t)

    def __repr__(self) -> str:
        return f"mean score of {self.scores!r}"


class _Paired(Mean):
    """Each member at its own points, ``x (M, n, *shape)``, as one score."""

    def __call__(self, x: Tensor, t: Time) -> Tensor:
        return self.scores.paired(x, t)


@dataclass(frozen=True)
class Groups:
    """Which members share something: ``labels[m]`` is the group of m, 0 … G-1; all different means no groups."""

    labels: tuple[int, ...]

    @classmethod
    def of(cls, names: Sequence[str | int] | None, members: int) -> Groups:
        """Return the groups with these names, one for each member; ``None`` means independent members."""
        if names is None:
            return cls(tuple(range(members)))
        names = [names] if isinstance(names, str) else list(names)
        require(len(names) == members, f"There are {len(names)} groups for {members} members; give one for each.")
        known = list(dict.fromkeys(names))
        require(len(known) >= 2, f"All members are in the group {names[0]!r}; a split needs two groups or more.")
        require(len(known) < members, "Every member is alone in its group: nothing is shared; leave groups out.")
        return cls(tuple(known.index(name) for name in names))

    @property
    def units(self) -> int:
        """The number of independent trainings: groups, or members without groups."""
        return len(set(self.labels))

    @property
    def grouped(self) -> bool:
        return self.units < len(self.labels)

    @property
    def _square(self) -> int:
        return sum(self.labels.count(g) ** 2 for g in set(self.labels))

    @property
    def typical(self) -> float:
        """n_0, the typical size of a group."""
        return (len(self.labels) - self._square / len(self.labels)) / (self.units - 1)

    def squares(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """Return factors of B and of W, each ``(K, …)``, of scores ``s (M, …)``; W's are empty without groups."""
        label, rest = torch.tensor(self.labels, device=s.device), len(s) - self.units
        sizes = torch.bincount(label).to(s.dtype).reshape(-1, *(1,) * (s.ndim - 1))
        mean = s.new_zeros(len(sizes), *s.shape[1:]).index_add_(0, label, s) / sizes
        weight = (sizes / (self.units - 1)).sqrt()
        return weight * (mean - s.mean(0)), (s - mean[label])[: len(s) * bool(rest)] / math.sqrt(max(rest, 1))

    def factors(self, s: Tensor) -> Tensor:
        """Return factors ``(K, …)`` of V: the sum of their outer products."""
        between, within = self.squares(s)
        return torch.cat([between / math.sqrt(self.typical), within * math.sqrt(max(1 - 1 / self.typical, 0))])

    def split(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """Return the variances between and within groups of each coordinate of ``s (M, …)``, like one score."""
        require(self.grouped, "Without groups there is nothing to split; give groups=, one label for each member.")
        b, w = (a.square().sum(0) for a in self.squares(s))
        return (b - w) / self.typical, w

    def of_mean(self, s: Tensor) -> Tensor:
        """Return the variance of s_avg in each coordinate, like one score."""
        if not self.grouped:
            return s.var(0) / len(s)
        between, within = self.split(s)
        return between * (self._square / len(s) ** 2) + within / len(s)

    def without(self) -> list[list[int]]:
        """Return the members that remain when each unit is left out; empty if what remains has no V of this kind."""
        kept = [[m for m, label in enumerate(self.labels) if label != unit] for unit in dict.fromkeys(self.labels)]
        left = self.units - 1
        return kept if left >= 2 and all(len(k) > left or not self.grouped for k in kept) else []

    def keep(self, members: Sequence[int]) -> Groups:
        """Return the design of some of the members."""
        some = [self.labels[m] for m in members]
        known = list(dict.fromkeys(some))
        return Groups(tuple(known.index(label) for label in some))


@dataclass(frozen=True)
class Cumulants:
    """Standardised third and fourth cumulants over members, with jackknife errors; zero for a Gaussian.
    ``skewness`` and ``kurtosis`` (excess) are like x; the joint ones are of the leading principal components, over
    members, of the scores at *all* queries together, whose ``shares`` of the total variance are ``(components,)``."""

    skewness: Estimate[Tensor]
    kurtosis: Estimate[Tensor]
    joint_skewness: Estimate[Tensor]
    joint_kurtosis: Estimate[Tensor]
    shares: Tensor


def cumulants(s: Tensor, components: int = 3) -> Cumulants:
    """Return third and fourth cumulants over the first axis of ``s (M, …)``, one score for each member, with errors."""
    s = s.double()
    require(len(s) >= 5, f"Fourth cumulants with their errors need five finite members; there are {len(s)}.")
    left, values, _ = torch.linalg.svd((s - s.mean(0)).reshape(len(s), -1), full_matrices=False)
    joint, shares = left[:, :components], values.square() / values.square().sum().clamp_min(1e-300)

    def law(f: Callable[[Tensor], Tensor], a: Tensor) -> Estimate[Tensor]:
        return jackknife(f(a), leave_one_out(f, a))

    own, both = ((law(skewness, a), law(kurtosis, a)) for a in (s, joint))
    return Cumulants(*own, *both, shares[:components])


def skewness(s: Tensor) -> Tensor:
    """Return Fisher's G1 over the first axis; 0 where nothing varies."""
    n, c = len(s), s - s.mean(0)
    m2, m3 = c.square().mean(0), c.pow(3).mean(0)
    return math.sqrt(n * (n - 1)) / (n - 2) * torch.where(m2 > 0, m3 / m2.pow(1.5), 0.0)


def kurtosis(s: Tensor) -> Tensor:
    """Return Fisher's G2, the excess, over the first axis; 0 where nothing varies."""
    n, c = len(s), s - s.mean(0)
    m2, m4 = c.square().mean(0), c.pow(4).mean(0)
    excess = (n - 1) / ((n - 2) * (n - 3)) * ((n + 1) * (m4 / m2.square() - 3) + 6)
    return torch.where(m2 > 0, excess, 0.0)
