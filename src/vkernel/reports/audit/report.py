"""Reports of an audit: sentences, one screen for the terminal, one self-contained page, and numbers for files.

Titles and captions of the page's figures stand in ``templates/audit.html``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from vkernel import plots
from vkernel.data.empirical import Empirical
from vkernel.metrics.likeness import image_moments
from vkernel.reports import html
from vkernel.reports.audit.audit import Audit, NetworkAudit, SampleAudit
from vkernel.reports.audit.verdicts import QUESTIONS, SAMPLERS, Verdict, describe

if TYPE_CHECKING:
    from rich.console import Group

SHOWN = 12  # samples of each sampler, and of members from the same noise
PAIRED = 12  # samples beside their nearest training images
POINTS = 2000  # training images whose moments are drawn
_COLOURS = {"good": "green", "alarm": "bold red", "note": "yellow", "unknown": "magenta"}


def sentences(audit: Audit) -> list[str]:
    """Return the results in sentences: what was compared, every verdict, the advice."""
    out = [compared(audit), *audit.notes]
    out += [f"{v.network + ': ' if v.network else ''}{QUESTIONS[v.question]} {v.words}" for v in audit.verdicts]
    return out + [f"Advice ({a.sure}): {a.change} {a.evidence}" for a in audit.advice]


def compared(audit: Audit) -> str:
    """Return a sentence on what was audited against what."""
    held = f" and {audit.test.n:,} test images" if audit.test is not None else " (no test set: errors lack a yardstick)"
    names = ", ".join(n.name for n in audit.networks)
    return f"{names}, against {audit.data.n:,} training images{held}; features: {audit.features}."


def screen(audit: Audit) -> Group:
    """Return a table of short answers and the sentences of alarms, for the terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    several, verdicts = len(audit.networks) > 1, audit.verdicts
    table = Table(title_justify="left", pad_edge=False)
    table.add_column("question")
    for n in audit.networks:
        table.add_column(Text(n.name), overflow="fold")  # a name is no markup
    by = {(v.network, v.question): v for v in verdicts}
    for question, words in QUESTIONS.items():
        cells = [by.get((n.name, question)) for n in audit.networks]
        if any(cells):
            answers = [Text("–") if v is None else Text(v.answer, _COLOURS[v.level]) for v in cells]
            table.add_row(question if several else words, *answers)
    lines: list[Any] = [Text(compared(audit)), table, *map(Text, audit.notes)]
    for v in _of(verdicts, ""):
        parts = (f"{QUESTIONS[v.question]} ", "bold"), (f"{v.answer}. ", _COLOURS[v.level]), _first_sentence(v.words)
        lines.append(Text.assemble(*parts))
    shown: set[str] = set()  # of several networks with the same alarm the first is explained
    for v in verdicts:
        if v.question not in shown and (v.level == "alarm" or (v.question == "copies" and not several)):
            words = _first_sentence(v.words) if several else v.words
            lines.append(Text.assemble((f"{v.question}: ", _COLOURS[v.level]), words))
            shown.add(v.question)
    return Group(*lines, *(Text.assemble((f"advice ({a.sure}): ", "bold"), a.change) for a in audit.advice[:3]))


def _first_sentence(words: str) -> str:
    return re.split(r"(?<=[a-z%)\]])\. (?=[A-Z])", words)[0].rstrip(".") + "."


def _of(verdicts: list[Verdict], name: str) -> list[Verdict]:
    return [v for v in verdicts if v.network == name]


# --- the page ---------------------------------------------------------------------------------------------------------


def page(audit: Audit) -> str:
    """Return the HTML report."""
    verdicts = audit.verdicts
    return html.page(
        "audit.html",
        title=f"Audit of {', '.join(n.name for n in audit.networks)}",
        audit=audit,
        compared=compared(audit),
        questions=QUESTIONS,
        threshold=audit.threshold,
        verdicts=verdicts,
        advice=audit.advice,
        networks=[
            {"name": n.name, "facts": _facts(n), "verdicts": _of(verdicts, n.name), "figures": _figures(audit, n)}
            for n in audit.networks
        ],
        together={"verdicts": _of(verdicts, ""), "figures": _together(audit)},
    )


def _facts(n: NetworkAudit) -> dict[str, str]:
    net = n.net
    facts = {"predicts": net.predicts, "time": _time(n), "process": repr(net.process)}
    facts |= {} if net.range is None else {"pixel range": "[{:g}, {:g}]".format(*net.range)}
    facts |= {} if net.label is None else {"class": str(net.label)}
    return facts | ({"assumed": " ".join(net.notes)} if net.notes else {})


