"""Explain the networks of docs/explained.md by all theories, and write the numbers and pictures that the page shows.

``python docs/explained/run.py NETWORKS [NAME …]``. NETWORKS is the folder that ``train.py`` wrote. ``mnist_unet`` and
``mnist_cnn`` are networks of other people instead, in the same folder, explained with MNIST (``--data
train-images-idx3-ubyte``). ``faults`` has more samples of one network. Results are ``results/NAME.json`` and a
picture of samples; ``page.py`` writes the tables and the figure of the page from them."""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

import torch
from train import FASHION, KINDS, SIZES

import vkernel as vk
from vkernel import plots

HERE = Path(__file__).parent
CNNS = ("a", "c", "d")
FAULTS = "unet_1024", {"levels": 2, "images": 4, "samples": 64}  # more samples of the first of these


def networks(name: str, folder: Path, device: str) -> vk.Scores | list[vk.Score]:
    """Return the networks of one result."""
    if name == "faults":
        return [vk.load_ensemble(folder / FAULTS[0], device).member(0)]
    if not name.startswith("mnist"):
        return vk.load_ensemble(folder / name, device)
    sys.path.insert(0, str(HERE.parents[1] / "tests" / "support"))
    from networks28 import C, U  # the two architectures of other people, written for tests

    read = functools.partial(vk.Checkpoint.from_weights, shape=(1, 28, 28), device=device)
    if name == "mnist_unet":
        return [read(folder / "unet28_mnist.pt", U, betas="linear:1e-4:.02:1000", strip="network.")]
    conventions = {"betas": "key:alpha_t", "strip": "gt.", "time": "fraction", "range": "-.5,.5"}
    return [read(folder / f"cnn28_mnist_{run}.pth", C, **conventions, name=run) for run in CNNS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", type=Path)
    parser.add_argument("names", nargs="*", default=[*(f"{kind}_{n}" for kind in KINDS for n in SIZES), "faults"])
    parser.add_argument("--data", default=FASHION, help="the file of training images; the test images are beside it")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--train", type=int, help="training images that theories of pixels see")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    given = parser.parse_args()
    data, test = (vk.load(p).to(given.device) for p in (given.data, given.data.replace("train-", "t10k-")))
    for name in given.names:
        nets = networks(name, given.networks, given.device)
        n = data.n if name.startswith("mnist") else int((FAULTS[0] if name == "faults" else name).split("_")[1])
        sizes = FAULTS[1] if name == "faults" else {"samples": 12}
        more = {"train": given.train, "quick": True, "seed": given.seed, "progress": True}
        found = vk.explain(nets, None, data.subset(torch.arange(n)), test, **sizes, **more)
        found.to_json(given.out / f"{name}.json")
        plots.save(found.gallery(found.networks[0]), given.out / f"{name}_samples.png", dpi=70)
        print(f"{name}: {found.seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
