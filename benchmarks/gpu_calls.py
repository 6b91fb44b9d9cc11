"""Small batches, sampling, and covariances of a training set of CIFAR's size on a GPU, beside plain float32 products.

``python -m benchmarks.gpu_calls [--quick] [--only small|sampling|covariance] [--profile]``. Data and queries are those
of :mod:`benchmarks.gpu`. Small batches: medians of whole calls of ``score(x, sigma)`` for 1 to 64 queries. Sampling: 64
images, 50 steps, by ``pf_ode``. Covariances: ``score.covariance(x, sigma).trace()`` and ``C @ v`` for 1,024 queries, a
new posterior each time, against what one writes first, a softmax of float32 products with
:math:`\\sum r |y|^2 - |m|^2` and :math:`\\sum r (p - \\bar p)\\, y`, p = y·v. Errors are those of the worst query, of a
trace relative to it, of a product relative to |Cov| |v|, bounded by the trace; against float64.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import vkernel as vk
from benchmarks.common import fields, plain, typical
from benchmarks.gpu import CUDA, line, milliseconds, profile
from benchmarks.results import Row, record

SIGMAS = (0.1, 1.0, 2.5, 3.0, 5.0, 10.0, 20.0, 40.0)
SIZES = (1, 4, 16, 64)
QUERIES = 1024


def training_sets(n: int = 50_000) -> dict[str, vk.Empirical]:
    """Return random fields of CIFAR's size in 8 bits and in float32."""
    images = fields(n, 3, 32, device=CUDA)
    wide = (images.float() + torch.rand(images.shape, device=CUDA)) / 128 - 1
    return {
        "8 bits": vk.Empirical(images, scale=(-1.0, 1.0), name="fields"),
        "float32": vk.Empirical(wide, name="fields"),
    }


def small(kind: str, score: vk.EmpiricalScore) -> None:
    """Record medians of whole calls for few queries, and of plain products."""
    data, rows = score.data, list[Row]()
    y = data.rows(0, data.n)
    half = y.square().sum(1) / 2
    for sigma in (0.1, 3.0, 10.0, 40.0):
        row: dict[str, float | int | str | bool | None] = {"sigma": sigma}
        for size in SIZES:
            x = typical(data, size, sigma)
            flat = x.flatten(1)
            row[f"B = {size} (ms)"] = milliseconds(lambda x=x, s=sigma: score(x, s), 40)
            row[f"plain, B = {size} (ms)"] = milliseconds(lambda x=flat, s=sigma: plain(y, x, s, half), 10)
        rows.append(row)
        print(line(row), flush=True)
    record("gpu", f"small-{kind.replace(' ', '')}", rows, title=f"Batches of 1 to 64, CIFAR's size in {kind}")


def sampling(kind: str, score: vk.EmpiricalScore) -> None:
    """Record the time to sample 64 images in 50 steps."""
    rows = list[Row]()
    for method, spacing in (("exponential", "log"), ("exponential", "edm"), ("euler", "edm")):
        x = score.process.prior((64, *score.shape), device=CUDA, generator=0)
        lasted = milliseconds(
            lambda x=x, m=method, s=spacing: vk.sample.pf_ode(score, x, method=m, spacing=s, steps=50), 9
        )
        rows.append({"method": method, "spacing": spacing, "time (ms)": lasted, "goal (ms)": 25.0})
        print(line(rows[-1]), flush=True)
    title = f"64 samples in 50 steps, CIFAR's size in {kind}"
    record("gpu", f"sampling-{kind.replace(' ', '')}", rows, title=title)


