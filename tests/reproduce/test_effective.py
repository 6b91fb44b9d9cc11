"""The effective SDE and mode weights: exact for Gaussian fields, measures by brute force, texts against arrays."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from exhibits import Made, words

from vkernel.core.estimate import Estimate
from vkernel.kernels import LinearField
from vkernel.reproduce import effective
from vkernel.reproduce.exhibit import Run, number, percent
from vkernel.train.ensemble import train_ensemble


def test_for_a_gaussian_field_the_effective_sde_has_the_law_of_the_models(tmp_path: Path) -> None:
    """Models whose weights are Gaussian, and fields with their V: neither gap masses nor laws differ."""
    case = SimpleNamespace(ratio=4.0, eps=1e-3, members=60, sets=0)
    cell = effective.Cell(Run(tmp_path, 0, True, print), case, steps=30, n=128)
    trained = train_ensemble(cell.model, effective.DATA, cell.process, members=60, draws=64, progress=False)
    W = trained.state["weights"][..., 0]
    V = LinearField(cell.model, cell.process, torch.cov(W.mT), W.mean(0)[:, None])
    drawn = {name: cell.flow(V.models(120, k)) for k, name in enumerate(("members", "measured", "half"))}
    mean = cell.flow(cell.with_weights(W.mean(0)[None, :, None].expand(11, -1, 1)))
    found = effective.compare(drawn | {"mean": mean}, cell.process)
    assert found["difference"]["measured"].low <= 0 <= found["difference"]["measured"].high
    assert found["tv"]["measured"].value < 1.4 * found["tv"]["half"].value
    assert found["tv"]["mean"].value > 1.4 * found["tv"]["half"].value  # without V it differs
    assert found["mass"]["mean"].se == 0  # eleven equal scores


def test_measures_by_brute_force() -> None:
    x = torch.tensor([[-1.0, -0.5, 0.0, 0.3, 1.02], [0.0, 0.0, 0.0, 0.26, 0.76]], dtype=torch.float64)[..., None]
    assert effective.in_gap(x).tolist() == [2 / 5, 1 / 5]
    assert effective.at_points(x, effective.VP(eps=1e-3)).tolist() == [3 / 5, 3 / 5]
    assert effective.places_of(x).tolist() == [5, 3]
    atoms = torch.tensor([0.0] * 50 + [1.0] * 45 + [0.5] * 5, dtype=torch.float64)[None, :, None]
    assert effective.places_of(atoms).tolist() == [2]
    assert float(effective.shares(atoms).sum()) == pytest.approx(1)


def test_peaks_are_compared_with_the_gaps() -> None:
    places = (torch.arange(75, dtype=torch.float64) + 0.5) * 0.04 - 1.5
    density = torch.full((6, 75), 0.1, dtype=torch.float64)
    for y, height in ((-1.0, 2.0), (0.0, 5.0), (1.0, 3.0), (0.5, 0.4)):
        density[:, int((places - y).abs().argmin())] = height
    found = effective.prominence(density, places)
    assert found.value == pytest.approx(2 / 0.4)
    assert found.low == pytest.approx(found.high)  # all models are alike


def test_arrays_are_laws(made: Made) -> None:
    saved = made.arrays["effective"]
    for name in ("members", "measured", "mean"):
        mean, low, high = saved[f"{name}_density"]
        assert (low <= mean + 1e-12).all()
        assert (mean <= high + 1e-12).all()
        assert (mean.sum(-1) * 0.04 <= 1 + 1e-9).all()
    assert (saved["single"].sum(-1) <= 1 + 1e-6).all()
    np.testing.assert_array_equal(saved["J1_1_0.001_mean_gap"], saved["J0_1_0.001_mean_gap"])  # one mean for both
    for key in saved:
        if key.endswith("_gap"):
            assert ((saved[key] >= 0) & (saved[key] <= 1)).all(), key
    share, at = made.arrays["weights"]["share"], made.arrays["weights"]["at"]
    assert share.shape[:2] == at.shape[:2] == (2, 5)
    assert (at <= share + 1e-12).all()  # within 3 σ is within .25
    assert (share.sum(-1) <= 1 + 1e-12).all()


def test_pages_say_what_the_arrays_say(made: Made) -> None:
    saved, page = made.arrays["effective"], made.exhibits["effective"]
    own, field = (torch.from_numpy(saved[f"J1_1_0.001_{k}_gap"]) for k in ("members", "measured"))
    assert page.finding is not None
    assert page.finding.number == f"{number(float(field.mean() / own.mean()))} times"
    claims = {claim.key: claim for claim in page.claims}
    change = float(own.mean()) - float(saved["J1_1_0.001_mean_gap"][0])
    assert number(change) in claims["bias_and_variance"].number
    assert number(float(own.mean())) in words(page)
    share, other = made.arrays["weights"]["share"], made.exhibits["weights"]
    lost = (share[0, 0] < 0.01).any(-1)
    assert other.finding is not None
    assert other.finding.number.replace("\u00a0", " ") == percent(lost.mean())
    kept = {claim.key: claim for claim in other.claims}["forgetting"]
    high = [Estimate[float].of_share(int((v < 0.01).any(-1).sum()), v.shape[0]).high for v in share[0]]
    assert (kept.verdict == "holds") == all(h < 0.1 for h in high)
    assert math.isclose(sum(made.totals[name] for name in ("effective", "weights")), 2, rel_tol=1e-6)
