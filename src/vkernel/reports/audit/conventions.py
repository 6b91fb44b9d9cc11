r"""Does a network behave as it is said to? Its loss, level by level, between a trivial predictor and the ideal one.

At each of a few noise levels, images :math:`x_0` of the data and noise give :math:`x = \alpha x_0 + \sigma\,
\mathrm{noise}`, and the error of a predictor is :math:`E|\widehat{\mathrm{noise}} - \mathrm{noise}|^2 / d`. With
:math:`s^2` the data's variance per coordinate and :math:`r = \sigma/(\alpha s)`,

=========================================  =================================================================
predictor                                  its error
=========================================  =================================================================
noise = 0                                  :math:`1`
x0 = mean of the data                      :math:`1/r^2`
trivial: the best blend of the two         :math:`1/(1+r^2)`, from :math:`\sigma(x-\alpha m)/(\alpha^2s^2+\sigma^2)`
ideal                                      that of the data's own :math:`E[x_0|x]`, an EmpiricalScore
=========================================  =================================================================

The trivial predictor knows a mean and a variance. A network without training is no better than it under any
convention (a v network or an EDM denoiser that returns zero *is* such a blend), and a little training beats it by far.
Levels are spaced evenly in :math:`\log r` from .1 to 3: at less noise nothing can be told, at more the trivial
predictor is all but perfect and a network's rounding is measured. The number that decides is the **loss**: the mean
over levels of error / trivial error, with its standard error over images. Conventions are compared by their
**contrast**: the same mean with one more level, at :math:`\sigma/\alpha` of 3 or more, where noise and v part, and
with trivial errors below .1 counted as .1. The stated convention fits if

* its loss is below .95 by two standard errors, or so is its error at half of the levels, or its error is within a
  tenth of the ideal's; and
* no other convention beats the trivial predictor with a contrast lower by a tenth or more, and by three standard
  errors of the (paired) difference.

Other readings are tried on fewer images and on the same noise. The range of the pixels changes :math:`s`, and the
levels follow it: different ranges are about equally hard problems. Another prediction costs nothing, it is the same
output read otherwise. Another time or another range come first; if none fits, both at once.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vkernel.adapters.checkpoint import PREDICTIONS, Checkpoint
from vkernel.core import rng
from vkernel.core.errors import InputError, require
from vkernel.core.estimate import Estimate
from vkernel.data.empirical import Empirical
from vkernel.process import DDPM
from vkernel.reports.audit import noisy_batch as trials
from vkernel.reports.audit.noisy_batch import Trial
from vkernel.score.empirical import EmpiricalScore

if TYPE_CHECKING:
    import xarray

__all__ = ["RANGES", "Convention", "Conventions", "check"]

RANGES = ((-1.0, 1.0), (0.0, 1.0), (-0.5, 0.5), (0.0, 255.0))
BEATS, MARGIN, NEAR = 0.95, 0.9, 1.1  # of the trivial loss; of the stated contrast; of the ideal error
FEWER = 4  # times fewer images for other conventions
FLOOR = 0.1  # the least trivial error in a contrast
ALIKE = 1.25  # of the stated contrast: what the check can hardly tell apart


@dataclass(frozen=True)
class Convention:
    """What a network predicts, what it is told, and the interval of its pixels."""

    prediction: str
    time: Any
    range: tuple[float, float]

    def __str__(self) -> str:
        time = self.time if isinstance(self.time, str) else "a function"
        return f"prediction {self.prediction}, time {time}, range {self.range[0]:g},{self.range[1]:g}"


@dataclass(frozen=True)
class Conventions:
    """What :func:`check` found; lists run along the noise levels, little noise first.

    ``t``, ``r`` (noise in units of the data), ``error`` with ``se``, ``trivial``, ``ideal``: errors of the predicted
    noise per coordinate; the last level is the one that only serves to compare. ``loss``: the mean of error / trivial
    over the others. ``fits``, ``untrained``, ``better`` (a convention that fits better, or ``None``) with
    ``better_loss``, ``tried`` (every loss by convention), ``words``.
    """

    stated: Convention
    t: list[float]
    r: list[float]
    error: list[float]
    se: list[float]
    trivial: list[float]
    ideal: list[float]
    loss: Estimate
    fits: bool
    untrained: bool
    better: Convention | None
    better_loss: Estimate | None
    words: str
    tried: dict[Convention, float] = field(repr=False)

    def to_dataset(self) -> xarray.Dataset:
        """The curves as a labelled array."""
        import xarray

        names = ("r", "error", "se", "trivial", "ideal")
        curves = {name: ("t", getattr(self, name)) for name in names}
        return xarray.Dataset(curves, {"t": self.t}, {"fits": int(self.fits), "words": self.words})


def check(
    checkpoint: Checkpoint,
    data: Empirical,
    *,
    levels: int = 6,
    images: int = 64,
    seed: int = 0,
    exact: EmpiricalScore | None = None,
) -> Conventions:
    """Whether the network denoises ``data`` under its stated conventions, and which would fit better.

    ``exact`` is the score of the data in the network's pixel units, if it was made already.
    """
    require(levels >= 2 and images >= 4, f"A check needs 2 levels and 4 images or more; got {levels} and {images}.")
    require(
        checkpoint.shape in (None, data.shape),
        f"The data have shape {data.shape}, but {checkpoint.name} takes images of shape {checkpoint.shape}.",
    )
    data = checkpoint.scaled(data)
    require(data.spread > 0, "All points of the data are equal; a check needs at least two different ones.")
    trial = Trial.of(checkpoint, data, levels, images, rng.stream(seed, "check of conventions"))
    stated = Convention(checkpoint.prediction, checkpoint.time, checkpoint.range)
    errors, trivial = trials.errors(checkpoint, trial)[stated.prediction], trial.trivial()
    require(
        bool(errors.isfinite().all()),
        f"{checkpoint.name} returned NaN or infinite values on noisy images; no convention can make a score of that.",
    )
    ideal = trials.ideal(exact or EmpiricalScore(data, checkpoint.process), trial)
    loss = _Tried.of(errors, trivial).loss
    good = _beats(loss) or _mostly(errors, trivial) or bool(errors[:-1].mean() <= NEAR * ideal[:-1].mean())
    found = _search(checkpoint, stated, trial.fewer(FEWER), good)
    better = _best(found, stated)
    fits, untrained = good and better is None, not good and better is None
    gain = None if better is None else found[better].loss
    error = Estimate.of_mean(errors, 1)
    return Conventions(
        stated,
        trial.times.tolist(),
        trial.r.tolist(),
        error.value.tolist(),
        error.se.tolist(),
        trivial.mean(1).tolist(),
        ideal.mean(1).tolist(),
        loss,
        fits,
        untrained,
        better,
        gain,
        _words(checkpoint.name, data, stated, loss, better, gain, _alike(found, stated) if fits else None),
        {name: tried.loss.value for name, tried in found.items()},
    )


@dataclass(frozen=True)
class _Tried:
    """How one convention did."""

    loss: Estimate
    contrast: Tensor  # of each image

    @classmethod
    def of(cls, errors: Tensor, trivial: Tensor) -> _Tried:
        """From errors ``(levels + 1, images)``."""
        errors, trivial = errors.nan_to_num(math.inf, math.inf), trivial.mean(1, keepdim=True)
        loss = Estimate.of_mean((errors / trivial)[:-1].mean(0))
        return cls(loss, (errors / trivial.clamp_min(FLOOR)).mean(0))


def _beats(loss: Estimate) -> bool:
    return loss.value + 2 * loss.se < BEATS


def _mostly(errors: Tensor, trivial: Tensor) -> bool:
    """Whether half of the levels or more are beaten: x0 networks may lose the mean at one level of little noise."""
    each = Estimate.of_mean((errors / trivial.mean(1, keepdim=True))[:-1], 1)
    beaten = each.value + 2 * each.se < BEATS
    return 2 * int(beaten.sum()) >= len(beaten)


def _search(net: Checkpoint, stated: Convention, trial: Trial, good: bool) -> dict[Convention, _Tried]:
    """Every prediction under other times and other ranges, and under both at once if none of these fits."""
    times = list(dict.fromkeys([stated.time, *_other_times(net)]))
    ranges = list(dict.fromkeys([stated.range, *RANGES]))
    pairs = sorted(itertools.product(times, ranges), key=lambda p: (p[0] != stated.time) + (p[1] != stated.range))
    first = len(times) + len(ranges) - 1  # the stated pair, and one change
    found: dict[Convention, _Tried] = {}
    for i, (time, pixels) in enumerate(pairs):
        if i == first and (good or _best(found, stated) is not None):
            break
        found.update(_read_as(net, trial, time, pixels))
    return found


def _read_as(net: Checkpoint, trial: Trial, time: Any, pixels: tuple[float, float]) -> dict[Convention, _Tried]:
    """Every prediction under one time and one range; none if the network cannot be called so."""
    other = replace(net, time=time, range=pixels)
    there = trial.moved(other, net.range)
    try:
        errors = trials.errors(other, there)
    except InputError:
        return {}
    trivial = there.trivial()
    return {Convention(kind, time, pixels): _Tried.of(errors[kind], trivial) for kind in PREDICTIONS}


def _other_times(net: Checkpoint) -> list[str]:
    if isinstance(net.process, DDPM):
        return ["index", "fraction", "sigma", "reversed"]
    return ["fraction", "index:1000", "sigma", *(["reversed"] if net.process.T <= 1 else [])]


def _best(found: dict[Convention, _Tried], stated: Convention) -> Convention | None:
    """The convention of lowest contrast, if it beats the trivial predictor and is clearly better than the stated."""
    own = found[stated].contrast
    rivals = [c for c, tried in found.items() if _beats(tried.loss) and _clearly(tried.contrast, own)]
    return min(rivals, key=lambda c: float(found[c].contrast.mean()), default=None)


def _clearly(rival: Tensor, own: Tensor) -> bool:
    if not own.isfinite().all():
        return bool(rival.isfinite().all())
    gain = Estimate.of_mean(own - rival)
    return bool(rival.mean() < MARGIN * own.mean()) and gain.value > 3 * gain.se


def _alike(found: dict[Convention, _Tried], stated: Convention) -> list[Convention]:
    """Conventions that do about as well as the stated one, but are not the same thing."""
    own = float(found[stated].contrast.mean())
    means = {c: float(tried.contrast.mean()) for c, tried in found.items() if _beats(tried.loss)}
    return [c for c, mean in means.items() if mean < ALIKE * own and abs(mean - own) > 1e-6 * own]


def _words(
    name: str,
    data: Empirical,
    stated: Convention,
    loss: Estimate,
    better: Convention | None,
    gain: Estimate | None,
    alike: list[Convention] | None,
) -> str:
    share = f"its error is {loss.value:.3g} ± {loss.se:.1g} of the trivial predictor's"
    if alike is not None:
        others = "; ".join(map(str, alike[:3]))
        doubt = f" It does about as well with {others}: between these the check cannot tell." if alike else ""
        return f"{name} behaves like a denoiser under the stated convention ({stated}): {share}.{doubt}"
    if better is not None and gain is not None:
        return (
            f"{name} does not fit the stated convention ({stated}): {share}. With {better} it would be "
            f"{gain.value:.3g} ± {gain.se:.1g}: state that, if it is how the network was trained."
        )
    return (
        f"{name} looks untrained: under the stated convention ({stated}) {share}, and no other prediction, time or "
        f"range does clearly better than knowing the mean and variance of the data{_where(data, stated)}. If it was "
        "trained, its betas may be others than stated, or the data."
    )


def _where(data: Empirical, stated: Convention) -> str:
    """A remark on data that do not lie in the stated range."""
    some = data.rows(0, min(data.n, 256))
    low, high = float(some.min()), float(some.max())
    width, stated_width = high - low, stated.range[1] - stated.range[0]
    if max(width / stated_width, stated_width / max(width, 1e-30)) < 1.5 and low > stated.range[0] - 0.1 * stated_width:
        return ""
    return f" (these data lie in [{low:g}, {high:g}], not in the stated range: load them with scale={stated.range})"
