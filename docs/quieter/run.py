"""Train U-Nets with noisy, quieter and exact targets, and write docs/quieter_targets.md.

``python docs/quieter/run.py --device cuda`` trains twins with J1, JK(8) and J0 on the first 1,024 and on all images of
Fashion-MNIST and measures, at several steps, the variance of the gradient, the error on test images and the share of
samples that are copies; it writes ``results.json`` beside this file and the page. ``--page`` only writes the page from
``results.json``. ``--n 64 --size 8 --steps 100 --channels 8 8 --members 2 --tests 16`` is a small form for a CPU."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import jinja2
import torch
from torch import Tensor
from torch.nn import functional as F

import vkernel as vk
from vkernel.core.files import write
from vkernel.metrics.copies import Reference
from vkernel.reports.html import significant
from vkernel.train.models.step import gradient
from vkernel.train.objectives import Training

HERE = Path(__file__).parent
PAGE, RESULTS = HERE.parent / "quieter_targets.md", HERE / "results.json"
FASHION = Path("/usr/share/datasets/fashion-mnist")  # of Debian's dataset-fashion-mnist
OBJECTIVES = {"J1": vk.J1(), "JK(8)": vk.JK(8), "J0": vk.J0()}
LEVELS = (0.3, 1.0, 4.0, 16.0)  # σ, at which errors and the variance of gradients are measured
SHARE = 16  # the first snapshot is taken after this part of the steps
BATCHES = 16  # from which the variance of a gradient is estimated
PROCESS = vk.EDM()


def images(folder: Path, size: int, device: str, tests: int) -> tuple[Tensor, Tensor]:
    """Return the training images and some test images of Fashion-MNIST, in [-1, 1]."""
    both = (vk.load(next(folder.glob(f"{part}-images-idx3-ubyte*"))) for part in ("train", "t10k"))
    small = (F.interpolate(x[:].float(), (size, size), mode="area") for x in both)
    train, test = (x.to(device) for x in small)
    return train, test[:tests]


def snapshots(steps: int) -> list[int]:
    """Return the steps at which networks are measured: doublings up to the last."""
    return sorted({max(1, steps // 2**k) for k in range(int(math.log2(SHARE)) + 1)})


def errors(ensemble: vk.Ensemble, test: Tensor) -> Tensor:
    """Return |D(x) - x0|²/d at every level, ``(members, levels)``."""
    found = []
    for sigma in LEVELS:
        x = PROCESS.perturb(test, sigma, generator=1)
        D = x + sigma**2 * ensemble(x, sigma)
        found.append((D - test).square().flatten(1).mean(1))
    return torch.stack(found, 1).double().cpu()


def copies(ensemble: vk.Ensemble, reference: Reference, samples: int) -> Tensor:
    """Return the number of copies among the samples of every member, ``(members,)``."""
    x = ensemble.sample(samples, steps=20, method="multistep", spacing="edm", seed=0)
    near = reference.copies(x.flatten(0, 1))
    return (near.ratio < near.threshold).reshape(x.shape[:2]).sum(1)


def gradients(
    model: vk.models.UNet, state: dict[str, Tensor], data: vk.Empirical, sigma: float | None
) -> Iterator[Tensor]:
    """Yield the gradients ``(objectives, parameters)`` of one network for independent batches, with the same inputs for
    all objectives; at one noise level, or with the times of training."""
    times = model.defaults(PROCESS)[1] if sigma is None else lambda u: torch.full_like(u, sigma)
    training = Training(data, PROCESS, "J1", None, seed=1, times=times, dtype=torch.float32)
    for k in range(BATCHES):
        drawn = training.batches(list(OBJECTIVES.values()), [0], model.batch, k * model.batch)
        each = []
        for x, t, m in drawn:
            parts = *model.inputs(x, t, PROCESS), model.training_target(m, x, t, PROCESS), model.omega(t, PROCESS)
            slopes = gradient(model.loss, state, [a[0].float() for a in parts])
            each.append(torch.cat([slope.flatten() for slope in slopes]))
        yield torch.stack(each)


def noise(model: vk.models.UNet, ensemble: vk.Ensemble, data: vk.Empirical, sigma: float | None) -> Tensor:
    """Return tr Var[gradient of a batch] of every objective, ``(members, objectives)``."""
    found = []
    for m in range(len(ensemble)):
        state, count = {name: p[m] for name, p in ensemble.state.items()}, 0
        for g in gradients(model, state, data, sigma):  # Welford's running form
            count += 1
            if count == 1:
                mean, total = g.clone(), g.new_zeros(len(g))
            else:
                shift = g - mean
                mean += shift / count
                total += (shift * (g - mean)).sum(1)
        found.append(total / (count - 1))
    return torch.stack(found).double().cpu()


def run(train: Tensor, test: Tensor, model: vk.models.UNet, members: int, samples: int) -> dict[str, object]:
    """Train twins on ``train`` and return what was measured."""
    data, marks, began = vk.Empirical(train), snapshots(model.steps), time.monotonic()
    trained = vk.train_ensembles(model, data, PROCESS, list(OBJECTIVES.values()), members=members, snapshots=marks)
    reference, rows = Reference(data, vk.Empirical(test), "pixels", len(test), 0), []
    for name, ensemble in zip(OBJECTIVES, trained, strict=True):
        for step in marks:
            at = ensemble.snapshots[step]
            row = {"objective": name, "step": step, "error": errors(at, test).tolist()}
            rows.append(row | {"copies": copies(at, reference, samples).tolist()})
    variance = [
        {"sigma": sigma, "step": step, "variance": noise(model, trained[0].snapshots[step], data, sigma).tolist()}
        for step in (marks[0], marks[-1])
        for sigma in (None, *LEVELS)
    ]
    about = {"n": len(train), "size": train.shape[-1], "members": members, "samples": samples, "tests": len(test)}
    about |= {"steps": model.steps, "batch": model.batch, "device": train.device.type}
    about["parameters"] = sum(p[0].numel() for p in trained[0].state.values())
    sigma, how = torch.tensor(LEVELS, dtype=torch.float64), {"generator": 0}
    about["rho"] = vk.noise_fraction(data, PROCESS, sigma, **how).value.tolist()
    about["share"] = vk.network_noise_fraction(model, data, PROCESS, sigma, **how).value.tolist()
    return about | {"rows": rows, "variance": variance, "seconds": time.monotonic() - began}


def interval(values: Tensor, digits: int = 3) -> str:
    """Return the mean over members with its 95 % interval."""
    found = vk.Estimate.of_mean(values)
    ends = (significant(float(v), digits) for v in (found.value, found.low, found.high))
    return "{} ({} to {})".format(*ends)


class Table:
    """The numbers of one training set, as the page writes them."""

    def __init__(self, held: dict) -> None:
        self.held = held

    def error(self, objective: str, level: int, step: int) -> str:
        """Return the test error at a level, and for objectives other than J1 its ratio to that of the twins."""
        own, usual = (self._rows(name, step) for name in (objective, "J1"))
        if objective == "J1":
            return significant(float(own[:, level].mean()), 3)
        return "×" + interval(own[:, level] / usual[:, level])

    def copied(self, objective: str, step: int) -> str:
        """Return the share of samples that are copies, with Wilson's interval."""
        row = self._row(objective, step)
        found = vk.Estimate.of_share(sum(row["copies"]), len(row["copies"]) * self.held["samples"])
        return f"{100 * found.value:.1f} % ({100 * found.low:.1f} to {100 * found.high:.1f})"

    def more(self, objective: str, step: int) -> str:
        """Return the share of copies less that of the twins with J1, and in how many of the pairs it is larger."""
        own, usual = (torch.tensor(self._row(o, step)["copies"], dtype=torch.float64) for o in (objective, "J1"))
        gap = 100 * (own - usual) / self.held["samples"]
        return f"{interval(gap, 2)} points, more in {int((gap > 0).sum())} of {len(gap)} pairs"

    @property
    def copying(self) -> bool:
        """Whether some network made copies."""
        return any(sum(row["copies"]) for row in self.held["rows"])

    def quieter(self, objective: str, sigma: float | None, step: int) -> str:
        """Return tr Var[gradient] over that with J1, with its interval over members."""
        found = next(v for v in self.held["variance"] if (v["sigma"], v["step"]) == (sigma, step))
        values = torch.tensor(found["variance"], dtype=torch.float64)
        return interval(values[:, list(OBJECTIVES).index(objective)] / values[:, 0])

    @property
    def steps(self) -> list[int]:
        """The steps at which networks were measured."""
        return sorted({row["step"] for row in self.held["rows"]})

    def _row(self, objective: str, step: int) -> dict:
        return next(r for r in self.held["rows"] if (r["objective"], r["step"]) == (objective, step))

    def _rows(self, objective: str, step: int) -> Tensor:
        return torch.tensor(self._row(objective, step)["error"], dtype=torch.float64)


