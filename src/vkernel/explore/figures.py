"""The pictures: the plane, the line, and the laws beside the plane. They are made once and then only given new data.

Colours are those of every other picture of the package (:mod:`vkernel.plots.base`); maps are viridis, which reads the
same without colour vision.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from bokeh.core.properties import value
from bokeh.models import (
    ColumnDataSource,
    FixedTicker,
    LinearColorMapper,
    PointDrawTool,
    Range1d,
)
from bokeh.models.renderers import GlyphRenderer
from bokeh.palettes import Viridis256
from bokeh.plotting import figure

from vkernel.explore.compute import Exact, axis
from vkernel.explore.simulate import Result
from vkernel.explore.state import LIMIT, Point, State
from vkernel.plots import base

__all__ = ["Pictures", "tiles", "timeline"]

BELOW = 0.34  # of the line's picture: the strip under the axis in which particles move
DRAGGED = "#f0683c"  # the points: the one warm colour on viridis, on white and on black
FAR = 10.0  # sigma/alpha beyond which nothing is seen to move
FADED = 0.4  # opacity of what belongs to an earlier state
MOST_TILES = 6
CROWD = 200  # points above which they are drawn small
GAP = 0.06  # between two tiles, in units of a small one


def _empty(*names: str) -> ColumnDataSource:
    return ColumnDataSource({name: [] for name in names})


class Pictures:
    """The three figures of a tab and the data behind them.

    ``plane`` and ``line`` show the training set in two and in one dimension, ``laws`` the maps of where samples end.
    The browser moves ``moving``, the particles; ``frames`` holds their paths, one column of all frames in a row.
    """

    def __init__(self) -> None:
        self.points = ColumnDataSource({"x": [], "y": [], "size": []}, name="points")
        self.frames = ColumnDataSource({"x": [], "y": []}, name="frames")
        self.moving = ColumnDataSource({"x": [], "y": []}, name="moving")
        self._map, self._tiles = _empty("image", "x", "y", "size"), _empty("image", "x", "y", "size")
        self._arrows, self._lines = _empty("x0", "y0", "x1", "y1", "angle"), _empty("xs", "ys")
        self._titles, self._rings = _empty("x", "y", "text"), _empty("x", "y")
        self._curves = {name: _empty("x", "y") for name in ("noise", "variance", "density", "law", "exact")}
        self._singles = _empty("xs", "ys")
        self._share = LinearColorMapper(palette=Viridis256, low=0, high=1)
        self._mass = LinearColorMapper(palette=Viridis256, low=0, high=1)
        self._inked: list[GlyphRenderer] = []
        self._drawn: list[GlyphRenderer] = []
        self._dots: list[GlyphRenderer] = []
        self._full: dict[tuple[str, str], float] = {}  # opacities of what is not faded
        self._top = 1.0  # the largest density that the line shows
        self._heights, self._rows = Range1d(start=-BELOW, end=1.05), Range1d(start=0, end=3)
        self.plane, self.line, self.laws = self._plane(), self._line(), self._laws()
        self.recolour(False)

    # Figures

    def _figure(self, name: str, heights: Range1d) -> figure:
        made = figure(
            name=name,
            x_range=Range1d(start=-LIMIT, end=LIMIT),
            y_range=heights,
            toolbar_location=None,
            tools="",
            sizing_mode="stretch_both",
            min_border=6,
            outline_line_color=None,
        )
        for ax in made.axis:
            ax.axis_line_color = ax.minor_tick_line_color = None
            ax.major_tick_in, ax.major_tick_out = 0, 3
        made.xaxis.ticker = FixedTicker(ticks=[-2, -1, 0, 1, 2])
        return made

    def _plane(self) -> figure:
        p = self._figure("plane picture", Range1d(start=-LIMIT, end=LIMIT))
        p.yaxis.ticker = FixedTicker(ticks=[-2, -1, 0, 1, 2])
        p.grid.visible = False
        shown: Any = p.image  # Bokeh leaves the mapper out of its types
        self._ground = shown(
            "image", x="x", y="y", dw="size", dh="size", color_mapper=self._share, source=self._map, level="image"
        )
        self._drawn = [
            p.multi_line("xs", "ys", source=self._lines, line_width=1.4, line_dash=[5, 3]),
            p.segment("x0", "y0", "x1", "y1", source=self._arrows, line_alpha=0.85, line_width=1.2),
            p.scatter("x1", "y1", angle="angle", marker="triangle", size=5, source=self._arrows, fill_alpha=0.9),
        ]
        self._flock = p.scatter(
            "x", "y", source=self.moving, size=5, fill_color="white", fill_alpha=0.9, line_color="#1c2430",
            line_alpha=0.8, line_width=0.7,
        )  # fmt: skip
        self._draggable(p)
        p.tags = [self.frames]  # no glyph shows them, but the browser is to have them
        return p

    def _line(self) -> figure:
        p = self._figure("line picture", self._heights)
        p.xgrid.visible = False
        p.yaxis.axis_label = "density"
        p.yaxis.bounds = p.ygrid.bounds = (0, 1e6)  # nothing is measured below the axis
        c = self._curves
        self.noise_area = p.varea("x", 0, "y", source=c["noise"], fill_alpha=0.22)
        self.variance_area = p.varea("x", 0, "y", source=c["variance"], fill_alpha=0.22)
        self.density_line = p.line("x", "y", source=c["density"], line_width=1.2, line_dash=[2, 3])
        self.singles = p.multi_line("xs", "ys", source=self._singles, line_width=1, line_alpha=0.5)
        self.exact_line = p.line("x", "y", source=c["exact"], line_width=1.8, line_dash=[6, 3])
        self.law_area = p.varea("x", 0, "y", source=c["law"], fill_alpha=0.16)
        self.law_line = p.line("x", "y", source=c["law"], line_width=2.4)
        self._inked = [
            p.multi_line("xs", "ys", source=self._lines, line_width=1.2, line_dash=[5, 3]),
            p.segment("x0", "y0", "x1", "y1", source=self._arrows, line_width=1.2),
        ]
        self._heads = p.scatter("x1", "y1", angle="angle", marker="triangle", size=6, source=self._arrows)
        self._grains = p.scatter("x", "y", source=self.moving, size=5, line_color=None, fill_alpha=0.55)
        self._draggable(p)
        return p

    def _draggable(self, p: figure) -> None:
        dots = p.scatter(
            "x", "y", size="size", source=self.points, fill_color=DRAGGED, line_color="white", line_width=2,
            nonselection_fill_alpha=1, nonselection_line_alpha=1, selection_line_color="#1c2430",
        )  # fmt: skip
        self._dots.append(dots)
        tool = PointDrawTool(renderers=[dots], empty_value=14)  # type: ignore[list-item]
        p.add_tools(tool)
        p.toolbar.active_tap = tool
        p.toolbar.active_drag = tool

    def _laws(self) -> figure:
        p = figure(
            name="laws picture", x_range=Range1d(start=0, end=3), y_range=self._rows, toolbar_location=None, tools="",
            sizing_mode="stretch_both", min_border=0, outline_line_color=None,
        )  # fmt: skip
        p.axis.visible = p.grid.visible = False
        shown: Any = p.image  # Bokeh leaves the mapper out of its types
        shown("image", x="x", y="y", dw="size", dh="size", color_mapper=self._mass, source=self._tiles)
        p.scatter("x", "y", source=self._rings, size=6, fill_color=None, line_color=DRAGGED, line_width=1.2)
        p.text(
            "x", "y", "text", source=self._titles, text_color="white", text_font_size="11px", text_baseline="top",
            text_font=value("system-ui, sans-serif"), x_offset=6, y_offset=5,
        )  # fmt: skip
        return p

    def recolour(self, dark: bool) -> None:
        """Ink, paper and lines of the light or the dark page."""
        with base.style(dark=dark):
            ink, lines, look = base.ink(), base.lines(), base.rc_params()
        for p in (self.plane, self.line, self.laws):
            p.background_fill_color = p.border_fill_color = look["figure.facecolor"]
            for ax in p.axis:
                ax.axis_label_text_font_style = "normal"
                ax.major_label_text_color = ax.axis_label_text_color = ax.major_tick_line_color = ink
            p.grid.grid_line_color = look["grid.color"]
        blue, orange, green, pink, *_ = lines
        for area, colour in ((self.noise_area, green), (self.variance_area, pink), (self.law_area, blue)):
            area.glyph.fill_color = colour
        for line, colour in ((self.law_line, blue), (self.singles, blue), (self.exact_line, orange)):
            line.glyph.line_color = colour
        for renderer in (*self._inked, self.density_line):
            renderer.glyph.line_color = ink
        self._heads.glyph.fill_color, self._heads.glyph.line_color = ink, None
        self._grains.glyph.fill_color = self._ink = ink
        self._contrast()

    def _contrast(self) -> None:
        """Lines and arrows of the plane: white on a map, ink on bare paper and on what is faded."""
        bare = not len(self._map.data["image"]) or self._ground.glyph.global_alpha < 1
        for renderer in self._drawn:
            renderer.glyph.line_color = self._ink if bare else "white"
        self._drawn[-1].glyph.fill_color = self._ink if bare else "white"

    def fade(self, samples: bool, variance: bool) -> None:
        """Lower the opacity of what belongs to an earlier state: of all that was sampled, of the map of V."""
        of_run = (self._flock, self._grains, self.law_line, self.law_area, self.exact_line, self.singles)
        for renderers, old in ((of_run, samples), ((self._ground, self.variance_area), variance)):
            for renderer in renderers:
                glyph = renderer.glyph
                for name in ("fill_alpha", "line_alpha", "global_alpha"):
                    if name in glyph.properties():
                        full = self._full.setdefault((glyph.id, name), getattr(glyph, name))
                        setattr(glyph, name, FADED * full if old else full)
        self._contrast()

    # Data

    def show_points(self, state: State) -> None:
        """The training points; a duplicate makes a point larger."""
        size = [min(12 + 3 * np.sqrt(w - 1), 32) if len(state.points) <= CROWD else 6 for w in state.weights]
        y = [p[1] for p in state.points] if state.d == 2 else [0.0] * len(state.points)
        for dots in self._dots:
            dots.glyph.line_width = 2 if len(state.points) <= CROWD else 0.6
        self.points.data = {"x": [p[0] for p in state.points], "y": y, "size": size}

    def show_exact(self, found: Exact, share: np.ndarray | None, state: State) -> None:
        """What is exact at time t; ``share`` is the map of V, shown in place of C where that layer is on."""
        x0, y0, x1, y1 = found.arrows
        angle = np.arctan2(y1 - y0, x1 - x0) - np.pi / 2  # a triangle points up
        top = self._top
        if state.d == 1:
            y0, y1 = y0 - 0.045 * top, y1 - 0.045 * top
        self._arrows.data = {"x0": x0, "y0": y0, "x1": x1, "y1": y1, "angle": angle}
        high = top if state.d == 1 else 1.0
        self._lines.data = {"xs": [line[0] for line in found.lines], "ys": [line[1] * high for line in found.lines]}
        if state.d == 2:
            values = share if state.has("variance") else found.fraction if state.has("noise") else None
            self._map.data = _image(values)
            self._contrast()
            return
        noise = found.fraction * top if state.has("noise") else None
        self._curve("noise", noise)
        self._curve("variance", None if share is None or not state.has("variance") else share * top)
        assert found.density is not None
        self._curve("density", np.minimum(found.density, top) if state.has("noise") else None)

    def _curve(self, name: str, y: np.ndarray | None, centred: bool = False) -> None:
        """A curve over the window: at nodes, or at the centres of cells."""
        if y is None:
            self._curves[name].data = {"x": [], "y": []}
            return
        self._curves[name].data = {"x": _centres(len(y)) if centred else axis(len(y)).numpy(), "y": y}

    def show_laws(self, result: Result | None, state: State) -> None:
        """Where samples end: curves on the line, tiles beside the plane."""
        if result is None or result.state.d != state.d:
            self._tiles.data, self._titles.data, self._rings.data = (
                _image(None),
                _none("x", "y", "text"),
                _none("x", "y"),
            )
            self._singles.data = _none("xs", "ys")
            for name in ("law", "exact"):
                self._curve(name, None)
            return
        exact = result.state.sampler == "exact"  # then the two are one
        name = "exact score" if exact else "samples" if result.state.sampler == "naive" else "learned law"
        named = [(name, result.law)] if state.has("law") else []
        named += [("exact score", result.exact)] if state.has("exact") and not (exact and named) else []
        room = MOST_TILES - len(named) if state.has("members") else 0
        named += [(f"model {k + 1}", law) for k, law in enumerate(result.members[:room])]
        if state.d == 1:
            self._show_curves(result, state)
        else:
            self._show_tiles(named, state, result.state.points)

    def _show_curves(self, result: Result, state: State) -> None:
        top = max(float(np.quantile(result.law, 0.995)), 0.5)
        self._top = top
        self._heights.start, self._heights.end = -BELOW * top, 1.05 * top
        self._curve("law", np.minimum(result.law, top) if state.has("law") else None, True)
        self._curve("exact", np.minimum(result.exact, top) if state.has("exact") else None, True)
        rows = [np.minimum(law, top) for law in result.members] if state.has("members") else []
        self._singles.data = {"xs": [_centres(len(row)) for row in rows], "ys": rows}

    def _show_tiles(self, named: list[tuple[str, np.ndarray]], state: State, points: tuple[Point, ...]) -> None:
        places = tiles(len(named))
        self._rows.start = min((y for _, y, _ in places), default=0.0)
        first = named[0][1] if named else np.ones((1, 1))
        self._mass.high = max(float(np.sqrt(np.quantile(first, 0.998))), 0.3)  # the root, so that thin mass is seen
        xs, ys, sizes = (list(column) for column in zip(*places, strict=True)) if places else ([], [], [])
        self._tiles.data = {"image": [np.sqrt(law) for _, law in named], "x": xs, "y": ys, "size": sizes}
        tops = [y + size for _, y, size in places]
        self._titles.data = {"x": xs, "y": tops, "text": [name for name, _ in named]}
        if len(points) > CROWD:
            self._rings.data = _none("x", "y")
            return
        spots = np.array(points) / (2 * LIMIT) + 0.5
        rings = [spots * size + (x, y) for x, y, size in places[: 2 if state.has("law") else 1]]
        every = np.concatenate(rings) if rings else np.zeros((0, 2))
        self._rings.data = {"x": every[:, 0], "y": every[:, 1]}

    def show_paths(self, result: Result, state: State) -> None:
        """Send all frames of the particles at once; the browser plays them."""
        frames = result.frames
        if state.d == 1:  # a height of its own for each particle, in the strip below the axis
            height = -self._top * BELOW * np.random.default_rng(0).uniform(0.3, 0.9, frames.shape[1])
            y = np.broadcast_to(np.asarray(height, dtype=np.float32), frames.shape[:2])
        else:
            y = frames[..., 1]
        self.frames.data = {"x": frames[..., 0].ravel(), "y": np.ascontiguousarray(y).ravel()}


def timeline(result: Result) -> tuple[list[float], list[float]]:
    """The times of a run's frames and their places in [0, 1] on the slider: even steps, but a tenth for what is far."""
    process, times = result.state.make_process(), result.times.tolist()
    ratios = [float(process.sigma(t) / process.alpha(t)) for t in times]
    near = next((k for k, r in enumerate(ratios) if r <= FAR), 0)
    last = len(times) - 1
    far = 0.1 if 0 < near < last else 0.0
    rest = max(last - near, 1)
    return times, [far * k / near if k < near else far + (1 - far) * (k - near) / rest for k in range(last + 1)]


