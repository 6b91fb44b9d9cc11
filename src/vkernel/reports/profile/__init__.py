r"""Profile a training set: what will a diffusion model copy, and where is its target noisy? (docs/theory.md, §3)

Needs only the data. :func:`profile` measures, with standard errors, the noise fraction :math:`\rho(t)`, the effective
number of training points, the error of the ideal denoiser and the entropy of the posterior along t; the collapse time
and the window in which the training target carries noise; and the geometry behind them: duplicates, neighbours,
intrinsic dimension, the points most at risk of being copied, and the pairs between which probability would move.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vkernel.core.errors import require
from vkernel.core.estimate import Estimate
from vkernel.core.files import write
from vkernel.core.progress import progress as report_progress
from vkernel.data.empirical import Empirical
from vkernel.process import VP, Anisotropic, Process
from vkernel.reports.profile import curves, geometry, risks
from vkernel.score.empirical import EmpiricalScore

if TYPE_CHECKING:
    import xarray

__all__ = ["Profile", "profile"]

QUANTITIES = ("noise_fraction", "ess", "mmse", "entropy", "own_weight")
COST = 2.5e10  # queries × n × d per noise level that is spent by default


@dataclass
class Profile:
    """What was measured; indices count the points as they were given, before duplicates were merged.

    Lists along t, ascending: ``t``, ``sigma_over_alpha``, ``noise_fraction``, ``ess`` (effective number of training
    points), ``mmse`` (error of the ideal denoiser per coordinate), ``entropy`` (nats), ``own_weight`` (mean posterior
    weight of the point that made x), each with its ``…_se``.
    """

    data: Empirical = field(repr=False)
    process: Process
    n: int
    distinct: int
    d: int
    scale: tuple[float, float] | None
    queries: int
    seed: int
    curves: dict[str, list[float]] = field(repr=False)
    collapse_time: float | None
    window: tuple[float, float] | None
    intrinsic_dimension: Estimate | None
    neighbour_distance: dict[str, float]
    neighbour_distances: Tensor = field(repr=False)
    duplicates: list[list[int]]
    near_duplicates: list[dict[str, Any]]
    isolated: list[dict[str, Any]]
    boundary_pairs: list[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers, lists and dictionaries."""
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
            "intrinsic_dimension": None if dimension is None else _plain(dimension.value),
            "intrinsic_dimension_se": None if dimension is None else _plain(dimension.se),
            "neighbour_distance": self.neighbour_distance,
            "duplicates": self.duplicates,
            "near_duplicates": self.near_duplicates,
            "isolated": self.isolated,
            "boundary_pairs": self.boundary_pairs,
        }

    def to_dataset(self) -> xarray.Dataset:
        """The curves as a labelled data set with coordinate ``t``."""
        import xarray

        columns = {name: ("t", values) for name, values in self.curves.items() if name != "t"}
        return xarray.Dataset(columns, coords={"t": self.curves["t"]}, attrs={"process": repr(self.process)})

    def to_json(self, path: str | Path) -> Path:
        """Write :meth:`to_dict` to a file."""
        return write(path, json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")

    def to_html(self, path: str | Path) -> Path:
        """Write one self-contained page with plots and, for images, the pictures themselves."""
        from vkernel.reports.profile.report import page

        return write(path, page(self))

    def summary(self) -> str:
        """What was found, in a few sentences of plain words."""
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
    progress: bool = False,
) -> Profile:
    """Profile a training set under a forward process (default: the paper's VP).

    ``queries`` points are drawn at each noise level (default: 256 to 2048, fewer where the data are large); ``top`` of
    the isolated points and boundary pairs are listed; ``memory`` bounds the engine; ``progress`` shows a bar.
    """
    process = VP() if process is None else process
    require(not isinstance(process, Anisotropic), "Profiles are for isotropic processes; whiten the data first.")
    require(top >= 1, f"top must be at least 1; got {top}.")
    given = data if isinstance(data, Empirical) else Empirical(data)
    merged, inverse = given.merged()
    first, groups = _first_and_groups(inverse, merged.n)
    score = EmpiricalScore(merged, process, memory)
    if queries is None:
        queries = 1 << int(math.log2(min(max(COST / (merged.n * merged.d), 256), 2048)))
    require(queries >= 2, f"A standard error needs at least 2 queries; got {queries}.")

    total = curves.work() + 10 + risks.BISECTIONS + 2 + 2 * risks.WINDOW_LEVELS
    with report_progress(total, progress) as step:
        along = curves.measure(score, queries, seed, step)
        near = geometry.measure(score, seed, step) if merged.n > 1 else None
        lonely = risks.isolated_points(score, near, top, seed, step) if near is not None else []
        pairs = risks.boundary_pairs(score, along, top, seed, step)
    if merged.n == 1:
        lonely = [risks.Isolated(0, process.T)]
    columns: dict[str, list[float]] = {
        "t": [level.t for level in along.levels],
        "sigma_over_alpha": [level.sigma_over_alpha for level in along.levels],
    }
    for name in QUANTITIES:
        columns[name], columns[f"{name}_se"] = along.column(name), along.errors(name)
    return Profile(
        data=given,
        process=process,
        n=given.n,
        distinct=merged.n,
        d=given.d,
        scale=given.scale,
        queries=queries,
        seed=seed,
        curves=columns,
        collapse_time=along.collapse_time,
        window=along.window,
        intrinsic_dimension=None if near is None else near.intrinsic_dimension,
        neighbour_distance=_quantiles(near),
        neighbour_distances=torch.zeros(0) if near is None else near.distance,
        duplicates=groups,
        near_duplicates=[
            {"indices": [first[i] for i in members], "distance": gap} for members, gap in (near.near if near else [])
        ],
        isolated=[{"index": first[p.index], "t": p.t} for p in lonely],
        boundary_pairs=[
            {
                "i": first[p.i],
                "j": first[p.j],
                "share": float(p.share.value),
                "share_se": _plain(p.share.se),
                "distance": p.distance,
            }
            for p in pairs
        ],
    )


def _first_and_groups(inverse: Tensor, distinct: int) -> tuple[list[int], list[list[int]]]:
    """For each distinct point its first index among the given ones; and the groups of exact duplicates."""
    order = inverse.cpu().argsort(stable=True)
    sizes = torch.bincount(inverse.cpu(), minlength=distinct)
    ends = sizes.cumsum(0)
    first = order[ends - sizes].tolist()
    repeated = (sizes > 1).nonzero().squeeze(-1)
    groups = [order[int(ends[k] - sizes[k]) : int(ends[k])].tolist() for k in repeated]
    return first, groups


def _quantiles(near: geometry.Geometry | None) -> dict[str, float]:
    if near is None:
        return {}
    levels = {"min": 0.0, "q05": 0.05, "median": 0.5, "q95": 0.95, "max": 1.0}
    ordered = near.distance.sort().values
    return {
        "points": len(ordered),
        **{name: float(ordered[min(int(q * len(ordered)), len(ordered) - 1)]) for name, q in levels.items()},
    }


def _plain(value: float) -> float | None:
    """JSON has no infinity."""
    return float(value) if math.isfinite(value) else None
