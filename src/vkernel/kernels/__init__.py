r"""V-kernels: the covariance of the learned score over training randomness (docs/theory.md, §5 and §8).

.. math:: V(x,t;x',t') = D_t\, \mathrm{Cov}_\theta[\hat s(x,t), \hat s(x',t')]\, D_{t'} .

* **White** kernels contain :math:`\delta(t - t')`: fresh noise at every step. ``cov(x, t)`` is then the coefficient of
  the delta function, and a second argument is refused. :class:`Naive` is the one of the paper.
* **Quenched** kernels do not: one trained model is one draw of a random *field*, the same at every step (``draw``,
  ``models``). :class:`Linear`, :class:`Lazy` and :class:`SGD` predict that of trained models, :class:`Measured` is
  taken from an ensemble, and users define :class:`FiniteRank` and :class:`Function`.
"""

from vkernel.kernels.base import FiniteRank, Function, Kernel, ValidityWarning
from vkernel.kernels.lazy import Lazy
from vkernel.kernels.linear import SGD, Linear, LinearField
from vkernel.kernels.measured import Measured
from vkernel.kernels.naive import Naive

__all__ = ["SGD", "FiniteRank", "Function", "Kernel", "Lazy", "Linear", "LinearField", "Measured", "Naive"]
__all__ += ["ValidityWarning"]
