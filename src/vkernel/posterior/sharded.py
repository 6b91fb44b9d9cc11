r"""Data larger than a device: every process holds a part, and their moments merge (docs/theory.md, §2.4).

Process :math:`r` holds the contiguous part :math:`A_r` of the training set and computes its moments for the same
queries, which merge rank after rank by (2.10) and (2.11): ranks exchange no points, only :math:`O(d)` numbers for a
query. Sums over points with the weights of the whole add. A draw by inversion, :math:`u`, belongs to the rank with
:math:`\sum_{s<r} p_s \le u < \sum_{s \le r} p_s`. The :math:`k` heaviest points are among the :math:`k` heaviest of
every rank. The centre and spread of the data are moments with weights :math:`w_i` in place of :math:`r_i`.

Every rank runs the same program with the same queries and receives the same results, bit for bit: tables are joined in
the order of the ranks, and rank 0 sends its result to all."""

from __future__ import annotations

import copy
import functools
import platform
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from vkernel.core import rng
from vkernel.core.errors import InputError, require
from vkernel.data.empirical import Array, Empirical, Indices, Scale
from vkernel.posterior.engine import Alone
from vkernel.posterior.weights import Moments, blocks, merge

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    Mesh = DeviceMesh | dist.ProcessGroup | None

T = TypeVar("T")
Facts = dict[str, object]
TABLE, HASHED = 1 << 24, 1 << 22  # numbers of all ranks that are joined at once (128 MB), and that are hashed at once


def shard(
    data: Empirical | Array, mesh: Mesh = None, *, whole: bool = True, weights: Array | None = None, scale: Scale = None
) -> Sharded:
    """Return the training set spread over the processes of ``mesh``, as ``vk.EmpiricalScore`` takes it. All processes
    call this together, and then everything that uses the result, with the same arguments. ``data`` is a
    ``vk.Empirical``, or a tensor, array or memory map ``(n, *shape)`` with ``weights`` and ``scale`` as there. With
    ``whole=True`` every process describes the whole set and keeps its own rows; of a memory map it reads those alone
    (and three more, as a check). With ``whole=False`` every process brings its own part, at least one point, in the
    order of the ranks, with ``weights`` on one common scale. ``mesh`` is a one-dimensional ``DeviceMesh``, whose device
    the data move to, a ``ProcessGroup``, or ``None`` for the default group. Messages travel by NCCL or by the CPU.

    >>> import torch, vkernel as vk
    >>> from torch import distributed
    >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    >>> data = vk.posterior.shard(vk.data.toy("triple"))  # under torchrun each process keeps its part
    >>> vk.EmpiricalScore(data, vk.VP())(torch.zeros(2, 1), 0.5).shape
    torch.Size([2, 1])
    >>> distributed.destroy_process_group()
    """
    ranks, device = _ranks(mesh)
    part, facts, problem = None, Facts(), ""
    try:
        part, facts = _own_part(data, ranks, whole, weights, scale)
    except InputError as error:
        problem = str(error)
    problems, all_facts = zip(*ranks.gather_objects((problem, facts)), strict=True)
    found = [f"On rank {r}, which counts its own points from 0: {p}" for r, p in enumerate(problems) if p]
    require(not found, " ".join(found))
    odd = [r for r, other in enumerate(all_facts) if other != all_facts[0]]
    if odd:
        different = ", ".join(name for name, fact in all_facts[0].items() if all_facts[odd[0]].get(name) != fact)
        rule = "The ranks of a sharded set must describe it alike"
        rule += "; if each rank brings its own part, set whole=False" if whole else ""
        raise InputError(f"{rule}: {_listed(odd)} and rank 0 differ in {different}.")
    assert part is not None
    return Sharded(part if device is None else part.to(device), ranks)


