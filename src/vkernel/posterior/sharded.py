r"""Data larger than a device: every process holds a part, and the parts merge (docs/theory.md, §2.4).

Process :math:`r` of :math:`R` holds the contiguous part :math:`A_r` of the training set. For the same queries it
finds its own moments with the engine as it is, and rank after rank they merge by (2.10) and (2.11),

.. math::

   L = \log \sum_r e^{L_r}, \qquad p_r = e^{L_r - L}, \qquad m = \sum_r p_r m_r, \qquad
   \Sigma = \sum_r p_r \Sigma_r + \sum_{r<s} p_r p_s\, (m_r - m_s)(m_r - m_s)^T ,

so that ranks never exchange points, only moments: :math:`O(d)` numbers for a query. What is not a moment follows:

* sums over points with the weights of the whole, :math:`\sum_i \sqrt{r_i}\, z_i (y_i - m)` and third moments, add;
* a draw by inversion, :math:`u`, belongs to the rank with :math:`\sum_{s<r} p_s \le u < \sum_{s \le r} p_s`;
* the :math:`k` heaviest points are among the :math:`k` heaviest of every rank;
* the centre and spread of the data are moments too, with weights :math:`w_i` in place of :math:`r_i`.

Every rank runs the same program with the same queries and receives the same answer, bit for bit: tables are joined in
the order of the ranks, and what rank 0 found is what all are told.
"""

from __future__ import annotations

import copy
import functools
import platform
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from vkernel.core import rng
from vkernel.core.errors import InputError, require
from vkernel.data.empirical import Empirical, _checked_weights, _tensor
from vkernel.posterior.engine import Alone
from vkernel.posterior.moments import Moments, merge

__all__ = ["Ranks", "Sharded", "shard"]

TABLE = 1 << 24  # numbers of all ranks that are joined at once: 128 MB
HASHED = 1 << 22  # numbers hashed at once


def shard(data: Any, mesh: Any = None, *, whole: bool = True, weights: Any = None, scale: Any = None) -> Sharded:
    """The training set spread over the processes of ``mesh``, as ``vk.EmpiricalScore`` takes it.

    All processes call this together, and then everything that uses the result, with the same arguments.

    ``data``
        a ``vk.Empirical``, or a tensor, array or memory map ``(n, *shape)`` with ``weights`` and
        ``scale`` as there. With ``whole=True`` every process describes the whole set and keeps its own rows; of a
        memory map it reads those alone (and three more, to see that all mean the same file). With ``whole=False``
        every process brings its own part, at least one point, in the order of the ranks; ``weights`` are then on one
        common scale.
    ``mesh``
        a one-dimensional ``DeviceMesh``, whose device the data move to; a ``ProcessGroup``; or ``None`` for the default
        group. Messages travel by NCCL where that is the group's backend, else by the CPU.
    """
    ranks, device = _ranks(mesh)
    part, problem, told = None, "", None
    try:
        part, told = _own_part(data, ranks, whole, weights, scale)
    except InputError as error:
        problem = str(error)
    heard = ranks.everyone((problem, told))
    problems = [f"On rank {r}, which counts its own points from 0: {p}" for r, (p, _) in enumerate(heard) if p]
    require(not problems, " ".join(problems))
    odd = [r for r, (_, other) in enumerate(heard) if other != heard[0][1]]
    require(not odd, _disagree(whole, heard[0][1], odd, heard[odd[0]][1] if odd else None))
    assert part is not None
    return Sharded(part if device is None else part.to(device), ranks)


