"""Training and held-out images of a run, from whatever the training loop has: checked once, when a monitor is made.

A set is an :class:`~vkernel.data.Empirical`, an array or tensor ``(n, *shape)``, a file or folder (``vk.load``), or a
torch ``Dataset`` whose items are tensors, tuples that begin with a tensor (image, label), or dictionaries that hold
one. A ``Dataset`` is read into memory, once; one that augments its images at random is refused."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from vkernel.core import rng
from vkernel.core.checks import check_real
from vkernel.core.errors import InputError, require
from vkernel.core.memory import check_memory
from vkernel.data import Empirical, load
from vkernel.data.empirical import Array, row_hashes
from vkernel.score.wrapped import Wrapped

Source = Empirical | Array | Dataset | str | Path
Labels = Array | bool | None  # one class for each image; True: those that a Dataset returns with its images
NAMES = ("pixel_values", "images", "image", "input", "inputs", "x", "data", "latents")  # of images in dictionaries
CLASSES = ("label", "labels", "class_labels", "target", "y")
TWICE = 4  # items of a Dataset that are read twice
COVERED = 0.6  # of the range, by data that were mapped to it
SLACK = 0.02  # of the range: interpolation oversteps it
SHARED = 0.01  # of the held-out images: more that are training images are an error
SPLIT = "test = data[order[-k:]], data = data[order[:-k]] with order a random permutation"


def read(source: Source, kind: str, labels: Labels = None) -> tuple[Empirical, Tensor | None]:
    """Return a set of images and, if wanted, their classes ``(n,)``; ``kind`` names the set in errors."""
    found: object = None
    try:
        if isinstance(source, str | Path):
            images = load(source)
        elif isinstance(source, Dataset):
            images, found = _from_dataset(source, labels is True)
        else:
            images = source if isinstance(source, Empirical) else Empirical(source)
    except InputError as error:
        raise InputError(f"The {kind} images cannot be used: {error}") from error
    require(images.n >= 2, f"There is one {kind} image; a monitor needs two or more.")
    if labels is True:
        known = found is not None
        require(known, f"labels=True takes the labels of a torch Dataset; the {kind} images have none. Give an array.")
        return images, _classes(found, images.n, kind)
    return images, None if labels is None or labels is False else _classes(labels, images.n, kind)


def _classes(labels: object, n: int, kind: str) -> Tensor:
    try:
        found = torch.as_tensor(labels).cpu().flatten()
        whole = found.long()
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"Labels must be whole numbers, one for each image; got {type(labels).__name__}.") from None
    require(len(found) == n, f"There are {len(found):,} labels for {n:,} {kind} images.")
    require(bool((whole == found).all()) and int(whole.min()) >= 0, "Labels must be whole numbers, 0 or more.")
    return whole


def _from_dataset(dataset: Dataset, labelled: bool) -> tuple[Empirical, list[int] | None]:
    """Read a torch Dataset into memory."""
    endless = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__")
    require(not endless, "an IterableDataset has no items by number. Give an array, or a Dataset with a length.")
    n = len(dataset)  # type: ignore[arg-type]
    require(n > 0, "the Dataset is empty.")
    first = _item(dataset, 0)[0]
    for k in range(min(TWICE, n)):
        same = torch.equal(_item(dataset, k)[0], _item(dataset, k)[0])
        hint = "give the images without random augmentation (flips may be added as images of their own)"
        require(same, f"item {k} of the Dataset differs when it is read twice: it is augmented at random; {hint}.")
    check_memory(2 * n * first.nbytes, f"A Dataset of {n:,} items, read into memory,")
    images, labels = torch.empty((n, *first.shape), dtype=first.dtype), list[int]()
    for k in range(n):
        image, label = _item(dataset, k)
        good = image.shape == first.shape and image.dtype == first.dtype
        shapes = f"item {k} has shape {tuple(image.shape)}, item 0 {tuple(first.shape)}"
        require(good, f"the items of the Dataset differ: {shapes}; they must have one shape and type.")
        images[k] = image
        if labelled:
            require(label is not None, "the items of the Dataset have no label; give labels= as an array.")
            labels.append(int(label))  # type: ignore[call-overload]
    return Empirical(images), labels if labelled else None


def _item(dataset: Any, k: int) -> tuple[Tensor, object]:
    """Return the image and the label, if there is one, of an item."""
    item, label = dataset[k], None
    if isinstance(item, Mapping):
        name = next((name for name in NAMES if name in item), None)
        require(name is not None, f"an item of the Dataset has the keys {', '.join(map(str, item))}; none is an image.")
        label, item = next((item[c] for c in CLASSES if c in item), None), item[name]
    elif isinstance(item, Sequence):
        require(len(item) > 0, "an item of the Dataset is empty.")
        item, label = item[0], item[1] if len(item) > 1 else None
    item = torch.from_numpy(item) if isinstance(item, np.ndarray) else item
    kind = type(item).__name__
    require(isinstance(item, Tensor), f"an item of the Dataset is a {kind}, not a tensor; add a transform to tensors.")
    return check_real(item, "an item of the Dataset").detach().cpu(), label


def check_sets(data: Empirical, test: Empirical, network: Wrapped) -> tuple[Empirical, Empirical]:
    """Return both sets in the network's pixel units; refuse sets that do not belong together, and pixels outside the
    stated range."""
    same = data.shape == test.shape
    require(same, f"Training images have shape {data.shape} and held-out images {test.shape}; they must be alike.")
    fits = network.process.shape in ((), data.shape)
    require(fits, f"The data have shape {data.shape} but Γ acts on {network.process.shape}.")
    found = []
    for points, kind in ((data, "training"), (test, "held-out")):
        bytes_ = points.stored == "uint8" and points.scale is None and network.range is None and len(points.shape) > 1
        hint = "give range=(-1, 1), or the interval to which the training loop maps them"
        require(not bytes_, f"The {kind} images are stored as integers 0 … 255; {hint}.")
        kept = points.stored == "uint8" or points.scale is not None or "int" not in points.stored
        given = f"The {kind} images are stored as {points.stored}, whose range is not that of pixels"
        require(kept, f"{given}; give them as uint8, 0 … 255, or as floats as the network sees them.")
        moved = network.scaled(points)
        if network.range is not None:
            _check_range(moved, network.range, kind)
        found.append(moved)
    train, held = found
    return train, _without_training_images(train, held)


def _check_range(points: Empirical, ends: tuple[float, float], kind: str) -> None:
    (low, high), blocks = extremes(points), ends[1] - ends[0]
    given = f"The {kind} images have values in [{low:.3g}, {high:.3g}], but range says [{ends[0]:g}, {ends[1]:g}]"
    inside = low >= ends[0] - SLACK * blocks and high <= ends[1] + SLACK * blocks
    wide = high - low >= COVERED * blocks
    require(inside and wide, f"{given}; give the images as the network sees them in training, or their range.")


def extremes(points: Empirical) -> tuple[float, float]:
    """Return the smallest and the largest value."""
    step = max(1, (1 << 21) // points.d)
    ends = [points.rows(k, min(k + step, points.n)).aminmax() for k in range(0, points.n, step)]
    return min(float(e.min) for e in ends), max(float(e.max) for e in ends)


def _without_training_images(data: Empirical, test: Empirical) -> Empirical:
    """Return the held-out images that are not in the training set; refuse a set of which many are."""
    keys = rng.keys((data.d,), rng.stream(0, "monitor, equal images"), "cpu")

    def hashes(points: Empirical) -> np.ndarray:
        step = max(1, (1 << 18) // points.d)
        parts = (points.rows(k, min(k + step, points.n)).float().cpu() for k in range(0, points.n, step))
        return torch.cat([row_hashes(rows, keys) for rows in parts]).numpy()

    found = np.isin(hashes(test), hashes(data))
    shared = int(found.sum())
    if not shared:
        return test
    given = f"{shared:,} of the {test.n:,} held-out images are training images"
    good = shared <= SHARED * test.n
    require(good, f"{given}; hold out a random split that is not trained on: {SPLIT}.")
    warnings.warn(f"{given}; they are left out.", stacklevel=4)
    return test.subset(torch.from_numpy(np.flatnonzero(~found)))


def no_split() -> InputError:
    """Return the error of a monitor without held-out images."""
    why = "A monitor needs held-out images, test=, to tell memorisation from learning"
    return InputError(f"{why}. Hold out a random split before training: {SPLIT} and k of 256 or more.")


def fingerprint(points: Empirical) -> str:
    """Return a short hash of the size, the mean and some of the points of a set."""
    index = torch.linspace(0, points.n - 1, min(points.n, 64)).round().long()
    rows = points.take(index).float().cpu()
    held = hashlib.sha256(repr((points.n, points.shape, f"{points.spread:.6g}")).encode())
    held.update(rows.contiguous().numpy().tobytes())
    return held.hexdigest()[:16]
