r"""Does a network denoise the given data under its stated conventions, or better under others?

An untrained network is no better than the trivial predictor (:mod:`vkernel.reports.audit.denoising`) under any
convention (a v network or an EDM denoiser that returns zero *is* such a blend), and a little training beats it by far.
The **loss** is the mean over levels of error / trivial error, with its standard error over images. Readings are
compared by their **contrast**: the same mean with one more level, at :math:`\sigma/\alpha` of 3 or more, where noise
and v differ, and with trivial errors below .1 counted as .1. The **ideal** error is that of the data's own
:math:`E[x_0|x]`. The stated reading fits if

* its loss is below .95 by two standard errors, or so is its error at half of the levels, or its error is within a
  tenth of the ideal's;
* no other convention beats the trivial predictor with a contrast lower by a tenth or more, and by three standard
  errors of the (paired) difference;
* no other orientation of the images, order of channels or inversion of intensities has a contrast lower by 1 % or more
  and by four standard errors: a network denoises the images it was trained on better than their mirror images;
* the stated times are the best (:mod:`vkernel.reports.audit.schedule`). If they are not, other schedules are tried:
  those in the weight file and common ones.

Another reading is **named** only if the network denoises better than a linear denoiser with it, and if its contrast is
within a tenth of the lowest found, that with the best time at each level included: what is better than a bad reading
may be bad too. If the network fits none, wrong data, a wrong schedule and too little training cannot be told apart.
No other times and schedules are tried for a score that is built on data for a process, such as a theory.

Other readings are evaluated on fewer images (turned ones on 32) and the same noise. The levels follow the pixel range,
which changes :math:`s`. Another prediction reuses the same outputs. Another time or range is tried first; if none fits,
both at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

from vkernel.core import rng
from vkernel.core.errors import InputError, require
from vkernel.core.estimate import Estimate
from vkernel.data.empirical import Empirical
from vkernel.process import DDPM
from vkernel.reports.audit.denoising import LinearDenoiser, NoisyBatch, as_network
from vkernel.reports.audit.levels import dataset
from vkernel.reports.audit.schedule import FACTORS, Schedule, candidates, schedule, under
from vkernel.score import DataScore, EmpiricalScore, Score, Wrapped
from vkernel.score.wrapped import RANGES, TimeInput

if TYPE_CHECKING:
    import xarray

BEATS, NEAR = 0.95, 1.1  # of the trivial loss; of the ideal error
MARGIN, SURE = 0.9, 3.0  # of the stated contrast, and standard errors: another convention is better
TIMED, TURNED, SURER = 0.97, 0.99, 4.0  # the same for schedules, and for turned images, as complex as those given
FEWER, LEAST = 4, 8  # times fewer images for other readings, at least these
TURNS = 32  # images that are turned: digits resemble their mirror images, which 8 do not resolve
FLOOR = 0.1  # the least trivial error in a contrast
ALIKE = 1.25  # of the stated contrast: the check can hardly distinguish these
FITTED = 1024  # images that determine the linear denoiser


@dataclass(frozen=True)
class Convention:
    """What a network predicts, its time input, and the interval of its pixels; other betas or images by name."""

    predicts: str
    time: TimeInput
    range: tuple[float, float]
    betas: str = ""
    images: str = ""

    def __str__(self) -> str:
        time = self.time if isinstance(self.time, str) else "a function"
        parts = [f"predicts {self.predicts}, time {time}, range {self.range[0]:.4g},{self.range[1]:.4g}"]
        return ", ".join([*parts, *filter(None, (self.betas and f"betas {self.betas}", self.images))])


@dataclass(frozen=True)
class Trial:
    """The loss of one reading, and its contrast on each image."""

    loss: Estimate
    contrast: Tensor

    @classmethod
    def of(cls, errors: Tensor, trivial: Tensor) -> Trial:
        """Compare errors ``(levels + 1, images)``."""
        errors, trivial = errors.nan_to_num(math.inf, math.inf), trivial.mean(1, keepdim=True)
        return cls(Estimate.of_mean((errors / trivial)[:-1].mean(0)), (errors / trivial.clamp_min(FLOOR)).mean(0))

    @property
    def beats(self) -> bool:
        """Whether the trivial predictor is clearly worse."""
        return self.loss.value + 2 * self.loss.se < BEATS

    def below(self, other: Trial, margin: float, sure: float) -> bool:
        """Whether the contrast is clearly lower than another's."""
        if not other.contrast.isfinite().all():
            return bool(self.contrast.isfinite().all())
        gain = Estimate[float].of_mean(other.contrast - self.contrast)
        return float(self.contrast.mean()) < margin * float(other.contrast.mean()) and gain.value > sure * gain.se


