"""How every picture looks, and how it reaches a file or a page."""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ParamSpec

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib.figure import Figure

from vkernel.core.errors import require
from vkernel.core.files import write

__all__ = ["array", "ink", "lines", "plain_ticks", "save", "style", "styled", "to_bytes", "to_data_uri"]

_P = ParamSpec("_P")
_DARK: ContextVar[bool] = ContextVar("dark", default=False)

# ink, paper, grid, and the lines in the order of use; the page's style.css has the same ink and paper
_LIGHT_INK, _LIGHT_PAPER, _LIGHT_GRID = "#1c2430", "#ffffff", "#dfe3e8"
_DARK_INK, _DARK_PAPER, _DARK_GRID = "#e4e8ee", "#171b21", "#343b45"
_LIGHT_LINES = ("#0072b2", "#d55e00", "#00805d", "#a8528b", "#b07800", "#3f3f46")
_DARK_LINES = ("#56b4e9", "#f28e3c", "#2fc49a", "#dd9bc0", "#e6b33d", "#c9ced6")
MAP = "viridis"


@contextlib.contextmanager
def style(dark: bool | None = None) -> Iterator[None]:
    """The look of every picture made inside; ``dark`` for dark pages, ``None`` keeps what holds outside."""
    token = _DARK.set(_DARK.get() if dark is None else dark)
    try:
        with mpl.rc_context(_look()):
            yield
    finally:
        _DARK.reset(token)


def _look() -> Any:
    colour, paper, grid = (
        (_DARK_INK, _DARK_PAPER, _DARK_GRID) if _DARK.get() else (_LIGHT_INK, _LIGHT_PAPER, _LIGHT_GRID)
    )
    base = {k: mpl.rcParamsDefault[k] for k in mpl.rcParamsDefault if k.partition(".")[0] in _OWNED}
    return base | {
        "font.size": 10.5,
        "axes.titlesize": 11,
        "axes.titlepad": 7,
        "axes.labelsize": 10.5,
        "xtick.labelsize": 9.5,
        "ytick.labelsize": 9.5,
        "legend.fontsize": 9.5,
        "legend.facecolor": paper,
        "legend.edgecolor": "none",
        "legend.framealpha": 0.85,
        "figure.facecolor": paper,
        "figure.constrained_layout.use": True,
        "figure.constrained_layout.w_pad": 0.06,
        "figure.constrained_layout.h_pad": 0.06,
        "savefig.facecolor": paper,
        "axes.facecolor": paper,
        "axes.edgecolor": colour,
        "axes.labelcolor": colour,
        "axes.titlecolor": colour,
        "axes.linewidth": 0.8,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.prop_cycle": cycler(color=lines()),
        "grid.color": grid,
        "grid.linewidth": 0.7,
        "text.color": colour,
        "xtick.color": colour,
        "ytick.color": colour,
        "lines.linewidth": 1.8,
        "lines.markersize": 4,
        "image.cmap": MAP,
        "image.interpolation": "nearest",
        "svg.hashsalt": "vkernel",
    }


_OWNED = ("font", "axes", "figure", "savefig", "xtick", "ytick", "legend", "grid", "lines", "image", "text", "mathtext")


def lines() -> tuple[str, ...]:
    return _DARK_LINES if _DARK.get() else _LIGHT_LINES


def ink() -> str:
    return _DARK_INK if _DARK.get() else _LIGHT_INK


def styled(draw: Callable[_P, Figure]) -> Callable[_P, Figure]:
    @functools.wraps(draw)
    def drawn(*args: _P.args, **kwargs: _P.kwargs) -> Figure:
        with style():
            return draw(*args, **kwargs)

    return drawn


def array(values: Any, ndim: int | None = None, what: str = "values") -> np.ndarray:
    """Floats from a tensor on any device, an array, a labelled array or a list."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    out = np.asarray(values, dtype=np.float64)
    require(ndim is None or out.ndim == ndim, f"A plot needs {what} with {ndim} axes; got shape {out.shape}.")
    return out


def plain_ticks(values: np.ndarray) -> tuple[list[float], list[str]]:
    """Ticks and their labels in plain numbers, for a log axis of few decades."""
    low, high = float(values.min()), float(values.max())
    steps = (1, 1.5, 2, 3, 5, 7) if high < 10 * low else (1, 2, 5) if high < 200 * low else (1,)
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [step * 10.0**e for e in exponents for step in steps]
    ticks = [v for v in ticks if low * 0.98 <= v <= high * 1.02]
    return ticks, [f"{v:.3g}" for v in ticks]


def to_bytes(figure: Figure, format: str = "png", dpi: int = 144) -> bytes:
    """The picture as a PNG, SVG or PDF file's content; the same picture gives the same bytes."""
    require(format in ("png", "svg", "pdf"), f"A picture is written as png, svg or pdf, not {format!r}.")
    dated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(format)
    buffer = io.BytesIO()
    with style():  # svg.hashsalt is read when saving
        figure.savefig(buffer, format=format, dpi=dpi, metadata=dated, facecolor=figure.get_facecolor())
    return buffer.getvalue()


def to_data_uri(figure: Figure, format: str = "png", dpi: int = 144) -> str:
    """The picture as a ``data:`` address, for pages that need no other file."""
    require(format in ("png", "svg"), f"A page shows png or svg, not {format!r}.")
    kind = "image/png" if format == "png" else "image/svg+xml"
    return f"data:{kind};base64,{base64.b64encode(to_bytes(figure, format, dpi)).decode()}"


def save(figure: Figure, path: Path | str, dpi: int = 144) -> Path:
    """Write the picture in the format of the file's suffix, whole or not at all."""
    path = Path(path)
    return write(path, to_bytes(figure, path.suffix.lstrip(".").lower(), dpi))
