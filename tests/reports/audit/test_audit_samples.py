"""Samples of a network: closed forms, steps of diffusers, noise that belongs to its sample, refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from checkpoints import wrap
from torch import Tensor

import vkernel as vk
from vkernel.core import rng
from vkernel.core.errors import InputError
from vkernel.reports.audit.draw import draw, sampling_times, start

DDPM = vk.DDPM.linear(1e-3, 0.2, 40)
PROCESSES = [DDPM, vk.VP(), vk.EDM(), vk.FlowMatching(), vk.Cosine(), vk.VE(), vk.EDM(eps=0.0, T=5.0)]


def population(means: Any, variance: Any, process: vk.Process) -> vk.Score:
    """Return the exact score of a mixture of Gaussians."""
    return vk.GaussianMixture(means, variance=variance).score(process)


def network(scale: float = 1.0, process: vk.Process = DDPM, **given: Any) -> vk.Score:
    """Return a network with an index input that predicts noise, and not well."""

    def net(x: Tensor, index: Tensor) -> Tensor:
        return scale * torch.sin(3 * x + 0.1 * index.reshape(-1, *(1,) * (x.ndim - 1)))

    return wrap(net, process, shape=(1, 4, 4), **given)


@pytest.mark.parametrize("process", PROCESSES, ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("kind", ["ode", "ancestral"])
def test_mean_and_variance_of_gaussian_data_by_recursion(kind: str, process: vk.Process):
    """With x0 ~ N(mu, v) every step is affine, so that mean and variance of x follow by two recursions."""
    mu, v, n = 0.7, 0.4, 40_000
    net = population([mu], v, process)
    t = sampling_times(net, kind, 8)
    alpha, sigma = process.alpha(t), process.sigma(t)
    ratio = sigma / alpha
    gain = alpha * v / (alpha**2 * v + sigma**2)  # m = mu + gain (x - alpha mu)
    slope, shift, fresh = torch.ones(()).double(), torch.zeros(()).double(), torch.zeros(()).double()
    before: tuple[Tensor, Tensor] | None = None
    for k in range(len(t) - 1):
        m = gain[k] * slope, mu + gain[k] * (shift - alpha[k] * mu)
        image = m
        if kind == "ode" and before is not None:
            w = torch.log(ratio[k + 1] / ratio[k]) / (2 * torch.log(ratio[k] / ratio[k - 1]))
            image = m[0] + w * (m[0] - before[0]), m[1] + w * (m[1] - before[1])
        before = m
        c = 1 if kind == "ode" else ratio[k + 1] / ratio[k]
        kept = c * sigma[k + 1] / sigma[k]
        rest = alpha[k + 1] - kept * alpha[k]
        slope, shift = kept * slope + rest * image[0], kept * shift + rest * image[1]
        fresh = (kept + rest * gain[k]) ** 2 * fresh + sigma[k + 1] ** 2 * (1 - torch.as_tensor(c) ** 2)
    slope, shift = gain[-1] * slope, mu + gain[-1] * (shift - alpha[-1] * mu)
    variance = float((slope * float(process.sigma(process.T))) ** 2 + gain[-1] ** 2 * fresh)
    x = draw(net, start(net, n, 3, (1,)).double(), kind, steps=8, seed=5).flatten()
    assert float(x.mean() - shift) == pytest.approx(0, abs=4.5 * math.sqrt(variance / n))
    assert float(x.var()) == pytest.approx(variance, rel=4.5 * math.sqrt(2 / n))


def test_many_ancestral_steps_draw_the_population():
    net = population([[-2.0, 0.0], [1.0, 1.0]], 0.05, vk.VPSong())
    x = draw(net, start(net, 4000, 0, (2,)), "ancestral", steps=200)
    left = x[x[:, 0] < -0.5]
    assert len(left) / len(x) == pytest.approx(0.5, abs=0.04)
    assert left.mean(0).tolist() == pytest.approx([-2.0, 0.0], abs=0.03)
    assert left.var(0).tolist() == pytest.approx([0.05, 0.05], rel=0.15)


@pytest.mark.parametrize("kind", ["ode", "ancestral"])
def test_the_score_of_few_points_gives_them_back(kind: str):
    data = vk.Empirical([[0.0, 1.0], [1.0, 0.0], [-1.0, -1.0], [2.0, 2.0]])
    net = vk.EmpiricalScore(data, vk.DDPM.linear(1e-4, 0.2, 100))
    x = draw(net, start(net, 200, 1, (2,)), kind, steps=None)
    gap, which = torch.cdist(x.double(), data.rows(0, 4).double()).min(1)
    assert (gap < 1e-2).float().mean() > 0.97  # the flow may end between two
    assert set(which.tolist()) == {0, 1, 2, 3}


def test_the_flow_is_of_second_order():
    process = vk.VPSong(eps=0.05)
    net = population([[-1.0, 0.3], [1.0, -0.2]], 0.3, process)
    x_T = start(net, 50, 0, (2,)).double()
    exact = vk.sample.pf_ode(net, x_T, method="dopri5", tolerance=1e-9)
    true = net.denoise(exact, process.eps)
    errors = [float((draw(net, x_T, steps=k) - true).norm()) for k in (33, 65, 129)]
    orders = [math.log2(a / b) for a, b in pairwise(errors)]
    assert min(orders) > 1.7, (errors, orders)


def test_two_steps_are_exponential_steps():
    """The first step of the flow has nothing to look back at: it is pf_ode's."""
    net = population([[-1.0], [1.0]], 0.3, vk.EDM(eps=0.5, T=5.0))
    x_T = start(net, 9, 0, (1,)).double()
    one = vk.sample.pf_ode(net, x_T, steps=1)
    torch.testing.assert_close(draw(net, x_T, steps=2), net.denoise(one, 0.5))
    torch.testing.assert_close(draw(net, x_T, steps=1), net.denoise(x_T, 5.0))


