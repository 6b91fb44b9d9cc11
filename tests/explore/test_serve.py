"""The server answers its own page alone, over HTTP and over the websocket, and survives every malformed request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from vkernel.core.errors import InputError
from vkernel.explore import answers
from vkernel.explore.serve import Server, names
from vkernel.explore.state import State

pytest.importorskip("tornado")

from tornado.httpclient import AsyncHTTPClient, HTTPClientError, HTTPRequest, HTTPResponse
from tornado.websocket import WebSocketClientConnection, WebSocketClosedError, websocket_connect

Scene = Callable[[Server], Awaitable[None]]


def play(scene: Scene) -> None:
    """Run a scene against a server."""

    async def main() -> None:
        made = Server(0)
        made.start()
        try:
            await asyncio.wait_for(scene(made), 30)
        finally:
            made.stop()

    asyncio.run(main())


async def get(made: Server, path: str = "/", **headers: str) -> HTTPResponse:
    request = HTTPRequest(f"http://127.0.0.1:{made.port}{path}", headers=headers, request_timeout=10)
    return await AsyncHTTPClient().fetch(request, raise_error=False)


async def connect(made: Server, **headers: str) -> WebSocketClientConnection:
    given = {"Origin": f"http://127.0.0.1:{made.port}"} | headers
    request = HTTPRequest(f"ws://127.0.0.1:{made.port}/socket", headers=given)
    return await websocket_connect(request, max_message_size=1 << 26)


def decode(message: str | bytes | None) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read an answer as the browser does."""
    assert isinstance(message, bytes)
    size = int.from_bytes(message[:4], "little")
    assert size % 4 == 0
    header, place, arrays = json.loads(message[4 : 4 + size]), 4 + size, {}
    for name, shape in header["arrays"]:
        count = int(np.prod(shape))
        arrays[name] = np.frombuffer(message, "<f4", count, place).reshape(shape)
        place += 4 * count
    assert place == len(message)
    return header, arrays


