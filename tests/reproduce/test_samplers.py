"""What samplers make of the exact score: numbers against direct sampling and closed forms, text, pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from exhibits import Made, check, make, says, without_pictures

import vkernel as vk
from vkernel import kernels, metrics, plots, sample
from vkernel.core.errors import InputError
from vkernel.reproduce import samplers
from vkernel.reproduce.exhibit import Run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("samplers"), 5, samplers.memorise, samplers.laws)


def test_every_exhibit_is_complete(made: Made) -> None:
    assert set(made.exhibits) == {"memorise", "laws"}
    check(made)


def test_the_same_seed_gives_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_pictures(monkeypatch)
    found = []
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / folder).mkdir()
        exhibit = samplers.memorise(Run(tmp_path / folder, seed, True, lambda share: None))
        found.append(np.load(tmp_path / folder / exhibit.data))
    np.testing.assert_array_equal(found[0]["sample_30"], found[1]["sample_30"])
    assert not np.array_equal(found[0]["sample_30"], found[2]["sample_30"])
    np.testing.assert_array_equal(found[0]["gap_mass"], found[2]["gap_mass"])  # not random


@pytest.mark.parametrize(("eps", "known"), [(1e-4, 0.029), (1e-3, 0.032), (1e-2, 0.073)])
def test_gap_mass_at_30_steps(eps: float, known: float) -> None:
    score = vk.EmpiricalScore(vk.data.toy("triple"), vk.VP(eps=eps))
    exact = samplers.gap_mass(score, 30)
    assert exact == pytest.approx(known, abs=6e-4)
    x_T = score.process.prior((20_000, 1), generator=1)
    share = metrics.gap_mass(sample.pf_ode(score, x_T, steps=30, method="euler", spacing="uniform"))
    assert abs(share.value - exact) < 2 * (share.high - share.low)


def test_frequencies_are_compared_with_weights(made: Made) -> None:
    saved = made.arrays["memorise"]
    expected = saved["weights"] * saved["counts"].sum()
    assert saved["counts"].sum() == 500
    assert saved["chi_square"] == pytest.approx(((saved["counts"] - expected) ** 2 / expected).sum())
    assert saved["p_value"] == pytest.approx(
        float(torch.special.gammaincc(*torch.tensor([2.5, saved["chi_square"] / 2])))
    )
    values = {"weights": torch.ones(6) / 6, "counts": torch.ones(6), "chi_square": 1.0}
    assert "as often as its weight" in says("memorise", "finding.words", **values, p_value=0.5)
    assert "more than chance" in says("memorise", "finding.words", **values, p_value=0.001)


def test_two_noises_differ_by_more_than_their_floor(made: Made) -> None:
    saved = made.arrays["laws"]
    value, low, high = saved["variation"]
    assert ((low <= value) & (value <= high)).all()
    assert value[0] > saved["variation_floor"] > 0  # ten steps: resampled noise is far from Gaussian


def test_the_verdict_follows_the_intervals() -> None:
    below, above = torch.tensor([0.1, 0.09, 0.11]), torch.tensor([0.2, 0.19, 0.21])
    search = torch.stack([torch.stack([below, above])] * len(samplers.CANDIDATES))
    for found, filled, emptied in ((search, 3, 0), (search.flip(1), 0, 3)):
        values = {"search": found, "search_last": search, "search_kappa": (0, 0.3), "candidates": samplers.CANDIDATES}
        said = says("laws", "closing", **values)
        assert ("It fills here" in said) == (filled > 0)
        assert ("No such gap was found" in said) == (filled == 0)
        assert f"{emptied} of 3 have" in said


def test_noise_empties_the_gap() -> None:
    """P(|x| < .75) on {-1, 1} at eps .05, where differences are large."""
    process = vk.VP(eps=0.05)
    score = vk.EmpiricalScore(vk.data.toy("pair"), process)
    x_T = process.prior((1500, 1), generator=0)
    shares = []
    for kappa in (0.0, 0.3):
        x = sample.effective_sde(kernels.Naive(score, kappa), x_T, steps=60, generator=1, spacing="log")
        shares.append(metrics.gap_mass(x, (0, 0.75)))
    assert shares[1].high < shares[0].low


def test_pictures_refuse_what_they_cannot_draw() -> None:
    with pytest.raises(InputError, match="no law"):
        plots.law_panels({}, [0.0], (0.25, 0.75))
    with pytest.raises(InputError, match="shape"):
        plots.path_maps(["a"], np.arange(3), np.zeros((1, 2, 3)), np.zeros((1, 2, 2)), 1.0, {})


def test_an_arrow_stands_where_nothing_was_seen() -> None:
    curve = np.array([[0.1, 0.0], [0.05, 0.0], [0.2, 0.01]])
    figure = plots.gap_curves([0, 1], {"a": curve}, [10, 30], {"b": curve}, curve, 0.01)
    assert len(figure.axes) == 3
    assert len([t for t in figure.axes[0].texts if t.arrow_patch is not None]) == 1  # type: ignore[attr-defined]
