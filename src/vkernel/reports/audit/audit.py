r"""The whole audit of one or several networks, and its result; samples for an audit.

Conventions are checked first: a network that does not denoise under them is not examined further, since every later
number would be of a misreading. Networks of one process, pixel range, class and time input see the same noisy images,
share one ideal score, start from the same noise, and are compared with one another.

**Samples.** :func:`draw` integrates the probability flow by the second-order multistep method, at times even in
:math:`(\sigma/\alpha)^{1/7}` (``ode``), or takes ancestral steps (``ancestral``), and ends with the denoised image at
the last time; Heun's method, order 1, and times even in t end farther from the flow. The noise of a sample belongs to
(seed, its index) and (seed, its index, step): networks of one process start from the same noise, and the number of
samples and the batch change a sample by rounding only."""

from __future__ import annotations

import datetime
import functools
import inspect
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from vkernel.adapters.checkpoints import Checkpoint, Checkpoints
from vkernel.adapters.weights import reason
from vkernel.core import rng
from vkernel.core.checks import check_choice, check_whole, is_whole
from vkernel.core.errors import InputError, require
from vkernel.core.estimate import Estimate
from vkernel.core.files import write, write_json
from vkernel.core.memory import check_memory
from vkernel.core.progress import Progress, Reporter, part, progress as report_progress
from vkernel.data import Empirical
from vkernel.metrics import collapse_ratio
from vkernel.metrics.augment import Augment
from vkernel.metrics.copies import pooled
from vkernel.metrics.features import Extractor, Features, extractor
from vkernel.process import DDPM, Anisotropic, Process
from vkernel.reports.audit.agreement import Agreement, SameNoise, agreement
from vkernel.reports.audit.blind import Blind, blind
from vkernel.reports.audit.conventions import Conventions, check
from vkernel.reports.audit.decoder import Decoder, Decoding, decoder as as_decoder
from vkernel.reports.audit.denoising import as_network
from vkernel.reports.audit.kept import Kept
from vkernel.reports.audit.levels import Membership, audit_times, check_inputs, levels, membership, same_process
from vkernel.reports.audit.plan import Plan, device_of, measure, using_threads
from vkernel.reports.audit.report import Advice, Verdict, advice, as_dict, page, sentences, text, verdicts
from vkernel.reports.audit.runs import across, comparable, shared_starts
from vkernel.reports.audit.samples import Comparison, Data, SampleAudit, SavedAudit, as_data
from vkernel.reports.audit.skill import Skill, skill
from vkernel.sample import Scores, ancestral, pf_ode
from vkernel.score import EmpiricalScore, Score, Wrapped, as_score
from vkernel.score.base import check_score

if TYPE_CHECKING:
    import xarray

    from vkernel.reports.profile import Profile

FEWEST = 16  # training images
IN_MEMORY = 1 << 28  # numbers of a memory map that is read at once
BISECTIONS = 8
KINDS = ("ode", "ancestral")
ALL = 1000  # steps in continuous time, where no number of steps is all
CHUNK = 1 << 21  # random numbers made at once
CHECK, LEVELS, MEMBERSHIP, BLIND, SAMPLES, COMPARE, AGREE, DATA = 3, 12, 5, 4, 12, 4, 16, 2  # shares of the work
Result = TypeVar("Result")
Labels = Tensor | Sequence[int] | None
Model = Score | Scores | Callable[[Tensor, Tensor], Tensor] | str | Path


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
    def of(cls, data: Empirical, process: Process, queries: int, seed: int) -> DataStatistics:
        """Measure them with ``queries`` images; the collapse is found by bisection on shared images and noise."""
        merged, merge = data.merged()
        repeated = (merge.cpu().bincount()[merge.cpu()] > 1).nonzero().flatten().tolist()
        score, source = EmpiricalScore(merged, process), rng.stream(seed, "images for the ground")
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
        return [n.name.removesuffix(_in_class(label)) for n, label in zip(self.subjects, labels, strict=True)]

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