def truth(data: vk.Empirical, x: Tensor, v: Tensor, sigma: float) -> tuple[Tensor, Tensor]:
    """Return tr Cov(x0|x) and Cov(x0|x) v in float64, centred, for a few queries at a time."""
    traces, products = [], []
    y = data.rows(0, data.n)
    for a, b in zip(x.flatten(1).split(64), v.flatten(1).split(64), strict=True):
        logits = torch.cat([-(a.double()[:, None] - part.double()).square().sum(2) / 2 for part in y.split(256)], 1)
        r = (logits / sigma**2).softmax(1)
        heaviest = y[r.argmax(1)].double()
        shift = torch.zeros_like(heaviest)
        for k in range(0, data.n, 8192):  # the mean, about the heaviest point
            shift += r[:, k : k + 8192] @ y[k : k + 8192].double() - r[:, k : k + 8192].sum(1)[:, None] * heaviest
        mean, trace, product = heaviest + shift, a.new_zeros(len(a), dtype=torch.float64), torch.zeros_like(heaviest)
        for q in range(len(a)):
            some = r[q].nonzero()[:, 0]
            for part in some.split(16384):
                gap = y[part].double() - mean[q]
                trace[q] += r[q, part] @ gap.square().sum(1)
                product[q] += (r[q, part] * (gap @ b[q].double())) @ gap
        traces.append(trace)
        products.append(product)
    return torch.cat(traces), torch.cat(products)


def covariance(kind: str, score: vk.EmpiricalScore, sigmas: tuple[float, ...], queries: int = QUERIES) -> None:
    """Record times and errors of traces and products."""
    data, rows = score.data, list[Row]()
    y = data.rows(0, data.n)
    half = y.square().sum(1) / 2
    for sigma in sigmas:
        x = typical(data, queries, sigma)
        v = torch.randn(x.shape, generator=torch.Generator(CUDA).manual_seed(2), device=CUDA)
        flat, along = x.flatten(1), v.flatten(1)

        def weights(flat: Tensor = flat, s: float = sigma) -> Tensor:
            return torch.softmax((flat @ y.T - half) / s**2, 1)

        def plain_trace() -> Tensor:
            r = weights()
            return r @ (2 * half) - (r @ y).square().sum(1)

        def plain_product(along: Tensor = along) -> Tensor:
            r, p = weights(), along @ y.T
            return (r * (p - (r * p).sum(1, keepdim=True))) @ y

        def trace(x: Tensor = x, s: float = sigma) -> Tensor:
            return score.posterior(x, s).cov.trace()

        def product(x: Tensor = x, v: Tensor = v, s: float = sigma) -> Tensor:
            return score.posterior(x, s).cov @ v

        row: dict[str, float | int | str | bool | None] = {"sigma": sigma}
        for name, ours, theirs in (("trace", trace, plain_trace), ("product", product, plain_product)):
            row[f"{name} (ms)"], row[f"{name}, plain (ms)"] = milliseconds(ours, 9), milliseconds(theirs, 5)
            row[f"{name}, ratio"] = row[f"{name}, plain (ms)"] / row[f"{name} (ms)"]  # type: ignore[operator]
        some = torch.arange(queries, device=CUDA)[:: max(1, queries // 32)]
        exact, vector = truth(data, x[some], v[some], sigma)
        size = exact * along[some].double().norm(dim=1)
        got = score.posterior(x.double(), sigma).cov
        row["trace error"] = float(((got.trace()[some] - exact) / exact).abs().max())
        row["product error"] = float((((got @ v.double()).flatten(1)[some] - vector).norm(dim=1) / size).max())
        row["plain trace error"] = float(((plain_trace()[some] - exact) / exact).abs().max())
        if not rows:
            print("  ".join(f"{name:>10}" for name in row))
        print(line(row), flush=True)
        rows.append(row)
    title = f"Traces and products of covariances, CIFAR's size in {kind}, {queries:,} queries"
    record("gpu", f"covariance-{kind.replace(' ', '')}", rows, title=title)


def run(quick: bool = False, only: str | None = None, profiled: bool = False) -> None:
    """Measure and record."""
    for kind, data in training_sets(8_000 if quick else 50_000).items():
        score = vk.EmpiricalScore(data, vk.EDM())
        print(f"\nCIFAR's size in {kind}")
        if only in (None, "small"):
            small(kind, score)
        if only in (None, "sampling"):
            sampling(kind, score)
        if only in (None, "covariance"):
            covariance(kind, score, SIGMAS[::3] if quick else SIGMAS)
        for sigma in (0.1, 10.0) if profiled else ():
            profile(score, typical(data, 64, sigma), sigma)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["small", "sampling", "covariance"])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    run(options.quick, options.only, options.profile)


if __name__ == "__main__":
    main()
