"""Evaluation without side effects: a training with a monitor and one without have equal weights, bit for bit.

* Modules are in evaluation mode; each submodule gets its own mode back. Buffers that a forward changes are restored.
* No gradients are recorded (``torch.no_grad``; tensors of inference mode could not be used in training).
* Global random states of torch (CPU, and every CUDA device), Python and numpy are those of before.
* The caller's autocast stays on, without its cache of weights: an entry that is made without gradients would otherwise
  be found by the next training step in the same region, whose weights would get no gradient.
* Nothing is compiled: what ``torch.compile`` made is evaluated eagerly, and stays compiled for training."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn


@contextlib.contextmanager
def random_states() -> Iterator[None]:
    """Restore the global random states at the end."""
    cpu, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    used = torch.cuda.is_available() and torch.cuda.is_initialized()
    cuda = torch.cuda.get_rng_state_all() if used else []
    mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        if mps is not None:
            torch.mps.set_rng_state(mps)


@contextlib.contextmanager
def modes(modules: list[nn.Module]) -> Iterator[None]:
    """Put modules into evaluation mode, by their flag alone; restore modes and buffers at the end."""
    before = [(module, module.training) for module in modules]
    held = [b for module in modules for b in module._buffers.values() if b is not None and not b.is_inference()]
    buffers = [(b, b._version, b.clone()) for b in held]
    try:
        for module, _ in before:
            module.training = False
        yield
    finally:
        for module, mode in before:
            module.training = mode
        with torch.no_grad():
            for buffer, version, value in buffers:
                if buffer._version != version:
                    buffer.copy_(value)


@contextlib.contextmanager
def unchanged(modules: list[nn.Module], device: torch.device) -> Iterator[None]:
    """Evaluate modules on ``device`` so that nothing of the training changes; see the module."""
    kind = device.type
    on, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    autocast = torch.autocast(kind, dtype=dtype, enabled=on, cache_enabled=False)
    with random_states(), modes(modules), torch.no_grad(), autocast, _eager():
        yield


def _eager() -> contextlib.AbstractContextManager[object]:
    """Return a context in which compiled functions run eagerly, if any may exist and this torch has one (2.6)."""
    stance = getattr(torch.compiler, "set_stance", None) if "torch._dynamo" in sys.modules else None
    return contextlib.nullcontext() if stance is None else stance("force_eager")


def synchronise(device: torch.device) -> None:
    """Wait for the work of a CUDA device, so that a clock measures it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
