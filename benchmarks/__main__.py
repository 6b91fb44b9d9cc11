"""All benchmarks of this machine, one command, one report; ``make bench``.

``python -m benchmarks [--quick] [--device cpu|cuda|all] [--only NAME …] [--out FOLDER] [--render]``. Runs what the
machine can run (the CPU always, a GPU where there is one), keeps the numbers in ``results/cpu.json`` and
``results/gpu.json``, and writes ``REPORT.md`` with its ``plots``. ``--render`` only writes the report again, from the
numbers that are there: those of another machine may be copied in. ``--quick`` takes a minute, for a look, and writes
into ``out/benchmarks`` so that it does not replace a full run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import accuracy, curves, ensembles, theories, theories_direct
from benchmarks.report import render
from benchmarks.results import HERE, QUICK, into
from vkernel.core.progress import Reporter, progress

Report = Callable[[str], None]
Work = Callable[[Report], object]


def works(device: str, quick: bool) -> dict[str, tuple[int, Work]]:
    """The benchmarks of a device by name: how often each tells of its progress, and what does it."""
    found: dict[str, tuple[int, Work]] = {}
    if device == "cpu":
        found["accuracy"] = 3, lambda report: accuracy.accuracy(quick, report)
        found["neighbours"] = 1, lambda report: accuracy.neighbours(quick, report)
        found["pruning"] = 4 if quick else 14, lambda report: accuracy.pruning(quick, report)
        found["size"] = 2 if quick else 6, lambda report: accuracy.size(quick, report)
    else:
        from benchmarks import gpu, targets, unets

        found["gpu"] = 1, lambda report: (report("tables of the GPU"), gpu.run(quick))
        found["unets"] = 1, lambda report: (report("U-Nets"), unets.run(quick))
        found["targets"] = 1, lambda report: (report("exact targets"), targets.run(quick))
    for name in curves.CURVES:
        found[name] = curves.steps(name, device, quick), lambda report, n=name: curves.curve(n, device, quick, report)
    found["theories"] = theories.steps(device, quick), lambda report: theories.run(device, quick, report)
    found["direct"] = theories_direct.steps(device, quick), lambda report: theories_direct.run(device, quick, report)
    found["linear"] = 8, lambda report: ensembles.linear(device, quick, report)
    found["mlps"] = 1, lambda report: ensembles.mlps(device, quick, report)
    found["members"] = 9 if quick else 19, lambda report: ensembles.members(device, quick, report)
    return found


def paced(step: Reporter) -> Report:
    """A benchmark says what it begins; only then is what came before it done."""
    begun = 0

    def report(label: str) -> None:
        nonlocal begun
        step(label, float(begun > 0))
        begun += 1

    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, about a minute")
    parser.add_argument("--device", default="all", choices=["cpu", "cuda", "all"])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some of the benchmarks, by name")
    parser.add_argument("--out", type=Path, help="where results, plots and report go")
    parser.add_argument("--render", action="store_true", help="only write the report again")
    options = parser.parse_args()
    devices = ["cpu", "cuda"] if options.device == "all" else [options.device]
    if options.device == "all" and not torch.cuda.is_available():
        devices = ["cpu"]
    jobs = {} if options.render else {(d, n): w for d in devices for n, w in works(d, options.quick).items()}
    unknown = set(options.only or ()) - {name for _, name in jobs}
    if unknown and not options.render:
        parser.error(f"there is no {', '.join(sorted(unknown))}; the names are {', '.join(n for _, n in jobs)}")
    if options.only:
        jobs = {(d, name): work for (d, name), work in jobs.items() if name in options.only}
    with into(options.out or (QUICK if options.quick else HERE)):
        with progress(sum(count for count, _ in jobs.values()) or 1) as step:
            report = paced(step)
            for _, work in jobs.values():
                work(report)
        print(render())


if __name__ == "__main__":
    main()
