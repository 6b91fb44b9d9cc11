"""docs/monitor/worked.py: a small run under the monitor, and its page."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
from scripts import script

import vkernel as vk


@pytest.fixture(scope="module")
def worked() -> ModuleType:
    return script("monitor/worked.py")


def test_a_small_run_and_its_page(worked: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digits = vk.data.digits()[:].reshape(-1, 1, 8, 8)
    monkeypatch.setattr(vk.data, "images", lambda name, n, test, size: (vk.Empirical(digits[:n]), digits[1000:1064]))
    worked.train([8, 16], 3, tmp_path, 60.0, batch=4, size=8, every=1, budget=1.0, channels=(8, 8))
    runs = worked.results(tmp_path)
    assert [run["n"] for run in runs] == [8, 16]
    assert runs[0]["rows"][-1]["step"] == 3
    text = worked.page(runs)
    assert "on 8 and 16 images" in text
    assert "There was no alarm" in text
    assert len(worked.figure(runs).axes) == 6
    run = json.loads(json.dumps(runs[0])) | {"alarm": 2, "copying": 3}
    run["rows"][0]["expected"] = [4.0, 2.0, 9.0]
    assert "1 were within a factor 2, and 1 of the 90 % intervals held the step" in worked.page([run])
