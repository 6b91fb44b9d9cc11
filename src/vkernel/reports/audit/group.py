"""The stages of an audit for networks that see the same noisy images, share one ideal score and start from the same
noise: networks of one process, pixel range, class and time input."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from vkernel.adapters.checkpoints import Checkpoints
from vkernel.core.errors import InputError
from vkernel.core.progress import Reporter, part
from vkernel.data import Empirical
from vkernel.metrics.augment import Augment
from vkernel.metrics.features import Extractor
from vkernel.reports.audit.agreement import Agreement, SameNoise, agreement
from vkernel.reports.audit.blind import blind
from vkernel.reports.audit.classes import Class
from vkernel.reports.audit.conventions import Conventions, check
from vkernel.reports.audit.draw import FEWEST_STEPS, KINDS, draw, sampling_times, start
from vkernel.reports.audit.kept import Kept
from vkernel.reports.audit.levels import audit_times, levels, membership, same_process
from vkernel.reports.audit.report import text
from vkernel.reports.audit.result import NetworkAudit, Sizes
from vkernel.reports.audit.runs import across, comparable, shared_starts
from vkernel.reports.audit.samples import Comparison, SampleAudit
from vkernel.reports.audit.skill import Skill, skill
from vkernel.score import EmpiricalScore, Wrapped

if TYPE_CHECKING:
    import xarray

CHECK, LEVELS, MEMBERSHIP, BLIND, SAMPLES, COMPARE, AGREE = 3, 12, 5, 4, 12, 4, 16  # shares of the work
Result = TypeVar("Result")


def work(nets: int, test: bool) -> float:
    """Return the work of all stages, in the unit of the reported progress."""
    each = CHECK + LEVELS + MEMBERSHIP * test + BLIND + len(KINDS) * (SAMPLES + COMPARE)
    return nets * each + AGREE * (nets > 1)


def alike(nets: list[Wrapped]) -> list[list[Wrapped]]:
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


@dataclass(eq=False)
class NetworkGroup:
    """Networks that are evaluated on the same noisy images, with the data in their units and the ideal score."""

    nets: list[Wrapped]
    own: Class
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
        # derivatives are not taken in half precision
        seen = self._kept(replace(net, dtype=None), blind, images=sizes.blind, budget=sizes.budget)
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
        coarse = steps < min(FEWEST_STEPS, len(sampling_times(net, kind, None)))
        compare = functools.partial(self.compared.of, x, kind, steps, coarse)
        if not self.extract.custom:  # what a function of the user computes may change

            def without() -> SampleAudit:
                return replace(self.compared.of(x, kind, steps, coarse), images=x[:0])

            compare = functools.partial(self.kept.get, f"comparison {kind} {net.name}", without)
        found = replace(compare(), images=x)
        self.step(f"{net.name}: comparison with data", COMPARE)
        if self.own.rows is None:
            return found
        plain = found.standardised
        plain = None if plain is None else plain.renumbered(self.own.rows)
        return replace(found, copies=found.copies.renumbered(self.own.rows), standardised=plain)

    def sampled(self, found: Mapping[str, NetworkAudit]) -> list[NetworkAudit]:
        """Return the results of those that were sampled."""
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


def together(
    problems: list[NetworkGroup],
    results: list[NetworkAudit],
    groups: dict[str, str | int] | None,
    extract: Extractor,
) -> tuple[Agreement | None, SameNoise | None, list[str]]:
    """Compare networks with one another, scores within the largest group and samples across groups; and notes. Where
    that fails the results of each network stand."""
    found = {n.name: n for n in results}
    kept = {id(p): p.sampled(found) for p in problems}
    sampled = [n for n in results if n.samples]
    if len(sampled) < 2:
        return None, None, [text("alone", sampled=sampled)] if len(results) > 1 else []
    largest = max(problems, key=lambda p: len(kept[id(p)]))
    try:
        agreed, notes = largest.agreement(kept[id(largest)], groups)
        beyond, notes = None, notes + shared_starts(sampled, groups)
        if len(kept[id(largest)]) < len(sampled):
            units = {n.name: p.data for p in problems for n in kept[id(p)]}
            members = [n.name for n in kept[id(largest)]] if agreed else []
            beyond, words = across(sampled, [units[n.name] for n in sampled], extract, members)
            notes.append(words)
    except InputError as error:
        return None, None, [text("unmeasured", why=error)]
    return agreed, beyond, notes


def _share(report: Callable[[str, float], None], k: int, count: int, label: str, share: float) -> None:
    """Report the progress of the k-th of several equal parts."""
    report(label, (k + share) / count)
