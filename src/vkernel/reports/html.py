"""Self-contained pages: a template, one style sheet, and pictures in both looks inside the file."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any

from matplotlib.figure import Figure

from vkernel import plots
from vkernel.version import __version__

__all__ = ["Picture", "page", "picture"]

DOTS = 110  # to the inch


@dataclass(frozen=True)
class Picture:
    """A picture as two ``data:`` addresses; the page shows the one that fits the reader's screen."""

    title: str
    caption: str
    light: str
    dark: str
    width: int  # pixels, at most


def picture(title: str, caption: str, draw: Callable[[], Figure]) -> Picture:
    """What ``draw`` makes, drawn twice: for light and for dark screens."""
    looks, width = {}, 0
    for look in ("light", "dark"):
        with plots.style(dark=look == "dark"):
            drawn = draw()
            looks[look], width = plots.to_data_uri(drawn, dpi=DOTS), round(DOTS * drawn.get_figwidth())
    return Picture(title, caption, **looks, width=width)


def page(template: str, **held: Any) -> str:
    """The page of that template; what it holds is escaped, and a name that it lacks is an error."""
    import jinja2

    folder = resources.files("vkernel.reports") / "templates"
    loader = jinja2.FunctionLoader(lambda name: (folder / name).read_text(encoding="utf-8"))
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    style = (folder / "style.css").read_text(encoding="utf-8")
    today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    return environment.get_template(template).render(style=style, version=__version__, date=today, **held)
