"""Networks that other people trained, read as scores: weight files, diffusers folders, and several of them together."""

from vkernel.adapters.checkpoints import Checkpoint, Checkpoints
from vkernel.adapters.diffusers import as_unet

__all__ = ["Checkpoint", "Checkpoints", "as_unet"]
