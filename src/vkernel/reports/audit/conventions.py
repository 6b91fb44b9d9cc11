r"""Does a network denoise under its stated conventions, and better than a linear denoiser?

At each of a few noise levels, images :math:`x_0` of the data and noise give :math:`x = \alpha x_0 + \sigma\,
\mathrm{noise}`, and the error of a predictor is :math:`E|\widehat{\mathrm{noise}} - \mathrm{noise}|^2 / d`. Let
:math:`s^2` be the data's variance per coordinate, m its mean, :math:`r = \sigma/(\alpha s)`. The prediction noise = 0
has the error 1, x0 = m has :math:`1/r^2`, and their best blend, the **trivial** predictor :math:`\sigma(x - \alpha
m)/(\alpha^2s^2+\sigma^2)`, has :math:`1/(1+r^2)`. The **ideal** one is the data's own :math:`E[x_0|x]`.

**Conventions** (:func:`check`). An untrained network is no better than the trivial predictor under any convention (a v
network or an EDM denoiser that returns zero *is* such a blend), and a little training beats it by far. Levels are even
in :math:`\log r` from .1 to 3: at less noise conventions cannot be distinguished, at more the trivial predictor is
nearly perfect. The **loss** is the mean over levels of error / trivial error, with its standard error over images.
Conventions are compared by their **contrast**: the same mean with one more level, at :math:`\sigma/\alpha` of 3 or
more, where noise and v differ, and with trivial errors below .1 counted as .1. The stated convention fits if

* its loss is below .95 by two standard errors, or so is its error at half of the levels, or its error is within a
  tenth of the ideal's; and
* no other convention beats the trivial predictor with a contrast lower by a tenth or more, and by three standard
  errors of the (paired) difference.

Other conventions are evaluated on fewer images and the same noise. The levels follow the pixel range, which changes
:math:`s`. Another prediction reuses the same outputs. Another time or range is tried first; if none fits, both at once.

**Skill** (:func:`skill`). The best linear denoiser, :math:`\widehat{\mathrm{noise}}(x) = \sigma\,(\alpha^2\Sigma +
\sigma^2)^{-1} (x - \alpha m)`, holds all that a mean and a covariance can predict. The ratio q of the network's error
to its error is measured at the same levels on training images; m and :math:`\Sigma` come from *other* training images.
The standard error of q is that of the mean of :math:`(e_i - q\,l_i)/\bar l`. The skill is one less the mean of q over
levels. A network is called **under-trained** if at some level the interval of q lies above 1, or if the interval of its
skill lies below .1. How much skill can be reached depends on the data; no threshold means that training is finished."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vkernel.adapters.weights import reason
from vkernel.core import rng
from vkernel.core.errors import InputError, require
from vkernel.core.estimate import Estimate, ratio_values
from vkernel.data.empirical import Empirical
from vkernel.process import DDPM, Process
from vkernel.reports.audit.levels import dataset, mean_square, variables
from vkernel.score import EmpiricalScore, Score, Wrapped, convert
from vkernel.score.base import check_score
from vkernel.score.wrapped import TimeInput

if TYPE_CHECKING:
    import xarray

READINGS = ("noise", "x0", "v", "flow", "score")  # of one output; an edm network scales its input, and is its own
RANGES = ((-1.0, 1.0), (0.0, 1.0), (-0.5, 0.5), (0.0, 255.0))
LOW, HIGH, FAR = 0.1, 3.0, 3.0  # r of the levels; the least sigma/alpha of the last one
BEATS, MARGIN, NEAR = 0.95, 0.9, 1.1  # of the trivial loss; of the stated contrast; of the ideal error
FEWER = 4  # times fewer images for other conventions
FLOOR = 0.1  # the least trivial error in a contrast
ALIKE = 1.25  # of the stated contrast: the check can hardly distinguish these
BEATEN, LEAST = 1.0, 0.1  # the ratio at one level, and the skill, beyond which a network is under-trained
FITTED = 2048  # images that determine the linear denoiser of the skill


@dataclass(frozen=True)
class Convention:
    """What a network predicts, its time input, and the interval of its pixels."""

    predicts: str
    time: TimeInput
    range: tuple[float, float]

    def __str__(self) -> str:
        time = self.time if isinstance(self.time, str) else "a function"
        return f"predicts {self.predicts}, time {time}, range {self.range[0]:g},{self.range[1]:g}"


Trials = dict[Convention, tuple[Estimate, Tensor]]  # the loss of each, and its contrast on each image


def as_network(model: Score, data: Empirical) -> Wrapped:
    """Return a score with its conventions; without a pixel range it takes that of the data."""
    score = check_score(model, "An audit")
    stated = score.process, "score", "t", None, score.shape, type(score).__name__
    net = score if isinstance(score, Wrapped) else Wrapped(score, *stated)
    ends = torch.iinfo(getattr(torch, data.stored)) if "int" in data.stored else None
    pixels = data.scale or ((ends.min, ends.max) if ends else (-1.0, 1.0))
    return replace(net, range=pixels) if net.range is None else net


@dataclass(frozen=True)
class Conventions:
    """The result of :func:`check`; lists run along the noise levels, ascending; the last is for contrasts only."""

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
    alike: tuple[Convention, ...]  # those that do about as well as the stated one
    data_range: tuple[float, float]

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
    data = net.scaled(data)
    assert net.range is not None
    stated = Convention(net.predicts, net.time, net.range)
    errors, trivial = batch.errors(net)[net.predicts], batch.trivial_errors()
    finite = bool(errors.isfinite().all())
    require(finite, f"{net.name} returned NaN or infinite values on noisy images; no convention makes a score of that.")
    score = exact or EmpiricalScore(data, net.process)
    ideal = batch.errors_of(-sigma * score(x, t) for x, t, _, sigma in batch.queries())
    loss, _ = _trial(errors, trivial)
    each = Estimate[Tensor].of_mean((errors / trivial.mean(1, keepdim=True))[:-1], 1)
    # half of the levels are enough: x0 networks may lose the mean at one level of low noise
    mostly = 2 * int((each.value + 2 * each.se < BEATS).sum()) >= levels
    good = _beats(loss) or mostly or bool(errors[:-1].mean() <= NEAR * ideal[:-1].mean())
    k = max(4, images // FEWER)
    tried = _search(net, stated, replace(batch, x0=batch.x0[:k], noise=batch.noise[:, :k]), good)
    better = _best(tried, stated)
    some, error = data.rows(0, min(data.n, 256)), Estimate[Tensor].of_mean(errors, 1)
    middle = float(tried[stated][1].mean())  # conventions with the same contrast are equivalent
    means = {c: float(contrast.mean()) for c, (rival, contrast) in tried.items() if _beats(rival)}
    alike = tuple(c for c, m in means.items() if m < ALIKE * middle and abs(m - middle) > 1e-6 * middle)
    curves = batch.times, batch.r, error.value, error.se, trivial.mean(1), ideal.mean(1)
    fits, untrained = better is None and good, better is None and not good
    rival, span = None if better is None else tried[better][0], (float(some.min()), float(some.max()))
    t, r, value, se, easy, best = (curve.tolist() for curve in curves)
    return Conventions(stated, t, r, value, se, easy, best, loss, fits, untrained, better, rival, alike, span)


def _trial(errors: Tensor, trivial: Tensor) -> tuple[Estimate, Tensor]:
    """Return the loss and the contrasts of one convention, from errors ``(levels + 1, images)``."""
    errors, trivial = errors.nan_to_num(math.inf, math.inf), trivial.mean(1, keepdim=True)
    return Estimate.of_mean((errors / trivial)[:-1].mean(0)), (errors / trivial.clamp_min(FLOOR)).mean(0)


def _beats(loss: Estimate) -> bool:
    return loss.value + 2 * loss.se < BEATS


def _search(net: Wrapped, stated: Convention, batch: NoisyBatch, good: bool) -> Trials:
    """Every prediction under other times and other ranges, and under both at once if none of these fits."""
    continuous = ["fraction", "index:1000", "sigma", *(["reversed"] if net.process.T <= 1 else [])]
    others = ["index", "fraction", "sigma", "reversed"] if isinstance(net.process, DDPM) else continuous
    times = list(dict.fromkeys([stated.time, *others]))
    ranges = list(dict.fromkeys([stated.range, *RANGES]))
    pairs = sorted(itertools.product(times, ranges), key=lambda p: (p[0] != stated.time) + (p[1] != stated.range))
    first = len(times) + len(ranges) - 1  # the stated pair, and one change
    tried: Trials = {}
    for i, (time, pixels) in enumerate(pairs):
        if i == first and (good or _best(tried, stated) is not None):
            break
        other = replace(net, time=time, range=pixels)
        moved = batch.rescaled(other, stated.range)
        try:
            errors = moved.errors(other)
        except InputError:  # the network cannot be called so
            continue
        trivial = moved.trivial_errors()
        tried |= {Convention(kind, time, pixels): _trial(errors[kind], trivial) for kind in errors}
    return tried


def _best(tried: Trials, stated: Convention) -> Convention | None:
    """Return the convention of lowest contrast, if it beats the trivial predictor and clearly the stated one."""
    _, own = tried[stated]

    def clearly(rival: Tensor) -> bool:
        if not own.isfinite().all():
            return bool(rival.isfinite().all())
        gain = Estimate.of_mean(own - rival)
        return bool(rival.mean() < MARGIN * own.mean()) and gain.value > 3 * gain.se

    rivals = {c: float(contrast.mean()) for c, (loss, contrast) in tried.items() if _beats(loss) and clearly(contrast)}
    return min(rivals, key=lambda c: rivals[c], default=None)


@dataclass(frozen=True)
class Skill:
    """The result of :func:`skill` along the noise levels, in ascending order; ``ratio`` is q = ``error / linear``."""

    t: list[float]
    r: list[float]
    error: Estimate[Tensor]
    linear: Estimate[Tensor]
    ratio: Estimate[Tensor]
    skill: Estimate
    under: bool  # whether the network counts as under-trained

    def to_dataset(self) -> xarray.Dataset:
        """Return the curves as a Dataset along ``t``."""
        curves = variables({"error": self.error, "linear": self.linear, "ratio": self.ratio}, "t")
        return dataset({"r": ("t", self.r)} | curves, {"t": self.t}, {"under": int(self.under)})


def skill(model: Score, data: Empirical, *, levels: int = 6, images: int = 64, seed: int = 0) -> Skill:
    """Measure how much better than a linear denoiser the network is on training images."""
    require(levels >= 1 and images >= 4, f"Skill needs 1 level and 4 images or more; got {levels} and {images}.")
    net = as_network(model, data)
    data = net.scaled(data)
    kept = (data.weights > 0).nonzero().flatten().cpu()
    require(len(kept) >= 8, f"Skill needs 8 training images or more, some for the linear denoiser; got {len(kept)}.")
    generator = rng.stream(seed, "images for skill")
    order = kept[torch.randperm(len(kept), generator=generator)]
    n = min(images, len(order) // 2)
    batch = NoisyBatch.of(net, data.subset(order[:n]), levels, n, generator)
    batch = replace(batch, noise=batch.noise[:-1], times=batch.times[:-1])  # the last level is for conventions
    others = data.subset(order[n : n + FITTED])
    linear, center = LinearDenoiser.of(others, seed, FITTED), others.center.cpu().reshape(data.shape)
    theirs = batch.errors_of(linear(x - alpha * center, alpha, sigma) for x, _, alpha, sigma in batch.queries())
    own = batch.errors(net)[net.predicts]
    require(bool(own.isfinite().all()), f"{net.name} returned NaN or infinite values on noisy images.")
    values = ratio_values(own, theirs)
    ratio, found = Estimate[Tensor].of_mean(values, 1), Estimate[float].of_mean(values.mean(0)).complement()
    under = bool((ratio.low > BEATEN).any()) or found.high < LEAST
    error, base = (Estimate[Tensor].of_mean(e, 1) for e in (own, theirs))
    return Skill(batch.times.tolist(), batch.r.tolist(), error, base, ratio, found, under)


@dataclass(frozen=True)
class LinearDenoiser:
    r"""The best linear prediction of the noise, :math:`\sigma(\alpha^2\Sigma + \sigma^2)^{-1}\delta`."""

    axes: Tensor  # principal directions of some of the data
    variances: Tensor  # along these

    @classmethod
    def of(cls, data: Empirical, seed: int, images: int = 1024) -> LinearDenoiser:
        r"""Estimate :math:`\Sigma` from at most ``images`` of the data; it is zero where these do not vary."""
        chosen, weights = torch.arange(data.n), data.weights.cpu()
        if data.n > images:
            chosen = torch.multinomial(weights, images, True, generator=rng.stream(seed, "covariance"))
            weights = torch.full((images,), 1 / images).double()
        rows = (data.take(chosen).double().cpu() - data.center.cpu()) * weights.sqrt()[:, None]
        few = len(rows) < rows.shape[1]  # the smaller of the two products has the same variances
        variances, axes = torch.linalg.eigh(rows @ rows.mT if few else rows.mT @ rows)
        kept = variances > 1e-12 * variances[-1]
        variances, axes = variances[kept], axes[:, kept].mT
        return cls((axes @ rows) / variances.sqrt()[:, None] if few else axes, variances)

    def __call__(self, delta: Tensor, alpha: float, sigma: float) -> Tensor:
        flat, signal = delta.flatten(1), alpha**2 * self.variances
        kept = (flat @ self.axes.T) * (signal / (signal + sigma**2))
        return ((flat - kept @ self.axes) / sigma).reshape(delta.shape)


@dataclass(frozen=True)
class NoisyBatch:
    """Images, the mean and spread of their data, and for each noise level a time and one noise for each image."""

    process: Process
    x0: Tensor
    mean: Tensor
    spread: float
    noise: Tensor
    times: Tensor

    @classmethod
    def of(cls, net: Wrapped, data: Empirical, levels: int, images: int, generator: torch.Generator) -> NoisyBatch:
        """Draw images and noise for ``levels`` levels even in log r, and for one more at large sigma/alpha."""
        shapes = f"The data have shape {data.shape}, but {net.name} takes images of shape {net.shape}."
        require(net.shape in (None, data.shape), shapes)
        data = net.scaled(data)
        require(data.spread > 0, "All points of the data are equal; at least two different ones are needed.")
        x0 = data[torch.multinomial(data.weights.cpu(), images, replacement=True, generator=generator)].double().cpu()
        noise = torch.randn(levels + 1, *x0.shape, generator=generator, dtype=torch.float64)
        mean, spread = data.center.cpu().reshape(data.shape), data.spread / math.sqrt(data.d)
        return cls(net.process, x0, mean, spread, noise, _times(net, spread, levels))

    def rescaled(self, net: Wrapped, old: tuple[float, float]) -> NoisyBatch:
        """Map the images from the pixel range ``old`` to that of ``net``, at the times of the same r."""
        assert net.range is not None
        low, high = net.range
        factor = (high - low) / (old[1] - old[0])
        x0, mean = (low + (a - old[0]) * factor for a in (self.x0, self.mean))
        spread = self.spread * factor
        return replace(self, x0=x0, mean=mean, spread=spread, times=_times(net, spread, len(self.times) - 1))

    @property
    def r(self) -> Tensor:
        return self.process.sigma(self.times) / (self.process.alpha(self.times) * self.spread)

    def queries(self) -> Iterator[tuple[Tensor, Tensor, float, float]]:
        """Yield (x, t, alpha, sigma) level by level."""
        for t, noise in zip(self.times, self.noise, strict=True):
            alpha, sigma = self.process.alpha(t), self.process.sigma(t)
            yield alpha * self.x0 + sigma * noise, t, float(alpha), float(sigma)

    def errors_of(self, predicted: Iterable[Tensor]) -> Tensor:
        """Return errors ``(levels, images)`` of the noise that was predicted at each level."""
        return torch.stack([mean_square(p - z) for p, z in zip(predicted, self.noise, strict=True)])

    def errors(self, net: Wrapped) -> dict[str, Tensor]:
        """Return errors ``(levels, images)`` by prediction: one pass of the network, its output read as each."""
        outputs = dict.fromkeys(READINGS, self._outputs(net, "noise"))
        if net.predicts == "edm":
            outputs["edm"] = self._outputs(net, "edm")
        found = {}
        for kind, out in outputs.items():
            sign = -1 if kind == "flow" and net.time == "reversed" else 1
            pairs = zip(out, self.queries(), strict=True)
            noise = (convert(sign * o, kind, "noise", x, t, self.process, net.sigma_data) for o, (x, t, *_) in pairs)
            found[kind] = self.errors_of(noise)
        return found

    def _outputs(self, net: Wrapped, predicts: str) -> list[Tensor]:
        raw = replace(net, predicts=predicts)
        try:
            return [raw.output(x.float(), t).double() for x, t, *_ in self.queries()]
        except InputError:
            raise
        except Exception as error:
            failed = f"{net.name} failed on images of shape {tuple(self.x0.shape)} with time {net.time!r}"
            hint = "Other data, or another time (index, fraction, sigma), may fit it."
            raise InputError(f"{failed}: {type(error).__name__}: {reason(error)}. {hint}") from error

    def trivial_errors(self) -> Tensor:
        """Return errors ``(levels, images)`` of the trivial predictor."""
        at = self.queries()
        return self.errors_of(s * (x - a * self.mean) / ((a * self.spread) ** 2 + s**2) for x, _, a, s in at)


def _times(net: Wrapped, spread: float, levels: int) -> Tensor:
    """Return the times of the noise levels and of the one more, as far as the process reaches."""
    process, ratios = net.process, spread * torch.logspace(math.log10(LOW), math.log10(HIGH), levels).double()
    ratios = torch.cat([ratios, torch.tensor([max(FAR, 2 * HIGH * spread)], dtype=torch.float64)])
    ends = net.at(torch.tensor([process.eps, process.T], dtype=torch.float64))
    low, high = (process.sigma(ends) / process.alpha(ends)).tolist()
    return net.at(process.time(ratios.clamp(max(low, 1e-9), high)))
