"""Arrays and the bytes of files that hold them, for tests of loaders."""

from __future__ import annotations

import io
import os
import struct
from pathlib import Path

import numpy as np
import pytest

IDX_CODES = {"u1": 8, "i1": 9, "i2": 11, "i4": 12, "f4": 13, "f8": 14}
POINTS = np.random.default_rng(0).normal(size=(7, 3))
BYTES = np.random.default_rng(1).integers(0, 256, (6, 4, 5, 3), dtype=np.uint8)


def values(data) -> np.ndarray:
    return data.rows(0, data.n).numpy().reshape(data.n, *data.shape)


def scaled(array: np.ndarray) -> np.ndarray:
    return (array.astype(np.float64) / 255 * 2 - 1).astype(np.float32)


def idx_bytes(array: np.ndarray) -> bytes:
    head = bytes([0, 0, IDX_CODES[array.dtype.str[1:]], array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(array.dtype.newbyteorder(">")).tobytes()


def png_bytes(array: np.ndarray, format: str = "PNG") -> bytes:
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    buffer = io.BytesIO()
    image.fromarray(array).save(buffer, format)
    return buffer.getvalue()


class Hostile:
    """Creates a file when unpickled."""

    def __init__(self, trap: Path) -> None:
        self.trap = trap

    def __reduce__(self):
        return os.mkdir, (str(self.trap),)