class Sharded(Empirical):
    """A training set of which this process holds the points ``first`` to ``first + own.n``.

    ``n``, ``shape``, ``weights``, ``center`` and ``spread`` are those of the whole set; ``own`` is the part. Reading
    points, by ``rows``, ``take`` or ``images``, is something that all processes do together.
    """

    def __init__(self, part: Empirical, ranks: Ranks) -> None:
        self.own, self.ranks = copy.copy(part), ranks
        self.shape, self.d, self.name, self.scale = part.shape, part.d, part.name, part.scale
        self.stored, self.dtype, self.in_memory, self.device = part.stored, part.dtype, part.in_memory, part.device
        sizes = [int(size) for size in ranks.gather(torch.tensor([part.n]))]
        self.n, self.first = sum(sizes), sum(sizes[: ranks.rank])
        self.weights = _checked_weights(ranks.concatenate(part.weights, sizes), self.n).to(self.device)
        self.own.weights = self.weights[self.first : self.first + part.n]
        mass, spread = self.own.weights.sum(), torch.tensor([part.spread], dtype=torch.float64, device=self.device)
        whole = ranks.merge(Moments(mass.log()[None], part.center[None], trace=spread.square()))
        assert whole.trace is not None
        self.center, self.spread = whole.mean[0], float(whole.trace.sqrt())
        self.own.center, self.own.spread = self.center, self.spread
        place = (platform.node(), str(self.device))
        ranks.sharing = ranks.everyone(place).count(place)

    def __repr__(self) -> str:
        held = f"{self.first} to {self.first + self.own.n - 1}" if self.own.n else "none"
        return f"Sharded(rank {self.ranks.rank} of {self.ranks.size} holds {held} of n={self.n}, {self.own!r})"

    def rows(self, start: int, stop: int) -> Tensor:
        """The values of points ``start`` to ``stop``, flattened, ``(k, d)``, on every rank."""
        return self.take(torch.arange(self.n)[start:stop])

    def take(self, indices: Any) -> Tensor:
        """The values of the points ``indices``, flattened, ``(k, d)``, on every rank: their owners send them."""
        indices = torch.as_tensor(indices).cpu()
        self.ranks.same("The indices of points", indices)
        indices = self._indices(indices)
        local = torch.where(indices < 0, indices + self.n, indices) - self.first
        mine = ((local >= 0) & (local < self.own.n)).nonzero().squeeze(-1)
        values = torch.zeros(len(indices), self.d, dtype=self.dtype, device=self.device)
        values[mine.to(self.device)] = self.own.take(local[mine])
        return self.ranks.sum(values)

    def to(self, device: torch.device | str) -> Sharded:
        """The same set with every part on its process's ``device``."""
        moved = copy.copy(self)
        moved.own = self.own.to(device)
        moved.weights, moved.center, moved.device = self.weights.to(device), self.center.to(device), moved.own.device
        return moved

    def subset(self, indices: Any) -> Empirical:
        raise InputError("A sharded set has no subsets; take the subset first, then shard it.")

    def merged(self) -> tuple[Empirical, Tensor]:
        raise InputError("Equal points of a sharded set cannot be merged; merge them first, then shard the set.")


