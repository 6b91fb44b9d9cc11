"""A monitor changes nothing: weights with and without it are equal, bit for bit, and so are modes and random states."""

from __future__ import annotations

import copy
import random
import warnings

import numpy as np
import pytest
import torch
from monitored import PROCESS, Denoiser, average, digits, train
from torch import Tensor, nn

import vkernel as vk
from vkernel.reports.monitor.unchanged import unchanged


@pytest.fixture(scope="module")
def images() -> tuple[Tensor, Tensor]:
    return digits(48, 32)


def monitor(images: tuple[Tensor, Tensor], **options: object) -> vk.Monitor:
    given = {"predicts": "x0", "every": 2, "budget": 0.9, "images": 16, "samples": 8, "sampler_steps": 4}
    return vk.Monitor(images[0], PROCESS, test=images[1], **(given | {"progress": False} | options))


def twins(images: tuple[Tensor, Tensor], wrap=lambda net: net, **options: object) -> tuple[list[Tensor], list[Tensor]]:
    """Train the same network without and with a monitor that evaluates at every other step."""
    found = []
    for watched in (False, True):
        torch.manual_seed(3)
        network = Denoiser(dropout=0.2, norm=True)
        ema = average(network) if options.get("ema") else None
        watch = monitor(images) if watched else None
        if watch is not None:
            watch.budget.clock = iter(range(10**6)).__next__  # a clock on which evaluations cost little
        found.append(train(network, images[0], 12, watch, **(options | {"ema": ema, "call": wrap(network)})))
        assert watch is None or len(watch.records) >= 4
    return found[0], found[1]


@pytest.mark.parametrize(
    "options",
    [{}, {"autocast": True}, {"ema": True}, {"autocast": True, "ema": True}],
    ids=lambda o: "+".join(o) or "plain",
)
def test_weights_are_equal_bit_for_bit(images: tuple[Tensor, Tensor], options: dict[str, bool]) -> None:
    alone, watched = twins(images, **options)
    assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))


def compiled(backend: str):
    return lambda net: torch.compile(net, backend=backend)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_network_is_neither_changed_nor_compiled_again(images: tuple[Tensor, Tensor], backend: str) -> None:
    torch._dynamo.reset()
    try:
        alone, watched = twins(images, compiled(backend))
    except Exception as error:  # no compiler on this machine
        pytest.skip(f"torch.compile does not work here: {error}")
    assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    network = Denoiser()
    call, watch = torch.compile(network, backend=counter), monitor(images)
    train(network, images[0], 2, call=call)
    before = counter.frame_count
    assert watch.evaluate(2, call) is not None
    train(network, images[0], 2, call=call)
    assert counter.frame_count == before


def test_autocast_keeps_no_weights_without_gradient(images: tuple[Tensor, Tensor]) -> None:
    """In older versions of torch the cache of autocast returns what an evaluation without gradients put there."""
    network, x, watch = Denoiser(), images[0][:4], monitor(images)
    gradients = []
    for watched in (False, True):
        network.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            assert not watched or watch.evaluate(1, network) is not None
            assert torch.is_autocast_cache_enabled()
            network(x, torch.full((4,), 0.5)).float().square().mean().backward()
        gradients.append(network.last.weight.grad.clone())
    assert torch.equal(*gradients)
    seen = []
    network.register_forward_hook(lambda *_: seen.append(torch.is_autocast_cache_enabled()))
    with torch.autocast("cpu", torch.bfloat16):
        watch.evaluate(1, network)
    assert seen
    assert not any(seen)


