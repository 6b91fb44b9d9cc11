r"""Masses and distances of laws, each an :class:`~vkernel.core.estimate.Estimate` with a 95 % interval.

A sample is ``(n, *shape)``, or ``(n,)`` for numbers; an ensemble, one sample for each of M members, is
``(M, n, *shape)``. The error is over *units*: the members of an ensemble, the points of a sample. Without ``members``,
three axes mean an ensemble of vectors and fewer mean a sample; functions that know the training set go by its shape.

*Masses* are linear in the law: the mean of the units' shares, with Student's interval for members and, for
:math:`n` points of which a share :math:`p` counts, Wilson's (the :math:`P` with :math:`(p-P)^2 \le z^2 P(1-P)/n`).

*Distances* are between average laws: members are pooled. With units :math:`g` of a (b likewise, the variances add),

.. math::

   \mathrm{TV} &= \tfrac12 \sum_k |p_k - q_k|, \qquad
   \mathcal E = 2E|X-Y| - E|X-X'| - E|Y-Y'|, \qquad
   W_p^p = \min_\pi E_\pi |X-Y|^p, \\
   \mathrm{se}^2 &= \frac{G-1}{G} \sum_g (\theta_{(g)} - \bar\theta)^2 \quad\text{(jackknife)}, \qquad
   \mathrm{se}^2(W_p^p) = \mathrm{Var}_g(\bar\varphi_g) / G.

:math:`\mathcal E` takes :math:`X, X'` from different units (two points of one member share its field), and hence is
unbiased. :math:`\varphi, \psi` are Kantorovich's potentials, :math:`\varphi(x) + \psi(y) \le |x-y|^p` with equality
where mass moves: the derivative of :math:`W_p^p` in the laws, so that nothing is resampled. TV and W of finite samples
are biased upwards, since noise is distance too: for equal laws TV is about :math:`\sqrt{B/\pi n}`, with n samples on
each side and B cells that hold mass. Errors do not contain this bias, and mean little where it is the whole distance.

Two distances compare *moments*, of features of images for example: Fréchet's, of the Gaussians with the laws' means
and covariances (``vkernel.metrics.frechet``), and the kernel distance, of all moments up to the third
(``vkernel.metrics.mmd``),

.. math::

   D = |m_a - m_b|^2 + \mathrm{tr}\big(A + B - 2 (A^{1/2} B A^{1/2})^{1/2}\big), \qquad
   \mathrm{MMD}^2 = E\,\kappa(X,X') + E\,\kappa(Y,Y') - 2E\,\kappa(X,Y), \quad
   \kappa = \Big(\frac{x\cdot y}{k} + 1\Big)^3 .

D has the error of its derivative, :math:`I - T` with the optimal map T, as W has; its bias, about :math:`(k + k(k+1)/4)
(1/n + 1/m)` variances for equal laws of k features, is upwards too. MMD² has the jackknife's error and no bias.

All is computed in float64, on the device of the (first) sample.
"""

from vkernel.metrics.distances import energy_distance, wasserstein
from vkernel.metrics.frechet import frechet_distance
from vkernel.metrics.grids import histogram, kl, total_variation
from vkernel.metrics.masses import ModeWeights, boundary_mass, gap_mass, memorised_fraction, mode_weights
from vkernel.metrics.mmd import kernel_distance

__all__ = [
    "ModeWeights",
    "boundary_mass",
    "energy_distance",
    "frechet_distance",
    "gap_mass",
    "histogram",
    "kernel_distance",
    "kl",
    "memorised_fraction",
    "mode_weights",
    "total_variation",
    "wasserstein",
]
