"""Samplers: from the probability-flow ODE to the effective SDE (docs/theory.md, §4).

One signature, ``(score, x_T, *, steps, spacing, save, callback, generator, progress)``, for all: :func:`pf_ode`,
:func:`reverse_sde`, :func:`ancestral` and :func:`naive` take a score, :func:`effective_sde` and :func:`semiclassical` a
V-kernel. Quenched dynamics is ``pf_ode`` of the mean score plus a field. :class:`Scores` is several scores with their
moments.
"""

from vkernel.sample.loop import Solution
from vkernel.sample.ode import pf_ode
from vkernel.sample.scores import Cumulants, Groups, Scores
from vkernel.sample.sde import VKernel, ancestral, effective_sde, naive, reverse_sde
from vkernel.sample.semiclassical import semiclassical

__all__ = [
    "Cumulants",
    "Groups",
    "Scores",
    "Solution",
    "VKernel",
    "ancestral",
    "effective_sde",
    "naive",
    "pf_ode",
    "reverse_sde",
    "semiclassical",
]
