"""Intervals over members × images by other routes: Student's test, variances of a table, simulation; curves by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from vkernel.core.errors import InputError
from vkernel.core.estimate import jackknife_se
from vkernel.core.twoway import (
    Contrast,
    Resamples,
    at_equal,
    bends,
    change_of_time,
    decide,
    frontier,
    frontier_tolerance,
    interpolate,
)

SOURCE = torch.Generator().manual_seed(0)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=SOURCE, dtype=torch.float64)


def test_without_images_it_is_the_paired_t_test() -> None:
    a, b = 1 + randn(8), randn(8)
    found = Resamples(8, 20_000).contrast(Resamples(8, 20_000).mean(a - b))
    test = stats.ttest_rel(a, b)
    assert found.value == pytest.approx(float((a - b).mean()))
    assert found.interval() == pytest.approx(tuple(test.confidence_interval(0.95)), rel=0.03)
    assert 2 * min(found.p_above(0), found.p_below(0)) == pytest.approx(test.pvalue, rel=0.2)


def test_the_variance_over_draws_has_the_parts_of_the_table() -> None:
    """(1 - 1/M) s_a²/M + (1 - 1/N) s_b²/N for effects of members and of images alone; 3 σ²/(MN) for the rest."""
    M, N, draws = 6, 10, 20_000
    members, images = randn(M), randn(N)
    draw = Resamples(M, draws)
    found = draw.mean(members[:, None] + images, "images")[1:].var()
    assert float(found) == pytest.approx(
        float(members.var() * (M - 1) / M**2 + images.var() * (N - 1) / N**2), rel=0.04
    )
    M = N = 40
    rest = Resamples(M, 2000).mean(randn(M, N), "images")[1:].var()
    assert float(rest) * M * N == pytest.approx(3, rel=0.2)


def test_pairs_are_the_variance_over_members() -> None:
    D = randn(5, 7, 3)  # member, pixel, image
    gaps = 0.5 * (D[:, None] - D[None]).square().mean(2)
    draw = Resamples(5, 500)
    assert float(draw.pairs(gaps, "images")[0]) == pytest.approx(float(D.var(0).mean()))
    # a member that is drawn twice does not lower V: the mean over draws is that of the sample
    drawn = draw.pairs(gaps.mean(-1))[1:]
    assert float(drawn.mean()) == pytest.approx(float(D.var(0).mean()), rel=0.03)


def test_errors_of_pairs_are_those_of_the_jackknife() -> None:
    """2 mean a - mean b over pairs, where row effects of a and b cancel, as in the distance of the average law."""
    M, effects, u = 8, randn(8), 0.5 + 0.2 * randn(8, 6)
    b = effects[:, None] + effects[None] - u @ u.mT

    def statistic(kept: list[int]) -> float:
        some = b[kept][:, kept]
        count = len(kept)
        return float(2 * effects[kept].mean() - (some.sum() - some.trace()) / (count * (count - 1)))

    draw = Resamples(M, 5000)
    found = draw.contrast(2 * draw.mean(effects) - draw.pairs(b))
    without = torch.tensor([statistic([k for k in range(M) if k != m]) for m in range(M)], dtype=torch.float64)
    assert found.value == pytest.approx(statistic(list(range(M))))
    assert found.se == pytest.approx(float(jackknife_se(without)), rel=0.15)


def test_each_member_and_unknown_members() -> None:
    values, draw = randn(4, 2, 6), Resamples(4, 50)
    each = draw.each(values, "a")
    assert each.shape == (51, 4, 2)
    assert torch.allclose(torch.einsum("bm,bmk->bk", draw.members, each), draw.mean(values, "a"))
    assert not torch.allclose(each[1:], draw.each(values, "b")[1:])  # other images, other draws
    lost = each[..., 0].clone()
    lost[:, 1] = torch.nan
    assert float(draw.average(lost)[0]) == pytest.approx(float(values[[0, 2, 3], 0].mean()))
    with pytest.raises(InputError, match="2 of them or more"):
        Resamples(1)


def test_student_covers_where_percentiles_do_not() -> None:
    """Twins whose members and images differ in size; the ratio of two V and of two errors, M = 6."""
    M, N, runs, true = 6, 16, 300, math.log(1.3)
    covered = np.zeros((2, 2))
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    for run in range(runs):
        draw, z = Resamples(M, 200, run), randn(M, 3, N)
        size, image = (0.4 * randn(M, 1, 1)).exp(), (0.5 * randn(N)).exp()
        logs = []
        for factor in (1.3, 1.0):
            own = size * (0.2 * randn(M, 1, 1)).exp() * image
            D = (0.9 * z + math.sqrt(0.19) * randn(M, 3, N)) * own * math.sqrt(factor)
            V = draw.pairs(0.5 * (D[:, None] - D[None]).square().mean(2), "images")
            logs.append(torch.stack([V, draw.mean(factor * own[:, 0] * (0.1 * randn(M, N)).exp(), "images")]).log())
        for k, ratio in enumerate(logs[0] - logs[1]):
            low, high = draw.contrast(ratio).interval()
            drawn = ratio[1:][ratio[1:].isfinite()].quantile(ends)
            covered[k] += low <= true <= high, bool(drawn[0] <= true <= drawn[1])
    student, percentiles = (covered / runs).T
    assert ((student > 0.925) & (student < 0.995)).all()
    assert percentiles[1] < 0.92  # of errors


def test_equivalence_is_the_interval_inside_the_margins() -> None:
    for value in (0.0, 0.04, 0.08, 0.2):
        found = Contrast(value, 0.02, 7)
        low, high = found.interval(0.9)
        assert (found.p_inside(0.1) <= 0.05) == (low > -0.1 and high < 0.1)
        assert (found.p_outside(0.1) <= 0.05) == (low > 0.1 or high < -0.1)
    assert Contrast(1.0, 0.0, 7).p_above(0.5) == 0
    assert Contrast(math.nan, math.nan, 7).p_above(0.5) == 1


def test_decisions_of_a_family() -> None:
    assert decide([0.004, 0.9, 0.5], [0.996, 0.02, 0.5]) == [1, 0, 0]  # .02 × 2 × 2 > .05
    assert decide([0.9], [0.02]) == [-1]
    assert decide([0.004, math.nan], [0.996, math.nan]) == [1, 0]


def test_interpolation_does_not_extrapolate() -> None:
    x, y = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64), torch.tensor([[0.0], [2.0], [0.0]], dtype=torch.float64)
    at = torch.tensor([-0.1, 0.0, 0.5, 2.0, 3.0, 3.1], dtype=torch.float64)
    found = interpolate(y, x, at)[:, 0].numpy()
    assert np.allclose(found[1:-1], np.interp(at[1:-1], x, y[:, 0]))
    assert np.isnan(found[[0, -1]]).all()


def test_crossings_of_a_curve_that_falls_and_rises() -> None:
    e = torch.tensor([3.0, 1.0, 2.0, 4.0], dtype=torch.float64)
    y = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    levels = torch.tensor([2.0, 1.0, 0.5, 5.0], dtype=torch.float64)
    assert torch.allclose(at_equal(e, y, levels)[:2], torch.tensor([0.5, 1.0], dtype=torch.float64))
    assert torch.allclose(at_equal(e, y, levels, last=True)[:2], torch.tensor([2.0, 1.0], dtype=torch.float64))
    assert at_equal(e, y, levels)[2:].isnan().all()


def test_frontiers() -> None:
    x = torch.linspace(0, 4, 5, dtype=torch.float64)
    e, y = -x + 0.0, x.square()
    assert float(frontier(e, y - 0.3, e, y)) == pytest.approx(-0.3)
    assert math.isnan(float(frontier(e - 10, y, e, y)))  # no error in common
    later = x[1:]  # the same trajectory, sampled at other times: no difference where y is linear between snapshots
    assert float(frontier(-later - 0.5, 2 * later + 1, -x[:4], 2 * x[:4])) == pytest.approx(0, abs=1e-12)
    # falls and rises again; the frontiers differ after the minimum alone, by 1 on a range as long as the other
    e = torch.tensor([4.0, 2.0, 0.0, 2.0, 4.0], dtype=torch.float64)
    y0 = torch.tensor([0.0, 0.0, 0.0, 1.0, 2.0], dtype=torch.float64)
    y1 = torch.tensor([0.0, 0.0, 0.0, 2.0, 4.0], dtype=torch.float64)
    assert float(frontier(e, y1, e, y0)) == pytest.approx(0.5)


def test_a_change_of_time_is_found() -> None:
    x = torch.linspace(0, 4, 9, dtype=torch.float64)
    reference = torch.stack([-x, 2 * x, 1 - 0.5 * x], -1)[None]
    curves = torch.stack([-(x - 1), 2 * (x - 1), 1 - 0.5 * (x - 1)], -1)[None]
    tau, left = change_of_time(curves, reference, x)
    inside = x >= 1
    assert torch.allclose(tau[0, inside], x[inside] - 1, atol=0.04)
    assert float(left[0, inside].abs().max()) < 0.07  # half a step of the grid, times the slope
    curves[..., 0] += 1  # one of the curves is displaced: no time maps all of them
    assert float(change_of_time(curves, reference, x)[1][0, inside].abs().amax(-1).min()) > 0.5


def test_errors_of_interpolation() -> None:
    """A parabola has the error u (1 - u) h² of its line, exactly; and a coarse frontier is that much off."""
    x = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    y, at = x.square()[:, None], torch.tensor([0.5, 1.25, 3.75], dtype=torch.float64)
    wrong = (interpolate(y, x, at)[:, 0] - at.square()).abs()
    assert torch.allclose(bends(y, x, at)[:, 0], wrong)
    # half of the snapshots: the line is off by u (1 - u) 4 against 1 of the full one, on average 2/3 - 1/6
    found = frontier_tolerance(-x[None], y.mT)
    assert found == pytest.approx((2 / 3 - 1 / 6) / 4, rel=0.15)
    assert frontier_tolerance(-x[None, :3], y.mT[:, :3]) == 0
