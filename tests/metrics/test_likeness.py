"""Likeness of laws and drift of samples: second routes, calibration, power, refusals."""

from __future__ import annotations

import functools
import importlib
import math
import time

import draws
import numpy as np
import pytest
import torch
from draws import gen
from hypothesis import given, settings, strategies as st
from scipy import stats
from torch import Tensor, nn

import vkernel as vk
from vkernel import metrics
from vkernel.core.errors import InputError
from vkernel.metrics.likeness import drift, likeness

module = importlib.import_module(likeness.__module__)  # its name is the function's, too
DIGITS = vk.data.digits()
SOME = DIGITS.subset(torch.arange(300))


normal = functools.partial(draws.normal, dtype=torch.float32)


def split(seed: int, *sizes: int) -> list[vk.Empirical]:
    order = torch.randperm(DIGITS.n, generator=gen(seed))
    return [DIGITS.subset(part) for part in order[: sum(sizes)].split(list(sizes))]


def images(data: vk.Empirical) -> Tensor:
    return data[:]


# --- likeness -------------------------------------------------------------------------------------------------------


def test_the_distances_are_those_of_the_features():
    data, test = normal(300, 5, seed=1), normal(120, 5, seed=2)
    samples = normal(100, 5, seed=3) + 0.3
    found = likeness(samples, data, test)
    assert (found.features, found.k, found.n, found.reduced, found.real) == ("pixels", 5, 100, False, "test")
    want = metrics.frechet_distance(samples, data), metrics.kernel_distance(samples, data)
    for got, e in zip((found.frechet, found.kernel), want, strict=True):
        np.testing.assert_allclose([got.value, got.se], [e.value, e.se], rtol=1e-6)
    assert found.frechet.value > 2 * found.frechet_floor.value
    assert found.alarm
    assert found.chance == 0.001
    assert likeness(samples, data, test) == found
    assert likeness(samples, data, test, seed=1).kernel.value == pytest.approx(found.kernel.value)  # no subset is drawn


@pytest.mark.parametrize("held_out", [True, False])
def test_sets_of_samples_share_real_images(held_out: bool):
    """Each is compared as if it were alone, whatever the order and the number of its samples."""
    data, test = split(0, 700, 300)
    real = module.RealImages(data, test if held_out else None, "pixels", 3, "flip")
    for samples in (images(test)[:64], images(test)[:40] + 0.5, images(data)[:1100], images(test)[:64]):
        alone = likeness(samples, data, test if held_out else None, seed=3, augment="flip")
        assert real.likeness(samples) == alone


def test_the_chance_is_that_of_brute_force_exchanges():
    x, y, z = normal(12, 2, seed=1) + 0.5, normal(15, 2, seed=2), normal(50, 2, seed=3) * torch.tensor([1.0, 2.0])
    got = module._chance((x, y, z), (), gen(3))
    draws = torch.rand(module.PERMUTATIONS, 27, generator=gen(3), dtype=torch.float64)
    orders, pool = torch.cat([torch.arange(27)[None], draws.argsort(1)]), torch.cat([x, y]).double()
    first = np.array([metrics.kernel_distance(pool[o < 12], pool[o >= 12]).value for o in orders])
    pairs = module._second_order(pool, z.double())

    def unbiased(o: Tensor) -> float:
        a, b = o < 12, o >= 12
        own = [
            float((pairs[c][:, c].sum() - pairs[c][:, c].diagonal().sum()) / (c.sum() * (c.sum() - 1))) for c in (a, b)
        ]
        return sum(own) - 2 * float(pairs[a][:, b].mean())

    second = np.array([unbiased(o) for o in orders])
    theta = np.maximum(*((v - v.mean()) / v.std(ddof=1) for v in (first, second)))
    assert got == (1 + (theta[1:] >= theta[0] - 1e-9).sum()) / 1000


def test_the_second_statistic_is_frechets_distance_near_the_data():
    """Of laws that differ little from the training images' in their means, or in their variances along the axes."""
    z = normal(500, 3).double()
    z = (z - z.mean(0)) @ torch.linalg.inv(torch.linalg.cholesky(torch.cov(z.mT, correction=0))).mT
    turn = torch.linalg.qr(normal(3, 3, seed=4).double()).Q
    z = z * torch.tensor([2.0, 1.0, 0.5], dtype=torch.float64)
    for stretched in ([1.02, 1.0, 0.97], [1.0, 1.0, 1.0]):
        x = (z * torch.tensor(stretched, dtype=torch.float64) + 0.01) @ turn
        pairs = module._second_order(torch.cat([x, z @ turn]), z @ turn)
        n = len(z)
        got = float(pairs[:n, :n].mean() + pairs[n:, n:].mean() - 2 * pairs[:n, n:].mean())
        assert got == pytest.approx(metrics.frechet_distance(x, z @ turn).value, rel=0.03)


