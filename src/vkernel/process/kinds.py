"""The final processes: the isotropic ones of the table in :mod:`vkernel.process`, and :class:`Anisotropic`.

``regular = False`` marks those whose beta and D diverge at t = 1, hence T < 1."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from vkernel.core.checks import as_tensor, check_real, check_whole
from vkernel.core.covariance import Covariance, Diagonal, Matrix, Transformed
from vkernel.core.errors import InputError, require
from vkernel.core.memory import check_memory
from vkernel.process.base import Process, Time, formula, numbers, real_dtype, wide_dtype


class _Preserving(Process):
    """A process given by ``_B``, B = -log alpha, and its inverse ``_inverse_B``: S = 1 - e^(-2B), D = beta."""

    alpha = formula(lambda p, t: torch.exp(-p._B(t)))
    S = formula(lambda p, t: -torch.expm1(-2 * p._B(t)))
    D = formula(lambda p, t: p.beta(t))
    _time = formula(lambda p, r: p._inverse_B(torch.log1p(r * r) / 2))


@dataclass(frozen=True, repr=False)
class VP(_Preserving):
    """The paper's: beta = D = b(t) is linear in t, from beta_min to beta_max.

    >>> import vkernel as vk
    >>> vk.VP()
    VP: alpha = exp(-(0.1 t + 9.95 t²)), S = 1 - alpha², eps=0.001, T=1
    >>> round(float(vk.VP().alpha(0.5)), 4)
    0.0791
    """

    beta_min: float = 0.1
    beta_max: float = 20.0
    eps: float = 1e-3
    T: float = 1.0
    c: ClassVar[float] = 1.0  # beta = c b(t)

    beta = formula(lambda p, t: p.c * (p.beta_min + (p.beta_max - p.beta_min) * t))

    @property
    def law(self) -> str:
        half, slope = "" if self.c == 1 else "½", (self.beta_max - self.beta_min) / 2
        return f"alpha = exp(-{half}({self.beta_min:g} t + {slope:g} t²)), S = 1 - alpha²"

    def _B(self, t: Tensor) -> Tensor:
        return self.c * t * (self.beta_min + t * ((self.beta_max - self.beta_min) / 2))

    def _inverse_B(self, B: Tensor) -> Tensor:
        b = B / self.c
        return 2 * b / (self.beta_min + (self.beta_min**2 + 2 * (self.beta_max - self.beta_min) * b).sqrt())


@dataclass(frozen=True, repr=False)
class VPSong(VP):
    """Song et al.'s: beta = D = ½ b(t), with b(t) linear from beta_min to beta_max.

    >>> import vkernel as vk
    >>> vk.VPSong()
    VPSong: alpha = exp(-½(0.1 t + 9.95 t²)), S = 1 - alpha², eps=0.001, T=1
    >>> round(float(vk.VPSong().alpha(0.5)), 4)
    0.2812
    """

    c: ClassVar[float] = 0.5


@dataclass(frozen=True, repr=False)
class DDPM(_Preserving):
    """Ho et al.'s and diffusers': alpha² = prod_{j<=t} (1 - betas[j]) at whole t, log alpha linear in between.
    t is the network's index as a real number in [0, N-1]; at t = 0, S = betas[0]. beta = D is constant between whole t
    and jumps there, to the value on the right (at N-1, on the left).

    >>> import torch, vkernel as vk
    >>> process = vk.DDPM(torch.linspace(1e-4, 0.02, 1000))  # also vk.DDPM.linear()
    >>> process.eps, process.T
    (0.0, 999.0)
    >>> round(float(process.sigma(999)), 4)
    1.0
    """

    betas: Sequence[float] | Tensor
    eps: float = 0.0
    T: float = math.inf  # N - 1, the last index

    def __post_init__(self) -> None:
        betas = tuple(numbers("betas", self.betas))
        bad = [b for b in betas if b <= 0 or b >= 1]
        require(len(betas) > 1, f"DDPM needs at least two betas, not {len(betas)}.")
        require(not bad, f"The betas of DDPM must lie strictly between 0 and 1; {bad[:1]} does not.")
        vars(self).update(betas=betas, T=len(betas) - 1 if math.isinf(self.T) else self.T)
        super().__post_init__()
        require(len(betas) - 1 >= self.T, f"T must be at most {len(betas) - 1}, the last index, not {self.T:g}.")

    @classmethod
    def linear(cls, beta_start: float = 1e-4, beta_end: float = 0.02, steps: int = 1000, **limits: float) -> DDPM:
        """Return the process with betas evenly spaced between two values; ``limits`` are eps and T."""
        check_memory(64 * check_whole(steps, "steps", 2), f"A schedule of {steps} steps")
        return cls(torch.linspace(beta_start, beta_end, steps, dtype=torch.float64), **limits)

    @classmethod
    def scaled_linear(
        cls, beta_start: float = 8.5e-4, beta_end: float = 0.012, steps: int = 1000, **limits: float
    ) -> DDPM:
        """Return the process with betas whose roots are evenly spaced; by default Stable Diffusion's."""
        require(min(beta_start, beta_end) > 0, f"The betas must be positive; got {beta_start!r} and {beta_end!r}.")
        return cls([root**2 for root in cls.linear(beta_start**0.5, beta_end**0.5, steps).betas], **limits)

    @classmethod
    def from_alphas_cumprod(cls, abar: Sequence[float] | Tensor, **limits: float) -> DDPM:
        """Return the process with alpha² = ``abar`` at whole t: ``scheduler.alphas_cumprod`` of diffusers."""
        values = numbers("alphas_cumprod", abar)
        require(all(a > 0 for a in values), "alphas_cumprod must be positive; leave out a last 0 (no signal at all).")
        return cls([1 - b / a for a, b in zip([1.0, *values], values, strict=False)], **limits)

    @property
    def law(self) -> str:
        ends = f"{self.betas[0]:g} … {self.betas[-1]:g}"
        return f"alpha² = prod_(j≤t) (1 - beta_j) with {len(self.betas)} betas {ends}, S = 1 - alpha²"

    beta = formula(lambda p, t: p._interval(t)[2])

    def _B(self, t: Tensor) -> Tensor:
        left, B, slope = self._interval(t)
        return B + (t - left) * slope

    def _inverse_B(self, B: Tensor) -> Tensor:
        left, start, slope = self._interval(B, of_B=True)
        return left + (B - start) / slope

    def _knots(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return -log alpha at 0 … N-1 and its differences; they are copied to a device once."""
        if (found := self._held.get((dtype, device))) is None:
            knots = torch.log1p(-torch.tensor(self.betas, dtype=torch.float64)).cumsum(0) / -2
            found = self._held[dtype, device] = knots.to(device, dtype), knots.diff().to(device, dtype)
        return found

    @functools.cached_property
    def _held(self) -> dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor]]:
        return {}

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_held"}  # tensors of this machine's GPU

    def _interval(self, at: Tensor, of_B: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Return the knot on the left of the times (or the values of B) ``at``, B there, and the slope from it."""
        knots, slopes = self._knots(at.dtype, at.device)
        left = torch.bucketize(at, knots, right=True) - 1 if of_B else at.detach().nan_to_num().floor().long()
        left = left.clamp(0, len(self.betas) - 2)
        B, slope = (k.index_select(0, left.reshape(-1)).reshape(left.shape) for k in (knots, slopes))
        return left, B, slope


@dataclass(frozen=True, repr=False)
class Cosine(Process):
    """Nichol and Dhariwal's, alpha = cos θ / cos θ0 with θ linear in t, computed by cos θ = sin(θ'(1-t))
    and S = sin(θ-θ0) sin(θ+θ0) / cos²θ0: nothing cancels.

    >>> import vkernel as vk
    >>> round(float(vk.Cosine().alpha(0.5)), 4)
    0.7027
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
        time: Tensor = torch.atan(rise / ((a + b) * (1 + a * b))) / self._rate
        return time


@dataclass(frozen=True, repr=False)
class VE(Process):
    """Song et al.'s variance-exploding process, alpha = 1 and sigma = sigma_min (sigma_max/sigma_min)^t; as in
    score_sde the noise at t = 0 is sigma_min, not zero.

    >>> import vkernel as vk
    >>> round(float(vk.VE().sigma(0.5)), 4)
    0.7071
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
    """Karras et al.'s: alpha = 1, and t is sigma itself.

    >>> import vkernel as vk
    >>> process = vk.EDM()
    >>> process
    EDM: alpha = 1, S = t², eps=0.002, T=80
    >>> float(process.sigma(3.0))
    3.0
    """

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
    """Flow matching, rectified flow, x = (1 - t) x0 + t noise; the flow is regular also at t = 1,
    dx/dt = (x - E[x0|x])/t.

    >>> import vkernel as vk
    >>> process = vk.FlowMatching()
    >>> process
    FlowMatching: alpha = 1 - t, S = t², eps=0.001, T=0.999
    >>> float(process.alpha(0.25)), float(process.sigma(0.25))
    (0.75, 0.25)
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
    """The process of the paper's Figure 1: t is the variance of the noise.

    >>> import vkernel as vk
    >>> vk.Toy()
    Toy: alpha = sqrt(1 - t), S = t, eps=0.001, T=0.999
    """

    eps: float = 1e-3
    T: float = 0.999
    regular: ClassVar[bool] = False

    law = property(lambda p: "alpha = sqrt(1 - t), S = t")
    alpha = formula(lambda p, t: torch.sqrt(1 - t))
    S = formula(lambda p, t: t.clone())
    beta = formula(lambda p, t: 0.5 / (1 - t))
    D = beta
    _time = formula(lambda p, r: 1 / (1 + 1 / r**2))


@dataclass(frozen=True, repr=False, init=False)
class Anisotropic(Process):
    """Noise of covariance Γ: S = sigma² Γ and D = D_base Γ, as covariance operators; alpha, sigma, beta of ``process``.

    ``process`` is the isotropic process in whitened coordinates. ``gamma`` is positive definite: a square matrix
    ``(d, d)`` is the covariance of d coordinates, any other tensor holds the variances of independent coordinates and
    has the data's shape. Where this rule does not serve (a matrix for images, variances for square data) pass
    :class:`~vkernel.core.covariance.Matrix` or :class:`~vkernel.core.covariance.Diagonal` with their shape.

    ``root`` and ``inverse_root`` are Γ^(1/2) and Γ^(-1/2), of gamma's kind; ``half_log_det`` and ``inverse_trace``,
    ½ log det Γ and tr Γ^-1, are for densities and norms in whitened coordinates.

    >>> import torch, vkernel as vk
    >>> process = vk.Anisotropic(vk.VP(), torch.tensor([1.0, 4.0]))  # two coordinates, variances 1 and 4
    >>> process.S(1.0).diag()
    tensor([1., 4.])
    >>> process.whiten(torch.tensor([1.0, 2.0]))
    tensor([1., 1.])
    """

    process: Process
    gamma: Diagonal | Matrix
    root: Diagonal | Matrix = field(compare=False)
    inverse_root: Diagonal | Matrix = field(compare=False)
    half_log_det: float = field(compare=False)
    inverse_trace: float = field(compare=False)

    def __init__(self, process: Process, gamma: Tensor | Covariance) -> None:
        good = isinstance(process, Process) and not isinstance(process, Anisotropic)
        require(good, f"Anisotropic needs an isotropic process such as VP(), not {process!r}.")
        g = _definite(gamma)
        variances = torch.linalg.eigvalsh(g.entries) if isinstance(g, Matrix) else g.entries
        determinant, trace = float(variances.log().sum()) / 2, float(variances.reciprocal().sum())
        vars(self).update(process=process, gamma=g, eps=process.eps, T=process.T)  # frozen: set here, once
        vars(self).update(root=g.power(0.5), inverse_root=g.power(-0.5), half_log_det=determinant, inverse_trace=trace)

    law = property(lambda p: f"({p.process.law}) · Γ, a {type(p.gamma).__name__} Γ for events of shape {p.shape}")
    base = property(lambda p: p.process)
    spacing = property(lambda p: p.process.spacing, doc="The spacing of the isotropic process.")
    alpha = formula(lambda p, t: p.process.alpha(t))
    sigma = formula(lambda p, t: p.process.sigma(t))
    beta = formula(lambda p, t: p.process.beta(t))
    _time = formula(lambda p, r: p.process._time(r))

    def S(self, t: Time, /) -> Transformed:  # type: ignore[override]
        """Return sigma² Γ, batch of t's shape, in t's dtype (for a number: Γ's)."""
        return self._scaled(self.process.S, t)

    def D(self, t: Time, /) -> Transformed:  # type: ignore[override]
        """Return D_base Γ, batch of t's shape, in t's dtype (for a number: Γ's)."""
        return self._scaled(self.process.D, t)

    def whiten(self, x: Tensor) -> Tensor:
        return self._product(self.inverse_root, x)

    def unwhiten(self, x: Tensor) -> Tensor:
        return self._product(self.root, x)

    def _scaled(self, square: Callable[[Time], Tensor], t: Time) -> Transformed:
        t = t if isinstance(t, Tensor) else torch.tensor(t, dtype=self.gamma.dtype, device=self.gamma.device)
        a = square(t).sqrt()
        return Transformed(self.gamma.to(a.device, a.dtype), a)

    def _product(self, map: Diagonal | Matrix, x: Tensor) -> Tensor:
        good = tuple(check_real(x, "x").shape[max(x.ndim - len(self.shape), 0) :]) == self.shape
        require(good, f"Γ is for events of shape {self.shape}; points of shape {tuple(x.shape)} do not end in it.")
        v = x.to(wide_dtype(real_dtype(x.dtype)))
        return (map.to(v.device, v.dtype) @ v).to(real_dtype(x.dtype))


def _definite(gamma: Tensor | Covariance) -> Diagonal | Matrix:
    """Return Γ as an operator if it is symmetric and positive definite."""
    if not isinstance(gamma, Covariance):
        g = as_tensor(gamma, "Γ")
        g = g.to(wide_dtype(real_dtype(g.dtype)))
        square = g.ndim == 2 and g.shape[0] == g.shape[1]
        gamma = Matrix(g, tuple(g.shape[:1])) if square else Diagonal(g, tuple(g.shape))
    if not isinstance(gamma, Diagonal | Matrix) or gamma.batch:
        raise InputError(f"Γ must be a tensor, or a Diagonal or Matrix covariance without batch, not {gamma!r}.")
    g = gamma.entries.detach().clone()
    require(g.isfinite().all() and g.numel(), "Γ must be finite and not empty.")
    if isinstance(gamma, Diagonal):
        require(g.min() > 0, f"The variances in Γ must be positive; the smallest is {g.min().item():g}.")
        return Diagonal(g, gamma.shape)
    u, gap = torch.finfo(g.dtype).eps, (g - g.mT).abs().max().item()
    hint = "If it holds the variances of square data, pass Diagonal(gamma, shape)."
    require(gap <= 64 * u * g.abs().max(), f"Γ is not symmetric: entries across the diagonal differ by {gap:g}. {hint}")
    low, high = torch.linalg.eigvalsh((g + g.mT) / 2)[[0, -1]].tolist()
    require(low > gamma.dim * u * high, f"Γ is not positive definite: eigenvalues from {low:g} to {high:g}. {hint}")
    return Matrix((g + g.mT) / 2, gamma.shape)
