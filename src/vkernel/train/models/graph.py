"""One training step of all members as a CUDA graph."""

from collections.abc import Callable

import torch
from torch import Tensor

from vkernel.train.models.base import State

Draws = tuple[Tensor, ...]  # z, e, y and ω, each (M, B, …), and the keys of dropout (M, 1) where there is any


class Graph:
    """One step of Adam for all members as a CUDA graph; ``graph(draws, lr)`` changes ``state`` in place. On a GPU the
    hundred operations of a step of a small network are shorter than their launches. Each member has its own stream.
    The graph reads what changes between steps, draws and learning rate, from fixed memory, into which each call copies
    them. Capturing needs a few steps that really run; parameters and the optimiser's memory are restored after them."""

    def __init__(self, loss: Callable[..., Tensor], state: State, draws: Draws, lr: float) -> None:
        self.loss, self.state, self.draws = loss, state, [torch.empty_like(a).copy_(a) for a in draws]
        self.lr = torch.tensor(lr, device=self.draws[0].device)
        self.optimiser = torch.optim.Adam(list(state.values()), lr=self.lr, fused=True, capturable=True)
        self.streams = [torch.cuda.Stream() for _ in range(len(self.draws[0]))]
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
            for memory in self.optimiser.state.values():
                for value in memory.values():
                    value.zero_()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):  # capturing runs nothing: the state is as before the first step
            self._step()

    def __call__(self, draws: Draws, lr: float) -> None:
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
