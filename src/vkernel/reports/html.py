"""One renderer for all pages: a template, one style sheet, and figures in light and dark inside the file."""

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

    title: str
    caption: str
    light: str
    dark: str
    width: int


def picture(title: str, caption: str, draw: Callable[[], Figure]) -> Picture:
    """Draw a figure twice, for light and for dark screens."""
    from vkernel import plots

    looks, width = {}, 0
    for look in ("light", "dark"):
        with plots.style(dark=look == "dark"):
            drawn = draw()
            looks[look], width = plots.to_data_uri(drawn, dpi=DOTS), round(DOTS * drawn.get_figwidth())
    return Picture(title, caption, **looks, width=width)


def page(template: str, **values: object) -> str:
    """Render a template of ``reports/templates``; values are escaped, and a name without a value is an error.

    Templates also receive the ``style`` sheet, the ``version`` of the package and today's ``date``.
    """
    import jinja2

    folder = resources.files("vkernel.reports") / "templates"
    loader = jinja2.FunctionLoader(lambda name: (folder / name).read_text(encoding="utf-8"))
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    style = (folder / "style.css").read_text(encoding="utf-8")
    today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    return environment.get_template(template).render(style=style, version=__version__, date=today, **values)
