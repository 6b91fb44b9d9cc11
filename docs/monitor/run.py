"""The numbers of docs/howto/monitor.md on false alarms and on the estimate of the onset of copies.

``python docs/monitor/run.py alarms`` trains networks on images that are neither in the training nor in the held-out
images of the probe, so that every alarm is false; ``onsets`` trains networks until they copy; ``heavy`` draws errors
from laws with heavy tails. Each writes its part of ``docs/monitor/results.json``; ``page`` writes the section of the
page alone. On one core, ``alarms`` takes about a quarter of an hour, ``onsets`` an hour, ``heavy`` a few minutes."""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

import vkernel as vk
from vkernel.core import rng
from vkernel.core.estimate import Estimate, relative_change
from vkernel.reports.monitor import Evaluation
from vkernel.reports.monitor.alarm import DELTA, gaps, level
from vkernel.reports.monitor.onset import arrival
from vkernel.reports.monitor.probe import Probe

RESULTS = Path(__file__).with_name("results.json")
PAGE = Path(__file__).parents[1] / "howto" / "monitor.md"
CPU = torch.device("cpu")
SEEN, UNSEEN = (16, 256), (16, 64, 256)  # images that are trained on; "training" images of the probe, never seen
HALF_OCTAVES, QUARTERS = 0.5, 0.25


def steps_up_to(last: int, first: int, octaves: float) -> tuple[int, ...]:
    """Return steps from ``first`` to ``last`` at equal ratios."""
    count = int(math.log2(last / first) / octaves)
    return tuple(dict.fromkeys(round(first * 2 ** (k * octaves)) for k in range(count + 1)))


def record(step: int, probe: Probe, score: vk.Score) -> Evaluation:
    """Return an evaluation without samples."""
    return Evaluation.of(step, probe.errors(lambda labels: score, CPU), None, "network", 0.0, 0.0, (0.0, 0.0))


def alarms(
    members: int = 156, steps: int = 1000, width: int = 64, seen: Sequence[int] = SEEN
) -> list[dict[str, object]]:
    """Return for each run the sizes of its sets and the step of its (false) alarm. A member is a run of its own, with
    its own training and held-out images of the probe, which are drawn from the images that no member is trained on."""
    pool, process, found = vk.data.digits(), vk.VPSong(), []
    for n in seen:
        order = torch.randperm(pool.n, generator=rng.stream(n, "monitor, images that are seen"))
        data, others = pool.subset(order[:n]), order[n:]
        model = vk.models.MLP(width, 2, steps=steps, target="x0", batch=32)
        snapshots = steps_up_to(steps - 1, 4, HALF_OCTAVES)
        ensemble = vk.train_ensemble(model, data, process, members=members, snapshots=snapshots, seed=n)
        stages = [*ensemble.snapshots.items(), (steps, ensemble)]
        for m in range(members):
            size = UNSEEN[m % len(UNSEEN)]
            drawn = others[torch.randperm(len(others), generator=rng.stream(m, "monitor, images that are not seen"))]
            probe = Probe(pool.subset(drawn[:size]), pool.subset(drawn[size : size + 256]), process, samples=0, seed=m)
            every = gaps([record(step, probe, stage[m]) for step, stage in stages])
            raised = next((g.step for g in every if g.alarm), None)
            found.append({"seen": n, "unseen": size, "alarm": raised, "shift": round(probe.shift, 4)})
    return found


def heavy(runs: int = 600, evaluations: int = 20) -> list[dict[str, object]]:
    """Return the rate of false alarms for errors exp(s z) of images, z Gaussian: s = 1 has a standard deviation 1.3
    times the mean. The logarithm of an image's error is a random walk over evaluations, on top of its difficulty."""
    found = []
    for spread in (0.3, 0.6, 1.0):
        for size in UNSEEN:
            g, hits = rng.stream(size, f"monitor, heavy tails {spread}"), 0
            for _ in range(runs):
                sets = {}
                for name, count in (("train", size), ("test", 256)):
                    walk = 0.3 * torch.randn(evaluations, count, generator=g, dtype=torch.float64).cumsum(0)
                    easy = torch.randn(count, generator=g, dtype=torch.float64)
                    sets[name] = (spread * (easy + walk / math.sqrt(1 + 0.09 * evaluations)) / 1.2).exp()
                hits += _alarmed(sets)
            found.append({"spread": spread, "unseen": size, "runs": runs, "alarms": hits})
    return found


