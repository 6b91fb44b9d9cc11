r"""The noise fraction: how large a share of the training target is noise (docs/theory.md, §2.8).

.. math:: \rho(t) = \frac{E\,\mathrm{tr}\,C}{E\,\mathrm{tr}\,C + E|s|^2} =
          \frac{E\,\mathrm{tr}\,C}{\mathrm{tr}\,S^{-1}} ,

expectations over x ~ p(x|t). In one dimension the integral is a quadrature, elsewhere a mean over draws.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.errors import require
from vkernel.core.estimate import Estimate, stacked
from vkernel.core.rng import Generator
from vkernel.data import Empirical
from vkernel.process import Anisotropic, Process
from vkernel.score.base import Time, wide_time
from vkernel.score.empirical import EmpiricalScore

NODES = 1 << 31  # pairs (node, point) that a quadrature in one dimension may take


def draw_queries(
    data: Empirical, process: Process, t: float, count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """``count`` draws of x from p(x|t): the indices of the points that made them, and x ``(count, *shape)``."""
    u = torch.rand(count, generator=generator, device=generator.device, dtype=torch.float64).to(data.device)
    index = torch.searchsorted(data.weights.cumsum(0), u, right=True).clamp_max(data.n - 1)
    x0 = data[index]
    return index, process.perturb(x0, t, generator=generator)


def noise_fraction(
    data: Empirical | EmpiricalScore,
    process: Process,
    t: Time,
    queries: int = 4096,
    generator: Generator = None,
) -> Estimate[float] | Estimate[Tensor]:
    r"""Estimate the share of the training target's second moment that is noise (2.8),

    .. math:: \rho(t) = \frac{E\,\mathrm{tr}\,C}{E\,\mathrm{tr}\,C + E|s|^2} =
              \frac{E\,\mathrm{tr}\,C}{\mathrm{tr}\,S^{-1}}.

    In one dimension by quadrature, exact to rounding; else over ``queries`` draws of x, with their standard error.
    ``t`` may be a vector: then the estimate's fields are vectors.
    """
    score = data if isinstance(data, EmpiricalScore) else EmpiricalScore(data, process)
    require(score.process == process, "The score that was given belongs to another process.")
    require(queries >= 2, f"A standard error needs at least 2 queries; got {queries}.")
    times = process.check(wide_time(t, torch.device("cpu")))
    source = rng.as_generator(generator)
    parts = [_noise_fraction(score, float(u), queries, source) for u in times.reshape(-1)]
    if times.ndim == 0:
        return parts[0]
    return stacked(parts, tuple(times.shape))


def _noise_fraction(score: EmpiricalScore, t: float, queries: int, generator: torch.Generator) -> Estimate:
    data, process = score.data, score.process
    alpha, var = (float(a) for a in score.levels(torch.tensor(t, dtype=torch.float64)))
    precision = process.inverse_trace if isinstance(process, Anisotropic) else data.d
    if data.d == 1 and not isinstance(process, Anisotropic):
        exact = _quadrature(score, t, alpha, math.sqrt(var))
        if exact is not None:
            return Estimate.exact(exact)
    _, x = draw_queries(data, process, t, queries, generator)
    trace = score.covariance(x, t).trace().double()
    return Estimate.of_mean(trace, scale=var / precision)


def _quadrature(score: EmpiricalScore, t: float, alpha: float, sigma: float) -> float | None:
    """E[C] sigma² in one dimension: the trapezoidal rule, exponentially accurate for an analytic integrand.

    Points farther apart than 18 sigma have nothing between them (to e^-40): each island has a grid of its own. ``None``
    where the grids would be larger than a Monte Carlo estimate is worth.
    """
    support = alpha * score.data.rows(0, score.data.n).double().flatten().sort().values
    cut = (support.diff() > 18 * sigma).nonzero().flatten() + 1
    ends = [(float(i[0]) - 9 * sigma, float(i[-1]) + 9 * sigma) for i in support.cpu().tensor_split(cut.cpu())]
    steps = [max(int((high - low) / sigma * 16), 512) for low, high in ends]
    if sum(steps) * score.data.n > NODES:
        return None
    grids = [torch.linspace(*end, k + 1, dtype=torch.float64) for end, k in zip(ends, steps, strict=True)]
    width = [torch.full_like(g, (high - low) / k) for g, (low, high), k in zip(grids, ends, steps, strict=True)]
    x, dx = torch.cat(grids).to(score.data.device), torch.cat(width).to(score.data.device)
    posterior = score.posterior(x.reshape(-1, *score.data.shape), t)
    c = posterior.cov.trace() * (alpha / sigma) ** 2
    return float((posterior.logp.exp() * c * dx).sum())
