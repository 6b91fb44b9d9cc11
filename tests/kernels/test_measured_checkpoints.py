"""The V-kernel of networks that other people trained: measured, compared, and used in the effective SDE."""

from __future__ import annotations

import pytest
import torch
from checkpoints import c, normal, u, with_models

import vkernel as vk
from vkernel import InputError
from vkernel.kernels import Measured, ValidityWarning

pytestmark = [with_models, pytest.mark.filterwarnings("ignore::vkernel.kernels.ValidityWarning")]


@pytest.fixture(scope="module", params=["four CNNs", "an early one among them", "two U-Nets"])
def nets(request: pytest.FixtureRequest) -> vk.Checkpoints:
    names = {"four CNNs": "abcd", "an early one among them": ["a", "c", "d", "early"]}
    if request.param == "two U-Nets":
        return vk.Checkpoints([u("unet28_mnist.pt"), u("unet28_fashion.pt")])
    return vk.Checkpoints([c(f"cnn28_mnist_{name}.pth") for name in names[request.param]])


def test_its_covariance_is_that_of_the_scores(nets: vk.Checkpoints) -> None:
    """Second derivation: numpy's covariance over members, along two directions, and between two points."""
    with pytest.warns(ValidityWarning, match=f"measured over {len(nets)} members"):
        V = Measured(nets)
    x, y, v, w = (normal(3, 1, 28, 28, seed=k) for k in range(4))
    s, r = (torch.stack([net(z, t) for net in nets]).double() for z, t in ((x, 300), (y, 700)))
    torch.testing.assert_close(V.mean(x, 300), s.mean(0).float())
    along = [(a * b.double()).flatten(2).sum(2) for a, b in ((s, v), (r, w), (s, w))]
    for got, (a, b) in (
        ((V.cov(x, 300) @ v * w).flatten(1).sum(1), (along[0], along[2])),
        ((V.cov(x, 300, y, 700) @ w * v).flatten(1).sum(1), (along[0], along[1])),
    ):
        want = ((a - a.mean(0)) * (b - b.mean(0))).sum(0) / (len(nets) - 1)
        torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-3 * float(a.std() * b.std()))


def test_its_fields_have_this_covariance_and_the_effective_sde_runs(nets: vk.Checkpoints) -> None:
    V = Measured(nets)
    x = normal(1, 1, 28, 28)
    field = V.draw(100, generator=0)
    draws = field(x.expand(100, 1, 1, 28, 28), 300).flatten(1).double()
    total = float(V.cov(x, 300).trace())
    assert float(draws.var(0).sum()) == pytest.approx(total, rel=6 * (2 / 99) ** 0.5 + 0.05)
    x_T = nets.start(2, seed=1)
    one = vk.sample.effective_sde(V, x_T, steps=8, generator=1)
    many = vk.sample.effective_sde(V, x_T, members=3, steps=8, generator=1, save="path")
    assert one.shape == x_T.shape
    assert many.path.shape == (9, 3, *x_T.shape)
    assert bool(many.x.isfinite().all())


def test_compare_puts_it_beside_the_members(nets: vk.Checkpoints) -> None:
    x = normal(4, 1, 28, 28)
    if len(nets) == 2:
        with pytest.raises(InputError, match="three finite members"):
            vk.compare(nets, Measured(nets), x, [300.0], laws=False)
        return
    found = vk.compare(nets, Measured(nets), x, [300.0, 700.0], laws=False)
    torch.testing.assert_close(torch.as_tensor(found["ratio"].values), torch.ones(2, 4).double(), rtol=1e-3, atol=1e-3)
