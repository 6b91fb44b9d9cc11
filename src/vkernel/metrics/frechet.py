r"""Fréchet's distance of two laws by their means and covariances alone: that of two Gaussians with these moments.

.. math:: D = |m_a - m_b|^2 + \mathrm{tr}\big(A + B - 2 (A^{1/2} B A^{1/2})^{1/2}\big) .

**The root.** Let :math:`A = F_a F_a^T`, :math:`B = F_b F_b^T` with factors of any width, and :math:`M = F_a^T F_b = U
S V^T`. By polar decomposition :math:`F_a = A^{1/2} W` with a partial isometry W whose range is that of A, so that
:math:`M M^T = F_a^T B F_a = W^T (A^{1/2} B A^{1/2}) W` has the eigenvalues of :math:`A^{1/2} B A^{1/2}`, zeros apart.
Hence

.. math:: \mathrm{tr}\,(A^{1/2} B A^{1/2})^{1/2} = \mathrm{tr}\, S .

The centred samples, one a row, are :math:`X_a = \sqrt{n-1}\, Q_a R_a`; then :math:`F_a = R_a^T` is of width
min(n, k). One formula thus serves many samples (M is k × k) and few (M is n × n), needs no root of a matrix that is not
symmetric, and takes no root of an eigenvalue that rounding made negative.

**The error.** Where A is regular, :math:`\mathrm{d}D = \mathrm{tr}\,(I - T)\,\mathrm{d}A + 2 (m_a - m_b) \cdot
\mathrm{d}m_a`, with the optimal map :math:`T = A^{-1/2} (A^{1/2} B A^{1/2})^{1/2} A^{-1/2}` from a to b
[:math:`T F_a = F_b V U^T` gives :math:`TAT = B`]. One more sample x moves the mean by :math:`x - m_a` and A by
:math:`(x - m_a)(x - m_a)^T - A`, both over n, and so the influence of sample i is, but for a constant,

.. math:: \varphi_i = 2 (m_a - m_b) \cdot (x_i - m_a) + |x_i - m_a|^2 - (n-1)\, q_i^T U S U^T q_i ,

:math:`q_i` being row i of :math:`Q_a`: Kantorovich's potential of the two Gaussians. The variance of D is
:math:`\mathrm{Var}\,\varphi/n + \mathrm{Var}\,\psi/m`, as for :math:`W_p`.

**The bias.** Noise in the covariances is distance: to second order, :math:`\tfrac14 |\delta A - \delta B|^2` if
:math:`A = B = I`, so that Gaussian samples of one law have

.. math:: E\,D \approx \Big(k + \frac{k(k+1)}{4}\Big) \Big(\frac1n + \frac1m\Big)

times their variance. It is no part of the error, and is to be compared with the distance of as many samples of one law.
With n no more than a few k the error itself is rough: too wide where the laws are close, by a factor of two at n = 4k.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from vkernel.core.errors import require
from vkernel.core.estimate import Estimate
from vkernel.metrics.samples import Members, read_two, with_error

__all__ = ["frechet_distance"]


def frechet_distance(
    a: Any, b: Any, *, allow_singular: bool = False, members: Members = None, skip_diverged: bool = False
) -> Estimate:
    """Fréchet's distance (squared, as is the custom) of the Gaussians with the means and covariances of a and b.

    Covariances of k features need more than k samples of each; ``allow_singular=True`` takes fewer, and the value is
    then right for the sample covariances but far above that of the laws, with an error that knows nothing of it.
    """
    laws = read_two(a, b, members, skip_diverged)
    points = [law.points for law in laws]
    for name, x in zip("ab", points, strict=True):
        n, k = x.shape
        require(n >= 2, f"A covariance needs at least 2 samples; {name} has {n}.")
        require(
            allow_singular or n > k,
            f"A covariance of {k} features has full rank from {k + 1} samples on, but {name} has {n}. Take more "
            "samples, or fewer features, such as their first principal components (pca:K); allow_singular=True takes "
            "the singular covariance as it is.",
        )
    means = [x.mean(0) for x in points]
    centred = [x - m for x, m in zip(points, means, strict=True)]
    (q_a, r_a), (q_b, r_b) = (torch.linalg.qr(x / math.sqrt(len(x) - 1)) for x in centred)
    u, s, v = torch.linalg.svd(r_a @ r_b.mT, full_matrices=False)
    shift = means[0] - means[1]
    value = float(shift @ shift + r_a.square().sum() + r_b.square().sum() - 2 * s.sum())
    parts = []
    for law, x, q, basis, way in zip(laws, centred, (q_a, q_b), (u, v.mT), (shift, -shift), strict=True):
        moved = (len(x) - 1) * (q @ basis).square() @ s
        parts.append(law.variance(2 * x @ way + x.square().sum(1) - moved))
    return with_error(max(value, 0.0), parts, 0.0, math.inf)
