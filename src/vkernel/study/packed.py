r"""The results of a study in one small file: a ``.npz`` archive that :func:`vkernel.study.load` reads.

Arrays are stored as they are but for the large ones of a study of images, whose rounding is far below the spread over
images and samples:

============  ==========================================  =============================================================
kind          arrays                                      as
============  ==========================================  =============================================================
half          with ``image``, ``draw`` or ``held_out``    float16 of the value over a power of two, so that the largest
                                                          is at most 2^15: relative error 2^-11
log           ``gap_members``                             a byte: 0, or 253 steps in the logarithm from the least
                                                          positive value to the largest; 255 is NaN
byte          with ``pixel``                              a byte: [-1.25, 1.25] in 254 steps; 255 is NaN
============  ==========================================  =============================================================

Of arrays over ``member`` and ``other``, which are symmetric, the upper triangle is stored. ``vkernel.json`` in the
archive holds dimensions, attributes and the parameters of each array; nothing is pickled."""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xarray

from vkernel.core.errors import InputError

ABOUT = "vkernel.json"
WIDE = 1.25  # of pixels
NONE = 255  # the byte that is NaN
LARGE = {"image", "draw", "held_out"}


def pack(ds: xarray.Dataset) -> bytes:
    """Return the archive of a data set."""
    arrays: dict[str, np.ndarray] = {}
    about: dict[str, Any] = {"attrs": {str(k): _plain(v) for k, v in ds.attrs.items()}, "arrays": {}}
    for name, array in ds.variables.items():
        dims, values = list(map(str, array.dims)), np.asarray(array.values)
        own: dict[str, Any] = {"dims": dims, "attrs": {str(k): _plain(v) for k, v in array.attrs.items()}}
        own |= {"coordinate": name in ds.coords, "dtype": values.dtype.str}
        if {"member", "other"} <= set(dims):
            own["members"] = len(ds["member"])
            values = _triangle(values, dims)
        kind = "log" if name == "gap_members" else "byte" if "pixel" in dims else "half" if LARGE & set(dims) else ""
        if kind and values.ndim > 1 and values.dtype.kind == "f":
            own["kind"] = kind
            values, own["parameters"] = ENCODE[kind](values.astype(np.float64))
        arrays[str(name)], about["arrays"][str(name)] = values, own
    arrays[ABOUT] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:  # as np.savez_compressed, but for LZMA: three quarters of the size
        for key, content in arrays.items():
            with archive.open(_entry(f"{key}.npy"), "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asanyarray(content), allow_pickle=False)
    return buffer.getvalue()


def unpack(path: Path) -> xarray.Dataset:
    """Return the data set in an archive that :func:`pack` made."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            about = json.loads(archive[ABOUT].tobytes())
            found = {name: _decoded(archive[name], own) for name, own in about["arrays"].items()}
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
        raise InputError(f"{path} holds no results of a study: {first}.") from None
    names = {True: "coords", False: "data_vars"}
    parts: dict[str, dict[str, Any]] = {"coords": {}, "data_vars": {}}
    for name, own in about["arrays"].items():
        parts[names[own["coordinate"]]][name] = (own["dims"], found[name], own["attrs"])
    return xarray.Dataset(**parts, attrs=about["attrs"])


def _entry(name: str) -> zipfile.ZipInfo:
    """Return the entry of an array; its date is fixed, so that the same results make the same file."""
    entry = zipfile.ZipInfo(name)
    entry.compress_type = zipfile.ZIP_LZMA
    return entry


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _triangle(values: np.ndarray, dims: list[str]) -> np.ndarray:
    """Return the pairs m ≤ m' of an array over member and other, as its first axis."""
    square = np.moveaxis(values, (dims.index("member"), dims.index("other")), (0, 1))
    return square[np.triu_indices(len(square))]


def _decoded(values: np.ndarray, own: dict[str, Any]) -> np.ndarray:
    if "kind" in own:
        values = DECODE[own["kind"]](values, *own["parameters"])
    if "members" in own:
        rows, columns = np.triu_indices(own["members"])
        square = np.empty((own["members"],) * 2 + values.shape[1:], values.dtype)
        square[rows, columns] = square[columns, rows] = values
        values = np.moveaxis(square, (0, 1), (own["dims"].index("member"), own["dims"].index("other")))
    return values.astype(np.dtype(own["dtype"]))


def _most(values: np.ndarray) -> float:
    finite = np.abs(values[np.isfinite(values)])
    return float(finite.max(initial=0.0)) or 1.0


def _to_half(values: np.ndarray) -> tuple[np.ndarray, list[float]]:
    scale = 2.0 ** (math.ceil(math.log2(_most(values))) - 15)
    return (values / scale).astype(np.float16), [scale]


def _to_log(values: np.ndarray) -> tuple[np.ndarray, list[float]]:
    most = _most(values)
    least = float(np.min(values, where=np.isfinite(values) & (values > 0), initial=most))
    width = math.log(most / least) / (NONE - 2) or 1.0
    code = 1 + np.rint(np.log(np.maximum(values, least) / least) / width)
    return np.where(np.isfinite(values), np.where(values > 0, code, 0), NONE).astype(np.uint8), [least, width]


def _to_byte(values: np.ndarray) -> tuple[np.ndarray, list[float]]:
    code = np.rint((np.clip(values, -WIDE, WIDE) + WIDE) * ((NONE - 1) / (2 * WIDE)))
    return np.where(np.isfinite(values), code, NONE).astype(np.uint8), [-WIDE, 2 * WIDE / (NONE - 1)]


def _from_log(code: np.ndarray, least: float, width: float) -> np.ndarray:
    return np.where(code == NONE, np.nan, np.where(code == 0, 0, least * np.exp(width * (code.astype(np.float64) - 1))))


def _from_byte(code: np.ndarray, low: float, width: float) -> np.ndarray:
    return np.where(code == NONE, np.nan, low + width * code.astype(np.float64))


def _from_half(values: np.ndarray, scale: float) -> np.ndarray:
    return values.astype(np.float64) * scale


ENCODE = {"half": _to_half, "log": _to_log, "byte": _to_byte}
DECODE: dict[str, Callable[..., np.ndarray]] = {"half": _from_half, "log": _from_log, "byte": _from_byte}
