"""Files that are broken, unknown or hostile."""

from __future__ import annotations

import io
import pickle
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from files import POINTS, Hostile

from vkernel.core.errors import InputError
from vkernel.data.loaders import load


@pytest.mark.parametrize(
    "name", ["a.npy", "a.npz", "a.csv", "a.parquet", "a.safetensors", "a.pt", "a-ubyte", "cifar10_batch_0.png", "a.xyz"]
)
def test_missing_empty_and_garbage_files_are_refused(tmp_path, name):
    path = tmp_path / name
    with pytest.raises(InputError, match="There is no file or folder"):
        load(path)
    path.write_bytes(b"")
    with pytest.raises(InputError, match="empty file"):
        load(path)
    for garbage in (
        b"\x93NUMPY",
        b"PK\x03\x04" + bytes(50),
        b"PAR1",
        bytes(range(256)) * 4,
        b"\x89PNG\r\n\x1a\n" + bytes(9),
    ):
        path.write_bytes(garbage)
        with pytest.raises(InputError) as refusal:
            load(str(path))
        message = str(refusal.value)
        assert name in message
        assert "\n" not in message
        assert message.endswith(".")


@pytest.mark.parametrize("suffix", ["npy", "npz", "safetensors", "pt"])
def test_truncated_containers_are_refused(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    if suffix == "npy":
        np.save(path, POINTS)
    elif suffix == "npz":
        np.savez(path, a=POINTS)
    elif suffix == "pt":
        torch.save(torch.from_numpy(POINTS), path)
    else:
        pytest.importorskip("safetensors.torch").save_file({"a": torch.from_numpy(POINTS)}, path)
    whole = path.read_bytes()
    for cut in (len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(InputError, match="cannot be read as"):
            load(path)


def test_arrays_under_a_wrong_name_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", POINTS)
    (tmp_path / "a.npy").rename(tmp_path / "a.npz")
    with pytest.raises(InputError, match="damaged, or another format"):
        load(tmp_path / "a.npz")
    np.save(tmp_path / "b.npy", np.zeros((0, 3)))
    with pytest.raises(InputError, match="training set is empty"):
        load(tmp_path / "b.npy")


def hostile_torch(path: Path, trap: Path) -> None:
    torch.save({"points": torch.zeros(3, 2), "more": Hostile(trap)}, path)


def hostile_legacy(path: Path, trap: Path) -> None:
    torch.save(Hostile(trap), path, _use_new_zipfile_serialization=False)


def hostile_pickle(path: Path, trap: Path) -> None:
    path.write_bytes(pickle.dumps(Hostile(trap)))


def hostile_npy(path: Path, trap: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.array([Hostile(trap), 1], dtype=object), allow_pickle=True)


def hostile_npz(path: Path, trap: Path) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.array([Hostile(trap)], dtype=object), allow_pickle=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.npy", buffer.getvalue())
        archive.writestr("b.npy", buffer.getvalue())


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.pt", hostile_torch),
        ("a.pth", hostile_legacy),
        ("a.pt", hostile_pickle),
        ("a.npy", hostile_npy),
        ("a.npy", hostile_pickle),
        ("a.npz", hostile_npz),
        ("a.npz", hostile_pickle),
        ("a.safetensors", hostile_pickle),
        ("a.parquet", hostile_pickle),
    ],
)
@pytest.mark.parametrize("key", [None, "a"])
def test_code_in_files_does_not_run(tmp_path, name, write, key):
    trap = tmp_path / "trap"
    write(tmp_path / name, trap)
    with pytest.raises(InputError) as refusal:
        load(tmp_path / name, key=key)
    assert "\n" not in str(refusal.value)
    assert not trap.exists()


def test_the_trap_is_a_trap(tmp_path):
    hostile_torch(tmp_path / "a.pt", tmp_path / "trap")
    torch.load(tmp_path / "a.pt", weights_only=False)
    assert (tmp_path / "trap").exists()


def test_options_that_mean_nothing_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", POINTS)
    torch.save(torch.from_numpy(POINTS), tmp_path / "a.pt")
    for name in ("a.npy", "a.pt"):
        with pytest.raises(InputError, match="picks nothing"):
            load(tmp_path / name, key="x")
    with pytest.raises(InputError, match="describes PNG files"):
        load(tmp_path / "a.npy", layout="sheet:32x32")


@pytest.mark.parametrize(
    ("library", "name"),
    [("pyarrow.parquet", "a.parquet"), ("safetensors", "a.safetensors"), ("PIL.Image", "cifar10_batch_0.png")],
)
def test_a_missing_library_is_named(tmp_path, monkeypatch, library, name):
    (tmp_path / name).write_bytes(b"something")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(InputError, match=f"needs {library}: pip install"):
        load(tmp_path / name)
