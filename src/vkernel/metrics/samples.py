r"""Samples and ensembles of samples: reading, the units over which errors are taken, and nearest training points.

:func:`nearest` is exact (theory, §10.1): a matrix product in float32 finds candidates, differences measure their
distances, and the product is repeated in float64 for queries where its error bound leaves a doubt."""

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from vkernel.core.checks import as_tensor, check_real
from vkernel.core.errors import require
from vkernel.core.estimate import Estimate
from vkernel.data.empirical import Array, Empirical
from vkernel.metrics.augment import Augmented

Members = bool | None | tuple[bool | None, bool | None]
Shape = tuple[int, ...] | None
CHUNK = 1 << 21  # numbers in a working array: 16 MB
CANDIDATES = 8  # beyond the k that are wanted, for each query: the last is farther than these by more than rounding


class Reading(TypedDict, total=False):
    """Options of all distances and masses: ``members`` is whether the first axis counts members (a pair: for each of
    two samples), ``skip_diverged=True`` leaves out, with a warning, what is not finite and is refused otherwise.

    >>> import torch, vkernel as vk
    >>> x = torch.full((3, 4, 1), 0.5)  # four samples of each of three members
    >>> vk.metrics.gap_mass(x, members=True).value
    1.0
    """

    members: Members
    skip_diverged: bool


@dataclass(frozen=True)
class Samples:
    """Points ``(M, n, d)`` in float64, M = 1 for one sample; the units are members if there are any, else points."""

    x: Tensor
    members: bool

    @property
    def points(self) -> Tensor:
        """All points, ``(M n, d)``."""
        return self.x.flatten(0, 1)

    @property
    def units(self) -> int:
        """The number of independent units."""
        return self.x.shape[0 if self.members else 1]

    def share(self, counts: Tensor, n: Tensor | int | None = None, scale: float = 1.0) -> Estimate[Tensor]:
        """Estimate ``scale`` times the share of what each member counted, ``(M, …)``, of its ``n`` points (all)."""
        n = self.x.shape[1] if n is None else n
        if self.members:
            return Estimate.of_mean(counts.double() / n, scale=scale)
        return Estimate.of_share(counts[0], float(n), scale)

    def share_of(self, hits: Tensor) -> Estimate:
        """Estimate the share of the points ``(M n,)`` that are marked."""
        return Estimate(*map(float, self.share(hits.reshape(self.x.shape[:2]).sum(1)).fields))

    def variance(self, influence: Tensor) -> tuple[float, int]:
        """Return the variance of the mean of ``influence``, one number for each point, and the number of units."""
        per_unit = influence.reshape(self.units, -1).mean(1)
        return (float(per_unit.var()) / self.units if self.units > 1 else math.inf), self.units


def read(
    x: Array, shape: Shape = None, name: str = "x", /, members: Members = None, skip_diverged: bool = False
) -> Samples:
    """Read a sample or an ensemble (of events of ``shape``); leave out what diverged if ``skip_diverged``."""
    x = as_tensor(x, name).detach()
    given = f"{name} has shape {tuple(x.shape)}"
    require(members in (None, True, False), f"members must be True, False or None, not {members!r}.")
    known = members is not None or shape is not None or x.ndim <= 3
    require(known, f"{given}, a sample or an ensemble: say members=False if the first axis counts samples, else True.")
    ensemble = bool(x.ndim == (3 if shape is None else len(shape) + 2) if members is None else members)
    kind = "an ensemble (M, n, *shape)" if ensemble else "one sample (n, *shape)"
    require(x.ndim > ensemble and x.numel() > 0, f"{given}, but {kind} with at least one point was expected.")
    event = tuple(x.shape[1 + ensemble :]) or (1,)
    require(shape in (None, event), f"{given}, read as {kind}; its last axes must be the training points' {shape}.")
    found = Samples(x.double().reshape(*((1,) * (not ensemble)), *x.shape[: 1 + ensemble], -1), ensemble)
    good = found.x.isfinite().all(-1).reshape(found.units, -1).all(1)
    if good.all():
        return found
    bad = int((~good).sum())
    what = f"{bad} of the {len(good)} {'members' if ensemble else 'samples'} of {name} hold NaN or infinite values"
    require(skip_diverged, f"{what}: they diverged; skip_diverged=True leaves them out, with a warning.")
    require(bad < len(good), f"{what}: nothing is left to measure.")
    warnings.warn(f"{what} and are left out.", stacklevel=3)
    return Samples(found.x[good] if ensemble else found.x[:, good], ensemble)


def read_pair(a: Array, b: Array, *, members: Members = None, skip_diverged: bool = False) -> tuple[Samples, Samples]:
    """Read two samples or ensembles of one dimension, on the device of the first."""
    each = members if isinstance(members, tuple) else (members, members)
    require(len(each) == 2, f"members must be one answer for both samples or a pair of answers, not {members!r}.")
    first, second = read(a, None, "a", each[0], skip_diverged), read(b, None, "b", each[1], skip_diverged)
    d, e = first.x.shape[-1], second.x.shape[-1]
    require(d == e, f"The points of a have {d} coordinates, those of b {e}; both must have the same.")
    return first, Samples(second.x.to(first.x.device), second.members)


