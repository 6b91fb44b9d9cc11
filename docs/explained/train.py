"""Train the networks of docs/explained.md: two U-Nets and two MLPs on each of three subsets of Fashion-MNIST.

``python docs/explained/train.py FOLDER [--device cuda] [--steps .1]``. All predict EDM's raw output with EDM's weights
and density of noise levels (Karras et al. 2022); the two of a kind differ in initial weights, noise and order. On an
H200 it takes about four minutes; ``--steps .1`` takes a tenth of the steps, for a look."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

import vkernel as vk

FASHION = "/usr/share/datasets/fashion-mnist/train-images-idx3-ubyte.gz"  # of Debian's dataset-fashion-mnist
SIZES = (128, 1024, 60_000)  # the first images of the training set
KINDS = ("unet", "mlp")


def models(share: float) -> dict[str, vk.models.UNet | vk.models.MLP]:
    """Return both architectures; ``share`` of the full number of steps."""
    how = {"target": "edm", "spread": 0.5, "ema": 0.999, "decay": "cosine"}
    unet = vk.models.UNet(batch=128, steps=max(1, int(8000 * share)), lr=1e-3, init_scale=1.0, bf16=True, **how)
    mlp = vk.models.MLP(
        width=512, depth=4, time_features=8, batch=256, steps=max(1, int(20_000 * share)), chunk=1, **how
    )
    return dict(zip(KINDS, (unet, mlp), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=[f"{kind}_{n}" for kind in KINDS for n in SIZES])
    parser.add_argument("--data", default=FASHION, help="the file of training images")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=float, default=1.0, help="share of the steps")
    given = parser.parse_args()
    images = vk.load(given.data).to(given.device)
    for name in given.names:
        began, (kind, n) = time.monotonic(), name.split("_")
        data, model = images.subset(torch.arange(int(n))), models(given.steps)[kind]
        found = vk.train_ensemble(model, data, vk.EDM(), members=2, seed=int(n), progress=True)
        found.save(given.folder / name)
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
