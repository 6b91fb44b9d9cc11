"""The server: on the loopback address, for this machine alone, unless told otherwise; nothing comes from elsewhere."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import warnings
import webbrowser
from functools import partial
from typing import Any

from vkernel.core.errors import InputError, require
from vkernel.explore.jobs import Workers

__all__ = ["LOOPBACK", "PORT", "serve", "server"]

PORT, LOOPBACK = 5007, "127.0.0.1"
MESSAGE = 4 << 20  # bytes that a browser may send at once: a file of points is at most 1 MB
FORGET = 15_000  # milliseconds after which a closed tab is forgotten
LOCAL = ("127.0.0.1", "localhost")


def server(port: int = PORT, address: str = LOOPBACK, workers: Workers | None = None) -> Any:
    """A server that is bound but not started, and knows its ``port``; ``port=0`` takes any that is free."""
    try:
        import panel as pn
    except ImportError as error:
        sentence = "The page needs Panel and Bokeh; install them: pip install 'vkernel[explore]'."
        raise InputError(sentence) from error
    from vkernel.explore.page import page
    from vkernel.kernels import ValidityWarning

    require(":" not in address, f"The page listens on IPv4 addresses such as {LOOPBACK}; got {address!r}.")
    require(0 <= port <= 65535, f"A port is a number from 0 to 65535; got {port}.")
    warnings.simplefilter("ignore", ValidityWarning)  # the page says it in words
    logging.getLogger("bokeh.server.views.ws").setLevel(logging.ERROR)  # a tab that closes is no news
    os.environ["BOKEH_RESOURCES"] = "server"  # scripts and styles from here, not from the net
    port = port or _free(address)
    _refuse_taken(port, address)
    pn.extension()
    shared = workers or Workers()

    def tab() -> Any:
        return page(shared)

    return pn.io.server.get_server(
        {"/": tab},
        port=port,
        address=address,
        websocket_origin=_origins(address, port),
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
    shown = LOOPBACK if address == "0.0.0.0" else address
    where = f"http://{shown}:{made.port}/"
    if address not in LOCAL:
        print(
            f"Listening on {address}: anyone who can reach this machine can open the page and let it compute; there is "
            "no password and no encryption. Leave out --address to keep it to yourself."
        )
    print(f"vkernel explore is at {where} (Ctrl-C ends it)", flush=True)
    made.start()
    if open:
        made.io_loop.call_later(0.2, partial(webbrowser.open, where))
    with contextlib.suppress(KeyboardInterrupt):  # the usual end; some loops end without a word
        made.io_loop.start()
    made.stop()
    workers.close()
    print("stopped.")


def _origins(address: str, port: int) -> list[str]:
    """Whose pages may talk to the server: its own, by the names that this address has."""
    names = [*LOCAL] if address in LOCAL or address == "0.0.0.0" else [address]
    if address == "0.0.0.0":
        names += [socket.gethostname(), *_own_addresses()]
    return [f"{name}:{port}" for name in dict.fromkeys(names)]


def _own_addresses() -> list[str]:
    try:
        return socket.gethostbyname_ex(socket.gethostname())[2]
    except OSError:
        return []


def _free(address: str) -> int:
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            raise InputError(f"This machine has no address {address!r}: {error.strerror or error}.") from None
        found: int = probe.getsockname()[1]
        return found


def _refuse_taken(port: int, address: str) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except PermissionError:
            raise InputError(f"Port {port} is not for ordinary users; give --port 1024 or higher.") from None
        except OSError as error:
            if error.errno in (98, 48, 10048):
                sentence = f"Port {port} is taken, perhaps by another vkernel explore; give another, --port {port + 1}."
                raise InputError(sentence) from None
            raise InputError(f"This machine has no address {address!r}: {error.strerror or error}.") from None
