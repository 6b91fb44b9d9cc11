r"""When to evaluate: the cost stays below a share of the run's wall time.

Let W be the wall time since the first call, S the time of all evaluations, :math:`S_e` and :math:`S_s` that of errors
and of samples, :math:`c_e` and :math:`c_s` what these are expected to cost (the larger of the last two times), b the
budget. At a step that is ``every`` or more after the last evaluation,

* errors are measured and samples drawn if :math:`S + c_e + c_s \le b W`;
* otherwise errors alone are measured if :math:`S + c_e \le b W` and :math:`S_e + c_e \le 3 (S_s + c_s)`: errors, on
  which the alarm rests, come first, and leave a quarter of the budget to samples.

The first evaluation, of errors alone, is not subject to this; its cost counts. After a restart W and S continue."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

Clock = Callable[[], float]
FIRST = 3.0  # times the cost of samples may be spent on errors alone


class Due(NamedTuple):
    """What is to be measured now."""

    errors: bool
    samples: bool


class Budget:
    """The account of a run; ``share`` is b. ``wall`` and ``spent`` (errors, samples) continue those of a restart."""

    def __init__(self, share: float, every: int, clock: Clock = time.monotonic) -> None:
        self.share, self.every, self.clock = share, every, clock
        self.before, self.start = 0.0, math.nan
        self.spent = [0.0, 0.0]
        self.costs: tuple[list[float], list[float]] = ([], [])
        self.guess = 0.0, 0.0  # of the cost of samples, before any were drawn: times that of errors, plus seconds

    def resume(self, wall: float, spent: tuple[float, float], costs: list[tuple[float, float]]) -> None:
        """Continue the account of a run that was stopped."""
        self.before, self.spent = wall, list(spent)
        for errors, samples in costs[-4:]:
            self._note(errors, samples)

    def wall(self) -> float:
        """Return the seconds of the run; the first call starts the clock."""
        now = self.clock()
        if math.isnan(self.start):
            self.start = now
        return self.before + now - self.start

    @property
    def expected(self) -> tuple[float, float]:
        """The expected costs of errors and of samples, in seconds."""
        errors = max(self.costs[0][-2:], default=0.0)
        return errors, max(self.costs[1][-2:], default=self.guess[0] * errors + self.guess[1])

    @property
    def pause(self) -> float:
        """The seconds from the start of the run at which errors can be measured again."""
        return (sum(self.spent) + self.expected[0]) / self.share

    def due(self, step: int, last: int | None, samples: bool) -> Due:
        """Return what to measure at ``step``, the last evaluation having been at ``last``; ``samples`` is whether any
        are drawn at all."""
        wall = self.wall()
        if last is None:
            return Due(True, False)
        if step < last + self.every:
            return Due(False, False)
        (errors, drawn), limit, total = self.expected, self.share * wall, sum(self.spent)
        if samples and total + errors + drawn <= limit:
            return Due(True, True)
        alone = not samples or self.spent[0] + errors <= FIRST * (self.spent[1] + drawn)
        return Due(alone and total + errors <= limit, False)

    def spend(self, errors: float, samples: float, note: bool = True) -> None:
        """Add measured costs; with ``note`` they are those of an evaluation, which the next is expected to have."""
        self.spent[0] += errors
        self.spent[1] += samples
        if note:
            self._note(errors, samples)

    def _note(self, errors: float, samples: float) -> None:
        self.costs[0].append(errors)
        if samples > 0:
            self.costs[1].append(samples)