Trials = dict[Convention, Trial]


@dataclass(frozen=True)
class Conventions:
    """The result of :func:`check`; lists run along the noise levels, ascending; the last is for contrasts only.

    ``better`` is a reading that fits instead of the stated one, ``hint`` one that is clearly better, but not good."""

    stated: Convention
    t: list[float]
    r: list[float]
    error: list[float]
    se: list[float]
    trivial: list[float]
    ideal: list[float]
    loss: Estimate
    fits: bool
    untrained: bool  # nothing that was tried beats the trivial predictor
    better: Convention | None
    better_loss: Estimate | None
    alike: tuple[Convention, ...]  # those that do about as well as the stated one
    data_range: tuple[float, float]
    schedule: Schedule
    hint: Convention | None = None
    moved: bool = False  # the betas are not those stated: with other times the network denoises well
    floats: bool = field(default=False, metadata={"files": False})  # whether data_range is as stored

    @property
    def wrong(self) -> bool:
        """Whether something was found that is not as stated."""
        return self.better is not None or self.moved

    @property
    def ranges(self) -> list[tuple[float, float]]:
        """Other pixel ranges with which the network denoises about as well."""
        known = self.stated.predicts, self.stated.time
        return [c.range for c in self.alike if (c.predicts, c.time) == known and c.range != self.stated.range]

    @property
    def misplaced(self) -> bool:
        """Whether the data lie clearly outside the stated range, or fill a range of another width."""
        (low, high), (first, last) = self.data_range, self.stated.range
        width, expected = max(high - low, 1e-30), last - first
        return max(width / expected, expected / width) >= 1.5 or low <= first - 0.1 * expected

    def to_dataset(self) -> xarray.Dataset:
        """Return the curves as a Dataset along ``t``."""
        columns = {"r": self.r, "error": self.error, "se": self.se, "trivial": self.trivial, "ideal": self.ideal}
        return dataset({k: ("t", v) for k, v in columns.items()}, {"t": self.t}, {"fits": int(self.fits)})


