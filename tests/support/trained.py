"""What the tests of trained kernels share: small models, and the mathematics a second time."""

from __future__ import annotations

import math
import warnings

import numpy as np
import torch
from torch import Tensor

import vkernel as vk
from vkernel.kernels import ValidityWarning
from vkernel.train.ensemble import Ensemble

PROCESS = vk.VP(eps=0.05)
POINTS = torch.tensor([[-1.0], [0.0], [1.0]], dtype=torch.float64)
PLANE = vk.Empirical(torch.tensor([[-1.0, 0.2], [0.4, 1.0], [0.8, -0.6]], dtype=torch.float64), [0.5, 0.3, 0.2])
TARGETS = ("score", "x0", "noise")
X = torch.linspace(-1.6, 1.6, 33, dtype=torch.float64)[:, None]
TIMES = (0.06, 0.1, 0.2, 0.4)


def grid(per_axis: int = 6, dim: int = 1, per_time: int | None = None) -> vk.features.Grid:
    return vk.features.grid("gaussian", per_axis, dim, process=PROCESS, per_time=per_time)


def model(per_axis: int = 6, target: str = "score", ridge: float = 0.1, dim: int = 1, per_time: int | None = None):
    return vk.models.Linear(grid(per_axis, dim, per_time), target, ridge)


# -------------------- the mathematics a second time


def levels(t: Tensor) -> tuple[Tensor, Tensor]:
    """alpha and S of the paper's VP."""
    alpha = torch.exp(-(0.1 * t + 9.95 * t**2))
    return alpha, 1 - alpha**2


def posterior(x: Tensor, t: Tensor, data: vk.Empirical) -> tuple[Tensor, Tensor]:
    """r ``(N, n)`` and the points ``(n, d)``."""
    y = data.take(torch.arange(data.n)).double().reshape(data.n, -1)
    alpha, S = levels(t)
    away = (x[:, None] - alpha[:, None, None] * y).square().sum(-1)
    return torch.softmax(data.weights.double().log() - away / (2 * S[:, None]), 1), y


def moments(x: Tensor, t: Tensor, data: vk.Empirical) -> tuple[Tensor, Tensor]:
    """The mean ``(N, d)`` and covariance ``(N, d, d)`` of x0 given x."""
    r, y = posterior(x, t, data)
    mean = r @ y
    off = y - mean[:, None]
    return mean, torch.einsum("ni,nia,nib->nab", r, off, off)


def maps(target: str, x: Tensor, t: Tensor, m: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """B, the weight ω = σ² B², the training target of m, and its derivative by m: the table of theory §9."""
    alpha, S = levels(t)
    if target == "score":
        return torch.ones_like(t), S, (alpha[:, None] * m - x) / S[:, None], alpha / S
    if target == "x0":
        return alpha / S, alpha**2 / S, m, torch.ones_like(t)
    return -1 / S.sqrt(), torch.ones_like(t), (x - alpha[:, None] * m) / S.sqrt()[:, None], -alpha / S.sqrt()


def places(points: Tensor, steps: int = 300, nodes: int = 48) -> tuple[Tensor, Tensor, Tensor]:
    """x, t and weights of E over (x0, t, noise) in one dimension: midpoints in t, Gauss and Hermite's rule in x."""
    z, w = (torch.from_numpy(a) for a in np.polynomial.hermite_e.hermegauss(nodes))
    t = PROCESS.eps + (PROCESS.T - PROCESS.eps) * (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
    alpha, S = levels(t)
    x = alpha[:, None, None] * points[:, 0][:, None] + S.sqrt()[:, None, None] * z
    weight = (w / w.sum()).expand(x.shape) / (steps * len(points))
    return x.reshape(-1, 1), t[:, None, None].expand(x.shape).reshape(-1), weight.reshape(-1)


class Leading:
    """The terms of theory §9 at leading order, one-dimensional data, expectations by quadrature."""

    def __init__(self, m: vk.models.Linear) -> None:
        self.model = m
        self.x, self.t, self.p = places(POINTS)
        mean, cov = moments(self.x, self.t, vk.Empirical(POINTS))
        _, self.omega, y, unit = maps(m.target, self.x, self.t, mean)
        self.y, self.N = y[:, 0], unit**2 * cov[:, 0, 0]
        self.phi = m.features(self.x, self.t)
        self.sigma = self.average(self.omega)
        self.ridged = self.sigma + m.ridge * torch.eye(len(self.sigma), dtype=torch.float64)
        self.W = torch.linalg.solve(self.ridged, self.phi.mT @ (self.p * self.omega * self.y))

    def average(self, f: Tensor) -> Tensor:
        """E[f φφ^T]."""
        return self.phi.mT @ ((self.p * f)[:, None] * self.phi)

    def noise(self) -> Tensor:
        return self.average(self.omega**2 * self.N)

    def misfit(self, W: Tensor | None = None, centred: bool = True) -> Tensor:
        b = self.y - self.phi @ (self.W if W is None else W)
        mu = self.phi.mT @ (self.p * self.omega * b)
        return self.average((self.omega * b) ** 2) - centred * torch.outer(mu, mu)

    def weights(self, middle: Tensor, P: int) -> Tensor:
        inverse = torch.linalg.inv(self.ridged)
        return inverse @ middle @ inverse / P


def density(t: float) -> Tensor:
    """p(x|t) at X, normalised."""
    alpha, S = levels(torch.tensor(t, dtype=torch.float64))
    p = torch.exp(-((X - alpha * POINTS[:, 0]) ** 2) / (2 * S)).sum(1)
    return p / p.sum()


def scores(ens: Ensemble) -> Tensor:
    """Members' scores ``(M, places)`` with sqrt of p(x|t) on them: a sum of squares is then a pooled variance."""
    return torch.cat([ens(X, t)[..., 0] * density(t).sqrt() for t in TIMES], 1)


def predicted(kernel) -> float:
    return sum(float((kernel.cov(X, t).trace() * density(t)).sum()) for t in TIMES)


def ratio(s: Tensor, kernel) -> tuple[float, float]:
    """Measured over predicted variance, pooled, with the standard error of a mean over members."""
    q = (s - s.mean(0)).square().sum(1) * len(s) / (len(s) - 1) / predicted(kernel)
    return float(q.mean()), float(q.std()) / math.sqrt(len(q))


def fitted(m, **options):
    return vk.train_ensemble(m, POINTS, PROCESS, **options)


def quietly(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ValidityWarning)
        return make()
