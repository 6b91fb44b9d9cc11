r"""Generalization against the truth for networks, and for linear models in the plane.

Many training sets of n points are drawn from a known population. On each, M models are trained with the targets
:math:`m + c\,(x_0 - m)` of :class:`vkernel.JC`, on the same inputs and from the same initial weights for every c, and
sampled by the probability-flow ODE. Kept are the distances to the population (energy distance and W₁, sliced in the
plane) of every model, of the pooled law of each set and of the set itself (:func:`vkernel.metrics.generalization`).

Networks are trained on *fresh* draws, a new batch at each step, or on P *fixed* draws in random order. All sets,
factors c and models of a condition are trained in one batch: :class:`Sets` presents them to the network as members.
Each of them is what ``vk.train_ensemble(model, data, process, objective=vk.JC(c), seed=1 + set)`` trains.

``python -m experiments.generalization train --device cuda --out FOLDER`` writes a file for each condition; run again,
it continues. ``python -m experiments.generalization merge FOLDER …`` (folders or tar files) writes averages over models
to the file that the exhibit ``generalization`` of ``vkernel reproduce`` shows.
"""

from __future__ import annotations

import argparse
import io
import json
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import vkernel as vk
from vkernel.core import rng
from vkernel.core.files import write
from vkernel.metrics import generalization, nearest
from vkernel.reproduce.generalization import STORED
from vkernel.train.ensemble import Ensemble
from vkernel.train.objectives import Batch, Objective, Training

FACTORS = (0.0, 0.5, 1.0, 2.0)
SEED = 0
PROCESS = vk.VP(eps=1e-3)
KINDS = {"energy": "energy", "w1": "wasserstein"}
LAWS = {"square": "square", "circle": "circle", "line": "uniform"}  # populations by their names in vk.data
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """One condition: ``ratio`` F/P of a linear model, ``draws`` P of a network (None: fresh at each step)."""

    model: str
    population: str
    n: int
    draws: int | None = None
    ratio: float | None = None
    per_axis: int = 10  # features of a linear model
    steps: int = 3000  # of a network
    width: int = 64
    lr: float = 3e-3
    sets: int = 24
    models: int = 16
    samples: int = 512
    flow: int = 200  # steps of the ODE
    reference: int = 20_000  # draws of the population

    @property
    def name(self) -> str:
        """The condition in words; files refer to it."""
        what = f"F/P={self.ratio:g}" if self.model == "linear" else f"draws={self.draws}"
        longer = f" steps={self.steps}" if self.model == "mlp" and self.steps != Case.steps else ""
        return f"{self.model} {self.population} n={self.n} {what}{longer}"

    def small(self) -> Case:
        """Return the condition at a size for tests."""
        return replace(self, per_axis=4, steps=30, width=16, sets=3, models=4, samples=32, flow=10, reference=1000)


def cases() -> list[Case]:
    """Return all conditions, the most important first."""

    def networks(*at: tuple[str, int], draws: Sequence[int | None] = (None, 512)) -> list[Case]:
        return [Case("mlp", place, n, draws=P) for place, n in at for P in draws]

    def linear(*at: tuple[str, int], per_axis: int = 10) -> list[Case]:
        return [Case("linear", place, n, ratio=r, per_axis=per_axis) for place, n in at for r in (1.0, 4.0, 0.25)]

    found = networks(("square", 8), ("circle", 8), ("line", 8)) + linear(("square", 8))
    found += networks(("square", 32), ("line", 32)) + linear(("circle", 8), ("square", 32))
    found += networks(("square", 8), draws=(128, 2048)) + linear(("line", 32), ("line", 8), per_axis=16)
    return [*found, *networks(("circle", 32)), Case("mlp", "square", 8, steps=12_000)]


class Sets(Training):
    """The draws of ``models`` models for each of several training sets and each factor c of the target's noise.

    Member k is (set, c, model), the model fastest. Equal (set, model) share inputs, initial weights and order.
    """

    def __init__(self, sets: Sequence[vk.Empirical], draws: int | None, models: int) -> None:
        super().__init__(sets[0], PROCESS, "J1", draws, dtype=torch.float32)
        self.own = [Training(data, PROCESS, "J1", draws, seed=1 + s) for s, data in enumerate(sets)]
        self.models = models

    def __len__(self) -> int:
        return len(self.own) * len(FACTORS) * self.models

    def batches(self, objectives: Sequence[Objective], members: Sequence[int], count: int, start: int) -> list[Batch]:
        """Return draws of all members: those of J1, with targets moved to m + c (x0 - m)."""
        assert len(members) == len(self), "all members are trained at once"
        rows: list[tuple[Tensor, Tensor, Tensor]] = []
        c = torch.tensor(FACTORS, dtype=torch.float64, device=self.data.device)
        for own in self.own:
            drawn = own.batch(range(self.models), count, start)
            mean = own.score.denoise(drawn.x.flatten(0, 1), drawn.t.flatten()).reshape(drawn.x.shape)
            targets = (mean + c[:, None, None, None] * (drawn.m - mean)).flatten(0, 1)
            rows.append((drawn.x.repeat(len(c), 1, 1), drawn.t.repeat(len(c), 1), targets))
        x, t, m = (torch.cat(column).to(self.dtype) for column in zip(*rows, strict=True))
        return [Batch(x, t, m)]

    def place(self, member: int) -> tuple[int, int]:
        """Return the set and the model of a member."""
        rest, model = divmod(member, self.models)
        return rest // len(FACTORS), model

    def keys(self, purpose: str, members: Sequence[int]) -> Tensor:
        """Return one key per member, that of its model on its set."""
        return torch.cat([self.own[s].keys(purpose, [m]) for s, m in map(self.place, members)])

    def generator(self, purpose: str, member: int) -> torch.Generator:
        """Return the generator of one member, that of its model on its set."""
        s, m = self.place(member)
        return self.own[s].generator(purpose, m)


