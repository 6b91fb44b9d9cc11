"""The style of all figures, helpers for axes and curves, ``(3, len(x))``: value, low end and high end, and output."""

import base64
import contextlib
import functools
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeAlias

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colorbar import Colorbar
from matplotlib.figure import Figure
from matplotlib.layout_engine import PlaceHolderLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from torch import Tensor

from vkernel.core.errors import require
from vkernel.core.files import write

_P = ParamSpec("_P")
_DARK: ContextVar[bool] = ContextVar("dark", default=False)
Values: TypeAlias = npt.ArrayLike | Tensor
Curves: TypeAlias = Mapping[str, Values]
Several: TypeAlias = Sequence[Values]
Names: TypeAlias = Sequence[str]
Notes: TypeAlias = Sequence[Sequence[str]]
Size: TypeAlias = tuple[float, float]
LineStyle: TypeAlias = str | tuple[int, tuple[float, ...]]
_OWNED = ("font", "axes", "figure", "savefig", "xtick", "ytick", "legend", "grid", "lines", "image", "text", "mathtext")
DASHED: LineStyle = (0, (4, 2))
DOTTED: LineStyle = (0, (1, 1.6))
DOT = "#ff5a36"  # training points, on a map of any colour
MARKERS = "osD^v*P"  # with six colours, 42 different lines
_ON_MAPS = (("o", "black"),)  # rings that are seen on a map, but not on every page
DARK_EDGE = (withStroke(linewidth=2.6, foreground="#14181f"),)  # white marks are seen on any map, and in a legend


@functools.cache
def _theme(dark: bool) -> mpl.RcParams:
    """Return matplotlib's defaults, changed by ``style.mplstyle`` and by the colours of a theme."""
    found = {k: mpl.rcParamsDefault[k] for k in mpl.rcParamsDefault if k.partition(".")[0] in _OWNED}
    for name in ("style", "dark" if dark else "light"):
        found |= mpl.rc_params_from_file(Path(__file__).with_name(f"{name}.mplstyle"), use_default_template=False)
    return mpl.RcParams(found)


@contextlib.contextmanager
def style(dark: bool | None = None) -> Iterator[None]:
    """Apply the package's style to every figure drawn inside; ``dark=None`` keeps the current theme."""
    token = _DARK.set(_DARK.get() if dark is None else dark)
    try:
        with mpl.rc_context(_theme(_DARK.get())):
            yield
    finally:
        _DARK.reset(token)


def lines() -> tuple[str, ...]:
    """Return the line colours of the current theme, in the order of use."""
    return tuple(_theme(_DARK.get())["axes.prop_cycle"].by_key()["color"])


def ink() -> str:
    """Return the colour of text and axes in the current theme."""
    return str(_theme(_DARK.get())["text.color"])


def styled(draw: Callable[_P, Figure]) -> Callable[_P, Figure]:
    """Decorate a function so that its figure has the package's style."""

    @functools.wraps(draw)
    def drawn(*args: _P.args, **kwargs: _P.kwargs) -> Figure:
        with style():
            return draw(*args, **kwargs)

    return drawn


def array(values: Values, ndim: int | None = None, what: str = "values") -> np.ndarray:
    """Convert a tensor on any device, an array, a labelled array or a list to float64."""
    out = np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values, dtype=np.float64)
    require(ndim is None or out.ndim == ndim, f"A plot needs {what} with {ndim} axes; got shape {out.shape}.")
    return out


def number(value: float) -> str:
    """Write a number for a label, with three digits; ⅛, ¼ and ½ as fractions."""
    return {0.125: "⅛", 0.25: "¼", 0.5: "½"}.get(value, f"{float(f'{value:.3g}'):g}")


