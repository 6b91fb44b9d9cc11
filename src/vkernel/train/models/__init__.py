"""Models that can be trained as ensembles: linear, lazy (infinitely wide networks), MLP and U-Net (theory, §6)."""

from __future__ import annotations

from typing import Any

from vkernel.core.errors import InputError
from vkernel.train import features
from vkernel.train.models.base import Linear, Model
from vkernel.train.models.lazy import NNGP, NTK, RBF, Lazy, kernel_from_spec
from vkernel.train.models.network import MLP, UNet

__all__ = ["MLP", "NNGP", "NTK", "RBF", "Lazy", "Linear", "Model", "UNet", "from_spec"]


def from_spec(spec: dict[str, Any]) -> Model:
    """Return the model of a ``spec``; a weighting function is not kept, and σ² replaces it."""
    given = dict(spec, weight="sigma2") if spec.get("weight") == "function" else dict(spec)
    match given.pop("kind", None):
        case "linear":
            return Linear(features.from_spec(given.pop("features")), **given)
        case "lazy":
            return Lazy(kernel_from_spec(given.pop("kernel")), float(given.pop("tau")), **given)
        case "mlp":
            return MLP(**given)
        case "unet":
            return UNet(**given)
    raise InputError(f"There is no model of kind {spec.get('kind')!r}.")
