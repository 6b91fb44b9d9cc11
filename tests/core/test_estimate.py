"""Numbers with errors: quantiles, coverage, resampling, tests."""

from __future__ import annotations

import math

import pytest
import torch
from draws import gen
from scipy import stats

import vkernel as vk
from vkernel.core import estimate
from vkernel.core.estimate import Estimate, ratio_of_spreads, student_quantile


@pytest.mark.parametrize("dof", [1, 2, 3, 4, 5, 7, 10, 30, 100, 4095, 10**6])
def test_the_quantile_is_students(dof):
    assert student_quantile(dof) == pytest.approx(stats.t.ppf(0.975, dof), abs=2e-3 if dof < 6 else 1e-4)


def test_no_degrees_of_freedom_know_nothing():
    assert student_quantile(0) == math.inf
    e = Estimate.of_mean(torch.tensor([2.0]))
    assert (e.value, e.se, e.low, e.high) == (2.0, math.inf, -math.inf, math.inf)


@pytest.mark.parametrize("n", [3, 5, 20, 200])
def test_the_interval_covers_95_percent(n):
    runs = 20_000
    z = 3 + 2 * torch.randn(n, runs, generator=gen(n), dtype=torch.float64)
    e = Estimate.of_mean(z)
    covered = float(((e.low <= 3) & (e.high >= 3)).double().mean())
    assert abs(covered - 0.95) < 4 * math.sqrt(0.05 * 0.95 / runs)


def test_an_estimate_is_the_mean_with_its_error():
    z = torch.randn(50, 4, generator=gen(0), dtype=torch.float64)
    e = Estimate.of_mean(z, scale=-2.0)
    for j in range(4):
        result = stats.ttest_1samp(-2 * z[:, j].numpy(), 0).confidence_interval(0.95)
        assert float(e.value[j]) == pytest.approx(-2 * float(z[:, j].mean()))
        assert float(e.se[j]) == pytest.approx(stats.sem(2 * z[:, j].numpy()))
        assert float(e.low[j]) == pytest.approx(result.low, rel=1e-4, abs=1e-4)
        assert float(e.high[j]) == pytest.approx(result.high, rel=1e-4, abs=1e-4)
    assert (e.low <= e.value).all()
    assert (e.value <= e.high).all()
    other = Estimate.of_mean(z.mT, dim=1, scale=-2.0)
    torch.testing.assert_close(other.value, e.value)
    torch.testing.assert_close(other.se, e.se)
    one = Estimate.of_mean(z[:, 0])
    assert all(isinstance(v, float) for v in (one.value, one.se, one.low, one.high))
    assert float(one) == one.value
    assert "±" in str(one)
    assert "se=" in str(e)


def test_exact_estimates_have_no_error():
    e = Estimate.exact(0.5)
    assert (e.value, e.se, e.low, e.high) == (0.5, 0.0, 0.5, 0.5)
    many = Estimate.exact(torch.ones(3))
    assert (many.se == 0).all()
    assert torch.equal(many.low, many.high)


def test_the_noise_fraction_covers_its_truth():
    """The reported interval of 200 small runs holds the value of one long run about 95 times in 100."""
    data, process, t = vk.data.hexagon(), vk.VP(), 0.12
    score = vk.EmpiricalScore(data, process)
    truth = vk.noise_fraction(score, process, t, queries=100_000, generator=0).value
    runs = [vk.noise_fraction(score, process, t, queries=200, generator=k) for k in range(1, 201)]
    covered = sum(r.low <= truth <= r.high for r in runs)
    assert 176 <= covered <= 200


@pytest.mark.parametrize(("hits", "n"), [(0, 10), (3, 10), (10, 10), (1, 1000)])
def test_a_share_has_wilsons_interval(hits, n):
    e = Estimate.of_share(hits, n)
    want = stats.binomtest(hits, n).proportion_ci(0.95, "wilson")
    assert (e.low, e.high) == pytest.approx((want.low, want.high), abs=1e-12)
    assert e.value == hits / n
    assert e.complement().low == pytest.approx(Estimate.of_share(n - hits, n).low, abs=1e-12)
    many = Estimate.of_share(torch.tensor([hits, n]), n, scale=2.0)
    assert float(many.high[1]) == 2.0
    assert many[0] == Estimate.of_share(hits, n, scale=2.0)


def test_variances_from_two_samples_give_welchs_interval():
    a, b = torch.randn(9, generator=gen(0), dtype=torch.float64), 3 * torch.randn(14, generator=gen(1)).double() + 1
    e = estimate.difference_of_means(a, b)
    want = stats.ttest_ind(a.numpy(), b.numpy(), equal_var=False)
    assert e.value / e.se == pytest.approx(want.statistic)
    want_low, want_high = want.confidence_interval(0.95)
    assert e.low == pytest.approx(want_low, rel=2e-2)
    assert e.high == pytest.approx(want_high, rel=2e-2)
    unknown = Estimate.of_variances(1.0, [(math.inf, 1)], 0.0, 2.0)
    assert (unknown.low, unknown.high, unknown.se) == (0.0, 2.0, math.inf)


