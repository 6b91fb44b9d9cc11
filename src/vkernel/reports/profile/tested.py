"""How profiles did on trained networks: numbers of experiments/profile_check.py, stored with the package."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from vkernel.core.estimate import Estimate

RULES = {"copied": "nearest three times nearer", "close": "within one radius"}
LEAST = 0.01  # share of samples that are copies, below which nothing is reproduced
PATH = Path(__file__).with_name("tested.json")


@dataclass(frozen=True)
class Cell:
    """The numbers of one kind of training set and one length of training, by the names in the report."""

    kind: str
    steps: int
    numbers: dict[str, list[float]]  # value, standard error, ends of the interval, and of how many sets

    def __call__(self, name: str) -> Estimate[float]:
        """Return one number, its interval over training sets; unknown if fewer than three sets have it."""
        return Estimate(*self.numbers[name][:4]) if name in self.numbers else Estimate[float].unknown()


@dataclass(frozen=True)
class Experiment:
    """Sizes of the experiment by kind of training set, and a cell for each kind and length, short ones first."""

    sizes: dict[str, dict[str, int]]
    cells: tuple[Cell, ...]

    @property
    def networks(self) -> int:
        """The number of networks that were trained."""
        return sum(size["networks"] for size in self.sizes.values())

    def of(self, kind: str) -> list[Cell]:
        """Return the cells of a kind of training set."""
        return [cell for cell in self.cells if cell.kind == kind]

    @property
    def copying(self) -> tuple[Cell, ...]:
        """The cells in which networks copy at all: in more than 1 % of their samples."""
        return tuple(cell for cell in self.cells if cell("copied samples").value > LEAST)

    @property
    def decided(self) -> dict[str, list[str]]:
        """Labels of the conditions, cells and rules of copying, in which the 95 % interval decides a comparison: of
        the order by collapse time with chance (``above``) and with both simpler orders (``best``, and ``beaten`` by
        one), and of points given 8 times with ordinary ones, reproduced more ``often``, or ``seldom``, and copied more
        (``over``) or less (``under``) than in proportion to their number."""
        found: dict[str, list[str]] = {}
        for cell in self.copying:
            for rule, words in RULES.items():
                own, more = cell(f"{rule} auc all profile single"), cell(f"{rule} reproduced x8 - ordinary single")
                gains = [cell(f"{rule} auc all profile - {other} single") for other in ("multiplicity", "distance")]
                rate = cell(f"{rule} rate x8 - ordinary single")
                decided = {
                    "all": True,
                    "above": own.low > 0.5,
                    "best": min(gain.low for gain in gains) > 0,
                    "beaten": min(gain.high for gain in gains) < 0,
                    "often": more.low > 0,
                    "seldom": more.high < 0,
                    "over": rate.low > 0,
                    "under": rate.high < 0,
                }
                for name, true in decided.items():
                    found.setdefault(name, []).extend([f"{cell.kind}, {cell.steps:,} steps, {words}"] * true)
        return found

    @property
    def halves(self) -> list[Cell]:
        """For each kind of set the cell in which the share of samples that are copies is nearest to one half."""
        return [min(self.of(kind), key=lambda cell: abs(cell("copied samples").value - 0.5)) for kind in self.sizes]


def parse(found: dict[str, dict[str, dict]]) -> Experiment:
    """Return the numbers that the report of the experiment wrote."""
    cells = []
    for kind, held in found.items():
        for steps, numbers in held["lengths"].items():
            cells.append(Cell(kind, int(steps), numbers))
    return Experiment({kind: held["sizes"] for kind, held in found.items()}, tuple(cells))


@functools.cache
def results() -> Experiment:
    """Read the stored numbers."""
    return parse(json.loads(PATH.read_text(encoding="utf-8")))
