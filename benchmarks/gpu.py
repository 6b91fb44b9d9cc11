"""The engine on a GPU: speed and accuracy together, against plain products and against the time to read the data.

``python -m benchmarks.gpu [--only cifar|imagenet] [--profile]``. Data are random fields with an image-like spectrum, in
8 bits and (CIFAR's size) in float32, made on the card. Half of the queries are a training point plus noise, half lie
midway between two; the error is that of the worst query, |m - m_ref| / rms|y - ȳ|, against float64, and of the worst
for which fewer than 50 points count. Times are medians of whole calls of the public ``score(x, sigma)``, checks and
conversions included. Stages are those of ``vkernel.posterior.gpu``: sparse / light / middle / full / reference.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import vkernel as vk
from benchmarks.common import fields, plain, typical
from benchmarks.results import Row, record
from vkernel.posterior.gpu import GPUPath

SIGMAS = (0.02, 0.1, 0.3, 1.0, 2.0, 2.5, 3.0, 5.0, 10.0, 20.0, 40.0)
LARGE = (0.1, 0.5, 1.0, 3.0, 10.0, 40.0)
CUDA = torch.device("cuda")


def reference(data: vk.Empirical, x: Tensor, sigma: float) -> tuple[Tensor, Tensor]:
    """The posterior mean in float64, streamed over the data, and the effective number of points."""
    xc = x.flatten(1).double() - data.center
    top = torch.full((len(x), 1), -torch.inf, dtype=torch.float64, device=CUDA)
    total, square, mean = torch.zeros_like(top), torch.zeros_like(top), torch.zeros_like(xc)
    for start in range(0, data.n, 16384):
        yc = data.rows(start, min(start + 16384, data.n)).double() - data.center
        logit = (xc @ yc.T - yc.square().sum(1) / 2) / sigma**2
        new = torch.maximum(top, logit.amax(1, keepdim=True))
        keep, e = (top - new).exp(), (logit - new).exp()
        total, square = total * keep + e.sum(1, keepdim=True), square * keep**2 + e.square().sum(1, keepdim=True)
        mean, top = mean * keep + e @ yc, new
    return mean / total + data.center, (total.square() / square).squeeze(1)


def milliseconds(run: Callable[[], object], repeats: int = 15) -> float:
    """The median time of a call after three to warm up."""
    times = []
    for k in range(repeats + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        if k >= 3:
            times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def stages(path: GPUPath, q: vk.posterior.Queries) -> tuple[int, str]:
    """The most candidates of a query, and how many queries take which stage, from sparse to the reference path."""
    sparse = path.sparse(q)
    count, others = sparse.seen.stage.count, sparse.numbers.tolist()[1:5]
    held = torch.where(count <= sparse.seen.index.shape[1], count, 0)
    return int(held.max()), "/".join(map(str, (len(q) - sum(others), *others)))


def errors(got: Tensor, truth: Tensor, ess: Tensor, data: vk.Empirical) -> tuple[float, float | None]:
    """Of the worst query, and of the worst for which fewer than 50 points count."""
    error = (got.flatten(1).double() - truth).norm(dim=1) / data.spread
    return float(error.max()), float(error[ess < 50].max()) if bool((ess < 50).any()) else None


def line(row: Row) -> str:
    """A row as text."""
    cells = (f"{v:.3g}" if isinstance(v, float) else "–" if v is None else str(v) for v in row.values())
    return "  ".join(f"{cell:>10}" for cell in cells)


def table(
    title: str, data: vk.Empirical, batch: int, sigmas: tuple[float, ...], floor: float | None
) -> tuple[vk.EmpiricalScore, list[Row], str]:
    """One row for each noise level; ``floor`` is the time to read the data, where plain products do not fit."""
    start = time.perf_counter()
    score = vk.EmpiricalScore(data, vk.EDM())
    torch.cuda.synchronize()
    path = score.engine.gpu
    assert path is not None
    note = f"Ready in {time.perf_counter() - start:.1f} s; fp16 takes {path.fp16.nbytes / 1e9:.1f} GB."
    print(f"\n{title}: {data!r}, B = {batch}. {note}")
    for (small, k), loss in path.losses.items():
        print(f"  {'small' if small else 'large'} batches, {('light', 'middle', 'full')[k]}: {loss}")
    y = None if floor else data.rows(0, data.n)
    half = None if y is None else y.square().sum(1) / 2
    rows: list[Row] = []
    for sigma in sigmas:
        x = typical(data, batch, sigma)
        truth, ess = reference(data, x, sigma)
        most, taken = stages(path, score.queries(x, torch.tensor(sigma)))
        t = milliseconds(lambda x=x, s=sigma: score(x, s))
        worst, few = errors(score.denoise(x.double(), sigma), truth, ess, data)
        row: dict[str, float | int | str | bool | None] = {
            "sigma": sigma,
            "points that count": round(float(ess.median()), 1),
            "stages": taken,
            "most candidates": most,
        }
        row |= {"engine (ms)": t, "error": worst, "error, few points": few}
        if y is None or half is None:
            row |= {"times the floor": t / (floor or 1)}
        else:
            flat = x.flatten(1)
            t_plain = milliseconds(lambda x=flat, s=sigma: plain(y, x, s, half), 5)
            row |= {"plain (ms)": t_plain, "plain error": errors(plain(y, flat, sigma, half), truth, ess, data)[0]}
            row |= {"ratio": t_plain / t}
        if not rows:
            print("  ".join(f"{name:>10}" for name in row))
        print(line(row), flush=True)
        rows.append(row)
    return score, rows, note


def ceilings() -> float:
    """Bytes a second that are read, half-precision operations a second, and how truly tensor cores add."""
    a = torch.randn(1 << 30, device=CUDA)
    rate = a.nbytes / milliseconds(a.sum, 5) * 1e3
    del a
    h = torch.randn(8192, 8192, device=CUDA).half()
    flops = 2 * 8192**3 / milliseconds(lambda: torch.mm(h, h.mT, out_dtype=torch.float32), 5) * 1e3
    print(f"{torch.cuda.get_device_name()}: reads {rate / 1e12:.2f} TB/s, float16 products {flops / 1e12:.0f} TFLOP/s")
    for k in (3072, 8192, 12288):
        for name, x, y in (
            ("both signs", torch.randn(512, k, device=CUDA).half(), torch.randn(512, k, device=CUDA).half()),
            ("one sign", torch.rand(512, k, device=CUDA).half(), torch.rand(512, k, device=CUDA).half()),
        ):
            gap = torch.mm(x, y.mT, out_dtype=torch.float32).double() - x.double() @ y.double().mT
            gap /= x.double().norm(dim=1)[:, None] * y.double().norm(dim=1)
            numbers = gap.mean(), gap.square().mean().sqrt(), gap.abs().max()
            print(f"  sums of {k}, {name}: error/|x||y| mean, rms, max", *(f"{float(v):.1e}" for v in numbers))
    return rate


def profile(score: vk.EmpiricalScore, x: Tensor, sigma: float) -> None:
    """Where the time of one call goes."""
    from torch.profiler import ProfilerActivity, profile as record

    for _ in range(3):
        score(x, sigma)
    torch.cuda.synchronize()
    with record(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        score(x, sigma)
        torch.cuda.synchronize()
    events = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    if not events:
        return
    began, total = events[0].time_range.start, sum(e.time_range.elapsed_us() for e in events)
    lasted = events[-1].time_range.end - began
    print(f"sigma = {sigma:g}: {len(events)} kernels, {total:.0f} us busy, {lasted:.0f} us from first to last")
    for e in events:
        if e.time_range.elapsed_us() > 12:
            print(f"   at {e.time_range.start - began:7.0f} us for {e.time_range.elapsed_us():7.0f}  {e.name[:90]}")


def cifar(quick: bool, profiled: bool = False) -> None:
    """50,000 images of 3 × 32 × 32, 1,024 queries."""
    images = fields(50_000, 3, 32, device=CUDA)
    small = vk.Empirical(images, scale=(-1.0, 1.0), name="fields")
    wide = vk.Empirical((images.float() + torch.rand(images.shape, device=CUDA)) / 128 - 1, name="fields")
    scores = []
    for name, data in (("8 bits", small), ("float32", wide)):
        title = f"CIFAR's size in {name}: 50,000 × 3,072, 1,024 queries"
        score, rows, note = table(title, data, 1024, SIGMAS[1::4] if quick else SIGMAS, None)
        record("gpu", f"cifar-{name.replace(' ', '')}", rows, title=title, note=note)
        scores.append(score)
    for score in scores if profiled else ():  # last: a profiler leaves the process slower than it was
        for sigma in (0.1, 10.0):
            profile(score, typical(score.data, 1024, sigma), sigma)


def imagenet(rate: float, quick: bool, profiled: bool = False) -> None:
    """1,281,167 images of 3 × 64 × 64, 64 queries; and 64 samples by 50 Euler steps."""
    start = time.perf_counter()
    large = vk.Empirical(fields(1_281_167, 3, 64, device=CUDA), scale=(-1.0, 1.0), name="fields")
    torch.cuda.synchronize()
    floor = 4 * 2 * large.n * large.d / rate * 1e3
    print(f"\nmade in {time.perf_counter() - start:.0f} s; two passes over two fp16 copies: {floor:.1f} ms")
    torch.cuda.empty_cache()
    title = "ImageNet-64's size in 8 bits: 1,281,167 × 12,288, 64 queries"
    score, rows, note = table(title, large, 64, LARGE[1::3] if quick else LARGE, floor)
    note += f" The floor is the time to read two fp16 copies twice, {floor:.1f} ms at the rate that was measured."
    record("gpu", "imagenet", rows, title=title, note=note)
    x = score.process.prior((64, *large.shape), device=CUDA, generator=0)
    lasted = milliseconds(lambda: vk.sample.pf_ode(score, x, method="euler", spacing="uniform", steps=50), 3) / 1e3
    print(f"64 samples, 50 Euler steps: {lasted:.2f} s")
    title = "Exact samples by the probability flow, ImageNet-64's size"
    record("gpu", "samples", [{"samples": 64, "Euler steps": 50, "time (s)": lasted, "goal (s)": 2.0}], title=title)
    for sigma in (0.5, 10.0) if profiled else ():
        profile(score, typical(large, 64, sigma), sigma)


def run(quick: bool = False, only: str | None = None, profiled: bool = False) -> None:
    """Measure and record; ``quick``: CIFAR's size alone, at fewer noise levels."""
    rate = ceilings()
    if only != "imagenet":
        cifar(quick, profiled)
        torch.cuda.empty_cache()
    if only != "cifar" and not (quick and only is None):
        imagenet(rate, quick, profiled)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["cifar", "imagenet"])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    run(options.quick, options.only, options.profile)


if __name__ == "__main__":
    main()