class Careless(nn.Module):
    """Draws random numbers of three libraries and counts its calls, also in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        self.calls += 1
        return self.scale * x + 0.01 * (torch.randn_like(x) + random.random() + np.random.rand())  # noqa: NPY002


def test_random_states_buffers_modes_and_gradients_stay(images: tuple[Tensor, Tensor]) -> None:
    network = nn.Sequential(nn.Dropout(), nn.Dropout()).train()
    network[1].eval()
    careless = Careless()
    careless.scale.grad = torch.full((), 7.0)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    watch = monitor(images)
    assert watch.evaluate(0, careless) is not None
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert before[2] == np.random.get_state()[1].tolist()  # noqa: NPY002
    assert careless.training
    assert careless.calls == 0
    assert careless.scale.grad == 7.0
    with unchanged([network, *network], torch.device("cpu")):
        assert not any(m.training for m in network)
        assert not torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
    assert [m.training for m in (network, *network)] == [True, True, False]


def test_states_are_restored_when_the_network_fails(images: tuple[Tensor, Tensor]) -> None:
    class Failing(Denoiser):
        def forward(self, x: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
            torch.rand(3)
            raise ValueError("no")

    network, before = Failing(), torch.get_rng_state()
    watch = monitor(images)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        assert watch(0, network) is None
    assert network.training
    assert network.drop.training
    assert torch.is_grad_enabled()
    assert torch.equal(before, torch.get_rng_state())


# -------------------- averaged weights, and wrappers


class Shadow:
    """Averaged weights as diffusers' EMAModel has them."""

    def __init__(self, network: nn.Module) -> None:
        self.averages = [p.detach().clone() for p in network.parameters()]

    def store(self, parameters) -> None:
        self.kept = [p.detach().clone() for p in parameters]

    def copy_to(self, parameters) -> None:
        for p, a in zip(parameters, self.averages, strict=True):
            p.data.copy_(a)

    def restore(self, parameters) -> None:
        for p, a in zip(parameters, self.kept, strict=True):
            p.data.copy_(a)


class ShadowParams:
    def __init__(self, network: nn.Module) -> None:
        self.shadow_params = [p.detach().clone() for p in network.parameters()]


def test_averaged_weights_of_every_form_give_the_same_numbers(images: tuple[Tensor, Tensor]) -> None:
    torch.manual_seed(0)
    network, averaged = Denoiser(), Denoiser()
    swa = torch.optim.swa_utils.AveragedModel(network)
    swa.module.load_state_dict(averaged.state_dict())
    prefixed = {f"module.{name}": p for name, p in averaged.state_dict().items()}
    forms = [averaged, swa, averaged.state_dict(), prefixed, dict(averaged.named_parameters()), Shadow(averaged)]
    forms += [ShadowParams(averaged)]
    watch, before = monitor(images), copy.deepcopy(network.state_dict())
    expected = watch.evaluate(0, averaged)
    for form in forms:
        found = watch.evaluate(0, network, form)
        assert found is not None, type(form)
        assert torch.allclose(found.images["test"], expected.images["test"], rtol=1e-6)
        assert found.weights == "ema"
        assert all(torch.equal(a, before[name]) for name, a in network.state_dict().items())


def test_diffusers_averages(images: tuple[Tensor, Tensor], diffusers: object) -> None:
    network = Denoiser()
    ema = diffusers.training_utils.EMAModel(network.parameters())
    assert monitor(images).evaluate(0, network, ema).weights == "ema"


def test_wrappers_are_taken_off(images: tuple[Tensor, Tensor]) -> None:
    torch.manual_seed(0)
    network = Denoiser()
    watch = monitor(images)
    expected = watch.evaluate(0, network).images["test"]
    for wrapped in (nn.DataParallel(network), torch.compile(network), torch.compile(nn.DataParallel(network))):
        assert torch.equal(watch.evaluate(0, wrapped).images["test"], expected)
    split = type("FullyShardedDataParallel", (Denoiser,), {})()
    with pytest.warns(UserWarning, match="split over devices"):
        assert watch.evaluate(0, split) is None


def test_only_the_first_rank_evaluates(images: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    watch = monitor(images)
    assert watch(0, Denoiser()) is None
    assert watch.evaluate(0, Denoiser()) is None
    watch.close()
    assert "another rank" in repr(watch)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    assert monitor(images)(0, Denoiser()) is not None
