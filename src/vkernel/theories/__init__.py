r"""Closed-form accounts of what a diffusion model learns, other than V-kernels; each is a ``vk.Score``.

The exact denoiser :math:`m(x,t) = \sum_i r_i y_i`, with :math:`r_i \propto w_i\, e^{-|x - \alpha y_i|^2 / 2\sigma^2}`,
returns the training set. Each theory changes one thing in it, and most have it as a limit:

=================== ================================================================ ==========================
theory              what it changes                                                  the exact denoiser is
=================== ================================================================ ==========================
Gaussian            the training set is replaced by its mean and covariance          –
Smoothed            every training point is a Gaussian of width h, or m is averaged  h = 0
Nearest             only the k nearest training points have weight                   k = n
Local               each pixel has its own posterior, given the k×k patch around it  k = 2 max(H, W) - 1
EquivariantLocal    patches come from every place of every training image            – (Local: k ≥ max(H, W))
PCALocal            each pixel has its own posterior, given those it correlates with threshold = 0
Switch              one theory at high noise, another one at low noise               –
=================== ================================================================ =========================="""

from collections.abc import Callable

from vkernel.score import DataScore, EmpiricalScore
from vkernel.theories.base import Theory
from vkernel.theories.equivariant import EquivariantLocal
from vkernel.theories.gaussian import Gaussian
from vkernel.theories.local import Local
from vkernel.theories.nearest import Nearest
from vkernel.theories.pca_local import PCALocal
from vkernel.theories.smoothed import Smoothed
from vkernel.theories.switch import Switch

#: The exact score and the theories by the names that studies and reports use.
NAMES: dict[str, Callable[..., DataScore]] = {
    "exact": EmpiricalScore,
    "gaussian": Gaussian,
    "smoothed": Smoothed,
    "nearest": Nearest,
    "local": Local,
    "equivariant": EquivariantLocal,
    "pca": PCALocal,
    "switch": Switch,
}

__all__ = ["NAMES", "EquivariantLocal", "Gaussian", "Local", "Nearest", "PCALocal", "Smoothed", "Switch", "Theory"]
