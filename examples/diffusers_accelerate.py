"""
A monitor with diffusers and accelerate
=======================================

The loop has the parts of diffusers' training script for unconditional image generation: a ``UNet2DModel`` and its
averaged weights, a scheduler, gradient accumulation, checkpoints. Lines marked "monitor" are the
monitor's.

.. code-block:: bash

    accelerate launch examples/diffusers_accelerate.py     # 8×8 digits of scikit-learn
    accelerate launch examples/diffusers_accelerate.py --data images/ --n 4096 --width 128 --steps 50000
    accelerate launch examples/diffusers_accelerate.py --resume runs/accelerate/checkpoint-1000
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from torch.utils.data import DataLoader

import vkernel as vk

parser = argparse.ArgumentParser()
parser.add_argument("--data", help="images that vkernel reads: a folder, an array, …; default: digits")
parser.add_argument("--n", type=int, default=256, help="training images; 256 more are held out")
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--steps", type=int, default=5000)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--prediction", default="epsilon", choices=["epsilon", "sample", "v_prediction"])
parser.add_argument("--every", type=int, default=500, help="least steps between evaluations; a checkpoint is as often")
parser.add_argument("--budget", type=float, default=0.02, help="largest share of the time that evaluations take")
parser.add_argument("--log", default="runs/accelerate")
parser.add_argument("--resume", help="a checkpoint")
args = parser.parse_args()

accelerator = Accelerator(gradient_accumulation_steps=args.accumulate)
set_seed(0)
data = vk.load(args.data) if args.data else vk.data.digits()
images = data[torch.randperm(data.n)[: args.n + 256]].float()
images = images.reshape(len(images), -1, *images.shape[-2:])
images = 2 * (images - images.min()) / (images.max() - images.min()) - 1
train, test = images[: args.n], images[args.n :]  # monitor: a random split that is not trained on

unet = UNet2DModel(
    sample_size=tuple(images.shape[-2:]),
    in_channels=images.shape[1],
    out_channels=images.shape[1],
    layers_per_block=1,
    norm_num_groups=4,
    block_out_channels=(args.width, 2 * args.width),
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
)
ema = EMAModel(unet.parameters(), decay=0.999, use_ema_warmup=True)
scheduler = DDPMScheduler(prediction_type=args.prediction)
optimiser = torch.optim.AdamW(unet.parameters(), lr=1e-3)
lengths = {"num_warmup_steps": 100, "num_training_steps": args.steps * accelerator.num_processes}
rate = get_scheduler("cosine", optimiser, **lengths)
loader = DataLoader(train, args.batch, shuffle=True, drop_last=True)
unet, optimiser, loader, rate = accelerator.prepare(unet, optimiser, loader, rate)
ema.to(accelerator.device)
accelerator.register_for_checkpointing(ema)

monitor = vk.Monitor(  # monitor
    train, test=test, **vk.adapters.conventions_of(scheduler), every=args.every, budget=args.budget, log=args.log
)  # monitor
step = 0
if args.resume:
    accelerator.load_state(args.resume)
    step = int(args.resume.rpartition("-")[2])
while step < args.steps:
    for x0 in loader:
        monitor(step, unet, ema)  # monitor: returns at once between evaluations
        with accelerator.accumulate(unet):
            noise = torch.randn_like(x0)
            t = torch.randint(scheduler.config.num_train_timesteps, (len(x0),), device=x0.device)
            x = scheduler.add_noise(x0, noise, t)
            wanted = {"epsilon": noise, "sample": x0, "v_prediction": scheduler.get_velocity(x0, noise, t)}
            loss = (unet(x, t).sample - wanted[args.prediction]).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(unet.parameters(), 1.0)
            optimiser.step()
            rate.step()
            optimiser.zero_grad()
        if not accelerator.sync_gradients:
            continue
        ema.step(unet.parameters())
        step += 1
        if step % args.every == 0:
            accelerator.save_state(Path(args.log, f"checkpoint-{step}"))
        if step == args.steps:
            break
monitor.evaluate(step, unet, ema)  # monitor
monitor.close()  # monitor
if accelerator.is_main_process:
    unet = accelerator.unwrap_model(unet)
    ema.copy_to(unet.parameters())
    DDPMPipeline(unet, scheduler).save_pretrained(Path(args.log, "pipeline"))
accelerator.end_training()
