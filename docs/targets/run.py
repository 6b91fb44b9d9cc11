"""Train a U-Net for every process and target and write the tables of docs/howto/targets.md.

``python docs/targets/run.py --device cuda`` trains all cells for 4,000 steps, writes ``results.json`` beside this
file and the tables on the page; ``--page`` only writes the tables. ``--size 8 --steps 50 --n 256 --channels 8 8 8
--chunk 8`` is a small version for a CPU. The networks of all cells have the same architecture, initial weights, images
and random numbers; they differ in the draws (z, e, y, ω) on which they are trained, so that they are trained side by
side as the members of one ensemble."""

from __future__ import annotations

import argparse
import functools
import json
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import vkernel as vk
from vkernel.core.files import write
from vkernel.train.models.base import State
from vkernel.train.models.step import Draws
from vkernel.train.objectives import J1, Objective, Times, Training

HERE = Path(__file__).parent
PAGE, RESULTS = HERE.parent / "howto" / "targets.md", HERE / "results.json"
FASHION = Path("/usr/share/datasets/fashion-mnist")  # of Debian's dataset-fashion-mnist
PROCESSES = {"EDM": vk.EDM, "VP": vk.VP, "Cosine": vk.Cosine, "FlowMatching": vk.FlowMatching, "VE": vk.VE}
TARGETS = ("edm", "noise", "x0", "v", "flow", "score")
LEVELS = (0.1, 0.3, 1.0, 3.0)  # σ/α


@dataclass(frozen=True)
class Cell:
    """One training; what is not given is the default of the U-Net."""

    process: str
    target: str = "edm"
    given: dict[str, object] = field(default_factory=dict)  # settings of the model
    times: Times | None = None
    name: str = ""  # of a training that is no cell of the table by process and target

    def model(self, **how: object) -> vk.models.UNet:
        return vk.models.UNet(target=self.target, **how | self.given)


CELLS = [Cell(process, target) for process in PROCESSES for target in TARGETS]
CELLS += [
    Cell("EDM", given={"spread": 1.0}, name="edm, inputs scaled for data of standard deviation 1"),
    Cell("EDM", "x0", {"weight": "sigma2", "spread": 1.0}, "uniform", "x0, weight σ², uniform times"),
]


class Side(vk.models.UNet):
    """A U-Net of which member k is trained on the draws of ``cells[k]``."""

    cells: Sequence[Cell] = ()

    @functools.cached_property
    def models(self) -> list[vk.models.UNet]:
        how = {name: vars(self)[name] for name in ("channels", "batch", "time_features", "dtype")}
        return [cell.model(**how) for cell in self.cells]

    def pool(
        self,
        training: Training,
        members: Sequence[int],
        count: int,
        start: int = 0,
        objectives: Sequence[Objective] = (),
    ) -> Draws:
        drawn, parts = {}, []  # cells of one process and density of times share their inputs
        for k in members:
            cell, model = self.cells[k], self.models[k]
            process = PROCESSES[cell.process]()
            if (cell.process, cell.times) not in drawn:
                times = model.defaults(process)[1] if cell.times is None else cell.times
                own = Training(
                    training.data, process, J1(), None, seed=training.seed, times=times, dtype=self.state_dtype
                )
                drawn[cell.process, cell.times] = own.batch([0], count, start)
            x, t, m = drawn[cell.process, cell.times]
            y, omega = model.training_target(m, x, t, process), model.omega(t, process)
            parts.append((*model.inputs(x, t, process), y, omega))
        return tuple(torch.cat(a) for a in zip(*parts, strict=True))


def images(folder: Path, n: int, size: int) -> tuple[Tensor, Tensor]:
    """Return n training images and 512 test images of Fashion-MNIST in [-1, 1]; from an .npz file with uint8 arrays
    ``train`` and ``test``, or from the published files."""
    found = sorted(folder.glob("*.npz"))
    if found:
        with np.load(found[0]) as file:
            both = [torch.from_numpy(file[name][:k]).float() / 127.5 - 1 for name, k in (("train", n), ("test", 512))]
    else:
        names = (("train", n), ("t10k", 512))
        both = [vk.load(folder / f"{name}-images-idx3-ubyte.gz")[:k].float() for name, k in names]
    both = [x.reshape(-1, 1, 28, 28) for x in both]
    train, test = (torch.nn.functional.interpolate(x, (size, size), mode="area") for x in both)
    return train, test


def train(cells: Sequence[Cell], data: vk.Empirical, **how: object) -> State:
    """Return the parameters of all cells, trained side by side from the same initial weights."""
    model = Side(**how)  # type: ignore[arg-type]
    model.cells = cells
    training = Training(data, vk.EDM(), J1(), None, vary=("inputs", "targets"), seed=0, dtype=model.state_dtype)
    return model.fit(training, range(len(cells)), lambda share: None)


