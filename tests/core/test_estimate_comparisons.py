"""Comparisons of two samples: rank correlations, ratios, AUC, shares and p values by hand and by scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from draws import normal
from scipy.stats import mannwhitneyu, spearmanr, ttest_ind
from torch import Tensor

from vkernel.core.estimate import (
    Estimate,
    auc,
    centred_ranks,
    crossing,
    difference_of_shares,
    exact_share,
    fieller_ratio,
    fisher_exact,
    holm,
    matched_correlation,
    ratio_of_sums,
    relative_change,
    spearman,
    twins,
    welch_p,
)


def test_pairs_differ_by_more_than_the_least_difference():
    a, b = torch.tensor([0.0, 0.5, 0.5, 0.5, 0.2]).double(), torch.tensor([0.004, 0.1, 0.495, 0.2, 0.5]).double()
    every, clear = twins(a, b), twins(a, b, least=0.01)
    assert (every.more.value, every.less.value) == pytest.approx((3 / 5, 2 / 5))
    assert (clear.more.value, clear.less.value) == pytest.approx((2 / 5, 1 / 5))
    assert (every.p, clear.p) == (1, 1)  # 3 of 5, 2 of 3
    assert (every.ratio, every.medians, every.difference) == (clear.ratio, clear.medians, clear.difference)
    several = twins(torch.stack([a, a + 0.3], 1), torch.stack([b, b], 1), least=0.01)
    assert several.more.value == pytest.approx(6 / 10)
    assert several.p == pytest.approx(2 * 6 / 2**5)  # 4 of 5: equal ones do not vote


def test_rank_is_spearmans_and_covers():
    a, b = normal(50).exp(), normal(50, seed=1).exp().round()
    assert spearman(a, b + 1).value == pytest.approx(spearmanr(a, b).statistic, abs=1e-6)
    inside = 0
    for k in range(1000):
        found = spearman(normal(30, seed=k).exp(), normal(30, seed=5000 + k).exp())
        inside += found.low <= 0 <= found.high
    assert 0.935 <= inside / 1000 <= 0.975
    truth, inside = 6 / math.pi * math.asin(0.4), 0
    for k in range(600):
        x = normal(60, seed=k)
        found = spearman(x, (0.8 * x + 0.6 * normal(60, seed=9000 + k)).exp())
        inside += found.low <= truth <= found.high
    assert 0.93 <= inside / 600 <= 0.98


def test_rank_at_the_ends():
    x = torch.arange(1.0, 12.0).double()
    found = spearman(x, x.exp())
    assert found.value == pytest.approx(1)
    assert 0.5 < found.low < 1
    assert math.isnan(spearman(x[:5], x[:5]).value)
    assert math.isnan(spearman(torch.ones(20), torch.arange(20.0) + 1).value)
    assert math.isnan(spearman(x, 1e-300 * x).value)


def fields(n: int, seed: int, profile: float) -> Tensor:
    """Positive images whose pixels depend on their neighbours, with a profile that all images share."""
    noise = torch.nn.functional.avg_pool2d(normal(n + 1, 1, 12, 12, seed=seed), 5, 1)[:, 0].flatten(1)
    return (5 * (noise[1:] + profile * noise[0])).exp()


@pytest.mark.parametrize("profile", [0.0, 1.5])
def test_ranks_over_coordinates_cover_zero(profile):
    own = specific = 0
    for k in range(400):
        v, c = (centred_ranks(fields(24, 2 * k + j, profile))[None] for j in (0, 1))
        a, b = matched_correlation(v, c)
        own += a.low <= 0 <= a.high
        specific += b.low <= 0 <= b.high
    assert 0.925 <= specific / 400 <= 0.98
    assert 0.925 <= own / 400 <= 0.98 if profile == 0 else own / 400 < 0.5  # a common profile is no independence


def test_ranks_over_coordinates_by_hand():
    v, c = fields(6, 1, 0.5), fields(6, 2, 0.5) + fields(6, 1, 0.5)
    rho = np.array([[spearmanr(a, b).statistic for b in c] for a in v])
    own, specific = matched_correlation(centred_ranks(v)[None], centred_ranks(c)[None])
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
        found = fieller_ratio(a, a + b)
        root = math.sqrt(2 / math.pi)
        inside += found.low <= (root + 1) / (2 * root + 1.2) <= found.high
    assert 0.93 <= inside / 600 <= 0.975
    heavy = fieller_ratio(torch.ones(20).double(), torch.cat([torch.ones(1), torch.zeros(19)]).double())
    assert heavy.value == pytest.approx(20)
    assert heavy.high == math.inf
    assert 0 < heavy.low < 20
    assert math.isnan(fieller_ratio(torch.ones(5), torch.zeros(5)).value)
    small = fieller_ratio(1e-200 * normal(30).abs(), 1e200 * normal(30).abs())
    assert 0 <= small.low <= small.value


def test_ratios_of_sums_of_skewed_pairs_are_covered():
    a, b = normal(9).square(), normal(9, seed=1).square()
    found = ratio_of_sums(a, b)
    kept = [torch.arange(9) != k for k in range(9)]
    logs = torch.stack([(a[k].sum() / b[k].sum()).log() for k in kept])
    se = math.sqrt(8 / 9 * float((logs - logs.mean()).square().sum()))
    assert (found.value, found.se) == pytest.approx((float(a.sum() / b.sum()), float(a.sum() / b.sum()) * se))
    inside = 0
    for seed in range(600):
        size = normal(24, seed=2 * seed).square()  # of both: a = s u, b = s u + 1 with E u = 1
        a = size * normal(24, seed=2 * seed + 1).square()
        found = ratio_of_sums(a, a + 1)
        inside += found.low <= 0.5 <= found.high
    assert 0.9 <= inside / 600 <= 0.97
    same = ratio_of_sums(a, a)
    assert (same.low, same.value, same.high) == pytest.approx((1, 1, 1))
    assert ratio_of_sums(0 * a, a).high == 0
    assert math.isnan(ratio_of_sums(a, 0 * a).value)
    assert math.isnan(ratio_of_sums(a[:1], a[:1]).value)
    one = ratio_of_sums(torch.eye(24)[0].double(), torch.ones(24).double())
    assert one.low < 1e-6  # one pair holds the sum
    assert one.high > 1


def test_auc_is_mann_and_whitneys():
    a, b = normal(40), normal(70, seed=1).round()
    a[:5] = b[:5]
    found = auc(a, b)
    test = mannwhitneyu(b, a)
    assert found.value == pytest.approx(test.statistic / (40 * 70), abs=1e-12)
    level = auc(torch.stack([a, a - 9]), torch.stack([b, b]))
    assert float(level.value[0]) == pytest.approx(found.value)
    assert float(level.value[1]) == 1
    assert float(level.se[1]) == 0
    assert 0.9 < float(level.low[1]) < 0.99  # the interval does not shrink to a point
    back = auc(b, a)
    assert (back.value, back.low, back.high) == pytest.approx((1 - found.value, 1 - found.high, 1 - found.low))


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_auc_errors_and_intervals_away_from_a_half(shift):
    train, test = normal(2000, 50), normal(2000, 30, seed=1) + shift
    truth = 0.5 * (1 + math.erf(shift / 2))
    found = auc(train, test)
    covered = ((found.low <= truth) & (truth <= found.high)).double().mean()
    assert 0.93 < float(covered) < 0.975
    assert float(found.se.mean()) == pytest.approx(float(found.value.std()), rel=0.06)


def test_newcombes_example():
    """Newcombe (1998), table II: 56/70 - 48/80, method 10."""
    found = difference_of_shares(Estimate.of_share(56, 70), Estimate.of_share(48, 80))
    assert found.value == pytest.approx(0.2)
    assert (found.low, found.high) == (pytest.approx(0.0524, abs=5e-5), pytest.approx(0.3339, abs=5e-5))


def test_shares_and_exceedances():
    """Clopper and Pearson's interval of 10 in 20 is .272 to .728; 2 or more of 3 beyond the largest of 4: 1/7."""
    found = exact_share(10, 20)
    assert (found.low, found.high) == (pytest.approx(0.2720, abs=1e-4), pytest.approx(0.7280, abs=1e-4))
    assert fisher_exact(0, 3, 0, 4) == 1
    assert fisher_exact(2, 3, 0, 4) == pytest.approx(3 / 7 * 2 / 6)  # the nearest two of seven are of the three
    assert fisher_exact(2, 3, 0, 4 + 1e-9) == pytest.approx(3 / 7 * 2 / 6)
    assert fisher_exact(0, 9, 1, 9) == pytest.approx(1)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_ranks_of_alike_points_have_fishers_chance(k):
    """The chance that two or more of 6 points lie nearer than the k-th nearest of 9, over random orders."""
    orders = torch.rand(20_000, 15, generator=torch.Generator().manual_seed(k)).argsort(1)
    radius = orders[:, 6:].sort(1).values[:, k - 1 : k]
    share = float(((orders[:, :6] < radius).sum(1) >= 2).double().mean())
    assert fisher_exact(2, 6, k - 1, 9) == pytest.approx(share, abs=5 * math.sqrt(0.25 / 20_000))


