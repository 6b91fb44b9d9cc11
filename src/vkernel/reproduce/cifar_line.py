"""C along the line between two CIFAR-10 images, where the environment variable VKERNEL_DATA says they are.

The same as for digits (:mod:`vkernel.reproduce.between`) in 3,072 dimensions; coarser, so that it stays quick.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from torch import Tensor

from vkernel.core.errors import InputError
from vkernel.data.loaders import load
from vkernel.reproduce.between import Sizes, exhibit
from vkernel.reproduce.page import Exhibit, Run, Skip

__all__ = ["make"]

ORDER, TITLE, SECONDS = 30, "C along the line between two CIFAR images", 30.0
FULL = Sizes(lowest=0.1, levels=21, fine=121, places=31, draws=12, pairs=100, pair_draws=8, queries=128)
QUICK = Sizes(lowest=0.1, levels=7, fine=13, places=7, draws=2, pairs=10, pair_draws=2, queries=32)


def make(run: Run) -> Exhibit:
    root = os.environ.get("VKERNEL_DATA", "")
    folder = Path(root).expanduser() / "cifar10"
    if not root or not folder.is_dir():
        raise Skip("Set the environment variable VKERNEL_DATA to a folder that holds cifar10/ with its sheets.")
    try:
        data = load(folder)
        labels = _labels(folder / "labels.json", data.n)
    except InputError as error:
        raise Skip(str(error)) from error
    return exhibit(run, "cifar_line", TITLE, "images", data, labels, QUICK if run.quick else FULL)


def _labels(path: Path, n: int) -> Tensor:
    """The classes of the training sheets, those numbered below 50, in order."""
    try:
        sheets = {int(number): classes for number, classes in json.loads(path.read_text()).items()}
        labels = torch.tensor([c for sheet in sorted(sheets) if sheet < 50 for c in sheets[sheet]])
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{path} does not give the classes of the images: {error}.") from error
    if labels.shape != (n,):
        raise InputError(f"{path} has {labels.numel()} classes for {n} images.")
    return labels
