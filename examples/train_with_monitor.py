"""
A training loop with a monitor
==============================

A small U-Net in plain PyTorch, trained to predict the noise on ``--n`` images, with averaged weights, and watched by
``vk.Monitor``. The monitor is three statements: it is made, called at every step, and closed. With 64 digits the run
memorises within a few minutes on two cores; with 1,024 it does not. ``vkernel monitor runs/digits --html page.html
--watch`` shows it meanwhile, and the same command continues a run that was stopped if the loop loads a checkpoint.
"""

import argparse
import copy

import torch
from torch import nn

import vkernel as vk

parser = argparse.ArgumentParser()
parser.add_argument("--images", default="digits", help="digits, fashion or cifar10 (vk.data.images)")
for name, default in {"n": 64, "steps": 4000, "width": 32, "batch": 64, "every": 100}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
parser.add_argument("--budget", type=float, default=0.05)
parser.add_argument("--log", default="runs/digits")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
args = parser.parse_args()


class Block(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.first, self.second = nn.Conv2d(a, b, 3, padding=1), nn.Conv2d(b, b, 3, padding=1)
        self.time, self.norm, self.skip = nn.Linear(16, b), nn.GroupNorm(4, b), nn.Conv2d(a, b, 1)

    def forward(self, x, e):
        h = nn.functional.silu(self.norm(self.first(x) + self.time(e)[:, :, None, None]))
        return self.skip(x) + self.second(h)


class UNet(nn.Module):
    def __init__(self, channels, width):
        super().__init__()
        self.down, self.middle = Block(channels, width), Block(width, 2 * width)
        self.up, self.out = Block(3 * width, width), nn.Conv2d(width, channels, 1)

    def forward(self, x, index):
        e = index[:, None] / 1000 * torch.pi * 2.0 ** torch.arange(8, device=x.device)
        e = torch.cat([e.sin(), e.cos()], 1).to(x.dtype)
        h = self.down(x, e)
        below = nn.functional.interpolate(self.middle(nn.functional.avg_pool2d(h, 2), e), size=h.shape[-2:])
        return self.out(self.up(torch.cat([h, below], 1), e))


torch.manual_seed(0)
train, test = vk.data.images(args.images, args.n, 256)  # in [-1, 1]; a random split
process = vk.DDPM.linear()
alpha, sigma = (f(torch.arange(1000.0)).to(args.device) for f in (process.alpha, process.sigma))
images = train[:].to(args.device)
network = UNet(images.shape[1], args.width).to(args.device)
ema = copy.deepcopy(network)
optimiser = torch.optim.Adam(network.parameters(), 1e-3)
monitor = vk.Monitor(
    train, process, test, predicts="noise", range=(-1, 1), every=args.every, budget=args.budget, log=args.log
)
for step in range(args.steps + 1):
    monitor(step, network, ema)  # returns at once between evaluations
    x0 = images[torch.randint(len(images), (args.batch,), device=args.device)]
    index, noise = torch.randint(1000, (args.batch,), device=args.device), torch.randn_like(x0)
    a, s = (v[index][:, None, None, None] for v in (alpha, sigma))
    loss = (network(a * x0 + s * noise, index) - noise).square().mean()
    loss.backward()
    optimiser.step()
    optimiser.zero_grad()
    with torch.no_grad():
        for average, weight in zip(ema.parameters(), network.parameters(), strict=True):
            average.lerp_(weight, 1 - min(0.999, (1 + step) / (10 + step)))
monitor.evaluate(args.steps, network, ema)
monitor.close()
print(monitor)
