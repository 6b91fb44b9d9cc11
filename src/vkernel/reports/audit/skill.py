r"""How much better than a linear denoiser does a network denoise the images that it is said to be trained on?

The ratio q of the network's error to that of the best linear denoiser (:mod:`vkernel.reports.audit.denoising`) is
measured at noise levels r from .1 to 3 on training images; the denoiser's mean and covariance come from *other*
training images. The standard error of q is that of the mean of :math:`(e_i - q\,l_i)/\bar l`. The **skill** is one
less the mean of q over levels. How much can be reached depends on the data; no threshold means that training is
finished.

At high noise the best prediction depends on the law of the whole training set: a network for other images, or for
another schedule, is worse there than the linear denoiser of *these* images, and its denoised images do not average to
theirs. For the right posterior mean, :math:`E[\hat x_0 - x_0] = 0` at every level. The **offset** is the square of the
mean of :math:`e = \hat x_0 - x_0` (less each image's own mean, which networks may be blind to) over images at the
largest level, over the linear denoiser's error there: :math:`\sum_{i\ne j} e_i\cdot e_j / n(n-1)`, which is unbiased,
over :math:`\overline{|l|^2}`.

A network is **doubtful** if its skill is not above 0, if the interval of q lies above 1 at a level with r ≥ 1, or if
the interval of its offset lies above .015. Wrong data, a wrong schedule and too little training all have this effect
and cannot be told apart by it. Else it is **under-trained** if the interval of q lies above 1 at a lower level with r ≥
.25, or if that of its skill lies below .1. At still lower noise networks that predict x0 lose detail, however long they
were trained."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.errors import require
from vkernel.core.estimate import Estimate, ratio_values
from vkernel.data.empirical import Empirical
from vkernel.reports.audit.denoising import LinearDenoiser, NoisyBatch, as_network
from vkernel.reports.audit.levels import dataset, variables
from vkernel.score import Score

if TYPE_CHECKING:
    import xarray

BEATEN, LEAST = 1.0, 0.1  # the ratio at one level, and the skill, beyond which a network is under-trained
DETAIL = 0.25  # r of the lowest level that counts
FROM, OFFSET = 1.0, 0.015  # the least r of high noise; of the linear denoiser's error
FITTED = 2048  # images that determine the linear denoiser


@dataclass(frozen=True)
class Skill:
    """The result of :func:`skill` along the noise levels, in ascending order; ``ratio`` is q = ``error / linear``."""

    t: list[float]
    r: list[float]
    error: Estimate[Tensor]
    linear: Estimate[Tensor]
    ratio: Estimate[Tensor]
    skill: Estimate
    offset: Estimate
    doubtful: bool  # wrong data, a wrong schedule or too little training
    under: bool  # whether the network counts as under-trained

    @property
    def far(self) -> Estimate:
        """The ratio at the largest noise level."""
        value, se, low, high = (float(v[-1]) for v in self.ratio.fields)
        return Estimate(value, se, low, high)

    def fits_better(self, other: Skill) -> bool:
        """Whether the network was trained on these data rather than on those of ``other``."""
        return other.doubtful and not self.doubtful and self.far.high < other.far.low

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
    predicted = [net.noise(x.float(), t).double() for x, t, *_ in batch.queries()]
    own = batch.errors_of(predicted)
    require(bool(own.isfinite().all()), f"{net.name} returned NaN or infinite values on noisy images.")
    values = ratio_values(own, theirs)
    ratio, found = Estimate[Tensor].of_mean(values, 1), Estimate[float].of_mean(values.mean(0)).complement()
    offset = _offset(predicted[-1] - batch.noise[-1], theirs[-1])
    beaten = ratio.low > BEATEN
    doubtful = bool(beaten[batch.r >= FROM].any()) or found.low <= 0 or offset.low > OFFSET
    under = not doubtful and (bool((beaten & (batch.r >= DETAIL)).any()) or found.high < LEAST)
    error, base = (Estimate[Tensor].of_mean(e, 1) for e in (own, theirs))
    return Skill(batch.times.tolist(), batch.r.tolist(), error, base, ratio, found, offset, doubtful, under)


def _offset(e: Tensor, linear: Tensor) -> Estimate:
    """Return the square of the mean of deviations ``e (n, *shape)``, over the mean of the linear denoiser's errors."""
    rows, n = e.flatten(1), len(e)
    if e.ndim > 2:
        rows = rows - rows.mean(1, keepdim=True)
    products = ((rows.sum(0) - rows) * rows).mean(1) / (n - 1)  # of each image with the others
    # the mean over pairs varies twice as much as that over images
    return Estimate[float].of_mean(ratio_values(2 * products - products.mean(), linear))
