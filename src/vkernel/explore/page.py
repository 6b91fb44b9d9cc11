"""One tab: its state, its pictures, its job, and the messages between them and the browser.

The browser sends what the user did, the tab answers with what is to be shown; nothing is shared between tabs but the
bound on how many jobs run at once. A drag is answered at once with the exact maps; samples follow from a job.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import panel as pn
from bokeh.document import Document
from panel.custom import JSComponent

from vkernel.core.errors import InputError, require
from vkernel.explore import compute
from vkernel.explore.figures import Pictures, timeline
from vkernel.explore.jobs import Desk, Workers
from vkernel.explore.knobs import GROUPS, LAYER_WORDS, layers_for
from vkernel.explore.presets import PRESETS, known_as, preset
from vkernel.explore.report import report
from vkernel.explore.simulate import Result, concerns, simulate, variance
from vkernel.explore.snippet import snippet
from vkernel.explore.state import LIMIT, MOST_BYTES, SAMPLERS, State, clamped, from_csv, from_query, weights_after
from vkernel.explore.tour import STEPS
from vkernel.explore.words import earlier, said
from vkernel.version import __version__

__all__ = ["Tab", "page"]

ASSETS = Path(__file__).parent / "assets"
FIELDS = ("sampler", "kappa", "features", "ratio", "tau", "K", "process", "eps", "steps", "seed", "t", "dark", "layers")
SPREAD = (0.618034, 0.754878)  # steps that spread new points over the window, along each axis


class Bridge(JSComponent):
    """The line to the browser: messages both ways; its script also runs the controls that the template holds."""

    _esm = (ASSETS / "page.js").read_text(encoding="utf8")


class Tab:
    """The page of one browser tab, begun from the query of its address."""

    def __init__(self, workers: Workers, query: str | dict[str, str] = "") -> None:
        self.state, self._message = from_query(query)
        self.pictures, self.bridge = Pictures(), Bridge(width=0, height=0)
        self.desk, self.sketches = Desk(workers), Desk(workers)
        self._share: np.ndarray | None = None  # the map of V, and of which result and time it is
        self._share_of: tuple[Result, float] | None = None
        self._drawing: Result | None = None  # whose map of V is under way
        self._marks: dict[str, Any] = {}
        self.result: Result | None = None
        self._asked: State | None = None
        self._document: Document | None = None
        self.pictures.recolour(self.state.dark)
        self.pictures.points.on_change("data", lambda attr, old, new: self._moved())
        self.bridge.on_msg(lambda event: self.receive(event.data))
        self._show_all()

    def template(self) -> pn.Template:
        """The page itself."""
        made = pn.Template((ASSETS / "page.html").read_text(encoding="utf8"))
        for name, item in (
            ("plane", pn.pane.Bokeh(self.pictures.plane, sizing_mode="stretch_both")),
            ("line", pn.pane.Bokeh(self.pictures.line, sizing_mode="stretch_both")),
            ("laws", pn.pane.Bokeh(self.pictures.laws, sizing_mode="stretch_both")),
            ("bridge", self.bridge),
        ):
            made.add_panel(name, item)
        made.add_variable("css", (ASSETS / "page.css").read_text(encoding="utf8"))
        made.add_variable("groups", GROUPS)
        made.add_variable("layers", LAYER_WORDS)
        made.add_variable("dark", self.state.dark)
        plane = {k: v[0] for k, v in PRESETS.items() if len(preset(k)[0]) == 2}
        line = {k: v[0] for k, v in PRESETS.items() if k not in plane}
        made.add_variable("presets", (("in the plane", plane), ("on the line", line)))
        made.add_variable("limit", LIMIT)
        made.add_variable("version", __version__)
        return made

    def open(self, document: Document) -> None:
        """The tab is in a browser: jobs may report to its document, and end when it is closed."""
        self._document = document
        document.on_session_destroyed(lambda context: self.close())

    def close(self) -> None:
        """The tab is gone: nobody waits for its job."""
        self._document = None
        self.desk.close()
        self.sketches.close()

    # What the browser says

    def receive(self, message: Any) -> None:
        """Answer a message; what cannot be done is answered with a sentence."""
        kind = message.get("kind") if isinstance(message, dict) else None
        handler: Callable[..., None] | None = getattr(self, f"_on_{kind}", None) if isinstance(kind, str) else None
        given = {k: v for k, v in message.items() if k != "kind"} if isinstance(message, dict) else {}
        try:
            require(handler is not None, f"The page does not know the message {str(kind)[:20]!r}.")
            assert handler is not None
            handler(**given)
        except (InputError, TypeError, ValueError, OverflowError) as error:
            self._say(str(error))
            self.pictures.show_points(self.state)
            self._send_state()

    def _on_hello(self, dark: bool = False) -> None:
        if dark:  # what the browser prefers, where the address does not say
            self.state = self.state.but(dark=True)
            self.pictures.recolour(True)
        knobs = [knob for _, group in GROUPS for knob in group]
        self._send({"kind": "knobs", "options": {k.field: [_word(v) for v, _ in k.options] for k in knobs}})
        self._send({"kind": "tour", "steps": [{"title": s.title, "text": s.text} for s in STEPS]})
        self._send_state()
        self._marks = {}
        self._mark(self.state)
        if self._message:
            self._say(self._message)
        if self.result is None:
            self._run()
        else:
            self.pictures.show_paths(self.result, self.result.state)
            self._send_frames()

    def _on_set(self, **changes: Any) -> None:
        odd = sorted(set(changes) - set(FIELDS))
        require(not odd, f"The page has no knob {', '.join(odd)}.")
        if "layers" in changes:
            changes["layers"] = tuple(changes["layers"])
        if "sampler" in changes:
            require(changes["sampler"] in SAMPLERS, f"Nothing samples by {changes['sampler']!r}.")
            changes["layers"] = layers_for(changes["sampler"], self.state.layers)
        self.commit(self.state.but(**changes))

    def _on_preset(self, name: str) -> None:
        self.commit(self.state.but(points=preset(name), weights=()))

    def _on_point(self, index: int, x: float, y: float = 0.0, weight: int = 1) -> None:
        require(0 <= int(index) < len(self.state.points), f"There is no point {index}.")
        points, weights = list(self.state.points), list(self.state.weights)
        points[int(index)] = (x, y)[: self.state.d]
        weights[int(index)] = weight
        self.commit(self.state.but(points=tuple(points), weights=tuple(weights)))

    def _on_add(self) -> None:
        places = (
            tuple(round(LIMIT * (2 * ((0.5 + k * step) % 1) - 1), 3) for step in SPREAD[: self.state.d])
            for k in count()
        )
        place = next(p for p in places if p not in self.state.points)
        self.commit(self.state.but(points=(*self.state.points, place), weights=(*self.state.weights, 1)))

    def _on_remove(self, index: int) -> None:
        require(0 <= int(index) < len(self.state.points), f"There is no point {index}.")
        keep = [k for k in range(len(self.state.points)) if k != index]
        require(keep, "This is the last training point; a model needs one.")
        self.commit(
            self.state.but(
                points=tuple(self.state.points[k] for k in keep), weights=tuple(self.state.weights[k] for k in keep)
            )
        )

    def _on_csv(self, text: str) -> None:
        require(isinstance(text, str), "A file of points must be text.")
        points, weights, sentence = from_csv(text)
        self.commit(self.state.but(points=points, weights=weights))
        self._say(sentence)

    def _on_drag(self, x: list[float], y: list[float]) -> None:
        """On the way: the exact maps alone, nothing kept."""
        try:
            self._show_exact(self.state.but(points=self._placed(x, y)))
        finally:
            self._send({"kind": "ready"})

    def _on_time(self, t: float) -> None:
        """On the way: the maps at another time."""
        try:
            self._show_exact(self.state.but(t=t))
        finally:
            self._send({"kind": "ready"})

    def _on_run(self) -> None:
        self._asked = None
        self._run()

    def _on_cancel(self) -> None:
        self.desk.cancel()
        self._send({"kind": "job", "busy": False, "label": "stopped", "share": 0.0, "stale": self._stale()})

    def _on_tour(self, step: int) -> None:
        require(0 <= int(step) < len(STEPS), f"The tour has {len(STEPS)} steps; there is no step {step}.")
        self.commit(STEPS[int(step)].state.but(dark=self.state.dark))

    def _on_python(self) -> None:
        self._send({"kind": "python", "text": snippet(self.state)})

    def _on_json(self) -> None:
        self._send({"kind": "json", "text": json.dumps(self.report(), indent=1)})

    def _moved(self) -> None:
        """The points' own tool moved, added or removed points."""
        data = self.pictures.points.data
        x, y = list(data["x"]), list(data["y"])
        try:
            points = self._placed(x, y)
            if points == self.state.points:
                self._show_exact(self.state)  # a drag that came back
                return
            self.commit(self.state.but(points=points, weights=weights_after(self.state, points)))
        except (InputError, TypeError, ValueError) as error:
            self._say(str(error))
            self.pictures.show_points(self.state)

    def _placed(self, x: list[Any], y: list[Any]) -> tuple[tuple[float, ...], ...]:
        places = zip(x, y, strict=True) if self.state.d == 2 else ((v,) for v in x)
        return tuple(tuple(round(v, 3) + 0.0 for v in p) for p in clamped(places))

    # What is shown

    def commit(self, state: State) -> None:
        """Show another state; a new run begins where this one's samples are not those of the last."""
        if state.dark != self.state.dark:
            self.pictures.recolour(state.dark)
        self.state = state
        self._show_all()
        self._send_state()
        self._run()

    def _show_all(self) -> None:
        self.pictures.show_points(self.state)
        self.pictures.show_laws(self.result, self.state)
        self._show_exact(self.state)

    def _show_exact(self, state: State) -> None:
        """The exact maps at once; that of V follows, since it asks every model."""
        self._seen = state, compute.exact(state)
        result = self.result
        if not state.has("variance") or result is None or result.learned is None or result.state.d != state.d:
            self._share = None
        else:
            self._sketch(result, state.t)
        self.pictures.show_exact(self._seen[1], self._share, state)
        self._mark(state)

    def _sketch(self, result: Result, t: float) -> None:
        """Begin the map of V, unless it is there; one that is under way is let finish, and the latest time follows."""
        if self._document is None or self._share_of == (result, t) or self._drawing is result:
            return
        self._drawing = result
        self.sketches.submit(
            lambda tell: variance(result, t),
            lambda share: self._later(partial(self._sketched, result, t, share)),
            lambda error: self._later(partial(self._unsketched, result, error)),
            lambda label, share: None,
        )

    def _sketched(self, result: Result, t: float, share: np.ndarray | None) -> None:
        if self._drawing is result:
            self._drawing = None
        state, found = self._seen
        if self.result is result and state.has("variance") and state.d == result.state.d:
            self._share, self._share_of = share, (result, t)
            self.pictures.show_exact(found, share, state)
            self._mark(state)
            self._sketch(result, state.t)

    def _unsketched(self, result: Result, error: Exception) -> None:
        if self._drawing is result:
            self._drawing = None
        self._say(f"The map of V failed: {error}")

    def _mark(self, state: State) -> None:
        """Fade and name what belongs to another state than the one that is seen."""
        samples, share, sentence = earlier(state, self.result, None if self._share is None else self._share_of)
        marks = {"kind": "marks", "samples": samples, "map": share, "text": sentence}
        if marks != self._marks:
            self._marks = marks
            self.pictures.fade(samples, share)
            self._send(marks)

    def _stale(self) -> bool:
        return self.result is None or concerns(self.result.state) != concerns(self.state)

    def _run(self) -> None:
        """Begin a job, unless its result is there or on its way."""
        wanted = concerns(self.state)
        if self._asked == wanted:
            return
        self.desk.cancel()
        if not self._stale():
            self._asked = wanted
            self._send({"kind": "job", "busy": False, "label": "", "share": 1.0, "stale": False})
            return
        if self._document is None:
            return
        self._asked = wanted
        state = self.state
        self._send({"kind": "job", "busy": True, "label": "waiting for a place", "share": 0.0, "stale": True})
        self.desk.submit(
            partial(simulate, state),
            lambda result: self._later(partial(self._done, state, result)),
            lambda error: self._later(partial(self._failed, state, error)),
            lambda label, share: self._later(partial(self._progress, state, label, share)),
        )

    def _later(self, call: Callable[[], None]) -> None:
        """In the document's turn, if it is still there."""
        document = self._document
        if document is not None:
            document.add_next_tick_callback(call)

    def _current(self, state: State) -> bool:
        return self._document is not None and concerns(state) == concerns(self.state)

    def _progress(self, state: State, label: str, share: float) -> None:
        if self._current(state) and self.desk.busy:
            self._send({"kind": "job", "busy": True, "label": label, "share": min(share, 1.0), "stale": True})

    def _done(self, state: State, result: Result) -> None:
        if not self._current(state):
            return
        self.result = result
        self.pictures.show_laws(result, self.state)
        self._show_exact(self._seen[0])  # points stay where they are: one may be on its way
        self.pictures.show_paths(result, result.state)
        self._later(partial(self._shown, state))  # what was drawn above is sent before what is said

    def _shown(self, state: State) -> None:
        if not self._current(state):
            return
        self._send_frames()
        self._send_state()
        self._send({"kind": "job", "busy": False, "label": "", "share": 1.0, "stale": False})

    def _failed(self, state: State, error: Exception) -> None:
        if not self._current(state):
            return
        sentence = str(error) if isinstance(error, InputError) else f"This run failed: {error!r}"
        self._say(sentence)
        self._send({"kind": "job", "busy": False, "label": "no result", "share": 0.0, "stale": True})

    def _send_frames(self) -> None:
        result = self.result
        if result is None:
            return
        times, places = timeline(result)
        count = result.frames.shape[1]
        self._send({"kind": "frames", "times": times, "places": places, "count": count, "d": result.state.d})

    def _send_state(self) -> None:
        state = self.state
        words = said(state, compute.noise_share(state), None if self._stale() else self.result)
        self._send(
            {
                "kind": "state",
                "state": state.to_dict(),
                "query": state.to_query(),
                "range": [state.make_process().eps, state.make_process().T],
                "preset": known_as(state.points),
                "words": {"number": words.number, "caption": words.caption, "sentences": list(words.sentences)},
                "stale": self._stale(),
                "most": MOST_BYTES,
            }
        )

    def report(self) -> dict[str, Any]:
        """The numbers of the page."""
        return report(self.state, None if self._stale() else self.result)

    def _say(self, sentence: str) -> None:
        self._send({"kind": "say", "text": sentence})

    def _send(self, message: dict[str, Any]) -> None:
        if self._document is not None:
            self.bridge._send_msg(message)


def page(workers: Workers) -> pn.Template:
    """The page of the tab that asks for it."""
    document = pn.state.curdoc
    given = {k: v[0].decode("utf8", "replace") for k, v in (pn.state.session_args or {}).items() if v}
    tab = Tab(workers, given)
    if document is not None:
        tab.open(document)
    return tab.template()


def _word(value: Any) -> Any:
    return "inf" if value == float("inf") else value
