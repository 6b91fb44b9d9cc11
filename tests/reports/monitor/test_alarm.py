"""The alarm: its level by simulation, its power on a network that memorises, states, and the estimate of the onset."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
from monitored import PROCESS, Denoiser, digits, train
from torch import Tensor

import vkernel as vk
from vkernel.core.estimate import Estimate
from vkernel.reports.monitor import Drawn, Evaluation, gaps, verdict
from vkernel.reports.monitor.alarm import DELTA, level, verdicts
from vkernel.reports.monitor.onset import arrival, needed
from vkernel.reports.monitor.record import Setting

ROOT = Path(__file__).resolve().parents[3]
spec = importlib.util.spec_from_file_location("monitor_run", ROOT / "docs" / "monitor" / "run.py")
simulation = importlib.util.module_from_spec(spec)
spec.loader.exec_module(simulation)


def setting(**changes: object) -> Setting:
    sizes = {"n": 64, "images": {"train": 64, "test": 64}, "samples": 128, "steps": 18, "gaussian_images": 64}
    probe = {
        "shape": (1, 8, 8),
        "ratio": (0.1, 1.0),
        "normaliser": (1.0, 1.0),
        "gaussian": {},
        "ideal": {},
        "zeros": {},
    }
    about = {"seed": 0, "predicts": "noise", "time": "t", "range": None, "process": "", "classes": 0, "spread": 0.5}
    held = {"shift": 0.5, "held": 256, "held_copies": 0, "threshold": 1 / 3, "data": "", "test": ""}
    return Setting(**(sizes | probe | about | held | changes))


def evaluation(step: int, train: Tensor, test: Tensor, ratio: Tensor | None = None) -> Evaluation:
    drawn = None if ratio is None else Drawn(ratio, torch.zeros(len(ratio), dtype=torch.long))
    one = Estimate.exact(torch.ones(2, dtype=torch.float64))
    levels = {"train": one, "test": one}
    images = {"train": train.double(), "test": test.double()}
    return Evaluation(step, images, levels, levels, levels, {}, drawn, "network", 1.0, 0.1, (0.1, 0.0))


def errors(mean: float, n: int = 64, seed: int = 0) -> Tensor:
    return mean * (1 + 0.2 * torch.randn(n, generator=torch.Generator().manual_seed(seed)))


def test_levels_sum_to_one_per_cent() -> None:
    assert math.isclose(sum(level(k) for k in range(1, 200_000)), 0.01, rel_tol=1e-4)
    assert level(1) == pytest.approx(0.06 / math.pi**2)


def test_the_alarm_is_raised_where_a_lower_bound_exceeds_a_tenth() -> None:
    easy, hard = errors(1.0, seed=1), errors(1.0, seed=2)
    runs = {
        "both fall": [(0, easy, hard), (1, 0.5 * easy, 0.5 * hard)],
        "training falls more": [(0, easy, hard), (1, 0.5 * easy, hard)],
        "a little more": [(0, easy, hard), (1, 0.95 * easy, hard)],
        "held-out falls more": [(0, easy, hard), (1, easy, 0.5 * hard)],
        "memorised before": [(7, 0.3 * easy, hard)],
    }
    raised = {name: any(g.alarm for g in gaps([evaluation(*e) for e in run])) for name, run in runs.items()}
    assert raised == {
        "both fall": False,
        "training falls more": True,
        "a little more": False,
        "held-out falls more": False,
        "memorised before": True,
    }
    found = gaps([evaluation(*e) for e in runs["training falls more"]])[1]
    assert found.change == pytest.approx(float(0.5 * easy.mean() / hard.mean()), rel=1e-6)
    assert found.gap == pytest.approx(1 - float(0.5 * easy.mean() / hard.mean()), rel=1e-6)
    assert DELTA < found.low < found.value


def test_a_verdict_names_the_first_step_and_a_shift_silences_it() -> None:
    easy, hard = errors(1.0, seed=1), errors(1.0, seed=2)
    records = [evaluation(step, factor * easy, hard) for step, factor in ((0, 1.0), (10, 0.9), (20, 0.5), (40, 0.3))]
    found = verdict(records, setting())
    assert (found.state, found.since, found.alarm, found.copying) == ("memorising", 20, 20, None)
    assert [v.state for v in verdicts(records, setting())] == ["learning", "settled", "memorising", "memorising"]
    assert gaps(records, gaps(records[:2])) == gaps(records)
    shifted = verdict(records, setting(shift=1e-4))
    assert shifted.shifted
    assert shifted.alarm is None
    assert shifted.state == "settled"


def test_learning_and_settled() -> None:
    noise = errors(1.0, seed=3)
    falls = [evaluation(step, noise / (1 + step), noise / (1 + step)) for step in (0, 1, 2, 4, 8)]
    assert verdict(falls, setting()).state == "learning"
    stays = [*falls, evaluation(16, noise / 9, noise / 9), evaluation(32, noise / 9, noise / 9)]
    assert verdict(stays, setting()).state == "settled"
    assert verdict(falls[:1], setting()).fall is None
    assert verdict(falls, setting()).fall.value == pytest.approx(4 / 9, rel=1e-6)  # 1 - (1 + 4)/(1 + 8), one doubling


def test_an_evaluation_that_is_not_finite_is_left_out() -> None:
    easy, hard = errors(1.0, seed=1), errors(1.0, seed=2)
    bad = evaluation(10, easy / 0, hard)
    records = [evaluation(0, easy, hard), bad, evaluation(20, 0.4 * easy, hard)]
    assert [g.step for g in gaps(records)] == [0, 20]
    assert not verdict(records[:2], setting()).finite
    assert verdict([bad], setting()).gap is None


def test_copying_begins_where_the_intervals_separate() -> None:
    easy, hard = errors(1.0, seed=1), errors(1.0, seed=1)
    j = needed(setting())
    assert Estimate.of_share(j, 128).low > Estimate.of_share(0, 256).high >= Estimate.of_share(j - 1, 128).low

    def ratios(copies: int) -> Tensor:
        return torch.cat([torch.full((copies,), 0.2), torch.full((128 - copies,), 0.9)])

    records = [evaluation(s, easy, hard, ratios(c)) for s, c in ((0, 0), (10, j - 1), (20, j), (30, 2 * j))]
    assert verdict(records[:2], setting()).copying is None
    assert verdict(records, setting()).copying == 20
    assert needed(setting(held=2, samples=4)) is None


# -------------------- the onset


def test_the_onset_of_a_straight_fall_is_found_and_wide_or_far_ones_are_not() -> None:
    steps = 2.0 ** (torch.arange(0, 22).double() / 2)  # 1 … 1448
    r = 0.9 - 0.05 * steps.log2()  # reaches 1/3 at 2^11.33
    found = arrival(steps, r, 1 / 3)
    assert found.value == pytest.approx(2**11.3333, rel=1e-3)
    assert found.low <= found.value <= found.high
    assert arrival(steps[:21], r[:21], 1 / 3).value is None  # at 2^10 that is more than twice the present step
    assert arrival(steps, torch.full_like(r, 0.7), 1 / 3).value is None  # no fall
    assert arrival(steps, r.flip(0), 1 / 3).value is None  # it rises
    assert arrival(steps[:3], r[:3] - 0.4, 1 / 3).value is None  # too few
    assert arrival(steps[:0], r[:0], 1 / 3).value is None
    noisy = r + 0.3 * torch.randn(len(r), generator=torch.Generator().manual_seed(0))
    assert arrival(steps, noisy.clamp_max(0.8), 1 / 3).value is None
    dense = torch.arange(100.0, 1501.0, 25.0, dtype=torch.float64)  # evaluations at equal distances
    assert arrival(dense, 0.9 - 0.05 * dense.log2(), 1 / 3).value == pytest.approx(2**11.3333, rel=1e-2)


def test_stored_runs_give_the_accuracy_that_is_documented() -> None:
    held = json.loads((ROOT / "docs" / "monitor" / "results.json").read_text())
    found = simulation.accuracy(held["onsets"])
    assert found["within a factor 2"] > 0.9
    assert found["covered"] > 0.9
    assert found["of these, wrong"] == 0
    copied = [run for run in held["onsets"] if run["onset"] is not None]
    assert len(copied) >= 50
    assert all(run["alarm"] is not None and run["alarm"] < run["onset"] for run in copied)
    assert simulation.tested() in simulation.PAGE.read_text()
    runs = held["alarms"]
    false = sum(run["alarm"] is not None for run in runs)
    assert len(runs) >= 300
    assert Estimate.of_share(false, len(runs)).low <= 0.01


# -------------------- simulation


def test_heavy_tails_raise_few_false_alarms() -> None:
    rows = simulation.heavy(20, 8)
    assert sum(row["alarms"] for row in rows) <= 4  # of 180


def test_networks_that_never_saw_the_images_raise_no_alarm() -> None:
    assert all(run["alarm"] is None for run in simulation.alarms(6, 30, 16, (16,)))


@pytest.mark.slow
def test_the_level_of_the_alarm_over_three_hundred_networks() -> None:
    runs = simulation.alarms()
    false = sum(run["alarm"] is not None for run in runs)
    assert len(runs) >= 300
    assert Estimate.of_share(false, len(runs)).low <= 0.01, false


def test_a_network_that_memorises_is_seen_before_it_copies() -> None:
    torch.manual_seed(0)
    images, held = digits(16, 128)
    watch = vk.Monitor(images, PROCESS, test=held, predicts="x0", every=50, budget=0.99, images=64, progress=False)
    watch.budget.clock = iter(range(10**9)).__next__
    network = Denoiser(128)
    with pytest.warns(UserWarning, match="memorising since step"):
        train(network, images, 1200, lambda step, net, ema: watch(step, net))
    found = watch.verdict
    assert found.state == "memorising"
    assert found.alarm is not None
    assert found.copying is not None
    assert found.alarm < found.copying


def test_a_network_that_does_not_memorise_is_left_alone() -> None:
    torch.manual_seed(0)
    images, held = digits(1024, 256)
    watch = vk.Monitor(images, PROCESS, test=held, predicts="x0", every=50, budget=0.99, samples=32, progress=False)
    watch.budget.clock = iter(range(10**9)).__next__
    train(Denoiser(64), images, 500, lambda step, net, ema: watch(step, net))
    assert watch.verdict.state != "memorising"
