r"""The posterior over training points for a batch of queries, and its covariance operator (docs/theory.md, §2).

:class:`Posterior` returns everything that follows from the weights :math:`r_i(x, t)`. The weights are kept between
calls where they fit into an eighth of the engine's memory, and computed again where they do not."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.checks import as_tensor, check_real, check_whole, is_whole
from vkernel.core.covariance import Covariance, fits
from vkernel.core.errors import require
from vkernel.core.rng import Generator
from vkernel.posterior.engine import Engine
from vkernel.posterior.weights import Moments, Queries, Want, Weights, log_mass, reduce

Shape = tuple[int, ...]


class Posterior:
    r"""The posterior is the law of the training point :math:`x_0`, given that it was noised to x at time t. ``batch``
    and ``shape`` are the batch and event shapes of the queries; results take ``dtype`` and ``device``.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> score = vk.EmpiricalScore(data, process)
    >>> post = score.posterior(torch.zeros(5, 1), 0.1)
    >>> post.mean.shape, post.logp.shape, post.ess.shape
    (torch.Size([5, 1]), torch.Size([5]), torch.Size([5]))
    >>> weights, indices = post.top(2)
    >>> weights.shape
    torch.Size([5, 2])
    """

    def __init__(
        self, engine: Engine, queries: Queries, batch: Shape, shape: Shape, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.engine, self.queries = engine, queries
        self._kept: list[Weights] | None = None
        self._first: Moments | None = None
        self._second: Moments | None = None
        self._log_z: Tensor | None = None
        self.batch, self.shape, self.dtype, self.device = batch, shape, dtype, device

    def moments(self, want: Want = frozenset(), vector: Tensor | None = None) -> Moments:
        """Return the moments over the whole set in float64, as the engine holds them; ``vector (B, d)``."""
        if self._kept is None and self.engine.without_weights(want):
            return self.engine.moments(self.queries, want, vector)
        return self.engine.ranks.merge(reduce(self._weights(), self.queries.x, want, vector))

    @property
    def first(self) -> Moments:
        """Return log z and the mean, which almost everything needs, in float64."""
        self._first = self._first or self.moments()
        return self._first

    @property
    def log_z(self) -> Tensor:
        """Return the log of the posterior's normalisation, float64; by itself it takes half the time of the mean."""
        if self._log_z is None:
            ranks, whole = self.engine.ranks, self.engine.direct is not None and self._kept is None
            known = self.first if whole else self._first  # ranks differ in what they hold, not in what they exchange
            if known is None:
                kept = self._kept
                table = self.engine.log_mass(self.queries) if kept is None else log_mass(kept, self.queries.x)
                self._log_z = ranks.fold(table[:, None], torch.logaddexp)[:, 0]
            else:
                self._log_z = known.log_z
        return self._log_z

    @property
    def _summary(self) -> Moments:
        self._second = self._second or self.moments(frozenset({"trace", "weights"}))
        self._first = self._first or self._second
        return self._second

    def _weights(self) -> Iterator[Weights]:
        if self._kept is not None:
            yield from self._kept
            return
        kept: list[Weights] = []
        room = self.engine.memory // 8
        for weights in self.engine.weights(self.queries):
            room -= weights.nbytes
            kept.append(weights) if room >= 0 else kept.clear()
            yield weights
        self._kept = kept if room >= 0 else None

    def _per_query(self, a: Tensor) -> Tensor:
        return a.to(self.device, self.dtype).reshape(self.batch)

    def _like_x(self, a: Tensor) -> Tensor:
        return a.to(self.device, self.dtype).reshape(self.batch + self.shape)

    @property
    def mean(self) -> Tensor:
        r"""Return :math:`m = \sum_i r_i y_i`, ``(*batch, *shape)``: the ideal denoiser (2.4)."""
        return self._like_x(self.first.mean)

    @property
    def logp(self) -> Tensor:
        r"""Return :math:`\log p(x | t)`, the noised training set's log density, ``(*batch,)``."""
        return self._per_query(self.log_z - 0.5 * self.engine.data.d * (2 * math.pi * self.queries.var).log())

    @property
    def entropy(self) -> Tensor:
        r"""Return :math:`-\sum_i r_i \log r_i` in nats, ``(*batch,)``."""
        return self._per_query(self._summary.present()["entropy"])

    @property
    def ess(self) -> Tensor:
        r"""Return the effective number of training points, :math:`1 / \sum_i r_i^2`, ``(*batch,)``."""
        return self._per_query(1 / self._summary.present()["square"])

    @property
    def cov(self) -> PosteriorCovariance:
        r"""Return :math:`\mathrm{Cov}(x_0 | x, t)` as an operator."""
        return PosteriorCovariance(self)

    def weight(self, indices: Tensor) -> Tensor:
        """Return the weight :math:`r_i` of one point for each query; ``indices`` broadcasts to ``batch``."""
        i = as_tensor(indices, "indices").to(self.engine.data.device)
        require(not i.is_floating_point(), f"indices must be integers, not {i.dtype}.")
        wanted = f"one index, or one for each query, {self.batch}, would do"
        require(fits(tuple(i.shape), self.batch), f"indices have shape {tuple(i.shape)}; {wanted}.")
        i, whole = i.expand(self.batch).flatten(), self.engine.whole
        logit = self.queries.exact_logits(whole, whole.weights.log(), torch.arange(len(i), device=i.device), i)
        return self._per_query((logit - self.log_z).exp())

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        """Return the weights, descending, and indices of the ``k`` heaviest points, both ``(*batch, k)``."""
        n = self.engine.whole.n
        require(is_whole(k) and 1 <= k <= n, f"top(k) needs 1 ≤ k ≤ n = {n}; got k = {k}.")
        logit, index = self.engine.nearest(self.queries, k)
        weight = (logit - self.log_z[:, None]).exp()
        return weight.to(self.device, self.dtype).reshape(*self.batch, k), index.to(self.device).reshape(*self.batch, k)

    def sample_indices(self, k: int, generator: Generator = None) -> Tensor:
        """Draw ``k`` independent indices of the training point, ``(k, *batch)``, by inversion."""
        check_whole(k, "k")
        source = rng.as_generator(generator)
        return self.indices_at(rng.rand((k, *self.batch), source))

    def indices_at(self, u: Tensor) -> Tensor:
        """Return the index at which the posterior's cumulative weight passes u in (0, 1), for u ``(k, *batch)``."""
        good = tuple(check_real(u, "u").shape[1:]) == self.batch
        require(good, f"u has shape {tuple(u.shape)}; it must be (k, *batch) with batch {self.batch}.")
        k, count, device = len(u), len(self.queries), self.engine.data.device
        n, first, ranks, log_z = self.engine.whole.n, self.engine.first, self.engine.ranks, self.first.log_z
        u = ranks.common(u.to(device, torch.float64).reshape(k, count))
        found = torch.full((k, count), n, dtype=torch.long, device=device)  # n: not found
        below = torch.zeros(count, dtype=torch.float64, device=device)
        below += ranks.before(lambda: (reduce(self._weights(), self.queries.x).log_z - log_z).exp())
        for weights in self._weights():
            rows, (logit, index) = weights.rows, weights.table()
            cdf = (logit - log_z[rows, None]).exp().cumsum(1)
            left = u[:, rows] - below[rows]
            hit = (left >= 0) & (left < cdf[:, -1])
            place = torch.searchsorted(cdf, left.mT.contiguous(), right=True).clamp_max(cdf.shape[1] - 1)
            found[:, rows] = torch.where(hit, first + index.gather(1, place).mT, found[:, rows])
            below[rows] += cdf[:, -1]
        index = ranks.fold(found.mT, torch.minimum)
        if bool((index == n).any()):
            # A draw beyond the last sum, by rounding or in the dropped share (< 1e-7), takes the heaviest point.
            index = torch.where(index < n, index, self.engine.nearest(self.queries, 1)[1])
        return index.mT.to(self.device).reshape(k, *self.batch)

    def sample(self, k: int, generator: Generator = None) -> Tensor:
        """Draw the training point itself, ``k`` times independently, ``(k, *batch, *shape)``."""
        index = self.sample_indices(k, generator)
        return self.engine.whole.take(index.flatten()).to(self.device, self.dtype).reshape(index.shape + self.shape)

    def _combine(self, vectors: tuple[Tensor, ...] = (), keys: Tensor | None = None) -> Tensor:
        """Sum over points of r (y - m), with ``keys`` of sqrt(r) z (y - m), times (y - m)·v for each vector."""
        out, first = torch.zeros_like(self.queries.x), self.first  # which all processes evaluate together
        for weights in self._weights():
            out.index_add_(0, weights.rows, weights.combine(first, vectors, keys, self.engine.first))
        return self.engine.ranks.fold(out, torch.add)

    def third(self, v: Tensor, u: Tensor) -> Tensor:
        r"""Return :math:`\sum_i r_i (y_i-m) ((y_i-m) \cdot v) ((y_i-m) \cdot u)`, the derivative of Cov (2.9)."""
        checked, where = (check_real(a, "A vector") for a in (v, u)), self.engine.data.device
        flat = [a.to(where, torch.float64).reshape(self.queries.x.shape) for a in checked]
        self.engine.ranks.same("The vectors", *flat)
        return self._like_x(self._combine(tuple(flat)))


