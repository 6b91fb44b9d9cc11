"""The page without a browser: messages, figures and assets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vkernel.explore import compute
from vkernel.explore.serve import Workers


@pytest.fixture
def tab() -> Any:
    pytest.importorskip("panel")
    from vkernel.explore.page import Tab

    made = Tab(Workers(1), "v=1")
    made.sent = []  # type: ignore[attr-defined]
    made._send = lambda kind, **rest: made.sent.append(kind)  # type: ignore[attr-defined, method-assign]
    return made


def test_messages_change_the_state_or_are_refused(tab: Any) -> None:
    tab.receive({"kind": "edit", "points": [[-1], [0.25], [1]], "weights": [1, 4, 1]})
    assert tab.state.d == 1
    assert tab.state.points[1] == (0.25,)
    assert tab.state.weights == (1, 4, 1)
    tab.receive({"kind": "edit", "points": [[-1], [0.25], [1], [0.5]], "weights": [1, 4, 1, 1]})
    assert len(tab.state.points) == 4
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
        {"kind": "edit", "points": [], "weights": []},
        {"kind": "edit", "points": [[0, 0]], "weights": [1, 1]},
        {"kind": "edit", "points": [[0, "a"]], "weights": [1]},
        {"kind": "edit", "points": [[0, 0], [1]], "weights": [1, 1]},
        {"kind": "edit", "points": [0], "weights": [1]},
        {"kind": "edit", "points": [[0, 0]], "weights": [0]},
        {"kind": "edit", "points": "text", "weights": [1]},
        {"kind": "preview", "x": ["a"], "y": [0]},
        {"kind": "preview", "x": [0, 1], "y": [0]},
        {"kind": "preview", "t": None},
        {"kind": "edit", "points": [[float("nan"), 0]], "weights": [1]},
        {"kind": "tour", "step": 9},
        {"kind": "preset"},
        {"kind": ["x"]},
        {},
        None,
        "text",
    ):
        tab.sent.clear()
        tab.receive(bad)
        assert "notice" in tab.sent, bad
        assert tab.state == before


def test_drawing_tool_is_followed_and_corrected(tab: Any) -> None:
    source = tab.figures.data["points"]
    source.data = {"x": [0.0, 5.0, 0.5], "y": [0.1234, 0.0, 0.5], "size": [12, 12, 12]}
    assert tab.state.points == ((0.0, 0.123), (2.0, 0.0), (0.5, 0.5))  # back to the window's edge
    tab.receive({"kind": "edit", "points": [list(p) for p in tab.state.points], "weights": [1, 1, 7]})
    source.data = {"x": [0.0, 0.5], "y": [0.123, 0.5], "size": [12, 12]}
    assert tab.state.weights == (1, 7)
    for broken in ([], [float("nan")], ["a"]):
        source.data = {"x": broken, "y": [0.0] * len(broken), "size": [1] * len(broken)}
        assert len(tab.state.points) == 2
        assert list(source.data["x"]) == [0.0, 0.5]


def test_closed_tab_has_no_job(tab: Any) -> None:
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


def test_report_is_json_with_the_numbers(tab: Any, small: None) -> None:
    tab.result = compute.simulate(tab.state)
    tab._send = lambda kind, **rest: tab.sent.append(rest)
    tab.receive({"kind": "json"})
    found = json.loads(next(message["text"] for message in tab.sent if "text" in message))
    assert found["gap_mass"]["value"] == tab.result.gap.value
    assert found["state"]["points"] == [list(p) for p in tab.state.points]
    assert "import vkernel" in found["python"]


def test_tiles_do_not_overlap() -> None:
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


def test_page_has_the_colours_of_the_package_and_no_address_elsewhere() -> None:
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
