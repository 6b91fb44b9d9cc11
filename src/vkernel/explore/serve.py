"""The server of the page, on the loopback address by default; nothing is loaded from the network."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import socket
import sys
import warnings
import webbrowser
from typing import TYPE_CHECKING

import torch

from vkernel.core.errors import InputError, require
from vkernel.explore.jobs import Workers
from vkernel.explore.state import CONTENT

if TYPE_CHECKING:
    from tornado.httpserver import HTTPServer

PORT, LOOPBACK = 5007, "127.0.0.1"
LOCAL = (LOOPBACK, "localhost")
BACKLOG = 64
SWITCH = 0.001  # seconds after which a thread that computes lets another one continue; Python's default is 5 ms


class Server:
    """A server that is bound, and knows its ``port``; ``port=0`` takes any free one. It is served by the event loop
    that is current when ``start`` is called. Maps have a thread of their own, so that a run does not delay them."""

    def __init__(self, port: int = PORT, address: str = LOOPBACK, workers: Workers | None = None) -> None:
        found = importlib.util.find_spec("tornado") is not None
        require(found, "The page needs Tornado; install it: pip install 'vkernel[explore]'.")
        require(":" not in address, f"The page listens on IPv4 addresses such as {LOOPBACK}; got {address!r}.")
        require(0 <= port <= 65535, f"A port is a number from 0 to 65535; got {port}.")
        self.sockets = [_bind(port, address)]
        self.address, self.port = address, int(self.sockets[0].getsockname()[1])
        self.workers, self.maps = workers or Workers(), Workers(1)
        self.http: HTTPServer | None = None

    def start(self) -> None:
        """Accept connections."""
        from vkernel.explore.web import application
        from vkernel.kernels import ValidityWarning

        warnings.simplefilter("ignore", ValidityWarning)  # the panel of results shows it
        torch.set_num_threads(1)
        self.interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH)
        self.http = application(self.workers, self.maps, names(self.address))
        self.http.add_sockets(self.sockets)

    def stop(self) -> None:
        """Close connections and end all jobs."""
        if self.http is not None:
            self.http.stop()
            sys.setswitchinterval(self.interval)
        for listening in self.sockets:
            listening.close()
        self.workers.close()
        self.maps.close()


def serve(port: int = PORT, open: bool = True, address: str = LOOPBACK) -> None:
    """Serve until interrupted; print the address, and open it in a browser."""
    made = Server(port, address)
    where = f"http://{LOOPBACK if address == '0.0.0.0' else address}:{made.port}/"
    if address not in LOCAL:
        print(CONTENT["notices"]["open"].format(address))

    async def main() -> None:
        made.start()
        print(f"vkernel explore is at {where} (Ctrl-C ends it)", flush=True)
        if open:
            asyncio.get_running_loop().call_later(0.2, webbrowser.open, where)
        await asyncio.Event().wait()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
    made.stop()
    print("stopped.")


def names(address: str) -> frozenset[str]:
    """Return the names by which a server at this address is reached."""
    found = [*LOCAL] if address in (*LOCAL, "0.0.0.0") else [address]
    if address == "0.0.0.0":
        found.append(socket.gethostname())
        with contextlib.suppress(OSError):
            found += socket.gethostbyname_ex(socket.gethostname())[2]
    return frozenset(name.lower() for name in found)


def _bind(port: int, address: str) -> socket.socket:
    """Return a socket that listens; otherwise say why not."""
    made = socket.socket()
    if port:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((address, port))
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        faults = {errno.EACCES: f"Port {port} is not for ordinary users; give --port 1024 or higher."}
        taken = f"Port {port} is taken, perhaps by another vkernel explore; give another, --port {port + 1}."
        other = f"This machine has no address {address!r}: {error.strerror or error}."
        raise InputError((faults | {errno.EADDRINUSE: taken}).get(error.errno or 0, other)) from None
    made.setblocking(False)
    return made
