"""Training sets from files: :func:`load` finds the format by suffix, by magic number, or by the contents of a folder.

========================================  ============================================================================
``.npy``                                  memory-mapped, never read whole
``.npz`` · ``.safetensors`` · ``.pt``     one array: the only one, the first with two or more axes (.npz), or ``key``
``.csv`` · ``.tsv``                       one point a line, numbers alone; a header line is allowed
``.parquet``                              a column of images or of lists, else all columns of numbers; or ``key``
IDX, IDX ``.gz`` (MNIST and its kin)      images become ``(1, H, W)``; memory-mapped where not compressed
folder of images                          all of one size; grey ``(1, H, W)``, colour ``(3, H, W)``; sorted by name
folder of ``Dataset.save_to_disk``        Hugging Face data sets, as ``.parquet``
sheet, or folder of sheets                one PNG with an image in each row of pixels, as CIFAR-10 is kept here
========================================  ============================================================================

Files are not trusted: nothing is unpickled and no code in them runs. What cannot be read is refused with one sentence.
Libraries other than torch and numpy are imported when a file needs them."""

import contextlib
import csv
import gzip
import importlib
import io
import math
import os
import re
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vkernel.core.errors import InputError, require, shown
from vkernel.core.files import expand
from vkernel.core.memory import check_memory
from vkernel.data.empirical import Empirical, Scale

Points = np.ndarray | Tensor
Reader = Callable[[Path, str | None], Points]
PathLike = str | os.PathLike[str]
_IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
_IMAGE_FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "TIFF", "PPM")  # plain decoders; none that runs another program
_SHEET_NAME, _FIRST_TEST_SHEET = re.compile(r"cifar10_batch_(\d+)\.png"), 50
_IDX_TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


def load(path: PathLike, scale: str | Scale = "auto", layout: str | None = None, key: str | None = None) -> Empirical:
    """Load the training set in the file or folder ``path``.

    Args:
        scale: ``"auto"``: uint8 images (events with two or three axes) go to [-1, 1], all else stays as it is;
            ``"none"``; or ``(low, high)``, also as text ``"low,high"``, for any integers.
        layout: ``"sheet:HxW"``: each PNG is a sheet with one H×W image in each row of pixels, as files named
            ``cifar10_batch_*.png`` are known to be (32×32); of a *folder* of these only training sheets, those numbered
            below 50, are taken.
        key: which array of .npz, .safetensors or .pt; which column of .parquet, or several as ``"a,b"``; of a Hugging
            Face folder a column, a split, or ``"split/column"`` (default: the split ``train``).

    >>> import vkernel as vk
    >>> import numpy, os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "points.npy")
    >>> numpy.save(path, numpy.zeros((5, 3), numpy.float32))
    >>> vk.load(path).shape
    (3,)
    """
    path = expand(path)
    points = read(path, layout, key)
    try:
        return Empirical(points, scale=_parse_scale(scale, points), name=shown(path.name))
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def read(path: PathLike, layout: str | None = None, key: str | None = None) -> Points:
    """Return the array in a file or folder as it is stored, ``(n, *shape)``; arguments as for :func:`load`."""
    path = expand(path)
    require(path.exists(), f"There is no file or folder {path}.")
    return _read_folder(path, layout, key) if path.is_dir() else _read_file(path, layout, key)


def _parse_scale(scale: str | Scale, points: Points) -> Scale:
    if not isinstance(scale, str):
        return scale
    name = scale.strip().lower()
    if name in ("auto", "none"):
        images = points.dtype in (np.uint8, torch.uint8) and points.ndim in (3, 4)
        return (-1.0, 1.0) if name == "auto" and images else None
    try:
        low, high = (float(end) for end in name.split(","))
    except ValueError:
        raise InputError(f"scale must be 'auto', 'none' or 'low,high', not {scale!r}.") from None
    return low, high


