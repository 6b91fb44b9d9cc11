r"""The decision rules: does the noise of the training target make networks generalize?

Twins are members of two objectives with the same initial weights, inputs and order of images; their targets are
:math:`m + c\,(x_0 - m)` with different c (:class:`vkernel.JC`), or a placebo of equal trace. In each cell (data set, n,
network) these rules compare c = 1 with c = 0, first of all, and every other c with c = 0:

``vastola``
    The frontier of c lies below that of c = 0, and V(c)/V(0) > 1.5 in the window. Frontiers are memorised fraction and
    train–test gap, :math:`\mathrm{mean}_\sigma \log(e_{held}/e_{train})`, at equal held-out error, :math:`\log e =
    \mathrm{mean}_\sigma \log e_{held}(\sigma)`, member by member (:func:`vkernel.core.twoway.frontier`). A difference
    below the error of interpolation between snapshots (:func:`vkernel.core.twoway.frontier_tolerance`) does not count.
    Where no member of either copies anything, the memorised fraction has no frontier. The window holds the noise levels
    where ρ (variant ``rho``) or the network's noise share at c = 1 (``network``) exceeds half its maximum; the ratio is
    that of means over noised training images, averaged over levels in the logarithm, at the last snapshot. Each part
    holds if its 95 % interval lies on the side of the claim and fails if it lies on the other; the rule holds if all
    parts do and fails if one does (at the level divided by their number).
``bertrand``
    c and c = 0 are equivalent at the last snapshot: all 90 % intervals lie inside ±10 % for errors (training, held-out,
    excess) and V at every level, ±.02 for the memorised fraction, ±10 % of the training set's own distance for the
    distances of one model and of the average. It fails if one interval, with the level divided by their number, lies
    outside. Distances of the average that were not measured are left out.
``regularisation``
    One change of time maps all curves of c onto those of c = 0 (:func:`vkernel.core.twoway.change_of_time`): errors, V
    and memorised fraction, in units of the margins above. Holds if all 90 % intervals of what is left lie inside ±1,
    and fails as above; ±1 is widened by the error of interpolation (:func:`vkernel.core.twoway.bends`). Snapshots whose
    time is an end of the measured range are left out, since it may lie beyond.
``shape``
    c and its placebo (variant ``white`` or ``gaussian``) differ: in one quantity of ``bertrand`` the difference is not
    0, at 5 % divided by their number. It fails if they are equivalent in the sense of ``bertrand``, also where a
    difference within the margins is shown.
``average``
    D(q̄), the distance of the average over members to held-out images, falls from c = 0 to c, while the mean distance of
    one model does not: it is not shown to fall, and a fall by more than 10 % of the training set's own distance is
    excluded. Variants ``energy`` and ``kernel``.

Verdicts are *holds*, *fails*, *undecided* and *not run*. Holm's method is applied over the cells, for each rule,
variant and contrast (:func:`vkernel.core.twoway.decide`); ``alone`` is the verdict without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import xarray
from torch import Tensor

from vkernel.core.twoway import DRAWS, Contrast, Resamples, bends, change_of_time, decide, frontier, frontier_tolerance
from vkernel.reports.target_noise.cells import FEWEST, LOST, Cell, Measured, cells, factors_of, label_of

FACTOR = 1.5  # by which V must exceed that of c = 0
MARGIN = 0.1  # of errors and of V, and of the training set's distance
COPIES = 0.02  # margin of the memorised fraction
HOLDS, FAILS, UNDECIDED, NOT_RUN = "holds", "fails", "undecided", "not run"
WINDOWS = {"rho": "rho", "network": "network_share"}
PLACEBOS = ("white", "gaussian")
ZERO = label_of(0)


@dataclass(frozen=True)
class Part:
    """One compared quantity: ``value`` with its 95 % and 90 % intervals. A ``ratio`` is compared in the logarithm.
    ``null`` is the value that it is tested against, ``margin`` that of equivalence, in the same units (a ratio lies
    within 1/(1 + margin) and 1 + margin). ``level`` is σ/α, ``step`` the snapshot; NaN and 0 where there is none."""

    name: str
    ratio: bool
    value: float
    low: float
    high: float
    low90: float
    high90: float
    null: float = math.nan
    margin: float = math.nan
    level: float = math.nan
    step: int = 0

    @classmethod
    def of(cls, name: str, found: Contrast, ratio: bool = False, **about: float) -> Part:
        """Return the part of a contrast, which is of the logarithm of a ratio."""
        ends = found.value, *found.interval(), *found.interval(0.9)
        return cls(name, ratio, *(math.exp(min(v, 700.0)) if ratio else v for v in ends), **about)  # type: ignore[arg-type]

    @property
    def away(self) -> float:
        """How far the 90 % interval reaches, in margins."""
        ends = (math.log(v) if self.ratio else v for v in (self.low90, self.high90))
        return max(map(abs, ends)) / (math.log1p(self.margin) if self.ratio else self.margin)


@dataclass(frozen=True)
class Outcome:
    """What a rule says in one cell: the verdict, p values of "holds" and "fails", and the quantities it was decided by.

    ``alone`` is the verdict without Holm's method. ``members`` took part, ``diverged`` did not. ``groups``
    are verdicts by kind of quantity, ``by_step`` those at every snapshot, both without Holm's method."""

    rule: str
    variant: str
    of: str
    to: str
    cell: dict[str, str]
    verdict: str = NOT_RUN
    alone: str = NOT_RUN
    p_holds: float = math.nan
    p_fails: float = math.nan
    level: float = 0.05
    members: int = 0
    diverged: int = 0
    parts: tuple[Part, ...] = ()
    groups: tuple[tuple[str, str], ...] = ()
    by_step: tuple[tuple[int, str], ...] = ()

    @property
    def family(self) -> tuple[str, str, str, str]:
        return self.rule, self.variant, self.of, self.to


