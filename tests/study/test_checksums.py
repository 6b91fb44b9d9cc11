"""Damage of a store is noticed, named and repaired, whatever file it is in."""

from __future__ import annotations

import json
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from studies import SMALL, inf
from typer.testing import CliRunner

from vkernel import InputError, study
from vkernel.cli.commands import app
from vkernel.study.store import Store

STUDY = SMALL | {"grid": {"objective.K": [1, inf]}, "measure": {"bins": 12, "gap": [0.25, 0.75]}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "store"
    study.run(STUDY, path, progress=False)
    return path


@pytest.fixture
def store(tmp_path: Path, whole: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "store"))


def contents(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def noticed(path: Path, expected: xr.Dataset) -> str:
    """The sentence with which a store is refused; nothing if it holds the same numbers and attributes."""
    try:
        found = study.load(path).load()
    except InputError as error:
        return str(error)
    xr.testing.assert_identical(found, expected)
    return ""


def test_no_flipped_bit_is_unnoticed(store: Path, whole: Path) -> None:
    chance, expected = random.Random(0), study.load(whole).load()
    files = [file for file in sorted(store.rglob("*")) if file.is_file() and file.stat().st_size]
    for k in range(220):
        file = files[k % len(files)]
        before = file.read_bytes()
        bit = chance.randrange(8 * len(before))
        after = bytearray(before)
        after[bit // 8] ^= 1 << bit % 8
        file.write_bytes(after)
        assert noticed(store, expected), (file, bit)
        file.write_bytes(before)
    assert noticed(store, expected) == ""


def other_study(whole: Path) -> Path:
    path = whole.with_name("other")
    if not path.exists():
        study.run(STUDY | {"seed": 1}, path, progress=False)
    return path


def exchange(a: Path, b: Path) -> None:
    first, second = a.read_bytes(), b.read_bytes()
    assert first != second
    a.write_bytes(second)
    b.write_bytes(first)


DAMAGE: dict[str, Callable[[Path, Path], object]] = {
    "lost": lambda s, w: (s / "nearest/c/1/0").unlink(),
    "cut": lambda s, w: (s / "nearest/c/1/0").write_bytes((s / "nearest/c/1/0").read_bytes()[:-1]),
    "longer": lambda s, w: (s / "nearest/c/1/0").write_bytes((s / "nearest/c/1/0").read_bytes() + b"\0"),
    "empty": lambda s, w: (s / "nearest/c/1/0").write_bytes(b""),
    "garbage": lambda s, w: (s / "nearest/c/1/0").write_bytes(random.Random(0).randbytes(99)),
    "exchanged blocks": lambda s, w: exchange(s / "nearest/c/1/0", s / "nearest/c/1/1"),
    "exchanged conditions": lambda s, w: exchange(s / "nearest/c/0/0", s / "nearest/c/1/0"),
    "exchanged arrays": lambda s, w: exchange(s / "nearest/c/1/0", s / "gap/c/1/0"),
    "no checksums": lambda s, w: shutil.rmtree(s / "checksum/c"),
    "another flag": lambda s, w: (s / "done/c/1/0").write_bytes(b"\0"),
    "no array": lambda s, w: shutil.rmtree(s / "nearest"),
    "no metadata": lambda s, w: (s / "nearest/zarr.json").unlink(),
    "no coordinate": lambda s, w: shutil.rmtree(s / "x"),
    "other coordinate": lambda s, w: (s / "member/c/0").write_bytes((s / "block/c/0").read_bytes()),
    "no root": lambda s, w: (s / "zarr.json").unlink(),
    "half a root": lambda s, w: (s / "zarr.json").write_bytes((s / "zarr.json").read_bytes()[:900]),
    "other attributes": lambda s, w: (s / "zarr.json").write_text((s / "zarr.json").read_text().replace("small", "b")),
    "no list": lambda s, w: (s / ".vkernel.sha256").unlink(),
    "half a list": lambda s, w: (s / ".vkernel.sha256").write_text("\n".join(["0" * 64 + "  x"] * 3)),
    "empty list": lambda s, w: (s / ".vkernel.sha256").write_text(""),
    "no root, no list": lambda s, w: ((s / "zarr.json").unlink(), (s / ".vkernel.sha256").unlink()),
    "a block of another study": lambda s, w: [
        shutil.copytree(other_study(w) / n / "c", s / n / "c", dirs_exist_ok=True)
        for n in ("away", "nearest", "gap", "share", "density", "checksum", "done")
    ],
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_refused_and_repaired(store: Path, whole: Path, how: str) -> None:
    expected = study.load(whole).load()
    DAMAGE[how](store, whole)
    sentence = noticed(store, expected)
    assert sentence.startswith((f"{store} is damaged, ", f"The store at {store} was not made")), sentence
    assert f"'vkernel study run SPEC --store {store}'" in sentence
    assert "\n" not in sentence
    if how in ("lost", "cut", "longer", "empty", "garbage"):
        assert "files of 1 blocks changed or got lost: K = inf, members 0 to 1 (nearest)." in sentence
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        study.run(STUDY, store, progress=False)
    assert [str(w.message).endswith("computed again.") for w in caught] in ([], [True])
    assert contents(store) == contents(whole)


def test_a_lost_flag_loses_nothing(store: Path, whole: Path) -> None:
    (store / "done" / "c" / "0" / "1").unlink()
    assert noticed(store, study.load(whole).load()) == ""


@pytest.mark.parametrize("command", ["status", "show", "plot", "export"])
def test_every_command_refuses(store: Path, tmp_path: Path, command: str) -> None:
    (store / "gap" / "c" / "0" / "2").unlink()
    out = {"plot": ["--out", str(tmp_path / "a.png")], "export": ["--out", str(tmp_path / "a.csv")]}
    done = CliRunner().invoke(app, ["study", command, str(store), *out.get(command, [])])
    assert isinstance(done.exception, InputError)
    assert "K = 1, members 4 to 4 (gap)" in str(done.exception)
    assert [p.name for p in tmp_path.iterdir()] == ["store"]


def test_many_damaged_blocks_are_counted(store: Path) -> None:
    shutil.rmtree(store / "gap" / "c")
    with pytest.raises(InputError, match=r"files of 6 blocks .* and 2 more\."):
        study.load(store)


def test_another_study_on_a_damaged_store(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused, and so is a repair by a version that would make other files; nothing is changed."""
    for name, change, why in (
        ("x/zarr.json", {"seed": 9}, "differs in seed"),
        ("zarr.json", {"seed": 9}, "does not make the same one"),
        (".vkernel.sha256", {"seed": 9}, "does not make the same one"),
    ):
        before = (store / name).read_bytes()
        (store / name).write_bytes(before[:-9])
        damaged = contents(store)
        with pytest.raises(InputError, match=why):
            study.run(STUDY | change, store, progress=False)
        assert contents(store) == damaged
        (store / name).write_bytes(before)
    (store / "zarr.json").write_bytes(b"{}")
    damaged = contents(store)
    monkeypatch.setattr("vkernel.study.store.__version__", "99.0")
    with pytest.raises(InputError, match=r"vkernel 99\.0 does not make the same one.*Nothing was changed"):
        study.run(STUDY, store, progress=False)
    assert contents(store) == damaged


def test_members_that_diverged_have_no_file(tmp_path: Path) -> None:
    """A chunk of NaN is not stored: its absence is what the checksum is of."""
    spec = study.read(STUDY | {"grid": {}})
    with Store.open(tmp_path / "s", spec) as opened:
        for condition, block in opened.missing():
            opened.write(condition, block, dict.fromkeys(opened.blocks.quantities, np.array(np.nan)))
    assert not (tmp_path / "s" / "away" / "c").exists()
    found = study.load(tmp_path / "s")
    assert bool(found["done"].all())
    (tmp_path / "s" / "away" / "c").mkdir()
    (tmp_path / "s" / "away" / "c" / "0").write_bytes(b"appeared")
    with pytest.raises(InputError, match=r"the one condition, members 0 to 1 \(away\)"):
        study.load(tmp_path / "s")


ODD = [
    "5",
    "null",
    "[]",
    "{}",
    '"x"',
    '"[]"',
    '"{}"',
    '"5"',
    json.dumps("[" * 9000),
    '{"a": 1}',
    json.dumps("9" * 5000),
]
KEYS = ["vkernel_study", "results"]
ODD += [json.dumps(json.dumps({"title": "t", "members": m, "block": 1, "data": {"name": "pair"}})) for m in (4, 10**30)]


@pytest.mark.parametrize(("odd", "key"), [(odd, key) for odd in ODD for key in KEYS])
def test_odd_attributes_of_a_store_without_checksums(store: Path, odd: str, key: str) -> None:
    """Such a store can be read, but its attributes can be anything."""
    (store / ".vkernel.sha256").unlink()
    (store / ".vkernel.lock").unlink()
    shutil.rmtree(store / "checksum")
    root = json.loads((store / "zarr.json").read_text())
    del root["consolidated_metadata"]["metadata"]["checksum"]
    root["attributes"][key] = json.loads(odd)
    (store / "zarr.json").write_text(json.dumps(root))
    before = contents(store)
    if key == "vkernel_study":
        with pytest.raises(InputError):
            study.load(store)
    else:
        with pytest.warns(UserWarning, match="no checksums"):
            study.load(store)
    with pytest.raises(InputError):
        study.run(STUDY, store, progress=False)
    assert contents(store) == before