def _read_file(path: Path, layout: str | None, key: str | None) -> Points:
    suffix = path.suffix.lower()
    require(path.is_file(), f"{path} is neither a file nor a folder.")
    require(path.stat().st_size > 0, f"{path} is an empty file.")
    if suffix in _IMAGES:
        require(key is None, f"{path} is an image; a key picks an array of a file that holds several.")
        sheet = "layout='sheet:32x32' for a sheet with one image in each row of pixels"
        known = layout or _SHEET_NAME.fullmatch(path.name)
        require(known, f"{path} is one image; give the folder that holds the training images, or {sheet}.")
        return _read_sheets([path], layout)
    require(layout is None, f"layout={layout!r} describes PNG files, and {path} is none.")
    what, several, reader = _READERS.get(suffix, ("an IDX file", False, _read_idx))
    require(several or key is None, f"{path} holds a single array, so key={key!r} picks nothing; leave it out.")
    with _reading(path, what):
        return reader(path, key)


def _read_folder(path: Path, layout: str | None, key: str | None) -> Points:
    if any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        require(layout is None, f"layout={layout!r} describes PNG files, and {path} holds a Hugging Face data set.")
        with _reading(path, "a saved Hugging Face data set"):
            return _read_table(path, key)
    require(key is None, f"{path} is a folder of images, so key={key!r} picks nothing; leave it out.")
    files = [f for f in path.rglob("*") if f.suffix.lower() in _IMAGES and f.is_file() and not f.name.startswith(".")]
    files.sort(key=lambda file: file.relative_to(path).as_posix())
    require(files, f"The folder {path} holds no images and no saved Hugging Face data set.")
    numbers = {file: int(match[1]) for file in files if (match := _SHEET_NAME.fullmatch(file.name))}
    if layout is None and not numbers:
        return _stack(map(_decode, files, map(str, files)), files)
    training = sorted((file for file in numbers if numbers[file] < _FIRST_TEST_SHEET), key=numbers.__getitem__)
    require(training or not numbers, f"{path} holds test sheets alone; load the sheet by its own path.")
    return _read_sheets(training or files, layout)


