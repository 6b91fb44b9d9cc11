"""Training sets that punish careless sums, queries to them, and their posteriors in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from draws import gen, normal
from reference import levels
from torch import Tensor

import vkernel as vk


def training_set(
    n: int, d: int, seed: int, weighted: bool = False, zeros: bool = False, twins: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Points about the origin; some repeated; weights over four decades, some zero."""
    points = normal(n, d, seed=seed) / math.sqrt(d)
    if twins and n > 2:
        points[n // 2] = points[0]
    if not weighted:
        return points, None
    weights = 10 ** (4 * torch.rand(n, generator=gen(seed + 1), dtype=torch.float64) - 4)
    if zeros and n > 2:
        weights[1 : n // 3] = 0.0
    return points, weights


def near(points: Tensor, t: float, name: str, count: int, seed: int) -> Tensor:
    """Queries as training makes them, one on the way between two points, one from nowhere."""
    alpha, S = levels(name, t)
    pick = torch.randint(0, len(points), (count,), generator=gen(seed))
    x = alpha * points[pick] + math.sqrt(S) * normal(count, points.shape[1], seed=seed + 1)
    if count > 1:
        x[0] = alpha * (points[0] + points[-1]) / 2
    if count > 2:
        x[1] = normal(points.shape[1], seed=seed + 2)
    return x


class Truth:
    """Posterior of EDM noise in float64, about the data's mean; the points are held once."""

    def __init__(self, points: Tensor) -> None:
        self.points = points.double()
        self.center = self.points.mean(0)
        self.y = self.points - self.center
        self.half_square = self.y.square().sum(-1) / 2

    def __call__(self, x: Tensor, sigma: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean ``(B, d)``, the trace of the covariance and the effective number of points ``(B,)``."""
        logits = ((x.double() - self.center) @ self.y.mT - self.half_square) / sigma**2
        r = logits.softmax(1)
        # exact where it matters: logits of heavy points again, from differences
        for b in range(len(x)):
            heavy = r[b] > 1e-12
            gap = (x[b].double() - self.points[heavy]).square().sum(-1) / (-2 * sigma**2)
            share = r[b, heavy].sum()
            r[b, heavy] = gap.softmax(0) * share
        mean = torch.empty_like(x, dtype=torch.float64)
        trace = torch.empty(len(x), dtype=torch.float64)
        for b in range(len(x)):
            pivot = self.y[r[b].argmax()]
            live = r[b] > 1e-40
            delta, w = self.y[live] - pivot, r[b, live]
            a = w @ delta
            mean[b] = self.center + pivot + a
            trace[b] = w @ (delta - a).square().sum(-1)
        return mean, trace, 1 / r.square().sum(1)


def queries(points: Tensor, sigma: float, count: int, seed: int = 5) -> Tensor:
    """Return queries in the points' type: half near training points, half midway between two."""
    near = points[:count].double() + sigma * normal(count, points.shape[1], seed=seed)
    middle = (points[count : 2 * count].double() + points[2 * count : 3 * count].double()) / 2
    return torch.cat([near, middle]).to(points.dtype)


def mixed_queries(points: Tensor, sigma: float, count: int = 6) -> Tensor:
    """Return queries near points, on points, midway between two, and far away."""
    y = points.double()
    pick = torch.randint(0, len(y), (3, count), generator=gen(9))
    near = y[pick[0]] + sigma * normal(count, y.shape[1], seed=10)
    far = y[pick[0, :2]] + 50 * normal(2, y.shape[1], seed=11)
    return torch.cat([near, y[pick[1, :2]], (y[pick[1]] + y[pick[2]]) / 2, far])


# --- points --------------------------------------------------------------------------------------------------------


def spectrum(n: int = 1500, d: int = 160, seed: int = 0) -> Tensor:
    """Return points like images: most of the variance lies along few axes."""
    return 3 * normal(n, d, seed=seed) / torch.arange(1, d + 1)


def smooth(n: int, side: int, seed: int = 0) -> Tensor:
    """Return images with neighbours alike, in [-1, 1], float64, ``(n, side²)``."""
    waves = torch.fft.rfft2(torch.randn(n, side, side, generator=gen(seed), dtype=torch.float64))
    k = torch.fft.fftfreq(side).mul(side).square()
    image = torch.fft.irfft2(waves / (1 + (k[:, None] + k[: side // 2 + 1]).sqrt()), s=(side, side))
    return (image / (2.5 * image.std())).clamp(-1, 1).flatten(1)


def unequal(n: int) -> Tensor:
    """Return weights over sixteen decades, a fifth of them zero."""
    w = 10 ** (16 * torch.rand(n, generator=gen(6), dtype=torch.float64) - 8)
    w[::5] = 0
    return w


def clusters(n: int = 600, d: int = 48, far: float = 30.0, width: float = 0.3, seed: int = 0) -> Tensor:
    """Return two far clusters: in each many points are alike, and the coarse product's rounding is large."""
    points = width * normal(n, d, seed=seed) / math.sqrt(d)
    points[: n // 2, 0] += far
    points[n // 2 :, 0] -= far
    return points


def _thirty() -> Tensor:
    """Thirty clusters."""
    centres = 3 * spectrum(30, 128, seed=1)
    return (centres[torch.randint(0, 30, (1500,), generator=gen(2))] + 0.1 * normal(1500, 128, seed=3)).float()


def _unit(a: Tensor) -> Tensor:
    return a / a.norm(dim=1, keepdim=True)


def _tight(width: float) -> Callable[[], Tensor]:
    """A thousand near-copies of one point, far from the centre, and 500 others."""

    def make() -> Tensor:
        far = 10 * _unit(normal(1, 256, seed=0))
        copies = far + width * normal(1000, 256, seed=1) / 16
        return torch.cat([copies, 10 * _unit(normal(500, 256, seed=2))])[torch.randperm(1500, generator=gen(3))]

    return make


def _outlier() -> Tensor:
    points = normal(1000, 128, seed=0)
    points[500] = 1e4 * _unit(normal(1, 128, seed=1))[0]
    return points


def _twins(gap: float) -> Callable[[], Tensor]:
    """Every point twice, a hair apart."""

    def make() -> Tensor:
        half = normal(500, 200, seed=0)
        return torch.stack([half, half + gap * normal(500, 200, seed=1) / math.sqrt(200)], 1).reshape(1000, 200)

    return make


def _lattice(copies: int) -> Tensor:
    return torch.cartesian_prod(*[torch.tensor([-1.0, 1.0]).double()] * 10).repeat(1, copies)


# --- name: (points, sigma) -------------------------------------------------------------------------------------------

# One case for each stage of the reference path. The last is at low noise for its radius, with many points of about the
# same weight.
STAGES: dict[str, tuple[Callable[[], Tensor], float]] = {
    "sparse": (lambda: normal(600, 48, seed=1), 0.3),
    "float32": (lambda: normal(600, 48, seed=1), 4.0),
    "float64": (clusters, 0.3),
}

# Sets of many kinds, at a noise level at which few points matter to most queries.
CASES: dict[str, tuple[Callable[[], Tensor], float]] = {
    "digits": (lambda: vk.data.digits().rows(0, 1797), 0.2),
    "spectrum": (spectrum, 0.2),
    "clusters": (_thirty, 0.05),
    "duplicates": (lambda: spectrum(400, seed=4).repeat(3, 1)[torch.randperm(1200, generator=gen(5))], 0.2),
    "one-hot": (lambda: 3 * torch.eye(600, dtype=torch.float64), 0.1),
    "lattice": (lambda: _lattice(8), 0.2),
    "offset 1e4, float64": (lambda: 1e4 + spectrum(seed=7), 0.2),
    "offset 100, float32": (lambda: (100 + spectrum(seed=7)).float(), 0.2),
    "n < d": (lambda: spectrum(500, 900, seed=8).float(), 0.2),
    "a line": (lambda: torch.linspace(-5, 5, 1500)[:, None] * torch.nn.functional.normalize(torch.ones(1, 200)), 0.002),
}

GEOMETRIES: dict[str, tuple[Callable[[], Tensor], tuple[float, ...]]] = {
    "near-copies, 1e-2": (_tight(1e-2), (0.01, 0.1, 0.5, 1.0, 2.0, 5.0)),
    "near-copies, 1e-4": (_tight(1e-4), (0.01, 0.1, 0.5, 1.0, 2.0, 5.0)),
    "sphere": (lambda: _unit(normal(1500, 300, seed=0)), (0.01, 0.05, 0.1, 0.3, 1.0, 10.0)),
    "one-hot": (lambda: torch.eye(512, dtype=torch.float64), (0.02, 0.1, 0.2, 0.5, 2.0)),
    "scaled one-hot": (lambda: 100 * torch.eye(400, dtype=torch.float64), (2.0, 10.0, 20.0, 30.0, 60.0)),
    "twins, 1e-1": (_twins(1e-1), (0.01, 0.05, 0.1, 1.0, 3.0)),
    "twins, 1e-3": (_twins(1e-3), (0.003, 0.05, 0.5, 1.5, 5.0)),
    "outlier, 1e4": (_outlier, (0.02, 0.3, 1.0, 3.0, 20.0, 70.0)),
    "offset 1e4, spread 1e-2": (lambda: 1e4 + 1e-2 * normal(800, 100, seed=0), (0.003, 0.01, 0.03, 0.1, 1.0)),
    "scales 1e-3 to 1e3": (
        lambda: (
            10 ** (6 * torch.rand(600, 1, generator=gen(0), dtype=torch.float64) - 3) * _unit(normal(600, 64, seed=1))
        ),
        (0.002, 0.02, 0.3, 3.0, 30.0),
    ),
    "a line in 500 dimensions": (
        lambda: torch.linspace(-5, 5, 1500, dtype=torch.float64)[:, None] * _unit(normal(1, 500, seed=0)),
        (0.002, 0.02, 0.1, 0.5, 3.0),
    ),
    "a lattice": (lambda: _lattice(5), (0.1, 0.4, 0.8, 1.5, 5.0)),
}
