"""Steps that are taken again and again for batches of one size, recorded as CUDA graphs.

A hundred small kernels take a GPU less time than a CPU needs to start them. The first time steps run as they are, which
compiles what must be compiled; the second time they are recorded; from then on they are one launch, from and to places
in memory that stay. Nothing is recorded for a size that does not come back.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from vkernel.posterior.pieces import Queries

__all__ = ["Place", "Places", "Recorded"]

T = TypeVar("T")
SIZES = 3  # sizes of batches that are remembered


class Recorded(Generic[T]):
    """A step whose results stay where they are until it is taken again."""

    def __init__(self) -> None:
        self.taken = False
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: T | None = None

    def __call__(self, step: Callable[[], T]) -> T:
        if not self.taken:
            self.taken = True
            return step()
        if self.graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.result = step()
            self.graph = graph
        self.graph.replay()
        assert self.result is not None
        return self.result


class Place:
    """A batch of queries that stays in one place, and a stream of which each use waits for the one before."""

    def __init__(self, queries: Queries) -> None:
        self.queries = Queries(*(torch.empty_like(a).contiguous() for a in (queries.x, queries.alpha, queries.var)))
        self.steps: dict[str, Recorded] = {}
        self.free = torch.cuda.Event()
        self.free.record()

    def fill(self, queries: Queries) -> Queries:
        """Bring other queries here."""
        torch.cuda.current_stream().wait_event(self.free)
        for name in ("x", "alpha", "var"):
            getattr(self.queries, name).copy_(getattr(queries, name))
        return self.queries

    def take(self, name: str, step: Callable[[], T]) -> T:
        """``step()``, or what was recorded of it under this name."""
        return self.steps.setdefault(name, Recorded())(step)


class Places:
    """One place for each size of batch that was used lately."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.places: OrderedDict[int, Place] = OrderedDict()

    def __reduce__(self) -> tuple[type[Places], tuple[()]]:
        """A copy begins anew: records belong to this memory."""
        return Places, ()

    def __call__(self, queries: Queries) -> Place:
        place = self.places.pop(len(queries), None) or Place(queries)
        self.places[len(queries)] = place
        if len(self.places) > SIZES:
            self.places.popitem(last=False)
        return place
