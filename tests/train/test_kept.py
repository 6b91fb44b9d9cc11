"""Trainings that are killed and started again: the result is that of one that was not, bit for bit."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.train.models import kept, network
from vkernel.train.models.mlp import MLP
from vkernel.train.models.step import Plain
from vkernel.train.models.unet import UNet

PROCESS = vk.VP(eps=0.01)
POINTS = torch.tensor([[-1.0, 0.0], [1.0, 0.5], [0.2, 1.0]], dtype=torch.float64)
IMAGES = torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
SMALL = {"width": 8, "depth": 2, "steps": 12, "batch": 4, "lr": 1e-2}
GOALS = ["J0", vk.JC(10.0)]
OPTIONS = {"members": 3, "snapshots": [4, 9]}


class Killed(BaseException):
    pass


def trained(model, points=POINTS, goals=GOALS, **options) -> list[vk.Ensemble]:
    return vk.train_ensembles(model, points, PROCESS, goals, **OPTIONS | options)


def same(found: list[vk.Ensemble], known: list[vk.Ensemble]) -> bool:
    def equal(a, b):
        return a.state.keys() == b.state.keys() and all(torch.equal(p, b.state[k]) for k, p in a.state.items())

    pairs = list(zip(found, known, strict=True))
    pairs += [(a.snapshots[k], b.snapshots[k]) for a, b in pairs for k in a.snapshots | b.snapshots]
    return all(equal(a, b) and a.info == b.info for a, b in pairs)


def killed_after(steps: int, patch: pytest.MonkeyPatch) -> None:
    """Let a training end without notice after so many more steps."""
    count, true = [0], Plain.__call__

    def step(*given):
        count[0] += 1
        if count[0] > steps:
            raise Killed
        true(*given)

    patch.setattr(Plain, "__call__", step)


@pytest.mark.parametrize("often", [True, False], ids=["at every step", "at snapshots"])
@pytest.mark.parametrize("draws", [None, 14])
@pytest.mark.parametrize("options", [{"ema": 0.9, "chunk": 2}, {"optimiser": "sgd", "decay": "cosine"}], ids=str)
def test_a_training_continues_where_it_was_killed(options, draws, often, tmp_path, monkeypatch):
    model = MLP(**SMALL | options)
    monkeypatch.setitem(network.DRAWN, "cpu", 3 * 2 * 4 * 5)  # blocks of 5 steps of fresh draws
    known = trained(model, draws=draws)
    monkeypatch.setattr(kept, "SECONDS", 0.0 if often else 60.0)
    kills = 0
    while True:
        with monkeypatch.context() as patch:
            killed_after(6 if often else 10, patch)
            try:
                found = trained(model, draws=draws, checkpoint=tmp_path / "run")
                break
            except Killed:
                kills += 1
        assert kills < 9
    assert kills >= 1
    assert same(found, known)
    with monkeypatch.context() as patch:  # it is complete: nothing is trained again
        killed_after(0, patch)
        assert same(trained(model, draws=draws, checkpoint=tmp_path / "run"), known)


def test_unets_with_dropout_and_labels_continue(tmp_path, monkeypatch):
    model = UNet((8, 8), steps=4, batch=4, dropout=0.2, classes=2)
    options = {"labels": [0, 1, 0, 1, 1], "flips": True, "snapshots": [2], "members": 2}
    known = trained(model, IMAGES, **options)
    with monkeypatch.context() as patch:
        killed_after(3, patch)
        with pytest.raises(Killed):
            trained(model, IMAGES, **options, checkpoint=tmp_path / "run")
    assert same(trained(model, IMAGES, **options, checkpoint=tmp_path / "run"), known)


SCRIPT = """
import os, signal, sys, torch, vkernel as vk
from vkernel.train.models import kept
points = torch.tensor([[-1.0, 0.0], [1.0, 0.5], [0.2, 1.0]], dtype=torch.float64)
model = vk.models.MLP(16, 2, steps=30, batch=8, ema=0.99)
where, left = sys.argv[1:] or None, [24]

def write(*given, true=kept.write):
    left[0] -= 1
    return true(*given) if left[0] else os.kill(os.getpid(), signal.SIGKILL)

if where:
    kept.SECONDS, kept.write = 0.0, write
