r"""What the effective SDE does between images (docs/theory.md, §4.4).

A start :math:`x_T` is noise, shared by all runs. The PF-ODE of the exact score takes it to one training image; runs of
the effective SDE with the naive kernel part from that path where the posterior hesitates between images. Where do they
end, and how far from any training image?
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vkernel import plots
from vkernel.core import rng
from vkernel.core.errors import InputError
from vkernel.core.estimate import Estimate
from vkernel.data import Empirical, digits
from vkernel.data.loaders import load
from vkernel.kernels import Naive
from vkernel.process import VP
from vkernel.reproduce.memorise import one_thread
from vkernel.reproduce.page import Exhibit, Finding, Picture, Run, Skip, Table, number, percent
from vkernel.sample import effective_sde, pf_ode
from vkernel.score.empirical import EmpiricalScore

__all__ = ["Ends", "ends", "make"]

ORDER, TITLE, SECONDS = 70, "Between two images", 14.0
MEMORY = 1 << 28


@dataclass(frozen=True)
class Sizes:
    """Starts, runs from each, strengths κ, steps, and how many starts and runs to draw."""

    starts: int
    runs: int
    kappas: tuple[float, ...]
    steps: int
    rows: int
    columns: int


DIGITS = Sizes(starts=24, runs=8, kappas=(0.001, 0.01, 0.1), steps=120, rows=5, columns=4)
CIFAR = Sizes(starts=6, runs=3, kappas=(0.001, 0.01, 0.1), steps=60, rows=4, columns=3)
QUICK = Sizes(starts=3, runs=2, kappas=(0.01, 0.1), steps=8, rows=2, columns=2)
QUICK_CIFAR = Sizes(starts=1, runs=1, kappas=(0.1,), steps=3, rows=1, columns=1)


@dataclass(frozen=True)
class Ends:
    """Ends of the flow ``(starts, …)`` and of runs ``(κ, run, start, …)``: samples divided by alpha, index of the
    nearest training image, distances to it and to the second nearest."""

    flow: Tensor
    flow_at: Tensor
    flow_distance: Tensor
    x: Tensor
    at: Tensor
    distance: Tensor
    second: Tensor

    @property
    def elsewhere(self) -> Tensor:
        """Whether a run ends at another image than the flow, ``(κ, run, start)``."""
        return self.at != self.flow_at


def ends(data: Empirical, sizes: Sizes, seed: int, name: str) -> Ends:
    process = VP(eps=1e-3)
    score = EmpiricalScore(data, process, memory=MEMORY)
    start = process.prior((sizes.starts, *data.shape), generator=rng.stream(seed, f"reproduce/images/{name}"))
    alpha = float(process.alpha(torch.tensor(process.eps, dtype=torch.float64)))
    flow = pf_ode(score, process, start, steps=sizes.steps, spacing="log", method="exponential")
    assert isinstance(flow, Tensor)
    runs = []
    for kappa in sizes.kappas:
        stream = rng.stream(seed, f"reproduce/images/{name}/{kappa:g}")
        kernel = Naive(score, kappa)
        options = {"steps": sizes.steps, "members": sizes.runs, "generator": stream, "spacing": "log"}
        runs.append(effective_sde(score, kernel, process, start, **options))  # type: ignore[arg-type]
    x = torch.stack(runs) / alpha
    flow_at, flow_distance, _ = _nearest(data, flow / alpha)
    return Ends(flow / alpha, flow_at, flow_distance, x, *_nearest(data, x))


def _nearest(data: Empirical, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Index of the nearest training image, its distance, and that of the second nearest."""
    flat = x.reshape(-1, data.d).float()
    best = torch.cdist(flat, data.rows(0, data.n).float().reshape(data.n, -1)).topk(2, 1, largest=False)
    batch = x.shape[: x.ndim - len(data.shape)]
    return best.indices[:, 0].reshape(batch), best.values[:, 0].reshape(batch), best.values[:, 1].reshape(batch)


@one_thread
def make(run: Run) -> Exhibit:
    sets: list[tuple[str, str, Empirical, Sizes]] = []
    try:
        sets.append(("digits", "digits", digits(), QUICK if run.quick else DIGITS))
        root = os.environ.get("VKERNEL_DATA", "")
        folder = Path(root).expanduser() / "cifar10"
        if root and folder.is_dir():
            sets.append(("cifar", "CIFAR images", load(folder), QUICK_CIFAR if run.quick else CIFAR))
    except InputError as error:
        if not sets:
            raise Skip(str(error)) from error
    found = []
    for name, _, data, sizes in sets:
        found.append(ends(data, sizes, run.seed, name))
        run.step(0.7 / len(sets))
    arrays: dict[str, object] = {}
    pictures: list[Picture] = []
    for (name, kind, data, sizes), end in zip(sets, found, strict=True):
        arrays |= {f"{name}_kappa": sizes.kappas, f"{name}_flow_at": end.flow_at, f"{name}_at": end.at}
        arrays |= {f"{name}_distance": end.distance, f"{name}_second": end.second}
        arrays[f"{name}_share"] = _shares(end)
        arrays[f"{name}_flow_distance"] = end.flow_distance
        pictures.append(_images(run, name, kind, data, sizes, end))
    name, kind, data, sizes = sets[0]
    pictures.insert(1, _curves(run, sizes, found[0]))
    saved = run.arrays("between_images", **arrays)
    run.step(0.3)
    share = _shares(found[0])[-1]
    halfway = [float((e.distance[-1] / (e.distance[-1] + e.second[-1])).median()) for e in found]
    return Exhibit(
        name="between_images",
        title=TITLE,
        pictures=tuple(pictures),
        data=saved,
        sizes="; ".join(
            f"{data.n:,} {kind}: {s.starts} starts, {s.runs} runs from each at every κ, {s.steps} steps in log(σ/α)"
            for _, kind, data, s in sets
        )
        + "; the paper's VP, eps = 0.001.",
        opening=(
            "One start x_T, one PF-ODE, one training image at its end. Now let the score tremble as the naive "
            "estimator makes it, V = κ D C D δ(t - t'), and run it several times from the same start.",
        ),
        finding=Finding(
            number=percent(share[0]),
            interval=f"95 % interval {percent(share[1])} to {percent(share[2])} (over starts)",
            words=(
                f"Share of runs at κ = {sizes.kappas[-1]:g} that end at another of the {data.n:,} {kind} than the "
                f"PF-ODE from the same start; {sizes.starts} starts, {sizes.runs} runs each.",
                "They end at another image, not between two. The distance of a run's end to its nearest training "
                "image, as a share of the distances to the nearest and second nearest together (½ would be halfway), "
                f"has the median {number(halfway[0], 2)}. White noise that follows C decides between "
                "training images; it does not mix them.",
            ),
        ),
        tables=tuple(_table(kind, s, e) for (_, kind, _, s), e in zip(sets, found, strict=True)),
    )


