"""Fixtures of the tests of the page."""

from __future__ import annotations

import pytest

from vkernel.explore import compute


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes with which every sampler takes less than a second."""
    monkeypatch.setattr(compute, "MEMBERS", {"linear": 6, "ntk": 3, "mlp": 3})
    monkeypatch.setattr(compute, "EACH", {"linear": 40, "ntk": 20, "mlp": 20})
    monkeypatch.setattr(compute, "SHOWN_EACH", {"linear": 50, "ntk": 20, "mlp": 20})
    monkeypatch.setattr(compute, "NETWORK", compute.NETWORK | {"steps": 20, "width": 8})
    monkeypatch.setattr(compute, "PER_AXIS", {1: 8, 2: 5})
    monkeypatch.setattr(compute, "SETS", 8)
    monkeypatch.setattr(compute, "ALONE", 300)
    monkeypatch.setattr(compute, "LAZY_DRAWS", 24)