@dataclass(frozen=True)
class Tested:
    """A contrast with what is claimed of it: p values that the claim holds and that it fails."""

    part: Part
    contrast: Contrast

    @property
    def margin(self) -> float:
        return math.log1p(self.part.margin) if self.part.ratio else self.part.margin


class Comparison:
    """Two objectives of a cell over the members that are finite with both."""

    def __init__(self, cell: Cell, of: str, to: str) -> None:
        self.cell, self.of, self.to = cell, of, to
        self.run = all(cell.finite(label).any() for label in (of, to))
        self.members = cell.common(of, to)
        self.diverged = cell.members - len(self.members)
        self.enough = len(self.members) >= FEWEST and self.diverged <= LOST * cell.members
        if self.run and self.enough:
            self.draw: Resamples = cell.resamples(len(self.members))
            self.a: Measured = cell.measured(of, self.members)
            self.b: Measured = cell.measured(to, self.members)

    def outcome(self, rule: str, variant: str = "", level: float = 0.05) -> Outcome:
        """Return the outcome of a rule before it is decided."""
        found = Outcome(rule, variant, self.of, self.to, self.cell.at, level=level, diverged=self.diverged)
        return replace(found, verdict=UNDECIDED, alone=UNDECIDED, members=len(self.members)) if self.run else found

    def test(self, name: str, replicates: Tensor, ratio: bool = False, least: float = 0.0, **about: float) -> Tested:
        """Return the contrast of ``replicates``, which are of the logarithm of a ratio."""
        found = self.draw.contrast(replicates, least)
        return Tested(Part.of(name, found, ratio, **about), found)

    def equivalence(self, k: int) -> list[Tested]:
        """Return all quantities of the rule ``bertrand`` at snapshot ``k``."""
        a, b, step = self.a, self.b, int(self.cell.steps[k])
        pairs = {"training": (a.error[..., 0], b.error[..., 0]), "held_out": (a.error[..., 1], b.error[..., 1])}
        pairs |= {"excess": (a.excess, b.excess), "V": (a.V[..., 0], b.V[..., 0])}
        found = [
            self.test(name, log_ratio(x, y)[:, k, i], True, margin=MARGIN, level=float(level), step=step)
            for name, (x, y) in pairs.items()
            for i, level in enumerate(self.cell.levels)
        ]
        found.append(self.memorised(k))
        for kind in a.single:
            margin = MARGIN * abs(self.cell.scalar(f"{kind}_training"))
            for name, x, y in (("single", a.single, b.single), ("pooled", a.pooled, b.pooled)):
                if kind in x and kind in y:
                    found.append(self.test(f"{kind}_{name}", (x[kind] - y[kind])[:, k], margin=margin, step=step))
        return found

    def memorised(self, k: int) -> Tested:
        a, b, step = self.a, self.b, int(self.cell.steps[k])
        least = math.sqrt(2) * a.least  # where nothing is copied: one more copy in each
        return self.test("memorised", (a.memorised - b.memorised)[:, k], least=least, margin=COPIES, step=step)


def log_ratio(a: Tensor, b: Tensor) -> Tensor:
    """Return log a/b of positive numbers; NaN of others."""
    return torch.where(a > 0, a, torch.nan).log() - torch.where(b > 0, b, torch.nan).log()


def some(p: Iterable[float]) -> float:
    """Return the p value of "one of these is shown", by Bonferroni's bound."""
    values = list(p)
    return min(1.0, len(values) * min(values, default=1.0))


