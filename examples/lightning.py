"""
A monitor with PyTorch Lightning
================================

A ``LightningModule`` with averaged weights is trained by flow matching; ``MonitorCallback`` calls the monitor.

.. code-block:: bash

    python examples/lightning.py                                     # 8×8 digits of scikit-learn
    python examples/lightning.py --data images.npy --n 4096 --width 64 --steps 50000
    python examples/lightning.py --resume runs/lightning/last.ckpt   # continues the run and its curves
"""

import argparse

# Of its two names, lightning.pytorch and pytorch_lightning, the first would import this file, which is named lightning.
import pytorch_lightning as pl
import torch
from diffusers import UNet2DModel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import vkernel as vk
from vkernel.adapters.lightning import MonitorCallback


class Diffusion(pl.LightningModule):
    """Flow matching: x = (1 - t) x0 + t noise, and the network predicts noise - x0."""

    def __init__(self, shape: tuple[int, ...], width: int) -> None:
        super().__init__()
        blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
        sizes = {"in_channels": shape[0], "out_channels": shape[0], "block_out_channels": (width, 2 * width)}
        self.net = UNet2DModel(shape[1:], **sizes, **blocks, layers_per_block=1, norm_num_groups=4)
        self.ema = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.999)).requires_grad_(False)

    def training_step(self, x0, index):
        t, noise = torch.rand(len(x0), device=x0.device), torch.randn_like(x0)
        x = torch.lerp(x0, noise, t[:, None, None, None])
        return (self.net(x, 1000 * t).sample - (noise - x0)).square().mean()

    def on_train_batch_end(self, outputs, batch, index):
        self.ema.update_parameters(self.net)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", help="images that vkernel reads: a folder, an array, …; default: digits")
    parser.add_argument("--n", type=int, default=256, help="training images; 256 more are held out")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--every", type=int, default=500, help="least steps between evaluations")
    parser.add_argument("--budget", type=float, default=0.02, help="largest share of the time that evaluations take")
    parser.add_argument("--devices", default="auto", help="their number; rank 0 evaluates")
    parser.add_argument("--log", default="runs/lightning")
    parser.add_argument("--resume", help="a checkpoint")
    args = parser.parse_args()
    pl.seed_everything(0)
    data = vk.load(args.data) if args.data else vk.data.digits()
    images = data[torch.randperm(data.n)[: args.n + 256]].float()
    images = images.reshape(len(images), -1, *images.shape[-2:])
    images = 2 * (images - images.min()) / (images.max() - images.min()) - 1
    train, test = images[: args.n], images[args.n :]  # a random split: held-out images are never trained on

    conventions = {"process": vk.FlowMatching(), "predicts": "flow", "time": "index:1000"}
    monitor = vk.Monitor(train, test=test, **conventions, every=args.every, budget=args.budget, log=args.log)
    watch = MonitorCallback(monitor, network=lambda module: module.net, ema=lambda module: module.ema)
    last = pl.callbacks.ModelCheckpoint(args.log, every_n_train_steps=args.every, save_last=True, save_top_k=0)
    options = {"max_steps": args.steps, "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(callbacks=[watch, last], devices=args.devices, **options)
    loader = DataLoader(train, 32, shuffle=True, drop_last=True)
    trainer.fit(Diffusion(tuple(train.shape[1:]), args.width), loader, ckpt_path=args.resume)


if __name__ == "__main__":
    main()
