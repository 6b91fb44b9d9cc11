"""Outputs of all members as a CUDA graph, for the many evaluations of one size that sampling takes."""

import threading
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from vkernel.score.base import differentiated
from vkernel.train.models.base import Model, State

Function = Callable[[State, Tensor, Tensor], Tensor]
STREAMS = 4  # members evaluated at once; more gain little
KEPT = 4  # sizes for which a model keeps a graph

# graphs are replayed one at a time and leave nothing in this memory: they share it
_POOLS: dict[torch.device, object] = {}
_LOCK = threading.Lock()
_FOUND: weakref.WeakKeyDictionary[Model, dict[object, "Replay | None"]] = weakref.WeakKeyDictionary()


class Replay:
    """``replay(state, z, e)`` returns ``function`` of every member, ``width`` inputs at a time, for tensors like the
    given. The graph reads them from fixed memory, into which each call copies them."""

    def __init__(self, function: Function, state: State, z: Tensor, e: Tensor, width: int) -> None:
        self.state = {name: _like(p) for name, p in state.items()}
        self.z, self.e, self.out = _like(z), _like(e), _like(z)
        self.streams = [torch.cuda.Stream() for _ in range(min(len(z), STREAMS))]
        self._copy(state, z, e)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # what is chosen and loaded at the first call cannot be captured
            self._run(function, width)
        torch.cuda.current_stream().wait_stream(aside)
        self.graph = torch.cuda.CUDAGraph()
        pool = _POOLS.setdefault(z.device, torch.cuda.graph_pool_handle())
        with torch.cuda.graph(self.graph, pool):  # type: ignore[arg-type]  # the type is private
            self._run(function, width)

    def __call__(self, state: State, z: Tensor, e: Tensor) -> Tensor:
        self._copy(state, z, e)
        self.graph.replay()
        return self.out.clone()

    def _copy(self, state: State, z: Tensor, e: Tensor) -> None:
        torch._foreach_copy_(list(self.state.values()), list(state.values()))
        self.z.copy_(z)
        self.e.copy_(e)

    def _run(self, function: Function, width: int) -> None:
        main = torch.cuda.current_stream()
        for stream in self.streams:
            stream.wait_stream(main)
        for m, (out, z, e) in enumerate(zip(self.out, self.z, self.e, strict=True)):
            with torch.cuda.stream(self.streams[m % len(self.streams)]):
                own = {name: p[m] for name, p in self.state.items()}
                for part in zip(*(a.split(width) for a in (out, z, e)), strict=True):
                    part[0].copy_(function(own, *part[1:]))
        for stream in self.streams:
            main.wait_stream(stream)


def replayed(model: Model, function: Function, state: State, z: Tensor, e: Tensor, width: int) -> Tensor | None:
    """Return the outputs from a graph, which is made at the second evaluation of a size; ``None`` at the first, where
    there is no GPU, and where derivatives are taken."""
    tensors = [z, e, *state.values()]
    if not z.is_cuda or torch.cuda.is_current_stream_capturing() or torch._C._are_functorch_transforms_active():
        return None
    if differentiated(z) or any(p.requires_grad for p in state.values()):
        return None
    key = width, z.device, *((a.dtype, a.shape) for a in tensors)
    with _LOCK, torch.inference_mode(False), torch.no_grad(), torch.cuda.device(z.device):
        found = _FOUND.setdefault(model, {})
        if key not in found:
            found[key] = None
            while len(found) > KEPT:
                del found[next(iter(found))]
            return None
        replay = found[key] = found.pop(key) or Replay(function, state, z, e, width)  # the latest used stand last
        return replay(state, z, e)


def _like(a: Tensor) -> Tensor:
    return torch.empty(a.shape, dtype=a.dtype, device=a.device)
