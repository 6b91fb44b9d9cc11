"""Audits by noise level and by membership: exact cases, known populations, calibration, refusals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from draws import gen, normal
from function_score import FunctionScore
from torch import Tensor

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.reports.audit import describe, levels, membership
from vkernel.reports.audit.levels import NoisyImages

PROCESS = vk.EDM()
SMALL: dict[str, Any] = {"times": [0.3, 1.0, 3.0], "images": 40}


def model(score: Any, process: vk.Process = PROCESS) -> FunctionScore:
    return FunctionScore(score, process, (1, 2, 4))


def population() -> vk.GaussianMixture:
    return vk.GaussianMixture(2 * normal(3, 1, 2, 4, seed=5), variance=0.5)


def halves(n: int = 200, seed: int = 0) -> tuple[vk.Empirical, vk.Empirical]:
    drawn = population().sample(2 * n, seed)
    return vk.Empirical(drawn[:n]), vk.Empirical(drawn[n:])


# --- levels ---------------------------------------------------------------------------------------------------------


def test_the_exact_score_is_the_ideal():
    train, test = halves()
    found = levels(vk.EmpiricalScore(train, PROCESS), train, test, **SMALL)
    for key in ("train", "test"):
        assert np.allclose(found[key], found[f"ideal_{key}"], 1e-5, 1e-12)
    assert (found.distance < 1e-10).all()  # rounding
    assert (found.rayleigh_count == 0).all()
    assert found.rayleigh.isnull().all()
    assert (found.gap_low[0] > 0).all()  # the ideal remembers
    assert found.attrs["train_images"] == found.attrs["test_images"] == 40
    assert all(v.attrs["long_name"] and v.attrs["units"] for v in (*found.data_vars.values(), *found.coords.values()))


def test_several_models_share_the_ideal_and_keep_their_numbers():
    train, test = halves(30)
    models = [model(lambda x, t: -x), model(lambda x, t: -x / (1 + t**2))]
    both = levels(models, train, test, **SMALL)
    assert both.sizes == {"model": 2, "t": 3}
    for m, one in enumerate(models):
        alone = levels(one, train, test, **SMALL)
        assert all(np.array_equal(both[name][m], alone[name], equal_nan=True) for name in alone.data_vars)
    with pytest.raises(InputError, match="one process"):
        levels([models[0], model(lambda x, t: -x, vk.VP())], train, times=[0.3])
    with pytest.raises(InputError, match="no model"):
        levels([], train)


def test_errors_and_distances_by_hand():
    train, _ = halves(30)
    found = levels(model(lambda x, t: -x), train, times=[0.7], images=100, draws=1)
    assert "test" not in found and "gap" not in found  # noqa: PT018
    g = vk.core.rng.stream(0, "audit of levels, train")
    x0 = train[train.choose(100, g)]
    assert len(x0) == 30
    noised = NoisyImages(PROCESS, torch.tensor([0.7]).double(), x0, vk.core.rng.keys((1, 1, 30), g))
    ((_, _, x, noise),) = noised.parts(0, 100)
    noise, wrong = noise.double(), 0.7 * x.double()
    ideal = -0.7 * vk.EmpiricalScore(train, PROCESS)(x, 0.7).double()
    for name, a in (("train", wrong - noise), ("ideal_train", ideal - noise), ("distance", wrong - ideal)):
        each = a.square().flatten(1).mean(1)
        assert found[name].item() == pytest.approx(float(each.mean()), rel=1e-5)
        assert found[f"{name}_se"].item() == pytest.approx(float(each.std()) / math.sqrt(30), rel=1e-5)
    assert float((noise.mean() * math.sqrt(noise.numel())).abs()) < 4
    assert float(noise.std()) == pytest.approx(1, abs=0.15)


def test_chunks_change_nothing_and_seeds_do():
    train, test = halves(50)
    score = model(lambda x, t: -x / (t**2 + 1))
    one, other = (levels(score, train, test, **SMALL, batch=batch) for batch in (64, 7))
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=1e-4, atol=1e-7)
    assert (levels(score, train, test, **SMALL, seed=1).train != one.train).all()


def test_the_population_has_no_gap():
    train, test = halves(400)
    found = levels(population().score(PROCESS), train, test, images=400)
    assert found.sizes["t"] == 8
    assert (np.diff(found.ratio) > 0).all()
    assert (abs(found.gap) < 3.5 * found.gap_se).all()
    assert (found.gap_low < 0).sum() >= 6
    assert (found.gap_high > 0).sum() >= 6
    assert (found.ideal_train < found.train + 3 * found.train_se).all()
    assert (found.ideal_test[:3] > found.test_high[:3]).all()  # a memory is no use on new images


def test_the_gap_covers_zero_as_often_as_it_says():
    score, inside = population().score(PROCESS), 0
    for k in range(200):
        train, test = halves(25, seed=k)
        found = levels(score, train, test, times=[1.0], draws=1, seed=k)
        inside += int(found.gap_low.item() <= 0 <= found.gap_high.item())
    assert 0.9 <= inside / 200 <= 0.99


def test_rayleigh_of_white_errors_is_one_and_of_aligned_ones_more():
    train, _ = halves(60)
    exact, g = vk.EmpiricalScore(train, PROCESS), torch.Generator().manual_seed(0)
    white = levels(
        model(lambda x, t: exact(x, t) + torch.randn(x.shape, generator=g)), train, times=[1.0, 2.0], draws=8
    )
    assert (abs(white.rayleigh - 1) < 4 * white.rayleigh_se).all()
    assert (white.rayleigh_se < 0.15).all()

    def along(which: int) -> Any:
        def score(x: Tensor, t: Any) -> Tensor:
            vectors = torch.linalg.eigh(exact.covariance(x.double(), t).dense()).eigenvectors[..., which]
            return exact(x, t) + vectors.reshape(x.shape).to(x.dtype)

        return model(score)

    top, low = (levels(along(which), train, times=[1.0, 2.0], images=30, draws=1) for which in (-1, 0))
    assert (top.rayleigh_low > 1.5).all()
    assert (low.rayleigh_high < 0.5).all()
    np.testing.assert_allclose(top.distance, np.array([1.0, 4.0]) / 8, rtol=1e-4)


def test_rayleigh_against_the_dense_matrix_down_to_underflow():
    pair = vk.Empirical(torch.tensor([[-1.0, 0.0], [1.0, 0.0]]))  # C has the direction (1, 0) alone
    tilt = model(lambda x, t: vk.EmpiricalScore(pair, PROCESS)(x, t) + torch.tensor([0.6, 0.8]))
    found = levels(tilt, pair, times=[0.01, 0.1, 1.0])
    np.testing.assert_allclose(found.rayleigh[1:], 2 * 0.36, rtol=1e-5)
    assert found.rayleigh_count.values.tolist() == [0, 2, 2]
    assert math.isnan(found.rayleigh[0]) and math.isnan(found.rayleigh_se[0])  # noqa: PT018


def test_networks_with_an_index_input_are_evaluated_at_indices():
    process = vk.DDPM.linear()
    train, test = halves(40)
    net = vk.to_noise(vk.EmpiricalScore(train, process))
    found = levels(vk.as_score(net, process, predicts="noise", time="index"), train, test, images=20)
    assert (found.t == found.t.round()).all()
    assert (found.distance < 1e-8).all()
    np.testing.assert_allclose(found.train, found.ideal_train, rtol=1e-3, atol=1e-6)


def test_members_of_ensembles_are_models():
    model = vk.models.Linear(vk.features.random_fourier(12, 2, vk.VP()), "noise")
    member = vk.train_ensemble(model, vk.data.hexagon(), vk.VP(), members=2, draws=200, progress=False)[0]
    found = levels(member, vk.data.hexagon(), vk.data.square(), times=[0.1, 0.3])
    assert (found.train > found.ideal_train).all()
    assert membership(member, vk.data.hexagon(), vk.data.square(), times=[0.1, 0.3]).train.shape == (2, 6)


def test_weights_are_the_frequencies_of_images():
    points = normal(3, 2)
    data = vk.Empirical(points, weights=[0.0, 1.0, 3.0])
    picked = data.choose(4000, gen(0))
    assert (torch.bincount(picked, minlength=3) / 4000).tolist() == pytest.approx([0, 0.25, 0.75], abs=0.03)
    assert sorted(data.choose(10, gen(), distinct=True).tolist()) == [1, 2]


# --- membership -----------------------------------------------------------------------------------------------------


def test_a_memoriser_gives_itself_away():
    train, test = halves()
    found = membership(vk.EmpiricalScore(train, PROCESS), train, test, times=[0.3, 0.5], images=100, draws=2)
    assert found.auc.value > 0.98
    assert found.auc.low > 0.95
    assert (found.by_level.value > 0.9).all()
    assert "can be distinguished" in describe(found)
    swapped = membership(vk.EmpiricalScore(test, PROCESS), train, test, times=[0.3, 0.5], images=100, draws=2)
    assert swapped.auc.high < 0.05
    assert "better than training images" in describe(swapped)


def test_the_population_has_no_members():
    train, test = halves(300)
    found = membership(population().score(PROCESS), train, test, images=300, draws=2)
    assert found.auc.low < 0.5 < found.auc.high
    assert abs(found.auc.value - 0.5) < 0.08
    assert "cannot be distinguished" in describe(found)
    ds = found.to_dataset()
    assert ds.sizes == {"t": 8}
    assert float(ds.auc) == found.auc.value
    np.testing.assert_allclose(ds.auc_level_low, found.by_level.low)
    assert all(v.attrs["long_name"] and v.attrs["units"] for v in (*ds.data_vars.values(), *ds.coords.values()))


def test_all_images_get_the_same_noise():
    data = vk.Empirical(torch.ones(2, 3))
    found = membership(model(lambda x, t: -x), data, data, times=[0.5, 1.0], images=2)
    assert (found.train == found.train[:, :1]).all()
    assert (found.train == found.test).all()
    assert found.auc.value == 0.5


def test_intervals_are_calibrated_on_random_halves():
    """A network that was trained on other images, and one pool of images split at random, 300 times."""
    model = vk.EmpiricalScore(population().sample(20, 99), PROCESS)
    pool, inside, by_level = population().sample(80, 7), 0, torch.zeros(2)
    for k in range(300):
        order = torch.randperm(80, generator=torch.Generator().manual_seed(k))
        found = membership(model, pool[order[:40]], pool[order[40:]], times=[0.5, 2.0], draws=1, seed=k)
        inside += found.auc.low <= 0.5 <= found.auc.high
        by_level += (found.by_level.low <= 0.5) & (found.by_level.high >= 0.5)
    assert 0.92 <= inside / 300 <= 0.98
    assert ((by_level >= 0.92 * 300) & (by_level <= 0.98 * 300)).all()


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("audit", [levels, membership])
def test_refusals_are_sentences(audit):
    train, test = halves(10)
    score = vk.EmpiricalScore(train, PROCESS)

    def refused(words: str, *given: Any, **options: Any) -> None:
        with pytest.raises(InputError, match=words) as caught:
            audit(*given, **options)
        assert str(caught.value).endswith(".")

    refused("they must be alike", score, train, torch.zeros(4, 8))
    refused("one training image", score, torch.zeros(1, 1, 2, 4), test)
    refused("one test image", score, train, torch.zeros(1, 1, 2, 4))
    refused("is not finite", score, train, torch.full((4, 1, 2, 4), math.nan))
    refused("NaN or infinite values on noisy images", model(lambda x, t: x * math.nan), train, test)
    refused("tensor of the same shape", vk.as_score(lambda x, t: x[0], PROCESS), train, test)
    refused("An audit needs a Score", lambda x, t: x, train, test)
    refused("isotropic noise alone", model(score, vk.Anisotropic(PROCESS, torch.ones(1, 2, 4))), train, test)
    refused("outside", score, train, test, times=[1e9])
    refused("times is empty", score, train, test, times=[])
    refused("times must be numbers", score, train, test, times="late")
    refused("give times=", score, torch.zeros(4, 1, 2, 4), test)
    refused("images must be a whole number, 2 or more", score, train, test, images=1)
    refused("draws must be", score, train, test, draws=0)
    refused("batch must be", score, train, test, batch=2.5)
