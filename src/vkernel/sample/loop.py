r"""The stepping loop that every sampler shares, and the probability-flow ODE (docs/theory.md, §4.1).

A sampler is a function ``step(x, here, there)`` that moves ``x`` from the time of one :class:`Level` to that of the
next; :func:`walk` takes the steps, and :class:`Problem` calls back and saves. An anisotropic process is sampled in
whitened coordinates, where :math:`s_w = \Gamma^{1/2} s` and the noise is isotropic: each step is written once, for an
isotropic process, and :class:`Problem` converts. The probability-flow ODE

.. math:: \frac{dx}{dt} = -\beta x - D\, s(x,t) = \frac{\dot\sigma}{\sigma}\, x - \frac{\alpha D}{\sigma^2}\, m(x,t),

integrated from T to eps; :math:`m = (x + \sigma^2 s)/\alpha` is the denoiser, and the second form has nothing that
cancels where alpha vanishes. Five methods, one signature:

* ``euler`` (the paper's), order 1; ``heun``, order 2;
* ``exponential``: :math:`x' = \alpha' m + (\sigma'/\sigma)(x - \alpha m)`, exact while m stands still (DDIM), order 1;
* ``multistep``: the same with m extrapolated from the step before, :math:`m + \tfrac12 (\Lambda/\Lambda')(m - m')` with
  :math:`\Lambda` the step in :math:`\log(\sigma/\alpha)`: order 2 at one evaluation a step (Lu et al. 2022);
* ``dopri5``: adaptive, order 5, in :math:`\lambda = \log(\sigma/\alpha)` for :math:`z = x/h`,
  :math:`h^2 = \alpha^2 + \sigma^2`,

.. math:: \frac{dz}{d\lambda} = \frac{x - \alpha m}{h} - \frac{\sigma^2}{h^2}\, z ,

in which small t is not stiff. The log-likelihood along the flow is

.. math:: \log p(x_\epsilon) = \log N(x_T; 0, S_T) + d \log\frac{\sigma_T}{\sigma_\epsilon}
          - \int_{\lambda_\epsilon}^{\lambda_T} (\sigma^2 \nabla\cdot s + d)\, d\lambda ,

and the integrand is :math:`\sigma^2\,\mathrm{tr}\,C` for an exact score. Fixed steps integrate it by the trapezoidal
rule, ``dopri5`` beside z.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.checks import check_choice, check_positive, takes
from vkernel.core.covariance import flat
from vkernel.core.errors import require
from vkernel.core.progress import Progress, progress as show_progress
from vkernel.core.rng import Generator
from vkernel.process import Process
from vkernel.score.base import Score, check_like, check_score, signs
from vkernel.score.empirical import EmpiricalScore

Callback = Callable[[int, float, Tensor], object]
Trace = Callable[[Tensor, float], Tensor]  # the integrand of the log-likelihood, of whitened x and t
Flow = tuple[list[Tensor], Tensor | None]  # the states, and the integral of the trace


class Options(TypedDict, total=False):
    """The options that every sampler takes; their defaults are those of :class:`Problem`.

    ``steps`` is a number of steps with the given ``spacing`` ("log": even in log σ/α; "uniform" or "edm"), or a tensor
    of descending times. ``callback(step, t, x)`` is called at the start and after each step. With ``allow_nan``,
    samples that diverged are returned as they are, instead of an error. With ``save``, any of "path" and, for ODEs,
    "error" (by halving the step) and "logp", a sampler returns a :class:`Solution`, otherwise the sample.
    """

    steps: int | Tensor
    spacing: str | None
    save: Iterable[str]
    callback: Callback | None
    generator: Generator
    progress: Progress
    allow_nan: bool


@dataclass(frozen=True)
class Solution:
    """A sample with what ``save`` requested; ``None`` marks what was not requested.
    ``x (*batch, *shape)``; ``times (steps + 1,)``; ``path (steps + 1, *batch, *shape)``; ``error (*batch,)``, the
    distance to the solution with twice as many steps; ``logp (*batch,)``, the log-likelihood."""

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


def end(found: Tensor | Solution) -> Tensor:
    """Return the sample itself, whether or not anything else was saved."""
    return found.x if isinstance(found, Solution) else found


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


def grid(process: Process, steps: int | Tensor, spacing: str | None) -> Tensor:
    """Return descending times in float64: ``steps + 1`` from T to eps, or the given ones, checked."""
    if not isinstance(steps, Tensor):
        return process.times(steps, spacing)
    times = steps.detach().double().cpu()
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
        save: Iterable[str] = (),
        callback: Callback | None = None,
        generator: Generator = None,
        progress: Progress = False,
        allow_nan: bool = False,
    ) -> None:
        self.score, self.process, self.base = check_score(score), score.process, score.process.base
        self.save = [check_choice(name, "save", known) for name in ([save] if isinstance(save, str) else save)]
        require(isinstance(x_T, Tensor), f"x_T must be a torch tensor, not {type(x_T).__name__}.")
        require(x_T.ndim >= 1 and not x_T.is_complex(), "x_T must be real, (*batch, *shape).")
        require(bool(x_T.isfinite().all()), "x_T holds NaN or infinite values.")
        x_T = x_T if x_T.is_floating_point() else x_T.to(torch.get_default_dtype())
        self.batch, self.shape = score.split(x_T)
        self.dtype = x_T.dtype
        self.x_T = self.process.whiten(x_T if x_T.dtype in (torch.float32, torch.float64) else x_T.float())
        self.steps, self.spacing, self.times = steps, spacing, grid(self.process, steps, spacing)
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


@takes(Problem)
def pf_ode(
    score: Score,
    x_T: Tensor,
    *,
    method: str = "exponential",
    tolerance: float = 1e-6,
    probes: int = 8,
    **options: Unpack[Options],
) -> Tensor | Solution:
    """Integrate the probability-flow ODE of ``score`` from ``x_T (*batch, *shape)`` at T down to eps; return x at eps.

    ``score`` is a :class:`~vkernel.score.base.Score`; wrap a function with ``vk.as_score``. ``method`` is "exponential"
    (DDIM), "multistep", "euler", "heun" or "dopri5", which chooses its own steps to the relative ``tolerance``;
    ``steps`` are then the times that are saved, and a batch shares its steps. ``probes`` and ``generator`` are for the
    divergence of a score that is not exact (Hutchinson 1989). ``options`` are :class:`~vkernel.sample.loop.Options`.
    """
    check_choice(method, "method", METHODS)
    check_positive(tolerance, "tolerance")
    problem = Problem(score, x_T, ("path", "error", "logp"), **options)
    arrives = method in ("euler", "exponential", "multistep") and "logp" not in problem.save
    good = arrives or problem.levels[-1].sigma > 0
    require(good, f"There is no noise at eps in {problem.process!r}: only Euler and exponential steps arrive there.")
    states, lost = _flow(problem, method, tolerance, _trace(problem, probes) if "logp" in problem.save else None)
    error = logp = None
    if "error" in problem.save:
        finer = Problem(score, x_T, steps=_refined(problem.steps), spacing=problem.spacing)
        away = problem.process.unwhiten(states[-1] - _flow(finer, method, tolerance / 32)[0][-1])
        error = flat(away.double(), problem.shape).square().sum(-1).sqrt()
    if lost is not None:
        first, last, d = problem.levels[0], problem.levels[-1], math.prod(problem.shape)
        square = flat(problem.x_T.double() / first.sigma, problem.shape).square().sum(-1)
        prior = -0.5 * square - 0.5 * d * math.log(2 * math.pi * first.sigma**2)
        logp = prior + d * math.log(first.sigma / last.sigma) - lost - problem.process.half_log_det
    return problem.solution(states, error, logp)


def drift(problem: Problem, x: Tensor, at: Level) -> Tensor:
    """Return dx/dt of the flow, in the form that does not cancel where alpha vanishes."""
    rate = at.D / at.sigma**2 - at.beta
    return rate * x - (at.alpha * at.D / at.sigma**2) * problem.m(x, at)


def direct(problem: Problem, order: int) -> Step:
    """Return the step in t: Euler's, of order 1, or Heun's, of order 2."""

    def step(x: Tensor, here: Level, there: Level) -> Tensor:
        dt, slope = there.t - here.t, drift(problem, x, here)
        if order == 2:
            slope = (slope + drift(problem, x + dt * slope, there)) / 2
        return x + dt * slope

    return step


def exponential(problem: Problem, order: int) -> Step:
    """Return the exponential (DDIM) step; of order 2, the denoiser is extrapolated from the step before."""
    before: tuple[float, Tensor] | None = None

    def step(x: Tensor, here: Level, there: Level) -> Tensor:
        nonlocal before
        m = image = problem.m(x, here)
        if before is not None and there.sigma > 0:
            ratio, old = before
            image = m + (there.log_ratio - here.log_ratio) / (2 * (here.log_ratio - ratio)) * (m - old)
        before = (here.log_ratio, m) if order == 2 else None
        return there.alpha * image + (there.sigma / here.sigma) * (x - here.alpha * image)

    return step


# with the order
STEPS = {"euler": (direct, 1), "heun": (direct, 2), "exponential": (exponential, 1), "multistep": (exponential, 2)}
METHODS = (*STEPS, "dopri5")


def _refined(steps: int | Tensor) -> int | Tensor:
    """Return twice as many steps: a given grid gets midpoints."""
    if not isinstance(steps, Tensor):
        return 2 * steps
    middle = (steps[1:] + steps[:-1]) / 2
    return torch.cat([torch.stack([steps[:-1], middle], 1).flatten(), steps[-1:]])


def _trace(problem: Problem, probes: int) -> Trace:
    """Return the integrand; for a score that is not exact, with the same probes at all times."""
    along = probes if isinstance(problem.score, EmpiricalScore) else signs(problem.x_T, probes, problem.generator)
    return lambda x, t: problem.score.noise_trace(problem.process.unwhiten(x), t, along)


def _flow(problem: Problem, method: str, tolerance: float, trace: Trace | None = None) -> Flow:
    """Return the states in whitened coordinates and, with ``trace``, its integral over log(sigma/alpha)."""
    if method == "dopri5":
        return _adaptive(problem, tolerance, trace)
    (make, order), traces = STEPS[method], list[Tensor]()
    states = walk(problem.x_T, problem.levels, make(problem, order), problem.progress)
    if trace is None:
        return problem.follow(states), None

    def traced() -> States:
        for level, x in states:
            traces.append(trace(x, level.t))
            yield level, x

    kept = problem.follow(traced())
    ratios = torch.tensor([level.log_ratio for level in problem.levels], dtype=torch.float64, device=traces[0].device)
    return kept, -torch.trapezoid(torch.stack(traces), ratios, dim=0)


def _adaptive(problem: Problem, tolerance: float, trace: Trace | None) -> Flow:
    """Integrate by Dormand and Prince's method through torchdiffeq, in log(sigma/alpha)."""
    from torchdiffeq import odeint

    base, levels, x_T = problem.base, problem.levels, problem.x_T

    def slope(u: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        t = base.time(u.detach().double().exp().cpu().clamp(*base.ratios))
        level = Level.at(base, t.reshape(1))[0]
        size = math.hypot(level.alpha, level.sigma)
        x = state[0] * size
        dz = (x - level.alpha * problem.m(x, level)) / size - (level.sigma / size) ** 2 * state[0]
        return (dz,) if trace is None else (dz, -trace(x, level.t).to(dz.dtype))

    state: tuple[Tensor, ...] = (x_T / math.hypot(levels[0].alpha, levels[0].sigma),)
    if trace is not None:
        state = (*state, torch.zeros(problem.batch, dtype=x_T.dtype, device=x_T.device))
    wanted = levels if "path" in problem.save or problem.callback is not None else [levels[0], levels[-1]]
    u = torch.tensor([level.log_ratio for level in wanted], dtype=torch.float64, device=x_T.device)
    try:
        found = odeint(slope, state, u, rtol=tolerance, atol=tolerance, method="dopri5")
    except AssertionError:  # torchdiffeq raises this when its adaptive step underflows
        found = [torch.full((len(wanted), *a.shape), torch.nan).to(a) for a in state]
    xs = (z * math.hypot(level.alpha, level.sigma) for z, level in zip(found[0], wanted, strict=True))
    return problem.follow(zip(wanted, xs, strict=True)), None if trace is None else found[1][-1].double()