@contextlib.contextmanager
def _reading(path: Path, what: str) -> Iterator[None]:
    """Turn whatever a reader raises on a broken file into one sentence."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise InputError(f"{path} cannot be read as {what}: {why}.") from error


def _library(name: str, package: str, purpose: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(f"Reading {purpose} needs {name}: pip install {package}.") from error


def _choose(path: Path, names: Sequence[str], key: str | None) -> str:
    """Return the array that ``key`` names, or the only one."""
    require(names, f"{path} holds no array.")
    require(key is None or key in names, f"{path} holds no array {key!r}; it holds {_joined(names)}.")
    require(key or len(names) == 1, f"{path} holds several arrays; pick one with key: {_joined(names)}.")
    return key or names[0]


def _joined(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _read_npz(path: Path, key: str | None) -> Points:
    require(zipfile.is_zipfile(path), f"{path} cannot be read as a .npz archive: it is damaged, or another format.")
    with zipfile.ZipFile(path) as archive:
        heads = {name.removesuffix(".npy"): _npy_head(archive, name) for name in archive.namelist()}
        shapes = {name: shape for name, shape in heads.items() if shape is not None}
        first = [name for name in shapes if len(shapes[name]) > 1] if key is None and len(shapes) > 1 else []
        name = first[0] if first else _choose(path, list(shapes), key)
    with np.load(path, allow_pickle=False) as arrays:
        return arrays[name]


def _npy_head(archive: zipfile.ZipFile, name: str) -> tuple[int, ...] | None:
    """Return the shape of an array in an archive, ``None`` for members that are no arrays; refuse one that does not fit
    into memory, since a small archive may unpack to any size."""
    with archive.open(name) as member:
        if member.read(6) != np.lib.format.MAGIC_PREFIX:
            return None
        version = tuple(member.read(2))
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, kind = read(member)
        size, held = math.prod(shape) * kind.itemsize, archive.getinfo(name).file_size - member.tell()
    what = f"Array {name} of {archive.filename}"
    require(kind.hasobject or held >= size, f"{what} is truncated: {size} bytes are announced, and {held} are there.")
    check_memory(size, what)
    return shape


def _read_safetensors(path: Path, key: str | None) -> Points:
    with _library("safetensors", "safetensors", ".safetensors").safe_open(str(path), framework="pt") as file:
        return file.get_tensor(_choose(path, list(file.keys()), key))


def _read_torch(path: Path, key: str | None) -> Points:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            held = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        why = "it is damaged, or it holds Python objects, which could run code and are never loaded"
        what = "save a tensor, or a dictionary of tensors"
        raise InputError(f"{path} cannot be read as plain tensors: {why}; {what}.") from error
    if isinstance(held, dict):
        tensors = {str(name): value for name, value in held.items() if isinstance(value, Tensor)}
        return tensors[_choose(path, list(tensors), key)]
    require(isinstance(held, Tensor), f"{path} holds a {type(held).__name__}, not a tensor or a dictionary of them.")
    require(key is None, f"{path} holds a single tensor, so key={key!r} picks nothing; leave it out.")
    return held


def _read_text(path: Path, key: str | None) -> Points:
    """Read one point a line; the first line that is not empty may be a header, without any number."""
    separator = "\t" if path.suffix.lower() == ".tsv" else ","
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = ((n, cells) for n, cells in enumerate(csv.reader(file, delimiter=separator), 1) if any(cells))
        header = first = next(rows, (0, []))
        if all(_number(cell) is None for cell in header[1]):
            first = next(rows, (0, []))
        require(first[0], f"{path} holds no line of numbers.")
        skip = 0 if first is header else header[0]
        with contextlib.suppress(ValueError):  # what it refuses is read cell by cell, to name the line
            return np.loadtxt(path, float, None, separator, skiprows=skip, ndmin=2, encoding="utf-8-sig", quotechar='"')
        table: list[list[float]] = []
        for line, cells in chain([first], rows):
            numbers = [_number(cell) for cell in cells]
            bad = next((cell for cell, number in zip(cells, numbers, strict=True) if number is None), None)
            require(bad is None, f"{path}, line {line}: {bad!r} is not a number.")
            table.append([number for number in numbers if number is not None])
            width = len(table[0])
            require(len(cells) == width, f"{path}, line {line}: {len(cells)} numbers where lines before have {width}.")
        return np.array(table)


def _number(cell: str) -> float | None:
    try:
        return None if "_" in cell else float(cell)
    except ValueError:
        return None


def _read_idx(path: Path, key: str | None) -> Points:
    """Read an IDX file: a magic number (two zero bytes, a type, a number of axes), the axes' lengths, the values."""
    with path.open("rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
    with gzip.open(path, "rb") if zipped else path.open("rb") as file:
        head = file.read(4)
        known = len(head) == 4 and head[:2] == b"\0\0" and head[2] in _IDX_TYPES and head[3] > 0
        require(known, f"{path} has no format known here; known are {', '.join(_READERS)}, IDX and folders.")
        sizes = file.read(4 * head[3])
        require(len(sizes) == 4 * head[3], f"{path} is truncated: its IDX header is incomplete.")
        shape = struct.unpack(f">{head[3]}I", sizes)
        kind, offset = np.dtype(_IDX_TYPES[head[2]]), 4 + len(sizes)
        expected = math.prod(shape) * kind.itemsize
        check_memory(expected if zipped else 0, f"{path}, unpacked,")
        body = file.read(expected + 1) if zipped else b""
    found = len(body) if zipped else path.stat().st_size - offset
    require(found >= expected, f"{path} is truncated: its header announces {expected} bytes, and {found} are there.")
    require(found == expected, f"{path} is damaged: there is more in it than the {expected} bytes it announces.")
    require(expected > 0, f"{path} holds no points.")
    images = (shape[0], 1, *shape[1:]) if len(shape) == 3 else shape
    if zipped:
        return np.frombuffer(body, kind).reshape(images)
    return np.memmap(path, kind, mode="r", offset=offset, shape=images)


def _read_table(path: Path, key: str | None) -> Points:
    """Read a .parquet file or the folder of a Hugging Face data set."""
    if path.is_file():
        parquet = _library("pyarrow.parquet", "'vkernel[data]'", ".parquet")
        about = parquet.ParquetFile(path).metadata
        groups = (about.row_group(i) for i in range(about.num_row_groups))
        chunks = [group.column(j) for group in groups for j in range(group.num_columns)]
        # constant columns are packed to nothing: their size is that of the values, 8 bytes each at most
        check_memory(
            sum(8 * chunk.num_values + chunk.total_uncompressed_size for chunk in chunks), f"{path}, unpacked,"
        )
        return _table_points(path, parquet.read_table(path), key)
    datasets = _library("datasets", "'vkernel[data]'", "a Hugging Face data set")
    held = datasets.load_from_disk(str(path))
    if isinstance(held, datasets.DatasetDict):
        split, _, column = (key or "").partition("/")
        if split not in held:
            split, column = "train" if "train" in held else next(iter(held), ""), key or ""
            require(len(held) == 1 or split == "train", f"{path} has splits {_joined(held)}; pick one with key.")
        held, key = held[split], column or None
    return _table_points(path, held.with_format("arrow")[:], key)


def _table_points(path: Path, table: Any, key: str | None) -> np.ndarray:
    """Return points from an Arrow table: a column of images, else one of lists, else all columns of numbers."""
    require(len(table) > 0, f"{path} holds no rows.")
    if key is None:
        kinds = {field.name: _kind(field.type) for field in table.schema}
        images, lists, names = ([n for n in kinds if kinds[n] == k] for k in ("image", "list", "number"))
        names = images[:1] or lists[:1] or names
        require(names, f"{path} holds no column of images or numbers; it holds {_joined(table.column_names)}.")
    else:
        names = [key] if key in table.column_names else [name.strip() for name in key.split(",")]
        missing = [name for name in names if name not in table.column_names]
        require(not missing, f"{path} holds no column {_joined(missing)!r}; it holds {_joined(table.column_names)}.")
    columns = [_column_points(path, name, table.column(name)) for name in names]
    single = len(columns) == 1 or all(c.ndim == 1 for c in columns)
    require(single, f"Columns picked together from {path} must hold single numbers.")
    return np.stack(columns, axis=1) if len(columns) > 1 else columns[0]


def _kind(kind: Any) -> str:
    """Return what an Arrow type holds: ``image`` (encoded bytes, or a struct with them), ``list``, ``number``, …"""
    import pyarrow as pa

    t, kind = pa.types, kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    if t.is_binary(kind) or t.is_large_binary(kind) or (t.is_struct(kind) and kind.get_field_index("bytes") >= 0):
        return "image"
    if t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind):
        return "list"
    return "number" if t.is_integer(kind) or t.is_floating(kind) else "other"


