"""Pages whose figures are not looked at: each is drawn once, coarsely, and serves as the light and the dark one.

Where the same figures are drawn in other tests, it is enough that they can be made from the numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def picture(draw: Callable[[], Figure], drawn: bool = True) -> dict[str, str | int]:
    """Stand in for :func:`vkernel.reports.html.picture`."""
    from vkernel import plots

    with plots.style():
        figure = draw()
        found = plots.to_data_uri(figure, dpi=20) if drawn else "data:image/png;base64,"
    return {"light": found, "dark": found, "width": 100}


def draw_coarsely(monkeypatch: pytest.MonkeyPatch, drawn: bool = True) -> None:
    """Draw coarse pictures; without ``drawn``, make the figures only."""
    monkeypatch.setattr("vkernel.reports.html.picture", functools.partial(picture, drawn=drawn))