def verdict(holds: float, fails: float, level: float) -> str:
    """Return the verdict of one cell by itself."""
    return (UNDECIDED, HOLDS, FAILS)[decide([holds], [fails], level)[0]]


def vastola(found: Comparison, window: str) -> Outcome:
    """Test that the frontiers lie below, and that V is larger in the window."""
    out = found.outcome("vastola", window)
    if not (found.run and found.enough):
        return out
    tests = frontiers(found)
    values = found.cell.level(WINDOWS[window])
    inside = torch.from_numpy(values > np.nanmax(values) / 2) if np.isfinite(values).any() else torch.tensor([False])
    if inside.any():
        ratio = log_ratio(found.a.V[..., 0], found.b.V[..., 0])[:, -1, inside].mean(-1)
        tests.append(found.test("V", ratio, True, null=FACTOR, step=int(found.cell.steps[-1])))
    holds, fails = [], []
    for t in tests:
        sides = t.contrast.p_above(math.log(FACTOR)), t.contrast.p_below(math.log(FACTOR))
        null = t.part.null  # of frontiers: the error of interpolation
        up, down = sides if t.part.ratio else (t.contrast.p_below(-null), t.contrast.p_above(null))
        holds.append(up)
        fails.append(down)
    complete = len(tests) > 1 and tests[-1].part.name == "V"  # a window, and a frontier
    each = tuple((t.part.name, verdict(a, b, 0.05)) for t, a, b in zip(tests, holds, fails, strict=True))
    return decided(replace(out, groups=each), tests, max(holds) if complete else 1.0, some(fails))


def frontiers(found: Comparison) -> list[Tested]:
    """Return the differences of frontiers: memorised fraction and gap at equal held-out error."""
    a, b = found.a, found.b

    def curves(one: Measured) -> tuple[Tensor, Tensor, Tensor]:
        logs = torch.where(one.each > 0, one.each, torch.nan).log().mean(-2)  # over levels
        return logs[..., 1], one.copies, logs[..., 1] - logs[..., 0]

    (e, copies, gap), (e0, copies0, gap0) = curves(a), curves(b)
    ys = {"frontier_gap": (gap, gap0)}
    if a.copied or b.copied:
        ys = {"frontier_memorised": (copies, copies0)} | ys
    tests = []
    for name, (y, y0) in ys.items():
        apart = frontier(e, y, e0, y0)
        enough = 2 * int(apart[0].isfinite().sum()) > len(found.members)
        replicates = found.draw.average(apart) if enough else torch.full_like(apart[:, 0], torch.nan)
        tolerance = max(frontier_tolerance(e[0], y[0]), frontier_tolerance(e0[0], y0[0]))
        tests.append(found.test(name, replicates, null=tolerance))
    return tests


def bertrand(found: Comparison) -> Outcome:
    """Test equivalence."""
    out = found.outcome("bertrand", level=0.1)
    if not (found.run and found.enough):
        return out
    by_step, last = [], []
    for k, step in enumerate(found.cell.steps.tolist()):
        last = found.equivalence(k)
        by_step.append((int(step), verdict(*_equivalent(last), 0.1)))
    return decided(replace(out, by_step=tuple(by_step), groups=_groups(last)), last, *_equivalent(last))


def _groups(tests: Sequence[Tested]) -> tuple[tuple[str, str], ...]:
    """Return the verdict on equivalence of each kind of quantity."""
    kinds = dict.fromkeys(t.part.name for t in tests)
    each = [(k, verdict(*_equivalent([t for t in tests if t.part.name == k]), 0.1)) for k in kinds]
    missing = (k.replace("single", "pooled") for k in kinds if k.endswith("_single"))
    return *each, *((k, NOT_RUN) for k in missing if k not in kinds)


def _equivalent(tests: Sequence[Tested]) -> tuple[float, float]:
    """Return p values of "all inside the margins" and of "one outside"."""
    inside = max(t.contrast.p_inside(t.margin) for t in tests)
    return inside, some(t.contrast.p_outside(t.margin) for t in tests)


