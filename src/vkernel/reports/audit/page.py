"""The page of an audit: figures, strips of samples beside their nearest training images, and sentences.

Titles and captions of figures stand in ``templates/audit.html``. Latents are shown by the decoder of the audit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.data.empirical import Empirical
from vkernel.metrics.augment import lowest
from vkernel.metrics.features import extractor
from vkernel.metrics.likeness import image_moments
from vkernel.reports import html
from vkernel.reports.audit.levels import TEXTS
from vkernel.reports.audit.report import GRADES, QUESTIONS, SAMPLERS, gist, quoted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vkernel.reports.audit.result import Audit, NetworkAudit
    from vkernel.reports.audit.samples import SampleAudit

SHOWN, PAIRED = 12, 12  # samples of each sampler and member; samples beside their nearest training images
POINTS = 2000  # training images whose moments are drawn


def page(audit: Audit) -> str:
    """Return the HTML report."""
    names = list(dict.fromkeys(audit.titles))
    title = f"Audit of {' and '.join(names) if len(names) < 3 else f'{len(names)} networks'}"
    values = {
        "gist": gist(audit),
        "questions": QUESTIONS,
        "topics": TEXTS["topics"],
        "grades": GRADES,
        "together": _together(audit),
    }
    figures, pictures = {}, {}
    for n in audit.networks:
        data = n.net.scaled(audit.data)
        figures[n.name], pictures[n.name] = _figures(audit, n, data), _pictures(audit, n.samples, data, n.net.range)
    if (saved := audit.saved) is not None:
        figures[saved.name] = list(_of_comparison(audit, saved.samples, audit.data).values())
        pictures[saved.name] = _pictures(audit, saved.samples, audit.data, saved.range)
    values |= {"figures": figures, "pictures": pictures, "same_noise": _same_noise(audit)}
    values["explained"] = None if audit.explanation is None else audit.explanation.section(audit.decoder)
    return html.page("audit.html", title=title, audit=audit, **values)


def _figure(key: str, draw: Callable[..., Figure], *given: Any, **context: Any) -> dict[str, Any]:
    """Return a figure, the key of its title and caption in the template, and what these mention."""
    return {"key": key, "picture": html.picture(functools.partial(draw, *given)), **context}


def _figures(audit: Audit, n: NetworkAudit, data: Empirical) -> list[dict[str, Any]]:
    if n.levels is None or n.skill is None or n.blind is None:
        return []
    from vkernel import plots

    process, compared = n.net.process, _of_comparison(audit, n.samples, data)
    t = torch.tensor(n.skill.t, dtype=torch.float64)
    linear = (process.sigma(t) / process.alpha(t)).tolist(), n.skill.linear.value.tolist()
    out = [_figure("errors", plots.denoising_errors, n.levels, linear)]
    out += [_figure("deviation", plots.score_deviation, n.levels), compared["ratios"], compared["copies"]]
    if (found := n.membership) is not None:
        ratio = (process.sigma(found.t) / process.alpha(found.t)).tolist()
        losses = found.train.mean(0), found.test.mean(0), found.t, found.by_level.stack(), ratio
        out.append(_figure("losses", plots.membership_losses, *losses))
    return [*out, _figure("responses", plots.responses, n.blind.to_dataset()), compared["moments"]]


def _of_comparison(audit: Audit, samples: dict[str, SampleAudit], data: Empirical) -> dict[str, dict[str, Any]]:
    """Return the figures that need samples alone, by key."""
    from vkernel import plots

    held = {SAMPLERS[kind]: s.comparison for kind, s in samples.items()}
    first = next(iter(held.values()))
    shares = {name: c.curve for name, c in held.items()} | {first.reference_kind: first.reference_curve}
    curves = {name: (e.value, e.low, e.high) for name, e in shares.items()}
    ratios = {name: c.ratio for name, c in held.items() if c.ratio.isfinite().any()}
    ratios[first.reference_kind] = first.reference_ratio
    drifted, stated = any(s.standardised for s in samples.values()), (first.threshold, first.reference_kind)
    some = torch.randperm(data.n, generator=rng.stream(audit.seed, "points of a figure"))[:POINTS]
    moments = {SAMPLERS[kind]: _moments(s.images) for kind, s in samples.items()}
    found = [_figure("ratios", plots.neighbour_ratios, ratios, *stated, drifted=drifted)]
    found.append(_figure("copies", plots.copy_curve, first.thresholds, curves, *stated))
    found.append(_figure("moments", plots.image_moments, moments, _moments(data.take(some))))
    return {figure["key"]: figure for figure in found}


def _moments(images: Tensor) -> tuple[Tensor, ...]:
    return image_moments(images[images.flatten(1).isfinite().all(1)]).unbind(1)


def _pictures(
    audit: Audit, samples: dict[str, SampleAudit], data: Empirical, limits: tuple[float, float] | None
) -> list[dict[str, Any]]:
    """Return strips of images: samples above the training images that they resemble most, those of the quoted sampler
    first, and the first samples of each sampler."""
    if not samples or not (audit.decoder or html.is_image(data.shape)):
        return []
    strips, typical, most = [], data[:POINTS].float().cpu(), quoted(samples)
    kinds = sorted(samples, key=lambda kind: kind != most)
    for kind in kinds:
        s = samples[kind]
        held, drifted = s.comparison, s.standardised is not None
        worst = [k for k in held.worst(PAIRED).tolist() if held.index[k, 0] >= 0]
        if not worst or not s.are_images:
            continue
        sources, pairs = data[held.index[worst, 0]].float().cpu(), _shown(s.images[worst])
        if held.augment:  # show the version that is nearest
            alike = extractor("standardised" if drifted else "pixels")
            sources = audit.augment.closest(sources, pairs, lowest(data), alike)
        if drifted:
            pairs = torch.cat([relit(a[None], b[None]) for a, b in zip(pairs, sources, strict=True)])
        ratios = held.ratio[worst]
        titles, copied = [f"{r:.2f}" for r in ratios], (ratios < held.threshold).tolist()
        tiles = _tiles(audit, [pairs, sources], limits, titles, copied)
        facts = {
            "count": int((held.ratio < held.threshold).sum()),
            "of": len(s.images),
            "drifted": drifted,
            "steps": s.steps,
        }
        strips.append({"key": "sources", "sampler": SAMPLERS[kind], "quoted": kind == most, "tiles": tiles, **facts})
    for kind in kinds:
        s = samples[kind]
        images, drifted = _shown(s.images[:SHOWN]), s.standardised is not None
        tiles = _tiles(audit, [relit(images, typical)] if drifted else [images], limits)
        facts = {"drifted": drifted, "noisy": s.texture is not None and s.texture.noisy, "steps": s.steps}
        strips.append({"key": "samples", "sampler": SAMPLERS[kind], "quoted": kind == most, "tiles": tiles, **facts})
    return strips


def _tiles(
    audit: Audit,
    rows: list[Tensor],
    limits: tuple[float, float] | None,
    titles: Sequence[str] = (),
    copied: Sequence[bool] = (),
) -> list[dict[str, Any]]:
    """Return columns of images, one of each row, each with a title and whether it is a copy; latents are decoded."""
    from vkernel import plots

    if audit.decoder is not None:
        rows, limits = [audit.decoder(latents) for latents in rows], (0.0, 1.0)
    columns = zip(*(plots.thumbnails(images, limits) for images in rows), strict=True)
    return [
        dict(zip(("images", "title", "copied"), tile, strict=True))
        for tile in zip_longest(columns, titles, copied, fillvalue="")
    ]


def relit(images: Tensor, like: Tensor) -> Tensor:
    """Return images with the mean and the contrast of others; a constant one stays constant."""
    rows = images.flatten(1)
    spread = rows.std(1, correction=0, keepdim=True)
    light = like.mean() + (rows - rows.mean(1, keepdim=True)) / spread.clamp_min(1e-12) * like.std(correction=0)
    return light.reshape(images.shape)


def _shown(images: Tensor) -> Tensor:
    return images.detach().float().cpu().nan_to_num(0.0, 0.0, 0.0)


def _together(audit: Audit) -> list[dict[str, Any]]:
    from vkernel import plots

    return [] if audit.agreement is None else [_figure("agreement", plots.agreement_curves, audit.agreement.dataset)]


def _same_noise(audit: Audit) -> list[dict[str, Any]]:
    """Return a column for each noise: what each run makes of it."""
    if audit.agreement is None or not (audit.decoder or html.is_image(audit.data.shape)):
        return []
    rows, typical = [], audit.members[0].net.scaled(audit.data)[:POINTS].float().cpu()
    for s in (n.samples["ode"] for n in audit.members):
        images = _shown(s.images[:SHOWN])
        rows.append(images if s.standardised is None else relit(images, typical))
    return _tiles(audit, rows, audit.members[0].net.range)
