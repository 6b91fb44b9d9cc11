"""Blind directions of networks and the smallest gains of their Jacobians."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from checkpoints import FASHION, c, u, with_models, wrap
from draws import gen
from torch import Tensor, nn

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.metrics import drift
from vkernel.reports.audit import blind, describe
from vkernel.reports.audit.blind import Jacobian, smallest_gain

PROCESS = vk.DDPM.linear()
ALL = vk.data.digits()
DIGITS = ALL.subset(torch.arange(300))
EXACT = vk.EmpiricalScore(DIGITS, PROCESS)


def noise(x: Tensor, t: Tensor) -> Tensor:
    sigma = PROCESS.sigma(t.double())[:, None, None, None].to(x)
    return -sigma * EXACT(x, t.double().clamp_min(PROCESS.eps))


def without_mean(x: Tensor, t: Tensor) -> Tensor:
    return noise(x - x.mean((1, 2, 3), keepdim=True), t)


def normalised(x: Tensor, t: Tensor) -> Tensor:
    return noise(x / x.square().mean((1, 2, 3), keepdim=True).sqrt(), t)


def detached(x: Tensor, t: Tensor) -> Tensor:
    return noise(torch.from_numpy(x.detach().numpy().copy()), t)


def checkpoint(net: object) -> vk.Score:
    return wrap(net, PROCESS, shape=(1, 8, 8))


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
    assert all(name in describe(found) for name in unseen)
    assert found.derivative == "derivatives"
    assert all(map(math.isnan, found.least))


def test_a_network_that_cannot_see_translation() -> None:
    found = blind(checkpoint(lambda x, t: x.mean(-1, keepdim=True).expand_as(x)), DIGITS, budget=0)
    assert all(found.blind["translation"])
    assert not any(found.blind["brightness"])
    assert describe(found).startswith("network ignores translation at 4 of 4")


def test_an_exact_score_responds_as_the_linear_one_at_much_noise() -> None:
    found = blind(EXACT, DIGITS, times=[900, 300], budget=8)
    assert not found.alarm
    assert "EmpiricalScore responds to brightness, contrast, translation" in describe(found, "EmpiricalScore")
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
    assert "its cosine with brightness is 1.00" in describe(found)


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
    left, right = (torch.linalg.qr(torch.randn(d, d, generator=gen(i)).double())[0] for i in (1, 2))
    values = torch.linspace(1, 3, d).double()
    values[0] = 0.01
    matrix = left * values @ right.T
    x = torch.randn(3, d, generator=gen(3)).double()

    def f(y: Tensor) -> Tensor:
        return (y + 0.2 * y.sin() if nonlinear else y) @ matrix.T

    jacobian = Jacobian.of(f, x, 1e-3, gen())
    assert (jacobian.forward, jacobian.back) == (True, True)
    exact = matrix * (1 + 0.2 * x[0].cos()) if nonlinear else matrix
    _, s, vh = torch.linalg.svd(exact)
    gain, cosine = smallest_gain(replace(jacobian, x=x[:1]), size, gen())
    assert gain == pytest.approx(float(s[-1]), rel=0.05 if size < d else 1e-9)
    assert cosine == pytest.approx(float(vh[-1].sum().abs()) / math.sqrt(d), abs=0.01)


def test_directions_at_once_are_those_one_by_one() -> None:
    """The first directions are at the images, the next ones at them again; differences alike."""
    matrix, x = torch.randn(6, 6, generator=gen(1)).double(), torch.randn(3, 6, generator=gen(2)).double()
    jacobian = Jacobian.of(lambda y: (y @ matrix).sin(), x, 1e-4, gen())
    v = torch.randn(12, 6, generator=gen(3)).double()
    for one in (jacobian, replace(jacobian, forward=False)):
        torch.testing.assert_close(one(v), torch.cat([one(part) for part in v.split(3)]))
    exact = (x.repeat(4, 1) @ matrix).cos() * (v @ matrix)
    torch.testing.assert_close(jacobian(v), exact)


def test_all_changes_have_one_condition() -> None:
    """A network whose conditions differ by a shift of its output is as blind as without conditions."""
    condition = 1000 * torch.arange(3.0).reshape(3, 1)

    def shifted(x: Tensor, t: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        return without_mean(x, t) + encoder_hidden_states[:, :, None, None]

    found = blind(replace(checkpoint(shifted), condition=condition), DIGITS, images=4, budget=4)
    assert found.changes == ["brightness"]


# --- other people's networks ----------------------------------------------------------------------------------------


def network(name: str) -> vk.Score:
    return u(name) if name.startswith("unet") else c(name)


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
    x = torch.randn(8, 1, 28, 28, generator=gen())
    samples = vk.sample.pf_ode(net, x, steps=8, spacing="uniform")
    drifted = drift(samples, net.scaled(data))
    assert drifted.alarm
    assert drifted.outside_mean.low > 0.2
    assert "mean" in drifted.outside


@with_models
@pytest.mark.parametrize("name", [f"cnn28_mnist_{kind}.pth" for kind in ("a", "b", "c", "d", "early")])
def test_c_sees_all(name: str) -> None:
    found = blind(network(name), of_size_28(), images=4, budget=0)
    assert not found.alarm
    assert "responds to brightness" in describe(found)


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
        (noise, DIGITS, {}, "An audit needs a Score"),
    ],
)
def test_what_cannot_be_examined_is_refused(model: object, data: object, options: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        blind(model, data, **options)
