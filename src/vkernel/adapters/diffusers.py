r"""Networks of diffusers as scores, and scores as networks of diffusers.

A scheduler with N betas is the process :class:`~vkernel.process.DDPM` with :math:`\alpha_t^2 = \bar\alpha_t`; its
``prediction_type`` epsilon, sample or v_prediction is noise, x0 or v = alpha noise - sigma x0 here. Schedulers of flow
matching have :math:`x = (1 - \sigma) x_0 + \sigma\epsilon`, networks that take :math:`N \sigma` and return
:math:`\epsilon - x_0`: :class:`~vkernel.process.FlowMatching` with t = sigma. Those of EDM scale inputs and outputs of
the raw network F.

Of a folder only the JSON configurations and the weight files are read. The network is built from diffusers' own
classes, so no code in the folder runs, and nothing is ever downloaded.

Conversely, ``as_unet`` evaluates a score for each call :math:`(x, i)` of a pipeline. If the score has another
process, the point is moved to where sigma/alpha is equal: the denoised image
:math:`\hat x_0` is the same there, and :math:`\mathrm{noise} = (x - \alpha_i \hat x_0) / \sigma_i`."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from vkernel.adapters import weights
from vkernel.core.checks import is_whole
from vkernel.core.errors import InputError, require, shown
from vkernel.core.files import expand
from vkernel.process import DDPM, EDM, FlowMatching
from vkernel.score.base import Score, Time, check_score, wide_time
from vkernel.score.conversions import convert

LARGEST = 1 << 16  # height or width of an image
PREDICTION = {"epsilon": "noise", "sample": "x0", "v_prediction": "v"}
_WEIGHTS = ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin")
_SAVED = "a diffusers model is a folder made by save_pretrained"
NETWORKS = {  # and the setting that holds the number of classes
    "UNet2DModel": "num_class_embeds",
    "UNet2DConditionModel": "num_class_embeds",
    "DiTTransformer2DModel": "num_embeds_ada_norm",
    "Transformer2DModel": "num_embeds_ada_norm",  # a DiT in folders of earlier diffusers
}
_CODERS = ("vae", "vqvae")
_STATE = "state process=, predicts= and time= yourself"
_ONLY = "networks that can be read are UNet2DModel, UNet2DConditionModel (with embeddings) and DiT"


def read(
    source: object,
    scheduler: object = None,
    device: torch.device | str = "cpu",
    label: int | None = None,
    condition: Tensor | None = None,
) -> tuple[nn.Module, DDPM, str, tuple[int, ...] | None, str, tuple[str, ...]]:
    """Return network, process, prediction, image shape, name, and sentences on what was assumed.
    ``source`` is a pipeline or its folder; or a network or its folder, with a scheduler, an object or a folder."""
    notes: tuple[str, ...] = ()
    if isinstance(source, str | os.PathLike):
        folder = expand(source)
        require(folder.exists(), f"There is no folder {folder}; folders are read from this machine, never downloaded.")
        require(folder.is_dir(), f"{folder} is a file; {_SAVED}.")
        name, inner = shown(folder.name), folder
        if (folder / "model_index.json").is_file():
            part, notes = _components(_json(folder / "model_index.json"), str(folder), condition)
            inner, scheduler = folder / part, folder / "scheduler" if scheduler is None else scheduler
        kind = _json(inner / "config.json").get("_class_name")
        require(str(kind) in NETWORKS, f"{inner} holds a {kind}, which is not supported: {_ONLY}.")
        held: Any = _construct(inner / "config.json", str(kind), "")
        _check_network(held, str(inner), label, condition)
        held = _filled(held, inner).to(device).requires_grad_(False)
    else:
        name, held = type(source).__name__, source
        if parts := getattr(source, "components", {}):
            part, notes = _components(parts, "This pipeline", condition)
            held = parts[part]
            scheduler = parts.get("scheduler") if scheduler is None else scheduler
        _check_network(held, name, label, condition)
    if isinstance(scheduler, str | os.PathLike):
        path = expand(scheduler)
        path = path / "scheduler_config.json" if path.is_dir() else path
        scheduler = _construct(path, "Scheduler", "which is no scheduler of diffusers")
    require(scheduler is not None, f"{name} comes without a scheduler; give the one it was trained with as scheduler=.")
    size, channels = _size(held.config.sample_size, name), held.config.in_channels
    plain = type(held).__name__ == "UNet2DModel" and held.config.out_channels == channels
    net = held.eval() if plain else _FirstHalf(held.eval(), channels)
    shape = None if size is None else (channels, *size)
    return net, process_of(scheduler), prediction_of(scheduler), shape, name, notes


def read_decoder(folder: Path, device: torch.device | str = "cpu") -> Callable[[Tensor], Tensor]:
    """Return the decoder of the AutoencoderKL in a folder, for latents as a network sees them: scaled, and shifted."""
    vae: Any = _construct(folder / "config.json", "AutoencoderKL", "and a decoder is an AutoencoderKL")
    vae = _filled(vae, folder).to(device).eval().requires_grad_(False)
    scale, shift = vae.config.scaling_factor, vae.config.get("shift_factor") or 0.0

    def decode(latents: Tensor) -> Tensor:
        return vae.decode((latents / scale + shift).to(device)).sample

    return decode


def _size(given: object, name: str) -> tuple[int, int] | None:
    """Return height and width of a configuration's ``sample_size``: one number, a pair, or ``None``."""
    pair = [given, given] if is_whole(given) else list(given) if isinstance(given, list | tuple) else []
    good = given is None or (len(pair) == 2 and all(is_whole(k) and 0 < k <= LARGEST for k in pair))
    require(good, f"sample_size of {name} must be a whole number or two, from 1 to {LARGEST}; it is {given!r:.60}.")
    return None if given is None else (pair[0], pair[1])