def audit(
    models: Model | Sequence[Model],
    data: Data,
    process: Process | None = None,
    test: Data | None = None,
    *,
    features: Features = "pixels",
    threshold: float = 1 / 3,
    augment: str | None = None,
    also: Mapping[str, Data] | None = None,
    groups: Sequence[str | int] | None = None,
    labels: Labels = None,
    test_labels: Labels = None,
    quick: bool = False,
    sizes: Sizes | None = None,
    profile: Profile | None = None,
    seed: int = 0,
    batch: int | None = None,
    dtype: torch.dtype | None = None,
    resume: str | Path | None = None,
    progress: Progress = False,
) -> Audit:
    """Audit one or several trained networks against their training set.

    Args:
        models: a score (a ``Checkpoint``, say), several as ``Scores`` (an ``Ensemble``, ``Checkpoints``), a diffusers
            folder, a function ``(x, t)`` that returns the score under ``process``, or a list of these.
        test: images of the same law that the networks did not see, the reference of errors; membership needs them.
        features: those in which samples are compared with data (:func:`vkernel.metrics.features.extractor`).
        threshold: the largest ratio of the nearest to the second nearest distance of a copy.
        augment: the augmentations of training, ``"flip,shift:2"``: samples are compared with all versions of an image.
        also: other data sets by name, on which the networks may have been trained if not on ``data``.
        groups: the group of each network, equal for networks that share an initialisation, say.
        labels, test_labels: the classes of the images. Class-conditional networks ``net(x, time, labels)`` are then
            audited in every class, with its own images; the sizes are shared among the classes.
        quick, sizes: whether to take the sizes of a first look, or each of them.
        profile: the result of ``vk.profile`` for the data, for better advice.
        batch: the largest number of images in one call of a network; by default it follows from the free memory.
        dtype: the precision of the networks, ``torch.bfloat16`` or ``torch.float16``, by autocast; results are float32.
        resume: a folder that keeps the results of finished stages; the same audit continues from there."""
    began = time.monotonic()
    data, held = as_data(data, "training"), None if test is None else as_data(test, "test")
    others = {name: as_data(points, name) for name, points in (also or {}).items()}
    nets = _networks(models, process, data)
    for net in nets:
        for kind, points in {"training": data, "test": held or data, **others}.items():
            fits = net.shape in (None, points.shape)
            given = f"The {kind} data have shape {points.shape}, but {net.name} takes {net.shape}."
            require(fits, " ".join([given, *net.notes]))
        check_inputs(net, data, held)
    same = groups is None or len(groups) == len(nets)
    require(same, f"There are {len(nets)} networks and {len(groups or ())} groups.")
    require(0 < threshold <= 1, f"threshold must be a ratio in (0, 1], not {threshold!r}.")
    require((data.weights > 0).sum() >= FEWEST, f"An audit needs {FEWEST} training images or more; got {data.n}.")
    versions = Augment.parse(augment, data.shape)
    if data.n * data.d <= IN_MEMORY:  # the ideal score reads the data many times
        data = data.loaded()
    sizes, extract = sizes or (Sizes.quick() if quick else Sizes()), extractor(features)
    check_memory(64 * sizes.samples * data.d, f"An audit of {sizes.samples:,} samples")
    together, beyond, notes, classes = None, None, list[str](), dict[int, _Class]()
    if labels is not None:
        classes, left_out = _by_class(data, labels, held, test_labels)
        notes += left_out
        groups = None if groups is None else [group for group in groups for _ in classes]
        nets = [replace(net, label=c, name=net.name + _in_class(c)) for net in nets for c in classes]
        sizes = sizes.split(len(classes))
    nets = [replace(net, batch=batch or net.batch, dtype=dtype or net.dtype) for net in nets]
    facts = [nets, data, held, sizes, seed, extract.name, threshold, versions, str(data.device)]
    facts += [[one.rows for one in classes.values()]]
    kept = Kept(resume, *(facts if resume is not None else ()))
    first = next(iter(classes.values()), _Class(None, data, held))
    plan = kept.get("plan", lambda: measure(nets[0], first.data, nets[0].batch, seed))
    nets = [replace(net, batch=net.batch or plan.batch) for net in nets]
    if progress and math.isfinite(plan.evaluation):
        _announce(plan, nets[0], sizes, Sizes.quick().split(len(classes) or 1), len(nets), held is not None, progress)
    each = CHECK + LEVELS + MEMBERSHIP * (held is not None) + BLIND + 2 * (SAMPLES + COMPARE)
    total = len(nets) * each + AGREE * (len(nets) > 1) + DATA
    with using_threads(plan.threads), report_progress(total, progress) as step:
        shared = (others, extract, threshold, versions, sizes, seed, kept, step)
        sets = {net.name: classes.get(net.label or 0, first) for net in nets}
        problems = [_NetworkGroup(some, sets[some[0].name], *shared) for some in _alike(nets)]
        found = {name: result for problem in problems for name, result in problem.networks().items()}
        results = [found[net.name] for net in nets]
        named = None if groups is None else {n.name: group for n, group in zip(results, groups, strict=True)}
        try:
            alike = [p for p in problems if not classes or p.nets[0].label == nets[0].label]  # in the first class
            among = [found[net.name] for net in nets if any(net in p.nets for p in alike)]
            together, beyond, more = _together(alike, among, found, named, extract)
            notes += more
        except InputError as error:  # the results of each network stand
            notes.append(f"How far the networks agree could not be measured: {error}")
        statistics = None if profile is None else DataStatistics.of_profile(profile)
        good = next((p for p in problems if any(found[net.name].conventions.fits for net in p.nets)), None)
        if statistics is None and good is not None:
            about = functools.partial(
                DataStatistics.of, good.nets[0].scaled(data), good.nets[0].process, sizes.queries, seed
            )
            statistics = kept.get(f"statistics {good.nets[0].name}", about)
        step("training set", DATA)
    stated = (extract.name, threshold, sizes, seed, time.monotonic() - began)
    whole = Audit(tuple(results), together, statistics, data, held, *stated, tuple(notes), versions, across=beyond)
    if not classes:
        return whole
    whole = replace(whole, classes=tuple(classes))
    return replace(whole, notes=(text("classes", audit=whole), *notes))


