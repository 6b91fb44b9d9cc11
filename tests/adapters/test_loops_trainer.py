"""The callback for the Trainer of transformers: equal weights, and a resumed run continues its curves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from loops import Loss, equal, kinds_of, often, steps_of
from torch import Tensor, nn

import vkernel as vk
from vkernel.adapters.trainer import MonitorCallback
from vkernel.core.errors import InputError

PROCESS = vk.VPSong()
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def transformers() -> object:
    pytest.importorskip("accelerate", reason="accelerate is installed by the extra loops")
    return pytest.importorskip("transformers", reason="transformers is installed by the extra loops")


class Images(torch.utils.data.Dataset):
    def __init__(self, images: Tensor) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, k: int) -> dict[str, Tensor]:
        return {"x0": self.images[k]}


def train(
    library: object, folder: Path, steps: int, callbacks: list[object], resume: str | None = None, **more: object
) -> nn.Module:
    torch.manual_seed(0)
    options = {"report_to": "none", "save_steps": 4, "disable_tqdm": True, "remove_unused_columns": False}
    options |= {"per_device_train_batch_size": 16, "max_steps": steps, "seed": 0, "use_cpu": True, **more}
    args = library.TrainingArguments(str(folder), **options)
    images = Images(vk.data.digits()[:128].reshape(-1, 1, 8, 8))
    trainer = library.Trainer(Loss(PROCESS), args, train_dataset=images, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model


def watch(log: Path) -> vk.Monitor:
    images = vk.data.digits()[:192].reshape(-1, 1, 8, 8)
    return often(images[:128], PROCESS, test=images[128:], predicts="x0", every=4, log=log)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_weights_are_equal_bit_for_bit(transformers: object, accumulate: int, tmp_path: Path) -> None:
    more = {"gradient_accumulation_steps": accumulate}
    alone = train(transformers, tmp_path / "a", 12, [], **more)
    callback = MonitorCallback(watch(tmp_path), network=lambda model: model.net)
    assert isinstance(callback, transformers.TrainerCallback)
    assert equal(train(transformers, tmp_path / "b", 12, [callback], **more), alone)
    assert steps_of(tmp_path) == [0, 4, 8, 12]
    assert kinds_of(tmp_path) == ["start", *["evaluation"] * 4, "end"]


def test_a_resumed_run_continues_its_curves(transformers: object, tmp_path: Path) -> None:
    for steps, resume in ((8, None), (16, str(tmp_path / "out" / "checkpoint-8"))):
        callback = MonitorCallback(watch(tmp_path), lambda model: model.net)
        train(transformers, tmp_path / "out", steps, [callback], resume)
    assert steps_of(tmp_path) == [0, 4, 8, 12, 16]
    assert kinds_of(tmp_path).count("start") == kinds_of(tmp_path).count("end") == 2


def test_refusals(transformers: object, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"needs a monitor, vk\.Monitor"):
        MonitorCallback("runs")
    with pytest.raises(InputError, match="ema must be a function of the module"):
        MonitorCallback(watch(tmp_path), ema=nn.Linear(1, 1))
    with pytest.raises(InputError, match="fails on Loss: AttributeError"):
        train(transformers, tmp_path / "out", 4, [MonitorCallback(watch(tmp_path), lambda model: model.unet)])
