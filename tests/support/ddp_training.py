"""One process of a distributed training on CPUs: ``python ddp_training.py RANK FOLDER``.

Networks with batch normalisation are trained without a monitor, with one that was made before the group of processes,
and with one that was made after it. Rank 0 evaluates alone, while the others wait in the next step."""

import sys
from pathlib import Path

import torch
from loops import Net, often
from torch.nn.parallel import DistributedDataParallel

import vkernel as vk

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
torch.set_num_threads(1)
images = vk.data.digits()[:192].reshape(-1, 1, 8, 8)
train, test = images[:128], images[128:]
process = vk.VPSong()


def monitor(name: str) -> vk.Monitor:
    return often(train, process, test=test, predicts="x0", every=4, log=folder / f"{name}-{rank}")


def trained(watch: vk.Monitor | None, compiled: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    network = DistributedDataParallel(Net())
    call = torch.compile(network, backend="aot_eager") if compiled else network
    optimiser = torch.optim.Adam(network.parameters(), 1e-3)
    torch.manual_seed(10 + rank)
    for step in range(12):
        if watch is not None:
            watch(step, call)
        t = 0.99 * torch.rand(16) + 0.005
        x0 = train[torch.randint(128, (16,))]
        loss = (call(process.perturb(x0, t, generator=step), t) - x0).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return network.module.state_dict()


before = monitor("before")
torch.distributed.init_process_group("gloo", f"file://{folder}/group", rank=rank, world_size=2)
after = monitor("after")
for name, watch in (("alone", None), ("before", before), ("after", after)):
    torch.save(trained(watch, False), folder / f"{name}-{rank}.pt")
for name, watch in (("alone", None), ("compiled", monitor("compiled"))):
    torch.save(trained(watch, True), folder / f"compiled-{name}-{rank}.pt")
torch.distributed.destroy_process_group()
