"""The mathematics of the benchmarks: exponents with their errors, limits, the truth in float64, and the report."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import vkernel as vk
from vkernel.core.errors import InputError

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import common, curves, ensembles, report, targets
from benchmarks.fit import exponent
from benchmarks.limits import Limits
from benchmarks.results import folder, into, record, recorded

# --- exponents -----------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    b=st.floats(-3, 3),
    factor=st.floats(1e-6, 1e6),
    x=st.lists(st.floats(1e-3, 1e6), min_size=3, max_size=12, unique_by=lambda v: round(math.log(v), 1)),
)
def test_a_power_law_is_recovered(b, factor, x):
    found, prefactor = exponent(x, [factor * v**b for v in x])
    assert found.value == pytest.approx(b, abs=1e-9)
    assert found.se < 1e-9
    assert math.isclose(prefactor, factor, rel_tol=1e-7)


def test_the_error_of_an_exponent_is_that_of_numpy_and_holds_its_promise():
    generator, x, inside = np.random.default_rng(0), 2.0 ** np.arange(8), 0
    for _ in range(400):
        y = 3 * x**1.5 * np.exp(0.2 * generator.standard_normal(len(x)))
        found, _ = exponent(x, y)
        inside += found.low <= 1.5 <= found.high
    (slope, _), covariance = np.polyfit(np.log(x), np.log(y), 1, cov=True)
    assert found.value == pytest.approx(slope)
    assert found.se == pytest.approx(math.sqrt(covariance[0, 0]))
    assert abs(inside / 400 - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 400)


@pytest.mark.parametrize(
    ("x", "y"),
    [
        ([1, 2], [1, 2]),
        ([1, 2, 3], [1, 2]),
        ([1, 1, 1], [1, 2, 3]),
        ([1, 2, 3], [1, 0, 2]),
        ([1, 2, math.nan], [1, 2, 3]),
    ],
)
def test_what_has_no_exponent_is_refused(x, y):
    with pytest.raises(InputError, match="three points"):
        exponent(x, y)


# --- limits and truth ----------------------------------------------------------------------------------------------


def test_the_limit_is_the_slower_of_products_and_reading():
    known = Limits(operations=1e9, wide=5e8, bytes=1e8, size=4)
    assert known.posterior(1000, 100, 1000, 0.0) == pytest.approx(2 * 1000 * 100 * 1000 / 1e9)
    assert known.posterior(1000, 100, 1000, 1.0) == pytest.approx(4 * 1000 * 100 * 1000 / 1e9)
    assert known.posterior(1000, 100, 1, 0.0) == pytest.approx(1000 * 100 * 4 / 1e8)  # one query: reading


def test_reference_error_and_spread():
    y, x = common.fields(300, 1, 6).flatten(1), torch.randn(7, 36, generator=torch.Generator().manual_seed(1))
    wide = (-torch.cdist(x.double(), y.double()).square() / (2 * 0.7**2)).softmax(1) @ y.double()
    torch.testing.assert_close(common.reference(y, x, 0.7), wide, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(common.plain(y, x, 0.7).double(), wide, rtol=1e-3, atol=1e-4)
    moved = wide.clone()
    moved[3, 0] += 0.5
    assert common.error(moved, wide, 2.0) == pytest.approx(0.25)
    data = vk.Empirical(y)
    assert common.spread_out(data, x, 0.01) == 0.0
    assert common.spread_out(data, x, 10.0) == 1.0
    assert float(y.abs().max()) <= 1


def test_queries_lie_midway_and_near():
    y = common.fields(50, 1, 6).flatten(1)
    x = common.queries(y, 40, 1e-6)
    nearest = torch.cdist(x, y).min(1).values
    assert float(nearest[1::2].max()) < 1e-3
    halves = torch.cdist(x[::2], (y[:, None] + y).flatten(0, 1) / 2).min(1).values
    assert float(halves.max()) < 1e-3


def test_medians_are_of_turns_after_a_warm_up():
    order: list[str] = []
    times = common.medians([lambda: order.append("a"), lambda: order.append("b")], 2)
    assert order == ["a", "b"] * 3
    assert len(times) == 2


# --- what is recorded, and the report ------------------------------------------------------------------------------


def test_the_report_renders_from_what_two_machines_recorded(tmp_path):
    rows = [
        {"n": n, "noise": s, "time (s)": 1e-6 * n**p, "limit (s)": 1e-7 * n}
        for n in (10, 100, 1000)
        for s, p in (("low", 0.5), ("high", 1.0))
    ]
    plot = {"x": "n", "y": "time (s)", "limit": "limit (s)", "by": "noise", "xlabel": "points n", "fit": True}
    with into(tmp_path):
        record("cpu", "speed", [{"sigma": 1.0, "error": 1.0}], title="Old")
        record("cpu", "curve-n", rows, title="Time against n", plot=plot)
        record(
            "cpu", "speed", [{"sigma": 0.1, "engine error": 3.2e-7, "points": 60000, "KeOps (s)": None}], title="New"
        )
        record("gpu", "cifar", [{"sigma": 0.1, "engine (ms)": 12345.6}], title="CIFAR's size", note="A note.")
        assert list(recorded("cpu")) == ["speed", "curve-n"]
        assert folder() == tmp_path
        path = report.render()
    text = path.read_text()
    assert "Old" not in text
    assert "| 0.1 | 3e-07 | 60,000 | – |" in text
    assert "| low | 0.50 ± 0.00 |" in text
    assert "| high | 1.00 ± 0.00 |" in text
    assert "| 0.1 | 12,346 |" in text
    assert "A note." in text
    assert text.index("On a CPU") < text.index("On a GPU")
    assert torch.__version__ in text
    assert (tmp_path / "plots" / "cpu-curve-n.png").read_bytes().startswith(b"\x89PNG")
    assert folder() != tmp_path


def test_only_points_from_a_size_on_are_fitted():
    rows = [{"B": b, "time (s)": max(b, 64.0)} for b in (1, 16, 64, 256, 1024)]
    plot = {"x": "B", "y": "time (s)", "fit": True}
    (bent, _), (straight, _) = (
        report.fits({"rows": rows, "plot": plot | more})["measured"] for more in ({}, {"above": 64})
    )
    assert bent.value < 0.8
    assert straight.value == pytest.approx(1)
    assert not report.fits({"rows": rows, "plot": plot | {"fit": False}})
    assert not report.fits({"rows": rows[:2], "plot": plot})


def test_what_cannot_be_recorded_or_rendered_is_refused(tmp_path):
    with into(tmp_path):
        with pytest.raises(InputError, match="one of cpu, gpu"):
            record("tpu", "speed", [])
        with pytest.raises(InputError, match="a number, a string"):
            record("cpu", "speed", [{"time": torch.ones(2)}])  # type: ignore[dict-item]
        with pytest.raises(InputError, match="Nothing is recorded"):
            report.render()
        (tmp_path / "results").mkdir()
        (tmp_path / "results" / "cpu.json").write_text("{")
        with pytest.raises(InputError, match="not JSON"):
            recorded("cpu")


# --- the benchmarks themselves, small ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", curves.CURVES)
def test_a_curve_reports_every_step_and_is_drawn(name, tmp_path, monkeypatch):
    small = curves.Sizes((200, 400, 800), ((1, 4), (1, 6), (1, 8)), (1, 4, 16), (0.1, 1.0, 10.0), (1, 6), 500, 300, 8)
    monkeypatch.setitem(curves.SIZES, ("cpu", True), small)
    monkeypatch.setattr(curves, "limits", lambda device, quick: Limits(1e11, 5e10, 1e10, 4))
    labels: list[str] = []
    with into(tmp_path):
        rows = curves.curve(name, "cpu", True, labels.append)
        assert len(labels) == curves.steps(name, "cpu", True)
        assert rows == recorded("cpu")[f"curve-{name}"]["rows"]
        report.render()
    assert (tmp_path / "plots" / f"cpu-curve-{name}.png").exists()
    assert all(row["time (s)"] > 0 for row in rows)
    assert any(row["limit (s)"] for row in rows)


@pytest.mark.parametrize("vary", ensembles.SHARED.values())
def test_the_plain_loop_finds_the_same_weights(vary):
    for per_axis, draws in ((3, 40), (6, 20)):  # fewer features than draws, and more
        model, training = ensembles.model(per_axis), ensembles.line(draws, vary, "cpu")
        a, b = ensembles.solved(model, training, 5), ensembles.fitted(model, training, 5)
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8 * float(a.abs().max()))


def test_steps_with_exact_targets_are_measured_beside_the_usual_ones(tmp_path):
    with into(tmp_path):
        usual, exact = targets.run(quick=True)
        part = "gpu" if torch.cuda.is_available() else "cpu"
        assert recorded(part)["targets"]["rows"] == [usual, exact]
        assert "with exact targets" in report.render().read_text()
    assert (usual["target"], usual["ratio"], exact["target"]) == ("J1", 1, "J0")
    assert exact["steps"] >= 10
    assert exact["step (ms)"] > 0
