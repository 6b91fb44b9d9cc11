"""Conventions of the exact score: types, shapes, times."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from draws import gen, normal
from reference import PROCESSES, answers, levels, stack
from torch import Tensor

import vkernel as vk


def weights_of(n: int, seed: int) -> Tensor:
    return 0.1 + torch.rand(n, generator=gen(seed), dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("d", [2, 40])
@pytest.mark.parametrize("t", [1e-3, 0.02, 0.1, 0.5])
def test_results_take_the_type_of_x_and_lose_nothing_before(dtype, d, t):
    """A result is the float64 answer at the same x, rounded once."""
    points = normal(30, d, seed=0) / math.sqrt(d)
    score = vk.EmpiricalScore(points, vk.VP())
    alpha, S = levels("vp", t)
    x = torch.cat([alpha * (points[:3] + math.sqrt(S) * normal(3, d, seed=1)), alpha * points[2:4].mean(0)[None]])
    x = x.to(dtype)
    wide = x.double()
    v = torch.ones_like(x)
    p, q, C, D = score.posterior(x, t), score.posterior(wide, t), score.covariance(x, t), score.covariance(wide, t)
    pairs = {
        "score": (score(x, t), score(wide, t)),
        "mean": (p.mean, q.mean),
        "logp": (p.logp, q.logp),
        "entropy": (p.entropy, q.entropy),
        "ess": (p.ess, q.ess),
        "cov trace": (p.cov.trace(), q.cov.trace()),
        "cov diag": (p.cov.diag(), q.cov.diag()),
        "trace": (C.trace(), D.trace()),
        "diag": (C.diag(), D.diag()),
        "product": (C @ v, D @ v.double()),
        "draw": (C.draw(3), D.draw(3)),
        "top": (p.top(2)[0], q.top(2)[0]),
    }
    unit = torch.finfo(dtype).eps
    for name, (got, want) in pairs.items():
        assert got.dtype == dtype, name
        assert not got.isnan().any(), name
        rounded = want.to(dtype)
        fits = rounded.isfinite()
        gap = (got.double() - want).abs()[fits]
        assert (gap <= 2 * unit * want.abs()[fits] + 4 * torch.finfo(dtype).smallest_normal).all(), name


@pytest.mark.parametrize("d", [2, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_anisotropic_results_lose_nothing_before_rounding(dtype, d):
    """x is whitened in working precision, not in that of x: a half-precision x is a point like any other."""
    points = normal(30, d, seed=0) / math.sqrt(d)
    score = vk.EmpiricalScore(
        points, vk.Anisotropic(vk.EDM(), 0.3 + torch.rand(d, generator=gen(2), dtype=torch.float64))
    )
    x = (points[:4] + 0.05 * normal(4, d, seed=1)).to(dtype)
    for t in (0.01, 0.5):
        want = score(x.double(), t)
        assert (score(x, t).double() - want).abs().max() <= 4 * torch.finfo(dtype).eps * want.abs().max()
        mean = score.posterior(x.double(), t).mean
        assert (score.posterior(x, t).mean.double() - mean).abs().max() <= 4 * torch.finfo(dtype).eps * mean.abs().max()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_integers_become_the_default_float(dtype):
    score = vk.EmpiricalScore(normal(5, 3, seed=0), vk.EDM())
    x = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    assert torch.equal(score(x, 1), score(x.float(), 1.0))
    assert score(x, 1).dtype == torch.float32
    assert score.covariance(x, 1).trace().dtype == score.posterior(x, 1).mean.dtype == torch.float32


@pytest.fixture
def default_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("default_float64")
@pytest.mark.parametrize("d", [2, 40])
def test_the_default_type_does_not_matter(d):
    points = normal(300, d, seed=0)
    score = vk.EmpiricalScore(vk.Empirical(points, weights_of(300, 1)), vk.EDM())
    for sigma in (0.1, 1.0, 6.0):
        x = points[:3] + sigma * normal(3, d, seed=2)
        truth = answers(points, weights_of(300, 1), x, "edm", sigma)
        torch.testing.assert_close(score.posterior(x, sigma).mean, stack(truth, "mean"), rtol=0, atol=1e-4)
        assert score(x.float(), sigma).dtype == torch.float32
        assert score.posterior(x, sigma).top(3)[1].shape == (3, 3)
    assert score(torch.ones(1, d, dtype=torch.long), 1.0).dtype == torch.float64


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_autocast_does_not_reach_the_engine(half):
    """A score that is called inside a network's autocast region keeps its own arithmetic."""
    points = normal(600, 48, seed=0)
    score = vk.EmpiricalScore(points, vk.EDM())
    for sigma in (0.3, 1.0, 4.0, 20.0):
        x = points[:4] + sigma * normal(4, 48, seed=1)
        s, C = score(x, sigma), score.covariance(x, sigma).trace()
        with torch.autocast("cpu", dtype=half):
            assert torch.equal(score(x, sigma), s)
            assert torch.equal(score.covariance(x, sigma).trace(), C)
            assert score.posterior(x, sigma).top(2)[1].shape == (4, 2)


