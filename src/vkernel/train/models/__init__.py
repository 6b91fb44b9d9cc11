"""Models that can be trained as ensembles: linear, lazy (infinitely wide networks), MLP and U-Net (theory, §6)."""

import math
from collections.abc import Callable, Mapping

from vkernel.core.checks import check_type
from vkernel.core.errors import InputError, require
from vkernel.train.features import Features, RandomFourier, grid_of
from vkernel.train.models.base import Model
from vkernel.train.models.lazy import NNGP, NTK, RBF, Lazy, NetworkKernel
from vkernel.train.models.linear import Linear
from vkernel.train.models.mlp import MLP
from vkernel.train.models.unet import UNet

__all__ = ["MLP", "NNGP", "NTK", "RBF", "Lazy", "Linear", "Model", "UNet", "from_spec"]
Made = Model | NetworkKernel | Features
KINDS: dict[str, Callable[..., Made]] = {c.__name__.lower(): c for c in (Linear, Lazy, MLP, UNet, NTK, NNGP, RBF)}
KINDS |= {"grid": grid_of, "random_fourier": RandomFourier}


def from_spec(spec: Mapping[str, object]) -> Made:
    """Return the model, kernel or features of a ``spec``; a weighting function is not kept, and σ² replaces it.

    >>> import vkernel as vk
    >>> spec = vk.models.MLP(width=8, depth=2).spec
    >>> vk.models.from_spec(spec).width
    8
    """
    given = {k: from_spec(v) if isinstance(v, dict) else v for k, v in check_type(spec, "A spec", dict).items()}
    kind = str(given.pop("kind", None))
    require(kind in KINDS, f"There are no models, kernels or features of kind {kind!r}; known: {', '.join(KINDS)}.")
    kept = {("weight", "function"): "sigma2", ("tau", "inf"): math.inf}
    given = {k: kept.get((k, v), v) if isinstance(v, str) else v for k, v in given.items()}
    try:
        return KINDS[kind](**given)
    except TypeError as error:
        raise InputError(f"No {kind} can be made from {given!r:.200}: {error}.") from None
