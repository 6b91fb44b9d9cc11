"""The closest samples above the training images that they resemble most, as a small picture."""

from __future__ import annotations

import io

import numpy as np
import torch
from torch import Tensor

from vkernel.reports import html
from vkernel.reports.audit.decoder import Decoder

SHOWN = 8  # samples
SIDE = 64  # pixels of an image at least, and twice that at most


def closest(
    samples: Tensor, sources: Tensor, limits: tuple[float, float], decoder: Decoder | None
) -> np.ndarray | None:
    """Return samples ``(k, *shape)`` above training images as bytes ``(H, W, 3)``; ``None`` if they are no images."""
    rows = torch.stack([samples.float(), sources.float()]).nan_to_num(limits[0], limits[1], limits[0])
    if decoder is not None:
        both, limits = decoder(rows.flatten(0, 1)), (0.0, 1.0)
        rows = both.reshape(2, -1, *both.shape[1:])
    if not html.is_image(rows.shape[2:]):
        return None
    rows = rows[:, :, None] if rows.ndim == 4 else rows  # (2, k, C, H, W)
    light = ((rows - limits[0]) / (limits[1] - limits[0])).clamp(0, 1).mul(255).round().to(torch.uint8)
    light = light.expand(-1, -1, 3, -1, -1)
    factor = max(1, -(-SIDE // light.shape[-2]))
    light = light.repeat_interleave(factor, -1).repeat_interleave(factor, -2)
    padded = torch.nn.functional.pad(light, (1, 1, 1, 1), value=255)
    return padded.permute(0, 3, 1, 4, 2).flatten(0, 1).flatten(1, 2).numpy()


def png(picture: np.ndarray) -> bytes:
    """Return a picture as a PNG file, of which an image has at most 2 × SIDE pixels a side."""
    from PIL import Image

    image, held = Image.fromarray(picture), io.BytesIO()
    image.thumbnail((2 * SIDE * SHOWN, 4 * SIDE))
    image.save(held, "PNG")
    return held.getvalue()
