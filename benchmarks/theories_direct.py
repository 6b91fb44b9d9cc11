r"""The theories Local, PCALocal and Gaussian beside what a reader of the papers would write.

``python -m benchmarks.theories_direct [--device cpu|cuda] [--quick] [--out FOLDER]``. The direct implementations cut
all patches, square differences and take a softmax over the training images, in float32 and in batches that fit;
``pooled`` sums the squares of a patch by a pooling layer instead. Both merge batches, so that they are exact but for
rounding. Data are Fashion-MNIST (fields where it is not at hand) on a CPU, and random fields of CIFAR's size on a GPU.
Queries are training images with noise and midpoints of two of them, in float32; all methods evaluate them by turns. The
error is that of the worst query, |m - m_ref| / rms|y - ȳ|, against the direct implementation in float64 for the first
queries. The mask of ``PCALocal`` is made in its first call, which is not timed, and given to the direct implementation.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, unfold

import vkernel as vk
from benchmarks.common import error, fields, images, medians, once, typical
from benchmarks.results import HERE, QUICK, Row, into, record

SIGMAS = (0.02, 0.1, 0.5, 2.0, 10.0)
SCALES = (3, 7, 17)
REFERENCE = 4  # queries of which the error is measured

Report = Callable[[str], None]


def streamed(parts: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the softmax average over all parts: of ``logit (B, m, P)`` and ``value (m, C, P)``, ``(B, C, P)``."""
    top = total = mean = None
    for logit, value in parts:
        new = logit.amax(1) if top is None else torch.maximum(top, logit.amax(1))
        e = (logit - new[:, None]).exp()
        z, u = e.sum(1), torch.einsum("bmp,mcp->bcp", e, value)
        if top is not None:
            keep = (top - new).exp()
            z, u = z + keep * total, u + keep[:, None] * mean
        top, total, mean = new, z, u
    return mean / total[:, None]


