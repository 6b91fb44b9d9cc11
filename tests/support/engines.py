"""The exact engine by each of its methods, and everything that a score and its posterior return.

``evaluate(method, data, process, x, t)`` returns a dictionary of results; ``brute_force`` returns the same from a
float64 table of all weights, with none of the engine's code. The method ``"sharded"`` spreads the data over two
threads, whose messages replace those of ``torch.distributed``; ``"chunks"`` is the reference path, seven points and two
queries at a time.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import torch
from draws import normal
from gpu_steps import TorchPath
from torch import Tensor

import vkernel as vk
from vkernel.core import rng
from vkernel.posterior.sharded import Ranks, Sharded

METHODS = ("dense", "chunks", "pruned", "sharded", "gpu")
DRAWS, TOP = 200, 5


def score_by(method: str, data: vk.Empirical, process: vk.Process) -> vk.EmpiricalScore:
    """Return the score, computed by one of the methods (``"sharded"`` needs :func:`in_threads`)."""
    path = method if method == "pruned" or (method == "gpu" and data.device.type == "cuda") else "dense"
    score = vk.EmpiricalScore(data, process, method=path)
    if method == "chunks":
        score.engine.points.chunk, score.engine.dense.block = max(7, data.n // 20), 2
    if method == "gpu" and path == "dense":
        score.engine.gpu = TorchPath(score.engine.dense)
    if method == "pruned":
        score.engine.pruned.reach = {False: math.inf, True: math.inf}  # try every query
    return score


class ThreadRanks(Ranks):
    """Ranks that are threads of one process: messages go through a list and a barrier."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, messages: list[Any]) -> None:
        self.rank, self.size, self.sharing, self.device = rank, size, 1, torch.device("cpu")
        self.barrier, self.messages = barrier, messages

    def gather_objects(self, thing: Any) -> list[Any]:
        self.messages[self.rank] = thing
        self.barrier.wait(60)
        everything = list(self.messages)
        self.barrier.wait(60)
        return everything

    def gather(self, a: Tensor) -> list[Tensor]:
        return self.gather_objects(a.detach().clone())

    def common(self, a: Tensor) -> Tensor:
        return self.gather(a)[0]

    def sum(self, a: Tensor) -> Tensor:
        return torch.stack(self.gather(a)).sum(0)


def in_threads(data: vk.Empirical, process: vk.Process, x: Tensor, t: Tensor | float) -> dict[str, Tensor]:
    """Return the results of a set that is spread over two threads, which must be equal bit for bit."""
    size, results, errors = 2, {}, []
    barrier, messages = threading.Barrier(size), [None] * size

    def work(rank: int) -> None:
        try:
            first, stop = data.n * rank // size, data.n * (rank + 1) // size
            part = data.segment(first, stop, data.weights[first:stop])
            sharded = Sharded(part, ThreadRanks(rank, size, barrier, messages))
            results[rank] = results_of(vk.EmpiricalScore(sharded, process), x, t)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert all(torch.equal(a, results[1][name]) for name, a in results[0].items())
    return results[0]


def evaluate(method: str, data: vk.Empirical, process: vk.Process, x: Tensor, t: Tensor | float) -> dict[str, Tensor]:
    """Return the results of one method."""
    if method == "sharded":
        return in_threads(data, process, x, t)
    return results_of(score_by(method, data, process), x, t)


def vectors(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return two vectors for products, like x."""
    return normal(*x.shape, seed=12).to(x.device), normal(*x.shape, seed=13).to(x.device)


def results_of(score: vk.EmpiricalScore, x: Tensor, t: Tensor | float) -> dict[str, Tensor]:
    """Return everything that follows from the weights, for ``x (B, d)`` in float64."""
    p, (v, u) = score.posterior(x, t), vectors(x)
    top, index = p.top(min(TOP, score.data.n))
    out = {"mean": p.mean, "logp": p.logp, "entropy": p.entropy, "ess": p.ess, "trace": p.cov.trace()}
    out |= {"diag": p.cov.diag(), "product": p.cov @ v, "third": p.third(v, u), "draw": p.cov.draw(5)}
    out |= {"top": top, "top index": index, "indices": p.sample_indices(DRAWS, 4), "weight": p.weight(torch.tensor(0))}
    out |= {"denoise": score.denoise(x, t), "score": score(x, t), "C": score.covariance(x, t).trace()}
    return out


def brute_force(
    points: Tensor, weights: Tensor | None, x: Tensor, sigma: Tensor | float
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the same for EDM noise, and all weights ``(B, n)``, in float64 by differences."""
    y, n = points.double(), len(points)
    var = torch.as_tensor(sigma, dtype=torch.float64).square().expand(len(x))
    log_w = torch.full((n,), -math.log(n), dtype=torch.float64) if weights is None else (weights / weights.sum()).log()
    keys = rng.keys((len(x),), rng.as_generator(5))
    uniform = torch.rand((DRAWS, len(x)), generator=rng.as_generator(4), dtype=torch.float64)
    out: dict[str, list[Tensor]] = {}
    table = []
    for b, (v, u) in enumerate(zip(*vectors(x), strict=True)):
        logit = log_w - (x[b] - y).square().sum(-1) / (2 * var[b])
        r = logit.softmax(0)
        pivot = y[r.argmax()]
        mean = pivot + r @ (y - pivot)
        gap = y - mean
        z = rng.normals(keys[b], torch.arange(n))
        top, index = r.topk(min(TOP, n))
        one = {"mean": mean, "denoise": mean, "entropy": torch.special.entr(r).sum(), "ess": 1 / r.square().sum()}
        one["logp"] = logit.logsumexp(0) - 0.5 * y.shape[1] * (2 * math.pi * var[b]).log()
        one |= {"trace": r @ gap.square().sum(-1), "diag": r @ gap.square(), "product": (r * (gap @ v)) @ gap}
        one |= {"third": (r * (gap @ v) * (gap @ u)) @ gap, "draw": (r.sqrt() * z) @ gap, "weight": r[0]}
        one |= {"top": top, "top index": index, "score": (mean - x[b]) / var[b]}
        one["C"] = one["trace"] / var[b] ** 2
        one["indices"] = torch.searchsorted(r.cumsum(0), uniform[:, b], right=True).clamp_max(n - 1)
        table.append(r)
        for name, a in one.items():
            out.setdefault(name, []).append(a)
    return {name: torch.stack(a, 1 if name == "indices" else 0) for name, a in out.items()}, torch.stack(table)
