"""The share of noise in a network's target: by simulation of the targets, in closed form, and on images."""

from __future__ import annotations

import pytest
import torch

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.score.conversions import convert

POINTS = torch.tensor([[-1.0, 0.2], [0.5, 0.5], [0.3, -0.8], [1.2, 0.1]], dtype=torch.float64)
DATA = vk.Empirical(POINTS, torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64))


@pytest.mark.parametrize("process", [vk.VP(), vk.EDM(), vk.FlowMatching()], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("target", ["noise", "x0", "score", "v", "flow", "edm"])
def test_the_share_is_that_of_simulated_targets(target, process):
    """Noise is the mean square of y - E[y|x], the whole the variance of y, over draws of (x0, x)."""
    count, c, blocks = 20_000, 2.0, 40
    g = torch.Generator().manual_seed(1)
    t = float(process.time(torch.tensor(0.7, dtype=torch.float64)))
    x0 = POINTS[torch.multinomial(DATA.weights, count, replacement=True, generator=g)]
    x = process.perturb(x0, t, g)
    m = vk.EmpiricalScore(DATA, process).denoise(x, t)
    y, mean = (convert(a, "x0", target, x, t, process) for a in (m + c * (x0 - m), m))
    noise, whole = (a.square().sum(1).reshape(blocks, -1).mean(1) for a in (y - mean, y - y.mean(0)))
    shares = noise / whole
    got = vk.network_noise_fraction(target, DATA, process, t, c, queries=count, generator=2)
    error = (float(shares.std()) ** 2 / blocks + float(got.se) ** 2) ** 0.5
    assert abs(float(got) - float(shares.mean())) < 4 * error
    assert float(got.low) < float(got) < float(got.high)


def test_a_noise_prediction_has_the_noise_fraction_and_a_denoiser_the_relative_error():
    process, t = vk.VP(), torch.tensor([0.05, 0.2, 0.5], dtype=torch.float64)
    line = vk.Empirical(torch.tensor([-1.0, 1.0], dtype=torch.float64))  # in one dimension by quadrature: exact
    rho = vk.noise_fraction(line, process, t).value
    for target in ("noise", "score", vk.models.MLP()):
        torch.testing.assert_close(vk.network_noise_fraction(target, line, process, t).value, rho)
    mmse = rho * (process.sigma(t) / process.alpha(t)).square()  # the variance of the points is 1
    torch.testing.assert_close(vk.network_noise_fraction("x0", line, process, t).value, mmse)
    # data of standard deviation sigma_data: the target of edm has variance 1, the share is mmse / c_out²
    small = vk.Empirical(torch.tensor([-0.5, 0.5], dtype=torch.float64))
    ratio = process.sigma(t) / process.alpha(t)
    mmse = vk.noise_fraction(small, process, t).value * ratio.square()
    share = vk.network_noise_fraction(vk.models.UNet(), small, process, t)
    torch.testing.assert_close(share.value, mmse * (1 / ratio.square() + 4))
    c = 3.0
    torch.testing.assert_close(
        vk.network_noise_fraction("edm", small, process, t, c).value,
        c**2 * share.value / (1 + (c**2 - 1) * share.value),
    )
    assert vk.network_noise_fraction("edm", small, process, 0.2, c=0.0).value == 0


def test_what_is_no_target_is_refused():
    with pytest.raises(InputError, match="target of a network must be one of"):
        vk.network_noise_fraction("velocity", DATA, vk.VP(), 0.1)