class Sharded(Empirical):
    """This process holds the part ``own`` of a training set, from the point ``first`` on. ``n``, ``shape``,
    ``weights``, ``center`` and ``spread`` are of the whole set. All processes read points together.

    >>> import vkernel as vk
    >>> from torch import distributed
    >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    >>> data = vk.posterior.shard(vk.data.toy("triple"))  # one process holds all
    >>> data.n, data.own.n, data.first
    (3, 3, 0)
    >>> distributed.destroy_process_group()
    """

    def __init__(self, part: Empirical, ranks: Ranks) -> None:
        self.own, self.ranks = copy.copy(part), ranks
        self.shape, self.d, self.name, self.scale = part.shape, part.d, part.name, part.scale
        self.stored, self.dtype, self.in_memory, self.device = part.stored, part.dtype, part.in_memory, part.device
        parts = ranks.gather_objects(part.weights.cpu())
        weights, self.first = torch.cat(parts), sum(len(a) for a in parts[: ranks.rank])
        self.n = len(weights)
        require(bool(weights.any()), "Every weight is zero; at least one must not be.")
        weights = weights / weights.max()
        self.weights = (weights / weights.sum()).to(self.device)
        self.own.weights = self.weights[self.first : self.first + part.n]
        mass, spread = self.own.weights.sum(), torch.tensor([part.spread], dtype=torch.float64, device=self.device)
        moments = ranks.merge(Moments(mass.log()[None], part.center[None], trace=spread.square()))
        assert moments.trace is not None
        self.center, self.spread = moments.mean[0], float(moments.trace.sqrt())
        self.own.center, self.own.spread = self.center, self.spread
        place = (platform.node(), str(self.device))
        ranks.sharing = ranks.gather_objects(place).count(place)

    def __repr__(self) -> str:
        held = f"{self.first} to {self.first + self.own.n - 1}" if self.own.n else "none"
        return f"Sharded(rank {self.ranks.rank} of {self.ranks.size} holds {held} of n={self.n}, {self.own!r})"

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the values of points ``start`` to ``stop``, flattened, ``(k, d)``, on every rank."""
        return self.take(torch.arange(self.n)[start:stop])

    def take(self, indices: Indices) -> Tensor:
        """Return the values of the points ``indices``, flattened, ``(k, d)``, on every rank: their owners send them."""
        indices = torch.as_tensor(indices).cpu()
        self.ranks.same("The indices of points", indices)
        indices = self.check_indices(indices)
        local = torch.where(indices < 0, indices + self.n, indices) - self.first
        mine = ((local >= 0) & (local < self.own.n)).nonzero().squeeze(-1)
        values = torch.zeros(len(indices), self.d, dtype=self.dtype, device=self.device)
        values[mine.to(self.device)] = self.own.take(local[mine])
        return self.ranks.sum(values)

    def to(self, device: torch.device | str) -> Sharded:
        """Return the same set with every part on its process's ``device``."""
        moved = copy.copy(self)
        moved.own = self.own.to(device)
        moved.weights, moved.center, moved.device = self.weights.to(device), self.center.to(device), moved.own.device
        return moved

    def subset(self, indices: Indices) -> Empirical:
        raise InputError("A sharded set has no subsets; take the subset first, then shard it.")

    def mirrored(self) -> Empirical:
        raise InputError("A sharded set cannot be mirrored; mirror the set first, then shard it.")

    def merged(self) -> tuple[Empirical, Tensor]:
        raise InputError("Equal points of a sharded set cannot be merged; merge them first, then shard the set.")


