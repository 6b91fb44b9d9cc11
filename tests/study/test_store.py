"""The store of a study: killed at any moment, refused where it must be, readable without a manual."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import studies
import xarray as xr

from vkernel import InputError, study
from vkernel.study import store as stores
from vkernel.study.checksums import LIST
from vkernel.study.spec import read
from vkernel.study.store import Store

SMALL: dict[str, Any] = studies.SMALL | {
    "question": "does it last?",
    "seed": 3,
    "measure": {"gap": [0.25, 0.75], "times": [0.1, 0.5], "places": 3, "bins": 12},
    "grid": {
        "objective.K": {"values": [1, float("inf")], "labels": ["J1", "J0"], "name": "objective"},
        "process.eps": {"values": [1e-3, 1e-2], "unit": "unit of t"},
    },
}
FEW = {k: v for k, v in SMALL.items() if k != "grid"} | {"grid": {"objective.K": [1]}}


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def digest(folder: Path) -> str:
    return hashlib.sha256(repr(sorted(files(folder).items())).encode()).hexdigest()


def same(a: xr.Dataset, b: xr.Dataset) -> None:
    assert set(a.variables) == set(b.variables)
    for name in a.variables:
        x, y = a[name].values, b[name].values
        assert x.dtype == y.dtype
        assert np.array_equal(x, y, equal_nan=x.dtype.kind == "f"), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbed."""
    path = tmp_path_factory.mktemp("whole") / "store"
    study.run(SMALL, path, progress=False)
    return path


# Killed

SERVER = """
import os, sys
import filelock, rich.console, torch, xarray, zarr
import vkernel.study.report
from vkernel import cli
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        cli.main()
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""  # the command line, for every line that it reads, in a fresh process that has read its packages


def count(folder: Path, pattern: str) -> int:
    with contextlib.suppress(FileNotFoundError):  # it took its final name meanwhile
        return sum(1 for _ in folder.glob(pattern))
    return 0


def test_killed_ten_times_at_random_moments(tmp_path: Path) -> None:
    spec = SMALL | {"members": 24, "title": "killed"}  # 48 blocks of 8 files
    file = tmp_path / "spec.json.toml"
    file.write_text(toml(spec))
    calm = tmp_path / "calm" / "store"
    undisturbed = study.run(file, calm, progress=False).load()
    path = tmp_path / "hurt" / "store"
    path.parent.mkdir()
    chance = random.Random(time.time_ns())  # other moments in every run: each must do
    seen, moments = [], []
    command = [sys.executable, "-c", SERVER, "study", "run", str(file), "--store", str(path), "-q"]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=alone, bufsize=1
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        for k in range(10):
            server.stdin.write("go\n")
            pid = int(server.stdout.readline())
            if k < 3:  # while the store is made
                pattern, goal = "store/**/*", chance.randrange(1, 60)
            else:  # while blocks are written
                pattern, goal = "store/*/c/**/*", count(path, "*/c/**/*") + chance.randrange(1, 30)
            moments.append(goal)
            deadline = time.monotonic() + 60
            while count(path.parent, pattern) < goal and not (k < 3 and (path / LIST).exists()):
                assert time.monotonic() < deadline, "the run does nothing"
                time.sleep(0.001)
            time.sleep(chance.random() * 0.01)
            os.kill(pid, signal.SIGKILL)
            assert int(server.stdout.readline()) == -signal.SIGKILL, "it was at work"
            if (path / LIST).exists():
                seen.append(flagged_is_right(study.load(path).load(), undisturbed))
        server.stdin.close()
    assert seen, moments
    assert 0 < seen[-1] < 48, (moments, seen)
    assert seen == sorted(seen), "blocks that were safe are safe"
    again = study.run(file, path, progress=False)
    same(again, undisturbed)
    assert files(path) == files(calm)
    assert [p.name for p in path.parent.iterdir()] == ["store"]


def flagged_is_right(found: xr.Dataset, whole: xr.Dataset) -> int:
    """What is flagged is there, to the last bit; how many blocks are."""
    block = read(json.loads(found.attrs["vkernel_study"])).block
    for *cell, k in np.argwhere(found["done"].values).tolist():
        where = (*cell, slice(block * k, block * (k + 1)))
        for name in set(found.data_vars) - {"done"}:
            assert np.array_equal(found[name].values[where], whole[name].values[where], equal_nan=True), name
    return int(found["done"].values.sum())


def toml(spec: dict[str, Any]) -> str:
    """The study as a file: TOML's values are JSON's, but for inf and tables."""

    def value(v: Any) -> str:
        if isinstance(v, dict):
            return "{" + ", ".join(f'"{k}" = {value(x)}' for k, x in v.items()) + "}"
        return "[" + ", ".join(map(value, v)) + "]" if isinstance(v, list) else json.dumps(v).replace("Infinity", "inf")

    return "\n".join(f"{k} = {value(v)}" for k, v in spec.items())


def test_what_a_killed_run_leaves_is_swept(tmp_path: Path, whole: Path) -> None:
    path, name = tmp_path / "store", f"{uuid.uuid4().hex}.partial"
    shutil.copytree(whole, path)
    (path / "away" / "c" / "0" / "0" / f"1.{name}").write_bytes(b"half")
    (path / f"zarr.{name}").write_bytes(b"half")
    (path / "notes.partial").write_text("someone's own")
    (path / "done" / "c" / "0" / "0" / "1").unlink()  # killed before the flag
    (path / "done" / "c" / "1" / "1" / "2").unlink()  # killed before the checksums
    shutil.rmtree(path / "checksum" / "c" / "1" / "1" / "2")
    (path / "away" / "c" / "1" / "1" / "2").write_bytes(b"what a crash of the machine left")
    seen = study.load(path)
    assert int(seen["done"].sum()) == 11
    assert bool(seen["away"][1, 1, 4:].isnull().all()), "what is not complete is not shown"
    study.run(SMALL, path, progress=False)
    (path / "notes.partial").unlink()
    assert files(path) == files(whole)


PLACES = ["*", "a[b]", "two\nlines", ".hidden", "-q", "a b", "ä", "run1", "?", "~", "$HOME", "c:", "s3:", "x::y"]


@pytest.mark.parametrize("name", PLACES)
def test_nothing_beside_a_store_is_touched(tmp_path: Path, whole: Path, name: str) -> None:
    """Neither names of earlier versions' temporary files, nor those that a pattern in the name would match."""
    for other in (f".{name}.new-ideas", ".run1.new-abc", ".x.new-y", f"{name}.partial", f".vkernel-{name}"):
        (tmp_path / other).mkdir(exist_ok=True)
        (tmp_path / other / "zarr.json").write_text("{}")
    (tmp_path / f".{name}.lock").write_text("someone's own")
    before = files(tmp_path)
    with Store.open(tmp_path / "." / name, read(FEW)) as opened:
        assert len(opened.missing()) == 3
    found = files(tmp_path)
    assert before.items() <= found.items()
    assert {Path(new).parts[0] for new in found.keys() - before.keys()} == {name}


