"""The command line: what a stranger types, and what an attacker does."""

from __future__ import annotations

import gzip
import json
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from command import Left

from vkernel import __version__
from vkernel.cli import commands

Run = Callable[..., Left]
Refused = Callable[..., str]


def test_profile_of_a_csv(vkernel: Run, tmp_path: Path) -> None:
    points = tmp_path / "points.csv"
    points.write_text("x,y\n0,0\n1,0\n0,1\n1,1\n5,5\n")
    got = vkernel("profile", points, "--json", tmp_path / "p.json", "--html", tmp_path / "p.html", "--queries", 32)
    assert got.code == 0, got.err
    assert "5 points in 2 dimensions" in got.out
    found = json.loads((tmp_path / "p.json").read_text())
    assert found["isolated"][0]["index"] == 4
    assert found["vkernel"] == __version__
    assert "<html" in (tmp_path / "p.html").read_text()


def test_quiet_prints_only_what_it_wrote(vkernel: Run, tmp_path: Path) -> None:
    got = vkernel("profile", "toy:pair", "-q", "--queries", 16, "--json", tmp_path / "p.json")
    assert got.out.strip() == f"wrote {tmp_path / 'p.json'}"
    assert got.err == ""


def test_version_and_help(vkernel: Run) -> None:
    assert __version__ in vkernel("--version").out
    assert "reproduce" in vkernel("--help").out
    assert "--process" in vkernel("profile", "--help").out
    assert vkernel().code == 2
    module = subprocess.run([sys.executable, "-m", "vkernel", "--version"], capture_output=True, text=True, check=True)
    assert __version__ in module.stdout


def test_wrong_arguments(refused: Refused) -> None:
    assert "DATA" in refused("profile")
    assert "nope" in refused("nope")
    assert "--nope" in refused("profile", "toy:pair", "--nope")
    assert "vp" in refused("profile", "toy:pair", "--process", "nope")
    assert "hexagon" in refused("profile", "toy:nope")
    refused("profile", "toy:pair", "--queries", "many")
    refused("profile", "toy:pair", "--queries", 1)
    refused("profile", "toy:pair", "--device", "nope")
    refused("profile", "toy:pair", "--device", "cuda:99")
    refused("profile", "toy:pair", "--process", "vp:eps=2")
    refused("profile", "toy:pair", "--memory", "-1")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite(refused: Refused, tmp_path: Path, value: float) -> None:
    path = tmp_path / "bad.npy"
    np.save(path, np.array([[0.0, 1.0], [value, 2.0]]))
    assert "1" in refused("profile", path)


def test_files_without_data(refused: Refused, tmp_path: Path) -> None:
    empty = tmp_path / "empty.npy"
    np.save(empty, np.zeros((0, 3)))
    refused("profile", empty)
    refused("profile", tmp_path / "missing.npy")
    strange = tmp_path / "data.xyz"
    strange.write_text("hello")
    refused("profile", strange)
    nothing = tmp_path / "nothing.csv"
    nothing.write_text("")
    refused("profile", nothing)
    idx = struct.pack(">IIII", 0x803, 10, 28, 28) + bytes(100)
    for name, raw in {"t-images-idx3-ubyte": idx, "t-images-idx3-ubyte.gz": gzip.compress(idx)}.items():
        (tmp_path / name).write_bytes(raw)
        refused("profile", tmp_path / name)


class Hostile:
    """A pickle that would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple:
        return open, (self.path, "w")


def test_a_pickle_that_runs_code_does_not(refused: Refused, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    for name in ("evil.pt", "evil.pth", "evil.npy"):
        path = tmp_path / name
        if name.endswith("npy"):
            np.save(path, np.array([Hostile(mark)], dtype=object), allow_pickle=True)
        else:
            path.write_bytes(pickle.dumps(Hostile(mark)))
        refused("profile", path)
        assert not mark.exists()


def test_interrupt_is_reported_and_is_no_success(vkernel: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Typer turns Ctrl-C into a return value; a chained command must not go on."""

    def interrupted(**_: object) -> int:
        return 130

    monkeypatch.setattr(commands, "app", interrupted)
    assert vkernel() == Left(130, "", "vkernel: stopped.\n")
