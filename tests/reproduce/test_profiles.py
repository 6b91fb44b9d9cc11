"""The exhibit of profiles against trained networks: its verdicts by hand, and its text against the stored numbers."""

from __future__ import annotations

import numpy as np
from exhibits import Made, words

from vkernel.reports.profile.tested import RULES, Cell, Experiment, results


def made_up(profile: float, gain: float, more: float) -> Cell:
    """A condition with these AUC, gain over both simpler orders and excess of points given 8 times."""
    numbers = {"copied samples": [0.5, 0.0, 0.5, 0.5, 5]}
    for rule in RULES:
        found = {"auc all profile single": profile, "reproduced x8 - ordinary single": more}
        found["rate x8 - ordinary single"] = 0.0
        found |= {f"auc all profile - {other} single": gain for other in ("multiplicity", "distance")}
        numbers |= {f"{rule} {name}": [value, 0.01, value - 0.02, value + 0.02, 5] for name, value in found.items()}
    return Cell("plane", 1000, numbers)


def test_verdicts_need_intervals_on_one_side() -> None:
    def counts(*given: float) -> list[int]:
        found = Experiment({}, (made_up(*given),)).decided
        return [len(found[name]) for name in ("all", "above", "best", "beaten", "often", "seldom")]

    assert counts(0.8, 0.1, 0.5) == [2, 2, 2, 0, 2, 0]
    assert counts(0.51, 0.01, 0.01) == [2, 0, 0, 0, 0, 0]
    assert counts(0.3, -0.1, -0.1) == [2, 0, 0, 2, 0, 2]


def test_the_page_has_the_stored_numbers(made: Made) -> None:
    page, saved = made.exhibits["profiles"], made.arrays["profiles"]
    value, _, low, high = saved["number"].T
    assert ((low <= value) & (value <= high)).all()
    areas = np.array([" auc " in name and " - " not in name for name in saved["name"]])
    assert ((low >= 0) & (high <= 1))[areas].all()
    text = words(page)
    for cell in results().halves:
        e = cell("copied auc all profile single")
        assert f"{e.value:.2f}" in text
        (row,) = (r for r in page.tables[0].rows if r[0] == f"{cell.kind}, {cell.steps:,} steps" and "three" in r[2])
        assert row[3] == f"{e.value:.2f} ({e.low:.2f} to {e.high:.2f})"
    claims, decided = {claim.key: claim for claim in page.claims}, results().decided
    assert (claims["duplicates"].verdict == "holds") == (len(decided["often"]) == len(decided["all"]))
    assert (claims["profile_predicts"].verdict == "does not hold") == (
        len(decided["beaten"]) > len(decided["all"]) / 2 >= len(decided["best"])
    )
