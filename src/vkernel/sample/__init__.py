"""Samplers: from the probability-flow ODE to the effective SDE (docs/theory.md, §4).

All take the same :class:`~vkernel.sample.loop.Options`, ``(score, x_T, *, steps, spacing, save, callback, generator,
progress)``: :func:`pf_ode`, :func:`reverse_sde`, :func:`ancestral` and :func:`naive` of a score, :func:`effective_sde`
and :func:`semiclassical` of a V-kernel. :class:`Scores` is several scores with their moments."""

from vkernel.core.variance import Cumulants, Groups
from vkernel.sample.loop import Options, Solution
from vkernel.sample.ode import pf_ode
from vkernel.sample.scores import Scores
from vkernel.sample.sde import VKernel, ancestral, effective_sde, naive, reverse_sde
from vkernel.sample.semiclassical import semiclassical

__all__ = ["Cumulants", "Groups", "Options", "Scores", "Solution", "VKernel"]
__all__ += ["ancestral", "effective_sde", "naive", "pf_ode", "reverse_sde", "semiclassical"]