def test_equal_points_are_no_evidence():
    equal = torch.ones(9, 2)
    assert module._chance((equal, equal, normal(9, 2)), (), gen(0)) == 1.0
    assert module._chance((equal, equal, equal), (equal[:, :1],) * 3, gen(0)) == 1.0


@pytest.mark.parametrize("with_test", [True, False])
def test_false_alarms_are_as_rare_as_stated(with_test, monkeypatch):
    """Skewed laws, small samples: 400 audits of perfect models, at most as many alarms as the binomial law allows.
    With 199 exchanges the chances of .01, .05, .2 and .5 are as exact as with 999."""
    monkeypatch.setattr(module, "PERMUTATIONS", 199)
    chances = []
    for seed in range(400):
        x = normal(140, 3, seed=seed).exp()
        samples, data, test = x[:24], x[24:100], x[100:]
        chances.append(likeness(samples, data, test if with_test else None, seed=seed).chance)
    found = torch.tensor(chances, dtype=torch.float64)
    for level in (0.01, 0.05, 0.2, 0.5):
        assert int((found <= level).sum()) <= stats.binom.isf(1e-4, 400, level)
    assert int((found <= 0.5).sum()) >= stats.binom.ppf(1e-4, 400, 0.5)  # and not rarer: the test is exact


def test_false_alarms_on_images_reduced_to_principal_components():
    alarms, cover = 0, []
    for seed in range(40):
        samples, data, test = split(seed, 64, 500, 128)
        found = likeness(images(samples), data, test, seed=seed)
        assert (found.features, found.k, found.reduced) == ("pca:32", 32, True)
        alarms += found.alarm
        cover.append(found.frechet.value - found.frechet_floor.value)
    assert alarms <= 4
    assert abs(np.mean(cover)) < 4 * np.std(cover) / math.sqrt(40)  # the floor has the bias of the distance


def test_noise_that_principal_components_do_not_see_is_found_in_what_they_leave_out():
    samples, data, test = split(1, 64, 900, 300)
    noisy = images(samples) + 0.2 * normal(64, 1, 8, 8)
    found, clean = likeness(noisy, data, test), likeness(images(samples), data, test)
    assert found.frechet.value < 1.3 * found.frechet_floor.value
    assert found.alarm
    assert found.remainder.low > 1
    assert clean.remainder.low < 1 < clean.remainder.high
    assert likeness(normal(60, 2), normal(99, 2, seed=1)).remainder is None
    assert likeness(normal(60, 2), normal(99, 2, seed=1), features="pca:2").remainder is None  # nothing is left out


def test_the_remainders_ratio_has_the_right_error():
    found = [module._ratio(2 + normal(40, 1, seed=s), 1 + 0.2 * normal(30, 1, seed=s + 999)) for s in range(300)]
    assert 0.91 < np.mean([e.low <= 2 <= e.high for e in found]) <= 0.99


@pytest.mark.parametrize("fault", ["brighter", "dimmer", "blurred", "one class", "noisy"])
def test_faults_are_found(fault):
    samples, data, test = split(1, 200, 900, 300)
    x = images(samples)
    if fault == "one class":
        x = x[(x - x[0]).flatten(1).norm(dim=1).argsort()[:60]]
    else:
        x = {
            "brighter": x + 0.15,
            "dimmer": -1 + 0.85 * (x + 1),
            "blurred": nn.functional.avg_pool2d(x, 3, 1, 1),
            "noisy": x + 0.5 * normal(*x.shape),
        }[fault]
    for held in (test, None):
        found = likeness(x, data, held)
        assert found.alarm, found
        assert found.frechet.value > found.frechet_floor.value


def test_standardised_features_are_blind_to_brightness():
    samples, data, test = split(2, 128, 900, 300)
    plain, brighter = (likeness(images(samples) + c, data, test, features="standardised") for c in (0, 0.4))
    assert plain.features == "pca:32 of standardised"
    assert brighter.kernel.value == pytest.approx(plain.kernel.value, rel=1e-3)
    assert brighter.chance == plain.chance
    assert likeness(images(samples) + 0.4, data, test).alarm


