"""The check of stated conventions: right ones fit, wrong ones are named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import (
    FASHION,
    c,
    digits,
    tiny_unet,
    u,
    with_models,
    wrap,
)
from torch import nn

import vkernel as vk
from vkernel import Checkpoint
from vkernel.core.errors import InputError
from vkernel.reports.audit.conventions import Convention, check


@with_models
@pytest.mark.skipif(not FASHION.is_file(), reason=f"Fashion-MNIST is not at {FASHION}")
def test_conventions_of_the_fashion_network() -> None:
    data, net = vk.load(FASHION).subset(torch.arange(300)), u()
    right = Convention("noise", "index", (-1.0, 1.0))
    found = check(net, data, levels=4, images=32)
    assert found.fits
    assert "range 0,1" in found.words  # it normalises its input: the check says that it cannot tell
    for change in ({"predicts": "x0"}, {"predicts": "v"}, {"time": "reversed"}, {"range": (0, 255)}):
        found = check(replace(net, **change), data, levels=4, images=32)
        assert not found.fits
        assert found.better == right, change
    with pytest.raises(InputError, match="another time"):
        check(replace(net, time="fraction"), data, levels=2, images=4)


@with_models
@pytest.mark.parametrize("name", ["cnn28_mnist_a.pth", "cnn28_mnist_early.pth"])
def test_conventions_of_the_mnist_networks_on_digits_of_their_size(name: str) -> None:
    """Other digits than MNIST's, blown up: enough for conventions. The under-trained network passes too."""
    small = nn.functional.interpolate(digits(100)[:100], size=20, mode="bilinear")
    data = vk.Empirical(((nn.functional.pad(small, (4, 4, 4, 4), value=-1) + 1) * 127.5).round().to(torch.uint8))
    net, right = c(name), Convention("noise", "fraction", (-0.5, 0.5))
    assert check(net, data, levels=3, images=16).fits
    changes = [{"predicts": "v"}, {"time": "index"}, {"range": (-1, 1)}]
    for change in [*changes, {"predicts": "v", "time": "index"}]:
        found = check(replace(net, **change), data, levels=3, images=16)
        assert not found.fits
        assert found.better == right, change


def test_a_trained_pipeline_is_checked_from_its_folder(trained: nn.Module, diffusers: object, tmp_path: Path) -> None:
    data = digits(256)
    diffusers.DDPMPipeline(trained, diffusers.DDPMScheduler()).save_pretrained(tmp_path)
    net = Checkpoint.from_diffusers(tmp_path)
    found = check(net, data, levels=4, images=32)
    assert found.fits
    assert found.loss.value < 0.8
    assert found.to_dataset().error.shape == (5,)
    for below, above in zip(found.ideal[:-1], found.error[:-1], strict=True):
        assert below < above
    path = tmp_path / "scheduler" / "scheduler_config.json"
    for lie in ("sample", "v_prediction"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "prediction_type": lie}))
        found = check(Checkpoint.from_diffusers(tmp_path), data, levels=4, images=32)
        assert not found.fits
        assert found.better == Convention("noise", "index", (-1.0, 1.0))
        assert "prediction noise" in found.words
    for change in ({"time": "fraction"}, {"range": (0, 255)}, {"range": (0, 1)}):
        moved = replace(net, **change)
        low, high = moved.range
        mine = vk.Empirical((data[:256] + 1) / 2 * (high - low) + low)
        found = check(moved, mine, levels=4, images=32)
        assert not found.fits
        assert found.better == Convention("noise", "index", (-1.0, 1.0)), change


@pytest.mark.parametrize("prediction", ["noise", "x0", "v"])
def test_random_weights_are_called_untrained(prediction: str, diffusers: object) -> None:
    net = wrap(tiny_unet(diffusers), vk.DDPM.linear(), predicts=prediction)
    found = check(net, digits(256), levels=4, images=32)
    assert (found.fits, found.untrained, found.better) == (False, True, None)
    assert "looks untrained" in found.words


def test_a_network_that_returns_zero_is_untrained_in_every_parametrisation() -> None:
    """A v network that returns zero blends mean and noise: it must not pass for a denoiser."""
    for prediction in ("noise", "x0", "v", "score"):
        net = wrap(lambda x, t: 0 * x, vk.DDPM.linear(), predicts=prediction)
        assert check(net, digits(256), levels=4, images=16).untrained


def test_checks_at_the_door() -> None:
    net = wrap(lambda x, t: x, vk.DDPM.linear(), shape=(1, 28, 28))
    with pytest.raises(InputError, match="takes images of shape"):
        check(net, digits())
    with pytest.raises(InputError, match="NaN"):
        check(wrap(lambda x, t: x * float("nan"), vk.DDPM.linear()), digits())
    with pytest.raises(InputError, match="are equal"):
        check(net, vk.Empirical(torch.ones(3, 1, 28, 28)))
    far = vk.Empirical((digits()[:64] + 1) * 127.5)
    assert "these data lie in [0, 255]" in check(replace(net, shape=None), far, levels=2, images=4).words