def _networks(models: Model | Sequence[Model], process: Process | None, data: Empirical) -> list[Wrapped]:
    """Return all models as networks with different names."""
    given: Iterable[Any] = models if isinstance(models, Sequence) and not isinstance(models, str) else [models]
    nets: list[Wrapped] = []
    for model in given:
        if isinstance(model, Scores):
            found = {m: as_network(model.member(m), data) for m in range(len(model)) if m not in model.diverged}
            nets += [n if isinstance(model, Checkpoints) else replace(n, name=f"member {m}") for m, n in found.items()]
        elif isinstance(model, str | Path):
            nets.append(Checkpoint.from_diffusers(model))
        elif isinstance(model, Score):
            nets.append(as_network(model, data))
        elif callable(model) and process is not None:
            name = model.__name__ if inspect.isroutine(model) else type(model).__name__
            nets.append(as_score(model, process, range=(-1, 1), name=name))
        else:
            needs = "give a Score, a diffusers folder, or a function (x, t) with process="
            raise InputError(f"A {type(model).__name__} cannot be audited alone: {needs}.")
    require(nets, "There is no network to audit.")
    names = [net.name for net in nets]
    numbered = [f"{name} ({k + 1})" if names.count(name) > 1 else name for k, name in enumerate(names)]
    return [replace(net, name=name) for net, name in zip(nets, numbered, strict=True)]


