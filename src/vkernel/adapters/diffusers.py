r"""Networks of diffusers as scores, and scores as networks of diffusers.

A scheduler with N betas is the process :class:`~vkernel.process.DDPM` with :math:`\alpha_t^2 = \bar\alpha_t`, and its
``prediction_type`` has other names there:

=================  ============================================
epsilon            noise
sample             x0
v_prediction       v = alpha noise - sigma x0
=================  ============================================

Of a folder only the JSON configurations and the weight files are read. The network is built from diffusers' own
classes, so no code in the folder runs, and nothing is ever downloaded.

Conversely, ``as_unet`` evaluates a score for each call :math:`(x, i)` of a pipeline. If the score has another
process, the point is moved to where sigma/alpha is equal: the denoised image
:math:`\hat x_0` is the same there, and :math:`\mathrm{noise} = (x - \alpha_i \hat x_0) / \sigma_i`.
"""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from vkernel.adapters import weights as files
from vkernel.core.errors import InputError, require
from vkernel.process import DDPM, Process
from vkernel.score.base import Score, Time, check_score, wide_time
from vkernel.score.conversions import convert

PREDICTION = {"epsilon": "noise", "sample": "x0", "v_prediction": "v"}
_WEIGHTS = ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin")
_ONLY = "only UNet2DModel networks in pixel space can be audited"


@dataclass(frozen=True)
class Parts:
    """The network of a pipeline with its process, what it predicts, and its image shape."""

    unet: Any
    process: Process
    predicts: str
    shape: tuple[int, ...] | None
    name: str


def read(source: Any, scheduler: Any = None, device: torch.device | str = "cpu", label: int | None = None) -> Parts:
    """Return the parts of a pipeline or its folder; or of a UNet2DModel with a scheduler, objects or folders."""
    if isinstance(source, str | os.PathLike):
        folder = Path(source).expanduser()
        unet, found = _read_folder(folder, scheduler is None, label)
        unet, name = unet.to(device), folder.name
        unet.requires_grad_(False)
    else:
        _check_components(getattr(source, "components", {}), "This pipeline")
        unet, found = getattr(source, "unet", source), getattr(source, "scheduler", None)
        name = type(source).__name__
    scheduler = found if scheduler is None else scheduler
    if isinstance(scheduler, str | os.PathLike):
        scheduler = _read_scheduler(Path(scheduler).expanduser())
    require(scheduler is not None, f"{name} comes without a scheduler; give the one it was trained with as scheduler=.")
    _check_unet(unet.config, name, label)
    require(_class_of(unet) == "UNet2DModel", f"{name} holds a {_class_of(unet)}, which is not supported: {_ONLY}.")
    size = unet.config.sample_size
    size = (size, size) if isinstance(size, int) else size
    channels = unet.config.in_channels
    shape = None if size is None else (channels, *size)
    unet.eval()
    net = unet if unet.config.out_channels == channels else _FirstHalf(unet, channels)
    return Parts(net, process_of(scheduler), prediction_of(scheduler), shape, name)


def process_of(scheduler: Any) -> DDPM:
    """Return the process of a diffusers scheduler, without a last index that has no signal (zero terminal SNR)."""
    abar = getattr(scheduler, "alphas_cumprod", None)
    require(
        isinstance(abar, Tensor),
        f"{_class_of(scheduler)} has no betas (alphas_cumprod); give a scheduler that has, such as DDPMScheduler, or "
        "wrap the network with vk.as_score and its process.",
    )
    abar = abar.detach().double().cpu()  # type: ignore[union-attr]
    return DDPM.from_alphas_cumprod(abar[abar > 0])


def prediction_of(scheduler: Any) -> str:
    """Return what the network of a scheduler predicts, by the names of this package."""
    kind = getattr(scheduler.config, "prediction_type", "epsilon")
    require(kind in PREDICTION, f"prediction_type must be one of {', '.join(PREDICTION)}; the scheduler has {kind!r}.")
    return PREDICTION[kind]


def diffusers() -> Any:
    try:
        return importlib.import_module("diffusers")
    except ImportError as error:
        raise InputError("Reading diffusers folders needs diffusers: pip install 'vkernel[audit]'.") from error


def _read_folder(folder: Path, needs_scheduler: bool, label: int | None) -> tuple[Any, Any]:
    require(folder.exists(), f"There is no folder {folder}; folders are read from this machine, never downloaded.")
    require(folder.is_dir(), f"{folder} is a file; a diffusers model is a folder made by save_pretrained.")
    index = folder / "model_index.json"
    if not index.is_file():
        return _read_unet(folder, label), None
    _check_components(_json(index), str(folder))
    scheduler = _read_scheduler(folder / "scheduler") if needs_scheduler else None
    return _read_unet(folder / "unet", label), scheduler


def _check_components(held: dict[str, Any], name: str) -> None:
    """Refuse pipelines with more than a network and a scheduler."""
    present = [k for k, v in held.items() if not k.startswith("_") and v is not None and v not in ([None] * 2, False)]
    extra = [k for k in present if k not in ("unet", "scheduler") and not isinstance(held[k], int | float | str)]
    require(
        not extra, f"{name} also has {', '.join(extra)}: latent, text and guided pipelines are not supported, {_ONLY}."
    )
    require(not held or "unet" in present, f"{name} has no unet, which is not supported: {_ONLY}.")