def networks(case: Case, sets: Sequence[vk.Empirical]) -> Tensor:
    """Train networks and return their samples ``(set, c, model, N, d)``."""
    model = vk.models.MLP(case.width, 3, steps=case.steps, batch=64, decay="cosine", target="noise", lr=case.lr)
    training = Sets(sets, case.draws, case.models)
    state = model.fit(training, range(len(training)), lambda share: None)
    starts = torch.stack([_starts(case, s, data, torch.float32) for s, data in enumerate(sets)])
    whole = Ensemble(model, state, PROCESS, tuple(starts.shape[2:]))
    each = len(FACTORS) * case.models
    samples = whole.sample(x_T=starts.repeat_interleave(each, 0), steps=case.flow)
    return samples.reshape(len(sets), len(FACTORS), case.models, *starts.shape[1:])


def linear(case: Case, sets: Sequence[vk.Empirical]) -> Tensor:
    """Train linear models and return their samples ``(set, c, model, N, d)``; weights are linear in the targets."""
    assert case.ratio is not None
    found = []
    (d,) = sets[0].shape
    features = vk.features.grid("gaussian", case.per_axis, d, low=-1.5, high=1.5, process=PROCESS)
    model = vk.models.Linear(features, target="x0", ridge=0.1)
    P = round(features.count / case.ratio)
    for s, data in enumerate(sets):
        zero, one = (
            vk.train_ensemble(model, data, PROCESS, members=case.models, draws=P, objective=J, seed=1 + s)
            for J in ("J0", "J1")
        )
        a, b = zero.state["weights"], one.state["weights"]
        every = Ensemble(model, {"weights": torch.cat([a + c * (b - a) for c in FACTORS])}, PROCESS, (d,))
        x = every.sample(x_T=_starts(case, s, data, torch.float64), steps=case.flow)
        found.append(x.reshape(len(FACTORS), case.models, *x.shape[1:]))
    return torch.stack(found)


def _starts(case: Case, s: int, data: vk.Empirical, dtype: torch.dtype) -> Tensor:
    """Return the starts ``(N, d)`` of all models of set s."""
    shape = case.samples, *data.shape
    return PROCESS.prior(shape, device=data.device, dtype=dtype, generator=rng.stream(1 + s, "ensemble/x_T", 0))


def condition(case: Case, device: str) -> Arrays:
    """Train and sample one condition; return distances ``*_single (c, set, model)``, ``*_pooled (c, set)``, ``*_train
    (set,)`` and ``*_fresh`` (value and error), mean distances to the nearest training point, and the sets."""
    streams = [rng.stream(SEED, f"generalization/{case.population}", s) for s in range(case.sets + 1)]
    points = [vk.data.population(LAWS[case.population], case.n, source) for source in streams[:-1]]
    truth = vk.data.population(LAWS[case.population], case.reference, streams[-1]).to(device)
    sets = [vk.Empirical(p).to(device) for p in points]
    samples = (networks if case.model == "mlp" else linear)(case, sets).double()
    found: dict[str, Tensor] = {"points": torch.stack(points), "nearest": _nearest(samples, sets)}
    for short, kind in KINDS.items():
        laws = [
            generalization(list(samples[:, c]), truth, [data[:] for data in sets], kind=kind, skip_diverged=True)
            for c in range(len(FACTORS))
        ]
        lost = [case.models - law.each.shape[1] for law in laws]
        rows = [torch.nn.functional.pad(law.each, (0, k), value=torch.nan) for law, k in zip(laws, lost, strict=True)]
        found[f"{short}_single"] = torch.stack(rows)
        found[f"{short}_pooled"] = torch.stack([law.pools for law in laws])
        found[f"{short}_fresh"] = torch.tensor([laws[0].fresh.value, laws[0].fresh.se])
        assert laws[0].trains is not None
        found[f"{short}_train"] = laws[0].trains
    return {key: value.cpu().numpy().astype(np.float32) for key, value in found.items()}


