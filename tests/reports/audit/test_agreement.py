"""Agreement of runs: unbiased moments, calibration of verdicts, the path of the mean, samples from the same noise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from draws import normal
from function_score import FunctionScore
from torch import Tensor

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.core.estimate import spearman
from vkernel.reports.audit import agreement, describe, same_noise
from vkernel.reports.audit.agreement import PLACES, _verdicts, mean_path

PROCESS = vk.EDM(T=5.0)
SHAPE = (1, 2, 4)
NAN = math.nan


def model(function: Any) -> FunctionScore:
    return FunctionScore(function, PROCESS, SHAPE)


def training(n: int = 40, seed: int = 0) -> vk.Empirical:
    return vk.Empirical(vk.GaussianMixture(2 * normal(3, *SHAPE, seed=5), variance=0.5).sample(n, seed))


def remembered(score: Any) -> Any:
    """Return the same function; members evaluated at the same point in turn share one evaluation."""
    last: list[Any] = [None, None, None]

    def call(x: Tensor, t: Any) -> Tensor:
        if last[0] is not x or last[1] != float(t):
            last[:] = x, float(t), score(x, t)
        return last[2]

    return call


def shifted(data: vk.Empirical, offsets: Tensor, gain: Any = lambda x: 1.0) -> vk.Checkpoints:
    """Members s + gain(x) · offset: V is known everywhere."""
    exact = remembered(vk.EmpiricalScore(data, PROCESS))
    return vk.Checkpoints([model(lambda x, t, o=o: exact(x, t) + gain(x) * o.to(x)) for o in offsets])


def faithful(data: vk.Empirical, members: int, strength: float = 0.3, seed: int = 0) -> vk.Checkpoints:
    """Members whose covariance is strength² C(x, t) exactly: a Gaussian field Σ √r_i z_i (α/σ²)(y_i - m)."""
    exact, points = vk.EmpiricalScore(data, PROCESS), data.rows(0, data.n).double()

    def parts(x: Tensor, t: Any) -> tuple[Tensor, Tensor]:
        post = exact.posterior(x.double(), float(t))
        weight, index = post.top(data.n)
        away = points[index] - post.mean.flatten(1)[:, None]
        field = torch.zeros_like(away).scatter(1, index[..., None].expand(away.shape), weight.sqrt()[..., None] * away)
        return exact(x, t), strength / float(t) ** 2 * field  # of the process EDM, alpha is 1

    shared = remembered(parts)

    def member(z: Tensor) -> FunctionScore:
        def score(x: Tensor, t: Any) -> Tensor:
            s, field = shared(x, t)
            return s + torch.einsum("i,bid->bd", z, field).reshape(x.shape).to(x)

        return model(score)

    return vk.Checkpoints([member(z) for z in normal(members, data.n, seed=seed)])


def rough(x: Tensor) -> Tensor:
    """Return a number for each image that is independent of C."""
    number = 1.5 + (997 * x.double().flatten(1) @ normal(8, seed=9)).sin()
    return number.reshape(-1, 1, 1, 1).to(x)


def test_the_path_is_the_flow_of_the_mean():
    data = training()
    nets = shifted(data, torch.zeros(2, *SHAPE))
    start = PROCESS.prior((6, *SHAPE), generator=torch.Generator().manual_seed(0)).double()
    first, _ = mean_path(nets, start, torch.tensor([PROCESS.eps, 1.0]).double())
    fine = vk.sample.pf_ode(vk.EmpiricalScore(data, PROCESS), start, steps=800, spacing="edm")
    assert float((first - fine).flatten(1).norm(dim=1).median()) < 0.05 * data.spread


def test_refusals():
    data, flat = training(), model(lambda x, t: -x)
    for wrong, words in (
        ({"scores": flat}, "Agreement needs Scores"),
        ({"data": vk.Empirical(normal(4, 3))}, "take"),
        ({"data": vk.Empirical(torch.ones(4, *SHAPE)), "times": [1.0]}, "equal"),
        ({"images": 3}, "images"),
        ({"times": []}, "empty"),
        ({"scores": vk.Checkpoints([flat, model(lambda x, t: x * NAN)])}, "member 1 returned NaN"),
        ({"samples": normal(3, 5, *SHAPE)}, "each of 2"),
    ):
        given = {"scores": vk.Checkpoints([flat] * 2), "data": data} | wrong
        with pytest.raises(InputError, match=words):
            agreement(given.pop("scores"), given.pop("data"), **given)


def test_groups_split_the_variance():
    data = training()
    nets, x = vk.Checkpoints(shifted(data, normal(5, *SHAPE)).members, ["a", "a", "b", "c", "c"]), normal(3, *SHAPE)
    between, inside = nets.split(x, 1.0)
    found = agreement(nets, data, times=[1.0], images=12)
    share = found.dataset.between_groups.sel(place="data").item()
    assert share == pytest.approx(float(between.sum() / (between + inside).sum()), rel=1e-4)
    assert found.dataset.within_groups.sel(place="path").item() == pytest.approx(1 - share, rel=1e-4)
    assert "between groups" in describe(found)
    assert "kurtosis" not in found.dataset


# --- agreement ------------------------------------------------------------------------------------------------------


def test_variance_and_bias_are_unbiased():
    data, common, replicates = training(30), 0.4 * normal(*SHAPE, seed=3), 80
    found = []
    for k in range(replicates):
        nets = shifted(data, common + 0.5 * normal(3, *SHAPE, seed=100 + k))
        ds = agreement(nets, data, times=[0.8], images=10, seed=k).dataset
        found.append([[ds[name].sel(place=p).item() for p in PLACES] for name in ("variance", "bias")])
    found, truth = np.array(found), (0.64 * 0.25, 0.64 * float(common.square().mean()))
    for k in (0, 1):
        error = found[:, k].std(0, ddof=1) / math.sqrt(replicates)
        assert (abs(found[:, k].mean(0) - truth[k]) < 4 * error).all()
        assert (error < 0.15 * truth[k]).all()


def test_the_bias_of_grouped_members_is_unbiased():
    data, found = training(30), []
    for k in range(80):
        offsets = normal(2, *SHAPE, seed=k)[[0, 0, 0, 1]] + 0.3 * normal(4, *SHAPE, seed=1000 + k)
        nets = vk.Checkpoints(shifted(data, offsets).members, [0, 0, 0, 1])
        found.append(agreement(nets, data, times=[0.8], images=10, seed=k).dataset.bias.sel(place="data").item())
    assert abs(np.mean(found)) < 4 * np.std(found) / math.sqrt(80)


def test_a_variance_that_is_c_is_found_to_be():
    data, ranks, coordinates = training(), [], []
    for members in (3, 10, 60):
        found = agreement(faithful(data, members), data, times=[0.6, 1.0], images=30)
        ds = found.dataset
        ranks.append(float(ds["rank"].sel(place=["between", "path"]).mean()))
        coordinates.append(float(ds.rank_coordinates.mean()))
        assert list(ds["rank"].dims) == ["place", "t"]
    assert ranks[0] < ranks[2] > 0.95
    assert coordinates[0] < coordinates[1] < coordinates[2]
    assert coordinates[2] > 0.85
    assert (ds.rank_specific_low > 0).all()
    assert (abs(ds.V_over_C - 0.09) < 0.03).all()
    assert all(found.follows.values())
    assert len(found.follows) == 6
    assert (ds.rank_without > 0.9).all()
    assert ds.rank_without.sizes["unit"] == 60
    assert f"{len(found.follows)} of {len(found.follows)} levels" in describe(found)
    assert all(v.attrs["long_name"] and v.attrs["units"] for v in ds.data_vars.values())


def test_a_variance_that_knows_nothing_of_c_is_not_said_to_follow():
    data, alarms, inside = training(), 0, []
    for k in range(40):
        found = agreement(shifted(data, normal(4, *SHAPE, seed=k), rough), data, times=[0.7, 1.5], images=20, seed=k)
        ds = found.dataset
        alarms += any(found.follows.values())
        inside += ((ds.rank_low <= 0) & (ds.rank_high >= 0)).values[ds["rank"].notnull()].tolist()
        assert set(ds.verdict.values[ds.verdict.notnull()]) <= {-1.0, 0.0, 1.0}
    assert alarms <= 5
    assert 0.88 <= np.mean(inside) <= 0.99


def test_cumulants_of_gaussian_members_vanish():
    data = training()
    found = []
    for k in range(40):
        ds = agreement(shifted(data, normal(5, *SHAPE, seed=k), rough), data, times=[1.0], images=10).dataset
        found.append([float(ds.skewness[0, 0]), float(ds.kurtosis[0, 0])])
    mean, error = np.mean(found, 0), np.std(found, 0) / math.sqrt(40)
    assert (abs(mean) < 4 * error).all()
    three = agreement(shifted(data, normal(3, *SHAPE)), data, times=[1.0], images=10)
    assert "kurtosis" not in three.dataset
    assert "need four" in describe(three)


def test_places_and_chunks():
    data, seen = training(25), []
    nets = shifted(data, normal(3, *SHAPE), rough)
    one, other = (agreement(nets, data, times=[0.5, 2.0], images=25, draws=2, batch=b).dataset for b in (128, 7))
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=1e-3, atol=1e-5)
    agreement(nets, data, times=[0.5, 2.0], images=10, progress=lambda label, share: seen.append(share))
    assert seen == pytest.approx([k / 6 for k in range(1, 7)])
    target = one.target
    assert float(target.sel(place="between", t=0.5)) > float(target.sel(place="data", t=0.5))
    assert float(one.contrast_low[0]) < float(one.contrast[0]) < float(one.contrast_high[0])


def test_variance_on_data_by_hand():
    data = training(15)
    nets = shifted(data, normal(4, *SHAPE))
    ds = agreement(nets, data, times=[0.5], images=15).dataset
    offsets = normal(4, *SHAPE).numpy().reshape(4, 8)
    truth = 0.25 * offsets.var(0, ddof=1).mean()
    np.testing.assert_allclose(ds.variance, truth, rtol=1e-5)
    left = [0.25 * np.delete(offsets, k, 0).var(0, ddof=1).mean() for k in range(4)]
    np.testing.assert_allclose(ds.variance_members, math.sqrt(3 * np.var(left)), rtol=1e-4)
    np.testing.assert_allclose(ds.contrast, 1, rtol=1e-5)


def test_identical_members_agree():
    data = training(15)
    found = agreement(vk.Checkpoints([vk.EmpiricalScore(data, PROCESS)] * 4), data, times=[0.02, 1.0], images=15)
    assert (found.dataset.variance == 0).all()
    assert (abs(found.dataset.bias) < 1e-12).all()
    assert found.dataset["rank"].isnull().all()
    assert found.follows == {}


def test_stored_integers_and_duplicates_and_few_points():
    levels = torch.randint(0, 255, (12, 1, 3, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    process = vk.DDPM.linear()
    data = vk.Empirical(torch.cat([levels, levels[:4]]), scale=(-1, 1))
    nets = [vk.as_score(lambda x, t, k=k: 0.1 * k * x, process, (1, 3, 3), "noise", "index") for k in range(3)]
    found = agreement(vk.Checkpoints(nets), data, images=16, times=[100, 300.4]).dataset
    assert found.t.values.tolist() == [100, 300]
    assert found.variance.notnull().all()
    line = vk.Empirical(torch.tensor([-1.0, 1.0]))
    exact = vk.EmpiricalScore(line, PROCESS)
    members = [FunctionScore(lambda x, t, k=k: exact(x, t) + 0.1 * k * x / t**2, PROCESS, (1,)) for k in (0, 1)]
    thin = agreement(vk.Checkpoints(members), line, times=[0.5], images=20)
    assert thin.dataset.rank_coordinates.isnull().all()  # one coordinate has no order
    assert thin.dataset["rank"].sel(place="path").notnull().all()


def test_verdicts_are_holms():
    import xarray

    rows = [
        spearman(x, y) for x, y in ((normal(40), (normal(40) + w * normal(40, seed=2)).exp()) for w in (0.5, 1.5, 3, 9))
    ]
    rows.append(spearman(normal(40), 100 - normal(40)))
    ends = {f"rank_{e}": (("place", "t"), [[getattr(r, e) for r in rows]]) for e in ("low", "high")}
    ds = xarray.Dataset({**ends, "target": (("place", "t"), [[1.0, 1.0, 1.0, 1.0, 1.0]])})
    z = [1.96 * (math.atanh(r.low) + math.atanh(r.high)) / (math.atanh(r.high) - math.atanh(r.low)) for r in rows]
    p = [math.erfc(abs(v) / math.sqrt(2)) for v in z]
    order, expected = np.argsort(p), np.zeros(5)
    for k, i in enumerate(order):
        if p[i] * (5 - k) > 0.05:
            break
        expected[i] = np.sign(z[i])
    assert _verdicts(ds)[0] == expected.tolist()
    assert expected[0] == 1
    assert expected[4] == -1
    ds["target"][:] = 0
    assert np.isnan(_verdicts(ds)).all()


# --- samples --------------------------------------------------------------------------------------------------------


def test_the_same_samples_are_the_same():
    data, x = training(), normal(20, *SHAPE).float()
    found = same_noise(x.expand(3, *x.shape), data)
    assert found.ratio.value == found.ratio.high == 0
    assert found.correlation.value == pytest.approx(1)
    assert found.nearest.value == 1
    assert found.nearest.low < 1
    assert set(found.by_pair) == {(0, 1), (0, 2), (1, 2)}
    assert "same nearest" in describe(found)
    both = agreement(shifted(data, normal(3, *SHAPE)), data, times=[1.0], images=10, samples=x.expand(3, *x.shape))
    assert both.same == found
    assert describe(found) in describe(both)


def test_unrelated_samples_have_ratio_one_and_errors_are_right():
    data, values, inside = training(), [], 0
    for k in range(300):
        found = same_noise(normal(2, 30, *SHAPE, seed=k), data)
        values.append((found.ratio.value, found.ratio.se))
        inside += found.ratio.low <= 1 <= found.ratio.high
    values = np.array(values)
    assert abs(values[:, 0].mean() - 1) < 4 * values[:, 0].std() / math.sqrt(300)
    assert values[:, 1].mean() == pytest.approx(values[:, 0].std(), rel=0.15)
    assert 0.92 <= inside / 300 <= 0.99


def test_same_noise_by_hand():
    data = training()
    common = normal(1, 9, *SHAPE, seed=4)
    x = common + 0.5 * normal(2, 9, *SHAPE)
    found = same_noise(x, data)
    a, b = x.flatten(2).numpy()
    table = np.linalg.norm(a[:, None] - b[None], axis=-1)
    off = table[~np.eye(9, dtype=bool)].mean()
    assert found.ratio.value == pytest.approx(np.diag(table).mean() / off)
    less = []
    for k in range(9):
        part = np.delete(np.delete(table, k, 0), k, 1)
        less.append(np.diag(part).mean() / part[~np.eye(8, dtype=bool)].mean())
    assert found.ratio.se == pytest.approx(math.sqrt(8 * np.var(less)))
    a, b = a - a.mean(0), b - b.mean(0)
    cosine = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    assert found.correlation.value == pytest.approx(cosine.mean())
    points = data.rows(0, data.n).numpy()
    near = [np.linalg.norm(m[:, None] - points[None], axis=-1).argmin(1) for m in x.flatten(2).numpy()]
    assert found.nearest.value == pytest.approx((near[0] == near[1]).mean())


def test_drifting_brightness_is_no_agreement():
    """Samples that share nothing but a brightness that belongs to the start: near in pixels, apart without it."""
    data = training()
    light = 50 * normal(1, 30, 1, 1, 1, seed=7)
    x = normal(2, 30, *SHAPE) + light
    assert same_noise(x, data).ratio.high < 0.2
    assert 0.8 < same_noise(x, data).correlation.low < same_noise(x, data).correlation.high <= 1
    plain = same_noise(x, data, "standardised")
    assert plain.ratio.low < 1 < plain.ratio.high
    assert plain.correlation.low < 0 < plain.correlation.high
    assert plain.features == "standardised"
    assert "without brightness and contrast" in describe(plain)
    free = same_noise((x - light) * light.abs() + 3 * light, data, "standardised")
    assert free.ratio.value == pytest.approx(plain.ratio.value, rel=1e-3)


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([1.0], "must be a tensor"),
        (torch.zeros(2, 5, 3), "the data of"),
        (torch.zeros(1, 5, *SHAPE), "Two members"),
        (torch.full((2, 5, *SHAPE), NAN), "diverged"),
    ],
)
def test_samples_that_are_none(samples, words):
    with pytest.raises(InputError, match=words):
        same_noise(samples, training())
