"""The engine on a GPU: speed and accuracy together, against plain products and against the time to read the data.

``python -m benchmarks.gpu [--only cifar|imagenet] [--profile]``. Data are random fields with an image-like spectrum, in
8 bits and (CIFAR's size) in float32, made on the card. Half of the queries are a training point plus noise, half lie
midway between two; the error is that of the worst query, |m - m_ref| / rms|y - ȳ|, against float64. Times are medians
of whole calls of the public ``score(x, sigma)``, checks and conversions included; those inside, of the engine alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import vkernel as vk
from vkernel.posterior.cuda import Fast

SIGMAS = (0.02, 0.05, 0.1, 0.3, 1.0, 2.0, 2.5, 3.0, 5.0, 10.0)
CUDA = torch.device("cuda")


def fields(n: int, side: int, seed: int = 0) -> Tensor:
    """``(n, 3, side, side)`` uint8: Gaussian fields with amplitude 1/(1+k), about as smooth as photographs."""
    g = torch.Generator(CUDA).manual_seed(seed)
    k = torch.fft.fftfreq(side, device=CUDA).mul(side).square()
    amplitude = 1 / (1 + (k[:, None] + k[: side // 2 + 1]).sqrt())
    out = torch.empty((n, 3, side, side), dtype=torch.uint8, device=CUDA)
    for block in out.split(8192):
        spectrum = torch.fft.rfft2(torch.randn(block.shape, generator=g, device=CUDA)) * amplitude
        image = torch.fft.irfft2(spectrum, s=(side, side))
        block.copy_((image / (2.5 * image.std())).clamp_(-1, 1).add_(1).mul_(127.5).round_())
    return out


def queries(data: vk.Empirical, count: int, sigma: float, seed: int = 1) -> Tensor:
    """Even rows midway between two training points, odd rows a training point plus noise."""
    g = torch.Generator(CUDA).manual_seed(seed)
    i, j = torch.randint(0, data.n, (2, count), generator=g, device=CUDA)
    a, b = data.take(i), data.take(j)
    x = a + sigma * torch.randn(a.shape, generator=g, device=CUDA)
    x[::2] = ((a + b) / 2)[::2]
    return x.reshape(count, *data.shape)


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


def plain(y: Tensor, half: Tensor, x: Tensor, sigma: float) -> Tensor:
    """What one writes first: two float32 products and a softmax."""
    return torch.softmax((x @ y.T - half) / sigma**2, 1) @ y


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


def rung(fast: Fast, q: vk.posterior.Queries) -> tuple[int, int]:
    """The longest list, and how many queries have one."""
    seen = fast.screen(q, False)
    short = seen.count <= seen.index.shape[1]
    return int(torch.where(short, seen.count, 0).max()), int(short.sum())


def errors(got: Tensor, truth: Tensor, ess: Tensor, data: vk.Empirical) -> str:
    """Of the worst query, and of the worst for which fewer than 50 points matter."""
    error = (got.flatten(1).double() - truth).norm(dim=1) / data.spread
    few = f"{float(error[ess < 50].max()):8.0e}" if bool((ess < 50).any()) else "       –"
    return f"{float(error.max()):8.0e} {few}"


def table(
    title: str, data: vk.Empirical, batch: int, sigmas: tuple[float, ...], floor: float | None
) -> vk.EmpiricalScore:
    """One row for each noise level."""
    start = time.perf_counter()
    score = vk.EmpiricalScore(data, vk.EDM())
    torch.cuda.synchronize()
    fast = score._engine.fast
    assert fast is not None
    print(
        f"\n{title}: {data!r}, B = {batch}; prepared in {time.perf_counter() - start:.1f} s, {fast.nbytes / 1e9:.1f} GB"
    )
    y = None if floor else data.rows(0, data.n)
    half = None if y is None else y.square().sum(1) / 2
    print("  sigma  points  lists longest  inside  call ms    error   (few) | ", end="")
    print("floors" if floor else "plain ms    error   (few)   ratio")
    for sigma in sigmas:
        x = queries(data, batch, sigma)
        truth, ess = reference(data, x, sigma)
        q = score._queries(x, torch.tensor(sigma, device=CUDA))
        longest, lists = rung(fast, q)
        inside = milliseconds(lambda q=q: score._engine.moments(q))
        t = milliseconds(lambda x=x, s=sigma: score(x, s))
        wrong = errors(score.denoise(x.double(), sigma), truth, ess, data)
        line = f"{sigma:7g} {float(ess.median()):7.0f} {lists:6d} {longest:7d} {inside:7.2f} {t:8.2f} {wrong} | "
        if y is None or half is None:
            line += f"{t / (floor or 1):.2f}"
        else:
            flat = x.flatten(1)
            t_plain = milliseconds(lambda x=flat, s=sigma: plain(y, half, x, s), 5)
            line += f"{t_plain:8.2f} {errors(plain(y, half, flat, sigma), truth, ess, data)} {t_plain / t:7.1f}"
        print(line, flush=True)
    return score


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
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["cifar", "imagenet"])
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    rate = ceilings()
    if options.only != "imagenet":
        images = fields(50_000, 32)
        small = vk.Empirical(images, scale=(-1.0, 1.0), name="fields")
        wide = vk.Empirical((images.float() + torch.rand(images.shape, device=CUDA)) / 128 - 1, name="fields")
        scores = [table("CIFAR's size", data, 1024, SIGMAS, None) for data in (small, wide)]
        for score in scores if options.profile else ():  # last: a profiler leaves the process slower than it was
            for sigma in (0.1, 10.0):
                profile(score, queries(score.data, 1024, sigma), sigma)
        del small, wide, images, scores
        torch.cuda.empty_cache()
    if options.only != "cifar":
        start = time.perf_counter()
        large = vk.Empirical(fields(1_281_167, 64), scale=(-1.0, 1.0), name="fields")
        torch.cuda.synchronize()
        bytes_floor = 4 * 2 * large.n * large.d / rate * 1e3
        print(f"\nmade in {time.perf_counter() - start:.0f} s; two passes over two halves: {bytes_floor:.1f} ms")
        torch.cuda.empty_cache()
        score = table("ImageNet-64's size", large, 64, (0.1, 0.5, 1.0, 3.0, 10.0, 40.0), bytes_floor)
        process = score.process
        x = process.prior((64, *large.shape), device=CUDA, generator=0)
        lasted = milliseconds(lambda: vk.sample.pf_ode(score, process, x, steps=50), 3)
        print(f"64 samples, 50 Euler steps: {lasted / 1e3:.2f} s")
        if options.profile:
            for sigma in (0.5, 10.0):
                profile(score, queries(large, 64, sigma), sigma)


if __name__ == "__main__":
    main()