# In use, or another's

HOLDER = """
import sys, json, time
from pathlib import Path
from vkernel.study.spec import read
from vkernel.study.store import Store
with Store.open(sys.argv[1], read(json.loads(sys.argv[2]))):
    print("held", flush=True)
    time.sleep(120)
"""


def test_two_runs_on_one_store(tmp_path: Path, whole: Path) -> None:
    path = tmp_path / "store"
    command = [sys.executable, "-c", HOLDER, str(path), json.dumps(SMALL)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        before = digest(path)
        link = tmp_path / "elsewhere" / "link"
        link.parent.mkdir()
        link.symlink_to(path)
        for name in (path, link):  # by whatever name
            with pytest.raises(InputError, match=r"Another run is writing to .*(store|link)\. Wait for it") as error:
                study.run(SMALL, name, progress=False)
            assert "\n" not in str(error.value)
        assert digest(path) == before
        assert study.load(path)["done"].values.sum() == 0, "reading is free"
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        study.run(SMALL, path, progress=False)
    assert files(path) == files(whole)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"seed": 4}, "differs in seed"),
        ({"block": 3}, "differs in block"),
        ({"members": 7}, "differs in members"),
        ({"title": "other", "sampler": {"samples": 17, "steps": 8}}, "sampler, title|title, sampler"),
        ({"grid": {"objective.K": [1]}}, "differs in grid"),
    ],
)
def test_a_store_of_another_study(whole: Path, change: dict[str, Any], word: str) -> None:
    before = digest(whole)
    with pytest.raises(InputError, match=f"another study .*({word}).*nothing was changed"):
        study.run(SMALL | change, whole, progress=False)
    assert digest(whole) == before


