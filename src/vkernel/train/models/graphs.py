r"""Steps of training on a GPU without its launches: recorded once as a CUDA graph, then replayed.

A step of a small network is some hundred operations, each shorter than the time that it takes to ask for it. A graph
asks for all of them at once. Convolutions do not become faster by stacking members, so each member's gradient has a
stream of its own inside the graph, and the GPU runs as many of them side by side as it has room for; one fused step of
the optimiser follows. The numbers are those of the plain loop up to rounding, since members never meet.

What changes between steps lives in memory that the graph reads: the draws, copied in before each replay, and the
learning rate. Recording needs steps that really run; parameters and the optimiser's memory are put back after them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vkernel.train.models.base import State

__all__ = ["MEMBERS", "Recorded"]

MEMBERS = 16  # side by side
REHEARSALS = 3

Loss = Callable[..., Tensor]


class Recorded:
    """``recorded(draws, lr)`` makes one step of all members: ``state`` moves in place.

    ``loss(parameters, *draws)`` is that of one member; draws have the member as their first axis, and the shapes of
    ``draws`` are those of every step.
    """

    def __init__(
        self, loss: Loss, state: State, optimiser: torch.optim.Optimizer, draws: Sequence[Tensor], lr: Tensor
    ) -> None:
        self.loss, self.state, self.optimiser, self.lr = loss, state, optimiser, lr
        self.draws = [torch.empty_like(a).copy_(a) for a in draws]
        members = len(self.draws[0])
        self.streams = [torch.cuda.Stream() for _ in range(members)]
        before = {name: p.detach().clone() for name, p in state.items()}
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(REHEARSALS):
                self._step()
        torch.cuda.current_stream().wait_stream(aside)
        with torch.no_grad():
            for name, p in state.items():
                p.copy_(before[name])
            for memory in optimiser.state.values():
                for value in memory.values():
                    value.zero_()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._step()
        # Recording runs nothing, so the state is still as it was before the first step.

    def __call__(self, draws: Sequence[Tensor], lr: float) -> None:
        for held, drawn in zip(self.draws, draws, strict=True):
            held.copy_(drawn)
        self.lr.fill_(lr)
        self.graph.replay()

    def _step(self) -> None:
        main, slopes = torch.cuda.current_stream(), []
        for m, stream in enumerate(self.streams):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                own = {name: p.detach()[m].requires_grad_() for name, p in self.state.items()}
                loss = self.loss(own, *(a[m] for a in self.draws))
                slopes.append(torch.autograd.grad(loss, list(own.values())))  # torch.func has no fused backward
        for stream in self.streams:
            main.wait_stream(stream)
        for p, *slope in zip(self.state.values(), *slopes, strict=True):
            p.grad = torch.stack(slope)
        self.optimiser.step()
