r"""The probability-flow ODE (docs/theory.md, §4.1).

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

and the integrand is :math:`\sigma^2\,\mathrm{tr}\,C` for an exact score.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.errors import require
from vkernel.core.progress import Progress
from vkernel.core.rng import Generator
from vkernel.process import Anisotropic
from vkernel.sample.loop import Callback, Level, Problem, Solution, check_save, integrate
from vkernel.score.base import Score
from vkernel.score.empirical import EmpiricalScore

METHODS = ("euler", "heun", "exponential", "multistep", "dopri5")


def pf_ode(
    score: Score,
    x_T: Tensor,
    *,
    steps: int | Tensor = 100,
    method: str = "exponential",
    spacing: str | None = "log",
    save: Iterable[str] = (),
    callback: Callback | None = None,
    probes: int = 8,
    tolerance: float = 1e-6,
    generator: Generator = None,
    allow_nan: bool = False,
    progress: Progress = False,
) -> Tensor | Solution:
    """Integrate the probability-flow ODE of ``score`` from ``x_T`` at T down to eps.

    Args:
        score: a :class:`~vkernel.score.base.Score`; wrap a function with ``vk.as_score``.
        x_T: starts, ``(*batch, *shape)``.
        steps: number of steps, or the descending times themselves.
        method: "exponential" (DDIM), "multistep", "euler", "heun" or "dopri5", which chooses its own steps to the
            relative ``tolerance``; ``steps`` are then the times that are saved, and a batch shares its steps.
        spacing: "log" (even in log σ/α), "uniform" or "edm".
        save: any of "path", "error" (by halving the step) and "logp".
        callback: called as ``callback(step, t, x)`` at the start and after each step.
        probes, generator: for the divergence of a score that is not exact (Hutchinson 1989).
        allow_nan: return samples that diverged as they are, instead of an error.

    Returns:
        the sample, like ``x_T``; with ``save`` a :class:`~vkernel.sample.loop.Solution`.
    """
    save = check_save(save, ("path", "error", "logp"))
    _check_method(method)
    require(tolerance > 0, f"tolerance must be positive; got {tolerance}.")
    problem = Problem(score, x_T, steps, spacing, allow_nan)
    noiseless = problem.levels[-1].sigma == 0
    good = not noiseless or (method in ("euler", "exponential", "multistep") and "logp" not in save)
    require(good, f"There is no noise at eps in {problem.process!r}: only Euler and exponential steps arrive there.")
    signs = None
    if "logp" in save and not isinstance(score, EmpiricalScore):
        require(probes >= 1, f"Hutchinson's estimate needs at least one probe; got {probes}.")
        x = problem.x_T
        signs = rng.randn((probes, *x.shape), rng.as_generator(generator), x.device, x.dtype).sign()
    likelihood = _Likelihood(problem, signs) if "logp" in save else None
    x, path = _solve(problem, method, tolerance, "path" in save, callback, progress, likelihood)
    if not save:
        return problem.out(x)
    error = None
    if "error" in save:
        finer = Problem(score, x_T, _refined(steps), spacing)
        error = problem.norm(problem.process.unwhiten(x - _solve(finer, method, tolerance / 32)[0]))
    states = torch.stack([problem.out(p) for p in path]) if "path" in save else None
    logp = None if likelihood is None else likelihood.value()
    return Solution(problem.out(x), problem.times, states, error, logp)


def pf_ode_end(problem: Problem, method: str, tolerance: float = 1e-6, progress: Progress = False) -> Tensor:
    """Return the end of the flow in whitened coordinates; NaN or infinite values stay in it."""
    _check_method(method)
    try:
        return _solve(problem, method, tolerance, progress=progress)[0]
    except AssertionError:  # torchdiffeq raises this when its adaptive step underflows
        return torch.full_like(problem.x_T, torch.nan)


def drift(problem: Problem, x: Tensor, at: Level) -> Tensor:
    """Return dx/dt of the flow, in the form that does not cancel where alpha vanishes."""
    rate = at.D / at.sigma**2 - at.beta
    return rate * x - (at.alpha * at.D / at.sigma**2) * problem.m(x, at)


def euler(problem: Problem, x: Tensor, here: Level, there: Level) -> Tensor:
    """Take one Euler step."""
    return x + (there.t - here.t) * drift(problem, x, here)


def heun(problem: Problem, x: Tensor, here: Level, there: Level) -> Tensor:
    """Take one step of Heun's method."""
    dt = there.t - here.t
    first = drift(problem, x, here)
    return x + dt / 2 * (first + drift(problem, x + dt * first, there))


def exponential(problem: Problem, x: Tensor, here: Level, there: Level) -> Tensor:
    """Take one exponential (DDIM) step, exact while the denoiser is constant."""
    m = problem.m(x, here)
    return there.alpha * m + (there.sigma / here.sigma) * (x - here.alpha * m)


class Multistep:
    """Exponential steps whose denoiser is extrapolated from the step before; one object for each integration."""

    def __init__(self) -> None:
        self.before: tuple[float, Tensor] | None = None

    def __call__(self, problem: Problem, x: Tensor, here: Level, there: Level) -> Tensor:
        """Take one step."""
        m = image = problem.m(x, here)
        if self.before is not None and there.sigma > 0:
            ratio, old = self.before
            image = m + (there.log_ratio - here.log_ratio) / (2 * (here.log_ratio - ratio)) * (m - old)
        self.before = here.log_ratio, m
        return there.alpha * image + (there.sigma / here.sigma) * (x - here.alpha * image)


