"""Memory: what a file unpacks to is compared with what is free, and memory maps stay mapped in pickles."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

import vkernel as vk
from vkernel import InputError
from vkernel.core import memory


@pytest.fixture
def little(monkeypatch):
    monkeypatch.setattr(memory, "CHECKED", 0)
    monkeypatch.setattr(memory, "free_memory", lambda device=None: 4000)


def images(n: int) -> np.ndarray:
    return np.arange(n * 64, dtype=np.uint8).reshape(n, 8, 8)


def test_archives_larger_than_memory_are_not_unpacked(tmp_path, little):
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((1000, 64), np.uint8))
    header = b"\0\0\x08\x03" + struct.pack(">3I", 1000, 8, 8)
    (tmp_path / "b.gz").write_bytes(gzip.compress(header + bytes(64000)))
    (tmp_path / "c").mkdir()
    for k in range(100):
        Image.fromarray(images(1)[0]).save(tmp_path / "c" / f"{k}.png")
    for name in ("a.npz", "b.gz", "c"):
        with pytest.raises(InputError, match=r"needs .* GiB of memory"):
            vk.load(tmp_path / name)


def test_an_archive_may_hold_other_things(tmp_path):
    x, path = np.arange(12.0).reshape(4, 3), tmp_path / "a.npz"
    buffer = io.BytesIO()
    np.save(buffer, x)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("README.txt", "about")
        archive.writestr("x.npy", buffer.getvalue())
    assert torch.equal(vk.load(path)[:], torch.from_numpy(x))
    with pytest.raises(InputError, match=r"holds no array 'README.txt'; it holds x"):
        vk.load(path, key="README.txt")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", buffer.getvalue()[:-8])
    with pytest.raises(InputError, match=r"x.npy .* is truncated: 96 bytes are announced, and 88"):
        vk.load(path)


@pytest.mark.parametrize("order", ["C", "F"])
def test_pickles_of_a_memory_map_hold_its_place(tmp_path, order):
    path, x = tmp_path / "x.npy", np.arange(40000.0).reshape(1000, 40)
    np.save(path, np.asarray(x, order=order))
    data = vk.load(path)
    for some in (data, data.subset([7, 2, 5]), data.segment(10, 20, torch.full((10,), 0.1, dtype=torch.float64))):
        raw = pickle.dumps(some)
        again = pickle.loads(raw)
        assert torch.equal(again[:], some[:])
        if some.n != 10 or order == "C":  # rows 10 to 20 of columns are scattered: these are copied
            assert len(raw) < 8 * some.n + 3000
            assert not again.in_memory
    raw = pickle.dumps(data)
    os.utime(path, (1, 1))
    with pytest.raises(InputError, match="has changed since"):
        pickle.loads(raw)
    path.unlink()
    with pytest.raises(InputError, match="not there any more"):
        pickle.loads(raw)
    assert torch.equal(pickle.loads(pickle.dumps(data))[:], data[:])  # deleted, but still mapped: copied


def test_a_map_with_changes_of_its_own_is_copied(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((10, 2)))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="c")
    mapped[3] = 1.0
    data = vk.Empirical(mapped)
    assert torch.equal(pickle.loads(pickle.dumps(data))[:], data[:])
