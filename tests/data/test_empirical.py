"""Training sets against numpy: values, weights, duplicates, devices, refusals."""

from __future__ import annotations

import math
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from vkernel.core.errors import InputError
from vkernel.data import Empirical, empirical as module


def memory_map(tmp_path: Path, array: np.ndarray) -> np.memmap:
    np.save(tmp_path / "points.npy", array)
    return np.load(tmp_path / "points.npy", mmap_mode="r")


def numbers(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.integers(0, 127, shape) if "f" not in dtype else rng.normal(size=shape)).astype(dtype)


DTYPES = ["uint8", "int8", "uint16", "int64", "float16", "float32", "float64", ">f4", ">i2", "longdouble"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=0, max_size=3), st.integers(1, 9), st.sampled_from(DTYPES), st.booleans())
def test_rows_take_and_images_are_the_points(tmp_path_factory, event, n, dtype, mapped):
    array = numbers((n, *event), dtype)
    data = Empirical(memory_map(tmp_path_factory.mktemp("map"), array) if mapped else array)
    shape = tuple(event) or (1,)
    wide = dtype in ("float64", "longdouble")
    expected = torch.from_numpy(array.astype("f8" if wide else "f4").reshape(n, -1))
    indices = torch.from_numpy(np.random.default_rng(1).integers(0, n, 7))
    assert (data.n, len(data), data.shape, data.d) == (n, n, shape, math.prod(shape))
    assert data.in_memory is not mapped
    assert data.dtype == (torch.float64 if wide else torch.float32)
    assert torch.equal(data.rows(0, n), expected)
    assert torch.equal(data.rows(1, n - 1), expected[1 : n - 1])
    assert torch.equal(data.take(indices), expected[indices])
    assert torch.equal(data[indices], expected[indices].reshape(7, *shape))
    part = data.subset(indices).subset([6, 0, 0])
    assert torch.equal(part.rows(0, 3), expected[indices[[6, 0, 0]]])
    assert part.in_memory is not mapped


def test_no_copy_where_none_is_needed():
    points = torch.randn(5, 2, 3)
    assert Empirical(points).rows(1, 4).data_ptr() == points[1].data_ptr()
    array = np.random.default_rng(0).normal(size=(5, 2))
    assert Empirical(array).rows(0, 5).data_ptr() == array.ctypes.data


