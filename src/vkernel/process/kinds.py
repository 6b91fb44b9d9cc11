"""The isotropic processes of the table, each its two or three formulas (theory, §1)."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vkernel.core.checks import is_whole
from vkernel.core.errors import require
from vkernel.process.base import Process, formula, numbers


class _Preserving(Process):
    """The variance-preserving processes that are given by B = -log alpha: S = 1 - e^(-2B), D = beta."""

    @abstractmethod
    def _B(self, t: Tensor) -> Tensor:
        """-log alpha."""

    @abstractmethod
    def _inverse_B(self, B: Tensor) -> Tensor:
        """The t at which -log alpha is B."""

    alpha = formula(lambda p, t: torch.exp(-p._B(t)))
    S = formula(lambda p, t: -torch.expm1(-2 * p._B(t)))
    D = formula(lambda p, t: p.beta(t))
    _time = formula(lambda p, r: p._inverse_B(torch.log1p(r * r) / 2))


@dataclass(frozen=True, repr=False)
class VP(_Preserving):
    """The paper's: alpha = exp(-(beta_min t + ½ (beta_max - beta_min) t²)), S = 1 - alpha²; beta = D is linear in t."""

    beta_min: float = 0.1
    beta_max: float = 20.0
    eps: float = 1e-3
    T: float = 1.0

    _rise = property(lambda p: p.beta_max - p.beta_min)
    law = property(lambda p: f"alpha = exp(-({p.beta_min:g} t + {p._rise / 2:g} t²)), S = 1 - alpha²")
    beta = formula(lambda p, t: p.beta_min + p._rise * t)

    def _B(self, t: Tensor) -> Tensor:
        return t * (self.beta_min + t * (self._rise / 2))

    def _inverse_B(self, B: Tensor) -> Tensor:
        return 2 * B / (self.beta_min + (self.beta_min**2 + 2 * self._rise * B).sqrt())


@dataclass(frozen=True, repr=False)
class VPSong(_Preserving):
    """Song et al.'s: alpha = exp(-½ (beta_min t + ½ (beta_max - beta_min) t²)), S = 1 - alpha²; beta = D = ½ b(t)."""

    beta_min: float = 0.1
    beta_max: float = 20.0
    eps: float = 1e-3
    T: float = 1.0

    _rise = property(lambda p: p.beta_max - p.beta_min)
    law = property(lambda p: f"alpha = exp(-½({p.beta_min:g} t + {p._rise / 2:g} t²)), S = 1 - alpha²")
    beta = formula(lambda p, t: (p.beta_min + p._rise * t) / 2)

    def _B(self, t: Tensor) -> Tensor:
        return t * (self.beta_min + t * (self._rise / 2)) / 2

    def _inverse_B(self, B: Tensor) -> Tensor:
        return 4 * B / (self.beta_min + (self.beta_min**2 + 4 * self._rise * B).sqrt())


