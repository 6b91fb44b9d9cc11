"""The theories of patches beside the known method, in one run, accuracy beside speed.

``python -m benchmarks.theories [--device cpu|cuda] [--quick]``, or ``python -m benchmarks --only theories``. The known
method for :class:`~vkernel.theories.EquivariantLocal` makes all k×k training patches the filters of one float32
convolution and keeps a running softmax over chunks of filters. It evaluates the places where the whole patch lies
inside the image; the theory, whose times are whole calls of ``denoise``, also evaluates those at the borders. The known
method takes a time in proportion to the number of training images; it is timed on a part of them and scaled. Errors are
those of the worst of some pixels, against all patches in float64, in units of the pixels' standard deviation.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import vkernel as vk
from benchmarks.common import FASHION, fields, once
from benchmarks.results import Row, folder, into, record
from vkernel.theories import EquivariantLocal
from vkernel.theories.equivariant import PlaceClass
from vkernel.theories.patches import Patches, Span

__all__ = ["convolution", "exact", "run", "steps"]

Report = Callable[[str], None]
SIZES, SIGMAS = (3, 7, 11, 17), (0.1, 1.0, 10.0)
FILTERS = 2048  # of a chunk of the known method
GOAL = {"cpu": "at least three times the known method", "cuda": "at most 10 s a denoise"}


def convolution(y: Tensor, x: Tensor, sigma: float, k: int) -> Tensor:
    """The known method: the denoiser at the inner places, ``(B, C, H - k + 1, W - k + 1)``; data and x in float32."""
    top = z = total = torch.zeros(())
    for images in y.split(max(1, FILTERS // ((y.shape[2] - k + 1) * (y.shape[3] - k + 1)))):
        w = images.float().unfold(2, k, 1).unfold(3, k, 1).permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
        half = w.square().sum((1, 2, 3)) / 2
        logit = (torch.nn.functional.conv2d(x, w) - half[:, None, None]) / sigma**2
        peak = logit.amax(1)
        new = torch.maximum(top, peak) if top.ndim else peak
        e = (logit - new[:, None]).exp()
        part = torch.einsum("bmhw,mc->bchw", e, w[:, :, k // 2, k // 2])
        keep = (top - new).exp() if top.ndim else torch.zeros_like(new)
        z, total, top = z * keep + e.sum(1), total * keep[:, None] + part, new
    return total / z[:, None]


def exact(y: Tensor, x: Tensor, sigma: float, k: int, row: int, column: int) -> Tensor:
    """The denoiser at one pixel of every image, ``(B, C)``, from all patches in float64, as the definition says:
    places with the same distances, clipped at k // 2, to the four borders."""
    (height, width), half = y.shape[2:], k // 2

    def along(size: int, at: int) -> tuple[slice, int, int]:
        before, after = min(at, half), min(size - 1 - at, half)
        alike = [p for p in range(size) if (min(p, half), min(size - 1 - p, half)) == (before, after)]
        return slice(alike[0] - before, alike[-1] + after + 1), before, before + 1 + after

    (rows, up, tall), (columns, left, wide) = along(height, row), along(width, column)
    query = x[:, :, row - up : row - up + tall, column - left : column - left + wide].flatten(1).double()
    top = torch.full((len(x), 1), -torch.inf, dtype=torch.float64, device=x.device)
    z, total = torch.zeros_like(top), torch.zeros(len(x), y.shape[1], dtype=torch.float64, device=x.device)
    for images in y.split(2048 if y.is_cuda else 64):
        cut = images[:, :, rows, columns].double().unfold(2, tall, 1).unfold(3, wide, 1).permute(0, 2, 3, 1, 4, 5)
        w, v = cut.flatten(0, 2).flatten(1), cut[..., up, left].flatten(0, 2)
        logit = (query @ w.mT - w.square().sum(1) / 2) / sigma**2
        new = torch.maximum(top, logit.amax(1, keepdim=True))
        e, keep = (logit - new).clamp_min(-700).exp(), (top - new).exp()
        z, total, top = z * keep + e.sum(1, keepdim=True), total * keep + e @ v, new
    return total / z


