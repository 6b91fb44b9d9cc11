"""The exact engine: the posterior over training points, and every moment of it (docs/theory.md, §2).

``weights`` holds posterior weights over a part of the data and their moments, which merge. ``engine`` chooses the
method: ``dense`` is the reference path, ``pruned`` and ``gpu`` are faster where they can be used. ``sharded`` spreads
the data over many processes, and ``result`` is what a user sees."""

from vkernel.posterior.engine import Choice, Engine
from vkernel.posterior.result import Posterior, PosteriorCovariance
from vkernel.posterior.sharded import Sharded, shard
from vkernel.posterior.weights import Moments, Points, Queries

__all__ = ["Choice", "Engine", "Moments", "Points", "Posterior", "PosteriorCovariance", "Queries", "Sharded", "shard"]
