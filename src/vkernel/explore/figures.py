"""The figures: the plane, the line, and the laws beside the plane. They are created once and then receive new data.

Colours are those of all pictures of the package (:mod:`vkernel.plots`); maps are viridis, which is readable without
colour vision.
"""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from bokeh.core.properties import value
from bokeh.models import ColumnDataSource, FixedTicker, LinearColorMapper, PointDrawTool, Range1d
from bokeh.models.renderers import GlyphRenderer
from bokeh.palettes import Viridis256
from bokeh.plotting import figure

from vkernel.explore.compute import Exact, Result, axis
from vkernel.explore.state import LIMIT, Point, State
from vkernel.plots.base import style

BELOW = 0.34  # height of the strip under the axis of the line, in which particles move
DRAGGED, DARK = "#f0683c", "#1c2430"  # the training points, in the one warm colour on viridis, white and black; rims
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
COLUMNS = {
    "points": "x y size", "frames": "x y", "moving": "x y", "map": "image x y size", "tiles": "image x y size",
    "arrows": "x0 y0 x1 y1 angle", "lines": "xs ys", "titles": "x y text", "rings": "x y", "members": "xs ys",
    "noise": "x y", "variance": "x y", "density": "x y", "law": "x y", "exact": "x y",
}  # fmt: skip