def _time(n: NetworkAudit) -> str:
    return n.net.time if isinstance(n.net.time, str) else "a function of t"


def _figure(key: str, draw: Callable[[], Figure], **context: Any) -> dict[str, Any]:
    """A figure, the key of its title and caption in the template, and what these mention."""
    return {"key": key, "picture": html.picture(draw), **context}


def _figures(audit: Audit, n: NetworkAudit) -> list[dict[str, Any]]:
    if n.levels is None or n.skill is None or n.blind is None:
        return []
    ds, process, data = n.levels, n.net.process, n.net.scaled(audit.data)
    t = torch.tensor(n.skill.t, dtype=torch.float64)
    linear = (process.sigma(t) / process.alpha(t)).tolist(), n.skill.linear.value.tolist()
    out = [
        _figure("errors", lambda: plots.denoising_errors(ds, linear)),
        _figure("deviation", lambda: plots.score_deviation(ds)),
        *_copies(n),
        *(_pictures(n, data) if _is_image(data.shape) else []),
    ]
    if (found := n.membership) is not None:
        level, ratio = found.by_level, (process.sigma(found.t) / process.alpha(found.t)).tolist()
        losses = found.train.mean(0), found.test.mean(0), found.t, level.value, level.low, level.high, ratio
        out.append(_figure("losses", lambda: plots.membership_losses(*losses)))
    response = n.blind.to_dataset()
    some = torch.randperm(data.n, generator=torch.Generator().manual_seed(audit.seed))[:POINTS]
    moments = {SAMPLERS[kind]: _moments(s.images) for kind, s in n.samples.items()}
    own = _moments(data.take(some))
    return [
        *out,
        _figure("responses", lambda: plots.responses(response)),
        _figure("moments", lambda: plots.image_moments(moments, own)),
    ]


def _copies(n: NetworkAudit) -> list[dict[str, Any]]:
    held = {SAMPLERS[kind]: s.comparison for kind, s in n.samples.items()}
    first = next(iter(held.values()))
    curves = {name: (c.curve.value, c.curve.low, c.curve.high) for name, c in held.items()}
    own, real = first.reference_curve, first.reference_kind
    curves[real] = (own.value, own.low, own.high)
    ratios = {name: c.ratio for name, c in held.items() if c.ratio.isfinite().any()} | {real: first.reference_ratio}
    drifted = any(s.standardised for s in n.samples.values())
    return [
        _figure("ratios", lambda: plots.neighbour_ratios(ratios, first.threshold, real), drifted=drifted),
        _figure("copies", lambda: plots.copy_curve(first.thresholds, curves, first.threshold, real)),
    ]


def _is_image(shape: tuple[int, ...]) -> bool:
    """Whether points of this shape can be shown as pictures."""
    return len(shape) == 2 or (len(shape) == 3 and shape[0] in (1, 3))


def _pictures(n: NetworkAudit, data: Empirical) -> list[dict[str, Any]]:
    """Samples beside the training images that they resemble most, and the first samples of each sampler."""
    out, limits = [], n.net.range
    for kind, s in n.samples.items():
        worst = [k for k in s.comparison.worst(PAIRED).tolist() if s.comparison.index[k, 0] >= 0]
        if worst:
            out.append(_beside_sources(SAMPLERS[kind], s, worst, data, limits))
    rows = {SAMPLERS[kind]: _shown(s.images[:SHOWN]) for kind, s in n.samples.items()}
    typical = data[:POINTS].float().cpu()
    drifted = [kind for kind, s in n.samples.items() if s.standardised is not None]
    for kind in drifted:  # in the data's range they would all look alike
        rows[f"{SAMPLERS[kind]}, relit"] = relit(_shown(n.samples[kind].images[:SHOWN]), typical)
    return [*out, _figure("samples", lambda: plots.sample_rows(rows, limits), drifted=bool(drifted))]


def _beside_sources(
    sampler: str, s: SampleAudit, worst: list[int], data: Empirical, limits: tuple[float, float] | None
) -> dict[str, Any]:
    held = s.comparison
    sources, shown = data[held.index[worst, 0]].float(), _shown(s.images[worst])
    titles = [f"{held.ratio[k]:.2f}" + (" copy" if held.ratio[k] < held.threshold else "") for k in worst]
    drifted = held is s.standardised
    if drifted:
        shown = torch.cat([relit(a[None], b[None]) for a, b in zip(shown, sources.cpu(), strict=True)])
    counts = {"count": int((held.ratio < held.threshold).sum()), "of": len(s.images)}
    return _figure(
        "sources", lambda: plots.sources(shown, sources, titles, limits), sampler=sampler, drifted=drifted, **counts
    )


