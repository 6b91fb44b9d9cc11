r"""Samplers with noise: the reverse SDE, the naive score estimator and the effective SDE (docs/theory.md, §4.2–4.4).

With :math:`\Delta > 0` the length of a step down in t, each is an Euler–Maruyama chain at the pre-step point:

* reverse SDE, for reference: :math:`x' = x + \Delta(\beta x + 2 D s) + \sqrt{2 D \Delta}\, z`;
* naive estimator: the PF-ODE step with :math:`\hat s = s + \sqrt{\kappa/\Delta}\,(\tilde s(x_0) - s)`, where
  :math:`x_0` is drawn from the posterior anew at every step;
* effective SDE: :math:`x' = x + \Delta(\beta x + D s_{avg}) + \xi`, where :math:`\xi` has the covariance V. A *white* V
  means fresh Gaussian noise of covariance :math:`\Delta D\,\mathrm{Cov}\,D`, in Itô's sense. A *quenched* V means one
  random field per trained model, drawn once: the chain is then an ODE, the PF-ODE of :math:`s_{avg} + \delta\hat s`.

Noise is drawn for all of ``x_T`` at every step.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.covariance import Covariance, Generator
from vkernel.core.errors import InputError, require
from vkernel.process import Process
from vkernel.sample.loop import Frame
from vkernel.sample.ode import pf_ode
from vkernel.score.conversions import Score
from vkernel.score.empirical import EmpiricalScore

__all__ = ["VKernel", "effective_sde", "naive", "reverse_sde"]


class VKernel(Protocol):
    """What the effective dynamics needs of a V-kernel (see :mod:`vkernel.kernels`)."""

    @property
    def white(self) -> bool: ...

    def cov(self, x: Tensor, t: Any, x2: Tensor | None = None, t2: Any = None) -> Covariance: ...

    def draw(self, members: int, generator: Generator = None) -> Any: ...


def reverse_sde(
    score: Score,
    process: Process,
    x_T: Tensor,
    *,
    steps: int = 100,
    generator: Generator = None,
    spacing: str | None = None,
) -> Tensor:
    """Sample the reverse SDE of ``score`` from ``x_T``; the result is like ``x_T``."""
    frame, source = Frame(score, process, x_T, steps, spacing), rng.as_generator(generator)
    x, levels = frame.x_T, frame.levels()
    for here, there in pairwise(levels):
        dt = here.t - there.t
        z = rng.randn(tuple(x.shape), source, x.device, x.dtype)
        x = x + dt * (here.beta * x + 2 * here.D * frame.s(x, here)) + math.sqrt(2 * here.D * dt) * z
    return frame.out(x)


def naive(
    score: EmpiricalScore,
    process: Process,
    x_T: Tensor,
    *,
    kappa: float,
    steps: int = 100,
    generator: Generator = None,
    spacing: str | None = None,
) -> Tensor:
    """Sample with the naive score estimator of strength ``kappa`` (unit of t): x0 is drawn anew at every step.

    ``kappa = 0`` is the PF-ODE by Euler's method; at a step of length ``kappa`` the raw proxy score is used.
    """
    require(isinstance(score, EmpiricalScore), "The naive estimator draws training points: it needs an EmpiricalScore.")
    require(
        isinstance(kappa, int | float) and math.isfinite(kappa) and kappa >= 0,
        f"kappa must be a number ≥ 0, in the unit of t; got {kappa!r}.",
    )
    frame, source = Frame(score, process, x_T, steps, spacing), rng.as_generator(generator)
    x, levels = frame.x_T, frame.levels()
    for here, there in pairwise(levels):
        dt = here.t - there.t
        posterior = score.posterior(process.unwhiten(x), here.t)
        m = process.whiten(posterior.mean)
        target = m
        if kappa > 0:
            x0 = process.whiten(posterior.sample(1, source)[0])
            target = m + math.sqrt(kappa / dt) * (x0 - m)
        rate, gain = here.D / here.sigma**2 - here.beta, here.alpha * here.D / here.sigma**2
        x = x - dt * (rate * x - gain * target)
    return frame.out(x)


def effective_sde(
    s_avg: Score,
    V: VKernel,
    process: Process,
    x_T: Tensor,
    *,
    steps: int = 100,
    members: int | None = None,
    generator: Generator = None,
    spacing: str | None = None,
    method: str = "euler",
) -> Tensor:
    """Sample what a typical trained model samples: mean score ``s_avg``, covariance ``V``.

    ``members=None`` draws one model for each sample, and the result is like ``x_T``; ``members=M`` draws M models that
    all start from ``x_T``, and the result is ``(M, *x_T.shape)``. For a white V every sample has noise of its own, so M
    members are M repetitions. ``method`` is the ODE method for a quenched V; a white V is Itô's, by Euler–Maruyama.
    """
    require(members is None or (isinstance(members, int) and members >= 1), f"members must be ≥ 1; got {members!r}.")
    frame, source = check(s_avg, V, process, x_T, steps, spacing), rng.as_generator(generator)
    if V.white:
        start = x_T if members is None else x_T.expand(members, *x_T.shape)
        return _white(s_avg, V, process, start, steps, source, spacing)
    require(process.base is process, "Quenched kernels are for isotropic processes; whiten the data first.")
    start = x_T.reshape(-1, 1, *frame.shape) if members is None else x_T.expand(members, *x_T.shape)
    field = V.draw(len(start), source)

    def learned(x: Tensor, t: Any) -> Tensor:
        change = field(x, t)
        good = isinstance(change, Tensor) and change.shape == x.shape
        require(good, f"The field of V returned the wrong shape for x of shape {tuple(x.shape)}.")
        return s_avg(x, t) + change

    x = pf_ode(learned, process, start.contiguous(), steps=steps, method=method, spacing=spacing)
    assert isinstance(x, Tensor)
    return x.reshape(x_T.shape) if members is None else x


def check(s_avg: Score, V: VKernel, process: Process, x_T: Tensor, steps: int, spacing: str | None) -> Frame:
    """Refuse what is no V-kernel, or another process's."""
    require(hasattr(V, "cov") and hasattr(V, "white"), f"V must be a V-kernel such as vk.kernels.Naive, not {V!r}.")
    own = getattr(V, "process", process)
    require(own == process, f"The V-kernel belongs to another process ({own!r}) than the sampler's ({process!r}).")
    return Frame(s_avg, process, x_T, steps, spacing)