def _nearest(samples: Tensor, sets: Sequence[vk.Empirical]) -> Tensor:
    """Return the mean distance of the samples of each model to the nearest training point, ``(c, set, model)``."""
    away = []
    for data, x in zip(sets, samples, strict=True):
        flat = x.nan_to_num(posinf=0, neginf=0).flatten(0, 2)
        away.append(nearest(flat, data, 1)[0][:, 0].reshape(x.shape[:3]).mean(2))
    lost = ~samples.isfinite().flatten(3).all(3)
    return torch.stack(away, 1).masked_fill(lost.movedim(1, 0), torch.nan)


def train(out: Path, device: str, only: Sequence[str] = (), seconds: float = float("inf"), small: bool = False) -> None:
    """Compute the conditions that the folder ``out`` lacks; start none after so many ``seconds``."""
    begin = time.monotonic()
    if device == "cpu":
        torch.set_num_threads(1)
    for k, full in enumerate(cases()):
        path, case = out / f"{k:02d}.npz", full.small() if small else full
        chosen = not only or any(part in full.name for part in only)
        if not chosen or path.exists() or time.monotonic() - begin > seconds:
            continue
        start = time.monotonic()
        found = condition(case, device)
        about = asdict(case) | {"name": full.name, "factors": FACTORS, "seed": SEED, "eps": PROCESS.eps}
        about |= {"device": device, "seconds": time.monotonic() - start}
        _save(path, found | {"about": np.array(json.dumps(about))})
        print(f"{time.monotonic() - begin:6.0f} s  {full.name}: {about['seconds']:.1f} s", flush=True)


def _save(path: Path, arrays: Arrays) -> None:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    write(path, buffer.getvalue())


def merge(sources: Sequence[Path], out: Path) -> None:
    r"""Write one file with all conditions, ``(condition, …)``: for each c and set the mean and the median over models
    (``*_single``, ``*_median``), the share of models whose distance is less than at c = 0 (``*_better``), ``*_pooled``,
    ``*_train``, ``*_fresh``, ``nearest``; ``about`` is JSON. Of equal conditions the last one counts."""
    held: dict[str, Arrays] = {}
    for source in sources:
        for arrays in _files(source):
            held[json.loads(str(arrays["about"]))["name"]] = arrays
    order = [case.name for case in cases() if case.name in held]
    merged: dict[str, list[np.ndarray]] = {}
    for arrays in map(held.__getitem__, order):
        row = {"nearest": np.nanmean(arrays["nearest"], 2)}
        for short in KINDS:
            single = arrays[f"{short}_single"]
            row |= {key: arrays[key] for key in (f"{short}_pooled", f"{short}_train", f"{short}_fresh")}
            row |= {f"{short}_single": np.nanmean(single, 2), f"{short}_median": np.nanmedian(single, 2)}
            row[f"{short}_better"] = (single < single[:1]).mean(2)
        for key, value in row.items():
            merged.setdefault(key, []).append(value)
    about = np.array([str(held[name]["about"]) for name in order])
    _save(out, {"about": about} | {key: np.stack(rows).astype(np.float32) for key, rows in merged.items()})
    print(f"{out}: {len(order)} conditions, {out.stat().st_size / 1000:.0f} kB")


def _files(source: Path) -> Iterator[Arrays]:
    """Yield the arrays of every condition in a folder or in a tar file."""
    if source.is_dir():
        for path in sorted(source.glob("*.npz")):
            with np.load(path) as arrays:
                yield dict(arrays)
        return
    with tarfile.open(source) as held:
        for item in sorted((item for item in held if item.name.endswith(".npz")), key=lambda item: item.name):
            content = held.extractfile(item)
            assert content is not None
            with np.load(io.BytesIO(content.read())) as arrays:
                yield dict(arrays)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    trained = verbs.add_parser("train", help="train, sample and measure")
    trained.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "generalization")
    trained.add_argument("--device", default="cpu")
    trained.add_argument("--only", nargs="*", default=[], help="parts of the names of conditions")
    trained.add_argument("--seconds", type=float, default=float("inf"), help="start no condition later")
    trained.add_argument("--small", action="store_true", help="tiny sizes, to try it")
    merged = verbs.add_parser("merge", help="write the file that vkernel reproduce shows")
    merged.add_argument("sources", type=Path, nargs="+", help="folders or tar files of train")
    merged.add_argument("--out", type=Path, default=Path(str(STORED)))
    given = parser.parse_args()
    if given.verb == "merge":
        merge(given.sources, given.out)
    else:
        train(given.out, given.device, given.only, given.seconds, given.small)


if __name__ == "__main__":
    main()