def test_integers_follow_the_default_type_and_lists_are_arrays():
    assert Empirical([[0], [1]]).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert Empirical([[0], [1]]).rows(0, 1).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert Empirical([0.5, 1.5]).shape == (1,)
    assert Empirical(torch.ones(3, 2, requires_grad=True)).rows(0, 3).requires_grad is False


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", ">i2"])
def test_scale_maps_the_full_range_of_integers(tmp_path, dtype):
    info = np.iinfo(dtype)
    array = np.array([[info.min, info.max, (info.min + info.max) // 2]], dtype)
    for points in (array, memory_map(tmp_path, array)):
        data = Empirical(points, scale=(-1, 1))
        values = data.rows(0, 1)[0]
        assert values[:2].tolist() == [-1.0, 1.0]
        assert abs(values[2]) <= 1.001 / (info.max - info.min)
        assert data.scale == (-1.0, 1.0)
    assert Empirical(array, scale=(0, 10)).rows(0, 1)[0, :2].tolist() == [0.0, 10.0]


def test_memory_maps_are_read_by_blocks(tmp_path):
    shape = (20_000, 784)
    mapped = np.lib.format.open_memmap(tmp_path / "big.npy", mode="w+", dtype=np.uint8, shape=shape)
    mapped[-1] = 255
    mapped = np.load(tmp_path / "big.npy", mmap_mode="r")
    tracemalloc.start()
    data = Empirical(mapped, scale=(-1, 1))
    some = data.subset(torch.arange(19_000, 20_000))
    some.take([0, 999])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10e6 < mapped.nbytes
    assert isinstance(data._store, np.memmap)
    assert not data.in_memory
    assert not some.in_memory
    torch.testing.assert_close(data.center[0].item(), -1 + 2 / 20_000, rtol=0, atol=1e-12)
    assert some[[999]].min() == 1


def test_no_read_is_larger_than_a_block(tmp_path, monkeypatch):
    reads = []

    class Spy(np.memmap):
        def __getitem__(self, key):
            result = super().__getitem__(key)
            reads.append(result.size)
            return result

    monkeypatch.setattr(module, "_BLOCK", 64)
    array = numbers((50, 3, 5), "float32")
    data = Empirical(memory_map(tmp_path, array).view(Spy))
    assert max(reads) <= 64
    assert sum(reads) == array.size
    np.testing.assert_allclose(data.center, array.reshape(50, -1).mean(0), atol=1e-6)
    data.merged()
    assert max(reads) <= 64


@pytest.mark.parametrize(
    "weights", [[1, 3, 0], np.array([1e308, 1.5e308, 0.0]), torch.tensor([1e-300, 1, 1], dtype=torch.float64)]
)
def test_weights_are_normalised(weights):
    data = Empirical([0.0, 1.0, 2.0], weights)
    expected = np.asarray(weights, dtype=np.longdouble)
    assert data.weights.dtype == torch.float64
    np.testing.assert_allclose(data.weights, (expected / expected.sum()).astype(float), rtol=1e-14)


def test_weights_default_to_equal():
    assert Empirical(np.zeros((4, 2))).weights.tolist() == [0.25] * 4


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 10_000))
def test_center_and_spread_agree_with_numpy_whatever_the_blocks(n, block, seed):
    rng = np.random.default_rng(seed)
    points = (1e4 + 1e-2 * rng.normal(size=(n, 3))).astype(np.float32)
    weights = rng.random(n) * (rng.random(n) < 0.7)
    weights[rng.integers(n)] = 1.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK", block)
        data = Empirical(points, weights)
    exact, w = points.astype(np.longdouble), (weights / weights.sum()).astype(np.longdouble)
    center = (w[:, None] * exact).sum(0)
    spread = np.sqrt((w * ((exact - center) ** 2).sum(1)).sum())
    np.testing.assert_allclose(data.center, center.astype(float), rtol=1e-13)
    np.testing.assert_allclose(data.spread, float(spread), rtol=1e-8, atol=1e-11)
    assert data.center.dtype == torch.float64


def test_center_keeps_digits_at_a_large_offset():
    points = 1e12 + np.array([[-1.0], [0.0], [1.0]])
    data = Empirical(points)
    assert data.center.item() == 1e12
    assert data.spread == pytest.approx(math.sqrt(2 / 3), rel=1e-12)


def test_subset_renormalises_and_measures_anew():
    data = Empirical([0.0, 1.0, 5.0], [1, 1, 2])
    part = data.subset([1, 2])
    np.testing.assert_allclose(part.weights, [1 / 3, 2 / 3])
    assert part.center.item() == pytest.approx(11 / 3)
    assert (data.n, data.center.item()) == (3, 2.75)


def brute_force_merge(array: np.ndarray, weights: np.ndarray) -> tuple[list[int], list[int], list[float]]:
    seen: dict[tuple, int] = {}
    first, inverse, total = [], [], []
    for i, row in enumerate(array.reshape(len(array), -1).tolist()):
        if tuple(row) not in seen:
            seen[tuple(row)] = len(first)
            first.append(i)
            total.append(0.0)
        inverse.append(seen[tuple(row)])
        total[inverse[-1]] += weights[i]
    return first, inverse, total


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.sampled_from(["uint8", "float32", "float64"]), st.booleans(), st.integers(0, 999))
def test_merged_duplicates_become_weights(tmp_path_factory, n, dtype, mapped, seed):
    rng = np.random.default_rng(seed)
    array = rng.integers(0, 2, (n, 2, 2)).astype(dtype)
    if dtype != "uint8":
        array *= rng.choice([-1, 1], array.shape).astype(dtype)  # makes some zeros negative
    weights = rng.random(n) + 0.1
    points = memory_map(tmp_path_factory.mktemp("map"), array) if mapped else array
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK", 24)
        data = Empirical(points, weights)
        merged, inverse = data.merged()
    first, expected, total = brute_force_merge(array, weights / weights.sum())
    assert inverse.tolist() == expected
    assert merged.in_memory is not mapped
    np.testing.assert_allclose(merged.weights, total, rtol=1e-13)
    assert torch.equal(merged.rows(0, merged.n), data.take(first))
    assert torch.equal(merged.take(inverse), data.rows(0, n))
    torch.testing.assert_close(merged.center, data.center)
    assert merged.spread == data.spread
    assert brute_force_merge(array[first], np.ones(len(first)))[0] == list(range(merged.n))


