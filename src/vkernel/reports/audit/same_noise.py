r"""Do members make the same of the same noise? (Kadkhodaie et al. 2024, Zhang et al. 2024)

With :math:`x^a_i` the sample of member a from the i-th of n starts, :func:`same_noise` measures for each pair a, b

.. math:: \mathrm{ratio} = \frac{\mathrm{mean}_i\, |x^a_i - x^b_i|}{\mathrm{mean}_{i \ne j}\, |x^a_i - x^b_j|} ,

0 for members whose samples from equal noise are equal, 1 for members that share only the law of their samples.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from vkernel.core.errors import require
from vkernel.core.estimate import Estimate, student_quantile
from vkernel.data import Empirical
from vkernel.metrics.neighbours import distinct, nearest

__all__ = ["SameNoise", "same_noise"]

ROWS = 256  # samples compared at once


@dataclass(frozen=True)
class SameNoise:
    """What ``same_noise`` found: ``ratio`` and ``correlation`` over all pairs of members, ``by_pair`` the ratios.

    ``nearest`` is the share of starts for which all members' samples have the same nearest training image.
    """

    ratio: Estimate
    correlation: Estimate
    nearest: Estimate
    by_pair: dict[tuple[int, int], Estimate]
    words: str


def same_noise(samples: Tensor, data: Empirical) -> SameNoise:
    """Whether members make the same of the same noise: ``samples (M, n, *shape)``, ``[:, i]`` from the i-th start.

    ``data`` is the training set in the same units. Correlations are over pixels, less each member's mean sample.
    Errors are over starts: jackknifed for ratios, Student's for correlations, Wilson's for the share.
    """
    require(isinstance(samples, Tensor), f"samples must be a tensor (M, n, *shape), not {type(samples).__name__}.")
    shape = tuple(samples.shape[2:]) or (1,)
    require(samples.ndim >= 2 and shape == data.shape, f"Samples are of shape {shape}, the data of {data.shape}.")
    m, n = samples.shape[:2]
    require(m >= 2 and n >= 3, f"Two members and three starts are needed; got {m} and {n}.")
    x = samples.detach().to(data.device, torch.float64).reshape(m, n, -1)
    require(bool(x.isfinite().all()), "Samples hold NaN or infinite values: a member diverged; leave it out.")
    pairs = list(itertools.combinations(range(m), 2))
    ratios = {pair: _ratios(x[pair[0]], x[pair[1]]) for pair in pairs}  # whole, then without each start
    centred = x - x.mean(1, keepdim=True)
    unit = centred / centred.norm(dim=2, keepdim=True)
    correlation = Estimate.of_mean(torch.stack([(unit[a] * unit[b]).sum(1) for a, b in pairs]).mean(0))
    points = distinct(data)
    index = torch.stack([nearest(member, points, 1)[1][:, 0] for member in x])
    share = Estimate.of_share((index == index[0]).all(0).sum().double(), float(n))
    ratio = _jackknifed(torch.stack(list(ratios.values())).mean(0))
    words = (
        f"From the same noise, samples of two of the {m} members are {ratio.value:.2g} [{ratio.low:.2g}, "
        f"{ratio.high:.2g}] times as far apart as from different noise, and correlate by {correlation.value:.2g} "
        f"[{correlation.low:.2g}, {correlation.high:.2g}]; for {share.value:.0%} [{share.low:.0%}, {share.high:.0%}] "
        f"of {n} noises all have the same nearest training image."
    )
    return SameNoise(ratio, correlation, share, {pair: _jackknifed(r) for pair, r in ratios.items()}, words)


def _ratios(a: Tensor, b: Tensor) -> Tensor:
    """The ratio of distances for samples ``(n, d)``, and n more, each without one start."""
    n, own = len(a), (a - b).norm(dim=1)
    across, along = torch.zeros_like(own), torch.zeros_like(own)
    for rows in torch.arange(n, device=a.device).split(ROWS):
        distance = torch.cdist(a[rows], b)
        distance[torch.arange(len(rows)), rows] = 0
        across[rows] += distance.sum(1)
        along += distance.sum(0)
    whole = (own.mean() / (across.sum() / (n * (n - 1)))).reshape(1)
    less = (own.sum() - own) / (n - 1), (across.sum() - across - along) / ((n - 1) * (n - 2))
    return torch.cat([whole, less[0] / less[1]])


def _jackknifed(values: Tensor) -> Estimate:
    """The first, with the error of the others, each of which leaves one start out."""
    value, others = float(values[0]), values[1:]
    n = len(others)
    se = float(((n - 1) / n * (others - others.mean()).square().sum()).sqrt())
    half = student_quantile(n - 1) * se
    return Estimate(value, se, max(0.0, value - half), value + half)
