"""Snapshots of a training are trainings stopped there; objectives trained together are those trained alone."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.train.models.mlp import MLP
from vkernel.train.models.unet import UNet

PROCESS = vk.VP(eps=0.01)
POINTS = torch.tensor([[-1.0, 0.0], [1.0, 0.5], [0.2, 1.0]], dtype=torch.float64)
IMAGES = torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
SMALL = {"width": 8, "depth": 2, "steps": 12, "batch": 4, "lr": 1e-2}
GOALS = ["J0", "J1", vk.JC(10.0), vk.JK(3)]


def trained(model, points=POINTS, members=3, **options) -> vk.Ensemble:
    return vk.train_ensemble(model, points, PROCESS, members=members, **options)


def equal(a: vk.Ensemble, b: vk.Ensemble) -> bool:
    return a.state.keys() == b.state.keys() and all(torch.equal(a.state[k], b.state[k]) for k in a.state)


@pytest.mark.parametrize("options", [{}, {"ema": 0.8}, {"optimiser": "sgd"}, {"chunk": 2}], ids=str)
@pytest.mark.parametrize("draws", [None, 10])
def test_a_snapshot_is_a_training_stopped_there(options, draws):
    found = trained(MLP(**SMALL | options), draws=draws, snapshots=(12, 5, 1))
    assert list(found.snapshots) == [1, 5, 12]
    assert equal(found, trained(MLP(**SMALL | options), draws=draws))
    for step, kept in found.snapshots.items():
        assert equal(kept, trained(MLP(**SMALL | options | {"steps": step}), draws=draws))


def test_norms_are_means_over_the_steps_between_snapshots():
    """By snapshots at every step: without averaging, updates are differences, and SGD's are lr times the gradient."""
    for optimiser in ("adam", "sgd"):
        model = MLP(**SMALL | {"optimiser": optimiser, "chunk": 2})
        start = model.initial(vk.train.objectives.Training(POINTS, PROCESS, "J1", None), range(3))
        every = trained(model, snapshots=range(1, 13))
        path = [start, *(every.snapshots[k].state for k in range(1, 13))]
        flat = torch.stack([torch.cat([a.flatten(1) for a in state.values()], 1) for state in path])
        moved = (flat[1:] - flat[:-1]).norm(dim=2)  # (step, member)
        found = trained(model, snapshots=[4, 5])
        assert found.info["steps"] == [4, 5, 12]
        want = torch.stack([moved[:4].mean(0), moved[4], moved[5:].mean(0)], 1)
        got = torch.tensor(found.info["update_norm"])
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-7)
        if optimiser == "sgd":
            torch.testing.assert_close(torch.tensor(found.info["gradient_norm"]) * model.lr, got, rtol=1e-3, atol=1e-7)
    assert found.select([2, 0]).info["update_norm"] == [found.info["update_norm"][m] for m in (2, 0)]
    assert "steps" not in trained(model).info


@pytest.mark.parametrize("draws", [None, 10])
def test_objectives_together_are_those_alone_bit_for_bit(draws):
    small = UNet((8, 8), steps=4, batch=4, dropout=0.1)
    for model, points in ((MLP(**SMALL | {"chunk": 2, "ema": 0.9}), POINTS), (small, IMAGES)):
        goals = GOALS if points is POINTS else GOALS[:2]
        options = {"draws": draws, "snapshots": [2], "members": 3 if points is POINTS else 2}
        together = vk.train_ensembles(model, points, PROCESS, goals, **options)
        for goal, found in zip(goals, together, strict=True):
            alone = trained(model, points, objective=goal, **options)
            assert equal(found, alone)
            assert equal(found.snapshots[2], alone.snapshots[2])
            assert found.info == alone.info
        start, other = together[0].state, together[1].state
        assert not all(torch.equal(start[k], other[k]) for k in start)


def test_linear_models_take_several_objectives_too():
    model = vk.models.Linear(vk.features.grid("gaussian", 4, 2, -1.5, 1.5, PROCESS), "x0", 0.1)
    parts = []
    options = {"members": 2, "draws": 20, "progress": lambda label, share: parts.append(share)}
    together = vk.train_ensembles(model, POINTS, PROCESS, ["J0", "J1"], **options)
    assert all(
        equal(a, trained(model, members=2, draws=20, objective=k)) for a, k in zip(together, ("J0", "J1"), strict=True)
    )


def test_snapshots_are_saved_and_loaded(tmp_path):
    found = trained(MLP(**SMALL), snapshots=(3, 12))
    again = vk.load_ensemble(found.save(tmp_path / "a"))
    assert list(again.snapshots) == [3, 12]
    assert again.info == found.info
    for step in (3, 12):
        assert equal(again.snapshots[step], found.snapshots[step])
        assert again.snapshots[step].info == found.snapshots[step].info
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["ensemble.json", "state.safetensors", "step-3"]
    picked = vk.load_ensemble(found.select([2, 0]).save(tmp_path / "b"))
    assert equal(picked.snapshots[3], found.snapshots[3].select([2, 0]))


def test_damaged_snapshots_are_refused(tmp_path):
    folder = trained(MLP(**SMALL), snapshots=(3, 12)).save(tmp_path / "a")
    other = trained(MLP(**SMALL), snapshots=(3,), seed=1).save(tmp_path / "b")
    shutil.copytree(other / "step-3", folder / "step-3", dirs_exist_ok=True)
    with pytest.raises(InputError, match=r"after 3 steps.*another training"):
        vk.load_ensemble(folder)
    (folder / "step-3" / "state.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match="damaged"):
        vk.load_ensemble(folder)
    shutil.rmtree(folder / "step-3")
    with pytest.raises(InputError, match="no ensemble in"):
        vk.load_ensemble(folder)
    about = json.loads((folder / "ensemble.json").read_text())
    for bad in ([3], {"../b": "x"}, 3):
        (folder / "ensemble.json").write_text(json.dumps(about | {"snapshots": bad}))
        with pytest.raises(InputError, match="snapshots are invalid"):
            vk.load_ensemble(folder)


@pytest.mark.parametrize("bad", [[13], [0], [-1], [2, 2], [1.5], [True], 3, "12", ["a"], None, {1: 2}], ids=str)
def test_bad_snapshots_are_refused(bad):
    with pytest.raises(InputError, match="snapshot"):
        trained(MLP(**SMALL), snapshots=bad)


def test_models_without_steps_have_no_snapshots():
    linear = vk.models.Linear(vk.features.grid("gaussian", 4, 2, -1.5, 1.5, PROCESS), "x0", 0.1)
    for model in (linear, vk.models.Lazy(vk.models.NTK(2))):
        for given in ([3], 3):
            with pytest.raises(InputError, match="Snapshots are of networks"):
                trained(model, draws=10, snapshots=given)


@pytest.mark.parametrize("bad", ["J0", [], None, ["J7"]], ids=str)
def test_bad_objectives_are_refused(bad):
    with pytest.raises(InputError, match="objective"):
        vk.train_ensembles(MLP(**SMALL), POINTS, PROCESS, bad, members=2)
