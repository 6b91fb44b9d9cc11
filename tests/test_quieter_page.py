"""docs/quieter_targets.md: it is what its command writes, and the variances of gradients are those of autograd."""

from __future__ import annotations

import json
from types import ModuleType

import pytest
import torch
from scripts import script

import vkernel as vk


@pytest.fixture(scope="module")
def quieter() -> ModuleType:
    return script("quieter/run.py")


def test_the_page_follows_from_its_results(quieter: ModuleType) -> None:
    assert quieter.page(json.loads(quieter.RESULTS.read_text())) == quieter.PAGE.read_text(encoding="utf-8")


def test_variances_of_gradients(quieter: ModuleType, monkeypatch) -> None:
    """Against the variance of stacked gradients; at low noise all targets are equal, at high noise J0 is quieter."""
    monkeypatch.setattr(quieter, "BATCHES", 6)
    images = torch.rand(12, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    data, model = vk.Empirical(images), vk.models.UNet((8, 8), steps=3, batch=4)
    ensemble = vk.train_ensemble(model, data, quieter.PROCESS, members=1)
    state = {name: p[0] for name, p in ensemble.state.items()}
    for sigma in (0.05, 8.0):
        each = torch.stack(list(quieter.gradients(model, state, data, sigma))).double()
        found = quieter.noise(model, ensemble, data, sigma)[0]
        torch.testing.assert_close(found, each.var(0).sum(-1), rtol=1e-4, atol=0)
    noisy, _, exact = found
    assert exact < noisy / 2
    low = quieter.noise(model, ensemble, data, 0.05)[0]
    torch.testing.assert_close(low, low[:1].expand(3), rtol=1e-4, atol=0)


def test_a_small_run(quieter: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quieter, "BATCHES", 2)
    images = torch.rand(16, 1, 8, 8, generator=torch.Generator().manual_seed(1)) * 2 - 1
    found = quieter.run(images[:12], images[12:], vk.models.UNet((8, 8), steps=2, batch=4), 2, 3)
    text = quieter.page({"sets": [found]})
    assert "n = 12 training images" in text
    assert {row["step"] for row in found["rows"]} == {1, 2}
