"""An audit told to people: sentences, one screen for the terminal, and one self-contained page."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from vkernel import plots
from vkernel.reports import html as pages
from vkernel.reports.audit.findings import Audit, Finding, Sampled
from vkernel.reports.audit.verdicts import QUESTIONS, Verdict
from vkernel.reports.html import Picture, picture

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["page", "screen", "sentences"]

SHOWN = 12  # samples of each sampler, and of members from the same noise
PAIRED = 12  # samples beside their nearest training images
POINTS = 2000  # training images whose moments are drawn
_COLOURS = {"good": "green", "alarm": "bold red", "note": "yellow", "unknown": "magenta"}
RELIT = "Brightness and contrast have drifted: samples are shown relit, with those of the training images."
SAMPLERS = {"ode": "probability flow", "ancestral": "ancestral"}


def sentences(audit: Audit) -> list[str]:
    """What was found, in plain words: first what was compared, then every verdict, then the advice."""
    out = [compared(audit), *audit.notes]
    out += [f"{v.network + ': ' if v.network else ''}{QUESTIONS[v.question]} {v.words}" for v in audit.verdicts]
    return out + [f"Advice ({a.sure}): {a.change} {a.evidence}" for a in audit.advice]


def compared(audit: Audit) -> str:
    """What was audited against what."""
    held = f" and {audit.test.n:,} test images" if audit.test is not None else " (no test set: errors lack a yardstick)"
    names = ", ".join(f.name for f in audit.findings)
    return f"{names}, against {audit.data.n:,} training images{held}; features: {audit.features}."


def screen(audit: Audit) -> Group:
    """For the terminal: a table of short answers, and the words of what raised an alarm."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    several = len(audit.findings) > 1
    table = Table(title_justify="left", pad_edge=False)
    table.add_column("question")
    for f in audit.findings:
        table.add_column(Text(f.name), overflow="fold")  # a name is no markup
    by = {(v.network, v.question): v for v in audit.verdicts}
    for question, words in QUESTIONS.items():
        cells = [by.get((f.name, question)) for f in audit.findings]
        if any(cells):
            answers = [Text("–") if v is None else Text(v.answer, _COLOURS[v.level]) for v in cells]
            table.add_row(question if several else words, *answers)
    lines: list[Any] = [Text(compared(audit)), table, *map(Text, audit.notes)]
    for v in _of(audit, ""):
        told = (f"{QUESTIONS[v.question]} ", "bold"), (f"{v.answer}. ", _COLOURS[v.level]), _brief(v.words)
        lines.append(Text.assemble(*told))
    said: set[str] = set()
    for v in audit.verdicts:
        if v.level == "alarm" or (v.question == "copies" and not several):
            if v.question not in said:  # of several networks with the same alarm the first speaks
                lines.append(
                    Text.assemble((f"{v.question}: ", _COLOURS[v.level]), _brief(v.words) if several else v.words)
                )
            said.add(v.question)
    for a in audit.advice[:3]:
        lines.append(Text.assemble((f"advice ({a.sure}): ", "bold"), a.change))
    return Group(*lines)


def _brief(words: str) -> str:
    """The first sentence."""
    return re.split(r"(?<=[a-z%)\]])\. (?=[A-Z])", words)[0].rstrip(".") + "."


def page(audit: Audit) -> str:
    """The HTML report."""
    names = ", ".join(f.name for f in audit.findings)
    return pages.page(
        "audit.html",
        title=f"Audit of {names}",
        audit=audit,
        compared=compared(audit),
        questions=QUESTIONS,
        threshold=audit.threshold,
        verdicts=audit.verdicts,
        advice=audit.advice,
        networks=[
            {"name": f.name, "facts": _facts(f), "verdicts": _of(audit, f.name), "figures": _figures(audit, f)}
            for f in audit.findings
        ],
        together={"verdicts": _of(audit, ""), "figures": _together(audit)},
    )


def _of(audit: Audit, name: str) -> list[Verdict]:
    return [v for v in audit.verdicts if v.network == name]


