"""The callback and the example for PyTorch Lightning, under both names of the package."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from loops import EXAMPLES, TINY, Loss, Nothing, equal, kinds_of, often, run_example, steps_of
from torch import Tensor

import vkernel as vk
from vkernel.adapters.lightning import NAMES, MonitorCallback
from vkernel.core.errors import InputError

NAME = "lightning.py"
PROCESS = vk.VPSong()
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module", params=NAMES)
def pl(request: pytest.FixtureRequest) -> object:
    return pytest.importorskip(request.param, reason="PyTorch Lightning is installed by the extra loops")


def fit(pl: object, steps: int, callbacks: list[object], resume: str | None = None, **options: object) -> object:
    """Train a small module; return it."""

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Loss(PROCESS)

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return self.model(batch[0])["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 1e-3)

    pl.seed_everything(0, verbose=False)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    quiet |= {"enable_checkpointing": False}
    module, images = Module(), vk.data.digits()[:128].reshape(-1, 1, 8, 8)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images), 16, shuffle=True)
    trainer = pl.Trainer(max_steps=steps, callbacks=callbacks, **(quiet | options))
    trainer.fit(module, loader, ckpt_path=resume)
    return module


def watch(log: Path, every: int = 4) -> vk.Monitor:
    images = vk.data.digits()[:192].reshape(-1, 1, 8, 8)
    return often(images[:128], PROCESS, test=images[128:], predicts="x0", every=every, log=log)


@pytest.mark.parametrize("more", [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}], ids=str)
def test_weights_are_equal_bit_for_bit(pl: object, more: dict[str, object], tmp_path: Path) -> None:
    alone = fit(pl, 12, [], **more)
    callback = MonitorCallback(watch(tmp_path), network=lambda module: module.model.net)
    assert isinstance(callback, pl.Callback)
    assert isinstance(callback, MonitorCallback)
    assert equal(fit(pl, 12, [callback], **more), alone)
    assert steps_of(tmp_path) == [0, 4, 8, 12]
    assert kinds_of(tmp_path) == ["start", *["evaluation"] * 4, "end"]


def test_a_resumed_run_continues_its_curves(pl: object, tmp_path: Path) -> None:
    saves = pl.callbacks.ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=4, save_top_k=0)
    options = {"enable_checkpointing": True}
    fit(pl, 8, [MonitorCallback(watch(tmp_path), lambda module: module.model.net), saves], **options)
    callback = MonitorCallback(watch(tmp_path), lambda module: module.model.net)
    fit(pl, 16, [callback], str(tmp_path / "last.ckpt"), **options, default_root_dir=tmp_path)
    assert steps_of(tmp_path) == [0, 4, 8, 12, 16]
    assert kinds_of(tmp_path).count("start") == kinds_of(tmp_path).count("end") == 2


def test_an_exception_closes_the_log(pl: object, tmp_path: Path) -> None:
    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer: object, *_: object) -> None:
            if trainer.global_step == 5:
                raise RuntimeError("stop here")

    callback = MonitorCallback(watch(tmp_path), lambda module: module.model.net)
    with pytest.raises(RuntimeError, match="stop here"):
        fit(pl, 12, [callback, Stop()])
    assert kinds_of(tmp_path) == ["start", "evaluation", "evaluation", "end"]


def test_functions_that_fail_are_refused_before_training_and_warned_of_in_it(pl: object, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"network= or ema= of the callback fails on Module: AttributeError"):
        fit(pl, 12, [MonitorCallback(watch(tmp_path), lambda module: module.absent)])
    calls = []

    def later(module: object) -> object:
        calls.append(module)
        if len(calls) > 3:
            raise KeyError("gone")
        return module.model.net

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fit(pl, 6, [MonitorCallback(watch(tmp_path), later)])
    assert sum("gone" in str(w.message) for w in seen) == 1


def test_the_callback_is_pickled_with_its_monitor(pl: object) -> None:
    callback = MonitorCallback(Nothing(log="."))
    again = pickle.loads(pickle.dumps(callback))
    assert type(again) is type(callback)
    assert isinstance(again, pl.Callback)


def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pytorch_lightning", reason="PyTorch Lightning is installed by the extra loops")
    pytest.importorskip("diffusers")
    run_example(NAME, tmp_path / "a", "--steps", "10", patch=monkeypatch)
    run_example(NAME, tmp_path / "b", "--steps", "10", patch=monkeypatch, monitor=Nothing)
    weights = [torch.load(tmp_path / run / "last.ckpt", weights_only=True)["state_dict"] for run in ("a", "b")]
    assert equal(*weights)
    assert steps_of(tmp_path / "a") == [0, 5, 10]
    run_example(NAME, tmp_path / "a", "--steps", "15", "--resume", f"{tmp_path}/a/last.ckpt", patch=monkeypatch)
    assert steps_of(tmp_path / "a") == [0, 5, 10, 15]


def test_the_example_with_two_processes(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning", reason="PyTorch Lightning is installed by the extra loops")
    pytest.importorskip("diffusers")
    script = [str(EXAMPLES / NAME), *TINY, "--log", str(tmp_path), "--steps", "5", "--devices", "2"]
    one = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *script], env=one, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert steps_of(tmp_path)[0] == 0
    assert kinds_of(tmp_path).count("start") == kinds_of(tmp_path).count("end") == 1  # rank 0 alone


def test_both_packages_may_be_imported() -> None:
    packages = [pytest.importorskip(name) for name in NAMES]
    callback = MonitorCallback(Nothing(log="."))
    assert all(isinstance(callback, importlib.import_module(p.__name__).Callback) for p in packages)
