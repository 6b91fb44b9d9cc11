"""Training sets in Arrow tables: parquet files and Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from files import BYTES, POINTS, png_bytes, scaled, values

from vkernel.core.errors import InputError
from vkernel.data.loaders import load


@pytest.fixture
def parquet(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet as pq

    def write(columns: dict, **options) -> Path:
        table = columns if isinstance(columns, pa.Table) else pa.table(columns)
        pq.write_table(table, tmp_path / "a.parquet", **options)
        return tmp_path / "a.parquet"

    return write


def test_parquet_columns_of_numbers(parquet):
    path = parquet({"x": POINTS[:, 0], "name": ["a"] * 7, "y": POINTS[:, 1], "k": np.arange(7)}, row_group_size=3)
    expected = np.column_stack([POINTS[:, 0], POINTS[:, 1], np.arange(7)])
    np.testing.assert_array_equal(values(load(path)), expected)
    np.testing.assert_array_equal(values(load(path, key="y, x")), expected[:, [1, 0]])
    np.testing.assert_array_equal(values(load(path, key="x")), expected[:, :1])
    with pytest.raises(InputError, match="no column 'z'; it holds x, name, y, k"):
        load(path, key="z")
    with pytest.raises(InputError, match="holds string, not numbers"):
        load(path, key="name")


def test_parquet_columns_of_lists(parquet):
    import pyarrow as pa

    nested = pa.array(POINTS.reshape(7, 3, 1).tolist())
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(POINTS.reshape(-1)), 3)
    path = parquet({"label": np.arange(7), "v": fixed, "w": nested})
    np.testing.assert_array_equal(values(load(path)), POINTS)
    np.testing.assert_array_equal(values(load(path, key="w")), POINTS[..., None])
    with pytest.raises(InputError, match="single numbers"):
        load(path, key="label,v")
    with pytest.raises(InputError, match="different lengths"):
        load(parquet({"v": pa.array([[1.0], [1.0, 2.0]])}))


def test_parquet_columns_of_images(parquet):
    import pyarrow as pa

    cells = [{"bytes": png_bytes(image), "path": None} for image in BYTES]
    path = parquet({"label": np.arange(6), "image": cells})
    np.testing.assert_allclose(values(load(path)), scaled(BYTES.transpose(0, 3, 1, 2)), atol=1e-7)
    assert load(path, key="label").shape == (1,)
    with pytest.raises(InputError, match="missing values"):
        load(parquet({"image": pa.array([{"bytes": None, "path": "/etc/passwd"}, cells[0]], type=pa.struct(
            {"bytes": pa.binary(), "path": pa.string()}))}))  # fmt: skip
    with pytest.raises(InputError, match=r"image 1 cannot be read as an image"):
        load(parquet({"image": [cells[0]["bytes"], b"none"]}))


def test_parquet_tables_that_cannot_be_used_are_refused(parquet):
    with pytest.raises(InputError, match="no column of images or numbers; it holds name"):
        load(parquet({"name": ["a", "b"]}))
    with pytest.raises(InputError, match=r"'x' of .* has missing values"):
        load(parquet({"x": [1.0, None]}))
    with pytest.raises(InputError, match="no rows"):
        load(parquet({"x": np.zeros(0)}))
    path = parquet({"x": np.zeros(3)})
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(InputError, match=r"cannot be read as a \.parquet table"):
        load(path)


def test_hugging_face_folders(tmp_path):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    datasets.disable_progress_bars()
    held = datasets.Dataset.from_dict({"label": list(range(6)), "image": [image.fromarray(b) for b in BYTES]})
    held.select([4, 1]).save_to_disk(tmp_path / "one")
    expected = scaled(BYTES.transpose(0, 3, 1, 2))
    np.testing.assert_allclose(values(load(tmp_path / "one")), expected[[4, 1]], atol=1e-7)
    assert values(load(tmp_path / "one", key="label")).tolist() == [[4.0], [1.0]]

    features = datasets.Features({"m": datasets.Array2D((3, 1), "float64"), "label": datasets.Value("int64")})
    matrices = datasets.Dataset.from_dict({"m": POINTS.reshape(7, 3, 1).tolist(), "label": [0] * 7}, features=features)
    splits = datasets.DatasetDict(train=matrices, test=matrices.select([6]))
    splits.save_to_disk(tmp_path / "splits")
    np.testing.assert_array_equal(values(load(tmp_path / "splits")), POINTS[..., None])
    np.testing.assert_array_equal(values(load(tmp_path / "splits", key="test")), POINTS[6:, :, None])
    assert load(tmp_path / "splits", key="test/label").shape == load(tmp_path / "splits", key="label").shape == (1,)
    datasets.DatasetDict(a=matrices, b=matrices).save_to_disk(tmp_path / "neither")
    with pytest.raises(InputError, match="splits a, b; pick one"):
        load(tmp_path / "neither")
    (tmp_path / "one" / "state.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read as a saved Hugging Face data set"):
        load(tmp_path / "one")
