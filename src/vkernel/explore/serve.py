"""The server of the page, on the loopback address by default, and its threads; nothing is loaded from the network.

Long work runs beside the page: one job per desk, where a new one replaces the old, and few at once on a server. A job
calls ``report(label, share)`` after each step of sampling or training; once it is cancelled that call raises
``CancelledError``, and whatever the job returns is dropped."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import warnings
import webbrowser
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from vkernel.core.errors import InputError, require
from vkernel.explore.compute import Report
from vkernel.explore.state import CONTENT

if TYPE_CHECKING:
    from bokeh.server.server import Server

PORT, LOOPBACK = 5007, "127.0.0.1"
MESSAGE = 4 << 20  # bytes that a browser may send at once: a file of points is at most 1 MB
FORGET = 15_000  # milliseconds after which a closed tab is forgotten
LOCAL = (LOOPBACK, "localhost")


class Workers(ThreadPoolExecutor):
    """The threads of a server: at most ``at_once`` jobs run, the others wait."""

    def __init__(self, at_once: int = 2) -> None:
        require(at_once >= 1, f"At least one job must be able to run; got {at_once}.")
        super().__init__(at_once, thread_name_prefix="vkernel explore")
        self.closed = False

    def close(self) -> None:
        """Cancel all jobs and wait for their threads, since a process must not exit during a torch operation."""
        self.closed = True
        self.shutdown(cancel_futures=True)


class Desk:
    """The job of a tab: the latest one, until it is cancelled."""

    def __init__(self, workers: Workers) -> None:
        self._workers, self._stop = workers, threading.Event()
        self.future: Future[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether a job is waiting or running."""
        return self.future is not None and not self._stop.is_set() and not self.future.done()

    def submit(self, work: Callable[[Report], object], ended: Callable[[object], None], progress: Report) -> None:
        """Start ``work(report)`` instead of the current job; its thread calls ``ended`` with the result or an error."""
        self.cancel()
        if self._workers.closed:
            return
        stop = self._stop = threading.Event()

        def report(label: str, share: float) -> None:
            if stop.is_set() or self._workers.closed:
                raise CancelledError
            progress(label, share)

        def run() -> None:
            try:
                found = work(report)
            except Exception as error:  # every error of the thread must reach the page
                found = error
            if not stop.is_set() and not self._workers.closed:
                ended(found)

        self.future = self._workers.submit(run)

    def cancel(self) -> None:
        """Stop the current job at its next report; a job that waits never starts."""
        self._stop.set()
        if self.future is not None:
            self.future.cancel()


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
    pages: dict[str, Any] = {"/": lambda: page(shared)}  # Panel recognises functions only
    limits: dict[str, Any] = {"websocket_max_message_size": MESSAGE, "unused_session_lifetime_milliseconds": FORGET}
    limits["check_unused_sessions_milliseconds"] = FORGET // 3
    origins = _origins(address, port)
    return pn.io.server.get_server(pages, port, address, origins, title="vkernel explore", location=False, **limits)


def serve(port: int = PORT, open: bool = True, address: str = LOOPBACK) -> None:
    """Serve until interrupted; print the address, and open it in a browser."""
    workers = Workers()
    made = server(port, address, workers)
    where = f"http://{LOOPBACK if address == '0.0.0.0' else address}:{made.port}/"
    if address not in LOCAL:
        print(CONTENT["notices"]["open"].format(address))
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
    """Return hosts whose pages may connect: those by which the server itself is reached."""
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
        except OSError as error:
            faults = {errno.EACCES: f"Port {port} is not for ordinary users; give --port 1024 or higher."}
            taken = f"Port {port} is taken, perhaps by another vkernel explore; give another, --port {port + 1}."
            other = f"This machine has no address {address!r}: {error.strerror or error}."
            raise InputError((faults | {errno.EADDRINUSE: taken}).get(error.errno or 0, other)) from None
        return int(probe.getsockname()[1])
