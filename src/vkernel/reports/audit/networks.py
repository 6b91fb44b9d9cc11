"""The networks of a report: whatever the user has given, as scores with conventions and different names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vkernel.adapters.checkpoints import Checkpoint, Checkpoints
from vkernel.core.errors import InputError, require
from vkernel.data import Empirical
from vkernel.process import Process
from vkernel.reports.audit.denoising import as_network
from vkernel.sample import Scores
from vkernel.score import Score, Wrapped, as_score

Model = Score | Scores | Callable[[Tensor, Tensor], Tensor] | str | Path


def as_networks(models: Model | Sequence[Model], process: Process | None, data: Empirical) -> list[Wrapped]:
    """Return all models as networks with different names."""
    given: Iterable[Any] = models if isinstance(models, Sequence) and not isinstance(models, str) else [models]
    nets: list[Wrapped] = []
    for model in given:
        if isinstance(model, Scores):
            found = {m: as_network(model.member(m), data) for m in range(len(model)) if m not in model.diverged}
            nets += [n if isinstance(model, Checkpoints) else replace(n, name=f"member {m}") for m, n in found.items()]
        elif isinstance(model, str | Path):
            nets.append(Checkpoint.from_diffusers(model))
        elif isinstance(model, Score):
            nets.append(as_network(model, data))
        elif callable(model) and process is not None:
            name = model.__name__ if inspect.isroutine(model) else type(model).__name__
            nets.append(as_score(model, process, range=(-1, 1), name=name))
        else:
            needs = "give a Score, a diffusers folder, or a function (x, t) with process="
            raise InputError(f"A {type(model).__name__} cannot be audited alone: {needs}.")
    require(nets, "There is no network to audit.")
    return [replace(net, name=name) for net, name in zip(nets, numbered([net.name for net in nets]), strict=True)]


def numbered(names: Sequence[str]) -> list[str]:
    """Return different names: equal ones are followed by their place in the list."""
    return [f"{name} ({k + 1})" if names.count(name) > 1 else name for k, name in enumerate(names)]