@torch.no_grad()
def errors(cell: Cell, state: State, test: Tensor, **how: object) -> Tensor:
    """Return |D(x) - x0|²/d at every level and test image, ``(level, image)``."""
    process = PROCESSES[cell.process]()
    model = cell.model(**how | {"bf16": False})
    score, out = vk.Ensemble(model, state, process, tuple(test.shape[1:]))[0], []
    for ratio in LEVELS:
        t = float(process.time(torch.tensor(ratio, dtype=torch.float64)))
        x = process.perturb(test, t, generator=1)
        out.append((score.denoise(x, t) - test).square().flatten(1).mean(1).double().cpu())
    return torch.stack(out)


def run(cells: Sequence[Cell], train_images: Tensor, test: Tensor, recipes: bool, **how: object) -> dict[str, object]:
    """Return the errors of all cells, and those of the default target with other learning rates."""
    data, began, rows = vk.Empirical(train_images), time.monotonic(), []

    def record(cell: Cell, state: State, name: str, **changed: object) -> None:
        e = errors(cell, state, test, **how | changed)
        row = {"process": cell.process, "target": cell.target, "name": name, "error": e.mean(1).tolist()}
        rows.append(row | {"se": (e.std(1) / math.sqrt(e.shape[1])).tolist()})

    state = train(cells, data, **how)
    for k, cell in enumerate(cells):
        record(cell, {name: a[k : k + 1] for name, a in state.items()}, cell.name)
    for lr, decay in ((5e-4, None), (1e-3, "cosine"), (2e-3, "cosine")) if recipes else ():
        other = {"lr": lr, "decay": decay}
        name = f"edm, lr {lr:g}" + (", cosine decay" if decay else "")
        record(Cell("EDM"), train([Cell("EDM")], data, **how | other), name, **other)
    about = {"n": len(train_images), "size": train_images.shape[-1], "test": len(test), "levels": LEVELS}
    variance = float(train_images.double().var(0).mean())
    about |= {"parameters": sum(a[0].numel() for a in state.values()), "variance": variance}
    about |= {name: how[name] for name in ("channels", "steps", "batch", "lr", "ema", "bf16")}
    return about | {"device": str(train_images.device.type), "seconds": time.monotonic() - began, "rows": rows}


def tables(results: dict[str, object]) -> dict[str, str]:
    """Return the tables of the page in Markdown by name."""
    rows: list[dict] = results["rows"]  # type: ignore[assignment]
    error = {(r["process"], r["target"]): np.array(r["error"]) for r in rows if not r["name"]}
    present = [p for p in PROCESSES if (p, "edm") in error]

    def line(*cells: str) -> str:
        return f"| {' | '.join(cells)} |"

    def over_edm(process: str, e: np.ndarray) -> str:
        return f"{np.exp(np.log(e / error[process, 'edm']).mean()):.2f}"

    kind = "{parameters:,} parameters, n = {n:,} images of {size}×{size}, {steps:,} steps of {batch}, lr {lr:g}".format(
        **results
    )
    ratios = [line("target", *present), line(*["---"] * (len(present) + 1))]
    ratios += [line(target, *(over_edm(p, error[p, target]) for p in present)) for target in TARGETS]
    levels = [line("", *(f"σ/α = {r:g}" for r in LEVELS), "over `edm`"), line(*["---"] * (len(LEVELS) + 2))]
    shown = [(f"{p}, edm", p, error[p, "edm"]) for p in present]
    shown += [(f"{r['process']}, {r['name']}", r["process"], np.array(r["error"])) for r in rows if r["name"]]
    levels += [line(name, *(f"{v:.4f}" for v in e), over_edm(p, e)) for name, p, e in shown]
    setting = f"U-Net of {kind}; variance of a pixel {results['variance']:.2f}; {results['test']} test images.\n"
    return {"setting": setting, "ratios": "\n".join([*ratios, ""]), "levels": "\n".join([*levels, ""])}


def block(name: str) -> re.Pattern[str]:
    """Return the pattern of what the page has between the two comments of a table."""
    return re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", action="store_true", help="only write the tables from results.json")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--data", type=Path, default=FASHION, help="folder of Fashion-MNIST")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--n", type=int, default=8192)
    parser.add_argument("--size", type=int, default=28)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--channels", type=int, nargs="+", default=[32, 64, 64])
    parser.add_argument("--chunk", type=int, default=1, help="cells trained at once on a CPU")
    parser.add_argument("--processes", nargs="+", default=list(PROCESSES))
    parser.add_argument("--no-recipes", action="store_true", help="without other learning rates")
    given = parser.parse_args()
    if not given.page:
        both = [x.to(given.device) for x in images(given.data, given.n, given.size)]
        default = vk.models.UNet()
        how = {"channels": tuple(given.channels), "steps": given.steps, "batch": given.batch, "chunk": given.chunk}
        how |= {"lr": default.lr, "ema": default.ema, "bf16": given.device == "cuda"}
        cells = [cell for cell in CELLS if cell.process in given.processes]
        write(given.results, json.dumps(run(cells, *both, recipes=not given.no_recipes, **how), indent=1))
    if given.results == RESULTS:
        text = PAGE.read_text()
        for name, table in tables(json.loads(RESULTS.read_text())).items():
            text = block(name).sub(lambda _, table=table: table, text)
        write(PAGE, text)


if __name__ == "__main__":
    main()
