"""diffusers folders as scores, scores inside pipelines, hostile folders."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import (
    Bomb,
    digits,
    normal,
    tiny_unet,
)
from torch import nn

import vkernel as vk
from vkernel import Checkpoint, as_unet
from vkernel.core.errors import InputError
from vkernel.reports.audit.decoder import decoder
from vkernel.score import conversions as pr


@pytest.mark.parametrize("kind", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("safe", [True, False])
def test_a_pipeline_folder_is_its_network_and_betas(kind: str, safe: bool, diffusers: object, tmp_path: Path) -> None:
    unet = tiny_unet(diffusers)
    scheduler = diffusers.DDPMScheduler(200, beta_schedule="squaredcos_cap_v2", prediction_type=kind)
    diffusers.DDPMPipeline(unet, scheduler).save_pretrained(tmp_path, safe_serialization=safe)
    net = Checkpoint.from_diffusers(tmp_path)
    x, i = normal(3, 1, 8, 8), torch.tensor([0, 70, 199])
    abar = scheduler.alphas_cumprod[i][:, None, None, None]
    with torch.no_grad():
        out = unet(x, i).sample
    noise, x0 = {
        "epsilon": lambda: (out, (x - (1 - abar).sqrt() * out) / abar.sqrt()),
        "sample": lambda: ((x - abar.sqrt() * out) / (1 - abar).sqrt(), out),
        "v_prediction": lambda: (abar.sqrt() * out + (1 - abar).sqrt() * x, abar.sqrt() * x - (1 - abar).sqrt() * out),
    }[kind]()
    torch.testing.assert_close(net.noise(x, i), noise, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(net.denoise(x, i), x0, rtol=1e-3, atol=1e-3 * float(x0.abs().max()))
    torch.testing.assert_close(net(x, i), -noise / (1 - abar).sqrt(), rtol=1e-3, atol=1e-2)
    assert net.shape == (1, 8, 8)
    others = [
        Checkpoint.from_diffusers(diffusers.DDPMPipeline(unet, scheduler)),
        Checkpoint.from_diffusers(unet, scheduler),
        Checkpoint.from_diffusers(tmp_path / "unet", tmp_path / "scheduler"),
    ]
    for other in others:
        torch.testing.assert_close(other(x, i), net(x, i))


def test_a_decoder_is_read_from_its_folder_and_takes_scaled_latents(diffusers: object, tmp_path: Path) -> None:
    size = {"block_out_channels": (8,), "norm_num_groups": 4, "latent_channels": 2, "scaling_factor": 0.5}
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(
        1, 3, ("DownEncoderBlock2D",), ("UpDecoderBlock2D",), **size, shift_factor=0.25
    ).eval()
    vae.save_pretrained(tmp_path / "vae")
    latents = normal(5, 2, 4, 4)
    with torch.no_grad():
        images = vae.decode(latents / 0.5 + 0.25).sample
    for folder in (tmp_path, tmp_path / "vae"):
        torch.testing.assert_close(decoder(folder)(latents), ((images + 1) / 2).clamp(0, 1))
    results = {"grey": "z[:, :1].sigmoid()", "flat": "z.flatten(1)", "bad": "z @ 3"}
    code = "".join(f"def {name}(z):\n    return {result}\n" for name, result in results.items())
    (tmp_path / "own.py").write_text(code)
    torch.testing.assert_close(decoder(f"{tmp_path}/own.py:grey")(latents), latents[:, :1].sigmoid())
    tiny_unet(diffusers).save_pretrained(tmp_path / "unet")
    for spec, words in (
        ("own.py:flat", r"must return images \(5, 1 or 3, H, W\)"),
        ("own.py:bad", r"failed on latents \(5, 2, 4, 4\): TypeError"),
        ("unet", "UNet2DModel, and a decoder is an AutoencoderKL"),
        ("nothing", "There is no decoder"),
    ):
        with pytest.raises(InputError, match=words):
            decoder(f"{tmp_path}/{spec}")(latents)


def test_hostile_folders(diffusers: object, tmp_path: Path) -> None:
    pipeline = diffusers.DDPMPipeline(tiny_unet(diffusers), diffusers.DDPMScheduler())
    pipeline.save_pretrained(tmp_path)
    index, unet, scheduler = (
        tmp_path / name for name in ("model_index.json", "unet/config.json", "scheduler/scheduler_config.json")
    )

    def refuse(path: Path, words: str, **change: object) -> None:
        before = path.read_text()
        path.write_text(json.dumps({**json.loads(before), **change}))
        with pytest.raises(InputError, match=words):
            Checkpoint.from_diffusers(tmp_path)
        path.write_text(before)

    refuse(index, r"text-conditional \(text_encoder\): give embeddings", text_encoder=["transformers", "CLIPTextModel"])
    refuse(index, "also has prior: guided and compound pipelines are not supported", prior=["diffusers", "Prior"])
    refuse(index, "neither a unet nor a transformer", unet=[None, None])
    refuse(unet, "is text-conditional: give embeddings", _class_name="UNet2DConditionModel")
    refuse(unet, "holds a FluxTransformer2DModel, which is not supported", _class_name="FluxTransformer2DModel")
    refuse(unet, "class-conditional", num_class_embeds=10)
    refuse(unet, "variance exploding", time_embedding_type="fourier")
    refuse(unet, "is not a state dict of UNet2DModel", block_out_channels=[8, 16])
    refuse(unet, "No UNet2DModel can be made", block_out_channels=[8])
    refuse(scheduler, "no scheduler of diffusers", _class_name="os.system")
    refuse(scheduler, "prediction_type must be one of", prediction_type="truth")
    refuse(scheduler, "its betas are no schedule", trained_betas=0.5)
    refuse(scheduler, "has no betas", _class_name="ScoreSdeVeScheduler")
    weights = tmp_path / "unet" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(InputError, match="truncated"):
        Checkpoint.from_diffusers(tmp_path)
    mark = tmp_path / "executed"
    weights.unlink()
    torch.save({"a": Bomb(mark)}, tmp_path / "unet" / "diffusion_pytorch_model.bin")
    (tmp_path / "unet" / "unet_2d.py").write_text(f"open({str(mark)!r}, 'w')")
    with pytest.raises(InputError, match="never loaded"):
        Checkpoint.from_diffusers(tmp_path)
    assert not mark.exists()
    index.write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        Checkpoint.from_diffusers(tmp_path)
    with pytest.raises(InputError, match="never downloaded"):
        Checkpoint.from_diffusers("google/ddpm-cifar10-32")
    with pytest.raises(InputError, match="without a scheduler"):
        Checkpoint.from_diffusers(tiny_unet(diffusers))


def tiny_dit(diffusers: object) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "sample_size": 8, "patch_size": 2}
    return diffusers.DiTTransformer2DModel(**sizes, in_channels=4, out_channels=8, num_embeds_ada_norm=3).eval()


def test_a_DiT_denoises_latents_of_a_class(diffusers: object, tmp_path: Path) -> None:
    """With a vae and a table of class names beside it, as in DiT's own pipeline."""
    dit, vae = tiny_dit(diffusers), diffusers.AutoencoderKL(block_out_channels=(4,), norm_num_groups=2)
    diffusers.DiTPipeline(dit, vae, diffusers.DDIMScheduler(), id2label={0: "a"}).save_pretrained(tmp_path)
    net, x = Checkpoint.from_diffusers(tmp_path, label=2), normal(3, 4, 8, 8)
    assert net.shape == (4, 8, 8)
    assert "denoises latents" in net.notes[0]
    with torch.no_grad():
        want = dit(x, torch.tensor([5] * 3), torch.tensor([2] * 3)).sample[:, :4]
        torch.testing.assert_close(net.noise(x, 5), want)
    config = tmp_path / "transformer" / "config.json"
    for label, words in ((None, "class-conditional. Give the class as label="), (3, "has classes 0 to 2, not 3")):
        with pytest.raises(InputError, match=words):
            Checkpoint.from_diffusers(tmp_path, label=label)
    with pytest.raises(InputError, match=r"shape \(3, 64, 64\), but .* takes \(4, 8, 8\)\. .* denoises latents"):
        vk.audit(net, torch.rand(20, 3, 64, 64))
    config.write_text(config.read_text().replace("DiTTransformer2DModel", "Transformer2DModel"))  # as older folders
    torch.testing.assert_close(Checkpoint.from_diffusers(tmp_path, label=2).noise(x, 5), want)


