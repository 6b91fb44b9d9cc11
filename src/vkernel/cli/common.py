"""What several commands share: data by name or path, and devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vkernel.core.errors import InputError, require

if TYPE_CHECKING:
    import torch

    from vkernel.data.empirical import Empirical

__all__ = ["DATA", "load_data", "on_device", "writable"]

DATA = (
    ".npy, .npz, .csv, .tsv, .parquet, .safetensors, .pt, IDX (.gz), a folder of images or a saved Hugging Face data "
    "set; or toy:NAME (toy:digits, toy:hexagon, …)."
)


def load_data(data: str, scale: str = "auto", key: str | None = None, layout: str | None = None) -> Empirical:
    """The data that an argument names."""
    from vkernel.data import toy
    from vkernel.data.loaders import load

    if data.startswith("toy:"):
        return toy(data.removeprefix("toy:"))
    return load(data, scale=scale, key=key, layout=layout)


def on_device(name: str) -> torch.device:
    """The device of that name, if it is there."""
    import torch

    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).splitlines()[0].rstrip(".")
        raise InputError(f"The device {name!r} cannot be used here: {why}.") from None
    return device


def writable(*files: Path | None) -> None:
    """Refuse to begin what could not be written in the end."""
    for target in files:
        require(target is None or not target.is_dir(), f"{target} is a folder; give the name of a file to write.")
        parent = None if target is None else target.expanduser().absolute().parent
        require(
            parent is None or not parent.exists() or parent.is_dir(), f"{parent} is a file; {target} cannot lie in it."
        )