def log_axis(ax: Axes, axis: Literal["x", "y"], values: np.ndarray) -> None:
    """Make an axis logarithmic, with three plain numbers or a few more as ticks; the ends where none is between."""
    values = values[np.isfinite(values) & (values > 0)]
    require(values.size, f"A logarithmic axis needs a finite number above zero; {ax.get_xlabel() or axis} has none.")
    low, high = float(values.min()), float(values.max())
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.4, 1.6, 1.8, *range(2, 10))):
        ticks = [v for v in (k * 10.0**e for e in exponents for k in steps) if 0.99 * low <= v <= 1.01 * high]
        if len(ticks) >= 3:
            break
    ticks = ticks[:: math.ceil(len(ticks) / 8)] if len(ticks) > 1 else sorted({low, high})
    ax.set(**{f"{axis}scale": "log"} | ({f"{axis}lim": (low / 1.25, high * 1.25)} if low == high else {}))
    (ax.set_xticks if axis == "x" else ax.set_yticks)(ticks, [f"{float(f'{v:.3g}'):g}" for v in ticks])
    ax.minorticks_off()


def band(
    ax: Axes, x: Values, curve: Values, colour: str, label: str = "", ls: LineStyle = "-", marker: str = ""
) -> None:
    """Draw a curve as a line in a band, or a bar where a place is alone; a logarithmic axis leaves out values that are
    not positive, and an interval that reaches zero leaves the picture at the bottom."""
    x, curve = array(x, 1, "positions"), array(curve, 2, "value, low, high")
    require(curve.shape == (3, len(x)), f"A curve at {len(x)} positions has shape (3, {len(x)}), not {curve.shape}.")
    order = np.argsort(x)
    x, (value, low, high) = x[order], np.where(np.isfinite(curve), curve, np.nan)[:, order]
    if ax.get_yscale() == "log":
        value = np.where(value > 0, value, np.nan)
        low = np.fmax(low, 1e-6 * value)  # below the picture
    there = np.isfinite(value + low + high)
    alone = there & ~np.append(False, there[:-1]) & ~np.append(there[1:], False)
    ax.fill_between(x, low, high, where=there, color=colour, alpha=0.25, lw=0)
    if alone.any():
        ax.vlines(x[alone], low[alone], high[alone], color=colour, lw=1.4)
    ax.plot(x, value, color=colour, ls=ls, marker=marker, mfc=colour if ls == "-" else ax.get_facecolor(), label=label)


def error_bars(
    ax: Axes, x: Values, curve: Values, colour: str, label: str = "", marker: str = "o", ls: LineStyle = ""
) -> None:
    """Draw a curve as points with error bars; on a logarithmic axis a value of zero is an arrow from the high end."""
    x, (value, low, high) = array(x, 1, "positions"), array(curve, 2, "value, low, high")
    shown = value > 0 if ax.get_yscale() == "log" else np.isfinite(value)
    error = np.abs(np.stack([value - low, high - value]))
    bars: dict[str, Any] = {"color": colour, "marker": marker, "ms": 5, "ls": ls, "lw": 1.4, "capsize": 3}
    ax.errorbar(x, np.where(shown, value, np.nan), np.where(shown, error, 0.0), label=label, **bars)
    arrow = {"arrowstyle": "-|>", "color": colour, "lw": 1.2, "shrinkA": 0, "shrinkB": 0}
    for place, top in zip(x[~shown], high[~shown], strict=True):
        ax.annotate("", (place, top / 3), (place, top), arrowprops=arrow)
        ax.plot([place], [top], marker="_", ms=9, color=colour)


def axes(size: Size, rows: int = 1, columns: int = 1, **how: object) -> tuple[Figure, np.ndarray]:
    """Return a figure of ``size`` inches and its axes ``(rows, columns)``; ``how`` goes to ``figure.subplots``."""
    figure, options = Figure(figsize=size), dict[str, Any](how, squeeze=False)
    return figure, figure.subplots(rows, columns, **options)


