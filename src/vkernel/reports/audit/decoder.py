"""Decoders: latents become images where a report shows them. Distances are taken between latents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from vkernel.adapters import diffusers, factory
from vkernel.adapters.weights import reason
from vkernel.core.errors import InputError, require
from vkernel.core.files import expand

BELOW = -0.05  # a smaller value: images lie in [-1, 1], not in [0, 1]
BATCH = 4  # latents in one call


@dataclass(frozen=True)
class Decoder:
    """``decoder(latents (n, C, h, w))`` returns images ``(n, 1 or 3, H, W)`` in [0, 1], in float32 on the CPU."""

    name: str
    function: Callable[[Tensor], Tensor] = field(repr=False, metadata={"files": False})

    def __call__(self, latents: Tensor) -> Tensor:
        given = latents.to(torch.get_default_dtype())
        try:
            with torch.no_grad():
                parts = [torch.as_tensor(self.function(some)).detach().float().cpu() for some in given.split(BATCH)]
                images = torch.cat(parts)
        except Exception as error:
            why = f"{type(error).__name__}: {reason(error)}"
            raise InputError(f"The decoder {self.name} failed on latents {tuple(given.shape)}: {why}.") from error
        good = images.ndim == 4 and len(images) == len(latents) and images.shape[1] in (1, 3)
        shape = tuple(images.shape)
        require(good, f"The decoder {self.name} must return images ({len(latents)}, 1 or 3, H, W); got {shape}.")
        finite = images.nan_to_num(0.0, 0.0, 0.0)
        return (finite if float(finite.min()) >= BELOW else (finite + 1) / 2).clamp(0, 1)


Decoding = Decoder | Callable[[Tensor], Tensor] | str | Path


def decoder(spec: Decoding, device: torch.device | str = "cpu") -> Decoder:
    """Return a decoder: ``package.file:function``, ``path/to/file.py:function``, the folder of a diffusers
    AutoencoderKL (or of a pipeline that holds one), or a function. It maps latents as the network sees them to images
    in [-1, 1] or [0, 1]."""
    if isinstance(spec, Decoder):
        return spec
    if not isinstance(spec, str | Path):
        require(callable(spec), f"A decoder is a function of latents, or its name; got {type(spec).__name__}.")
        return Decoder(type(spec).__name__, spec)
    if ":" in str(spec) and not expand(spec).exists():
        function = factory.named(str(spec), "function")
        return Decoder(str(spec), lambda z: function(z))  # type: ignore[arg-type, return-value]
    folder = expand(spec)
    known = "the folder of a diffusers AutoencoderKL, package.file:function or path/to/file.py:function"
    require(folder.is_dir(), f"There is no decoder {spec}; a decoder is {known}.")
    decode = diffusers.read_decoder(folder / "vae" if (folder / "vae").is_dir() else folder, device)
    return Decoder(folder.name, decode)
