"""The axes of images: arrays of grey images often have no axis of channels, and others have it last; networks take
``(channels, height, width)``."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from vkernel.data import Empirical
from vkernel.score import Wrapped

COLOURS = (1, 3, 4)  # channels of images


def for_network(net: Wrapped, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that images of a stored shape have for a network: the stored one if the network takes it, or if
    no other does."""
    if len(shape) == 2:
        other = (1, *shape)
    elif len(shape) == 3 and shape[2] in COLOURS and shape[0] not in COLOURS:
        other = (shape[2], *shape[:2])
    else:
        return shape
    return shape if _takes(net, shape) or not _takes(net, other) else other


def arranged(data: Empirical, shape: tuple[int, ...]) -> Empirical:
    """Return the data with images of another shape, by :func:`for_network`; its channels become the first axis."""
    if (1, *data.shape) == shape:
        moved = copy.copy(data)
        moved.shape = shape
        return moved
    if data.shape == shape or data.shape != (*shape[1:], shape[0]):
        return data
    stored = data.loaded().storage
    images = None if stored is None else stored.reshape(data.n, *data.shape).movedim(-1, 1)
    return data if images is None else Empirical(images, data.weights, data.scale, name=data.name)


def _takes(net: Wrapped, shape: tuple[int, ...]) -> bool:
    if net.shape is not None:
        return net.shape == shape
    try:
        with torch.no_grad():
            replace(net, shape=shape).output(torch.zeros(2, *shape), net.at(net.process.T))
    except Exception:  # whatever a network raises on images of another shape
        return False
    return True
