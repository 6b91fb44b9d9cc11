"""Models that can be trained as ensembles: linear, lazy (kernels of wide networks), MLP and U-Net (docs/theory.md, §6).

Each is a :class:`~vkernel.models.base.Model`: it holds no weights, is fitted for many members at once, and predicts the
score, the denoised point or the noise.
"""

from __future__ import annotations

from typing import Any

from vkernel import features
from vkernel.errors import InputError
from vkernel.models.base import Model
from vkernel.models.linear import Linear
from vkernel.models.parametrisation import Parametrisation

__all__ = ["Linear", "Model", "Parametrisation", "from_spec"]


def from_spec(spec: dict[str, Any]) -> Model:
    """A model from its ``spec``; a weighting function is not kept, and σ² stands in its place."""
    given = dict(spec)
    kind = given.pop("kind", None)
    if given.get("weight") == "function":
        given["weight"] = None
    if kind == "linear":
        return Linear(features.from_spec(given.pop("features")), **given)
    raise InputError(f"There is no model of kind {kind!r}.")