def conventions_of(scheduler: object) -> dict[str, Any]:
    """Return the conventions of a network that is trained with a diffusers scheduler: ``process``, ``predicts``,
    ``time`` and, for EDM, ``sigma_data``, as named arguments of ``vk.Monitor`` and ``vk.as_score``.

    Schedulers with betas are DDPM (a last index without signal, of zero terminal SNR, is left out), ``FlowMatch…`` and
    those with ``use_flow_sigmas`` flow matching, ``EDM…`` the process of Karras et al. Others are refused.

    >>> from types import SimpleNamespace
    >>> import torch
    >>> scheduler = SimpleNamespace(alphas_cumprod=torch.linspace(0.99, 0.01, 100))  # a DDPMScheduler, say
    >>> found = conventions_of(scheduler)
    >>> found["predicts"], found["time"], found["process"].T
    ('noise', 'index', 99.0)
    """
    kind, config = type(scheduler).__name__, getattr(scheduler, "config", None)
    predicted = getattr(config, "prediction_type", None)
    flows = getattr(config, "use_flow_sigmas", False)
    if kind.startswith("FlowMatch") or flows:
        inverted = getattr(config, "invert_sigmas", False)
        require(not inverted, f"{kind} has invert_sigmas=True, time from noise to data; {_STATE}.")
        known = predicted in (None, "flow_prediction")
        require(known, f"{kind} has flow sigmas and prediction_type {predicted!r}, not 'flow_prediction'; {_STATE}.")
        steps = getattr(config, "num_train_timesteps", 1000)
        return {"process": FlowMatching(), "predicts": "flow", "time": f"index:{steps}"}
    if kind.startswith("EDM"):
        raw = predicted == "epsilon"
        require(raw, f"{kind} has prediction_type {predicted!r}, not 'epsilon', EDM's raw network; {_STATE}.")
        ends: Any = config
        found = {"process": EDM(ends.sigma_min, ends.sigma_max), "predicts": "edm", "time": "c_noise"}
        return found | {"sigma_data": float(ends.sigma_data)}
    return {"process": process_of(scheduler), "predicts": prediction_of(scheduler), "time": "index"}


def process_of(scheduler: object) -> DDPM:
    """Return the process of a diffusers scheduler, without a last index that has no signal (zero terminal SNR)."""
    abar = getattr(scheduler, "alphas_cumprod", None)
    hint = "give a scheduler that has, such as DDPMScheduler, or wrap the network with vk.as_score and its process"
    require(isinstance(abar, Tensor), f"{type(scheduler).__name__} has no betas (alphas_cumprod); {hint}.")
    abar = abar.detach().double().cpu()  # type: ignore[union-attr]
    signal = int((abar > 0).sum())
    good = abar.ndim == 1 and bool((abar[:signal] > 0).all() and (abar[signal:] == 0).all() and abar.isfinite().all())
    require(
        good, f"The alphas_cumprod of {type(scheduler).__name__} do not fall from 1 to 0: its betas are no schedule."
    )
    return DDPM.from_alphas_cumprod(abar[:signal])