@pytest.mark.parametrize("d", [1, 7, 8, 19])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_bytes_are_merged_eight_at_a_time(d, dtype):
    """Rows that begin anywhere in memory and differ in one byte at most; the last eight are padded."""
    points = torch.full((d + 3, d), 100, dtype=dtype)
    points[torch.arange(d), torch.arange(d)] = 101
    held = torch.cat([torch.zeros(3, dtype=dtype), points.flatten()])[3:].reshape(d + 3, d)
    for scale in (None, (-1, 1)):
        merged, inverse = Empirical(held, scale=scale).merged()
        assert merged.n == d + 1
        assert inverse.tolist() == [*range(d), d, d, d]


def test_a_collision_of_hashes_is_noticed(monkeypatch):
    true_hash, calls = module.row_hashes, []

    def weak_at_first(rows, keys):
        calls.append(1)
        return torch.zeros(len(rows), dtype=torch.int64) if len(calls) == 1 else true_hash(rows, keys)

    monkeypatch.setattr(module, "row_hashes", weak_at_first)
    merged, inverse = Empirical([1.0, 2.0, 1.0]).merged()
    assert merged.n == 2
    assert inverse.tolist() == [0, 1, 0]
    assert len(calls) == 2


def test_many_distinct_points_of_few_values_do_not_merge():
    signs = torch.from_numpy(np.unpackbits(np.arange(2**14, dtype=">u2").view(np.uint8).reshape(-1, 2), axis=1))
    data = Empirical(signs.double() * 2 - 1)
    merged, inverse = data.merged()
    assert merged is data
    assert torch.equal(inverse, torch.arange(2**14))


def test_to_moves_and_leaves_the_original():
    data = Empirical([0.0, 1.0])
    moved = data.to("meta")
    assert moved.device.type == moved.weights.device.type == moved.rows(0, 1).device.type == "meta"
    assert data.device.type == "cpu"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("mapped", [False, True])
def test_cuda_gives_the_same_values(tmp_path, mapped):
    array = np.concatenate([numbers((50, 2, 3), "uint8")] * 2)
    here = Empirical(memory_map(tmp_path, array) if mapped else array, scale=(-1, 1))
    there = here.to("cuda")
    indices = torch.tensor([3, 99, 0, 3])
    assert there.rows(0, 5).device.type == there.center.device.type == "cuda"
    # a GPU fuses the multiplication and addition of the scale: one rounding less
    torch.testing.assert_close(there.take(indices).cpu(), here.take(indices))
    torch.testing.assert_close(there.take(indices.cuda()).cpu(), here.take(indices))
    merged, inverse = there.merged()
    assert (merged.n, inverse.device.type) == (50, "cuda")
    assert torch.equal(inverse.cpu(), here.merged()[1])
    torch.testing.assert_close(there.subset(indices.cuda()).center.cpu(), here.subset(indices).center)


def test_repr_is_one_line(tmp_path):
    text = repr(Empirical(memory_map(tmp_path, numbers((4, 1, 2, 2), "uint8")), scale=(-1, 1), name="mine"))
    assert text == "Empirical('mine', n=4, shape=(1, 2, 2), stored=uint8, memory map, scale=(-1.0, 1.0), device=cpu)"


def test_the_module_imports_torch_and_numpy_alone():
    code = (
        "import sys, torch, numpy; before = set(sys.modules); import vkernel.data.empirical, vkernel.data.loaders\n"
        "print([m for m in ('sklearn', 'pyarrow', 'datasets', 'PIL', 'safetensors', 'pandas')"
        " if m in sys.modules and m not in before])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


BAD_POINTS = {
    "empty": (np.zeros((0, 3)), "empty"),
    "no coordinates": (np.zeros((3, 0)), "no coordinates"),
    "a number": (np.float64(3.0), "single number"),
    "text": (np.array(["a", "b"]), "must be real numbers"),
    "objects": (np.array([{}, 1], dtype=object), "must be real numbers"),
    "dates": (np.array(["2020-01-01"], dtype="datetime64[D]"), "must be real numbers"),
    "complex array": (np.zeros((2, 2), complex), "complex"),
    "complex tensor": (torch.zeros(2, 2, dtype=torch.complex64), "complex"),
    "bool array": (np.zeros((2, 2), bool), "True and False"),
    "bool tensor": (torch.zeros(2, 2, dtype=torch.bool), "True and False"),
    "ragged": ([[1.0, 2.0], [3.0]], "one array"),
    "sparse": (torch.eye(3).to_sparse(), "dense"),
    "overflow": (np.array([[-1e200], [1e200]]), "overflow"),
}


@pytest.mark.parametrize("case", BAD_POINTS)
def test_points_that_cannot_be_used_are_refused(case):
    points, sentence = BAD_POINTS[case]
    with pytest.raises(InputError, match=sentence):
        Empirical(points)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("mapped", [False, True])
def test_the_first_point_that_is_not_finite_is_named(tmp_path, monkeypatch, bad, mapped):
    monkeypatch.setattr(module, "_BLOCK", 12)
    array = np.zeros((20, 2, 2), np.float32)
    array[13, 1, 0] = array[17, 0, 0] = bad
    with pytest.raises(InputError, match=rf"Training point 13 .* coordinate 2 .* is {float(bad)}"):
        Empirical(memory_map(tmp_path, array) if mapped else array)


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ([1.0], "one weight for each of the 3"),
        ([[1.0, 1.0, 1.0]], "one weight for each of the 3"),
        ([1.0, -1.0, 1.0], "weight 1 is not"),
        ([1.0, 1.0, np.nan], "weight 2 is not"),
        ([np.inf, 1.0, 1.0], "weight 0 is not"),
        ([0.0, 0.0, 0.0], "Every weight is zero"),
        (["a", "b", "c"], "weights must be real numbers"),
        ([1j, 1, 1], "not complex"),
    ],
)
def test_weights_that_cannot_be_used_are_refused(weights, sentence):
    with pytest.raises(InputError, match=sentence):
        Empirical([0.0, 1.0, 2.0], weights)


