r"""Is the run starting to memorise? Pure functions of its evaluations (docs/theory.md, §10.9).

**Alarm.** With :math:`e_i(k)` the error of image i at evaluation k and :math:`\Delta e_i(k) = e_i(k) - e_i(1)`,

.. math:: D_k = \frac{\overline{\Delta e}_{test}(k) - \overline{\Delta e}_{train}(k)}{\bar e_{test}(k)}, \qquad
          G_k = \frac{\bar e_{test}(k) - \bar e_{train}(k)}{\bar e_{test}(k)}

are the parts of the held-out error by which training images have improved more since the first evaluation, and by which
their error is lower. If the network never saw the training images of the probe, both sets are random draws of one law
whatever it learned, and neither is positive but by chance. D has the smaller variance while images differ in
difficulty; G also sees what was memorised before the first evaluation. The alarm is raised at the first k at which a
lower bound of D or of G, of level :math:`\alpha_k/2 = .03/(\pi^2 k^2)` each, exceeds :math:`\delta` = .1: by the union
bound the chance of a false alarm in a whole run is at most :math:`\sum_k \alpha_k = .01`, however evaluations depend on
each other. The bounds are those of tests of :math:`E[\Delta e - \delta e] > E[\Delta e]`, and of :math:`E[e - \delta e]
> E[e]`, held-out images on the left (:func:`~vkernel.core.estimate.relative_change`). Held-out images that are no
random split make the tests meaningless: where the Gaussian denoiser differs between the sets (p < .001), a shift is
reported and no alarm.

**Learning or settled.** The fall of the held-out error since the last evaluation at half the step or before, per
doubling of steps, from pairs (the same images and noise): *learning* if it is positive (95 %) and above 1 %.

**Copying.** The first evaluation at which Wilson's lower bound of the share of copies among samples is above Wilson's
upper bound of the share among held-out images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vkernel.core.estimate import Estimate, relative_change
from vkernel.reports.monitor.onset import Forecast, forecast
from vkernel.reports.monitor.record import Evaluation, Setting

DELTA = 0.1  # the part of the held-out error by which training images must be better
SHIFT = 1e-3  # p value below which held-out images are no random split
FALL = 0.01  # of the held-out error for a doubling of steps: less is settled
FITS = 1.5  # error relative to the Gaussian theory's, of a reading that fits
FAILS = {"noise": 2.0, "v": 2.0, "flow": 2.0}  # and of one that does not: more than this,
FAR = 3.0  # or this for other predictions, whose young networks are farther away
WEAK = 1.1  # error of a network that is worse than a linear denoiser, whatever the reason
LESS, HALF = 0.75, 0.5  # of the error of the stated reading, where it is worse than a linear denoiser, and where not
LEARNED = 0.7  # of the error of an output of zeros
FEWEST = 3  # evaluations at which a reading fits, or none
STATES = ("learning", "settled", "memorising")


@dataclass(frozen=True)
class Gap:
    """D and G at evaluation ``k``, each with its lower bound; D of the first evaluation is not known."""

    step: int
    k: int
    change: float
    change_low: float
    gap: float
    gap_low: float

    @property
    def low(self) -> float:
        """The larger of the lower bounds."""
        return max(self.change_low, self.gap_low)

    @property
    def value(self) -> float:
        """The value whose lower bound is larger."""
        return self.change if self.change_low > self.gap_low else self.gap

    @property
    def alarm(self) -> bool:
        """Whether a lower bound exceeds δ."""
        return self.low > DELTA


@dataclass(frozen=True)
class Verdict:
    """What the evaluations of a run show. ``state`` is "learning", "settled" or "memorising" (then ``since`` is the
    step of the first alarm, or of the first copies if these come first). ``alarm`` and ``copying`` are the steps of
    each, if any. ``gap``, ``fall`` (of the held-out error, per doubling of steps) and ``copies`` are the evidence at
    the last evaluation, ``held`` the copies among held-out images, ``forecast`` the step at which copies are expected.
    ``shifted``: held-out images are no random split. ``finite``: whether the last errors are. ``better``: another
    prediction that the outputs fit; ``misfit``: they fit none. ``weak``: they are worse than a linear denoiser's, and
    this no longer improves. ``clear`` is the last step with samples but without copies."""

    state: str
    step: int
    since: int | None
    alarm: int | None
    copying: int | None
    gap: Gap | None
    fall: Estimate | None
    copies: Estimate | None
    held: Estimate
    forecast: Forecast
    shifted: bool
    finite: bool
    better: str
    misfit: bool
    weak: bool = False
    clear: int | None = None


def level(k: int) -> float:
    """Return α_k, whose sum over all k is .01."""
    return 0.06 / (math.pi * k) ** 2


def gaps(records: Sequence[Evaluation], known: Sequence[Gap] = ()) -> list[Gap]:
    """Return D and G of every evaluation with finite errors; ``known`` are kept."""
    good = [r for r in records if r.finite]
    found: list[Gap] = []
    for k, record in enumerate(good, 1):
        if k <= len(known) and known[k - 1].step == record.step and len(found) == k - 1:
            found.append(known[k - 1])
            continue
        train, test = record.images["train"], record.images["test"]
        g, d = relative_change(test, train, test, level(k) / 2), Estimate(0.0, 0.0, -math.inf, math.inf)
        if k > 1:
            before = good[0].images
            d = relative_change(test - before["test"], train - before["train"], test, level(k) / 2)
        found.append(Gap(record.step, k, d.value, d.low, g.value, g.low))
    return found


def fall(records: Sequence[Evaluation]) -> Estimate | None:
    """Estimate the relative fall of the held-out error per doubling of steps; ``None`` if the run is too short."""
    good = [r for r in records if r.finite]
    before = [r for r in good if r.step <= good[-1].step / 2 and r is not good[-1]]
    if not before:
        return None
    then, now = before[-1].images["test"], good[-1].images["test"]
    doublings = math.log2(good[-1].step / before[-1].step) if before[-1].step > 0 else 1.0
    return Estimate.of_mean((then - now) / then.mean(), scale=1 / doublings)


def copying(records: Sequence[Evaluation], setting: Setting) -> int | None:
    """Return the first step at which there are more copies among samples than held-out images explain."""
    for record in records:
        if record.drawn is not None and record.drawn.copies(setting.threshold).low > setting.held_share.high:
            return record.step
    return None


def reading(records: Sequence[Evaluation], setting: Setting, falls: bool) -> tuple[str, bool]:
    """Return another prediction that the outputs fit at the last evaluations, and whether they fit none although the
    error no longer falls. Another prediction fits if its error is well below that of the stated one and of an output of
    zeros (a fair denoiser for v and flow), and no larger than that of a linear denoiser by much."""
    recent, own = [r.readings for r in records[-FEWEST:]], setting.predicts
    if len(recent) < FEWEST or any(own not in errors for errors in recent):
        return "", False
    fits = [
        {
            name: error
            for name, error in errors.items()
            if error
            <= min(FITS, (LESS if errors[own] > 1 else HALF) * errors[own], LEARNED * setting.zeros.get(name, 0.0))
        }
        for errors in recent
    ]
    better = min(fits[-1], key=fits[-1].__getitem__, default="")
    better = better if all(better in found for found in fits) else ""
    return better, not better and recent[-1][own] > FAILS.get(own, FAR) and not falls


def verdicts(records: Sequence[Evaluation], setting: Setting) -> list[Verdict]:
    """Return what was known after each evaluation."""
    every = gaps(records)
    return [verdict(records[:k], setting, every) for k in range(1, len(records) + 1)]


def verdict(records: Sequence[Evaluation], setting: Setting, known: Sequence[Gap] = ()) -> Verdict:
    """Return what the evaluations show; there is one evaluation or more. ``known`` are their gaps, if computed."""
    every, last = gaps(records, known), records[-1]
    shifted = setting.shift < SHIFT
    alarm = None if shifted else next((g.step for g in every if g.alarm), None)
    copied = copying(records, setting)
    fell = fall(records) if every else None
    falls = fell is None or (fell.low > 0 and fell.value > FALL)
    raised = [step for step in (alarm, copied) if step is not None]
    state = "memorising" if raised else "learning" if falls else "settled"
    drawn = [r.drawn for r in records if r.drawn is not None]
    good = [r for r in records if r.finite]
    better, misfit = reading(good or [last], setting, falls)
    far = len(good) >= FEWEST and all(r.test.low > WEAK for r in good[-FEWEST:])
    return Verdict(
        state=state,
        step=last.step,
        since=min(raised, default=None),
        alarm=alarm,
        copying=copied,
        gap=every[-1] if every else None,
        fall=fell,
        copies=drawn[-1].copies(setting.threshold) if drawn else None,
        held=setting.held_share,
        forecast=forecast(records, setting, copied),
        shifted=shifted,
        finite=last.finite,
        better=better,
        misfit=misfit,
        weak=far and not falls and not better and not misfit,
        clear=max((r.step for r in records if r.drawn is not None and r.step < (copied or math.inf)), default=None),
    )


__all__ = ["Gap", "Verdict", "copying", "fall", "gaps", "level", "reading", "verdict", "verdicts"]
