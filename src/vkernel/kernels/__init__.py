r"""V-kernels: the covariance of the learned score over training randomness (docs/theory.md, §5 and §8).

.. math:: V(x,t;x',t') = D_t\, \mathrm{Cov}_\theta[\hat s(x,t), \hat s(x',t')]\, D_{t'} .

A kernel returns :math:`\mathrm{Cov}_\theta` (``cov``) and the mean score (``mean``); :math:`D` comes from the process.

* **White** kernels contain :math:`\delta(t - t')`: fresh noise at every step. ``cov(x, t)`` is then the coefficient of
  the delta function, and a second argument is refused. :class:`Naive` is the one of the paper.
* **Quenched** kernels do not: one trained model is one draw of a random *field*, the same at every step (``draw``,
  ``models``). A kernel of finite rank draws its weights once (:class:`FiniteRank`); a kernel that is known only as a
  function draws the field where it is evaluated, conditioned on all earlier values (:class:`Function`).

Kernels of trained models are quenched: :class:`Linear`, :class:`Lazy` and :class:`SGD` are predictions,
:class:`Measured` is taken from an ensemble. ``valid`` and ``why`` state whether the assumptions of a kernel hold, with
a warning where they do not, and ``error`` is the relative standard error of its variances.
"""

from vkernel.kernels.base import FiniteRank, Function, Kernel, ValidityWarning
from vkernel.kernels.lazy import Lazy
from vkernel.kernels.linear import Linear, LinearField
from vkernel.kernels.measured import Measured
from vkernel.kernels.naive import Naive
from vkernel.kernels.sgd import SGD

__all__ = [
    "SGD",
    "FiniteRank",
    "Function",
    "Kernel",
    "Lazy",
    "Linear",
    "LinearField",
    "Measured",
    "Naive",
    "ValidityWarning",
]
