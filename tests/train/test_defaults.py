"""The default loss of networks is EDM's (Karras et al. 2022), in x/alpha and sigma/alpha, under every process."""

from __future__ import annotations

import pytest
import reference
import torch
from torch import Tensor

import vkernel as vk
from vkernel.train.models import MLP, Linear, UNet
from vkernel.train.models.base import Model
from vkernel.train.objectives import J1, Training

SIGMA_DATA = 0.5
IMAGES = torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).clamp(-1, 1)
TINY = {"channels": (8, 8, 8), "batch": 6, "dtype": "float64"}


def published(F, y: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """Table 1 and §5 of Karras et al. 2022, line by line: λ(σ) |c_skip (y + n) + c_out F(c_in (y + n)) - y|²."""
    total = sigma**2 + SIGMA_DATA**2
    c_skip, c_out, c_in = SIGMA_DATA**2 / total, sigma * SIGMA_DATA / total.sqrt(), 1 / total.sqrt()
    weight = total / (sigma * SIGMA_DATA) ** 2
    D = c_skip * (y + noise) + c_out * F(c_in * (y + noise))
    return weight.flatten() * (D - y).square().flatten(1).sum(1)


@pytest.mark.parametrize("name", reference.PROCESSES)
def test_the_loss_of_a_default_unet_is_the_published_one(name):
    process, model = reference.PROCESSES[name], UNet(**TINY)
    training = Training(vk.Empirical(IMAGES), process, J1(), None, times=model.defaults(process)[1])
    state = model.initial(training, [0])
    g = torch.Generator().manual_seed(1)
    state = {k: p + 0.1 * torch.randn(p.shape, generator=g, dtype=p.dtype) for k, p in state.items()}
    (z, e, y, omega), (x, t, x0) = model.pool(training, [0], 6), training.batch([0], 6)
    torch.testing.assert_close(omega, torch.ones_like(omega), rtol=1e-9, atol=0)
    one = {k: p[0] for k, p in state.items()}
    alpha, sigma = (f(t)[0][:, None, None] for f in (process.alpha, process.sigma))
    losses = published(lambda z: model.function(one, z, e[0]), x0[0], x[0] / alpha - x0[0], sigma / alpha)
    torch.testing.assert_close(model.loss(one, z[0], e[0], y[0], omega[0]), losses.mean() / 2, rtol=1e-8, atol=0)
    denoised = vk.train_ensemble(UNet(**TINY, steps=1, ema=None, lr=1e-9), IMAGES, process, members=1)
    denoised.state = state  # the denoiser is c_skip x/alpha + c_out F
    r = (sigma / alpha / SIGMA_DATA) ** 2
    by_hand = x[0] / alpha / (1 + r) + SIGMA_DATA * (r / (1 + r)).sqrt() * model.function(one, z[0], e[0])
    torch.testing.assert_close(denoised[0].denoise(x[0], t[0]), by_hand, rtol=1e-6, atol=1e-8)


def test_defaults_by_model_and_process():
    edm, paper = ("edm", ("lognormal", -1.2, 1.2)), ("sigma2", "uniform")
    unet, line = UNet(target="x0"), Linear(vk.features.grid(process=vk.VP()))
    cases: list[tuple[Model, vk.process.Process, tuple]] = [(unet, p, edm) for p in (vk.VP(), vk.EDM(), vk.Cosine())]
    cases += [(MLP(), p, edm) for p in (vk.EDM(), vk.VE())] + [(MLP(target="edm"), vk.VP(), edm)]
    cases += [(m, p, paper) for m in (MLP(), MLP(target="x0")) for p in (vk.VP(), vk.FlowMatching())]
    cases += [(line, vk.EDM(), paper)]
    t = torch.tensor([0.02, 0.3, 0.9], dtype=torch.float64)
    for model, process, expected in cases:
        assert model.defaults(process) == expected, (model, process)
        given = vk.models.from_spec(model.spec | {"weight": expected[0]})
        torch.testing.assert_close(model.omega(t, process), given.omega(t, process), rtol=0, atol=0)


def test_times_of_an_ensemble_are_those_of_the_model_unless_given():
    model = UNet(**TINY, steps=2)
    one, same, other = (
        vk.train_ensemble(model, IMAGES, vk.EDM(), members=1, times=times)
        for times in (None, ["lognormal", -1.2, 1.2], "log")
    )
    assert one.info["times"] == ["lognormal", -1.2, 1.2]
    assert all(torch.equal(one.state[k], same.state[k]) for k in one.state)
    assert any(not torch.equal(one.state[k], other.state[k]) for k in one.state)


def test_data_far_from_the_scale_of_the_network_are_reported():
    model, pixels = UNet(**TINY, steps=1), 127.5 * (IMAGES + 1)
    with pytest.warns(UserWarning, match=r"standard deviation 7\d.*spread=0.5.*Scale images") as found:
        vk.train_ensemble(model, pixels, vk.EDM(), members=1)
    with pytest.warns(UserWarning, match="Scale images") as both:
        vk.train_ensembles(model, pixels, vk.EDM(), ["J0", "J1"], members=1)
    assert [warning.filename for warning in (*found, *both)] == [__file__] * 2


def test_filters_of_a_unet_begin_with_the_variance_of_torch():
    training = Training(vk.Empirical(IMAGES), vk.EDM(), J1(), None)
    state, doubled = (UNet((64, 64), init_scale=a).initial(training, [0]) for a in (UNet().init_scale, 0.8))
    for name in ("down.0.0.first.weight", "bottom.1.first.weight"):
        torch.testing.assert_close(state[name].std(), torch.nn.Conv2d(64, 64, 3).weight.std(), rtol=0.05, atol=0)
    for name, p in state.items():  # filters alone have five axes, the member's among them
        torch.testing.assert_close(doubled[name], (2 if p.ndim == 5 else 1) * p)


def test_a_default_unet_is_trained_as_a_direct_implementation_trains_it():
    """A module, Adam and the published loss, on the same draws: the parameters after three steps are the same."""
    model, process = UNet((8, 8), steps=3, batch=6, ema=None, dtype="float64"), vk.EDM()
    training = Training(vk.Empirical(IMAGES), process, J1(), None, times=("lognormal", -1.2, 1.2))
    net = model.module((8, 8)).double()
    net.load_state_dict({name: p[0] for name, p in model.initial(training, [0]).items()})
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-3)
    for k in range(3):
        x, sigma, x0 = (a[0] for a in training.batch([0], 6, 6 * k))
        e = model.inputs(x[None], sigma[None], process)[1][0]
        loss = published(lambda z, e=e: net(z, e), x0, x - x0, sigma[:, None, None]).mean()
        optimiser.zero_grad()
        (loss / 2).backward()
        optimiser.step()
    found = vk.train_ensemble(model, IMAGES, process, members=1).state
    for name, p in net.named_parameters():
        torch.testing.assert_close(found[name][0], p.detach(), rtol=1e-6, atol=1e-8)
