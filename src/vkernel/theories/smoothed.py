r"""Smoothed scores: a network cannot resolve details of the exact score below a bandwidth h.

``kind="kde"``: every training point is a Gaussian of width h. With :math:`S = \sigma^2 + \alpha^2 h^2` in the logits
*and* in the score, and :math:`m_h = \sum_i r_i y_i`, :math:`r_i \propto w_i e^{-|x - \alpha y_i|^2/2S}`,

.. math:: s = \frac{\alpha m_h - x}{S}, \qquad m = \frac{\sigma^2 m_h + \alpha h^2 x}{S} .

``kind="draws"``: the exact denoiser is averaged over fixed draws, :math:`m(x) = \frac1K \sum_k m_0(x + h u_k)`,
:math:`u_k \sim N(0, I)` (Scarvelis, Borde and Solomon 2023, "Closed-form diffusion models"). Both are the exact
denoiser at h = 0. Under an anisotropic process h is a width in whitened coordinates. h is a number, a function of t, or
a table {σ/α: h} (:mod:`vkernel.theories.scale`), which :meth:`Smoothed.fit` chooses for a network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.checks import check_choice, check_number, check_whole, is_number
from vkernel.core.covariance import over_event
from vkernel.core.errors import require
from vkernel.core.rng import Generator
from vkernel.posterior import Engine
from vkernel.process import Process
from vkernel.score.base import Score, check_score
from vkernel.theories.base import Data, Theory, posterior_mean
from vkernel.theories.fit import Levels, fit
from vkernel.theories.scale import ByLevel, Scale

WIDEST = 1e100  # whose square is a number


class Smoothed(Theory):
    """The exact score smoothed over a width ``h``.

    Args:
        h: the width, in units of the data ("kde") or of x ("draws"): a number, a function of t, or a table {σ/α: h}.
        kind: ``"kde"`` widens the training points, ``"draws"`` averages the denoiser over ``draws`` shifts of x, which
            ``generator`` fixes.

    >>> import torch, vkernel as vk
    >>> theory = vk.theories.Smoothed(torch.randn(100, 3), vk.VP(), h=0.2)
    >>> theory.denoise(torch.randn(5, 3), 0.5).shape
    torch.Size([5, 3])
    """

    def __init__(
        self,
        data: Data,
        process: Process,
        h: Scale,
        kind: str = "kde",
        draws: int = 64,
        generator: Generator = 0,
        memory: int | None = None,
    ) -> None:
        super().__init__(data, process, memory)
        self.widths = ByLevel(h, "h", process, self._check)
        self.kind = check_choice(kind, "kind", ("kde", "draws"))
        self.engine = Engine(self.white, self.memory)
        # a seed, so that the draws can be made again for other data
        fresh = generator is None or isinstance(generator, torch.Generator)
        self.seed = int(rng.keys((), rng.as_generator(generator))) if fresh else generator
        size = (check_whole(draws, "draws") if kind == "draws" else 0, self.data.d)
        self.draws = rng.randn(size, rng.as_generator(self.seed), self.device, torch.float64)

    @staticmethod
    def _check(h: object) -> float:
        require(not is_number(h) or h <= WIDEST, f"h must be a width, at most {WIDEST:g}; got {h!r}.")
        return check_number(h, "h", 0.0)

    @property
    def h(self) -> Scale:
        """The width: a number, a function of t, or a table {σ/α: h}."""
        return self.widths.given

    @property
    def options(self) -> dict[str, object]:
        draws = {"draws": len(self.draws), "generator": self.seed} if self.kind == "draws" else {}
        return {"h": self.h, "kind": self.kind, **draws}

    @classmethod
    def fit(
        cls,
        network: Score,
        data: Data,
        images: Data,
        *,
        widths: Sequence[float] | None = None,
        levels: Levels = 6,
        kind: str = "kde",
        draws: int = 64,
        generator: Generator = 0,
        seed: int = 0,
        memory: int | None = None,
    ) -> Self:
        r"""Return the theory whose table of h explains ``network`` best, on ``images`` apart from those of a verdict.

        ``widths`` are the candidates (default: 0, and twelve from 1/50 to twice the standard deviation of the data, per
        coordinate), of which the smaller counts at a tie; ``levels`` are noise levels σ/α, or how many
        (:mod:`vkernel.theories.fit`)."""
        theory = cls(data, check_score(network, "A fit").process, 0.0, kind, draws, generator, memory)
        spread = theory.data.spread / math.sqrt(theory.data.d)
        tried = sorted(widths or [0.0, *(spread * 0.02 * 100 ** (j / 11) for j in range(12))])
        return fit(theory, theory.widths, network, images, tried, levels, seed)

    def mean(self, x: Tensor, alpha: Tensor, var: Tensor) -> Tensor:
        h = self.widths(var.sqrt() / alpha)
        if self.kind == "kde":
            a, v, own, total = (over_event(c, self.shape) for c in (alpha, var, h.square(), self._widened(alpha, var)))
            return (v * self._mean(x, alpha, var) + a * own * x) / total
        rows, parts = x.flatten(1), []
        for u in self.draws.split(max(1, self.memory // (64 * max(1, rows.numel())))):
            near = (rows + h[:, None] * u[:, None]).flatten(0, 1)
            found = posterior_mean(self.engine, near, alpha.repeat(len(u)), var.repeat(len(u)))
            parts.append(found.reshape(len(u), *x.shape).sum(0))
        return torch.stack(parts).sum(0) / len(self.draws)

    def residual(self, x: Tensor, alpha: Tensor, var: Tensor) -> Tensor:
        if self.kind == "draws":
            return super().residual(x, alpha, var)
        a, v, total = (over_event(c, self.shape) for c in (alpha, var, self._widened(alpha, var)))
        return (a * self._mean(x, alpha, var) - x) * (v / total)

    def _widened(self, alpha: Tensor, var: Tensor) -> Tensor:
        """Return S."""
        return var + (alpha * self.widths(var.sqrt() / alpha)).square()

    def _mean(self, x: Tensor, alpha: Tensor, var: Tensor) -> Tensor:
        """Return m_h."""
        return posterior_mean(self.engine, x.flatten(1), alpha, self._widened(alpha, var)).reshape(x.shape)
