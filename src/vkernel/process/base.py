"""What every forward process has: its formulas by name, checks, time grids, draws and conversions (theory, §1)."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.checks import is_whole
from vkernel.core.errors import InputError, require

__all__ = ["Process", "formula"]

Time = float | Tensor
Generator = torch.Generator | int | None


def formula(f: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Time], Tensor]:
    """Let ``f(self, t)`` take numbers, integers and half precision; the result has t's dtype."""

    def at(self: Any, t: Time) -> Tensor:
        t = _tensor(t)
        return f(self, t.to(wide_dtype(t.dtype))).to(t.dtype)

    return functools.update_wrapper(at, f)


class Process(ABC):
    """A forward process; the final kinds are in the table at the head of this module.

    Attributes:
        eps: the cutoff, the time nearest to the data.
        T: the time of (almost) pure noise.
        spacing: how :meth:`times` are spaced unless told.
        regular: whether beta and D are finite at t = 1; if not, T < 1 is required.
    """

    eps: float
    T: float
    spacing: ClassVar[str] = "uniform"
    regular: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        for name, value in vars(cls).items():  # a formula written as a lambda takes the name it is bound to
            if getattr(value, "__name__", "") == "<lambda>":
                value.__name__, value.__qualname__ = name, f"{cls.__name__}.{name}"

    def __post_init__(self) -> None:
        """Refuse parameters that make no process: every number positive (eps may be 0) and finite, eps < T, …"""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.type == "float"}  # type: ignore[arg-type]
        for name, value in given.items():
            number = numbers(name, [value])[0]
            object.__setattr__(self, name, number)
            require(number > 0 or (number == 0 and name == "eps"), f"{name} must be positive, not {value!r}.")
        require(self.eps < self.T, f"eps must be less than T; got eps={self.eps:g} and T={self.T:g}.")
        require(self.regular or self.T < 1, f"T must be less than 1, where beta and D diverge; got T={self.T:g}.")
        for low, high in (("beta_min", "beta_max"), ("sigma_min", "sigma_max")):
            ordered = low not in given or given[low] <= given[high]
            require(ordered, f"{low} must not exceed {high}; got {given.get(low)!r} and {given.get(high)!r}.")
        first, last = self._ratios()
        require(first < last < math.inf, f"sigma/alpha must grow from eps to T, but goes from {first:g} to {last:g}.")

    @abstractmethod
    def alpha(self, t: Time, /) -> Tensor:
        """The factor of the data."""

    @abstractmethod
    def S(self, t: Time, /) -> Tensor:
        """The variance of the noise; for :class:`Anisotropic` a covariance operator."""

    @abstractmethod
    def beta(self, t: Time, /) -> Tensor:
        """The rate of the drift, -alpha'/alpha."""

    @abstractmethod
    def D(self, t: Time, /) -> Tensor:
        """The diffusion GG^T/2 = S'/2 + beta S; for :class:`Anisotropic` a covariance operator."""

    @abstractmethod
    def _time(self, r: Time, /) -> Tensor:
        """The inverse of r = sigma/alpha, not range-checked."""

    @property
    @abstractmethod
    def law(self) -> str:
        """alpha and S in symbols."""

    @formula
    def sigma(self, t: Tensor) -> Tensor:
        """The standard deviation of the noise: S = sigma² (anisotropic: sigma² Γ)."""
        return self.S(t).sqrt()

    @formula
    def log_snr(self, t: Tensor) -> Tensor:
        """log(alpha²/sigma²)."""
        return 2 * (self.alpha(t) / self.sigma(t)).log()

    def __repr__(self) -> str:
        return f"{type(self).__name__}: {self.law}, eps={self.eps:g}, T={self.T:g}"

    @property
    def base(self) -> Process:
        """The isotropic process that this one is in whitened coordinates."""
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that Γ fixes for one sample; () where any will do."""
        return ()

    def same_frame(self, other: Process) -> bool:
        """Whether the noise of both has the same shape Γ."""
        return other.base is other

    def whiten(self, x: Tensor) -> Tensor:
        """Γ^(-1/2) x: to the coordinates of ``base``."""
        return x

    def unwhiten(self, x: Tensor) -> Tensor:
        """Γ^(1/2) x: from the coordinates of ``base``."""
        return x

    def check(self, t: Time) -> Tensor:
        """``t`` as a tensor, refused unless in [eps, T]; what the rounding of its dtype moved out is clamped in."""
        t = _tensor(t)
        inside = _within(t, self.eps, self.T)
        if not inside.all():
            raise InputError(
                f"t = {_first(t, ~inside)} is outside [{self.eps:g}, {self.T:g}], the range [eps, T] of the process "
                f"({self!r}); choose t inside it, or construct the process with another eps or T."
            )
        return t.clamp(self.eps, self.T)

    def time(self, sigma_over_alpha: Time) -> Tensor:
        """The t at which sigma/alpha has the given value, refused unless that is in [eps, T]."""
        r = _tensor(sigma_over_alpha)
        t, (low, high) = self._time(r), self._ratios()
        inside = (r >= 0) & (_within(r, low, high) | _within(t, self.eps, self.T))
        if not inside.all():
            raise InputError(
                f"sigma/alpha = {_first(r, ~inside)} is outside [{low:g}, {high:g}], which the process ({self!r}) "
                f"covers between eps and T; choose a value inside it, or another eps or T."
            )
        return t.clamp(self.eps, self.T)

    def times(self, steps: int, spacing: str | None = None) -> Tensor:
        """``steps + 1`` descending times in float64, the first exactly T and the last exactly eps.

        ``spacing`` is "uniform" in t; "log": uniform in log(sigma/alpha); or "edm": uniform in (sigma/alpha)^(1/7)
        (Karras et al. 2022). The default is "uniform", and "edm" for :class:`EDM`.
        """
        spacing = self.spacing if spacing is None else spacing
        require(is_whole(steps) and steps >= 1, f"steps must be a whole number, 1 or more, not {steps!r}.")
        require(spacing in ("uniform", "log", "edm"), f'spacing must be "uniform", "log" or "edm", not {spacing!r}.')
        u = torch.linspace(0, 1, steps + 1, dtype=torch.float64)
        t = self.T + u * (self.eps - self.T)
        if spacing != "uniform":
            low, high = self._ratios()
            require(low > 0 or spacing == "edm", f'spacing "log" needs noise at eps, of which {self!r} has none.')
            root = 1 / 7
            r = (high**root + u * (low**root - high**root)) ** 7 if spacing == "edm" else high * (low / high) ** u
            t[1:-1] = self._time(r[1:-1])
        t[0], t[-1] = self.T, self.eps
        return t

    def perturb(self, x0: Tensor, t: Time, generator: Generator = None) -> Tensor:
        """A draw of x_t given x0: alpha x0 + sigma z with z ~ N(0, I) (anisotropic: N(0, Γ)).

        Args:
            x0: data, ``(*batch, *shape)``.
            t: one time, or one for each element of the batch, ``(*batch,)``.
            generator: a stream, or the seed of one.

        Returns:
            ``(*batch, *shape)``, of x0's device and dtype.
        """
        _, alpha, sigma = self._along(x0, t)
        dtype = real_dtype(x0.dtype)
        noise = rng.randn(tuple(x0.shape), rng.as_generator(generator), x0.device, wide_dtype(dtype))
        return (alpha.to(noise) * x0.to(noise) + sigma.to(noise) * self.unwhiten(noise)).to(dtype)

    def prior(
        self,
        shape: Sequence[int],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        generator: Generator = None,
        quasi: bool = False,
    ) -> Tensor:
        """Draw from N(0, S_T), of the given shape ``(*batch, *shape)``.

        With ``quasi`` points ``(n, *shape)`` fill the law evenly (:func:`~vkernel.core.rng.quasi_normals`): quantiles
        in one dimension, Sobol points in up to 8, independent draws beyond; an integer ``generator`` scrambles them.
        """
        dtype = torch.get_default_dtype() if dtype is None else real_dtype(dtype)
        device = torch.get_default_device() if device is None else torch.device(device)
        if quasi:
            seed = generator if is_whole(generator) else rng.as_generator(generator).initial_seed()
            noise = rng.quasi_normals(shape[0], math.prod(shape[1:]), seed).reshape(tuple(shape))
            noise = noise.to(device, wide_dtype(dtype))
        else:
            noise = rng.randn(tuple(shape), rng.as_generator(generator), device, wide_dtype(dtype))
        return (float(self.sigma(torch.tensor(self.T, dtype=torch.float64))) * self.unwhiten(noise)).to(dtype)

    def convert(self, x: Tensor, t: Time, other: Process) -> tuple[Tensor, Tensor]:
        """The same point in another process, ``(x', t')``: sigma'/alpha' = sigma/alpha and x'/alpha' = x/alpha.

        The posterior over training points is the same there, and ``p'(x'|t') dx' = p(x|t) dx``.
        """
        require(
            self.same_frame(other),
            f"No point of {self!r} is a point of {other!r}: their noise has different covariances Γ.",
        )
        t, alpha, sigma = self._along(x, t)
        there = other.time(sigma / alpha)
        return (x.to(alpha) * (other.alpha(there) / alpha)).to(real_dtype(x.dtype)), there.reshape(t.shape).to(t.dtype)

    def _ratios(self) -> tuple[float, float]:
        """sigma/alpha at eps and at T."""
        ends = torch.tensor([self.eps, self.T], dtype=torch.float64)
        low, high = (self.sigma(ends) / self.alpha(ends)).tolist()
        return low, high

    def _along(self, x: Tensor, t: Time) -> tuple[Tensor, Tensor, Tensor]:
        """``t`` checked; alpha and sigma with one axis of length 1 for each axis of x that t lacks."""
        dtype = wide_dtype(real_dtype(x.dtype))
        time = self.check(t.to(x.device) if isinstance(t, Tensor) else torch.tensor(t, dtype=dtype, device=x.device))
        full = time.shape + (1,) * (x.ndim - time.ndim)
        require(
            time.ndim <= x.ndim - len(self.shape) and all(a in (1, b) for a, b in zip(full, x.shape, strict=True)),
            f"t must be one time, or one for each element of the batch; got t of shape {tuple(time.shape)} "
            f"for points of shape {tuple(x.shape)}.",
        )
        wide = time.reshape(full).to(torch.promote_types(time.dtype, dtype))
        return time, self.alpha(wide), self.sigma(wide)


def _tensor(t: Any) -> Tensor:
    """A floating-point tensor; numbers and integers take the default dtype."""
    try:
        t = torch.as_tensor(t)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"A time must be a number or a tensor, not {t!r}.") from None
    return t.to(real_dtype(t.dtype))


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_floating_point else torch.get_default_dtype()


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 else dtype


def _within(v: Tensor, low: float, high: float) -> Tensor:
    """Whether low ≤ v ≤ high, up to rounding; never for NaN."""
    slack = 8 * torch.finfo(v.dtype).eps
    v = v.detach().to(wide_dtype(v.dtype))
    return (v >= low * (1 - slack)) & (v <= high * (1 + slack))


def _first(v: Tensor, mask: Tensor) -> str:
    return f"{v.detach()[mask][0].item():g}"


def numbers(name: str, values: Any) -> list[float]:
    """A list of finite floats from a tensor, an array or a sequence."""
    try:
        out = [float(v) for v in (values.tolist() if hasattr(values, "tolist") else values)]
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"{name} must be numeric, not {values!r}.") from None
    require(all(map(math.isfinite, out)), f"{name} must be finite; got {out!r:.200}.")
    return out
