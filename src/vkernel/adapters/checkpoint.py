r"""Somebody's network as a score (docs/theory.md, §1.5).

A network is a function of an image and of a number that tells it the noise level. To read it as a score one must know

* its **process**: which :math:`\alpha_t, \sigma_t` made :math:`x = \alpha x_0 + \sigma\,\mathrm{noise}`;
* its **prediction**: ``noise``, ``x0``, ``v``, ``flow`` (the table in :mod:`vkernel.score.conversions`), or ``score``;
* its **time**: what the second argument is,

  ============  =======================================================================================
  index         DDPM: t rounded to a whole number, as an integer; ``index:N`` in continuous time: N t
  fraction      DDPM with N betas: t / (N-1); continuous time: t itself; ``fraction:N``: t / N
  sigma         :math:`\sigma_t`, as in EDM's ``net(x, sigma)``
  reversed      DDPM: N - 1 - index; continuous time: 1 - t, and a flow has the opposite sign
  a function    of t, whatever it returns
  ============  =======================================================================================

* its **range**: the interval to which pixels were mapped for training.

A :class:`Checkpoint` is these four with the network, and for a class-conditional network ``net(x, told, labels)`` one
**label**: the score of that class, whose training set is the images of that class. (Guidance blends two scores into
one that belongs to no training set; a guided sampler is not a score, and is not audited.)

An index has no fractions: for networks told an index t is
rounded to it, and :math:`\alpha, \sigma` are taken at the rounded index too, so that the score is exact there.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from vkernel.adapters import diffusers as pipelines
from vkernel.adapters import weights as files
from vkernel.core.checks import is_whole
from vkernel.core.covariance import fits
from vkernel.core.errors import InputError, require
from vkernel.data.empirical import Empirical
from vkernel.process import DDPM, Anisotropic, Process
from vkernel.score import conversions as pr
from vkernel.score.conversions import Time

__all__ = ["PREDICTIONS", "TIMES", "Checkpoint", "read"]

PREDICTIONS = ("noise", "x0", "v", "flow", "score")
TIMES = ("index", "fraction", "sigma", "reversed")
_FROM = {"noise": pr.from_noise, "x0": pr.from_x0, "v": pr.from_v, "flow": pr.from_flow}
_TO = {"noise": pr.to_noise, "x0": pr.to_x0, "v": pr.to_v, "flow": pr.to_flow}
_NUMBERS = 2**18  # numbers of x in one call of the network, unless told otherwise

Net = Callable[..., Any]


@dataclass(frozen=True, eq=False, repr=False)
class Checkpoint:
    """A network with its conventions; ``checkpoint(x, t)`` is its score, and any sampler takes it as one.

    ``x`` is ``(*batch, *shape)`` in the network's pixel units (:meth:`scaled` brings data there), ``t`` is in the time
    of ``process``. The network runs in its own precision and on its own device, ``batch`` images a call; results are
    like ``x``, and differentiable in ``x`` where ``x`` asks for it. Without ``shape`` the first axis of ``x`` is the
    batch. ``notes`` are what was assumed on the way, in sentences.
    """

    net: Net
    process: Process
    prediction: str = "noise"
    time: str | Callable[[Tensor], Tensor] = "index"
    range: tuple[float, float] = (-1.0, 1.0)
    shape: tuple[int, ...] | None = None
    name: str = "network"
    batch: int | None = None
    label: int | None = None
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        require(callable(self.net), f"The network must be callable, net(x, t); got {type(self.net).__name__}.")
        require(isinstance(self.process, Process), f"process must be a process such as vk.EDM(), not {self.process!r}.")
        require(not isinstance(self.process, Anisotropic), "Networks are read under isotropic noise alone.")
        known = ", ".join(PREDICTIONS)
        require(self.prediction in PREDICTIONS, f"prediction must be one of {known}, not {self.prediction!r}.")
        require(
            self.label is None or (is_whole(self.label) and self.label >= 0),
            f"label must be a class, a whole number ≥ 0, not {self.label!r}.",
        )
        object.__setattr__(self, "range", files.interval(self.range))
        object.__setattr__(self, "shape", None if self.shape is None else tuple(int(k) for k in self.shape))
        told(self.time, self.process, torch.tensor([self.process.T], dtype=torch.float64))  # refuses what it must

    @classmethod
    def from_callable(
        cls,
        net: Net,
        process: Process,
        *,
        prediction: str = "noise",
        time: str | Callable[[Tensor], Tensor] = "index",
        range: Any = (-1.0, 1.0),
        shape: tuple[int, ...] | None = None,
        name: str = "network",
        label: int | None = None,
    ) -> Checkpoint:
        """Any ``net(x, told)``, ``told (B,)``, that returns a tensor like x, or holds it in ``.sample`` or ``.mean``.

        With ``label`` it is called as ``net(x, told, labels)``, ``labels (B,)``. A module is put into evaluation mode.
        """
        if isinstance(net, nn.Module):
            net.eval()
        return cls(net, process, prediction, time, range, shape, name, label=label)

    @classmethod
    def from_weights(
        cls,
        path: str | os.PathLike[str],
        factory: str | Callable[[], nn.Module],
        *,
        betas: Any,
        prediction: str = "noise",
        time: str | Callable[[Tensor], Tensor] = "index",
        range: Any = (-1.0, 1.0),
        strip: str = "",
        device: torch.device | str = "cpu",
        shape: tuple[int, ...] | None = None,
        name: str | None = None,
        label: int | None = None,
    ) -> Checkpoint:
        """The module that ``factory`` builds, with the weights in ``path`` (.safetensors, or a state dict by torch).

        ``factory`` is a function, or text: ``"package.file:factory"`` or ``"path/to/file.py:factory"``. That is *your*
        code, and importing it runs it; the weight file is data, and nothing in it runs. ``betas`` is
        ``"linear:1e-4:.02:1000"``, ``"scaled_linear:…"``, ``"cosine:1000"``, ``"key:NAME"`` (a buffer in the file),
        numbers, a process, or its name (``"edm"``, ``"flow"``, ``"vpsong:beta_max=10"``). ``strip``: keys of the
        network begin with this; other keys are left alone. ``label``: the class of a class-conditional network.
        """
        weights = files.read_weights(path)
        process, note = files.read_process(betas, weights, str(path))
        module = files.fill(files.build(factory), files.stripped(weights, strip, str(path)), str(path))
        module = module.to(device).eval().requires_grad_(False)
        notes = (note,) if note else ()
        return cls(module, process, prediction, time, range, shape, name or Path(path).name, label=label, notes=notes)

    @classmethod
    def from_diffusers(
        cls, source: Any, scheduler: Any = None, *, device: torch.device | str = "cpu", label: int | None = None
    ) -> Checkpoint:
        """A diffusers pipeline or its folder, or a UNet2DModel (or its folder) and a scheduler; never a download.

        A class-conditional network needs its ``label``.
        """
        parts = pipelines.read(source, scheduler, device, label)
        stated = (parts.prediction, "index", (-1.0, 1.0), parts.shape, parts.name)
        return cls(parts.unet, parts.process, *stated, label=label)

    def __call__(self, x: Tensor, t: Time) -> Tensor:
        """The score, like x."""
        return self._predict(x, t, "score")

    def denoise(self, x: Tensor, t: Time) -> Tensor:
        """The denoised image, like x."""
        return self._predict(x, t, "x0")

    def noise(self, x: Tensor, t: Time) -> Tensor:
        """The predicted noise, like x."""
        return self._predict(x, t, "noise")

    def output(self, x: Tensor, t: Time) -> Tensor:
        """What the network itself returns, like x."""
        batch, event = self._split(x)
        rows, times = x.reshape(-1, *event), _over_batch(t, batch, x.device).double().reshape(-1)
        step = self.batch or max(1, _NUMBERS // max(1, math.prod(event)))
        with torch.set_grad_enabled(torch.is_grad_enabled() and _wants_derivative(x)):
            parts = [self._run(a, b) for a, b in zip(rows.split(step), times.split(step), strict=True)]
            return torch.cat(parts).reshape(x.shape)

    def at(self, t: Time) -> Tensor:
        """The times that are meant by ``t``: themselves, or for networks told an index the nearest index."""
        t = self.process.check(pr.as_time(t, t.device if isinstance(t, Tensor) else torch.device("cpu")))
        if not (isinstance(self.process, DDPM) and self.time in ("index", "reversed")):
            return t
        return t.round().clamp(math.ceil(self.process.eps), math.floor(self.process.T))

    def scaled(self, data: Empirical) -> Empirical:
        """The data in the network's pixel units: stored integers are mapped to ``range``, floats are as they are."""
        if "int" not in data.stored or data.scale == self.range:
            return data
        info = torch.iinfo(getattr(torch, data.stored))
        low, high = data.scale or (float(info.min), float(info.max))
        factor = (self.range[1] - self.range[0]) / (high - low)
        moved = copy.copy(data)
        moved.scale, moved.spread = self.range, data.spread * factor
        moved.center = self.range[0] + (data.center - low) * factor
        return moved

    def __repr__(self) -> str:
        time = self.time if isinstance(self.time, str) else "a function of t"
        low, high = self.range
        return (
            f"Checkpoint({self.name!r}: predicts {self.prediction}, is told {time}, pixels in [{low:g}, {high:g}], "
            f"shape {self.shape}, {'' if self.label is None else f'class {self.label}, '}{self.process!r})"
        )

    def _predict(self, x: Tensor, t: Time, want: str) -> Tensor:
        require(isinstance(x, Tensor), f"x must be a torch tensor, not {type(x).__name__}.")
        x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
        t = _over_batch(self.at(t), self._split(x)[0], x.device)
        return read(self.output(x, t), self.prediction, want, x, t, self.process)

    def _split(self, x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape of the batch and that of an image."""
        events = x.ndim - 1 if self.shape is None else len(self.shape)
        batch, event = tuple(x.shape[: x.ndim - events]), tuple(x.shape[x.ndim - events :])
        require(
            x.ndim >= events and (self.shape is None or event == self.shape),
            f"x has shape {tuple(x.shape)}; {self.name} takes images of shape {self.shape}.",
        )
        return batch, event

    def _run(self, x: Tensor, t: Tensor) -> Tensor:
        """One call of the network, on its device and in its precision; the answer like x."""
        held = self.net.parameters() if isinstance(self.net, nn.Module) else ()
        home = next((p for p in held if p.is_floating_point()), x)
        number = told(self.time, self.process, t).to(home.device)
        number = number.to(home.dtype) if number.is_floating_point() else number
        label = () if self.label is None else (torch.full((len(x),), self.label, device=home.device),)
        out = tensor_of(self.net(x.to(home.device, home.dtype), number, *label), self.name)
        require(
            out.shape == x.shape,
            f"{self.name} was given images of shape {tuple(x.shape)} and returned {tuple(out.shape)}; it must return "
            "a tensor like the one it is given.",
        )
        out = out.to(x.device, x.dtype)
        return -out if self.time == "reversed" and self.prediction == "flow" else out


def read(out: Tensor, prediction: str, want: str, x: Tensor, t: Time, process: Process) -> Tensor:
    """The prediction ``out`` at (x, t), told as another: ``want`` is any of ``PREDICTIONS``."""
    if prediction == want:
        return out
    score = out if prediction == "score" else _FROM[prediction](lambda *_: out, process)(x, t)
    return score if want == "score" else _TO[want](lambda *_: score, process)(x, t)


def told(time: str | Callable[[Tensor], Tensor], process: Process, t: Tensor) -> Tensor:
    """What a network of this time convention is told at the times t."""
    if callable(time):
        return time(t)
    kind, _, number = str(time).partition(":")
    require(
        kind in TIMES and (not number or kind in ("index", "fraction")),
        f"time must be one of {', '.join(TIMES)}, with a number index:N or fraction:N, or a function; got {time!r}.",
    )
    try:
        count = float(number) if number else None
    except ValueError:
        raise InputError(f"{time!r} gives no number after the colon; write for example {kind}:1000.") from None
    require(count is None or count > 0, f"The number in {time!r} must be positive.")
    last = len(process.betas) - 1 if isinstance(process, DDPM) else None
    if kind == "sigma":
        return process.sigma(t)
    if kind == "fraction":
        return t / (count or last or 1)
    if last is not None:
        require(count is None, f"The indices of {process!r} are its own: write 'index', not {time!r}.")
        index = t.round().long()
        return index if kind == "index" else last - index
    if kind == "reversed":
        return 1 - t
    require(
        count is not None, "A process in continuous time has no index; give 'index:1000' if the network is told 1000 t."
    )
    return t * count  # type: ignore[operator]


def tensor_of(out: Any, name: str = "The network") -> Tensor:
    """The tensor in what a network returned: itself, its ``.sample`` or ``.mean``, or the first of a tuple."""
    for found in (out, getattr(out, "sample", None), getattr(out, "mean", None)):
        if isinstance(found, Tensor):
            return found
    if isinstance(out, tuple) and out and isinstance(out[0], Tensor):
        return out[0]
    raise InputError(
        f"{name} returned a {type(out).__name__}; it must return a tensor, or hold one in .sample or .mean."
    )


def _over_batch(t: Time, batch: tuple[int, ...], device: torch.device) -> Tensor:
    t = pr.as_time(t, device)
    shape = tuple(t.shape)
    require(fits(shape, batch), f"t has shape {shape}, which does not broadcast to the batch {batch} of x.")
    return t.expand(batch)


def _wants_derivative(x: Tensor) -> bool:
    return x.requires_grad or forward_ad.unpack_dual(x).tangent is not None
