"""Networks that other people trained, read as scores: weight files, diffusers folders, and several of them together.

Callbacks that call a monitor in other libraries are in ``adapters.lightning`` and ``adapters.trainer``."""

from vkernel.adapters.checkpoints import Checkpoint, Checkpoints
from vkernel.adapters.diffusers import as_unet, conventions_of

__all__ = ["Checkpoint", "Checkpoints", "as_unet", "conventions_of"]
