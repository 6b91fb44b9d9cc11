"""What networks cannot see, the smallest gains of their Jacobians, and the drift of samples."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch
from networks28 import C, U
from torch import Tensor, nn

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.reports.audit import Checkpoint, blind, drift
from vkernel.reports.audit.directions import Jacobian, least

MODELS = os.environ.get("VKERNEL_MODELS")
FASHION = Path("/usr/share/datasets/fashion-mnist/t10k-images-idx3-ubyte.gz")
with_models = pytest.mark.skipif(MODELS is None, reason="VKERNEL_MODELS does not say where the seven networks lie")
PROCESS = vk.DDPM.linear()
ALL = vk.data.digits()
DIGITS = ALL.subset(torch.arange(300))
EXACT = vk.EmpiricalScore(DIGITS, PROCESS)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(x: Tensor, t: Tensor) -> Tensor:
    sigma = PROCESS.sigma(t.double())[:, None, None, None].to(x)
    return -sigma * EXACT(x, t.double().clamp_min(PROCESS.eps))


def without_mean(x: Tensor, t: Tensor) -> Tensor:
    return noise(x - x.mean((1, 2, 3), keepdim=True), t)


def normalised(x: Tensor, t: Tensor) -> Tensor:
    return noise(x / x.square().mean((1, 2, 3), keepdim=True).sqrt(), t)


def detached(x: Tensor, t: Tensor) -> Tensor:
    return noise(torch.from_numpy(x.detach().numpy().copy()), t)


def checkpoint(net: object) -> Checkpoint:
    return Checkpoint.from_callable(net, PROCESS, shape=(1, 8, 8))


def of_size_28() -> vk.Empirical:
    """Digits blown up to the size of MNIST's, as bytes."""
    small = nn.functional.interpolate(ALL[:400], size=20, mode="bilinear")
    return vk.Empirical(((nn.functional.pad(small, (4, 4, 4, 4), value=-1) + 1) * 127.5).round().to(torch.uint8))


# --- what is not seen -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("net", "unseen"),
    [
        (noise, set()),
        (without_mean, {"brightness"}),
        (normalised, {"contrast"}),
        (lambda x, t: normalised(x - x.mean((1, 2, 3), keepdim=True), t), {"brightness", "contrast"}),
    ],
    ids=["normal", "mean", "norm", "both"],
)
def test_invariances_are_found_and_no_others(net: object, unseen: set[str]) -> None:
    found = blind(checkpoint(net), DIGITS, budget=0)
    assert {name for name, levels in found.blind.items() if all(levels)} == unseen
    assert {name for name, levels in found.blind.items() if any(levels)} == unseen
    assert found.alarm == bool(unseen)
    assert all(name in found.words for name in unseen)
    assert found.derivative == "derivatives"
    assert all(map(math.isnan, found.least))


def test_a_network_that_cannot_see_translation() -> None:
    found = blind(checkpoint(lambda x, t: x.mean(-1, keepdim=True).expand_as(x)), DIGITS, budget=0)
    assert all(found.blind["translation"])
    assert not any(found.blind["brightness"])
    assert found.words.startswith("network is blind to translation at 4 of 4")


def test_an_exact_score_responds_as_the_linear_one_at_much_noise() -> None:
    found = blind(EXACT, DIGITS, times=[900, 300], budget=8)
    assert not found.alarm
    assert "EmpiricalScore sees brightness, contrast, translation" in found.words
    for e in found.response.values():
        assert float(e.value[0]) == pytest.approx(1, abs=0.02)
    ds = found.to_dataset()
    assert ds.response.sel(change="brightness").shape == (2,)
    assert ds.attrs["alarm"] == 0
    assert (ds.response_low <= ds.response).all()
    assert set(ds.direction.values) == {"constant", "image", "random"}


def test_a_constant_network_sees_nothing() -> None:
    found = blind(checkpoint(lambda x, t: torch.ones_like(x)), DIGITS, images=4, budget=6)
    assert all(map(all, found.blind.values()))
    assert found.least == [0] * 4


def test_stored_integers_of_a_score_keep_their_scale() -> None:
    stored = ((DIGITS[:100] + 1) * 127.5).round().to(torch.uint8)
    for scale in (None, (0.0, 1.0)):
        data = vk.Empirical(stored, scale=scale)
        found = blind(vk.EmpiricalScore(data, vk.EDM(T=1e5)), data, images=4, budget=0)
        assert float(found.response["brightness"].value[-1]) == pytest.approx(1, abs=0.05)
        assert not found.alarm


