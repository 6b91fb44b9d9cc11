"""The shipped studies as exhibits: ``vkernel reproduce --all``. Stores are kept: a run that was stopped goes on.

A module of this package with ``make`` is an exhibit; this one has many, so it has :func:`all_of` instead.
"""

from __future__ import annotations

import copy
import functools
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vkernel.core.errors import InputError, require
from vkernel.reproduce.page import Exhibit, Finding, Picture, Run, Table, number
from vkernel.study import Spec, read, report, runners
from vkernel.study.shipped import studies
from vkernel.study.store import Store

__all__ = ["HINT", "Study", "all_of", "tiny"]

FOLDER = "studies"
HINT = (
    "Six studies of what controls generalization, and three phase diagrams, can be added to this page: run the same "
    "command with --all. It may be stopped at any time; run again, it goes on."
)
SECONDS = {  # on one core
    "target_noise": 35.0,
    "process_and_cutoff": 28.0,
    "nonlinearity": 68.0,
    "capacity": 43.0,
    "features": 38.0,
    "training_set": 18.0,
    "phase_capacity_noise": 33.0,
    "phase_size_time": 131.0,
    "phase_cutoff_capacity": 33.0,
}


@dataclass(frozen=True)
class Study:
    """One shipped study on its way to the page; like a module of this package, with a title, a cost and ``make``."""

    name: str
    spec: Spec
    store: Path

    @property
    def TITLE(self) -> str:
        return f"Study: {self.spec.title}"

    @property
    def SECONDS(self) -> float:
        return SECONDS[self.name]

    def check(self) -> None:
        """Refuse at the door a store that is in use or another study's."""
        try:
            with Store.open(self.store, self.spec):
                pass
        except InputError as error:
            raise InputError(str(error).replace("--store", "--out")) from None

    def make(self, run: Run) -> Exhibit:
        """Compute what is missing, and draw."""
        blocks = math.prod(self.spec.shape) * self.spec.blocks
        with Store.open(self.store, self.spec) as store:
            missing = store.missing()
            share = 1 - len(missing) / blocks
            run.step(share)
            before = f" {100 * share:.0f} % of the models had been computed before." if share > 0 else ""
            for condition, block, values in runners.inline(self.spec, missing):
                store.write(condition, block, values)
                run.step(1 / blocks)
            found = store.dataset().load()
        data = report.export(self.store, run.out / FOLDER / f"{self.name}.csv")
        return Exhibit(
            name=f"study-{self.name}",
            title=self.TITLE,
            pictures=(self._picture(run, found),),
            data=f"{FOLDER}/{data.name}",
            sizes=f"{math.prod(self.spec.shape)} conditions × {self.spec.members} models × {self.spec.sampler.samples} "
            f"samples of each; seed {self.spec.seed}. More of every model is in {FOLDER}/{self.store.name}, "
            f"for vkernel study show, plot and export.{before}",
            opening=(self.spec.question,),
            finding=_finding(found),
            tables=(_table(found),),
        )

    def _picture(self, run: Run, found: Any) -> Picture:
        drawn = self.spec.figure
        assert drawn is not None
        about = str(found[drawn.value].attrs["long_name"])
        axes = {f.dim: f.about or f.dim.replace("_over_", "/") for f in self.spec.grid}
        means = report.means(found)[drawn.value]
        if drawn.y:
            against = f"over {axes[drawn.x]} (columns) and {axes[drawn.y]} (rows)"
            caption = "Mean over models ± standard error in every cell."
        else:
            by = f", one line for each value of {axes[drawn.lines]}" if drawn.lines else ""
            against = f"against {axes[drawn.x]}{by}"
            caption = "Means over models with 95 % intervals."
        low, high = float(means.min()), float(means.max())
        return run.picture(
            f"study-{self.name}",
            functools.partial(report.figure, found),
            alt=f"{about[0].upper()}{about[1:]}, {against}. The means lie between {number(low, 2)} and "
            f"{number(high, 2)}; the table below has all of them.",
            caption=(f"{about[0].upper()}{about[1:]}, {against}. {caption}",),
        )


def all_of(out: Path, seed: int, *, quick: bool) -> list[Study]:
    """Every shipped study, with the page's seed; refused at the door where a store cannot be used."""
    found = []
    for name, path in studies().items():
        raw = tomllib.loads(path.read_text())
        raw["seed"] = seed
        spec = read(tiny(raw) if quick else raw)
        found.append(Study(name, spec, out / FOLDER / f"{name}.zarr"))
    require(found, "The shipped studies are not in this installation; clone the repository, or install its wheel.")
    for study in found:
        study.check()
    return found


def tiny(raw: dict[str, Any]) -> dict[str, Any]:
    """The study at a size that says nothing, for tests."""
    small = copy.deepcopy(raw)
    small |= {"members": 2, "block": 2}
    sampler = small.setdefault("sampler", {})
    sampler |= {"samples": 8, "steps": 6, "sets": 8}
    if small.setdefault("model", {}).get("kind", "linear") == "linear":
        small["model"]["per_axis"] = 4
    if "draws" in small.get("training", {}):
        small["training"]["draws"] = 24
    return small


def _finding(found: Any) -> Finding | None:
    spec, value = report.spec_of(found), report.finding(found)
    if spec.finding is None:
        return None
    verdict = report.sentence(found).rpartition("; ")[2]
    if value is None:
        return Finding("not known", "a mean is zero, or models diverged", (spec.finding.words + ".",))
    times = " times" if spec.finding.kind == "ratio" else ""
    return Finding(
        number=f"{number(float(value.value))}{times}",
        interval=f"95 % interval {number(float(value.low))} to {number(float(value.high))}",
        words=(spec.finding.words + ".", f"{verdict[0].upper()}{verdict[1:]}"),
    )


def _table(found: Any) -> Table:
    """What is drawn, in numbers: x as columns, lines or y as rows."""
    drawn, means = report.spec_of(found).figure, report.means(found)
    assert drawn is not None
    across = drawn.y or drawn.lines
    assert across is not None
    value, se = (means[n].transpose(across, drawn.x).values for n in (drawn.value, f"{drawn.value}_se"))
    about = str(found[drawn.value].attrs["long_name"])
    return Table(
        caption=f"{about[0].upper()}{about[1:]}: mean over models ± standard error.",
        head=("", *(_label(drawn.x, v) for v in found[drawn.x].values)),
        rows=tuple(
            (_label(across, name), *(f"{v:.3f} ± {s:.3f}" for v, s in zip(*row, strict=True)))
            for name, *row in zip(found[across].values, value, se, strict=True)
        ),
    )


def _label(dim: str, value: Any) -> str:
    return str(value) if isinstance(value, str) else f"{dim.replace('_over_', '/')} = {report.text(value)}"
