"""One browser tab: its state, its figures, its jobs, and the messages between them and the browser.

The browser sends what the user did; the tab answers with what to show. A drag is answered at once with the exact maps;
samples follow from a job. Tabs share nothing but the bound on how many jobs run at once."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import panel as pn
from bokeh.document import Document
from panel.custom import JSComponent

from vkernel.core.errors import InputError, require
from vkernel.explore import captions, compute
from vkernel.explore.compute import Result, run_inputs
from vkernel.explore.figures import Figures, timeline
from vkernel.explore.serve import Desk, Workers
from vkernel.explore.state import ASSETS, CONTENT, LIMIT, MAX_BYTES, Point, State, clamp, from_csv, from_query


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
        self.figures.data["points"].on_change("data", lambda attr, old, new: self.receive({"kind": "points", **new}))
        self.bridge.on_msg(lambda event: self.receive(event.data))
        self.commit(self.state)

    def template(self) -> pn.Template:
        """Build the page."""
        page, css = ((ASSETS / name).read_text(encoding="utf8") for name in ("page.html", "page.css"))
        made = pn.Template(page)
        for name, plot in self.figures.plots.items():
            made.add_panel(name, pn.pane.Bokeh(plot, sizing_mode="stretch_both"))
        made.add_panel("bridge", self.bridge)
        given = {"css": css, "content": CONTENT, "presets": captions.POINTS, "dark": self.state.dark}
        for name, value in (given | {"limit": LIMIT, "most": MAX_BYTES}).items():
            made.add_variable(name, value)
        return made

    def open(self, document: Document) -> None:
        """Connect to the document of a browser session; the tab closes when the session ends."""
        self._document = document
        document.on_session_destroyed(lambda context: self.close())

    def close(self) -> None:
        """Disconnect, after which no job starts, and cancel the jobs."""
        self._document = None
        self.desk.cancel()
        self.maps.cancel()

    def receive(self, message: object) -> None:
        """Carry out a message, or answer with a sentence that says why not."""
        given = dict(message) if isinstance(message, dict) else {}
        try:
            self._carry_out(given)
        except (InputError, TypeError, ValueError, OverflowError) as error:  # it cannot be carried out
            self._send("notice", text=str(error))
            self.figures.show_points(self.state)
            self._send_state()
        finally:
            self._send("ready", of=str(given.get("kind")))

    def _carry_out(self, message: dict[str, Any]) -> None:
        state = self.state
        match message:
            case {"kind": "hello", "dark": dark}:  # a browser has loaded the page; dark is its preference
                self._marks, self.result, self._requested = {}, None, None  # send everything
                self.commit(state.replace(dark=bool(dark) or state.dark))
                if self._problem:
                    self._send("notice", text=self._problem)
            case {"kind": "set", **changes}:
                unknown = set(changes) - (set(vars(state)) - {"points", "weights", "d"})
                require(not unknown, f"The page has no control {', '.join(sorted(unknown))}.")
                self.commit(state.replace(**changes))
            case {"kind": "edit", "points": list(points), "weights": list(weights)}:
                self.commit(state.replace(points=points, weights=weights))
            case {"kind": "csv", "text": str(text)}:
                moved, read, sentence = from_csv(text)
                self.commit(state.replace(points=moved, weights=read))
                self._send("notice", text=sentence)
            case {"kind": "points", "x": x, "y": y}:  # from the drawing tool, which moved, added or removed points
                moved = self._placed(x, y)
                if moved == state.points:
                    self._show_exact(state)  # a drag that ended where it began
                else:
                    self.commit(state.replace(points=moved))
            case {"kind": "preview", **changes}:  # during a drag of points or of the time; the state does not change
                drag = {"points": self._placed(changes["x"], changes["y"])} if "x" in changes else changes
                self._show_exact(state.replace(**drag))
            case {"kind": "run"}:
                self._requested = None
                self._run()
            case {"kind": "cancel"}:
                self.desk.cancel()
                self._send("job", label="stopped", stale=self._fresh is None)
            case {"kind": "tour", "step": int(step)} if 0 <= step < len(captions.TOUR):
                self.commit(captions.TOUR[step][2].replace(dark=state.dark))
            case {"kind": "python" | "json" as kind}:
                report = captions.report(state, self._fresh)
                self._send(kind, text=report["python"] if kind == "python" else json.dumps(report, indent=1))
            case _:
                raise InputError(f"The page cannot carry out the message {str(message)[:60]!r}.")

    def _placed(self, x: Sequence[float], y: Sequence[float]) -> tuple[Point, ...]:
        return clamp(zip(x, y, strict=True) if self.state.d == 2 else ((v,) for v in x))

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
        (state, found), result, shown = self._seen, self.result, self._variance
        same = result is not None and result.learned is not None and result.state.d == state.d
        mapped = result if same and "variance" in state.layers else None  # the run whose V is shown
        if mapped is None or shown is None or shown[0].state.d != state.d:
            shown = None
        self.figures.show_exact(found, None if shown is None else shown[2], state)
        samples, share, label = captions.outdated(state, result, None if shown is None else shown[:2])
        marks = {"dark": state.dark, "samples": samples, "map": share, "text": label}
        if marks != self._marks:
            self._marks = marks
            self.figures.restyle(state.dark, samples, share)
            self._send("marks", **marks)
        known = self._variance is not None and self._variance[:2] == (mapped, state.t)
        # a job for the map of V that runs may finish, and the latest time follows
        if mapped is not None and not known and self._document is not None and not self._mapping:
            self._mapping = True
            ended = partial(self._later, self._map_ended, mapped, state.t)
            self.maps.submit(lambda report: compute.variance(mapped, state.t), ended, lambda label, share: None)

    def _map_ended(self, result: Result, t: float, found: np.ndarray | Exception | None) -> None:
        self._mapping = False
        if isinstance(found, Exception):
            self._send("notice", text=f"The map of V failed: {found}")
            return
        if self.result is result:
            self._variance = result, t, found
        self._draw()

    @property
    def _fresh(self) -> Result | None:
        """The last run, if its inputs are those of the state."""
        return self.result if self.result and run_inputs(self.result.state) == run_inputs(self.state) else None

    def _run(self) -> None:
        """Start a job unless its result is there or on its way."""
        wanted = run_inputs(self.state)
        if self._requested == wanted:
            return
        self.desk.cancel()
        if self._fresh is not None:
            self._requested = wanted
            self._send("job", share=1.0)
        elif self._document is not None:
            self._requested = wanted
            self._send("job", label="waiting for a free thread", busy=True, stale=True)
            calls = (partial(self._later, call, wanted) for call in (self._ended, self._progress))
            self.desk.submit(partial(compute.simulate, self.state), *calls)

    def _later(self, call: Callable[..., None], *args: Any) -> None:
        """Call from the thread of the document, if it is still open."""
        if (document := self._document) is not None:
            document.add_next_tick_callback(partial(call, *args))

    def _progress(self, wanted: State, label: str, share: float) -> None:
        if self._requested is wanted and self.desk.busy:
            self._send("job", label=label, share=share, busy=True, stale=True)

    def _ended(self, wanted: State, found: Result | Exception) -> None:
        if self._requested is not wanted:
            return
        if isinstance(found, Exception):
            self._send("notice", text=str(found) if isinstance(found, InputError) else f"This run failed: {found!r}")
            self._send("job", label="no result", stale=True)
            return
        self.result = found
        self.figures.show_laws(found, self.state)
        self._show_exact(self._seen[0])  # the points stay, since one may be dragged now
        self.figures.show_paths(found)
        self._later(self._announce, wanted, found)  # after the data of the figures

    def _announce(self, wanted: State, result: Result) -> None:
        if self._requested is wanted:
            (times, places), shape = timeline(result), result.frames.shape
            self._send("frames", times=times, places=places, count=shape[1], d=shape[2])
            self._send_state()
            self._send("job", share=1.0)

    def _send_state(self) -> None:
        state, fresh, process = self.state, self._fresh, self.state.make_process()
        given: dict[str, Any] = {"state": state.to_dict(), "range": [process.eps, process.T], "stale": fresh is None}
        given |= {"query": state.to_query(), "panel": captions.panel(state, compute.noise_share(state), fresh)}
        self._send("state", **given)

    def _send(self, kind: str, **rest: Any) -> None:
        if self._document is not None:
            self.bridge._send_msg({"kind": kind, **rest})  # the name by which Panel documents it


def page(workers: Workers) -> pn.Template:
    """Build the page of the browser session that requests it."""
    tab = Tab(workers, {k: v[0].decode("utf8", "replace") for k, v in (pn.state.session_args or {}).items() if v})
    if pn.state.curdoc is not None:
        tab.open(pn.state.curdoc)
    return tab.template()