class Ranks(Alone):
    """The processes of a ``torch.distributed`` group, and the few things that they say to each other."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device, self.sharing = group, device, 1
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.root = 0 if group is None else dist.get_global_rank(group, 0)

    def everyone(self, thing: Any) -> list[Any]:
        """The ``thing`` of every rank."""
        things: list[Any] = [None] * self.size
        dist.all_gather_object(things, thing, group=self.group)
        return things

    def gather(self, a: Tensor) -> list[Tensor]:
        """``a`` of every rank, all of one shape."""
        sent = a.detach().to(self.device).contiguous()
        parts = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(parts, sent, group=self.group)
        return [part.to(a.device) for part in parts]

    def concatenate(self, a: Tensor, sizes: list[int]) -> Tensor:
        """The vectors of all ranks, one after the other."""
        padded = torch.nn.functional.pad(a, (0, max(sizes) - len(a)))
        return torch.cat([part[:size] for part, size in zip(self.gather(padded), sizes, strict=True)])

    def sum(self, a: Tensor) -> Tensor:
        """The sum over ranks of which all but one hold zero: exact in any order."""
        sent = a.to(self.device, copy=True).contiguous()
        dist.all_reduce(sent, group=self.group)
        return sent.to(a.device)

    def same(self, what: str, *tensors: Tensor) -> None:
        """Refuse, on all ranks, tensors that are not equal on all; they are compared by a 64-bit hash."""
        require(
            not (torch.is_grad_enabled() and any(a.requires_grad for a in tensors)),
            "Over many processes, products with a covariance have no derivative in the vector; detach it.",
        )
        hashes = self.gather(torch.stack([_hash(a).to(self.device) for a in tensors]))
        odd = [r for r, other in enumerate(hashes) if not torch.equal(other, hashes[0])]
        require(
            not odd,
            f"{what} must be the same on all ranks of a sharded set; those of {_listed(odd)} are not those of rank 0. "
            "Make them from one seed, or send those of rank 0 to all by torch.distributed.broadcast.",
        )

    def common(self, a: Tensor) -> Tensor:
        sent = a.detach().to(self.device, copy=True).contiguous()
        dist.broadcast(sent, src=self.root, group=self.group)
        return sent.to(a.device)

    def before(self, share: Callable[[], Tensor]) -> Tensor | float:
        return sum(self.gather(share())[: self.rank], 0.0)

    def fold(self, table: Tensor, join: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        if not len(table):
            return table
        out = torch.empty_like(table)
        for rows in torch.arange(len(table), device=table.device).split(max(1, TABLE // (self.size * table.shape[1]))):
            out[rows] = self.common(functools.reduce(join, self.gather(table[rows])))
        return out

    def merge(self, moments: Moments) -> Moments:
        if moments.vector is not None:
            self.same("The vectors", moments.vector)

        def join(a: Tensor, b: Tensor) -> Tensor:
            return _packed(merge(_unpacked(a, moments), _unpacked(b, moments)))

        return _unpacked(self.fold(_packed(moments), join), moments)


def _packed(moments: Moments) -> Tensor:
    """All that was asked for as one table, a row for each query."""
    present = (getattr(moments, f.name) for f in fields(moments))
    return torch.cat([a if a.ndim == 2 else a[:, None] for a in present if a is not None], 1)


def _unpacked(table: Tensor, like: Moments) -> Moments:
    present = {f.name: a for f in fields(like) if (a := getattr(like, f.name)) is not None}
    columns = table.split([1 if a.ndim == 1 else a.shape[1] for a in present.values()], 1)
    return Moments(**{k: c.reshape(-1, *a.shape[1:]) for (k, a), c in zip(present.items(), columns, strict=True)})


def _hash(a: Tensor) -> Tensor:
    """64 bits for the shape and the values; -0.0 equals 0.0."""
    values = (a.detach().double() + 0.0).flatten().view(torch.int64)
    total = torch.tensor(hash(tuple(a.shape)), device=a.device)
    for start in range(0, len(values), HASHED):
        block = values[start : start + HASHED]
        place = torch.arange(start, start + len(block), device=a.device)
        total = total + rng.hashed(rng.hashed(block, block.new_zeros(())), place).sum()
    return total


def _listed(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _ranks(mesh: Any) -> tuple[Ranks, torch.device | None]:
    """Who takes part, and the device that the data go to (``None``: where they are)."""
    require(
        dist.is_available() and dist.is_initialized(),
        "shard() spreads data over processes, but torch.distributed is not initialised; start the script with torchrun "
        "and call torch.distributed.init_process_group() first.",
    )
    from torch.distributed.device_mesh import DeviceMesh

    group, kind = mesh, None
    if isinstance(mesh, DeviceMesh):
        require(
            mesh.ndim == 1, f"shard() needs a one-dimensional mesh, such as mesh['data']; got {mesh.ndim} dimensions."
        )
        require(mesh.get_coordinate() is not None, "This process is no part of the mesh that was given to shard().")
        group, kind = mesh.get_group(), mesh.device_type
    require(
        group is None or isinstance(group, dist.ProcessGroup),
        f"mesh must be a DeviceMesh, a ProcessGroup of which this process is part, or None; not {mesh!r}.",
    )
    nccl = "nccl" in str(dist.get_backend(group))
    messages = _device("cuda" if nccl else "cpu")
    return Ranks(group, messages), (_device(kind) if kind else messages if nccl else None)


def _device(kind: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _own_part(data: Any, ranks: Ranks, whole: bool, weights: Any, scale: Any) -> tuple[Empirical, tuple[Any, ...]]:
    """This rank's points, with weights on the common scale, and what all ranks must agree on."""
    require(not isinstance(data, Sharded), "The set is sharded already.")
    require(
        not isinstance(data, Empirical) or scale is None,
        "An Empirical has its own scale; give scale with bare points alone.",
    )
    if not isinstance(data, Empirical | Tensor | np.ndarray):
        data = Empirical(data, scale=scale)
    given = isinstance(data, Empirical)
    require(given or (data.ndim > 0 and len(data) > 0), "There must be at least one training point, (n, *shape).")
    n = len(data)
    if weights is None:
        weights = data.weights if given and whole else torch.ones(n, dtype=torch.float64)
        require(
            not given or whole or bool((data.weights == data.weights[0]).all()),
            "The weights of a part sum to one by themselves, which says nothing about the other parts; give all "
            "ranks' weights on one common scale, as weights=…, or shard the whole set.",
        )
    w = torch.as_tensor(weights).detach().cpu().double()
    require(tuple(w.shape) == (n,), f"There must be one weight for each of {n} points; got shape {tuple(w.shape)}.")
    require(bool((w.isfinite() & (w >= 0)).all()), "Weights must be finite and not negative; some are not.")
    first, stop = (n * r // ranks.size for r in (ranks.rank, ranks.rank + 1)) if whole else (0, n)
    part = _cut(data, first, stop, w) if given else _read(data, first, stop, w, scale)
    glance = (n, int(_hash(w)), _glance(data)) if whole else ()
    return part, (part.shape, part.stored, part.scale, *glance)


def _read(points: Tensor | np.ndarray, first: int, stop: int, weights: Tensor, scale: Any) -> Empirical:
    """The points ``first`` to ``stop``; of none, the kind of set that they would be."""
    w = weights[first:stop]
    part = Empirical(points[first : max(stop, first + 1)], w if w.any() else None, scale)
    return _held(part, 0, stop - first, w)


def _cut(data: Empirical, first: int, stop: int, weights: Tensor) -> Empirical:
    """The points ``first`` to ``stop`` of a set, with these weights."""
    part = _held(data, first, stop, weights[first:stop])
    if part.weights.any():
        part.center, part.spread = part._moments()
    return part


def _held(data: Empirical, first: int, stop: int, weights: Tensor) -> Empirical:
    """The same with weights that are not normalised: of a file a view, of memory a copy, which lets go of the rest."""
    part = copy.copy(data)
    part.n, part.weights = stop - first, weights.to(data.device)
    if isinstance(data._store, Tensor):
        rows = data._store[first:stop]
        part._store = rows.clone() if rows.untyped_storage().nbytes() > rows.nbytes else rows
    elif data._index is None:
        part._store = data._store[first:stop]  # type: ignore[assignment]
    else:
        part._index = data._index[first:stop]
    return part


def _glance(data: Empirical | Tensor | np.ndarray) -> int:
    """A hash of the first, the middle and the last point: do all ranks mean the same set?"""
    n = len(data)
    rows = [data.take([i]) if isinstance(data, Empirical) else data[i] for i in (0, n // 2, n - 1)]
    return int(_hash(torch.stack([a if isinstance(a, Tensor) else _tensor(np.asarray(a)) for a in rows]).cpu()))


def _disagree(whole: bool, ours: Any, odd: list[int], theirs: Any) -> str:
    advice = "; if each rank brings its own part, say whole=False" if whole else ""
    names = ("shape", "type in storage", "scale", "number of points", "weights", "values of points")
    what = [name for name, a, b in zip(names, ours, theirs or ours, strict=False) if a != b]
    differ = f"{_listed(odd)} and rank 0 differ in {', '.join(what)}"
    return f"The ranks of a sharded set must describe it alike{advice}: {differ}."