def _facts(f: Finding) -> dict[str, str]:
    net = f.net
    facts = {
        "prediction": net.prediction,
        "time": net.time if isinstance(net.time, str) else "a function of t",
        "pixel range": f"[{net.range[0]:g}, {net.range[1]:g}]",
        "process": repr(net.process),
    }
    if net.label is not None:
        facts["class"] = str(net.label)
    return facts | ({"assumed": " ".join(net.notes)} if net.notes else {})


def _figures(audit: Audit, f: Finding) -> list[Picture]:
    if f.levels is None:
        return []
    out = [*_errors(f), *_copies(audit, f), *_pictures(audit, f), *_losses(f), *_changes(audit, f)]
    return out


def _errors(f: Finding) -> list[Picture]:
    assert f.levels is not None
    ds = f.levels
    linear = None
    if f.skill is not None:
        t = torch.tensor(f.skill.t, dtype=torch.float64)
        ratio = f.net.process.sigma(t) / f.net.process.alpha(t)
        linear = (ratio.tolist(), f.skill.linear.value.tolist())
    return [
        picture(
            "Errors by noise level",
            "Squared error of the predicted noise per pixel, with 95 % bands, of the network and of the ideal score, "
            "which remembers the training images; and of the best linear denoiser. A network that memorises nears the "
            "ideal on training images and leaves the curve of test images behind; more images would narrow the bands.",
            lambda: plots.denoising_errors(ds, linear),
        ),
        picture(
            "Distance from the ideal score",
            "Where the network departs from the score that copies, and along which directions: a Rayleigh quotient of "
            "1 is indifferent to the covariance C of the training targets, more lies along their noise, as the theory "
            "expects of generalisation through variance. Gaps: C vanishes there.",
            lambda: plots.score_deviation(ds),
        ),
    ]


def _copies(audit: Audit, f: Finding) -> list[Picture]:
    held = {SAMPLERS[kind]: s.judged for kind, s in f.samples.items()}
    first = next(iter(held.values()))
    curves = {name: (c.curve.value, c.curve.low, c.curve.high) for name, c in held.items()}
    own = first.reference_curve
    known = {name: c.ratio for name, c in held.items() if c.ratio.isfinite().any()}  # not all of them diverged
    ratios = known | {first.reference_kind: first.reference_ratio}
    aside = (
        " (without brightness and contrast, which have drifted)"
        if any(s.standardised for s in f.samples.values())
        else ""
    )
    return [
        picture(
            "Nearest and second-nearest training image",
            f"The ratio of both distances{aside}: small for copies, near 1 for what lies between images. Left of the "
            "line a sample counts as a copy. The same is shown for real images that the network cannot have copied.",
            lambda: plots.neighbour_ratios(ratios, first.threshold, first.reference_kind),
        ),
        picture(
            "Share of copies, for every threshold",
            "If the curve of the samples lies above that of real images, the network copies more than chance does.",
            lambda: plots.copy_curve(
                first.thresholds,
                curves | {first.reference_kind: (own.value, own.low, own.high)},
                first.threshold,
                first.reference_kind,
            ),
        ),
    ]


def is_image(shape: tuple[int, ...]) -> bool:
    """Whether points of this shape can be shown as pictures."""
    return len(shape) == 2 or (len(shape) == 3 and shape[0] in (1, 3))


def _pictures(audit: Audit, f: Finding) -> list[Picture]:
    if not is_image(audit.data.shape):
        return []
    data = f.net.scaled(audit.data)
    out = []
    for kind, s in f.samples.items():
        held = s.judged
        worst = [k for k in held.worst(PAIRED).tolist() if held.index[k, 0] >= 0]
        if worst:
            out.append(_beside(kind, s, worst, data, f.net.range))
    rows = {SAMPLERS[kind]: _seen(s.images[:SHOWN]) for kind, s in f.samples.items()}
    caption = "The first samples, not chosen; both samplers start from the same noise."
    typical = data.images(torch.arange(min(data.n, POINTS))).float().cpu()
    for kind, s in f.samples.items():
        if s.standardised is not None:  # in the data's range nothing would be seen of them
            rows[f"{SAMPLERS[kind]}, relit"] = _relit(_seen(s.images[:SHOWN]), typical)
            caption += f" {RELIT}" if RELIT not in caption else ""
    out.append(picture("Samples", caption, lambda: plots.sample_rows(rows, f.net.range)))
    return out


