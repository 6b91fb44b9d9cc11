"""Three runs on Fashion-MNIST under the monitor, and the page docs/three_runs.md about them.

``python docs/monitor/worked.py train 256 1024 8192`` trains a U-Net on as many images each, side by side, watched by
monitors, and writes what the monitors reported to ``worked/256.json``, … beside this file, with pictures of the closest
samples (``--folder`` for another place). Training steps are CUDA graphs where there is a GPU; ``--size 8 --channels 32
64 --steps 30000`` is a form for one core of a CPU. ``page`` writes the page and its figure from the files."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import vkernel as vk
from vkernel.core.errors import require
from vkernel.core.files import write, write_json
from vkernel.plots.base import save
from vkernel.plots.curves import panel, panel_grid
from vkernel.reports.monitor.record import plain
from vkernel.reports.monitor.result import RunReport

HERE = Path(__file__).parent
PAGE, FOLDER = HERE.parent / "three_runs.md", HERE / "worked"
FIGURE = HERE.parent / "_static" / "three_runs.png"
PROCESS = vk.EDM()
SIGMA_DATA = 0.5
NAMES = {"train": "training images", "test": "held-out images"}
MARKS = {"alarm": "alarm", "copying": "copies appear"}


def raw(model: vk.models.UNet, network: Callable[..., Tensor], x: Tensor, sigma: Tensor) -> Tensor:
    """Evaluate the network F of EDM."""
    z, e = model.inputs(x[None], sigma[None], PROCESS)
    return network(z[0], e[0])


def scales(sigma: Tensor) -> tuple[Tensor, Tensor]:
    """c_skip and c_out of the denoiser D = c_skip x + c_out F, for images."""
    var = sigma.square()[:, None, None, None]
    total = var + SIGMA_DATA**2
    return SIGMA_DATA**2 / total, SIGMA_DATA * (var / total).sqrt()


def denoiser(
    model: vk.models.UNet, network: nn.Module, x: Tensor, sigma: Tensor, labels: Tensor | None = None
) -> Tensor:
    """Evaluate the denoiser D(x, σ), as the monitor calls it."""
    c_skip, c_out = scales(sigma)
    return c_skip * x + c_out * raw(model, network, x, sigma)


class Run:
    """A training run on n images, on a stream of its own, and its monitor."""

    def __init__(
        self, n: int, folder: Path, batch: int, size: int, every: int, budget: float, channels: Sequence[int]
    ) -> None:
        self.model = vk.models.UNet(tuple(channels))
        self.n, self.logs, cuda = n, folder / f"log-{n}", torch.cuda.is_available()
        torch.manual_seed(n)
        data, test = vk.data.images("fashion", n, 512, size=size)
        self.images = data[:].to("cuda" if cuda else "cpu")
        self.network, self.ema = (self.model.module(data.shape).to(self.images.device) for _ in range(2))
        self.ema.load_state_dict(self.network.state_dict())
        self.optimiser = torch.optim.Adam(self.network.parameters(), 1e-3, capturable=cuda)
        self.fast = torch.compile(self.network) if cuda else self.network
        self.batch, (self.low, self.high) = batch, (math.log(r) for r in PROCESS.ratios)
        # graphs that take random numbers from one generator share the memory of its state, across streams too
        self.random = torch.Generator(self.images.device).manual_seed(n)
        shutil.rmtree(self.logs, ignore_errors=True)
        given = {"every": every, "budget": budget, "log": self.logs, "forward": partial(denoiser, self.model)}
        self.monitor = vk.Monitor(data, PROCESS, test, predicts="x0", range=(-1, 1), **given)
        self.stream = torch.cuda.Stream() if cuda else contextlib.nullcontext()
        self.graph = self.recorded() if cuda else None

    def step(self) -> None:
        """Take one training step."""
        device, count = self.images.device, (self.batch,)
        random = {"generator": self.random, "device": device}
        x0 = self.images[torch.randint(self.n, count, **random)]
        sigma = torch.randn(count, **random).mul(1.2).sub(1.2).clamp(self.low, self.high).exp()  # EDM's
        x, (c_skip, c_out) = x0 + sigma[:, None, None, None] * torch.randn(x0.shape, **random), scales(sigma)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            out = raw(self.model, self.fast, x, sigma)
        loss = (out.float() - (x0 - c_skip * x) / c_out).square().mean()
        self.optimiser.zero_grad(set_to_none=False)
        loss.backward()
        self.optimiser.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(self.ema.parameters()), list(self.network.parameters()), 0.001)

    def recorded(self) -> torch.cuda.CUDAGraph:
        """Return a step as a CUDA graph, after three that are taken as they are."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                self.step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.random)
        with torch.cuda.graph(graph, stream=self.stream):
            self.step()
        return graph

    def advance(self, k: int) -> None:
        """Let the monitor look, then take step k."""
        with self.stream if self.graph is None else torch.cuda.stream(self.stream):
            self.monitor(k, self.network, self.ema)
            self.step() if self.graph is None else self.graph.replay()


