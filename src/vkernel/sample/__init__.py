"""Samplers: from the probability-flow ODE to the effective SDE (docs/theory.md, §4).

One signature, ``(score, process, x_T, *, steps, …)``, for all: :func:`pf_ode`, :func:`reverse_sde`, :func:`naive`,
:func:`effective_sde` and :func:`semiclassical`. Quenched dynamics is nothing but ``pf_ode(s_avg + field)``.
"""

from vkernel.sample.ode import Solution, pf_ode
from vkernel.sample.sde import effective_sde, naive, reverse_sde
from vkernel.sample.semiclassical import semiclassical

__all__ = ["Solution", "effective_sde", "naive", "pf_ode", "reverse_sde", "semiclassical"]
