r"""Anyone's network as a score (docs/theory.md, §1.5).

Four conventions turn a network, a function of an image and of a number that encodes the noise level, into a score:

* its **process**: the :math:`\alpha_t, \sigma_t` of :math:`x = \alpha x_0 + \sigma\epsilon` in training;
* **predicts**: ``score``, ``noise``, ``x0``, ``v``, ``flow`` or ``edm`` (table in :mod:`vkernel.score.conversions`);
* **time**: the second argument of the network,

  ============  =======================================================================================
  t             t itself
  index         DDPM: t rounded to a whole number, as an integer; ``index:N`` in continuous time: N t
  fraction      DDPM with N betas: t / (N-1); continuous time: t itself; ``fraction:N``: t / N
  sigma         :math:`\sigma_t`, as in EDM's ``net(x, sigma)``
  c_noise       :math:`\tfrac14 \log(\sigma_t/\alpha_t)`, as in EDM's raw network
  reversed      DDPM: N - 1 - index; continuous time: 1 - t, and a flow has the opposite sign
  a function    of t
  ============  =======================================================================================

* **range**: the interval to which pixels were mapped for training, or ``None``.

A network with ``predicts="edm"`` is the raw network :math:`F(c_{in} x/\alpha, \cdot)`, :math:`c_{in} =
1/\sqrt{\tilde\sigma^2 + \sigma_d^2}`; one that returns the denoised image predicts ``x0``. For networks that take an
index, t is rounded to it, and :math:`\alpha, \sigma` are taken there too. With ``label``, the network is
class-conditional, ``net(x, time, labels)``, and the score is that of one class. With ``condition (k, …)``, embeddings
of k prompts say, the network is ``net(x, time, encoder_hidden_states=…)`` (or another name), and the i-th image of a
batch has the (i mod k)-th of them."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from vkernel.core.checks import check_positive, check_real, check_whole
from vkernel.core.covariance import over_event
from vkernel.core.errors import InputError, require
from vkernel.data import Empirical
from vkernel.process import DDPM, Anisotropic, Process
from vkernel.score.base import Score, Time, as_time, differentiated
from vkernel.score.conversions import check_predicts, convert

# the second argument of a network in continuous time, by the process, t, and the number N of index:N or fraction:N
TIMES: dict[str, Callable[[Process, Tensor, float], Tensor]] = {
    "t": lambda p, t, N: t,
    "index": lambda p, t, N: t * N,
    "fraction": lambda p, t, N: t / N,
    "sigma": lambda p, t, N: p.base.sigma(t),
    "c_noise": lambda p, t, N: p.base.log_snr(t) / -8,
    "reversed": lambda p, t, N: 1 - t,
}
CONDITION = "encoder_hidden_states"  # the name in diffusers
RANGES = ((-1.0, 1.0), (0.0, 1.0), (-0.5, 0.5), (0.0, 255.0))  # of pixels, in common use
_NUMBERS = 2**18  # numbers of x in one call of the network, unless ``batch`` is given
Network = Callable[..., object]  # net(x, time), net(x, time, labels), or with a condition by name
TimeInput = str | Callable[[Tensor], Tensor]


def as_score(
    fn: Network,
    process: Process,
    shape: Sequence[int] | None = None,
    predicts: str = "score",
    time: TimeInput = "t",
    range: Sequence[float] | str | None = None,
    *,
    name: str = "network",
    batch: int | None = None,
    label: int | None = None,
    sigma_data: float = 0.5,
    dtype: torch.dtype | None = None,
    condition: Tensor | None = None,
    condition_name: str = CONDITION,
) -> Wrapped:
    """Wrap a function or module as a :class:`~vkernel.score.base.Score`.

    ``fn(x, time)`` takes ``x (B, *shape)`` and ``time (B,)`` and returns a tensor like ``x``, or an object that holds
    it in ``.sample`` or ``.mean``, or a tuple whose first entry it is. With ``shape=None`` the first call decides the
    shape, and its first dimension is the batch. ``predicts``, ``time``, ``range``, ``label``, ``sigma_data``,
    ``condition`` and its name are the conventions of :mod:`vkernel.score.wrapped`; ``batch`` is the largest number of
    events in one call. With ``dtype`` (``torch.bfloat16``, ``torch.float16``) the network runs under autocast. Modules
    are put into evaluation mode.

    >>> import torch, vkernel as vk
    >>> score = vk.as_score(lambda x, t: -x, vk.VP())  # the score of a standard normal
    >>> score(torch.ones(3, 2), 0.5).shape
    torch.Size([3, 2])
    """
    if isinstance(fn, nn.Module):
        fn.eval()
    ends, event = None if range is None else interval(range), None if shape is None else tuple(shape)
    more: dict[str, Any] = {"sigma_data": sigma_data, "dtype": dtype}
    more |= {"condition": condition, "condition_name": condition_name}
    return Wrapped(fn, process, predicts, time, ends, event, name, batch, label, **more)


@dataclass(eq=False, repr=False)
class Wrapped(Score):
    """A network with its conventions as a score; made by :func:`as_score`.
    ``x`` is in the network's pixel units (:meth:`scaled` maps data there). The network runs in its own precision and on
    its own device. ``notes`` are sentences about what was assumed when the network was read, ``schedules`` those
    that were found beside its weights, by name.

    >>> import torch, vkernel as vk
    >>> score = vk.as_score(lambda x, t: x, vk.VP(), shape=(2,), predicts="noise", time="t")
    >>> isinstance(score, vk.score.Wrapped), score(torch.ones(3, 2), 0.5).shape
    (True, torch.Size([3, 2]))
    """

    net: Network
    process: Process
    predicts: str = "noise"
    time: TimeInput = "index"
    range: tuple[float, float] | None = (-1.0, 1.0)
    shape: tuple[int, ...] | None = None
    name: str = "network"
    batch: int | None = None
    label: int | None = None
    notes: tuple[str, ...] = ()
    sigma_data: float = 0.5
    dtype: torch.dtype | None = None
    condition: Tensor | None = None
    condition_name: str = CONDITION
    schedules: tuple[tuple[str, Process], ...] = ()

    def __post_init__(self) -> None:
        require(callable(self.net), f"The network must be callable, net(x, t); got {type(self.net).__name__}.")
        require(isinstance(self.process, Process), f"process must be a process such as vk.EDM(), not {self.process!r}.")
        check_predicts(self.predicts)
        isotropic = not isinstance(self.process, Anisotropic) or self.predicts in ("score", "x0")
        require(isotropic, "Networks that predict noise, v, flow or edm are read under isotropic noise only.")
        if self.label is not None:
            check_whole(self.label, "label, a class,", least=0)
        check_positive(self.sigma_data, "sigma_data")
        if self.batch is not None:
            check_whole(self.batch, "batch")
        if self.condition is not None:
            good = isinstance(self.condition, Tensor) and self.condition.ndim >= 2 and self.condition.isfinite().all()
            require(good, "condition must be a tensor (k, …) of finite numbers, one entry for each of k conditions.")
        self.range = None if self.range is None else interval(self.range)
        self.shape = None if self.shape is None else tuple(int(k) for k in self.shape)
        time_input(self.time, self.process, torch.tensor([self.process.T], dtype=torch.float64))  # check the convention

    def __call__(self, x: Tensor, t: Time) -> Tensor:
        return self._predict(x, t, "score")

    def denoise(self, x: Tensor, t: Time) -> Tensor:
        """Return the denoised image, like x."""
        return self._predict(x, t, "x0")

    def noise(self, x: Tensor, t: Time) -> Tensor:
        """Return the predicted noise, like x."""
        return self._predict(x, t, "noise")

    def output(self, x: Tensor, t: Time) -> Tensor:
        """Return the raw output of the network, like x."""
        x, t = self.check(x, t)
        batch, event = self.split(x)
        rows, times = x.reshape(-1, *event), t.to(x.device).double().expand(batch).reshape(-1)
        step = max(1, min(self.batch or _NUMBERS // max(1, math.prod(event)), len(rows)))
        with torch.set_grad_enabled(torch.is_grad_enabled() and differentiated(x)):
            parts = zip(rows.split(step), times.split(step), strict=True)
            return torch.cat([self._run(*part, k * step) for k, part in enumerate(parts)]).reshape(x.shape)

    def conditioned(self, first: int = 0, count: int | None = None) -> Self:
        """Return the network with ``count`` conditions (default: all), of which the ``first`` is that of image 0."""
        if self.condition is None:
            return self
        return replace(self, condition=self.condition.roll(-first, 0)[:count])

    def at(self, t: Time) -> Tensor:
        """Return the times at which the network is evaluated: t, or the nearest index for networks that take one."""
        t = self.process.check(as_time(t, t.device if isinstance(t, Tensor) else torch.device("cpu")))
        if not (isinstance(self.process, DDPM) and self.time in ("index", "reversed")):
            return t
        return t.round().clamp(math.ceil(self.process.eps), math.floor(self.process.T))

    def scaled(self, data: Empirical) -> Empirical:
        """Return the data in the network's pixel units: stored integers are mapped to ``range``, floats are kept."""
        if self.range is None or "int" not in data.stored or data.scale == self.range:
            return data
        info = torch.iinfo(getattr(torch, data.stored))
        low, high = data.scale or (float(info.min), float(info.max))
        first, last = self.range
        factor = (last - first) / (high - low)
        moved = copy.copy(data)
        moved.scale, moved.spread = (first, last), data.spread * factor
        moved.center = first + (data.center - low) * factor
        return moved

    def __repr__(self) -> str:
        time = self.time if isinstance(self.time, str) else "a function of t"
        pixels = "" if self.range is None else "pixels in [{:g}, {:g}], ".format(*self.range)
        label = "" if self.label is None else f"class {self.label}, "
        network = f"{self.name!r}: predicts {self.predicts}, time input {time}"
        return f"{type(self).__name__}({network}, {pixels}shape {self.shape}, {label}{self.process!r})"

    def _predict(self, x: Tensor, t: Time, wants: str) -> Tensor:
        x, t = self.check(x, t)
        t = self.at(t.to(x.device)).expand(self.split(x)[0])
        return convert(self.output(x, t), self.predicts, wants, x, t, self.process, self.sigma_data)

    def _run(self, x: Tensor, t: Tensor, first: int = 0) -> Tensor:
        """Call the network once, on its device and in its precision; the result is like x, images from ``first`` on."""
        held = self.net.parameters() if isinstance(self.net, nn.Module) else ()
        home = next((p for p in held if p.is_floating_point()), x)
        number = time_input(self.time, self.process, t).to(home.device)
        number = number.to(home.dtype) if number.is_floating_point() else number
        label = () if self.label is None else (torch.full((len(x),), self.label, device=home.device),)
        named = {}
        if self.condition is not None:
            given = self.condition.to(home.device)
            turn = torch.arange(first, first + len(x), device=home.device) % len(given)
            named = {self.condition_name: (given.to(home.dtype) if given.is_floating_point() else given)[turn]}
        rows = x
        if self.predicts == "edm":
            size = (self.process.S(t) + (self.process.alpha(t) * self.sigma_data).square()).sqrt()
            rows = x / over_event(size.to(x), x.shape[1:])
        try:
            with torch.autocast(home.device.type, self.dtype) if self.dtype else contextlib.nullcontext():
                out = _tensor_of(self.net(rows.to(home.device, home.dtype), number, *label, **named), self.name)
        except torch.OutOfMemoryError as error:
            fewer = "give a smaller batch (on the command line --batch)"
            raise InputError(f"{self.name} ran out of memory with a batch of {len(x)}; {fewer}.") from error
        shapes = f"{self.name} was given a batch of shape {tuple(x.shape)} and returned {tuple(out.shape)}"
        require(out.shape == x.shape, f"{shapes}; it must return a tensor of the same shape.")
        out = out.to(x.device, x.dtype)
        return -out if self.time == "reversed" and self.predicts == "flow" else out


