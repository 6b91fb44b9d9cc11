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

from vkernel.plots.base import save, style, to_bytes, to_data_uri
from vkernel.plots.curves import (
    Panel,
    curve_panels,
    distances,
    gap_curves,
    gap_shares,
    noise_profile,
    part_curves,
    phase_diagram,
    ratio_curve,
    ratio_panels,
    share_curve,
    share_curves,
    value_curves,
)
from vkernel.plots.images import (
    end_images,
    fraction_maps,
    image_row,
    law_grid,
    law_panels,
    line_maps,
    pairs,
    path_maps,
    plane_laws,
    sample_rows,
    scatter_pairs,
    variance_panels,
)
from vkernel.plots.reports import (
    agreement_curves,
    comparison,
    copy_curve,
    denoising_errors,
    image_moments,
    membership_losses,
    neighbour_ratios,
    responses,
    score_deviation,
)

__all__ = [
    "Panel", "agreement_curves", "comparison", "copy_curve", "curve_panels", "denoising_errors", "distances",
    "end_images", "fraction_maps", "gap_curves", "gap_shares", "image_moments", "image_row", "law_grid",
    "law_panels", "line_maps", "membership_losses", "neighbour_ratios", "noise_profile", "pairs", "part_curves",
    "path_maps", "phase_diagram", "plane_laws", "ratio_curve", "ratio_panels", "responses", "sample_rows", "save",
    "scatter_pairs", "score_deviation", "share_curve", "share_curves", "style", "to_bytes",
    "to_data_uri", "value_curves", "variance_panels",
]  # fmt: skip
