"""The exact engine: it chooses, for each batch of queries, the method by which posterior weights are computed.

``dense``, the reference path, serves every query on any device. ``pruned`` skips most points at low noise on a CPU,
once there have been enough queries for which few points held all the weight. ``gpu`` screens the points by fp16
products, where a GPU has room for them. These two yield the weights of the queries that they can serve and return the
numbers of the others, which the reference path serves."""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Literal, get_args

import torch
from torch import Tensor

from vkernel.core.checks import check_choice
from vkernel.core.errors import require
from vkernel.core.memory import free_memory
from vkernel.posterior.dense import Dense
from vkernel.posterior.gpu import GPUPath, trusted_path
from vkernel.posterior.pruned import Pruned
from vkernel.posterior.weights import CentredPoints, Moments, Points, Queries, Want, Weights, log_mass, reduce

Choice = Literal["auto", "dense", "pruned", "gpu"]


class Alone:
    """One process holds all the data and merges with no other; ``sharded.Ranks`` are many processes."""

    sharing = 1  # processes that share the device's memory

    def same(self, what: str, *tensors: Tensor) -> None:
        """Refuse tensors that differ between processes."""

    def common(self, a: Tensor) -> Tensor:
        """Return the first process's ``a``."""
        return a

    def before(self, share: Callable[[], Tensor]) -> Tensor | float:
        """Return the sum of the shares of the processes before this one."""
        return 0.0

    def fold(self, table: Tensor, join: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Join the tables of all processes, one row for each query, in their order."""
        return table

    def merge(self, moments: Moments) -> Moments:
        """Merge the moments of all processes in their order."""
        return moments


class Engine:
    """Compute posterior weights over ``data`` within ``memory`` bytes (default: 1/4 of what is free, of a GPU 3/4).
    ``data`` is all that there is, or the part of ``whole`` from its point ``first`` on, of which ``ranks`` hold the
    rest. ``weights`` are over this part; ``moments`` and ``nearest`` are of the whole set. ``method`` names the one to
    use beside the reference path: ``"dense"`` (none), ``"pruned"`` (prepared at once), ``"gpu"`` (not tested first).

    >>> import torch, vkernel as vk
    >>> from vkernel.posterior import Engine
    >>> engine = Engine(vk.data.toy("triple"), method="dense")
    """

    def __init__(
        self,
        data: Points,
        memory: int | None = None,
        whole: Points | None = None,
        first: int = 0,
        ranks: Alone | None = None,
        method: Choice = "auto",
    ) -> None:
        check_choice(method, "method", get_args(Choice))
        ready = method != "gpu" or (data.device.type == "cuda" and importlib.util.find_spec("triton"))
        require(ready, 'method="gpu" needs data on a GPU, and Triton; "auto" uses it where it can.')
        self.data, self.whole, self.first = data, data if whole is None else whole, first
        self.ranks = Alone() if ranks is None else ranks
        quarters = 3 if data.device.type == "cuda" else 1
        self.memory = free_memory(data.device) // (4 * self.ranks.sharing) * quarters if memory is None else int(memory)
        self.points = CentredPoints(data, self.memory, bool((self.whole.weights != self.whole.weights[0]).any()))
        self.dense = Dense(self.points)
        self.gpu = GPUPath(self.dense) if method == "gpu" else None
        self.pruned = Pruned(self.points, price=0) if method == "pruned" else None
        if method == "auto":
            self.gpu, self.pruned = trusted_path(self.dense), Pruned.where_it_pays(self.points)

    @property
    def direct(self) -> GPUPath | None:
        """Return the GPU path where it holds all the data and can be used now: it may then be called by itself."""
        return self.gpu if self.gpu is not None and self.gpu.usable and type(self.ranks) is Alone else None

    def without_weights(self, want: Want) -> bool:
        """Return whether moments are computed faster from the points themselves than from weights that are kept."""
        return self.gpu is not None and self.gpu.usable and "diag" not in want

    def weights(self, queries: Queries, covariance: bool = True, lent: bool = False) -> Iterator[Weights]:
        """Yield all weights of all queries over the points that are held here; what is dropped is bounded relative to
        all weight, enough for means, or with ``covariance`` to the weight *outside* the heaviest point. ``lent``
        weights are valid until the next are requested: their memory is used again."""
        rest = None
        if self.data.n == 0:
            return
        if self.gpu is not None and self.gpu.usable:
            rest = yield from self.gpu.weights(queries, covariance)
        elif self.pruned is not None and self.pruned.ready(self.dense.sparse):
            rest = yield from self.pruned.weights(queries, covariance)
        yield from self.dense.weights(queries, covariance, rest, lent)

    def moments(self, queries: Queries, want: Want = frozenset(), vector: Tensor | None = None) -> Moments:
        """Return the moments of the posterior of every query; ``want`` ⊂ {"trace", "diag", "weights"}."""
        if self.gpu is not None and self.without_weights(want):
            return self.ranks.merge(self.gpu.moments(queries, want, vector))
        covariance = bool(want) or vector is not None
        return self.ranks.merge(reduce(self.weights(queries, covariance, lent=True), queries.x, want, vector))

    def log_mass(self, queries: Queries) -> Tensor:
        """Return the log of the weight of the points that are held here."""
        if self.gpu is not None and self.without_weights(frozenset()):
            return self.gpu.moments(queries).log_z
        return log_mass(self.weights(queries, lent=True), queries.x)

    def nearest(self, queries: Queries, k: int) -> tuple[Tensor, Tensor]:
        """Return float64 logits, descending, and indices of each query's ``k`` heaviest points, both ``(B, k)``."""
        held = min(k, self.data.n)  # fewer than k where the whole is spread over many
        table = queries.x.new_full((len(queries), 2 * k), -torch.inf)
        if held:
            table[:, :held], index = self.dense.nearest(queries, held)
            table[:, k : k + held] = (self.first + index).double()

        def heaviest(a: Tensor, b: Tensor) -> Tensor:  # of equals those of a
            logit, index = (torch.cat(pair, 1) for pair in zip(a.chunk(2, 1), b.chunk(2, 1), strict=True))
            logit, order = logit.sort(dim=1, descending=True, stable=True)
            return torch.cat([logit[:, :k], index.gather(1, order)[:, :k]], 1)

        logits, indices = self.ranks.fold(table, heaviest).chunk(2, 1)
        return logits.contiguous(), indices.long()