def _white(
    s_avg: Score, V: VKernel, process: Process, x_T: Tensor, steps: int, source: torch.Generator, spacing: str | None
) -> Tensor:
    frame = Frame(s_avg, process, x_T, steps, spacing)
    x, levels = frame.x_T, frame.levels()
    shared = getattr(V, "score_and_draw", None) if getattr(V, "score", None) is s_avg else None
    for here, there in pairwise(levels):
        dt, outside = here.t - there.t, process.unwhiten(x)
        if shared is not None:
            s, noise = (process.unwhiten(a) for a in shared(outside, here.t, source))
        else:
            s = frame.s(x, here)
            noise = process.unwhiten(_draw(V, outside, here.t, source))
        x = x + dt * (here.beta * x + here.D * s) + math.sqrt(dt) * here.D * noise
    return frame.out(x)


def _draw(V: VKernel, x: Tensor, t: float, source: torch.Generator) -> Tensor:
    cov = V.cov(x, t)
    if not isinstance(cov, Covariance) or cov.batch + cov.shape != tuple(x.shape):
        raise InputError(f"V.cov(x, t) must be a Covariance on shape {tuple(x.shape)}; got {cov!r}.")
    noise = cov.draw(source)
    require(bool(noise.isfinite().all()), "V is not a covariance here: its draw is not finite.")
    return noise
