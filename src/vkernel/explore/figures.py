"""The figures: the plane, the line, and the laws beside the plane. They are created once and then receive new data.

``assets/figures.toml`` lists their glyphs. Colours are those of :mod:`vkernel.plots`, those of maps viridis."""

import tomllib
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from bokeh.models import ColumnDataSource, FixedTicker, LinearColorMapper, PointDrawTool, Range1d
from bokeh.models.renderers import GlyphRenderer
from bokeh.palettes import Viridis256
from bokeh.plotting import figure

from vkernel.explore.compute import Exact, Result
from vkernel.explore.state import ASSETS, LIMIT, Point, State
from vkernel.plots.base import style

SPEC = tomllib.loads((ASSETS / "figures.toml").read_text(encoding="utf8"))
BELOW = 0.34  # height of the strip under the axis of the line, in which particles move
FAR = 10.0  # sigma/alpha beyond which no motion is visible
FADED = 0.4  # factor of the opacity of data of an earlier state
MAX_TILES, GAP = 6, 0.06  # tiles of laws, and the gap between two of them in units of a small one
CROWD = 200  # points above which they are drawn small


class Figures:
    """The ``plots`` of a tab and their ``data``; the browser moves the particles along "frames", all in one column."""

    def __init__(self) -> None:
        self.data = {name: ColumnDataSource({c: [] for c in cols}, name=name) for name, cols in SPEC["sources"].items()}
        self._colours = {name: LinearColorMapper(palette=Viridis256, low=0, high=1) for name in ("map", "tiles")}
        self._top = 1.0  # the largest density shown on the line
        self._heights, self._rows = Range1d(start=-BELOW, end=1.05), Range1d(start=0, end=3)
        plane = self._figure("plane", Range1d(start=-LIMIT, end=LIMIT), Range1d(start=-LIMIT, end=LIMIT))
        plane.yaxis.ticker = plane.xaxis.ticker
        plane.grid.visible = False
        plane.tags = [self.data["frames"]]  # no glyph shows the frames, but the browser must receive them
        line = self._figure("line", Range1d(start=-LIMIT, end=LIMIT), self._heights)
        line.xgrid.visible = False
        line.yaxis.axis_label = "density"
        line.yaxis.bounds = line.ygrid.bounds = (0, 1e6)  # no scale below the axis
        laws = self._figure("laws", Range1d(start=0, end=3), self._rows, min_border=0)
        laws.axis.visible = laws.grid.visible = False
        self.plots = {"plane": plane, "line": line, "laws": laws}
        self._painted: list[tuple[str, GlyphRenderer, dict[str, Any]]] = []
        for spec in SPEC["glyphs"]:
            for name in spec["on"]:
                self._add_glyph(name, spec)
        self.restyle(False, False, False)

    def _figure(self, name: str, x_range: Range1d, y_range: Range1d, min_border: int = 6) -> figure:
        made = figure(name=f"{name} picture", tools="", sizing_mode="stretch_both", min_border=min_border)
        made.x_range, made.y_range = x_range, y_range
        made.toolbar_location = made.outline_line_color = None
        for ax in made.axis:
            ax.axis_line_color = ax.minor_tick_line_color = None
            ax.major_tick_in, ax.major_tick_out = 0, 3
        made.xaxis.ticker = FixedTicker(ticks=[-2, -1, 0, 1, 2])
        return made

    def _add_glyph(self, name: str, spec: dict[str, Any]) -> None:
        p = self.plots[name]
        given = SPEC["properties"][spec["kind"]] | spec.get("properties", {})
        if spec["kind"] == "image":
            given["color_mapper"] = self._colours[spec["source"]]
        add: dict[str, Any] = {"image": p.image, "varea": p.varea, "line": p.line, "multi_line": p.multi_line}
        add |= {"segment": p.segment, "scatter": p.scatter, "text": p.text}
        made = add[spec["kind"]](source=self.data[spec["source"]], **given)
        self._painted.append((name, made, spec))
        if spec["source"] == "points":
            tool = PointDrawTool(renderers=[made], empty_value=14)
            p.add_tools(tool)
            p.toolbar.active_tap = p.toolbar.active_drag = tool

    def _set(self, name: str, **columns: Any) -> None:
        """Replace data; without columns, clear them."""
        self.data[name].data = columns or {column: [] for column in SPEC["sources"][name]}

    def restyle(self, dark: bool, old_samples: bool, old_map: bool) -> None:
        """Set the colours of the light or the dark page, and fade samples or a map of V of an earlier state."""
        self._look = dark, old_samples, old_map
        with style(dark=dark):
            ink, paper, rule = (mpl.rcParams[k] for k in ("text.color", "figure.facecolor", "grid.color"))
            cycle = mpl.rcParams["axes.prop_cycle"].by_key()["color"]
        colours = dict(zip(("blue", "orange", "green", "pink"), cycle, strict=False)) | {"ink": ink}
        for p in self.plots.values():
            p.background_fill_color = p.border_fill_color = paper
            for ax in p.axis:
                ax.axis_label_text_font_style = "normal"
                ax.major_label_text_color = ax.axis_label_text_color = ax.major_tick_line_color = ink
            p.grid.grid_line_color = rule
        covered = len(self.data["map"].data["image"]) > 0 and not old_map
        fades = {"samples": FADED if old_samples else 1.0, "map": FADED if old_map else 1.0, "": 1.0}
        for name, made, spec in self._painted:
            colours["contrast"] = "white" if name == "plane" and covered else ink
            fade, paint = fades[spec.get("fades", "")], spec.get("paint", {})
            made.glyph.update(**{k: colours[v] if isinstance(v, str) else fade * v for k, v in paint.items()})

    def show_points(self, state: State) -> None:
        """Show the training points; a larger weight gives a larger point."""
        few = len(state.points) <= CROWD
        size = [min(12 + 3 * np.sqrt(w - 1), 32) if few else 6 for w in state.weights]
        for _, made, spec in self._painted:
            if spec["source"] == "points":
                made.glyph.line_width = 2 if few else 0.6
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
            covered = len(self.data["map"].data["image"]) > 0
            self._set("map", **({} if values is None else {"image": [values], **place}))
            if covered == (values is None):
                self.restyle(*self._look)
            return
        density = None if noise is None or found.density is None else np.minimum(found.density, top) / top
        for name, y in (("noise", noise), ("variance", share), ("density", density)):
            self._set(name, **({} if y is None else {"x": np.linspace(-LIMIT, LIMIT, len(y)), "y": y * top}))

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
        edges = np.linspace(-LIMIT, LIMIT, len(result.law) + 1)
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
        self._colours["tiles"].high = max(float(np.sqrt(np.quantile(first, 0.998))), 0.3)  # √ shows thin mass
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


def timeline(result: Result) -> tuple[list[float], list[float]]:
    """Return the times of the frames and their places in [0, 1] on the slider: even steps, a tenth for far times."""
    process, times, last = result.state.make_process(), torch.as_tensor(result.times), len(result.times) - 1
    near = int((process.sigma(times) / process.alpha(times) > FAR).sum())
    ends = ([0, near, last], [0, 0.1, 1]) if 0 < near < last else ([0, last], [0, 1])
    return times.tolist(), np.interp(range(last + 1), *ends).tolist()


def tiles(count: int) -> list[tuple[float, float, float]]:
    """Return left, bottom and size of up to six tiles in a square of side 3: a large one, surrounded by the others."""
    if count <= 2:
        size = (3 - GAP) / 2 if count == 2 else 3.0
        return [(k * (size + GAP), 3 - size, size) for k in range(count)]
    small = (3 - 2 * GAP) / 3
    step, large = small + GAP, 2 * small + GAP
    around = [(2 * step, 2 * step), (2 * step, step), (2 * step, 0.0), (step, 0.0), (0.0, 0.0)]
    return [(0.0, step, large), *((x, y, small) for x, y in around)][:count]
