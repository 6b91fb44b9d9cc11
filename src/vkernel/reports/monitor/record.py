"""The numbers of a run: what is fixed (:class:`Setting`), and one :class:`Evaluation` for each time it was measured.

Both are written to the log as JSON and read from it; everything else (alarm, verdict, page) is computed from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from vkernel.core.estimate import Estimate
from vkernel.reports.monitor.probe import SETS, Errors, Probe

DIGITS = 6  # significant, in the log
THRESHOLD = 1 / 3  # of the ratio of distances of a copy
FIELDS = ("value", "se", "low", "high")


@dataclass(frozen=True)
class Setting:
    """What is fixed for a run. ``ratio (L,)`` are the noise levels σ/α; ``gaussian`` and ``ideal`` the errors of the
    Gaussian theory and of the ideal denoiser at each, on training and held-out images, ``normaliser`` those of the
    Gaussian theory on held-out images; ``zeros`` the errors of an output of zeros, by what it predicts.
    ``held_copies`` are copies among ``held`` held-out images; ``shift`` is the p value of the test for a shift."""

    n: int
    shape: tuple[int, ...]
    images: dict[str, int]
    samples: int
    steps: int
    seed: int
    predicts: str
    time: str
    range: tuple[float, float] | None
    process: str
    classes: int
    spread: float
    ratio: tuple[float, ...]
    gaussian: dict[str, tuple[float, ...]]
    ideal: dict[str, tuple[float, ...]]
    normaliser: tuple[float, ...]
    zeros: dict[str, float]
    gaussian_images: int
    shift: float
    held: int
    held_copies: int
    threshold: float
    data: str
    test: str

    @property
    def held_share(self) -> Estimate:
        """The share of held-out images that count as copies."""
        return Estimate.of_share(self.held_copies, max(self.held, 1))

    def to_json(self) -> dict[str, Any]:
        """Return the numbers for the log."""
        return dict(plain(asdict(self)))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Setting:
        """Read the numbers of a log."""
        given = dict(values)
        for name in ("shape", "ratio", "normaliser"):
            given[name] = tuple(given[name])
        for name in ("gaussian", "ideal"):
            given[name] = {key: tuple(v) for key, v in given[name].items()}
        given["range"] = None if given["range"] is None else tuple(given["range"])
        return cls(**given)

    def differences(self, other: Setting) -> list[str]:
        """Return the names of what differs from another setting; numbers may differ by rounding."""
        mine, theirs = self.to_json(), other.to_json()
        return [name for name, value in mine.items() if name not in COMPUTED and value != theirs[name]]


COMPUTED = ("gaussian", "ideal", "zeros", "normaliser", "shift", "held_copies", "spread", "ratio", "gaussian_images")


@dataclass(frozen=True)
class Drawn:
    """Samples beside the training set: ``ratio (N,)`` of distances to the two nearest training images (NaN if it
    diverged), ``index (N,)`` of the nearest, and the file that shows the closest."""

    ratio: Tensor = field(repr=False)
    index: Tensor = field(repr=False)
    picture: str = ""

    def copies(self, threshold: float) -> Estimate:
        """Estimate the share of samples that are copies."""
        return Estimate.of_share(int((self.ratio < threshold).sum()), len(self.ratio))

    def quantile(self, j: int) -> float:
        """Return the j-th smallest ratio."""
        return float(self.ratio.nan_to_num(1.0).sort().values[j - 1])


@dataclass(frozen=True)
class Evaluation:
    """The numbers of one evaluation. ``images`` are errors of images relative to the Gaussian theory's ``(I,)``, by set
    ("train", "test"); ``levels``, ``ideal`` and ``gaussian`` hold errors and distances from m and D_G at each noise
    level. ``wall`` and ``spent`` are the seconds of the run and of all its evaluations so far, ``cost`` those of this
    one (errors, samples). ``weights`` are those that were evaluated, "network" or "ema"."""

    step: int
    images: dict[str, Tensor] = field(repr=False)
    levels: dict[str, Estimate[Tensor]] = field(repr=False)
    ideal: dict[str, Estimate[Tensor]] = field(repr=False)
    gaussian: dict[str, Estimate[Tensor]] = field(repr=False)
    readings: dict[str, float] = field(repr=False)
    drawn: Drawn | None
    weights: str
    wall: float
    spent: float
    cost: tuple[float, float]

    @property
    def finite(self) -> bool:
        """Whether all errors are finite."""
        return all(bool(e.isfinite().all()) for e in self.images.values())

    @property
    def train(self) -> Estimate:
        """The error on training images, relative to the Gaussian theory's on held-out ones."""
        return Estimate.of_mean(self.images["train"])

    @property
    def test(self) -> Estimate:
        """The error on held-out images, relative to the Gaussian theory's on them."""
        return Estimate.of_mean(self.images["test"])

    @classmethod
    def of(
        cls,
        step: int,
        errors: Errors,
        drawn: Drawn | None,
        weights: str,
        wall: float,
        spent: float,
        cost: tuple[float, float],
    ) -> Evaluation:
        """Return the record of measured errors and samples."""
        found = errors.images, errors.levels, errors.ideal, errors.gaussian, errors.readings
        return cls(step, *found, drawn, weights, wall, spent, cost)

    def to_json(self) -> dict[str, Any]:
        """Return the numbers for the log; what is not finite is null."""
        values = {name: getattr(self, name) for name in ("step", "weights", "wall", "spent", "cost", "images")}
        values |= {"readings": self.readings}
        for name in ("levels", "ideal", "gaussian"):
            held: dict[str, Estimate[Tensor]] = getattr(self, name)
            values[name] = {key: dict(zip(FIELDS, e.fields, strict=True)) for key, e in held.items()}
        if self.drawn is not None:
            values["drawn"] = {name: getattr(self.drawn, name) for name in ("ratio", "index", "picture")}
        return dict(plain(values))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Evaluation:
        """Read the numbers of a log."""
        levels, ideal, gaussian = (
            {str(key): Estimate(*(_tensor(e[f]) for f in FIELDS)) for key, e in values[name].items()}
            for name in ("levels", "ideal", "gaussian")
        )
        images = {key: _tensor(values["images"][key]) for key in SETS}
        readings = {str(k): math.nan if v is None else float(v) for k, v in values["readings"].items()}
        drawn = None
        if held := values.get("drawn"):
            index = torch.tensor(held["index"], dtype=torch.long)
            drawn = Drawn(_tensor(held["ratio"]), index, str(held["picture"]))
        (errors, samples), step = values["cost"], int(values["step"])
        times = float(values["wall"]), float(values["spent"]), (float(errors), float(samples))
        return cls(step, images, levels, ideal, gaussian, readings, drawn, str(values["weights"]), *times)