def _alike(nets: list[Wrapped]) -> list[list[Wrapped]]:
    """Return the networks in groups of one process, pixel range, class and time input."""
    groups: list[list[Wrapped]] = []
    for net in nets:
        same = [g for g in groups if (g[0].range, g[0].label, g[0].time) == (net.range, net.label, net.time)]
        own = [g for g in same if same_process(g[0].process, net.process)]
        if own:
            own[0].append(net)
        else:
            groups.append([net])
    return groups


class _Class(NamedTuple):
    """The images of one class, and their rows in the whole training set (``None``: all of it)."""

    rows: Tensor | None
    data: Empirical
    test: Empirical | None


def _in_class(label: int | None) -> str:
    return "" if label is None else f", class {label}"


def _by_class(
    data: Empirical, labels: Labels, test: Empirical | None, test_labels: Labels
) -> tuple[dict[int, _Class], list[str]]:
    """Return the images of each class, and a sentence on classes that are too small."""
    own = _labels(labels, data, "training")
    require(test is None or test_labels is not None, "Give test_labels, the classes of the test images, as well.")
    other = None if test is None else _labels(test_labels, test, "test")
    found, small = {}, []
    for label in own.unique().tolist():
        rows = (own == label).nonzero().flatten()
        theirs = None if other is None else (other == label).nonzero().flatten()
        if int((data.weights.cpu()[rows] > 0).sum()) < FEWEST or (theirs is not None and len(theirs) < 2):
            small.append(str(label))
        else:
            held = None if test is None or theirs is None else test.subset(theirs)
            found[label] = _Class(rows, data.subset(rows), held)
    many = f"An audit needs {FEWEST} training images or more (and 2 test images) of a class"
    require(found, f"{many}; no class has so many.")
    return found, [f"{many}; left out: class {', '.join(small)}."] if small else []


def _labels(labels: Labels, data: Empirical, kind: str) -> Tensor:
    try:
        found = torch.as_tensor(labels).cpu().flatten()
        whole = found.long()
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"Labels must be whole numbers, one for each image; got {type(labels).__name__}.") from None
    require(len(found) == data.n, f"There are {len(found):,} labels for {data.n:,} {kind} images.")
    require(bool((whole == found).all()) and int(whole.min()) >= 0, "Labels must be whole numbers, 0 or more.")
    return whole


