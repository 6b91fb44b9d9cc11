r"""Augmented training sets: every image y in all versions g(y) that training may have shown.

A network that is trained on random flips and shifts learns the law of the augmented set, and copies its images:

===========  ========================================================================================================
flip         reflected left to right
vflip        reflected top to bottom
rot90        turned by 90, 180 and 270 degrees; images must be square
shift:K      moved by up to K pixels along each axis. Pixels that enter have the lowest value of the data's range, the
             background, as random crops with padding and random affine maps fill in
===========  ========================================================================================================

Reflections and turns combine to a group :math:`G` of permutations of pixels (``flip,rot90`` has 8 elements), and the
versions are :math:`S_v\,g`, :math:`g \in G`, with the :math:`(2K+1)^2` shifts :math:`S_v` after them. The distance of x
from a training image is that from its nearest version, :math:`\min_{g, v} |x - S_v\,g(y_i)|`; the *second* nearest
image is the nearest among other images, not another version of the first. Two training images of which one is a version
of the other under G count as one."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.errors import require
from vkernel.data.empirical import Empirical, row_hashes
from vkernel.metrics.features import FITTED, Extractor

LARGEST = 8  # pixels of a shift: 289 versions
BLOCK = 2**21  # numbers in a block of images
Map = Callable[[Tensor], Tensor]
_KINDS: dict[str, list[Map]] = {
    "flip": [lambda x: x, lambda x: x.flip(-1)],
    "vflip": [lambda x: x, lambda x: x.flip(-2)],
    "rot90": [functools.partial(torch.rot90, k=k, dims=(-2, -1)) for k in range(4)],
}


@dataclass(frozen=True)
class Augment:
    """Kinds of reflections and turns, and the largest shift; made by :meth:`parse`.

    >>> import vkernel as vk
    >>> vk.metrics.Augment.parse("flip,shift:1", (1, 8, 8))
    Augment(kinds=('flip',), shift=1)
    """

    kinds: tuple[str, ...] = ()
    shift: int = 0

    @classmethod
    def parse(cls, spec: str | Augment | None, shape: tuple[int, ...]) -> Augment:
        """Read ``"flip,shift:2"`` for images of ``shape``; ``None`` and the empty text are no augmentation."""
        if isinstance(spec, Augment):
            return spec
        require(isinstance(spec, str | None), f"augment must be a text such as 'flip,shift:2', not {spec!r}.")
        kinds, shift = set[str](), 0
        for part in (spec or "").split(","):
            kind, _, number = part.strip().partition(":")
            if kind == "shift":
                good = number.strip().isdecimal() and 1 <= int(number) <= LARGEST
                require(good, f"A shift is written shift:K with K from 1 to {LARGEST} pixels, not {part.strip()!r}.")
                shift = max(shift, int(number))
            elif part.strip() or spec:
                known = kind in _KINDS and not number
                require(known, f"There is no augmentation {part.strip()!r}; there are {', '.join(_KINDS)} and shift:K.")
                kinds.add(kind)
        found = cls(tuple(sorted(kinds)), shift)
        if found.name:
            side = shape[-1] if len(shape) > 1 else 0
            require(side, f"Augmentations are of images (…, height, width); these data have shape {shape}.")
            require("rot90" not in kinds or shape[-2] == side, f"rot90 turns square images; these are {shape}.")
            room = shift < min(shape[-2:])
            require(room, f"shift:{shift} moves images of {shape[-2]} × {side} pixels out of sight; take less.")
        return found

    @property
    def name(self) -> str:
        """The text that :meth:`parse` reads; empty without augmentation."""
        return ",".join([*self.kinds, *([f"shift:{self.shift}"] if self.shift else [])])

    @property
    def count(self) -> int:
        """The number of versions of an image."""
        return len(self._turns) * (2 * self.shift + 1) ** 2

    def turned(self, images: Tensor) -> Iterator[Tensor]:
        """Yield ``images (n, …, h, w)`` under each element of the group G, the identity first."""
        return (functools.reduce(lambda x, g: g(x), turn, images) for turn in self._turns)

    def versions(self, images: Tensor, fill: float) -> Iterator[Tensor]:
        """Yield ``images (n, …, h, w)`` in each version, without shift first; ``fill`` is the value that enters."""
        reach = sorted(range(-self.shift, self.shift + 1), key=abs)
        return (_shifted(x, v, fill) for v in itertools.product(reach, reach) for x in self.turned(images))

    def drawn(self, data: Empirical, generator: torch.Generator) -> Empirical:
        """Return the data with each image in a version drawn at random."""
        if not self.name:
            return data
        images, version = data[:], torch.randint(self.count, (data.n,), generator=generator)
        for k, shown in enumerate(self.versions(data[:], lowest(data))):
            own = (version == k).to(images.device)
            images[own] = shown[own]
        return Empirical(images, data.weights)

    def closest(self, images: Tensor, like: Tensor, fill: float, extract: Extractor) -> Tensor:
        """Return each of ``images (n, *shape)`` in the version whose features are nearest those of ``like``."""
        wanted, away, found = extract(like), torch.full((len(images),), torch.inf).to(images), images
        for shown in self.versions(images, fill):
            distance = (extract(shown) - wanted).norm(dim=1)
            nearer = distance < away
            away = torch.where(nearer, distance, away)
            found = torch.where(nearer.reshape(-1, *(1,) * (images.ndim - 1)), shown, found)
        return found

    @property
    def _turns(self) -> list[tuple[Map, ...]]:
        """The elements of G: with rot90, one reflection gives the other."""
        kinds = ("flip", "rot90") if "rot90" in self.kinds and len(self.kinds) > 1 else self.kinds
        return list(itertools.product(*(_KINDS[kind] for kind in kinds)))


def lowest(data: Empirical) -> float:
    """Return the low end of the data's range: that of stored integers with a scale, else the smallest value."""
    return data.scale[0] if data.scale else min(float(data.take(part).min()) for part in _parts(data))


