"""The exhibits of the variance: their numbers against each other and against the library, their words, their files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import vkernel as vk
from vkernel import plots
from vkernel.reproduce import page, shares, v_lazy, v_linear

MODULES = (v_linear, shares, v_lazy)
Made = tuple[Path, dict[str, page.Exhibit], dict[str, float]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    out = tmp_path_factory.mktemp("variances")
    exhibits, totals = {}, {}
    for module in MODULES:
        steps: list[float] = []
        exhibit = module.make(page.Run(out, 4, True, steps.append))
        exhibits[exhibit.name], totals[exhibit.name] = exhibit, sum(steps)
    return out, exhibits, totals


def arrays(made: Made, name: str) -> dict[str, np.ndarray]:
    with np.load(made[0] / made[1][name].data) as file:
        return dict(file)


def test_every_exhibit_is_whole(made: Made) -> None:
    out, exhibits, totals = made
    assert list(exhibits) == ["v_linear", "shares", "v_lazy"]
    for exhibit in exhibits.values():
        assert totals[exhibit.name] == pytest.approx(1)
        for key, a in arrays(made, exhibit.name).items():
            assert a.dtype.kind in "US" or np.isfinite(a).all(), (exhibit.name, key)
        assert exhibit.finding is not None
        for picture in exhibit.pictures:
            assert len(picture.alt) > 80
            for suffix in (".png", "-dark.png", ".svg"):
                assert (out / f"{picture.stem}{suffix}").stat().st_size > 1000
        for table in exhibit.tables:
            assert all(len(row) == len(table.head) for row in table.rows)
        captions = [c for p in exhibit.pictures for c in (p.alt, *p.caption)]
        words = " ".join([*exhibit.opening, *exhibit.closing, *exhibit.finding.words, *captions])
        assert "nan" not in words.lower().split()
    assert [m.ORDER for m in MODULES] == [63, 64, 65]


def test_the_finding_is_the_array(made: Made) -> None:
    _, exhibits, _ = made
    ratio = arrays(made, "v_linear")["ratio"][-1, 0, 0, :, 0]
    finding = exhibits["v_linear"].finding
    assert finding is not None
    assert finding.number == page.number(float(ratio[0]))
    assert page.number(float(ratio[1])) in finding.interval
    share = arrays(made, "shares")["share"]
    one = list(arrays(made, "shares")["features_over_draws"]).index(1.0)
    finding = exhibits["shares"].finding
    assert finding is not None
    assert finding.number == page.percent(min(1.0, float(share[one, 1, 0, 0])))
    finding = exhibits["v_lazy"].finding
    assert finding is not None
    assert page.number(float(arrays(made, "v_lazy")["crossing"][1, 0]), 2) in finding.number


def test_v_linear_arrays_are_consistent(made: Made) -> None:
    a = arrays(made, "v_linear")
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
    model = v_linear.denoiser(per_axis=6)
    ensemble = vk.train_ensemble(model, vk.data.toy("triple"), v_linear.PROCESS, members=12, draws=50, show=False)
    x = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None]
    torch.testing.assert_close(v_linear.squares(ensemble, x, 0.2).mean(0), ensemble.cov(x, 0.2).trace())


def test_prediction_and_ensemble_agree_for_many_draws() -> None:
    """P/F = 20 with few features: the ratio of the finding, small enough for a test."""
    model, data = v_linear.denoiser(per_axis=5), vk.data.toy("triple")
    score = vk.EmpiricalScore(data, v_linear.PROCESS)
    x, w = v_linear.places(score, 0.2, 31)
    kernel = vk.kernels.Linear(model, data, v_linear.PROCESS, draws=500, seed=1, sets=60)
    ensemble = vk.train_ensemble(model, data, v_linear.PROCESS, members=200, draws=500, seed=2, show=False)
    ratio = float((w * ensemble.cov(x, 0.2).trace()).sum() / (w * kernel.cov(x, 0.2).trace()).sum())
    assert 0.8 < ratio < 1.25


def test_quotient_and_its_interval() -> None:
    g = torch.Generator().manual_seed(0)
    top, bottom = 3 + torch.randn(400, generator=g).double(), 2 + torch.randn(300, generator=g).double()
    value, low, high = v_linear.quotient(top[:, None], bottom[:, None])[:, 0].tolist()
    assert value == pytest.approx(float(top.mean() / bottom.mean()))
    assert low < 1.5 < high
    assert value / low == pytest.approx(high / value)


@pytest.mark.parametrize(
    ("curve", "words"),
    [
        ((1.0, 0.95, 1.05), "whole interval lies in"),
        ((1.0, 0.8, 1.3), "reaches beyond"),
        ((1.5, 1.4, 1.6), "contradicts"),
        ((1.2, 1.0, 1.4), "the interval overlaps"),
    ],
)
def test_the_verdict_on_v_follows_the_interval(curve: tuple[float, float, float], words: str) -> None:
    last = torch.tensor([[curve, (2.0, 1.9, 2.1)], [(1.0, 0.9, 1.1), (1.0, 0.9, 1.1)]])
    assert words in v_linear.verdict(last, 20.0)
    assert "farther from 1" in v_linear.verdict(last, 20.0)


def test_shares_sum_to_one(made: Made) -> None:
    a = arrays(made, "shares")
    for key in ("share", "predicted"):
        np.testing.assert_allclose(a[key][..., 0].sum(1), 1)
    assert (a["predicted"][..., 0] > 0).all()
    twin = a["variance_of_J0"]
    assert (twin[0] > 0).all()
    np.testing.assert_allclose(twin[1] / twin[0], 0, atol=1e-9)  # J0 has no target noise
    exhibit = made[1]["shares"]
    assert exhibit.finding is not None
    assert "zero to rounding" in exhibit.finding.words[1]


def test_jackknife_is_exact_without_spread() -> None:
    same = torch.tensor([[3.0], [1.0]]).expand(5, 2, 1)
    found = shares.jackknife(same)
    torch.testing.assert_close(found[0, 0], torch.full((3,), 0.75))
    torch.testing.assert_close(found[1, 0], torch.full((3,), 0.25))


@pytest.mark.parametrize(
    ("share", "words"),
    [
        ((0.9, 0.8, 1.0), "most of V is the noise"),
        ((0.2, 0.1, 0.3), "below one half"),
        ((0.6, 0.4, 0.8), "cannot say"),
    ],
)
def test_the_verdict_on_shares_follows_the_interval(share: tuple[float, float, float], words: str) -> None:
    assert words in shares.verdict(torch.tensor(share))


def test_the_lazy_parts_add_up(made: Made) -> None:
    a = arrays(made, "v_lazy")
    assert list(a["parts"]) == ["targets", "inputs", "init", "total"]
    np.testing.assert_allclose(a["predicted"][:, :3].sum(1), a["predicted"][:, 3])
    targets, init = a["predicted"][:, 0], a["predicted"][:, 2]
    assert (np.diff(targets) > 0).all()  # training writes target noise
    assert (np.diff(init) < 0).all()  # and erases the beginning
    assert (np.diff(a["learned_directions"]) > 0).all()
    same = [list(a["tau"]).index(tau) for tau in a["measured_tau"]]
    np.testing.assert_allclose(a["ratio"][:, 0], a["measured"][0] / a["predicted"][same])
    np.testing.assert_allclose(a["gap_mass"][:, 2, 0], a["gap_mass"][:, 0, 0] - a["gap_mass"][:, 1, 0], atol=1e-12)


def test_twins_measure_the_parts(tmp_path: Path) -> None:
    """The prediction on the very inputs of the ensemble: what is left is the error of a variance over members."""
    study = v_lazy.Study(page.Run(tmp_path, 3, True, lambda share: None))
    q, _ = study.measured(100.0)
    seed = vk.rng.key(3, "reproduce/v_lazy/ensemble")
    sets = {"draws": study.size.draws, "sets": study.size.members, "seed": seed}
    kernel = vk.kernels.Lazy(study.model(100.0), study.data, v_lazy.PROCESS, **sets)
    found = kernel.parts(study.x, v_lazy.TIME)
    inputs = study.S * float((study.weights * found["inputs"][:, 0, 0]).sum())
    assert float(q.mean(0)[1]) == pytest.approx(inputs, rel=1e-6)  # the same sets: the same covariance over them
    quiet = vk.kernels.Lazy(study.model(100.0), study.data, v_lazy.PROCESS, objective="J0", **sets)
    assert float(quiet.parts(study.x, v_lazy.TIME)["targets"].abs().max()) == 0
    torch.testing.assert_close(quiet.parts(study.x, v_lazy.TIME)["init"], found["init"])


def test_crossing() -> None:
    taus = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)
    assert v_lazy.crossing(taus, taus, 1000 / taus) == pytest.approx(1000**0.5)
    assert np.isnan(v_lazy.crossing(taus, taus, 1e6 / taus))


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
    assert words in v_lazy.verdict(torch.tensor([theory, seen]))


@pytest.mark.parametrize(
    ("change", "words"),
    [((0.1, 0.05, 0.15), "fills gaps"), ((-0.1, -0.15, -0.05), "empties gaps"), ((0.0, -0.1, 0.1), "no effect")],
)
def test_the_words_on_gaps_follow_the_paired_difference(change: tuple[float, float, float], words: str) -> None:
    mass = torch.tensor([(0.2, 0.1, 0.3), (0.2, 0.1, 0.3), change])
    assert words in v_lazy.gap_words(mass, 1e4, 0.9)


def test_pictures_take_what_they_are_given() -> None:
    with pytest.raises(vk.InputError, match="shares"):
        plots.share_curves([1.0], ["all"], np.ones((1, 1)), np.ones((1, 1, 3)))
