"""One training step of all members as a CUDA graph."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from vkernel.core.memory import free_memory
from vkernel.train.models.base import State
from vkernel.train.models.step import OPTIMISERS, Draws, Step, gradient

STREAMS = 16  # networks side by side in a CUDA graph


class Graph(Step):
    """One step of all rows of ``state`` as a CUDA graph. On a GPU the hundred operations of a step of a small network
    are shorter than their launches. The networks are spread over streams. The graph reads what changes between steps,
    draws and learning rate, from fixed memory, into which each call copies them. Capturing needs a few steps that
    really run; parameters, norms and the optimiser's memory are restored after them. ``copies`` is memory for some of
    the parameters as the loss takes them, in another precision or layout; every step fills it first."""

    def __init__(
        self,
        loss: Callable[..., Tensor],
        state: State,
        draws: Draws,
        optimiser: str,
        norms: bool,
        copies: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.loss, self.state, self.draws = loss, state, [torch.empty_like(a).copy_(a) for a in draws]
        self.copies = copies or {}
        self.lr = torch.zeros((), dtype=torch.float32, device=self.draws[0].device)  # float32: the kernels read that
        capturable = {"capturable": True} if optimiser == "adam" else {}  # SGD needs nothing to be capturable
        made = OPTIMISERS[optimiser](list(state.values()), lr=self.lr, fused=True, **capturable)
        super().__init__([state], made, norms)
        self.rows = len(next(iter(state.values())))
        self.streams = [torch.cuda.Stream() for _ in range(self._width())]
        before = {name: p.detach().clone() for name, p in state.items()}
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(aside)
        with torch.no_grad():
            for name, p in state.items():
                p.copy_(before[name])
            for value in (*self.memory.values(), *([] if self.norms is None else [self.norms])):
                value.zero_()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):  # capturing runs nothing: the state is as before the first step
            self._step()

    def __call__(self, draws: Draws, lr: float) -> None:
        for held, drawn in zip(self.draws, draws, strict=True):
            held.copy_(drawn)
        self.lr.fill_(lr)
        self.graph.replay()

    def _width(self) -> int:
        """Return the number of streams: as many networks side by side as fit into memory, from the peak of one."""
        device = self.lr.device
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        held, free = torch.cuda.memory_allocated(device), free_memory(device)
        torch.cuda.reset_peak_memory_stats(device)
        self._slopes(0, {**self.state, **self.copies})
        peak = max(1, torch.cuda.max_memory_allocated(device) - held)
        # gradients, moments and differences of all networks come to it; a fifth is left for draws and fragments
        free -= 5 * sum(p.nbytes for p in self.state.values())
        return max(1, min(STREAMS, self.rows, int(0.8 * free) // peak))

    def _slopes(self, row: int, given: State) -> tuple[Tensor, ...]:
        """Return the gradients of the loss of one network."""
        return gradient(self.loss, {name: p[row] for name, p in given.items()}, [a[row % len(a)] for a in self.draws])

    def _step(self) -> None:
        main, slopes = torch.cuda.current_stream(), []
        for name, copy in self.copies.items():
            copy.copy_(self.state[name])
        given = {**self.state, **self.copies}
        for stream in self.streams:
            stream.wait_stream(main)
        for row in range(self.rows):
            with torch.cuda.stream(self.streams[row % len(self.streams)]):
                slopes.append(self._slopes(row, given))
        for stream in self.streams:
            main.wait_stream(stream)
        each = zip(self.state.values(), *slopes, strict=True)
        self.update([[torch.stack(slope).to(p.dtype).contiguous() for p, *slope in each]])
