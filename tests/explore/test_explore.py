"""The page's numbers are the library's: maps, samples, snippets and words; jobs end when nobody waits for them."""

from __future__ import annotations

import contextlib
import io
import json
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.core.estimate import Estimate
from vkernel.explore import compute, simulate, words
from vkernel.explore.jobs import Desk, Workers
from vkernel.explore.presets import preset
from vkernel.explore.snippet import snippet
from vkernel.explore.state import LAYERS, SAMPLERS, State

TRIPLE, CLUSTERS = preset("triple"), preset("clusters")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes with which every sampler takes less than a second."""
    monkeypatch.setattr(simulate, "MEMBERS", {"linear": 6, "ntk": 3, "mlp": 3})
    monkeypatch.setattr(simulate, "EACH", {"linear": 40, "ntk": 20, "mlp": 20})
    monkeypatch.setattr(simulate, "SHOWN_EACH", {"linear": 50, "ntk": 20, "mlp": 20})
    monkeypatch.setattr(simulate, "NETWORK", simulate.NETWORK | {"steps": 20, "width": 8})
    monkeypatch.setattr(simulate, "PER_AXIS", {1: 8, 2: 5})
    monkeypatch.setattr(simulate, "SETS", 8)
    monkeypatch.setattr(simulate, "ALONE", 300)
    monkeypatch.setattr(simulate, "LAZY_DRAWS", 24)


def test_the_map_is_the_noise_of_the_target() -> None:
    """Two points on the line: C and s in closed form."""
    state = State(points=((-1.0,), (1.0,)), weights=(3, 1), t=0.1, layers=LAYERS)
    found = compute.exact(state)
    process = state.make_process()
    t = torch.tensor(0.1, dtype=torch.float64)
    alpha, var = float(process.alpha(t)), float(process.S(t))
    x = np.linspace(-2, 2, compute.NODES)
    lean = alpha * x / var + 0.5 * np.log(1 / 3)
    C = (alpha / var) ** 2 / np.cosh(lean) ** 2
    s = (alpha * np.tanh(lean) - x) / var
    assert found.fraction == pytest.approx(C / (C + s**2), abs=1e-6)
    assert found.density is not None
    assert np.trapezoid(found.density, x) == pytest.approx(1, abs=0.01)


def test_boundary_lines_enclose_what_the_metric_counts() -> None:
    state = State(points=CLUSTERS, t=0.1, layers=("boundaries",))
    score = vk.EmpiricalScore(compute.empirical(state), state.make_process())
    lines = compute.exact(state).lines
    assert lines
    along = torch.tensor(np.concatenate(lines, 1).T)
    s, C = score.with_covariance(along, state.t)
    fraction = C.trace() / (C.trace() + s.square().sum(-1))
    level = torch.minimum(C.trace() * score.process.S(torch.tensor(state.t, dtype=torch.float64)), 2 * fraction)
    assert float((level - 1).abs().median()) < 0.02
    inside = vk.metrics.boundary_mass(along, score, t=state.t).value
    assert 0.2 < inside < 0.8  # places on an outline are in and out by rounding


def test_arrows_point_along_the_score() -> None:
    state = State(points=CLUSTERS, t=0.2, layers=("arrows",))
    x0, y0, x1, y1 = compute.exact(state).arrows
    middle = torch.tensor(np.stack([(x0 + x1) / 2, (y0 + y1) / 2], 1))
    s = vk.EmpiricalScore(compute.empirical(state), state.make_process())(middle, state.t).numpy()
    cross = (x1 - x0) * s[:, 1] - (y1 - y0) * s[:, 0]
    assert np.abs(cross).max() < 1e-6 * np.abs(s).max()
    assert ((x1 - x0) * s[:, 0] + (y1 - y0) * s[:, 1] >= 0).all()


def test_a_drag_is_answered_in_time() -> None:
    """64 points on the grid of 100 × 100: under 300 ms with every layer, and the words; the best of five."""
    rng = np.random.default_rng(0)
    took = []
    for k in range(5):
        state = State(points=tuple(map(tuple, rng.uniform(-1.5, 1.5, (64, 2)))), t=0.05 + 0.05 * k, layers=LAYERS)
        start = time.perf_counter()
        found = compute.exact(state)
        compute.noise_share(state)
        took.append(time.perf_counter() - start)
        assert found.fraction.shape == (100, 100)
    assert min(took) < 0.25


@pytest.mark.parametrize("n", [1, 1000])
def test_one_point_and_a_thousand(n: int, small: None) -> None:
    points = tuple(map(tuple, np.random.default_rng(1).uniform(-1.9, 1.9, (n, 2)).tolist()))
    state = State(points=points, t=0.1, layers=LAYERS)
    assert np.isfinite(compute.exact(state).fraction).all()
    found = simulate.simulate(state)
    assert (found.gap is None) == (n == 1)
    assert "One training point" in words.said(state, compute.noise_share(state), found).sentences[0] or n > 1


@pytest.mark.parametrize("points", [TRIPLE, CLUSTERS], ids=["line", "plane"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_copied_snippet_gives_the_page_s_numbers(sampler: str, points: Any, small: None) -> None:
    K = {"effective": 4, "ntk": 0}.get(sampler, 1)
    state = State(
        points=points, weights=(2,) + (1,) * (len(points) - 1), sampler=sampler, eps=0.01, steps=12, seed=3, K=K, t=0.2
    )
    result = simulate.simulate(state)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compile(snippet(state), "snippet", "exec"), namespace)
    assert result.gap is not None
    assert namespace["gap"] == pytest.approx(result.gap.value, abs=1e-12)
    fraction = compute.exact(state).fraction
    assert namespace["fraction"].reshape(fraction.shape).numpy() == pytest.approx(fraction, abs=1e-6)
    assert namespace["noise"] == compute.noise_share(state)
    assert "gap mass" in said.getvalue()
    assert result.frames.shape[0] == 13
    assert result.frames.shape[2] == state.d
    assert np.isfinite(result.frames).all()
    assert result.law.shape == (simulate.BINS[state.d],) * state.d
    assert (result.twin is None) == (sampler == "exact" or (K == 0 and sampler not in ("exact", "naive")))
    sentences = words.said(state, compute.noise_share(state), result).sentences
    assert all(s.endswith(".") for s in sentences)
    share = simulate.variance(result, state.t)
    assert (share is None) == (sampler in ("exact", "naive"))
    if share is not None:
        assert np.isfinite(share).all()
        assert share.min() >= 0
        assert share.max() <= 1


@pytest.mark.parametrize("process", ["vp", "vpsong", "cosine", "flow", "toy", "edm"])
def test_every_process_flows_to_the_training_points(process: str, small: None) -> None:
    state = State(points=TRIPLE, process=process, eps=0.001, steps=100)
    found = simulate.simulate(state)
    end = found.frames[-1, :, 0]
    assert np.abs(end[:, None] - np.array([-1, 0, 1])).min(1).max() < 0.15
    assert found.gap is not None
    assert found.gap.value < 0.05


def test_particles_of_the_naive_estimator_take_the_library_s_chain(small: None) -> None:
    state = State(points=CLUSTERS, sampler="naive", kappa=0.03, steps=15, seed=5)
    process = state.make_process()
    score = vk.EmpiricalScore(compute.empirical(state), process)
    x_T = process.prior((simulate.ALONE, 2), dtype=torch.float64, generator=5)
    x = vk.sample.naive(score, process, x_T, kappa=0.03, steps=15, spacing="log", generator=5)
    found = simulate.simulate(state)
    assert found.frames[0] == pytest.approx(x_T[: simulate.PARTICLES].numpy(), abs=1e-6)
    assert found.frames[-1] == pytest.approx(x[: simulate.PARTICLES].numpy(), abs=1e-6)


def test_runs_depend_on_nothing_but_what_concerns_them() -> None:
    a = State(sampler="exact", kappa=0.1, K=4, t=0.5, dark=True)
    assert simulate.concerns(a) == simulate.concerns(State())
    assert simulate.concerns(a.but(sampler="naive")) != simulate.concerns(State(sampler="naive"))
    assert simulate.concerns(a.but(sampler="linear")) != simulate.concerns(State(sampler="linear"))
    assert simulate.concerns(State(seed=1)) != simulate.concerns(State())


def test_words_carry_errors_and_claim_no_more_than_they_allow() -> None:
    def result(gap: Estimate, twin: Estimate | None, sampler: str = "linear", K: int = 1) -> simulate.Result:
        none = np.zeros(1)
        state = State(sampler=sampler, K=K)
        return simulate.Result(state, none, none, none, none, none, (), gap, twin, gap)

    half = Estimate(0.18, 0.01, 0.16, 0.2), Estimate(0.09, 0.01, 0.07, 0.11)
    assert words.short(half[0]) == ".18 ± .01"
    assert "2 × the noiseless-target value, .09 ± .01" in words.tells(result(*half))
    assert "within errors of" in words.tells(result(half[0], Estimate(0.17, 0.01, 0.15, 0.19)))
    assert "no noise" in words.tells(result(half[0], None, K=0))
    assert words.short(Estimate(0.0, 0.0, 0.0, 0.002)) == "less than .002"
    assert words.short(Estimate.exact(0.25)) == ".25"
    assert words.short(Estimate(1.0, 0.0, 0.99, 1.0)) == "1.00"
    assert "more than that of the exact score" in words.tells(
        result(half[0], Estimate(0.0, 0.0, 0.0, 0.002), sampler="naive")
    )
    assert words.said(State(), Estimate.exact(0.5), None).number == "…"


# --- jobs -----------------------------------------------------------------------------------------------------------


class Heard:
    def __init__(self) -> None:
        self.done: list[Any] = []
        self.failed: list[Exception] = []
        self.told: list[tuple[str, float]] = []
        self.event = threading.Event()

    def calls(self) -> tuple[Any, Any, Any]:
        def done(result: Any) -> None:
            self.done.append(result)
            self.event.set()

        def failed(error: Exception) -> None:
            self.failed.append(error)
            self.event.set()

        return done, failed, lambda label, share: self.told.append((label, share))


def busy(tell: Any, seconds: float = 5.0) -> str:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        tell("working", 0.5)
        time.sleep(0.005)
    return "finished"


def test_a_job_tells_and_ends() -> None:
    desk, heard = Desk(Workers(1)), Heard()
    desk.submit(lambda tell: busy(tell, 0.05), *heard.calls())
    assert heard.event.wait(5)
    assert heard.done == ["finished"]
    assert heard.told
    bad = Heard()
    desk.submit(lambda tell: 1 / 0, *bad.calls())
    assert bad.event.wait(5)
    assert isinstance(bad.failed[0], ZeroDivisionError)


def test_the_latest_job_wins_and_a_cancelled_one_is_silent() -> None:
    desk, old, new = Desk(Workers(1)), Heard(), Heard()
    first = desk.submit(busy, *old.calls())
    assert first is not None
    while not old.told:
        time.sleep(0.005)
    second = desk.submit(lambda tell: busy(tell, 0.02), *new.calls())
    assert second is not None
    assert new.event.wait(5)
    assert first.thread is not None
    first.thread.join(5)
    assert not first.thread.is_alive()
    assert old.done == old.failed == []
    desk.submit(busy, *old.calls())
    assert desk.busy
    desk.close()
    assert not desk.busy
    assert desk.submit(busy, *old.calls()) is None


def test_few_jobs_run_at_once_over_all_tabs() -> None:
    workers, running, most, lock = Workers(2), 0, 0, threading.Lock()

    def work(tell: Any) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.03)
        with lock:
            running -= 1

    heard = [Heard() for _ in range(10)]
    for h in heard:
        Desk(workers).submit(work, *h.calls())
    assert all(h.event.wait(5) for h in heard)
    assert most == 2


def test_a_job_that_waits_leaves_when_cancelled() -> None:
    workers, front, back = Workers(1), Heard(), Heard()
    first, second = Desk(workers), Desk(workers)
    first.submit(busy, *front.calls())
    job = second.submit(busy, *back.calls())
    assert job is not None
    assert job.thread is not None
    second.cancel()
    job.thread.join(2)
    assert not job.thread.is_alive()
    first.close()
    with pytest.raises(InputError):
        Workers(0)


def test_closing_ends_all_jobs() -> None:
    workers, heard = Workers(1), Heard()
    jobs = [Desk(workers).submit(busy, *heard.calls()) for _ in range(3)]
    workers.close(5)
    late = Desk(workers).submit(busy, *heard.calls())
    assert late is not None
    assert late.thread is not None
    late.thread.join(2)
    assert not any(j is None or j.thread is None or j.thread.is_alive() for j in [*jobs, late])
    assert heard.done == heard.failed == []


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_stops_soon_after_it_is_cancelled(sampler: str) -> None:
    """In the plane with many points, at its full size, wherever it is: no operation of torch takes much of a second."""
    desk, heard = Desk(Workers(1)), Heard()
    points = tuple(map(tuple, np.random.default_rng(1).uniform(-1.9, 1.9, (200, 2)).tolist()))
    job = desk.submit(partial(simulate.simulate, State(points=points, sampler=sampler, steps=300)), *heard.calls())
    assert job is not None
    assert job.thread is not None
    work = {"naive": "naive", "effective": "predicting", "linear": "training", "ntk": "training", "mlp": "training"}
    while not any(work.get(sampler, "exact") in label for label, _ in heard.told):
        time.sleep(0.005)
    time.sleep(0.2)
    start = time.perf_counter()
    desk.cancel()
    job.thread.join(10)
    assert not job.thread.is_alive()
    assert time.perf_counter() - start < 3  # a second, on a machine that has other things to do
    assert heard.done == heard.failed == []


def test_adding_never_ends_where_points_are(tab: Any) -> None:
    tab.receive({"kind": "preset", "name": "triple"})
    for _ in range(60):
        tab.receive({"kind": "add"})
    assert len(set(tab.state.points)) == 63


def test_what_belongs_to_an_earlier_state_is_named(small: None) -> None:
    state = State(points=TRIPLE, sampler="linear", steps=8, layers=LAYERS)
    found = simulate.simulate(state)
    assert words.earlier(state, found, (found, state.t)) == (False, False, "")
    assert words.earlier(state.but(t=0.3), found, (found, state.t)) == (False, True, "of an earlier state: V")
    moved = state.but(points=((-1.0,), (0.1,), (1.0,)))
    assert words.earlier(moved, found, (found, state.t)) == (True, True, "of an earlier state: V, particles, curves")
    assert words.earlier(moved.but(layers=()), found, None) == (True, False, "")
    assert words.earlier(state, None, None) == (False, False, "V follows once the run has ended")


# --- the page without a browser ---------------------------------------------------------------------------------------


@pytest.fixture
def tab() -> Any:
    pytest.importorskip("panel")
    from vkernel.explore.page import Tab

    made = Tab(Workers(1), "v=1")
    made.said = []  # type: ignore[attr-defined]
    made._send = made.said.append  # type: ignore[method-assign]
    return made


def test_messages_change_the_state_or_are_answered_with_a_sentence(tab: Any) -> None:
    tab.receive({"kind": "preset", "name": "triple"})
    assert tab.state.d == 1
    tab.receive({"kind": "point", "index": 1, "x": 0.25, "y": 0, "weight": 4})
    assert tab.state.points[1] == (0.25,)
    assert tab.state.weights == (1, 4, 1)
    tab.receive({"kind": "add"})
    tab.receive({"kind": "remove", "index": 0})
    assert len(tab.state.points) == 3
    tab.receive({"kind": "csv", "text": "0,0\n1,1\n"})
    assert tab.state.points == ((0.0, 0.0), (1.0, 1.0))
    for k in range(5):
        tab.receive({"kind": "tour", "step": k})
    before = tab.state
    for bad in (
        {"kind": "nope"},
        {"kind": "set", "eps": "nan"},
        {"kind": "set", "points": []},
        {"kind": "set", "sampler": "magic"},
        {"kind": "csv", "text": "nan,0\n"},
        {"kind": "csv", "text": 5},
        {"kind": "point", "index": 99, "x": 0},
        {"kind": "point", "index": "a", "x": 0},
        {"kind": "drag", "x": ["a"], "y": [0]},
        {"kind": "drag", "x": [0, 1], "y": [0]},
        {"kind": "time", "t": None},
        {"kind": "point", "index": 0, "x": float("nan"), "y": 0},
        {"kind": "tour", "step": 9},
        {"kind": "preset"},
        {"kind": ["x"]},
        {},
        None,
        "text",
    ):
        tab.said.clear()
        tab.receive(bad)
        assert any(m["kind"] == "say" for m in tab.said), bad
        assert tab.state == before


def test_the_points_own_tool_is_followed_and_corrected(tab: Any) -> None:
    source = tab.pictures.points
    source.data = {"x": [0.0, 5.0, 0.5], "y": [0.1234, 0.0, 0.5], "size": [12, 12, 12]}
    assert tab.state.points == ((0.0, 0.123), (2.0, 0.0), (0.5, 0.5))  # back to the window's edge
    tab.receive({"kind": "point", "index": 2, "x": 0.5, "y": 0.5, "weight": 7})
    source.data = {"x": [0.0, 0.5], "y": [0.123, 0.5], "size": [12, 12]}
    assert tab.state.weights == (1, 7)
    for broken in ([], [float("nan")], ["a"]):
        source.data = {"x": broken, "y": [0.0] * len(broken), "size": [1] * len(broken)}
        assert len(tab.state.points) == 2
        assert list(source.data["x"]) == [0.0, 0.5]


def test_a_closed_tab_has_no_job(tab: Any) -> None:
    from bokeh.document import Document

    document = Document()
    tab.open(document)
    tab.receive({"kind": "set", "sampler": "mlp"})
    assert tab.desk.busy
    for callback in document.session_destroyed_callbacks:
        callback(None)
    assert not tab.desk.busy
    tab.receive({"kind": "set", "sampler": "linear"})
    assert not tab.desk.busy


def test_the_report_is_json_with_the_numbers(tab: Any, small: None) -> None:
    tab.result = simulate.simulate(tab.state)
    found = json.loads(json.dumps(tab.report()))
    assert found["gap_mass"]["value"] == tab.result.gap.value
    assert found["state"]["points"] == [list(p) for p in tab.state.points]
    assert "import vkernel" in found["python"]


def test_tiles_lie_side_by_side() -> None:
    from vkernel.explore.figures import tiles

    for count in range(7):
        places = tiles(count)
        assert len(places) == count
        for k, (x, y, a) in enumerate(places):
            assert x >= 0
            assert y >= 0
            assert max(x, y) + a <= 3 + 1e-9
            for u, v, b in places[k + 1 :]:
                assert x + a <= u or u + b <= x or y + a <= v or v + b <= y


def test_the_page_has_the_package_s_colours_and_its_text_no_address_elsewhere() -> None:
    import re

    import vkernel.explore
    from vkernel.plots import base

    assets = Path(vkernel.explore.__file__).parent / "assets"
    css, style = (
        p.read_text() for p in (assets / "page.css", assets.parents[1] / "reports" / "templates" / "style.css")
    )
    for theme, text in zip(
        style.split("@media (prefers-color-scheme: dark)"), css.split('[data-theme="dark"]'), strict=True
    ):
        for name in ("ink", "soft", "paper", "page", "line", "accent", "mark", "warn"):
            want = re.search(rf"--{name}: (#\w+)", theme)
            have = re.search(rf"--{name}: (#\w+)", text)
            assert want is not None
            assert have is not None
            assert want[1] == have[1], name
    for dark, text in ((False, css.split('[data-theme="dark"]')[0]), (True, css.split('[data-theme="dark"]')[1])):
        with base.style(dark=dark):
            assert f"--law: {base.lines()[0]}" in text
            assert f"--exact: {base.lines()[1]}" in text
    for file in assets.iterdir():
        assert "http" not in file.read_text().replace("http-equiv", "")


def test_a_port_that_is_taken_and_an_address_that_is_not_here_are_said() -> None:
    pytest.importorskip("panel")
    import socket

    from vkernel.explore.serve import _origins, server

    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        with pytest.raises(InputError, match="taken"):
            server(held.getsockname()[1])
    with pytest.raises(InputError, match="no address"):
        server(0, "203.0.113.7")
    with pytest.raises(InputError, match="IPv4"):
        server(0, "::1")
    with pytest.raises(InputError, match="65535"):
        server(70000)
    assert set(_origins("127.0.0.1", 5007)) == {"127.0.0.1:5007", "localhost:5007"}
    assert "*" not in "".join(_origins("0.0.0.0", 5007))