def _shares(end: Ends) -> list[tuple[float, float, float]]:
    """The share of runs that end elsewhere at each κ, with a 95 % interval over starts."""
    found = [Estimate.of_mean(part.double().mean(0)) for part in end.elsewhere]
    return [(e.value, max(0.0, e.low), min(1.0, e.high)) for e in found]


def _images(run: Run, name: str, kind: str, data: Empirical, sizes: Sizes, end: Ends) -> Picture:
    """Starts whose runs part most often first."""
    order = end.elsewhere.double().mean((0, 1)).argsort(descending=True, stable=True)[: sizes.rows]
    order = order.sort().values
    shown = end.x[:, : sizes.columns, order].movedim(2, 0).flatten(1, 2)  # (start, κ × run, …)
    rows = torch.cat([end.flow[order][:, None], shown], 1)
    other = end.elsewhere[:, : sizes.columns, order].movedim(2, 0).flatten(1)
    far = end.distance[:, : sizes.columns, order].movedim(2, 0).flatten(1)
    mark = torch.cat([torch.zeros(len(order), 1, dtype=torch.bool), other], 1)
    distances = torch.cat([end.flow_distance[order][:, None], far], 1)
    notes = [[f"{float(v):.2f}" for v in row] for row in distances]
    groups = [("PF-ODE", 1), *((f"effective SDE, κ = {k:g}", sizes.columns) for k in sizes.kappas)]
    first = data.images(end.flow_at[order])
    return run.picture(
        f"between_{name}",
        lambda: plots.end_images(first, rows, [f"no. {int(i)}" for i in end.flow_at[order]], groups, mark, notes),
        alt=f"Rows of {kind}: on the left the training image at which the PF-ODE from one start ends, then ends of "
        "runs of the effective SDE from the same start at growing noise. Framed ones end at another training image: "
        f"{', '.join(f'{percent(s[0])} at κ = {k:g}' for s, k in zip(_shares(end), sizes.kappas, strict=True))}.",
        caption=(
            f"Each row is one start x_T. Left, the training image nearest to the end of its PF-ODE, and that end; then "
            f"{sizes.columns} runs of the effective SDE for each κ. An orange frame means that the run ended at "
            "another training image; the number is the distance to the nearest one "
            f"(noise of strength σ at eps alone would leave {number(_residue(data), 2)}). Shown are starts whose runs "
            "part most.",
        ),
    )


def _residue(data: Empirical) -> float:
    process = VP(eps=1e-3)
    eps = torch.tensor(process.eps, dtype=torch.float64)
    return float(process.sigma(eps) / process.alpha(eps)) * data.d**0.5


def _curves(run: Run, sizes: Sizes, end: Ends) -> Picture:
    def quartiles(values: Tensor) -> Tensor:
        q = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
        return torch.quantile(values.double().flatten(1), q, dim=1)

    shares = _shares(end)
    near, second = quartiles(end.distance), quartiles(end.second)
    return run.picture(
        "between_digits_share",
        lambda: plots.share_curve(
            sizes.kappas,
            torch.tensor(shares).mT,
            {"to the nearest": near, "to the second nearest": second},
        ),
        alt="Left: the share of runs that end at another digit than the PF-ODE grows with κ, from "
        f"{percent(shares[0][0])} to {percent(shares[-1][0])}. Right: the distances to the nearest and second nearest "
        "training digit, far apart at every κ.",
        caption=(
            f"Digits. Left: the share of runs that end at another training image, with a 95 % interval over starts: "
            f"{', '.join(f'{percent(s[0])} at κ = {k:g}' for s, k in zip(shares, sizes.kappas, strict=True))}. "
            f"Right: at κ = {sizes.kappas[-1]:g} the median distance to the nearest training image is "
            f"{number(float(near[1, -1]))}, to the second nearest {number(float(second[1, -1]))}.",
        ),
    )


def _table(kind: str, sizes: Sizes, end: Ends) -> Table:
    rows = []
    for k, (kappa, share) in enumerate(zip(sizes.kappas, _shares(end), strict=True)):
        near, second = (float(v[k].median()) for v in (end.distance, end.second))
        span = f"{percent(share[1])} to {percent(share[2])}"
        rows.append((f"κ = {kappa:g}", percent(share[0]), span, number(near), number(second)))
    return Table(
        caption=f"Runs of the effective SDE on {kind}: {sizes.starts} starts, {sizes.runs} runs each.",
        head=("strength", "end at another image", "95 % interval", "median distance to nearest", "to second nearest"),
        rows=tuple(rows),
    )
