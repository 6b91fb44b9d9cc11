"""The figures: the plane, the line, and the laws beside the plane. They are created once and then receive new data.

Colours are those of all pictures of the package (:mod:`vkernel.plots`); maps are viridis, which is readable without
colour vision.
"""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import numpy as np
from bokeh.core.properties import value
from bokeh.models import ColumnDataSource, FixedTicker, LinearColorMapper, PointDrawTool, Range1d
from bokeh.models.renderers import GlyphRenderer
from bokeh.palettes import Viridis256
from bokeh.plotting import figure

from vkernel.explore.compute import Exact, Result, axis
from vkernel.explore.state import LIMIT, Point, State
from vkernel.plots.base import style

__all__ = ["Figures", "tiles", "timeline"]

BELOW = 0.34  # height of the strip under the axis of the line, in which particles move
DRAGGED = "#f0683c"  # the training points: the one warm colour on viridis, on white and on black
DARK, TICKS = "#1c2430", [-2, -1, 0, 1, 2]
FAR = 10.0  # sigma/alpha beyond which no motion is visible
FADED = 0.4  # factor of the opacity of data of an earlier state
MAX_TILES, GAP = 6, 0.06  # tiles of laws, and the gap between two of them in units of a small one
CROWD = 200  # points above which they are drawn small
BARE: dict[str, Any] = {
    "toolbar_location": None,
    "tools": "",
    "sizing_mode": "stretch_both",
    "outline_line_color": None,
}


def _source(*names: str, name: str | None = None) -> ColumnDataSource:
    return ColumnDataSource(_empty(*names), name=name)


def _empty(*names: str) -> dict[str, Any]:
    return {name: [] for name in names}


def _image(values: np.ndarray | None) -> dict[str, Any]:
    """The data of a map whose nodes are the centres of its cells."""
    if values is None:
        return _empty("image", "x", "y", "size")
    half = LIMIT / (len(values) - 1)
    return {"image": [values], "x": [-LIMIT - half], "y": [-LIMIT - half], "size": [2 * (LIMIT + half)]}


def _draw_image(p: figure, source: ColumnDataSource, high: LinearColorMapper, **options: Any) -> GlyphRenderer:
    draw: Any = p.image  # Bokeh omits color_mapper from its types
    made: GlyphRenderer = draw("image", x="x", y="y", dw="size", dh="size", source=source, color_mapper=high, **options)
    return made


