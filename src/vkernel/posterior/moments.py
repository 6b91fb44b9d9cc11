r"""Moments of the posterior, which form a monoid (docs/theory.md, §2.4).

For one part :math:`A` of the training set, with logits :math:`l_i = \log w_i - |x - \alpha y_i|^2 / 2\sigma^2`,

.. math::

   z = \sum_{i \in A} e^{l_i}, \qquad r_i = e^{l_i} / z, \qquad m = \sum r_i y_i, \qquad
   c_2 = \sum r_i\, (y_i - m) \otimes (y_i - m)

and two parts with shares :math:`p_a + p_b = 1`, :math:`p_a = z_a / (z_a + z_b)`, merge by

.. math::

   m = p_a m_a + p_b m_b, \qquad c_2 = p_a c_a + p_b c_b + p_a p_b\, \delta \otimes \delta, \qquad \delta = m_a - m_b

(Chan, Golub and LeVeque 1979): only centred moments are added, so that nothing cancels. Of :math:`c_2` one keeps a
contraction: its trace, its diagonal, or its product with a vector. One chunk, one device and many machines are the
same merge; the neutral element is the empty part, :math:`\log z = -\infty`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Moments:
    """Moments of ``B`` queries over one part of the data; float64. ``None`` marks what was not requested.

    ``log_z (B,)``, ``mean (B, d)``, ``trace (B,)``, ``diag (B, d)``, ``product (B, d)`` (the covariance times
    ``vector (B, d)``), ``square (B,)`` :math:`= \\sum r_i^2`, ``entropy (B,)`` :math:`= -\\sum r_i \\log r_i`.
    """

    log_z: Tensor
    mean: Tensor
    trace: Tensor | None = None
    diag: Tensor | None = None
    product: Tensor | None = None
    vector: Tensor | None = None
    square: Tensor | None = None
    entropy: Tensor | None = None

    @classmethod
    def empty(cls, x: Tensor, want: frozenset[str] = frozenset(), vector: Tensor | None = None) -> Moments:
        """The neutral element, no points at all, for queries ``x (B, d)``; ``want`` ⊂ {"trace", "diag", "weights"}."""
        one = torch.zeros_like(x[:, 0])
        return cls(
            log_z=torch.full_like(one, -torch.inf),
            mean=torch.zeros_like(x),
            trace=one.clone() if "trace" in want else None,
            diag=torch.zeros_like(x) if "diag" in want else None,
            product=None if vector is None else torch.zeros_like(x),
            vector=vector,
            square=one.clone() if "weights" in want else None,
            entropy=one.clone() if "weights" in want else None,
        )

    def present(self) -> dict[str, Tensor]:
        """The fields that were requested, by name."""
        return {name: a for name, a in vars(self).items() if a is not None}

    def take(self, rows: Tensor) -> Moments:
        """The moments of some of the queries."""
        return Moments(**{name: a[rows] for name, a in self.present().items()})

    def put(self, rows: Tensor, other: Moments) -> None:
        """Overwrite the moments of the queries ``rows``."""
        given = other.present()
        for name, a in self.present().items():
            if name != "vector":
                a[rows] = given[name]

    def absorb(self, rows: Tensor, part: Moments) -> None:
        """Merge ``part``, the moments of the queries ``rows`` over other points, in place."""
        self.put(rows, merge(self.take(rows), part))


def merge(a: Moments, b: Moments) -> Moments:
    """The moments of the union of two disjoint parts of the data."""
    log_z = torch.logaddexp(a.log_z, b.log_z)
    # Two empty parts have the shares exp(-inf + inf) = nan: nothing is shared, so zero is right.
    # From the difference, not from log_z: far from the data its last digit is worth more than a share.
    pa, pb = (torch.sigmoid(z).nan_to_num(0.0) for z in (a.log_z - b.log_z, b.log_z - a.log_z))
    delta = a.mean - b.mean
    out = Moments(log_z, pa[:, None] * a.mean + pb[:, None] * b.mean, vector=a.vector)
    if a.trace is not None and b.trace is not None:
        out.trace = pa * a.trace + pb * b.trace + pa * pb * delta.square().sum(-1)
    if a.diag is not None and b.diag is not None:
        out.diag = pa[:, None] * a.diag + pb[:, None] * b.diag + (pa * pb)[:, None] * delta.square()
    if a.product is not None and b.product is not None and a.vector is not None:
        along = (delta * a.vector).sum(-1)
        out.product = pa[:, None] * a.product + pb[:, None] * b.product + (pa * pb * along)[:, None] * delta
    if a.square is not None and b.square is not None:
        out.square = pa.square() * a.square + pb.square() * b.square
    if a.entropy is not None and b.entropy is not None:
        out.entropy = pa * a.entropy + pb * b.entropy + torch.special.entr(pa) + torch.special.entr(pb)
    return out
