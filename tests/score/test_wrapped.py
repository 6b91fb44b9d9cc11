"""Functions and modules as scores: every convention gives the same score."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checkpoints import (
    TO,
    digits,
    normal,
    wrap,
)
from torch import Tensor, nn

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.score import conversions as pr


@pytest.mark.parametrize("prediction", [*TO, "score"])
@pytest.mark.parametrize(
    ("process", "time"),
    [(vk.DDPM.linear(), "index"), (vk.DDPM.linear(), "reversed"), (vk.DDPM.linear(), "fraction"), (vk.EDM(), "sigma")],
    ids=["index", "reversed", "fraction", "edm"],
)
def test_every_prediction_and_time_gives_the_same_score(prediction: str, process: vk.Process, time: str) -> None:
    """A network made of the exact score, in any convention, is read back as that score."""
    exact = vk.EmpiricalScore(digits(), process)
    back = {"index": lambda a: a, "reversed": lambda a: 999 - a, "fraction": lambda a: a * 999, "sigma": lambda a: a}
    sign = -1 if (prediction, time) == ("flow", "reversed") else 1

    def net(x: Tensor, told: Tensor) -> Tensor:
        assert told.shape == x.shape[:1]
        assert told.is_floating_point() == (time in ("fraction", "sigma"))
        t = back[time](told.double()).clamp(process.eps, process.T)
        return sign * (exact(x, t) if prediction == "score" else TO[prediction](exact)(x, t))

    read = wrap(net, process, predicts=prediction, time=time, shape=(1, 8, 8))
    x = normal(2, 3, 1, 8, 8).double()
    t = torch.tensor([0.3, 0.6, 0.9], dtype=torch.float64).mul(process.T)
    rounded = t.round() if time in ("index", "reversed") else t
    torch.testing.assert_close(read(x, t), exact(x, rounded), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(read.denoise(x, t), exact.posterior(x, rounded).mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(read.noise(x, t), pr.to_noise(exact)(x, rounded.expand(2, 3)), rtol=1e-6, atol=1e-8)


def test_flow_matching_both_ways_of_time() -> None:
    process = vk.FlowMatching()
    exact = vk.EmpiricalScore(digits(), process)
    flow = pr.to_flow(exact)
    x, t = normal(4, 1, 8, 8).double(), torch.tensor([0.1, 0.4, 0.7, 0.9], dtype=torch.float64)
    here = wrap(flow, process, predicts="flow", time="fraction")
    there = wrap(lambda x, u: -flow(x, 1 - u), process, predicts="flow", time="reversed")
    scaled = wrap(lambda x, u: flow(x, u / 1000), process, predicts="flow", time="index:1000")
    for net in (here, there, scaled):
        torch.testing.assert_close(net(x, t), exact(x, t))


def test_batches_chunks_types_and_gradients() -> None:
    torch.manual_seed(0)
    net = nn.Conv2d(1, 1, 3, padding=1).double()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.sizes = net, []

        def forward(self, x: Tensor, i: Tensor) -> tuple[Tensor]:
            self.sizes.append(len(x))
            return (torch.tanh(self.inner(x)) * (1 + i.to(x)[:, None, None, None]),)

    module = Net()
    whole = wrap(module, vk.DDPM.linear(), shape=(1, 4, 4))
    assert not module.training
    x, t = normal(3, 5, 1, 4, 4), torch.tensor([7.0, 300.4, 999.0])[:, None]
    out = whole(x, t)
    assert (out.dtype, out.requires_grad) == (torch.float32, False)
    parts = replace(whole, batch=4)
    module.sizes.clear()
    torch.testing.assert_close(parts(x, t), out, rtol=1e-6, atol=1e-7)
    assert module.sizes == [4, 4, 4, 3]
    torch.testing.assert_close(whole(x[1, 2], 300.4), out[1, 2])
    torch.testing.assert_close(whole(x, 300.4)[1], out[1])
    v = normal(3, 5, 1, 4, 4, seed=1).double()
    a = x.double().requires_grad_()
    (gradient,) = torch.autograd.grad(whole(a, t), a, v)
    with pytest.raises(InputError, match="does not broadcast"):
        whole(x, torch.ones(3))
    forward = torch.func.jvp(lambda q: whole(q, t), (x.double(),), (v,))[1]
    numeric = (whole(x.double() + 1e-6 * v, t) - whole(x.double() - 1e-6 * v, t)) / 2e-6
    torch.testing.assert_close(forward, numeric, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close((gradient * v).sum(), (forward * v).sum())


def test_data_come_to_the_range_of_the_network() -> None:
    stored = torch.randint(0, 256, (5, 1, 4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    net = wrap(lambda x, t: x, vk.EDM(), predicts="x0", time="sigma", range="-.5,.5")
    for scale in (None, (-1, 1), (0, 1), (-0.5, 0.5)):
        moved = net.scaled(vk.Empirical(stored, scale=scale))
        want = vk.Empirical(stored, scale=(-0.5, 0.5))
        torch.testing.assert_close(moved[:5], want[:5])
        torch.testing.assert_close(moved.center, want.center)
        assert moved.spread == pytest.approx(want.spread)
    floats = vk.Empirical(stored.float())
    assert net.scaled(floats) is floats


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"predicts": "epsilon"}, 'predicts="epsilon" is called "noise" here'),
        ({"time": "seconds"}, "time must be one of t, index"),
        ({"time": "fraction:x"}, "no number after the colon"),
        ({"time": "index:1000"}, "defines its indices"),
        ({"range": "1,-1"}, "low < high"),
        ({"range": "0"}, "two numbers"),
        ({"process": vk.FlowMatching()}, "index:1000"),
        ({"process": None}, "process must be"),
        ({"net": 3}, "callable"),
        ({"predicts": "edm", "sigma_data": 0.0}, "sigma_data"),
    ],
)
def test_what_makes_no_checkpoint_is_refused(change: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        wrap(**({"net": lambda x, t: x, "process": vk.DDPM.linear()} | change))


def test_what_a_network_may_not_return() -> None:
    process = vk.DDPM.linear()
    with pytest.raises(InputError, match="returned a str"):
        wrap(lambda x, t: "no", process)(normal(2, 1, 4, 4), 3)
    with pytest.raises(InputError, match="same shape"):
        wrap(lambda x, t: x[:, :, :2], process)(normal(2, 1, 4, 4), 3)
    with pytest.raises(InputError, match="outside"):
        wrap(lambda x, t: x, process)(normal(2, 1, 4, 4), 1000.5)
    with pytest.raises(InputError, match="event shape"):
        wrap(lambda x, t: x, process, shape=(3, 4, 4))(normal(2, 1, 4, 4), 3)


def test_a_raw_edm_network_is_its_preconditioned_denoiser() -> None:
    """F(c_in x, log(σ)/4) with x0 = c_skip x + c_out F, under EDM and at equal σ/α under VP (Karras et al. 2022)."""
    sd, inner = 0.7, torch.nn.Linear(3, 3).double()

    def raw(x: Tensor, c: Tensor) -> Tensor:
        return torch.tanh(inner(x)) + c[:, None]

    x, sigma = normal(5, 3).double(), torch.tensor([0.1, 0.5, 1.0, 3.0, 9.0], dtype=torch.float64)[:, None]
    skip, out = sd**2 / (sigma**2 + sd**2), sigma * sd / (sigma**2 + sd**2).sqrt()
    want = skip * x + out * raw(x / (sigma**2 + sd**2).sqrt(), sigma[:, 0].log() / 4)
    edm, vp = (vk.as_score(raw, p, predicts="edm", time="c_noise", sigma_data=sd) for p in (vk.EDM(), vk.VP()))
    torch.testing.assert_close(edm.denoise(x, sigma[:, 0]), want)
    moved, t = vk.EDM().convert(x, sigma[:, 0], vk.VP())
    torch.testing.assert_close(vp.denoise(moved, t), want)
    torch.testing.assert_close(edm(x, sigma[:, 0]), (want - x) / sigma**2)
    back = pr.convert(want, "x0", "edm", x, sigma[:, 0], vk.EDM(), sd)
    torch.testing.assert_close(back, edm.output(x, sigma[:, 0]))