class Figures:
    """The three figures of a tab and their data.

    ``plane`` and ``line`` show the training set in two and in one dimension, ``laws`` the maps of where samples end.
    The browser moves the particles, "moving"; "frames" holds their paths, all frames in one column.
    """

    def __init__(self) -> None:
        self.data = {name: ColumnDataSource({c: [] for c in cols.split()}, name=name) for name, cols in COLUMNS.items()}
        self.points = self.data["points"]
        self._mass = LinearColorMapper(palette=Viridis256, low=0, high=1)
        self._dots: list[GlyphRenderer] = []
        self._top = 1.0  # the largest density shown on the line
        self._heights, self._rows = Range1d(start=-BELOW, end=1.05), Range1d(start=0, end=3)
        self.plane, self.line, self.laws = self._make_plane(), self._make_line(), self._make_laws()
        self.restyle(False, False, False)

    def _set(self, name: str, **columns: Any) -> None:
        """Replace data; without columns, clear them."""
        self.data[name].data = columns or {column: [] for column in COLUMNS[name].split()}

    # Figures

    def _figure(self, name: str, heights: Range1d) -> figure:
        made = figure(name=name, x_range=Range1d(start=-LIMIT, end=LIMIT), y_range=heights, min_border=6, **BARE)
        for ax in made.axis:
            ax.axis_line_color = ax.minor_tick_line_color = None
            ax.major_tick_in, ax.major_tick_out = 0, 3
        made.xaxis.ticker = FixedTicker(ticks=[-2, -1, 0, 1, 2])
        return made

    def _add_score(self, p: figure) -> list[GlyphRenderer]:
        """Add boundary lines and arrows."""
        arrows: dict[str, Any] = {"source": self.data["arrows"]}
        return [
            p.multi_line("xs", "ys", source=self.data["lines"], line_width=1.4, line_dash=[5, 3]),
            p.segment("x0", "y0", "x1", "y1", line_alpha=0.85, line_width=1.2, **arrows),
            p.scatter("x1", "y1", angle="angle", marker="triangle", size=5, fill_alpha=0.9, **arrows),
        ]

    def _add_image(self, p: figure, name: str, mapper: LinearColorMapper, **options: Any) -> GlyphRenderer:
        size: dict[str, Any] = {"x": "x", "y": "y", "dw": "size", "dh": "size", "color_mapper": mapper}
        return p.image("image", source=self.data[name], **size, **options)

    def _add_points(self, p: figure) -> None:
        dots = p.scatter(
            "x", "y", size="size", source=self.points, fill_color=DRAGGED, line_color="white", line_width=2,
            nonselection_fill_alpha=1, nonselection_line_alpha=1, selection_line_color=DARK,
        )  # fmt: skip
        self._dots.append(dots)
        tool = PointDrawTool(renderers=[dots], empty_value=14)  # type: ignore[list-item]
        p.add_tools(tool)
        p.toolbar.active_tap = p.toolbar.active_drag = tool

    def _make_plane(self) -> figure:
        p = self._figure("plane picture", Range1d(start=-LIMIT, end=LIMIT))
        p.yaxis.ticker = p.xaxis.ticker
        p.grid.visible = False
        self._map = self._add_image(p, "map", LinearColorMapper(palette=Viridis256, low=0, high=1), level="image")
        self._on_map = self._add_score(p)
        rim: dict[str, Any] = {"fill_color": "white", "line_color": DARK, "line_width": 0.7}
        self._particles = p.scatter("x", "y", source=self.data["moving"], size=5, **rim)
        self._add_points(p)
        p.tags = [self.data["frames"]]  # no glyph shows the frames, but the browser must receive them
        return p

    def _make_line(self) -> figure:
        p, data = self._figure("line picture", self._heights), self.data
        p.xgrid.visible = False
        p.yaxis.axis_label = "density"
        p.yaxis.bounds = p.ygrid.bounds = (0, 1e6)  # no scale below the axis
        self._areas = {name: p.varea("x", 0, "y", source=data[name]) for name in ("noise", "variance", "law")}
        self._strokes: dict[str, GlyphRenderer] = {
            "density": p.line("x", "y", source=data["density"], line_width=1.2, line_dash=[2, 3]),
            "members": p.multi_line("xs", "ys", source=data["members"], line_width=1),
            "exact": p.line("x", "y", source=data["exact"], line_width=1.8, line_dash=[6, 3]),
            "law": p.line("x", "y", source=data["law"], line_width=2.4),
        }
        self._on_paper = self._add_score(p)
        self._grains = p.scatter("x", "y", source=data["moving"], size=5, line_color=None)
        self._add_points(p)
        return p

    def _make_laws(self) -> figure:
        p = figure(name="laws picture", x_range=Range1d(start=0, end=3), y_range=self._rows, min_border=0, **BARE)
        p.axis.visible = p.grid.visible = False
        self._add_image(p, "tiles", self._mass)
        p.scatter("x", "y", source=self.data["rings"], size=6, fill_color=None, line_color=DRAGGED, line_width=1.2)
        p.text(
            "x", "y", "text", source=self.data["titles"], text_color="white", text_font_size="11px",
            text_baseline="top", text_font=value("system-ui, sans-serif"), x_offset=6, y_offset=5,
        )  # fmt: skip
        return p

    def restyle(self, dark: bool, old_samples: bool, old_map: bool) -> None:
        """Set the colours of the light or the dark page, and fade samples or a map of V of an earlier state."""
        with style(dark=dark):
            self._ink, paper, rule = (mpl.rcParams[k] for k in ("text.color", "figure.facecolor", "grid.color"))
            blue, orange, green, pink, *_ = mpl.rcParams["axes.prop_cycle"].by_key()["color"]
        for p in (self.plane, self.line, self.laws):
            p.background_fill_color = p.border_fill_color = paper
            for ax in p.axis:
                ax.axis_label_text_font_style = "normal"
                ax.major_label_text_color = ax.axis_label_text_color = ax.major_tick_line_color = self._ink
            p.grid.grid_line_color = rule
        samples, variance = (FADED if old else 1.0 for old in (old_samples, old_map))
        areas = {"noise": (green, 0.22), "variance": (pink, 0.22 * variance), "law": (blue, 0.16 * samples)}
        for name, (colour, alpha) in areas.items():
            self._areas[name].glyph.update(fill_color=colour, fill_alpha=alpha)
        lines = {"law": (blue, samples), "members": (blue, samples / 2), "exact": (orange, samples)}
        for name, (colour, alpha) in (lines | {"density": (self._ink, 1.0)}).items():
            self._strokes[name].glyph.update(line_color=colour, line_alpha=alpha)
        self._particles.glyph.update(fill_alpha=0.9 * samples, line_alpha=0.8 * samples)
        self._grains.glyph.update(fill_color=self._ink, fill_alpha=0.55 * samples)
        self._map.glyph.global_alpha = variance
        _paint(self._on_paper, self._ink)
        self._contrast()

    def _contrast(self) -> None:
        """Draw lines and arrows of the plane in white on a map, in ink on paper and on a faded map."""
        bare = not len(self.data["map"].data["image"]) or self._map.glyph.global_alpha < 1
        _paint(self._on_map, self._ink if bare else "white")

    # Data

    def show_points(self, state: State) -> None:
        """Show the training points; a larger weight gives a larger point."""
        few = len(state.points) <= CROWD
        size = [min(12 + 3 * np.sqrt(w - 1), 32) if few else 6 for w in state.weights]
        for dots in self._dots:
            dots.glyph.line_width = 2 if few else 0.6
        x, y = zip(*((*p, 0.0)[:2] for p in state.points), strict=True)
        self._set("points", x=list(x), y=list(y), size=size)

    def show_exact(self, found: Exact, share: np.ndarray | None, state: State) -> None:
        """Show the exact quantities at time t; ``share`` is the map of V, shown if that layer is on."""
        top, low = (self._top, 0.045 * self._top) if state.d == 1 else (1.0, 0.0)
        x0, y0, x1, y1 = found.arrows
        angle = np.arctan2(y1 - y0, x1 - x0) - np.pi / 2  # the marker "triangle" points up
        self._set("arrows", x0=x0, y0=y0 - low, x1=x1, y1=y1 - low, angle=angle)
        self._set("lines", xs=[line[0] for line in found.lines], ys=[line[1] * top for line in found.lines])
        noise = found.fraction if "noise" in state.layers else None
        share = share if "variance" in state.layers else None
        if state.d == 2:
            values = share if "variance" in state.layers else noise
            half = LIMIT / (1 if values is None else len(values) - 1)  # nodes are the centres of cells
            place = {"x": [-LIMIT - half], "y": [-LIMIT - half], "size": [2 * (LIMIT + half)]}
            self._set("map", **({} if values is None else {"image": [values], **place}))
            self._contrast()
            return
        density = None if noise is None or found.density is None else np.minimum(found.density, top) / top
        for name, y in (("noise", noise), ("variance", share), ("density", density)):
            self._set(name, **({} if y is None else {"x": axis(len(y)).numpy(), "y": y * top}))

    def show_laws(self, result: Result | None, state: State) -> None:
        """Show where samples end: curves on the line, tiles beside the plane."""
        if result is None or result.state.d != state.d:
            for name in ("tiles", "titles", "rings", "law", "exact", "members"):
                self._set(name)
        elif state.d == 1:
            self._show_curves(result, state)
        else:
            exact = result.state.sampler == "exact"  # then both laws are the same
            name = "exact score" if exact else "samples" if result.state.sampler == "naive" else "learned law"
            named = [(name, result.law)] if "law" in state.layers else []
            named += [("exact score", result.exact)] if "exact" in state.layers and not (exact and named) else []
            room = MAX_TILES - len(named) if "members" in state.layers else 0
            named += [(f"model {k + 1}", law) for k, law in enumerate(result.members[:room])]
            self._show_tiles(named, result.state.points, 2 if "law" in state.layers else 1)

    def _show_curves(self, result: Result, state: State) -> None:
        self._top = top = max(float(np.quantile(result.law, 0.995)), 0.5)
        self._heights.start, self._heights.end = -BELOW * top, 1.05 * top
        edges = axis(len(result.law) + 1).numpy()
        x = (edges[1:] + edges[:-1]) / 2
        for name, law in (("law", result.law), ("exact", result.exact)):
            self._set(name, **({"x": x, "y": np.minimum(law, top)} if name in state.layers else {}))
        rows = [np.minimum(law, top) for law in result.members] if "members" in state.layers else []
        self._set("members", xs=[x] * len(rows), ys=rows)

    def _show_tiles(self, named: list[tuple[str, np.ndarray]], points: tuple[Point, ...], ringed: int) -> None:
        """Show named laws as tiles, with rings around the training points in the first ones."""
        left, bottom, size = np.array(tiles(len(named))).reshape(-1, 3).T
        self._rows.start = min(bottom, default=0.0)
        first = named[0][1] if named else np.ones(1)
        self._mass.high = max(float(np.sqrt(np.quantile(first, 0.998))), 0.3)  # the square root shows thin mass
        self._set("tiles", image=[np.sqrt(law) for _, law in named], x=left, y=bottom, size=size)
        self._set("titles", x=left, y=bottom + size, text=[name for name, _ in named])
        spots, ringed = np.array(points) / (2 * LIMIT) + 0.5, ringed if len(points) <= CROWD else 0
        x, y = (np.outer(size, spots[:, k])[:ringed] + a[:ringed, None] for k, a in enumerate((left, bottom)))
        self._set("rings", x=x.ravel(), y=y.ravel())

    def show_paths(self, result: Result) -> None:
        """Send all frames of the particles at once; the browser plays them."""
        x, y = result.frames[..., 0], result.frames[..., -1]
        if result.state.d == 1:  # each particle at a fixed height in the strip below the axis
            height = -self._top * BELOW * np.random.default_rng(0).uniform(0.3, 0.9, x.shape[1])
            y = np.broadcast_to(np.asarray(height, dtype=np.float32), x.shape)
        self._set("frames", x=x.ravel(), y=y.ravel())


def _paint(renderers: list[GlyphRenderer], colour: str) -> None:
    for renderer in renderers:
        renderer.glyph.line_color = colour
    renderers[-1].glyph.fill_color = colour  # the heads of arrows


def timeline(result: Result) -> tuple[list[float], list[float]]:
    """Return the times of the frames and their places in [0, 1] on the slider: even steps, a tenth for far times."""
    process, times, last = result.state.make_process(), torch.as_tensor(result.times), len(result.times) - 1
    near = int((process.sigma(times) / process.alpha(times) > FAR).sum())
    ends = ([0, near, last], [0, 0.1, 1]) if 0 < near < last else ([0, last], [0, 1])
    return times.tolist(), np.interp(range(last + 1), *ends).tolist()


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