@dataclass(eq=False)
class _NetworkGroup:
    """Networks that are evaluated on the same noisy images, with the data in their units and the ideal score."""

    nets: list[Wrapped]
    own: _Class
    also: dict[str, Empirical]
    extract: Extractor
    threshold: float
    augment: Augment
    sizes: Sizes
    seed: int
    kept: Kept
    step: Reporter

    def __post_init__(self) -> None:
        first = self.nets[0]
        held = self.own.test
        self.data, self.test = first.scaled(self.own.data), None if held is None else first.scaled(held)
        self.exact = EmpiricalScore(self.data, first.process)
        stated = (self.extract, self.threshold, self.sizes.reference, self.seed, self.augment)
        self.compared = Comparison(self.data, self.test, *stated)

    @functools.cached_property
    def times(self) -> Tensor:
        return audit_times(self.nets[0], self.data)[:: self.sizes.every]

    def networks(self) -> dict[str, NetworkAudit]:
        """Return the results of each network by name; a failure ends the audit of that network only."""
        found = {}
        for net in self.nets:
            read = self._kept(net, check, images=self.sizes.check, exact=self.exact)
            found[net.name] = NetworkAudit(net, read, **self._skills(net, read))
            self.step(f"{net.name}: conventions", CHECK)
        for name, curve in self._levels([net for net in self.nets if found[net.name].can_be_read]).items():
            try:
                found[name] = self._network(found[name], curve)
            except InputError as error:
                found[name] = replace(found[name], failure=str(error))
        return found

    def _skills(self, net: Wrapped, read: Conventions) -> dict[str, Any]:
        """Measure the skill on the training set and, where that is doubtful, on other data."""
        sizes: dict[str, Any] = {"images": self.sizes.check, "seed": self.seed}
        others: dict[str, Skill] = {}
        if not (read.fits or self.also):
            return {}
        try:
            own = self._kept(net, skill, images=self.sizes.check)
            if own.doubtful or not read.fits:
                others = {name: skill(net, other, **sizes) for name, other in self.also.items()}
        except InputError as error:
            return {"failure": str(error)}
        return {"skill": own, "others": others}

    def _levels(self, nets: list[Wrapped]) -> dict[str, xarray.Dataset | InputError]:
        """Return the errors by noise level of each network by name, or why they could not be measured."""
        sizes: dict[str, Any] = {"images": self.sizes.images, "draws": self.sizes.draws, "seed": self.seed}
        done = part(self.step, "errors by noise level", LEVELS * len(nets))
        measured = functools.partial(levels, nets, self.data, self.test, times=self.times, exact=self.exact)
        try:
            stage = f"levels {len(nets)} {nets[0].name if nets else ''}"
            found = self.kept.get(stage, functools.partial(measured, progress=done, **sizes))
        except InputError as error:  # where one of several fails, each is evaluated alone
            alone = (self._levels([net]) for net in nets)
            return {nets[0].name: error} if len(nets) == 1 else {k: v for one in alone for k, v in one.items()}
        return {net.name: found.isel(model=m) for m, net in enumerate(nets)}

    def _network(self, begun: NetworkAudit, curve: xarray.Dataset | InputError) -> NetworkAudit:
        if isinstance(curve, InputError):
            raise curve
        net, sizes, member = begun.net, self.sizes, None
        if self.test is not None:
            member = self._kept(net, membership, self.test, times=self.times, images=sizes.members, draws=1)
            self.step(f"{net.name}: membership", MEMBERSHIP)
        # derivatives are taken at one condition, and not in half precision
        seen = self._kept(replace(net.conditioned(count=1), dtype=None), blind, images=sizes.blind, budget=sizes.budget)
        self.step(f"{net.name}: blind directions", BLIND)
        samples = {kind: self._samples(net, kind) for kind in KINDS}
        return replace(begun, levels=curve, membership=member, blind=seen, samples=samples)

    def _kept(self, net: Wrapped, stage: Callable[..., Result], *more: Any, **options: Any) -> Result:
        """Return the result of a stage for one network, which may have been kept."""
        compute = functools.partial(stage, net, self.data, *more, seed=self.seed, **options)
        return self.kept.get(f"{stage.__name__} {net.name}", compute, process=net.process)

    def _samples(self, net: Wrapped, kind: str) -> SampleAudit:
        """Draw samples in batches, each of which is kept, and compare them with the data."""
        sizes, parts = self.sizes, []
        x_T = start(net, sizes.samples, self.seed, self.data.shape).split(
            min(net.batch or sizes.samples, sizes.samples)
        )
        done = part(self.step, f"{net.name}: samples ({kind})", SAMPLES)
        for k, noise in enumerate(x_T):
            first = k * len(x_T[0])
            report = functools.partial(_share, done, k, len(x_T))
            options: dict[str, Any] = {"steps": sizes.steps, "seed": self.seed, "first": first, "progress": report}
            compute = functools.partial(draw, net, noise.to(self.data.device), kind, **options)
            parts.append(self.kept.get(f"samples {kind} {first} {net.name}", compute).cpu())
            done("", (k + 1) / len(x_T))
        x, steps = torch.cat(parts), len(sampling_times(net, kind, sizes.steps))
        compare = functools.partial(self.compared.of, x, kind, steps)
        if not self.extract.custom:  # what a function of the user computes may change

            def without() -> SampleAudit:
                return replace(self.compared.of(x, kind, steps), images=x[:0])

            compare = functools.partial(self.kept.get, f"comparison {kind} {net.name}", without)
        found = replace(compare(), images=x)
        self.step(f"{net.name}: comparison with data", COMPARE)
        if self.own.rows is None:
            return found
        plain = found.standardised
        plain = None if plain is None else plain.renumbered(self.own.rows)
        return replace(found, copies=found.copies.renumbered(self.own.rows), standardised=plain)

    def sampled(self, found: dict[str, NetworkAudit]) -> list[NetworkAudit]:
        return [found[net.name] for net in self.nets if found[net.name].samples]

    def agreement(
        self, kept: list[NetworkAudit], groups: dict[str, str | int] | None
    ) -> tuple[Agreement | None, list[str]]:
        """How far networks agree, if there are two, and why samples could not be compared."""
        if len(kept) < 2:
            return None, []
        scores = Checkpoints([n.net for n in kept], None if groups is None else [groups[n.name] for n in kept])
        x, alike, why = comparable(kept, self.extract)
        options: dict[str, Any] = {"times": self.times, "images": self.sizes.places, "seed": self.seed}
        options |= {"samples": x, "features": alike, "exact": self.exact}
        done = part(self.step, "agreement of the networks", AGREE)
        compute = functools.partial(agreement, scores, self.data, progress=done, **options)
        found = self.kept.get(f"agreement {scores.names[0]}", compute, groups, process=kept[0].net.process)
        return found, [text("uncompared", why=why)] if why else []