def _column_points(path: Path, name: str, column: Any) -> np.ndarray:
    import pyarrow as pa
    import pyarrow.compute as compute

    what, missing = f"Column {name!r} of {path}", "has missing values; drop those rows first."
    array = pa.concat_arrays([c.storage if isinstance(c, pa.ExtensionArray) else c for c in column.chunks])
    if _kind(array.type) == "image":
        cells = compute.struct_field(array, "bytes") if pa.types.is_struct(array.type) else array
        require(cells.null_count == 0, f"{what} {missing}")
        labels = [f"{what}, image {i}" for i in range(len(cells))]
        return _stack(map(_decode, (io.BytesIO(cell.as_py()) for cell in cells), labels), labels)
    shape = [len(array)]
    require(array.null_count == 0, f"{what} {missing}")
    while _kind(array.type) == "list":
        lengths, array = compute.unique(compute.list_value_length(array)), array.flatten()
        require(len(lengths) == 1, f"{what} holds lists of different lengths; points must have one shape.")
        require(array.null_count == 0, f"{what} {missing}")
        shape.append(lengths[0].as_py())
    require(_kind(array.type) == "number", f"{what} holds {array.type}, not numbers or images.")
    return array.to_numpy(zero_copy_only=False).reshape(shape)


def _decode(file: Path | io.BytesIO, label: str) -> np.ndarray:
    """Return one image, ``(C, H, W)`` uint8, C = 1 for grey and 3 for colour."""
    images = _library("PIL.Image", "pillow", "images")
    with _reading(Path(label), "an image"), images.open(file, formats=_IMAGE_FORMATS) as image:
        mode = {"1": "L", "P": "RGB"}.get(image.mode, image.mode)
        require(mode in ("L", "RGB"), f"{label} has mode {mode}; grey (L) and colour (RGB) images can be read.")
        check_memory(2 * math.prod(image.size) * len(mode), label)
        pixels = np.asarray(image.convert(mode))
    return pixels[None] if mode == "L" else pixels.transpose(2, 0, 1)


