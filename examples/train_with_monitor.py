"""Train a small diffusion model in plain PyTorch, and watch whether it starts to memorise.

python examples/train_with_monitor.py                # 8×8 digits of scikit-learn, on a CPU
python examples/train_with_monitor.py --data train-images-idx3-ubyte.gz --n 1024 --width 128 --steps 20000
vkernel monitor runs/plain --html page.html          # the curves, also while it runs

A run that was stopped continues from its last checkpoint, and so do its curves."""

import argparse
from pathlib import Path

import torch
from torch import nn

import vkernel as vk

parser = argparse.ArgumentParser()
parser.add_argument("--data", help="grey images that vkernel reads, Fashion-MNIST's file say; default: digits")
parser.add_argument("--n", type=int, default=64, help="training images; 256 more are held out")
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--steps", type=int, default=5000)
parser.add_argument("--every", type=int, default=250, help="least steps between evaluations; a checkpoint is as often")
parser.add_argument("--budget", type=float, default=0.1, help="largest share of the time that evaluations take")
parser.add_argument("--log", default="runs/plain", help="folder for the log, TensorBoard's files and checkpoints")
args = parser.parse_args()


class Denoiser(nn.Module):
    """Residual convolutions of growing reach, each of which is given the noise level."""

    def __init__(self, width: int, depth: int = 6) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(32, width), nn.SiLU(), nn.Linear(width, depth * width))
        self.first, self.last = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 1, 3, padding=1)
        reach = [2 ** (k % 3) for k in range(depth)]
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=r, dilation=r) for r in reach)
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in reach)

    def forward(self, x, t):
        angles = t[:, None] * torch.logspace(0, 3, 16, device=t.device)
        scales = self.embed(torch.cat([angles.sin(), angles.cos()], 1)).chunk(len(self.convs), 1)
        h = self.first(x)
        for conv, norm, scale in zip(self.convs, self.norms, scales, strict=True):
            h = h + conv(nn.functional.silu(norm(h) + scale[:, :, None, None]))
        return self.last(h)


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
data = vk.load(args.data) if args.data else vk.data.digits()
order = torch.randperm(data.n)  # a random split: held-out images are never trained on
pixels = data[order[: args.n + 256]].float().reshape(-1, 1, *data.shape[-2:])
pixels = 2 * (pixels - pixels.min()) / (pixels.max() - pixels.min()) - 1
train, test = pixels[: args.n], pixels[args.n :]
network = Denoiser(args.width).to(device)
optimiser, process = torch.optim.Adam(network.parameters(), 1e-3), vk.VPSong()

monitor = vk.Monitor(train, process, test, predicts="noise", every=args.every, budget=args.budget, log=args.log)
first, saved = 0, Path(args.log, "checkpoint.pt")
if saved.exists():
    state = torch.load(saved, weights_only=True)
    network.load_state_dict(state["network"])
    optimiser.load_state_dict(state["optimiser"])
    first = state["step"]
for step in range(first, args.steps):
    if step % args.every == 0:
        state = {"step": step, "network": network.state_dict(), "optimiser": optimiser.state_dict()}
        torch.save(state, f"{saved}.new")
        Path(f"{saved}.new").replace(saved)  # a run that is killed here keeps the checkpoint before
    monitor(step, network)  # returns at once between evaluations
    x0 = train[torch.randint(len(train), (64,))].to(device)
    t = process.eps + (process.T - process.eps) * torch.rand(len(x0), device=device)
    noise, alpha, sigma = torch.randn_like(x0), process.alpha(t), process.sigma(t)
    x = alpha[:, None, None, None] * x0 + sigma[:, None, None, None] * noise
    loss = (network(x, t) - noise).square().mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
monitor.evaluate(args.steps, network)
monitor.close()
