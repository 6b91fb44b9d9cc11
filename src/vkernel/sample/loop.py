r"""The stepping loop that every sampler shares.

A sampler is a function ``step(x, here, there)`` that moves ``x`` from the time of one :class:`Level` to that of the
next; :func:`walk` takes the steps, and :class:`Problem` calls back and saves. An anisotropic process is sampled in
whitened coordinates, where :math:`s_w = \Gamma^{1/2} s` and the noise is isotropic: each step is written once, for an
isotropic process, and :class:`Problem` converts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import ParamSpec, Protocol, TypedDict, cast, overload

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.checks import check_choice, check_real, takes
from vkernel.core.errors import require
from vkernel.core.progress import Progress, progress as show_progress
from vkernel.core.rng import Generator
from vkernel.process import Process
from vkernel.score.base import Score, check_like, check_score

Callback = Callable[[int, float, Tensor], object]
Save = Iterable[str]
P = ParamSpec("P")


class Options(TypedDict, total=False):
    """The options that every sampler takes, besides ``save``; their defaults are those of :class:`Problem`.

    ``steps`` is a number of steps with the given ``spacing`` ("log": even in log σ/α; "uniform" or "edm"), or a tensor
    of descending times. ``callback(step, t, x)`` is called at the start and after each step. With ``allow_nan``,
    samples that diverged are returned as they are, instead of an error. With ``save``, any of "path" and, for ODEs,
    "error" (by halving the step) and "logp", a sampler returns a :class:`Solution`, otherwise the sample.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> score = vk.EmpiricalScore(data, process)
    >>> x_T = process.prior((5, 1), generator=0)
    >>> vk.sample.pf_ode(score, x_T, steps=10, spacing="log", generator=0).shape
    torch.Size([5, 1])
    """

    steps: int | Tensor
    spacing: str | None
    callback: Callback | None
    generator: Generator
    progress: Progress
    allow_nan: bool


@dataclass(frozen=True)
class Solution:
    """A sample with what ``save`` requested; ``None`` marks what was not requested.
    ``x (*batch, *shape)``; ``times (steps + 1,)``; ``path (steps + 1, *batch, *shape)``; ``error (*batch,)``, the
    distance to the solution with twice as many steps; ``logp (*batch,)``, the log-likelihood.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> score = vk.EmpiricalScore(data, process)
    >>> x_T = process.prior((5, 1), generator=0)
    >>> found = vk.sample.pf_ode(score, x_T, steps=10, save=("path", "error", "logp"))
    >>> found.path.shape, found.error.shape, found.logp.shape
    (torch.Size([11, 5, 1]), torch.Size([5]), torch.Size([5]))
    """

    x: Tensor
    times: Tensor
    path: Tensor | None = None
    error: Tensor | None = None
    logp: Tensor | None = None


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
States = Iterator[tuple[Level, Tensor]]


def walk(x: Tensor, levels: list[Level], step: Step, progress: Progress = False) -> States:
    """Yield the start, then the state after each step from one level to the next."""
    yield levels[0], x
    with show_progress(len(levels) - 1, progress) as report:
        for here, there in pairwise(levels):
            x = step(x, here, there)
            yield there, x
            report("sampling")


def grid(process: Process, steps: int | Tensor, spacing: str | None, jumps: tuple[float, ...] = ()) -> Tensor:
    """Return descending times in float64: ``steps + 1`` from T to eps and the ``jumps`` of the score between, or the
    given ones, checked."""
    if not isinstance(steps, Tensor):
        times = process.times(steps, spacing)
        return torch.cat([times, times.new_tensor(jumps)]).unique().flip(0) if jumps else times
    times = check_real(steps, "The times of steps").detach().double().cpu()
    require(times.ndim == 1 and len(times) >= 2, "Times of steps must be a vector of two or more.")
    require(bool((times.diff() < 0).all()), "Times must descend, from T down to eps.")
    return process.check(times)


class Problem:
    """A score, a start ``x_T (*batch, *shape)`` and :class:`Options`, checked; ``save`` may hold what is ``known``."""

    def __init__(
        self,
        score: Score,
        x_T: Tensor,
        known: tuple[str, ...] = ("path",),
        *,
        steps: int | Tensor = 100,
        spacing: str | None = "log",
        save: Save = (),
        callback: Callback | None = None,
        generator: Generator = None,
        progress: Progress = False,
        allow_nan: bool = False,
    ) -> None:
        self.score, self.process, self.base = check_score(score), score.process, score.process.base
        self.save = [check_choice(name, "save", known) for name in ([save] if isinstance(save, str) else save)]
        require(check_real(x_T, "x_T").ndim >= 1, "x_T must have axes, (*batch, *shape); a single number was given.")
        require(bool(x_T.isfinite().all()), "x_T holds NaN or infinite values.")
        x_T = x_T if x_T.is_floating_point() else x_T.to(torch.get_default_dtype())
        self.batch, self.shape = score.split(x_T)
        self.dtype = x_T.dtype
        self.x_T = self.process.whiten(x_T if x_T.dtype in (torch.float32, torch.float64) else x_T.float())
        self.steps, self.spacing, self.times = steps, spacing, grid(self.process, steps, spacing, score.jumps)
        self.levels = Level.at(self.base, self.times)
        self.callback, self.progress, self.allow_nan = callback, progress, allow_nan
        self.generator = rng.as_generator(generator)

    def s(self, x: Tensor, level: Level) -> Tensor:
        """Return the score in whitened coordinates."""
        return self.process.unwhiten(check_like(self.score(self.process.unwhiten(x), level.t), x))

    def m(self, x: Tensor, level: Level) -> Tensor:
        """Return the denoiser in whitened coordinates."""
        m = self.score.denoise(self.process.unwhiten(x), level.t)
        return self.process.whiten(check_like(m, x, "denoiser"))

    def euler(self, x: Tensor, here: Level, there: Level) -> Tensor:
        """Return x after Euler's step of the PF-ODE, x + Δ (beta x + D s)."""
        return x + (here.t - there.t) * (here.beta * x + here.D * self.s(x, here))

    def noise(self, x: Tensor) -> Tensor:
        """Draw standard normals like ``x``."""
        return rng.randn(tuple(x.shape), self.generator, x.device, x.dtype)

    def out(self, x: Tensor) -> Tensor:
        """Return ``x`` in the coordinates and the precision of the start; refuse NaN unless they are allowed."""
        x = self.process.unwhiten(x).to(self.dtype)
        good = self.allow_nan or bool(x.isfinite().all())
        require(good, "The sampler diverged: NaN or infinite values. Take more steps, or log spacing.")
        return x

    def follow(self, states: States, keep: bool = False) -> list[Tensor]:
        """Call back with each state; return all of them if ``keep`` or if the path is to be saved, else the last."""
        kept: list[Tensor] = []
        for k, (level, x) in enumerate(states):
            if self.callback is not None:
                self.callback(k, level.t, self.process.unwhiten(x).to(self.dtype))
            if not keep and "path" not in self.save:
                kept.clear()
            kept.append(x)
        return kept

    def solve(self, step: Step) -> Tensor | Solution:
        """Take all steps; return the sample, or a :class:`Solution` if anything is to be saved."""
        return self.solution(self.follow(walk(self.x_T, self.levels, step, self.progress)))

    def solution(self, states: list[Tensor], *more: Tensor | None) -> Tensor | Solution:
        """Return the last of the whitened states, or what is to be saved, of which ``more`` are error and logp."""
        x = self.out(states[-1])
        path = torch.stack([self.out(p) for p in states]) if "path" in self.save else None
        return Solution(x, self.times, path, *more) if self.save else x


class Sampler(Protocol[P]):
    """A sampler: the parameters P are those without ``save``, with which it returns a :class:`Solution`."""

    @overload
    def __call__(self, *args: P.args, **options: P.kwargs) -> Tensor: ...
    @overload
    def __call__(self, *args: object, save: Save, **options: object) -> Solution: ...


def sampler(function: Callable[P, Tensor | Solution]) -> Sampler[P]:
    """Return a function that passes its options to :class:`Problem` as a sampler."""
    return cast(Sampler[P], takes(Problem)(function))