def prediction_of(scheduler: object) -> str:
    """Return what the network of a scheduler predicts, by the names of this package."""
    kind = getattr(getattr(scheduler, "config", None), "prediction_type", "epsilon")
    known = isinstance(kind, str) and kind in PREDICTION
    require(known, f"prediction_type must be one of {', '.join(PREDICTION)}; the scheduler has {kind!r}.")
    return PREDICTION[kind]


def _components(held: dict[str, Any], name: str, condition: Tensor | None) -> tuple[str, tuple[str, ...]]:
    """Return which component of a pipeline is the network, and a sentence if it denoises latents."""
    present = [k for k, v in held.items() if not k.startswith("_") and _is_component(v)]
    nets, coders = ([k for k in present if k in known] for known in (("unet", "transformer"), _CODERS))
    require(nets, f"{name} has neither a unet nor a transformer, which is not supported: {_ONLY}.")
    extra = [k for k in present if k not in (*nets, *coders, "scheduler")]
    text = any(k.startswith("text_encoder") for k in extra)
    give = "condition= (on the command line --condition FILE)"
    texts = f"{name} is text-conditional ({', '.join(extra)}): give embeddings of the prompts as {give}."
    unknown = f"{name} also has {', '.join(extra)}: guided and compound pipelines are not supported, {_ONLY}."
    require(not extra or condition is not None, texts if text else unknown)
    latent = f"{name} has an autoencoder ({', '.join(coders)}): its network denoises latents, the encoded images."
    return nets[0], (latent,) if coders else ()


def _is_component(value: object) -> bool:
    """Whether an entry of a pipeline, or of its model_index.json, is a network or a scheduler, and no setting."""
    if isinstance(value, list | tuple):
        return len(value) == 2 and None not in value
    return value is not None and not isinstance(value, bool | int | float | str | dict)


def _check_network(net: Any, name: str, label: int | None, condition: Tensor | None) -> None:
    kind = type(net).__name__
    require(kind in NETWORKS, f"{name} holds a {kind}, which is not supported: {_ONLY}.")
    text = kind == "UNet2DConditionModel"
    embedded = (
        f"{name} is text-conditional: give embeddings of prompts as condition= (on the command line --condition)."
    )
    require(not text or condition is not None, embedded)
    require(text or condition is None, f"{name} holds a {kind}, which takes no embeddings of prompts; leave them out.")
    shape = (None, None) if condition is None else tuple(condition.shape)
    width = net.config.get("cross_attention_dim")
    fits = len(shape) == 3 and shape[2] == width if text and isinstance(width, int) else True
    require(fits, f"{name} takes embeddings (k, tokens, {width}), not {shape}.")
    classes, ins, outs = (net.config.get(key) for key in (NETWORKS[kind], "in_channels", "out_channels"))
    conditional = classes is not None or net.config.get("class_embed_type") is not None
    require(conditional or label is None, f"{name} is not class-conditional; it takes no label.")
    give = "label= (on the command line --labels, the classes of the training images, and --label for one of them)"
    require(not conditional or label is not None, f"{name} is class-conditional. Give the class as {give}.")
    known = classes is None or label is None or label < classes
    require(known, f"{name} has classes 0 to {(classes or 0) - 1}, not {label}.")
    sigma = "Fourier features of sigma (variance exploding), which is not supported here; wrap it with vk.as_score"
    require(net.config.get("time_embedding_type") != "fourier", f"{name} embeds {sigma}.")
    good = outs in (None, ins, 2 * ins)
    require(good, f"{name} takes {ins} channels and returns {outs}, which is not supported: {_ONLY}.")
    adaptive = net.config.get("norm_type", "ada_norm_zero") == "ada_norm_zero"
    require("Transformer" not in kind or adaptive, f"{name} is a {kind} but no DiT, which is not supported: {_ONLY}.")


def _filled(module: nn.Module, folder: Path) -> nn.Module:
    found = [folder / name for name in _WEIGHTS if (folder / name).is_file()]
    require(found, f"{folder} holds no weights; looked for {' and '.join(_WEIGHTS)}.")
    return weights.fill(module, weights.read_weights(found[0]), str(found[0]))


def _construct(path: Path, suffix: str, fault: str) -> Any:
    """Construct the object of diffusers that a configuration names; refuse names that do not end in ``suffix``."""
    config = _json(path)
    kind = str(config.get("_class_name"))
    require(kind.endswith(suffix), f"{path} names {kind}, {fault}.")
    try:
        return getattr(importlib.import_module("diffusers"), kind).from_config(config)
    except ModuleNotFoundError as error:
        raise InputError("Reading diffusers folders needs diffusers: pip install 'vkernel[audit]'.") from error
    except Exception as error:
        raise InputError(f"No {kind} can be made from {path}: {weights.reason(error)}.") from error


