"""Helpers that several commands share: data by name or path, devices, and output files."""

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
    """Load the data that an argument names."""
    from vkernel.data import toy
    from vkernel.data.loaders import load

    if data.startswith("toy:"):
        return toy(data.removeprefix("toy:"))
    return load(data, scale=scale, key=key, layout=layout)


def on_device(name: str) -> torch.device:
    """Return the device of that name, if it can be used."""
    import torch

    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).splitlines()[0].rstrip(".")
        raise InputError(f"The device {name!r} cannot be used here: {why}.") from None
    return device


def writable(*files: Path | None) -> None:
    """Check before a long computation that the files for its results can be written."""
    for target in filter(None, files):
        require(not target.is_dir(), f"{target} is a folder; give the name of a file to write.")
        parent = target.expanduser().absolute().parent
        require(not parent.exists() or parent.is_dir(), f"{parent} is a file; {target} cannot lie in it.")
