r"""Compare the laws of :math:`x_\epsilon` that a theory and an ensemble give (docs/theory.md, §7).

All laws have the same starts :math:`x_T`. They are the law of the ensemble; of the Gaussian *field* with the ensemble's
mean score and V; of the *closure*, the Gaussian field with the ensemble's own covariance, which leaves out only the
cumulants beyond the second; and the *semiclassical* law, Gaussian around the path of the mean score. A theory that is a
score has the law of its own probability flow instead. Total variations are between average laws. Finite ensembles of
one law differ too: the *floor* is the mean total variation of random halves, :math:`\times \sqrt{(1/M + 1/M')\,M/4}`
for M members against M' fields.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from vkernel import metrics
from vkernel.core import rng
from vkernel.core.covariance import Factored
from vkernel.core.errors import InputError, require
from vkernel.core.estimate import Estimate
from vkernel.kernels import Kernel, Measured
from vkernel.sample.loop import Problem
from vkernel.sample.ode import pf_ode_end
from vkernel.sample.scores import Scores
from vkernel.sample.sde import Learned
from vkernel.sample.semiclassical import semiclassical
from vkernel.score.base import Score

SPLITS = 16  # random halves that the floor is a mean over
CHUNK = 1 << 22  # scores of members at once

Theory = Kernel | Score
Columns = dict[str, tuple[tuple[str, ...], object]]  # dimensions and values of variables


def columns(dims: tuple[str, ...], **values: object) -> Columns:
    """Return variables with these dimensions; tensors become arrays."""
    return {n: (dims, v.detach().cpu().numpy() if isinstance(v, Tensor) else v) for n, v in values.items()}


def draw_laws(
    scores: Scores,
    theory: Theory,
    samples: int,
    fields: int | None,
    seed: int,
    steps: int = 100,
    method: str = "exponential",
    spacing: str | None = "log",
) -> dict[str, Tensor]:
    """Draw samples ``(members, starts, *shape)`` of each law, all from the same starts; NaN where they diverge."""
    x_T, source, mean = scores.start(samples, seed), rng.stream(seed, "compare/fields"), scores.mean_score
    count = fields or len(scores)

    def flow(score: Score, start: Tensor) -> Tensor:
        parts = start.split(max(1, CHUNK // (count * len(scores))), 1)
        ends = (pf_ode_end(Problem(score, part.contiguous(), steps, spacing), method) for part in parts)
        return torch.cat(list(ends), 1)

    def quenched(V: Kernel) -> Tensor:
        """Sample the effective SDE; a V without factors needs a field for every start."""
        each = V.factors(x_T[:1], scores.process.T) is None
        start = x_T[:, None] if each else x_T.expand(count, *x_T.shape)
        return flow(Learned(mean, V.draw(len(start), source)), start)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what diverges is counted in the result
        own, closure = scores.sample(x_T=x_T, steps=steps, method=method, spacing=spacing), Measured(scores)
    if isinstance(theory, Score):
        return {"ensemble": own, "theory": flow(theory, x_T[None])}
    close = quenched(closure)
    field = close if isinstance(theory, Measured) and theory.scores is closure.scores else quenched(theory)
    try:
        require(theory.factors(x_T[:1], scores.process.T) is not None, "It would cost steps² covariances.")
        middle, cov = semiclassical(theory, x_T.double(), mean=mean, steps=steps, spacing=spacing)
    except InputError:  # without factors, or a path diverged
        around = torch.full((count, *x_T.shape), torch.nan)
    else:
        assert isinstance(middle, Tensor)
        assert isinstance(cov, Factored)
        z = rng.randn((count, *cov.factors.shape[:2]), source, middle.device, torch.float64)
        around = middle + torch.einsum("mfn,fn...->mn...", z, cov.factors)
    return {"ensemble": own, "field": field, "closure": close, "semiclassical": around}


def range_of(drawn: list[dict[str, Tensor]], d: int) -> Tensor:
    """Return the range of a grid that holds nearly all samples of the ensembles, ``(d, 2)``."""
    points = torch.cat([_finite(sets["ensemble"]).double().reshape(-1, d) for sets in drawn])
    require(len(points) > 0, "Every member diverged while sampling: take more steps, or log spacing.")
    points = points[:: max(1, len(points) // 1_000_000)].cpu()
    low, high = points.quantile(torch.tensor([0.001, 0.999], dtype=torch.float64), 0)
    pad = 0.08 * (high - low).clamp_min(1e-6)
    return torch.stack([low - pad, high + pad], 1)


def _finite(x: Tensor) -> Tensor:
    """Return the members whose samples are all finite."""
    return x[x.flatten(1).isfinite().all(1)]


def compare_laws(drawn: Mapping[str, Tensor], bins: int, span: Tensor, seed: int) -> Columns:
    """Return densities, total variations with their floors, and how many members of each law diverged."""
    kept = {name: _finite(x) for name, x in drawn.items()}
    own, found, densities = kept["ensemble"], Columns(), []
    require(len(own) >= 4, f"{len(drawn['ensemble']) - len(own)} members diverged while sampling: take more steps.")
    for name, law in kept.items():
        found[f"lost_{name}"] = ((), len(drawn[name]) - len(law))
        some = len(law) >= (1 if name == "theory" else 2)
        density = torch.full((bins,) * len(span), torch.nan, dtype=torch.float64)
        tv, floor = Estimate[float].unknown(), math.nan
        if some:
            density = torch.as_tensor(metrics.histogram(law, bins, span, normalise="all", members=True)[0].value)
        if some and name != "ensemble":
            tv = metrics.total_variation(own, law, bins, span, members=True)
            floor = _floor(own, law, bins, span, rng.stream(seed, "compare/floor"))
        if name != "ensemble":
            rows = {"": tv.value, "_low": tv.low, "_high": tv.high, "_floor": floor}
            found |= columns((), **{f"tv_{name}{ending}": value for ending, value in rows.items()})
        densities.append(density.cpu())
    found["tv_floor"] = found[f"tv_{'theory' if 'theory' in kept else 'closure'}_floor"]
    return found | columns(("law", "bin", "bin2")[: 1 + len(span)], density=torch.stack(densities))


def _floor(own: Tensor, law: Tensor, bins: int, span: Tensor, source: torch.Generator) -> float:
    """Return the total variation if ``law`` is the ensemble's own: of halves, or with one member for each start."""
    (m, n), total = own.shape[:2], 0.0
    for _ in range(SPLITS):
        if law.shape[1] > 1 or n == 1:
            one, two = (own[half] for half in torch.randperm(m, generator=source).tensor_split(2))
            scale = math.sqrt((1 / m + 1 / len(law)) * m / 4)
        else:
            one, two, scale = own, own[torch.randint(m, (n,), generator=source), torch.arange(n)][:, None], 1.0
        total += scale * float(metrics.total_variation(one, two, bins, span, members=True)) / SPLITS
    return total
