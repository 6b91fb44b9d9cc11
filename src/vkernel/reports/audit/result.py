"""The result of an audit: what was measured on each network and on saved samples, and what it was compared with."""

from __future__ import annotations

import datetime
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vkernel.core import rng
from vkernel.core.estimate import Estimate
from vkernel.core.files import write, write_json
from vkernel.data import Empirical
from vkernel.metrics import collapse_ratio
from vkernel.metrics.augment import Augment
from vkernel.metrics.copies import pooled
from vkernel.reports.audit.agreement import Agreement, SameNoise
from vkernel.reports.audit.blind import Blind
from vkernel.reports.audit.classes import in_class
from vkernel.reports.audit.conventions import Conventions
from vkernel.reports.audit.decoder import Decoder, Decoding, decoder as as_decoder
from vkernel.reports.audit.levels import Membership
from vkernel.reports.audit.page import page
from vkernel.reports.audit.report import Advice, Verdict, advice, as_dict, sentences, verdicts
from vkernel.reports.audit.samples import SampleAudit, SavedAudit
from vkernel.reports.audit.skill import Skill
from vkernel.score import EmpiricalScore, Wrapped

if TYPE_CHECKING:
    import xarray

    from vkernel.reports.explain.result import Explanation
    from vkernel.reports.profile import Profile

BISECTIONS = 8  # for the collapse


