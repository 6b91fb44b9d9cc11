r"""Does the profile of a training set predict what trained networks reproduce?

Training sets with planted points: ordinary ones, some of them given 2, 4 or 8 times, and isolated ones. Ensembles of
networks are trained on each set for several numbers of steps and sampled by the probability-flow ODE. Per member and
distinct training point i, with distances :math:`d_1 \le d_2` of a sample to the two nearest distinct points,

* *visits* counts the samples to which i is nearest,
* *copied* those of them with :math:`d_1 < d_2 / 3` (the rule of ``vk.metrics.copies``),
* *close* those with :math:`d_1 < r`, r a third of the median distance of nearest neighbours, one radius for all points.

A sample is *between* its two nearest points, :math:`y_i` and :math:`y_j`, if its projection on their segment is in the
middle half, and its distance from the segment is below :math:`|y_i - y_j|/4`.

``python -m experiments.profile_check train plane --out FOLDER`` (and ``digits``) trains and counts; run again, it
continues.
``python -m experiments.profile_check report FOLDER`` compares the counts with profiles (experiments/profile_report.py).
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import vkernel as vk
from vkernel.core.files import write as write_file
from vkernel.metrics import nearest

PROCESS = vk.VP()
COPIES = (2, 4, 8)  # multiplicities of planted duplicates
EACH, ISOLATED = 4, 8  # distinct points of each multiplicity; isolated points
RATIO = 1 / 3
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Planted:
    """A training set: distinct ``points (n, *shape)``, how often each is given, and which were planted as isolated."""

    points: Tensor
    copies: Tensor
    isolated: Tensor

    @property
    def data(self) -> vk.Empirical:
        """The points as a user would give them, duplicates one after the other."""
        return vk.Empirical(self.points.repeat_interleave(self.copies, 0))

    @cached_property
    def radius(self) -> float:
        """A third of the median distance of nearest neighbours among the distinct points."""
        n = len(self.points)
        found = nearest(self.points.flatten(1), vk.Empirical(self.points), 1, torch.arange(n))[0]
        return RATIO * float(found.median())


@dataclass(frozen=True)
class Design:
    """The sizes of one kind of training set."""

    ordinary: int  # points given once, without the isolated ones
    model: vk.models.MLP | vk.models.UNet
    lengths: tuple[int, ...]  # steps of training
    members: int
    samples: int  # of each member

    def plant(self, draw: Tensor, apart: Tensor) -> Planted:
        """Return the set of ordinary and duplicated points ``draw`` and isolated points ``apart``."""
        once = torch.ones(self.ordinary, dtype=torch.long)
        often = torch.tensor(COPIES).repeat_interleave(EACH)
        copies = torch.cat([once, often, torch.ones(len(apart), dtype=torch.long)])
        return Planted(torch.cat([draw, apart]), copies, torch.arange(len(copies)) >= len(draw))

    @property
    def drawn(self) -> int:
        """How many distinct points come from the population."""
        return self.ordinary + EACH * len(COPIES)


DESIGNS = {
    "plane": Design(
        28,
        vk.models.MLP(128, 3, lr=2e-3, batch=128, ema=0.999, spread=1.5),
        (1000, 4000, 16000),
        members=8,
        samples=1024,
    ),
    "digits": Design(
        44,
        vk.models.UNet((16, 32, 32), lr=1e-3, ema=0.995, spread=0.75, target="noise", weight="sigma2", init_scale=1.0),
        (1000, 3000, 9000, 27000),
        members=6,
        samples=1024,
    ),
}
SMOKE = {  # for tests: seconds on one core
    "plane": Design(6, vk.models.MLP(16, 2, lr=2e-3, batch=32), (5, 20), 2, 64),
    "digits": Design(12, vk.models.UNet((8, 8, 8), ema=0.9, batch=8), (2, 4), 2, 32),
}


def plane(design: Design, number: int) -> Planted:
    """Return draws of N(0, 1), and isolated points around them at distances 3.5 to 5, one in each eighth."""
    source = torch.Generator().manual_seed(number)
    draw = torch.randn(design.drawn, 2, generator=source)
    radius, turn = 3.5 + 1.5 * torch.rand(ISOLATED, generator=source), torch.rand(ISOLATED, generator=source)
    angle = 2 * torch.pi / ISOLATED * (torch.arange(ISOLATED) + 0.5 * turn)
    return design.plant(draw, torch.stack([radius * angle.cos(), radius * angle.sin()], 1))


def digits(design: Design, number: int, pool: Tensor) -> Planted:
    """Return random images of ``pool (1797, 1, 8, 8)``, and isolated ones: other images of it, turned by 90°."""
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(number))
    turned = pool[order[design.drawn :][:ISOLATED]].rot90(1, (-2, -1))
    return design.plant(pool[order[: design.drawn]], turned)


def planted(kind: str, number: int, pool: Tensor | None, small: bool = False) -> tuple[Design, Planted]:
    """Return the design and the training set ``number`` of a kind."""
    design = (SMOKE if small else DESIGNS)[kind]
    return design, plane(design, number) if pool is None else digits(design, number, pool)


def count(samples: Tensor, given: Planted) -> tuple[Tensor, Tensor]:
    """Return for ``samples (M, N, *shape)`` the visits, copied and close samples of each point, ``(3, M, n)``, and rows
    (member, i, j, count) of the pairs i < j that have samples between them."""
    M, n, points = len(samples), len(given.points), given.points.flatten(1).double()
    x = samples.flatten(2).double().cpu()
    finite = x.isfinite().all(-1)
    member = torch.arange(M)[:, None].expand(finite.shape)[finite]
    x = x[finite]
    distance, index = nearest(x, vk.Empirical(points), 2)
    kept = (
        torch.ones(len(x), dtype=torch.bool),
        distance[:, 0] < RATIO * distance[:, 1],
        distance[:, 0] < given.radius,
    )
    places = member * n + index[:, 0]
    counts = torch.stack([torch.bincount(places[k], minlength=M * n).reshape(M, n) for k in kept])
    i, j = index.sort(1).values.T
    side = points[j] - points[i]
    square = side.square().sum(1)
    along = ((x - points[i]) * side).sum(1) / square
    off = (x - points[i] - along[:, None] * side).square().sum(1)
    between = ((along - 0.5).abs() < 0.25) & (off < square / 16)
    rows, times = torch.stack([member, i, j], 1)[between].unique(dim=0, return_counts=True)
    return counts, torch.cat([rows, times[:, None]], 1)


def cell(kind: str, number: int, length: int, pool: Tensor | None, device: str, small: bool) -> Arrays:
    """Train and sample the ensemble of one set and one length; return its counts."""
    if device == "cpu":
        torch.set_num_threads(1)
    design, given = planted(kind, number, pool, small)
    model = vk.models.from_spec(design.model.spec | {"steps": length})
    data = given.data.to(device)
    ensemble = vk.train_ensemble(model, data, PROCESS, members=design.members, seed=number, times="log")
    found = ensemble.sample(design.samples, steps=60, seed=number, shared=False)
    counts, between = count(found, given)
    name = f"{number}_{length}"
    return {f"{name}_counts": counts.numpy().astype(np.uint16), f"{name}_between": between.numpy().astype(np.uint16)}


def read(path: Path) -> Arrays:
    """Return the arrays of a file, none if there is no file."""
    if not path.exists():
        return {}
    with np.load(path) as held:
        return dict(held)


def write(path: Path, arrays: Arrays) -> None:
    """Replace the file at once, so that a stop leaves the old one or the new one."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    write_file(path, buffer.getvalue())


