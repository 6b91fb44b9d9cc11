"""Conventions of networks that are trained with schedulers of diffusers: noised and denoised images are the same."""

from __future__ import annotations

import pytest
import torch
from checkpoints import normal

import vkernel as vk
from vkernel.adapters import conventions_of
from vkernel.core.errors import InputError


@pytest.mark.parametrize("kind", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("schedule", ["linear", "scaled_linear", "squaredcos_cap_v2"])
def test_betas(diffusers: object, kind: str, schedule: str) -> None:
    scheduler = diffusers.DDPMScheduler(300, beta_schedule=schedule, prediction_type=kind)
    found, x0, noise, i = conventions_of(scheduler), normal(3, 1, 4, 4), normal(3, 1, 4, 4, seed=1), [0, 150, 299]
    process, t = found["process"], torch.tensor(i)
    assert found["time"] == "index"
    alpha, sigma = (f(t.double())[:, None, None, None].float() for f in (process.alpha, process.sigma))
    x = scheduler.add_noise(x0, noise, t)
    torch.testing.assert_close(alpha * x0 + sigma * noise, x, rtol=1e-5, atol=1e-5)
    wanted = {"epsilon": noise, "sample": x0, "v_prediction": scheduler.get_velocity(x0, noise, t)}[kind]
    score = vk.as_score(lambda x, index: wanted, **found)
    torch.testing.assert_close(score.denoise(x, t)[:2], x0[:2], rtol=1e-3, atol=1e-3)


def test_zero_terminal_snr(diffusers: object) -> None:
    scheduler = diffusers.DDPMScheduler(100, rescale_betas_zero_snr=True, prediction_type="v_prediction")
    found = conventions_of(scheduler)
    assert (found["process"].T, found["predicts"]) == (98, "v")  # the last index has no signal
    alpha = found["process"].alpha(torch.arange(99.0, dtype=torch.float64))
    torch.testing.assert_close(alpha.float(), scheduler.alphas_cumprod[:99].sqrt(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_flow_matching(diffusers: object, shift: float) -> None:
    """The scheduler noises images, and the network is called with its timesteps, also with shifted ones."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    found = conventions_of(scheduler)
    x0, noise, t = normal(3, 1, 4, 4), normal(3, 1, 4, 4, seed=1), scheduler.timesteps[[100, 500, 900]]
    x = scheduler.scale_noise(x0, t, noise)

    def network(given: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        torch.testing.assert_close(time.float(), t, rtol=1e-5, atol=1e-3)
        return noise - x0

    torch.testing.assert_close(vk.as_score(network, **found).denoise(x, t.double() / 1000), x0, rtol=1e-4, atol=1e-4)
    solver = diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    assert conventions_of(solver) == found
    solver.set_timesteps(20)
    torch.testing.assert_close(solver.timesteps.double() / 1000, solver.sigmas[:-1].double(), rtol=2e-3, atol=2e-3)


def test_EDM(diffusers: object) -> None:
    scheduler = diffusers.EDMEulerScheduler(sigma_max=20.0, sigma_data=0.4)
    found, x, sigma = conventions_of(scheduler), normal(3, 1, 4, 4), torch.tensor([0.01, 0.5, 20.0])
    full = sigma[:, None, None, None]

    def network(x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return x.sin() + noise[:, None, None, None]

    raw = network(scheduler.precondition_inputs(x, full), scheduler.precondition_noise(sigma))
    want = scheduler.precondition_outputs(x, raw, full)
    torch.testing.assert_close(vk.as_score(network, **found).denoise(x, sigma), want, rtol=1e-4, atol=1e-4)


def test_refusals(diffusers: object) -> None:
    flow = {"prediction_type": "flow_prediction"}
    for scheduler, words in (
        (diffusers.ScoreSdeVeScheduler(), "has no betas"),
        (diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True), "time from noise to data; state process="),
        (diffusers.EDMEulerScheduler(prediction_type="v_prediction"), "not 'epsilon', EDM's raw network"),
        (diffusers.UniPCMultistepScheduler(use_flow_sigmas=True), "not 'flow_prediction'"),
        (diffusers.UniPCMultistepScheduler(**flow), "prediction_type must be one of"),
        (3, "int has no betas"),
    ):
        with pytest.raises(InputError, match=words):
            conventions_of(scheduler)


def test_a_monitor_takes_them(diffusers: object) -> None:
    images = normal(64, 1, 4, 4)
    for scheduler in (diffusers.DDPMScheduler(), diffusers.FlowMatchEulerDiscreteScheduler()):
        small = {"images": 8, "samples": 4, "sampler_steps": 2, "progress": False}
        monitor = vk.Monitor(images[:32], test=images[32:], **conventions_of(scheduler), **small)
        assert monitor.evaluate(0, lambda x, t: torch.zeros_like(x)).finite