@pytest.mark.parametrize("steps", [None, 10])
def test_ancestral_steps_are_those_of_diffusers(steps: int | None, monkeypatch: pytest.MonkeyPatch):
    """All indices, and every fourth: "leading" times are those of a process that ends at the first of them."""
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.DDPMScheduler(
        num_train_timesteps=40, trained_betas=DDPM.betas, clip_sample=False, variance_type="fixed_small"
    )
    scheduler.set_timesteps(steps or 40)
    net = network(process=DDPM if steps is None else vk.DDPM(DDPM.betas, T=36))
    assert sampling_times(net, "ancestral", steps).tolist() == scheduler.timesteps.tolist()
    x = x_T = start(net, 3, 0, (1, 4, 4)).double()
    seen: list[Tensor] = []

    def noise(shape: Any, **_: Any) -> Tensor:
        key = rng.key(7, "noise of ancestral steps", len(seen))
        own = rng.hashed(torch.tensor(key), torch.arange(3))
        seen.append(rng.normals(own[:, None], torch.arange(16)).reshape(tuple(shape)))
        return seen[-1]

    monkeypatch.setattr("diffusers.schedulers.scheduling_ddpm.randn_tensor", noise)
    for i in scheduler.timesteps:
        x = scheduler.step(net.output(x, i), int(i), x).prev_sample
    assert len(seen) == len(scheduler.timesteps) - 1
    torch.testing.assert_close(draw(net, x_T, "ancestral", steps=steps, seed=7), x, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("kind", ["ode", "ancestral"])
def test_noise_belongs_to_its_sample(kind: str):
    net = network()
    few, many = start(net, 3, 0, (1, 4, 4)), start(net, 7, 0, (1, 4, 4))
    assert torch.equal(few, many[:3])
    assert not torch.equal(start(net, 3, 1, (1, 4, 4)), few)
    whole = draw(net, many, kind, steps=6)
    torch.testing.assert_close(draw(network(name="small"), few, kind, steps=6), whole[:3])
    other = replace(net, batch=2)
    torch.testing.assert_close(draw(other, many, kind, steps=6), whole)
    assert torch.equal(draw(net, many, kind, steps=6, seed=1), whole) == (kind == "ode")


def test_noise_is_standard():
    net = population([0.0], 1.0, vk.EDM(T=2.0))
    z = start(net, 500, 0, (3, 20)).double() / 2
    assert float(z.mean()) == pytest.approx(0, abs=4 / math.sqrt(z.numel()))
    assert float(z.var()) == pytest.approx(1, abs=6 / math.sqrt(z.numel()))
    assert float((z[1:] * z[:-1]).mean()) == pytest.approx(0, abs=4 / math.sqrt(z.numel()))


def test_times_are_the_networks_own():
    net = network()
    assert sampling_times(net, "ancestral", None).tolist() == list(range(39, -1, -1))
    assert sampling_times(net, "ancestral", 500).tolist() == list(range(39, -1, -1))
    assert sampling_times(net, "ancestral", 4).tolist() == [39, 26, 13, 0]
    flow = sampling_times(net, "ode", 30)
    assert flow.tolist() == sorted({round(t) for t in flow.tolist()}, reverse=True)
    assert flow[0] == 39 and flow[-1] == 0  # noqa: PT018
    assert len(sampling_times(population([0.0], 1.0, vk.EDM()), "ode", None)) == 1000
    assert sampling_times(population([0.0], 1.0, vk.EDM(eps=0.0, T=1.0)), "ode", 5).min() > 0


def test_progress_is_reported_and_samples_may_diverge():
    shares: list[float] = []
    x_T = start(network(), 2, 0, (1, 4, 4))
    draw(network(), x_T, steps=5, progress=lambda label, share: shares.append(share))
    assert shares == [0.25, 0.5, 0.75, 1]
    wild = wrap(lambda x, t: x * math.nan, DDPM, shape=(1, 4, 4))
    assert draw(wild, x_T, "ancestral", steps=3).isnan().all()
    assert draw(network(), x_T.half(), steps=3).dtype == torch.float16
    assert draw(network(), x_T.round().int(), steps=3).dtype == torch.get_default_dtype()


def test_what_cannot_be_drawn_is_refused():
    net = network()
    x_T = start(net, 2, 0, (1, 4, 4))

    def broken(x: Tensor, t: Tensor) -> Tensor:
        raise RuntimeError("no such layer")

    calls = [
        ("needs a Score", lambda: draw(lambda x, t: x, x_T)),
        ("needs a Score", lambda: start(3, 2, 0, (1,))),
        ("isotropic", lambda: start(vk.EmpiricalScore(vk.Empirical([[0.0, 1.0]]), _oval()), 2, 0, (2,))),
        ("kind must be", lambda: draw(net, x_T, "heun")),
        ("steps must be", lambda: draw(net, x_T, steps=0)),
        ("steps must be", lambda: draw(net, x_T, steps=2.5)),  # type: ignore[arg-type]
        ("x_T must be a torch", lambda: draw(net, [[1.0]])),  # type: ignore[arg-type]
        ("x_T must be \\(n", lambda: draw(net, torch.zeros(3))),
        ("finite", lambda: draw(net, x_T * math.nan)),
        ("must end in the event shape", lambda: draw(net, torch.zeros(2, 1, 5, 5))),
        ("no such layer", lambda: draw(wrap(broken, DDPM), x_T)),
        ("same shape", lambda: draw(wrap(lambda x, t: x[:1], DDPM), x_T)),
        ("seed must be", lambda: draw(net, x_T, seed=0.5)),  # type: ignore[arg-type]
        ("n must be", lambda: start(net, 0, 0, (1,))),
        ("shape must be", lambda: start(net, 1, 0, (0,))),
        ("shape must be", lambda: start(net, 1, 0, 5)),  # type: ignore[arg-type]
    ]
    for words, call in calls:
        with pytest.raises(InputError, match=words):
            call()


def _oval() -> vk.Process:
    return vk.Anisotropic(vk.EDM(), torch.tensor([1.0, 2.0]))