def _together(
    problems: list[_NetworkGroup],
    results: list[NetworkAudit],
    found: dict[str, NetworkAudit],
    groups: dict[str, str | int] | None,
    extract: Extractor,
) -> tuple[Agreement | None, SameNoise | None, list[str]]:
    """Compare networks with one another: scores within the largest group, samples across groups; and notes."""
    kept = {id(p): p.sampled(found) for p in problems}
    sampled = [n for n in results if n.samples]
    if len(sampled) < 2:
        return None, None, [text("alone", sampled=sampled)] if len(results) > 1 else []
    largest = max(problems, key=lambda p: len(kept[id(p)]))
    together, notes = largest.agreement(kept[id(largest)], groups)
    beyond, notes = None, notes + shared_starts(sampled, groups)
    if len(kept[id(largest)]) < len(sampled):
        units = {n.name: p.data for p in problems for n in kept[id(p)]}
        members = [n.name for n in kept[id(largest)]] if together else []
        beyond, words = across(sampled, [units[n.name] for n in sampled], extract, members)
        notes.append(words)
    return together, beyond, notes


def _share(report: Callable[[str, float], None], k: int, count: int, label: str, share: float) -> None:
    """Report the progress of the k-th of several equal parts."""
    report(label, (k + share) / count)


def _announce(plan: Plan, net: Wrapped, sizes: Sizes, quick: Sizes, nets: int, test: bool, progress: Progress) -> None:
    """Report the cost of an audit before it begins, and that of a quick one."""
    steps = [len(sampling_times(net, "ode", size.steps)) for size in (sizes, quick)]
    costs = [plan.seconds(size, count, nets, test) for size, count in zip((sizes, quick), steps, strict=True)]
    evaluations = plan.evaluations(sizes, steps[0], nets, test)
    words = text(
        "cost", plan=plan, nets=nets, evaluations=evaluations, seconds=costs[0], quick=costs[1], device=device_of(net)
    )
    if callable(progress):
        progress(words, 0.0)
    else:
        print(words, file=sys.stderr)


def start(score: Score, n: int, seed: int, shape: tuple[int, ...]) -> Tensor:
    r"""Draw noise :math:`N(0, \sigma_T^2)` for n samples, ``(n, *shape)``."""
    process = _check(score, seed).process
    check_whole(n, "n")
    good = isinstance(shape, tuple | list) and len(shape) > 0 and all(is_whole(k) and k >= 1 for k in shape)
    require(good, f"shape must be that of an image, such as (1, 28, 28), not {shape!r}.")
    sigma = float(process.sigma(torch.tensor(process.T, dtype=torch.float64)))
    return (sigma * _normals(rng.key(seed, "noise of samples"), n, tuple(shape))).to(torch.get_default_dtype())


