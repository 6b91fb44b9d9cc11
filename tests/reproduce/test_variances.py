"""The variance of the learned score: numbers against each other and against the library, texts, files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from exhibits import Made, says

import vkernel as vk
from vkernel import plots
from vkernel.core.estimate import twins
from vkernel.reproduce import variances
from vkernel.reproduce.exhibit import Run, number, percent


def test_the_finding_is_the_array(made: Made) -> None:
    exhibits = made.exhibits
    ratio = made.arrays["v_linear"]["ratio"][-1, 0, 0, :, 0]
    finding = exhibits["v_linear"].finding
    assert finding is not None
    assert finding.number == number(float(ratio[0]))
    assert number(float(ratio[1])) in finding.interval
    share = made.arrays["shares"]["share"]
    one = list(made.arrays["shares"]["features_over_draws"]).index(1.0)
    finding = exhibits["shares"].finding
    assert finding is not None
    assert finding.number.replace("\u00a0", " ") == percent(float(share[one, 1, 0, 0]))
    finding = exhibits["v_lazy"].finding
    assert finding is not None
    assert number(float(made.arrays["v_lazy"]["crossing"][1, 0]), 2) in finding.number


def test_v_linear_arrays_are_consistent(made: Made) -> None:
    a = made.arrays["v_linear"]
    noisy, quiet = a["given_inputs"]
    assert (noisy > quiet).all()  # J1 has the misfit of J0, and target noise
    np.testing.assert_allclose(a["weights"].sum(1), 1)
    pooled = (a["weights"] * a["measured"][:, :, 0]).sum((-1, -2))  # (objective, P/F)
    theory = (a["weights"] * a["given_inputs"]).sum((-1, -2))
    np.testing.assert_allclose(a["ratio"][:, :, 0, 0, 0], (pooled / theory).T)
    order = (a["weights"] * a["leading"]).sum((-1, -2))
    np.testing.assert_allclose(a["ratio"][:, :, 1, 0, 0], (pooled / order).T)
    np.testing.assert_allclose(order[:, 0] / order[:, 1], 4)  # leading order is 1/P
    assert a["leading_warned"].all()  # P/F of 1 and less
    assert all("leading order" in why for why in a["leading_why"])
    low, value, high = a["ratio"][..., 1, :], a["ratio"][..., 0, :], a["ratio"][..., 2, :]
    assert ((low < value) & (value < high)).all()


def test_squares_are_the_variance_of_the_ensemble() -> None:
    model, process = variances.denoiser(per_axis=6), variances.PROCESS
    ensemble = vk.train_ensemble(model, variances.DATA, process, members=12, draws=50, progress=False)
    x = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None]
    q = variances.squares(ensemble(x, 0.2))[..., 0]
    torch.testing.assert_close(q.mean(0), ensemble.cov(x, 0.2).trace())


def test_prediction_and_ensemble_agree_for_many_draws() -> None:
    """P/F = 20 with few features: the ratio of the finding, small enough for a test."""
    model, data, process = variances.denoiser(per_axis=5), variances.DATA, variances.PROCESS
    x, w = variances.places(0.2, 31)
    kernel = vk.kernels.Linear(model, data, process, draws=500, seed=1, sets=60)
    ensemble = vk.train_ensemble(model, data, process, members=200, draws=500, seed=2, progress=False)
    ratio = float((w * ensemble.cov(x, 0.2).trace()).sum() / (w * kernel.cov(x, 0.2).trace()).sum())
    assert 0.8 < ratio < 1.25


@pytest.mark.parametrize(
    ("curve", "words"),
    [((1.0, 0.95, 1.05), "The interval holds 1"), ((1.5, 1.4, 1.6), "The interval does not hold 1")],
)
def test_the_verdict_on_v_follows_the_interval(curve: tuple[float, float, float], words: str) -> None:
    last = torch.tensor([[curve, (2.0, 1.9, 2.1)], [(1.0, 0.9, 1.1), (1.0, 0.9, 1.1)]])
    given = {"together": variances.TOGETHER, "held": 1, "farthest": curve[0]}
    said = says("v_linear", "finding.words", last=last, cases=[(20.0,)], **given)
    assert words in said
    assert "farther from 1" in said


def test_shares_sum_to_one(made: Made) -> None:
    a = made.arrays["shares"]
    for key in ("share", "predicted"):
        np.testing.assert_allclose(a[key][..., 0].sum(1), 1)
    assert (a["predicted"][..., 0] > 0).all()
    twin = a["variance_of_J0"]
    assert (twin[0] > 0).all()
    np.testing.assert_allclose(twin[1] / twin[0], 0, atol=1e-9)  # J0 has no target noise
    exhibit = made.exhibits["shares"]
    assert exhibit.finding is not None
    assert "zero to rounding" in exhibit.finding.words[1]


def test_jackknife_is_exact_without_spread() -> None:
    same = torch.tensor([[3.0], [1.0]]).expand(5, 2, 1)
    found = variances.share_of(same).stack(-1)
    torch.testing.assert_close(found[0, 0], torch.full((3,), 0.75).double())
    torch.testing.assert_close(found[1, 0], torch.full((3,), 0.25).double())


@pytest.mark.parametrize(
    ("share", "words"),
    [
        ((0.9, 0.8, 1.0), "most of V is the noise"),
        ((0.2, 0.1, 0.3), "below one half"),
        ((0.6, 0.4, 0.8), "cannot say"),
    ],
)
def test_the_verdict_on_shares_follows_the_interval(share: tuple[float, float, float], words: str) -> None:
    rest = {"met": torch.ones(1), "noise": torch.zeros(1, 1, 3), "line": torch.zeros(1, 1, 3)}
    rest |= {"variance_of_J0": torch.ones(2, 1), "features_over_draws": [4.0], "together": variances.TOGETHER}
    assert words in says("shares", "finding.words", one=share, **rest)


def test_the_lazy_parts_add_up(made: Made) -> None:
    a = made.arrays["v_lazy"]
    assert list(a["parts"]) == ["targets", "inputs", "init", "total"]
    np.testing.assert_allclose(a["predicted"][:, :3].sum(1), a["predicted"][:, 3])
    targets, init = a["predicted"][:, 0], a["predicted"][:, 2]
    assert (np.diff(targets) > 0).all()  # training writes target noise
    assert (np.diff(init) < 0).all()  # and erases the beginning
    assert (np.diff(a["learned_directions"]) > 0).all()
    same = [list(a["tau"]).index(tau) for tau in a["measured_tau"]]
    np.testing.assert_allclose(a["ratio"][:, 0], a["measured"][0] / a["predicted"][same])
    np.testing.assert_allclose(a["gap_mass"][:, 2, 0], a["gap_mass"][:, 0, 0] - a["gap_mass"][:, 1, 0], atol=1e-12)


def test_pairs_measure_the_parts(tmp_path: Path) -> None:
    """The prediction on the very inputs of the ensemble: what is left is the error of a variance over members."""
    spec, (x, weights) = Run(tmp_path, 3, True, print).spec("v_lazy"), variances.places(variances.TIME, 21)
    seed, P, M = vk.core.rng.key(3, "reproduce/v_lazy/ensemble"), spec["training"]["draws"], spec["members"]
    model, data, process = variances.lazy(100.0), variances.DATA, variances.PROCESS
    still = vk.models.Lazy(model.kernel, 100.0, target="x0", init=False)
    pairs = ((model, "J1"), (model, "J0"), (still, "J0"))
    how = {"members": M, "draws": P, "seed": seed, "progress": False}
    scores = [
        vk.train_ensemble(m, data, process, objective=goal, **how)(x, variances.TIME)[..., 0] for m, goal in pairs
    ]
    q = variances.paired_squares(*scores, weights)
    sets = {"draws": P, "sets": M, "seed": seed}
    found = vk.kernels.Lazy(model, data, process, **sets).parts(x, variances.TIME)
    S = float(process.S(torch.tensor(variances.TIME, dtype=torch.float64)))
    inputs = S * float((weights * found["inputs"][:, 0, 0]).sum())
    assert float(q.mean(0)[1]) == pytest.approx(inputs, rel=1e-6)  # the same sets: the same covariance over them
    quiet = vk.kernels.Lazy(model, data, process, objective="J0", **sets).parts(x, variances.TIME)
    assert float(quiet["targets"].abs().max()) == 0
    torch.testing.assert_close(quiet["init"], found["init"])


def test_crossing() -> None:
    taus = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)
    assert variances.crossing(taus, taus, 1000 / taus) == pytest.approx(1000**0.5)
    assert np.isnan(variances.crossing(taus, taus, 1e6 / taus))


@pytest.mark.parametrize(
    ("theory", "seen", "words"),
    [
        ((30.0, 25.0, 35.0), (32.0, 28.0, 40.0), "the intervals meet"),
        ((30.0, 25.0, 35.0), (50.0, 45.0, 55.0), "earlier than measured"),
        ((30.0, 25.0, 35.0), (10.0, 8.0, 12.0), "later than measured"),
        ((30.0, 25.0, 35.0), (float("nan"),) * 3, "only one of them"),
        ((30.0, 25.0, 35.0), (32.0, float("nan"), float("nan")), "an interval is not known"),
        ((float("nan"),) * 3, (float("nan"),) * 3, "neither"),
    ],
)
def test_the_verdict_on_training_time(theory: tuple[float, ...], seen: tuple[float, ...], words: str) -> None:
    rest = {"ratio": torch.ones(1, 3, 4), "outside": [], "measured_tau": [1.0], "gap_mass": torch.zeros(1, 3, 3)}
    rest |= {"measured": torch.ones(3, 1, 4), "pairs": [twins(torch.rand(9), torch.rand(9))]}
    assert words in says("v_lazy", "finding.words", cross=torch.tensor([theory, seen]), **rest)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ((0.1, 0.05, 0.15), "raises the mean"),
        ((-0.1, -0.15, -0.05), "lowers the mean"),
        ((0.0, -0.1, 0.1), "no effect"),
    ],
)
def test_the_words_on_gaps_follow_the_paired_difference(change: tuple[float, float, float], words: str) -> None:
    mass = torch.tensor([(0.2, 0.1, 0.3), (0.2, 0.1, 0.3), change])
    rest = {"ratio": torch.ones(1, 3, 4), "outside": [], "measured_tau": [1e4], "measured": torch.ones(3, 1, 4)}
    rest["pairs"] = [twins(torch.rand(9), torch.rand(9))]
    assert words in says("v_lazy", "finding.words", gap_mass=mass[None], cross=torch.ones(2, 3), **rest)


def test_pictures_take_what_they_are_given() -> None:
    with pytest.raises(vk.InputError, match="shares"):
        plots.share_curves([1.0], ["all"], np.ones((1, 1)), np.ones((1, 1, 3)))
