r"""The stepping loop that every sampler shares.

A sampler is a function ``step(x, here, there)`` that moves ``x`` from the time of one :class:`Level` to that of the
next; :func:`integrate` takes the steps, saves the path, and calls back. An anisotropic process is sampled in whitened
coordinates, where :math:`s_w = \Gamma^{1/2} s` and the noise is isotropic: each step is written once, for an isotropic
process, and :class:`Problem` converts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from vkernel.core.errors import require
from vkernel.core.progress import Progress
from vkernel.core.progress import progress as show_progress
from vkernel.process import Process
from vkernel.score.base import Score, check_score

Callback = Callable[[int, float, Tensor], object]


@dataclass(frozen=True)
class Level:
    """The values of the process at one time."""

    t: float
    alpha: float
    sigma: float
    beta: float
    D: float

    @classmethod
    def at(cls, process: Process, t: Tensor) -> list[Level]:
        """Return the levels at the times ``t (N,)``, in float64."""
        columns = (f(t).tolist() for f in (process.alpha, process.sigma, process.beta, process.D))
        return [cls(*row) for row in zip(t.tolist(), *columns, strict=True)]

    @property
    def log_ratio(self) -> float:
        """log(sigma/alpha): half the negative log signal-to-noise ratio."""
        return math.log(self.sigma / self.alpha)


Step = Callable[[Tensor, Level, Level], Tensor]


@dataclass(frozen=True)
class Solution:
    """A sample with what ``save`` requested; ``None`` marks what was not requested.

    ``x (*batch, *shape)``; ``times (steps + 1,)``; ``path (steps + 1, *batch, *shape)``; ``error (*batch,)``, the
    distance to the solution with twice as many steps; ``logp (*batch,)``, the log-likelihood.
    """

    x: Tensor
    times: Tensor
    path: Tensor | None = None
    error: Tensor | None = None
    logp: Tensor | None = None

    @property
    def summary(self) -> str:
        """The discretisation error as a sentence."""
        if self.error is None:
            return "no step-halving error was requested"
        q = torch.quantile(self.error.double().flatten().cpu(), torch.tensor([0.5, 0.95, 1.0], dtype=torch.float64))
        return f"halving the step moves a sample by {q[0]:.2g} (median), {q[1]:.2g} (95 %), {q[2]:.2g} (at most)"


class Problem:
    """A score, a start ``x_T (*batch, *shape)`` and a time grid, checked; in whitened coordinates inside.

    ``steps`` is a number of steps with the given ``spacing`` (see ``Process.times``), or a tensor of descending times.
    A sample with NaN or infinite values is an error unless ``allow_nan``.
    """

    def __init__(
        self, score: Score, x_T: Tensor, steps: int | Tensor, spacing: str | None, allow_nan: bool = False
    ) -> None:
        self.score, self.allow_nan = check_score(score), allow_nan
        self.process, self.base = score.process, score.process.base
        require(isinstance(x_T, Tensor), f"x_T must be a torch tensor, not {type(x_T).__name__}.")
        require(x_T.ndim >= 1 and not x_T.is_complex(), "x_T must be real, (*batch, *shape).")
        require(bool(x_T.isfinite().all()), "x_T holds NaN or infinite values.")
        x_T = x_T if x_T.is_floating_point() else x_T.to(torch.get_default_dtype())
        self.batch, self.shape = score.split(x_T)
        self.dtype = x_T.dtype
        self.x_T = self.process.whiten(x_T if x_T.dtype in (torch.float32, torch.float64) else x_T.float())
        self.times = grid(self.process, steps, spacing)
        self.levels = Level.at(self.base, self.times)

    def s(self, x: Tensor, level: Level) -> Tensor:
        """Return the score in whitened coordinates."""
        out = self.score(self.process.unwhiten(x), level.t)
        got = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        require(
            isinstance(out, Tensor) and out.shape == x.shape,
            f"The score returned {got} for x of shape {tuple(x.shape)}; it must return a tensor like x.",
        )
        return self.process.unwhiten(out)

    def m(self, x: Tensor, level: Level) -> Tensor:
        """Return the denoiser in whitened coordinates."""
        return self.process.whiten(self.score.denoise(self.process.unwhiten(x), level.t))

    def out(self, x: Tensor) -> Tensor:
        """Return ``x`` in the coordinates and the precision of the start; refuse NaN unless they are allowed."""
        x = self.process.unwhiten(x).to(self.dtype)
        good = self.allow_nan or bool(x.isfinite().all())
        require(good, "The sampler diverged: NaN or infinite values. Take more steps, or log spacing.")
        return x

    def norm(self, x: Tensor) -> Tensor:
        """Return the norm over events, ``(*batch,)``."""
        return x.double().reshape(*self.batch, -1).square().sum(-1).sqrt()

    def solve(
        self, step: Step, save: Iterable[str], callback: Callback | None, progress: Progress
    ) -> Tensor | Solution:
        """Take all steps; return the sample, or a :class:`Solution` with the path if ``save`` names it."""
        save = check_save(save, ("path",))
        x, path = integrate(
            self.x_T, self.levels, step, keep=bool(save), callback=self.outward(callback), progress=progress
        )
        if not save:
            return self.out(x)
        return Solution(self.out(x), self.times, torch.stack([self.out(p) for p in path]))

    def outward(self, callback: Callback | None) -> Callback | None:
        """Return a callback that takes whitened ``x`` and passes it on in data coordinates."""
        if callback is None:
            return None
        return lambda k, t, x: callback(k, t, self.process.unwhiten(x).to(self.dtype))


def integrate(
    x: Tensor,
    levels: list[Level],
    step: Step,
    *,
    keep: bool = False,
    callback: Callback | None = None,
    progress: Progress = False,
) -> tuple[Tensor, list[Tensor]]:
    """Take one step between each pair of levels; return the end and, if ``keep``, all states from the start on.

    ``callback(k, t, x)`` is called with the start (k = 0) and after each step; what it raises ends the loop.
    """
    path = [x] if keep else []
    if callback is not None:
        callback(0, levels[0].t, x)
    with show_progress(len(levels) - 1, progress) as report:
        for k, (here, there) in enumerate(pairwise(levels), 1):
            x = step(x, here, there)
            if keep:
                path.append(x)
            if callback is not None:
                callback(k, there.t, x)
            report("sampling")
    return x, path


def grid(process: Process, steps: int | Tensor, spacing: str | None) -> Tensor:
    """Return descending times in float64: ``steps + 1`` from T to eps, or the given ones, checked."""
    if not isinstance(steps, Tensor):
        return process.times(steps, spacing)
    times = steps.detach().double().cpu()
    require(times.ndim == 1 and len(times) >= 2, "Times of steps must be a vector of two or more.")
    require(bool((times.diff() < 0).all()), "Times must descend, from T down to eps.")
    return process.check(times)


def check_save(save: Iterable[str], known: tuple[str, ...]) -> tuple[str, ...]:
    """Return ``save`` as a tuple of known names."""
    names = (save,) if isinstance(save, str) else tuple(save)
    for name in names:
        require(name in known, f"save takes any of {', '.join(known)}; got {name!r}.")
    return names