class PosteriorCovariance(Covariance):
    r"""Apply :math:`\sum_i r_i (y_i - m)(y_i - m)^T` by two products with the data, without a matrix.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> score = vk.EmpiricalScore(data, process)
    >>> post = score.posterior(torch.zeros(5, 1), 0.1)
    >>> post.cov.trace().shape, post.cov.dense().shape
    (torch.Size([5]), torch.Size([5, 1, 1]))
    """

    def __init__(self, posterior: Posterior) -> None:
        self.posterior, self.batch, self.shape = posterior, posterior.batch, posterior.shape
        self.dtype, self.device = posterior.dtype, posterior.device

    def __matmul__(self, v: Tensor) -> Tensor:
        p, whole = self.posterior, self.batch + self.shape
        good, given = fits(tuple(check_real(v, "v").shape), whole), tuple(v.shape)
        require(good, f"v has shape {given}, which does not broadcast to {whole}.")
        flat = v.to(p.queries.x).expand(whole).reshape(p.queries.x.shape)
        return p._like_x(p.moments(vector=flat).present()["product"])

    def trace(self) -> Tensor:
        return self.posterior._per_query(self.posterior._summary.present()["trace"])

    def diag(self) -> Tensor:
        return self.posterior._like_x(self.posterior.moments(frozenset({"diag"})).present()["diag"])

    def draw(self, generator: Generator = None) -> Tensor:
        r"""Draw a Gaussian exactly, as :math:`\sum_i \sqrt{r_i}\, z_i\, (y_i - m)` with :math:`z_i \sim N(0, 1)`.
        :math:`z_i` belongs to the pair (query, point): chunks, shards and devices do not change it."""
        ranks, device = self.posterior.engine.ranks, self.posterior.engine.data.device
        keys = rng.keys((len(self.posterior.queries),), rng.as_generator(generator), device)
        return self.draw_at(ranks.common(keys))

    def draw_at(self, keys: Tensor) -> Tensor:
        """Return the draw of :meth:`draw` whose random numbers belong to ``keys``, one whole number for each query."""
        return self.posterior._like_x(self.posterior._combine(keys=keys.flatten()))
