"""Ensembles of checkpoints: moments by numpy, known components, calibration of ranks, refusals."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draws import normal
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr
from torch import Tensor

import vkernel as vk
from vkernel.adapters.checkpoints import Checkpoints, Design, same_noise
from vkernel.core.errors import InputError
from vkernel.reports.audit import Checkpoint
from vkernel.reports.audit.agreement import PLACES, agreement, rank, ratio, within
from vkernel.reports.audit.agreement import _ranks as standard_ranks
from vkernel.reports.audit.agreement import _verdicts as verdicts
from vkernel.score.mixture import GaussianMixture

PROCESS = vk.EDM(T=5.0)
SHAPE = (1, 2, 4)
NAN = math.nan


class Model:
    """A function with a process."""

    def __init__(self, score: Any, process: Any = PROCESS, **more: Any) -> None:
        self.score, self.process = score, process
        self.__dict__ |= more

    def __call__(self, x: Tensor, t: Any) -> Tensor:
        return self.score(x, t)


def training(n: int = 40, seed: int = 0) -> vk.Empirical:
    return vk.Empirical(GaussianMixture(2 * normal(3, *SHAPE, seed=5), variance=0.5).sample(n, seed))


def remembered(score: Any) -> Any:
    """The same, but members that ask at one place in turn are answered once."""
    last: list[Any] = [None, None, None]

    def call(x: Tensor, t: Any) -> Tensor:
        if last[0] is not x or last[1] != float(t):
            last[:] = x, float(t), score(x, t)
        return last[2]

    return call


def shifted(data: vk.Empirical, offsets: Tensor, gain: Any = lambda x: 1.0) -> Checkpoints:
    """Members s + gain(x) · offset: V is known everywhere."""
    exact = remembered(vk.EmpiricalScore(data, PROCESS))
    return Checkpoints([Model(lambda x, t, o=o: exact(x, t) + gain(x) * o.to(x)) for o in offsets])


def faithful(data: vk.Empirical, members: int, strength: float = 0.3, seed: int = 0) -> Checkpoints:
    """Members whose covariance is strength² C(x, t) exactly: a Gaussian field Σ √r_i z_i (α/σ²)(y_i - m)."""
    exact, points = vk.EmpiricalScore(data, PROCESS), data.rows(0, data.n).double()

    def parts(x: Tensor, t: Any) -> tuple[Tensor, Tensor]:
        post = exact.posterior(x.double(), float(t))
        weight, index = post.top(data.n)
        away = points[index] - post.mean.flatten(1)[:, None]
        field = torch.zeros_like(away).scatter(1, index[..., None].expand(away.shape), weight.sqrt()[..., None] * away)
        return exact(x, t), strength / float(t) ** 2 * field  # of the process EDM, alpha is 1

    shared = remembered(parts)

    def member(z: Tensor) -> Model:
        def score(x: Tensor, t: Any) -> Tensor:
            s, field = shared(x, t)
            return s + torch.einsum("i,bid->bd", z, field).reshape(x.shape).to(x)

        return Model(score)

    return Checkpoints([member(z) for z in normal(members, data.n, seed=seed)])


def rough(x: Tensor) -> Tensor:
    """A number for each image that knows nothing of C."""
    number = 1.5 + (997 * x.double().flatten(1) @ normal(8, seed=9)).sin()
    return number.reshape(-1, 1, 1, 1).to(x)


# --- checkpoints ----------------------------------------------------------------------------------------------------


def test_moments_are_numpys():
    data = training()
    nets = shifted(data, normal(5, *SHAPE), rough)
    x, y = normal(6, *SHAPE, seed=1), normal(6, *SHAPE, seed=2)
    s, r = nets(x, 0.8), nets(y, 0.5)
    assert s.shape == (5, 6, *SHAPE)
    assert len(nets) == 5
    torch.testing.assert_close(s[3], nets[3](x, 0.8))
    torch.testing.assert_close(nets.mean(x, 0.8), s.mean(0))
    for k in range(6):
        a, b = (np.asarray(v[:, k].flatten(1)) for v in (s, r))
        np.testing.assert_allclose(nets.cov(x, 0.8).dense()[k], np.cov(a.T), atol=1e-12)
        both = np.cov(np.concatenate([a, b], 1).T)[:8, 8:]
        np.testing.assert_allclose(nets.cov(x, 0.8, y, 0.5).dense()[k], both, atol=1e-12)
    own = torch.stack([x + m for m in range(5)])
    paired = nets.paired(own, 0.8)
    torch.testing.assert_close(paired[2], nets[2](x + 2, 0.8))
    times = torch.linspace(0.3, 0.9, 5).double()[:, None].expand(5, 6)
    torch.testing.assert_close(
        Checkpoints([Model(lambda x, t: x * t.reshape(-1, 1, 1, 1), shape=SHAPE)] * 5).paired(own, times)[4],
        0.9 * own[4],
    )
    assert len(nets[1:4]) == 3
    assert "5 members" in repr(nets)


def test_members_of_an_ensemble_give_what_the_ensemble_gives():
    model = vk.models.Linear(vk.features.random_fourier(12, 2, vk.VP()), "noise")
    ens = vk.train_ensemble(model, vk.data.hexagon(), vk.VP(), members=6, draws=200, show=False)
    nets, x = Checkpoints([ens[m] for m in range(6)]), normal(4, 2).to(ens.dtype)
    torch.testing.assert_close(nets.mean(x, 0.3), ens.mean(x, 0.3), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(nets.cov(x, 0.3).dense(), ens.cov(x, 0.3).dense(), rtol=1e-4, atol=1e-4)
    one, other = nets.cumulants(x, 0.3), ens.cumulants(x, 0.3)
    torch.testing.assert_close(one.skewness.value, other.skewness.value, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(one.joint_kurtosis.se, other.joint_kurtosis.se, rtol=1e-3, atol=1e-3)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=5).filter(lambda n: max(n) > 1), st.integers(0, 99))
def test_the_split_by_hand(sizes, seed):
    labels = [f"run {g}" for g, n in enumerate(sizes) for _ in range(n)]
    values, m = normal(len(labels), 3, seed=seed), len(labels)
    design = Design.of(labels, m)
    parts = np.split(values.numpy(), np.cumsum(sizes)[:-1])
    grand, count = values.numpy().mean(0), len(sizes)
    b = sum(len(p) * (p.mean(0) - grand) ** 2 for p in parts) / (count - 1)
    w = sum(((p - p.mean(0)) ** 2).sum(0) for p in parts) / (m - count)
    n0 = (m - sum(n**2 for n in sizes) / m) / (count - 1)
    between, inside = design.split(values)
    np.testing.assert_allclose(between, (b - w) / n0, atol=1e-12)
    np.testing.assert_allclose(inside, w, atol=1e-12)
    np.testing.assert_allclose(design.factors(values).square().sum(0), between + inside, atol=1e-12)


@pytest.mark.parametrize("sizes", [(1, 2, 4), (2, 2), (3, 1)])
def test_components_are_unbiased(sizes):
    n, labels = 40_000, [g for g, k in enumerate(sizes) for _ in range(k)]
    group = math.sqrt(2) * normal(len(sizes), n)
    s = group[labels] + math.sqrt(0.5) * normal(len(labels), n, seed=1)
    design = Design.of(labels, len(labels))
    between, inside = design.split(s)
    for found, truth in ((between, 2.0), (inside, 0.5), (design.factors(s).square().sum(0), 2.5)):
        assert abs(float(found.mean()) - truth) < 4 * float(found.std()) / math.sqrt(n)
    error = design.of_mean(s)
    assert abs(float(error.mean() - s.mean(0).var())) < 4 * float(error.std() + s.mean(0).square().std()) / math.sqrt(n)
    assert float(error.mean()) > 1.3 * float(s.var(0).mean()) / len(labels)  # groups count, not members


def test_groups_in_the_verbs():
    data = training()
    exact = vk.EmpiricalScore(data, PROCESS)
    members = [Model(lambda x, t, o=o: exact(x, t) + o.to(x)) for o in normal(5, *SHAPE)]
    nets, x = Checkpoints(members, ["a", "a", "b", "c", "c"]), normal(3, *SHAPE)
    between, inside = nets.split(x, 1.0)
    torch.testing.assert_close(nets.cov(x, 1.0).diag(), between + inside)
    assert nets[1:].design.labels == (0, 1, 2, 2)
    assert "3 groups" in repr(nets)
    found = agreement(nets, data, times=[1.0], images=12)
    share = found.dataset.between_groups.sel(place="data").item()
    assert share == pytest.approx(float(between.sum() / (between + inside).sum()), rel=1e-4)
    assert found.dataset.within_groups.sel(place="path").item() == pytest.approx(1 - share, rel=1e-4)
    assert any("between groups" in w for w in found.words)
    assert "kurtosis" not in found.dataset


def test_tables_in_float32_are_one_process():
    betas = torch.linspace(1e-4, 0.02, 1000).double()
    one, other = vk.DDPM(betas), vk.DDPM(betas.float().double() * (1 + 1e-7))
    assert one != other
    Checkpoints([Model(lambda x, t: -x, one), Model(lambda x, t: -x, other)])


def flat(x: Tensor, t: Any) -> Tensor:
    return -x


@pytest.mark.parametrize(
    ("members", "groups", "words"),
    [
        ([Model(flat)], None, "two checkpoints or more"),
        (None, None, "two checkpoints or more"),
        ([Model(flat), flat], None, "Member 1"),
        ([Model(flat), Model(flat, vk.EDM(T=4))], None, "times run over"),
        ([Model(flat, vk.VP()), Model(flat, vk.VPSong())], None, "alpha at t"),
        ([Model(flat, range=(0, 1)), Model(flat, range=(-1, 1))], None, "pixel range"),
        ([Model(flat, shape=(2,)), Model(flat, shape=(3,))], None, "shape is"),
        ([Model(flat)] * 3, ["a", "b"], "2 groups for 3"),
        ([Model(flat)] * 3, ["a"] * 3, "two groups"),
        ([Model(flat)] * 3, [1, 2, 3], "alone"),
    ],
)
def test_refusals(members, groups, words):
    with pytest.raises(InputError, match=words):
        Checkpoints(members, groups)


def test_more_refusals():
    process = vk.DDPM.linear()
    told = [Checkpoint.from_callable(lambda x, t: x, process, time=time) for time in ("index", "fraction")]
    with pytest.raises(InputError, match="whole number"):
        Checkpoints(told)
    nets = Checkpoints([Model(flat), Model(lambda x, t: x[:1])])
    with pytest.raises(InputError, match="member 1 must return"):
        nets(normal(3, 2), 1.0)
    with pytest.raises(InputError, match="one set of places"):
        nets.paired(normal(3, 2), 1.0)
    with pytest.raises(InputError, match="nothing to split"):
        nets.split(normal(1, 2), 1.0)
    with pytest.raises(InputError, match="Give x2"):
        Checkpoints([Model(flat)] * 2).cov(normal(1, 2), 1.0, t2=1.0)
    with pytest.raises(InputError, match="five"):
        Checkpoints([Model(flat)] * 4).cumulants(normal(1, 2), 1.0)
    data = training()
    for wrong, words in (
        ({"nets": Model(flat)}, "needs Checkpoints"),
        ({"data": vk.Empirical(normal(4, 3))}, "take"),
        ({"data": vk.Empirical(torch.ones(4, *SHAPE)), "times": [1.0]}, "equal"),
        ({"images": 3}, "images"),
        ({"times": []}, "empty"),
        ({"nets": Checkpoints([Model(flat), Model(lambda x, t: x * NAN)])}, "member 1 returned NaN"),
        ({"samples": normal(3, 5, *SHAPE)}, "each of 2"),
    ):
        given = {"nets": Checkpoints([Model(flat, shape=SHAPE)] * 2), "data": data} | wrong
        with pytest.raises(InputError, match=words):
            agreement(given.pop("nets"), given.pop("data"), **given)


def test_the_path_is_the_flow_of_the_mean():
    data = training()
    nets = shifted(data, torch.zeros(2, *SHAPE))
    start = PROCESS.prior((6, *SHAPE), generator=torch.Generator().manual_seed(0)).double()
    *_, last = nets.path(start, torch.tensor([PROCESS.eps, 1.0]).double())
    fine = vk.sample.pf_ode(vk.EmpiricalScore(data, PROCESS), PROCESS, start, steps=2000, method="exponential")
    assert float((last - fine).flatten(1).norm(dim=1).median()) < 0.05 * data.spread


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
        nets = Checkpoints(shifted(data, offsets).members, [0, 0, 0, 1])
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
    assert f"{len(found.follows)} of {len(found.follows)} levels" in " ".join(found.words)
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
    assert any("need four" in w for w in three.words)


def test_places_and_chunks():
    data, seen = training(25), []
    nets = shifted(data, normal(3, *SHAPE), rough)
    one, other = (agreement(nets, data, times=[0.5, 2.0], images=25, draws=2, batch=b).dataset for b in (128, 7))
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=1e-3, atol=1e-5)
    agreement(nets, data, times=[0.5, 2.0], images=10, step=lambda label, done=1.0: seen.append(label))
    assert len(seen) == 6
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
    found = agreement(Checkpoints([vk.EmpiricalScore(data, PROCESS)] * 4), data, times=[0.02, 1.0], images=15)
    assert (found.dataset.variance == 0).all()
    assert (abs(found.dataset.bias) < 1e-12).all()
    assert found.dataset["rank"].isnull().all()
    assert found.follows == {}


def test_stored_integers_and_duplicates_and_few_points():
    levels = torch.randint(0, 255, (12, 1, 3, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    process = vk.DDPM.linear()
    data = vk.Empirical(torch.cat([levels, levels[:4]]), scale=(-1, 1))
    nets = [Checkpoint.from_callable(lambda x, t, k=k: 0.1 * k * x, process, shape=(1, 3, 3)) for k in range(3)]
    found = agreement(Checkpoints(nets), data, images=16, times=[100, 300.4]).dataset
    assert found.t.values.tolist() == [100, 300]
    assert found.variance.notnull().all()
    line = vk.Empirical(torch.tensor([-1.0, 1.0]))
    exact = vk.EmpiricalScore(line, PROCESS)
    members = [Model(lambda x, t, k=k: exact(x, t) + 0.1 * k * x / t**2) for k in (0, 1)]
    thin = agreement(Checkpoints(members), line, times=[0.5], images=20)
    assert thin.dataset.rank_coordinates.isnull().all()  # one coordinate has no order
    assert thin.dataset["rank"].sel(place="path").notnull().all()


# --- ranks and ratios -----------------------------------------------------------------------------------------------


def test_rank_is_spearmans_and_covers():
    a, b = normal(50).exp(), normal(50, seed=1).exp().round()
    assert rank(a, b + 1).value == pytest.approx(spearmanr(a, b).statistic, abs=1e-6)
    inside = 0
    for k in range(1000):
        found = rank(normal(30, seed=k).exp(), normal(30, seed=5000 + k).exp())
        inside += found.low <= 0 <= found.high
    assert 0.935 <= inside / 1000 <= 0.975
    truth, inside = 6 / math.pi * math.asin(0.4), 0
    for k in range(600):
        x = normal(60, seed=k)
        found = rank(x, (0.8 * x + 0.6 * normal(60, seed=9000 + k)).exp())
        inside += found.low <= truth <= found.high
    assert 0.93 <= inside / 600 <= 0.98


def test_rank_at_the_ends():
    x = torch.arange(1.0, 12.0).double()
    found = rank(x, x.exp())
    assert found.value == pytest.approx(1)
    assert 0.5 < found.low < 1
    assert math.isnan(rank(x[:5], x[:5]).value)
    assert math.isnan(rank(torch.ones(20), torch.arange(20.0) + 1).value)
    assert math.isnan(rank(x, 1e-300 * x).value)


def fields(n: int, seed: int, profile: float) -> Tensor:
    """Positive images whose pixels depend on their neighbours, with a profile that all images share."""
    noise = torch.nn.functional.avg_pool2d(normal(n + 1, 1, 12, 12, seed=seed), 5, 1)[:, 0].flatten(1)
    return (5 * (noise[1:] + profile * noise[0])).exp()


@pytest.mark.parametrize("profile", [0.0, 1.5])
def test_ranks_over_coordinates_cover_zero(profile):
    own = specific = 0
    for k in range(400):
        v, c = (standard_ranks(fields(24, 2 * k + j, profile))[None] for j in (0, 1))
        a, b = within(v, c)
        own += a.low <= 0 <= a.high
        specific += b.low <= 0 <= b.high
    assert 0.925 <= specific / 400 <= 0.98
    assert 0.925 <= own / 400 <= 0.98 if profile == 0 else own / 400 < 0.5  # a common profile is no independence


def test_ranks_over_coordinates_by_hand():
    v, c = fields(6, 1, 0.5), fields(6, 2, 0.5) + fields(6, 1, 0.5)
    rho = np.array([[spearmanr(a, b).statistic for b in c] for a in v])
    own, specific = within(standard_ranks(v)[None], standard_ranks(c)[None])
    off = rho[~np.eye(6, dtype=bool)].mean()
    assert own.value == pytest.approx(np.diag(rho).mean(), abs=1e-5)
    assert specific.value == pytest.approx(np.diag(rho).mean() - off, abs=1e-5)
    left = []
    for k in range(6):
        part = np.delete(np.delete(rho, k, 0), k, 1)
        left.append(np.diag(part).mean() - part[~np.eye(5, dtype=bool)].mean())
    assert specific.se == pytest.approx(math.sqrt(5 * np.var(left)), rel=0.2)


def test_ratio_covers_and_has_no_end_where_the_denominator_may_vanish():
    inside = 0
    for k in range(600):
        a, b = normal(40, seed=k).abs() + 1, normal(40, seed=7000 + k).abs() + 0.2
        found = ratio(a, a + b)
        root = math.sqrt(2 / math.pi)
        inside += found.low <= (root + 1) / (2 * root + 1.2) <= found.high
    assert 0.93 <= inside / 600 <= 0.975
    heavy = ratio(torch.ones(20).double(), torch.cat([torch.ones(1), torch.zeros(19)]).double())
    assert heavy.value == pytest.approx(20)
    assert heavy.high == math.inf
    assert 0 < heavy.low < 20
    assert math.isnan(ratio(torch.ones(5), torch.zeros(5)).value)
    small = ratio(1e-200 * normal(30).abs(), 1e200 * normal(30).abs())
    assert 0 <= small.low <= small.value


def test_verdicts_are_holms():
    import xarray

    rows = [
        rank(x, y) for x, y in ((normal(40), (normal(40) + w * normal(40, seed=2)).exp()) for w in (0.5, 1.5, 3, 9))
    ]
    rows.append(rank(normal(40), 100 - normal(40)))
    ends = {f"rank_{e}": (("place", "t"), [[getattr(r, e) for r in rows]]) for e in ("low", "high")}
    ds = xarray.Dataset({**ends, "target": (("place", "t"), [[1.0, 1.0, 1.0, 1.0, 1.0]])})
    z = [1.96 * (math.atanh(r.low) + math.atanh(r.high)) / (math.atanh(r.high) - math.atanh(r.low)) for r in rows]
    p = [math.erfc(abs(v) / math.sqrt(2)) for v in z]
    order, expected = np.argsort(p), np.zeros(5)
    for k, i in enumerate(order):
        if p[i] * (5 - k) > 0.05:
            break
        expected[i] = np.sign(z[i])
    assert verdicts(ds)[0] == expected.tolist()
    assert expected[0] == 1
    assert expected[4] == -1
    ds["target"][:] = 0
    assert np.isnan(verdicts(ds)).all()


# --- samples --------------------------------------------------------------------------------------------------------


def test_the_same_samples_are_the_same():
    data, x = training(), normal(20, *SHAPE).float()
    found = same_noise(x.expand(3, *x.shape), data)
    assert found.ratio.value == found.ratio.high == 0
    assert found.correlation.value == pytest.approx(1)
    assert found.nearest.value == 1
    assert found.nearest.low < 1
    assert set(found.by_pair) == {(0, 1), (0, 2), (1, 2)}
    assert "same nearest" in found.words
    told = agreement(shifted(data, normal(3, *SHAPE)), data, times=[1.0], images=10, samples=x.expand(3, *x.shape))
    assert told.same is not None
    assert told.words[-1] == found.words


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


def test_networks_of_other_people_are_one_ensemble():
    folder = Path(os.environ.get("VKERNEL_MODELS", "absent"))
    if not (folder / "cnn28_mnist_a.pth").exists():
        pytest.skip("VKERNEL_MODELS does not name a folder that holds cnn28_mnist_a.pth")
    from networks28 import C

    told: dict[str, Any] = {"betas": "key:alpha_t", "time": "fraction:1000", "range": "-.5,.5", "strip": "gt."}
    nets = [Checkpoint.from_weights(folder / f"cnn28_mnist_{m}.pth", C, **told, shape=(1, 28, 28)) for m in "abcd"]
    found = Checkpoints(nets)(0.3 * normal(2, 1, 28, 28).float(), 300.0)
    assert found.shape == (4, 2, 1, 28, 28)
    assert float(found.var(0).mean()) > 0
