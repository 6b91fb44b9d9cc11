"""Features of images, and whether samples follow the law of the data: second routes, calibration, power, attacks."""

from __future__ import annotations

import importlib
import itertools
import math
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

import vkernel as vk
from vkernel import metrics
from vkernel.core.errors import InputError
from vkernel.reports.audit.extractors import Extractor, extractor
from vkernel.reports.audit.likeness import likeness

module = importlib.import_module(likeness.__module__)  # its name is the function's, too
DIGITS = vk.data.digits()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def split(seed: int, *sizes: int) -> list[vk.Empirical]:
    order = torch.randperm(DIGITS.n, generator=torch.Generator().manual_seed(seed))
    return [DIGITS.subset(part) for part in order[: sum(sizes)].split(list(sizes))]


def images(data: vk.Empirical) -> Tensor:
    return data[:]


# --- extractors -----------------------------------------------------------------------------------------------------


def test_pixels_and_standardised_pixels():
    x = normal(7, 1, 4, 5)
    assert torch.equal(extractor("pixels")(x), x.reshape(7, 20))
    z = extractor("standardised")(x)
    np.testing.assert_allclose(z.mean(1), 0, atol=1e-6)
    np.testing.assert_allclose(z.std(1, correction=0), 1, rtol=1e-5)
    np.testing.assert_allclose(extractor("standardised")(3 * x - 2), z, atol=1e-5)
    flat = extractor("standardised")(torch.full((3, 1, 4, 5), 0.1))
    assert torch.equal(flat, torch.zeros(3, 20))
    assert extractor("standardised")(normal(5, 1)).abs().max() == 0  # of one pixel nothing remains


@pytest.mark.parametrize("shape", [(60, 10), (12, 30)])  # more images than pixels, and fewer
def test_principal_components_are_those_of_the_singular_value_decomposition(shape):
    x = normal(*shape).double() * torch.linspace(3, 0.5, shape[1])
    extract = extractor("pca:4").fit(x)
    _, s, v = torch.linalg.svd(x - x.mean(0), full_matrices=False)
    variances = s[:4].square() / (len(x) - 1)
    want = (x - x.mean(0)) @ v[:4].mT / variances.mean().sqrt()
    got = extract(x)
    np.testing.assert_allclose(got.abs(), want.abs(), atol=1e-8)
    assert float(got.var(0).sum()) == pytest.approx(4)
    rescaled = extractor("pca:4").fit(255 * x + 7)
    np.testing.assert_allclose(rescaled(255 * x + 7).abs(), got.abs(), atol=1e-7)


def test_components_beyond_the_rank_are_zero():
    x = torch.outer(torch.arange(12.0), torch.ones(20)).double()
    z = extractor("pca:3").fit(x)(x)
    assert float(z[:, 0].var()) == pytest.approx(3)
    np.testing.assert_allclose(z[:, 1:], 0, atol=1e-9)


def test_the_remainder_is_what_the_components_leave_out():
    x = normal(60, 10).double()
    extract = extractor("pca:4").fit(x)
    unit = 1 / float(extract.axes[:, 0].norm())
    both = (extract(x).square().sum(1) + extract.remainder()(x)[:, 0].square()).sqrt() * unit
    np.testing.assert_allclose(both, (x - x.mean(0)).norm(dim=1), rtol=1e-9)
    with pytest.raises(InputError, match="leaves nothing out"):
        extractor("pixels").remainder()


def test_a_fit_follows_the_seed_and_takes_no_more_images_than_it_says(monkeypatch):
    monkeypatch.setattr("vkernel.reports.audit.extractors.FITTED", 100)
    one, same, other = (extractor("pca:3").fit(DIGITS, seed) for seed in (0, 0, 1))
    assert torch.equal(one.axes, same.axes)
    assert not torch.equal(one.center, other.center)


def test_features_over_a_memory_map_are_those_of_its_images(tmp_path, monkeypatch):
    stored = ((images(DIGITS)[:50] + 1) * 127).to(torch.uint8).numpy()
    np.save(tmp_path / "x.npy", stored)
    data = vk.load(tmp_path / "x.npy")
    assert not data.in_memory
    for spec in ("pixels", "standardised", "pca:5", "pca:5 of standardised"):
        extract = extractor(spec).fit(data)
        whole = extract(images(data))
        monkeypatch.setattr("vkernel.reports.audit.extractors._NUMBERS", 500)
        np.testing.assert_allclose(extract.over(data), whole, atol=1e-6)
        np.testing.assert_allclose(extract.over(images(data)), whole, atol=1e-6)
        np.testing.assert_allclose(extract.over(data, torch.tensor([3, 1])), whole[[3, 1]], atol=1e-6)
        monkeypatch.undo()


