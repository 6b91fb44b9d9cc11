"""Networks for tests: the seven of other people, small ones, and functions wrapped as networks."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import draws
import pytest
import torch
from networks28 import C, U
from torch import nn

import vkernel as vk
from vkernel import Checkpoint
from vkernel.score import conversions as pr

MODELS = os.environ.get("VKERNEL_MODELS")
FASHION = Path("/usr/share/datasets/fashion-mnist/t10k-images-idx3-ubyte.gz")
MNIST = Path(os.environ.get("VKERNEL_DATA", "/usr/share/datasets")) / "mnist" / "t10k-images-idx3-ubyte"
CNNS = [f"cnn28_mnist_{name}.pth" for name in ("a", "b", "c", "d", "early")]
with_models = pytest.mark.skipif(MODELS is None, reason="VKERNEL_MODELS does not say where the seven networks lie")
LINEAR = "linear:1e-4:.02:1000"
LEVELS = (20, 100, 300, 600, 900)
TO = {"noise": pr.to_noise, "x0": pr.to_x0, "v": pr.to_v, "flow": pr.to_flow}


def wrap(
    net, process: vk.Process, predicts: str = "noise", time: object = "index", range: object = (-1, 1), **more: object
):
    """A network with the conventions of most checkpoints: predicts noise, takes an index, pixels in [-1, 1]."""
    return vk.as_score(net, process, predicts=predicts, time=time, range=range, **more)


normal = functools.partial(draws.normal, dtype=torch.float32)


def digits(n: int = 64) -> vk.Empirical:
    return vk.data.digits().subset(torch.arange(n))


class Remembered(nn.Module):
    """A network that keeps its outputs: other readings of it are evaluated at the same inputs again and again."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.held = net, {}

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        key = tuple((a.shape, a.dtype, a.detach().numpy().tobytes()) for a in (x, t))
        if key not in self.held:
            out = self.net(x, t)
            self.held[key] = getattr(out, "sample", out)  # of diffusers
        return self.held[key].clone()


def u(name: str = "unet28_fashion.pt") -> Checkpoint:
    return Checkpoint.from_weights(Path(MODELS or "") / name, U, betas=LINEAR, strip="network.", shape=(1, 28, 28))


def c(name: str) -> Checkpoint:
    options = {"betas": "key:alpha_t", "strip": "gt.", "time": "fraction", "range": "-.5,.5", "shape": (1, 28, 28)}
    return Checkpoint.from_weights(Path(MODELS or "") / name, C, **options)


def noise_errors(net: Checkpoint, data: vk.Empirical, count: int) -> list[float]:
    x0, found = net.scaled(data)[:count], []
    for t in LEVELS:
        noise = normal(*x0.shape, seed=t)
        time = torch.tensor(t, dtype=torch.float64)
        x = (net.process.alpha(time) * x0 + net.process.sigma(time) * noise).float()
        found.append(float((net.noise(x, t) - noise).square().mean()))
    return found


def tiny_unet(diffusers: object, **options: object) -> nn.Module:
    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    sizes = {"sample_size": 8, "in_channels": 1, "out_channels": 1, "layers_per_block": 1, "norm_num_groups": 4}
    more = {"block_out_channels": (16, 16), "add_attention": False, **options}
    return diffusers.UNet2DModel(**{**blocks, **sizes, **more}).eval()


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.path,))
