"""Loaded checkpoints as one ensemble: moments by numpy, components of variance, refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draws import normal
from function_score import FunctionScore
from hypothesis import given, settings, strategies as st
from networks28 import C
from torch import Tensor

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.sample import Groups

PROCESS = vk.EDM(T=5.0)
SHAPE = (1, 2, 4)


def model(function: Any, process: vk.Process = PROCESS, shape: tuple[int, ...] | None = None) -> FunctionScore:
    return FunctionScore(function, process, shape)


def flat(x: Tensor, t: Any) -> Tensor:
    return -x


def members(count: int) -> list[vk.Score]:
    """Return the exact score of a training set plus an offset that depends on x, for each member."""
    law = vk.GaussianMixture(2 * normal(3, *SHAPE, seed=5), variance=0.5)
    exact = vk.EmpiricalScore(vk.Empirical(law.sample(40, 0)), PROCESS)
    return [model(lambda x, t, o=o: exact(x, t) + x.sin() * o.to(x), shape=SHAPE) for o in normal(count, *SHAPE)]


def test_moments_are_numpys():
    nets = vk.Checkpoints(members(5))
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
        vk.Checkpoints([model(lambda x, t: x * t.reshape(-1, 1, 1, 1), shape=SHAPE)] * 5).paired(own, times)[4],
        0.9 * own[4],
    )
    assert len(nets[1:4]) == 3
    assert "5 members" in repr(nets)


def test_members_of_an_ensemble_give_what_the_ensemble_gives():
    model = vk.models.Linear(vk.features.random_fourier(12, 2, vk.VP()), "noise")
    ens = vk.train_ensemble(model, vk.data.hexagon(), vk.VP(), members=6, draws=200, progress=False)
    nets, x = vk.Checkpoints([ens[m] for m in range(6)]), normal(4, 2).to(ens.dtype)
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
    groups = Groups.of(labels, m)
    parts = np.split(values.numpy(), np.cumsum(sizes)[:-1])
    grand, count = values.numpy().mean(0), len(sizes)
    b = sum(len(p) * (p.mean(0) - grand) ** 2 for p in parts) / (count - 1)
    w = sum(((p - p.mean(0)) ** 2).sum(0) for p in parts) / (m - count)
    n0 = (m - sum(n**2 for n in sizes) / m) / (count - 1)
    between, inside = groups.split(values)
    np.testing.assert_allclose(between, (b - w) / n0, atol=1e-12)
    np.testing.assert_allclose(inside, w, atol=1e-12)
    np.testing.assert_allclose(groups.factors(values).square().sum(0), between + inside, atol=1e-12)


@pytest.mark.parametrize("sizes", [(1, 2, 4), (2, 2), (3, 1)])
def test_components_are_unbiased(sizes):
    n, labels = 40_000, [g for g, k in enumerate(sizes) for _ in range(k)]
    group = math.sqrt(2) * normal(len(sizes), n)
    s = group[labels] + math.sqrt(0.5) * normal(len(labels), n, seed=1)
    groups = Groups.of(labels, len(labels))
    between, inside = groups.split(s)
    for found, truth in ((between, 2.0), (inside, 0.5), (groups.factors(s).square().sum(0), 2.5)):
        assert abs(float(found.mean()) - truth) < 4 * float(found.std()) / math.sqrt(n)
    error = groups.of_mean(s)
    assert abs(float(error.mean() - s.mean(0).var())) < 4 * float(error.std() + s.mean(0).square().std()) / math.sqrt(n)
    assert float(error.mean()) > 1.3 * float(s.var(0).mean()) / len(labels)  # groups count, not members


def test_groups_split_the_covariance():
    nets, x = vk.Checkpoints(members(5), ["a", "a", "b", "c", "c"]), normal(3, *SHAPE)
    between, inside = nets.split(x, 1.0)
    torch.testing.assert_close(nets.cov(x, 1.0).diag(), between + inside)
    assert nets[1:].groups.labels == (0, 1, 2, 2)
    assert "3 groups" in repr(nets)


def test_tables_in_float32_are_one_process():
    betas = torch.linspace(1e-4, 0.02, 1000).double()
    one, other = vk.DDPM(betas), vk.DDPM(betas.float().double() * (1 + 1e-7))
    assert one != other
    vk.Checkpoints([model(lambda x, t: -x, one), model(lambda x, t: -x, other)])


@pytest.mark.parametrize(
    ("given", "groups", "words"),
    [
        ([model(flat)], None, "two checkpoints or more"),
        (None, None, "two checkpoints or more"),
        ([model(flat), flat], None, "Member 1"),
        ([model(flat), model(flat, vk.EDM(T=4))], None, "times run over"),
        ([model(flat, vk.VP()), model(flat, vk.VPSong())], None, "alpha at t"),
        ([vk.as_score(flat, PROCESS, range=(0, 1)), vk.as_score(flat, PROCESS, range=(-1, 1))], None, "pixel range"),
        ([model(flat, shape=(2,)), model(flat, shape=(3,))], None, "shape is"),
        ([model(flat)] * 3, ["a", "b"], "2 groups for 3"),
        ([model(flat)] * 3, ["a"] * 3, "two groups"),
        ([model(flat)] * 3, [1, 2, 3], "alone"),
    ],
)
def test_refusals(given, groups, words):
    with pytest.raises(InputError, match=words):
        vk.Checkpoints(given, groups)


def test_more_refusals():
    process = vk.DDPM.linear()
    nets = [vk.as_score(flat, process, time=time) for time in ("index", "fraction")]
    with pytest.raises(InputError, match="whole number"):
        vk.Checkpoints(nets)
    nets = vk.Checkpoints([model(flat), model(lambda x, t: x[:1])])
    with pytest.raises(InputError, match="member 1 returned shape"):
        nets(normal(3, 2), 1.0)
    with pytest.raises(InputError, match="one set of points"):
        nets.paired(normal(3, 2), 1.0)
    with pytest.raises(InputError, match="nothing to split"):
        nets.split(normal(1, 2), 1.0)
    with pytest.raises(InputError, match="Give x2"):
        vk.Checkpoints([model(flat)] * 2).cov(normal(1, 2), 1.0, t2=1.0)
    with pytest.raises(InputError, match="five"):
        vk.Checkpoints([model(flat)] * 4).cumulants(normal(1, 2), 1.0)


def test_networks_of_other_people_are_one_ensemble(models: Path):
    stated: dict[str, Any] = {"betas": "key:alpha_t", "time": "fraction:1000", "range": "-.5,.5", "strip": "gt."}
    nets = [vk.Checkpoint.from_weights(models / f"cnn28_mnist_{m}.pth", C, **stated, shape=(1, 28, 28)) for m in "abcd"]
    found = vk.Checkpoints(nets)(0.3 * normal(2, 1, 28, 28).float(), 300.0)
    assert found.shape == (4, 2, 1, 28, 28)
    assert float(found.var(0).mean()) > 0


def test_scores_of_checkpoints_have_derivatives():
    """The likelihood of a member, and of the mean score, needs the derivative with respect to x."""
    nets = vk.Checkpoints([vk.as_score(lambda x, t, k=k: -k * x, PROCESS, (2,)) for k in (1.0, 3.0)])
    torch.testing.assert_close(nets.mean_score.divergence(torch.ones(3, 2), 0.5), torch.full((3,), -4.0))
    x_T = torch.ones(3, 2, dtype=torch.float64)
    found = nets.sample(x_T=x_T, steps=5, save="logp")
    for m in range(2):
        torch.testing.assert_close(found.logp[m], vk.sample.pf_ode(nets[m], x_T, steps=5, save="logp").logp)
