"""One battery for all methods of the engine: everything a posterior returns is that of a float64 table of all weights.

The methods are those of ``tests/support/engines.py``: the reference path at once and in chunks, the pruned path, two
shards, and the GPU path (its torch steps on a CPU).
"""

from __future__ import annotations

import pytest
import torch
from draws import gen, normal
from engines import METHODS, brute_force, evaluate, score_by
from geometries import CASES, STAGES, mixed_queries, spectrum, unequal
from reference import stages
from torch import Tensor

import vkernel as vk

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(
    method: str,
    points: Tensor,
    weights: Tensor | None,
    x: Tensor,
    sigma: Tensor | float,
    tol: float = 1e-5,
    entropy: float = 1e-4,
) -> None:
    """Compare all results of a method with brute force; ``tol`` of the mean is in units of the data's spread."""
    device = DEVICE if method == "gpu" else "cpu"
    data = vk.Empirical(points, weights).to(device)
    level = sigma.to(device) if isinstance(sigma, Tensor) else sigma
    got = {name: a.cpu() for name, a in evaluate(method, data, vk.EDM(eps=1e-4), x.to(device), level).items()}
    want, r = brute_force(points, weights, x, sigma)
    assert all(got[name].shape == want[name].shape and got[name].isfinite().all() for name in want)
    spread, d = max(data.spread, 1e-3), x.shape[1]
    var = torch.as_tensor(sigma, dtype=torch.float64).square().expand(len(x))
    size = normal(*x.shape, seed=12).norm(dim=1), normal(*x.shape, seed=13).norm(dim=1)
    trace = want["trace"]
    slack = 1e-4 * trace + 1e-7 * d * var  # relative, or of the noise that C is compared with
    for name in ("mean", "denoise"):
        assert ((got[name] - want[name]).norm(dim=1) <= tol * spread).all(), name
    assert ((got["score"] - want["score"]).norm(dim=1) * var <= tol * spread).all()
    torch.testing.assert_close(got["logp"], want["logp"], rtol=1e-9, atol=1e-5)
    torch.testing.assert_close(got["entropy"], want["entropy"], rtol=entropy, atol=1e-6)
    torch.testing.assert_close(got["ess"], want["ess"], rtol=1e-5, atol=0)
    assert ((got["trace"] - trace).abs() <= slack).all()
    assert ((got["C"] - want["C"]).abs() * var**2 <= slack).all()
    assert ((got["diag"] - want["diag"]).abs().sum(-1) <= slack).all()
    assert ((got["product"] - want["product"]).norm(dim=1) <= slack * size[0]).all()
    assert ((got["third"] - want["third"]).norm(dim=1) <= slack * spread * size[0] * size[1]).all()
    # A draw is a sum with weights sqrt(r_i): the dropped 1e-7 of the weight is 3e-4 of a draw.
    assert ((got["draw"] - want["draw"]).norm(dim=1) <= 1e-3 * trace.sqrt() + (1e-6 * d * var).sqrt()).all()
    torch.testing.assert_close(got["weight"], want["weight"], rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(got["top"], want["top"], rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(r.gather(1, got["top index"]), want["top"], rtol=1e-4, atol=1e-9)
    assert all(len(set(row)) == len(row) for row in got["top index"].tolist())
    # A uniform within 1e-5 of a step may fall on either side.
    assert (got["indices"] == want["indices"]).double().mean() > 0.998


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("method", METHODS)
def test_every_result_is_that_of_brute_force(method, name, weighted):
    make, sigma = CASES[name]
    points = make()
    check(method, points, unequal(len(points)) if weighted else None, mixed_queries(points, sigma), sigma)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("stored", [torch.float32, torch.float64])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("method", METHODS)
def test_each_stage_agrees_with_brute_force(method, stage, stored, weighted):
    make, sigma = STAGES[stage]
    points = make().to(stored)
    weights = None
    if weighted:
        weights = torch.rand(len(points), generator=gen(7), dtype=torch.float64)
        weights[::5] = 0
    x = points[1:5].double() + sigma * normal(4, points.shape[1], seed=2)
    x[0] = (points[1].double() + points[2].double()) / 2
    if method == "dense":
        assert stages(score_by("dense", vk.Empirical(points, weights), vk.EDM()), x, sigma) == {stage}
    fine = stage != "float32" and method != "gpu"
    check(method, points, weights, x, sigma, 1e-9 if fine else 1e-5, entropy=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_every_noise_level_in_one_batch(method):
    points, t = spectrum(), torch.logspace(-3, 1, 40, dtype=torch.float64)
    check(method, points, None, points[:40] + t[:, None] * normal(40, 160, seed=1), t)


@pytest.mark.parametrize("process", [vk.VP(), vk.FlowMatching(), vk.Anisotropic(vk.VP(), torch.rand(160) + 0.5)])
@pytest.mark.parametrize("method", ["chunks", "pruned", "gpu"])
def test_other_processes(method, process):
    points = spectrum()
    device = DEVICE if method == "gpu" else "cpu"
    dense, other = (score_by(m, vk.Empirical(points).to(device), process) for m in ("dense", method))
    for t in (0.02, 0.1, 0.9):
        x = process.perturb(points[:20], torch.full((20,), t), generator=3).to(device)
        a, b = dense.posterior(x, t), other.posterior(x, t)
        assert (a.mean - b.mean).norm(dim=1).max() < 1e-5 * dense.data.spread
        torch.testing.assert_close(a.cov.trace(), b.cov.trace(), rtol=2e-4, atol=1e-280)
        torch.testing.assert_close(a.logp, b.logp, rtol=1e-9, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", [1, 2, 65])
def test_few_points_twins_and_points_without_weight(method, n):
    points = normal(n, 40, seed=0)
    points[n // 2] = points[0]
    weights = torch.rand(n, generator=gen(1), dtype=torch.float64)
    weights[-1] = 0 if n > 2 else 1
    t = torch.tensor([0.01, 0.1, 0.5, 1.0, 2.0, 8.0, 60.0], dtype=torch.float64)
    x = points[torch.arange(7) % n] + t[:, None] * normal(7, 40, seed=2)
    check(method, points, weights, x, t)