class Figures:
    """The three figures of a tab and their data.

    ``plane`` and ``line`` show the training set in two and in one dimension, ``laws`` the maps of where samples end.
    The browser moves ``moving``, the particles; ``frames`` holds their paths, all frames in one column.
    """

    def __init__(self) -> None:
        self.points = _source("x", "y", "size", name="points")
        self.frames, self.moving = _source("x", "y", name="frames"), _source("x", "y", name="moving")
        self._map, self._tiles = (_source("image", "x", "y", "size") for _ in range(2))
        self._arrows, self._lines = _source("x0", "y0", "x1", "y1", "angle"), _source("xs", "ys")
        self._titles, self._rings, self._members = _source("x", "y", "text"), _source("x", "y"), _source("xs", "ys")
        self._curves = {name: _source("x", "y") for name in ("noise", "variance", "density", "law", "exact")}
        self._mass = LinearColorMapper(palette=Viridis256, low=0, high=1)
        self._dots: list[GlyphRenderer] = []
        self._top = 1.0  # the largest density shown on the line
        self._heights, self._rows = Range1d(start=-BELOW, end=1.05), Range1d(start=0, end=3)
        self.plane, self.line, self.laws = self._make_plane(), self._make_line(), self._make_laws()
        self.recolour(False)
        self.fade(False, False)

    # Figures

    def _figure(self, name: str, heights: Range1d) -> figure:
        made = figure(name=name, x_range=Range1d(start=-LIMIT, end=LIMIT), y_range=heights, min_border=6, **BARE)
        for ax in made.axis:
            ax.axis_line_color = ax.minor_tick_line_color = None
            ax.major_tick_in, ax.major_tick_out = 0, 3
        made.xaxis.ticker = FixedTicker(ticks=TICKS)
        return made

    def _make_plane(self) -> figure:
        p = self._figure("plane picture", Range1d(start=-LIMIT, end=LIMIT))
        p.yaxis.ticker = FixedTicker(ticks=TICKS)
        p.grid.visible = False
        share = LinearColorMapper(palette=Viridis256, low=0, high=1)
        self._map_image = _draw_image(p, self._map, share, level="image")
        self._on_map: list[GlyphRenderer] = [
            p.multi_line("xs", "ys", source=self._lines, line_width=1.4, line_dash=[5, 3]),
            p.segment("x0", "y0", "x1", "y1", source=self._arrows, line_alpha=0.85, line_width=1.2),
            p.scatter("x1", "y1", angle="angle", marker="triangle", size=5, source=self._arrows, fill_alpha=0.9),
        ]
        self._particles = p.scatter(
            "x", "y", source=self.moving, size=5, fill_color="white", line_color=DARK, line_width=0.7
        )
        self._add_points(p)
        p.tags = [self.frames]  # no glyph shows the frames, but the browser must receive them
        return p

    def _make_line(self) -> figure:
        p, c = self._figure("line picture", self._heights), self._curves
        p.xgrid.visible = False
        p.yaxis.axis_label = "density"
        p.yaxis.bounds = p.ygrid.bounds = (0, 1e6)  # no scale below the axis
        self._areas = {name: p.varea("x", 0, "y", source=c[name]) for name in ("noise", "variance")}
        self._strokes: dict[str, GlyphRenderer] = {
            "density": p.line("x", "y", source=c["density"], line_width=1.2, line_dash=[2, 3]),
            "members": p.multi_line("xs", "ys", source=self._members, line_width=1),
            "exact": p.line("x", "y", source=c["exact"], line_width=1.8, line_dash=[6, 3]),
        }
        self._areas["law"] = p.varea("x", 0, "y", source=c["law"])
        self._strokes |= {
            "law": p.line("x", "y", source=c["law"], line_width=2.4),
            "boundaries": p.multi_line("xs", "ys", source=self._lines, line_width=1.2, line_dash=[5, 3]),
            "arrows": p.segment("x0", "y0", "x1", "y1", source=self._arrows, line_width=1.2),
        }
        self._heads = p.scatter(
            "x1", "y1", angle="angle", marker="triangle", size=6, source=self._arrows, line_color=None
        )
        self._grains = p.scatter("x", "y", source=self.moving, size=5, line_color=None)
        self._add_points(p)
        return p

    def _add_points(self, p: figure) -> None:
        dots = p.scatter(
            "x", "y", size="size", source=self.points, fill_color=DRAGGED, line_color="white", line_width=2,
            nonselection_fill_alpha=1, nonselection_line_alpha=1, selection_line_color=DARK,
        )  # fmt: skip
        self._dots.append(dots)
        tool = PointDrawTool(renderers=[dots], empty_value=14)  # type: ignore[list-item]
        p.add_tools(tool)
        p.toolbar.active_tap = p.toolbar.active_drag = tool

    def _make_laws(self) -> figure:
        p = figure(name="laws picture", x_range=Range1d(start=0, end=3), y_range=self._rows, min_border=0, **BARE)
        p.axis.visible = p.grid.visible = False
        _draw_image(p, self._tiles, self._mass)
        p.scatter("x", "y", source=self._rings, size=6, fill_color=None, line_color=DRAGGED, line_width=1.2)
        p.text(
            "x", "y", "text", source=self._titles, text_color="white", text_font_size="11px", text_baseline="top",
            text_font=value("system-ui, sans-serif"), x_offset=6, y_offset=5,
        )  # fmt: skip
        return p

    def recolour(self, dark: bool) -> None:
        """Set the colours of the light or the dark page."""
        with style(dark=dark):
            ink, paper, rule = (mpl.rcParams[k] for k in ("text.color", "figure.facecolor", "grid.color"))
            blue, orange, green, pink, *_ = mpl.rcParams["axes.prop_cycle"].by_key()["color"]
        for p in (self.plane, self.line, self.laws):
            p.background_fill_color = p.border_fill_color = paper
            for ax in p.axis:
                ax.axis_label_text_font_style = "normal"
                ax.major_label_text_color = ax.axis_label_text_color = ax.major_tick_line_color = ink
            p.grid.grid_line_color = rule
        for name, colour in {"noise": green, "variance": pink, "law": blue}.items():
            self._areas[name].glyph.fill_color = colour
        for name, renderer in self._strokes.items():
            renderer.glyph.line_color = {"law": blue, "members": blue, "exact": orange}.get(name, ink)
        self._heads.glyph.fill_color = self._grains.glyph.fill_color = self._ink = ink
        self._contrast()

    def fade(self, samples: bool, variance: bool) -> None:
        """Lower the opacity of samples, or of the map of V, that belong to an earlier state."""
        old, share = (FADED if is_old else 1.0 for is_old in (samples, variance))
        self._particles.glyph.update(fill_alpha=0.9 * old, line_alpha=0.8 * old)
        self._grains.glyph.fill_alpha = 0.55 * old
        for name, alpha in {"law": 1.0, "exact": 1.0, "members": 0.5}.items():
            self._strokes[name].glyph.line_alpha = alpha * old
        for name, alpha in {"law": 0.16 * old, "variance": 0.22 * share, "noise": 0.22}.items():
            self._areas[name].glyph.fill_alpha = alpha
        self._map_image.glyph.global_alpha = share
        self._contrast()

    def _contrast(self) -> None:
        """Draw lines and arrows of the plane in white on a map, in ink on paper and on a faded map."""
        bare = not len(self._map.data["image"]) or self._map_image.glyph.global_alpha < 1
        colour = self._ink if bare else "white"
        for renderer in self._on_map:
            renderer.glyph.line_color = colour
        self._on_map[-1].glyph.fill_color = colour

    # Data

    def show_points(self, state: State) -> None:
        """Show the training points; a larger weight gives a larger point."""
        few = len(state.points) <= CROWD
        size = [min(12 + 3 * np.sqrt(w - 1), 32) if few else 6 for w in state.weights]
        for dots in self._dots:
            dots.glyph.line_width = 2 if few else 0.6
        x, y = zip(*((*p, 0.0)[:2] for p in state.points), strict=True)
        self.points.data = {"x": list(x), "y": list(y), "size": size}

    def show_exact(self, found: Exact, share: np.ndarray | None, state: State) -> None:
        """Show the exact quantities at time t; ``share`` is the map of V, shown if that layer is on."""
        x0, y0, x1, y1 = found.arrows
        angle = np.arctan2(y1 - y0, x1 - x0) - np.pi / 2  # the marker "triangle" points up
        top = self._top if state.d == 1 else 1.0
        low = 0.045 * top if state.d == 1 else 0.0
        self._arrows.data = {"x0": x0, "y0": y0 - low, "x1": x1, "y1": y1 - low, "angle": angle}
        self._lines.data = {"xs": [line[0] for line in found.lines], "ys": [line[1] * top for line in found.lines]}
        noise = found.fraction if "noise" in state.layers else None
        share = share if "variance" in state.layers else None
        if state.d == 2:
            self._map.data = _image(share if "variance" in state.layers else noise)
            self._contrast()
            return
        assert found.density is not None
        self._curve("noise", None if noise is None else noise * top)
        self._curve("variance", None if share is None else share * top)
        self._curve("density", None if noise is None else np.minimum(found.density, top))

    def _curve(self, name: str, y: np.ndarray | None) -> None:
        self._curves[name].data = _empty("x", "y") if y is None else {"x": axis(len(y)).numpy(), "y": y}

    def show_laws(self, result: Result | None, state: State) -> None:
        """Show where samples end: curves on the line, tiles beside the plane."""
        if result is None or result.state.d != state.d:
            self._show_tiles([], state, ())
            for source in (self._curves["law"], self._curves["exact"]):
                source.data = _empty("x", "y")
            self._members.data = _empty("xs", "ys")
        elif state.d == 1:
            self._show_curves(result, state)
        else:
            exact = result.state.sampler == "exact"  # then both laws are the same
            name = "exact score" if exact else "samples" if result.state.sampler == "naive" else "learned law"
            named = [(name, result.law)] if "law" in state.layers else []
            named += [("exact score", result.exact)] if "exact" in state.layers and not (exact and named) else []
            room = MAX_TILES - len(named) if "members" in state.layers else 0
            named += [(f"model {k + 1}", law) for k, law in enumerate(result.members[:room])]
            self._show_tiles(named, state, result.state.points)

    def _show_curves(self, result: Result, state: State) -> None:
        self._top = top = max(float(np.quantile(result.law, 0.995)), 0.5)
        self._heights.start, self._heights.end = -BELOW * top, 1.05 * top
        edges = axis(len(result.law) + 1).numpy()
        x = (edges[1:] + edges[:-1]) / 2
        for name, law in (("law", result.law), ("exact", result.exact)):
            shown = name in state.layers
            self._curves[name].data = {"x": x, "y": np.minimum(law, top)} if shown else _empty("x", "y")
        rows = [np.minimum(law, top) for law in result.members] if "members" in state.layers else []
        self._members.data = {"xs": [x] * len(rows), "ys": rows}

    def _show_tiles(self, named: list[tuple[str, np.ndarray]], state: State, points: tuple[Point, ...]) -> None:
        places = tiles(len(named))
        self._rows.start = min((y for _, y, _ in places), default=0.0)
        first = named[0][1] if named else np.ones((1, 1))
        self._mass.high = max(float(np.sqrt(np.quantile(first, 0.998))), 0.3)  # the square root shows thin mass
        xs, ys, sizes = (list(column) for column in zip(*places, strict=True)) if places else ([], [], [])
        self._tiles.data = {"image": [np.sqrt(law) for _, law in named], "x": xs, "y": ys, "size": sizes}
        tops = [y + size for _, y, size in places]
        self._titles.data = {"x": xs, "y": tops, "text": [name for name, _ in named]}
        ringed = places[: 2 if "law" in state.layers else 1] if len(points) <= CROWD else []
        spots = np.array(points).reshape(-1, 2) / (2 * LIMIT) + 0.5
        rings = np.concatenate([np.zeros((0, 2)), *(spots * size + (x, y) for x, y, size in ringed)])
        self._rings.data = {"x": rings[:, 0], "y": rings[:, 1]}

    def show_paths(self, result: Result) -> None:
        """Send all frames of the particles at once; the browser plays them."""
        frames = result.frames
        if result.state.d == 1:  # each particle at a fixed height in the strip below the axis
            height = -self._top * BELOW * np.random.default_rng(0).uniform(0.3, 0.9, frames.shape[1])
            y = np.broadcast_to(np.asarray(height, dtype=np.float32), frames.shape[:2])
        else:
            y = frames[..., 1]
        self.frames.data = {"x": frames[..., 0].ravel(), "y": np.ascontiguousarray(y).ravel()}


