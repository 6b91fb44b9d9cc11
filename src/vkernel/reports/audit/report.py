r"""Verdicts of an audit, and its report in sentences, on one screen of the terminal, and as numbers for files.

All sentences stand in ``templates/audit.txt``; the page is made in :mod:`vkernel.reports.audit.page`. A
:class:`Verdict` is ``good``, ``alarm``, ``note`` (no alarm, but worth a look), ``unknown`` (cannot be told) or a
``number``, which has no threshold. Alarms are raised at a stated chance of a false one, for each network and sampler:
copies .01 (Fisher's exact test against real images), membership .01 (one-sided, the rank sum under exchange of the
sets), drift .01 for each of its four tests and a least size, blindness by intervals below a threshold, likeness where
the interval of a distance lies beyond three times that of real images. The sampler that is quoted is one that gives
images: noise is no evidence on copies. :class:`Advice` is given only where a verdict calls for it, in three degrees:
``measured`` (this audit shows the effect on this network), ``theory`` (it follows where the theory was tested against
trained ensembles, docs/theory.md) and ``doubtful`` (theory and experience disagree, or nobody has measured it).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vkernel.data.empirical import Empirical
from vkernel.metrics.augment import Augment
from vkernel.metrics.copies import CHANCE
from vkernel.metrics.likeness import LEAST, Drift, Likeness
from vkernel.metrics.repeats import Repeats
from vkernel.reports import html
from vkernel.reports.audit.agreement import SameNoise
from vkernel.reports.audit.blind import Blind
from vkernel.reports.audit.conventions import Convention, Conventions
from vkernel.reports.audit.levels import TEXTS, Membership
from vkernel.reports.audit.skill import OFFSET, Skill

if TYPE_CHECKING:
    from rich.console import Group

    from vkernel.reports.audit.result import Audit, NetworkAudit
    from vkernel.reports.audit.samples import SampleAudit, SavedAudit

LOST = 0.5  # of the samples diverged: the rest allows no verdict
REMOTE = 1.5  # times as far from the training set as real images; networks with the right data reach 1.4
LARGE = 0.5  # of the common error: a variance between runs that is worth reducing
SOME = 0.05  # of the samples: noise among them is mentioned
QUESTIONS: dict[str, str] = TEXTS["questions"]
SAMPLERS: dict[str, str] = TEXTS["samplers"]
BY_CLASS = ("conventions", "training", "copies", "membership", "likeness")  # the questions of a table of classes
GRADES: dict[str, dict[str, str]] = TEXTS["grades"]  # of each level of a verdict: sign, word, meaning
_COLOURS = {"good": "green", "alarm": "bold red", "note": "yellow", "unknown": "magenta", "number": ""}


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
    known: dict[str, object] = {"describe": describe, "comb": math.comb, "inf": math.inf, "CHANCE": CHANCE}
    known |= {"LEAST": LEAST, "LOST": LOST, "REMOTE": REMOTE, "OFFSET": OFFSET}
    return html.sentences("audit.txt", block, **known, **values)


def verdicts(audit: Audit) -> list[Verdict]:
    """Return all verdicts, network by network, in the order of ``QUESTIONS``."""
    order = list(QUESTIONS)
    found = [sorted(_of_network(n), key=lambda v: order.index(v.question)) for n in audit.networks]
    out = [v for each in found for v in each]
    if (agreed := audit.agreement) is not None:
        out.append(_verdict("", "agreement", "number", r=agreed))
        out.append(_verdict("", "variance", "number" if agreed.follows else "unknown", r=agreed))
    return out if audit.saved is None else [*out, *_of_saved(audit.saved)]


def _verdict(network: str, question: str, level: str, **facts: object) -> Verdict:
    answer, _, words = text(question, level=level, **facts).partition(" --- ")
    return Verdict(network, question, level, answer, words)


def _of_network(n: NetworkAudit) -> Iterator[Verdict]:
    def verdict(question: str, level: str, **facts: object) -> Verdict:
        return _verdict(n.name, question, level, n=n, **facts)

    read = n.conventions
    wrong, good = read.wrong or n.rival is not None, read.fits and not n.doubtful
    # samples have the range of training: where errors leave it open, drift of all samples is evidence of another range,
    # unless the network drifts because it is blind
    drifts = [s.drift.alarm for s in n.samples.values()]
    other = bool(read.ranges and drifts and all(drifts)) and not (n.blind is not None and n.blind.alarm)
    yield verdict(
        "conventions", "alarm" if wrong else "good" if good and not other else "unknown", other=good and other
    )
    if n.skill is None or n.blind is None or n.levels is None:
        if not wrong:
            yield verdict("training", "alarm" if read.untrained else "unknown")
        return
    yield verdict("training", "unknown" if n.doubtful else "alarm" if n.skill.under else "good")
    if n.membership is not None:
        reveals = n.membership.chance < CHANCE
        yield verdict("membership", "alarm" if reveals else "unknown" if n.doubtful else "good")
    yield verdict("blindness", "alarm" if n.blind.alarm else "good")
    yield from _of_samples(n.name, n.samples, n.doubtful)
    yield verdict("deviation", "number")


def _of_saved(n: SavedAudit) -> Iterator[Verdict]:
    for v in _of_samples(n.name, n.samples):
        yield v
        if v.question == "copies" and n.repeats is not None:
            yield _verdict(n.name, "repeats", "alarm" if n.repeats.alarm else "good", r=n.repeats)


def _of_samples(name: str, samples: dict[str, SampleAudit], doubtful: bool = False) -> Iterator[Verdict]:
    """Yield what samples show: no absence of copies where it is ``doubtful`` that the data are the network's."""

    def verdict(question: str, kind: str, level: str, **facts: object) -> Verdict:
        alone = len(samples) == 1
        return _verdict(name, question, level, s=samples[kind], sampler=SAMPLERS[kind], alone=alone, **facts)

    kind, usable = quoted(samples), {kind: s for kind, s in samples.items() if s.are_images}
    textures = {SAMPLERS[kind]: s.texture for kind, s in samples.items() if s.texture is not None}
    if textures or not usable:
        noisy = any(found.noise.low > SOME for found in textures.values())
        yield verdict("images", kind, "alarm" if not usable else "note" if noisy else "good", textures=textures)
    held = samples[kind].comparison
    suspect = "note" if held.closer_chance < CHANCE else "good"
    known = bool(usable) and not doubtful and not samples[kind].coarse and samples[kind].remoteness <= REMOTE
    yield verdict("copies", kind, "alarm" if held.alarm else suspect if known else "unknown", doubtful=doubtful)
    drifts = {k: s.drift for k, s in (usable or samples).items()}
    kind = max(drifts, key=lambda k: (drifts[k].alarm, drifts[k].share.value))
    # if one sampler alone drifts, its coarse steps may be the cause
    level = "alarm" if all(d.alarm for d in drifts.values()) else "note" if drifts[kind].alarm else "good"
    yield verdict("drift", kind, level, diverged=not math.isfinite(drifts[kind].mean.value))
    likes = {k: s.likeness for k, s in (usable or samples).items()}
    kind = min(likes, key=lambda k: _finite((likes[k].frechet or likes[k].kernel).value))
    worse = "alarm" if likes[kind].worse else "note" if likes[kind].alarm else "good"
    yield verdict("likeness", kind, worse if math.isfinite(likes[kind].kernel.value) else "unknown")


