r"""Distances of two laws (theory, §10.2): energy, kernel, Wasserstein, Fréchet,

.. math:: \mathcal E = 2 E|X-Y| - E|X-X'| - E|Y-Y'|, \qquad
          \mathrm{MMD}^2 = E\,\kappa(X,X') + E\,\kappa(Y,Y') - 2E\,\kappa(X,Y), \quad
          \kappa(x, y) = \Big(\frac{x \cdot y}{k} + 1\Big)^p, \\
          W_p^p = \min_\pi E_\pi |X-Y|^p, \qquad
          D = |m_a - m_b|^2 + \mathrm{tr}\big(A + B - 2 (A^{1/2} B A^{1/2})^{1/2}\big) .

:math:`\mathcal E` and MMD² take :math:`X, X'` from different units (two points of one member share its field), are
unbiased, and have the error of the jackknife over units; W and D have that of their derivatives in the laws. D is
biased upwards: noise in the covariances is distance. With n no more than a few k features its error is too wide where
the laws are close, by a factor of two at n = 4k.

:math:`\mathcal E` and MMD² are quadratic in the law: of M laws :math:`q_m` with mean :math:`\bar q`, the mean of the
single distances is the distance of :math:`\bar q` plus a variance over members. :func:`pair_means` returns the means
over pairs of which all three consist."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.checks import check_choice, check_number, check_whole, takes
from vkernel.core.errors import require
from vkernel.core.estimate import Estimate, jackknife_se
from vkernel.core.rng import Generator
from vkernel.metrics.samples import CHUNK, Array, Reading, Samples, read_pair

MATCHED = 4000  # points that an exact matching may take: its time grows like their cube
Pairwise = Callable[[Tensor, Tensor], Tensor]  # of x (…, n, d) and y (…, m, d): (…, n, m)


@takes(read_pair)
def energy_distance(a: Array, b: Array, **reading: Unpack[Reading]) -> Estimate:
    """Estimate 2 E|X - Y| - E|X - X'| - E|Y - Y'| in any dimension from three units of each or more, unbiased.

    >>> import torch, vkernel as vk
    >>> source = torch.Generator().manual_seed(0)
    >>> a, b = torch.randn(200, 2, generator=source), torch.randn(200, 2, generator=source) + 1
    >>> vk.metrics.energy_distance(a, b).value > vk.metrics.energy_distance(a, a.flip(0)).value
    True
    """
    pair = read_pair(a, b, **reading)
    middle = pair[0].points.mean(0)  # centred, so that the products of cdist do not cancel
    # by differences in few dimensions, by the faster product in many
    mode = f"{'donot_use' if len(middle) <= 16 else 'use'}_mm_for_euclid_dist"
    first, second = (Samples(sample.x - middle, sample.members) for sample in pair)
    return _within_and_between(first, second, lambda x, y: torch.cdist(x, y, compute_mode=mode), "energy_distance")


@takes(read_pair)
def kernel_distance(a: Array, b: Array, degree: int = 3, **reading: Unpack[Reading]) -> Estimate:
    """Estimate MMD² for the kernel (x·y/k + 1)^degree from three units of each or more, unbiased, in time n² k.

    >>> import torch, vkernel as vk
    >>> source = torch.Generator().manual_seed(0)
    >>> a, b = torch.randn(200, 2, generator=source), torch.randn(200, 2, generator=source) + 1
    >>> vk.metrics.kernel_distance(a, b).value > 0
    True
    """
    check_whole(degree, "degree")
    mmd = _within_and_between(*read_pair(a, b, **reading), lambda x, y: -kernel(x, y, degree), "kernel_distance")
    require(math.isfinite(mmd.value), f"Kernels of degree {degree} overflow: the features are too large; rescale them.")
    return mmd


def kernel(x: Tensor, y: Tensor, degree: int = 3) -> Tensor:
    """Return κ of each x ``(n, k)`` with each y ``(m, k)``, ``(n, m)``."""
    return (x @ y.mT).div_(x.shape[-1]).add_(1).pow_(degree)


def _within_and_between(first: Samples, second: Samples, f: Pairwise, name: str) -> Estimate:
    """Estimate 2 E f(X, Y) - E f(X, X') - E f(Y, Y'), X and X' from different units, with the jackknife's error."""

    def sums(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([f(block, y).sum(1) for block in x.split(max(1, CHUNK // len(y)))])

    value, parts = 0.0, []
    for label, own, other in (("a", first, second), ("b", second, first)):
        x, y, g = own.points, other.points, own.units
        units = f"{'members' if own.members else 'samples'} of {label}"
        require(g >= 3, f"{name} needs at least 3 {units} for its error; got {g}.")
        each = x.reshape(g, -1, x.shape[1])
        alone = f(each, each).flatten() if len(x) == g else torch.stack([sums(u, u).sum() for u in each])
        between = sums(x, y).reshape(g, -1).mean(1) / len(y)
        within = (sums(x, x).reshape(g, -1).sum(1) - alone) * (g / len(x)) ** 2
        left = 2 * (between.sum() - between) / (g - 1) - (within.sum() - 2 * within) / ((g - 1) * (g - 2))
        value += float(between.mean() - within.sum() / (g * (g - 1)))
        parts.append((float(jackknife_se(left)) ** 2, g))
    return Estimate.of_variances(value, parts)


@dataclass(frozen=True)
class PairMeans:
    r"""Means of f over pairs of samples of M laws and reference points: ``to (M, N)`` :math:`= E\,f(X_m, y_j)`;
    ``within (M, M)`` :math:`= E\,f(X_m, X'_{m'})`, of samples from different starts; ``reference`` :math:`= E\,f(Y,
    Y')`.
    Distances are :math:`2 E f(X, Y) - E f(X, X') - E f(Y, Y')`; for a kernel, f is :math:`-\kappa`.

    >>> import torch, vkernel as vk
    >>> source = torch.Generator().manual_seed(0)
    >>> a, b = torch.randn(200, 2, generator=source), torch.randn(200, 2, generator=source) + 1
    >>> found = vk.metrics.pair_means(a[None], b)
    >>> found.to.shape, found.within.shape
    (torch.Size([1, 200]), torch.Size([1, 1]))
    """

    to: Tensor
    within: Tensor
    reference: Tensor

    @property
    def single(self) -> Tensor:
        """The distance of each law from the reference points' law, ``(M,)``, unbiased."""
        return 2 * self.to.mean(1) - self.within.diagonal() - self.reference

    @property
    def pooled(self) -> Tensor:
        """The distance of the mean law over members ``()``, unbiased; it needs two members or more."""
        count = len(self.within)
        between = (self.within.sum() - self.within.trace()) / (count * (count - 1))
        return 2 * self.to.mean() - between - self.reference


