r"""Training sets: the points :math:`y_i` and weights :math:`w_i` that everything exact is a moment of (theory, §2).

:class:`Empirical` is the law :math:`\sum_i w_i\, \delta(x - y_i)`. It reads its points by blocks of rows, so that a
memory map is never held in memory and integers stay integers until a block is used. One pass at construction checks
that all values are finite and measures

.. math:: \bar y = \sum_i w_i y_i, \qquad \mathrm{spread} = \Big(\sum_i w_i |y_i - \bar y|^2\Big)^{1/2}

in float64, by merging centred moments of blocks (Chan's formula), which does not cancel."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.checks import as_tensor, check_array, check_dense, check_real, from_array
from vkernel.core.errors import InputError, require
from vkernel.core.memory import check_memory

Array = Tensor | npt.ArrayLike
Indices = Sequence[int] | np.ndarray | Tensor
Scale = tuple[float, float] | None
_BLOCK = 2**21  # numbers in a block of rows: 16 MB in float64


class Empirical:
    """The training set: ``n`` points of one shape with weights that sum to one; ``data[i]`` are its values.

    Args:
        points: a tensor, an array, a memory map or nested lists, ``(n, *shape)``; a vector of n numbers is n points of
            shape ``(1,)``. Tensors and arrays are shared and must not be changed afterwards; memory maps stay on disk.
        weights: ``(n,)``, not negative, normalised here; zeros are allowed; ``None`` means equal weights.
        scale: ``None`` keeps values as they are; ``(low, high)`` maps the full range of the stored integer type
            (0 … 255 for uint8) to ``[low, high]``, and is refused for floats, which have no such range.
        name: a label for reports.

    Attributes: ``n``, ``shape``, ``d``, ``weights`` (float64), ``device``, ``dtype`` (of the values: float64 if stored
    so, the default float for integers, else float32), ``stored`` (the type in storage), ``in_memory``, ``scale``,
    ``center`` ``(d,)`` float64, ``spread``, ``name``.

    >>> import torch, vkernel as vk
    >>> data = vk.Empirical(torch.tensor([[0.0, 1.0], [2.0, 3.0]]), weights=[3, 1])
    >>> data.n, data.shape, data.weights.tolist()
    (2, (2,), [0.75, 0.25])
    >>> data[0]
    tensor([0., 1.])
    """

    def __init__(
        self, points: Array, weights: Array | None = None, scale: Scale = None, *, name: str | None = None
    ) -> None:
        self._store, self.shape = _storage(points)
        self._index: np.ndarray | None = None  # rows of a memory map that are in use, None for all
        self.n, self.d, self.name = len(self._store), math.prod(self.shape), name
        self.in_memory = isinstance(self._store, Tensor)
        self.device = self._store.device if isinstance(self._store, Tensor) else torch.device("cpu")
        self.stored = _type_name(self._store)
        default = torch.float32 if "float" in self.stored else torch.get_default_dtype()
        wide = self.stored in ("float64", "float96", "float128") or default.itemsize > 4
        self.dtype = torch.float64 if wide else torch.float32
        self.scale = _check_scale(scale, self.stored)
        self.weights = _check_weights(weights, self.n).to(self.device)
        self.center, self.spread = self._moments()

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int | slice | Indices) -> Tensor:
        """Return the values of one point, ``(*shape)``, or of a slice or a vector of indices, ``(k, *shape)``."""
        if isinstance(index, int):
            if not -self.n <= index < self.n:
                raise IndexError(f"There is no point {index}: the set has {self.n} points.")
            return self.take([index]).reshape(self.shape)
        values = self.take(range(*index.indices(self.n)) if isinstance(index, slice) else index)
        return values.reshape(len(values), *self.shape)

    def __repr__(self) -> str:
        name, stored = f"{self.name!r}, " if self.name else "", self.stored + ", memory map" * (not self.in_memory)
        about = f"n={self.n}, shape={self.shape}, stored={stored}, scale={self.scale}, device={self.device}"
        return f"Empirical({name}{about})"

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the values of points ``start`` to ``stop``, flattened, ``(k, d)``; not to be written to."""
        return self.values(self._read(slice(start, stop)))

    def take(self, indices: Indices) -> Tensor:
        """Return the values of the points ``indices`` in this order, flattened, ``(k, d)``."""
        return self.values(self._read(self.check_indices(indices)))

    def to(self, device: torch.device | str) -> Empirical:
        """Return the same set on ``device``; a memory map stays on disk, and its blocks are sent there."""
        store = self._store.to(device) if isinstance(self._store, Tensor) else self._store
        weights = self.weights.to(device)
        return self._with(_store=store, weights=weights, center=self.center.to(device), device=weights.device)

    def loaded(self) -> Empirical:
        """Return the same set in memory, as it is stored."""
        return self if self.in_memory else self._with(_store=self._read(slice(0, self.n)), _index=None, in_memory=True)

    def subset(self, indices: Indices) -> Empirical:
        """Return the set of the points ``indices`` with weights in proportion; a memory map stays on disk."""
        indices = self.check_indices(indices)
        require(len(indices) > 0, "A subset of a training set must hold at least one point; no index was given.")
        weights = self.weights[indices.to(self.device)]
        require(weights.sum() > 0, "Every point of this subset has weight zero; at least one must not.")
        return self._restricted(indices, weights / weights.sum(), measured=True)

    def mirrored(self) -> Empirical:
        """Return the images and, after them, their mirror images (left to right), in memory; image i is i + n mirrored.
        An image and its mirror image share its weight: this is the law of a set with random horizontal flips."""
        good = len(self.shape) >= 2
        require(good, f"Mirror images need images (H, W) or (C, H, W); a point of this set has shape {self.shape}.")
        check_memory(3 * self.n * self.d * self._store.dtype.itemsize, f"{self.n:,} images and their mirror images")
        images = self._read(slice(0, self.n)).reshape(self.n, *self.shape)
        both = torch.cat([images, images.flip(-1)]).reshape(2 * self.n, self.d)
        found = self._with(_store=both, _index=None, in_memory=True, n=2 * self.n, weights=self.weights.repeat(2) / 2)
        found.center, found.spread = found._moments()
        return found

    def choose(self, k: int, generator: torch.Generator, distinct: bool = False) -> Tensor:
        """Return indices of ``k`` points, or of all if there are fewer. They are different points, equally likely, if
        all weights (but zeros) are equal or if ``distinct``; otherwise they are drawn by weight, with replacement."""
        weights, positive = self.weights.cpu(), self.weights.cpu().nonzero().flatten()
        if distinct or bool((weights[positive] == weights.max()).all()):
            return positive[torch.randperm(len(positive), generator=generator)[:k]]
        return torch.multinomial(weights, k, replacement=True, generator=generator)

    def merged(self) -> tuple[Empirical, Tensor]:
        """Return the set with exact duplicates merged into weights, and the map from each index to its merged index.
        The first of equal points is kept, in order; -0.0 equals 0.0. Points are found by a 64-bit hash of their values
        and then compared; should two different points share a hash, another hash is taken."""
        for salt in count():
            keys = rng.keys((self.d,), rng.stream(salt, "merge equal points"), self.device)
            hashes = torch.cat([self._hashes(slice(*block), keys).cpu() for block in self._blocks(8)])
            _, first, inverse = np.unique(hashes.numpy(), return_index=True, return_inverse=True)
            partner = first[inverse.reshape(-1)]
            others = np.flatnonzero(partner != np.arange(self.n))
            parts = np.array_split(others, len(others) * self.d * 8 // _BLOCK + 1)
            if all(torch.equal(self.take(i) + 0.0, self.take(partner[i]) + 0.0) for i in parts):
                break
        order = np.argsort(first)
        merge = torch.from_numpy(np.argsort(order)[inverse.reshape(-1)]).to(self.device)
        if len(first) == self.n:
            return self, merge
        weights = torch.zeros(len(first), dtype=torch.float64, device=self.device)
        return self._restricted(torch.from_numpy(first[order]), weights.index_add_(0, merge, self.weights)), merge

    def _hashes(self, block: slice, keys: Tensor) -> Tensor:
        """Return the hash of each point of a block; bytes, which are equal if and only if their values are, are hashed
        eight at a time."""
        stored = self._read(block)
        if stored.dtype not in (torch.uint8, torch.int8):
            return row_hashes(self.values(stored), keys)
        padded = stored.new_zeros(len(stored), -(-self.d // 8) * 8)
        padded[:, : self.d] = stored
        words = padded.view(torch.int64)
        return rng.hashed(keys[: words.shape[1]], words).sum(-1)

    def _read(self, which: slice | Tensor) -> Tensor:
        """Return rows as stored, ``(k, d)``, on the device; a memory map is read in the order of its rows."""
        if isinstance(self._store, Tensor):
            return self._store[which.to(self._store.device) if isinstance(which, Tensor) else which]
        chosen = which.cpu().numpy() if isinstance(which, Tensor) else which
        if self._index is not None:
            chosen = self._index[chosen]
        if isinstance(chosen, slice):
            block = np.array(self._store[chosen])
        else:
            order = np.argsort(chosen, kind="stable")
            block = np.empty((len(chosen), *self._store.shape[1:]), self._store.dtype)
            block[order] = self._store[chosen[order]]
        return from_array(block.reshape(len(block), self.d)).to(self.device)

    def segment(self, start: int, stop: int, weights: Tensor) -> Empirical:
        """Return points ``start`` to ``stop``, copied or as a view of a memory map; their weights may all be zero."""
        return self._restricted(slice(start, stop), weights.to(self.device), measured=bool(weights.any()))

    @property
    def storage(self) -> Tensor | None:
        """The points as they are stored, ``(n, d)``, on the device; ``None`` for a memory map."""
        return self._store if isinstance(self._store, Tensor) else None

    def values(self, block: Tensor) -> Tensor:
        """Return the values of a block of stored numbers: floats, with ``scale`` applied."""
        if self.scale is None:
            return block.to(self.dtype)
        (low, high), info = self.scale, torch.iinfo(block.dtype)
        return block.to(self.dtype).sub(info.min).div_(info.max - info.min).mul_(high - low).add_(low)

    def check_indices(self, indices: Indices) -> Tensor:
        """Return indices of points as a vector of integers; those on the CPU are checked to be in range."""
        indices = torch.as_tensor(indices)
        indices = indices.long() if indices.numel() == 0 else indices
        good, given = indices.ndim == 1 and "int" in str(indices.dtype), (indices.dtype, tuple(indices.shape))
        require(good, f"Indices of points must be a vector of integers; got {given[0]}, shape {given[1]}.")
        if indices.device.type == "cpu" and indices.numel():
            low, high = (int(end) for end in indices.aminmax())
            outside = low if low < -self.n else high
            require(-self.n <= low and high < self.n, f"There is no point {outside}: the set has {self.n} points.")
        return indices.long()

    def _restricted(self, which: slice | Tensor, weights: Tensor, measured: bool = False) -> Empirical:
        """Return the points ``which`` with these weights, of which the moments are measured if they change."""
        part = self._with(n=len(weights), weights=weights)
        if isinstance(self._store, Tensor):
            part._store = self._store[which].clone() if isinstance(which, slice) else self._store[which.to(self.device)]
        elif isinstance(which, slice) and self._index is None:
            part._store = self._store[which]  # type: ignore[assignment]
        else:
            rows = np.arange(self.n) if self._index is None else self._index
            part._index = rows[which if isinstance(which, slice) else which.cpu().numpy()]
        if measured:
            part.center, part.spread = part._moments()
        return part

    def _with(self, **changes: object) -> Empirical:
        """Return the same set with other attributes."""
        other = copy.copy(self)
        vars(other).update(changes)
        return other

    def __copy__(self) -> Self:
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def __getstate__(self) -> dict[str, object]:
        """Return what a pickle holds: of a memory map the place in its file, which other processes map again."""
        store = self._store
        return vars(self) | ({"_store": Mapped.of(store) or np.array(store)} if isinstance(store, np.memmap) else {})

    def __setstate__(self, state: dict[str, object]) -> None:
        store = state["_store"]
        if isinstance(store, Mapped):
            store = store.open()
        elif isinstance(store, np.ndarray):  # of a map that has no file
            store, state["in_memory"] = from_array(store.reshape(len(store), -1)), True
            index, state["_index"] = state["_index"], None
            store = store if index is None else store[torch.from_numpy(index)]
        vars(self).update(state, _store=store)

    def _blocks(self, parts: int = 1) -> Iterator[tuple[int, int]]:
        """Yield the ends of blocks of rows; smaller ones, by ``parts``, where many numbers are held for each."""
        step = max(1, _BLOCK // (parts * self.d))
        return ((start, min(start + step, self.n)) for start in range(0, self.n, step))

    def _moments(self) -> tuple[Tensor, float]:
        """Return the weighted mean and the root mean square distance from it, after a check that values are finite."""
        mean = torch.zeros(self.d, dtype=torch.float64, device=self.device)
        total, second = 0.0, 0.0
        for start, stop in self._blocks():
            values, weights = self.rows(start, stop), self.weights[start:stop]
            if not values.isfinite().all():
                row, column = (int(i) for i in (~values.isfinite()).nonzero()[0])
                what = f"is not finite: its coordinate {column} (flattened) is {float(values[row, column])}"
                raise InputError(f"Training point {start + row} {what}; drop such points or repair them.")
            mass, values = float(weights.sum()), values.double()
            if mass == 0:
                continue
            center = values[0] + (weights / mass) @ (values - values[0])
            inner = float(weights @ (values - center).square_().sum(-1))
            step = center - mean
            second += inner + float(step @ step) * total * mass / (total + mass)
            total += mass
            mean = mean + step * (mass / total)
        spread = math.sqrt(second / total)
        require(math.isfinite(spread), "Squared distances of the training points overflow; rescale the points.")
        return mean, spread


@dataclass(frozen=True)
class Mapped:
    """The place of a memory map in its file, for a pickle; the file must be the same when it is mapped again."""

    path: str
    kind: np.dtype
    offset: int
    shape: tuple[int, ...]
    order: Literal["C", "F"]
    size: int
    changed: int  # when the file was changed last, in ns

    @classmethod
    def of(cls, store: np.memmap) -> Mapped | None:
        """Return the place; ``None`` for a map without a file, with changes of its own, or of scattered numbers."""
        flags, root = store.flags, store
        if store.filename is None or store.mode == "c" or not (flags.c_contiguous or flags.f_contiguous):
            return None
        while isinstance(root.base, np.memmap):  # a part of the map has the offset of the whole
            root = root.base
        store.flush()
        path, offset = Path(store.filename).absolute(), store.offset + store.ctypes.data - root.ctypes.data
        about = path.stat() if path.exists() else None
        if about is None:  # deleted, but still mapped
            return None
        order: Literal["C", "F"] = "C" if flags.c_contiguous else "F"
        return cls(str(path), store.dtype, offset, store.shape, order, about.st_size, about.st_mtime_ns)

    def open(self) -> np.memmap:
        """Map the file again."""
        path = Path(self.path)
        require(path.is_file(), f"The training set was read from {path}, which is not there any more.")
        about, same = path.stat(), "Load the training set again, or pickle .loaded(), which is held in memory"
        unchanged = (about.st_size, about.st_mtime_ns) == (self.size, self.changed)
        require(unchanged, f"{path} has changed since the training set was pickled. {same}.")
        return np.memmap(path, self.kind, "r", self.offset, self.shape, self.order)


def _check_weights(weights: Array | None, n: int) -> Tensor:
    """Return ``n`` weights in float64 with sum one, if they are finite, not negative and not all zero."""
    if weights is None:
        return torch.full((n,), 1.0 / n, dtype=torch.float64)
    w = as_tensor(weights, "weights").detach().double()
    require(w.shape == (n,), f"There must be one weight for each of the {n} points; got shape {tuple(w.shape)}.")
    bad = (~w.isfinite() | (w < 0)).nonzero()
    require(len(bad) == 0, f"Weights must be finite and not negative; weight {int(bad[0]) if len(bad) else 0} is not.")
    require(w.max() > 0, "Every weight is zero; at least one must not be.")
    return (w / w.max()) / (w / w.max()).sum()


def _storage(points: Array) -> tuple[Tensor | np.memmap, tuple[int, ...]]:
    """Return what holds the points, a flat tensor or a memory map as it is, and the shape of one point."""
    what = "Training points (n, *shape)"
    if isinstance(points, Tensor):  # of floats of 8 bits, blocks are read as float32
        points = check_dense(points, what) if "float8" in str(points.dtype) else check_real(points, what)
    else:
        array = check_array(points, what)
        points = points if isinstance(points, np.memmap) else array
    require(points.ndim > 0, "Training points must be an array (n, *shape); a single number was given.")
    require(len(points) > 0, "The training set is empty; it needs at least one point.")
    shape = tuple(points.shape[1:]) or (1,)
    require(math.prod(shape) > 0, f"Training points have no coordinates: shape {tuple(points.shape)}.")
    check_memory(8 * len(points), f"The weights of {len(points):,} training points")
    if isinstance(points, np.memmap):
        return points, shape
    # a tensor that repeats its storage (expanded) may have any size
    size = points.nbytes if isinstance(points, Tensor) and points.nbytes > points.untyped_storage().nbytes() else 0
    check_memory(size, f"A training set of shape {tuple(points.shape)}")
    tensor = points.detach() if isinstance(points, Tensor) else from_array(points)
    return tensor.reshape(len(points), math.prod(shape)), shape


def _type_name(points: Tensor | np.ndarray) -> str:
    """Return the name of the numbers' type, such as ``uint8``."""
    return points.dtype.name if isinstance(points, np.ndarray) else str(points.dtype).removeprefix("torch.")


def _check_scale(scale: Scale, stored: str) -> Scale:
    if scale is None:
        return None
    try:
        low, high = (float(end) for end in scale)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"scale must be None or a pair (low, high) of numbers, not {scale!r}.") from None
    good = math.isfinite(low) and math.isfinite(high) and low < high
    require(good, f"scale must be a pair (low, high) with low < high, not ({low:g}, {high:g}).")
    what = f"scale=({low:g}, {high:g}) maps the full range of stored integers, but these points are stored as {stored}"
    require("int" in stored, f"{what}; leave scale out, or rescale the points first.")
    return low, high


def row_hashes(rows: Tensor, keys: Tensor) -> Tensor:
    """Return one 64-bit hash per row: the sum, modulo 2^64, of a hash for each value and position."""
    bits = (rows + 0.0).contiguous().view(torch.int64 if rows.dtype == torch.float64 else torch.int32).long()
    return rng.hashed(keys, bits).sum(-1)


def fingerprint(sets: Iterable[Empirical]) -> str:
    """Return a hash of the points and weights of all ``sets``.

    >>> import vkernel as vk
    >>> first, second = vk.data.toy("pair"), vk.data.toy("triple")
    >>> vk.data.fingerprint([first]) == vk.data.fingerprint([second])
    False
    """
    found = hashlib.sha256()
    for data in sets:
        found.update(repr((data.n, data.shape)).encode())
        rows = (data.rows(start, min(start + 4096, data.n)) for start in range(0, data.n, 4096))
        for part in (*rows, data.weights):
            found.update(part.double().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()
