r"""What is measured at every evaluation, fixed for a run (docs/theory.md, §10.9).

**Noised images.** I training images and I held-out images :math:`x_0`, and for each image and each of L noise levels
one noise: :math:`x = \alpha_l x_0 + \sigma_l \epsilon`. Levels are even in :math:`\log(\sigma/\alpha)` from .1 s to
3 s, as far as the process reaches, s² the variance of a coordinate of the data. With D the denoiser of the network,

.. math:: e_i = \frac1L \sum_l \frac{|D(x_{il}) - x_{0,i}|^2}{d\, g_l} ,

:math:`g_l` the error of the Gaussian theory of the training set on held-out images: a network with e = 1 is as good as
the best linear denoiser. On the first J images of each set D is compared with the ideal denoiser m (of the image's
class, for a class-conditional network) and with that of the Gaussian theory: :math:`E|D - m|^2/d`,
:math:`E|D - D_G|^2/d`.

**Samples.** N samples of the probability flow, by ``steps`` multistep steps from :math:`\sigma/\alpha` = 40 s (or T),
where the start :math:`\alpha \bar y + \sigma\epsilon` is fixed, to .03 s, where D is the sample. They are compared
with the training set, and with held-out images in the same way (:mod:`vkernel.metrics.copies`).

**Shift.** A Gaussian denoiser is fitted to as many training images as held-out ones, all together. If held-out images
are a random split, the two sets are exchangeable, and its errors on them have one law (Welch's test, two-sided).

Images are read from the data when they are used, and a noise belongs to (seed, set, image): the memory that is held is
that of m and :math:`D_G` on J images."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.checks import check_positive, check_whole
from vkernel.core.errors import InputError, require
from vkernel.core.estimate import Estimate, welch_p
from vkernel.data import Empirical
from vkernel.metrics.copies import Reference
from vkernel.process import Anisotropic, Process
from vkernel.sample.ode import pf_ode
from vkernel.score import EmpiricalScore, Score, Wrapped
from vkernel.score.conversions import convert
from vkernel.theories.gaussian import Gaussian

LOW, HIGH, COUNT = 0.1, 3.0, 6  # the default levels, sigma/(alpha s)
START, END = 40.0, 0.03  # of s: where the sampler starts and ends
COMPARED, HELD = 64, 1 << 28  # images that are compared with m and D_G, and the bytes of these
REFERENCE = 512  # held-out images that are compared with the training set
FITTED, WORK = 512, 5e10  # images of each set in the test for a shift; products of a Gaussian fit
NUMBERS = 1 << 18  # numbers of x in one call of the network
READINGS = ("noise", "x0", "v", "flow", "score")
SETS = ("train", "test")
Levels = int | Sequence[float] | None  # their number, or values of sigma/alpha
Model = Callable[[Tensor | None], Score]  # the network as a score on a batch with these labels


@dataclass(frozen=True)
class Errors:
    """Errors on fixed noised images: ``images`` are e_i ``(I,)`` of each set, ``levels`` the means of ``|D - x0|²/d``,
    and ``ideal`` and ``gaussian`` the distances from m and D_G, at each level ``(L,)``. ``readings`` are mean errors on
    training images of the same outputs read as other predictions, in units of the Gaussian theory's; ``squares (I, L)``
    are all ``|D - x0|²/d``."""

    images: dict[str, Tensor]
    levels: dict[str, Estimate[Tensor]]
    ideal: dict[str, Estimate[Tensor]]
    gaussian: dict[str, Estimate[Tensor]]
    readings: dict[str, float]
    squares: dict[str, Tensor]

    @property
    def finite(self) -> bool:
        """Whether all errors are finite."""
        return all(bool(e.isfinite().all()) for e in self.images.values())


@dataclass(frozen=True, eq=False)
class Images:
    """Images ``index`` of a data set, noised at the times ``t (L,)``; ``labels (I,)`` are their classes. The noise of
    an image belongs to (seed, name, its number)."""

    data: Empirical
    index: Tensor
    labels: Tensor | None
    process: Process
    t: Tensor
    seed: int
    name: str

    def __len__(self) -> int:
        return len(self.index)

    def parts(
        self, size: int, stop: int | None = None
    ) -> Iterator[tuple[slice, Tensor, Tensor, Tensor, Tensor | None]]:
        """Yield images, by up to ``size``: their numbers, x0 ``(k, *shape)``, and for all levels of each in turn x
        ``(k L, *shape)``, t ``(k L,)`` and labels ``(k L,)``."""
        count, L = len(self) if stop is None else min(stop, len(self)), len(self.t)
        full = (1, L) + (1,) * len(self.data.shape)
        alpha, sigma = (f(self.t).float().reshape(full) for f in (self.process.base.alpha, self.process.base.sigma))
        for start in range(0, count, size):
            part = slice(start, min(start + size, count))
            x0 = self.data[self.index[part]].float().cpu()
            shape, names = (L, *self.data.shape), range(part.start, part.stop)
            streams = (rng.stream(self.seed, f"monitor, noise of {self.name}", i) for i in names)
            noise = torch.stack([torch.randn(shape, generator=g, dtype=torch.float32, device="cpu") for g in streams])
            x = alpha * x0[:, None] + sigma * self.process.unwhiten(noise)
            labels = None if self.labels is None else self.labels[part].repeat_interleave(L)
            yield part, x0, x.flatten(0, 1), self.t.repeat(len(x0)), labels


class Probe:
    """The fixed images, noises, starts and references of a run; see the module."""

    def __init__(
        self,
        data: Empirical,
        test: Empirical,
        process: Process,
        *,
        labels: Tensor | None = None,
        test_labels: Tensor | None = None,
        images: int = 256,
        samples: int = 128,
        levels: Levels = None,
        steps: int = 18,
        seed: int = 0,
        at: Callable[[Tensor], Tensor] = lambda t: t,
    ) -> None:
        check_whole(images, "images", 2)
        self.count, self.steps, self.seed = (
            check_whole(samples, "samples", 0),
            check_whole(steps, "sampler_steps"),
            seed,
        )
        self.data, self.test, self.process, self.shape, self.d = data, test, process, data.shape, data.d
        self.size = data.spread / math.sqrt(data.d)
        require(self.size > 0, "All training images are equal; there is nothing to learn from them.")
        self.t = at(_times(process, self.size, levels)).unique()
        self.ratio = process.base.sigma(self.t) / process.base.alpha(self.t)
        self.sets: dict[str, Images] = {}
        for name, points, own in (("train", data, labels), ("test", test, test_labels)):
            index = _different(points, images, rng.stream(seed, f"monitor, {name} images"))
            classes = None if own is None else own[index]
            self.sets[name] = Images(points, index, classes, process, self.t, seed, name)
        known = set() if labels is None else set(labels.unique().tolist())
        if labels is not None and test_labels is not None:
            new = sorted(set(test_labels.unique().tolist()) - known)
            require(not new, f"Held-out images have the class {new[:1]}, of which there is no training image.")
        chosen = data.choose(self.count, rng.stream(seed, "monitor, labels of samples")) if self.count else None
        self.sample_labels = None if labels is None or chosen is None else _filled(labels[chosen], self.count)
        self.compared = int(min(COMPARED, max(8, HELD // (16 * len(self.t) * self.d))))
        self.gaussian_images = _affordable(data.n, self.d)
        self._fix(labels)
        self.shift = self._shift()
        start = time.monotonic()
        self.reference = Reference(data, test, "pixels", REFERENCE, seed) if self.count else None
        compared = 1 if self.reference is None else len(self.reference.own[0])
        self.search = (time.monotonic() - start) * self.count / compared  # seconds that samples may take to compare

    def _fix(self, labels: Tensor | None) -> None:
        """Compute m and the Gaussian theory's denoised images, and the normaliser of each level."""
        some = rng.stream(self.seed, "monitor, images of the Gaussian theory")
        part = (
            self.data
            if self.gaussian_images == self.data.n
            else self.data.subset(self.data.choose(self.gaussian_images, some, distinct=True))
        )
        theory, L = Gaussian(part, self.process), len(self.t)

        @functools.lru_cache(maxsize=4)
        def exact(label: int | None) -> EmpiricalScore:
            if label is None or labels is None:
                return EmpiricalScore(self.data, self.process)
            return EmpiricalScore(self.data.subset((labels == label).nonzero().flatten()), self.process)

        self.fixed: dict[str, dict[str, Tensor]] = {}
        self.ideal_errors: dict[str, list[float]] = {}
        self.gaussian_errors: dict[str, list[float]] = {}
        for name, images in self.sets.items():
            shape = (min(self.compared, len(images)), L, *self.shape)
            held = {kind: torch.empty(shape) for kind in ("ideal", "gaussian")}
            errors = {kind: torch.empty(shape[:2], dtype=torch.float64) for kind in held}
            for one, x0, x, t, own in images.parts(max(1, NUMBERS // (L * self.d)), self.compared):
                held["gaussian"][one] = theory.denoise(x, t).reshape(-1, *shape[1:])
                ideal = torch.empty_like(x)
                for label in (None,) if own is None else own.unique().tolist():
                    rows = slice(None) if own is None else own == label
                    ideal[rows] = exact(label).denoise(x[rows], t[rows])
                held["ideal"][one] = ideal.reshape(-1, *shape[1:])
                for kind, denoised in held.items():
                    errors[kind][one] = _square(denoised[one] - x0[:, None])
            self.fixed[name] = held
            self.ideal_errors[name] = errors["ideal"].mean(0).tolist()
            self.gaussian_errors[name] = errors["gaussian"].mean(0).tolist()
        self.normaliser = torch.tensor(self.gaussian_errors["test"], dtype=torch.float64).clamp_min(1e-12)

    def zeros(self, predicts: str) -> dict[str, float]:
        """Return the errors that ``readings`` of an output of zeros have."""
        if predicts == "edm" or isinstance(self.process, Anisotropic):
            return {}
        L = len(self.t)
        _, x0, x, t, _ = next(self.sets["train"].parts(max(1, NUMBERS // (L * self.d))))
        found = {name: convert(torch.zeros_like(x), name, "x0", x, t, self.process) for name in READINGS}
        away = {name: out.reshape(len(x0), L, *self.shape) - x0[:, None] for name, out in found.items()}
        return {name: float((_square(a) / self.normaliser).mean()) for name, a in away.items()}

    def _shift(self) -> float:
        """Return the p value of the test for a shift between training and held-out images."""
        count = min(FITTED, self.data.n, self.test.n, max(2, int(math.sqrt(WORK / 8 / self.d))))
        parts = []
        for name, points in zip(SETS, (self.data, self.test), strict=True):
            index = _different(points, count, rng.stream(self.seed, f"monitor, shift of {name} images"))
            named = f"{name} images that test for a shift"
            parts.append(Images(points, index, None, self.process, self.t, self.seed, named))
        pool = torch.cat([p.data[p.index].float().cpu() for p in parts])
        theory, L = Gaussian(pool, self.process), len(self.t)
        errors = []
        for images in parts:
            found = []
            for _, x0, x, t, _ in images.parts(max(1, NUMBERS // (L * self.d))):
                away = theory.denoise(x, t).reshape(len(x0), L, *self.shape) - x0[:, None]
                found.append((_square(away) / self.normaliser).mean(1))
            errors.append(torch.cat(found))
        above = welch_p(*errors)
        return min(1.0, 2 * min(above, 1 - above))

    def errors(self, model: Model, device: torch.device, numbers: int = NUMBERS) -> Errors:
        """Measure the errors of a network; up to ``numbers`` numbers of x are in one call of it."""
        L, step = len(self.t), max(1, numbers // (len(self.t) * self.d))
        squares = {name: torch.empty(len(images), L, dtype=torch.float64) for name, images in self.sets.items()}
        away = {
            kind: {name: torch.empty(held[kind].shape[:2], dtype=torch.float64) for name, held in self.fixed.items()}
            for kind in ("ideal", "gaussian")
        }
        readings: dict[str, list[Tensor]] = {}
        for name, images in self.sets.items():
            for part, x0, x, t, labels in images.parts(step):
                denoised, others = self._denoised(model(labels), x, t, device, name == "train" and part.start == 0)
                denoised = denoised.reshape(len(x0), L, *self.shape)
                squares[name][part] = _square(denoised - x0[:, None])
                for reading, other in others.items():
                    found = _square(other.reshape(denoised.shape) - x0[:, None]) / self.normaliser
                    readings.setdefault(reading, []).append(found.mean())
                few = slice(part.start, min(part.stop, self.compared))
                for kind in away if few.start < few.stop else ():
                    held = self.fixed[name][kind][few]
                    away[kind][name][few] = _square(denoised[: len(held)] - held)
        e = {name: (found / self.normaliser).mean(1) for name, found in squares.items()}
        means = {name: Estimate[Tensor].of_mean(found) for name, found in squares.items()}
        distances = [{name: Estimate[Tensor].of_mean(v) for name, v in found.items()} for found in away.values()]
        read = {name: float(torch.stack(held).mean()) for name, held in readings.items()}
        return Errors(e, means, distances[0], distances[1], read, squares)

    def _denoised(
        self, score: Score, x: Tensor, t: Tensor, device: torch.device, others: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return D, and with ``others`` the same outputs read as other predictions, in float32 on the CPU."""
        rows, t = x.to(device), t.to(device)
        if not isinstance(score, Wrapped) or score.predicts == "edm" or isinstance(self.process, Anisotropic):
            return score.denoise(rows, t).float().cpu(), {}
        out, given = score.output(rows, t), (self.process, score.sigma_data)
        found = {
            reading: convert(out, reading, "x0", rows, t, *given).float().cpu()
            for reading in READINGS
            if others or reading == score.predicts
        }
        return found[score.predicts], found if others else {}

    def samples(self, model: Model, device: torch.device, numbers: int = NUMBERS) -> Tensor:
        """Return N samples of the network ``(N, *shape)``, on the CPU."""
        shape, source, times = (self.count, *self.shape), rng.stream(self.seed, "monitor, starts"), self._times
        noise = self.process.unwhiten(torch.randn(shape, generator=source, dtype=torch.float32, device="cpu"))
        alpha, sigma = (float(f(times[0])) for f in (self.process.base.alpha, self.process.base.sigma))
        starts = alpha * self.data.center.reshape(self.shape).float().cpu() + sigma * noise
        step, found = max(1, numbers // self.d), []
        for start in range(0, self.count, step):
            part = slice(start, start + step)
            score = model(None if self.sample_labels is None else self.sample_labels[part])
            x = pf_ode(score, starts[part].to(device), steps=times, method="multistep", allow_nan=True)
            found.append(score.denoise(x, float(times[-1])).float().cpu())
        return torch.cat(found)

    @functools.cached_property
    def _times(self) -> Tensor:
        """The times of the sampler, even in log(sigma/alpha)."""
        first, last = self.process.ratios
        start = min(START * self.size, last)
        end = min(max(END * self.size, first), start / 2)
        ratio = torch.logspace(math.log10(start), math.log10(end), self.steps + 1, dtype=torch.float64)
        return self.process.base.time(ratio.clamp(end, start))

    def nearest(self, samples: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the ratio of each sample's distances to its two nearest training images ``(N,)``, NaN if it diverged,
        and the index of the nearest; searched on ``device`` if the data take little of its free memory."""
        assert self.reference is not None
        distance, index = self.reference.to(_place(self.data, device)).nearest(samples)
        finite = distance.isfinite().all(1)
        return torch.where(finite, distance[:, 0] / distance[:, 1], math.nan), index[:, 0]

    @property
    def held_ratios(self) -> Tensor:
        """The same ratios of held-out images."""
        near = torch.ones(0, 2, dtype=torch.float64) if self.reference is None else self.reference.own[0]
        return near[:, 0] / near[:, 1]


def _different(points: Empirical, count: int, generator: torch.Generator) -> Tensor:
    """Return indices of ``count`` different images, equally likely: the tests compare them with a random split, and an
    image that the training set repeats would be there more than once."""
    merged, merge = points.merged()
    first = torch.full((merged.n,), points.n).scatter_reduce(0, merge.cpu(), torch.arange(points.n), "amin")
    return first[merged.choose(count, generator, distinct=True)]


def _times(process: Process, size: float, levels: Levels) -> Tensor:
    """Return the times of the noise levels."""
    first, last = process.ratios
    if levels is None or isinstance(levels, int):
        count = COUNT if levels is None else check_whole(levels, "levels, their number,")
        low, high = max(LOW * size, first), min(HIGH * size, last)
        require(0 < low < high, f"{process!r} does not reach the scale of the data, {size:.3g} a coordinate.")
        ratio = torch.logspace(math.log10(low), math.log10(high), count, dtype=torch.float64).clamp(low, high)
        return process.base.time(ratio)
    try:
        ratio = torch.tensor([check_positive(float(v), "A noise level") for v in levels], dtype=torch.float64)
    except (TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"levels must be a number of levels, or values of sigma/alpha; got {levels!r}.") from None
    require(len(ratio), "levels is empty; one noise level or more is needed.")
    return process.base.time(ratio)


def _square(a: Tensor) -> Tensor:
    """Return the mean square over coordinates of ``a (k, L, *shape)``, in float64."""
    return a.double().square().flatten(2).mean(2)


def _affordable(n: int, d: int) -> int:
    """Return how many of n images a Gaussian theory is fitted to, so that its products stay bounded."""
    if n * d * min(n, d) <= WORK:
        return n
    return min(n, max(2, int(math.sqrt(WORK / d)), int(WORK / d**2)))


def _filled(labels: Tensor, count: int) -> Tensor:
    """Return ``count`` labels; those that are there are repeated if they are fewer."""
    return labels.repeat(-(-count // len(labels)))[:count]


def _place(data: Empirical, device: torch.device) -> torch.device:
    """Return where neighbours are searched: on the device if the data take less than an eighth of what is free."""
    if device.type != "cuda" or not data.in_memory or data.storage is None:
        return data.device
    free = torch.cuda.mem_get_info(device)[0]
    return device if 8 * data.storage.nbytes < free else data.device
