"""Networks that other people trained, as scores: from weight files and from diffusers.

A :class:`Checkpoint` is a :class:`~vkernel.score.wrapped.Wrapped` network (process, ``predicts``, ``time``, ``range``,
``shape``; see :mod:`vkernel.score.wrapped`) that was read from files. Weight files are data: nothing in them is
executed. For a function or module in memory use :func:`vkernel.as_score`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from vkernel.adapters import diffusers, weights
from vkernel.process import Process
from vkernel.score.wrapped import TimeInput, Wrapped, interval


class Checkpoint(Wrapped):
    """A network read from files, with its conventions; ``checkpoint(x, t)`` is its score."""

    @classmethod
    def from_weights(
        cls,
        path: str | os.PathLike[str],
        factory: str | Callable[[], nn.Module],
        *,
        betas: str | Sequence[float] | Tensor | Process,
        predicts: str = "noise",
        time: TimeInput = "index",
        range: Sequence[float] | str | None = (-1.0, 1.0),
        strip: str = "",
        device: torch.device | str = "cpu",
        shape: Sequence[int] | None = None,
        name: str | None = None,
        label: int | None = None,
        sigma_data: float = 0.5,
    ) -> Checkpoint:
        """Build a module with ``factory`` and load the weights in ``path`` (.safetensors, or a state dict by torch).

        Args:
            path: the weight file.
            factory: a function, or text: ``"package.file:factory"`` or ``"path/to/file.py:factory"``. It is *your*
                code, and importing it runs it; the weight file is data, and nothing in it runs.
            betas: ``"linear:1e-4:.02:1000"``, ``"scaled_linear:…"``, ``"cosine:1000"``, ``"key:NAME"`` (a buffer in the
                file), numbers, a process, or its name (``"edm"``, ``"flow"``, ``"vpsong:beta_max=10"``).
            predicts, time, range, shape, label, sigma_data: the conventions of :mod:`vkernel.score.wrapped`.
            strip: the prefix of the network's keys in the file; other keys are ignored.
        """
        held = weights.read_weights(path)
        process, note = weights.read_process(betas, held, str(path))
        module = weights.fill(weights.build(factory), weights.stripped(held, strip, str(path)), str(path))
        module = module.to(device).eval().requires_grad_(False)
        ends = None if range is None else interval(range)
        event = None if shape is None else tuple(shape)
        return cls(
            module,
            process,
            predicts,
            time,
            ends,
            event,
            name or Path(path).name,
            label=label,
            notes=(note,) if note else (),
            sigma_data=sigma_data,
        )

    @classmethod
    def from_diffusers(
        cls,
        source: str | os.PathLike[str] | object,
        scheduler: str | os.PathLike[str] | object | None = None,
        *,
        device: torch.device | str = "cpu",
        label: int | None = None,
    ) -> Checkpoint:
        """Read a diffusers pipeline or its folder, or a UNet2DModel (or its folder) and a scheduler; never download.

        A class-conditional network needs its ``label``.
        """
        parts = diffusers.read(source, scheduler, device, label)
        stated = (parts.predicts, "index", (-1.0, 1.0), parts.shape, parts.name)
        return cls(parts.unet, parts.process, *stated, label=label)