def test_embeddings_of_prompts(diffusers: object, tmp_path: Path) -> None:
    """The i-th image of a batch has the i-th embedding in turn, whatever the batch."""
    torch.manual_seed(0)
    blocks = {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",)}
    sizes = {"sample_size": 8, "in_channels": 1, "out_channels": 1, "layers_per_block": 1, "norm_num_groups": 4}
    widths = {"block_out_channels": (8,), "cross_attention_dim": 6, "attention_head_dim": 4}
    unet = diffusers.UNet2DConditionModel(**blocks, **sizes, **widths).eval()
    unet.save_pretrained(tmp_path)
    prompts, x, t = normal(3, 2, 6), normal(7, 1, 8, 8), torch.tensor([5] * 7)
    net = Checkpoint.from_diffusers(tmp_path, diffusers.DDPMScheduler(), condition=prompts)
    with torch.no_grad():
        want = unet(x, t, prompts[torch.arange(7) % 3]).sample
        assert float((want - unet(x, t, prompts[:1].expand(7, 2, 6)).sample).abs().max()) > 1e-4
    for batch in (None, 2, 5):
        torch.testing.assert_close(replace(net, batch=batch).noise(x, 5), want)
    torch.testing.assert_close(net.conditioned(4).noise(x[4:], 5), want[4:])
    for given, words in (
        (None, "text-conditional: give embeddings"),
        (prompts[..., :4], r"tokens, 6\), not \(3, 2, 4\)"),
    ):
        with pytest.raises(InputError, match=words):
            Checkpoint.from_diffusers(tmp_path, diffusers.DDPMScheduler(), condition=given)


def test_learned_variances_are_left_out(diffusers: object) -> None:
    unet = tiny_unet(diffusers, out_channels=2)
    net, x = Checkpoint.from_diffusers(unet, diffusers.DDPMScheduler()), normal(2, 1, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(net.noise(x, 5), unet(x, 5).sample[:, :1])


@pytest.mark.parametrize("kind", ["epsilon", "sample", "v_prediction"])
def test_the_exact_score_in_a_real_pipeline_returns_training_images(kind: str, diffusers: object) -> None:
    data = digits(40)
    scheduler = diffusers.DDIMScheduler(prediction_type=kind, clip_sample=False)
    process = vk.DDPM.from_alphas_cumprod(scheduler.alphas_cumprod)
    unet = as_unet(vk.EmpiricalScore(data, process), scheduler)
    pipeline = diffusers.DDIMPipeline(unet, scheduler)
    pipeline.set_progress_bar_config(disable=True)
    made = pipeline(6, torch.Generator().manual_seed(0), num_inference_steps=25, output_type="np").images
    made = torch.from_numpy(made) * 2 - 1
    distance = torch.cdist(made.flatten(1), data.rows(0, 40)).min(1).values
    assert float(distance.max()) < 0.05
    assert len(made.flatten(1).unique(dim=0)) > 1


def test_as_unet_answers_for_any_process_and_only_what_it_can(diffusers: object) -> None:
    data, scheduler = digits(40), diffusers.DDPMScheduler()
    same = vk.DDPM.linear()  # the scheduler's to seven digits
    other = vk.EDM(eps=0.005, T=200)
    x, i = normal(3, 1, 8, 8), torch.tensor([3, 200, 999])
    units = [as_unet(vk.EmpiricalScore(data, p), scheduler) for p in (same, other)]
    first, second = (unit(x, i).sample for unit in units)
    torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(units[0](x, 200, return_dict=False)[0], units[0](x, torch.tensor(200)).sample)
    torch.testing.assert_close(first, pr.to_noise(vk.EmpiricalScore(data, same))(x, i), rtol=1e-3, atol=1e-3)
    assert (units[0].config.sample_size, units[0].config.in_channels, units[0].dtype) == (8, 1, torch.float32)
    plain = as_unet(vk.as_score(vk.EmpiricalScore(data, same), same), scheduler, shape=(1, 8, 8))
    torch.testing.assert_close(plain(x, i).sample, first, rtol=1e-3, atol=1e-3)
    with pytest.raises(InputError, match="smaller eps"):
        as_unet(vk.EmpiricalScore(data, vk.VP()), scheduler)
    with pytest.raises(InputError, match="give shape="):
        as_unet(vk.as_score(lambda x, t: x, same), scheduler)
    with pytest.raises(InputError, match="needs a Score"):
        as_unet(lambda x, t: x, scheduler)


def test_a_round_trip_network_to_score_to_network(trained: nn.Module, diffusers: object) -> None:
    """A checkpoint is a score; put back into a pipeline it answers as the network did."""
    scheduler = diffusers.DDPMScheduler()
    net = Checkpoint.from_diffusers(trained, scheduler)
    x, i = normal(3, 1, 8, 8), torch.tensor([3, 200, 999])
    with torch.no_grad():
        want = trained(x, i).sample
    torch.testing.assert_close(as_unet(net, scheduler)(x, i).sample, want, rtol=1e-3, atol=1e-3)
