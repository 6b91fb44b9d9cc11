"""Results that the package ships, so that no step of the tour waits: ``assets/precomputed.npz``.

An entry has the key of the inputs of a run (:func:`vkernel.explore.compute.key`), which also covers the sizes of the
page; if nothing has the key of a state, the page computes it. ``python -m vkernel.explore.shipped`` writes the file:
all states of the tour and of the factors. Paths are stored in half precision, since they are only drawn; gap masses
and laws as they are."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import numpy as np

import vkernel as vk
from vkernel.explore.compute import Result, key, run_inputs, simulate
from vkernel.explore.state import ASSETS, CONTENT, State

FILE = ASSETS / "precomputed.npz"
ESTIMATES = ("gap", "twin", "exact_gap")
ARRAYS = ("times", "frames", "law", "band", "exact", "members", "twin_law", "twin_frames", "member_gaps")
HALF = ("frames", "twin_frames")


@lru_cache(maxsize=1)
def _entries() -> dict[str, Any]:
    """Return the arrays of the file, and under "about" the rest of each result."""
    if not FILE.is_file():
        return {"about": {}}
    with np.load(FILE, allow_pickle=False) as file:
        found = {name: file[name] for name in file.files}
    return found | {"about": json.loads(str(found["about"]))}


def find(state: State) -> Result | None:
    """Return the shipped result of a state, if there is one; it has no models, which a run would have."""
    entries, name = _entries(), key(state)
    about = entries["about"].get(name)
    if about is None:
        return None
    given: dict[str, Any] = {field: entries[f"{name} {field}"] for field in ARRAYS if f"{name} {field}" in entries}
    given |= {f: given[f].astype(np.float32) for f in HALF if f in given}
    given |= {f: None if about[f] is None else vk.Estimate(**about[f]) for f in ESTIMATES}
    return Result(run_inputs(state), **given, note=about["note"], precomputed=True)


def named(where: str, index: int, side: str = "") -> Result:
    """Return the shipped result of a step of the tour or of a side of a factor."""
    given = CONTENT[where][index]
    found = find(State(**(given[side] if side else given)["state"]))
    assert found is not None
    return found


def states() -> list[State]:
    """Return the states whose results are shipped, each of the inputs once."""
    tour = [State(**step.get("state", {})) for step in CONTENT["tour"]]
    pairs = [State(**factor[side]["state"]) for factor in CONTENT["factors"] for side in "ab"]
    return list({key(state): state for state in [State(), *tour, *pairs]}.values())


def write() -> None:
    """Compute the results and write the file."""
    about: dict[str, dict[str, Any]] = {}
    arrays: dict[str, Any] = {}
    for state in states():
        found = simulate(state)
        about[key(state)] = {f: asdict(e) if (e := getattr(found, f)) else None for f in ESTIMATES}
        about[key(state)]["note"] = found.note
        for field in ARRAYS:
            value = getattr(found, field)
            if value is not None:
                arrays[f"{key(state)} {field}"] = value.astype(np.float16 if field in HALF else np.float32)
        print(state.to_query(), about[key(state)]["gap"])
    np.savez_compressed(FILE, about=np.array(json.dumps(about)), **arrays)


if __name__ == "__main__":
    write()
