"""What all benchmarks share: data, queries, the truth in float64, the alternatives, and clocks.

Half of the queries are a training point plus noise, half lie midway between two. The error of a posterior mean is that
of the worst query, |m - m_ref| / rms|y - ȳ|, against float64. Real images are used where they are at hand
(Fashion-MNIST where Debian's dataset-fashion-mnist is installed), else random fields of the same size with an
image-like spectrum.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

import vkernel as vk

__all__ = [
    "empirical",
    "error",
    "fields",
    "images",
    "keops",
    "medians",
    "once",
    "plain",
    "queries",
    "reference",
    "spread_out",
    "typical",
]

Result = TypeVar("Result")
FASHION = Path("/usr/share/datasets/fashion-mnist/train-images-idx3-ubyte.gz")
WINDOW = 16.0  # points more than log n + WINDOW below the heaviest hold less than exp(-WINDOW) of the weight
FEW = 128  # of n points, so many that 1/FEW of them is still few


def fields(
    n: int, channels: int, side: int, seed: int = 0, device: torch.device | str = "cpu", power: float = 1.0
) -> Tensor:
    """Random images ``(n, channels, side, side)``: Gaussian fields with amplitude (1+k)^-power, clipped to [-1, 1].

    With power 1 they are about as smooth as photographs. On a GPU they are in 8 bits: a million of them must fit.
    """
    device = torch.device(device)
    small = device.type == "cuda"
    g = torch.Generator(device).manual_seed(seed)
    k = torch.fft.fftfreq(side, device=device).mul(side).square()
    amplitude = (1 + (k[:, None] + k[: side // 2 + 1]).sqrt()) ** -power
    out = torch.empty(n, channels, side, side, dtype=torch.uint8 if small else torch.float32, device=device)
    for block in out.split(4096):
        spectrum = torch.fft.rfft2(torch.randn(block.shape, generator=g, device=device)) * amplitude
        image = torch.fft.irfft2(spectrum, s=(side, side))
        image = (image / (2.5 * image.std())).clamp_(-1, 1)
        block.copy_(image.add_(1).mul_(127.5).round_() if small else image)
    return out


def empirical(n: int, channels: int, side: int, device: torch.device | str = "cpu") -> vk.Empirical:
    """Random fields as a training set."""
    points = fields(n, channels, side, device=device)
    return vk.Empirical(points, scale=(-1.0, 1.0) if points.dtype == torch.uint8 else None, name="random fields")


def images(which: str = "fashion", n: int = 60_000) -> tuple[str, Tensor]:
    """The real images, if there are, else fields; ``(n, d)``. ``which`` is "fashion" or "cifar"."""
    if which == "fashion" and FASHION.exists():
        data = vk.load(FASHION)
        return "Fashion-MNIST", data.rows(0, min(n, data.n))
    return "random fields", (fields(n, 1, 28) if which == "fashion" else fields(min(n, 4000), 3, 32)).flatten(1)


def queries(y: Tensor, count: int, sigma: float, seed: int = 1) -> Tensor:
    """Even rows midway between two training points, odd rows a training point plus noise."""
    return typical(vk.Empirical(y), count, sigma, seed)


def typical(data: vk.Empirical, count: int, sigma: float, seed: int = 1) -> Tensor:
    """The same for a training set of any kind and on any device, ``(count, *shape)``."""
    g = torch.Generator().manual_seed(seed)
    i, j = torch.randint(0, data.n, (2, count), generator=g)
    a, b = data.take(i.to(data.device)), data.take(j.to(data.device))
    x = a + sigma * torch.randn(a.shape, generator=g).to(a.device)
    x[::2] = ((a + b) / 2)[::2]
    return x.reshape(count, *data.shape)


def reference(y: Tensor, x: Tensor, sigma: float) -> Tensor:
    """The posterior mean in float64, centred, streamed over the data."""
    center = y.double().mean(0) if y.numel() < 10**8 else y.mean(0).double()
    xc, top = x.double() - center, None
    total = mean = torch.zeros(())
    for block in y.split(8192):
        yc = block.double() - center
        logit = (xc @ yc.T - yc.square().sum(1) / 2) / sigma**2
        peak = logit.amax(1, keepdim=True)
        new = peak if top is None else torch.maximum(top, peak)
        keep = torch.zeros_like(new) if top is None else (top - new).exp()
        e = (logit - new).exp()
        total, mean, top = total * keep + e.sum(1, keepdim=True), mean * keep + e @ yc, new
    return mean / total + center


def error(mean: Tensor, truth: Tensor, spread: float) -> float:
    """Of the worst query, in units of the data's spread."""
    return float((mean.flatten(1).double() - truth).norm(dim=1).max() / spread)


def plain(y: Tensor, x: Tensor, sigma: float, half: Tensor | None = None) -> Tensor:
    """What one writes first: two float32 products and a softmax. ``half`` is |y|²/2, if that was computed before."""
    half = y.square().sum(1) / 2 if half is None else half
    return torch.softmax((x @ y.T - half) / sigma**2, 1) @ y


def keops(y: Tensor, x: Tensor, sigma: float) -> Tensor:
    """KeOps: a symbolic matrix of squared differences, reduced by a softmax."""
    from pykeops.torch import LazyTensor

    x_i, y_j = LazyTensor(x[:, None, :].contiguous()), LazyTensor(y[None, :, :].contiguous())
    distance = ((x_i - y_j) ** 2).sum(-1)
    return (-distance / (2 * sigma**2)).sumsoftmaxweight(y_j, axis=1)


def spread_out(data: vk.Empirical, x: Tensor, sigma: float) -> float:
    """The share of queries whose weight is on more than few points: the others need no second product."""
    flat = (x.flatten(1).double() - data.center).float()
    logits = []
    for start in range(0, data.n, 8192):
        y = (data.rows(start, min(start + 8192, data.n)).double() - data.center).float()
        logits.append((flat @ y.mT - y.square().sum(1) / 2) / sigma**2)
    logit = torch.cat(logits, 1)
    matter = logit > logit.amax(1, keepdim=True) - (math.log(data.n) + WINDOW)
    return float((matter.sum(1) > data.n / FEW).double().mean())


def medians(runs: Sequence[Callable[[], object]], repeats: int, device: torch.device | str = "cpu") -> list[float]:
    """Median seconds of each, by turns, after one turn to warm up; a GPU's queue is waited for."""
    times: list[list[float]] = [[] for _ in runs]
    for repeat in range(repeats + 1):
        for run, seconds in zip(runs, times, strict=True):
            taken, _ = once(run, device)
            if repeat:
                seconds.append(taken)
    return [statistics.median(seconds) for seconds in times]


def once(run: Callable[[], Result], device: torch.device | str = "cpu") -> tuple[float, Result]:
    """Seconds of one run, and what it returned."""
    wait = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    result = run()
    wait()
    return time.perf_counter() - start, result
