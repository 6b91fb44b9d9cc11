"""What an exhibit is, and how exhibits become files in a folder and one page.

An *exhibit* is a question with its pictures, words and numbers. Its pictures are written as PNG (for light and dark
pages) and SVG, its numbers as one ``.npz``; :func:`render` writes ``index.html`` around them. Every file is written
whole or not at all.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from vkernel import plots
from vkernel.core.errors import InputError
from vkernel.core.files import write

__all__ = ["Exhibit", "Finding", "Picture", "Run", "Skip", "Table", "number", "percent", "render"]


class Skip(Exception):
    """An exhibit cannot be made here; the message is a sentence for the page."""


@dataclass(frozen=True)
class Picture:
    """Three files that begin with ``stem``, what a reader who cannot see them should know, and what is seen."""

    stem: str
    alt: str
    caption: tuple[str, ...]
    width: int
    height: int


@dataclass(frozen=True)
class Table:
    """Numbers in words: the first cell of a row is its name."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Finding:
    """The one number an exhibit ends in."""

    number: str
    interval: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class Exhibit:
    """One section of the page."""

    name: str
    title: str
    pictures: tuple[Picture, ...]
    data: str
    sizes: str
    opening: tuple[str, ...] = ()
    finding: Finding | None = None
    tables: tuple[Table, ...] = ()
    closing: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Run:
    """What an exhibit is given: where to write, the seed, whether to be quick; ``step(share)`` tells of progress."""

    out: Path
    seed: int
    quick: bool
    step: Callable[[float], None]

    def picture(self, stem: str, draw: Callable[[], Figure], alt: str, caption: Sequence[str]) -> Picture:
        """Draw for light and dark pages and write PNG and SVG."""
        dpi = 50 if self.quick else 144
        for dark in (False, True):
            with plots.style(dark=dark):
                figure = draw()
            png = plots.to_bytes(figure, "png", dpi)
            write(self.out / f"{stem}{'-dark' if dark else ''}.png", png)
            if not dark:
                figure.set_layout_engine("none")  # it has been laid out; once is enough
                plots.save(figure, self.out / f"{stem}.svg", dpi)
        width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))  # of the file's header
        return Picture(stem, alt, tuple(caption), width, height)

    def arrays(self, name: str, **arrays: Any) -> str:
        """Write the numbers; returns the file's name."""
        buffer = io.BytesIO()
        plain: Any = {key: np.asarray(value) for key, value in arrays.items()}
        np.savez_compressed(buffer, **plain)
        return write(self.out / f"{name}.npz", buffer.getvalue()).name


def open_folder(out: Path) -> Path:
    """The folder, made if needed; refused at the door if nothing can be written there."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise InputError(
            f"{out} cannot be a folder for figures: a file is in its place. Give another --out."
        ) from error
    except OSError as error:
        raise InputError(f"The folder {out} cannot be made: {error.strerror or error}. Give another --out.") from error
    write(out / ".vkernel-probe", b"").unlink(missing_ok=True)
    return out


def render(path: Path, **values: Any) -> Path:
    """Write ``index.html`` from the package's template."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("vkernel.reports", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["bound"] = bound
    from markupsafe import Markup

    assert environment.loader is not None
    css = Markup(environment.loader.get_source(environment, "style.css")[0])
    return write(path, environment.get_template("index.html").render(css=css, **values).encode())


def bound(text: str) -> str:
    """The text with spaces inside formulas and before units that do not break a line."""
    for pattern in (" = ", " · ", " %", " / ", " → ", " ± ", "tr C", "\u03c3\u00b2 tr"):
        text = text.replace(pattern, pattern.replace(" ", "\u00a0"))
    return text


_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float, digits: int = 3) -> str:
    """A number for a sentence: three figures; powers of ten where it is very small or large."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if 1e-3 <= abs(value) < 1e5:
        places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
        return f"{value:,.{places}f}"
    mantissa, exponent = f"{value:.{digits - 2}e}".split("e")
    return f"{mantissa} · 10{str(int(exponent)).translate(_RAISED)}"


def percent(share: float) -> str:
    """A share of a whole: one decimal below 10 %."""
    return f"{100 * share:.1f} %" if share < 0.0995 else f"{100 * share:.0f} %"