def test_gradient_modes_and_layouts_do_not_matter():
    points = normal(50, 6, seed=0)
    score = vk.EmpiricalScore(points, vk.VP())
    x = normal(6, 4, seed=1).mT
    want = score(x.contiguous(), 0.2)
    assert not x.is_contiguous()
    assert torch.equal(score(x, 0.2), want)
    with torch.no_grad():
        assert torch.equal(score(x.clone().requires_grad_(), 0.2), want)
    with torch.inference_mode():
        assert torch.equal(score(x, 0.2), want)
        assert score.covariance(x, 0.2).draw(0).shape == (4, 6)
    posterior = score.posterior(x.clone().requires_grad_(), 0.2)
    assert not posterior.mean.requires_grad
    before = x.clone()
    score(x, 0.2)
    score.covariance(x, 0.2).trace()
    assert torch.equal(x, before)


@pytest.mark.parametrize("batch", [(), (1,), (5,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("shape", [(1,), (3,), (2, 4, 5)])
def test_shapes(batch, shape):
    data = vk.Empirical(normal(9, *shape, seed=0))
    score = vk.EmpiricalScore(data, vk.VP())
    x = normal(*batch, *shape, seed=1) if batch + shape else normal(1, seed=1)
    d = math.prod(shape)
    flat = vk.EmpiricalScore(data.rows(0, 9), vk.VP())(x.reshape(-1, d), 0.3)
    posterior, C = score.posterior(x, 0.3), score.covariance(x, 0.3)
    assert torch.equal(score(x, 0.3), flat.reshape(x.shape))
    for a in (posterior.mean, C.diag(), C @ x, C.draw(0), posterior.cov.diag(), posterior.cov @ x):
        assert a.shape == x.shape
    for a in (posterior.logp, posterior.entropy, posterior.ess, C.trace(), posterior.weight(torch.tensor(2))):
        assert a.shape == batch
    assert C.dense().shape == (*batch, d, d)
    assert posterior.sample(3, 0).shape == (3, *batch, *shape)
    assert [a.shape for a in posterior.top(2)] == [(*batch, 2)] * 2
    assert (C.batch, C.shape, C.dim) == (batch, shape, d)


def test_a_time_may_be_a_number_a_scalar_or_one_for_each_query():
    points = normal(9, 3, seed=0)
    score = vk.EmpiricalScore(points, vk.EDM())
    x = normal(2, 4, 3, seed=1)
    times = torch.tensor([[0.5, 1.0, 2.0, 4.0], [1.0, 1.0, 3.0, 0.1]], dtype=torch.float64)
    each = score(x, times)
    for i in range(2):
        for j in range(4):
            torch.testing.assert_close(each[i, j], score(x[i, j], float(times[i, j])))
    want = score(x, 1.0)
    for t in (
        1,
        torch.tensor(1),
        torch.tensor(1.0),
        torch.tensor([1.0]),
        torch.ones(4),
        torch.ones(2, 1),
        np.float64(1.0),
    ):
        torch.testing.assert_close(score(x, t), want)
    torch.testing.assert_close(score(x, times[0]), torch.stack([score(x[i], times[0]) for i in range(2)]))
    torch.testing.assert_close(score(x, times[:, :1])[1], score(x[1], times[1, 0]))
    C = score.covariance(x, times)
    torch.testing.assert_close(C.trace()[1, 2], score.covariance(x[1, 2], 3.0).trace())


@pytest.mark.parametrize("name", sorted(PROCESSES))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("d", [2, 40])
def test_the_ends_of_the_time_range_belong_to_it(name, dtype, d):
    """eps and T as a tensor of any precision: what rounding moved out of the range is in it."""
    process = PROCESSES[name]
    score = vk.EmpiricalScore(normal(9, d, seed=0), process)
    x = normal(3, d, seed=1).to(dtype)
    for end in (process.eps, process.T):
        for t in (torch.tensor(end, dtype=dtype), torch.full((3,), end, dtype=dtype), end):
            assert score(x.double(), t).isfinite().all()
            assert score.covariance(x.double(), t).trace().isfinite().all()


def test_scores_print_what_they_are():
    text = repr(vk.EmpiricalScore(vk.data.triple(), vk.VP()))
    assert "triple" in text
    assert "VP" in text