def setting(
    probe: Probe, predicts: str, time: str, range: tuple[float, float] | None, sets: tuple[str, str]
) -> Setting:
    """Return what is fixed by a probe and the conventions of a network; ``sets`` are fingerprints of the data."""
    ratios = probe.held_ratios
    classes = 0 if probe.sets["train"].labels is None else int(probe.sets["train"].labels.max()) + 1
    rounded = {
        kind: {k: tuple(v) for k, v in getattr(probe, f"{kind}_errors").items()} for kind in ("gaussian", "ideal")
    }
    return Setting(
        n=probe.data.n,
        shape=tuple(probe.shape),
        images={name: len(images) for name, images in probe.sets.items()},
        samples=probe.count,
        steps=probe.steps,
        seed=probe.seed,
        predicts=predicts,
        time=time,
        range=range,
        process=repr(probe.process),
        classes=classes,
        spread=probe.size,
        ratio=tuple(probe.ratio.tolist()),
        gaussian=rounded["gaussian"],
        ideal=rounded["ideal"],
        normaliser=tuple(probe.normaliser.tolist()),
        zeros=probe.zeros(predicts),
        gaussian_images=probe.gaussian_images,
        shift=probe.shift,
        held=len(ratios),
        held_copies=int((ratios < THRESHOLD).sum()),
        threshold=THRESHOLD,
        data=sets[0],
        test=sets[1],
    )


def plain(value: Any) -> Any:
    """Return values as JSON has them: lists, and numbers of some digits, null where they are not finite."""
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value


def _tensor(values: list[float | None]) -> Tensor:
    return torch.tensor([math.nan if v is None else v for v in values], dtype=torch.float64)
