"""One browser tab: its state, its figures, its jobs, and the messages between them and the browser.

The browser sends what the user did; the tab answers with what to show. A drag is answered at once with the exact maps;
samples follow from a job. Tabs share nothing but the bound on how many jobs run at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import panel as pn
from bokeh.document import Document
from panel.custom import JSComponent

from vkernel.core.errors import InputError, require
from vkernel.explore import captions, compute
from vkernel.explore.captions import ASSETS
from vkernel.explore.compute import Result, run_inputs
from vkernel.explore.figures import Figures, timeline
from vkernel.explore.jobs import Desk, Workers
from vkernel.explore.state import LIMIT, MAX_BYTES, Point, State, clamp, from_csv, from_query, weights_after

SPREAD = (0.618034, 0.754878)  # steps of a low-discrepancy sequence that places new points, per axis
REFUSED = (InputError, TypeError, ValueError, OverflowError)  # raised by messages that cannot be carried out


class Bridge(JSComponent):
    """The message channel to the browser; its script also runs the controls of the template."""

    _esm = (ASSETS / "page.js").read_text(encoding="utf8")


class Tab:
    """The page of one browser tab, started from the query of its address."""

    def __init__(self, workers: Workers, query: str | dict[str, str] = "") -> None:
        self.state, self._problem = from_query(query)
        self.figures, self.bridge = Figures(), Bridge(width=0, height=0)
        self.desk, self.maps = Desk(workers), Desk(workers)
        self.result: Result | None = None
        self._requested: State | None = None  # inputs of the run that was started last
        self._variance: tuple[Result, float, np.ndarray | None] | None = None  # the map of V, with its run and time
        self._mapping = False  # whether a map of V is being computed
        self._marks: dict[str, Any] = {}
        self._document: Document | None = None
        self.figures.points.on_change("data", lambda attr, old, new: self.receive({"kind": "points", **new}))
        self.bridge.on_msg(lambda event: self.receive(event.data))
        self.commit(self.state)

    def template(self) -> pn.Template:
        """Build the page."""
        made = pn.Template((ASSETS / "page.html").read_text(encoding="utf8"))
        for name, plot in (("plane", self.figures.plane), ("line", self.figures.line), ("laws", self.figures.laws)):
            made.add_panel(name, pn.pane.Bokeh(plot, sizing_mode="stretch_both"))
        made.add_panel("bridge", self.bridge)
        made.add_variable("css", (ASSETS / "page.css").read_text(encoding="utf8"))
        made.add_variable("captions", captions)
        made.add_variable("dark", self.state.dark)
        made.add_variable("limit", LIMIT)
        return made

    def open(self, document: Document) -> None:
        """Connect to the document of a browser session; the tab closes when the session ends."""
        self._document = document
        document.on_session_destroyed(lambda context: self.close())

    def close(self) -> None:
        """Disconnect and cancel the jobs."""
        self._document = None
        self.desk.close()
        self.maps.close()

    # Messages from the browser

    def receive(self, message: object) -> None:
        """Carry out a message, or answer with a sentence that says why not."""
        try:
            self._carry_out(dict(message) if isinstance(message, dict) else {})
        except REFUSED as error:
            self._notify(str(error))
            self.figures.show_points(self.state)
            self._send_state()

    def _carry_out(self, message: dict[str, Any]) -> None:
        state, points, weights = self.state, self.state.points, self.state.weights
        match message:
            case {"kind": "hello", "dark": dark}:
                self._greet(bool(dark))
            case {"kind": "set", **changes}:
                unknown = set(changes) - (set(vars(state)) - {"points", "weights", "d"})
                require(not unknown, f"The page has no control {', '.join(sorted(unknown))}.")
                state = state.replace(**changes)
                layers = captions.layers_for(state.sampler, state.layers) if "sampler" in changes else state.layers
                self.commit(state.replace(layers=layers))
            case {"kind": "preset", "name": name}:
                self.commit(state.replace(points=captions.preset(name), weights=()))
            case {"kind": "point", "index": int(k), "x": x, "y": y, "weight": w} if 0 <= k < len(points):
                moved, w = (*points[:k], (x, y)[: state.d], *points[k + 1 :]), (*weights[:k], w, *weights[k + 1 :])
                self.commit(state.replace(points=moved, weights=w))
            case {"kind": "add"}:
                places = (clamp([[LIMIT * (2 * ((0.5 + k * r) % 1) - 1) for r in SPREAD[: state.d]]]) for k in count())
                place = next(p for p in places if p[0] not in points)
                self.commit(state.replace(points=points + place, weights=(*weights, 1)))
            case {"kind": "remove", "index": int(k)} if 0 <= k < len(points):
                require(len(points) > 1, "This is the last training point; a model needs one.")
                self.commit(state.replace(points=points[:k] + points[k + 1 :], weights=weights[:k] + weights[k + 1 :]))
            case {"kind": "csv", "text": str(text)}:
                points, weights, sentence = from_csv(text)
                self.commit(state.replace(points=points, weights=weights))
                self._notify(sentence)
            case {"kind": "points", "x": x, "y": y}:  # from the drawing tool, which moved, added or removed points
                moved = self._placed(x, y)
                if moved == points:
                    self._show_exact(state)  # a drag that ended where it began
                else:
                    self.commit(state.replace(points=moved, weights=weights_after(state, moved)))
            case {"kind": "preview", **changes}:  # during a drag of points or of the time; the state does not change
                try:
                    drag = {"points": self._placed(changes["x"], changes["y"])} if "x" in changes else changes
                    self._show_exact(state.replace(**drag))
                finally:
                    self._send("ready")
            case {"kind": "run"}:
                self._requested = None
                self._run()
            case {"kind": "cancel"}:
                self.desk.cancel()
                self._send_job("stopped", 0.0, stale=self._stale())
            case {"kind": "tour", "step": int(step)} if 0 <= step < len(captions.TOUR):
                self.commit(captions.TOUR[step][2].replace(dark=state.dark))
            case {"kind": "python"}:
                self._send("python", text=captions.snippet(state))
            case {"kind": "json"}:
                self._send("json", text=json.dumps(self.report(), indent=1))
            case _:
                raise InputError(f"The page cannot carry out the message {str(message)[:60]!r}.")

    def _greet(self, dark: bool) -> None:
        """Send everything to a browser that has loaded the page; ``dark`` is its preference."""
        if dark:
            self.state = self.state.replace(dark=True)
        controls = [control for group in captions.CONTROLS.values() for control in group]
        options = {c.name: ["inf" if value == math.inf else value for value, _ in c.options] for c in controls}
        self._send("content", options=options, tour=[{"title": s[0], "text": s[1]} for s in captions.TOUR])
        self._send_state()
        self._marks = {}  # draw and send all
        self._show_exact(self.state)
        if self._problem:
            self._notify(self._problem)
        if self.result is None:
            self._run()
        else:
            self.figures.show_paths(self.result)
            self._send_frames()

    def _placed(self, x: Sequence[float], y: Sequence[float]) -> tuple[Point, ...]:
        return clamp(zip(x, y, strict=True) if self.state.d == 2 else ((v,) for v in x))

    # Figures

    def commit(self, state: State) -> None:
        """Show another state; start a run unless the last one has the same inputs."""
        self.state = state
        self.figures.show_points(state)
        self.figures.show_laws(self.result, state)
        self._show_exact(state)
        self._send_state()
        self._run()

    def _show_exact(self, state: State) -> None:
        """Show the exact maps; that of V follows from a job, since it evaluates every model."""
        self._seen = state, compute.exact(state)
        self._draw()

    def _draw(self) -> None:
        state, found = self._seen
        result, shown = self.result, self._variance
        learned = result is not None and result.learned is not None and result.state.d == state.d
        mapped = learned and "variance" in state.layers
        if not mapped or shown is None or shown[0].state.d != state.d:
            shown = None
        self.figures.show_exact(found, None if shown is None else shown[2], state)
        samples, share, label = captions.outdated(state, result, None if shown is None else shown[:2])
        marks = {"dark": state.dark, "samples": samples, "map": share, "text": label}
        if marks != self._marks:
            self._marks = marks
            self.figures.restyle(state.dark, samples, share)
            self._send("marks", **marks)
        if mapped and result is not None:
            self._start_map(result, state.t)

    def _start_map(self, result: Result, t: float) -> None:
        """Start the job for the map of V, unless it is there; one that runs may finish, and the latest time follows."""
        known = self._variance is not None and self._variance[:2] == (result, t)
        if self._document is None or known or self._mapping:
            return
        self._mapping = True
        ended = partial(self._later, self._map_ended, result, t)
        self.maps.submit(lambda report: compute.variance(result, t), ended, ended, lambda label, share: None)

    def _map_ended(self, result: Result, t: float, found: np.ndarray | Exception | None) -> None:
        self._mapping = False
        if isinstance(found, Exception):
            self._notify(f"The map of V failed: {found}")
            return
        if self.result is result:
            self._variance = result, t, found
        self._draw()

    # Runs

    def _stale(self) -> bool:
        return self.result is None or run_inputs(self.result.state) != run_inputs(self.state)

    def _run(self) -> None:
        """Start a job unless its result is there or on its way."""
        wanted = run_inputs(self.state)
        if self._requested == wanted:
            return
        self.desk.cancel()
        if not self._stale():
            self._requested = wanted
            self._send_job("", 1.0)
        elif self._document is not None:
            self._requested = wanted
            self._send_job("waiting for a free thread", 0.0, busy=True, stale=True)
            calls = (partial(self._later, call, wanted) for call in (self._done, self._failed, self._progress))
            self.desk.submit(partial(compute.simulate, self.state), *calls)

    def _later(self, call: Callable[..., None], *args: Any) -> None:
        """Call from the thread of the document, if it is still open."""
        if (document := self._document) is not None:
            document.add_next_tick_callback(partial(call, *args))

    def _progress(self, wanted: State, label: str, share: float) -> None:
        if self._requested is wanted and self.desk.busy:
            self._send_job(label, share, busy=True, stale=True)

    def _done(self, wanted: State, result: Result) -> None:
        if self._requested is wanted:
            self.result = result
            self.figures.show_laws(result, self.state)
            self._show_exact(self._seen[0])  # the points stay, since one may be dragged now
            self.figures.show_paths(result)
            self._later(self._announce, wanted)  # after the data of the figures

    def _announce(self, wanted: State) -> None:
        if self._requested is wanted:
            self._send_frames()
            self._send_state()
            self._send_job("", 1.0)

    def _failed(self, wanted: State, error: Exception) -> None:
        if self._requested is wanted:
            self._notify(str(error) if isinstance(error, InputError) else f"This run failed: {error!r}")
            self._send_job("no result", 0.0, stale=True)

    def report(self) -> dict[str, Any]:
        """Return the numbers of the page as JSON types."""
        return captions.report(self.state, None if self._stale() else self.result)

    # Messages to the browser

    def _send_job(self, label: str, share: float, *, busy: bool = False, stale: bool = False) -> None:
        self._send("job", busy=busy, label=label, share=share, stale=stale)

    def _send_frames(self) -> None:
        if self.result is not None:
            times, places = timeline(self.result)
            shape = self.result.frames.shape
            self._send("frames", times=times, places=places, count=shape[1], d=shape[2])

    def _send_state(self) -> None:
        state, stale, process = self.state, self._stale(), self.state.make_process()
        panel = captions.panel(state, compute.noise_share(state), None if stale else self.result)._asdict()
        given = {"query": state.to_query(), "preset": captions.preset_name(state.points), "most": MAX_BYTES}
        given |= {"range": [process.eps, process.T], "panel": panel, "stale": stale}
        self._send("state", state=state.to_dict(), **given)

    def _notify(self, sentence: str) -> None:
        self._send("notice", text=sentence)

    def _send(self, kind: str, **rest: Any) -> None:
        if self._document is not None:
            self.bridge._send_msg({"kind": kind, **rest})  # the name by which Panel documents it


def page(workers: Workers) -> pn.Template:
    """Build the page of the browser session that requests it."""
    given = {k: v[0].decode("utf8", "replace") for k, v in (pn.state.session_args or {}).items() if v}
    tab = Tab(workers, given)
    if pn.state.curdoc is not None:
        tab.open(pn.state.curdoc)
    return tab.template()
