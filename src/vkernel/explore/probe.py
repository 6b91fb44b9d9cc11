r"""The training targets at one place (x, t): the picture behind C.

A model that is trained at (x, t) meets the proxy scores :math:`\tilde s = (\alpha x_0 - x)/\sigma^2` of the training
points that may have been noised to x, each with its posterior weight :math:`r_i`. As displacements,

.. math:: \sigma^2 \tilde s = \alpha x_0 - x, \qquad \text{mean } \sigma^2 s = \alpha m - x, \qquad
          \text{covariance } \sigma^4 C = \alpha^2\, \mathrm{Cov}(x_0 | x, t),

so that a target points from x to a training point (shrunk by :math:`\alpha`), and the ellipse of C around their mean
has the semi-axes :math:`\sigma^2 C^{1/2}`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

import vkernel as vk
from vkernel.core.errors import require
from vkernel.explore.compute import Result, empirical, models
from vkernel.explore.state import LIMIT, State

TARGETS, LEAST, LEARNED = 24, 1e-3, 12  # targets shown, the least weight of a point, models shown


@dataclass(frozen=True)
class Probe:
    """What training sees at a place; vectors are displacements in the units of x."""

    weights: np.ndarray  # of the training points above LEAST, descending
    which: list[int]  # their indices
    targets: np.ndarray  # (k, d), single targets
    mean: np.ndarray  # (d,)
    ellipse: np.ndarray  # (d, d), a row for each semi-axis
    noise: float  # sigma² tr C
    signal: float  # sigma² |s|²
    learned: np.ndarray  # (k, d), the scores of single models there

    @property
    def share(self) -> float:
        """tr C/(tr C + ``|s|²``), the share of a single target's mean square that is noise."""
        return self.noise / max(self.noise + self.signal, 1e-300)


def check(state: State, place: list[float]) -> list[float]:
    """Return a place, if it is one."""
    valid = len(place) == state.d and all(abs(v) <= 2 * LIMIT for v in place)
    require(valid, f"A place has {state.d} coordinates in [-{2 * LIMIT:g}, {2 * LIMIT:g}]; got {place!r:.60}.")
    return place


def evaluate(state: State, place: list[float], result: Result | None = None) -> Probe:
    """Evaluate the targets at a place and the state's t."""
    x, t = torch.tensor(check(state, place), dtype=torch.float64), torch.tensor(state.t, dtype=torch.float64)
    score = vk.EmpiricalScore(empirical(state), state.make_process())
    posterior, (s, C) = score.posterior(x[None], t), score.with_covariance(x[None], t)
    weight, index = (a[0] for a in posterior.top(min(len(state.points), TARGETS)))
    alpha, var = float(score.process.alpha(t)), float(score.process.S(t))
    drawn = posterior.sample(TARGETS, generator=state.seed)[:, 0]
    values, axes = torch.linalg.eigh(C.dense().reshape(state.d, state.d))
    ellipse = var * values.clamp_min(0).sqrt()[:, None] * axes.mT
    learned = torch.zeros(0, state.d)
    ensemble = models(state, result)
    if isinstance(ensemble, vk.Ensemble):
        few = ensemble.select(range(min(len(ensemble), LEARNED)))
        learned = var * few(x[None], t)[:, 0].detach()
    heavy = weight > LEAST
    return Probe(
        weight[heavy].numpy(),
        index[heavy].tolist(),
        (alpha * drawn - x).numpy(),
        (var * s[0]).numpy(),
        ellipse.numpy(),
        var * float(C.trace()),
        var * float(s.square().sum()),
        learned.numpy(),
    )