def _check_unet(config: Any, name: str, label: int | None) -> None:
    get = config.get if hasattr(config, "get") else lambda k, d=None: getattr(config, k, d)
    classes = get("num_class_embeds")
    conditional = classes is not None or get("class_embed_type") is not None
    require(conditional or label is None, f"{name} is not class-conditional; it takes no label.")
    require(
        not conditional or label is not None,
        f"{name} is class-conditional: an audit is of one class at a time. Give its number as label= (on the command "
        "line --label, with --labels for the classes of the training images).",
    )
    require(
        classes is None or label is None or label < classes,
        f"{name} has classes 0 to {(classes or 0) - 1}, not {label}.",
    )
    fourier = get("time_embedding_type") == "fourier"
    require(
        not fourier,
        f"{name} embeds Fourier features of sigma (variance exploding), which is not supported here; "
        "wrap it with vk.as_score.",
    )
    ins, outs = get("in_channels"), get("out_channels")
    require(outs in (ins, 2 * ins), f"{name} takes {ins} channels and returns {outs}, which is not supported: {_ONLY}.")


def _read_unet(folder: Path, label: int | None) -> nn.Module:
    config = _json(folder / "config.json")
    kind = config.get("_class_name")
    require(kind == "UNet2DModel", f"{folder} holds a {kind}, which is not supported: {_ONLY}.")
    try:
        unet = diffusers().UNet2DModel.from_config(config)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"No UNet2DModel can be made from {folder / 'config.json'}: {files.reason(error)}.") from error
    _check_unet(unet.config, str(folder), label)
    found = [folder / name for name in _WEIGHTS if (folder / name).is_file()]
    require(found, f"{folder} holds no weights; looked for {' and '.join(_WEIGHTS)}.")
    return files.fill(unet, files.read_weights(found[0]), str(found[0]))


def _read_scheduler(folder: Path) -> Any:
    path = folder / "scheduler_config.json" if folder.is_dir() else folder
    config, library = _json(path), diffusers()
    kind = str(config.get("_class_name"))
    made = getattr(library, kind, None) if kind.endswith("Scheduler") else None
    require(isinstance(made, type), f"{path} names {kind!r}, which is no scheduler of diffusers.")
    try:
        return made.from_config(config)  # type: ignore[union-attr]
    except Exception as error:
        raise InputError(f"No {kind} can be made from {path}: {files.reason(error)}.") from error


def _json(path: Path) -> dict[str, Any]:
    require(path.is_file(), f"There is no {path}; a diffusers model is a folder made by save_pretrained.")
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {files.reason(error)}.") from error
    require(isinstance(held, dict), f"{path} holds a {type(held).__name__}, not the settings of a diffusers object.")
    return held


def _class_of(held: Any) -> str:
    return type(held).__name__


class _FirstHalf(nn.Module):
    """A network that also predicts variances, restricted to its first output."""

    def __init__(self, unet: nn.Module, channels: int) -> None:
        super().__init__()
        self.unet, self.channels = unet, channels

    def forward(self, x: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.unet(x, t, labels).sample[:, : self.channels]


def as_unet(score: Score, scheduler: object, *, shape: tuple[int, ...] | None = None) -> ScoreUNet:
    """Return a score as the ``unet`` of a diffusers pipeline: ``DDIMPipeline(as_unet(score, scheduler), scheduler)``.

    Its output is in the scheduler's ``prediction_type``. ``shape`` is that of an image, ``(C, H, W)``; by default that
    of the score. Pipelines show pixels in [-1, 1]: give a score of data in that range.
    """
    process = check_score(score, "A pipeline").process
    shape = tuple(shape or score.shape or ())
    require(len(shape) == 3, f"A pipeline makes images (C, H, W); give shape=, this score's is {shape or 'unknown'}.")
    schedule = process_of(scheduler)
    (first, last), (low, high) = _reach(schedule), _reach(process)
    require(
        low <= 1.05 * first and 1.05 * high >= last,
        f"The scheduler's indices span sigma/alpha from {first:.3g} to {last:.3g}, and {process!r} only {low:.3g} to "
        f"{high:.3g}; construct the process with a smaller eps or a larger T, or use DDPM with the scheduler's betas.",
    )
    return ScoreUNet(score, schedule, prediction_of(scheduler), shape)


def _reach(process: Process) -> tuple[float, float]:
    """sigma/alpha at eps and at T."""
    ends = torch.tensor([process.eps, process.T], dtype=torch.float64)
    low, high = (process.sigma(ends) / process.alpha(ends)).tolist()
    return low, high


def _over_batch(a: Tensor, x: Tensor) -> Tensor:
    return a.reshape(a.shape + (1,) * (x.ndim - a.ndim))


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
    def forward(self, sample: Tensor, timestep: Time, return_dict: bool = True, **_: Any) -> Any:
        t = self.schedule.check(wide_time(timestep, sample.device))
        x = sample.double()
        out = convert(self._denoise(x, t), "x0", self.predicts, x, t, self.schedule).to(sample.dtype)
        return SimpleNamespace(sample=out) if return_dict else (out,)

    def _denoise(self, x: Tensor, t: Tensor) -> Tensor:
        if self.process != self.schedule:
            alpha = self.schedule.alpha(t)
            t = self.process.time((self.schedule.sigma(t) / alpha).clamp(*_reach(self.process)))
            x = x * _over_batch(self.process.alpha(t) / alpha, x)
        return self.score.denoise(x, t)