def _alarmed(sets: dict[str, Tensor]) -> bool:
    train, test = sets["train"], sets["test"]
    for k in range(1, len(test) + 1):
        now, then = (train[k - 1], test[k - 1]), (train[0], test[0])
        pairs = [(now[1], now[0])] + ([(now[1] - then[1], now[0] - then[0])] if k > 1 else [])
        if any(relative_change(a, b, now[1], level(k) / 2).low > DELTA for a, b in pairs):
            return True
    return False


# n, width, members, steps, target, kind: the seed is the row
ONSETS = (
    (16, 128, 8, 4000, "x0", "mlp"),
    (16, 128, 8, 8000, "noise", "mlp"),
    (32, 128, 8, 10000, "x0", "mlp"),
    (16, 16, 3, 3000, "edm", "unet"),
    (32, 192, 8, 8000, "v", "mlp"),
    (16, 64, 8, 6000, "x0", "mlp"),
    (64, 128, 8, 16000, "x0", "mlp"),
    (24, 192, 8, 6000, "edm", "mlp"),
    (32, 16, 3, 5000, "edm", "unet"),
    (48, 128, 8, 16000, "v", "mlp"),
    (32, 64, 8, 16000, "x0", "mlp"),
    (64, 16, 4, 6000, "edm", "unet"),
)


def onsets(rows: Sequence[tuple[int, int, int, int, str, str]] = ONSETS) -> list[dict[str, object]]:
    """Return for each run its steps, r_j, j and the numbers of copies, and the step of the alarm."""
    found, process = [], vk.VP()
    for seed, (n, width, members, steps, target, kind) in enumerate(rows, 1):
        data, test = vk.data.images("digits", n, 256, seed=seed)
        probe, snapshots = Probe(data, test, process, seed=seed), steps_up_to(steps - 1, 60, QUARTERS)
        options = {"steps": steps, "target": target, "batch": 64, "ema": None}
        model = vk.models.MLP(width, 3, **options) if kind == "mlp" else vk.models.UNet((width, width), 1, **options)
        ensemble = vk.train_ensemble(model, data, process, members=members, snapshots=snapshots, seed=seed)
        stages = [*ensemble.snapshots.items(), (steps, ensemble)]
        for m in range(members):
            ratios, others = [], probe.held_ratios
            for _, stage in stages:
                samples = probe.samples(lambda labels, score=stage[m]: score, CPU)
                ratios.append(probe.nearest(samples, CPU)[0].nan_to_num(1.0).sort().values)
            held = Estimate.of_share(int((others < 1 / 3).sum()), len(others))
            every = gaps([record(step, probe, stage[m]) for step, stage in stages])
            raised = next((g.step for g in every if g.alarm), None)
            found.append(summary(n, width, target, kind, [s for s, _ in stages], torch.stack(ratios), held, raised))
    return found


def summary(
    n: int, width: int, target: str, kind: str, steps: list[int], ratios: Tensor, held: Estimate, raised: int | None
) -> dict[str, object]:
    """Return what is kept of a run: ``ratios (stages, N)`` are sorted."""
    count = ratios.shape[1]
    j = next(j for j in range(1, count) if Estimate.of_share(j, count).low > held.high)
    copied = (ratios < 1 / 3).sum(1).tolist()
    onset = next((step for step, c in zip(steps, copied, strict=True) if c >= j), None)
    near = [round(float(v), 4) for v in ratios[:, j - 1]]
    about: dict[str, object] = {"n": n, "width": width, "target": target, "kind": kind, "j": j, "alarm": raised}
    return about | {"onset": onset, "steps": steps, "ratio": near, "copies": copied}


def forecasts(runs: Sequence[dict[str, object]], stride: int = 1) -> Iterator[tuple[int, float, float, float, float]]:
    """Yield run, value and ends of every estimate before the onset, and the onset over the value; ends are relative to
    the onset: an interval holds it if the low end is at most 1 and the high end at least the last step before it."""
    for number, run in enumerate(runs):
        steps = torch.tensor(run["steps"], dtype=torch.float64)[::stride]
        ratio = torch.tensor(run["ratio"], dtype=torch.float64)[::stride]
        below = (torch.tensor(run["copies"])[::stride] >= run["j"]).nonzero().flatten()
        last = int(below[0]) if len(below) else len(steps)
        for k in range(1, last + 1):
            found = arrival(steps[:k], ratio[:k], 1 / 3)
            if found.value is None:
                continue
            onset = float(steps[last]) if len(below) else math.inf
            before = float(steps[last - 1])
            held = float(found.low <= onset and found.high >= before)
            yield number, found.value, held, onset / found.value, onset / float(steps[k - 1])