def tiles(count: int) -> list[tuple[float, float, float]]:
    """Left, bottom and size of up to six squares in a square of side 3: the first is large, the others surround it."""
    if count <= 1:
        return [(0.0, 0.0, 3.0)][:count]
    if count == 2:
        size = (3 - GAP) / 2
        return [(0.0, 3 - size, size), (size + GAP, 3 - size, size)]
    small = (3 - 2 * GAP) / 3
    step, large = small + GAP, 2 * small + GAP
    around = [(2 * step, 2 * step), (2 * step, step), (2 * step, 0.0), (step, 0.0), (0.0, 0.0)]
    return [(0.0, step, large), *((x, y, small) for x, y in around)][:count]


def _image(values: np.ndarray | None) -> dict[str, Any]:
    """A map whose nodes are the centres of its cells."""
    if values is None:
        return _none("image", "x", "y", "size")
    half = LIMIT / (len(values) - 1)
    return {"image": [values], "x": [-LIMIT - half], "y": [-LIMIT - half], "size": [2 * (LIMIT + half)]}


def _none(*names: str) -> dict[str, Any]:
    return {name: [] for name in names}


def _centres(count: int) -> np.ndarray:
    edges = axis(count + 1).numpy()
    return (edges[1:] + edges[:-1]) / 2
