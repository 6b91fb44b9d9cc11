r"""Checksums of a store: a file that changed, was lost or was exchanged is noticed before its numbers are used.

The files that never change, Zarr's metadata and the coordinates, are listed in ``.vkernel.sha256`` with their SHA-256.
The last line of the list is the SHA-256 of the lines above it. The checksums of a block are one chunk of the array
``checksum``, 64 bits for each quantity:

.. math:: \text{first 8 bytes of SHA-256}(\text{study}, \text{name of the file}, \text{length}, \text{contents})

They depend on the study and on the place in the store, so that a file of another study, or of another block, does not
fit. A block is written in the order quantities, checksums, flag (``done``), and discarded in reverse. It is complete if
all its checksums fit, missing if it has neither checksums nor a flag, and damaged otherwise: a run that is killed
leaves no other state. Files are hashed as they are, without being decompressed."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

Index = tuple[int, ...]
DONE, SUMS, LIST, ROOT = "done", "checksum", ".vkernel.sha256", "zarr.json"
FLAG, SIZE = b"\x01", 8  # contents of a chunk of done; bytes of a checksum


def sha256(content: bytes) -> str:
    """Return the SHA-256 in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def get(path: Path) -> bytes | None:
    """Return the contents of a file; ``None`` if there is no regular file."""
    return path.read_bytes() if path.is_file() else None


def put(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, as Zarr does, and rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def listed(sums: Mapping[str, str]) -> bytes:
    """Return the text of the list of files that never change."""
    lines = "".join(f"{sums[name]}  {name}\n" for name in sorted(sums)).encode()
    return lines + f"{sha256(lines)}\n".encode()


def read_list(root: Path) -> dict[str, str]:
    """Return the SHA-256 of each listed file; nothing if the list is lost or damaged."""
    text = get(root / LIST) or b""
    lines = [line.partition("  ") for line in text.decode(errors="replace").splitlines()[:-1]]
    sums = {name: digest for digest, _, name in lines}
    return sums if sums and listed(sums) == text else {}


def changed(root: Path, sums: Mapping[str, str]) -> list[str]:
    """Return the listed files that are lost, or are not what was written."""
    return [name for name, digest in sums.items() if (found := get(root / name)) is None or sha256(found) != digest]


@dataclass(frozen=True)
class Blocks:
    """The blocks of a store, each at an index ``(*cell, block)``: their files, and whether these are as written.

    ``study`` identifies the study and its data. ``shape`` is that of ``done``. ``quantities`` are the names of the
    arrays, with the number of their own dimensions, in the order of their checksums."""

    root: Path
    study: str
    shape: tuple[int, ...]
    quantities: Mapping[str, int]

    def key(self, name: str, at: Index) -> str:
        """Return the name of the file that holds the chunk of an array for a block."""
        own = {DONE: 0, SUMS: 1}.get(name, self.quantities.get(name, 0))
        # an array without members has one dimension less, and its block is the first
        return "/".join((name, "c", *map(str, (*at, *(0,) * own)[: len(at) + own])))

    def sums(self, at: Index) -> list[bytes]:
        """Return the checksums of the files of a block as they are now."""
        found = []
        for key in (self.key(name, at) for name in self.quantities):
            content = get(self.root / key)  # a chunk of NaN has no file
            head = f"{self.study} {key} {None if content is None else len(content)}\n"
            digest = hashlib.sha256(head.encode())
            digest.update(content or b"")
            found.append(digest.digest()[:SIZE])
        return found

    def mark(self, at: Index) -> None:
        """Write the checksums of a block that was written, and then its flag."""
        put(self.root / self.key(SUMS, at), b"".join(self.sums(at)))
        put(self.root / self.key(DONE, at), FLAG)

    def discard(self, at: Index) -> None:
        """Remove the files of a block, so that it is missing."""
        for name in (DONE, SUMS, *self.quantities):
            (self.root / self.key(name, at)).unlink(missing_ok=True)

    def verify(self) -> tuple[np.ndarray, dict[Index, list[str]]]:
        """Return which blocks are complete, and the arrays that are damaged in each damaged block."""
        faults = {at: self._faults(at) for at in np.ndindex(self.shape)}
        done = np.array([found == [] for found in faults.values()]).reshape(self.shape)
        return done, {at: found for at, found in faults.items() if found}

    def _faults(self, at: Index) -> list[str] | None:
        """Return the arrays that are damaged in a block; ``None`` if the block is missing."""
        # in the reverse order of writing, since a run may be writing just now
        flag, written = (get(self.root / self.key(name, at)) for name in (DONE, SUMS))
        if written is None:
            return None if flag is None else [SUMS]
        if len(written) != SIZE * len(self.quantities):
            return [SUMS]
        known = [written[i : i + SIZE] for i in range(0, len(written), SIZE)]
        now = zip(self.quantities, known, self.sums(at), strict=True)
        return [name for name, a, b in now if a != b] + [DONE] * (flag not in (None, FLAG))
