"""Scores: the abstract :class:`Score`, the exact score of a training set, of mixtures, and of anyone's network."""

from vkernel.score.base import DataScore, Score, Time
from vkernel.score.conversions import convert, proxy_score, to_flow, to_noise, to_v, to_x0
from vkernel.score.empirical import EmpiricalScore, noise_fraction
from vkernel.score.mixture import GaussianMixture, MixtureScore
from vkernel.score.wrapped import Wrapped, as_score

__all__ = ["DataScore", "EmpiricalScore", "GaussianMixture", "MixtureScore", "Score", "Time", "Wrapped", "as_score"]
__all__ += ["convert", "noise_fraction", "proxy_score", "to_flow", "to_noise", "to_v", "to_x0"]
