"""The mathematics of theory §1-2 a second time: float64, broadcasts and loops, one query at a time, nothing clever.

Nothing here is taken from the package: processes are the formulas of the table, the posterior is a softmax of squared
differences, covariances are sums of outer products about the mean. ``stages`` alone looks inside the engine, to say
which of its three paths a query took.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

import vkernel as vk
from vkernel.posterior.weights import SparseWeights

# --- processes: alpha and S from the table of theory §1 ------------------------------------------------------------


LOG_ABAR = list(accumulate(math.log1p(-(1e-4 + (0.02 - 1e-4) * j / 999)) for j in range(1000)))


def _ddpm(t: float) -> tuple[float, float]:
    """Linear betas 1e-4 … .02, 1000 of them; log alpha-bar linear between whole t."""
    left = min(math.floor(t), 998)
    value = LOG_ABAR[left] + (t - left) * (LOG_ABAR[left + 1] - LOG_ABAR[left])
    return math.exp(value / 2), -math.expm1(value)


def _vp(half: float):
    def levels(t: float) -> tuple[float, float]:
        B = half * (0.1 * t + 9.95 * t * t)
        return math.exp(-B), -math.expm1(-2 * B)

    return levels


def _cosine(t: float) -> tuple[float, float]:
    def angle(u: float) -> float:
        return math.pi / 2 * (u + 0.008) / 1.008

    alpha = math.cos(angle(t)) / math.cos(angle(0))
    return alpha, (math.sin(angle(t)) ** 2 - math.sin(angle(0)) ** 2) / math.cos(angle(0)) ** 2


LEVELS = {
    "vp": (vk.VP(), _vp(1.0)),
    "song": (vk.VPSong(), _vp(0.5)),
    "ddpm": (vk.DDPM.linear(), _ddpm),
    "cosine": (vk.Cosine(), _cosine),
    "ve": (vk.VE(), lambda t: (1.0, (0.01 * 5000.0**t) ** 2)),
    "edm": (vk.EDM(), lambda t: (1.0, t * t)),
    "flow": (vk.FlowMatching(), lambda t: (1 - t, t * t)),
    "toy": (vk.Toy(), lambda t: (math.sqrt(1 - t), t)),
}
PROCESSES = {name: process for name, (process, _) in LEVELS.items()}


def levels(name: str, t: float) -> tuple[float, float]:
    """alpha and sigma² of the named process."""
    return LEVELS[name][1](t)


def time_between(process, u: float) -> float:
    """A time at the fraction u of the way from eps to T, crowded towards eps."""
    return process.eps + u**3 * (process.T - process.eps)


# --- the posterior -------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """Everything exact about one query."""

    logits: Tensor  # (n,) log w_i - |x - alpha y_i|² / 2 sigma², or the same with S^-1
    weight: Tensor  # (n,)
    logp: Tensor
    mean: Tensor  # (d,)
    cov: Tensor  # (d, d) Cov(x0|x,t)
    score: Tensor  # (d,)
    C: Tensor  # (d, d)
    entropy: Tensor
    ess: Tensor


def _matrix(S: float | Tensor, d: int) -> Tensor:
    return S if isinstance(S, Tensor) else S * torch.eye(d, dtype=torch.float64)


def log_density(x: Tensor, points: Tensor, weights: Tensor, alpha: float, S: float | Tensor) -> Tensor:
    """log p(x|t), differentiable by autograd; ``x (d,)``."""
    gap = x - alpha * points
    if isinstance(S, Tensor):
        square, log_det = (gap * torch.linalg.solve(S, gap.mT).mT).sum(-1), torch.logdet(S)
    else:
        square, log_det = gap.square().sum(-1) / S, points.shape[1] * math.log(S)
    live = weights > 0
    logits = weights[live].log() - 0.5 * square[live]
    return logits.logsumexp(0) - 0.5 * (log_det + points.shape[1] * math.log(2 * math.pi))


def answer(points: Tensor, weights: Tensor | None, x: Tensor, alpha: float, S: float | Tensor) -> Answer:
    """The posterior of one query ``x (d,)`` over ``points (n, d)``."""
    y, x = points.double(), x.double()
    n, d = y.shape
    w = torch.full((n,), 1 / n, dtype=torch.float64) if weights is None else weights.double() / weights.double().sum()
    gap = x - alpha * y
    inverse = None if not isinstance(S, Tensor) else torch.linalg.inv(S)
    square = gap.square().sum(-1) / S if inverse is None else torch.einsum("ia,ab,ib->i", gap, inverse, gap)
    logits = w.log() - 0.5 * square
    top = logits.max()
    e = (logits - top).exp()
    r = e / e.sum()
    heavy = int(r.argmax())
    mean = y[heavy] + r @ (y - y[heavy])
    cov = ((y - mean) * r[:, None]).mT @ (y - mean)
    log_z = float(top) + math.log(float(e.sum()))
    half_log_det = 0.5 * d * math.log(S) if inverse is None else 0.5 * float(torch.logdet(S))
    pull = alpha * mean - x
    return Answer(
        logits=logits,
        weight=r,
        logp=torch.tensor(log_z - half_log_det - 0.5 * d * math.log(2 * math.pi), dtype=torch.float64),
        mean=mean,
        cov=cov,
        score=pull / S if inverse is None else inverse @ pull,
        C=alpha**2 * cov / S**2 if inverse is None else alpha**2 * inverse @ cov @ inverse,
        entropy=-sum(a * math.log(a) for a in r.tolist() if a > 0) * torch.ones((), dtype=torch.float64),
        ess=1 / r.square().sum(),
    )


def answers(points: Tensor, weights: Tensor | None, x: Tensor, name: str, t: Tensor | float) -> list[Answer]:
    """One answer for each row of ``x (B, d)``."""
    times = torch.as_tensor(t, dtype=torch.float64).expand(len(x)).tolist()
    return [answer(points, weights, q, *levels(name, u)) for q, u in zip(x, times, strict=True)]


def stack(all_answers: list[Answer], field: str) -> Tensor:
    return torch.stack([getattr(a, field) for a in all_answers])


# --- what the engine did -------------------------------------------------------------------------------------------


def stages(score: vk.EmpiricalScore, x: Tensor, t: float | Tensor) -> set[str]:
    """Return which of {"sparse", "float32", "float64"} the engine takes for the queries (an isotropic process)."""
    seen = set()
    for weights in score.engine.weights(score.queries(*score.check(x, t))):
        sparse = isinstance(weights, SparseWeights)
        seen.add("sparse" if sparse else str(weights.logit.dtype).removeprefix("torch."))
    return seen
