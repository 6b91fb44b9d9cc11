r"""Exhibit of the causes to which the paper attributes generalization, each varied alone in a small study.

All studies share one setting: data {-1, 0, 1}, the paper's VP process, a linear denoiser on F = 256 features fitted to
as many noised points. A panel varies one part of it and keeps the rest; that of training time has a lazy network. The
value is the share of samples between the training points, .25 < |x| < .75: its mean over models and its median, with
noisy targets (J1) and with noiseless ones (J0) on the same inputs.

Each panel names pairs of levels in advance, those of the shipped study where there is one. Models of two levels that
have the same index share their random numbers: :func:`vkernel.core.estimate.twins` compares them in pairs.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from xarray import Dataset

from vkernel import plots
from vkernel.core.estimate import LEAST, Estimate, Twins, median, stacked, twins
from vkernel.reproduce.exhibit import Exhibit, Page, Run, Values, one_thread, read
from vkernel.study.report import text

PARTS = ("gap", "far")  # .25 < |x| < .75, and farther than .25 from every training point
LEVEL, SMALL = 0.05, 0.02  # of the sign test; a difference of shares that is called small


@dataclass(frozen=True)
class Contrast:
    """Compare two levels of a factor in pairs of models, whose shares are ``a`` and ``b``, both ``(M,)``."""

    of: str
    to: str
    line: str  # the objective, or the cutoff
    a: Tensor
    b: Tensor
    away: Estimate  # the difference of the shares far from every training point

    @cached_property
    def twins(self) -> Twins:
        return twins(self.a, self.b, LEAST)

    @property
    def means(self) -> tuple[Estimate, Estimate]:
        return Estimate.of_mean(self.a), Estimate.of_mean(self.b)

    @property
    def half(self) -> float:
        """Half the width of the interval of the difference of means."""
        return (self.twins.difference.high - self.twins.difference.low) / 2

    @property
    def mean_differs(self) -> bool:
        """Whether the interval of the difference of means excludes zero."""
        return self.twins.difference.low > 0 or self.twins.difference.high < 0

    @property
    def pairs_differ(self) -> bool:
        """Whether the sign test rejects that a pair is as likely to have more as to have less."""
        return self.twins.p < LEVEL

    @property
    def differs(self) -> bool:
        return self.mean_differs or self.pairs_differ

    @property
    def both(self) -> bool:
        """Whether the mean and most of the pairs that differ have one direction."""
        same = (self.twins.difference.value > 0) == (self.twins.more.value > self.twins.less.value)
        return self.mean_differs and self.pairs_differ and same

    @property
    def more(self) -> bool:
        return self.both and self.twins.difference.value > 0

    @property
    def fewer(self) -> bool:
        return self.both and self.twins.difference.value < 0

    @property
    def small(self) -> bool:
        """Whether the difference of means is small with confidence, and pairs show none."""
        return max(-self.twins.difference.low, self.twins.difference.high) < SMALL and not self.pairs_differ


@one_thread()
def factors(run: Run) -> Exhibit:
    """Run a small study for each factor, and compare levels in the mean and in pairs of models."""
    spec, sizes, given = run.spec("factors"), vars(run.sizes("factors")), read("factors")["panels"]
    arrays: Values = {"seed": run.seed, "members": spec["members"]}
    panels: dict[str, Values] = {}
    for name, panel in given.items():
        changes = {**sizes.get(name, {}), "grid": _grid(panel)}
        if "model" in panel:
            changes["model"] = {**spec["model"], **panel["model"], **changes.get("model", {})}
        panels[name] = found = _read(panel, run.study(spec, 0.94 / len(given), **changes))
        arrays |= {f"{name}_{key}": found[key] for key in (*PARTS, "levels", "lines")}
    values: Values = {"panels": panels, "main": [c for found in panels.values() for c in found["main"]], "spec": spec}
    values |= {"sampled": sizes["time"]["sampler"]["samples"], "median": median, "mean": Estimate.of_mean}
    values["rescaled"] = spec["model"]["ridge"] / given["weight"]["grid"]["model"]["values"][-1]["ridge"]
    page = Page(run, "factors", arrays, **values)
    page.picture("factors", plots.panel_grid, [_panel(given[name], found) for name, found in panels.items()])
    return page.exhibit(0.06)


def _grid(panel: Values) -> Values:
    """Return the factor of a panel, with both objectives unless it has two factors."""
    goals = {"name": "objective", "values": [1, math.inf], "labels": ["J1", "J0"]}
    return panel["grid"] if len(panel["grid"]) > 1 else panel["grid"] | {"objective.K": goals}


def _read(panel: Values, ds: Dataset) -> Values:
    """Return shares ``(level, line, M)`` of the members that did not diverge, and the contrasts of each line."""
    level, line = (str(d) for d in ds["gap"].dims if d != "member")
    whole = torch.from_numpy(ds[list(PARTS)].to_array("part").transpose("part", level, line, "member").values)
    kept = whole[..., whole.isfinite().flatten(0, -2).all(0)]
    levels, lines = [text(v) for v in ds[level].values], [panel.get("line", "") + text(v) for v in ds[line].values]
    named = [panel.get("prefix", "") + v for v in levels]
    pairs = [[levels.index(v) for v in pair] for pair in panel["contrasts"]]

    def contrast(i: int, j: int, k: int) -> Contrast:
        (a, b), (far, near) = kept[:, [i, j], k]
        return Contrast(named[i], named[j], lines[k], a, b, Estimate.of_mean(far - near))

    contrasts = [[contrast(i, j, k) for i, j in pairs] for k in range(len(lines))]
    found: Values = {"title": panel["title"], "levels": named, "lines": lines, "ticks": levels}
    found |= dict(zip(PARTS, kept, strict=True)) | {"lost": whole.shape[-1] - kept.shape[-1], "contrasts": contrasts}
    found |= {"main": contrasts[panel.get("main", 0)], "every": [c for line in contrasts for c in line]}
    return found | {"goals": [twins(one, zero, LEAST) for one, zero, *_ in kept[0]]}  # J1 against J0 at each level


def _panel(panel: Values, found: Values) -> plots.Panel:
    """Return the curves of a panel: mean and median of each line, with intervals, over the levels."""
    curves = {}
    for k, line in enumerate(found["lines"]):
        for name, of in (("mean", Estimate.of_mean), ("median (dashed)", median)):
            curves[f"{line}, {name}"] = stacked([of(v) for v in found["gap"][:, k]]).stack()
    colours = [panel.get("colour", 0) + k // 2 for k in range(len(curves))]
    look: Values = {"even": True, "ticks": found["ticks"], "styles": ("-", "--") if "prefix" in panel else ("",)}
    labels = panel["xlabel"], "share between points", panel["title"]
    return plots.Panel(range(len(found["ticks"])), curves, *labels, colours=colours, **look)
