"""The rows of the scorecard on networks: verdicts are counts of the outcomes of a study, here with planted effects."""

from __future__ import annotations

from pathlib import Path

import pytest
from exhibits import without_pictures
from planted import Effect, planted

from vkernel.reports import target_noise
from vkernel.reproduce import twins
from vkernel.reproduce.exhibit import Run


def test_claims_are_counts_of_outcomes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    like, noisy = Effect(), Effect(V=2.0, training=1.3, copies=0.4, pooled=-0.05)
    cells = {("fashion", 128, "unet"): {"c = 0": like, "c = 1": noisy, "white 1": like}}
    cells |= {("fashion", 1024, "unet"): {"c = 0": like, "c = 1": like}}
    held = target_noise.answer(planted(cells), draws=60)
    monkeypatch.setattr(twins, "read", lambda: held)
    without_pictures(monkeypatch)
    steps: list[float] = []
    found = twins.twins(Run(tmp_path, 0, True, steps.append))
    verdicts = {claim.key: claim.verdict for claim in found.claims}
    part = "holds in part"
    assert verdicts == {
        "images_vastola": part,
        "images_alike": part,
        "images_time": part,
        "images_shape": "holds",
        "images_average": part,
    }
    assert "Holds in 1, fails in 1, undecided in 0 of 2" in found.claims[1].number
    assert sum(steps) == pytest.approx(1)
    (table,) = found.tables
    assert len(table.rows) == sum(o["of"] == "c = 1" and o["verdict"] != "not run" for o in held["outcomes"])
