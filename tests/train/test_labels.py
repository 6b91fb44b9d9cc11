"""Labels and flips: exact targets within a class and of the mirrored set, by sums over all training images."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.train.objectives import Training

PROCESS = vk.VP(eps=0.01)
IMAGES = torch.randn(7, 1, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = torch.tensor([2, 0, 2, 2, 0, 5, 5])
WEIGHTS = torch.tensor([1.0, 2, 1, 0, 3, 1, 1], dtype=torch.float64)


def training(objective: str | vk.train.objectives.Objective = "J0", **options: object) -> Training:
    return Training(vk.Empirical(IMAGES, WEIGHTS), PROCESS, objective, None, seed=3, **options)


def denoised(x: Tensor, t: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """E[x0|x] of one x by the sum over points y with weights w."""
    away = (x - PROCESS.alpha(t) * y).square().flatten(1).sum(1)
    r = (w.log() - away / (2 * PROCESS.S(t))).softmax(0)
    return torch.tensordot(r, y, 1)


@pytest.mark.parametrize("c", [0.0, 0.5])
@pytest.mark.parametrize("flips", [False, True])
def test_targets_are_denoised_within_the_class(flips, c):
    """JC: m of the images of the label alone, mirrored or not, and the origin, which x determines at small t."""
    found = training(vk.JC(c), labels=LABELS, flips=flips, times=lambda u: 0.01 + 0.4 * u)
    y, w, labels = IMAGES, WEIGHTS, LABELS
    if flips:
        y, w, labels = torch.cat([y, y.flip(-1)]), torch.cat([w, w]), torch.cat([labels, labels])
    x, t, m = (a.flatten(0, 1) for a in found.batch([0, 4], 40))
    origin = found.origins([0, 4], 40).flatten()
    assert set(labels[origin].tolist()) == {0, 2, 5}
    assert (w[origin] > 0).all()
    for k in range(80):
        same = labels == labels[origin[k]]
        mean = denoised(x[k], t[k], y[same], w[same])
        torch.testing.assert_close(m[k], mean + c * (y[origin[k]] - mean), rtol=1e-6, atol=1e-9)


def test_flips_are_the_doubled_set():
    """Every draw, its target and the exact score are those of a set that was doubled by hand."""
    data = vk.Empirical(IMAGES, WEIGHTS)
    doubled = vk.Empirical(torch.cat([IMAGES, IMAGES.flip(-1)]), torch.cat([WEIGHTS, WEIGHTS]))
    mirrored = data.mirrored()
    assert mirrored.n == 14
    torch.testing.assert_close(mirrored[:], doubled[:], rtol=0, atol=0)
    torch.testing.assert_close(mirrored.weights, doubled.weights)
    torch.testing.assert_close(mirrored.center, doubled.center)
    assert mirrored.spread == pytest.approx(doubled.spread)
    both = [training("J0", flips=True), Training(doubled, PROCESS, "J0", None, seed=3)]
    for a, b in zip(*(each.batch([1, 2], 30) for each in both), strict=True):
        torch.testing.assert_close(a, b)
    x, t, _ = both[0].batch([0], 20)  # the law is symmetric, and with it the denoiser
    torch.testing.assert_close(both[0].score.denoise(x.flip(-1), t), both[0].score.denoise(x, t).flip(-1))


def test_mirror_images_stay_integers(tmp_path):
    import numpy as np

    pixels = np.arange(48, dtype=np.uint8).reshape(2, 4, 6)
    np.save(tmp_path / "images.npy", pixels)
    for points in (pixels, np.load(tmp_path / "images.npy", mmap_mode="r")):
        found = vk.Empirical(points, scale=(-1, 1)).subset([1]).mirrored()
        assert found.storage is not None
        assert found.storage.dtype == torch.uint8
        torch.testing.assert_close(found[1], torch.from_numpy(pixels[1, :, ::-1] / 127.5 - 1).float())


def test_an_origin_drawn_again_has_the_label_of_the_input():
    """Inputs fixed, targets varied: the target of J1 is an image of the same label, as likely as its posterior."""
    found = training("J1", labels=LABELS, vary=("targets",), times=lambda u: 0.5 + 0.5 * u)
    x, t, m = found.batch(range(2000), 3)
    label = LABELS[found.origins([0], 3)[0]]
    for k in range(3):
        own = (label[k] == LABELS).nonzero().flatten()
        nearest = torch.cdist(m[:, k].flatten(1), IMAGES.flatten(1)).argmin(1)
        assert torch.isin(nearest, own).all()
        mean = denoised(x[0, k], t[0, k], IMAGES[own], WEIGHTS[own])
        error = (m[:, k].mean(0) - mean).abs() / (m[:, k].std(0) / 2000**0.5).clamp_min(1e-12)
        assert float(error.max()) < 5


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ([0, 1], r"labels must be \(7,\), one whole number for each point; got int64, shape \(2,\)"),
        (torch.zeros(7), "labels must be .* got float32"),
        ([[0]] * 7, "labels must be"),
        ([0, 0, 0, -1, 0, 0, 0], "Labels are whole numbers from 0 on; got -1"),
        (torch.ones(7, dtype=torch.bool), "labels must be"),
    ],
)
def test_bad_labels(labels, says):
    with pytest.raises(InputError, match=says):
        training(labels=labels)


def test_flips_need_images():
    with pytest.raises(InputError, match=r"Mirror images need images .* has shape \(2,\)"):
        Training(vk.Empirical(torch.randn(3, 2)), PROCESS, "J0", None, flips=True)
    with pytest.raises(InputError, match=r"flips is True, .* got 'yes'"):
        training(flips="yes")