def _json(path: Path) -> dict[str, Any]:
    require(path.is_file(), f"There is no {path}; {_SAVED}.")
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {weights.reason(error)}.") from error
    require(isinstance(held, dict), f"{path} holds a {type(held).__name__}, not the settings of a diffusers object.")
    return held


class _FirstHalf(nn.Module):
    """A network called by names, without the variances that it may predict besides."""

    def __init__(self, net: nn.Module, channels: int) -> None:
        super().__init__()
        self.net, self.channels = net, channels

    def forward(self, x: Tensor, t: Tensor, labels: Tensor | None = None, **condition: Tensor) -> Tensor:
        return self.net(x, timestep=t, class_labels=labels, **condition).sample[:, : self.channels]


def as_unet(score: Score, scheduler: object, *, shape: tuple[int, ...] | None = None) -> ScoreUNet:
    """Return a score as the ``unet`` of a diffusers pipeline: ``DDIMPipeline(as_unet(score, scheduler), scheduler)``.
    Its output is in the scheduler's ``prediction_type``. ``shape`` is that of an image, ``(C, H, W)``; by default that
    of the score. Pipelines show pixels in [-1, 1]: give a score of data in that range.

    >>> import torch, vkernel as vk
    >>> from types import SimpleNamespace
    >>> betas = torch.linspace(1e-4, 0.02, 1000)
    >>> config = SimpleNamespace(prediction_type="epsilon")  # here of a stand-in for diffusers' DDPMScheduler
    >>> scheduler = SimpleNamespace(alphas_cumprod=(1 - betas).cumprod(0), config=config)
    >>> score = vk.EmpiricalScore(torch.randn(4, 1, 8, 8), vk.DDPM(betas))
    >>> vk.as_unet(score, scheduler)(torch.zeros(2, 1, 8, 8), 500).sample.shape
    torch.Size([2, 1, 8, 8])
    """
    process = check_score(score, "A pipeline").process
    shape = tuple(shape or score.shape or ())
    require(len(shape) == 3, f"A pipeline makes images (C, H, W); give shape=, this score's is {shape or 'unknown'}.")
    schedule = process_of(scheduler)
    (first, last), (low, high) = schedule.ratios, process.ratios
    reach = f"sigma/alpha from {first:.3g} to {last:.3g}, and {process!r} only {low:.3g} to {high:.3g}"
    hint = "construct the process with a smaller eps or a larger T, or use DDPM with the scheduler's betas"
    require(low <= 1.05 * first and 1.05 * high >= last, f"The scheduler's indices span {reach}; {hint}.")
    return ScoreUNet(score, schedule, prediction_of(scheduler), shape)


class ScoreUNet(nn.Module):
    """A score with the interface of a UNet2DModel (``as_unet``); it holds no weights and has no gradient."""

    def __init__(self, score: Score, schedule: DDPM, predicts: str, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.where: Tensor
        self.score, self.process, self.schedule, self.predicts = score, score.process, schedule, predicts
        channels, *size = shape
        sample_size = size[0] if size[0] == size[1] else tuple(size)
        self.config = SimpleNamespace(sample_size=sample_size, in_channels=channels, out_channels=channels)
        self.register_buffer("where", torch.zeros(()), persistent=False)

    @property
    def device(self) -> torch.device:
        return self.where.device

    @property
    def dtype(self) -> torch.dtype:
        return self.where.dtype

    @torch.no_grad()
    def forward(
        self, sample: Tensor, timestep: Time, return_dict: bool = True, **_: object
    ) -> SimpleNamespace | tuple[Tensor]:
        t = self.schedule.check(wide_time(timestep, sample.device))
        x = y = sample.double()
        u = t
        if self.process != self.schedule:
            alpha = self.schedule.alpha(t)
            u = self.process.time((self.schedule.sigma(t) / alpha).clamp(*self.process.ratios))
            ratio = self.process.alpha(u) / alpha
            y = x * ratio.reshape(ratio.shape + (1,) * (x.ndim - ratio.ndim))
        out = convert(self.score.denoise(y, u), "x0", self.predicts, x, t, self.schedule).to(sample.dtype)
        return SimpleNamespace(sample=out) if return_dict else (out,)
