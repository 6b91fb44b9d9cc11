r"""Profile a training set: what would a diffusion model copy, and where is its target noisy? (docs/theory.md, §3)

Needs only the data. :func:`profile` measures, with standard errors, the noise fraction :math:`\rho(t)`, the effective
number of training points, the error of the ideal denoiser and the entropy of the posterior along t; the collapse time
and the window in which the training target carries noise; and the geometry behind them: duplicates, neighbours,
intrinsic dimension, the points most at risk of being copied, and the pairs between which probability would move.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vkernel.core.checks import check_whole
from vkernel.core.errors import require
from vkernel.core.estimate import Estimate
from vkernel.core.files import write
from vkernel.core.progress import Progress
from vkernel.core.progress import progress as show_progress
from vkernel.data.empirical import Empirical
from vkernel.process import VP, Anisotropic, Process
from vkernel.reports.profile import measure
from vkernel.reports.profile.measure import BoundaryPair, IsolatedPoint, Level, NearDuplicates
from vkernel.score.empirical import EmpiricalScore

if TYPE_CHECKING:
    import xarray

__all__ = ["BoundaryPair", "IsolatedPoint", "Level", "NearDuplicates", "Profile", "profile"]

COST = 2.5e10  # queries × n × d per noise level that is spent by default
QUANTILES = {"min": 0.0, "q05": 0.05, "median": 0.5, "q95": 0.95, "max": 1.0}


@dataclass(frozen=True)
class Profile:
    """Hold the result of :func:`profile`; indices count the points as they were given, with duplicates."""

    data: Empirical = field(repr=False)
    process: Process
    n: int
    distinct: int
    d: int
    scale: tuple[float, float] | None
    queries: int
    seed: int
    levels: list[Level] = field(repr=False)  # in ascending t
    collapse_time: float | None
    window: tuple[float, float] | None
    intrinsic_dimension: Estimate | None
    neighbour_distances: Tensor = field(repr=False)
    duplicates: list[list[int]]
    near_duplicates: list[NearDuplicates]
    isolated: list[IsolatedPoint]
    boundary_pairs: list[BoundaryPair]

    @property
    def curves(self) -> dict[str, list[float]]:
        """The quantities of :class:`Level` as lists along t, and their standard errors as ``…_se``."""
        rows = [asdict(level) for level in self.levels]
        out = {k: [r[k]["value"] if isinstance(v, dict) else r[k] for r in rows] for k, v in rows[0].items()}
        return out | {f"{k}_se": [r[k]["se"] for r in rows] for k, v in rows[0].items() if isinstance(v, dict)}

    @property
    def neighbour_distance(self) -> dict[str, float]:
        """Quantiles of the distance to the nearest other point, and the number of points they are from."""
        found = self.neighbour_distances.sort().values.tolist()
        if not found:
            return {}
        last = len(found) - 1
        return {"points": len(found)} | {name: found[min(int(q * len(found)), last)] for name, q in QUANTILES.items()}

    def to_dict(self) -> dict[str, object]:
        """Return everything as plain numbers, lists and dictionaries."""
        dimension = self.intrinsic_dimension
        return {
            "n": self.n,
            "distinct": self.distinct,
            "d": self.d,
            "shape": list(self.data.shape),
            "name": self.data.name,
            "scale": None if self.scale is None else list(self.scale),
            "process": repr(self.process),
            "queries": self.queries,
            "seed": self.seed,
            **self.curves,
            "collapse_time": self.collapse_time,
            "window": None if self.window is None else list(self.window),
            "intrinsic_dimension": None if dimension is None else _finite(dimension.value),
            "intrinsic_dimension_se": None if dimension is None else _finite(dimension.se),
            "neighbour_distance": self.neighbour_distance,
            "duplicates": self.duplicates,
            "near_duplicates": [asdict(group) for group in self.near_duplicates],
            "isolated": [asdict(point) for point in self.isolated],
            "boundary_pairs": [asdict(pair) | {"share_se": _finite(pair.share_se)} for pair in self.boundary_pairs],
        }

    def to_dataset(self) -> xarray.Dataset:
        """Return the curves as a labelled data set with coordinate ``t``."""
        import xarray

        columns = {name: ("t", values) for name, values in self.curves.items() if name != "t"}
        return xarray.Dataset(columns, coords={"t": self.curves["t"]}, attrs={"process": repr(self.process)})

    def to_json(self, path: str | Path) -> Path:
        """Write :meth:`to_dict` to a file."""
        return write(path, json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")

    def to_html(self, path: str | Path) -> Path:
        """Write one self-contained page with plots and, for images, the images themselves."""
        from vkernel.reports.profile.report import page

        return write(path, page(self))

    def summary(self) -> str:
        """Return the findings in a few sentences."""
        from vkernel.reports.profile.report import sentences

        return "\n".join(sentences(self))


def profile(
    data: Empirical | Tensor,
    process: Process | None = None,
    *,
    queries: int | None = None,
    top: int = 10,
    seed: int = 0,
    memory: int | None = None,
    progress: Progress = False,
) -> Profile:
    """Profile a training set under a forward process.

    Args:
        data: the training set, or its points ``(n, *shape)``.
        process: an isotropic process (default: the paper's VP).
        queries: noisy points drawn at each noise level (default: 256 to 2048, fewer where the data are large).
        top: how many isolated points and boundary pairs are listed.
        memory: the working memory of the exact engine, in bytes.
    """
    process = VP() if process is None else process
    require(not isinstance(process, Anisotropic), "Profiles are for isotropic processes; whiten the data first.")
    check_whole(top, "top")
    given = data if isinstance(data, Empirical) else Empirical(data)
    merged, inverse = given.merged()
    first, groups = _first_and_groups(inverse, merged.n)
    score = EmpiricalScore(merged, process, memory)
    if queries is None:
        queries = 1 << int(math.log2(min(max(COST / (merged.n * merged.d), 256), 2048)))
    require(queries >= 2, f"A standard error needs at least 2 queries; got {queries}.")
    with show_progress(measure.WORK, progress) as step:
        levels = measure.Levels.measure(score, queries, seed, step)
        geometry = measure.Geometry.measure(merged, seed, step) if merged.n > 1 else None
        isolated = [IsolatedPoint(0, process.T)]
        if geometry is not None:
            isolated = measure.isolated_points(score, geometry, top, seed, step)
        pairs = measure.boundary_pairs(score, levels, top, seed, step)
    near = [] if geometry is None else geometry.near
    return Profile(
        data=given,
        process=process,
        n=given.n,
        distinct=merged.n,
        d=given.d,
        scale=given.scale,
        queries=queries,
        seed=seed,
        levels=levels.ordered,
        collapse_time=levels.collapse_time,
        window=levels.window,
        intrinsic_dimension=None if geometry is None else geometry.intrinsic_dimension,
        neighbour_distances=torch.zeros(0) if geometry is None else geometry.distance,
        duplicates=groups,
        near_duplicates=[replace(group, indices=[first[i] for i in group.indices]) for group in near],
        isolated=[replace(point, index=first[point.index]) for point in isolated],
        boundary_pairs=[replace(pair, i=first[pair.i], j=first[pair.j]) for pair in pairs],
    )


def _first_and_groups(inverse: Tensor, distinct: int) -> tuple[list[int], list[list[int]]]:
    """Return the first given index of each distinct point, and the groups of exact duplicates."""
    order, sizes = inverse.cpu().argsort(stable=True), torch.bincount(inverse.cpu(), minlength=distinct)
    parts = order.split(sizes.tolist())
    return [int(part[0]) for part in parts], [part.tolist() for part in parts if len(part) > 1]


def _finite(value: float) -> float | None:
    """Return ``None`` for infinite values, which JSON does not have."""
    return float(value) if math.isfinite(value) else None
