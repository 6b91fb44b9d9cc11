r"""Sentences of an audit: descriptions of each result, a verdict for each question, and advice.

:func:`describe` puts one result into sentences. A :class:`Verdict` has a level: ``good``, ``alarm``, ``note`` (a number
without a threshold) or ``unknown``. Alarms are raised at a stated chance of a false one, for each network and sampler:
copies .01 (Fisher's exact test against real images), membership .01 (one-sided, the rank sum under exchange of the
sets), drift .01 for each of its four tests and a least size, blindness by intervals below a threshold. "Under-trained"
and "blind" are conventions, stated in :mod:`~vkernel.reports.audit.conventions` and
:mod:`~vkernel.reports.audit.blind`.

:class:`Advice` is given only where a verdict calls for it, in three degrees: ``measured`` (this audit shows the effect
on this network), ``theory`` (it follows where the theory was tested against trained ensembles, docs/theory.md) and
``doubtful`` (the theory and experience disagree, or nobody has measured it at this size).
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from functools import singledispatch
from importlib import resources
from typing import TYPE_CHECKING, cast

import torch

from vkernel.core.estimate import Estimate
from vkernel.metrics.copies import CHANCE, Copies
from vkernel.metrics.likeness import LEAST, Drift, Likeness
from vkernel.reports.audit.agreement import PLACES, Agreement, SameNoise
from vkernel.reports.audit.blind import Blind
from vkernel.reports.audit.conventions import Conventions, Skill
from vkernel.reports.audit.levels import Membership

if TYPE_CHECKING:
    import xarray

    from vkernel.reports.audit.audit import Audit, NetworkAudit

LOST = 0.5  # of the samples diverged: the rest allows no verdict
LARGE = 0.5  # of the common error: a variance between runs that is worth reducing
SAMPLERS = {"ode": "probability flow", "ancestral": "ancestral"}
QUESTIONS = {
    "conventions": "Are the stated conventions right?",
    "training": "Is it trained?",
    "copies": "Are its samples copies of training images?",
    "membership": "Do its errors reveal training images?",
    "blindness": "Is it blind to a change of the image?",
    "drift": "Do its samples leave the data's range?",
    "likeness": "Do its samples follow the law of the data?",
    "deviation": "Where does it deviate from the ideal score?",
    "agreement": "Would another run have learned the same?",
    "variance": "Do runs differ where the theory predicts?",
}


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


# --- descriptions -----------------------------------------------------------------------------------------------------


@singledispatch
def describe(result: object, name: str = "network") -> str:
    """Describe one result of an audit in sentences; ``name`` is that of the network."""
    raise TypeError(f"There is no description of a {type(result).__name__}.")


@describe.register
def _(result: Conventions, name: str = "network") -> str:
    share = f"its error is {result.loss.value:.3g} ± {result.loss.se:.1g} of the trivial predictor's"
    if result.fits:
        others = "; ".join(map(str, result.alike[:3]))
        doubt = f" It does about as well with {others}: the check cannot distinguish these." if others else ""
        return f"{name} denoises under the stated convention ({result.stated}): {share}.{doubt}"
    if result.better is not None and result.better_loss is not None:
        gain = f"{result.better_loss.value:.3g} ± {result.better_loss.se:.1g}"
        return (
            f"{name} does not fit the stated convention ({result.stated}): {share}. With ({result.better}) it would be "
            f"{gain}: state that convention if the network was trained with it."
        )
    (low, high), stated = result.data_range, result.stated.range
    width, expected = high - low, stated[1] - stated[0]
    where = ""
    if max(width / expected, expected / max(width, 1e-30)) >= 1.5 or low <= stated[0] - 0.1 * expected:
        where = f" (these data lie in [{low:g}, {high:g}], not in the stated range: load them with scale={stated})"
    return (
        f"{name} looks untrained: under the stated convention ({result.stated}) {share}, and no other prediction, time "
        f"or range is clearly better than a predictor that knows the mean and variance of the data{where}. If it was "
        "trained, its betas or its data may differ from those stated."
    )


@describe.register
def _(result: Skill, name: str = "network") -> str:
    worst = int(result.ratio.value.argmax())
    most, skill = (
        _interval(cast(Estimate, result.ratio[worst])),
        f"skill {_interval(result.skill)} over a linear denoiser",
    )
    if result.under:
        return (
            f"{name} is under-trained: {skill}; where it does worst, at noise {result.r[worst]:.2g} times the data's "
            f"spread, its error is {most} times that denoiser's."
        )
    return f"{name} is trained: {skill}; its error is at most {most} of that denoiser's."


@describe.register
def _(result: Membership, name: str = "network") -> str:
    can = "can" if result.auc.low > 0.5 else "cannot"
    odd = " (test images are denoised better than training images)" if result.auc.high < 0.5 else ""
    return (
        f"Training images {can} be distinguished from test images by a lower loss{odd}: AUC {result.auc}, "
        f"{result.train.shape[1]} training and {result.test.shape[1]} test images, {len(result.t)} noise levels."
    )


@describe.register
def _(result: Blind, name: str = "network") -> str:
    parts = []
    for change, levels in result.blind.items():
        if any(levels):
            most = float(result.response[change].high[torch.tensor(levels)].max())
            parts.append(f"{change} at {sum(levels)} of {len(levels)} noise levels (response below {most:.1g})")
    if result.alarm:
        words = (
            f"{name} is blind to {' and to '.join(parts)}, in units of a linear denoiser's: nothing restores its "
            "samples along these; compare their per-image means and variances with the data's."
        )
    else:
        least = ", ".join(f"{change} {float(e.value.min()):.2g}" for change, e in result.response.items())
        but = f", but not to {' nor to '.join(parts)}" if parts else ""
        words = (
            f"{name} responds to {', '.join(result.blind)}{but}: its least responses, in units of a linear denoiser's, "
            f"are {least}."
        )
    typical = result.gain["random"].value.tolist()
    columns = zip(result.least, typical, result.cosine, strict=True)
    gains = [(gain / max(random, 1e-300), cosine) for gain, random, cosine in columns if not math.isnan(gain)]
    if gains:
        gain, cosine = min(gains)
        words += (
            f" Its smallest gain found is {gain:.1g} of a random direction's, cosine {cosine:.2f} with the constant."
        )
    return words


@describe.register
def _(result: Copies, name: str = "network") -> str:
    n, m, part = len(result.ratio), len(result.reference_ratio), result.fraction
    exact = int((result.distance[:, 0] == 0).sum())
    equal = f", and {exact} {'equals' if exact == 1 else 'equal'} a training image exactly" if exact else ""
    real = result.reference_kind.replace(", each", "")
    verdict = "more than chance allows" if result.alarm else "no more than chance allows"
    sentences = [
        f"{round(part.value * n)} of {n} samples ({_percent(part.value)}, 95 %: {_percent(part.low)[:-2]} to "
        f"{_percent(part.high)}) are copies, less than {result.threshold:.2g} times as far from one training image as "
        f"from the second nearest{equal}; of {real} {_percent(result.reference.value)} meet this definition: {verdict} "
        f"(chance {result.chance:.2g})."
    ]
    if result.closer_chance < CHANCE and not result.alarm:
        sentences.append(
            f"But {round(result.closer.value * n)} of them ({_percent(result.closer.value)}) are closer to the "
            f"training set than all but 1 % of {real} (chance {result.closer_chance:.2g}): copies of images that have "
            "near-duplicates, which the ratio misses, or images of less detail than the data's; look at them."
        )
    if result.diverged:
        sentences.append(f"{result.diverged} of the {n} samples diverged and are no copies.")
    if math.comb(n + result.units, n) <= 1 / CHANCE:
        sentences.append(f"With {n} samples and {m} reference images no number of copies could raise the alarm.")
    elif result.distinct < 10:
        sentences.append(f"The training set has only {result.distinct} distinct images: most points are near to one.")
    return " ".join(sentences)


@describe.register
def _(result: Drift, name: str = "network") -> str:
    data, samples = result.data_mean, result.sample_mean
    means = f"per-image means {samples[0]:.3g} ± {samples[1]:.2g} (data: {data[0]:.3g} ± {data[1]:.2g})."
    if result.alarm:
        parts = []
        for moment in ("mean", "variance"):
            if moment in result.far:
                z = result.far[moment]
                parts.append(f"their average {moment} lies {z:.2g} spreads of the data from the data's")
            if moment in result.outside:
                parts.append(f"the {moment}s of {result.outside[moment]:.1%} of them lie outside the data's range")
        return f"Samples drift from the data: {'; '.join(parts)}. They have {means}"
    small = " and ".join(f"{moment} by {z:.2g}" for moment, z in result.shifted.items())
    return f"Samples do not leave the data's range: {means}" + (
        f" Shifted, in spreads of the data: {small}." if small else ""
    )


@describe.register
def _(result: Likeness, name: str = "network") -> str:
    lost = f", {result.diverged} having diverged" if result.diverged else ""
    if math.isnan(result.chance):
        return f"Whether samples follow the law of the data is unknown: {result.n} are left{lost}; {LEAST} are needed."
    k, n, real = result.k, result.n, result.real
    kind, _, of = result.features.partition(" of ")
    if kind.startswith("pca:"):
        features = f"{k} principal component{'s' if k > 1 else ''}" + (f" of {of}" if of else "")
    else:
        features = f"{k} {'' if kind in ('pixels', 'standardised') else 'features '}{result.features}"
    rest = f"; the norm beyond them is {_short(result.remainder)} times theirs" if result.remainder else ""
    kernel, floor = _short(result.kernel), _short(result.kernel_floor)
    if result.frechet is None or result.frechet_floor is None:
        distances = f"kernel distance {kernel} on {features}, where {n} {real} images have {floor}{rest}"
    else:
        base = result.frechet_floor.value
        times = f"{result.frechet.value / base:.2g} times " if base > 0 else ""
        distances = (
            f"Fréchet distance {_short(result.frechet)} on {features}, {times}the {base:.3g} of {n} {real} images; "
            f"kernel distance {kernel}, theirs {floor}{rest}"
        )
    can = "can" if result.chance < CHANCE else "cannot"
    why = f" Fréchet's distance is left out: {result.why}" if result.why else ""
    out = f" {result.diverged} samples diverged and are left out." if result.diverged else ""
    return f"Samples {can} be distinguished from {real} images (chance {result.chance:.3f}): {distances}.{why}{out}"


@describe.register
def _(result: SameNoise, name: str = "network") -> str:
    share = result.nearest
    return (
        f"From the same noise, samples of two of the {result.members} members are {_bracket(result.ratio)} times as "
        f"far apart as from different noise, and correlate by {_bracket(result.correlation)}; for {share.value:.0%} "
        f"[{share.low:.0%}, {share.high:.0%}] of {result.n} starts all have the same nearest training image."
    )


@describe.register
def _(result: Agreement, name: str = "network") -> str:
    return " ".join([*_how_far(result), *_where(result)])


def _how_far(result: Agreement) -> list[str]:
    """Sentences on how far runs agree."""
    ds, levels = result.dataset, result.dataset.sizes["t"]
    who = f"{ds.members} checkpoints" + (f" in {ds.trainings} groups" if ds.trainings < ds.members else "")
    on = ds.sel(place="data")
    first, last = ({end: float(on["V_over_bias" + end][k]) for end in ("", "_low", "_high")} for k in (0, levels - 1))
    ends = " and ".join(
        f"{e['']:.2g} [{e['_low']:.2g}, {e['_high']:.2g}] at t = {float(on.t[k]):.3g}"
        for e, k in ((first, 0), (last, levels - 1))
    )
    more, less = int((ds.contrast_low > 1).sum()), int((ds.contrast_high < 1).sum())
    words = [
        f"On noisy training images the variance of {who} is {ends} times their common squared error.",
        f"Between neighbouring images V is {_range(ds, 'contrast')} times as large as on them: significantly larger at "
        f"{more}, smaller at {less} of {levels} levels (each by its own 95 % interval).",
    ]
    if "kurtosis" in ds:
        few = f"; {ds.members} members estimate these poorly" if ds.members < 10 else ""
        words.append(
            f"Skewness over members is {_range(ds, 'skewness')}, excess kurtosis {_range(ds, 'kurtosis')}{few}."
        )
    else:
        words.append("Skewness and kurtosis over members need four independent ones or more.")
    if "between_groups" in ds:
        share = _range(ds, "between_groups")
        words.append(f"Of the variance, {share} lies between groups; errors count {ds.trainings} groups.")
    words.append(f"All intervals are over places, for these {ds.members} checkpoints: other runs may differ by more.")
    return words + ([] if result.same is None else [describe(result.same)])


def _where(result: Agreement) -> list[str]:
    """Sentences on where runs differ."""
    ds, follows = result.dataset, result.follows
    if not follows:
        return ["C is nowhere as large as float32 resolves: at these levels the theory predicts nothing about V."]
    known, against = ds.where(ds.verdict.notnull()), int((ds.verdict < 0).sum())
    own = {place: [found for (where, _), found in follows.items() if where == place] for place in PLACES}
    counts = ", ".join(f"{place} {sum(found)} of {len(found)}" for place, found in own.items())
    words = [
        f"Over places V follows C significantly at {sum(follows.values())} of {len(follows)} levels where C is "
        f"resolved (5 %, corrected by Holm): {counts}; it opposes C at {against}. Ranks correlate by "
        f"{_range(known, 'rank')}.",
        f"Over the pixels of an image V correlates with C by {_range(known, 'rank_coordinates')}; less its correlation "
        f"with the C of other images, by {_range(known, 'rank_specific')}, positive at "
        f"{int((known.rank_specific_low > 0).sum())} of {int(known.rank_specific.notnull().sum())} (each by its own "
        "95 % interval).",
        f"There tr V is {_range(known, 'V_over_C')} times tr C.",
    ]
    if "rank_without" in ds:
        low, high = (float(end) for end in (known.rank_without.min(), known.rank_without.max()))
        words.append(f"Without one or another training these ranks lie within {low:.2f} … {high:.2f}.")
    return words


# --- verdicts ---------------------------------------------------------------------------------------------------------


def verdicts(audit: Audit) -> list[Verdict]:
    """Return all verdicts, network by network, in the order of ``QUESTIONS``."""
    out = [v for network in audit.networks for v in _of_network(network)]
    if (found := audit.agreement) is not None:
        same = "unknown" if found.same is None else f"same-noise distance {_interval(found.same.ratio)}"
        out.append(Verdict("", "agreement", "note", same, " ".join(_how_far(found))))
        hits, known = sum(found.follows.values()), len(found.follows)
        answer = f"at {hits} of {known} places and levels" if known else "C is not resolved at these levels"
        out.append(Verdict("", "variance", "note" if known else "unknown", answer, " ".join(_where(found))))
    return out


def _of_network(n: NetworkAudit) -> list[Verdict]:
    read, words = n.conventions, describe(n.conventions, n.name)
    if read.untrained:
        known = Verdict(n.name, "conventions", "unknown", "cannot be determined", words)
        return [known, Verdict(n.name, "training", "alarm", "untrained", words)]
    if not read.fits:
        return [Verdict(n.name, "conventions", "alarm", "no, another fits better", words)]
    out = [Verdict(n.name, "conventions", "good", "yes", words)]
    if n.failure:
        return [*out, Verdict(n.name, "training", "unknown", "cannot be audited", n.failure)]
    assert n.skill is not None
    assert n.blind is not None
    assert n.levels is not None
    under, seen = n.skill.under, n.blind
    answer = f"{'under-trained' if under else 'yes'}, skill {_interval(n.skill.skill)}"
    out.append(Verdict(n.name, "training", "alarm" if under else "good", answer, describe(n.skill, n.name)))
    out.append(_copies(n))
    if n.membership is not None:
        alarm = n.membership.chance < CHANCE
        answer = f"{'yes' if alarm else 'no'}, AUC {_interval(n.membership.auc)}"
        words = describe(n.membership) + _gap(n.levels)
        out.append(Verdict(n.name, "membership", "alarm" if alarm else "good", answer, words))
    answer = f"yes: {', '.join(seen.changes)}" if seen.alarm else "no"
    out.append(Verdict(n.name, "blindness", "alarm" if seen.alarm else "good", answer, describe(seen, n.name)))
    return [*out, _drift(n), _likeness(n), _deviation(n.name, n.levels)]


def _copies(n: NetworkAudit) -> Verdict:
    """The sampler that copies most decides; drifted samples are compared without brightness and contrast."""
    kind, s = max(n.samples.items(), key=lambda item: item[1].comparison.fraction.value)
    held, how = s.comparison, f" Sampler: {SAMPLERS[kind]}, {s.steps} steps."
    count = len(s.images)
    if held.diverged > LOST * count:
        words = f"{held.diverged} of {count} samples diverged; the rest allows no verdict on copies.{how}"
        return Verdict(n.name, "copies", "unknown", "cannot be determined", words)
    level = "alarm" if held.alarm else "note" if held.closer_chance < CHANCE else "good"
    share = f"{_percent(held.fraction.value)} ({_percent(held.fraction.low)} to {_percent(held.fraction.high)})"
    own = held.authentic
    authentic = (
        " Authentic (AuthPct: farther from their nearest training image than that is from its own): "
        f"{_percent(own.value)} ({_percent(own.low)} to {_percent(own.high)}), of real images "
        f"{_percent(held.reference_authentic.value)}."
    )
    aside = ""
    if held is s.standardised:
        aside = " Brightness and contrast of the samples have drifted: images were compared without them."
    answer = f"{'yes' if held.alarm else 'no'}, {share}"
    return Verdict(n.name, "copies", level, answer, describe(held) + authentic + aside + how)


def _gap(ds: xarray.Dataset) -> str:
    """At which levels test images are denoised worse than training images."""
    larger, levels = (ds.gap_low > 0).values, ds.sizes["t"]
    if not larger.any():
        return f" At none of {levels} noise levels is the error on test images significantly larger."
    times = (ds.test / ds.train).values
    most = int(times.argmax())
    return (
        f" At {int(larger.sum())} of {levels} noise levels the error on test images is significantly larger, "
        f"{times[most]:.3g} times as large at most (at σ/α = {float(ds.ratio[most]):.2g})."
    )


def _drift(n: NetworkAudit) -> Verdict:
    """An alarm if both samplers drift; if one alone does, its coarse steps may be the cause."""
    kind, s = max(n.samples.items(), key=lambda item: (item[1].drift.alarm, abs(_finite(item[1].drift.mean.value))))
    level = "alarm" if all(one.drift.alarm for one in n.samples.values()) else "note" if s.drift.alarm else "good"
    how = f" Sampler: {SAMPLERS[kind]}, {s.steps} steps{'; the other does not drift' if level == 'note' else ''}."
    if not math.isfinite(s.drift.mean.value):
        words = f"Samples leave the data's range: {s.copies.diverged} of {len(s.images)} diverged.{how}"
        return Verdict(n.name, "drift", level, "yes, they diverge", words)
    far = max((s.drift.mean, s.drift.variance), key=lambda e: abs(_finite(e.value)))
    what = "mean" if far is s.drift.mean else "variance"
    answer = f"{'yes' if s.drift.alarm else 'no'}, {what} off by {far.value:.2g} spreads"
    return Verdict(n.name, "drift", level, answer, describe(s.drift) + how)


def _likeness(n: NetworkAudit) -> Verdict:
    kind, s = min(n.samples.items(), key=lambda item: _finite(item[1].likeness.kernel.value))
    held, words = s.likeness, f"{describe(s.likeness)} Sampler: {SAMPLERS[kind]}, the better of two."
    if not math.isfinite(held.kernel.value):
        return Verdict(n.name, "likeness", "unknown", "cannot be determined", words)
    if held.frechet is not None and held.frechet_floor is not None:
        answer = f"Fréchet {held.frechet.value:.3g}, of real images {held.frechet_floor.value:.3g}"
    else:
        answer = f"kernel distance {held.kernel.value:.2g}, of real images {held.kernel_floor.value:.2g}"
    return Verdict(n.name, "likeness", "note" if held.alarm else "good", answer, words)


def _deviation(name: str, ds: xarray.Dataset) -> Verdict:
    most = int((ds.distance / ds.train).values.argmax())
    at = float(ds.ratio[most])
    words = (
        f"Its score is farthest from the ideal (memorising) one at σ/α = {at:.2g}: squared distance "
        f"{float(ds.distance[most]):.2g} ({float(ds.distance_low[most]):.2g} to {float(ds.distance_high[most]):.2g}) a "
        f"coordinate in units of the noise, {float(ds.distance[most] / ds.train[most]):.2g} of its squared error there."
    )
    answer = f"at σ/α = {at:.2g}"
    if ds.rayleigh.notnull().any():
        peak = int(ds.rayleigh.fillna(-1).values.argmax())
        words += (
            f" The deviation lies along the target noise (Rayleigh quotient above 1) most at σ/α = "
            f"{float(ds.ratio[peak]):.2g}: {float(ds.rayleigh[peak]):.3g} ({float(ds.rayleigh_low[peak]):.3g} to "
            f"{float(ds.rayleigh_high[peak]):.3g})."
        )
        answer += f", Rayleigh {float(ds.rayleigh[peak]):.3g}"
    return Verdict(name, "deviation", "note", answer, words)


# --- advice -----------------------------------------------------------------------------------------------------------


def advice(audit: Audit) -> list[Advice]:
    """Return what to change, the surest first; the texts stand in ``templates/advice.toml``."""
    texts = tomllib.loads((resources.files("vkernel.reports") / "templates" / "advice.toml").read_text("utf-8"))
    alarms = [v for v in verdicts(audit) if v.level == "alarm"]
    names = {q: tuple(v.network for v in alarms if v.question == q) for q in QUESTIONS}
    out: list[Advice] = []

    def add(key: str, networks: tuple[str, ...], measured: bool = False, **numbers: object) -> None:
        text = texts[key]
        change, evidence = (text[part].format(**numbers) for part in ("change", "evidence"))
        out.append(Advice(change, evidence, "measured" if measured else text["sure"], networks))

    if named := names["conventions"]:
        add("conventions", named, words=next(v.words for v in alarms if v.question == "conventions"))
    if named := names["blindness"]:
        drifted = " Its samples drift along what it cannot see." if {*named} & {*names["drift"]} else ""
        add("blindness", named, drifted=drifted)
    if named := names["training"]:
        found = {n.name: n.skill for n in audit.networks}
        known = ", ".join(f"{n}: {s.skill.value:.2f}" for n in named if (s := found[n]) is not None)
        trivial = "It does not beat a trivial predictor."
        add("training", named, skills=f"Skill over a linear denoiser, {known}." if known else trivial)
    if named := names["copies"]:
        facts, memory, n = audit.statistics, _memory(audit, named), audit.data.n
        if facts is not None and facts.repeated:
            held = [s.comparison for net in audit.networks if net.name in named for s in net.samples.values()]
            sources = {i for c in held for i in c.index[c.ratio < c.threshold][:, 0].tolist()}
            count, kind = len(sources & facts.repeated), "exact or near" if facts.near else "exact"
            both = f", and {count} of the {len(sources)} images that were copied are among them" if count else ""
            add("duplicates", named, count > 0, repeated=len(facts.repeated), n=n, kind=kind, both=both)
        if facts is not None and facts.collapse is not None and facts.collapse > 2 * facts.cutoff:
            add("cutoff", named, cutoff=facts.cutoff, collapse=facts.collapse)
        add("earlier", named, bool(memory), memory=memory, n=n)
        for key in ("images", "noise", "capacity"):
            add(key, named)
    if named := tuple(n for n in names["membership"] if n not in names["copies"]):
        add("membership", named, memory=_memory(audit, named))
    if audit.agreement is not None:
        ds = audit.agreement.dataset
        share = (ds["variance"] / ds["bias"].where(ds["bias"] > 0)).sel(place="data").fillna(-1)
        most = int(share.values.argmax())
        if share[most] > LARGE:
            members = tuple(n.name for n in audit.members)
            add("average", members, ratio=float(ds.ratio[most]), members=ds.attrs["members"], share=float(share[most]))
    return sorted(out, key=lambda a: ("measured", "theory", "doubtful").index(a.sure))


def _memory(audit: Audit, names: tuple[str, ...]) -> str:
    """Where test images are denoised worse than training images, if anywhere."""
    for n in audit.networks:
        ds = n.levels
        if n.name in names and ds is not None and "gap" in ds and bool((ds.gap_low > 0).any()):
            times = (ds.test / ds.train).where(ds.gap_low > 0)
            most = int(times.fillna(-1).values.argmax())
            return (
                f"{n.name} denoises its training images better than test images: the error on these is "
                f"{float(times[most]):.3g} times as large, at σ/α = {float(ds.ratio[most]):.2g}. "
            )
    return ""


# --- numbers in sentences ---------------------------------------------------------------------------------------------


def _interval(e: Estimate) -> str:
    return f"{e.value:.2f} ({e.low:.2f} to {e.high:.2f})"


def _short(e: Estimate) -> str:
    return f"{e.value:.3g} ({e.low:.3g} to {e.high:.3g})"


def _bracket(e: Estimate) -> str:
    return f"{e.value:.2g} [{e.low:.2g}, {e.high:.2g}]"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if 0 < share < 0.995 else f"{100 * share:.0f} %"


def _range(ds: xarray.Dataset, name: str) -> str:
    return f"{float(ds[name].min()):.2g} … {float(ds[name].max()):.2g}"


def _finite(value: float) -> float:
    return float(value) if math.isfinite(value) else math.inf
