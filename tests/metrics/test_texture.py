"""Texture distinguishes images from noise, whatever their brightness and contrast."""

import math

import pytest
import torch

import vkernel as vk
from vkernel.metrics.texture import neighbour_correlation, texture

G = torch.Generator().manual_seed(0)
DIGITS = vk.data.digits()


def test_texture_is_the_correlation_of_neighbours() -> None:
    # a sine of wavelength w has the correlation cos(2π/w)
    place = torch.arange(64.0)
    wave = (2 * math.pi * place / 16).sin() * torch.ones(64, 1)
    both = neighbour_correlation(torch.stack([wave, wave.mT])[:, None])
    want = (1 + math.cos(2 * math.pi / 16)) / 2  # the other axis is constant
    torch.testing.assert_close(both, torch.full((2,), want, dtype=torch.float64), atol=0.005, rtol=0)
    white = neighbour_correlation(torch.randn(400, 3, 12, 12, generator=G))
    assert abs(float(white.mean())) < 4 * float(white.std()) / 20
    board = (torch.arange(8)[:, None] + torch.arange(8)) % 2
    assert float(neighbour_correlation(board[None, None].float())) == pytest.approx(-1)


def test_real_images_are_no_noise_and_noise_is() -> None:
    train, real = vk.Empirical(DIGITS[:900]), DIGITS[900:1100]
    found = texture(real, train)
    assert found is not None
    assert not found.noisy
    assert found.noise.value < 0.02
    for noise in (torch.randn(200, 1, 8, 8, generator=G), 1e200 * torch.randn(200, 1, 8, 8, generator=G).double() + 3):
        found = texture(noise, train)
        assert found is not None
        assert found.noisy
        assert found.noise.low > 0.8
        assert abs(found.samples) < 0.1 < found.data
    mixed = texture(torch.cat([real[:60], torch.randn(40, 1, 8, 8, generator=G)]), train)
    assert mixed is not None
    assert not mixed.noisy
    assert mixed.noise.low < 0.4 < mixed.noise.high


def test_what_has_no_texture_is_no_noise() -> None:
    odd = torch.stack([torch.full((1, 8, 8), v) for v in (0.0, 3.0, math.nan, math.inf)])
    found = texture(odd, vk.Empirical(DIGITS[:200]))
    assert found is not None
    assert found.noise.value == 0


def test_rough_data_and_vectors_tell_nothing() -> None:
    rough = torch.randn(100, 1, 8, 8, generator=G)
    assert texture(rough, vk.Empirical(rough)) is None
    assert texture(rough.flatten(1), vk.Empirical(rough.flatten(1))) is None