options = {"members": 2, "snapshots": [5], "checkpoint": where and where[0]}
found = vk.train_ensembles(model, points, vk.VP(eps=0.01), ["J0", "J1"], **options)
"""


def test_a_process_that_is_killed_leaves_a_checkpoint_that_continues(tmp_path, monkeypatch):
    """SIGKILL between the files of a checkpoint; another process continues from the one before."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path / "run")], env=env, check=False)
    assert process.returncode == -signal.SIGKILL
    held = json.loads((tmp_path / "run" / "0.json").read_text())["step"]
    files = {path.name for path in (tmp_path / "run").glob("0-run-*")}
    assert files == {f"0-run-{held}.safetensors", f"0-run-{held + 1}.safetensors"}  # the second one is not listed yet
    monkeypatch.setattr(sys, "argv", ["-c"])
    known = {}
    exec(SCRIPT, known)
    options = known["options"] | {"checkpoint": tmp_path / "run"}
    again = vk.train_ensembles(known["model"], known["points"], PROCESS, ["J0", "J1"], **options)
    assert same(again, known["found"])
    assert {path.name for path in (tmp_path / "run").glob("0-run-*")} == {"0-run-30.safetensors"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A training that was killed after 9 of 12 steps."""
    folder = tmp_path_factory.mktemp("kept") / "run"
    with pytest.MonkeyPatch.context() as patch:
        killed_after(10, patch)
        with pytest.raises(Killed):
            trained(MLP(**SMALL), checkpoint=folder)
    return folder


@pytest.fixture
def folder(checkpoint, tmp_path) -> Path:
    return shutil.copytree(checkpoint, tmp_path / "copy")


def test_what_a_killed_write_left_is_removed(folder, tmp_path):
    (tmp_path / "new").mkdir()
    for place in (folder, tmp_path / "new"):
        (place / ".vkernel-0123").write_text("half")
        trained(MLP(**SMALL), checkpoint=place)
        assert sorted(path.name for path in place.iterdir() if path.suffix == ".json") == ["0.json", "training.json"]
        assert not list(place.glob(".*"))


def test_files_are_few_and_no_pickles(folder):
    names = sorted(path.name for path in folder.iterdir())
    files = [f"0-{name}.safetensors" for name in ("run-9", "snapshot-4", "snapshot-9")]
    assert names == [*files, "0.json", "training.json"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": 1}, r"other seed \(0 there, 1 here\)"),
        ({"goals": ["J0", "J1"]}, "other objectives"),
        ({"snapshots": [4]}, "other snapshots"),
        ({"members": 2}, "other members"),
        ({"draws": 20}, "other draws"),
        ({"points": POINTS + 1e-9}, "other data"),
        ({"model": MLP(**SMALL | {"lr": 0.02})}, r"other lr \(0.01 there, 0.02 here\)"),
        ({"model": MLP(**SMALL, weight=lambda t: t)}, r"other weight \(None there, 'function' here\)"),
        ({"times": lambda u: 0.01 + 0.99 * u**2}, "other times.*process, weights, times or labels"),
        ({"vary": ["init"]}, "other vary"),
    ],
    ids=["seed", "objectives", "snapshots", "members", "draws", "data", "lr", "weight", "times", "vary"],
)
def test_a_checkpoint_of_another_training_is_refused(folder, change, says):
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(InputError, match=says):
        trained(**{"model": MLP(**SMALL), "checkpoint": folder} | change)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("name", ["0-run-9.safetensors", "0-snapshot-4.safetensors", "0.json", "training.json"])
@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "foreign", "gone"])
def test_damaged_files_are_refused(folder, name, damage):
    path = folder / name
    raw = path.read_bytes()
    flipped = bytes([raw[-9] ^ 1])
    new = {"empty": b"", "cut": raw[: len(raw) // 2], "flipped": raw[:-9] + flipped + raw[-8:], "foreign": b"[1]"}
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(new[damage])
    if (name, damage) == ("0.json", "gone"):  # as before the first write: from the beginning
        assert same(trained(MLP(**SMALL), checkpoint=folder), trained(MLP(**SMALL)))
        return
    with pytest.raises(InputError, match=r"Remove .* or give another|no checkpoint|another training"):
        trained(MLP(**SMALL), checkpoint=folder)


def test_parameters_of_another_model_are_refused_though_their_hash_fits(folder):
    from safetensors.torch import load_file, save_file

    path, about = folder / "0-run-9.safetensors", json.loads((folder / "0.json").read_text())
    for change in ({"state/layers.0.bias": torch.zeros(6, 9)}, {"weights/x": torch.zeros(2)}):
        save_file(load_file(folder / "0-run-9.safetensors") | change, path)
        about["files"]["run-9"] = kept.hashlib.sha256(path.read_bytes()).hexdigest()
        (folder / "0.json").write_text(json.dumps(about))
        with pytest.raises(InputError, match="damaged"):
            trained(MLP(**SMALL), checkpoint=folder)


def test_a_full_disk_does_not_end_the_training(tmp_path, monkeypatch):
    known, true = trained(MLP(**SMALL)), kept.write

    def full(path, content):
        if "run-9" in str(path) or "snapshot-9" in str(path):
            raise InputError(f"Cannot write {path}: {os.strerror(errno.ENOSPC)}.")
        return true(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(kept, "write", full)
        with pytest.warns(UserWarning, match=r"No space left.*goes on"):
            found = trained(MLP(**SMALL), checkpoint=tmp_path / "run")
    assert same(found, known)
    assert same(trained(MLP(**SMALL), checkpoint=tmp_path / "run"), known)


def test_places_that_hold_no_checkpoint_are_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    for place, says in ((tmp_path / "file", "is a file"), (tmp_path, "other files"), (3, "named by text")):
        with pytest.raises(InputError, match=says):
            trained(MLP(**SMALL), checkpoint=place)
    assert (tmp_path / "file").read_text() == "mine"
    linear = vk.models.Linear(vk.features.grid("gaussian", 4, 2, -1.5, 1.5, PROCESS), "x0", 0.1)
    with pytest.raises(InputError, match="Checkpoints are of networks"):
        trained(linear, draws=10, snapshots=(), checkpoint=tmp_path / "run")