def accuracy(runs: Sequence[dict[str, object]], stride: int = 1) -> dict[str, float]:
    """Return how good estimates are: shares within a factor 2 and covered, of all estimates and of the first of a run;
    runs that ended without copies count as wrong only if the interval ended before they did."""
    every = list(forecasts(runs, stride))
    known = [f for f in every if math.isfinite(f[3])]
    first = {f[0]: f for f in reversed(known)}
    within = [0.5 <= f[3] <= 2 for f in known]
    return {
        "runs": len(runs),
        "with copies": sum(run["onset"] is not None for run in runs),
        "runs with an estimate": len(first),
        "estimates": len(known),
        "within a factor 2": sum(within) / max(len(known), 1),
        "covered": sum(f[2] for f in known) / max(len(known), 1),
        "first within a factor 2": sum(0.5 <= f[3] <= 2 for f in first.values()) / max(len(first), 1),
        "median onset / step of the first": float(torch.tensor([f[4] for f in first.values()] or [math.nan]).median()),
        "estimates of runs without copies": len(every) - len(known),
        "of these, wrong": sum(not f[2] for f in every if not math.isfinite(f[3])),
    }


def tested() -> str:
    """Return the section of the page that states these numbers."""
    held = json.loads(RESULTS.read_text())
    false, heavy = held["alarms"], held["heavy"]
    rate = Estimate.of_share(sum(run["alarm"] is not None for run in false), len(false))
    drawn, count = sum(row["alarms"] for row in heavy), sum(row["runs"] for row in heavy)
    copied = [run for run in held["onsets"] if run["onset"] is not None]
    early = sum(run["alarm"] is not None and run["alarm"] < run["onset"] for run in copied)
    ahead = torch.tensor([run["onset"] / run["alarm"] for run in copied if run["alarm"]]).median()
    columns = ("networks", "runs with copies", "with an estimate", "estimates", "within a factor 2")
    columns += ("in the 90 % interval", "first estimate within a factor 2", "onset step / step of it")
    images = ", ".join(map(str, UNSEEN))
    lines = [
        f"*False alarms.* {len(false)} MLPs were trained on {' or '.join(map(str, SEEN))} digits, and watched with "
        f'{images} "training" images that they never saw: {round(rate.value * len(false))} alarms (Wilson interval of '
        f"the rate: {100 * rate.low:.1f} to {100 * rate.high:.1f} %). Of {count:,} runs whose errors were drawn from "
        f"laws with heavy tails, {drawn} had an alarm.",
        "",
        f"*Alarm and onset.* {len(held['onsets'])} networks were trained on 16 to 64 digits; copies appeared in "
        f"{len(copied)} of them within the run. The alarm came first in {early} of these, at a step {float(ahead):.0f} "
        "times smaller (median). The others had an alarm too, and did not copy yet.",
        "",
        "*Estimates of the onset*, at evaluations before it:",
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]
    for kind, name in (("mlp", "MLPs"), ("unet", "U-Nets")):
        found = accuracy([run for run in held["onsets"] if run["kind"] == kind])
        shares = (found[key] for key in ("within a factor 2", "covered", "first within a factor 2"))
        cells = [name, found["with copies"], found["runs with an estimate"], found["estimates"]]
        cells += [f"{100 * share:.0f} %" for share in shares]
        lines.append("| " + " | ".join(map(str, [*cells, f"{found['median onset / step of the first']:.1f}"])) + " |")
    rest = accuracy(held["onsets"])
    lines += [
        "",
        f"In runs that ended without copies there were {rest['estimates of runs without copies']} estimates, of which "
        f"{rest['of these, wrong']} had an interval that ended before the run. The rule "
        "was chosen with the help of these runs; the U-Nets on 64 digits were trained after that. Its limit of twice "
        "the present step was three times until [a run on 1,024 images](../three_runs.md) had estimates 2.3 to 2.6 "
        "times too late; the numbers above are with the new limit.",
    ]
    return "\n".join(lines)


def write_page() -> None:
    """Write the section into the page."""
    start, end = "<!-- tested -->\n", "\n<!-- /tested -->"
    before, rest = PAGE.read_text().split(start)
    PAGE.write_text(before + start + tested() + end + rest.split(end.strip("\n"), 1)[1])


def save(name: str, values: object) -> None:
    """Add a part to the results."""
    held = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(held | {name: values}, indent=None, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for part in sys.argv[1:] or ("alarms", "heavy", "onsets"):
        if part != "page":
            save(part, {"alarms": alarms, "heavy": heavy, "onsets": onsets}[part]())
    write_page()
