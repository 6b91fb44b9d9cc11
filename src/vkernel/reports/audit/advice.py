"""What the theory suggests changing, given the audit and the profile: each with its evidence and how sure that is.

Three degrees: ``measured`` (this audit shows the effect on this network), ``theory`` (it follows where the theory was
tested against trained ensembles, docs/theory.md) and ``doubtful`` (the theory and experience disagree, or nobody has
measured it at this size). Advice is given only where a verdict calls for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from vkernel.reports.audit.findings import Audit, Finding
from vkernel.reports.audit.verdicts import Verdict, verdicts

__all__ = ["Advice", "advice"]

LARGE = 0.5  # of the common error: a variance between runs that is worth mending


@dataclass(frozen=True)
class Advice:
    """A change, the evidence for it, and how sure that is (``measured``, ``theory`` or ``doubtful``)."""

    change: str
    evidence: str
    sure: str
    networks: tuple[str, ...] = ()


def advice(audit: Audit) -> list[Advice]:
    """What to change, the surest first."""
    found = [v for v in verdicts(audit) if v.level == "alarm"]
    named = {q: tuple(v.network for v in found if v.question == q) for q in {v.question for v in found}}
    out = [
        *_reading(found, named),
        *_seeing(named),
        *_training(audit, named),
        *_copying(audit, named),
        *_remembering(audit, named),
        *_disagreeing(audit),
    ]
    return sorted(out, key=lambda a: ("measured", "theory", "doubtful").index(a.sure))


def _reading(found: list[Verdict], named: dict[str, tuple[str, ...]]) -> list[Advice]:
    if "conventions" not in named:
        return []
    words = next(v.words for v in found if v.question == "conventions")
    return [Advice("State the convention that fits, and audit again.", words, "measured", named["conventions"])]


def _seeing(named: dict[str, tuple[str, ...]]) -> list[Advice]:
    if "blindness" not in named:
        return []
    both = set(named["blindness"]) & set(named.get("drift", ()))
    drifted = " Its samples drift along what it cannot see." if both else ""
    return [
        Advice(
            "Let the network see brightness and contrast: no normalisation over whole images before the first "
            "convolution (normalise over channels or groups inside, or give it the image's mean and norm).",
            f"Its output does not change when the image does, so that nothing pulls a sample back.{drifted} More "
            "training cannot mend it.",
            "measured",
            named["blindness"],
        )
    ]


def _training(audit: Audit, named: dict[str, tuple[str, ...]]) -> list[Advice]:
    if "training" not in named:
        return []
    found = {f.name: f for f in audit.findings}
    skills = [f"{n}: {f.skill.skill.value:.2f}" for n in named["training"] if (f := found[n]).skill is not None]
    told = f"Skill over a linear denoiser, {', '.join(skills)}." if skills else "It does not beat a trivial predictor."
    longer = Advice(
        "Train longer, or with a larger learning rate, before anything else is changed.",
        f"{told} What it samples now says little about what it would.",
        "measured",
        named["training"],
    )
    return [longer]


def _copying(audit: Audit, named: dict[str, tuple[str, ...]]) -> list[Advice]:
    if "copies" not in named:
        return []
    names = named["copies"]
    copied = [f for f in audit.findings if f.name in names]
    out = [*_duplicates(audit, copied), *_cutoff(audit, names)]
    n = audit.data.n
    out.append(
        Advice(
            "Stop training earlier, and keep the checkpoint at which the error on test images is least.",
            f"{_level_of_memory(copied)}Networks learn the law of the data first and the images themselves later, "
            f"after a time that grows with their number ({n:,} here; Bonnaire et al. 2025).",
            "measured" if audit.test is not None and _level_of_memory(copied) else "theory",
            names,
        )
    )
    out.append(
        Advice(
            "Train on more images, or augment them.",
            "The ideal score of fewer images is learned sooner: the number of training images that compete at a noise "
            "level is what smooths the target.",
            "theory",
            names,
        )
    )
    out.append(
        Advice(
            "A larger ratio of learning rate to batch size leaves more of the target's noise in the weights.",
            "V of SGD is proportional to lr/B (docs/theory.md, §9): confirmed for linear models, not for networks of "
            "this size.",
            "doubtful",
            names,
        )
    )
    out.append(
        Advice(
            "A smaller network memorises later.",
            "In practice capacity buys copies; in the theory's linear models more features per training draw *raise* "
            "the variance that moves probability between images. The two have not been reconciled.",
            "doubtful",
            names,
        )
    )
    return out


def _duplicates(audit: Audit, copied: list[Finding]) -> list[Advice]:
    if audit.ground is None or not audit.ground.repeated:
        return []
    sources: set[int] = set()
    for f in copied:
        for s in f.samples.values():
            sources |= set(s.judged.index[s.judged.ratio < s.judged.threshold][:, 0].tolist())
    both = sources & audit.ground.repeated
    kind = "exact or near" if audit.ground.near else "exact"
    told = f"{len(audit.ground.repeated):,} of {audit.data.n:,} training images have {kind} copies among themselves"
    if both:
        told += f", and {len(both)} of the {len(sources)} images that were copied are among them"
    return [
        Advice(
            "Remove duplicates from the training set (vkernel profile lists them).",
            f"{told}. Duplicates act as weights; in large image models they are what is copied first (Somepalli et al. "
            "2023), in the theory's one-dimensional models they made no measurable difference.",
            "measured" if both else "doubtful",
            tuple(f.name for f in copied),
        )
    ]


def _cutoff(audit: Audit, names: tuple[str, ...]) -> list[Advice]:
    ground = audit.ground
    if ground is None or ground.collapse is None or not ground.collapse > 2 * ground.cutoff:
        return []
    return [
        Advice(
            f"Stop sampling, or training, at a larger cutoff: σ/α between {ground.cutoff:.2g} (now) and "
            f"{ground.collapse:.2g}.",
            f"Below σ/α = {ground.collapse:.2g} the ideal score has chosen one training image and only copies it; "
            "above, several compete. Ending there and denoising once leaves that choice to the network.",
            "theory",
            names,
        )
    ]


def _level_of_memory(found: list[Finding]) -> str:
    """Where test images are denoised worse than training images, if anywhere."""
    for f in found:
        if f.levels is not None and "gap" in f.levels and bool((f.levels.gap_low > 0).any()):
            times = (f.levels.test / f.levels.train).where(f.levels.gap_low > 0)
            most = int(times.fillna(-1).values.argmax())
            return (
                f"{f.name} denoises its training images better than test images: there its error is "
                f"{float(times[most]):.3g} times as large, at σ/α = {float(f.levels.ratio[most]):.2g}. "
            )
    return ""


def _remembering(audit: Audit, named: dict[str, tuple[str, ...]]) -> list[Advice]:
    names = tuple(n for n in named.get("membership", ()) if n not in named.get("copies", ()))
    if not names:
        return []
    told = _level_of_memory([f for f in audit.findings if f.name in names])
    return [
        Advice(
            "Stop training earlier if membership must stay private.",
            f"{told}Samples are not copies, but the loss of an image tells whether it was trained on.",
            "measured",
            names,
        )
    ]


def _disagreeing(audit: Audit) -> list[Advice]:
    if audit.agreement is None:
        return []
    ds = audit.agreement.dataset
    share = (ds["variance"] / ds["bias"].where(ds["bias"] > 0)).sel(place="data")
    if not bool((share > LARGE).any()):
        return []
    most = int(share.fillna(-1).values.argmax())
    return [
        Advice(
            "Average the scores of the runs (or their weights along one run, EMA): it removes their variance.",
            f"At σ/α = {float(ds.ratio[most]):.2g} the variance between {ds.attrs['members']} runs is "
            f"{float(share[most]):.2g} times their common squared error. By the theory that variance also moves "
            "probability between training images: an average memorises more.",
            "measured",
            tuple(f.name for f in audit.members),
        )
    ]
