"""Scores: the exact score of a training set, of mixtures, and conversions between what networks predict."""

from vkernel.score.conversions import (
    Score,
    from_flow,
    from_noise,
    from_v,
    from_x0,
    proxy_score,
    to_flow,
    to_noise,
    to_v,
    to_x0,
)
from vkernel.score.empirical import EmpiricalScore, noise_fraction
from vkernel.score.mixture import GaussianMixture

__all__ = [
    "EmpiricalScore",
    "GaussianMixture",
    "Score",
    "from_flow",
    "from_noise",
    "from_v",
    "from_x0",
    "noise_fraction",
    "proxy_score",
    "to_flow",
    "to_noise",
    "to_v",
    "to_x0",
]
