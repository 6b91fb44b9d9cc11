"""Every picture of the package, from arrays.

Each function takes arrays (numpy, torch, xarray or lists) and returns a :class:`matplotlib.figure.Figure`; nothing is
shown, saved or kept in pyplot's memory. How pictures look is decided in one place, :func:`style`:

>>> from vkernel import plots
>>> with plots.style(dark=True):
...     figure = plots.distances([1.0, 1.5, 2.0])
>>> plots.to_data_uri(figure).startswith("data:image/png;base64,")
True

Colours are those of Okabe and Ito and the maps are perceptually uniform, so that readers who do not see all colours,
and grey prints, lose nothing. :func:`save` writes through a temporary file: a picture is there whole or not at all.
"""

from vkernel.plots.audits import (
    agreement_curves,
    copy_curve,
    denoising_errors,
    image_moments,
    membership_losses,
    neighbour_ratios,
    responses,
    score_deviation,
    several_errors,
)
from vkernel.plots.base import save, style, to_bytes, to_data_uri
from vkernel.plots.curves import distances, noise_profile, ratio_curve
from vkernel.plots.images import image_row, pairs, sample_rows, scatter_pairs, sources
from vkernel.plots.maps import fraction_maps, line_maps

__all__ = [
    "agreement_curves",
    "copy_curve",
    "denoising_errors",
    "distances",
    "fraction_maps",
    "image_moments",
    "image_row",
    "line_maps",
    "membership_losses",
    "neighbour_ratios",
    "noise_profile",
    "pairs",
    "ratio_curve",
    "responses",
    "sample_rows",
    "save",
    "scatter_pairs",
    "score_deviation",
    "several_errors",
    "sources",
    "style",
    "to_bytes",
    "to_data_uri",
]
