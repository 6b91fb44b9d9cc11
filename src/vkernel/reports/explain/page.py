"""The page of an explanation, and its section in the page of an audit: ``templates/explain.html``."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vkernel.core.errors import require
from vkernel.reports import html
from vkernel.reports.explain.report import compared, details, tables, title, verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vkernel.reports.audit.decoder import Decoder
    from vkernel.reports.explain.result import Explanation


def page(e: Explanation, decoder: Decoder | None = None) -> str:
    """Return the HTML report; a ``decoder`` shows latents as images."""
    names = e.networks
    head = f"Which theory explains {' and '.join(names) if len(names) < 3 else f'{len(names)} networks'}?"
    return html.page("explain.html", title=head, e=e, explained=section(e, decoder))


def section(e: Explanation, decoder: Decoder | None = None) -> dict[str, Any]:
    """Return what the section of the template shows."""
    networks = [
        {
            "name": name,
            "verdict": verdict(e, name),
            "details": details(e, name),
            "tables": tables(e, name),
            "figure": html.picture(functools.partial(figure, e, name)),
            "pictures": _thumbnails(e, name, decoder),
        }
        for name in e.networks
    ]
    return {"networks": networks, "compared": compared(e)}


def figure(e: Explanation, network: str | None = None) -> Figure:
    """Draw gains against the noise level, of one network or of all."""
    from vkernel import plots

    known = network is None or network in e.networks
    require(known, f"There is no network {network!r}; there are {', '.join(e.networks)}.")
    ds = e.denoising if network is None else e.denoising.sel(network=[network])
    return plots.explanation(ds, {name: title(name) for name in e.theories})


def gallery(e: Explanation, network: str | None = None) -> Figure:
    """Draw final images from the same noise: a row for the network and for each theory."""
    from vkernel import plots

    name = e.networks[0] if network is None else network
    require(name in e.pictures, f"There are no pictures of {name!r}; there are those of {', '.join(e.pictures)}.")
    return plots.image_rows({title(key): images for key, images in e.pictures[name].items()}, e.ranges[name])


def _thumbnails(e: Explanation, network: str, decoder: Decoder | None) -> dict[str, list[str]]:
    """Return final images by name, as ``data:`` addresses; nothing where points are no images."""
    from vkernel import plots

    rows, found = e.pictures.get(network, {}), {}
    for name, images in rows.items():
        shown, limits = (images, e.ranges[network]) if decoder is None else (decoder(images), (0.0, 1.0))
        if html.is_image(shown.shape[1:]):
            found[title(name)] = plots.thumbnails(shown, limits)
    return found