def _parts(data: Empirical) -> tuple[Tensor, ...]:
    return torch.arange(data.n).split(max(1, BLOCK // data.d))


def _shifted(images: Tensor, by: tuple[int, int], fill: float) -> Tensor:
    """Return images moved down and right by ``by`` pixels (up and left if negative)."""
    if by == (0, 0):
        return images
    (down, right), (h, w) = by, images.shape[-2:]
    out = torch.full_like(images, fill)
    kept = images[..., max(0, -down) : h - max(0, down), max(0, -right) : w - max(0, right)]
    out[..., max(0, down) : h + min(0, down), max(0, right) : w + min(0, right)] = kept
    return out


@dataclass(frozen=True)
class Augmented:
    """The features of distinct training images in all versions; a training set for :func:`vkernel.metrics.nearest`.
    ``center (d,)`` is about the mean of the features.

    >>> import torch, vkernel as vk
    >>> train, held_out = vk.data.images("digits", 200, 100)
    >>> mirrored = train[:20].flip(-1)
    >>> found = vk.metrics.copies(mirrored, train, held_out, augment="flip")
    >>> round(found.fraction.value, 2)
    1.0
    """

    images: Empirical
    augment: Augment
    extract: Extractor
    fill: float
    center: Tensor

    @classmethod
    def merged(cls, data: Empirical, augment: Augment, extract: Extractor) -> tuple[Augmented, Tensor]:
        """Return the set without images that are versions of others under G, and the map to merged indices."""
        keys = rng.keys((data.d,), rng.stream(0, "merge versions of images"), data.device)
        hashes = []
        for part in _parts(data):
            turned = augment.turned(data[part])
            hashes.append(torch.stack([row_hashes(x.flatten(1), keys) for x in turned]).amin(0).cpu())
        _, merge = torch.cat(hashes).unique(return_inverse=True)
        first = torch.full((int(merge.max()) + 1,), data.n).scatter_reduce(0, merge, torch.arange(data.n), "amin")
        kept, order = first.sort()
        merge, images = order.argsort()[merge], data if len(first) == data.n else data.subset(kept)
        some = extract.over(images, torch.arange(min(images.n, FITTED)))
        return cls(images, augment, extract, lowest(data), some.double().mean(0).to(data.device)), merge

    @property
    def n(self) -> int:
        """The number of distinct images."""
        return self.images.n

    @property
    def d(self) -> int:
        """The number of features."""
        return len(self.center)

    @property
    def device(self) -> torch.device:
        """The device of the images."""
        return self.images.device

    def take(self, indices: Tensor) -> Tensor:
        """Return the features of the images ``indices`` as they are, ``(k, d)``."""
        return self.extract.over(self.images, indices)

    def versions(self, which: slice | Tensor) -> Iterator[Tensor]:
        """Yield the features ``(k, d)`` of images in each version."""
        return (self.extract(x) for x in self.augment.versions(self.images[which], self.fill))
