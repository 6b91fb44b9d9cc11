r"""One step of gradient descent of many networks at once.

Row :math:`jM + m` of a state is member m of M, trained with objective j. Members see the same inputs under all
objectives: a tensor of the draws has M rows where objectives share it, and a row for each (objective, member) where
they do not, so that row r of the state takes row r modulo the length of the tensor."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.func import grad, vmap

from vkernel.train.models.base import State

Draws = tuple[Tensor, ...]  # z, e, y and ω, (M, B, …), y with M rows for each objective; keys of dropout (M, 1), if any
OPTIMISERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}


class Step(ABC):
    """``step(draws, lr)`` changes ``state`` in place. ``groups`` are the parts of it for which the optimiser is called.
    ``norms`` holds for every row the sums over steps of the norms of the update and of the gradient, ``(2, rows)``
    on the device of the state; it is ``None`` where they are not recorded."""

    def __init__(self, groups: list[State], optimiser: torch.optim.Optimizer, norms: bool) -> None:
        self.groups, self.optimiser = groups, optimiser
        self.parameters = [p for group in groups for p in group.values()]
        rows, like = sum(len(next(iter(group.values()))) for group in groups), self.parameters[0]
        self.norms = torch.zeros(2, rows, dtype=torch.float64, device=like.device) if norms else None

    @abstractmethod
    def __call__(self, draws: Draws, lr: float) -> None:
        """Take one step."""

    @property
    def memory(self) -> State:
        """What the optimiser keeps between steps: moments and counts of steps."""
        held = [self.optimiser.state[p] for p in self.parameters]
        return {f"{i}.{name}": value for i, values in enumerate(held) for name, value in values.items()}

    def restore(self, memory: State, norms: Tensor | None) -> None:
        """Set what the optimiser keeps and the norms to those of another run of the same training."""
        for key, value in memory.items():
            i, _, name = key.partition(".")
            held = self.optimiser.state[self.parameters[int(i)]]
            if name in held:
                held[name].copy_(value)  # in place: a graph reads this memory
            else:
                held[name] = value
        if self.norms is not None and norms is not None:
            self.norms.copy_(norms)

    def update(self, slopes: list[list[Tensor]]) -> None:
        """Let the optimiser take a step, given the gradients of the parameters of every group."""
        for group, given in zip(self.groups, slopes, strict=True):
            for p, slope in zip(group.values(), given, strict=True):
                p.grad = slope
        before = [] if self.norms is None else [[p.clone() for p in group.values()] for group in self.groups]
        self.optimiser.step()
        if self.norms is not None:
            for group, old in zip(self.groups, before, strict=True):
                torch._foreach_sub_(old, list(group.values()))
            self.norms += torch.stack([torch.cat([_lengths(part) for part in parts]) for parts in (before, slopes)])


class Plain(Step):
    """The gradients of all members under one objective are one call of ``vmap(grad(loss))``, or of the loss where there
    is one member; objectives follow each other, so that each is trained by the same operations as alone."""

    def __init__(self, loss: Callable[..., Tensor], state: State, members: int, optimiser: str, norms: bool) -> None:
        rows = len(next(iter(state.values())))
        parts = [slice(first, first + members) for first in range(0, rows, members)]
        groups = [{name: p[part] for name, p in state.items()} for part in parts]
        parameters = [p for group in groups for p in group.values()]
        super().__init__(groups, OPTIMISERS[optimiser](parameters, fused=True), norms)
        self.loss, self.members = loss, members

    def __call__(self, draws: Draws, lr: float) -> None:
        slopes = []
        for j, group in enumerate(self.groups):
            own = [a[j * self.members % len(a) :][: self.members] for a in draws]
            if self.members == 1 and not torch.is_inference_mode_enabled():
                one = gradient(self.loss, {name: p[0] for name, p in group.items()}, [a[0] for a in own])
                slopes.append([slope[None] for slope in one])
            else:
                slopes.append(list(vmap(grad(self.loss))(group, *own).values()))
        self.optimiser.param_groups[0]["lr"] = lr
        self.update(slopes)


def gradient(loss: Callable[..., Tensor], parameters: State, draws: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the gradient of the loss of one network; it takes up to half the time of ``torch.func``, whose backward
    pass is not fused."""
    with torch.enable_grad():
        own = {name: p.detach().requires_grad_() for name, p in parameters.items()}
        return torch.autograd.grad(loss(own, *draws), list(own.values()))


def _lengths(tensors: list[Tensor]) -> Tensor:
    """Return for every row the norm of all its entries."""
    each = torch.stack([torch.linalg.vector_norm(a.flatten(1), dim=1) for a in tensors])
    found: Tensor = torch.linalg.vector_norm(each, dim=0)
    return found
