"""The page in a real browser: drag, undo, play, probe, train, compare, share; and what people do to pages."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import signal
import socket
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import numpy as np
import pytest
from browser import LAPTOP, SMALLER, Server, Watched

import vkernel as vk
from vkernel.explore.captions import POINTS
from vkernel.explore.state import State

pytest.importorskip("tornado", reason="the page needs Tornado: pip install 'vkernel[explore]'")

TRIPLE = State(sampler="exact", steps=10)  # {-1, 0, 1}; its samples take a moment
LINEAR = State(ratio=4.0, steps=10)  # with these the ensembles take a second
HEXAGON = State(points=POINTS["hexagon"], sampler="exact", steps=10)
SQUARE = State(points=POINTS["square"], ratio=4.0, steps=10)
PHONE: dict[str, Any] = {
    "viewport": {"width": 390, "height": 844},
    "has_touch": True,
    "is_mobile": True,
    "device_scale_factor": 2,
}
DRAGS = 30


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server()
    yield made
    assert "stopped." in made.stop()


@pytest.fixture(scope="module")
def browser(chromium: Any) -> Iterator[Any]:
    context = chromium.new_context(accept_downloads=True)
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    yield context
    context.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Watched]:
    made = Watched(browser)
    yield made
    made.tab.close()
    assert made.errors == []


def address(server: Server, state: State) -> str:
    return f"{server.address}?{state.to_query()}"


def test_page_loads_fits_every_screen_and_requests_no_other_host(page: Watched, server: Server) -> None:
    for name, start, dark in (("plane", SQUARE, True), ("line", LINEAR, False)):
        state = start.replace(dark=dark, compare=name == "plane")
        tab = page.open(address(server, state))
        assert page.state() == state
        assert "explore" in tab.title()
        assert "copied" in tab.inner_text("#headline")
        assert tab.evaluate("document.documentElement.dataset.theme") == ("dark" if dark else "light")
        for size in (*SMALLER, LAPTOP):
            tab.set_viewport_size(size)
            tab.wait_for_function("w => document.documentElement.scrollWidth <= w", arg=size["width"])
            tab.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
            assert page.wide() == []
            assert page.overlapping() == []
            stretched = (
                "() => [...document.querySelectorAll('.tile canvas')].map((c) => c.offsetWidth / c.offsetHeight)"
            )
            assert np.ptp(tab.evaluate(stretched)) < 0.05
            page.save(f"{name}-{size['width']}-{'dark' if dark else 'light'}")
    assert page.hosts == {urlsplit(server.address).netloc}


def test_drags_are_followed_at_once_and_never_pulled_back(page: Watched, server: Server) -> None:
    tab = page.open(address(server, HEXAGON))
    tab.evaluate(
        """() => {
          Object.assign(window, { waits: [], counts: [], maps: 0, moved: 0, last: false, jumps: 0, hand: null })
          const canvas = document.getElementById('canvas')
          const check = () => { if (hand && points()[0].some((v, c) => v !== hand[c])) jumps++ }
          const follow = () => { if (hand) { hand = [...points()[0]]; moved = performance.now() } }
          canvas.addEventListener('pointermove', follow)
          canvas.addEventListener('pointerdown', () => { hand = [...points()[0]] })
          addEventListener('map', () => {
            maps++
            check()
            if (last && moved && explore.current) { waits.push(performance.now() - moved); last = false }
          })
        }"""
    )
    rates, places = [], []
    for k in range(DRAGS):
        x, y = page.pixel(*tab.evaluate("points()[0]"))
        way = (1, 0.3) if k % 2 else (-1, -0.3)
        tab.mouse.move(x, y)
        tab.mouse.down()
        begun = tab.evaluate("() => { maps = 0; return performance.now() }")
        for step in range(1, 9):
            tab.mouse.move(x + 5 * step * way[0], y + 5 * step * way[1])
            tab.wait_for_timeout(15)
        rates.append(tab.evaluate("begun => 1000 * maps / (performance.now() - begun)", begun))
        tab.evaluate("() => { moved = 0; last = true }")  # of the next step, before the drop
        tab.mouse.move(x + 42 * way[0], y + 42 * way[1])
        tab.mouse.up()
        page.settle()
        places.append((tab.evaluate("points()[0]"), [x + 42 * way[0], y + 42 * way[1]]))
    waits = tab.evaluate("waits").copy()
    print(f"drop to map {statistics.median(waits):.0f} ms, {statistics.median(rates):.0f} updates a second")
    assert len(waits) >= DRAGS
    assert statistics.median(waits) < 600  # the goal is 100 on two free cores
    assert statistics.median(rates) > 3  # the goal is 15
    assert tab.evaluate("jumps") == 0
    for point, (x, y) in places[-1:]:
        assert page.pixel(*point) == pytest.approx((x, y), abs=1.5)
    assert page.state().points[1:] == HEXAGON.points[1:]
    assert tab.evaluate("explore.store.past.length") == DRAGS  # a drag is one step of undo
    begun = time.monotonic()
    page.idle()
    assert time.monotonic() - begun < 5  # exact samples follow


def test_click_adds_and_selects_while_the_server_is_silent(page: Watched, server: Server) -> None:
    tab = page.open(address(server, TRIPLE))
    server.process.send_signal(signal.SIGSTOP)
    try:
        x, y = page.pixel(0.5)
        tab.mouse.click(x, y)
        assert tab.inner_text("#point-name") == "point 4 of 4"
        assert tab.evaluate("points()[3]") == pytest.approx([0.5], abs=0.02)
        tab.mouse.click(*page.pixel(1.4))
        tab.click("#point-remove")  # the selected one, not the first
        assert tab.evaluate("points().length") == 4
        assert tab.evaluate("points().slice(0, 3)") == [[-1], [0], [1]]
        tab.keyboard.press("Control+z")
        tab.keyboard.press("Control+z")
        tab.keyboard.press("Control+z")
        assert tab.evaluate("points()") == [[-1], [0], [1]]
        tab.keyboard.press("Control+Shift+z")
        assert tab.evaluate("points().length") == 4
    finally:
        server.process.send_signal(signal.SIGCONT)
    page.idle()
    assert len(page.state().points) == 4


def test_everything_is_undone_and_redone(page: Watched, server: Server) -> None:
    tab = page.open(address(server, TRIPLE))
    start, seen = tab.evaluate("JSON.stringify(explore.store.doc)"), []

    def act(name: str, action: Any) -> None:
        before = tab.evaluate("explore.store.past.length")
        action()
        tab.wait_for_function("n => explore.store.past.length > n", arg=before)
        seen.append((name, tab.evaluate("JSON.stringify(explore.store.doc)")))

    act("add", lambda: tab.click("#point-add"))
    act("remove", lambda: tab.click("#point-remove"))
    act("weight", lambda: (tab.fill("#point-w", "5"), tab.keyboard.press("Enter")))
    tab.fill("#point-x", "0.3")
    tab.keyboard.press("Enter")
    tab.keyboard.press("Control+z")  # the field follows, although it has the focus
    assert tab.input_value("#point-x") == "1"
    tab.fill("#point-w", "2")
    tab.keyboard.press("Enter")
    assert tab.evaluate("[points(), explore.store.state.weights]") == [[[-1], [0], [1]], [1, 1, 2]]
    tab.keyboard.press("Control+z")
    act("preset", lambda: tab.select_option("#preset", "square"))
    act("view", lambda: tab.click("[data-view=outcome]"))
    act("control", lambda: tab.select_option("#control-sampler", label="the naive estimator"))
    act("map", lambda: (tab.click("[data-view=field]"), tab.select_option("#map", "share")))
    act("layer", lambda: tab.click("[data-layer=boundaries]"))
    act("time", lambda: (tab.focus("#time"), tab.keyboard.press("ArrowRight")))
    act("theme", lambda: tab.click("#theme"))
    act("import", lambda: csv(tab, "x,y,weight\n0,0,1\n1,0,3\n1,1,1\n"))
    act("tour", lambda: tab.click("#tour"))
    act("leave", lambda: tab.keyboard.press("Escape"))
    kept = json.loads(seen[-1][1])
    assert kept["state"]["points"] == [[0, 0], [1, 0], [1, 1]]  # leaving the tour restores the user's points
    assert kept["state"]["weights"] == [1, 3, 1]
    last = seen[-1][1]
    while not tab.is_disabled("#undo"):
        tab.click("#undo")
    assert tab.evaluate("JSON.stringify(explore.store.doc)") == start
    while not tab.is_disabled("#redo"):
        tab.keyboard.press("Control+y")
    assert tab.evaluate("JSON.stringify(explore.store.doc)") == last
    page.settle()


def test_malformed_address_gives_the_default_and_odd_values_are_shown_truly(page: Watched, server: Server) -> None:
    tab = page.open(f"{server.address}?v=1&x=%00%ff2garbled!&sampler=<script>&t=1e999", idle=False)
    assert "This address could not be read" in tab.inner_text("#notice")
    assert page.state() == State()
    state = LINEAR.replace(ratio=3.0, steps=17, t=0.0123, sampler="effective", layers=("members", "law"))
    tab = page.open(address(server, state), idle=False)
    assert tab.inner_text("#value-ratio") == "3"
    assert tab.inner_text("#time-value") == "t = 0.0123"
    before = tab.evaluate("document.getElementById('control-ratio').value")
    tab.select_option("#control-process", label="cosine") if tab.is_visible("#control-process") else None
    page.settle()
    assert tab.evaluate("document.getElementById('control-ratio').value") == before
    assert page.state().ratio == 3.0
    assert page.state().steps == 17
    tab.focus("#control-ratio")
    tab.keyboard.press("ArrowRight")
    page.settle()
    assert page.state().ratio == 4.0
    tab.keyboard.press("ArrowLeft")
    page.settle()
    assert page.state().ratio == 3.0


def test_particles_play_from_visible_noise_pause_and_end_on_points(page: Watched, server: Server) -> None:
    tab = page.open(address(server, HEXAGON.replace(t=0.2)))
    before = tab.evaluate("total()")
    tab.evaluate(  # a busy machine may see it too late
        """() => {
          const mark = document.getElementById('outdated')
          window.said = []
          window.most = 0
          new MutationObserver(() => said.push(mark.textContent)).observe(mark, { childList: true })
          explore.store.listen(({ state }) => { most = Math.max(most, state.t) })
        }"""
    )
    tab.click("#play")
    tab.wait_for_function("() => most > 0.4 && said.some((text) => text.startsWith('from random places at t = '))")
    tab.wait_for_function("() => explore.store.state.t < 0.3")
    tab.click("#play")
    tab.wait_for_function("old => total() !== old", arg=before)  # the map keeps up with the time
    page.settle()
    shown = float(tab.inner_text("#time-value").removeprefix("t = "))
    assert page.state().t == pytest.approx(shown, rel=0.01)
    tab.keyboard.press("Control+z")
    assert tab.evaluate("explore.store.state.t") == 0.2  # playing is one step of undo
    tab.focus("#time")
    tab.keyboard.press("End")
    page.settle()
    assert page.state().t == pytest.approx(0.001)
    end = tab.evaluate("Array.from(explore.result.paths.at(0.001))")
    distance = np.linalg.norm(np.reshape(end, (-1, 1, 2)) - np.array(HEXAGON.points), axis=-1).min(1)
    assert np.quantile(distance, 0.9) < 0.2  # the exact score ends on training points


def test_probe_train_another_compare_and_factors(page: Watched, server: Server) -> None:
    tab = page.open(address(server, LINEAR))
    box = tab.locator("#canvas").bounding_box()
    tab.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 0.3 * box["height"])
    tab.wait_for_function("() => document.getElementById('probe').textContent.startsWith('x = ')")
    assert "σ² tr C" in tab.inner_text("#probe")
    tab.mouse.move(5, 5)
    tab.wait_for_function("() => document.getElementById('probe').textContent.startsWith('Point at')")
    first = tab.evaluate("Array.from(explore.map.arrays.arrows.data)")
    tab.click("#another")
    tab.wait_for_function("() => explore.map.arrays.exact_arrows")
    assert tab.evaluate("Array.from(explore.map.arrays.arrows.data)") != first
    one = tab.evaluate("Array.from(explore.map.arrays.arrows.data)")
    tab.click("#another")
    tab.wait_for_function(
        "old => explore.settled && explore.map.arrays.arrows.data.some((v, k) => v !== old[k])", arg=one
    )
    assert tab.evaluate("explore.stage.cells.length") == 1
    tab.click("#compare")
    tab.wait_for_function("() => explore.stage.cells.length === 2")
    assert page.state().compare
    assert tab.evaluate("explore.result.arrays.twin_law.data.length") > 10
    page.save("compare")
    tab.click("#factors .factor:nth-child(1) button:nth-child(1)")
    page.idle()
    a = tab.inner_text("#headline")
    tab.click("#factors .factor:nth-child(1) button:nth-child(2)")
    page.idle()
    assert tab.inner_text("#headline") != a
    assert tab.is_visible("#factors-text")
    assert tab.locator("#factors .factor").count() == 6


def test_ensemble_is_cancelled_and_the_page_stays_responsive(page: Watched, server: Server) -> None:
    tab = page.open(address(server, HEXAGON))
    tab.select_option("#control-sampler", label="small networks, trained")
    tab.wait_for_function("() => document.getElementById('job-label').textContent.includes('training 8 models')")
    before = tab.evaluate("total()")
    begun = time.monotonic()
    tab.focus("#time")
    tab.keyboard.press("PageDown")
    tab.wait_for_function("old => total() !== old", arg=before)  # the page answers while models train
    assert time.monotonic() - begun < 6
    tab.click("#job-cancel")
    assert tab.inner_text("#job-label") == "stopped"
    assert tab.inner_text("#outdated") == "of an earlier state: particles, laws"
    tab.click("#job-run")
    tab.wait_for_function("() => document.getElementById('app').classList.contains('busy')")
    tab.select_option("#control-sampler", label="the exact score")  # the latest wins
    page.idle()
    assert tab.is_hidden("#outdated")


def test_address_restores_the_picture(page: Watched, server: Server) -> None:
    tab = page.open(address(server, HEXAGON))
    tab.select_option("#preset", "clusters")
    tab.click("[data-layer=boundaries]")
    tab.click("[data-view=outcome]")
    page.idle()
    page.settle()
    look = "[total(), Array.from(explore.result.paths.at(0.05)), document.getElementById('panel').innerText]"
    tab.mouse.move(5, 5)
    numbers, picture = tab.evaluate(look), tab.evaluate("document.getElementById('canvas').toDataURL()")
    page.open(tab.url)
    tab.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert tab.evaluate(look) == numbers
    assert tab.evaluate("document.getElementById('canvas').toDataURL()") == picture


@pytest.mark.parametrize("count", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_tabs_at_once_do_not_disturb_one_another(browser: Any, server: Server, count: int) -> None:
    tabs = [Watched(browser) for _ in range(count)]
    for k, tab in enumerate(tabs):
        tab.open(address(server, LINEAR.replace(seed=k)), idle=False)
    for k, tab in enumerate(tabs):
        tab.idle()
        assert tab.state().seed == k
    shown = [tab.tab.evaluate("Array.from(explore.result.arrays.law.data)") for tab in tabs]
    assert shown[0] != shown[1]
    tabs[0].tab.select_option("#preset", "spiral")
    tabs[0].settle()
    for k, tab in enumerate(tabs[1:], start=1):
        assert tab.tab.evaluate("Array.from(explore.result.arrays.law.data)") == shown[k]
    for tab in tabs:
        assert tab.errors == []
        tab.tab.close()


def csv(tab: Any, text: str) -> None:
    tab.set_input_files("#csv-file", {"name": "p.csv", "mimeType": "text/csv", "buffer": text.encode()})


def test_files_are_imported_or_refused_with_a_sentence(page: Watched, server: Server) -> None:
    tab = page.open(address(server, TRIPLE))
    said = "w => document.getElementById('notice-text').textContent.includes(w)"
    csv(tab, "x,y,weight\n0,0,1\n10,0,3\n10,10,1\n")
    tab.wait_for_function(said, arg="3 points imported")
    assert page.state().weights == (1, 3, 1)
    for text, word in (
        ("0,1\n" * 400_000, "MB"),
        ("0,nan\n1,1\n", "finite"),
        ("0,1\n" * 1001, "1,001"),
        ("hello\nworld\n", "finite number"),
    ):
        csv(tab, text)
        tab.wait_for_function(said, arg=word)
        assert len(page.state().points) == 3
    rows = np.random.default_rng(3).normal(size=(1000, 2))
    csv(tab, "\n".join(f"{a:.5f},{b:.5f}" for a, b in rows))
    tab.wait_for_function(said, arg="1,000 points imported")
    assert len(page.state().points) == 1000
    tab.click("#point-add")
    tab.wait_for_function(said, arg="up to 1,000 points")
    tab.fill("#point-x", "")
    tab.keyboard.press("Enter")
    tab.wait_for_function(said, arg="must be a number")


def choose(tab: Any, what: str) -> None:
    """Press one of the entries of the menu."""
    tab.click("#save summary")
    tab.click(what)


def test_exports_agree_with_the_page(page: Watched, server: Server, tmp_path: Path) -> None:
    from PIL import Image

    tab = page.open(address(server, LINEAR))
    choose(tab, "#python")
    tab.wait_for_selector("#code[open]")
    tab.click("#code-copy")
    script = tab.evaluate("navigator.clipboard.readText()")
    found = {}
    for name in ("json", "csv-save", "png"):
        with tab.expect_download() as download:
            choose(tab, f"#{name}")
        found[name] = tmp_path / name
        download.value.save_as(found[name])
    numbers, namespace = json.loads(found["json"].read_text()), {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(script, "script", "exec"), namespace)
    gap = cast(vk.Estimate, namespace["gap"]).value
    assert gap == pytest.approx(numbers["gap_mass"]["value"], abs=1e-9)
    new = float(tab.text_content("#headline").split("·")[1].split("%")[0].split("±")[0])
    assert new == pytest.approx(100 * gap, abs=0.51)
    assert found["csv-save"].read_text().split() == ["x,weight", "-1.0,1", "0.0,1", "1.0,1"]
    choose(tab, "#link")
    tab.wait_for_function("() => document.getElementById('notice-text').textContent.includes('clipboard')")
    assert tab.evaluate("navigator.clipboard.readText()") == tab.url
    box = tab.locator("#frame").bounding_box()
    with Image.open(found["png"]) as picture:
        assert picture.width >= 2 * box["width"]
        assert picture.height >= 2 * box["height"] + 150  # legends and caption below the picture
        below = picture.convert("L").crop((0, int(2 * box["height"]) + 60, picture.width, picture.height))
        assert len(set(below.tobytes())) > 30


def test_tour_plays_waits_and_restores_the_points(page: Watched, server: Server) -> None:
    tab = page.open(address(server, TRIPLE.replace(points=((-1.5,), (0.3,)))))
    tab.click("#tour")
    steps = tab.evaluate("JSON.parse(document.getElementById('boot').textContent).tour.length")
    assert steps >= 5
    for k in range(steps):
        tab.wait_for_function(
            "k => document.getElementById('guide-count').textContent.startsWith(`${k} of`)", arg=k + 1
        )
        assert tab.inner_text("#guide-title")
        begun = time.monotonic()
        tab.wait_for_function("() => document.getElementById('job-label').textContent === 'samples are up to date'")
        assert time.monotonic() - begun < 6  # no step waits; the goal is 2 s on two free cores
        page.save(f"tour-{k + 1}")
        assert page.wide() == []
        if k == 0:
            tab.click("#canvas", position={"x": 5, "y": 5})
            assert tab.inner_text("#guide-pause") == "Resume"  # whoever acts has time
            tab.click("#guide-pause")
        if k == 2:
            tab.click("#guide-back")
            tab.wait_for_function("() => document.getElementById('guide-count').textContent.startsWith('2 of')")
            tab.click("#guide-next")
        tab.click("#guide-next")
    assert tab.is_hidden("#guide")
    page.settle()
    assert page.state().points == ((-1.5,), (0.3,))
    tab.click("#tour")
    tab.click("#guide-next")
    tab.keyboard.press("Control+z")  # the tour is one step: undo leaves it
    assert tab.is_hidden("#guide")
    assert tab.evaluate("points()") == [[-1.5], [0.3]]


def test_keyboard_alone_reaches_and_does_everything(page: Watched, server: Server) -> None:
    tab = page.open(address(server, HEXAGON))
    tab.evaluate("document.activeElement.blur()")
    reached = []
    for _ in range(60):
        tab.keyboard.press("Tab")
        reached.append(tab.evaluate("document.activeElement.id || document.activeElement.dataset.layer || ''"))
    wanted = ["tour", "undo", "theme", "preset", "point-x", "point-w", "point-add", "csv", "control-sampler", "map"]
    wanted = [w for w in [*wanted, "arrows", "particles", "pin", "canvas", "play", "time"] if w != "undo"]
    assert [name for name in wanted if name not in reached] == []
    places = [reached.index(name) for name in wanted]
    assert places == sorted(places)  # the order of focus is the order on the screen
    tab.focus("#canvas")
    for key in ("PageDown", "ArrowUp", "ArrowUp", "Shift+ArrowLeft"):
        tab.keyboard.press(key)
    x, y = HEXAGON.points[1]
    assert page.state().points[1] == pytest.approx((x - 0.2, y + 0.1), abs=1e-3)
    assert "point 2 at" in tab.inner_text("#where")
    tab.keyboard.press("Control+z")  # moves that follow each other soon are one step
    assert tab.evaluate("points()[1]") == [x, y]
    tab.keyboard.press("Delete")
    assert tab.inner_text("#point-name") == "point 2 of 5"
    tab.keyboard.press("Insert")
    assert tab.inner_text("#point-name") == "point 6 of 6"
    tab.keyboard.press("p")
    tab.wait_for_function("() => document.getElementById('where').textContent.startsWith('x = ')")
    before = tab.inner_text("#probe")
    tab.keyboard.press("ArrowRight")
    tab.wait_for_function("old => document.getElementById('probe').innerText !== old", arg=before)
    tab.keyboard.press("Escape")
    assert tab.get_attribute("#pin", "aria-pressed") == "false"
    tab.keyboard.press("Space")
    assert tab.get_attribute("#play", "aria-label") == "Pause"
    tab.keyboard.press("Space")
    tab.focus("#save summary")
    tab.keyboard.press("Enter")
    assert tab.is_visible("#python")
    tab.keyboard.press("Escape")
    assert not tab.is_visible("#python")
    nameless = """() => [...document.querySelectorAll('button, select, input, [tabindex="0"], canvas[role]')]
      .filter((e) => !(e.textContent.trim() || e.ariaLabel || e.labels?.length)).map((e) => e.outerHTML)"""
    assert tab.evaluate(nameless) == []
    page.settle()


def test_phone_scrolls_taps_drags_and_probes(chromium: Any, server: Server) -> None:
    context = chromium.new_context(**PHONE, reduced_motion="reduce")
    page = Watched(context, PHONE["viewport"])
    tab = page.open(address(server, HEXAGON))
    touch = context.new_cdp_session(tab)

    def press(kind: str, *at: float) -> None:
        places = [{"x": at[0], "y": at[1]}] if at else []
        touch.send("Input.dispatchTouchEvent", {"type": f"touch{kind}", "touchPoints": places})

    assert page.wide() == []
    assert page.overlapping() == []
    assert "right" not in tab.inner_text("main").split()
    tab.locator("#canvas").scroll_into_view_if_needed()
    top = tab.evaluate("scrollY")
    x, y = page.pixel(1.5, 1.5)
    tab.touchscreen.tap(x, y)
    assert tab.evaluate("points().length") == 7
    assert tab.evaluate("points()[6]") == pytest.approx([1.5, 1.5], abs=0.03)
    press("Start", x, y)
    for step in range(1, 6):
        press("Move", x, y + 8 * step)
    press("End")
    assert page.pixel(*tab.evaluate("points()[6]")) == pytest.approx((x, y + 40), abs=2)
    assert tab.evaluate("scrollY") == top  # a finger on a point drags it
    x, y = page.pixel(-1.5, -1.5)
    press("Start", x, y)
    for step in range(1, 10):
        press("Move", x, y - 15 * step)
        tab.wait_for_timeout(16)
    press("End")
    tab.wait_for_function("top => scrollY > top + 50", arg=top)  # elsewhere it scrolls the page
    tab.wait_for_timeout(300)
    assert tab.evaluate("points().length") == 7
    x, y = page.pixel(-1.5, 0.2)
    press("Start", x, y)
    tab.wait_for_function("() => document.getElementById('probe').textContent.startsWith('x = ')")
    press("End")
    assert tab.evaluate("points().length") == 7
    page.idle()
    page.save("phone")
    assert page.errors == []
    context.close()


def test_server_that_is_gone_is_reported_and_found_again(browser: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = Server(port)
    page = Watched(browser)
    tab = page.open(address(own, TRIPLE))
    tab.click("#point-add")
    page.idle()
    own.stop()
    tab.wait_for_selector("#banner:not([hidden])")
    assert "connects again by itself" in tab.inner_text("#banner")
    tab.click("#point-add")  # work goes on
    assert tab.inner_text("#point-name") == "point 5 of 5"
    again = Server(own.port)
    tab.wait_for_selector("#banner", state="hidden")
    page.idle()
    assert len(page.state().points) == 5
    assert all("WebSocket connection" in text for text in page.errors)  # Chromium itself reports these
    tab.close()
    assert "Traceback" not in again.stop()


def test_other_hosts_and_origins_are_refused(server: Server) -> None:
    def status(path: str, host: str, origin: str = "") -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Origin": origin}
        keys = upgrade | {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="} if origin else {}
        connection.request("GET", path, headers=keys | {"Host": host})
        answer = connection.getresponse()
        found = answer.status, "" if origin else answer.read().decode()
        connection.close()
        return found

    own, evil = f"127.0.0.1:{server.port}", f"evil.example:{server.port}"
    assert status("/", own)[0] == 200
    code, text = status("/", evil)
    assert code == 403
    assert text.strip().endswith(".")  # a sentence, not a blank page
    assert status("/assets/app.js", evil)[0] == 403
    assert status("/socket", own, f"http://{own}")[0] == 101
    assert status("/socket", evil, f"http://{evil}")[0] == 403
    assert status("/socket", own, "http://elsewhere.example")[0] == 403


@pytest.mark.slow
def test_jobs_of_closed_tabs_end(browser: Any, server: Server) -> None:
    import psutil

    process = psutil.Process(server.process.pid)
    before = process.num_threads()
    tabs = [Watched(browser) for _ in range(6)]
    for k, tab in enumerate(tabs):
        tab.open(address(server, State(sampler="mlp", seed=k)), idle=False)
    for tab in tabs:
        tab.tab.close()
    time.sleep(15)
    assert process.num_threads() <= before + 6
    assert process.cpu_percent(2.0) < 30
