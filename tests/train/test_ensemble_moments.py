"""Moments and cumulants over members, against numpy and scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from ensembles import constant, places
from scipy import stats

from vkernel.core.covariance import Factored
from vkernel.core.errors import InputError

# -------------------- moments and cumulants


def test_mean_and_covariances_are_numpys(ens):
    x, x2, d = places(ens, 4), 0.5 * places(ens, 4), math.prod(ens.shape)
    one, two = (ens(a, t).reshape(5, 4, d).numpy() for a, t in ((x, 0.3), (x2, 0.6)))
    np.testing.assert_allclose(ens.mean(x, 0.3).reshape(4, d), one.mean(0), rtol=1e-10)
    cov, cross = ens.cov(x, 0.3), ens.cov(x, 0.3, x2, 0.6)
    for k in range(4):
        whole = np.cov(np.concatenate([one[:, k], two[:, k]], 1), rowvar=False)
        np.testing.assert_allclose(cov.dense()[k], whole[:d, :d], rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(cross.dense()[k], whole[:d, d:], rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(ens.cov(x, 0.3, x).dense(), cov.dense())
    every = ens.cov(x[:1], 0.3, x2, 0.6)  # one place with each of four
    torch.testing.assert_close(every.dense()[2], ens.cov(x[0], 0.3, x2[2], 0.6).dense(), rtol=1e-5, atol=1e-7)


def test_the_covariance_is_an_operator(ens):
    x = places(ens, 4)
    cov, v = ens.cov(x, 0.3), places(ens, 4).flip(0)
    assert isinstance(cov, Factored)
    dense = cov.dense()
    torch.testing.assert_close((cov @ v).flatten(1), (dense @ v.flatten(1)[..., None])[..., 0])
    torch.testing.assert_close(cov.trace(), dense.diagonal(dim1=-2, dim2=-1).sum(-1))
    torch.testing.assert_close(cov.diag().flatten(1), dense.diagonal(dim1=-2, dim2=-1))
    drawn = torch.stack([cov.draw(k).flatten(1) for k in range(800)])
    got = torch.einsum("kna,knb->nab", drawn, drawn) / 800
    variance = dense.diagonal(dim1=-2, dim2=-1)
    se = ((variance[:, :, None] * variance[:, None] + dense**2) / 800).sqrt()
    assert ((got - dense).abs() <= 5 * se + 1e-12).all()


@pytest.mark.parametrize("law", ["normal", "exponential"])
def test_cumulants_are_scipys(law):
    values = getattr(np.random.default_rng(0), f"standard_{law}")((40, 9))
    found = constant(torch.from_numpy(values)).cumulants(torch.zeros(2, 9, dtype=torch.float64), 0.3)
    for k in range(2):
        np.testing.assert_allclose(found.skewness.value[k], stats.skew(values, bias=False), rtol=1e-9)
        np.testing.assert_allclose(found.kurtosis.value[k], stats.kurtosis(values, bias=False), rtol=1e-9)
    off = values - values.mean(0)
    left, sizes, _ = np.linalg.svd(off)
    np.testing.assert_allclose(found.shares, (sizes**2 / (sizes**2).sum())[:3], rtol=1e-9)
    skew = stats.skew(left[:, :3], bias=False)
    np.testing.assert_allclose(found.joint_skewness.value.abs(), np.abs(skew), rtol=1e-7)
    np.testing.assert_allclose(found.joint_kurtosis.value, stats.kurtosis(left[:, :3], bias=False), rtol=1e-7)


def test_jackknife_by_leaving_one_out_by_hand():
    values = np.random.default_rng(1).standard_exponential((12, 4))
    found = constant(torch.from_numpy(values)).cumulants(torch.zeros(4, dtype=torch.float64), 0.3)
    for got, statistic in ((found.skewness, stats.skew), (found.kurtosis, stats.kurtosis)):
        others = np.stack([statistic(np.delete(values, k, 0), bias=False) for k in range(12)])
        np.testing.assert_allclose(got.se, np.sqrt(11 / 12 * ((others - others.mean(0)) ** 2).sum(0)), rtol=1e-8)
        np.testing.assert_allclose(got.high - got.value, stats.t.ppf(0.975, 11) * got.se.numpy(), rtol=2e-3)


@pytest.mark.parametrize("law", ["normal", "exponential"])
def test_errors_of_cumulants_are_of_the_right_size(law):
    """400 repetitions at once, as coordinates; the exponential law has skewness 2 and excess kurtosis 6."""
    values = getattr(np.random.default_rng(2), f"standard_{law}")((150, 400))
    found = constant(torch.from_numpy(values)).cumulants(torch.zeros(400, dtype=torch.float64), 0.3)
    for got, true in ((found.skewness, 2.0), (found.kurtosis, 6.0)):
        told, seen = float(got.se.mean()), float(got.value.std())
        assert 0.6 < told / seen < 1.3
        if law == "normal":
            assert abs(float(got.value.mean())) < 4 * seen / 20
            inside = (got.low < 0) & (got.high > 0)
            assert inside.double().mean() > 0.88
        else:
            assert abs(float(got.value.mean()) - true) < 0.4 * true  # few members see the tail
            assert (got.value > got.se).double().mean() > 0.9


def test_where_nothing_varies_cumulants_are_zero():
    values = torch.ones(8, 3, dtype=torch.float64)
    values[:, 1] = torch.arange(8)
    found = constant(values).cumulants(torch.zeros(3, dtype=torch.float64), 0.3)
    for got in (found.skewness, found.kurtosis):
        assert got.value[[0, 2]].tolist() == [0.0, 0.0]
        assert got.se.isfinite().all()
    with pytest.raises(InputError, match="five"):
        constant(values[:4]).cumulants(torch.zeros(3, dtype=torch.float64), 0.3)