def test_holm_rejects_in_steps():
    p = torch.tensor([[0.001, 0.02], [math.nan, 0.9]])
    assert holm(p).tolist() == [[True, True], [False, False]]
    assert holm(torch.tensor([0.03, 0.04])).tolist() == [False, False]


def test_welchs_p_value_is_scipys():
    a, b = normal(30) + 0.4, 3 * normal(12, seed=1)
    expected = ttest_ind(a, b, equal_var=False, alternative="greater").pvalue
    assert welch_p(a, b) == pytest.approx(expected)
    assert welch_p(b, a) == pytest.approx(1 - expected)
    same = torch.ones(5, dtype=torch.float64)
    assert (welch_p(same, same), welch_p(same + 1, same), welch_p(same, same + 1)) == (0.5, 0.0, 1.0)


def test_the_bound_of_a_relative_change_is_where_the_test_turns():
    size = 2 + 0.3 * normal(80)
    a, b = 0.5 * size + 0.2 * normal(80, seed=1), 0.1 * normal(40, seed=2)
    found = relative_change(a, b, size, 0.01)
    assert found.value == pytest.approx(float((a.mean() - b.mean()) / size.mean()))

    def p(delta: float) -> float:
        each = (
            ttest_ind(a - delta * size, b, equal_var=equal, alternative="greater").pvalue for equal in (True, False)
        )
        return max(each)

    assert p(found.low) == pytest.approx(0.01, rel=1e-3)
    assert p(found.low - 0.01) < 0.01 < p(found.low + 0.01)


