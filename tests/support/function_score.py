"""A score given by a function of x and t, which it passes on as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

import vkernel as vk

__all__ = ["FunctionScore"]


class FunctionScore(vk.Score):
    """``function(x, t)`` as a score; unlike ``vk.as_score`` it neither splits batches nor expands times."""

    def __init__(
        self, function: Callable[[Tensor, Any], Tensor], process: vk.Process, shape: tuple[int, ...] | None = None
    ) -> None:
        self.function, self.process, self.shape = function, process, shape

    def __call__(self, x: Tensor, t: Any) -> Tensor:
        return self.function(x, t)
