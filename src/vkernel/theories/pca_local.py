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

Neighbours have similar supports: the logits of coordinate p are those of p - 1 and the terms in which the rows of M
differ, :math:`\sum_q (M_{pq} - M_{p-1,q}) \big(\frac{\alpha}{\sigma^2} x_q y_{iq} - \frac{\alpha^2}{2\sigma^2}
y_{iq}^2\big)`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Self

import torch
from torch import Tensor

from vkernel.core.checks import check_number, check_type
from vkernel.posterior.weights import blocks
from vkernel.process import Process
from vkernel.score.base import Score, check_score
from vkernel.theories.base import TOLERANCE, Average, Data, Theory, check_images, doubt, rounding
from vkernel.theories.fit import Levels, fit
from vkernel.theories.gaussian import Gaussian
from vkernel.theories.scale import ByLevel, Scale

QUERIES, ROWS = 64, 512  # queries, and rows of the mask, at once
POINTS = 1 << 14, 1 << 17  # training images at once, on a CPU and on a GPU
TILE = 1 << 19, 1 << 27  # logits at once
LENGTH = 64  # rows of the mask that are given by changes
CONSTANT = 1e-12  # of the largest W_pp, below which a pixel is constant
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
        self._level: tuple[tuple[float, ...], Mask] | None = None

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
            parts = blocks(self.data.d, ROWS)
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
            mask = self._mask(a, v)
            for which in (inverse == j).nonzero().flatten().split(QUERIES):
                out = out.index_copy(0, which, self._block(rows[which], a, v, mask))
        return out.reshape(x.shape)

    def _block(self, x: Tensor, alpha: Tensor, var: Tensor, mask: Mask) -> Tensor:
        """Return the denoiser at queries ``x (B, d)`` of one noise level."""
        found = self._averages(x, alpha, var, mask)
        value = torch.cat([some.value for some in found])  # (d, B, 3)
        mean = value[..., 0].mT
        if x.dtype != torch.float64:
            log_z, peak = (torch.cat(part) for part in zip(*((some.log_z, some.peak) for some in found), strict=True))
            off = doubt(value[..., :2], peak, self._error(x, alpha, var, mask, log_z, value[..., 2])).sum(0)
            wrong = (off > (TOLERANCE * self.data.spread) ** 2).nonzero().flatten()
            if len(wrong):
                mean[wrong] = self._block(x[wrong].double(), alpha, var, mask) - self.center
        return mean + self.center

    def _averages(self, x: Tensor, alpha: Tensor, var: Tensor, mask: Mask) -> list[Average]:
        """Return the averages ``(p, B, 3)`` of coordinates less their mean, of their squares and of the masked sums of
        squares, group by group."""
        (count, d), gpu = x.shape, x.device.type != "cpu"
        slope = (-alpha.square() / (2 * var)).to(x.dtype)
        linear = ((x - alpha * self.center) * (alpha / var)).to(x.dtype)
        left = torch.cat([linear.mT, slope.expand(d, count)])  # (2 d, B)
        changes = mask.changes(x.dtype)
        step = max(1, min(self.data.n, POINTS[gpu], self.memory // (32 * (2 * d + 3 * count))))
        group = min(d, max(1, min(TILE[gpu], self.memory // 32) // (count * step)))
        found = [Average() for _ in range(0, d, group)]
        for y, log_w in self.columns(step, x.dtype, lambda y: y.mT):
            right = torch.cat([y, mask.squares(y)])  # (2 d, n)
            nothing = log_w.expand(count, -1)
            whole = y.square().sum(0)
            everything = nothing + linear @ y + slope * whole
            logit, norm, zero = nothing, whole, torch.zeros_like(whole)
            for average, part in zip(found, blocks(d, group), strict=True):
                logits, norms = [], []
                for p in range(part.start, part.stop):
                    index = mask.index[p]
                    start = mask.start[p]
                    logit, norm = (logit, nothing, everything)[start], (norm, zero, whole)[start] + right[d + p]
                    logit = torch.addmm(logit, (left[index] * changes[p]).mT, right[index])
                    logits.append(logit)
                    norms.append(norm)
                average.add(torch.stack(logits), torch.stack([y[part], y[part].square(), torch.stack(norms)], -1))
        return found

    def _error(self, x: Tensor, alpha: Tensor, var: Tensor, mask: Mask, log_z: Tensor, square: Tensor) -> Tensor:
        """Return the rounding errors of logits in float32, ``(d, B)``, given the masked ``square`` of heavy points."""
        there = (mask.reach @ (x - alpha * self.center).square().mT).sqrt()[mask.chain]
        width, terms = mask.reach.sum(1)[mask.chain, None], mask.terms[mask.chain, None]
        return rounding(alpha, var, there, square.clamp_min(0).sqrt(), width, terms, log_z)

    def _mask(self, alpha: Tensor, var: Tensor) -> Mask:
        """Return the mask at one noise level, which is kept for the next call."""
        level = float(alpha), float(var), self._cut(alpha, var)
        if self._level is None or self._level[0] != level:
            self._level = level, Mask(self.mask(alpha, var, part) for part in blocks(self.data.d, ROWS))
        return self._level[1]


class Mask:
    r"""The rows of a mask as changes: row p is row p - 1 plus a change at the coordinates ``index[p]``; at the start of
    a chain it is the change alone (``start[p]`` = 1), or one plus the change (2).

    A chain ends where its next change would be longer than a start, and after ``LENGTH`` rows, since rounding errors
    add up. For their bound ``reach (chains, d)`` is the largest :math:`|M_{pq}|` of its rows, ``terms`` the number of
    its rows and of the longest change, and ``chain (d,)`` the chain of each row. The last index of a row is d + p, of
    change 1: that of the changed squares (:meth:`squares`)."""

    def __init__(self, parts: Iterable[Tensor]) -> None:
        self.index: list[Tensor] = []
        self.start: list[int] = []
        values: list[Tensor] = []
        reach: list[Tensor] = []
        lengths: list[int] = []
        chain: list[int] = []
        terms: list[int] = []
        for mask in parts:
            rows, d = mask.shape
            place, first = torch.arange(rows, device=mask.device), len(self.start)
            bases = torch.stack([torch.cat([mask[:1], mask[:-1]]), torch.zeros_like(mask), torch.ones_like(mask)])
            counts = (mask != bases).sum(2)
            counts[0, place % LENGTH == 0] = d + 1
            start = counts.argmin(0)
            changes = torch.cat([mask - bases[start, place], torch.zeros_like(mask)], 1)
            changes[place, d + first + place] = 1.0
            row, column = changes.nonzero(as_tuple=True)
            lengths += (counts.amin(0) + 1).tolist()
            self.index += column.split(lengths[first:])
            self.start += start.tolist()
            values.append(changes[row, column])
            begins = (start != 0).nonzero().flatten().tolist()
            for begin, end in itertools.pairwise([*begins, rows]):
                chain += [len(reach)] * (end - begin)
                reach.append(torch.cat([mask[begin:end], bases[start[begin], begin : begin + 1]]).abs().amax(0))
                terms.append(end - begin + max(lengths[first + begin : first + end]))
        self.values, self.lengths = torch.cat(values), lengths
        device = self.values.device
        self.reach, self.chain = torch.stack(reach), torch.tensor(chain, device=device)
        self.terms = torch.tensor(terms, device=device)

    def changes(self, dtype: torch.dtype) -> Sequence[Tensor]:
        """Return the changes of each row, ``(K, 1)``."""
        return self.values.to(dtype)[:, None].split(self.lengths)

    def squares(self, y: Tensor) -> Tensor:
        """Return the sums of squares of ``y (d, n)`` with the changes of each row as coefficients, ``(d, n)``."""
        d, column = len(y), torch.cat(self.index)
        row = torch.arange(d, device=y.device).repeat_interleave(torch.tensor(self.lengths, device=y.device))
        inside = column < d
        entries = torch.stack([row, column])[:, inside], self.values[inside].to(y.dtype)
        return torch.sparse.mm(torch.sparse_coo_tensor(*entries, (d, d), check_invariants=False), y.square())