def _beside(kind: str, s: Sampled, worst: list[int], data: Any, limits: tuple[float, float]) -> Picture:
    held = s.judged
    sources = data.images(held.index[worst, 0]).float()
    titles = [f"{held.ratio[k]:.2f}" + (" copy" if held.ratio[k] < held.threshold else "") for k in worst]
    count = int((held.ratio < held.threshold).sum())
    shown, aside = _seen(s.images[worst]), ""
    if held is s.standardised:
        shown, aside = (
            torch.cat([_relit(a[None], b[None]) for a, b in zip(shown, sources.cpu(), strict=True)]),
            f" {RELIT}",
        )
    return picture(
        f"Copies beside their sources ({SAMPLERS[kind]})" if count else f"Samples most like copies ({SAMPLERS[kind]})",
        f"The samples with the smallest ratio, above, and their nearest training images, below; titles are the ratio. "
        f"{count} of {len(s.images)} samples count as copies.{aside}",
        lambda: plots.sources(shown, sources, titles, limits),
    )


def _relit(images: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Images with the mean and the contrast of others; a flat one stays flat."""
    rows = images.flatten(1)
    spread = rows.std(1, correction=0, keepdim=True)
    light = like.mean() + (rows - rows.mean(1, keepdim=True)) / spread.clamp_min(1e-12) * like.std(correction=0)
    return light.reshape(images.shape)


def _seen(images: torch.Tensor) -> torch.Tensor:
    return images.detach().float().cpu().nan_to_num(0.0, 0.0, 0.0)


def _losses(f: Finding) -> list[Picture]:
    found = f.membership
    if found is None:
        return []
    ratio = (f.net.process.sigma(found.t) / f.net.process.alpha(found.t)).tolist()
    level = found.by_level
    return [
        picture(
            "Losses of training and test images",
            "Left: the loss of each image, averaged over noise levels. Right: how often a training image has the lower "
            "loss, at each level; .5 is chance. Test images from another source than the training set would be told "
            "apart without any memory.",
            lambda: plots.membership_losses(
                found.train.mean(0), found.test.mean(0), found.t, level.value, level.low, level.high, ratio
            ),
        )
    ]


def _changes(audit: Audit, f: Finding) -> list[Picture]:
    out = []
    if f.blind is not None:
        ds = f.blind.to_dataset()
        out.append(
            picture(
                "What the network sees",
                "How its output answers when an image is made brighter, stronger or is moved by a pixel, in units of "
                "what a linear denoiser would do. Below the line it is blind.",
                lambda: plots.responses(ds),
            )
        )
    data = f.net.scaled(audit.data)
    some = torch.randperm(data.n, generator=torch.Generator().manual_seed(audit.seed))[:POINTS]
    moments = {SAMPLERS[kind]: _moments(s.images) for kind, s in f.samples.items()}
    own = _moments(data.take(some))
    out.append(
        picture(
            "Brightness and contrast of samples",
            "Mean and variance of the pixels of each image. Samples outside the cloud of training images have drifted.",
            lambda: plots.image_moments(moments, own),
        )
    )
    return out


def _moments(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = images.detach().double().flatten(1).cpu()
    rows = rows[rows.isfinite().all(1)]
    mean = rows.mean(1)
    return mean, (rows - mean[:, None]).square().mean(1)


def _together(audit: Audit) -> list[Picture]:
    if audit.agreement is None:
        return []
    ds = audit.agreement.dataset
    out = [
        picture(
            "Variance between runs, and where it lives",
            "Squared disagreement of the runs and their common error, at noisy training images, between neighbouring "
            "images and along sampling paths; and the rank correlation of their variance V with the covariance C of "
            "the training targets, over places and over the pixels of an image. The theory expects positive "
            "correlations. Intervals are over places, for these runs.",
            lambda: plots.agreement_curves(ds),
        )
    ]
    members = audit.members
    if is_image(audit.data.shape):
        rows = {f.name: _seen(f.samples["ode"].images[:SHOWN]) for f in members}
        limits = members[0].net.range
        out.append(
            picture(
                "The same noise, other runs",
                "Each column starts from the same noise and follows the probability flow of each run. Runs that agree "
                "make the same image of it.",
                lambda: plots.sample_rows(rows, limits),
            )
        )
    return out
