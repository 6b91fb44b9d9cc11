"""Class-conditional and latent networks of diffusers under a monitor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import tiny_unet
from torch import Tensor, nn

import vkernel as vk

SMALL = {"images": 16, "samples": 6, "sampler_steps": 3, "progress": False}
SHAPE = (96, 1, 8, 8)


@pytest.fixture(scope="module")
def images() -> tuple[Tensor, Tensor]:
    train, test = vk.data.images("digits", 96, 64)
    return train[:].reshape(SHAPE), test[:].reshape(-1, 1, 8, 8)


@pytest.fixture
def labelled(images: tuple[Tensor, Tensor], diffusers: object) -> dict[str, object]:
    """Arguments of a monitor on images of three classes."""
    train, test = images
    classes = {"labels": torch.arange(len(train)) % 3, "test_labels": torch.arange(len(test)) % 3}
    conventions = vk.adapters.conventions_of(diffusers.DDPMScheduler())
    return {"data": train, "test": test, **classes, **conventions, **SMALL}


def differs(found: object, other: object) -> bool:
    return not torch.allclose(found.images["test"], other.images["test"], rtol=1e-4)


def moved(network: nn.Module) -> nn.Module:
    """Return a network whose embedding of classes matters."""
    with torch.no_grad():
        network.class_embedding.weight.mul_(20)
    return network


def test_labels_of_a_UNet2DModel(labelled: dict[str, object], diffusers: object) -> None:
    unet = moved(tiny_unet(diffusers, num_class_embeds=3))
    found = vk.Monitor(**labelled).evaluate(0, unet)
    named = {"forward": lambda net, x, t, labels: net(sample=x, timestep=t, class_labels=labels)}
    assert torch.equal(vk.Monitor(**labelled, **named).evaluate(0, unet).images["test"], found.images["test"])
    other = {"forward": lambda net, x, t, labels: net(x, t, (labels + 1) % 3)}
    assert differs(vk.Monitor(**labelled, **other).evaluate(0, unet), found)


def test_variances_besides(labelled: dict[str, object], diffusers: object) -> None:
    unet = tiny_unet(diffusers, num_class_embeds=3, out_channels=2)
    with pytest.warns(UserWarning, match="must return a tensor of the same shape"):
        assert vk.Monitor(**labelled).evaluate(0, unet) is None
    first = {"forward": lambda net, x, t, labels: net(x, t, labels).sample[:, :1]}
    assert vk.Monitor(**labelled, **first).evaluate(0, unet).finite


def test_labels_as_positions_of_embeddings(labelled: dict[str, object], diffusers: object) -> None:
    torch.manual_seed(0)
    blocks = {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",)}
    sizes = {"sample_size": 8, "in_channels": 1, "out_channels": 1, "layers_per_block": 1, "norm_num_groups": 4}
    widths = {"block_out_channels": (8,), "cross_attention_dim": 6, "attention_head_dim": 4}
    unet, table = diffusers.UNet2DConditionModel(**blocks, **sizes, **widths), 20 * torch.randn(3, 2, 6)
    watch = vk.Monitor(**labelled, forward=lambda net, x, t, labels: net(x, t, table[labels]).sample)
    turned = vk.Monitor(**labelled, forward=lambda net, x, t, labels: net(x, t, table[labels - 1]).sample)
    assert differs(watch.evaluate(0, unet), turned.evaluate(0, unet))


def test_latents(images: tuple[Tensor, Tensor], diffusers: object, tmp_path: Path) -> None:
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(1, 1, block_out_channels=(8,), norm_num_groups=4, latent_channels=4).eval()
    with torch.no_grad():
        train, test = (vae.encode(x).latent_dist.mean * 2 for x in images)
    unet = tiny_unet(diffusers, in_channels=4, out_channels=4)
    conventions = vk.adapters.conventions_of(diffusers.FlowMatchEulerDiscreteScheduler())
    seen = []

    def decode(z: Tensor) -> Tensor:
        seen.append(z.shape[1:])
        return vae.decode(z / 2).sample

    watch = vk.Monitor(train, test=test, **conventions, **SMALL, decoder=decode, log=tmp_path)
    before = torch.get_rng_state()
    record = watch.evaluate(0, unet)
    assert record.finite
    assert (tmp_path / record.drawn.picture).is_file()
    assert set(seen) == {(4, 8, 8)}
    assert torch.equal(before, torch.get_rng_state())