def test_the_users_own_features_are_not_reduced():
    samples, data, test = split(3, 40, 500, 100)
    found = likeness(images(samples), data, test, features=lambda x: x.flatten(1))
    assert found.frechet is None
    assert found.frechet_floor is None
    assert not found.reduced
    assert found.k == 64
    assert found.why == "covariances of 64 features need 65 images or more; there are 40 samples."
    assert math.isfinite(found.kernel.value)
    few = likeness(images(samples), data, test, features=lambda x: x.mean((-1, -2)))
    assert few.frechet is not None
    assert few.k == 1
    asked = likeness(images(samples), data, test, features="pca:3")
    assert (asked.features, asked.k, asked.reduced) == ("pca:3", 3, False)


@settings(deadline=None, max_examples=20)
@given(n=st.integers(8, 60), m=st.integers(8, 60), size=st.integers(16, 90), d=st.integers(1, 40), own=st.booleans())
def test_all_sizes_give_an_answer(n, m, size, d, own):
    x = normal(n + m + size, d)
    found = likeness(x[:n], x[n : n + size], None if own else x[n + size :])
    assert found.k == min(d, max(k for k in (1, 2, 4, 8, 16, 32) if 4 * k <= size))  # of the data alone
    assert found.reduced == (d > found.k)
    assert (found.frechet is None) == (found.frechet_floor is None) == bool(found.why) == (found.n <= found.k)
    for e in (found.frechet or found.kernel, found.frechet_floor or found.kernel, found.kernel, found.kernel_floor):
        assert math.isfinite(e.value)
        assert math.isfinite(e.se)
    assert found.n == min(n, size // 2 if own else m)
    assert 0 < found.chance <= 1


def test_diverged_samples_are_counted_and_left_out():
    data, test = normal(200, 3, seed=1), normal(80, 3, seed=2)
    x = normal(60, 3, seed=3)
    clean = likeness(x, data, test)
    spoilt = torch.cat([x, torch.tensor([[math.nan, 0, 0], [math.inf, 0, 0], [0, -math.inf, 0], [1e30, 0, 0]])])
    found = likeness(spoilt, data, test)
    assert found.diverged == 4
    assert found.alarm
    assert not clean.alarm
    assert found.n == 60
    assert found.kernel.value == pytest.approx(clean.kernel.value)
    lost = likeness(torch.full((30, 3), math.nan), data, test)
    assert math.isnan(lost.kernel.value)
    assert math.isnan(lost.frechet.value)
    assert lost.alarm
    few = likeness(x[:7], data, test)
    assert math.isnan(few.chance)
    assert not few.alarm
    assert few.n == 7
    assert likeness(x[:0], data, test).n == 0


def test_weighted_data_are_drawn_by_weight():
    x = torch.cat([normal(300, 2), 5 + normal(300, 2, seed=1)])
    data = vk.Empirical(x, weights=torch.cat([torch.ones(300), torch.full((300,), 1e-9)]))
    like, unlike = likeness(normal(80, 2, seed=5), data), likeness(x[torch.arange(0, 600, 7)], data)
    assert like.frechet.value < 0.5 < unlike.frechet.value
    assert unlike.alarm


def test_refusals_of_likeness():
    data, test, x = normal(40, 3), normal(20, 3, seed=1), normal(12, 3, seed=2)
    for arguments, words in (
        ((x.numpy(), data), "Samples must be a torch tensor"),
        ((x[:, :2], data), "Samples have shape"),
        ((torch.tensor(1.0), data), "Samples have shape"),
        ((x, data[:10]), "16 training images or more; there are 10"),
        ((x, data, test[:5]), "8 test images or more; there are 5"),
        ((x, data, test[:, :2]), "test images"),
        ((x, torch.ones(40, 3)), "All points of the data are equal"),
        ((x, data * math.nan), "not finite"),
    ):
        with pytest.raises(InputError, match=words):
            likeness(*arguments)
    with pytest.raises(InputError, match="There are no features"):
        likeness(x, data, features="inception")
    assert likeness(x.half(), data.half(), test).n == 12
    assert likeness((9 * x).int(), (9 * data).int(), (9 * test).int()).n == 12


def test_it_is_fast_enough():
    data = vk.Empirical((normal(12_000, 1, 28, 28) * 40 + 128).clamp(0, 255).to(torch.uint8), scale=(-1, 1))
    start = time.process_time()
    likeness(normal(256, 1, 28, 28) / 3, data)
    assert time.process_time() - start < 5 * torch.get_num_threads()


# --- drift ----------------------------------------------------------------------------------------------------------


def halves(n: int, seed: int) -> tuple[Tensor, vk.Empirical]:
    digits = DIGITS if n > 300 else SOME
    order = torch.randperm(digits.n, generator=gen(seed))[:n]
    return digits[order[: n // 2]], digits.subset(order[n // 2 :])


@pytest.mark.parametrize("n", [1797, 100])
def test_fresh_data_raise_no_alarm(n: int) -> None:
    assert sum(drift(*halves(n, seed)).alarm for seed in range(200)) < 10


def test_intervals_of_z_hold_zero_as_often_as_they_say() -> None:
    """Images of normal pixels: 95 % within 4 standard errors over 300 pairs, and shares of 2/(N + 1) on average."""
    covered, shares = 0, 0.0
    for seed in range(300):
        both = torch.randn(100, 1, 4, 4, generator=gen(seed))
        found = drift(both[:40], vk.Empirical(both[40:]))
        covered += found.mean.low <= 0 <= found.mean.high
        shares += found.outside_mean.value / 300
    assert covered / 300 == pytest.approx(0.95, abs=0.05)
    assert shares == pytest.approx(2 / 61, rel=0.3)


def test_changed_samples_raise_it() -> None:
    samples, data = halves(1797, 0)
    means = data[:].double().mean((1, 2, 3))
    shifted = drift(samples + 0.1, data)
    assert shifted.alarm
    assert shifted.mean.value == pytest.approx(0.1 / float(means.std()), abs=0.2)
    assert shifted.mean.low < shifted.mean.value < shifted.mean.high
    assert set(shifted.far) == {"mean"}
    assert shifted.far["mean"].low > 1
    assert shifted.spread_mean.low < 1 < shifted.spread_mean.high
    assert drift(samples * 1.2, data).alarm
    weak = drift(samples.mean((1, 2, 3), keepdim=True) + 0.7 * (samples - samples.mean((1, 2, 3), keepdim=True)), data)
    assert weak.alarm
    assert abs(weak.mean.value) < 0.25 < abs(weak.variance.value)
    signs = torch.randn(len(samples), 1, 1, 1, generator=gen()).sign()
    apart = drift(samples + 2 * signs, data)  # the average stays about where it was
    assert apart.alarm
    assert apart.outside_mean.value == 1
    assert apart.outside["mean"] == apart.share.value == 1
    assert apart.share.low < 1
    assert apart.spread_mean.low > 10  # ± 2, where the data have a spread of about .1
    assert apart.spread_variance.low < 1 < apart.spread_variance.high


def test_samples_that_are_not_finite_are_outside() -> None:
    samples, data = halves(200, 0)
    samples = samples.clone()
    samples[:20] = math.nan
    found = drift(samples, data)
    assert found.alarm
    assert found.outside_mean.value >= 0.2
    assert math.isfinite(found.mean.value)
    assert drift(torch.full_like(samples, math.inf), data).alarm


def test_weights_of_the_data_count() -> None:
    samples, data = halves(1797, 1)
    both = torch.cat([data[:], torch.full((50, 1, 8, 8), 40.0)])
    weights = torch.cat([torch.ones(data.n), torch.zeros(50)])
    found, known = drift(samples, vk.Empirical(both, weights)), drift(samples, data)
    assert found.mean.value == pytest.approx(known.mean.value)
    assert found.outside_mean == known.outside_mean
    assert found.spread_mean.fields == pytest.approx(known.spread_mean.fields)


@pytest.mark.parametrize(
    ("samples", "data", "words"),
    [
        (torch.zeros(8, 1, 8, 8), torch.zeros(3), "data must be an Empirical"),
        ([[1.0]], SOME, "Samples must be a torch tensor"),
        (
            torch.zeros(8, 1, 4, 4),
            DIGITS.subset(torch.arange(300)),
            r"Samples have shape \(1, 4, 4\), the data \(1, 8, 8\)",
        ),
        (torch.zeros(3, 1, 8, 8), SOME, "4 samples and 4 data; got 3 and 300"),
    ],
)
def test_what_cannot_drift_is_refused(samples: object, data: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        drift(samples, data)