def local(x: Tensor, y: Tensor, sigma: float, k: int, numbers: int) -> Tensor:
    """Local by patches: ``x (B, C, H, W)``, ``y (n, C, H, W)``, with about ``numbers`` squared differences at once."""
    there = unfold(x, k, padding=k // 2)

    def parts() -> Iterator[tuple[Tensor, Tensor]]:
        for some in y.split(max(1, numbers // there.numel())):
            gap = (there[:, None] - unfold(some, k, padding=k // 2)).square().sum(2)
            yield -gap / (2 * sigma**2), some.flatten(2)

    return streamed(parts()).reshape(x.shape)


def pooled(x: Tensor, y: Tensor, sigma: float, k: int, numbers: int) -> Tensor:
    """Local by a pooling layer."""

    def parts() -> Iterator[tuple[Tensor, Tensor]]:
        for some in y.split(max(1, numbers // x.numel())):
            gap = (x[:, None] - some).square().sum(2)
            yield avg_pool2d(gap, k, 1, k // 2).flatten(2) * (-k * k / (2 * sigma**2)), some.flatten(2)

    return streamed(parts()).reshape(x.shape)


def pca(x: Tensor, y: Tensor, sigma: float, mask: Tensor, numbers: int) -> Tensor:
    """PCALocal by squared differences times the mask ``(d, d)``."""
    there, scaled = x.flatten(1), mask.mT / (-2 * sigma**2)

    def parts() -> Iterator[tuple[Tensor, Tensor]]:
        for some in y.flatten(1).split(max(1, numbers // there.numel())):
            yield (there[:, None] - some).square() @ scaled, some[:, None]

    return streamed(parts()).reshape(x.shape)


def compared(
    name: str,
    theory: vk.Score,
    data: vk.Empirical,
    x: Tensor,
    sigma: float,
    direct: dict[str, Callable[[Tensor], Tensor]],
    repeats: int,
) -> Row:
    """One row: times and errors of a theory and of the direct implementations, which take queries of either dtype."""
    runs = {"vkernel": lambda a: theory.denoise(a, sigma), **direct}
    first = next(iter(direct.values()))
    truth = first(x[:REFERENCE].double()).flatten(1)
    errors = {key: error(run(x[:REFERENCE]), truth, data.spread) for key, run in runs.items()}
    times = medians([lambda run=run: run(x) for run in runs.values()], repeats, x.device)
    row: dict[str, float | int | str | bool | None] = {"theory": name, "sigma": sigma, "images": len(x), "n": data.n}
    for (key, wrong), seconds in zip(errors.items(), times, strict=True):
        row |= {f"{key} (s)": seconds, f"{key} error": wrong}
    row |= {f"{key} / vkernel": seconds / times[0] for key, seconds in zip(list(runs)[1:], times[1:], strict=True)}
    print("  ".join(f"{k}: {v:.3g}" if isinstance(v, float) else f"{k}: {v}" for k, v in row.items()), flush=True)
    return row


def theories(data: vk.Empirical, batch: int, numbers: int, quick: bool, report: Report) -> list[Row]:
    """Local at several patch sizes and PCALocal, at several noise levels."""
    process, rows = vk.EDM(), []
    shape = data.shape if len(data.shape) == 3 else (1, *data.shape)
    y = data[:].float().reshape(-1, *shape)
    gpu = data.device.type == "cuda"
    repeats, sigmas = (1 if quick or gpu else 3), ((0.1, 2.0) if quick else SIGMAS[::2] if gpu else SIGMAS)
    for k in (3, 7) if quick else SCALES:
        theory = vk.theories.Local(data, process, k)
        report(f"Local, k = {k}, n = {data.n:,}")
        for sigma in sigmas:
            x = typical(data, batch, sigma).float()
            direct = {
                "direct": lambda a, s=sigma, k=k: _like(local, a, y, shape, s, k, numbers),
                "pooled": lambda a, s=sigma, k=k: _like(pooled, a, y, shape, s, k, numbers),
            }
            rows.append(compared(f"Local, k = {k}", theory, data, x, sigma, direct, repeats))
    report(f"PCALocal, n = {data.n:,}")
    seconds, theory = once(lambda: vk.theories.PCALocal(data, process), data.device)
    print(f"PCALocal is ready in {seconds:.2f} s")
    for sigma in sigmas:
        x, levels = typical(data, batch, sigma).float(), torch.tensor([1.0, sigma**2], device=data.device).double()
        mask = torch.cat([theory.mask(*levels, slice(p, p + 512)) for p in range(0, data.d, 512)])
        direct = {"direct": lambda a, s=sigma, m=mask: _like(pca, a, y, shape, s, m.to(a.dtype), numbers)}
        row = compared("PCALocal", theory, data, x, sigma, direct, repeats)
        rows.append({**row, "support": float(mask.sum(1).mean())})
    return rows


def _like(method: Callable[..., Tensor], x: Tensor, y: Tensor, shape: tuple[int, ...], *options: object) -> Tensor:
    """Return the estimate at ``x`` in its shape and dtype."""
    return method(x.reshape(-1, *shape), y.to(x.dtype), *options).reshape(x.shape)


def gaussian(data: vk.Empirical, batch: int, quick: bool) -> list[Row]:
    """The time to prepare Gaussian, and of its denoiser and score, beside one with the d × d filter."""
    seconds, theory = once(lambda: vk.theories.Gaussian(data, vk.EDM()), data.device)
    rows: list[Row] = []
    for sigma in (0.1, 2.0) if quick else SIGMAS:
        x = typical(data, batch, sigma).float()
        gain = theory.variances / (theory.variances + sigma**2)
        filter_, mean = ((theory.axes.mT * gain) @ theory.axes).float(), theory.center.float()

        def direct(a: Tensor, f: Tensor = filter_, m: Tensor = mean) -> Tensor:
            return (m + (a.flatten(1) - m) @ f).reshape(a.shape)

        truth = (theory.center + (x.flatten(1).double() - theory.center) @ ((theory.axes.mT * gain) @ theory.axes))[
            :REFERENCE
        ]
        runs = [lambda a=x, s=sigma: theory.denoise(a, s), lambda a=x, s=sigma: theory(a, s), lambda a=x: direct(a)]
        denoise, score, filtered = medians(runs, 3 if quick else 15, data.device)
        row: dict[str, float | int | str | bool | None] = {"sigma": sigma, "images": batch, "n": data.n, "d": data.d}
        row |= {"prepared (s)": seconds, "denoiser (ms)": 1e3 * denoise, "score (ms)": 1e3 * score}
        row |= {"error": error(theory.denoise(x[:REFERENCE], sigma), truth, data.spread)}
        row |= {"filter (ms)": 1e3 * filtered, "filter error": error(direct(x[:REFERENCE]), truth, data.spread)}
        print("  ".join(f"{k}: {v:.3g}" if isinstance(v, float) else f"{k}: {v}" for k, v in row.items()), flush=True)
        rows.append(row)
        del filter_
    return rows


def steps(device: str, quick: bool) -> int:
    """How many reports :func:`run` makes."""
    return 2 + (2 if quick else len(SCALES))


def run(device: str, quick: bool, report: Report = lambda _: None) -> None:
    """Measure and record."""
    gpu = device == "cuda"
    part, note = ("gpu" if gpu else "cpu"), "Ratios are of times in one run, by turns."
    sizes = [1000 if quick else 10_000] if gpu else [200 if quick else 1000]
    for n in sizes:
        if gpu:
            data = vk.Empirical(fields(n, 3, 32, device=device), scale=(-1.0, 1.0), name="fields")
        else:
            name, y = images("fashion", n)
            data = vk.Empirical(2 * y.reshape(-1, 28, 28) - (1 if float(y.min()) >= 0 else 0), name=name)
        batch = 64 if gpu else 16
        rows = theories(data, 4 if quick else batch, 1 << 31 if gpu else 1 << 26, quick, report)
        title = f"Local and PCALocal beside direct implementations: {n:,} images {'×'.join(map(str, data.shape))}"
        record(part, f"theories-direct-{n}", rows, title=title, note=note)
    for n in ([500] if quick else [10_000]) if gpu else [500]:
        report(f"Gaussian, n = {n:,}")
        side = 16 if quick or not gpu else 64
        data = vk.Empirical(fields(n, 3, side, device=device), scale=(-1.0, 1.0) if gpu else None, name="fields")
        title = f"Gaussian: {n:,} images {'×'.join(map(str, data.shape))}"
        record(part, f"theories-gaussian-{n}", gaussian(data, 64, quick), title=title, note=note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, help="where results go")
    options = parser.parse_args()
    with into(options.out or (QUICK if options.quick else HERE)):
        run(options.device, options.quick)


if __name__ == "__main__":
    main()
