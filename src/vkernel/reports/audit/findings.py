"""What an audit found, of each network and of all together, and how it becomes numbers in a file.

A :class:`Finding` holds the answers to each question for one network, an :class:`Audit` the findings of all of them.
What the network could not be asked (it does not denoise, there is no test set, it is alone) is ``None`` or empty.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vkernel.adapters.checkpoint import Checkpoint
from vkernel.core.estimate import Estimate
from vkernel.core.files import write
from vkernel.data.empirical import Empirical
from vkernel.reports.audit.agreement import Agreement
from vkernel.reports.audit.blind import Blind, Drift
from vkernel.reports.audit.conventions import Conventions
from vkernel.reports.audit.copies import Copies
from vkernel.reports.audit.likeness import Likeness
from vkernel.reports.audit.membership import Membership
from vkernel.reports.audit.skill import Skill
from vkernel.reports.audit.statistics import Ground

if TYPE_CHECKING:
    import xarray

    from vkernel.reports.audit.advice import Advice
    from vkernel.reports.audit.verdicts import Verdict

__all__ = ["Audit", "Finding", "Sampled", "Sizes", "plain"]


@dataclass(frozen=True)
class Sizes:
    """How much is spent: images for each noise level, samples, steps of a sampler (``None``: all that it has), …

    ``every`` n-th of the eight noise levels is used; ``queries`` are the images on which the training set's
    collapse is found.
    """

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
    queries: int = 24

    @classmethod
    def quick(cls) -> Sizes:
        """A first look: fewer images, levels and samples, wider intervals."""
        return cls(24, 48, 1, 2, 192, 8, 8, 64, 50, 512, 24, 16)


@dataclass(frozen=True)
class Sampled:
    """Samples ``(n, *shape)`` in the network's pixel units, made by one sampler, and what they are compared with.

    ``standardised`` compares them without brightness and contrast, where these have drifted.
    """

    kind: str
    steps: int
    images: Tensor = field(repr=False)
    copies: Copies
    standardised: Copies | None
    drift: Drift
    likeness: Likeness

    @property
    def judged(self) -> Copies:
        """The comparison that counts, without brightness and contrast where these have drifted."""
        return self.standardised or self.copies


@dataclass(frozen=True)
class Finding:
    """Of one network: each answer, or ``None`` where the question could not be asked."""

    net: Checkpoint
    conventions: Conventions
    skill: Skill | None = None
    levels: xarray.Dataset | None = field(default=None, repr=False)
    membership: Membership | None = None
    blind: Blind | None = None
    samples: dict[str, Sampled] = field(default_factory=dict)
    failure: str = ""  # why it could not be asked more

    @property
    def name(self) -> str:
        return self.net.name


@dataclass(frozen=True)
class Audit:
    """The findings of each network, their agreement if there are several, and what they were compared with."""

    findings: tuple[Finding, ...]
    agreement: Agreement | None
    ground: Ground | None
    data: Empirical
    test: Empirical | None
    features: str
    threshold: float
    sizes: Sizes
    seed: int
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def verdicts(self) -> list[Verdict]:
        """One for each question and network, in plain words."""
        from vkernel.reports.audit.verdicts import verdicts

        return verdicts(self)

    @property
    def advice(self) -> list[Advice]:
        """What the theory suggests changing, with the evidence."""
        from vkernel.reports.audit.advice import advice

        return advice(self)

    @property
    def members(self) -> list[Finding]:
        """The findings of those networks that were compared with one another."""
        names = "" if self.agreement is None else f", {self.agreement.dataset.attrs['names']}, "  # they may hold commas
        return [f for f in self.findings if f", {f.name}, " in names]

    @property
    def memorised(self) -> Estimate | None:
        """The share of copies, of the network and the sampler where it is largest; ``None`` if nothing was sampled."""
        found = [s.judged.fraction for f in self.findings for s in f.samples.values()]
        return max(found, key=lambda e: e.value, default=None)

    def summary(self) -> str:
        """What was found, in sentences."""
        from vkernel.reports.audit.report import sentences

        return "\n".join(sentences(self))

    def to_dict(self) -> dict[str, Any]:
        """Everything but pictures as plain numbers, lists and dictionaries; numbers without a value are ``None``."""
        out = {
            "data": _described(self.data),
            "test": None if self.test is None else _described(self.test),
            "features": self.features,
            "threshold": self.threshold,
            "sizes": plain(self.sizes),
            "seed": self.seed,
            "seconds": self.seconds,
            "notes": list(self.notes),
            "networks": [_of_one(f) for f in self.findings],
            "agreement": None,
            "ground": self.ground and plain(self.ground) | {"repeated": sorted(self.ground.repeated)},
            "memorised": plain(self.memorised),
            "verdicts": [plain(v) for v in self.verdicts],
            "advice": [plain(a) for a in self.advice],
        }
        if self.agreement is not None:
            follows = [{"place": p, "t": t, "follows": yes} for (p, t), yes in self.agreement.follows.items()]
            out["agreement"] = {
                "curves": plain(self.agreement.dataset),
                "follows": follows,
                "words": list(self.agreement.words),
                "same_noise": plain(self.agreement.same),
            }
        return out

    def to_json(self, path: str | Path) -> Path:
        """Write :meth:`to_dict` to a file."""
        return write(path, json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")

    def to_html(self, path: str | Path) -> Path:
        """Write one self-contained page: verdicts, plots, samples, copies beside their sources."""
        from vkernel.reports.audit.report import page

        return write(path, page(self))


def _described(data: Empirical) -> dict[str, Any]:
    return {"name": data.name, "n": data.n, "shape": list(data.shape), "stored": data.stored, "scale": data.scale}


def _of_one(f: Finding) -> dict[str, Any]:
    net, told = f.net, f.net.time if isinstance(f.net.time, str) else "a function of t"
    return {
        "name": net.name,
        "prediction": net.prediction,
        "time": told,
        "range": list(net.range),
        "label": net.label,
        "process": repr(net.process),
        "notes": list(net.notes),
        "conventions": plain({k: v for k, v in _held(f.conventions).items() if k not in ("tried", "stated", "better")})
        | {"stated": str(f.conventions.stated), "better": f.conventions.better and str(f.conventions.better)},
        "skill": plain(f.skill),
        "levels": plain(f.levels),
        "membership": None if f.membership is None else plain(f.membership.to_dataset()),
        "blind": plain(f.blind),
        "samples": {kind: plain({k: v for k, v in _held(s).items() if k != "images"}) for kind, s in f.samples.items()},
    }


def _held(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in fields(value)}


def plain(value: Any) -> Any:
    """Numbers, texts, lists and dictionaries out of estimates, tensors, labelled arrays and dataclasses."""
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if hasattr(value, "data_vars"):
        held = {**value.coords, **value.data_vars}
        return {str(k): plain(v.values.tolist()) for k, v in held.items()} | {"attributes": plain(dict(value.attrs))}
    if is_dataclass(value):
        return plain(_held(value))
    if isinstance(value, Mapping):
        return {k if isinstance(k, str) else " ".join(map(str, _tuple(k))): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if hasattr(value, "item"):
        return plain(value.item())
    return str(value)


def _tuple(key: Any) -> tuple[Any, ...]:
    return key if isinstance(key, tuple) else (key,)
