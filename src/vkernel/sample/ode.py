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

and the integrand is :math:`\sigma^2\,\mathrm{tr}\,C` for an exact score. Fixed steps integrate it by the trapezoidal
rule, ``dopri5`` beside z."""

import math
from collections.abc import Callable
from typing import Unpack

import torch
from torch import Tensor

from vkernel.core.checks import check_choice, check_positive
from vkernel.core.covariance import flat
from vkernel.core.errors import needs, require
from vkernel.sample.loop import Level, Options, Problem, Solution, States, Step, sampler, walk
from vkernel.score.base import Score, signs
from vkernel.score.empirical import EmpiricalScore

PROBES = 8  # sign vectors of the divergence of a score that is not exact
Trace = Callable[[Tensor, float], Tensor]  # the integrand of the log-likelihood, of whitened x and t
Flow = tuple[list[Tensor], Tensor | None]  # the states, and the integral of the trace


@sampler
def pf_ode(
    score: Score,
    x_T: Tensor,
    *,
    method: str = "exponential",
    tolerance: float = 1e-6,
    probes: int | Tensor = PROBES,
    **options: Unpack[Options],
) -> Tensor | Solution:
    """Integrate the probability-flow ODE of ``score`` from ``x_T (*batch, *shape)`` at T down to eps; return x at eps.

    ``score`` is a :class:`~vkernel.score.base.Score`; wrap a function with ``vk.as_score``. ``method`` is "exponential"
    (DDIM), "multistep", "euler", "heun" or "dopri5", which chooses its own steps to the relative ``tolerance``;
    ``steps`` are then the times that are saved, and a batch shares its steps. ``probes`` (sign vectors
    ``(count, *x_T.shape)``, or their number) and ``generator`` are for the divergence of a score that is not exact
    (Hutchinson 1989). ``options`` are :class:`~vkernel.sample.loop.Options`.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> score = vk.EmpiricalScore(data, process)
    >>> x_T = process.prior((5, 1), generator=0)
    >>> x = vk.sample.pf_ode(score, x_T, steps=100)
    >>> bool(((x - x.round()).abs() < 0.2).all())  # near -1, 0 and 1: the exact score returns training points
    True
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
    return (at.D / at.sigma**2 - at.beta) * x - (at.alpha * at.D / at.sigma**2) * problem.m(x, at)


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


def _trace(problem: Problem, probes: int | Tensor) -> Trace:
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
    needs('method="dopri5"', "adaptive", "torchdiffeq")
    from torchdiffeq import odeint

    base, levels, x_T = problem.base, problem.levels, problem.x_T

    def slope(u: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        assert bool(u.isfinite()), "a slope was NaN"
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
    except AssertionError:  # torchdiffeq raises this too, when its step underflows
        found = [torch.full((len(wanted), *a.shape), torch.nan).to(a) for a in state]
    xs = (z * math.hypot(level.alpha, level.sigma) for z, level in zip(found[0], wanted, strict=True))
    return problem.follow(zip(wanted, xs, strict=True)), None if trace is None else found[1][-1].double()
