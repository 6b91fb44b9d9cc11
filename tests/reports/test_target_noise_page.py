"""The page on target noise is what its command writes, and its numbers are those of the stored results."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scripts import script

command = script("target_noise/page.py")


def test_the_page_follows_from_its_numbers() -> None:
    held, controls = (json.loads(path.read_text(encoding="utf-8")) for path in (command.ANSWER, command.CONTROLS))
    assert command.page(held, controls) == command.PAGE.read_text(encoding="utf-8")


def test_numbers_follow_from_the_results() -> None:
    """One cell by hand: copies, an error, V in the window of the network's units, one distance."""
    files = list(command.RESULTS.rglob("*.npz"))
    assert sum(file.stat().st_size for file in files) < 5e6
    ds, held = command.results(), json.loads(command.ANSWER.read_text(encoding="utf-8"))
    name, answer = "fashion, n = 1,024, unet", command.Answer(held)
    last = ds.sel(data="fashion", n=1024, network="unet").isel(step=-1)
    one = last.sel(objective="c = 1")
    copies = float((one["ratio"] < 1 / 3).mean()) - float(one["memorised_held_out"])
    assert answer.number(name, "c = 1", "memorised")["value"] == pytest.approx(copies, rel=1e-4)
    error = float(one["error"].sel(set="held-out", level=0.3).mean())
    assert answer.number(name, "c = 1", "held_out", 0.3)["value"] == pytest.approx(error, rel=1e-4)
    pairs = last["gap_members"].sel(set="training").mean("image").sum(["member", "other"])
    ratio = np.log(pairs.sel(objective="c = 1") / pairs.sel(objective="c = 0"))
    share = one["network_share"]
    (V,) = (p for p in answer.outcome("vastola", name, "network")["parts"] if p["name"] == "V")
    assert V["value"] == pytest.approx(float(np.exp(ratio.where(share > share.max() / 2).mean())), rel=1e-4)
    within = one["energy_within"].transpose("member", "other").values
    single = 2 * float(one["energy_to"].mean()) - np.diag(within).mean() - float(one["energy_held_out"])
    assert answer.number(name, "c = 1", "energy_single")["value"] == pytest.approx(single, abs=1e-5)
