"""A training in plain PyTorch that continues from its checkpoint: ``python killed_training.py FOLDER STEPS``."""

import sys
from pathlib import Path

import torch
from loops import Net

import vkernel as vk

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
train, test = (part[:] for part in vk.data.images("digits", 64, 64))
process, network = vk.VPSong(), Net()
optimiser = torch.optim.Adam(network.parameters(), 1e-3)
small = {"images": 16, "samples": 8, "sampler_steps": 4, "progress": False}
monitor = vk.Monitor(train, process, test, predicts="x0", every=5, budget=0.9, log=folder, **small)
first, saved = 0, folder / "checkpoint.pt"
if saved.exists():
    state = torch.load(saved, weights_only=True)
    network.load_state_dict(state["network"])
    first = state["step"]
for step in range(first, steps):
    if step % 5 == 0:
        torch.save({"step": step, "network": network.state_dict()}, folder / "new.pt")
        (folder / "new.pt").replace(saved)  # a run that is killed here keeps the checkpoint before
    monitor(step, network)
    x0, t = train[torch.randint(64, (32,))], 0.99 * torch.rand(32) + 0.005
    loss = (network(process.perturb(x0, t), t) - x0).square().mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
monitor.evaluate(steps, network)
monitor.close()