async def ask(tab: WebSocketClientConnection, **request: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Send a request and return its answer; reports on the progress of a run are skipped."""
    await tab.write_message(json.dumps(request))
    while True:
        header, arrays = decode(await tab.read_message())
        if header["kind"] not in ("progress", "learned"):
            return header, arrays


def test_page_and_its_files_are_served() -> None:
    async def scene(made: Server) -> None:
        page = await get(made, "/?v=2&t=0.2")
        text = page.body.decode()
        assert page.code == 200
        assert "'self'" in page.headers["Content-Security-Policy"]
        block = text.split('id="boot">')[1].split("</script>")[0]
        boot = json.loads(block)
        assert boot["state"]["t"] == 0.2
        assert boot["problem"] is None
        assert {"content", "presets", "limits", "tour", "factors", "claims", "version", "default"} <= boot.keys()
        assert (
            "could not be read"
            in json.loads((await get(made, "/?v=9")).body.split(b'boot">')[1].split(b"</s")[0])["problem"]
        )
        assert (await get(made, "/assets/page.css")).headers["Content-Type"].startswith("text/css")
        for path in ("/assets/content.toml", "/assets/../serve.py", "/assets/%2e%2e/serve.py", "/assets/", "/nothing"):
            assert (await get(made, path)).code == 404, path
        script = "</script><script>alert(1)</script>"
        page = await get(made, f"/?v=2&sampler={script.replace('<', '%3C').replace('>', '%3E')}")
        assert script not in page.body.decode()

    play(scene)


def test_other_hosts_and_origins_are_refused() -> None:
    """A name that an attacker resolves to this machine has the attacker's Host and Origin."""

    async def scene(made: Server) -> None:
        evil = f"evil.example:{made.port}"
        for host in (evil, "evil.example", f"127.0.0.1.evil.example:{made.port}", f"127.0.0.2:{made.port}", ""):
            for path in ("/", "/assets/page.css", "/nothing"):
                answer = await get(made, path, Host=host)
                assert answer.code in (400, 403), (host, path)
                assert b"boot" not in answer.body
        assert (await get(made, Host=f"localhost:{made.port}")).code == 200
        own = f"127.0.0.1:{made.port}"
        refused = [
            {"Host": evil, "Origin": f"http://{evil}"},
            {"Host": own, "Origin": f"http://{evil}"},
            {"Host": own, "Origin": "null"},
            {"Host": own, "Origin": f"http://127.0.0.1:{made.port + 1}"},
            {"Host": own, "Origin": f"http://localhost:{made.port}"},
            {"Host": evil, "Origin": f"http://{own}"},
        ]
        for headers in refused:
            with pytest.raises(HTTPClientError, match="403"):
                await connect(made, **headers)
        for host in (own, f"localhost:{made.port}"):
            (await connect(made, Host=host, Origin=f"http://{host}")).close()

    play(scene)


def test_requests_without_an_origin_are_refused() -> None:
    async def scene(made: Server) -> None:
        with pytest.raises(HTTPClientError, match="403"):
            await websocket_connect(f"ws://127.0.0.1:{made.port}/socket")

    play(scene)


def test_requests_are_answered(small: None) -> None:
    async def scene(made: Server) -> None:
        tab, state = await connect(made), State(steps=8).to_dict()
        header, arrays = await ask(tab, kind="map", id=1, state=state)
        assert header["kind"] == "map"
        assert header["id"] == 1
        assert header["scale"]["log"]
        assert arrays["values"].shape == arrays["x"].shape == arrays["density"].shape
        header, arrays = await ask(tab, kind="probe", id=2, state=state, x=[0.4])
        assert header["sigma2_trC"] > 0
        assert arrays["targets"].shape == (24, 1)
        header, arrays = await ask(tab, kind="member", id=3, state=state, k=0)
        assert header["kind"] == "error"
        result, arrays = await ask(tab, kind="run", id=4, state=state)
        assert result["kind"] == "result"
        assert "copied" in result["headline"]
        assert arrays["frames"].shape == (9, 240, 1) == arrays["twin_frames"].shape
        assert arrays["law"].shape == arrays["twin_law"].shape == arrays["exact"].shape
        assert [bar["new"] for bar in result["bars"]] == [result[k]["value"] for k in ("gap", "twin", "exact_gap")]
        again, _ = await ask(tab, kind="run", id=5, state=state | {"t": 0.3, "map": "share", "compare": True})
        assert again["gap"] == result["gap"]
        assert again["inputs"] == result["inputs"]
        header, arrays = await ask(tab, kind="map", id=6, state=state | {"map": "variance"}, member=1)
        assert header["inputs"] == result["inputs"]
        assert arrays["exact_arrows"].shape == arrays["arrows"].shape
        header, arrays = await ask(tab, kind="member", id=7, state=state, k=5)
        assert header["members"] == 12
        assert arrays["law"].shape == (120,)
        assert (await ask(tab, kind="probe", id=8, state=state, x=[0.4]))[1]["learned"].shape == (12, 1)
        found = json.loads((await ask(tab, kind="json", id=9, state=state))[0]["text"])
        assert found["gap_mass"] == result["gap"]
        assert found["state"]["points"] == [[-1.0], [0.0], [1.0]]
        header, _ = await ask(tab, kind="csv", id=10, state=state)
        header, _ = await ask(tab, kind="csv-import", id=11, text=header["text"])
        assert header["points"] == [[-1.0], [0.0], [1.0]]
        assert header["weights"] == [1, 1, 1]
        assert "import vkernel" in (await ask(tab, kind="python", id=12, state=state))[0]["text"]
        assert (await ask(tab, kind="cancel", id=13))[0]["kind"] == "cancelled"

    play(scene)


def test_shipped_results_come_at_once_and_their_models_follow() -> None:
    async def scene(made: Server) -> None:
        answers._results.clear()
        tab, state = await connect(made), State(ratio=0.25).to_dict()
        header, _ = await ask(tab, kind="run", id=1, state=state)
        assert header["precomputed"]
        while decode(await tab.read_message())[0]["kind"] != "learned":
            pass
        header, arrays = await ask(tab, kind="map", id=2, state=state | {"map": "variance"})
        assert header["map"] == "variance"
        assert arrays["values"].max() > 0

    play(scene)


def test_new_run_replaces_the_old_one_and_cancel_ends_it() -> None:
    async def scene(made: Server) -> None:
        tab, slow = await connect(made), State(sampler="mlp", seed=77).to_dict()
        await tab.write_message(json.dumps({"kind": "run", "id": 1, "state": slow}))
        header, _ = await ask(tab, kind="run", id=2, state=State(sampler="exact", seed=77).to_dict())
        assert (header["kind"], header["id"]) == ("result", 2)
        await tab.write_message(json.dumps({"kind": "run", "id": 3, "state": slow}))
        assert (await ask(tab, kind="cancel", id=4))[0]["kind"] == "cancelled"
        assert (await ask(tab, kind="map", id=5, state=slow))[0]["id"] == 5  # nothing came from run 3

    play(scene)


STATE = State().to_dict()
MALFORMED: list[Any] = [
    "",
    "not JSON",
    "null",
    "[]",
    "5",
    '"text"',
    "{}",
    "[" * 5000,
    "[" * 100_000,
    '{"kind": "map"}',
    '{"kind": "map", "id": NaN, "state": {}}',
    {"kind": "map", "id": -1, "state": STATE},
    {"kind": "map", "id": 1.5, "state": STATE},
    {"kind": "map", "id": True, "state": STATE},
    {"kind": "map", "id": "1", "state": STATE},
    {"kind": "map", "id": 10**30, "state": STATE},
    {"kind": "nope", "id": 1, "state": STATE},
    {"kind": ["map"], "id": 1, "state": STATE},
    {"kind": "__class__", "id": 1, "state": STATE},
    {"kind": "simulate", "id": 1, "state": STATE},
    {"kind": "map", "id": 1, "state": 5},
    {"kind": "map", "id": 1, "state": [1, 2]},
    {"kind": "map", "id": 1},
    {"kind": "map", "id": 1, "state": STATE, "member": "a"} | {"state": STATE | {"t": None}},
    {"kind": "probe", "id": 1, "state": STATE},
    {"kind": "probe", "id": 1, "state": STATE, "x": 5},
    {"kind": "probe", "id": 1, "state": STATE, "x": [0, 0]},
    {"kind": "probe", "id": 1, "state": STATE, "x": [float("nan")]},
    {"kind": "probe", "id": 1, "state": STATE, "x": [1e300]},
    {"kind": "probe", "id": 1, "state": STATE, "x": ["a"]},
    {"kind": "member", "id": 1, "state": STATE},
    {"kind": "member", "id": 1, "state": STATE, "k": "a"},
    {"kind": "csv-import", "id": 1},
    {"kind": "csv-import", "id": 1, "text": 5},
    {"kind": "csv-import", "id": 1, "text": "nan,0\n"},
    {"kind": "csv-import", "id": 1, "text": "0,1\n" * 200_000},
]
MALFORMED += [
    {"kind": kind, "id": 1, "state": STATE | given}
    for kind in ("map", "run")
    for given in (
        {"points": []},
        {"points": "text"},
        {"points": [0]},
        {"points": [[0, 0], [1]]},
        {"points": [[0, "a"]], "weights": []},
        {"points": [[float("nan")], [0], [1]]},
        {"points": [[float("inf")], [0], [1]]},
        {"points": [[[0]]], "weights": []},
        {"points": [[0, 0]] * 1001, "weights": []},
        {"weights": [1]},
        {"weights": [0, 1, 1]},
        {"weights": [1e400, 1, 1]},
        {"weights": 5},
        {"layers": ["nope"]},
        {"layers": [["arrows"]]},
        {"layers": "arrows"},
        {"sampler": "magic"},
        {"sampler": ["linear"]},
        {"sampler": {"a": 1}},
        {"map": None},
        {"eps": float("nan")},
        {"eps": "nan"},
        {"tau": [1]},
        {"steps": 1e9},
        {"seed": -1},
        {"K": 1.5},
        {"k": None},
    )
]


def test_malformed_requests_are_answered_with_a_sentence(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(made: Server) -> None:
        tab = await connect(made)
        for bad in MALFORMED:
            await tab.write_message(bad if isinstance(bad, str) else json.dumps(bad))
            header, _ = decode(await tab.read_message())
            assert header["kind"] == "error", bad
            assert len(header["text"]) > 10
        await tab.write_message(b"\xff\xfe\x00", binary=True)
        assert decode(await tab.read_message())[0]["kind"] == "error"
        assert (await ask(tab, kind="map", id=7, state=STATE))[0]["id"] == 7

    with caplog.at_level(logging.WARNING):
        play(scene)
    assert not caplog.records


def test_large_messages_close_the_socket_and_nothing_else() -> None:
    async def scene(made: Server) -> None:
        tab = await connect(made)
        with contextlib.suppress(WebSocketClosedError):
            await tab.write_message("x" * (5 << 20))
        assert await tab.read_message() is None
        other = await connect(made)
        assert (await ask(other, kind="map", id=1, state=STATE))[0]["id"] == 1

    play(scene)


def test_closed_tab_ends_its_job_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    """Neither the answers on their way nor the progress of a run leave a traceback."""

    async def scene(made: Server) -> None:
        for _ in range(5):
            tab = await connect(made)
            await tab.write_message(
                json.dumps({"kind": "run", "id": 1, "state": State(sampler="mlp", seed=5).to_dict()})
            )
            for k in range(4):
                await tab.write_message(json.dumps({"kind": "map", "id": 2 + k, "state": STATE}))
            tab.close()
        await asyncio.sleep(0.3)
        made.workers.submit(lambda: None).result(10)  # the threads are free again

    with caplog.at_level(logging.WARNING):
        play(scene)
    assert not caplog.records


def test_taken_ports_and_foreign_addresses_are_refused() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        with pytest.raises(InputError, match="taken"):
            Server(held.getsockname()[1])
    with pytest.raises(InputError, match="no address"):
        Server(0, "203.0.113.7")
    with pytest.raises(InputError, match="IPv4"):
        Server(0, "::1")
    with pytest.raises(InputError, match="65535"):
        Server(70000)
    assert names("127.0.0.1") == names("localhost") == {"127.0.0.1", "localhost"}
    assert "*" not in "".join(names("0.0.0.0"))
