"""Several trainings of one network: loaded checkpoints as ``Scores`` (docs/theory.md, §7)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vkernel.core.errors import InputError, require
from vkernel.data import Empirical
from vkernel.process import Process
from vkernel.sample.scores import Groups, Scores
from vkernel.score.base import Score, Time
from vkernel.score.wrapped import Wrapped

GRID = 65  # times at which processes are compared
CLOSE = 1e-4  # of alpha and sigma: tables of betas are often stored in float32


class Checkpoints(Scores):
    """M scores of one process, pixel range and shape, trained alike.

    ``members`` are Checkpoints, or other scores; ``groups`` holds one label for each, equal for members that share
    something. ``nets(x, t)`` is ``(M, *batch, *shape)``; ``nets[m]`` is a member, a slice several. Everything that
    takes a trained ensemble takes checkpoints.

    >>> import torch, vkernel as vk
    >>> nets = vk.Checkpoints([vk.as_score(lambda x, t, k=k: -k * x, vk.VP(), (2,)) for k in (1.0, 1.1)])
    >>> nets.mean(torch.ones(1, 2), 0.5)
    tensor([[-1.0500, -1.0500]])
    """

    def __init__(self, members: Sequence[Score], groups: Sequence[str | int] | None = None) -> None:
        held = list(members) if isinstance(members, Sequence) else []
        require(len(held) >= 2, f"An ensemble needs two checkpoints or more, in a list; got {len(held)}.")
        for k, member in enumerate(held):
            require(isinstance(member, Score), f"Member {k} is {member!r}; it must be a Checkpoint, or another Score.")
        self.members = held
        self.names = [m.name if isinstance(m, Wrapped) else f"member {k}" for k, m in enumerate(held)]
        self.process, self.groups = held[0].process, Groups.of(groups, len(held))
        for k, member in enumerate(held[1:], 1):
            self._check_alike(member, self.names[k])
        self.range = next((m.range for m in held if isinstance(m, Wrapped) and m.range is not None), None)

    def __len__(self) -> int:
        return len(self.members)

    def member(self, index: int) -> Score:
        return self.members[index]

    def select(self, indices: Sequence[int]) -> Checkpoints:
        part = object.__new__(Checkpoints)
        part.members, part.names = [self.members[k] for k in indices], [self.names[k] for k in indices]
        part.process, part.range = self.process, self.range
        part.groups = self.groups.keep(indices)
        return part

    def __repr__(self) -> str:
        groups = f" in {self.groups.units} groups" if self.groups.grouped else ""
        return f"Checkpoints({len(self)} members{groups}: {', '.join(self.names)}; {self.process!r})"

    def __call__(self, x: Tensor, t: Time) -> Tensor:
        return torch.stack([self._score(m, x, t) for m in range(len(self))])

    def paired(self, x: Tensor, t: Time) -> Tensor:
        good = isinstance(x, Tensor) and x.ndim >= 1 and len(x) == len(self)
        given = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        require(good, f"paired needs x ({len(self)}, *batch, *shape), one set of points per member; got {given}.")
        own = isinstance(t, Tensor) and t.ndim >= x.ndim - len(self.members[0].split(x[0])[1])
        times: Sequence[Time] = list(t) if own and isinstance(t, Tensor) else [t] * len(self)
        return torch.stack([self._score(m, *at) for m, at in enumerate(zip(x, times, strict=True))])

    @property
    def shape(self) -> tuple[int, ...] | None:  # type: ignore[override]
        """The event shape, ``None`` until a member knows it."""
        return next((m.shape for m in self.members if m.shape is not None), None)

    @property
    def device(self) -> torch.device:
        return self._home().device

    @property
    def dtype(self) -> torch.dtype:
        return self._home().dtype

    def at(self, t: Time) -> Tensor:
        """Return the times at which networks are evaluated: the nearest index for those that take one."""
        return _times(self.members[0], torch.as_tensor(t, dtype=torch.float64))

    def scaled(self, data: Empirical) -> Empirical:
        """Return the data in the members' pixel units."""
        return self.members[0].scaled(data) if isinstance(self.members[0], Wrapped) else data

    def _home(self) -> Tensor:
        """Return a tensor on the device and in the floating-point type of the first network."""
        first = self.members[0]
        held = first.net.parameters() if isinstance(first, Wrapped) and isinstance(first.net, nn.Module) else ()
        found = next((p for p in held if p.is_floating_point()), torch.empty(0))
        return found if found.dtype in (torch.float32, torch.float64) else found.float()

    def _score(self, m: int, x: Tensor, t: Time) -> Tensor:
        require(isinstance(x, Tensor), f"x must be a torch tensor, not {type(x).__name__}.")
        out = self.members[m](x, t)
        if not isinstance(out, Tensor) or out.shape != x.shape:
            given = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise InputError(f"{self.names[m]} must return a tensor like x, {tuple(x.shape)}, not {given}.")
        return out if x.requires_grad else out.detach()

    def _check_alike(self, other: Score, name: str) -> None:
        """Refuse a member whose conventions differ from the first; the sentence names the first difference."""
        first, process = self.members[0], other.process
        found = f"{name} differs from {self.names[0]}: "
        ends = [(p.eps, p.T) for p in (self.process, process)]
        require(ends[0] == ends[1], f"{found}its times run over {ends[1]}, not {ends[0]}.")
        t = torch.linspace(*ends[0], GRID, dtype=torch.float64).clamp(*ends[0])
        index = "an index is a whole number for one of them, and not for the other."
        require(torch.equal(_times(first, t), _times(other, t)), found + index)
        for letter in ("alpha", "sigma"):
            a, b = (_curve(p, letter, t) for p in (self.process, process))
            far = (a - b).abs() > CLOSE * (a.abs() + b.abs()) + 1e-12
            k = int(far.long().argmax())
            at = f"{letter} at t = {float(t[k]):g} is {float(b[k]):.4g}, not {float(a[k]):.4g}"
            require(not bool(far.any()), f"{found}{at}. Runs of one training have one process.")
        ranges = [m.range if isinstance(m, Wrapped) else None for m in (first, other)]
        for word, one, two in (("pixel range", *ranges), ("shape", first.shape, other.shape)):
            require(None in (one, two) or one == two, f"{found}its {word} is {two}, not {one}.")


def _curve(process: Process, letter: str, t: Tensor) -> Tensor:
    require(process.base is process, "Checkpoints are compared under isotropic noise only.")
    return (process.alpha(t) if letter == "alpha" else process.sigma(t)).double().cpu()


def _times(member: Score, t: Tensor) -> Tensor:
    return member.at(t) if isinstance(member, Wrapped) else t
