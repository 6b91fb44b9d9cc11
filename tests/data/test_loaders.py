"""Every format of training sets against a known array."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from files import BYTES, IDX_CODES, POINTS, idx_bytes, png_bytes, scaled, values
from hypothesis import given, settings, strategies as st

from vkernel.core.errors import InputError
from vkernel.data.loaders import load


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=0, max_size=3),
    st.sampled_from(["u1", "i2", "i8", "f2", "f4", "f8", ">f8"]),
    st.sampled_from(["npy", "fortran", "npz", "safetensors", "pt"]),
)
def test_arrays_come_back_from_every_container(tmp_path_factory, event, dtype, container):
    folder = tmp_path_factory.mktemp("arrays")
    array = np.random.default_rng(0).integers(0, 100, (5, *event)).astype(dtype)
    tensor = torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
    path = folder / f"a.{'npy' if container == 'fortran' else container}"
    if container in ("npy", "fortran"):
        np.save(path, np.asfortranarray(array) if container == "fortran" else array)
    elif container == "npz":
        np.savez(path, a=array)
    elif container == "pt":
        torch.save(tensor, path)
    else:
        pytest.importorskip("safetensors", reason="safetensors is not installed")
        from safetensors.torch import save_file

        save_file({"a": tensor}, path)
    data = load(path, scale="none")
    assert data.shape == (tuple(event) or (1,))
    np.testing.assert_array_equal(values(data), array.reshape(5, *data.shape).astype("f8" if "f8" in dtype else "f4"))
    assert data.in_memory is (path.suffix != ".npy")
    assert data.name == path.name


def test_npz_takes_the_key_or_the_first_with_two_axes(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", labels=np.arange(7), x=POINTS, y=POINTS + 1)
    np.testing.assert_array_equal(values(load(tmp_path / "a.npz")), POINTS)
    np.testing.assert_array_equal(values(load(tmp_path / "a.npz", key="y")), POINTS + 1)
    with pytest.raises(InputError, match=r"no array 'z'; it holds labels, x, y"):
        load(tmp_path / "a.npz", key="z")
    np.savez(tmp_path / "b.npz", a=np.arange(3), b=np.arange(3))
    with pytest.raises(InputError, match="several arrays"):
        load(tmp_path / "b.npz")


def test_dictionaries_of_tensors_take_a_key(tmp_path):
    save_file = pytest.importorskip("safetensors.torch", reason="safetensors is not installed").save_file
    tensors = {"a": torch.from_numpy(POINTS), "b": torch.from_numpy(POINTS + 1)}
    save_file(tensors, tmp_path / "a.safetensors")
    torch.save({**tensors, "epoch": 3}, tmp_path / "a.pth")
    torch.save({"x": tensors["a"], "epoch": 3}, tmp_path / "one.pt")
    for name in ("a.safetensors", "a.pth"):
        np.testing.assert_array_equal(values(load(tmp_path / name, key="b")), POINTS + 1)
        with pytest.raises(InputError, match="several arrays; pick one with key: a, b"):
            load(tmp_path / name)
        with pytest.raises(InputError, match="no array 'c'"):
            load(tmp_path / name, key="c")
    np.testing.assert_array_equal(values(load(tmp_path / "one.pt")), POINTS)
    torch.save([tensors["a"]], tmp_path / "list.pt")
    with pytest.raises(InputError, match="holds a list"):
        load(tmp_path / "list.pt")


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
@pytest.mark.parametrize("header", [False, True])
def test_text_tables(tmp_path, suffix, header):
    separator = "\t" if suffix == ".tsv" else ","
    lines = ["\ufeff" + separator.join(["x", '"y"', "z"])] * header
    lines += [separator.join(repr(float(v)) for v in row) for row in POINTS]
    path = tmp_path / f"a{suffix}"
    path.write_text("\r\n".join(lines) + "\r\n\r\n", encoding="utf-8")
    np.testing.assert_array_equal(values(load(path)), POINTS)


def test_a_text_table_of_one_column_or_one_line(tmp_path):
    (tmp_path / "a.csv").write_text("1\n2\n3\n")
    (tmp_path / "b.csv").write_text("1,2,3")
    assert load(tmp_path / "a.csv").rows(0, 3).tolist() == [[1.0], [2.0], [3.0]]
    assert load(tmp_path / "b.csv").shape == (3,)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x,y\n1,2\n3,four\n", "line 3: 'four' is not a number"),
        ("1,2\n3,\n", "line 2: '' is not a number"),
        ("1,two\n3,4\n", "line 1: 'two' is not a number"),
        ("1,2\n\n3,4,5\n", "line 3: 3 numbers where lines before have 2"),
        ("x,y\n", "no line of numbers"),
        ("\n\n", "no line of numbers"),
        ("1,2\n3,nan\n", "Training point 1 is not finite"),
        ("1;2\n3;4\n", "no line of numbers|line 2: '3;4' is not a number"),
        ("1,2\n3,\0\n", "cannot be read|is not a number"),
    ],
)
def test_bad_text_tables_are_refused_by_line(tmp_path, text, sentence):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(InputError, match=sentence):
        load(tmp_path / "a.csv")


@pytest.mark.parametrize("dtype", list(IDX_CODES))
@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 4, 3), (5, 2, 4, 3)])
@pytest.mark.parametrize("zipped", [False, True])
def test_idx_files(tmp_path, dtype, shape, zipped):
    array = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    path = tmp_path / ("train-images-idx3-ubyte" + ".gz" * zipped)
    path.write_bytes(gzip.compress(idx_bytes(array)) if zipped else idx_bytes(array))
    data = load(path, scale="none")
    assert data.shape == {1: (1,), 2: (3,), 3: (1, 4, 3), 4: (2, 4, 3)}[len(shape)]
    np.testing.assert_array_equal(values(data).reshape(shape), array)
    assert data.in_memory is zipped


def test_idx_images_are_scaled_and_keep_their_integers(tmp_path):
    array = BYTES[..., 0]
    (tmp_path / "images.idx").write_bytes(idx_bytes(array))
    data = load(tmp_path / "images.idx")
    assert (data.scale, data.stored) == ((-1.0, 1.0), "uint8")
    np.testing.assert_allclose(values(data)[:, 0], scaled(array), atol=1e-7)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("cut", [6, 20, -1])
def test_truncated_idx_files_are_refused(tmp_path, zipped, cut):
    whole = idx_bytes(BYTES[..., 0])[:cut]
    path = tmp_path / "t10k-images-idx3-ubyte"
    path.write_bytes(gzip.compress(whole) if zipped else whole)
    with pytest.raises(InputError, match="truncated"):
        load(path)


def test_damaged_idx_files_are_refused(tmp_path):
    path = tmp_path / "a-ubyte.gz"
    whole = gzip.compress(idx_bytes(BYTES[..., 0]))
    path.write_bytes(whole[:-30])
    with pytest.raises(InputError, match="cannot be read as an IDX file"):
        load(path)
    path.write_bytes(whole[:30] + bytes(10) + whole[40:])
    with pytest.raises(InputError, match=r"cannot be read as an IDX file|damaged|truncated"):
        load(path)
    path.write_bytes(idx_bytes(BYTES[..., 0]) + b"more")
    with pytest.raises(InputError, match="more in it than"):
        load(path)
    path.write_bytes(bytes([0, 0, 8, 3]) + struct.pack(">3I", 2**32 - 1, 2**32 - 1, 2**32 - 1))
    with pytest.raises(InputError, match="truncated"):
        load(path)
    path.write_bytes(bytes([0, 0, 8, 2]) + struct.pack(">2I", 0, 5))
    with pytest.raises(InputError, match="no points"):
        load(path)


@pytest.mark.parametrize("grey", [False, True])
def test_a_folder_of_images(tmp_path, grey):
    array = BYTES[..., 0] if grey else BYTES
    for i, image in enumerate(array):
        folder = tmp_path / f"class{i % 2}"
        folder.mkdir(exist_ok=True)
        (folder / f"{i}.{'png' if i else 'BMP'}").write_bytes(png_bytes(image, "PNG" if i else "BMP"))
    (tmp_path / "labels.txt").write_text("0 1")
    (tmp_path / "._0.png").write_bytes(b"a resource fork of another system")
    data = load(tmp_path)
    expected = np.expand_dims(array, 1) if grey else array.transpose(0, 3, 1, 2)
    assert data.shape == expected.shape[1:]
    np.testing.assert_allclose(values(data), scaled(expected[[0, 2, 4, 1, 3, 5]]), atol=1e-7)


def test_jpeg_images_are_read(tmp_path):
    (tmp_path / "a.jpg").write_bytes(png_bytes(np.full((8, 8), 128, np.uint8), "JPEG"))
    assert load(tmp_path).rows(0, 1).abs().max() < 0.02


@pytest.mark.parametrize("other", [np.zeros((4, 4), np.uint8), np.zeros((4, 5, 3), np.uint8)])
def test_images_of_different_sizes_or_modes_are_refused(tmp_path, other):
    (tmp_path / "a.png").write_bytes(png_bytes(np.zeros((4, 5), np.uint8)))
    (tmp_path / "b.png").write_bytes(png_bytes(other))
    with pytest.raises(InputError, match=r"one size and mode: .*a\.png is 5×4 grey, .*b\.png is"):
        load(tmp_path)


def test_images_that_cannot_be_used_are_refused(tmp_path):
    path = tmp_path / "images" / "a.png"
    path.parent.mkdir()
    path.write_bytes(png_bytes(np.zeros((4, 4, 4), np.uint8)))
    with pytest.raises(InputError, match=r"a\.png has mode RGBA"):
        load(path.parent)
    path.write_bytes(png_bytes(BYTES[0])[:60])
    with pytest.raises(InputError, match=r"a\.png cannot be read as an image"):
        load(path.parent)
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n")
    with pytest.raises(InputError, match="cannot be read as an image"):
        load(path.parent)
    with pytest.raises(InputError, match="is one image"):
        load(path)
    path.unlink()
    with pytest.raises(InputError, match="holds no images"):
        load(path.parent)


def sheet(path: Path, images: np.ndarray) -> None:
    path.write_bytes(png_bytes(images.reshape(len(images), -1, *images.shape[3:])))


def test_sheets(tmp_path):
    images = np.random.default_rng(2).integers(0, 256, (4, 3, 32, 32, 3), dtype=np.uint8)
    expected = images.transpose(0, 1, 4, 2, 3)
    for number, batch in zip((10, 2, 50, 51), images, strict=True):
        sheet(tmp_path / f"cifar10_batch_{number}.png", batch)
    train = load(tmp_path)
    np.testing.assert_allclose(values(train), scaled(np.concatenate([expected[1], expected[0]])), atol=1e-7)
    assert train.shape == (3, 32, 32)
    test = load(tmp_path / "cifar10_batch_50.png", scale="none")
    np.testing.assert_array_equal(values(test), expected[2])
    test = load(str(tmp_path / "cifar10_batch_51.png"), scale="none")
    np.testing.assert_array_equal(values(test), expected[3])
    (tmp_path / "cifar10_batch_2.png").unlink()
    (tmp_path / "cifar10_batch_10.png").unlink()
    with pytest.raises(InputError, match="test sheets alone"):
        load(tmp_path)


def test_sheets_of_another_layout(tmp_path):
    sheet(tmp_path / "b.png", BYTES[3:, ..., 0])
    sheet(tmp_path / "a.png", BYTES[:3, ..., 0])
    np.testing.assert_array_equal(values(load(tmp_path, scale="none", layout="sheet:4x5"))[:, 0], BYTES[..., 0])
    assert load(tmp_path / "a.png", layout="sheet:5x4").shape == (1, 5, 4)
    with pytest.raises(InputError, match="20 pixels wide; a sheet of 32×32 images is 1024"):
        load(tmp_path, layout="sheet:32x32")
    with pytest.raises(InputError, match="'sheet:HxW'"):
        load(tmp_path, layout="rows")
    sheet(tmp_path / "c.png", BYTES)
    with pytest.raises(InputError, match="grey and some are RGB"):
        load(tmp_path, layout="sheet:4x5")


def test_scale_follows_type_and_shape(tmp_path):
    def scale_of(array: np.ndarray, scale: object = "auto") -> object:
        np.save(tmp_path / "a.npy", array)
        return load(tmp_path / "a.npy", scale=scale).scale

    assert scale_of(BYTES) == scale_of(BYTES[..., 0]) == (-1.0, 1.0)
    assert scale_of(BYTES.reshape(6, -1)) is scale_of(BYTES.astype("f4")) is scale_of(BYTES.astype("i4")) is None
    assert scale_of(BYTES, "none") is scale_of(BYTES, None) is None
    assert scale_of(BYTES, "0, 1") == scale_of(BYTES, (0, 1)) == scale_of(BYTES.reshape(6, -1), [0, 1]) == (0.0, 1.0)
    with pytest.raises(InputError, match="stored as float64"):
        scale_of(POINTS, "0,1")
    for bad in ("big", "1", "1,2,3", "1,x"):
        with pytest.raises(InputError, match="'low,high'"):
            scale_of(BYTES, bad)
    torch.save(torch.from_numpy(BYTES), tmp_path / "a.pt")
    assert load(tmp_path / "a.pt").scale == (-1.0, 1.0)


def test_cifar_sheets_are_cifar(cifar):
    data = load(cifar)
    assert (data.n % 1000, data.shape, data.scale, data.stored) == (0, (3, 32, 32), (-1.0, 1.0), "uint8")
    channels = (data.center.reshape(3, -1).mean(1) + 1) / 2
    np.testing.assert_allclose(channels, [0.4914, 0.4822, 0.4465], atol=0.02)  # the known means of CIFAR-10
    images = data[:200]
    neighbours = (
        (images[..., 1:, :] - images[..., :-1, :]).abs().mean(),
        (images[..., 1:] - images[..., :-1]).abs().mean(),
    )
    assert max(neighbours) < 0.15  # rows and columns are where they belong: pixels resemble their neighbours
    assert load(cifar / "cifar10_batch_50.png").n == 1000


def test_fashion_mnist_is_itself():
    path = Path("/usr/share/datasets/fashion-mnist/t10k-images-idx3-ubyte.gz")
    if not path.is_file():
        pytest.skip("the Debian package dataset-fashion-mnist is not installed")
    data = load(path)
    assert (data.n, data.shape, data.scale) == (10_000, (1, 28, 28), (-1.0, 1.0))
    assert ((data.center.mean() + 1) / 2).item() == pytest.approx(0.2868, abs=0.001)
