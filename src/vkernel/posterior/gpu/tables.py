"""What the steps of the GPU path pass on: candidates, and the stage of each query."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

NARROWER = 4.0  # the narrow window is MARGIN + NARROWER; it is tried before MARGIN + log n


@dataclass
class Listed:
    """The points with logits of at least ``threshold (B,)`` number ``count (B,)``; ``counts (B, parts)`` of them are in
    each part of the data, after ``starts (B, parts)`` in the parts before."""

    threshold: Tensor
    count: Tensor
    counts: Tensor
    starts: Tensor


@dataclass(frozen=True)
class Rules:
    r"""The numbers by which queries are assigned to stages. A row of ``table (3, 8)``, float64, one for each dense
    stage, holds a, b, c, e, f, the squares of the errors that are allowed below and above ``some`` effective points,
    and a place that is not used: the error of one point's part in a mean is :math:`\epsilon^2 = (a\, |x'| + b
    \min(|x'|, c\, \alpha^2/\sigma^2) + e\, \alpha^2/\sigma^2)^2 + f`."""

    table: Tensor
    cap: int  # places for candidates of one query
    usual: int  # candidates of all queries, on average, beyond which none has more than these
    second: bool  # for covariances, relative to the weight of all points but the heaviest
    close: float  # the largest δ of the dense stages
    far: float = 1e30  # logits beyond this are left to float64
    outside: float = 1e15  # |x - αc| / σ beyond which float64 cannot distinguish points
    some: float = 64.0  # n_eff above which the error may be larger
    heaviest: int = 1000  # points of a query that may have to be evaluated in float64 beside the light and middle stage


@dataclass
class Assigned:
    """The stage of every query, ``stage (B,)``: 0 sparse, 1 light, 2 middle, 3 full, 4 the reference path. ``count
    (B,)`` of candidates, more than their places where they are not used; ``least (3, B)``, the logit above which points
    are evaluated in float64 in each dense stage. ``numbers`` of queries: invalid; of stages 1, 2, 3 and 4; with such
    heavy points in the light, middle and full stage, of queries up to this stage."""

    stage: Tensor
    count: Tensor
    least: Tensor
    numbers: Tensor

    def between(self, first: int, last: int) -> Tensor:
        """Return which queries have one of these stages, ``(B,)``."""
        return (self.stage >= first) & (self.stage <= last)
