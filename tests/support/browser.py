"""A browser tab for the tests of the page: it records errors and hosts, and measures the layout."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vkernel.explore.state import State, from_query

LAPTOP, *SMALLER = ({"width": w, "height": h} for w, h in ((1280, 720), (1024, 768), (390, 844)))
IDLE = "() => explore.settled && document.getElementById('job-label').textContent === 'samples are up to date'"
HELP = """
window.pixel = (point, cell = 0) => {
  const box = document.getElementById('canvas').getBoundingClientRect(), [x, y] = explore.stage.cells[cell].at(point)
  return [box.left + x, box.top + y]
}
window.total = () => (explore.map.arrays.field ?? explore.map.arrays.values).data.reduce((a, b) => a + b, 0)
window.points = () => explore.store.state.points
void 0
"""


class Server:
    """The page as a process of its own, with the threads that a user would have."""

    def __init__(self, port: int = 0) -> None:
        command = [sys.executable, "-m", "vkernel.cli", "explore", "--no-open", "--port", str(port)]
        environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen(command, env=environment, **pipes)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", line)
        assert found, line + self.process.stdout.read()
        self.address, self.port = found[0], int(found[1])

    def stop(self) -> str:
        """Interrupt the process as a user does, and return what it has printed since its address."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(20) == 0
        assert self.process.stdout is not None
        return self.process.stdout.read()


class Watched:
    """A tab that records the errors of its console and the hosts of its requests."""

    def __init__(self, browser: Any, size: dict[str, int] = LAPTOP) -> None:
        self.tab = browser.new_page()
        self.tab.set_viewport_size(size)
        self.tab.set_default_timeout(15_000)
        self.errors: list[str] = []
        self.hosts: set[str] = set()
        self.tab.on("console", lambda m: self.errors.append(m.text) if m.type in ("error", "warning") else None)
        self.tab.on("pageerror", lambda error: self.errors.append(str(error)))
        self.tab.on("request", lambda r: self.hosts.add(urlsplit(r.url).netloc) if r.url[:4] == "http" else None)
        self.tab.on("websocket", lambda w: self.hosts.add(urlsplit(w.url).netloc))

    def open(self, address: str, idle: bool = True) -> Any:
        self.tab.goto(address)
        self.tab.wait_for_selector("#app[data-ready]")
        self.tab.evaluate(HELP)
        if idle:
            self.idle()
        return self.tab

    def idle(self) -> None:
        """Wait until map, address and samples are those of the state."""
        self.tab.wait_for_function(IDLE)

    def settle(self) -> None:
        """Wait until map and address are those of the state."""
        self.tab.wait_for_function("() => explore.settled")

    def state(self) -> State:
        """Return the state of the address, once it is that of the page."""
        self.settle()
        state, message = from_query(urlsplit(self.tab.url).query)
        assert message is None
        return state

    def pixel(self, *point: float) -> tuple[float, float]:
        """Return where a point of the window is on the screen."""
        x, y = self.tab.evaluate("(point) => pixel(point)", list(point))
        return x, y

    def save(self, name: str) -> None:
        """Save a screenshot to the folder VKERNEL_SCREENSHOTS, if that is set."""
        if folder := os.environ.get("VKERNEL_SCREENSHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.tab.screenshot(path=str(Path(folder) / f"{name}.png"))

    def wide(self) -> list[str]:
        """Return the parts of the page that extend beyond either side."""
        return self.tab.evaluate(
            """() => [...document.querySelectorAll('header *, main > *, .card, .card *, .stage > * > *, .right *')]
            .filter((e) => e.checkVisibility() && !e.closest('.hidden, option') && !e.matches('.hidden'))
            .filter((e) => {
              const b = e.getBoundingClientRect(), card = e.closest('.card, .stage')?.getBoundingClientRect()
              return b.left < -1 || b.right > (card?.right ?? innerWidth) + 1
            })
            .map((e) => e.id || e.className || e.tagName)"""
        )

    def overlapping(self) -> list[list[str]]:
        """Return pairs of controls that overlap."""
        return self.tab.evaluate(
            """() => {
              const kinds = 'button, select, input, output, h1, h2, .end, #canvas, #legend, #probe'
              const seen = [...document.querySelectorAll(kinds)]
                .filter((e) => e.checkVisibility() && !e.closest('.hidden, #notice') && !e.matches('.hidden'))
                .map((e) => [e.id || e.innerText, e, e.getBoundingClientRect(), e.closest('aside, .stage, header')])
              const meet = ([, e, a, p], [, f, b, q]) => p === q && !e.contains(f) && !f.contains(e)
                && Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2
                && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2
              return seen.flatMap((one, k) => seen.slice(k + 1).filter((o) => meet(one, o)).map((o) => [one[0], o[0]]))
            }"""
        )