def timeline(result: Result) -> tuple[list[float], list[float]]:
    """Return the times of the frames and their places in [0, 1] on the slider: even steps, a tenth for far times."""
    process, times = result.state.make_process(), result.times.tolist()
    ratios = [float(process.sigma(t) / process.alpha(t)) for t in times]
    near = next((k for k, r in enumerate(ratios) if r <= FAR), 0)
    last = len(times) - 1
    far = 0.1 if 0 < near < last else 0.0
    rest = max(last - near, 1)
    return times, [far * k / near if k < near else far + (1 - far) * (k - near) / rest for k in range(last + 1)]


def tiles(count: int) -> list[tuple[float, float, float]]:
    """Return left, bottom and size of up to six tiles in a square of side 3: a large one, surrounded by the others."""
    if count <= 1:
        return [(0.0, 0.0, 3.0)][:count]
    if count == 2:
        size = (3 - GAP) / 2
        return [(0.0, 3 - size, size), (size + GAP, 3 - size, size)]
    small = (3 - 2 * GAP) / 3
    step, large = small + GAP, 2 * small + GAP
    around = [(2 * step, 2 * step), (2 * step, step), (2 * step, 0.0), (step, 0.0), (0.0, 0.0)]
    return [(0.0, step, large), *((x, y, small) for x, y in around)][:count]