def train(sizes: list[int], steps: int, folder: Path, seconds: float, **how: Any) -> None:
    """Train on so many images each, side by side, and write what the monitors said."""
    runs, began = [Run(n, folder, **how) for n in sizes], time.monotonic()
    for k in range(steps + 1):
        for run in runs:
            run.advance(k)
        if k % 50 == 0:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # the CPU is not far ahead, so that times are those of the steps
            if time.monotonic() - began > seconds:
                break
    about = {"steps": k, "seconds": time.monotonic() - began, "device": runs[0].images.device.type} | how
    for run in runs:
        run.monitor.evaluate(k, run.network, run.ema)
        run.monitor.close()
        parameters = sum(p.numel() for p in run.network.parameters())
        write_json(folder / f"{run.n}.json", plain({"n": run.n, "parameters": parameters} | about | said(run.logs)))
        print(run.n, run.monitor, flush=True)


def said(logs: Path) -> dict[str, Any]:
    """Return what a monitor said at every evaluation, from its log."""
    report, rows = RunReport.read(logs), []
    setting = report.run.setting
    for record, verdict in zip(report.run.records, report.verdicts, strict=True):
        gap, due, drawn = verdict.gap, verdict.forecast, record.drawn
        rows.append(
            {
                "step": record.step,
                "state": verdict.state,
                "train": [float(v) for v in record.train.stack()],
                "test": [float(v) for v in record.test.stack()],
                "gap": None if gap is None else [gap.gap, gap.gap_low, gap.change, gap.change_low],
                "copies": None if drawn is None else [float(v) for v in drawn.copies(setting.threshold).stack()],
                "expected": None if due.value is None else [due.value, due.low, due.high],
                "picture": "" if drawn is None else drawn.picture,
                "cost": record.spent / record.wall if record.wall else None,
            }
        )
    last = report.verdicts[-1]
    held = [float(v) for v in setting.held_share.stack()]
    return {"alarm": last.alarm, "copying": last.copying, "held": held, "rows": rows}


def results(folder: Path) -> list[dict[str, Any]]:
    """Return what the monitors said, by the number of training images."""
    return sorted((json.loads(path.read_text()) for path in folder.glob("*.json")), key=lambda run: run["n"])