def draw(
    score: Score,
    x_T: Tensor,
    kind: str = "ode",
    *,
    steps: int | None = 50,
    seed: int = 0,
    first: int = 0,
    progress: Progress = False,
) -> Tensor:
    """Sample from ``x_T (n, *shape)``, like it; samples that diverge are returned as they are.

    ``kind`` is "ode" or "ancestral"; ``steps`` are evaluations of the network (``None``: every index of a DDPM, 1,000
    in continuous time). Ancestral steps of a DDPM are evenly spaced indices; times that share an index count once.
    ``first`` is the index of the first sample, where ``x_T`` is a part of more."""
    _check(score, seed)
    check_choice(kind, "kind", KINDS)
    require(isinstance(x_T, Tensor), f"x_T must be a torch tensor, not {type(x_T).__name__}.")
    require(x_T.ndim >= 2 and x_T.numel() > 0, f"x_T must be (n, *shape), not of shape {tuple(x_T.shape)}.")
    times, shape = sampling_times(score, kind, steps), tuple(x_T.shape)
    score = score.conditioned(first) if isinstance(score, Wrapped) else score

    def noise(k: int) -> Tensor:
        return _normals(rng.key(seed, "noise of ancestral steps", k), len(x_T), shape[1:], x_T.device, first)

    try:
        with torch.no_grad():
            x, how = x_T, dict[str, Any](steps=times, allow_nan=True, progress=progress)
            if len(times) > 1 and kind == "ode":
                x = pf_ode(score, x_T, method="multistep", **how)
            elif len(times) > 1:
                x = ancestral(score, x_T, noise=noise, **how)
            return score.denoise(x, times[-1])
    except InputError:
        raise
    except Exception as error:
        name = score.name if isinstance(score, Wrapped) else type(score).__name__
        why = f"{type(error).__name__}: {reason(error)}"
        raise InputError(f"{name} failed on samples of shape {shape}: {why}.") from error


def sampling_times(score: Score, kind: str, steps: int | None = 50) -> Tensor:
    """Return the descending times at which :func:`draw` evaluates the network, in float64; none is without noise."""
    good = steps is None or (is_whole(steps) and steps >= 1)
    require(good, f"steps must be a whole number, 1 or more, or None for all; got {steps!r}.")
    process = score.process
    if isinstance(process, DDPM) and (kind == "ancestral" or steps is None):
        last, least = math.floor(process.T), math.ceil(process.eps)
        count = last - least + 1
        t = torch.linspace(last, least, min(steps or count, count), dtype=torch.float64).round()
    elif steps == 1:
        t = torch.tensor([process.T], dtype=torch.float64)
    else:
        t = process.times((steps or ALL) - 1, "edm" if kind == "ode" else None)
    t = (score.at(t) if isinstance(score, Wrapped) else t).unique().flip(0)
    return t[process.sigma(t) > 0]


def _check(score: Score, seed: int) -> Score:
    isotropic = not isinstance(check_score(score, "A sampler").process, Anisotropic)
    require(isotropic, "Samples are drawn under isotropic noise alone.")
    require(is_whole(seed), f"seed must be a whole number, not {seed!r}.")
    return score


def _normals(key: int, n: int, shape: tuple[int, ...], device: torch.device | str = "cpu", first: int = 0) -> Tensor:
    """Return standard normals ``(n, *shape)``, each row a function of the key and of its sample's index."""
    coordinates = torch.arange(math.prod(shape), device=device)
    own = rng.hashed(torch.tensor(key, device=device), torch.arange(first, first + n, device=device))
    parts = own.split(max(1, CHUNK // len(coordinates)))
    return torch.cat([rng.normals(part[:, None], coordinates) for part in parts]).reshape(n, *shape)
