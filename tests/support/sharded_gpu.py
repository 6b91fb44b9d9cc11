"""One rank of a sharded set on a GPU: ``python sharded_gpu.py FOLDER RANK WORLD`` saves ``WORLD-RANK.pt``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import vkernel as vk

SIGMAS = (0.05, 0.5, 2.0, 5.0, 10.0, 30.0)


def images(kind: str, n: int = 6001) -> vk.Empirical:
    """Return smooth random images, in 8 bits or in float32, on the GPU."""
    g = torch.Generator().manual_seed(0)
    small = torch.randn(n, 3, 8, 8, generator=g)
    x = torch.nn.functional.interpolate(small, 32, mode="bicubic").clamp(-2, 2) / 2
    weights = torch.rand(n, generator=g)
    if kind == "8 bits":
        return vk.Empirical(((x + 1) * 127.5).round().byte().cuda(), weights, scale=(-1.0, 1.0))
    return vk.Empirical(x.cuda(), weights)


def results(data: vk.Empirical, sigma: float, batch: int = 200) -> dict[str, Tensor]:
    """Return scores, means, traces and products, and whether the GPU path was taken."""
    score = vk.EmpiricalScore(data, vk.EDM())
    g = torch.Generator().manual_seed(1)
    y = data.take(torch.randint(0, data.n, (batch,), generator=g)).reshape(batch, *data.shape)
    x = y + sigma * torch.randn(y.shape, generator=g).to(y)
    post = score.posterior(x.double(), sigma)
    found = {"score": score(x, sigma), "mean": post.mean, "trace": post.cov.trace(), "product": post.cov @ x.double()}
    return {name: a.cpu() for name, a in found.items()} | {"gpu": torch.tensor(score.engine.gpu is not None)}


def main(folder: Path, rank: int, world: int) -> None:
    store = dist.FileStore(str(folder / f"store{world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    found = {
        (kind, sigma): results(vk.posterior.shard(images(kind)), sigma)
        for kind in ("8 bits", "float32")
        for sigma in SIGMAS
    }
    torch.save(found, folder / f"{world}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
