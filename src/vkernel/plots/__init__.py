"""Figures from labelled numbers.

Each function takes arrays (numpy, torch, xarray or lists) and returns a :class:`matplotlib.figure.Figure`; nothing is
shown, saved or registered with pyplot. :func:`style` sets the theme. Colours are those of Okabe and Ito and maps are
perceptually uniform, so that figures can be read without colour vision and in grey prints.

>>> from vkernel import plots
>>> with plots.style(dark=True):
...     figure = plots.distances([1.0, 1.5, 2.0])
>>> plots.to_data_uri(figure).startswith("data:image/png;base64,")
True
"""

from vkernel.core.errors import InputError

try:
    import matplotlib  # noqa: F401
except (OSError, ValueError) as error:
    why = f"{error}. Correct or remove its file matplotlibrc, or what MATPLOTLIBRC or MPLBACKEND name"
    raise InputError(f"matplotlib, which draws the figures, cannot read its settings: {why}.") from None

from vkernel.plots import curves, images, monitor, paths, reports, twins
from vkernel.plots.base import save, style, to_bytes, to_data_uri
from vkernel.plots.curves import *
from vkernel.plots.images import *
from vkernel.plots.monitor import *
from vkernel.plots.paths import *
from vkernel.plots.reports import *
from vkernel.plots.twins import *

__all__ = ["save", "style", "to_bytes", "to_data_uri"]
__all__ += [*curves.__all__, *images.__all__, *monitor.__all__, *paths.__all__, *reports.__all__, *twins.__all__]
