"""Saved ensembles: they come back bit for bit; damaged and untrusted files are refused."""

from __future__ import annotations

import json
import math
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from ensembles import broken, places
from safetensors.torch import load_file, save_file

import vkernel as vk
from vkernel.core.errors import InputError

# -------------------- files


def test_saved_ensembles_come_back_bit_for_bit(ens, tmp_path):
    folder = ens.save(tmp_path / "new" / "folder")
    assert sorted(p.name for p in folder.iterdir()) == ["ensemble.json", "state.safetensors"]
    back = vk.load_ensemble(str(folder))
    assert list(map(repr, (back.model, back.process))) == list(map(repr, (ens.model, ens.process)))
    assert back.process == ens.process
    assert (back.shape, back.info) == (ens.shape, ens.info)
    assert set(back.state) == set(ens.state)
    for name, a in ens.state.items():
        assert torch.equal(back.state[name], a)
        assert back.state[name].dtype == a.dtype
    x = places(ens, 4)
    assert torch.equal(back(x, 0.3), ens(x, 0.3))


@pytest.mark.parametrize("kind", ["linear", "fourier", "random", "lazy", "mlp"])
def test_ensembles_of_0_1_load_with_their_scores(kind, tmp_path):
    """Folders and scores written by version 0.1: three linear models, a lazy one and an MLP."""
    with zipfile.ZipFile(Path(__file__).parent / "data" / "ensembles-0.1.zip") as archive:
        archive.extractall(tmp_path)
    ens = vk.load_ensemble(tmp_path / kind)
    then = load_file(tmp_path / kind / "expected.safetensors")
    torch.testing.assert_close(ens(then["x"], 0.3), then["scores"], rtol=1e-6, atol=1e-6)
    assert ens.sample(4, steps=5).shape == (len(ens), 4, 1)


def test_diverged_members_survive_a_file(line, tmp_path):
    back = vk.load_ensemble(broken(line, {3: math.nan}).save(tmp_path))
    assert back.diverged == [3]


@pytest.fixture
def folder(line, tmp_path) -> Path:
    return line.save(tmp_path / "ens")


def refused(folder: Path, says: str) -> None:
    with pytest.raises(InputError, match=says):
        vk.load_ensemble(folder)


def test_damaged_files_are_refused(folder, tmp_path):
    refused(tmp_path / "nowhere", "no ensemble")
    text, raw = (folder / "ensemble.json").read_text(), (folder / "state.safetensors").read_bytes()
    for bad in ("", "{", text[: len(text) // 2]):
        (folder / "ensemble.json").write_text(bad)
        refused(folder, "not JSON")
    (folder / "ensemble.json").write_bytes(b"\xff\xfe\x00")
    refused(folder, "not JSON")
    (folder / "ensemble.json").write_text(text)
    for bad in (b"", raw[:7], raw[: len(raw) // 2], raw[:-1], b"\xff" * 64):
        (folder / "state.safetensors").write_bytes(bad)
        refused(folder, "damaged")
    (folder / "state.safetensors").unlink()
    refused(folder, "no ensemble")


def test_json_of_another_kind_is_refused(folder):
    about = json.loads((folder / "ensemble.json").read_text())
    others = [[], None, 3, "text", {}, {"kind": "study"}]
    for key in ("model", "process", "shape", "info"):
        others.append({k: v for k, v in about.items() if k != key})
        others += [{**about, key: bad} for bad in (3, "text", ["a", "b"])]
    others += [
        {**about, "model": {**about["model"], "kind": "transformer"}},
        {**about, "model": {**about["model"], "depth": 3}},
        {**about, "model": {**about["model"], "features": {"kind": "grid", "axes": [["gaussian", 4]]}}},
        {**about, "model": {**about["model"], "features": {"kind": "wavelets"}}},
        {**about, "process": {"kind": "vp", "beta_mean": 1}},
    ]
    for other in others:
        (folder / "ensemble.json").write_text(json.dumps(other))
        with pytest.raises(InputError):
            vk.load_ensemble(folder)


def test_weights_that_do_not_fit_their_model_are_refused(folder):
    about = json.loads((folder / "ensemble.json").read_text())
    del about["sha256"]  # as 0.1 wrote it
    (folder / "ensemble.json").write_text(json.dumps(about))
    state = load_file(folder / "state.safetensors")
    for other in (
        {f"other {k}": a for k, a in state.items()},
        {k: a[:, :1].contiguous() for k, a in state.items()},
        {k: a.int() for k, a in state.items()},
    ):
        save_file(other, folder / "state.safetensors")
        refused(folder, "does not describe an ensemble")


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


def test_a_pickle_in_disguise_is_refused_and_not_run(folder, tmp_path):
    mark = tmp_path / "ran"
    for name in ("state.safetensors", "ensemble.json"):
        kept = (folder / name).read_bytes()
        (folder / name).write_bytes(pickle.dumps(Evil(mark)))
        refused(folder, "damaged" if name.startswith("state") else "not JSON")
        torch.save({"a": Evil(mark)}, folder / name)
        refused(folder, "damaged" if name.startswith("state") else "not JSON")
        (folder / name).write_bytes(kept)
    assert not mark.exists()
    assert len(vk.load_ensemble(folder)) == 6


def test_tensors_that_are_no_state_are_refused(folder):
    from safetensors.torch import save_file

    about = json.loads((folder / "ensemble.json").read_text())
    del about["sha256"]  # written by an earlier version
    (folder / "ensemble.json").write_text(json.dumps(about))
    assert len(vk.load_ensemble(folder)) == 6
    for bad in ({"a": torch.zeros(2, 1), "b": torch.zeros(3, 1)}, {"a": torch.zeros(())}, {}):
        save_file(bad, folder / "state.safetensors")
        with pytest.raises(InputError, match="member"):
            vk.load_ensemble(folder)


def test_a_place_that_cannot_be_written_is_refused(line, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file, not a folder"):
        line.save(tmp_path / "file" / "ens")


def test_saving_that_fails_leaves_the_old_files(line, folder, monkeypatch):
    before = {p.name: p.read_bytes() for p in folder.iterdir()}

    def full(self, target):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(InputError, match="No space left"):
            line[:2].save(folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_saving_that_is_killed_between_its_files_is_noticed(line, folder, monkeypatch):
    plain = Path.replace

    def killed(self, target):
        if Path(target).name == "ensemble.json":
            raise KeyboardInterrupt
        return plain(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            line[:2].save(folder)
    assert len(list(folder.iterdir())) == 2  # nothing half-written lies about
    refused(folder, "do not belong together")
    line[:2].save(folder)
    assert len(vk.load_ensemble(folder)) == 2