def quoted(samples: dict[str, SampleAudit]) -> str:
    """Return the sampler that decides on copies: of those that give images, the one that copies most; of equal ones,
    that with less noise."""

    def worst(kind: str) -> tuple[float, float]:
        s = samples[kind]
        return s.comparison.fraction.value, 0.0 if s.texture is None else -s.texture.noise.value

    return max([kind for kind, s in samples.items() if s.are_images] or samples, key=worst)


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
    for n in audit.networks:
        noise = {SAMPLERS[k] for k, s in n.samples.items() if not s.are_images}
        images = {SAMPLERS[k] for k, s in n.samples.items() if s.are_images and s.remoteness <= REMOTE}
        add(
            "sampler",
            (n.name,) if noise and images else (),
            noise=min(noise, default=""),
            images=min(images, default=""),
        )
    add("steps", tuple(n.name for n in audit.networks if any(s.coarse for s in n.samples.values())))
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


def gist(audit: Audit) -> dict[str, str]:
    """Return the findings on each network, or on saved samples, in few words, by name."""
    found, given = audit.verdicts, {"questions": QUESTIONS, "topics": TEXTS["topics"]}

    def of(name: str, samples: dict[str, SampleAudit]) -> str:
        by = {v.question: v for v in found if v.network == name}
        copies = samples[quoted(samples)].comparison if samples else None
        return text("gist", by=by, copies=copies, **given)

    return {n.name: of(n.name, n.samples) for n in audit.subjects}


