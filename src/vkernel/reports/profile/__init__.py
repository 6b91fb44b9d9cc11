r"""Profile a training set: where is the training target of a diffusion model noisy? (docs/theory.md, §3)

Needs only the data. :func:`profile` measures, with standard errors, the noise fraction :math:`\rho(t)`, the effective
number of training points, the error of the ideal denoiser and the entropy of the posterior along t; the collapse time
and the window in which the training target carries noise; and the geometry behind them: duplicates, neighbours,
intrinsic dimension, the points with the largest collapse times, and the pairs with the largest shares of the noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vkernel.core.checks import check_whole
from vkernel.core.errors import require
from vkernel.core.estimate import Estimate
from vkernel.core.files import write, write_json
from vkernel.core.memory import check_memory
from vkernel.core.progress import Progress, progress as show_progress
from vkernel.data.empirical import Empirical
from vkernel.process import VP, Anisotropic, Process
from vkernel.reports import html
from vkernel.reports.profile import measure, tested
from vkernel.reports.profile.measure import BoundaryPair, IsolatedPoint, Level, NearDuplicates
from vkernel.score.empirical import EmpiricalScore

if TYPE_CHECKING:
    import xarray
    from matplotlib.figure import Figure
    from rich.console import Group

__all__ = ["BoundaryPair", "IsolatedPoint", "Level", "NearDuplicates", "Profile", "profile", "table"]
COST = 2.5e10  # queries × n × d per noise level that is spent by default
QUANTILES = {"min": 0.0, "q05": 0.05, "median": 0.5, "q95": 0.95, "max": 1.0}
LEAST = 0.01  # share of the target noise from which on a pair is named in sentences and drawn
SHOWN = 12  # groups of duplicates, and rows of a table, that a report shows


@dataclass(frozen=True)
class Profile:
    """Hold the result of :func:`profile`; indices count the points as they were given, with duplicates.

    >>> import vkernel as vk
    >>> found = vk.profile(vk.data.toy("triple"), queries=16)
    >>> found.n, found.d, len(found.levels) == len(found.curves["t"])
    (3, 1, True)
    """

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
        quantiles = {name: found[min(int(q * len(found)), len(found) - 1)] for name, q in QUANTILES.items() if found}
        return {"points": len(found)} | quantiles if found else {}

    @property
    def leading_pairs(self) -> list[BoundaryPair]:
        """The listed pairs that carry 1 % or more of the target noise; often there are none in high dimension."""
        return [pair for pair in self.boundary_pairs if pair.share >= LEAST]

    def to_dict(self) -> dict[str, object]:
        """Return everything as plain numbers, lists and dictionaries; infinite values, which JSON lacks, are None."""
        dimension, known = self.intrinsic_dimension or Estimate.unknown(), vars(self)
        return {
            **{name: known[name] for name in ("n", "distinct", "d", "queries", "seed", "collapse_time", "duplicates")},
            **self.curves,
            **{name: known[name] and list(known[name]) for name in ("scale", "window")},
            **{"shape": list(self.data.shape), "name": self.data.name, "process": repr(self.process)},
            **{"intrinsic_dimension": _finite(dimension.value), "intrinsic_dimension_se": _finite(dimension.se)},
            "neighbour_distance": self.neighbour_distance,
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
        return write_json(path, self.to_dict())

    def to_html(self, path: str | Path) -> Path:
        """Write one self-contained page with plots and, for images, the images themselves."""
        title = f"Profile of {self.data.name}" if self.data.name else "Profile of a training set"
        figures = {name: html.picture(draw) for name, draw in _figures(self).items()}
        values = {"title": title, "sentences": self.summary().splitlines(), "rows": _rows(self), "figures": figures}
        return write(path, html.page("profile.html", p=self, shown=SHOWN, least=LEAST, **values))

    def summary(self) -> str:
        """Return the findings in a few sentences, one on each line."""
        peak = max(self.levels, key=lambda level: level.noise_fraction.value)
        return html.render(
            "profile.txt", p=self, peak=peak, process=repr(self.process), least=LEAST, tested=tested.results()
        ).strip()


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


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
    """Profile a training set, or points ``(n, *shape)``, under an isotropic process (default: the paper's VP).

    ``queries`` noisy points are drawn at each noise level (default: 256 to 2048, fewer where the data are large), and
    ``top`` isolated points and boundary pairs are listed. ``memory`` is that of the exact engine, in bytes.

    >>> import vkernel as vk
    >>> found = vk.profile(vk.data.toy("L"), vk.VP(), queries=16, seed=0)
    >>> low, high = found.window
    >>> low < found.collapse_time < high
    True
    """
    process = VP() if process is None else process
    require(not isinstance(process, Anisotropic), "Profiles are for isotropic processes; whiten the data first.")
    check_whole(top, "top")
    given = data if isinstance(data, Empirical) else Empirical(data)
    if queries is not None:
        size = 64 * check_whole(queries, "queries", 2) * (given.d + 8)
        check_memory(size, f"A profile with {queries:,} queries for each noise level", given.device)
    merged, inverse = given.merged()
    order, counts = inverse.cpu().argsort(stable=True), torch.bincount(inverse.cpu(), minlength=merged.n)
    groups = [group.tolist() for group in order.split(counts.tolist())]
    first = [group[0] for group in groups]
    score = EmpiricalScore(merged, process, memory)
    if queries is None:
        queries = 1 << int(math.log2(min(max(COST / (merged.n * merged.d), 256), 2048)))
    with show_progress(measure.WORK, progress) as step:
        levels = measure.Levels(score, queries, seed, step)
        geometry = measure.Geometry.measure(score, seed, step)
        isolated = measure.isolated_points(score, geometry, top, seed, step)
        pairs = measure.boundary_pairs(score, levels, top, seed, step)
    duplicates = [group for group in groups if len(group) > 1]
    near = [replace(group, indices=[first[i] for i in group.indices]) for group in geometry.near]
    isolated = [replace(point, index=first[point.index]) for point in isolated]
    pairs = [replace(pair, i=first[pair.i], j=first[pair.j]) for pair in pairs]
    sizes = given.n, merged.n, given.d, given.scale, queries, seed
    found = levels.ordered, levels.collapse_time, levels.window, geometry.intrinsic_dimension, geometry.distance
    return Profile(given, process, *sizes, *found, duplicates, near, isolated, pairs)


def table(p: Profile) -> Group:
    """Return the sentences, the curves at about twelve levels, isolated points and boundary pairs, for the terminal."""
    from rich.console import Group
    from rich.table import Column, Table
    from rich.text import Text

    title = f"along t ({p.queries:,} queries per level; points: their effective number; entropy in nats)"
    points = [(str(one.index), f"{one.t:.3g}") for one in p.isolated]
    pairs = [(f"{q.i} – {q.j}", f"{100 * q.share:.2g} ± {100 * q.share_se:.1g} %") for q in p.boundary_pairs]
    listed = [[*left, *right] for left, right in zip_longest(points, pairs, fillvalue=("", ""))]
    heads = ["t", "noise fraction", "points", "mmse", "entropy", "own weight"]
    columns = ["isolated point", "collapse time", "boundary pair", "share of noise"]
    tables = []
    for name, (head, *rows) in ((title, [heads, *_rows(p)]), ("isolated points, boundary pairs", [columns, *listed])):
        right = [Column(column, justify="right") for column in head]
        tables.append(Table(*right, title=name, title_justify="left"))
        for row in rows:
            tables[-1].add_row(*row)
    return Group(Text(p.summary()), *tables)


def _rows(p: Profile) -> list[list[str]]:
    """Return about a dozen levels, evenly spaced, as cells of a table."""
    rows, last = [], len(p.levels) - 1
    for level in (p.levels[k] for k in sorted({round(k * last / (SHOWN - 1)) for k in range(SHOWN)})):
        rho = level.noise_fraction
        cells = [f"{e.value:.3g}" for e in (level.ess, level.mmse, level.entropy, level.own_weight)]
        rows.append([f"{level.t:.3g}", f"{rho.value:.2g} ± {rho.se:.1g}" if rho.value > 1e-6 else "< 1e-6", *cells])
    return rows


def _figures(p: Profile) -> dict[str, Callable[[], Figure]]:
    """Return the functions that draw the figures of the page; their titles and captions stand in the template."""
    from vkernel import plots

    image = len(p.data.shape) == 2 or (len(p.data.shape) == 3 and p.data.shape[0] in (1, 3))
    groups = [*p.duplicates, *(group.indices for group in p.near_duplicates)][:SHOWN]

    def images(indices: list[int]) -> Tensor:
        return p.data[torch.tensor(indices)].float()

    def plane() -> Figure:
        """Draw at most about 5,000 points of the plane, the listed ones among them."""
        named = [one.index for one in p.isolated] + [k for q in p.leading_pairs for k in (q.i, q.j)]
        keep = torch.cat([torch.arange(0, p.n, max(1, p.n // 5000)), torch.tensor(named, dtype=torch.long)]).unique()
        place = {int(i): k for k, i in enumerate(keep)}
        pairs = [[place[q.i], place[q.j]] for q in p.leading_pairs]
        return plots.scatter_pairs(p.data.take(keep), [place[one.index] for one in p.isolated], pairs)

    def pairs(rows: list[tuple[int, int, str]]) -> Figure:
        return plots.pairs(images([r[0] for r in rows]), images([r[1] for r in rows]), [r[2] for r in rows])

    alone = {o.index: f"{o.index}\nt = {o.t:.3g}" for o in p.isolated}
    shares = [(q.i, q.j, f"{q.i} · {q.j}\n{100 * q.share:.2g} %") for q in p.leading_pairs]
    every: dict[str, tuple[object, Callable[[], Figure]]] = {
        "curves": (True, lambda: plots.noise_profile(p.curves, p.collapse_time, p.window, p.distinct)),
        "neighbours": (len(p.neighbour_distances), lambda: plots.distances(p.neighbour_distances)),
        "plane": (p.data.shape == (2,), plane),
        "duplicates": (image and groups, lambda: pairs([(g[0], g[1], f"{g[0]} · {g[1]}") for g in groups])),
        "isolated": (image and alone, lambda: plots.image_row(images([*alone]), [*alone.values()])),
        "pairs": (image and shares, lambda: pairs(shares)),
    }
    return {name: draw for name, (wanted, draw) in every.items() if wanted}