@dataclass(frozen=True)
class Sizes:
    """Images for each question, samples, steps of a sampler (``None``: all), and every n-th of eight noise levels."""

    check: int = 64
    images: int = 192
    draws: int = 2
    every: int = 1
    members: int = 512
    blind: int = 16
    budget: int = 32
    samples: int = 256
    steps: int | None = 50
    reference: int = 1024
    places: int = 96
    queries: int = 24  # for the collapse

    @classmethod
    def quick(cls) -> Sizes:
        """Return sizes for a first look: fewer images, levels and samples, wider intervals."""
        return cls(24, 48, 1, 2, 192, 8, 8, 64, 50, 512, 24, 16)

    def split(self, classes: int) -> Sizes:
        """Return the sizes for each of several classes, no fewer than measurements need."""
        least = {"check": 16, "images": 16, "members": 48, "blind": 4, "budget": 4, "samples": 16, "reference": 128}
        least |= {"places": 10, "queries": 8}
        shared = {name: min(vars(self)[name], max(n, -(-vars(self)[name] // classes))) for name, n in least.items()}
        return replace(self, **shared)


@dataclass(frozen=True)
class NetworkAudit:
    """The results of one network; ``None`` or empty where ``failure`` or a missing test set ended the audit."""

    net: Wrapped
    conventions: Conventions
    skill: Skill | None = None
    levels: xarray.Dataset | None = field(default=None, repr=False)
    membership: Membership | None = None
    blind: Blind | None = None
    samples: dict[str, SampleAudit] = field(default_factory=dict, repr=False)
    failure: str = ""
    others: dict[str, Skill] = field(default_factory=dict, repr=False)  # skill on other data sets

    @property
    def name(self) -> str:
        """The name of the network."""
        return self.net.name

    @property
    def rival(self) -> str | None:
        """Another data set that the network was trained on rather than this one."""
        good = {name: s for name, s in self.others.items() if self.skill is not None and s.fits_better(self.skill)}
        return min(good, key=lambda name: good[name].far.value, default=None)

    @property
    def can_be_read(self) -> bool:
        """Whether it denoises as stated, so that its other results are not those of a misreading."""
        return self.conventions.fits and self.rival is None and not self.failure

    @property
    def doubtful(self) -> bool:
        """Whether its data, its schedule and its training cannot be told apart."""
        return not self.conventions.fits or self.skill is None or self.skill.doubtful


@dataclass(frozen=True)
class DataStatistics:
    """Facts about the training set that the advice uses."""

    cutoff: float  # σ/α at the end of sampling
    collapse: float | None  # σ/α at which the ideal score has chosen one image, E r_i(α y_i + σ z) ≥ 1/2
    repeated: frozenset[int]  # training images that have an exact copy, or near copies if a profile gives them
    near: bool

    @classmethod
    def of(cls, exact: EmpiricalScore, queries: int, seed: int) -> DataStatistics:
        """Measure them with ``queries`` images; the collapse is found by bisection on shared images and noise."""
        data, process = exact.data, exact.process
        merged, merge = data.merged()
        repeated = (merge.cpu().bincount()[merge.cpu()] > 1).nonzero().flatten().tolist()
        score = exact if merged is data else EmpiricalScore(merged, process)  # which reads all points to begin with
        source = rng.stream(seed, "images for the ground")
        index = merged.choose(queries, source).to(data.device)
        noise = rng.randn((1, len(index), *data.shape), source, data.device, data.dtype)
        ratio = float(collapse_ratio(score, index, noise, pooled=True, bisections=BISECTIONS))
        return cls(process.ratios[0], None if math.isnan(ratio) else ratio, frozenset(repeated), False)

    @classmethod
    def of_profile(cls, profile: Profile) -> DataStatistics:
        """Take them from a profile."""
        groups = [*profile.duplicates, *(group.indices for group in profile.near_duplicates)]
        process, t = profile.process, profile.collapse_time
        at = None if t is None else torch.tensor(t, dtype=torch.float64)
        collapse = None if at is None else float(process.sigma(at) / process.alpha(at))
        return cls(process.ratios[0], collapse, frozenset(i for group in groups for i in group), True)


@dataclass(frozen=True, repr=False)
class Audit:
    """The results of each network, their agreement if there are several, and what they were compared with."""

    networks: tuple[NetworkAudit, ...]
    agreement: Agreement | None
    statistics: DataStatistics | None
    data: Empirical
    test: Empirical | None
    features: str
    threshold: float
    sizes: Sizes
    seed: int
    seconds: float
    notes: tuple[str, ...] = ()
    augment: Augment = field(default_factory=Augment)
    saved: SavedAudit | None = None
    date: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"))
    command: str = "vk.audit(…)"
    across: SameNoise | None = None  # samples of networks whose schedules, time inputs or ranges differ
    decoder: Decoder | None = None
    classes: tuple[int, ...] = ()  # if each class was audited
    explanation: Explanation | None = field(default=None, repr=False)  # which theory explains the networks

    def __repr__(self) -> str:
        alarms = ", ".join(dict.fromkeys(v.question for v in self.verdicts if v.level == "alarm"))
        return f"Audit({', '.join(n.name for n in self.subjects)}; alarms: {alarms or 'none'})"

    @property
    def verdicts(self) -> list[Verdict]:
        """One verdict for each question and network."""
        return verdicts(self)

    @property
    def advice(self) -> list[Advice]:
        """Changes that the theory suggests, with the evidence."""
        return advice(self)

    @property
    def subjects(self) -> tuple[NetworkAudit | SavedAudit, ...]:
        """What was audited: networks, and saved samples."""
        return self.networks + (() if self.saved is None else (self.saved,))

    @property
    def titles(self) -> list[str]:
        """The name of each subject, without the class."""
        labels = [n.net.label if isinstance(n, NetworkAudit) and self.classes else None for n in self.subjects]
        return [n.name.removesuffix(in_class(label)) for n, label in zip(self.subjects, labels, strict=True)]

    @property
    def members(self) -> list[NetworkAudit]:
        """The networks that were compared with one another."""
        names = "" if self.agreement is None else f", {self.agreement.dataset.attrs['names']}, "  # they may hold commas
        return [n for n in self.networks if f", {n.name}, " in names]

    @property
    def memorised(self) -> Estimate | None:
        """The largest share of copies over networks and samplers; ``None`` if nothing was sampled. Whether it means
        something is a verdict: :attr:`unanswered`."""
        return max(self.copied.values(), key=lambda e: e.value, default=None)

    @property
    def copied(self) -> dict[tuple[str, str], Estimate]:
        """The share of copies by network and sampler, over all classes together."""
        found: dict[tuple[str, str], list[SampleAudit]] = {}
        for name, n in zip(self.titles, self.subjects, strict=True):
            for kind, s in n.samples.items():
                found.setdefault((name, kind), []).append(s)
        return {
            key: samples[0].comparison.fraction if len(samples) == 1 else pooled([s.comparison for s in samples])
            for key, samples in found.items()
        }

    def beside(self, other: Audit) -> Audit:
        """Return this audit of networks with the saved samples of another."""
        saved, taken = other.saved, [n.name for n in self.networks]
        if saved is not None and saved.name in taken:
            saved = replace(saved, name=f"{saved.name} (saved)")
        return replace(self, saved=saved, notes=(*self.notes, *other.notes))

    @property
    def unanswered(self) -> dict[str, str]:
        """The networks (and saved samples) of which it cannot be told whether they copy, and why."""
        names = [n.name for n in self.subjects]
        found = {v.network: v for v in self.verdicts if v.question == "copies"}
        why = {v.network: v.words for v in reversed(self.verdicts) if v.level in ("alarm", "unknown")}
        open_ = {name: why.get(name, "it was not sampled") for name in names if name not in found}
        return open_ | {name: v.words for name, v in found.items() if v.level == "unknown"}

    def summary(self) -> str:
        """Return the results in sentences."""
        return "\n".join(sentences(self))

    def to_dict(self) -> dict[str, object]:
        """Return everything but pictures as numbers, lists and dictionaries; numbers without a value are ``None``."""
        return as_dict(self)

    def to_json(self, path: str | Path) -> Path:
        """Write :meth:`to_dict` to a file."""
        return write_json(path, self.to_dict())

    def to_html(self, path: str | Path, decoder: Decoding | None = None) -> Path:
        """Write one self-contained page: verdicts, plots, samples, copies beside their sources. A ``decoder``
        (:func:`vkernel.reports.audit.decoder`) shows latents as images."""
        return write(path, page(self if decoder is None else replace(self, decoder=as_decoder(decoder))))
