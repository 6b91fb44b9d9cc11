"""Factors, each varied alone: equal conditions have equal shares, contrasts are what they say, verdicts follow them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from exhibits import Made, words
from torch import Tensor

import vkernel as vk
from vkernel.core.estimate import Estimate
from vkernel.reproduce.exhibit import VERDICTS, Page, Run, read
from vkernel.reproduce.factors import Contrast

NARROW = ("capacity", 2), ("set", 0)  # panels, and the level of each that is the common setting: features on ±1.5
WIDE = ("target", 0), ("times", 0), ("features", 0)  # and on ±3


def test_panels_agree_where_their_conditions_are_the_same(made: Made) -> None:
    """J_c is J0 at c = 0 and J1 at c = 1, and every panel contains the setting from which it departs."""
    saved = made.arrays["factors"]
    for same in (NARROW, WIDE):
        for name, level in same[1:]:
            np.testing.assert_array_equal(saved[f"{name}_gap"][level], saved[f"{same[0][0]}_gap"][same[0][1]])
    one, zero = saved["capacity_gap"][2]
    np.testing.assert_allclose(saved["objective_gap"][[2, 0], 1], [one, zero], atol=1 / 32)


def test_shares_are_shares_of_samples(made: Made) -> None:
    saved = made.arrays["factors"]
    for name in read("factors")["panels"]:
        gap, far = saved[f"{name}_gap"], saved[f"{name}_far"]
        samples = 16 if name == "time" else 32
        assert gap.shape[:2] == (len(saved[f"{name}_levels"]), len(saved[f"{name}_lines"]))
        np.testing.assert_allclose(gap * samples, np.round(gap * samples), atol=1e-9)
        assert ((gap >= 0) & (far <= 1) & (gap <= far + 1 / samples)).all()  # .75 is .2506 from the point at eps


def test_a_share_by_the_public_api(made: Made) -> None:
    """Models that predict noise: trained, sampled and counted without the study."""
    process = vk.VP(eps=1e-3)
    model = vk.models.Linear(vk.features.grid("gaussian", 6, 1, -3.0, 3.0, process), "noise", 0.1)
    models = vk.train_ensemble(model, vk.data.toy("triple"), process, members=10, draws=36, seed=3)
    start = vk.core.rng.quasi_normals(32, 1, vk.core.rng.key(3, "study/x_T") % 2**31)
    x = models.sample(x_T=process.sigma(torch.tensor(1.0).double()) * start, steps=20)[..., 0].abs()
    share = ((x > 0.25) & (x < 0.75)).double().mean(1)
    np.testing.assert_allclose(made.arrays["factors"]["target_gap"][1, 0], share, atol=1.5 / 32)  # it interpolates


def test_the_rescaled_ridge_has_the_ratio_to_the_mean_weight_of_the_default() -> None:
    process, values = vk.VP(eps=1e-3), read("factors")["panels"]["weight"]["grid"]["model"]["values"]
    t = torch.linspace(process.eps, process.T, 1_000_001, dtype=torch.float64)
    mean = [
        float(vk.models.Linear(vk.features.grid(process=process), "x0", weight=w).omega(t, process).mean())
        for w in ("sigma2", "x0")
    ]
    assert values[-1]["ridge"] / mean[1] == pytest.approx(0.1 / mean[0], rel=0.01)


def contrast(a: Tensor, b: Tensor) -> Contrast:
    return Contrast("a", "b", "J1", a, b, Estimate.of_mean(a - b))


def test_contrasts() -> None:
    b = torch.rand(60, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.01
    rare, shifted = b.clone(), b + 0.1
    rare[:12] += 0.5
    rare[12:] += 0.02 * torch.tensor([1.0, -1.0]).repeat(24)
    more, few, same = contrast(shifted, b), contrast(rare, b), contrast(b, b)
    assert (more.both, more.more, more.fewer, more.small) == (True, True, False, False)
    assert (few.mean_differs, few.pairs_differ, few.both, few.differs) == (True, False, False, True)
    assert (same.differs, same.small) == (False, True)
    back = contrast(b, shifted)
    assert back.fewer
    assert back.twins.difference.value == pytest.approx(-more.twins.difference.value)
    assert back.twins.less == more.twins.more
    opposite = b - 0.02
    opposite[:12] += 0.5
    assert (contrast(opposite, b).mean_differs, contrast(opposite, b).pairs_differ) == (True, True)
    assert not contrast(opposite, b).both


@pytest.mark.parametrize(
    ("shift", "verdicts"), [(0.1, "more"), (-0.1, "fewer"), (0.0, "small"), (None, "rare")], ids=str
)
def test_verdicts_follow_the_contrasts(tmp_path, shift, verdicts) -> None:
    b = 0.2 + 0.01 * torch.rand(60, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    a = b.clone() if shift is None else b + shift
    if shift is None:
        a[:12] += 0.5
        a[12:] += 0.02 * torch.tensor([1.0, -1.0]).repeat(24)
    given = {"main": [contrast(a, b)], "every": [contrast(a, b)] * 3}
    names = ("schedule", "objective", "target", "weight", "capacity", "features", "set", "time")
    page = Page(Run(tmp_path, 0, True, print), "factors", {"panels": dict.fromkeys(names, given)})
    found = {}
    for claim in read("factors")["claims"]:
        tests = {key: claim[key] for key in VERDICTS}
        found[claim["key"]] = page.claim(
            {"key": "", "section": "", "claim": "", "computed": "", "number": "", "rule": ""} | tests
        ).verdict
    if verdicts in ("more", "fewer"):
        directed = {"factor_objective": "more", "factor_time": "fewer"}
        for key, verdict in found.items():
            assert verdict == ("holds" if directed.get(key, verdicts) == verdicts else "does not hold"), key
    else:
        assert set(found.values()) == {"does not hold" if verdicts == "small" else "holds in part"}


def test_the_page_has_the_numbers_of_the_arrays(made: Made) -> None:
    exhibit, saved = made.exhibits["factors"], made.arrays["factors"]
    said = words(exhibit)
    found = Estimate.of_mean(torch.from_numpy(saved["capacity_gap"][2, 0] - saved["capacity_gap"][0, 0]))
    assert f"{found.value:+.3f} ({found.low:+.3f} to {found.high:+.3f})" in said
    assert len(exhibit.tables[0].rows) == sum(
        len(saved[f"{n}_levels"]) for n in read("factors")["panels"] if n != "objective"
    )
    assert {claim.key for claim in exhibit.claims} == {claim["key"] for claim in read("factors")["claims"]}
    assert {claim.key for claim in exhibit.claims} <= set(read("page")["scorecard"])
