r"""The probability-flow ODE (docs/theory.md, §4.1).

.. math:: \frac{dx}{dt} = -\beta x - D\, s(x,t) = \frac{\dot\sigma}{\sigma}\, x - \frac{\alpha D}{\sigma^2}\, m(x,t),

integrated from T to eps; :math:`m = (x + \sigma^2 s)/\alpha` is the denoiser, and the second form has nothing that
cancels where alpha vanishes. Four methods, one signature:

* ``euler`` (the paper's), order 1; ``heun``, order 2;
* ``exponential``: :math:`x' = \alpha' m + (\sigma'/\sigma)(x - \alpha m)`, exact while m stands still (DDIM), order 1;
* ``dopri5``: adaptive, order 5, in :math:`\lambda = \log(\sigma/\alpha)` for :math:`z = x/h`,
  :math:`h^2 = \alpha^2 + \sigma^2`,

.. math:: \frac{dz}{d\lambda} = \frac{x - \alpha m}{h} - \frac{\sigma^2}{h^2}\, z ,

in which small t is not stiff. The log-likelihood along the flow needs only the noise of the target,

.. math:: \log p(x_\epsilon) = \log N(x_T; 0, S_T) + d \log\frac{\sigma_T}{\sigma_\epsilon}
          - \int_{\lambda_\epsilon}^{\lambda_T} (\sigma^2 \nabla\cdot s + d)\, d\lambda ,

and the integrand is :math:`\sigma^2\,\mathrm{tr}\,C` for an exact score.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.errors import require
from vkernel.process import Process
from vkernel.sample.loop import Frame, Level, Step
from vkernel.score.conversions import Score
from vkernel.score.empirical import EmpiricalScore

__all__ = ["METHODS", "Solution", "march", "pf_ode"]

SAVES = ("path", "error", "logp")


@dataclass(frozen=True)
class Solution:
    """A sample with what was asked for beside it; ``None`` marks what was not.

    ``x (*batch, *shape)``; ``times (steps + 1,)``; ``path (steps + 1, *batch, *shape)``; ``error (*batch,)``, the
    distance to the solution with twice as many steps; ``logp (*batch,)``.
    """

    x: Tensor
    times: Tensor
    path: Tensor | None = None
    error: Tensor | None = None
    logp: Tensor | None = None

    @property
    def summary(self) -> str:
        """The discretisation error in words."""
        if self.error is None:
            return "no step-halving error was asked for"
        q = torch.quantile(self.error.double().flatten().cpu(), torch.tensor([0.5, 0.95, 1.0], dtype=torch.float64))
        return f"halving the step moves a sample by {q[0]:.2g} (median), {q[1]:.2g} (95 %), {q[2]:.2g} (at most)"


def _drift(frame: Frame, x: Tensor, at: Level) -> Tensor:
    rate = at.D / at.sigma**2 - at.beta
    return rate * x - (at.alpha * at.D / at.sigma**2) * frame.m(x, at)


def _euler(frame: Frame, x: Tensor, here: Level, there: Level) -> Tensor:
    return x + (there.t - here.t) * _drift(frame, x, here)


def _heun(frame: Frame, x: Tensor, here: Level, there: Level) -> Tensor:
    dt = there.t - here.t
    first = _drift(frame, x, here)
    return x + dt / 2 * (first + _drift(frame, x + dt * first, there))


def _exponential(frame: Frame, x: Tensor, here: Level, there: Level) -> Tensor:
    m = frame.m(x, here)
    return there.alpha * m + (there.sigma / here.sigma) * (x - here.alpha * m)


METHODS: dict[str, Step] = {"euler": _euler, "heun": _heun, "exponential": _exponential}


def pf_ode(
    score: Score,
    process: Process,
    x_T: Tensor,
    *,
    steps: int = 100,
    method: str = "euler",
    spacing: str | None = None,
    save: Iterable[str] = (),
    probes: int = 8,
    generator: torch.Generator | int | None = 0,
    tolerance: float = 1e-6,
) -> Tensor | Solution:
    """Integrate the probability-flow ODE of ``score`` from ``x_T`` at T down to eps.

    Returns the sample, like ``x_T``; with ``save``, any of "path", "error" and "logp", a :class:`Solution`. ``probes``
    and ``generator`` are for the divergence of a score that is not exact (Hutchinson 1989). ``dopri5`` chooses its own
    steps to the relative ``tolerance``; ``steps`` are then the times that are saved, and a batch shares its steps.
    """
    save = (save,) if isinstance(save, str) else tuple(save)
    for name in save:
        require(name in SAVES, f"save takes any of {', '.join(SAVES)}; got {name!r}.")
    require(
        method in METHODS or method == "dopri5", f"method must be one of {', '.join(METHODS)}, dopri5; not {method!r}."
    )
    require(tolerance > 0, f"tolerance must be positive; got {tolerance}.")
    frame = Frame(score, process, x_T, steps, spacing)
    silent = frame.levels()[-1].sigma == 0
    good = not silent or (method in ("euler", "exponential") and "logp" not in save)
    require(good, f"There is no noise at eps in {process!r}: only Euler and exponential steps arrive there.")
    signs = None
    if "logp" in save and not isinstance(score, EmpiricalScore):
        require(probes >= 1, f"Hutchinson's estimate needs at least one probe; got {probes}.")
        source = rng.as_generator(generator)
        signs = rng.randn((probes, *frame.x_T.shape), source, frame.x_T.device, frame.x_T.dtype).sign()

    run = _adaptive if method == "dopri5" else _fixed
    x, path, lost = run(frame, METHODS.get(method), "path" in save, "logp" in save, signs, tolerance)
    if not save:
        return frame.out(x)
    error = logp = None
    if "error" in save:
        finer = Frame(score, process, x_T, 2 * steps, spacing)
        other = run(finer, METHODS.get(method), False, False, None, tolerance / 32)[0]
        error = frame.norm(process.unwhiten(x - other))
    if lost is not None:
        logp = _log_likelihood(frame, lost)
    return Solution(
        frame.out(x),
        frame.times,
        None if path is None else torch.stack([frame.out(p) for p in path]),
        error,
        logp,
    )


def march(frame: Frame, method: str, tolerance: float = 1e-6) -> Tensor:
    """The end of the flow in the frame's coordinates, which may hold what is not finite."""
    good = method in METHODS or method == "dopri5"
    require(good, f"method must be one of {', '.join(METHODS)}, dopri5; not {method!r}.")
    run = _adaptive if method == "dopri5" else _fixed
    return run(frame, METHODS.get(method), False, False, None, tolerance)[0]


