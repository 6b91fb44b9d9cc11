"""The whole audit: every question, asked of every network, in the order in which the answers are needed.

Conventions come first: a network that does not denoise under them is asked nothing more, since every later number
would be of a misreading. Several networks of one process and range see the same noisy images and share one ideal score,
start from the same noise, and are compared with one another.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vkernel.adapters.checkpoint import Checkpoint
from vkernel.adapters.checkpoints import Checkpoints
from vkernel.core.errors import InputError, require
from vkernel.core.progress import Reporter
from vkernel.core.progress import progress as report_progress
from vkernel.data.empirical import Empirical
from vkernel.process import Process
from vkernel.reports.audit import sampling
from vkernel.reports.audit.agreement import Agreement, agreement
from vkernel.reports.audit.blind import blind, drift
from vkernel.reports.audit.conventions import Conventions, check
from vkernel.reports.audit.copies import Reference
from vkernel.reports.audit.extractors import Extractor, extractor
from vkernel.reports.audit.findings import Audit, Finding, Sampled, Sizes
from vkernel.reports.audit.levels import alike, levels, times_of
from vkernel.reports.audit.likeness import likeness
from vkernel.reports.audit.membership import membership
from vkernel.reports.audit.skill import skill
from vkernel.reports.audit.statistics import Ground
from vkernel.score.empirical import EmpiricalScore
from vkernel.train.ensemble import Ensemble

if TYPE_CHECKING:
    import xarray

    from vkernel.reports.profile import Profile

__all__ = ["audit"]

FEWEST = 16  # training images
SMALL = 1 << 28  # numbers of a memory map that is read at once
# Shares of the work, for the bar alone.
_CHECK, _LEVELS, _MEMBERS, _BLIND, _SAMPLES, _COMPARE, _AGREE, _GROUND = 3, 12, 5, 4, 12, 4, 16, 2


def audit(
    models: Any,
    data: Empirical | Tensor | str | Path,
    process: Process | None = None,
    test: Empirical | Tensor | str | Path | None = None,
    *,
    features: Any = "pixels",
    threshold: float = 1 / 3,
    groups: Sequence[str | int] | None = None,
    quick: bool = False,
    sizes: Sizes | None = None,
    profile: Profile | None = None,
    seed: int = 0,
    progress: bool = False,
) -> Audit:
    """Audit one or several trained networks against their training set.

    ``models``: a :class:`~vkernel.reports.audit.Checkpoint`, a diffusers folder, a score with its process (or a bare
    ``(x, t)`` callable, if ``process`` is given), an ``Ensemble``, or a list of these. ``data`` is what
    they were trained on, ``test`` images of the same law that they did not see: without them errors have no yardstick,
    and membership is not asked. ``features`` are those in which samples are compared with data: "pixels",
    "standardised", "pca:K", "file.py:function" or a function. ``groups`` names for each network the group that it
    shares something with, such as an initialisation.
    ``quick`` takes a first look; ``sizes`` sets each size. ``profile`` is what ``vk.profile`` found of the
    data, for better advice.
    """
    began = time.monotonic()
    nets = _checkpoints(models, process)
    data, test = _data(data, "training"), None if test is None else _data(test, "test")
    if data.n * data.d <= SMALL:  # the ideal score goes through the data again and again
        data = data.loaded()
    for net in nets:
        _fits(net, data, test)
    require(
        groups is None or len(groups) == len(nets), f"There are {len(nets)} networks and {len(groups or ())} groups."
    )
    require(0 < threshold <= 1, f"threshold must be a ratio in (0, 1], not {threshold!r}.")
    require((data.weights > 0).sum() >= FEWEST, f"An audit needs {FEWEST} training images or more; got {data.n}.")
    sizes = sizes or (Sizes.quick() if quick else Sizes())
    extract = extractor(features)
    each = _CHECK + _LEVELS + _MEMBERS * (test is not None) + _BLIND + 2 * (_SAMPLES + _COMPARE)
    total = len(nets) * each + _AGREE * (len(nets) > 1) + _GROUND
    with report_progress(total, progress) as step:
        asked = _Asked(data, test, extract, threshold, sizes, seed, step)
        read = [asked.conventions(net) for net in nets]
        good = [net for net, found in zip(nets, read, strict=True) if found.fits]
        curves = asked.levels(good)
        findings = tuple(asked.finding(net, found, curves) for net, found in zip(nets, read, strict=True))
        together = asked.together(findings, groups)
        ground = asked.ground(good, profile)
    told = (extract.name, threshold, sizes, seed, time.monotonic() - began)
    return Audit(findings, together, ground, data, test, *told, tuple(asked.notes))


def itself(t: Tensor) -> Tensor:
    """What a score is told; one function for all, so that scores are known to be told the same."""
    return t


def _checkpoints(models: Any, process: Process | None) -> list[Checkpoint]:
    """Whatever was given as a list of checkpoints with different names."""
    given = list(models) if isinstance(models, Sequence) and not isinstance(models, str) else [models]
    given = [one for some in given for one in (_members(some) if isinstance(some, Ensemble) else [some])]
    require(given, "There is no network to audit.")
    nets = [_checkpoint(one, process) for one in given]
    names = [net.name for net in nets]
    twice = {name for name in names if names.count(name) > 1}
    numbered = [f"{name} ({k + 1})" if name in twice else name for k, name in enumerate(names)]
    return [dataclasses.replace(net, name=name) for net, name in zip(nets, numbered, strict=True)]


def _members(ensemble: Ensemble) -> list[Checkpoint]:
    def member(m: int) -> Checkpoint:
        score: Any = ensemble[m]
        stated = ("score", itself, (-1.0, 1.0), ensemble.shape, f"member {m}")
        return Checkpoint(score, ensemble.process, *stated)

    return [member(m) for m in range(len(ensemble)) if m not in ensemble.diverged]


def _checkpoint(model: Any, process: Process | None) -> Checkpoint:
    if isinstance(model, Checkpoint):
        return model
    if isinstance(model, str | Path):
        return Checkpoint.from_diffusers(model)
    own = getattr(model, "process", None) or process
    known = callable(model) and isinstance(own, Process)
    require(
        known,
        f"A {type(model).__name__} cannot be audited alone: give a Checkpoint, a diffusers folder, or a score (x, t) "
        "with process=.",
    )
    name = getattr(model, "__name__", type(model).__name__)
    return Checkpoint(model, own, "score", itself, name=name)  # type: ignore[arg-type]


def _data(data: Any, kind: str) -> Empirical:
    if isinstance(data, Empirical):
        return data
    if isinstance(data, str | Path):
        from vkernel.data.loaders import load

        return load(data)
    try:
        return Empirical(data)
    except InputError as error:
        raise InputError(f"The {kind} data cannot be used: {error}") from error


def _fits(net: Checkpoint, data: Empirical, test: Empirical | None) -> None:
    for name, points in (("training", data), ("test", test)):
        require(
            points is None or net.shape in (None, points.shape),
            f"The {name} data have shape {points and points.shape}, but {net.name} takes {net.shape}.",
        )
    one = test is not None and int((test.weights > 0).sum()) < 2
    require(not one, "There is one test image; give two or more, or none.")
    require(
        test is None or test.shape == data.shape,
        f"Training images have shape {data.shape} and test images {test and test.shape}; they must be alike.",
    )


@dataclasses.dataclass(frozen=True)
class _Asked:
    """The questions, with what all of them need."""

    data: Empirical
    test: Empirical | None
    extract: Extractor
    threshold: float
    sizes: Sizes
    seed: int
    step: Reporter
    references: dict[Any, Reference] = dataclasses.field(default_factory=dict)
    scores: list[tuple[EmpiricalScore, tuple[float, float]]] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def conventions(self, net: Checkpoint) -> Conventions:
        found = check(net, self.data, images=self.sizes.check, seed=self.seed, exact=self._exact(net))
        self.step(f"{net.name}: conventions", _CHECK)
        return found

    def levels(self, nets: list[Checkpoint]) -> dict[str, xarray.Dataset | str]:
        """The curves of each network by name; networks that see the same noisy images are asked together.

        Of one that returns no numbers there is the sentence that says so, and the others are asked without it.
        """
        curves: dict[str, xarray.Dataset | str] = {}
        while nets:
            same = [net for net in nets if alike(net.process, nets[0].process) and _same(net, nets[0])]
            nets = [net for net in nets if net not in same]
            try:
                curves |= self._levels(same)
            except InputError as error:
                each = [[net] for net in same] if len(same) > 1 else []
                curves |= {name: curve for one in each for name, curve in self.levels(one).items()}
                curves |= {} if each else {same[0].name: str(error)}
        return curves

    def _levels(self, same: list[Checkpoint]) -> dict[str, xarray.Dataset]:
        data, test = self._scaled(same[0])
        t = times_of(same[0], data)[:: self.sizes.every]
        part = self._part("errors by noise level", _LEVELS * len(same), len(t))
        sizes: dict[str, Any] = {"images": self.sizes.images, "draws": self.sizes.draws, "exact": self._exact(same[0])}
        found = levels(same, data, test, times=t, seed=self.seed, step=part, **sizes)
        return {net.name: found.isel(model=m) for m, net in enumerate(same)}

    def finding(self, net: Checkpoint, read: Conventions, curves: dict[str, xarray.Dataset | str]) -> Finding:
        """The answers of one network; one that fails at a question is asked no more."""
        if not read.fits:
            return Finding(net, read)
        curve = curves[net.name]
        if isinstance(curve, str):
            return Finding(net, read, failure=curve)
        try:
            return self._finding(net, read, curve)
        except InputError as error:
            return Finding(net, read, failure=str(error))

    def _finding(self, net: Checkpoint, read: Conventions, curve: xarray.Dataset) -> Finding:
        data, test = self._scaled(net)
        skilled = skill(net, data, images=self.sizes.check, seed=self.seed)
        member = None
        if test is not None:
            t = times_of(net, data)[:: self.sizes.every]
            member = membership(net, data, test, times=t, images=self.sizes.members, draws=1, seed=self.seed)
            self.step(f"{net.name}: membership", _MEMBERS)
        seen = blind(net, data, images=self.sizes.blind, seed=self.seed, budget=self.sizes.budget)
        self.step(f"{net.name}: blind directions", _BLIND)
        samples = {kind: self._sampled(net, kind, data, test) for kind in sampling.KINDS}
        return Finding(net, read, skilled, curve, member, seen, samples)

    def _sampled(self, net: Checkpoint, kind: str, data: Empirical, test: Empirical | None) -> Sampled:
        x_T = sampling.start(net, self.sizes.samples, self.seed, data.shape)
        calls = len(sampling.times(net, kind, self.sizes.steps))
        part = self._part(f"{net.name}: samples ({kind})", _SAMPLES, calls)
        x = sampling.draw(net, x_T, kind, steps=self.sizes.steps, seed=self.seed, step=part)
        moved = drift(x, data)
        near = self._reference(data, test, self.extract).copies(x, self.threshold)
        plain = None
        if moved.alarm and self.extract.name == "pixels" and len(data.shape) > 1:
            plain = self._reference(data, test, extractor("standardised")).copies(x, self.threshold)
        like = likeness(x, data, test, features=self.extract, seed=self.seed)
        self.step(f"{net.name}: comparison with data", _COMPARE)
        return Sampled(kind, calls, x, near, plain, moved, like)

    def _reference(self, data: Empirical, test: Empirical | None, extract: Extractor) -> Reference:
        """The reference images of networks of one range, compared with the training set once."""
        key = (data.scale, extract.name)
        if key not in self.references:
            features = None if extract.name == "pixels" else extract.fit(data, self.seed)
            images = self.sizes.reference
            self.references[key] = Reference.of(data, test, features=features, images=images, seed=self.seed)
        return self.references[key]

    def together(self, findings: Sequence[Finding], groups: Sequence[str | int] | None) -> Agreement | None:
        """How far networks of one convention agree; those that were read, if there are two."""
        kept = [k for k, f in enumerate(findings) if f.samples]
        if len(kept) < 2:
            return None
        first = findings[kept[0]].net
        kept = [k for k in kept if alike(findings[k].net.process, first.process) and _same(findings[k].net, first)]
        if len(kept) < 2:
            return None
        data, _ = self._scaled(first)
        t = times_of(first, data)[:: self.sizes.every]
        x = torch.stack([findings[k].samples["ode"].images for k in kept])
        good = x.isfinite().flatten(2).all(2).all(0)
        samples = x[:, good] if int(good.sum()) >= 3 else None
        part = self._part("agreement of the networks", _AGREE, 3 * len(t))
        shared = None if groups is None else [groups[k] for k in kept]
        try:
            nets = Checkpoints([findings[k].net for k in kept], shared)
            told: dict[str, Any] = {"times": t, "samples": samples, "seed": self.seed, "exact": self._exact(first)}
            return agreement(nets, data, images=self.sizes.places, step=part, **told)
        except InputError as error:  # what was found of each network stands
            self.notes.append(f"How far the networks agree could not be measured: {error}")
            return None

    def ground(self, nets: list[Checkpoint], profile: Profile | None) -> Ground | None:
        """The training set under the first network's process, for the advice."""
        if profile is not None:
            return Ground.of_profile(profile)
        found = Ground.of(self._scaled(nets[0])[0], nets[0].process, self.sizes.queries, self.seed) if nets else None
        self.step("training set", _GROUND)
        return found

    def _exact(self, net: Checkpoint) -> EmpiricalScore:
        """The ideal score in the network's units, made once for networks of one process and range."""
        for score, pixels in self.scores:
            if alike(score.process, net.process) and pixels == net.range:
                return score
        self.scores.append((EmpiricalScore(net.scaled(self.data), net.process), net.range))
        return self.scores[-1][0]

    def _scaled(self, net: Checkpoint) -> tuple[Empirical, Empirical | None]:
        return net.scaled(self.data), None if self.test is None else net.scaled(self.test)

    def _part(self, label: str, units: float, pieces: int) -> Reporter:
        """A reporter of so many equal pieces of some units of work, under one label."""
        return lambda _, done=1.0: self.step(label, units * done / max(pieces, 1))


def _same(a: Checkpoint, b: Checkpoint) -> bool:
    """Whether two networks take the same images at the same times."""
    return a.range == b.range and a.label == b.label and a.time == b.time