def pair_means(x: Tensor, y: Tensor, bandwidth: float | Tensor | None = None) -> PairMeans:
    r"""Return the means over pairs of samples ``x (M, n, d)`` and reference points ``y (N, d)``, in the dtype of x. f
    is the Euclidean distance or, with a ``bandwidth`` h, :math:`-\exp(-|x - y|^2/2h^2)`. Members share their starts:
    samples with the same index are no pair, since those of two networks that agree are alike.

    >>> import torch, vkernel as vk
    >>> source = torch.Generator().manual_seed(0)
    >>> a, b = torch.randn(200, 2, generator=source), torch.randn(200, 2, generator=source) + 1
    >>> found = vk.metrics.pair_means(a[None], b)
    >>> distance = 2 * found.to.mean() - found.within[0, 0] - found.reference
    >>> bool(distance > 0)
    True
    """
    require(
        x.ndim == 3 and y.ndim == 2, f"x must be (M, n, d) and y (N, d); got {tuple(x.shape)} and {tuple(y.shape)}."
    )
    (count, n, _), N, middle = x.shape, len(y), y.mean(0)
    x, y = x - middle, y - middle  # centred, so that the products of cdist do not cancel

    def of(away: Tensor) -> Tensor:
        return away if bandwidth is None else -(away / bandwidth).square().div(-2).exp()

    def sums(a: Tensor, b: Tensor) -> Tensor:
        """Return the sums over ``a`` of f with each of ``b``."""
        return torch.stack([of(torch.cdist(part, b)).sum(0) for part in a.split(max(1, CHUNK // len(b)))]).sum(0)

    everything, alone = x.flatten(0, 1), 0.0 if bandwidth is None else -1.0  # f of a point with itself
    to = torch.stack([sums(own, y) for own in x]) / n
    every = torch.stack([sums(own, everything).reshape(count, n).sum(1) for own in x])
    same = torch.stack([of((x - own).norm(dim=-1)).sum(1) for own in x])
    return PairMeans(to, (every - same) / (n * (n - 1)), (sums(y, y).sum() - N * alone) / (N * (N - 1)))


@takes(read_pair)
def wasserstein(
    a: Array,
    b: Array,
    p: float = 1,
    kind: str = "auto",
    projections: int = 128,
    *,
    generator: Generator = 0,
    **reading: Unpack[Reading],
) -> Estimate:
    r"""Estimate the distance :math:`W_p` of average laws: quantiles for numbers, slices or a matching for vectors.
    ``"sliced"`` is :math:`(E_u W_p^p(u\cdot X, u\cdot Y))^{1/p}` over ``projections`` directions u drawn from
    ``generator`` (by default the same each time); their spread is part of the error. ``"exact"`` matches points: up to
    4,000, as many of a as of b. ``"auto"`` is exact for numbers and sliced for vectors.

    >>> import torch, vkernel as vk
    >>> a = torch.linspace(0, 1, 50)[:, None]
    >>> round(float(vk.metrics.wasserstein(a, a + 2).value), 3)
    2.0
    """
    check_number(p, "p", 1)
    check_choice(kind, "kind", ("auto", "sliced", "exact"))
    first, second = read_pair(a, b, **reading)
    x, y = first.points, second.points
    if x.shape[1] == 1:
        costs, phi, psi = _along_lines(x.mT, y.mT, p)
    elif kind == "exact":
        costs, phi, psi = _matching(x, y, p)
    else:
        size = check_whole(projections, "projections", 2), x.shape[1]
        u = rng.randn(size, rng.as_generator(generator), torch.device("cpu"), torch.float64)
        blocks = (u / u.norm(dim=1, keepdim=True)).to(x.device).split(max(1, CHUNK // (len(x) + len(y))))
        lines = [_along_lines(directions @ x.mT, directions @ y.mT, p) for directions in blocks]
        costs = torch.cat([c for c, _, _ in lines])
        phi, psi = (torch.stack([line[k] for line in lines]).sum(0) for k in (1, 2))
    k, value = len(costs), float(costs.mean()) ** (1 / p)
    spread = (float(costs.var()) / k if k > 1 else 0.0, max(k, 2))
    parts = [first.variance(phi / k), second.variance(psi / k), spread]
    return Estimate.of_variances(value, parts, 0.0, slope=value ** (1 - p) / p if value > 0 else 0.0)


def _along_lines(x: Tensor, y: Tensor, p: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return W_p^p on K lines, x ``(K, n)``, y ``(K, m)``, and the potentials summed over lines, ``(n,)``, ``(m,)``.
    The monotone coupling goes through pairs (i, j) of sorted points. A step changes i or j or both, and the potentials
    by as much as the cost; where both change, by the mean of the two orders in which they can."""
    (x, to_x), (y, to_y) = x.sort(1), y.sort(1)
    n, m = x.shape[1], y.shape[1]
    ticks = torch.cat([torch.arange(n, device=x.device) * m, torch.arange(m, device=x.device) * n]).unique()
    i, j = ticks // m, ticks // n
    mass = torch.cat([ticks, ticks.new_tensor([n * m])]).diff().double() / (n * m)
    pairs = (i, j), (i[1:], j[:-1]), (i[:-1], j[1:]), (i[1:], j[1:])
    here, over_i, over_j, both = ((x[:, r] - y[:, c]).abs() ** p for r, c in pairs)
    before = here[:, :-1]
    sums = []
    for order, step, alone, other in ((to_x, i.diff() > 0, over_i, over_j), (to_y, j.diff() > 0, over_j, over_i)):
        potential = ((alone - before + both - other) / 2)[:, step].cumsum(1)
        sums.append(torch.zeros_like(order, dtype=x.dtype).scatter(1, order[:, 1:], potential).sum(0))
    return here @ mass, sums[0], sums[1]


def _matching(x: Tensor, y: Tensor, p: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return W_p^p, ``(1,)``, of as many x as y by an optimal matching, and the potentials of both. With x_i matched to
    y_i, potentials are shortest paths: φ_i ≤ φ_k + c(i, k) - c(k, k), which has no negative cycle."""
    from scipy.optimize import linear_sum_assignment

    n, m = len(x), len(y)
    require(n == m, f"An exact matching needs as many points of a as of b, not {n} and {m}; kind='sliced' takes any.")
    require(n <= MATCHED, f"An exact matching of {n:,} points takes too long (limit {MATCHED:,}); take kind='sliced'.")
    cost = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist") ** p
    match = torch.from_numpy(linear_sum_assignment(cost.cpu().numpy())[1]).to(x.device)
    cost = cost[:, match]
    paid = cost.diagonal()
    phi, excess = torch.zeros_like(paid), cost - paid
    for _ in range(n):
        shorter = (phi + excess).amin(1)
        done = float((phi - shorter).max()) <= 1e-12 * float(cost.max())
        phi = shorter
        if done:
            break
    return paid.mean()[None], phi, torch.empty_like(phi).scatter(0, match, paid - phi)


@takes(read_pair)
def frechet_distance(a: Array, b: Array, *, allow_singular: bool = False, **reading: Unpack[Reading]) -> Estimate:
    """Estimate Fréchet's distance (squared, as is the custom) of the Gaussians with the moments of a and b. Covariances
    of k features need more than k samples of each; ``allow_singular=True`` accepts fewer. The value then holds for the
    sample covariances but is far above that of the laws, and the error does not contain this.

    >>> import torch, vkernel as vk
    >>> source = torch.Generator().manual_seed(0)
    >>> a, b = torch.randn(200, 2, generator=source), torch.randn(200, 2, generator=source) + 1
    >>> 0.5 < vk.metrics.frechet_distance(a, b).value < 4  # the means differ by (1, 1)
    True
    """
    pair = read_pair(a, b, **reading)
    for name, sample in zip("ab", pair, strict=True):
        n, k = sample.points.shape
        require(n >= 2, f"A covariance needs at least 2 samples; {name} has {n}.")
        what = f"A covariance of {k} features has full rank from {k + 1} samples on, but {name} has {n}. Take more, or"
        require(allow_singular or n > k, f"{what} fewer features (pca:K); allow_singular=True takes it as it is.")
    # thin factors of the covariances give D, and the influence of each sample on it (10.5)
    means = [sample.points.mean(0) for sample in pair]
    centred = [sample.points - mean for sample, mean in zip(pair, means, strict=True)]
    (q_a, r_a), (q_b, r_b) = (torch.linalg.qr(x / math.sqrt(len(x) - 1)) for x in centred)
    u, s, v = torch.linalg.svd(r_a @ r_b.mT, full_matrices=False)
    shift = means[0] - means[1]
    value = float(shift @ shift + r_a.square().sum() + r_b.square().sum() - 2 * s.sum())
    parts = []
    for sample, x, q, basis, toward in zip(pair, centred, (q_a, q_b), (u, v.mT), (shift, -shift), strict=True):
        root = (len(x) - 1) * (q @ basis).square() @ s
        parts.append(sample.variance(2 * x @ toward + x.square().sum(1) - root))
    return Estimate.of_variances(max(value, 0.0), parts, 0.0)
