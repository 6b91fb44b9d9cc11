"""The images of each class: a class-conditional network is audited in every class, with the images of that class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vkernel.core.errors import InputError, require
from vkernel.data import Empirical
from vkernel.reports.audit.samples import FEWEST

Labels = Tensor | Sequence[int] | None


class Class(NamedTuple):
    """The images of one class, and their rows in the whole training set (``None``: all of it)."""

    rows: Tensor | None
    data: Empirical
    test: Empirical | None


def in_class(label: int | None) -> str:
    """Return what the name of a network ends in."""
    return "" if label is None else f", class {label}"


def by_class(
    data: Empirical, labels: Labels, test: Empirical | None, test_labels: Labels
) -> tuple[dict[int, Class], list[str]]:
    """Return the images of each class, and a sentence on classes that are too small."""
    own = _labels(labels, data, "training")
    require(test is None or test_labels is not None, "Give test_labels, the classes of the test images, as well.")
    other = None if test is None else _labels(test_labels, test, "test")
    found, small = {}, []
    for label in own.unique().tolist():
        rows = (own == label).nonzero().flatten()
        theirs = None if other is None else (other == label).nonzero().flatten()
        if int((data.weights.cpu()[rows] > 0).sum()) < FEWEST or (theirs is not None and len(theirs) < 2):
            small.append(str(label))
        else:
            held = None if test is None or theirs is None else test.subset(theirs)
            found[label] = Class(rows, data.subset(rows), held)
    many = f"An audit needs {FEWEST} training images or more (and 2 test images) of a class"
    require(found, f"{many}; no class has so many.")
    return found, [f"{many}; left out: class {', '.join(small)}."] if small else []


def _labels(labels: Labels, data: Empirical, kind: str) -> Tensor:
    try:
        found = torch.as_tensor(labels).cpu().flatten()
        whole = found.long()
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"Labels must be whole numbers, one for each image; got {type(labels).__name__}.") from None
    require(len(found) == data.n, f"There are {len(found):,} labels for {data.n:,} {kind} images.")
    require(bool((whole == found).all()) and int(whole.min()) >= 0, "Labels must be whole numbers, 0 or more.")
    return whole
