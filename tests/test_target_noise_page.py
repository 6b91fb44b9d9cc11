"""docs/target_noise.md: what its command writes from the numbers, for any study of its kind."""

from __future__ import annotations

from types import ModuleType

import pytest
from planted import Effect, planted
from scripts import script

from vkernel.reports import target_noise


@pytest.fixture(scope="module")
def page() -> ModuleType:
    return script("target_noise/page.py")


def test_the_page_states_the_numbers_of_a_study(page: ModuleType) -> None:
    cell = {"c = 0": Effect(), "c = 1": Effect(), "c = 10": Effect(time=0.5), "white 10": Effect(V=0.5)}
    pair = {"c = 0": Effect(), "c = 1": Effect()}
    cells = {("fashion", 128, "unet"): cell, ("fashion", 128, "mlp"): pair}
    cells[("fashion", 1024, "unet")] = pair | {"c = 1": Effect(V=2.0)}
    ds = planted(cells)
    held = target_noise.answer(ds, draws=60) | {"energies": page.energies(ds)}
    held |= {"missing": [{"cell": "fashion, n = 8,192, unet", "objective": "c = 3"}]}
    text = page.page(held, {"repeat": held, "sgd": held})
    assert "fashion, n = 8,192, unet: c = 3" in text
    for outcome in held["outcomes"]:
        assert outcome["numbers"] in text
    rows = [line for line in text.splitlines() if line.startswith("| Equivalence, V included | ")]
    assert rows[0] == "| Equivalence, V included | **holds** | **holds** | **fails** |"
    assert [line.split(" | ")[2] for line in rows if " | fashion, " in line][:3] == [
        "**holds**",
        "**holds**",
        "**fails**",
    ]
    found = page.Answer(held)
    assert found.count("bertrand", "holds") == 2
    assert found.outcome("shape", "fashion, n = 128, unet", "white", "c = 10")["verdict"] == "holds"
    number = found.number("fashion, n = 128, unet", "c = 10", "held_out", 0.25)
    assert number["level"] == 0.3
    assert page.interval(number) in text
    assert found.number("nowhere", "c = 1", "V") == {}
