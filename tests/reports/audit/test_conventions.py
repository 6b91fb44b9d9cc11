"""Stated conventions, right and wrong, and skill over a linear denoiser."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import (
    FASHION,
    Remembered,
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
from vkernel.adapters.weights import read_process, schedules
from vkernel.core.errors import InputError
from vkernel.reports.audit import describe
from vkernel.reports.audit.conventions import Convention, check
from vkernel.reports.audit.denoising import LinearDenoiser
from vkernel.reports.audit.skill import skill


def remembered(net: Checkpoint) -> Checkpoint:
    return replace(net, net=Remembered(net.net))


FEW = {"levels": 3, "images": 8}  # the least at which a lie must be clear: it is harder to see in few images


@with_models
@pytest.mark.skipif(not FASHION.is_file(), reason=f"Fashion-MNIST is not at {FASHION}")
def test_conventions_of_the_fashion_network() -> None:
    data, net = vk.load(FASHION).subset(torch.arange(300)), remembered(u())
    right = Convention("noise", "index", (-1.0, 1.0))
    found = check(net, data, levels=3, images=16)
    assert found.fits
    assert "range 0,1" in describe(found)  # it normalises its input: both fit
    for change in ({"predicts": "x0"}, {"predicts": "v"}, {"time": "reversed"}, {"range": (0, 255)}):
        found = check(replace(net, **change), data, **FEW)
        assert not found.fits
        assert found.better == right, change
    with pytest.raises(InputError, match="another time"):
        check(replace(net, time="fraction"), data, levels=2, images=4)


@with_models
def test_conventions_of_an_mnist_network_on_other_digits() -> None:
    """Other digits than MNIST's, blown up: a wrong convention is noticed, but none makes the network good on these."""
    small = nn.functional.interpolate(digits(100)[:100], size=20, mode="bilinear")
    data = vk.Empirical(((nn.functional.pad(small, (4, 4, 4, 4), value=-1) + 1) * 127.5).round().to(torch.uint8))
    net, right = c("cnn28_mnist_a.pth"), Convention("noise", "fraction", (-0.5, 0.5))
    for change in ({"predicts": "v"}, {"time": "index"}, {"range": (-1, 1)}):
        found = check(replace(net, **change), data, levels=2, images=8)
        assert (found.fits, found.better, found.hint) == (False, None, right), change


def test_a_trained_pipeline_is_checked_from_its_folder(trained: nn.Module, diffusers: object, tmp_path: Path) -> None:
    data = digits(256)
    diffusers.DDPMPipeline(trained, diffusers.DDPMScheduler()).save_pretrained(tmp_path)
    net = remembered(Checkpoint.from_diffusers(tmp_path))
    found = check(net, data, levels=4, images=32)
    assert found.fits
    assert found.loss.value < 0.8
    assert found.to_dataset().error.shape == (5,)
    for below, above in zip(found.ideal[:-1], found.error[:-1], strict=True):
        assert below < above
    path = tmp_path / "scheduler" / "scheduler_config.json"
    for lie in ("sample", "v_prediction"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "prediction_type": lie}))
        lying = replace(Checkpoint.from_diffusers(tmp_path), net=net.net)  # of the same weights
        found = check(lying, data, **FEW)
        # after seconds of training it is no better than a linear denoiser: what fits is a hint
        assert (found.fits, found.better) == (False, None)
        assert found.hint == Convention("noise", "index", (-1.0, 1.0))
        assert "predicts noise" in describe(found)
    for change in ({"time": "fraction"}, {"range": (0, 255)}, {"range": (0, 1)}):
        moved = replace(net, **change)
        low, high = moved.range
        mine = vk.Empirical((data[:256] + 1) / 2 * (high - low) + low)
        found = check(moved, mine, **FEW)
        assert (found.fits, found.hint) == (False, Convention("noise", "index", (-1.0, 1.0))), change


@pytest.mark.parametrize("prediction", ["noise", "x0", "v"])
def test_random_weights_are_called_untrained(prediction: str, diffusers: object) -> None:
    net = wrap(tiny_unet(diffusers), vk.DDPM.linear(), predicts=prediction)
    found = check(net, digits(256), levels=3, images=16)
    assert (found.fits, found.untrained, found.better) == (False, True, None)
    assert "does not denoise these data" in describe(found)


