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
from torch import Tensor

from vkernel.posterior.pieces import Queries

__all__ = ["Place", "Places", "Recorded"]

T = TypeVar("T")
SIZES = 6  # sizes of batches that are remembered


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

    def __init__(self, x: Tensor) -> None:
        wide = torch.empty_like(x, dtype=torch.float64, memory_format=torch.contiguous_format)
        self.queries = Queries(wide, wide.new_empty(len(x)), wide.new_empty(len(x)))
        self.steps: dict[str, Recorded] = {}
        self.free = torch.cuda.Event()
        self.free.record()

    def fill(self, x: Tensor, alpha: Tensor | float, var: Tensor | float) -> Queries:
        """Bring other queries here."""
        torch.cuda.current_stream().wait_event(self.free)
        self.queries.x.copy_(x)
        for mine, given in ((self.queries.alpha, alpha), (self.queries.var, var)):
            mine.fill_(given) if isinstance(given, float) else mine.copy_(given)
        return self.queries

    def take(self, name: str, step: Callable[[], T]) -> T:
        """``step()``, or what was recorded of it under this name."""
        return self.steps.setdefault(name, Recorded())(step)


class Places:
    """One place for each size and precision of batch that was used lately."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a batch may hold back some of its queries, which go on in another place
        self.places: OrderedDict[tuple[int, torch.dtype], Place] = OrderedDict()

    def __reduce__(self) -> tuple[type[Places], tuple[()]]:
        """A copy begins anew: records belong to this memory."""
        return Places, ()

    def __call__(self, x: Tensor) -> Place:
        key = len(x), x.dtype
        place = self.places.pop(key, None) or Place(x)
        self.places[key] = place
        if len(self.places) > SIZES:
            self.places.popitem(last=False)
        return place
