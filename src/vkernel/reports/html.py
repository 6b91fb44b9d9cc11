"""Templates in ``reports/templates``: texts, and pages with one style sheet and figures in light and dark inside."""

from __future__ import annotations

import datetime
import functools
import math
from collections.abc import Callable, Sequence
from importlib import resources
from itertools import zip_longest
from typing import TYPE_CHECKING

from vkernel.core.errors import require
from vkernel.core.estimate import Estimate
from vkernel.version import __version__

if TYPE_CHECKING:
    import jinja2
    import xarray
    from matplotlib.figure import Figure

DOTS = 110  # per inch


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if 0 < share < 0.995 else f"{100 * share:.0f} %"


def _extremes(ds: xarray.Dataset, name: str) -> str:
    """Return the lowest and the highest value of a variable, each with its ends."""
    columns = [ds[name + end].values.ravel() for end in ("", "_low", "_high")]
    order = [k for k in columns[0].argsort() if math.isfinite(columns[0][k])]
    ends = ["{:.2f} ({:.2f} to {:.2f})".format(*(float(c[k]) for c in columns)) for k in (order[:1] + order[-1:])]
    return " … ".join(dict.fromkeys(ends)) or "an unknown amount"


def significant(value: float, digits: int = 2) -> str:
    """Return significant digits; large numbers, below a billion, have no exponent."""
    rounded = float(f"{float(value):.{digits}g}")
    return f"{rounded:,.0f}" if 10**digits <= abs(rounded) < 1e9 else f"{rounded:.{digits}g}"


def _ends(digits: int, form: str) -> Callable[[Estimate], str]:
    return lambda e: form.format(*(significant(v, digits) for v in (e.value, e.low, e.high)))


FILTERS = {  # numbers in templates: an Estimate with its ends (or one of a Dataset), the range of an array, digits
    "interval": "{0.value:.2f} ({0.low:.2f} to {0.high:.2f})".format,
    "short": _ends(3, "{} ({} to {})"),
    "bracket": _ends(2, "{} [{}, {}]"),
    "share": lambda e: f"{_percent(e.value)} ({_percent(e.low)} to {_percent(e.high)})",
    "range": lambda array: f"{significant(array.min())} … {significant(array.max())}",
    "digits": significant,
    "percent": _percent,
    "extremes": _extremes,
    "p": lambda chance: "< 0.001" if chance < 0.001 else f"= {float(chance):.2g}",
    "duration": lambda s: f"{s:.0f} s" if s < 90 else f"{s / 60:.0f} min" if s < 5400 else f"{s / 3600:.1f} h",
    "row": lambda ds, name, k: Estimate(*(float(ds[name + end][k]) for end in ("", "_se", "_low", "_high"))),
}


def picture(draw: Callable[[], Figure]) -> dict[str, str | int]:
    """Draw a figure as two ``data:`` addresses, ``light`` and ``dark``; ``width`` is its largest one in pixels."""
    from vkernel import plots

    found: dict[str, str | int] = {}
    for look in ("light", "dark"):
        with plots.style(dark=look == "dark"):
            drawn = draw()
            found |= {look: plots.to_data_uri(drawn, dpi=DOTS), "width": round(DOTS * drawn.get_figwidth())}
    return found


def is_image(shape: Sequence[int]) -> bool:
    """Whether points of this shape can be shown as pictures."""
    return len(shape) == 2 or (len(shape) == 3 and shape[0] in (1, 3))


def read(name: str) -> str:
    """Return the text of a file of ``reports/templates``."""
    return (resources.files("vkernel.reports") / "templates" / name).read_text(encoding="utf-8")


@functools.cache
def _environment(escape: bool, trim: bool) -> jinja2.Environment:
    import jinja2

    strict, loader = jinja2.StrictUndefined, jinja2.FunctionLoader(read)
    found = jinja2.Environment(loader=loader, undefined=strict, autoescape=escape, trim_blocks=trim, lstrip_blocks=True)
    found.filters |= FILTERS
    return found


def render(template: str, **values: object) -> str:
    """Fill in a template; a name without a value is an error, and values of an ``.html`` template are escaped."""
    return _environment(template.endswith(".html"), True).get_template(template).render(values)


def sentences(template: str, block: str, **values: object) -> str:
    """Fill in one block of a text; line ends and repeated spaces become one space."""
    held = _environment(False, False).get_template(template)
    require(block in held.blocks, f"{template} has no sentences on {block}.")
    return " ".join("".join(held.blocks[block](held.new_context(values))).split())


def aligned(rows: Sequence[Sequence[str]], left: int = 0) -> str:
    """Return cells in columns, of which the first ``left`` begin and the others end at one place; a cell may have
    several lines."""
    lines = [line for row in rows for line in zip_longest(*(cell.split("\n") for cell in row), fillvalue="")]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = (
        [c.ljust(w) if k < left else c.rjust(w) for k, (c, w) in enumerate(zip(line, widths, strict=True))]
        for line in lines
    )
    return "\n".join("  ".join(cells).rstrip() for cells in shown)


def page(template: str, **values: object) -> str:
    """Fill in the template of a page, which also receives the ``style``, the package's ``version`` and the ``date``."""
    today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    return render(template, style=read("style.css"), version=__version__, date=today, **values)
