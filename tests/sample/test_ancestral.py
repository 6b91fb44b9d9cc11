"""Ancestral steps against the recursion of their moments; samples that diverge."""

from __future__ import annotations

import math

import torch

import vkernel as vk
from vkernel.sample import ancestral, pf_ode


def test_ancestral_steps_have_the_exact_moments_of_their_chain():
    """For a Gaussian population the chain is linear; noise by step replaces the generator; NaN may be kept."""
    process, mu, v = vk.VPSong(eps=0.01), 1.5, 0.25
    score = vk.GaussianMixture(torch.tensor([[mu]], dtype=torch.float64), None, v).score(process)
    x_T = process.prior((40000, 1), generator=3, dtype=torch.float64)
    solution = ancestral(score, x_T, steps=20, generator=4, save="path")
    alpha, sigma = process.alpha(solution.times).tolist(), process.sigma(solution.times).tolist()
    m, s = 0.0, sigma[0] ** 2
    for k in range(20):
        gain = alpha[k] * v / (alpha[k] ** 2 * v + sigma[k] ** 2)  # the denoiser is mu + gain (x - alpha mu)
        c = sigma[k + 1] * alpha[k] / (alpha[k + 1] * sigma[k])
        kept = c * sigma[k + 1] / sigma[k]
        rest = alpha[k + 1] - kept * alpha[k]
        a = kept + rest * gain
        m, s = a * m + rest * mu * (1 - gain * alpha[k]), a * a * s + sigma[k + 1] ** 2 * (1 - c * c)
        x = solution.path[k + 1]
        assert abs(float(x.mean()) - m) < 4.5 * math.sqrt(s / len(x))
        assert abs(float(x.var()) / s - 1) < 4.5 * math.sqrt(2 / len(x))
    still = ancestral(score, x_T[:5], steps=20, noise=lambda k: torch.zeros(5, 1))
    assert torch.equal(still, ancestral(score, x_T[:5], steps=20, noise=lambda k: torch.zeros(5, 1)))
    lost = vk.as_score(lambda x, t: x * math.nan, process)
    assert ancestral(lost, x_T[:2], steps=2, allow_nan=True).isnan().all()
    assert pf_ode(lost, x_T[:2], steps=2, allow_nan=True).isnan().all()
