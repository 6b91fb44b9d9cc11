"""Run the shipped study of networks on images within a time limit, and keep its results in one small file.

    python -m experiments.images --large --store results/fashion --out fashion.npz --seconds 540 --only "network=unet"

Units of work, networks that are trained together, are computed in the order of interest. After each, the file is
written, so that a run that is stopped leaves everything that was finished; a unit that would end after the limit, at
the rate of those before, is not begun. The same call continues. Files of several runs with one seed are joined by

    python -m experiments.images --join a.npz b.npz --out all.npz

This needs neither matplotlib nor typer."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import vkernel as vk
from vkernel.study.runners import units


def main() -> None:
    """Read the command line, and run or join."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", default="images", help="the study: a name or a file")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--only", default="", help='a part of the grid, as in "network=unet,n=128|1024"')
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--store", type=Path, default=Path("results/images"))
    parser.add_argument("--out", type=Path, default=Path("images.npz"))
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--join", type=Path, nargs="+", default=None)
    given = parser.parse_args()
    if given.join:
        print(vk.study.export(vk.study.merge(*map(vk.study.load, given.join)), given.out))
        return
    start, rates = time.monotonic(), list[float]()
    spec, part = vk.study.read(given.spec, large=given.large), vk.study.parse_part(given.only)
    for unit in units(spec, [(c, 0) for c in spec.conditions() if c.within(part)]):
        count, begun = len(unit) * spec.members, time.monotonic()
        expected = max(rates, default=0.0) * count
        if begun - start + expected > given.seconds:
            print(f"stopped: the next {count} networks would take about {expected:.0f} s", flush=True)
            return
        labels = {dim: list({c.labels[dim]: None for c, _ in unit}) for dim in unit[0][0].labels}
        vk.study.run(given.spec, given.store, large=given.large, only=labels, seed=given.seed, progress=False)
        seconds = time.monotonic() - begun
        rates += [seconds / count] if seconds > 5 else []  # a unit that was there already takes no time
        vk.study.export(given.store, given.out)
        print(f"{seconds:6.1f} s  {count} networks  {labels}", flush=True)


if __name__ == "__main__":
    main()
