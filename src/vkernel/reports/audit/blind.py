r"""What a network cannot see, and where its samples drift for that.

Let :math:`f(x,t)` be the predicted noise. If a change :math:`g` of the image leaves it as it is, nothing pulls a sample
back along :math:`g`: its brightness, say, is whatever the integration makes of it. Noisy images :math:`x = \alpha x_0 +
\sigma\,\mathrm{noise}` are made brighter (:math:`x + c\mathbf 1`), stronger (:math:`kx`) and moved by a pixel, and

.. math:: R_g = \frac{|f(gx) - f(x)|}{|L(gx - x)|}, \qquad L = \sigma\,(\alpha^2\Sigma + \sigma^2)^{-1},

where L is the best linear prediction of the noise and :math:`\Sigma` the covariance of the data. (The data's own score
would be a poor measure at little noise: it takes every change of a training image for noise, a network that generalises
does not. Along directions in which the data vary L is as small as it should be.) A network is **blind** to g at a level
if the 95 % interval of R over images lies below .05; the alarm is raised if it is blind at half of the levels or more.

With the Jacobian :math:`J = \partial f/\partial x`, the **gain** along u is :math:`|Ju|/|u|`, for u constant, u = x
and random directions; the smallest gain is sought from there within a budget, and is a bound from above
(``vkernel.reports.audit.directions``).

``drift`` compares per-image means and variances of samples with the data's: :math:`z`, the shift of their average
in units of the data's spread over images, and the share of samples outside the data's range. Were samples as good as
fresh data, k of n beyond the largest of N had the chance :math:`\prod_{i<k}(n-i)/(n+N-i)`, and z is Welch's test. The
alarm is raised where one of these four chances is below .01 *and* the drift is large: \|z\| > 1, or a share > .05.
(Good networks at 50 steps are often off by half a spread: that is no alarm, but it is said.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vkernel.adapters.checkpoint import Checkpoint
from vkernel.core import rng
from vkernel.core.errors import require
from vkernel.core.estimate import Estimate, student_quantile
from vkernel.data.empirical import Empirical
from vkernel.reports.audit.directions import Jacobian, Linear, gains, least
from vkernel.reports.audit.noisy_batch import Trial

if TYPE_CHECKING:
    import xarray

__all__ = ["Blind", "Drift", "blind", "drift"]

THRESHOLD = 0.05  # of R
STEP = 0.25  # c in units of the noisy image's spread per coordinate, and k - 1
LEVELS = 4
LARGEST = 4096  # coordinates, for the smallest gain
NUDGE = 1e-2  # of finite differences, in units of the noisy image
CHANCE, FAR, OUTSIDE = 0.01, 1.0, 0.05  # of a drift by accident; the least z and the least share for an alarm


@dataclass(frozen=True)
class Blind:
    """What :func:`blind` found; lists and tensors run along the noise levels, little noise first by default.

    ``response``: R by transformation; ``blind``: the levels at which it is below the threshold; ``gain``: along
    ``constant``, ``image`` and ``random`` directions; ``least``: the smallest gain found, with ``cosine`` to the
    constant image (NaN where it was not sought); ``derivative``: how J was applied.
    """

    t: list[float]
    r: list[float]
    response: dict[str, Estimate]
    blind: dict[str, list[bool]]
    gain: dict[str, Estimate]
    least: list[float]
    cosine: list[float]
    derivative: str
    alarm: bool
    words: str

    def to_dataset(self) -> xarray.Dataset:
        """The curves as a labelled array."""
        import xarray

        curves: dict[str, Any] = {name: ("t", getattr(self, name)) for name in ("r", "least", "cosine")}
        for name, axis, held in (("response", "change", self.response), ("gain", "direction", self.gain)):
            for part, end in (("value", ""), ("low", "_low"), ("high", "_high")):
                curves[name + end] = ((axis, "t"), torch.stack([getattr(e, part) for e in held.values()]).numpy())
        curves["blind"] = (("change", "t"), list(self.blind.values()))
        coords = {"t": self.t, "change": list(self.response), "direction": list(self.gain)}
        return xarray.Dataset(curves, coords, {"alarm": int(self.alarm), "words": self.words})


def blind(
    model: Any, data: Empirical, *, times: Any = None, images: int = 16, seed: int = 0, budget: int = 32
) -> Blind:
    """Which changes of an image the network does not see, and along which directions it responds least.

    ``model`` is a :class:`~vkernel.reports.audit.Checkpoint`, or a score with a process. ``times`` are in its process's
    time; by default four noise levels. ``budget`` bounds the applications of J and of its transpose, at each level
    and each, in search of the smallest gain; with 0 it is not sought, nor beyond 4,096 coordinates.
    """
    require(budget >= 0, f"budget must be 0 or more applications of the Jacobian; got {budget}.")
    net, trial = _prepared(model, data, times, images, seed)
    linear = Linear.of(net.scaled(data), seed)
    generator = rng.stream(seed, "blind directions")
    changes = ["brightness", "contrast", *(["translation"] if trial.x0.ndim > 2 and trial.x0.shape[-1] > 1 else [])]
    ratios: dict[str, list[Tensor]] = {name: [] for name in changes}
    along: dict[str, list[Tensor]] = {name: [] for name in ("constant", "image", "random")}
    smallest: list[float] = []
    cosine: list[float] = []
    how: set[str] = set()
    for x, t in trial.queries():
        level = float(net.process.alpha(t)), float(net.process.sigma(t))
        require(level[1] > 0, f"There is no noise at t = {float(t):g}; blindness is measured on noisy images.")
        scale = math.hypot(level[0] * trial.spread, level[1])
        f = _noise(net, t)
        here = f(x)
        for name in changes:
            delta = _change(name, x, scale)
            moved, expected = f(x + delta) - here, linear(delta, *level)
            ratios[name].append(moved.flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1))
        jacobian = Jacobian.of(f, x, NUDGE * scale, generator)
        for name, found in gains(jacobian, x, generator).items():
            along[name].append(found)
        one = jacobian.at(x[:1])
        gain, cos = least(one, min(budget, one.d), generator) if budget and one.d <= LARGEST else (math.nan, math.nan)
        smallest.append(gain)
        cosine.append(cos)
        how.add(jacobian.how)
    response = {name: Estimate.of_mean(torch.stack(found), 1) for name, found in ratios.items()}
    unseen = {name: (e.high < THRESHOLD).tolist() for name, e in response.items()}
    gain_of = {name: Estimate.of_mean(torch.stack(found), 1) for name, found in along.items()}
    alarm = any(map(_often, unseen.values()))
    words = _words(net.name, response, unseen) + _aside(smallest, cosine, gain_of["random"].value.tolist())
    derivative, levels = " and ".join(sorted(how)), (trial.times.tolist(), trial.r.tolist())
    return Blind(*levels, response, unseen, gain_of, smallest, cosine, derivative, alarm, words)


def _prepared(model: Any, data: Any, times: Any, images: int, seed: int) -> tuple[Checkpoint, Trial]:
    require(isinstance(data, Empirical), f"data must be an Empirical data set, not {type(data).__name__}.")
    require(images >= 4, f"Intervals over images need 4 images or more; got {images}.")
    if not isinstance(model, Checkpoint):
        known = callable(model) and hasattr(model, "process")
        require(known, f"The model must be a Checkpoint or a score with a process, not {type(model).__name__}.")
        ends = torch.iinfo(getattr(torch, data.stored)) if "int" in data.stored else None
        pixels = data.scale or ((ends.min, ends.max) if ends else (-1.0, 1.0))  # the data stay as they are
        model = Checkpoint(model, model.process, "score", lambda t: t, pixels, data.shape, type(model).__name__)
    require(
        model.shape in (None, data.shape),
        f"The data have shape {data.shape}, but {model.name} takes images of shape {model.shape}.",
    )
    scaled = model.scaled(data)
    require(scaled.spread > 0, "All points of the data are equal; blindness needs at least two different ones.")
    if times is not None:
        times = model.at(torch.as_tensor(times, dtype=torch.float64).reshape(-1))
        require(len(times) > 0, "times holds no time; give one or more, or leave it out.")
    generator = rng.stream(seed, "images for blindness")
    trial = Trial.of(model, scaled, LEVELS - 1 if times is None else len(times) - 1, images, generator)
    return model, trial if times is None else replace(trial, times=times)


def _noise(net: Checkpoint, t: Tensor) -> Callable[[Tensor], Tensor]:
    def f(x: Tensor) -> Tensor:
        out = net.noise(x, t)
        require(bool(out.detach().isfinite().all()), f"{net.name} returned NaN or infinite values on noisy images.")
        return out

    return f


def _change(name: str, x: Tensor, scale: float) -> Tensor:
    """gx - x."""
    if name == "brightness":
        return torch.full_like(x, STEP * scale)
    return STEP * x if name == "contrast" else torch.roll(x, 1, -1) - x


def _words(name: str, response: dict[str, Estimate], unseen: dict[str, list[bool]]) -> str:
    parts = []
    for change, levels in unseen.items():
        if any(levels):
            most = float(response[change].high[torch.tensor(levels)].max())
            parts.append(f"{change} at {sum(levels)} of {len(levels)} noise levels (response below {most:.1g})")
    if not any(map(_often, unseen.values())):
        some = ", ".join(f"{change} {float(e.value.min()):.2g}" for change, e in response.items())
        but = f", but not {' nor '.join(parts)}" if parts else ""
        return (
            f"{name} sees {', '.join(unseen)}{but}: its least responses, in units of a linear denoiser's, are {some}."
        )
    return (
        f"{name} is blind to {' and to '.join(parts)}, in units of a linear denoiser's: nothing pulls its samples back "
        "along these; compare their per-image means and variances with the data's."
    )


def _aside(smallest: list[float], cosine: list[float], typical: list[float]) -> str:
    """The smallest gain, in words."""
    found = [(a / max(b, 1e-300), c) for a, b, c in zip(smallest, typical, cosine, strict=True) if not math.isnan(a)]
    if not found:
        return ""
    gain, cos = min(found)
    return f" Its smallest gain found is {gain:.1g} of a random direction's, cosine {cos:.2f} with the constant image."


def _often(levels: list[bool]) -> bool:
    return 2 * sum(levels) >= len(levels)


@dataclass(frozen=True)
class Drift:
    """What ``drift`` found: z of the per-image means and of the variances, and shares outside the data's range.

    ``data_mean`` and ``sample_mean`` hold the average and the spread over images of the per-image means.
    """

    mean: Estimate
    variance: Estimate
    outside_mean: Estimate
    outside_variance: Estimate
    data_mean: tuple[float, float]
    sample_mean: tuple[float, float]
    alarm: bool
    words: str


def drift(samples: Tensor, data: Empirical) -> Drift:
    """Whether per-image means and variances of ``samples (n, *shape)`` are those of the data, in the same units.

    Samples that are not finite count as outside the data's range.
    """
    require(isinstance(data, Empirical), f"data must be an Empirical data set, not {type(data).__name__}.")
    require(isinstance(samples, Tensor), f"Samples must be a tensor (n, *shape), not {type(samples).__name__}.")
    samples = samples.detach().cpu().double()
    shape = tuple(samples.shape[1:]) or (1,)
    require(samples.ndim and shape == data.shape, f"Samples have shape {shape}, the data {data.shape}.")
    require(len(samples) >= 4 and data.n >= 4, f"Drift needs 4 samples and 4 data; got {len(samples)} and {data.n}.")
    kept = (data.weights > 0).nonzero()[:, 0].cpu()
    own = torch.cat([_moments(data.take(some).double().cpu()) for some in kept.split(2048)])
    theirs, weights = _moments(samples.reshape(len(samples), -1)), data.weights.cpu()[kept]
    floor = 1e-6 * max(data.spread / math.sqrt(data.d), 1e-30)
    mean, variance = (_Shift.of(theirs[:, i], own[:, i], weights, floor ** (i + 1)) for i in (0, 1))
    tests = (("mean", mean), ("variance", variance))
    found = [words for name, shift in tests for words in shift.alarms(name)]
    at, over = mean.own, mean.theirs
    told = f"per-image means {over[0]:.3g} ± {over[1]:.2g} (data: {at[0]:.3g} ± {at[1]:.2g})."
    words = (
        f"Samples drift from the data: {'; '.join(found)}. They have {told}"
        if found
        else f"Samples do not leave the data's range: {told}{_shifts(tests)}"
    )
    return Drift(mean.z, variance.z, mean.share, variance.share, at, over, bool(found), words)


def _shifts(tests: Sequence[tuple[str, _Shift]]) -> str:
    """What is shifted beyond doubt, though not far."""
    small = [f"{name} by {s.z.value:.2g}" for name, s in tests if s.chances[0] < CHANCE]
    return f" Shifted, in spreads of the data: {' and '.join(small)}." if small else ""


def _moments(rows: Tensor) -> Tensor:
    """Mean and variance of each image, ``(n, 2)``."""
    return torch.stack([rows.mean(1), rows.var(1, correction=0)], 1)


@dataclass(frozen=True)
class _Shift:
    """One number of each sample against that of each image: the shift, the share outside, and their chances."""

    z: Estimate
    share: Estimate
    chances: tuple[float, float]
    own: tuple[float, float]
    theirs: tuple[float, float]

    @classmethod
    def of(cls, theirs: Tensor, own: Tensor, weights: Tensor, floor: float) -> _Shift:
        from scipy import stats

        n, size = len(theirs), float(1 / weights.square().sum())
        good = theirs[theirs.isfinite()]
        center = float(weights @ own)
        spread = math.sqrt(float(weights @ (own - center).square()) * size / max(size - 1, 1e-9))
        there, width = (float(good.mean()), float(good.std())) if len(good) > 1 else (math.inf, 0.0)
        unit = max(spread, floor)
        se = math.hypot(width / math.sqrt(max(len(good), 1)), spread / math.sqrt(size)) / unit
        z, dof = (there - center) / unit, max(1, int(min(n, size)) - 1)
        half = student_quantile(dof) * se
        chance = 2 * float(stats.t.sf(abs(z) / max(se, 1e-12), dof))
        above, below = int((~(theirs <= own.max())).sum()), int((theirs < own.min()).sum())
        k = above + below
        interval = stats.binomtest(k, n).proportion_ci(0.95, "exact")
        share = Estimate(k / n, math.sqrt(k * (n - k) / n**3), float(interval.low), float(interval.high))
        rare = 2 * min(_beyond(above, n, size), _beyond(below, n, size))
        return cls(Estimate(z, se, z - half, z + half), share, (chance, rare), (center, spread), (there, width))

    def alarms(self, name: str) -> list[str]:
        words = []
        if self.chances[0] < CHANCE and abs(self.z.value) > FAR:
            words.append(f"their average {name} lies {self.z.value:.2g} spreads of the data from the data's")
        if self.chances[1] < CHANCE and self.share.value > OUTSIDE:
            words.append(f"the {name}s of {self.share.value:.1%} of them lie outside the data's range")
        return words


def _beyond(k: int, n: int, size: float) -> float:
    """The chance that k or more of n fresh points lie beyond the largest of ``size``."""
    return math.exp(sum(math.log((n - i) / (n + size - i)) for i in range(k)))
