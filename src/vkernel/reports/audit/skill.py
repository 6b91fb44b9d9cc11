r"""How far has training come? The network against the best linear denoiser.

Everything that a mean and a covariance can tell about an image is in the linear denoiser

.. math:: \widehat{\mathrm{noise}}(x) = \sigma\,(\alpha^2\Sigma + \sigma^2)^{-1} (x - \alpha m) ,

which takes no training but counting. A network has learned something about images where it beats this one. The ratio

.. math:: q = \frac{E\,|\widehat{\mathrm{noise}}_{net} - \mathrm{noise}|^2}
          {E\,|\widehat{\mathrm{noise}}_{lin} - \mathrm{noise}|^2}

is measured at noise levels r = σ/(α s) from .1 to 3, s² the data's variance per coordinate, on training images; m and Σ
come from *other* training images, so that the linear denoiser knows none of those it is measured on. The standard error
of a ratio of two means over the same images is that of the mean of :math:`(e_i - q\,l_i)/\bar l`.

The **skill** is one less the mean ratio over levels. A network is called **under-trained** if at some level the
interval of q lies above 1, where counting beats it, or if its skill is below .1 beyond doubt. (At more noise than this
every denoiser is all but linear, and rounding decides.) Networks that are trained better rank higher; how much can be
reached depends on the data, and no number here says that training was finished.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vkernel.adapters.checkpoint import Checkpoint
from vkernel.core import rng
from vkernel.core.errors import require
from vkernel.core.estimate import Estimate, student_quantile
from vkernel.data.empirical import Empirical
from vkernel.reports.audit import noisy_batch as trials
from vkernel.reports.audit.directions import Linear
from vkernel.reports.audit.noisy_batch import Trial

if TYPE_CHECKING:
    import xarray

__all__ = ["Skill", "skill"]

BEATEN, LEAST = 1.0, 0.1  # the ratio at one level, and the skill, beyond which a network counts as under-trained
FITTED = 2048  # images that make the linear denoiser


@dataclass(frozen=True)
class Skill:
    """What :func:`skill` found; tensors and lists run along the noise levels, little noise first.

    ``error`` and ``linear``: errors of the predicted noise per coordinate; ``ratio``: their quotient; ``skill``: one
    less its mean over levels.
    """

    t: list[float]
    r: list[float]
    error: Estimate
    linear: Estimate
    ratio: Estimate
    skill: Estimate
    under: bool
    words: str

    def to_dataset(self) -> xarray.Dataset:
        """The curves as a labelled array."""
        import xarray

        curves: dict[str, Any] = {"r": ("t", self.r)}
        for name in ("error", "linear", "ratio"):
            held = getattr(self, name)
            for part, end in (("value", ""), ("se", "_se"), ("low", "_low"), ("high", "_high")):
                curves[name + end] = ("t", getattr(held, part).tolist())
        return xarray.Dataset(curves, {"t": self.t}, {"under": int(self.under), "words": self.words})


def skill(net: Checkpoint, data: Empirical, *, levels: int = 6, images: int = 64, seed: int = 0) -> Skill:
    """How much better than a linear denoiser the network is on training images."""
    require(levels >= 1 and images >= 4, f"Skill needs 1 level and 4 images or more; got {levels} and {images}.")
    data = net.scaled(data)
    kept = (data.weights > 0).nonzero().flatten().cpu()
    require(len(kept) >= 8, f"Skill needs 8 training images or more, some for the linear denoiser; got {len(kept)}.")
    require(data.spread > 0, "All points of the data are equal; skill needs at least two different ones.")
    generator = rng.stream(seed, "images for skill")
    order = kept[torch.randperm(len(kept), generator=generator)]
    images = min(images, len(order) // 2)
    trial = Trial.of(net, data.subset(order[:images]), levels, images, generator)
    trial = trial.without_last()
    others = data.subset(order[images : images + FITTED])
    linear = Linear.of(others, seed, FITTED)
    guesses = []
    for x, t in trial.queries():
        alpha, sigma = float(net.process.alpha(t)), float(net.process.sigma(t))
        guesses.append(linear(x - alpha * others.center.cpu().reshape(data.shape), alpha, sigma))
    theirs = (torch.stack(guesses) - trial.noise).square().flatten(2).mean(-1)
    own = trials.errors(net, trial)[net.prediction]
    require(bool(own.isfinite().all()), f"{net.name} returned NaN or infinite values on noisy images.")
    ratio, overall = _ratio(own, theirs)
    found = Estimate(1 - overall.value, overall.se, 1 - overall.high, 1 - overall.low)
    worst = int(ratio.value.argmax())
    under = bool((ratio.low > BEATEN).any()) or found.high < LEAST
    error, best = Estimate.of_mean(own, 1), Estimate.of_mean(theirs, 1)
    words = _words(net.name, found, ratio, worst, trial.r[worst], under)
    return Skill(trial.times.tolist(), trial.r.tolist(), error, best, ratio, found, under, words)


def _ratio(own: Tensor, theirs: Tensor) -> tuple[Estimate, Estimate]:
    """Ratios of means at each level, and their mean over levels, from errors ``(levels, images)``."""
    base = theirs.mean(1, keepdim=True).clamp_min(1e-300)
    value = own.mean(1, keepdim=True) / base
    influence = (own - value * theirs) / base
    n = own.shape[1]
    half = student_quantile(n - 1)
    se, value = influence.std(1) / n**0.5, value[:, 0]
    mean, error = float(value.mean()), float(influence.mean(0).std() / n**0.5)
    ends = (mean - half * error, mean + half * error)
    return Estimate(value, se, value - half * se, value + half * se), Estimate(mean, error, *ends)


def _words(name: str, found: Estimate, ratio: Estimate, worst: int, r: Tensor, under: bool) -> str:
    told = f"skill {found.value:.2f} ({found.low:.2f} to {found.high:.2f}) over a linear denoiser"
    most = f"{float(ratio.value[worst]):.2f} ({float(ratio.low[worst]):.2f} to {float(ratio.high[worst]):.2f})"
    if under:
        return (
            f"{name} is under-trained: {told}, whose error it makes {most} times over where it does worst, at noise "
            f"{float(r):.2g} times the data's spread."
        )
    return f"{name} is trained: {told}; its error is {most} of that denoiser's where it does worst."
