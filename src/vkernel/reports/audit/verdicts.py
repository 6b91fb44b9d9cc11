r"""A verdict for each question, in plain words and with its uncertainty.

A verdict has a level: ``good``, ``alarm``, ``note`` (a number without a threshold) or ``unknown``. Alarms are raised at
a stated chance of a false one, for each network and sampler: copies .01 (Fisher's exact test against real images),
membership .01 (one-sided, the rank sum under exchange of the sets, of variance (n+m+1)/(12nm)), drift .01 for each of
its four tests and a least size, blindness by intervals below a threshold. "Under-trained" and "blind" are conventions,
stated in :mod:`~vkernel.reports.audit.skill` and :mod:`~vkernel.reports.audit.blind`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from vkernel.core.estimate import Estimate
from vkernel.reports.audit.findings import Audit, Finding
from vkernel.reports.audit.membership import Membership

__all__ = ["QUESTIONS", "Verdict", "verdicts"]

CHANCE = 0.01  # of a false alarm
LOST = 0.5  # of the samples diverged: nothing can be said of the rest
QUESTIONS = {
    "conventions": "Is it read as it was meant?",
    "training": "Is it trained?",
    "copies": "Are its samples copies of training images?",
    "membership": "Do its errors give training images away?",
    "blindness": "Is it blind to a change of the image?",
    "drift": "Do its samples leave the data's range?",
    "likeness": "Do its samples follow the law of the data?",
    "deviation": "Where does it part from the ideal score?",
    "agreement": "Would another run have given the same?",
    "variance": "Does the variance of runs live where the theory says?",
}


@dataclass(frozen=True)
class Verdict:
    """The answer to one question; ``network`` is empty for those that all networks answer together."""

    network: str
    question: str
    level: str
    answer: str
    words: str


def verdicts(audit: Audit) -> list[Verdict]:
    """All verdicts, network by network, in the order of ``QUESTIONS``."""
    out = [v for finding in audit.findings for v in _of_one(finding)]
    if audit.agreement is not None:
        found = audit.agreement
        same = "unknown" if found.same is None else f"same-noise distance {_number(found.same.ratio)}"
        out.append(Verdict("", "agreement", "note", same, _start(found.words, follows=False)))
        hits, asked = sum(found.follows.values()), len(found.follows)
        level = "unknown" if not asked else "note"
        told = f"at {hits} of {asked} places and levels" if asked else "C cannot be felt at these levels"
        out.append(Verdict("", "variance", level, told, _start(found.words, follows=True)))
    return out


def _of_one(f: Finding) -> list[Verdict]:
    name, read = f.name, f.conventions
    if not read.fits:
        level = "unknown" if read.untrained else "alarm"
        told = "cannot be told" if read.untrained else "no, another fits better"
        out = [Verdict(name, "conventions", level, told, read.words)]
        if read.untrained:
            out.append(Verdict(name, "training", "alarm", "untrained", read.words))
        return out
    out = [Verdict(name, "conventions", "good", "yes", read.words)]
    if f.failure:
        return [*out, Verdict(name, "training", "unknown", "cannot be audited", f.failure)]
    out += [_training(f), _copies(f)]
    if f.membership is not None:
        out.append(_membership(name, f.membership, f))
    return [*out, *_blind(f), _drift(f), _likeness(f), _deviation(f)]


def _training(f: Finding) -> Verdict:
    assert f.skill is not None
    told = f"{'under-trained' if f.skill.under else 'yes'}, skill {_number(f.skill.skill)}"
    return Verdict(f.name, "training", "alarm" if f.skill.under else "good", told, f.skill.words)


def _copies(f: Finding) -> Verdict:
    """The sampler that copies most speaks; what drifted is judged without brightness and contrast."""
    kind, s = max(f.samples.items(), key=lambda item: item[1].judged.fraction.value)
    held = s.judged
    n = len(s.images)
    how = f" Sampler: {_sampler(kind)}, {s.steps} steps."
    aside = ""
    if held is s.standardised:
        aside = " Brightness and contrast of the samples have drifted: images were compared without them."
    if held.diverged > LOST * n:
        words = f"{held.diverged} of {n} samples diverged; whether the rest would be copies cannot be told.{how}"
        return Verdict(f.name, "copies", "unknown", "cannot be told", words)
    share = f"{_percent(held.fraction.value)} ({_percent(held.fraction.low)} to {_percent(held.fraction.high)})"
    level = "alarm" if held.alarm else "note" if held.closer_chance < CHANCE else "good"
    told = f"{'yes' if held.alarm else 'no'}, {share}"
    own, real = held.authentic, held.reference_authentic
    authentic = (
        f" Authentic (AuthPct: farther from their nearest training image than that is from its own): "
        f"{_percent(own.value)} ({_percent(own.low)} to {_percent(own.high)}), of real images {_percent(real.value)}."
    )
    return Verdict(f.name, "copies", level, told, held.words + authentic + aside + how)


def _sampler(kind: str) -> str:
    return {"ode": "probability flow", "ancestral": "ancestral"}[kind]


def chance_of(found: Membership) -> float:
    """That sets which could be exchanged have an AUC as large as this."""
    n, m = found.train.shape[1], found.test.shape[1]
    z = (float(found.auc.value) - 0.5) / math.sqrt((n + m + 1) / (12 * n * m))
    return float(0.5 * torch.special.erfc(torch.tensor(z / math.sqrt(2), dtype=torch.float64)))


def _membership(name: str, found: Membership, f: Finding) -> Verdict:
    alarm = chance_of(found) < CHANCE
    told = f"{'yes' if alarm else 'no'}, AUC {_number(found.auc)}"
    return Verdict(name, "membership", "alarm" if alarm else "good", told, found.words + _gap(f))


def _gap(f: Finding) -> str:
    """At which levels test images are denoised worse than training images."""
    assert f.levels is not None
    ds = f.levels
    surer = (ds.gap_low > 0).values
    if not surer.any():
        return f" At none of {ds.sizes['t']} noise levels is the error on test images larger beyond doubt."
    times = (ds.test / ds.train).values
    most = int(times.argmax())
    return (
        f" At {int(surer.sum())} of {ds.sizes['t']} noise levels the error on test images is larger beyond doubt, "
        f"{times[most]:.3g} times as large at most (at σ/α = {float(ds.ratio[most]):.2g})."
    )


def _blind(f: Finding) -> list[Verdict]:
    if f.blind is None:
        return []
    told = [change for change, levels in f.blind.blind.items() if 2 * sum(levels) >= len(levels)]
    answer = f"yes: {', '.join(told)}" if told else "no"
    return [Verdict(f.name, "blindness", "alarm" if f.blind.alarm else "good", answer, f.blind.words)]


def _drift(f: Finding) -> Verdict:
    """An alarm if both samplers drift; if one alone does, its coarse steps may be to blame."""
    kind, s = max(f.samples.items(), key=lambda item: (item[1].drift.alarm, abs(_finite(item[1].drift.mean.value))))
    z, lost = s.drift.mean, s.copies.diverged
    level = "alarm" if all(one.drift.alarm for one in f.samples.values()) else "note" if s.drift.alarm else "good"
    how = f" Sampler: {_sampler(kind)}, {s.steps} steps{'; the other does not drift' if level == 'note' else ''}."
    if not math.isfinite(z.value):
        words = f"Samples leave the data's range: {lost} of {len(s.images)} diverged.{how}"
        return Verdict(f.name, "drift", level, "yes, they diverge", words)
    far = max((s.drift.mean, s.drift.variance), key=lambda e: abs(_finite(e.value)))
    what = "mean" if far is s.drift.mean else "variance"
    told = f"{'yes' if s.drift.alarm else 'no'}, {what} off by {far.value:.2g} spreads"
    return Verdict(f.name, "drift", level, told, s.drift.words + how)


def _likeness(f: Finding) -> Verdict:
    kind, s = min(f.samples.items(), key=lambda item: _finite(item[1].likeness.kernel.value))
    held = s.likeness
    how = f" Sampler: {_sampler(kind)}, the better of two."
    if held.frechet is not None and held.frechet_floor is not None:
        told = f"Fréchet {held.frechet.value:.3g}, of real images {held.frechet_floor.value:.3g}"
    else:
        told = f"kernel distance {held.kernel.value:.2g}, of real images {held.kernel_floor.value:.2g}"
    known = math.isfinite(held.kernel.value)
    level = "unknown" if not known else "note" if held.alarm else "good"
    return Verdict(f.name, "likeness", level, told if known else "cannot be told", held.words + how)


def _deviation(f: Finding) -> Verdict:
    assert f.levels is not None
    ds = f.levels
    most = int((ds.distance / ds.train).values.argmax())
    at = float(ds.ratio[most])
    share = float(ds.distance[most] / ds.train[most])
    words = (
        f"Its score is farthest from the ideal (memorising) one at σ/α = {at:.2g}: squared distance "
        f"{float(ds.distance[most]):.2g} ({float(ds.distance_low[most]):.2g} to {float(ds.distance_high[most]):.2g}) a "
        f"coordinate in units of the noise, {share:.2g} of its squared error there."
    )
    told = f"at σ/α = {at:.2g}"
    known = ds.rayleigh.notnull().values
    if known.any():
        peak = int(ds.rayleigh.fillna(-1).values.argmax())
        words += (
            f" The deviation lies along the target noise (Rayleigh quotient above 1) most at σ/α = "
            f"{float(ds.ratio[peak]):.2g}: {float(ds.rayleigh[peak]):.3g} ({float(ds.rayleigh_low[peak]):.3g} to "
            f"{float(ds.rayleigh_high[peak]):.3g})."
        )
        told += f", Rayleigh {float(ds.rayleigh[peak]):.3g}"
    return Verdict(f.name, "deviation", "note", told, words)


def _start(words: list[str], follows: bool) -> str:
    """The sentences on agreement, or those on where the variance lives."""
    about = [w for w in words if ("C" in w.split() or "tr C" in w or "rank" in w.lower()) is follows]
    return " ".join(about or words)


def _number(e: Estimate) -> str:
    return f"{e.value:.2f} ({e.low:.2f} to {e.high:.2f})"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"


def _finite(value: float) -> float:
    return float(value) if math.isfinite(value) else math.inf
