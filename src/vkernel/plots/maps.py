"""Heat maps: where in space, and at which noise level, the training target is noisy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from vkernel.core.errors import require
from vkernel.plots.base import array, ink, lines, plain_ticks, styled
from vkernel.plots.images import as_pictures

__all__ = ["fraction_maps", "line_maps"]


@styled
def fraction_maps(names: Sequence[str], t: Any, x: Any, y: Any, fraction: Any, points: Any, alpha: Any) -> Figure:
    """Figure 1: ``fraction (set, t, y, x)`` in [0, 1], sets as rows and times as columns, one colour scale.

    ``points (set, n, 2)`` are drawn as dots, and where the process has moved them, ``alpha (t,)`` times the points, as
    crosses.
    """
    t, x, y, alpha = (array(v, 1, "axes") for v in (t, x, y, alpha))
    fraction, points = array(fraction, 4, "maps"), array(points, 3, "sets of points")
    shape = (len(names), len(t), len(y), len(x))
    require(fraction.shape == shape, f"The maps must have shape {shape}; got {fraction.shape}.")
    figure = Figure(figsize=(2.15 * len(t) + 1.3, 2.15 * len(names) + 0.7))
    axes = figure.subplots(len(names), len(t), sharex=True, sharey=True, squeeze=False)
    dx, dy = (x[1] - x[0]) / 2, (y[1] - y[0]) / 2
    extent = (x[0] - dx, x[-1] + dx, y[0] - dy, y[-1] + dy)
    image = None
    for row, name in enumerate(names):
        for column, ax in enumerate(axes[row]):
            image = ax.imshow(fraction[row, column], extent=extent, origin="lower", vmin=0, vmax=1)
            moved = alpha[column] * points[row]
            crosses = ax.plot(*moved.T, "x", color="white", ms=4, mew=1.1, ls="")[0]
            dots = ax.plot(*points[row].T, "o", color="#ff5a36", mec="white", mew=0.8, ms=5, ls="")[0]
            ax.set(xticks=(-2, 0, 2), yticks=(-2, 0, 2))
            ax.grid(visible=False)
            if row == 0:
                ax.set_title(f"t = {t[column]:g}")
        axes[row, 0].set_ylabel(f"{name}\n\nx₂")
    for ax in axes[-1]:
        ax.set_xlabel("x₁")
    assert image is not None
    bar = figure.colorbar(image, ax=axes, shrink=0.55, aspect=30, pad=0.015, ticks=(0, 0.25, 0.5, 0.75, 1))
    bar.set_label("share of the target that is noise,  tr C / (tr C + |s|²)")
    bar.outline.set_visible(False)
    crosses.set_markeredgecolor("white")
    entry = figure.legend(
        [dots, crosses], ["training points y", "where noise level t puts them, αy"], loc="outside lower center", ncols=2
    )
    entry.legend_handles[1].set_markeredgecolor(ink())  # type: ignore[union-attr]
    return figure


@styled
def line_maps(
    t: Any,
    lam_clean: Any,
    clean: Any,
    lam: Any,
    noisy: Any,
    noisy_se: Any,
    *,
    at: Any,
    strip_clean: Any,
    strip_noisy: Any,
    profiles: Sequence[int],
    titles: tuple[str, str],
    floor: float = 1e-6,
) -> Figure:
    """sigma² tr C / d over (λ, t) on the line between two images, without noise (left) and with it (right).

    ``clean``, ``noisy`` and ``noisy_se`` are ``(t, λ)``, the first on its own, finer places ``lam_clean``. Above each
    map stand the images at the λ values ``at``; below it are profiles along λ at the times with the indices
    ``profiles``, with 95 % bands on the right. The colour scale is logarithmic, shared, and ends at ``floor``.
    """
    t, at, *places = (array(v, 1, "axes") for v in (t, at, lam_clean, lam))
    values = [array(v, 2, "maps") for v in (clean, noisy)]
    error = array(noisy_se, 2, "maps")
    shapes = [(len(t), len(p)) for p in (*places, places[1])]
    require([v.shape for v in (*values, error)] == shapes, "The maps must have shape (t, λ).")
    top = 10.0 ** np.ceil(np.log10(max(float(v.max()) for v in values)))
    norm = LogNorm(floor, top, clip=False)
    figure = Figure(figsize=(10.6, 8.2))
    axes = figure.subplots(3, 2, sharex=True, sharey="row", height_ratios=(0.3, 1, 0.72))
    mesh = None
    for side, (lam, value, strip) in enumerate(zip(places, values, (strip_clean, strip_noisy), strict=True)):
        _strip(axes[0, side], lam, at, as_pictures(strip, (-1, 1)))
        axes[0, side].set_title(titles[side])
        ax = axes[1, side]
        mesh = ax.pcolormesh(lam, t, np.maximum(value, floor / 2), norm=norm, shading="nearest", rasterized=True)
        ax.set_yscale("log")
        ax.set_ylim(t.min(), t.max())
        ax.set_yticks(*plain_ticks(t))
        ax.minorticks_off()
        ax.grid(visible=False)
        low = axes[2, side]
        for index, colour in zip(profiles, (lines()[0], lines()[2], lines()[3], lines()[1]), strict=False):
            ax.axhline(t[index], color="white", lw=0.7, ls=(0, (2, 3)))
            ends = [lam[0], lam[-1]]
            ax.plot(
                ends, [t[index]] * 2, "o", ls="", color=colour, mec=ax.get_facecolor(), ms=7, clip_on=False, zorder=5
            )
            low.plot(lam, np.maximum(value[index], floor / 1e3), color=colour, label=f"t = {t[index]:.2g}")
            if side:
                half = 1.96 * error[index]
                band = np.maximum(value[index] - half, floor / 1e3), value[index] + half
                low.fill_between(lam, *band, color=colour, alpha=0.2, lw=0)
        low.set(yscale="log", ylim=(floor, top), xlim=(lam[0], lam[-1]), xlabel="place λ on the line")
        for a in (ax, low):
            for end in (0, 1):
                a.axvline(end, color="white" if a is ax else ink(), lw=0.9, ls=":")
    axes[1, 0].set_ylabel("noise level t")
    axes[2, 0].set_ylabel("σ² tr C / d")
    figure.legend(*axes[2, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    assert mesh is not None
    bar = figure.colorbar(mesh, ax=axes[1, :], extend="min", aspect=28, pad=0.015)
    bar.set_label("σ² tr C / d")
    return figure


def _strip(ax: Axes, lam: np.ndarray, at: np.ndarray, pictures: np.ndarray) -> None:
    """Images at their places λ along the axis, square."""
    width = 0.82 * float(np.diff(at).min())
    for place, picture in zip(at, pictures, strict=True):
        extent = (place - width / 2, place + width / 2, 0, 1)
        ax.imshow(picture, extent=extent, aspect="auto", cmap="gray", vmin=0, vmax=1)
    ax.set(xlim=(lam[0], lam[-1]), ylim=(0, 1))
    ax.set_aspect(width, adjustable="box", anchor="S")
    ax.set_yticks([])
    ax.tick_params(length=0, labelbottom=False)
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
