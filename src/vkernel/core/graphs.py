"""Steps of a computation on a GPU, recorded as CUDA graphs: a replay costs one launch, whatever the step does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")
# torch's own stream for captures belongs to the device of the first capture: a capture for another device is empty
_STREAMS: dict[int, torch.cuda.Stream] = {}
_LOCK = threading.Lock()  # one capture at a time in a process


class Recorder:
    """Steps that read from fixed places in memory. What a step returned stays at one place until it is taken again."""

    def __init__(self) -> None:
        self.graphs: dict[str, tuple[torch.cuda.CUDAGraph, Any] | None] = {}
        self.pool = torch.cuda.graph_pool_handle()  # results are held here, all else may be used by the next graph

    def take(self, name: str, step: Callable[[], T]) -> T:
        """Run ``step()`` the first time, which compiles kernels, record it the second, and then replay the graph."""
        if name not in self.graphs:
            self.graphs[name] = None
            return step()
        recorded = self.graphs[name]
        if recorded is None:
            graph = torch.cuda.CUDAGraph()
            device = torch.cuda.current_device()
            with _LOCK:
                if device not in _STREAMS:
                    _STREAMS[device] = torch.cuda.Stream()
                with torch.cuda.graph(graph, self.pool, _STREAMS[device], "thread_local"):
                    found = step()
            recorded = self.graphs[name] = graph, found
        recorded[0].replay()
        result: T = recorded[1]
        return result
