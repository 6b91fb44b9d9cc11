r"""One theory at high noise and another one at low noise.

.. math:: m = (1 - w)\, m_A + w\, m_B, \qquad w = \frac{1}{1 + (r/r_0)^{1/\mathrm{width}}}, \quad r = \sigma/\alpha,

with A ``above`` the ratio :math:`r_0` = ``at`` and B ``below``; ``width`` is in units of log r, and 0 is a jump, B at
:math:`r \le r_0`. Trained networks are close to the Gaussian theory at high noise (Wang and Vastola 2024), and
depart from the exact score in certain ranges of noise (Bertrand et al. 2025). Samplers place a time at the jump, so
that no step crosses it, unless all times are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from vkernel.core.checks import check_number, check_positive
from vkernel.core.covariance import over_event
from vkernel.core.errors import require
from vkernel.score.base import DataScore, Score, Time, check_score
from vkernel.theories.base import Data

Denoiser = Callable[[Tensor, Time], Tensor]
ROUNDING = 1e-9  # of the ratio at a time that was computed from it


class Switch(DataScore):
    """The score ``above`` where σ/α > ``at``, and ``below`` elsewhere; both are scores under one process. ``width``
    makes the change gradual, in units of log σ/α.

    >>> import torch, vkernel as vk
    >>> data, process = torch.randn(100, 3), vk.VP()
    >>> theory = vk.theories.Switch(vk.theories.Gaussian(data, process), vk.EmpiricalScore(data, process), at=1.0)
    >>> theory.denoise(torch.randn(5, 3), 0.5).shape
    torch.Size([5, 3])
    """

    def __init__(self, above: Score, below: Score, at: float, width: float = 0.0) -> None:
        self.above, self.below = check_score(above, "Switch"), check_score(below, "Switch")
        same = above.process == below.process
        require(same, f"Both theories need one process; got {above.process!r} and {below.process!r}.")
        shapes = {score.shape for score in (above, below)} - {None}
        require(len(shapes) < 2, f"Both theories need one event shape; got {above.shape} and {below.shape}.")
        self.process, self.shape = above.process, next(iter(shapes), None)
        self.at, self.width = check_positive(at, "at"), check_number(width, "width", 0.0)
        low, high = self.process.ratios
        here = self.width == 0 and low < self.at < high
        own = [float(self.process.time(torch.tensor(self.at, dtype=torch.float64)))] if here else []
        self.jumps = tuple(sorted({*above.jumps, *below.jumps, *own}))

    def on(self, data: Data) -> Self:
        for part in (self.above, self.below):
            require(isinstance(part, DataScore), f"A part of this Switch is not built on data: {part!r}.")
        above, below = (part.on(data) for part in (self.above, self.below) if isinstance(part, DataScore))
        return type(self)(above, below, self.at, self.width)

    def share(self, t: Tensor) -> Tensor:
        """Return w, the share of ``below``, in float64."""
        alpha, var = self.levels(t)
        ratio = var.sqrt() / alpha
        if self.width == 0:
            return (ratio <= self.at * (1 + ROUNDING)).double()
        return ((self.at / ratio).log() / self.width).sigmoid()

    def denoise(self, x: Tensor, t: Time) -> Tensor:
        return self._mixed(self.above.denoise, self.below.denoise, x, t)

    def __call__(self, x: Tensor, t: Time) -> Tensor:
        return self._mixed(self.above, self.below, x, t)

    def _mixed(self, above: Denoiser, below: Denoiser, x: Tensor, t: Time) -> Tensor:
        x, t = self.check(x, t)
        w = self.share(t)
        if bool((w == 0).all()):
            return above(x, t)
        if bool((w == 1).all()):
            return below(x, t)
        w = over_event(w.to(x), self.split(x)[1])
        return torch.lerp(above(x, t), below(x, t), w)

    def __repr__(self) -> str:
        return f"Switch({self.above!r}, {self.below!r}, at={self.at:g}, width={self.width:g})"