def told(run: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the evaluations that the page shows: some at equal distances, and the first of everything."""
    rows, shown = run["rows"], {0, len(run["rows"]) - 1}
    shown |= {k for k, row in enumerate(rows) if row["step"] in (run["alarm"], run["copying"])}
    shown |= {[row["state"] for row in rows].index(state) for state in {row["state"] for row in rows}}
    estimates = [k for k, row in enumerate(rows) if row["expected"]]
    shown |= {*estimates[:1], *estimates[-1:], *(round(len(rows) * part) for part in (0.25, 0.5, 0.75))}
    return [rows[k] for k in sorted(shown) if k < len(rows)]


def percent(values: list[float] | None) -> str:
    return "–" if not values else "{:.1f} % ({:.1f} to {:.1f})".format(*(100 * v for v in values))


def passes(run: dict[str, Any], step: int | None) -> str:
    return "–" if step is None else f"{step * run['batch'] / run['n']:,.0f}"


def better(row: dict[str, Any]) -> str:
    """By how much training images are better, and the lower bound of the larger of D and G."""
    gap, gap_low, change, change_low = (-math.inf if v is None else v for v in row["gap"] or [None] * 4)
    value, low = (change, change_low) if change_low > gap_low else (gap, gap_low)
    return f"{100 * value:.0f} % ({100 * low:.0f} %)" if math.isfinite(low) else "–"


def expected(row: dict[str, Any]) -> str:
    return "–" if not row["expected"] else "{:,.0f} ({:,.0f} to {:,.0f})".format(*row["expected"])


def forecasts(run: dict[str, Any]) -> str:
    """Return a sentence on the estimates that were made before copies appeared."""
    made = [row for row in run["rows"] if row["expected"] and row["step"] < run["copying"]]
    if not made:
        return "No estimate of their step was given before."
    ratios = [row["expected"][0] / run["copying"] for row in made]
    covered = sum(row["expected"][1] <= run["copying"] <= row["expected"][2] for row in made)
    at, value = made[0]["step"], made[0]["expected"][0]
    first = f"The first of {len(made)} estimates of their step, at {at:,}, was {value:,.0f}"
    within = sum(0.5 <= ratio <= 2 for ratio in ratios)
    return f"{first}; {within} were within a factor 2, and {covered} of the 90 % intervals held the step."


def page(runs: list[dict[str, Any]]) -> str:
    """Return the text of the page."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, trim_blocks=True)
    names = [f"{run['n']:,}" for run in runs]
    listed = ", ".join(names[:-1]) + " and " * (len(names) > 1) + names[-1]
    about = {"runs": runs, "first": runs[0], "sizes": listed}
    about |= {"told": told, "passes": passes, "share": percent, "gap": better, "expected": expected}
    about |= {"forecasts": forecasts, "thousands": "{:,}".format, "when": lambda k: "none" if k is None else f"{k:,}"}
    about["copied"] = lambda run: percent(next(row["copies"] for row in reversed(run["rows"]) if row["copies"]))
    return environment.from_string((HERE / "worked.md.j2").read_text(encoding="utf-8")).render(about)


def figure(runs: list[dict[str, Any]]) -> Figure:
    """Draw errors, and below them copies, of every run against steps."""
    errors, copies = [], []
    for run in runs:
        rows = [row for row in run["rows"] if row["step"] > 0]
        drawn, title = [row for row in rows if row["copies"]], f"{run['n']:,} images"
        curves = {name: np.array([row[key] for row in rows]).T for key, name in NAMES.items()}
        shares = {"copies among samples": 100 * np.array([row["copies"] for row in drawn]).T}
        marks = {name: float(run[key]) for key, name in MARKS.items() if run[key]}
        held = {"copies among held-out images": tuple(100 * v for v in run["held"][1:])}
        steps = [[row["step"] for row in some] for some in (rows, drawn)]
        errors.append(
            panel(
                "training_error",
                steps[0],
                curves,
                title=title,
                marks=marks,
                log="xy",
                ylabel="error / linear denoiser's",
            )
        )
        copies.append(panel("training_copies", steps[1], shares, title=title, levels=held, marks=marks, log="x"))
    return panel_grid([*errors, *copies])


def write_page(folder: Path) -> None:
    """Write the page and its figure."""
    runs = results(folder)
    require(runs, f"There are no results in {folder}; train first.")
    write(PAGE, page(runs))
    save(figure(runs), FIGURE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "page"])
    parser.add_argument("sizes", type=int, nargs="*", default=[256, 1024, 8192], help="numbers of training images")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    for name, value in {"steps": 45_000, "batch": 64, "every": 500, "size": 28}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--channels", type=int, nargs="+", default=[32, 64, 64], help="of the U-Net, one a level")
    parser.add_argument("--budget", type=float, default=0.05)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so long")
    given = vars(parser.parse_args())
    what, folder = given.pop("what"), given.pop("folder")
    if what == "train":
        train(folder=folder, **given)
    else:
        write_page(folder)


if __name__ == "__main__":
    main()