def train(
    kind: str, out: Path, *, sets: int, device: str, workers: int, seconds: float, pool: Tensor | None, small: bool
) -> None:
    """Train what the file ``out/KIND.npz`` lacks of ``sets`` sets, set by set; start no cell that would end later than
    ``seconds`` from now, by the time of short trainings (longer by half beside others) or of cells of its length."""
    path, begin, slowest = out / f"{kind}.npz", time.monotonic(), dict[int, float]()
    arrays, design = read(path), (SMOKE if small else DESIGNS)[kind]
    work = [(number, length) for number in range(sets) for length in reversed(design.lengths)]
    work = [each for each in work if f"{each[0]}_{each[1]}_counts" not in arrays]

    run = partial(_timed, kind, pool, device, small)
    if seconds < float("inf"):
        _, (short, long) = run((0, 10)), (run((0, steps))[1] for steps in (10, 110))  # the first one starts CUDA
        slowest = {
            length: (1 + 0.5 * (workers > 1)) * (short + (long - short) * length / 100) for length in design.lengths
        }
        print(f"{kind}: {10 * (long - short):.1f} ms a step, {short:.1f} s for 10", flush=True)

    def fits(length: int) -> bool:
        return time.monotonic() - begin + 1.1 * slowest.get(length, 0.0) < seconds

    for (number, length), took, found in _ran(work, fits, run, workers):
        arrays |= found
        slowest[length] = took
        write(path, arrays)
        copied = found[f"{number}_{length}_counts"][1].sum() / (design.members * design.samples)
        past = time.monotonic() - begin
        print(f"{past:6.0f} s  {kind} set {number}, {length} steps: {took:.1f} s, copied {copied:.3f}", flush=True)


Cell = tuple[int, int]
Ran = tuple[Cell, float, Arrays]


def _timed(kind: str, pool: Tensor | None, device: str, small: bool, each: Cell) -> Ran:
    begin = time.monotonic()
    found = cell(kind, *each, pool, device, small)
    return each, time.monotonic() - begin, found


def _ran(work: list[Cell], fits, run, workers: int) -> Iterator[Ran]:
    """Yield results as they come: in this process, or from several."""
    if workers <= 1:
        yield from (run(each) for each in work if fits(each[1]))
        return
    running: set[Future[Ran]] = set()
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as executor:
        while work or running:
            while work and len(running) < workers:
                each = work.pop(0)
                if fits(each[1]):
                    running.add(executor.submit(run, each))
            done, running = wait(running, return_when=FIRST_COMPLETED) if running else (set(), set())
            yield from (one.result() for one in done)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    trained = verbs.add_parser("train", help="train, sample and count")
    trained.add_argument("kind", choices=DESIGNS)
    trained.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    trained.add_argument("--sets", type=int, default=12)
    trained.add_argument("--device", default="cpu")
    trained.add_argument("--workers", type=int, default=1, help="processes, on a CPU")
    trained.add_argument("--seconds", type=float, default=float("inf"), help="start nothing that ends later")
    trained.add_argument("--digits", type=Path, help="the images as .npy, where scikit-learn is not installed")
    trained.add_argument("--small", action="store_true", help="tiny sizes, to try it")
    reported = verbs.add_parser("report", help="compare with profiles and write profile_check.json")
    reported.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parent / "results")
    reported.add_argument("--small", action="store_true", help="the counts are those of train --small")
    given = parser.parse_args()
    if given.verb == "report":
        from experiments import profile_report

        profile_report.write(given.folder, given.small)
        return
    pool = None
    if given.kind == "digits":
        pool = torch.from_numpy(np.load(given.digits)) if given.digits else vk.data.digits()[:]
    options = {name: vars(given)[name] for name in ("sets", "device", "workers", "seconds", "small")}
    train(given.kind, given.out, pool=pool, **options)


if __name__ == "__main__":
    main()