class Problem:
    """Training images, ``(n, C, H, W)``, and noisy queries: of training images, and of others."""

    def __init__(self, name: str, data: vk.Empirical, others: Tensor, count: int, part: int) -> None:
        self.name, self.data, self.part, self.device = name, data, part, data.device
        self.y = data[:part].float()  # of the known method
        self.clean = torch.cat([data[: count // 2].float(), others[: count - count // 2].float()])
        self.std = data.spread / data.d**0.5

    def noisy(self, sigma: float) -> Tensor:
        noise = torch.randn(self.clean.shape, generator=torch.Generator().manual_seed(1)).to(self.device)
        return self.clean + sigma * noise

    @functools.cached_property
    def images(self) -> Tensor:
        return self.data[:].float()

    @property
    def pixels(self) -> list[tuple[int, int]]:
        """One pixel inside, one at a border."""
        _, height, width = self.data.shape
        return [(height // 2, width // 2), (0, width // 2)]


def rows(problem: Problem, sizes: tuple[int, ...], sigmas: tuple[float, ...], report: Report) -> Iterator[Row]:
    """One row for each patch size and noise level."""
    data, device, n = problem.data, problem.device, problem.data.n
    for k in sizes:
        theory = EquivariantLocal(data, vk.EDM(), k)
        small = EquivariantLocal(data.subset(torch.arange(64, device=device)), vk.EDM(), k)
        half = k // 2
        for sigma in sigmas:
            report(f"{problem.name}, k = {k}, sigma = {sigma:g}")
            x = problem.noisy(sigma)
            small.denoise(x, sigma)  # compiles
            convolution(problem.y[:2], x, sigma, k)
            known, far = once(lambda x=x, s=sigma, k=k: convolution(problem.y, x, s, k), device)
            ours, mean = once(lambda x=x, s=sigma, t=theory: t.denoise(x, s), device)
            known *= n / problem.part
            worst = bad = 0.0
            for r, c in problem.pixels:
                truth = exact(problem.images, x, sigma, k, r, c)
                worst = max(worst, float((mean[:, :, r, c].double() - truth).abs().max()) / problem.std)
                if half <= min(r, c) and max(r, c) < data.shape[-1] - half:
                    truth = exact(problem.y, x, sigma, k, r, c) if problem.part < n else truth
                    there = far[:, :, r - half, c - half].double()
                    bad = max(bad, float((there - truth).abs().max()) / problem.std)
            row: dict[str, Any] = {"data": problem.name, "k": k, "sigma": sigma, "vkernel (s)": ours}
            row |= {"vkernel error": worst, "known method (s)": known, "known error": bad, "ratio": known / ours}
            row["ratio a pixel"] = row["ratio"] * x[0, 0].numel() / far[0, 0].numel()
            if device.type == "cuda" and sigma == 1.0:
                row["borders"] = ours / once(lambda x=x, s=sigma, t=theory, k=k: inside(t, x, s, k), device)[0]
            yield row


def inside(theory: EquivariantLocal, x: Tensor, sigma: float, k: int) -> Tensor:
    """The theory at the places where the whole patch lies inside the image alone."""
    spans = (Span(k // 2, size - 2 * (k // 2), k // 2, k // 2) for size in theory.image[1:])
    patches = Patches(theory.white, theory.image, *spans, 0)
    kind = PlaceClass(patches, theory.memory)
    queries = patches.windows(x.double())
    level = torch.full((len(queries),), sigma**2, dtype=torch.float64, device=x.device)
    return kind.mean(queries, torch.ones_like(level), level, theory.tolerance)


def limits(device: str) -> str:
    """What the processor does at most, in words."""
    if device != "cpu":
        return ""
    a, b, out = torch.randn(256, 2048), torch.randn(2048, 1024), torch.empty(256, 1024)
    seconds = min(once(lambda: torch.mm(a, b, out=out))[0] for _ in range(20))
    exp = min(once(lambda: torch.exp2(out.clamp(-9, 0), out=out))[0] for _ in range(20)) / out.numel()
    rate = 2 * 256 * 2048 * 1024 / seconds
    each = ", ".join(f"{2e9 * k**2 / rate:.2f} at k = {k}" for k in SIZES)
    return (
        f" Measured in the same run: float32 products {rate / 1e9:.0f} GFLOP/s, an exponential {exp * 1e9:.2f} ns. A "
        f"logit from all k² products would take {each} ns; adding one row of pixels takes 2/k of that, but a share "
        "(2p - 1)/p² of the logits, with p = 29 - k rows of places, begins a diagonal and needs all products: 8 % at "
        "k = 3, 16 % at k = 17. There these products, the borders, which the known method leaves out, and five passes "
        "over a block of logits in the cache limit the ratio."
    )


def cifar() -> vk.Empirical | None:
    """The CIFAR images below ``$VKERNEL_DATA``, if there are any."""
    root = Path(os.environ.get("VKERNEL_DATA", ""))
    found = [vk.load(root / name) for name in ("cifar10", "cifar10_more") if (root / name).is_dir()]
    if not found or "VKERNEL_DATA" not in os.environ:
        return None
    return vk.Empirical(torch.cat([data[:] for data in found]), name="CIFAR")


def problems(device: str, quick: bool) -> Iterator[tuple[str, Problem]]:
    """The training sets of a device, by the name of their section."""
    if device == "cpu":
        n, count, part = (100, 2, 50) if quick else (1000, 8, 125)
        yield "els", Problem("random fields", vk.Empirical(fields(n, 1, 28)), fields(count, 1, 28, seed=7), count, part)
        if FASHION.exists():
            images = vk.load(FASHION)[: n + count].reshape(-1, 1, 28, 28)
            yield "els-fashion", Problem("Fashion-MNIST", vk.Empirical(images[:n]), images[n:], count, part)
        return
    n, part = (5000, 100) if quick else (50_000, 500)
    data = vk.Empirical(fields(n, 3, 32, device=device), scale=(-1.0, 1.0))
    others = vk.Empirical(fields(64, 3, 32, seed=7, device=device), scale=(-1.0, 1.0))[:]
    yield "els", Problem("random fields", data, others, 64, part)
    found = cifar()
    if found is not None:
        order = torch.randperm(found.n, generator=torch.Generator().manual_seed(0))
        images = found[order].to(device)
        bytes_ = ((images - images.min()) / (images.max() - images.min()) * 255).round().byte()
        data = vk.Empirical(bytes_[:-64], scale=(-1.0, 1.0))
        yield "els-cifar", Problem("CIFAR", data, bytes_[-64:].float() / 127.5 - 1, 64, part)


def steps(device: str, quick: bool) -> int:
    """How often the benchmark reports its progress."""
    count = (2 if quick else len(SIZES) * len(SIGMAS)) * (1 + FASHION.exists() if device == "cpu" else 2)
    return count + (device == "cuda")


def run(device: str = "cpu", quick: bool = False, report: Report = print) -> list[Row]:
    """Measure and record."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    done: list[Row] = []
    for section, problem in problems(device, quick):
        sizes, sigmas = ((3, 7), (1.0,)) if quick else (SIZES, SIGMAS)
        n, shape = problem.data.n, "×".join(map(str, problem.data.shape))
        found = []
        for row in rows(problem, sizes, sigmas, report):
            print("  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
            found.append(row)
        title = f"The equivariant local theory: {problem.name}, {n:,} images {shape}, {len(problem.clean)} queries"
        note = (
            f"The known method, a float32 convolution with all patches as filters, was timed on {problem.part:,} "
            f"images and scaled; it leaves out the borders (so there is also the ratio of times a pixel). Goal: "
            f"{GOAL[device]}, error at most 1e-4.{limits(device)}"
        )
        record("gpu" if device == "cuda" else "cpu", section, found, title=title, note=note)
        done += found
        if device == "cuda" and section == "els":
            sampled(problem, 2 if quick else 20, report)
    return done


def sampled(problem: Problem, steps: int, report: Report) -> None:
    """64 samples by the probability flow; the patch grows with the noise."""
    report("samples")
    theory = EquivariantLocal(problem.data, vk.EDM(), {0.1: 3, 0.5: 7, 2.0: 11, 10.0: 17})
    x = theory.process.prior((64, *problem.data.shape), device=problem.device, generator=0)
    seconds, found = once(lambda: vk.sample.pf_ode(theory, x, steps=steps), problem.device)
    assert bool(found.isfinite().all())
    row = {"samples": 64, "steps": steps, "k": "3 … 17", "time (s)": seconds, "goal (s)": 180.0}
    print(row)
    record("gpu", "els-samples", [row], title="Samples of the equivariant local theory, 50,000 random fields 3×32×32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, help="where results go")
    options = parser.parse_args()
    with into(options.out or folder()):
        run(options.device, options.quick)


if __name__ == "__main__":
    main()