def check(
    model: Score, data: Empirical, *, levels: int = 6, images: int = 64, seed: int = 0, exact: Score | None = None
) -> Conventions:
    """Measure whether the network denoises ``data``, with the score ``exact``, as stated, and what would fit better."""
    require(levels >= 2 and images >= 4, f"A check needs 2 levels and 4 images or more; got {levels} and {images}.")
    net = as_network(model, data)
    batch = NoisyBatch.of(net, data, levels, images, rng.stream(seed, "check of conventions"))
    floats, data = "int" not in data.stored, net.scaled(data)
    assert net.range is not None
    stated = Convention(net.predicts, net.time, net.range)
    errors, trivial = batch.errors(net, [net.predicts])[net.predicts], batch.trivial_errors()
    finite = bool(errors.isfinite().all())
    require(finite, f"{net.name} returned NaN or infinite values on noisy images; no convention makes a score of that.")
    score = exact or EmpiricalScore(data, net.process)
    ideal = batch.errors_of(-sigma * score(x, t) for x, t, _, sigma in batch.queries())
    loss = Trial.of(errors, trivial).loss
    each = Estimate[Tensor].of_mean((errors / trivial.mean(1, keepdim=True))[:-1], 1)
    # half of the levels are enough: x0 networks may lose the mean at one level of low noise
    mostly = 2 * int((each.value + 2 * each.se < BEATS).sum()) >= levels
    near = bool(errors[:-1].mean() <= NEAR * ideal[:-1].mean())
    good = Trial.of(errors, trivial).beats or mostly or near

    few = batch.first(min(images, max(LEAST, images // FEWER)))
    some = data.rows(0, min(data.n, 256))
    span = (float(some.min()), float(some.max()))
    turned = batch.first(min(images, TURNS))
    as_given = Trial.of(errors[:, : len(turned.x0)], turned.trivial_errors())
    # the times of a score that was built for this process are right, even if it smooths so much that others fit better
    timed = isinstance(net.net, DataScore) and net.net.process == net.process and net.time == "t"
    tried = _search(net, stated, few, good) | _of_images(net, stated, turned, span if floats else None)
    tried = {c: trial for c, trial in tried.items() if c.time == stated.time or not timed}
    own, times = tried[stated], schedule(net, few, () if timed else FACTORS)
    best_times = Trial.of(times.errors, few.trivial_errors())
    if not (good and times.fits) and not timed:
        tried |= _of_schedules(net, stated, few)
    rest = few.others(data)
    linear, center = LinearDenoiser.of(rest, seed, FITTED), rest.center.cpu().reshape(data.shape)
    easy = few.errors_of(linear(x - a * center, a, s) for x, _, a, s in few.queries())
    least = Trial.of(easy, few.trivial_errors()).loss.value
    others = ((c, trial, as_given if c.images else own) for c, trial in tried.items() if c != stated)
    rivals = {c: trial for c, trial, given in others if trial.beats and _clearly(c, trial, given)}
    lowest = min((float(t.contrast.mean()) for t in (*rivals.values(), best_times)), default=math.inf)
    close = {c: t for c, t in rivals.items() if float(t.contrast.mean()) <= NEAR * lowest and t.loss.value < least}
    better, hint = (min(r, key=lambda c: float(r[c].contrast.mean()), default=None) for r in (close, rivals))
    moved = better is None and not times.fits and best_times.loss.value < least and best_times.beats
    fits = good and hint is None and times.fits
    untrained = not good and hint is None and times.fits

    error, middle = Estimate[Tensor].of_mean(errors, 1), float(own.contrast.mean())
    means = {c: float(t.contrast.mean()) for c, t in tried.items() if t.beats and not (c.betas or c.images)}
    # conventions with the same contrast are equivalent
    alike = tuple(c for c, m in means.items() if m < ALIKE * middle and abs(m - middle) > 1e-6 * middle)
    curves = batch.times, batch.r, error.value, error.se, trivial.mean(1), ideal.mean(1)
    t, r, value, se, easiest, best = (curve.tolist() for curve in curves)
    named = None if better is None else tried[better].loss
    found = (loss, fits, untrained, better, named, alike, span, times)
    return Conventions(stated, t, r, value, se, easiest, best, *found, None if better else hint, moved, floats)


def _clearly(convention: Convention, trial: Trial, own: Trial) -> bool:
    """Whether a trial is clearly better than the stated one: images and schedules of equal complexity need less."""
    if convention.images or convention.betas:
        return trial.below(own, TURNED if convention.images else TIMED, SURER)
    return trial.below(own, MARGIN, SURE)


def _search(net: Wrapped, stated: Convention, batch: NoisyBatch, good: bool) -> Trials:
    """Every prediction under other times and other ranges, and under both at once if none of these fits."""
    continuous = ["fraction", "index:1000", "sigma", "c_noise", *(["reversed"] if net.process.T <= 1 else [])]
    others = ["index", "fraction", "sigma", "reversed"] if isinstance(net.process, DDPM) else continuous
    times = list(dict.fromkeys([stated.time, *others]))
    ranges = list(dict.fromkeys([stated.range, *RANGES, _standardised(stated, batch)]))
    pairs = sorted(itertools.product(times, ranges), key=lambda p: (p[0] != stated.time) + (p[1] != stated.range))
    first = len(times) + len(ranges) - 1  # the stated pair, and one change
    tried: Trials = {}
    for i, (time, pixels) in enumerate(pairs):
        if i == first and (good or any(t.beats and t.below(tried[stated], MARGIN, SURE) for t in tried.values())):
            break
        other = replace(net, time=time, range=pixels)
        moved = batch.rescaled(other, stated.range)
        try:
            errors = moved.errors(other)
        except InputError:  # the network cannot be called so
            continue
        trivial = moved.trivial_errors()
        tried |= {Convention(kind, time, pixels): Trial.of(errors[kind], trivial) for kind in errors}
    return tried


def _standardised(stated: Convention, batch: NoisyBatch) -> tuple[float, float]:
    """Return the range of pixels with mean 0 and variance 1 over all images."""
    mean = float(batch.mean.mean())
    spread = math.sqrt(float((batch.mean - mean).square().mean()) + batch.spread**2)
    return (stated.range[0] - mean) / spread, (stated.range[1] - mean) / spread


def _of_images(net: Wrapped, stated: Convention, batch: NoisyBatch, span: tuple[float, float] | None) -> Trials:
    """Other images under the stated convention; ``span`` is the range of data that are stored as floats."""
    tried: Trials = {}
    for name, moved in _images(net, stated, batch, span):
        errors = moved.errors(net, [net.predicts])[net.predicts]
        tried[replace(stated, images=name)] = Trial.of(errors, moved.trivial_errors())
    return tried


def _images(
    net: Wrapped, stated: Convention, batch: NoisyBatch, span: tuple[float, float] | None
) -> Iterator[tuple[str, NoisyBatch]]:
    """Yield the batch with its images turned, inverted, with channels in the opposite order, or mapped from a range."""
    shape = batch.x0.shape[1:]
    if len(shape) >= 2:
        turns: dict[str, tuple[bool, tuple[int, ...]]] = {"images flipped left to right": (False, (-1,))}
        turns |= {"images flipped upside down": (False, (-2,)), "images turned by 180 degrees": (False, (-1, -2))}
        if shape[-1] == shape[-2]:
            turns |= {"transposed images": (True, ()), "images transposed along the other diagonal": (True, (-1, -2))}
            turns |= {"images turned by 90 degrees": (True, (-2,)), "images turned by -90 degrees": (True, (-1,))}
        for name, (swapped, axes) in turns.items():
            yield name, batch.mapped(swapped, axes)
    if len(shape) == 3 and shape[0] == 3:
        yield "channels in the opposite order", batch.mapped(False, (-3,))
    low, high = span or stated.range
    if len(shape) >= 2:
        yield "inverted intensities", batch.affine(-1.0, low + high)
    first, last = stated.range
    for ends in dict.fromkeys([*RANGES, span] if span else []):
        factor = (last - first) / (ends[1] - ends[0])
        if ends != stated.range and math.isfinite(factor):
            moved = batch.affine(factor, first - factor * ends[0])
            yield f"data range {ends[0]:.4g},{ends[1]:.4g}", moved.at_levels(net)


def _of_schedules(net: Wrapped, stated: Convention, batch: NoisyBatch) -> Trials:
    """Other schedules under the stated convention: all, since the first that is better need not be the best."""
    tried: Trials = {}
    for name, process in candidates(net):
        try:
            other, moved = under(net, process, batch)
            errors = moved.errors(other, [net.predicts])[net.predicts]
        except InputError:  # the network has no such index
            continue
        tried[replace(stated, betas=name)] = Trial.of(errors, moved.trivial_errors())
    return tried
