r"""Can one tell from its errors which images a network was trained on?

An image's **loss** is :math:`|\widehat{\mathrm{noise}} - \mathrm{noise}|^2/d` (:mod:`vkernel.reports.audit.levels`),
averaged over draws of noise and over noise levels. *All* images of both sets get the same noise: it is no part of
what is compared, and given it the losses of images are independent. The answer is

.. math:: \mathrm{AUC} = P(\text{loss of a training image} < \text{loss of a test image}), \qquad \text{ties count }
          \tfrac12 ,

1 for a network that remembers its images, .5 for one to which they are like any others. Its standard error is that of
DeLong et al. (1988): with :math:`v_i` the share of test images of larger loss than training image i, and :math:`u_j`
the share of training images of smaller loss than test image j, :math:`\mathrm{se}^2 = \mathrm{var}(v)/n +
\mathrm{var}(u)/m`.

The 95 % interval is the score interval of Newcombe (2006, method 5): all :math:`\theta` with
:math:`|\mathrm{AUC} - \theta| \le 1.96\, V(\theta)^{1/2}`, where V is the variance of Hanley and McNeil (1982), made
symmetric,

.. math:: V(\theta) = \frac{\theta(1-\theta)}{nm} \Big[1 + \Big(\frac{n+m}{2} - 1\Big) \Big(\frac{1-\theta}{2-\theta} +
          \frac{\theta}{1+\theta}\Big)\Big] .

:math:`V(\tfrac12) = (n+m+1)/(12nm)` is the exact variance of the rank sum when both sets are alike, whatever the law of
the losses: .5 lies outside the interval if and only if Mann and Whitney's test rejects at 5 %. And the interval does
not shrink to a point at AUC = 1, where DeLong's error is 0. Intervals are for images that might have been drawn; noise
is as it was drawn. Those of single levels are one at a time: among 8 of a blameless network one may well miss .5.

The test images must come from the law of the training images; if they differ in anything else, the AUC sees that too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.estimate import Estimate
from vkernel.data.empirical import Empirical
from vkernel.process import Process
from vkernel.reports.audit.levels import (
    ENDS,
    Noised,
    chosen,
    coordinates,
    labelled,
    mean_square,
    opened,
    predicted,
    times_of,
    whole,
)
from vkernel.score.base import Score

if TYPE_CHECKING:
    import xarray

__all__ = ["Membership", "auc", "membership"]

_Z = 1.959963984540054


@dataclass(frozen=True)
class Membership:
    """What :func:`membership` found: the AUC over all levels, and one for each time of ``t`` (a tensor of each kind).

    ``train`` and ``test`` are the losses, ``(levels, images)``.
    """

    auc: Estimate
    process: Process = field(repr=False)
    t: Tensor
    by_level: Estimate
    train: Tensor = field(repr=False)
    test: Tensor = field(repr=False)

    @property
    def words(self) -> str:
        apart = "can" if self.auc.low > 0.5 else "cannot"
        odd = " (test images are denoised better than training images)" if self.auc.high < 0.5 else ""
        return (
            f"Training images {apart} be told from test images by a lower loss{odd}: AUC {self.auc}, "
            f"{self.train.shape[1]} training and {self.test.shape[1]} test images, {len(self.t)} noise levels."
        )

    def to_dataset(self) -> xarray.Dataset:
        """The AUC of each level along ``t``, that of all levels as a scalar."""
        import xarray

        words = "AUC of lower loss on training images"
        levels = [Estimate(*row) for row in zip(*(getattr(self.by_level, p).tolist() for p in ENDS), strict=True)]
        columns = labelled("auc_level", f"{words}, at this level", levels)
        overall = labelled("auc", f"{words}, of all levels together", [self.auc])
        columns |= {name: ((), value[0], label) for name, (_, value, label) in overall.items()}
        attrs = {"train_images": self.train.shape[1], "test_images": self.test.shape[1], "words": self.words}
        return xarray.Dataset(columns, coordinates(self.process, self.t), attrs)


def membership(
    model: Score,
    data: Empirical | Tensor,
    test: Empirical | Tensor,
    *,
    times: Any = None,
    images: int = 512,
    draws: int = 4,
    seed: int = 0,
    batch: int = 64,
) -> Membership:
    """How well lower loss tells training images (``data``) from ``test`` images; at most ``images`` of each.

    ``model`` is a score with its ``process``; both sets are in its pixel range. Images are drawn without replacement,
    equally likely, whatever their weights (if not zero).
    """
    process, data, held = opened(model, data, test)
    assert held is not None
    whole(images=(images, 2), draws=(draws, 1), batch=(batch, 1))
    t = times_of(model, data, times)
    g = rng.stream(seed, "audit of membership")
    keys = rng.keys((len(t), draws, 1), g, data.device)
    losses = []
    for points in (data, held):
        x0 = points.images(chosen(points, images, g, distinct=True)).to(data.dtype)
        losses.append(_losses(model, Noised(process, t, x0, keys), batch))
    train, other = losses
    return Membership(auc(train.mean(0), other.mean(0)), process, t, auc(train, other), train, other)


def _losses(model: Score, images: Noised, batch: int) -> Tensor:
    """``(levels, images)``, averaged over draws."""
    found = torch.zeros(len(images.times), len(images.x0), dtype=torch.float64)
    for level, t in enumerate(images.times):
        for _, part, x, noise in images.parts(level, batch):
            found[level, part] += mean_square(predicted(model, x, t, images.process) - noise).cpu()
    return found / images.keys.shape[1]


def auc(train: Tensor, test: Tensor) -> Estimate:
    """P(train < test) with DeLong's error and Newcombe's interval; losses ``(*levels, n)`` and ``(*levels, m)``."""
    n, m = train.shape[-1], test.shape[-1]
    v, u = _share_above(train, test), 1 - _share_above(test, train)
    value = v.mean(-1)
    se = (v.var(-1) / n + u.var(-1) / m).sqrt()
    low, high = _low_end(value, n, m), 1 - _low_end(1 - value, n, m)
    if value.ndim == 0:
        return Estimate(float(value), float(se), float(low), float(high))
    return Estimate(value, se, low, high)


def _share_above(a: Tensor, b: Tensor) -> Tensor:
    """For each of ``a`` the share of ``b`` that is larger, ties counting half."""
    b, a = b.sort(-1).values, a.contiguous()
    below = torch.searchsorted(b, a) + torch.searchsorted(b, a, right=True)
    return 1 - below.double() / (2 * b.shape[-1])


def _low_end(value: Tensor, n: int, m: int) -> Tensor:
    """The least theta of the score interval, by bisection on [0, value]."""
    inside, outside = value.double(), torch.zeros_like(value, dtype=torch.float64)
    for _ in range(60):
        theta = (inside + outside) / 2
        spread = 1 + ((n + m) / 2 - 1) * ((1 - theta) / (2 - theta) + theta / (1 + theta))
        far = (value - theta).square() > _Z**2 * theta * (1 - theta) * spread / (n * m)
        inside, outside = torch.where(far, inside, theta), torch.where(far, theta, outside)
    return inside
