"""A browser tab for the tests of the page: it records errors and hosts, and measures the layout."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vkernel.explore.state import State, from_query

LAPTOP, *SMALLER = ({"width": w, "height": h} for w, h in ((1280, 720), (1024, 768), (800, 600), (390, 844)))
IDLE = "() => document.getElementById('job-label').textContent === 'samples are up to date'"
HELP = """
window.bokeh = (name) => Bokeh.documents[0].get_model_by_name(name)
window.seen = (name) => {
  const search = (v) => v.model === bokeh(name) ? v : (v.child_views ?? []).map(search).find((f) => f)
  return [...Bokeh.index.roots].map(search).find((f) => f)
}
window.pixel = (name, x, y) => {
  const v = seen(name), box = v.canvas_view.el.getBoundingClientRect()
  return [box.left + v.frame.x_scale.compute(x), box.top + v.frame.y_scale.compute(y)]
}
window.map = () => {
  const image = bokeh('plane picture').renderers.find((r) => r.glyph.type === 'Image').data_source.data.image
  return image.length ? Array.from(image[0].flat?.(Infinity) ?? image[0]) : []
}
window.total = () => map().reduce((a, b) => a + b, 0)
"""


class Watched:
    """A tab that records the errors of its console and the hosts of its requests."""

    def __init__(self, browser: Any, size: dict[str, int] = LAPTOP) -> None:
        self.tab = browser.new_page()
        self.tab.set_viewport_size(size)
        self.tab.set_default_timeout(20_000)
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
            self.tab.wait_for_function(IDLE)
        return self.tab

    def state(self) -> State:
        state, message = from_query(urlsplit(self.tab.url).query)
        assert message is None
        return state

    def save(self, name: str) -> None:
        """Save a screenshot to the folder VKERNEL_SCREENSHOTS, if that is set."""
        if folder := os.environ.get("VKERNEL_SCREENSHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.tab.screenshot(path=str(Path(folder) / f"{name}.png"))

    def wide(self) -> list[str]:
        """Return the parts of the page that extend beyond either side."""
        return self.tab.evaluate(
            """() => [...document.querySelectorAll('header *, main > *, .card, .card *, .stage > * > *, .right *')]
            .filter((e) => e.getClientRects().length && !e.closest('.hidden') && !e.classList.contains('hidden'))
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
              const seen = [...document.querySelectorAll('button, select, input, output, h1, h2, .end, #plane, #laws')]
                .filter((e) => e.getClientRects().length && !e.closest('.hidden, #notice') && !e.matches('.hidden'))
                .map((e) => [e.id || e.innerText, e, e.getBoundingClientRect(), e.closest('aside, .stage, header')])
              const meet = ([, e, a, p], [, f, b, q]) => p === q && !e.contains(f) && !f.contains(e)
                && Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2
                && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2
              return seen.flatMap((one, k) => seen.slice(k + 1).filter((o) => meet(one, o)).map((o) => [one[0], o[0]]))
            }"""
        )