@pytest.mark.parametrize("scale", [(1, -1), (0, 0), (0, np.inf), "auto", (1, 2, 3), 5])
def test_scales_that_cannot_be_used_are_refused(scale):
    with pytest.raises(InputError, match="scale must be"):
        Empirical(np.zeros((2, 2), np.uint8), scale=scale)


def test_floats_refuse_a_scale():
    with pytest.raises(InputError, match="stored as float32"):
        Empirical(np.zeros((2, 2), np.float32), scale=(-1, 1))


@pytest.mark.parametrize("indices", [[3], [-4], [[0]], [0.5], [True, False, True]])
@pytest.mark.parametrize("mapped", [False, True])
def test_indices_that_cannot_be_used_are_refused(tmp_path, indices, mapped):
    array = np.arange(3.0)
    data = Empirical(memory_map(tmp_path, array) if mapped else array)
    for method in (data.take, data.__getitem__, data.subset):
        with pytest.raises(InputError, match=r"no point|vector of integers"):
            method(indices)


def test_subsets_without_weight_are_refused():
    with pytest.raises(InputError, match="at least one point"):
        Empirical([0.0, 1.0]).subset([])
    with pytest.raises(InputError, match="weight zero"):
        Empirical([0.0, 1.0], [0, 1]).subset([0])


def test_a_memory_map_is_read_into_memory(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(48, dtype=np.uint8).reshape(8, 2, 3))
    mapped = Empirical(np.load(tmp_path / "a.npy", mmap_mode="r"), weights=[1, 2, 3, 4, 5, 6, 7, 8], scale=(-1, 1))
    for part in (mapped, mapped.subset([5, 1, 2])):
        held = part.loaded()
        assert (part.in_memory, held.in_memory) == (False, True)
        assert held.loaded() is held
        assert torch.equal(held.rows(0, held.n), part.rows(0, part.n))
        assert torch.equal(held.weights, part.weights)
        assert (held.shape, held.scale, held.stored, held.spread) == (part.shape, part.scale, part.stored, part.spread)
        assert torch.equal(held.subset([1])[0], part[1])


@pytest.mark.parametrize("mapped", [False, True])
def test_indexing_returns_images(tmp_path, mapped):
    array = numbers((6, 2, 3), "float32")
    data = Empirical(memory_map(tmp_path, array) if mapped else array)
    assert torch.equal(data[2], torch.from_numpy(array[2]))
    assert torch.equal(data[-1], torch.from_numpy(array[5]))
    assert torch.equal(data[1:4], torch.from_numpy(array[1:4]))
    assert torch.equal(data[::-2], torch.from_numpy(array[::-2].copy()))
    assert torch.equal(data[[3, 3, 0]], torch.from_numpy(array[[3, 3, 0]]))
    assert torch.equal(data[torch.tensor([1])], torch.from_numpy(array[[1]]))
    assert torch.equal(torch.stack(list(data)), torch.from_numpy(array))
    with pytest.raises(IndexError, match="There is no point 6: the set has 6 points"):
        data[6]
    with pytest.raises(InputError, match="no point"):
        data[[6]]
