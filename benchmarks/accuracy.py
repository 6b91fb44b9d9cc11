"""Accuracy and speed together, on a CPU: the engine beside plain float32 PyTorch, KeOps and faiss, in one run.

``python -m benchmarks --only accuracy neighbours pruning size``. The engine is timed as it is after its first thousand
queries at low noise, with the bounds of :mod:`vkernel.posterior.pruned` prepared; what that took is said in the note.
KeOps and faiss may be missing: their columns then say so.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import vkernel as vk
from benchmarks.common import error, fields, images, keops, medians, once, plain, queries, reference
from benchmarks.pruning import midway, near, prepared
from benchmarks.results import record

__all__ = ["accuracy", "neighbours", "pruning", "size"]

Report = Callable[[str], None]
MISSING = "not installed"


def scored(y: Tensor, dense: bool = False) -> tuple[vk.EmpiricalScore, float]:
    """The score of a training set, and the seconds that its bounds took; ``dense`` forbids them."""
    score = vk.EmpiricalScore(vk.Empirical(y), vk.EDM(), method="dense" if dense else "auto")
    return score, 0.0 if score.engine.pruned is None else sum(prepared(score))


def accuracy(quick: bool = False, report: Report = print) -> list[dict[str, Any]]:
    """Engine, plain products and KeOps at 60,000 × 784."""
    name, y = images("fashion", 12_000 if quick else 60_000)
    score, preparing = scored(y)
    half = y.square().sum(1) / 2
    installed, rows = importlib.util.find_spec("pykeops") is not None, []
    if installed:
        keops(y[:64], y[:8], 1.0)  # compiles
    for sigma in (0.1, 1.0, 10.0):
        report(f"accuracy, sigma = {sigma:g}")
        x = queries(y, 256, sigma)
        truth, spread = reference(y, x, sigma), score.data.spread
        runs = [lambda x=x, s=sigma: score(x, s), lambda x=x, s=sigma: plain(y, x, s, half)]
        ours, theirs = medians(runs, 2 if quick else 5)
        row: dict[str, Any] = {
            "sigma": sigma,
            "engine (s)": ours,
            "engine error": error(score.posterior(x, sigma).mean, truth, spread),
            "plain torch (s)": theirs,
            "plain error": error(plain(y, x, sigma), truth, spread),
            "plain/engine": theirs / ours,
            "KeOps (s)": MISSING,
        }
        if installed:
            seconds, mean = once(lambda x=x, s=sigma: keops(y, x, s))
            row |= {"KeOps (s)": seconds, "KeOps error": error(mean, truth, spread), "KeOps/engine": seconds / ours}
        rows.append(row)
    title = f"Accuracy and speed: {name}, {len(y):,} × {y.shape[1]:,}, 256 queries"
    note = (
        "Whole calls of `score(x, sigma)`, median of several, by turns with plain float32 products; KeOps, whose "
        f"formula is compiled before, once. The bounds for low noise took {preparing:.1f} s, once. Errors are those of "
        "the worst query against float64."
    )
    record("cpu", "accuracy", rows, title=title, note=note)
    return rows


def neighbours(quick: bool = False, report: Report = print, k: int = 10) -> list[dict[str, Any]]:
    """The k heaviest points, which at equal weights are the nearest: the engine, vkernel's metrics and faiss."""
    name, y = images("fashion", 12_000 if quick else 60_000)
    score = scored(y, dense=True)[0]
    data, sigma = score.data, 0.5
    x = queries(y, 256, sigma)
    report("neighbours")
    exact = torch.cat(
        [torch.cdist(x.double(), b.double(), compute_mode="donot_use_mm_for_euclid_dist") for b in y.split(8192)], 1
    )
    distance, index = exact.topk(k, largest=False)
    found: dict[str, tuple[Tensor, Tensor]] = {}

    def top() -> None:
        i = score.posterior(x, sigma).top(k)[1]
        found["posterior.top(10)"] = (x.double()[:, None] - y.double()[i]).norm(dim=2), i

    def heaviest() -> None:
        logit, i = score.engine.nearest(score.queries(x, torch.tensor(sigma)), k)
        shift = torch.tensor(data.n).log()  # equal weights are 1/n
        found["the engine's top 10 alone"] = (-2 * sigma**2 * (logit + shift)).clamp_min(0).sqrt(), i

    def metric() -> None:
        found["metrics' nearest, in distances"] = vk.metrics.nearest(x, data, k)

    runs: dict[str, Callable[[], None]] = {
        "posterior.top(10)": top,
        "the engine's top 10 alone": heaviest,
        "metrics' nearest, in distances": metric,
    }
    if importlib.util.find_spec("faiss") is not None:
        import faiss

        faiss.omp_set_num_threads(torch.get_num_threads())
        flat = faiss.IndexFlatL2(y.shape[1])
        flat.add(y.numpy())

        def search() -> None:
            square, i = flat.search(x.numpy(), k)
            found["faiss, IndexFlatL2"] = torch.from_numpy(square).clamp_min(0).sqrt().double(), torch.from_numpy(i)

        runs["faiss, IndexFlatL2"] = search
    times = medians(list(runs.values()), 2 if quick else 5)
    rows: list[dict[str, Any]] = []
    for method, seconds in zip(runs, times, strict=True):
        got, i = found[method]
        hit = (i[:, :, None] == index[:, None, :]).any(2).double().mean()
        off = float(((got.double() - distance).abs() / distance.clamp_min(1e-12)).max())
        rows.append({"method": method, "time (s)": seconds, "recall": float(hit), "worst error of a distance": off})
    if "faiss, IndexFlatL2" not in runs:
        rows.append({"method": f"faiss: {MISSING}"})
    title = f"The {k} nearest training points: {name}, {len(y):,} × {y.shape[1]:,}, 256 queries"
    note = (
        "Against differences in float64. `posterior.top` also normalises the weights, which takes all points; the "
        "top 10 alone does not. For a point that is found the engine has the exact weight; faiss returns squared "
        "distances from float32 products."
    )
    record("cpu", "neighbours", rows, title=title, note=note)
    return rows