def test_features_of_the_users_own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def rows(x):\n    return x.mean(-1)\ndef array(x):\n    return x.sum((1, 2, 3)).numpy()\nn = 3\n")
    x = images(DIGITS)[:6]
    mine = extractor(f"{path}:rows")
    assert mine.theirs
    assert torch.equal(mine(x), x.mean(-1).reshape(6, 8))
    assert extractor(f"{path}:array")(x).shape == (6, 1)
    assert extractor("torch:flatten").theirs
    assert extractor(f"pca:2 of {path}:rows").fit(DIGITS)(x).shape == (6, 2)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.Dropout())
    with pytest.raises(InputError, match="training mode"):
        extractor(net)
    assert extractor(net.eval())(x).shape == (6, 3)
    assert extractor(lambda a: a > 0)(x).dtype == torch.float32
    assert extractor(mine) is mine
    for spec, words in (
        (f"{path}:other", "has no 'other'"),
        (f"{path}:n", "no function but a int"),
        ("nowhere.at:all", "cannot be imported"),
        (f"{path}", "There are no features"),
        ("inception", "pca:K, and your own"),
        ("pca:0", "written pca:32"),
        ("pca:x", "written pca:32"),
        ("pca:2 of pca:3", "principal components already"),
        (7, "named by a text or computed by a function, not int"),
    ):
        with pytest.raises(InputError, match=words):
            extractor(spec)


def test_features_are_checked():
    x, sizes = normal(6, 3), itertools.count(1)
    for function, words in (
        (lambda a: a[:-1], "one row for each of 6 images"),
        (lambda a: a.sum(), "one row for each"),
        (lambda a: a / 0, "of 6 of 6 images are NaN or infinite"),
        (lambda a: a.to(torch.complex64), "real numbers"),
        (lambda a: "features", "failed on images of shape"),
        (lambda a: a @ a, "failed on images"),
    ):
        with pytest.raises(InputError, match=words):
            extractor(function)(x)
    changing = Extractor("changing", lambda a: torch.ones(len(a), next(sizes)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vkernel.reports.audit.extractors._NUMBERS", 6)
        with pytest.raises(InputError, match="1 features for some images and 2 for others"):
            changing.over(x)
    with pytest.raises(InputError, match="not fitted"):
        extractor("pca:2")(x)
    with pytest.raises(InputError, match="6 images with 3 features have 3 at most"):
        extractor("pca:4").fit(x)
    with pytest.raises(InputError, match="fitted on 3 features, but these images have 2"):
        extractor("pca:2").fit(x)(x[:, :2])
    with pytest.raises(InputError, match="the same features"):
        extractor("pca:2").fit(torch.ones(6, 3))
    with pytest.raises(InputError, match="no images"):
        extractor("pixels").over(x[:0])


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
    assert "can be told from test images (chance 0.001)" in found.words
    assert likeness(samples, data, test) == found
    assert likeness(samples, data, test, seed=1).kernel.value == pytest.approx(found.kernel.value)  # no subset is drawn


def test_the_chance_is_that_of_brute_force_exchanges():
    x, y, z = normal(12, 2, seed=1) + 0.5, normal(15, 2, seed=2), normal(50, 2, seed=3) * torch.tensor([1.0, 2.0])
    got = module._chance((x, y, z), (), torch.Generator().manual_seed(3))
    draws = torch.rand(module.PERMUTATIONS, 27, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
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
    assert module._chance((equal, equal, normal(9, 2)), (), torch.Generator().manual_seed(0)) == 1.0
    assert module._chance((equal, equal, equal), (equal[:, :1],) * 3, torch.Generator().manual_seed(0)) == 1.0


@pytest.mark.parametrize("with_test", [True, False])
def test_false_alarms_are_as_rare_as_stated(with_test):
    """Skewed laws, small samples: 400 audits of perfect models, at most as many alarms as the binomial law allows."""
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
        assert (found.features, found.k, found.reduced) == ("pca:16", 16, True)
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
    assert "; what is left out is 1." in found.words
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
        assert found.alarm, found.words
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
    assert "65 samples on, but a has 40" in found.words
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
    assert found.k < found.n
    for e in (found.frechet, found.frechet_floor, found.kernel, found.kernel_floor):
        assert math.isfinite(e.value)
        assert math.isfinite(e.se)
    assert found.reduced == (2 * d >= min(found.n, size - (min(size // 2, 2048) if own else 0)))
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
    assert "4 samples diverged" in found.words
    lost = likeness(torch.full((30, 3), math.nan), data, test)
    assert math.isnan(lost.kernel.value)
    assert math.isnan(lost.frechet.value)
    assert lost.alarm
    assert "0 are left, 30 having diverged" in lost.words
    few = likeness(x[:7], data, test)
    assert math.isnan(few.chance)
    assert not few.alarm
    assert "unknown" in few.words
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
        ((x.numpy(), data), "Samples must be a tensor"),
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


def test_the_words_say_how_large(tmp_path: Path):
    samples, data, test = split(4, 128, 900, 300)
    words = likeness(images(samples) + 0.3, data, test).words
    assert words.startswith("Samples can be told from test images (chance 0.001): Fréchet distance ")
    assert "on 32 principal components, " in words
    assert " of 128 test images; kernel distance " in words
    assert " times the " in words
