"""docs/howto/targets.md: its tables are those of the results, and cells trained side by side are trainings."""

from __future__ import annotations

import json
from types import ModuleType

import pytest
import torch
from scripts import script

import vkernel as vk


@pytest.fixture(scope="module")
def page() -> ModuleType:
    return script("targets/run.py")


def test_tables_are_those_of_the_results(page) -> None:
    text = page.PAGE.read_text()
    for name, table in page.tables(json.loads(page.RESULTS.read_text())).items():
        found = page.block(name).search(text)
        assert found is not None, name
        assert found.group() == table, name


def test_a_cell_is_what_train_ensemble_trains(page) -> None:
    how = {
        "channels": (8, 8),
        "steps": 2,
        "batch": 4,
        "lr": 1e-3,
        "ema": 0.9,
        "bf16": False,
        "chunk": 3,
        "dtype": "float64",
    }
    images = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2 - 1
    cells = [page.Cell("VP", "v"), page.Cell("EDM"), page.CELLS[-1]]
    state = page.train(cells, vk.Empirical(images), **how)
    for k, cell in enumerate(cells):
        process, given = page.PROCESSES[cell.process](), {"members": 1, "times": cell.times}
        alone = vk.train_ensemble(cell.model(**how), images, process, vary=("inputs", "targets"), **given).state
        for name, a in alone.items():
            torch.testing.assert_close(state[name][k : k + 1], a, rtol=1e-6, atol=1e-9)
    found = page.run([page.Cell("EDM")], images, images[:3], recipes=False, **how)
    assert len(found["rows"]) == 1
    assert all(0 < e < 10 for e in found["rows"][0]["error"])