def test_the_jackknife_of_a_mean_is_its_standard_error():
    z = torch.randn(12, 3, generator=gen(0), dtype=torch.float64)
    without = estimate.leave_one_out(lambda s: s.mean(0), z)
    got, want = estimate.jackknife(z.mean(0), without), Estimate.of_mean(z)
    for a, b in zip(got.fields, want.fields, strict=True):
        torch.testing.assert_close(a, b)
    cut = estimate.jackknife(float(z[:, 0].mean()), without[:, 0], low=0.0)
    assert cut.low == max(0.0, float(want.low[0]))
    groups = estimate.leave_one_out(lambda s: s.mean(1)[0], z.mT, groups=4, dim=1)
    torch.testing.assert_close(groups[0], z[3:, 0].mean())


def test_the_bootstrap_of_a_histogram_has_the_multinomial_spread():
    counts = torch.tensor([30.0, 70.0])
    again = estimate.bootstrap(lambda c: c[:, 0] / c.sum(1), counts, 4000, generator=0)
    assert float(again.std()) == pytest.approx(math.sqrt(0.21 / 100), rel=0.05)
    assert torch.equal(again, estimate.bootstrap(lambda c: c[:, 0] / c.sum(1), counts, 4000, generator=0))


@pytest.mark.parametrize("paired", [True, False])
def test_the_ratio_of_means_covers_its_truth(paired):
    covered = 0
    for k in range(400):
        z = torch.randn(20, 2, generator=gen(k), dtype=torch.float64)
        a, b = 4 + z[:, 0], 2 + 0.5 * (z[:, 0] if paired else z[:, 1])
        e = estimate.ratio_of_means(a, b, paired=paired)
        covered += e.low - 1e-12 <= 2 <= e.high + 1e-12
    assert 365 <= covered <= 400
    nothing = estimate.ratio_of_means(torch.zeros(3), torch.ones(3), paired=True)
    assert math.isnan(nothing.value)
    assert nothing.high == math.inf


def test_logarithms_and_exponentials():
    e = Estimate.of_log(2.0, 0.1, 10)
    assert e.low * e.high == pytest.approx(4.0)
    assert e.se == pytest.approx(0.2)
    back = Estimate.of_error(math.log(2.0), 0.1, 10).exp()
    assert back.fields == pytest.approx(e.fields)
    assert e.scaled(3.0).high == pytest.approx(3 * e.high)
    assert e.stack().tolist() == [e.value, e.low, e.high]


def test_p_values():
    assert estimate.fisher_exact(7, 10, 2, 12) == pytest.approx(
        stats.fisher_exact([[7, 3], [2, 10]], alternative="greater").pvalue
    )
    assert estimate.sign_test(9, 10) == pytest.approx(stats.binomtest(9, 10, alternative="greater").pvalue)
    assert estimate.permutation_p(2.0, torch.tensor([1.0, 3.0, 2.0])) == 3 / 4
    one, two = Estimate.of_share(30, 100), Estimate.of_share(10, 100)
    gap = estimate.difference_of_shares(one, two)
    assert gap.low == pytest.approx(0.0916, abs=2e-3)
    assert gap.low < gap.value < gap.high


@pytest.mark.parametrize("law", ["normal", "skewed"])
def test_ratios_of_spreads_are_covered_as_often_as_stated(law: str) -> None:
    """Standard deviations of 2 and 1, of normal numbers and of exponential ones."""
    inside, g = 0, torch.Generator().manual_seed(0)
    for _ in range(400):
        a, b = torch.randn(60, generator=g).double(), torch.randn(200, generator=g).double()
        if law == "skewed":
            a, b = (-torch.special.ndtr(x).log() for x in (a, b))
        found = ratio_of_spreads(2 * a + 5, b)
        inside += found.low <= 2 <= found.high
    assert (0.91 if law == "normal" else 0.86) <= inside / 400 <= 0.98


def test_weights_count_in_ratios_of_spreads_and_constants_are_no_error() -> None:
    a, b = torch.randn(20).double(), torch.randn(30).double()
    weights = torch.cat([torch.full((30,), 1 / 30), torch.zeros(5)]).double()
    padded = ratio_of_spreads(a, torch.cat([b, 9 + torch.arange(5).double()]), weights)
    assert padded.fields == pytest.approx(ratio_of_spreads(a, b).fields)
    assert padded.value == pytest.approx(float(a.std() / b.std()))
    assert ratio_of_spreads(torch.ones(9).double(), b).fields == (0, 0, 0, 0)
    assert math.isnan(ratio_of_spreads(a[:2], b).value)
    assert math.isnan(ratio_of_spreads(a, torch.ones(9).double()).value)
    assert ratio_of_spreads(a, torch.ones(9).double(), floor=1e-3).value == pytest.approx(1e3 * float(a.std()))