def time_input(time: TimeInput, process: Process, t: Tensor) -> Tensor:
    """Return the second argument of a network with the convention ``time`` at the times t."""
    if callable(time):
        return check_real(time(t), "What the function of time returns")
    kind, _, number = str(time).partition(":")
    good = kind in TIMES and (not number or kind in ("index", "fraction"))
    known = f"one of {', '.join(TIMES)}, with a number index:N or fraction:N, or a function"
    require(good, f"time must be {known}; got {time!r}.")
    try:
        count = float(number or 0)
    except ValueError:
        raise InputError(f"{time!r} has no number after the colon; write for example {kind}:1000.") from None
    require(not number or count > 0, f"The number in {time!r} must be positive.")
    last = len(process.betas) - 1 if isinstance(process, DDPM) else 0
    if last and kind in ("index", "reversed"):
        require(not number, f"{process!r} defines its indices: write 'index', not {time!r}.")
        index = t.round().long()
        return index if kind == "index" else last - index
    hint = "give 'index:1000' if the network takes 1000 t"
    require(number or kind != "index", f"A process in continuous time has no index; {hint}.")
    return TIMES[kind](process, t, count or last or 1)


def interval(ends: Sequence[float] | str) -> tuple[float, float]:
    """Return ``"-1,1"`` or a pair as two numbers."""
    try:
        low, high = (float(end) for end in (ends.split(",") if isinstance(ends, str) else ends))
    except (TypeError, ValueError):
        raise InputError(f"range must be two numbers low,high such as -1,1, not {ends!r}.") from None
    require(math.isfinite(low) and math.isfinite(high) and low < high, f"range must have low < high, not {ends!r}.")
    return low, high


def remapped(x: Tensor, source: tuple[float, float] | None, target: tuple[float, float] | None) -> Tensor:
    """Return pixels of the range ``source`` in the range ``target``, unchanged if one of them is unknown."""
    if source is None or target is None or source == target:
        return x
    # the order of Empirical.values, so that equal bytes become equal floats
    return x.sub(source[0]).div_(source[1] - source[0]).mul_(target[1] - target[0]).add_(target[0])


def _tensor_of(out: object, name: str) -> Tensor:
    """Return the tensor in the output of a network: itself, its ``.sample`` or ``.mean``, or a tuple's first entry."""
    first = out[0] if isinstance(out, tuple) and out else None
    for found in (out, getattr(out, "sample", None), getattr(out, "mean", None), first):
        if isinstance(found, Tensor):
            return check_real(found, f"What {name} returns")
    kind = type(out).__name__
    raise InputError(f"{name} returned a {kind}; it must return a tensor, or hold one in .sample or .mean.")
