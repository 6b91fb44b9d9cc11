r"""Verdicts and reports of an audit: sentences, one screen for the terminal, one page, and numbers for files.

All sentences stand in ``templates/audit.txt``, titles and captions of figures in ``templates/audit.html``. A
:class:`Verdict` is ``good``, ``alarm``, ``note`` (a number without a threshold) or ``unknown``. Alarms are raised at a
stated chance of a false one, for each network and sampler: copies .01 (Fisher's exact test against real images),
membership .01 (one-sided, the rank sum under exchange of the sets), drift .01 for each of its four tests and a least
size, blindness by intervals below a threshold. :class:`Advice` is given only where a verdict calls for it, in three
degrees: ``measured`` (this audit shows the effect on this network), ``theory`` (it follows where the theory was tested
against trained ensembles, docs/theory.md) and ``doubtful`` (theory and experience disagree, or nobody has measured it).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vkernel.data.empirical import Empirical
from vkernel.metrics.augment import Augment, lowest
from vkernel.metrics.copies import CHANCE
from vkernel.metrics.features import extractor
from vkernel.metrics.likeness import LEAST, Drift, Likeness, image_moments
from vkernel.metrics.repeats import Repeats
from vkernel.reports import html
from vkernel.reports.audit.agreement import SameNoise
from vkernel.reports.audit.blind import Blind
from vkernel.reports.audit.conventions import Convention, Conventions, Skill
from vkernel.reports.audit.levels import TEXTS, Membership

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Group

    from vkernel.reports.audit.audit import Audit, NetworkAudit
    from vkernel.reports.audit.samples import SavedAudit

LOST = 0.5  # of the samples diverged: the rest allows no verdict
LARGE = 0.5  # of the common error: a variance between runs that is worth reducing
SHOWN, PAIRED = 12, 12  # samples of each sampler and member; samples beside their nearest training images
POINTS = 2000  # training images whose moments are drawn
QUESTIONS: dict[str, str] = TEXTS["questions"]
SAMPLERS: dict[str, str] = TEXTS["samplers"]
_COLOURS = {"good": "green", "alarm": "bold red", "note": "yellow", "unknown": "magenta"}


@dataclass(frozen=True)
class Verdict:
    """The answer to one question; ``network`` is empty for those about all networks together."""

    network: str
    question: str
    level: str
    answer: str
    words: str


@dataclass(frozen=True)
class Advice:
    """A change, the evidence for it, and how sure that is (``measured``, ``theory`` or ``doubtful``)."""

    change: str
    evidence: str
    sure: str
    networks: tuple[str, ...] = ()


def describe(result: object, name: str = "network") -> str:
    """Describe one result of an audit in sentences; ``name`` is that of the network."""
    return text(type(result).__name__, r=result, name=name)


def text(block: str, **values: object) -> str:
    """Return the sentences of one block of ``templates/audit.txt``."""
    return html.sentences(
        "audit.txt", block, describe=describe, comb=math.comb, inf=math.inf, CHANCE=CHANCE, LEAST=LEAST, **values
    )


def verdicts(audit: Audit) -> list[Verdict]:
    """Return all verdicts, network by network, in the order of ``QUESTIONS``."""
    out = [v for network in audit.networks for v in _of_network(network)]
    if (found := audit.agreement) is not None:
        out.append(_verdict("", "agreement", "note", r=found))
        out.append(_verdict("", "variance", "note" if found.follows else "unknown", r=found))
    return out if audit.saved is None else [*out, *_of_saved(audit.saved)]


def _verdict(network: str, question: str, level: str, **facts: object) -> Verdict:
    answer, _, words = text(question, level=level, **facts).partition(" --- ")
    return Verdict(network, question, level, answer, words)


def _of_network(n: NetworkAudit) -> Iterator[Verdict]:
    def verdict(question: str, level: str, **facts: object) -> Verdict:
        return _verdict(n.name, question, level, n=n, **facts)

    def sampled(question: str, kind: str, level: str, **facts: object) -> Verdict:
        return verdict(question, level, s=n.samples[kind], sampler=SAMPLERS[kind], **facts)

    read = n.conventions
    yield verdict("conventions", "unknown" if read.untrained else "good" if read.fits else "alarm")
    if n.skill is None or n.blind is None or n.levels is None:
        if read.untrained or n.failure:
            yield verdict("training", "alarm" if read.untrained else "unknown")
        return
    yield verdict("training", "alarm" if n.skill.under else "good")
    kind = max(n.samples, key=lambda k: n.samples[k].comparison.fraction.value)  # the sampler that copies most decides
    held, few = n.samples[kind].comparison, LOST * len(n.samples[kind].images)
    suspect = "alarm" if held.alarm else "note" if held.closer_chance < CHANCE else "good"
    yield sampled("copies", kind, "unknown" if held.diverged > few else suspect)
    if n.membership is not None:
        yield verdict("membership", "alarm" if n.membership.chance < CHANCE else "good")
    yield verdict("blindness", "alarm" if n.blind.alarm else "good")
    drifts = {k: s.drift for k, s in n.samples.items()}
    kind = max(drifts, key=lambda k: (drifts[k].alarm, drifts[k].share.value))
    # if one sampler alone drifts, its coarse steps may be the cause
    level = "alarm" if all(d.alarm for d in drifts.values()) else "note" if drifts[kind].alarm else "good"
    yield sampled("drift", kind, level, diverged=not math.isfinite(drifts[kind].mean.value))
    kind = min(n.samples, key=lambda k: _finite(n.samples[k].likeness.kernel.value))
    like = n.samples[kind].likeness
    known = math.isfinite(like.kernel.value)
    yield sampled("likeness", kind, ("note" if like.alarm else "good") if known else "unknown")
    yield verdict("deviation", "note")


def _of_saved(n: SavedAudit) -> Iterator[Verdict]:
    s = n.samples["saved"]

    def verdict(question: str, level: str, **facts: object) -> Verdict:
        return _verdict(n.name, question, level, n=n, s=s, sampler=SAMPLERS["saved"], **facts)

    held, moved, like = s.comparison, s.drift, s.likeness
    suspect = "alarm" if held.alarm else "note" if held.closer_chance < CHANCE else "good"
    yield verdict("copies", suspect if s.are_images else "unknown")
    if n.repeats is not None:
        yield verdict("repeats", "alarm" if n.repeats.alarm else "good", r=n.repeats)
    yield verdict("drift", "alarm" if moved.alarm else "good", diverged=not math.isfinite(moved.mean.value))
    known = math.isfinite(like.kernel.value)
    yield verdict("likeness", ("note" if like.alarm else "good") if known else "unknown")


def _finite(value: float) -> float:
    return float(value) if math.isfinite(value) else math.inf


def advice(audit: Audit) -> list[Advice]:
    """Return what to change, the surest first."""
    alarms = [v for v in verdicts(audit) if v.level == "alarm"]
    names = {q: tuple(v.network for v in alarms if v.question == q) for q in QUESTIONS}
    copying, facts = names["copies"], audit.statistics
    out: list[Advice] = []

    def add(key: str, networks: tuple[str, ...], **given: object) -> None:
        if networks:
            own = [n for n in audit.networks if n.name in networks]
            gaps = (n for n in own if n.levels is not None and "gap" in n.levels and (n.levels.gap_low > 0).any())
            known = {"audit": audit, "alarms": alarms, "names": names, "own": own, "better": next(gaps, None)}
            sure, change, evidence = text(f"change_{key}", **known, **given).split(" --- ", 2)
            out.append(Advice(change, evidence, sure, networks))

    for question in ("conventions", "blindness", "training"):
        add(question, names[question])
    if facts is not None and facts.repeated:
        held = [s.comparison for n in audit.networks if n.name in copying for s in n.samples.values()]
        sources = {i for c in held for i in c.index[c.ratio < c.threshold][:, 0].tolist()}
        add("duplicates", copying, sources=len(sources), both=len(sources & facts.repeated))
    if facts is not None and facts.collapse is not None and facts.collapse > 2 * facts.cutoff:
        add("cutoff", copying)
    for key in ("earlier", "images", "noise", "capacity"):
        add(key, copying)
    add("membership", tuple(n for n in names["membership"] if n not in copying))
    if audit.agreement is not None:
        ds = audit.agreement.dataset
        share = (ds["variance"] / ds["bias"].where(ds["bias"] > 0)).sel(place="data").fillna(-1)
        most = int(share.values.argmax())
        if share[most] > LARGE:
            add("average", tuple(n.name for n in audit.members), ratio=ds.ratio[most], share=share[most])
    return sorted(out, key=lambda a: ("measured", "theory", "doubtful").index(a.sure))


def sentences(audit: Audit) -> list[str]:
    """Return the results in sentences: what was compared, every verdict, the advice."""
    out = [text("compared", audit=audit), *audit.notes]
    out += [f"{v.network + ': ' if v.network else ''}{QUESTIONS[v.question]} {v.words}" for v in audit.verdicts]
    return out + [f"Advice ({a.sure}): {a.change} {a.evidence}" for a in audit.advice]


def screen(audit: Audit) -> Group:
    """Return a table of short answers and the sentences of alarms, for the terminal."""
    from rich.console import Group
    from rich.table import Column, Table
    from rich.text import Text

    several, verdicts = len(audit.subjects) > 1, audit.verdicts
    # a name is no markup
    table = Table("question", *(Column(Text(n.name), overflow="fold") for n in audit.subjects), pad_edge=False)
    by = {(v.network, v.question): v for v in verdicts}
    for question, words in QUESTIONS.items():
        cells = [by.get((n.name, question)) for n in audit.subjects]
        if any(cells):
            answers = [Text("–") if v is None else Text(v.answer, _COLOURS[v.level]) for v in cells]
            table.add_row(question if several else words, *answers)
    lines: list[Any] = [Text(text("compared", audit=audit)), table, *map(Text, audit.notes)]
    shown: set[str] = set()  # of several networks with the same alarm the first is explained
    for v in sorted(verdicts, key=lambda v: v.network != ""):  # those about all networks first
        first = re.split(r"(?<=[a-z%)\]])\. (?=[A-Z])", v.words)[0].rstrip(".") + "."
        words, colour = first if several else v.words, _COLOURS[v.level]
        if not v.network:
            lines.append(Text.assemble((f"{QUESTIONS[v.question]} ", "bold"), (f"{v.answer}. ", colour), words))
        elif v.question not in shown and (v.level == "alarm" or (v.question == "copies" and not several)):
            lines.append(Text.assemble((f"{v.question}: ", colour), words))
            shown.add(v.question)
    return Group(*lines, *(Text.assemble((f"advice ({a.sure}): ", "bold"), a.change) for a in audit.advice[:3]))


def page(audit: Audit) -> str:
    """Return the HTML report."""
    figures = {n.name: _figures(audit, n) for n in audit.networks}
    values = {"compared": text("compared", audit=audit), "questions": QUESTIONS, "together": _together(audit)}
    return html.page("audit.html", title=f"Audit of {', '.join(figures)}", audit=audit, figures=figures, **values)


def _figure(key: str, draw: Callable[..., Figure], *given: Any, **context: Any) -> dict[str, Any]:
    """Return a figure, the key of its title and caption in the template, and what these mention."""
    return {"key": key, "picture": html.picture(functools.partial(draw, *given)), **context}


def _figures(audit: Audit, n: NetworkAudit) -> list[dict[str, Any]]:
    if n.levels is None or n.skill is None or n.blind is None:
        return []
    from vkernel import plots

    process, data = n.net.process, n.net.scaled(audit.data)
    t = torch.tensor(n.skill.t, dtype=torch.float64)
    linear = (process.sigma(t) / process.alpha(t)).tolist(), n.skill.linear.value.tolist()
    out = [_figure("errors", plots.denoising_errors, n.levels, linear)]
    out.append(_figure("deviation", plots.score_deviation, n.levels))
    held = {SAMPLERS[kind]: s.comparison for kind, s in n.samples.items()}
    first = next(iter(held.values()))
    shares = {name: c.curve for name, c in held.items()} | {first.reference_kind: first.reference_curve}
    curves = {name: (e.value, e.low, e.high) for name, e in shares.items()}
    ratios = {name: c.ratio for name, c in held.items() if c.ratio.isfinite().any()}
    ratios[first.reference_kind] = first.reference_ratio
    drifted, stated = any(s.standardised for s in n.samples.values()), (first.threshold, first.reference_kind)
    out.append(_figure("ratios", plots.neighbour_ratios, ratios, *stated, drifted=drifted))
    out.append(_figure("copies", plots.copy_curve, first.thresholds, curves, *stated))
    out += _pictures(n, data, audit.augment) if _is_image(data.shape) else []
    if (found := n.membership) is not None:
        ratio = (process.sigma(found.t) / process.alpha(found.t)).tolist()
        losses = found.train.mean(0), found.test.mean(0), found.t, found.by_level.stack(), ratio
        out.append(_figure("losses", plots.membership_losses, *losses))
    some = torch.randperm(data.n, generator=torch.Generator().manual_seed(audit.seed))[:POINTS]
    moments = {SAMPLERS[kind]: _moments(s.images) for kind, s in n.samples.items()}
    out.append(_figure("responses", plots.responses, n.blind.to_dataset()))
    return [*out, _figure("moments", plots.image_moments, moments, _moments(data.take(some)))]


def _moments(images: Tensor) -> tuple[Tensor, ...]:
    return image_moments(images[images.flatten(1).isfinite().all(1)]).unbind(1)


def _is_image(shape: tuple[int, ...]) -> bool:
    """Whether points of this shape can be shown as pictures."""
    return len(shape) == 2 or (len(shape) == 3 and shape[0] in (1, 3))


def _pictures(n: NetworkAudit, data: Empirical, augment: Augment) -> list[dict[str, Any]]:
    """Return samples beside the training images that they resemble most, and the first samples of each sampler."""
    from vkernel import plots

    out, limits, typical = [], n.net.range, data[:POINTS].float().cpu()
    rows = {SAMPLERS[kind]: _shown(s.images[:SHOWN]) for kind, s in n.samples.items()}
    for kind, s in n.samples.items():
        held, drifted = s.comparison, s.standardised is not None
        if drifted:  # in the data's range they would all look alike
            rows[f"{SAMPLERS[kind]}, relit"] = relit(rows[SAMPLERS[kind]], typical)
        worst = [k for k in held.worst(PAIRED).tolist() if held.index[k, 0] >= 0]
        if not worst:
            continue
        sources, pairs = data[held.index[worst, 0]].float().cpu(), _shown(s.images[worst])
        if held.augment:  # show the version that is nearest
            alike = extractor("standardised" if drifted else "pixels")
            sources = augment.closest(sources, pairs, lowest(data), alike)
        if drifted:
            pairs = torch.cat([relit(a[None], b[None]) for a, b in zip(pairs, sources, strict=True)])
        titles = [f"{held.ratio[k]:.2f}" + (" copy" if held.ratio[k] < held.threshold else "") for k in worst]
        facts = {"count": int((held.ratio < held.threshold).sum()), "of": len(s.images), "drifted": drifted}
        draw = functools.partial(plots.pairs, limits=limits, labels=("sample", "training image"))
        out.append(_figure("sources", draw, pairs, sources, titles, sampler=SAMPLERS[kind], **facts))
    return [*out, _figure("samples", plots.sample_rows, rows, limits, drifted=len(rows) > len(n.samples))]


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

    if audit.agreement is None:
        return []
    out = [_figure("agreement", plots.agreement_curves, audit.agreement.dataset)]
    if _is_image(audit.data.shape):
        rows = {n.name: _shown(n.samples["ode"].images[:SHOWN]) for n in audit.members}
        out.append(_figure("same_noise", plots.sample_rows, rows, audit.members[0].net.range))
    return out


def as_dict(audit: Audit) -> dict[str, object]:
    """Return everything but pictures as numbers, lists and dictionaries; numbers without a value are ``None``."""
    plain = {
        name: _plain(value) for name, value in vars(audit).items() if name not in ("networks", "agreement", "saved")
    }
    plain["saved"] = None if audit.saved is None else _plain(audit.saved, audit.saved.name)
    plain |= {"memorised": _plain(audit.memorised), "verdicts": _plain(audit.verdicts), "advice": _plain(audit.advice)}
    plain |= {"networks": [_network(n) for n in audit.networks], "agreement": None}
    if (found := audit.agreement) is not None:
        follows = [{"place": place, "t": t, "follows": yes} for (place, t), yes in found.follows.items()]
        words = {"words": describe(found), "same_noise": _plain(found.same)}
        plain["agreement"] = {"curves": _plain(found.dataset), "follows": follows} | words
    return plain


def _network(n: NetworkAudit) -> dict[str, Any]:
    net = n.net
    stated = {name: _plain(vars(net)[name]) for name in ("name", "predicts", "range", "label", "notes")}
    stated |= {"process": repr(net.process), "time": net.time if isinstance(net.time, str) else "a function of t"}
    return stated | {name: _plain(value, n.name) for name, value in vars(n).items() if name != "net"}


def _plain(value: Any, name: str = "network") -> Any:
    """Return results as numbers, texts, lists and dictionaries; those of the network ``name`` have sentences."""
    import xarray

    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, Augment):
        return value.name
    if isinstance(value, Empirical):
        facts = {"name": value.name, "n": value.n, "shape": value.shape}
        return _plain(facts | {"stored": value.stored, "scale": value.scale})
    if isinstance(value, xarray.Dataset):
        columns = {str(k): _plain(v.values.tolist()) for k, v in {**value.coords, **value.data_vars}.items()}
        return columns | {"attributes": _plain(dict(value.attrs))}
    if isinstance(value, Membership):
        return _plain(value.to_dataset()) | {"words": describe(value)}
    if is_dataclass(value) and not isinstance(value, Convention):
        kept = (f.name for f in fields(value) if f.metadata.get("files", True))
        out = {key: _plain(vars(value)[key], name) for key in kept}
        out |= {"alarm": value.alarm} if isinstance(value, Blind | Drift | Repeats) else {}
        described = isinstance(value, Blind | Conventions | Drift | Likeness | Repeats | SameNoise | Skill)
        return out | ({"words": describe(value, name)} if described else {})
    if isinstance(value, Mapping):
        return {" ".join(map(str, k)) if isinstance(k, tuple) else str(k): _plain(v, name) for k, v in value.items()}
    if isinstance(value, list | tuple | frozenset):
        return [_plain(v) for v in (sorted(value) if isinstance(value, frozenset) else value)]
    return str(value)