def pruning(quick: bool = False, report: Report = print) -> list[dict[str, Any]]:
    """Pruned against dense at all noise levels, for queries of both kinds."""
    name, y = images("fashion", 12_000 if quick else 60_000)
    (dense, _), (pruned, preparing) = scored(y, dense=True), scored(y)
    rows = []
    for kind in (near, midway):
        for sigma in (0.1, 1.0) if quick else (0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 3.0):
            report(f"pruning, sigma = {sigma:g}")
            x = kind(y, 256, sigma)
            truth = reference(y, x, sigma)
            both, repeats = (dense, pruned), 2 if quick else 3
            a, b = medians([lambda s=s, x=x, t=sigma: s(x, t) for s in both], repeats)
            c, d = medians([lambda s=s, x=x, t=sigma: s.with_covariance(x, t)[1].trace() for s in both], repeats)
            errors = [error(score.posterior(x, sigma).mean, truth, score.data.spread) for score in (dense, pruned)]
            row = {"queries": kind.__name__, "sigma": sigma, "dense (s)": a, "pruned (s)": b, "dense/pruned": a / b}
            row |= {"covariance, dense (s)": c, "covariance, pruned (s)": d, "covariance, dense/pruned": c / d}
            rows.append(row | {"dense error": errors[0], "pruned error": errors[1]})
    assert pruned.engine.pruned is not None
    reach = pruned.engine.pruned.reach
    title = f"Pruned against dense: {name}, {len(y):,} × {y.shape[1]:,}, 256 queries"
    note = (
        f"Prepared in {preparing:.1f} s; tried up to sigma = {reach[False]:.2g} for means and {reach[True]:.2g} for "
        "covariances. Near: a training point plus noise; midway: between two. Covariances are traces."
    )
    record("cpu", "pruning", rows, title=title, note=note)
    return rows


def size(quick: bool = False, report: Report = print) -> list[dict[str, Any]]:
    """Worst errors at CIFAR's full size over all sigma; random fields."""
    n = 5_000 if quick else 50_000
    y = fields(n, 3, 32).flatten(1)
    score, rows = scored(y, dense=True)[0], []
    for sigma in (0.1, 10.0) if quick else (0.02, 0.1, 0.3, 1.0, 3.0, 10.0):
        report(f"size, sigma = {sigma:g}")
        x = queries(y, 64, sigma)
        truth, posterior = reference(y, x, sigma), score.posterior(x, sigma)
        rows.append(
            {
                "sigma": sigma,
                "effective points": float(posterior.ess.median()),
                "engine error": error(posterior.mean, truth, score.data.spread),
                "plain error": error(plain(y, x, sigma), truth, score.data.spread),
            }
        )
    title = f"Accuracy at CIFAR's size: random fields, {n:,} × 3,072, 64 queries"
    record("cpu", "size", rows, title=title, note="Worst query against float64.")
    return rows
