"""Guards of speed: ratios inside one run, of medians by turns, on the processor's own clock and one thread.

Margins are far below what is measured (``benchmarks/REPORT.md``): what fails here is slower by a path, not by a day.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import vkernel as vk

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import ensembles
from benchmarks.common import error, fields, images, plain, queries, reference, typical

BATCH = 128
pytestmark = pytest.mark.usefixtures("one_thread")


def medians(*runs: Callable[[], object], repeats: int = 5) -> list[float]:
    """Median seconds of processor time of each, by turns, after one turn to warm up."""
    times: list[list[float]] = [[] for _ in runs]
    for repeat in range(repeats + 1):
        for run, seconds in zip(runs, times, strict=True):
            start = time.process_time()
            run()
            if repeat:
                seconds.append(time.process_time() - start)
    return [statistics.median(seconds) for seconds in times]


def scored(y: torch.Tensor, bounds: bool) -> vk.EmpiricalScore:
    """A score that prunes from the first query on, or never."""
    return vk.EmpiricalScore(vk.Empirical(y), vk.EDM(), method="pruned" if bounds else "dense")


@pytest.fixture(scope="module")
def points() -> torch.Tensor:
    """As smooth as drawings: along few axes, as bounds need it."""
    return fields(24_000, 1, 28, power=2.0).flatten(1)


@pytest.fixture(scope="module")
def dense(points: torch.Tensor) -> vk.EmpiricalScore:
    return scored(points, False)


@pytest.fixture(scope="module")
def pruned(points: torch.Tensor) -> vk.EmpiricalScore:
    return scored(points, True)


@pytest.mark.parametrize("sigma", [1.0, 10.0])
def test_exactness_costs_little_more_than_plain_products(points, dense, sigma):
    x = queries(points, BATCH, sigma)
    ours, theirs = medians(lambda: dense(x, sigma), lambda: plain(points, x, sigma))
    assert ours < 1.6 * theirs
    truth, spread = reference(points, x, sigma), dense.data.spread
    assert error(dense.denoise(x, sigma), truth, spread) < 1e-5


def test_at_low_noise_bounds_save_most_of_the_work(points, dense, pruned):
    x = queries(points, BATCH, 0.1)
    theirs, ours, naive = medians(lambda: dense(x, 0.1), lambda: pruned(x, 0.1), lambda: plain(points, x, 0.1))
    assert theirs > 2.5 * ours
    assert naive > 4 * ours
    torch.testing.assert_close(dense.denoise(x, 0.1), pruned.denoise(x, 0.1), rtol=1e-6, atol=1e-6)


def test_cost_at_low_noise_grows_no_faster_than_the_points(points, pruned):
    small = scored(points[:6000].contiguous(), True)
    x = queries(points[:6000], BATCH, 0.1)
    few, many = medians(lambda: small(x, 0.1), lambda: pruned(x, 0.1))
    assert many < 4 * few  # with four times the points


def test_cost_of_many_queries_is_shared(dense, points):
    """The data are read once for all: sixty-four queries cost far less than sixty-four calls."""
    x = queries(points, 64, 1.0)
    one, many = medians(lambda: dense(x[:1], 1.0), lambda: dense(x, 1.0))
    assert many < 32 * one


@pytest.mark.parametrize(("vary", "gain"), [(("inputs", "targets"), 8), (("targets",), 12)])
def test_linear_members_at_once_are_many_times_faster_than_a_loop(vary, gain):
    model, training = ensembles.model(4), ensembles.line(64, vary, "cpu")
    runs = [lambda fit=fit: fit(model, training, 100) for fit in (ensembles.solved, ensembles.fitted)]
    loop, once = medians(*runs, repeats=3)
    assert loop > gain * once
    a, b = (run() for run in runs)
    torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8 * float(a.abs().max()))


def test_members_that_share_inputs_cost_less_than_members_that_do_not():
    model, trainings = ensembles.model(16), [ensembles.line(256, vary, "cpu") for vary in ensembles.SHARED.values()]
    apart, together = medians(*(lambda t=t: ensembles.fitted(model, t, 32) for t in trainings), repeats=3)
    assert apart > 3 * together


def test_networks_at_once_are_faster_than_a_loop():
    loop, once = medians(lambda: ensembles.one_by_one(32, 8, "cpu"), lambda: ensembles.at_once(32, 8, "cpu"), repeats=3)
    assert loop > 2 * once


# --- at full size --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_engine_at_full_size():
    """60,000 images: near plain products where all points matter, several times faster where few do."""
    _, y = images("fashion")
    dense, pruned = scored(y, False), scored(y, True)
    for sigma, gain in ((0.1, 2.5), (1.0, 0.62), (10.0, 0.62)):
        x = queries(y, 256, sigma)
        ours, theirs = medians(lambda x=x, s=sigma: pruned(x, s), lambda x=x, s=sigma: plain(y, x, s), repeats=3)
        assert theirs > gain * ours, f"sigma = {sigma:g}"
        truth = reference(y, x, sigma)
        assert error(pruned.denoise(x, sigma), truth, pruned.data.spread) < 1e-5
    x = queries(y, 256, 0.1)
    before, after = medians(lambda: dense(x, 0.1), lambda: pruned(x, 0.1), repeats=3)
    assert before > 2.5 * after


@pytest.mark.slow
@pytest.mark.parametrize(("per_axis", "draws", "members"), [(8, 256, 256), (16, 256, 64), (16, 1024, 32)])
def test_large_linear_members_at_once_are_no_slower_than_a_loop(per_axis, draws, members):
    model = ensembles.model(per_axis)
    for vary, gain in ((("inputs", "targets"), 0.6), (("targets",), 4)):
        training = ensembles.line(draws, vary, "cpu")
        runs = [lambda fit=fit, t=training: fit(model, t, members) for fit in (ensembles.solved, ensembles.fitted)]
        loop, once = medians(*runs, repeats=3)
        assert loop > gain * once, f"{vary} vary"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize(("sigma", "least"), [(0.1, 4.0), (40.0, 2.5)])
def test_a_gpu_is_faster_than_plain_products(sigma: float, least: float) -> None:
    """CIFAR's size: 10 and 5 times were measured."""
    from benchmarks.gpu import milliseconds

    data = vk.Empirical(fields(50_000, 3, 32, device="cuda"), scale=(-1.0, 1.0))
    score, y, x = vk.EmpiricalScore(data, vk.EDM()), data.rows(0, data.n), typical(data, 1024, sigma)
    half = y.square().sum(1) / 2
    ours = milliseconds(lambda: score(x, sigma))
    assert milliseconds(lambda: plain(y, x.flatten(1), sigma, half), 5) > least * ours