def _stack(images: Iterable[np.ndarray], labels: Sequence[object]) -> np.ndarray:
    """Return images of one size and mode in one array."""
    stacked = np.empty(0, np.uint8)
    for i, image in enumerate(images):
        if i == 0:
            check_memory(len(labels) * image.nbytes, f"Reading {len(labels):,} images of {image.nbytes:,} bytes")
            stacked = np.empty((len(labels), *image.shape), np.uint8)
        if image.shape != stacked.shape[1:]:
            one, other = (f"{w}×{h} {'grey' if c == 1 else 'RGB'}" for c, h, w in (stacked.shape[1:], image.shape))
            raise InputError(f"Images must have one size and mode: {labels[0]} is {one}, {labels[i]} is {other}.")
        stacked[i] = image
    return stacked


def _read_sheets(paths: Sequence[Path], layout: str | None) -> np.ndarray:
    """Return the images of sheets, ``(n, C, H, W)``; the layout of CIFAR-10 unless given."""
    match = re.fullmatch(r"sheet:(\d+)x(\d+)", (layout or "sheet:32x32").strip().lower())
    if match is None:
        raise InputError(f"layout must be 'sheet:HxW', such as 'sheet:32x32', not {layout!r}.")
    height, width = int(match[1]), int(match[2])
    sheets, size = [], f"a sheet of {height}×{width} images is {height * width}"
    for path in paths:
        require(path.is_file(), f"There is no file {path}.")
        sheets.append(_decode(path, str(path)))
        check_memory(2 * len(paths) * sheets[0].nbytes, f"Reading {len(paths)} sheets")
        pixels = sheets[-1].shape[2]
        require(pixels == height * width, f"{path} is {pixels} pixels wide; {size}.")
    modes = {len(sheet) for sheet in sheets}
    require(len(modes) == 1, f"Some sheets among {paths[0]} … {paths[-1]} are grey and some are RGB.")
    rows = np.ascontiguousarray(np.concatenate(sheets, axis=1).transpose(1, 0, 2))
    return rows.reshape(len(rows), -1, height, width)


# what a file is, whether it can hold several arrays, and its reader
_READERS: dict[str, tuple[str, bool, Reader]] = {
    ".npy": ("a .npy array", False, lambda path, key: np.lib.format.open_memmap(path, mode="r")),
    ".csv": ("a table of numbers (.csv)", False, _read_text),
    ".tsv": ("a table of numbers (.tsv)", False, _read_text),
    ".npz": ("a .npz archive", True, _read_npz),
    ".parquet": ("a .parquet table", True, _read_table),
    ".safetensors": ("safetensors", True, _read_safetensors),
    ".pt": ("plain tensors", True, _read_torch),
    ".pth": ("plain tensors", True, _read_torch),
}
