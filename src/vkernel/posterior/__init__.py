"""The exact engine: the empirical posterior over training points, and every moment of it (docs/theory.md, §2).

``moments`` is the monoid, ``pieces`` the two forms in which weights are held, ``engine`` decides between them,
``result`` is what a user sees, and ``sharded`` spreads the data over many processes.
"""

from vkernel.posterior.engine import Alone, Engine
from vkernel.posterior.moments import Moments, merge
from vkernel.posterior.pieces import Queries
from vkernel.posterior.result import Posterior, PosteriorCovariance
from vkernel.posterior.sharded import Ranks, Sharded, shard

__all__ = [
    "Alone",
    "Engine",
    "Moments",
    "Posterior",
    "PosteriorCovariance",
    "Queries",
    "Ranks",
    "Sharded",
    "merge",
    "shard",
]