def sentences(audit: Audit) -> list[str]:
    """Return the results in sentences: what was compared, every verdict, the advice."""
    out = [text("compared", audit=audit), *audit.notes]
    out += [f"{v.network + ': ' if v.network else ''}{QUESTIONS[v.question]} {v.words}" for v in audit.verdicts]
    out += [f"Advice ({a.sure}): {a.change} {a.evidence}" for a in audit.advice]
    return out if audit.explanation is None else [*out, *audit.explanation.summary.splitlines()]


def screen(audit: Audit) -> Group:
    """Return the findings in few words, a table of short answers and the sentences of alarms, for the terminal."""
    from rich.console import Group
    from rich.table import Column, Table
    from rich.text import Text

    several, verdicts = len(audit.subjects) > 1, audit.verdicts
    by = {(v.network, v.question): v for v in verdicts}
    lines: list[Any] = [Text(text("compared", audit=audit))]
    if audit.classes:  # a row for each, and few columns
        topics = [question for question in BY_CLASS if any((n.name, question) in by for n in audit.subjects)]
        table = Table("class", *(TEXTS["topics"][question] for question in topics), pad_edge=False)
        for n in audit.subjects:
            own = n.name if len(set(audit.titles)) > 1 else n.name.rpartition(" ")[2]
            table.add_row(Text(own), *(_cell(by.get((n.name, question))) for question in topics))
    else:
        # a name is no markup
        table = Table("question", *(Column(Text(n.name), overflow="fold") for n in audit.subjects), pad_edge=False)
        for question, words in QUESTIONS.items():
            cells = [by.get((n.name, question)) for n in audit.subjects]
            if any(cells):
                table.add_row(TEXTS["topics"][question] if len(cells) > 2 else words, *map(_cell, cells))
        lines += [Text.assemble((f"{name}: ", "bold"), words) for name, words in gist(audit).items()]
    lines += [table, *map(Text, audit.notes)]
    shown: set[str] = set()  # of several networks with the same alarm the first is explained, and nothing twice
    for v in sorted(verdicts, key=lambda v: v.network != ""):  # those about all networks first
        first = re.split(r"(?<=[a-z%)\]])\. (?=[A-Z])", v.words)[0].rstrip(".") + "."
        words, colour = first if several else v.words, _COLOURS[v.level]
        if not v.network:
            lines.append(Text.assemble((f"{QUESTIONS[v.question]} ", "bold"), (f"{v.answer}. ", colour), words))
        elif (v.level in ("alarm", "unknown") or (v.question == "copies" and not several)) and not {
            v.question,
            words,
        } & shown:
            topic = TEXTS["topics"][v.question] + (f" ({v.network})" if several else "")
            lines.append(Text.assemble((f"{topic}: ", colour), words))
            shown |= {v.question, words}
    lines += [Text.assemble((f"advice ({a.sure}): ", "bold"), a.change) for a in audit.advice[:3]]
    return Group(*lines, *(() if audit.explanation is None else audit.explanation.screen()))


def _cell(v: Verdict | None) -> Any:
    """Return a short answer after the word of its level, so that colour is not the only sign."""
    from rich.text import Text

    return Text("–") if v is None else Text.assemble((f"{GRADES[v.level]['word']:8}", _COLOURS[v.level]), v.answer)


def as_dict(audit: Audit) -> dict[str, object]:
    """Return everything but pictures as numbers, lists and dictionaries; numbers without a value are ``None``."""
    apart = ("networks", "agreement", "saved", "explanation")
    plain = {name: _plain(value) for name, value in vars(audit).items() if name not in apart}
    plain["explanation"] = None if audit.explanation is None else audit.explanation.to_dict()
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
