"""The base class of forward processes: checks, time grids, draws and conversions (theory, §1)."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from types import FunctionType
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.checks import as_tensor, check_array, check_choice, check_real, check_whole
from vkernel.core.covariance import Covariance
from vkernel.core.errors import InputError, require
from vkernel.core.memory import check_memory
from vkernel.core.rng import Generator

Time = float | Tensor
Device = torch.device | str | None
Dtype = torch.dtype | None


def formula(f: Callable[..., Tensor]) -> Callable[[Process, Time], Tensor]:
    """Let ``f(self, t)`` take numbers, integers and half precision; the result has t's dtype."""

    def at(self: Process, t: Time) -> Tensor:
        t = _tensor(t)
        return f(self, t.to(wide_dtype(t.dtype))).to(t.dtype)

    return functools.wraps(f)(at)


class Process(ABC):
    """A forward process on ``[eps, T]``; the final kinds are in the table at the head of :mod:`vkernel.process`.
    ``spacing`` is the default of :meth:`times`; ``regular`` says whether beta and D are finite at t = 1 (if not, T < 1
    is required); ``gamma`` is Γ, ``None`` for isotropic noise, and ``half_log_det`` is ½ log det Γ.

    >>> import torch, vkernel as vk
    >>> process = vk.VP()
    >>> x0 = torch.zeros(4, 2)
    >>> process.perturb(x0, 0.5, generator=0).shape  # alpha x0 + sigma noise
    torch.Size([4, 2])
    >>> process.times(4).shape
    torch.Size([5])
    """

    eps: float
    T: float
    gamma: Covariance | None = None
    half_log_det: float = 0.0
    spacing: ClassVar[str] = "uniform"
    regular: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        for name, value in vars(cls).items():  # a formula written as a lambda takes the name it is bound to
            if isinstance(value, FunctionType) and value.__name__ == "<lambda>":
                value.__name__, value.__qualname__ = name, f"{cls.__name__}.{name}"

    def __post_init__(self) -> None:
        """Check the parameters: all finite and positive (eps may be 0), eps < T, sigma/alpha increasing."""
        given = {f.name: vars(self)[f.name] for f in fields(cast(Any, self)) if f.type in ("float", float)}
        for name, value in given.items():
            number = vars(self)[name] = numbers(name, [value])[0]
            require(number > 0 or (number == 0 and name == "eps"), f"{name} must be positive, not {value!r}.")
        require(self.eps < self.T, f"eps must be less than T; got eps={self.eps:g} and T={self.T:g}.")
        require(self.regular or self.T < 1, f"T must be less than 1, where beta and D diverge; got T={self.T:g}.")
        for low, high in (("beta_min", "beta_max"), ("sigma_min", "sigma_max")):
            ordered = low not in given or given[low] <= given[high]
            require(ordered, f"{low} must not exceed {high}; got {given.get(low)!r} and {given.get(high)!r}.")
        first, last = self.ratios
        require(first < last < math.inf, f"sigma/alpha must grow from eps to T, but goes from {first:g} to {last:g}.")

    @abstractmethod
    def alpha(self, t: Time, /) -> Tensor:
        """Return the factor of the data."""

    @abstractmethod
    def S(self, t: Time, /) -> Tensor:
        """Return the variance of the noise; for :class:`Anisotropic` a covariance operator."""

    @abstractmethod
    def beta(self, t: Time, /) -> Tensor:
        """Return the rate of the drift, -alpha'/alpha."""

    @abstractmethod
    def D(self, t: Time, /) -> Tensor:
        """Return the diffusion GG^T/2 = S'/2 + beta S; for :class:`Anisotropic` a covariance operator."""

    @abstractmethod
    def _time(self, r: Time, /) -> Tensor:
        """Invert r = sigma/alpha, without a check of the range."""

    @property
    @abstractmethod
    def law(self) -> str:
        """alpha and S in symbols."""

    @formula
    def sigma(self, t: Tensor) -> Tensor:
        """Return the standard deviation of the noise: S = sigma² (anisotropic: sigma² Γ)."""
        return self.S(t).sqrt()

    @formula
    def log_snr(self, t: Tensor) -> Tensor:
        """Return log(alpha²/sigma²)."""
        return 2 * (self.alpha(t) / self.sigma(t)).log()

    def __repr__(self) -> str:
        return f"{type(self).__name__}: {self.law}, eps={self.eps:g}, T={self.T:g}"

    @property
    def ratios(self) -> tuple[float, float]:
        """sigma/alpha at eps and at T."""
        ends = torch.tensor([self.eps, self.T], dtype=torch.float64)
        first, last = (self.sigma(ends) / self.alpha(ends)).tolist()
        return first, last

    @property
    def base(self) -> Process:
        """The isotropic process that this one is in whitened coordinates."""
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that Γ fixes for one sample; () where any shape is possible."""
        return () if self.gamma is None else self.gamma.shape

    def whiten(self, x: Tensor) -> Tensor:
        """Return Γ^(-1/2) x, the coordinates of ``base``."""
        return x

    def unwhiten(self, x: Tensor) -> Tensor:
        """Return Γ^(1/2) x, from the coordinates of ``base``."""
        return x

    def check(self, t: Time) -> Tensor:
        """Return ``t`` as a tensor if it lies in [eps, T]; what rounding to its dtype moved outside is clamped."""
        t = _tensor(t)
        self._check_range("t", t, within(t, self.eps, self.T), (self.eps, self.T), "the range [eps, T]")
        return t.clamp(self.eps, self.T)

    def time(self, sigma_over_alpha: Time) -> Tensor:
        """Return the t at which sigma/alpha has the given value, which must be reached between eps and T."""
        r = _tensor(sigma_over_alpha)
        t, ends = self._time(r), self.ratios
        inside = (r >= 0) & (within(r, *ends) | within(t, self.eps, self.T))
        self._check_range("sigma/alpha", r, inside, ends, "its range between eps and T")
        return t.clamp(self.eps, self.T)

    def _check_range(self, name: str, v: Tensor, inside: Tensor, ends: tuple[float, float], what: str) -> None:
        if not inside.all():
            value, (low, high) = v.detach()[~inside][0].item(), ends
            outside = f"{name} = {value:g} is outside [{low:g}, {high:g}], {what} of {self!r}"
            raise InputError(f"{outside}; choose {name} inside it, or construct the process with another eps or T.")

    def times(self, steps: int, spacing: str | None = None) -> Tensor:
        """Return ``steps + 1`` descending times in float64, the first exactly T and the last exactly eps.
        ``spacing`` is "uniform" in t; "log": uniform in log(sigma/alpha); or "edm": uniform in (sigma/alpha)^(1/7)
        (Karras et al. 2022). The default is "uniform", and "edm" for :class:`EDM`."""
        spacing = check_choice(self.spacing if spacing is None else spacing, "spacing", ("uniform", "log", "edm"))
        check_memory(8 * check_whole(steps, "steps"), "A grid of so many steps")
        u = torch.linspace(0, 1, steps + 1, dtype=torch.float64)
        t, (low, high), root = self.T + u * (self.eps - self.T), self.ratios, 1 / 7
        require(low > 0 or spacing != "log", f'spacing "log" needs noise at eps, of which {self!r} has none.')
        if spacing == "log":
            t = self._time(high * (low / high) ** u)
        elif spacing == "edm":
            t = self._time((high**root + u * (low**root - high**root)) ** 7)
        t[0], t[-1] = self.T, self.eps
        return t

    def perturb(self, x0: Tensor, t: Time, generator: Generator = None) -> Tensor:
        """Draw x_t = alpha x0 + sigma z, z ~ N(0, I) (anisotropic: N(0, Γ)), like ``x0``; t broadcasts to its batch."""
        _, alpha, sigma = self._along(x0, t)
        dtype = real_dtype(x0.dtype)
        noise = rng.randn(tuple(x0.shape), rng.as_generator(generator), x0.device, wide_dtype(dtype))
        return (alpha.to(noise) * x0.to(noise) + sigma.to(noise) * self.unwhiten(noise)).to(dtype)

    def prior(
        self, shape: Sequence[int], *, device: Device = None, dtype: Dtype = None, generator: Generator = None
    ) -> Tensor:
        """Draw from N(0, S_T), of the given shape ``(*batch, *shape)``."""
        dtype = torch.get_default_dtype() if dtype is None else real_dtype(dtype)
        device = torch.get_default_device() if device is None else torch.device(device)
        noise = rng.randn(tuple(shape), rng.as_generator(generator), device, wide_dtype(dtype))
        return (float(self.sigma(torch.tensor(self.T, dtype=torch.float64))) * self.unwhiten(noise)).to(dtype)

    def convert(self, x: Tensor, t: Time, other: Process) -> tuple[Tensor, Tensor]:
        """Return the point of another process with the same sigma/alpha, x/alpha and posterior, ``(x', t')``."""
        same = self.gamma == other.gamma
        require(same, f"No point of {self!r} is a point of {other!r}: their noise has different covariances Γ.")
        t, alpha, sigma = self._along(x, t)
        there = other.time(sigma / alpha)
        return (x.to(alpha) * (other.alpha(there) / alpha)).to(real_dtype(x.dtype)), there.reshape(t.shape).to(t.dtype)

    def _along(self, x: Tensor, t: Time) -> tuple[Tensor, Tensor, Tensor]:
        """Return t, checked; alpha and sigma with one axis of length 1 for each axis of x that t lacks."""
        dtype = wide_dtype(real_dtype(check_real(x, "x").dtype))
        when = check_real(t, "t").to(x.device) if isinstance(t, Tensor) else as_tensor(t, "t").to(x.device, dtype)
        time = self.check(when)
        full = time.shape + (1,) * (x.ndim - time.ndim)
        good = time.ndim <= x.ndim - len(self.shape) and all(a in (1, b) for a, b in zip(full, x.shape, strict=True))
        got = f"t of shape {tuple(time.shape)} for points of shape {tuple(x.shape)}"
        require(good, f"t must be one time, or one for each element of the batch; got {got}.")
        wide = time.reshape(full).to(torch.promote_types(time.dtype, dtype))
        return time, self.alpha(wide), self.sigma(wide)


def check_process(process: object, what: str) -> Process:
    """Return ``process`` if it is one; otherwise say how ``what`` gets one, also from a scheduler of diffusers."""
    if isinstance(process, Process):
        return process
    if hasattr(process, "add_noise") or type(process).__name__.endswith("Scheduler"):
        given = "vk.adapters.conventions_of(scheduler) returns its process, predicts and time"
        raise InputError(f"{what} needs a process such as vk.VP(), not a {type(process).__name__}: {given}.")
    raise InputError(f"{what} needs a process such as vk.VP(), not {process!r:.200}.")


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return a floating-point dtype as it is; the default one for integers."""
    return dtype if dtype.is_floating_point else torch.get_default_dtype()


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for half precision, other dtypes as they are."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def numbers(name: str, values: Iterable[float]) -> list[float]:
    """Return a list of finite floats from a tensor, an array or a sequence."""
    try:
        out = [float(v) for v in values]
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"{name} must be numeric, not {values!r}.") from None
    require(all(map(math.isfinite, out)), f"{name} must be finite; got {out!r:.200}.")
    return out


def _tensor(t: Time) -> Tensor:
    """Return a floating-point tensor; numbers and integers take the default dtype."""
    if not isinstance(t, float | Tensor):
        check_array(t, "A time")
    t = check_real(torch.as_tensor(t), "A time")
    return t.to(real_dtype(t.dtype))


def within(v: Tensor, low: float, high: float) -> Tensor:
    """Whether low ≤ v ≤ high, up to rounding; never for NaN."""
    slack = 8 * torch.finfo(v.dtype).eps
    v = v.detach().to(wide_dtype(v.dtype))
    return (v >= low * (1 - slack)) & (v <= high * (1 + slack))
