"""The addresses of the page: ``/``, ``/assets/NAME`` and the websocket ``/socket``.

A page elsewhere must not reach this server through the browser of a user. So a request is refused unless its Host
header has a name by which the server is reached (else a foreign name could be made to resolve to this machine: *DNS
rebinding*), and the websocket also requires that the page that opens it has the same host and port."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

from tornado.httpserver import HTTPServer
from tornado.web import Application, RequestHandler

import vkernel as vk
from vkernel.explore import captions
from vkernel.explore.jobs import Workers
from vkernel.explore.session import Session, clean
from vkernel.explore.state import ASSETS, CONTENT, LIMIT, MAX_BYTES, MAX_POINTS, MAX_WEIGHT, State, from_query

MESSAGE = 4 << 20  # bytes that a browser may send at once: a file of points is at most 1 MB
BODY = 1 << 16  # bytes of the body of another request; none has one
TYPES = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml", "png": "image/png"}
POLICY = "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; frame-ancestors 'none'"
BLOCK = '<script type="application/json" id="boot">{}</script>'  # in the place of <!--boot-->


class Page(RequestHandler):
    """A request over HTTP: the page, with its first state from the query of the address, or one of its files."""

    def initialize(self, names: frozenset[str] = frozenset()) -> None:
        self.names = names

    def set_default_headers(self) -> None:
        self.set_header("Content-Security-Policy", POLICY)
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Referrer-Policy", "no-referrer")
        self.set_header("Cache-Control", "no-store")

    def prepare(self) -> None:
        if self.request.host_name not in self.names:
            self.say(403, f"This server is {' or '.join(sorted(self.names))}; it does not answer to another name.")

    def say(self, status: int, sentence: str) -> None:
        self.set_status(status)
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(sentence + "\n")

    def get(self, name: str | None = None) -> None:
        if name is None:
            data = json.dumps(boot(self.request.query), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
            page = (ASSETS / "page.html").read_text(encoding="utf8")
            self.finish(page.replace("<!--boot-->", BLOCK.format(data)))
            return
        kind, path = TYPES.get(name.rpartition(".")[2]), ASSETS / name
        if kind is None or re.fullmatch(r"[\w-]+\.\w+", name) is None or not path.is_file():
            self.say(404, "There is no such file.")
            return
        self.set_header("Content-Type", f"{kind}; charset=utf-8")
        self.finish(path.read_bytes())

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        self.say(status_code, "There is no such page." if status_code == 404 else "This request is refused.")


class Missing(Page):
    """Any other address."""

    def get(self, name: str | None = None) -> None:
        self.say(404, "There is no such page.")


def boot(query: str) -> dict[str, Any]:
    """Return what the browser starts from: the state of an address, texts, sets of points, limits."""
    state, problem = from_query(query)
    limits = {"window": LIMIT, "points": MAX_POINTS, "bytes": MAX_BYTES, "weight": MAX_WEIGHT}
    found = {
        "state": state.to_dict(),
        "default": State().to_dict(),
        "problem": problem,
        "content": {name: CONTENT[name] for name in ("presets", "controls", "maps", "layers", "glossary")},
        "presets": captions.POINTS,
        "limits": limits,
        "tour": captions.tour(),
        "factors": captions.factors(),
        "claims": captions.claims(),
        "version": vk.__version__,
    }
    return dict(clean(found))


def application(workers: Workers, maps: Workers, names: frozenset[str]) -> HTTPServer:
    """Return the server of the page, without sockets."""
    logging.getLogger("tornado.access").setLevel(logging.ERROR)  # do not log each request that is refused
    given = {"names": names}
    handlers: list[Any] = [
        (r"/", Page, given),
        (r"/assets/(.*)", Page, given),
        (r"/socket", Session, {"workers": workers, "maps": maps, **given}),
        (r".*", Missing, given),
    ]
    made = Application(handlers, websocket_max_message_size=MESSAGE, websocket_ping_interval=20)
    return HTTPServer(made, max_body_size=BODY)