def distinct(data: Empirical | Array) -> Empirical:
    """Return the data with equal points merged.

    >>> import torch, vkernel as vk
    >>> vk.metrics.distinct(torch.tensor([[0.0], [1.0], [0.0]])).n
    2
    """
    return (data if isinstance(data, Empirical) else Empirical(data)).merged()[0]


def nearest(x: Tensor, data: Empirical | Augmented, k: int, exclude: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return distances of ``x (q, d)`` to the k nearest points and their indices, ``(q, k)``, or fewer if n < k. The
    distance to an augmented point is that to its nearest version.
    ``exclude (q,)`` holds for each query the index of a point to leave out, or -1: for queries that are training points
    it is the point itself. Where no other point is left the distance is infinite.

    >>> import torch, vkernel as vk
    >>> distance, index = vk.metrics.nearest(torch.tensor([[0.1]]), vk.data.toy("triple"), 2)
    >>> index  # the points 0 and 1
    tensor([[1, 2]])
    >>> distance.shape
    torch.Size([1, 2])
    """
    queries = check_real(x, "x").to(data.device, torch.float64)
    good = x.ndim == 2 and x.shape[1] == data.d
    require(good, f"x has shape {tuple(x.shape)}; it must be (q, d) with d = {data.d}.")
    excluded = queries.new_full((len(x),), -1, dtype=torch.long) if exclude is None else exclude.to(data.device)
    quick = torch.float32 if torch.get_float32_matmul_precision() == "highest" else torch.float64
    distance, index, certain = _search(queries, data, k, excluded, quick)
    again = (~certain).nonzero()[:, 0]
    if len(again):
        distance[again], index[again], _ = _search(queries[again], data, k, excluded[again], torch.float64)
    return distance.to(x.device), index.to(x.device)


def _versions(data: Empirical | Augmented, which: slice | Tensor) -> Iterator[Tensor]:
    """Yield the points ``which`` in each version, ``(k, d)``."""
    if isinstance(data, Augmented):
        yield from data.versions(which)
    else:
        yield data.rows(which.start, which.stop) if isinstance(which, slice) else data.take(which)


def _search(
    queries: Tensor, data: Empirical | Augmented, k: int, excluded: Tensor, kind: torch.dtype
) -> tuple[Tensor, ...]:
    """Return distances, indices, and whether the product was precise enough to be certain of them."""
    centred = queries - data.center
    last, candidates = _candidates(centred.to(kind), data, excluded, k + CANDIDATES)
    found = []
    for part in torch.arange(len(queries), device=data.device).split(max(1, CHUNK // (candidates.shape[1] * data.d))):
        index = candidates[part]
        away = torch.full(index.shape, torch.inf, dtype=torch.float64, device=data.device)
        for rows in _versions(data, index.flatten()):
            apart = rows.double().reshape(*index.shape, data.d) - queries[part, None]
            away = torch.minimum(away, apart.norm(dim=2))
        away = away.masked_fill(index == excluded[part, None], torch.inf)
        exact, order = away.sort(dim=1, stable=True)
        found.append((exact[:, :k], index.gather(1, order)[:, :k]))
    distance, index = (torch.cat(columns) for columns in zip(*found, strict=True))
    size, reach = centred.norm(dim=1), distance[:, -1]
    limits, radius = torch.finfo(kind), size + reach
    slack = (data.d + 4) * (limits.eps * (2 * size * radius + radius.square()) + limits.tiny)
    safe = last.isfinite() & (4 * radius.square() < limits.max)  # no product has overflowed
    certain = safe & (last.double() > reach.square() - size.square() + slack)
    return distance, index, certain | (candidates.shape[1] == data.n)  # or every point is a candidate


def _candidates(queries: Tensor, data: Empirical | Augmented, excluded: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest product and the indices of each query's candidates, ``(q,)`` and ``(q, count)``."""
    step = max(1, CHUNK // max(data.d, 512))
    parts = list(torch.arange(len(queries), device=data.device).split(max(1, CHUNK // step)))
    high = data.center.to(queries)
    low = (data.center - high.double()).to(queries)  # one float32 alone may be off by more than the points' spread
    best = [queries.new_zeros(len(part), 0) for part in parts]
    index = [excluded.new_zeros(len(part), 0) for part in parts]
    for start in range(0, data.n, step):
        block = slice(start, min(start + step, data.n))
        places = torch.arange(block.start, block.stop, device=data.device)
        held = None if isinstance(data, Augmented) else list(_versions(data, block))  # read once for all parts
        for i, part in enumerate(parts):
            square = queries.new_full((len(part), len(places)), torch.inf)
            for version in held or _versions(data, block):
                # float32 is centred in its own precision: float64 would take longer than the product with few queries
                plain = version.dtype == queries.dtype
                rows = (version - high).sub_(low) if plain else (version.double() - data.center).to(queries)
                torch.minimum(square, torch.addmm(rows.square().sum(1), queries[part], rows.mT, alpha=-2), out=square)
            own = excluded[part] - start
            inside = ((own >= 0) & (own < len(places))).nonzero()[:, 0]
            square[inside, own[inside]] = torch.inf
            known = torch.cat([best[i], square], 1)
            best[i], order = known.topk(min(count, known.shape[1]), largest=False)
            index[i] = torch.cat([index[i], places.expand(len(part), -1)], 1).gather(1, order)
    return torch.cat([b[:, -1] for b in best]), torch.cat(index)
