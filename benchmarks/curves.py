r"""How the engine's cost grows with n, d, B and sigma, on either device, with the limit drawn in.

``python -m benchmarks --only n d B sigma [--device cuda]``. Each curve changes one of the four and holds the others.
Data are random fields with an image-like spectrum: in float32 on a CPU, in 8 bits on a GPU. Times are medians of whole
calls of ``score(x, sigma)``; the limit is that of :mod:`benchmarks.limits`, measured in the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import vkernel as vk
from benchmarks.common import empirical, medians, plain, spread_out, typical
from benchmarks.limits import limits
from benchmarks.pruning import prepared
from benchmarks.results import record

__all__ = ["CURVES", "curve", "curves"]

Report = Callable[[str], None]
CURVES = ("n", "d", "B", "sigma")
JUDGED = 32  # queries by which it is judged whether few points hold the weight


@dataclass(frozen=True)
class Sizes:
    """What each curve runs over; ``shape`` (channels, side), ``points`` and ``batch`` hold where they do not vary."""

    n: Sequence[int]
    shapes: Sequence[tuple[int, int]]
    B: Sequence[int]
    sigma: Sequence[float]
    shape: tuple[int, int]
    points: int
    few: int  # points where d varies
    batch: int
    noise: Sequence[float] = (0.1, 1.0, 10.0)
    repeats: int = 3


SIGMAS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
SHAPES = ((3, 4), (3, 8), (3, 16), (3, 23), (3, 32))
SIZES = {
    ("cpu", False): Sizes(
        (7_500, 15_000, 30_000, 60_000), SHAPES, (1, 4, 16, 64, 256, 1024), SIGMAS, (1, 28), 60_000, 16_000, 256
    ),
    ("cpu", True): Sizes(
        (3_000, 6_000, 12_000), SHAPES[:3], (1, 16, 256), SIGMAS[::3], (1, 28), 12_000, 4_000, 128, repeats=1
    ),
    ("cuda", False): Sizes(
        (62_500, 125_000, 250_000, 500_000, 1_000_000),
        ((3, 8), (3, 16), (3, 32), (3, 64)),
        (1, 4, 16, 64, 256, 1024, 4096),
        SIGMAS,
        (3, 32),
        50_000,
        100_000,
        1024,
        repeats=9,
    ),
    ("cuda", True): Sizes(
        (25_000, 50_000, 100_000), ((3, 8), (3, 16), (3, 32)), (1, 32, 1024), SIGMAS[::3], (3, 32), 50_000, 50_000, 1024
    ),
}


def timed(taken: float, least: float | None) -> dict[str, Any]:
    """A measured time beside the least possible."""
    return {"time (s)": taken, "limit (s)": least, "time/limit": None if least is None else taken / least}


class Subject:
    """A training set with its score, ready as after many queries."""

    def __init__(self, n: int, shape: tuple[int, int], device: str, quick: bool) -> None:
        self.data, self.device, self.limits = empirical(n, *shape, device), device, limits(device, quick)
        self.score = vk.EmpiricalScore(self.data, vk.EDM())
        if self.score.engine.pruned is not None:
            prepared(self.score)

    def measured(self, batch: int, sigma: float, repeats: int) -> dict[str, Any]:
        """Seconds of a call, the least possible, and their ratio."""
        x = typical(self.data, batch, sigma)
        (taken,) = medians([lambda: self.score(x, sigma)], repeats, self.device)
        return timed(taken, self.least(batch, sigma))

    def methods(self, batch: int, sigma: float, repeats: int) -> dict[str, dict[str, Any]]:
        """The same for the engine, for its dense path alone where there is another, and for plain products."""
        x, y = typical(self.data, batch, sigma), self.data.rows(0, self.data.n).float()
        half = y.square().sum(1) / 2
        runs = {"engine": lambda: self.score(x, sigma), "plain torch": lambda: plain(y, x.flatten(1), sigma, half)}
        if self.score.engine.pruned is not None:
            dense = vk.EmpiricalScore(self.data, vk.EDM(), method="dense")
            runs["engine, dense path"] = lambda: dense(x, sigma)
        times = dict(zip(runs, medians(list(runs.values()), repeats, self.device), strict=True))
        full = self.limits.posterior(self.data.n, self.data.d, batch, 1.0)  # plain code always makes both products
        least = {"engine": self.least(batch, sigma), "plain torch": full}
        return {method: timed(taken, least.get(method)) for method, taken in times.items()}

    def least(self, batch: int, sigma: float) -> float:
        """The limit: of the products, or, where short bounds replace the first, of those."""
        engine = self.score.engine
        if engine.pruned is not None and sigma <= engine.pruned.reach.get(False, 0.0):
            width = engine.pruned.tables[0].shape[1]
            return self.limits.posterior(self.data.n, width, batch, 0.0)
        share = spread_out(self.data, typical(self.data, JUDGED, sigma), sigma)
        return self.limits.posterior(self.data.n, self.data.d, batch, share)


def curve(name: str, device: str = "cpu", quick: bool = False, report: Report = print) -> list[dict[str, Any]]:
    """One of the four, recorded; ``device`` is "cpu" or "cuda"."""
    sizes = SIZES[device, quick]
    d, n, batch = sizes.shape[0] * sizes.shape[1] ** 2, sizes.points, sizes.batch
    rows: list[dict[str, Any]] = []
    plot: dict[str, Any] = {"x": name, "y": "time (s)", "limit": "limit (s)", "by": "noise", "fit": True}

    def add(subject: Subject, value: int, batch: int = batch) -> None:
        for sigma in sizes.noise:
            report(f"{name} = {value:,}, sigma = {sigma:g}")
            rows.append({name: value, "noise": f"sigma = {sigma:g}"} | subject.measured(batch, sigma, sizes.repeats))

    if name == "n":
        for value in sizes.n:
            add(Subject(value, sizes.shape, device, quick), value)
        held, plot["xlabel"] = f"d = {d:,}, B = {batch:,}", "training points n"
    elif name == "d":
        for channels, side in sizes.shapes:
            add(Subject(sizes.few, (channels, side), device, quick), channels * side**2)
        held, plot["xlabel"] = f"n = {sizes.few:,}, B = {batch:,}", "dimension d"
        channels, side = sizes.shapes[-3]
        plot["above"] = channels * side**2  # below, what is done to each logit takes the time
    elif name == "B":
        subject = Subject(n, sizes.shape, device, quick)
        for value in sizes.B:
            add(subject, value, value)
        held, plot["xlabel"] = f"n = {n:,}, d = {d:,}", "queries B"
        plot["above"] = sizes.B[-3]  # below, reading the data takes the time, and B has no part in it
    else:
        subject = Subject(n, sizes.shape, device, quick)
        for sigma in sizes.sigma:
            report(f"sigma = {sigma:g}")
            for method, row in subject.methods(batch, sigma, sizes.repeats).items():
                rows.append({"sigma": sigma, "method": method} | row)
        held, plot["xlabel"], plot["by"] = f"n = {n:,}, d = {d:,}, B = {batch:,}", "noise level sigma", "method"
    record(
        "gpu" if device == "cuda" else "cpu",
        f"curve-{name}",
        rows,
        title=f"Time against {name}: {held}",
        note=f"Random fields in {'8 bits' if device == 'cuda' else 'float32'}. {said(device, quick)}",
        plot=plot,
    )
    return rows


def said(device: str, quick: bool) -> str:
    """The limits in words."""
    known, kind = limits(device, quick), "float16" if device == "cuda" else "float32"
    return (
        f"The limit: products in {kind} at {known.operations / 1e9:,.0f} GFLOP/s, reading at {known.bytes / 1e9:,.0f} "
        "GB/s, both measured in this run; where most points are pruned, the product of the short bounds."
    )


def curves(device: str = "cpu", quick: bool = False, report: Report = print) -> dict[str, list[dict[str, Any]]]:
    """All four."""
    return {name: curve(name, device, quick, report) for name in CURVES}


def steps(name: str, device: str, quick: bool) -> int:
    """How many times ``curve`` tells."""
    sizes = SIZES[device, quick]
    many = {"n": sizes.n, "d": sizes.shapes, "B": sizes.B}
    return len(many[name]) * len(sizes.noise) if name in many else len(sizes.sigma)
