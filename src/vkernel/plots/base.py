"""The style shared by all figures, the axis helpers they use, and functions that write a figure to bytes or a file."""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeAlias

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from cycler import cycler
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colorbar import Colorbar
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from vkernel.core.errors import require
from vkernel.core.files import write

_P = ParamSpec("_P")
_DARK: ContextVar[bool] = ContextVar("dark", default=False)
Values: TypeAlias = npt.ArrayLike | Tensor
LineStyle: TypeAlias = str | tuple[int, tuple[float, ...]]

# Text, background and grid, then the line colours in the order of use. reports/templates/style.css has the same ones.
_THEMES = {
    False: (
        ("#1c2430", "#ffffff", "#dfe3e8"),
        ("#0072b2", "#d55e00", "#00805d", "#a8528b", "#b07800", "#3f3f46"),
    ),
    True: (
        ("#e4e8ee", "#171b21", "#343b45"),
        ("#56b4e9", "#f28e3c", "#2fc49a", "#dd9bc0", "#e6b33d", "#c9ced6"),
    ),
}
_OWNED = ("font", "axes", "figure", "savefig", "xtick", "ytick", "legend", "grid", "lines", "image", "text", "mathtext")
DASHED, DOTTED = (0, (4, 2)), (0, (1, 1.6))
DOT = "#ff5a36"  # training points, on a map of any colour
MARKERS = "osD^v*"


# --- style ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def style(dark: bool | None = None) -> Iterator[None]:
    """Apply the package's style to every figure drawn inside; ``dark=None`` keeps the current theme."""
    token = _DARK.set(_DARK.get() if dark is None else dark)
    try:
        with mpl.rc_context(rc_params()):
            yield
    finally:
        _DARK.reset(token)


def rc_params() -> mpl.RcParams:
    """Return matplotlib's settings for the current theme: its defaults, changed where the style differs."""
    colour, paper, grid = _THEMES[_DARK.get()][0]
    base = {k: mpl.rcParamsDefault[k] for k in mpl.rcParamsDefault if k.partition(".")[0] in _OWNED}
    style = {
        **dict.fromkeys(("font.size", "axes.labelsize"), 10.5),
        **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 9.5),
        **dict.fromkeys(("legend.facecolor", "figure.facecolor", "savefig.facecolor", "axes.facecolor"), paper),
        **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "axes.titlecolor"), colour),
        **dict.fromkeys(("text.color", "xtick.color", "ytick.color"), colour),
        **dict.fromkeys(("figure.constrained_layout.w_pad", "figure.constrained_layout.h_pad"), 0.06),
        "axes.titlesize": 11,
        "axes.titlepad": 7,
        "axes.linewidth": 0.8,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.prop_cycle": cycler(color=lines()),
        "figure.constrained_layout.use": True,
        "grid.color": grid,
        "grid.linewidth": 0.7,
        "image.cmap": "viridis",
        "image.interpolation": "nearest",
        "legend.edgecolor": "none",
        "legend.framealpha": 0.85,
        "lines.linewidth": 1.8,
        "lines.markersize": 4,
        "svg.hashsalt": "vkernel",
    }
    return mpl.RcParams(base | style)


def lines() -> tuple[str, ...]:
    """Return the line colours of the current theme, in the order of use."""
    return _THEMES[_DARK.get()][1]


def ink() -> str:
    """Return the colour of text and axes in the current theme."""
    return _THEMES[_DARK.get()][0][0]


def styled(draw: Callable[_P, Figure]) -> Callable[_P, Figure]:
    """Decorate a function so that its figure has the package's style."""

    @functools.wraps(draw)
    def drawn(*args: _P.args, **kwargs: _P.kwargs) -> Figure:
        with style():
            return draw(*args, **kwargs)

    return drawn


# --- arrays and axes ------------------------------------------------------------------------------------------------


def array(values: Values, ndim: int | None = None, what: str = "values") -> np.ndarray:
    """Convert a tensor on any device, an array, a labelled array or a list to float64."""
    out = np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values, dtype=np.float64)
    require(ndim is None or out.ndim == ndim, f"A plot needs {what} with {ndim} axes; got shape {out.shape}.")
    return out


def plain_ticks(values: np.ndarray) -> tuple[list[float], list[str]]:
    """Choose ticks for a logarithmic axis of few decades, and label them with plain numbers."""
    low, high = float(values.min()), float(values.max())
    steps = (1, 1.5, 2, 3, 5, 7) if high < 10 * low else (1, 2, 5) if high < 200 * low else (1,)
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [step * 10.0**e for e in exponents for step in steps]
    ticks = [v for v in ticks if low * 0.98 <= v <= high * 1.02]
    return ticks, [f"{v:.3g}" for v in ticks]


def number(value: float) -> str:
    """Write a number for a label, with three digits; ⅛, ¼ and ½ as fractions."""
    return {0.125: "⅛", 0.25: "¼", 0.5: "½"}.get(value, f"{float(f'{value:.3g}'):g}")


