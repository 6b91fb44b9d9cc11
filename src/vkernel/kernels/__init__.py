r"""V-kernels: the covariance of the learned score over training randomness (docs/theory.md, §5 and §8).

.. math:: V(x,t;x',t') = D_t\, \mathrm{Cov}_\theta[\hat s(x,t), \hat s(x',t')]\, D_{t'} .

A kernel says :math:`\mathrm{Cov}_\theta`; :math:`D` comes from the process. Two kinds behave differently:

* **white** kernels contain :math:`\delta(t - t')`: fresh noise at every step. ``cov(x, t)`` is then the coefficient of
  the delta function, and a second argument is refused. :class:`Naive` is the one of the paper.
* **quenched** kernels do not: one trained model is one draw of a random *field*, the same at every step.
  :meth:`Kernel.draw` returns that field. A kernel of finite rank draws its weights once (:class:`FiniteRank`); a kernel
  that is only known as a function draws the field where it is asked for, conditioned on all it has said before
  (:class:`Function`).

Those of trained models are quenched: :class:`Linear`, :class:`Lazy` and :class:`SGD` are predictions, :class:`Measured`
is taken from an ensemble. Each says whether its assumptions hold (``valid``, ``why``) and warns where they do not.
"""

from vkernel.kernels.base import Kernel, ValidityWarning
from vkernel.kernels.fields import FiniteRank, Function
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
