"""The page in a real browser: drag, play, switch, train, cancel, share; and what people do to pages."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from browser import HELP, IDLE, LAPTOP, SMALLER, Watched

from vkernel.explore.captions import POINTS, TOUR
from vkernel.explore.state import State

playwright = pytest.importorskip("playwright.sync_api", reason="the browser tests need playwright")
pytest.importorskip("panel", reason="the page needs Panel: pip install 'vkernel[explore]'")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="the browser tests need Debian's chromium")
SQUARE = State(points=POINTS["square"], ratio=4.0, steps=10)  # with these the ensembles take a second
LINE = State(points=POINTS["triple"], ratio=4.0, steps=10)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, int]]:
    command = [sys.executable, "-m", "vkernel.cli", "explore", "--no-open", "--port", "0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"http://127\.0\.0\.1:\d+/", line)
    assert found, line + process.stdout.read()
    yield found[0], process.pid
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
    assert "stopped." in process.stdout.read()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as p:
        made = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        context = made.new_context(accept_downloads=True)  # one for all: scripts are fetched once
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        yield context
        made.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Watched]:
    made = Watched(browser)
    yield made
    made.tab.close()
    assert made.errors == []


def test_page_loads_fits_every_screen_and_requests_no_other_host(page: Watched, server: tuple[str, int]) -> None:
    for name, start, dark in (("plane", SQUARE, True), ("line", LINE, False)):
        state = start.replace(sampler="linear", dark=dark, layers=("noise", "particles", "law", "members", "exact"))
        tab = page.open(f"{server[0]}?{state.to_query()}")
        assert page.state() == state
        assert "explore" in tab.title()
        assert tab.inner_text("#panel-number") not in ("", "…")
        assert tab.evaluate("document.documentElement.dataset.theme") == ("dark" if dark else "light")
        for size in (*SMALLER, LAPTOP):
            tab.set_viewport_size(size)
            tab.wait_for_function(  # plots follow a while after the page
                """w => Math.abs(document.getElementById('app').offsetWidth - w) < 20
                && document.documentElement.scrollWidth <= w""",
                arg=size["width"],
            )
            assert page.wide() == []
            assert page.overlapping() == []
            page.save(f"{name}-{size['width']}-{'dark' if dark else 'light'}")
    assert page.hosts == {urlsplit(server[0]).netloc}


def test_drag_changes_the_map_during_and_after_it(page: Watched, server: tuple[str, int]) -> None:
    points = tuple(map(tuple, np.random.default_rng(2).uniform(-1.4, 1.4, (63, 2)).round(3).tolist()))
    state = State(points=((1.6, 1.6), *points), t=0.1)
    tab = page.open(f"{server[0]}?{state.to_query()}")
    before = tab.evaluate("map()")
    start, stop = tab.evaluate("[pixel('plane picture', 1.6, 1.6), pixel('plane picture', 0.2, 1.75)]")
    tab.evaluate(
        """() => { window.took = []; window.sent = 0
        const source = bokeh('plane picture').renderers.find((r) => r.glyph.type === 'Image').data_source
        const answered = () => { if (sent) { took.push(performance.now() - sent); sent = 0 } }
        source.connect(source.properties.data.change, answered)
        bokeh('points').connect(bokeh('points').change, () => { if (!sent) sent = performance.now() }) }"""
    )
    tab.mouse.move(*start)
    tab.mouse.down()
    for k in range(1, 6):
        share = k / 6
        tab.mouse.move(*(a + share * (b - a) for a, b in zip(start, stop, strict=True)))
        tab.wait_for_timeout(250)
    way = tab.evaluate("map()")
    assert way != before
    assert page.state() == state  # nothing is kept yet
    tab.mouse.move(*stop)
    tab.mouse.up()
    tab.wait_for_function("old => location.search !== old", arg="?" + state.to_query())
    tab.wait_for_function(IDLE)
    assert tab.evaluate("map()") != before
    moved = page.state().points[0]
    assert moved == pytest.approx((0.2, 1.75), abs=0.03)
    assert page.state().points[1:] == state.points[1:]
    took = tab.evaluate("took")
    assert len(took) >= 3
    assert min(took) < 300  # milliseconds from the drag to the new map, 64 points, 100 × 100


def test_malformed_address_gives_the_default_and_clicks_add_and_remove_points(
    page: Watched, server: tuple[str, int]
) -> None:
    tab = page.open(f"{server[0]}?v=1&x=%00%ff2garbled!&sampler=<script>&t=1e999")
    assert "This address could not be read" in tab.inner_text("#notice")
    assert page.state() == State()
    place = tab.evaluate("pixel('plane picture', 1.5, 1.5)")
    tab.mouse.click(*place)
    tab.wait_for_function("() => document.getElementById('point-name').textContent.endsWith('of 7')")
    assert page.state().points[-1] == pytest.approx((1.5, 1.5), abs=0.03)
    tab.wait_for_timeout(300)
    tab.mouse.click(*place)
    tab.keyboard.press("Backspace")
    tab.wait_for_function("() => document.getElementById('point-name').textContent.endsWith('of 6')")
    tab.fill("#point-w", "5")
    tab.keyboard.press("Enter")
    tab.wait_for_function("() => location.search.includes('w=')")
    assert 5 in page.state().weights
    for _ in range(8):
        tab.click("#point-add")
    tab.wait_for_function("() => document.getElementById('point-name').textContent.endsWith('of 14')")
    assert len(set(page.state().points)) == 14  # added points are distinct
    assert 5 in page.state().weights


def test_particles_play_pause_and_scrub(page: Watched, server: tuple[str, int]) -> None:
    tab = page.open(f"{server[0]}?{State(t=0.2).to_query()}")
    where = "Array.from(bokeh('moving').data.x)"
    tab.wait_for_function("() => bokeh('moving').data.x.length === 240")
    start, map_before, at = tab.evaluate(f"[{where}, total(), Number(document.getElementById('time').value)]")
    tab.click("#play")
    tab.wait_for_function("u => Number(document.getElementById('time').value) > u + 50", arg=at)
    tab.click("#play")
    half = tab.evaluate(where)
    assert half != start
    tab.wait_for_function("old => total() !== old", arg=map_before)  # the map keeps up with the time
    shown = float(tab.inner_text("#time-value").removeprefix("t = "))
    assert shown < 0.2
    tab.wait_for_function("t => Math.abs(Number(new URLSearchParams(location.search).get('t')) - t) < .01", arg=shown)
    tab.evaluate(
        "() => { const s = document.getElementById('time'); s.value = 1000; s.oninput({target: s}); s.onchange() }"
    )
    end = np.array(tab.evaluate("[Array.from(bokeh('moving').data.x), Array.from(bokeh('moving').data.y)]"))
    distance = np.linalg.norm(end.T[:, None] - np.array(State().points), axis=-1).min(1)
    assert np.quantile(distance, 0.95) < 0.1  # the exact score ends on training points


def test_sampler_is_switched(page: Watched, server: tuple[str, int]) -> None:
    tab = page.open(f"{server[0]}?{SQUARE.to_query()}")
    assert not tab.is_visible("#control-ratio")
    tab.select_option("#control-sampler", label="linear models, trained")
    tab.wait_for_function("() => document.getElementById('panel-text').textContent.includes('48 linear models')")
    tab.wait_for_function(IDLE)
    assert tab.is_visible("#control-ratio")
    assert page.state().sampler == "linear"
    assert "members" in page.state().layers
    first = tab.inner_text("#panel-number")
    tab.click("text=Fourier")
    tab.wait_for_function("() => document.getElementById('panel-text').textContent.includes('Fourier')")
    tab.wait_for_function(IDLE)
    assert tab.inner_text("#panel-number") != first
    noise = tab.evaluate("map()")
    tab.click("[data-layer=variance]")
    tab.wait_for_function("old => total() !== old", arg=sum(noise))
    assert "noise" not in page.state().layers  # one map at a time
    for caption in ("infinitely wide networks", "effective SDE (theory)", "the naive estimator"):
        tab.select_option("#control-sampler", label=caption)
        tab.wait_for_function(
            "w => document.getElementById('control-sampler').selectedOptions[0].text === w", arg=caption
        )
        assert page.wide() == []


def test_ensemble_is_cancelled_and_the_page_stays_responsive(page: Watched, server: tuple[str, int]) -> None:
    tab = page.open(server[0])
    tab.select_option("#control-sampler", label="small networks, trained")
    tab.wait_for_function("() => document.getElementById('job-label').textContent.includes('training 8 models')")
    assert 0 <= int(tab.get_attribute("#job-bar", "aria-valuenow")) < 60
    begun = time.monotonic()
    before = tab.evaluate("total()")
    tab.evaluate("() => { const s = document.getElementById('time'); s.value = 700; s.oninput({target: s}) }")
    tab.wait_for_function("old => total() !== old", arg=before)  # the page answers while models train
    assert time.monotonic() - begun < 6
    tab.click("#job-cancel")
    tab.wait_for_function("() => document.getElementById('job-label').textContent === 'stopped'")
    assert not tab.evaluate("document.getElementById('app').classList.contains('busy')")
    assert tab.inner_text("#outdated") == "of an earlier state: particles"
    tab.click("#job-run")
    tab.wait_for_function("() => document.getElementById('app').classList.contains('busy')")
    tab.select_option("#control-sampler", label="the exact score")  # the latest wins
    tab.wait_for_function(IDLE)
    assert "exact score memorises" in tab.inner_text("#panel-text")


def test_address_restores_the_picture(page: Watched, server: tuple[str, int]) -> None:
    tab = page.open(server[0])
    tab.select_option("#preset", "clusters")
    tab.click("[data-layer=boundaries]")
    tab.select_option("#control-process", label="flow matching")
    tab.wait_for_function("() => location.search.includes('process=flow')")
    tab.wait_for_function(IDLE)
    look = "[map(), Array.from(bokeh('moving').data.x), document.getElementById('panel').innerText]"
    tab.mouse.move(5, 5)
    tab.wait_for_timeout(500)
    numbers, picture = tab.evaluate(look), tab.locator("#plane").screenshot()
    tab.reload()
    tab.wait_for_selector("#app[data-ready]")
    tab.evaluate(HELP)
    tab.wait_for_function(IDLE)
    tab.wait_for_timeout(500)
    assert page.state().process == "flow"
    assert tab.evaluate(look) == numbers
    assert tab.locator("#plane").screenshot() == picture


@pytest.mark.parametrize("count", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_tabs_at_once_do_not_disturb_one_another(browser: Any, server: tuple[str, int], count: int) -> None:
    import psutil

    tabs = [Watched(browser) for _ in range(count)]
    for k, tab in enumerate(tabs):
        tab.open(f"{server[0]}?{LINE.replace(sampler='linear', seed=k).to_query()}", idle=False)
    for k, tab in enumerate(tabs):
        tab.tab.wait_for_function(IDLE, timeout=60_000)
        assert tab.errors == []
        assert tab.state().seed == k
    shown = [tab.tab.inner_text("#panel-number") for tab in tabs]
    assert all(re.match(r"\.\d+ ± \.\d+", text) for text in shown)
    assert len(set(shown)) > 1
    before = [tab.tab.url for tab in tabs]
    tabs[0].tab.select_option("#preset", "spiral")
    tabs[0].tab.wait_for_function(
        "old => location.href !== old && document.getElementById('app').dataset.d === '2'", arg=before[0]
    )
    assert [tab.tab.url for tab in tabs[1:]] == before[1:]
    assert [tab.tab.inner_text("#panel-number") for tab in tabs[1:]] == shown[1:]
    assert {tab.tab.get_attribute("#app", "data-d") for tab in tabs[1:]} == {"1"}
    process = psutil.Process(server[1])
    assert process.memory_info().rss < 2e9
    assert process.num_threads() < 60
    for tab in tabs:
        tab.tab.close()


def csv(tab: Any, text: str) -> None:
    tab.set_input_files("#csv-file", {"name": "p.csv", "mimeType": "text/csv", "buffer": text.encode()})


def test_files_are_imported_or_refused_with_a_sentence(page: Watched, server: tuple[str, int]) -> None:
    tab = page.open(server[0])
    csv(tab, "x,y,weight\n0,0,1\n10,0,3\n10,10,1\n")
    tab.wait_for_function("() => document.getElementById('notice-text').textContent.includes('3 points imported')")
    assert page.state().weights == (1, 3, 1)
    for text, word in (
        ("0,1\n" * 400_000, "MB"),
        ("0,nan\n1,1\n", "finite"),
        ("0,1\n" * 1001, "1,001"),
        ("hello\nworld\n", "finite number"),
    ):
        csv(tab, text)
        tab.wait_for_function("w => document.getElementById('notice-text').textContent.includes(w)", arg=word)
        assert len(page.state().points) == 3
    rows = np.random.default_rng(3).normal(size=(1000, 2))
    csv(tab, "\n".join(f"{a:.5f},{b:.5f}" for a, b in rows))
    tab.wait_for_function("() => document.getElementById('notice-text').textContent.includes('1,000 points imported')")
    tab.wait_for_function(IDLE)
    assert len(page.state().points) == 1000
    page.save("thousand")
    tab.fill("#point-x", "")
    tab.keyboard.press("Enter")
    tab.wait_for_function("() => document.getElementById('notice-text').textContent.includes('must be a number')")


def test_script_saved_numbers_and_picture_agree_with_the_page(
    page: Watched, server: tuple[str, int], tmp_path: Path
) -> None:
    from PIL import Image

    tab = page.open(f"{server[0]}?{State(points=POINTS['triple'], sampler='linear', steps=30).to_query()}")
    tab.click("#python")
    tab.wait_for_selector("#code[open]")
    tab.click("#code-copy")
    script = tab.evaluate("navigator.clipboard.readText()")
    with tab.expect_download() as download:
        tab.click("#json")
    numbers = json.loads(Path(download.value.path()).read_text())
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(script, "script", "exec"), namespace)
    assert namespace["gap"] == pytest.approx(numbers["gap_mass"]["value"], abs=1e-9)
    places = len(tab.inner_text("#panel-number").split(" ±")[0].lstrip("."))
    assert float(tab.inner_text("#panel-number").split(" ±")[0]) == pytest.approx(
        namespace["gap"], abs=0.51 * 10**-places
    )
    tab.click("#link")
    tab.wait_for_function("() => document.getElementById('notice-text').textContent.includes('clipboard')")
    assert tab.evaluate("navigator.clipboard.readText()") == tab.url
    with tab.expect_download() as download:
        tab.click("#png")
    path = tmp_path / "p.png"
    download.value.save_as(path)
    with Image.open(path) as picture:
        assert picture.width > 500
        assert picture.height > 400
        assert len(set(picture.convert("L").resize((60, 60)).tobytes())) > 20


@pytest.mark.parametrize("patient", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_tour_has_five_steps(page: Watched, server: tuple[str, int], patient: bool) -> None:
    tab = page.open(server[0])
    tab.click("#tour")
    for k, (title, _, state) in enumerate(TOUR):
        tab.wait_for_function("title => document.getElementById('guide-title').textContent === title", arg=title)
        tab.wait_for_function("query => location.search === query", arg="?" + state.to_query())
        if patient or state.sampler == "exact":  # otherwise the next step replaces the run
            tab.wait_for_function(IDLE)
            page.save(f"tour-{k + 1}")
        assert page.wide() == []
        tab.click("#guide-next")
    assert not tab.is_visible("#guide")


def test_all_controls_are_reached_by_keyboard(page: Watched, server: tuple[str, int]) -> None:
    tab = page.open(server[0])
    reached = set()
    tab.evaluate("document.activeElement.blur()")
    for _ in range(45):
        tab.keyboard.press("Tab")
        reached.add(tab.evaluate("(document.activeElement.id || document.activeElement.dataset.layer || '') + ''"))
    wanted = {"tour", "link", "python", "png", "json", "theme", "preset", "point-x", "point-w", "point-add", "csv"}
    wanted |= {
        "control-sampler",
        "control-process",
        "control-eps",
        "control-steps",
        "noise",
        "particles",
        "law",
        "play",
        "time",
    }
    assert wanted <= reached
    tab.focus("#control-eps")
    tab.keyboard.press("ArrowRight")
    tab.wait_for_function("() => location.search.includes('eps=0.003')")
    assert "sampling stops" in tab.inner_text("#tip")
    tab.focus("#theme")
    tab.keyboard.press("Enter")
    tab.wait_for_function("() => document.documentElement.dataset.theme === 'dark'")
    tab.wait_for_function("() => bokeh('plane picture').background_fill_color === '#171b21'")


def test_arrow_keys_move_points_and_outdated_data_are_labelled(page: Watched, server: tuple[str, int]) -> None:
    state = SQUARE.replace(sampler="linear", layers=("variance", "arrows", "particles", "law"))
    tab = page.open(f"{server[0]}?{state.to_query()}")
    alpha = "bokeh('plane picture').renderers.find((r) => r.glyph.type === 'Image').glyph.global_alpha.value"
    tab.wait_for_function(f"() => map().length && document.getElementById('outdated').hidden && {alpha} === 1")
    tab.focus("#plane")
    for key in ("PageDown", "ArrowUp", "ArrowUp", "Shift+ArrowLeft"):
        tab.keyboard.press(key)
    tab.wait_for_function(
        "() => document.getElementById('outdated').textContent === 'of an earlier state: V, particles'"
    )
    tab.wait_for_function(f"() => {alpha} < 0.5")
    assert tab.is_visible("#laws-outdated")
    tab.wait_for_function("old => location.search !== old", arg="?" + state.to_query())
    x, y = state.points[1]
    assert page.state().points[1] == pytest.approx((x - 0.2, y + 0.1))
    assert page.state().points[2:] == state.points[2:]
    tab.wait_for_function(IDLE)
    tab.wait_for_function(f"() => document.getElementById('outdated').hidden && {alpha} === 1")
    assert not tab.is_visible("#laws-outdated")
    tab.keyboard.press("Delete")
    tab.wait_for_function("() => document.getElementById('point-name').textContent.endsWith('of 3')")
    tab.keyboard.press("Insert")
    tab.wait_for_function("() => document.getElementById('point-name').textContent === 'point 4 of 4'")
    tab.keyboard.press("Space")
    tab.wait_for_function("() => document.getElementById('play').getAttribute('aria-label') === 'Pause'")
    nameless = """() => [...document.querySelectorAll('button, select, input:not([hidden]), [tabindex], output')]
      .filter((e) => !(e.innerText || e.ariaLabel || e.labels?.length || e.htmlFor?.length || e.id.startsWith('point')))
      .filter((e) => e.closest('#app') && !e.closest('.bk-panel-models')).map((e) => e.id || e.outerHTML)"""
    assert tab.evaluate(nameless) in ([], ["code-text"])


def test_pages_of_other_origins_are_refused(server: tuple[str, int]) -> None:
    import http.client

    where = urlsplit(server[0])
    answers = {}
    for origin in ("http://elsewhere.example", f"http://127.0.0.1:{where.port}"):
        connection = http.client.HTTPConnection("127.0.0.1", where.port or 80, timeout=10)
        keys = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Origin": origin}
        connection.request("GET", "/ws", headers=keys | {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="})
        answers[origin] = connection.getresponse().status
        connection.close()
    assert answers["http://elsewhere.example"] == 403
    assert answers[f"http://127.0.0.1:{where.port}"] != answers["http://elsewhere.example"]


@pytest.mark.slow
def test_jobs_of_closed_tabs_end(browser: Any, server: tuple[str, int]) -> None:
    import psutil

    process = psutil.Process(server[1])
    time.sleep(25)
    before = process.num_threads()
    tabs = [Watched(browser) for _ in range(6)]
    for k, tab in enumerate(tabs):
        tab.open(f"{server[0]}?{State(sampler='mlp', seed=k).to_query()}", idle=False)
    for tab in tabs:
        tab.tab.close()
    time.sleep(35)
    assert process.num_threads() <= before + 2
    assert process.cpu_percent(2.0) < 30