def grid(
    rows: Names, columns: Names, size: Size, more: Size, xlabel: str = "x₁", sharey: bool | Literal["row"] = True
) -> tuple[Figure, np.ndarray]:
    """Return a figure of labelled panels that share axes, of ``size`` inches each, with ``more`` inches around them."""
    whole = size[0] * len(columns) + more[0], size[1] * len(rows) + more[1]
    figure, panels = axes(whole, len(rows), len(columns), sharex=True, sharey=sharey)
    for ax, title in zip(panels[0], columns, strict=True):
        ax.set_title(title)
    for ax, name in zip(panels[:, 0], rows, strict=True):
        ax.set_ylabel(name)
    for ax in panels[-1]:
        ax.set_xlabel(xlabel)
    return figure, panels


def legend_below(figure: Figure, shown: Axes | Sequence[Artist], labels: Names = (), ncols: int = 0) -> None:
    """Put one legend of an axis, or of handles, below all panels, in as many of ``ncols`` columns as fit the width;
    ``labels`` default to those of the handles."""
    handles = shown.get_legend_handles_labels()[0] if isinstance(shown, Axes) else list(shown)
    names = list(labels) or [str(h.get_label()) for h in handles]
    look: dict[str, Any] = {"loc": "outside lower center", "handlelength": 2.9}
    for columns in range(ncols or len(handles), 0, -1):
        legend = figure.legend(handles, names, ncols=columns, **look)
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            break
        legend.remove()
    for handle in legend.legend_handles:
        if isinstance(handle, Line2D) and (handle.get_marker(), handle.get_markeredgecolor()) in _ON_MAPS:
            handle.set_markeredgecolor(ink())


def colour_bar(figure: Figure, image: ScalarMappable, axes: Axes | np.ndarray, label: str, **look: object) -> Colorbar:
    """Add a colour bar beside the axes; ``look`` are options of matplotlib's ``figure.colorbar``."""
    bar = figure.colorbar(image, ax=axes, **dict[str, Any]({"pad": 0.015} | look))
    bar.set_label(label)
    bar.outline.set_visible(False)
    return bar


def to_bytes(figure: Figure, format: str = "png", dpi: int = 144) -> bytes:
    """Return the content of a PNG, SVG or PDF file; the same figure gives the same bytes."""
    require(format in ("png", "svg", "pdf"), f"A picture is written as png, svg or pdf, not {format!r}.")
    buffer, dated = io.BytesIO(), {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(format)
    with style(), _arranged(figure, format, dpi):  # svg.hashsalt is read when saving
        figure.savefig(buffer, format=format, dpi=dpi, metadata=dated, facecolor=figure.get_facecolor())
    return buffer.getvalue()


@contextlib.contextmanager
def _arranged(figure: Figure, format: str, dpi: float) -> Iterator[None]:
    """Compute the layout of a figure once and save without a layout engine, for which matplotlib draws all twice."""
    engine, before = figure.get_layout_engine(), figure.dpi
    if engine is None or (format != "png" and not isinstance(engine, PlaceHolderLayoutEngine)):
        yield  # vector formats measure text differently
        return
    figure.dpi = dpi
    try:
        engine.execute(figure)
        with mpl.rc_context({"figure.constrained_layout.use": False, "figure.autolayout": False}):
            figure.set_layout_engine(None)
            yield
    finally:
        figure.dpi = before
        figure.set_layout_engine(engine)


def to_data_uri(figure: Figure, format: str = "png", dpi: int = 144) -> str:
    """Return the figure as a ``data:`` address, for pages that need no other file."""
    require(format in ("png", "svg"), f"A page shows png or svg, not {format!r}.")
    kind = "image/png" if format == "png" else "image/svg+xml"
    return f"data:{kind};base64,{base64.b64encode(to_bytes(figure, format, dpi)).decode()}"


def save(figure: Figure, path: Path | str, dpi: int = 144) -> Path:
    """Write the figure in the format of the file's suffix, through a temporary file."""
    path = Path(path)
    return write(path, to_bytes(figure, path.suffix.lstrip(".").lower(), dpi))