def relit(images: Tensor, like: Tensor) -> Tensor:
    """Return images with the mean and the contrast of others; a constant one stays constant."""
    rows = images.flatten(1)
    spread = rows.std(1, correction=0, keepdim=True)
    light = like.mean() + (rows - rows.mean(1, keepdim=True)) / spread.clamp_min(1e-12) * like.std(correction=0)
    return light.reshape(images.shape)


def _shown(images: Tensor) -> Tensor:
    return images.detach().float().cpu().nan_to_num(0.0, 0.0, 0.0)


def _moments(images: Tensor) -> tuple[Tensor, Tensor]:
    mean, variance = image_moments(images[images.flatten(1).isfinite().all(1)]).T
    return mean, variance


def _together(audit: Audit) -> list[dict[str, Any]]:
    if audit.agreement is None:
        return []
    ds, members = audit.agreement.dataset, audit.members
    out = [_figure("agreement", lambda: plots.agreement_curves(ds))]
    if _is_image(audit.data.shape):
        rows = {n.name: _shown(n.samples["ode"].images[:SHOWN]) for n in members}
        out.append(_figure("same_noise", lambda: plots.sample_rows(rows, members[0].net.range)))
    return out


# --- numbers for files ------------------------------------------------------------------------------------------------


def as_dict(audit: Audit) -> dict[str, Any]:
    """Return everything but pictures as numbers, lists and dictionaries; numbers without a value are ``None``."""
    facts, together = audit.statistics, audit.agreement
    return {
        "data": _data(audit.data),
        "test": None if audit.test is None else _data(audit.test),
        **{name: _plain(getattr(audit, name)) for name in ("features", "threshold", "sizes", "seed", "seconds")},
        "notes": list(audit.notes),
        "networks": [_network(n) for n in audit.networks],
        "agreement": together
        and {
            "curves": _plain(together.dataset),
            "follows": [{"place": p, "t": t, "follows": yes} for (p, t), yes in together.follows.items()],
            "words": describe(together),
            "same_noise": together.same and _described(together.same),
        },
        "statistics": facts and _plain(facts) | {"repeated": sorted(facts.repeated)},
        "memorised": _plain(audit.memorised),
        "verdicts": [_plain(v) for v in audit.verdicts],
        "advice": [_plain(a) for a in audit.advice],
    }


def _data(data: Empirical) -> dict[str, Any]:
    return {"name": data.name, "n": data.n, "shape": list(data.shape), "stored": data.stored, "scale": data.scale}


def _network(n: NetworkAudit) -> dict[str, Any]:
    net, read = n.net, n.conventions
    samples = {kind: _plain(s) for kind, s in n.samples.items()}
    for kind, s in n.samples.items():
        del samples[kind]["images"]
        samples[kind] |= {"drift": _described(s.drift) | {"alarm": s.drift.alarm}, "likeness": _described(s.likeness)}
    conventions = _described(read, n.name) | {"stated": str(read.stated), "better": read.better and str(read.better)}
    conventions["alike"] = [str(other) for other in read.alike]
    del conventions["tried"]
    return {
        "name": net.name,
        "predicts": net.predicts,
        "time": _time(n),
        "range": _plain(net.range),
        "label": net.label,
        "process": repr(net.process),
        "notes": list(net.notes),
        "conventions": conventions,
        "skill": n.skill and _described(n.skill, n.name),
        "levels": _plain(n.levels),
        "membership": n.membership and _plain(n.membership.to_dataset()) | {"words": describe(n.membership)},
        "blind": n.blind and _described(n.blind, n.name) | {"alarm": n.blind.alarm},
        "samples": samples,
    }


def _described(result: Any, name: str = "network") -> dict[str, Any]:
    return {**_plain(result), "words": describe(result, name)}


def _plain(value: Any) -> Any:
    """Numbers, texts, lists and dictionaries from estimates, tensors, labelled arrays and dataclasses."""
    import xarray

    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, xarray.Dataset):
        held = {**value.coords, **value.data_vars}
        return {str(k): _plain(v.values.tolist()) for k, v in held.items()} | {"attributes": _plain(dict(value.attrs))}
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {" ".join(map(str, k)) if isinstance(k, tuple) else str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return str(value)
