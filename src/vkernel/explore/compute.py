r"""What is exact, at one time: the noise of the target, the score, and the boundaries, on a grid (docs/theory.md, §2).

.. math:: \frac{\mathrm{tr}\,C}{\mathrm{tr}\,C + |s|^2}, \qquad s(x,t), \qquad p(x|t) .

*Boundary lines* are the outline of where :func:`vkernel.metrics.boundary_mass` counts: the target is mostly noise, and
the score pushes apart, :math:`\mathrm{tr}\,C > 1/\sigma^2` and :math:`\mathrm{tr}\,C > |s|^2`. All numbers come from
:class:`~vkernel.score.empirical.EmpiricalScore`; here they are put on grids and into the units of a plot.
"""

from __future__ import annotations

from dataclasses import dataclass

import contourpy
import numpy as np
import torch
from torch import Tensor

from vkernel.core.estimate import Estimate
from vkernel.data.empirical import Empirical
from vkernel.explore.state import LIMIT, State
from vkernel.score.empirical import EmpiricalScore
from vkernel.score.noise import noise_fraction

__all__ = ["Exact", "axis", "empirical", "exact", "grid", "noise_share"]

CELLS = 100  # of the map, along each axis of the plane
NODES = 401  # on the line
ARROWS = 17  # along each axis
QUERIES = 1024


@dataclass(frozen=True)
class Exact:
    """The exact quantities at one time, as arrays to be drawn.

    ``fraction`` is ``(CELLS, CELLS)``, rows along the second coordinate, or ``(NODES,)`` on the line; ``arrows``
    ``(4, k)`` holds x, y of the tails and of the heads; ``lines`` are polygons ``(2, m)``, on the line single places;
    ``density`` is p(x|t) on the line, ``None`` in the plane.
    """

    fraction: np.ndarray
    arrows: np.ndarray
    lines: list[np.ndarray]
    density: np.ndarray | None = None


def empirical(state: State) -> Empirical:
    """The training set."""
    return Empirical(np.array(state.points, dtype=np.float64), state.weights)


def axis(count: int) -> Tensor:
    """Evenly spaced coordinates over the window."""
    return torch.linspace(-LIMIT, LIMIT, count, dtype=torch.float64)


def grid(d: int, count: int) -> Tensor:
    """The nodes of a grid over the window, ``(count, 1)`` or ``(count², 2)``, rows along the second coordinate."""
    line = axis(count)
    if d == 1:
        return line[:, None]
    second, first = torch.meshgrid(line, line, indexing="ij")
    return torch.stack([first, second], -1).reshape(-1, 2)


def exact(state: State) -> Exact:
    """Noise fraction, score and boundaries at the state's t."""
    score = EmpiricalScore(empirical(state), state.make_process())
    count = NODES if state.d == 1 else CELLS
    x = grid(state.d, count)
    s, C = score.with_covariance(x, state.t)
    trace, drift = C.trace(), s.square().sum(-1)
    fraction = trace / (trace + drift).clamp_min(1e-300)
    divides = torch.minimum(trace * score.process.S(torch.tensor(state.t, dtype=torch.float64)), 2 * fraction)
    shape = (count,) * state.d
    arrows = _arrows(score, state) if state.has("arrows") else np.zeros((4, 0))
    lines = _outline(divides.reshape(shape).numpy()) if state.has("boundaries") else []
    density = score.posterior(x, state.t).logp.exp().numpy() if state.d == 1 else None
    return Exact(fraction.reshape(shape).numpy().astype(np.float32), arrows, lines, density)


def _arrows(score: EmpiricalScore, state: State) -> np.ndarray:
    """From tail to head along the score; the length, sigma² |s|, is shortened to what the grid leaves room for."""
    x = grid(state.d, ARROWS if state.d == 2 else 2 * ARROWS - 1)
    step = score.process.S(torch.tensor(state.t, dtype=torch.float64)) * score(x, state.t)
    room = 0.8 * 2 * LIMIT / (ARROWS - 1 if state.d == 2 else 2 * ARROWS - 2)
    size = step.norm(dim=-1, keepdim=True)
    move = step / size.clamp_min(1e-12) * room * torch.tanh(size / 0.5)
    tail = x - move / 2
    flat = torch.zeros(len(x), 1, dtype=x.dtype)
    ends = [tail, tail + move] if state.d == 2 else [torch.cat([e, flat], 1) for e in (tail, tail + move)]
    return torch.cat(ends, 1).mT.numpy()


def _outline(values: np.ndarray) -> list[np.ndarray]:
    """Where the values cross 1: polygons in the plane, single places on the line."""
    line = axis(len(values)).numpy()
    if values.ndim == 2:
        return [np.asarray(part).T for part in contourpy.contour_generator(line, line, values).lines(1.0)]
    over = values - 1
    k = np.flatnonzero(over[:-1] * over[1:] < 0)
    places = line[k] + (line[k + 1] - line[k]) * over[k] / (over[k] - over[k + 1])
    return [np.array([[p, p], [0.0, 1.0]]) for p in places]


def noise_share(state: State) -> Estimate:
    """Which share of the training target is noise at the state's t."""
    return noise_fraction(empirical(state), state.make_process(), state.t, queries=QUERIES, generator=state.seed)
