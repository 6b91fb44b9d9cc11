"""The websocket of one browser tab: requests in JSON, answers in JSON followed by arrays.

The browser owns the state and sends it with every request; an answer is a function of the state, and has the ``id`` of
its request. Maps and probes are computed by one thread for all tabs, runs by a few others. A binary answer is

    length of the header, uint32 · header, JSON in UTF-8, padded with spaces to a multiple of 4 · float32 arrays

all little-endian; ``arrays`` in the header lists names and shapes in their order."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
from tornado.ioloop import IOLoop
from tornado.web import HTTPError
from tornado.websocket import WebSocketClosedError, WebSocketHandler

from vkernel.core.errors import InputError, require
from vkernel.explore import answers
from vkernel.explore.compute import Report, Result
from vkernel.explore.jobs import Desk, Workers
from vkernel.explore.state import State

FIELDS = set(vars(State())) - {"d"}
QUICK = ("map", "probe", "member")
PROGRESS = 0.05  # seconds between two reports on a run
FAULTS = (InputError, TypeError, ValueError, OverflowError, KeyError, IndexError)  # of a malformed request


def encode(header: Mapping[str, object], arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return a binary answer."""
    blocks = {name: np.ascontiguousarray(a, dtype="<f4") for name, a in arrays.items()}
    shapes = [[name, list(a.shape)] for name, a in blocks.items()]
    text = json.dumps(clean({**header, "arrays": shapes}), ensure_ascii=False, allow_nan=False).encode()
    text += b" " * (-len(text) % 4)
    return len(text).to_bytes(4, "little") + text + b"".join(a.tobytes() for a in blocks.values())


def clean(value: Any) -> Any:
    """Return JSON types: infinities become "inf" and "-inf", NaN becomes null, tuples become lists."""
    if isinstance(value, Mapping):
        return {str(k): clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [clean(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def decode_state(given: object) -> State:
    """Return the state in a request; a sentence says what is wrong with an invalid one."""
    require(isinstance(given, dict), "A request needs a state.")
    fields = {k: v for k, v in dict(given).items() if k in FIELDS}  # type: ignore[call-overload]
    for name in ("points", "weights", "layers"):
        require(isinstance(fields.get(name, []), list), f"{name} must be a list.")
    require(all(isinstance(p, list) for p in fields.get("points", [])), "A point is a list of one or two numbers.")
    checked: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    return State(**checked)


class Session(WebSocketHandler):
    """One tab: it answers requests, and a new run replaces the old one."""

    def initialize(self, workers: Workers, maps: Workers, names: frozenset[str]) -> None:
        self.maps, self.names, self.desk = maps, names, Desk(workers)
        self.loop = IOLoop.current()
        self.result: Result | None = None
        self.waiting: dict[str, tuple[int, Future[None]]] = {}  # the last request of each quick kind
        self.running, self.reported = -1, 0.0

    def prepare(self) -> None:
        if self.request.host_name not in self.names or not self.check_origin(self.request.headers.get("Origin", "")):
            raise HTTPError(403)

    def check_origin(self, origin: str) -> bool:
        """Accept pages of this server only."""
        return origin.lower() in (f"http://{self.request.host.lower()}", f"https://{self.request.host.lower()}")

    def open(self, *args: str, **kwargs: str) -> None:
        self.set_nodelay(True)

    def on_close(self) -> None:
        self.desk.cancel()
        for _, future in self.waiting.values():
            future.cancel()

    def on_message(self, message: str | bytes) -> None:
        given: dict[str, Any] = {}
        try:
            found = json.loads(message)
            require(isinstance(found, dict), "A request is a JSON object.")
            given = found
            ident = given.get("id")
            require(type(ident) is int and 0 <= ident < 1 << 53, "A request needs an id, a whole number.")
            self.carry_out(str(given.get("kind"))[:20], int(ident or 0), given)
        except (*FAULTS, RecursionError) as error:
            self.refuse(given.get("id"), error)

    def carry_out(self, kind: str, ident: int, given: dict[str, Any]) -> None:
        """Answer a request or start the work for it."""
        if kind == "cancel":
            self.desk.cancel()
            self.send({"kind": "cancelled", "id": ident, "run": self.running})
        elif kind == "csv-import":
            self.send({"kind": kind, "id": ident, **answers.imported(given.get("text"))})
        elif kind == "run":
            state = decode_state(given.get("state"))
            self.running, known = ident, answers.known(state)
            self.desk.cancel()
            if known is None:
                self.start(ident, partial(answers.simulate, state), self.ended)
            else:
                self.ended(ident, known)
        elif kind in QUICK or kind in ("python", "json", "csv"):
            state = decode_state(given.get("state"))
            last, result = self.waiting.get(kind), self.result
            if last is not None and last[1].cancel():
                self.send({"kind": "cancelled", "id": last[0]})
            work = partial(getattr(answers, kind), state, result, given)
            self.waiting[kind] = ident, self.maps.submit(self.answer, kind, ident, work)
        else:
            raise InputError(f"The page has no request {kind!r}.")

    def answer(self, kind: str, ident: int, work: Callable[[], tuple[dict[str, Any], dict[str, np.ndarray]]]) -> None:
        """Compute an answer in the thread of maps and pass it on."""
        try:
            header, arrays = work()
            data = encode({"kind": kind, "id": ident, **header}, arrays)
        except Exception as error:  # every error of the thread must reach the page
            self.later(self.refuse, ident, error)
        else:
            self.later(self.deliver, data)

    def start(self, ident: int, work: Callable[[Report], Result], ended: Callable[[int, Any], None]) -> None:
        """Start a job for a run."""

        def progress(label: str, share: float) -> None:
            now = time.monotonic()
            if now - self.reported > PROGRESS:
                self.reported = now
                self.later(self.progress, ident, label, share)

        self.desk.submit(work, partial(self.later, ended, ident), progress)

    def progress(self, ident: int, label: str, share: float) -> None:
        if ident == self.running and self.desk.busy:
            self.send({"kind": "progress", "id": ident, "label": label, "share": share})

    def ended(self, ident: int, found: Result | Exception) -> None:
        if ident != self.running:
            return
        if isinstance(found, Exception):
            self.refuse(ident, found)
            return
        self.result = found
        header, arrays = answers.result(found)
        self.deliver(encode({"kind": "result", "id": ident, **header}, arrays))
        if found.precomputed and found.learned is None and header["members"]:
            self.desk.submit(
                partial(answers.learn, found), partial(self.later, self.trained, ident), lambda label, share: None
            )

    def trained(self, ident: int, found: Result | Exception) -> None:
        """Announce that the models of a shipped result are there: maps of V and single models can follow."""
        if ident == self.running and isinstance(found, Result):
            self.result = found
            self.send({"kind": "learned", "id": ident})

    def refuse(self, ident: object, error: Exception) -> None:
        known = isinstance(error, FAULTS)
        text = (
            str(error) if isinstance(error, InputError) else f"This {'is malformed' if known else 'failed'}: {error!r}"
        )
        self.send({"kind": "error", "id": ident if type(ident) is int else None, "text": text[:500]})

    def later(self, call: Callable[..., None], *args: Any) -> None:
        """Call from the thread of the server."""
        self.loop.add_callback(call, *args)

    def send(self, header: Mapping[str, object]) -> None:
        self.deliver(encode(header, {}))

    def deliver(self, data: bytes) -> None:
        """Send an answer, unless the tab has closed."""
        if self.ws_connection is None:
            return
        try:
            sent = self.write_message(data, binary=True)
        except WebSocketClosedError:
            return
        sent.add_done_callback(lambda future: future.cancelled() or future.exception())
