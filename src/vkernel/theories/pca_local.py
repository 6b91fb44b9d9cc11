r"""The theory of data-dependent locality: at every pixel a network sees the pixels that correlate with it.

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
training images, and so depends on their size; this one does not.)"""

from __future__ import annotations

import torch
from torch import Tensor

from vkernel.core.checks import check_number, check_type
from vkernel.posterior.weights import blocks
from vkernel.process import Process
from vkernel.theories.base import Average, Data, Theory, check_images
from vkernel.theories.gaussian import Gaussian

IMAGES, ROWS = 64, 512  # training images, and rows of the mask, at once
CONSTANT = 1e-12  # of the largest W_pp, below which a pixel is constant
SMALL = 1e-6  # the least W_qq by which the public code divides


class PCALocal(Theory):
    """The denoiser whose pixels are estimated from the pixels that correlate with them."""

    def __init__(
        self,
        data: Data,
        process: Process,
        threshold: float = 0.02,
        soft: bool = False,
        published: bool = False,
        memory: int | None = None,
    ) -> None:
        super().__init__(data, process, memory)
        check_images(self.data, process, "PCALocal")
        self.threshold = check_number(threshold, "threshold", 0.0)
        self.soft, self.published = check_type(soft, "soft", bool), check_type(published, "published", bool)
        self.gaussian = Gaussian(self.data, process, memory=memory)

    @property
    def options(self) -> dict[str, object]:
        return {"threshold": self.threshold, "soft": self.soft, "published": self.published}

    def mask(self, alpha: Tensor, var: Tensor, rows: slice) -> Tensor:
        """Return rows of M at one noise level, ``(rows, d)``."""
        m = self._relative(alpha, var, rows)
        if self.published:
            if self.soft:
                return m
            parts = blocks(self.data.d, ROWS)
            largest = torch.stack([self._relative(alpha, var, part).abs().max() for part in parts]).max()
            return (m.abs() >= self.threshold * largest).to(m)
        m = m if self.soft else (m >= self.threshold).to(m)
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
        rows, out = x.flatten(1), torch.empty_like(x.detach().flatten(1))
        level, inverse = torch.stack([alpha, var]).unique(dim=1, return_inverse=True)
        for j, (a, v) in enumerate(level.mT):
            for which in (inverse == j).nonzero().flatten().split(self._step):
                found = [self._block(rows[which], a, v, part) for part in blocks(self.data.d, ROWS)]
                out = out.index_copy(0, which, torch.cat(found, 1))
        return out.reshape(x.shape)

    @property
    def _step(self) -> int:
        """Queries at once."""
        return max(1, self.memory // (32 * IMAGES * (self.data.d + ROWS)))

    def _block(self, x: Tensor, alpha: Tensor, var: Tensor, part: slice) -> Tensor:
        """Estimate some coordinates at queries ``x (B, d)`` of one noise level."""
        mask, found = self.mask(alpha, var, part) / (2 * var), Average()
        for y, log_w in self.points(IMAGES):
            y = y.flatten(1)
            gap = (x[:, None] - alpha * y).square()
            found.add(log_w[:, None] - gap @ mask.mT, y[:, part])
        return found.value