def test_the_bound_of_a_relative_change_covers():
    """Means 1 and .8 with skewed laws, and few of the second: the bound exceeds the truth in 5 % or less."""
    hits = 0
    for k in range(400):
        size, b = normal(64, seed=k).exp(), 0.8 * normal(12, seed=10_000 + k).exp()
        hits += relative_change(size, b, size, 0.05).low > 0.2
    assert hits <= 400 * 0.05 + 3 * math.sqrt(400 * 0.05)


def test_a_mean_that_may_be_zero_has_no_bound():
    found = relative_change(normal(10), normal(10, seed=1), 0.1 + normal(10, seed=2).abs() * 0, 1e-3)
    assert found.low < found.value
    assert math.isnan(relative_change(normal(9), normal(9), -torch.ones(9, dtype=torch.float64), 0.1).value)


def test_where_a_line_crosses_a_height():
    x = torch.arange(8, dtype=torch.float64)
    exact = crossing(x, 3 - 0.25 * x, 0.5)
    assert (exact.value, exact.low, exact.high) == (pytest.approx(10), pytest.approx(10), pytest.approx(10))
    assert math.isnan(crossing(x, torch.ones_like(x), 0.5).value)  # level
    assert math.isnan(crossing(x[:2], x[:2], 0.5).value)
    covered, known = 0, 0
    for k in range(600):
        noise = 0.1 * normal(9, seed=k)
        found = crossing(x, 3 - 0.25 * x + noise[:8], 0.5 + float(noise[8]), 0.9)  # a new observation meets the line
        known += not math.isnan(found.value)
        covered += found.low <= 10 <= found.high
    assert known > 590
    assert covered / known == pytest.approx(0.9, abs=0.04)