def page(results: dict) -> str:
    """Return the text of the page."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, trim_blocks=True)
    cost = json.loads((HERE / "cost.json").read_text(encoding="utf-8"))
    about = {"tables": [Table(held) for held in results["sets"]], "levels": LEVELS, "objectives": list(OBJECTIVES)}
    about |= {"cost": cost["runs"], "engine": cost["engine"]["rows"], "batches": BATCHES}
    return environment.from_string((HERE / "page.md.j2").read_text(encoding="utf-8")).render(about)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", action="store_true", help="only write the page from results.json")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--data", type=Path, default=FASHION, help="folder of Fashion-MNIST")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--n", type=int, nargs="+", default=[1024, 60_000])
    parser.add_argument("--size", type=int, default=28)
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--channels", type=int, nargs="+", default=[32, 64, 64])
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--tests", type=int, default=512)
    given = parser.parse_args()
    if not given.page:
        train, test = images(given.data, given.size, given.device, given.tests)
        model = vk.models.UNet(tuple(given.channels), steps=given.steps, batch=given.batch, bf16=given.device == "cuda")
        sets = []
        for n in given.n:  # what is done is kept if the rest is not
            sets.append(run(train[:n], test, model, given.members, given.samples))
            write(given.results, json.dumps({"sets": sets}, indent=1))
            print(f"n = {n:,}: {sets[-1]['seconds']:.0f} s", flush=True)
    if given.results == RESULTS:
        write(PAGE, page(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
