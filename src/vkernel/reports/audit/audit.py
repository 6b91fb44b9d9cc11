"""The whole audit of one or several networks.

Conventions are checked first: a network that does not denoise under them is not examined further, since every later
number would be of a misreading. Networks that see the same noisy images form a group
(:mod:`vkernel.reports.audit.group`) and are compared with one another."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vkernel.core.errors import require
from vkernel.core.memory import check_memory
from vkernel.core.progress import Progress, progress as report_progress
from vkernel.data import Empirical
from vkernel.metrics.augment import Augment
from vkernel.metrics.features import Features, extractor
from vkernel.process import Process
from vkernel.reports.audit.axes import arranged, for_network
from vkernel.reports.audit.classes import Class, Labels, by_class, in_class
from vkernel.reports.audit.draw import sampling_times
from vkernel.reports.audit.group import NetworkGroup, alike, together, work
from vkernel.reports.audit.kept import Kept
from vkernel.reports.audit.levels import check_inputs
from vkernel.reports.audit.networks import Model, as_networks
from vkernel.reports.audit.plan import Plan, device_of, measure, using_threads
from vkernel.reports.audit.report import text
from vkernel.reports.audit.result import Audit, DataStatistics, NetworkAudit, Sizes
from vkernel.reports.audit.samples import Data, as_data, check_count, in_memory
from vkernel.score import EmpiricalScore, Wrapped

if TYPE_CHECKING:
    from vkernel.reports.profile import Profile

DATA = 2  # share of the work, in units of those of vkernel.reports.audit.group


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
        resume: a folder that keeps the results of finished stages; the same audit continues from there.

    >>> import vkernel as vk
    >>> train, held_out = vk.data.images("digits", 100, 100)
    >>> small = vk.reports.audit.Sizes(16, 16, 1, 4, 48, 4, 4, 16, 20, 64, 8, 8)  # to be quick; quick=True is larger
    >>> found = vk.audit(vk.EmpiricalScore(train, vk.EDM()), train, test=held_out, sizes=small)
    >>> found  # the exact score copies
    Audit(EmpiricalScore; alarms: copies, membership)
    """
    began = time.monotonic()
    data, held = as_data(data, "training"), None if test is None else as_data(test, "test")
    others = {name: as_data(points, name) for name, points in (also or {}).items()}
    nets = as_networks(models, process, data)
    shape, stored, name = for_network(nets[0], data.shape), data.shape, nets[0].name
    data, held = arranged(data, shape), None if held is None else arranged(held, shape)
    others = {name: arranged(points, shape) for name, points in others.items()}
    sets = {"training": data, "test": data if held is None else held, **others}
    _check(nets, sets, held, groups, threshold)
    versions, data = Augment.parse(augment, data.shape), in_memory(data)
    sizes, extract = sizes or (Sizes.quick() if quick else Sizes()), extractor(features)
    check_memory(64 * sizes.samples * data.d, f"An audit of {sizes.samples:,} samples")
    classes, notes = dict[int, Class](), list[str]()
    if labels is not None:
        classes, notes = by_class(data, labels, held, test_labels)
        groups = None if groups is None else [group for group in groups for _ in classes]
        nets = [replace(net, label=c, name=net.name + in_class(c)) for net in nets for c in classes]
        sizes = sizes.split(len(classes))
    if shape != stored:
        notes.append(text("arranged", name=name, given=stored, shape=shape))
    nets = [replace(net, shape=shape, batch=batch or net.batch, dtype=dtype or net.dtype) for net in nets]
    facts = [nets, data, held, sizes, seed, extract.name, threshold, versions, str(data.device)]
    facts += [[one.rows for one in classes.values()]]
    kept = Kept(resume, *(facts if resume is not None else ()))
    first = next(iter(classes.values()), Class(None, data, held))
    plan = kept.get("plan", lambda: measure(nets[0], first.data, nets[0].batch, seed))
    nets = [replace(net, batch=net.batch or plan.batch) for net in nets]
    if progress and math.isfinite(plan.evaluation):
        _announce(plan, nets[0], sizes, Sizes.quick().split(len(classes) or 1), len(nets), held is not None, progress)
    total = work(len(nets), held is not None) + DATA
    with using_threads(plan.threads), report_progress(total, progress) as step:
        shared = (others, extract, threshold, versions, sizes, seed, kept, step)
        problems = [NetworkGroup(some, classes.get(some[0].label or 0, first), *shared) for some in alike(nets)]
        found = {name: result for problem in problems for name, result in problem.networks().items()}
        named = None if groups is None else {net.name: group for net, group in zip(nets, groups, strict=True)}
        same = [net for net in nets if not classes or net.label == nets[0].label]  # runs are compared in one class
        compared = [p for p in problems if p.nets[0] in same]
        agreed, beyond, more = together(compared, [found[net.name] for net in same], named, extract)
        statistics = _statistics(profile, problems, found, data, kept)
        step("training set", DATA)
    stated = (extract.name, threshold, sizes, seed, time.monotonic() - began)
    results = tuple(found[net.name] for net in nets)
    whole = Audit(results, agreed, statistics, data, held, *stated, (*notes, *more), versions)
    whole = replace(whole, across=beyond, classes=tuple(classes))
    return replace(whole, notes=(text("classes", audit=whole), *whole.notes)) if classes else whole


def _check(
    nets: list[Wrapped],
    sets: Mapping[str, Empirical],
    test: Empirical | None,
    groups: Sequence[str | int] | None,
    threshold: float,
) -> None:
    """Refuse networks and data sets that do not fit each other."""
    data = sets["training"]
    for net in nets:
        for kind, points in sets.items():
            fits = net.shape in (None, points.shape)
            given = f"The {kind} data have shape {points.shape}, but {net.name} takes {net.shape}."
            require(fits, " ".join([given, *net.notes]))
        check_inputs(net, data, test)
    same = groups is None or len(groups) == len(nets)
    require(same, f"There are {len(nets)} networks and {len(groups or ())} groups.")
    require(0 < threshold <= 1, f"threshold must be a ratio in (0, 1], not {threshold!r}.")
    check_count(data)


def _statistics(
    profile: Profile | None,
    problems: list[NetworkGroup],
    found: Mapping[str, NetworkAudit],
    data: Empirical,
    kept: Kept,
) -> DataStatistics | None:
    """Return facts about the training set: from a profile, or in the units of a network whose conventions fit."""
    if profile is not None:
        return DataStatistics.of_profile(profile)
    good = next((p for p in problems if any(found[net.name].conventions.fits for net in p.nets)), None)
    if good is None:
        return None
    net = good.nets[0]

    def measured() -> DataStatistics:
        whole = good.own.rows is None  # the group of a class holds the images of this class alone
        exact = good.exact if whole else EmpiricalScore(net.scaled(data), net.process)
        return DataStatistics.of(exact, good.sizes.queries, good.seed)

    return kept.get(f"statistics {net.name}", measured)


def _announce(plan: Plan, net: Wrapped, sizes: Sizes, quick: Sizes, nets: int, test: bool, progress: Progress) -> None:
    """Report the cost of an audit before it begins, and that of a quick one if it takes less than half as long."""
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
