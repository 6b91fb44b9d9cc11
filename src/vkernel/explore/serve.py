"""The server of the page. It listens on the loopback address by default and loads nothing from the network."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import warnings
import webbrowser
from functools import partial
from typing import TYPE_CHECKING

from vkernel.core.errors import InputError, require
from vkernel.explore.jobs import Workers

if TYPE_CHECKING:
    from bokeh.server.server import Server

PORT, LOOPBACK = 5007, "127.0.0.1"
MESSAGE = 4 << 20  # bytes that a browser may send at once: a file of points is at most 1 MB
FORGET = 15_000  # milliseconds after which a closed tab is forgotten
LOCAL = (LOOPBACK, "localhost")


def server(port: int = PORT, address: str = LOOPBACK, workers: Workers | None = None) -> Server:
    """Return a server that is bound but not started, and knows its ``port``; ``port=0`` takes any free one."""
    try:
        import panel as pn
    except ImportError as error:
        raise InputError("The page needs Panel and Bokeh; install them: pip install 'vkernel[explore]'.") from error
    from vkernel.explore.page import page
    from vkernel.kernels import ValidityWarning

    require(":" not in address, f"The page listens on IPv4 addresses such as {LOOPBACK}; got {address!r}.")
    require(0 <= port <= 65535, f"A port is a number from 0 to 65535; got {port}.")
    warnings.simplefilter("ignore", ValidityWarning)  # the panel of results shows it
    logging.getLogger("bokeh.server.views.ws").setLevel(logging.ERROR)  # do not log each tab that closes
    os.environ["BOKEH_RESOURCES"] = "server"  # scripts and styles from this server, not from the network
    port = _bind(port, address)
    pn.extension()
    shared = workers or Workers()
    return pn.io.server.get_server(
        {"/": lambda: page(shared)},  # Panel recognises functions only
        port,
        address,
        _origins(address, port),
        title="vkernel explore",
        location=False,
        websocket_max_message_size=MESSAGE,
        check_unused_sessions_milliseconds=FORGET // 3,
        unused_session_lifetime_milliseconds=FORGET,
    )


def serve(port: int = PORT, open: bool = True, address: str = LOOPBACK) -> None:
    """Serve until interrupted; print the address, and open it in a browser."""
    workers = Workers()
    made = server(port, address, workers)
    where = f"http://{LOOPBACK if address == '0.0.0.0' else address}:{made.port}/"
    if address not in LOCAL:
        print(
            f"Listening on {address}: anyone who can reach this machine can open the page and start computations; "
            "there is no password and no encryption. Leave out --address to listen on this machine alone."
        )
    print(f"vkernel explore is at {where} (Ctrl-C ends it)", flush=True)
    made.start()
    if open:
        made.io_loop.call_later(0.2, partial(webbrowser.open, where))
    with contextlib.suppress(KeyboardInterrupt):  # some loops return instead
        made.io_loop.start()
    made.stop()
    workers.close()
    print("stopped.")


def _origins(address: str, port: int) -> list[str]:
    """Hosts whose pages may connect: those by which the server itself is reached."""
    names = [*LOCAL] if address in (*LOCAL, "0.0.0.0") else [address]
    if address == "0.0.0.0":
        names.append(socket.gethostname())
        with contextlib.suppress(OSError):
            names += socket.gethostbyname_ex(socket.gethostname())[2]
    return [f"{name}:{port}" for name in dict.fromkeys(names)]


def _bind(port: int, address: str) -> int:
    """Return a port that can be bound, the given one or a free one for 0; otherwise say why not."""
    with socket.socket() as probe:
        if port:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except PermissionError:
            raise InputError(f"Port {port} is not for ordinary users; give --port 1024 or higher.") from None
        except OSError as error:
            sentence = f"This machine has no address {address!r}: {error.strerror or error}."
            if error.errno == errno.EADDRINUSE:
                sentence = f"Port {port} is taken, perhaps by another vkernel explore; give another, --port {port + 1}."
            raise InputError(sentence) from None
        found: int = probe.getsockname()[1]
        return found