def test_gains_of_a_gaussian_denoiser() -> None:
    """f = sigma x: every gain is sigma. Without the mean, the gain along the constant is zero."""

    def net(x: Tensor, t: Tensor) -> Tensor:
        return x * PROCESS.sigma(t.double()).to(x)[:, None, None, None]

    found = blind(checkpoint(net), DIGITS, times=[500], images=4)
    sigma = float(PROCESS.sigma(torch.tensor(500.0)))
    for e in found.gain.values():
        assert float(e.value) == pytest.approx(sigma, rel=1e-5)
    assert found.least[0] == pytest.approx(sigma, rel=1e-5)
    found = blind(checkpoint(without_mean), DIGITS, times=[500], images=4)
    assert float(found.gain["constant"].high) < 1e-6 < 0.1 < float(found.gain["random"].low)
    assert (found.least[0], found.cosine[0]) == (pytest.approx(0, abs=1e-6), pytest.approx(1, abs=1e-4))
    assert "cosine 1.00 with the constant image" in found.words


def test_networks_without_derivatives() -> None:
    """A network that leaves torch has a derivative of zero, silently: differences find out, and serve instead."""
    known = blind(checkpoint(noise), DIGITS, times=[400, 900], images=4, budget=8)
    found = blind(checkpoint(detached), DIGITS, times=[400, 900], images=4, budget=8)
    assert found.derivative == "finite differences"
    assert not found.alarm
    for name, e in found.gain.items():
        torch.testing.assert_close(e.value, known.gain[name].value, rtol=0.02, atol=0)
    assert all(0 < gain <= float(e) * 1.02 for gain, e in zip(found.least, found.gain["constant"].high, strict=True))


# --- the smallest gain ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("d", "size"), [(12, 12), (300, 60)])
@pytest.mark.parametrize("nonlinear", [False, True])
def test_the_smallest_singular_direction_of_a_known_matrix(d: int, size: int, nonlinear: bool) -> None:
    """Singular values in [1, 3] but for one of .01."""
    left, right = (torch.linalg.qr(torch.randn(d, d, generator=generator(i)).double())[0] for i in (1, 2))
    values = torch.linspace(1, 3, d).double()
    values[0] = 0.01
    matrix = left * values @ right.T
    x = torch.randn(3, d, generator=generator(3)).double()

    def f(y: Tensor) -> Tensor:
        return (y + 0.2 * y.sin() if nonlinear else y) @ matrix.T

    jacobian = Jacobian.of(f, x, 1e-3, generator())
    assert (jacobian.forward, jacobian.back) == (True, True)
    exact = matrix * (1 + 0.2 * x[0].cos()) if nonlinear else matrix
    _, s, vh = torch.linalg.svd(exact)
    gain, cosine = least(jacobian.at(x[:1]), size, generator())
    assert gain == pytest.approx(float(s[-1]), rel=0.05 if size < d else 1e-9)
    assert cosine == pytest.approx(float(vh[-1].sum().abs()) / math.sqrt(d), abs=0.01)


# --- other people's networks ----------------------------------------------------------------------------------------


def network(name: str) -> Checkpoint:
    options: dict = {"betas": "key:alpha_t", "strip": "gt.", "time": "fraction", "range": "-.5,.5"}
    if name.startswith("unet"):
        options = {"betas": "linear:1e-4:.02:1000", "strip": "network."}
    factory = U if name.startswith("unet") else C
    return Checkpoint.from_weights(Path(MODELS or "") / name, factory, shape=(1, 28, 28), **options)


@with_models
@pytest.mark.parametrize("name", ["unet28_fashion.pt", "unet28_mnist.pt"])
def test_u_cannot_see_brightness_or_contrast_and_drifts(name: str) -> None:
    fashion = name == "unet28_fashion.pt" and FASHION.is_file()
    data = vk.load(FASHION).subset(torch.arange(1000)) if fashion else of_size_28()
    net = network(name)
    found = blind(net, data, images=4, budget=4)
    assert found.alarm
    assert all(found.blind["brightness"])
    assert all(found.blind["contrast"])
    assert not any(found.blind["translation"])
    assert float(found.response["brightness"].high.max()) < 1e-3
    assert min(found.cosine) > 0.999
    x = torch.randn(16, 1, 28, 28, generator=generator())
    samples = vk.sample.pf_ode(net, net.process, x, steps=8, method="exponential")
    drifted = drift(samples, net.scaled(data))
    assert drifted.alarm
    assert drifted.outside_mean.low > 0.2
    assert "outside the data's range" in drifted.words


@with_models
@pytest.mark.parametrize("name", [f"cnn28_mnist_{kind}.pth" for kind in ("a", "b", "c", "d", "early")])
def test_c_sees_all(name: str) -> None:
    found = blind(network(name), of_size_28(), images=4, budget=0)
    assert not found.alarm
    assert "sees brightness" in found.words


# --- drift ----------------------------------------------------------------------------------------------------------