def test_a_store_of_another_version(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version of the results decides, not that of the package."""
    before = digest(whole)
    monkeypatch.setattr(stores, "__version__", "99.0")
    study.run(SMALL, whole, progress=False)
    assert digest(whole) == before
    monkeypatch.setattr(stores, "RESULTS", 99)
    with pytest.raises(InputError, match=r"vkernel 99\.0 computes version 99, .* nothing was changed"):
        study.run(SMALL, whole, progress=False)
    assert digest(whole) == before


def test_a_store_of_other_data(tmp_path: Path) -> None:
    """The file's name is the same, its numbers are not: a store that mixed them would be of neither."""
    np.save(tmp_path / "points.npy", np.array([-1.0, 1.0]))
    spec = FEW | {"data": {"path": str(tmp_path / "points.npy")}}
    study.run(spec, tmp_path / "store", progress=False)
    before = digest(tmp_path / "store")
    np.save(tmp_path / "points.npy", np.array([-1.0, 0.9]))
    with pytest.raises(InputError, match="other training data; nothing was changed"):
        study.run(spec, tmp_path / "store", progress=False)
    assert digest(tmp_path / "store") == before


# Places that cannot be used


def test_a_path_that_is_no_store(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("hello")
    with pytest.raises(InputError, match="file is not a store of a study"):
        study.run(FEW, file, progress=False)
    assert file.read_text() == "hello"
    with pytest.raises(InputError, match="file is a file, not a folder"):
        study.run(FEW, file / "store", progress=False)
    with pytest.raises(InputError, match="no folder /vkernel-none/there"):
        study.run(FEW, "/vkernel-none/there/store", progress=False)
    with pytest.raises(InputError, match="zero byte"):
        study.run(FEW, "a\0b", progress=False)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="mine is not a store"):
        study.run(FEW, tmp_path / "mine", progress=False)
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
    other = tmp_path / "other.zarr"
    xr.Dataset({"a": ("x", [1.0])}).to_zarr(other, zarr_format=2)
    before = digest(other)
    with pytest.raises(InputError, match="not the store of a study"):
        study.run(FEW, other, progress=False)
    assert digest(other) == before
    with pytest.raises(InputError, match=r"no store at .*study run"):
        study.load(tmp_path / "nothing")


def test_folders_and_links(tmp_path: Path) -> None:
    """An empty folder will do, also by a link that leads to it or to nothing; a run writes through none in a store."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    (tmp_path / "dangling").symlink_to("made")
    (tmp_path / "loop").symlink_to("loop")
    for name, place in (("link", "empty"), ("dangling", "made")):
        study.run(FEW, tmp_path / name, progress=False)
        assert bool(study.load(tmp_path / place)["done"].all())
        assert (tmp_path / name).is_symlink()
    with pytest.raises(InputError, match="Cannot write"):
        study.run(FEW, tmp_path / "loop", progress=False)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "0").write_text("someone's own")
    shutil.rmtree(tmp_path / "made" / "away" / "c" / "0")
    (tmp_path / "made" / "away" / "c" / "0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"a link in it, away/c/0"):
        study.run(FEW, tmp_path / "made", progress=False)
    with pytest.raises(InputError, match=r"K = 1, members 0 to 1 \(away\)"):
        study.load(tmp_path / "made")
    assert files(tmp_path / "elsewhere") == {"0": b"someone's own"}


def limited(after: int, number: int) -> Callable[..., int]:
    """A function that renames files until the disk gives out: half a file stays, and then comes an error."""
    original, made = Path.replace, [0]

    def replace(self: Path, target: Path) -> Path:
        made[0] += 1
        if made[0] <= after:
            return original(self, target)
        self.with_name(f"0.{uuid.uuid4().hex}.partial").write_bytes(self.read_bytes()[:3])
        raise OSError(number, os.strerror(number), str(target))

    return replace


@pytest.fixture(scope="module")
def writes(tmp_path_factory: pytest.TempPathFactory) -> int:
    """How many files are written until the store is there; 8 for each block follow."""
    with pytest.MonkeyPatch.context() as counted:
        made: list[Path] = []
        original = Path.replace
        counted.setattr(Path, "replace", lambda a, b: made.append(a) or original(a, b))
        with Store.open(tmp_path_factory.mktemp("count") / "s", read(SMALL)):
            return len(made)


@pytest.mark.parametrize("after", [-1000, -20, -1, 0, 1, 6, 7, 8, 50, 95])
def test_a_full_disk(tmp_path: Path, whole: Path, writes: int, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store"
    with monkeypatch.context() as full:
        full.setattr(Path, "replace", limited(writes + after, errno.ENOSPC))
        with pytest.raises(InputError, match=r"The disk is full\. Free some space\.") as error:
            study.run(SMALL, path, progress=False)
    if after >= 0:
        complete = after // 8 + (after % 8 == 7)  # with its checksums, but without its flag
        assert int(study.load(path)["done"].values.sum()) == complete
        assert f"{after // 8} of 12 blocks are safe; run again" in str(error.value)
        assert "partial" in repr(list(path.rglob("*")))
    else:
        with pytest.raises(InputError, match=r"not made completely|\.vkernel\.sha256 got lost"):
            study.load(path)
    study.run(SMALL, path, progress=False)
    assert files(path) == files(whole)


def test_a_folder_that_is_read_only(tmp_path: Path, whole: Path, writes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "folder" / "store"
    path.parent.mkdir()
    if os.geteuid() != 0:  # the system does not refuse root
        path.parent.chmod(0o555)
        try:
            with pytest.raises(InputError, match=r"cannot be written: Permission denied.*may write to"):
                study.run(SMALL, path, progress=False)
        finally:
            path.parent.chmod(0o755)
        assert list(path.parent.iterdir()) == []
    for number, after in ((errno.EROFS, writes + 10), (errno.EACCES, 3)):
        with monkeypatch.context() as locked:
            locked.setattr(Path, "replace", limited(after, number))
            with pytest.raises(InputError, match=f"{os.strerror(number)}.*may write to.*safe; run again"):
                study.run(SMALL, path, progress=False)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    import filelock

    before = digest(path)
    with monkeypatch.context() as locked:
        locked.setattr(filelock.FileLock, "acquire", refuse)
        with pytest.raises(InputError, match="Read-only file system"):
            study.run(SMALL, path, progress=False)
    assert digest(path) == before
    study.run(SMALL, path, progress=False)
    assert files(path) == files(whole)


# What is in it


def test_plain_xarray_needs_no_manual(whole: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ds = xr.open_zarr(whole, chunks=None)
        ds.load()
    assert set(ds.data_vars) == {"away", "nearest", "share", "gap", "density", "score", "done", "checksum"}
    same(ds.drop_dims("quantity"), study.load(whole))
    front = ("objective", "eps", "member")
    assert {n: ds[n].dims for n in ds.data_vars} == {
        "away": front,
        "nearest": front,
        "gap": front,
        "share": (*front, "point"),
        "density": (*front, "x"),
        "score": (*front, "time", "place"),
        "done": ("objective", "eps", "block"),
        "checksum": ("objective", "eps", "block", "quantity"),
    }
    assert set(ds.coords) == set(ds.sizes), "every dimension has its coordinate"
    for name, variable in ds.variables.items():
        assert len(variable.attrs["long_name"]) > 3, name
        assert variable.attrs["units"], name
    assert ds["objective"].values.tolist() == ["J1", "J0"]
    assert ds["eps"].values.tolist() == [1e-3, 1e-2]
    assert ds["eps"].attrs == {"long_name": "process.eps", "units": "unit of t"}
    assert ds["time"].values.tolist() == [0.1, 0.5]
    assert ds["member"].values.tolist() == [0, 1, 2, 3, 4]
    assert bool(ds["done"].all())
    assert float(ds["density"].sel(objective="J1", eps=1e-3, member=4, x=1.125)) >= 0
    assert ds.attrs["seed"] == 3
    assert ds.attrs["title"] == "small"
    assert ds.attrs["question"] == "does it last?"
    assert ds.attrs["vkernel"]
    assert ds.attrs["torch"]
    assert ds.attrs["revision"] == "unknown" or len(ds.attrs["revision"]) == 40
    assert json.loads(ds.attrs["vkernel_study"])["members"] == 5
    width = float(ds["x"][1] - ds["x"][0])
    inside = ds["density"].sum("x") * width
    assert bool((inside <= 1 + 1e-12).all())
    assert np.allclose(ds["share"].sum("point"), 1)


def test_a_text_coordinate_survives(tmp_path: Path) -> None:
    """Values that are no numbers are labelled by text, lists too."""
    vary = [["targets"], ["inputs", "targets", "init", "order"]]
    spec = FEW | {"grid": {"training.vary": vary, "model.features": ["gaussian", "fourier"]}}
    ds = study.run(spec, tmp_path / "s", progress=False)
    assert ds["vary"].values.tolist() == [json.dumps(v) for v in vary]
    assert ds["features"].values.tolist() == ["gaussian", "fourier"]


def test_other_blocks_to_rounding(tmp_path: Path, whole: Path) -> None:
    one = study.load(whole).load()
    for block in (1, 5, 64):
        other = study.run(SMALL | {"block": block}, tmp_path / str(block), progress=False)
        for name in set(one.data_vars) - {"done"}:
            assert np.allclose(one[name].values, other[name].values, rtol=1e-9, atol=1e-9), (block, name)


def test_a_study_that_is_done_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study.run(FEW, tmp_path / "s", progress=False)

    def times() -> dict[Path, int]:  # but that of the lock, which filelock below 4 touches
        return {p: p.stat().st_mtime_ns for p in (tmp_path / "s").rglob("*") if p.name != ".vkernel.lock"}

    before = times()
    monkeypatch.setattr(Store, "write", lambda *_: pytest.fail("nothing was missing"))
    study.run(FEW, tmp_path / "s", progress=False)
    assert before == times()


def test_blocks_that_are_missing(tmp_path: Path) -> None:
    spec = read(SMALL)
    with Store.open(tmp_path / "s", spec) as opened:
        missing = opened.missing()
        assert [(c.index, b) for c, b in missing] == [((i, j), b) for i in range(2) for j in range(2) for b in range(3)]
        assert bool(study.load(opened.path)["away"].isnull().all())
