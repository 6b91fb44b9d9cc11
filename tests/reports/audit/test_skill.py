"""Skill over a linear denoiser: Gaussian data, where nothing beats it, and clusters, where much does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.reports.audit import Checkpoint, skill
from vkernel.reports.audit.directions import Linear

PROCESS = vk.EDM()


def gaussian(n: int, seed: int = 0) -> tuple[vk.Empirical, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    root = torch.randn(4, 4, generator=g, dtype=torch.float64)
    return vk.Empirical(torch.randn(n, 4, generator=g, dtype=torch.float64) @ root.mT), root @ root.mT


def as_net(score: object, data: vk.Empirical) -> Checkpoint:
    return Checkpoint.from_callable(score, PROCESS, prediction="score", time=lambda t: t, shape=data.shape)


def linear_score(cov: torch.Tensor) -> object:
    def score(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        eye = torch.eye(4, dtype=x.dtype)
        return -torch.linalg.solve(cov.to(x.dtype) + t.to(x.dtype).reshape(-1, 1, 1) ** 2 * eye, x[..., None])[..., 0]

    return score


def test_of_gaussian_data_nothing_beats_the_linear_denoiser():
    data, cov = gaussian(4000)
    found = skill(as_net(linear_score(cov), data), data, images=1000)
    assert torch.allclose(found.ratio.value, torch.ones(6, dtype=torch.float64), atol=0.02)
    assert abs(found.skill.value) < 0.02
    assert found.under == (found.skill.high < 0.1)
    # the error of the best linear denoiser in closed form: tr α²Σ(α²Σ + σ²)⁻¹ / d
    for t, value, se in zip(found.t, found.linear.value, found.linear.se, strict=True):
        exact = torch.trace(cov @ torch.linalg.inv(cov + t**2 * torch.eye(4, dtype=torch.float64))) / 4
        assert abs(float(value - exact)) < 5 * float(se) + 0.02 * float(exact)


def test_of_clusters_the_exact_denoiser_is_far_better_and_a_bad_one_is_called_under_trained():
    centres = 3 * torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    law = vk.GaussianMixture(centres, variance=0.01)
    data = vk.Empirical(law.sample(2000, 0))
    exact = skill(as_net(lambda x, t: vk.EmpiricalScore(data, PROCESS)(x, t), data), data)
    assert exact.skill.low > 0.5
    assert not exact.under
    assert "is trained" in exact.words
    bad = skill(as_net(lambda x, t: -x / (9 + 2 * t.reshape(-1, 1) ** 2), data), data)
    assert bad.under
    assert "under-trained" in bad.words
    assert set(bad.to_dataset().data_vars) >= {"ratio", "ratio_low", "ratio_high", "error", "linear"}


def test_intervals_cover_over_sets_of_images():
    """The ratio at one level, against its value on very many images: 95 % intervals hold it about as often."""
    data, cov = gaussian(60_000, seed=3)
    wrong = as_net(linear_score(1.5 * cov), data)
    truth = skill(wrong, data, levels=2, images=20_000).ratio.value
    inside = []
    for seed in range(60):
        ratio = skill(wrong, data, levels=2, images=40, seed=seed).ratio
        inside.append(((ratio.low <= truth) & (truth <= ratio.high)).tolist())
    share = np.mean(inside, axis=0)
    assert (share > 0.83).all(), share  # three standard errors below .95 are .866; the fit of Σ varies too


def test_linear_has_the_same_axes_from_few_and_many_images():
    points = torch.randn(12, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = vk.Empirical(points)
    for some in (data, vk.Empirical(points[:5])):
        linear, rows = Linear.of(some, 0), some.take(torch.arange(some.n)) - some.center
        cov = rows.mT @ rows / some.n
        x = torch.randn(3, 9, dtype=torch.float64)
        expected = 0.7 * torch.linalg.solve(0.25 * cov + 0.49 * torch.eye(9, dtype=torch.float64), x.mT).mT
        torch.testing.assert_close(linear(x, 0.5, 0.7), expected)


def test_refusals():
    data, cov = gaussian(20)
    net = as_net(linear_score(cov), data)
    with pytest.raises(InputError, match="8 training images"):
        skill(net, data.subset(torch.arange(7)))
    with pytest.raises(InputError, match="equal"):
        skill(net, vk.Empirical(torch.ones(20, 4)))
    with pytest.raises(InputError, match="4 images"):
        skill(net, data, images=2)
    with pytest.raises(InputError, match="NaN"):
        skill(as_net(lambda x, t: x * float("nan"), data), data)
    assert skill(net, data, images=500).error.value.isfinite().all()  # half of the images remain for the fit
