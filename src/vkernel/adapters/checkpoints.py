"""Networks that other people trained, as scores: from weight files, from diffusers, and several of them together.

A :class:`Checkpoint` is a :class:`~vkernel.score.wrapped.Wrapped` network (process, ``predicts``, ``time``, ``range``,
``shape``; see :mod:`vkernel.score.wrapped`) that was read from files. Weight files are data: nothing in them is
executed. For a function or module in memory use :func:`vkernel.as_score`. :class:`Checkpoints` are several trainings of
one network as ``Scores`` (docs/theory.md, §7)."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vkernel.adapters import diffusers, factory as factories, weights
from vkernel.core.checks import check_real
from vkernel.core.errors import require, shown
from vkernel.sample import Groups, Scores
from vkernel.score.base import Score, Time, check_like, differentiated
from vkernel.score.wrapped import CONDITION, TimeInput, Wrapped, interval

GRID = 65  # times at which processes are compared
CLOSE = 1e-4  # of alpha and sigma: tables of betas are often stored in float32


class Checkpoint(Wrapped):
    """A network read from files, with its conventions; ``checkpoint(x, t)`` is its score.

    >>> import torch, vkernel as vk
    >>> import tempfile, os
    >>> path = os.path.join(tempfile.mkdtemp(), "net.pt")
    >>> torch.save(torch.nn.Linear(2, 2).state_dict(), path)
    >>> class Net(torch.nn.Linear):
    ...     def forward(self, x, index):
    ...         return super().forward(x)
    >>> network = vk.Checkpoint.from_weights(path, lambda: Net(2, 2), betas="linear:1e-4:.02:1000", shape=(2,))
    >>> network(torch.zeros(3, 2), 500).shape
    torch.Size([3, 2])
    """

    @classmethod
    def from_weights(
        cls,
        path: str | os.PathLike[str],
        factory: str | Callable[[], nn.Module],
        *,
        betas: weights.Betas,
        predicts: str = "noise",
        time: TimeInput = "index",
        range: Sequence[float] | str | None = (-1.0, 1.0),
        strip: str = "",
        device: torch.device | str = "cpu",
        shape: Sequence[int] | None = None,
        name: str | None = None,
        label: int | None = None,
        sigma_data: float = 0.5,
        condition: Tensor | None = None,
        condition_name: str = CONDITION,
    ) -> Checkpoint:
        """Build a module with ``factory`` and load the weights in ``path`` (.safetensors, or a state dict by torch).

        ``factory`` is a function, or text: ``"package.file:factory"`` or ``"path/to/file.py:factory"``. It is *your*
        code, and importing it runs it. ``betas`` are ``"linear:1e-4:.02:1000"``, ``"scaled_linear:…"``,
        ``"cosine:1000"``, ``"key:NAME"`` (a buffer in the file), numbers, a process, or its name (``"edm"``,
        ``"flow"``, ``"vpsong:beta_max=10"``). ``strip`` is the prefix of the network's keys in the file; other keys
        are ignored. The other arguments are the conventions of :mod:`vkernel.score.wrapped`."""
        held = weights.read_weights(path)
        process, note = weights.read_process(betas, held, str(path))
        module = weights.fill(factories.build(factory), held, str(path), strip).to(device).eval().requires_grad_(False)
        ends = None if range is None else interval(range)
        stated = (predicts, time, ends, None if shape is None else tuple(shape), name or shown(Path(path).name))
        more: dict[str, Any] = {"label": label, "notes": (note,) if note else (), "sigma_data": sigma_data}
        more |= {"schedules": weights.schedules(held)}
        return cls(module, process, *stated, **more, condition=condition, condition_name=condition_name)

    @classmethod
    def from_diffusers(
        cls,
        source: object,
        scheduler: object = None,
        *,
        device: torch.device | str = "cpu",
        label: int | None = None,
        condition: Tensor | None = None,
    ) -> Checkpoint:
        """Read a diffusers pipeline or its folder, or its network (or that folder) and a scheduler; never download.
        A class-conditional network needs its ``label``, a text-conditional one embeddings of prompts, ``condition (k,
        tokens, width)``. A network in a pipeline with an autoencoder denoises latents."""
        net, process, predicts, shape, name, notes = diffusers.read(source, scheduler, device, label, condition)
        more: dict[str, Any] = {"label": label, "condition": condition, "notes": notes}
        return cls(net, process, predicts, "index", (-1.0, 1.0), shape, name, **more)


class Checkpoints(Scores):
    """M scores of one process, pixel range and shape, trained alike.

    ``members`` are Checkpoints, or other scores; ``groups`` holds one label for each, equal for members that share
    something. Everything that takes a trained ensemble takes checkpoints.

    >>> import torch, vkernel as vk
    >>> nets = vk.Checkpoints([vk.as_score(lambda x, t, k=k: -k * x, vk.VP(), (2,)) for k in (1.0, 1.1)])
    >>> nets.mean(torch.ones(1, 2), 0.5)
    tensor([[-1.0500, -1.0500]])
    """

    def __init__(self, members: Sequence[Score], groups: Sequence[str | int] | None = None) -> None:
        self.members = list(members) if isinstance(members, Sequence) else []
        count = len(self.members)
        require(count >= 2, f"An ensemble needs two checkpoints or more, in a list; got {count}.")
        for k, member in enumerate(self.members):
            require(isinstance(member, Score), f"Member {k} is {member!r}; it must be a Checkpoint, or another Score.")
        self.names = [m.name if isinstance(m, Wrapped) else f"member {k}" for k, m in enumerate(self.members)]
        self.process, self.groups = self.members[0].process, Groups.of(groups, count)
        for member, name in zip(self.members[1:], self.names[1:], strict=True):
            self._check_alike(member, name)

    def __len__(self) -> int:
        return len(self.members)

    def member(self, index: int) -> Score:
        return self.members[index]

    def select(self, indices: Sequence[int]) -> Checkpoints:
        part = copy.copy(self)
        part.members, part.names = [self.members[k] for k in indices], [self.names[k] for k in indices]
        part.groups = self.groups.keep(indices)
        return part

    def __repr__(self) -> str:
        groups = f" in {self.groups.units} groups" if self.groups.grouped else ""
        return f"Checkpoints({len(self)} members{groups}: {', '.join(self.names)}; {self.process!r})"

    def __call__(self, x: Tensor, t: Time) -> Tensor:
        return torch.stack([self._score(m, x, t) for m in range(len(self))])

    def paired(self, x: Tensor, t: Time) -> Tensor:
        good, given = check_real(x, "x").ndim >= 1 and len(x) == len(self), tuple(x.shape)
        require(good, f"paired needs x ({len(self)}, *batch, *shape), one set of points per member; got {given}.")
        own = isinstance(t, Tensor) and t.ndim >= x.ndim - len(self.members[0].split(x[0])[1])
        times: Sequence[Time] = list(t) if own and isinstance(t, Tensor) else [t] * len(self)
        return torch.stack([self._score(m, *at) for m, at in enumerate(zip(x, times, strict=True))])

    @property
    def shape(self) -> tuple[int, ...] | None:  # type: ignore[override]
        """The event shape, ``None`` until a member knows it."""
        return next((m.shape for m in self.members if m.shape is not None), None)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._home().device

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self._home().dtype

    def at(self, t: Time) -> Tensor:
        """Return the times at which networks are evaluated: the nearest index for those that take one."""
        return _times(self.members[0], torch.as_tensor(t, dtype=torch.float64))

    def _home(self) -> Tensor:
        """Return a tensor on the device and in the floating-point type of the first network."""
        first = self.members[0]
        held = first.net.parameters() if isinstance(first, Wrapped) and isinstance(first.net, nn.Module) else ()
        found = next((p for p in held if p.is_floating_point()), torch.empty(0))
        return found if found.dtype in (torch.float32, torch.float64) else found.float()

    def _score(self, m: int, x: Tensor, t: Time) -> Tensor:
        out = check_like(self.members[m](x, t), x, f"network {self.names[m]}")
        return out if differentiated(x) else out.detach()

    def _check_alike(self, other: Score, name: str) -> None:
        """Refuse a member whose conventions differ from the first; the sentence names the first difference."""
        first, both, found = self.members[0], (self.process, other.process), f"{name} differs from {self.names[0]}: "
        ends = [(p.eps, p.T) for p in both]
        require(ends[0] == ends[1], f"{found}its times run over {ends[1]}, not {ends[0]}.")
        t = torch.linspace(*ends[0], GRID, dtype=torch.float64).clamp(*ends[0])
        index = "an index is a whole number for one of them, and not for the other."
        require(torch.equal(_times(first, t), _times(other, t)), found + index)
        require(all(p.base is p for p in both), "Checkpoints are compared under isotropic noise only.")
        a, b = (torch.stack([p.alpha(t), p.sigma(t)]).double().cpu().flatten() for p in both)
        far = (a - b).abs() > CLOSE * (a.abs() + b.abs()) + 1e-12
        k = int(far.long().argmax())
        where = f"{('alpha', 'sigma')[k // GRID]} at t = {float(t[k % GRID]):g}"
        differs = f"{where} is {float(b[k]):.4g}, not {float(a[k]):.4g}. Runs of one training have one process."
        require(not bool(far.any()), found + differs)
        ranges = [m.range if isinstance(m, Wrapped) else None for m in (first, other)]
        for word, one, two in (("pixel range", *ranges), ("shape", first.shape, other.shape)):
            require(None in (one, two) or one == two, f"{found}its {word} is {two}, not {one}.")


def _times(member: Score, t: Tensor) -> Tensor:
    return member.at(t) if isinstance(member, Wrapped) else t