def regularisation(found: Comparison) -> Outcome:
    """Test whether a change of time maps all curves onto those of the other objective."""
    out = found.outcome("regularisation", level=0.1)
    if not (found.run and found.enough):
        return out
    unit, x = math.log1p(MARGIN), found.cell.steps.log()

    def curves(one: Measured) -> Tensor:
        positive = torch.cat([one.error.flatten(2), one.excess, one.V[..., 0]], -1)
        logs = torch.where(positive > 0, positive, torch.nan).log() / unit
        return torch.cat([logs, one.memorised[..., None] / COPIES], -1)

    one, two = curves(found.a), curves(found.b)
    kept = (one[0].isfinite() & two[0].isfinite()).all(0)
    tau, left = change_of_time(one[..., kept], two[..., kept], x)
    count, names = len(found.cell.levels), ("training", "held_out", "excess", "V")
    labels = [(n, float(level)) for level in found.cell.levels for n in names[:2]]
    labels += [(n, float(level)) for n in names[2:] for level in found.cell.levels] + [("memorised", math.nan)]
    assert len(labels) == 4 * count + 1
    labels = [pair for pair, good in zip(labels, kept.tolist(), strict=True) if good]
    ends = x[[0, -1]].double()
    inner = [k for k in range(len(x)) if not torch.isclose(tau[0, k], ends).any()]
    wider = 1 + bends(two[0][:, kept], x, tau[0])
    tests = [
        found.test(name, left[:, k, i], margin=float(wider[k, i]), level=level, step=int(found.cell.steps[k]))
        for k in inner
        for i, (name, level) in enumerate(labels)
    ]
    shown = [
        found.test("time", tau[:, k] - x[k], True, step=int(found.cell.steps[k])) for k in inner
    ]  # τ(s)/s, which decides nothing
    holds, fails = _equivalent(tests) if tests else (1.0, 1.0)
    return decided(out, [*tests, *shown], holds, fails)


def shape(found: Comparison, placebo: str) -> Outcome:
    """Test whether an objective and its placebo differ."""
    out = found.outcome("shape", placebo)
    if not (found.run and found.enough):
        return out
    tests = found.equivalence(len(found.cell.steps) - 1)
    differ = some(2 * min(t.contrast.p_above(0.0), t.contrast.p_below(0.0)) for t in tests) / 2
    same = _equivalent(tests)[0] / 2  # 90 % intervals are at the level .05 of both sides
    return decided(replace(out, groups=_groups(tests)), tests, 1.0 if same <= 0.025 else differ, same)


def average(found: Comparison, kind: str) -> Outcome:
    """Test whether D(q̄) falls while the distance of one model does not."""
    out = found.outcome("average", kind)
    if not (found.run and found.enough):
        return out
    if kind not in found.a.pooled or kind not in found.b.pooled:
        return replace(out, verdict=NOT_RUN, alone=NOT_RUN)
    margin, step = MARGIN * abs(found.cell.scalar(f"{kind}_training")), int(found.cell.steps[-1])
    pooled = found.test("pooled", (found.a.pooled[kind] - found.b.pooled[kind])[:, -1], null=0.0, step=step)
    single = found.test("single", (found.a.single[kind] - found.b.single[kind])[:, -1], margin=margin, step=step)
    falls = single.contrast.p_below(0.0)
    fails = some((pooled.contrast.p_above(0.0), falls))
    holds = 1.0 if falls <= 0.025 else max(pooled.contrast.p_below(0.0), single.contrast.p_above(-margin))
    return decided(out, [pooled, single], holds, fails)


def decided(out: Outcome, tests: Sequence[Tested], holds: float, fails: float) -> Outcome:
    """Return the outcome with its p values, its quantities, and the verdict of its cell by itself."""
    alone = verdict(holds, fails, out.level)
    parts = tuple(t.part for t in tests)
    return replace(out, p_holds=holds, p_fails=fails, parts=parts, alone=alone, verdict=alone)


def rules(ds: xarray.Dataset, *, draws: int = DRAWS, seed: int = 0) -> list[Outcome]:
    """Return the outcome of every rule for every cell and contrast of a study; the first contrast is c = 1."""
    found: list[Outcome] = []
    for cell in cells(ds, draws, seed):
        named = factors_of([str(o) for o in ds["objective"].values])
        others = sorted((c for c in {1.0, *named.values()} if c > 0), key=lambda c: (c != 1, c))
        for c in others:
            label = next((k for k, v in named.items() if v == c), label_of(c))
            pair = Comparison(cell, label, ZERO)
            found += [vastola(pair, window) for window in WINDOWS] + [bertrand(pair), regularisation(pair)]
            found += [average(pair, kind) for kind in ("energy", "kernel")]
        for c in (1.0, 10.0):
            found += [shape(Comparison(cell, label_of(c), label_of(c, p)), p) for p in PLACEBOS]
    return adjusted(found)


def adjusted(found: Sequence[Outcome]) -> list[Outcome]:
    """Return the outcomes with verdicts by Holm's method over the cells of each family."""
    out = list(found)
    for family in dict.fromkeys(one.family for one in found):
        where = [i for i, one in enumerate(out) if one.family == family and not math.isnan(one.p_holds)]
        if where:
            sides = decide([out[i].p_holds for i in where], [out[i].p_fails for i in where], out[where[0]].level)
            for i, side in zip(where, sides, strict=True):
                out[i] = replace(out[i], verdict=(UNDECIDED, HOLDS, FAILS)[side])
    return out