def test_a_network_that_returns_zero_is_untrained_in_every_parametrisation() -> None:
    """A v network that returns zero blends mean and noise: it must not pass for a denoiser."""
    for prediction in ("noise", "x0", "v", "score"):
        net = wrap(lambda x, t: 0 * x, vk.DDPM.linear(), predicts=prediction)
        assert check(net, digits(256), levels=3, images=16).untrained


def test_refusals_of_the_check() -> None:
    net = wrap(lambda x, t: x, vk.DDPM.linear(), shape=(1, 28, 28))
    with pytest.raises(InputError, match="takes images of shape"):
        check(net, digits())
    with pytest.raises(InputError, match="NaN"):
        check(wrap(lambda x, t: x * float("nan"), vk.DDPM.linear()), digits())
    with pytest.raises(InputError, match="are equal"):
        check(net, vk.Empirical(torch.ones(3, 1, 28, 28)))
    far = vk.Empirical((digits()[:64] + 1) * 127.5)
    assert "these data lie in [0, 255]" in describe(check(replace(net, shape=None), far, levels=2, images=4))


# --- skill ------------------------------------------------------------------------------------------------------------

PROCESS = vk.EDM()


def gaussian(n: int, seed: int = 0) -> tuple[vk.Empirical, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    root = torch.randn(4, 4, generator=g, dtype=torch.float64)
    return vk.Empirical(torch.randn(n, 4, generator=g, dtype=torch.float64) @ root.mT), root @ root.mT


def linear_score(cov: torch.Tensor, data: vk.Empirical) -> vk.Score:
    def score(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        eye = torch.eye(4, dtype=x.dtype)
        return -torch.linalg.solve(cov.to(x.dtype) + t.to(x.dtype).reshape(-1, 1, 1) ** 2 * eye, x[..., None])[..., 0]

    return vk.as_score(score, PROCESS, data.shape)


def test_of_gaussian_data_nothing_beats_the_linear_denoiser():
    data, cov = gaussian(4000)
    found = skill(linear_score(cov, data), data, images=1000)
    assert torch.allclose(found.ratio.value, torch.ones(6, dtype=torch.float64), atol=0.02)
    assert abs(found.skill.value) < 0.02
    assert found.doubtful  # Gaussian data cannot tell
    # the error of the best linear denoiser in closed form: tr α²Σ(α²Σ + σ²)⁻¹ / d
    for t, value, se in zip(found.t, found.linear.value, found.linear.se, strict=True):
        exact = torch.trace(cov @ torch.linalg.inv(cov + t**2 * torch.eye(4, dtype=torch.float64))) / 4
        assert abs(float(value - exact)) < 5 * float(se) + 0.02 * float(exact)


def test_of_clusters_the_exact_denoiser_is_far_better_and_a_bad_one_is_doubtful():
    centres = 3 * torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    law = vk.GaussianMixture(centres, variance=0.01)
    data = vk.Empirical(law.sample(2000, 0))
    exact = skill(vk.EmpiricalScore(data, PROCESS), data)
    assert exact.skill.low > 0.5
    assert not exact.under
    assert "is trained" in describe(exact)
    bad = skill(vk.as_score(lambda x, t: -x / (9 + 2 * t.reshape(-1, 1) ** 2), PROCESS, data.shape), data)
    assert (bad.doubtful, bad.under) == (True, False)
    assert "cannot be told apart" in describe(bad)
    assert set(bad.to_dataset().data_vars) >= {"ratio", "ratio_low", "ratio_high", "error", "linear"}


def test_intervals_cover_over_sets_of_images():
    """The ratio at one level, against its value on very many images: 95 % intervals hold it about as often."""
    data, cov = gaussian(60_000, seed=3)
    wrong = linear_score(1.5 * cov, data)
    truth = skill(wrong, data, levels=2, images=20_000).ratio.value
    inside = []
    for seed in range(60):
        ratio = skill(wrong, data, levels=2, images=40, seed=seed).ratio
        inside.append(((ratio.low <= truth) & (truth <= ratio.high)).tolist())
    share = np.mean(inside, axis=0)
    assert (share > 0.83).all(), share  # three standard errors below .95 are .866; the fit of Σ varies too


def test_linear_has_the_same_axes_from_few_and_many_images():
    points = torch.randn(12, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = vk.Empirical(points)
    for some in (data, vk.Empirical(points[:5])):
        linear, rows = LinearDenoiser.of(some, 0), some.take(torch.arange(some.n)) - some.center
        cov = rows.mT @ rows / some.n
        x = torch.randn(3, 9, dtype=torch.float64)
        expected = 0.7 * torch.linalg.solve(0.25 * cov + 0.49 * torch.eye(9, dtype=torch.float64), x.mT).mT
        torch.testing.assert_close(linear(x, 0.5, 0.7), expected)


def test_refusals_of_skill():
    data, cov = gaussian(20)
    net = linear_score(cov, data)
    with pytest.raises(InputError, match="8 training images"):
        skill(net, data.subset(torch.arange(7)))
    with pytest.raises(InputError, match="equal"):
        skill(net, vk.Empirical(torch.ones(20, 4)))
    with pytest.raises(InputError, match="4 images"):
        skill(net, data, images=2)
    with pytest.raises(InputError, match="NaN"):
        skill(vk.as_score(lambda x, t: x * float("nan"), PROCESS, data.shape), data)
    assert skill(net, data, images=500).error.value.isfinite().all()  # half of the images remain for the fit


# --- schedule, orientation, range -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def denoiser() -> tuple[vk.Score, torch.Tensor]:
    """The exact denoiser of digits as a network, in which the schedule is fixed."""
    points = vk.data.digits()[:300].float()
    process = vk.DDPM.linear()
    score = vk.EmpiricalScore(vk.Empirical(points), process)

    def noise(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return -process.sigma(t.double()).reshape(-1, 1, 1, 1).to(x) * score(x, t.double())

    return noise, points


def test_the_right_schedule_and_images_are_not_doubted(denoiser: tuple[vk.Score, torch.Tensor]) -> None:
    net, points = denoiser
    assert check(wrap(net, vk.DDPM.linear()), vk.Empirical(points), levels=4, images=32).fits


@pytest.mark.parametrize("betas", ["cosine:1000", "scaled_linear:.00085:.012:1000", "linear:1e-4:.08:250"])
def test_another_schedule_is_named(denoiser: tuple[vk.Score, torch.Tensor], betas: str) -> None:
    net, points = denoiser
    found = check(wrap(net, read_process(betas, {}, "")[0]), vk.Empirical(points), levels=4, images=32)
    assert not found.schedule.fits
    assert found.better is not None
    assert found.better.betas == "linear:1e-4:.02:1000"
    assert "--betas linear:1e-4:.02:1000" in describe(found)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda a: a.mT, "transposed images"),
        (lambda a: a.flip(-1), "images flipped left to right"),
        (lambda a: -a, "inverted intensities"),
        (lambda a: (a + 1) / 2, "data range 0,1"),
    ],
)
def test_other_images_are_named(denoiser: tuple[vk.Score, torch.Tensor], change: object, name: str) -> None:
    net, points = denoiser
    found = check(wrap(net, vk.DDPM.linear()), vk.Empirical(change(points).contiguous()), levels=4, images=32)
    assert (found.fits, found.better is not None and found.better.images) == (False, name)
    assert ("--data-range 0,1" in describe(found)) == (name == "data range 0,1")


def test_schedules_in_a_file() -> None:
    process = read_process("cosine:1000", {}, "")[0]
    abar = process.alpha(torch.arange(1000).double()).square()
    held = {"x.sqrt_alphas_cumprod": abar.sqrt(), "x.betas": torch.tensor(process.betas), "bias": torch.randn(64)}
    for key in ("x.sqrt_alphas_cumprod", "x.betas"):
        found = schedules({key: held[key], "bias": held["bias"]})
        errors = [
            float((p.alpha(torch.arange(990).double()) - abar[:990].sqrt()).abs().max())
            for _, p in found
            if len(p.betas) > 990
        ]
        assert min(errors) < 1e-3, key