def _fixed(
    frame: Frame, step: Step | None, keep: bool, likelihood: bool, probes: Tensor | None, tolerance: float
) -> tuple[Tensor, list[Tensor] | None, Tensor | None]:
    """Steps on the grid; the likelihood's integral by the trapezoidal rule in log(sigma/alpha)."""
    assert step is not None
    x, levels = frame.x_T, frame.levels()
    path = [x] if keep else None
    before = frame.noise_trace(x, levels[0], probes) if likelihood else None
    lost = None if before is None else torch.zeros_like(before)
    for here, there in pairwise(levels):
        x = step(frame, x, here, there)
        if path is not None:
            path.append(x)
        if lost is not None and before is not None:
            after = frame.noise_trace(x, there, probes)
            lost = lost + (here.log_ratio - there.log_ratio) * (before + after) / 2
            before = after
    return x, path, lost


def _adaptive(
    frame: Frame, step: Step | None, keep: bool, likelihood: bool, probes: Tensor | None, tolerance: float
) -> tuple[Tensor, list[Tensor] | None, Tensor | None]:
    """Dormand and Prince's method through torchdiffeq, in log(sigma/alpha)."""
    from torchdiffeq import odeint

    levels = frame.levels()
    low, high = frame.base._ratios()

    def at(u: Tensor) -> Level:
        ratio = u.detach().double().exp().cpu().clamp(low, high)
        t = frame.base.time(ratio)
        numbers = (float(getattr(frame.base, name)(t)) for name in ("alpha", "sigma", "beta", "D"))
        return Level(float(t), *numbers)

    def slope(u: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        level = at(u)
        size = math.hypot(level.alpha, level.sigma)
        x = state[0] * size
        m = frame.m(x, level)
        dz = (x - level.alpha * m) / size - (level.sigma / size) ** 2 * state[0]
        if len(state) == 1:
            return (dz,)
        return dz, -frame.noise_trace(x, level, probes).to(dz.dtype)

    start = levels[0]
    state: tuple[Tensor, ...] = (frame.x_T / math.hypot(start.alpha, start.sigma),)
    if likelihood:
        batch = frame.x_T.shape[: frame.x_T.ndim - frame.event]
        state = (*state, torch.zeros(batch, dtype=frame.x_T.dtype, device=frame.x_T.device))
    wanted = levels if keep else [levels[0], levels[-1]]
    u = torch.tensor([level.log_ratio for level in wanted], dtype=torch.float64, device=frame.x_T.device)
    found = odeint(slope, state, u, rtol=tolerance, atol=tolerance, method="dopri5")
    xs = [z * math.hypot(level.alpha, level.sigma) for z, level in zip(found[0], wanted, strict=True)]
    lost = found[1][-1].double() if likelihood else None
    return xs[-1], xs if keep else None, lost


def _log_likelihood(frame: Frame, lost: Tensor) -> Tensor:
    first, last, d = frame.levels()[0], frame.levels()[-1], math.prod(frame.shape)
    prior = -0.5 * (frame.norm(frame.x_T) / first.sigma) ** 2 - 0.5 * d * math.log(2 * math.pi * first.sigma**2)
    white = prior + d * math.log(first.sigma / last.sigma) - lost
    return white - getattr(frame.process, "half_log_det", 0.0)
