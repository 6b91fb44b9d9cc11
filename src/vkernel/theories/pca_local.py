r"""The theory of data-dependent locality: the output at a pixel depends on the pixels that correlate with it.

With the principal axes U and variances :math:`\lambda` of the training set, Wiener's filter is :math:`W = U
\operatorname{diag}(\alpha^2\lambda / (\alpha^2\lambda + \sigma^2)) U^T`. At coordinate p (a pixel of one channel)

.. math:: m_p = \sum_i r_{pi}\, y_{ip}, \qquad r_{pi} \propto w_i \exp\Big(-\sum_q M_{pq} \frac{(x_q - \alpha
   y_{iq})^2}{2\sigma^2}\Big), \qquad M_{pq} = \min(1, |W_{pq}|/W_{pp}), \quad M_{pp} = 1,

as it is (``soft``), or 1 where :math:`M \ge` ``threshold`` and 0 elsewhere (Lukoianov, Yuan, Solomon and Sitzmann 2025,
"Locality in image diffusion models emerges from data statistics"). threshold = 0 is the exact denoiser; above 1 every
coordinate is estimated from itself alone.

``published`` reproduces the mask of the authors' public code instead: :math:`M_{pq} = W_{pq}/W_{qq}`, or :math:`W_{pq}`
where :math:`W_{qq} < 10^{-6}`, with its sign if ``soft``, else 1 where :math:`|M|` is at least ``threshold`` times its
largest entry, which may leave a pixel out of its own mask. (That code also averages the estimates of batches of
training images, and so depends on their size; this one does not.)

The sums over q are products of rows of M with the terms of a part of the training images. A CPU restricts them to the
entries of M that are not zero, or not one, if these are few. For queries in float32 they are sums of float32 numbers.
Where the noise is less than the spread of a pixel the terms are squares of differences, all of one sign. Of heavy
training images the sum is on average at most :math:`s = \log n - \log z` (Gibbs' inequality), and with K terms its
rounding error has a standard deviation of about :math:`2^{-24} \big((1 + \sqrt K / 3)\, s + \max(|x|_\infty, \alpha
|y|_\infty) \sqrt{2 s} / \sigma\big)`, x and y less the mean. At more noise most of a square is :math:`x_q^2`, the same
for all images, which is left out; the error is that of products (:mod:`vkernel.theories.base`). Coordinates for which
it is too large are evaluated again in float64."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from vkernel.core.checks import check_number, check_type
from vkernel.posterior.dense import unit_roundoff
from vkernel.posterior.weights import blocks
from vkernel.process import Process
from vkernel.score.base import Score, check_score, differentiated
from vkernel.theories.base import TOLERANCE, Average, Data, Theory, check_images, doubt, rounding
from vkernel.theories.fit import Levels, fit
from vkernel.theories.gaussian import Gaussian
from vkernel.theories.scale import ByLevel, Scale

ROWS = 1 << 10, 1 << 7  # of the mask at once, on a CPU and on a GPU
PAIRS = 1 << 8, 1 << 20  # of a query and a training image at once: on a CPU their terms are in its cache
SPARSE = 3, 8  # the time of an entry of a sparse mask on a CPU, of that of a dense one, in float32 and float64
CONSTANT = 1e-12  # of the largest W_pp, below which a pixel is constant
COPIES = 24  # bytes for an entry of the mask, in all
SMALL = 1e-6  # the least W_qq by which the public code divides


class PCALocal(Theory):
    """The denoiser whose pixels are estimated from the pixels that correlate with them.

    Args:
        threshold: the least relative weight in the mask: a number, a function of t, or a table {σ/α: threshold}.
        soft: whether the mask is used as it is, without the threshold.
        published: whether the mask is that of the authors' public code.

    >>> import torch, vkernel as vk
    >>> theory = vk.theories.PCALocal(torch.rand(20, 8, 8), vk.VP(), threshold=0.1)
    >>> theory.denoise(torch.randn(5, 8, 8), 0.5).shape
    torch.Size([5, 8, 8])
    """

    def __init__(
        self,
        data: Data,
        process: Process,
        threshold: Scale = 0.02,
        soft: bool = False,
        published: bool = False,
        memory: int | None = None,
    ) -> None:
        super().__init__(data, process, memory)
        check_images(self.data, process, "PCALocal")
        self.thresholds = ByLevel(threshold, "threshold", process, lambda cut: check_number(cut, "threshold", 0.0))
        self.soft, self.published = check_type(soft, "soft", bool), check_type(published, "published", bool)
        self.narrow = not (published and soft)  # with weights of both signs there is no bound of rounding errors
        self.gaussian = Gaussian(self.data, process, memory=memory)
        self.block = min(self.data.d, ROWS[self.device.type != "cpu"])
        self._level: tuple[tuple[float, ...], list[Rows]] | None = None

    @property
    def threshold(self) -> Scale:
        """The threshold of the mask: a number, a function of t, or a table {σ/α: threshold}."""
        return self.thresholds.given

    @property
    def options(self) -> dict[str, object]:
        return {"threshold": self.threshold, "soft": self.soft, "published": self.published}

    @classmethod
    def fit(
        cls,
        network: Score,
        data: Data,
        images: Data,
        *,
        thresholds: Sequence[float] | None = None,
        levels: Levels = 6,
        published: bool = False,
        seed: int = 0,
        memory: int | None = None,
    ) -> Self:
        r"""Return the theory whose table of thresholds explains ``network`` best, on ``images`` apart from those of a
        verdict.

        ``thresholds`` are the candidates (default: eight, from 0 to 0.5), of which the smaller counts at a tie;
        ``levels`` are noise levels σ/α, or how many (:mod:`vkernel.theories.fit`)."""
        theory = cls(data, check_score(network, "A fit").process, published=published, memory=memory)
        tried = sorted(thresholds or (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5))
        return fit(theory, theory.thresholds, network, images, tried, levels, seed)

    def _cut(self, alpha: Tensor, var: Tensor) -> float:
        """Return the threshold at one noise level."""
        return self.thresholds.at(float(var.sqrt() / alpha))

    def mask(self, alpha: Tensor, var: Tensor, rows: slice) -> Tensor:
        """Return rows of M at one noise level, ``(rows, d)``."""
        m, cut = self._relative(alpha, var, rows), self._cut(alpha, var)
        if self.published:
            if self.soft:
                return m
            parts = blocks(self.data.d, self.block)
            largest = torch.stack([self._relative(alpha, var, part).abs().max() for part in parts]).max()
            return (m.abs() >= cut * largest).to(m)
        m = m if self.soft else (m >= cut).to(m)
        place = torch.arange(self.data.d, device=m.device)[rows]
        m[torch.arange(len(place), device=m.device), place] = 1.0
        return m

    def _relative(self, alpha: Tensor, var: Tensor, rows: slice) -> Tensor:
        """Return rows of W relative to its diagonal; a constant pixel, whose W is rounding, has zeros."""
        lam, axes = alpha**2 * self.gaussian.variances, self.gaussian.axes
        gain = lam / (lam + var)
        w, own = (axes[:, rows].mT * gain) @ axes, gain @ axes.square()
        if self.published:
            return w / torch.where(own < SMALL, 1.0, own)
        live = own > CONSTANT * own.max()
        m = (w.abs() / torch.where(live, own, 1.0)[rows, None]).clamp_max(1)
        return m * live * live[rows, None]

    def mean(self, x: Tensor, alpha: Tensor, var: Tensor) -> Tensor:
        rows, out = x.flatten(1), torch.empty(len(x), self.data.d, dtype=torch.float64, device=x.device)
        level, inverse = torch.stack([alpha, var]).unique(dim=1, return_inverse=True)
        for j, (a, v) in enumerate(level.mT):
            which = (inverse == j).nonzero().flatten()
            out = out.index_copy(0, which, self._block(rows[which], a, v))
        return out.reshape(x.shape)

    def _block(self, x: Tensor, alpha: Tensor, var: Tensor) -> Tensor:
        """Return the denoiser at queries ``x (B, d)`` of one noise level."""
        mask = self._level_rows(alpha, var)
        value, peak, log_z = self._averages(x, alpha, var, mask)
        mean = value[..., 0].mT
        if x.dtype != torch.float64:
            off = doubt(value, peak, self._error(x, alpha, var, mask, log_z, value[..., 1]))  # (d, B)
            budget = (TOLERANCE * self.data.spread) ** 2
            bad = (off.sum(0) > budget) & (off > budget / len(off))
            for b in bad.any(0).nonzero().flatten().tolist():
                pairs = zip(mask, bad[:, b].split(self.block), strict=True)
                again = [rows.some(wrong) for rows, wrong in pairs if wrong.any()]
                mean[b, bad[:, b]] = self._averages(x[b : b + 1].double(), alpha, var, again)[0][:, 0, 0]
        return mean + self.center

    def _averages(
        self, x: Tensor, alpha: Tensor, var: Tensor, mask: Sequence[Rows] | Made
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the averages ``(p, B, 2)`` of the coordinates of some rows of the mask, less their mean, and of their
        squares, the largest weights and the logarithms of the sums of weights, both ``(p, B)``."""
        (count, d), plain, scale = x.shape, not differentiated(x), (2 * var).rsqrt()
        there = ((x - alpha * self.center) * scale).to(x.dtype).mT[..., None]  # (d, B, 1)
        pairs = max(1, min(PAIRS[x.device.type != "cpu"], self.memory // (32 * (d + 2 * self.block))))
        step, squares = min(self.data.n, pairs), self._squares(alpha, var)
        parts = list(blocks(count, pairs // step))
        found = [[Average() for _ in range(len(mask))] for _ in parts]
        for y, log_w in self.columns(step, x.dtype, lambda y: y.mT):
            here, value = (y * (alpha * scale).to(x.dtype))[:, None], torch.stack([y, y.square()], 1).mT
            for part, averages in zip(parts, found, strict=True):
                near = there[:, part]
                term = (near - here).square() if squares else (here - 2 * near) * here  # (d, B, n)
                whole = term.sum(0)
                for rows, average in zip(mask, averages, strict=True):
                    logit = -rows.sums(term, whole, plain)
                    average.add(logit + log_w if self.weighted else logit, value[rows.place])
        each = (zip(*((a.value, a.peak, a.log_z) for a in averages), strict=True) for averages in found)
        value, peak, log_z = (torch.cat(part, 1) for part in zip(*(map(torch.cat, some) for some in each), strict=True))
        return value, peak, log_z

    def _squares(self, alpha: Tensor, var: Tensor) -> bool:
        """Return whether squares are smaller than products: the noise is less than the spread of a pixel."""
        return float(var) * self.data.d < float(alpha) ** 2 * self.data.spread**2

    def _error(
        self, x: Tensor, alpha: Tensor, var: Tensor, mask: Sequence[Rows] | Made, log_z: Tensor, square: Tensor
    ) -> Tensor:
        """Return the rounding errors of logits in float32, ``(d, B)``, given the average ``square`` of coordinates."""
        centred, total = (x - alpha * self.center).mT, math.log(self.data.n) - log_z
        terms = torch.cat([rows.terms for rows in mask])[:, None]
        if self._squares(alpha, var):
            size, total = torch.maximum(centred.abs().amax(0), alpha * self.farthest), total.clamp_min(0)
            product = unit_roundoff(x.device) * (1 + terms.sqrt() / 3) * total
            return product + 2.0**-24 * size * (2 * total / var).sqrt()
        # the square of a coordinate, averaged with its own weights, stands for that with the weights of another
        norms = torch.stack([centred.square(), square], 1)
        whole = norms.sum(0)
        masked = [whole.expand(len(r.mask), -1, -1) if r.base else r.sums(norms, whole, True) for r in mask]
        there, here = torch.cat(masked).sqrt().unbind(1)
        return rounding(alpha, var, there, here, terms.clamp_min(1), terms, total)

    @functools.cached_property
    def farthest(self) -> Tensor:
        """The largest coordinate of a training point, less the mean."""
        step = max(1, self.memory // (32 * self.data.d))
        return torch.stack([(y.flatten(1) - self.center).abs().max() for y, _ in self.points(step)]).max()

    def _level_rows(self, alpha: Tensor, var: Tensor) -> list[Rows] | Made:
        """Return the mask at one noise level, which is kept for the next call if memory allows."""
        level, exact = (float(alpha), float(var), self._cut(alpha, var)), self._squares(alpha, var)
        if self._level is not None and self._level[0] == level:
            return self._level[1]
        made = Made(lambda part: Rows(self.mask(alpha, var, part), part, exact), list(blocks(self.data.d, self.block)))
        if COPIES * self.data.d**2 > self.memory:
            return made
        self._level = level, list(made)
        return self._level[1]


@dataclass(frozen=True)
class Made:
    """The rows of a mask in parts that are made whenever they are used."""

    make: Callable[[slice], Rows]
    parts: list[slice]

    def __iter__(self) -> Iterator[Rows]:
        return map(self.make, self.parts)

    def __len__(self) -> int:
        return len(self.parts)


class Rows:
    """Some rows of a mask, ``(P, d)``, and their places, as changes of zeros, or of ones (``base`` 1) if these are few;
    none if the sums must be ``exact``, without differences."""

    def __init__(self, mask: Tensor, place: slice | Tensor, exact: bool) -> None:
        self.mask, self.place, self.exact = mask, place, exact
        self.base = int(SPARSE[0] * int((mask != 1).sum()) < (1 if exact else mask.numel()))
        change = mask - 1 if self.base else mask
        used = change.any(0).nonzero().flatten()
        self.used = used if 4 * len(used) < 3 * mask.shape[1] else None  # a copy of nearly all columns is no gain
        self.change = change if self.used is None else change[:, used]
        count = change.count_nonzero(1)
        self.terms = (count + self.base * mask.shape[1]).double()
        # whether sums over the entries are faster, in float32 and in float64
        cpu, entries = mask.device.type == "cpu", int(count.sum())
        self.sparse = [cpu and factor * entries < self.change.numel() for factor in SPARSE]
        if any(self.sparse):
            row, self.column = change.nonzero(as_tuple=True)
            self.entries, self.first = change[row, self.column], count.cumsum(0) - count

    def some(self, which: Tensor) -> Rows:
        """Return the rows of a boolean tensor ``(P,)``."""
        place = torch.arange(self.mask.shape[1], device=which.device)[self.place]
        return Rows(self.mask[which], place[which], self.exact)

    def sums(self, a: Tensor, whole: Tensor, plain: bool) -> Tensor:
        """Return the products of the rows with ``a (d, B, n)`` of the sum ``whole (B, n)``, ``(P, B, n)``; ``plain`` if
        no derivative is taken."""
        flat = a.flatten(1)
        if plain and self.sparse[a.dtype == torch.float64]:
            found = embedding_bag(
                self.column, flat, self.first, mode="sum", per_sample_weights=self.entries.to(a.dtype)
            )
        else:
            found = self.change.to(a.dtype) @ (flat if self.used is None else flat[self.used])
        found = found.unflatten(1, a.shape[1:])
        return found + whole if self.base else found