def halves(n: int, seed: int) -> tuple[Tensor, vk.Empirical]:
    digits = ALL if n > 300 else DIGITS
    order = torch.randperm(digits.n, generator=generator(seed))[:n]
    return digits[order[: n // 2]], digits.subset(order[n // 2 :])


@pytest.mark.parametrize("n", [1797, 100])
def test_fresh_data_raise_no_alarm(n: int) -> None:
    assert sum(drift(*halves(n, seed)).alarm for seed in range(200)) < 10


def test_intervals_of_z_hold_zero_as_often_as_they_say() -> None:
    """Images of normal pixels: 95 % within 4 standard errors over 300 pairs, and shares of 2/(N + 1) on average."""
    covered, shares = 0, 0.0
    for seed in range(300):
        both = torch.randn(100, 1, 4, 4, generator=generator(seed))
        found = drift(both[:40], vk.Empirical(both[40:]))
        covered += found.mean.low <= 0 <= found.mean.high
        shares += found.outside_mean.value / 300
    assert covered / 300 == pytest.approx(0.95, abs=0.05)
    assert shares == pytest.approx(2 / 61, rel=0.3)


def test_changed_samples_raise_it() -> None:
    samples, data = halves(1797, 0)
    means = data[:].double().mean((1, 2, 3))
    shifted = drift(samples + 0.1, data)
    assert shifted.alarm
    assert shifted.mean.value == pytest.approx(0.1 / float(means.std()), abs=0.2)
    assert shifted.mean.low < shifted.mean.value < shifted.mean.high
    assert "average mean lies" in shifted.words
    assert drift(samples * 1.2, data).alarm
    weak = drift(samples.mean((1, 2, 3), keepdim=True) + 0.7 * (samples - samples.mean((1, 2, 3), keepdim=True)), data)
    assert weak.alarm
    assert abs(weak.mean.value) < 0.25 < abs(weak.variance.value)
    signs = torch.randn(len(samples), 1, 1, 1, generator=generator()).sign()
    apart = drift(samples + 2 * signs, data)  # the average stays about where it was
    assert apart.alarm
    assert apart.outside_mean.value == 1
    assert "outside the data's range" in apart.words


def test_samples_that_are_not_finite_are_outside() -> None:
    samples, data = halves(200, 0)
    samples = samples.clone()
    samples[:20] = math.nan
    found = drift(samples, data)
    assert found.alarm
    assert found.outside_mean.value >= 0.2
    assert math.isfinite(found.mean.value)
    assert drift(torch.full_like(samples, math.inf), data).alarm


def test_weights_of_the_data_count() -> None:
    samples, data = halves(1797, 1)
    both = torch.cat([data[:], torch.full((50, 1, 8, 8), 40.0)])
    weights = torch.cat([torch.ones(data.n), torch.zeros(50)])
    found, known = drift(samples, vk.Empirical(both, weights)), drift(samples, data)
    assert found.mean.value == pytest.approx(known.mean.value)
    assert found.outside_mean == known.outside_mean


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "data", "options", "words"),
    [
        (checkpoint(noise), torch.zeros(3, 1, 8, 8), {}, "data must be an Empirical"),
        (checkpoint(noise), DIGITS, {"images": 2}, "4 images or more; got 2"),
        (checkpoint(noise), vk.Empirical(torch.randn(5, 1, 4, 4)), {}, "takes images of shape"),
        (checkpoint(noise), vk.Empirical(torch.zeros(5, 1, 8, 8)), {}, "All points of the data are equal"),
        (checkpoint(noise), DIGITS, {"budget": -1}, "budget must be 0 or more"),
        (checkpoint(noise), DIGITS, {"times": []}, "times holds no time"),
        (checkpoint(noise), DIGITS, {"times": [2000]}, "outside"),
        (checkpoint(lambda x, t: x / 0), DIGITS, {}, "NaN or infinite"),
        (noise, DIGITS, {}, "a Checkpoint or a score with a process, not function"),
    ],
)
def test_what_cannot_be_examined_is_refused(model: object, data: object, options: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        blind(model, data, **options)


@pytest.mark.parametrize(
    ("samples", "data", "words"),
    [
        (torch.zeros(8, 1, 8, 8), torch.zeros(3), "data must be an Empirical"),
        ([[1.0]], DIGITS, "Samples must be a tensor"),
        (torch.zeros(8, 1, 4, 4), DIGITS, r"Samples have shape \(1, 4, 4\), the data \(1, 8, 8\)"),
        (torch.zeros(3, 1, 8, 8), DIGITS, "4 samples and 4 data; got 3 and 300"),
    ],
)
def test_what_cannot_drift_is_refused(samples: object, data: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        drift(samples, data)
