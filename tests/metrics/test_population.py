"""Distances to the population: closed forms, the decomposition, and estimates that do not depend on M or N."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.errors import InputError
from vkernel.core.estimate import median
from vkernel.metrics import generalization


def uniform(n: int, seed: int = 0, d: int = 1) -> Tensor:
    return torch.rand(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 1


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_energy_of_models_with_one_atom_each() -> None:
    # D(δ_z, U(-1, 1)) = 2 E|z - Y| - E|Y - Y'| = 1 + z² - 2/3; between members E|X - X'| = mean |z - z'|
    z = 0.8 * uniform(12, 1)[:, 0]
    found = generalization(z[:, None, None].expand(12, 40, 1), uniform(100_000), torch.tensor([[-0.5], [0.5]]))
    pairs = (z[:, None] - z).abs().sum() / (12 * 11)
    torch.testing.assert_close(found.each[0], 1 / 3 + z**2, atol=4e-3, rtol=0)
    assert found.pooled.value == pytest.approx(float(1 / 3 + (z**2).mean() - pairs), abs=4e-3)
    assert found.spread.value == pytest.approx(float(pairs), abs=1e-12)
    assert found.train is not None
    assert found.train.value == pytest.approx(1 + 0.25 - 0.5 - 2 / 3, abs=4e-3)  # atoms at ±½: E|X - X'| = ½


@pytest.mark.parametrize("kind", ["energy", "mmd", "wasserstein"])
@pytest.mark.parametrize("d", [1, 2])
def test_single_is_pooled_and_spread(kind: str, d: int) -> None:
    x = normal(5, 60, d) + normal(5, 1, d, seed=1)
    found = generalization(x, normal(400, d, seed=2), kind=kind)
    assert found.single.value == pytest.approx(found.pooled.value + found.spread.value, rel=1e-9)
    several = generalization([x, x + 1, x - 1], normal(400, d, seed=2), kind=kind)
    assert several.each.shape == (3, 5)
    assert several.single.value == pytest.approx(several.pooled.value + several.spread.value, rel=1e-9)


@pytest.mark.parametrize("kind", ["energy", "mmd"])
def test_estimates_are_unbiased_whatever_the_numbers(kind: str) -> None:
    # members are N(a_m, 1) with a_m ~ N(0, 1): q̄ = N(0, 2). Members of a run share their
    # starts. Few members of few samples agree with many of many.
    truth = normal(20_000, 1, seed=5)

    def mean(M: int, N: int, repeats: int) -> Tensor:
        runs = [normal(N, 1, seed=100 + k) + normal(M, 1, 1, seed=900 + k) for k in range(repeats)]
        found = generalization(runs, truth[: 2 * N + 600], kind=kind)
        both = torch.stack([found.each.mean(1), found.pools], 1)
        one = generalization(runs[0], truth[: 2 * N + 600], kind=kind)
        assert both[0].tolist() == pytest.approx([one.single.value, one.pooled.value], rel=1e-9)
        return both

    few, many = mean(4, 5, 400), mean(30, 50, 40)
    gap = (few.mean(0) - many.mean(0)) / (few.var(0) / 400 + many.var(0) / 40).sqrt()
    assert bool((gap.abs() < 4).all()), gap


def test_energy_of_normal_laws_in_one_dimension() -> None:
    # 2 E|X - Y| - E|X - X'| - E|Y - Y'| with X ~ N(0, 2), Y ~ N(0, 1): √(2/π) (2√3 - 2 - √2)
    x = normal(400, 200, 1, seed=3) + normal(400, 1, 1, seed=4)
    found = generalization(x, normal(50_000, 1, seed=5))
    exact = math.sqrt(2 / math.pi) * (2 * math.sqrt(3) - 2 - math.sqrt(2))
    assert abs(found.pooled.value - exact) < 4 * found.pooled.se + 3e-3
    assert found.pooled.se < 0.02


def test_even_starts_count_all_pairs() -> None:
    # the mid-quantiles of N(0, 1), moved by ±a: D(N(a, 1), N(0, 1)) and D(q̄, p) from Φ and φ
    a, z = 0.7, rng.quasi_normals(50, 1, 0)

    def mean(shift: float) -> float:  # E|X - Y|, X - Y ~ N(shift, 2)
        u = shift / math.sqrt(2)
        return math.sqrt(2) * (u * math.erf(u / math.sqrt(2)) + math.sqrt(2 / math.pi) * math.exp(-u * u / 2))

    x = torch.stack([z + a, z - a, z + a, z - a])
    truth = rng.quasi_normals(20_000, 1, 0)[torch.randperm(20_000, generator=torch.Generator().manual_seed(0))]
    found = generalization(x, truth, even=True)
    single, pairs = 2 * mean(a) - 2 * mean(0), (mean(0) + 2 * mean(2 * a)) / 3
    assert found.single.value == pytest.approx(single, abs=2e-3)
    assert found.spread.value == pytest.approx(pairs - mean(0), abs=2e-3)
    assert abs(generalization(x, truth).single.value - single) > 0.01  # pairs of different starts: off by E|X - X'| / N


def test_members_that_diverged_leave_the_others() -> None:
    x = normal(2, 5, 60, 1)
    x[1, 3] = math.nan
    with pytest.warns(UserWarning, match="left out"):
        found = generalization(list(x), normal(400, 1, seed=2), skip_diverged=True)
    assert found.each.isnan().sum() == 1
    alone = generalization(x[1, [0, 1, 2, 4]], normal(400, 1, seed=2))
    assert found.pools[1] == pytest.approx(alone.pooled.value, rel=1e-12)
    assert found.each[1].nanmean().item() == pytest.approx(alone.single.value, rel=1e-12)


@pytest.mark.parametrize("kind", ["energy", "wasserstein"])
def test_the_error_of_the_pooled_law_covers(kind: str) -> None:
    # the mean of many ensembles of one law is within the intervals of 95 % of them
    runs = [
        generalization(normal(16, 48, 1, seed=k) + normal(16, 1, 1, seed=10_000 + k), uniform(400), kind=kind)
        for k in range(80)
    ]
    exact = sum(run.pooled.value for run in runs) / len(runs)
    assert 0.85 < sum(run.pooled.low < exact < run.pooled.high for run in runs) / len(runs) <= 1


def test_wasserstein_on_the_line_is_the_shift() -> None:
    found = generalization(normal(4, 1000, 1, seed=1) + 3, normal(100_000, 1), kind="wasserstein")
    assert found.single.value == pytest.approx(3, abs=0.1)
    assert found.fresh.value < 0.1


def test_the_pooled_sample_takes_each_start_once() -> None:
    # starts are -1, 0, 1, …; member m adds nothing: pooled and single are then the same points
    starts = torch.linspace(-1, 1, 30, dtype=torch.float64)[:, None]
    found = generalization(starts.expand(6, 30, 1), uniform(3000), kind="wasserstein")
    assert found.spread.value == pytest.approx(0, abs=1e-12)


def test_refusals() -> None:
    x, y = normal(4, 10, 2), normal(50, 2)
    with pytest.raises(InputError, match="3 members"):
        generalization(x[:2], y)
    with pytest.raises(InputError, match="2 × 10 draws"):
        generalization(x, y[:15])
    with pytest.raises(InputError, match="2 ensembles but 1 training"):
        generalization([x, x], y, [y])
    with pytest.raises(InputError, match="coordinates"):
        generalization(x, y[:, :1])
    with pytest.raises(InputError, match="kind"):
        generalization(x, y, kind="ks")


def test_median_covers() -> None:
    hits = 0
    for k in range(400):
        found = median(normal(25, seed=k).exp())
        hits += found.low <= 1 <= found.high
    assert 0.93 < hits / 400 <= 1
    assert median(torch.tensor([1.0, 2.0, 3.0])).low == -math.inf  # too few for an interval