@dataclass(frozen=True, repr=False)
class DDPM(_Preserving):
    """Ho et al.'s and diffusers': alpha² = prod_{j<=t} (1 - betas[j]) at whole t, log alpha linear in between.

    t is the network's index as a real number in [0, N-1]; at t = 0 the noise is that of the first step, S = betas[0].
    beta = D is constant between whole t and jumps there, to the value on the right (at N-1, on the left).
    ``DDPM.from_alphas_cumprod(scheduler.alphas_cumprod)`` is the process of a diffusers scheduler.
    """

    betas: Sequence[float] | Tensor
    eps: float = 0.0
    T: float = None  # type: ignore[assignment]  # N - 1

    def __post_init__(self) -> None:
        betas = tuple(numbers("betas", self.betas))
        bad = [b for b in betas if b <= 0 or b >= 1]
        require(len(betas) > 1, f"DDPM needs at least two betas, not {len(betas)}.")
        require(not bad, f"The betas of DDPM must lie strictly between 0 and 1; {bad[:1]} does not.")
        object.__setattr__(self, "betas", betas)
        object.__setattr__(self, "T", len(betas) - 1 if self.T is None else self.T)
        super().__post_init__()
        require(len(betas) - 1 >= self.T, f"T must be at most {len(betas) - 1}, the last index, not {self.T:g}.")

    @classmethod
    def linear(cls, beta_start: float = 1e-4, beta_end: float = 0.02, steps: int = 1000, **limits: float) -> DDPM:
        """Betas evenly spaced between two values; ``limits`` are eps and T."""
        require(is_whole(steps) and steps > 1, f"steps must be a whole number, 2 or more, not {steps!r}.")
        return cls(torch.linspace(beta_start, beta_end, steps, dtype=torch.float64), **limits)

    @classmethod
    def scaled_linear(
        cls, beta_start: float = 8.5e-4, beta_end: float = 0.012, steps: int = 1000, **limits: float
    ) -> DDPM:
        """Betas whose roots are evenly spaced; by default Stable Diffusion's."""
        require(min(beta_start, beta_end) > 0, f"The betas must be positive; got {beta_start!r} and {beta_end!r}.")
        return cls([root**2 for root in cls.linear(beta_start**0.5, beta_end**0.5, steps).betas], **limits)

    @classmethod
    def from_alphas_cumprod(cls, abar: Sequence[float] | Tensor, **limits: float) -> DDPM:
        """The process with alpha² = ``abar`` at whole t."""
        values = numbers("alphas_cumprod", abar)
        require(all(a > 0 for a in values), "alphas_cumprod must be positive; leave out a last 0 (no signal at all).")
        return cls([1 - b / a for a, b in zip([1.0, *values], values, strict=False)], **limits)

    @property
    def law(self) -> str:
        ends = f"{self.betas[0]:g} … {self.betas[-1]:g}"
        return f"alpha² = prod_(j≤t) (1 - beta_j) with {len(self.betas)} betas {ends}, S = 1 - alpha²"

    beta = formula(lambda p, t: p._piece(t, _floor(t))[2])

    def _B(self, t: Tensor) -> Tensor:
        left, B, slope = self._piece(t, _floor(t))
        return B + (t - left) * slope

    def _inverse_B(self, B: Tensor) -> Tensor:
        left, start, slope = self._piece(B, torch.bucketize(B, self._knots.to(B.dtype).to(B.device), right=True) - 1)
        return left + (B - start) / slope

    @functools.cached_property
    def _knots(self) -> Tensor:
        """-log alpha at 0 … N-1."""
        return torch.log1p(-torch.tensor(self.betas, dtype=torch.float64)).cumsum(0) / -2

    def _piece(self, like: Tensor, left: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The interval that begins at the index ``left`` (or the nearest): that index, B there, and the slope."""
        left = left.clamp(0, len(self.betas) - 2)
        knots, slopes = (k.to(like.dtype).to(like.device) for k in (self._knots, self._knots.diff()))
        return left, knots[left], slopes[left]


@dataclass(frozen=True, repr=False)
class Cosine(Process):
    """Nichol and Dhariwal's: alpha = cos θ / cos θ0, S = 1 - alpha², θ = (π/2)(t+s)/(1+s); beta = D = θ' tan θ.

    Written with cos θ = sin(θ'(1-t)) and S = sin(θ-θ0) sin(θ+θ0) / cos²θ0: nothing cancels at either end. beta and D
    diverge at t = 1, hence T < 1.
    """

    s: float = 0.008
    eps: float = 1e-3
    T: float = 0.999
    regular: ClassVar[bool] = False

    _rate = property(lambda p: math.pi / 2 / (1 + p.s))
    law = property(lambda p: f"alpha = cos θ / cos θ0 with θ = (π/2)(t + {p.s:g})/{1 + p.s:g}, S = 1 - alpha²")
    alpha = formula(lambda p, t: torch.sin(p._rate * (1 - t)) / math.cos(p._rate * p.s))
    S = formula(lambda p, t: (p._rate * t).sin() * (p._rate * (t + 2 * p.s)).sin() / math.cos(p._rate * p.s) ** 2)
    beta = formula(lambda p, t: p._rate * (p._rate * (t + p.s)).sin() / (p._rate * (1 - t)).sin())
    D = beta

    @formula
    def _time(self, r: Tensor) -> Tensor:
        a = math.tan(self._rate * self.s)  # tan²θ - tan²θ0 = r²/cos²θ0, and then tan(θ - θ0)
        rise = r * r * (1 + a**2)
        b = (a**2 + rise).sqrt()
        return torch.atan(rise / ((a + b) * (1 + a * b))) / self._rate


@dataclass(frozen=True, repr=False)
class VE(Process):
    """Song et al.'s variance-exploding process: alpha = 1, sigma = sigma_min (sigma_max/sigma_min)^t, beta = 0,
    D = sigma² log(sigma_max/sigma_min). As in score_sde the noise at t = 0 is sigma_min, not zero.
    """

    sigma_min: float = 0.01
    sigma_max: float = 50.0
    eps: float = 0.0
    T: float = 1.0

    _rate = property(lambda p: math.log(p.sigma_max / p.sigma_min))
    law = property(lambda p: f"alpha = 1, S = sigma², sigma = {p.sigma_min:g} · {p.sigma_max / p.sigma_min:g}^t")
    alpha = formula(lambda p, t: torch.ones_like(t))
    sigma = formula(lambda p, t: p.sigma_min * torch.exp(p._rate * t))
    S = formula(lambda p, t: p.sigma(t) ** 2)
    beta = formula(lambda p, t: torch.zeros_like(t))
    D = formula(lambda p, t: p._rate * p.sigma(t) ** 2)
    _time = formula(lambda p, r: torch.log(r / p.sigma_min) / p._rate)


@dataclass(frozen=True, repr=False)
class EDM(Process):
    """Karras et al.'s: alpha = 1, sigma = t, S = t², beta = 0, D = t."""

    eps: float = 0.002
    T: float = 80.0
    spacing: ClassVar[str] = "edm"

    law = property(lambda p: "alpha = 1, S = t²")
    alpha = formula(lambda p, t: torch.ones_like(t))
    sigma = formula(lambda p, t: t.clone())
    S = formula(lambda p, t: t**2)
    beta = formula(lambda p, t: torch.zeros_like(t))
    D = formula(lambda p, t: t.clone())
    _time = formula(lambda p, r: r)


@dataclass(frozen=True, repr=False)
class FlowMatching(Process):
    """Flow matching, rectified flow: alpha = 1-t, sigma = t, S = t², beta = 1/(1-t), D = t/(1-t).

    beta and D diverge at t = 1, hence T < 1; the flow itself is regular there, dx/dt = (x - E[x0|x])/t.
    """

    eps: float = 1e-3
    T: float = 0.999
    regular: ClassVar[bool] = False

    law = property(lambda p: "alpha = 1 - t, S = t²")
    alpha = formula(lambda p, t: 1 - t)
    sigma = formula(lambda p, t: t.clone())
    S = formula(lambda p, t: t**2)
    beta = formula(lambda p, t: 1 / (1 - t))
    D = formula(lambda p, t: t / (1 - t))
    _time = formula(lambda p, r: 1 / (1 + 1 / r))


@dataclass(frozen=True, repr=False)
class Toy(Process):
    """The paper's Figure 1: alpha = sqrt(1-t), S = t; beta = D = 1/(2(1-t)) diverge at t = 1, hence T < 1."""

    eps: float = 1e-3
    T: float = 0.999
    regular: ClassVar[bool] = False

    law = property(lambda p: "alpha = sqrt(1 - t), S = t")
    alpha = formula(lambda p, t: torch.sqrt(1 - t))
    S = formula(lambda p, t: t.clone())
    beta = formula(lambda p, t: 0.5 / (1 - t))
    D = beta
    _time = formula(lambda p, r: 1 / (1 + 1 / r**2))


def _floor(t: Tensor) -> Tensor:
    return t.detach().nan_to_num().floor().long()
