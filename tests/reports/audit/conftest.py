"""Fixtures of audits: a network that memorised, one at three stages of training, coarse pictures."""

from __future__ import annotations

import copy

import pytest
from audited import SMALL, Denoiser, checkpoint, digits, marks, train
from coarse import draw_coarsely

import vkernel as vk
from vkernel.reports.audit import Audit
from vkernel.reports.audit.page import page


@pytest.fixture(scope="session")
def memoriser() -> Audit:
    """Audit a network that was trained on 50 digits until it had memorised them."""
    images = digits()
    net = Denoiser(64, 256, "image", depth=3)
    train(net, images[:50], 3600, 4e-3)
    return vk.audit(checkpoint(net, (1, 8, 8), "memoriser"), images[:50], test=images[50:250], sizes=SMALL)


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw few and coarse pictures, for pages that are not looked at."""
    draw_coarsely(monkeypatch)
    for number in ("SHOWN", "PAIRED"):
        monkeypatch.setattr(f"vkernel.reports.audit.page.{number}", 3)


@pytest.fixture(scope="session")
def memoriser_page(memoriser: Audit) -> str:
    return page(memoriser)


@pytest.fixture(scope="session")
def stages() -> dict[str, Audit]:
    """Audit one network before, early in and after its training on a law that it can learn, but not memorise."""
    law = marks()
    train_set, test_set = law.sample(400, 1), law.sample(400, 2)
    net = Denoiser(16, 96, "blend")
    nets = {"untrained": copy.deepcopy(net)}
    (nets["early"],) = train(net, train_set, 2000, 4e-3, keep=(400,))
    nets["late"] = net
    shape = (1, 4, 4)
    return {
        name: vk.audit(checkpoint(n, shape, name), train_set, test=test_set, sizes=SMALL) for name, n in nets.items()
    }
