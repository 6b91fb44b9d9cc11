"""How values vary over members: analysis of variance of groups and of nested factors; cumulants with their errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vkernel.core.errors import require
from vkernel.core.estimate import Estimate, jackknife, leave_one_out


@dataclass(frozen=True)
class Groups:
    r"""Which members share something: ``labels[m]`` is the group of m, 0 … G-1; all different means no groups.

    Values :math:`s_m` of M members in groups of :math:`n_g`, with means :math:`\bar s_g`, are split by a random-effects
    analysis of variance (Henderson 1953), :math:`s = \bar s + \mathrm{group} + \mathrm{rest}`:

    .. math::

       B = \frac{1}{G-1} \sum_g n_g (\bar s_g - \bar s)(\bar s_g - \bar s)^T, \quad
       W = \frac{1}{M-G} \sum_{g,\,m \in g} (s_m - \bar s_g)(s_m - \bar s_g)^T, \quad
       n_0 = \frac{M - \sum_g n_g^2/M}{G-1}, \\
       V_{between} = (B - W)/n_0, \quad V_{within} = W, \quad V = V_{between} + V_{within} = B/n_0 + (1 - 1/n_0)\,W,
       \quad \mathrm{Cov}\,\bar s = V_{between} \sum_g n_g^2/M^2 + V_{within}/M ,

    all unbiased for groups of any sizes. The part between groups can be negative where it is near zero; V, the
    covariance of one member of a fresh group, cannot.

    >>> import vkernel as vk
    >>> groups = vk.sample.Groups.of(["a", "a", "b", "b"], 4)
    >>> groups.labels, groups.units
    ((0, 0, 1, 1), 2)
    """

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
        """Return factors of B and of W, each ``(K, …)``, of values ``s (M, …)``; W's are empty without groups."""
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
        """Return the variances between and within groups of each coordinate of ``s (M, …)``, like one member's."""
        require(self.grouped, "Without groups there is nothing to split; give groups=, one label for each member.")
        b, w = (a.square().sum(0) for a in self.squares(s))
        return (b - w) / self.typical, w

    def of_mean(self, s: Tensor) -> Tensor:
        """Return the variance of the mean in each coordinate, like one member's."""
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


def variance_components(values: Tensor, levels: int) -> Tensor:
    r"""Return the variances of L nested factors, ``(L, *batch)``, summed over coordinates, without bias.

    For a balanced design, ``values (n_1, …, n_L, *batch, d)``, :math:`\sigma_l^2 = U_l - U_{l+1}/n_{l+1}` with
    :math:`U_l` the mean sample variance, over the l-th index, of means over all deeper indices."""
    spread = []
    for level in range(levels):
        u = (values.mean(tuple(range(level + 1, levels))) if level + 1 < levels else values).var(level)
        spread.append((u.mean(tuple(range(level))) if level else u).sum(-1))
    outer = [u - v / n for u, v, n in zip(spread[:-1], spread[1:], values.shape[1:levels], strict=True)]
    return torch.stack([*outer, spread[-1]])


@dataclass(frozen=True)
class Cumulants:
    """Standardised third and fourth cumulants over members, with jackknife errors; zero for a Gaussian.
    ``skewness`` and ``kurtosis`` (excess) are like one member's values; the joint ones are of the leading principal
    components, over members, of *all* values together, whose ``shares`` of the total variance are ``(components,)``.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> model = vk.models.Linear(vk.features.grid("gaussian", 4, process=process), target="x0")
    >>> ens = vk.train_ensemble(model, data, process, members=6, draws=32)
    >>> ens.cumulants(torch.zeros(4, 1), 0.5).kurtosis.value.shape
    torch.Size([4, 1])
    """

    shares: Tensor
    skewness: Estimate[Tensor]
    kurtosis: Estimate[Tensor]
    joint_skewness: Estimate[Tensor]
    joint_kurtosis: Estimate[Tensor]


def cumulants(s: Tensor, components: int = 3) -> Cumulants:
    """Return third and fourth cumulants over the first axis of ``s (M, …)``, with jackknife errors."""
    s = s.double()
    require(len(s) >= 5, f"Fourth cumulants with their errors need five finite members; there are {len(s)}.")
    left, values, _ = torch.linalg.svd((s - s.mean(0)).reshape(len(s), -1), full_matrices=False)
    shares, laws = values.square() / values.square().sum().clamp_min(1e-300), (skewness, kurtosis)
    arrays = s, left[:, :components]
    both: list[Estimate[Tensor]] = [jackknife(f(a), leave_one_out(f, a)) for a in arrays for f in laws]
    return Cumulants(shares[:components], *both)


def skewness(s: Tensor) -> Tensor:
    r"""Return Fisher's :math:`G_1 = \sqrt{n(n-1)}/(n-2)\, m_3/m_2^{3/2}` over the first axis; 0 if nothing varies."""
    n, c = len(s), s - s.mean(0)
    m2, m3 = c.square().mean(0), c.pow(3).mean(0)
    return math.sqrt(n * (n - 1)) / (n - 2) * torch.where(m2 > 0, m3 / m2.pow(1.5), 0.0)


def kurtosis(s: Tensor) -> Tensor:
    r"""Return Fisher's :math:`G_2 = \frac{n-1}{(n-2)(n-3)} [(n+1)(m_4/m_2^2 - 3) + 6]`, or 0 if nothing varies."""
    n, c = len(s), s - s.mean(0)
    m2, m4 = c.square().mean(0), c.pow(4).mean(0)
    excess = (n - 1) / ((n - 2) * (n - 3)) * ((n + 1) * (m4 / m2.square() - 3) + 6)
    return torch.where(m2 > 0, excess, 0.0)
