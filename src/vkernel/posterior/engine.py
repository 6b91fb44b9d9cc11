"""The exact engine: it chooses, for each batch of queries, the method by which posterior weights are computed.

* ``dense``, the reference path (:mod:`~vkernel.posterior.dense`), serves every query on any device;
* ``pruned`` (:mod:`~vkernel.posterior.pruned`) skips most points at low noise on a CPU, once there have been enough
  queries for which few points held all the weight;
* ``gpu`` (:mod:`~vkernel.posterior.gpu`) screens the points by fp16 products, where a GPU has room for them.

A method yields the weights of the queries that it can serve and returns the numbers of the others, which the reference
path serves. Weights over parts of the data have moments, and these merge.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from vkernel.core.checks import check_choice
from vkernel.core.errors import require
from vkernel.posterior.dense import Dense
from vkernel.posterior.gpu import GPUPath, trusted_path
from vkernel.posterior.pruned import Pruned
from vkernel.posterior.weights import CentredPoints, Moments, Points, Queries, Weights, reduce

Choice = Literal["auto", "dense", "pruned", "gpu"]


class Alone:
    """One process that holds all the data and has nobody to merge with; ``sharded.Ranks`` are many of them."""

    sharing = 1  # processes that share the device's memory

    def same(self, what: str, *tensors: Tensor) -> None:
        """Refuse tensors that differ between processes."""

    def common(self, a: Tensor) -> Tensor:
        """The first process's ``a``, for all."""
        return a

    def before(self, share: Callable[[], Tensor]) -> Tensor | float:
        """The sum of the shares of the processes before this one."""
        return 0.0

    def fold(self, table: Tensor, join: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The tables of all processes, joined in their order; one row for each query."""
        return table

    def merge(self, moments: Moments) -> Moments:
        """The moments of all processes, merged in their order."""
        return moments


class Engine:
    """Posterior weights over ``data`` within ``memory`` bytes (default: a quarter of what is free, of a GPU three).

    ``data`` is what this process holds: all of it, or the part of ``whole`` that begins at its point ``first``, and
    then ``ranks`` are the processes that hold the rest. ``weights`` are over this part; ``moments`` and ``nearest``
    are of the whole set. ``method`` is ``"auto"``, or the name of the one method to use beside the reference path:
    ``"dense"`` (none), ``"pruned"`` (prepared at once) or ``"gpu"`` (untested on the data).
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
        weighted = bool((self.whole.weights != self.whole.weights[0]).any())
        self.points = CentredPoints(data, self.memory, weighted)
        self.dense = Dense(self.points)
        self.gpu: GPUPath | None = None
        self.pruned: Pruned | None = None
        if method == "auto":
            self.gpu, self.pruned = trusted_path(self.dense), Pruned.where_it_pays(self.points)
        elif method == "gpu":
            self.gpu = GPUPath(self.dense)
        elif method == "pruned":
            self.pruned = Pruned(self.points, price=0)

    @property
    def direct(self) -> GPUPath | None:
        """The GPU path where it holds all the data and can be used now: it may then be called by itself."""
        return self.gpu if self.gpu is not None and self.gpu.usable and type(self.ranks) is Alone else None

    def weights(self, queries: Queries, covariance: bool = True) -> Iterator[Weights]:
        """All weights of all queries over the points that are held here.

        What is dropped is bounded relative to all weight, enough for means, or with ``covariance`` to the weight
        *outside* the heaviest point.
        """
        rest = None
        if self.data.n == 0:
            return
        if self.gpu is not None and self.gpu.usable:
            rest = yield from self.gpu.weights(queries, covariance)
        elif self.pruned is not None and self.pruned.ready(self.dense.sparse):
            rest = yield from self.pruned.weights(queries, covariance)
        yield from self.dense.weights(queries, covariance, rest)

    def moments(self, queries: Queries, want: frozenset[str] = frozenset(), vector: Tensor | None = None) -> Moments:
        """The moments of the posterior of every query; ``want`` ⊂ {"trace", "diag", "weights"}."""
        covariance = bool(want) or vector is not None
        if self.gpu is not None and self.gpu.usable and not covariance:
            return self.ranks.merge(self.gpu.moments(queries))
        return self.ranks.merge(reduce(self.weights(queries, covariance), queries, want, vector))

    def nearest(self, queries: Queries, k: int) -> tuple[Tensor, Tensor]:
        """The ``k`` heaviest points of every query: float64 logits, descending, and indices, both ``(B, k)``."""
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


def free_memory(device: torch.device) -> int:
    """Bytes that are free on ``device`` now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 4 << 30
