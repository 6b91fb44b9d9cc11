"""Steps of a computation on a GPU, recorded as CUDA graphs: a replay costs one launch, whatever the step does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Recorder:
    """Steps that read from fixed places in memory. What a step returned stays at one place until it is taken again;
    ``free`` is the event after which another stream may write to the places."""

    def __init__(self) -> None:
        self.graphs: dict[str, tuple[torch.cuda.CUDAGraph, Any] | None] = {}
        self.free = torch.cuda.Event()
        self.free.record()

    def take(self, name: str, step: Callable[[], T]) -> T:
        """Run ``step()`` the first time, which compiles kernels, record it the second, and then replay the graph."""
        if name not in self.graphs:
            self.graphs[name] = None
            return step()
        recorded = self.graphs[name]
        if recorded is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                recorded = self.graphs[name] = graph, step()
        recorded[0].replay()
        result: T = recorded[1]
        return result