class Ranks(Alone):
    """The processes of a ``torch.distributed`` group exchange messages."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group, self.device, self.sharing = group, device, 1
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.root = 0 if group is None else dist.get_global_rank(group, 0)

    def gather_objects(self, thing: T) -> list[T]:
        """Gather the ``thing`` of every rank."""
        things: list[T] = [thing] * self.size
        dist.all_gather_object(things, thing, group=self.group)
        return things

    def gather(self, a: Tensor) -> list[Tensor]:
        """Gather ``a`` of every rank, all of one shape."""
        sent = a.detach().to(self.device).contiguous()
        parts = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(parts, sent, group=self.group)
        return [part.to(a.device) for part in parts]

    def sum(self, a: Tensor) -> Tensor:
        """Sum over ranks of which all but one hold zero: exact in any order."""
        sent = a.to(self.device, copy=True).contiguous()
        dist.all_reduce(sent, group=self.group)
        return sent.to(a.device)

    def same(self, what: str, *tensors: Tensor) -> None:
        """Refuse, on all ranks, tensors that are not equal on all; they are compared by a 64-bit hash."""
        wanted = torch.is_grad_enabled() and any(a.requires_grad for a in tensors)
        require(not wanted, "Over many processes, products with a covariance have no derivative; detach the vector.")
        hashes = self.gather(torch.stack([_hash(a).to(self.device) for a in tensors]))
        odd = [r for r, other in enumerate(hashes) if not torch.equal(other, hashes[0])]
        advice = "Make them from one seed, or send those of rank 0 to all by torch.distributed.broadcast."
        differ = f"those of {_listed(odd)} are not those of rank 0"
        require(not odd, f"{what} must be the same on all ranks of a sharded set; {differ}. {advice}")

    def common(self, a: Tensor) -> Tensor:
        sent = a.detach().to(self.device, copy=True).contiguous()
        dist.broadcast(sent, src=self.root, group=self.group)
        return sent.to(a.device)

    def before(self, share: Callable[[], Tensor]) -> Tensor | float:
        return sum(self.gather(share())[: self.rank], 0.0)

    def fold(self, table: Tensor, join: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        out = torch.empty_like(table)
        for rows in blocks(len(table), TABLE // (self.size * table.shape[1])):
            out[rows] = self.common(functools.reduce(join, self.gather(table[rows])))
        return out

    def merge(self, moments: Moments) -> Moments:
        if moments.vector is not None:
            self.same("The vectors", moments.vector)
        shapes = {name: a.shape[1:] for name, a in moments.present().items()}

        def packed(part: Moments) -> Tensor:
            return torch.cat([a[:, None].flatten(1) for a in part.present().values()], 1)

        def unpacked(table: Tensor) -> Moments:
            columns = zip(shapes.items(), table.split([s.numel() for s in shapes.values()], 1), strict=True)
            return Moments(**{name: c.reshape(len(c), *shape) for (name, shape), c in columns})

        return unpacked(self.fold(packed(moments), lambda a, b: packed(merge(unpacked(a), unpacked(b)))))


def _hash(a: Tensor) -> Tensor:
    """Hash the shape and the values to 64 bits; -0.0 equals 0.0."""
    values = (a.detach().double() + 0.0).flatten().view(torch.int64)
    total = torch.tensor(hash(tuple(a.shape)), device=a.device)
    for part in blocks(len(values), HASHED):
        place = torch.arange(part.start, part.stop, device=a.device)
        total = total + rng.hashed(rng.hashed(values[part], values.new_zeros(())), place).sum()
    return total


def _listed(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _ranks(mesh: Mesh) -> tuple[Ranks, torch.device | None]:
    """Return the processes that take part, and the device that the data move to (``None``: they stay)."""
    advice = "start the script with torchrun and call torch.distributed.init_process_group() first"
    problem = f"shard() spreads data over processes, but torch.distributed is not initialised; {advice}."
    require(dist.is_available() and dist.is_initialized(), problem)
    from torch.distributed.device_mesh import DeviceMesh

    def device(kind: str) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)

    kind, group = None, mesh
    if isinstance(mesh, DeviceMesh):
        wanted = "shard() needs a one-dimensional mesh, such as mesh['data']"
        require(mesh.ndim == 1, f"{wanted}; got {mesh.ndim} dimensions.")
        require(mesh.get_coordinate() is not None, "This process is no part of the mesh that was given to shard().")
        kind, group = mesh.device_type, mesh.get_group()
    if group is not None and not isinstance(group, dist.ProcessGroup):
        known = "a DeviceMesh, a ProcessGroup of which this process is part, or None"
        raise InputError(f"mesh must be {known}; not {mesh!r}.")
    nccl = "nccl" in str(dist.get_backend(group))
    messages = device("cuda" if nccl else "cpu")
    return Ranks(group, messages), (device(kind) if kind else messages if nccl else None)


def _own_part(
    data: Empirical | Array, ranks: Ranks, whole: bool, weights: Array | None, scale: Scale
) -> tuple[Empirical, Facts]:
    """Return this rank's points, with weights on the common scale, and what must be equal on all ranks."""
    require(not isinstance(data, Sharded), "The set is sharded already.")
    bare = not isinstance(data, Empirical)
    require(scale is None or bare, "An Empirical has its own scale; give scale with bare points alone.")
    if not isinstance(data, Empirical | Tensor | np.ndarray):
        data = Empirical(data, scale=scale)
    given = data if isinstance(data, Empirical) else None
    n = len(data) if given or data.ndim else 0  # type: ignore[union-attr]
    require(n > 0, "There must be at least one training point, (n, *shape).")
    if weights is None:
        problem = "The weights of a part sum to one by themselves, which does not determine those of the other parts"
        advice = "give all ranks' weights on one common scale, as weights=…, or shard the whole set"
        require(given is None or whole or bool((given.weights == given.weights[0]).all()), f"{problem}; {advice}.")
        weights = given.weights if given and whole else torch.ones(n, dtype=torch.float64)
    w = torch.as_tensor(weights).detach().cpu().double()
    require(tuple(w.shape) == (n,), f"There must be one weight for each of {n} points; got shape {tuple(w.shape)}.")
    require(bool((w.isfinite() & (w >= 0)).all()), "Weights must be finite and not negative; some are not.")
    first, stop = (n * r // ranks.size for r in (ranks.rank, ranks.rank + 1)) if whole else (0, n)
    own = w[first:stop]
    if isinstance(data, Empirical):
        part = data.segment(first, stop, own)
    else:
        rows = data[first : max(stop, first + 1)]  # of no points, the kind of set that they would be
        rows = rows.clone() if isinstance(rows, Tensor) and len(rows) < n else rows  # a view would hold the whole set
        part = Empirical(rows, own if own.any() else None, scale)
        part = part if stop > first else part.segment(0, 0, own)
        part.weights = own.to(part.device)
    facts: Facts = {"shape": part.shape, "type in storage": part.stored, "scale": part.scale}
    if whole:
        some = [data.take([i]) if isinstance(data, Empirical) else data[i] for i in (0, n // 2, n - 1)]
        values = np.stack([np.asarray(a.cpu() if isinstance(a, Tensor) else a, dtype=np.float64) for a in some])
        hashes = [int(_hash(a)) for a in (w, torch.from_numpy(values))]
        facts |= {"number of points": n, "weights": hashes[0], "values of points": hashes[1]}
    return part, facts