def log_axis(ax: Axes, axis: Literal["x", "y"], values: np.ndarray) -> None:
    """Make an axis logarithmic, with plain numbers as ticks."""
    ax.set(**{f"{axis}scale": "log"})
    (ax.set_xticks if axis == "x" else ax.set_yticks)(*plain_ticks(values))
    ax.minorticks_off()


def band(ax: Axes, x: Values, curve: Values, colour: str, label: str = "", fmt: str = "-", alpha: float = 0.25) -> None:
    """Draw a curve ``(3, len(x))``, which holds value, low end and high end, as a line in a band."""
    value, low, high = array(curve, 2, "value, low, high")
    ax.fill_between(array(x), low, high, color=colour, alpha=alpha, lw=0)
    ax.plot(array(x), value, fmt, color=colour, label=label)


def error_bars(
    ax: Axes, x: Values, curve: Values, colour: str, label: str = "", marker: str = "o", ls: LineStyle = ""
) -> None:
    """Draw a curve ``(3, len(x))``, which holds value, low end and high end, as points with error bars.

    On a logarithmic axis a value of zero becomes an arrow that points down from the high end.
    """
    x, (value, low, high) = array(x, 1, "positions"), array(curve, 2, "value, low, high")
    shown = value > 0 if ax.get_yscale() == "log" else np.isfinite(value)
    error = np.abs(np.stack([value - low, high - value]))
    ax.plot(x, np.where(shown, value, np.nan), color=colour, lw=1.4, ls=ls)
    bars: dict[str, Any] = {"color": colour, "marker": marker, "ms": 5, "ls": "", "lw": 1.3, "capsize": 3}
    ax.errorbar(x[shown], value[shown], error[:, shown], label=label, **bars)
    for place, top in zip(x[~shown], high[~shown], strict=True):
        arrow = {"arrowstyle": "-|>", "color": colour, "lw": 1.2, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", (place, top / 3), (place, top), arrowprops=arrow)
        ax.plot([place], [top], marker="_", ms=9, color=colour)


def level(ax: Axes, value: float, label: str = "") -> None:
    """Draw a dotted horizontal line as a reference."""
    ax.axhline(value, color=ink(), lw=1, ls=":", label=label)


def map_axes(axes: np.ndarray, rows: Sequence[str], columns: Sequence[str], xlabel: str = "x₁") -> None:
    """Label a grid of panels that share their axes: titles above, names of rows and the x label on the outside."""
    for ax, title in zip(axes[0], columns, strict=True):
        ax.set_title(title)
    for ax, name in zip(axes[:, 0], rows, strict=True):
        ax.set_ylabel(name)
    for ax in axes[-1]:
        ax.set_xlabel(xlabel)


def legend_below(figure: Figure, handles: Sequence[Artist], labels: Sequence[str] = (), ncols: int = 0) -> None:
    """Put one legend below all panels; ``labels`` default to those of the handles."""
    names = list(labels) or [str(h.get_label()) for h in handles]
    entries = figure.legend(handles, names, loc="outside lower center", ncols=ncols or len(handles))
    for handle in entries.legend_handles:  # white crosses are seen on a map, but not on white paper
        if isinstance(handle, Line2D) and handle.get_markeredgecolor() == "white" and handle.get_marker() == "x":
            handle.set_markeredgecolor(ink())


def colour_bar(figure: Figure, image: ScalarMappable, axes: Axes | np.ndarray, label: str, **look: Any) -> Colorbar:
    """Add a colour bar beside the axes."""
    bar = figure.colorbar(image, ax=axes, **({"pad": 0.015} | look))
    bar.set_label(label)
    bar.outline.set_visible(False)
    return bar


# --- output ---------------------------------------------------------------------------------------------------------


def to_bytes(figure: Figure, format: str = "png", dpi: int = 144) -> bytes:
    """Return the content of a PNG, SVG or PDF file; the same figure gives the same bytes."""
    require(format in ("png", "svg", "pdf"), f"A picture is written as png, svg or pdf, not {format!r}.")
    dated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(format)
    buffer = io.BytesIO()
    with style():  # svg.hashsalt is read when saving
        figure.savefig(buffer, format=format, dpi=dpi, metadata=dated, facecolor=figure.get_facecolor())
    return buffer.getvalue()


def to_data_uri(figure: Figure, format: str = "png", dpi: int = 144) -> str:
    """Return the figure as a ``data:`` address, for pages that need no other file."""
    require(format in ("png", "svg"), f"A page shows png or svg, not {format!r}.")
    kind = "image/png" if format == "png" else "image/svg+xml"
    return f"data:{kind};base64,{base64.b64encode(to_bytes(figure, format, dpi)).decode()}"


def save(figure: Figure, path: Path | str, dpi: int = 144) -> Path:
    """Write the figure in the format of the file's suffix, through a temporary file."""
    path = Path(path)
    return write(path, to_bytes(figure, path.suffix.lstrip(".").lower(), dpi))
