"""Engine against plain float32 PyTorch and against KeOps, in one run, as ratios, with accuracy beside speed.

``python -m benchmarks [--repeats 5] [--no-keops] [--no-large] [--device cpu|cuda]``. Half of the queries are near a
training point, half are midway between two; the error is that of the worst query, |m - m_ref| / rms|y - ȳ|, against
float64. Real images are used where they are at hand (Fashion-MNIST where Debian's dataset-fashion-mnist is installed,
CIFAR-10 sheets under $VKERNEL_DATA), else random fields of the same size with an image-like spectrum.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import vkernel as vk

FASHION = Path("/usr/share/datasets/fashion-mnist/train-images-idx3-ubyte.gz")


def fields(n: int, channels: int, side: int, seed: int = 0) -> Tensor:
    """Random images: Gaussian fields with amplitude 1/(1+k), about as smooth as photographs, clipped to [-1, 1]."""
    g = torch.Generator().manual_seed(seed)
    k = torch.fft.fftfreq(side).mul(side).square()
    amplitude = 1 / (1 + (k[:, None] + k[: side // 2 + 1]).sqrt())
    out = torch.empty(n, channels, side, side)
    for block in out.split(4096):
        spectrum = torch.fft.rfft2(torch.randn(block.shape, generator=g)) * amplitude
        image = torch.fft.irfft2(spectrum, s=(side, side))
        block.copy_((image / (2.5 * image.std())).clamp_(-1, 1))
    return out.flatten(1)


def images(which: str) -> tuple[str, Tensor]:
    """The data of one table, ``(n, d)``."""
    if which == "fashion":
        if FASHION.exists():
            data = vk.load(FASHION)
            return "Fashion-MNIST", data.rows(0, data.n)
        return "random fields", fields(60_000, 1, 28)
    folder = Path(os.environ.get("VKERNEL_DATA", "")) / "cifar10"
    if os.environ.get("VKERNEL_DATA") and folder.is_dir():
        data = vk.load(folder)
        return "CIFAR-10 sheets", data.rows(0, data.n)
    return "random fields", fields(4_000, 3, 32)


def queries(y: Tensor, count: int, sigma: float, seed: int = 1) -> Tensor:
    """Even rows midway between two training points, odd rows a training point plus noise."""
    g = torch.Generator().manual_seed(seed)
    i, j = torch.randint(0, len(y), (2, count), generator=g)
    noise = torch.randn(count, y.shape[1], generator=g)
    x = y[i.to(y.device)] + sigma * noise.to(y.device)
    x[::2] = (0.5 * (y[i.to(y.device)] + y[j.to(y.device)]))[::2]
    return x


def reference(y: Tensor, x: Tensor, sigma: float) -> Tensor:
    """The posterior mean in float64, centred, streamed over the data."""
    center, top = y.double().mean(0) if y.numel() < 10**8 else y.mean(0).double(), None
    xc = x.double() - center
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


def plain(y: Tensor, x: Tensor, sigma: float) -> Tensor:
    """What one writes first: two float32 products and a softmax."""
    logit = (x @ y.T - y.square().sum(1) / 2) / sigma**2
    return torch.softmax(logit, 1) @ y


def keops(y: Tensor, x: Tensor, sigma: float) -> Tensor:
    """KeOps: a symbolic matrix of squared differences, reduced by a softmax."""
    from pykeops.torch import LazyTensor

    x_i, y_j = LazyTensor(x[:, None, :].contiguous()), LazyTensor(y[None, :, :].contiguous())
    distance = ((x_i - y_j) ** 2).sum(-1)
    return (-distance / (2 * sigma**2)).sumsoftmaxweight(y_j, axis=1)


def median_time(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Median seconds of ``repeats`` runs after one to warm up."""
    times = []
    for k in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if k:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def speed(which: str, batch: int, repeats: int, with_keops: bool, device: torch.device) -> Table:
    """One table: times, ratios and worst errors for each sigma."""
    name, y = images(which)
    y = y.to(device)
    data = vk.Empirical(y)
    score = vk.EmpiricalScore(data, vk.EDM())
    table = Table(title=f"{name}, {data.n:,} × {data.d:,}, {batch} queries, median of {repeats}", title_justify="left")
    for column in ("sigma", "engine", "error", "plain", "error", "plain/engine", "KeOps", "error", "KeOps/engine"):
        table.add_column(column, justify="right")
    for sigma in (0.1, 1.0, 10.0):
        x = queries(y, batch, sigma)
        truth = reference(y, x, sigma)

        def error(m: Tensor, truth: Tensor = truth) -> str:
            return f"{float((m.double() - truth).norm(dim=1).max() / data.spread):.0e}"

        t_engine = median_time(lambda x=x, s=sigma: score(x, s), repeats, device)
        t_plain = median_time(lambda x=x, s=sigma: plain(y, x, s), repeats, device)
        row = [f"{sigma:g}", f"{t_engine:.3f} s", error(score.posterior(x, sigma).mean), f"{t_plain:.3f} s"]
        row += [error(plain(y, x, sigma)), f"{t_plain / t_engine:.2f}"]
        if with_keops:
            t_keops = median_time(lambda x=x, s=sigma: keops(y, x, s), 1, device)
            row += [f"{t_keops:.2f} s", error(keops(y, x, sigma)), f"{t_keops / t_engine:.1f}"]
        table.add_row(*row)
    return table


def accuracy(n: int, batch: int, device: torch.device) -> Table:
    """Worst errors at CIFAR's full size over all sigma; random fields."""
    y = fields(n, 3, 32).to(device)
    data = vk.Empirical(y)
    score = vk.EmpiricalScore(data, vk.EDM())
    title = f"random fields, {n:,} × 3,072, {batch} queries: worst error of the posterior mean"
    table = Table(title=title, title_justify="left")
    for column in ("sigma", "effective points", "engine", "plain float32"):
        table.add_column(column, justify="right")
    for sigma in (0.02, 0.05, 0.1, 0.3, 1.0, 3.0, 10.0):
        x = queries(y, batch, sigma)
        truth = reference(y, x, sigma)
        posterior = score.posterior(x, sigma)
        errors = [(m.double() - truth).norm(dim=1).max() / data.spread for m in (posterior.mean, plain(y, x, sigma))]
        table.add_row(f"{sigma:g}", f"{float(posterior.ess.median()):.3g}", *(f"{float(e):.0e}" for e in errors))
    return table


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-keops", action="store_true")
    parser.add_argument("--no-large", action="store_true", help="skip the accuracy table at 50,000 × 3,072")
    options = parser.parse_args()
    device = torch.device(options.device)
    console = Console(width=120)
    console.print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, device {device}")
    for which in ("fashion", "cifar"):
        console.print(speed(which, 256, options.repeats, not options.no_keops, device))
    if not options.no_large:
        console.print(accuracy(50_000, 64, device))


if __name__ == "__main__":
    main()
