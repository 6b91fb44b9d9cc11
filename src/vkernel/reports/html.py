"""Templates in ``reports/templates``: texts, and pages with one style sheet and figures in light and dark inside."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

from vkernel.version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOTS = 110  # per inch


@dataclass(frozen=True)
class Picture:
    """Hold a figure as two ``data:`` addresses, for light and dark screens, and its largest width in pixels."""

    light: str
    dark: str
    width: int


def picture(draw: Callable[[], Figure]) -> Picture:
    """Draw a figure twice, for light and for dark screens."""
    from vkernel import plots

    looks, width = {}, 0
    for look in ("light", "dark"):
        with plots.style(dark=look == "dark"):
            drawn = draw()
            looks[look], width = plots.to_data_uri(drawn, dpi=DOTS), round(DOTS * drawn.get_figwidth())
    return Picture(**looks, width=width)


def read(name: str) -> str:
    """Return the text of a file of ``reports/templates``."""
    return (resources.files("vkernel.reports") / "templates" / name).read_text(encoding="utf-8")


def render(template: str, **values: object) -> str:
    """Fill in a template; a name without a value is an error, and values of an ``.html`` template are escaped."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(read),
        autoescape=template.endswith(".html"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(values)


def page(template: str, **values: object) -> str:
    """Fill in the template of a page, which also receives the ``style``, the package's ``version`` and the ``date``."""
    today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    return render(template, style=read("style.css"), version=__version__, date=today, **values)