STEPS = {"euler": euler, "heun": heun, "exponential": exponential}


def _check_method(method: str) -> None:
    require(method in METHODS, f"method must be one of {', '.join(METHODS)}; not {method!r}.")


def _refined(steps: int | Tensor) -> int | Tensor:
    """Return twice as many steps: a given grid gets midpoints."""
    if not isinstance(steps, Tensor):
        return 2 * steps
    middle = (steps[1:] + steps[:-1]) / 2
    return torch.cat([torch.stack([steps[:-1], middle], 1).flatten(), steps[-1:]])


class _Likelihood:
    """The integral of the log-likelihood along the flow, by the trapezoidal rule in log(sigma/alpha)."""

    def __init__(self, problem: Problem, probes: Tensor | None) -> None:
        self.problem, self.probes = problem, probes
        self.lost: Tensor | None = None
        self.before: tuple[float, Tensor] | None = None

    def trace(self, x: Tensor, t: float) -> Tensor:
        x = self.problem.process.unwhiten(x)
        return self.problem.score.noise_trace(x, t, 8 if self.probes is None else self.probes)

    def add(self, level: Level, x: Tensor) -> None:
        """Add the interval from the previous level to this one."""
        after = self.trace(x, level.t)
        if self.before is None or self.lost is None:
            self.lost = torch.zeros_like(after)
        else:
            ratio, before = self.before
            self.lost = self.lost + (ratio - level.log_ratio) * (before + after) / 2
        self.before = level.log_ratio, after

    def value(self) -> Tensor:
        """Return log p(x_eps), ``(*batch,)``."""
        problem, lost = self.problem, self.lost
        assert lost is not None
        first, last, d = problem.levels[0], problem.levels[-1], math.prod(problem.shape)
        prior = -0.5 * (problem.norm(problem.x_T) / first.sigma) ** 2 - 0.5 * d * math.log(2 * math.pi * first.sigma**2)
        white = prior + d * math.log(first.sigma / last.sigma) - lost
        return white - (problem.process.half_log_det if isinstance(problem.process, Anisotropic) else 0.0)


def _solve(
    problem: Problem,
    method: str,
    tolerance: float,
    keep: bool = False,
    callback: Callback | None = None,
    progress: Progress = False,
    likelihood: _Likelihood | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Integrate in whitened coordinates; return the end and, if ``keep``, the states."""
    outward = problem.outward(callback)
    if method == "dopri5":
        return _adaptive(problem, tolerance, keep, outward, likelihood)
    step = Multistep() if method == "multistep" else STEPS[method]
    levels = iter(problem.levels)

    def watch(k: int, t: float, x: Tensor) -> None:
        if likelihood is not None:
            likelihood.add(next(levels), x)
        if outward is not None:
            outward(k, t, x)

    return integrate(
        problem.x_T,
        problem.levels,
        lambda x, here, there: step(problem, x, here, there),
        keep=keep,
        callback=None if likelihood is None and outward is None else watch,
        progress=progress,
    )


def _adaptive(
    problem: Problem, tolerance: float, keep: bool, callback: Callback | None, likelihood: _Likelihood | None
) -> tuple[Tensor, list[Tensor]]:
    """Integrate by Dormand and Prince's method through torchdiffeq, in log(sigma/alpha)."""
    from torchdiffeq import odeint

    levels, x_T = problem.levels, problem.x_T
    ends = torch.tensor([problem.base.eps, problem.base.T], dtype=torch.float64)
    low, high = (problem.base.sigma(ends) / problem.base.alpha(ends)).tolist()

    def slope(u: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        t = problem.base.time(u.detach().double().exp().cpu().clamp(low, high))
        level = Level.at(problem.base, t.reshape(1))[0]
        size = math.hypot(level.alpha, level.sigma)
        x = state[0] * size
        dz = (x - level.alpha * problem.m(x, level)) / size - (level.sigma / size) ** 2 * state[0]
        return (dz,) if likelihood is None else (dz, -likelihood.trace(x, level.t).to(dz.dtype))

    state: tuple[Tensor, ...] = (x_T / math.hypot(levels[0].alpha, levels[0].sigma),)
    if likelihood is not None:
        state = (*state, torch.zeros(problem.batch, dtype=x_T.dtype, device=x_T.device))
    wanted = levels if keep or callback is not None else [levels[0], levels[-1]]
    u = torch.tensor([level.log_ratio for level in wanted], dtype=torch.float64, device=x_T.device)
    found = odeint(slope, state, u, rtol=tolerance, atol=tolerance, method="dopri5")
    xs = [z * math.hypot(level.alpha, level.sigma) for z, level in zip(found[0], wanted, strict=True)]
    if callback is not None:
        for k, (level, x) in enumerate(zip(wanted, xs, strict=True)):
            callback(k, level.t, x)
    if likelihood is not None:
        likelihood.lost = found[1][-1].double()
    return xs[-1], xs
